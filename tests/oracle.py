"""Every scheme in NumPy, written again from its formula: `SCHEMES`, `TOGETHER` and `MORE`; and what else their tests share.

The oracle of a scheme is a generator `life(problem, i)`: the life of worker i. At a yield another worker may do its steps. A
worker that waits yields a function, which says whether it may go on.
"""

import math
import random
import types
from typing import Any, NamedTuple

import numpy as np

from common import tf
from common.cli import notebook
from common.scheme.steps import is_on_ps

RATE = 0.05  # step size of SGD, on worker and ps
WORKERS = 2  # the batches are of two
ROUNDS = 20  # of both together, in an order of a scheme in which nobody waits


class Problem:
    """A linear regression, y = w x + b with three w; x̃ and what the ps knows. Workers are functions of it, see below.

    Each worker has batches of its own, mostly seven; when it has seen them all it begins anew.
    """

    def __init__(self, start, batches, hp, schedule=lambda step: 1.0, present=WORKERS, apart=False):
        self._schedule, self._known = schedule, [0, 0]  # of each worker, the version that it pulled last
        self._apart = (
            apart  # whether there are three ps tasks, of which the others don't know the version; then worker 0 is alone
        )
        self.start = self.center = start.astype(float)
        self.batches, self.hp = batches, hp
        self.version, self.log = 0, []  # number of updates; of each its worker, its staleness and the version after it
        self.dropped = []  # of each gradient that is thrown away its worker, and the version
        self.own = [0, 0]  # updates by each worker that its x lacks
        self._ahead = [(self.center, 0)] * 2  # with hp.overlap, x̃ and its version at the pull of each before
        self.slots = np.full(4, 0.1)  # of Adagrad, which begins there in TensorFlow
        self.mean_square = np.zeros(4)
        self.momentum, self.sum = np.zeros(4), np.zeros(4)
        self.present = present  # how many workers there are
        self.given = {}  # by worker, of the present update of all together
        self.clocks = [0] * WORKERS
        self.adam, self.v = Adam(), np.zeros(4)  # v of a momentum
        self._used = [0, 0]

    def factor(self, worker=None):
        """The factor of the learning rate: on this worker, or at an update on the ps."""
        if worker is None and self._apart:  # the first ps has two of the four parameters
            return np.repeat([self._schedule(self.version), self._schedule(self._known[0])], 2)
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

    def contribute(self, worker, known, vector, apply):
        """Adds a vector to the update; the last one that is needed makes it, x̃ ← x̃ + apply(vectors)."""
        if known != self.version or worker in self.given:
            self.dropped.append((worker, self.version))
            return
        self.given[worker] = vector
        self.log.append((worker, 0, self.version + 1))
        if len(self.given) == self.present - getattr(self.hp, "backup_workers", 0):
            decayed = self.decayed(self.center, self.factor(), "ps", sum(getattr(self.hp, "learning_rates", [RATE])))
            self.center = self.center + apply(list(self.given.values())) - decayed
            self.version += 1
            self.given = {}


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

    def walk(self, p, i, x, steps):
        """Returns x after so many steps of AdamW of worker i."""
        for _ in range(steps):
            g, rate = p.gradient(i, x), p.factor(i) * p.hp.local_learning_rate
            x = x - p.decayed(x, p.factor(i), "worker", p.hp.local_learning_rate)
            x = x - rate * p.hp.weight_decay * x + self(g, rate)
        return x


def hogwild(p, i):
    while True:
        x, pulled = p.pull(i)
        yield
        gradients = p.descend(i, x)
        yield
        p.update(i, pulled, -RATE * p.factor() * sum(gradients))
        yield


def adagrad(x, slots, g, factor):
    """Returns what Adagrad makes of x and its slots."""
    slots = slots + g**2
    return x - RATE * factor * g / np.sqrt(slots), slots


def downpour_easy(p, i):
    while True:
        x, pulled = p.pull(i)
        yield
        a = sum(p.descend(i, x))
        yield
        new, p.slots = adagrad(p.center, p.slots, a, p.factor())
        p.update(i, pulled, new - p.center)
        yield


def downpour(p, i):
    n_push, n_fetch = p.hp.window, p.hp.n_fetch or p.hp.window
    a, slots, step = np.zeros(4), np.full(4, 0.1), 0
    while True:
        if step % n_fetch == 0:
            x, pulled = p.pull(i)
            yield
        g = p.gradient(i, x)
        a = a + g
        x, slots = adagrad(x, slots, g, p.factor(i))
        step += 1
        if step % n_push == 0 or step % n_fetch == 0:
            yield
        if step % n_push == 0:
            new, p.slots = adagrad(p.center, p.slots, a, p.factor())
            p.update(i, pulled, new - p.center)
            a = np.zeros(4)
            yield


