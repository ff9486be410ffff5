"""What the three notebooks share: a line `slope * x + intercept`, which two workers fit to their samples together.

Each notebook builds a graph of its own (between-graph replication). A variable or queue of the same name on the same ps is the
same thing for all of them.
"""

import types
from pathlib import Path

from common import tf
from common.cli import notebook
from common.cluster import membership
from common.data import datasets

PS = "/job:ps/task:0"
WORKER_1, WORKER_2, OBSERVER = range(3)  # the notebooks; the observer, which has started the ps, trains nothing


def join():
    """Returns the `LocalCluster` of the three notebooks. Its addresses are in the file cluster.json beside them."""
    return notebook.shared_cluster(Path(__file__).with_name("cluster.json"), ps=1, worker=3)


def build_global():
    """Builds what lives on the ps.

    Returns a namespace: `w`, a variable [2], slope and intercept; `step`, the global step; for each notebook `say` and `wait`,
    operations that tell it to go on, and that wait until it is told; `write` and `read`, the log of all updates.
    """
    with tf.device(PS):
        w = tf.get_variable("w", [2], initializer=tf.zeros_initializer(), use_resource=True)
        step = tf.train.get_or_create_global_step()
        signals = [tf.queue.FIFOQueue(10, tf.bool, [], shared_name=f"signal_{i}") for i in range(3)]
        log = tf.queue.FIFOQueue(10000, [tf.int64, tf.float32], [[], [2]], shared_name="log")
        return types.SimpleNamespace(
            w=w,
            step=step,
            init=tf.group(w.initializer, step.initializer),
            say=[signal.enqueue(True) for signal in signals],
            wait=[signal.dequeue().op for signal in signals],
            write=log.enqueue,
            read=log.dequeue_many,
        )


def connect(local, index):
    """Makes this kernel task `index` of the workers of `local`, and returns what belongs to it."""
    task = local.task("worker", index)
    server = task.create_server()
    with tf.Graph().as_default() as graph:
        shared = build_global()
    session = tf.Session(server.target, graph, config=task.config())
    return types.SimpleNamespace(
        local=local, task=task, server=server, graph=graph, shared=shared, session=session, run=session.run
    )


def build_update(me, learning_rate=0.05, batch_size=8):
    """Builds one update: pull w, compute the gradient of the mean squared error on a batch of this worker's samples, push it.

    Returns a dictionary: `pulled_step` and `pulled`, the global step and w that the gradient is of; `step` and `w` after it.
    """
    x, y = datasets.shard(datasets.load("linear"), me.task.index, 2)
    with me.graph.as_default():
        with tf.device(PS):
            pulled_step = me.shared.step.read_value()
        with tf.device(me.task.device):
            index = tf.random.uniform([batch_size], maxval=len(x), dtype=tf.int32, seed=me.task.index)
            with tf.control_dependencies([pulled_step]):
                pulled = me.shared.w.read_value()  # a message from the ps
            errors = pulled[0] * tf.gather(x, index) + pulled[1] - tf.gather(y, index)
            (gradient,) = tf.gradients(tf.reduce_mean(errors**2), pulled)
        with tf.device(PS):
            w = me.shared.w.assign_sub(learning_rate * gradient)  # a message to the ps
            with tf.control_dependencies([w]):
                step = me.shared.step.assign_add(1)
            with tf.control_dependencies([me.shared.write([me.task.index, w])]):
                return {"pulled_step": pulled_step, "pulled": pulled, "step": tf.identity(step), "w": tf.identity(w)}


def leave(me):
    """Says to the ps that this task needs it no more."""
    me.session.close()
    membership.say_done(me.task, me.server)
