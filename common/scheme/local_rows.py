"""A worker's rows of tables, pulled for the batches of its next window; their gradients; counts of the rows that travel."""

from typing import Any

from common import tf
from common.core import UserError
from common.data import local_variable, make_local
from common.scheme.steps import before_local, before_read


class LocalRows:
    """The rows of one table that a worker has pulled, and the sum of their gradients.

    Args:
      table: the `common.scheme.Table`.
      most: maximum number of rows.
      index: function that returns the worker number.

    Attributes:
      places: sorted places, int64 `[most]`, padded with the number of rows of the table.
      count: number of rows, an int64 scalar.
      rows, gradients: `[most, width]`.
      pulls, asked, pulled, pushed: number of pulls, of ids in them, of rows from each ps, and of pushed rows: int64 variables.
    """

    def __init__(self, table, most, index):
        self.table, self.most, self._index = table, min(most, table.rows), index
        self._slot: Any = None
        name, shape = table.spec.name, [self.most, table.width]
        self.places = local_variable(f"{name}_places", tf.fill([self.most], tf.constant(table.rows, tf.int64)))
        self.count = local_variable(f"{name}_count", tf.zeros([], tf.int64))
        counts = "pulls", "asked", "pushed"
        self.pulls, self.asked, self.pushed = (local_variable(f"{name}_{what}", tf.zeros([], tf.int64)) for what in counts)
        self.pulled = local_variable(f"{name}_pulled", tf.zeros([len(table.pieces)], tf.int64))
        self.rows, self.gradients = (local_variable(f"{name}_{what}", tf.zeros(shape)) for what in ("rows", "gradients"))

    def ask(self, ids):
        """Returns the sorted unique places of these ids, a list of tensors."""
        flat = tf.concat([tf.reshape(self.table.places(each), [-1]) for each in ids], axis=0)
        self._ids = tf.size(flat, out_type=tf.int64)
        return tf.sort(tf.unique(flat)[0])

    def take(self, places, values):
        """Stores the pulled rows of each piece on this worker; returns operations."""
        rows = tf.concat(values, axis=0)
        n = tf.size(places, out_type=tf.int64)
        per_piece = tf.stack([tf.shape(each, out_type=tf.int64)[0] for each in values])
        filled = tf.pad(places, [[0, self.most - n]], constant_values=tf.constant(self.table.rows, tf.int64))
        return [
            self.places.assign(tf.ensure_shape(filled, [self.most]), read_value=False),
            self.count.assign(n, read_value=False),
            self.pulled.assign_add(per_piece, read_value=False),
            self.asked.assign_add(self._ids, read_value=False),
            self.pulls.assign_add(1, read_value=False),
            _assign_first(self.rows, rows, n),
        ]

    def load(self, optimizer):
        """Restores the slot rows of this worker's optimizer that `keep` saved for the pulled rows; returns operations.

        The slot rows of other rows stay in a hash table.
        """
        if not isinstance(optimizer, tf.train.AdagradOptimizer):
            return []
        if self._slot is None:
            with tf.control_dependencies(None), tf.variable_creator_scope(make_local):
                none = tf.IndexedSlices(tf.zeros([0, self.table.width]), tf.zeros([0], tf.int64))
                optimizer.apply_gradients([(none, self.rows)])  # creates the slot; never run
                self._slot = optimizer.get_slot(self.rows, "accumulator")
                kinds = {"value_dtype": tf.float32, "value_shape": [self.table.width]}
                empty, deleted = (tf.constant(key, tf.int64) for key in (-1, -2))
                # A dense hash table keeps its rows in one tensor. One that allocates each row takes six times as long.
                self._kept = tf.raw_ops.MutableDenseHashTableV2(
                    empty_key=empty, deleted_key=deleted, **kinds, shared_name=self.rows.op.name
                )
                keys, _ = tf.raw_ops.LookupTableExportV2(table_handle=self._kept, Tkeys=tf.int64, Tvalues=tf.float32)
                keys = tf.gather(keys, tf.where(keys >= 0)[:, 0])  # the export includes empty buckets
                with tf.control_dependencies([tf.raw_ops.LookupTableRemoveV2(table_handle=self._kept, keys=keys)]):
                    local_variable(f"{self.table.spec.name}_kept", tf.zeros([]))  # so each session begins empty
            self._first = optimizer._initial_accumulator_value
        first = tf.fill([self.table.width], self._first)
        value = tf.raw_ops.LookupTableFindV2(table_handle=self._kept, keys=self._keys(), default_value=first)
        return [_assign_first(self._slot, tf.ensure_shape(value, [None, self.table.width]), self.count.read_value())]

    def keep(self):
        """Saves the optimizer's slot rows until the next pull of these rows; returns operations."""
        if self._slot is None:
            return []
        values = self._slot.sparse_read(tf.range(self.count.read_value()))
        return [tf.raw_ops.LookupTableInsertV2(table_handle=self._kept, keys=self._keys(), values=values)]

    def _keys(self):
        places = self.places.read_value()[: self.count.read_value()]
        return places + tf.cast(self._index(), tf.int64) * self.table.rows  # several workers may share a process

    def clear(self):
        """Returns the operation that sets the gradients to zero."""
        n = self.count.read_value()
        return _assign_first(self.gradients, tf.zeros([n, self.table.width]), n)

    def find(self, ids):
        """Returns the rows of ids `[..., width]` and their local indices `[...]`. The step fails if a row was not pulled."""
        places, known = self.table.places(ids, check=False), self.places.read_value()
        at = tf.searchsorted(known, tf.reshape(places, [-1]), out_type=tf.int64)
        at = tf.reshape(at, tf.shape(ids))
        is_there = tf.equal(tf.gather(known, tf.minimum(at, self.most - 1)), places)
        at = tf.where(is_there, at, tf.fill(tf.shape(at), tf.constant(self.most, tf.int64)))  # out of range, so the read fails
        return self.rows.sparse_read(at), at

    def add(self, gradients, at):
        """Returns the operation that adds gradients `[n, width]` of rows with indices `[n]`, possibly with duplicates."""
        return tf.raw_ops.ResourceScatterAdd(resource=self.gradients.handle, indices=at, updates=gradients)

    def sums(self):
        """Returns the summed gradients of the rows `[count, width]`."""
        return self.gradients.sparse_read(tf.range(self.count.read_value()))

    def parts(self, values):
        """Shards values `[count, width]` of these rows for the ps; returns `tf.IndexedSlices` for each piece of the table.

        They are empty if the layer is not trainable.
        """
        places = self.places.read_value()[: self.count.read_value()]
        if not self.table.spec.trainable:
            values, places = values[:0], places[:0]
        with tf.control_dependencies([self.pushed.assign_add(tf.size(places, out_type=tf.int64), read_value=False)]):
            places = tf.identity(places)
        pairs = zip(self.table.split(values, places), self.table.cut(places), strict=True)
        return [tf.IndexedSlices(*pair) for pair in pairs]


