"""Built-in data sets of `--data`: digits, points of a line, least squares, and text as characters."""

import importlib.util
import random
from pathlib import Path

import numpy as np

from common.core import UserError
from common.data.user_functions import one_line


def digits():
    """The 1,797 handwritten digits of scikit-learn: images [n, 8, 8, 1] in 0..1; every fifth, after shuffling, is for the test.

    They are read from scikit-learn's file; importing scikit-learn would cost every task a second of processor time.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise UserError("--data=digits comes with scikit-learn, which is not installed: pip install scikit-learn")
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    table = np.loadtxt(file, np.float32, delimiter=",")
    table = table[np.random.default_rng(0).permutation(len(table))]
    x, y = (table[:, :64] / 16).reshape(-1, 8, 8, 1), table[:, 64].astype(np.int32)
    test = len(x) // 5
    return (x[test:], y[test:]), (x[:test], y[:test])


def linear(seed=0):
    """1,000 points of y = 2x + 10 + noise, x in -1..1, noise of standard deviation 0.1; a fifth of them for the test."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, [1000, 1]).astype(np.float32)
    y = (2 * x + 10 + rng.normal(0, 0.1, x.shape)).astype(np.float32)
    return (x[200:], y[200:]), (x[:200], y[:200])


def mnist():
    """MNIST through Keras, downloaded once to ~/.keras/datasets: images [n, 28, 28, 1] in 0..1."""
    import keras

    try:
        (x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
    except Exception as error:
        raise UserError(f"--data=mnist could not be downloaded: {one_line(error)}; --data=digits needs no network") from None
    return tuple(
        ((x[..., None] / 255).astype(np.float32), y.astype(np.int32)) for x, y in ((x_train, y_train), (x_test, y_test))
    )


def mnist1d():
    """MNIST-1D, whose generator is a package: series [n, 40, 1] of ten kinds, 4,000 for the training and 1,000 for the test.

    Ten templates, moved, stretched, sheared and with noise, as the authors' `make_dataset` does it with its own seed (Greydanus
    and Kobak 2020, https://arxiv.org/abs/2011.14439). Nothing is downloaded. It takes a second of processor time.
    """
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ImportError:
        raise UserError("--data=mnist1d comes with the package mnist1d, which is not installed: pip install mnist1d") from None
    states = random.getstate(), np.random.get_state()
    try:
        made = make_dataset(get_dataset_args())  # seeds the generators of this process
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    return (made["x"][..., None], made["y"]), (made["x_test"][..., None], made["y_test"])


LEAST_LOSS = 0.01  # minimum of the loss of `quadratic`, on training and test set
LARGEST, CONDITION = 1.0, 1000.0  # largest eigenvalue and condition number of its Hessian
_PARAMETERS = 40


def quadratic():
    """Linear least squares with a known solution: x [n, 40], y [n, 1], n = 1,000 for the training and 200 for the test.

    For `--model=dense`, y = x w without a bias, the squared error of each half is exactly

        LEAST_LOSS + ½ (w − w*)ᵀ H (w − w*),

    with w* of `quadratic_optimum`. The eigenvalues of H are spread evenly on a logarithmic scale from 1 to 1/1,000, in
    directions that are none of the axes; w* has a component of 1 in each. It is the same for all seeds.
    """
    values = LARGEST * CONDITION ** -np.linspace(0, 1, _PARAMETERS)
    rng = np.random.default_rng(1)

    def half(n):
        # The columns of q and the noise are orthogonal to each other, and have length 1. H = 2 xᵀ x / n.
        q = np.linalg.qr(rng.normal(size=[n, _PARAMETERS + 1]))[0]
        x = np.sqrt(n / 2) * q[:, :-1] * np.sqrt(values) @ _directions().T
        return x, x @ quadratic_optimum() + np.sqrt(n * LEAST_LOSS) * q[:, -1:]

    return half(1000), half(200)


def quadratic_optimum():
    """Returns w*, the best parameters of `quadratic`, an array `[40, 1]`."""
    return _directions().sum(axis=1, keepdims=True)


def _directions():
    """Returns the eigenvectors of the Hessian of `quadratic`, the columns of an array `[40, 40]`, that of the largest first."""
    return np.linalg.qr(np.random.default_rng(0).normal(size=[_PARAMETERS, _PARAMETERS]))[0]


ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # of the language model: 96 characters, encoded by their index
_AS_ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\t": "    "})


def encoded(text):
    """Returns the indices in `ALPHABET` of a text's characters, uint8 `[n]`; unknown ones become question marks."""
    codes = np.frombuffer(text.translate(_AS_ASCII).encode("ascii", "replace"), np.uint8)
    return np.where(codes == ord("\n"), 0, np.where((codes < 32) | (codes > 126), ord("?"), codes) - 31).astype(np.uint8)


def decoded(places):
    """Returns the text for these indices in `ALPHABET`, an array `[n]` of whole numbers."""
    return "".join(ALPHABET[place] for place in places)


def next_characters(text, length=64):
    """Returns training and test set of a language model, in consecutive windows: x, y `[n, length]` each.

    x are the characters of a window, y their successors, as indices in `ALPHABET`. The last tenth of the text, a string of at
    least 10 * length + 10 characters, is the test set.
    """
    codes = encoded(text)
    test = len(codes) - len(codes) // 10

    def windows(codes):
        end = (len(codes) - 1) // length * length
        return codes[:end].reshape(-1, length), codes[1 : end + 1].reshape(-1, length)

    return windows(codes[:test]), windows(codes[test:])


def text():
    """`next_characters` of Python's own help, `pydoc_data.topics`: English, about 370,000 characters, in every Python.

    Repeated paragraphs are removed, as otherwise a tenth of the test set would also be in the training set. The
    text differs a little between versions of Python.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("--data=text is Python's own help, but this Python lacks pydoc_data") from None
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return next_characters("\n\n".join(dict.fromkeys(paragraphs)))