def agn(p, i):
    while True:
        x, pulled = p.pull(i)
        yield
        gradients = p.descend(i, x)
        yield
        p.update(i, pulled, -RATE * p.factor() * np.mean(gradients, axis=0))
        yield


def dynamic_sgd(p, i):
    while True:
        x, pulled = p.pull(i)
        yield
        g = sum(p.descend(i, x))
        yield
        tau = p.version - pulled
        p.update(i, pulled, -RATE * p.factor() * g / (tau + 1))
        yield


def ringmaster_asgd(p, i):
    while True:
        x, pulled = p.pull(i)
        yield
        g = sum(p.descend(i, x))
        yield
        if p.version - pulled < p.hp.staleness_threshold:
            p.update(i, pulled, -RATE * p.factor() * g)
        else:
            p.dropped.append((i, p.version))
        yield


def dc_asgd(p, i):
    while True:
        x, pulled = p.pull(i)
        yield
        g = sum(p.descend(i, x))
        yield
        strength = p.hp.lambda0
        if p.hp.adaptive:
            p.mean_square = 0.95 * p.mean_square + 0.05 * g**2
            strength = strength / np.sqrt(p.mean_square + 1e-7)
        p.update(i, pulled, -RATE * p.factor() * (g + strength * g * g * (p.center - x)))
        yield


def aeasgd(p, i):
    x = p.start
    while True:
        for _ in range(p.hp.window):
            x = x - RATE * p.factor(i) * p.gradient(i, x) - p.decayed(x, p.factor(i), "worker")
        yield
        center, read = p.pull(i)
        e = p.hp.beta / p.present * (x - center)
        yield
        x = x - e
        p.update(i, read, e)
        yield


def aeamsgd(p, i):
    x, v = p.start, np.zeros(4)
    while True:
        for _ in range(p.hp.window):
            v = p.hp.momentum * v - RATE * p.factor(i) * p.gradient(i, x + p.hp.momentum * v)
            x = x + v - p.decayed(x, p.factor(i), "worker")
        yield
        center, read = p.pull(i)
        e = p.hp.beta / p.present * (x - center)
        yield
        x = x - e
        p.update(i, read, e)
        yield


def asynchronous_diloco(p, i):
    hp, adam = p.hp, Adam()
    n, c, beta = hp.buffer_size or hp.num_workers, hp.momentum_activation, hp.momentum
    while True:
        x, pulled = p.pull(i)
        yield
        start = x
        yield
        x = adam.walk(p, i, x, hp.window)
        yield
        delta, a = start - x, c
        p.sum = p.sum + delta
        if (p.version + 1) % n == 0:
            p.momentum, p.sum, a = beta * p.momentum + p.sum / n, np.zeros(4), 1 - c * n + c
        p.update(i, pulled, -RATE * (delta / n + a * beta * p.momentum))
        yield


def sparse_again(vector, chunk_size, top, value_bits):
    """What a vector is when `common.scheme.pack_sparse` has packed it, and it is unpacked."""
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


def synchronous(p, i):
    known = 0
    while True:
        x, _ = p.pull(i)
        yield
        g = sum(p.descend(i, x))
        yield
        p.contribute(i, known, g, lambda all: -RATE * p.factor() * np.mean(all, axis=0))
        yield lambda: i not in p.given
        known = p.version
        yield


def different_rates(p, i):
    known = 0
    while True:
        x, _ = p.pull(i)
        yield
        g = p.gradient(i, x)
        yield
        p.contribute(i, known, p.factor(i) * p.hp.learning_rates[i] * g, lambda all: -sum(all))
        yield lambda: i not in p.given
        known = p.version
        yield


def sagn(p, i):
    known = 0
    while True:
        x, _ = p.pull(i)
        yield
        g = np.mean(p.descend(i, x), axis=0)
        yield
        p.contribute(i, known, g, lambda all: p.adam(np.mean(all, axis=0), RATE * p.factor()))
        yield lambda: i not in p.given
        known = p.version
        yield


def diloco(p, i):
    known, adam, hp = 0, Adam(), p.hp

    def nesterov(all):
        delta = np.mean(all, axis=0)
        p.v = hp.momentum * p.v + delta
        return -RATE * (delta + hp.momentum * p.v)

    while True:
        x, _ = p.pull(i)
        yield
        start = x
        yield
        x = adam.walk(p, i, x, hp.window)
        yield
        p.contribute(i, known, start - x, nesterov)
        yield lambda: i not in p.given
        known = p.version
        yield


