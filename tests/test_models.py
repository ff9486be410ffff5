"""common/models/: a Keras model as a function of one flat vector gives what Keras itself gives."""

import inspect
import tempfile

import keras
import numpy as np
import pytest

from common import tf
from common.core import flags as flag_defaults
from common.data import builtin_data, datasets
from common.data.batches import Batches
from common.data.nested_arrays import arrays_in, mapped
from common.data.user_functions import user_module
from common.models import builtin_models, keras_model, stateless_model
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import build_rounds
from common.training import model_and_data, run_check


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
    return keras_model.by_labels(layers_of_all_kinds(), is_classification=True)


def in_graph(function, *values):
    """Runs a function of a model in a graph and returns what it gives as NumPy arrays."""
    with tf.Graph().as_default(), tf.Session() as session:
        tensors = tf.nest.map_structure(lambda v: tf.placeholder(np.asarray(v).dtype, np.shape(v)), values)
        feeds = dict(zip(tf.nest.flatten(tensors), tf.nest.flatten(values)))
        return session.run(function(*tensors), feeds)


def classes(n, shape, num_classes):
    rng = np.random.default_rng(0)
    x, y = rng.random([n, *shape]), np.arange(n) % num_classes
    return datasets.checked(((x, y), (x[:5], y[:5])), "classes")


def numbers(n, shape, y_shape):
    rng = np.random.default_rng(0)
    x, y = rng.random([n, *shape]), rng.random([n, *y_shape])
    return datasets.checked(((x, y), (x[:5], y[:5])), "numbers")


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
    model = keras_model.build(spec, dataset)
    assert model.keras_model(dataset.x_train).shape == (9, *outputs)
    assert model.size == model.keras_model.count_params() == len(model.initial_parameters)
    is_classification = dataset.y_train.dtype == np.int32
    assert model.minimizes == ("sparse categorical crossentropy of logits" if is_classification else "mean squared error")


@pytest.mark.parametrize("spec", ["linear", "mlp"])
def test_built_in_models_on_samples_of_any_shape(spec):
    assert keras_model.build(spec, classes(9, [3], 2)).keras_model.output_shape == (None, 2)
    assert keras_model.build(spec, classes(9, [3, 7], 2)).keras_model.output_shape == (None, 2)


def test_classes_in_a_column():
    """As some files have them: each is still one class."""
    x, y = np.random.default_rng(0).random([9, 3]), np.arange(9) % 4
    dataset, same = (datasets.checked(((x, labels), (x, labels)), "mine") for labels in (y[:, None], y))
    model = keras_model.build("mlp", dataset)
    np.testing.assert_allclose(loss(model, x.astype("f4"), dataset.y_train)[0], loss(model, x.astype("f4"), same.y_train)[0])
    found = [evaluate(model, [], each.x_test, each.y_test) for each in (dataset, same)]
    assert found[0] == found[1] and found[0]["accuracy"] > 0


@pytest.mark.parametrize("shape", [[64], [8, 8], [3, 8, 1], [2, 8, 8, 1]])
def test_cnn_needs_images(user_error, shape):
    with user_error("--model=cnn needs images of shape [height, width, channels]", f"{shape}"):
        keras_model.build("cnn", classes(9, shape, 2))


def test_cnn_says_what_series_need(user_error):
    with user_error("not samples of shape [40, 1]; --model=cnn1d takes series of shape [length, channels]"):
        keras_model.build("cnn", classes(9, [40, 1], 2))


@pytest.mark.parametrize("dataset, outputs", [(classes(9, [40, 1], 4), (4,)), (numbers(9, [5, 3], [2]), (2,))])
def test_cnn_of_series(dataset, outputs):
    model = keras_model.build("cnn1d", dataset)
    assert model.keras_model(dataset.x_train).shape == (9, *outputs)
    assert builtin_models._count("cnn1d", dataset.x_train.shape[1:], outputs[0]) == model.size


@pytest.mark.parametrize("shape", [[64], [3, 8], [8, 8, 1]])
def test_cnn_needs_series(user_error, shape):
    with user_error("--model=cnn1d needs series of shape [length, channels], of 4 places or more", f"{shape}"):
        keras_model.build("cnn1d", classes(9, shape, 2))


def test_dense_layer_without_a_bias():
    """At 0 its output is 0; its loss is that of least squares."""
    quadratic, best = datasets.load("quadratic"), builtin_data.quadratic_optimum()
    model = keras_model.build("dense", quadratic)
    assert model.shapes == [(40, 1)] and model.minimizes == "mean squared error"
    assert builtin_models._count("dense", (40,), 1) == 40
    with tf.Graph().as_default(), tf.Session() as session:
        at = tf.placeholder(tf.float32, [40])
        loss, gradient, _ = model.loss_and_gradient(at, [], *quadratic.train)
        least, slope = session.run([loss, gradient], {at: best.ravel()})
        zero = session.run(loss, {at: np.zeros(40)})
    assert least == pytest.approx(builtin_data.LEAST_LOSS, rel=1e-4) and np.abs(slope).max() < 1e-5
    assert zero == pytest.approx(builtin_data.LEAST_LOSS + np.geomspace(1, 1e-3, 40).sum() / 2, rel=1e-4)


