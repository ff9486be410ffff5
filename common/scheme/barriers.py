"""Barriers between workers: bounded staleness (`Pace`), synchronous updates (`Together`), or an all-reduce (`Ring`).

A scheme gets one of these from the center, at most one per worker. It defines a worker's entry and exit, and the number of
gradients per update.
"""

import re
from typing import Any

from common import tf
from common.core import AWAY, FINISHED, UserError
from common.data import assign_part, local_variable
from common.scheme import update
from common.scheme.exchange import LARGE, exchanged_mean
from common.scheme.messages import AtUpdate, gradient_of, parts_of
from common.scheme.steps import Step, before_all, before_early_read, before_read, spent


class Pace:
    """Stale synchronous parallel (Ho et al. 2013): a worker is at most `staleness` ticks ahead of the slowest.

    Args:
      center: the `common.scheme.GlobalParameters`.
      local: this worker's `common.scheme.LocalParameters`.
      staleness: number of ticks; infinity is allowed.

    Attributes:
      staleness: as above.
      pace: of the `common.Scheme` that waits so.
      gradients_per_update: number of workers whose gradients make an update.
      enter, leave, release: operations. `enter` runs when a session begins; `leave` when this worker has finished, so that the
        others stop waiting for it; `release` when it has to stop, so that it no longer waits itself.
      behind: the workers that block this one at the moment, booleans `[num_workers]`.
      vote: None, since a worker stops by itself.
      exchanges: whether the workers send tensors to each other.
      left: placeholder for `enter` on the chief of an elastic run: the workers that have left for good, booleans
        `[num_workers]`, since a restarted ps has lost them. None elsewhere.
      come, go, has_left: in an elastic synchronous run, two operations and a boolean tensor: `come` ends when an entered worker
        may begin its first round; `go` announces that its next push is its last. None elsewhere.
    """

    pace, gradients_per_update, vote, exchanges = "together", 1, None, False
    come = go = has_left = None

    def __init__(self, center, local, staleness):
        self._center, self._local, self.staleness = center, local, staleness
        with tf.control_dependencies(None):
            self._clocks, index = center.clocks(local, staleness), local.index
            self.left = _left(local)
            self.enter = self._clocks.enter(index, *([] if self.left is None else [self.left]))
            self.leave, self.release = (make(index) for make in (self._clocks.leave, self._clocks.release))
            self.behind = self._clocks.behind(index)

    def wait(self):
        """Waits until this worker is at most `staleness` ticks ahead of the slowest. A read after it sees all older updates."""
        return _wait(self, self._center, self._clocks, self._local.index)

    def tick(self):
        """c ← c + 1: one more step of this worker, including its earlier pushes, is done."""
        with tf.control_dependencies(None):
            return Step(tuple(self._clocks.tick(self._local.index, before_all())), done=((self, "tick"),))

    def check_round(self, name, words):
        """Raises a `UserError` unless a round waits before it reads, and ticks once, after all its changes."""
        in_order = [word for word in dict.fromkeys(words) if word in ("wait", "read")] != ["read", "wait"]
        if words.count("tick") != 1 or "wait" not in words or not in_order or "change" in words[words.index("tick") :]:
            raise UserError(
                f"{name}: with center.pace, a round needs a `wait()`, then reads and changes x̃, and then one `tick()`; it has "
                + ", ".join(words)
            )


