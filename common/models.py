"""A Keras model as a pure function of one flat vector of parameters."""

import math
import os

import numpy as np

from common import limits, tf
from common.data import call_user_function, one_line
from common.flags import UserError, check_backend


def build(spec, data, seed=0):
    """Returns the `Model` that `--model=spec` names (linear, mlp, cnn or FILE.py:FUNCTION), with its initial values.

    To be called before a graph is entered: the values of Keras variables can only be read eagerly.

    Raises:
      UserError: if there is no such model or it does not fit `data`.
    """
    import keras

    check_backend(keras.backend.backend())
    keras.utils.set_random_seed(seed)
    if spec in BUILT_IN:
        outputs = data.num_classes if data.is_classification else int(np.prod(data.y_train.shape[1:], dtype=int))
        shape = data.x_train.shape[1:]
        if spec == "cnn" and (len(shape) != 3 or min(shape[:2]) < 4):
            raise UserError(f"--model=cnn needs images of shape [height, width, channels], not samples of shape {list(shape)}")
        _check_size(spec, data, _count_of[spec](shape, outputs))
        layers = BUILT_IN[spec](keras.layers, outputs)
        if not data.is_classification:
            layers.append(keras.layers.Reshape(data.y_train.shape[1:]))
        keras_model = keras.Sequential([keras.Input(shape), *layers])
    elif ":" in spec:
        keras_model = call_user_function("--model", spec)
    else:
        raise UserError(f"--model must be one of {', '.join(BUILT_IN)} or FILE.py:FUNCTION, not {spec!r}")
    if not isinstance(keras_model, keras.Model):
        raise UserError(f"--model={spec} must give a keras.Model, not {type(keras_model).__name__}")
    _check(keras_model, spec, data)
    return Model(keras_model, data.is_classification)


BUILT_IN = {
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
}


def _dense(inputs, outputs):
    return (inputs + 1) * outputs


