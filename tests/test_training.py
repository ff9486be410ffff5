"""The rounds that a worker runs in one call."""

import math
import types
from typing import Any

import pytest

from common import tf
from common.cluster import session
from common.cluster.task_spec import TaskSpecDef
from common.core.flags import Settings
from common.core.run_facts import RunFacts
from common.data import datasets
from common.data.batches import Batches
from common.models import keras_model
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.training import calls

ALL_REDUCE = "Synchronous-SGD", "all_reduce"


@pytest.fixture(scope="module")
def problem():
    """The smallest data and model there are; made outside of any graph."""
    dataset = datasets.load("linear")
    return dataset, keras_model.build("linear", dataset)


def worker(index):
    """A worker of two."""
    return TaskSpecDef("worker", index, ps_hosts="localhost:1", worker_hosts="localhost:2,localhost:3")


@pytest.fixture
def clock(monkeypatch):
    """The clock of the calls; it stands still. And a long run is what has made two calls, none of them timed."""
    standing: Any = types.SimpleNamespace(now=0.0, monotonic=lambda: standing.now)
    monkeypatch.setattr(calls, "LONG_RUN", 2)
    monkeypatch.setattr(calls, "LEAST_TIMED", math.inf)
    monkeypatch.setattr(calls, "time", standing)
    return standing


@pytest.fixture
def built(problem, graph, load_scheme):
    """A function that gives parameters, global and local, and `Plan.next_call`: of a worker, or of one process (None)."""

    def built(task, last, scheme=("HogWild", "hogwild"), **flags):
        dataset, model = problem
        center = GlobalParameters(model.initial_parameters, 1, task and task.device_fn())
        with tf.device(task and task.device):
            batches = Batches(dataset.x_train, dataset.y_train, 32, 0)
            index, num_workers = (task.shard_index, task.num_workers) if task else (0, 1)
            local = LocalParameters(center, model, batches, index=index, num_workers=num_workers)
            pace = "ring" if scheme == ALL_REDUCE else "own"
            given = {"seconds": None, "rounds_per_call": None, "delays": None, "window": 1, "weight_decay": 0, **flags}
            settings = Settings(run=RunFacts("scheme", pace), learning_rate=0.1, batch_size=32, steps=last, **given)
            found, next_call, *more, _ = calls.build_calls(load_scheme(*scheme), center, local, settings, len(dataset.x_train))
        assert found == last
        return center, local, next_call, more

    return built


@pytest.fixture
def rounds_of(built, clock):
    """A function that gives a function, by the last global step and the flags, with one ps and two workers: how many rounds the
    next call has, by the present global step and the seconds that the call before took."""

    def rounds_of(last, on_ps=True, **flags):
        next_call = built(worker(0) if on_ps else None, last, **flags)[2]

        def rounds(present, taken=0.01):
            clock.now += taken
            chosen, *fed = next_call(present)
            [times] = fed[0].values() if fed else [None]
            assert (times is None) == chosen.steps.shape.is_fully_defined()
            return (times, 10) if times else int(chosen.steps.shape[0])

        return rounds

    return rounds_of


@pytest.mark.slow
def test_few_rounds_to_go(rounds_of):
    """Ten in a call, and one when the two workers would overshoot the last step."""
    assert list(map(rounds_of(2000), [0, 1980, 1981, 1999])) == [10, 10, 1, 1]


@pytest.mark.parametrize(("last", "rounds"), [(1, 1), (399, 1), (400, 2), (1999, 9), (2000, 10)])
def test_short_run(rounds_of, last, rounds):
    """At least 100 calls of each worker."""
    assert rounds_of(last)(0) == rounds


@pytest.mark.slow
@pytest.mark.parametrize(("window", "local_steps"), [(1, 500), (3, 1500)])
def test_how_many_local_steps_a_worker_makes(built, window, local_steps):
    """The two workers share the updates."""
    assert built(worker(0), 1000, window=window)[-1][-1] == local_steps


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("gpus", [[], ["a GPU"]])
def test_graphs_of_a_short_run_are_not_optimized(monkeypatch, graph, is_short, gpus):
    """Except for a GPU."""
    monkeypatch.setattr(session.devices, "gpus", lambda: gpus)
    monkeypatch.setattr(session.tf.train, "MonitoredSession", lambda creator, hooks: creator._config.graph_options)
    options = session.monitored_session(None, "", None, "checkpoints", 60, is_short=is_short)
    is_off = is_short and not gpus
    assert options.rewrite_options.disable_meta_optimizer is is_off
    assert (options.optimizer_options.opt_level == options.optimizer_options.L0) is is_off
    assert options.rewrite_options.remapping == options.rewrite_options.OFF


