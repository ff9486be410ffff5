"""The parts of a round: what takes how long, when that is measured, and how it is told."""

import itertools
import json
import math
import time
import types

import numpy as np
import pytest
from runs import ROOT, result_of, run

from common import tf
from common.core import progress
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import Rounds, build_rounds, timed_rounds
from common.scheme.steps import PARTS, Step
from common.training import metrics
from common.training.calls import _Turn
from common.training.metrics import MetricsHook, MetricsLog, shares_of_parts

SLEEP = 0.05


def sleep():
    return tf.py_func(lambda: time.sleep(SLEEP), [], [])


class SlowBatches:
    """Batches of which each takes some time."""

    init_feed_dict: dict = {}
    batch_size, num_samples = 4, 8

    def begin_call(self):
        """Nothing."""

    def next(self, window):
        """Takes no time."""
        return tf.range(window)

    def samples(self, index):
        """Returns x and y."""
        with tf.control_dependencies([sleep()]):
            return tf.ones([4, 3]) * tf.cast(index + 1, tf.float32), tf.ones([4, 1])


@pytest.fixture
def measured(graph, model, initialized):
    """A function that gives {part: seconds} of a round of a scheme, on its second call, and x̃ after it."""

    def measured(scheme, batches, delay=0.0, rounds=1):
        center = GlobalParameters(model.initial_parameters)
        local = LocalParameters(center, model, batches, delay=delay)
        timed = timed_rounds(scheme, center, local, None, rounds)
        session = initialized(center, local)
        session.run(timed)  # prepares the graph
        return session.run(timed).parts

    return measured


def plain(window):
    sgd = tf.train.GradientDescentOptimizer(0.01)

    def scheme(center, local, hp):
        yield local.pull(center)
        yield local.train(window, sgd)
        yield center.push(sgd, local.gradient)

    return scheme


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("rounds", [1, 2])
def test_input_is_no_training(measured, window, rounds):
    """In a loop of local steps, too; and a second call does not count what the first one did."""
    parts = measured(plain(window), SlowBatches(), rounds=rounds)
    assert set(parts) == {"pull", "train", "push", "input"}
    assert parts["input"] >= window * SLEEP


def test_the_worker_goes_on_after_the_timestamp(graph, model, known_batches, batches):
    """Else a thread that has much to do takes the timestamp of a pull when it has trained."""
    steps, sgd = [], tf.train.GradientDescentOptimizer(0.01)

    def scheme(center, local, hp):
        yield local.pull(center)
        steps.append(Step((tf.no_op(),)))
        yield steps[0]
        yield local.train(1, sgd)
        yield center.push(sgd, local.gradient)

    center = GlobalParameters(model.initial_parameters)
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
    timed_rounds(scheme, center, local, None, 1)
    assert [op.type for op in steps[0].operations[0].control_inputs] == ["Timestamp"]


def test_delay_is_training(measured, known_batches, batches):
    parts = measured(plain(2), known_batches(*(b[0] for b in batches)), delay=0.2)
    assert parts["train"] >= 0.2


@pytest.mark.parametrize(
    ("part", "slow"),
    [
        ("pull", lambda center: Step((sleep(),), pulled=center.step.read_value())),
        ("push", lambda center: Step((sleep(),), updated=center.step.read_value())),
        ("wait", lambda center: Step((sleep(),), may_go_on=tf.constant(True))),
    ],
)
def test_part_of_a_step(measured, known_batches, batches, part, slow):
    def scheme(center, local, hp):
        yield local.pull(center)
        yield slow(center)
        yield local.train(1, tf.train.GradientDescentOptimizer(0.01))
        yield center.add(local.gradient)

    parts = measured(scheme, known_batches(*(b[0] for b in batches)))
    assert parts[part] >= SLEEP


def test_all_reduce_is_no_training(measured, known_batches, batches):
    def scheme(center, local, hp):
        ring = center.ring(local)
        ring._mean = lambda tensor: slowly(tensor)
        sgd = tf.train.GradientDescentOptimizer(0.01)
        yield local.train(2, lambda g: local.apply(sgd, ring.mean(g)))
        yield ring.publish(2)

    def slowly(tensor):
        with tf.control_dependencies([sleep()]):
            return tf.identity(tensor)

    parts = measured(scheme, known_batches(*(b[0] for b in batches)))
    assert parts["all-reduce"] >= 2 * SLEEP