def streaming(p, i):
    adam, hp, seen = Adam(), p.hp, 0
    where = np.array_split(np.arange(4), hp.fragments)
    x, known = p.start.copy(), p.start.copy()

    def nesterov(at):
        def change(all):
            delta, change = np.mean(all, axis=0), np.zeros(4)
            p.v[at] = hp.momentum * p.v[at] + delta
            change[at] = -RATE * (delta + hp.momentum * p.v[at])
            return change

        return change

    while True:
        for at in where:
            if hp.window > hp.overlap_steps:
                x = adam.walk(p, i, x, hp.window - hp.overlap_steps)
                yield
            p.contribute(i, seen, known[at] - x[at], nesterov(at))
            if hp.overlap_steps:
                yield
                x = adam.walk(p, i, x, hp.overlap_steps)
            yield lambda: i not in p.given
            known[at], seen = p.pull(i)[0][at], p.version
            yield
            x = x.copy()
            x[at] = hp.mixing * x[at] + (1 - hp.mixing) * known[at]
            yield


def sparse(e, hp):
    """What arrives of a vector of which only the largest values are sent, each piece of it packed for itself."""
    return np.concatenate([sparse_again(piece, hp.chunk_size, hp.top, hp.value_bits) for piece in np.array_split(e, hp.num_ps)])


def sparseloco(p, i):
    known, adam, hp, e = 0, Adam(), p.hp, np.zeros(4)
    while True:
        x, _ = p.pull(i)
        yield
        start = x
        yield
        x = adam.walk(p, i, x, hp.window)
        yield
        e = hp.error_decay * e + start - x
        yield
        sent = sparse(e, hp)
        e = e - sent
        p.contribute(i, known, sent, lambda all: -hp.learning_rate * np.mean(all, axis=0))
        yield lambda: i not in p.given
        known = p.version
        yield


def slowmo(p, i):
    known, hp, gamma = 0, p.hp, p.hp.learning_rate
    counts = [len(own) if getattr(hp, "weigh_by_samples", False) else 1 for own in p.batches[0]]
    weight = WORKERS * counts[i] / sum(counts)

    def slow_step(all):
        p.v = hp.slow_momentum * p.v + (p.center - np.mean(all, axis=0)) / (p.factor() * gamma)
        return -hp.slow_learning_rate * p.factor() * gamma * p.v

    while True:
        x, _ = p.pull(i)
        yield
        yield  # the start is x̃, until all have come back
        for _ in range(hp.window):
            x = x - p.factor(i) * gamma * p.gradient(i, x) - p.decayed(x, p.factor(i), "worker")
        yield
        p.contribute(i, known, weight * x, slow_step)
        yield lambda: i not in p.given
        known = p.version
        yield


def semi_synchronous(p, i):
    while True:
        yield lambda: p.clocks[i] - min(p.clocks[: p.present]) <= p.hp.staleness
        yield
        x, pulled = p.pull(i)
        yield
        g = sum(p.descend(i, x))
        yield
        p.update(i, pulled, -RATE * p.factor() * g)
        yield
        p.clocks[i] += 1


class Scheme(NamedTuple):
    """A folder, its function, its oracle, hyperparameters, and how many steps a round has in which nobody waits."""

    folder: str
    name: str
    life: Any
    hp: dict = {}
    steps: int = 3

    @property
    def waits(self):
        """Whether its workers wait for each other."""
        return self.life in WAITING

    def hyperparameters(self, window, num_ps=1):
        """All that any of the schemes asks for."""
        others = {"window": window, "learning_rate": RATE, "num_workers": WORKERS, "num_ps": num_ps, "local_optimizer": "sgd"}
        return types.SimpleNamespace(**{**others, "local_learning_rate": RATE if self.waits else None, **self.hp})

    def decaying(self):
        """The same with weight decay; those that are refused with it have AdamW itself."""
        on_worker = {"local_learning_rate": None, **ON_WORKER} if self.life is slowmo else {}
        return self if self.waits and "weight_decay" in self.hp else self._replace(hp={**self.hp, "decay": 0.5, **on_worker})

    def orders(self):
        """Orders of the workers' steps, {name: list}; one that has to wait is passed over."""
        return {order.__name__: order(self.steps) for order in (LONG if self.waits else STALE)}


