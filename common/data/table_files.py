"""Files of CSV, Parquet or Arrow to arrays: columns of numbers in one matrix, large whole numbers in another, labels."""

import json
import os
import re
from typing import Any, NamedTuple

import numpy as np

from common.core import UserError
from common.data.columns import listed
from common.data.files import HELD

LABELS = ("label", "target", "y")  # names of a label column
MOST_STRINGS = 2**22  # of all vocabularies together: each takes about 130 bytes of memory, and half a gigabyte is enough
_CHUNK = 2**16  # rows at once, of arrays on disk


def convert(kind, train, test, folder, told, label=None, missing=None, hash_strings=None):
    """Writes the rows of files as arrays in a folder, in the byte order of this machine, the last index fastest.

    `HALF-numbers.float32` has shape [n, c]: the columns of numbers in the order of the files, then those of strings;
    `HALF-ids.int64` [n, k]: columns of whole numbers beyond 2**24, if there are any; `HALF-labels.int32` or `.float32` [n], or
    [n, m] for lists; HALF is train or test. `vocabulary-NAME.json` lists the strings of a column, each in the place of its
    number. A hashed string is the number that `tf.strings.to_hash_bucket_fast(string, hash_strings)` gives.

    Args:
      kind: "csv", "parquet" or "arrow".
      train: paths of the files, with the same columns.
      test: paths of the test files; [] if every tenth row of a training file is for the test.
      folder: path of an empty folder.
      told: a function of the bytes read so far and the bytes of all files, called now and then. Where a later row changes the
        type of a column, the files are read once more, from 0 bytes on.
      label: name of the label column; None: that called label, target or y, or else the last.
      missing: replacement of empty values: "0", "mean" of the training rows, or None, to refuse them.
      hash_strings: number of buckets for strings, or None.

    Returns:
      A dict for JSON: rows, numbers, ids, labels, columns, label, classes, notes.

    Raises:
      UserError: if the data cannot be used.
    """
    try:
        from common.data import table_columns
        from common.data.columnar_files import ArrowFile, ParquetFile
        from common.data.csv_files import CsvFile
    except ImportError:
        raise UserError("files of CSV, Parquet and Arrow need pyarrow, which is not installed: pip install pyarrow") from None
    kinds: dict[str, str] = {}
    file_type: Any = {"csv": CsvFile, "parquet": ParquetFile, "arrow": ArrowFile}[kind]

    def opened():
        return [(file_type(path, kinds), half) for half, paths in (("train", train), ("test", test)) for path in paths]

    first, *others = [file for file, _ in opened()]
    chosen = _label_of(first, label)
    for file in others:
        if different := sorted(set(file.names) ^ set(first.names)):
            has = "has" if different[0] in file.names else "lacks"
            raise UserError(f"{file.path} {has} the column {different[0]!r}, unlike {first.path}: expected the same columns")
    columns = [table_columns.Column(name, missing, hash_strings, is_label=name == chosen) for name in first.names]
    while True:
        conversion = _Conversion(columns, folder)
        try:
            conversion.read(opened(), table_columns.Batch, told)
            return conversion.finish()
        except _Again:
            conversion.remove()


class _Again(Exception):
    """The rows are to be read from the beginning: a later one has changed the places of columns in the arrays."""


def _label_of(file, label):
    """Returns the name of the label column, or raises `UserError`."""
    if label is not None:
        if label not in file.names:
            raise UserError(f"--label={label}: {file.path} has the columns {listed(file.names)}")
        return label
    known = [name for name in file.names if name.lower() in LABELS]
    if len(known) > 1:
        raise UserError(f"{file.path} has the columns {known[0]!r} and {known[1]!r}: name the label, with --label=NAME")
    return known[0] if known else file.names[-1]


class _Layout(NamedTuple):
    """Places of the columns in the arrays: {name: (array, first place)}; widths and types of these; the columns of strings."""

    places: dict[str, tuple[str, int]]
    widths: dict[str, int]
    types: dict[str, str]
    strings: list[str]


