"""Every scheme against NumPy, written again from its formula: two workers, step by step, in orders that make pushes stale.

A new scheme belongs into `SCHEMES`.
"""

import random
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
from oracle import RATE, Adam, Problem, messages, messages_in_a_row

from common import ending, tf
from common.center import GlobalParameters
from common.local import LocalParameters
from common.replay import Replay
from common.schedules import hyperparameters
from common.steps import build_rounds, build_steps, repeat_rounds, timed_rounds

ROUNDS = 20

# Each is the life of a worker i of problem p; at a yield another worker may do its steps.


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
    n, c, beta = hp.buffer_size or 2, hp.momentum_activation, hp.momentum
    while True:
        x, pulled = p.pull(i)
        yield
        start = x
        yield
        for _ in range(hp.window):
            g, rate = p.gradient(i, x), p.factor(i) * hp.local_learning_rate
            x = x - p.decayed(x, p.factor(i), "worker", hp.local_learning_rate)
            x = x - rate * hp.weight_decay * x + adam(g, rate)
        yield
        delta, a = start - x, c
        p.sum = p.sum + delta
        if (p.version + 1) % n == 0:
            p.momentum, p.sum, a = beta * p.momentum + p.sum / n, np.zeros(4), 1 - c * n + c
        p.update(i, pulled, -RATE * (delta / n + a * beta * p.momentum))
        yield


class Scheme(NamedTuple):
    """A folder, its function, the same in NumPy, how many steps a round has, and hyperparameters."""

    folder: str
    name: str
    life: object
    steps: int = 3
    hp: dict = {}

    def hyperparameters(self, window):
        """All that any of the schemes asks for."""
        others = {"window": window, "learning_rate": RATE, "num_workers": 2, "local_optimizer": "sgd"}
        return types.SimpleNamespace(**{**others, "local_learning_rate": None, **self.hp})


DELAYED = {
    "buffer_size": None,
    "momentum_activation": 0.0,
    "dynamic_steps": False,
    "momentum": 0.9,
    "weight_decay": 0.3,
    "local_learning_rate": 0.3,
    "optimizer_on": "worker",
}
SCHEMES = {
    "HogWild": Scheme("HogWild", "hogwild", hogwild),
    "HogWild, overlap": Scheme("HogWild", "hogwild", hogwild, hp={"overlap": True}),
    "DOWNPOUR-Easy": Scheme("DOWNPOUR-Easy", "downpour_easy", downpour_easy),
    "DOWNPOUR": Scheme("DOWNPOUR", "downpour", downpour, hp={"n_fetch": None}),
    "DOWNPOUR, overlap": Scheme("DOWNPOUR", "downpour", downpour, hp={"n_fetch": None, "overlap": True}),
    "AGN": Scheme("AGN", "agn", agn),
    "Dynamic-SGD": Scheme("Dynamic-SGD", "dynamic_sgd", dynamic_sgd),
    "Ringmaster-ASGD": Scheme("Ringmaster-ASGD", "ringmaster_asgd", ringmaster_asgd, hp={"staleness_threshold": 1.0}),
    "DC-ASGD": Scheme("DC-ASGD", "dc_asgd", dc_asgd, hp={"adaptive": False, "lambda0": 0.1}),
    "DC-ASGD, adaptive": Scheme(
        "DC-ASGD", "dc_asgd", dc_asgd, hp={"adaptive": True, "lambda0": 0.5, "mean_square_decay": 0.95}
    ),
    "AEASGD": Scheme("AEASGD", "aeasgd", aeasgd, hp={"beta": 0.9, "optimizer_on": "worker"}),
    "AEAMSGD": Scheme("AEAMSGD", "aeamsgd", aeamsgd, hp={"beta": 0.9, "momentum": 0.5, "optimizer_on": "worker"}),
    "Asynchronous-DiLoCo": Scheme("Asynchronous-DiLoCo", "asynchronous_diloco", asynchronous_diloco, 4, DELAYED),
    "Asynchronous-DiLoCo, c > 0": Scheme(
        *("Asynchronous-DiLoCo", "asynchronous_diloco", asynchronous_diloco, 4),
        {**DELAYED, "buffer_size": 3, "momentum_activation": 0.2},
    ),
}
# DOWNPOUR whose intervals differ has rounds of several pulls or pushes.
INTERVALS = {
    "fetches seldom": (2, Scheme("DOWNPOUR", "downpour", downpour, steps=5, hp={"n_fetch": 4})),
    "pushes seldom": (4, Scheme("DOWNPOUR", "downpour", downpour, steps=5, hp={"n_fetch": 2})),
    "neither divides the other": (2, Scheme("DOWNPOUR", "downpour", downpour, steps=9, hp={"n_fetch": 3})),
    "pushes seldom, overlap": (4, Scheme("DOWNPOUR", "downpour", downpour, steps=5, hp={"n_fetch": 2, "overlap": True})),
    "neither, overlap": (2, Scheme("DOWNPOUR", "downpour", downpour, steps=9, hp={"n_fetch": 3, "overlap": True})),
}


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


