"""Data that is not copied whole into every worker: files that are mapped; and a worker's place in the order of its samples."""

import os
import pickle
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import ENDLESS, finish, is_training, processes, read_until, start

from common import tf
from common.cli import serialization
from common.core import task_status
from common.data import array_types, datasets
from common.data.batches import Batches, Position, fed
from common.data.mapped_rows import Rows
from common.data.nested_arrays import arrays_in
from common.models import keras_model
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.training.model_and_data import fed_test_set

# --- Mapped files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_is_large(monkeypatch):
    """From ten bytes on a mapped array stays in its file."""
    monkeypatch.setattr(array_types, "LARGE", 10)


def saved(folder, array, name="x.npy", **how):
    """An array as the mapped file that a user has."""
    np.save(folder / name, np.asarray(array, **how))
    return np.load(folder / name, mmap_mode="r")


def images_of(dtype, n=64):
    """Images [n, 4, 4] of numbers that every type holds."""
    return (np.random.default_rng(0).integers(0, 2, [n, 4, 4])).astype(dtype)


LAYOUTS = {  # how TensorFlow cannot map them as they are, but NumPy reads them
    "as it is": (lambda x: x, True),
    "part": (lambda x: x[5:60], True),
    "every third": (lambda x: x[3::3], True),
    "backwards": (lambda x: x[::-2], True),
    "reshaped": (lambda x: x.reshape(-1, 16), True),
    "crop": (lambda x: x[:, 1:3], False),
    "turned": (lambda x: x.transpose(0, 2, 1), False),
    "twice the rows": (lambda x: x.reshape(-1, 2, 4), True),
}


@pytest.mark.parametrize(
    "layout, dtype",
    [*((layout, "f8") for layout in LAYOUTS), *(("as it is", dtype) for dtype in ("f4", "f2", "u1", "i8", "?", ">f4"))],
)
def test_samples_of_a_mapped_file_are_those_of_the_array(small_is_large, graph, tmp_path, dtype, layout):
    view, can_be_mapped = LAYOUTS[layout]
    mapped, held = view(saved(tmp_path, images_of(dtype))), view(images_of(dtype))
    y = np.arange(len(held))
    of_file, in_memory = (datasets.checked(((x, y), (x, y)), "") for x in (mapped, held))
    assert isinstance(of_file.x_train, Rows) and isinstance(in_memory.x_train, np.ndarray)
    assert bool(of_file.x_train.in_place()) == (can_be_mapped and dtype != ">f4")
    assert (of_file.x_train.shape, of_file.x_train.dtype) == (in_memory.x_train.shape, in_memory.x_train.dtype)
    drawn: list = []
    feeds: dict = {}
    for name, given in ("of_file", of_file), ("in_memory", in_memory):
        x, y_train, *_ = datasets.shard(datasets.hold_out(given, 0.3)[0], 1, 2)
        batches = Batches(x, y_train, 3, 0, name)
        drawn.append(batches.samples(batches.next(2)[1]))
        feeds.update(batches.init_feed_dict)
    with tf.Session() as session:
        session.run(tf.local_variables_initializer(), feeds)
        found, expected = session.run(drawn)
    assert found[0].dtype == expected[0].dtype
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("offset, can_be_mapped", [(0, True), (64, True), (12, False)])
def test_only_what_tensorflow_would_not_copy_is_a_tensor(graph, tmp_path, offset, can_be_mapped):
    n = 7
    written = np.random.default_rng(0).random([n, 3]).astype(np.float32)
    (tmp_path / "raw").write_bytes(bytes(offset) + written.tobytes())
    rows = Rows(np.memmap(tmp_path / "raw", np.float32, "r", offset, (n, 3)), np.float32)
    assert bool(rows.in_place()) == can_be_mapped
    feeds: dict = {}
    stored = fed("x", rows, feeds)
    taken = stored.gather(tf.constant([n - 1, 0])), stored[n - 2 : n + 5]
    with tf.Session() as session:
        session.run(tf.local_variables_initializer(), feeds)
        last_and_first, last = session.run(taken)
    np.testing.assert_array_equal(last_and_first, written[[n - 1, 0]])
    np.testing.assert_array_equal(last, written[-2:])


