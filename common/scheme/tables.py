"""Tables on the ps, of which a worker has only the rows that its next window needs: those of `common.Embedding`."""

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

ROW_BY_ROW = "GradientDescentOptimizer", "AdagradOptimizer"  # change no row that has no gradient
ROW_BY_ROW_ON_PS = *ROW_BY_ROW, "RowwiseAdagrad"
SCHEMES = "HogWild, DOWNPOUR, DOWNPOUR-Easy, AGN, Dynamic-SGD, Ringmaster-ASGD, Synchronous-SGD, Semi-Synchronous-SGD"
IDS = 2**53  # ids of a table without an end are smaller; as many are whole numbers in float64, too
LEAST = 2.0**-24  # of numbers that are uniform between 0 and 1
TWO_SIGMA = 0.022750131948179207  # the probability to be more than two standard deviations below the mean
CHECKED = 100_000  # samples whose ids are looked at together
BLOCKS = 64  # of rows whose first values come from one seed each

_on_ps: contextvars.ContextVar[int | None] = contextvars.ContextVar("_on_ps", default=None)
_finder: contextvars.ContextVar[Any] = contextvars.ContextVar("_finder", default=None)


@contextlib.contextmanager
def on_ps(seed):
    """Layers that are made meanwhile have their tables on the ps.

    Args:
      seed: of the first rows, for layers whose initializer has none of its own; the same in all tasks.
    """
    token = _on_ps.set(seed)
    try:
        yield
    finally:
        _on_ps.reset(token)


def are_on_ps():
    """Returns whether a layer that is made now has its table on the ps."""
    return seed_on_ps() is not None


def seed_on_ps():
    """Returns the seed of the first rows of a layer that is made now; None if its table is not on the ps."""
    return _on_ps.get()


@contextlib.contextmanager
def found_by(find):
    """Layers get their rows by this function of a layer and ids, int32 or int64 of any shape; it returns `[..., width]`."""
    token = _finder.set(find)
    try:
        yield
    finally:
        _finder.reset(token)


def finder():
    """Returns the function by which layers get rows; None where a model is only tried.

    Raises:
      UserError: in a graph that computes with the model, and does not say where its tables are.
    """
    find = _finder.get()
    if find is None and not tf.executing_eagerly() and not tf.get_default_graph().building_function:
        raise UserError("the model has tables on the ps (common.Embedding), which this program does not look up there")
    return find


class Spec(NamedTuple):
    """What a table is: a layer's, or several layers' that are one."""

    name: str  # of its variable
    layer: str  # the name of the layer
    rows: Any  # how many; None for a table without an end, see `common.scheme.unbounded`
    width: int  # numbers in a row
    initial: Any  # function of uniform numbers between 0 and 1, float32, that returns the values with which rows begin
    seed: int = 0  # of these numbers
    trainable: bool = True  # whether workers push gradients of its rows

    @property
    def ids(self):
        """Ids are smaller than this."""
        return IDS if self.rows is None else self.rows


def specs_of(layers):
    """Returns the `Spec`s of `common.Embedding` layers, all those of a model."""
    shapes = [(layer.input_dim, layer.output_dim) for layer in layers]
    for i, layer in enumerate(layers):
        if layer.seed_of_rows is None:
            layer.seed_of_rows = zlib.crc32(f"{layer.seed} {i}".encode())
    how = [(_initial(each), _seed_of(each.embeddings_initializer, each.seed_of_rows) % 2**31) for each in layers]
    of_layers = [(each.name, *shapes[i], *how[i], each.trainable) for i, each in enumerate(layers)]
    return [Spec(f"{i}_{_stem(more[0])}", *more) for i, more in enumerate(of_layers)]


def _stem(name):
    """Returns the name of a layer as a variable may have it, without the number from Keras, which may differ between tasks."""
    return re.sub(r"\W", "_", re.sub(r"_\d+$", "", name), flags=re.ASCII)


