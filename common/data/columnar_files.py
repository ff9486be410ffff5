"""Parquet and Arrow files: their rows as arrays of pyarrow, batch by batch; fields of structs are columns with dotted names."""

import contextlib
import os
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from pyarrow import types

from common.core import UserError
from common.data.user_functions import one_line

ROWS = 2**14  # read at once
_INDEX = "__index_level_0__"  # the name of pandas for an index
_MAGIC = b"ARROW1"  # first bytes of the file format
_END = b"\xff\xff\xff\xff\0\0\0\0"  # last bytes of the streaming format
_BUFFER = 2**20  # bytes of each column that are read at once; otherwise it is a whole row group


class _ColumnarFile:
    """A file of columns with types; `_open` gives the schema and an iterator of (batch, bytes read).

    Attributes:
      kind: the name of its format.
      names: names of the columns, without an index.
      notes: sentences about the file.

    Raises:
      UserError: if it cannot be read, or two columns have one name.
    """

    kind: str
    _open: Any

    def __init__(self, path, kinds):
        self.path, self.notes = path, []
        with self._read() as (schema, _):
            schema = _flat(schema.empty_table()).schema
        self.names = [name for name in schema.names if name != _INDEX]
        if len(self.names) < len(schema.names):
            self.notes.append(f"left out: the column {_INDEX!r} (an index)")
        for i, name in enumerate(self.names):
            if name in self.names[:i]:
                raise UserError(f"{path} has two columns of one name, {name!r}: rename one")
        if len(self.names) < 2:
            raise UserError(f"{path} has only one column, {', '.join(map(repr, self.names))}: expected several")

    def batches(self):
        """Yields ({name: array of pyarrow}, bytes read) for the rows, some at once, in their order."""
        with self._read() as (_, batches):
            for batch, read in batches:
                table = _flat(pyarrow.Table.from_batches([batch]))
                yield {name: table[name].combine_chunks() for name in self.names}, read

    @contextlib.contextmanager
    def _read(self):
        """A context that gives the schema and an iterator of (batch, bytes read); errors become a `UserError`."""
        try:
            with self._open() as opened:
                yield opened
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise UserError(f"{self.path} is truncated, damaged or no {self.kind} file: {one_line(error)}") from None


class ParquetFile(_ColumnarFile):
    """A Parquet file."""

    kind = "Parquet"

    @contextlib.contextmanager
    def _open(self):
        size, read = os.path.getsize(self.path), 0

        def batches():
            nonlocal read
            for batch in file.iter_batches(ROWS):
                read += len(batch)
                yield batch, size * read // file.metadata.num_rows

        with pyarrow.parquet.ParquetFile(self.path, buffer_size=_BUFFER, pre_buffer=False) as file:
            yield file.schema_arrow, batches()


class ArrowFile(_ColumnarFile):
    """A file of Arrow's IPC format, also called Feather, or of its streaming format, the one of Hugging Face's data sets.

    It is converted like the others, not mapped: its arrays begin at multiples of 8 bytes, but TensorFlow uses memory in place
    only at multiples of 64.
    """

    kind = "Arrow"

    @contextlib.contextmanager
    def _open(self):
        with pyarrow.memory_map(self.path) as source:
            is_file = source.read(len(_MAGIC)) == _MAGIC
            if not is_file and source.read_at(len(_END), max(0, source.size() - len(_END))) != _END:
                raise pyarrow.ArrowInvalid("a stream without its end mark")  # its reader takes that for the end
            source.seek(0)
            with (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source) as reader:
                batches = _of_file(reader, source) if is_file else ((batch, source.tell()) for batch in reader)
                yield reader.schema, _in_parts(batches)


def _of_file(reader, source):
    n = reader.num_record_batches
    for i in range(n):
        yield reader.get_batch(i), source.size() * (i + 1) // n


def _in_parts(batches):
    for batch, read in batches:
        for start in range(0, len(batch), ROWS):
            yield batch.slice(start, ROWS), read


def _flat(table):
    """Returns a table with the fields of structs as columns."""
    while any(types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return table
