"""common/data/: data sets, refused data, shards, and the order of batches."""

import random
import socket
import sys
from typing import Any

import keras
import numpy as np
import pytest

from common import tf
from common.data import builtin_data, datasets
from common.data.batches import Batches
from common.data.builtin_data import LEAST_LOSS
from common.data.nested_arrays import arrays_in
from common.data.user_functions import call_user_function


def test_digits():
    digits = datasets.load("digits")
    assert digits.x_train.shape == (1438, 8, 8, 1) and digits.x_test.shape == (359, 8, 8, 1)
    assert digits.y_train.shape == (1438,) and digits.y_test.shape == (359,)
    assert (digits.x_train.dtype, digits.y_train.dtype) == (np.float32, np.int32)
    assert digits.is_classification and digits.num_classes == 10
    for x in digits.x_train, digits.x_test:
        assert x.min() == 0 and x.max() == 1
    for y in digits.y_train, digits.y_test:
        assert set(y) == set(range(10))


@pytest.mark.slow
def test_digits_are_scikit_learns_each_in_one_half():
    from sklearn.datasets import load_digits

    digits, (x, y) = datasets.load("digits"), load_digits(return_X_y=True)
    ours = np.concatenate([digits.x_train, digits.x_test]).reshape(-1, 64) * 16
    ours = np.column_stack([ours, np.concatenate([digits.y_train, digits.y_test])])
    theirs = np.column_stack([x, y])
    assert sorted(ours.tolist()) == sorted(theirs.tolist())
    assert not set(map(bytes, digits.x_train)) & set(map(bytes, digits.x_test))


def test_digits_are_the_same_every_time():
    one, other = datasets.load("digits", seed=0), datasets.load("digits", seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(one, other))


def test_linear():
    linear = datasets.load("linear", seed=3)
    assert [a.shape for a in (*linear.train, *linear.test)] == [(800, 1), (800, 1), (200, 1), (200, 1)]
    assert not linear.is_classification
    x, y = np.concatenate([linear.x_train, linear.x_test]), np.concatenate([linear.y_train, linear.y_test])
    assert -1 <= x.min() < -0.9 and 0.9 < x.max() <= 1
    noise = y - 2 * x - 10
    assert abs(noise.mean()) < 0.02 and 0.08 < noise.std() < 0.12
    assert not np.array_equal(datasets.load("linear", seed=4).x_train, linear.x_train)


def mnist_file(path):
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        f"x_{half}": rng.integers(0, 256, [n, 28, 28], np.uint8) for half, n in (("train", 30), ("test", 10))
    }
    arrays |= {f"y_{half}": (np.arange(n) % 10).astype(np.uint8) for half, n in (("train", 30), ("test", 10))}
    np.savez(path, **arrays)
    return arrays


def test_mnist_comes_through_keras(tmp_path, monkeypatch):
    arrays = mnist_file(tmp_path / "mnist.npz")
    # Keras' own load_data reads the file; only the download is left out
    monkeypatch.setitem(keras.datasets.mnist.load_data.__globals__, "get_file", lambda **_: str(tmp_path / "mnist.npz"))
    mnist = datasets.load("mnist")
    assert mnist.x_train.shape == (30, 28, 28, 1) and mnist.x_test.shape == (10, 28, 28, 1)
    assert (mnist.x_train.dtype, mnist.y_train.dtype) == (np.float32, np.int32)
    np.testing.assert_allclose(mnist.x_test[..., 0], arrays["x_test"] / 255, rtol=1e-6)
    np.testing.assert_array_equal(mnist.y_train, arrays["y_train"])
    assert mnist.num_classes == 10


def test_mnist_without_a_network(monkeypatch, user_error):
    def get_file(**_):
        raise Exception("URL fetch failure on https://storage:\nno route to host")

    monkeypatch.setitem(keras.datasets.mnist.load_data.__globals__, "get_file", get_file)
    with user_error("--data=mnist could not be downloaded", "URL fetch failure", "--data=digits needs no network"):
        datasets.load("mnist")


