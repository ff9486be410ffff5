"""scheme/rounds.py: a scheme that is slightly wrong works, or one line says what is wrong; it never trains silently wrong."""

import math
import types

import numpy as np
import pytest

from common import tf
from common.cluster.task_spec import TaskSpecDef
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import _Chain, build_rounds, build_steps, repeat_rounds
from common.scheme.steps import Step

SIZE = 4


class Ones(LocalParameters):
    """Local parameters whose every gradient is one, and whose x stays as it was pulled."""

    def __init__(self, center, index=0, num_workers=1):
        batches = types.SimpleNamespace(init_feed_dict={}, begin_call=lambda: None)
        model = types.SimpleNamespace(size=center.size, initial_state=[])
        super().__init__(center, model, batches, f"worker_{index}", index, num_workers)

    def train(self, window, optimizer, at=None, accumulate=False):
        """Stands in for the local steps."""
        return Step((self.gradient.assign(tf.ones([self.model.size]), read_value=False),), (tf.constant(0.0),))


@pytest.fixture
def place(graph):
    """A function that makes x̃ = 0, cut in pieces, and so many workers."""

    def place(num_workers=1, num_ps=1):
        center = GlobalParameters(np.zeros(SIZE, np.float32), num_ps)
        return center, *(Ones(center, i, num_workers) for i in range(num_workers))

    return place


@pytest.fixture
def after(place, initialized):
    """A function that gives x̃ and the steps after one call of so many rounds of a scheme, with one worker."""

    def after(scheme, rounds, num_ps=1):
        center, local = place(num_ps=num_ps)
        built = build_rounds(scheme, center, local, None, rounds)
        session = initialized(center, local)
        if waits := center.waits(local):
            session.run(waits.enter)
        steps = session.run(built).steps
        return session.run(center.read()[0]), steps.tolist()

    return after


def sgd(rate=1.0):
    return tf.train.GradientDescentOptimizer(rate)


@pytest.mark.parametrize("on", ["ps", "worker"])
def test_learning_rate_that_is_a_tensor(place, initialized, on):
    """η = 1/(1 + step), in each round of a call its own: 1 + 1/2 + 1/3 + 1/4."""

    def scheme(center, local, hp):
        pull = local.pull(center)
        yield pull
        rate = 1 / (1 + tf.cast(pull.pulled, tf.float32))
        yield local.train(1, None)
        if on == "worker":
            yield Step((local.apply(sgd(rate), local.gradient),))
            yield center.add(local.value - center.read()[0])
        else:
            yield center.push(sgd(rate), local.gradient)

    center, local = place()
    built = build_rounds(scheme, center, local, None, 4)
    session = initialized(center, local)
    session.run(built)
    np.testing.assert_allclose(session.run(center.read()[0]), np.full(SIZE, -(1 + 1 / 2 + 1 / 3 + 1 / 4)), rtol=1e-6)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_optimizer_whose_class_is_defined_in_the_scheme(place, initialized, in_a_loop):
    """It has one set of slots: momentum, v ← v/2 + 1."""

    def scheme(center, local, hp):
        class Own(tf.train.MomentumOptimizer):
            pass

        yield local.pull(center)
        yield local.train(1, None)
        yield center.push(Own(1.0, 0.5), local.gradient)

    center, local = place()
    built = build_rounds(scheme, center, local, None, 3)
    if in_a_loop:
        built = repeat_rounds(scheme, center, local, None, 1, 3)
    session = initialized(center, local)
    session.run(built)
    np.testing.assert_allclose(session.run(center.read()[0]), np.full(SIZE, -(1 + 1.5 + 1.75)))
    assert len([variable for variable in tf.global_variables() if "Momentum" in variable.name]) == 1


