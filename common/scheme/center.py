"""x̃, the global parameters of a model on the ps: read, push, add, slots and barriers.

They are one flat vector, so that there is one message per ps and direction, not one per variable, and any elementwise optimizer
works on it.
"""

import contextlib
from typing import Any

from common import tf
from common.core import ROOM, Clocks, Lock, UserError
from common.scheme import update
from common.scheme.atomic import Exact
from common.scheme.barriers import Pace, Ring, Together
from common.scheme.compression import PackedPieces, Packing, pack_sparse, read_packed
from common.scheme.local_rows import WithRows
from common.scheme.local_steps import Dynamic
from common.scheme.messages import AtUpdate, gradient_of, parts_of
from common.scheme.optimizers import Optimizers, check_pieces
from common.scheme.sharded_tables import Table, find_on_ps
from common.scheme.steps import Step, before_read, made_with, number_of_packed, worker
from common.scheme.tables import SCHEMES
from common.scheme.unbounded import Vocabulary

AVERAGE = "average"  # name of the moving average in checkpoints


class GlobalParameters:
    """x̃: the trainable variables of a model as one flat float32 vector, cut evenly over the ps tasks.

    Args:
      initial_parameters: array `[size]`. It is fed when the variable is initialized (`init_feed_dict`); as a part of the
        graph it would travel with every graph, and break at 2 GB.
      num_ps: pieces to cut the vector into.
      device_fn: puts piece i on ps task i; None puts all on this process.
      schedule: learning rate schedule, a `common.scheme.Schedule` or another function of the global step; None for none.
      compression: a `common.scheme.Compression` of messages in both directions; None for none.
      fragments: number of parts of the vector that are exchanged separately, see `fragments_of`; each lies on all ps tasks.
      tables: the `common.scheme.Spec`s of tables beside the vector, whose rows workers pull and push.
      max_rows: row limit of each unbounded table, see `common.scheme.unbounded`.
      groups: the `common.scheme.Groups` of the parameters; None for one group.
      ema: β of the moving average; None for none.

    Attributes:
      size: of the vector.
      pieces, sizes: its shards, variables, one per fragment on each ps, and their sizes.
      tables: the `common.scheme.Table`s.
      average: the pieces of a, the moving average of x̃: initially x̃, and a ← β a + (1 − β) x̃ in each update of a piece; empty
        without `ema`.
      targets: all shards that an update changes: `pieces`, then the pieces of the tables.
      find: row lookup on the ps, see `common.scheme.find_on_ps`; None without tables.
      fragments: as above.
      step: the global step, a variable: the number of updates.
      lock: lock for actions that must be atomic over all ps tasks.
      optimizers: the `common.scheme.Optimizers` that change x̃.
      decay: η λ of weight decay, see `update.apply`; None for none.
      groups: as above.
      groups_of_update: those by which an update changes x̃, see `common.scheme.groups`; None for one group.
      has_decayed: whether there is an update by an optimizer with decay or groups.
      present: the current workers of an elastic run, a `common.cluster.Present`; None in other runs.
      local_steps: number of local steps in all updates so far, an int64 variable; None if it is the same for every update, see
        `dynamic`. In an elastic synchronous run it counts gradients.
      dropped: the number of dropped gradients and a correction of their samples, see `common.core.Keeper`, an int64 variable
        `[2]`; None if the scheme never drops gradients.
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
        groups=None,
        ema=None,
    ):
        self.schedule, self.decay, self.has_decayed = schedule, None, False
        self.groups, self.groups_of_update = groups, None
        self.members: Any = None  # a `common.cluster.membership.Members`, in an elastic run: `common.training` sets it
        self.compression, self.fragments, self.local_steps = compression, fragments, None
        self.dropped: Any = None
        self.size = len(initial_parameters)
        if self.size < fragments:
            raise UserError(f"--fragments={fragments} is more than the {self.size} parameters of the model: give fewer")
        feed = tf.placeholder(tf.float32, [self.size], "initial_parameters")
        # Piece i lies on ps i mod num_ps; the pieces of a fragment are consecutive.
        self._num_pieces = fragments * min(num_ps, self.size // fragments)
        # Called for each piece; only partition_info knows where the piece begins.
        first = lambda shape, dtype=None, partition_info=None: tf.slice(feed, partition_info.var_offset, shape)  # noqa: E731
        self.pieces = self._pieces("parameters", first, device_fn)
        self.ema, self.average = ema, [] if ema is None else self._pieces(AVERAGE, first, self._beside())
        self.sizes = [int(piece.shape[0]) for piece in self.pieces]
        if tables and ema is not None:
            raise UserError("--ema: rows of tables (common.Embedding) have no average: use keras.layers.Embedding")
        if tables and compression is not None:
            raise UserError("--compress: rows of tables (common.Embedding) are sent uncompressed: leave it out")
        kinds = [(spec, (Table, ()) if spec.rows else (Vocabulary, (max_rows,))) for spec in tables]
        self.tables = [kind(spec, num_ps, device_fn, *more) for spec, (kind, more) in kinds]
        self.optimizer_of_rows = None  # overrides the scheme's optimizer for all tables; learning_rates.py sets it
        begins = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self._places = {p.ref(): slice(i, i + n) for p, i, n in zip(self.pieces, begins, self.sizes, strict=True)}
        self.targets = self.pieces + [piece for table in self.tables for piece in table.pieces]
        self.find = find_on_ps(self.tables) if tables else None
        with tf.device(device_fn):
            self.step = tf.train.get_or_create_global_step()
        self.init_feed_dict = {feed: initial_parameters}
        self.optimizers, self.lock = Optimizers(), Lock(self.step.device, "parameters")
        self._slots: dict[str, list[Any]] = {}
        self._partners: dict[Any, Any] = {}

    def _pieces(self, name, initializer, device_fn):
        """Returns the pieces of a new global vector `[size]`, saved unsharded, so a restored run may have another num_ps."""
        partitioner = tf.fixed_size_partitioner(self._num_pieces)
        with tf.device(device_fn):
            return list(tf.get_variable(name, [self.size], partitioner=partitioner, initializer=initializer, use_resource=True))

    def slot(self, name):
        """Returns the pieces of a global slot vector `[size]`, initially zero, stored beside x̃ and saved with it."""
        if name not in self._slots:
            self._slots[name] = self._pieces(name, tf.zeros_initializer(), self._beside())
        return self._slots[name]

    def _beside(self):
        """Returns a device function that puts further pieces beside those of x̃."""
        devices = iter([piece.device for piece in self.pieces])
        return lambda op: next(devices) if op.type == "VarHandleOp" else ""

    def read_average(self):
        """Returns the present parameters for evaluation `[size]`: the average with `ema`, otherwise x̃; and the global step."""
        value, step = self.read()
        return (joined([piece.read_value() for piece in self.average]) if self.average else value), step

    def fragment(self, p):
        """Returns the slice of fragment p in a vector `[size]`."""
        before = sum(self.sizes[: self.numbers(p).start])
        return slice(before, before + sum(self.sizes[i] for i in self.numbers(p)))

    def numbers(self, p):
        """Returns the piece numbers of fragment p, a range.

        Raises:
          UserError: if there is no such fragment.
        """
        if not 0 <= p < self.fragments:
            raise UserError(f"there is no fragment {p}: the parameters have {self.fragments} fragments (--fragments)")
        count = len(self.pieces) // self.fragments
        return range(p * count, (p + 1) * count)

    def place(self, piece):
        """Returns the slice of a piece in a vector `[size]`."""
        return self._places[piece.ref()]

    def average_of(self, piece):
        """Returns the average of a piece."""
        return next(average for average, other in zip(self.average, self.pieces, strict=True) if other is piece)

    def keep(self, values):
        """Returns variables beside the global step with these initial values; they are saved with x̃.

        They hold the untrained state of a model, such as moving means, which would be lost with the chief if it stayed there.
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
          packed: whether `--compress_pull` applies: for training, not for evaluation or checkpoints.
          fragment: number of the only fragment to read; None for all.
          before: function of a device that returns the operations that must end before a read there.
          tell: whether to return the ps operations as a third value, for use as control dependencies.
        """
        # Pinned to its ps: otherwise the value would travel to the worker and back.
        with tf.device(self.step.device), tf.control_dependencies(None), tf.control_dependencies(before(self.step.device)):
            step = self.step.read_value()
        values, packed = [], packed and self.compression is not None and self.compression.pull != "none"
        pieces = self.pieces if fragment is None else [self.pieces[i] for i in self.numbers(fragment)]
        for piece in pieces:
            first = [*before(piece.device), *([step] if piece.device == self.step.device else [])]
            # Without a device, TensorFlow places the result of `read_value` at its consumer.
            place: Any = tf.device(piece.device) if packed or tell else contextlib.nullcontext()
            with tf.control_dependencies(None), tf.control_dependencies(first), place:
                values.append(piece.read_value())
        whole = joined([here for here, _ in self.packed(values, pieces)] if packed else values)
        return (whole, step, [step.op, *(value.op for value in values)]) if tell else (whole, step)

    def count_workers(self):
        """Returns the number of `present` workers, a float32 scalar, read when `read` reads x̃. One small message."""
        device = self.step.device
        with tf.device(device), tf.control_dependencies(None), tf.control_dependencies(before_read(device)):
            return tf.cast(self.members.count(), tf.float32)

    def packed(self, values, pieces=None):
        """Packs pieces of x̃ on their ps by `--compress_pull`; returns pairs of the unpacked value, on worker and ps."""
        if self.compression is None or self.compression.pull == "none":
            return [(value, value) for value in values]
        found = []
        for i, (piece, value) in enumerate(zip(pieces or self.pieces, values, strict=True)):
            with tf.device(piece.device), tf.control_dependencies(None):  # no dependency on the worker
                sent = read_packed(self.compression.pull, value, i)
                there = sent.unpacked()
            found.append((sent.unpacked(), there))
        return found

    def parts(self, message, gives=False, fragment=None):
        """Shards a message, see `common.scheme.parts_of`, and compresses it by `--compress`.

        Args:
          message: as in `common.scheme.parts_of`.
          gives: whether x changes by the sent message, too, see `common.scheme.Packing`.
          fragment: number of the message's fragment; None for all of x̃.

        Returns:
          The parts, and a function that returns the worker's operations for error feedback, see `common.scheme.Packing.keep`.

        Raises:
          UserError: if the message has no vector to compress.
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
        """Returns a sparse message of a vector `[size]`: each chunk's largest values, quantized, and their indices.

        Its `unpacked()` is the vector as it arrives. The vector is sharded over the ps first, then each piece into chunks.

        Args:
          vector: float32.
          chunk_size, top, value_bits: see `common.scheme.pack_sparse`.
        """
        pieces = tf.split(vector, self.sizes) if len(self.sizes) > 1 else [vector]
        return PackedPieces([pack_sparse(piece, chunk_size, top, value_bits) for piece in pieces])

    def push(self, optimizer, message, at_ps=None):
        """x̃ ← optimizer(x̃, gradient) on the ps; counts one update. One message to each ps.

        TensorFlow applies it atomically to each piece; no lock spans several pieces, or a pull and a push. The optimizer's
        slots live beside their piece of x̃ and are saved with it.

        Args:
          optimizer: an elementwise `tf.train.Optimizer`.
          message: a message, see `common.scheme.parts_of`; in the simplest case the gradient `[size]`.
          at_ps: function of an arrived part of the message and a `common.scheme.AtUpdate`; returns this piece of the gradient,
            float32. It runs without a lock.
        """
        optimizer = self.optimizers.use(optimizer)

        def change(i, part):
            return update.apply(self, optimizer, [(gradient_of(part, at_ps, AtUpdate(self, i)), self.targets[i])])

        parts, keep = self.parts(message)
        step = self._update(parts, keep(), change)
        check_pieces(optimizer, self.targets)
        return step

    def add(self, difference):
        """x̃ ← x̃ + difference on the ps, a tensor `[size]`; counts one update. One message to each ps; as atomic as a push.

        With `--compress` x̃ changes by the compressed difference, and x keeps the rest: x ← x + rest. So yield it together
        with `local.add(-difference)`.
        """
        parts, keep = self.parts(difference, gives=True)
        kept = keep()
        done = ((worker(), "give"),) if kept else ()
        return self._update(parts, kept, self._add_part, done)

    def _add_part(self, i, part):
        """piece i ← piece i + part, by the factors of its groups; then its average, with `ema`. Returns the operation."""
        groups, piece = self.groups_of_update, self.pieces[i]
        if groups is not None and groups.scales:
            part = groups.rates(self.place(piece)) * part
        return update.averaged(self, [piece], lambda: piece.assign_add(part, read_value=False))

    def _update(self, parts, kept, change, done=()):
        """Returns the step of an update without a lock, see `update.update_at_once`."""
        with tf.control_dependencies(None):  # the part itself carries the dependency on the worker's earlier operations
            operations, updated = update.update_at_once(self, parts, change)
        return Step((*update.operations_of(parts), *kept, *operations), updated=updated, done=done)

    def exact(self, local, remember, threshold=None):
        """Returns the `common.scheme.Exact` of this worker: pull and push as atomic actions over all ps tasks.

        Args:
          local: this worker's `common.scheme.LocalParameters`.
          remember: "step" or "value", kept by the ps tasks from a pull until the push.
          threshold: with "step", the staleness from which a push is dropped. None drops no push.
        """
        return self._only("exact", Exact, local, remember, *([] if threshold is None else [threshold]))

    def dynamic(self, local, most):
        """Returns the `common.scheme.Dynamic` of this worker: `most` local steps, or fewer if other workers are faster."""
        return self._only("dynamic", Dynamic, local, most)

    def count_local_steps(self):
        """Starts counting in `local_steps`, which is saved with x̃."""
        if self.local_steps is None:
            with tf.device(self.step.device), tf.control_dependencies(None):
                zero = tf.zeros([], tf.int64)
                self.local_steps = tf.get_variable("local_steps", initializer=zero, trainable=False, use_resource=True)

    def count_dropped(self):
        """Starts counting in `dropped`."""
        if self.dropped is None:
            with tf.device(self.step.device), tf.control_dependencies(None):
                zeros = tf.zeros([2], tf.int64)
                self.dropped = tf.get_variable("gradients_dropped", initializer=zeros, trainable=False, use_resource=True)

    def drop(self, number):
        """Adds a number, an int64 scalar on the ps of the global step, to the dropped gradients; returns the operation."""
        return self.dropped.assign_add(tf.stack([number, tf.zeros_like(number)]), read_value=False)

    def pace(self, local, staleness):
        """Returns the `common.scheme.Pace` of this worker: it waits when it is more than `staleness` ticks ahead."""
        return self._only("waits", Pace, local, staleness)

    def together(self, local, backup_workers=0, mean=True):
        """Returns the `common.scheme.Together` of this worker: synchronous updates, optionally with backup workers."""
        return self._only("waits", Together, local, backup_workers, mean)

    def ring(self, local):
        """Returns the `common.scheme.Ring` of this worker: an all-reduce among the workers.

        Raises:
          UserError: with `--compress` or `--compress_pull`, since an all-reduce adds values up on their way.
        """
        if self.compression is not None:
            raise UserError("--compress and --compress_pull are for messages to and from a ps; center.ring has none")
        if self.ema is not None:
            raise UserError("--ema: the average is on the ps, but with center.ring they get x̃ only now and then: leave it out")
        return self._only("waits", Ring, local)

    def clocks(self, local, staleness=0, quorum=None):
        """Returns the clocks of the workers' barriers, see `common.core.Clocks`."""
        return Clocks(local.num_workers, self.lock, staleness, quorum, begin=local.begin_workers)

    def waits(self, local):
        """Returns this worker's barrier, a `Pace`, `Together` or `Ring`; None if it never waits for others."""
        return self._partners.get(("waits", local.name), (None,))[-1]

    def threshold(self, local):
        """Returns the staleness from which a push of this worker is dropped; None if no push is dropped."""
        exact = self._partners.get(("exact", local.name), (None,))[-1]
        return exact and exact.threshold

    def _only(self, what, kind, local, *arguments):
        """Returns the worker's cached instance of this kind, since a scheme asks for it in every round."""
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
    """Returns the number of fragments of the global parameters: the scheme's flag `--fragments`, else one."""
    return getattr(settings, "fragments", 1)


def joined(values):
    """Returns the concatenated tensors."""
    return tf.concat(values, axis=0) if len(values) > 1 else values[0]
