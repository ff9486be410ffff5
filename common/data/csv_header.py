"""Beginning of a CSV file: comments, the header line with the names of the columns, the delimiter."""

import csv
import re
from typing import NamedTuple

from common.core import UserError

NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
LINE = 2**24  # bytes of a line, at most
NOT_UTF8 = "not UTF-8: convert the file, as with `iconv -f latin1 -t utf8`"
_DELIMITERS = ",;\t|"
_INDEX = "", "Unnamed: 0"  # names of an index in files by pandas
_NO_TEXT = b"PAR1", b"PK\x03\x04"  # Parquet, zip


class Header(NamedTuple):
    """The names of all columns, the delimiter, the place after the header line in bytes, and that of an index, or None."""

    columns: list[str]
    delimiter: str
    end: int
    index_name: str | None


def read_header(path, file):
    """Returns the `Header` of an open file of bytes, or raises `UserError`."""
    header, comment, end = "", "", 0
    following = ""
    while not following and (line := file.readline(LINE)):
        text = _text(path, line)
        if text.startswith("#") or not text.strip():
            comment = comment if header else text.strip()
        elif header:
            following = text
        elif text.lstrip()[0] in "{[<":
            raise UserError(f"{path} is no CSV file: it begins with {text.strip()[:50]!r}")
        elif text.count('"') % 2:
            raise UserError(f"{path}: a quote in its header line is not closed there")
        else:
            header, end = text, file.tell()
    if not header:
        raise UserError(f"{path} is empty: expected a header line, then rows")
    delimiter = _delimiter_of(path, header, following)
    columns = [name.strip() for name in _fields(header, delimiter)]
    _check_names(path, columns, comment)
    return Header(columns, delimiter, end, columns[0] if columns[0] in _INDEX else None)


def _text(path, line):
    """Returns a line of bytes as text, or raises `UserError`."""
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path} is UTF-16: convert it, as with `iconv -f utf16 -t utf8`")
    if b"\0" in line or len(line) >= LINE or line.startswith(_NO_TEXT):
        raise UserError(f"{path} is no CSV file: expected lines of text")
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: a line at its beginning is {NOT_UTF8}") from None
    if "\r" in text.rstrip("\r\n"):
        raise UserError(f"{path}: its lines end with CR alone: convert it, as with `tr '\\r' '\\n'`")
    return text


def _fields(line, delimiter):
    try:
        return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error:  # a value is too long for it
        return [line]


def _delimiter_of(path, header, following):
    """Returns the delimiter: of those in the header line that fit the next line, the one with the most columns."""
    columns = {mark: len(_fields(header, mark)) for mark in _DELIMITERS if len(_fields(header, mark)) > 1}
    fitting = {mark: n for mark, n in columns.items() if len(_fields(following, mark)) == n} or columns
    best = [mark for mark, n in fitting.items() if n == max(fitting.values())]
    if len(best) > 1:
        raise UserError(f"{path}: the delimiter may be {best[0]!r} or {best[1]!r}: expected one of them in the header line")
    return best[0] if best else ","


def _check_names(path, names, comment):
    """Raises a `UserError` unless the names of the columns can be used; the first may be that of an index."""
    if all(re.match(NUMBER, name) for name in names):
        hint = f"; the line before, {comment[:50]!r}, is a comment" if comment else ""
        raise UserError(f"{path} has no header line: it begins with {', '.join(names[:5])}; name the columns there{hint}")
    if len(names) - (names[0] in _INDEX) < 2:
        raise UserError(f"{path} has only one column, {names[-1][:50]!r}: expected several, separated by , ; | or tabs")
    for i, name in enumerate(names):
        if name in names[:i]:
            raise UserError(f"{path} has two columns of one name, {name!r}: rename one")
        if not name and i:
            raise UserError(f"{path} has a column without a name, number {i + 1}: name it, or leave it out")
