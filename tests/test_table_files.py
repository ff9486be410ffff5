"""Files of CSV, Parquet and Arrow as people have them, and what comes of each: arrays on disk, or one line."""

import datetime
import decimal
import gzip
import json
import os
from typing import Any

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from common.core import UserError
from common.data import columnar_files, csv_files, table_files
from common.data.table_files import convert


class Converted:
    """Files written and converted; of each half, {name of a column: its values in Python}."""

    def __init__(self, folder, train, test=None, told=lambda done, of_all: None, **flags):
        """`train` and `test` are contents of files, text, bytes or tables; without `test`, it is the training files."""
        self.folder = folder / "arrays"
        self.folder.mkdir()
        paths = [write(folder, f"{i}", content) for i, content in enumerate(train)]
        of_test = paths if test is None else [write(folder, f"test-{i}", content) for i, content in enumerate(test)]
        self.about = convert(paths[0].rpartition(".")[2], paths, of_test, self.folder, told, **flags)
        self.notes = self.about["notes"]

    def array(self, half, name):
        """An array of a half, `[rows, width]`."""
        found = list(self.folder.glob(f"{half}-{name}.*"))
        if not found:
            return None
        return np.fromfile(found[0], found[0].suffix[1:]).reshape(self.about["rows"][half], -1)

    def __getitem__(self, half):
        columns, classes = {}, self.about["classes"]
        for column in self.about["columns"]:
            array = self.array(half, column["array"])[:, column["at"] : column["at"] + column["width"]]
            values = array.tolist() if column["is_list"] else array[:, 0].tolist()
            if column["vocabulary"]:
                words = json.loads((self.folder / column["vocabulary"]).read_text())
                values = [words[int(value)] for value in values]
            columns[column["name"]] = values
        labels = self.array(half, "labels")
        labels = labels.tolist() if self.about["labels"]["width"] else labels[:, 0].tolist()
        columns[self.about["label"]] = [classes[label] for label in labels] if classes else labels
        return columns


class Arrow(dict):
    """The content of an Arrow file, written by one of `ARROW`."""

    how = "file"


def write_stream(table, path):
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


ARROW = {
    "file": lambda table, path: pyarrow.feather.write_feather(table, path, compression="uncompressed", chunksize=2),
    "compressed": lambda table, path: pyarrow.feather.write_feather(table, path, compression="zstd"),
    "stream": write_stream,
}


