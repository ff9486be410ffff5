"""Which worker saves when, the contents of a checkpoint, and when a chief goes on with the parameters that it finds."""

import errno
import os
import queue
import re
import shutil
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from runs import SECONDS

from common import tf
from common.cluster import session
from common.core import checkpoints, keeper, training_clock
from common.core.checkpoints import checkpoints_in
from common.core.flags import TrainingFailed
from common.core.keeper import Keeper
from common.scheme.center import GlobalParameters

SIZE = 7


class Worker:
    """A worker of a cluster, in a graph of its own, whose every update adds one to each of seven numbers.

    Args:
      place: (its task, its server), as the fixture `servers` gives them.
      folder: where it keeps checkpoints.
      index: 0 is the chief.
    """

    def __init__(self, place, folder, index=0, every_secs=1000, samples_per_update=10, threshold=None):
        self.place = self._task, self._server = place
        self.folder, self.graph = folder, tf.Graph()
        folder.mkdir(exist_ok=True)
        with self.graph.as_default():
            center = GlobalParameters(np.zeros(SIZE, np.float32), self._task.num_ps, self._task.device_fn())
            with tf.device(self._task.device):
                upwards = tf.train.GradientDescentOptimizer(-1.0)
                exact = center.exact(types.SimpleNamespace(name=f"worker_{index}"), "step", threshold)
                self.update = exact.push(upwards, tf.ones([SIZE]), lambda part, at_update: part).operations
                how = every_secs, index, self._task.device, samples_per_update, (), samples_per_update
                self.keeper = Keeper(center, folder, *how)
                self.read = center.read()
            saver = session.Saver(self.keeper.variables, sharded=False, save_relative_paths=True)
            self._scaffold = tf.train.Scaffold(saver=saver, init_feed_dict=center.init_feed_dict)
            self.spoil = [piece.assign(piece * np.inf) for piece in center.pieces]
            with center.lock.held([]) as done, tf.device(self._task.device_fn()):  # an update that stops midway
                half = [piece.assign_add(tf.ones_like(piece)) for piece in center.pieces[:1]]
                with tf.control_dependencies(half), tf.device(center.step.device):
                    self.half_done = tf.queue.FIFOQueue(1, tf.bool, [], shared_name="half_done")
                    self.go_on = tf.queue.FIFOQueue(1, tf.bool, [], shared_name="go_on")
                    with tf.control_dependencies([self.half_done.enqueue(True)]):
                        told = self.go_on.dequeue()
                with tf.control_dependencies([told]):
                    done += [piece.assign_add(tf.ones_like(piece)) for piece in center.pieces[1:]]
                    done.append(center.step.assign_add(1))
            self.slow_update, self.midway, self.tell = done, self.half_done.dequeue(), self.go_on.enqueue(True)
            self.forget_last_piece = tf.raw_ops.DestroyResourceOp(resource=center.pieces[-1].handle)

    def begin(self):
        """A new session, as a chief that was just started makes it."""
        with self.graph.as_default():
            creator = session._Creator(self._task, self._scaffold, self._server.target, str(self.folder), None, self.keeper)
            return creator.create_session()

    def join(self):
        """A new session of another worker."""
        return tf.Session(self._server.target, self.graph, self._task.config())


@pytest.fixture
def chief(servers, tmp_path):
    """A chief with two ps."""
    return Worker(servers(2), tmp_path / "checkpoints")


def saved(folder):
    """{step in the name: (step, parameters)} of all checkpoints in a folder."""
    found = {}
    for path in checkpoints_in(str(folder)):
        reader = tf.train.load_checkpoint(path)
        found[int(path.rpartition("-")[2])] = int(reader.get_tensor("global_step")), reader.get_tensor("parameters").tolist()
    return found


def newest(folder):
    return max(saved(folder), default=None)


@pytest.mark.slow
def test_name_and_pieces_are_of_one_moment_while_others_push(chief):
    opened, ended = chief.begin(), threading.Event()

    def push():
        while not ended.is_set():
            opened.run(chief.update)

    pushing = threading.Thread(target=push)
    pushing.start()
    try:
        seen = {}
        for _ in range(20):
            chief.keeper.save(opened)
            seen.update(saved(chief.folder))
    finally:
        ended.set()
        pushing.join()
    assert len(seen) > 2
    for name, (step, parameters) in seen.items():
        assert name == step and parameters == [step] * SIZE


