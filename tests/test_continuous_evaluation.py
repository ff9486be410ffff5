"""Continuous-Evaluation: what the evaluator keeps and says, how the workers hear it, and real runs with it."""

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from runs import ROOT, SECONDS, finish, metrics_of, processes, read_until, result_of, start

from common import tf
from common.cluster import task_spec
from common.cluster.hooks import EarlyStoppingHook
from common.core import task_status
from common.core.keeper import Keeper
from common.data import datasets
from common.data.batches import Batches
from common.models import keras_model
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import build_rounds

SCRIPT = ROOT / "Continuous-Evaluation" / "continuous_evaluation.py"

MODEL = """
import keras
from keras import layers

def cnn():
    return keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.BatchNormalization(momentum=0.9), layers.Flatten(),
        layers.Dropout(0.2), layers.Dense(3),
    ])
"""


@pytest.fixture(scope="module")
def script():
    """The module `continuous_evaluation`."""
    spec = importlib.util.spec_from_file_location("continuous_evaluation", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock:
    """Stands in for the module `time` where TensorFlow waits for checkpoints: a sleep lets the next thing happen.

    Args:
      happenings: functions without arguments, one for each sleep.
    """

    def __init__(self, happenings):
        self.now, self._happenings = 0.0, iter(happenings)

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds + 0.001  # as any sleep takes a little longer
        happens = next(self._happenings, None)
        assert happens, "it waits for what will not come"
        happens()


@pytest.fixture
def pass_time(monkeypatch):
    """A function that says what happens while the evaluator waits, one thing each time it sleeps."""

    def pass_time(*happenings):
        module = sys.modules[tf.train.checkpoints_iterator.__module__]
        monkeypatch.setattr(module, "time", Clock(happenings))

    return pass_time


def announce(folder, step):
    """Writes files of a checkpoint without values, and that it is the newest; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"model.ckpt-{step}"
    for suffix in ".index", ".data-00000-of-00001":
        path.with_name(path.name + suffix).write_text(str(step))
    tf.train.update_checkpoint_state(str(folder), str(path), [str(path)])
    return str(path)


def files(folder):
    return {path.name for path in Path(folder).iterdir()}


def files_of(*steps):
    return {f"model.ckpt-{step}{suffix}" for step in steps for suffix in (".index", ".data-00000-of-00001")}


@pytest.mark.parametrize("share, count", [(0.1, 4), (0.5, 20), (0.98, 39), (0.013, 1)])
def test_held_out_and_kept_are_all_samples(regression, share, count):
    training, validation = datasets.hold_out(regression, share, seed=3)
    assert (len(training.x_train), len(validation.x_test)) == (40 - count, count)
    rows = np.concatenate([np.hstack([training.x_train, training.y_train]), np.hstack([validation.x_test, validation.y_test])])
    everything = np.hstack([regression.x_train, regression.y_train])
    assert sorted(map(tuple, rows)) == sorted(map(tuple, everything))  # none twice, since no two are equal
    assert training.x_test is regression.x_test and validation.x_train is training.x_train


def test_all_tasks_hold_out_the_same_but_another_seed_others(regression):
    one, same, other = (datasets.hold_out(regression, 0.25, seed)[1].x_test.tolist() for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("share, count", [(0.01, "0"), (0.999, "40")])
def test_nothing_to_train_with_or_to_validate_with(regression, user_error, share, count):
    with user_error(f"--validation={share:g}", f"{count} of 40", "some, not all"):
        datasets.hold_out(regression, share)


def test_each_new_checkpoint_comes_once_until_the_end(script, tmp_path, pass_time):
    ended = []
    nothing = list
    pass_time(
        nothing,
        lambda: announce(tmp_path, 10),
        nothing,
        nothing,
        nothing,
        lambda: announce(tmp_path, 20),
        lambda: (announce(tmp_path, 30), announce(tmp_path, 40)),  # it has missed one: the newest counts
        lambda: ended.append(True),
    )
    paths = list(script.new_checkpoints(str(tmp_path), lambda: bool(ended)))
    assert paths == [str(tmp_path / f"model.ckpt-{step}") for step in (10, 20, 40)]


def test_the_last_checkpoint_is_not_missed(script, tmp_path, pass_time):
    """Though it is written, and the end announced, between two looks."""
    looks = iter([lambda: False, lambda: bool(announce(tmp_path, 20)), lambda: True])
    announce(tmp_path, 10)
    pass_time(list, list)
    paths = list(script.new_checkpoints(str(tmp_path), lambda: next(looks)()))
    assert [Path(path).name for path in paths] == ["model.ckpt-10", "model.ckpt-20"]


def test_training_that_has_ended_before_the_evaluator_begins(script, tmp_path, pass_time):
    pass_time(list, list)
    assert list(script.new_checkpoints(str(tmp_path), lambda: True)) == []
    path = announce(tmp_path, 10)
    assert list(script.new_checkpoints(str(tmp_path), lambda: True)) == [path]


def test_what_the_list_names_elsewhere_is_not_evaluated(script, tmp_path, pass_time):
    """As that of a folder from somebody else, which the chief has not written yet."""
    theirs, own = announce(tmp_path / "theirs", 5), tmp_path / "own"
    own.mkdir()
    tf.train.update_checkpoint_state(str(own), theirs, [theirs])
    ended: list[bool] = []
    pass_time(list, lambda: announce(own, 10), list, lambda: ended.append(True), list, list)
    assert list(script.new_checkpoints(str(own), lambda: bool(ended))) == [str(own / "model.ckpt-10")]


def test_evaluating_is_no_wait(script, tmp_path, pass_time):
    """The launcher leaves a task alone that waits, but not one that evaluates and never comes to an end."""
    announce(tmp_path, 10)
    pass_time(list, list)
    before, seen = task_status._progress[1:3], []
    for _ in script.new_checkpoints(str(tmp_path), lambda: True):
        seen.append(task_status._progress[1:3])
    assert seen == [("evaluating a checkpoint", False)] and task_status._progress[1:3] == before


@pytest.fixture
def best(script, tmp_path):
    """A function that makes the `Best` of a new process."""
    return lambda: script.Best(tmp_path / "best")


def test_the_better_is_kept_and_what_it_replaces_is_removed(best, tmp_path):
    one = best()
    assert (one.loss, one.checkpoint, one.notes) == (math.inf, None, {})
    one.keep(one.copy(announce(tmp_path / "checkpoints", 10)), global_step=10, validation_loss=0.5)
    one.copy(announce(tmp_path / "checkpoints", 20))  # no better
    one.copy(announce(tmp_path / "checkpoints", 30))
    assert files(tmp_path / "best") == files_of(10, 30) | {"checkpoint", "evaluation.json"}  # and not one more each time
    one.keep(one.copy(announce(tmp_path / "checkpoints", 40)), global_step=40, validation_loss=0.25)
    assert files(tmp_path / "best") == files_of(40) | {"checkpoint", "evaluation.json"}
    assert (one.loss, one.checkpoint) == (0.25, str(tmp_path / "best" / "model.ckpt-40"))
    assert tf.train.latest_checkpoint(tmp_path / "best") == one.checkpoint
    assert Path(one.checkpoint + ".index").read_text() == "40"


def test_the_best_is_known_to_the_next_process(best, tmp_path):
    one = best()
    one.keep(one.copy(announce(tmp_path / "checkpoints", 10)), global_step=10, validation_loss=0.5)
    one.note(test_loss=0.75)
    next_one = best()
    assert (next_one.loss, next_one.checkpoint) == (0.5, one.checkpoint)
    assert next_one.notes == {"checkpoint": "model.ckpt-10", "global_step": 10, "validation_loss": 0.5, "test_loss": 0.75}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "\x00", "[" * 100000, "[]", "3", "{}", '{"checkpoint": "model.ckpt-10"}'),
        *('{"checkpoint": 10, "validation_loss": 0.5}', '{"checkpoint": "model.ckpt-10", "validation_loss": "0.5"}'),
        *('{"checkpoint": "../checkpoints/model.ckpt-10", "validation_loss": 0.5}', "NaN", '"caf\udce9"'),
    ],
)
def test_what_is_known_of_the_best_is_damaged(best, user_error, tmp_path, text):
    """One line, and the best that there is stays."""
    one = best()
    one.keep(one.copy(announce(tmp_path / "checkpoints", 10)), validation_loss=0.5)
    (tmp_path / "best" / "evaluation.json").write_text(text, errors="surrogateescape")
    with user_error(f"{tmp_path / 'best' / 'evaluation.json'} is damaged: remove it"):
        best()
    assert files(tmp_path / "best") == files_of(10) | {"checkpoint", "evaluation.json"}


def test_names_of_checkpoints_are_no_patterns(best, tmp_path):
    """The file that lists them says how they are called, and may come from elsewhere."""
    announce(tmp_path / "checkpoints", 10)
    best().copy(str(tmp_path / "checkpoints" / "*"))
    assert files(tmp_path / "best") == set()


def test_killed_between_copy_and_keep(best, tmp_path):
    one = best()
    one.keep(one.copy(announce(tmp_path / "checkpoints", 10)), validation_loss=0.5)
    one.copy(announce(tmp_path / "checkpoints", 20))
    next_one = best()
    assert files(tmp_path / "best") == files_of(10) | {"checkpoint", "evaluation.json"}
    assert tf.train.latest_checkpoint(tmp_path / "best") == next_one.checkpoint == one.checkpoint


@pytest.mark.parametrize(
    "where, step", [("common.core.run_folder.os.replace", 10), ("common.tf.train.update_checkpoint_state", 20)]
)
def test_killed_amid_keep(best, tmp_path, monkeypatch, where, step):
    """Before the notes are written it is the old one with the old loss, afterwards the new one with the new loss."""
    one = best()
    one.keep(one.copy(announce(tmp_path / "checkpoints", 10)), validation_loss=0.5)
    copy = one.copy(announce(tmp_path / "checkpoints", 20))

    def killed(*_):
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(where, killed)
        with pytest.raises(InterruptedError):
            one.keep(copy, validation_loss=0.25)
    next_one = best()
    assert next_one.loss == {10: 0.5, 20: 0.25}[step]
    assert next_one.checkpoint == str(tmp_path / "best" / f"model.ckpt-{step}")
    assert tf.train.latest_checkpoint(tmp_path / "best") == next_one.checkpoint
    assert files_of(10, 20) & files(tmp_path / "best") == files_of(step)


def test_the_best_is_not_overwritten_when_it_is_looked_at_again(best, tmp_path):
    """A process that was started again begins with the newest checkpoint, and may be killed while it copies that."""
    one, path = best(), announce(tmp_path / "checkpoints", 10)
    one.keep(one.copy(path), validation_loss=0.5)
    Path(path + ".index").write_text("half of it")
    assert one.copy(path) == one.checkpoint
    assert Path(one.checkpoint + ".index").read_text() == "10"


def test_the_folder_of_the_best_can_be_moved(best, tmp_path):
    one = best()
    one.keep(one.copy(announce(tmp_path / "checkpoints", 10)), validation_loss=0.5)
    shutil.move(tmp_path / "best", tmp_path / "moved")
    assert tf.train.latest_checkpoint(tmp_path / "moved") == str(tmp_path / "moved" / "model.ckpt-10")


def test_a_checkpoint_that_the_chief_has_just_removed(script, best, tmp_path, regression):
    copy = best().copy(str(tmp_path / "checkpoints" / "model.ckpt-10"))
    with pytest.raises(tf.errors.OpError):
        script.values_in(copy, keras_model.build("linear", regression))


@pytest.fixture
def cnn(tmp_path, images):
    """A model with moving means, made before a graph is entered."""
    (tmp_path / "m.py").write_text(MODEL)
    return keras_model.build(f"{tmp_path}/m.py:cnn", images)


@pytest.mark.slow
def test_values_of_a_checkpoint_are_those_of_the_chief(script, tmp_path, cnn, graph, images, initialized, hogwild):
    """Moving means are restored, too."""
    center = GlobalParameters(cnn.initial_parameters, 1)
    batches = Batches(images.x_train, images.y_train, 9, seed=0)
    kept = center.keep(cnn.initial_state)
    local = LocalParameters(center, cnn, batches, "worker_0", kept=kept)
    rounds = build_rounds(hogwild, center, local, types.SimpleNamespace(window=1, learning_rate=0.1), 5)
    keeper = Keeper(center, tmp_path, 5, copies=[there.assign(here) for there, here in zip(kept, local.state, strict=True)])
    session = initialized(center, local)
    keeper.begin_run(session, None)
    keeper.after_create_session(session, None)
    session.run(rounds)
    parameters, step = session.run(center.read())
    of_chief = session.run([variable.read_value() for variable in local.state])
    exported: list = []
    keeper.export = lambda *values: exported.append(values)
    keeper._export(keeper.save(session))
    keeper.end(session)
    assert (exported[0][0] == parameters).all()
    assert len(exported) == 1 and all((a == b).all() for a, b in zip(exported[0][1], of_chief, strict=True))

    path = tf.train.latest_checkpoint(tmp_path)
    (found, state), at = script.values_in(path, cnn)
    assert at == step == 5
    assert (found == parameters).all() and (found != cnn.initial_parameters).any()
    assert all((a == b).all() for a, b in zip(state, of_chief, strict=True))
    assert any((a != b).any() for a, b in zip(state, cnn.initial_state, strict=True))
    session.run([variable.initializer for variable in local.state])  # a chief that was started again
    assert all((a == b).all() for a, b in zip(session.run([variable.read_value() for variable in local.state]), of_chief))


def test_evaluates_what_is_saved_as_keras_model(script, tmp_path, cnn, images):
    import keras

    rng = np.random.default_rng(0)
    values = (
        cnn.initial_parameters + 1,
        [
            value if value.dtype.kind == "u" else value + rng.random(value.shape).astype(np.float32)
            for value in cnn.initial_state
        ],
    )
    _, validation = datasets.hold_out(images, 0.4)
    evaluator = script.Evaluator(cnn, validation, images)
    cnn.save(*values, tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for of, found in (validation, evaluator.validate(values)), (images, evaluator.test(values)):
        logits = loaded(of.x_test, training=False)
        assert found["accuracy"] == pytest.approx(np.mean(logits.numpy().argmax(axis=1) == of.y_test))
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(of.y_test, logits)
        assert found["loss"] == pytest.approx(float(cross_entropy), rel=1e-4)


def save(folder, step, parameters, name=None):
    """Saves a checkpoint as the chief does: of a line, whose parameters are its slope and intercept."""
    with tf.Graph().as_default(), tf.Session() as session:
        tf.get_variable("parameters", initializer=tf.constant(parameters, tf.float32))
        tf.get_variable("global_step", initializer=tf.constant(step, tf.int64))
        session.run(tf.global_variables_initializer())
        return tf.train.Saver().save(session, str(folder / f"model.ckpt-{name or step}"))


def test_checkpoint_of_another_model(script, tmp_path, regression, user_error):
    path = save(tmp_path, 10, [1, 2])
    with user_error(path, "2 parameters, but the model has 4", "flags"):
        script.values_in(path, keras_model.build("linear", regression))


@pytest.fixture
def settings(tmp_path):
    """The flags of an evaluator of a line."""
    for folder in "checkpoints", "metrics":
        (tmp_path / folder).mkdir()
    of_worker = {"time": 1.0, "worker": 0, "global_step": 1, "loss": 9.0, "samples_per_second": 1.0}  # to be drawn
    (tmp_path / "metrics" / "worker-0.jsonl").write_text(json.dumps(of_worker) + "\n")
    return types.SimpleNamespace(
        run_dir=str(tmp_path), data="linear", model="linear", seed=0, validation=0.1, patience=2, batch_size=32, window=1,
        steps=1000, epochs=None, loss=None, test_data=None, label=None, parse=None,
        missing=None, hash_strings=None, data_cache=None, stream=False, max_workers=None,
    )  # fmt: skip


@pytest.mark.slow
def test_a_training_that_gets_worse(script, settings, tmp_path, pass_time, capsys):
    """From the first checkpoint to the end: the training is told to stop in time, and the best checkpoint is left."""
    evaluator = task_spec.TaskSpecDef("evaluator")
    told = []

    def chief_saves(step, slope):
        told.append((tmp_path / "evaluator-says-stop").exists())
        save(tmp_path / "checkpoints", step, [slope, 10])

    def chief_saves_again():  # no step came between: for a moment a copy of another name is the newest, see `write_checkpoint`
        save(tmp_path / "checkpoints", 300, [1, 10], "0300")

    chief_saves(100, 0)
    pass_time(
        lambda: chief_saves(200, 2),
        lambda: chief_saves(300, 1),
        chief_saves_again,
        lambda: chief_saves(400, 2.5),
        lambda: chief_saves(500, 3),
        lambda: (tmp_path / "training-has-ended").touch(),
    )
    assert script.evaluate(evaluator, settings) == 0
    assert told == [False, False, False, False, True]  # after two that were no better than step 200
    lines = [json.loads(line) for line in (tmp_path / "metrics" / "evaluator.jsonl").read_text().splitlines()]
    assert [line["global_step"] for line in lines] == [100, 200, 300, 400, 500]
    # y = 2 x + 10 + noise of variance 0.01; x² is 1/3 on average
    expected = [4 / 3, 0, 1 / 3, 0.25 / 3, 1 / 3]
    assert [line["validation_loss"] for line in lines] == pytest.approx([each + 0.01 for each in expected], rel=0.25, abs=0.005)
    assert files(tmp_path / "best") >= {"model.ckpt-200.index", "model.keras", "evaluation.json"}
    notes = json.loads((tmp_path / "best" / "evaluation.json").read_text())
    assert (notes["global_step"], notes["validation_loss"]) == (200, lines[1]["validation_loss"])
    assert notes["test_loss"] == pytest.approx(0.01, abs=0.003) and "test_accuracy" not in notes
    assert not (tmp_path / "training-has-ended").exists()  # or a run that goes on with this one would have ended
    (events,) = (tmp_path / "tensorboard" / "evaluator").iterdir()
    values = [value for event in tf.train.summary_iterator(str(events)) for value in event.summary.value]
    assert {value.tag for value in values} == {"loss"}  # as the workers'
    said = capsys.readouterr().out.splitlines()
    assert "step 200" in said[1] and said[1].endswith("the best")
    assert said[4] == "no improvement in 2 evaluations: training may stop"


@pytest.mark.slow
def test_a_training_that_diverges_leaves_no_best(script, settings, tmp_path, pass_time):
    save(tmp_path / "checkpoints", 100, [math.nan, 0])
    (tmp_path / "training-has-ended").touch()
    pass_time()
    assert script.evaluate(task_spec.TaskSpecDef("evaluator"), settings) == 0
    assert not (tmp_path / "best" / "evaluation.json").exists() and all(
        "ckpt-100." in name for name in files(tmp_path / "best")
    )


@pytest.fixture
def server():
    """A server in this process, which sessions of several graphs may share."""
    return tf.train.Server.create_local_server()


def session_with(hook, target=""):
    """Opens a monitored session in a graph of its own; returns it and the operation to run."""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step().assign_add(1)
        session = tf.train.MonitoredSession(tf.train.ChiefSessionCreator(master=target), [hook])
    return session, step


def test_stops_when_there_is_the_file(tmp_path):
    hook = EarlyStoppingHook(tmp_path / "stop", every_secs=0)
    session, step = session_with(hook)
    with session:
        session.run(step)
        assert not session.should_stop() and not hook.requested
        (tmp_path / "stop").touch()
        session.run(step)
        assert session.should_stop() and hook.requested


def test_all_workers_hear_what_the_chief_reads(tmp_path, server):
    chief, chief_step = session_with(EarlyStoppingHook(tmp_path / "stop", every_secs=0), server.target)
    worker, worker_step = session_with(EarlyStoppingHook(every_secs=0), server.target)
    with chief, worker:
        chief.run(chief_step)
        worker.run(worker_step)
        assert not chief.should_stop() and not worker.should_stop()
        (tmp_path / "stop").touch()
        worker.run(worker_step)
        assert not worker.should_stop()  # it does not look itself
        chief.run(chief_step)
        worker.run(worker_step)
        assert chief.should_stop() and worker.should_stop()


def test_looks_only_so_often(tmp_path):
    (tmp_path / "stop").touch()
    hook = EarlyStoppingHook(tmp_path / "another", every_secs=1e6)
    session, step = session_with(hook)
    with session:
        session.run(step)
        (tmp_path / "another").touch()
        session.run(step)
        assert not hook.requested


def test_says_so_but_leaves_the_session_alone(tmp_path):
    hook = EarlyStoppingHook(tmp_path / "stop", stop_session=False)
    (tmp_path / "stop").touch()
    session, step = session_with(hook)
    with session:
        session.run(step)
        assert hook.requested and not session.should_stop()


def of_evaluator(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics" / "evaluator.jsonl").read_text().splitlines()]


def assert_the_best_is_the_best(run_dir):
    """Of all evaluations the one with the least loss is kept, and it is what its notes say."""
    import keras

    least = min(of_evaluator(run_dir), key=lambda line: line["validation_loss"])
    notes = json.loads((run_dir / "best" / "evaluation.json").read_text())
    assert {key: notes[key] for key in ("global_step", "validation_loss", "validation_accuracy")} == {
        key: least[key] for key in ("global_step", "validation_loss", "validation_accuracy")
    }
    checkpoint = tf.train.latest_checkpoint(run_dir / "best")
    assert tf.train.load_variable(checkpoint, "global_step") == notes["global_step"]
    digits, loaded = datasets.load("digits"), keras.models.load_model(run_dir / "best" / "model.keras")
    of_loaded = np.mean(loaded(digits.x_test, training=False).numpy().argmax(axis=1) == digits.y_test)
    assert of_loaded == pytest.approx(notes["test_accuracy"])
    assert processes(run_dir) == []


@pytest.mark.cluster
def test_the_evaluator_ends_a_training_that_does_not_improve(run_dir):
    # No validation loss improves a million epochs long.
    flags = ["--epochs=1000000", "--seconds=90", "--patience=1", "--learning_rate=0.3", "--checkpoint_secs=0.2"]
    command = ["bash", str(SCRIPT.parent / "run.sh"), *flags, f"--run_dir={run_dir}"]
    output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
    assert output.returncode == 0, output.stdout
    lines, result = of_evaluator(run_dir), result_of(run_dir)
    assert len(lines) >= 3 and len({line["global_step"] for line in lines}) == len(lines)
    assert "training may stop" in (run_dir / "logs" / "worker-2.log").read_text()
    assert result["global_steps"] < metrics_of(run_dir, 0)[0]["last_step"] and result["train_seconds"] < 60
    assert (result["num_workers"], result["restarts"]) == (2, 0)
    assert lines[-1]["global_step"] == result["global_steps"]  # the last checkpoint, too
    assert_the_best_is_the_best(run_dir)
    assert "best checkpoint, of step" in output.stdout and str(run_dir / "best" / "model.keras") in output.stdout
    for task in "worker-0", "worker-1", "evaluator":
        (events,) = (run_dir / "tensorboard" / task).iterdir()
        tags = {value.tag for event in tf.train.summary_iterator(str(events)) for value in event.summary.value}
        assert "loss" in tags


@pytest.mark.cluster
def test_a_killed_evaluator_costs_nothing(run_dir):
    """It is started again, knows the best checkpoint of before, and sees the training to its end."""
    process = start(run_dir, "--launch", "--steps=5000", "--patience=1000000", script=SCRIPT)
    read_until(process, lambda line: "validation loss" in line)
    (evaluator,) = processes(run_dir, "--job_name=worker", "--task_index=2")
    os.kill(evaluator, signal.SIGKILL)
    assert "killed by SIGKILL; restart 1 of 3" in read_until(process, lambda line: line.startswith("worker 2"))
    before = len(of_evaluator(run_dir))
    finish(process)
    result, lines = result_of(run_dir), of_evaluator(run_dir)
    assert result["restarts"] == 1 and result["test_accuracy"] >= 0.95
    assert 0 < before < len(lines) and lines[-1]["global_step"] == result["global_steps"]
    assert_the_best_is_the_best(run_dir)


@pytest.mark.parametrize(
    "flag, text",
    [
        ("--validation=0", "--validation must be greater than 0, not 0"),
        ("--patience=0", "--patience must be at least 1, not 0"),
    ],
)
@pytest.mark.cluster
def test_flags_that_make_no_sense(run_dir, flag, text):
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--launch", flag, f"--run_dir={run_dir}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
    )
    assert (ended.returncode, ended.stderr) == (2, f"continuous_evaluation.py: {text}\n")