def check_ids(model, x):
    """Raises a `UserError` if samples have ids that are no rows of the model's tables.

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
    """Raises a `UserError` for samples that an input of whole numbers does not hold: Keras would cut or wrap them unsaid."""
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
    """Returns pairs of an input of a functional or sequential model and its samples `[n, ...]`; none of other models."""
    if not isinstance(x, dict):
        return list(zip(getattr(keras_model, "inputs", None) or [], arrays_in(x), strict=False))
    named = named_inputs(keras_model)
    return [(named[name], array) for name, array in x.items() if name in named and hasattr(named[name], "dtype")]


def named_inputs(keras_model):
    """Returns {name: input} of a functional or sequential model; an empty dict of other models."""
    inputs = getattr(keras_model, "_inputs_struct", None)
    return inputs if isinstance(inputs, dict) else {v.name: v for v in getattr(keras_model, "inputs", None) or []}


def _seed_of(initializer, seed):
    """Returns the seed that the user has given an initializer of Keras; the other one, if there is none."""
    given = getattr(initializer, "_init_seed", None)
    given = getattr(given, "_initial_seed", given)
    return given if isinstance(given, int) else seed


def _initial(layer):
    """Returns what `Spec` has as `initial`, for a layer.

    Raises:
      UserError: for an initializer that computes rows from the whole table, or that we do not know.
    """
    how = layer.embeddings_initializer

    def normal(least, most):
        """Numbers uniform between these two probabilities, as a normal distribution has them."""
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
    """A table on the ps, cut evenly over them.

    Row r of the layer lies at place (r · a) mod rows, where a is near the golden section of the rows: neighbours lie far from
    each other. So rows that are used much, which often have small numbers, are on all ps. Checkpoints hold the table whole, in
    the order of places, and the number of ps may change.

    Args:
      spec: a `Spec`.
      num_ps: pieces to cut it into.
      device_fn: puts piece i on ps task i; None puts all on this process.

    Attributes:
      spec, rows, width: of the table.
      pieces: variables, one on each ps.
      starts: the place at which each begins.
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
        """Returns the first values of a piece `[n, width]`: a row has the same on any number of ps."""
        start, n = part.var_offset[0], int(shape[0])
        first, last = start // self._block, (start + n - 1) // self._block
        # Not in a loop: what a loop computes is not on the ps.
        how = {"shape": [self._block, self.width], "minval": LEAST}
        uniform = [tf.random.stateless_uniform(seed=[self.spec.seed, i], **how) for i in range(first, last + 1)]
        blocks = [self.spec.initial(each) for each in uniform]
        blocks[-1] = blocks[-1][: start + n - last * self._block]
        blocks[0] = blocks[0][start - first * self._block :]
        return tf.ensure_shape(tf.concat(blocks, axis=0), [n, self.width])

    def places(self, ids, check=True):
        """Returns the places of ids, int64; they have to be rows of the table, else the step fails."""
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
        """Sends sorted places, int64 `[n]`, to the ps; returns rows of each piece, where it is."""
        asked = []
        for piece, here in zip(self.pieces, self.cut(places), strict=True):
            with tf.control_dependencies(None), tf.device(piece.device):
                asked.append(tf.identity(here))
        return asked

    def read(self, asked, before):
        """Returns the rows of each piece, where it is, that `ask` has returned.

        Args:
          asked: as above.
          before: function of a device that returns what must end before a read there.
        """
        values = []
        for piece, here in zip(self.pieces, asked, strict=True):
            with tf.control_dependencies(None), tf.device(piece.device), tf.control_dependencies(before(piece.device)):
                values.append(piece.sparse_read(here))
        return values

    def look(self, asked):
        """Returns the rows of each piece as they are now, for what is evaluated."""
        return self.read(asked, lambda device: [])

    def apply(self, optimizer, gradient, piece):
        """piece ← optimizer(piece, gradient), where it is, for rows; returns the operation.

        Args:
          optimizer: a `tf.train.Optimizer` that changes rows with a gradient alone.
          gradient: `tf.IndexedSlices`, of what `cut` returns for this piece, each row once.
          piece: one of `pieces`.
        """
        return optimizer.apply_gradients([(gradient, piece)])

    def told(self):
        """Returns tensors, what the ps tell of it at the end; see `what_travelled`."""
        return []

    def parts(self, variables):
        """Returns what is saved of it, a list: as `common.core.TablePart`. Of `variables` that which lies beside it, too."""
        names = tuple(f"{piece.op.name}/" for piece in self.pieces)
        return [TablePart(v) for v in [*self.pieces, *(v for v in variables if v.op.name.startswith(names))]]

    def cut(self, places):
        """Returns sorted places as lists of rows of each piece."""
        if len(self.pieces) == 1:
            return [places]
        return [part - start for part, start in zip(tf.split(places, self.counts(places)), self.starts, strict=True)]

    def counts(self, places):
        """Returns how many of sorted places lie in each piece, an int64 vector."""
        ends = tf.searchsorted(places, tf.constant([*self.starts[1:], self.rows], tf.int64), out_type=tf.int64)
        return ends - tf.concat([[0], ends[:-1]], axis=0)