@pytest.mark.slow
def test_an_update_under_the_lock_is_saved_as_a_whole(chief):
    """It stops when one ps of two has it, and goes on when the checkpoint is there, or waits for it."""
    opened = chief.begin()
    updating = threading.Thread(target=opened.run, args=(chief.slow_update,))
    updating.start()
    opened.run(chief.midway)
    saving = threading.Thread(target=chief.keeper.save, args=(opened,))
    saving.start()
    saving.join(0.5)  # if it does not wait, it has long ended by then
    opened.run(chief.tell)
    for thread in (updating, saving):
        thread.join()
    assert saved(chief.folder) == {0: (0, [0] * SIZE), 1: (1, [1] * SIZE)}


def test_only_the_newest_five_are_kept(chief):
    opened = chief.begin()
    for _ in range(7):
        opened.run(chief.update)
        chief.keeper.save(opened)
    assert list(saved(chief.folder)) == [3, 4, 5, 6, 7]
    assert {path.name for path in chief.folder.iterdir()} == {
        *("checkpoint", "folder-id"),
        *(f"model.ckpt-{step}.{kind}" for step in range(3, 8) for kind in ("index", "data-00000-of-00001")),
    }


@pytest.mark.parametrize("where", ["raw_ops.SaveV2", "os.link", "update_checkpoint_state", "_remove"])
def test_whoever_dies_while_a_step_is_saved_again_leaves_a_checkpoint_of_it(chief, monkeypatch, where):
    opened, calls = chief.begin(), [0]
    opened.run(chief.update)
    chief.keeper.save(opened)
    owner, name = {
        "raw_ops.SaveV2": (tf.raw_ops, "SaveV2"),
        "os.link": (checkpoints.os, "link"),
        "update_checkpoint_state": (tf.train, "update_checkpoint_state"),
        "_remove": (checkpoints, "_remove"),
    }[where]
    does, deaths = getattr(owner, name), 0
    for last in range(4):  # it dies at its first, second, ... call

        def die(*arguments, last=last, **more):
            calls[0] += 1
            if calls[0] > last:
                raise SystemExit
            return does(*arguments, **more)

        calls[0] = 0
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, die)
            try:
                chief.keeper.save(opened)
            except SystemExit:
                deaths += 1
        assert list(saved(chief.folder).values()) == [(0, [0] * SIZE), (1, [1] * SIZE)]
    assert deaths
    chief.keeper.save(opened)
    assert {path.name for path in chief.folder.glob("*.index")} == {"model.ckpt-0.index", "model.ckpt-1.index"}


@pytest.mark.parametrize("where", ["SaveV2", "MergeV2Checkpoints"])
def test_a_writer_that_is_stopped_holds_up_no_other(chief, monkeypatch, where):
    """It goes on when another has saved a later step. The later step stays the newest."""
    monkeypatch.setattr(checkpoints, "PATIENCE_SECS", 0.1)
    opened, writes, goes_on, does = chief.begin(), threading.Event(), threading.Event(), getattr(tf.raw_ops, where)
    opened.run(chief.update)

    def stop(**arguments):
        does(**arguments)
        if not writes.is_set():
            writes.set()
            assert goes_on.wait(SECONDS)

    monkeypatch.setattr(tf.raw_ops, where, stop)
    stopped = threading.Thread(target=chief.keeper.save, args=(opened,))
    stopped.start()
    assert writes.wait(SECONDS)
    opened.run(chief.update)
    other = Worker(chief.place, chief.folder, 1)
    other.keeper.save(other.join())
    assert list(saved(chief.folder)) == [0, 2]
    goes_on.set()
    stopped.join()
    assert list(saved(chief.folder)) == [0, 2]
    assert not list(chief.folder.glob("model.ckpt-1*")) and not list(chief.folder.glob(f"{checkpoints.UNFINISHED}*"))


def test_what_a_dead_writer_has_left_is_removed(chief):
    opened, left = chief.begin(), chief.folder / f"{checkpoints.UNFINISHED}x"
    left.mkdir()
    (left / "part-0.index").touch()
    (chief.folder / "model.ckpt-7.data-00000-of-00001").touch()
    chief.keeper.save(opened)
    assert not left.exists() and not list(chief.folder.glob("model.ckpt-7*"))


