"""A Keras model as a pure function of one flat vector of parameters."""

import contextlib
import contextvars
import functools
import math
import os
import re
import threading
import traceback
from pathlib import Path

import numpy as np

from common import tf
from common.core import TRANSFORMER, UserError, check_backend, limits
from common.data import OF_STRINGS, arrays_in, call_user_function, chunks, mapped, one_line
from common.scheme import tables


def build(spec, data, seed=0, loss=None, tables_on_ps=False, tables_seed=0, **sizes):
    """Returns the `Model` that `--model=spec` names, one of `BUILT_IN` or FILE.py:FUNCTION, with its initial values.

    Call it before a graph is entered: Keras variables can only be read eagerly.

    Args:
      spec: as above.
      data: a `common.data.Data`.
      seed: seed of the initial values, unless the model sets seeds of its own.
      loss: `--loss`, a Keras loss name, for a model without a loss of its own.
      tables_on_ps: whether tables of `common.Embedding` layers lie on the ps, see `common.scheme.tables`, or in the model.
      tables_seed: seed of the initial rows of these tables, the same in all tasks.
      **sizes: sizes of a transformer, see `common.core.sizes`; other models ignore them.

    Raises:
      UserError: if the model does not exist or does not fit `data`.
    """
    import keras

    check_backend(keras.backend.backend())
    keras.utils.set_random_seed(seed)
    with tables.on_ps(tables_seed) if tables_on_ps else contextlib.nullcontext():
        if spec in BUILT_IN:
            keras_model = _built_in(spec, data, {**TRANSFORMER, **sizes})
        elif ":" in spec:
            keras_model = call_user_function("--model", spec)
        else:
            load = f"; for a saved model, a function that returns keras.models.load_model({spec!r})"
            saved = load if spec.endswith(".keras") else ""
            raise UserError(f"--model must be one of {', '.join(BUILT_IN)} or FILE.py:FUNCTION, not {spec!r}{saved}")
        if not isinstance(keras_model, keras.Model):
            raise UserError(f"--model={spec} must give a keras.Model, not {type(keras_model).__name__}")
        with named(spec):
            return checked(keras_model, data, loss, last_operation=(lambda: None) if spec in BUILT_IN else None)


def by_labels(keras_model, is_classification):
    """Returns the `Model` of a built, uncompiled Keras model, with the loss for class labels or for numbers."""
    from common.models import losses

    losses.by_labels(keras_model, is_classification)
    outputs = np.zeros([2, *keras_model.output_shape[1:]], np.float32)
    labels = outputs.argmax(axis=-1) if is_classification else outputs
    return Model(keras_model, list(keras_model.compute_metrics(None, labels, outputs)))


@contextlib.contextmanager
def named(spec):
    """Prefixes errors of a model with `--model=spec`, unless they name another flag."""
    try:
        yield
    except UserError as error:
        said = str(error)
        if not said.startswith("--"):
            said = f"--model={spec}" + (said.removeprefix("the model") if said.startswith("the model ") else f": {said}")
        raise UserError(said) from error


BUILT_IN = ("linear", "mlp", "cnn", "cnn1d", "dense", "transformer")
_LAYERS = {
    "dense": lambda layers, outputs: [layers.Flatten(), layers.Dense(outputs, use_bias=False)],
    "linear": lambda layers, outputs: [layers.Flatten(), layers.Dense(outputs)],
    "mlp": lambda layers, outputs: [
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dense(128, activation="relu"),
        layers.Dense(outputs),
    ],
    "cnn": lambda layers, outputs: [
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(outputs),
    ],
    "cnn1d": lambda layers, outputs: [
        layers.Conv1D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling1D(),
        layers.Conv1D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling1D(),
        layers.Flatten(),
        layers.Dense(outputs),
    ],
}


def _dense(inputs, outputs):
    return (inputs + 1) * outputs


