"""Lines about a task that waits: for which task, at which address, since when, and when that is over."""

import types

import pytest

from common import tf
from common.cluster import membership
from common.cluster.hooks import Gate, MeetingHook, StartHook
from common.core import task_status
from common.core.locks import Clocks, Lock
from common.launch import launcher

HOSTS = {"ps": ["127.0.0.1:1"], "worker": ["host:1", "host:2"]}


@pytest.fixture
def waiting(monkeypatch):
    """The waits of a worker 0, a list of what it says, and a clock."""
    wait, said, clock = task_status._wait, list[str](), types.SimpleNamespace(now=100.0)
    for name, value in vars(task_status._Wait()).items():
        monkeypatch.setattr(wait, name, value)
    monkeypatch.setattr(task_status, "_progress", (0, "", False, None, 0.0, None))
    fake = types.SimpleNamespace(
        monotonic=lambda: clock.now, time=lambda: clock.now, localtime=lambda at: at, strftime=lambda _, at: f"{at:.0f}"
    )
    monkeypatch.setattr(task_status, "time", fake)
    monkeypatch.setattr(task_status, "tell", said.append)
    monkeypatch.setattr(task_status, "_why_unreachable", lambda address: "")
    wait._is_looked_at = True
    task_status.say_waits_of("worker 0", HOSTS)

    def look():
        wait.look()
        if wait._inquiry:
            wait._inquiry.join()
        seen = said[:]
        said.clear()
        return seen

    return types.SimpleNamespace(look=look, clock=clock, said=said)


def test_wait_is_said_after_five_seconds_and_when_it_is_over(waiting):
    task_status.doing("a call", whom=lambda: ["worker 1"])
    waiting.clock.now += 4.9
    assert waiting.look() == []
    waiting.clock.now += 0.1
    assert waiting.look() == ["worker 0 has waited 5 s, since 100, for worker 1 at host:2"]
    waiting.clock.now += 10
    assert waiting.look() == []  # nothing new
    task_status.doing("a call", whom=lambda: ["worker 1"])
    assert waiting.said == ["worker 0 no longer waits for worker 1 at host:2: it took 15 s"]


def test_each_call_begins_anew(waiting):
    for _ in range(5):
        task_status.doing("a call", whom=lambda: ["worker 1"])
        waiting.clock.now += 4
        assert waiting.look() == []


def test_work_is_no_wait(waiting):
    """Nor is a call that takes long while no task is missing."""
    for whom in None, task_status.nobody:
        task_status.doing("a call", whom=whom)
        waiting.clock.now += 60
        assert waiting.look() == []


def test_ps_that_does_not_answer_comes_first(waiting, monkeypatch):
    asked = []

    def whom():
        asked.append(1)
        return ["worker 1"]

    task_status.doing("a call", whom=whom)
    monkeypatch.setattr(task_status, "_why_unreachable", lambda address: "Connection refused")
    waiting.clock.now += 5
    assert waiting.look() == ["worker 0 has waited 5 s, since 100, for ps 0 at 127.0.0.1:1 (Connection refused)"]
    assert not asked  # that would take a ps
    monkeypatch.setattr(task_status, "_why_unreachable", lambda address: "")
    waiting.clock.now += 5
    assert waiting.look() == ["worker 0 has waited 10 s, since 100, for worker 1 at host:2"]


def test_wait_that_is_over_while_the_same_goes_on(waiting):
    missing = ["worker 1"]
    task_status.doing("a call", whom=lambda: missing)
    waiting.clock.now += 5
    waiting.look()
    missing.clear()
    waiting.clock.now += 5
    assert waiting.look() == ["worker 0 no longer waits for worker 1 at host:2: it took 10 s"]


def test_many_are_not_all_named(waiting):
    task_status.doing("a call", whom=lambda: [f"worker {i}" for i in range(2, 9)])
    waiting.clock.now += 5
    assert waiting.look()[0].endswith("for worker 2, worker 3, worker 4, worker 5 and 3 others")


def test_address_where_nobody_listens():
    with launcher.reserved_port() as reserved:
        assert task_status._why_unreachable(f"127.0.0.1:{reserved.getsockname()[1]}") == "Connection refused"
        reserved.listen()
        assert task_status._why_unreachable(f"127.0.0.1:{reserved.getsockname()[1]}") == ""
    assert task_status._why_unreachable(f"{'a' * 64}.invalid:1")  # no name of a host


