"""Tables of `common.Embedding` on the ps: a worker holds only the rows for its next window."""

import contextlib
import contextvars
import math
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import tf
from common.core import ROOM, TABLES, TablePart, UserError, limits, rows_in
from common.data import arrays_in, local_variable, make_local, mapped
from common.scheme.steps import before_local, before_read

ROW_BY_ROW = "GradientDescentOptimizer", "AdagradOptimizer"  # they change only rows with a gradient
ROW_BY_ROW_ON_PS = *ROW_BY_ROW, "RowwiseAdagrad"
SCHEMES = "HogWild, DOWNPOUR, DOWNPOUR-Easy, AGN, Dynamic-SGD, Ringmaster-ASGD, Synchronous-SGD, Semi-Synchronous-SGD"
IDS = 2**53  # exclusive upper bound of ids in an unbounded table; float64 represents all smaller integers
LEAST = 2.0**-24  # lower bound of uniform numbers between 0 and 1
TWO_SIGMA = 0.022750131948179207  # probability of a normal value more than two standard deviations below the mean
CHECKED = 100_000  # samples per batch of the id check
BLOCKS = 64  # blocks of rows in a table; the initial values of a block come from one seed

_on_ps: contextvars.ContextVar[int | None] = contextvars.ContextVar("_on_ps", default=None)
_finder: contextvars.ContextVar[Any] = contextvars.ContextVar("_finder", default=None)


@contextlib.contextmanager
def on_ps(seed):
    """Puts the tables of layers that are created in this context on the ps.

    Args:
      seed: seed of the initial rows, for layers whose initializer has none; the same in all tasks.
    """
    token = _on_ps.set(seed)
    try:
        yield
    finally:
        _on_ps.reset(token)


def are_on_ps():
    """Returns whether new layers have their tables on the ps."""
    return seed_on_ps() is not None


def seed_on_ps():
    """Returns the seed of the initial rows of new layers; None if their tables are not on the ps."""
    return _on_ps.get()


@contextlib.contextmanager
def found_by(find):
    """Sets the layers' lookup function, of a layer and ids, int32 or int64 of any shape; it returns rows `[..., width]`."""
    token = _finder.set(find)
    try:
        yield
    finally:
        _finder.reset(token)


def finder():
    """Returns the layers' lookup function; None in a trial call of a model.

    Raises:
      UserError: in a graph that computes with the model without a lookup function.
    """
    find = _finder.get()
    if find is None and not tf.executing_eagerly() and not tf.get_default_graph().building_function:
        raise UserError("the model has tables on the ps (common.Embedding), which this program does not look up there")
    return find


class Spec(NamedTuple):
    """Description of the table of a `common.Embedding` layer."""

    name: str  # name of its variable
    layer: str  # name of the layer
    rows: Any  # number of rows; None for an unbounded table, see `common.scheme.unbounded`
    width: int  # numbers in a row
    initial: Any  # function of uniform numbers between 0 and 1, float32, that returns the initial values of rows
    seed: int = 0  # seed of these numbers
    trainable: bool = True  # whether workers push gradients of its rows

    @property
    def ids(self):
        """Exclusive upper bound of the ids."""
        return IDS if self.rows is None else self.rows


def specs_of(layers):
    """Returns the `Spec`s of all `common.Embedding` layers of a model."""
    shapes = [(layer.input_dim, layer.output_dim) for layer in layers]
    for i, layer in enumerate(layers):
        if layer.seed_of_rows is None:
            layer.seed_of_rows = zlib.crc32(f"{layer.seed} {i}".encode())
    how = [(_initial(each), _seed_of(each.embeddings_initializer, each.seed_of_rows) % 2**31) for each in layers]
    of_layers = [(each.name, *shapes[i], *how[i], each.trainable) for i, each in enumerate(layers)]
    return [Spec(f"{i}_{_stem(more[0])}", *more) for i, more in enumerate(of_layers)]


def _stem(name):
    """Returns a layer name as a valid variable name, without the number from Keras, which may differ between tasks."""
    return re.sub(r"\W", "_", re.sub(r"_\d+$", "", name), flags=re.ASCII)


