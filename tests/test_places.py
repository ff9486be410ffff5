"""Workers that join and leave a run that was begun with --max_workers, and what is refused."""

import contextlib
import json
import os
import queue
import signal
import socket
import time
import types
from typing import Any

import by_hand
import pytest
from runs import (
    ENDLESS,
    HOGWILD,
    ROOT,
    SECONDS,
    finish,
    metrics_of,
    processes,
    read_until,
    result_of,
    send,
    start,
    updates_of,
    wait_until,
    wait_until_gone,
)
from runs import run as run_to_the_end

from common import tf
from common.core.run_facts import RunFacts
from common.launch import control, launcher, supervisor
from common.launch.fork_server import LEFT
from common.launch.task import Task

# --- Who asks, and who answers ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """The folder of a run, with a path that is too long for the name of a socket."""
    path = tmp_path / ("long" * 30)
    path.mkdir()
    return path


def test_request_and_answer(folder):
    asked: list = []

    def hear(request):
        asked.append((request.what, request.count, request.version))
        request.answer("so be it")

    with control.heard(folder, hear):
        assert os.stat(folder / "control").st_mode & 0o777 == 0o600
        assert control.join(folder, 3) == control.leave(folder) == "so be it"
    assert asked == [("join", 3, control.version(control.COMMON)), ("leave", 1, control.version(control.COMMON))]
    assert not (folder / "control").exists()


def test_folder_in_which_no_socket_can_be_made(folder, user_error):
    (folder / "control").mkdir()
    with user_error(f"{folder}/control cannot be made: ", "need a Unix socket"), control.heard(folder, lambda request: None):
        pass


def test_refusal_is_an_error(folder, user_error):
    with control.heard(folder, lambda request: request.answer("not now", is_error=True)), user_error("not now"):
        control.join(folder)


def test_nobody_listens(folder, user_error):
    """No launcher, one that was killed, one that ends before it answers; and no folder."""
    with user_error("no run with --max_workers is training in", "it has ended"):
        control.join(folder)
    with control._named(folder) as path, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)  # stays when this is closed
    with user_error("no run with --max_workers is training in", "it has ended"):
        control.join(folder)
    with user_error("there is no folder"):
        control.join(folder / "none")
    with control.heard(folder, lambda request: request.answer("one that takes over")):
        assert control.join(folder) == "one that takes over"


NO_REQUESTS = ["", "{", "[]", '{"what": "join"}', '{"what": "join", "count": "x", "version": ""}', "9" * 900]
NO_REQUESTS += [f'{{"what": "join", "count": 1, "version": "", "hosts": {hosts}}}' for hosts in ("[1]", "1")]


@pytest.mark.parametrize("text", NO_REQUESTS)
def test_what_is_no_request_is_not_heard(folder, text):
    with control.heard(folder, lambda request: pytest.fail("heard it")):
        with control._named(folder) as path, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            connection.connect(path)
            connection.sendall(text.encode() + b"\n")
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""


def test_version_tells_files_from_others(tmp_path):
    (tmp_path / "a.py").write_text("1")
    before = control.version(tmp_path)
    (tmp_path / "b.txt").write_text("2")
    assert control.version(tmp_path) == before
    (tmp_path / "a.py").write_text("2")
    assert control.version(tmp_path) != before


# --- The launcher -----------------------------------------------------------------------------------------------------------


class Server:
    """Stands in for the `ForkServer`: notes what it is asked for."""

    def __init__(self):
        self.asked: list = []

    def start(self, key, command, log, environ):
        self.asked.append(("start", key))

    def signal(self, key, number):
        self.asked.append(("signal", key, number))


@pytest.fixture
def run(tmp_path):
    """A `Supervisor` of four places, of which workers 0 and 1 have taken theirs; its `server`, and what it `said`."""
    tasks = [Task("ps", 0, [], str(tmp_path)), *(Task("worker", i, [], str(tmp_path)) for i in range(4))]
    for task in tasks[3:]:
        task.status, task.has_left = 0, True
    settings = types.SimpleNamespace(run=RunFacts("HogWild"))
    said: list = []
    run: Any = supervisor.Supervisor(tasks, Server(), settings, said.append)
    run.server, run.said = run._server, said
    run.code = control.code_of(ROOT / "HogWild")
    return run


