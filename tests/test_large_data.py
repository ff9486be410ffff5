"""Data that is not copied whole into every worker: files that are mapped; and a worker's place in the order of its samples."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from runs import finish, is_training, processes, read_until, start

from common import data, tf
from common.batches import Batches, Position

# --- The position of a worker, which outlives its process ---------------------------------------------------------------


def drawn(initialized, position, calls, n=10, batch_size=3, window=2):
    """Draws so many calls in a session of its own, noting each as a worker does; returns the indices."""
    with tf.Graph().as_default():
        batches = Batches(np.zeros([n, 1], np.float32), np.zeros(n, np.int32), batch_size, seed=4, position=position)
        indices, found = batches.next(window), []
        session = initialized(batches)
        for _ in range(calls):
            found.append(session.run(indices).ravel())
            if position:
                position.add(window * batch_size)
    return np.concatenate(found).tolist()


def test_a_process_that_comes_back_goes_on_in_its_order(initialized, tmp_path):
    whole = drawn(initialized, None, 9)
    path = tmp_path / "metrics" / "worker-0.position"
    parts = [drawn(initialized, Position(path, 4, 10), calls) for calls in (2, 3, 4)]
    assert sum(parts, []) == whole


def test_a_session_that_is_opened_again_goes_on_where_the_last_whole_call_ended(initialized, tmp_path):
    position, whole = Position(tmp_path / "p.position", 1), drawn(initialized, None, 4)
    first = drawn(initialized, position, 2)
    position.value -= 6  # as if the second call had failed, and was never noted
    assert first + drawn(initialized, position, 2)[6:] == whole[:18]


def test_another_order_begins_at_its_beginning(tmp_path):
    """That of another seed, or of other shards, as more workers have."""
    path = tmp_path / "p.position"
    Position(path, 1, 2).add(5)
    assert [Position(path, 1, 2).value, Position(path, 1, 3).value, Position(path, 1, 2).value] == [5, 0, 0]


def test_a_position_is_not_written_into_a_file_that_is_not_the_runs_own(tmp_path, user_error):
    (tmp_path / "other").write_text("keep me")
    os.symlink(tmp_path / "other", tmp_path / "link.position")
    os.link(tmp_path / "other", tmp_path / "second.position")
    for name, problem in (("link.position", "is a link"), ("second.position", "has another name")):
        with user_error(problem):
            Position(tmp_path / name, 1)
    assert (tmp_path / "other").read_text() == "keep me"


NUM_SAMPLES, BATCH_SIZE, WINDOW, CALL = 51, 4, 3, 2 * 3 * 4  # samples a call: two rounds of a window
RECORDING = f"""
import os
import keras
import numpy as np
import tensorflow as tf

FOLDER = os.path.dirname(__file__)

def load():
    x = np.arange({NUM_SAMPLES}, dtype=np.float32)[:, None]
    return (x, x / {NUM_SAMPLES}), (-1 - x, x / {NUM_SAMPLES})

def record(x):
    if len(x) == {BATCH_SIZE} and (x >= 0).all():  # not of a check, or of the test set
        with open(os.path.join(FOLDER, f"drawn-{{os.getpid()}}"), "ab") as file:
            file.write(x.astype(np.int64).tobytes())
    return x

class Recorder(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        seen = tf.numpy_function(record, [x], tf.float32)
        seen.set_shape([None, 1])
        return self.dense(seen / {NUM_SAMPLES})

def build():
    return Recorder()
"""


@pytest.mark.cluster
def test_a_worker_that_is_killed_goes_on_in_the_order_of_its_samples(run_dir, tmp_path, initialized):
    """To within one call; and so does a run that was interrupted and is resumed, exactly."""
    (tmp_path / "recording.py").write_text(RECORDING)

    def flags(steps):
        own = f"--data={tmp_path}/recording.py:load", f"--model={tmp_path}/recording.py:build"
        return "--launch", *own, f"--batch_size={BATCH_SIZE}", f"--window={WINDOW}", "--rounds_per_call=2", f"--steps={steps}"

    def worker():
        return processes(run_dir, "--job_name=worker", "--task_index=1")

    def drawn_by(pid):
        path = Path(tmp_path, f"drawn-{pid}")
        return np.frombuffer(path.read_bytes(), np.int64) // 2 if path.exists() else np.array([], int)  # of its shard

    process = start(run_dir, *flags(10**7))
    pids: list = []
    for _ in range(2):
        read_until(process, lambda line: is_training(line) and worker() and len(drawn_by(worker()[0])) > 3 * CALL)
        pids += worker()
        if len(pids) == 1:
            os.kill(pids[0], signal.SIGKILL)
            read_until(process, lambda line: line.startswith("worker 1 was killed"))
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    before, after = map(drawn_by, pids)
    shard = data.shard(data.checked(2 * ((np.zeros([NUM_SAMPLES, 1]), np.zeros(NUM_SAMPLES)),), ""), 1, 2)
    with tf.Graph().as_default():
        batches = Batches(*shard, BATCH_SIZE, seed=1)
        indices = batches.next(2 * (len(before) + len(after)) // BATCH_SIZE)
        order = initialized(batches).run(indices).ravel()
    assert before.tolist() == order[: len(before)].tolist()
    begin = len(before) // CALL * CALL  # the call that was killed, in which it may have come to any of its batches
    begins = [start for start in (begin, begin - CALL) if after.tolist() == order[start : start + len(after)].tolist()]
    assert begins, (len(before), after[:10], order[begin - CALL : begin + CALL])
    step = max(int(path.stem.rpartition("-")[2]) for path in (run_dir / "checkpoints").glob("*.index"))
    finish(start(run_dir, *flags(step + 20), "--resume"))
    (last,) = {path.name for path in tmp_path.glob("drawn-*")} - {f"drawn-{pid}" for pid in pids} - not_of_worker_1(tmp_path)
    end = begins[0] + len(after)
    found = drawn_by(last.removeprefix("drawn-"))
    assert len(found) and found.tolist() == order[end : end + len(found)].tolist()


def not_of_worker_1(folder):
    """Which files of drawn samples are of worker 0, or of the check: that has the even ones, and this all."""
    files = {path.name: np.frombuffer(path.read_bytes(), np.int64) for path in folder.glob("drawn-*")}
    return {name for name, found in files.items() if (found % 2 == 0).any()}
