"""Local steps by speed: how many a worker makes, that each is counted once, and that what cannot be is refused."""

import types

import numpy as np
import pytest
from conftest import KnownBatches
from oracle import RATE, Adam, Problem
from runs import ROOT, result_of, run, updates_of

from common import tf
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import build_rounds, build_steps, repeat_rounds, timed_rounds
from common.simulation.replay import Replay

SCRIPT = ROOT / "Asynchronous-DiLoCo" / "asynchronous_diloco.py"
HP = types.SimpleNamespace(
    **{"window": 6, "learning_rate": RATE, "num_workers": 2, "optimizer_on": "worker", "dynamic_steps": True},
    **{"buffer_size": 2, "momentum": 0.9, "momentum_activation": 0.0, "weight_decay": 0.3, "local_learning_rate": 0.3},
)


class TakesTensors(KnownBatches):
    """The same for a window that is a tensor."""

    def next(self, window, most=None):
        return super().next(window)


@pytest.fixture
def rule(load_scheme):
    return load_scheme("Asynchronous-DiLoCo", "asynchronous_diloco")


@pytest.fixture
def parts(model, graph, batches, servers):
    """A function that makes x̃ on so many ps, and worker 0, whose batches take a tensor; and its server's target."""

    def parts(num_ps):
        task, server = servers(num_ps)
        center = GlobalParameters(model.initial_parameters, num_ps, task.device_fn())
        with tf.device(task.device):
            local = LocalParameters(center, model, TakesTensors(*(b[0] for b in batches)), num_workers=2)
        return center, local, task.device, server.target

    return parts


def told(center, worker, speed):
    """An operation as if this worker had told its speed."""
    with tf.device(center.step.device):
        speeds = tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.float32, shared_name="speeds")
        key, value = tf.constant(worker, tf.int64), tf.constant(speed, tf.float32)
        return tf.raw_ops.LookupTableInsertV2(table_handle=speeds, keys=key, values=value)


def test_as_many_as_its_share_of_the_greatest_speed(parts, initialized):
    center, local, device, target = parts(1)
    with tf.device(device):
        dynamic = center.dynamic(local, 10)
        choose, steps = dynamic.choose(), dynamic.steps
    session = initialized(center, local, target=target)

    def chosen(made, seconds, fastest):
        known = [dynamic._steps.assign(made), dynamic._seconds.assign(seconds), told(center, 1, fastest)]
        session.run(known)
        session.run(choose.operations)
        return session.run(steps)

    assert session.run(steps) == 10
    assert chosen(0, 0, 50) == 10  # it has not trained yet
    assert [chosen(30, 1, speed) for speed in (0, 20, 30, 31, 60, 99, 120, 299, 301, 1e9)] == [10, 10, 10, 9, 5, 3, 2, 1, 1, 1]
    assert chosen(7, 0.7, 10) == 10


def test_a_clock_that_is_set_does_not_change_the_speed(parts, initialized, monkeypatch):
    center, local, device, target = parts(1)
    now = tf.placeholder(tf.float64, [])
    monkeypatch.setattr(tf, "timestamp", lambda: now)
    with tf.device(device):
        dynamic = center.dynamic(local, 10)
        noted = dynamic.end(10, tf.constant(50_000.0, tf.float64), [])
    session = initialized(center, local, target=target)
    for seconds in 2, 3, 3600, -3600, 2:
        session.run(noted, {now: 50_000.0 + seconds})
        steps, of_them = session.run([dynamic._steps, dynamic._seconds])
        assert 10 / 3 <= steps / of_them <= 10 / 2


@pytest.mark.slow
@pytest.mark.parametrize("num_ps", [1, 2])
def test_each_local_step_is_made_and_counted_once(model, batches, rule, parts, initialized, num_ps):
    """Rounds of six steps, then of one, then of six; x̃ is what NumPy makes of the same numbers of steps."""
    center, local, device, target = parts(num_ps)
    with tf.device(device):
        few, timed = build_rounds(rule, center, local, HP, 2), timed_rounds(rule, center, local, HP, 2)
        loop = repeat_rounds(rule, center, local, HP, 1, 3)
    session = initialized(center, local, target=target)
    session.run(told(center, 1, 0))
    counts = []
    for speed, call in (0, few), (1e9, timed), (1e9, loop), (0, few):
        session.run(told(center, 1, speed))
        counts.append([int(count) for count in session.run(call).local_steps])
    assert counts == [[12, 12], [14, 14], [17, 17], [29, 29]]
    problem, adam, x = Problem(model.initial_parameters, batches, HP), Adam(), None
    for window in [6] * 2 + [1] * 5 + [6] * 2:
        x = start = problem.center
        for _ in range(window):
            g = problem.gradient(0, x)
            x = x - 0.3 * 0.3 * x + adam(g, 0.3)
        delta, acts = start - x, problem.version % 2 == 1
        problem.sum = problem.sum + delta
        if acts:
            problem.momentum, problem.sum = 0.9 * problem.momentum + problem.sum / 2, np.zeros(4)
        problem.update(0, problem.version, -RATE * (delta / 2 + acts * 0.9 * problem.momentum))
    assert np.abs(problem.center - model.initial_parameters).max() > 0.1
    np.testing.assert_allclose(session.run(center.read()[0]), problem.center, rtol=1e-5)


def test_what_cannot_be(model, rule, parts, known_batches, batches, user_error):
    center, local, *_ = parts(1)
    sgd = tf.train.GradientDescentOptimizer(0.1)

    def pushes_alone(center, local, hp):
        dynamic = center.dynamic(local, 3)
        yield local.pull(center)
        yield dynamic.choose()
        yield local.train(dynamic.steps, sgd)
        yield center.push(sgd, local.gradient)

    with user_error("pushes_alone: center.dynamic needs center.exact, whose push counts the local steps"):
        build_steps(pushes_alone, center, local, HP)
    with user_error("the window of local.train is a number; in a scheme with center.dynamic it is `dynamic.steps`"):
        local.train(3, sgd)
    with user_error("center.dynamic counts the local steps of each push, so a threshold must not discard any"):
        center.exact(local, "step", 2).push(sgd, local.gradient)
    center.schedule = lambda step: 1.0
    with user_error("center.dynamic: the number of updates is not known in advance, so the learning rate cannot follow"):
        build_steps(rule, center, LocalParameters(center, model, local.batches, "another"), HP)
    with user_error(
        "the workers of this scheme adapt their local steps to their speed on a real clock (center.dynamic), but a "
        "simulation has no real clock: use a fixed number of local steps"
    ):
        Replay(rule, HP, model, lambda i: known_batches(*(b[i] for b in batches), f"batches_{i}"))


@pytest.mark.cluster
def test_a_slow_worker_comes_back_as_often(run_dir):
    """All samples are counted, and they are as many as --epochs says; those of the run that it goes on with, too."""
    for flags, goal in ([], 20 * 1438), (["--resume"], 40 * 1438):
        epochs = f"--epochs={goal // 1438}"
        run(run_dir, "--num_ps=2", "--dynamic_steps", "--delays=0,30", epochs, *flags, script=SCRIPT)
        result = result_of(run_dir)
        assert goal <= result["samples"] < goal + 2 * 10 * 320  # a call of each may be under way
        if not flags:
            assert result["samples"] == sum(result["samples_per_worker"])
            slow = updates_of(run_dir, 1)  # few if it started when worker 0 had almost ended
            assert result["samples_per_worker"][1] < slow * 320 or slow < 5
    assert result["test_accuracy"] >= 0.95
