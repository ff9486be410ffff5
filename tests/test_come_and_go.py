"""Workers that leave for good, as SIGTERM asks them to: nobody starts them again or waits for them, and nothing is lost."""

import contextlib
import functools
import signal
import threading
import time
import types

import pytest
from runs import (
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
)

from common import tf
from common.cluster import membership
from common.cluster.hooks import EnterHook
from common.cluster.task_spec import TaskSpecDef
from common.core import run_folder as folders
from common.core import signals, task_status
from common.core.checkpoints import checkpoints_in
from common.core.flags import TrainingFailed
from common.core.run_facts import RunFacts
from common.launch import control, launcher, supervisor
from common.launch.fork_server import EARLY, LEFT
from common.launch.task import Task
from common.training import interruption as interrupting
from common.training.interruption import Interruption

DYNAMIC = ROOT / "Asynchronous-DiLoCo" / "asynchronous_diloco.py"


def is_of_worker_1(line):
    """Not that it waits: a busy machine is slow to start."""
    return line.startswith("worker 1 ") and " has waited " not in line and " no longer waits " not in line


# --- What a worker hears ----------------------------------------------------------------------------------------------------


@pytest.fixture
def heard(monkeypatch):
    """What an `Interruption` has done: a list of the statuses with which it ended the process, of reports, of words."""
    done: list = []
    monkeypatch.setattr(signals, "hear_signals", lambda *_: None)
    monkeypatch.setattr(signals, "exit_at_once", done.append)
    monkeypatch.setattr(interrupting, "say_asked", lambda: done.append("asked"))
    monkeypatch.setattr(threading, "Thread", lambda target, daemon: types.SimpleNamespace(start=target))
    return done


def test_sigterm_asks_a_worker_that_trains_to_leave_after_its_call(heard):
    interruption = Interruption(heard.append)
    interruption.training_begins()
    interruption._hear(signal.SIGTERM)
    assert (interruption.requested, interruption.leaves, heard) == (True, True, [])
    interruption._hear(signal.SIGTERM)  # killed, as by any second signal
    assert heard == [130]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_ask_no_worker_to_leave(heard, number):
    interruption = Interruption(heard.append)
    interruption.training_begins()
    interruption._hear(number)
    assert (interruption.requested, interruption.leaves, heard) == (True, False, [])


@pytest.mark.parametrize("report", [None, [1.0, 2.0]])
def test_sigterm_before_or_after_training_leaves_at_once(heard, report):
    interruption = Interruption(heard.append)
    if report:
        interruption.training_begins()
        interruption.report = report
        interruption.training_ends()
    interruption._hear(signal.SIGTERM)
    assert heard == [report]


@pytest.mark.parametrize("trains", [False, True])
def test_who_waits_for_others_leaves_by_its_session(heard, trains):
    """They would wait for it for ever; and until it has left it waits for them. After the training it leaves at once."""
    interruption = Interruption(heard.append, waits_for_others=True)
    interruption.release = lambda: heard.append("released")
    if trains:
        interruption.training_begins()
    interruption._hear(signal.SIGTERM)
    assert (interruption.requested, interruption.leaves, heard) == (True, True, [])
    interruption.after_create_session(None, None)  # does not wait for its end
    after = Interruption(heard.append, waits_for_others=True)
    after.training_begins()
    after.report = "report"
    after.training_ends()
    after._hear(signal.SIGTERM)
    assert heard == ["report"]


def test_who_cannot_leave_says_that_it_was_asked(heard):
    interruption = Interruption()
    interruption.training_begins()
    interruption._hear(signal.SIGTERM)
    assert (interruption.requested, interruption.leaves, heard) == (True, False, ["asked"])


def test_status_of_leaving_is_0_for_those_who_are_told_no_more(monkeypatch):
    assert task_status.status_of_leaving() == 0
    monkeypatch.setattr(task_status, "is_fork", True)
    assert task_status.status_of_leaving() not in (0, 100)


@pytest.mark.parametrize("status, ended", [(LEFT, (True, 0)), (0, (False, 0)), (EARLY, (False, EARLY)), (130, (False, 130))])
def test_launcher_knows_who_has_left(status, ended):
    task = Task("worker", 1, [], "")
    task.end(status)
    assert (task.has_left, task.status) == ended