@pytest.fixture(scope="module")
def mnist1d():
    return datasets.load("mnist1d")


@pytest.mark.slow
def test_mnist1d(mnist1d):
    """Ten kinds of series, about as many of each, of mean 0 and deviation 1 all together."""
    assert (mnist1d.x_train.shape, mnist1d.x_test.shape) == ((4000, 40, 1), (1000, 40, 1))
    assert (mnist1d.x_train.dtype, mnist1d.y_train.dtype) == (np.float32, np.int32) and mnist1d.num_classes == 10
    assert np.bincount(np.concatenate([mnist1d.y_train, mnist1d.y_test])).tolist() == [500] * 10
    x = np.concatenate([mnist1d.x_train, mnist1d.x_test])
    assert abs(x.mean()) < 1e-5 and abs(x.std() - 1) < 1e-5
    assert not set(map(bytes, mnist1d.x_train)) & set(map(bytes, mnist1d.x_test))


@pytest.mark.slow
def test_mnist1d_is_the_same_every_time_and_needs_no_network(mnist1d, monkeypatch):
    """Whatever the seed; the generators of random numbers of this process go on where they were."""

    def connect(*_):
        raise AssertionError("it asks the network")

    monkeypatch.setattr(socket, "socket", connect)
    np.random.seed(5)
    random.seed(5)
    again = datasets.load("mnist1d", seed=1)
    drawn = np.random.random(), random.random()
    np.random.seed(5)
    random.seed(5)
    assert drawn == (np.random.random(), random.random())
    assert all(np.array_equal(a, b) for a, b in zip(again, mnist1d))


def test_mnist1d_is_not_installed(monkeypatch, user_error):
    monkeypatch.setitem(sys.modules, "mnist1d.data", None)
    with user_error("--data=mnist1d comes with the package mnist1d, which is not installed: pip install mnist1d"):
        datasets.load("mnist1d")


def test_quadratic():
    """The loss of each half is its least one, and a quadratic form whose eigenvalues are 1 to 1/1,000."""
    quadratic, best = datasets.load("quadratic"), builtin_data.quadratic_optimum()
    assert [a.shape for a in (*quadratic.train, *quadratic.test)] == [(1000, 40), (1000, 1), (200, 40), (200, 1)]
    values = np.geomspace(1, 1e-3, 40)
    for x, y in ((np.float64(x), np.float64(y)) for x, y in (quadratic.train, quadratic.test)):
        hessian = 2 * x.T @ x / len(x)
        found, vectors = np.linalg.eigh(hessian)
        np.testing.assert_allclose(found[::-1], values, rtol=1e-4)
        np.testing.assert_allclose(np.abs(vectors.T @ best), np.ones([40, 1]), rtol=1e-3)
        np.testing.assert_allclose(np.linalg.lstsq(x, y)[0], best, rtol=1e-3, atol=1e-3)
        w = best + np.random.default_rng(0).normal(size=best.shape)
        loss = np.mean((x @ w - y) ** 2)
        np.testing.assert_allclose(loss, LEAST_LOSS + 0.5 * ((w - best).T @ hessian @ (w - best)).item(), rtol=1e-5)
    assert np.abs(vectors).max(axis=0).max() < 0.9  # no direction is one of the axes
    assert all(np.array_equal(a, b) for a, b in zip(quadratic, datasets.load("quadratic", seed=1)))


def test_text():
    """Windows follow each other, in the training set and then in the test set: no character is in both."""
    text = datasets.load("text")
    assert text.x_train.shape[0] > 9 * text.x_test.shape[0] - 20 and text.x_test.shape[0] > 300
    assert text.x_train.shape[1:] == text.y_test.shape[1:] == (64,)
    assert (text.x_train.dtype, text.y_train.dtype) == (np.uint8, np.int32)
    for x, y in text.train, text.test:
        np.testing.assert_array_equal(y.ravel()[:-1], x.ravel()[1:])
        assert x.max() < len(builtin_data.ALPHABET)
    train, test = (builtin_data.decoded(x.ravel()) for x in (text.x_train, text.x_test))
    seen = {paragraph for paragraph in train.split("\n\n") if len(paragraph) > 100}
    assert len(seen) > 500 and not seen & set(test.split("\n\n"))