MIXERS = 0xFF51AFD7ED558CCD % IDS, 0xC4CEB9FE1A85EC53 % IDS  # odd


def place_of(ids):
    """Returns the places of ids in a table without an end, int64, a tensor or an array: mixed, no two alike.

    Bits are mixed as at the end of MurmurHash3 (`fmix64` of aappleby/smhasher), on 53 bits: ids that are multiples of something
    are spread as evenly as others.
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
    """Returns the values `[n, width]` with which rows of a table without an end begin, by their places and the seed alone."""
    numbers = place_of((place_of(spec.seed) + tf.range(spec.width, dtype=tf.int64)) % IDS)
    mixed = place_of((places[:, None] + numbers) % IDS)
    return spec.initial(tf.maximum(tf.cast(mixed // 2**29, tf.float32) * LEAST, LEAST))  # the 24 bits that float32 has


def factor_of(rows):
    """Returns the number a by which row r comes to place (r · a) mod rows, see `Table`; it and rows have no common divisor."""
    if rows >= 2**31:
        raise UserError(f"a table of {rows:,} rows is too large: expected fewer than {2**31:,}")
    factor = max(1, round(rows * 0.6180339887))
    while math.gcd(factor, rows) != 1:
        factor += 1
    return factor


def rows_of(where, layer, ids=None):
    """Returns rows of a table from a checkpoint, an array `[n, width]`.

    Args:
      where: path of a checkpoint, or the folder of a run, whose newest one is taken.
      layer: the name of the `common.Embedding`.
      ids: of the rows, an array `[n]`; None for all of them, in the order of their ids.

    Raises:
      UserError: if there is no such checkpoint, table or row.
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
    """Returns the ids of a table in a checkpoint in their order, int64 `[n]`, and a function of numbers in it, `[k]`, that
    returns their rows `[k, width]`. It reads a few rows at a time."""
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
    """Returns what `Embedding.fill` takes: all rows of a table, or, without an end, their ids in order, and the rows."""
    ids, rows = rows_in_order(checkpoint, spec.name)
    every = rows(np.arange(len(ids)))
    return every if spec.rows else (ids, every)


def numbers_in(checkpoint, specs):
    """Returns how many numbers tables have in a checkpoint."""
    shapes = tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map()
    return sum(math.prod(shapes[TABLES + spec.name]) for spec in specs)


def check_flags(settings, specs):
    """Raises a `UserError` for flags of tables that would change nothing, and for tables that no memory is there for."""
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
    """Raises a `UserError` if these samples do not say which rows of the model's tables they need.

    Args:
      model: a `common.models.Model`.
      samples: of each set of data its samples, as `check_ids` takes them.
      is_stream: whether the workers read them meanwhile.
    """
    if not model.tables:
        return
    if is_stream:
        raise UserError("with common.Embedding a worker has to know the samples of its next window: give arrays, not a stream")
    for x in samples:
        check_ids(model, x)


def numbers_of(specs, told):
    """Returns {name: number} for TensorBoard: what `what_travelled` has, with the layer before each name."""
    found: dict = {}
    for table in what_travelled(specs, told):
        per_ps = table.pop("rows_per_round_and_ps")
        found |= {f"{table['layer']}_{name}": n for name, n in table.items() if name not in ("layer", "width")}
        found |= {f"{table['layer']}_rows_per_round_ps_{i}": n for i, n in enumerate(per_ps)}
    return found


def dropped(travelled, max_rows):
    """Yields a line for each table of which rows were dropped; `travelled` is what `what_travelled` returns."""
    for table in travelled:
        if count := table.get("dropped_rows"):
            yield f"{table['layer']}: {count:,} rows made room for others (--max_rows={max_rows}); used again, they start anew"


