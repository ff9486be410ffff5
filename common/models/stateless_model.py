"""A Keras model as a pure function of one flat vector of parameters."""

import contextlib
import contextvars
import math
import os
import re
import threading
import traceback
from pathlib import Path

import numpy as np

from common import tf
from common.core import UserError
from common.data import one_line
from common.scheme import tables


class Model:
    """A Keras model in functional form: its initial values, and loss and metrics as functions of a flat vector.

    The loss is the compiled loss plus the model's own losses (regularization), as `fit` computes it. State is the untrained
    variables: moving means, the seeds of Dropout.

    Args:
      keras_model: a compiled model with built metrics.
      measures: the metric names of its `compute_metrics`.
      own_optimizer: the name of the user's compiled optimizer. No scheme uses it.
      places: number of positions of a sample with an output each, as of a sequence: a parameter is used at all of them.
      inputs: function from samples x, tensors, to the inputs of the model; by default `as_inputs`.
      own_step: the model's `common.models.own_step.OwnStep`, in place of a loss and metrics; None without one.

    Attributes:
      tables: the `common.scheme.Spec`s of the tables on the ps; `size` does not include them.
      columns: the columns of files that the inputs take, as text; empty for other data.
    """

    def __init__(self, keras_model, measures, own_optimizer=None, places=1, inputs=None, own_step=None):
        from common.models import losses

        _make_constant(keras_model)
        self._measures, self._saving, self.places = measures, threading.Lock(), places
        self.inputs, self.columns = inputs or as_inputs, getattr(inputs, "text", "")
        self.keras_model, self.own_optimizer, self._own_step = keras_model, own_optimizer, own_step
        self.minimizes = own_step.text if own_step else losses.text(keras_model)
        self.shapes = [tuple(v.shape) for v in keras_model.trainable_variables]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self._on_ps = [layer for layer in keras_model._flatten_layers() if getattr(layer, "is_on_ps", False)]
        for i, layer in enumerate(self._on_ps):
            layer.number = i
        self.tables = tables.specs_of(self._on_ps)
        self.rows_from: dict = {}  # saved tables to begin with, see `common.training.initial_values`
        self.size = sum(self.sizes)
        self.initial_parameters = np.concatenate([v.numpy().ravel() for v in keras_model.trainable_variables])
        self.initial_state = [v.numpy().copy() for v in keras_model.non_trainable_variables]
        for metric in keras_model.metrics:
            metric.reset_state()
        self._metrics = [v.numpy() for v in keras_model.metrics_variables]

    @property
    def description(self):
        """Names and shapes of all variables, a list that identifies the model of a parameter vector."""
        variables = [*self.keras_model.trainable_variables, *self.keras_model.non_trainable_variables]
        return [[v.name, list(v.shape)] for v in variables] + [[t.name, [t.rows, t.width]] for t in self.tables]

    @property
    def paths(self):
        """Paths of the trainable variables, and of the state, in Keras: two lists."""
        model = self.keras_model
        return [[v.path for v in some] for some in (model.trainable_variables, model.non_trainable_variables)]

    def named_variables(self):
        """Returns pairs (path in Keras, initial value, a view) of all variables but the states of random generators."""
        trained, state = self.paths
        pieces = np.split(self.initial_parameters, np.cumsum(self.sizes)[:-1])
        pairs = [(name, each.reshape(shape)) for name, each, shape in zip(trained, pieces, self.shapes, strict=True)]
        return [*pairs, *((n, v) for n, v in zip(state, self.initial_state, strict=True) if "seed_generator_state" not in n)]

    def seeds(self, state):
        """Returns the random generator states in the model state, a list of values `[2]`, as of Dropout."""
        variables = self.keras_model.non_trainable_variables
        return [own for own, v in zip(state, variables, strict=True) if "seed_generator_state" in v.path]

    def draw_apart(self, number):
        """Makes the random numbers of the initial state differ between workers, by this number; 0 leaves the seeds unchanged.

        It also applies to seeds of the user, as in `Dropout(0.5, seed=1)`.
        """
        for own in self.seeds(self.initial_state):
            own += np.array([number, 0], own.dtype)

    def split(self, parameters):
        """Splits the flat vector `[size]` into tensors of the shapes of the trainable variables, a list."""
        pieces = tf.split(parameters, self.sizes)
        return [tf.reshape(piece, shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def loss(self, variables, state, x, y, weights=None):
        """Returns the training loss of a batch (scalar) and the state after it, or raises `UserError` if no graph can have it.

        Args:
          variables, state: values of the model's variables, lists of tensors.
          x, y: samples and labels `[n, ...]`, in the structure of the model's inputs and outputs.
          weights: sample weights, `[n]`, or in the structure of the labels.
        """
        scope, loss, _ = self._call(variables, state, self._metrics, x, y, weights, training=True)
        return loss, [scope.get_current_value(v) for v in self.keras_model.non_trainable_variables]

    def loss_and_gradient(self, parameters, state, x, y, weights=None):
        """Returns the training loss of a batch, its gradient `[size]`, and the state after it; see `gradients`."""
        return self.gradients(parameters, state, x, y, weights)[:3]

    def gradients(self, parameters, state, x, y, weights=None, rows=()):
        """Returns the training loss of a batch, its gradient `[size]`, the state after it, and the gradients of rows.

        Raises `UserError` if the model cannot be a part of a graph, or its loss has no gradient.

        Args:
          parameters, state, x, y, weights: as of `loss`.
          rows: the `common.scheme.LocalRows` of each table on the ps. For each, the last result has gradients `[n, width]` and
            their row indices `[n]`, possibly with duplicates.
        """
        if self._own_step:
            return self._own_gradients(parameters, state, (x, y, weights))
        variables, found = self.split(parameters), []

        def find(layer, ids):
            given, at = rows[layer.number].find(ids)
            if layer.trainable:
                found.append((layer, at, given))
            return given

        with tables.found_by(find) if rows else contextlib.nullcontext():
            loss, state = self.loss(variables, state, x, y, weights)
        with as_user_error("the gradient of the loss cannot be computed in a graph"):
            gradients = tf.gradients(loss, [*variables, *(given for *_, given in found)])
        if all(g is None for g in gradients):
            raise UserError("the loss of the model depends on no trainable variable")
        of_rows = []
        for i, own in enumerate(rows):
            here = [(g, at) for g, (layer, at, _) in zip(gradients[len(variables) :], found) if layer.number == i]
            here = [(tf.reshape(g, [-1, own.table.width]), tf.reshape(at, [-1])) for g, at in here if g is not None]
            none = tf.zeros([0, own.table.width]), tf.zeros([0], tf.int64)
            of_rows.append(tuple(tf.concat(each, axis=0) for each in zip(*here)) if here else none)
        flat = [tf.zeros([size]) if g is None else tf.reshape(g, [-1]) for g, size in zip(gradients, self.sizes)]
        return loss, tf.concat(flat, axis=0), state, of_rows

    def _own_gradients(self, parameters, state, samples):
        """As `gradients`, by the model's own step."""
        scope, loss, gradients = self._call(self.split(parameters), state, self._metrics, *samples, training=True)
        state = [scope.get_current_value(v) for v in self.keras_model.non_trainable_variables]
        return loss, tf.concat([tf.reshape(g, [-1]) for g in gradients], axis=0), state, []

    def ids_of(self, x, tables_on_ps):
        """Returns the row ids that samples need, a list of tensors per table. Nothing else of the model is computed.

        Raises `UserError` if no graph can have the model, ids depend on more than samples, or a layer looks nothing up.
        """
        model = self.keras_model
        variables = model.trainable_variables, model.non_trainable_variables
        values = [[tf.placeholder(v.dtype, v.shape) for v in some] for some in variables]  # never fed: ids need samples alone
        asked = tables.Asked(tables_on_ps, [*values[0], *values[1]])
        scope = scope_of(model, *values)
        with as_user_error("the model cannot be a part of a graph"), scope, _compared_by_value(), tables.found_by(asked):
            model(self.inputs(x), **training_arg(model, True))
        for layer, ids in zip(self._on_ps, asked.ids, strict=True):
            if not ids:
                raise UserError(f"the layer {layer.name} looks nothing up when the model is called: leave it out")
        return asked.ids

    def state_at(self, parameters, state, sample, count):
        """Returns the state, a list of tensors, re-estimated at parameters that differ from the trained ones.

        The moving means and variances of batch normalization become the averages of the statistics of `count` batches at these
        parameters, as in PreciseBN (Wu and Johnson 2021, arXiv:2105.07576; fvcore's `update_bn_stats`). Other floating-point
        state that changes in training continues from `state`.

        Args:
          parameters, state: tensor `[size]`, and a list of tensors.
          sample: function of a batch number, a tensor, that returns (x, y) or (x, y, weights).
          count: number of batches.
        """
        import keras

        if all(value.dtype.kind != "f" for value in self.initial_state):
            return state
        variables = self.split(parameters)
        is_moving: list[bool] = []
        norms = [v for v in self.keras_model._flatten_layers() if isinstance(v, keras.layers.BatchNormalization)]

        def batch(k, state):
            share = tf.cast(k, tf.float32) / (tf.cast(k, tf.float32) + 1)
            momenta = [norm.momentum for norm in norms]
            for norm in norms:
                norm.momentum = share
            try:
                scope, *_ = self._call(variables, state, self._metrics, *sample(k), training=True)
            finally:
                for norm, momentum in zip(norms, momenta, strict=True):
                    norm.momentum = momentum
            values = [scope.get_current_value(v) for v in self.keras_model.non_trainable_variables]
            is_moving[:] = [v is not old and v.dtype.is_floating for v, old in zip(values, state, strict=True)]
            return k + 1, values

        _, found = tf.while_loop(lambda k, _: k < count, batch, (0, state), parallel_iterations=1)
        return [new if moves else old for new, old, moves in zip(found, state, is_moving, strict=True)]

    def _call(self, variables, state, metrics, x, y, weights=None, *, training):
        """Calls the model on a batch and computes its loss, as Keras's trainer does.

        Returns the scope with the updated values of the model's variables, the loss, and the outputs; with an own step, its
        gradients in training, else its losses, in place of outputs.
        """
        model, x = self.keras_model, self.inputs(x)
        scope = scope_of(model, variables, state, metrics)
        if self._own_step:
            with as_user_error(f"the model's {self._own_step.name} cannot be a part of a graph"), scope, _compared_by_value():
                gradients, losses = self._own_step(x, y, weights)
            return scope, losses["loss"], gradients if training else losses
        with as_user_error("the model cannot be a part of a graph"), scope, _compared_by_value():
            outputs = model(x, **training_arg(model, training))
            loss = tf.cast(model._compute_loss(x, y, outputs, weights, training), tf.float32)
        if loss.shape.rank != 0:
            raise UserError(f"the loss of the model has shape {loss.shape}, expected one number")
        return scope, loss, outputs

    def evaluate(self, parameters, state, x, y, weights=None, batch_size=500):
        """Returns the loss and the metrics over all samples, {name: scalar}, as `keras.Model.evaluate` does.

        It works in batches, so memory use does not grow with the test set. Raises `UserError` if a metric cannot be a part of a
        graph, or is no number.
        """
        samples = (x, y) if weights is None else (x, y, weights)

        def part(start):
            return tf.nest.map_structure(lambda array: array[start : start + batch_size], samples)

        return self.evaluate_parts(parameters, state, part, tf.nest.flatten(x)[0].shape[0], batch_size)

    def evaluate_parts(self, parameters, state, part, n, batch_size):
        """As `evaluate`, for n samples in batches; `part` maps a batch's first sample number, a tensor, to the batch."""
        model, variables = self.keras_model, self.split(parameters)

        def batch(start, total, metrics, before):
            x, y, *weights = samples = part(start)
            scope, loss, outputs = self._call(variables, state, metrics, *samples, training=False)
            size = tf.cast(tf.shape(tf.nest.flatten(samples)[0])[0], tf.float32)
            if self._own_step:  # the means of its losses over the batches
                return start + batch_size, total + loss * size, metrics, {k: before[k] + outputs[k] * size for k in before}
            with as_user_error("the metrics of the model cannot be a part of a graph"), scope, _compared_by_value():
                found = model.compute_metrics(self.inputs(x), y, outputs, *(weights or [None]))
                found = {name: tf.cast(value, tf.float32) for name, value in scalars_of(found).items()}
            metrics = [scope.get_current_value(v) for v in model.metrics_variables]
            return start + batch_size, total + loss * size, metrics, found

        metrics = [tf.convert_to_tensor(value) for value in self._metrics]
        first = 0, 0.0, metrics, {name: tf.zeros([]) for name in self._measures}
        _, total, _, found = tf.while_loop(lambda start, *_: start < n, batch, first, parallel_iterations=1)
        found = {name: value / n for name, value in found.items()} if self._own_step else found
        return {**found, "loss": total / n}

    def save(self, parameters, state, path, rows_of_tables=()):
        """Atomically writes the model with these values to a file for `keras.models.load_model(path)`.

        Callable from any thread without an open graph; calls are serialized. With tables it can be called only once, since
        they become layers of the model.

        Args:
          parameters, state: arrays.
          rows_of_tables: as of `fill`.
        """
        model, unfinished = self.keras_model, f"{path}.unfinished.keras"
        with self._saving:
            pieces = np.split(parameters, np.cumsum(self.sizes[:-1]))
            for variable, piece, shape in zip(model.trainable_variables, pieces, self.shapes, strict=True):
                variable.assign(piece.reshape(shape))
            for variable, value in zip(model.non_trainable_variables, state, strict=True):
                variable.assign(value)
            self.fill(rows_of_tables)
            try:
                model.save(unfinished)
                os.replace(unfinished, path)
            finally:  # on a full disk a leftover file would take the space of the next checkpoint
                Path(unfinished).unlink(missing_ok=True)

    def fill(self, rows_of_tables):
        """Loads the result of `common.scheme.whole` of each table on the ps; the model's layers then become ordinary layers."""
        for layer, rows in zip(self._on_ps, rows_of_tables, strict=True):
            layer.fill(rows)


def scalars_of(results):
    """Returns the results of metrics as {name: scalar}.

    Results of a vector metric, such as F1Score, are name_0, name_1, ...; results of a dict metric have its keys.
    """
    found: dict = {}
    for name, value in results.items():
        if isinstance(value, dict):
            found |= {f"{name}_{key}" if key in found else key: number for key, number in scalars_of(value).items()}
            continue
        value = tf.convert_to_tensor(value)
        if value.shape.rank == 0:
            found[name] = value
            continue
        if (count := value.shape.num_elements()) is None:
            raise UserError(f"the metric {name} of the model gives numbers of shape {value.shape}: expected a fixed shape")
        found |= {f"{name}_{i}": number for i, number in enumerate(tf.unstack(tf.reshape(value, [count])))}
    return found


def scope_of(keras_model, *values):
    """Returns a Keras scope with these values of the model's variables: trainable variables, state, and metric variables.

    It also collects the layers' additional losses.
    """
    import keras

    variables = keras_model.trainable_variables, keras_model.non_trainable_variables, keras_model.metrics_variables
    pairs = [pair for some, its in zip(variables, values) for pair in zip(some, its, strict=True)]
    return keras.StatelessScope(state_mapping=pairs, collect_losses=True)


def training_arg(keras_model, training):
    """Returns the keyword argument `training`, if the model's call takes it, as `fit` does."""
    return {"training": training} if keras_model._call_has_training_arg else {}


def as_inputs(x):
    """Returns samples, tensors in their structure, as model inputs: uint8 becomes float32."""
    return tf.nest.map_structure(lambda array: tf.cast(array, tf.float32) if array.dtype == tf.uint8 else array, x)


@contextlib.contextmanager
def as_user_error(what):
    """Turns an error in a user's model into a one-line `UserError`: `what`, and the cause."""
    try:
        yield
    except Exception as error:
        why = re.search(r"\x1b\[1m(.*?)\x1b\[0m", str(error), re.DOTALL)  # Keras surrounds the cause with boilerplate
        if isinstance(error, UserError):
            if why is None:
                raise
            raise UserError(why[1].strip()) from error
        line = f"{type(error).__name__}: {why[1].strip().splitlines()[0]}" if why else one_line(error)
        captures = "Attempting to capture an EagerTensor" in line
        files = {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}
        if "custom_gradient decorator" in line or captures and "custom_gradient.py" in files:
            line = (
                "a custom gradient of a function with variables or keyword arguments, as in keras.remat and RematScope, works "
                "only in the graph of fit"
            )
        elif captures:
            line = (
                "it needs a variable or table other than its layers' keras.Variables, such as a tf.Variable, a lookup layer, "
                "keras.random without a SeedGenerator, or the compiled optimizer"
            )
        line = re.sub(r"{{function_node .*?}} | \[Op:\w+\].*|  Label values: .*", "", line)  # TensorFlow's boilerplate
        raise UserError(f"{what}: {line}") from error


_by_value: contextvars.ContextVar[bool] = contextvars.ContextVar("_by_value", default=False)
_overriding = threading.RLock()  # one thread at a time, as each restores the comparisons that it found


@contextlib.contextmanager
def _compared_by_value():
    """Makes `==` and `!=` of tensors compare values in this context, as under `fit`: a loss may mask with `y != 0`.

    In a graph outside of a `tf.function`, TensorFlow compares the objects, so the mask would always be True.
    """
    token = _by_value.set(True)
    try:
        with _overriding, _overridden("__eq__", tf.math.equal), _overridden("__ne__", tf.math.not_equal):
            yield
    finally:
        _by_value.reset(token)


@contextlib.contextmanager
def _overridden(name, by_value):
    """Replaces a comparison of `tf.Tensor` within this context; other threads still get the original one."""
    otherwise = getattr(tf.Tensor, name)

    def compare(tensor, other):
        return by_value(tensor, other) if _by_value.get() and other is not None else otherwise(tensor, other)

    setattr(tf.Tensor, name, compare)
    try:
        yield
    finally:
        setattr(tf.Tensor, name, otherwise)


def _make_constant(keras_model):
    """Turns tensors held by layers, regularizers and constraints into NumPy arrays, since a graph rejects foreign tensors."""
    import keras

    for layer in keras_model._flatten_layers():
        inner = [v for v in vars(layer).values() if isinstance(v, (keras.Regularizer, keras.constraints.Constraint))]
        for owner in [layer, *inner]:
            for name, value in list(vars(owner).items()):
                if isinstance(value, tf.Tensor):
                    object.__setattr__(owner, name, value.numpy())
