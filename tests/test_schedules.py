"""common/scheme/learning_rates.py: the factor of the learning rate, where a rate becomes a tensor, and what is refused."""

import math
import types

import numpy as np
import pytest
from oracle import SCHEMES, close, inverse, messages, written_again

from common import tf
from common.scheme.center import GlobalParameters
from common.scheme.learning_rates import Rate, Schedule, check_rates, factor_is, hyperparameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import build_rounds
from common.simulation.replay import Replay


@pytest.fixture
def factors(graph):
    """A function that gives the factors of a schedule at some steps."""

    def factors(spec, steps, warmup_steps=0, total=100):
        schedule = Schedule(spec, warmup_steps)
        schedule.ask = lambda: total
        with tf.Session() as session:
            return session.run([tf.convert_to_tensor(schedule(tf.constant(step, tf.int64))) for step in steps])

    return factors


def test_kinds(factors):
    """Of 100 updates; beyond the last one nothing is left."""
    assert factors("cosine", [0, 50, 100, 130]) == pytest.approx([1, 0.5, 0, 0], abs=1e-6)
    assert factors("cosine", [25]) == pytest.approx([(1 + math.cos(math.pi / 4)) / 2])
    assert factors("linear", [0, 50, 99, 130]) == pytest.approx([1, 0.5, 0.01, 0], abs=1e-6)


def test_warm_up(factors):
    """The first update has a rate, too, and after the last one of warm-up the schedule begins."""
    assert factors(None, [0, 1, 3, 4, 99], warmup_steps=4) == pytest.approx([0.25, 0.5, 1, 1, 1])
    assert factors("linear", [0, 19, 20, 60, 100], warmup_steps=20) == pytest.approx([0.05, 1, 1, 0.5, 0], abs=1e-6)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rates.py"
    path.write_text("""
from common import tf

def halved(step, total):
    assert step.dtype == tf.float32
    return tf.where(step < total / 2, 1.0, 0.5)

def no_tensor(step, total):
    return float(step)

def vector(step, total):
    return tf.stack([step, step])

def constant(step, total):
    return 0.25
""")
    return path


def test_function(factors, file):
    assert factors(f"{file}:halved", [0, 49, 50, 99]) == [1, 1, 0.5, 0.5]
    assert factors(f"{file}:halved", [0, 9, 60], warmup_steps=10) == pytest.approx([0.1, 1, 0.5])
    assert factors(f"{file}:constant", [7]) == [0.25]


def test_what_is_refused(factors, file, user_error):
    with user_error("--learning_rate_schedule must be one of cosine, linear or FILE.py:FUNCTION, not 'cosin'"):
        factors("cosin", [0])
    with user_error("has no function 'other'"):
        factors(f"{file}:other", [0])
    with user_error(":no_tensor", "a float32 scalar tensor, and 100, it raised TypeError"):
        factors(f"{file}:no_tensor", [0])
    with user_error("returned a tensor of shape (2,)"):
        factors(f"{file}:vector", [0])
    with user_error("--warmup_steps=100 must be less than the updates of the run, 100"):
        factors("cosine", [0], warmup_steps=100)


def test_a_rate_is_used_like_a_number(graph):
    """The factor is that of the place where it is used."""
    rate = Rate(0.5, lambda: tf.constant(0.1))
    vector = tf.constant([2.0, 4.0])
    there = [rate * 2, 2 * rate, rate / 2, 1 / rate, -rate, rate + 1, 1 - rate, vector * rate, rate * vector, vector / rate]
    with factor_is(tf.constant(0.2)):
        there += [tf.convert_to_tensor(each) for each in (rate, rate * 3)]
    with tf.Session() as session:
        found = session.run([tf.convert_to_tensor(each) for each in there])
    wanted: list = [0.1, 0.1, 0.025, 20, -0.05, 1.05, 0.95, [0.1, 0.2], [0.1, 0.2], [40, 80], 0.1, 0.3]
    for value, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.slow
def test_messages_to_two_ps(model, graph, load_scheme, initialized, known_batches, batches, servers):
    """The step comes with the pull, and the factor goes to the second ps with the push; the ps tasks ask each other nothing."""
    scheme, (task, server) = SCHEMES["HogWild"], servers(2)
    center = GlobalParameters(model.initial_parameters, 2, task.device_fn(), inverse)
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        hp = hyperparameters(scheme.hyperparameters(2), center, local)
        built = build_rounds(load_scheme(scheme.folder, scheme.name), center, local, hp, 4)
    sent = messages(initialized(center, local, target=server.target), built)
    assert sent.count(("/job:ps", "/job:worker")) == 4 * (2 + 1) + 1
    assert sent.count(("/job:worker", "/job:ps")) == 4 * (2 + 1)
    assert len(sent) == 4 * 6 + 1


def test_all_reduce(model, graph, load_scheme, initialized, known_batches, batches):
    """Each step of a call is an update, and has its own rate."""
    center = GlobalParameters(model.initial_parameters, schedule=inverse)
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
    hp = hyperparameters(types.SimpleNamespace(learning_rate=0.05, steps_per_call=3, optimizer_on="worker"), center, local)
    built = build_rounds(load_scheme("Synchronous-SGD", "all_reduce"), center, local, hp, 2)
    session = initialized(center, local)
    session.run(built)
    expected = written_again(SCHEMES["HogWild"], [0] * 3 * 6, model.initial_parameters, batches, 1, schedule=inverse)
    close(session.run(center.read()[0]), expected.center, model.initial_parameters)
    assert session.run(center.step) == 6


def test_weight_decay_where_there_is_nothing_to_decay(model, graph, load_scheme, known_batches, batches, user_error):
    """No optimizer changes x̃ in AEASGD; its script says so."""
    center = GlobalParameters(model.initial_parameters)
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
    scheme = SCHEMES["AEASGD"]._replace(hp={"beta": 0.9, "decay": 0.1})
    hp = hyperparameters(scheme.hyperparameters(1), center, local)
    build_rounds(load_scheme("AEASGD", "aeasgd"), center, local, hp)
    with user_error('its script must say Scheme(..., optimizer_on="worker")'):
        check_rates(center, 100)


def test_together_that_is_said_too_late(model, graph, known_batches, batches, user_error):
    """The number of updates was another one when the rate was needed."""
    center = GlobalParameters(model.initial_parameters, schedule=Schedule("cosine", 0))
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
    center.schedule.ask = lambda: 100 if center.waits(local) else 200

    def scheme(center, local, hp):
        sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
        yield local.pull(center)
        yield local.train(1, sgd)
        others = center.together(local)
        yield others.push(sgd, local.gradient)
        yield others.wait()

    build_rounds(scheme, center, local, hyperparameters(types.SimpleNamespace(learning_rate=0.1), center, local))
    with user_error("a scheme must say before its first step how its workers wait"):
        check_rates(center, 100)


@pytest.mark.parametrize("name", ["HogWild", "AEASGD"])
def test_constant_without_a_schedule(model, known_batches, batches, load_scheme, name):
    """A scheme then gets plain numbers."""
    scheme, found = SCHEMES[name], []
    rule = load_scheme(scheme.folder, scheme.name)

    def scheme_that_looks(center, local, hp):
        found.append(hp.learning_rate)
        yield from rule(center, local, hp)

    make_batches = lambda i: known_batches(*(b[i] for b in batches), f"batches_{i}")  # noqa: E731
    Replay(scheme_that_looks, scheme.hyperparameters(1), model, make_batches).close()
    assert found == [0.05, 0.05]
