"""Clocks against the same in Python; a worker that has to wait waits, and is woken."""

import math
import random
import threading

import pytest
from runs import SECONDS

from common import tf
from common.core.locks import FINISHED, Clocks, Lock


class Run:
    """The operations of all workers' clocks, in a session of the present graph."""

    def __init__(self, num_workers, staleness=0, quorum=None, begin=None):
        self.clocks = clocks = Clocks(num_workers, Lock("", "lock"), staleness, quorum, begin=begin)
        self._operations = {
            name: [getattr(clocks, name)(i) for i in range(num_workers)]
            for name in ("wait", "tick", "leave", "enter", "release", "may_go_on", "pulled")
        }
        self._read = clocks.read()
        self._tokens = [bell.size() for bell in clocks._bells]
        self._session = tf.Session()

    def __call__(self, name, worker):
        return self._session.run(self._operations[name][worker])

    def read(self):
        """Returns all clocks."""
        return self._session.run(self._read).tolist()

    def tokens(self):
        """Returns how many tokens lie at each bell."""
        return self._session.run(self._tokens)

    def waiting(self, worker):
        """Starts a thread that waits as this worker."""
        thread = threading.Thread(target=self, args=("wait", worker), daemon=True)
        thread.start()
        return thread


def ended(thread):
    thread.join(SECONDS)
    return not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "quorum"), [(0, None), (2, None), (math.inf, None), (0, 2), (1, 1)])
def test_clocks_are_those_of_the_definition(graph, staleness, quorum):
    """Three workers that tick, leave and come back at random: which of them may go on, and what the clocks say."""
    run, rng = Run(3, staleness, quorum), random.Random(0)
    clocks = [0, 0, 0]
    for _ in range(300):
        worker, what = rng.randrange(3), rng.choices(["tick", "leave", "enter"], [8, 1, 2])[0]
        low = sorted(clocks, reverse=True)[(quorum or 3) - 1]
        if what == "tick" and clocks[worker] < FINISHED and clocks[worker] - low <= staleness:
            run("wait", worker)
            clocks[worker] += 1
        elif what == "leave":
            clocks[worker] = FINISHED
        elif what == "enter" and clocks[worker] == FINISHED:
            clocks[worker] = low if low < FINISHED else 0
        else:
            continue
        run(what, worker)
        low = sorted(clocks, reverse=True)[(quorum or 3) - 1]
        assert run.read() == clocks
        assert [bool(run("may_go_on", i)) for i in range(3)] == [c - low <= staleness for c in clocks]
        assert all(n <= 1 for n, c in zip(run.tokens(), clocks, strict=True) if c < FINISHED)


@pytest.mark.slow
def test_places_that_nobody_has_are_not_waited_for(graph):
    """A worker that comes begins with the clock of the slowest that is there."""
    run = Run(4, staleness=1, begin=2)
    away = run.read()[2]
    assert run.read() == [0, 0, away, away] and away >= FINISHED
    run("tick", 0)
    run("tick", 0)
    assert not run("may_go_on", 0)
    run("enter", 3)
    assert run.read() == [2, 0, away, 0]
    run("tick", 1)
    assert not run("may_go_on", 0)
    run("leave", 3)
    assert run("may_go_on", 0) and run.read() == [2, 1, away, FINISHED]
    run("enter", 3)
    assert run.read() == [2, 1, away, 1]


@pytest.mark.slow
def test_chief_tells_a_ps_that_has_forgotten_all_who_has_left(graph):
    """What the ps knows counts more."""
    run = Run(3, begin=2)
    left = tf.placeholder(tf.bool, [3])
    enter = run.clocks.enter(0, left)
    run._session.run(enter, {left: [False, True, False]})
    away = run.read()[2]
    assert run.read() == [0, away, away]
    run("tick", 0)
    run("enter", 1)
    run._session.run(enter, {left: [False, True, False]})
    assert run.read() == [1, 1, away]


def test_who_is_ahead_waits_until_the_slowest_has_come_closer(graph):
    run = Run(3, staleness=1)
    for _ in range(2):
        run("tick", 0)
    waiting = run.waiting(0)
    run("tick", 1)
    assert waiting.is_alive() and not run("may_go_on", 0)  # worker 2 is behind still
    run("wait", 1)
    run("wait", 2)  # the slowest never waits
    run("tick", 2)
    assert ended(waiting)


@pytest.mark.slow
def test_each_is_woken_by_its_own_bell(graph):
    """Two wait, at different distances; one step of the slowest wakes the one whom it lets go on."""
    run = Run(3)
    for worker, ticks in (0, 1), (1, 2):
        for _ in range(ticks):
            run("tick", worker)
    near, far = run.waiting(0), run.waiting(1)
    run("tick", 2)
    assert ended(near) and far.is_alive()
    run("tick", 0)
    run("tick", 2)
    assert ended(far)


def test_a_token_that_is_left_over_lets_nobody_through(graph):
    """As when a worker dies after the others have rung for it, and before it has listened."""
    run = Run(2)
    run("tick", 0)
    run("tick", 1)
    assert run.tokens() == [1, 0]
    run("enter", 0)
    assert run.tokens() == [0, 0]
    run("wait", 0)
    run("tick", 0)
    run("enter", 0)  # it died while it had to wait, and has to wait again
    waiting = run.waiting(0)
    assert not run("may_go_on", 0) and waiting.is_alive()
    run("tick", 1)
    assert ended(waiting)


def test_two_steps_without_a_wait_between_are_waited_for_afterwards(graph):
    run = Run(2)
    run("tick", 0)
    run("tick", 1)
    run("tick", 0)
    waiting = run.waiting(0)
    assert not run("may_go_on", 0) and waiting.is_alive()
    run("tick", 1)
    assert ended(waiting)


def test_who_leaves_is_not_waited_for(graph):
    run = Run(2)
    run("tick", 0)
    waiting = run.waiting(0)
    run("leave", 1)
    assert ended(waiting)
    for _ in range(3):
        run("tick", 0)
        run("wait", 0)
    run("enter", 1)
    assert run.read() == [4, 4]  # it goes on with the slowest of the others


def test_who_comes_back_goes_on_with_its_own_clock(graph):
    run = Run(2)
    run("tick", 0)
    run("enter", 0)
    assert run.read() == [1, 0] and not run("may_go_on", 0)


def test_who_is_released_waits_no_more_until_it_enters_again(graph):
    run = Run(2)
    run("tick", 0)
    waiting = run.waiting(0)
    run("release", 0)
    assert ended(waiting)
    run("tick", 0)
    run("wait", 0)
    run("enter", 0)
    assert not run("may_go_on", 0) and run.read() == [2, 0]


def test_a_wait_notes_what_was_known_at_its_end(graph):
    run = Run(2)
    run("tick", 0)
    run("tick", 1)
    assert run("pulled", 0) == 0
    run("wait", 0)
    assert (run("pulled", 0), run("pulled", 1)) == (1, 0)