WAITING = synchronous, different_rates, sagn, diloco, streaming, sparseloco, slowmo, semi_synchronous
ON_WORKER = {"optimizer_on": "worker"}
DELAYED = {
    "buffer_size": None,
    "momentum_activation": 0.0,
    "dynamic_steps": False,
    "momentum": 0.9,
    "weight_decay": 0.3,
    "local_learning_rate": 0.3,
    **ON_WORKER,
}
SCHEMES = {
    "HogWild": Scheme("HogWild", "hogwild", hogwild),
    "HogWild, overlap": Scheme("HogWild", "hogwild", hogwild, hp={"overlap": True}),
    "DOWNPOUR-Easy": Scheme("DOWNPOUR-Easy", "downpour_easy", downpour_easy),
    "DOWNPOUR": Scheme("DOWNPOUR", "downpour", downpour, {"n_fetch": None}),
    "DOWNPOUR, overlap": Scheme("DOWNPOUR", "downpour", downpour, hp={"n_fetch": None, "overlap": True}),
    "AGN": Scheme("AGN", "agn", agn),
    "Dynamic-SGD": Scheme("Dynamic-SGD", "dynamic_sgd", dynamic_sgd),
    "Ringmaster-ASGD": Scheme("Ringmaster-ASGD", "ringmaster_asgd", ringmaster_asgd, hp={"staleness_threshold": 1.0}),
    "DC-ASGD": Scheme("DC-ASGD", "dc_asgd", dc_asgd, hp={"adaptive": False, "lambda0": 0.1}),
    "DC-ASGD, adaptive": Scheme(
        "DC-ASGD", "dc_asgd", dc_asgd, hp={"adaptive": True, "lambda0": 0.5, "mean_square_decay": 0.95}
    ),
    "AEASGD": Scheme("AEASGD", "aeasgd", aeasgd, hp={"beta": 0.9, **ON_WORKER}),
    "AEAMSGD": Scheme("AEAMSGD", "aeamsgd", aeamsgd, hp={"beta": 0.9, "momentum": 0.5, **ON_WORKER}),
    "Asynchronous-DiLoCo": Scheme("Asynchronous-DiLoCo", "asynchronous_diloco", asynchronous_diloco, DELAYED, 4),
    "Asynchronous-DiLoCo, c > 0": Scheme(
        *("Asynchronous-DiLoCo", "asynchronous_diloco", asynchronous_diloco),
        {**DELAYED, "buffer_size": 3, "momentum_activation": 0.2},
        4,
    ),
}
DIFFERENT = "Synchronous-SGD-different-learning-rates"
SPARSE = {"chunk_size": 4, "top": 2, "value_bits": 2, "error_decay": 0.8, "learning_rate": 1.0}
SSP = Scheme("Semi-Synchronous-SGD", "semi_synchronous_sgd", semi_synchronous, {"staleness": 2, "issync": False})
MEAN = {"slow_momentum": 0.0, "slow_learning_rate": 1.0, "weigh_by_samples": False, "local_learning_rate": None, **ON_WORKER}
ADAMW = {"momentum": 0.5, "weight_decay": 0.3, "local_learning_rate": 0.1, **ON_WORKER}
STREAMING = Scheme(
    "Streaming-DiLoCo", "streaming_diloco", streaming, {**ADAMW, "fragments": 2, "overlap_steps": 1, "mixing": 0.3}
)
LOCAL_SGD = Scheme("Local-SGD", "local_sgd", slowmo, MEAN)
TOGETHER = {
    "Synchronous-SGD": Scheme("Synchronous-SGD", "synchronous_sgd", synchronous, {"backup_workers": 0}),
    "one backup worker": Scheme("Synchronous-SGD", "synchronous_sgd", synchronous, {"backup_workers": 1}),
    DIFFERENT: Scheme(
        DIFFERENT, DIFFERENT.lower().replace("-", "_"), different_rates, {"learning_rates": [0.05, 0.01], "window": 1}
    ),
    "SAGN": Scheme("SAGN", "sagn", sagn),
    "Local-SGD": LOCAL_SGD,
    "slow momentum": LOCAL_SGD._replace(hp={**MEAN, "slow_momentum": 0.7, "weigh_by_samples": True}),
    "DiLoCo": Scheme("DiLoCo", "diloco", diloco, ADAMW),
    "Streaming-DiLoCo": STREAMING,
    "one fragment": STREAMING._replace(hp={**STREAMING.hp, "fragments": 1, "overlap_steps": 0, "mixing": 0.0}),
    "SparseLoCo": Scheme("SparseLoCo", "sparseloco", sparseloco, {**SPARSE, **ADAMW}),
    "SlowMo": Scheme("Write-Your-Own-Scheme", "slowmo", slowmo, {"slow_momentum": 0.5, "slow_learning_rate": 0.8}),
    "Semi-Synchronous-SGD": SSP,
    "no bound": SSP._replace(hp={"staleness": float("inf"), "issync": False}),
    "in step": SSP._replace(hp={"staleness": 0, "issync": False}),
}
# Rounds of other steps than those of the scheme's own row. DOWNPOUR with two intervals has several pulls or pushes in one.
RINGMASTER, DOWNPOUR = SCHEMES["Ringmaster-ASGD"], SCHEMES["DOWNPOUR"]
MORE = {
    "R = 2": RINGMASTER._replace(hp={"staleness_threshold": 2.0}),
    "R = ∞": RINGMASTER._replace(hp={"staleness_threshold": float("inf")}),
    "fetches seldom": DOWNPOUR._replace(steps=5, hp={"window": 2, "n_fetch": 4}),
    "pushes seldom": DOWNPOUR._replace(steps=5, hp={"window": 4, "n_fetch": 2}),
    "neither divides the other": DOWNPOUR._replace(steps=9, hp={"window": 2, "n_fetch": 3}),
    "pushes seldom, overlap": DOWNPOUR._replace(steps=5, hp={"window": 4, "n_fetch": 2, "overlap": True}),
    "neither, overlap": DOWNPOUR._replace(steps=9, hp={"window": 2, "n_fetch": 3, "overlap": True}),
    "issync": SSP._replace(life=synchronous, hp={"staleness": 7, "issync": True}),
}
ALL = {**SCHEMES, **TOGETHER, **MORE}
OF_FOLDERS = [name for name, scheme in ALL.items() if name == scheme.folder]


