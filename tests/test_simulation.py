"""simulation.py, a graph of one worker: many steps a call against one step a call, against NumPy, and as a program."""

import functools
import heapq
import json
import math
import random
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
import test_schemes
import test_synchronous_schemes
from oracle import Problem
from order import races
from runs import ROOT
from test_schemes import LIKE_A_NEIGHBOUR

from common import tf
from common.core.flags import TrainingFailed, UserError
from common.data import datasets
from common.data.batches import Batches
from common.models import keras_model
from common.scheme.compression import Compression
from common.scheme.learning_rates import Schedule
from common.simulation.actions import Costs
from common.simulation.engine import Engine
from common.simulation.facts import MOST_PARAMETERS, facts_of, facts_of_size, messages_of
from common.simulation.replay import Replay
from common.simulation.shards import Shards, shards_of
from common.simulation.virtual_time import RESTART, Activity, VirtualTime

pytestmark = pytest.mark.slow

WORKERS, BATCH = 3, 4
SCHEMES: dict[str, Any] = {**test_schemes.SCHEMES, **test_synchronous_schemes.TOGETHER}


@pytest.fixture
def engine(regression):
    """A function that makes an engine of three workers on a linear regression."""
    made = []

    def engine(scheme, hp, model, dataset=regression, num_workers=WORKERS, **more):
        shards = shards_of(dataset, num_workers, BATCH, seed=0)
        made.append(Engine(scheme, hp, model, shards, **more))
        return made[-1]

    yield engine
    for each in made:
        each.close()


def hyperparameters(scheme, window=2):
    values = {**vars(scheme.hyperparameters(window)), "num_workers": WORKERS}
    if "learning_rates" in values:
        values["learning_rates"] = [0.05, 0.02, 0.01]
    return types.SimpleNamespace(**values)


def batches_of(dataset, i, num_workers, seed):
    """Worker i's, as a cluster has them."""
    x, y = datasets.shard(dataset, i, num_workers)
    return Batches(x, y, BATCH, seed=seed, name=f"batches_{i}")


def orders(replay, count, seed=0):
    """Lets workers take steps in a random order, but those that have to wait; returns the (step, worker) taken."""
    rng, taken, position = random.Random(seed), [], [0] * WORKERS
    for _ in range(count):
        worker = rng.choices(range(WORKERS), [5, 3, 1])[0]
        if not replay.has_to_wait(worker):
            replay.step(worker)
            taken.append((position[worker], worker))
            position[worker] = (position[worker] + 1) % len(replay.steps)
    return taken


# Without those whose graphs are those of a neighbour but for a constant: `Replay.take` runs them in one call, see test_exact.
DIFFERENT_GRAPHS = [name for name in SCHEMES if name not in LIKE_A_NEIGHBOUR or name == "one backup worker"]


@pytest.mark.parametrize("name", DIFFERENT_GRAPHS)
def test_many_steps_a_call_equal_one_step_a_call(engine, load_scheme, model, regression, name):
    """In any order of steps: x̃, the x of all workers, losses, and the global steps of reads and updates; and `facts_of`.

    `Replay` runs the same functions, so what they compute is tested against NumPy, below and in test_schemes.py.

    What uses a variable has an order, in the graph as TensorFlow's optimizer leaves it: else a run would differ from another,
    rarely, on a busy machine. With a schedule: where a ps computes a factor that its optimizer makes no use of, the optimizer
    of graphs takes more away.
    """
    scheme, schedule, num_ps = SCHEMES[name], Schedule("cosine", 2), 1 + (name in ("HogWild", "DiLoCo", "DC-ASGD"))
    schedule.ask = lambda: 100
    rule, hp = load_scheme(scheme.folder, scheme.name), hyperparameters(scheme)

    def make_batches(i):
        return batches_of(regression, i, WORKERS, i)

    replay = Replay(rule, hp, model, make_batches, WORKERS, num_ps, schedule)
    taken = orders(replay, 150)
    facts = facts_of(rule, hp, model, shards_of(regression, WORKERS, BATCH, seed=0), num_ps)
    messages = [(action.up, action.down) for action in facts.actions]
    ours = engine(rule, hp, model, num_ps=num_ps, schedule=schedule, messages=messages)
    assert facts == (ours.actions, ours.waiting, ours.size, ours.optimizers)
    outcomes, graph = with_graph(lambda: ours.run(*np.array(taken).T), ours.session)
    assert races(graph) == []
    assert np.abs(replay.center - model.initial_parameters).max() > 0.02
    tight: dict[str, Any] = {"rtol": 2e-6, "atol": 2e-6}  # the graph optimizer may exchange factors
    np.testing.assert_allclose(ours.center, replay.center, **tight)
    np.testing.assert_allclose(ours.replicas, replay.replicas, **tight)
    losses = outcomes.losses[~np.isnan(outcomes.losses)]
    np.testing.assert_allclose(losses, [loss for _, loss in replay.losses], rtol=1e-4, atol=1e-6)
    made = (outcomes.updated >= 0) & (outcomes.updated > outcomes.step_before)
    assert outcomes.updated[made].tolist() == [update.updated for update in replay.updates]
    replay.close()


def test_an_engine_begins_anew_with_other_samples_and_parameters(engine, load_scheme, model, regression, monkeypatch):
    """As one that is made with them, to the byte; a worker's own parameters begin there, too."""
    scheme = SCHEMES["AEASGD"]
    rule, hp = load_scheme(scheme.folder, scheme.name), hyperparameters(scheme)
    steps = 3 * list(range(3)), 3 * [0] + 3 * [1] + 3 * [0]
    used, parameters = engine(rule, hp, model), model.initial_parameters + 1
    used.run(*steps)
    used.restart(shards_of(regression, WORKERS, BATCH, seed=5), parameters)
    first = used.center.copy()
    used.run(*steps)
    monkeypatch.setattr(model, "initial_parameters", parameters)
    fresh = Engine(rule, hp, model, shards_of(regression, WORKERS, BATCH, seed=5))
    np.testing.assert_array_equal(first, parameters)
    fresh.run(*steps)
    np.testing.assert_array_equal(used.center, fresh.center)
    np.testing.assert_array_equal(used.replicas, fresh.replicas)
    fresh.close()
    for num_workers, batch in (WORKERS + 1, BATCH), (WORKERS, BATCH + 1):
        with pytest.raises(ValueError, match="as many workers"):
            used.restart(shards_of(regression, num_workers, batch, seed=0))