class Together:
    """Synchronous updates: each aggregates the gradients of N workers, all computed at the x̃ that the update changes.

    N is the number of workers less `backup_workers` (Chen et al. 2016). In an elastic run N is based on the current workers,
    and is at least one. A new worker takes part from the next update on, and a leaving worker gives a last gradient. So N
    changes between two updates. (With backup workers a last gradient may come too late; then N is one less for the next
    update.)

    Exactly once: a gradient counts if there was no update since this worker's last `wait`, before its pull, and it is the
    worker's first for this update. Its handling on all ps tasks is one atomic action, under the lock of the center. The N-th
    gradient triggers the update.

    Args:
      center: the `common.scheme.GlobalParameters`.
      local: this worker's `common.scheme.LocalParameters`.
      backup_workers: number of stragglers that an update does not wait for.
      mean: whether gradients are averaged; otherwise they are summed.

    Attributes:
      gradients_per_update: N; in an elastic run N at its beginning.
      pace, enter, leave, release, behind, vote, left, come, go, has_left, exchanges: as of `Pace`; but `leave` of one worker
        ends the training.
    """

    pace, vote, come, go, has_left, exchanges = "together", None, None, None, None, False

    def __init__(self, center, local, backup_workers=0, mean=True):
        self._center, self._local = center, local
        first = local.num_workers if local.begin_workers is None else local.begin_workers
        self.gradients_per_update = first - backup_workers
        if self.gradients_per_update < 1:
            raise UserError(f"{backup_workers} backup workers of {first} leave no worker: expected fewer")
        center.count_dropped()
        with tf.control_dependencies(None):
            self._clocks = clocks = center.clocks(local, 0, local.num_workers - backup_workers)
            self.left = _left(local)
            reduction = "MEAN" if mean else "SUM"
            self._sums: list[Any] = [_Total(f"gradients_{i}", piece, reduction) for i, piece in enumerate(center.pieces)]
            for i, piece in enumerate(center.targets[len(center.pieces) :]):  # of tables
                self._sums.append(_RowTotal(f"gradients_of_rows_{i}", piece, mean))
            self.enter: Any = ()
            self.leave: Any = ()
            if not self._clocks.is_virtual:
                self.enter, self.leave = self._enter(local), self._leave(local)
            self.release, self.behind = self._clocks.release(local.index), self._clocks.behind(local.index)
            if local.begin_workers is not None:
                self.come, self.go, self.has_left = (f(local.index) for f in (clocks.wait, clocks.go, clocks.has_left))
                center.count_local_steps()

    def push(self, optimizer, message, at_ps=None, of_all=None):
        """x̃ ← optimizer(x̃, mean of the gradients of N workers), once N gradients at this x̃ have arrived; one update.

        Args:
          optimizer: an elementwise `tf.train.Optimizer`.
          message: a message to the ps tasks, see `common.scheme.parts_of`; in the simplest case a gradient `[size]`.
          at_ps: function of an arrived part of the message and a `common.scheme.AtUpdate`; returns this piece of this worker's
            gradient, float32. It runs before the lock, also for late gradients, so slots belong in `of_all`.
          of_all: function of a piece of the mean (or sum) and an `AtUpdate`; returns the gradient for the optimizer.
        """
        return self._give(optimizer, message, at_ps, of_all)

    def send(self, p, optimizer, message):
        """x̃_p ← optimizer(x̃_p, mean of the messages of N workers) for fragment p, once N have arrived; one update.

        The fragments take turns: the message counts only in the turn of this fragment. The message of a restarted worker out of
        turn is dropped, and `receive` does not wait; so the worker is in step again within P updates, for P fragments.

        Args:
          p: number of the fragment, see `GlobalParameters.fragment`.
          optimizer: as in `push`.
          message: a tensor of the size of the fragment.
        """
        return self._give(optimizer, message, fragment=p)

    def receive(self, p, vector):
        """Waits for the update of the last `send` of this worker; then v_p ← x̃_p. One message from each ps.

        The ps wait and read without the worker: the transfer of x̃_p starts as soon as the update is made, and overlaps with
        the worker's steps between `send` and `receive`.

        Args:
          p: number of the fragment.
          vector: a worker-local vector `[size]`, as returned by `LocalParameters.copy`.
        """
        center, clocks, index = self._center, self._clocks, self._local.index
        may_go_on = clocks.may_go_on(index)
        with tf.control_dependencies(None), tf.control_dependencies(before_early_read(center.step.device)):
            waited = clocks.wait(index)
        value, step = center.read(True, p, lambda device: waited)
        written = assign_part(vector, value, center.fragment(p))
        operations = (*waited, written, *self._local.note(step))
        return Step(operations, pulled=step, may_go_on=may_go_on, done=((self, f"receive {p}"),))

    def _give(self, optimizer, message, at_ps=None, of_all=None, fragment=None):
        center, clocks, index = self._center, self._clocks, self._local.index
        numbers = range(len(center.targets)) if fragment is None else center.numbers(fragment)
        pieces, sums = [center.targets[i] for i in numbers], [self._sums[i] for i in numbers]
        parts, keep = center.parts(message, fragment=fragment)
        gradients, found = [], [AtUpdate(center, i) for i in numbers]
        with tf.control_dependencies(None):  # the part itself carries the dependency on the worker's earlier operations
            for piece, part, at_update in zip(pieces, update.arrive(pieces, parts), found, strict=True):
                with tf.device(piece.device):
                    gradient = gradient_of(part, at_ps, at_update)
                    if isinstance(gradient, tf.IndexedSlices) and not at_update.is_of_table:
                        gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, at_update.size)
                    gradients.append(gradient)
                    # `tf.cond` branches cannot create slots, so create them here; this operation never runs.
                    if of_all:
                        gradient_of(gradients[-1], of_all, at_update, "of_all")
            made = gradients if fragment is None else [tf.zeros(piece.shape) for piece in center.pieces]
            optimizer = update.with_slots(center, optimizer, list(zip(made, center.targets, strict=True)))
            if fragment is not None and center.fragments > 1 and optimizer._non_slot_dict:
                raise UserError(
                    f"{type(optimizer).__qualname__} keeps numbers for all parameters together, as Adam does, but each "
                    "fragment has steps of its own: choose another optimizer, or --fragments=1"
                )
            with center.lock.held([gradient.op for gradient in gradients]) as done, tf.device(center.step.device):
                before = clocks.read()
                low, own = clocks.low(before), before[index]
                ended = tf.equal(low, FINISHED)
                counts = tf.equal(clocks.pulled(index), low) & (own <= low) & ~ended
                if fragment is not None and center.fragments > 1:
                    counts &= tf.equal(low % center.fragments, fragment)
                own = tf.where(counts, low + 1, own)
                if self.go:
                    own = tf.where(clocks.goes(index) & ~ended, tf.constant(AWAY, tf.int64), own)
                after = clocks.with_clock(before, index, own)
                is_nth = clocks.low(after) > low
                step_before = center.step.read_value()
                updated = step_before + tf.cast(counts, tf.int64)
                added = [total.add(part, counts) for total, part in zip(sums, gradients, strict=True)]

                def change():
                    counted = self._count_gradients(sums[0])
                    with tf.control_dependencies(counted):
                        taken = [total.take() for total in sums]
                    if of_all:
                        for i, (piece, at_update) in enumerate(zip(pieces, found, strict=True)):
                            with tf.device(piece.device):
                                taken[i] = gradient_of(taken[i], of_all, at_update, "of_all")
                    rates, _ = update.rates_at(center, step_before)
                    with rates:
                        applied = update.apply(center, optimizer, list(zip(taken, pieces, strict=True)))
                    return tf.group(*counted, applied) if counted else applied

                counted, *others = update.update_if(center, is_nth, counts, change, [step_before, *added])
                with tf.control_dependencies([counted]):
                    done += [counted, *others, *clocks.change(before, after, index)]
        kept, words = tuple(keep(counts)), ((self, "push" if fragment is None else f"send {fragment}"),)
        operations = *update.operations_of(parts), *kept, *done
        return Step(operations, updated=updated, step_before=step_before, training_ended=ended, done=words, kept=kept)

    def _count_gradients(self, total):
        """Returns the operations that count the gradients of an update in an elastic run."""
        if not self.go:
            return []
        center = self._center
        with tf.device(center.step.device):
            return [center.local_steps.assign_add(total.count(), read_value=False)]

    def wait(self):
        """Waits for the update of this worker's gradient, whether that counted or came too late."""
        return _wait(self, self._center, self._clocks, self._local.index)

    def check_round(self, name, words):
        """Raises a `UserError` unless x̃ is read before each push, and each push is followed by a wait."""
        words = [word for word in words if word != "change"]
        if any(word.startswith(("send", "receive")) for word in words):
            return self._check_fragments(name, [word for word in words if word != "read"])
        if not re.fullmatch("((read )+push wait )+(read )*", "".join(f"{word} " for word in words)):
            raise UserError(
                f"{name}: with center.together, a round reads x̃, then needs a `push(...)` and a `wait()`; it has "
                + ", ".join(words)
            )

    def _check_fragments(self, name, words):
        needed = [word for p in range(self._center.fragments) for word in (f"send {p}", f"receive {p}")]
        if words != needed:
            raise UserError(
                f"{name}: with {self._center.fragments} fragments, a round sends each and then receives it, in turn: it needs "
                f"{', '.join(needed)}; it has {', '.join(words)}"
            )

    def _enter(self, local):
        """Returns the `enter` operations; the chief's discard gradients in flight, since x̃ may be a restored checkpoint.

        A new or returning worker of an elastic run skips the current update, as if its gradient had already arrived.
        """
        clocks, center = self._clocks, self._center
        with center.lock.held([]) as enter, tf.device(center.step.device):
            before = after = clocks.read() if self.left is None else clocks.read(self.left)
            if local.index > 0 and local.begin_workers is not None:
                low = clocks.low(before)
                first = tf.where(low >= FINISHED, tf.constant(FINISHED, tf.int64), low + 1)  # unless the training has ended
                after = tf.where(before[local.index] >= FINISHED, clocks.with_clock(before, local.index, first), before)
            if local.index == 0:
                newest = tf.reduce_max(tf.where(before >= FINISHED, tf.zeros_like(before), before))
                # A whole cycle further: it releases waiting workers and keeps the fragment's turn of the newest clock.
                newest += center.fragments
                after = tf.where(before >= FINISHED, before, tf.fill([local.num_workers], newest))
                enter += [total.clear() for total in self._sums]
            enter += clocks.begin(local.index, before, after)
        return enter

    def _leave(self, local):
        clocks, center = self._clocks, self._center
        with center.lock.held([]) as close, tf.device(center.step.device):
            close += clocks.change(clocks.read(), tf.fill([local.num_workers], tf.constant(FINISHED, tf.int64)))
        return close