@pytest.mark.parametrize("has_links", [True, False])
def test_a_step_that_is_saved_again_keeps_its_name(chief, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr(checkpoints.os, "link", lambda *_: exec("raise OSError"))
    opened = chief.begin()
    for _ in range(3):
        chief.keeper.save(opened)
        assert {path.name for path in chief.folder.iterdir()} == {
            *("checkpoint", "folder-id", "model.ckpt-0.index", "model.ckpt-0.data-00000-of-00001")
        }
        assert saved(chief.folder) == {0: (0, [0] * SIZE)}


def test_a_checkpoint_is_there_before_any_worker_may_begin(chief):
    opened = chief.begin()
    assert not opened.run(chief.keeper.has_lost).size
    assert saved(chief.folder) == {0: (0, [0] * SIZE)}


def test_a_chief_goes_on_with_parameters_that_live_and_saves_them(chief, servers):
    opened = chief.begin()
    for _ in range(3):
        opened.run(chief.update)
    again = chief.begin()
    assert again.run(chief.read)[1] == 3 and not again.is_new
    assert newest(chief.folder) == 3


@pytest.mark.parametrize("what", ["a piece", "the word that they are whole"])
def test_a_chief_restores_all_if_anything_is_lost(chief, what):
    """Pieces of two ps that are not of the same moment are no parameters."""
    opened = chief.begin()
    opened.run(chief.update)
    chief.keeper.save(opened)
    opened.run(chief.update)
    if what == "a piece":
        opened.run(chief.forget_last_piece)
    else:
        chief.keeper.lose(opened)
    assert opened.run(chief.keeper.has_lost).size  # so no other worker begins
    again = chief.begin()
    value, step = again.run(chief.read)
    assert (step, value.tolist()) == (1, [1] * SIZE)
    assert not again.run(chief.keeper.has_lost).size


def prepare(its_clock, session):
    """Makes the first call of a worker, in which TensorFlow prepares the graph: from its end on seconds count."""
    with its_clock.call("first"):
        its_clock.tick(session)
    its_clock.tick(session)


def test_samples_and_seconds_are_those_of_all_runs(chief, servers, tmp_path):
    opened = chief.begin()
    prepare(chief.keeper.clock, opened)
    for _ in range(4):
        opened.run(chief.update)
    chief.keeper.save(opened)
    seconds = tf.train.load_variable(str(tmp_path / "checkpoints" / "model.ckpt-4"), "seconds")
    assert seconds > 0

    later = Worker(servers(2), chief.folder, samples_per_update=100)  # all that lay on the ps is gone
    opened = later.begin()
    prepare(later.keeper.clock, opened)
    opened.run(later.update)
    samples, before = opened.run([later.keeper.samples, later.keeper.samples_before])
    assert samples == 4 * 10 + 1 * 100
    assert before == samples - 5 * 100
    assert later.keeper.clock.seconds() > seconds


def test_a_step_below_a_damaged_checkpoint_is_saved(tmp_path):
    """A run that goes on from an older one is not without a new one until it is past the damaged one."""

    def write(step):
        with ThreadPoolExecutor(1) as another:  # in this one a graph may be open
            another.submit(checkpoints.write_checkpoint, str(tmp_path), step, ["step"], [""], [np.int64(step)]).result()

    for step in 50, 100:
        write(step)
    (tmp_path / "model.ckpt-100.data-00000-of-00001").write_bytes(b"")
    assert checkpoints.newest_good_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-50")
    write(60)
    assert checkpoints.newest_good_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-60")


@pytest.mark.parametrize("threshold", [None, 1])
def test_dropped_gradients_are_those_of_all_runs(servers, tmp_path, threshold):
    """Each counts as many samples as it was made of. A checkpoint that does not tell how many there were has none."""
    chief = Worker(servers(1), tmp_path / "checkpoints", threshold=threshold)
    opened = chief.begin()
    for _ in range(4):  # it pulls nothing, so all but the first are stale
        opened.run(chief.update)
    chief.keeper.save(opened)
    made, dropped = (4, 0) if threshold is None else (1, 3)
    samples, found = opened.run([chief.keeper.samples, chief.keeper.dropped])
    assert (samples, *found) == (10 * made, dropped, 10 * dropped)

    later = Worker(servers(1), chief.folder, samples_per_update=100, threshold=1)
    opened = later.begin()
    opened.run(later.update)
    samples, found = opened.run([later.keeper.samples, later.keeper.dropped])
    assert (samples, *found) == (10 * made, dropped + 1, 10 * dropped + 100)


@pytest.mark.slow
def test_another_worker_saves_if_the_chief_does_not(chief, tmp_path, monkeypatch):
    opened = chief.begin()
    other = Worker(chief.place, chief.folder, 1, every_secs=0.1)
    shutil.copytree(chief.folder, tmp_path / "elsewhere")  # as for a run that is to go on there
    elsewhere = Worker(chief.place, tmp_path / "elsewhere", 2, every_secs=0.1)
    before = saved(elsewhere.folder)
    opened = chief.begin()
    sessions = [other.join(), elsewhere.join()]
    opened.run(chief.update)
    save, has_saved = other.keeper.save, threading.Event()

    def save_and_say(session):
        save(session)
        has_saved.set()

    monkeypatch.setattr(other.keeper, "save", save_and_say)
    for worker, joined in zip((elsewhere, other), reversed(sessions), strict=True):
        worker.keeper.after_create_session(joined, None)
    assert has_saved.wait(SECONDS) and newest(chief.folder) == 1
    for worker, joined in zip((other, elsewhere), sessions, strict=True):
        worker.keeper.end(joined)
    assert saved(elsewhere.folder) == before  # on another machine, say: the chief would not find it there
    assert chief.begin().run(chief.read)[1] == 1


def test_one_worker_at_a_time_saves(chief):
    opened = chief.begin()
    other = Worker(chief.place, chief.folder, 1)
    joined = other.join()

    def is_due(worker, session):
        return bool(session.run(worker.keeper._claim)[0])

    opened.run(chief.keeper._note_saved, {chief.keeper._time: time.time() - 800})
    assert not is_due(other, joined)  # but of a thousand seconds three quarters have passed
    assert is_due(chief, opened)
    assert not is_due(chief, opened)
    opened.run(chief.keeper._note_saved, {chief.keeper._time: time.time() - 950})
    assert is_due(other, joined)
    assert not is_due(chief, opened)


@pytest.fixture
def now(monkeypatch):
    """The monotonic clock of a worker, which stands still; `monotonic` are its seconds."""
    now = types.SimpleNamespace(monotonic=1000.0)
    for module in keeper, training_clock:
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now.monotonic))
    return now


