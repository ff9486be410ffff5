"""common/models.py: a Keras model as a function of one flat vector gives what Keras itself gives."""

import keras
import numpy as np
import pytest

from common import data, models, tf
from common.batches import Batches
from common.center import GlobalParameters
from common.local import LocalParameters
from common.steps import build_rounds


def layers_of_all_kinds():
    """Convolution, moving means, random numbers, a layer that is frozen, regularization; 3 logits for images [8, 8, 1]."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            layers.Conv2D(4, 3, kernel_regularizer=keras.regularizers.L2(0.1)),
            layers.BatchNormalization(momentum=0.5),
            layers.Activation("relu"),
            layers.Flatten(),
            layers.Dense(5, trainable=False),
            layers.Dropout(0.5),
            layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.01)),
        ]
    )
    model.layers[-1].bias.assign([0.3, -0.2, 0.1])
    return model


@pytest.fixture
def model(images):
    return models.Model(layers_of_all_kinds(), is_classification=True)


def in_graph(function, *values):
    """Runs a function of a model in a graph and returns what it gives as NumPy arrays."""
    with tf.Graph().as_default(), tf.Session() as session:
        tensors = tf.nest.map_structure(lambda v: tf.placeholder(np.asarray(v).dtype, np.shape(v)), values)
        feeds = dict(zip(tf.nest.flatten(tensors), tf.nest.flatten(values)))
        return session.run(function(*tensors), feeds)


def classes(n, shape, num_classes):
    rng = np.random.default_rng(0)
    x, y = rng.random([n, *shape]), np.arange(n) % num_classes
    return data.checked(((x, y), (x[:5], y[:5])), "classes")


def numbers(n, shape, y_shape):
    rng = np.random.default_rng(0)
    x, y = rng.random([n, *shape]), rng.random([n, *y_shape])
    return data.checked(((x, y), (x[:5], y[:5])), "numbers")


@pytest.mark.parametrize("spec", ["linear", "mlp", "cnn"])
@pytest.mark.parametrize(
    "dataset, outputs",
    [
        (classes(9, [8, 8, 1], 4), (4,)),
        (classes(9, [5, 4, 3], 2), (2,)),
        (numbers(9, [8, 8, 1], [1]), (1,)),
        (numbers(9, [4, 4, 2], []), ()),
        (numbers(9, [4, 4, 2], [2, 3]), (2, 3)),
    ],
)
def test_built_in_models(spec, dataset, outputs):
    model = models.build(spec, dataset)
    assert model.keras_model(dataset.x_train).shape == (9, *outputs)
    assert model.size == model.keras_model.count_params() == len(model.initial_parameters)
    assert model.is_classification == (dataset.y_train.dtype == np.int32)


@pytest.mark.parametrize("spec", ["linear", "mlp"])
def test_built_in_models_on_samples_of_any_shape(spec):
    assert models.build(spec, classes(9, [3], 2)).keras_model.output_shape == (None, 2)
    assert models.build(spec, classes(9, [3, 7], 2)).keras_model.output_shape == (None, 2)


@pytest.mark.parametrize("shape", [[64], [8, 8], [3, 8, 1], [2, 8, 8, 1]])
def test_cnn_needs_images(user_error, shape):
    with user_error("--model=cnn needs images of shape [height, width, channels]", f"{shape}"):
        models.build("cnn", classes(9, shape, 2))


def test_seed_gives_the_initial_values():
    dataset = classes(9, [4], 2)
    one, same, other = (models.build("mlp", dataset, seed).initial_parameters for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


# --- Models of the user's ----------------------------------------------------------------------------------------------


@pytest.fixture
def user_model(monkeypatch):
    """A function that builds what a user's function gives, as `--model=m.py:f`."""

    def user_model(result, dataset):
        monkeypatch.setattr(models, "call_user_function", lambda flag, spec: result)
        return models.build("m.py:f", dataset)

    return user_model


def dense(units, **settings):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(units, **settings)])


def test_model_that_is_not_built_yet_is_built(user_model):
    unbuilt = dense(4)
    assert not unbuilt.built
    model = user_model(unbuilt, classes(9, [2, 3], 4))
    assert model.shapes == [(6, 4), (4,)] and model.size == 28


