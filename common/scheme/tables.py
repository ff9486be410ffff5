"""The tables of a model, one for each `common.Embedding` layer on the ps: specs, lookup of rows, checks of ids and flags."""

import contextlib
import contextvars
import re
import zlib
from typing import Any, NamedTuple

import numpy as np

from common import tf
from common.core import ROOM, UserError, limits
from common.data import arrays_in, mapped

ROW_BY_ROW = "GradientDescentOptimizer", "AdagradOptimizer"  # they change only rows with a gradient
ROW_BY_ROW_ON_PS = *ROW_BY_ROW, "RowwiseAdagrad", "LazyAdam", "SparseAdam"
SCHEMES = "HogWild, DOWNPOUR, DOWNPOUR-Easy, AGN, Dynamic-SGD, Ringmaster-ASGD, Synchronous-SGD, Semi-Synchronous-SGD"
IDS = 2**53  # exclusive upper bound of ids in an unbounded table; float64 represents all smaller integers
TWO_SIGMA = 0.022750131948179207  # probability of a normal value more than two standard deviations below the mean
CHECKED = 100_000  # samples per batch of the id check

_on_ps: contextvars.ContextVar[int | None] = contextvars.ContextVar("_on_ps", default=None)
_finder: contextvars.ContextVar[Any] = contextvars.ContextVar("_finder", default=None)


@contextlib.contextmanager
def _set(variable, value):
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def on_ps(seed):
    """Puts the tables of layers that are created in this context on the ps.

    The seed is that of the initial rows, for layers whose initializer has none; it is the same in all tasks.
    """
    return _set(_on_ps, seed)


def seed_on_ps():
    """Returns the seed of the initial rows of new layers; None if their tables are not on the ps."""
    return _on_ps.get()


def found_by(find):
    """Sets the layers' lookup function, of a layer and ids, int32 or int64 of any shape; it returns rows `[..., width]`."""
    return _set(_finder, find)


def finder():
    """Returns the layers' lookup function; None in a trial call of a model; a `UserError` in a graph without one."""
    find = _finder.get()
    if find is None and not tf.executing_eagerly() and not tf.get_default_graph().building_function:
        raise UserError("the model has tables on the ps (common.Embedding), which this program does not look up there")
    return find


class Asked:
    """A lookup function for `found_by` that records the requested ids: `ids` has a list of tensors for each of the tables.

    `values` are placeholders for the variables of the model, since ids must not depend on variables.
    """

    def __init__(self, tables, values=()):
        self._rows: set[Any] = set()
        self._values = {value.op for value in values}
        self.ids: list[list[Any]] = [[] for _ in tables]

    def __call__(self, layer, ids):
        """Records these ids, and returns zeros for their rows.

        Raises:
          UserError: if the ids depend on more than samples, since they must be known before rows are pulled.
        """
        seen, todo = set(), [ids.op]
        while todo:
            op = todo.pop()
            if op in seen:
                continue
            seen.add(op)
            is_random = op.op_def is not None and op.op_def.is_stateful and "Random" in op.type
            kinds = {"rows of a table": op in self._rows, "variables of the model": op in self._values, "chance": is_random}
            if on := [kind for kind, is_so in kinds.items() if is_so]:
                raise UserError(f"the ids of the layer {layer.name} depend on {on[0]}: expected samples alone")
            todo += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        self.ids[layer.number].append(ids)
        given = tf.zeros(tf.concat([tf.shape(ids), [layer.output_dim]], axis=0))
        given.set_shape([*ids.shape, layer.output_dim])
        self._rows.add(given.op)
        return given


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
    found = []
    for i, layer in enumerate(layers):
        if layer.seed_of_rows is None:
            layer.seed_of_rows = zlib.crc32(f"{layer.seed} {i}".encode())
        seed = getattr(layer.embeddings_initializer, "_init_seed", None)  # the user's own
        seed = getattr(seed, "_initial_seed", seed)
        how = _initial(layer), (seed if isinstance(seed, int) else layer.seed_of_rows) % 2**31, layer.trainable
        found.append(Spec(f"{i}_{variable_name(layer.name)}", layer.name, layer.input_dim, layer.output_dim, *how))
    return found


def variable_name(name):
    """Returns a layer name as a valid variable name, without the number from Keras, which may differ between tasks."""
    return re.sub(r"\W", "_", re.sub(r"_\d+$", "", name), flags=re.ASCII)


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
        but = f"this machine, where all ps run, has {limits.as_bytes(has)} of memory"
        hint = "give them fewer rows, or start the ps on several machines"
        raise UserError(f"the tables of the model take {limits.as_bytes(need)} on the ps, but {but}: {hint}")
    if settings.table_learning_rate is not None and settings.table_optimizer == "scheme":
        raise UserError("--table_learning_rate: choose a --table_optimizer, such as adagrad or lazy_adam, for it")


def check_data(model, samples, is_stream):
    """Raises a `UserError` for streams, and for samples x of some data set with ids outside of the model's tables."""
    if model.tables and is_stream:
        needs = "with common.Embedding a worker has to know the samples of its next window"
        raise UserError(f"{needs}: give a dataset that ends, without --stream")
    for x in samples if model.tables else ():
        check_ids(model, x)


def check_ids(model, x):
    """Raises a `UserError` if samples, arrays or `common.data.Rows` `[n, ...]`, have ids outside of the model's tables."""
    if not model.columns:  # they are checked by name
        _check_types(model, x)
    with tf.Graph().as_default():
        feeds = mapped(lambda array: tf.placeholder(array.dtype, [None, *array.shape[1:]]), x)
        of_tables = [[tf.cast(each, tf.int64) for each in ids] for ids in model.ids_of(feeds, model.tables)]
        found = [[(tf.reduce_min(each), tf.reduce_max(each)) for each in ids] for ids in of_tables]
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
    if isinstance(x, dict):
        named = named_inputs(model.keras_model)
        pairs = [(named[name], array) for name, array in x.items() if name in named and hasattr(named[name], "dtype")]
    else:
        pairs = list(zip(getattr(model.keras_model, "inputs", None) or [], arrays_in(x)))
    for tensor, array in pairs:
        dtype = tf.as_dtype(tensor.dtype)
        for start in range(0, len(array), CHECKED) if dtype.is_integer else ():
            part = np.asarray(array[start : start + CHECKED])
            if part.dtype.kind == "f" and (wrong := part[part != np.floor(part)]).size:
                raise UserError(f"the input {tensor.name} takes whole numbers, but the samples have {wrong[0]:g} there")
            if part.size and (part.min() < dtype.min or part.max() > dtype.max):
                numbers = f'numbers from {part.min():,} to {part.max():,} there: give keras.Input(..., dtype="int64")'
                raise UserError(f"the input {tensor.name} takes {dtype.name}, but the samples have {numbers}")


def named_inputs(keras_model):
    """Returns {name: input} of a functional or sequential model; an empty dict for other models."""
    inputs = getattr(keras_model, "_inputs_struct", None)
    return inputs if isinstance(inputs, dict) else {v.name: v for v in getattr(keras_model, "inputs", None) or []}


def _initial(layer):
    """Returns `Spec.initial` for a layer; a `UserError` for an initializer that needs the whole table, or is unknown."""
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
        what = f"the initializer {type(how).__name__} is for the whole table, but that is on the ps"
        raise UserError(f"{layer.name}: {what}: choose {', '.join(kinds)}")
    return kinds[type(how).__name__]