def test_seed_gives_the_initial_values():
    dataset = classes(9, [4], 2)
    one, same, other = (keras_model.build("mlp", dataset, seed).initial_parameters for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


# --- Models of the user's ----------------------------------------------------------------------------------------------


@pytest.fixture
def user_model(monkeypatch):
    """A function that builds what a user's function gives, as `--model=m.py:f`."""

    def user_model(result, dataset):
        monkeypatch.setattr(keras_model, "call_user_function", lambda flag, spec: result)
        return keras_model.build("m.py:f", dataset)

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


def subclassed(last):
    """A model like Keras's first example of subclassing: its call takes no `training`."""

    class Mine(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)

        def call(self, x):
            return last(self.dense(x))

    return Mine()


class OwnTrainStep(keras.Sequential):
    """Trains in its own way."""

    @classmethod
    def of(cls, model):
        return cls(model.layers)

    def train_step(self, data):
        return {}


class OwnFit(OwnTrainStep):
    train_step = keras.Model.train_step

    def fit(self, *given, **named):
        return super().fit(*given, **named)


def with_own(name):
    """A model that has a method of its own put on the instance."""
    model = dense(4)
    setattr(model, name, lambda *given: {})
    return model


class VectorLoss(keras.Sequential):
    """Has a loss for each sample."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return y_pred[:, 0]


class Noise(keras.layers.Layer):
    """Draws from Keras's own generator of random numbers, which is no part of the model."""

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


class Recomputed(keras.layers.Layer):
    """Computes a layer again for its gradient."""

    def build(self, shape):
        self.dense = keras.layers.Dense(4)
        self.dense.build(shape)

    def call(self, x):
        return keras.remat(self.dense.call)(x)


def rematerialized():
    with keras.RematScope(mode="full"):
        return keras.Sequential([keras.layers.Dense(4)])


def of_strings():
    return keras.Sequential([keras.Input([1], dtype="string"), keras.layers.StringLookup(vocabulary=["a"], name="words")])


def several_outputs():
    x = keras.Input([3])
    return keras.Model(x, [keras.layers.Dense(4)(x), keras.layers.Dense(4)(x)])


@pytest.mark.parametrize(
    "model, texts",
    [
        (lambda: dense(3), ["outputs of shape [3]", "classes 0 to 3", "expected [4] logits"]),
        (lambda: keras.Sequential([keras.layers.Reshape([3, 1]), keras.layers.Dense(4)]), ["outputs of shape [3, 4]"]),
        (
            lambda: dense(4, activation="softmax"),
            ["ends with softmax, but the loss takes logits", "--loss=sparse_"],
        ),
        (lambda: dense(4, dtype="mixed_bfloat16", activation="softmax"), ["ends with softmax"]),
        (lambda: keras.Sequential([dense(6, activation="softmax"), keras.layers.Lambda(lambda p: p[:, :4])]), ["with softmax"]),
        (lambda: subclassed(lambda x: keras.ops.sigmoid(x[:, :4]) / 2), ["ends with sigmoid"]),
        (
            lambda: keras.Sequential([keras.layers.Reshape([3, 1]), keras.layers.GRU(4, stateful=True, name="gru")]),
            [": gru is stateful: it would continue from the previous batch"],
        ),
        (lambda: keras.Sequential([Noise(), keras.layers.Dense(4)]), ["keras.random without a SeedGenerator"]),
        (lambda: keras.Sequential([Recomputed()]), ["a custom gradient of a function with variables"]),
        (rematerialized, ["a custom gradient of a function with variables or keyword arguments, as in keras.remat"]),
        (
            lambda: keras.Sequential([dense(8, activation="softmax"), keras.layers.Lambda(lambda p: p[:, :4] + p[:, 4:])]),
            ["ends with softmax"],
        ),
        (lambda: dense(4, dtype="mixed_float16"), ["dense", "computes in float16", "choose mixed_bfloat16"]),
        (lambda: VectorLoss([keras.layers.Dense(4)]), ["the loss of the model has shape (2,), expected one number"]),
        (lambda: subclassed(lambda x: keras.ops.softmax(x)), ["ends with softmax"]),
        (lambda: dense(1, activation="sigmoid"), ["outputs of shape [1]", "expected [4] logits"]),
        (lambda: dense(4, kernel_constraint="non_neg"), ["kernel has the constraint NonNeg", "use a regularizer"]),
        (lambda: compiled(dense(4)), ["is compiled without a loss, and its layers add none"]),
        (lambda: OwnTrainStep.of(dense(4)), ["its train_step gives no gradient of ", "set trainable=False"]),
        (lambda: with_own("train_step"), ["has a train_step that is set on the instance: define it in its class"]),
        (lambda: with_own("make_train_function"), ["has a make_train_function of its own, which no worker calls"]),
        (lambda: OwnFit.of(dense(4)), ["has a fit of its own, which no worker calls"]),
        (lambda: subclassed(keras.ops.stop_gradient), ["the loss of the model depends on no trainable variable"]),
        (
            lambda: subclassed(lambda x: 1 / 0),
            ["cannot be called on samples of shape [3]: ZeroDivisionError"],
        ),
        (lambda: subclassed(lambda x: x * float(keras.ops.sum(x))), ["cannot be a part of a graph"]),
        (lambda: keras.Sequential([keras.Input([5]), keras.layers.Dense(4)]), ["cannot be called on samples of shape [3]"]),
        (several_outputs, ["has 2 outputs and 1 arrays of labels"]),
        (lambda: dense(4, trainable=False), ["has no trainable variables: give it a layer"]),
        (of_strings, ["the layer words (StringLookup) takes strings", "in the data, not in the model: dataset.map("]),
        (lambda: dense(4, dtype="float16"), ["computes in float16"]),
        (lambda: dense(4, dtype="float64"), ["variables of type float64, expected float32"]),
        (lambda: keras.layers.Dense(4), ["must give a keras.Model, not Dense"]),
        (lambda: None, ["must give a keras.Model, not NoneType"]),
    ],
)
def test_model_that_cannot_be_trained(user_model, user_error, model, texts):
    with user_error("--model=m.py:f", *texts):
        dataset = classes(9, [3], 4)
        built = user_model(model(), dataset)
        with keras_model.named("m.py:f"):
            run_check._trace(built, dataset)


@pytest.mark.parametrize(
    "y, units, texts",
    [
        (np.eye(4)[np.arange(9) % 4], 4, ["the labels are 0.0 and 1.0", "--loss=binary_crossentropy"]),
        (np.arange(9) % 2.0, 1, ["outputs of shape [1], but the labels have shape []", "as whole numbers, y.astype('int32')"]),
        (np.arange(27).reshape(9, 3), 3, ["expected [3, 27] logits; if they are not classes", "y.astype('float32')"]),
        (np.eye(4, dtype=int)[np.arange(9) % 4], 4, ["labels are classes 0 to 1", "one-hot labels become", ".argmax(axis=-1)"]),
        (np.arange(9) % 2, 1, ["expected [2] logits; for one output compile the model", "--loss=binary_crossentropy"]),
        ({"a": np.arange(9)}, 9, ["the labels are in a dict or tuple: give an array"]),
        (np.arange(9) - 1, 9, ["the labels hold the class -1, expected 0 or more"]),
        (
            np.arange(18).reshape(9, 2),
            20,
            ["outputs of shape [20], but the labels are", "expected [2, 18] logits"],
        ),
        ((np.arange(9), np.arange(9)), 9, ["has 1 outputs and 2 arrays of labels: compile the model with a loss for each"]),
    ],
)
def test_labels_that_do_not_say_what_to_minimize(user_model, user_error, y, units, texts):
    x = np.zeros([9, 3])
    with user_error("--model=m.py:f", *texts):
        user_model(dense(units), datasets.checked(((x, y), (x, y)), "mine"))


@pytest.mark.parametrize("outputs, y_shape", [([1], []), ([2], [1]), ([2, 3], [3, 2])])
def test_outputs_that_do_not_fit_the_labels_of_a_regression(user_model, user_error, outputs, y_shape):
    model = keras.Sequential([keras.layers.Dense(int(np.prod(outputs))), keras.layers.Reshape(outputs)])
    with user_error(f"outputs of shape {outputs}", f"labels have shape {y_shape}"):
        user_model(model, numbers(9, [3], y_shape))


def test_model_in_place_of_a_function(user_error, images, tmp_path):
    (tmp_path / "m.py").write_text("import keras\n\nmodel = keras.Sequential([keras.layers.Dense(3)])\n")
    with user_error("m.py has no function 'model', but a Sequential: give a function that returns it"):
        keras_model.build(f"{tmp_path}/m.py:model", images)


@pytest.mark.parametrize("spec", ["mpl", "", "m.py"])
def test_no_such_model(user_error, spec):
    with user_error("--model must be one of linear, mlp, cnn, cnn1d, dense, transformer, FILE.keras or ", f", not {spec!r}"):
        keras_model.build(spec, classes(9, [3], 4))


def test_a_saved_model(user_error, tmp_path):
    """With its weights; its own classes are in a file."""
    (tmp_path / "own.py").write_text("import keras\n\nclass Doubled(keras.layers.Dense):\n    pass\n")
    own = user_module("--custom_objects", f"{tmp_path}/own.py")
    saved = keras.Sequential([keras.Input([3]), own.Doubled(4)])
    saved.save(tmp_path / "m.keras")
    data = classes(9, [3], 4)
    model = keras_model.build(f"{tmp_path}/m.keras", data, custom_objects=f"{tmp_path}/own.py")
    np.testing.assert_array_equal(model.initial_parameters, np.concatenate([v.numpy().ravel() for v in saved.weights]))
    why = "Could not locate class 'Doubled'; --custom_objects=FILE.py names the file with its own classes"
    with user_error(f"--model={tmp_path}/m.keras cannot be loaded: {why}"):
        keras_model.build(f"{tmp_path}/m.keras", data)
    with user_error("--custom_objects=own.py is for --model=FILE.keras, not mlp"):
        keras_model.build("mlp", data, custom_objects="own.py")
    with user_error("--model=m.keras: there is no such file"):
        keras_model.build("m.keras", data)


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
    model = keras_model.build("mlp", images, seed=3)
    logits = model.keras_model(images.x_train)
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(images.y_train, logits)
    np.testing.assert_allclose(loss(model, images.x_train, images.y_train)[0], expected, rtol=1e-5)


@pytest.mark.parametrize("y_shape", [[], [1], [4], [2, 3]])
def test_loss_of_numbers_is_keras_loss(y_shape):
    dataset = numbers(9, [3], y_shape)
    model = keras_model.build("mlp", dataset, seed=3)
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
    given = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(x)))
    model = keras_model.by_labels(given, is_classification=True)
    logits = given(dataset.x_train, training=True)
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(dataset.y_train, logits) + sum(given.losses)
    with tf.Graph().as_default():
        center = GlobalParameters(model.initial_parameters)
        local = LocalParameters(center, model, Batches(dataset.x_train, dataset.y_train, len(dataset.x_train), 0))
        rounds = build_rounds(hogwild, center, local, hyperparameters(window=window, learning_rate=1e-9))
        session = initialized(center, local)
        np.testing.assert_allclose(session.run(rounds).loss, expected, rtol=1e-4)


