"""A user's own program with `SemiSyncRunHook`: one task of a cluster, see `test_clusters`.

    python semi_sync_task.py JOB INDEX PS_HOST WORKER_HOSTS LOG STALENESS STEPS MILLISECONDS

Each step writes to LOG, line by line, how far this worker was ahead of the slowest when the step began.
"""

import os
import sys
import time

os.environ["TF_GRPC_REUSE_PORT"] = "true"  # lets the test hold the ports

from common import DistributedSession, TaskSpecDef, tf  # noqa: E402
from common.cluster.hooks import SemiSyncRunHook  # noqa: E402
from common.core.locks import Clocks, Lock  # noqa: E402


def main(job, index, ps, workers, log, staleness, steps, milliseconds):
    task = TaskSpecDef(job, index, ps_hosts=ps, worker_hosts=workers)
    if task.is_ps():
        return task.create_server()
    with tf.device(task.device_fn()):
        weights = tf.get_variable("weights", initializer=tf.zeros([3]), use_resource=True)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(
            tf.reduce_sum((weights - 1) ** 2), tf.train.get_or_create_global_step()
        )
        clocks = Clocks(task.num_workers, Lock(tf.train.get_global_step().device, "semi_sync"), name="semi_sync").read()
    with DistributedSession(task, hooks=[SemiSyncRunHook(index, task.num_workers, staleness)]) as session:
        for _ in range(steps):
            now, _ = session.run([clocks, train])
            log.write(f"{now[index] - now.min()}\n")
            time.sleep(milliseconds / 1000)  # a slow machine


if __name__ == "__main__":
    job, index, ps, workers, path, *numbers = sys.argv[1:]
    with open(path, "a", buffering=1) as log, tf.Graph().as_default():
        main(job, int(index), ps, workers, log, *map(int, numbers))