# How many parameters they have, for samples of a shape and a number of outputs
_count_of = {
    "linear": lambda shape, outputs: _dense(math.prod(shape), outputs),
    "mlp": lambda shape, outputs: _dense(math.prod(shape), 128) + _dense(128, 128) + _dense(128, outputs),
    "cnn": lambda shape, outputs: (
        _dense(9 * shape[2], 16) + _dense(9 * 16, 32) + _dense((shape[0] // 4) * (shape[1] // 4) * 32, outputs)
    ),
}


def _check_size(spec, data, count):
    """Raises a `UserError` if memory cannot hold a model of so many parameters, before it is built.

    A worker has them four times at least: as Keras made them, as initial values, as x and as the gradient.
    """
    need, has = 4 * 4 * count, limits.memory()
    if need > has:
        classes = f"the labels are classes 0 to {data.num_classes - 1}, and " if data.is_classification else ""
        renumber = "; number them without gaps, as np.unique(y, return_inverse=True) does" if data.is_classification else ""
        raise UserError(
            f"{classes}--model={spec} would have {count:,} parameters, which take at least {limits.as_bytes(need)} of memory, "
            f"but there are {limits.as_bytes(has)}{renumber}"
        )


def _check(keras_model, spec, data):
    """Calls the model on two samples, which also builds one that is not built yet."""
    try:
        outputs = keras_model(data.x_train[:2], training=False)
        shape = tuple(outputs.shape[1:])
    except Exception as error:
        raise UserError(
            f"--model={spec} cannot be called on samples of shape {list(data.x_train.shape[1:])}: {one_line(error)}"
        ) from error
    if data.is_classification and (len(shape) != 1 or shape[0] < data.num_classes):
        raise UserError(
            f"--model={spec} gives outputs of shape {list(shape)}, but the labels are classes 0 to "
            f"{data.num_classes - 1}: expected [{data.num_classes}] logits"
        )
    if not data.is_classification and shape != data.y_train.shape[1:]:
        raise UserError(
            f"--model={spec} gives outputs of shape {list(shape)}, but the labels have shape {list(data.y_train.shape[1:])}"
        )
    if not keras_model.trainable_variables:
        raise UserError(f"--model={spec} has no trainable variables")
    for v in [*keras_model.trainable_variables, *keras_model.non_trainable_variables]:
        values = v.numpy()
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            count = np.sum(~np.isfinite(values))
            raise UserError(f"--model={spec}: {v.path} begins with {count} values that are NaN or infinite")
    others = {v.dtype for v in keras_model.trainable_variables} - {"float32"}
    if others:
        raise UserError(f"--model={spec} has trainable variables of type {', '.join(sorted(others))}, expected float32")


def _make_constant(keras_model):
    """Turns tensors that layers and regularizers hold into NumPy arrays, as no graph takes a tensor from outside it."""
    import keras

    for layer in keras_model._flatten_layers():
        inner = [v for v in vars(layer).values() if isinstance(v, (keras.Regularizer, keras.constraints.Constraint))]
        for owner in [layer, *inner]:
            for name, value in list(vars(owner).items()):
                if isinstance(value, tf.Tensor):
                    object.__setattr__(owner, name, value.numpy())


class Model:
    """What a worker needs of a Keras model: its initial values, and loss and outputs as functions of a flat vector.

    The loss is the cross-entropy of logits for class labels and the squared error otherwise, plus the model's own
    (regularization). State is what is not trained: moving means, the seeds of Dropout.
    """

    def __init__(self, keras_model, is_classification):
        self.keras_model, self.is_classification = keras_model, is_classification
        _make_constant(keras_model)
        self.shapes = [tuple(v.shape) for v in keras_model.trainable_variables]
        self.sizes = [int(np.prod(shape, dtype=int)) for shape in self.shapes]
        self.size = sum(self.sizes)
        self.initial_parameters = np.concatenate([v.numpy().ravel() for v in keras_model.trainable_variables])
        self.initial_state = [v.numpy() for v in keras_model.non_trainable_variables]

    def split(self, parameters):
        """Returns the flat vector `[size]` as the list of the model's trainable variables."""
        pieces = tf.split(parameters, self.sizes)
        return [tf.reshape(piece, shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def loss(self, variables, state, x, y):
        """Returns the mean training loss of a batch (scalar) and the state after it."""
        outputs, state, own_losses = self.keras_model.stateless_call(variables, state, x, training=True, return_losses=True)
        outputs = tf.cast(outputs, tf.float32)  # under a mixed precision policy they may be float16
        return tf.add_n([tf.reduce_mean(self._losses(outputs, y)), *own_losses]), state

    def _losses(self, outputs, y):
        if self.is_classification:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=outputs)
        return tf.square(outputs - y)

    def evaluate(self, parameters, state, x, y, batch_size=500):
        """Returns the mean loss over all samples and, for classes, the accuracy (NaN otherwise), both scalars.

        In batches, so that a large test set needs no more memory than a small one.
        """
        variables = self.split(parameters)
        n = x.shape[0]

        def batch(start, loss, correct):
            part, labels = x[start : start + batch_size], y[start : start + batch_size]
            outputs, _ = self.keras_model.stateless_call(variables, state, part, training=False)
            outputs = tf.cast(outputs, tf.float32)
            hits = tf.equal(tf.argmax(outputs, axis=-1, output_type=tf.int32), labels) if self.is_classification else [False]
            size = tf.cast(tf.shape(part)[0], tf.float32)
            loss += tf.reduce_mean(self._losses(outputs, labels)) * size
            return start + batch_size, loss, correct + tf.reduce_sum(tf.cast(hits, tf.float32))

        _, loss, correct = tf.while_loop(lambda start, *_: start < n, batch, (0, 0.0, 0.0), parallel_iterations=1)
        return loss / n, correct / n if self.is_classification else tf.constant(np.nan)

    def save(self, parameters, state, path):
        """Writes the model with these values, so that `keras.models.load_model(path)` gives it back. All or nothing."""
        start = 0
        for variable, shape, size in zip(self.keras_model.trainable_variables, self.shapes, self.sizes, strict=True):
            variable.assign(parameters[start : start + size].reshape(shape))
            start += size
        for variable, value in zip(self.keras_model.non_trainable_variables, state, strict=True):
            variable.assign(value)
        unfinished = f"{path}.unfinished.keras"
        self.keras_model.save(unfinished)
        os.replace(unfinished, path)
