"""The center, local parameters and steps: pull, push, windows and rounds give what NumPy gives, on one piece or on several."""

import contextlib
import os
import subprocess
import sys
import types

import keras
import numpy as np
import pytest

from common import tf
from common.cluster.task_spec import TaskSpecDef
from common.core.finite import loss_of_failed, must_be_finite
from common.launch import launcher
from common.models import keras_model
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import build_rounds, build_steps
from common.scheme.steps import Step

RATE = 0.05


def sgd():
    return tf.train.GradientDescentOptimizer(RATE)


def own(scheme_optimizer):
    """A scheme that pulls, trains and pushes with an optimizer that it makes itself, as the schemes' scripts do."""

    def scheme(center, local, hp):
        optimizer = scheme_optimizer()
        yield local.pull(center)
        yield local.train(hp.window, sgd())
        yield center.push(optimizer, local.gradient)

    return scheme


PULL_TRAIN_PUSH = own(sgd)


@pytest.fixture
def batches_of(regression):
    """The first batches of the regression, x [10, 4, 3] and y [10, 4, 1]."""
    return regression.x_train.reshape(10, 4, 3), regression.y_train.reshape(10, 4, 1)


def model_of(*layers, is_classification=False):
    """To be called before a graph is entered."""
    return keras_model.by_labels(keras.Sequential(list(layers)), is_classification)


@pytest.fixture
def model():
    """y = w x + b with three w."""
    keras.utils.set_random_seed(0)
    return model_of(keras.Input([3]), keras.layers.Dense(1, bias_initializer="ones"))


@pytest.fixture
def make(model, graph, batches_of, known_batches):
    """A function that makes global parameters and workers of a linear regression."""

    def make(num_ps=1, num_workers=1, **more):
        center = GlobalParameters(model.initial_parameters, num_ps)
        return center, *(
            LocalParameters(center, model, known_batches(*batches_of, f"b{i}"), f"w{i}", **more) for i in range(num_workers)
        )

    return make


def numpy_gradient(parameters, x, y):
    """Loss and gradient of mean((x w + b - y)²) at `parameters` [4] = w, b."""
    residual = x.astype(float) @ parameters[:3, None] + parameters[3] - y
    return np.mean(residual**2), np.append(2 * (x.astype(float).T @ residual).ravel(), 2 * residual.sum()) / residual.size


def numpy_window(parameters, batches, window, start=0, clip_norm=np.inf):
    """Returns parameters, sum of gradients and mean loss after `window` steps from batch number `start` on."""
    total = np.zeros(4)
    losses: list[float] = []
    for t in range(start, start + window):
        loss, gradient = numpy_gradient(parameters, *(b[t % len(b)] for b in batches))
        gradient *= min(1, clip_norm / np.linalg.norm(gradient))
        parameters, total, losses = parameters - RATE * gradient, total + gradient, [*losses, loss]
    return parameters, total, np.mean(losses)


def close(ours, expected):
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ps", [1, 2, 3, 4, 9])
def test_initial_values_reach_every_piece(make, initialized, num_ps):
    """Also when there are more ps tasks than parameters."""
    center, local = make(num_ps)
    session = initialized(center, local)
    assert len(center.pieces) == min(num_ps, 4)
    sizes = [int(piece.shape[0]) for piece in center.pieces]
    assert sum(sizes) == 4 and max(sizes) - min(sizes) <= 1
    np.testing.assert_array_equal(session.run(center.read()[0]), local.model.initial_parameters)
    np.testing.assert_array_equal(np.concatenate(session.run(center.pieces)), local.model.initial_parameters)
    assert session.run(center.step) == 0


def test_initial_values_are_not_in_the_graph(graph, initialized):
    """5 million parameters are 20 MB, which would be sent with every graph."""
    values = np.arange(5_000_000, dtype=np.float32)
    center = GlobalParameters(values, 2)
    assert graph.as_graph_def().ByteSize() < 20_000
    np.testing.assert_array_equal(initialized(center).run(center.read()[0]), values)


@pytest.mark.parametrize("num_ps", [1, 3])
def test_pull(make, initialized, num_ps):
    center, local = make(num_ps)
    pull = local.pull(center)
    session = initialized(center, local)
    np.testing.assert_array_equal(session.run(local.value), local.model.initial_parameters)  # x begins as a copy
    session.run(local.value.assign(tf.zeros([4])))
    session.run(pull.operations)
    np.testing.assert_array_equal(session.run(local.value), local.model.initial_parameters)


