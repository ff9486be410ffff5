"""Every scheme against its oracle in NumPy: one table, scheme × order of workers × number of ps × option.

A new scheme belongs, with its oracle, into `SCHEMES` or `TOGETHER` of oracle.py. That updates are right in orders that workers
choose, and in calls of several rounds, is tested here; what is special to one scheme stands behind that.
"""

import random
import types

import numpy as np
import pytest
from oracle import (
    ALL,
    MORE,
    OF_FOLDERS,
    RATE,
    ROUNDS,
    SCHEMES,
    TOGETHER,
    Problem,
    at_once,
    close,
    in_turn,
    inverse,
    messages,
    messages_in_a_row,
    overtaken,
    shuffled,
    written_again,
)
from order import races

from common import tf
from common.cluster import membership
from common.scheme.center import GlobalParameters, fragments_of
from common.scheme.learning_rates import hyperparameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import build_rounds, build_steps, repeat_rounds, timed_rounds

# Whose calls loop and are timed, too: one of each way to pull, to push and to wait.
LONG_RUNS = (
    "HogWild",
    "HogWild, overlap",
    "DOWNPOUR",
    "AEASGD",
    "Dynamic-SGD",
    "Synchronous-SGD",
    "Streaming-DiLoCo",
    "SparseLoCo",
    "Semi-Synchronous-SGD",
)
# Whose graphs are those of a neighbour but for a constant.
LIKE_A_NEIGHBOUR = (
    "R = 2",
    "R = ∞",
    "Asynchronous-DiLoCo, c > 0",
    "SlowMo",
    "one backup worker",
    "no bound",
    "in step",
    "issync",
)
# Whose steps come in the same order in a round of "neither divides the other", or "neither, overlap".
IN_A_LONGER_ROUND = ("fetches seldom", "pushes seldom", "pushes seldom, overlap")


def unequal(scheme, batches):
    """The batches; of a scheme whose workers weigh as much as their samples, one has three, the other seven."""
    return [[part[0][:3], part[1]] for part in batches] if scheme.hp.get("weigh_by_samples") else batches


def alone(scheme, num_ps):
    """The hyperparameters of its only worker."""
    hp = scheme.hyperparameters(2, num_ps)
    hp.num_workers, hp.learning_rates = 1, [RATE]
    return hp


@pytest.fixture
def on_three_ps(replays, batches):
    """A function that gives the `Replay` of a scheme on three ps, with a schedule and weight decay."""

    def on_three_ps(scheme):
        scheme = scheme.decaying()
        return replays(scheme, scheme.hyperparameters(3, 3), 3, inverse, unequal(scheme, batches))

    return on_three_ps


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_exact(model, on_three_ps, batches, name):
    """x̃; which worker made which update, and how stale; what was dropped; which worker had to wait when."""
    scheme, batches = ALL[name].decaying(), unequal(ALL[name], batches)
    for order, steps in scheme.orders().items():
        replay = on_three_ps(scheme)  # anew
        taken = replay.take(steps)
        expected = written_again(scheme, steps, model.initial_parameters, batches, 3, 3, schedule=inverse)
        close(replay.center, expected.center, model.initial_parameters, 0.1 if order != "uneven" else 0.05)
        assert len(expected.log) + len(expected.dropped) >= ROUNDS
        log = [(update.worker, update.staleness, update.updated) for update in replay.updates]
        assert (log, replay.dropped, taken) == (expected.log, expected.dropped, expected.taken), order


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in LIKE_A_NEIGHBOUR + IN_A_LONGER_ROUND])
def test_rounds_in_one_call(model, graph, load_scheme, initialized, known_batches, batches, servers, name):
    """As a worker runs them, here the only one, on three ps: rounds, timed ones, a loop. No operations race."""
    scheme, (task, server) = ALL[name].decaying(), servers(3)
    values = alone(scheme, 3)
    center = GlobalParameters(model.initial_parameters, 3, task.device_fn(), inverse, fragments=fragments_of(values))
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        rule, hp = load_scheme(scheme.folder, scheme.name), hyperparameters(values, center, local)
        calls = [build_rounds(rule, center, local, hp, 2 if center.fragments == 1 else 1)]
        fetched = [each.name.partition(":")[0] for each in tf.nest.flatten(list(calls[0]))]
        assert races(tf.graph_util.extract_sub_graph(graph.as_graph_def(), fetched)) == []
        if name in LONG_RUNS:
            calls += [repeat_rounds(rule, center, local, hp, 1, 3), timed_rounds(rule, center, local, hp, 2)]
    session = initialized(center, local, target=server.target)
    if scheme.waits:
        session.run(center.waits(local).enter)
    steps = np.concatenate([session.run(rounds).steps for rounds in calls]).tolist()
    problem = Problem(model.initial_parameters, batches, values, inverse, present=1, apart=True)
    life = scheme.life(problem, 0)
    while problem.version < len(steps):
        next(life)
    assert steps == [[i, i + 1] for i in range(len(steps))] and len(steps) >= 2
    close(session.run(center.read()[0]), problem.center, model.initial_parameters, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_FOLDERS, "HogWild, overlap", "DOWNPOUR, overlap"])