def test_a_private_copy_is_read_where_it_was_changed(small_is_large, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros([40, 4]))
    x = np.load(tmp_path / "x.npy", mmap_mode="c")
    x[0] = 7
    rows = datasets.checked(((x, np.arange(40)),) * 2, "").x_train
    assert isinstance(rows, Rows) and not rows.has_file and rows[0].tolist() == [7] * 4


def test_a_small_mapped_array_is_a_variable_as_before(graph, tmp_path):
    given = datasets.checked(((saved(tmp_path, np.ones([20, 3])), np.arange(20) % 2),) * 2, "")
    assert type(given.x_train) is np.ndarray and given.x_train.dtype == np.float32


def test_mapped_arrays_are_checked_as_others_are(small_is_large, tmp_path, user_error):
    x, y = np.ones([40, 2]), np.arange(40)
    spoilt = x.copy()
    spoilt[39, 1] = np.nan
    with user_error("x_train holds 1 values that are NaN"):
        datasets.checked(((saved(tmp_path, spoilt), y), (x, y)), "")
    with user_error("x_train holds 1e+300, too large for float32"):
        datasets.checked(((saved(tmp_path, 1e300 * x), y), (x, y)), "")
    with user_error("y_train holds the class 2147483648"):
        datasets.checked(((x, saved(tmp_path, y + 2**31 - 39)), (x, y)), "")
    with user_error("w_train holds negative weights"):
        datasets.checked(((x, y, saved(tmp_path, y - 1.0)), (x, y)), "")
    with user_error("x_train holds float32 of shape (2,), x_test float32 of shape (3,)"):
        datasets.checked(((saved(tmp_path, x), y), (saved(tmp_path, np.ones([40, 3]), "test.npy"), y)), "")


def test_rows_are_found_again_by_another_process(tmp_path):
    """They are sent as the name of a file."""
    array = saved(tmp_path, np.random.default_rng(0).random([1000, 30]))
    rows = Rows(array[::-3, 1:29], np.float32).take(np.array([5, 0, 9]))
    sent = pickle.dumps(rows)
    assert len(sent) < 2000
    np.testing.assert_array_equal(pickle.loads(sent)[:], array[::-3, 1:29][[5, 0, 9]].astype(np.float32))


@pytest.mark.slow
def test_a_model_of_mapped_arrays_learns_and_is_measured_as_one_of_arrays(small_is_large, tmp_path, images):
    """Several inputs in a dict, bytes among them; classes in a mapped file; state; weights of the samples."""
    import keras

    rng = np.random.default_rng(0)
    n = 40
    x = {"a": rng.integers(0, 256, [n, 3], np.uint8), "b": rng.random([n, 2])}
    y, w = rng.integers(0, 3, n), rng.random(n)
    x_files = {name: saved(tmp_path, array, f"{name}.npy") for name, array in x.items()}
    found: list = []
    for samples in (x_files, saved(tmp_path, y, "y.npy"), saved(tmp_path, w, "w.npy")), (x, y, w):
        keras.utils.set_random_seed(0)
        inputs = {"a": keras.Input([3], name="a"), "b": keras.Input([2], name="b")}
        hidden = keras.layers.BatchNormalization()(keras.layers.Concatenate()([inputs["a"], inputs["b"]]))
        given = datasets.checked((samples, samples), "")
        assert isinstance(given.y_train, Rows) == (len(found) == 0) and given.num_classes == 3
        model = keras_model.checked(keras.Model(inputs, keras.layers.Dense(3)(hidden)), given)
        with tf.Graph().as_default():
            batches = Batches(given.x_train, given.y_train, 8, seed=0, weights=given.w_train)
            center = GlobalParameters(model.initial_parameters)
            local = LocalParameters(center, model, batches)
            step = local.train(5, tf.train.GradientDescentOptimizer(0.1))
            feeds = {**center.init_feed_dict, **local.init_feed_dict}
            state = local.state_at(local.value)
            evaluated = model.evaluate(local.value, state, *fed_test_set(given, feeds), batch_size=7)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer(), feeds)
                session.run(tf.local_variables_initializer(), feeds)
                session.run(step.operations)
                found.append(session.run([local.value, evaluated["loss"], evaluated["accuracy"]]))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[0][1:], found[1][1:], rtol=1e-5)