def named_inputs(is_dict):
    """A model of two inputs in a dict, or in a list, that gives 3 price − area."""
    inputs = {name: keras.Input([1], name=name) for name in ("price", "area")}
    outputs = keras.layers.Dense(1)(keras.layers.concatenate(list(inputs.values())))
    return keras.Model(inputs if is_dict else list(inputs.values()), outputs)


@pytest.mark.parametrize("is_dict", [True, False])
@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("price area zip", "the samples have 'zip', which is not an input of the model ('area', 'price'): leave it out"),
        ("price area age", "the samples have 'age', which is not an input of the model ('area', 'price'): leave it out"),
        ("price", "the samples lack 'area', an input of the model ('area', 'price'"),
    ],
)
def test_inputs_are_found_by_their_names(user_error, is_dict, keys, text):
    def samples(*names):
        x = {name: np.full([4, 1], place, np.float32) for place, name in enumerate(names, 1)}
        return datasets.checked([(x, np.full([4, 1], 2.5))] * 2, "d.py:f")

    model = keras_model.checked(named_inputs(is_dict), samples("price", "area"))
    dense = model.keras_model.layers[-1]
    dense.set_weights([np.array([[3.0], [-1.0]]), np.zeros(1)])
    assert model.keras_model(samples("price", "area").x_train).numpy()[0] == 3 * 1 - 2
    with user_error(text):
        keras_model.checked(named_inputs(is_dict), samples(*keys.split()))


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


