"""HogWild as its paper has it: threads of one process that share the parameters in memory (arXiv:1106.5730).

The update rule is the one of hogwild.py, but there is no ps, and there are no messages. `--num_threads` workers are threads of
this process, each with its own samples, local variables and rounds, and all of them read and write one vector in the memory of
this process.

What is locked, then? TensorFlow has two kinds of variables, and they differ in just this:

- A *reference variable*, the older kind, is a piece of memory. An update adds to it in place, with no lock and no copy; a
  read is a pointer to it. Two updates at the same time can lose parts of each other, and a gradient is computed from
  parameters that others change meanwhile. That is the paper's setting, and what this script makes of x̃. (The paper assumes
  that at least adding to one element is indivisible; here, as on most machines, not even that is.)
- A *resource variable*, TensorFlow's default and what a ps of this project holds, has a mutex. Every dense update takes it,
  whatever the optimizer's `use_locking` says, and first copies the vector if somebody still reads it. So no update is lost,
  and a read is a snapshot. With `--locked` this script makes x̃ such a variable, so that you can compare.

The global step is a resource variable either way: it counts every update.
"""

import concurrent.futures
import math
import threading
import time
from pathlib import Path

from hogwild import hogwild

from common import Scheme, UserError, flags, main, tf
from common.core import limits
from common.data import Batches, datasets
from common.scheme import GlobalParameters, LocalParameters

# Flags of the schemes that mean nothing here.
OF_CLUSTERS = ("launch", "num_ps", "num_workers", "job_name", "task_index", "ps_hosts", "worker_hosts", "max_restarts")


def check(settings):
    """Raises a `UserError` if there cannot be so many threads."""
    limits.check_threads(f"--num_threads={settings.num_threads} needs", settings.num_threads, "of them")


def train(task, settings):
    """Trains with `--num_threads` threads and returns the exit status: 0, or 130 when interrupted.

    Raises:
      UserError: if data and model cannot be trained.
    """
    # Imported only now, with tensorflow, which costs seconds: a bad flag is told at once.
    from common.cluster import Saver, monitored_session
    from common.core import Keeper
    from common.training import (
        EvaluationHook,
        Interruption,
        build_model,
        fed_test_set,
        updates_before,
        write_result,
    )

    interruption = Interruption()
    dataset = datasets.load(settings.data, settings.seed)
    if dataset.num_samples < settings.num_threads:
        raise UserError(
            f"{dataset.num_samples} training samples are too few for {settings.num_threads} threads: choose fewer "
            "--num_threads or more data"
        )
    built = [build_model(settings, dataset, i) for i in range(settings.num_threads)]

    with tf.Graph().as_default():
        with tf.variable_scope("", custom_getter=None if settings.locked else lock_free):
            center = GlobalParameters(built[0].initial_parameters)
        workers = [Worker(i, model, dataset, center, settings) for i, model in enumerate(built)]
        chief, last = workers[0], workers[0].log.last_step
        size = chief.calls.size
        parameters, step = center.read()
        final = parameters, chief.local.state_at(parameters)
        # A copy of a reference variable asks for its initial value, too, in case it has none yet.
        local_init_feed_dict = dict(center.init_feed_dict)
        evaluated = built[0].evaluate(*final, *fed_test_set(dataset, local_init_feed_dict))
        evaluation = EvaluationHook(chief.log, step, evaluated, settings.evaluation_secs)
        for worker in workers:
            local_init_feed_dict.update(worker.local.init_feed_dict)
        scaffold = tf.train.Scaffold(
            saver=Saver(save_relative_paths=True),
            init_feed_dict=center.init_feed_dict,
            local_init_op=tf.local_variables_initializer(),
            local_init_feed_dict=local_init_feed_dict,
        )
        checkpoints, every_secs = str(Path(settings.run_dir, "checkpoints")), settings.checkpoint_secs
        keeper = Keeper(center, checkpoints, every_secs, samples_per_update=size.samples_per_update)
        with monitored_session(None, "", scaffold, checkpoints, every_secs, [interruption, evaluation], keeper) as session:
            # Hooks are not made for several threads: these run on the plain session inside, and this one calls the hooks.
            shared = session.run_step_fn(lambda step_context: step_context.session)
            done = updates_before(session.run(keeper.samples_before), settings, size.samples_per_update)
            most_seconds = settings.seconds or math.inf
            with keeper.clock.call("first"):
                session.run(center.step)
            session.run(center.step)  # the clock does not see the calls of the threads: all seconds from now on count
            failed = threading.Event()

            def stop():
                return interruption.requested or failed.is_set() or keeper.clock.seconds() >= most_seconds

            with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
                reports = [pool.submit(worker.train, shared, last, done, stop) for worker in workers]
                ended = False
                while not ended:
                    at_end, _ = concurrent.futures.wait(reports, 1, concurrent.futures.FIRST_EXCEPTION)
                    ended = len(at_end) == len(reports)
                    if any(report.exception() for report in at_end):
                        failed.set()  # the others stop, too, and result() raises the exception
                    session.run(center.step)  # lets the session say that checkpoints cannot be written any more
            results = [report.result() for report in reports]
            if interruption.requested:
                return 130  # leaving the session saves a checkpoint
            interruption.training_ends()
            evaluated = evaluation.evaluate(session)
            (values, state), samples = session.run([final, keeper.samples])
    for worker in workers:
        worker.log.close()
    built[0].save(values, state, Path(settings.run_dir, "model.keras"))
    write_result(settings, None, results, *evaluated, samples=samples, size=size)
    return 0


