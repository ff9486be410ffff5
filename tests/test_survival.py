"""Damaged checkpoints, disks that take no more, losses that are not finite: one clear line each, and nothing good is lost."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import HOGWILD, ROOT, SECONDS, flip, needs_mounts, processes, result_of, run, wait_until_gone

from common import tf
from common.cluster import session
from common.core.checkpoints import checkpoints_in, newest_good_checkpoint

# Checkpoints that are damaged


class Checkpoints:
    """A training whose checkpoints of steps 1 to `last` lie in a folder: a trainable variable in two parts, and another.

    At step n the former is n, n + 1, ..., the latter n.
    """

    def __init__(self, folder, last=3, max_to_keep=5):
        self.folder = folder
        folder.mkdir(parents=True)
        self.step = tf.train.get_or_create_global_step()
        self.center = tf.get_variable(
            "center", [6], initializer=tf.zeros_initializer(), partitioner=tf.fixed_size_partitioner(2), use_resource=True
        )
        self.moving_mean = tf.get_variable("moving_mean", [2], trainable=False, use_resource=True)
        self._values = tf.placeholder(tf.float32, [6]), tf.placeholder(tf.float32, [2]), tf.placeholder(tf.int64, [])
        first, second = self.center
        self.whole = self.center.as_tensor()
        values = (*tf.split(self._values[0], 2), *self._values[1:])
        variables = first, second, self.moving_mean, self.step
        self._assign = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
        self.saver = session.Saver(max_to_keep=max_to_keep, save_relative_paths=True)
        with tf.Session() as opened:
            for step in range(1, last + 1):
                self.save(opened, step)

    def save(self, opened, step, center=None, moving_mean=None):
        center = np.arange(step, step + 6.0) if center is None else center
        moving_mean = [step, step] if moving_mean is None else moving_mean
        opened.run(self._assign, dict(zip(self._values, (center, moving_mean, step), strict=True)))
        return self.saver.save(opened, str(self.folder / "model.ckpt"), self.step)

    def file(self, step, kind):
        """The path of its "index" or "data"."""
        return self.folder / f"model.ckpt-{step}.{kind}{'-00000-of-00001' if kind == 'data' else ''}"

    def newest_good(self):
        """The step of the newest good checkpoint, or None."""
        path = newest_good_checkpoint(str(self.folder))
        return path and int(path.rpartition("-")[2])


@pytest.fixture
def checkpoints(tmp_path, graph):
    return Checkpoints(tmp_path / "checkpoints")


def cut_short(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


DAMAGES = [(flip, "data"), (cut_short, "data"), (empty, "data"), (Path.unlink, "data")]
DAMAGES += [(flip, "index"), (cut_short, "index"), (empty, "index"), (Path.unlink, "index")]


def test_the_newest_of_good_checkpoints(checkpoints, capsys):
    assert checkpoints.newest_good() == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("damage, kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_said(checkpoints, capsys, damage, kind):
    damage(checkpoints.file(3, kind))
    assert checkpoints.newest_good() == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"the checkpoint {checkpoints.folder}/model.ckpt-3 is damaged: ")
    assert line.endswith("; looking for an older one")
    assert len(line) > len(f"the checkpoint {checkpoints.folder}/model.ckpt-3 is damaged: ; looking for an older one") + 10


def test_each_damaged_one_is_a_line(checkpoints, capsys):
    flip(checkpoints.file(3, "data"))
    cut_short(checkpoints.file(2, "index"))
    assert checkpoints.newest_good() == 1
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == [
        f"{checkpoints.folder}/model.ckpt-{step}" for step in (3, 2)
    ]


@pytest.mark.parametrize("content", [None, b"", b"model_checkpoint_path: ", b"\xff\xfe\x00\x80garbage", b"gar bage: {"])
def test_the_list_of_checkpoints_is_damaged(checkpoints, capsys, content):
    """The files themselves say which there are."""
    if content is None:
        (checkpoints.folder / "checkpoint").unlink()
    else:
        (checkpoints.folder / "checkpoint").write_bytes(content)
    with tf.Session() as opened:
        checkpoints.save(opened, 11) if content == b"" else None  # 11 > 3, though not as text
    assert checkpoints.newest_good() == (11 if content == b"" else 3)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_trainable_variable_that_is_not_finite(checkpoints, capsys, value):
    with tf.Session() as opened:
        checkpoints.save(opened, 4, center=[0, 0, 0, 0, 0, value])
    assert checkpoints.newest_good() == 3
    assert "model.ckpt-4 is damaged: center has values that are not finite; " in capsys.readouterr().out


def test_another_variable_may_be_infinite(checkpoints, capsys):
    """The best loss so far, say, begins so."""
    with tf.Session() as opened:
        checkpoints.save(opened, 4, moving_mean=[np.inf, np.nan])
    assert checkpoints.newest_good() == 4
    assert capsys.readouterr().out == ""


def test_all_are_damaged(checkpoints, user_error):
    for step, (damage, kind) in zip((1, 2, 3), DAMAGES, strict=False):
        damage(checkpoints.file(step, kind))
    with user_error(f"all checkpoints in {checkpoints.folder} are damaged, model.ckpt-1: ", "give another folder"):
        checkpoints.newest_good()


def test_no_checkpoints(tmp_path, graph):
    assert newest_good_checkpoint(str(tmp_path)) is None
    assert newest_good_checkpoint(None) is None


def test_training_goes_on_from_the_older_one_and_removes_old_ones_in_their_turn(tmp_path, graph):
    checkpoints = Checkpoints(tmp_path / "checkpoints", max_to_keep=3)
    flip(checkpoints.file(3, "data"))
    scaffold = tf.train.Scaffold(saver=checkpoints.saver)
    creator = session._Creator(None, scaffold, "", str(checkpoints.folder), None)
    with contextlib.closing(creator.create_session()) as opened:
        assert opened.run(checkpoints.step) == 2
        assert opened.run(checkpoints.whole).tolist() == [2, 3, 4, 5, 6, 7]
        for step in 10, 11:
            checkpoints.save(opened, step)
    assert [Path(path).name for path in checkpoints_in(str(checkpoints.folder))] == [f"model.ckpt-{n}" for n in (2, 10, 11)]
    assert not checkpoints.file(1, "index").exists()
    assert checkpoints.newest_good() == 11


# Disks that take no more

# To be run where it may mount. Prints a JSON object: for each disk what saving raised, whether that changed any file, and which
# checkpoint is the newest good one.
ON_BAD_DISKS = """
import json, shutil, subprocess, sys
from pathlib import Path

