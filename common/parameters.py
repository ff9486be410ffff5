"""The parameters of a model: global ones on the ps, a local copy on a worker; pull, push, window.

A scheme is a generator function `scheme(center, local, hp)`. It gets the global parameters x̃ (`GlobalParameters`), this
worker's local ones x (`LocalParameters`) and the hyperparameters, and yields the operations of one round in their order: a
step begins when the one before has ended. What a later step needs of an earlier one stays in local variables, so the steps
can be run as one call (`build_rounds`) or, in a notebook or a test, one at a time and in any interleaving (`build_steps`).

Both are one flat vector: one message a ps and direction instead of one a variable, and any elementwise optimizer works on
it as it stands.
"""

import time
from typing import Any, NamedTuple

from common import tf
from common.coordination import FINISHED, Clocks, Lock
from common.data import local_variable


class GlobalParameters:
    """x̃: the trainable variables of a model as one flat float32 vector, cut evenly over the ps tasks.

    Args:
      initial_parameters: array `[size]`. It is fed when the variable is initialized (`init_feed_dict`); as a part of the
        graph it would travel with every graph, and break at 2 GB.
      num_ps: pieces to cut the vector into.
      device_fn: puts piece i on ps task i; None puts all on this process.
    """

    def __init__(self, initial_parameters, num_ps=1, device_fn=None):
        self.size = len(initial_parameters)
        feed = tf.placeholder(tf.float32, [self.size], "initial_parameters")
        self._num_pieces = min(num_ps, self.size)
        self.pieces = self._pieces(
            "parameters",
            # Called for each piece; only partition_info knows where the piece begins.
            lambda shape, dtype=None, partition_info=None: tf.slice(feed, partition_info.var_offset, shape),
            device_fn,
        )
        with tf.device(device_fn):
            self.step = tf.train.get_or_create_global_step()
        self.init_feed_dict = {feed: initial_parameters}
        self.previous: list[Any] = []  # operations that a read has to wait for, see build_rounds
        self._optimizers: dict[Any, Any] = {}
        self._slots: dict[str, list[Any]] = {}
        self.lock = Lock(self.step.device, "parameters")
        self._clocks: Any = None
        self._totals: list[Any] = []
        self._prepared: dict[Any, Any] = {}
        self._waits: list[Any] = []  # operations that a read on any ps has to wait for
        self.updated: Any = None  # set by push and add: the global step after this worker's update
        self.known: Any = None  # set by push_together and follow: the global step before it; equal if the gradient was dropped
        self.over: Any = None  # set by them: whether another worker has ended the training
        self.gradients_per_update = 1  # of how many workers
        self.meeting: Any = None  # a `Meeting`, set by whatever makes workers wait for each other

    def _pieces(self, name, initializer, device_fn):
        """Returns the pieces of a new global vector `[size]`. Checkpoints hold it whole, so the number of ps may change."""
        partitioner = tf.fixed_size_partitioner(self._num_pieces)
        with tf.device(device_fn):
            return list(tf.get_variable(name, [self.size], partitioner=partitioner, initializer=initializer, use_resource=True))

    @property
    def optimizers(self):
        """The names of the optimizers that have changed x̃, a set."""
        return {optimizer.get_name() for optimizer in self._optimizers.values()}

    def slot(self, name):
        """Returns the pieces of a further global vector `[size]`, zero at first, that lies beside x̃ and is saved with it."""
        if name not in self._slots:
            devices = iter([piece.device for piece in self.pieces])
            beside = lambda op: next(devices) if op.type == "VarHandleOp" else ""  # noqa: E731
            self._slots[name] = self._pieces(name, tf.zeros_initializer(), beside)
        return self._slots[name]

    def keep(self, values):
        """Returns variables beside the global step with these initial values, which are saved with x̃.

        They are for what a model has that is not trained, as moving means: the chief's own live on the chief, and die with it.
        """
        kept = []
        for i, value in enumerate(values):
            feed = tf.placeholder(value.dtype, value.shape)
            self.init_feed_dict[feed] = value
            with tf.device(self.step.device):
                kept.append(tf.get_variable(f"state_{i}", initializer=feed, trainable=False, use_resource=True))
        return kept

    def _after_previous(self, device):
        """Control dependencies of a read on `device`: what went before, there or on a worker.

        Not what went before on another ps: that would be a message between ps tasks, for an order that no scheme needs. But
        who had to wait, on one ps, reads from all of them afterwards.
        """
        before = [op for op in self.previous if op.device == device or not _is_on_ps(op) or op in self._waits]
        return tf.control_dependencies(before)

    def read(self):
        """Returns the present x̃ as one tensor `[size]`, and the global step, read on its ps just before. One message a ps."""
        # On its ps, as without a device the value would go to the worker and back.
        with tf.device(self.step.device), tf.control_dependencies(None), self._after_previous(self.step.device):
            step = self.step.read_value()
        values = []
        for piece in self.pieces:
            before = [step] if piece.device == self.step.device else []
            with tf.control_dependencies(None), self._after_previous(piece.device), tf.control_dependencies(before):
                values.append(piece.read_value())
        return _joined(values), step

    def push(self, optimizer, gradient):
        """x̃ ← optimizer(x̃, gradient) on the ps; counts one update. One message to each ps.

        TensorFlow applies it to each piece as one indivisible operation; no lock spans several pieces, or a pull and a push.
        The optimizer's slots live beside their piece of x̃ and are saved with it.

        Args:
          optimizer: a `tf.train.Optimizer` that works element by element.
          gradient: tensor `[size]`.
        """
        optimizer = _same_as_before(optimizer, self._optimizers)
        return self._update(gradient, lambda piece, part: optimizer.apply_gradients([(part, piece)]))

    def add(self, difference):
        """x̃ ← x̃ + difference on the ps, a tensor `[size]`; counts one update. One message to each ps; indivisible as a push."""
        return self._update(difference, lambda piece, part: piece.assign_add(part, read_value=False))

    def _update(self, vector, apply):
        """Calls `apply(piece, part)` for each piece of x̃ and the part of `vector` that has arrived there; counts one update."""
        parts, applied = self._split(vector), []
        with tf.control_dependencies(None):  # what went before on the worker reaches the ps with its part
            for piece, part in zip(self.pieces, parts, strict=True):
                # What went before on that ps: an earlier push. On it the learning rate, too, or it would be a message.
                earlier = [op for op in self.previous if _is_on_ps(op) and op.device == piece.device]
                with tf.device(piece.device), tf.control_dependencies(earlier):
                    applied.append(apply(piece, part))
            count = self._count([op for op in applied if op.device == self.step.device])
        return [*[part.op for part in parts], *applied, count]

    def push_exactly(self, optimizer, gradient, change, memory):
        """x̃ ← optimizer(x̃, change(gradient)) as one indivisible action over all ps tasks; counts one update.

        `change` works where x̃ is, and at the moment of the update: a lock on ps 0 keeps out every other such push and every
        pull that is remembered. It is taken when the gradient has arrived on all ps, so nobody waits for a worker; with
        several ps it is held for one exchange of small messages between them.

        Args:
          optimizer: a `tf.train.Optimizer` that works element by element.
          gradient: tensor `[size]`.
          change: function of a piece of the gradient and what is `There`; returns what the optimizer gets instead.
          memory: this worker's `LocalParameters.memory`, after a pull that is remembered.
        """
        optimizer = _same_as_before(optimizer, self._optimizers)
        parts, arrived = self._split(gradient), []
        with tf.control_dependencies(None):  # what went before reaches the ps with its part
            for piece, part in zip(self.pieces, parts, strict=True):
                with tf.device(piece.device):
                    arrived.append(tf.identity(part))
            with self.lock.held([part.op for part in arrived]) as done:
                staleness = None
                if memory.step is not None:
                    with tf.device(self.step.device):
                        # A ps that was restarted may have lost updates which this worker has seen.
                        staleness = tf.maximum(self.step.read_value() - memory.step.read_value(), 0)
                        staleness = tf.cast(staleness, tf.float32)
                for i, (piece, part) in enumerate(zip(self.pieces, arrived, strict=True)):
                    with tf.device(piece.device):
                        pulled = memory.pieces and memory.pieces[i].read_value()
                        there = There(piece.read_value(), pulled, staleness, lambda name, i=i: self.slot(name)[i])
                        done.append(optimizer.apply_gradients([(change(part, there), piece)]))
                done.append(self._count([] if staleness is None else [staleness.op]))
        return [*[part.op for part in parts], *done]

    def wait(self, local, staleness=0):
        """Ends when this worker is at most `staleness` ticks ahead of the slowest; what is read afterwards is newer than that.

        After `push_together`: when the update is made that this worker's gradient was for.

        Args:
          local: this worker's `LocalParameters`.
          staleness: number of ticks; infinity is allowed.
        """
        clocks = self._clocks_of(local, staleness)
        if self.meeting is None:
            self.meeting = Meeting(clocks.enter(local.index), clocks.leave(local.index), clocks.release(local.index))
        local.may_go_on = clocks.may_go_on(local.index)
        with tf.control_dependencies(None), self._after_previous(self.step.device):
            waited = clocks.wait(local.index)
        self._waits += waited
        return waited

    def tick(self, local):
        """c ← c + 1: one more step of this worker, and all that it pushed before, is done."""
        with tf.control_dependencies(None):
            return self._clocks_of(local).tick(local.index, self.previous)

    def _clocks_of(self, local, *args):
        if self._clocks is None:
            with tf.control_dependencies(None):
                self._clocks = Clocks(local.num_workers, self.lock, *args)
        return self._clocks

    def push_together(self, optimizer, gradient, local, backup_workers=0, mean=True):
        """x̃ ← optimizer(x̃, mean of the gradients of N workers), once N have arrived that were taken at this x̃; one update.

        `wait` ends when that has happened, or when another worker's gradient was faster and this one was dropped.

        N is the number of workers less `backup_workers`. Exactly once: a gradient counts if there was no update since this
        worker's last `wait`, before it pulled, and it has given none for this update yet. All that happens to it, on all ps
        tasks, is one indivisible action, under the lock of `push_exactly`. Whoever is the N-th makes the update.

        Args:
          optimizer: a `tf.train.Optimizer` that works element by element.
          gradient: tensor `[size]`.
          local: this worker's `LocalParameters`.
          backup_workers: how many workers need not be waited for (Chen et al. 2016).
          mean: if not, the sum of the gradients.
        """
        self.gradients_per_update = local.num_workers - backup_workers
        clocks = self._clocks_of(local, 0, self.gradients_per_update)
        optimizer = _same_as_before(optimizer, self._optimizers)
        sums = self._sums("MEAN" if mean else "SUM")
        if self.meeting is None or self.over is None:
            self.meeting = self._meet(clocks, local, sums)
        parts, arrived = self._split(gradient), []
        with tf.control_dependencies(None):  # what went before reaches the ps with its part
            for piece, part in zip(self.pieces, parts, strict=True):
                with tf.device(piece.device):
                    arrived.append(tf.identity(part))
            if optimizer not in self._prepared:  # its slots cannot be made under a condition; this is never run
                self._prepared[optimizer] = optimizer.apply_gradients(list(zip(arrived, self.pieces, strict=True)))
            with self.lock.held([part.op for part in arrived]) as done, tf.device(self.step.device):
                before = clocks.read()
                low, own = clocks.low(before), before[local.index]
                self.over = tf.equal(low, FINISHED)
                counts = tf.equal(clocks.pulled(local.index), low) & (own <= low) & ~self.over
                after = clocks.with_clock(before, local.index, tf.where(counts, low + 1, own))
                is_last = clocks.low(after) > low
                self.known = self.step.read_value()
                self.updated = self.known + tf.cast(counts, tf.int64)

                added = [total.add(part, counts) for total, part in zip(sums, arrived, strict=True)]

                def apply():
                    return optimizer.apply_gradients([(t.take(), piece) for t, piece in zip(sums, self.pieces, strict=True)])

                with tf.control_dependencies([self.known, *added]):
                    applied = tf.cond(is_last, apply, tf.no_op).op
                with tf.control_dependencies([applied]):
                    counted = self.step.assign_add(tf.cast(is_last, tf.int64), read_value=False)
                with tf.control_dependencies([counted]):
                    done += [counted, *clocks.change(before, after, local.index)]
        return [*[part.op for part in parts], *done]

    def follow(self, local, steps):
        """x̃ ← x, the chief's, which is that of all workers, `steps` updates after the last time. One message, the chief's."""
        if local.step is None:
            with tf.control_dependencies(None), tf.variable_scope(local.name):
                with tf.device(self.step.device):
                    newest = self.step.read_value()
                local.step = local_variable("step", newest)
                stopping = local_variable("stopping", tf.zeros([]))
                self.meeting = Meeting([], [], [], vote=stopping.assign(1.0, read_value=False))
                local.stopping = stopping
        self.gradients_per_update, self.over = local.num_workers, local.all_reduce(local.stopping.read_value()) > 0
        updated = local.step.assign_add(steps)
        self.known = updated - steps + tf.range(steps, dtype=tf.int64)
        self.updated = self.known + 1
        if local.index > 0:
            return [updated.op]
        followed = [updated.op]
        for piece, part in zip(self.pieces, self._split(local.value.read_value()), strict=True):
            with tf.device(piece.device):
                followed.append(piece.assign(part, read_value=False))
        with tf.device(self.step.device):
            return [*followed, self.step.assign(updated, read_value=False)]

    def _sums(self, reduction):
        if not self._totals:
            with tf.control_dependencies(None):
                for i, piece in enumerate(self.pieces):
                    self._totals.append(_Total(f"gradients_{i}", piece, reduction))
        return self._totals

    def _meet(self, clocks, local, sums):
        """Returns the `Meeting` of workers that make every update together: it is over when one of them leaves.

        When the chief enters, x̃ may have gone back to a checkpoint. Then no gradient counts that is on its way.
        """
        with tf.control_dependencies(None):
            with self.lock.held([]) as enter, tf.device(self.step.device):
                before = after = clocks.read()
                if local.index == 0:
                    newest = tf.reduce_max(tf.where(tf.equal(before, FINISHED), tf.zeros_like(before), before))
                    after = tf.where(tf.equal(before, FINISHED), before, tf.fill([local.num_workers], newest + 1))
                    enter += [total.clear() for total in sums]
                enter += clocks.begin(local.index, before, after)
            with self.lock.held([]) as close, tf.device(self.step.device):
                close += clocks.change(clocks.read(), tf.fill([local.num_workers], tf.constant(FINISHED, tf.int64)))
            return Meeting(enter, close, clocks.release(local.index))

    def memory(self, name, remember):
        """Returns a new `Memory` of the worker of this name: variables on the ps, of the worker's session as its local ones."""
        with tf.control_dependencies(None), tf.variable_scope(name):
            if remember == "step":
                with tf.device(self.step.device):
                    return Memory(step=local_variable("pulled_step", tf.zeros([], tf.int64)))
            pieces = []
            for i, piece in enumerate(self.pieces):
                with tf.device(piece.device):
                    pieces.append(local_variable(f"pulled_value_{i}", tf.zeros(piece.shape)))
            return Memory(pieces=pieces)

    def read_exactly(self, memory):
        """As `read`, but of one moment over all ps tasks, and remembered there: see `push_exactly`."""
        with tf.control_dependencies(None):
            with tf.device(self.step.device), self._after_previous(self.step.device):
                before = [tf.no_op()]
            with self.lock.held(before) as done:
                with tf.device(self.step.device):
                    step = self.step.read_value()
                    done += [memory.step.assign(step, read_value=False)] if memory.step is not None else [step.op]
                values = []
                for i, piece in enumerate(self.pieces):
                    with tf.device(piece.device):
                        value = piece.read_value()
                        done += [memory.pieces[i].assign(value, read_value=False)] if memory.pieces else [value.op]
                    values.append(value)
            return _joined(values), step, done

    def _split(self, vector):
        sizes = [int(piece.shape[0]) for piece in self.pieces]
        return tf.split(vector, sizes) if len(sizes) > 1 else [tf.identity(vector)]

    def _count(self, after):
        """Counts one update after these operations, and returns the operation."""
        with tf.device(self.step.device), tf.control_dependencies(after):
            # Adds one and returns the old value, as one indivisible operation; assign_add is one and a read is another.
            count = tf.raw_ops.ResourceCountUpTo(resource=self.step.handle, limit=tf.int64.max, T=tf.int64)
            self.updated = count + 1
        return count.op