def test_subclass_of_keras_model(user_model):
    class Mine(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x) * 2

    assert user_model(Mine(), classes(9, [3], 2)).size == 8


def test_more_logits_than_classes_will_do(user_model):
    assert user_model(dense(7), classes(9, [3], 4)).shapes[-1] == (7,)


def several_outputs():
    x = keras.Input([3])
    return keras.Model(x, [keras.layers.Dense(4)(x), keras.layers.Dense(4)(x)])


@pytest.mark.parametrize(
    "model, texts",
    [
        (lambda: dense(3), ["outputs of shape [3]", "classes 0 to 3", "expected [4] logits"]),
        (lambda: keras.Sequential([keras.layers.Reshape([3, 1]), keras.layers.Dense(4)]), ["outputs of shape [3, 4]"]),
        (lambda: keras.Sequential([keras.Input([5]), keras.layers.Dense(4)]), ["cannot be called on samples of shape [3]"]),
        (several_outputs, ["--model=m.py:f"]),
        (lambda: dense(4, trainable=False), ["has no trainable variables"]),
        (lambda: dense(4, dtype="float16"), ["variables of type float16, expected float32"]),
        (lambda: keras.layers.Dense(4), ["must give a keras.Model, not Dense"]),
        (lambda: None, ["must give a keras.Model, not NoneType"]),
    ],
)
def test_model_that_cannot_be_trained(user_model, user_error, model, texts):
    with user_error("--model=m.py:f", *texts):
        user_model(model(), classes(9, [3], 4))


@pytest.mark.parametrize("outputs, y_shape", [([1], []), ([2], [1]), ([2, 3], [3, 2])])
def test_outputs_that_do_not_fit_the_labels_of_a_regression(user_model, user_error, outputs, y_shape):
    model = keras.Sequential([keras.layers.Dense(int(np.prod(outputs))), keras.layers.Reshape(outputs)])
    with user_error(f"outputs of shape {outputs}", f"labels have shape {y_shape}"):
        user_model(model, numbers(9, [3], y_shape))


@pytest.mark.parametrize("spec", ["mpl", "", "m.py"])
def test_no_such_model(user_error, spec):
    with user_error(f"--model must be one of linear, mlp, cnn or FILE.py:FUNCTION, not {spec!r}"):
        models.build(spec, classes(9, [3], 4))


# --- The same as Keras -------------------------------------------------------------------------------------------------


def test_split_gives_the_variables_back(model):
    pieces = in_graph(model.split, model.initial_parameters)
    assert len(pieces) == len(model.keras_model.trainable_variables)
    for piece, variable in zip(pieces, model.keras_model.trainable_variables):
        np.testing.assert_array_equal(piece, variable.numpy())
    np.testing.assert_array_equal(np.concatenate([p.ravel() for p in pieces]), model.initial_parameters)


def test_frozen_layer_is_state(model):
    frozen = model.keras_model.layers[4]
    assert model.size == sum(int(np.prod(v.shape)) for v in model.keras_model.trainable_variables)
    assert any(np.array_equal(frozen.kernel.numpy(), value) for value in model.initial_state)
    assert len(model.initial_state) == len(model.keras_model.non_trainable_variables)


def loss(model, x, y, state=None):
    return in_graph(
        lambda parameters, state, x, y: model.loss(model.split(parameters), state, x, y),
        model.initial_parameters,
        model.initial_state if state is None else state,
        x,
        y,
    )


def test_loss_of_classes_is_keras_loss(images):
    model = models.build("mlp", images, seed=3)
    logits = model.keras_model(images.x_train)
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(images.y_train, logits)
    np.testing.assert_allclose(loss(model, images.x_train, images.y_train)[0], expected, rtol=1e-5)


@pytest.mark.parametrize("y_shape", [[], [1], [4], [2, 3]])
def test_loss_of_numbers_is_keras_loss(y_shape):
    dataset = numbers(9, [3], y_shape)
    model = models.build("mlp", dataset, seed=3)
    expected = np.mean(np.square(model.keras_model(dataset.x_train).numpy() - dataset.y_train))
    if y_shape:
        np.testing.assert_allclose(
            expected,
            np.mean(keras.losses.MeanSquaredError()(dataset.y_train, model.keras_model(dataset.x_train))),
            rtol=1e-5,
        )
    np.testing.assert_allclose(loss(model, dataset.x_train, dataset.y_train)[0], expected, rtol=1e-5)