@pytest.fixture
def parts_at(monkeypatch, graph, initialized, model, known_batches, batches, servers):
    """A function that gives {part: seconds} of a round of a scheme on a ps, whose timestamps say the times that are given.

    These are in their order: when what was before the round ended on the worker, and on the ps; and of each step the same, if
    it has operations there.
    """

    def parts_at(scheme, times, **others):
        task, server = servers(1)
        center = GlobalParameters(model.initial_parameters, 1, task.device_fn())
        stamps = []

        def stamp(self, operations, after=()):
            stamps.append(tf.placeholder(tf.float64, []))
            return stamps[-1]

        monkeypatch.setattr("common.scheme.rounds._Timer._stamp", stamp)
        with tf.device(task.device):
            local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)), **others)
            timed = timed_rounds(scheme, center, local, None, 1)
        session = initialized(center, local, target=server.target)
        parts = session.run(timed.parts, dict(zip(stamps, times, strict=True)))
        parts["train"] += parts.pop("input")  # which took as long as it took
        return parts

    return parts_at


def test_the_next_read_waits_for_a_push(parts_at):
    """So the push takes until it is applied; the read takes what is left then."""
    parts = parts_at(plain(1), [0, 0.25, 1, 3, 3.25, 4])
    assert parts == pytest.approx({"pull": 0.75, "train": 2, "push": 1})


@pytest.mark.parametrize(
    ("push_before", "pull", "push"),
    [(0.5, 1, 0.25), (2.5, 0.5, 0.75)],
    ids=["is applied while the worker trains", "is read after"],
)
def test_a_push_takes_no_time_while_the_worker_trains(parts_at, push_before, pull, push):
    """That of the round before is applied when `push_before` says, that of this round at 9, in the next."""

    def scheme(center, local, hp):
        sgd = tf.train.GradientDescentOptimizer(0.01)
        yield local.train(1, sgd)
        yield local.compare(center)
        yield center.push(sgd, local.gradient)

    parts = parts_at(scheme, [0, push_before, 2, 3, 3.25, 9])
    assert parts == pytest.approx({"train": 2, "pull": pull, "push": push})


def test_waiting_for_others_is_a_part_of_its_own(parts_at):
    def scheme(center, local, hp):
        sgd, others = tf.train.GradientDescentOptimizer(0.01), center.together(local)
        yield local.pull(center)
        yield local.train(1, sgd)
        yield others.push(sgd, local.gradient)
        yield others.wait()

    assert parts_at(scheme, [0, 0, 1, 3, 3.5, 4, 7]) == pytest.approx({"pull": 1, "train": 2, "push": 1, "wait": 3})


@pytest.mark.slow
def test_normal_calls_are_untouched(graph, model, known_batches, batches):
    """A call is made of the same operations with and without a timed one beside it."""

    def operations(is_timed):
        with tf.Graph().as_default() as graph:
            center = GlobalParameters(model.initial_parameters)
            local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
            built = build_rounds(plain(3), center, local, None, 2)
            if is_timed:
                timed_rounds(plain(3), center, local, None, 2)
            wanted = [op.name for op in built.operations] + [built.loss.op.name, built.steps.op.name]
            nodes = tf.graph_util.extract_sub_graph(graph.as_graph_def(), wanted).node
            return {node.name: (node.op, node.device, list(node.input)) for node in nodes}

    assert operations(True) == operations(False)


def turns(in_ring, seconds, calls):
    turn = _Turn(in_ring)
    return [i for i in range(1, calls + 1) if turn.is_it(i, i * seconds, seconds)]


def test_second_and_third_call_are_timed_and_then_a_few():
    """No more than a twentieth of the time, after the first two."""
    for seconds in 0.01, 0.1, 5.0:
        timed = turns(False, seconds, 1000)
        assert timed[:2] == [2, 3]
        assert 3 <= len(timed) <= 2 + 1000 / 20
    assert len(turns(False, 0.01, 200)) >= 3  # within 2 s, and the first is not counted
    assert 100 < len(turns(False, 0.25, 400_000)) < 2000  # more than a day


def test_workers_in_a_ring_time_the_same_calls():
    assert turns(True, 0.1, 100) == turns(True, 7.0, 100)
    assert turns(True, 0.1, 12) == [2, 3, 10]


def test_shares():
    assert shares_of_parts([{}, {}]) == {"round_seconds": None, "parts": None}
    each = [{"pull": 1.0, "train": 3.0}, {}, {"train": 2.0, "wait": 6.0}]
    assert shares_of_parts(each) == {"round_seconds": 6.0, "parts": {"pull": 0.125, "train": 0.5, "wait": 0.375}}


