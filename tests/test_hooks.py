"""common/training/metrics.py and hooks.py: what a run says of itself, and evaluation while training goes on."""

import json
import shutil
import threading
import time
import types

import numpy as np
import pytest
from runs import SECONDS

from common import tf
from common.cluster.hooks import Gate, SemiSyncRunHook, StartHook
from common.cluster.membership import Members
from common.core.flags import TrainingFailed
from common.scheme.rounds import Rounds
from common.training import metrics
from common.training.metrics import EvaluationHook, MetricsHook, MetricsLog, seconds_between


@pytest.fixture
def log(tmp_path, graph):
    log = MetricsLog(tmp_path, 1, 50)
    yield log
    log.close()


@pytest.fixture
def lines(tmp_path):
    """A function that returns the lines of the metrics so far, as dictionaries."""
    return lambda: [json.loads(line) for line in (tmp_path / "metrics" / "worker-1.jsonl").read_text().splitlines()]


@pytest.fixture
def call(graph):
    """A function that makes a call of some rounds: placeholders of their loss and steps."""
    return Rounds(tf.no_op(), tf.placeholder(tf.float32, []), tf.placeholder(tf.int64, [None, 2]))


def train(session, call, loss, steps):
    return session.run(call, {call.loss: loss, call.steps: steps})


def test_log_writes_whole_lines(log, lines, tmp_path):
    log.write(7, loss=0.5, samples=32)
    (line,) = lines()  # whole before the file is closed
    assert line.pop("time") > 1.7e9
    assert line == {"global_step": 7, "worker": 1, "last_step": 50, "loss": 0.5, "samples": 32}
    log.write(np.int64(8), test_loss=0.25, test_accuracy=None)
    assert [line["global_step"] for line in lines()] == [7, 8]


def test_log_goes_on_where_a_run_stopped(tmp_path, graph, lines):
    for step in 1, 2:
        log = MetricsLog(tmp_path, 1, 50)
        log.write(step)
        log.close()
    assert [line["global_step"] for line in lines()] == [1, 2]


@pytest.mark.parametrize("half", ['{"time": 1.5, "glob', "{", '{"global_step": 2}'])
def test_log_goes_on_after_a_line_that_was_not_finished(tmp_path, graph, lines, half):
    """As a kill or a full disk leaves it. A line without its end counts as half, though it may lack nothing else."""
    for step in 1, 3:
        log = MetricsLog(tmp_path, 1, 50)
        log.write(step)
        log.close()
        if step == 1:
            with open(tmp_path / "metrics" / "worker-1.jsonl", "a") as file:
                file.write(half)
    assert [line["global_step"] for line in lines()] == [1, 3]


def test_log_whose_only_line_was_not_finished(tmp_path, graph, lines):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "worker-1.jsonl").write_text('{"glob')
    MetricsLog(tmp_path, 1, 50).close()
    assert lines() == []


def delete_file(folder):
    (folder / "metrics" / "worker-1.jsonl").unlink()


def delete_folder(folder):
    shutil.rmtree(folder / "metrics")


def put_a_file_in_its_place(folder):
    (folder / "metrics" / "another").write_text('{"global_step": 5}\n{"glob')
    (folder / "metrics" / "another").replace(folder / "metrics" / "worker-1.jsonl")


@pytest.mark.parametrize("delete, left", [(delete_file, [2, 3]), (delete_folder, [2, 3]), (put_a_file_in_its_place, [5, 2, 3])])
def test_log_that_somebody_deletes_is_made_again(log, lines, tmp_path, delete, left):
    log.write(1)
    delete(tmp_path)
    log.write(2)
    log.write(3)
    assert [line["global_step"] for line in lines()] == left