class Meeting(NamedTuple):
    """Operations of a worker that others wait for: each a list."""

    enter: Any  # at the begin of a session
    leave: Any  # it has finished, and others need not wait for it
    release: Any  # it is to stop, so let it not wait for others
    vote: Any = None  # it is to stop, and all others together with it after the call, in which it has to take part


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

    def take(self):
        """Returns the mean or the sum, of one gradient at least, and empties it."""
        with tf.device(self._device):
            return tf.raw_ops.ResourceAccumulatorTakeGradient(handle=self._handle, num_required=1, dtype=tf.float32)

    def clear(self):
        """The operation that empties it."""
        with tf.device(self._device):
            some = tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=self._handle) > 0
            return tf.cond(some, lambda: self.take().op, tf.no_op).op


class There(NamedTuple):
    """What `GlobalParameters.push_exactly` finds on a ps, at the moment of the update, for one piece of x̃."""

    value: Any  # this piece of x̃, a tensor `[size of the piece]`
    pulled: Any  # the same as this worker has pulled it, if its pull remembers the "value"
    staleness: Any  # float32 scalar: updates by others since this worker's pull, if that remembers the "step"
    slot: Any  # function of a name: this piece of a further global vector, a variable, see GlobalParameters.slot


class Memory(NamedTuple):
    """What the ps tasks remember of a worker's last pull, in variables there."""

    step: Any = None  # the global step, an int64 scalar on its ps
    pieces: Any = None  # x̃, as a list of pieces, each on the ps of its piece