from common import tf
from test_survival import Checkpoints


def fill(disk):
    try:
        with open(disk / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1000))
    except OSError:
        pass


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*")}


def failure_of(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)


SPOIL = {
    "full": fill,
    "read-only": lambda disk: subprocess.run(["mount", "-o", "remount,ro", disk], check=True),
    "removed": lambda disk: shutil.rmtree(disk / "run"),
}
said = {}
for name, spoil in SPOIL.items():
    disk = Path(sys.argv[1], name)
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=True)
    with tf.Graph().as_default(), tf.Session() as session:
        checkpoints = Checkpoints(disk / "run" / "checkpoints")
        spoil(disk)
        before = files(checkpoints.folder)
        failure = failure_of(checkpoints.save, session, 4)
        is_unchanged = files(checkpoints.folder) == before
        said[name] = failure, is_unchanged, checkpoints.newest_good() if before else 0
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def bad_disks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disks")
    ended = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-c", ON_BAD_DISKS, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])},
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    return folder, json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
@needs_mounts
@pytest.mark.parametrize(
    "name, reason",
    [
        ("full", "No space left on device"),
        ("read-only", "Read-only file system"),
        ("removed", None),
    ],
)
def test_a_checkpoint_cannot_be_written(bad_disks, name, reason):
    folder, said = bad_disks
    failure, is_unchanged, newest_good = said[name]
    where = f"{folder}/{name}/run/checkpoints"
    into = f"no checkpoint can be written into {where}: {reason}; its checkpoints are intact, and --resume continues from the"
    gone = f"no checkpoint can be written: the folder {where} is gone"
    assert failure == ["TrainingFailed", f"{into} newest once that is fixed" if reason else gone]
    assert is_unchanged  # and no half-written file is left
    assert newest_good == (0 if name == "removed" else 3)