def test_next_characters():
    (x, y), (x_test, y_test) = builtin_data.next_characters("abcdefghij" * 3, length=2)
    assert [builtin_data.decoded(row) for row in x[:2]] == ["ab", "cd"]
    assert [builtin_data.decoded(row) for row in y[:2]] == ["bc", "de"]
    assert len(x) == 13
    assert ([builtin_data.decoded(row) for row in x_test], [builtin_data.decoded(row) for row in y_test]) == (["hi"], ["ij"])


def test_characters_have_places_in_the_alphabet():
    assert len(builtin_data.ALPHABET) == len(set(builtin_data.ALPHABET)) == 96
    np.testing.assert_array_equal(builtin_data.encoded(builtin_data.ALPHABET), np.arange(96, dtype=np.uint8))
    assert builtin_data.decoded(builtin_data.encoded(builtin_data.ALPHABET)) == builtin_data.ALPHABET
    assert builtin_data.decoded(builtin_data.encoded("It’s “a”\t… é\r")) == 'It\'s "a"    ... ??'


@pytest.mark.parametrize("spec", ["digit", "", "data.py"])
def test_no_such_data(user_error, spec):
    names = "digits, linear, mnist, mnist1d, quadratic, text"
    with user_error(f"--data must be one of {names}, FILE.py:FUNCTION, or files as 'DIR/*.csv', not {spec!r}"):
        datasets.load(spec)


# --- What training can use ---------------------------------------------------------------------------------------------


def arrays(n_train=6, n_test=3):
    """Good data, to be spoilt: ((x_train, y_train), (x_test, y_test)), classes."""
    x, y = np.arange(2.0 * (n_train + n_test)).reshape(-1, 2), np.arange(n_train + n_test) % 3
    return (x[:n_train], y[:n_train]), (x[n_train:], y[n_train:])


def spoilt(**parts):
    (x_train, y_train), (x_test, y_test) = arrays()
    good = dict(x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test) | parts
    return (good["x_train"], good["y_train"]), (good["x_test"], good["y_test"])


def test_types_that_training_uses():
    good = datasets.checked(arrays(), "mine")
    assert (good.x_train.dtype, good.x_test.dtype) == (np.float32, np.float32)
    assert (good.y_train.dtype, good.y_test.dtype) == (np.int32, np.int32)
    np.testing.assert_array_equal(good.x_train, arrays()[0][0])
    np.testing.assert_array_equal(good.y_test, arrays()[1][1])


@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.uint32, bool])
def test_labels_of_any_whole_number(kind):
    good = datasets.checked(spoilt(y_train=np.array([0, 1, 0, 1, 0, 1], kind), y_test=np.array([1, 0, 1], kind)), "mine")
    assert good.y_train.dtype == np.int32 and good.y_train.tolist() == [0, 1, 0, 1, 0, 1]
    assert good.is_classification and good.num_classes == 2


def test_labels_in_one_column_stay_there():
    """A loss of the user's own may want them so."""
    good = datasets.checked(spoilt(y_train=arrays()[0][1][:, None], y_test=arrays()[1][1][:, None]), "mine")
    assert good.y_train.shape == (6, 1) and good.num_classes == 3


def test_weights_that_are_none():
    """As `fit` takes them."""
    train, test = arrays()
    assert datasets.checked(((*train, None), (*test, None)), "mine").w_train is None


@pytest.mark.parametrize(
    "x, text", [((), "x_train holds no arrays"), ({1: np.zeros([6, 2])}, "x_train has the key 1: expected the name of")]
)
def test_arrays_without_arrays_or_names(user_error, x, text):
    with user_error(f"--data=mine: {text}"):
        datasets.checked(((x, np.zeros(6)), (x, np.zeros(6))), "mine")