def check_ids(model, x):
    """Raises a `UserError` if samples have ids outside of the model's tables.

    Args:
      model: a `common.models.Model`.
      x: samples, an array or `common.data.Rows` `[n, ...]`, or several in a tuple or dict.
    """
    _check_types(model, x)
    with tf.Graph().as_default():
        feeds = mapped(lambda array: tf.placeholder(array.dtype, [None, *array.shape[1:]]), x)
        found = []
        for ids in model.ids_of(feeds, model.tables):
            flat = [tf.cast(tf.reshape(each, [-1]), tf.int64) for each in ids]
            found.append([(tf.reduce_min(each), tf.reduce_max(each)) for each in flat])
        arrays, places = arrays_in(x), arrays_in(feeds)
        with tf.Session() as session:
            for start in range(0, len(arrays[0]), CHECKED):
                part = {place: array[start : start + CHECKED] for place, array in zip(places, arrays, strict=True)}
                for spec, ends in zip(model.tables, session.run(found, part), strict=True):
                    for least, most in ends:
                        if least < 0 or most >= spec.ids:
                            which = f"{spec.layer} has rows 0 to {spec.ids - 1:,}"
                            hint = " (a number that is not whole counts as -1)" if least == -1 else ""
                            raise UserError(f"{which}, but the samples have ids from {least:,} to {most:,}{hint}")


def _check_types(model, x):
    """Raises a `UserError` for samples that do not fit an integer input, since Keras would silently truncate or wrap them."""
    for tensor, array in _inputs_of(model.keras_model, x):
        dtype = tf.as_dtype(tensor.dtype)
        if not dtype.is_integer:
            continue
        for start in range(0, len(array), CHECKED):
            part = np.asarray(array[start : start + CHECKED])
            if part.dtype.kind == "f" and (wrong := part[part != np.floor(part)]).size:
                raise UserError(f"the input {tensor.name} takes whole numbers, but the samples have {wrong[0]:g} there")
            if part.size and (part.min() < dtype.min or part.max() > dtype.max):
                raise UserError(
                    f"the input {tensor.name} takes {dtype.name}, but the samples have numbers from {part.min():,} to "
                    f'{part.max():,} there: give keras.Input(..., dtype="int64")'
                )


def _inputs_of(keras_model, x):
    """Returns pairs of an input and its samples `[n, ...]` for a functional or sequential model; no pairs for others."""
    if not isinstance(x, dict):
        return list(zip(getattr(keras_model, "inputs", None) or [], arrays_in(x), strict=False))
    named = named_inputs(keras_model)
    return [(named[name], array) for name, array in x.items() if name in named and hasattr(named[name], "dtype")]


def named_inputs(keras_model):
    """Returns {name: input} of a functional or sequential model; an empty dict for other models."""
    inputs = getattr(keras_model, "_inputs_struct", None)
    return inputs if isinstance(inputs, dict) else {v.name: v for v in getattr(keras_model, "inputs", None) or []}


def _seed_of(initializer, seed):
    """Returns the user's seed of a Keras initializer, else `seed`."""
    given = getattr(initializer, "_init_seed", None)
    given = getattr(given, "_initial_seed", given)
    return given if isinstance(given, int) else seed


def _initial(layer):
    """Returns `Spec.initial` for a layer.

    Raises:
      UserError: for an initializer that needs the whole table, or is unknown.
    """
    how = layer.embeddings_initializer

    def normal(least, most):
        """Returns the inverse normal distribution function, restricted to these two probabilities."""
        return lambda u: how.mean + how.stddev * tf.math.ndtri(least + (most - least) * u)

    kinds = {
        "RandomUniform": lambda u: how.minval + (how.maxval - how.minval) * u,
        "RandomNormal": normal(0.0, 1.0),
        "TruncatedNormal": normal(TWO_SIGMA, 1 - TWO_SIGMA),
        "Zeros": tf.zeros_like,
        "Ones": tf.ones_like,
        "Constant": lambda u: tf.fill(tf.shape(u), float(how.value)),
    }
    if type(how).__name__ not in kinds:
        raise UserError(
            f"{layer.name}: the initializer {type(how).__name__} is for the whole table, but that is on the ps: choose "
            + ", ".join(kinds)
        )
    return kinds[type(how).__name__]