def test_loss_and_state_of_training_are_those_of_keras(model, images):
    """Regularization of weights and of activities, BatchNormalization, and Dropout, which draws from the same seeds."""
    ours, state = loss(model, images.x_train, images.y_train)
    outputs = model.keras_model(images.x_train, training=True)  # changes the model's state
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(images.y_train, outputs)
    assert len(model.keras_model.losses) == 2
    np.testing.assert_allclose(ours, cross_entropy + sum(model.keras_model.losses), rtol=1e-5)
    for value, variable in zip(state, model.keras_model.non_trainable_variables):
        np.testing.assert_allclose(value, variable.numpy(), rtol=1e-5, err_msg=variable.path)


def adapted(layer, x):
    layer.adapt(x)
    return layer


class Positions(keras.layers.Layer):
    """Adds a table that it made when it was made, as models of text do."""

    def __init__(self):
        super().__init__()
        self.table = keras.ops.reshape(keras.ops.arange(24 * 8, dtype="float32"), [24, 8]) / 100

    def call(self, x):
        return x + self.table


@pytest.mark.parametrize(
    "layers",
    [
        lambda x: [keras.layers.Dense(8, kernel_regularizer="l1")],
        lambda x: [adapted(keras.layers.Normalization(), x)],
        lambda x: [adapted(keras.layers.Normalization(axis=None), x)],
        lambda x: [Positions()],
        lambda x: [keras.layers.MultiHeadAttention(2, 4), Positions()],
        lambda x: [keras.layers.LSTM(4)],
        lambda x: [keras.layers.LayerNormalization(), keras.layers.GRU(4)],
    ],
    ids=["l1", "normalization", "normalization-of-all", "positions", "attention", "lstm", "gru"],
)
@pytest.mark.parametrize("window", [1, 3])
def test_layers_of_many_kinds(initialized, hogwild, hyperparameters, layers, window):
    """The loss in a graph is Keras' own, also of layers that hold tensors made when they were made, outside the graph."""
    dataset = classes(12, [24, 8], 3)
    x = inputs = keras.Input([24, 8])
    for layer in layers(dataset.x_train):
        x = layer(x, x) if isinstance(layer, keras.layers.MultiHeadAttention) else layer(x)
    keras_model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(x)))
    model = models.Model(keras_model, is_classification=True)
    logits = keras_model(dataset.x_train, training=True)
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(dataset.y_train, logits) + sum(keras_model.losses)
    with tf.Graph().as_default():
        center = GlobalParameters(model.initial_parameters)
        local = LocalParameters(center, model, Batches(dataset.x_train, dataset.y_train, len(dataset.x_train), 0))
        rounds = build_rounds(hogwild, center, local, hyperparameters(window=window, learning_rate=1e-9))
        session = initialized(center, local)
        np.testing.assert_allclose(session.run(rounds).loss, expected, rtol=1e-4)


def test_training_changes_moving_means_and_seeds_and_nothing_frozen(model, images):
    _, state = loss(model, images.x_train, images.y_train)
    changed = [
        variable.name
        for variable, before, after in zip(model.keras_model.non_trainable_variables, model.initial_state, state)
        if not np.array_equal(before, after)
    ]
    assert sorted(changed) == ["moving_mean", "moving_variance", "seed_generator_state"]


def test_dropout_draws_anew_in_each_step(model, images):
    first, state = loss(model, images.x_train, images.y_train)
    # The same moving means, so that Dropout's seeds are all that differs
    names = [v.name for v in model.keras_model.non_trainable_variables]
    state = [new if "seed" in name else old for name, new, old in zip(names, state, model.initial_state)]
    assert loss(model, images.x_train, images.y_train, state)[0] != first


def evaluate(model, state, x, y, **settings):
    return in_graph(
        lambda parameters, state, x, y: model.evaluate(parameters, state, x, y, **settings),
        model.initial_parameters,
        state,
        x,
        y,
    )


@pytest.mark.parametrize("batch_size", [1, 5, 10, 23, 50, 500])
def test_evaluation_is_that_of_keras(images, batch_size):
    """Also when the last batch is a smaller one: the test set has 23 samples."""
    model = models.build("cnn", images, seed=1)
    model.keras_model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["sparse_categorical_accuracy"]
    )
    expected = model.keras_model.evaluate(images.x_test, images.y_test, verbose=0, batch_size=10)
    ours = evaluate(model, model.initial_state, images.x_test, images.y_test, batch_size=batch_size)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    assert 0 < ours[1] < 1


