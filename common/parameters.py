"""The parameters of a model: global ones on the ps, a local copy on a worker; pull, push, window.

A scheme is a generator function `scheme(center, local, hp)`. It gets the global parameters x̃ (`GlobalParameters`), this
worker's local ones x (`LocalParameters`) and the hyperparameters, and yields the operations of one round in their order: a
step begins when the one before has ended. What a later step needs of an earlier one stays in local variables, so the steps
can be run as one call (`build_rounds`) or, in a notebook or a test, one at a time and in any interleaving (`build_steps`).

Both are one flat vector: one message a ps and direction instead of one a variable, and any elementwise optimizer works on
it as it stands.
"""

from typing import Any, NamedTuple

import numpy as np

from common import tf
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
        with tf.device(device_fn):
            feed = tf.placeholder(tf.float32, [self.size], "initial_parameters")
            variable = tf.get_variable(
                "parameters",
                [self.size],
                partitioner=tf.fixed_size_partitioner(min(num_ps, self.size)),
                # Called for each piece; only partition_info knows where the piece begins.
                initializer=lambda shape, dtype=None, partition_info=None: tf.slice(feed, partition_info.var_offset, shape),
                use_resource=True,
            )
            self.step = tf.train.get_or_create_global_step()
        self.pieces = list(variable)
        self.init_feed_dict = {feed: initial_parameters}
        self.previous: list[Any] = []  # the step before the one that is being built, see build_rounds
        self._optimizers: dict[Any, Any] = {}
        self.updated: Any = None  # set by push: the global step after this worker's update

    def _after_previous(self, device):
        """Control dependencies of a read on `device`: what went before, there or on a worker.

        Not what went before on another ps: that would be a message between ps tasks, for an order that no scheme needs.
        """
        return tf.control_dependencies([op for op in self.previous if op.device == device or "/job:ps" not in op.device])

    def read(self):
        """Returns the present x̃ as one tensor `[size]`, and the global step, read on its ps just before. One message a ps."""
        with tf.control_dependencies(None), self._after_previous(self.step.device):
            step = self.step.read_value()
        values = []
        for piece in self.pieces:
            before = [step] if piece.device == self.step.device else []
            with tf.control_dependencies(None), self._after_previous(piece.device), tf.control_dependencies(before):
                values.append(piece.read_value())
        return tf.concat(values, axis=0) if len(values) > 1 else values[0], step

    def push(self, optimizer, gradient):
        """x̃ ← optimizer(x̃, gradient) on the ps; counts one update. One message to each ps.

        TensorFlow applies it to each piece as one indivisible operation; no lock spans several pieces, or a pull and a push.
        The optimizer's slots live beside their piece of x̃ and are saved with it.

        Args:
          optimizer: a `tf.train.Optimizer` that works element by element.
          gradient: tensor `[size]`.
        """
        optimizer = _same_as_before(optimizer, self._optimizers)
        sizes = [int(piece.shape[0]) for piece in self.pieces]
        parts = tf.split(gradient, sizes) if len(sizes) > 1 else [tf.identity(gradient)]
        applied = []
        with tf.control_dependencies(None):  # what went before reaches the ps with its part
            for piece, part in zip(self.pieces, parts, strict=True):
                with tf.device(piece.device):  # the learning rate too, or it would be a message of its own
                    applied.append(optimizer.apply_gradients([(part, piece)]))
            on_step_ps = [op for op in applied if op.device == self.step.device]
            with tf.device(self.step.device), tf.control_dependencies(on_step_ps):
                # Adds one and returns the old value, as one indivisible operation; assign_add is one and a read is another.
                count = tf.raw_ops.ResourceCountUpTo(resource=self.step.handle, limit=tf.int64.max, T=tf.int64)
                self.updated = count + 1
        return [*applied, count.op]