def anonymous_bytes():
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("name, dtype", [("part of a .npy file", np.uint8), ("odd type", ">u2")])
def test_a_mapped_file_takes_no_memory(graph, initialized, tmp_path, name, dtype):
    """A quarter of a gigabyte, in a sparse file: checked, drawn from, evaluated."""
    size = 2**28
    array = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", dtype, (size // 1024 // np.dtype(dtype).itemsize, 32, 32))
    y = np.arange(len(array), dtype=np.int32)
    before = anonymous_bytes()
    given = datasets.checked(((array, y), (array[::2], y[::2])), "")
    training, held = datasets.hold_out(given, 0.1)
    x, y = datasets.shard(training, 0, 2)
    batches = Batches(x, y, 32, 0)
    drawn = batches.samples(batches.next(1)[0])[0]
    stored = fed("x_test", held.x_test, batches.init_feed_dict)
    session = initialized(batches)
    session.run([drawn, stored[0:100]])
    session.run(tf.local_variables_initializer(), batches.init_feed_dict)  # as when a ps has died
    session.run(drawn)
    assert anonymous_bytes() - before < size // 4
    assert bool(x.in_place()) == (dtype == np.uint8)


def test_large_arrays_are_left_to_other_processes(monkeypatch):
    """In memory once: a task maps the file that the check has left, in the place where TensorFlow can use it as it is."""
    monkeypatch.setattr(datasets, "LARGE", 1000)
    rng = np.random.default_rng(0)
    x, y = {"image": rng.integers(0, 256, [33, 50], np.uint8), "more": rng.random([33, 2])}, rng.random([33, 40])
    given = datasets.checked(((x, y), (x, y)), "")
    with open(os.memfd_create("data"), "rb") as shared:
        monkeypatch.setenv("LAUNCHER_DATA", str(shared.fileno()))
        monkeypatch.setattr(task_status, "is_fork", True)
        assert datasets.shared() is None
        datasets.share(given, shared.fileno())
        found = datasets.load("no_such_file.py:load")
        for mine, its in ((given.train, found.train), (given.test, found.test)):
            for array, rows in zip(arrays_in(mine), arrays_in(its), strict=True):
                assert isinstance(rows, Rows) == (array.nbytes > 1000)
                np.testing.assert_array_equal(rows[:], array)
                assert not isinstance(rows, Rows) or rows.in_place()


def test_a_mapped_array_is_sent_as_the_name_of_its_file(small_is_large, tmp_path):
    """By `train` of a notebook; an array in memory is sent as a file."""
    (tmp_path / "sent").mkdir()
    x, y = saved(tmp_path, np.random.default_rng(0).random([40, 3])), np.arange(40)
    sent = serialization.SentArrays(datasets.checked(((x, y), (x[:5], y[:5])), ""), tmp_path / "sent")
    assert len(list((tmp_path / "sent").iterdir())) == 2  # of the labels
    found = datasets.checked(pickle.loads(pickle.dumps(sent))(), "")
    np.testing.assert_array_equal(found.x_test[:], x[:5].astype(np.float32))
    np.testing.assert_array_equal(found.y_train[:], y)


def test_small_arrays_are_left_to_each_task(tmp_path):
    given = datasets.checked(((np.ones([60, 5]), np.arange(60)),) * 2, "")
    with open(os.memfd_create("data"), "rb") as shared:
        datasets.share(given, shared.fileno())
        assert os.fstat(shared.fileno()).st_size == 0