def answered(run, what, count, version=None, **more):
    """What a run answers: a line, and whether it is an error."""
    asked = {"what": what, "count": count, "version": version or control.version(control.COMMON), **more}
    request = control.Request(json.dumps(asked))
    run._answer(request)
    answer = request.wait()
    return answer["line"], answer["is_error"]


def test_workers_take_places_and_leave_them(run):
    assert answered(run, "join", 1) == ("worker 2 joins", False)
    assert answered(run, "join", 1) == ("worker 3 joins", False)
    assert answered(run, "leave", 2) == ("worker 2, worker 3 are asked to leave", False)
    assert answered(run, "leave", 1) == ("worker 1 is asked to leave", False)
    started = [("start", f"worker {i}") for i in (2, 3)]
    assert run.server.asked == started + [("signal", f"worker {i}", signal.SIGTERM) for i in (2, 3, 1)]
    assert run.said[:2] == ["worker 2 joins", "worker 3 joins"]
    assert run.said[2:] == ["worker 2, worker 3 are asked to leave", "worker 1 is asked to leave"]
    run._workers[1].end(LEFT)
    assert answered(run, "join", 1) == ("worker 1 joins", False)


@pytest.mark.parametrize(
    "what, count, words",
    [
        ("join", 3, "2 of the 4 places of the run are free, too few for 3"),
        ("leave", 2, "the run has 2 workers, of which worker 0 has to stay"),
    ],
)
def test_what_cannot_be_is_a_line(run, what, count, words):
    line, is_error = answered(run, what, count)
    assert is_error and line.startswith(words) and "\n" not in line
    assert run.server.asked == run.said == []


def test_the_last_worker_cannot_leave(run):
    answered(run, "leave", 1)
    assert answered(run, "leave", 1)[0].startswith("the run has 1 worker, of which worker 0 has to stay")


def test_nobody_joins_a_run_that_ends(run):
    for _ in range(2):
        run._chief.status = 0 if run._is_stopping else None
        run._is_stopping = not run._is_stopping
        assert answered(run, "join", 1) == ("the run is ending, so no worker can join", True)
        assert answered(run, "leave", 1) == ("the run is ending, and all its workers with it", True)


def test_nobody_joins_with_other_code(run, tmp_path):
    refused = ("the code has changed since the run began, or is another checkout's: join with the code of the run", True)
    assert answered(run, "join", 1, "another") == refused
    (tmp_path / "scheme.py").write_text("1")
    run.code = control.code_of(tmp_path)
    (tmp_path / "scheme.py").write_text("2")
    assert answered(run, "join", 1) == refused
    assert answered(run, "leave", 1, "another") == ("worker 1 is asked to leave", False)


def test_nobody_joins_from_another_machine_a_run_on_this_one(run):
    line = "the run is on one machine: `bash common/join.sh RUN COUNT` lets workers join"
    assert answered(run, "join", 1, hosts=[["a:1", "/folder"]]) == (line, True)


def test_a_request_is_answered_by_the_main_thread(run):
    """Also while it waits for something else."""
    request = control.Request(json.dumps({"what": "leave", "count": 9, "version": ""}))
    run.hear_request(request)
    run._looked = time.monotonic()
    assert run._next_end(time.monotonic()) is None
    assert request.wait()["is_error"]
    with pytest.raises(queue.Empty):
        request._answers.get_nowait()


# --- A whole run ------------------------------------------------------------------------------------------------------------


def wait_until_it_trains(process, run_dir, worker, times=0):
    """Waits until it has trained since it joined so many times."""

    def trains():
        lines = metrics_of(run_dir, worker)
        came = [i for i, line in enumerate(lines) if "came" in line]
        return len(came) >= times and any("samples" in line for line in lines[came[times - 1] if times else 0 :])

    wait_until(process, trains)