ORDERS = [in_turn, at_once, overtaken, shuffled]


class Walk(NamedTuple):
    """The result of twenty rounds: x̃; of each update worker, staleness and the global step after it; what was dropped."""

    center: np.ndarray
    log: list
    dropped: list = []


@pytest.fixture
def walk(replays):
    """A function that takes the steps of a scheme in this order of workers."""

    def walk(scheme, order, window=3, num_ps=1, schedule=None):
        replay = replays(scheme, scheme.hyperparameters(window), num_ps, schedule)
        assert replay.take(order) == order
        return Walk(replay.center, [(u.worker, u.staleness, u.updated) for u in replay.updates], replay.dropped)

    return walk


def written_again(scheme, order, start, batches, window=3, **more):
    """The same by NumPy."""
    problem = Problem(start, batches, scheme.hyperparameters(window), **more)
    workers = [scheme.life(problem, i) for i in range(2)]
    for worker in order:
        next(workers[worker])
    return Walk(problem.center, problem.log, problem.dropped)


def close(ours, expected, start):
    """That x̃ is what NumPy gives, and went somewhere."""
    assert np.abs(expected.center - start).max() > 0.1
    assert np.abs(ours.center - expected.center).max() < 1e-5 * np.abs(expected.center).max()


@pytest.mark.parametrize(("window", "num_ps"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_exact(model, walk, batches, scheme, order, window, num_ps):
    """x̃ after twenty rounds, and the staleness of each update."""
    steps = order(scheme.steps)
    ours = walk(scheme, steps, window, num_ps)
    expected = written_again(scheme, steps, model.initial_parameters, batches, window)
    assert len(expected.log) + len(expected.dropped) == ROUNDS
    close(ours, expected, model.initial_parameters)
    assert (ours.log, ours.dropped) == (expected.log, expected.dropped)


def come_and_go(rng, here, places):
    """Somebody of those behind worker 1 comes, leaves, or dies and comes again; returns which, and what to do about it."""
    worker = rng.randrange(2, places)
    if worker not in here:
        here.add(worker)
        return worker, "come"
    if rng.random() < 0.3:
        return worker, "come"
    here.remove(worker)
    return worker, "leave"


@pytest.mark.parametrize("name", ["AEASGD", "AEAMSGD"])
@pytest.mark.parametrize("seed", range(3))
def test_elastic_force_is_that_of_the_workers_who_are_there(graph, model, batches, known_batches, load_scheme, name, seed):
    """α = β/n with the n of the moment at which x̃ is read. Two of them train, others come, leave and die between any steps."""
    scheme: Any = SCHEMES[name]
    places, rng = 5, random.Random(seed)
    hp = types.SimpleNamespace(**vars(scheme.hyperparameters(3)), max_workers=places)
    center = GlobalParameters(model.initial_parameters)
    center.present = present = ending.Present("")
    locals_ = [
        LocalParameters(center, model, known_batches(*(b[i] for b in batches), f"b{i}"), f"w{i}", i, places) for i in range(2)
    ]
    rule = load_scheme(scheme.folder, scheme.name)
    steps = [build_steps(rule, center, local, hyperparameters(hp, center, local)) for local in locals_]
    what = {
        "come": [[ending.came_to_gate("", i), present.enter(i)] for i in range(places)],
        "leave": [present.leave(i) for i in range(places)],
    }
    problem = Problem(model.initial_parameters, batches, scheme.hyperparameters(3))
    lives, at, here, counts = [scheme.life(problem, i) for i in range(2)], [0, 0], {0, 1}, set()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        session.run(tf.local_variables_initializer(), {k: v for local in locals_ for k, v in local.init_feed_dict.items()})
        session.run(what["come"][1])
        for worker in shuffled(scheme.steps) + shuffled(scheme.steps):
            if rng.random() < 0.5:
                other, does = come_and_go(rng, here, places)
                session.run(what[does][other])
            problem.present = len(here)
            counts.add(len(here))
            session.run(steps[worker][at[worker]].fetches())
            next(lives[worker])
            at[worker] = (at[worker] + 1) % scheme.steps
        ours = Walk(session.run(center.read()[0]), [])
    assert counts == {2, 3, 4, 5}
    close(ours, Walk(problem.center, []), model.initial_parameters)
    problem_of_two = written_again(scheme, shuffled(scheme.steps) * 2, model.initial_parameters, batches)
    assert np.abs(ours.center - problem_of_two.center).max() > 1e-3  # n matters


def test_elastic_force_in_a_loop_of_the_graph(graph, model, batches, known_batches, load_scheme):
    """As in a long run: it reads anew, each time around, how many workers there are."""
    scheme, times = SCHEMES["AEASGD"], tf.placeholder(tf.int32, [])
    hp = types.SimpleNamespace(**vars(scheme.hyperparameters(3)), max_workers=5)
    center, come = GlobalParameters(model.initial_parameters), [ending.came_to_gate("", i) for i in range(4)]
    center.present = ending.Present("")
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)), num_workers=5)
    hp, rule = hyperparameters(hp, center, local), load_scheme(*scheme[:2])
    build_rounds(rule, center, local, hp)
    loop = repeat_rounds(rule, center, local, hp, 2, times)
    problem = Problem(model.initial_parameters, batches, scheme.hyperparameters(3))
    life = aeasgd(problem, 0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        session.run(tf.local_variables_initializer(), local.init_feed_dict)
        for i in range(1, 4):
            session.run(come[i])
            session.run(loop, {times: i})
            problem.present = 1 + i
            for _ in range(2 * i * scheme.steps):
                next(life)
        ours = Walk(session.run(center.read()[0]), [])
    close(ours, Walk(problem.center, []), model.initial_parameters)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("decay", [0, 0.5])
def test_schedule_and_weight_decay(model, walk, batches, scheme, decay):
    """A learning rate that falls with the global step: on the ps of its update, on a worker of its last pull."""
    steps, schedule = shuffled(scheme.steps), lambda step: 1 / (1 + 0.3 * step)
    scheme = scheme._replace(hp={**scheme.hp, "decay": decay})
    ours = walk(scheme, steps, schedule=lambda step: schedule(tf.cast(step, tf.float32)))
    close(ours, written_again(scheme, steps, model.initial_parameters, batches, schedule=schedule), model.initial_parameters)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("window", "scheme"), INTERVALS.values(), ids=INTERVALS)
