"""Data sets as NumPy arrays: built-in ones and a user's, their checks, and their shards."""

import functools
import gzip
import importlib.util
import inspect
import mmap
import os
import pickle
import random
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.core import UserError, limits, task_status
from common.data.mapped_rows import LARGE, Rows, chunks, is_mapped


class Data(NamedTuple):
    """A training and a test set: samples, labels, and the weights of the samples, or None if all count the same.

    Each is an array `[n, ...]`, or arrays in a tuple or dict, for a model of several inputs or outputs. Labels are int32
    (classes) or float32. A large memory-mapped array is `common.data.Rows`.
    """

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any
    w_train: Any = None
    w_test: Any = None

    @property
    def train(self):
        """(x, y) of the training set, or (x, y, weights)."""
        return (self.x_train, self.y_train) if self.w_train is None else (self.x_train, self.y_train, self.w_train)

    @property
    def test(self):
        """(x, y) of the test set, or (x, y, weights)."""
        return (self.x_test, self.y_test) if self.w_test is None else (self.x_test, self.y_test, self.w_test)

    @property
    def num_samples(self):
        """The number of training samples."""
        return len(arrays_in(self.x_train)[0])

    @property
    def is_classification(self):
        return not isinstance(self.y_train, (dict, tuple)) and np.issubdtype(self.y_train.dtype, np.integer)

    @property
    def num_classes(self):
        return int(max(self.y_train.max(), self.y_test.max())) + 1


def mapped(function, part):
    """Applies the function to each array of samples, labels or weights; returns the results in the same structure."""
    if isinstance(part, dict):
        return {key: mapped(function, value) for key, value in _items(part)}
    return tuple(mapped(function, value) for value in part) if isinstance(part, tuple) else function(part)


def _items(part):
    """Returns (key, value) pairs of a dict in alphabetical order, as `tf.nest` and Keras flatten it, or of a tuple."""
    return sorted(part.items()) if isinstance(part, dict) else enumerate(part)


def arrays_in(part):
    """Returns a list of the arrays of samples, labels or weights: one array, or several in a tuple or dict.

    The arrays of a dict come in the order of its sorted keys, as from `tf.nest.flatten`.
    """
    return list(_named(part, "").values())


def _named(part, name):
    """Returns the same arrays by name, as {"x_train['left']": array}."""
    if isinstance(part, (dict, tuple)):
        return {key: array for k, value in _items(part) for key, array in _named(value, f"{name}[{k!r}]").items()}
    return {name: part}


def load(spec, seed=0):
    """Returns the `Data` that `--data=spec` names: digits, linear, mnist, mnist1d, quadratic, text or FILE.py:FUNCTION.

    A task of a launcher gets the data that the input check has shared with all tasks, if any: see `share`.

    Raises:
      UserError: if there is no such data or no training could use it.
    """
    if (kept := shared()) is not None:
        return kept
    loaders = {"digits": digits, "linear": lambda: linear(seed), "mnist": mnist, "mnist1d": mnist1d}
    loaders |= {"quadratic": quadratic, "text": text}
    if spec in loaders:
        arrays = loaders[spec]()
    elif ":" in spec:
        arrays = call_user_function("--data", spec)
    else:
        raise UserError(f"--data must be one of {', '.join(loaders)}, FILE.py:FUNCTION, or files as 'DIR/*.csv', not {spec!r}")
    return checked(arrays, spec)


