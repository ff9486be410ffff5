"""Training steps of a model's own: their gradients, against those of Keras and of NumPy, and steps that no scheme can take."""

import keras
import numpy as np
import pytest
import runs
import tensorflow

from common import tf
from common.data import Batches
from common.data.datasets import Data
from common.models import keras_model
from common.simulation.replay import Replay

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[12, 4]).astype(np.float32), RNG.normal(size=[12, 3]).astype(np.float32)
DATA = Data(X, Y, X[:5], Y[:5])


class Game(keras.Model):
    """D and G with one number each: D minimizes −d g, G minimizes d g."""

    def __init__(self):
        super().__init__()
        self.d = self.add_weight(shape=[1], initializer="ones", name="d")
        self.g = self.add_weight(shape=[1], initializer="ones", name="g")
        self.built = True

    def compute_gradients(self, x, y, sample_weight=None):
        with tensorflow.GradientTape(persistent=True) as tape:
            product = keras.ops.sum(self.d * self.g)
            losses = {"d_loss": -product, "g_loss": product}
        pairs = [(tape.gradient(losses["d_loss"], self.d), self.d), (tape.gradient(losses["g_loss"], self.g), self.g)]
        return pairs, losses


class Step(keras.Sequential):
    """A regression with the training step that Keras's guide shows."""

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tensorflow.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True), sample_weight=weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, self(x), weights)
        return {metric.name: metric.result() for metric in self.metrics}


class Critic(keras.Model):
    """A critic with a penalty on the gradient by its samples (WGAN-GP): a tape in a tape."""

    def __init__(self):
        super().__init__()
        self.dense = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)]

    def call(self, x):
        return self.dense[1](self.dense[0](x))

    def compute_gradients(self, x, y, sample_weight=None):
        with tensorflow.GradientTape() as tape:
            with tensorflow.GradientTape() as inner:
                inner.watch(x)
                score = self(x)
            slope = inner.gradient(score, x)
            loss = keras.ops.mean(score) + keras.ops.mean((keras.ops.norm(slope, axis=1) - 1) ** 2)
        return list(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)), loss


def step(metrics=None):
    model = Step([keras.Input([4]), keras.layers.Dense(6, "relu"), keras.layers.Dense(3)])
    model.compile("sgd", "mean_squared_error", metrics=metrics)
    return model


def found(model, *samples):
    """Returns loss, gradient `[size]`, and the evaluation of a `Model` at its initial parameters."""
    with tf.Graph().as_default(), tf.Session() as session:
        at = tf.constant(model.initial_parameters), [tf.constant(v) for v in model.initial_state]
        samples = samples or DATA.train
        return session.run(
            (*model.loss_and_gradient(*at, *map(tf.constant, samples))[:2], model.evaluate(*at, *map(tf.constant, DATA.test)))
        )


@pytest.mark.parametrize("weights", [None, np.linspace(0, 2, 12, dtype=np.float32)])
def test_the_gradient_that_keras_applies(weights):
    """One step of `fit` with SGD of rate 1 moves the parameters by minus the gradient."""
    model = keras_model.checked(step(), DATA)
    samples = DATA.train if weights is None else (*DATA.train, weights)
    loss, gradient, _ = found(model, *samples)
    theirs = model.keras_model
    theirs.compile(keras.optimizers.SGD(1.0), "mean_squared_error")
    given = dict(zip(("x", "y", "sample_weight"), samples, strict=False))
    fitted = theirs.fit(**given, batch_size=12, shuffle=False, verbose=0)
    after = np.concatenate([v.numpy().ravel() for v in theirs.trainable_variables])
    np.testing.assert_allclose(gradient, model.initial_parameters - after, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss, fitted.history["loss"][0], rtol=1e-5)


def test_losses_are_means_over_the_test_set():
    """In batches of any size."""
    model = keras_model.checked(step(["mean_absolute_error"]), DATA)
    expected = np.mean(np.abs(np.asarray(model.keras_model(DATA.x_test)) - DATA.y_test))
    with tf.Graph().as_default(), tf.Session() as session:
        at: tuple = tf.constant(model.initial_parameters), []
        for batch_size in 2, 5:
            results = session.run(model.evaluate(*at, *map(tf.constant, DATA.test), batch_size=batch_size))
            assert results.keys() == {"loss", "mean_absolute_error"}
            np.testing.assert_allclose(results["mean_absolute_error"], expected, rtol=1e-5)


