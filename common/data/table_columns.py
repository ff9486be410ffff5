"""Columns of a table: their kinds, and their values as numbers, batch by batch."""

from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute as compute
from pyarrow import types

from common.core import UserError
from common.data.array_types import EXACT

_NONE = np.iinfo(np.int64).min  # an empty value in an array of int64, until the mean is known
_MOST = float(np.finfo(np.float32).max)
_WAYS_OUT = {
    "is_temporal": "a date or time is no number: turn it into some, as days or seconds since a date, or leave the column out",
    "is_decimal": "turn it into float64, or leave the column out",
    "is_binary": "decode it into lists of numbers, or leave the column out",
}


class Batch(NamedTuple):
    """Place of some rows of a file: the file, the number of its rows before them, and which of them are of the test set."""

    path: str
    before: int
    held: np.ndarray  # bool [n]

    def refuse(self, name, i, problem):
        """Raises a `UserError` on row `i` of these."""
        raise UserError(f"{self.path}: the column {name!r}, row {self.before + i + 1:,}, {problem}")


def kind_of(kind):
    """Returns "int", "float", "bool" or "string" for a type of pyarrow; None for the type of empty values alone, else ""."""
    if types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "string"
    known = {"int": types.is_integer, "float": types.is_floating, "bool": types.is_boolean}
    return None if types.is_null(kind) else next((name for name, holds in known.items() if holds(kind)), "")


def merged(kind, other):
    """Returns the kind of a column with values of these two, each perhaps None; "" if there is none."""
    if kind == other or kind is None or other is None:
        return other if kind is None else kind
    return "float" if {kind, other} == {"int", "float"} else ""


def refuse_type(path, name, kind):
    """Raises a `UserError` on a column of a type of pyarrow without a kind."""
    way_out = next((line for test, line in _WAYS_OUT.items() if getattr(types, test)(kind)), "leave the column out")
    if types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        way_out = _WAYS_OUT["is_binary"]
    raise UserError(f"{path}: the column {name!r} holds {kind}, expected numbers, strings, or lists of numbers: {way_out}")


