"""Data sets as NumPy arrays, their shards, and batches drawn inside the graph."""

import gzip
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import tf
from common.flags import UserError


class Data(NamedTuple):
    """A training and a test set. Labels are whole numbers (classes) or float32 (regression)."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def is_classification(self):
        return np.issubdtype(self.y_train.dtype, np.integer)

    @property
    def num_classes(self):
        return int(max(self.y_train.max(), self.y_test.max())) + 1


def load(spec, seed=0):
    """Returns the `Data` that `--data=spec` names: digits, linear, mnist or FILE.py:FUNCTION.

    Raises:
      UserError: if there is no such data or no training could use it.
    """
    loaders = {"digits": digits, "linear": lambda: linear(seed), "mnist": mnist}
    if spec in loaders:
        arrays = loaders[spec]()
    elif ":" in spec:
        arrays = call_user_function("--data", spec)
    else:
        raise UserError(f"--data must be one of {', '.join(loaders)} or FILE.py:FUNCTION, not {spec!r}")
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


def checked(arrays, spec):
    """Returns `((x_train, y_train), (x_test, y_test))` as `Data` in the types that training uses, or raises `UserError`."""
    try:
        (x_train, y_train), (x_test, y_test) = arrays
        parts = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
        parts = {name: np.asarray(part) for name, part in parts.items()}
    except (TypeError, ValueError):
        raise UserError(f"--data={spec} must give ((x_train, y_train), (x_test, y_test)) as NumPy arrays") from None
    for name, part in parts.items():
        if part.dtype.kind not in "fiub":
            raise UserError(f"--data={spec}: {name} holds {part.dtype}, expected numbers")
        if part.ndim == 0 or len(part) == 0:
            raise UserError(f"--data={spec}: {name} has no samples")
        if part.dtype.kind == "f":
            if not np.isfinite(part).all():
                raise UserError(f"--data={spec}: {name} holds {np.sum(~np.isfinite(part))} values that are NaN or infinite")
            with np.errstate(over="ignore"):
                parts[name] = part.astype(np.float32)
            if not np.isfinite(parts[name]).all():
                raise UserError(f"--data={spec}: {name} holds {np.abs(part).max():.3g}, too large for float32; scale it")
        elif part.dtype == bool or (name[0] == "x" and part.dtype == np.uint8):
            parts[name] = part.astype(np.float32 if name[0] == "x" else np.int32)
    for half in ("train", "test"):
        x, y = parts[f"x_{half}"], parts[f"y_{half}"]
        if len(x) != len(y):
            raise UserError(f"--data={spec}: x_{half} has {len(x)} samples, y_{half} has {len(y)} labels")
        if y.dtype.kind != "f":
            if y.ndim == 2 and y.shape[1] == 1:
                y = y[:, 0]
            if y.ndim != 1:
                raise UserError(
                    f"--data={spec}: y_{half} has shape {y.shape}, expected class numbers of shape [n]; one-hot "
                    f"labels become those by .argmax(axis=1)"
                )
            if y.min() < 0:
                raise UserError(f"--data={spec}: y_{half} holds the class {y.min()}, expected 0 or more")
            if y.max() >= 2**31:
                raise UserError(f"--data={spec}: y_{half} holds the class {y.max()}, expected less than 2,147,483,648")
            parts[f"y_{half}"] = y.astype(np.int32)
    for axis in "xy":
        train, test = parts[f"{axis}_train"], parts[f"{axis}_test"]
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise UserError(
                f"--data={spec}: {axis}_train holds {train.dtype} of shape {train.shape[1:]}, "
                f"{axis}_test {test.dtype} of shape {test.shape[1:]}; expected the same"
            )
    return Data(**parts)


def shard(data, index, count):
    """Returns the training samples of worker `index` of `count`: every count-th, so that all get equal shares of any order."""
    if len(data.x_train) < count:
        raise UserError(
            f"{len(data.x_train)} training samples are too few for {count} workers: --num_workers or the data must change"
        )
    return data.x_train[index::count], data.y_train[index::count]


def call_user_function(flag, spec):
    """Returns what FUNCTION of `spec`, FILE.py:FUNCTION, returns. The file's folder is importable to it, as if it was run.

    Raises:
      UserError: if there is no such file or function, or it raises.
    """
    path, _, name = spec.rpartition(":")
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
        if before is not None:  # a module that others may still import, of the same name
            sys.modules[file.stem] = before
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{flag}={spec}: {path} has no function {name!r}")
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag}={spec}: {name}() raised {one_line(error)}") from error


def one_line(error):
    """The kind and the first line of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Batches:
    """Shuffled batches of one worker's samples, drawn inside the graph: no message and no copy from Python per step.

    The samples are local variables, fed once (`init_feed_dict`). Sample number k since the start is sample k mod n of the
    epoch's permutation, which a counter-based shuffle computes without storing it; an epoch sees every sample once.

    Args:
      x, y: arrays `[n, ...]`, `[n, ...]`.
      batch_size: samples a batch; a batch may cross the end of an epoch.
      seed: of the order; equal seeds give equal orders.
      name: variable scope.
    """

    def __init__(self, x, y, batch_size, seed, name="batches"):
        self.num_samples, self.batch_size, self.seed = len(x), batch_size, seed
        self.init_feed_dict = {}
        with tf.variable_scope(name):
            self._x, self._y = self._samples("x", x), self._samples("y", y)
            self._position = local_variable("position", tf.zeros([], tf.int64))

    def _samples(self, name, value):
        feed = tf.placeholder(value.dtype, value.shape)
        self.init_feed_dict[feed] = value
        return local_variable(name, feed)

    def next(self, window):
        """Returns the indices `[window, batch_size]` of the next samples."""
        size = window * self.batch_size
        k = self._position.assign_add(size) - size + tf.range(size, dtype=tf.int64)
        epoch = k // self.num_samples
        # Keys that are nearly all zeros hardly shuffle: those of the first epoch would leave most samples where they are.
        key, seed = (tf.fill([size], tf.constant(k, tf.int64)) for k in (0x9E3779B97F4A7C1, self.seed))
        seeds = tf.stack([key, epoch, seed], axis=1)
        last = tf.constant(self.num_samples - 1, tf.int64)
        # The raw operation: its wrapper, tf.random.experimental.index_shuffle, cannot take one seed an index.
        indices = tf.raw_ops.RandomIndexShuffle(index=k % self.num_samples, seed=seeds, max_index=last, rounds=4)
        return tf.reshape(indices, [window, self.batch_size])

    def samples(self, indices):
        """Returns the samples x `[batch_size, ...]` and labels y of `indices`."""
        return tf.gather(self._x, indices), tf.gather(self._y, indices)


def local_variable(name, initial_value):
    """Returns a variable of this worker's own: initialized in every session anew, in no checkpoint."""
    return tf.get_variable(
        name, initializer=initial_value, trainable=False, collections=[tf.GraphKeys.LOCAL_VARIABLES], use_resource=True
    )
