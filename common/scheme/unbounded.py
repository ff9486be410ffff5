"""Unbounded tables, as of `Embedding(None, width)`: a row is created on its ps at its first use."""

import numpy as np

from common import tf
from common.core import TABLES, Lock, check_shape, pieces_of, rows_in, spec_of, tell
from common.scheme.messages import arrived
from common.scheme.saved_tables import starts_of
from common.scheme.sharded_tables import Table, first_rows, place_of
from common.scheme.tables import IDS

NEVER = 2**63 - 1  # later than any use
AT_ONCE = 16  # a full ps evicts 1/16 of its rows at once, so that not every new row needs a search for the oldest


class Vocabulary(Table):
    """A table with ids 0 to `IDS` − 1; the ps hold only the used rows.

    The initial values of a row depend on its id and the seed, not on the order of ids or the number of ps. A full ps evicts the
    least recently used rows, pulled or pushed; at their next use they start anew.

    Args:
      spec: a `common.scheme.Spec`.
      num_ps, device_fn: as of `common.scheme.Table`.
      max_rows: row capacity of all ps together.
    """

    def __init__(self, spec, num_ps, device_fn, max_rows):
        self.spec, self.rows, self.width = spec, IDS, spec.width
        self.pieces = self._variable(min(num_ps, max_rows), max_rows, device_fn, tf.zeros_initializer())
        self.starts = starts_of(len(self.pieces))
        self._shelves = [_Shelf(spec, piece) for piece in self.pieces]

    def _place(self, ids):
        return place_of(ids)

    def cut(self, places):
        """Splits sorted places by ps."""
        return self.split(places, places)

    def read(self, asked, before):
        """As of `Table`. Missing rows are created."""
        values = []
        for shelf, here in zip(self._shelves, asked, strict=True):
            device = shelf.device
            with tf.control_dependencies(None), tf.device(device):
                with shelf.lock.held([here.op, *before(device)]) as done:
                    rows = shelf.values.sparse_read(shelf.slots(here))
                    done.append(rows.op)
                with tf.control_dependencies(done):
                    values.append(tf.identity(rows))
        return values

    def look(self, asked):
        """As `read`, but returns the initial values of missing rows without creating them."""
        values = []
        for shelf, here in zip(self._shelves, asked, strict=True):
            with tf.device(shelf.device), shelf.lock.held([here.op]) as done:
                slots = shelf.find(here)
                rows = shelf.values.sparse_read(tf.maximum(slots, 0))
                done.append(rows.op)
            with tf.device(shelf.device), tf.control_dependencies(done):
                missing = tf.where(slots < 0)
                values.append(tf.tensor_scatter_nd_update(rows, missing, first_rows(self.spec, tf.gather_nd(here, missing))))
        return values

    def apply(self, optimizer, gradient, piece):
        """As of `Table`."""
        (shelf,) = (each for each in self._shelves if each.values is piece)
        with tf.init_scope():
            optimizer._create_slots([piece])  # `renew` resets the slots
        with tf.device(piece.device):
            gradient = arrived(gradient)  # before the lock, or other workers would wait for this one's message
        with tf.device(piece.device), shelf.lock.held([gradient.values.op, gradient.indices.op]) as done:
            slots = shelf.slots(gradient.indices)
            with tf.control_dependencies(shelf.renew(optimizer, slots)):
                done.append(optimizer.apply_gradients([(tf.IndexedSlices(gradient.values, slots), piece)]))
        return done[-1]

    def _set(self, piece, here, values):
        (shelf,) = (each for each in self._shelves if each.values is piece)
        with tf.device(shelf.device), shelf.lock.held([here.op, values.op]) as done:
            slots = shelf.slots(here)
            with tf.control_dependencies([slots]):
                done.append(_update(shelf.values, slots, values))
        return done[-1]

    def told(self):
        """Returns tensors: the number of rows, and of dropped rows, on each ps."""
        return [shelf.told() for shelf in self._shelves]

    def parts(self, variables):
        """As of `Table`."""
        return [_Saved(self.spec, self.starts, self._shelves, variables), *self._counts(variables)]