class Column:
    """A column, as known from the batches so far.

    Args:
      name: its name.
      missing: replacement of empty values, "0" or "mean"; None: they are refused.
      buckets: number of buckets to hash strings into; None: a vocabulary.
      is_label: whether it is the label.
    """

    def __init__(self, name, missing=None, buckets=None, is_label=False):
        self.name, self.is_label = name, is_label
        self.missing = None if is_label else missing
        self.buckets = None if is_label else buckets
        self.kind: str | None = None  # see kind_of; None until there is a value
        self.shape: tuple[int, ...] | None = None  # of a value: (), or (k,) for lists; None until there is a value
        self.is_big = False  # whether float32 may not hold a whole number of it
        self.begin()

    def begin(self):
        """Forgets the values, not the kind: the rows are read from the beginning."""
        self.most = 0  # the largest absolute value of whole numbers
        self.has_fractions = False
        self.changed: Any = None  # the first whole number that float32 changes: (batch, row, problem)
        self.words: dict[str, int] = {}  # the vocabulary: string → number
        self.untrained: dict[str, tuple] = {}  # strings of test rows alone → (batch, row)
        self.filled = 0  # number of empty values
        self.sum: Any = 0.0  # of the values in training rows
        self.count: Any = 0  # of the values in training rows

    @property
    def width(self):
        """The number of values in a row."""
        return self.shape[0] if self.shape else 1

    @property
    def of_ids(self):
        """Whether the values are int64 to stay exact, not float32."""
        return self.is_big if self.kind == "int" else self.kind == "string" and (self.buckets or 0) > EXACT[0]

    def look(self, array, batch):
        """Returns the values of a batch, an array of pyarrow, those of lists in a row; it learns kind and shape."""
        if types.is_dictionary(array.type) and kind_of(array.type) != "string":
            array = array.dictionary_decode()
        values = self._unlisted(array, batch)
        if types.is_float16(values.type):  # old versions of pyarrow cannot do much with it
            values = values.cast(pyarrow.float32())
        kind = kind_of(values.type)
        if kind == "" or (kind == "string" and values is not array):
            refuse_type(batch.path, self.name, array.type)
        if (both := merged(self.kind, kind)) == "":
            before = f"but {self.kind} in rows before: expected one type"
            raise UserError(f"{batch.path}: the column {self.name!r} holds {array.type}, {before}")
        self.kind = both
        if kind == "int":
            ends = compute.min_max(values).as_py()
            most = max(-(ends["min"] or 0), ends["max"] or 0)
            limit = 2**31 if self.is_label else 2**63
            if most >= limit:
                i = next(i for i, value in enumerate(values.to_pylist()) if value is not None and abs(value) >= limit)
                what = f"the class {values[i].as_py():,}" if self.is_label else f"{values[i].as_py():,}"
                batch.refuse(self.name, i // self.width, f"holds {what}, expected less than {limit:,}")
            self.most, self.is_big = max(self.most, most), self.is_big or most > EXACT[0]
        return values

    def _unlisted(self, array, batch):
        """Returns the values of lists in a row, or the array itself if it holds none."""
        is_list = any(test(array.type) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list))
        if not is_list:
            self._learn_shape((), array, batch)
            return array
        lengths = _filled(compute.list_value_length(array), -1)
        present = np.flatnonzero(lengths >= 0)
        if not len(present):
            return pyarrow.nulls(len(array) * self.width)
        width = self.shape[0] if self.shape else int(lengths[present[0]])
        if len(other := present[lengths[present] != width]):
            problem = f"holds a list of length {lengths[other[0]]}, but of {width} before: expected lists of equal length"
            batch.refuse(self.name, other[0], problem)
        if width == 0:
            batch.refuse(self.name, present[0], "holds a list without values")
        self._learn_shape((width,), array, batch)
        values = array.flatten()  # nothing for an empty list
        if array.null_count:
            places = np.zeros([len(array), width], np.int64)
            places[present] = np.arange(len(values)).reshape(-1, width)
            values = values.take(pyarrow.array(places.ravel(), mask=np.repeat(lengths < 0, width)))
        return values

    def _learn_shape(self, shape, array, batch):
        if array.null_count == len(array):
            return
        if self.shape not in (None, shape):
            before = "unlike rows before: expected lists in all rows, or in none"
            raise UserError(f"{batch.path}: the column {self.name!r} holds {array.type}, {before}")
        self.shape = shape

    def numbers(self, values, batch):
        """Returns the result of `look` as numbers `[n]`, or `[n, k]` for lists of k.

        They are int64 for whole numbers that float32 may not hold, and for labels; otherwise float32. With --missing=mean, an
        empty value is NaN, or the least int64: see `is_empty`.
        """
        if self.kind == "string":
            return self._numbers_of_strings(values, batch)
        found = _filled(values)
        empty = np.asarray(values.is_null(nan_is_null=True))
        if empty.any():
            self._check_missing(empty, batch)
            found = np.where(empty, np.zeros([], found.dtype), found)
        if self.kind == "float":
            self._check_floats(found, batch)
        if self.missing == "mean":
            in_rows = len(batch.held), self.width
            self.sum = self.sum + found.reshape(in_rows)[~batch.held].sum(axis=0, dtype=np.float64)
            self.count = self.count + (~empty).reshape(in_rows)[~batch.held].sum(axis=0)
        whole = self.kind in ("int", "bool") and (self.of_ids or self.is_label)
        result = found.astype(np.int64 if whole else np.float32, copy=False)
        if self.missing == "mean" and empty.any():
            result = np.where(empty, np.array(_NONE if whole else np.nan, result.dtype), result)
        return result.reshape([-1, *self.shape]) if self.shape else result

    def _check_missing(self, empty, batch):
        if self.missing is None:
            if self.is_label:
                way_out = "leave the row out, or label it"
            elif self.kind == "string":
                way_out = "fill it, or give --missing=0 for an empty string"
            else:
                way_out = "fill it, or give --missing=0 or --missing=mean"
            batch.refuse(self.name, int(np.flatnonzero(empty)[0]) // self.width, f"is empty: {way_out}")
        self.filled += int(np.count_nonzero(empty))

    def _check_floats(self, values, batch):
        """Raises a `UserError` on infinite values and those too large; notes whole numbers that float32 would change."""
        most = float(np.abs(values).max())
        if not most <= _MOST:
            i = int(np.flatnonzero(~(np.abs(values) <= _MOST))[0])
            infinite = "an infinite value: leave the row out, or write a number"
            problem = f"{values[i]:.3g}, too large for float32: scale the column" if np.isfinite(values[i]) else infinite
            batch.refuse(self.name, i // self.width, f"holds {problem}")
        if self.has_fractions:
            return
        self.has_fractions = values.dtype.kind == "f" and bool((values != np.floor(values)).any())
        if self.changed or most <= EXACT[0]:
            return
        near = values.astype(np.float32)
        changes = np.flatnonzero((near.astype(np.float64) != values) | (np.abs(values) >= EXACT[1]))
        if len(changes):
            number, after = int(values[changes[0]]), int(near[changes[0]])
            problem = f"which float32 rounds to {after:,}: write whole numbers without a point, or scale them"
            if abs(number) >= 2**63:
                problem = "too large for int64: scale the column"
            self.changed = batch, int(changes[0]) // self.width, f"holds the whole number {number:,}, {problem}"

    def _numbers_of_strings(self, values, batch):
        if not types.is_dictionary(values.type):
            values = values.cast(pyarrow.string()).dictionary_encode()
        places = _filled(values.indices, -1)
        try:
            words = values.dictionary.to_pylist()
        except UnicodeDecodeError:
            raw = values.dictionary.cast(pyarrow.binary()).to_pylist()
            wrong = next(i for i, word in enumerate(raw) if word.decode(errors="ignore").encode() != word)
            batch.refuse(self.name, int(np.argmax(places == wrong)), f"holds {raw[wrong]!r}: expected UTF-8")
        if (empty := places < 0).any():
            self._check_missing(empty, batch)
            places = np.where(empty, len(words), places)
            words.append("")
        if self.buckets:
            import tensorflow as tf

            array = np.array(words, object)  # faster than a list
            return tf.strings.to_hash_bucket_fast(array, self.buckets).numpy()[places]
        return self._places_of(words, places, batch)[places]

    def _places_of(self, words, places, batch):
        """Returns the number of each word in the vocabulary, int64; it adds new ones. Words that no row holds have none."""
        trained = np.bincount(places[~batch.held], minlength=len(words)) > 0
        tested = np.bincount(places[batch.held], minlength=len(words)) > 0
        numbers = np.zeros(len(words), np.int64)
        for i in np.flatnonzero(trained | tested):
            word = words[i]
            if not trained[i]:
                if word not in self.words:
                    self.untrained[word] = batch, int(np.flatnonzero((places == i) & batch.held)[0])
            elif self.untrained:
                self.untrained.pop(word, None)
            numbers[i] = self.words.setdefault(word, len(self.words))
        return numbers

    def finish(self):
        """Raises a `UserError` if no training could use the column, now that all rows are known."""
        if self.kind is None:
            raise UserError(f"the column {self.name!r} is empty in all rows: leave it out of the files")
        if self.kind == "float" and self.changed and not self.has_fractions and not self.is_label:
            batch, i, problem = self.changed
            batch.refuse(self.name, i, problem)
        if self.untrained:
            word, (batch, i) = next(iter(self.untrained.items()))
            way_out = "leave the row out" if self.is_label else "hash the strings, with --hash_strings=BUCKETS"
            batch.refuse(self.name, i, f"holds {word!r}, but no training row does: {way_out}")
        if self.missing == "mean" and self.kind != "string" and not np.all(self.count):
            raise UserError(f"the column {self.name!r} is empty in all training rows: leave it out, or give --missing=0")

    def is_empty(self, numbers):
        """Returns which of the numbers in an array stand for empty values, until `mean` is known."""
        return np.isnan(numbers) if numbers.dtype.kind == "f" else numbers == _NONE

    def mean(self):
        """Returns the mean of the values in training rows, float64, or `[k]` for lists; of whole numbers, the nearest one."""
        mean = self.sum / self.count
        return np.rint(mean) if self.kind in ("int", "bool") else mean


def _filled(array, value=0):
    """Returns an array of pyarrow as one of NumPy, with a value in place of empty ones."""
    if types.is_null(array.type):
        return np.zeros(len(array))
    if array.null_count:
        array = array.fill_null(pyarrow.scalar(value).cast(array.type))
    return array.to_numpy(zero_copy_only=False)
