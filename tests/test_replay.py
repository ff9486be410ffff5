"""common/replay.py: workers of a scheme in one process, each at its own pace."""

import types

import numpy as np
import pytest

from common import data, models, tf
from common.batches import Batches
from common.replay import Replay


def hogwild_like(center, local, hp):
    """Pull, train, push."""
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield local.pull(center)
    yield local.train(1, sgd)
    yield center.push(sgd, local.gradient)


def synchronous(center, local, hp):
    """The same, and all wait for each other."""
    sgd, others = tf.train.GradientDescentOptimizer(hp.learning_rate), center.together(local)
    yield local.pull(center)
    yield local.train(1, sgd)
    yield others.push(sgd, local.gradient)
    yield others.wait()


@pytest.fixture
def make(regression):
    """A function that makes a replay of a linear regression."""
    replays = []

    def make(num_workers=2, seed=0, scheme=hogwild_like):
        def make_batches(i):
            x, y = data.shard(regression, i, num_workers)
            return Batches(x, y, 4, seed=seed + i, name=f"batches_{i}")

        hp = types.SimpleNamespace(learning_rate=0.01)
        replay = Replay(scheme, hp, models.build("linear", regression), make_batches, num_workers)
        replays.append(replay)
        return replay

    yield make
    for replay in replays:
        replay.close()


def test_workers_of_one_pace_take_turns(make):
    replay = make(num_workers=3)
    replay.run(9)
    assert [update.worker for update in replay.updates] == [0, 1, 2] * 3
    assert [update.staleness for update in replay.updates] == [0, 1, 2] + [2] * 6
    assert [update.updated for update in replay.updates] == list(range(1, 10))


def test_a_slow_worker_is_stale_and_makes_nobody_wait(make):
    replay = make(num_workers=2)
    replay.run(22, lambda worker: 10.0 if worker else 1.0)
    slow = [update for update in replay.updates if update.worker == 1]
    assert [update.staleness for update in slow] == [10, 10]
    assert {update.staleness for update in replay.updates if update.worker == 0} == {0, 1}


def test_it_learns(make, regression):
    replay = make()
    before, accuracy = replay.evaluate(regression.x_test, regression.y_test)
    replay.run(300)
    after, _ = replay.evaluate(regression.x_test, regression.y_test)
    assert after < before / 10
    assert np.isnan(accuracy)
    assert replay.evaluate(regression.x_train, regression.y_train)[0] < 1  # another number of samples
    assert len(replay.losses) >= 300 and replay.losses[-1][1] < replay.losses[0][1]


def test_it_goes_on_where_it_was(make):
    one, two = make(), make()
    one.run(10)
    two.run(4)
    two.run(6)
    np.testing.assert_array_equal(one.center, two.center)
    np.testing.assert_array_equal(one.replicas, two.replicas)


@pytest.mark.parametrize("scheme", [hogwild_like, synchronous])
def test_restart_is_as_a_new_replay(make, scheme):
    new, again = make(seed=7, scheme=scheme), make(scheme=scheme)
    again.run(3)
    again.step(1)  # in the middle of a round: what it left must not count
    other = again.center
    again.restart(lambda i: 7 + i)
    np.testing.assert_array_equal(again.center, new.center)
    for replay in (new, again):
        replay.run(10)
    np.testing.assert_array_equal(again.center, new.center)
    assert (again.updates, again.dropped, again.losses) == (new.updates, new.dropped, new.losses)
    again.restart(lambda i: i)
    again.run(3)
    again.step(1)
    np.testing.assert_array_equal(again.center, other)