@pytest.fixture
def two_workers(tmp_path):
    """A function that makes the `Supervisor` of two workers of a scheme with this pace, what it has said, and its workers."""

    def two_workers(pace):
        tasks = [Task(job, i, [], str(tmp_path)) for job, i in (("ps", 0), ("worker", 0), ("worker", 1))]
        settings = types.SimpleNamespace(run=RunFacts("Synchronous-SGD", pace))
        said: list = []
        return supervisor.Supervisor(tasks, None, settings, said.append), said, tasks[1:]

    return two_workers


def test_run_stops_when_its_chief_is_asked_to_end(two_workers):
    run, said, _ = two_workers("own")
    run._hear("worker 0", task_status.ASKED)
    with pytest.raises(KeyboardInterrupt):
        run._next_end()
    (line,) = said
    assert line.startswith("worker 0 was asked to end (SIGTERM)")


@pytest.mark.parametrize("pace, lines", [("together", 1), ("ring", 1), ("own", 0)])
def test_why_a_worker_cannot_leave_is_said(two_workers, pace, lines):
    run, said, (_, worker) = two_workers(pace)
    run._hear("worker 1", task_status.ASKED)
    run._looked = time.monotonic()
    assert run._next_end(time.monotonic()) is None and worker.is_asked
    why = "the workers of Synchronous-SGD wait for each other, and none can leave"
    assert len(said) == lines and all(why in line for line in said)


def test_who_has_left_is_not_asked_again(two_workers):
    """Not when the chief is started again, nor with a ps."""
    run, _, (chief, worker) = two_workers("own")
    for status, is_asked in (LEFT, False), (0, True):
        worker.started, chief.started = 1.0, 2.0
        worker.end(status)
        assert run._may_be_asked_again(worker) is is_asked
        run._start_again(run._tasks["ps 0"], 5.0)
        assert worker.starts_at == (5.0 if is_asked else None)
        worker.starts_at = None


@pytest.mark.parametrize("is_asked_by_launcher", [True, False])
def test_worker_that_dies_while_it_leaves_does_not_come_back(two_workers, monkeypatch, is_asked_by_launcher):
    """A process that only leaves takes its place: also if no restart is left, as it is none."""
    run, said, (_, worker) = two_workers("own")
    worker.command, started = ["python", "scheme.py"], []
    run._settings.__dict__.update(max_restarts=0, max_workers=2)
    run._server = types.SimpleNamespace(start=lambda *arguments: started.append(arguments[-1]), signal=lambda *_: None)
    if is_asked_by_launcher:
        run._answer(types.SimpleNamespace(what="leave", count=1, answer=lambda line: None))
    else:
        monkeypatch.setattr(task_status, "say", lambda text: run._hear("worker 1", text))
        task_status.say_leaving()
    worker.end(-signal.SIGKILL)
    run._mend(worker)
    assert said[-1] == "worker 1 was killed by SIGKILL while it was leaving; another process leaves in its place"
    worker.start(run._server)
    assert started == [{task_status.STANDS_IN: "1"}] and worker.is_leaving and worker.restarts == 0
    worker.end(-signal.SIGKILL)
    with pytest.raises(TrainingFailed, match="^worker 1 was killed by SIGKILL after 0 restarts"):
        run._mend(worker)
    worker.end(LEFT)
    worker.start(run._server)  # who joins later takes the place, and trains
    assert started[1:] == [{}] and not worker.is_leaving


def test_worker_that_is_asked_to_leave_tells_the_launcher(heard, monkeypatch):
    monkeypatch.setattr(interrupting, "say_leaving", lambda: heard.append("leaving"))
    for leaver, said in (heard.append, ["leaving"]), (None, ["asked"]):
        heard.clear()
        interruption = Interruption(leaver)
        interruption.training_begins()
        interruption._hear(signal.SIGTERM)
        assert heard == said


def test_launcher_asks_by_another_signal_than_that_for_leaving(two_workers):
    run, _, (chief, worker) = two_workers("own")
    assert run._signal_to_stop(worker) == signal.SIGINT
    run._evaluators = [worker]
    assert run._signal_to_stop(worker) == signal.SIGTERM


# --- How the others know ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch):
    """The two workers of a cluster with one ps, and their servers: [(task, server)], and (task, server) of the ps."""
    monkeypatch.setenv("TF_GRPC_REUSE_PORT", "true")
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in range(3)]
        ps, *workers = (f"localhost:{port}" for port in ports)
        known: dict = {"ps_hosts": [ps], "worker_hosts": workers}
        tasks = [TaskSpecDef("worker", i, **known) for i in range(2)]
        of_ps = TaskSpecDef("ps", 0, **known)
        yield [(task, task.start_server()) for task in tasks], (of_ps, of_ps.start_server())


