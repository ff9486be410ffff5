"""Keras models for training: choice by `--model`, checks with a few samples, and the resulting `Model`."""

import contextlib
import math
import re
from pathlib import Path

import numpy as np

from common import tf
from common.core import TRANSFORMER, UserError, check_backend
from common.data import OF_STRINGS, arrays_in, call_user_function, chunks, mapped, one_line, user_module
from common.models.builtin_models import BUILT_IN, built_in
from common.models.column_inputs import ColumnInputs
from common.models.stateless_model import Model, as_inputs, as_user_error, scalars_of, scope_of, training_arg
from common.scheme import tables


def build(spec, data, seed=0, loss=None, tables_on_ps=False, tables_seed=0, custom_objects=None, **sizes):
    """Returns the `Model` that `--model=spec` names, of `BUILT_IN`, FILE.keras or FILE.py:FUNCTION, with its initial values.

    Call it before a graph is entered: Keras variables can only be read eagerly. Raises `UserError` if the model does not exist
    or does not fit `data`.

    Args:
      data: a `common.data.Data`.
      seed: seed of the initial values, unless the model sets seeds of its own.
      loss: `--loss`, a Keras loss name, for a model without a loss of its own.
      tables_on_ps: whether tables of `common.Embedding` layers lie on the ps, see `common.scheme.tables`, or in the model.
      tables_seed: seed of the initial rows of these tables, the same in all tasks.
      custom_objects: `--custom_objects`, a Python file for FILE.keras, or None.
      **sizes: sizes of a transformer, see `common.core.model_options`; other models ignore them.
    """
    import keras

    check_backend(keras.backend.backend())
    if custom_objects is not None and not spec.endswith(".keras"):
        raise UserError(f"--custom_objects={custom_objects} is for --model=FILE.keras, not {spec}")
    keras.utils.set_random_seed(seed)
    with tables.on_ps(tables_seed) if tables_on_ps else contextlib.nullcontext():
        if spec in BUILT_IN:
            keras_model = built_in(spec, data, {**TRANSFORMER, **sizes})
        elif ":" in spec:
            keras_model = call_user_function("--model", spec)
        elif spec.endswith(".keras"):
            keras_model = _saved(spec, custom_objects)
        else:
            raise UserError(f"--model must be one of {', '.join(BUILT_IN)}, FILE.keras or FILE.py:FUNCTION, not {spec!r}")
        if not isinstance(keras_model, keras.Model):
            raise UserError(f"--model={spec} must give a keras.Model, not {type(keras_model).__name__}")
        with named(spec):
            return checked(keras_model, data, loss, last_operation=(lambda: None) if spec in BUILT_IN else None)


def _saved(path, custom_objects):
    """Returns the Keras model in a file, with the user's own classes and functions from a Python file, or None."""
    import keras

    own = vars(user_module("--custom_objects", custom_objects)) if custom_objects is not None else {}
    own = {name: value for name, value in own.items() if callable(value)}
    if not Path(path).expanduser().is_file():
        raise UserError(f"--model={path}: there is no such file")
    try:
        return keras.models.load_model(Path(path).expanduser(), custom_objects=own)
    except Exception as error:  # of a class that is missing, of a damaged file, in many ways
        hint = "; --custom_objects=FILE.py names the file with its own classes" if custom_objects is None else ""
        causes = re.findall(r"xception encountered: (.+?)\.(?:\s|$)", str(error))
        raise UserError(f"--model={path} cannot be loaded: {causes[-1] if causes else one_line(error)}{hint}") from error


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


