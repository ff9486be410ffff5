"""x̃, the global parameters of a model on the ps: read, push, add, and what lies beside them.

They are one flat vector: one message per ps and direction, not one per variable, and any elementwise optimizer works on it.
"""

import contextlib
from typing import Any

from common import tf
from common.core import ROOM, Clocks, Lock, UserError
from common.scheme.atomic import Exact
from common.scheme.barriers import Pace, Ring, Together
from common.scheme.compression import Packed, PackedPieces, Packing, pack_sparse, read_packed
from common.scheme.learning_rates import factor_is
from common.scheme.local_steps import Dynamic
from common.scheme.messages import AtUpdate, arrived, gradient_of, parts_of, tensors_of
from common.scheme.steps import Optimizers, Step, before_read, before_write, check_pieces, made_with, number_of_packed, worker
from common.scheme.tables import ROW_BY_ROW_ON_PS, SCHEMES, Table, WithRows, find_on_ps
from common.scheme.unbounded import Vocabulary


class GlobalParameters:
    """x̃: the trainable variables of a model as one flat float32 vector, cut evenly over the ps tasks.

    Args:
      initial_parameters: array `[size]`. It is fed when the variable is initialized (`init_feed_dict`); as a part of the
        graph it would travel with every graph, and break at 2 GB.
      num_ps: pieces to cut the vector into.
      device_fn: puts piece i on ps task i; None puts all on this process.
      schedule: a `common.scheme.Schedule`, or another function of the global step, of the learning rate; None for none.
      compression: a `common.scheme.Compression` of what workers send and get; None for none.
      fragments: parts of the vector that are exchanged each on its own, see `fragments_of`; each lies on all ps tasks.
      tables: the `common.scheme.Spec`s of tables beside the vector, of which workers pull and push rows.
      max_rows: of each table without an end, see `common.scheme.unbounded`.

    Attributes:
      size: of the vector.
      pieces, sizes: the variables that it is made of, one on each ps, or as many as there are fragments, and their sizes.
      tables: the `common.scheme.Table`s.
      targets: `pieces`, and behind them those of all tables: to what an update adds, one after the other.
      find: looks rows up on the ps, see `common.scheme.find_on_ps`; None without tables.
      fragments: as above.
      step: the global step, a variable: the number of updates.
      lock: for actions that must be indivisible over all ps tasks.
      optimizers: the `common.scheme.Optimizers` that change x̃.
      decay: η λ of weight decay, see `apply`; None for none.
      has_decayed: whether there is an update with it.
      present: where workers come and go, which take part now, a `common.cluster.Present`; None elsewhere.
      local_steps: of which all updates so far are made, a variable, int64; None if each is made of as many, see `dynamic`. It
        counts gradients, where workers come and go and make each update together.
      dropped: the number of gradients that were dropped, and a correction of their samples, see `common.core.Keeper`, a
        variable, int64 `[2]`; None if none ever is.
    """

    def __init__(
        self,
        initial_parameters,
        num_ps=1,
        device_fn=None,
        schedule=None,
        compression=None,
        fragments=1,
        tables=(),
        max_rows=ROOM,
    ):
        self.schedule, self.decay, self.has_decayed = schedule, None, False
        self.present: Any = None  # `common.training` sets it
        self.compression, self.fragments, self.local_steps = compression, fragments, None
        self.dropped: Any = None
        self.size = len(initial_parameters)
        if self.size < fragments:
            raise UserError(f"--fragments={fragments} is more than the {self.size} parameters of the model: give fewer")
        feed = tf.placeholder(tf.float32, [self.size], "initial_parameters")
        # Piece i lies on ps i mod num_ps, and those of a fragment come one after the other.
        self._num_pieces = fragments * min(num_ps, self.size // fragments)
        self.pieces = self._pieces(
            "parameters",
            # Called for each piece; only partition_info knows where the piece begins.
            lambda shape, dtype=None, partition_info=None: tf.slice(feed, partition_info.var_offset, shape),
            device_fn,
        )
        self.sizes = [int(piece.shape[0]) for piece in self.pieces]
        if tables and compression is not None:
            raise UserError("--compress: rows of tables (common.Embedding) are sent uncompressed: leave it out")
        kinds = [(spec, (Table, ()) if spec.rows else (Vocabulary, (max_rows,))) for spec in tables]
        self.tables = [kind(spec, num_ps, device_fn, *more) for spec, (kind, more) in kinds]
        self.optimizer_of_rows = None  # else one in place of the scheme's, for all tables; learning_rates.py sets it
        self.targets = self.pieces + [piece for table in self.tables for piece in table.pieces]
        self.find = find_on_ps(self.tables) if tables else None
        with tf.device(device_fn):
            self.step = tf.train.get_or_create_global_step()
        self.init_feed_dict = {feed: initial_parameters}
        self.optimizers, self.lock = Optimizers(), Lock(self.step.device, "parameters")
        self._slots: dict[str, list[Any]] = {}
        self._partners: dict[Any, Any] = {}

    def _pieces(self, name, initializer, device_fn):
        """Returns the pieces of a new global vector `[size]`. Checkpoints hold it whole, so the number of ps may change."""
        partitioner = tf.fixed_size_partitioner(self._num_pieces)
        with tf.device(device_fn):
            return list(tf.get_variable(name, [self.size], partitioner=partitioner, initializer=initializer, use_resource=True))

    def slot(self, name):
        """Returns the pieces of a further global vector `[size]`, zero at first, that lies beside x̃ and is saved with it."""
        if name not in self._slots:
            devices = iter([piece.device for piece in self.pieces])
            beside = lambda op: next(devices) if op.type == "VarHandleOp" else ""  # noqa: E731
            self._slots[name] = self._pieces(name, tf.zeros_initializer(), beside)
        return self._slots[name]

    def fragment(self, p):
        """Returns where fragment p lies in a vector `[size]`, a slice."""
        before = sum(self.sizes[: self.numbers(p).start])
        return slice(before, before + sum(self.sizes[i] for i in self.numbers(p)))

    def numbers(self, p):
        """Returns the numbers of the pieces that fragment p is made of, a range.

        Raises:
          UserError: if there is no such fragment.
        """
        if not 0 <= p < self.fragments:
            raise UserError(f"there is no fragment {p}: the parameters have {self.fragments} fragments (--fragments)")
        count = len(self.pieces) // self.fragments
        return range(p * count, (p + 1) * count)

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

    def read(self, packed=False, fragment=None, before=before_read, tell=False):
        """Returns the present x̃ as one tensor `[size]`, and the global step, read on its ps just before. One message per ps.

        Args:
          packed: whether it travels as `--compress_pull` says: for a worker's training, not for what is evaluated or saved.
          fragment: the number of one, to read no more than that; None for all.
          before: function of a device that returns what must end before a read there.
          tell: whether to return, as a third, the operations of the ps, for what has to come after them.
        """
        # On its ps, as without a device the value would go to the worker and back.
        with tf.device(self.step.device), tf.control_dependencies(None), tf.control_dependencies(before(self.step.device)):
            step = self.step.read_value()
        values, packed = [], packed and self.compression is not None and self.compression.pull != "none"
        pieces = self.pieces if fragment is None else [self.pieces[i] for i in self.numbers(fragment)]
        for piece in pieces:
            first = [*before(piece.device), *([step] if piece.device == self.step.device else [])]
            # Without a device, what `read_value` returns is where it is used.
            place: Any = tf.device(piece.device) if packed or tell else contextlib.nullcontext()
            with tf.control_dependencies(None), tf.control_dependencies(first), place:
                values.append(piece.read_value())
        whole = joined([here for here, _ in self.packed(values, pieces)] if packed else values)
        return (whole, step, [step.op, *(value.op for value in values)]) if tell else (whole, step)

    def count_workers(self):
        """Returns how many workers are `present`, a float32 scalar, read when `read` reads x̃. One small message."""
        device = self.step.device
        with tf.device(device), tf.control_dependencies(None), tf.control_dependencies(before_read(device)):
            return tf.cast(self.present.count(), tf.float32)

    def packed(self, values, pieces=None):
        """Packs pieces of x̃, each on its ps, as `--compress_pull` says; returns pairs: what the worker gets, here and there."""
        if self.compression is None or self.compression.pull == "none":
            return [(value, value) for value in values]
        found = []
        for i, (piece, value) in enumerate(zip(pieces or self.pieces, values, strict=True)):
            with tf.device(piece.device), tf.control_dependencies(None):  # what went before on the worker is no concern of it
                sent = read_packed(self.compression.pull, value, i)
                there = sent.unpacked()
            found.append((sent.unpacked(), there))
        return found

    def parts(self, message, gives=False, fragment=None):
        """Cuts a message, see `common.scheme.parts_of`; packs it as `--compress` says.

        Args:
          message: see there.
          gives: whether x changes by what is sent, too, see `common.scheme.Packing`.
          fragment: the number of the one that the message is for; None for all of x̃.

        Returns:
          The parts, and a function that returns the operations of the worker which keep what is not sent, see
          `common.scheme.Packing.keep`.

        Raises:
          UserError: if nothing in it can be packed.
        """
        sizes = self.sizes if fragment is None else [self.sizes[i] for i in self.numbers(fragment)]
        if isinstance(message, WithRows):
            return [*parts_of(message.vector, sizes), *message.parts()], _keep_nothing
        if self.tables:
            raise UserError(
                "with common.Embedding, a push sends `local.gradient`, or a multiple of it, which has the gradients of rows, "
                f"as in {SCHEMES}; for other schemes use keras.layers.Embedding, whose whole table is on every worker"
            )
        if self.compression is None or self.compression.push == "none":
            return parts_of(message, sizes), _keep_nothing
        flag = f"--compress={self.compression.push}"
        if (sender := worker()) is None:
            raise UserError(f"{flag} needs to know the worker that sends: build the steps with `common.scheme.build_steps`")
        packing = Packing(self.compression, sizes, sender, number_of_packed, gives)
        with tf.control_dependencies(made_with(sender, "take") if gives else []):
            parts = parts_of(message, sizes, packing)
        if not packing.packed:
            raise UserError(f"{flag} is for a vector [{sum(sizes)}] of float32, and this scheme sends a message without one")
        return parts, packing.keep

    def sparse(self, vector, chunk_size, top, value_bits):
        """Returns a message of few bytes, made of a vector `[size]`: each chunk's largest values, rounded, and their places.

        `unpacked()` of it is the vector that arrives. The vector is cut for the ps first, and each piece into chunks.

        Args:
          vector: float32.
          chunk_size, top, value_bits: see `common.scheme.pack_sparse`.
        """
        pieces = tf.split(vector, self.sizes) if len(self.sizes) > 1 else [vector]
        return PackedPieces([pack_sparse(piece, chunk_size, top, value_bits) for piece in pieces])

    def push(self, optimizer, message, at_ps=None):
        """x̃ ← optimizer(x̃, gradient) on the ps; counts one update. One message to each ps.

        TensorFlow applies it to each piece as one indivisible operation; no lock spans several pieces, or a pull and a push.
        The optimizer's slots live beside their piece of x̃ and are saved with it.

        Args:
          optimizer: a `tf.train.Optimizer` that works element by element.
          message: what is sent, see `common.scheme.parts_of`; the gradient `[size]`, most simply.
          at_ps: function of a part of the message that has arrived and a `common.scheme.AtUpdate`; returns this piece of the
            gradient, float32. No lock keeps others out meanwhile.
        """
        optimizer = self.optimizers.use(optimizer)

        def apply(i, piece, part):
            return self.apply(optimizer, [(gradient_of(part, at_ps, AtUpdate(self, i)), piece)])

        parts, keep = self.parts(message)
        step = self._update(parts, keep(), apply)
        check_pieces(optimizer, self.targets)
        return step

    def add(self, difference):
        """x̃ ← x̃ + difference on the ps, a tensor `[size]`; counts one update. One message to each ps; indivisible as a push.

        With `--compress` x̃ changes by what is sent of it, and x keeps the rest: x ← x + rest. So yield it together with
        `local.add(-difference)`.
        """
        parts, keep = self.parts(difference, gives=True)
        kept = keep()
        done = ((worker(), "give"),) if kept else ()
        return self._update(parts, kept, lambda i, piece, part: piece.assign_add(part, read_value=False), done)

    def _update(self, parts, kept, apply, done=()):
        """Calls `apply(i, piece, part)` for each piece i of x̃ and what has arrived there of a message; counts one update."""
        sent, applied = [tensor.op for part in parts for tensor in tensors_of(part)], []
        with tf.control_dependencies(None):  # what went before on the worker reaches the ps with its part
            for i, (piece, part) in enumerate(zip(self.targets, parts, strict=True)):
                if any(isinstance(each, Packed) for each in tf.nest.flatten(part, expand_composites=True)):
                    with tf.device(piece.device):
                        part = arrived(part)
                # On that ps the learning rate, too, or it would be a message.
                with tf.device(piece.device), tf.control_dependencies(before_write(piece.device)):
                    is_scheduled = self.schedule is not None and piece.device == self.step.device
                    applied.append((self._scheduled(apply) if is_scheduled else apply)(i, piece, part))
            count, updated = self.count([op for op in applied if op.device == self.step.device])
        return Step((*sent, *kept, *applied, count), updated=updated, done=done)

    def _scheduled(self, apply):
        """Returns `apply` with the learning rates of the global step that the part of a message finds.

        On another ps than the step's they are those of the step that the worker pulled last, which it sends: one ps does not
        ask another.
        """

        def scheduled(i, piece, part):
            part = arrived(part)
            with tf.control_dependencies([tensor.op for tensor in tensors_of(part)]):
                factor = self.schedule(self.step.read_value())
            with factor_is(factor):
                return apply(i, piece, part)

        return scheduled

    def apply(self, optimizer, pairs):
        """piece ← optimizer(piece, gradient) for pairs of a gradient and its piece, where they are; returns the operation.

        With weight decay λ it is piece ← piece − η λ piece before, no part of the gradient: AdamW, if the optimizer is Adam
        (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101).
        """
        if self.tables:
            return self._apply_with_rows(optimizer, pairs)
        if self.decay is None:
            return optimizer.apply_gradients(pairs)
        self.has_decayed, decayed, here = True, [], []
        for gradient, piece in pairs:
            with tf.device(piece.device):
                here.append(arrived(gradient))
                with tf.control_dependencies([tensor.op for tensor in tensors_of(here[-1])]):  # which may depend on the piece
                    decayed.append(piece.assign_sub(self.decay * piece.read_value(), read_value=False))
        with tf.control_dependencies(decayed):
            return optimizer.apply_gradients([(gradient, piece) for gradient, (_, piece) in zip(here, pairs, strict=True)])

    def make_slots(self, optimizer, pairs):
        """Makes what an optimizer keeps beside its pieces, as under a condition that is not possible: by what is never run."""
        if not self.tables:
            return optimizer.apply_gradients(pairs)
        of_vector, of_rows = self._by_kind(pairs)
        optimizer.apply_gradients(of_vector if self.optimizer_of_rows else pairs)
        if self.optimizer_of_rows:
            self.optimizer_of_rows.apply_gradients([(gradient, piece) for gradient, piece, _ in of_rows])

    def _by_kind(self, pairs):
        """Returns the pairs of x̃, and triples of a gradient, its piece of a table, and the table."""
        owner = {piece.ref(): table for table in self.tables for piece in table.pieces}
        return (
            [pair for pair in pairs if pair[1].ref() not in owner],
            [(gradient, piece, owner[piece.ref()]) for gradient, piece in pairs if piece.ref() in owner],
        )

    def _apply_with_rows(self, optimizer, pairs):
        """As `apply`, where some of the pairs are pieces of tables, and `tf.IndexedSlices` of their rows."""
        own = self.optimizer_of_rows or optimizer
        if type(own).__name__ not in ROW_BY_ROW_ON_PS:
            raise UserError(
                f"{type(own).__qualname__} changes every row of a table (common.Embedding) at each update: give "
                "--table_optimizer=sgd, adagrad or rowwise_adagrad, which change only rows that have a gradient"
            )
        if self.decay is not None:
            raise UserError("--weight_decay changes every row of a table (common.Embedding) at each update: leave it out")
        of_vector, of_rows = self._by_kind(pairs)
        applied = [optimizer.apply_gradients(of_vector)] if of_vector else []
        applied += [table.apply(own, gradient, piece) for gradient, piece, table in of_rows]
        return applied[0] if len(applied) == 1 else tf.group(*applied)

    def count(self, after):
        """Counts one update after these operations; returns the operation, and the global step that it makes."""
        with tf.device(self.step.device), tf.control_dependencies(after):
            # Adds one and returns the old value, as one indivisible operation; assign_add is one and a read is another.
            count = tf.raw_ops.ResourceCountUpTo(resource=self.step.handle, limit=tf.int64.max, T=tf.int64)
            return count.op, count + 1

    def exact(self, local, remember, threshold=None):
        """Returns the `common.scheme.Exact` of this worker: pull and push as indivisible actions over all ps tasks.

        Args:
          local: this worker's `common.scheme.LocalParameters`.
          remember: what the ps tasks remember of a pull until the push, "step" or "value".
          threshold: with "step", a push of this staleness or more is thrown away. None throws nothing away.
        """
        return self._only("exact", Exact, local, remember, *([] if threshold is None else [threshold]))

    def dynamic(self, local, most):
        """Returns the `common.scheme.Dynamic` of this worker: it makes `most` local steps, or fewer if others are faster."""
        return self._only("dynamic", Dynamic, local, most)

    def count_local_steps(self):
        """From now on `local_steps` counts; it is saved with x̃."""
        if self.local_steps is None:
            with tf.device(self.step.device), tf.control_dependencies(None):
                zero = tf.zeros([], tf.int64)
                self.local_steps = tf.get_variable("local_steps", initializer=zero, trainable=False, use_resource=True)

    def count_dropped(self):
        """From now on `dropped` counts."""
        if self.dropped is None:
            with tf.device(self.step.device), tf.control_dependencies(None):
                zeros = tf.zeros([2], tf.int64)
                self.dropped = tf.get_variable("gradients_dropped", initializer=zeros, trainable=False, use_resource=True)

    def drop(self, number):
        """Counts so many more dropped gradients, an int64 scalar on the ps of the global step; returns the operation."""
        return self.dropped.assign_add(tf.stack([number, tf.zeros_like(number)]), read_value=False)

    def pace(self, local, staleness):
        """Returns the `common.scheme.Pace` of this worker: it waits when it is more than `staleness` ticks ahead."""
        return self._only("waits", Pace, local, staleness)

    def together(self, local, backup_workers=0, mean=True):
        """Returns the `common.scheme.Together` of this worker: an update is made of the gradients of all but some workers."""
        return self._only("waits", Together, local, backup_workers, mean)

    def ring(self, local):
        """Returns the `common.scheme.Ring` of this worker: all workers average what they have among themselves.

        Raises:
          UserError: with `--compress` or `--compress_pull`, since values are added up on their way.
        """
        if self.compression is not None:
            raise UserError("--compress and --compress_pull are for messages to and from a ps; center.ring has none")
        return self._only("waits", Ring, local)

    def clocks(self, local, staleness=0, quorum=None):
        """Returns the clocks by which workers wait for each other, see `common.core.Clocks`."""
        return Clocks(local.num_workers, self.lock, staleness, quorum, begin=local.begin_workers)

    def waits(self, local):
        """Returns how this worker waits for others, a `Pace`, `Together` or `Ring`; None if it goes at its own pace."""
        return self._partners.get(("waits", local.name), (None,))[-1]

    def threshold(self, local):
        """Returns from which staleness on a push of this worker is thrown away; None if none is."""
        exact = self._partners.get(("exact", local.name), (None,))[-1]
        return exact and exact.threshold

    def _only(self, what, kind, local, *arguments):
        """The one of its kind that a worker has; a scheme asks for it in every round again."""
        if (what, local.name) not in self._partners:
            self._partners[what, local.name] = kind, arguments, kind(self, local, *arguments)
        known, before, thing = self._partners[what, local.name]
        if (known, before) != (kind, arguments):
            calls = (f"center.{k.__name__.lower()}(local{''.join(f', {a!r}' for a in args)})"
                     for k, args in ((known, before), (kind, arguments)))  # fmt: skip
            raise UserError("a scheme uses one of these, with the same arguments everywhere, not both: " + " and ".join(calls))
        return thing


def _keep_nothing(counts=None):
    return []


def fragments_of(settings):
    """Returns into how many fragments the global parameters are cut: what a scheme's flag `--fragments` says, else one."""
    return getattr(settings, "fragments", 1)


def joined(values):
    """Returns tensors as one."""
    return tf.concat(values, axis=0) if len(values) > 1 else values[0]