def test_key_with_a_colon():
    """It once changed what the array was taken for."""
    x, y = {"w: x": np.zeros([6, 2], np.uint8)}, np.arange(6)
    assert datasets.checked(((x, y), (x, y)), "mine").x_train["w: x"].dtype == np.uint8


def test_classes_that_only_the_test_has():
    assert datasets.checked(spoilt(y_test=[0, 7, 1]), "mine").num_classes == 8


@pytest.mark.parametrize(
    "kind, kept", [(np.uint8, np.uint8), (bool, np.float32), (np.float32, np.float32), (float, np.float32)]
)
def test_types_of_samples(kind, kept):
    """Bytes stay bytes, a quarter of their size as float32; nothing is copied that has its type already."""
    x = np.array([[0, 1], [1, 1], [0, 0]], kind)
    good = datasets.checked(spoilt(x_train=np.concatenate([x, x]), x_test=x), "mine")
    assert good.x_train.dtype == kept and good.x_test.tolist() == x.tolist()
    assert np.shares_memory(good.x_test, x) == (kind == kept)


def test_whole_numbers_stay_whole():
    """They may be what an Embedding layer looks up."""
    x = np.array([[1, 2], [3, 4], [5, 6]])
    assert datasets.checked(spoilt(x_train=np.concatenate([x, x]), x_test=x), "mine").x_train.dtype.kind == "i"


def test_lists_will_do():
    good = datasets.checked((([[1.0], [2.0]], [0, 1]), ([[3.0]], [1])), "mine")
    assert good.x_train.shape == (2, 1) and good.y_test.tolist() == [1]


def test_labels_of_a_regression():
    y = np.arange(6.0).reshape(6, 1)
    good = datasets.checked(spoilt(y_train=y, y_test=y[:3]), "mine")
    assert not good.is_classification
    assert good.y_train.dtype == np.float32 and good.y_train.shape == (6, 1)


def several(n, spoil=lambda part: part):
    """Two inputs, one of them bytes, two arrays of labels of any shape, and weights, for n samples."""
    x = {"image": np.zeros([n, 4, 4], np.uint8), "text": np.arange(n * 3).reshape(n, 3)}
    return spoil((x, [np.arange(n * 5).reshape(n, 5) - 7, np.ones([n, 1])], np.arange(n) % 2))


def test_several_inputs_and_outputs_and_weights():
    good = datasets.checked((several(6), several(4)), "mine")
    assert [array.dtype for array in arrays_in(good.train)] == [np.uint8, np.int64, np.int32, np.float32, np.float32]
    assert (good.num_samples, good.is_classification) == (6, False)
    np.testing.assert_array_equal(good.x_test["text"], several(4)[0]["text"])
    np.testing.assert_array_equal(good.y_train[0], several(6)[1][0])
    assert good.w_train.tolist() == [0, 1, 0, 1, 0, 1]
    x, y, w = datasets.shard(good, 1, 2)
    assert x["text"].tolist() == several(6)[0]["text"][1::2].tolist() and len(y[1]) == 3 and w.tolist() == [1, 1, 1]
    training, held = datasets.hold_out(good, 0.5)
    rows = np.concatenate([training.x_train["text"], held.x_test["text"]])
    assert sorted(rows[:, 0].tolist()) == list(range(0, 18, 3)) and len(held.w_test) == 3


@pytest.mark.parametrize(
    "spoil, text",
    [
        (
            lambda s: ({**s[0], "text": s[0]["text"][1:]}, *s[1:]),
            "['image'] has 6 samples, x_train['text'] has 5 samples",
        ),
        (lambda s: (s[0], s[1], s[2][1:]), "x_train['image'] has 6 samples, w_train has 5 weights"),
        (lambda s: (s[0], s[1], s[2] - 1.0), "w_train holds negative weights"),
        (lambda s: ({**s[0], "text": list("abcdef")}, *s[1:]), "x_train['text'] holds <U1, expected numbers"),
        (lambda s: (*s, 3), "must give ((x_train, y_train), (x_test, y_test))"),
        (lambda s: (list(s[0]["text"]), *s[1:]), "x_train[0] has 3 samples, y_train[0] has 6 labels; np.stack makes one array"),
    ],
)
def test_several_that_do_not_fit(user_error, spoil, text):
    with user_error("--data=mine", text):
        datasets.checked((several(6, spoil), several(4)), "mine")