def checked(keras_model, data, loss=None, last_operation=None):
    """Returns the `Model`, after a trial of the model, its loss and its metrics on a few samples, which also builds them.

    Raises `UserError` if the model cannot be trained with these samples.

    Args:
      keras_model, data, loss: as in `build`.
      last_operation: as of `losses.choose`; None to look for the operation in the graph of the model.
    """
    import keras

    from common.models import losses, own_step

    _refuse_layers(keras_model)  # before the call, whose Keras errors would be misleading
    _refuse_inputs(keras_model, data.x_train if data.columns is None else None)
    inputs = as_inputs if data.columns is None else ColumnInputs(keras_model, data)
    x, y, *weights = _telling_samples(data.train, inputs)
    has_step, outputs = own_step.name_of(keras_model), None
    if not has_step or type(keras_model).call is not keras.Model.call:  # a model of several, such as a GAN, may have no call
        with as_user_error(f"the model cannot be called on samples of shape {_shapes(x)}"):
            outputs = keras_model(x, **training_arg(keras_model, False))
    if not keras_model.trainable_variables:
        has_tables = any(getattr(layer, "is_on_ps", False) for layer in keras_model._flatten_layers())
        others = " but the tables on the ps" if has_tables else ""
        raise UserError(f"the model has no trainable variables{others}: give it a layer with weights")
    for v in [*keras_model.trainable_variables, *keras_model.non_trainable_variables]:
        values = v.numpy()
        if values.dtype.kind == "f" and (count := np.sum(~np.isfinite(values))):
            raise UserError(f"{v.path} begins with {count} values that are NaN or infinite")
    _refuse_layers(keras_model)  # again, since the call may have created layers
    _refuse_what_is_not_honoured(keras_model)
    if has_step:
        return _with_own_step(keras_model, (x, y, *weights), loss, inputs)
    own_optimizer = type(keras_model.optimizer).__name__ if keras_model.compiled and keras_model.optimizer else None
    last_operation = last_operation or (lambda: _last_operation(keras_model, x, outputs))
    minimizes = losses.choose(keras_model, outputs, last_operation, data, loss)
    with as_user_error(f"the loss, {minimizes.removeprefix('the loss of ')}, does not fit the labels"):
        keras_model._compute_loss(x, y, outputs, *weights)
        if data.num_samples > 2:  # different shapes may broadcast by chance when a dimension equals the number of samples
            two = [tf.nest.map_structure(lambda array: array[:2], part) for part in (x, y, outputs, *weights)]
            keras_model._compute_loss(*two)
        x_test, y_test, *weights_test = _telling_samples(data.test, inputs)
        keras_model._compute_loss(x_test, y_test, keras_model(x_test, **training_arg(keras_model, False)), *weights_test)
    with as_user_error("the metrics of the model do not fit the labels"):
        measures = list(scalars_of(keras_model.compute_metrics(x, y, outputs, *weights)))
    places = max(math.prod(output.shape[1:-1]) for output in tf.nest.flatten(outputs))
    return Model(keras_model, measures, own_optimizer, places, inputs)


def _shapes(x):
    return ", ".join(str(list(array.shape[1:])) for array in arrays_in(x))


def _with_own_step(keras_model, samples, loss, inputs):
    """Returns the `Model` of a Keras model with a training step of its own, after a trial of that step.

    Args:
      samples: (x, y), or (x, y, weights), inputs of the model and labels.
      loss: `--loss`, refused here.
      inputs: as of `Model`.
    """
    from common.models.own_step import OwnStep

    step = OwnStep(keras_model)
    if loss is not None:
        raise UserError(f"--loss={loss}: the model has its losses in {step.name}: leave --loss out")
    if any(getattr(layer, "is_on_ps", False) for layer in keras_model._flatten_layers()):
        raise UserError(f"the model has tables (common.Embedding), but its {step.name} has no rows: use keras.layers.Embedding")
    if unbuilt := [layer.name for layer in keras_model._flatten_layers(include_self=False) if not layer.built]:
        raise UserError(f"the layer {unbuilt[0]} is not built: give the model a call, or keras.Input to its parts")
    before = [(v, v.numpy()) for v in [*keras_model.trainable_variables, *keras_model.non_trainable_variables]]
    with as_user_error(f"the model's {step.name} fails with samples of shape {_shapes(samples[0])}"):
        _, losses = step(*samples)  # eagerly; this also builds its metrics
    for variable, value in before:
        variable.assign(value)
    own_optimizer = " and ".join(sorted(step.optimizers)) or None
    return Model(keras_model, [name for name in losses if name != "loss"], own_optimizer, inputs=inputs, own_step=step)


