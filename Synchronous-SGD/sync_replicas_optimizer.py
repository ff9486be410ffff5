"""Synchronous SGD with TensorFlow's own `tf.train.SyncReplicasOptimizer`: here to be looked at, not to be used.

It makes x̃ ← x̃ − η (1/N) Σ g(x), over N gradients of this x̃, as `synchronous_sgd.py` does with --backup_workers=0; N is the
number of workers. But N gradients are not one of each worker:

- Every update puts N tokens into one queue for all workers, and a worker takes one for each gradient. Nothing says whose a
  token is. N more are there from the beginning (--num_tokens). So while a slow worker computes, or has not even started, a
  fast one takes its token, too, and contributes twice to an update. The slow one's gradient is then late, and dropped.
- A gradient that is dropped costs a token. When as many are lost as there were at the beginning, each worker has one, and
  from then on each contributes once. With --num_tokens=0 it is so from the first update on.
- A worker is not told whether its gradient counted.
- Each variable collects its gradients by itself, and all updates are made by the chief, in a thread of its own.
- A worker that waits for a token when the others have finished waits for ever. So here each worker that finishes adds one
  token for every worker.

Every worker writes down at which steps it gave its gradients, to `contributions/worker-N.json` in the folder of the run.
"""

import sys
import threading
import time
import types
from pathlib import Path

import numpy as np

from common import Scheme, UserError, flags, main, tf
from common.core import write_json
from common.data import datasets
from common.models import keras_model
from common.scheme import Rounds, RoundSize

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from plain_tensorflow import feeds, mean_loss, network, textbook_session


