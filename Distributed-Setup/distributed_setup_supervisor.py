"""One ps and one worker, in a session of `Supervisor`, which programs used before `MonitoredTrainingSession` came.

Graph, model and data are those of distributed_setup.py, and so are the files that it writes. It
opens, keeps and closes the session in another way.
"""

import math
import time
from pathlib import Path

import numpy as np
from distributed_setup import OF_SCHEMES, build, check

from common import Scheme, main, tf
from common.cluster import membership
from common.core import doing
from common.data import datasets


def train(task, settings):
    """Trains as the worker and returns the exit status: 0, or 130 after Ctrl-C, when a checkpoint is saved.

    Args:
      task: the `common.cluster.TaskSpecDef` of the worker.
      settings: all flags as a namespace.

    Raises:
      UserError: for what one ps and one worker cannot do, and for data and model that cannot be trained.
      tf.errors.OpError: when the ps dies.
    """
    check(task, settings)
    # Imported only now: the launcher reads this file too, and does not need tensorflow.
    from common.training import EvaluationHook, Interruption, MetricsLog, build_model, last_step, updates_before, write_result

    interruption = Interruption()
    server = task.create_server()  # from here on this process and the ps can talk
    dataset = datasets.plain(datasets.load(settings.data, settings.seed), settings.run.scheme)
    model = build_model(settings, dataset)
    last = last_step(settings, dataset.num_samples)
    with tf.Graph().as_default():
        training = build(task, model, dataset, settings)
        log = MetricsLog(settings.run_dir, 0, last)
        evaluation = EvaluationHook(log, training.step, training.evaluation)
        # Supervisor itself has no way to feed local variables. The manager that it would make has one.
        manager = tf.train.SessionManager(
            local_init_op=tf.local_variables_initializer(),
            local_init_feed_dict=training.local_init_feed_dict,
            ready_op=tf.report_uninitialized_variables(),
            ready_for_local_init_op=tf.report_uninitialized_variables(tf.global_variables()),
        )
        # It initializes the variables or restores them from the newest checkpoint. When the ps dies, `run` raises and the
        # session is lost: the whole program has to begin anew.
        supervisor = tf.train.Supervisor(
            is_chief=True,
            logdir=str(Path(settings.run_dir, "checkpoints")),
            init_feed_dict=training.init_feed_dict,
            session_manager=manager,
            save_model_secs=0,  # not by itself, see below
            summary_op=None,
            summary_writer=None,
        )
        graph, trained = tf.get_default_graph(), training.trained

        def save(session):
            """Saves a checkpoint. Supervisor's own thread for it fails: in TensorFlow 2 a new thread is outside any graph."""
            with graph.as_default():
                trained.before_save(session, session.run(training.step))
                supervisor.saver.save(session, supervisor.save_path, training.step)

        with supervisor.managed_session(server.target, config=task.config()) as session:
            interruption.training_begins()
            trained.begin_run(session)
            log.last_step = last = last - updates_before(trained.samples_before, settings)
            first_time, first_step = trained.seconds, session.run(training.step)
            present = written_step = first_step
            seconds = settings.seconds or math.inf
            # It knows no hooks: everything besides training is a thread, or a part of the loop.
            supervisor.loop(settings.checkpoint_secs, save, (session,))
            supervisor.loop(1.0, evaluation.evaluate, (session,))
            written, losses = time.monotonic(), []
            while present < last and trained.seconds < seconds and not interruption.requested and not supervisor.should_stop():
                doing("running a call")  # tells the launcher so, which ends a task that gets nothing done
                one = session.run(training.one)
                present = one.steps[-1, 1]
                losses.append(one.loss)
                now = time.monotonic()
                if now - written >= 0.5 or present >= last:
                    speed = (present - written_step) * settings.batch_size / (now - written)
                    samples = int(present - first_step) * settings.batch_size
                    log.write(present, loss=float(np.mean(losses)), samples=samples, samples_per_second=speed)
                    written, written_step, losses = now, present, []
            supervisor.stop()  # the threads; raises what one of them may have met
            stop_time = trained.seconds
            save(session)  # the steps since the thread did
            if interruption.requested:
                return 130
            interruption.training_ends()
            doing("writing the result")
            evaluated = evaluation.evaluate(session)
            values, state = session.run([training.values, training.state])
    log.close()
    membership.say_done(task, server)  # the ps may exit
    model.save(values, state, Path(settings.run_dir, "model.keras"))
    updates = int(present - first_step)
    # As `common.training.result.REPORT` has it; an update is never stale, or dropped, as there is no other worker.
    report = [0, first_time, first_step, stop_time, updates * settings.batch_size, updates, 0, 0, 0]
    write_result(settings, task, [report], *evaluated, samples=trained.samples(evaluated[0]))
    return 0


SCHEME = Scheme(train=train, without=OF_SCHEMES, num_workers=1, epochs=60, batch_size=32, learning_rate=0.1)

if __name__ == "__main__":
    main(SCHEME)
