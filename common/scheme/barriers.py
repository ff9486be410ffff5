"""How workers wait for each other: at a bounded distance (`Pace`), for every update (`Together`), or in a ring (`Ring`).

A scheme gets one of these from the center. It knows how a worker enters and leaves, and how many gradients make an update. A
worker has one at most.
"""

import re
from typing import Any

from common import tf
from common.core import AWAY, FINISHED, UserError
from common.data import assign_part, local_variable
from common.scheme.learning_rates import factor_is
from common.scheme.messages import AtUpdate, arrived, gradient_of, parts_of, tensors_of
from common.scheme.steps import Step, before_all, before_early_read, before_read, spent


class Pace:
    """Stale synchronous parallel (Ho et al. 2013): a worker is at most so many ticks ahead of the slowest.

    Args:
      center: the `common.scheme.GlobalParameters`.
      local: this worker's `common.scheme.LocalParameters`.
      staleness: number of ticks; infinity is allowed.

    Attributes:
      staleness: as above.
      gradients_per_update: of how many workers.
      enter, leave, release: operations. `enter` runs when a session begins; `leave` when this worker has finished, so that the
        others stop waiting for it; `release` when it is to stop, so that it no longer waits itself.
      behind: which workers this one waits for just now, booleans `[num_workers]`.
      vote: None, as a worker stops by itself.
      left: the chief's, where workers come and go: a placeholder for `enter`, booleans `[num_workers]`, of those that have left
        for good, which a ps that was restarted has forgotten. None elsewhere.
      come, go, has_left: where workers come and go and each update is made together, operations, and a boolean tensor: `come`
        ends when a worker that has entered may begin its first round; `go` says that its next push is its last. None elsewhere.
    """

    gradients_per_update, vote = 1, None
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
        """Ends when this worker is at most `staleness` ticks ahead of the slowest. A read after it misses no older update."""
        return _wait(self, self._center, self._clocks, self._local.index)

    def tick(self):
        """c ← c + 1: one more step of this worker, and all that it pushed before, is done."""
        with tf.control_dependencies(None):
            return Step(tuple(self._clocks.tick(self._local.index, before_all())), done=((self, "tick"),))

    def check_round(self, name, words):
        """Raises a `UserError` unless a round waits before it reads, and ticks once, after all that it changes."""
        in_order = [word for word in dict.fromkeys(words) if word in ("wait", "read")] != ["read", "wait"]
        if words.count("tick") != 1 or "wait" not in words or not in_order or "change" in words[words.index("tick") :]:
            raise UserError(
                f"{name}: with center.pace, a round needs a `wait()`, then reads and changes x̃, and then one `tick()`; it has "
                + ", ".join(words)
            )


