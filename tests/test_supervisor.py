"""launch/supervisor.py without processes: tasks that are silent or make no progress are killed; and the words of tasks."""

import contextlib
import json
import math
import os
import signal
import time
import types
from typing import Any

import pytest

from common.core import task_status
from common.core.flags import TrainingFailed
from common.core.run_facts import RunFacts
from common.launch import supervisor
from common.launch.task import Task


@pytest.fixture
def pipe(monkeypatch):
    """The end from which a launcher reads, of what `say` writes in this process."""
    end, theirs = os.pipe()
    os.set_blocking(theirs, False)
    monkeypatch.setenv("LAUNCHER_WORDS", str(theirs))
    monkeypatch.setenv("LAUNCHER_KEY", "ps 3")
    yield end
    os.close(end)
    os.close(theirs)


@pytest.mark.parametrize(
    "text, written",
    [
        ("", "ps 3\t\n"),
        ("one line", "ps 3\tone line\n"),
        ("two\nlines", "ps 3\ttwo lines\n"),
        ("x" * 5000, f"ps 3\t{'x' * 1995}\n"),
        ("café", "ps 3\tcafé\n"),
    ],
)
def test_say(pipe, text, written):
    task_status.say(text)
    assert os.read(pipe, 10000).decode() == written


def test_say_to_nobody_who_reads(pipe):
    """A launcher that was stopped does not stop its tasks."""
    for _ in range(100):
        task_status.say("x" * 1900)  # more than any pipe holds
    assert len(os.read(pipe, 1 << 20)) < 100 * 1900


def test_say_without_a_launcher(pipe, monkeypatch):
    monkeypatch.delenv("LAUNCHER_KEY")
    task_status.say("anything")
    task_status.say()
    os.set_blocking(pipe, False)
    with pytest.raises(BlockingIOError):
        os.read(pipe, 1)


class Looking:
    """A run of some workers and ps tasks that were heard of at second 0."""

    def __init__(self, monkeypatch, workers=3, ps=0, num_evaluators=0, **options):
        self.killed: list = []
        self.now = 0.0
        self.server: Any = types.SimpleNamespace(signal=lambda *arguments: self.killed.append(arguments))
        self.server.kill = lambda: self.killed.append(("the server", signal.SIGKILL))
        self.server.heard, self.server_lives = 0.0, True
        self.tasks = [Task("worker", i, [], "") for i in range(workers)]
        self.tasks += [Task("ps", i, [], "") for i in range(ps)]
        self.settings = types.SimpleNamespace(hang_secs=60, run=RunFacts("HogWild", num_evaluators=num_evaluators))
        self.run = supervisor.Supervisor(self.tasks, self.server, self.settings, lambda line: None, **options)
        for module in "supervisor", "task":
            clock = types.SimpleNamespace(monotonic=lambda: self.now, time=time.time)
            monkeypatch.setattr(f"common.launch.{module}.time", clock)
        monkeypatch.setattr(supervisor.os, "cpu_count", lambda: 2)
        for task in self.tasks:
            self.hear(task.name, 0.0)

    def hear(self, name, at, text=""):
        self.now = at
        self.run._hear(name, text)

    def doing(self, name, at, what, waits=False, number=1, longest=None):
        """Lets a task say what it does from now on; it will go on to give signs of life."""
        self.hear(name, at, task_status.PROGRESS + json.dumps([number, what, waits, longest]))

    def look(self, at, last_look=None, silent=()):
        """Looks at a second; returns the names of those that are killed."""
        self.now = at
        for task in self.tasks:
            if task.is_running and task.progress and not task.why_killed and task.name not in silent:
                task.heard = at
        if self.server_lives:
            self.server.heard = at
        self.killed.clear()
        self.run._look(at - 1 if last_look is None else last_look)
        assert {number for _, number in self.killed} <= {signal.SIGKILL}
        return [name for name, _ in self.killed]

    def save(self, folder):
        """Lets the run have a checkpoint, in this folder."""
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "model.ckpt-7.index").touch()
        for task in self.tasks:
            task.run_dir = str(folder)

    def why(self, name):
        return next(task.why_killed for task in self.tasks if task.name == name)


@pytest.fixture
def looking(monkeypatch):
    return Looking(monkeypatch)


def test_silence_is_counted_from_the_last_sign(looking):
    looking.hear("worker 1", 30.0)
    assert looking.look(60.0) == []
    assert looking.look(61.0) == ["worker 0", "worker 2"]
    assert looking.look(62.0) == []  # those were told already
    assert looking.look(91.0) == ["worker 1"]
    assert {task.why_killed for task in looking.tasks} == {"gave no sign of life for 60 s"}


def test_task_that_has_ended_is_not_silent(looking):
    looking.tasks[0].status = 0
    assert looking.look(61.0) == ["worker 1", "worker 2"]
    assert looking.why("worker 0") == ""