def lock_free(getter, name, *arguments, **options):
    """Makes x̃ a reference variable; see the top of this file. To be the `custom_getter` of its variable scope."""
    if name == "parameters":
        options["use_resource"] = False
    return getter(name, *arguments, **options)


class Worker:
    """One thread's own: its samples, its local parameters, its rounds, and what it measures.

    Args:
      index: of this worker; worker 0 is the chief.
      model: a `common.models.Model` of its own.
      dataset: all samples; this worker takes its share.
      center: the `GlobalParameters` that all share.
      settings: all flags.
    """

    def __init__(self, index, model, dataset, center, settings):
        from common.training import MetricsHook, MetricsLog, build_calls

        self._index, self._center = index, center
        x, y, *weights = datasets.shard(dataset, index, settings.num_threads)
        name = f"batches_{index}"
        batches = Batches(x, y, settings.batch_size, settings.seed + index, name, weights[0] if weights else None)
        names = f"worker_{index}", index, settings.num_threads
        self.local = LocalParameters(center, model, batches, *names, must_be_finite=True)
        self.calls = build_calls(hogwild, center, self.local, settings, dataset.num_samples)
        self.log = MetricsLog(settings.run_dir, index, self.calls.last)
        self._metrics = MetricsHook(self.log, self.calls.size.samples_per_gradient)

    def train(self, session, last, done, stop):
        """Runs rounds up to step `last` - `done`, or until `stop()`; returns its report, as `common.training.result.REPORT`."""
        first_time, first_step = time.monotonic(), session.run(self._center.step)
        present = first_step
        while present + done < last and not stop():
            present = self._run(session, *self.calls.next_call(present + done)).steps[-1, 1]
        stop_time = time.monotonic()
        self._metrics.flush()
        return self._index, first_time, first_step, stop_time, *self._metrics.totals()

    def _run(self, session, rounds):
        """`session.run(rounds)` with its metrics, as a monitored session would do it."""
        context = tf.train.SessionRunContext(tf.train.SessionRunArgs(rounds), session)
        asked = self._metrics.before_run(context)
        with self.log.failing(lambda: session.run(self._center.step)):
            results, measured = session.run([rounds, asked.fetches])
        self._metrics.after_run(context, tf.train.SessionRunValues(measured, options=None, run_metadata=None))
        return results


if __name__ == "__main__":
    num_threads = flags.integer("num_threads", 2, "workers, each a thread of this process", least=1)
    locked = flags.boolean("locked", False, "guard the parameters with a mutex, for comparison")
    own = {"flags": [num_threads, locked], "check": check, "without": OF_CLUSTERS}
    main(Scheme(train=train, **own, epochs=60, batch_size=32, learning_rate=0.1))