def wait_until_it_counts(process, run_dir, n):
    """Waits until a checkpoint of `counting_task.py` says that there are n workers."""

    def counts():
        with contextlib.suppress(tf.errors.OpError, ValueError):  # it may be removed meanwhile
            newest = tf.train.latest_checkpoint(run_dir / "checkpoints")
            return newest is not None and set(tf.train.load_variable(newest, "parameters")) == {n}
        return False

    wait_until(process, counts)


STOP = """
from pathlib import Path


def stop(step, metrics):
    return Path(__file__).with_name("stop").exists()
"""


@pytest.fixture
def stopped_by(tmp_path):
    """Flags of a run that ends when the other that this gives, a function, is called."""
    (tmp_path / "callback.py").write_text(STOP)
    flags = [*ENDLESS, "--evaluation_secs=0.2", f"--callback={tmp_path / 'callback.py'}:stop"]
    return flags, (tmp_path / "stop").touch


@pytest.mark.cluster
def test_every_worker_knows_how_many_there_are(run_dir):
    """One comes, one is killed and comes again, one leaves, and the ps forgets all. All tasks die with their launcher."""
    flags = [*ENDLESS, "--num_workers=2", "--max_workers=4", "--delays=10,10,10", "--checkpoint_secs=0.5"]
    process = start(run_dir, "--launch", *flags, script=ROOT / "tests" / "counting_task.py")
    wait_until_it_counts(process, run_dir, 2)
    control.join(run_dir)
    wait_until_it_counts(process, run_dir, 3)
    send(run_dir, "worker", 1, signal.SIGKILL)
    read_until(process, lambda line: "worker 1 was killed" in line)
    control.leave(run_dir)  # worker 2
    read_until(process, lambda line: line == "the place of worker 2 is free\n")
    wait_until_it_counts(process, run_dir, 2)
    control.join(run_dir, 2)
    wait_until_it_counts(process, run_dir, 4)
    control.leave(run_dir)
    wait_until_it_counts(process, run_dir, 3)
    send(run_dir, "ps", 0, signal.SIGKILL)
    read_until(process, lambda line: line.startswith("ps 0 was killed"))
    control.leave(run_dir)
    wait_until_it_counts(process, run_dir, 2)
    read_until(process, lambda line: line == "the place of worker 2 is free\n")  # its process has ended
    tasks = set(processes(run_dir)) - {process.pid}
    process.kill()
    process.communicate(timeout=SECONDS)
    assert len(tasks) == 4  # the ps, two workers, and the process that starts them
    assert wait_until_gone(tasks) == []


def script_of(folder):
    return ROOT / folder / f"{folder.lower().replace('-', '_')}.py"


@pytest.mark.cluster
@pytest.mark.parametrize("folder", ["Dynamic-SGD", "Synchronous-SGD"])
def test_worker_takes_a_place_leaves_it_and_takes_it_again(run_dir, stopped_by, folder):
    """No update is lost."""
    flags, stop = stopped_by
    flags = [*flags, "--num_workers=1", "--max_workers=2", "--num_ps=2", "--delays=10,10"]
    process = start(run_dir, "--launch", *flags, script=script_of(folder))
    wait_until_it_trains(process, run_dir, 0)
    for times in 1, 2:
        assert control.join(run_dir) == "worker 1 joins"
        wait_until_it_trains(process, run_dir, 1, times)
        if times == 1:
            assert control.leave(run_dir) == "worker 1 is asked to leave"
            said = read_until(process, lambda line: "has left after" in line)
            assert said.startswith("worker 1 ") and "the others train its samples" in said
            read_until(process, lambda line: line == "the place of worker 1 is free\n")
            wait_until_gone(processes(run_dir, "--job_name=worker", "--task_index=1"))
    stop()
    finish(process)
    result = result_of(run_dir)
    gradients = updates_of(run_dir, 0) + updates_of(run_dir, 1) + result["gradients_dropped"]
    if folder == "Synchronous-SGD":  # where two are there, an update is of two gradients; of the last, one may be missing
        assert 32 * gradients - result["samples"] in (0, 32) and result["global_steps"] < gradients
    else:
        assert gradients == result["global_steps"] and result["samples"] == 32 * gradients
    assert result["restarts"] == 0
    assert result["num_workers"] == 2 and result["left"] == []  # it is back
    assert [sum(line.get("came", False) for line in metrics_of(run_dir, worker)) for worker in range(2)] == [0, 2]
    assert processes(run_dir) == [] and not (run_dir / "control").exists()