class LocalParameters:
    """x: a worker's own copy of the parameters, and what its model needs to compute gradients there.

    It begins as a copy of x̃, so the global variables have to be initialized before the local ones.

    Args:
      center: the `GlobalParameters`.
      model: a `common.models.Model`.
      batches: gives the next samples, see `common.data.Batches`.
      name: variable scope; different for each worker, since the ps know what they remember of it by this name.
      index, num_workers: which worker of how many this is.
      delay: seconds that each call of `train` takes longer, to see what a slow worker does.
      kept: variables, see `GlobalParameters.keep`: where the state of this worker's model begins, in place of the model's own.
    """

    def __init__(self, center, model, batches, name="local", index=0, num_workers=1, delay=0.0, kept=()):
        self.model, self.batches, self.name = model, batches, name
        self.index, self.num_workers, self.delay = index, num_workers, delay
        self.init_feed_dict = dict(batches.init_feed_dict)
        with tf.variable_scope(name):
            self.value = local_variable("x", center.read()[0])
            self.state = []
            for i, value in enumerate(model.initial_state):
                if not kept:
                    feed = tf.placeholder(value.dtype, value.shape)
                    self.init_feed_dict[feed] = value
                self.state.append(local_variable(f"state_{i}", kept[i].read_value() if kept else feed))
        self.memory = Memory()  # set by a pull that is remembered
        self._vectors: dict[str, Any] = {}
        self._optimizers: dict[Any, Any] = {}
        self._counters: dict[str, Any] = {}
        self._num_reductions = 0
        self.gradient = self.vector("gradient")
        self.difference: Any = None  # set by compare
        self.pulled: Any = None  # set by pull and compare: the global step at which x̃ was read
        self.loss: Any = None  # set by train: mean loss over the window
        self.step: Any = None  # set by GlobalParameters.follow: as many updates as x has, of all workers together
        self.stopping: Any = None  # and: 1 if this worker is to stop
        self.may_go_on: Any = None  # set by GlobalParameters.wait: whether it would end at once
        self.windows = 0  # how many calls of train there were

    @property
    def optimizers(self):
        """The names of the optimizers that have changed x, a set."""
        return {optimizer.get_name() for optimizer in self._optimizers.values()}

    def vector(self, name):
        """Returns a vector `[size]` of this worker's own, a variable, zero at first; the same one for the same name."""
        if name not in self._vectors:
            with tf.control_dependencies(None), tf.variable_scope(self.name):
                self._vectors[name] = local_variable(name, tf.zeros([self.model.size]))
        return self._vectors[name]

    def pull(self, center):
        """x ← x̃. One message from each ps."""
        value, self.pulled = center.read()
        return [self.value.assign(value, read_value=False)]

    def pull_exactly(self, center, remember):
        """x ← x̃ as one indivisible action over all ps tasks, which remember what `center.push_exactly` is to know.

        Args:
          center: the `GlobalParameters`.
          remember: "step", the number of updates in it, or "value", x̃ itself.
        """
        if self.memory == Memory():
            self.memory = center.memory(self.name, remember)
        value, self.pulled, done = center.read_exactly(self.memory)
        return [self.value.assign(value, read_value=False), *done]

    def compare(self, center):
        """d ← x − x̃, which is in `difference` `[size]` afterwards. One message from each ps."""
        value, self.pulled = center.read()
        self.difference = self.vector("difference")
        return [self.difference.assign(self.value - value, read_value=False)]

    def train(self, window, optimizer, at=None, accumulate=False):
        """`window` local steps in one call: g ← gradient of the next batch's mean loss; x ← optimizer(x, g).

        The sum of the g, each taken where the walk then stood, is in `gradient` afterwards; the mean loss is `loss`.

        Args:
          window: number of steps.
          optimizer: a `tf.train.Optimizer`, whose slots stay on this worker; or a function of g `[size]` that returns the
            operation which changes x.
          at: function of x that gives the point at which the gradient is taken; x itself by default.
          accumulate: adds the g to what is in `gradient`, instead of to zero.
        """
        self.windows += 1
        slept = [tf.py_func(lambda: time.sleep(self.delay), [], [])] if self.delay else []
        with tf.control_dependencies(slept):
            indices = self.batches.next(window)
        x, before = self.value, self.gradient.read_value() if accumulate else tf.zeros([self.model.size])

        def change(g):
            return self.apply(optimizer, g) if isinstance(optimizer, tf.train.Optimizer) else optimizer(g)

        def step(t):
            present = x.read_value()
            loss, g = self._loss_and_gradient(at(present) if at else present, *self.batches.samples(indices[t]))
            with tf.control_dependencies([g]):  # x is read before it is written
                return loss, g, change(g)

        def next_step(t, total, loss):
            step_loss, g, changed = step(t)
            with tf.control_dependencies([changed]):
                return t + 1, total + g, loss + step_loss

        if window == 1:
            loss, total, changed = step(0)
            total = before + total if accumulate else total
        else:
            # An unrolled window would cost tens of seconds of graph optimization. An optimizer's slots cannot be
            # created inside the loop, hence the call beforehand, whose operation is never run.
            change(before)
            changed, total, loss = tf.while_loop(lambda t, *_: t < window, next_step, (0, before, 0.0), parallel_iterations=1)
            loss /= window
        self.loss = tf.identity(loss)
        return [self.gradient.assign(total, read_value=False), self.loss.op, changed]

    def apply(self, optimizer, g):
        """x ← optimizer(x, g), for a function that `train` gets. The optimizer's slots stay on this worker."""
        optimizer = _same_as_before(optimizer, self._optimizers)
        with tf.variable_creator_scope(_make_local):  # its slots
            return optimizer.apply_gradients([(g, self.value)])

    def all_reduce(self, tensor):
        """Returns the mean over all workers of a tensor, by an all-reduce among them. All have to take part, or none goes on.

        It is TensorFlow's ring, in which a worker sends n-ths of the tensor, 2 (n − 1) in turn. Two workers send their whole
        tensors to each other instead: as many bytes, but at once.
        """
        n = self.num_workers
        if n == 1:
            return tensor
        self._num_reductions += 1  # all workers build the same graph, so it is the same for all
        ring = {"group_size": n, "group_key": 1, "instance_key": self._num_reductions, "communication_hint": "ring"}
        if n > 2:
            return tf.raw_ops.CollectiveReduce(input=tensor, merge_op="Add", final_op="Div", subdiv_offsets=[0], **ring)
        row = tf.expand_dims(tensor, 0)
        return tf.reduce_mean(tf.raw_ops.CollectiveGather(input=row, shape=[n, *tensor.shape], **ring), axis=0)

    def optimizer(self, hp):
        """Returns the optimizer that `--local_optimizer` names, for `train`."""
        rate = hp.local_learning_rate or hp.learning_rate
        if hp.local_optimizer == "momentum":
            return tf.train.MomentumOptimizer(rate, hp.local_momentum)
        kinds = {"sgd": tf.train.GradientDescentOptimizer, "adagrad": tf.train.AdagradOptimizer, "adam": tf.train.AdamOptimizer}
        return kinds[hp.local_optimizer](rate)

    def _loss_and_gradient(self, parameters, x, y):
        variables = self.model.split(parameters)
        loss, state = self.model.loss(variables, [v.read_value() for v in self.state], x, y)
        gradients = [
            tf.reshape(g, [-1]) if g is not None else tf.zeros([size])
            for g, size in zip(tf.gradients(loss, variables), self.model.sizes, strict=True)
        ]
        with tf.control_dependencies([v.assign(s, read_value=False) for v, s in zip(self.state, state, strict=True)]):
            return tf.identity(loss), tf.concat(gradients, axis=0)