class Ring:
    """The workers average a vector by all-reduce, without a ps; the chief publishes the common result as x̃.

    Args:
      center: the `common.scheme.GlobalParameters`.
      local: this worker's `common.scheme.LocalParameters`.

    Attributes:
      gradients_per_update: the number of workers.
      pace: as of `Pace`.
      enter, leave, release: as of `Pace`; empty.
      behind: None, since no task records it.
      vote: operation that stops this worker, and with it all others, after the next call, which it must join.
      exchanges: whether the workers send each other large tensors, see `common.scheme.exchange`; a session must reach all.
    """

    pace, enter, leave, release, behind, left = "ring", (), (), (), None, None
    come = go = has_left = None

    def __init__(self, center, local):
        self._center, self._local, self._num_means = center, local, 0
        self.exchanges = local.num_workers > 1 and center.size >= LARGE
        self.gradients_per_update = local.num_workers
        with tf.control_dependencies(None), tf.variable_scope(local.name):
            with tf.device(center.step.device):
                newest = center.step.read_value()
            self._step = local_variable("step", newest)  # the number of updates in x
            local.counts_updates_in(self._step)
            self._stopping = local_variable("stopping", tf.zeros([]))
            self.vote = self._stopping.assign(1.0, read_value=False)

    def mean(self, tensor):
        """Returns the mean of a tensor over all workers, by an all-reduce. It blocks until all workers take part.

        For a small model it is TensorFlow's ring: a worker sends 2 (n − 1) chunks in turn, each 1/n of the tensor. Two workers
        exchange whole tensors instead: the same number of bytes in one message. For a large model see `common.scheme.exchange`.
        """
        return spent("all-reduce", lambda: self._mean(tensor), tensor)

    def _mean(self, tensor):
        n = self._local.num_workers
        if n == 1:
            return tensor
        self._num_means += 1  # the same on all workers, since they build the same graph
        if self.exchanges:  # of a number, too: a collective would give the steps of all workers one id, so that they collide
            return exchanged_mean(tensor, self._local.index, n, f"mean_{self._num_means}")
        ring = {"group_size": n, "group_key": 1, "instance_key": self._num_means, "communication_hint": "ring"}
        if n > 2:
            return tf.raw_ops.CollectiveReduce(input=tensor, merge_op="Add", final_op="Div", subdiv_offsets=[0], **ring)
        row = tf.expand_dims(tensor, 0)
        return tf.reduce_mean(tf.raw_ops.CollectiveGather(input=row, shape=[n, *tensor.shape], **ring), axis=0)

    def publish(self, steps=1):
        """x̃ ← x of the chief, the same on all workers, `steps` updates after the last time. One message, from the chief."""
        center, local = self._center, self._local
        ended = self._mean(self._stopping.read_value()) > 0
        newest = self._step.assign_add(steps)
        step_before = newest - steps + tf.range(steps, dtype=tf.int64)
        operations = [newest.op]
        if local.index == 0:
            for piece, part in zip(center.pieces, parts_of(local.value.read_value(), center.sizes), strict=True):
                with tf.device(piece.device):
                    operations.append(piece.assign(part, read_value=False))
            with tf.device(center.step.device):
                operations.append(center.step.assign(newest, read_value=False))
        return Step(tuple(operations), updated=step_before + 1, step_before=step_before, training_ended=ended)


