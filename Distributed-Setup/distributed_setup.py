"""One ps and one worker, in a `MonitoredTrainingSession`. It spells out what `common.training.train` does for the schemes.

The ps keeps the weights, and applies the gradients that it gets. The worker reads them, computes a gradient and sends it back.
`main` has read from the flags which of the two this process is; a ps is served by `common.cluster.serve` until the worker
says that it is done, and a worker goes through `train` below.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import Scheme, UserError, main, tf
from common.cluster import membership
from common.core import doing
from common.data import Batches, datasets
from common.scheme import Rounds

# Flags of the schemes that mean nothing here: this trains one step a call, and evaluates each second.
OF_SCHEMES = ("window", "rounds_per_call", "evaluation_secs")


class Training(NamedTuple):
    """What `build` has put into the graph."""

    weights: list[Any]  # one global variable a weight of the model, on the ps
    state: list[Any]  # local variables: what the model keeps but does not train
    step: Any  # the global step, on the ps
    one: Rounds  # to fetch for one step of SGD
    values: Any  # float32 [size]: all weights, one after the other
    evaluation: dict  # loss and metrics on the test set, by name
    trained: Any  # a `common.core.Trained`: seconds and samples of all runs, which checkpoints hold, too
    init_feed_dict: dict  # initial values of global variables
    local_init_feed_dict: dict  # and of local ones


def check(task, settings):
    """Raises a `UserError` where flags ask for more than one ps and one worker can do."""
    if task is None:
        raise UserError("a ps and a worker are needed: --launch starts both; Non-Distributed-Setup trains in one process")
    if task.num_workers > 1:
        raise UserError(f"this program takes one worker, not {task.num_workers}; HogWild takes any number")


def variable(name, value, feeds, **more):
    """Returns a variable that begins as the array `value`, which is fed when it is initialized, as `feeds` is told.

    As a constant it would be part of the graph, travel with it, and break it at 2 GB.
    """
    feed = tf.placeholder(value.dtype, value.shape)
    feeds[feed] = value
    return tf.get_variable(name, initializer=feed, use_resource=True, **more)


def local_variable(name, value, feeds):
    """The same for a variable that is this worker's own: initialized in every session anew, in no checkpoint."""
    return variable(name, value, feeds, trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES])


def build(task, model, dataset, settings):
    """Builds the worker's graph, parts of which run on the ps, and returns it as `Training`.

    Args:
      task: the `common.cluster.TaskSpecDef` of this worker.
      model: a `common.models.Model`.
      dataset: a `common.data.Data`.
      settings: all flags as a namespace.
    """
    from common.core import Trained  # only now, as in `train`

    global_feeds: dict = {}
    local_feeds: dict = {}
    pieces = np.split(model.initial_parameters, np.cumsum(model.sizes)[:-1])
    with tf.device(task.device_fn()):  # replica_device_setter: variables go to the ps tasks in turn
        weights = [
            variable(f"weight_{i}", piece.reshape(shape), global_feeds)
            for i, (piece, shape) in enumerate(zip(pieces, model.shapes))
        ]
        step = tf.train.get_or_create_global_step()
    with tf.device(task.device):
        # The samples stay with the worker; a batch is drawn in the graph.
        batches = Batches(dataset.x_train, dataset.y_train, settings.batch_size, settings.seed)
        local_feeds.update(batches.init_feed_dict)
        state = [local_variable(f"state_{i}", value, local_feeds) for i, value in enumerate(model.initial_state)]

        # Every read of a weight is a message from the ps, every update one to it.
        x, y = batches.samples(batches.next(1)[0])
        loss, new_state = model.loss([w.read_value() for w in weights], [v.read_value() for v in state], x, y)
        sgd = tf.train.GradientDescentOptimizer(settings.learning_rate)
        updates = sgd.minimize(loss, global_step=step, var_list=weights)
        with tf.device(step.device), tf.control_dependencies([updates]):
            updated = step.read_value()
            steps = tf.stack([[updated - 1, updated]])  # before and after: there is no other worker
        assigned = [v.assign(value, read_value=False) for v, value in zip(state, new_state)]
        one = Rounds([updates, *assigned], loss, steps)

        values = tf.concat([tf.reshape(w.read_value(), [-1]) for w in weights], axis=0)
        x_test = local_variable("x_test", dataset.x_test, local_feeds)
        y_test = local_variable("y_test", dataset.y_test, local_feeds)
        evaluation = model.evaluate(values, [v.read_value() for v in state], x_test, y_test)
    trained = Trained(step, settings.batch_size)
    return Training(weights, state, step, one, values, evaluation, trained, global_feeds, local_feeds)