def _same_as_before(optimizer, known):
    """Returns the one of `known` optimizers that is like this one and has the slots, or else adds this one.

    A scheme is called, and makes its optimizers, for each round that is built; but there is one set of slots for all rounds.
    """
    arguments = sorted((name, value) for name, value in vars(optimizer).items() if isinstance(value, (int, float, str)))
    return known.setdefault((type(optimizer), *arguments), optimizer)


def _make_local(next_creator, **arguments):
    return next_creator(**{**arguments, "collections": [tf.GraphKeys.LOCAL_VARIABLES]})


def _is_on_ps(operation):
    return "/job:ps" in operation.device


def _joined(values):
    return tf.concat(values, axis=0) if len(values) > 1 else values[0]


class Rounds(NamedTuple):
    """Some rounds of a scheme as one call of a session: what to fetch."""

    operations: Any
    loss: Any  # mean over the calls of `LocalParameters.train`
    steps: Any  # int64 [updates, 2]: the newest update by others that the worker knew, and its own update, as global steps
    over: Any = ()  # whether another worker has ended the training, if that can be


def build_steps(scheme, center, local, hp):
    """Returns the steps of one round, each a list of operations to be run on its own."""
    return list(scheme(center, local, hp))


def build_rounds(scheme, center, local, hp, rounds=1):
    """Returns `Rounds` that run the scheme's steps one after the other, `rounds` times over, in one call.

    One after the other on the worker, and on each ps; but a worker whose push has left does not wait until the ps says that
    it is applied, unless it reads what it pushed to.

    A call costs as much as a message or two, so the fewer the better; its graph grows with the rounds.
    """
    here, there, loss, steps = _chain(scheme, center, local, hp, rounds, [], [])
    return Rounds(here + there, loss, steps, () if center.over is None else center.over)


