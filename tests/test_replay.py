"""common/simulation/replay.py: workers of a scheme in one process, each at its own pace."""

import types

import numpy as np
import pytest

from common import tf
from common.data import datasets
from common.data.batches import Batches
from common.models import keras_model
from common.simulation.replay import Replay


def hogwild_like(center, local, hp):
    """Pull, train, push."""
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield local.pull(center)
    yield local.train(1, sgd)
    yield center.push(sgd, local.gradient)


@pytest.fixture
def make(regression):
    """A function that makes a replay of a linear regression."""
    replays = []

    def make(num_workers=2, seed=0, scheme=hogwild_like):
        def make_batches(i):
            x, y = datasets.shard(regression, i, num_workers)
            return Batches(x, y, 4, seed=seed + i, name=f"batches_{i}")

        hp = types.SimpleNamespace(learning_rate=0.01)
        replay = Replay(scheme, hp, keras_model.build("linear", regression), make_batches, num_workers)
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


def together(center, local, hp):
    """An update of the first two gradients of three."""
    both = center.together(local, backup_workers=1)
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield local.pull(center)
    yield local.train(1, sgd)
    yield both.push(sgd, local.gradient)
    yield both.wait()


def paced(center, local, hp):
    """Nobody is more than a round ahead."""
    pace = center.pace(local, staleness=1)
    yield pace.wait()
    yield from hogwild_like(center, local, hp)
    yield pace.tick()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [hogwild_like, together, paced])
def test_steps_that_are_taken_in_one_call_are_the_same(make, scheme):
    """To the byte; a worker that has to wait is passed over."""
    once, single, taken = make(3, scheme=scheme), make(3, scheme=scheme), []
    order = np.random.default_rng(2).choice(3, 150, p=[0.5, 0.4, 0.1]).tolist()
    for worker in order:
        if not single.has_to_wait(worker):
            single.step(worker)
            taken.append(worker)
    assert once.take(order[:70]) + once.take(order[70:]) == taken
    assert (taken != order) == (scheme is not hogwild_like)
    assert once.take([]) == []
    assert once.center.tobytes() == single.center.tobytes() and once.replicas.tobytes() == single.replicas.tobytes()
    assert (once.updates, once.dropped, once.losses) == (single.updates, single.dropped, single.losses)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [hogwild_like, together, paced])
def test_one_call_does_what_single_steps_do(make, monkeypatch, scheme):
    """To the byte."""
    once, single = make(3, scheme=scheme), make(3, scheme=scheme)
    order, do = [], once._do

    def noted():
        order.append([begun.worker for begun in once._begun])
        do()

    monkeypatch.setattr(once, "_do", noted)
    pace = np.random.default_rng(1)
    once.run(12, lambda worker: pace.uniform(0.5, 1.5))
    once.run(8, lambda worker: pace.uniform(0.5, 1.5))
    once.run(0)  # which changes nothing
    assert len(order) == 3
    for workers in order:
        for worker in workers:
            single.step(worker)
    assert once.center.tobytes() == single.center.tobytes() and once.replicas.tobytes() == single.replicas.tobytes()
    assert (once.updates, once.dropped, once.losses) == (single.updates, single.dropped, single.losses)
    assert bool(once.dropped) == (scheme is together)


def test_operations_that_count_otherwise_are_a_fault(make):
    replay = make()
    replay._versions.updates = 5
    with pytest.raises(RuntimeError, match="in step 0 of a round of worker 1: expected -1 after 5, found -1 after 0"):
        replay.step(1)


@pytest.mark.slow
def test_it_learns(make, regression):
    replay = make()
    before, accuracy = replay.evaluate(regression.x_test, regression.y_test)
    replay.run(300)
    after, _ = replay.evaluate(regression.x_test, regression.y_test)
    assert after < before / 10
    assert np.isnan(accuracy)
    assert replay.evaluate(regression.x_train, regression.y_train)[0] < 1  # another number of samples
    assert len(replay.losses) >= 300 and replay.losses[-1][1] < replay.losses[0][1]


