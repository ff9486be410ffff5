"""The path of an update of x̃ on the ps: a worker's message arrives, is decided upon, applied, and counted.

There are three decisions:
  - `GlobalParameters.push` and `add`: each message is an update, at once, without a lock (`update_at_once`).
  - `Exact.push`, under the lock of the center: the same (`update_always`), or with a threshold only a fresh gradient
    (`update_if`).
  - `Together.push` and `send`, under that lock: the N-th message, with the gradients of all N (`update_if`).
"""

import contextlib
from typing import Any

from common import tf
from common.core import Lock, UserError
from common.scheme.compression import Packed
from common.scheme.groups import apply_scaled
from common.scheme.learning_rates import factor_is
from common.scheme.messages import arrived, tensors_of
from common.scheme.optimizers import check_pieces
from common.scheme.steps import before_write
from common.scheme.tables import ROW_BY_ROW_ON_PS


def operations_of(parts):
    """Returns the operations that make message parts: on the worker those that send them, on the ps their arrival."""
    return [tensor.op for part in parts for tensor in tensors_of(part)]


def arrive(pieces, parts):
    """Returns message parts, unpacked, on the ps of their pieces. Call it without control dependencies, as the others here."""
    here = []
    for piece, part in zip(pieces, parts, strict=True):
        with tf.device(piece.device):
            here.append(arrived(part))
    return here


def update_at_once(center, parts, change):
    """Applies each part as soon as it arrives, and counts the update; returns the operations and the new global step.

    The ps of the global step computes the learning rates at that moment. The other ps get those of the worker's last pulled
    step from the worker, so that no ps has to ask another.

    Args:
      center: the `common.scheme.GlobalParameters`.
      parts: the message parts, one for each of `center.targets`.
      change: function of a piece number and its part that returns the operation.
    """
    applied = []
    for i, (piece, part) in enumerate(zip(center.targets, parts, strict=True)):
        if any(isinstance(each, Packed) for each in tf.nest.flatten(part, expand_composites=True)):
            [part] = arrive([piece], [part])
        with tf.device(piece.device), tf.control_dependencies(before_write(piece.device)):
            rates: Any = contextlib.nullcontext()
            if center.schedule is not None and piece.device == center.step.device:
                part = arrived(part)
                with tf.control_dependencies([tensor.op for tensor in tensors_of(part)]):
                    rates, _ = rates_at(center)
            with rates, _alone(center, i, part) as done:
                done.append(change(i, part))
            applied += done
    count, updated = _count(center, [op for op in applied if op.device == center.step.device])
    return [*applied, count], updated


@contextlib.contextmanager
def _alone(center, i, part):
    """A context for an update of piece i by this message part, and of its average as one action; yields a list of operations.

    Without an average the update is as atomic as the operation of the optimizer.
    """
    if not center.average:
        yield []
        return
    lock = Lock(center.targets[i].device, f"average_{i}")
    with lock.held([tensor.op for tensor in tensors_of(part)]) as done:
        yield done


def update_always(center, optimizer, gradient, before):
    """Applies the gradients of all pieces, and counts the update; returns the operations and the new global step.

    Args:
      center, optimizer: `common.scheme.GlobalParameters` and `tf.train.Optimizer`.
      gradient: function of a piece number that returns its gradient on the ps.
      before: reads of the global step that must precede the count.
    """
    optimizer, applied = center.optimizers.use(optimizer), []
    for i, piece in enumerate(center.targets):
        with tf.device(piece.device):
            applied.append(apply(center, optimizer, [(gradient(i), piece)]))
    check_pieces(optimizer, center.targets)
    count, updated = _count(center, before)
    return [*applied, count], updated


def update_if(center, is_update, counts, change, before):
    """Applies and counts an update, if it is one; also counts a dropped gradient. Returns the operations, the last step first.

    Args:
      center: the `common.scheme.GlobalParameters`, whose lock is held.
      is_update, counts: Boolean scalars on the ps of the global step: whether this message makes an update, and whether its
        gradient is not dropped.
      change: function that returns the operation of the update; it cannot create slots, see `with_slots`.
      before: reads of the global step, and operations that must precede the update.
    """
    with tf.device(center.step.device):
        with tf.control_dependencies(before):
            applied = tf.cond(is_update, change, tf.no_op).op
        # `before` again: if `change` does not use a read, TensorFlow's graph optimizer removes the condition's dependency on
        # it, and it might come after the count.
        with tf.control_dependencies([*before, applied]):
            made = tf.cast(is_update, tf.int64)
            counted = center.step.assign_add(made, read_value=False)
        kept = made if counts is is_update else tf.cast(counts, tf.int64)
        with tf.control_dependencies([counted]):
            return [counted, applied, center.drop(1 - kept)]


