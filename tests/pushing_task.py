"""A task of the cluster in test_dynamic_sgd.py: the real update rule, but every gradient is one, so all can be accounted for.

Reads its place from TF_CONFIG. A worker makes CALLS × ROUNDS pushes and prints, as JSON: `steps`, of each push the step at its
pull and the one after it, or twice the present one if it was thrown away; `seen`, of the last push of each call the first of
these and the x̃ of its pull; at last `end`, x̃ when all had ended.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np

from common import TaskSpec, tf
from common.cluster import membership
from common.cluster.session import monitored_session
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import build_rounds
from common.scheme.steps import Step

SIZE, CALLS, ROUNDS = 5, 40, 5


class Ones(LocalParameters):
    """Local parameters whose every gradient is one, and whose x stays as it was pulled."""

    def __init__(self, center, name):
        nothing = types.SimpleNamespace(init_feed_dict={}, begin_call=lambda: None)
        super().__init__(center, types.SimpleNamespace(size=SIZE, initial_state=[]), nothing, name)

    def train(self, window, optimizer, at=None, accumulate=False):
        """Stands in for the local steps."""
        return Step((self.gradient.assign(tf.ones([SIZE]), read_value=False),), (tf.constant(0.0),))


def barrier(task, name):
    """Returns operations, to be run one after the other, whose last ends when all workers have run the first."""
    with tf.device("/job:ps/task:0"):
        here = tf.queue.FIFOQueue(100, tf.bool, [[]], shared_name=f"{name}_here")
        go = tf.queue.FIFOQueue(100, tf.bool, [[]], shared_name=f"{name}_go")
        everybody = [True] * task.num_workers
        release = [here.dequeue_many(task.num_workers), go.enqueue_many([everybody])] if task.is_master() else []
        return [here.enqueue(True), *release, go.dequeue()]


def main(checkpoints, script):
    """Runs the task; `script` holds an update rule of the same name."""
    name = Path(script).stem
    task = TaskSpec()
    server = task.create_server()
    if task.is_ps():
        return
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec and spec.loader
    scheme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scheme)
    hp = types.SimpleNamespace(window=1, learning_rate=1.0, local_optimizer="sgd", local_learning_rate=None)
    hp.staleness_threshold = 2
    center = GlobalParameters(np.zeros(SIZE, np.float32), task.num_ps, task.device_fn())
    with tf.device(task.device):
        local = Ones(center, f"worker_{task.shard_index}")
        rounds = build_rounds(getattr(scheme, name), center, local, hp, ROUNDS)
    begin, end, value = barrier(task, "begin"), barrier(task, "end"), center.read()[0]
    scaffold = tf.train.Scaffold(init_feed_dict=center.init_feed_dict)
    steps, seen = [], []
    with monitored_session(task, server.target, scaffold, checkpoints, 3600) as session:
        for operation in begin:
            session.run(operation)
        for _ in range(CALLS):
            steps += session.run(rounds).steps.tolist()
            seen.append((steps[-1][0], session.run(local.value).tolist()))
        for operation in end:
            session.run(operation)
        last = session.run(value).tolist()
    membership.say_done(task, server)
    print(json.dumps({"steps": steps, "seen": seen, "end": last}))


if __name__ == "__main__":
    with tf.Graph().as_default():
        main(*sys.argv[1:])