def find_on_ps(tables):
    """Returns a function as `found_by` takes it, which reads the present rows from the ps: for what is evaluated.

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
    """Notes which ids layers ask for, as `found_by` takes it.

    Args:
      tables: of the model.
      values: tensors that stand for its variables, on which ids must not depend.

    Attributes:
      ids: of each table, a list of tensors.
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
        """Raises a `UserError` if these ids come from more than samples: they have to be known before rows are pulled."""
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
      most: how many they can be.
      index: function that returns the number of the worker.

    Attributes:
      places: sorted, int64 `[most]`; behind the last one there is the number of rows of the table.
      count: how many there are, an int64 scalar.
      rows, gradients: `[most, width]`.
      pulls, asked, pulled, pushed: how many pulls there were, for how many ids, how many rows came from each ps, and how many
        were pushed: int64 variables.
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
        """Returns the sorted places of these ids, a list of tensors, each once."""
        flat = tf.concat([tf.reshape(self.table.places(each), [-1]) for each in ids], axis=0)
        self._ids = tf.size(flat, out_type=tf.int64)
        return tf.sort(tf.unique(flat)[0])

    def take(self, places, values):
        """These rows, of each piece, are those of this worker now; returns operations."""
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
        """What the optimizer keeps of these rows becomes what `keep` has kept of them; returns operations.

        Args:
          optimizer: of this worker, one of `ROW_BY_ROW`. What it keeps of other rows waits in a hash table.
        """
        if not isinstance(optimizer, tf.train.AdagradOptimizer):
            return []
        if self._slot is None:
            with tf.control_dependencies(None), tf.variable_creator_scope(make_local):
                none = tf.IndexedSlices(tf.zeros([0, self.table.width]), tf.zeros([0], tf.int64))
                optimizer.apply_gradients([(none, self.rows)])  # which makes it, and is never run
                self._slot = optimizer.get_slot(self.rows, "accumulator")
                shape = [self.table.width]
                kinds = {"value_dtype": tf.float32, "value_shape": shape}
                empty, deleted = (tf.constant(key, tf.int64) for key in (-1, -2))
                # Its rows lie in one tensor. A table that allocates each row takes six times as long.
                self._kept = tf.raw_ops.MutableDenseHashTableV2(
                    empty_key=empty, deleted_key=deleted, **kinds, shared_name=self.rows.op.name
                )
                keys, _ = tf.raw_ops.LookupTableExportV2(table_handle=self._kept, Tkeys=tf.int64, Tvalues=tf.float32)
                keys = tf.gather(keys, tf.where(keys >= 0)[:, 0])  # as there are those of its empty places, too
                with tf.control_dependencies([tf.raw_ops.LookupTableRemoveV2(table_handle=self._kept, keys=keys)]):
                    local_variable(f"{self.table.spec.name}_kept", tf.zeros([]))  # so each session begins with none
            self._first = optimizer._initial_accumulator_value
        first = tf.fill([self.table.width], self._first)
        value = tf.raw_ops.LookupTableFindV2(table_handle=self._kept, keys=self._keys(), default_value=first)
        return [_assign_first(self._slot, tf.ensure_shape(value, [None, self.table.width]), self.count.read_value())]

    def keep(self):
        """Keeps what the optimizer has of these rows until they are pulled again; returns operations."""
        if self._slot is None:
            return []
        values = self._slot.sparse_read(tf.range(self.count.read_value()))
        return [tf.raw_ops.LookupTableInsertV2(table_handle=self._kept, keys=self._keys(), values=values)]

    def _keys(self):
        places = self.places.read_value()[: self.count.read_value()]
        return places + tf.cast(self._index(), tf.int64) * self.table.rows  # as several workers may be in one process

    def clear(self):
        """Returns the operation that sets the gradients to zero."""
        n = self.count.read_value()
        return _assign_first(self.gradients, tf.zeros([n, self.table.width]), n)

    def find(self, ids):
        """Returns the rows of ids `[..., width]`, and where they are, `[...]`. The step fails if one was not pulled."""
        places, known = self.table.places(ids, check=False), self.places.read_value()
        at = tf.searchsorted(known, tf.reshape(places, [-1]), out_type=tf.int64)
        at = tf.reshape(at, tf.shape(ids))
        is_there = tf.equal(tf.gather(known, tf.minimum(at, self.most - 1)), places)
        at = tf.where(is_there, at, tf.fill(tf.shape(at), tf.constant(self.most, tf.int64)))  # which is none: it fails there
        return self.rows.sparse_read(at), at

    def add(self, gradients, at):
        """Returns the operation that adds gradients `[n, width]` of the rows at `[n]`, which may come more than once."""
        return tf.raw_ops.ResourceScatterAdd(resource=self.gradients.handle, indices=at, updates=gradients)

    def sums(self):
        """Returns the gradients of the rows `[count, width]`."""
        return self.gradients.sparse_read(tf.range(self.count.read_value()))

    def parts(self, values):
        """Cuts values `[count, width]` of these rows for the ps; returns `tf.IndexedSlices` of each piece of the table.

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
    """A vector `[size]` and rows of each table: what `local.gradient` is with tables. It can be scaled, and pushed.

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
    """The rows of all tables that a worker needs for a window, and the batches of it: what a pull gets, and `train` uses.

    Args:
      tables: the `Table`s.
      model: a `common.models.Model`.
      batches: see `common.data.Batches`.
      steps: local steps until the next pull.
      index: function that returns the number of the worker.

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
        """Draws the batches of the window, and gets the rows that they need; returns operations.

        Args:
          step: the global step, as it was read on its ps: there rows are read after it.
        """
        drawn = self.draw()
        self.ask()
        self.read(lambda device: [*before_read(device), *([step] if step.device == device else [])])
        return [*drawn, *self.take()]

    def draw(self):
        """Draws the batches of the window; returns operations. Then come the next three, in turn."""
        with tf.control_dependencies(before_local()):
            indices = self._batches.next(self.steps)
            asked = self._model.ids_of(self._batches.samples(tf.reshape(indices, [-1]))[0], self._tables)
            self._places = [own.ask(ids) for own, ids in zip(self.own, asked, strict=True)]
            return [self._drawn.assign(indices, read_value=False)]

    def ask(self):
        """Tells the ps which rows this worker needs; returns operations there."""
        self._asked = [table.ask(places) for table, places in zip(self._tables, self._places, strict=True)]
        return [each.op for asked in self._asked for each in asked]

    def read(self, before):
        """The ps read the rows; returns operations there.

        Args:
          before: function of a device that returns what must end before a read there.
        """
        self._values = [table.read(asked, before) for table, asked in zip(self._tables, self._asked, strict=True)]
        return [each.op for values in self._values for each in values]

    def take(self):
        """The rows become those of this worker; returns operations."""
        took = zip(self.own, self._places, self._values, strict=True)
        return [operation for own, places, values in took for operation in own.take(places, values)]

    def batches_of(self, start, window):
        """Returns the indices `[window, batch_size]` of the batches from the local step `start` of the window on."""
        return self._drawn.read_value()[start : start + window]

    def begin(self, optimizer, accumulate, optimizers):
        """A training begins; returns operations.

        Args:
          optimizer: of this worker.
          accumulate: whether gradients are added to what there is, instead of to zero.
          optimizers: the `common.scheme.Optimizers` of this worker.
        """
        used = optimizers.use(optimizer)
        return [op for own in self.own for op in [*own.load(used), *([] if accumulate else [own.clear()])]]

    def keep(self):
        """A training has ended; returns operations."""
        return [op for own in self.own for op in own.keep()]

    def clipped(self, gradient, of_rows, norm):
        """Returns the gradient of the vector and those of rows, scaled to a norm of all together, if theirs is larger."""
        squares = tf.reduce_sum(gradient * gradient)
        for values, at in of_rows:
            _, which = tf.unique(at)
            sums = tf.math.unsorted_segment_sum(values, which, tf.size(at))
            squares += tf.reduce_sum(sums * sums)
        scale = norm / tf.maximum(tf.sqrt(squares), norm)
        return gradient * scale, [(values * scale, at) for values, at in of_rows]

    def told(self):
        """Returns tensors from which `what_travelled` tells what a run did."""
        tensors = ((own.pulls, own.asked, own.pulled, own.pushed) for own in self.own)
        return [[*(v.read_value() for v in mine), own.table.told()] for mine, own in zip(tensors, self.own, strict=True)]

    def gradient(self, vector):
        """Returns the `WithRows` of a vector, and the sums of the gradients of the rows."""
        return WithRows(vector, [(own, own.sums()) for own in self.own])


def what_travelled(specs, told):
    """Returns a list of dicts for `result.json`: of each table, what one worker pulled and pushed in a round on average.

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
                "repeated": 1 - rows / max(1, int(asked)),  # the share of ids for which no row had to travel
                "bytes_pulled_per_round": rows * (8 + 4 * spec.width) / rounds,  # the places go up first, 8 bytes each
                "bytes_pushed_per_round": int(pushed) * (8 + 4 * spec.width) / rounds,
                "rows_per_round_and_ps": [int(n) / rounds for n in pulled],
            }
        )
    return found


def _count(ids):
    """How many ids a tensor has: of so many samples as a window has."""
    if (count := ids.shape.num_elements()) is None:
        raise UserError(f"the number of ids in a batch is not fixed (shape {ids.shape}): expected a fixed length")
    return count
