"""Tables as variables on the ps: their sharding, the places of their rows, initial values, reads and updates."""

import itertools
import math

from common import tf
from common.core import TABLES, TableCount, TablePart, UserError
from common.scheme.tables import IDS

LEAST = 2.0**-24  # lower bound of uniform numbers between 0 and 1
BLOCKS = 64  # blocks of rows in a table; the initial values of a block come from one seed


class Table:
    """A table, sharded evenly over the ps.

    Row r of the layer lies at place (r · a) mod rows, where a is near the golden section of the rows: neighbours lie far from
    each other. So hot rows, which often have small ids, spread over all ps. Checkpoints hold the table unsharded, in the order
    of places, so the number of ps may change.

    Args:
      spec: a `common.scheme.Spec`.
      num_ps: number of pieces.
      device_fn: puts piece i on ps task i; None puts all on this process.

    Attributes:
      pieces: variables, one on each ps.
      starts: the first place of each piece.
    """

    def __init__(self, spec, num_ps, device_fn):
        self.spec, self.rows, self.width = spec, spec.rows, spec.width
        self._factor, self._block = factor_of(self.rows), math.ceil(self.rows / BLOCKS)
        initial = lambda shape, dtype=None, partition_info=None: self._initial(partition_info, shape)  # noqa: E731
        self.pieces = self._variable(min(num_ps, self.rows), self.rows, device_fn, initial)
        self.starts = [0, *itertools.accumulate(int(piece.shape[0]) for piece in self.pieces[:-1])]

    def _variable(self, num_pieces, rows, device_fn, initializer):
        """Returns the pieces of the table, a list of variables."""
        how: dict = {"partitioner": tf.fixed_size_partitioner(num_pieces), "trainable": False, "use_resource": True}
        with tf.device(device_fn), tf.variable_scope(TABLES.rstrip("/")):
            return list(tf.get_variable(self.spec.name, [rows, self.width], initializer=initializer, **how))

    def _initial(self, part, shape):
        """Returns the initial values of a piece `[n, width]`, independent of the number of ps."""
        start, n = part.var_offset[0], int(shape[0])
        first, last = start // self._block, (start + n - 1) // self._block
        # No loop, since operations of a loop are not placed on the ps.
        how = {"shape": [self._block, self.width], "minval": LEAST}
        uniform = [tf.random.stateless_uniform(seed=[self.spec.seed, i], **how) for i in range(first, last + 1)]
        blocks = [self.spec.initial(each) for each in uniform]
        blocks[-1] = blocks[-1][: start + n - last * self._block]
        blocks[0] = blocks[0][start - first * self._block :]
        return tf.ensure_shape(tf.concat(blocks, axis=0), [n, self.width])

    def places(self, ids, check=True):
        """Returns the places of ids, int64; with `check` the step fails for ids outside of the table."""
        ids = tf.cast(ids, tf.int64)
        if check:
            fits = tf.reduce_all((ids >= 0) & (ids < self.rows))
            least, most = tf.reduce_min(ids), tf.reduce_max(ids)
            said = f"{self.spec.layer} has rows 0 to {self.spec.ids - 1}, but was asked for rows from"
            with tf.control_dependencies([tf.debugging.Assert(fits, [said, least, "to", most])]):
                ids = tf.identity(ids)
        return self._place(ids)

    def _place(self, ids):
        return ids * self._factor % self.rows

    def ask(self, places):
        """Sends sorted places, int64 `[n]`, to the ps; returns the row indices in each piece, on its ps."""
        asked = []
        for piece, here in zip(self.pieces, self.cut(places), strict=True):
            with tf.control_dependencies(None), tf.device(piece.device):
                asked.append(tf.identity(here))
        return asked

    def read(self, asked, before):
        """Returns the rows of each piece, on its ps, for the result of `ask`.

        `before` is a function of a device that returns the operations that must end before a read there.
        """
        values = []
        for piece, here in zip(self.pieces, asked, strict=True):
            with tf.control_dependencies(None), tf.device(piece.device), tf.control_dependencies(before(piece.device)):
                values.append(piece.sparse_read(here))
        return values

    def look(self, asked):
        """Returns the current rows of each piece, for evaluation."""
        return self.read(asked, lambda device: [])

    def apply(self, optimizer, gradient, piece):
        """piece ← optimizer(piece, gradient) for rows, on the ps of the piece; returns the operation.

        The optimizer changes only rows with a gradient, `tf.IndexedSlices` with the indices of `cut` for this piece, each once.
        """
        return optimizer.apply_gradients([(gradient, piece)])

    def put(self, ids, rows):
        """Returns the operations that set the rows `[n, width]` of these distinct ids."""
        places = self.places(ids)
        order = tf.argsort(places)
        places, rows = tf.gather(places, order), tf.gather(rows, order)
        parts = zip(self.pieces, self.cut(places), self.split(rows, places), strict=True)
        return [self._set(piece, here, values) for piece, here, values in parts]

    def _set(self, piece, here, values):
        with tf.device(piece.device):
            return tf.raw_ops.ResourceScatterUpdate(resource=piece.handle, indices=here, updates=values)

    def told(self):
        """Returns tensors with statistics of the ps; see `common.scheme.what_travelled`."""
        return []

    def parts(self, variables):
        """Returns the saved parts, a list of `common.core.TablePart`, including the table's slots among `variables`."""
        names = tuple(f"{piece.op.name}/" for piece in self.pieces)
        parts = [TablePart(v) for v in [*self.pieces, *(v for v in variables if v.op.name.startswith(names))]]
        return [*parts, *self._counts(variables)]

    def _counts(self, variables):
        """Returns the parts with a number of the whole table; saved last, so a row has none of a later update."""
        name = f"{TABLES}{self.spec.name}-updates"
        counts = [v for v in variables if v.op.name.startswith(f"{name}/")]
        return [TableCount(name, counts)] if counts else []

    def cut(self, places):
        """Splits sorted places into the row indices of each piece."""
        parts = zip(self.split(places, places), self.starts, strict=True)
        return [part - start if start else part for part, start in parts]

    def split(self, values, places):
        """Splits values `[n, ...]` of sorted places `[n]` by piece."""
        if len(self.pieces) == 1:
            return [values]
        ends = tf.searchsorted(places, tf.constant([*self.starts[1:], self.rows], tf.int64), out_type=tf.int64)
        return tf.split(values, ends - tf.concat([[0], ends[:-1]], axis=0))