def write(folder, name, content):
    """Writes a file; returns its path."""
    path = folder / f"{name}.csv"
    if isinstance(content, Arrow):
        path = path.with_suffix(".arrow")
        ARROW[content.how](pyarrow.table(dict(content)), str(path))
    elif isinstance(content, dict):
        path = path.with_suffix(".parquet")
        pyarrow.parquet.write_table(pyarrow.table(content), path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.fixture
def converted(tmp_path):
    """A function that writes files and converts them."""
    return lambda *train, **others: Converted(tmp_path, train, **others)


PLAIN = {"a": [1, 3], "b": [2.5, 4], "y": [0, 1]}
# {file: (its content, flags, {column: values}, notes beside that of the label)}
GOOD: dict[str, Any] = {
    "plain": ("a,b,y\n1,2.5,0\n3,4,1\n", {}, PLAIN, []),
    "without a last line end": ("a,b,y\n1,2.5,0\n3,4,1", {}, PLAIN, []),
    "CRLF": ("a,b,y\r\n1,2.5,0\r\n3,4,1\r\n", {}, PLAIN, []),
    "a byte-order mark": ("\ufeffa,b,y\n1,2.5,0\n3,4,1\n", {}, PLAIN, []),
    "spaces": ("a, b, y\n1, 2.5, 0\n3, 4, 1\n", {}, PLAIN, []),
    "quotes": ('"a","b","y"\n"1","2.5","0"\n"3","4","1"\n', {}, PLAIN, []),
    "empty lines": ("\na,b,y\n\n1,2.5,0\n\n3,4,1\n\n", {}, PLAIN, []),
    "comments": ("# of a lab, in 2024\n#\na,b,y\n# rows:\n1,2.5,0\n# more, \"and\" more, of them, all\n3,4,1\n", {}, PLAIN, []),
    "semicolons": ("a;b;y\n1;2.5;0\n3;4;1\n", {}, PLAIN, ["delimiter: ';'"]),
    "tabs": ("a\tb\ty\n1\t2.5\t0\n3\t4\t1\n", {}, PLAIN, ["delimiter: tab"]),
    "bars": ("a|b|y\n1|2.5|0\n3|4|1\n", {}, PLAIN, ["delimiter: '|'"]),
    "a delimiter in quotes": ('a,"b;c;d",y\n1,2.5,0\n3,4,1\n', {}, {"a": [1, 3], "b;c;d": [2.5, 4], "y": [0, 1]}, []),
    "decimal commas": ("a;b;y\n1;2,5;0\n3;4;1\n", {}, PLAIN, ["delimiter: ';'", "decimals: with a comma"]),
    "decimal commas of three digits": (
        "a;b;y\n1;1,125;0\n3;0,250;1\n",
        {},
        {"a": [1, 3], "b": [1.125, 0.25], "y": [0, 1]},
        ["delimiter: ';'", "decimals: with a comma"],
    ),
    "thousands": (
        'a,b,y\n"1,234",2.5,0\n"1,234,567",4,1\n999,4,1\n',
        {},
        {"a": [1234, 1234567, 999], "b": [2.5, 4, 4], "y": [0, 1, 1]},
        ["thousands: the commas in 'a' are left out"],
    ),
    "thousands beside decimal points": (
        "a;b;y\n1,234;2.5;0\n3,456.5;4;1\n",
        {},
        {"a": [1234, 3456.5], "b": [2.5, 4], "y": [0, 1]},
        ["delimiter: ';'", "thousands: the commas in 'a' are left out"],
    ),
    "gzip": (gzip.compress(b"a,b,y\n1,2.5,0\n3,4,1\n"), {}, PLAIN, []),
    "true and false": ("a,b,y\ntrue,True,FALSE\nfalse,False,TRUE\n", {}, {"a": [1, 0], "b": [1, 0], "y": [0, 1]}, []),
    "text labels": (
        "a,b,y\n1,2,no\n3,4,\u00e9t\u00e9\n5,6,no\n",
        {},
        {"a": [1, 3, 5], "b": [2, 4, 6], "y": ["no", "\u00e9t\u00e9", "no"]},
        [],
    ),
    "fractions as labels": ("a,b,y\n1,2,0.5\n3,4,1\n", {}, {"a": [1, 3], "b": [2, 4], "y": [0.5, 1]}, []),
    "the label by its name": ("a,Target,b\n1,0,2.5\n3,1,4\n", {}, {"a": [1, 3], "b": [2.5, 4], "Target": [0, 1]}, []),
    "the label by its flag": ("label,y,b\n1,0,2.5\n3,1,4\n", {"label": "b"}, {"label": [1, 3], "y": [0, 1], "b": [2.5, 4]}, []),
    "an index": (",a,b,y\n0,1,2.5,0\n1,3,4,1\n", {}, PLAIN, ["left out: the column '' (an index)"]),
    "a part of an index": (
        "Unnamed: 0,a,b,y\n70,1,2.5,0\n71,3,4,1\n",
        {},
        PLAIN,
        ["left out: the column 'Unnamed: 0' (an index)"],
    ),
    "strings": (
        "a,b,y\nx,2.5,0\n7,4,1\nx y,4,1\n",
        {},
        {"b": [2.5, 4, 4], "a": ["x", "7", "x y"], "y": [0, 1, 1]},
        ["strings as whole numbers, by a vocabulary each: 'a'"],
    ),
    "empty values as 0": (
        "a,b,y\n,NA,0\n3,4.5,1\n",
        {"missing": "0"},
        {"a": [0, 3], "b": [0, 4.5], "y": [0, 1]},
        ["filled: 2 empty values of 'a' with 0", "filled: 2 empty values of 'b' with 0"],
    ),
    "empty values as means": (
        "a,b,c,y\n,NaN,true,0\n3,4.5,null,1\n4,1,true,1\n4,1,false,1\n",
        {"missing": "mean"},
        {"a": [4, 3, 4, 4], "b": [pytest.approx(6.5 / 3), 4.5, 1, 1], "c": [1, 1, 1, 0], "y": [0, 1, 1, 1]},
        [
            "filled: 2 empty values of 'a' with the mean, 4",
            "filled: 2 empty values of 'b' with the mean, 2.16667",
            "filled: 2 empty values of 'c' with the mean, 1",
        ],
    ),
    "an empty string": (
        "a,b,y\n,2.5,0\nx,4,1\n",
        {"missing": "mean"},
        {"b": [2.5, 4], "a": ["", "x"], "y": [0, 1]},
        ["strings as whole numbers, by a vocabulary each: 'a'", "filled: 2 empty values of 'a' with an empty string"],
    ),
    "ids": (
        "user,b,y\n9223372036854775807,2.5,0\n16777217,4,1\n",
        {},
        {"user": [9223372036854775807, 16777217], "b": [2.5, 4], "y": [0, 1]},
        [],
    ),
    "measurements": ("a,b,y\n16777217,2.5,0\n1.5,4,1\n", {}, {"a": [16777216, 1.5], "b": [2.5, 4], "y": [0, 1]}, []),
    "years as names": ("2023,2024,y\n1,2.5,0\n3,4,1\n", {}, {"2023": [1, 3], "2024": [2.5, 4], "y": [0, 1]}, []),
    # Parquet
    "a table": (PLAIN, {}, PLAIN, []),
    "an index of pandas": (
        PLAIN | {"__index_level_0__": [5, 7]},
        {},
        PLAIN,
        ["left out: the column '__index_level_0__' (an index)"],
    ),
    "lists": (
        {"a": [[1.5, 2], [3, 4]], "i": [[1, 2], [3, 4]], "y": [[0.5, 1], [2, 3]]},
        {},
        {"a": [[1.5, 2], [3, 4]], "i": [[1, 2], [3, 4]], "y": [[0.5, 1], [2, 3]]},
        [],
    ),
    "lists of fixed size": (
        {"a": pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int8(), 2)), "y": [True, False]},
        {},
        {"a": [[1, 2], [3, 4]], "y": [1, 0]},
        [],
    ),
    "lists of ids": ({"a": [[2**40, 1], [3, 4]], "y": [0, 1]}, {}, {"a": [[2**40, 1], [3, 4]], "y": [0, 1]}, []),
    "empty lists": (
        {"a": [[1.0, None], None, [3.0, 4.0]], "y": [0, 1, 1]},
        {"missing": "mean"},
        {"a": [[1, 4], [2, 4], [3, 4]], "y": [0, 1, 1]},
        ["filled: 6 empty values of 'a' with means"],
    ),
    "dictionaries": (
        {
            "a": pyarrow.array(["x", "z", "x"]).dictionary_encode(),
            "b": pyarrow.array([7, 8, 7]).dictionary_encode(),
            "y": [0, 1, 1],
        },
        {},
        {"b": [7, 8, 7], "a": ["x", "z", "x"], "y": [0, 1, 1]},
        ["strings as whole numbers, by a vocabulary each: 'a'"],
    ),
    "structs": (
        {"a": [{"p": 1, "q": {"r": 2.5}}, {"p": 3, "q": {"r": 4.0}}], "y": [0, 1]},
        {},
        {"a.p": [1, 3], "a.q.r": [2.5, 4], "y": [0, 1]},
        [],
    ),
    "small types": (
        {
            "a": pyarrow.array(np.array([1.5, 2], "f2"), mask=np.array([True, False])),
            "b": pyarrow.array([2**62, 1], pyarrow.uint64()),
            "y": [0, 1],
        },
        {"missing": "0"},
        {"a": [0, 2], "b": [2**62, 1], "y": [0, 1]},
        ["filled: 2 empty values of 'a' with 0"],
    ),
}
WAYS_OUT = "fill it, or give --missing=0 or --missing=mean"
CORRECT = "correct it, or leave it empty and give --missing; in a column of texts, begin each with a letter"
DATES = "a date or time is no number: turn it into some, as days or seconds since a date, or leave the column out"
HOLDS = "expected numbers, strings, or lists of numbers"
# {file: (its content, flags, the line)}
BAD: dict[str, Any] = {
    "empty": ("", {}, "0.csv is empty: expected a header line, then rows"),
    "a header alone": ("a,b,y\n", {}, "0.csv has no rows to train with: expected rows after its header line"),
    "no header": ("1,2,3\n4,5,6\n", {}, "0.csv has no header line: it begins with 1, 2, 3; name the columns there"),
    "a header as a comment": (
        "#a,b,y\n1,2,3\n4,5,6\n",
        {},
        "0.csv has no header line: it begins with 1, 2, 3; name the columns there; the line before, '#a,b,y', is a comment",
    ),
    "no header, with text": (
        "5.1,3.5,setosa\n4.9,3.0,setosa\n",
        {},
        "0.csv has no header line: 'setosa' is the name of a column, and one of its values",
    ),
    "one column": ("a\n1\n", {}, "0.csv has only one column, 'a': expected several, separated by , ; | or tabs"),
    "spaces as delimiters": (
        "a b\n1 2\n",
        {},
        "0.csv has only one column, 'a b': expected several, separated by , ; | or tabs",
    ),
    "two of one name": ("a,a,y\n1,2,3\n", {}, "0.csv has two columns of one name, 'a': rename one"),
    "no name": ("a,,y\n1,2,3\n", {}, "0.csv has a column without a name, number 2: name it, or leave it out"),
    "no index": (
        ",a,y\n0,1,0\n5,3,1\n",
        {},
        "0.csv: the first column, '', row 2, does not number the rows: name it, or leave it out, as with to_csv(index=False)",
    ),
    "two delimiters": ("a,b;c\n1,2;3\n", {}, "0.csv: the delimiter may be ',' or ';': expected one of them in the header line"),
    "two labels": (
        "label,target,a\n1,2,3\n",
        {},
        "0.csv has the columns 'label' and 'target': name the label, with --label=NAME",
    ),
    "no such label": ("a,b\n1,2\n", {"label": "c"}, "--label=c: 0.csv has the columns 'a', 'b'"),
    "too few values": ("a,b,y\n1,2,3\n# hi\n\n1,2\n", {}, "0.csv: row 2 has 2 values, expected 3"),
    "too many values": ("a,b,y\n1,2,3,4\n", {}, "0.csv: row 1 has 4 values, expected 3"),
    "a comment as long as a row": (
        "a,b,y\n1,2,3\n# so, to, say\n",
        {},
        "0.csv: row 2 begins with #, but has as many values as a row: remove the comment, or put another column first",
    ),
    "an empty value": ("a,b,y\n1,2,3\n1,,3\n", {}, f"0.csv: the column 'b', row 2, is empty: {WAYS_OUT}"),
    "an empty string": (
        "a,b,y\nx,2,3\n,3,3\n",
        {},
        "0.csv: the column 'a', row 2, is empty: fill it, or give --missing=0 for an empty string",
    ),
    "an empty column": (
        "a,b,y\n1,,3\n1,,3\n",
        {"missing": "0"},
        "the column 'b' is empty in all rows: leave it out of the files",
    ),
    "an empty label": (
        "a,b,y\n1,2,3\n1,2,\n",
        {"missing": "0"},
        "0.csv: the column 'y', row 2, is empty: leave the row out, or label it",
    ),
    "infinite": (
        "a,b,y\n1,2,3\n1,-inf,3\n",
        {},
        "0.csv: the column 'b', row 2, holds an infinite value: leave the row out, or write a number",
    ),
    "too large": (
        "a,b,y\n1,2.5,3\n1,1e39,3\n",
        {},
        "0.csv: the column 'b', row 2, holds 1e+39, too large for float32: scale the column",
    ),
    "ids with a point": (
        "a,b,y\n1.0,2,3\n16777217.0,2,3\n",
        {},
        "0.csv: the column 'a', row 2, holds the whole number 16,777,217, which float32 rounds to 16,777,216: "
        "write whole numbers without a point, or scale them",
    ),
    "a class too large": (
        "a,b,y\n1,2,3\n1,2,2147483648\n",
        {},
        "0.csv: the column 'y', row 2, holds the class 2,147,483,648, expected less than 2,147,483,648",
    ),
    "text among numbers": (
        "a,b,y\n1,2,3\n1,two,3\n",
        {},
        f"0.csv: the column 'b', row 2, holds 'two', expected a number, as in other rows: {CORRECT}",
    ),
    "a number with a unit": (
        "a,b,y\n1,2kg,3\n1,2,3\n",
        {},
        f"0.csv: the column 'b', row 1, holds '2kg', expected a number, as in other rows: {CORRECT}",
    ),
    "decimal commas in quotes": (
        'a,b,y\n1,"2,5",3\n1,2,3\n',
        {},
        "0.csv: the column 'b', row 1, holds '2,5', expected a number with a decimal point, as in other rows: "
        "write all numbers so, and without other marks",
    ),
    "both decimal marks": (
        "a;b;y\n1;2.5;3\n1;2,5;3\n",
        {},
        "0.csv: the column 'b', row 2, holds '2,5', expected a number with a decimal point, as in other rows: "
        "write all numbers so, and without other marks",
    ),
    "decimals or thousands": (
        "a;b;y\n1;1,234;3\n",
        {},
        "0.csv: the column 'b', row 1, holds '1,234', a number with a decimal comma, or thousands: write it without the comma",
    ),
    "a date": ("a,b,y\n2024-01-31,2,3\n", {}, f"0.csv: the column 'a' holds date32[day], {HOLDS}: {DATES}"),
    "a time": ("a,b,y\n12:30,2,3\n", {}, f"0.csv: the column 'a' holds time32[s], {HOLDS}: {DATES}"),
    "a date of another order": (
        "a,b,y\n31.1.2024,2,3\n",
        {},
        "0.csv: the column 'a' holds '31.1.2024', a date: turn dates into numbers, as days since one, or leave the column out",
    ),
    "percentages": (
        "a,b,y\n5%,2,3\n7.5%,2,3\n",
        {},
        "0.csv: the column 'a' holds '5%', an amount: write its number alone, or leave the column out",
    ),
    "sums of money": (
        "a,b,y\n-\u20ac5,2,3\n$7.50,2,3\n",
        {},
        "0.csv: the column 'a' holds '-\u20ac5', an amount: write its number alone, or leave the column out",
    ),
    "too large for any type": (
        "a,b,y\n9223372036854775808,2,3\n",
        {},
        "0.csv: the column 'a', row 1, holds the whole number 9,223,372,036,854,775,808, too large for int64: scale the column",
    ),
    "JSON": ('{"a": 1, "b": 2}\n', {}, "0.csv is no CSV file: it begins with '{\"a\": 1, \"b\": 2}'"),
    "latin-1": (
        ("a,b,y\n" + "1,2,3\n" * 2 + "\u00e9,2,3\n").encode("latin-1"),
        {},
        "0.csv: row 3 is not UTF-8: convert the file, as with `iconv -f latin1 -t utf8`",
    ),
    "UTF-16": ("a,b,y\n1,2,3\n".encode("utf-16"), {}, "0.csv is UTF-16: convert it, as with `iconv -f utf16 -t utf8`"),
    "line ends of old": ("a,b,y\r1,2,3\r", {}, "0.csv: its lines end with CR alone: convert it, as with `tr '\\r' '\\n'`"),
    "no text": (b"PK\x03\x04\0\0\n", {}, "0.csv is no CSV file: expected lines of text"),
    "gzip, truncated": (
        gzip.compress(b"a,b,y\n" + b"1,2,3\n" * 9)[:-9],
        {},
        "0.csv is truncated or damaged, and cannot be uncompressed: copy it again",
    ),
    "a value of two lines": (
        'a,b,y\n1,"x\ny",3\n',
        {},
        "0.csv: row 1 has a quote that is not closed in its line; close it, or replace line ends in values",
    ),
    "an open quote": (
        'a,b,y\n1,2,"x\n1,2,z\n',
        {},
        "0.csv: row 1 has a quote that is not closed in its line; close it, or replace line ends in values",
    ),
    "a comment with an open quote": (
        'a,b,y\n1,2,3\n# see,"this\n1,2,3\n1,2,3\n',
        {},
        "0.csv: row 2 has 2 values, expected 3: a quote that is not closed in its line; "
        "close it, or replace line ends in values",
    ),
    "an open quote before rows": (
        'a,b,y\n1,2,"3\n1,2,3\n1,2,3\n',
        {},
        "0.csv: row 1 has a quote that is not closed in its line; close it, or replace line ends in values",
    ),
    # Parquet
    "lists of two lengths": (
        {"a": [[1], [1, 2]], "y": [0, 1]},
        {},
        "0.parquet: the column 'a', row 2, holds a list of length 2, but of 1 before: expected lists of equal length",
    ),
    "lists of nothing": (
        {"a": [[], []], "b": [1, 2], "y": [0, 1]},
        {},
        "0.parquet: the column 'a', row 1, holds a list without values",
    ),
    "NaN": ({"a": [1, float("nan")], "y": [0, 1]}, {}, f"0.parquet: the column 'a', row 2, is empty: {WAYS_OUT}"),
    "null in a list": ({"a": [[1, 2], [3, None]], "y": [0, 1]}, {}, f"0.parquet: the column 'a', row 2, is empty: {WAYS_OUT}"),
    "timestamps": (
        {"a": [datetime.datetime.now()], "y": [0]},
        {},
        f"0.parquet: the column 'a' holds timestamp[us], {HOLDS}: {DATES}",
    ),
    "decimals": (
        {"a": [decimal.Decimal("1.5")], "y": [0]},
        {},
        f"0.parquet: the column 'a' holds decimal128(2, 1), {HOLDS}: turn it into float64, or leave the column out",
    ),
    "bytes": (
        {"a": [b"x"], "y": [0]},
        {},
        f"0.parquet: the column 'a' holds binary, {HOLDS}: decode it into lists of numbers, or leave the column out",
    ),
    "no UTF-8": (
        {"a": pyarrow.array([b"x", b"\xe9"]).view(pyarrow.string()), "y": [0, 1]},
        {},
        "0.parquet: the column 'a', row 2, holds b'\\xe9': expected UTF-8",
    ),
    "lists of strings": (
        {"a": [["x"]], "y": [0]},
        {},
        f"0.parquet: the column 'a' holds list<element: string>, {HOLDS}: leave the column out",
    ),
    "too large for int64": (
        {"a": pyarrow.array([2**63], pyarrow.uint64()), "y": [0]},
        {},
        "0.parquet: the column 'a', row 1, holds 9,223,372,036,854,775,808, expected less than 9,223,372,036,854,775,808",
    ),
    "only one, of Parquet": ({"a": [1]}, {}, "0.parquet has only one column, 'a': expected several"),
}