def test_a_tape_within_a_tape():
    """As eager tapes of Keras's own variables."""
    model = keras_model.checked(Critic(), DATA)
    loss, gradient, _ = found(model)
    pairs, theirs = model.keras_model.compute_gradients(tensorflow.constant(X), tensorflow.constant(Y))
    # The bias of the last layer is not in the penalty: the mean of the scores has the slope 1 by it.
    np.testing.assert_allclose(loss, theirs, rtol=1e-5)
    np.testing.assert_allclose(gradient, np.concatenate([np.ravel(g) for g, _ in pairs]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("folder, name", [("HogWild", "hogwild"), ("AGN", "agn")])
def test_rounds_of_a_game(folder, name, window, load_scheme, hyperparameters):
    """v(x) = A x: T local steps multiply x by M = (1 − η A)^T. HogWild pushes the sum of the gradients, AGN their mean."""
    rate, turn = 0.1, np.array([[0, -1], [1, 0]])
    expected = np.linalg.matrix_power(np.eye(2) - rate * turn, window)
    if name == "agn":
        expected = np.eye(2) + (expected - np.eye(2)) / window
    settings = hyperparameters(learning_rate=rate, window=window, overlap=False)
    settings.local_optimizer, settings.local_learning_rate = "sgd", None
    model = keras_model.checked(Game(), DATA)
    replay = Replay(load_scheme(folder, name), settings, model, lambda i: Batches(X, Y, 4, seed=i), 1)
    replay.take([0] * 3 * len(replay.steps))
    np.testing.assert_allclose(replay.center, np.linalg.matrix_power(expected, 3) @ np.ones(2), rtol=1e-5)
    replay.close()


class Given(keras.Model):
    """A linear model; its `compute_gradients` returns the result of a function of its two variables and their gradients."""

    def __init__(self, result):
        super().__init__()
        self.dense, self.result = keras.layers.Dense(3, name="dense"), result

    def call(self, x):
        return self.dense(x)

    def compute_gradients(self, x, y, sample_weight=None):
        with tensorflow.GradientTape() as tape:
            loss = keras.ops.mean((self(x) - y) ** 2)
        kernel, bias = self.trainable_variables
        return self.result(kernel, bias, *tape.gradient(loss, [kernel, bias]), loss)


OTHER, SGD = keras.Variable([1.0]), keras.optimizers.SGD()


def with_assignment(kernel, bias, g, h, loss):
    kernel.assign(kernel - g)
    return [(g, kernel), (h, bias)], loss


def with_optimizer(kernel, bias, g, h, loss):
    SGD.apply_gradients([(g, kernel)])
    return [(g, kernel), (h, bias)], loss


@pytest.mark.parametrize(
    "result, texts",
    [
        (lambda v, w, g, h, loss: loss, ["must return (pairs of gradient and variable, losses)"]),
        (lambda v, w, g, h, loss: ([g, h], loss), ["expected a pair of a gradient and a variable"]),
        (lambda v, w, g, h, loss: ([(g, v)], loss), ["gives no gradient of given", "dense/bias", "set trainable=False"]),
        (lambda v, w, g, h, loss: ([(g, v), (None, w)], loss), ["gives no gradient of given", "dense/bias"]),
        (lambda v, w, g, h, loss: ([(g, v), (h, w), (h, w)], loss), ["gives two gradients of given", "takes one of each"]),
        (lambda v, w, g, h, loss: ([(g, v), (h, OTHER)], loss), ["no trainable variable of the model"]),
        (lambda v, w, g, h, loss: ([(g, v), (g, w)], loss), ["dense/bias of shape (4, 3), expected (3,)"]),
        (lambda v, w, g, h, loss: ([(g, v), (h, w)], {"loss": None}), ["gives None as 'loss': return {name: one number}"]),
        (lambda v, w, g, h, loss: ([(g, v), (h, w)], {}), ["gives no losses: return {name: one number}"]),
        (lambda v, w, g, h, loss: ([(g, v), (h, w)], {"validation_x": loss}), ["gives 'validation_x', a name for"]),
        (with_assignment, ["changes given", "dense/kernel itself: leave that to the scheme"]),
        (with_optimizer, ["its compute_gradients applies gradients: return them"]),
    ],
)
def test_steps_that_are_refused(user_error, result, texts):
    with user_error("its compute_gradients ", *texts):
        keras_model.checked(Given(result), DATA)


def stopped(model, x, y):
    with tensorflow.GradientTape() as tape:
        outputs = model(x)
        with tape.stop_recording():
            weights = keras.ops.sum(model(x) ** 2, axis=1)
        loss = keras.ops.mean(weights * keras.ops.sum((outputs - y) ** 2, axis=1))
    return tape, loss


def cleared(model, x, y):
    with tensorflow.GradientTape() as tape:
        outputs = model(x)
        tape.reset()
        loss = keras.ops.mean((outputs - y) ** 2) + keras.ops.mean(model(x) ** 2)
    return tape, loss


def with_target(model, x, y):
    target = keras.ops.one_hot(keras.ops.argmax(model(x + 1), axis=1), 3) + keras.ops.stop_gradient(model(x))
    with tensorflow.GradientTape() as tape:
        loss = keras.ops.mean((model(x) - target) ** 2)
    return tape, loss


def with_late_target(model, x, y):
    with tensorflow.GradientTape() as tape:
        loss = keras.ops.mean((model(x) - y) ** 2)
    return tape, [loss, sum(keras.ops.sum(v**2) for v in model.trainable_variables)]


def watched_by_hand(model, x, y):
    with tensorflow.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([v.value for v in model.trainable_variables])
        loss = keras.ops.mean((model(x) - y) ** 2)
    return tape, loss


def in_a_loop(model, x, y):
    with tensorflow.GradientTape() as tape:
        _, loss = tensorflow.while_loop(
            lambda i, _: i < 3, lambda i, loss: (i + 1.0, loss + keras.ops.mean((model(x) * i - y) ** 2)), (0.0, 0.0)
        )
    return tape, loss


class Taped(keras.Model):
    """Its gradient is that of a tape, which a function makes with the model and samples."""

    def __init__(self, make):
        super().__init__()
        self.dense, self.make = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)], make

    def call(self, x):
        return self.dense[1](self.dense[0](x))

    def compute_gradients(self, x, y, sample_weight=None):
        tape, loss = self.make(self, x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        return list(zip(gradients, self.trainable_variables, strict=True)), loss[0] if isinstance(loss, list) else loss


@pytest.mark.parametrize("make", [stopped, cleared, with_target, with_late_target, watched_by_hand, in_a_loop])
def test_tapes_are_as_eager_ones(make):
    """They leave out all that they do not record."""
    model = keras_model.checked(Taped(make), DATA)
    _, gradient, _ = found(model)
    pairs, _ = model.keras_model.compute_gradients(tensorflow.constant(X), tensorflow.constant(Y))
    np.testing.assert_allclose(gradient, np.concatenate([np.ravel(g) for g, _ in pairs]), rtol=1e-4, atol=1e-6)


class Decorated(Step):
    """A step that is a `tf.function`, which converts a condition on a tensor."""

    @tensorflow.function
    def train_step(self, data):
        x, y = data
        with tensorflow.GradientTape() as tape:
            loss = keras.ops.mean((self(x) - y) ** 2)
            if loss > 0:
                loss = 3 * loss
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return {"loss": loss}


def test_a_step_that_is_a_function_and_scales_its_loss():
    """The gradient is divided by the scale again, as Keras's optimizers do."""
    built = Decorated([keras.Input([4]), keras.layers.Dense(3)])
    built.compile(keras.optimizers.SGD(1.0, loss_scale_factor=128.0), "mean_squared_error")
    model = keras_model.checked(built, DATA)
    _, gradient, _ = found(model)
    with tensorflow.GradientTape() as tape:
        loss = 3 * keras.ops.mean((built(X) - Y) ** 2)
    expected = np.concatenate([np.ravel(g) for g in tape.gradient(loss, [v.value for v in built.trainable_variables])])
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_a_step_that_assigns_in_a_graph_alone(user_error):
    """An assignment in a graph would have no effect."""

    def result(kernel, bias, g, h, loss):
        if not tensorflow.executing_eagerly():
            kernel.assign(kernel - g)
        return [(g, kernel), (h, bias)], loss

    model = keras_model.checked(Given(result), DATA)
    with user_error("its compute_gradients changes given", "dense/kernel itself: leave that to the scheme"):
        found(model)


def test_a_loss_beside_a_step(user_error):
    with user_error("--loss=huber: the model has its losses in train_step: leave --loss out"):
        keras_model.checked(step(), DATA, loss="huber")


def test_parts_that_are_not_built(user_error):
    """Without a call of the model nothing builds them."""

    class Parts(Game):
        def __init__(self):
            super().__init__()
            self.part = keras.layers.Dense(3, name="part")

    with user_error("the layer part is not built: give the model a call, or keras.Input to its parts"):
        keras_model.checked(Parts(), DATA)


class GAN(keras.Model):
    """As in Keras's example of a DCGAN, with dense layers."""

    def __init__(self):
        super().__init__()
        input, dense = keras.Input, keras.layers.Dense
        self.discriminator = keras.Sequential([input([4]), dense(5, "tanh"), dense(1)])
        self.generator = keras.Sequential([input([2]), dense(5), keras.layers.BatchNormalization(), dense(4)])
        self.noise, self.loss_of = keras.random.SeedGenerator(1), keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_optimizer, self.g_optimizer = keras.optimizers.Adam(), keras.optimizers.RMSprop()
        self.d_loss, self.built = keras.metrics.Mean("d_loss"), True

    def fake(self, n):
        return self.generator(keras.random.normal([n, 2], seed=self.noise), training=True)

    def train_step(self, data):
        real, _ = data
        n = tensorflow.shape(real)[0]
        both = tensorflow.concat([self.fake(n), real], axis=0)
        labels = tensorflow.concat([tensorflow.zeros([n, 1]), tensorflow.ones([n, 1])], axis=0)
        with tensorflow.GradientTape() as tape:
            d_loss = self.loss_of(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tensorflow.GradientTape() as tape:
            g_loss = self.loss_of(tensorflow.ones([n, 1]), self.discriminator(self.fake(n)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": g_loss}


def test_the_step_of_a_gan():
    """Both gradients are of the same parameters: the generator's is by the discriminator before its step."""
    model = keras_model.checked(GAN(), DATA)
    loss, gradient, results = found(model)
    gan = model.keras_model
    both = tensorflow.concat([gan.fake(12), X], axis=0)
    with tensorflow.GradientTape(persistent=True) as tape:
        d_loss = gan.loss_of(np.repeat([[0.0], [1.0]], 12, axis=0), gan.discriminator(both))
        g_loss = gan.loss_of(np.ones([12, 1]), gan.discriminator(gan.fake(12)))
    expected = [*tape.gradient(d_loss, gan.discriminator.trainable_weights)]
    expected += tape.gradient(g_loss, gan.generator.trainable_weights)
    np.testing.assert_allclose(loss, d_loss + g_loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, np.concatenate([np.ravel(g) for g in expected]), rtol=1e-4, atol=1e-6)
    assert results.keys() == {"loss", "d_loss", "g_loss"} and model.own_optimizer == "Adam and RMSprop"
    np.testing.assert_allclose(results["loss"], results["d_loss"] + results["g_loss"], rtol=1e-5)


DISTILLER = """
import keras
import tensorflow as tf
from keras import layers


def part(units):
    return keras.Sequential([keras.Input([8, 8, 1]), layers.Flatten(), layers.Dense(units, "relu"), layers.Dense(10)])


class Distiller(keras.Model):
    def __init__(self):
        super().__init__()
        self.student, self.teacher, self.built = part(32), part(64), True
        self.teacher.trainable = False

    def call(self, x, training=False):
        return self.student(x, training=training)

    def train_step(self, data):
        x, y = data
        taught = self.teacher(x)
        with tf.GradientTape() as tape:
            given = self.student(x, training=True)
            hard = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, given, from_logits=True))
            loss = hard + 0.01 * tf.reduce_mean((given - taught) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss, "hard": hard}


def distiller():
    model = Distiller()
    model.compile("adam")
    return model
"""


@pytest.mark.cluster
def test_a_student_is_trained(tmp_path):
    """By two workers and the step of its model; the frozen teacher has no gradient. 5 s."""
    tmp_path.joinpath("m.py").write_text(DISTILLER)
    output = runs.run(tmp_path / "run", f"--model={tmp_path}/m.py:distiller", "--steps=800", "--learning_rate=0.1")
    assert "minimizes the losses of its train_step, by SGD" in output
    assert "(the model's own Adam is not used)" in output
    result = runs.result_of(tmp_path / "run")
    assert 0 < result["test_hard"] < 0.5 and result["test_hard"] < result["test_loss"] < 2
    assert result["parameters"] == 64 * 32 + 32 + 32 * 10 + 10