def train(task, settings):
    """Trains as the worker and returns the exit status: 0, or 130 after Ctrl-C, when a checkpoint is saved.

    Args:
      task: the `common.cluster.TaskSpecDef` of the worker.
      settings: all flags as a namespace.

    Raises:
      UserError: for what one ps and one worker cannot do, and for data and model that cannot be trained.
    """
    check(task, settings)
    # Imported only now: the launcher reads this file too, and does not need tensorflow.
    from common.training import (
        EvaluationHook,
        Interruption,
        MetricsHook,
        MetricsLog,
        build_model,
        last_step,
        updates_before,
        write_result,
    )

    interruption = Interruption()
    server = task.create_server()  # from here on this process and the ps can talk
    dataset = datasets.plain(datasets.load(settings.data, settings.seed), settings.run.scheme)
    model = build_model(settings, dataset)
    last = last_step(settings, dataset.num_samples)
    with tf.Graph().as_default():
        training = build(task, model, dataset, settings)
        log = MetricsLog(settings.run_dir, 0, last)
        checkpoints, trained = str(Path(settings.run_dir, "checkpoints")), training.trained
        # Everything besides training is a hook: the session calls it before and after every `run`.
        metrics = MetricsHook(log, settings.batch_size)
        evaluation = EvaluationHook(log, training.step, training.evaluation)
        scaffold = tf.train.Scaffold(
            init_feed_dict=training.init_feed_dict,
            local_init_op=tf.local_variables_initializer(),
            local_init_feed_dict=training.local_init_feed_dict,
        )
        saving = tf.train.CheckpointSaverHook(
            checkpoints, settings.checkpoint_secs, scaffold=scaffold, listeners=[trained], save_graph_def=False
        )
        # It initializes the variables or restores them from the newest checkpoint; `saving` saves checkpoints, also at the
        # start and on the way out. When the ps dies, it waits for the ps to be back, restores, and calls `run` again.
        with tf.train.MonitoredTrainingSession(
            server.target,
            is_chief=True,
            checkpoint_dir=checkpoints,
            scaffold=scaffold,
            hooks=[metrics, evaluation, saving],
            save_checkpoint_secs=None,
            save_summaries_secs=None,
            save_summaries_steps=None,
            log_step_count_steps=None,
            config=task.config(),
        ) as session:
            interruption.training_begins()
            trained.begin_run(session)
            log.last_step = last = last - updates_before(trained.samples_before, settings)
            first_time, first_step = trained.seconds, session.run(training.step)
            present, seconds = first_step, settings.seconds or math.inf
            while present < last and trained.seconds < seconds and not interruption.requested:
                doing("running a call")  # tells the launcher so, which ends a task that gets nothing done
                present = session.run(training.one).steps[-1, 1]
            if interruption.requested:
                return 130
            stop_time = trained.seconds
            interruption.training_ends()
            doing("writing the result")
            metrics.flush()
            evaluated = evaluation.evaluate(session)
            values, state = session.run([training.values, training.state])
    log.close()
    membership.say_done(task, server)  # the ps may exit
    model.save(values, state, Path(settings.run_dir, "model.keras"))
    report = [0, first_time, first_step, stop_time, *metrics.totals()]  # as `common.training.result.REPORT` has it
    write_result(settings, task, [report], *evaluated, samples=trained.samples(evaluated[0]))
    return 0


SCHEME = Scheme(train=train, without=OF_SCHEMES, num_workers=1, epochs=60, batch_size=32, learning_rate=0.1)

if __name__ == "__main__":
    main(SCHEME)