def test_one_optimizer_for_both_sides_has_slots_on_both(place, initialized):
    """Adam, whose powers of β would otherwise be those of both."""

    def scheme(center, local, hp):
        adam = tf.train.AdamOptimizer(0.1)
        yield local.pull(center)
        yield local.train(1, None)
        yield Step((local.apply(adam, local.gradient),))
        yield center.push(adam, local.gradient)

    center, local = place()
    built = build_rounds(scheme, center, local, None, 2)
    session = initialized(center, local)
    session.run(built)
    np.testing.assert_allclose(session.run(center.read()[0]), np.full(SIZE, -0.2), rtol=1e-5)  # with g = 1 a step is η
    assert len([variable for variable in tf.global_variables() if "beta" in variable.name]) == 2


def test_variable_of_each_round(place, user_error):
    def scheme(center, local, hp):
        yield local.pull(center)
        yield local.train(1, None)
        tf.get_variable(f"mine_{len(tf.global_variables())}", [])
        yield center.push(sgd(), local.gradient)

    center, local = place()
    with user_error("scheme makes a new variable in every round, mine_", "use local.vector or center.slot"):
        build_rounds(scheme, center, local, None, 2)


def test_optimizers_that_change_from_round_to_round(place, user_error):
    kinds = iter([sgd(), tf.train.AdamOptimizer(0.1)])

    def scheme(center, local, hp):
        yield local.pull(center)
        yield local.train(1, None)
        yield center.push(next(kinds), local.gradient)

    center, local = place()
    with user_error("the same optimizers in every round: it was GradientDescentOptimizer, now AdamOptimizer"):
        build_rounds(scheme, center, local, None, 2)


def together(center, local, hp):
    others = center.together(local)
    yield local.pull(center)
    yield local.train(1, None)
    yield others.push(sgd(), local.gradient)
    yield others.wait()


def without_wait(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)
    yield center.together(local).push(sgd(), local.gradient)


def without_tick(center, local, hp):
    yield center.pace(local, 10).wait()
    yield local.pull(center)
    yield local.train(1, None)
    yield center.push(sgd(), local.gradient)


def two_paces(center, local, hp):
    yield center.pace(local, 10).wait()
    yield local.pull(center)
    yield local.train(1, None)
    yield center.push(sgd(), local.gradient)
    yield center.pace(local, 0).tick()


def pace_and_quorum(center, local, hp):
    yield center.pace(local, 0).wait()
    yield local.pull(center)
    yield local.train(1, None)
    yield center.together(local, backup_workers=1).push(sgd(), local.gradient)


def push_after_push_together(center, local, hp):
    yield from together(center, local, hp)
    yield center.push(sgd(), local.gradient)


def two_memories(center, local, hp):
    yield center.exact(local, "step").pull()
    yield local.train(1, None)
    yield center.exact(local, "value").push(sgd(), local.gradient, lambda g, at_update: g)


def exact_push_alone(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)
    yield center.exact(local, "step").push(sgd(), local.gradient, lambda g, at_update: g)


def two_pushes_after_a_pull(center, local, hp):
    exact = center.exact(local, "step", 2)
    yield exact.pull()
    yield local.train(1, None)
    yield exact.push(sgd(), local.gradient)
    yield exact.push(sgd(), local.gradient)


def threshold_of_a_value(center, local, hp):
    yield center.exact(local, "value", 2).pull()


def no_pull(center, local, hp):
    yield local.train(1, None)
    yield center.push(sgd(), local.gradient)


def together_without_pull(center, local, hp):
    others = center.together(local)
    yield local.train(1, None)
    yield others.push(sgd(), local.gradient)
    yield others.wait()


def forgotten_yield(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)
    yield center.push(sgd(), local.gradient)
    local.pull(center)


def a_slot_is_no_vector(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)
    yield local.assign(center.slot("mean"), local.gradient)


def tick_before_push(center, local, hp):
    pace = center.pace(local, 10)
    yield pace.wait()
    yield local.pull(center)
    yield pace.tick()
    yield local.train(1, None)
    yield center.push(sgd(), local.gradient)


def wait_after_pull(center, local, hp):
    pace = center.pace(local, 10)
    yield local.pull(center)
    yield pace.wait()
    yield local.train(1, None)
    yield center.push(sgd(), local.gradient)
    yield pace.tick()


def waits_and_reads(center, local, hp):
    yield center.pace(local, 10).wait() + local.pull(center)


