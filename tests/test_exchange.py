"""All-reduce of large tensors through queues of the workers."""

import contextlib
import threading

import numpy as np
import pytest
from runs import SECONDS

from common import tf
from common.cluster.task_spec import TaskSpecDef
from common.launch import launcher
from common.scheme.exchange import _bounds, exchanged_mean

ROUNDS = 4


@pytest.fixture(scope="module")
def workers():
    """A function that returns the workers of a cluster of this size: [(task, server)]."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("TF_GRPC_REUSE_PORT", "true")

        def workers(count):
            ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in range(count + 1)]
            ps, *hosts = (f"localhost:{port}" for port in ports)
            tasks = [TaskSpecDef("worker", i, ps_hosts=[ps], worker_hosts=hosts) for i in range(count)]
            kept.append(TaskSpecDef("ps", 0, ps_hosts=[ps], worker_hosts=hosts).start_server())
            return [(task, task.start_server()) for task in tasks]

        kept: list = []
        yield workers


def means(task, server, values, found):
    """Puts the value after each round x ← mean(x · (1 + index)) into `found`, for each of the values."""
    index, count = task.shard_index, task.num_workers
    with tf.Graph().as_default() as graph, tf.device(task.device):
        every = []
        for k, value in enumerate(values):

            def one_round(i, x, kept, k=k):
                x = exchanged_mean(x * (1 + index), index, count, f"{k}")
                return i + 1, x, kept.write(i, x)

            first = tf.constant(value), tf.TensorArray(tf.float32, ROUNDS)
            _, _, kept = tf.while_loop(lambda i, *_: i < ROUNDS, one_round, [0, *first], parallel_iterations=1)
            every.append(kept.stack())
        with tf.Session(server.target, graph, config=task.config(reaches_workers=True)) as session:
            found[index] = session.run(every)


@pytest.mark.parametrize("count", [2, 3])
def test_the_mean_is_the_same_to_the_bit_on_all_workers(workers, count):
    """Of vectors that are longer and shorter than the number of workers, and of a number; in a loop of the graph."""
    rng = np.random.default_rng(0)
    found: dict[int, list] = {}
    values = [rng.normal(size=size).astype(np.float32) for size in (1000, 33, 1, ())]
    cluster = workers(count)
    threads = [threading.Thread(target=means, args=(*worker, values, found), daemon=True) for worker in cluster]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(found) == count
    for k, x in enumerate(values):
        for i in range(ROUNDS):
            x = np.mean([x * (1 + index) for index in range(count)], axis=0)
            np.testing.assert_allclose(found[0][k][i], x, rtol=1e-6)
        for index in range(1, count):
            assert (found[index][k] == found[0][k]).all()


@pytest.mark.parametrize(("size", "num_workers"), [(1, 3), (5, 3), (33, 2), (1000, 3), (25_400_000, 7)])
def test_chunks_cover_the_vector_evenly(size, num_workers):
    bounds = _bounds(size, num_workers)
    assert len(bounds) == num_workers and (bounds[0][0], bounds[-1][1]) == (0, size)
    assert all(b == c for (_, b), (c, _) in zip(bounds, bounds[1:], strict=False))
    assert all(a % 16 == 0 or a == size for a, _ in bounds)
    assert max(b - a for a, b in bounds) <= size / num_workers + 16