def _layout_of(columns):
    places, widths, types = {}, {"numbers": 0, "ids": 0}, {"numbers": "float32", "ids": "int64"}
    for column in sorted(columns, key=lambda column: column.kind == "string"):
        array = "labels" if column.is_label else "ids" if column.of_ids else "numbers"
        places[column.name] = array, widths.get(array, 0)
        widths[array] = widths.get(array, 0) + column.width
        if column.is_label:
            types["labels"] = "float32" if column.kind == "float" else "int32"
    return _Layout(places, widths, types, [column.name for column in columns if column.kind == "string"])


class _Conversion:
    """One pass over the files; arrays in the folder.

    Args:
      columns: a `table_columns.Column` each. They know from earlier passes which arrays they need.
      folder: where the arrays go.
    """

    def __init__(self, columns, folder):
        self._columns, self._folder = columns, folder
        self._label = next(column for column in columns if column.is_label)
        self._inputs = [column for column in columns if not column.is_label]
        self._rows, self._notes = {"train": 0, "test": 0}, []
        self._layout: Any = None
        self._files: dict[tuple[str, str], Any] = {}
        for column in columns:
            column.begin()

    def _path(self, half, array):
        return self._folder / f"{half}-{array}.{self._layout.types[array]}"

    def _arrays(self):
        return [(half, array) for half in self._rows for array, width in self._layout.widths.items() if width]

    def remove(self):
        """Removes the arrays."""
        for each in self._arrays():
            self._path(*each).unlink()

    def read(self, files, batch_type, told):
        """Writes the rows of all files, pairs of a file and "train" or "test", into the arrays."""
        sizes = [os.path.getsize(file.path) for file, _ in files]
        has_test, before, total = any(half == "test" for _, half in files), 0, sum(sizes)
        try:
            for (file, half), size in zip(files, sizes):
                rows = 0
                for arrays, done in file.batches():
                    count = len(next(iter(arrays.values())))
                    numbers = np.arange(rows, rows + count)
                    held = np.full(count, half == "test") if has_test else numbers % HELD == HELD - 1
                    if count:
                        self._add(arrays, batch_type(file.path, rows, held))
                    rows += count
                    told(before + done, total)
                before += size
                self._notes += [note for note in file.notes if note not in self._notes]
        finally:
            for each in self._files.values():
                each.close()
        if not self._rows["train"]:
            raise UserError(f"{files[0][0].path} has no rows to train with: expected rows after its header line")
        if not self._rows["test"]:
            if has_test:
                raise UserError(f"{files[-1][0].path} has no rows to test with: expected rows after its header line")
            raise UserError(f"every {HELD}th row of a file is for the test, but no file has {HELD} rows: give --test_data")

    def _add(self, arrays, batch):
        """Writes a batch, {name: array of pyarrow}, or raises `_Again` if the columns need other places than before."""
        values = {column.name: column.look(arrays[column.name], batch) for column in self._columns}
        layout = _layout_of(self._columns)
        if self._layout is None:
            self._layout = layout
            self._files = {each: open(self._path(*each), "wb") for each in self._arrays()}
        elif layout != self._layout:
            raise _Again
        found = {name: np.empty([len(batch.held), n], layout.types[name]) for name, n in layout.widths.items() if n}
        for column in self._columns:
            array, at = layout.places[column.name]
            numbers = column.numbers(values[column.name], batch)
            found[array][:, at : at + column.width] = numbers.reshape(len(numbers), -1)
        if sum(len(column.words) for column in self._columns) > MOST_STRINGS:
            most = max(self._columns, key=lambda column: len(column.words))
            way_out = "name another by --label" if most.is_label else "hash them, with --hash_strings=BUCKETS"
            raise UserError(f"the columns hold more than {MOST_STRINGS:,} strings, {most.name!r} most of them: {way_out}")
        for half, chosen in (("train", ~batch.held), ("test", batch.held)):
            count = int(np.count_nonzero(chosen))
            self._rows[half] += count
            for array, rows in found.items():
                self._files[half, array].write((rows if count == len(rows) else rows[chosen]).data)  # tofile hides a full disk

    def finish(self):
        """Fills empty values with means, sorts classes, writes vocabularies; returns the result of `convert`."""
        for column in self._columns:
            column.finish()
        self._fill_means()
        layout, of_label = self._layout, self._label
        classes = self._sort_classes() if of_label.kind == "string" else None
        return {
            "rows": self._rows,
            "numbers": layout.widths["numbers"],
            "ids": layout.widths["ids"],
            "labels": {"dtype": layout.types["labels"], "width": of_label.width if of_label.shape else None},
            "columns": [self._about(column) for column in self._inputs],
            "label": of_label.name,
            "classes": classes,
            "notes": [self._label_note(classes), *self._notes, *_notes_of(self._inputs)],
        }

    def _label_note(self, classes):
        note = f"label: the column {self._label.name!r}"
        if classes is None:
            return note
        more = f", and {len(classes) - 5:,} more" if len(classes) > 5 else ""
        first = ", ".join(f"{name!r} is {i}" for i, name in enumerate(classes[:5]))
        return f"{note}, {len(classes):,} class{'es' * (len(classes) != 1)}: {first}{more}"

    def _about(self, column):
        array, at = self._layout.places[column.name]
        vocabulary, is_string = None, column.kind == "string"
        if is_string and not column.buckets:
            safe = re.sub(r"[^\w.-]", "_", column.name)[:100]
            number = "" if safe == column.name else f"-{self._inputs.index(column)}"  # for names that are equal from here on
            vocabulary = f"vocabulary-{safe}{number}.json"
            with open(self._folder / vocabulary, "w", encoding="utf-8") as file:
                json.dump(list(column.words), file, ensure_ascii=False)
        return {
            "name": column.name,
            "kind": column.kind,
            "array": array,
            "at": at,
            "width": column.width,
            "is_list": bool(column.shape),
            "most": column.most if column.kind == "int" else None,
            "vocabulary": vocabulary,
            "buckets": column.buckets if is_string else None,
        }

    def _fill_means(self):
        for column in self._inputs:
            if column.filled and column.missing == "mean" and column.kind != "string":
                array, at = self._layout.places[column.name]

                def fill(rows, column=column, at=at):
                    own = rows[:, at : at + column.width]
                    np.copyto(own, column.mean().astype(rows.dtype), where=column.is_empty(own))

                self._change(array, fill)

    def _sort_classes(self):
        """Renumbers the classes of text labels in alphabetical order; returns their texts."""
        classes = sorted(self._label.words)
        number = {name: i for i, name in enumerate(classes)}
        numbers = np.array([number[name] for name in self._label.words], np.int32)

        def renumber(labels):
            labels[:] = numbers[labels]

        self._change("labels", renumber)
        return classes

    def _change(self, array, change):
        """Calls `change` with each chunk [rows, width] of an array of both halves, to change it in place."""
        width, dtype = self._layout.widths[array], self._layout.types[array]
        for half in self._rows:
            with open(self._path(half, array), "r+b") as file:
                while data := file.read(_CHUNK * width * np.dtype(dtype).itemsize):
                    rows = np.frombuffer(bytearray(data), dtype).reshape(-1, width)
                    change(rows)
                    file.seek(-len(data), os.SEEK_CUR)
                    file.write(rows.data)


def _notes_of(columns):
    """Returns sentences on strings and on filled values."""
    notes, names = [], [column.name for column in columns if column.kind == "string"]
    if names:
        buckets = columns[0].buckets
        how = f"hashed into {buckets:,} buckets" if buckets else "by a vocabulary each"
        notes.append(f"strings as whole numbers, {how}: {listed(names)}")
    for column in columns:
        if column.filled:
            value = "an empty string" if column.kind == "string" else "0"
            if column.missing == "mean" and column.kind != "string":
                value = "means" if column.shape else f"the mean, {column.mean()[0]:.6g}"
            notes.append(f"filled: {column.filled:,} empty value{'s' * (column.filled != 1)} of {column.name!r} with {value}")
    return notes