def test_workers_draw_apart_where_the_model_has_seeds_of_its_own(tmp_path, images):
    """Their masks differ, also when its function sets all seeds; worker 0 draws as `fit` would."""
    (tmp_path / "m.py").write_text(
        "import keras\n"
        "def build():\n"
        "    keras.utils.set_random_seed(5)\n"
        "    dropout = keras.layers.Dropout(0.5, seed=3), keras.layers.Dropout(0.5)\n"
        "    return keras.Sequential([keras.Input([8, 8, 1]), keras.layers.Flatten(), *dropout, keras.layers.Dense(3)])\n"
    )
    flags = {"seed": 7, "loss": None, "init_from": None, "resume": False, "run_dir": str(tmp_path), **flag_defaults.TRANSFORMER}
    settings = flag_defaults.Settings(model=f"{tmp_path}/m.py:build", **flags)
    workers = [model_and_data.build_model(settings, images, i) for i in range(3)]
    seeds = [[own.tolist() for own in model.seeds(model.initial_state)] for model in workers]
    first = [v.numpy().tolist() for v in workers[0].keras_model.non_trainable_variables]
    assert len(first) == 2 and seeds == [[[own[0] + i, own[1]] for own in first] for i in range(3)]
    assert len({float(loss(model, images.x_train, images.y_train)[0]) for model in workers}) == 3


def evaluate(model, state, x, y, **settings):
    return in_graph(
        lambda parameters, state, x, y: model.evaluate(parameters, state, x, y, **settings),
        model.initial_parameters,
        state,
        x,
        y,
    )


def test_evaluation_is_that_of_keras(images):
    """Also when the last batch is a smaller one: the test set has 23 samples."""
    model = keras_model.build("cnn", images, seed=1)
    expected = model.keras_model.evaluate(images.x_test, images.y_test, verbose=0, batch_size=10)

    def in_batches(*values):
        return {size: model.evaluate(*values, batch_size=size) for size in (1, 5, 10, 23, 50, 500)}

    found = in_graph(in_batches, model.initial_parameters, model.initial_state, images.x_test, images.y_test)
    for size, ours in found.items():
        np.testing.assert_allclose([ours["loss"], ours["accuracy"]], expected, rtol=1e-5, err_msg=f"batches of {size}")
    assert 0 < expected[1] < 1