class _Shelf:
    """The rows on one ps. All operations run there, under a lock.

    Args:
      spec: the `Spec` of the table.
      values: the variable `[room, width]` of the rows, in any order.
    """

    def __init__(self, spec, values):
        self.values, self.device, self._spec, self._room = values, values.device, spec, int(values.shape[0])
        name = values.op.name
        self.lock = Lock(self.device, f"{name}-lock")
        self.lock.make()
        with tf.device(self.device), tf.control_dependencies(None):
            self._index = tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64, shared_name=f"{name}-index")
            none = tf.zeros([0], tf.int64)
            cleared = tf.raw_ops.LookupTableImportV2(table_handle=self._index, keys=none, values=none)

            def own(what, initial):
                return tf.get_variable(f"{name}-{what}", initializer=initial, trainable=False, use_resource=True)

            with tf.control_dependencies([cleared]):
                self.places = own("places", tf.fill([self._room], tf.constant(-1, tf.int64)))  # of the row in a slot; −1: none
            self.used = own("used", tf.fill([self._room], tf.constant(NEVER, tf.int64)))
            self.is_new = own("is_new", tf.fill([self._room], tf.constant(0, tf.int64)))  # 1: nothing was pushed yet
            self._free = own("free", tf.reverse(tf.range(self._room, dtype=tf.int64), [0]))  # a stack of slots
            self._num_free = own("num_free", tf.constant(self._room, tf.int64))
            self._time = own("time", tf.zeros([], tf.int64))
            self._dropped = own("dropped", tf.zeros([], tf.int64))
        self.own = [self.places, self.used, self.is_new, self._free, self._num_free, self._time, self._dropped]

    def find(self, places):
        """Returns the slots of these rows, −1 for missing rows."""
        none = tf.constant(-1, tf.int64)
        return tf.raw_ops.LookupTableFindV2(table_handle=self._index, keys=places, default_value=none)

    def told(self):
        """Returns the number of rows, and of evicted rows, a tensor."""
        return tf.stack([self._room - self._num_free.read_value(), self._dropped.read_value()])

    def slots(self, places):
        """Returns the slots of these distinct rows; creates missing rows, and marks all as used now."""
        found, time = self.find(places), self._time.read_value() + 1
        is_here, tick = found >= 0, self._time.assign(time, read_value=False)
        seen = _update(self.used, tf.boolean_mask(found, is_here), time)
        missing = tf.boolean_mask(places, ~is_here)

        def enter():
            with tf.device(self.device):
                with tf.control_dependencies(self._enter(missing, time)):
                    return self.find(places)

        with tf.control_dependencies([seen, tick]):
            return tf.cond(tf.size(missing) > 0, enter, lambda: tf.identity(found))

    def _enter(self, places, time):
        """Creates these rows; returns operations."""
        n = tf.size(places, out_type=tf.int64)
        lacks = n - self._num_free.read_value()

        def drop():
            with tf.device(self.device):
                used = self.used.read_value()
                old = tf.reduce_sum(tf.cast(used < time, tf.int64))
                said = f"{self._spec.layer}: --max_rows is too small for the rows of one window; a ps has room for"
                with tf.control_dependencies([tf.debugging.Assert(lacks <= old, [said, self._room])]):
                    count = tf.maximum(lacks, tf.minimum(tf.constant(self._room // AT_ONCE, tf.int64), old))
                slots = tf.cast(tf.math.top_k(-used, tf.cast(count, tf.int32)).indices, tf.int64)
                gone, free, k = self.places.sparse_read(slots), self._num_free.read_value(), tf.size(slots, out_type=tf.int64)
                with tf.control_dependencies([gone, free]):
                    done = [
                        tf.raw_ops.LookupTableRemoveV2(table_handle=self._index, keys=gone),
                        _update(self.places, slots, -1),
                        _update(self.used, slots, NEVER),
                        _update(self._free, tf.range(free, free + k), slots),
                        self._num_free.assign(free + k, read_value=False),
                        self._dropped.assign_add(k, read_value=False),
                    ]
                with tf.control_dependencies(done):
                    return tf.identity(k)

        dropped = tf.cond(lacks > 0, drop, lambda: tf.zeros([], tf.int64))
        with tf.control_dependencies([dropped]):
            left = self._num_free.read_value() - n
            slots = self._free.sparse_read(tf.range(left, left + n))
        with tf.control_dependencies([slots]):
            return [
                self._num_free.assign(left, read_value=False),
                tf.raw_ops.LookupTableInsertV2(table_handle=self._index, keys=places, values=slots),
                _update(self.places, slots, places),
                _update(self.used, slots, time),
                _update(self.is_new, slots, 1),
                _update(self.values, slots, first_rows(self._spec, places)),
            ]

    def renew(self, optimizer, slots):
        """Resets the optimizer's slots of rows without a push so far; returns operations."""
        new = tf.boolean_mask(slots, self.is_new.sparse_read(slots) > 0)
        kept = [optimizer.get_slot(self.values, name) for name in optimizer.get_slot_names()]
        initial = getattr(optimizer, "initial_value", getattr(optimizer, "_initial_accumulator_value", 0.0))
        with tf.control_dependencies([new]):
            return [_update(each, new, initial) for each in kept] + [_update(self.is_new, new, 0)]

    def put(self, places, used, *others):
        """Restores rows from a checkpoint, within the capacity; returns operations.

        The arguments are pairs of a variable, in the order of `_Saved`, and its rows `[n, ...]`.
        """
        slots = self.slots(places[1])
        time = tf.reduce_max(tf.concat([used[1], [self._time.read_value()]], axis=0))
        with tf.control_dependencies([slots, time]):
            updates = [_update(variable, slots, value) for variable, value in (used, *others)]
            return [*updates, self._time.assign(time, read_value=False)]

    def end(self):
        """Returns the end of the used slots, at least 1."""
        numbers = tf.range(self._room, dtype=tf.int64)
        return tf.maximum(tf.reduce_max(tf.where(self.places.read_value() < 0, tf.zeros_like(numbers), numbers + 1)), 1)


def _update(variable, indices, value):
    """Returns the operation that writes values `[n, ...]`, or the same value, at these rows of a variable."""
    value = tf.convert_to_tensor(value, variable.dtype.base_dtype)
    shape = tf.concat([tf.shape(indices), variable.shape[1:]], axis=0)
    return tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=indices, updates=tf.broadcast_to(value, tf.cast(shape, tf.int32))
    )


class _Saved:
    """The rows of a vocabulary in a checkpoint, read and written in chunks: the slots in use of each ps, one ps after another.

    They are saved with their places, `-places`, −1 for an empty slot, their last use, `-used`, the flag `-is_new`, and the
    optimizers' slots.
    """

    def __init__(self, spec, starts, shelves, variables):
        self._spec, self._starts, self._shelves = spec, starts, shelves
        self._begin, self._count = tf.placeholder(tf.int64, []), tf.placeholder(tf.int64, [])
        self._ends, self._reads, self._puts, self._begins = [], [], [], []
        self._feeds: list = []
        for shelf in shelves:
            beside = sorted((v for v in variables if v.op.name.startswith(shelf.values.op.name + "/")), key=lambda v: v.op.name)
            kept = [shelf.places, shelf.used, shelf.is_new, shelf.values, *beside]
            self._names = [TABLES + spec.name + v.op.name.removeprefix(shelf.values.op.name) for v in kept]
            self._feeds = self._feeds or [tf.placeholder(v.dtype.base_dtype, [None, *v.shape[1:]]) for v in kept]
            with tf.device(shelf.device), tf.control_dependencies(None):
                self._ends.append(shelf.end())
                with shelf.lock.held([]) as done:
                    rows = tf.range(self._begin, self._begin + self._count)
                    found = [v.sparse_read(rows) for v in kept]
                    done += [each.op for each in found]
                self._reads.append((found, done))
                with shelf.lock.held([]) as done:
                    done += shelf.put(*zip(kept, self._feeds, strict=True))
                self._puts.append(done)
                self._begins.append([v.initializer for v in (shelf.values, *beside, *shelf.own)])

    def read(self, session):
        """Yields the `parts` of `common.core.write_checkpoint`."""
        ends = [int(end) for end in session.run(self._ends)]
        total, first = sum(ends), 0
        for end, (found, done) in zip(ends, self._reads, strict=True):
            for start, count in pieces_of([end, self._spec.width]):
                values, _ = session.run([found, done], {self._begin: start, self._count: count})
                for name, value in zip(self._names, values, strict=True):
                    yield name, spec_of([total, *value.shape[1:]], first + start, count), value
            first += end

    def restore(self, session, checkpoint, shapes):
        """See `common.core.Keeper.restore_tables`. With less capacity, the most recently used rows are restored."""
        for name, feed in zip(self._names, self._feeds, strict=True):
            check_shape(checkpoint, shapes, name, [None, *feed.shape.as_list()[1:]])
        session.run(self._begins)
        places, used = (np.concatenate(list(self._column(checkpoint, shapes, i))) for i in range(2))
        rows_of_shelves, left_out = [], 0
        for shelf, start, end in zip(self._shelves, self._starts, [*self._starts[1:], IDS], strict=True):
            here = np.flatnonzero((start <= places) & (places < end))
            room = int(shelf.values.shape[0])
            left_out += max(0, len(here) - room)
            rows_of_shelves.append(np.sort(here[np.argsort(-used[here], kind="stable")[:room]]))
        first = 0
        for values in zip(*(self._column(checkpoint, shapes, i) for i in range(len(self._feeds))), strict=True):
            for rows, put in zip(rows_of_shelves, self._puts, strict=True):
                here = rows[(first <= rows) & (rows < first + len(values[0]))] - first
                if len(here):
                    session.run(put, {feed: value[here] for feed, value in zip(self._feeds, values, strict=True)})
            first += len(values[0])
        if left_out:
            why = "--max_rows is smaller than before, or too small on some ps"
            tell(f"{self._spec.layer}: {left_out:,} least recently used rows of {checkpoint} found no room: {why}")

    def _column(self, checkpoint, shapes, i):
        """Yields the values of the i-th saved name, in chunks of as many rows as the table's."""
        name, dtype = self._names[i], self._feeds[i].dtype
        for _, value in rows_in(checkpoint, name, shapes[name], width=self._spec.width, dtype=dtype):
            yield value