@pytest.mark.parametrize("num_ps", [1, 2, 3, 9])
def test_push(make, initialized, num_ps):
    center, _ = make(num_ps)
    gradient = np.array([1.0, -2.0, 3.0, 4.0], np.float32)
    push = center.push(sgd(), tf.constant(gradient))
    session = initialized(center)
    before = session.run(center.read()[0])
    for i in 1, 2:
        assert session.run(push.fetches())["updated"] == i
        close(session.run(center.read()[0]), before - i * RATE * gradient)
        assert session.run(center.step) == i


@pytest.mark.parametrize("clip_norm", [0.1, 3.0, 1e6])
@pytest.mark.parametrize("window", [1, 4])
def test_gradients_are_clipped_step_by_step(make, initialized, batches_of, window, clip_norm):
    """Not their sum. One that is short enough stays as it is."""
    center, local = make(clip_norm=clip_norm)
    train = local.train(window, sgd())
    session = initialized(center, local)
    session.run(train.fetches())
    initial = local.model.initial_parameters.astype(float)
    expected, total, _ = numpy_window(initial, batches_of, window, clip_norm=clip_norm)
    close(session.run(local.value), expected)
    close(session.run(local.gradient), total)


@pytest.mark.parametrize("window", [1, 2, 7])
def test_window_is_so_many_single_steps(make, initialized, batches_of, window):
    """The gradients are summed where the walk stood, the loss is their mean; the next window goes on with the next batches."""
    center, local = make()
    pull, train = local.pull(center), local.train(window, sgd())
    session = initialized(center, local)
    session.run(pull.operations)
    expected = local.model.initial_parameters.astype(float)
    for round in range(3):
        loss = session.run(train.fetches())["loss"]
        expected, total, expected_loss = numpy_window(expected, batches_of, window, round * window)
        close(session.run(local.value), expected)
        close(session.run(local.gradient), total)
        close(loss, expected_loss)
    np.testing.assert_array_equal(session.run(center.read()[0]), local.model.initial_parameters)  # nothing was pushed


@pytest.mark.parametrize("window", [1, 4])
def test_local_optimizer_keeps_its_slots(make, initialized, batches_of, window):
    """Momentum, v ← δ v + g; x ← x − η v, over several windows."""
    center, local = make()
    pull, train = local.pull(center), local.train(window, tf.train.MomentumOptimizer(RATE, 0.5))
    session = initialized(center, local)
    session.run(pull.operations)
    x, v = local.model.initial_parameters.astype(float), np.zeros(4)
    for t in range(3 * window):
        v = 0.5 * v + numpy_gradient(x, *(b[t % 10] for b in batches_of))[1]
        x = x - RATE * v
    for _ in range(3):
        session.run(train.operations)
    close(session.run(local.value), x)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam"])
def test_optimizer_of_local_steps(make, initialized, hyperparameters, batches_of, name, window):
    """As `--local_optimizer` says; three windows are as many single steps, and the slots are this worker's own."""
    center, local = make()
    before = set(tf.global_variables())
    hp = hyperparameters(local_optimizer=name, learning_rate=9, local_learning_rate=RATE, local_momentum=0.5)
    train = local.train(window, local.optimizer(hp))
    assert set(tf.global_variables()) == before
    session = initialized(center, local)
    x, m, v, s = local.model.initial_parameters.astype(float), np.zeros(4), np.zeros(4), np.full(4, 0.1)
    for t in range(3 * window):
        g = numpy_gradient(x, *(b[t % 10] for b in batches_of))[1]
        if name == "sgd":
            x = x - RATE * g
        elif name == "momentum":
            m = 0.5 * m + g
            x = x - RATE * m
        elif name == "adagrad":
            s = s + g**2
            x = x - RATE * g / np.sqrt(s)
        else:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            x = x - RATE * np.sqrt(1 - 0.999 ** (t + 1)) / (1 - 0.9 ** (t + 1)) * m / (np.sqrt(v) + 1e-8)
    for _ in range(3):
        session.run(train.operations)
    close(session.run(local.value), x)