def test_evaluation_of_a_regression_has_no_accuracy(regression):
    model = keras_model.build("linear", regression)
    expected = model.keras_model.evaluate(regression.x_test, regression.y_test, verbose=0)
    ours = evaluate(model, [], regression.x_test, regression.y_test, batch_size=7)
    assert list(ours) == ["loss"]
    np.testing.assert_allclose(ours["loss"], expected, rtol=1e-5)


def test_evaluation_uses_the_trained_state(model, images):
    """Moving means, not those of the batch, and without Dropout."""
    state = loss(model, images.x_train, images.y_train)[1]
    for variable, value in zip(model.keras_model.non_trainable_variables, state):
        variable.assign(value)
    expected = model.keras_model.evaluate(images.x_test, images.y_test, verbose=0, batch_size=10, return_dict=True)
    ours = evaluate(model, state, images.x_test, images.y_test, batch_size=10)
    np.testing.assert_allclose([ours[name] for name in expected], list(expected.values()), rtol=1e-5)
    assert abs(evaluate(model, model.initial_state, images.x_test, images.y_test)["loss"] - expected["loss"]) > 1e-3


@pytest.mark.parametrize("trainable", [True, False])
def test_state_at_other_parameters(model, images, trainable):
    """The moving means are the averages of those of the batches, whatever they were; of a frozen layer they stay."""
    norm = model.keras_model.layers[1]
    norm.trainable = trainable
    model = keras_model.by_labels(model.keras_model, True)
    parameters = np.random.default_rng(1).normal(size=model.size).astype(np.float32)
    momentum = norm.momentum

    def at(parameters, state, x, y):
        batch = lambda k: (x[10 * k : 10 * k + 10], y[10 * k : 10 * k + 10])  # noqa: E731
        return model.state_at(parameters, state, batch, 3)

    state = in_graph(at, parameters, model.initial_state, images.x_train, images.y_train)
    assert norm.momentum == momentum
    start = 0
    for variable, shape, size in zip(model.keras_model.trainable_variables, model.shapes, model.sizes, strict=True):
        variable.assign(parameters[start : start + size].reshape(shape))
        start += size
    maps = [model.keras_model.layers[0](images.x_train[10 * k : 10 * k + 10]).numpy() for k in range(3)]
    expected = {
        "moving_mean": np.mean([each.mean(axis=(0, 1, 2)) for each in maps], axis=0),
        "moving_variance": np.mean([each.var(axis=(0, 1, 2)) for each in maps], axis=0),
    }
    for variable, value, before in zip(model.keras_model.non_trainable_variables, state, model.initial_state, strict=True):
        right = expected.get(variable.name, before) if trainable else before
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-6, err_msg=variable.path)


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
    model = keras_model.build(spec, classes(20, shape, num_classes))
    assert builtin_models._count(spec, tuple(shape), num_classes) == model.size


@pytest.mark.parametrize("spec", ["linear", "mlp", "cnn"])
def test_model_larger_than_memory_is_refused_before_it_is_built(user_error, monkeypatch, spec):
    """As for a label that is a customer's number and no class. A class without samples, though, is no mistake."""
    monkeypatch.setattr(builtin_models.limits, "memory", lambda: 10**9)
    x, y = np.zeros([20, 8, 8, 1]), np.arange(20) % 2
    y[3] = 10**9
    with user_error(
        f"the labels are classes 0 to 1000000000, and --model={spec} would have ",
        "of memory, but the machine has 1.0 GB; number them without gaps, as np.unique(y, return_inverse=True) does",
    ):
        keras_model.build(spec, datasets.checked(((x, y), (x, y)), "far"))
    y[3] = 1000
    assert keras_model.build(spec, datasets.checked(((x, y), (x, y)), "far")).keras_model.output_shape == (None, 1001)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_initial_values_that_are_not_finite_are_refused(user_error, monkeypatch, images, value):
    for name, variable in ("dense", lambda m: m.layers[-1].bias), ("moving_mean", lambda m: m.layers[1].moving_mean):
        model = layers_of_all_kinds()
        variable(model).assign([value if i == 1 else 0.0 for i in range(variable(model).shape[0])])
        monkeypatch.setattr(keras_model, "call_user_function", lambda *_, model=model: model)
        with user_error("--model=m.py:build: ", name, "begins with 1 values that are NaN or infinite"):
            keras_model.build("m.py:build", images)


# --- A loss and metrics of the user's own ------------------------------------------------------------------------------


class WithLosses(keras.Model):
    """Two inputs in a dict, two outputs in a dict, Dropout, add_loss; its call takes no `training`."""

    def __init__(self):
        super().__init__()
        self.left, self.right = keras.layers.Dense(3), keras.layers.Dense(1, kernel_regularizer="l2")

    def call(self, inputs):
        self.add_loss(keras.ops.mean(keras.ops.square(inputs["a"])))
        both = keras.ops.concatenate([inputs["a"], keras.ops.cast(inputs["b"], "float32")], axis=1)
        return {"kind": self.left(both), "size": self.right(both)}