# What the first block shows decides
ONE_BLOCK = "decimal commas of three digits", "a number with a unit", "a value of two lines", "a comment with an open quote"
IN_BLOCKS = [(name, 2**22) for name in [*GOOD, *BAD]] + [(name, 4) for name in [*GOOD, *BAD] if name not in ONE_BLOCK]


@pytest.fixture
def in_blocks(monkeypatch):
    """A function that has files read in blocks of so many bytes, or of one row."""

    def in_blocks(size):
        monkeypatch.setattr(csv_files, "BLOCK", size)
        monkeypatch.setattr(columnar_files, "ROWS", 1 if size < 100 else 2**14)

    return in_blocks


@pytest.mark.parametrize("name, size", [each for each in IN_BLOCKS if each[0] in GOOD])
def test_good(converted, in_blocks, name, size):
    in_blocks(size)
    content, flags, columns, notes = GOOD[name]
    found = converted(content, **flags)
    assert found["train"] == found["test"] == columns and list(found["train"])[-1] == found.about["label"]
    assert found.notes[1:] == notes


def as_arrow(content, how):
    """The content of a Parquet file as that of an Arrow file."""
    found = Arrow(content)
    found.how = how
    return found


@pytest.mark.parametrize("how", ARROW)
@pytest.mark.parametrize("name", [name for name, (content, *_) in GOOD.items() if isinstance(content, dict)])
def test_good_as_arrow(converted, name, how):
    content, flags, columns, notes = GOOD[name]
    found = converted(as_arrow(content, how), **flags)
    assert found["train"] == found["test"] == columns and found.notes[1:] == notes


