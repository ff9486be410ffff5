"""Data sets in memory: a training and a test set, their checks, their shards, and their copy for other processes."""

import inspect
import mmap
import os
import pickle
import sys
from typing import Any, NamedTuple

import numpy as np

from common.core import UserError, limits, task_status
from common.data.array_types import as_arrays, typed
from common.data.builtin_data import digits, linear, mnist, mnist1d, quadratic, text
from common.data.frames import is_frame, of_frames
from common.data.mapped_rows import LARGE, Rows, chunks
from common.data.nested_arrays import arrays_in, mapped, named
from common.data.pipelines import is_pipeline
from common.data.user_functions import call_user_function

SETS = {2: ("train", "test"), 3: ("train", "validation", "test")}  # of a function that gives so many


class Data(NamedTuple):
    """A training and a test set: samples, labels, and the weights of the samples, or None if all count the same.

    It may have a validation set, for the same evaluation as the test set.

    Each is an array `[n, ...]`, or arrays in a tuple or dict, for a model of several inputs or outputs. Labels are int32
    (classes) or float32. A large memory-mapped array is `common.data.Rows`. Samples of such files as CSV have `columns`, a
    `common.data.Columns`. `text` is the source of converted samples, for the first line of a run; `entry` the folder with their
    arrays, or None.
    """

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any
    w_train: Any = None
    w_test: Any = None
    x_validation: Any = None
    y_validation: Any = None
    w_validation: Any = None
    columns: Any = None
    text: str = ""
    entry: Any = None

    @property
    def parts(self):
        """The samples, labels and weights of all sets, in the order of the fields."""
        return tuple(self[:9])

    def with_parts(self, parts):
        """Returns the same data with others in place of `parts`."""
        return self._replace(**dict(zip(self._fields, parts)))

    @property
    def validation(self):
        """The same data with the validation set as the test set; None if there is none."""
        if self.x_validation is None:
            return None
        return self._replace(x_test=self.x_validation, y_test=self.y_validation, w_test=self.w_validation)

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


