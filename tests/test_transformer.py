"""--model=transformer, and --model=linear of sequences: what they are, what they refuse, and that a scheme trains them."""

import functools
import json
import zipfile

import keras
import numpy as np
import pytest
import tensorflow
from runs import result_of, run

from common import tf
from common.cli.api import Run
from common.core import flags
from common.data import datasets
from common.models import builtin_models, keras_model
from common.scheme import RoundSize
from common.training.calls import rounds_worth_a_call
from common.training.model_and_data import unit_of

SIZES = {"layers": 2, "width": 8, "heads": 2}

load = functools.cache(datasets.load)  # mnist1d takes seconds to generate


def sequences(n=9, length=5, tokens=7, dtype=np.uint8):
    """n sequences of the numbers 0 to tokens - 1, all of which occur, and what follows each of them."""
    walk = (np.arange(n * length + 1) * 3 % tokens).astype(dtype)
    x, y = walk[:-1].reshape(n, length), walk[1:].reshape(n, length)
    return datasets.checked(((x, y), (x[:4], y[:4])), "mine")


def in_graph(model, function, *values):
    """What a function of a model's parameters and these values gives in a graph, as NumPy arrays."""
    with tf.Graph().as_default(), tf.Session() as session:
        tensors = [tf.placeholder(value.dtype, value.shape) for value in (model.initial_parameters, *values)]
        return session.run(function(*tensors), dict(zip(tensors, (model.initial_parameters, *values), strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_it_gives_logits_for_each_place(dtype):
    dataset = sequences(dtype=dtype)
    model = keras_model.build("transformer", dataset, **SIZES)
    assert model.keras_model.output_shape == (None, 5, 7) and model.keras_model.input.dtype == "int32"
    assert model.minimizes == "sparse categorical crossentropy of logits" and model.places == 5
    found = in_graph(model, lambda p, x, y: model.evaluate(p, [], x, y, batch_size=3), *dataset.test)
    expected = model.keras_model.evaluate(*dataset.test, verbose=0, return_dict=True)
    assert found.keys() == {"loss", "accuracy"}
    np.testing.assert_allclose([found["loss"], found["accuracy"]], [expected["loss"], expected["accuracy"]], rtol=1e-5)


@pytest.mark.slow
def test_gradient_is_that_of_keras():
    """Of both embeddings, too, that of the places among them, which all samples of a batch have in common."""
    dataset = sequences()
    model = keras_model.build("transformer", dataset, **SIZES)
    loss, gradient, _ = in_graph(model, lambda p, x, y: model.loss_and_gradient(p, [], x, y), *dataset.train)
    with tensorflow.GradientTape() as tape:
        logits = model.keras_model(dataset.x_train)
        expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(dataset.y_train, logits)
    parts = tape.gradient(expected, model.keras_model.trainable_variables)
    flat = np.concatenate([tensorflow.convert_to_tensor(part).numpy().ravel() for part in parts])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, flat, rtol=1e-4, atol=1e-6)
    places = [v for v in model.shapes if v == (5, 8)]
    assert len(places) == 1 and np.abs(gradient).max() > 1e-3


@pytest.mark.slow
def test_a_place_sees_itself_and_those_before():
    dataset = sequences(length=6)
    model = keras_model.build("transformer", dataset, **SIZES).keras_model
    x, changed = dataset.x_test[:1].astype(int), dataset.x_test[:1].astype(int)
    changed[0, 3] = (x[0, 3] + 1) % 7
    change = np.abs(model.predict_on_batch(x) - model.predict_on_batch(changed)).max(axis=-1)[0]
    assert change[:3].max() < 1e-6 < 1e-4 < change[3:].min()


@pytest.mark.slow
def test_the_same_number_at_two_places_is_not_the_same():
    model = keras_model.build("transformer", sequences(), **SIZES).keras_model
    logits = model.predict_on_batch(np.full([1, 5], 3))[0]
    assert np.abs(logits[1:] - logits[:-1]).max(axis=-1).min() > 1e-4


@pytest.mark.parametrize("sizes", [SIZES, {"layers": 1, "width": 12, "heads": 3}, {"layers": 3, "width": 4, "heads": 1}, {}])
def test_size_before_it_is_built(monkeypatch, sizes):
    """By which one that memory cannot hold is refused."""
    dataset, counted = sequences(), []
    monkeypatch.setattr(builtin_models, "_check_size", lambda what, count, hint: counted.append(count))
    assert keras_model.build("transformer", dataset, **sizes).size == counted[0]
    assert keras_model.build("linear", dataset).size == counted[1] == 7 * 7


def test_default_sizes():
    assert keras_model.build("transformer", load("text")).size == 66_592


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["transformer", "linear"])
def test_saved_model_needs_nothing_of_this_project(tmp_path, spec):
    dataset = sequences()
    model = keras_model.build(spec, dataset, **SIZES)
    model.save(2 * model.initial_parameters, [], tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        config = archive.read("config.json").decode()
    assert "common" not in config and json.loads(config)["registered_name"] in ("Functional", None, "Sequential")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    expected = model.keras_model.predict(dataset.x_test, verbose=0)  # saving has given it these values
    np.testing.assert_allclose(loaded.predict(dataset.x_test, verbose=0), expected, rtol=1e-5)


def test_linear_model_of_sequences_is_a_table():
    """With the logarithms of how often each number follows each, its loss is that of counting pairs."""
    dataset = sequences(n=40)
    model = keras_model.build("linear", dataset)
    pairs = np.full([7, 7], 0.1)
    np.add.at(pairs, (dataset.x_train, dataset.y_train), 1)
    table = np.log(pairs / pairs.sum(axis=1, keepdims=True))
    model.keras_model.trainable_variables[0].assign(table)
    loss = model.keras_model.evaluate(*dataset.test, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(loss, -table[dataset.x_test, dataset.y_test].mean(), rtol=1e-5)


# --- What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--layers=2"], "--layers=2 needs --model=transformer: add that, or leave --layers out"),
        (["--model=cnn", "--width=32"], "--width=32 needs --model=transformer: add that, or leave --width out"),
        (["--model=m.py:build", "--heads=4"], "--heads=4 needs --model=transformer: add that, or leave --heads out"),
        (["--model=transformer", "--heads=3"], "--heads=3 does not divide --width=64: each head has an equal part of the"),
        (["--model=transformer", "--width=30", "--heads=4"], "--heads=4 does not divide --width=30"),
        (["--model=transformer", "--layers=0"], "--layers must be at least 1, not 0"),
        (["--model=transformer", "--width=0"], "--width must be at least 1, not 0"),
        (["--model=transformer", "--heads=0"], "--heads must be at least 1, not 0"),
    ],
)
def test_sizes_that_are_refused(parse, user_error, arguments, text):
    with user_error(text):
        parse(*arguments)


def test_sizes_by_flags(parse):
    settings = parse("--model=transformer", "--width=32", "--layers=3")
    assert flags.model_options(settings) == {"layers": 3, "width": 32, "heads": 4, "custom_objects": None}


ONE_HOT = np.eye(4, dtype=int)[np.arange(9) % 4]


@pytest.mark.parametrize(
    "spec, x, y, text",
    [
        ("transformer", np.zeros([9, 5]), np.arange(45).reshape(9, 5), "a sample is float32 of shape [5], its label int32 of"),
        ("transformer", np.zeros([9, 5], int), np.arange(9), "a sample is int64 of shape [5], its label int32 of shape []"),
        ("transformer", np.zeros([9, 5], int), np.zeros([9, 5]), "its label float32 of shape [5]"),
        ("transformer", np.zeros([9, 2, 2], int), np.zeros([9, 2, 2], int), "a sample is int64 of shape [2, 2]"),
        ("transformer", np.full([9, 3], -1), np.arange(27).reshape(9, 3), "the samples hold the number -1, expected 0 or more"),
        ("transformer", np.zeros([9, 4], int), ONE_HOT, "one-hot labels become class numbers by .argmax(axis=-1)"),
        ("linear", np.zeros([9, 4], int), ONE_HOT, "one-hot labels become class numbers by .argmax(axis=-1)"),
        ("mlp", np.zeros([9, 3], int), np.arange(27).reshape(9, 3), "one for each place of a sequence: choose --model=transf"),
        ("cnn", np.zeros([9, 3], int), np.arange(27).reshape(9, 3), "one for each place of a sequence: choose --model=transf"),
    ],
)
def test_data_that_do_not_fit(user_error, spec, x, y, text):
    with user_error(f"--model={spec}", text):
        keras_model.build(spec, datasets.checked(((x, y), (x, y)), "mine"))


def test_digits_are_no_sequences(user_error):
    with user_error("--model=transformer needs sequences of whole numbers", "float32 of shape [8, 8, 1], its label int32 of"):
        keras_model.build("transformer", load("digits"))


def test_larger_than_memory(user_error):
    expected = "--model=transformer --layers=1 --width=2000000000 would have", "of memory, but the machine has", "a smaller"
    with user_error(*expected):
        keras_model.build("transformer", sequences(), width=2_000_000_000, heads=1)


def test_a_number_in_a_column_is_no_sequence():
    """As some files have it: the linear model multiplies it."""
    x = np.arange(9)[:, None]
    assert keras_model.build("linear", datasets.checked(((x, x % 2), (x, x % 2)), "mine")).shapes == [(1, 2), (2,)]


@pytest.mark.slow
@pytest.mark.parametrize("name, spec", [(name, spec) for name in flags.FITTING for spec in flags.FITTING[name]])
def test_what_is_not_checked_before_a_run_fits(name, spec):
    keras_model.build(spec, load(name))


# --- Runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, loss, unit",
    [
        ("text", "sparse categorical crossentropy of logits", "nats per character"),
        ("text", "sparse categorical crossentropy of logits + the losses of its layers", None),
        ("digits", "sparse categorical crossentropy of logits", None),
    ],
)
def test_unit_of_the_loss(name, loss, unit):
    assert unit_of(flags.Settings(data=name), flags.Settings(minimizes=loss)) == unit


