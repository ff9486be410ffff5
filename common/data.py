"""Data sets as NumPy arrays, their shards, and batches drawn inside the graph."""

import gzip
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import limits, tf
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


class Batches:
    """Shuffled batches of one worker's samples, drawn inside the graph: no message and no copy from Python per step.

    The samples are local variables, fed once (`init_feed_dict`). Sample number k since the start is that of place i = k mod n
    in epoch e = k div n, which is second[(first[i] + e) mod n]: two random permutations, and between them a rotation. Every
    epoch sees every sample once; the order repeats itself after n epochs.

    Args:
      x, y: arrays `[n, ...]`, `[n, ...]`.
      batch_size: samples per batch, any number; a batch may cross the end of an epoch.
      seed: of the order; equal seeds give equal orders.
      name: variable scope.
    """

    def __init__(self, x, y, batch_size, seed, name="batches"):
        self.num_samples, self.batch_size = len(x), batch_size
        self._check = lambda window: check_batch(x, y, batch_size, window)
        self.init_feed_dict = {}
        with tf.variable_scope(name):
            self._x, self._y = self._fed("x", x), self._fed("y", y)
            rng = np.random.default_rng(seed)
            self._first, self._second = (self._fed(name, rng.permutation(len(x))) for name in ("first", "second"))
            self._position = local_variable("position", tf.zeros([], tf.int64))

    def _fed(self, name, value):
        feed = tf.placeholder(value.dtype, value.shape)
        self.init_feed_dict[feed] = value
        return local_variable(name, feed)

    def next(self, window):
        """Returns the indices `[window, batch_size]` of the next samples.

        Raises:
          UserError: if they are too many for memory.
        """
        self._check(window)
        size = window * self.batch_size
        k = self._position.assign_add(size) - size + tf.range(size, dtype=tf.int64)
        place = tf.gather(self._first, k % self.num_samples) + k // self.num_samples
        indices = tf.gather(self._second, place % self.num_samples)
        return tf.reshape(indices, [window, self.batch_size])

    def samples(self, indices):
        """Returns the samples x `[batch_size, ...]` and labels y of `indices`."""
        return tf.gather(self._x, indices), tf.gather(self._y, indices)


def local_variable(name, initial_value):
    """Returns a variable of this worker's own: initialized in every session anew, in no checkpoint."""
    collections = [tf.GraphKeys.LOCAL_VARIABLES]
    return tf.get_variable(name, initializer=initial_value, trainable=False, collections=collections, use_resource=True)


def array_dataset(arrays, batch_size, num_workers=1, shard_index=0, epochs=None, seed=0):
    """Returns the batches of one worker as a `tf.data.Dataset`: of every num_workers-th sample, in a new order each epoch.

    Sharded first, so that all workers together see every sample once an epoch; then shuffled, batched and repeated, so that no
    batch has samples of two epochs. Shards differ by one sample at most, and the last batch of an epoch may be smaller.

    Only indices are shuffled, all of the shard's, at about 250 bytes each. The samples of a batch are taken by NumPy: they are
    no part of the graph, which has a limit of 2 GB, and may come from a file (`np.load(..., mmap_mode="r")`). The price is
    some 0.1 ms a batch, and that the dataset must be used in the process that made it. `Batches` is faster, where the samples
    fit into memory once more.

    Args:
      arrays: an array `[n, ...]`, or a tuple of arrays with the same n. All workers give the same; they are not copied.
      batch_size: samples per batch of this worker.
      num_workers, shard_index: this is worker `shard_index` of 0 to `num_workers` - 1.
      epochs: passes over the shard; None goes on for ever. (An iterator that is initialized again begins with the order of
        the first epoch again.)
      seed: of the order; `tf.set_random_seed` enters, too. The same for all workers, each of which makes its own order of it.

    Returns:
      A dataset of batches `[batch_size, ...]`, or of tuples of them, with or without eager execution.

    Raises:
      UserError: if the arrays differ in length, a worker would get no sample, or a number is out of its range.
    """
    several = isinstance(arrays, (tuple, list))
    parts = [np.asarray(part) for part in (arrays if several else [arrays])]
    if not parts or any(part.ndim == 0 for part in parts):
        raise UserError("arrays must be an array of samples [n, ...], or a tuple of such arrays")
    num_samples = len(parts[0])
    if any(len(part) != num_samples for part in parts):
        lengths = ", ".join(str(len(part)) for part in parts)
        raise UserError(f"arrays must all have the same number of samples, not {lengths}")
    check_shard(num_workers, shard_index, batch_size=batch_size, epochs=1 if epochs is None else epochs)
    if num_samples < num_workers:
        raise UserError(f"{num_samples} samples are too few for {num_workers} workers: each needs at least one")

    def take(indices):
        dtypes = [tf.as_dtype(part.dtype) for part in parts]
        batch = tf.numpy_function(lambda chosen: [part[chosen] for part in parts], [indices], dtypes)
        for tensor, part in zip(batch, parts):
            tensor.set_shape([None, *part.shape[1:]])
        return tuple(batch) if several else batch[0]

    indices = tf.data.Dataset.range(num_samples).shard(num_workers, shard_index)
    return indices.shuffle(num_samples, seed + shard_index).batch(batch_size).map(take).repeat(epochs)


