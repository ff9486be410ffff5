"""The training loss of a Keras model and its metrics: compiled by the user, from a flag, or chosen by the labels."""

import inspect
import weakref

import keras

from common.core import UserError
from common.data import arrays_in, chunks

_CROSS_ENTROPIES = {  # the loss and its measure
    "sparse_categorical_crossentropy": (keras.losses.SparseCategoricalCrossentropy, keras.metrics.SparseCategoricalAccuracy),
    "categorical_crossentropy": (keras.losses.CategoricalCrossentropy, keras.metrics.CategoricalAccuracy),
    "binary_crossentropy": (keras.losses.BinaryCrossentropy, keras.metrics.BinaryAccuracy),
}
_compiled_here: weakref.WeakSet = weakref.WeakSet()  # models compiled by `choose`; a function may return one again
PROBABILITIES = {"Softmax": "softmax", "Sigmoid": "sigmoid"}  # by the type of the operation that makes them


def choose(keras_model, outputs, last_operation, data, loss=None):
    """Compiles an uncompiled model with the loss of the flag or by the labels; returns a description of the loss.

    Without a flag, it is the cross-entropy of logits for integer labels, and the squared error for others. Raises `UserError`
    if there is a flag and the model has a loss already, or no loss fits.

    Args:
      keras_model: a model that was called on samples before.
      outputs: its outputs, arrays in any structure.
      last_operation: function that returns the final activation, a key of `PROBABILITIES`, or None.
      data: a `common.data.Data`.
      loss: `--loss`, a Keras loss name, or None.
    """
    computes_it = type(keras_model).compute_loss is not keras.Model.compute_loss
    has_own = computes_it or keras_model.compiled and keras_model not in _compiled_here
    if has_own and loss is not None:
        raise UserError(f"--loss={loss}: the model has a loss already, compiled or in compute_loss: leave --loss out")
    if not has_own:
        if loss is not None:
            by_name(keras_model, loss, last_operation())
        else:
            _check_labels(outputs, last_operation, data)
            by_labels(keras_model, data.is_classification)
        _compiled_here.add(keras_model)
    elif not keras_model.compiled:
        keras_model.compile("sgd")  # `fit` and `evaluate` reject an uncompiled model
    if not (minimizes := text(keras_model)):
        raise UserError("the model is compiled without a loss, and its layers add none: compile it with one")
    return minimizes


def by_labels(keras_model, is_classification):
    """Compiles a model with the cross-entropy of logits for class labels, else with the squared error."""
    if is_classification:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        keras_model.compile("sgd", loss, metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")])
    else:
        keras_model.compile("sgd", "mean_squared_error")


def by_name(keras_model, name, last_operation=None):
    """Compiles a model with a Keras loss by name; a cross-entropy takes logits or probabilities, by `last_operation`."""
    if name in _CROSS_ENTROPIES:
        from_logits = last_operation not in PROBABILITIES
        loss, metric = _CROSS_ENTROPIES[name]
        more = {"threshold": 0.0} if from_logits and name.startswith("binary") else {}
        keras_model.compile("sgd", loss(from_logits=from_logits), metrics=[metric(name="accuracy", **more)])
        return
    try:
        found = keras.losses.get(name)
    except (ValueError, TypeError):
        raise UserError(f"--loss must be a loss of Keras, such as mean_absolute_error, not {name!r}") from None
    if "from_logits" in inspect.signature(getattr(found, "fn", found)).parameters:
        known = ", ".join(_CROSS_ENTROPIES)
        raise UserError(f"--loss={name} may take logits or probabilities: choose {known}, or compile the model with it")
    keras_model.compile("sgd", name)


def text(keras_model):
    """Returns a description of the loss of a model with a compiled loss or its own `compute_loss`."""
    if type(keras_model).compute_loss is not keras.Model.compute_loss:
        return "the loss of its compute_loss"
    name = _name(keras_model.loss)
    if getattr(keras_model.loss, "_fn_kwargs", {}).get("from_logits"):
        name += " of logits"
    own = "the losses of its layers" if keras_model.losses else ""
    return " + ".join(filter(None, [name, own]))


def _name(loss):
    if isinstance(loss, dict):
        return ", ".join(f"{_name(each)} of {key}" for key, each in loss.items() if each is not None)
    if isinstance(loss, (list, tuple)):
        return ", ".join(_name(each) for each in loss if each is not None)
    name = loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", None)
    return (name or ("" if loss is None else type(loss).__name__)).replace("_", " ")


def _check_labels(outputs, last_operation, data):
    """Raises a `UserError` if labels and outputs do not determine a loss."""
    outputs, own = keras.tree.flatten(outputs), "compile the model with the loss that fits, or name it with --loss"
    if len(outputs) != 1 or len(arrays_in(data.y_train)) != 1:
        counts = f"{len(outputs)} outputs and {len(arrays_in(data.y_train))} arrays of labels"
        raise UserError(f"the model has {counts}: compile the model with a loss for each output")
    if isinstance(data.y_train, (dict, tuple)):
        raise UserError("the labels are in a dict or tuple: give an array, or compile the model with a loss for each output")
    shape, of_labels = list(outputs[0].shape[1:]), list(data.y_train.shape[1:])
    if not data.is_classification:
        if shape != of_labels:
            is_whole = (data.y_train[:100] % 1 == 0).all()
            hint = "; if they are classes, give them as whole numbers, y.astype('int32')" if is_whole else ""
            raise UserError(f"the model gives outputs of shape {shape}, but the labels have shape {of_labels}{hint}")
        if all(((chunk == 0) | (chunk == 1)).all() for y in (data.y_train, data.y_test) for chunk in chunks(y)):
            hint = f"{own}, as --loss=binary_crossentropy; as whole numbers they are classes"
            raise UserError(f"the labels are 0.0 and 1.0, which may be classes, one-hot, or several labels of a sample: {hint}")
        return
    if of_labels[-1:] == [1] and len(of_labels) == len(shape):  # a column of classes
        of_labels = of_labels[:-1]
    expected = [*of_labels, data.num_classes]
    least = min(data.y_train.min(), data.y_test.min())
    if least < 0:
        raise UserError(f"the labels hold the class {least}, expected 0 or more")
    if shape[:-1] != expected[:-1] or not shape or shape[-1] < expected[-1]:
        hint = ""
        if of_labels and data.num_classes == 2:
            hint = f"; one-hot labels become class numbers by .argmax(axis=-1); for several labels of a sample {own}"
        elif shape == list(data.y_train.shape[1:]) and data.num_classes > 2:
            hint = "; if they are not classes, give them as floats, y.astype('float32')"
        elif shape[-1:] == [1] and data.num_classes == 2:
            hint = f"; for one output {own}, as --loss=binary_crossentropy"
        wrong = f"the model gives outputs of shape {shape}, but the labels are classes 0 to {data.num_classes - 1}"
        raise UserError(f"{wrong}: expected {expected} logits{hint}")
    if (last := last_operation()) in PROBABILITIES:
        hint = f"leave that activation out, or {own}, as --loss=sparse_categorical_crossentropy"
        raise UserError(f"the model ends with {PROBABILITIES[last]}, but the loss takes logits: {hint}")