def made_too_early(center, local, hp):
    pull, push = local.pull(center), center.push(sgd(), local.gradient)
    yield pull
    yield local.train(1, None)
    yield push


def yielded_twice(center, local, hp):
    yield (pull := local.pull(center))
    yield local.train(1, None)
    yield center.push(sgd(), local.gradient)
    yield pull


def difference_without_compare(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)
    yield center.add(0.5 * local.difference)


def an_optimizer_each_time(center, local, hp):
    for _ in range(2):
        yield local.pull(center)
        yield local.train(1, None)
        yield center.push(tf.train.AdagradOptimizer(0.1), local.gradient)


def whole_numbers_of_all(center, local, hp):
    others = center.together(local)
    yield local.pull(center)
    yield local.train(1, None)
    yield others.push(sgd(), local.gradient, of_all=lambda g, at_update: tf.cast(g, tf.int8))


def a_number_at_the_ps(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)
    yield center.push(sgd(), local.gradient, lambda g, at_update: tf.reduce_max(g))


def list_of_messages(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)
    yield center.push(sgd(), [local.gradient + 0, tf.constant(1.0)])


def staleness_without_exact(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)
    yield center.push(sgd(), local.gradient, lambda g, at_update: g / at_update.staleness)


def no_push(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)


def no_training(center, local, hp):
    yield local.pull(center)
    yield center.push(sgd(), local.gradient)


def operations(center, local, hp):
    yield [local.value.assign_add(local.value)]


def part_of_the_gradient(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)
    yield center.push(sgd(), local.gradient[:2])


def whole_numbers(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)
    yield center.push(sgd(), tf.cast(local.gradient, tf.int8))


def no_optimizer(center, local, hp):
    yield local.pull(center)
    yield local.train(1, None)
    yield center.push(0.1, local.gradient)


def two_reads_at_once(center, local, hp):
    yield local.pull(center) + local.compare(center)


def no_worker_left(center, local, hp):
    yield center.together(local, backup_workers=2).wait()


def together_ahead(center, local, hp):
    others = center.together(local)
    yield local.pull_ahead(center)
    yield local.train(1, sgd())
    yield others.push(sgd(), local.gradient)
    yield others.wait()


WRONG = {
    without_wait: "with center.together, a round reads x̃, then needs a `push(...)` and a `wait()`; it has read, push",
    without_tick: "a round needs a `wait()`, then reads and changes x̃, and then one `tick()`; it has wait, read, change",
    tick_before_push: "it has wait, read, tick, change",
    wait_after_pull: "it has read, wait, change, tick",
    waits_and_reads: "a step that waits cannot be added to another",
    made_too_early: "made_too_early makes a step that changes x̃ and does not yield it: write `yield` before it",
    yielded_twice: "yielded_twice yields a step made before an earlier `yield`",
    difference_without_compare: "local.difference is the result of `local.compare(center)`",
    an_optimizer_each_time: "a round uses two equal optimizers with slots, AdagradOptimizer",
    two_paces: "with the same arguments everywhere, not both: center.pace(local, 10) and center.pace(local, 0)",
    pace_and_quorum: "with the same arguments everywhere, not both: center.pace(local, 0) and center.together(local, 1, True)",
    push_after_push_together: "push_after_push_together both pushes alone and takes part in updates of several workers",
    two_memories: "with the same arguments everywhere, not both: center.exact(local, 'step') and center.exact(local, 'value')",
    exact_push_alone: "exact_push_alone: with center.exact, a round begins with its `pull()`; it has push",
    two_pushes_after_a_pull: "with a threshold, `pull()` and `push(...)` take turns; it has pull, push, push",
    threshold_of_a_value: """a staleness threshold needs "step" and a number above 0, not 'value' and 2""",
    together_without_pull: "with center.together, a round reads x̃, then needs a `push(...)` and a `wait()`; it has push, wait",
    forgotten_yield: "forgotten_yield makes a step that reads x̃ and does not yield it: write `yield` before it",
    a_slot_is_no_vector: "local.assign changes a vector that local.vector(name) has returned, not [",
    whole_numbers_of_all: "`of_all` must return the gradient that the optimizer gets: expected float32 values, not of int8",
    a_number_at_the_ps: "`at_ps` must return the gradient of a piece of x̃: expected shape [4], not ()",
    list_of_messages: "tf.IndexedSlices of one, a scalar, or a tuple of these, not list",
    staleness_without_exact: 'only the push of `center.exact(local, "step")` knows at_update.staleness',
    no_pull: "no_pull changes the global parameters before it has read them",
    no_push: "no_push never changes the global parameters",
    no_training: "no_training does not train",
    operations: "a scheme yields steps, such as `local.pull(center)`, not list",
    part_of_the_gradient: "a message is a vector [4], as the parameters are",
    whole_numbers: "without `at_ps`, a message is the gradient that the optimizer gets: expected float32 values, not of int8",
    no_optimizer: "expected an optimizer of tf.train, as tf.train.AdamOptimizer(0.001), not 0.1",
    two_reads_at_once: "two steps that both have `pulled` cannot be one",
    together_ahead: "together_ahead pulls ahead in updates of several workers: `local.pull_ahead(center)` is for",
    no_worker_left: "2 backup workers of 2 leave no worker",
}