def test_a_ps_whose_clock_is_set_back_does_not_end_checkpoints(chief, now):
    """An hour: the last claim is in the future. Five minutes: it is not old yet, but the worker has seen it for long enough."""
    opened = chief.begin()
    opened.run(chief.keeper._note_saved, {chief.keeper._time: time.time() + 3600})
    is_due, pause, _ = chief.keeper._claim_turn(opened)
    assert is_due and pause <= chief.keeper._after

    opened.run(chief.keeper._note_saved, {chief.keeper._time: time.time() - 100})
    assert not chief.keeper._claim_turn(opened)[0]
    now.monotonic += 749
    assert not chief.keeper._claim_turn(opened)[0]
    now.monotonic += 1
    assert chief.keeper._claim_turn(opened)[0]
    assert not chief.keeper._claim_turn(opened)[0]  # a claim that it has not seen for long


def test_a_clock_that_is_set_forward_is_no_old_checkpoint(chief, now, capsys):
    opened = chief.begin()
    opened.run(chief.keeper._note_saved, {chief.keeper._time: time.time() - 3600})
    chief.keeper._look_at_age(opened)
    assert capsys.readouterr().out == ""


def test_an_outage_counts_no_seconds(chief, now):
    """Nor do those after the last checkpoint, nor a worker's that does not know yet that the parameters were restored."""
    of_chief = chief.keeper.clock
    opened = chief.begin()
    now.monotonic += 50  # it waits for the others
    assert of_chief.seconds() == 0
    prepare(of_chief, opened)
    other = Worker(chief.place, chief.folder, 1)
    joined = other.join()
    prepare(other.keeper.clock, joined)
    now.monotonic += 10
    opened.run(chief.update)
    chief.keeper.save(opened)
    now.monotonic += 2
    for worker, its in (chief, opened), (other, joined):
        worker.keeper.clock.tick(its)
        assert worker.keeper.clock.seconds() == pytest.approx(12, abs=1)

    chief.keeper.lose(opened)
    now.monotonic += 300
    again = chief.begin()
    assert of_chief.seconds() == pytest.approx(10, abs=0.1)  # already while its session begins
    of_chief.stop()
    other.keeper.clock.tick(joined)
    prepare(of_chief, again)
    assert of_chief.seconds() == pytest.approx(10, abs=0.1)
    now.monotonic += 5
    of_chief.tick(again)
    other.keeper.clock.tick(joined)
    for worker in chief, other:
        assert worker.keeper.clock.seconds() == pytest.approx(15, abs=1)
    opened.run(chief.update)
    chief.keeper.save(again)
    path = str(chief.folder / f"model.ckpt-{newest(chief.folder)}")
    assert tf.train.load_variable(path, "seconds") == pytest.approx(15, abs=1)