def test_downpour_with_two_intervals(model, walk, batches, scheme, order, window):
    steps = order(scheme.steps)
    ours = walk(scheme, steps, window)
    expected = written_again(scheme, steps, model.initial_parameters, batches, window)
    close(ours, expected, model.initial_parameters)
    assert ours.log == expected.log


def test_intervals_that_hardly_ever_meet(load_scheme, user_error):
    """Their round would take minutes to build."""
    scheme = INTERVALS["fetches seldom"][1]._replace(hp={"n_fetch": 1009})
    with user_error("--n_push=997 and --n_fetch=1009 make rounds of 1005973 steps; choose one to divide the other"):
        build_steps(load_scheme("DOWNPOUR", "downpour"), None, None, scheme.hyperparameters(997))


def test_staleness_of_the_orders(model, batches):
    """The orders differ in what they are named after: how many updates of others came between pull and push."""
    staleness = {}
    for order in ORDERS:
        log = written_again(SCHEMES["HogWild"], order(3), model.initial_parameters, batches).log
        staleness[order] = [tau for _, tau, _ in log]
    assert staleness[in_turn] == [0] * 20
    assert staleness[at_once] == [0, 1] * 10
    assert staleness[overtaken] == [0, 0, 2] * 6 + [0, 0]
    assert max(staleness[shuffled]) > 1