class Table:
    """A table, sharded evenly over the ps.

    Row r of the layer lies at place (r · a) mod rows, where a is near the golden section of the rows: neighbours lie far from
    each other. So hot rows, which often have small ids, spread over all ps. Checkpoints hold the table unsharded, in the order
    of places, so the number of ps may change.

    Args:
      spec: a `Spec`.
      num_ps: number of pieces.
      device_fn: puts piece i on ps task i; None puts all on this process.

    Attributes:
      spec, rows, width: of the table.
      pieces: variables, one on each ps.
      starts: the first place of each piece.
    """

    def __init__(self, spec, num_ps, device_fn):
        self.spec, self.rows, self.width = spec, spec.rows, spec.width
        self._factor, self._block = factor_of(self.rows), math.ceil(self.rows / BLOCKS)
        initial = lambda shape, dtype=None, partition_info=None: self._initial(partition_info, shape)  # noqa: E731
        self.pieces = self._variable(min(num_ps, self.rows), self.rows, device_fn, initial)
        sizes = [int(piece.shape[0]) for piece in self.pieces]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]

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
        """Returns the requested rows of each piece, on its ps.

        Args:
          asked: the result of `ask`.
          before: function of a device that returns the operations that must end before a read there.
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

        Args:
          optimizer: a `tf.train.Optimizer` that changes only rows with a gradient.
          gradient: `tf.IndexedSlices` with the indices of `cut` for this piece, each row once.
          piece: one of `pieces`.
        """
        return optimizer.apply_gradients([(gradient, piece)])

    def told(self):
        """Returns tensors with statistics of the ps; see `what_travelled`."""
        return []

    def parts(self, variables):
        """Returns the saved parts, a list of `common.core.TablePart`, including the table's slots among `variables`."""
        names = tuple(f"{piece.op.name}/" for piece in self.pieces)
        return [TablePart(v) for v in [*self.pieces, *(v for v in variables if v.op.name.startswith(names))]]

    def cut(self, places):
        """Splits sorted places into the row indices of each piece."""
        if len(self.pieces) == 1:
            return [places]
        return [part - start for part, start in zip(tf.split(places, self.counts(places)), self.starts, strict=True)]

    def counts(self, places):
        """Returns the number of sorted places in each piece, an int64 vector."""
        ends = tf.searchsorted(places, tf.constant([*self.starts[1:], self.rows], tf.int64), out_type=tf.int64)
        return ends - tf.concat([[0], ends[:-1]], axis=0)


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


def rows_of(where, layer, ids=None):
    """Returns rows of a table from a checkpoint, an array `[n, width]`.

    Args:
      where: path of a checkpoint, or folder of a run, for its newest checkpoint.
      layer: the name of the `common.Embedding`.
      ids: the row ids, an array `[n]`; None for all rows, in the order of their ids.

    Raises:
      UserError: if the checkpoint, table or row does not exist.
    """
    from common.core import checkpoints_in

    found = checkpoints_in(Path(where, "checkpoints")) if Path(where).is_dir() else [str(where)]
    if not found or not tf.train.checkpoint_exists(found[-1]):
        raise UserError(f"{where}: expected a checkpoint, as R/checkpoints/model.ckpt-100, or the folder of a run that has one")
    names = tf.train.load_checkpoint(found[-1]).get_variable_to_shape_map()
    names = sorted(each[1] for name in names if (each := re.fullmatch(rf"{TABLES}(\d+_\w+)", name)))
    these = [name for name in names if layer == name or _stem(layer) == name.partition("_")[2]]
    if len(these) != 1:
        every = ", ".join(names) or "none"
        raise UserError(f"{found[-1]} has {len(these) or 'no'} tables of a layer {layer}: expected one of {every}")
    has, rows = rows_in_order(found[-1], these[0])
    ids = has if ids is None else np.asarray(ids)
    at = np.searchsorted(has, ids).clip(max=len(has) - 1)
    if (none := ids[has[at] != ids]).size:
        raise UserError(f"{found[-1]} has no row {none[0]} of {layer}")
    return rows(at)


