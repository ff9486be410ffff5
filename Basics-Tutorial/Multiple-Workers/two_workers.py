"""The graph that the three notebooks share: a line y = w₀ x + w₁, which two workers fit to their samples together.

Each of them builds its own copy of the graph (between-graph replication). What has the same name and lives on the same ps is
the same thing in all of them.
"""

import types

from common import tf

PS = "/job:ps/task:0"
NOTEBOOKS = "worker 0", "worker 1", "ps"


def build_global():
    """Builds what lives on the ps.

    Returns a namespace: `w` [2] and `step`, two variables; `signals`, a queue for each notebook, on which it waits until
    another says that it may go on; `log`, a queue of (worker, global step, w) after each update.
    """
    with tf.device(PS):
        w = tf.get_variable("w", [2], initializer=tf.zeros_initializer(), use_resource=True)
        step = tf.train.get_or_create_global_step()
        signals = [tf.queue.FIFOQueue(10, tf.bool, [], shared_name=f"signal_{i}") for i in range(len(NOTEBOOKS))]
        log = tf.queue.FIFOQueue(10000, [tf.int64, tf.int64, tf.float32], [[], [], [2]], shared_name="log")
        return types.SimpleNamespace(
            w=w,
            step=step,
            init=tf.group(w.initializer, step.initializer),
            say=[queue.enqueue(True) for queue in signals],
            wait=[queue.dequeue().op for queue in signals],
            write=log.enqueue,
            next_update=log.dequeue(),
        )


def build_worker(task, shared, x, y, learning_rate=0.05, batch_size=8):
    """Builds what a worker runs: pull w, compute the gradient of the squared error on a batch of its own samples, push it.

    Args:
      task: this worker, a `TaskSpecDef`.
      shared: what `build_global` returned.
      x, y: this worker's samples, arrays [n, 1].

    Returns one operation's values: (global step, w before, w after).
    """
    with tf.device(task.device):
        index = tf.random.uniform([batch_size], maxval=len(x), dtype=tf.int32, seed=task.index)
        before = tf.identity(shared.w)  # the pull: a message from the ps
        loss = tf.reduce_mean((before[0] * tf.gather(x, index) + before[1] - tf.gather(y, index)) ** 2)
        (gradient,) = tf.gradients(loss, before)
    with tf.device(PS):
        after = shared.w.assign_sub(learning_rate * gradient)  # the push: a message to the ps
        with tf.control_dependencies([after]):
            step = shared.step.assign_add(1)
        with tf.control_dependencies([shared.write([task.index, step, after])]):
            return tf.identity(step), before, tf.identity(after)