def test_own_updates_are_not_staleness(model, walk):
    """A worker that pushes twice since its pull is not made stale by itself."""
    window, scheme = INTERVALS["fetches seldom"]
    assert [tau for _, tau, _ in walk(scheme, in_turn(5), window).log] == [0] * 40
    assert [tau for _, tau, _ in walk(scheme, at_once(5), window).log] == [0, 1, 1, 2] * 10


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_stale_updates_lead_elsewhere(walk, scheme):
    """The same batches and the same start: staleness is all that differs, and nothing prevents it, as a lock would."""
    fresh, stale = (walk(scheme, order(scheme.steps)).center for order in (in_turn, at_once))
    assert np.abs(fresh - stale).max() > 1e-3


def test_each_scheme_is_another(walk):
    """None is a copy of a neighbour under another name."""
    centers = {name: walk(scheme, at_once(scheme.steps)).center for name, scheme in SCHEMES.items()}
    names = list(centers)
    for i, one in enumerate(names):
        for other in names[:i]:
            assert np.abs(centers[one] - centers[other]).max() > 1e-3, f"{one} and {other} do the same"


def test_where_schemes_agree(walk):
    """Schemes that are the same by their formulas are the same."""

    def center(name, order=in_turn, window=3, **hp):
        scheme = SCHEMES[name]
        return walk(scheme._replace(hp={**scheme.hp, **hp}), order(scheme.steps), window).center

    def same(one, other):
        np.testing.assert_allclose(one, other, rtol=1e-5)

    same(center("AGN", window=1), center("HogWild", window=1))
    same(center("Dynamic-SGD"), center("HogWild"))  # nothing is stale in turn
    same(center("DC-ASGD"), center("HogWild"))
    same(center("DC-ASGD", at_once, lambda0=0.0), center("HogWild", at_once))
    same(center("AEAMSGD", at_once, momentum=0.0), center("AEASGD", at_once))
    same(center("DOWNPOUR", at_once, window=1), center("DOWNPOUR-Easy", at_once, window=1))


def test_ringmaster_throws_away_what_is_too_stale(model, walk, batches):
    """Nothing with R = ∞, which is HogWild to the last bit; with R = 2 what is stale by 2."""
    hogwild, ringmaster = SCHEMES["HogWild"], SCHEMES["Ringmaster-ASGD"]
    for order in overtaken, shuffled:
        ours = walk(ringmaster._replace(hp={"staleness_threshold": float("inf")}), order(3), num_ps=2)
        all = walk(hogwild, order(3), num_ps=2)
        assert ours.center.tobytes() == all.center.tobytes()
        assert (ours.log, ours.dropped) == (all.log, [])
    two = ringmaster._replace(hp={"staleness_threshold": 2.0})
    ours = walk(two, overtaken(3), num_ps=2)
    expected = written_again(two, overtaken(3), model.initial_parameters, batches)
    close(ours, expected, model.initial_parameters)
    assert (ours.log, ours.dropped) == (expected.log, expected.dropped)
    assert [worker for worker, _ in ours.dropped] == [0, 1] * 3  # the one that was overtaken