def rows_in_order(checkpoint, name):
    """Returns the sorted ids of a table in a checkpoint, int64 `[n]`, and a function that reads rows.

    The function maps indices into these ids, `[k]`, to their rows `[k, width]`, and reads in chunks.
    """
    name, shapes = TABLES + name, tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map()
    length = shapes[name][0]
    if f"{name}-places" in shapes:
        there = np.concatenate([part for _, part in rows_in(checkpoint, f"{name}-places", [length], dtype=tf.int64)])
        places = np.flatnonzero(there >= 0)
        ids = id_of(there[places])
        order = np.argsort(ids)
        ids, places = ids[order], places[order]
    else:
        ids = np.arange(length)
        places = ids * factor_of(length) % length

    def rows(numbers):
        wanted, found = places[numbers], np.empty([len(numbers), shapes[name][1]], np.float32)
        for start, values in rows_in(checkpoint, name, shapes[name]):
            here = (start <= wanted) & (wanted < start + len(values))
            found[here] = values[wanted[here] - start]
        return found

    return ids, rows


def whole(checkpoint, spec):
    """Returns the argument of `Embedding.fill`: all rows of a table; for an unbounded table its sorted ids and the rows."""
    ids, rows = rows_in_order(checkpoint, spec.name)
    every = rows(np.arange(len(ids)))
    return every if spec.rows else (ids, every)


def numbers_in(checkpoint, specs):
    """Returns the number of parameters of tables in a checkpoint."""
    shapes = tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map()
    return sum(math.prod(shapes[TABLES + spec.name]) for spec in specs)


def check_flags(settings, specs):
    """Raises a `UserError` for table flags without effect, and for tables larger than the memory."""
    given = {"table_optimizer": "scheme", "save_tables": "yes", "max_rows": ROOM, "table_learning_rate": None}
    if not specs:
        for name, default in given.items():
            if getattr(settings, name) != default:
                raise UserError(f"--{name} is for tables on the ps, but the model has none: give it a layer common.Embedding")
    elif settings.max_rows != given["max_rows"] and all(spec.rows for spec in specs):
        raise UserError("--max_rows is for tables without a fixed size, common.Embedding(None, width), but the model has none")
    need, has = 4 * sum((spec.rows or settings.max_rows) * spec.width for spec in specs), limits.memory()
    if settings.launch and need > has:
        raise UserError(
            f"the tables of the model take {limits.as_bytes(need)} on the ps, but this machine, where all ps run, "
            f"has {limits.as_bytes(has)} of memory: give them fewer rows, or start the ps on several machines"
        )
    if settings.table_learning_rate is not None and settings.table_optimizer == "scheme":
        raise UserError("--table_learning_rate: choose a --table_optimizer, sgd, adagrad or rowwise_adagrad, for it")


def check_data(model, samples, is_stream):
    """Raises a `UserError` for streams, and for samples with ids outside of the model's tables.

    Args:
      model: a `common.models.Model`.
      samples: the samples of each data set, as in `check_ids`.
      is_stream: whether the workers read samples from a stream in training.
    """
    if not model.tables:
        return
    if is_stream:
        raise UserError("with common.Embedding a worker has to know the samples of its next window: give arrays, not a stream")
    for x in samples:
        check_ids(model, x)


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


def find_on_ps(tables):
    """Returns a lookup function for `found_by` that reads the current rows from the ps, for evaluation.

    Args:
      tables: `Table`s, in the order of the model's layers.
    """

    def find(layer, ids):
        table = tables[layer.number]
        places, where = tf.unique(tf.reshape(table.places(ids), [-1]))
        order = tf.argsort(places)
        values = table.look(table.ask(tf.gather(places, order)))
        found = tf.gather(tf.concat(values, axis=0), tf.gather(tf.math.invert_permutation(order), where))
        return tf.reshape(found, tf.concat([tf.shape(ids), [table.width]], axis=0))

    return find