def test_launcher_that_was_stopped_itself_kills_nobody(looking):
    """It could not hear, so the seconds begin anew."""
    looking.server_lives = False
    assert looking.look(1000.0, last_look=10.0) == []
    looking.server_lives = True
    assert looking.look(1060.0) == []
    assert looking.look(1061.0) == ["worker 0", "worker 1", "worker 2"]


def test_task_that_has_not_begun_is_not_silent(looking):
    """The process that starts it may still be importing tensorflow."""
    looking.tasks[0].heard = math.inf
    assert looking.look(61.0) == ["worker 1", "worker 2"]
    assert looking.look(1000.0, last_look=10.0) == []
    assert looking.look(1061.0) == []


def test_silence_without_a_limit(looking):
    looking.settings.hang_secs = None
    assert looking.look(1e6) == []


def test_silent_task_is_said_to_do_what_it_said_last(looking):
    for name in "worker 0", "worker 1", "worker 2":
        looking.doing(name, 0.0, "loading the data")
    assert looking.look(61.0, silent=["worker 1"]) == ["worker 1"]
    assert looking.why("worker 1") == "gave no sign of life for 60 s while loading the data"


def test_task_that_makes_no_progress(looking, monkeypatch):
    """It lives, but its data function sleeps. A part that was never done before may take ten times as long."""
    looking = Looking(monkeypatch, check_secs={"loading the data": 0.1})
    for name, what in ("worker 0", "running a call"), ("worker 1", "loading the data"), ("worker 2", "building the graph"):
        looking.doing(name, 1.0, what)
    assert looking.look(61.0) == []
    assert looking.look(62.0) == ["worker 1"]
    assert looking.why("worker 1") == "made no progress for 60 s while loading the data"
    looking.tasks[1].status = 0
    for second in range(63, 601):
        assert looking.look(float(second)) == []
    assert looking.look(602.0) == ["worker 0", "worker 2"]
    assert looking.why("worker 2") == "made no progress for 600 s while building the graph"


def test_limit_follows_how_long_calls_take(looking):
    looking.doing("worker 0", 0.0, "running a call", number=7, longest=2.0)
    looking.doing("worker 1", 0.0, "running a call", number=7, longest=20.0)
    looking.doing("worker 2", 0.0, "running a call", number=7, longest=20.0)
    assert looking.look(61.0) == ["worker 0"]
    looking.tasks[0].status = 0
    looking.doing("worker 2", 100.0, "running a call", number=8, longest=20.0)
    assert looking.look(199.0) == []
    assert looking.look(201.0) == ["worker 1"]
    assert looking.why("worker 1") == "made no progress for 200 s while running a call"


def test_what_the_check_took_counts_as_often_as_tasks_share_a_core(monkeypatch):
    looking = Looking(monkeypatch, workers=6, check_secs={"loading the data": 10.0})
    for task in looking.tasks:
        looking.doing(task.name, 0.0, "loading the data")
    assert looking.look(300.0) == []  # six tasks on two cores
    assert len(looking.look(301.0)) == 6


def test_who_waits_is_not_killed_as_long_as_one_goes_on(looking):
    for at in range(0, 1000, 50):
        looking.doing("worker 0", float(at), "running a call", number=at, longest=50.0)
        for name in "worker 1", "worker 2":
            looking.doing(name, float(at), "waiting for the chief", waits=True)
        assert looking.look(float(at + 1)) == []


@pytest.mark.parametrize("is_saved", [True, False])
def test_all_wait_for_each_other(looking, tmp_path, is_saved):
    for name in "worker 0", "worker 1", "worker 2":
        looking.doing(name, 0.0, "running a call", waits=True, number=9, longest=0.1)
    looking.doing("worker 2", 30.0, "waiting until all workers have ended", waits=True, number=10)
    for second in range(31, 631):
        assert looking.look(float(second)) == []
    if is_saved:
        looking.save(tmp_path)
    with pytest.raises(TrainingFailed) as info:
        looking.look(631.0)
    assert str(info.value) == (
        "no worker makes progress: worker 0 for 631 s while running a call, worker 1 for 631 s while running a call, "
        f"worker 2 for 601 s while waiting until all workers have ended{'; --resume goes on' if is_saved else ''}"
    )


def test_an_evaluator_that_waits_holds_up_no_verdict(monkeypatch):
    looking = Looking(monkeypatch, workers=2, num_evaluators=1)
    looking.doing("worker 0", 0.0, "running a call", waits=True, longest=0.1)
    looking.doing("worker 1", 0.0, "waiting for a checkpoint", waits=True)
    with pytest.raises(TrainingFailed, match="^no worker makes progress: worker 0 for 61 s while running a call$"):
        looking.look(61.0)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("state", [{"starts_at": 2000.0, "status": -9}, {"why_killed": "was silent", "heard": math.inf}, {}])
