"""Samples, epochs and speed are counted from the round that was built, never from `--window`."""

import math
import types
from fractions import Fraction
from typing import Any

import pytest
from runs import ROOT, metrics_of, result_of, run

from common import tf
from common.core.flags import Settings
from common.core.run_facts import RunFacts
from common.data import datasets
from common.data.batches import Batches
from common.models import keras_model
from common.scheme.center import GlobalParameters
from common.scheme.learning_rates import Schedule
from common.scheme.local import LocalParameters
from common.simulation.engine import Engine
from common.simulation.shards import shards_of
from common.training import calls
from common.training.metrics import MetricsHook

BATCH, EPOCHS = 4, 10


def sgd(hp):
    return tf.train.GradientDescentOptimizer(hp.learning_rate)


def five(center, local, hp):
    """Five local steps, whatever `--window` says."""
    yield local.pull(center)
    yield local.train(5, sgd(hp))
    yield center.push(sgd(hp), local.gradient)


def two_and_three(center, local, hp):
    yield local.pull(center)
    yield local.train(2, sgd(hp))
    yield local.train(3, sgd(hp), accumulate=True)
    yield center.push(sgd(hp), local.gradient)


def two_pushes(center, local, hp):
    """Three local steps, which make two updates."""
    yield local.pull(center)
    yield local.train(3, sgd(hp))
    yield center.push(sgd(hp), local.gradient)
    yield center.push(sgd(hp), local.gradient)


def together(center, local, hp):
    others = center.together(local)
    yield local.pull(center)
    yield local.train(5, sgd(hp))
    yield others.push(sgd(hp), local.gradient)
    yield others.wait()


def dynamic(center, local, hp):
    exact, dynamic = center.exact(local, "step"), center.dynamic(local, 7)
    yield dynamic.choose()
    yield exact.pull()
    yield local.train(dynamic.steps, sgd(hp))
    yield exact.push(sgd(hp), local.gradient)


def changing(center, local, hp):
    """Another number of local steps in each round that is built."""
    changing.steps += 1  # type: ignore[attr-defined]
    yield local.pull(center)
    yield local.train(changing.steps, sgd(hp))  # type: ignore[attr-defined]
    yield center.push(sgd(hp), local.gradient)


@pytest.fixture(scope="module")
def problem():
    """The smallest data and model there are; made outside of any graph."""
    dataset = datasets.load("linear")
    return dataset, keras_model.build("linear", dataset)


@pytest.fixture
def built(graph, problem, monkeypatch):
    """A function that builds the calls of one of three workers, with `--window=1`: no timed call, no loop."""
    monkeypatch.setattr(calls, "LEAST_TIMED", math.inf)
    monkeypatch.setattr(calls, "LONG_RUN", math.inf)

    def built(scheme, begin_workers=None, schedule=None, **flags):
        dataset, model = problem
        center = GlobalParameters(model.initial_parameters, schedule=schedule)
        batches = Batches(dataset.x_train, dataset.y_train, BATCH, 0)
        center.members = begin_workers and types.SimpleNamespace(count=lambda: tf.constant(3))
        local = LocalParameters(center, model, batches, num_workers=3, begin_workers=begin_workers)
        pace = "together" if scheme is together else "own"
        given: dict[str, Any] = {"seconds": None, "rounds_per_call": 1, "delays": None, "window": 1, "steps": None}
        given |= {"batch_size": BATCH, "epochs": EPOCHS, "learning_rate": 0.1, "weight_decay": 0}
        settings = Settings(run=RunFacts("scheme", pace), **{**given, **flags})
        last, next_call, _, local_steps, size = calls.build_calls(scheme, center, local, settings, dataset.num_samples)
        return types.SimpleNamespace(**{name: value for name, value in locals().items() if name not in ("given", "flags")})

    return built


SIZES = [(five, 5, 1), (two_and_three, 5, 1), (two_pushes, Fraction(3, 2), 1), (together, 5, 3), (dynamic, 7, 1)]


