"""Which rounds a worker runs in one call."""

import types

import pytest

from common import data, models, tf, training
from common.cluster import TaskSpecDef
from common.parameters import GlobalParameters, LocalParameters


@pytest.fixture(scope="module")
def problem():
    """The smallest data and model there are; made outside of any graph."""
    dataset = data.load("linear")
    return dataset, models.build("linear", dataset)


@pytest.fixture
def next_call(problem, graph, hogwild):
    """A function that gives `Plan.next_call` of HogWild, by the last global step and the flags, with one ps and two workers."""

    def next_call(last, on_ps=True, seconds=None, rounds_per_call=None):
        dataset, model = problem
        task = TaskSpecDef("worker", 0, ps_hosts="localhost:1", worker_hosts="localhost:2,localhost:3") if on_ps else None
        center = GlobalParameters(model.initial_parameters, 1, task and task.device_fn())
        with tf.device(task and task.device):
            batches = data.Batches(dataset.x_train, dataset.y_train, 32, 0)
            local = LocalParameters(center, model, batches, num_workers=2 if task else 1)
            settings = types.SimpleNamespace(
                window=1, learning_rate=0.1, batch_size=32, steps=last, seconds=seconds, rounds_per_call=rounds_per_call
            )
            found, choose = training.build_calls(hogwild, center, local, settings, len(dataset.x_train))
        assert found == last
        return lambda present: int(choose(present)[0].steps.shape[0])

    return next_call


def test_few_rounds_to_go(next_call):
    """Ten in a call, and one when the two workers would overshoot the last step."""
    assert list(map(next_call(1000), [0, 980, 981, 999])) == [10, 10, 1, 1]


def test_long_run(next_call, monkeypatch):
    """After some calls they become larger, until towards the end."""
    monkeypatch.setattr(training, "LONG_RUN", 2)
    assert list(map(next_call(1000), [0, 20, 40, 940, 941])) == [10, 10, 30, 30, 1]


@pytest.mark.parametrize("flags", [{"on_ps": False}, {"seconds": 60}, {"last": 400}])
def test_what_is_no_long_run(next_call, monkeypatch, flags):
    monkeypatch.setattr(training, "LONG_RUN", 2)
    assert list(map(next_call(**{"last": 1000, **flags}), [0, 20, 40, 60])) == [10] * 4


def test_long_run_with_rounds_of_the_users_choice(next_call, monkeypatch):
    monkeypatch.setattr(training, "LONG_RUN", 2)
    assert list(map(next_call(1000, rounds_per_call=7), [0, 20, 40, 60])) == [7] * 4