def test_nobody_is_killed_that_may_have_waited_for_a_ps(monkeypatch, state, waits):
    """The ps waits for its start, or was killed but has not ended, or does not serve yet."""
    looking = Looking(monkeypatch, workers=1, ps=1)
    looking.doing("worker 0", 0.0, "running a call", waits, longest=0.1)
    looking.doing("ps 0", 0.0, "starting")
    for name, value in state.items():
        setattr(looking.tasks[1], name, value)
    assert looking.look(200.0) == []
    looking.tasks[1].status, looking.tasks[1].starts_at, looking.tasks[1].why_killed = None, None, ""
    looking.doing("ps 0", 201.0, "serving", waits=True, number=2)
    assert looking.look(260.0) == []
    if waits:
        with pytest.raises(TrainingFailed, match="^no worker makes progress: worker 0 for 61 s while running a call"):
            looking.look(261.0)
    else:
        assert looking.look(261.0) == ["worker 0"]


def test_workers_that_are_to_end_may_take_their_time(looking):
    """To save a checkpoint, say. There is a limit to it, see `STOP_SECONDS`."""
    for name in "worker 0", "worker 1", "worker 2":
        looking.doing(name, 0.0, "running a call", longest=0.1)
    looking.run._is_stopping = True
    assert looking.look(1000.0) == []


def test_server_that_is_stopped(looking):
    for name in "worker 0", "worker 1", "worker 2":
        looking.doing(name, 0.0, "running a call")
    looking.server_lives = False
    assert looking.look(60.0) == []
    with pytest.raises(TrainingFailed) as info:
        looking.look(61.0)
    words = "the process that starts the tasks gave no sign of life for 60 s and was killed"
    assert (str(info.value), looking.killed) == (words, [("the server", signal.SIGKILL)])


def test_what_a_task_is_doing(monkeypatch, pipe):
    """It says so at once when it is something else; what it does again and again has a time that is the longest so far."""
    clock = types.SimpleNamespace(now=10.0)
    monkeypatch.setattr(task_status, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(task_status, "_progress", (0, "", False, None, 0.0, None))

    def said():
        os.set_blocking(pipe, False)
        with contextlib.suppress(BlockingIOError):
            lines = os.read(pipe, 10000).decode().rstrip("\n").split("\n")
            return [tuple(task_status.read_progress(line.partition("\t")[2])) for line in lines]
        return []

    task_status.doing("building the graph")
    assert said() == [(1, "building the graph", False, None)]
    task_status.doing("a call", waits=True)
    assert said() == [(2, "a call", True, None)]
    for clock.now in 13.0, 14.0:
        task_status.doing("a call", waits=True)
    assert said() == []
    task_status.say_progress()
    assert said() == [(4, "a call", True, 3.0)]
    with contextlib.suppress(ValueError), task_status.meanwhile("waiting"):
        raise ValueError
    assert said() == [(5, "waiting", False, None), (6, "a call", True, None)]


def test_restarts_count_for_an_hour(looking, monkeypatch):
    """The pause before each grows. Meanwhile the launcher goes on to listen."""
    task, shown = looking.tasks[1], list[str]()
    task.command = ["python", "scheme.py"]
    looking.settings.max_restarts, looking.run._ends_with_chief = 3, False
    looking.run._say = shown.append
    moments: list = []
    monkeypatch.setattr(looking.run, "_start_again", lambda task, moment: moments.append(moment))

    def dies(at):
        looking.now, task.status = at, -9
        looking.run._mend(task)

    for at in 0.0, 1000.0, 2000.0, 3601.0, 4601.0:
        dies(at)
    assert moments == [0.0, 1001.0, 2002.0, 3603.0, 4603.0]
    assert [line.partition("; ")[2] for line in shown] == [
        "restart 1 of 3",
        "restart 2 of 3 in 1 s",
        "restart 3 of 3 in 2 s",
        "restart 3 of 3 in 2 s",
        "restart 3 of 3 in 2 s",
    ]
    with pytest.raises(TrainingFailed, match="^worker 1 was killed by SIGKILL after 3 restarts"):
        dies(4602.0)
    assert task.restarts == 5


def test_a_task_is_started_again_when_its_pause_is_over(looking, monkeypatch):
    """Not before, and the ends of others are heard meanwhile."""
    task, started = looking.tasks[1], list[str]()
    looking.server.start = lambda name, *_: started.append(name)
    task.command, task.status, task.starts_at = ["python", "scheme.py"], 1, 107.0
    looking.now = looking.run._looked = 100.0
    looking.run._events.put(("worker 0", 0))
    assert looking.run._next_end(100.0) is looking.tasks[0] and started == []
    looking.now = 106.9
    looking.run._looked = 106.9
    assert looking.run._next_end(106.9) is None and started == []
    looking.now = 107.0
    assert looking.run._next_end(107.0) is None and started == ["worker 1"]
    assert task.is_running and task.starts_at is None
