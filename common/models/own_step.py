"""A training step of a model's own, `compute_gradients` or `train_step`: a vector of gradients in place of a loss.

A scheme needs no loss: x ← x − η v(x) for any vector field v, such as a GAN's: the gradient of each loss by its own variables.
"""

import contextlib
import threading

import keras
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
        variables = self._model.trainable_variables
        before, samples = [v.value for v in variables], (x, y) if weights is None else (x, y, weights)
        tapes = contextlib.nullcontext() if tf.executing_eagerly() else _gradients_of_graph()
        with tapes, _recorded() as applied:
            if self.name == "compute_gradients":
                given = self._model.compute_gradients(*samples[:2], **({"sample_weight": weights} if samples[2:] else {}))
                if not (isinstance(given, tuple) and len(given) == 2):
                    raise UserError("its compute_gradients must return (pairs of gradient and variable, losses)")
                pairs, losses = given
                if applied:
                    raise UserError("its compute_gradients applies gradients: return them, as the scheme applies them")
            else:
                losses = self._model.train_step(samples)
                pairs = [pair for _, some in applied for pair in some]
                self.optimizers |= {type(optimizer).__name__ for optimizer, _ in applied}
        if changed := [v.path for v, value in zip(variables, before, strict=True) if v.value is not value]:
            raise UserError(f"its {self.name} changes {changed[0]} itself: leave that to the scheme, which takes its gradient")
        return self._in_order(pairs, variables), self._losses(losses)

    def _in_order(self, pairs, variables):
        """Returns the gradients of the variables, or raises `UserError` unless each has exactly one."""
        found: dict[int, list] = {id(v): [] for v in variables}
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and hasattr(pair[1], "path")):
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
                hint = "add them up" if its else "if it is not to be trained, set trainable=False"
                raise UserError(f"its {self.name} gives {count} of {v.path}: {hint}")
            gradient = tf.convert_to_tensor(its[0], tf.float32)
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
        return found if "loss" in found else {**found, "loss": tf.add_n(list(found.values()))}


def name_of(keras_model):
    """Returns the method with a training step of the model's own, or None."""
    kind = type(keras_model)
    own = [callable(getattr(kind, "compute_gradients", None)), kind.train_step is not keras.Model.train_step]
    return next((name for name, is_own in zip(NAMES, own, strict=True) if is_own), None)


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
        if trainable_variables is None:
            raise UserError("its train_step calls optimizer.apply without variables: pass them, too")
        applied.append((self, list(zip(grads, trainable_variables, strict=True))))

    with _replaced(keras.optimizers.Optimizer, "apply", apply):
        yield applied


@contextlib.contextmanager
def _gradients_of_graph():
    """A context in which `tf.GradientTape.gradient` takes the gradients of the graph.

    A tape looks for the handles of variables, but here their values are tensors: slices of the vector of parameters.
    """
    tape = tensorflow.GradientTape
    enter = tape.__enter__

    def remember(self):
        self._operations_before = len(tf.get_default_graph().get_operations())
        return enter(self)

    def gradient(self, target, sources, output_gradients=None, unconnected_gradients=tf.UnconnectedGradients.NONE):
        values = [getattr(source, "value", source) for source in tf.nest.flatten(sources)]
        target = tf.nest.flatten(target)
        _check_is_recorded(target, values, self._operations_before)
        grads = tf.gradients(target, values, output_gradients, unconnected_gradients=unconnected_gradients)
        return tf.nest.pack_sequence_as(sources, grads)

    with _replaced(tape, "__enter__", remember), _replaced(tape, "gradient", gradient):
        yield


def _check_is_recorded(target, sources, count):
    """Raises a `UserError` if the target depends on a source by operations that preceded the tape's context.

    A tape would ignore them, the gradients of the graph would not.
    """
    graph = tf.get_default_graph()
    before = {operation.name for operation in graph.get_operations()[:count]}
    ends = {id(source) for source in sources}
    seen: set = set()
    waiting = [(tensor, False) for tensor in target]
    while waiting:
        tensor, is_behind = waiting.pop()  # behind an operation that preceded the tape
        if id(tensor) in ends:
            if is_behind:
                raise UserError("a GradientTape of its step begins after a part of its loss is made: move that into the tape")
        elif (id(tensor), is_behind) not in seen:
            seen.add((id(tensor), is_behind))
            waiting += [(given, is_behind or tensor.op.name in before) for given in tensor.op.inputs]