class LocalParameters:
    """x: a worker's own copy of the parameters, and what its model needs to compute gradients there.

    Args:
      model: a `common.models.Model`.
      batches: gives the next samples, see `common.data.Batches`.
      name: variable scope; two workers in one process need two names.
    """

    def __init__(self, model, batches, name="local"):
        self.model, self.batches = model, batches
        self.init_feed_dict = dict(batches.init_feed_dict)
        with tf.variable_scope(name):
            self.value = local_variable("x", tf.zeros([model.size]))
            self.gradient = local_variable("gradient", tf.zeros([model.size]))
            self.state = []
            for i, value in enumerate(model.initial_state):
                feed = tf.placeholder(value.dtype, value.shape)
                self.init_feed_dict[feed] = value
                self.state.append(local_variable(f"state_{i}", feed))
        self._optimizers: dict[Any, Any] = {}
        self.pulled: Any = None  # set by pull: the global step at which x̃ was read
        self.loss: Any = None  # set by train: mean loss over the window

    def pull(self, center):
        """x ← x̃. One message from each ps."""
        value, self.pulled = center.read()
        return [self.value.assign(value, read_value=False)]

    def train(self, window, optimizer):
        """`window` local steps in one call: g ← gradient at x of the next batch's mean loss; x ← optimizer(x, g).

        The sum of the g, each taken where the walk then stood, is in `gradient` afterwards; the mean loss is `loss`.
        """
        indices = self.batches.next(window)
        optimizer = _same_as_before(optimizer, self._optimizers)

        def apply(g):
            with tf.variable_creator_scope(_make_local):  # its slots
                return optimizer.apply_gradients([(g, self.value)])

        def step(t, total, loss):
            step_loss, g = self._loss_and_gradient(*self.batches.samples(indices[t]))
            with tf.control_dependencies([g]):  # x is read before it is written
                applied = apply(g)
            with tf.control_dependencies([applied]):
                return t + 1, total + g, loss + step_loss

        if window == 1:
            loss, total = self._loss_and_gradient(*self.batches.samples(indices[0]))
            with tf.control_dependencies([total]):
                applied = [apply(total)]
        else:
            # An unrolled window would cost tens of seconds of graph optimization. An optimizer's slots cannot be
            # created inside the loop, hence the call beforehand, whose operation is never run.
            zeros = tf.zeros([self.model.size])
            apply(zeros)
            _, total, loss = tf.while_loop(lambda t, *_: t < window, step, (0, zeros, 0.0), parallel_iterations=1)
            loss, applied = loss / window, []
        self.loss = tf.identity(loss)
        return [self.gradient.assign(total, read_value=False), self.loss.op, *applied]

    def _loss_and_gradient(self, x, y):
        variables = self.model.split(self.value.read_value())
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


class Rounds(NamedTuple):
    """Some rounds of a scheme as one call of a session: what to fetch."""

    operations: Any
    loss: Any  # mean over the rounds
    steps: Any  # int64 [rounds, 2]: the global step at the pull, and after this worker's update


def build_steps(scheme, center, local, hp):
    """Returns the steps of one round, each a list of operations to be run on its own."""
    return list(scheme(center, local, hp))


def build_rounds(scheme, center, local, hp, rounds=1):
    """Returns `Rounds` that run the scheme's steps one after the other, `rounds` times over, in one call.

    A call costs as much as a message or two, so the fewer the better; its graph grows with the rounds.
    """
    losses, steps = [], []
    operations: list[Any] = []
    for _ in range(rounds):
        generator = scheme(center, local, hp)
        while True:
            with tf.control_dependencies(operations):
                center.previous = operations
                step = next(generator, None)
            if step is None:
                break
            operations = step
        losses.append(local.loss)
        steps += [local.pulled, center.updated]
    center.previous = []  # a read that is built later belongs to no round
    with tf.device(center.step.device):
        steps = tf.reshape(tf.stack(steps), [rounds, 2])  # there, to be one message
    return Rounds(operations, tf.add_n(losses) / np.float32(rounds), steps)