@pytest.mark.parametrize("name", ["AEASGD", "AEAMSGD"])
def test_what_is_not_sent_and_what_is_given_are_added_in_order(engine, load_scheme, model, name):
    """Both to x, in one step."""
    scheme = SCHEMES[name]
    rule, hp = load_scheme(scheme.folder, scheme.name), hyperparameters(scheme)
    ours = engine(rule, hp, model, compression=Compression("int8"))
    found = races(with_graph(lambda: ours.run([0], [0]), ours.session)[1])
    assert found == []


def with_graph(run, session):
    """Returns run(), and the `GraphDef` that TensorFlow makes of what it runs in a session, in one call of it."""
    metadata, call = tf.RunMetadata(), session.run
    session.run = functools.partial(call, options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    result = run()
    session.run = call
    (graph,) = metadata.partition_graphs
    return result, graph


@pytest.mark.parametrize("is_read_first", [True, False, None])
def test_a_race_is_found(graph, is_read_first):
    """In a loop, in a branch: two operations on a variable of which nothing says which comes first."""
    variable = tf.get_variable("v", initializer=0.0, use_resource=True)

    def both():
        read = None if is_read_first is False else variable.read_value()
        with tf.control_dependencies([read] if is_read_first else []):
            write = variable.assign(1.0, read_value=False)
        with tf.control_dependencies([] if is_read_first is None else [write]):
            read = variable.read_value() if read is None else read
        with tf.control_dependencies([write]):
            return tf.identity(read)

    def body(i, total):
        return i + 1, total + tf.cond(i > 1, both, lambda: variable.assign(2.0))

    total = tf.while_loop(lambda i, _: i < 4, body, (0, 0.0), parallel_iterations=1)
    with tf.Session(graph=graph) as session:
        session.run(variable.initializer)
        found = races(with_graph(lambda: session.run(total), session)[1])
    assert len(found) == (is_read_first is None)


def test_they_are_equal_to_the_last_bit(engine, hogwild, model, regression):
    hp = hyperparameters(SCHEMES["HogWild"])
    make_batches = lambda i: batches_of(regression, i, WORKERS, i)  # noqa: E731
    replay = Replay(hogwild, hp, model, make_batches, WORKERS)
    taken = np.array(orders(replay, 200))
    at_once, in_parts = (engine(hogwild, hp, model) for _ in range(2))
    at_once.run(*taken.T)
    for part in np.array_split(taken, 7):
        in_parts.run(*part.T)
    assert at_once.center.tobytes() == in_parts.center.tobytes() == replay.center.tobytes()
    replay.close()


@pytest.mark.parametrize("name", ["DC-ASGD, adaptive", "AEASGD", "Asynchronous-DiLoCo"])
def test_equals_numpy(engine, load_scheme, model, regression, name):
    """Two workers, whose pushes are stale, against the scheme written again from its formula: slots on the ps, x̃ and x changed
    together, an optimizer of the worker's own. Other schemes: `Replay` equals NumPy, and is equalled, see above.
    """
    scheme, window = SCHEMES[name], 2
    steps = test_schemes.shuffled(scheme.steps)
    shards = shards_of(regression, 2, BATCH, seed=0)
    numbers = [shards.take(np.array([i]), np.array([7 * BATCH]))[0].reshape(7, BATCH) for i in range(2)]
    batches = [np.stack([part[own] for own in numbers]) for part in (regression.x_train, regression.y_train)]
    hp, count = scheme.hyperparameters(window), 6  # as many steps as the first seven batches last
    problem = Problem(model.initial_parameters, batches, hp)
    walks, position, taken = [scheme.life(problem, i) for i in range(2)], [0, 0], []
    for worker in [worker for worker in steps if steps.count(worker)]:
        if position[worker] == 3 * scheme.steps:
            continue
        next(walks[worker])
        taken.append((position[worker] % scheme.steps, worker))
        position[worker] += 1
    assert len(problem.log) + len(problem.dropped) == count
    ours = engine(load_scheme(scheme.folder, scheme.name), hp, model, num_workers=2)
    outcomes = ours.run(*np.array(taken).T)
    assert np.abs(ours.center - problem.center).max() < 1e-5 * np.abs(problem.center).max()
    made = (outcomes.updated >= 0) & (outcomes.updated > outcomes.step_before)
    assert outcomes.updated[made].tolist() == [version for _, _, version in problem.log]


# Three workers whose windows take these seconds, and messages that take LATENCY: event loops in NumPy, from the formulas
# alone. A worker's push is applied and its next pull is made at one moment; then x̃ comes down, and a window is trained.
SECONDS, LATENCY, RATE, WINDOW = [0.020, 0.0231, 0.0377], 0.002, 0.05, 2


def gradient_of(x, batch):
    """The gradient of the mean squared error of y = w a + b at x = [w, b]."""
    a, y = batch
    residual = a @ x[:-1] + x[-1] - y[:, 0]
    return 2 * np.append(a.T @ residual, residual.sum()) / len(a)


def adagrad(x, slots, g):
    slots = slots + g**2
    return x - RATE * g / np.sqrt(slots), slots


def first_arrivals():
    """A heap of (time, worker) of the first pushes."""
    heap = [(3 * LATENCY + seconds, i) for i, seconds in enumerate(SECONDS)]
    heapq.heapify(heap)
    return heap


def hogwild_loop(center, draw, updates):
    """x̃ ← x̃ − η Σ g along a window of SGD from the pulled x; no worker waits."""
    x, pulled, heap = [center] * WORKERS, [0] * WORKERS, first_arrivals()
    stale: list[int] = []
    while len(stale) < updates:
        now, i = heapq.heappop(heap)
        walk, total = x[i], 0
        for _ in range(WINDOW):
            g = gradient_of(walk, draw(i))
            walk, total = walk - RATE * g, total + g
        center = center - RATE * total
        stale.append(len(stale) - pulled[i])
        x[i], pulled[i] = center, len(stale)
        heapq.heappush(heap, (now + 2 * LATENCY + SECONDS[i], i))
    return center, stale


def overlap_loop(center, draw, updates):
    """The same, but x is what was read when the push before the last was applied; it came while the worker trained."""
    x, ahead = [(center, 0)] * WORKERS, [(center, 0, 2 * LATENCY)] * WORKERS
    heap = [(seconds + LATENCY, i) for i, seconds in enumerate(SECONDS)]
    heapq.heapify(heap)
    stale: list[int] = []
    by: list[int] = []
    while len(stale) < updates:
        now, i = heapq.heappop(heap)
        (walk, version), total = x[i], 0
        for _ in range(WINDOW):
            g = gradient_of(walk, draw(i))
            walk, total = walk - RATE * g, total + g
        center = center - RATE * total
        stale.append(sum(j != i for j in by[version:]))
        by.append(i)
        value, version, there = ahead[i]
        x[i], ahead[i] = (value, version), (center, len(by), now + LATENCY)
        heapq.heappush(heap, (max(now - LATENCY, there) + SECONDS[i] + LATENCY, i))
    return center, stale


def downpour_loop(center, draw, updates):
    """The same with Adagrad: of each worker along its window, and on the ps with the sum of the window's g."""
    x, pulled, heap = [center] * WORKERS, [0] * WORKERS, first_arrivals()
    stale: list[int] = []
    own, slots = [np.full(len(center), 0.1)] * WORKERS, np.full(len(center), 0.1)
    while len(stale) < updates:
        now, i = heapq.heappop(heap)
        walk, total = x[i], 0
        for _ in range(WINDOW):
            g = gradient_of(walk, draw(i))
            total = total + g
            walk, own[i] = adagrad(walk, own[i], g)
        center, slots = adagrad(center, slots, total)
        stale.append(len(stale) - pulled[i])
        x[i], pulled[i] = center, len(stale)
        heapq.heappush(heap, (now + 2 * LATENCY + SECONDS[i], i))
    return center, stale


def synchronous_loop(center, draw, updates, backup_workers=0):
    """x̃ ← x̃ − η (1/N) Σ of the first N = 3 − b that come with a gradient at x̃. The others are dropped, and pull at once."""
    x, pulled, dropped, heap, version, given = [center] * WORKERS, [0] * WORKERS, 0, first_arrivals(), 0, {}
    while version < updates:
        now, i = heapq.heappop(heap)
        walk, total = x[i], 0
        for _ in range(WINDOW):
            g = gradient_of(walk, draw(i))
            walk, total = walk - RATE * g, total + g
        go_on = [i]
        if pulled[i] == version:
            given[i], go_on = total, []
        else:
            dropped += 1
        if len(given) == WORKERS - backup_workers:
            center, version, go_on, given = center - RATE * np.mean(list(given.values()), axis=0), version + 1, list(given), {}
        for j in go_on:
            x[j], pulled[j] = center, version
            heapq.heappush(heap, (now + 2 * LATENCY + SECONDS[j], j))
    return center, dropped


LOOPS: dict[str, Any] = {
    "HogWild": hogwild_loop,
    "HogWild, overlap": overlap_loop,
    "DOWNPOUR": downpour_loop,
    "Synchronous-SGD": synchronous_loop,
    "one backup worker": functools.partial(synchronous_loop, backup_workers=1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_three_unequal_workers_equal_an_event_loop_in_numpy(engine, load_scheme, model, regression, name):
    """Clock and arithmetic together: x̃ after 40 updates, and the staleness of each, or how many gradients were dropped."""
    scheme, updates = SCHEMES[name], 40
    ours = engine(load_scheme(scheme.folder, scheme.name), hyperparameters(scheme, WINDOW), model)
    costs = Costs(step=0.01, delay=np.array(SECONDS) - 0.02, latency=LATENCY)
    clock = VirtualTime(ours.actions, WORKERS, costs, ours.waiting)
    schedule = clock.run(updates=updates)
    ours.run(schedule.steps, schedule.workers)
    shards = shards_of(regression, WORKERS, BATCH, seed=0)

    def draw(i):
        own = shards.take(np.array([i]), np.array([BATCH]))[0]
        return [part[own].astype(float) for part in (regression.x_train, regression.y_train)]

    start = model.initial_parameters.astype(float)
    center, more = LOOPS[name](start, draw, updates)
    assert np.abs(center - start).max() > 0.1
    assert np.abs(ours.center - center).max() < 1e-5 * np.abs(center).max()
    if "Synchronous" in name or "backup" in name:
        assert clock.dropped == more and (more > 10) == ("backup" in name)
    else:
        assert schedule.staleness().tolist() == more and max(more) > 2


@pytest.mark.parametrize("name", ["HogWild, overlap", "DOWNPOUR, overlap", "pushes seldom, overlap", "neither, overlap"])
def test_the_clock_knows_what_overlap_does(engine, load_scheme, model, regression, name):
    """Where workers wait for what they have read ahead, and where not: the staleness is that of the same steps in `Replay`."""
    scheme, hp = test_schemes.ALL[name], hyperparameters(test_schemes.ALL[name])
    rule = load_scheme(scheme.folder, scheme.name)
    replay = Replay(rule, hp, model, lambda i: batches_of(regression, i, WORKERS, i), WORKERS)
    ours = engine(rule, hp, model, messages=[(16 * each.writes, 24 * each.reads) for each in replay.actions])
    slow_links = {"bandwidth_down": [2e3, 1e3, 1e4], "bandwidth_up": 5e2, "ps_bandwidth": 4e3}
    for costs in (
        {"latency": 0.03},
        {"latency": [0.001, 0.03, 0.01], **slow_links},
        {"read": 0.004, "apply": 0.003, "latency": 0.002, "rounds_per_call": 3, "call": 0.01},
    ):
        replay.restart()
        ours.restart(shards_of(regression, WORKERS, BATCH, seed=0))
        clock = VirtualTime(ours.actions, WORKERS, Costs(step=0.01, step_cv=0.5, **costs), ours.waiting)
        schedule = clock.run(updates=60)
        for step, worker in zip(schedule.steps, schedule.workers, strict=True):
            assert replay.next_step(worker) == step
            replay.step(worker)
        assert schedule.staleness().tolist() == [update.staleness for update in replay.updates], costs
        assert [update.updated for update in replay.updates] == list(range(1, 61))
        ours.run(schedule.steps, schedule.workers)
        np.testing.assert_allclose(ours.center, replay.center, rtol=2e-6, atol=2e-6)
    replay.close()


def test_a_late_worker_has_read_ahead_what_there_is(engine, load_scheme, model):
    scheme, hp = SCHEMES["HogWild, overlap"], hyperparameters(SCHEMES["HogWild, overlap"])
    ours = engine(load_scheme(scheme.folder, scheme.name), hp, model)
    ours.run([0, 1, 2] * 5, [0] * 15)
    now = ours.center
    outcomes = ours.run([RESTART, 0], [1, 1])
    assert outcomes.pulled[1] == ours.global_step == 5
    assert ours.replicas[1].tobytes() == now.tobytes() != model.initial_parameters.tobytes()


def test_samples_come_in_the_order_of_batches(regression):
    """In any pieces, of shards that differ in size."""
    shards, sizes = shards_of(regression, 3, BATCH, seed=7), {0: 14, 1: 13, 2: 13}
    assert [int(n) for n in shards.counts] == list(sizes.values())
    drawn: dict[int, list[int]] = {i: [] for i in range(3)}
    rng = np.random.default_rng(0)
    for _ in range(20):
        workers, counts = rng.integers(0, 3, 5), rng.integers(0, 3, 5) * BATCH
        numbers, starts = shards.take(workers, counts)
        for worker, start, count in zip(workers, starts, counts, strict=True):
            drawn[worker] += numbers[start : start + count].tolist()
    for i in range(3):
        with tf.Graph().as_default(), tf.Session() as session:
            batches = batches_of(regression, i, 3, 7 + i)
            indices = batches.next(len(drawn[i]) // BATCH)
            session.run(tf.local_variables_initializer(), batches.init_feed_dict)
            expected = i + 3 * session.run(indices).ravel()
        assert drawn[i] == expected.tolist()


@pytest.mark.parametrize("num_ps", [1, 2])
def test_bytes_of_a_round(load_scheme, model, regression, num_ps):
    """Four bytes a parameter each way; of a read also the global step."""
    shards, size = shards_of(regression, WORKERS, BATCH, 0), 4 * model.size

    def of(name):
        scheme = SCHEMES[name]
        return messages_of(load_scheme(scheme.folder, scheme.name), hyperparameters(scheme), model, shards, num_ps)

    assert of("HogWild") == of("HogWild, overlap") == [[0, size + 8], [0, 0], [size, 0]]
    assert of("AEASGD") == [[0, 0], [0, size + 8], [size, 0]]
    assert of("DC-ASGD") == [[0, size + 8], [0, 0], [size, 0]]
    pull, train, push, wait = of("Synchronous-SGD")
    assert (pull, train, wait) == ([0, size + 8], [0, 0], [0, 0])
    assert push[0] >= size


@pytest.mark.parametrize("name", DIFFERENT_GRAPHS)
def test_a_round_of_a_size_is_that_of_any_model_of_that_size(engine, load_scheme, model, regression, name):
    scheme = SCHEMES[name]
    load, hp = load_scheme(scheme.folder, scheme.name), hyperparameters(scheme)
    shards = shards_of(regression, WORKERS, BATCH, 0)
    hp.batch_size = BATCH
    for num_ps, packed in [(2, None)] + [(1, Compression("int8"))] * (name == "HogWild"):
        of_model = facts_of(load, hp, model, shards, num_ps, packed)
        assert facts_of_size(load, hp, model.size, WORKERS, num_ps, packed) == of_model


def test_bytes_of_a_model_of_any_size(load_scheme):
    """What does not grow with the model, as the global step, counts once."""
    hp = types.SimpleNamespace(learning_rate=0.1, window=1, batch_size=1, overlap=False, num_workers=2)
    hogwild = load_scheme("HogWild", "hogwild")
    for size in 1000, 25_000_000, MOST_PARAMETERS:
        pull, _, push = facts_of_size(hogwild, hp, size, 2, 1).actions
        assert (pull.down, push.up) == (4 * size + 8, 4 * size)
    pull, _, push = facts_of_size(hogwild, hp, 7e9, 2, 1).actions
    assert push.up == 28e9 and 0 < pull.down - 28e9 < 100


def test_a_worker_begins_anew(engine, load_scheme, model):
    """Its x is x̃, its optimizer is as at first; the others notice nothing."""
    scheme = SCHEMES["AEAMSGD"]
    ours = engine(load_scheme("AEAMSGD", "aeamsgd"), hyperparameters(scheme), model)
    ours.run([0, 1, 2, 0, 1, 2, 0], [0, 0, 0, 1, 1, 1, 2])
    before, center = ours.replicas, ours.center
    velocity = next(v for v in ours._variables() if "velocity" in v.name or v.op.name.endswith("/v"))
    assert np.abs(ours.rows(velocity)[0]).max() > 0
    ours.run([RESTART], [0])
    assert np.array_equal(ours.replicas[0], center) and np.array_equal(ours.center, center)
    assert np.array_equal(ours.replicas[1:], before[1:])
    assert np.abs(ours.rows(velocity)[0]).max() == 0 < np.abs(ours.rows(velocity)[1]).max()


def test_a_model_with_state_of_its_own(images, hogwild):
    """Dropout differs from worker to worker; moving means are each worker's own, and estimated anew where x̃ is evaluated."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Flatten(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    model = keras_model.by_labels(keras.Sequential([keras.Input([8, 8, 1]), *layers]), is_classification=True)
    everything = [np.arange(len(images.x_train))] * 2
    shards = Shards((images.x_train, images.y_train), everything, 8, seeds=[0, 0])  # the same samples in the same order
    hp = types.SimpleNamespace(window=1, learning_rate=0.1, num_workers=2)
    ours = Engine(hogwild, hp, model, shards)
    outcomes = ours.run([0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 0, 1])
    assert outcomes.losses[2] != outcomes.losses[3]
    result = ours.evaluate(images.x_test, images.y_test)
    assert set(result) == {"loss", "accuracy"} and np.isfinite(result["loss"])
    ours.close()


def test_shards_by_a_dirichlet_distribution():
    """No sample twice, as many of each; the smaller α, the fewer classes has a worker."""
    digits = datasets.load("digits")

    def classes(alpha, seed=0):
        shards = shards_of(digits, 20, 32, seed, alpha)
        own = np.split(np.sort(shards._second.reshape(20, -1), axis=1), 20)
        assert len(set(shards._second.tolist())) == len(shards._second) == 20 * (1438 // 20)
        return [np.bincount(digits.y_train[numbers.ravel()], minlength=10) / 71 for numbers in own]

    largest = {alpha: np.mean([max(shares) for shares in classes(alpha)]) for alpha in (0.01, 10, 1000)}
    assert largest[0.01] > 0.9 > 0.6 > largest[10] > 0.25 > largest[1000] > 0.1
    assert not np.array_equal(classes(1, seed=1), classes(1, seed=2))


def test_all_reduce_cannot_be_simulated(load_scheme, model, regression, engine, user_error):
    with user_error(
        "the workers of this scheme average among themselves within a step (center.ring), so one worker's graph cannot stand "
        "for all; Synchronous-SGD makes the same updates through the ps, and can be simulated"
    ):
        hp = types.SimpleNamespace(learning_rate=0.1, steps_per_call=1, num_workers=WORKERS)
        engine(load_scheme("Synchronous-SGD", "all_reduce"), hp, model)


def test_a_tensor_of_another_step_is_refused(model, regression, engine, user_error):
    def half_right(center, local, hp):
        sgd = tf.train.GradientDescentOptimizer(0.1)
        yield local.pull(center)
        start = local.value * 1.0
        yield local.train(1, sgd)
        yield center.push(sgd, start - local.value)

    with user_error(
        "half_right uses a tensor of another step: keep it in a vector, `yield local.assign(local.vector("
        '"start"), value)`'
    ):
        engine(half_right, types.SimpleNamespace(num_workers=WORKERS), model)


def simulate(tmp_path, *arguments):
    """Runs the program; returns what it printed, and result.json."""
    program = [sys.executable, ROOT / "Simulation" / "simulate.py", *arguments, f"--run_dir={tmp_path / 'run'}"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((tmp_path / "run" / "result.json").read_text())


def test_program(tmp_path):
    """A run of a hundred workers, and all that it writes."""
    arguments = ["DOWNPOUR", "--num_workers=100", "--window=5", "--learning_rate=0.01", "--epochs=20", "--latency_ms=20"]
    printed, result = simulate(tmp_path, *arguments, "--mbit=100", "--step_cv=0.3", "--non_iid=1", "--away=3:0.1:0.2")
    assert result["global_steps"] == 180 and result["num_workers"] == len(result["samples_per_worker"]) == 100
    assert 0.2 < result["virtual_seconds"] < 2 and result["test_accuracy"] > 0.1 and result["restarts"] == 1
    assert 60 < result["staleness_mean"] < 99
    assert "100 virtual workers" in printed and "staleness" in printed
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in trace if event["ph"] == "X"} >= {"train", "pull", "push"}
    for name in ("curve.png", "timeline.png", "model.keras", "metrics/virtual.jsonl"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_spans_of_a_row_of_the_trace_do_not_overlap(tmp_path, program):
    """Where a message takes half a second, several pushes of a worker are under way at once: each in a row of its own."""
    intervals = {"window": 2, "n_fetch": 20}
    run = program.simulate("DOWNPOUR", num_workers=2, clock_only=True, steps=60, latency_ms=500, trace_secs=10, **intervals)
    program.write_trace(run.clock.spans, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(run.clock.spans) > 50
    for worker in range(2):
        names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == worker}
        assert list(names.values())[:3] == ["train", "push", "push 2"] and list(names.values())[-1] == "pull"
        for tid, name in names.items():
            own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == (worker, tid))
            assert own and all(one[1] <= other[0] + 1e-3 for one, other in zip(own, own[1:]))
            parts = {e["name"] for e in spans if (e["pid"], e["tid"]) == (worker, tid)}
            assert parts <= ({"train", "wait"} if name == "train" else {name.split()[0]})


def test_overlapping_spans_get_rows_of_their_own(program):
    spans = [Activity(0, "push", 0.0, 3.0), Activity(0, "push", 1.0, 4.0)]
    spans += [Activity(0, "push", 3.0, 5.0), Activity(1, "push", 2.0, 6.0)]
    spans += [Activity(0, "train", 0.0, 9.0), Activity(0, "wait", 9.0, 10.0)]
    rows = dict(program.in_rows(reversed(spans)))
    assert [rows[span] for span in spans] == [0, 1, 0, 0, 0, 0]


def test_clock_alone(tmp_path):
    """For more workers than there are samples, and a model that no machine here could hold."""
    printed, result = simulate(tmp_path, "HogWild", "--num_workers=5000", "--clock_only", "--parameters=1e12", "--steps=20000")
    assert result["bytes_up"] == 4e12 and "test_loss" not in result
    assert result["bytes_down"] == pytest.approx(4e12, rel=1e-6)
    assert result["global_steps"] == 20_000 and result["staleness_max"] == 4999


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(ROOT / "Simulation"))
    import simulate

    return simulate


def test_the_folder_is_locked_while_a_simulation_writes(tmp_path, program, monkeypatch):
    arguments = ["HogWild", "--num_workers=2", "--steps=3", f"--run_dir={tmp_path / 'run'}"]

    def write(run, where):
        with pytest.raises(UserError, match="is in use"):
            program.program(arguments)
        return 7

    monkeypatch.setattr(program, "write", write)
    assert program.program(arguments) == 7


# Schemes that other tests simulate by the program, too, and whose global steps they assert.
ELSEWHERE = {"AEAMSGD", "DOWNPOUR", "Ringmaster-ASGD", "Synchronous-SGD"}


def test_all_schemes_and_equal_seeds(program):
    """In one process, as a notebook does. Equal seeds, to the byte, of a few schemes: no graph has a race, see above."""
    few = {"num_workers": 4, "steps": 12, "step_cv": 0.5, "latency_ms": 2, "learning_rate": 0.05}
    for folder in sorted({scheme.folder for scheme in SCHEMES.values()} - ELSEWHERE):
        flags: dict[str, Any] = dict(few)
        if folder == "Synchronous-SGD-different-learning-rates":
            flags |= {"learning_rates": [0.01, 0.02, 0.03, 0.04]}
            del flags["learning_rate"]
        one = program.simulate(folder, **flags)
        assert one.result["global_steps"] == 12, folder
        if folder in ("HogWild", "AEASGD", "Streaming-DiLoCo"):
            again = program.simulate(folder, **flags)
            assert one.final[0].tobytes() == again.final[0].tobytes(), folder
            assert one.lines == again.lines, folder
        if folder == "HogWild":
            other = program.simulate(folder, **flags, seed=1)
            assert other.final[0].tobytes() != one.final[0].tobytes()


TWO_INPUTS = """
import keras
import numpy as np
import tensorflow as tf

def data():
    rng = np.random.default_rng(0)

    def half(n):
        price, area = rng.normal(size=(2, n, 1)).astype("f4")
        return tf.data.Dataset.from_tensor_slices(({"price": price, "area": area}, 3 * price - area))

    return half(1000), half(200)

def model():
    price, area = keras.Input((1,), name="price"), keras.Input((1,), name="area")
    both = keras.layers.Concatenate()([price, area])
    return keras.Model({"price": price, "area": area}, keras.layers.Dense(1)(both))
"""


@pytest.mark.slow
def test_a_dataset_of_two_inputs(program, tmp_path):
    """Its arrays are those of the cache, each input by its name."""
    (tmp_path / "two.py").write_text(TWO_INPUTS)
    flags = {"data": f"{tmp_path}/two.py:data", "model": f"{tmp_path}/two.py:model", "data_cache": str(tmp_path / "cache")}
    run = program.simulate("HogWild", num_workers=4, learning_rate=0.05, steps=400, **flags)
    np.testing.assert_allclose(run.final[0], [3, -1, 0], atol=1e-4)
    assert run.result["samples"] == 400 * 32


STEP_MS, STEP_CV = 4.0, 0.3


@pytest.fixture(scope="module")
def real_run(tmp_path_factory, program):
    """A function that returns a folder with what a real run of two workers on such machines and links would write."""

    def real_run(scheme="HogWild", latency_ms=15.0, delays=(40, 60), rounds_per_call=5, **flags):
        costs = {"step_ms": STEP_MS, "step_cv": STEP_CV, "latency_ms": latency_ms, "rounds_per_call": rounds_per_call}
        flags |= {"delays": list(delays)} if delays else {}
        run = program.simulate(scheme, num_workers=2, clock_only=True, steps=2000, **costs, **flags)
        folder = tmp_path_factory.mktemp("real")
        (folder / "metrics").mkdir()
        known = {"delays": list(delays), "rounds_per_call": rounds_per_call, "simulated": False, "restarts": 0}
        of_schemes: dict[str, dict] = {"Semi-Synchronous-SGD": {"staleness": 10}, "DOWNPOUR": {"n_fetch": None}}
        own = of_schemes.get(scheme, {})
        known["flags_of_scheme"] = {name: flags.get(name, default) for name, default in own.items()}
        (folder / "result.json").write_text(json.dumps(run.result | known))
        (folder / "model.json").write_text(json.dumps({"variables": run.model.description}))
        for worker in range(2):
            text = "".join(json.dumps(line) + "\n" for line in lines_of(run, worker))
            (folder / "metrics" / f"worker-{worker}.jsonl").write_text(text)
        return folder

    return real_run


def lines_of(run, worker):
    """The metrics of a worker: it starts slowly, then there is a line for each fifth of the run, and a rest without a speed."""
    schedule, end = run.schedule, run.clock.now
    line = {"worker": worker, "global_step": 2000, "last_step": 2000, "samples": 1}
    yield line | {"time": 0.0, "samples_per_second": 1.0, "staleness": {"0": 20}}
    yield line | {"time": 0.5, "samples_per_second": 1.0, "staleness": {"0": 20}, "timed_rounds": [{"train": STEP_MS / 1000}]}
    own = schedule.workers == worker
    trains = sum(action.local_steps > 0 for action in run.actions)
    for fifth in range(5):
        part = own & (schedule.times > fifth / 5 * end) & (schedule.times <= (fifth + 1) / 5 * end)
        stale = type(schedule)(*(column[part] for column in schedule)).staleness()
        counts = {str(k): int(n) for k, n in zip(*np.unique(stale, return_counts=True), strict=True)}
        trained = schedule.seconds[part & (schedule.seconds > 0)]
        timed = trained[: len(trained) // trains * trains].reshape(-1, trains).sum(axis=1).tolist()
        speed = {"samples_per_second": len(stale) * 32 * run.settings.window / (end / 5)}
        timed = [{"train": seconds, "pull": 0.001} for seconds in timed]
        yield line | {"time": 1.0 + fifth, "staleness": counts, "timed_rounds": timed} | speed
    yield line | {"time": 7.0, "staleness": {"0": 1}}
    yield {"worker": worker, "global_step": 2000, "last_step": 2000, "time": 8.0, "test_loss": 0.5}


def test_a_disagreement_says_where_it_is(program, monkeypatch):
    """Between the clock and the scheme's operations, should one of them have a fault."""

    def run(engine, steps, workers):
        outcomes = original(engine, steps, workers)
        outcomes.updated[np.flatnonzero(outcomes.updated == 3)[:1]] = 4
        return outcomes

    original = Engine.run
    monkeypatch.setattr(Engine, "run", run)
    where = r"worker 0, at 0\.02 virtual seconds \(event 11 of 18\): expected 3, found 4"
    with pytest.raises(RuntimeError, match=rf"in 1 of 5 updates, first in step 2 of a round of {where}"):
        program.simulate("HogWild", num_workers=2, steps=5, evaluation_secs=10)


def test_gradients_that_are_thrown_away(program):
    """The clock knows in advance which: of three equal workers, all but one in each step."""
    result = program.simulate("Ringmaster-ASGD", num_workers=3, staleness_threshold=1, steps=20).result
    assert (result["global_steps"], result["staleness_max"]) == (20, 0)
    assert 38 <= result["gradients_dropped"] <= 40


@pytest.mark.parametrize(
    "flags", [{"scheme": "Synchronous-SGD"}, {"scheme": "Synchronous-SGD", "backup_workers": 1}, {"scheme": "Streaming-DiLoCo"}]
)
def test_a_line_has_the_step_of_the_parameters_that_were_evaluated(program, monkeypatch, flags):
    """Also where some of the gradients of the next update have arrived."""
    evaluated = []

    def evaluate(engine, *samples):
        evaluated.append(engine.global_step)
        return original(engine, *samples)

    original = Engine.evaluate
    monkeypatch.setattr(Engine, "evaluate", evaluate)
    run = program.simulate(**flags, num_workers=3, steps=6, delays=[0, 40, 80], evaluation_secs=0.02)
    assert len(evaluated) > 12 and [line["global_step"] for line in run.lines] == evaluated


def test_a_schedule_of_the_learning_rate_ends_with_the_run(program):
    """Also where an update is of several workers' gradients."""
    for scheme, last in ("HogWild", 45), ("Synchronous-SGD", 15):
        run = program.simulate(scheme, num_workers=3, learning_rate_schedule="linear", epochs=1)
        assert run.result["global_steps"] == run.last == last


@pytest.mark.parametrize(
    "what",
    [
        {},
        {"latency_ms": 0.2, "delays": ()},  # of a few milliseconds a round
        {"scheme": "DOWNPOUR", "window": 10},
        {"scheme": "AEASGD", "latency_ms": 3.0},
        {"scheme": "Semi-Synchronous-SGD", "rounds_per_call": 1},
    ],
    ids=str,
)
def test_calibration_finds_what_a_run_was_made_with(program, real_run, what):
    """And what four workers would do: the other two are slower, and there were none of them."""
    what = {"scheme": "HogWild", "latency_ms": 15.0, "rounds_per_call": 5, **what}
    folder = real_run(**what)
    scheme, latency = what.pop("scheme"), what.pop("latency_ms")
    more = {**what, "clock_only": True, "steps": 2000, "delays": [40, 60, 80, 100]}
    run = program.simulate(scheme, num_workers=4, calibrate=[folder], **more)
    found = run.calibration
    assert 1000 * found["step"] == pytest.approx(STEP_MS, rel=0.03)
    assert found["step_cv"] == pytest.approx(STEP_CV, rel=0.1)
    assert 1000 * found["latency"] == pytest.approx(latency, rel=0.1, abs=0.05)  # of other steps of random length
    (fit,) = found["runs"]
    assert fit["simulated_rounds_per_second"] == pytest.approx(fit["rounds_per_second"], rel=0.01)
    assert fit["staleness_distance"] < 0.1
    costs = {"step_ms": STEP_MS, "step_cv": STEP_CV, "latency_ms": latency}
    known = program.simulate(scheme, num_workers=4, **costs, **more)
    for key in "samples_per_second", "staleness_mean":
        assert run.result[key] == pytest.approx(known.result[key], rel=0.03, abs=0.02)


def test_calibration_finds_the_speed_of_links_if_their_latency_is_known(program, real_run):
    folder = real_run(latency_ms=15.0, mbit=[40])
    found = program.simulate("HogWild", calibrate=[folder], latency_ms=15.0, clock_only=True, steps=10).calibration
    assert found["latency"] is None and found["bandwidth"] * 8 / 1e6 == pytest.approx(40, rel=0.1)


def test_what_is_said_where_nothing_more_is_found(program):
    """Messages cost nothing more than what the flags say, or a run had no updates whose staleness is known."""
    one = {"path": "one", "num_workers": 1, "rounds_per_second": 2.0, "simulated_rounds_per_second": 1.5}
    one |= {"staleness_mean": None, "simulated_staleness_mean": None, "staleness_distance": None}
    found = {"step": 0.004, "step_cv": 0.3, "rounds_per_call": 5, "runs": [one]}
    for links in {"latency": None, "bandwidth": None}, {"latency": 0.0, "bandwidth": None}:
        flags, warning, fits = program.calibrated(found | links)
        assert flags.startswith("calibrated: --step_ms=4 --step_cv=0.3 ") and "slower than the real runs" in warning
        assert fits == "one, 1 worker: 2.0 rounds/s measured, 1.5 simulated"
    assert len(program.calibrated(found | {"latency": None, "bandwidth": 5e6})) == 2


@pytest.mark.parametrize(
    "more", [{"n_fetch": 10}, {"warm_start_steps": 1000}, {"machine_cv": 0.8}, {"start_at": [0, 5]}], ids=str
)
def test_what_is_simulated_does_not_change_what_a_run_is_fitted_with(program, real_run, more):
    """The real run pulled every window; it had no warm start, and its machines were equal."""
    folder = real_run("DOWNPOUR", window=5)
    found = program.simulate("DOWNPOUR", window=5, calibrate=[folder], num_workers=2, clock_only=True, steps=2000, **more)
    assert 1000 * found.calibration["step"] == pytest.approx(STEP_MS, rel=0.03)
    assert 1000 * found.calibration["latency"] == pytest.approx(15.0, rel=0.1)


@pytest.mark.parametrize(
    "scheme, more",
    [("AEASGD", {}), ("AEAMSGD", {}), ("DOWNPOUR", {"window": 2, "n_fetch": 4}), ("HogWild", {"overlap": True})],
)
def test_with_one_worker_latency_changes_nothing_but_the_time(program, scheme, more):
    """A push is made of what was there when it was sent, also if it arrives when its worker has long trained on."""
    near, far = (program.simulate(scheme, num_workers=1, steps=20, latency_ms=ms, **more) for ms in (0, 1000))
    assert far.result["virtual_seconds"] > near.result["virtual_seconds"] + 1
    assert far.result["global_steps"] == near.result["global_steps"] == 20
    assert far.final[0].tobytes() == near.final[0].tobytes()


@pytest.mark.parametrize(
    "scheme, given, line",
    [
        ("HogWild", {"away": ["1:0.1:0.3", "1:0.2:0.5"]}, "--away: two absences of worker 1 overlap at 0.2 s"),
        ("HogWild", {"away": ["1:0.1:0.2"], "start_at": [0, 1]}, "worker 1 is away from 0.1 s on, but begins only at 1 s"),
        ("HogWild", {"delays": [1, 2, 3]}, "--delays has 3 values for 2 workers: give at most one for each"),
        ("HogWild", {"clock_only": True, "non_iid": 0.1}, "--non_iid divides samples, but --clock_only uses none"),
        ("HogWild", {"clock_only": True, "parameters": 1e6, "model": "cnn"}, "--parameters takes the place of a model: leave"),
        ("DOWNPOUR", {"overlap": True, "window": 4, "n_fetch": 2}, "DOWNPOUR prefetches elsewhere than right after a push"),
        ("Synchronous-SGD", {"warm_start_steps": 5}, "--warm_start_steps is not a flag of simulate.py"),
    ],
    ids=str,
)
def test_flags_of_the_cluster_that_contradict_each_other(program, user_error, scheme, given, line):
    with user_error(line):
        program.simulate(scheme, num_workers=2, steps=10, **given)


def test_rates_of_the_benchmark_are_those_of_the_folders(program, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import workers

    for name, rate in workers.SCHEMES.items():
        _, settings = program.parse([name, "--num_workers=2"])
        given = workers.flags_of(name, rate, 2)
        assert {flag: pytest.approx(getattr(settings, flag)) for flag in given} == given


def test_too_few_updates_for_so_many_workers(program):
    """A line says that some workers push nothing. If an update is made of all workers' gradients, one is enough."""

    def line(scheme, **flags):
        return program.too_few(program.simulate(scheme, num_workers=20, clock_only=True, step_cv=0.3, **flags))

    advice = "of them never push; train for longer, or with fewer workers"
    assert line("HogWild", steps=12) == f"12 updates for 20 workers: 8 {advice}"
    assert line("HogWild", steps=1) == f"1 update for 20 workers: 19 {advice}"
    assert line("HogWild", steps=200) is None and line("Synchronous-SGD", steps=1) is None


def test_a_run_that_no_worker_is_left_for(program):
    """There are no more updates, and without --seconds nothing else ends the run."""
    with pytest.raises(TrainingFailed, match=r"after 0\.000 virtual seconds and 0 updates no worker is left: --away removes"):
        program.simulate("HogWild", num_workers=1, away=["0:0.001"], clock_only=True)


def test_a_run_is_fitted_with_the_flags_that_its_scheme_had(program, real_run):
    """Its workers waited for each other at each step; those to be simulated do not wait at all."""
    folder = real_run("Semi-Synchronous-SGD", staleness=0)
    more = {"staleness": math.inf, "clock_only": True, "steps": 10}
    found = program.simulate("Semi-Synchronous-SGD", calibrate=[folder], **more).calibration
    assert 1000 * found["latency"] == pytest.approx(15.0, rel=0.1)


def test_several_runs_are_fitted_together(program, real_run):
    """One with a smaller and one with a larger latency: it is between them."""
    runs = [real_run(latency_ms=latency) for latency in (5.0, 20.0)]
    found = program.simulate("HogWild", calibrate=runs, clock_only=True, steps=10).calibration
    assert 0.006 < found["latency"] < 0.019
    assert [fit["path"] for fit in found["runs"]] == [str(path) for path in runs]


@pytest.mark.parametrize(
    "scheme, flags, line",
    [
        ("HogWild", {"calibrate": ["/nowhere"]}, "--calibrate=/nowhere: expected the folder of a finished run"),
        ("HogWild", {"calibrate": []}, "--calibrate is empty: expected the folder of a real run"),
        ("HogWild", {"step_ms": 3}, "--calibrate measures the time of steps and messages: leave out --step_ms"),
        ("HogWild", {"latency_ms": 3, "mbit": 10}, "finds the speed of links if --latency_ms is given: leave out --mbit"),
        ("Dynamic-SGD", {}, "it is a run of HogWild, not Dynamic-SGD"),
        ("HogWild", {"batch_size": 16}, "it was made with --batch_size=32, not 16"),
        ("HogWild", {"model": "linear"}, "it trained another model than --model=linear"),
        ("HogWild", {"num_workers": 3, "latency_ms": [1, 2, 3]}, "it has 2 workers, but --latency_ms has 3 values: give one"),
        ("HogWild", {"num_workers": 3, "mbit": [1, 2, 3]}, "it has 2 workers, but --mbit has 3 values: give one for all"),
    ],
)
def test_what_cannot_be_calibrated_is_one_line(program, real_run, user_error, scheme, flags, line):
    with user_error(line):
        program.simulate(scheme, **{"calibrate": [real_run()], "clock_only": True, "steps": 10, **flags})


@pytest.mark.parametrize(
    "change, line",
    [
        ({"simulated": True}, "it is a simulated run; expected a real one"),
        ({"delays": [None]}, "its result.json or its metrics are damaged"),
        ({"flags_of_scheme": None}, "its result.json has no `flags_of_scheme`: it is of an older version"),
        ({"flags_of_scheme": []}, "its result.json or its metrics are damaged"),
        ({"flags_of_scheme": {"nosuch": 1}}, "its scheme had a flag --nosuch, which no longer exists"),
        ({"restarts": 1}, "tasks were restarted, or the run was resumed"),
        ({"parts": {"all-reduce": 0.5}}, "its workers average by an all-reduce"),
        ({"num_workers": 3}, "there are no metrics of worker 2"),
        ({"batch_size": "32"}, "its result.json or its metrics are damaged"),
    ],
    ids=str,
)
def test_runs_that_say_too_little(program, real_run, user_error, change, line):
    folder = real_run()
    (folder / "result.json").write_text(json.dumps(json.loads((folder / "result.json").read_text()) | change))
    with user_error(f"--calibrate={folder}: {line}"):
        program.simulate("HogWild", calibrate=[folder], clock_only=True, steps=10)


def test_a_run_that_timed_no_round(program, real_run, user_error):
    folder = real_run()
    path = folder / "metrics" / "worker-1.jsonl"
    path.write_text(path.read_text().replace('"timed_rounds"', '"others"'))
    with user_error("worker 1 has timed no round, or its run is too short: train for longer"):
        program.simulate("HogWild", calibrate=[folder], clock_only=True, steps=10)