def rates_at(center, step=None):
    """Returns the context of the learning rates at a global step, by default the present one, and the operations they need."""
    if center.schedule is None:
        return contextlib.nullcontext(), []
    with tf.device(center.step.device):
        factor = tf.convert_to_tensor(center.schedule(center.step.read_value() if step is None else step))
    return factor_is(factor), [factor.op]


def with_slots(center, optimizer, pairs):
    """Returns the copy of an optimizer for this round, with its slots, for use in `tf.cond`, whose branches cannot create any.

    An operation that never runs creates them.
    """

    def create(own):
        if not center.tables:
            return own.apply_gradients(pairs)
        of_vector, of_rows = _by_kind(center, pairs)
        own.apply_gradients(of_vector if center.optimizer_of_rows else pairs)
        if center.optimizer_of_rows:
            center.optimizer_of_rows.apply_gradients([(gradient, piece) for gradient, piece, _ in of_rows])

    return center.optimizers.use(optimizer, create)


def apply(center, optimizer, pairs):
    """piece ← optimizer(piece, gradient) for pairs (gradient, piece), on the ps of the piece; returns the operation.

    Weight decay λ is decoupled, piece ← piece − η λ piece before the step: AdamW, if the optimizer is Adam
    (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101). With groups, both have the factors of the piece.
    """
    if center.tables:
        return _apply_with_rows(center, optimizer, pairs)
    return averaged(center, [piece for _, piece in pairs], lambda: _apply(center, optimizer, pairs))


def averaged(center, pieces, change):
    """Returns the operation of a change of pieces, `change()`; then a ← β a + (1 − β) x̃ for their averages (`--ema`)."""
    if not center.average:
        return change()
    with tf.control_dependencies([change()]):
        done = []
        for piece in pieces:
            average = center.average_of(piece)
            with tf.device(piece.device):
                less = (1 - center.ema) * (average.read_value() - piece.read_value())
                done.append(average.assign_sub(less, read_value=False))
        return tf.group(*done)


def _apply(center, optimizer, pairs):
    """As `apply`, for x̃ alone."""
    groups = center.groups_of_update
    if center.decay is None and groups is None:
        return optimizer.apply_gradients(pairs)
    center.has_decayed, decayed, here = True, [], []
    places = [center.place(piece) for _, piece in pairs]
    for (gradient, piece), place in zip(pairs, places, strict=True):
        with tf.device(piece.device):
            here.append(arrived(gradient))
            with tf.control_dependencies([tensor.op for tensor in tensors_of(here[-1])]):  # they may depend on the piece
                if center.decay is not None:
                    part = piece.read_value() if groups is None else groups.decays(place) * groups.rates(place) * piece
                    decayed.append(piece.assign_sub(center.decay * part, read_value=False))
    with tf.control_dependencies(decayed):
        pairs = [(gradient, piece) for gradient, (_, piece) in zip(here, pairs, strict=True)]
        if groups is None or not groups.scales:
            return optimizer.apply_gradients(pairs)
        rates = []
        for (_, piece), place in zip(pairs, places, strict=True):
            with tf.device(piece.device):
                rates.append(groups.rates(place))
        return apply_scaled(optimizer, pairs, rates)


def _apply_with_rows(center, optimizer, pairs):
    """As `apply`, with further pairs of `tf.IndexedSlices` and pieces of tables."""
    own = center.optimizer_of_rows or optimizer
    if type(own).__name__ not in ROW_BY_ROW_ON_PS:
        raise UserError(
            f"{type(own).__qualname__} changes every row of a table (common.Embedding) at each update: give "
            "--table_optimizer=lazy_adam, rowwise_adagrad or another, which change only rows that have a gradient"
        )
    if center.decay is not None:
        raise UserError("--weight_decay changes every row of a table (common.Embedding) at each update: leave it out")
    of_vector, of_rows = _by_kind(center, pairs)
    applied = [optimizer.apply_gradients(of_vector)] if of_vector else []
    applied += [table.apply(own, gradient, piece) for gradient, piece, table in of_rows]
    return applied[0] if len(applied) == 1 else tf.group(*applied)


def _by_kind(center, pairs):
    """Returns the pairs of x̃, and triples (gradient, piece, table) of the tables."""
    owner = {piece.ref(): table for table in center.tables for piece in table.pieces}
    return (
        [pair for pair in pairs if pair[1].ref() not in owner],
        [(gradient, piece, owner[piece.ref()]) for gradient, piece in pairs if piece.ref() in owner],
    )


def _count(center, after):
    """Counts one update after these operations; returns the operation and the new global step."""
    with tf.device(center.step.device), tf.control_dependencies(after):
        # An atomic fetch-and-add; assign_add and a read would be two operations.
        count = tf.raw_ops.ResourceCountUpTo(resource=center.step.handle, limit=tf.int64.max, T=tf.int64)
        return count.op, count + 1