@pytest.mark.parametrize("build", [build_steps, build_rounds])
@pytest.mark.parametrize("scheme", WRONG, ids=lambda scheme: scheme.__name__)
def test_scheme_that_is_wrong(place, user_error, scheme, build):
    center, local, _ = place(num_workers=2)
    with user_error(WRONG[scheme]):
        build(scheme, center, local, None)


def test_steps_at_once(place, initialized):
    """Both happen, and what comes of them is there."""
    center, local = place()
    pull, add = local.pull(center), center.add(tf.ones([SIZE]))
    both = pull + add + Step(losses=(tf.constant(1.0), tf.constant(2.0)))
    session = initialized(center, local)
    found = session.run(both.fetches())
    assert (found["pulled"], found["updated"], found["loss"]) in ((0, 1, 1.5), (1, 1, 1.5))
    np.testing.assert_array_equal(session.run(center.read()[0]), np.ones(SIZE))


@pytest.mark.parametrize("num_ps", [1, 2, 3])
def test_messages_of_other_kinds(after, num_ps):
    """Whole numbers, some elements, a scalar, and several of them: a function on the ps makes a gradient of them."""

    def of(message, at_ps=None):
        def scheme(center, local, hp):
            yield local.pull(center)
            yield local.train(1, None)
            yield center.push(sgd(), message(local.gradient), at_ps)

        return after(scheme, 1, num_ps)[0].tolist()

    with tf.Graph().as_default():
        assert of(lambda g: tf.cast(3 * g, tf.int8), lambda part, at_update: tf.cast(part, tf.float32)) == [-3.0] * SIZE
    with tf.Graph().as_default():
        some = of(lambda g: tf.IndexedSlices(tf.constant([5.0, 7.0]), tf.constant([0, 3], tf.int64)))
        assert some == [-5.0, 0.0, 0.0, -7.0]
    for wrong in -1, SIZE:  # in no piece
        with tf.Graph().as_default(), pytest.raises(tf.errors.InvalidArgumentError):
            of(lambda g: tf.IndexedSlices(tf.constant([5.0, 7.0]), tf.constant([0, wrong], tf.int64)))  # noqa: B023
    with tf.Graph().as_default():
        scaled = of(lambda g: (tf.cast(g, tf.int8), tf.constant(0.5)), lambda part, _: tf.cast(part[0], tf.float32) * part[1])
        assert scaled == [-0.5] * SIZE