def in_turn(steps):
    """The workers whose steps come one after the other: whole rounds in turn."""
    return ([0] * steps + [1] * steps) * (ROUNDS // 2)


def at_once(steps):
    """Both do each step of a round before either does the next: both pull, then both push."""
    return [0, 1] * steps * (ROUNDS // 2)


def overtaken(steps):
    """One begins its round, the other does two, and only then the first goes on; then the other way round."""
    order = []
    for holder in [0, 1] * 3:
        order += [holder, *[1 - holder] * 2 * steps, *[holder] * (steps - 1)]
    return order + [0] * steps + [1] * steps


def shuffled(steps):
    """Ten rounds of each, interleaved at random."""
    order = [0, 1] * steps * (ROUNDS // 2)
    random.Random(0).shuffle(order)
    return order


def long_turns(steps):
    """As much as it can of one worker, then of the other."""
    return ([0] * 12 + [1] * 12) * 20


def long_shuffled(steps):
    return random.Random(0).sample([0, 1], 400, counts=[200, 200])


def uneven(steps):
    """One is eight times as fast as the other."""
    return random.Random(1).choices([0, 1], [8, 1], k=600)


STALE = [at_once, overtaken, shuffled]
LONG = [long_turns, long_shuffled, uneven]


class Walk(NamedTuple):
    """The result of some steps.

    Attributes:
      center: x̃.
      log: of each update, or contribution to one, its worker, its staleness and the global step after it.
      dropped: of each gradient that was thrown away its worker, and the global step.
      taken: whose step was taken when.
    """

    center: np.ndarray
    log: list
    dropped: list
    taken: list


def written_again(scheme, order, start, batches, window=3, num_ps=1, **more):
    """The `Walk` of a scheme by NumPy."""
    problem = Problem(start, batches, scheme.hyperparameters(window, num_ps), **more)
    workers = [scheme.life(problem, i) for i in range(WORKERS)]
    # Semi-synchronous SGD waits before its first step.
    conditions, taken = [next(w) if scheme.life is semi_synchronous else None for w in workers], []
    for worker in order:
        if conditions[worker] is None or conditions[worker]():
            conditions[worker] = next(workers[worker])
            taken.append(worker)
    return Walk(problem.center, problem.log, problem.dropped, taken)


def close(center, expected, start, least=0.1):
    """Asserts that x̃ is what NumPy gives, and went somewhere."""
    assert np.abs(expected - start).max() > least
    assert np.abs(center - expected).max() < 1e-5 * np.abs(expected).max()


def inverse(step):
    """A schedule for TensorFlow and NumPy."""
    return 1 / (1 + 0.3 * (tf.cast(step, tf.float32) if isinstance(step, (tf.Tensor, tf.Variable)) else step))


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
