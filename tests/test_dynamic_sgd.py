"""Dynamic-SGD and Ringmaster-ASGD count staleness, and act on it, exactly: four workers as processes, on one ps and on two."""

import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import CHECKOUT
from runs import SECONDS

from common import launch

NUM_WORKERS = 4


def outputs(num_ps, script, tmp_path):
    """Returns what the workers of pushing_task.py print."""
    jobs = [("ps", i) for i in range(num_ps)] + [("worker", i) for i in range(NUM_WORKERS)]
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launch.reserved_port()).getsockname()[1] for _ in jobs]
        hosts: dict[str, list[str]] = {"ps": [], "worker": []}
        for (job, _), port in zip(jobs, ports, strict=True):
            hosts[job].append(f"localhost:{port}")
        processes = []
        for job, index in jobs:
            config = json.dumps({"cluster": hosts, "task": {"type": job, "index": index}})
            command = [sys.executable, str(CHECKOUT / "tests" / "pushing_task.py"), str(tmp_path / "checkpoints"), str(script)]
            environ = {**os.environ, "TF_CONFIG": config, "TF_GRPC_REUSE_PORT": "true"}
            with open(tmp_path / f"{job}-{index}.log", "wb") as log:
                process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=log, text=True)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
        for (job, index), process in zip(jobs, processes, strict=True):
            assert process.returncode == 0, (tmp_path / f"{job}-{index}.log").read_text()
    return [json.loads(text) for text in printed[num_ps:]]


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
