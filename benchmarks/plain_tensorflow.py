"""The plain way to train with TensorFlow's parameter servers; the schemes here are measured against it.

It is the program of the textbooks: one variable a weight, placed by `replica_device_setter`, NumPy batches through
`feed_dict`, `minimize`, `MonitoredTrainingSession`; every worker at its own pace. Model, data, cluster, evaluation and
files are those of HogWild. The comments say what the schemes do instead.
"""

from pathlib import Path

import numpy as np

from common import Scheme, UserError, main, tf
from common.data import datasets
from common.models import keras_model
from common.scheme import Rounds, RoundSize

SIZES = (64, 128, 128, 10)  # --model=mlp on --data=digits


def network(images):
    """Returns the logits `[n, 10]` of images `[n, 8, 8, 1]`; a second call uses the same variables.

    The schemes take any Keras model, and keep all of its weights in one flat variable: one message to a ps where six
    variables cost six, and an equal share of them for every ps.
    """
    hidden = tf.reshape(images, [-1, SIZES[0]])
    with tf.variable_scope("network", reuse=tf.AUTO_REUSE):
        for i, (inputs, outputs) in enumerate(zip(SIZES, SIZES[1:])):
            weights = tf.get_variable(f"weights_{i}", [inputs, outputs])
            biases = tf.get_variable(f"biases_{i}", [outputs], initializer=tf.zeros_initializer())
            hidden = tf.matmul(hidden, weights) + biases
            if outputs != SIZES[-1]:
                hidden = tf.nn.relu(hidden)
    return hidden


def mean_loss(logits, labels):
    """Returns the mean cross-entropy (scalar) of logits `[n, 10]` for labels `[n]`."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def feeds(x, y, batch_size, rng):
    """Yields shuffled batches for ever, each epoch in a new order.

    The schemes draw batches inside the graph (`common.data.Batches`): nothing is copied from Python, and a call of the
    session can train several rounds, since none of them waits for the next `feed_dict`.
    """
    order = np.empty(0, int)
    while True:
        while len(order) < batch_size:
            order = np.concatenate([order, rng.permutation(len(x))])
        batch, order = order[:batch_size], order[batch_size:]
        yield x[batch], y[batch]


def train(task, settings):
    """Trains as this worker, or in this one process when `task` is None; see `common.training.train`."""
    if (settings.model, settings.data) != ("mlp", "digits"):
        raise UserError("plain TensorFlow takes only --model=mlp and --data=digits here; the schemes take any model and data")
    if (settings.rounds_per_call or 1) > 1:
        raise UserError("--rounds_per_call must be 1 here: plain TensorFlow needs a feed_dict for every step")
    settings = settings.but(run=settings.run._replace(scheme="plain TensorFlow"))
    # Imported only now: the launcher reads this file too, and does not need tensorflow.
    from common.training import Interruption, Plan, last_step, run_worker, write_result

    interruption = Interruption()
    server = task.create_server() if task else None
    index, num_workers = (task.shard_index, task.num_workers) if task else (0, 1)
    dataset = datasets.load(settings.data)
    x_train, y_train = datasets.shard(dataset, index, num_workers)
    batches = feeds(x_train, y_train, settings.batch_size, np.random.default_rng(settings.seed + index))

    # Variables go to the ps tasks in turn, whatever their size: one ps may hold most of the weights.
    place = tf.train.replica_device_setter(task.num_ps, worker_device=task.device) if task else None
    with tf.Graph().as_default(), tf.device(place):
        tf.set_random_seed(settings.seed)
        x = tf.placeholder(tf.float32, [None, *x_train.shape[1:]])
        y = tf.placeholder(tf.int32, [None])
        loss = mean_loss(network(x), y)
        optimizer = tf.train.GradientDescentOptimizer(settings.learning_rate)
        # `minimize` reads every variable on the way to the loss and writes every one: six messages each way. A scheme says
        # both itself, `local.pull(center)` and `center.push(sgd, local.gradient)`, and there is one message each way.
        updates = optimizer.minimize(loss)
        global_step = tf.train.get_or_create_global_step()
        with tf.device(global_step.device):
            # `minimize(loss, global_step=global_step)` would count the step as well. Counted here, the steps before and after
            # the update come back in one message, and their difference is the staleness.
            pulled = global_step.read_value()
            with tf.control_dependencies([pulled, updates]):
                updated = global_step.assign_add(1, read_value=True)
            one = Rounds(updates, loss, tf.stack([[pulled, updated]]))

        def next_call(present):
            images, labels = next(batches)
            return one, {x: images, y: labels}

        logits = network(tf.constant(dataset.x_test))
        hits = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), dataset.y_test)
        accuracy = tf.reduce_mean(tf.cast(hits, tf.float32))
        evaluation = global_step, {"loss": mean_loss(logits, dataset.y_test), "accuracy": accuracy}
        last = last_step(settings, len(dataset.x_train))
        plan = Plan(
            last=last,
            step=global_step,
            next_call=next_call,
            evaluation=evaluation,
            final=tf.trainable_variables(),
            scaffold=tf.train.Scaffold(),
            size=RoundSize(batch_size=settings.batch_size),
        )
        # The main loop and the measurement are those of the schemes; the session is the textbooks'.
        outcome = run_worker(plan, task, settings, server, interruption, textbook_session)
    if outcome.evaluated:
        model = keras_model.build(settings.model, dataset)
        assert [w.shape for w in outcome.final] == model.shapes, "this is not the mlp that the schemes train"
        model.save(np.concatenate([w.ravel() for w in outcome.final]), [], Path(settings.run_dir, "model.keras"))
        more = {"parameters": model.size, "optimizer": optimizer.get_name()}
        write_result(settings, task, outcome.reports, *outcome.evaluated, **more)
    return outcome.status


def textbook_session(task, target, scaffold, checkpoint_dir, checkpoint_secs, hooks):
    """Returns a `MonitoredTrainingSession` with device filters; arguments as of `common.cluster.monitored_session`."""
    is_chief, config = task is None or task.is_master(), task.config() if task else None
    if not is_chief:
        # MonitoredTrainingSession looks every 30 s whether the chief has initialized the variables: a worker would start when
        # the others are done. Looking every 0.1 s before it does, as the schemes do, costs no rate of training.
        ready = tf.report_uninitialized_variables(tf.global_variables())
        manager = tf.train.SessionManager(ready_op=ready, recovery_wait_secs=0.1)
        manager.wait_for_session(target, config=config).close()
    return tf.train.MonitoredTrainingSession(
        target,
        is_chief,
        checkpoint_dir=checkpoint_dir,
        scaffold=scaffold,
        hooks=hooks,
        save_checkpoint_secs=checkpoint_secs,
        save_summaries_secs=None,
        save_summaries_steps=None,
        log_step_count_steps=None,
        config=config,
        save_graph_def=False,
    )


if __name__ == "__main__":
    main(Scheme(train=train, without=("window", "loss"), epochs=60, batch_size=32, learning_rate=0.1))
