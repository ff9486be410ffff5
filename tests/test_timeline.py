"""common/timeline.py: what each worker of a scheme does when."""

import types

import pytest

from common import tf, timeline


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


def test_workers_at_their_own_pace():
    assert spans_of(asynchronous, 0)[:4] == [
        ("pull", 0, 0.5, 0),
        ("train", 0.5, 2.5, 2),
        ("push", 2.5, 3, 0),
        ("pull", 3, 3.5, 0),
    ]
    slow = spans_of(asynchronous, 1)
    assert slow[1] == ("train", 0.5, 4.5, 2) and slow[3] == ("pull", 5, 5.5, 0)


def test_workers_that_wait_for_each_other():
    fast, slow = (spans_of(synchronous, worker) for worker in (0, 1))
    assert fast[2:5] == [("push", 2.5, 3, 0), ("wait", 3, 5, 0), ("pull", 5, 5.5, 0)]
    assert [part for part, *_ in slow] == ["pull", "train", "push", "pull", "train"] and slow[3] == ("pull", 5, 5.5, 0)


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


@pytest.mark.parametrize("scheme", [asynchronous, synchronous])
def test_a_worker_does_one_thing_at_a_time(scheme):
    for worker in (0, 1):
        spans = spans_of(scheme, worker)
        assert all(one[2] == other[1] for one, other in zip(spans, spans[1:]))
