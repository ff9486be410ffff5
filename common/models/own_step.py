"""A training step of a model's own, `compute_gradients` or `train_step`: a vector of gradients in place of a loss.

A scheme needs no loss: x ← x − η v(x) for any vector field v, such as a GAN's: the gradient of each loss by its own variables.
"""

import contextlib
import threading

import keras
import numpy as np
import tensorflow

from common import tf
from common.core import UserError
from common.models.stateless_model import scalars_of

NAMES = "compute_gradients", "train_step"


class OwnStep:
    """The gradients and losses of a model with a training step of its own, as a function of samples.

    Two forms are honoured, the first before the second:
    - `compute_gradients(x, y, sample_weight=None)` returns pairs (gradient, variable), and {name: loss}, or one loss.
    - `train_step(data)`, as `fit` calls it: its optimizers get no gradient to apply; the gradients go to the scheme.

    All gradients are of the same parameters: no optimizer has changed any of them before.

    Attributes:
      name: the method, one of `NAMES`.
      optimizers: the names of the optimizers that `train_step` has called.
    """

    def __init__(self, keras_model):
        self._model, self.name = keras_model, name_of(keras_model)
        self.optimizers: set[str] = set()

    @property
    def text(self):
        """A description for the first line of a run."""
        return f"the losses of its {self.name}"

    def __call__(self, x, y, weights=None):
        """Returns a gradient for each trainable variable, tensors of their shapes, and {name: loss}, scalars, with "loss".

        In a graph, call it in a Keras scope with values of the variables. "loss" is the sum of the losses, unless the step
        gives one of this name. Raises `UserError` for a gradient that is missing, and for a step that no scheme can take.
        """
        variables, samples = self._model.trainable_variables, (x, y) if weights is None else (x, y, weights)
        before = [_state_of(v) for v in variables]
        tapes = contextlib.nullcontext() if tf.executing_eagerly() else _tapes_of(before)
        with tapes, _recorded() as applied:
            if self.name == "compute_gradients":
                given = self._model.compute_gradients(*samples[:2], **({"sample_weight": weights} if samples[2:] else {}))
                if not (isinstance(given, tuple) and len(given) == 2):
                    raise UserError("its compute_gradients must return (pairs of gradient and variable, losses)")
                pairs, losses = given
                if applied:
                    raise UserError("its compute_gradients applies gradients: return them, as the scheme applies them")
            else:
                losses = self._train_step(samples)
                pairs = [pair for _, some in applied for pair in some]
                self.optimizers |= {type(optimizer).__name__ for optimizer, _ in applied}
        if changed := [v.path for v, old in zip(variables, before, strict=True) if not _is_same(_state_of(v), old)]:
            raise UserError(f"its {self.name} changes {changed[0]} itself: leave that to the scheme, which takes its gradient")
        return self._in_order(pairs, variables), self._losses(losses)

    def _train_step(self, samples):
        step = type(self._model).train_step
        if (function := getattr(step, "python_function", None)) is None:
            return self._model.train_step(samples)
        # Of tf.function, whose tensors stay in its own graph: the function itself, with the same conversion of `if` and loops.
        converter = tensorflow.__internal__.autograph
        return converter.tf_convert(function, converter.control_status_ctx())(self._model, samples)

    def _in_order(self, pairs, variables):
        """Returns the gradients of the variables, or raises `UserError` unless each has exactly one."""
        found: dict[int, list] = {id(v): [] for v in variables}
        for pair in pairs:
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and hasattr(pair[1], "path")):
                raise UserError(f"its {self.name} gives a {type(pair).__name__}, expected a pair of a gradient and a variable")
            gradient, variable = pair
            if id(variable) not in found:
                raise UserError(f"its {self.name} gives a gradient of {variable.path}, no trainable variable of the model")
            found[id(variable)].append(gradient)
        gradients = []
        for v in variables:
            its = [g for g in found[id(v)] if g is not None]
            if len(its) != 1:
                count = "two gradients" if its else "no gradient"
                hint = "a scheme takes one of each" if its else "if it is not to be trained, set trainable=False"
                raise UserError(f"its {self.name} gives {count} of {v.path}: {hint}")
            gradient = tf.cast(tf.convert_to_tensor(its[0]), tf.float32)
            if not gradient.shape.is_compatible_with(v.shape):
                shapes = f"of shape {gradient.shape}, expected {tuple(v.shape)}"
                raise UserError(f"its {self.name} gives a gradient of {v.path} {shapes}")
            gradients.append(tf.ensure_shape(gradient, v.shape))
        return gradients

    def _losses(self, losses):
        losses = losses if isinstance(losses, dict) else {"loss": losses}
        empty = [name for name, value in losses.items() if value is None]
        if empty or not losses:
            what = f"None as {empty[0]!r}" if empty else "no losses"
            raise UserError(f"its {self.name} gives {what}: return {{name: one number}}")
        found = {name: tf.cast(value, tf.float32) for name, value in scalars_of(losses).items()}
        if taken := [name for name in found if name.startswith("validation_")]:
            raise UserError(f"its {self.name} gives {taken[0]!r}, a name for the validation set: expected another")
        return found if "loss" in found else {**found, "loss": tf.add_n(list(found.values()))}


