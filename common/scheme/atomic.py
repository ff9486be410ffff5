"""Pull and push as atomic actions over all ps tasks, with the exact staleness known on the ps at the update."""

import math

from common import tf
from common.core import UserError
from common.data import local_variable
from common.scheme import update
from common.scheme.messages import AtUpdate, gradient_of
from common.scheme.steps import Step, before_read


class Exact:
    """Atomic pulls and pushes: each holds a lock on ps 0, so that no other one runs concurrently on any ps.

    The ps tasks remember the worker's last pull, in variables of its session.

    Args:
      center: the `common.scheme.GlobalParameters`.
      local: this worker's `common.scheme.LocalParameters`.
      remember: "step", the global step of the pull, or "value", x̃ itself.
      threshold: with "step", the staleness from which a push is dropped, on all ps; it is no update then. Infinity is allowed.
        None drops no push.

    Attributes:
      threshold: as above.
    """

    def __init__(self, center, local, remember, threshold=None):
        if remember not in ("step", "value"):
            raise UserError(f'remember must be "step" or "value", not {remember!r}')
        if threshold is not None and (remember != "step" or not threshold > 0):
            raise UserError(f'a staleness threshold needs "step" and a number above 0, not {remember!r} and {threshold!r}')
        self.threshold = threshold
        if threshold is not None:
            center.count_dropped()
        self._center, self._local, self._step, self._pieces = center, local, None, []
        with tf.control_dependencies(None), tf.variable_scope(local.name):
            if remember == "step":
                with tf.device(center.step.device):
                    self._step = local_variable("pulled_step", tf.zeros([], tf.int64))
                return
            if center.tables:
                raise UserError(
                    "the ps would have to keep all rows of tables (common.Embedding) that this worker has pulled: use a scheme "
                    "that does not compare x̃, or keras.layers.Embedding"
                )
            for i, piece in enumerate(center.pieces):
                with tf.device(piece.device):
                    self._pieces.append(local_variable(f"pulled_value_{i}", tf.zeros(piece.shape)))

    def pull(self):
        """x ← x̃, as one atomic action, recorded on the ps tasks."""
        center, value, window, mine = self._center, self._local.value, self._local.window_of_tables(), []
        if window:
            mine += window.draw()
        with tf.control_dependencies(None):
            with tf.device(center.step.device), tf.control_dependencies(before_read(center.step.device)):
                before = [tf.no_op()]
            if window:  # before the lock, which then waits for no worker
                before += window.ask()
            with center.lock.held(before) as done:
                with tf.device(center.step.device):
                    step = center.step.read_value()
                    done += [step.op if self._step is None else self._step.assign(step, read_value=False)]
                values = []
                for piece in center.pieces:
                    with tf.device(piece.device):
                        values.append(piece.read_value())
                if window:
                    done += window.read(lambda device: [step])
                packed = center.packed(values)
                for i, (piece, (_, there)) in enumerate(zip(center.pieces, packed, strict=True)):
                    with tf.device(piece.device):
                        done += [self._pieces[i].assign(there, read_value=False) if self._pieces else values[i].op]
        here = [each for each, _ in packed]
        x = tf.concat(here, axis=0) if len(here) > 1 else here[0]
        mine += [value.assign(x, read_value=False), *self._local.note(step), *(window.take() if window else [])]
        return Step((*mine, *done), pulled=step, done=((self, "pull"),))

    def push(self, optimizer, message, at_ps=None):
        """x̃ ← optimizer(x̃, at_ps(part, at_update)) as one atomic action over all ps tasks; counts one update.

        The lock is taken after the message has arrived on all ps, so its holder never waits for a worker; with several ps it is
        held for one exchange of small messages between them. Under the lock the push is accepted or dropped, for all ps.

        Args:
          optimizer: an elementwise `tf.train.Optimizer`.
          message: a message, see `common.scheme.parts_of`; in the simplest case the gradient `[size]`.
          at_ps: function of an arrived part of the message and a `common.scheme.AtUpdate`, run on the ps at the time of the
            update; returns the gradient for the optimizer, float32.
        """
        center, dynamic = self._center, getattr(self._local, "dynamic", None)
        parts, keep = center.parts(message)
        begun, made = [], []  # `made`: local steps, if they are to be counted
        if dynamic is not None:
            if self.threshold is not None:
                raise UserError("center.dynamic counts the local steps of each push, so a threshold must not discard any")
            steps, begin_anew = dynamic.take()
            begun = [begin_anew]
            with tf.device(center.step.device), tf.control_dependencies(None):
                made = [tf.identity(steps)]
        with tf.control_dependencies(None):  # the part itself carries the dependency on the worker's earlier operations
            here = update.arrive(center.targets, parts)
            with center.lock.held(update.operations_of([*here, *made])) as done:
                step, late, staleness = None, None, None
                rates, read = update.rates_at(center)  # `read`: reads of the global step that must precede its count
                if self._step is not None:
                    with tf.device(center.step.device):
                        # A restarted ps may have lost updates already pulled by this worker.
                        step = center.step.read_value()
                        late = tf.maximum(step - self._step.read_value(), 0)
                        staleness = tf.cast(late, tf.float32)
                    read.append(staleness.op)

                def gradient(i):
                    with tf.device(center.targets[i].device):
                        pulled = self._pieces[i].read_value() if self._pieces else None
                        return gradient_of(here[i], at_ps, AtUpdate(center, i, pulled, staleness, step))

                step_before = is_fresh = None
                with rates:
                    if self.threshold is None:
                        applied, updated = update.update_always(center, optimizer, gradient, read)
                    else:
                        applied, updated, step_before, is_fresh = self._update_if_fresh(optimizer, gradient, late, read)
                    if made:
                        with tf.device(center.step.device):
                            applied = [*applied, center.local_steps.assign_add(made[0], read_value=False)]
                done += applied
        kept, done_words = tuple(keep(is_fresh)), ((self, "push"), *([(dynamic, "count")] if made else []))
        operations, of_answer = (*update.operations_of(parts), *begun, *kept, *done), kept if self.threshold is not None else ()
        return Step(operations, updated=updated, step_before=step_before, kept=of_answer, done=done_words)

    def _update_if_fresh(self, optimizer, gradient, late, read):
        """Applies the gradients of all pieces, and counts the update, if the staleness `late` is below the threshold.

        Returns:
          Operations, `updated` and `step_before` of the `common.scheme.Step`, and whether the gradients are applied.
        """
        center = self._center

        def pairs():
            return [(gradient(i), piece) for i, piece in enumerate(center.targets)]

        optimizer = update.with_slots(center, optimizer, pairs())
        with tf.device(center.step.device):
            is_fresh = late < math.ceil(min(self.threshold, 2**62))
            made = tf.cast(is_fresh, tf.int64)  # updates
            present = center.step.read_value()
            change = lambda: update.apply(center, optimizer, pairs())  # noqa: E731
            applied = update.update_if(center, is_fresh, is_fresh, change, [present.op, *read])
            return applied, present + made, present - made * late, is_fresh

    def check_round(self, name, words):
        """Raises a `UserError` if a push precedes the first pull; with a threshold each push needs its own pull."""
        words = [word for word in words if word in ("pull", "push")]
        if words[0] != "pull":
            raise UserError(f"{name}: with center.exact, a round begins with its `pull()`; it has {', '.join(words)}")
        if self.threshold is not None and words != ["pull", "push"] * (len(words) // 2):
            raise UserError(f"{name}: with a threshold, `pull()` and `push(...)` take turns; it has {', '.join(words)}")