def test_parts_that_differ_between_training_and_test(user_error):
    with user_error("--data=mine: x_train 2 and x_test 1 arrays, with different names or numbers; expected the same in both"):
        datasets.checked((several(6), several(4, lambda s: ({"text": s[0]["text"]}, *s[1:]))), "mine")


NUMPY_ARRAYS = "must give ((x_train, y_train), (x_test, y_test)) as NumPy arrays"


@pytest.mark.parametrize(
    "given", [None, 3, (), (1, 2, 3), arrays()[0], (*arrays(), *arrays()), (arrays()[0], None)]
)
def test_what_is_no_data(user_error, given):
    with user_error(f"--data=mine {NUMPY_ARRAYS}"):
        datasets.checked(given, "mine")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, "it gave None: does the function return them?"),
        ((n for n in range(9)), "it gave a generator: np.stack(list(...)) makes an array, tf.data.Dataset.from_generator a"),
        (((n for n in range(9)), arrays()[1]), "it gave a generator"),
        ([([[1], [2, 3]], [0, 1])] * 2, "it gave lists of unequal lengths: keras.utils.pad_sequences makes an array of them"),
    ],
)
def test_what_was_given_instead_is_told(user_error, given, text):
    with user_error(f"--data=mine {NUMPY_ARRAYS}, and weights as a third of each pair, if samples have some; {text}"):
        datasets.checked(given, "mine")


def with_value(value):
    x = arrays()[0][0].copy()
    x[4, 1] = value
    return x


