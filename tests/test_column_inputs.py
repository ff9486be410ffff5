"""Columns of files as inputs of a model: by name, in order as one input, exactly, or refused."""

import math
import pickle

import numpy as np
import pytest

from common import Embedding, tf
from common.cli import serialization
from common.data import datasets
from common.data.columns import Columns
from common.data.datasets import Data
from common.models import keras_model
from common.scheme import tables

N = 12


def column(name, kind, at, array="numbers", **more):
    return {"name": name, "kind": kind, "array": array, "at": at, "width": 1, "is_list": False, "most": None, **more}


COLUMNS = [
    column("price", "float", 0),
    column("user", "int", 0, "ids", most=3_000_000_000),
    column("age", "int", 1, most=90),
    column("city", "string", 6, most=3, vocabulary="vocabulary-city.json"),
    column("image", "float", 2, width=3, is_list=True),
    column("new", "bool", 5),
]


@pytest.fixture
def data():
    """Columns of all kinds; row n has the price n + 0.5, the user 3e9 - n, the age n, the city n mod 4."""
    n = np.arange(N)
    numbers = np.stack([n + 0.5, n, 10 * n, 11 * n, 12 * n, n % 2, n % 4], 1).astype(np.float32)
    x = {"ids": (3_000_000_000 - n)[:, None].astype(np.int64), "numbers": numbers}
    y = (n % 3).astype(np.int32)
    return Data(x, y, x, y, columns=Columns(COLUMNS))


@pytest.fixture
def of_numbers(data):
    """The same without users: one array."""
    columns = Columns([each for each in COLUMNS if each["name"] != "user"])
    return data._replace(x_train=data.x_train["numbers"], x_test=data.x_test["numbers"], columns=columns)


def model_of(*inputs, outputs=3, wide=True):
    """A functional model of inputs {name: (shape, type)}."""
    import keras

    given = [keras.Input(shape, name=name, dtype=dtype) for name, shape, dtype in inputs]
    flat = [keras.layers.Reshape([math.prod(each.shape[1:])])(keras.ops.cast(each, "float32")) for each in given]
    whole = keras.layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
    return keras.Model(given if wide else dict(zip([name for name, *_ in inputs], given)), keras.layers.Dense(outputs)(whole))


def inputs_of(model, x):
    """What a model gets of samples, in a graph."""
    with tf.Graph().as_default(), tf.Session() as session:
        feeds = {name: tf.placeholder(array.dtype, [None, *array.shape[1:]]) for name, array in x.items()}
        return session.run(model.inputs(feeds), {feeds[name]: array for name, array in x.items()})


@pytest.mark.parametrize("wide", [True, False])
def test_inputs_are_columns_by_name(data, wide):
    """In the declared shape and type, whatever their order."""
    inputs: tuple = ("user", [], "int64"), ("image", [3], "float32"), ("age", [1], "int32"), ("city", [1], "int64")
    model = keras_model.checked(model_of(*inputs, wide=wide), data)
    found = inputs_of(model, data.x_train)
    user, image, age, city = found if wide else (found[name] for name in ("user", "image", "age", "city"))
    assert user.dtype == np.int64 and user.tolist() == [3_000_000_000 - n for n in range(N)]
    assert image.tolist() == [[10 * n, 11 * n, 12 * n] for n in range(N)]
    assert age.dtype == np.int32 and age.tolist() == [[n] for n in range(N)]
    assert city.dtype == np.int64 and city.tolist() == [[n % 4] for n in range(N)]
    assert model.columns == "the inputs are columns: 'user', 'image', 'age', 'city'; no input takes 'price', 'new'"


def test_loss_and_metrics_are_those_of_keras(data):
    model = keras_model.checked(model_of(("price", [1], "float32"), ("age", [], "float32")), data)
    n = np.arange(N, dtype=np.float32)
    expected = model.keras_model.evaluate([n[:, None] + 0.5, n], data.y_test, verbose=0, return_dict=True)
    with tf.Graph().as_default(), tf.Session() as session:
        found = session.run(model.evaluate(tf.constant(model.initial_parameters), [], *_constants(data.test)))
        loss = session.run(model.loss_and_gradient(tf.constant(model.initial_parameters), [], *_constants(data.train))[0])
    assert found == pytest.approx(expected, rel=1e-5) and loss == pytest.approx(expected["loss"], rel=1e-5)


def _constants(samples):
    return tf.nest.map_structure(tf.constant, samples)


@pytest.mark.parametrize("spec", ["mlp", "linear", "own"])
def test_one_input_is_the_columns_of_numbers_in_order(of_numbers, spec):
    """Also of a model whose inputs are not known; without the strings."""
    import keras

    own = keras.Sequential([keras.layers.Dense(3)])
    model = keras_model.checked(own, of_numbers) if spec == "own" else keras_model.build(spec, of_numbers)
    assert model.keras_model.count_params() == {"mlp": 6 * 128 + 128 + 128 * 128 + 128 + 128 * 3 + 3}.get(spec, 6 * 3 + 3)
    strings = "the strings 'city' are left out: an input takes them by name"
    assert model.columns == f"the input is the columns 'price', 'age', 'image', 'new' in order; {strings}"
    with tf.Graph().as_default(), tf.Session() as session:
        np.testing.assert_array_equal(session.run(model.inputs(tf.constant(of_numbers.x_train))), of_numbers.x_train[:, :6])