@pytest.mark.slow
def test_it_goes_on_where_it_was(make):
    one, two = make(), make()
    one.run(10)
    two.run(4)
    two.run(6)
    np.testing.assert_array_equal(one.center, two.center)
    np.testing.assert_array_equal(one.replicas, two.replicas)


@pytest.mark.slow
def test_it_begins_anew(make):
    """In the same order of samples, or in that of a new Replay with other seeds."""
    once, again = make(), make()
    once.run(10)
    again.run(7)
    again.restart()
    assert again.updates == [] and again.losses == []
    again.run(10)
    np.testing.assert_array_equal(again.center, once.center)
    assert again.updates == once.updates and again.losses == once.losses

    other = make(seed=50)
    other.run(10)
    again.restart(lambda worker: 50 + worker)
    again.run(10)
    np.testing.assert_array_equal(again.center, other.center)
    assert np.any(again.center != once.center)


def noisy(center, local, hp):
    """Random numbers of a generator that is no variable."""
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield local.pull(center)
    yield local.train(1, sgd)
    yield center.push(sgd, local.gradient + tf.random.uniform([], seed=5))


def in_a_loop(center, local, hp):
    """The same inside a function of the graph."""
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield local.pull(center)
    yield local.train(1, sgd)
    noise = tf.while_loop(lambda total: total < 2, lambda total: total + 1 + tf.random.uniform([], seed=5), [0.0])
    yield center.push(sgd, local.gradient + noise)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "stays"), [(hogwild_like, True), (paced, True), (together, False), (noisy, False), (in_a_loop, False)]
)
def test_the_session_stays_where_variables_are_all_its_state(make, scheme, stays):
    """After a restart; where accumulators or random generators have a state, too, it is another one."""
    once, again = make(3, scheme=scheme), make(3, scheme=scheme)
    session = again.session
    again.take([0, 1, 2] * 7)
    again.restart()
    assert (again.session is session) == stays
    for replay in once, again:
        replay.take([0, 1, 2] * 5)
    assert again.center.tobytes() == once.center.tobytes() and again.replicas.tobytes() == once.replicas.tobytes()


def test_nobody_waits_for_what_was_before_the_restart(regression):
    def bounded(center, local, hp):
        sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
        pace = center.pace(local, 2)
        yield pace.wait()
        yield local.pull(center)
        yield local.train(1, sgd)
        yield center.push(sgd, local.gradient)
        yield pace.tick()

    def make_batches(i):
        x, y = datasets.shard(regression, i, 2)
        return Batches(x, y, 4, seed=i, name=f"batches_{i}")

    replay = Replay(bounded, types.SimpleNamespace(learning_rate=0.01), keras_model.build("linear", regression), make_batches)
    steps = []
    for _ in range(2):
        steps.append(0)
        while not replay.has_to_wait(0):
            replay.step(0)
            steps[-1] += 1
        replay.restart()
    assert steps == [3 * 5, 3 * 5]
    replay.close()


def test_workers_may_share_samples_and_differ_in_labels(regression):
    """One array of x, and a y for each worker: each learns from its own."""
    x, y = regression.x_train, regression.y_train
    labels = [y, -y]

    def make_batches(i):
        return Batches(x, labels[i], len(x), seed=0, name=f"batches_{i}")

    hp = types.SimpleNamespace(learning_rate=0.01)
    replay = Replay(hogwild_like, hp, keras_model.build("linear", regression), make_batches)
    for worker in (0, 0, 1, 1):
        replay.step(worker)  # pulls, trains
    losses = dict(replay.losses)
    assert abs(losses[0] - losses[1]) > 0.1
    one, other = replay.replicas - replay.center
    assert np.abs(one - other).max() > 0.01
    replay.close()