def test_messages_of_a_round(model, graph, load_scheme, initialized, known_batches, batches, servers, name):
    """On one ps, without a schedule: one each way, none between rounds, and the steps of all rounds together.

    An elastic exchange asks for x̃ first. With overlap a call begins with the step that is known, and ends with the one at which
    x̃ was read for the next call. To wait costs no message; schemes of updates together say once a call whether it is over.

    A loop costs up to three each time around (each is listed once, however often it goes around), and the ps waits at the end
    for an answer. x̃ is then what NumPy gives.
    """
    scheme, rounds, (task, server) = ALL[name], 2, servers(1)
    values = alone(scheme, 1)
    center = GlobalParameters(model.initial_parameters, 1, task.device_fn(), fragments=fragments_of(values))
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        rule, hp = load_scheme(scheme.folder, scheme.name), hyperparameters(values, center, local)
        calls = {False: build_rounds(rule, center, local, hp, rounds)}
        if name in ("HogWild", "HogWild, overlap", "AEASGD", "Dynamic-SGD"):
            calls[True] = repeat_rounds(rule, center, local, hp, rounds, times=3)
    session = initialized(center, local, target=server.target)
    if scheme.waits:
        session.run(center.waits(local).enter)
    problem = Problem(model.initial_parameters, batches, values, present=1)
    life, ahead = scheme.life(problem, 0), int(scheme.hp.get("overlap", False))
    for in_a_loop, built in calls.items():
        sent, exchanges = messages(session, built), rounds * center.fragments
        asks, least, most = name.startswith("AE"), *((1, 4) if in_a_loop else (0, 0))
        at_the_end = 2 if scheme.waits and name != "Semi-Synchronous-SGD" else 1
        assert sent.count(("/job:ps", "/job:worker")) == exchanges + at_the_end + ahead
        to_ps = sent.count(("/job:worker", "/job:ps"))
        assert least <= to_ps - ahead - exchanges * (2 if asks else 1) <= most
        assert len(sent) == exchanges + at_the_end + ahead + to_ps
    while problem.version < session.run(center.step):
        next(life)
    close(session.run(center.read()[0]), problem.center, model.initial_parameters, 0.01)


# --- What follows from the formulas, of the oracles alone: `test_exact` says that the schemes do the same ---


@pytest.fixture
def walk(model, batches):
    """A function that takes the steps of a scheme in this order of workers, by NumPy."""

    def walk(scheme, order, window=3, num_ps=1, **hp):
        scheme = scheme._replace(hp={**scheme.hp, **hp})
        return written_again(scheme, order, model.initial_parameters, unequal(scheme, batches), window, num_ps)

    return walk


def test_staleness_of_the_orders(walk):
    """How many updates of others came between pull and push; a worker that pushes twice since its pull is not stale itself."""

    def staleness(scheme, order):
        return [tau for _, tau, _ in walk(scheme, order).log]

    assert staleness(SCHEMES["HogWild"], in_turn(3)) == [0] * 20
    assert staleness(SCHEMES["HogWild"], at_once(3)) == [0, 1] * 10
    assert staleness(SCHEMES["HogWild"], overtaken(3)) == [0, 0, 2] * 6 + [0, 0]
    assert max(staleness(SCHEMES["HogWild"], shuffled(3))) > 1
    assert staleness(MORE["fetches seldom"], in_turn(5)) == [0] * 40
    assert staleness(MORE["fetches seldom"], at_once(5)) == [0, 1, 1, 2] * 10