class OwnComputeLoss(keras.Sequential):
    """Computes its loss itself, and counts what it is called with."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return keras.ops.mean(keras.ops.abs(y_pred - y)) * 3 + sum(self.losses)


def two_and_two(n):
    rng = np.random.default_rng(n)
    x = {"a": rng.random([n, 4]), "b": rng.integers(0, 5, [n, 2]).astype(np.uint8)}
    return x, {"kind": np.arange(n) % 3, "size": rng.random([n, 1])}, {"kind": rng.random(n), "size": rng.random(n)}


def compiled(model, *arguments, **settings):
    model.compile(*arguments, **settings)
    return model


def language_model():
    layers = [keras.layers.Embedding(7, 4), keras.layers.Dense(7)]
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(keras.Sequential(layers), "adam", cross_entropy, metrics=["accuracy"])


def text(n):
    x = np.random.default_rng(n).integers(0, 7, [n, 6])
    return x, (x + 1) % 7


def weighted(n):
    rng = np.random.default_rng(n)
    return rng.random([n, 3]), np.arange(n) % 2, rng.random(n)


def weighted_pairs(n):
    x, _, weights = weighted(n)
    return x, x[:, :2], weights


class HandsNothingOn(keras.Model):
    """Has Dropout and batch normalization, to which its call hands no `training`; counts what it is called with; a mask."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = keras.layers.Embedding(7, 4, mask_zero=True), keras.layers.LSTM(3)
        self.dropout, self.norm = keras.layers.Dropout(0.5, seed=3), keras.layers.BatchNormalization()
        self.dense, self.seen = keras.layers.Dense(2), keras.metrics.Sum("seen")

    def call(self, x, training=None):
        self.seen.update_state(keras.ops.cast(x, "float32"))
        return self.dense(self.norm(self.dropout(self.lstm(self.embedding(x)))))


def masked_loss(y, p):
    """The mean over labels that are not 0, as a language model without its padding."""
    counts = keras.ops.cast(y != 0, "float32")
    losses = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
    return keras.ops.sum(counts * losses) / keras.ops.sum(counts)


class HalfRight(keras.metrics.Mean):
    """The share of right answers among those to 2."""

    def update_state(self, y, p, sample_weight=None):
        hits = keras.ops.cast(keras.ops.argmax(p, axis=-1), "int32") == keras.ops.cast(y, "int32")
        super().update_state(hits, sample_weight=keras.ops.cast(y == 2, "float32"))


class Penalty(keras.Sequential):
    """Keeps the gradient by its inputs small."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self(x)
        return keras.ops.mean((y_pred - y) ** 2) + keras.ops.mean(tape.gradient(outputs, x) ** 2)


class OwnMetrics(keras.Sequential):
    """Gives a number of its own beside its metrics."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "largest": keras.ops.max(y_pred)}


