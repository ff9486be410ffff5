"""Tables in checkpoints: read and written a few rows at a time, so that no process needs all rows in memory."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from common import tf
from common.core.flags import UserError

TABLES = "tables/"  # prefix of the names of tables and of their optimizer slots, see `common.scheme.Table`
PART_BYTES = 2**22  # read or written at once: with larger parts, saving takes more time and memory from training


def spec_of(shape, start, count):
    """Rows of a variable, as `tf.raw_ops.SaveV2` takes them."""
    return f"{' '.join(map(str, shape))} {':'.join([f'{start},{count}', *('-' for _ in shape[1:])])}"


def pieces_of(shape):
    """Cuts rows of `shape` into parts of at most `PART_BYTES`; returns pairs (first row, number of rows)."""
    count = max(1, PART_BYTES // (4 * math.prod(shape[1:])))
    return [(start, min(count, shape[0] - start)) for start in range(0, shape[0], count)]


def rows_in(path, name, shape, first=0, count=None, width=None, dtype=None):
    """Yields rows of a table in a checkpoint, in parts of at most `PART_BYTES`: pairs (index of the first row, array).

    Args:
      path, name: of the checkpoint, and of the table in it.
      shape: of the whole table.
      first, count: the first row and the number of rows; all by default.
      width: row width by which the number of rows in a part is computed; by default the table's own.
      dtype: of the table, float32 by default.
    """

    def read(spec):
        types = [dtype or tf.float32]
        return tf.raw_ops.RestoreV2(prefix=path, tensor_names=[name], shape_and_slices=[spec], dtypes=types)[0].numpy()

    with ThreadPoolExecutor(1) as another:  # a graph may be open in this thread, so eager execution needs another one
        for start, n in pieces_of([shape[0] if count is None else count, *([width] if width else shape[1:])]):
            yield first + start, another.submit(read, spec_of(shape, first + start, n)).result()


class TablePart:
    """The rows of a table, or of its optimizer slots, on one ps: read and written a few at a time.

    Args:
      variable: a piece of the table, or of a slot.
    """

    def __init__(self, variable):
        self._own, part = [int(n) for n in variable.shape], variable._get_save_slice_info()
        self._name, self._shape, self._start = (variable.op.name, self._own, 0)
        if part:
            self._name, self._shape, self._start = part.full_name, [int(n) for n in part.full_shape], part.var_offset[0]
        self._begin, self._count = tf.placeholder(tf.int64, []), tf.placeholder(tf.int64, [])
        self._type = variable.dtype.base_dtype
        self._value = tf.placeholder(self._type, [None, *self._own[1:]])
        with tf.device(variable.device), tf.control_dependencies(None):
            self._rows = variable.sparse_read(tf.range(self._begin, self._begin + self._count))
            self._zeros = variable.assign(tf.zeros(self._own, self._type), read_value=False)
            ends = {"begin": [self._begin], "end": [self._begin + self._count], "strides": tf.ones([1], tf.int64)}
            self._write = tf.raw_ops.ResourceStridedSliceAssign(ref=variable.handle, value=self._value, **ends)

    def read(self, session):
        """Yields (name, slice, value), the `parts` of `write_checkpoint`."""
        for start, count in pieces_of(self._own):
            value = session.run(self._rows, {self._begin: start, self._count: count})
            yield self._name, spec_of(self._shape, self._start + start, count), value

    def restore(self, session, checkpoint, shapes):
        """See `Keeper.restore_tables`."""
        check_shape(checkpoint, shapes, self._name, self._shape)
        session.run(self._zeros)
        for start, value in rows_in(checkpoint, self._name, self._shape, self._start, self._own[0], dtype=self._type):
            session.run(self._write, {self._begin: start - self._start, self._count: len(value), self._value: value})


class TableCount:
    """A number of updates that each ps counts for its piece of a table; a checkpoint has the largest, for any number of ps.

    Args:
      name: of the number in a checkpoint.
      variables: int64 scalars, one on each ps.
    """

    def __init__(self, name, variables):
        self._name, self._value = name, tf.placeholder(tf.int64, [])
        with tf.control_dependencies(None):
            self._counts, self._assign = [v.read_value() for v in variables], []
            for v in variables:
                with tf.device(v.device):
                    self._assign.append(v.assign(self._value, read_value=False))

    def read(self, session):
        """As of `TablePart`."""
        yield self._name, spec_of([1], 0, 1), np.array([max(session.run(self._counts))])

    def restore(self, session, checkpoint, shapes):
        """See `Keeper.restore_tables`."""
        check_shape(checkpoint, shapes, self._name, [1])
        session.run(self._assign, {self._value: tf.train.load_checkpoint(checkpoint).get_tensor(self._name)[0]})


def check_shape(checkpoint, shapes, name, expected):
    """Raises a `UserError` if a checkpoint has no variable of this name and shape; None in the shape fits any number.

    Args:
      checkpoint: its path.
      shapes: of its variables, {name: list}.
    """
    shape = shapes.get(name)
    if shape is None or not tf.TensorShape(shape).is_compatible_with(expected):
        had = "not there" if shape is None else f"of shape {shape}"
        raise UserError(
            f"{checkpoint} does not fit: {name} is {had}, expected {expected}; use the model and flags that it was saved with, "
            "or another --run_dir"
        )