def test_each_scheme_is_another(walk):
    """None is a copy of a neighbour under another name, and staleness matters to each in which nobody waits."""
    centers = {name: walk(scheme, at_once(scheme.steps)).center for name, scheme in SCHEMES.items()}
    for name, scheme in SCHEMES.items():
        assert np.abs(walk(scheme, in_turn(scheme.steps)).center - centers[name]).max() > 1e-3
    centers |= {name: walk(scheme, scheme.orders()["long_shuffled"]).center for name, scheme in TOGETHER.items()}
    names = list(centers)
    for i, one in enumerate(names):
        for other in names[:i]:
            assert np.abs(centers[one] - centers[other]).max() > 1e-4, f"{one} and {other} do the same"


def test_where_schemes_agree(walk):
    """Schemes that are the same by their formulas are the same."""

    def same(one, other, order=in_turn, window=3, num_updates=20, **hp):
        walks = [walk(ALL[name], order(ALL[name].steps), window, **more) for name, more in ((one, hp), (other, {}))]
        np.testing.assert_allclose(walks[0].center, walks[1].center, rtol=1e-9)
        assert walks[0].log == walks[1].log and len(walks[0].log) == num_updates

    same("AGN", "HogWild", window=1)
    same("Dynamic-SGD", "HogWild")  # nothing is stale in turn
    same("DC-ASGD", "HogWild")
    same("DC-ASGD", "HogWild", at_once, lambda0=0.0)
    same("AEAMSGD", "AEASGD", at_once, momentum=0.0)
    same("DOWNPOUR", "DOWNPOUR-Easy", at_once, window=1)

    def together(name, other, steps=5, other_steps=5, window=3, more=(), **hp):
        ours, theirs = (
            walk(TOGETHER[name], [0, 1] * steps * 20, window, **hp),
            walk(TOGETHER[other], [0, 1] * other_steps * 20, window, **dict(more)),
        )
        np.testing.assert_allclose(ours.center, theirs.center, rtol=1e-9)
        assert ours.log == theirs.log and len(ours.log) >= 38

    together("Synchronous-SGD-different-learning-rates", "Synchronous-SGD", 4, 4, 1, learning_rates=[RATE / 2, RATE / 2])
    together("Local-SGD", "Synchronous-SGD", 5, 4, 1)
    slow = {"slow_momentum": 0.5, "slow_learning_rate": 0.8}
    together("Local-SGD", "SlowMo", more=slow, **slow)
    together("Streaming-DiLoCo", "DiLoCo", 4, 5, fragments=1, overlap_steps=0, mixing=0.0)
    everything = {"chunk_size": 3, "top": 3, "value_bits": 32, "error_decay": 1.0}  # so that nothing is kept
    together("SparseLoCo", "DiLoCo", 6, 5, more={"momentum": 0.0}, learning_rate=RATE, **everything)


@pytest.mark.slow
def test_ringmaster_throws_away_what_is_too_stale(walk, on_three_ps):
    """None with R = ∞: HogWild to the last bit. With R = 2 a gradient of staleness 2; with R = 1.5 none of staleness 1."""
    for order in overtaken, shuffled:
        all, hogwild = on_three_ps(MORE["R = ∞"]), on_three_ps(SCHEMES["HogWild"])
        for replay in all, hogwild:
            replay.take(order(3))
        assert all.center.tobytes() == hogwild.center.tobytes()
        assert (all.updates, all.dropped) == (hogwild.updates, [])
    assert [worker for worker, _ in walk(MORE["R = 2"], overtaken(3)).dropped] == [0, 1] * 3  # the one that was overtaken
    replay = on_three_ps(MORE["R = 2"]._replace(hp={"staleness_threshold": 1.5}))
    replay.take(at_once(3))
    assert {update.staleness for update in replay.updates} == {0, 1} and replay.dropped == []


