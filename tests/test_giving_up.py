"""Tasks that no launcher has started, of which one dies for good."""

import contextlib
import os
import re
import signal

import by_hand
import pytest
from runs import ENDLESS, ROOT, finish, processes, read_until, result_of, send, wait_until

from common.core.checkpoints import newest_good_checkpoint
from common.launch import launcher

pytestmark = pytest.mark.cluster
LINEAR = "--data=linear", "--model=linear", "--rounds_per_call=2"  # whose graph is soon prepared
# A ps that waits two seconds for its workers when it was asked to end.
IMPATIENT = """import runpy, sys
sys.path[0] = {root!r}
from common.launch import supervisor
supervisor.STOP_SECONDS = 2
sys.argv[0] = {script!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@contextlib.contextmanager
def tasks_by_hand(run_dir, scheme, *flags, script_of_ps=None):
    """Starts a ps and two workers; gives the processes, the ps first, when both workers train."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in range(3)]
        ps, *workers = (f"127.0.0.1:{port}" for port in ports)
        alike = *flags, f"--run_dir={run_dir}", f"--ps_hosts={ps}", f"--worker_hosts={','.join(workers)}"
        environ = {**os.environ, "TF_GRPC_REUSE_PORT": "true"}  # lets the test hold the ports

        def begin(job, index, script=scheme):
            return by_hand.start(script, *alike, f"--job_name={job}", f"--task_index={index}", environ=environ)

        tasks = [begin("ps", 0, script_of_ps or scheme), *(begin("worker", i) for i in range(2))]
        for task in tasks:
            stack.callback(task.wait)
            stack.callback(task.kill)
        metrics = [run_dir / "metrics" / f"worker-{i}.jsonl" for i in range(2)]
        wait_until(tasks[1], lambda: all(path.exists() and '"samples"' in path.read_text() for path in metrics))
        yield tasks


def test_the_chief_writes_the_result_without_a_worker_that_is_gone_for_good(run_dir):
    scheme = ROOT / "HogWild" / "hogwild.py"
    with tasks_by_hand(run_dir, scheme, *LINEAR, "--give_up_secs=2", "--epochs=10", "--delays=10,200") as (ps, chief, gone):
        gone.kill()
        output = finish(chief)
        line = r"worker 1 at 127\.0\.0\.1:\d+ could not be reached for --give_up_secs=2: the result is without it\n"
        assert re.search(line, output)
        finish(ps)
    result = result_of(run_dir)
    assert (result["given_up"], result["num_workers"], len(result["samples_per_worker"])) == ([1], 1, 1)
    assert result["samples"] == result["global_steps"] * 32 > sum(result["samples_per_worker"])
    assert processes(run_dir) == []


def test_where_all_wait_for_a_worker_that_is_gone_for_good_the_run_fails(run_dir):
    """The ps ends, too, and there is a checkpoint."""
    scheme = ROOT / "Synchronous-SGD" / "synchronous_sgd.py"
    flags = *LINEAR, *ENDLESS, "--give_up_secs=2", "--checkpoint_secs=0.5"
    with tasks_by_hand(run_dir, scheme, *flags) as (ps, chief, gone):
        gone.kill()
        line = r"Synchronous-SGD: worker 1 at \S+ could not be reached for --give_up_secs=2: restart all tasks with --resume"
        assert re.search(line, finish(chief, status=1))
        finish(ps)
    assert newest_good_checkpoint(run_dir / "checkpoints").rpartition("-")[2] > "0" and not (run_dir / "result.json").exists()


def test_sigterm_ends_a_ps_whose_worker_is_gone_for_good(run_dir):
    """The chief, asked to end while it waits for that worker's report, ends without a result, and so not with 0."""
    scheme, impatient = ROOT / "HogWild" / "hogwild.py", run_dir.parent / "impatient.py"
    impatient.write_text(IMPATIENT.format(root=str(ROOT), script=str(scheme)))
    with tasks_by_hand(run_dir, scheme, *LINEAR, "--epochs=10", "--delays=10,200", script_of_ps=impatient) as (ps, chief, gone):
        gone.kill()
        read_until(chief, lambda line: "worker 0 has waited" in line and "for worker 1 at" in line)
        for job in "worker", "ps":
            send(run_dir, job, 0, signal.SIGTERM)
        finish(chief, status=130)
        assert "asked to end: waits until the workers have left, 2 s at most" in finish(ps, status=130)
    assert not (run_dir / "result.json").exists() and processes(run_dir) == []
