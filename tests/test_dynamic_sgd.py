"""Dynamic-SGD and Ringmaster-ASGD count staleness, and act on it, exactly: four workers as processes, on one ps and on two."""

import contextlib
import json
import queue
import sys

import numpy as np
import pytest
from conftest import CHECKOUT
from runs import SECONDS

from common.launch import launcher
from common.launch.fork_server import EARLY, ForkServer

NUM_WORKERS = 4


def outputs(num_ps, script, tmp_path):
    """Returns what the workers of pushing_task.py print."""
    jobs = [("ps", i) for i in range(num_ps)] + [("worker", i) for i in range(NUM_WORKERS)]
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in jobs]
        hosts: dict[str, list[str]] = {"ps": [], "worker": []}
        for (job, _), port in zip(jobs, ports, strict=True):
            hosts[job].append(f"localhost:{port}")
        command = [sys.executable, str(CHECKOUT / "tests" / "pushing_task.py"), str(tmp_path / "checkpoints"), str(script)]
        ends: queue.Queue = queue.Queue()
        logs = {f"{job} {index}": tmp_path / f"{job}-{index}.log" for job, index in jobs}
        server = stack.enter_context(ForkServer({"TF_GRPC_REUSE_PORT": "true"}, None, is_isolated=False))
        server.listen(lambda *end: ends.put(end), lambda *said: None)
        for job, index in jobs:
            config = json.dumps({"cluster": hosts, "task": {"type": job, "index": index}})
            server.start(f"{job} {index}", command, str(logs[f"{job} {index}"]), {"TF_CONFIG": config})
        for _ in jobs:
            name, status = ends.get(timeout=SECONDS)
            assert status in (0, EARLY), logs[name].read_text()  # with 0, but no task says here that its work is done
    return [json.loads(log.read_text().splitlines()[-1]) for log in list(logs.values())[num_ps:]]


@pytest.mark.cluster
@pytest.mark.parametrize("num_ps", [1, 2])
def test_no_update_is_lost_or_counted_twice(num_ps, tmp_path):
    """Every gradient is 1 and so is the learning rate: x̃ is minus the sum of the 1/(τ + 1) of all updates in it."""
    workers = outputs(num_ps, CHECKOUT / "Dynamic-SGD" / "dynamic_sgd.py", tmp_path)
    log = sorted((after, before, worker) for worker, output in enumerate(workers) for before, after in output["steps"])
    assert [after for after, _, _ in log] == list(range(1, 1 + len(log)))  # each counted once
    assert len(log) == NUM_WORKERS * 200

    # Staleness: what the log has between this worker's pull and its push, none of it its own.
    scales = np.zeros(len(log) + 1)
    for after, before, worker in log:
        between = [other for update, _, other in log[before : after - 1]]
        assert worker not in between
        scales[after] = 1 / (len(between) + 1)
    assert (scales[1:] < 1).sum() > 10  # they did get in each other's way

    # What every worker saw of x̃, in all of its pieces, is what the updates up to that step add up to.
    x = -np.cumsum(scales)
    for output in workers:
        for step, seen in output["seen"]:
            np.testing.assert_allclose(seen, x[step], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(output["end"], x[-1], rtol=1e-5)


@pytest.mark.cluster
def test_a_stale_push_is_thrown_away_on_all_ps_or_on_none(tmp_path):
    """Ringmaster-ASGD with R = 2. Every gradient is 1 and so is the learning rate: x̃ is minus the number of updates in it."""
    workers = outputs(2, CHECKOUT / "Ringmaster-ASGD" / "ringmaster_asgd.py", tmp_path)
    log = [(after, before) for output in workers for before, after in output["steps"]]
    assert len(log) == NUM_WORKERS * 200
    made = sorted((after, before) for after, before in log if after > before)
    assert [after for after, _ in made] == list(range(1, 1 + len(made)))  # each counted once
    assert 10 < len(made) < len(log) - 10
    assert {after - before - 1 for after, before in made} == {0, 1}
    for output in workers:
        for (step, seen), (before, after) in zip(output["seen"], output["steps"][4::5], strict=True):
            assert len(set(seen)) == 1  # a pull sees no half of a push
            if after > before:
                assert seen[0] == -step
        assert output["end"] == [-len(made)] * 5