def test_what_is_not_the_disks_fault_is_raised_as_it_is(checkpoints):
    with tf.Session() as opened, pytest.raises(tf.errors.FailedPreconditionError):  # nothing is initialized
        checkpoints.saver.save(opened, str(checkpoints.folder / "model.ckpt"), 4)


# Losses that are not finite

DIVERGES = ["--learning_rate=5", "--data=linear", "--model=linear"]  # within a hundred steps
OR = "a smaller --learning_rate, or look at the data"
WHAT_TO_DO = f"go on from the newest good checkpoint with --resume and {OR}"
NON_DISTRIBUTED = ROOT / "Non-Distributed-Setup" / "non_distributed_setup.py"


@pytest.mark.slow
@pytest.mark.parametrize("script, what_to_do", [(HOGWILD, WHAT_TO_DO), (NON_DISTRIBUTED, f"start again with {OR}")])
def test_a_process_on_its_own_diverges(run_dir, script, what_to_do):
    command = [sys.executable, str(script), *DIVERGES, f"--run_dir={run_dir}"]
    ended = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=SECONDS)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert re.match(rf"{script.name}: worker 0: the loss is (inf|nan) at step [1-9]\d*; ", line)
    assert line.endswith(what_to_do)
    assert not (run_dir / "result.json").exists()


# Launched runs


def good_checkpoints(folder):
    """The steps of those that are listed in a folder, the oldest first. All of them are good."""
    paths = checkpoints_in(str(folder))
    for path in paths:
        checkpoint = tf.train.load_checkpoint(path)
        assert all(np.isfinite(checkpoint.get_tensor(name)).all() for name in checkpoint.get_variable_to_shape_map()), path
    return [int(path.rpartition("-")[2]) for path in paths]


def last_line_of_a_failed_run(output, run_dir):
    """The last words of a run that failed for good: one line, with no trace and no restart before it."""
    assert "Traceback" not in output and "restart" not in output
    assert wait_until_gone(processes(run_dir)) == []
    *before, last = output.splitlines()
    starts = "checking the data and the model ", "HogWild: ", "minimizes ", "worker 0 is "
    usual = *starts, "step ", "the ports of this run ", "no model is "
    assert all(line.startswith(usual) for line in before), output
    return last


@pytest.mark.cluster
def test_a_run_that_diverges_is_mended_by_a_smaller_learning_rate(run_dir):
    """It leaves a checkpoint to go on with: other workers may be faster than the chief, but not before it has saved.

    There are more ps than parameters.
    """
    arguments = ["--data=linear", "--model=linear", "--num_workers=3", "--num_ps=3"]
    output = run(run_dir, *arguments, "--learning_rate=1000", "--checkpoint_secs=1000", status=1)
    line = last_line_of_a_failed_run(output, run_dir)
    said = re.fullmatch(r"hogwild.py: worker ([012]): the loss is (?:inf|nan) at step [1-9]\d*; (.*) \(log: (.*)\)", line)
    assert said and said[2].endswith(WHAT_TO_DO) and said[3] == str(run_dir / "logs" / f"worker-{said[1]}.log"), line
    assert 0 in good_checkpoints(run_dir / "checkpoints")

    output = run(run_dir, *arguments, "--learning_rate=0.1", "--epochs=20", "--resume")
    assert "damaged" not in output
    result = result_of(run_dir)
    assert "test_accuracy" not in result
    assert result["test_loss"] == pytest.approx(0.01, rel=0.3)  # the variance of the noise
    assert good_checkpoints(run_dir / "checkpoints")[-1] == result["global_steps"]


