"""common/simulation/timeline.py: what each worker of a scheme does when."""

import types

import matplotlib.pyplot as plt
import pytest

from common import tf
from common.simulation import timeline


def asynchronous(center, local, hp):
    """Pull, train a window, push."""
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield local.pull(center)
    yield local.train(hp.window, sgd)
    yield center.push(sgd, local.gradient)


def synchronous(center, local, hp):
    """The same, and all wait for each other."""
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    others = center.together(local)
    yield local.pull(center)
    yield local.train(hp.window, sgd)
    yield others.push(sgd, local.gradient)
    yield others.wait()


def spans_of(scheme, worker):
    hp = types.SimpleNamespace(window=2, learning_rate=0.1)
    found = timeline.spans(scheme, hp, seconds=(1.0, 2.0), message=0.5, until=9.0)
    return [tuple(span)[1:] for span in sorted(found, key=lambda span: span.start) if span.worker == worker]


@pytest.mark.slow
def test_workers_at_their_own_pace():
    assert spans_of(asynchronous, 0)[:4] == [
        ("pull", 0, 0.5, 0),
        ("train", 0.5, 2.5, 2),
        ("push", 2.5, 3, 0),
        ("pull", 3, 3.5, 0),
    ]
    slow = spans_of(asynchronous, 1)
    assert slow[1] == ("train", 0.5, 4.5, 2) and slow[3] == ("pull", 5, 5.5, 0)


@pytest.mark.slow
def test_workers_that_wait_for_each_other():
    fast, slow = (spans_of(synchronous, worker) for worker in (0, 1))
    assert fast[2:5] == [("push", 2.5, 3, 0), ("wait", 3, 5, 0), ("pull", 5, 5.5, 0)]
    assert [part for part, *_ in slow] == ["pull", "train", "push", "pull", "train"] and slow[3] == ("pull", 5, 5.5, 0)


@pytest.mark.slow
def test_a_push_that_is_thrown_away():
    """That of the slow worker, which others have overtaken; it pulls again, as ever."""

    def fresh(center, local, hp):
        sgd, exact = tf.train.GradientDescentOptimizer(hp.learning_rate), center.exact(local, "step", 1)
        yield exact.pull()
        yield local.train(hp.window, sgd)
        yield exact.push(sgd, local.gradient)

    fast, slow = (spans_of(fresh, worker) for worker in (0, 1))
    assert slow[1:4] == [("train", 0.5, 4.5, 2), ("dropped", 4.5, 5, 0), ("pull", 5, 5.5, 0)]
    assert "dropped" not in {part for part, *_ in fast}


def test_pulls_ahead():
    """A worker waits only for what is not there yet."""

    def ahead(center, local, hp):
        sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
        yield local.pull_ahead(center)
        yield local.train(1, sgd)
        yield center.push(sgd, local.gradient)

    hp = types.SimpleNamespace(learning_rate=0.1)
    found = timeline.spans(ahead, hp, seconds=(0.25,), message=0.5, until=4.0)
    assert [part for _, part, *_ in found[:4]] == ["train", "push"] * 2
    assert [(span.start, span.end) for span in found[:3]] == [(0, 0.25), (0.25, 0.75), (0.75, 1)]


def in_turn(center, local, hp):
    """Send a fragment, and receive it after more local steps, which go on meanwhile."""
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    others, known = center.together(local), local.copy("known")
    for p in range(2):
        own = center.fragment(p)
        yield local.train(1, sgd)
        yield others.send(p, sgd, known[own] - local.value[own])
        yield local.train(hp.window, sgd)
        yield others.receive(p, known)


def lanes_of(worker, window, seconds, message, until=12.0):
    """Returns what a worker of `in_turn` does, and what travels meanwhile."""
    hp = types.SimpleNamespace(window=window, learning_rate=0.1, fragments=2)
    found = timeline.spans(in_turn, hp, seconds, message, until)
    own = [tuple(span)[1:] for span in sorted(found, key=lambda span: span.start) if span.worker == worker]
    return tuple([span for span in own if (span[0] in timeline.BESIDE) == beside] for beside in (False, True))


@pytest.mark.slow
def test_a_message_travels_while_its_worker_goes_on():
    """The slower worker never waits: x̃ is there before its steps are done. The faster one waits for x̃."""
    slow, of_slow = lanes_of(1, 2, (1.0, 2.0), 0.5)
    assert slow[:4] == [("train", 0, 2, 1), ("train", 2, 6, 2), ("train", 6, 8, 1), ("train", 8, 12, 2)]
    assert of_slow[:3] == [("send", 2, 2.5, 0), ("receive", 2.5, 3, 0), ("send", 8, 8.5, 0)]
    assert of_slow[3] == ("receive", 8.5, 9, 0)  # which the worker takes at 12, when nothing begins any more
    fast, of_fast = lanes_of(0, 2, (1.0, 2.0), 0.5)
    assert fast[:3] == [("train", 0, 1, 1), ("train", 1, 3, 2), ("train", 3, 4, 1)]
    assert of_fast[:3] == [("send", 1, 1.5, 0), ("receive", 2.5, 3, 0), ("send", 4, 4.5, 0)]
    assert fast[3:5] == [("train", 4, 6, 2), ("wait", 6, 9, 0)]  # for the send at 8, then for the messages
    assert of_fast[3] == ("receive", 8.5, 9, 0)


@pytest.mark.slow
def test_a_push_in_the_middle_of_a_round_overlaps_with_the_next_steps():
    """The worker waits for a push only at the end of its round."""

    def twice(center, local, hp):
        yield from asynchronous(center, local, hp)
        sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
        yield local.train(hp.window, sgd)
        yield center.push(sgd, local.gradient)

    assert spans_of(twice, 0)[:6] == [
        ("pull", 0, 0.5, 0),
        ("train", 0.5, 2.5, 2),
        ("train", 2.5, 4.5, 2),
        ("send", 2.5, 3, 0),
        ("push", 4.5, 5, 0),
        ("pull", 5, 5.5, 0),
    ]


@pytest.mark.slow
def test_a_message_that_takes_longer_than_the_steps():
    """Then its worker waits until the fragment is back."""
    bar, lane = lanes_of(0, 1, (1.0, 1.0), 2.0)
    assert bar[:4] == [("train", 0, 1, 1), ("train", 1, 2, 1), ("wait", 2, 5, 0), ("train", 5, 6, 1)]
    assert lane[:3] == [("send", 1, 3, 0), ("receive", 3, 5, 0), ("send", 6, 8, 0)]


@pytest.mark.slow
def test_the_lane_is_drawn_only_where_something_travels(monkeypatch):
    """Under the bar, and not on it."""
    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", lambda: None)

    def rows(scheme):
        timeline.draw(scheme, types.SimpleNamespace(window=2, learning_rate=0.1, fragments=2), (1.0,), 0.5, 6.0)
        boxes = [each.get_paths()[0].get_extents() for each in plt.gca().collections]
        plt.close()
        return {(round(box.y0, 2), round(box.y1, 2)) for box in boxes}

    assert rows(asynchronous) == {(-0.36, 0.36)}
    assert rows(in_turn) == {(-0.36, 0.14), (0.18, 0.36)}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [asynchronous, synchronous])
def test_a_worker_does_one_thing_at_a_time(scheme):
    for worker in (0, 1):
        spans = spans_of(scheme, worker)
        assert all(one[2] == other[1] for one, other in zip(spans, spans[1:]))
