"""Counts how many pulls from several ps mix versions: pieces of x̃ that have different numbers of updates in them.

    python -m common.run --num_ps=2 --num_workers=2 benchmarks/mixed_pulls.py

Each worker makes rounds of HogWild on the digits, one in each call of its session. But it adds one to every element of x̃ in
place of its gradient: so an element is the number of updates that its piece has seen.
"""

import types

import numpy as np

from common import DistributedSession, TaskSpec, tf
from common.data import Batches, datasets
from common.models import keras_model
from common.scheme import GlobalParameters, LocalParameters, build_rounds

UPDATES = 20_000  # of all workers together


def counting(center, local, hp):
    """x ← x̃;  g(x);  x̃ ← x̃ + 1."""
    yield local.pull(center)
    yield local.assign(local.vector("pulled"), local.value.read_value())
    yield local.train(1, tf.train.GradientDescentOptimizer(hp.learning_rate))
    yield center.add(tf.ones([center.size]))


def main():
    """Runs a task; worker 0 prints what it has seen."""
    task = TaskSpec()
    if task.is_ps():
        return task.create_server()
    digits = datasets.load("digits")
    model = keras_model.build("mlp", digits)
    with tf.Graph().as_default():
        center = GlobalParameters(np.zeros(model.size, np.float32), task.num_ps, task.device_fn())
        with tf.device(task.device):
            x, y = datasets.shard(digits, task.shard_index, task.num_workers)
            local = LocalParameters(center, model, Batches(x, y, 32, seed=task.shard_index), f"worker_{task.shard_index}")
            rounds = build_rounds(counting, center, local, types.SimpleNamespace(learning_rate=0.1))
            ends = tf.gather(local.vector("pulled"), [0, center.size - 1])  # of the first piece, and of the last
        with tf.device("/job:ps/task:0"):  # all begin together
            n = task.num_workers
            here = [tf.queue.FIFOQueue(n, tf.bool, [[]], shared_name=f"here_{i}") for i in range(n)]
            say, wait = [queue.enqueue(True) for queue in here], here[task.shard_index].dequeue_many(n)
        scaffold = tf.train.Scaffold(init_feed_dict=center.init_feed_dict, local_init_feed_dict=local.init_feed_dict)
        updated, apart = 0, []
        with DistributedSession(task, scaffold=scaffold) as session:
            session.run(say)
            session.run(wait)
            while updated < UPDATES:
                updated = session.run(rounds).steps[-1][1]
                first, last = session.run(ends)
                apart.append(abs(first - last))
        if task.is_master():
            mixed = np.count_nonzero(apart) / len(apart)
            print(f"{task.num_ps} ps, {task.num_workers} workers: {mixed:.0%} of {len(apart):,} pulls mix versions,", end=" ")
            print(f"up to {max(apart):.0f} updates apart")


if __name__ == "__main__":
    main()