def name_of(keras_model):
    """Returns the method with a training step of the model's own, or None."""
    kind = type(keras_model)
    own = [callable(getattr(kind, "compute_gradients", None)), kind.train_step is not keras.Model.train_step]
    return next((name for name, is_own in zip(NAMES, own, strict=True) if is_own), None)


def _state_of(variable):
    """Returns the value of a variable: a copy, or in a graph the tensor that stands for it."""
    return variable.numpy() if tf.executing_eagerly() else variable.value


def _is_same(one, other):
    return np.array_equal(one, other, equal_nan=True) if isinstance(one, np.ndarray) else one is other


_lock = threading.RLock()  # one thread at a time, as each restores the methods that it found


@contextlib.contextmanager
def _replaced(owner, name, function):
    before = vars(owner).get(name)
    with _lock:
        setattr(owner, name, function)
        try:
            yield
        finally:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


@contextlib.contextmanager
def _recorded():
    """A context in which Keras's optimizers apply nothing; yields a list of (optimizer, pairs of gradient and variable)."""
    applied = []

    def apply(self, grads, trainable_variables=None):
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            raise UserError("its train_step calls a LossScaleOptimizer, but no scheme scales the loss")
        if trainable_variables is None:
            raise UserError("its train_step calls optimizer.apply without variables: pass them, too")
        scale = self.loss_scale_factor or 1.0
        grads = [g if g is None or scale == 1 else tf.convert_to_tensor(g) / scale for g in grads]
        applied.append((self, list(zip(grads, trainable_variables, strict=True))))

    with _replaced(keras.optimizers.Optimizer, "apply", apply):
        yield applied


@contextlib.contextmanager
def _tapes_of(values):
    """A context in which tapes watch these tensors, the values of trainable variables, and take variables as sources.

    A tape looks for the handles of variables, but here their values are slices of the vector of parameters.
    """
    tape = tensorflow.GradientTape
    push = tape._push_tape

    def push_and_watch(self):  # also after stop_recording() and reset()
        push(self)
        for value in values if self._watch_accessed_variables else ():
            self.watch(value)

    def of_values(method):
        return lambda self, target, sources, *more, **named: method(self, target, _values_of(sources), *more, **named)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(tape, "_push_tape", push_and_watch))
        for name in "gradient", "jacobian":
            stack.enter_context(_replaced(tape, name, of_values(getattr(tape, name))))
        yield


def _values_of(sources):
    """Returns tensors and Keras variables, in any structure, with the present values of the variables."""
    return tf.nest.map_structure(lambda source: source.value if isinstance(source, keras.Variable) else source, sources)