def line_dataset(
    files, parse, batch_size, num_workers=1, shard_index=0, epochs=None, seed=0, shuffle_buffer=10_000, header_lines=0
):
    """Returns the batches of one worker as a `tf.data.Dataset`: of its part of the lines of text files.

    With at least as many files as workers, a worker gets every num_workers-th file, and reads no others; the shards are then
    as uneven as the files. With fewer files, it reads all of them and gets every num_workers-th line; the shards differ by
    one line at most. (`tf.data.experimental.AutoShardPolicy.AUTO` chooses in the same way.) In both cases the files are sorted
    first: the order of a glob differs from machine to machine, and would give a file to two workers, or to none.

    Only then come the random parts, in a new order each epoch: the order of the worker's files, if it has files of its own,
    and that of lines within a buffer. Lines of several files alternate before they come to the buffer, so that files of one
    class each are mixed even if it is small.

    Args:
      files: paths, in any order; all workers give the same, and the files do not change. One line is one sample.
      parse: a function of a line, a scalar string tensor, that returns a tensor or a tuple of tensors.
      batch_size: samples per batch of this worker.
      num_workers, shard_index: this is worker `shard_index` of 0 to `num_workers` - 1.
      epochs: passes over the shard; None goes on for ever.
      seed: of the order, as in `array_dataset`.
      shuffle_buffer: lines to choose the next one from. The order is only as random as the shard if it holds all of that.
      header_lines: lines to leave out at the beginning of each file.

    Returns:
      A dataset of batches of what `parse` returns, with or without eager execution. It is empty if the worker's files are, or
      if there are fewer lines than workers.

    Raises:
      UserError: if there is no file, one is missing, or a number is out of its range.
    """
    files = sorted(str(file) for file in ([files] if isinstance(files, (str, Path)) else files))
    if not files:
        raise UserError("files must name at least one file, not none")
    for file in files:
        if not tf.gfile.Exists(file) or tf.gfile.IsDirectory(file):
            raise UserError(f"files must be text files that exist; there is no file {file}")
    epochs_given = 1 if epochs is None else epochs
    check_shard(num_workers, shard_index, batch_size=batch_size, epochs=epochs_given, shuffle_buffer=shuffle_buffer)
    seed += shard_index

    def lines_of(dataset):  # cycle_length: files that are open at a time, their lines taken in turn
        return dataset.interleave(lambda file: tf.data.TextLineDataset(file).skip(header_lines), cycle_length=8)

    dataset = tf.data.Dataset.from_tensor_slices(files)
    if len(files) >= num_workers:
        lines = lines_of(dataset.shard(num_workers, shard_index).shuffle(len(files), seed))
    else:
        lines = lines_of(dataset).shard(num_workers, shard_index)
    return lines.shuffle(shuffle_buffer, seed).map(parse, tf.data.AUTOTUNE).batch(batch_size).repeat(epochs)


def check_shard(num_workers, shard_index, **counts):
    """Raises `UserError` unless there is such a shard, and each of `counts`, by name, is a whole number of at least 1."""
    for name, value in {"num_workers": num_workers, **counts}.items():
        if not isinstance(value, (int, np.integer)) or value < 1:
            raise UserError(f"{name} must be a whole number of at least 1, not {value}")
    if shard_index not in range(num_workers):
        raise UserError(f"shard_index must be 0 to {num_workers - 1} with num_workers={num_workers}, not {shard_index}")