PROBLEMS = {
    "layers that its call does not tell whether it trains": (
        lambda: compiled(HandsNothingOn(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        lambda n: (text(n)[0], np.arange(n) % 2),
    ),
    "a number of its own": (lambda: compiled(OwnMetrics([keras.layers.Dense(2)]), loss="mse", metrics=["mae"]), weighted_pairs),
    "classes in a column": (
        lambda: compiled(dense(1), loss=lambda y, p: keras.ops.mean(keras.ops.abs(p - keras.ops.cast(y, "float32")), axis=-1)),
        lambda n: (weighted(n)[0], np.arange(n)[:, None]),
    ),
    "two outputs, weights of losses and samples": (
        lambda: compiled(
            WithLosses(),
            loss={"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mae"},
            loss_weights={"kind": 0.3, "size": 2.0},
            metrics={"kind": ["accuracy"], "size": ["mse", keras.metrics.RootMeanSquaredError("rms")]},
            weighted_metrics={"size": ["mae"]},
        ),
        two_and_two,
    ),
    "own compute_loss": (
        lambda: OwnComputeLoss([keras.layers.Dense(2, activity_regularizer="l2")]),
        lambda n: (two_and_two(n)[0]["a"], two_and_two(n)[0]["a"][:, :2]),
    ),
    "language model": (language_model, text),
    "softmax": (
        lambda: compiled(dense(2, activation="softmax"), loss="sparse_categorical_crossentropy", weighted_metrics=["acc"]),
        weighted,
    ),
    "one sigmoid": (
        lambda: compiled(
            dense(1, activation="sigmoid"), "adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")]
        ),
        weighted,
    ),
    "one-hot": (
        lambda: compiled(dense(3), loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)),
        lambda n: (weighted(n)[0], np.eye(3)[np.arange(n) % 3]),
    ),
    "comparisons of tensors": (
        lambda: compiled(keras.Sequential(language_model().layers), loss=masked_loss, metrics=[HalfRight("half")]),
        text,
    ),
    "a gradient by its inputs": (
        lambda: Penalty([keras.layers.Dense(2, activation="tanh")]),
        lambda n: (weighted(n)[0], weighted(n)[0][:, :2]),
    ),
    "a function": (
        lambda: compiled(dense(2), loss=lambda y, p: keras.ops.mean(keras.ops.abs(p - y) ** 3, axis=-1)),
        lambda n: (weighted(n)[0], weighted(n)[0][:, :2]),
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_loss_and_metrics_of_the_model_are_honoured(user_model, problem):
    """A training loss and an evaluation in a graph give what Keras gives, of labels of any shape, with weights of samples."""
    make, samples = PROBLEMS[problem]
    dataset = datasets.checked((samples(12), samples(7)), "mine")
    model = user_model(make(), dataset)
    run_check._trace(model, dataset)
    x, y, *weights = dataset.train
    ours, state = in_graph(
        lambda p, state, x, y, *w: model.loss(model.split(p), state, x, y, *w),
        *(model.initial_parameters, model.initial_state, x, y, *weights),
    )
    inputs = stateless_model.as_inputs(mapped(keras.ops.convert_to_tensor, x))
    outputs = model.keras_model(inputs, **stateless_model.training_arg(model.keras_model, True))
    expected = model.keras_model._compute_loss(inputs, y, outputs, *weights)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    for value, variable in zip(state, model.keras_model.non_trainable_variables, strict=True):
        np.testing.assert_allclose(value, variable.numpy(), rtol=1e-5, err_msg=variable.path)
    for variable, value in zip(model.keras_model.non_trainable_variables, model.initial_state, strict=True):
        variable.assign(value)
    found = in_graph(
        lambda p, state, x, y, *w: model.evaluate(p, state, x, y, *w, batch_size=3),
        *(model.initial_parameters, model.initial_state, *dataset.test),
    )
    x, y, *weights = dataset.test
    if not model.keras_model.compiled:
        model.keras_model.compile("sgd")
    expected = model.keras_model.evaluate(
        mapped(np.asarray, stateless_model.as_inputs(mapped(keras.ops.convert_to_tensor, x))),
        y,
        sample_weight=weights[0] if weights else None,
        batch_size=3,
        verbose=0,
        return_dict=True,
    )
    assert found.keys() == expected.keys()
    np.testing.assert_allclose([found[name] for name in expected], list(expected.values()), rtol=1e-5)


@pytest.mark.parametrize(
    "name, units, activation, y, minimizes",
    [
        ("binary_crossentropy", 1, None, np.arange(9) % 2, "binary crossentropy of logits"),
        ("binary_crossentropy", 1, "sigmoid", np.arange(9) % 2, "binary crossentropy"),
        ("binary_crossentropy", 3, None, np.eye(3)[np.arange(9) % 3], "binary crossentropy of logits"),
        ("categorical_crossentropy", 3, "softmax", np.eye(3)[np.arange(9) % 3], "categorical crossentropy"),
        ("sparse_categorical_crossentropy", 3, "softmax", np.arange(9) % 3, "sparse categorical crossentropy"),
        ("mean_absolute_error", 2, None, np.eye(2)[np.arange(9) % 2], "mean absolute error"),
        ("huber", 1, None, np.arange(9), "huber"),
    ],
)
def test_loss_by_flag(monkeypatch, name, units, activation, y, minimizes):
    """A cross-entropy takes what the model gives: logits, or probabilities."""
    x = np.random.default_rng(0).random([9, 3])
    dataset = datasets.checked(((x, y), (x, y)), "mine")
    monkeypatch.setattr(keras_model, "call_user_function", lambda *_: dense(units, activation=activation))
    model = keras_model.build("m.py:f", dataset, loss=name)
    assert model.minimizes == minimizes
    outputs = model.keras_model(dataset.x_train)
    more = {"from_logits": activation is None} if "crossentropy" in name else {}
    kind = (
        keras.losses.Huber if name == "huber" else getattr(keras.losses, "".join(part.capitalize() for part in name.split("_")))
    )
    expected = kind(**more)(dataset.y_train, outputs)
    np.testing.assert_allclose(loss(model, dataset.x_train, dataset.y_train)[0], expected, rtol=1e-5)
    found = evaluate(model, [], dataset.x_test, dataset.y_test)
    if "crossentropy" in name:
        of_model = np.asarray(outputs).squeeze()
        if name.startswith("binary"):
            hits = (of_model > (0 if activation is None else 0.5)) == dataset.y_test
        else:
            hits = of_model.argmax(axis=-1) == (y if y.ndim == 1 else y.argmax(axis=-1))
        np.testing.assert_allclose(found["accuracy"], np.mean(hits), rtol=1e-5)


@pytest.mark.parametrize("name", ["bce", "BinaryCrossentropy", "SparseCategoricalCrossentropy", "binary_focal_crossentropy"])
def test_flag_that_may_mean_logits_or_probabilities(user_error, name):
    with user_error(f"--loss={name} may take logits or probabilities: choose sparse_categorical_crossentropy, "):
        keras_model.build("mlp", classes(9, [3], 4), loss=name)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 4, 2], [0, 1, 2, 3, -1, 2]])