@pytest.mark.slow
@pytest.mark.parametrize("num_ps", [1, 2])
def test_asynchronous_diloco_of_one_worker_is_diloco(walk, model, known_batches, batches, load_scheme, num_ps):
    """With N = 1, whatever c is. With another N it is not."""
    scheme, steps = SCHEMES["Asynchronous-DiLoCo"], [0] * 4 * ROUNDS
    centers = []
    for more in {"buffer_size": 1}, {"buffer_size": 1, "momentum_activation": 1.0}, {"buffer_size": 2}:
        centers.append(walk(scheme._replace(hp={**scheme.hp, **more}), steps, num_ps=num_ps).center)
    hp, rule = scheme.hyperparameters(3), load_scheme("DiLoCo", "diloco")
    replay = Replay(rule, hp, model, lambda i: known_batches(*(b[i] for b in batches), f"batches_{i}"), 1, num_ps)
    replay.run(ROUNDS)
    np.testing.assert_allclose(centers[0], replay.center, rtol=1e-5)
    np.testing.assert_allclose(centers[1], replay.center, rtol=1e-5)
    assert np.abs(centers[2] - replay.center).max() > 1e-3
    replay.close()


@pytest.mark.parametrize("name", ["AEASGD", "AEAMSGD"])
def test_replicas_stay_apart(model, known_batches, batches, load_scheme, name):
    """They are not made equal to the center, and an exchange moves both sides by as much."""
    scheme = SCHEMES[name]
    make = load_scheme(scheme.folder, scheme.name)
    replay = Replay(make, scheme.hyperparameters(3), model, lambda i: known_batches(*(b[i] for b in batches), f"batches_{i}"))
    for worker in [0, 1] * 3 * 5:
        replay.step(worker)
    replicas, center = replay.replicas, replay.center
    assert np.abs(replicas[0] - replicas[1]).max() > 1e-3
    assert np.abs(replicas - center).max(axis=1).min() > 1e-3
    for worker in [0, 1]:
        replay.step(worker)  # the local steps
    before = replay.replicas.sum(axis=0) + replay.center
    for worker in [0, 1, 1, 0]:
        replay.step(worker)  # the exchange
    assert np.abs(replay.replicas - replicas).max() > 1e-3
    np.testing.assert_allclose(replay.replicas.sum(axis=0) + replay.center, before, rtol=1e-5, atol=1e-5)
    replay.close()