def test_log_whose_run_is_gone(tmp_path, graph):
    log = MetricsLog(tmp_path / "run", 1, 50)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(TrainingFailed, match=f"^no metrics can be written: the folder {tmp_path / 'run'} is gone$"):
        log.write(1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("plant", ["symlink_to", "hardlink_to"])
def test_log_is_not_written_through_a_link(tmp_path, graph, user_error, plant):
    """Whether it is there at the beginning, or takes the place of what was deleted."""
    (tmp_path / "precious").write_text("precious\n{")
    (tmp_path / "metrics").mkdir()
    log = MetricsLog(tmp_path, 2, 50)
    for name in "worker-1.jsonl", "worker-2.jsonl":
        (tmp_path / "metrics" / name).unlink(missing_ok=True)
        getattr(tmp_path / "metrics" / name, plant)(tmp_path / "precious")
    with user_error("worker-1.jsonl is a"):
        MetricsLog(tmp_path, 1, 50)
    with user_error("worker-2.jsonl is a"):
        log.write(1)
    assert (tmp_path / "precious").read_text() == "precious\n{"


def test_log_of_a_run_that_diverged_is_json(log, tmp_path):
    """JSON knows no NaN and no Infinity; other readers than Python's refuse them."""
    log.write(1, loss=float("nan"), test_loss=float("inf"))

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads((tmp_path / "metrics" / "worker-1.jsonl").read_text(), parse_constant=refuse)


def test_log_writes_events_for_tensorboard(tmp_path, graph):
    log = MetricsLog(tmp_path, 1, 50)
    log.write(7, loss=0.5, samples=32, test_accuracy=None, staleness={"0": 3})
    log.write(9, loss=0.25, samples_per_second=float("inf"))
    log.close()
    (path,) = (tmp_path / "tensorboard" / "worker-1").iterdir()
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in tf.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    assert scalars == [(7, "loss", 0.5), (9, "loss", 0.25)]


def test_metrics_count_the_calls_that_train(log, lines, call):
    """It times no others, though they go through the same session."""
    hook = MetricsHook(log, samples_per_update=10, every_secs=1e9)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        for fetches in call.loss, [call.loss, call.steps], tuple(call), {"loss": call.loss}:
            session.run(fetches, {call.loss: 9.0, call.steps: [[0, 1]]})
        assert hook.totals() == (0, 0, 0, 0, 0)
        result = train(session, call, 0.5, [[0, 1], [1, 4]])
        assert (result.loss, result.steps.tolist()) == (0.5, [[0, 1], [1, 4]])
        assert hook.totals() == (20, 2, 2, 2, 0)
        train(session, call, 0.25, [[4, 5]])
        assert hook.totals() == (30, 3, 2, 2, 0)
        assert lines() == []  # not yet time
    (line,) = lines()
    assert line["samples"] == 30 and line["global_step"] == 5
    assert line["loss"] == pytest.approx(0.375)
    assert line["samples_per_second"] > 0


def test_local_steps_of_a_new_session_are_counted_anew(log, call):
    """Where their number varies, a call tells how many the worker has made in its session."""
    made = tf.placeholder(tf.int64, [1])
    drawn: list = []
    hook = MetricsHook(log, samples_per_update=1, drawn=drawn.append, batch_size=32)
    call = call._replace(local_steps=made)
    for _ in range(2):  # with the same hook, as after the death of a ps
        with tf.train.SingularMonitoredSession(hooks=[hook]) as session:
            for steps in 3, 10:
                session.run(call, {call.loss: 0.0, call.steps: [[0, 1]], made: [steps]})
    assert drawn == [96, 224] * 2


def test_staleness_is_the_updates_of_others_between_pull_and_push(log, lines, call):
    hook = MetricsHook(log, samples_per_update=1, every_secs=1e9)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        train(session, call, 0, [[0, 1], [1, 4], [4, 7]])
        train(session, call, 0, [[7, 8], [8, 14]])
    assert hook.staleness == {0: 2, 2: 2, 5: 1}
    (line,) = lines()
    assert line["staleness"] == {"0": 2, "2": 2, "5": 1}
    assert line["staleness_mean"] == pytest.approx(9 / 5)


def test_lines_are_of_the_time_since_the_last(log, lines, call):
    hook = MetricsHook(log, samples_per_update=10, every_secs=0)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        train(session, call, 1, [[0, 1], [1, 2]])
        train(session, call, 3, [[2, 5]])
    assert [line["loss"] for line in lines()] == [1, 3]
    assert [line["staleness"] for line in lines()] == [{"0": 2}, {"2": 1}]
    assert [line["samples"] for line in lines()] == [20, 30]  # since the start
    assert hook.totals() == (30, 3, 2, 2, 0)


def test_what_is_left_at_the_end_is_no_measure_of_speed(log, lines, call):
    hook = MetricsHook(log, samples_per_update=10, every_secs=0)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        train(session, call, 1, [[0, 1]])
        hook._every_secs = 1e9  # the next line is that of the end, after far less time
        train(session, call, 3, [[1, 2]])
    assert ["samples_per_second" in line for line in lines()] == [True, False]
    assert [line["samples"] for line in lines()] == [10, 20]


def test_dropped_gradients_are_no_updates_but_of_samples(log, lines, call):
    hook = MetricsHook(log, samples_per_update=10, every_secs=0)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        train(session, call, 1, [[0, 1], [4, 4], [4, 5]])
        train(session, call, 3, [[9, 9]])
    assert hook.totals() == (40, 2, 0, 0, 2)
    assert [line["gradients_dropped"] for line in lines()] == [1, 1]
    assert [line["samples"] for line in lines()] == [30, 40]
    assert [line["staleness_mean"] for line in lines()] == [0, None]


@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
def test_training_ends_when_the_loss_is_not_finite(log, lines, call, loss):
    hook = MetricsHook(log, samples_per_update=1, every_secs=1e9)
    with pytest.raises(TrainingFailed) as info:
        with tf.train.MonitoredSession(hooks=[hook]) as session:
            train(session, call, 0.5, [[0, 1]])
            train(session, call, loss, [[1, 4], [4, 7]])
    message = str(info.value)
    assert message.startswith(f"worker 1: the loss is {loss} at step 7; ") and "\n" not in message
    assert "--resume" in message and "--learning_rate" in message


def test_a_loss_that_no_training_call_fetches_may_be_infinite(log, call):
    with tf.train.MonitoredSession(hooks=[MetricsHook(log, samples_per_update=1)]) as session:
        assert np.isnan(session.run(call.loss, {call.loss: np.nan}))


def test_lines_come_more_seldom_in_a_long_run():
    assert [seconds_between(0.5, age) for age in (0, 500, 1000, 3600)] == [0.5, 0.5, 1, 3.6]
    age, lines, counts = 0.0, 0, {}
    for end in 500, 8 * 3600, 45 * 24 * 3600:
        while age < end:
            age += seconds_between(0.5, age)
            lines += 1
        counts[end] = lines
    assert counts == {500: 1000, 8 * 3600: pytest.approx(5000, rel=0.05), 45 * 24 * 3600: pytest.approx(10000, rel=0.1)}


def test_the_hook_keeps_to_that(monkeypatch, log, lines, call):
    """Calls at these seconds after the first; each makes a line that comes late enough after the one before."""
    clock = types.SimpleNamespace(now=1e6)
    monkeypatch.setattr(metrics, "time", types.SimpleNamespace(perf_counter=lambda: clock.now, monotonic=time.monotonic))
    hook = MetricsHook(log, samples_per_update=1)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        for step, age in enumerate([0, 0.4, 0.5, 10_000, 10_009, 10_011, 10_011.5, 10_021.5]):
            clock.now = 1e6 + age
            train(session, call, 1, [[step, step + 1]])
        assert [line["global_step"] for line in lines()] == [2, 4, 6, 8]


def test_flush_without_a_call_writes_nothing(log, lines):
    hook = MetricsHook(log, samples_per_update=10)
    hook.flush()
    assert lines() == [] and hook.totals() == (0, 0, 0, 0, 0)


class Measured:
    """Tensors for an `EvaluationHook`: a step that the test sets, a loss of twice the step, and an accuracy."""

    def __init__(self, accuracy=0.5):
        self.evaluations = 0
        self.evaluated = threading.Semaphore(0)
        self.step = tf.get_variable("step", initializer=tf.constant(3, tf.int64), use_resource=True, trainable=False)
        loss = tf.py_func(self._evaluate, [self.step.read_value()], tf.float32)
        accuracy = {} if accuracy is None else {"accuracy": tf.constant(accuracy, tf.float32)}
        self.tensors = self.step.read_value(), {"loss": tf.reshape(loss, []), **accuracy}

    def _evaluate(self, step):
        self.evaluations += 1
        self.evaluated.release()
        return np.float32(2 * step)

    def wait_for_one(self):
        assert self.evaluated.acquire(timeout=SECONDS)


def evaluation_threads(before):
    return [thread for thread in threading.enumerate() if thread not in before]


def test_evaluates_at_the_start_and_while_training_waits(graph, log, lines):
    measured, before = Measured(), threading.enumerate()
    hook = EvaluationHook(log, measured.tensors[0], measured.tensors[1], every_secs=0.01)
    with tf.train.MonitoredSession(hooks=[hook]):
        for _ in range(3):
            measured.wait_for_one()  # no call trains meanwhile
    assert evaluation_threads(before) == []
    count = measured.evaluations
    assert count >= 3 and len(lines()) == count
    first = lines()[0]
    assert (first["global_step"], first["test_loss"], first["test_accuracy"]) == (3, 6.0, 0.5)


def test_evaluates_at_the_start_even_if_seldom(graph, log):
    measured, before = Measured(), threading.enumerate()
    with tf.train.MonitoredSession(hooks=[EvaluationHook(log, measured.tensors[0], measured.tensors[1], every_secs=1e6)]):
        measured.wait_for_one()
    assert measured.evaluations == 1
    assert evaluation_threads(before) == []  # nor does the end wait for the next evaluation


def test_evaluation_of_a_regression_has_no_accuracy(graph, log, lines):
    measured = Measured(accuracy=None)
    hook = EvaluationHook(log, measured.tensors[0], measured.tensors[1], every_secs=1e6)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        measured.wait_for_one()
        assert hook.evaluate(session) == (3, {"loss": 6.0})
    assert [line.get("test_accuracy") for line in lines()] == [None, None]


def test_no_thread_is_left_when_training_fails(graph, log):
    measured, before = Measured(), threading.enumerate()
    hook = EvaluationHook(log, measured.tensors[0], measured.tensors[1], every_secs=0.01)
    with pytest.raises(ZeroDivisionError):
        with tf.train.MonitoredSession(hooks=[hook]):
            measured.wait_for_one()
            raise ZeroDivisionError
    for thread in evaluation_threads(before):
        thread.join(timeout=SECONDS)
    assert evaluation_threads(before) == []


class FailOnce(tf.train.SessionRunHook):
    """Fails in the first call as it fails when a ps dies, so that the session is created anew."""

    def __init__(self):
        self.sessions = 0

    def after_create_session(self, session, coord):
        self.sessions += 1

    def before_run(self, run_context):
        if self.sessions == 1:
            raise tf.errors.AbortedError(None, None, "a ps has died")


def test_session_that_is_created_anew_is_evaluated(graph, log):
    """By one thread: the first one has ended."""
    measured, before, fail_once = Measured(), threading.enumerate(), FailOnce()
    hook = EvaluationHook(log, measured.tensors[0], measured.tensors[1], every_secs=0.01)
    with tf.train.MonitoredSession(hooks=[hook, fail_once]) as session:
        measured.wait_for_one()
        session.run(measured.tensors[0])
        assert fail_once.sessions == 2
        so_far = measured.evaluations
        while measured.evaluations < so_far + 3:
            measured.wait_for_one()
        assert len(evaluation_threads(before)) == 1
    assert evaluation_threads(before) == []


@pytest.mark.parametrize("arguments", [(2, 2), (-1, 2), (0, 2, -1), (0, 2, float("nan"))])
def test_semi_synchronous_hook_refuses_what_makes_no_sense(arguments):
    with pytest.raises(ValueError, match="must be"):
        SemiSyncRunHook(*arguments)


def test_semi_synchronous_hook_alone_waits_for_nobody(graph):
    step = tf.train.get_or_create_global_step()
    with tf.train.MonitoredSession(hooks=[SemiSyncRunHook(0, 1, staleness=0)]) as session:
        for _ in range(3):
            session.run(step)


# --- The start ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(graph):
    return Gate(Members(""))


def start(session, gate, said, **settings):
    StartHook(gate, 3, **{"secs": 60, **settings}).after_create_session(session, None)
    return said


@pytest.fixture
def said(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr("common.cluster.hooks.tell", lines.append)
    return lines


def test_all_workers_begin_when_the_last_has_come(gate, said):
    """Each says that it has come whenever it looks whether it may begin."""
    looks = [gate.closed(i) for i in (1, 2)]
    with tf.Session() as session:
        for look in looks[0], looks[0], looks[1]:
            assert not gate.is_open(session) and session.run(look).size == 1
        assert start(session, gate, said) == []
        assert gate.is_open(session) and session.run(looks[0]).size == 0 and session.run(gate.variable)


def test_those_that_are_there_begin_without_the_others(gate, said):
    look = gate.closed(2)
    with tf.Session() as session:
        session.run(look)
        start(session, gate, said, secs=0.1)
        assert said == ["1 of 3 workers have not started within --start_secs=0.1: the others begin"]
        assert session.run(look).size == 0


def test_who_has_left_is_not_waited_for(gate, said):
    """Also if the ps does not know that it had come, as it was restarted; and nobody who joins stands in for another."""
    looks = [gate.closed(i) for i in (1, 3)]
    with tf.Session() as session:
        session.run(looks)
        start(session, gate, said, secs=0.1)
        assert said == ["1 of 3 workers have not started within --start_secs=0.1: the others begin"]
    with tf.Session() as session:
        session.run(looks[:1])
        start(session, gate, said, who_left=lambda: {2: [0.0]})
        assert gate.is_open(session) and len(said) == 1


def test_a_ps_that_is_lost_while_the_chief_waits(gate, said):
    """In the new session the chief waits on, but not once more when it has waited."""
    looks = [gate.closed(i) for i in (1, 2)]
    hook = StartHook(gate, 3, 60)
    with tf.Session() as session:
        session.run(looks[0])
        hook._is_over = lambda: 1 / 0  # stands for the error of a session
        with pytest.raises(ZeroDivisionError):
            hook.after_create_session(session, None)
    with tf.Session() as session:
        hook._is_over = lambda: session.run(looks) and False  # by now both look again
        hook.after_create_session(session, None)
        assert gate.is_open(session)
    with tf.Session() as session:  # training had begun: nobody has come to the new ps yet
        hook.after_create_session(session, None)
        assert gate.is_open(session) and said == []


def test_a_chief_that_comes_back_waits_for_nobody(gate, said):
    with tf.Session() as session:
        gate.open(session)
        assert start(session, gate, said, is_over=lambda: pytest.fail("it waits")) == []


def test_an_interrupted_chief_waits_for_nobody(gate, said):
    with tf.Session() as session:
        assert start(session, gate, said, is_over=lambda: True) == []


def test_workers_that_wait_learn_that_training_has_ended(gate):
    look = gate.closed(1)
    with tf.Session() as session:
        gate.close(session)
        assert session.run(look).size == 0 and not session.run(gate.variable)
    with tf.Session() as session:
        gate.open(session)
        gate.close(session)
        assert session.run(gate.variable)