def test_asynchronous_diloco_of_one_worker_is_diloco(model, batches):
    """With N = 1, whatever c is. With another N it is not."""

    def alone(name, **hp):
        scheme = ALL[name]
        scheme = scheme._replace(hp={**scheme.hp, "local_learning_rate": 0.1, **hp})
        problem = Problem(model.initial_parameters, batches, scheme.hyperparameters(3), present=1)
        life = scheme.life(problem, 0)
        while problem.version < ROUNDS:
            next(life)
        return problem.center

    diloco = alone("DiLoCo", momentum=0.9)
    np.testing.assert_allclose(alone("Asynchronous-DiLoCo", buffer_size=1), diloco, rtol=1e-9)
    np.testing.assert_allclose(alone("Asynchronous-DiLoCo", buffer_size=1, momentum_activation=1.0), diloco, rtol=1e-9)
    assert np.abs(alone("Asynchronous-DiLoCo", buffer_size=2) - diloco).max() > 1e-3


def test_overlap_is_one_round_staler(walk, model, batches):
    """It counts others' updates since the pull of the round before. The first two rounds begin with the same x̃."""
    scheme, without = SCHEMES["HogWild, overlap"], SCHEMES["HogWild"]
    # Rounds in turn: one update of the other in each round since.
    assert [tau for _, tau, _ in walk(scheme, in_turn(3)).log] == [0, *[1] * 19]
    # Both pull, then both push: the other's of the round before, and for the second one that of this round.
    assert [tau for _, tau, _ in walk(scheme, at_once(3)).log] == [0, 1, *[1, 2] * 9]
    for order in in_turn, at_once:
        assert np.abs(walk(scheme, order(3)).center - walk(without, order(3)).center).max() > 1e-3
    alone = walk(scheme, [0] * 3 * 4, window=1)
    assert alone.log == [(0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 0, 4)]
    problem = Problem(model.initial_parameters, batches, without.hyperparameters(1))
    xs = [problem.start]
    for k in range(4):
        xs.append(xs[-1] - RATE * problem.gradient(0, xs[max(0, k - 1)]))
    np.testing.assert_allclose(alone.center, xs[-1], rtol=1e-9)


def test_of_two_updates_together_each_has_a_gradient_of_both(walk):
    log = walk(TOGETHER["Synchronous-SGD"], TOGETHER["Synchronous-SGD"].orders()["long_shuffled"]).log
    updates = {update for _, _, update in log if log.count((0, 0, update)) == log.count((1, 0, update)) == 1}
    assert len(log) == 2 * len(updates) or len(log) == 2 * len(updates) + 1  # one may be on its way to the next
    assert max(updates) == len(updates) > 30


def test_a_backup_worker_is_not_waited_for(walk):
    """The one that comes second is dropped, and never applied late."""
    ours = walk(TOGETHER["one backup worker"], [0, 1] * 200)
    assert ours.taken == [0, 1] * 200  # nobody waits
    assert len(ours.dropped) > 30 and {worker for worker, _ in ours.dropped} == {1}
    assert [update for _, _, update in ours.log] == list(range(1, len(ours.log) + 1))


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_bound_is_never_broken(walk, staleness):
    """The clock of one that begins a step is at most s ahead of the slowest. And reaches that."""
    scheme = TOGETHER["Semi-Synchronous-SGD"]
    clocks, position, leads = [0, 0], [0, 0], []
    for worker in walk(scheme, scheme.orders()["uneven"], staleness=staleness).taken:
        position[worker] += 1
        if position[worker] % 5 == 1:  # it has come through the wait
            leads.append(clocks[worker] - min(clocks))
        clocks[worker] += position[worker] % 5 == 0
    assert max(leads) == staleness and len(leads) > 10


def test_workers_weigh_as_much_as_their_samples(walk, model, batches):
    """One has three batches, the other seven; weighed alike they lead elsewhere."""
    scheme = TOGETHER["slow momentum"]
    order, alike = scheme.orders()["long_shuffled"], scheme._replace(hp={**scheme.hp, "weigh_by_samples": False})
    weighed = walk(scheme, order).center
    assert np.abs(weighed - written_again(alike, order, model.initial_parameters, unequal(scheme, batches)).center).max() > 1e-3


