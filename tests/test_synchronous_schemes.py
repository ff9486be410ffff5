"""The schemes whose workers wait for each other, against NumPy, in orders that they allow.

A new scheme of this kind belongs into `TOGETHER`.
"""

import random
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
from oracle import RATE, Adam, Problem, messages, sparse_again

from common import data, models, tf
from common.center import GlobalParameters, fragments_of
from common.local import LocalParameters
from common.replay import Replay
from common.schedules import hyperparameters
from common.steps import build_rounds, build_steps, repeat_rounds, timed_rounds

WORKERS = 2  # the batches are of two


class Meeting(Problem):
    """A problem whose workers contribute to each update together."""

    def __init__(self, start, batches, hp, **more):
        super().__init__(start, batches, hp, **more)
        self.given = {}  # by worker, of the present update
        self.clocks = [0] * WORKERS
        self.adam, self.v = Adam(), np.zeros(4)  # v of a momentum

    def contribute(self, worker, known, vector, needed, apply):
        """Adds a vector to the update; the last one that is needed makes it, x̃ ← x̃ + apply(vectors)."""
        if known != self.version or worker in self.given:
            self.dropped.append((worker, self.version))
            return
        self.given[worker] = vector
        self.log.append((worker, 0, self.version + 1))
        if len(self.given) == needed:
            decayed = self.decayed(self.center, self.factor(), "ps", sum(getattr(self.hp, "learning_rates", [RATE])))
            self.center = self.center + apply(list(self.given.values())) - decayed
            self.version += 1
            self.given = {}


# As in `test_schemes`, a life yields where another worker may do its steps; here it yields what has to be true before it can
# go on, or None.


def synchronous(p, i):
    known = 0
    while True:
        x, _ = p.pull(i)
        yield
        g = sum(p.descend(i, x))
        yield
        p.contribute(i, known, g, WORKERS - p.hp.backup_workers, lambda all: -RATE * p.factor() * np.mean(all, axis=0))
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
        p.contribute(i, known, p.factor(i) * p.hp.learning_rates[i] * g, WORKERS, lambda all: -sum(all))
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
        p.contribute(i, known, g, WORKERS, lambda all: p.adam(np.mean(all, axis=0), RATE * p.factor()))
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
        for _ in range(hp.window):
            g = p.gradient(i, x)
            rate = p.factor(i) * hp.local_learning_rate
            x = x - rate * hp.weight_decay * x + adam(g, rate)
        yield
        p.contribute(i, known, start - x, WORKERS, nesterov)
        yield lambda: i not in p.given
        known = p.version
        yield


def streaming(p, i):
    own, hp, seen = Meeting(p.start, p.batches, p.hp), p.hp, 0
    where = np.array_split(np.arange(4), hp.fragments)
    x, known = p.start.copy(), p.start.copy()

    def train(x, steps):
        for _ in range(steps):
            rate = p.factor(i) * hp.local_learning_rate
            x = x - rate * hp.weight_decay * x + own.adam(p.gradient(i, x), rate)
        return x

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
                x = train(x, hp.window - hp.overlap_steps)
                yield
            p.contribute(i, seen, known[at] - x[at], WORKERS, nesterov(at))
            if hp.overlap_steps:
                yield
                x = train(x, hp.overlap_steps)
            yield lambda: i not in p.given
            known[at], seen = p.pull(i)[0][at], p.version
            yield
            x = x.copy()
            x[at] = hp.mixing * x[at] + (1 - hp.mixing) * known[at]
            yield


def sparse(e, hp):
    """What arrives of a vector of which only the largest values are sent, each piece of it packed for itself."""
    return np.concatenate([sparse_again(piece, hp.chunk_size, hp.top, hp.value_bits) for piece in np.split(e, hp.num_ps)])