# Parameter counts, by the shape of a sample and the number of outputs
_count_of = {
    "linear": lambda shape, outputs: _dense(math.prod(shape), outputs),
    "mlp": lambda shape, outputs: _dense(math.prod(shape), 128) + _dense(128, 128) + _dense(128, outputs),
    "cnn": lambda shape, outputs: (
        _dense(9 * shape[2], 16) + _dense(9 * 16, 32) + _dense((shape[0] // 4) * (shape[1] // 4) * 32, outputs)
    ),
    "cnn1d": lambda shape, outputs: _dense(3 * shape[1], 16) + _dense(3 * 16, 32) + _dense(shape[0] // 4 * 32, outputs),
    "dense": lambda shape, outputs: math.prod(shape) * outputs,
}


def _built_in(spec, data, sizes):
    """Returns the Keras model `spec`, one of `BUILT_IN`, for this data."""
    import keras

    _check_arrays(spec, data)
    shape = data.x_train.shape[1:]
    if _is_sequence(data) and spec in ("linear", "transformer"):
        return _of_sequences(spec, data, sizes)
    if spec == "transformer":
        if data.is_classification and data.x_train.shape == data.y_train.shape and data.num_classes == 2:
            raise UserError("--model=transformer: one-hot labels become class numbers by .argmax(axis=-1), one for each place")
        x, y = (f"{part.dtype} of shape {list(part.shape[1:])}" for part in (data.x_train, data.y_train))
        raise UserError(
            "--model=transformer needs sequences of whole numbers, and a class for each of them, as --data=text has: here a "
            f"sample is {x}, its label {y}"
        )
    outputs = data.num_classes if data.is_classification else int(np.prod(data.y_train.shape[1:], dtype=int))
    if spec == "cnn" and (len(shape) != 3 or min(shape[:2]) < 4):
        series = "; --model=cnn1d takes series of shape [length, channels]" if len(shape) == 2 and shape[0] >= 4 else ""
        raise UserError(
            f"--model=cnn needs images of shape [height, width, channels], not samples of shape {list(shape)}{series}"
        )
    if spec == "cnn1d" and (len(shape) != 2 or shape[0] < 4):
        raise UserError(
            f"--model=cnn1d needs series of shape [length, channels], of 4 places or more, not samples of shape {list(shape)}"
        )
    classes = f"the labels are classes 0 to {data.num_classes - 1}, and " if data.is_classification else ""
    renumber = "; number them without gaps, as np.unique(y, return_inverse=True) does" if data.is_classification else ""
    _check_size(f"{classes}--model={spec}", _count_of[spec](shape, outputs), renumber)
    layers = _LAYERS[spec](keras.layers, outputs)
    if not data.is_classification:
        layers.append(keras.layers.Reshape(data.y_train.shape[1:]))
    return keras.Sequential([keras.Input(shape), *layers])


def _is_sequence(data):
    """Whether samples are integer sequences with a class for each position: x and y `[n, length]`."""
    x, y = data.x_train, data.y_train
    if not data.is_classification or x.dtype.kind not in "iu" or x.shape != y.shape or len(x.shape) != 2 or x.shape[1] == 1:
        return False
    # One-hot labels may have that shape, too.
    return data.num_classes > 2 or any((chunk.sum(axis=1) != 1).any() for chunk in chunks(y))


def _of_sequences(spec, data, sizes):
    """Returns the Keras model `spec` with logits at each position; the linear model is a table of logits, one row per token."""
    import keras

    from common.models import transformer

    parts = data.x_train, data.x_test
    least, most = min(int(x.min()) for x in parts), max(int(x.max()) for x in parts)
    if least < 0:
        raise UserError(f"--model={spec}: the samples hold the number {least}, expected 0 or more")
    length, tokens, classes = data.x_train.shape[1], most + 1, data.num_classes
    is_linear = spec == "linear"
    count = tokens * classes if is_linear else transformer.size(length, tokens, classes, sizes["layers"], sizes["width"])
    of = "" if is_linear else "".join(f" --{name}={sizes[name]}" for name in ("layers", "width"))
    what = f"the samples are numbers 0 to {most}, the labels classes 0 to {classes - 1}, and --model={spec}{of}"
    hint = "; choose a smaller model, and number both without gaps, as np.unique(..., return_inverse=True) does"
    _check_size(what, count, hint)
    if is_linear:
        return keras.Sequential([keras.Input([length], dtype="int32"), keras.layers.Embedding(tokens, classes)])
    return transformer.build(length, tokens, classes, **sizes)


def _check_size(what, count, hint):
    """Raises a `UserError` if memory cannot hold a model of `count` parameters, before it is built.

    A worker holds at least four copies: the Keras variables, the initial values, x and the gradient.
    """
    need, has = 4 * 4 * count, limits.memory()
    if need > has:
        raise UserError(
            f"{what} would have {count:,} parameters, which take at least {limits.as_bytes(need)} of memory, "
            f"but the machine has {limits.as_bytes(has)}{hint}"
        )


def _check_arrays(spec, data):
    """Raises a `UserError` if samples or labels are several arrays, or labels have a shape that the built-in model rejects."""
    for name, part in (("x_train", data.x_train), ("y_train", data.y_train)):
        if isinstance(part, (dict, tuple)):
            raise UserError(f"--model={spec} takes one array of samples and one of labels; {name} is {len(arrays_in(part))}")
    if not data.is_classification or data.y_train.shape[1:] in ((), (1,)) or spec == "transformer":
        return
    shape = list(data.y_train.shape[1:])
    if not _is_sequence(data):
        raise UserError(
            f"--model={spec} gives one class for a sample, but the labels have shape {shape}: one-hot labels become class "
            "numbers by .argmax(axis=-1); for others bring a model of your own, --model=FILE.py:FUNCTION"
        )
    if spec != "linear":
        raise UserError(
            f"--model={spec} gives one class for a sample, but the labels have shape {shape}, one for each place of a "
            "sequence: choose --model=transformer or --model=linear, or bring a model of your own, --model=FILE.py:FUNCTION"
        )


def checked(keras_model, data, loss=None, last_operation=None):
    """Returns the `Model`, after a trial of the model, its loss and its metrics on a few samples, which also builds them.

    Args:
      keras_model, data, loss: as in `build`.
      last_operation: function that returns the model's final activation, "Softmax" or "Sigmoid", or None, if it is known
        beforehand.

    Raises:
      UserError: if the model cannot be trained with these samples.
    """
    from common.models import losses

    _refuse_layers(keras_model)  # before the call, whose Keras errors would be misleading
    _refuse_strings(keras_model)
    _refuse_other_names(keras_model, data.x_train)
    x, y, *weights = _telling_samples(data.train)
    shapes = ", ".join(str(list(array.shape[1:])) for array in arrays_in(x))
    with _as_user_error(f"the model cannot be called on samples of shape {shapes}"):
        outputs = keras_model(x, **_training(keras_model, False))
    if not keras_model.trainable_variables:
        has_tables = any(getattr(layer, "is_on_ps", False) for layer in keras_model._flatten_layers())
        others = " but the tables on the ps" if has_tables else ""
        raise UserError(f"the model has no trainable variables{others}: give it a layer with weights")
    for v in [*keras_model.trainable_variables, *keras_model.non_trainable_variables]:
        values = v.numpy()
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            count = np.sum(~np.isfinite(values))
            raise UserError(f"{v.path} begins with {count} values that are NaN or infinite")
    _refuse_layers(keras_model)  # again, since the call may have created layers
    _refuse_what_is_not_honoured(keras_model)
    own_optimizer = type(keras_model.optimizer).__name__ if keras_model.compiled and keras_model.optimizer else None
    last_operation = last_operation or (lambda: _last_operation(keras_model, x, outputs))
    minimizes = losses.choose(keras_model, outputs, last_operation, data, loss)
    with _as_user_error(f"the loss, {minimizes.removeprefix('the loss of ')}, does not fit the labels"):
        keras_model._compute_loss(x, y, outputs, *weights)
        if data.num_samples > 2:  # different shapes may broadcast by chance when a dimension equals the number of samples
            two = [tf.nest.map_structure(lambda array: array[:2], part) for part in (x, y, outputs, *weights)]
            keras_model._compute_loss(*two)
        x_test, y_test, *weights_test = _telling_samples(data.test)
        keras_model._compute_loss(x_test, y_test, keras_model(x_test, **_training(keras_model, False)), *weights_test)
    with _as_user_error("the metrics of the model do not fit the labels"):
        measures = list(_numbers(keras_model.compute_metrics(x, y, outputs, *weights)))
    places = max(math.prod(output.shape[1:-1]) for output in tf.nest.flatten(outputs))
    return Model(keras_model, measures, own_optimizer, places)


def _refuse_strings(keras_model):
    """Raises a `UserError` if a functional or sequential model has a string input: workers draw numbers."""
    inputs = [given for given in getattr(keras_model, "inputs", None) or [] if given.dtype == "string"]
    for layer in keras_model._flatten_layers() if inputs else ():
        taken = [given for node in layer._inbound_nodes for given in node.input_tensors]
        if any(given is its for given in inputs for its in taken):
            what = f"the layer {layer.name} ({type(layer).__name__})"
            raise UserError(f"{what} takes strings, but samples are numbers; {OF_STRINGS}")


def _refuse_other_names(keras_model, x):
    """Raises a `UserError` if the keys of a dict of samples differ from the input names of a functional or sequential model.

    Keras would match them in alphabetical order and, with a missing or extra key, feed inputs the wrong samples.
    """
    expected = tables.named_inputs(keras_model).keys()
    if not isinstance(x, dict) or not expected:
        return
    names = ", ".join(map(repr, sorted(expected)))
    if others := sorted(x.keys() - expected):
        raise UserError(f"the samples have {others[0]!r}, which is not an input of the model ({names}): leave it out")
    if missing := sorted(expected - x.keys()):
        raise UserError(f"the samples lack {missing[0]!r}, an input of the model ({names})")


def _numbers(results):
    """Returns the results of metrics as {name: scalar}.

    Results of a vector metric, such as F1Score, are name_0, name_1, ...; results of a dict metric have its keys.
    """
    found: dict = {}
    for name, value in results.items():
        if isinstance(value, dict):
            found |= {f"{name}_{key}" if key in found else key: number for key, number in _numbers(value).items()}
            continue
        value = tf.convert_to_tensor(value)
        if value.shape.rank == 0:
            found[name] = value
            continue
        if (count := value.shape.num_elements()) is None:
            raise UserError(f"the metric {name} of the model gives numbers of shape {value.shape}: expected a fixed shape")
        found |= {f"{name}_{i}": number for i, number in enumerate(tf.unstack(tf.reshape(value, [count])))}
    return found


def _telling_samples(samples):
    """Returns the first three samples, and, for integer labels, the samples with the smallest and the largest label."""
    import keras

    n = len(arrays_in(samples[0])[0])
    chosen = [*range(min(3, n))]
    for y in arrays_in(samples[1]):
        if y.dtype.kind == "i":
            ends = [(rows.min(axis=1), rows.max(axis=1)) for chunk in chunks(y) for rows in [chunk.reshape(len(chunk), -1)]]
            least, most = map(np.concatenate, zip(*ends))
            chosen += [int(least.argmin()), int(most.argmax())]
    x, *others = [mapped(lambda array: keras.ops.convert_to_tensor(array[chosen]), part) for part in samples]
    return [mapped(as_input, x), *others]  # tensors, as `fit` has them


# Methods of the training loop of `fit` that a model may override.
_OF_FIT = ("train_step", "test_step", "make_train_function", "make_test_function", "train_on_batch", "fit")


def _refuse_what_is_not_honoured(keras_model):
    """Rejects features of `fit` that an update of a flat vector does not support, with a `UserError`."""
    import keras

    for v in keras_model.trainable_variables:
        if v.constraint is not None:
            raise UserError(
                f"{v.path} has the constraint {type(v.constraint).__name__}, which no update on the ps would keep: use a "
                "regularizer, or apply it in the layer's call"
            )
    others = {v.dtype for v in keras_model.trainable_variables} - {"float32"}
    if others:
        raise UserError(f"the model has trainable variables of type {', '.join(sorted(others))}, expected float32")
    for name in _OF_FIT:
        if name in vars(keras_model) or getattr(type(keras_model), name) is not getattr(keras.Model, name):
            raise UserError(
                f"the model has a {name} of its own, which no worker calls: move its computation to compute_loss"
            )


def _refuse_layers(keras_model):
    """Raises a `UserError` for layers that workers cannot train as `fit` does."""
    for layer in keras_model._flatten_layers():
        if layer.compute_dtype == "float16":
            raise UserError(
                f"{layer.name} computes in float16, where small gradients become 0: fit scales the loss, but no scheme does; "
                "choose mixed_bfloat16"
            )
        if getattr(layer, "stateful", False) is True:
            raise UserError(
                f"{layer.name} is stateful: it would continue from the previous batch, but workers draw batches at random"
            )


# Operations that move or average numbers: applied to probabilities, they do not produce logits.
_MOVES = {"Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Transpose", "StridedSlice", "Slice", "GatherV2", "Pack"}
_MOVES |= {"Split", "SplitV", "Unpack", "ConcatV2", "Mean", "Sum", "AddV2", "AddN", "Mul", "RealDiv"}


def _last_operation(keras_model, x, outputs):
    """Returns "Softmax" or "Sigmoid" if the outputs are results of this TensorFlow operation, parts of them, or their means.

    "Softmax" also for outputs that are non-negative and sum to 1 for another reason; None for others.
    """
    import tensorflow

    from common.models import losses

    with _as_user_error("the model cannot be a part of a graph"), _scope(keras_model):
        call = tensorflow.function(lambda x: keras_model(x, **_training(keras_model, False)), autograph=False)  # as in a run
        graph = call.get_concrete_function(x)
    given = [np.asarray(output, np.float32) for output in tf.nest.flatten(outputs)]
    if all(y.shape[-1:] > (1,) and (y >= 0).all() and np.allclose(y.sum(axis=-1), 1, atol=1e-2) for y in given):
        return "Softmax"
    sources, seen = set(), set()
    waiting = [output.op for output in graph.graph.outputs]
    while waiting:
        operation = waiting.pop()
        if operation not in seen and operation.type != "Const":
            seen.add(operation)
            moved = [value.op for value in operation.inputs] if operation.type in _MOVES else []
            waiting += moved
            sources |= set() if moved else {operation.type}
    are_within = all((y >= 0).all() and (y <= 1).all() for y in given)
    return min(sources) if are_within and sources and sources <= losses.PROBABILITIES.keys() else None


def _scope(keras_model, *values):
    """Returns a Keras scope with these values of the model's variables: trainable variables, state, and metric variables.

    It also collects the layers' additional losses.
    """
    import keras

    variables = keras_model.trainable_variables, keras_model.non_trainable_variables, keras_model.metrics_variables
    pairs = [pair for some, its in zip(variables, values) for pair in zip(some, its, strict=True)]
    return keras.StatelessScope(state_mapping=pairs, collect_losses=True)


_by_value: contextvars.ContextVar[bool] = contextvars.ContextVar("_by_value", default=False)


@contextlib.contextmanager
def _compared_by_value():
    """Makes `==` and `!=` of tensors compare values in this context, as under `fit`: a loss may mask with `y != 0`.

    In a graph outside of a `tf.function`, TensorFlow compares the objects, so the mask would always be True.
    """
    _override_comparisons()
    token = _by_value.set(True)
    try:
        yield
    finally:
        _by_value.reset(token)


@functools.cache
def _override_comparisons():
    def override(name, by_value):
        otherwise = getattr(tf.Tensor, name)

        def compare(tensor, other):
            return by_value(tensor, other) if _by_value.get() and other is not None else otherwise(tensor, other)

        setattr(tf.Tensor, name, compare)

    override("__eq__", tf.math.equal)
    override("__ne__", tf.math.not_equal)


def _training(keras_model, training):
    """Returns the keyword argument `training`, if the model's call takes it, as `fit` does."""
    return {"training": training} if keras_model._call_has_training_arg else {}


def as_input(array):
    """Returns samples as model inputs: uint8 becomes float32."""
    is_bytes = array.dtype in (np.uint8, tf.uint8)
    return (array.astype(np.float32) if isinstance(array, np.ndarray) else tf.cast(array, tf.float32)) if is_bytes else array


@contextlib.contextmanager
def _as_user_error(what):
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
        if "custom_gradient decorator" in line or captures and _is_in(error, "custom_gradient.py"):
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


def _is_in(error, file):
    """Whether the traceback of an exception contains a file of this name."""
    return any(Path(frame.filename).name == file for frame in traceback.extract_tb(error.__traceback__))


def _make_constant(keras_model):
    """Turns tensors held by layers, regularizers and constraints into NumPy arrays, since a graph rejects foreign tensors."""
    import keras

    for layer in keras_model._flatten_layers():
        inner = [v for v in vars(layer).values() if isinstance(v, (keras.Regularizer, keras.constraints.Constraint))]
        for owner in [layer, *inner]:
            for name, value in list(vars(owner).items()):
                if isinstance(value, tf.Tensor):
                    object.__setattr__(owner, name, value.numpy())


class Model:
    """A Keras model in functional form: its initial values, and loss and metrics as functions of a flat vector.

    The loss is the compiled loss plus the model's own losses (regularization), as `fit` computes it. State is the untrained
    variables: moving means, the seeds of Dropout.

    Args:
      keras_model: a compiled model with built metrics.
      measures: the metric names of its `compute_metrics`.
      own_optimizer: the name of the user's compiled optimizer. No scheme uses it.
      places: number of positions of a sample with an output each, as of a sequence: a parameter is used at all of them.

    Attributes:
      tables: the `common.scheme.Spec`s of the tables on the ps; `size` does not include them.
    """

    def __init__(self, keras_model, measures, own_optimizer=None, places=1):
        from common.models import losses

        _make_constant(keras_model)
        self._measures, self._saving, self.places = measures, threading.Lock(), places
        self.keras_model, self.minimizes, self.own_optimizer = keras_model, losses.text(keras_model), own_optimizer
        self.shapes = [tuple(v.shape) for v in keras_model.trainable_variables]
        self.sizes = [int(np.prod(shape, dtype=int)) for shape in self.shapes]
        self._on_ps = [layer for layer in keras_model._flatten_layers() if getattr(layer, "is_on_ps", False)]
        for i, layer in enumerate(self._on_ps):
            layer.number = i
        self.tables = tables.specs_of(self._on_ps)
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
        """Returns the training loss of a batch (scalar) and the state after it.

        Args:
          variables, state: values of the model's variables, lists of tensors.
          x, y: samples and labels `[n, ...]`, in the structure of the model's inputs and outputs.
          weights: sample weights, `[n]`, or in the structure of the labels.

        Raises:
          UserError: if the model cannot be a part of a graph.
        """
        scope, loss, _ = self._call(variables, state, self._metrics, x, y, weights, training=True)
        return loss, [scope.get_current_value(v) for v in self.keras_model.non_trainable_variables]

    def loss_and_gradient(self, parameters, state, x, y, weights=None):
        """Returns the training loss of a batch, its gradient `[size]`, and the state after it; see `gradients`."""
        return self.gradients(parameters, state, x, y, weights)[:3]

    def gradients(self, parameters, state, x, y, weights=None, rows=()):
        """Returns the training loss of a batch, its gradient `[size]`, the state after it, and the gradients of rows.

        Args:
          parameters, state, x, y, weights: as of `loss`.
          rows: the `common.scheme.LocalRows` of each table on the ps. For each, the last result has gradients `[n, width]` and
            their row indices `[n]`, possibly with duplicates.

        Raises:
          UserError: if the model cannot be a part of a graph, or its loss has no gradient.
        """
        variables, found = self.split(parameters), []

        def find(layer, ids):
            given, at = rows[layer.number].find(ids)
            if layer.trainable:
                found.append((layer, at, given))
            return given

        with tables.found_by(find) if rows else contextlib.nullcontext():
            loss, state = self.loss(variables, state, x, y, weights)
        with _as_user_error("the gradient of the loss cannot be computed in a graph"):
            gradients = tf.gradients(loss, [*variables, *(given for *_, given in found)])
        if all(g is None for g in gradients):
            raise UserError("the loss of the model depends on no trainable variable")
        of_rows = []
        for i, own in enumerate(rows):
            here = [(g, at) for g, (layer, at, _) in zip(gradients[len(variables) :], found) if layer.number == i]
            here = [(tf.reshape(g, [-1, own.table.width]), tf.reshape(at, [-1])) for g, at in here if g is not None]
            none = tf.zeros([0, own.table.width]), tf.zeros([0], tf.int64)
            of_rows.append(tuple(tf.concat(each, axis=0) for each in zip(*here)) if here else none)
        gradients = gradients[: len(variables)]
        flat = [
            tf.reshape(g, [-1]) if g is not None else tf.zeros([size]) for g, size in zip(gradients, self.sizes, strict=True)
        ]
        return loss, tf.concat(flat, axis=0), state, of_rows

    def ids_of(self, x, tables_on_ps):
        """Returns the row ids that samples need, a list of tensors per table. Nothing else of the model is computed.

        Raises:
          UserError: if the model cannot be a part of a graph, ids depend on more than samples, or a layer looks nothing up.
        """
        model = self.keras_model
        variables = model.trainable_variables, model.non_trainable_variables
        values = [[tf.placeholder(v.dtype, v.shape) for v in some] for some in variables]  # never fed: ids need samples alone
        asked = tables.Asked(tables_on_ps, [*values[0], *values[1]])
        scope = _scope(model, *values)
        with _as_user_error("the model cannot be a part of a graph"), scope, _compared_by_value(), tables.found_by(asked):
            model(tf.nest.map_structure(as_input, x), **_training(model, True))
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
          parameters: tensor `[size]`.
          state: tensors.
          sample: function of a batch number, a tensor, that returns (x, y) or (x, y, weights).
          count: number of batches.
        """
        import keras

        variables = self.split(parameters)
        is_moving: list[bool] = []
        norms = [v for v in self.keras_model._flatten_layers() if isinstance(v, keras.layers.BatchNormalization)]

        def batch(k, state):
            x, y, *weights = sample(k)
            share = tf.cast(k, tf.float32) / (tf.cast(k, tf.float32) + 1)
            momenta = [norm.momentum for norm in norms]
            for norm in norms:
                norm.momentum = share
            try:
                scope, *_ = self._call(variables, state, self._metrics, x, y, weights[0] if weights else None, training=True)
            finally:
                for norm, momentum in zip(norms, momenta, strict=True):
                    norm.momentum = momentum
            values = [scope.get_current_value(v) for v in self.keras_model.non_trainable_variables]
            is_moving[:] = [v is not old and v.dtype.is_floating for v, old in zip(values, state, strict=True)]
            return k + 1, values

        if all(value.dtype.kind != "f" for value in self.initial_state):
            return state
        _, found = tf.while_loop(lambda k, _: k < count, batch, (0, state), parallel_iterations=1)
        return [new if moves else old for new, old, moves in zip(found, state, is_moving, strict=True)]

    def _call(self, variables, state, metrics, x, y, weights, training):
        """Calls the model on a batch and computes its loss, as Keras's trainer does.

        Returns:
          The scope with the updated values of the model's variables, the loss, and the outputs.
        """
        model, x = self.keras_model, tf.nest.map_structure(as_input, x)
        scope = _scope(model, variables, state, metrics)
        with _as_user_error("the model cannot be a part of a graph"), scope, _compared_by_value():
            outputs = model(x, **_training(model, training))
            loss = tf.cast(model._compute_loss(x, y, outputs, weights, training), tf.float32)
        if loss.shape.rank != 0:
            raise UserError(f"the loss of the model has shape {loss.shape}, expected one number")
        return scope, loss, outputs

    def evaluate(self, parameters, state, x, y, weights=None, batch_size=500):
        """Returns the loss and the metrics over all samples, {name: scalar}, as `keras.Model.evaluate` does.

        It works in batches, so memory use does not grow with the test set.

        Raises:
          UserError: if a metric cannot be a part of a graph, or is no number.
        """
        samples = (x, y) if weights is None else (x, y, weights)

        def part(start):
            return tf.nest.map_structure(lambda array: array[start : start + batch_size], samples)

        return self.evaluate_parts(parameters, state, part, tf.nest.flatten(x)[0].shape[0], batch_size)

    def evaluate_parts(self, parameters, state, part, n, batch_size):
        """As `evaluate`, for n samples in batches; `part` maps a batch's first sample number, a tensor, to the batch."""
        model, variables = self.keras_model, self.split(parameters)

        def batch(start, total, metrics, _):
            x, y, *weights = samples = part(start)
            weights = weights[0] if weights else None
            scope, loss, outputs = self._call(variables, state, metrics, x, y, weights, training=False)
            with _as_user_error("the metrics of the model cannot be a part of a graph"), scope, _compared_by_value():
                found = model.compute_metrics(tf.nest.map_structure(as_input, x), y, outputs, weights)
                found = {name: tf.cast(value, tf.float32) for name, value in _numbers(found).items()}
            metrics = [scope.get_current_value(v) for v in model.metrics_variables]
            size = tf.cast(tf.shape(tf.nest.flatten(samples)[0])[0], tf.float32)
            return start + batch_size, total + loss * size, metrics, found

        metrics = [tf.convert_to_tensor(value) for value in self._metrics]
        first = 0, 0.0, metrics, {name: tf.zeros([]) for name in self._measures}
        _, total, _, found = tf.while_loop(lambda start, *_: start < n, batch, first, parallel_iterations=1)
        return {**found, "loss": total / n}

    def save(self, parameters, state, path, rows_of_tables=()):
        """Atomically writes the model with these values to a file for `keras.models.load_model(path)`.

        Callable from any thread without an open graph; calls are serialized. With tables it can be called only once, since
        they become layers of the model.

        Args:
          parameters, state: arrays.
          path: path of the file.
          rows_of_tables: see `fill`.
        """
        with self._saving:
            self._save(parameters, state, path, rows_of_tables)

    def fill(self, rows_of_tables):
        """Loads the tables into the model; its layers then become ordinary layers.

        Args:
          rows_of_tables: the result of `common.scheme.whole` for each table on the ps.
        """
        for layer, rows in zip(self._on_ps, rows_of_tables, strict=True):
            layer.fill(rows)

    def _save(self, parameters, state, path, rows_of_tables):
        start = 0
        for variable, shape, size in zip(self.keras_model.trainable_variables, self.shapes, self.sizes, strict=True):
            variable.assign(parameters[start : start + size].reshape(shape))
            start += size
        for variable, value in zip(self.keras_model.non_trainable_variables, state, strict=True):
            variable.assign(value)
        self.fill(rows_of_tables)
        unfinished = f"{path}.unfinished.keras"
        try:
            self.keras_model.save(unfinished)
            os.replace(unfinished, path)
        finally:  # on a full disk a leftover file would take the space of the next checkpoint
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
