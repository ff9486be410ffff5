"""start.sh: who joins, leaves or is lost, as its lines tell; test_multiple_machines.py starts processes, here is none."""

import contextlib
import importlib.util
import json
import queue
import sys
from typing import Any

import pytest
from runs import ROOT

from common.launch import control

FOLDER = ROOT / "Multiple-Machines"


@pytest.fixture
def start(monkeypatch):
    """The module start.py, whose lines to hosts are `Line`s."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    spec = importlib.util.spec_from_file_location("start", FOLDER / "start.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "start", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_Line", Line)
    return module


class Line:
    """Stands in for a line to a host: notes what it is told."""

    def __init__(self, name, command, events):
        self.name, self.command, self.told = name, command, []

    def stop(self):
        self.told.append("stop")

    def close(self):
        self.told.append("close")

    def wait(self, seconds):
        pass


@pytest.fixture
def run(start):
    """A run of a ps and worker 0, with two more places."""
    tasks = [start._Task("ps", 0, "a:1", "/f"), start._Task("worker", 0, "b:1", "/f")]
    tasks += [start._Task("worker", i, None) for i in (1, 2)]
    with contextlib.ExitStack() as stack:
        run: Any = start._Run(["ssh"], "HogWild", [], tasks, 1, True, stack)
        rooms = [{"folder": f"/{name}", "place": name} for name in ("hub", "a", "b")]
        told = [("a:1", rooms[1]), ("b:1", rooms[2]), None, None]
        run._doors, run._vital = start.Doors(rooms[0], told, [2, 3]), []
        for task in tasks[:2]:
            run._start(task)
        yield run


def ask(run, what, count, *hosts):
    """Asks a run; returns the request."""
    text = json.dumps({"what": what, "count": count, "version": control.version(control.COMMON), "hosts": hosts})
    request = control.Request(text)
    run._answer(request)
    return request


def answer(request):
    """What a run has answered by now, and whether that is an error; None if nothing."""
    if request._answers.empty():
        return None
    found = request.wait()
    return found["line"], found["is_error"]


def room(run, line):
    """Lets a room be made."""
    run._hear_line(line, 'room: {"folder": "/new", "place": "new"}')


C, D = ("c:1", "/f"), ("d:1", "/f")


def test_those_who_join_begin_when_all_rooms_are_made(run):
    request = ask(run, "join", 2, C, D)
    first, second = run._rooms
    assert [line.command[:3] for line in (first, second)] == [["ssh", "--", "c"], ["ssh", "--", "d"]]
    room(run, second)
    assert answer(request) is None and not run._workers[1].line
    room(run, first)
    assert answer(request) == ("worker 1, worker 2 join", False)
    assert [task.line.command[-2] for task in run._workers] == ["b", "c", "d"]
    assert run._doors.outside(run._doors.inside(2)) == "c:1"


@pytest.mark.parametrize("end", ["it refuses", "it ends"])
def test_all_join_or_none(run, end):
    request = ask(run, "join", 2, C, D)
    first, second = run._rooms
    room(run, first)
    if end == "it ends":
        run._end(second, 255)
        line = "workers on d cannot join: it ended with exit status 255"
    else:
        run._hear_line(second, "refused: the system forbids it")
        line = "d allows its tasks no network of their own: the system forbids it"
    assert answer(request) == (line, True)
    assert first.told == second.told == ["close"]
    for line in first, second:
        run._end(line, 0)
    assert run._status == 0 and not run._joining
    assert answer(ask(run, "join", 2, C, D)) is None  # the places are free


def joined(run):
    """Lets worker 1 join; returns the line to its room."""
    ask(run, "join", 1, C)
    room(run, run._rooms[-1])
    return run._rooms[-1]


def test_last_one_leaves_and_its_place_is_free(run, capsys):
    of_room = joined(run)
    line = run._workers[1].line
    assert answer(ask(run, "leave", 1)) == ("worker 1 is asked to leave", False)
    assert line.told == ["stop"] and answer(ask(run, "leave", 1))[0].startswith("the run has 1 worker, of which worker 0 has")
    run._end(line, 0)
    assert capsys.readouterr().out.endswith("the place of worker 1 is free\n") and of_room.told == ["close"]
    assert run._status == 0
    joined(run)
    assert run._workers[1].line.told == []


@pytest.mark.parametrize("ended, is_asked", [(2, False), (143, True)])
def test_who_has_not_come_is_not_missed(run, capsys, ended, is_asked):
    """One with other code, say; one that is asked to leave before it could hear that."""
    joined(run)
    if is_asked:
        ask(run, "leave", 1)
    run._end(run._workers[1].line, ended)
    assert run._status == 0 and len(run._rooms) == 1
    assert capsys.readouterr().out.endswith("the place of worker 1 is free\n")


@pytest.mark.parametrize("ended", [137, 255, -9])
def test_another_one_stands_in_for_who_is_lost(run, capsys, ended):
    """Where worker 0 is; then the place is free."""
    joined(run)
    run._end(run._workers[1].line, ended)
    assert capsys.readouterr().out.endswith(f"worker 1 ended with exit status {ended}; the others go on without it\n")
    assert run._rooms[-1].command[:3] == ["ssh", "--", "b"]
    assert answer(ask(run, "join", 2, C, D))[0].startswith("1 of the 3 places of the run are free")
    room(run, run._rooms[-1])
    line = run._workers[1].line
    assert line.command[-2] == "b" and "env STANDS_IN=1 " in line.command[-1]
    run._end(line, 0)
    assert capsys.readouterr().out == "the place of worker 1 is free\n" and run._status == 0
    joined(run)
    assert "STANDS_IN" not in run._workers[1].line.command[-1]


@pytest.mark.parametrize("is_begun", [False, True])
def test_run_ends_if_nobody_can_stand_in(run, is_begun):
    joined(run)
    run._end(run._workers[1].line, 137)
    if is_begun:
        room(run, run._rooms[-1])
        run._end(run._workers[1].line, 2)
    else:
        run._end(run._rooms[-1], 255)
    assert run._status in (1, 2)


@pytest.mark.parametrize("task, ended, status", [(0, 137, 1), (1, 137, 1), (1, 2, 2), (2, 1, 1)])
def test_others_who_fail_end_the_run(run, task, ended, status):
    """A ps, worker 0, and a worker that has failed for good, as by a loss that is not finite."""
    joined(run)
    run._end(run._tasks[task].line, ended)
    assert run._status == status


def test_nobody_joins_a_run_that_ends(run):
    request = ask(run, "join", 1, C)
    run._end(run._workers[0].line, 0)
    room(run, run._rooms[0])
    assert answer(request) == ("the run is ending, so no worker can join", True)
    assert answer(ask(run, "join", 1, C)) == ("the run is ending, so no worker can join", True)
    assert answer(ask(run, "leave", 1)) == ("the run is ending, and all its workers with it", True)


def test_how_late_comers_end_is_no_failure(run):
    """They wait for a ps that has ended."""
    joined(run)
    for task in run._tasks[:2]:
        run._end(task.line, 0)
    run._end(run._workers[1].line, 137)
    assert run._status == 0


def test_join_needs_hosts(run):
    line, is_error = answer(ask(run, "join", 1))
    assert is_error and line.startswith("a run on several machines needs the hosts: bash Multiple-Machines/start.sh --join=")


@pytest.mark.slow
def test_a_task_is_told_once_to_stop(start, monkeypatch):
    """A second word would kill it: a worker that leaves may still be there when the run is stopped."""
    monkeypatch.undo()  # real lines
    events: queue.SimpleQueue = queue.SimpleQueue()
    line = start._Line("worker 1", ["sh", "-c", "read -r first; echo $first; read -r second; echo $second end"], events)
    for tell in line.stop, line.stop, line.close:
        tell()
    assert [events.get()[1:] for _ in range(3)] == [("stop",), ("end",), (0, None)]