def load(spec, seed=0):
    """Returns the `Data` that `--data=spec` names: digits, linear, mnist, mnist1d, quadratic, text or FILE.py:FUNCTION.

    A task of a launcher gets the data that the input check has shared with all tasks, if any: see `share`. Raises `UserError`
    if there is no such data or no training could use it.
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


def checked(arrays, spec):
    """Returns the arrays from `--data=spec` as `Data`, in the types of training, or raises `UserError`.

    They are `((x_train, y_train), (x_test, y_test))`, each pair with weights of the samples as a third, if they have some; a
    validation set may be between them. x may be data frames, which then have columns. Or they are a `Data`.
    """
    flag, sets = f"--data={spec}", {}
    if isinstance(arrays, (tuple, list)) and any(map(is_pipeline, arrays)):
        raise UserError(f"{flag} gives tf.data.Datasets, but this program trains with arrays only")
    columns = None
    if isinstance(arrays, Data):
        middle = [] if arrays.validation is None else [arrays.validation.test]
        arrays, columns = (arrays.train, *middle, arrays.test), arrays.columns
    try:
        given = {half: (*each, None) if len(each) == 2 else each for half, each in zip(SETS[len(arrays)], arrays, strict=True)}
        samples = {half: x for half, (x, _, _) in given.items()}
        if all(map(is_frame, samples.values())):
            samples, columns = of_frames(samples, flag)
        for half, (_, y, w) in given.items():
            parts = (samples[half], y) if w is None else (samples[half], y, w)
            sets[half] = [as_arrays(part, f"{flag}: {axis}_{half}") for axis, part in zip("xyw", parts)]
    except UserError:
        raise
    except Exception:  # converting an object that is no array may raise any error
        expected = "((x_train, y_train), (x_test, y_test)) as NumPy arrays"
        weights = "and weights as a third of each pair, if samples have some"
        raise UserError(f"{flag} must give {expected}, {weights}{_given_instead(arrays)}") from None
    sets = {half: typed(parts, flag, f"_{half}") for half, parts in sets.items()}
    for half in SETS[len(sets)][1:]:
        _check_alike(flag, sets["train"], sets[half], half)
    return Data(**{f"{axis}_{half}": part for half, parts in sets.items() for axis, part in zip("xyw", parts)}, columns=columns)


def _check_alike(flag, train, other, half):
    """Raises a `UserError` if the arrays of a set differ from those of the training set in names, shapes or types."""
    for axis, *both in zip("xyw", train, other):
        ours, theirs = (named(part, "") for part in both)
        if ours.keys() != theirs.keys():
            names = f"{axis}_train {len(ours)} and {axis}_{half} {len(theirs)} arrays"
            raise UserError(f"{flag}: {names}, with different names or numbers; expected the same in both")
        for name, array in ours.items():
            had, has = (f"{each.dtype} of shape {each.shape[1:]}" for each in (array, theirs[name]))
            if had != has:
                raise UserError(f"{flag}: {axis}_train{name} holds {had}, {axis}_{half}{name} {has}; expected the same")


def _given_instead(given):
    """Returns the end of an error line: the object given in place of pairs of arrays, and the remedy, or ""."""
    pairs = list(given) if isinstance(given, (tuple, list)) else []
    parts = [part for pair in pairs if isinstance(pair, (tuple, list)) for part in pair]
    if given is None:
        return "; it gave None: does the function return them?"
    for part in (given, *pairs, *parts):
        if inspect.isgenerator(part):
            return "; it gave a generator: np.stack(list(...)) makes an array, tf.data.Dataset.from_generator a dataset"
    for part in parts:
        if isinstance(part, list) and len({len(row) for row in part if isinstance(row, (list, tuple))}) > 1:
            return "; it gave lists of unequal lengths: keras.utils.pad_sequences makes an array of them"
    return ""


def hold_out(data, share, seed=0):
    """Returns the `Data` without a share of the training samples, and the `Data` with this share as its test set.

    The selection depends on the seed only, so that all tasks hold out the same samples.
    """
    n = data.num_samples
    count = round(share * n)
    check_held_out(share, count, n)
    order = np.random.default_rng(seed).permutation(n)
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    training = data._replace(**dict(zip(("x_train", "y_train", "w_train"), _taken(data.train, kept), strict=False)))
    parts = dict(zip(("x_test", "y_test", "w_test"), _taken(data.train, held), strict=False))
    return training, training._replace(**{"w_test": None, **parts})


def check_held_out(share, count, n):
    """Raises a `UserError` if `--validation=share` leaves no samples for training, or none for validation."""
    if not 0 < count < n:
        raise UserError(f"--validation={share} holds out {count} of {n} samples: expected some, not all")


def _taken(samples, which):
    def taken(array):
        return array.take(which) if isinstance(array, Rows) else array[which]

    return tuple(mapped(taken, part) for part in samples)


def share(data, descriptor, whole=False):
    """Shares large arrays of a `Data` with the tasks of this machine, so that they are in memory only once.

    Each task inherits the descriptor of an empty file under the same number. The arrays are written to it, and then their
    description; it stays empty if there is no large array, or no space for it. With `whole` it has all arrays, as another task
    would load others, and a lack of space is a `UserError`.
    """
    path = f"/proc/self/fd/{descriptor}"

    def stored(array):
        if array.has_file if isinstance(array, Rows) else array.nbytes <= LARGE and not whole:
            return array
        begin = -(-os.fstat(descriptor).st_size // mmap.PAGESIZE) * mmap.PAGESIZE
        file.seek(begin)
        for chunk in chunks(array):
            file.write(np.ascontiguousarray(chunk).data)
        return Rows(np.memmap(path, array.dtype, "r", begin, array.shape), array.dtype)

    with open(descriptor, "wb", buffering=0, closefd=False) as file:
        try:
            parts = [None if part is None else mapped(stored, part) for part in data.parts]
            left = data.with_parts(parts)
            large = [a for part in parts if part is not None for a in arrays_in(part) if isinstance(a, Rows)]
            if large and all(rows.has_file for rows in large):
                description = pickle.dumps(left)
                file.seek(0, os.SEEK_END)
                file.write(description + len(description).to_bytes(8, sys.byteorder))
                return
        except OSError as error:  # no space: each task loads its own copy
            if whole:
                raise UserError(f"the data cannot be shared with the tasks: {error.strerror}: give a smaller set") from None
        file.truncate(0)


def shared():
    """Returns the `Data` that was shared with this task, or None.

    The variable `LAUNCHER_DATA` counts only in a task of the fork server, as its file is unpickled.
    """
    descriptor = int(os.environ.get("LAUNCHER_DATA") or -1) if task_status.is_fork else -1
    if descriptor < 0 or not (size := os.fstat(descriptor).st_size):
        return None
    length = int.from_bytes(os.pread(descriptor, 8, size - 8), sys.byteorder)
    data = pickle.loads(os.pread(descriptor, length, size - 8 - length))
    read = [part if part is None else mapped(lambda a: a[:] if a.nbytes <= LARGE else a, part) for part in data.parts]
    return data.with_parts(read)


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
    """Returns the same data, for a program that takes only one array of samples, one of labels, and no weights, or raises."""
    if any(isinstance(part, (dict, tuple)) for part in data[:4]) or data.parts[4:] != (None,) * 5:
        raise UserError(f"{program} takes one array of samples, one of labels, no weights and no validation set")
    return Data(*(part[:] for part in data[:4]))  # mapped files are read


def check_batch(x, y, batch_size, window=1, num_workers=1):
    """Raises a `UserError` if memory cannot hold the samples of a step, and the indices of a window, of each worker.

    So neither sizes nor indices overflow 64 bits, as TensorFlow would abort then. x and y are all samples and labels;
    `num_workers` is the number of workers on this machine.
    """
    bytes_of_one = sum(array[:1].nbytes for array in arrays_in((x, y)))
    # `Batches.next` has at least two vectors of 64-bit indices.
    need, has = num_workers * batch_size * (bytes_of_one + 16 * window), limits.memory()
    if need > has:
        of = f" with a window of {window:,} steps" if window > 1 else ""
        of += f" in {num_workers} workers" if num_workers > 1 else ""
        takes = f"takes at least {limits.as_bytes(need)} of memory, but the machine has {limits.as_bytes(has)}"
        raise UserError(f"--batch_size={batch_size}{of} {takes}: choose a smaller one")