def test_overlap_is_one_round_staler(model, walk, batches):
    """It counts others' updates since the pull of the round before. The first two rounds begin with the same x̃."""
    scheme = SCHEMES["HogWild, overlap"]
    # Rounds in turn: one update of the other in each round since.
    assert [tau for _, tau, _ in walk(scheme, in_turn(3)).log] == [0, *[1] * 19]
    # Both pull, then both push: the other's of the round before, and for the second one that of this round.
    assert [tau for _, tau, _ in walk(scheme, at_once(3)).log] == [0, 1, *[1, 2] * 9]
    without = SCHEMES["HogWild"]
    for order in in_turn, at_once:
        assert np.abs(walk(scheme, order(3)).center - walk(without, order(3)).center).max() > 1e-3
    alone = walk(scheme, [0] * 3 * 4)  # the second round trains at the x of the first
    assert alone.log == [(0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 0, 4)]
    problem = Problem(model.initial_parameters, batches, without.hyperparameters(1))
    xs = [problem.start]
    for k in range(4):
        xs.append(xs[-1] - RATE * problem.gradient(0, xs[max(0, k - 1)]))
    np.testing.assert_allclose(walk(scheme, [0] * 3 * 4, window=1).center, xs[-1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize("name", ["HogWild", "DOWNPOUR", "pushes seldom"])
def test_overlap_waits_for_half_as_many_messages(model, graph, load_scheme, known_batches, batches, servers, name, num_ps):
    """Of ten rounds in a call: without it each waits for a pull and a push, with it two rounds do."""
    task, _ = servers(num_ps)
    center = GlobalParameters(model.initial_parameters, num_ps, task.device_fn())
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        rows = {}
        for kind in "", ", overlap":
            window, scheme = INTERVALS.get(name + kind) or (1, SCHEMES[name + kind])
            rule, hp = load_scheme(scheme.folder, scheme.name), hyperparameters(scheme.hyperparameters(window), center, local)
            rows[kind] = messages_in_a_row(build_rounds(rule, center, local, hp, 10))
    a_round = 4 if name == "pushes seldom" else 2  # two pulls, one of them after a training
    assert rows == {"": a_round * 10, ", overlap": a_round * 5}


@pytest.mark.slow
@pytest.mark.parametrize("num_ps", [0, 1, 2])
@pytest.mark.parametrize(
    ("window", "scheme"),
    [*[(2, scheme) for scheme in SCHEMES.values()], *INTERVALS.values()],
    ids=[*SCHEMES, *INTERVALS],
)
def test_rounds_in_one_call(model, graph, load_scheme, initialized, known_batches, batches, servers, scheme, window, num_ps):
    """As a worker runs them: ten rounds in three calls, one of them timed, on ps tasks or (0) alone."""
    task, server = servers(num_ps) if num_ps else (None, None)
    center = GlobalParameters(model.initial_parameters, max(1, num_ps), task and task.device_fn())
    with tf.device(task and task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        hp = hyperparameters(scheme.hyperparameters(window), center, local)
        rule = load_scheme(scheme.folder, scheme.name)
        timed = timed_rounds(rule, center, local, hp, 2)
        built = [build_rounds(rule, center, local, hp, 2), timed, repeat_rounds(rule, center, local, hp, 2, 3)]
    session = initialized(center, local, target=server.target if server else "")
    steps = np.concatenate([session.run(rounds).steps for rounds in built])
    expected = written_again(scheme, [0] * scheme.steps * 10, model.initial_parameters, batches, window)
    close(Walk(session.run(center.read()[0]), []), expected, model.initial_parameters)
    assert [(0, after - before - 1, after) for before, after in steps.tolist()] == expected.log


@pytest.mark.slow
@pytest.mark.parametrize("in_a_loop", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_messages_of_a_round(model, graph, load_scheme, initialized, known_batches, batches, servers, name, in_a_loop):
    """One each way, none between rounds; and the steps of all rounds together. An elastic exchange asks for x̃ first.

    With overlap a call begins with the step that is known, and ends with the one at which x̃ was read for the next call.

    A loop costs up to three each time around (each is listed once, however often it goes around), and the ps waits at the end
    for an answer."""
    scheme, rounds = SCHEMES[name], 4
    task, server = servers(1)
    center = GlobalParameters(model.initial_parameters, 1, task.device_fn())
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        rule, hp = load_scheme(scheme.folder, scheme.name), hyperparameters(scheme.hyperparameters(2), center, local)
        built = build_rounds(rule, center, local, hp, rounds)
        if in_a_loop:
            built = repeat_rounds(rule, center, local, hp, rounds, times=3)
    sent = messages(initialized(center, local, target=server.target), built)
    ahead = int(scheme.hp.get("overlap", False))
    asks, least, most = name.startswith("AE"), *((1, 4) if in_a_loop else (0, 0))
    assert sent.count(("/job:ps", "/job:worker")) == rounds + 1 + ahead
    to_ps = sent.count(("/job:worker", "/job:ps"))
    assert least <= to_ps - ahead - rounds * (2 if asks else 1) <= most
    assert len(sent) == rounds + 1 + ahead + to_ps