def test_labels_that_a_loss_cannot_take(user_model, user_error, labels):
    """The largest and the smallest label are tried, not the first alone."""
    x, y = np.zeros([6, 3]), np.array(labels)
    for halves in ((x, y), (x[:4], y[:4])), ((x[:4], y[:4]), (x, y)):
        model = compiled(dense(4), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with user_error("the loss, sparse categorical crossentropy of logits, does not fit the labels: InvalidArgumentError"):
            user_model(model, datasets.checked(halves, "mine"))


def test_shapes_that_fit_only_by_chance(user_model, user_error):
    """A loss for outputs [n] and labels [n, 2] can be computed of two samples."""
    x, y = np.zeros([6, 3]), np.zeros([6, 2])
    model = compiled(subclassed(lambda x: x[:, 0]), loss=lambda y, p: keras.ops.mean(keras.ops.abs(p - y)))
    with user_error("does not fit the labels"):
        user_model(model, datasets.checked(((x, y), (x, y)), "mine"))


def test_model_that_a_function_gives_again(monkeypatch):
    """As for each thread of one process: what the flag compiled it with is no loss of its own."""
    dataset, model = classes(9, [3], 4), dense(4)
    monkeypatch.setattr(keras_model, "call_user_function", lambda *_: model)
    name = "sparse_categorical_crossentropy"
    assert [keras_model.build("m.py:f", dataset, loss=name).minimizes for _ in range(2)] == [
        f"{name.replace('_', ' ')} of logits"
    ] * 2


def test_losses_of_layers_of_a_model_that_is_not_compiled(user_model):
    dataset = classes(9, [3], 4)
    model = user_model(dense(4, activity_regularizer="l2"), dataset)
    run_check._trace(model, dataset)
    assert model.minimizes == "sparse categorical crossentropy of logits + the losses of its layers"


def test_flag_and_a_loss_of_the_models_own(monkeypatch, user_error):
    dataset = classes(9, [3], 4)
    for model in language_model(), OwnComputeLoss([keras.layers.Dense(4)]):
        monkeypatch.setattr(keras_model, "call_user_function", lambda *_, model=model: model)
        with user_error("--loss=mean_squared_error: the model has a loss already"):
            keras_model.build("m.py:f", dataset, loss="mean_squared_error")
    with user_error("--loss must be a loss of Keras, such as mean_absolute_error, not 'mse_'"):
        keras_model.build("mlp", dataset, loss="mse_")


class Counts(keras.metrics.Metric):
    """Gives two numbers."""

    def update_state(self, y, y_pred, sample_weight=None):
        pass

    def result(self):
        return keras.ops.zeros(2)


class NeedsPython(Counts):
    def update_state(self, y, y_pred, sample_weight=None):
        if keras.ops.sum(y_pred) > 0:
            pass


class InADict(Counts):
    def result(self):
        return {"least": keras.ops.zeros([]), "both": keras.ops.ones(2)}


def test_a_metric_that_cannot_be(user_model, user_error):
    dataset = classes(9, [3], 4)
    model = compiled(dense(4), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[NeedsPython()])
    with user_error("the metrics of the model cannot be"):
        run_check._trace(user_model(model, dataset), dataset)


def test_metrics_of_several_numbers(user_model):
    """Each of them is named, by its place or as the metric names it, and is what Keras computes."""
    x, y = np.random.default_rng(0).random([40, 3]), np.eye(4)[np.arange(40) % 4]
    dataset = datasets.checked(((x, y), (x[:23], y[:23])), "one-hot")
    metrics = [keras.metrics.F1Score(), Counts(), InADict()]
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model = user_model(compiled(dense(4), loss=loss, metrics=metrics), dataset)
    found = evaluate(model, model.initial_state, dataset.x_test, dataset.y_test, batch_size=10)
    expected = model.keras_model.evaluate(dataset.x_test, dataset.y_test, verbose=0, return_dict=True)
    assert [found[f"f1_score_{i}"] for i in range(4)] == pytest.approx(expected["f1_score"])
    numbers = {"counts_0": 0, "counts_1": 0, "least": 0, "both_0": 1, "both_1": 1}
    assert {name: found[name] for name in numbers} == numbers and len(found) == 4 + 5 + 1


def test_what_is_trained(user_model):
    dataset = datasets.checked((two_and_two(13), two_and_two(7)), "mine")
    model = user_model(PROBLEMS["two outputs, weights of losses and samples"][0](), dataset)
    text = (
        "minimizes sparse categorical crossentropy of kind, mae of size + the losses of its layers, by SGD on the ps "
        "(the model's own RMSprop is not used); 13 samples, 6 or 7 for each of 2 workers"
    )
    assert model_and_data.what_is_trained(model, dataset, 2, "SGD on the ps") == text
    size = sum(array.nbytes for part in dataset.train for array in arrays_in(part))
    said = model_and_data.what_is_trained(model, dataset, 2, "SGD on the ps", is_own=True)
    assert said == f"{text}, from arrays of {size / 1000:.1f} kB in memory"


def doubled_if_positive(x):
    return 2 * x if x > 0 else x


def test_code_that_tensorflow_generates_leaves_no_file(tmp_path, monkeypatch):
    """Tasks end at once, and would leave those of models and layers with a `tf.function`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = tf.autograph.to_graph(doubled_if_positive)
    assert made(3) == 6 and list(tmp_path.iterdir()) == []
    assert "tf__doubled_if_positive" in inspect.getsource(made)