@pytest.mark.cluster
@pytest.mark.parametrize("folder", ["Semi-Synchronous-SGD", "Synchronous-SGD"])
def test_workers_that_wait_for_others_come_go_and_die(run_dir, stopped_by, folder):
    """The others wait for a worker that was killed, until it is back, not for one that has left; also after a ps has died."""
    flags, stop = stopped_by
    flags = [*flags, "--num_workers=2", "--max_workers=3", "--delays=5,5,5", "--checkpoint_secs=0.5"]
    process = start(run_dir, "--launch", *flags, script=script_of(folder))

    def goes_on():
        before = updates_of(run_dir, 0)
        wait_until(process, lambda: updates_of(run_dir, 0) > before + 30)

    goes_on()
    control.join(run_dir)
    wait_until_it_trains(process, run_dir, 2, 1)
    send(run_dir, "worker", 2, signal.SIGKILL)
    read_until(process, lambda line: "worker 2 was killed" in line)
    goes_on()
    control.leave(run_dir, 2)
    for _ in range(2):
        read_until(process, lambda line: "is free" in line)
    goes_on()  # alone
    send(run_dir, "ps", 0, signal.SIGKILL)
    read_until(process, lambda line: line.startswith("ps 0 was killed"))
    goes_on()
    control.join(run_dir)
    wait_until_it_trains(process, run_dir, 1, 1)
    stop()
    finish(process)
    result = result_of(run_dir)
    assert result["restarts"] == 2 and [left["worker"] for left in result["left"]] == [2]
    assert result["test_accuracy"] > 0.9 and processes(run_dir) == []


@pytest.mark.cluster
def test_epochs_are_samples_where_nobody_knows_how_many_updates_they_take(run_dir):
    flags = ["--num_workers=2", "--max_workers=3", "--epochs=5"]
    run_to_the_end(run_dir, *flags, script=script_of("Synchronous-SGD"))
    result = result_of(run_dir)
    needed = 5 * 1438
    assert result["samples"] == 64 * result["global_steps"] + 32 * result["gradients_dropped"]
    assert needed <= 64 * result["global_steps"] < needed + 64


@pytest.mark.cluster
def test_who_is_asked_to_end_waits_for_no_place_that_nobody_has(run_dir):
    """All tasks get SIGTERM, as by a scheduler that ends them: none has to be killed. Nothing has the address of worker 1."""
    with contextlib.ExitStack() as stack:
        ps, worker = (f"127.0.0.1:{stack.enter_context(launcher.reserved_port()).getsockname()[1]}" for _ in range(2))
        flags = [f"--ps_hosts={ps}", f"--worker_hosts={worker},nobody.invalid:2222", "--num_workers=1", "--max_workers=2"]
        flags += ["--task_index=0", *ENDLESS, "--checkpoint_secs=1000", f"--run_dir={run_dir}"]
        environ = {**os.environ, "TF_GRPC_REUSE_PORT": "true"}
        tasks = [by_hand.start(HOGWILD, *flags, f"--job_name={job}", environ=environ) for job in ("ps", "worker")]
        wait_until_it_trains(tasks[1], run_dir, 0)
        for task in tasks:
            task.send_signal(signal.SIGTERM)
        for task in reversed(tasks):
            finish(task, status=130)
    assert list(run_dir.glob("checkpoints/*.index"))