def _refuse_inputs(keras_model, x):
    """Raises a `UserError` if a functional or sequential model has a string input, or other names than the keys of samples.

    Keras would match the keys in alphabetical order and, with a missing or extra key, feed inputs the wrong samples.
    """
    inputs = [given for given in getattr(keras_model, "inputs", None) or [] if given.dtype == "string"]
    for layer in keras_model._flatten_layers() if inputs else ():
        taken = [given for node in layer._inbound_nodes for given in node.input_tensors]
        if any(given is its for given in inputs for its in taken):
            what = f"the layer {layer.name} ({type(layer).__name__})"
            raise UserError(f"{what} takes strings, but samples are numbers; {OF_STRINGS}")
    expected = tables.named_inputs(keras_model).keys()
    if not isinstance(x, dict) or not expected:
        return
    names = ", ".join(map(repr, sorted(expected)))
    if others := sorted(x.keys() - expected):
        raise UserError(f"the samples have {others[0]!r}, which is not an input of the model ({names}): leave it out")
    if missing := sorted(expected - x.keys()):
        raise UserError(f"the samples lack {missing[0]!r}, an input of the model ({names})")


def _telling_samples(samples, inputs):
    """Returns the first three samples, as `inputs` of the model, and those with the smallest and the largest integer label."""
    import keras

    n = len(arrays_in(samples[0])[0])
    chosen = [*range(min(3, n))]
    for y in arrays_in(samples[1]):
        if y.dtype.kind == "i":
            ends = [(rows.min(axis=1), rows.max(axis=1)) for chunk in chunks(y) for rows in [chunk.reshape(len(chunk), -1)]]
            least, most = map(np.concatenate, zip(*ends))
            chosen += [int(least.argmin()), int(most.argmax())]
    x, *others = [mapped(lambda array: keras.ops.convert_to_tensor(array[chosen]), part) for part in samples]
    return [inputs(x), *others]  # tensors, as `fit` has them


# Methods of `fit` that a model may override, but no worker calls.
_OF_FIT = ("test_step", "make_train_function", "make_test_function", "train_on_batch", "fit")


def _refuse_what_is_not_honoured(keras_model):
    """Rejects features of `fit` that an update of a flat vector does not support, with a `UserError`."""
    import keras

    for v in keras_model.trainable_variables:
        if v.constraint is not None:
            what = f"the constraint {type(v.constraint).__name__}, which no update on the ps would keep"
            raise UserError(f"{v.path} has {what}: use a regularizer, or apply it in the layer's call")
    if others := {v.dtype for v in keras_model.trainable_variables} - {"float32"}:
        raise UserError(f"the model has trainable variables of type {', '.join(sorted(others))}, expected float32")
    if "train_step" in vars(keras_model):
        raise UserError("the model has a train_step that is set on the instance: define it in its class")
    for name in _OF_FIT:
        if name in vars(keras_model) or getattr(type(keras_model), name) is not getattr(keras.Model, name):
            raise UserError(f"the model has a {name} of its own, which no worker calls: move its computation to train_step")


def _refuse_layers(keras_model):
    """Raises a `UserError` for layers that workers cannot train as `fit` does."""
    for layer in keras_model._flatten_layers():
        if layer.compute_dtype == "float16":
            why = "small gradients become 0: fit scales the loss, but no scheme does; choose mixed_bfloat16"
            raise UserError(f"{layer.name} computes in float16, where {why}")
        if getattr(layer, "stateful", False) is True:
            why = "it would continue from the previous batch, but workers draw batches at random"
            raise UserError(f"{layer.name} is stateful: {why}")


# Operations that move or average numbers: applied to probabilities, they do not produce logits.
_MOVES = {"Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Transpose", "StridedSlice", "Slice", "GatherV2", "Pack"}
_MOVES |= {"Split", "SplitV", "Unpack", "ConcatV2", "Mean", "Sum", "AddV2", "AddN", "Mul", "RealDiv"}


def _last_operation(keras_model, x, outputs):
    """Returns "Softmax" or "Sigmoid" if the outputs are results of this TensorFlow operation, parts of them, or their means.

    "Softmax" also for outputs that are non-negative and sum to 1 for another reason; None for others.
    """
    import tensorflow

    from common.models import losses

    with as_user_error("the model cannot be a part of a graph"), scope_of(keras_model):
        call = tensorflow.function(lambda x: keras_model(x, **training_arg(keras_model, False)), autograph=False)  # as in a run
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