def test_evaluation_of_a_regression_has_no_accuracy(regression):
    model = models.build("linear", regression)
    model.keras_model.compile(loss="mean_squared_error")
    expected = model.keras_model.evaluate(regression.x_test, regression.y_test, verbose=0)
    mean, accuracy = evaluate(model, [], regression.x_test, regression.y_test, batch_size=7)
    np.testing.assert_allclose(mean, expected, rtol=1e-5)
    assert np.isnan(accuracy)


def test_evaluation_uses_the_trained_state(model, images):
    """Moving means, not those of the batch, and without Dropout."""
    state = loss(model, images.x_train, images.y_train)[1]
    for variable, value in zip(model.keras_model.non_trainable_variables, state):
        variable.assign(value)
    outputs = model.keras_model(images.x_test, training=False).numpy()
    expected = float(keras.losses.SparseCategoricalCrossentropy(from_logits=True)(images.y_test, outputs))
    ours = evaluate(model, state, images.x_test, images.y_test, batch_size=10)
    np.testing.assert_allclose(ours, [expected, np.mean(outputs.argmax(axis=1) == images.y_test)], rtol=1e-5)
    assert abs(evaluate(model, model.initial_state, images.x_test, images.y_test)[0] - expected) > 1e-3


def test_saved_model_gives_the_same_outputs(model, images, tmp_path):
    rng = np.random.default_rng(0)
    parameters = rng.normal(size=model.size).astype(np.float32)
    state = [v + 1 if v.dtype == np.float32 else v for v in model.initial_state]
    expected = in_graph(
        lambda parameters, state, x: model.keras_model.stateless_call(model.split(parameters), state, x, training=False)[0],
        parameters,
        state,
        images.x_test,
    )
    model.save(parameters, state, tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(images.x_test, verbose=0), expected, rtol=1e-4, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


def test_saving_again_replaces_the_file(model, images, tmp_path):
    model.save(model.initial_parameters, model.initial_state, tmp_path / "model.keras")
    model.save(0 * model.initial_parameters, model.initial_state, tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(images.x_test, verbose=0), np.zeros([23, 3]))


@pytest.mark.parametrize("spec", ["linear", "mlp", "cnn"])
@pytest.mark.parametrize("shape, num_classes", [([8, 8, 1], 2), ([9, 5, 3], 7)])
def test_size_of_a_model_before_it_is_built(spec, shape, num_classes):
    model = models.build(spec, classes(20, shape, num_classes))
    assert models._count_of[spec](tuple(shape), num_classes) == model.size


@pytest.mark.parametrize("spec", ["linear", "mlp", "cnn"])
def test_model_larger_than_memory_is_refused_before_it_is_built(user_error, monkeypatch, spec):
    """As for a label that is a customer's number and no class. A class without samples, though, is no mistake."""
    monkeypatch.setattr(models.limits, "memory", lambda: 10**9)
    x, y = np.zeros([20, 8, 8, 1]), np.arange(20) % 2
    y[3] = 10**9
    with user_error(
        f"the labels are classes 0 to 1000000000, and --model={spec} would have ",
        "of memory, but there are 1.0 GB; number them without gaps, as np.unique(y, return_inverse=True) does",
    ):
        models.build(spec, data.checked(((x, y), (x, y)), "far"))
    y[3] = 1000
    assert models.build(spec, data.checked(((x, y), (x, y)), "far")).keras_model.output_shape == (None, 1001)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_initial_values_that_are_not_finite_are_refused(user_error, monkeypatch, images, value):
    for name, variable in ("dense", lambda m: m.layers[-1].bias), ("moving_mean", lambda m: m.layers[1].moving_mean):
        model = layers_of_all_kinds()
        variable(model).assign([value if i == 1 else 0.0 for i in range(variable(model).shape[0])])
        monkeypatch.setattr(models, "call_user_function", lambda *_, model=model: model)
        with user_error("--model=m.py:build: ", name, "begins with 1 values that are NaN or infinite"):
            models.build("m.py:build", images)
