"""Data sets as NumPy arrays: those that are known by name or come from a user, what is refused of them, and their shards."""

import gzip
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import limits
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
        masked = [name for name, part in parts.items() if _is_masked(part)]
        parts = {name: np.asarray(part) for name, part in parts.items()}
    except Exception:  # whatever an object that is no array raises when it is to become one
        raise UserError(f"--data={spec} must give ((x_train, y_train), (x_test, y_test)) as NumPy arrays") from None
    for name, part in parts.items():
        if name in masked:  # NumPy would forget the mask, and take what is under it
            raise UserError(f"--data={spec}: {name} has masked values; fill them (.filled), or leave their samples out")
        if part.dtype.kind not in "fiub":
            raise UserError(f"--data={spec}: {name} holds {part.dtype}, expected numbers")
        if part.ndim == 0 or len(part) == 0:
            raise UserError(f"--data={spec}: {name} has no samples")
        if part.size == 0:
            raise UserError(f"--data={spec}: {name} has shape {part.shape}: its samples hold no numbers, expected some")
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


def _is_masked(part):
    """Whether some value of an array, or of the arrays in a list, is masked."""
    return np.ma.is_masked(part) or (isinstance(part, (list, tuple)) and any(map(np.ma.is_masked, part)))


def hold_out(data, share, seed=0):
    """Returns the `Data` with a share of the training samples taken away, and the `Data` that has these as its test set.

    Which, depends on the seed only, so that all tasks hold out the same.

    Raises:
      UserError: if that leaves nothing to train with, or nothing to validate with.
    """
    count = round(share * len(data.x_train))
    if not 0 < count < len(data.x_train):
        raise UserError(f"--validation={share} holds out {count} of {len(data.x_train)} samples: expected some, not all")
    order = np.random.default_rng(seed).permutation(len(data.x_train))
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    training = data._replace(x_train=data.x_train[kept], y_train=data.y_train[kept])
    return training, training._replace(x_test=data.x_train[held], y_test=data.y_train[held])


def shard(data, index, count):
    """Returns the training samples of worker `index` of `count`: every count-th, so that all get equal shares of any order."""
    if len(data.x_train) < count:
        raise UserError(
            f"{len(data.x_train)} training samples are too few for {count} workers: --num_workers or the data must change"
        )
    return data.x_train[index::count], data.y_train[index::count]


def check_batch(x, y, batch_size, window=1, num_workers=1):
    """Raises a `UserError` if memory cannot hold the samples of a step, and the indices of those of a window, of each worker.

    So neither sizes nor indices overflow 64 bits, with which TensorFlow would abort.

    Args:
      x, y: arrays `[n, ...]` of samples and labels.
      num_workers: how many share this machine.
    """
    bytes_of_one = x[:1].nbytes + y[:1].nbytes
    # `Batches.next` has two vectors of indices at least, in 64 bits.
    need, has = num_workers * batch_size * (bytes_of_one + 16 * window), limits.memory()
    if need > has:
        of = f" with a window of {window:,} steps" if window > 1 else ""
        each = f" in {num_workers} workers" if num_workers > 1 else ""
        raise UserError(
            f"--batch_size={batch_size}{of}{each} takes at least {limits.as_bytes(need)} of memory, but there are "
            f"{limits.as_bytes(has)}: choose less"
        )


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