def test_sequences_of_whole_numbers(of_numbers):
    """A list of whole numbers in each row, and a list of labels: as arrays of sequences."""
    tokens = np.arange(4 * N).reshape(N, 4) % 7
    columns = Columns([column("tokens", "int", 0, width=4, is_list=True, most=6)])
    x, y = tokens.astype(np.float32), tokens.astype(np.int32)
    model = keras_model.build("transformer", Data(x, y, x, y, columns=columns))
    assert model.keras_model.inputs[0].dtype == "int32"


@pytest.mark.parametrize(
    "inputs, text",
    [
        ((("price", [1], "float32"), ("other", [1], "float32")), "the input 'other' is no column of the data: they have "),
        ((("user", [1], "float32"),), "the input 'user' takes float32, but the column 'user' holds whole numbers up to 3,"),
        ((("user", [1], "int32"),), "the input 'user' takes int32, but the column 'user' holds 3,000,000,000"),
        ((("price", [1], "int32"),), "the input 'price' takes int32, but the column 'price' holds 0.5"),
        ((("age", [1], "bool"),), "the input 'age' takes bool, but the column 'age' holds int numbers"),
        ((("city", [1], "float32"),), "the input 'city' takes float32, but the column 'city' holds strings, as whole"),
        ((("city", [1], "uint8"), ("user", [1], "uint8")), "the input 'user' takes uint8, but the column 'user' holds 3,0"),
        ((("price", [2], "float32"),), "the input 'price' has shape [2], but the column 'price' has 1 number for a sample"),
        ((("image", [1], "float32"),), "the input 'image' has shape [1], but the column 'image' has 3 numbers for a sample"),
        ((("x", [6], "float32"),), "the model's one input takes numbers of float32, but the column 'user' holds whole num"),
    ],
)
def test_inputs_that_would_change_a_column(user_error, data, inputs, text):
    with user_error(text):
        keras_model.checked(model_of(*inputs), data)


def test_whole_numbers_are_exact(data):
    """In an input of 64 bits; float64 is enough for these."""
    model = keras_model.checked(model_of(("user", [1], "float64")), data)
    assert inputs_of(model, data.x_train)[0][:, 0].tolist() == [3_000_000_000 - n for n in range(N)]


def test_a_column_as_the_ids_of_a_table(data, user_error):
    import keras

    def build(rows):
        user, price = keras.Input([], name="user", dtype="int64"), keras.Input([1], name="price")
        rows = Embedding(rows, 2)(user)
        return keras.Model([price, user], keras.layers.Dense(3)(keras.layers.Concatenate()([rows, price])))

    with tables.on_ps(0):
        model = keras_model.checked(build(None), data)
        tables.check_data(model, [data.x_train, data.x_test], is_stream=False)
        with user_error("has rows 0 to 99, but the samples have ids from 2,999,999,989 to 3,000,000,000"):
            tables.check_data(keras_model.checked(build(100), data), [data.x_train], is_stream=False)


def test_the_saved_model_takes_the_inputs_by_name(data, tmp_path):
    import keras

    model = keras_model.checked(model_of(("price", [1], "float32"), ("age", [1], "float32"), wide=False), data)
    model.save(model.initial_parameters, [], tmp_path / "model.keras")
    n = np.arange(N, dtype=np.float32)[:, None]
    given = {"age": n, "price": n + 0.5}
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(given), model.keras_model(given))


class DataFrame:
    """Stands in for that of pandas: columns by name."""

    def __init__(self, **columns):
        self._columns, self.columns = columns, list(columns)

    def __getitem__(self, name):
        return self._columns[name]


def test_a_data_frame_is_columns():
    """Its labels may be one column; large whole numbers stay exact; another process gets the same."""
    n = np.arange(N)
    frame = DataFrame(a=n / 2, b=2**40 + n, c=n % 2 == 1)
    found = datasets.checked(((frame, n % 3), (frame, n % 3)), "")
    assert found.columns.names() == ["a", "b", "c"] and found.columns["b"].most == 2**40 + N - 1
    assert found.x_train["ids"].tolist() == [[2**40 + i] for i in range(N)]
    np.testing.assert_array_equal(found.x_train["numbers"], np.stack([n / 2, n % 2], 1).astype(np.float32))
    model = keras_model.checked(model_of(("c", [1], "bool"), ("a", [], "float32")), found)
    assert model.columns == "the inputs are columns: 'c', 'a'; no input takes 'b'"


def test_data_frames_that_are_sent_to_the_tasks(tmp_path):
    n = np.arange(N)
    given = datasets.checked(((DataFrame(a=n, b=n / 2), n % 3),) * 2, "")
    found = datasets.checked(pickle.loads(pickle.dumps(serialization.SentArrays(given, tmp_path)))(), "")
    assert found.columns.names() == ["a", "b"] and found.x_train.tolist() == given.x_train.tolist()


@pytest.mark.parametrize(
    "train, test, text",
    [
        ({"a": np.ones(N)}, {"b": np.ones(N)}, "the frames have different columns: expected a in all, in this order"),
        ({"a": ["x"] * N}, {"a": ["x"] * N}, "the column 'a' of x_train holds <U1, expected numbers without gaps"),
        ({"a": [np.nan] * N}, {"a": [1.0] * N}, "the column 'a' of x_train holds 12 values that are empty or infinite"),
        ({"a": [1.0] * N}, {"a": [2.0**24 + 1] * N}, "the column 'a' of x_test holds the whole number 16,777,217, which"),
    ],
)
def test_data_frames_that_are_refused(user_error, train, test, text):
    y = np.arange(N) % 3
    with user_error(text):
        datasets.checked(((DataFrame(**train), y), (DataFrame(**test), y)), "d.py:f")