class Asked:
    """A lookup function for `found_by` that records the requested ids.

    Args:
      tables: the tables of the model.
      values: placeholders for its variables, since ids must not depend on variables.

    Attributes:
      ids: for each table, a list of tensors.
    """

    def __init__(self, tables, values=()):
        self._rows: set[Any] = set()
        self._values = {value.op for value in values}
        self.ids: list[list[Any]] = [[] for _ in tables]

    def __call__(self, layer, ids):
        self._check(layer, ids)
        self.ids[layer.number].append(ids)
        given = tf.zeros(tf.concat([tf.shape(ids), [layer.output_dim]], axis=0))
        given.set_shape([*ids.shape, layer.output_dim])
        self._rows.add(given.op)
        return given

    def _check(self, layer, ids):
        """Raises a `UserError` if these ids depend on more than samples: they must be known before rows are pulled."""
        seen, todo = set(), [ids.op]
        while todo:
            op = todo.pop()
            if op in seen:
                continue
            seen.add(op)
            is_random = op.op_def is not None and op.op_def.is_stateful and "Random" in op.type
            kinds = (op in self._rows, "rows of a table"), (op in self._values, "variables of the model"), (is_random, "chance")
            for is_so, on in kinds:
                if is_so:
                    raise UserError(f"the ids of the layer {layer.name} depend on {on}: expected samples alone")
            todo += [*(tensor.op for tensor in op.inputs), *op.control_inputs]


class LocalRows:
    """The rows of one table that a worker has pulled, and the sum of their gradients.

    Args:
      table: the `Table`.
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
        """Restores the optimizer's slot rows that `keep` saved for the pulled rows; returns operations.

        Args:
          optimizer: this worker's optimizer, one of `ROW_BY_ROW`. Slot rows of other rows stay in a hash table.
        """
        if not isinstance(optimizer, tf.train.AdagradOptimizer):
            return []
        if self._slot is None:
            with tf.control_dependencies(None), tf.variable_creator_scope(make_local):
                none = tf.IndexedSlices(tf.zeros([0, self.table.width]), tf.zeros([0], tf.int64))
                optimizer.apply_gradients([(none, self.rows)])  # creates the slot; never run
                self._slot = optimizer.get_slot(self.rows, "accumulator")
                shape = [self.table.width]
                kinds = {"value_dtype": tf.float32, "value_shape": shape}
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
        cut = tf.split(values, self.table.counts(places)) if len(self.table.pieces) > 1 else [values]
        return [tf.IndexedSlices(*pair) for pair in zip(cut, self.table.cut(places), strict=True)]


def _assign_first(variable, value, n):
    """Returns the operation that writes the first n rows of a variable `[most, width]`, in place."""
    # Assigning to a slice takes ten times as long.
    return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=tf.range(n), updates=value)


class WithRows:
    """A vector `[size]` and rows of each table: `local.gradient` of a model with tables. It can be scaled and pushed.

    Args:
      vector: a tensor or variable.
      rows: pairs of `LocalRows` and values `[count, width]`, one for each table.
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
      tables: the `Table`s.
      model: a `common.models.Model`.
      batches: see `common.data.Batches`.
      steps: local steps until the next pull.
      index: function that returns the worker number.

    Attributes:
      steps: as above.
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
        """Draws the batches of the window and pulls their rows; returns operations.

        Args:
          step: the global step, read on its ps: that ps reads rows after it.
        """
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
        """Reads the rows on the ps; returns operations there.

        Args:
          before: function of a device that returns the operations that must end before a read there.
        """
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
        tensors = ((own.pulls, own.asked, own.pulled, own.pushed) for own in self.own)
        return [[*(v.read_value() for v in mine), own.table.told()] for mine, own in zip(tensors, self.own, strict=True)]

    def gradient(self, vector):
        """Returns the `WithRows` of a vector and the summed gradients of the rows."""
        return WithRows(vector, [(own, own.sums()) for own in self.own])


def what_travelled(specs, told):
    """Returns a list of dicts for `result.json`: for each table, one worker's average pulls and pushes per round.

    Args:
      specs: `Spec`s.
      told: the values of `Window.told`.
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


def _count(ids):
    """Returns the static number of ids in a tensor."""
    if (count := ids.shape.num_elements()) is None:
        raise UserError(f"the number of ids in a batch is not fixed (shape {ids.shape}): expected a fixed length")
    return count
