"""Finite pipelines of tf.data, files of TFRecord and PyDatasets: their batches, and their conversion to arrays in files."""

import contextlib
import functools
import inspect
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from common.core import UserError
from common.data.array_types import OF_STRINGS, as_arrays, typed
from common.data.files import HELD
from common.data.nested_arrays import arrays_in, mapped, mapped_by_name, named
from common.data.pipeline_graphs import has
from common.data.user_functions import one_line

NAMES = {"train": "training", "validation": "validation", "test": "test"}  # of the sets, in a line
BATCH_BYTES, BATCH_SAMPLES = 2**24, 8192  # largest batch that is read at once


def why(error):
    """The first line of an exception, without the operation names that TensorFlow adds to the message."""
    return re.sub(r"\{\{.*?\}\} ?| ?\[Op:\w+\].*", "", one_line(error))


def is_pipeline(given):
    """Whether an object is a `tf.data.Dataset`, or a `keras.utils.PyDataset`."""
    return hasattr(given, "element_spec") or any(kind.__name__ == "PyDataset" for kind in type(given).__mro__)


def check_elements(spec):
    """Raises a `UserError` unless the elements of a `tf.data.Dataset` are (x, y) or (x, y, weight) of tensors of numbers."""
    import tensorflow as tf

    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise UserError(f"its elements are {str(spec):.80}, expected (x, y) or (x, y, weight)")
    for part in tf.nest.flatten(spec):
        if not isinstance(part, tf.TensorSpec):
            raise UserError(f"its elements hold {type(part).__name__}, expected dense tensors, as to_tensor() makes")
        if part.dtype == tf.string:
            raise UserError(f"its elements hold strings, expected numbers; {OF_STRINGS}")


def is_batched(dataset):
    """Whether the elements of a dataset are batches of samples."""
    return not hasattr(dataset, "element_spec") or has(dataset, "Batch", "GroupByWindow")


def batches_of(dataset):
    """Returns the batches of a dataset, an iterable; those of a dataset of single samples are made here."""
    if not hasattr(dataset, "element_spec"):
        return (dataset[i] for i in range(dataset.num_batches))
    return (dataset if is_batched(dataset) else dataset.batch(_size_of(dataset.element_spec))).prefetch(1).as_numpy_iterator()