def test_optimizer_of_local_steps_has_the_learning_rate_of_the_scheme(make, hyperparameters):
    _, local = make()
    hp = hyperparameters(local_optimizer="sgd", learning_rate=9, local_learning_rate=None)
    assert vars(local.optimizer(hp))["_learning_rate"] == 9


@pytest.mark.parametrize("num_ps", [1, 3])
def test_add(make, initialized, num_ps):
    center, _ = make(num_ps)
    difference = np.array([1.0, -2, 3, 4], np.float32)
    add = center.add(tf.constant(difference))
    session = initialized(center)
    before = session.run(center.read()[0])
    assert [session.run(add.fetches())["updated"] for _ in range(2)] == [1, 2]
    close(session.run(center.read()[0]), before + 2 * difference)


@pytest.mark.parametrize("num_ps", [1, 3])
@pytest.mark.parametrize("remember", ["step", "value"])
def test_exact_push_knows_what_came_since_the_pull(make, initialized, num_ps, remember):
    """Each of two workers has its own memory; what else the ps keeps by name is one vector for both."""
    center, one, other = make(num_ps, num_workers=2)

    def change(g, at_update):
        total = at_update.slot("total")
        with tf.control_dependencies([total.assign_add(g)]):
            return at_update.staleness + 0 * g if remember == "step" else at_update.value - at_update.pulled

    sgd_of_one = tf.train.GradientDescentOptimizer(1.0)
    steps = {}
    for local in one, other:
        exact = center.exact(local, remember)
        steps[local] = exact.pull().operations, exact.push(sgd_of_one, tf.ones([4]), change).operations
    plain = center.add(tf.fill([4], 10.0)).operations
    total = tf.concat([piece.read_value() for piece in center.slot("total")], axis=0)
    session = initialized(center, one, other)
    start = local.model.initial_parameters
    for local in one, other:
        session.run(steps[local][0])
    session.run(plain)
    session.run(steps[one][1])  # one update came in between, of + 10
    expected = start + 10 - (1 if remember == "step" else 10)
    close(session.run(center.read()[0]), expected)
    session.run(steps[other][1])  # two: that one and this
    close(session.run(center.read()[0]), expected - (2 if remember == "step" else expected - start))
    assert session.run(center.step) == 3
    np.testing.assert_array_equal(session.run(total), np.full(4, 2.0))
    assert [v.name for v in tf.global_variables() if "total" in v.name] == [v.name for v in center.slot("total")]


@pytest.mark.parametrize("num_ps", [1, 3])
def test_exact_push_that_is_too_stale_changes_nothing(make, initialized, num_ps):
    """Neither x̃, nor what an optimizer or the scheme keeps beside it, nor the global step: on no ps, or on all."""
    center, one, other = make(num_ps, num_workers=2)

    def counted(g, at_update):
        total = at_update.slot("total")
        return g + 0 * total.assign_add(g)

    momentum = tf.train.MomentumOptimizer(1.0, 0.5)
    steps = [(exact.pull(), exact.push(momentum, tf.ones([4]), counted))
             for exact in (center.exact(local, "step", 1) for local in (one, other))]  # fmt: skip
    session = initialized(center, one, other)
    kept = [v for v in tf.global_variables() if v is not center.step and v is not center.dropped]
    assert len(kept) == 3 * num_ps  # x̃, a momentum, a total; one more counts what is dropped
    for pull, _ in steps:
        session.run(pull.operations)
    found = session.run(steps[0][1].fetches())
    assert (found["step_before"], found["updated"]) == (0, 1)
    before = session.run(kept)
    found = session.run(steps[1][1].fetches())
    assert (found["step_before"], found["updated"], session.run(center.step)) == (1, 1, 1)
    for was, now in zip(before, session.run(kept), strict=True):
        np.testing.assert_array_equal(was, now)
    session.run(steps[1][0].operations)
    found = session.run(steps[1][1].fetches())
    assert (found["step_before"], found["updated"]) == (1, 2)
    close(session.run(center.read()[0]), one.model.initial_parameters - 1 - 1.5)