@pytest.fixture
def refused(converted, tmp_path):
    """A function that converts files; returns the error line, with the names of the files alone."""

    def refused(*train, **others):
        with pytest.raises(UserError) as error:
            converted(*train, **others)
        return str(error.value).replace(f"{tmp_path}/", "")

    return refused


@pytest.mark.parametrize("name, size", [each for each in IN_BLOCKS if each[0] in BAD])
def test_bad(refused, in_blocks, name, size):
    in_blocks(size)
    content, flags, line = BAD[name]
    assert refused(content, **flags) == line


def test_what_is_told(converted):
    found = converted(
        "a,color,user,Unnamed: 0,ok,b,kind\n1,red,99999999999,4,true,1.5,x\n2,blue,3,5,false,-2,x\n-9,red,4,6,true,,w\n",
        missing="0",
    )
    number = {"array": "numbers", "width": 1, "is_list": False, "most": None, "vocabulary": None, "buckets": None}
    assert json.loads(json.dumps(found.about)) == {
        "rows": {"train": 3, "test": 3},
        "numbers": 5,
        "ids": 1,
        "labels": {"dtype": "int32", "width": None},
        "columns": [
            number | {"name": "a", "kind": "int", "at": 0, "most": 9},
            number | {"name": "color", "kind": "string", "at": 4, "vocabulary": "vocabulary-color.json"},
            number | {"name": "user", "kind": "int", "array": "ids", "at": 0, "most": 99999999999},
            number | {"name": "Unnamed: 0", "kind": "int", "at": 1, "most": 6},
            number | {"name": "ok", "kind": "bool", "at": 2},
            number | {"name": "b", "kind": "float", "at": 3},
        ],
        "label": "kind",
        "classes": ["w", "x"],
        "notes": [
            "label: the column 'kind', 2 classes: 'w' is 0, 'x' is 1",
            "strings as whole numbers, by a vocabulary each: 'color'",
            "filled: 2 empty values of 'b' with 0",
        ],
    }
    assert found.array("train", "numbers").tolist() == [[1, 4, 1, 1.5, 0], [2, 5, 0, -2, 1], [-9, 6, 1, 0, 0]]
    assert found.array("train", "ids").tolist() == [[99999999999], [3], [4]]
    assert found.array("train", "labels").tolist() == [[1], [1], [0]]
    arrays = {f"{half}-{name}" for half in ("train", "test") for name in ("numbers.float32", "ids.int64", "labels.int32")}
    assert {path.name for path in found.folder.iterdir()} == arrays | {"vocabulary-color.json"}


