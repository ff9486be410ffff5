"""Columns of CSV, Parquet and Arrow files: their kinds, and their places in the arrays of the samples."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.core import UserError
from common.data.mapped_rows import Rows

COLUMNS = "columns.json"  # in an entry of the cache: the columns, the label, and its classes
EXACT_UP_TO = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}


class Column(NamedTuple):
    """A column: `width` numbers of a sample, from place `at` on, in the array `numbers` (float32) or `ids` (int64)."""

    name: str
    kind: str  # "float", "int", "bool", or "string": whole numbers by a vocabulary or by hashing
    array: str
    at: int
    width: int
    is_list: bool
    most: int | None  # largest absolute value of whole numbers
    vocabulary: str | None = None  # a JSON file in the entry; the id of a string is its place in the list
    buckets: int | None = None  # of `tf.strings.to_hash_bucket_fast`, in place of a vocabulary


class Columns:
    """All columns of the samples. Those of numbers are the first ones of the array `numbers`, in the order of the files.

    Args:
      described: list of dicts, as `table_files.convert` returns it.
    """

    def __init__(self, described):
        self._named = {each["name"]: Column(**each) for each in described}

    def __iter__(self):
        return iter(self._named.values())

    def __getitem__(self, name):
        return self._named[name]

    def names(self):
        """Returns the names, in the order of the files."""
        return list(self._named)

    def of_numbers(self):
        """Returns the columns that are no strings, in order; those that are too large for float32 are in `ids`."""
        return [column for column in self if column.kind != "string"]

    def width(self):
        """The number of places of the array `numbers` that hold no strings."""
        return sum(column.width for column in self.of_numbers() if column.array == "numbers")

    def matrix(self, x):
        """Returns samples x with the columns of numbers alone, as one array, for its shape and type.

        Its values are those of the samples if they all are whole numbers, as of a sequence; else 0.
        """
        array: Any = x.get("numbers") if isinstance(x, dict) else x
        n = len(next(iter(x.values())) if isinstance(x, dict) else x)
        if all(column.kind == "int" and column.array == "numbers" for column in self):
            return array.as_type(np.int32) if isinstance(array, Rows) else array.astype(np.int32)
        return np.broadcast_to(np.float32(0), [n, self.width()])


def listed(names):
    """Returns the first names as text, and how many more there are."""
    names = list(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def values_of(x, column: Column) -> Any:
    """Returns the values of a column `[n, width]` in samples x, arrays or tensors."""
    array = x[column.array] if isinstance(x, dict) else x
    return array[:, column.at : column.at + column.width]


def copy_columns(entry, folder):
    """Copies the description of columns, with the vocabularies of strings, from an entry of the cache to a folder.

    They say how to make the inputs of a saved model from a row of a file.
    """
    Path(folder).mkdir(exist_ok=True)
    for path in [Path(entry, COLUMNS), *Path(entry).glob("vocabulary-*.json")]:
        shutil.copy(path, folder)


def check_columns(entry, folder, flag="--resume"):
    """Compares the columns of an entry with those that `copy_columns` has left in a folder; strings may be added at the end.

    Raises:
      UserError: if numbers would have another meaning: columns, classes or the numbers of strings differ.
    """
    if not Path(folder, COLUMNS).exists():
        return
    try:
        before, now = (json.loads(Path(each, COLUMNS).read_text()) for each in (folder, entry))
        keys = "name", "width", "vocabulary", "buckets"
        parts = [[[column[key] for key in keys] for column in each["columns"]] for each in (before, now)]
        if parts[0] != parts[1] or before["label"] != now["label"]:
            labels = [before["label"]], [now["label"]]
            was, given = next(((b, n) for b, n in itertools.zip_longest(*parts) if b != n), labels)
            named = [repr(each[0]) if each else "none" for each in (was, given)]
            raise UserError(f"{flag}: the columns of the data have changed: {named[0]} was there, and is {named[1]} now")
        meanings = [(before["label"], before["classes"], now["classes"])]
        for column, other in zip(before["columns"], now["columns"], strict=True):
            if column["vocabulary"]:
                paths = Path(folder, column["vocabulary"]), Path(entry, other["vocabulary"])
                words, others = (json.loads(path.read_text()) for path in paths)
                meanings.append((column["name"], words, others[: len(words)]))
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder} is damaged: if the data are unchanged, remove that folder") from None
    for name, words, others in meanings:
        pairs = enumerate(itertools.zip_longest(words or [], others or []))
        if changed := next(((i, word, other) for i, (word, other) in pairs if word != other), None):
            number, word, other = changed
            what = f"the number {number} in {name!r} was {word!r}, and is {other!r} in the present files"
            raise UserError(f"{flag}: {what}: give the same files in the same order, or begin a new run")
