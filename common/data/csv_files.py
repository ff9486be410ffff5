"""CSV files: their rows as arrays of pyarrow, read in parallel block by block; the kinds of columns come from the values."""

import collections
import concurrent.futures
import contextlib
import gzip
import os
import re
import zlib

import numpy as np
import pyarrow
import pyarrow.compute as compute
import pyarrow.csv

from common.core import UserError
from common.data.csv_header import LINE, NOT_UTF8, NUMBER, read_header
from common.data.table_columns import kind_of, merged, refuse_type
from common.data.user_functions import one_line

BLOCK = 2**22  # bytes read at once
THREADS = len(os.sched_getaffinity(0))
_TYPES = {
    "int": pyarrow.int64(),
    "float": pyarrow.float64(),
    "bool": pyarrow.bool_(),
    "string": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
}
_OPEN_QUOTE = "a quote that is not closed in its line; close it, or replace line ends in values"
# Patterns for a whole value
_BOOL = r"^\s*(true|True|TRUE|false|False|FALSE|0|1)\s*$"
_WITH_THOUSANDS = r"^\s*[+-]?(\d{1,3}|[1-9]\d{0,2}(,\d{3})+)(\.\d+)?\s*$"
_WITH_DECIMALS = r"^\s*[+-]?\d+,\d+([eE][+-]?\d+)?\s*$"
_WITH_POINT = re.compile(rb"[;\t|\n\"][+-]?\d*\.\d+[;\t|\r\n\"]")  # in a line
_AMOUNT = r"^\s*\p{Sc}?\s*[+-]?\s*\p{Sc}?\d[\d.,]*\s*[%\p{Sc}]?\s*$"  # with a sign of a currency
_DATE = r"^\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})([T ].*)?$"


class _WrongRow(Exception):
    """A problem with a row of a block: the number of the row, from 0, and the problem."""