def test_slots_of_the_center_restore_on_another_number_of_ps(initialized, tmp_path):
    path = str(tmp_path / "model.ckpt")
    for num_ps in 2, 3:
        with tf.Graph().as_default():
            center = GlobalParameters(np.zeros(4, np.float32), num_ps)
            pieces = center.slot("mean_square")
            session, saver = initialized(center), tf.train.Saver()
            if num_ps == 2:
                session.run([piece.assign(tf.range(2.0) + 2 * i) for i, piece in enumerate(pieces)])
                saver.save(session, path)
            else:
                saver.restore(session, path)
                np.testing.assert_array_equal(np.concatenate(session.run(pieces)), np.arange(4))


def numpy_rounds(parameters, batches, rounds, window):
    """Returns x̃ and the losses after so many rounds of pulling, training a window and pushing."""
    losses: list[float] = []
    for i in range(rounds):
        _, total, loss = numpy_window(parameters, batches, window, i * window)
        parameters, losses = parameters - RATE * total, [*losses, loss]
    return parameters, losses


@pytest.mark.slow
@pytest.mark.parametrize(  # each two of these numbers together at least once
    ("num_ps", "window", "rounds"),
    [(1, 1, 1), (1, 3, 2), (1, 1, 5), (2, 3, 1), (2, 1, 2), (2, 3, 5), (9, 1, 1), (9, 3, 2), (9, 3, 5)],
)
def test_rounds_in_one_call(make, initialized, hyperparameters, batches_of, num_ps, window, rounds):
    """k rounds in one call are k calls of one round, and what NumPy gives."""
    center, local = make(num_ps)
    built = build_rounds(PULL_TRAIN_PUSH, center, local, hyperparameters(window=window), rounds)
    session = initialized(center, local)
    for call in 1, 2:
        result = session.run(built)
        expected, losses = numpy_rounds(local.model.initial_parameters.astype(float), batches_of, call * rounds, window)
        close(session.run(center.read()[0]), expected)
        close(result.loss, np.mean(losses[-rounds:]))
        last = call * rounds
        assert result.steps.tolist() == [[i - 1, i] for i in range(last - rounds + 1, last + 1)]


@pytest.mark.slow
def test_one_graph_holds_single_and_many_rounds(make, initialized, hyperparameters, batches_of):
    center, local = make(2)
    one = build_rounds(PULL_TRAIN_PUSH, center, local, hyperparameters(window=2))
    many = build_rounds(PULL_TRAIN_PUSH, center, local, hyperparameters(window=2), 4)
    session = initialized(center, local)
    for rounds in many, one, one, many:
        session.run(rounds)
    close(session.run(center.read()[0]), numpy_rounds(local.model.initial_parameters.astype(float), batches_of, 10, 2)[0])


@pytest.mark.parametrize("rounds", [1, 4])
def test_reading_afterwards_does_not_train(make, initialized, hyperparameters, rounds):
    """Such a read once depended on the last push of the rounds, so that an evaluation trained."""
    center, local = make(2)
    built = build_rounds(PULL_TRAIN_PUSH, center, local, hyperparameters(window=2), rounds)
    value, step = center.read()
    session = initialized(center, local)
    for _ in range(2):
        np.testing.assert_array_equal(session.run(value), local.model.initial_parameters)
        assert session.run(step) == session.run(center.step) == 0
    session.run(built)
    assert session.run(step) == rounds
    assert session.run(step) == rounds


def test_steps_run_one_at_a_time_are_a_round(make, initialized, hyperparameters, batches_of):
    center, local = make(2)
    pull, train, push = build_steps(PULL_TRAIN_PUSH, center, local, hyperparameters(window=3))
    session = initialized(center, local)
    start = local.model.initial_parameters.astype(float)
    for i in 1, 2:
        before = session.run(center.read()[0])
        for step in pull, train:
            session.run(step.operations)
            np.testing.assert_array_equal(session.run(center.read()[0]), before)
        session.run(push.operations)
        close(session.run(center.read()[0]), numpy_rounds(start, batches_of, i, 3)[0])


class Adagrad:
    """x ← x − η g / √a, a ← a + g², a = 0.1 before the first; written again in NumPy."""

    def __init__(self, parameters):
        self.parameters, self.squares = parameters.astype(float), np.full(len(parameters), 0.1)

    def apply(self, gradient):
        self.squares = self.squares + gradient**2
        self.parameters = self.parameters - RATE * gradient / np.sqrt(self.squares)