@pytest.mark.slow
def test_short_run_with_rounds_of_the_users_choice(rounds_of):
    assert list(map(rounds_of(100, rounds_per_call=10), [0, 80, 81, 99])) == [10, 10, 1, 1]


@pytest.mark.slow
def test_long_run(rounds_of):
    """After some calls they become longer, so that they take about a quarter of a second, until towards the end."""
    rounds = rounds_of(2000)
    assert list(map(rounds, [0, 20])) == [10, 10]
    assert [rounds(40, taken) for taken in (0.01, 0.1, 0.2, 0.3, 9, 9, 0.1)] == [(n, 10) for n in (2, 4, 4, 2, 1, 1, 2)]
    assert list(map(rounds, [1920, 1921, 1980, 1981])) == [(4, 10), 10, 10, 1]


@pytest.mark.parametrize("flags", [{"on_ps": False}, {"seconds": 60}, {"last": 400, "rounds_per_call": 10}])
def test_what_is_no_long_run(rounds_of, flags):
    assert list(map(rounds_of(**{"last": 2000, **flags}), [0, 20, 40, 60])) == [10] * 4


@pytest.fixture
def times_rounds(clock, monkeypatch):
    """Calls may be timed."""
    monkeypatch.setattr(calls, "LEAST_TIMED", 50)


@pytest.mark.slow
def test_some_calls_are_timed(times_rounds, rounds_of):
    """Of two rounds."""
    rounds = rounds_of(2000, seconds=60)
    assert [rounds(0) for _ in range(5)] == [10, 2, 2, 10, 10]
    assert [rounds(0, taken) for taken in (1.1, 0.3, 0.01)] == [2, 10, 10]


@pytest.mark.slow
@pytest.mark.parametrize(("last", "presents", "sizes"), [(200, [0, 197], [10, 1]), (199, [0, 20, 40], [10, 10, 10])])
def test_no_call_is_timed_at_the_end_or_in_a_short_run(times_rounds, rounds_of, last, presents, sizes):
    assert list(map(rounds_of(last, rounds_per_call=10), presents)) == sizes


def test_one_round_where_calls_have_one(times_rounds, rounds_of):
    rounds = rounds_of(100, rounds_per_call=1)
    assert [rounds(0) for _ in range(3)] == [1, 1, 1]


@pytest.mark.slow
def test_long_run_with_rounds_of_the_users_choice(rounds_of):
    assert list(map(rounds_of(1000, rounds_per_call=10), [0, 20, 40, 60])) == [10, 10, (1, 10), (1, 10)]


@pytest.mark.parametrize(("flags", "steps"), [({}, 500), ({"rounds_per_call": 7}, 7), ({"delays": [100]}, 50)])
def test_long_run_in_lockstep(rounds_of, flags, steps):
    """By no clock, since workers that differ in their calls would wait for each other for ever."""
    rounds = rounds_of(2000, scheme=ALL_REDUCE, **flags)
    assert [rounds(0, taken) for taken in (0.0, 1.0, 0.01, 9.0)] == [steps] * 4
    assert rounds(2000 - steps + 1) == 1


@pytest.mark.parametrize(("index", "has_a_part"), [(0, True), (1, False)])
def test_in_lockstep_the_ps_has_a_part_in_one_workers_calls(built, times_rounds, graph, index, has_a_part):
    """Calls with collectives have one step id on all workers: one that cleans up after its own would end the others'."""
    next_call, is_timed = built(worker(index), 2000, scheme=ALL_REDUCE)[2], []
    for present in (0, 0, 0, 1999):
        [rounds] = next_call(present)
        is_timed.append(bool(rounds.parts))
        fetched = [tensor.op.name if isinstance(tensor, tf.Tensor) else tensor.name for tensor in tf.nest.flatten(rounds)]
        nodes = tf.graph_util.extract_sub_graph(graph.as_graph_def(), fetched).node
        assert any("/job:ps" in node.device for node in nodes) == has_a_part
    assert is_timed == [False, True, True, False]


@pytest.mark.slow
def test_long_run_to_its_last_step(built, clock, initialized, servers):
    """With servers: no step is lost or overshot, and as every call takes no time, each is twice as long as the one before."""
    task, server = servers(1)
    center, local, next_call, _ = built(task, 1000)
    session = initialized(center, local, target=server.target)
    steps, sizes = [[0, 0]], []
    while steps[-1][1] < 1000:
        more = session.run(*next_call(steps[-1][1])).steps.tolist()
        steps += more
        sizes.append(len(more))
    assert steps[1:] == [[step, step + 1] for step in range(1000)]
    assert sizes == [10, 10, 20, 40, 80, 160, 320, *[10] * 36]