OF_WORKER_1 = """
import keras, numpy as np

def model():
    x = keras.Input((2,))
    return keras.Model(x, keras.layers.Dense(2)(keras.ops.log(x)))

def load():
    "Every second sample, which is one of worker 1, has a zero, and so no finite logarithm."
    x = np.random.default_rng(0).uniform(1, 2, (400, 2)).astype(np.float32)
    x[1:300:2, 0] = 0
    y = np.tile([0, 0, 1, 1], 100)
    return (x[:300], y[:300]), (x[300:], y[300:])
"""


@pytest.mark.cluster
@pytest.mark.parametrize("scheme", ["HogWild/hogwild.py", "Synchronous-SGD/all_reduce.py"])
def test_the_worker_with_the_bad_samples_is_named(run_dir, tmp_path, scheme):
    """Also when another has the end of a call first, as worker 1 is slow. The others never get what is not finite."""
    (tmp_path / "bad.py").write_text(OF_WORKER_1)
    spec = f"{tmp_path}/bad.py"
    flags = [f"--data={spec}:load", f"--model={spec}:model", "--delays=0,500", "--rounds_per_call=3", "--epochs=1000"]
    output = run(run_dir, *flags, status=1, script=ROOT / scheme)
    line = output.splitlines()[-1]
    assert re.search(r": worker 1: the loss is (nan|inf) at step \d+; ", line), output
    assert line.endswith(f" (log: {run_dir}/logs/worker-1.log)") and "not finite" not in output
    assert good_checkpoints(run_dir / "checkpoints")


LARGE_MODEL = """
import keras
from keras import layers

def large():  # a million parameters, so a checkpoint of 4 MB
    hidden = [layers.Dense(1000), layers.Dense(1000)]
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), *hidden, layers.Dense(10)])
"""


@needs_mounts
@pytest.mark.cluster
def test_the_disk_fills_up_while_a_run_trains(run_dir, tmp_path):
    """It has room for three checkpoints and a model, beside which the next one has none. They are copied to where they can be
    read: the disk is gone with the last process."""
    (tmp_path / "m.py").write_text(LARGE_MODEL)
    run_dir.mkdir()
    commands = 'mount -t tmpfs -o size=20m none "$0" && { "$@"; status=$?; cp -r "$0" "$0-copy"; exit $status; }'
    program = [
        sys.executable,
        str(HOGWILD),
        "--launch",
        "--num_workers=1",
        f"--model={tmp_path}/m.py:large",
        f"--run_dir={run_dir}",
    ]
    often = ["--checkpoint_secs=0.1", "--epochs=10000"]
    ended = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", commands, str(run_dir), *program, *often],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
    )
    assert ended.returncode == 1, ended
    line = last_line_of_a_failed_run(ended.stdout + ended.stderr, run_dir)
    assert line == (
        f"hogwild.py: no checkpoint can be written into {run_dir}/checkpoints: No space left on device; its checkpoints are "
        f"intact, and --resume continues from the newest once that is fixed (log: {run_dir}/logs/worker-0.log)"
    )
    assert "no model is written beside the checkpoints: [Errno 28] No space left on device" in ended.stdout
    copy = Path(f"{run_dir}-copy", "checkpoints")
    assert [path.name for path in copy.parent.glob("model.keras*")] == ["model.keras"]
    steps = good_checkpoints(copy)
    assert len(steps) == 3 and steps[0] == 0 and steps[-1] > 0
    assert {path.name for path in copy.glob("model.ckpt-*")} == {
        f"model.ckpt-{step}.{kind}" for step in steps for kind in ("index", "data-00000-of-00001")
    }