class Together:
    """Every update is made of the gradients of N workers, all taken at the x̃ that they change.

    N is the number of workers less `backup_workers` (Chen et al. 2016). Where workers come and go, N is that of those who are
    there, and one at least. A worker that comes takes part from the next update on, and one that leaves gives a last gradient.
    So N changes between two updates. (With backup workers a last gradient may come too late; then N is one less for the next
    update.)

    Exactly once: a gradient counts if there was no update since this worker's last `wait`, before it pulled, and it has given
    none for this update yet. All that happens to it, on all ps tasks, is one indivisible action, under the lock of the center.
    The N-th makes the update.

    Args:
      center: the `common.scheme.GlobalParameters`.
      local: this worker's `common.scheme.LocalParameters`.
      backup_workers: the number of workers for which an update does not wait.
      mean: if not, an update is made of the sum of the gradients.

    Attributes:
      gradients_per_update: N; where workers come and go, as the run begins.
      enter, leave, release, behind, vote, left, come, go, has_left: as of `Pace`; it is over when one of the workers leaves.
    """

    vote = come = go = has_left = None

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
        """x̃ ← optimizer(x̃, mean of the gradients of N workers), once N have arrived that were taken at this x̃; one update.

        Args:
          optimizer: a `tf.train.Optimizer` that works element by element.
          message: what is sent to the ps tasks, see `common.scheme.parts_of`; a gradient `[size]`, most simply.
          at_ps: function of a part of the message that has arrived and a `common.scheme.AtUpdate`; returns this piece of this
            worker's gradient, float32. It runs before the lock is taken, for gradients that come too late, too: slots are for
            `of_all`.
          of_all: function of a piece of the mean (or sum) and an `AtUpdate`; returns what the optimizer gets instead.
        """
        return self._give(optimizer, message, at_ps, of_all)

    def send(self, p, optimizer, message):
        """x̃_p ← optimizer(x̃_p, mean of the messages of N workers) for fragment p, once N have arrived; one update.

        The fragments take turns: the message counts if this one is next. If not, because this worker has begun anew, it is
        thrown away, and `receive` does not wait; so the worker comes into step within P updates.

        Args:
          p: number of the fragment, see `GlobalParameters.fragment`.
          optimizer: as in `push`.
          message: a tensor of the size of the fragment.
        """
        return self._give(optimizer, message, fragment=p)

    def receive(self, p, vector):
        """Ends when the update is made that this worker has sent something for; then v_p ← x̃_p. One message from each ps.

        The ps wait and read by themselves: x̃_p is on its way as soon as the update is made, while the worker makes the steps
        between the two.

        Args:
          p: number of the fragment.
          vector: one `[size]` of this worker's own, as `LocalParameters.copy` returns it.
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
        (parts, keep), gradients = center.parts(message, fragment=fragment), []
        found = [AtUpdate(center, i) for i in numbers]
        sent = [tensor.op for part in parts for tensor in tensors_of(part)]
        with tf.control_dependencies(None):  # what went before reaches the ps with its part
            for piece, part, at_update in zip(pieces, parts, found, strict=True):
                with tf.device(piece.device):
                    gradient = gradient_of(arrived(part), at_ps, at_update)
                    if isinstance(gradient, tf.IndexedSlices) and not at_update.is_of_table:
                        gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, at_update.size)
                    gradients.append(gradient)
                    # Slots cannot be made under a condition. This is never run, nor is the optimizer's.
                    if of_all:
                        gradient_of(gradients[-1], of_all, at_update, "of_all")
            made = gradients if fragment is None else [tf.zeros(piece.shape) for piece in center.pieces]
            optimizer = center.optimizers.use(
                optimizer, lambda own: center.make_slots(own, list(zip(made, center.targets, strict=True)))
            )
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
                is_last = clocks.low(after) > low
                step_before = center.step.read_value()
                updated = step_before + tf.cast(counts, tf.int64)
                added = [total.add(part, counts) for total, part in zip(sums, gradients, strict=True)]

                def apply():
                    counted = self._count_gradients(sums[0])
                    with tf.control_dependencies(counted):
                        taken = [total.take() for total in sums]
                    if of_all:
                        for i, (piece, at_update) in enumerate(zip(pieces, found, strict=True)):
                            with tf.device(piece.device):
                                taken[i] = gradient_of(taken[i], of_all, at_update, "of_all")
                    pairs = list(zip(taken, pieces, strict=True))
                    if center.schedule is None:
                        return _both(counted, center.apply(optimizer, pairs))
                    with factor_is(center.schedule(step_before)):
                        return _both(counted, center.apply(optimizer, pairs))

                with tf.control_dependencies([step_before, *added]):
                    applied = tf.cond(is_last, apply, tf.no_op).op
                # `step_before` once more: where `apply` gets it and makes no use of it, TensorFlow's graph optimizer takes away
                # that the condition comes after it, and it might be read when it is already counted.
                with tf.control_dependencies([step_before, applied]):
                    counted = center.step.assign_add(tf.cast(is_last, tf.int64), read_value=False)
                with tf.control_dependencies([counted]):
                    done += [counted, center.drop(1 - tf.cast(counts, tf.int64)), *clocks.change(before, after, index)]
        kept, words = tuple(keep(counts)), ((self, "push" if fragment is None else f"send {fragment}"),)
        operations = *sent, *kept, *done
        return Step(operations, updated=updated, step_before=step_before, training_ended=ended, done=words, kept=kept)

    def _count_gradients(self, total):
        """Operations that count the gradients in a total, where workers come and go."""
        if not self.go:
            return []
        center = self._center
        with tf.device(center.step.device):
            return [center.local_steps.assign_add(total.count(), read_value=False)]

    def wait(self):
        """Ends when the update is made for which this worker computed a gradient, whether that counted or came too late."""
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
        """When the chief enters, x̃ may have gone back to a checkpoint. Then no gradient counts that is on its way.

        Who is new, or comes back, does as if its gradient for the update that is being made had come.
        """
        clocks, center = self._clocks, self._center
        with center.lock.held([]) as enter, tf.device(center.step.device):
            before = after = clocks.read() if self.left is None else clocks.read(self.left)
            if local.index > 0 and local.begin_workers is not None:
                low = clocks.low(before)
                first = tf.where(low >= FINISHED, tf.constant(FINISHED, tf.int64), low + 1)  # if training has ended, so has it
                after = tf.where(before[local.index] >= FINISHED, clocks.with_clock(before, local.index, first), before)
            if local.index == 0:
                newest = tf.reduce_max(tf.where(before >= FINISHED, tf.zeros_like(before), before))
                # A worker that has sent a fragment goes on, and the next one counts; else it is the turn of the same one still.
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
    """The workers average a vector among themselves, without a ps; x̃ gets what all have, from the chief.

    Args:
      center: the `common.scheme.GlobalParameters`.
      local: this worker's `common.scheme.LocalParameters`.

    Attributes:
      gradients_per_update: the number of workers.
      enter, leave, release: as of `Pace`; there is nothing to do.
      behind: None, since no task keeps account of it.
      vote: this worker is to stop, and all others together with it after the call, in which it has to take part.
    """

    enter, leave, release, behind, left = (), (), (), None, None
    come = go = has_left = None

    def __init__(self, center, local):
        self._center, self._local, self._num_means = center, local, 0
        self.gradients_per_update = local.num_workers
        with tf.control_dependencies(None), tf.variable_scope(local.name):
            with tf.device(center.step.device):
                newest = center.step.read_value()
            self._step = local_variable("step", newest)  # as many updates as x has, of all workers together
            local.counts_updates_in(self._step)
            self._stopping = local_variable("stopping", tf.zeros([]))
            self.vote = self._stopping.assign(1.0, read_value=False)

    def mean(self, tensor):
        """Returns the mean over all workers of a tensor, by an all-reduce among them. All have to take part, or none goes on.

        It is TensorFlow's ring, in which a worker sends n-ths of the tensor, 2 (n − 1) in turn. Two workers send their whole
        tensors to each other instead: as many bytes, but at once.
        """
        return spent("all-reduce", lambda: self._mean(tensor), tensor)

    def _mean(self, tensor):
        n = self._local.num_workers
        if n == 1:
            return tensor
        self._num_means += 1  # all workers build the same graph, so it is the same for all
        ring = {"group_size": n, "group_key": 1, "instance_key": self._num_means, "communication_hint": "ring"}
        if n > 2:
            return tf.raw_ops.CollectiveReduce(input=tensor, merge_op="Add", final_op="Div", subdiv_offsets=[0], **ring)
        row = tf.expand_dims(tensor, 0)
        return tf.reduce_mean(tf.raw_ops.CollectiveGather(input=row, shape=[n, *tensor.shape], **ring), axis=0)

    def publish(self, steps=1):
        """x̃ ← x, the chief's, which is that of all workers, `steps` updates after the last time. One message, the chief's."""
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


def _both(operations, operation):
    return tf.group(*operations, operation) if operations else operation


def _left(local):
    """Returns what `Pace` has as `left`."""
    is_chief = local.begin_workers is not None and local.index == 0
    return tf.placeholder(tf.bool, [local.num_workers]) if is_chief else None


def _wait(owner, center, clocks, index):
    may_go_on = clocks.may_go_on(index)
    with tf.control_dependencies(None), tf.control_dependencies(before_read(center.step.device)):
        waited = clocks.wait(index)
    return Step(tuple(waited), may_go_on=may_go_on, done=((owner, "wait"),))


class _Total:
    """A sum of gradients of a piece of x̃, beside it; empty at first. It needs no initialization."""

    def __init__(self, name, piece, reduction):
        self._device = piece.device
        with tf.device(self._device):
            self._handle = tf.raw_ops.ResourceConditionalAccumulator(
                dtype=tf.float32, shape=piece.shape, shared_name=name, reduction_type=reduction
            )

    def add(self, gradient, counts):
        """The operation that adds a gradient, if it counts."""
        with tf.device(self._device):
            # An accumulator has a step of its own, 0 or more, and drops what is older.
            step = tf.where(counts, tf.constant(tf.int64.max, tf.int64), tf.constant(-1, tf.int64))
            return tf.raw_ops.ResourceAccumulatorApplyGradient(handle=self._handle, local_step=step, gradient=gradient)

    def count(self):
        """Returns how many gradients are in it, an int64 scalar."""
        with tf.device(self._device):
            return tf.cast(tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=self._handle), tf.int64)

    def take(self):
        """Returns the mean or the sum, of one gradient at least, and empties it."""
        with tf.device(self._device):
            return tf.raw_ops.ResourceAccumulatorTakeGradient(handle=self._handle, num_required=1, dtype=tf.float32)

    def clear(self):
        """The operation that empties it."""
        with tf.device(self._device):
            some = tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=self._handle) > 0
            return tf.cond(some, lambda: self.take().op, tf.no_op).op


class _RowTotal:
    """The gradients of rows of a piece of a table, beside it, as they come; empty at first. It needs no initialization.

    As in `_Total` all that has come counts, however many that are: a worker that dies in the middle may have given one twice.

    Args:
      name: for the ps.
      piece: the piece.
      mean: whether `take` returns their mean, or the sum.
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
        """Returns the mean or the sum, each row once, and empties it."""
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