def _size_of(spec):
    """Returns the number of samples in a batch."""
    import tensorflow as tf

    size = sum((part.shape.num_elements() or 1) * part.dtype.size for part in tf.nest.flatten(spec))
    return max(1, min(BATCH_SAMPLES, BATCH_BYTES // max(1, size)))


def in_types(batches, name, whose, like=None, start=0):
    """Yields batches in the types of training, see `batch_in_types`, or raises a `UserError`.

    Args:
      batches: an iterable of (x, y) or (x, y, weights), arrays.
      name: of the data in a line, as --data=...
      whose: the set that they are of, as "of the test set".
      like: as of `batch_in_types`, of the first batch; the others are like the one before.
      start: number of the first sample.
    """
    with as_user_error(name, whose):
        for batch in batches:
            found = batch_in_types(batch, f"{name}: samples {start:,} and later {whose}", like)
            like = found
            start += len(arrays_in(found[0])[0])
            yield found


def batch_in_types(batch, at, like):
    """Returns a batch in the types of training, or raises a `UserError` if no training could use it.

    Its arrays must have the shapes and types of `like`, another batch or its first parts; None for any.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        raise UserError(f"{at}: expected (x, y) or (x, y, weight)")
    found = typed(tuple(as_arrays(part, f"{at}: {axis}") for axis, part in zip("xyw", batch)), at)
    ours, theirs = ({} if like is None else named(each, "") for each in (like, found[: len(like or ())]))
    for name in ours.keys() | theirs.keys():
        was, now = (_kind_of(each.get(name)) for each in (ours, theirs))
        if was != now:
            raise UserError(f"{at} has {now}, after samples with {was}: expected the same in all")
    return found


def _kind_of(array):
    return "no such array" if array is None else f"{array.dtype} of shape {list(array.shape[1:])}"


@contextlib.contextmanager
def prefixed(name):
    """A context in which a `UserError` begins with the name of the data, unless it names a flag."""
    try:
        yield
    except UserError as error:
        said = str(error)
        raise UserError(said if said.startswith("--") else f"{name}: {said}") from error


@contextlib.contextmanager
def as_user_error(name, whose):
    """A context that turns any error in reading samples into a `UserError`, see `prefixed`."""
    try:
        with prefixed(name):
            yield
    except UserError:
        raise
    except Exception as error:  # a function of the user's, or tf.data, may raise anything
        raise UserError(f"{name}: the samples {whose} cannot be read: {why(error)}") from error


class Half:
    """The arrays of one set, written to raw files batch by batch.

    Args:
      folder: of the files.
      half: "train", "validation" or "test".
    """

    def __init__(self, folder, half):
        self._folder, self._half, self.count = Path(folder), half, 0
        self._files: dict[str, Any] = {}
        self._like: tuple = ()

    def add(self, batch):
        """Appends a batch, arrays in the types of training."""
        if self.count and len(batch) != len(self._like):
            raise UserError(f"the samples of the {NAMES[self._half]} set have weights, but not all of them")
        self._like, n = batch, len(arrays_in(batch[0])[0])
        for number, array in enumerate(arrays_in(batch)):
            with open(self._folder / self._name(number, array), "ab") as file:
                file.write(np.ascontiguousarray(array).data)
        self.count += n

    def _name(self, number, array):
        return f"{self._half}-{number}.{array.dtype}"

    def described(self):
        """Returns the arrays for `cache.ABOUT`, as {"x_train": "FILE SHAPE" in its structure}."""
        numbers: dict = {}

        def text(array, name):
            numbers[name] = len(numbers)
            return f"{self._name(numbers[name], array)} {'x'.join(map(str, (self.count, *array.shape[1:])))}"

        found = mapped_by_name(text, self._like, "")
        return {f"{axis}_{self._half}": part for axis, part in zip("xyw", found)}


def convert(sets, name, folder, told):
    """Writes the sets of a function of the user's, and returns the `arrays` of `cache.ABOUT`.

    Args:
      sets: {"train": datasets, one after the other, "test": one, "validation": one, if there is one}.
      name, folder, told: as of `in_types`, and of `convert` in `cache.converted`.
    """
    found: dict = {}
    like = None
    for half, parts in sets.items():
        whose, written = f"of the {NAMES[half]} set", Half(folder, half)
        for dataset in parts:
            total = _count_of(dataset, len(parts))
            for batch in in_types(batches_of(dataset), name, whose, like, written.count):
                like = batch[:2]
                written.add(batch)
                told(written.count, total)
        if not written.count:
            raise UserError(f"{name}: the {NAMES[half]} set has no samples")
        found |= written.described()
    return found


def _count_of(dataset, times):
    """Returns the number of samples of so many datasets like this one, or None."""
    count = int(dataset.cardinality()) if hasattr(dataset, "element_spec") and not is_batched(dataset) else -1
    return times * count if count >= 0 else None


class Records:
    """Files of TensorFlow's records.

    Args:
      paths: names of the files.
      parse: function of a scalar string tensor that returns (x, y) or (x, y, weight).
    """

    def __init__(self, paths, parse):
        self.paths = paths
        for path in paths:
            with open(path, "rb") as file:
                if file.read(2) == b"\x1f\x8b":
                    raise UserError(f"{path} is compressed: unpack it, or read it with --data=FILE.py:FUNCTION")
        self.dataset = self._pipeline(parse)

    def _pipeline(self, parse):
        """Returns a dataset of (number in the file, bytes of the record, sample)."""
        import tensorflow as tf

        files = tf.data.Dataset.from_tensor_slices(self.paths)
        records = files.flat_map(lambda path: tf.data.TFRecordDataset(path).enumerate())
        parsed = records.map(
            lambda number, record: (number, tf.strings.length(record), parse(record)), tf.data.AUTOTUNE, deterministic=True
        )
        try:
            check_elements(parsed.element_spec[2])
        except UserError as error:
            raise UserError(f"of the samples {error}") from None
        return parsed

    def batches(self, name, whose, like, start):
        """Yields the numbers of records in their files `[n]`, their samples, and their size in bytes; see `in_types`."""
        import tensorflow as tf

        batches = self.dataset.batch(_size_of(self.dataset.element_spec)).prefetch(1)
        with as_user_error(name, whose):
            try:
                for numbers, sizes, samples in batches.as_numpy_iterator():
                    like = batch_in_types(samples, f"{name}: samples {start:,} and later {whose}", like)
                    start += len(numbers)
                    yield numbers, like, int(sizes.sum()) + 16 * len(sizes)
            except (tf.errors.DataLossError, tf.errors.OutOfRangeError) as error:
                raise UserError(next(filter(None, map(_damage_of, self.paths)), f"a file is damaged: {why(error)}")) from None


def convert_records(train, test, name, folder, told):
    """Writes the samples of two `Records`, and returns the `arrays` of `cache.ABOUT`.

    Args:
      train, test: of the training and the test set; None for `test` if it is every tenth record of a training file.
      name, folder, told: as of `convert`.
    """
    halves = {half: Half(folder, half) for half in ("train", "test")}
    total = sum(os.path.getsize(path) for records in (train, test) if records for path in records.paths)
    done, like = 0, None
    for records, own in ((train, "train"), (test, "test")) if test else ((train, "train"),):
        for numbers, batch, size in records.batches(name, f"of the {NAMES[own]} set", like, halves[own].count):
            like = batch[:2]
            is_held = np.full(len(numbers), own == "test") if test else numbers % HELD == HELD - 1
            for half, chosen in (("train", ~is_held), ("test", is_held)):
                if chosen.any():
                    halves[half].add(tuple(mapped(functools.partial(_chosen, chosen), part) for part in batch))
            done += size
            told(done, total)
    if not halves["test"].count:
        raise UserError(f"{name}: every {HELD}th record of a file is for the test, but no file has that many: give --test_data")
    if not halves["train"].count:
        raise UserError(f"{name}: the training set has no samples")
    return halves["train"].described() | halves["test"].described()


def _chosen(which, array):
    return array[which]


def _damage_of(path):
    """Returns a line on a damaged file and the first record that cannot be read, or None."""
    import tensorflow as tf

    count = 0
    try:
        for _ in tf.data.TFRecordDataset(path):
            count += 1
    except tf.errors.OpError as error:
        return f"{path} is damaged or not a TFRecord file: record {count + 1:,} cannot be read: {why(error)}"
    return None


def takes_two(function):
    """Whether a function has two required arguments, the number of workers and the index of one."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 2
