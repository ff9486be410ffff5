"""The problem on which schemes are compared with NumPy, and what else their tests share.

The walk of a scheme is a generator `walk(problem, i)`: the life of worker i, written again from the formula. At a yield another
worker may do its steps.
"""

import math
from typing import Any

import numpy as np

from common import notebook, tf
from common.steps import is_on_ps

RATE = 0.05  # step size of SGD, on worker and ps


class Problem:
    """A linear regression, y = w x + b with three w; x̃ and what the ps knows. Workers are functions of it, see below.

    Each worker has batches of its own, mostly seven; when it has seen them all it begins anew.
    """

    def __init__(self, start, batches, hp, schedule=lambda step: 1.0):
        self._schedule, self._known = schedule, [0, 0]  # of each worker, the version that it pulled last
        self.start = self.center = start.astype(float)
        self.batches, self.hp = batches, hp
        self.version, self.log = 0, []  # number of updates; of each its worker, its staleness and the version after it
        self.dropped = []  # of each gradient that is thrown away its worker, and the version
        self.own = [0, 0]  # updates by each worker that its x lacks
        self._ahead = [(self.center, 0)] * 2  # with hp.overlap, x̃ and its version at the pull of each before
        self.slots = np.full(4, 0.1)  # of Adagrad, which begins there in TensorFlow
        self.mean_square = np.zeros(4)
        self.momentum, self.sum = np.zeros(4), np.zeros(4)
        self.present = 2  # how many workers there are
        self._used = [0, 0]

    def factor(self, worker=None):
        """The factor of the learning rate: on this worker, or at an update on the ps."""
        return self._schedule(self.version if worker is None else self._known[worker])

    def decayed(self, x, factor, side, rate=RATE):
        """The share of x that weight decay takes away in a step, if it is on this side, "ps" or "worker"."""
        is_here = getattr(self.hp, "optimizer_on", "ps") == side
        return rate * factor * getattr(self.hp, "decay", 0) * x if is_here else 0.0

    def gradient(self, worker, parameters):
        """The gradient of the mean squared error of this worker's next batch."""
        x, y = (part[worker][self._used[worker] % len(part[worker])].astype(float) for part in self.batches)
        self._used[worker] += 1
        residual = x @ parameters[:3, None] + parameters[3] - y
        return 2 * np.append(x.T @ residual, residual.sum()) / len(x)

    def descend(self, worker, x):
        """T steps of SGD from x: returns their gradients."""
        gradients = []
        for _ in range(self.hp.window):
            gradients.append(self.gradient(worker, x))
            x = x - self.factor(worker) * RATE * gradients[-1]
        return gradients

    def pull(self, worker):
        """Returns x̃ and its version; with hp.overlap as they were at this worker's pull before, at first those of the start."""
        found = self.center, self.version
        if getattr(self.hp, "overlap", False):
            found, self._ahead[worker] = self._ahead[worker], found
        self._known[worker] = found[1]
        self.own[worker] = sum(by == worker and version > found[1] for by, _, version in self.log)
        return found

    def update(self, worker, pulled, change):
        """x̃ ← x̃ + change."""
        self.center = self.center + change - self.decayed(self.center, self.factor(), "ps")
        self.version += 1
        self.log.append((worker, self.version - 1 - pulled - self.own[worker], self.version))
        self.own[worker] += 1


class Adam:
    """Adam's moments: of the ps, or of a worker."""

    def __init__(self):
        self._m, self._v, self._steps = np.zeros(4), np.zeros(4), 0

    def __call__(self, g, rate):
        """The change that Adam makes of a gradient."""
        self._steps += 1
        self._m, self._v = 0.9 * self._m + 0.1 * g, 0.999 * self._v + 0.001 * g**2
        corrected = rate * np.sqrt(1 - 0.999**self._steps) / (1 - 0.9**self._steps)
        return -corrected * self._m / (np.sqrt(self._v) + 1e-8)


def messages_in_a_row(fetches):
    """Returns how many messages between worker and ps have to come one after the other: the longest way through the graph."""
    longest: dict[Any, int] = {}

    def way(op):
        todo = [op]
        while todo:
            before = [tensor.op for tensor in todo[-1].inputs] + list(todo[-1].control_inputs)
            if new := [other for other in before if other not in longest]:
                todo += new
                continue
            op = todo.pop()
            there = [longest[other] + (is_on_ps(place(other)) != is_on_ps(place(op))) for other in before]
            longest[op] = max(there, default=0)
        return longest[op]

    def place(op):  # what uses a variable runs where that is
        return next((tensor.op for tensor in op.inputs if tensor.dtype == tf.resource), op)

    return max(way(getattr(each, "op", each)) for each in tf.nest.flatten(fetches))


def messages(session, fetches):
    """Returns between which jobs the messages of one call go, as pairs (from, to)."""
    sent = notebook.messages(session, fetches)
    return [tuple(task.split("/task")[0] for task in (message.sender, message.receiver)) for message in sent]


def sparse_again(vector, chunk_size, top, value_bits):
    """What a vector is when `common.compression.pack_sparse` has packed it, and it is unpacked."""
    count = math.ceil(len(vector) / chunk_size)
    size = math.ceil(len(vector) / count)
    chunks = np.append(vector, np.zeros(count * size - len(vector))).reshape(count, size)
    places = np.argsort(-np.abs(chunks), axis=1, kind="stable")[:, : max(1, round(top * size / chunk_size))]
    values = np.take_along_axis(chunks, places, axis=1)
    if value_bits < 32:
        levels = 2**value_bits
        step = 6 * np.std(values, ddof=min(1, values.size - 1)) / levels
        q = np.clip(np.round((values - values.mean()) / step) + levels // 2, 0, levels - 1) if step else np.zeros_like(values)
        for level in set(q.flat):
            values[q == level] = values[q == level].mean()
    arrived = np.zeros_like(chunks)
    np.put_along_axis(arrived, places, values, axis=1)
    return arrived.flat[: len(vector)]