def test_push_with_adagrad(make, initialized):
    center, _ = make(3)
    gradient = tf.placeholder(tf.float32, [4])
    push = center.push(tf.train.AdagradOptimizer(RATE), gradient)
    session = initialized(center)
    expected = Adagrad(session.run(center.read()[0]))
    for value in [1, 2, -3, 0], [4, 0, 1, -1], [0.5, 1, 1, 1]:
        session.run(push.operations, {gradient: value})
        expected.apply(np.array(value))
        close(session.run(center.read()[0]), expected.parameters)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("num_ps", [1, 2])
def test_rounds_of_one_worker_share_the_slots(make, initialized, hyperparameters, batches_of, num_ps, rounds):
    """A ps has one set of slots, also when the rounds of one call, and calls of one and of many, each make the optimizer."""
    scheme = own(lambda: tf.train.AdagradOptimizer(RATE))
    center, local = make(num_ps)
    one = build_rounds(scheme, center, local, hyperparameters(window=1))
    many = build_rounds(scheme, center, local, hyperparameters(window=1), rounds)
    session = initialized(center, local)
    for built in many, one, many:
        session.run(built)
    expected = Adagrad(local.model.initial_parameters)
    for i in range(2 * rounds + 1):
        expected.apply(numpy_window(expected.parameters, batches_of, 1, i)[1])
    close(session.run(center.read()[0]), expected.parameters)
    slots = [v for v in tf.global_variables() if "Adagrad" in v.name]
    assert sum(int(np.prod(v.shape)) for v in slots) == 4


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 3])
def test_rounds_of_one_worker_share_the_slots_of_its_own_optimizer(make, initialized, hyperparameters, batches_of, rounds):
    """Momentum on the worker: its v goes on from round to round."""

    def scheme(center, local, hp):
        momentum = tf.train.MomentumOptimizer(RATE, 0.5)
        step = center.read()[1]  # nothing is pulled or pushed, so that x goes on, too
        yield local.train(hp.window, momentum) + Step(pulled=step, updated=step + 1)

    center, local = make()
    pull = local.pull(center)
    built = build_rounds(scheme, center, local, hyperparameters(window=2), rounds)
    session = initialized(center, local)
    session.run(pull.operations)
    x, v = local.model.initial_parameters.astype(float), np.zeros(4)
    for t in range(2 * 2 * rounds):
        v = 0.5 * v + numpy_gradient(x, *(b[t % 10] for b in batches_of))[1]
        x = x - RATE * v
    for _ in range(2):
        session.run(built)
    close(session.run(local.value), x)


@pytest.mark.parametrize("window", [1, 2])
def test_slots_of_a_worker_are_its_own(make, window):
    """They are not among the global variables, which the chief initializes, and saves, for all."""
    center, local = make()
    before = set(tf.global_variables())
    local.train(window, tf.train.MomentumOptimizer(RATE, 0.5))
    assert set(tf.global_variables()) == before
    assert any("Momentum" in variable.name for variable in tf.local_variables())


@pytest.mark.parametrize("optimizer", [lambda: tf.train.AdagradOptimizer(RATE), lambda: tf.train.MomentumOptimizer(RATE, 0.9)])
@pytest.mark.parametrize("num_ps", [1, 2, 3])
def test_checkpoint_of_two_pieces_restores_on_any_number(initialized, tmp_path, optimizer, num_ps):
    """With the slots of the optimizer, and the step."""
    path = str(tmp_path / "model.ckpt")
    first, second = np.array([1.0, -2, 3, -4], np.float32), np.array([0.5, 0.5, -1, 1], np.float32)

    def run(num_ps, restore):
        with tf.Graph().as_default():
            center = GlobalParameters(np.arange(4, dtype=np.float32), num_ps)
            gradient = tf.placeholder(tf.float32, [4])
            push = center.push(optimizer(), gradient)
            session, saver = initialized(center), tf.train.Saver()
            if restore:
                saver.restore(session, path)
            else:
                session.run(push.operations, {gradient: first})
                saver.save(session, path)
            session.run(push.operations, {gradient: second})
            return *session.run(center.read()[0]), session.run(center.step)

    expected = run(2, restore=False)
    close(run(num_ps, restore=True), expected)
    assert expected[-1] == 2