def _assign_first(variable, value, n):
    """Returns the operation that writes the first n rows of a variable `[most, width]`, in place."""
    # Assigning to a slice takes ten times as long.
    return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=tf.range(n), updates=value)


class WithRows:
    """A vector `[size]` and rows of each table: `local.gradient` of a model with tables. It can be scaled and pushed.

    `rows` are pairs of `LocalRows` and values `[count, width]`, one for each table.
    """

    def __init__(self, vector, rows):
        self.vector, self.rows = vector, rows

    def __mul__(self, factor):
        return WithRows(self.vector * factor, [(own, values * factor) for own, values in self.rows])

    __rmul__ = __mul__

    def __truediv__(self, divisor):
        return WithRows(self.vector / divisor, [(own, values / divisor) for own, values in self.rows])

    def parts(self):
        """Returns `tf.IndexedSlices` of each piece of each table, one table after the other."""
        return [part for own, values in self.rows for part in own.parts(values)]


class Window:
    """The batches of a worker's window and their table rows, prefetched by a pull and used by `train`.

    Args:
      tables: the `common.scheme.Table`s.
      model: a `common.models.Model`.
      batches: see `common.data.Batches`.
      steps: local steps until the next pull.
      index: function that returns the worker number.

    Attributes:
      own: the `LocalRows` of each table.
    """

    def __init__(self, tables, model, batches, steps, index):
        self._tables, self._model, self._batches, self.steps = tables, model, batches, steps
        size = batches.batch_size
        with tf.control_dependencies(None):
            self._drawn = local_variable("drawn", tf.zeros([steps, size], batches.index_type))
            x = batches.samples(tf.zeros([steps * size], batches.index_type))[0]
            pairs = zip(tables, model.ids_of(x, tables), strict=True)
            self.own = [LocalRows(table, sum(_count(ids) for ids in asked), index) for table, asked in pairs]

    def pull(self, step):
        """Draws the batches of the window, and pulls their rows after the read of the global step; returns operations."""
        drawn = self.draw()
        self.ask()
        self.read(lambda device: [*before_read(device), *([step] if step.device == device else [])])
        return [*drawn, *self.take()]

    def draw(self):
        """Draws the batches of the window; returns operations. To be followed by `ask`, `read` and `take`."""
        with tf.control_dependencies(before_local()):
            indices = self._batches.next(self.steps)
            asked = self._model.ids_of(self._batches.samples(tf.reshape(indices, [-1]))[0], self._tables)
            self._places = [own.ask(ids) for own, ids in zip(self.own, asked, strict=True)]
            return [self._drawn.assign(indices, read_value=False)]

    def ask(self):
        """Sends the places of the needed rows to the ps; returns operations there."""
        self._asked = [table.ask(places) for table, places in zip(self._tables, self._places, strict=True)]
        return [each.op for asked in self._asked for each in asked]

    def read(self, before):
        """Reads the rows on the ps; returns operations there. `before` is as of `common.scheme.Table.read`."""
        self._values = [table.read(asked, before) for table, asked in zip(self._tables, self._asked, strict=True)]
        return [each.op for values in self._values for each in values]

    def take(self):
        """Stores the rows on this worker; returns operations."""
        took = zip(self.own, self._places, self._values, strict=True)
        return [operation for own, places, values in took for operation in own.take(places, values)]

    def batches_of(self, start, window):
        """Returns the sample indices `[window, batch_size]` of the batches from local step `start` on."""
        return self._drawn.read_value()[start : start + window]

    def begin(self, optimizer, accumulate, optimizers):
        """Begins a local training: restores slots and clears gradients; returns operations.

        Args:
          optimizer: this worker's optimizer.
          accumulate: whether gradients are added to the existing sums, instead of to zero.
          optimizers: the `common.scheme.Optimizers` of this worker.
        """
        used = optimizers.use(optimizer)
        return [op for own in self.own for op in [*own.load(used), *([] if accumulate else [own.clear()])]]

    def keep(self):
        """Ends a local training: saves slots; returns operations."""
        return [op for own in self.own for op in own.keep()]

    def clipped(self, gradient, of_rows, norm):
        """Returns the gradients of the vector and of rows, clipped by their global norm."""
        squares = tf.reduce_sum(gradient * gradient)
        for values, at in of_rows:
            _, which = tf.unique(at)
            sums = tf.math.unsorted_segment_sum(values, which, tf.size(at))
            squares += tf.reduce_sum(sums * sums)
        scale = norm / tf.maximum(tf.sqrt(squares), norm)
        return gradient * scale, [(values * scale, at) for values, at in of_rows]

    def told(self):
        """Returns the tensors for `what_travelled`."""
        counts = ((own, (own.pulls, own.asked, own.pulled, own.pushed)) for own in self.own)
        return [[*(v.read_value() for v in of_one), own.table.told()] for own, of_one in counts]

    def gradient(self, vector):
        """Returns the `WithRows` of a vector and the summed gradients of the rows."""
        return WithRows(vector, [(own, own.sums()) for own in self.own])