@contextlib.contextmanager
def rendezvous_of(of, kept=dict):
    task, server = of
    with tf.Graph().as_default() as graph:
        rendezvous = membership.Rendezvous(task, membership.Members(membership.PS_0, 2, begin=2), kept)
        with tf.Session(server.target, graph, config=task.config()) as session:
            yield rendezvous, session


def rows(rendezvous, session):
    """The table of members: those that have come, have left, and have reported."""
    members = rendezvous._members
    return members.who_came(session), members.who_left(session), set(session.run(members.reports()).keys.tolist())


def test_chief_waits_for_no_report_but_of_those_who_are_there(cluster, tmp_path):
    """Worker 1 leaves: it is on the ps. Then a ps has forgotten it: it is in the folder. Then it is back."""
    (chief, other), _ = cluster
    (tmp_path / "metrics").mkdir()
    kept = functools.partial(folders.read_left, tmp_path, 2, 2)
    with rendezvous_of(chief, kept) as (mine, session):
        membership.say_gone(other[0], other[1], [1.0, 5.0])
        assert mine.gather(session, [0.0, 0.0]).tolist() == [[0, 0], [1, 5]]
        with rendezvous_of(other) as (theirs, of_other):
            assert rows(theirs, of_other) == ({1}, {1}, {0, 1})
            hook = EnterHook(theirs._members.enter(1))
            hook.has_left = True  # as when another ps was restarted since
            hook.after_create_session(of_other, None)
            assert rows(theirs, of_other) == ({1}, {1}, {0, 1})
            hook.has_left = False
            for _ in range(2):
                hook.after_create_session(of_other, None)
                assert hook.is_back
            assert mine._kept() == {} and rows(theirs, of_other) == ({1}, set(), {0})
            folders.write_left(tmp_path, 1, [1.0, 7.0])
            assert mine.gather(session, [0.0, 0.0]).tolist() == [[0, 0], [1, 7]]
            assert folders.forget_left(tmp_path, 1) and not folders.forget_left(tmp_path, 1)
            gathered: list = []
            thread = threading.Thread(target=lambda: gathered.append(mine.gather(session, [0.0, 0.0])), daemon=True)
            thread.start()
            waiting = threading.Thread(target=theirs.wait, args=(of_other, [1.0, 0.0]), daemon=True)
            waiting.start()
            thread.join(SECONDS)
            assert gathered[0].tolist() == [[0, 0], [1, 0]]
            hook.after_create_session(of_other, None)  # not one that has left: its report stays
            assert rows(theirs, of_other) == ({1}, set(), {0, 1})
            mine.dismiss(session)
            waiting.join(SECONDS)
            assert not waiting.is_alive()


def test_chief_tells_the_ps_of_those_who_have_left(cluster):
    (chief, other), ps = cluster
    membership.say_gone(other[0], other[1], [1.0, 5.0])
    with rendezvous_of(chief) as (rendezvous, session):
        assert rendezvous.absent(session) == [1]
    serving = threading.Thread(target=membership.serve, args=ps, daemon=True)
    serving.start()
    membership.say_done(chief[0], chief[1], [1])
    serving.join(SECONDS)
    assert not serving.is_alive()


def test_a_ps_that_is_asked_to_end_counts_who_has_just_left(cluster, monkeypatch):
    """Not who left long before it was asked, since that worker may be back."""
    (chief, other), ps = cluster
    answers, seconds = [False, True], []

    def has_just_left(left, asked):
        seconds.append(asked - left)
        return answers.pop(0)

    monkeypatch.setattr(membership, "has_just_left", has_just_left)
    membership.say_left(*other)
    membership.ask_to_end(*ps)
    membership.say_done(*chief)
    membership.say_left(*other)
    serving = threading.Thread(target=membership.serve, args=ps, daemon=True)
    serving.start()
    serving.join(SECONDS)
    assert not serving.is_alive() and not answers
    assert seconds[0] > 0 > seconds[1]


def test_places_that_nobody_has_taken_are_absent(cluster):
    task, server = cluster[0][0]
    with tf.Graph().as_default() as graph:
        rendezvous = membership.Rendezvous(task, membership.Members(membership.PS_0, 2, begin=1))
        with tf.Session(server.target, graph, config=task.config()) as session:
            assert rendezvous.absent(session) == [1]
            assert rendezvous.gather(session, [0.0, 0.0]).tolist() == [[0, 0]]