MIXERS = 0xFF51AFD7ED558CCD % IDS, 0xC4CEB9FE1A85EC53 % IDS  # odd


def place_of(ids):
    """Returns the places of ids in an unbounded table, int64, a tensor or an array, by a bijective hash.

    Bits are mixed as at the end of MurmurHash3 (`fmix64` of aappleby/smhasher), on 53 bits: multiples of a number are spread as
    evenly as other ids.
    """
    for mixer in MIXERS:
        ids = (ids ^ ids // 2**27) * mixer % IDS
    return ids ^ ids // 2**27


def id_of(places):
    """Returns the ids of places, an array: the inverse of `place_of`."""
    for mixer in reversed(MIXERS):
        places = (places ^ places // 2**27) * pow(mixer, -1, IDS) % IDS  # x ^ x // 2²⁷ is its own inverse, on 53 bits
    return places ^ places // 2**27


def first_rows(spec, places):
    """Returns the initial values `[n, width]` of rows in an unbounded table; they depend on places and seed alone."""
    numbers = place_of((place_of(spec.seed) + tf.range(spec.width, dtype=tf.int64)) % IDS)
    mixed = place_of((places[:, None] + numbers) % IDS)
    return spec.initial(tf.maximum(tf.cast(mixed // 2**29, tf.float32) * LEAST, LEAST))  # the 24 significant bits of float32


def factor_of(rows):
    """Returns the factor a of place (r · a) mod rows for row r, see `Table`; it is coprime to rows."""
    if rows >= 2**31:
        raise UserError(f"a table of {rows:,} rows is too large: expected fewer than {2**31:,}")
    factor = max(1, round(rows * 0.6180339887))
    while math.gcd(factor, rows) != 1:
        factor += 1
    return factor


def find_on_ps(tables):
    """Returns a lookup function for `common.scheme.found_by` that reads the current rows from the ps, for evaluation."""

    def find(layer, ids):
        table = tables[layer.number]
        places, where = tf.unique(tf.reshape(table.places(ids), [-1]))
        order = tf.argsort(places)
        values = table.look(table.ask(tf.gather(places, order)))
        found = tf.gather(tf.concat(values, axis=0), tf.gather(tf.math.invert_permutation(order), where))
        return tf.reshape(found, tf.concat([tf.shape(ids), [table.width]], axis=0))

    return find