# --- Of single schemes ---


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
def test_elastic_force_is_that_of_the_workers_who_are_there(graph, model, batches, known_batches, load_scheme, name):
    """α = β/n with the n of the moment at which x̃ is read. Two of them train, others come, leave and die between any steps."""
    scheme, places, rng = SCHEMES[name], 5, random.Random(0)
    hp = types.SimpleNamespace(**vars(scheme.hyperparameters(3)), max_workers=places)
    center = GlobalParameters(model.initial_parameters)
    center.members = members = membership.Members("")
    locals_ = [
        LocalParameters(center, model, known_batches(*(b[i] for b in batches), f"b{i}"), f"w{i}", i, places) for i in range(2)
    ]
    rule = load_scheme(scheme.folder, scheme.name)
    steps = [build_steps(rule, center, local, hyperparameters(hp, center, local)) for local in locals_]
    what = {
        "come": [[members.come(i), members.enter(i)] for i in range(places)],
        "leave": [members.leave(i, tf.zeros([1], tf.float64)) for i in range(places)],
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
        ours = session.run(center.read()[0])
    assert counts == {2, 3, 4, 5}
    close(ours, problem.center, model.initial_parameters)
    problem_of_two = written_again(scheme, shuffled(scheme.steps) * 2, model.initial_parameters, batches)
    assert np.abs(ours - problem_of_two.center).max() > 1e-3  # n matters


def test_elastic_force_in_a_loop_of_the_graph(graph, model, batches, known_batches, load_scheme):
    """As in a long run: it reads anew, each time around, how many workers there are."""
    scheme, times = SCHEMES["AEASGD"], tf.placeholder(tf.int32, [])
    hp = types.SimpleNamespace(**vars(scheme.hyperparameters(3)), max_workers=5)
    center = GlobalParameters(model.initial_parameters)
    center.members = members = membership.Members("")
    come = [members.come(i) for i in range(4)]
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)), num_workers=5)
    hp, rule = hyperparameters(hp, center, local), load_scheme(*scheme[:2])
    build_rounds(rule, center, local, hp)
    loop = repeat_rounds(rule, center, local, hp, 2, times)
    problem = Problem(model.initial_parameters, batches, scheme.hyperparameters(3))
    life = scheme.life(problem, 0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        session.run(tf.local_variables_initializer(), local.init_feed_dict)
        for i in range(1, 4):
            session.run(come[i])
            session.run(loop, {times: i})
            problem.present = 1 + i
            for _ in range(2 * i * scheme.steps):
                next(life)
        close(session.run(center.read()[0]), problem.center, model.initial_parameters)


def test_intervals_that_hardly_ever_meet(load_scheme, user_error):
    """Their round would take minutes to build."""
    hp = types.SimpleNamespace(window=997, n_fetch=1009)
    with user_error("--n_push=997 and --n_fetch=1009 make rounds of 1005973 steps; choose one that divides the other"):
        build_steps(load_scheme("DOWNPOUR", "downpour"), None, types.SimpleNamespace(windows=0, local_steps=0), hp)


@pytest.mark.parametrize("name", ["AEASGD", "AEAMSGD"])
def test_replicas_stay_apart(on_three_ps, name):
    """They are not made equal to the center, and an exchange moves both sides by as much."""
    replay = on_three_ps(SCHEMES[name])
    replay.take([0, 1] * 3 * 5)
    replicas, center = replay.replicas, replay.center
    assert np.abs(replicas[0] - replicas[1]).max() > 1e-3
    assert np.abs(replicas - center).max(axis=1).min() > 1e-3
    replay.take([0, 1])  # the local steps
    before = replay.replicas.sum(axis=0) + replay.center
    replay.take([0, 1, 1, 0])  # the exchange
    assert np.abs(replay.replicas - replicas).max() > 1e-3
    np.testing.assert_allclose(replay.replicas.sum(axis=0) + replay.center, before, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HogWild", "pushes seldom"])
def test_overlap_waits_for_half_as_many_messages(model, graph, load_scheme, known_batches, batches, servers, name):
    """Of four rounds in a call: without it each waits for a pull and a push, with it two rounds do."""
    task, _ = servers(1)
    center = GlobalParameters(model.initial_parameters, 1, task.device_fn())
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        rows = {}
        for kind in "", ", overlap":
            scheme = ALL[name + kind]
            rule, hp = load_scheme(scheme.folder, scheme.name), hyperparameters(scheme.hyperparameters(1), center, local)
            rows[kind] = messages_in_a_row(build_rounds(rule, center, local, hp, 4))
    a_round = 4 if name == "pushes seldom" else 2  # two pulls, one of them after a training
    assert rows == {"": a_round * 4, ", overlap": a_round * 2}