def repeat_rounds(scheme, center, local, hp, rounds, times):
    """Returns `Rounds` that do the same as `build_rounds`, `times` over, in a loop of the graph: for calls of any length.

    To be built after the same rounds without a loop, in which an optimizer cannot make its slots. Each time around costs three
    messages more. The loop ends early when another worker has ended the training.

    At the end the ps waits for a message that the worker has all it needs. Else both end at about the same time, and TensorFlow
    (2.20 and 2.21) keeps a kilobyte for ever whenever a call is cleaned up before the worker's last thread has let go of it
    (`LocalRendezvous::StartAbort`): one call in ten or twenty, and with that message one in a hundred.

    Args:
      times: int32 scalar on the worker.
    """
    devices = sorted({piece.device for piece in [*center.pieces, center.step]})
    tokens = []  # that the rounds have ended: on each ps one of its own, as they send each other no messages
    for device in devices:
        with tf.device(device):
            tokens.append(tf.constant(0))
    with tf.device(center.step.device):
        no_steps = tf.zeros([0, 2], tf.int64)

    def go_on(t, over, *_):
        return (t < times) & ~over

    def body(t, over, here, there, loss, steps):
        last_here, last_there, mean_loss, more = _chain(
            scheme, center, local, hp, rounds, [here.op], [token.op for token in there]
        )
        with tf.control_dependencies(last_here):
            here = tf.identity(here)
        for i, device in enumerate(devices):
            with tf.device(device), tf.control_dependencies([op for op in last_there if op.device == device]):
                there[i] = tf.identity(there[i])
        with tf.device(center.step.device):
            steps = tf.concat([steps, more], axis=0)
        return t + 1, over if center.over is None else center.over, here, there, loss + mean_loss, steps

    first = tf.constant(0), tf.constant(False), tf.constant(0), tokens, tf.constant(0.0), no_steps
    shapes = tf.nest.map_structure(lambda v: v.shape, first[:-1])
    longer = (*shapes, tf.TensorShape([None, 2]))
    t, over, here, there, loss, steps = tf.while_loop(go_on, body, first, longer, parallel_iterations=1)
    loss, steps = loss / tf.cast(t, tf.float32), tf.identity(steps)
    with tf.device(center.step.device), tf.control_dependencies([loss, steps, here, *there]):
        return Rounds(tf.no_op(), loss, steps, () if center.over is None else over)