def rows(numbers, header="a,b,y"):
    return header + "\n" + "".join(f"{n},{n + 0.5},{n % 3}\n" for n in numbers)


@pytest.mark.parametrize("size", [4, 50, 2**22])
def test_every_tenth_row_of_a_file_is_for_the_test(converted, in_blocks, size):
    in_blocks(size)
    found = converted(rows(range(25)), rows(range(100, 112)), test=[])
    assert found["test"]["a"] == [9, 19, 109] and found["test"]["y"] == [0, 1, 1]
    assert found["train"]["a"] == [*range(9), *range(10, 19), *range(20, 25), *range(100, 109), 110, 111]
    assert found["train"]["b"] == [n + 0.5 for n in found["train"]["a"]]
    assert found.about["rows"] == {"train": 34, "test": 3}


def test_few_rows_for_the_test(refused):
    line = "every 10th row of a file is for the test, but no file has 10 rows: give --test_data"
    assert refused(rows(range(9)), rows(range(9)), test=[]) == line


def test_no_rows_for_the_test(refused):
    assert refused(rows([1]), test=["a,b,y\n"]) == "test-0.csv has no rows to test with: expected rows after its header line"


def test_a_file_without_rows_among_others(converted):
    assert converted("a,b,y\n", rows([1, 2]))["train"]["a"] == [1, 2]