def digits():
    """The 1,797 handwritten digits of scikit-learn: images [n, 8, 8, 1] in 0..1; every fifth, after shuffling, is for the test.

    They are read from scikit-learn's file; importing scikit-learn would cost every task a second of processor time.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise UserError("--data=digits comes with scikit-learn, which is not installed: pip install scikit-learn")
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    with gzip.open(file, "rt") as lines:
        table = np.array([line.split(",") for line in lines], np.float32)
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
    """MNIST through Keras, which downloads it once to ~/.keras/datasets: images [n, 28, 28, 1] in 0..1."""
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

    x are the characters of a window, y their successors, as indices in `ALPHABET`. The last tenth of the text is the test set.

    Args:
      text: a string, of at least 10 * length + 10 characters.
      length: characters in a window.
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


def checked(arrays, spec):
    """Returns the arrays from `--data=spec` as `Data`, in the types of training, or raises `UserError`.

    Args:
      arrays: `((x_train, y_train), (x_test, y_test))`, each pair with weights of the samples as a third, if they have some.
    """
    parts: dict[str, Any] = {}
    if isinstance(arrays, (tuple, list)) and any(hasattr(part, "element_spec") for part in arrays):
        raise UserError(f"--data={spec} gives tf.data.Datasets, but this program trains with arrays only")
    try:
        for half, given in zip(("train", "test"), arrays, strict=True):
            x, y, *weights = given if len(given) != 3 or given[2] is not None else given[:2]
            for name, part in zip(("x", "y", "w"), (x, y, *weights), strict=False if len(weights) < 2 else True):
                parts[f"{name}_{half}"] = _as_arrays(part, f"--data={spec}: {name}_{half}")
    except UserError:
        raise
    except Exception:  # converting an object that is no array may raise any error
        expected = "((x_train, y_train), (x_test, y_test)) as NumPy arrays"
        weights = "and weights as a third of each pair, if samples have some"
        raise UserError(f"--data={spec} must give {expected}, {weights}{_given_instead(arrays)}") from None
    for name, part in parts.items():
        parts[name] = _map_named(functools.partial(_in_types_of_training, name[0]), part, f"--data={spec}: {name}")
    for half in ("train", "test"):
        arrays_of_half = {k: v for name in "xyw" for k, v in _named(parts.get(f"{name}_{half}", ()), f"{name}_{half}").items()}
        for name in ("x", "y"):
            if not arrays_in(parts[f"{name}_{half}"]):
                raise UserError(f"--data={spec}: {name}_{half} holds no arrays")
        (first, samples), *others = arrays_of_half.items()
        for name, array in others:
            if len(array) != len(samples):
                what = {"x": "samples", "y": "labels", "w": "weights"}
                hint = "; np.stack makes one array of a list of samples" if "[0]" in first + name else ""
                raise UserError(
                    f"--data={spec}: {first} has {len(samples)} samples, {name} has {len(array)} {what[name[0]]}{hint}"
                )
        if any((chunk < 0).any() for w in arrays_in(parts.get(f"w_{half}", ())) for chunk in chunks(w)):
            raise UserError(f"--data={spec}: w_{half} holds negative weights")
    for axis in "xyw":
        train, test = (_named(parts[name], axis) if (name := f"{axis}_{half}") in parts else None for half in ("train", "test"))
        if train is None or test is None:  # only weights may be missing
            continue
        if train.keys() != test.keys():
            names = " and ".join(f"{axis}_{half} {len(arrays)}" for half, arrays in (("train", train), ("test", test)))
            raise UserError(f"--data={spec}: {names} arrays, with different names or numbers; expected the same in both")
        for key, array in train.items():
            other = test[key]
            if array.shape[1:] != other.shape[1:] or array.dtype != other.dtype:
                raise UserError(
                    f"--data={spec}: {axis}_train{key[1:]} holds {array.dtype} of shape {array.shape[1:]}, "
                    f"{axis}_test{key[1:]} {other.dtype} of shape {other.shape[1:]}; expected the same"
                )
    return Data(**parts)


def _given_instead(given):
    """Returns the end of an error line: the kind of object given in place of two pairs of arrays, and the remedy, or ""."""
    pairs = list(given) if isinstance(given, (tuple, list)) else []
    parts = [part for pair in pairs if isinstance(pair, (tuple, list)) for part in pair]
    if given is None:
        return "; it gave None: does the function return them?"
    for part in (given, *pairs, *parts):
        if any(kind.__name__ == "PyDataset" for kind in type(part).__mro__):
            return "; it gave a keras.utils.PyDataset: concatenate its batches, or make a tf.data.Dataset of single samples"
        if inspect.isgenerator(part):
            return "; it gave a generator: np.stack(list(...)) makes an array, tf.data.Dataset.from_generator a dataset"
    if len(pairs) == 3 and all(isinstance(pair, (tuple, list)) and len(pair) in (2, 3) for pair in pairs):
        return "; it gave three pairs: leave out the validation pair; --validation=0.1 holds out a tenth instead"
    for part in parts:
        if isinstance(part, list) and len({len(row) for row in part if isinstance(row, (list, tuple))}) > 1:
            return "; it gave lists of unequal lengths: keras.utils.pad_sequences makes an array of them"
    return ""


def _as_arrays(part, name):
    """Returns a part of the data as an array, or as arrays in tuples and dicts; a list of arrays is a tuple, as for `fit`."""
    if isinstance(part, Rows):
        return part
    if _is_masked(part):  # NumPy would drop the mask, and use the masked values
        raise UserError(f"{name} has masked values; fill them (.filled), or leave their samples out")
    if isinstance(part, dict):
        if other := [key for key in part if not isinstance(key, str)]:
            raise UserError(f"{name} has the key {other[0]!r}: expected the name of an input or output of the model")
        return {key: _as_arrays(value, f"{name}[{key!r}]") for key, value in _items(part)}
    if isinstance(part, tuple) or (isinstance(part, list) and part and all(hasattr(value, "shape") for value in part)):
        if all(hasattr(value, "shape") and len(value.shape) > 0 for value in part) or any(isinstance(v, dict) for v in part):
            return tuple(_as_arrays(value, f"{name}[{i}]") for i, value in enumerate(part))
    return np.asarray(part)


def _map_named(function, part, name):
    if isinstance(part, (dict, tuple)):
        found = {key: _map_named(function, value, f"{name}[{key!r}]") for key, value in _items(part)}
        return found if isinstance(part, dict) else tuple(found.values())
    return function(part, name)


def typed(samples, name):
    """Returns a part of the samples, (x, y) or (x, y, weights), in the types of training; `name` begins an error line.

    Raises:
      UserError: if no training could use them.
    """
    convert = (functools.partial(_in_types_of_training, axis) for axis in "xyw")
    found = tuple(_map_named(of, part, f"{name}: {axis}") for of, part, axis in zip(convert, samples, "xyw", strict=False))
    if len(found) > 2 and any((w < 0).any() for w in arrays_in(found[2])):
        raise UserError(f"{name}: w holds negative weights")
    return found


# The advice for data with strings.
OF_STRINGS = (
    "apply StringLookup or TextVectorization in the data, not in the model: dataset.map(lambda x, y: (lookup(x), y)); "
    "keras.layers.Hashing(2**53) makes ids for common.Embedding"
)


def _in_types_of_training(axis, array, name):
    """Returns an array in the type of training, or raises `UserError`; copies only if the type changes.

    Labels become int32 or float32; integer samples keep their type. A large memory-mapped array is not copied: it becomes
    `common.data.Rows`.

    Args:
      axis: "x", "y" or "w", for samples, labels, weights.
      array: of any type.
      name: of the array, to begin an error line.
    """
    if isinstance(array, Rows):
        return array
    kind = array.dtype.kind
    if kind not in "fiub":
        hint = f"; {OF_STRINGS}" if axis == "x" and kind in "US" else ""
        raise UserError(f"{name} holds {array.dtype}, expected numbers{hint}")
    if array.ndim == 0 or len(array) == 0:
        raise UserError(f"{name} has no samples")
    if array.size == 0:
        raise UserError(f"{name} has shape {array.shape}: its samples hold no numbers, expected some")
    dtype = array.dtype.newbyteorder("=")
    if kind == "f":
        dtype = np.dtype(np.float32)
        if not all(np.isfinite(chunk).all() for chunk in chunks(array)):
            count = sum(np.sum(~np.isfinite(chunk)) for chunk in chunks(array))
            raise UserError(f"{name} holds {count} values that are NaN or infinite")
        most = max(float(np.abs(chunk).max()) for chunk in chunks(array)) if array.dtype != dtype else 0
        if most > np.finfo(dtype).max:
            raise UserError(f"{name} holds {most:.3g}, too large for float32; scale it")
        if axis == "x" and most > EXACT[0] and (found := rounded(array)):
            raise UserError(f"{name} holds {found}: give whole numbers as int64, or scale them")
    elif axis == "w" or (axis == "x" and kind == "b"):
        dtype = np.dtype(np.float32)
    elif axis == "y":
        dtype = np.dtype(np.int32)
        if array.max() >= 2**31 or array.min() < -(2**31):
            raise UserError(f"{name} holds the class {array.max()}, expected less than 2,147,483,648")
    if is_mapped(array) and array.size * dtype.itemsize > LARGE:
        return Rows(array, dtype)
    return array.astype(dtype, copy=False)


EXACT = 2**24, 2**53  # below these, float32 and float64 hold each whole number


def rounded(array):
    """Returns a text on the first whole number of an array that float32 would change; None if there is none.

    None also if the array has fractions: then its values are measurements, not ids.
    """
    if all(chunk.max() <= EXACT[0] and chunk.min() >= -EXACT[0] for chunk in chunks(array)):
        return None
    found = None
    for chunk in chunks(array):
        if chunk.dtype.kind == "f" and (chunk != np.floor(chunk)).any():
            return None
        if found is None:
            with np.errstate(over="ignore"):  # a number too large becomes infinity
                changes = (chunk.astype(np.float32) != chunk) | (chunk >= EXACT[1]) | (chunk <= -EXACT[1])
            found = next(iter(chunk[changes]), None)
    if found is None:
        return None
    with np.errstate(over="ignore"):
        near = np.float32(found)
    if not np.isfinite(near):
        return f"{found:.3g}, too large for float32"
    return f"the whole number {int(found):,}, which float32 rounds to {int(near):,}"


def _is_masked(part):
    """Whether some value of an array, or of the arrays in a list, is masked."""
    return np.ma.is_masked(part) or (isinstance(part, (list, tuple)) and any(map(np.ma.is_masked, part)))


def hold_out(data, share, seed=0):
    """Returns the `Data` without a share of the training samples, and the `Data` with this share as its test set.

    The selection depends on the seed only, so that all tasks hold out the same samples.

    Raises:
      UserError: if no samples remain for training, or none for validation.
    """
    n = data.num_samples
    count = round(share * n)
    if not 0 < count < n:
        raise UserError(f"--validation={share} holds out {count} of {n} samples: expected some, not all")
    order = np.random.default_rng(seed).permutation(n)
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    training = data._replace(**dict(zip(("x_train", "y_train", "w_train"), _taken(data.train, kept), strict=False)))
    parts = dict(zip(("x_test", "y_test", "w_test"), _taken(data.train, held), strict=False))
    return training, training._replace(**{"w_test": None, **parts})


def _taken(samples, which):
    def taken(array):
        return array.take(which) if isinstance(array, Rows) else array[which]

    return tuple(mapped(taken, part) for part in samples)


def share(data, descriptor):
    """Shares large arrays with the tasks of this machine, so that they are in memory only once.

    Args:
      data: a `Data`.
      descriptor: of an empty file, inherited by each task under the same number. The arrays are written to it, and then their
        description; it stays empty if there is no large array, or no space for it.
    """
    path = f"/proc/self/fd/{descriptor}"

    def stored(array):
        if isinstance(array, Rows) or array.nbytes <= LARGE:
            return array
        begin = -(-os.fstat(descriptor).st_size // mmap.PAGESIZE) * mmap.PAGESIZE
        file.seek(begin)
        for chunk in chunks(array):
            file.write(np.ascontiguousarray(chunk).data)
        return Rows(np.memmap(path, array.dtype, "r", begin, array.shape), array.dtype)

    with open(descriptor, "wb", buffering=0, closefd=False) as file:
        try:
            left = Data(*(None if part is None else mapped(stored, part) for part in data))
            large = [a for part in left if part is not None for a in arrays_in(part) if isinstance(a, Rows)]
            if large and all(rows.has_file for rows in large):
                description = pickle.dumps(left)
                file.seek(0, os.SEEK_END)
                file.write(description + len(description).to_bytes(8, sys.byteorder))
                return
        except OSError:  # no space: each task loads its own copy
            pass
        file.truncate(0)


def shared():
    """Returns the `Data` that was shared with this task, or None.

    The variable `LAUNCHER_DATA` counts only in a task of the fork server, as its file is unpickled.
    """
    descriptor = int(os.environ.get("LAUNCHER_DATA") or -1) if task_status.is_fork else -1
    if descriptor < 0 or not (size := os.fstat(descriptor).st_size):
        return None
    length = int.from_bytes(os.pread(descriptor, 8, size - 8), sys.byteorder)
    return pickle.loads(os.pread(descriptor, length, size - 8 - length))


def shard(data, index, count):
    """Returns the shard of worker `index` of `count`: every count-th training sample, so shards are equal in any order.

    The shard is x and y, and the weights, if there are any.
    """
    if data.num_samples < count:
        raise UserError(
            f"{data.num_samples} training samples are too few for {count} workers: choose fewer --num_workers or more data"
        )
    return _taken(data.train, slice(index, None, count))


def plain(data, program):
    """Returns the same data, for a program that takes only one array of samples, one of labels, and no weights.

    Raises:
      UserError: for any other data.
    """
    if any(isinstance(part, (dict, tuple)) for part in data[:4]) or data[4:] != (None, None):
        raise UserError(f"{program} takes one array of samples, one of labels, and no weights")
    return Data(*(part[:] for part in data[:4]))  # mapped files are read


def check_batch(x, y, batch_size, window=1, num_workers=1):
    """Raises a `UserError` if memory cannot hold the samples of a step, and the indices of a window, of each worker.

    So neither sizes nor indices overflow 64 bits, as TensorFlow would abort then.

    Args:
      x, y: samples and labels, arrays `[n, ...]`, or several in a tuple or dict.
      num_workers: number of workers on this machine.
    """
    bytes_of_one = sum(array[:1].nbytes for array in arrays_in((x, y)))
    # `Batches.next` has at least two vectors of 64-bit indices.
    need, has = num_workers * batch_size * (bytes_of_one + 16 * window), limits.memory()
    if need > has:
        of = f" with a window of {window:,} steps" if window > 1 else ""
        each = f" in {num_workers} workers" if num_workers > 1 else ""
        raise UserError(
            f"--batch_size={batch_size}{of}{each} takes at least {limits.as_bytes(need)} of memory, but the machine has "
            f"{limits.as_bytes(has)}: choose a smaller one"
        )


def call_user_function(flag, spec):
    """Returns the result of FUNCTION of `spec`, FILE.py:FUNCTION.

    Raises:
      UserError: if there is no such file or function.
    """
    return call(flag, spec, user_function(flag, spec))


def call(flag, spec, function, *arguments):
    """Returns the result of a function of the user's, `spec`.

    Raises:
      UserError: if it raises.
    """
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        name = spec.rpartition(":")[2]
        raise UserError(f"{flag}={spec}: {name}() raised {one_line(error)}") from error


def user_function(flag, spec):
    """Returns FUNCTION of `spec`, FILE.py:FUNCTION. It can import from the file's folder, as a script can.

    Raises:
      UserError: if there is no such file or function.
    """
    path, colon, name = spec.rpartition(":")
    if not colon:
        raise UserError(f"{flag} must be FILE.py:FUNCTION, not {spec!r}")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{flag}={spec}: there is no file {path}")
    module = sys.modules.get(file.stem) if getattr(sys.modules.get(file.stem), "__file__", None) == str(file) else None
    if module is None:
        sys.path.insert(0, str(file.parent))
        module_spec = importlib.util.spec_from_file_location(file.stem, file)
        if module_spec is None or module_spec.loader is None:
            raise UserError(f"{flag}={spec}: {path} is not a Python file")
        module = importlib.util.module_from_spec(module_spec)
        before = sys.modules.get(file.stem)
        sys.modules[file.stem] = module  # dataclasses and pickle look their module up there
        try:
            module_spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise UserError(f"{flag}={spec}: {path} cannot be imported: {one_line(error)}") from error
        if before is not None:  # another module of the same name, still importable
            sys.modules[file.stem] = before
    try:
        function = getattr(module, name, None)
    except Exception as error:  # of a module's own __getattr__
        raise UserError(f"{flag}={spec}: {one_line(error)}") from error
    is_model = hasattr(function, "get_config") and not isinstance(function, type)
    if not callable(function) or is_model:
        what = f", but a {type(function).__name__}: give a function that returns it" if function is not None else ""
        raise UserError(f"{flag}={spec}: {path} has no function {name!r}{what}")
    return function


def one_line(error):
    """The type and first line of an exception; for one in a function traced by TensorFlow, the line after its frames."""
    lines = str(error).strip().splitlines()
    if lines and lines[0] == "in user code:":
        told = [line.strip() for line in lines if re.match(r" {4}\w+(Error|Exception|Iteration)\b", line)]
        return re.sub(r"(\w+\.<locals>\.)*tf__", "", told[-1] if told else f"{type(error).__name__}: {lines[-1].strip()}")
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