def test_code_is_compared_with_that_of_worker_0(cluster):
    """A worker that comes before worker 0 is let in: there is nothing to compare it with."""
    (chief, other), _ = cluster
    for of, code, is_same in (other, "another", True), (chief, "code", True), (other, "code", True), (other, "another", False):
        assert membership.has_code_of_chief(of[0], of[1], code) is is_same


def test_dismissing_twice_is_no_error(cluster):
    (chief, _), _ = cluster
    with rendezvous_of(chief) as (rendezvous, session):
        for _ in range(2):
            rendezvous.dismiss(session)


def test_damaged_reports_of_who_has_left_are_none(tmp_path):
    (tmp_path / "metrics").mkdir()
    for worker, text in enumerate(["", "{", "[1, null]", "[1, NaN]", "[1]", "7", "[" * 10**5]):
        (tmp_path / "metrics" / f"worker-{worker}.left.json").write_text(text)
    assert list(folders.read_left(tmp_path, 9, 2)) == [3]


# --- Whole runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_workers_leave_and_every_update_counts(run_dir):
    """One before it has begun, one while it trains."""
    flags = ["--num_ps=2", "--num_workers=3", "--delays=20,20,20", "--steps=300", "--compress=topk", "--start_secs=1000"]
    process = start(run_dir, "--launch", *flags)
    wait_until(process, lambda: processes(run_dir, "--job_name=worker", "--task_index=2"))
    send(run_dir, "worker", 2, signal.SIGTERM)
    wait_until(process, lambda: updates_of(run_dir, 1))
    send(run_dir, "worker", 1, signal.SIGTERM)
    said = finish(process).splitlines()
    for worker in 1, 2:
        (line, summary) = (line for line in said if line.startswith(f"worker {worker} has left after"))
        assert "its error feedback of --compress=topk is lost" in line and summary.endswith(" updates")
    result, updates = result_of(run_dir), [updates_of(run_dir, i) for i in range(3)]
    assert updates[2] == 0 < updates[1] < updates[0]
    left = {gone["worker"]: (gone["updates"], gone["samples"]) for gone in result["left"]}
    assert left == {worker: (updates[worker], 32 * updates[worker]) for worker in (1, 2)}
    assert sum(updates) == result["global_steps"] and result["samples"] == 32 * sum(updates)
    assert metrics_of(run_dir, 1)[-1]["left"] and metrics_of(run_dir, 1)[-1]["time"] <= result["left"][0]["time"]
    assert result["restarts"] == 0 and result["num_workers"] == 3
    assert result["train_seconds"] < result["worker_seconds"] < 3 * result["wall_seconds"]
    assert processes(run_dir) == []


@pytest.mark.cluster
def test_worker_that_has_left_is_not_missed_when_a_ps_forgets_it(run_dir):
    """In a scheme in which the workers go by the speed of the fastest."""
    flags = ["--delays=20,100", "--steps=150", "--checkpoint_secs=1", "--window=5"]
    process = start(run_dir, "--launch", *flags, script=DYNAMIC)
    wait_until(process, lambda: updates_of(run_dir, 1))
    send(run_dir, "worker", 1, signal.SIGTERM)
    assert "has left after" in read_until(process, is_of_worker_1)
    send(run_dir, "ps", 0, signal.SIGKILL)
    assert "restart 1 of 3" in read_until(process, lambda line: line.startswith("ps 0"))
    finish(process)
    result = result_of(run_dir)
    assert [left["worker"] for left in result["left"]] == [1] and result["restarts"] == 1
    assert result["global_steps"] >= 150 and processes(run_dir) == []


@pytest.mark.cluster
def test_worker_that_is_killed_while_it_leaves_has_left(run_dir):
    """In the middle of a call. The others go on without it, and its samples are theirs."""
    flags = ["--num_workers=3", "--max_workers=3", "--delays=20,20,2000", "--rounds_per_call=1", "--steps=400"]
    process = start(run_dir, "--launch", *flags)
    wait_until(process, lambda: updates_of(run_dir, 1))
    control.leave(run_dir)
    send(run_dir, "worker", 2, signal.SIGKILL)
    said = finish(process).splitlines()
    assert [line.partition(";")[0] for line in said if line.startswith("worker 2 was killed")] == [
        "worker 2 was killed by SIGKILL while it was leaving"
    ]
    assert "the place of worker 2 is free" in said
    result = result_of(run_dir)
    assert [left["worker"] for left in result["left"]] == [2] and result["restarts"] == 0
    held = tf.train.load_variable(checkpoints_in(str(run_dir / "checkpoints"))[-1], "leases/held")
    assert held[:2].any() and not held[2:].any() and processes(run_dir) == []
