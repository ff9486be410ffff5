"""Groups of parameters: for each variable of a model, a factor of the learning rate, and whether weight decay shrinks it.

The factor acts once on x and once on x̃: on each step of an optimizer that gets gradients. A worker's local steps always do. A
push of gradients is a step of the optimizer on the ps (`optimizer_on="ps"`), which has the factor too. A push of a walk, as in
DiLoCo and AEASGD, has it already: there the ps only keep frozen values in place, as compression may change a zero.
"""

import contextlib
from typing import Any

import numpy as np

from common import tf
from common.core import UserError
from common.data import call_user_function

KEYS = {"learning_rate": (int, float), "weight_decay": (bool,)}
# Optimizers whose step depends on the gradient and their slots, not on the value of the variable.
ADDITIVE = {f"{name}Optimizer" for name in ("GradientDescent", "Momentum", "Adagrad", "Adadelta", "Adam", "RMSProp")}
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"  # a name in TensorFlow for a new variable at each use


class Groups:
    """The factors of the values of a flat vector, in ranges.

    Args:
      sizes: number of values of each range, as of the trainable variables.
      rates: factor of the learning rate of each range; 0 for frozen ones.
      decays: 1 for ranges that weight decay shrinks, else 0.

    Attributes:
      scales, freezes: whether any factor is not 1, or is 0.
    """

    def __init__(self, sizes, rates, decays):
        self._ends, self._sizes = np.cumsum(sizes), np.array(sizes)
        self._rates, self._decays = np.array(rates, np.float32), np.array(decays, np.float32)
        self.scales, self.freezes = bool((self._rates != 1).any()), bool((self._rates == 0).any())

    def rates(self, part=slice(None)):
        """Returns the factors of the learning rate in a part of the vector, a tensor `[size]`."""
        return self._spread(self._rates, part)

    def decays(self, part=slice(None)):
        """Returns 1 or 0 for each value in a part of the vector, a tensor `[size]`."""
        return self._spread(self._decays, part)

    def only_frozen(self):
        """Returns the groups with 1 in place of all factors but 0."""
        return Groups(self._sizes, self._rates != 0, self._decays)

    def _spread(self, numbers, part):
        start, stop, _ = part.indices(int(self._ends[-1]))
        counts = np.clip(self._ends, start, stop) - np.clip(self._ends - self._sizes, start, stop)
        return tf.repeat(tf.constant(numbers), tf.constant(counts.astype(np.int32)))


def groups_of(hp, model):
    """Returns the `Groups` of `--groups`, or None without it.

    Its FUNCTION is called with path and shape of each trainable variable. It returns None, or a dictionary of "learning_rate",
    a factor of at least 0, and "weight_decay", True or False.

    Args:
      hp: flags; with `groups`, FILE.py:FUNCTION, if there are groups.
      model: a `common.models.Model`.

    Raises:
      UserError: if the function fails or returns something else, all is frozen, or the model has tables on the ps.
    """
    if (spec := getattr(hp, "groups", None)) is None:
        return None
    if model.tables:
        raise UserError("--groups: rows of tables (common.Embedding) are in no group: use keras.layers.Embedding")
    found = []
    for variable in model.keras_model.trainable_variables:
        path, shape = variable.path, tuple(variable.shape)
        group: Any = call_user_function("--groups", spec, path, shape)
        group = {} if group is None else group
        _check(spec, path, group)
        found.append((float(group.get("learning_rate", 1)), float(group.get("weight_decay", True))))
    rates, decays = zip(*found)
    if not any(rates):
        raise UserError(f"--groups={spec} freezes all variables of the model: expected a learning_rate above 0 for one of them")
    return Groups(model.sizes, rates, decays)


def _check(spec, path, group):
    """Raises a `UserError` unless this is the group of a variable."""
    expected = 'expected None, or {"learning_rate": factor, "weight_decay": True or False}'
    if not isinstance(group, dict):
        raise UserError(f"--groups={spec} gives {group!r:.60} for {path}: {expected}")
    for name, value in group.items():
        if name not in KEYS or not isinstance(value, KEYS[name]):
            raise UserError(f"--groups={spec} gives {name!r}: {value!r:.60} for {path}: {expected}")
        if not 0 <= value < np.inf:
            raise UserError(f"--groups={spec} gives the learning_rate {value} for {path}: expected a factor of at least 0")


def scaled_by(groups, change):
    """Returns a function x → x + rate (change(x) − x), element by element, exact for the factors 0 and 1; x is `[size]`."""

    def scaled(x):
        rates, changed = groups.rates(), change(x)
        return tf.where(tf.equal(rates, 1.0), changed, x + rates * (changed - x))

    return change if groups is None or not groups.scales else scaled


@contextlib.contextmanager
def changed_by(groups, variable):
    """A context in which one operation changes x, a variable `[size]`; yields a list for it.

    On exit the list ends with the operation that makes the change by the factors of the learning rate.
    """
    changes: list[Any] = []
    if groups is None or not groups.scales:
        yield changes
        return
    before = variable.read_value()
    with tf.control_dependencies([before]):
        yield changes
    with tf.control_dependencies(changes):
        after = scaled_by(groups, lambda _: variable.read_value())(before)
        changes.append(variable.assign(after, read_value=False))


def decaying(groups, x):
    """Returns x `[size]` with zeros for the values that weight decay leaves as they are."""
    return x if groups is None else groups.decays() * x


def apply_scaled(optimizer, pairs, rates):
    """piece ← piece + rate (optimizer(piece, gradient) − piece), element by element; returns the operation.

    The optimizer steps on a variable of zeros, with the slots of the piece; then the step is added, atomically without a lock.

    Args:
      optimizer: a `tf.train.Optimizer`.
      pairs: (gradient, piece), both on the ps of the piece.
      rates: a tensor for each piece, its factors.
    """
    if type(optimizer).__name__ not in ADDITIVE:
        raise UserError(f"--groups: no factors for the steps of {type(optimizer).__qualname__}: leave it out")
    optimizer._create_slots([piece for _, piece in pairs])
    steps, zeros = [], []
    for _, piece in pairs:
        with tf.device(piece.device):
            handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=piece.shape, shared_name=_ANONYMOUS)
            zeros.append(tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(piece.shape)))
        steps.append(_StepOf(piece, handle))
    with tf.control_dependencies(zeros):
        made = optimizer.apply_gradients([(g, step) for (g, _), step in zip(pairs, steps, strict=True)])
    done = []
    for (_, piece), step, rate in zip(pairs, steps, rates, strict=True):
        with tf.device(piece.device), tf.control_dependencies([made]):
            value = tf.raw_ops.ReadVariableOp(resource=step.handle, dtype=tf.float32)
            done.append(piece.assign_add(rate * value, read_value=False))
            with tf.control_dependencies([value]):
                done.append(tf.raw_ops.DestroyResourceOp(resource=step.handle))
    return tf.group(*done)


class _StepOf:
    """A stand-in for a piece in an optimizer, with the same slots and a value of its own."""

    def __init__(self, piece, handle):
        self._piece, self.handle = piece, handle

    def __getattr__(self, name):
        return getattr(self._piece, name)