def sparseloco(p, i):
    known, own, hp, e = 0, Meeting(p.start, p.batches, p.hp), p.hp, np.zeros(4)
    while True:
        x, _ = p.pull(i)
        yield
        start = x
        yield
        for _ in range(hp.window):
            g = p.gradient(i, x)
            rate = p.factor(i) * hp.local_learning_rate
            x = x - rate * hp.weight_decay * x + own.adam(g, rate)
        yield
        e = hp.error_decay * e + start - x
        yield
        sent = sparse(e, hp)
        e = e - sent
        p.contribute(i, known, sent, WORKERS, lambda all: -hp.learning_rate * np.mean(all, axis=0))
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
        p.contribute(i, known, weight * x, WORKERS, slow_step)
        yield lambda: i not in p.given
        known = p.version
        yield


def semi_synchronous(p, i):
    while True:
        yield lambda: p.clocks[i] - min(p.clocks) <= p.hp.staleness
        yield
        x, pulled = p.pull(i)
        yield
        g = sum(p.descend(i, x))
        yield
        p.update(i, pulled, -RATE * p.factor() * g)
        yield
        p.clocks[i] += 1


class Scheme(NamedTuple):
    """A folder, its function, the same in NumPy, and hyperparameters."""

    folder: str
    name: str
    life: Any
    hp: dict = {}

    def hyperparameters(self, window, num_ps=1):
        others = {"window": window, "learning_rate": RATE, "num_workers": WORKERS, "num_ps": num_ps, "local_optimizer": "sgd"}
        return types.SimpleNamespace(**{**others, "local_learning_rate": RATE, **self.hp})


ON_WORKER = {"optimizer_on": "worker"}
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
    "four fragments": STREAMING._replace(hp={**STREAMING.hp, "fragments": 4, "overlap_steps": 0, "mixing": 0.0}),
    "SparseLoCo": Scheme("SparseLoCo", "sparseloco", sparseloco, {**SPARSE, **ADAMW}),
    "SlowMo": Scheme("Write-Your-Own-Scheme", "slowmo", slowmo, {"slow_momentum": 0.5, "slow_learning_rate": 0.8}),
    "Semi-Synchronous-SGD": SSP,
    "no bound": SSP._replace(hp={"staleness": float("inf"), "issync": False}),
    "in step": SSP._replace(hp={"staleness": 0, "issync": False}),
}


def in_turn():
    """As much as it can of one worker, then of the other."""
    return ([0] * 12 + [1] * 12) * 20


def at_once():
    return [0, 1] * 200


def shuffled():
    order = [0, 1] * 200
    random.Random(0).shuffle(order)
    return order


FOLDERS = [name for name, scheme in TOGETHER.items() if name == scheme.folder]
ORDERS = [in_turn, at_once, shuffled]


class Walk(NamedTuple):
    """The result: x̃, the contributions to updates, those that were dropped, and which worker did which step."""

    center: np.ndarray
    log: list
    dropped: list
    taken: list


@pytest.fixture
def walk(batches, replays):
    """A function that takes the steps of a scheme in this order of workers, passing over those that have to wait."""

    def walk(scheme, order, window=3, num_ps=1, schedule=None, batches=batches):
        replay = replays(scheme, scheme.hyperparameters(window, num_ps), num_ps, schedule, batches)
        taken = replay.take(order)
        log = [(u.worker, u.staleness, u.updated) for u in replay.updates]
        return Walk(replay.center, log, replay.dropped, taken)

    return walk


def written_again(scheme, order, start, batches, window=3, num_ps=1, **more):
    """The same by NumPy."""
    problem = Meeting(start, batches, scheme.hyperparameters(window, num_ps), **more)
    workers = [scheme.life(problem, i) for i in range(WORKERS)]
    first = scheme.life is semi_synchronous  # whose first step is to wait
    conditions, taken = [next(worker) if first else None for worker in workers], []
    for worker in order:
        if conditions[worker] is None or conditions[worker]():
            conditions[worker] = next(workers[worker])
            taken.append(worker)
    return Walk(problem.center, problem.log, problem.dropped, taken)