def test_the_clock_of_training_goes_on_with_that_of_others(chief, now):
    """A chief that comes back does not count anew; the largest number holds."""
    opened = chief.begin()
    prepare(chief.keeper.clock, opened)
    other = Worker(chief.place, chief.folder, 1)
    joined = other.join()
    prepare(other.keeper.clock, joined)
    now.monotonic += 20
    other.keeper.clock.tick(joined)
    again = Worker(chief.place, chief.folder)
    its = again.begin()
    again.keeper.clock.tick(its)
    assert again.keeper.clock.seconds() == 20


def test_the_clock_does_not_run_fast_where_messages_take_long(chief, now):
    """Every second message to the ps takes long; meanwhile another worker tells it a later time."""
    opened, of_chief = chief.begin(), chief.keeper.clock
    other = Worker(chief.place, chief.folder, 1)
    joined, began = other.join(), now.monotonic
    prepare(of_chief, opened)
    prepare(other.keeper.clock, joined)

    def run_late(*arguments):
        now.monotonic += 0.6
        of_chief.tick(opened)
        return joined.run(*arguments)

    for i in range(20):
        now.monotonic += 0.5
        other.keeper.clock.tick(types.SimpleNamespace(run=run_late) if i % 2 else joined)
        now.monotonic += 0.1
        of_chief.tick(opened)
    assert of_chief.seconds() == pytest.approx(now.monotonic - began)


def test_the_clock_stands_still_while_a_worker_waits_for_others_at_its_end(chief, now):
    opened, of_chief = chief.begin(), chief.keeper.clock
    prepare(of_chief, opened)
    now.monotonic += 6
    of_chief.is_training = False
    for _ in range(2):
        of_chief.tick(opened)
        now.monotonic += 100
    assert of_chief.seconds() == pytest.approx(6, abs=0.5)
    opened.run(chief.update)
    chief.keeper.save(opened)
    assert tf.train.load_variable(str(chief.folder / "model.ckpt-1"), "seconds") == pytest.approx(6, abs=0.5)


def test_a_call_that_prepares_its_graph_does_not_count(chief, now):
    """The first of its kind, and the first in a session that is created anew meanwhile."""
    opened, of_chief = chief.begin(), chief.keeper.clock

    def call(kind, seconds, is_lost=False):
        with of_chief.call(kind):
            of_chief.tick(opened)
            if is_lost:
                of_chief.stop()
                of_chief.tick(opened)
            now.monotonic += seconds
        of_chief.tick(opened)
        return round(of_chief.seconds())

    assert [call("many", 60), call("many", 7), call("one", 50), call("one", 2), call("many", 1)] == [0, 7, 7, 9, 10]
    assert call("many", 90, is_lost=True) == 10
    assert [call("many", 90), call("many", 4)] == [call("one", 30) - 4, call("many", 0)]


def test_where_workers_wait_for_each_other_no_wait_for_one_that_starts_counts(chief, now):
    with chief.graph.as_default():
        passed = tf.placeholder(tf.float64, [])
        later = chief.keeper.clock.variables[-1].assign_sub(passed)  # in place of the ps's own clock
    opened = chief.begin()
    other = Worker(chief.place, chief.folder, 1)
    joined = other.join()
    clocks = [(worker.keeper.clock, its) for worker, its in ((chief, opened), (other, joined))]
    for its_clock, its in clocks:
        its_clock.waits = True
        its_clock.come(its)

    (of_chief, _), (of_other, _) = clocks

    def call(seconds, *starting, clock_is_set=0):
        """The chief makes a call; meanwhile the other worker prepares its graph, for all but the last of these seconds."""
        with of_chief.call("many"):
            of_chief.tick(opened)
            for kind in starting:
                with of_other.call(kind):
                    of_other.tick(joined)
                    said = joined.run(of_other.variables[-2])
                    while joined.run(of_other.variables[-2]) == said:
                        pass  # it says so again and again
            of_other.stop()  # that is all of it that the test makes
            now.monotonic += seconds
            opened.run(later, {passed: clock_is_set + (1 if starting else seconds)})
        of_chief.tick(opened)
        return round(of_chief.seconds())

    assert call(60, "many") == 0  # both prepare their graphs
    assert [call(7), call(30, "one"), call(4)] == [7, 8, 12]
    assert [call(30, "two", clock_is_set=by) for by in (3600, -3600)] == [12, 12]
    of_other.come(joined)  # it was killed, and comes back
    assert [call(30, "many"), call(4)] == [13, 17]
    of_chief.tick(opened)
    now.monotonic += 20  # a call that may have a wait in it
    opened.run(chief.update)
    chief.keeper.save(opened)
    assert tf.train.load_variable(str(chief.folder / "model.ckpt-1"), "seconds") == pytest.approx(17, abs=1.5)
    assert of_chief.seconds() == pytest.approx(37, abs=1.5)