def test_columns_by_name(converted):
    found = converted("a,b,y\n1,2,0\n", "y,b,a\n1,4,3\n", test=["b,a,y\n6,5,1\n"])
    assert found["train"] == {"a": [1, 3], "b": [2, 4], "y": [0, 1]} and found["test"] == {"a": [5], "b": [6], "y": [1]}


@pytest.mark.parametrize(
    "train, line",
    [
        (("a,b,y\n1,2,0\n", "a,c,b,y\n1,2,3,0\n"), "1.csv has the column 'c', unlike 0.csv: expected the same columns"),
        (("a,b,y\n1,2,0\n", "a,y\n1,2\n"), "1.csv lacks the column 'b', unlike 0.csv: expected the same columns"),
        (
            ("a,b,y\n1,2,0\n", "a,b,y\n1,2,0\n1,x,0\n"),
            f"1.csv: the column 'b', row 2, holds 'x', expected a number, as in other rows: {CORRECT}",
        ),
        (
            ("a,b,y\n1,true,0\n", "a,b,y\n1,1,0\n1,7,0\n"),
            f"1.csv: the column 'b', row 2, holds '7', expected true or false, as in other rows: {CORRECT}",
        ),
        (
            ({"a": [1], "y": [0]}, {"a": ["x"], "y": [0]}),
            "1.parquet: the column 'a' holds string, but int in rows before: expected one type",
        ),
        (
            ({"a": [1], "y": [0]}, {"a": [[1]], "y": [0]}),
            "1.parquet: the column 'a' holds list<element: int64>, unlike rows before: expected lists in all rows, or in none",
        ),
        (
            ({"a": [[1]], "y": [0]}, {"a": [[1, 2]], "y": [0]}),
            "1.parquet: the column 'a', row 1, holds a list of length 2, but of 1 before: expected lists of equal length",
        ),
    ],
)
def test_files_that_differ(refused, train, line):
    assert refused(*train) == line