def _chain(scheme, center, local, hp, rounds, here, there):
    """Builds the rounds that begin when the operations `here`, on the worker, and `there`, on the ps, have ended.

    Returns:
      The last operations of both, the mean loss, and the steps as `Rounds` has them.
    """
    losses: list[Any] = []
    steps: list[Any] = []
    own_updates = 0  # since the pull
    center.previous = here + there
    for _ in range(rounds):
        generator = scheme(center, local, hp)
        while True:
            loss, pulled, updated = local.loss, local.pulled, center.updated
            with tf.control_dependencies(here):
                step = next(generator, None)
            if step is None:
                break
            if local.loss is not loss:
                losses.append(local.loss)
            if local.pulled is not pulled:
                own_updates, there = 0, []
            if center.updated is not updated:
                with tf.device(center.updated.device):
                    known = local.pulled + own_updates if center.known is None else center.known
                    steps.append(tf.reshape(tf.stack([known, center.updated], axis=-1), [-1, 2]))
                own_updates += 1
            here = [op for op in step if not _is_on_ps(op)] or here  # the worker's of the step before
            there = there + [op for op in step if _is_on_ps(op)]  # on the ps since the last read
            # What the ps did with a push began after it had left the worker: no need to tell the ps again.
            center.previous = there if any(map(_is_on_ps, step)) else here + there
    center.previous = []  # a read that is built later belongs to no round
    with tf.device(center.updated.device):
        together = tf.concat(steps, axis=0)  # there, to be one message
    return here, there, tf.add_n(losses) / float(len(losses)), together