def test_parameters_that_are_not_finite_are_not_saved(chief, capsys):
    opened = chief.begin()
    opened.run(chief.spoil)
    chief.keeper.save(opened)
    assert newest(chief.folder) == 0
    assert "no checkpoint of step 0: its parameters are not finite" in capsys.readouterr().out


def test_an_old_checkpoint_is_worth_one_line(chief, capsys, now):
    opened = chief.begin()
    keeper = chief.keeper
    keeper._look_at_age(opened)
    assert capsys.readouterr().out == ""
    now.monotonic += 3100
    keeper._look_at_age(opened)
    keeper._look_at_age(opened)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "no checkpoint has been saved for 3100 s, with --checkpoint_secs=1000"


def test_a_worker_that_may_not_save_looks_how_old_the_newest_is(chief, tmp_path, monkeypatch):
    """It is on another machine, and the chief is away: what it does there, its thread does."""
    chief.begin()
    other = Worker(chief.place, tmp_path / "elsewhere", 1, every_secs=0.1)
    monkeypatch.setattr(keeper, "LATE_SECS", 0.2)
    chief.begin()
    said: queue.Queue = queue.Queue()
    monkeypatch.setattr(keeper, "tell_and_log", said.put)
    joined = other.join()
    other.keeper.after_create_session(joined, None)
    line = said.get(timeout=SECONDS)
    other.keeper.end(joined)
    assert re.fullmatch(r"no checkpoint has been saved for \d+ s, with --checkpoint_secs=0.1", line)
    assert saved(other.folder) == {}


def test_training_ends_when_checkpoints_cannot_be_written(servers, tmp_path):
    chief = Worker(servers(1), tmp_path / "checkpoints", every_secs=0.05)
    opened = chief.begin()
    opened.run(chief.update)
    for path in chief.folder.iterdir():
        path.unlink()
    chief.folder.rmdir()
    chief.keeper.after_create_session(opened, None)
    assert chief.keeper._thread
    chief.keeper._thread.join(SECONDS)  # which ends by it
    with pytest.raises(TrainingFailed, match="no checkpoint can be written: the folder .* is gone"):
        chief.keeper.after_run(None, None)


def test_a_full_disk_without_a_checkpoint(tmp_path):
    """There is nothing to go on from."""
    for what in "start again", "its checkpoints are intact, and --resume continues from the newest":
        with pytest.raises(TrainingFailed) as info, checkpoints.writing_into(str(tmp_path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert str(info.value) == (
            f"no checkpoint can be written into {tmp_path}: No space left on device; {what} once that is fixed"
        )
        (tmp_path / "model.ckpt-0.index").touch()


@pytest.mark.parametrize(
    "name", ["model.ckpt-*", "../other/model.ckpt-3", "/tmp/model.ckpt-3", "model.ckpt-[3]", "link-3", "folder-3"]
)
def test_only_files_of_the_folder_itself_are_checkpoints(tmp_path, name):
    """A folder from somebody else can list what it likes."""
    folder = tmp_path / "checkpoints"
    for where in folder, tmp_path / "other":
        where.mkdir()
        (where / "model.ckpt-3.index").touch()
        (where / "model.ckpt-3.data-00000-of-00001").touch()
    (folder / "link-3.index").symlink_to(tmp_path / "other" / "model.ckpt-3.index")
    (folder / "folder-3.index").mkdir()
    for others in "", 'all_model_checkpoint_paths: "model.ckpt-3"\n':  # if the list names none of its own, the files count
        (folder / "checkpoint").write_text(f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n{others}')
        assert checkpoints_in(str(folder)) == [str(folder / "model.ckpt-3")]