@pytest.mark.parametrize("later", ["2.5,x,1\n", "99999999999,x,1\n", "3,x,0.5\n", ",,1\n7,w,1\n"])
def test_a_later_row_changes_the_places_of_columns(converted, in_blocks, later):
    """The files are read again, and nothing of the first pass is left."""
    in_blocks(4)
    content = "a,b,y\n,,0\n1,z,0\n" + later
    found, whole = converted(content, missing="0"), "".join(content.split("\n", 1)[1])
    expected = [line.split(",") for line in whole.splitlines()]
    assert found["train"]["a"] == [float(a or 0) for a, _, _ in expected]
    assert found["train"]["b"] == [b for _, b, _ in expected]
    assert found["train"]["y"] == [float(y) for _, _, y in expected]
    assert json.loads((found.folder / "vocabulary-b.json").read_text()) == list(dict.fromkeys(b for _, b, _ in expected))
    assert len(list(found.folder.glob("train-labels*"))) == 1
    assert (found.folder / "train-ids.int64").exists() == ("99999999999" in later)


def test_ids_with_fractions_in_a_later_file(converted, refused):
    found = converted("a,b,y\n99999999999,1,0\n", "a,b,y\n0.5,1,0\n")
    assert found["train"]["a"] == [float(np.float32(99999999999)), 0.5] and found.about["ids"] == 0
    assert not list(found.folder.glob("*ids*"))


@pytest.mark.parametrize("size", [4, 2**22])
@pytest.mark.parametrize("name, way_out", [("a", "hash the strings, with --hash_strings=BUCKETS"), ("y", "leave the row out")])
def test_strings_of_test_rows_alone(refused, in_blocks, size, name, way_out):
    in_blocks(size)
    lines = [f"u{n},1,v{n}\n" if n == 9 else "x,1,z\n" for n in range(12)]
    lines[9] = lines[9].replace("v9", "z") if name == "a" else lines[9].replace("u9", "x")
    text = "u9" if name == "a" else "v9"
    line = f"0.csv: the column {name!r}, row 10, holds {text!r}, but no training row does: {way_out}"
    assert refused("a,b,y\n" + "".join(lines), test=[]) == line


def test_strings_of_test_rows_first(converted, in_blocks):
    """The tenth row has one that a training row has later."""
    in_blocks(4)
    lines = ["x,1,0\n"] * 9 + ["z,1,1\n"] + ["z,2,1\n"]
    found = converted("a,b,y\n" + "".join(lines), test=[])
    assert found["test"] == {"b": [1], "a": ["z"], "y": [1]} and found["train"]["a"] == ["x"] * 9 + ["z"]


@pytest.mark.parametrize("buckets, array", [(1000, "numbers"), (2**40, "ids")])
def test_hashed_strings(converted, buckets, array):
    import tensorflow

    words = ["x", "\u00e9t\u00e9", "x", "a longer one, of more than thirty-two characters"]
    found = converted({"b": words, "y": [0, 1, 2, 3]}, hash_strings=buckets)
    hashed = tensorflow.strings.to_hash_bucket_fast(words, buckets).numpy().tolist()
    assert found["train"]["b"] == hashed and found.about["columns"][0]["buckets"] == buckets
    assert found.about["columns"][0]["array"] == array and not list(found.folder.glob("vocabulary*"))
    assert found.notes[1:] == [f"strings as whole numbers, hashed into {buckets:,} buckets: 'b'"]


def test_vocabularies_of_names_that_are_no_file_names(converted):
    found = converted("a/b,a_b,../c,y\nx,z,u,0\nw,u,v,1\n")
    assert found["train"] == {"a/b": ["x", "w"], "a_b": ["z", "u"], "../c": ["u", "v"], "y": [0, 1]}
    assert {path.parent for path in found.folder.rglob("*")} == {found.folder}