@pytest.mark.parametrize(
    "staleness, quorum, ticks, behind",
    [
        (0, None, [1, 0, 1], [[1], [], [1]]),  # synchronous: a worker that has ticked waits for those that have not
        (2, None, [4, 1, 2], [[1], [], []]),  # at most two ahead of the slowest
        (0, 2, [1, 0, 0], [[1, 2], [], []]),  # one of the two others is enough
        (0, 2, [1, 1, 0], [[], [], []]),
    ],
)
def test_who_is_behind(initialized, graph, staleness, quorum, ticks, behind):
    clocks = Clocks(3, Lock("", "lock"), staleness, quorum, name=f"behind_{staleness}_{quorum}_{ticks}")
    tick = [clocks.tick(i) for i in range(3)]
    found = [clocks.behind(i) for i in range(3)]
    session = initialized()
    for i, count in enumerate(ticks):
        for _ in range(count):
            session.run(tick[i])
    assert [session.run(each).nonzero()[0].tolist() for each in found] == behind


def test_who_leaves_makes_a_last_round_if_others_need_it(graph):
    """In a scheme with updates of all workers; elsewhere it only has to say so."""
    has_left, said = (tf.get_variable(name, initializer=False, use_resource=True) for name in ("has_left", "said"))
    leave, go = (variable.assign(True, read_value=False) for variable in (said, has_left))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        hook = MeetingHook(types.SimpleNamespace(leave=leave, go=go, has_left=has_left.read_value()))
        assert [hook.goes(session), hook.goes(session), session.run(said.read_value())] == [True, False, False]
        hook = MeetingHook(types.SimpleNamespace(leave=leave, go=None))
        assert [hook.goes(session), session.run(said.read_value())] == [False, True]


def test_meeting_names_workers(graph):
    behind = tf.constant([True, False, True])
    hook = MeetingHook(types.SimpleNamespace(vote=None, enter=(), left=None, come=None, behind=behind))
    hook.begin()
    assert hook.missing() == []  # there is no session yet
    with tf.Session() as session:
        hook.after_create_session(session, None)
        assert hook.missing() == ["worker 0", "worker 2"]
    assert hook.missing() == []  # it is closed


@pytest.mark.parametrize(("is_restarted", "waits_for", "released"), [(True, 1, 1), (True, 0, 0), (False, 1, 0)])
def test_a_wait_ends_in_a_session_that_has_lost_a_ps(graph, is_restarted, waits_for, released):
    """Such a session fails with its next call; a call that waits on another ps does not notice."""
    hook, calls = MeetingHook(types.SimpleNamespace(vote=None, enter=(), left=None, come=None, behind="?", release="!")), []
    hook.begin()

    class Session:
        def run(self, fetches, feeds=None):
            calls.append(fetches)
            if fetches is hook._reach_all and is_restarted:
                raise tf.errors.AbortedError(None, None, "a ps was restarted")
            return [False, bool(waits_for)]

    hook.after_create_session(Session(), None)
    assert hook.missing() == ["worker 1"] * waits_for
    assert calls.count("!") == released


def test_ring_names_workers_that_do_not_answer(waiting, monkeypatch):
    hook = MeetingHook(types.SimpleNamespace(vote=None, enter=(), left=None, come=None, behind=None))
    task_status.doing("a call", whom=hook.missing)
    monkeypatch.setattr(task_status, "_why_unreachable", lambda address: "Connection refused" if address == "host:2" else "")
    waiting.clock.now += 5
    assert waiting.look() == ["worker 0 has waited 5 s, since 100, for worker 1 at host:2 (Connection refused)"]


def test_start_names_workers(servers, graph):
    worker, server = servers(1)
    with tf.device("/job:ps/task:0"):
        gate = Gate(membership.Members(membership.PS_0))
    closed, hook = gate.closed(2), StartHook(gate, 4, 60)
    with tf.Session(server.target, config=worker.config()) as session:
        session.run(closed)
        assert hook._missing(session) == ["worker 1", "worker 3"]


def test_end_names_workers(servers, graph):
    worker, server = servers(1)
    task, members = types.SimpleNamespace(num_workers=3, shard_index=0, num_ps=1), membership.Members(membership.PS_0)
    rendezvous = membership.Rendezvous(task, members)
    assert rendezvous.missing() == ["worker 1", "worker 2"]
    rendezvous._came = {0, 2}
    assert rendezvous.missing() == ["worker 1"]


@pytest.mark.parametrize(
    ("left", "now", "has_just_left"),
    [(95.0, 101.0, True), (100.5, 101.0, True), (89.0, 101.0, False), (3700.0, 101.0, False), (95.0, 3700.0, True)],
)
def test_who_left_before_a_clock_was_set_back_may_be_back(monkeypatch, left, now, has_just_left):
    monkeypatch.setattr(membership, "time", types.SimpleNamespace(time=lambda: now))
    assert membership.has_just_left(left, asked=100.0) == has_just_left