def _left(local):
    """Returns `Pace.left`, a placeholder or None."""
    is_chief = local.begin_workers is not None and local.index == 0
    return tf.placeholder(tf.bool, [local.num_workers]) if is_chief else None


def _wait(owner, center, clocks, index):
    may_go_on = clocks.may_go_on(index)
    with tf.control_dependencies(None), tf.control_dependencies(before_read(center.step.device)):
        waited = clocks.wait(index)
    return Step(tuple(waited), may_go_on=may_go_on, done=((owner, "wait"),))


class _Total:
    """A gradient accumulator beside a piece of x̃, initially empty. It needs no initialization."""

    def __init__(self, name, piece, reduction):
        self._device = piece.device
        with tf.device(self._device):
            self._handle = tf.raw_ops.ResourceConditionalAccumulator(
                dtype=tf.float32, shape=piece.shape, shared_name=name, reduction_type=reduction
            )

    def add(self, gradient, counts):
        """The operation that adds a gradient, if it counts."""
        with tf.device(self._device):
            # An accumulator has its own step, 0 or more, and drops gradients with a smaller one.
            step = tf.where(counts, tf.constant(tf.int64.max, tf.int64), tf.constant(-1, tf.int64))
            return tf.raw_ops.ResourceAccumulatorApplyGradient(handle=self._handle, local_step=step, gradient=gradient)

    def count(self):
        """Returns the number of accumulated gradients, an int64 scalar."""
        with tf.device(self._device):
            return tf.cast(tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=self._handle), tf.int64)

    def take(self):
        """Returns the mean or the sum of at least one gradient, and empties the accumulator."""
        with tf.device(self._device):
            return tf.raw_ops.ResourceAccumulatorTakeGradient(handle=self._handle, num_required=1, dtype=tf.float32)

    def clear(self):
        """The operation that empties it."""
        with tf.device(self._device):
            some = tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=self._handle) > 0
            return tf.cond(some, lambda: self.take().op, tf.no_op).op


