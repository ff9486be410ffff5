"""Pull and push as indivisible actions over all ps tasks: the ps know, at the update, what came since this worker's pull."""

import contextlib
from typing import Any

from common import tf
from common.batches import local_variable
from common.flags import UserError
from common.messages import AtUpdate, arrived, gradient_of, tensors_of
from common.schedules import factor_is
from common.steps import Step, before_read, check_pieces


class Exact:
    """Each pull or push holds a lock on ps 0, so that no other one of this kind runs on any ps meanwhile.

    The ps tasks remember the worker's last pull, in variables of its session.

    Args:
      center: the `common.center.GlobalParameters`.
      local: this worker's `common.local.LocalParameters`.
      remember: "step", the number of updates in it, or "value", x̃ itself.
    """

    def __init__(self, center, local, remember):
        if remember not in ("step", "value"):
            raise UserError(f'remember is "step" or "value", not {remember!r}')
        self._center, self._local, self._step, self._pieces = center, local, None, []
        with tf.control_dependencies(None), tf.variable_scope(local.name):
            if remember == "step":
                with tf.device(center.step.device):
                    self._step = local_variable("pulled_step", tf.zeros([], tf.int64))
                return
            for i, piece in enumerate(center.pieces):
                with tf.device(piece.device):
                    self._pieces.append(local_variable(f"pulled_value_{i}", tf.zeros(piece.shape)))

    def pull(self):
        """x ← x̃, as one indivisible action, which the ps tasks remember."""
        center, value = self._center, self._local.value
        with tf.control_dependencies(None):
            with tf.device(center.step.device), tf.control_dependencies(before_read(center.step.device)):
                before = [tf.no_op()]
            with center.lock.held(before) as done:
                with tf.device(center.step.device):
                    step = center.step.read_value()
                    done += [step.op if self._step is None else self._step.assign(step, read_value=False)]
                values = []
                for piece in center.pieces:
                    with tf.device(piece.device):
                        values.append(piece.read_value())
                packed = center.packed(values)
                for i, (piece, (_, there)) in enumerate(zip(center.pieces, packed, strict=True)):
                    with tf.device(piece.device):
                        done += [self._pieces[i].assign(there, read_value=False) if self._pieces else values[i].op]
        here = [each for each, _ in packed]
        x = tf.concat(here, axis=0) if len(here) > 1 else here[0]
        mine = value.assign(x, read_value=False), *self._local.note(step)
        return Step((*mine, *done), pulled=step, done=((self, "pull"),))

    def push(self, optimizer, message, at_ps):
        """x̃ ← optimizer(x̃, at_ps(part, at_update)) as one indivisible action over all ps tasks; counts one update.

        The lock is taken when the message has arrived on all ps, so it never waits for a worker; with several ps it is held for
        one exchange of small messages between them.

        Args:
          optimizer: a `tf.train.Optimizer` that works element by element.
          message: what is sent, see `common.messages.parts_of`; the gradient `[size]`, most simply.
          at_ps: function of a part of the message that has arrived and a `common.messages.AtUpdate`, which works where x̃ is and
            at the moment of the update; returns the gradient that the optimizer gets, float32.
        """
        center = self._center
        optimizer = center.optimizers.use(optimizer)
        (parts, kept), here = center.parts(message), []
        sent = [tensor.op for part in parts for tensor in tensors_of(part)]
        with tf.control_dependencies(None):  # what went before reaches the ps with its part
            for piece, part in zip(center.pieces, parts, strict=True):
                with tf.device(piece.device):
                    here.append(arrived(part))
            with center.lock.held([tensor.op for part in here for tensor in tensors_of(part)]) as done:
                staleness, read = None, []  # what depends on the global step before this update
                scheduled: Any = contextlib.nullcontext()
                if center.schedule is not None:
                    with tf.device(center.step.device):
                        factor = tf.convert_to_tensor(center.schedule(center.step.read_value()))
                    scheduled, read = factor_is(factor), [factor.op]
                if self._step is not None:
                    with tf.device(center.step.device):
                        # A ps that was restarted may have lost updates which this worker has seen.
                        staleness = tf.maximum(center.step.read_value() - self._step.read_value(), 0)
                        staleness = tf.cast(staleness, tf.float32)
                    read.append(staleness.op)
                with scheduled:
                    for i, (piece, part) in enumerate(zip(center.pieces, here, strict=True)):
                        with tf.device(piece.device):
                            pulled = self._pieces[i].read_value() if self._pieces else None
                            gradient = gradient_of(part, at_ps, AtUpdate(center, i, pulled, staleness))
                            done.append(center.apply(optimizer, [(gradient, piece)]))
                check_pieces(optimizer, center.pieces)
                count, updated = center.count(read)
                done.append(count)
        return Step((*sent, *kept, *done), updated=updated, done=((self, "push"),))

    def check_round(self, name, words):
        """Raises a `UserError` if a push comes before its pull."""
        words = [word for word in words if word in ("pull", "push")]
        if words[0] != "pull":
            raise UserError(f"{name}: with center.exact, a round begins with its `pull()`; it has {', '.join(words)}")