def test_first_timed_call_of_a_session_is_not_counted(tmp_path, graph, monkeypatch):
    """Nor is a round that took longer than its call, as the wall clock says when it is set forward."""
    times = types.SimpleNamespace(perf_counter=itertools.count(0.0, 10.0).__next__, time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr(metrics, "time", times)
    log = MetricsLog(tmp_path, 1, 50)
    seconds = tf.placeholder(tf.float64, [])
    parts = {"pull": seconds, "train": 1.0 + 0 * seconds}
    call = Rounds(tf.no_op(), tf.constant(0.5), tf.constant([[0, 1]], tf.int64), parts=parts)
    hook = MetricsHook(log, samples_per_update=10, every_secs=1e9)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        session.run(call, {seconds: 100.0})
        assert all(map(math.isnan, hook.seconds_of_parts()))
        for value in 3.0, 3600.0, 1.0:
            session.run(call, {seconds: value})
        means = dict(zip(PARTS, hook.seconds_of_parts(), strict=True))
        assert means == {**dict.fromkeys(PARTS, 0.0), "pull": 2.0, "train": 1.0}
    log.close()
    (line,) = map(json.loads, (tmp_path / "metrics" / "worker-1.jsonl").read_text().splitlines())
    assert line["parts"] == {"pull": 0.6667, "train": 0.3333} and line["round_seconds"] == 3.0
    assert line["timed_rounds"] == [{"pull": 3.0, "train": 1.0}, {"pull": 1.0, "train": 1.0}]


def test_line_and_table_say_the_parts(tmp_path):
    (tmp_path / "metrics").mkdir()
    figures = progress.Progress(tmp_path, [0, 1])
    for worker, parts in (0, {"pull": 0.5, "train": 0.5}), (1, {"train": 0.25, "wait": 0.75}):
        line = {"global_step": 3, "last_step": 9, "parts": parts}
        (tmp_path / "metrics" / f"worker-{worker}.jsonl").write_text(json.dumps(line) + "\n")
    figures.poll()
    assert figures.line() == "step 3 of 9, pull 25 %, train 38 %, wait 38 %"
    assert figures.table().caption == "pull 25 %, train 38 %, wait 38 %"


@pytest.mark.parametrize("parts", ['"pull"', '{"pull": "a"}', '{"pull": 7}', '{"pull": null}', "[1]"])
def test_parts_that_are_damaged(parts):
    assert progress.parsed([f'{{"parts": {parts}}}'.encode()]) == []


def test_summary_says_the_parts(tmp_path, capsys):
    result = dict(
        scheme="HogWild", num_ps=1, num_workers=1, global_steps=1, samples=1, samples_per_worker=[1], train_seconds=1.0,
        wall_seconds=1.0, samples_per_second=1.0, test_loss=1.0, staleness_mean=None, staleness_max=0, restarts=0,
        round_seconds=0.00166, parts={"pull": 0.31, "train": 0.69},
    )  # fmt: skip

    def said(**changes):
        (tmp_path / "result.json").write_text(json.dumps(result | changes))
        progress.summary(types.SimpleNamespace(run_dir=str(tmp_path), delays=None), 0)
        return capsys.readouterr().out.splitlines()[2]

    assert said() == "a round takes 1.66 ms: pull 31 %, train 69 %"
    assert said(parts=None, round_seconds=None) == "the parts of a round were not measured: too few rounds"


@pytest.mark.cluster
def test_the_fast_worker_waits_for_the_slow_one(run_dir):
    script = ROOT / "Synchronous-SGD" / "synchronous_sgd.py"
    output = run(run_dir, "--delays=0,100", "--rounds_per_call=2", "--steps=120", script=script)
    lines = [(run_dir / "metrics" / f"worker-{i}.jsonl").read_text().splitlines() for i in range(2)]
    fast, slow = ([parts for line in of_one if (parts := json.loads(line).get("parts"))] for of_one in lines)
    assert np.median([parts.get("wait", 0.0) for parts in fast]) > 0.5
    assert np.median([parts.get("train", 0.0) for parts in slow]) > 0.5
    result = result_of(run_dir)
    assert sum(result["parts"].values()) == pytest.approx(1, abs=1e-3)
    assert f"a round takes {1000 * result['round_seconds']:.3g} ms: " in output