def test_two_workers_have_values_of_their_own(make, initialized):
    center, one, other = make(num_workers=2)
    pulls = [local.pull(center) for local in (one, other)]
    train = one.train(1, sgd())
    session = initialized(center, one, other)
    session.run([pull.operations for pull in pulls])
    session.run(train.operations)
    assert not np.array_equal(session.run(one.value), session.run(other.value))
    np.testing.assert_array_equal(session.run(other.value), one.model.initial_parameters)


def trained(initialized, model, batches, window):
    """Returns local parameters after one window, and a session to look at them with."""
    center = GlobalParameters(model.initial_parameters)
    local = LocalParameters(center, model, batches)
    pull, train = local.pull(center), local.train(window, sgd())
    session = initialized(center, local)
    session.run(pull.operations)
    session.run(train.operations)
    return local, session


@pytest.mark.parametrize("window", [1, 3])
def test_state_of_the_model_goes_from_step_to_step(initialized, images, known_batches, window):
    """Moving means after T steps, m ← (m + mean of the batch) / 2, of inputs that no parameter changes."""
    norm = keras.layers.BatchNormalization(momentum=0.5)
    model = model_of(keras.Input([8, 8, 1]), norm, keras.layers.Flatten(), keras.layers.Dense(3), is_classification=True)
    x, y = images.x_train[:25].reshape(5, 5, 8, 8, 1), images.y_train[:25].reshape(5, 5)
    names = [v.name for v in model.keras_model.non_trainable_variables]
    with tf.Graph().as_default():
        local, session = trained(initialized, model, known_batches(x, y), window)
        mean = 0.0
        for batch in x[:window]:
            mean = (mean + batch.mean()) / 2
        np.testing.assert_allclose(session.run(local.state[names.index("moving_mean")]), [mean], rtol=1e-5)


class Idle(keras.layers.Layer):
    """Has two parameters and uses neither."""

    def build(self, shape):
        self.unused = self.add_weight(shape=[2], initializer="ones")

    def call(self, x):
        return x


def test_parameter_that_the_loss_does_not_depend_on(initialized, known_batches, batches_of):
    """Its gradient is zero."""
    model = model_of(keras.Input([3]), Idle(), keras.layers.Dense(1))
    with tf.Graph().as_default():
        local, session = trained(initialized, model, known_batches(*batches_of), 2)
        gradient, value = session.run([local.gradient, local.value])
    np.testing.assert_array_equal(gradient[:2], [0, 0])
    assert np.all(gradient[2:] != 0)
    np.testing.assert_array_equal(value[:2], [1, 1])


def test_gradient_of_an_embedding(initialized, known_batches):
    """It comes from TensorFlow as indices and values."""
    words = keras.layers.Embedding(5, 1)
    model = model_of(
        keras.Input([2], dtype="int32"), words, keras.layers.Flatten(), keras.layers.Dense(2), is_classification=True
    )
    x, y = np.array([[[1, 1], [3, 1]]], np.int32), np.array([[0, 1]], np.int32)
    with tf.Graph().as_default():
        local, session = trained(initialized, model, known_batches(x, y), 3)
        assert (session.run(local.gradient)[:5] != 0).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("num_ps", [1, 2, 3])
def test_further_vectors_lie_beside_their_piece(graph, num_ps):
    """Memory and slots, too: nothing of a push goes from one ps to another."""
    task = TaskSpecDef("worker", 0, ps_hosts=[f"host:{i + 1}" for i in range(num_ps)], worker_hosts="host:100")
    center = GlobalParameters(np.zeros(7, np.float32), num_ps, task.device_fn())
    devices = [piece.device for piece in center.pieces]
    assert len(set(devices)) == num_ps
    for i, remember in enumerate(["value", "step"]):
        center.exact(types.SimpleNamespace(name=f"worker_{i}"), remember)
    remembered = [variable for variable in tf.local_variables() if "pulled_value" in variable.name]
    for pieces in center.slot("one"), center.slot("other"), remembered:
        assert [piece.device for piece in pieces] == devices
    [step] = [variable for variable in tf.local_variables() if "pulled_step" in variable.name]
    assert step.device == center.step.device


def test_staleness_is_not_negative(make, initialized):
    """As it would be after a ps was restarted, and went back to a checkpoint from before the pull."""
    center, local = make()
    exact = center.exact(local, "step")
    pull, push = exact.pull(), exact.push(sgd(), tf.ones([4]), lambda g, at_update: g / (at_update.staleness + 1))
    back = center.step.assign(3)
    session = initialized(center, local)
    session.run(center.step.assign(4))
    session.run(pull.operations)
    session.run(back)
    session.run(push.operations)
    close(session.run(center.read()[0]), local.model.initial_parameters - RATE)