def train(task, settings):
    """Trains as this worker, or in this one process when `task` is None; see `common.training.train`.

    It differs from the plain way in the optimizer and in what makes it end: `plain_tensorflow.train` has the comments.
    """
    if (settings.model, settings.data) != ("mlp", "digits"):
        raise UserError("this script takes only --model=mlp and --data=digits; the schemes take any model and data")
    if (settings.rounds_per_call or 1) > 1:
        raise UserError("--rounds_per_call must be 1 here: it needs a feed_dict for every step")
    settings = settings.but(run=settings.run._replace(scheme="SyncReplicasOptimizer"))
    from common.training import Interruption, Plan, delay_of, last_step, run_worker, write_result

    interruption = Interruption()
    server = task.create_server() if task else None
    index, num_workers = (task.shard_index, task.num_workers) if task else (0, 1)
    dataset = datasets.load(settings.data)
    x_train, y_train = datasets.shard(dataset, index, num_workers)
    batches = feeds(x_train, y_train, settings.batch_size, np.random.default_rng(settings.seed + index))
    last = last_step(settings, len(dataset.x_train), num_workers * settings.batch_size)
    delay = delay_of(settings.delays, index)

    place = tf.train.replica_device_setter(task.num_ps, worker_device=task.device) if task else None
    with tf.Graph().as_default(), tf.device(place):
        tf.set_random_seed(settings.seed)
        x = tf.placeholder(tf.float32, [None, *x_train.shape[1:]])
        y = tf.placeholder(tf.int32, [None])
        slept = [tf.py_func(lambda: time.sleep(delay), [], [])] if delay else []
        with tf.control_dependencies(slept):  # the variables are read meanwhile
            images = tf.identity(x)
        loss = mean_loss(network(images), y)
        global_step = tf.train.get_or_create_global_step()
        sgd = tf.train.GradientDescentOptimizer(settings.learning_rate)
        optimizer = tf.train.SyncReplicasOptimizer(sgd, num_workers, num_workers)
        known = tf.placeholder(tf.int64, [])  # the step that this worker's token allows it to give gradients at
        with tf.device(global_step.device), tf.control_dependencies([loss]):
            present = global_step.read_value()  # if that is later, they are dropped
        gradients = []
        for gradient, variable in optimizer.compute_gradients(loss):
            with tf.device(variable.device), tf.control_dependencies([present]):
                gradients.append((tf.identity(gradient), variable))
        token = optimizer.apply_gradients(gradients, global_step)  # gives them, and waits for the next token
        [local_step] = tf.local_variables()  # the token that this worker has
        steps: list[int] = []  # at which it gave its gradients, and is to give the next
        noted = tf.py_func(steps.append, [token], [])
        counts = tf.cast(present <= known, tf.int64)
        # The token ends the loop: a worker that gave gradients for the last update does not know yet that it is made.
        one = Rounds(noted, loss, tf.stack([[known - counts, known]]), token >= last)

        def next_call(present):
            images, labels = next(batches)
            return one, {x: images, y: labels, known: steps[-1]}

        # Tokens of the last step for all, also for those that would wait for ever.
        with tf.device(global_step.device):
            queue = tf.queue.FIFOQueue(-1, tf.int64, [[]], shared_name="sync_token_q")
            end = [queue.enqueue_many(tf.fill([num_workers], tf.constant(last, tf.int64)))]
        nothing = dict.fromkeys(("behind", "vote", "left", "come", "go"))
        waits = types.SimpleNamespace(enter=[], leave=end, release=end, **nothing)

        logits = network(tf.constant(dataset.x_test))
        hits = tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), dataset.y_test)
        accuracy = tf.reduce_mean(tf.cast(hits, tf.float32))
        evaluation = global_step, {"loss": mean_loss(logits, dataset.y_test), "accuracy": accuracy}
        final = tf.trainable_variables()
        size = RoundSize(batch_size=settings.batch_size, gradients_per_update=num_workers)
        plan = Plan(
            last=last,
            step=global_step,
            next_call=next_call,
            evaluation=evaluation,
            final=final,
            scaffold=tf.train.Scaffold(),
            size=size,
            waits=waits,
        )

        def open_session(task, target, scaffold, checkpoint_dir, checkpoint_secs, hooks):
            hooks = [*hooks, optimizer.make_session_run_hook(index == 0, settings.num_tokens)]
            if index == 0:
                creator = tf.train.ChiefSessionCreator(scaffold, target, task and task.config(), checkpoint_dir)
                saver = tf.train.CheckpointSaverHook(checkpoint_dir, checkpoint_secs, scaffold=scaffold, save_graph_def=False)
                # By default it waits two minutes at the end for its thread, to which no worker gives gradients any more.
                session = tf.train.MonitoredSession(creator, [*hooks, saver], stop_grace_period_secs=0.1)
            else:
                session = textbook_session(task, target, scaffold, checkpoint_dir, checkpoint_secs, hooks)
            steps.append(session.run(local_step))
            return session

        # That thread ends by an error when its session is closed, which is no news.
        threading.excepthook = lambda e: isinstance(e.exc_value, tf.errors.CancelledError) or threading.__excepthook__(e)
        outcome = run_worker(plan, task, settings, server, interruption, open_session)
    path = Path(settings.run_dir, "contributions", f"worker-{index}.json")
    path.parent.mkdir(exist_ok=True)
    write_json(path, [int(step) for step in steps[:-1]])
    if outcome.evaluated:
        model = keras_model.build(settings.model, dataset)
        model.save(np.concatenate([w.ravel() for w in outcome.final]), [], Path(settings.run_dir, "model.keras"))
        more = {"size": size, "parameters": model.size, "optimizer": sgd.get_name()}
        write_result(settings, task, outcome.reports, *outcome.evaluated, **more)
    return outcome.status


SCHEME = Scheme(
    train=train,
    pace="together",
    flags=[flags.integer("num_tokens", -1, "initial number of tokens; -1: one for each worker", least=-1, most=2**20)],
    without=("window", "loss"),
    epochs=60,
    batch_size=32,
    learning_rate=0.2,
)

if __name__ == "__main__":
    main(SCHEME)