def what_travelled(specs, told):
    """Returns a list of dicts for `result.json`: for each table, one worker's average pulls and pushes per round.

    `told` are the values of `Window.told`.
    """
    found = []
    for spec, (pulls, asked, pulled, pushed, of_ps) in zip(specs, told, strict=True):
        rounds, rows = max(1, int(pulls)), int(pulled.sum())
        found.append(
            {
                "layer": spec.layer,
                "rows": sum(int(count) for count, _ in of_ps) if spec.rows is None else spec.rows,
                "width": spec.width,
                **({"dropped_rows": sum(int(dropped) for _, dropped in of_ps)} if spec.rows is None else {}),
                "ids_per_round": int(asked) / rounds,
                "rows_per_round": rows / rounds,
                "repeated": 1 - rows / max(1, int(asked)),  # the share of ids without a row transfer
                "bytes_pulled_per_round": rows * (8 + 4 * spec.width) / rounds,  # the places go up first, 8 bytes each
                "bytes_pushed_per_round": int(pushed) * (8 + 4 * spec.width) / rounds,
                "rows_per_round_and_ps": [int(n) / rounds for n in pulled],
            }
        )
    return found


def numbers_of(specs, told):
    """Returns the numbers of `what_travelled` for TensorBoard, {name: number}, with the layer before each name."""
    found: dict = {}
    for table in what_travelled(specs, told):
        per_ps = table.pop("rows_per_round_and_ps")
        found |= {f"{table['layer']}_{name}": n for name, n in table.items() if name not in ("layer", "width")}
        found |= {f"{table['layer']}_rows_per_round_ps_{i}": n for i, n in enumerate(per_ps)}
    return found


def dropped(travelled, max_rows):
    """Yields a line for each table with dropped rows; `travelled` is the result of `what_travelled`."""
    for table in travelled:
        if count := table.get("dropped_rows"):
            yield f"{table['layer']}: {count:,} rows made room for others (--max_rows={max_rows}); used again, they start anew"


def _count(ids):
    """Returns the static number of ids in a tensor."""
    if (count := ids.shape.num_elements()) is None:
        raise UserError(f"the number of ids in a batch is not fixed (shape {ids.shape}): expected a fixed length")
    return count
