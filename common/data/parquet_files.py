"""Parquet files: their rows as arrays of pyarrow, batch by batch; fields of structs are columns with dotted names."""

import contextlib
import os

import pyarrow
import pyarrow.parquet

from common.core import UserError
from common.data.user_functions import one_line

ROWS = 2**14  # read at once
_INDEX = "__index_level_0__"  # the name of pandas for an index
_BUFFER = 2**20  # bytes of each column that are read at once; otherwise it is a whole row group


class ParquetFile:
    """A Parquet file.

    Attributes:
      names: names of the columns, without an index.
      notes: sentences about the file.

    Raises:
      UserError: if it cannot be read, or two columns have one name.
    """

    def __init__(self, path, kinds):
        self.path, self.notes = path, []
        with self._open() as file:
            schema = _flat(file.schema_arrow.empty_table()).schema
        self.names = [name for name in schema.names if name != _INDEX]
        if len(self.names) < len(schema.names):
            self.notes.append(f"left out: the column {_INDEX!r} (an index)")
        for i, name in enumerate(self.names):
            if name in self.names[:i]:
                raise UserError(f"{path} has two columns of one name, {name!r}: rename one")
        if len(self.names) < 2:
            raise UserError(f"{path} has only one column, {', '.join(map(repr, self.names))}: expected several")

    @contextlib.contextmanager
    def _open(self):
        """A context that gives the open file; an error in it becomes a `UserError` of one line."""
        try:
            with pyarrow.parquet.ParquetFile(self.path, buffer_size=_BUFFER, pre_buffer=False) as file:
                yield file
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise UserError(f"{self.path} is truncated, damaged or no Parquet file: {one_line(error)}") from None

    def batches(self):
        """Yields ({name: array of pyarrow}, bytes read) for the rows, some at once, in their order."""
        size, read = os.path.getsize(self.path), 0
        with self._open() as file:
            for batch in file.iter_batches(ROWS):
                table = _flat(pyarrow.Table.from_batches([batch]))
                read += len(table)
                done = size * read // file.metadata.num_rows
                yield {name: table[name].combine_chunks() for name in self.names}, done


def _flat(table):
    """Returns a table with the fields of structs as columns."""
    while any(pyarrow.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return table