@pytest.mark.parametrize(
    "parts, texts",
    [
        (dict(x_train=with_value(np.nan)), ["x_train holds 1 values that are NaN or infinite"]),
        (dict(x_train=with_value(2**24 + 1)), ["x_train holds the whole number 16,777,217, which float32 rounds to"]),
        (dict(x_train=with_value(-np.inf)), ["x_train holds 1 values that are NaN or infinite"]),
        (dict(x_train=with_value(1e300)), ["x_train"]),  # infinite as the float32 that training uses
        (dict(x_test=np.full([3, 2], np.nan)), ["x_test holds 6 values"]),
        (dict(y_train=np.full(6, np.nan), y_test=np.zeros(3)), ["y_train holds 6 values"]),
        (dict(x_train=np.zeros([0, 2]), y_train=np.zeros(0, int)), ["x_train has no samples"]),
        (dict(x_train=np.float32(1)), ["x_train has no samples"]),
        (dict(x_test=np.zeros([0, 2]), y_test=np.zeros(0, int)), ["x_test has no samples"]),
        (dict(y_test=[]), ["y_test has no samples"]),
        (dict(y_train=[0, 1, 2, 0, 1]), ["x_train has 6 samples, y_train has 5 labels"]),
        (dict(y_test=[0, 1, 2, 0]), ["x_test has 3 samples, y_test has 4 labels"]),
        (
            dict(y_train=np.eye(3, dtype=int)[[0, 1, 2, 0, 1, 2]]),
            ["y_train holds int32 of shape (3,), y_test int32"],
        ),
        (dict(y_train=[0, 1, 2**32 + 1, 2, 0, 1]), ["y_train"]),  # 1 as the int32 that training uses
        (dict(y_train=list("abcabc")), ["y_train holds <U1, expected numbers"]),
        (dict(x_train=[[1], [1, 2], [], [1], [1], [1]]), [NUMPY_ARRAYS]),
        (dict(x_train=np.array([object()] * 6)), ["x_train holds object, expected numbers"]),
        (dict(x_train=np.ones([6, 2], complex)), ["x_train holds complex128, expected numbers"]),
        (dict(x_test=np.ones([3, 3])), ["x_train holds float32 of shape (2,), x_test float32 of shape (3,)"]),
        (dict(x_test=np.ones([3, 2], int)), ["x_train holds float32", "x_test int64", "expected the same"]),
        (dict(y_test=np.ones(3)), ["y_train holds int32", "y_test float32", "expected the same"]),
        (dict(y_train=np.ones([6, 1]), y_test=np.ones(3)), ["y_train holds float32 of shape (1,), y_test float32 of shape ()"]),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_data_that_nothing_can_be_trained_on(user_error, parts, texts):
    with user_error("--data=mine", *texts):
        datasets.checked(spoilt(**parts), "mine")


# --- Functions of the user's -------------------------------------------------------------------------------------------


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """A function that writes a Python file of the user's and returns FILE.py:FUNCTION. Forgets all imports at the end."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before = set(sys.modules)

    def user_file(text, function="load", name="mine.py"):
        (tmp_path / name).write_text(text)
        return f"{tmp_path / name}:{function}"

    yield user_file
    for name in set(sys.modules) - before:
        del sys.modules[name]


GOOD = """
import numpy as np
def load():
    return (np.ones([4, 2]), np.array([0, 1, 0, 1])), (np.ones([2, 2]), np.array([0, 1]))
"""


def test_data_of_the_users_own(user_file):
    assert datasets.load(user_file(GOOD)).x_train.shape == (4, 2)


def test_path_may_be_relative(user_file, tmp_path, monkeypatch):
    user_file(GOOD)
    monkeypatch.chdir(tmp_path)
    assert datasets.load("mine.py:load").x_test.shape == (2, 2)


def test_what_the_user_gives_is_checked(user_file, user_error):
    spec = user_file(GOOD.replace("np.ones([4, 2])", "np.full([4, 2], np.nan)"))
    with user_error(f"--data={spec}: x_train holds 8 values that are NaN or infinite"):
        datasets.load(spec)


def test_file_beside_it_can_be_imported(user_file):
    user_file("value = 5", name="beside_mine.py")
    assert call_user_function("--data", user_file("import beside_mine\ndef load(): return beside_mine.value")) == 5


def test_file_is_imported_once(user_file, tmp_path):
    spec = user_file("import pathlib\nwith open(pathlib.Path(__file__).with_name('log'), 'a') as log: log.write('x')\n" + GOOD)
    datasets.load(spec)
    datasets.load(spec)
    assert (tmp_path / "log").read_text() == "x"


def test_file_with_a_dataclass(user_file):
    """It looks its module up in `sys.modules` while that is imported."""
    spec = user_file(
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass C:\n    n: int = 7\n"
        "def load(): return C().n"
    )
    assert call_user_function("--data", spec) == 7


def test_file_that_has_the_name_of_a_module(user_file):
    assert call_user_function("--data", user_file("def load(): return 'mine'", name="json.py")) == "mine"


def test_missing_file(user_error, tmp_path):
    with user_error(f"--data={tmp_path}/no.py:load: there is no file {tmp_path}/no.py"):
        datasets.load(f"{tmp_path}/no.py:load")


def test_folder_is_no_file(user_error, tmp_path):
    with user_error("there is no file"):
        datasets.load(f"{tmp_path}:load")


@pytest.mark.parametrize("function", ["nope", "", "number"])
def test_missing_function(user_error, user_file, function):
    with user_error("mine.py has no function " + repr(function)):
        datasets.load(user_file("number = 3\n" + GOOD, function))


@pytest.mark.parametrize(
    "text, texts",
    [
        ("def load(:", ["cannot be imported", "SyntaxError"]),
        ("import no_such_module", ["cannot be imported", "ModuleNotFoundError: No module named 'no_such_module'"]),
        ("def load():\n    raise ValueError('first\\nsecond')", ["load() raised ValueError: first"]),
        ("def load():\n    raise KeyError", ["load() raised KeyError"]),
        ("def load(path): pass", ["load() raised TypeError"]),
        ("def load(): pass\nimport sys\nsys.exit(0)", ["cannot be imported", "SystemExit"]),  # a script that runs when imported
        ("import sys\ndef load(): sys.exit(0)", ["load() raised SystemExit"]),
    ],
)
def test_function_or_file_that_fails(user_error, user_file, text, texts):
    with user_error("mine.py", *texts):
        datasets.load(user_file(text))


def test_file_that_is_not_python(user_error, user_file):
    with user_error("mine.txt is not a Python file"):
        datasets.load(user_file("text", name="mine.txt"))


# --- Shards and batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_shards_are_disjoint_and_complete(count):
    all_data = datasets.checked(arrays(), "mine")
    shards = [datasets.shard(all_data, i, count) for i in range(count)]
    assert {len(x) for x, _ in shards} <= {6 // count, 6 // count + 1}
    together = [(*x, y) for xs, ys in shards for x, y in zip(xs, ys)]
    assert sorted(together) == sorted((*x, y) for x, y in zip(all_data.x_train, all_data.y_train))
    assert len(together) == 6


def test_shards_are_equal_to_a_sample():
    all_data = datasets.checked(arrays(n_train=11), "mine")
    assert sorted(len(datasets.shard(all_data, i, 3)[0]) for i in range(3)) == [3, 4, 4]


def test_more_workers_than_samples(user_error):
    with user_error("6 training samples are too few for 7 workers"):
        datasets.shard(datasets.checked(arrays(), "mine"), 0, 7)


def draw(initialized, n, batch_size, seed, calls, window=1):
    """Returns the indices of `calls` calls, one after the other, as one array [calls, window, batch_size]."""
    with tf.Graph().as_default():
        batches = Batches(np.arange(n, dtype=np.float32)[:, None], np.arange(n), batch_size, seed)
        indices = batches.next(window)
        session = initialized(batches)
        return np.array([session.run(indices) for _ in range(calls)])


@pytest.mark.parametrize(
    "n, batch_size, window",
    [(12, 4, 1), (10, 4, 1), (7, 3, 2), (5, 5, 3), (3, 8, 1), (2, 5, 3), (1, 1, 1), (1, 4, 2), (1000, 32, 1)],
)
def test_every_epoch_has_every_sample_once(initialized, n, batch_size, window):
    """Also when a batch crosses the end of an epoch, or holds several."""
    calls = -(-4 * n // (batch_size * window))
    drawn = draw(initialized, n, batch_size, 0, calls, window)
    assert drawn.shape == (calls, window, batch_size)
    epochs = drawn.ravel()[: 4 * n].reshape(4, n)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(n), [4, 1]))


@pytest.mark.parametrize("seed", [0, 1, 7])
@pytest.mark.parametrize("n", [10, 100, 719])
def test_every_epoch_is_shuffled_anew(initialized, n, seed):
    """The first one, too. Of a random order about one sample is where it was, whatever their number, and 7 in 1 of 100,000."""
    epochs = draw(initialized, n, n, seed, calls=4)[:, 0]
    orders = [np.arange(n), *epochs]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.sum(one == other) < 7


def test_windows_do_not_change_the_order(initialized):
    steps = draw(initialized, 9, 2, 5, calls=12)
    windows = draw(initialized, 9, 2, 5, calls=4, window=3)
    np.testing.assert_array_equal(steps.ravel(), windows.ravel())


def test_seed_gives_the_order(initialized):
    one, same, other = (draw(initialized, 20, 4, seed, 5).ravel().tolist() for seed in (3, 3, 4))
    assert one == same
    assert one != other


def test_largest_seed(initialized):
    """A worker's is the run's plus its index."""
    assert sorted(draw(initialized, 6, 6, 2**32 - 1 + 100, 1).ravel()) == list(range(6))


def test_samples_are_those_of_the_indices(graph, initialized):
    rng = np.random.default_rng(0)
    x, y = rng.random([5, 2, 3]).astype(np.float32), rng.integers(0, 9, 5).astype(np.int32)
    batches = Batches(x, y, 4, 0)
    indices = batches.next(2)
    drawn, (x_1, y_1) = initialized(batches).run([indices, batches.samples(indices[1])])
    np.testing.assert_array_equal(x_1, x[drawn[1]])
    np.testing.assert_array_equal(y_1, y[drawn[1]])


def test_samples_are_not_part_of_the_graph(graph):
    Batches(np.zeros([1000, 100], np.float32), np.zeros(1000, np.int32), 4, 0)
    assert graph.as_graph_def().ByteSize() < 10_000


def checked(x=None, y=None):
    """`data.checked` of the same samples twice; 20 of 3 numbers in 2 classes, unless something else is given."""
    x = np.random.default_rng(0).random([20, 3]) if x is None else x
    y = np.arange(20) % 2 if y is None else y
    return datasets.checked(((x, y), (x, y)), "d.py:f")


def test_masked_values_are_refused(user_error):
    """NumPy forgets the mask when it makes a plain array of them."""
    masked = np.ma.masked_greater(np.random.default_rng(0).random([20, 3]), 0.5)
    for x in masked, list(masked):
        with user_error("--data=d.py:f: x_train has masked values; fill them (.filled), or leave their samples out"):
            checked(x)
    with user_error("y_train has masked values"):
        checked(y=np.ma.masked_equal(np.arange(20) % 2, 1))
    assert type(checked(np.ma.masked_greater(masked, 2).filled(0)).x_train) is np.ndarray
    assert type(checked(np.ma.array(np.ones([20, 3]))).x_train) is np.ndarray  # nothing is masked


@pytest.mark.parametrize("shape", [(20, 0), (20, 4, 0, 3)])
def test_samples_without_numbers_are_refused(user_error, shape):
    with user_error(f"--data=d.py:f: x_train has shape {shape}: its samples hold no numbers"):
        checked(np.zeros(shape))
    with user_error(f"y_train has shape {shape}: its samples hold no numbers"):
        checked(y=np.zeros(shape))


@pytest.mark.parametrize("kind", ["complex64", "object", "U3", "M8[s]", [("a", "f4")]])
def test_values_that_are_no_numbers_are_refused(user_error, kind):
    with user_error("--data=d.py:f: x_train holds ", "expected numbers"):
        checked(np.zeros([20, 3], kind))


def test_what_cannot_become_an_array_is_refused(user_error):
    class Lazy:
        def __array__(self, *args, **kwargs):
            raise RuntimeError("call detach() first")

    with user_error("--data=d.py:f must give ((x_train, y_train), (x_test, y_test)) as NumPy arrays"):
        checked(Lazy())


def test_batch_larger_than_memory_is_refused(user_error, monkeypatch):
    monkeypatch.setattr(datasets.limits, "memory", lambda: 16 * 10**9)
    x, y = np.zeros([5, 8, 8, 1], np.float32), np.zeros(5, np.int32)  # 260 bytes a sample, and 16 for its index
    datasets.check_batch(x, y, 57_000_000)  # more samples than there are: a batch may take several epochs
    with user_error("--batch_size=58000000 takes at least 16.0 GB of memory, but the machine has 16.0 GB: choose a smaller"):
        datasets.check_batch(x, y, 58_000_000)
    with user_error("--batch_size=29000000 in 2 workers takes at least 16.0 GB of memory"):
        datasets.check_batch(x, y, 29_000_000, num_workers=2)
    with user_error("--batch_size=9223372036854775807 takes at least 2,545,650.7 PB of memory"):
        datasets.check_batch(x, y, 2**63 - 1)
    datasets.check_batch(x, y, 32, 30_000_000)
    with user_error("--batch_size=32 with a window of 2,147,483,647 steps takes at least 1.1 TB of memory"):
        datasets.check_batch(x, y, 32, 2**31 - 1)
    with tf.Graph().as_default(), user_error("--batch_size=10000000000 takes at least 2.8 TB of memory"):
        Batches(x, y, 10**10, 0).next(1)