LOCKS_AND_WAITS = """
import sys
import numpy as np
from common import tf
from common.cluster.task_spec import TaskSpecDef
from common.scheme.center import GlobalParameters

task = TaskSpecDef("worker", 0, ps_hosts=sys.argv[1], worker_hosts=sys.argv[2])
server = task.create_server()
tf.disable_eager_execution()
center = GlobalParameters(np.zeros(4, np.float32), 1, task.device_fn())
with tf.device("/job:ps/task:0"):
    has_lock, never = (tf.queue.FIFOQueue(1, tf.bool, shared_name=name) for name in ("has_lock", "never"))
    with center.lock.held([]) as done:
        done += [has_lock.enqueue(True), never.dequeue().op]
with tf.Session(server.target, config=task.config()) as session:
    session.run(done)
"""


@pytest.mark.slow
def test_who_is_killed_holds_no_lock(graph, tmp_path):
    """The lock belongs to a run of the graph, and a run ends with its worker."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in range(3)]
        ps, killed, other = (f"localhost:{port}" for port in ports)
        os.environ["TF_GRPC_REUSE_PORT"] = "true"
        ps_server = TaskSpecDef("ps", 0, ps_hosts=ps, worker_hosts=[killed, other]).start_server()
        task = TaskSpecDef("worker", 1, ps_hosts=ps, worker_hosts=[killed, other])
        server = task.create_server()
        victim = stack.enter_context(subprocess.Popen([sys.executable, "-c", LOCKS_AND_WAITS, ps, f"{killed},{other}"]))
        stack.callback(victim.kill)
        center = GlobalParameters(np.zeros(4, np.float32), 1, task.device_fn())
        with tf.device("/job:ps/task:0"):
            waits = tf.queue.FIFOQueue(1, tf.bool, shared_name="has_lock").dequeue()
            with center.lock.held([]) as done:
                pass
        session = stack.enter_context(tf.Session(server.target, config=task.config()))
        session.run(waits, options=tf.RunOptions(timeout_in_ms=60_000))
        with pytest.raises(tf.errors.DeadlineExceededError):
            session.run(done, options=tf.RunOptions(timeout_in_ms=500))
        victim.kill()
        session.run(done, options=tf.RunOptions(timeout_in_ms=60_000))
        del ps_server


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("is_in_ring", [False, True])
def test_what_is_not_finite_reaches_nobody(make, initialized, batches_of, hogwild, load_scheme, bad, is_in_ring):
    """Of ten rounds of a call, or ten local steps of a ring, the fourth has a bad sample."""
    batches_of[0][3, 2, 1] = bad
    center, local = make(must_be_finite=True)
    hp = types.SimpleNamespace(window=1, learning_rate=0.1, steps_per_call=10, overlap=False)
    scheme = load_scheme("Synchronous-SGD", "all_reduce") if is_in_ring else hogwild
    rounds = build_rounds(scheme, center, local, hp, 1 if is_in_ring else 10)
    session = initialized(center, local)
    with pytest.raises(tf.errors.InvalidArgumentError) as info:
        session.run(rounds)
    assert not np.isfinite(loss_of_failed(info.value))
    parameters, step = session.run(center.read())
    value = session.run(local.value)
    assert np.isfinite(parameters).all() and step == (0 if is_in_ring else 3)
    assert np.isfinite(value).all() or not is_in_ring


@pytest.mark.parametrize(
    "loss, gradient, fails",
    [(0.5, [1, 2], False), (0.5, [3e38, 3e38], False), (0.5, [np.nan, 1], True), (np.inf, [0, 0], True)],
)
def test_loss_and_gradient_must_be_finite(graph, loss, gradient, fails):
    operation = must_be_finite(tf.constant(loss), [tf.constant(gradient, tf.float32)])
    with tf.Session() as session:
        if not fails:
            return session.run(operation)
        with pytest.raises(tf.errors.InvalidArgumentError) as info:
            session.run(operation)
    assert loss_of_failed(info.value) == loss
    assert loss_of_failed(tf.errors.InvalidArgumentError(None, None, "another")) is None