@pytest.mark.parametrize(("scheme", "local_steps", "gradients"), SIZES)
def test_epochs_are_those_of_what_a_round_trains(built, problem, scheme, local_steps, gradients):
    found, samples = built(scheme, window=3), EPOCHS * problem[0].num_samples
    assert found.last == -(-samples // (BATCH * local_steps * gradients))
    assert found.size.samples_per_gradient == BATCH * local_steps
    assert found.size.samples_per_update == BATCH * local_steps * gradients
    at_once = 1 if gradients > 1 else 3
    assert found.local_steps == pytest.approx(found.last * local_steps / at_once)


@pytest.mark.parametrize(
    ("scheme", "begin_workers", "unit"), [(five, None, 20), (together, None, 60), (together, 2, 20), (dynamic, None, 4)]
)
def test_what_a_checkpoint_counts(built, scheme, begin_workers, unit):
    """Updates, gradients where an update is of all who are there, or local steps."""
    found = built(scheme, begin_workers)
    assert found.size.samples_per_count == unit


@pytest.mark.parametrize(("scheme", "per_call"), [(five, 2 * 20), (two_and_three, 2 * 20), (two_pushes, 2 * 12)])
def test_a_worker_counts_what_it_draws(built, initialized, scheme, per_call):
    """So its metrics have it, and a worker that is started again draws what comes next."""
    found, drawn = built(scheme, rounds_per_call=2), list[int]()
    log = types.SimpleNamespace(write=lambda *step, **values: None)
    hook = MetricsHook(log, found.size.samples_per_gradient, drawn=drawn.append)
    session, position = initialized(found.center, found.local), found.batches._position
    before = session.run(position)
    rounds = session.run(found.next_call(0)[0])
    hook.after_run(None, types.SimpleNamespace(results=(rounds.loss, rounds.steps, (), ())))
    assert drawn == [per_call] == [session.run(position) - before] and hook.totals()[0] == per_call


def test_rounds_that_differ_are_refused(built, user_error):
    changing.steps = 0  # type: ignore[attr-defined]
    with user_error("changing makes 2 local steps for an update in one round, and 1 in another: all rounds must be alike"):
        built(changing, rounds_per_call=2)


@pytest.mark.parametrize(("scheme", "local_steps", "gradients"), [SIZES[0], SIZES[3]])
def test_a_schedule_ends_with_the_epochs(built, problem, scheme, local_steps, gradients):
    found = built(scheme, schedule=Schedule("linear", 0))
    assert found.schedule.total == found.last == -(-EPOCHS * problem[0].num_samples // (BATCH * local_steps * gradients))


def test_the_learning_rate_falls_to_the_end(built, initialized):
    """No round that trains has been built before the end was known."""
    found = built(five, schedule=Schedule("linear", 0), epochs=None, steps=10)
    session = initialized(found.center, found.local)
    session.run(found.center.step.assign(10))
    before = session.run(found.center.read())[0]
    session.run(found.next_call(10)[0])
    assert (session.run(found.center.read())[0] == before).all()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "local_steps", "gradients"), SIZES[:-1])
def test_the_simulator_counts_the_same(problem, scheme, local_steps, gradients):
    dataset, model = problem
    asked = []

    def last_of(samples):
        asked.append(samples)
        return 100

    hp = types.SimpleNamespace(window=1, num_workers=3, learning_rate=0.1)
    engine = Engine(
        *(scheme, hp, model, shards_of(dataset, 3, BATCH, seed=0)),
        schedule=Schedule("linear", 0),
        last_of=last_of,
        optimize=False,
    )
    assert asked == [engine.size.samples_per_update] == [BATCH * local_steps * gradients]
    assert sum(action.local_steps for action in engine.actions) in (3, 5)
    engine.close()


OWN = """
from common import Scheme, main, tf


def own(center, local, hp):
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield local.pull(center)
    yield local.train(2, sgd)
    yield local.train(3, sgd, accumulate=True)
    yield center.push(sgd, local.gradient)


SCHEME = Scheme(own, epochs=2, batch_size=32, learning_rate=0.02)

if __name__ == "__main__":
    main(SCHEME)
"""


@pytest.mark.cluster
@pytest.mark.parametrize("flags", [[], ["--max_workers=3"]])
def test_a_run_of_a_users_own_scheme(run_dir, tmp_path, flags):
    """Two trainings in a round, of five local steps; then resumed for as many epochs again."""
    script = tmp_path / "own.py"
    script.write_text(OWN)
    before, of_update = 0, 5 * 32
    for epochs, resumes in (2, []), (4, ["--resume"]):
        run(run_dir, f"--epochs={epochs}", *flags, *resumes, script=script)
        result = result_of(run_dir)
        assert result["samples"] == result["global_steps"] * of_update
        assert epochs * 1438 <= result["samples"] < epochs * 1438 + 4 * of_update
        assert sum(result["samples_per_worker"]) == result["samples"] - before
        before = result["samples"]
    lines = [line for worker in range(2) for line in metrics_of(run_dir, worker) if "samples" in line]
    assert all(line["samples"] % of_update == 0 for line in lines)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("Ringmaster-ASGD/ringmaster_asgd.py", ["--staleness_threshold=2", "--delays=50,2,2"]),
        ("Synchronous-SGD/synchronous_sgd.py", ["--backup_workers=1", "--delays=50,0,0"]),
    ],
)
def test_samples_of_dropped_gradients_count_after_a_resume(run_dir, script, flags):
    """Each with the batch that it was made of; and what is of the last start alone is called so.

    The straggler is the chief, the first to begin: it can't end the run before the others are there.
    """
    drawn = dropped = 0
    for steps, more in (200, ["--batch_size=16"]), (400, ["--batch_size=32", "--resume"]):
        run(run_dir, "--num_workers=3", "--rounds_per_call=1", f"--steps={steps}", *flags, *more, script=ROOT / script)
        result = result_of(run_dir)
        assert result["gradients_dropped"] > dropped
        drawn, dropped = drawn + sum(result["samples_per_worker"]), result["gradients_dropped"]
        assert result["samples"] == drawn
        assert "samples_per_worker" in result["of_last_start"] and set(result["of_last_start"]) <= set(result)
    lines = [line for worker in range(3) for line in metrics_of(run_dir, worker)]
    assert sum(line.get("gradients_dropped", 0) for line in lines) == dropped