@pytest.mark.parametrize(("window", "num_ps"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheme", TOGETHER.values(), ids=TOGETHER)
def test_exact(model, walk, batches, scheme, order, window, num_ps):
    """x̃, which worker contributed to which update, what was dropped, and which worker had to wait when."""
    ours = walk(scheme, order(), window, num_ps)
    expected = written_again(scheme, order(), model.initial_parameters, batches, window, num_ps)
    assert len(expected.log) >= 50
    assert np.abs(expected.center - model.initial_parameters).max() > 0.1
    assert np.abs(ours.center - expected.center).max() < 1e-5 * np.abs(expected.center).max()
    assert (ours.log, ours.dropped, ours.taken) == (expected.log, expected.dropped, expected.taken)


@pytest.mark.parametrize("name", [*FOLDERS, "SlowMo"])
def test_schedule_and_weight_decay(model, walk, batches, name):
    """A learning rate that falls with the global step: on the ps of its update, on a worker of its last pull."""
    scheme, schedule = TOGETHER[name], lambda step: 1 / (1 + 0.3 * step)
    if "weight_decay" not in scheme.hp:  # the DiLoCos have AdamW itself
        slowmos = {"local_learning_rate": None, **ON_WORKER} if name == "SlowMo" else {}
        scheme = scheme._replace(hp={**scheme.hp, "decay": 0.5, **slowmos})
    window = scheme.hp.get("window", 3)
    ours = walk(scheme, shuffled(), window, schedule=lambda step: schedule(tf.cast(step, tf.float32)))
    expected = written_again(scheme, shuffled(), model.initial_parameters, batches, window, schedule=schedule)
    assert np.abs(expected.center - model.initial_parameters).max() > 0.1
    assert np.abs(ours.center - expected.center).max() < 1e-5 * np.abs(expected.center).max()


@pytest.mark.slow
def test_each_scheme_is_another(walk):
    """None is a copy of a neighbour under another name; the orders make one of them wait, the other not."""
    centers = {name: walk(scheme, shuffled()).center for name, scheme in TOGETHER.items()}
    names = list(centers)
    for i, one in enumerate(names):
        for other in names[:i]:
            assert np.abs(centers[one] - centers[other]).max() > 1e-4, f"{one} and {other} do the same"


def test_where_schemes_agree(walk):
    def center(name, order=shuffled, **hp):
        scheme = TOGETHER[name]
        return walk(scheme._replace(hp={**scheme.hp, **hp}), order(), 1).center

    together = center("Synchronous-SGD")
    np.testing.assert_allclose(center(DIFFERENT, learning_rates=[RATE / 2, RATE / 2]), together, rtol=1e-5)
    one_step, sgd = (walk(TOGETHER[name], [0, 1] * steps * 20, 1) for name, steps in (("Local-SGD", 5), ("Synchronous-SGD", 4)))
    np.testing.assert_allclose(one_step.center, sgd.center, rtol=1e-5)
    assert one_step.log == sgd.log and len(sgd.log) == 40
    of_slowmo = {"slow_momentum": 0.5, "slow_learning_rate": 0.8}
    np.testing.assert_allclose(center("Local-SGD", **of_slowmo), center("SlowMo", **of_slowmo), rtol=1e-5)
    one_by_one, plain = [0] * 4 + [1] * 4, [0] * 5 + [1] * 5
    as_diloco = STREAMING._replace(hp={**ADAMW, "fragments": 1, "overlap_steps": 0, "mixing": 0.0})
    ours, diloco = walk(as_diloco, one_by_one * 20, 3), walk(TOGETHER["DiLoCo"], plain * 20, 3)
    np.testing.assert_allclose(ours.center, diloco.center, rtol=1e-6)
    assert ours.log == diloco.log and len(diloco.log) >= 38
    everything = {"chunk_size": 3, "top": 3, "value_bits": 32, "error_decay": 1.0}  # so that nothing is kept
    sgd_outside = walk(TOGETHER["DiLoCo"]._replace(hp={**ADAMW, "momentum": 0.0}), [0, 1] * 5 * 20)
    ours = walk(TOGETHER["SparseLoCo"]._replace(hp={**ADAMW, **everything}), [0, 1] * 6 * 20, num_ps=2)
    np.testing.assert_allclose(ours.center, sgd_outside.center, rtol=1e-5)
    assert ours.log == sgd_outside.log and len(ours.log) == 40
    issync = walk(SSP._replace(hp={"staleness": 7, "issync": True}), at_once(), 1)
    again = walk(TOGETHER["Synchronous-SGD"], at_once(), 1)
    done = min(len(issync.log), len(again.log))
    assert issync.log[:done] == again.log[:done] and done > 60


def test_workers_weigh_as_much_as_their_samples(model, walk, batches):
    """One has three batches, the other seven; weighed alike they lead elsewhere."""
    unequal = [[part[0][:3], part[1]] for part in batches]
    alike = walk(LOCAL_SGD, shuffled(), batches=unequal).center
    for hp in {"weigh_by_samples": True}, {"weigh_by_samples": True, "slow_momentum": 0.5}:
        scheme = LOCAL_SGD._replace(hp={**MEAN, **hp})
        ours = walk(scheme, shuffled(), num_ps=2, batches=unequal)
        expected = written_again(scheme, shuffled(), model.initial_parameters, unequal)
        assert np.abs(ours.center - expected.center).max() < 1e-5 * np.abs(expected.center).max()
        assert np.abs(ours.center - alike).max() > 1e-3


def test_with_every_gradient_each_worker_contributes_once_to_every_update(walk):
    log = walk(TOGETHER["Synchronous-SGD"], shuffled()).log
    updates = {update for _, _, update in log if log.count((0, 0, update)) == log.count((1, 0, update)) == 1}
    assert len(log) == 2 * len(updates) or len(log) == 2 * len(updates) + 1  # one may be on its way to the next
    assert max(updates) == len(updates) > 30


def test_a_backup_worker_is_not_waited_for(walk):
    """The one that comes second is dropped, and never applied late."""
    ours = walk(TOGETHER["one backup worker"], at_once())
    assert ours.taken == at_once()  # nobody waits
    assert len(ours.dropped) > 30 and {worker for worker, _ in ours.dropped} == {1}
    assert [update for _, _, update in ours.log] == list(range(1, len(ours.log) + 1))


@pytest.mark.parametrize("staleness", [0, 1, 5])
def test_the_bound_is_never_broken(model, batches, known_batches, load_scheme, staleness):
    """Two workers at random paces; the clock of one that begins a step is at most s ahead of the slowest. And reaches that."""
    scheme, rng = SSP._replace(hp={"staleness": staleness, "issync": False}), random.Random(1)
    rule = load_scheme(scheme.folder, scheme.name)
    make_batches = lambda i: known_batches(*(b[i] for b in batches), f"batches_{i}")  # noqa: E731
    replay = Replay(rule, scheme.hyperparameters(1), model, make_batches)
    clocks, position, leads = [0, 0], [0, 0], []
    for _ in range(600):
        worker = rng.choices([0, 1], [8, 1])[0]
        if replay.has_to_wait(worker):
            assert clocks[worker] - min(clocks) > staleness  # the slowest never waits
            continue
        replay.step(worker)
        position[worker] += 1
        if position[worker] % 5 == 1:  # it has come through the wait
            leads.append(clocks[worker] - min(clocks))
        if position[worker] % 5 == 0:
            clocks[worker] += 1
    assert max(leads) == staleness
    replay.close()


def test_n_workers_are_one_process_with_a_batch_n_times_as_large(load_scheme, known_batches):
    """On the same samples in the same order: the mean of means of equal batches is the mean."""
    digits, rule = data.load("digits"), load_scheme("Synchronous-SGD", "synchronous_sgd")
    mlp, steps, size, n = models.build("mlp", digits), 100, 16, 3
    samples = np.random.default_rng(0).permutation(len(digits.x_train))[: n * size * 25].reshape(25, n, size)
    x, y = digits.x_train[samples], digits.y_train[samples]

    def parameters(num_workers, batches_of):
        hp = types.SimpleNamespace(window=1, learning_rate=0.2, backup_workers=0, num_workers=num_workers)
        make_batches = lambda i: known_batches(*batches_of(i), f"batches_{i}")  # noqa: E731
        replay = Replay(rule, hp, mlp, make_batches, num_workers)
        replay.run(steps)
        center = replay.center
        replay.close()
        return center

    together = parameters(n, lambda i: (x[:, i], y[:, i]))
    alone = parameters(1, lambda i: (x.reshape(25, n * size, *x.shape[3:]), y.reshape(25, n * size)))
    assert np.abs(together - mlp.initial_parameters).max() > 0.1
    assert np.abs(together - alone).max() < 1e-5 * np.abs(alone).max()


@pytest.mark.slow
@pytest.mark.parametrize("num_ps", [0, 2])
@pytest.mark.parametrize("name", FOLDERS)
def test_rounds_in_one_call(model, graph, load_scheme, initialized, known_batches, batches, servers, name, num_ps):
    """As a worker runs them, here the only one: two rounds, two that are timed, two in a loop; on ps tasks or (0) alone."""
    scheme = TOGETHER[name]
    task, server = servers(num_ps) if num_ps else (None, None)
    hp = scheme.hyperparameters(2, max(1, num_ps))
    hp.num_workers = 1
    if "learning_rates" in scheme.hp:
        hp.learning_rates = [RATE]
    pieces = {"num_ps": max(1, num_ps), "fragments": fragments_of(hp)}
    center = GlobalParameters(model.initial_parameters, device_fn=task and task.device_fn(), **pieces)
    with tf.device(task and task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        rule = load_scheme(scheme.folder, scheme.name)
        timed = timed_rounds(rule, center, local, hp, 2)
        built = [build_rounds(rule, center, local, hp, 2), timed, repeat_rounds(rule, center, local, hp, 1, 2)]
    session = initialized(center, local, target=server.target if server else "")
    session.run(center.waits(local).enter)
    steps = np.concatenate([session.run(rounds).steps for rounds in built])
    updates = 6 * center.fragments
    assert steps.tolist() == [[i, i + 1] for i in range(updates)]
    problem = Alone(model.initial_parameters, batches, hp)
    life = scheme.life(problem, 0)
    while problem.version < updates:
        next(life)
    ours = session.run(center.read()[0])
    assert np.abs(problem.center - model.initial_parameters).max() > 0.01
    assert np.abs(ours - problem.center).max() < 1e-5 * np.abs(problem.center).max()


def test_loop_that_another_worker_ends(model, graph, load_scheme, initialized, known_batches, batches):
    """It goes around once, to hear of it."""
    center = GlobalParameters(model.initial_parameters)
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
    rule, hp = load_scheme("Synchronous-SGD", "synchronous_sgd"), TOGETHER["Synchronous-SGD"].hyperparameters(1)
    build_rounds(rule, center, local, hp)
    session = initialized(center, local)
    built = repeat_rounds(rule, center, local, hp, 2, 1000)
    session.run(center.waits(local).enter)
    session.run(center.waits(local).leave)  # as the other one does
    rounds = session.run(built)
    assert rounds.training_ended and rounds.steps.tolist() == [[0, 0], [0, 0]]


class Alone(Meeting):
    """The same with one worker."""

    def __init__(self, start, batches, hp, **more):
        super().__init__(start, batches, hp, **more)
        self.clocks = [0]

    def contribute(self, worker, known, vector, needed, apply):
        super().contribute(worker, known, vector, 1, apply)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_messages_of_a_round(model, graph, load_scheme, initialized, known_batches, batches, servers, name):
    """One each way; to wait costs no message. Once a call, the steps, and whether it is over."""
    scheme, rounds = TOGETHER[name], 3
    task, server = servers(1)
    hp = scheme.hyperparameters(2)
    hp.num_workers, hp.learning_rates = 1, [RATE]
    center = GlobalParameters(model.initial_parameters, 1, task.device_fn(), fragments=fragments_of(hp))
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        built = build_rounds(load_scheme(scheme.folder, scheme.name), center, local, hp, rounds)
    session = initialized(center, local, target=server.target)
    session.run(center.waits(local).enter)
    sent, exchanges = messages(session, built), rounds * center.fragments
    assert sent.count(("/job:worker", "/job:ps")) == exchanges
    assert sent.count(("/job:ps", "/job:worker")) == exchanges + (1 if scheme.life is semi_synchronous else 2)


# --- Workers that come and go -----------------------------------------------------------------------------------------------


COME = -1  # where a worker is that has come and waits for the next update; else the number of its next step


class Crowd:
    """Synchronous SGD of workers that come, go and die, in NumPy.

    Args:
      start: x̃.
      begin: how many workers there are at first.
      late: how many of them are not waited for.
    """

    def __init__(self, start, begin, late):
        self.center, self.late, self.version, self.resets = start.astype(float), late, 0, 0
        self.present, self.ahead, self.leaving = set(range(begin)), set(), set()  # ahead: from whom nothing is expected
        self.given: list = []
        self.known, self.numbers = {}, []

    def enter(self, i):
        if i == 0:  # what is on its way counts no more
            self.given, self.ahead, self.resets = [], set(), self.resets + 1
        if i not in self.present:
            self.present.add(i)
            self.ahead.add(i)
        self.leaving.discard(i)
        self.wait(i)

    def may_go_on(self, i):
        return i not in self.ahead or i in self.leaving

    def wait(self, i):
        self.known[i] = self.version, self.resets

    def push(self, i, gradient):
        if self.known[i] == (self.version, self.resets) and i in self.present and i not in self.ahead:
            self.given.append(gradient)
            self.ahead.add(i)
        if i in self.leaving:
            self.present.discard(i)
            self.ahead.discard(i)
        if self.given and len(self.ahead) >= max(1, len(self.present) - self.late):
            self.center = self.center - RATE * np.mean(self.given, axis=0)
            self.version += 1
            self.numbers.append(len(self.given))
            self.given, self.ahead = [], set()


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_updates_of_workers_that_come_and_go(graph, model, batches, known_batches, load_scheme, late, seed):
    """Each is the mean of the gradients of those who were there when it began; one that is killed is waited for."""
    places, begin, rng = 5, 2 + late, random.Random(seed)
    scheme = TOGETHER["Synchronous-SGD"]
    values = vars(scheme.hyperparameters(1)) | {"backup_workers": late, "max_workers": places, "num_workers": begin}
    hp, center, rule = types.SimpleNamespace(**values), GlobalParameters(model.initial_parameters), load_scheme(*scheme[:2])
    locals_, steps, problems = [], [], []
    for i in range(places):
        own = known_batches(*(b[i % 2] for b in batches), f"b{i}")
        locals_.append(LocalParameters(center, model, own, f"w{i}", i, places, begin_workers=begin))
        steps.append(build_steps(rule, center, locals_[i], hyperparameters(hp, center, locals_[i])))
        problems.append(Problem(model.initial_parameters, batches, hp))
    waits = [center.waits(local) for local in locals_]
    left = {waits[0].left: [False] * places}
    crowd, at, x = Crowd(model.initial_parameters, begin, late), {}, {}
    made = center.read()[0], center.step, center.local_steps
    with tf.Session() as session:
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        session.run(tf.local_variables_initializer(), {k: v for local in locals_ for k, v in local.init_feed_dict.items()})
        for i in range(begin):
            session.run(waits[i].enter, left)
            crowd.enter(i)
            at[i] = COME
        for _ in range(2500):
            i = rng.randrange(places)
            if i not in at or rng.random() < 0.02:  # it comes, or dies and comes again
                if i in at or rng.random() < 0.1:
                    session.run(waits[i].enter, left)
                    crowd.enter(i)
                    at[i] = COME
                continue
            assert (i not in crowd.present) == session.run(waits[i].has_left)
            if at[i] in (COME, 3):
                behind = session.run(waits[i].behind)
                if not crowd.may_go_on(i):
                    assert behind.any() and set(np.flatnonzero(behind)) <= crowd.present - crowd.ahead
                    continue
                assert not behind.any()
                session.run(waits[i].come if at[i] == COME else steps[i][3].fetches())
                crowd.wait(i)
                at[i] = 0
                if i not in crowd.present:
                    del at[i]
                elif i > late and rng.random() < 0.1:  # there is always somebody else
                    session.run(waits[i].go)
                    crowd.leaving.add(i)
                continue
            session.run(steps[i][at[i]].fetches())
            if at[i] == 0:
                x[i] = crowd.center
            elif at[i] == 1:
                x[i] = problems[i].gradient(i % 2, x[i])
            else:
                crowd.push(i, x[i])
                ours, step, local_steps = session.run(made)
                np.testing.assert_allclose(ours, crowd.center, rtol=1e-4, atol=1e-6)
                assert (step, local_steps) == (crowd.version, sum(crowd.numbers))
            at[i] += 1
    assert set(crowd.numbers) >= {2, 3, 4} and len(crowd.numbers) > 50


def test_who_comes_after_the_end_is_told(graph, model, batches, known_batches, load_scheme):
    scheme, center = TOGETHER["Synchronous-SGD"], GlobalParameters(model.initial_parameters)
    values = vars(scheme.hyperparameters(1)) | {"max_workers": 2, "num_workers": 1}
    hp, rule, waits, push = types.SimpleNamespace(**values), load_scheme(*scheme[:2]), [], []
    for i in range(2):
        local = LocalParameters(center, model, known_batches(*(b[i] for b in batches), f"b{i}"), f"w{i}", i, 2, begin_workers=1)
        push.append(build_steps(rule, center, local, hyperparameters(hp, center, local))[2])
        waits.append(center.waits(local))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        session.run(tf.local_variables_initializer(), {k: v for w in waits for k, v in w._local.init_feed_dict.items()})
        session.run(waits[0].enter, {waits[0].left: [False, False]})
        session.run(waits[0].leave)
        session.run(waits[1].enter)
        session.run(waits[1].come)
        assert session.run(push[1].training_ended) and session.run(waits[1].has_left)


def test_updates_in_a_loop_of_the_graph(graph, model, batches, known_batches, load_scheme):
    """As in a long run, of one worker where more may come."""
    scheme, times = TOGETHER["Synchronous-SGD"], tf.placeholder(tf.int32, [])
    center = GlobalParameters(model.initial_parameters)
    values = vars(scheme.hyperparameters(1)) | {"max_workers": 3, "num_workers": 1}
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)), num_workers=3, begin_workers=1)
    hp, rule = hyperparameters(types.SimpleNamespace(**values), center, local), load_scheme(*scheme[:2])
    build_rounds(rule, center, local, hp)
    loop, waits = repeat_rounds(rule, center, local, hp, 2, times), center.waits(local)
    problem = Meeting(model.initial_parameters, batches, scheme.hyperparameters(1))
    for _ in range(6):
        problem.center = problem.center - RATE * problem.gradient(0, problem.center)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        session.run(tf.local_variables_initializer(), local.init_feed_dict)
        session.run(waits.enter, {waits.left: [False] * 3})
        made = session.run(loop, {times: 3})
        assert made.steps[-1].tolist() == [5, 6] and tuple(made.local_steps) == (-1, 6)
        np.testing.assert_allclose(session.run(center.read()[0]), problem.center, rtol=1e-5)