class CsvFile:
    """A CSV file, perhaps compressed by gzip.

    Args:
      path: its path.
      kinds: {name of a column: kind, see `table_columns.kind_of`} as known from other files; this one adds to it.

    Attributes:
      names: names of the columns, without an index.
      notes: sentences about the file, complete after it was read.

    Raises:
      UserError: if it cannot be read, or has no header line.
    """

    def __init__(self, path, kinds):
        self.path, self._kinds = path, kinds
        with self._open() as (_, file):
            self._header = read_header(path, file)
        index, mark = self._header.index_name, self._header.delimiter
        self.names = self._header.columns[0 if index is None else 1 :]
        self.notes = [] if mark == "," else [f"delimiter: {'tab' if mark == chr(9) else repr(mark)}"]
        if index is not None:
            self.notes.append(f"left out: the column {index!r} (an index)")
        self._decimal, self._has_points = ".", mark == ","  # whether numbers have a decimal point for sure
        self._with_thousands: set[str] = set()  # columns of numbers such as 1,234
        self._rows = 0  # of the blocks before
        self._first = 0  # number in the index

    @contextlib.contextmanager
    def _open(self):
        """A context that gives the file, and the same uncompressed; an error in it becomes a `UserError` of one line."""
        try:
            with open(self.path, "rb") as file:
                is_compressed = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                yield file, gzip.open(file) if is_compressed else file
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise UserError(f"{self.path} is truncated or damaged, and cannot be uncompressed: copy it again") from None
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{self.path} cannot be read: {one_line(error)}") from None

    def batches(self):
        """Yields ({name: array of pyarrow}, bytes read) for the rows, some at once, in their order."""
        with self._open() as (packed, file), concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            waiting: collections.deque = collections.deque()
            for block in self._blocks(file):
                waiting.append((block, self._decimal, pool.submit(self._read, block, *self._options()), packed.tell()))
                if len(waiting) > THREADS:
                    yield self._settled(*waiting.popleft())
            while waiting:
                yield self._settled(*waiting.popleft())

    def _blocks(self, file):
        """Yields the bytes of the file after the header, some whole lines at once."""
        file.seek(self._header.end)
        rest = b""
        while data := file.read(BLOCK):
            end = data.rfind(b"\n") + 1
            if end:
                yield rest + data[:end]
            rest = data[end:] if end else rest + data
            if len(rest) > BLOCK + LINE:
                raise UserError(f"{self.path} is no CSV file: expected lines of at most {LINE:,} bytes")
        if rest:
            yield rest

    def _options(self):
        """Returns {name: type} for the columns of known kinds, and the decimal point."""
        types = {name: _TYPES[kind] for name in self.names if (kind := self._kinds.get(name))}
        return types | dict.fromkeys(self._with_thousands, _TYPES["string"]), self._decimal

    def _read(self, block, types, decimal):
        """Returns {name: array} of a block, or raises `_WrongRow`. If a value is not of its type, all types are inferred."""
        if not block.isascii():
            try:
                block.decode()
            except UnicodeDecodeError as error:
                lines = block[: error.start].split(b"\n")[:-1]
                raise _WrongRow(sum(_is_row(line) for line in lines), f"is {NOT_UTF8}") from None
        try:
            table = self._parsed(block, types, decimal)
        except pyarrow.ArrowInvalid:
            table = self._parsed(block, {}, decimal)
        arrays = [column.combine_chunks() for column in table.columns]
        arrays = [array.dictionary_encode() if pyarrow.types.is_string(array.type) else array for array in arrays]
        if b'"' in block:
            for array in arrays:
                _refuse_where(array, r"[\r\n]", f"has {_OPEN_QUOTE}")
        if b"#" in block:
            problem = "begins with #, but has as many values as a row: remove the comment, or put another column first"
            _refuse_where(arrays[0], "^#", problem)
        return dict(zip(table.column_names, arrays))

    def _parsed(self, block, types, decimal):
        """Returns a block as a table; raises `_WrongRow`, or pyarrow's error on values that are not of these types."""
        comments, wrong = 0, None

        def of_other_length(row):
            nonlocal comments, wrong
            if row.text.startswith("#") and "\n" not in row.text.strip():
                comments += 1
                return "skip"
            wrong = wrong or (row.number - 1 - comments, row)
            return "error"

        header = self._header
        parsing = pyarrow.csv.ParseOptions(delimiter=header.delimiter, invalid_row_handler=of_other_length)
        reading = pyarrow.csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=header.columns)
        converting = pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True, decimal_point=decimal)
        try:
            return pyarrow.csv.read_csv(pyarrow.BufferReader(block), reading, parsing, converting)
        except pyarrow.ArrowInvalid:
            if wrong is None:
                raise
            i, row = wrong
            values = f"{row.actual_columns} value{'s' * (row.actual_columns != 1)}"
            hint = f": {_OPEN_QUOTE}" if "\n" in row.text.strip() else ""
            raise _WrongRow(i, f"has {values}, expected {len(header.columns)}{hint}") from None

    def _settled(self, block, decimal, future, done):
        """Returns ({name: array}, `done`) of a block; reads it again if kinds or decimal point are now known to be others."""
        try:
            found = future.result() if decimal == self._decimal else self._read(block, *self._options())
            if not self._learn(found, block):
                found = self._read(block, *self._options())
                self._learn(found, block)
            kinds = {name: kind for name, kind in self._kinds.items() if kind in ("bool", "string")}
            if any(kind_of(found[name].type) not in (kind, None) for name, kind in kinds.items()):
                found = self._read(block, *self._options())  # now as these kinds
        except _WrongRow as error:
            i, problem = error.args
            raise UserError(f"{self.path}: row {self._rows + i + 1:,} {problem}") from None
        if self._header.index_name is not None:
            self._check_index(found[self._header.index_name])
        self._rows += len(found[self.names[0]])
        for name in self._with_thousands:
            found[name] = _without_commas(found[name], _TYPES[self._kinds[name]])
        return {name: found[name] for name in self.names}, done

    def _learn(self, found, block):
        """Adds the kinds of the arrays of a block to those known, or raises `UserError`.

        Returns False if the block is to be read again, with a decimal comma.
        """
        if self._decimal == "." and not self._has_points:
            self._has_points = bool(_WITH_POINT.search(b"\n" + block + b"\n"))
        for name in self.names:
            kind, known = kind_of(found[name].type), self._kinds.get(name)
            if known == "string" or kind is None:
                continue
            if kind == "string":
                kind = self._kind_of_strings(name, found[name], block)
                if kind is None:
                    return False
            elif kind == "" and known is None:
                refuse_type(self.path, name, found[name].type)
            if known == "bool" and kind == "int" and set(compute.unique(found[name]).to_pylist()) <= {0, 1, None}:
                continue
            if (both := merged(known, kind)) == "":
                self._refuse_string(name, block)
            self._kinds[name] = both
        return True

    def _kind_of_strings(self, name, array, block):
        """Returns the kind of a column that pyarrow reads as strings: "string", or "int" or "float" for numbers with commas.

        It is "" if some of the strings are numbers, at least half of the different ones, or the column was no string before.
        Returns None if numbers have a decimal comma; from then on this is known.
        """
        known, words = self._kinds.get(name), array.dictionary
        if not len(words):
            return known
        in_thousands, with_comma = _match(_WITH_THOUSANDS, words), _match(_WITH_DECIMALS, words)
        if known is None and (_match(self._number, words) | in_thousands | with_comma).mean() < 0.5:
            self._check_words(name, words)
            return "string"
        if known == "bool" or self._decimal == ",":
            return ""
        if not self._has_points and with_comma.any():
            if (with_comma & ~in_thousands).any():
                self._decimal = ","
                self.notes.append("decimals: with a comma")
                return None
            self._refuse_string(name, block, "a number with a decimal comma, or thousands: write it without the comma")
        if not in_thousands.all():
            return ""
        if name not in self._with_thousands:
            self._with_thousands.add(name)
            self.notes.append(f"thousands: the commas in {name!r} are left out")
        return "float" if _match(r"\.", words).any() else "int"

    def _check_words(self, name, words):
        """Raises a `UserError` if all strings of a column are dates or amounts, or one is the name of the column."""
        problems = {_DATE: "a date: turn dates into numbers, as days since one", _AMOUNT: "an amount: write its number alone"}
        for pattern, problem in problems.items():
            if _match(pattern, words).all():
                text = words[0].as_py()
                raise UserError(f"{self.path}: the column {name!r} holds {text!r}, {problem}, or leave the column out")
        if self._rows == 0 and name in words.to_pylist():
            raise UserError(f"{self.path} has no header line: {name!r} is the name of a column, and one of its values")

    @property
    def _number(self):
        return NUMBER if self._decimal == "." else NUMBER.replace(r"\.", ",")

    def _refuse_string(self, name, block, problem=""):
        """Raises a `UserError` on the first value of a column in a block that is not of the column's kind."""
        known = self._kinds.get(name)
        pattern = _BOOL if known == "bool" else _WITH_THOUSANDS if name in self._with_thousands else self._number
        array = self._read(block, dict.fromkeys(self.names, _TYPES["string"]), self._decimal)[name]
        fits = compute.match_substring_regex(array.dictionary, pattern).take(array.indices)
        i = compute.index(fits, pyarrow.scalar(False)).as_py()
        text = array[max(i, 0)].as_py()
        expected = "true or false" if known == "bool" else "a number"
        way_out = "correct it, or leave it empty and give --missing; in a column of texts, begin each with a letter"
        if known != "bool" and re.match(NUMBER, text.replace(",", "")):
            mark = "point" if self._decimal == "." else "comma"
            expected, way_out = f"a number with a decimal {mark}", "write all numbers so, and without other marks"
        problem = problem or f"expected {expected}, as in other rows: {way_out}"
        raise UserError(f"{self.path}: the column {name!r}, row {self._rows + max(i, 0) + 1:,}, holds {text!r}, {problem}")

    def _check_index(self, array):
        """Raises a `UserError` unless the first column of a block numbers the rows."""
        index, wrong = self._header.index_name, np.arange(min(1, len(array)))
        if kind_of(array.type) == "int" and not array.null_count:
            numbers = array.to_numpy()
            self._first = numbers[0] if self._rows == 0 else self._first
            wrong = np.flatnonzero(numbers != self._first + self._rows + np.arange(len(numbers)))
        if len(wrong):
            way_out = "name it, or leave it out, as with to_csv(index=False)"
            row = self._rows + wrong[0] + 1
            raise UserError(f"{self.path}: the first column, {index!r}, row {row:,}, does not number the rows: {way_out}")


def _is_row(line):
    return bool(line.strip()) and not line.startswith(b"#")


def _match(pattern, words):
    """Returns which of the strings contain a pattern, bool [n]."""
    return np.asarray(compute.match_substring_regex(words, pattern))


def _refuse_where(array, pattern, problem):
    """Raises `_WrongRow` on the first string that contains a pattern, in an array of strings."""
    if kind_of(array.type) == "string":
        found = compute.match_substring_regex(array.dictionary, pattern)
        if compute.any(found).as_py():
            raise _WrongRow(compute.index(found.take(array.indices), pyarrow.scalar(True)).as_py(), problem)


def _without_commas(array, kind):
    """Returns an array of strings such as 1,234 as numbers of a type."""
    if kind_of(array.type) != "string":
        return array
    words = compute.utf8_trim_whitespace(compute.replace_substring(array.dictionary, ",", ""))
    return words.cast(kind).take(array.indices)