@pytest.mark.cluster
def test_all_tasks_of_a_machine_have_large_arrays_once(run_dir, tmp_path):
    """300 MB that a function returns; it is called by the check alone."""
    text = """
import os
import numpy as np

def load():
    with open(os.path.join(os.path.dirname(__file__), "loads"), "a") as file:
        file.write("x")
    x = np.full([3000, 100000], 1, np.uint8)
    return (x, np.arange(3000) % 2), (x[:10], np.arange(10) % 2)

def build():
    import keras
    return keras.Sequential([keras.Input([100000]), keras.layers.Lambda(lambda x: x[:, :8]), keras.layers.Dense(2)])
"""
    (tmp_path / "large.py").write_text(text)
    flags = f"--data={tmp_path}/large.py:load", f"--model={tmp_path}/large.py:build", "--batch_size=8"
    process = start(run_dir, "--launch", *flags, "--num_workers=3", *ENDLESS)
    told = read_until(process, lambda line: line.startswith("minimizes "))
    assert "1,000 for each of 3 workers, from arrays of 300.0 MB, of which 300.0 MB are mapped, not copied\n" in told
    read_until(process, is_training)
    memory = []
    for pid in processes(run_dir, "--job_name=worker"):
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        memory.append(int(lines["RssAnon"].split()[0]) / 1024)
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    assert len(memory) == 3 and max(memory) < 500  # some 300 with little data
    assert (tmp_path / "loads").read_text() == "x"


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


@pytest.mark.parametrize("content", [b"", b"cut short", *(np.array([1, n]).tobytes() for n in (-5, 2**63 - 1))])
def test_a_damaged_position_is_the_beginning(tmp_path, content):
    (tmp_path / "p.position").write_bytes(content)
    position = Position(tmp_path / "p.position", 1)
    position.add(32)
    assert position.value == Position(tmp_path / "p.position", 1).value == 32


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

    own = f"--data={tmp_path}/recording.py:load", f"--model={tmp_path}/recording.py:build"
    flags = "--launch", *own, f"--batch_size={BATCH_SIZE}", f"--window={WINDOW}", "--rounds_per_call=2", "--steps=10000000"

    def worker():
        return processes(run_dir, "--job_name=worker", "--task_index=1")

    def drawn_by(pid):
        path = Path(tmp_path, f"drawn-{pid}")
        return np.frombuffer(path.read_bytes(), np.int64) // 2 if path.exists() else np.array([], int)  # of its shard

    process = start(run_dir, *flags)
    pids: list = []
    for _ in range(2):
        read_until(process, lambda line: is_training(line) and worker() and len(drawn_by(worker()[0])) > 3 * CALL)
        pids += worker()
        if len(pids) == 1:
            os.kill(pids[0], signal.SIGKILL)
            read_until(process, lambda line: line.startswith("worker 1 was killed"))
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    process = start(run_dir, *flags, "--resume")
    read_until(process, lambda line: is_training(line) and worker() and len(drawn_by(worker()[0])))
    pids += worker()
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    before, after, last = map(drawn_by, pids)
    x, y, *_ = datasets.shard(datasets.checked(2 * ((np.zeros([NUM_SAMPLES, 1]), np.zeros(NUM_SAMPLES)),), ""), 1, 2)
    with tf.Graph().as_default():
        batches = Batches(x, y, BATCH_SIZE, seed=1)
        indices = batches.next((len(before) + len(after) + len(last)) // BATCH_SIZE)
        order = initialized(batches).run(indices).ravel()
    assert before.tolist() == order[: len(before)].tolist()
    begin = len(before) // CALL * CALL  # the call that was killed, in which it may have come to any of its batches
    begins = [start for start in (begin, begin - CALL) if after.tolist() == order[start : start + len(after)].tolist()]
    assert begins, (len(before), after[:10], order[begin - CALL : begin + CALL])
    end = begins[0] + len(after)
    assert len(last) and last.tolist() == order[end : end + len(last)].tolist()


def test_a_variable_alone_lets_nobody_unpickle_a_file(monkeypatch):
    """As `LAUNCHER_DATA=0` would standard input, in a program that no launcher has forked."""
    with open(os.memfd_create("data"), "r+b") as planted:
        evil = pickle.dumps("unpickled")
        planted.write(evil + len(evil).to_bytes(8, sys.byteorder))
        planted.flush()
        monkeypatch.setenv("LAUNCHER_DATA", str(planted.fileno()))
        assert datasets.shared() is None