class _RowTotal:
    """A queue of row gradients beside a piece of a table, initially empty. It needs no initialization.

    As in `_Total` all arrived gradients count: a worker that dies halfway may have given one twice.

    Args:
      name: shared name on the ps.
      piece: a piece of a table.
      mean: whether `take` returns the mean or the sum.
    """

    def __init__(self, name, piece, mean):
        self._device, self._width, self._is_mean = piece.device, piece.shape[1], mean
        with tf.device(self._device):
            self._queue = tf.FIFOQueue(2**20, [tf.float32, tf.int64], shared_name=name)

    def add(self, gradient, counts):
        """The operation that adds gradients, `tf.IndexedSlices`, if they count."""
        with tf.device(self._device):
            return tf.cond(counts, lambda: self._queue.enqueue([gradient.values, gradient.indices]), tf.no_op).op

    def take(self):
        """Returns the mean or the sum, each row once, and empties the queue."""
        with tf.device(self._device):
            n = self._queue.size()

            def one(i, values, indices):
                with tf.device(self._device):
                    more, at = self._queue.dequeue()
                    values = tf.concat([values, tf.ensure_shape(more, [None, self._width])], axis=0)
                    return i + 1, values, tf.concat([indices, tf.ensure_shape(at, [None])], axis=0)

            first = 0, tf.zeros([0, self._width]), tf.zeros([0], tf.int64)
            shapes = tf.TensorShape([]), tf.TensorShape([None, self._width]), tf.TensorShape([None])
            _, values, indices = tf.while_loop(lambda i, *_: i < n, one, first, shapes, parallel_iterations=1)
            rows, which = tf.unique(indices)
            sums = tf.math.unsorted_segment_sum(values, which, tf.size(rows))
            return tf.IndexedSlices(sums / tf.cast(tf.maximum(n, 1), tf.float32) if self._is_mean else sums, rows)

    def clear(self):
        """The operation that empties it."""
        return self.take().values.op
