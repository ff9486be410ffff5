"""Columns of files as inputs of a Keras model: each by its name, or the columns of numbers in order, as one input."""

import math

import numpy as np

from common import tf
from common.core import UserError
from common.data import EXACT_UP_TO, chunks, listed, values_of
from common.scheme import tables


class ColumnInputs:
    """A function from samples x, with columns, to the inputs of a model, in the graph or eagerly.

    Args:
      keras_model: a model; its layers may not be built yet.
      data: a `common.data.Data` with columns.

    Attributes:
      text: the columns that the inputs take, for the first line of a run.

    Raises:
      UserError: if an input is no column, or would change its numbers.
    """

    def __init__(self, keras_model, data):
        self._columns, self._struct = data.columns, getattr(keras_model, "_inputs_struct", None)
        named, known = tables.named_inputs(keras_model), data.columns.names()
        self._named = {}
        if len(named) > 1 or named.keys() & set(known):
            if missing := [name for name in named if name not in known]:
                raise UserError(f"the input {missing[0]!r} is no column of the data: they have {listed(known)}")
            self._named = {name: (its, data.columns[name]) for name, its in named.items()}
            for name, (its, column) in self._named.items():
                _check(name, its, [column], data)
            left = [name for name in known if name not in named]
            self.text = f"the inputs are columns: {listed(named)}" + (f"; no input takes {listed(left)}" if left else "")
            return
        columns = data.columns.of_numbers()
        if not columns:
            raise UserError(f"the files have no column of numbers: give each column an input by its name: {listed(known)}")
        for column in columns:
            if column.array == "ids":
                raise _too_large("the model's one input", "numbers of float32", column, 2**24)
        self._only = next(iter(named.values()), None)
        _check("", self._only, columns, data)
        left = [column.name for column in data.columns if column.kind == "string"]
        strings = f"; the strings {listed(left)} are left out: an input takes them by name" if left else ""
        names = [repr(column.name) for column in columns]
        which = f"the columns {', '.join(names)}"
        if len(names) > 8:
            which = f"the {len(names):,} columns of numbers, {names[0]} to {names[-1]},"
        self.text = f"the input is {which} in order{strings}"

    def __call__(self, x):
        if not self._named:
            array = x["numbers"] if isinstance(x, dict) else x
            width = self._columns.width()
            return self._packed([_as(array if array.shape[1] == width else array[:, :width], self._only)])
        return self._packed([_as(values_of(x, column), its) for its, column in self._named.values()])

    def _packed(self, tensors):
        """Returns the inputs in the structure that the model takes."""
        if isinstance(self._struct, dict):
            return dict(zip(self._struct, tensors, strict=True))
        return tuple(tensors) if isinstance(self._struct, (list, tuple)) or len(tensors) > 1 else tensors[0]


def _as(array, its):
    """Returns numbers `[n, width]` in the declared shape and type of an input; as they are for one that is not known."""
    if its is None:
        return array
    shape = [-1 if size is None else size for size in its.shape[1:]]
    n = array.shape[0] if array.shape[0] is not None else tf.shape(array)[0]
    return tf.cast(tf.reshape(array, [n, *shape]), its.dtype)


def _check(name, its, columns, data):
    """Raises a `UserError` unless an input takes each number of these columns exactly. `its` is None for an unknown input."""
    of, dtype = f"the input {name!r}" if name else "the model's one input", its.dtype if its is not None else "float32"
    width = sum(column.width for column in columns)
    shape: list = list(its.shape[1:]) if its is not None else [None]
    if not hasattr(dtype, "lower"):
        raise UserError("the inputs of the model are nested: expected one, or several by name")
    if shape.count(None) > 1 or (math.prod(shape) != width if None not in shape else width % _known(shape)):
        raise UserError(f"{of} has shape {shape}, but {columns_text(columns)} {width} number{'s' * (width > 1)} for a sample")
    for column in columns:
        holds = f"the column {column.name!r} holds"
        if dtype in EXACT_UP_TO and column.kind == "string":
            raise UserError(f"{of} takes {dtype}, but {holds} strings, as whole numbers: give keras.Input(..., dtype='int64')")
        if dtype in EXACT_UP_TO and column.kind == "int" and column.most > EXACT_UP_TO[dtype]:
            raise _too_large(of, dtype, column, EXACT_UP_TO[dtype])
        if dtype == "bool" and column.kind != "bool" or dtype not in EXACT_UP_TO and not _is_whole(dtype):
            raise UserError(f"{of} takes {dtype}, but {holds} {column.kind} numbers: give keras.Input a type that holds them")
        if _is_whole(dtype) and dtype != "bool":
            _check_values(of, dtype, column, data)


def _too_large(of, takes, column, most):
    """Returns the `UserError` on a column whose whole numbers an input would round."""
    holds = f"the column {column.name!r} holds whole numbers up to {column.most:,}, above 2**{most.bit_length() - 1}"
    own = f"give it keras.Input(..., name={column.name!r}, dtype='int64'), or leave it out"
    return UserError(f"{of} takes {takes}, but {holds}: {own}")


def _is_whole(dtype):
    return dtype == "bool" or dtype.startswith(("int", "uint"))


def _known(shape):
    return math.prod(size for size in shape if size is not None)


def columns_text(columns):
    """Returns the subject of a sentence on these columns."""
    return f"the column {columns[0].name!r} has" if len(columns) == 1 else f"the {len(columns)} columns of numbers have"


def _check_values(of, dtype, column, data):
    """Raises a `UserError` for numbers of a column that an input of whole numbers does not hold."""
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    if column.kind in ("int", "bool") and least < 0 and (column.most or 0) <= most:
        return
    for x in filter(lambda x: x is not None, (data.x_train, data.x_test, data.x_validation)):
        array = x[column.array] if isinstance(x, dict) else x
        for chunk in chunks(array):
            part = chunk[:, column.at : column.at + column.width]
            if (wrong := part[(part < least) | (part > most) | (part != np.floor(part))]).size:
                number = f"{wrong[0]:,g}" if column.kind == "float" else f"{int(wrong[0]):,}"
                raise UserError(f"{of} takes {dtype}, but the column {column.name!r} holds {number}")