@pytest.mark.parametrize("name, way_out", [("a", "hash them, with --hash_strings=BUCKETS"), ("y", "name another by --label")])
def test_too_many_strings(refused, monkeypatch, name, way_out):
    """They are counted over all columns."""
    monkeypatch.setattr(table_files, "MOST_STRINGS", 5)
    content = {"b": [1] * 5, "few": ["x"] * 5, "a": list(range(5)), "y": [0] * 5, name: ["p", "q", "r", "s", "t"]}
    assert refused(content) == f"the columns hold more than 5 strings, {name!r} most of them: {way_out}"


def test_the_mean_is_that_of_training_rows(converted, in_blocks):
    in_blocks(4)
    train, test = "a,b,user,y\n1,2,4294967296,0\n2,,,1\n4,7,4294967300,1\n", "a,b,user,y\n,,,0\n100,90,7,1\n"
    found = converted(train, test=[test], missing="mean")
    assert found["train"] == {"a": [1, 2, 4], "b": [2, 4, 7], "user": [2**32, 2**32 + 2, 2**32 + 4], "y": [0, 1, 1]}
    assert found["test"] == {"a": [2, 100], "b": [4, 90], "user": [2**32 + 2, 7], "y": [0, 1]}


@pytest.mark.parametrize("how", ARROW)
@pytest.mark.parametrize("name", [name for name, (content, *_) in BAD.items() if isinstance(content, dict)])
def test_bad_as_arrow(refused, name, how):
    content, flags, line = BAD[name]
    line = line.replace("0.parquet", "0.arrow").replace("of Parquet", "of Arrow").replace("<element", "<item")
    assert refused(as_arrow(content, how), **flags) == line


def test_no_mean_of_training_rows(refused):
    line = "the column 'b' is empty in all training rows: leave it out, or give --missing=0"
    assert refused("a,b,y\n1,,0\n", test=[rows([1])], missing="mean") == line


def test_rows_in_messages_are_those_of_the_file(refused, in_blocks):
    """Of many blocks, with comments and empty lines; blocks are read ahead."""
    in_blocks(60)
    lines = [f"{n},{n + 0.5},0\n" + "# so\n\n" * (n % 7 == 0) for n in range(1000)]
    lines[778] = "778,,0\n"
    assert refused("a,b,y\n" + "".join(lines)) == f"0.csv: the column 'b', row 779, is empty: {WAYS_OUT}"


CONTENTS = {
    "csv": rows(range(500)),
    "gzip": gzip.compress(rows(range(500)).encode()),
    "parquet": {"a": range(50), "y": range(50)},
    "arrow": Arrow(a=range(50), y=range(50)),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_progress(converted, in_blocks, content, tmp_path):
    in_blocks(64)
    told: list = []
    converted(content, content, told=lambda *each: told.append(each))
    [total] = {of_all for _, of_all in told}
    assert total == sum(path.stat().st_size for path in tmp_path.glob("[01].*")) * 2  # to train and to test with
    assert [done for done, _ in told] == sorted(done for done, _ in told) and told[-1][0] == total


def test_blocks_are_read_as_they_are_needed(tmp_path, in_blocks):
    """Only a few blocks are in memory at a time."""
    in_blocks(64)
    path = write(tmp_path, "0", rows(range(10_000)))
    batches = csv_files.CsvFile(path, {}).batches()
    _, done = next(batches)
    batches.close()
    assert done <= 64 * (csv_files.THREADS + 3)


def test_a_line_without_end(refused, monkeypatch, in_blocks):
    in_blocks(64)
    monkeypatch.setattr(csv_files, "LINE", 100)
    assert refused("a,b,y\n1,2,3\n" + "1" * 400) == "0.csv is no CSV file: expected lines of at most 100 bytes"


@pytest.mark.parametrize("how", ["Parquet", *ARROW])
@pytest.mark.parametrize("lost", [8, 20, 900])
def test_a_truncated_file(tmp_path, how, lost):
    """A stream that lacks its last 8 bytes ends with a whole batch."""
    content, name = {"a": range(100), "y": range(100)}, "Arrow" if how in ARROW else how
    path = write(tmp_path, "0", as_arrow(content, how) if how in ARROW else content)
    os.truncate(path, os.path.getsize(path) - lost)
    with pytest.raises(UserError) as error:
        convert(name.lower(), [path], [], tmp_path, lambda *_: None)
    assert f" is truncated, damaged or no {name} file: " in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no.csv cannot be read: FileNotFoundError"):
        convert("csv", [str(tmp_path / "no.csv")], [], tmp_path, None)


def test_a_full_disk_is_no_fault_of_the_files(converted, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table_files._Conversion, "_add", full)
    with pytest.raises(OSError, match="No space left"):
        converted(rows([1]))