def test_a_sequence_makes_a_round_long():
    """So a call need not have many rounds, and its graph is soon prepared."""
    text, digits = load("text"), load("digits")
    names = ("transformer", text), ("linear", text), ("mlp", digits)
    rounds = [rounds_worth_a_call(keras_model.build(name, of_name), RoundSize()) for name, of_name in names]
    assert rounds == [1, 10, 10]


@pytest.mark.cluster
def test_it_is_trained(tmp_path):
    """The run says the unit of its loss; its model is loaded by Keras, and by `train`'s `Run`."""
    sizes = {"layers": 1, "width": 8, "heads": 2}
    given = [f"--{name}={value}" for name, value in sizes.items()]
    output = run(tmp_path, "--data=text", "--model=transformer", *given, "--steps=300", "--learning_rate=0.3")
    assert "minimizes sparse categorical crossentropy of logits in nats per character, by SGD on the ps" in output
    result, text = result_of(tmp_path), load("text")
    assert f"test loss {result['test_loss']:.4f} nats per character; staleness" in output
    assert result["unit"] == "nats per character" and 2 < result["test_loss"] < 4 and result["test_accuracy"] > 0.2
    for model in keras.models.load_model(tmp_path / "model.keras"), Run(tmp_path, "transformer", "text", sizes).model:
        found = model.evaluate(*text.test, batch_size=500, verbose=0, return_dict=True)
        np.testing.assert_allclose(found["loss"], result["test_loss"], rtol=1e-4)
        np.testing.assert_allclose(found["accuracy"], result["test_accuracy"], rtol=1e-4)
