"""The moving average of the global parameters (--ema), against NumPy."""

import threading

import keras
import numpy as np
import pytest
import runs
from oracle import ALL, close, inverse, written_again

from common import tf
from common.core import checkpoints_in
from common.data import datasets
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters

BETA = 0.8


def averages(scheme, order, start, *more, **options):
    """Returns the average by NumPy: of all that x̃ was, one update after the other."""
    average, values, version = start.astype(float), [], 0
    for count in range(1, len(order) + 1):
        walk = written_again(scheme, order[:count], start, *more, **options)
        updates = len({after for *_, after in walk.log})
        if updates > version:
            version = updates
            values.append(walk.center)
            average = BETA * average + (1 - BETA) * walk.center
    return average, values


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HogWild", "AEASGD", "R = 2", "DiLoCo", "one backup worker"])
def test_exact(model, replays, batches, name):
    """Of updates at once, by addition, under a condition, and together; on three ps."""
    scheme = ALL[name]._replace(hp={**ALL[name].hp, "ema": BETA})
    order = next(iter(scheme.orders().values()))[:100]
    replay = replays(scheme, scheme.hyperparameters(2, 3), 3, inverse)
    replay.take(order)
    expected, values = averages(scheme, order, model.initial_parameters, batches, 2, 3, schedule=inverse)
    assert len(values) > 2
    close(replay.center, values[-1], model.initial_parameters, 0.01)
    average = replay.average
    close(average, expected, model.initial_parameters, 0.01)
    assert np.abs(average - replay.center).max() > 1e-3


def parameters_in(run_dir):
    """Returns x̃ and its average in the newest checkpoint, {name: array}."""
    reader = tf.train.load_checkpoint(checkpoints_in(run_dir / "checkpoints")[-1])
    return {name: reader.get_tensor(name) for name in ("parameters", "average")}


def model_in(run_dir):
    """Returns the parameters of model.keras, an array `[size]`."""
    variables = keras.models.load_model(run_dir / "model.keras").trainable_variables
    return np.concatenate([v.numpy().ravel() for v in variables])


def test_an_average_on_the_ps_of_a_ring(model, graph, load_scheme, known_batches, batches, user_error):
    center = GlobalParameters(model.initial_parameters, ema=0.9)
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
    with user_error("--ema: the average is on the ps, but with center.ring they get x̃ only now and then"):
        center.ring(local)


def test_tables_have_no_average(graph, user_error):
    with user_error("--ema: rows of tables (common.Embedding) have no average: use keras.layers.Embedding"):
        GlobalParameters(np.zeros(4, np.float32), tables=[None], ema=0.9)


def test_two_workers_at_once(model, graph, servers):
    """Without a lock of the scheme: the average of each piece counts each of its updates once, in their order."""
    task, server = servers(2)
    center = GlobalParameters(np.zeros(4, np.float32), 2, task.device_fn(), ema=BETA)
    with tf.device(task.device):
        push = center.push(tf.train.GradientDescentOptimizer(1.0), -tf.ones([4])).operations
    with tf.Session(server.target) as session:
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        threads = [threading.Thread(target=lambda: [session.run(push) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        average, (value, step) = session.run([center.read_average()[0], center.read()])
    expected = 0.0
    for count in range(1, 201):
        expected = BETA * expected + (1 - BETA) * count
    assert step == 200 and value.tolist() == [200] * 4
    np.testing.assert_allclose(average, expected, rtol=1e-5)


@pytest.mark.cluster
def test_a_resumed_run(tmp_path):
    """Checkpoints hold the average, on any number of ps; model.keras has it, and is what is evaluated. 10 s."""
    run_dir, flags = tmp_path / "run", ["--data=linear", "--model=linear", "--batch_size=16", "--learning_rate=0.001"]
    output = runs.run(run_dir, *flags, "--ema=0.99", "--num_ps=2", "--steps=100")
    assert "evaluated at the average of β = 0.99" in output
    before = parameters_in(run_dir)
    assert np.abs(before["average"] - before["parameters"]).max() > 1e-3
    np.testing.assert_array_equal(model_in(run_dir), before["average"])
    runs.run(run_dir, *flags, "--ema=0.99", "--num_ps=1", "--steps=100", "--resume")
    after = parameters_in(run_dir)
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])
    result, data = runs.result_of(run_dir), datasets.load("linear")
    given = keras.models.load_model(run_dir / "model.keras")(data.x_test)
    np.testing.assert_allclose(result["test_loss"], np.mean((given - data.y_test) ** 2), rtol=1e-4)
    assert result["ema"] == 0.99
