"""HogWild's update rule against NumPy: two workers, step by step, in orders that make pushes stale."""

import random
from typing import NamedTuple

import keras
import numpy as np
import pytest

from common import models, tf
from common.parameters import GlobalParameters, LocalParameters, build_rounds, build_steps

RATE = 0.1
STEPS = ["pull", "train", "push"]  # of one round


def rounds(*workers):
    """Rounds of these workers, one after the other."""
    return [(worker, step) for worker in workers for step in STEPS]


def together(*pairs):
    """Rounds of two workers that both pull before either pushes."""
    return [(worker, step) for pair in pairs for step in STEPS for worker in pair]


def overtaken(holder, other):
    """`holder` pulls, `other` does two rounds, and only then `holder` trains and pushes."""
    return [(holder, "pull"), *rounds(other, other), (holder, "train"), (holder, "push")]


def shuffled(seed):
    """Ten rounds of each worker, interleaved at random."""
    generator = random.Random(seed)
    left = [rounds(*[0] * 10), rounds(*[1] * 10)]
    order = []
    while any(left):
        steps = generator.choice([steps for steps in left if steps])
        order.append(steps.pop(0))
    return order


# Twenty rounds each
ORDERS = {
    "one after the other": rounds(*[0, 1] * 10),
    "both pull, then both push": together(*[(0, 1)] * 10),
    "both pull, then push in turns": together(*[(0, 1), (1, 0)] * 5),
    "one is overtaken": [*overtaken(0, 1) * 3, *overtaken(1, 0) * 3, *rounds(0, 1)],
    "shuffled": shuffled(0),
    "shuffled otherwise": shuffled(1),
}


class Walk(NamedTuple):
    """What came of twenty rounds: x̃, and of each push the step at its pull and the step after it."""

    center: np.ndarray
    steps: list


@pytest.fixture
def batches():
    """Of each worker x [7, 4, 3] and y [7, 4, 1]; a worker that has seen all its batches begins anew."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=[2, 7, 4, 3]).astype(np.float32)
    return x, (x @ [[1.0], [-2], [3]] + 0.5 + rng.normal(0, 0.3, [2, 7, 4, 1])).astype(np.float32)


def written_again(start, batches, order, window):
    """HogWild from its formula: x ← x̃; g ← Σ of gradients along the local walk; x̃ ← x̃ − η g."""
    center, version, steps = start.astype(float), 0, []
    local, total, pulled, batch = [center] * 2, [center] * 2, [0, 0], [0, 0]
    for worker, step in order:
        if step == "pull":
            local[worker], pulled[worker] = center, version
        elif step == "train":
            total[worker] = np.zeros(4)
            for _ in range(window):
                x, y = (part[worker, batch[worker] % 7].astype(float) for part in batches)
                residual = x @ local[worker][:3, None] + local[worker][3] - y  # of the loss mean(residual²)
                gradient = 2 * np.append(x.T @ residual, residual.sum()) / len(x)
                local[worker], total[worker] = local[worker] - RATE * gradient, total[worker] + gradient
                batch[worker] += 1
        else:
            center, version = center - RATE * total[worker], version + 1
            steps.append((pulled[worker], version))
    return Walk(center, steps)


@pytest.fixture
def model():
    """y = w x + b with three w."""
    keras.utils.set_random_seed(0)
    return models.Model(keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]), is_classification=False)


@pytest.fixture
def walk(model, graph, hogwild, hyperparameters, initialized, known_batches, batches):
    """A function that does the same with the real update rule."""

    def walk(order, window=1, num_ps=1):
        center = GlobalParameters(model.initial_parameters, num_ps)
        workers = [LocalParameters(center, model, known_batches(*(b[i] for b in batches), f"b{i}"), f"w{i}") for i in range(2)]
        operations, numbers = {}, {}
        for i, local in enumerate(workers):
            steps = build_steps(hogwild, center, local, hyperparameters(learning_rate=RATE, window=window))
            operations.update({(i, name): step for name, step in zip(STEPS, steps, strict=True)})
            numbers.update({(i, "pull"): local.pulled, (i, "train"): local.loss, (i, "push"): center.updated})
        session = initialized(center, *workers)
        pulled, steps = [0, 0], []
        for worker, step in order:
            number = session.run([numbers[worker, step], operations[worker, step]])[0]
            if step == "pull":
                pulled[worker] = number
            elif step == "push":
                steps.append((pulled[worker], number))
        return Walk(session.run(center.read()[0]), steps)

    return walk


@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_exact(model, walk, batches, order, window, num_ps):
    """x̃ after twenty rounds, and with it the staleness of each push."""
    ours = walk(order, window, num_ps)
    expected = written_again(model.initial_parameters, batches, order, window)
    assert len(expected.steps) == 20
    assert np.abs(expected.center - model.initial_parameters).min() > 0.05  # it went somewhere
    np.testing.assert_allclose(ours.center, expected.center, rtol=1e-5)
    assert ours.steps == expected.steps


def test_staleness_of_the_orders(batches):
    """The orders differ in what they are named after: how many updates of others came between pull and push."""
    staleness = {
        name: [after - pulled - 1 for pulled, after in written_again(np.zeros(4), batches, order, 1).steps]
        for name, order in ORDERS.items()
    }
    assert staleness["one after the other"] == [0] * 20
    assert staleness["both pull, then both push"] == [0, 1] * 10
    assert staleness["one is overtaken"] == [0, 0, 2] * 6 + [0, 0]
    assert max(staleness["shuffled"]) > 1


def test_stale_pushes_lead_elsewhere(walk):
    """The same batches and the same start: staleness is all that differs, and nothing prevents it, as a lock would."""
    fresh = walk(ORDERS["one after the other"])
    with tf.Graph().as_default():
        stale = walk(ORDERS["both pull, then both push"])
    assert np.abs(fresh.center - stale.center).max() > 1e-2


@pytest.mark.parametrize("num_ps", [1, 2])
def test_rounds_in_one_call(model, graph, hogwild, hyperparameters, initialized, known_batches, batches, num_ps):
    """As a worker process runs them: twenty rounds in two calls of ten."""
    center = GlobalParameters(model.initial_parameters, num_ps)
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
    built = build_rounds(hogwild, center, local, hyperparameters(learning_rate=RATE, window=2), 10)
    session = initialized(center, local)
    steps = np.concatenate([session.run(built).steps, session.run(built).steps])
    expected = written_again(model.initial_parameters, batches, rounds(*[0] * 20), 2)
    np.testing.assert_allclose(session.run(center.read()[0]), expected.center, rtol=1e-5)
    assert [tuple(pair) for pair in steps.tolist()] == expected.steps