@pytest.mark.slow
def test_votes(graph, initialized):
    """Three workers send signs as whole numbers; the sign of their sum is the gradient."""
    center = GlobalParameters(np.zeros(SIZE, np.float32))
    workers, signs = [Ones(center, i, 3) for i in range(3)], [[1, 1, -1, -1], [1, -1, -1, 1], [1, -1, 1, -1]]

    def scheme(center, local, hp):
        others = center.together(local, mean=False)
        yield local.pull(center)
        yield local.train(1, None)
        votes = tf.constant(signs[local.index], tf.int8)
        yield others.push(sgd(), votes, at_ps=lambda part, _: tf.cast(part, tf.float32), of_all=lambda mean, _: tf.sign(mean))
        yield others.wait()

    steps = [build_steps(scheme, center, worker, None) for worker in workers]
    session = initialized(center, *workers)
    for worker in workers:
        session.run(center.waits(worker).enter)
    for i in range(3):
        for step in steps[i][:3]:
            session.run(step.operations)
    np.testing.assert_array_equal(session.run(center.read()[0]), [-1, 1, 1, 1])


@pytest.mark.parametrize("num_ps", [1, 2])
def test_some_elements_of_all(after, num_ps):
    """Elements that several workers send are added where they meet."""

    def scheme(center, local, hp):
        others = center.together(local)
        yield local.pull(center)
        yield local.train(1, None)
        yield others.push(sgd(), tf.IndexedSlices(tf.constant([5.0, 7.0]), tf.constant([0, 3], tf.int64)))
        yield others.wait()

    assert after(scheme, 2, num_ps)[0].tolist() == [-10.0, 0.0, 0.0, -14.0]


def test_a_loop_keeps_the_order_of_a_wait_and_a_read(graph):
    """The wait is on one ps; the next round of a loop reads on the other one only after it, too."""
    task = TaskSpecDef("worker", 0, ps_hosts=["a:1", "b:1"], worker_hosts=["c:1"])
    center = GlobalParameters(np.zeros(SIZE, np.float32), 2, task.device_fn())
    local = Ones(center)
    chain = _Chain([], [], local)
    with tf.device(task.device):
        chain.add(together, center, local, None, 1)
    one, other = (chain.ended_on(piece.device) for piece in center.pieces)
    waits = [operation for operation in one if operation in other]
    assert waits and {operation.device for operation in waits} == {center.step.device}


@pytest.mark.parametrize("push", ["push", "exact"])
def test_numbers_of_all_pieces_are_refused_on_several_ps(after, user_error, push):
    """Adam's powers of β would be multiplied once for each piece."""

    def scheme(center, local, hp):
        exact = center.exact(local, "step") if push == "exact" else None
        yield exact.pull() if exact else local.pull(center)
        yield local.train(1, None)
        adam = tf.train.AdamOptimizer(0.1)
        yield exact.push(adam, local.gradient, lambda g, _: g) if exact else center.push(adam, local.gradient)

    with user_error("AdamOptimizer keeps numbers for all parameters together", "choose --num_ps=1"):
        after(scheme, 1, 2)
    with tf.Graph().as_default():
        assert after(scheme, 3, 1)[0].tolist() == pytest.approx([-0.3] * SIZE, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_slot_of_the_ps(after, num_ps):
    """Momentum by a slot of the scheme's own, of which each ps has a piece: on arrival, and of all."""

    def momentum(g, at_update):
        u = at_update.slot("u")
        return u.assign(0.5 * u + g)

    def alone(center, local, hp):
        yield local.pull(center)
        yield local.train(1, None)
        yield center.push(sgd(), tf.constant([1.0, 2.0, 3.0, 4.0]), momentum)

    def meeting(center, local, hp):
        others = center.together(local)
        yield local.pull(center)
        yield local.train(1, None)
        yield others.push(sgd(), tf.constant([1.0, 2.0, 3.0, 4.0]), of_all=momentum)
        yield others.wait()

    for scheme in alone, meeting:
        with tf.Graph().as_default():
            moved = -(1 + 1.5 + 1.75)
            assert after(scheme, 3, num_ps)[0].tolist() == [moved, 2 * moved, 3 * moved, 4 * moved]


def test_pace_without_a_bound(after):
    def scheme(center, local, hp):
        pace = center.pace(local, math.inf)
        yield pace.wait()
        yield local.pull(center)
        yield local.train(1, None)
        yield center.push(sgd(), local.gradient)
        yield pace.tick()

    assert after(scheme, 3)[1] == [[0, 1], [1, 2], [2, 3]]
