"""Checkpoints: which there are and whether they are good; and the `Keeper`, which saves the global parameters by a clock."""

import contextlib
import fcntl
import glob
import itertools
import math
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from common import tf
from common.core.checkpoint_parts import TABLES, rows_in
from common.core.flags import TrainingFailed, UserError, why_unwritable
from common.core.locks import Lock
from common.core.task_status import say
from common.core.training_clock import TrainingClock

DROPPED = "gradients_dropped"
KEPT = 5  # checkpoints in a folder; older ones are removed
PATIENCE_SECS = 2.0
UNFINISHED = ".unfinished-"  # begins the name of a subfolder in which a checkpoint is written


class NotFinite(Exception):
    """Rows of a table are NaN or infinite."""


@contextlib.contextmanager
def writing_into(folder):
    """Says in one line why a checkpoint cannot be written. A new file replaces nothing before it is whole.

    Raises:
      TrainingFailed: if the disk is full, read-only or gone.
    """
    try:
        yield
    except (tf.errors.OpError, OSError, ValueError) as error:  # the last for a folder that is not there any more
        why = why_unwritable(error)
        if not os.path.isdir(folder):
            raise TrainingFailed(f"no checkpoint can be written: the folder {folder} is gone") from None
        if why is None:
            raise
        what = "start again"
        if any(Path(folder).glob("*.index")):
            what = "its checkpoints are intact, and --resume continues from the newest"
        raise TrainingFailed(f"no checkpoint can be written into {folder}: {why}; {what} once that is fixed") from None


def checkpoints_in(folder):
    """Returns the paths of all checkpoints in a folder, the oldest first.

    Only regular files of this very folder count: its file `checkpoint`, which lists them, may be another user's.
    """
    listed = []
    with contextlib.suppress(ValueError, tf.errors.OpError):  # of an empty file, or one with other bytes
        state = tf.train.get_checkpoint_state(str(folder)) if folder else None
        listed = [path for path in state.all_model_checkpoint_paths if _is_ours(path, folder)] if state else []
    if listed:
        return listed
    # The file that lists them is damaged, or names those of another folder, or they were copied without it.
    files = [str(file.with_suffix("")) for file in Path(folder).glob("*-*.index")] if folder else []
    found = [path for path in files if path.rpartition("-")[2].isdigit() and _is_ours(path, folder)]
    return [path for _, path in sorted({_step_of(path): path for path in found}.items())]


def _is_ours(path, folder):
    """Whether this is a checkpoint of this folder, in regular files (no links), whose name contains no glob pattern."""
    place, name = os.path.split(os.path.abspath(path))
    if place != os.path.abspath(folder) or not re.fullmatch(r"[\w.-]+", name):
        return False
    for file in _files_of(path):
        with contextlib.suppress(FileNotFoundError):  # it is damaged, which `newest_good_checkpoint` says
            if not stat.S_ISREG(os.lstat(file).st_mode):
                return False
    return True


def _files_of(path):
    """The files of a checkpoint: one with data, or one for each part of tables, and the index."""
    return *(sorted(glob.glob(f"{glob.escape(path)}.data-?????-of-?????")) or [f"{path}.data-00000-of-00001"]), f"{path}.index"


def newest_good_checkpoint(folder):
    """Returns the path of the newest checkpoint in a folder of which every value can be read; None if there are none at all.

    It says a line about each newer one that is damaged: cut short, with other bytes than were written, or with a trainable
    variable that is not finite.

    Raises:
      UserError: if all are damaged.
    """
    paths, problem = checkpoints_in(folder), None
    for path in reversed(paths):
        problem = _damage(path)
        if problem is None:
            return path
        line = f"the checkpoint {path} is damaged: {problem}; looking for an older one"
        print(line, flush=True)
        say(line)
    if problem:
        raise UserError(f"all checkpoints in {folder} are damaged, {Path(paths[0]).name}: {problem}; give another folder")
    return None


def list_anew(folder):
    """Lists in a folder what it really has, up to the newest good checkpoint, and returns that one's path, or None.

    For a program that lets TensorFlow read the list: it would restore, and later remove, whatever a list from elsewhere names.

    Raises:
      UserError: if all are damaged.
    """
    newest, paths = newest_good_checkpoint(folder), checkpoints_in(folder)
    if newest:
        _list(folder, [os.path.basename(path) for path in paths[: paths.index(newest) + 1]])
    else:
        Path(folder, "checkpoint").unlink(missing_ok=True)
    return newest


def _damage(path):
    """The fault of a checkpoint, or None. Reads all of it: each value has a checksum."""
    trainable = {_name_and_slice(v)[0] for v in tf.trainable_variables()}
    try:
        checkpoint = tf.train.load_checkpoint(path)
        dtypes = checkpoint.get_variable_to_dtype_map()
        for name, shape in checkpoint.get_variable_to_shape_map().items():
            is_table = name.startswith(TABLES)
            parts = rows_in(path, name, shape, dtype=dtypes[name]) if is_table else [(0, checkpoint.get_tensor(name))]
            for _, value in parts:
                if (name in trainable or is_table) and not np.isfinite(value).all():
                    return f"{name} has values that are not finite"
    except (tf.errors.OpError, IndexError, ValueError, RuntimeError) as error:
        return str(error).splitlines()[0].removeprefix(f"TensorBundle at {path} ")
    return None


def _name_and_slice(variable):
    """The name of a variable in a checkpoint, and which part of what has that name it is, as `SaveV2` takes them."""
    part = variable._get_save_slice_info()
    return (part.full_name, part.spec) if part else (variable.op.name, "")


def write_checkpoint(folder, step, names, slices, values, parts=()):
    """Writes `model.ckpt-STEP` into a folder, lists it as the newest there, and removes what is older than the newest few.

    One of the same step that is there stays until the new one is whole, and listed as `model.ckpt-0STEP`; then that takes its
    name. So a process that dies meanwhile leaves one of the two. Several processes may write at a time; one whose checkpoint
    another has overtaken lists nothing. A process that is stopped while it writes holds up no other; if it is stopped in the
    milliseconds in which it lists a checkpoint, others wait for `PATIENCE_SECS`. To be called where eager execution is on.

    Args:
      names, slices: of the values, as `tf.raw_ops.SaveV2` takes them.
      values: arrays.
      parts: gives further names, slices and values, one after the other: of what no worker has whole.

    Raises:
      TrainingFailed: if it cannot be written.
    """
    with writing_into(folder), _own_subfolder(folder) as subfolder:
        newest = _newest_in(folder)
        written = _write(subfolder, names, slices, values, parts)
        with _turn(folder):
            known = [os.path.basename(path) for path in checkpoints_in(folder)]
            if known and known[-1] != newest and _step_of(known[-1]) > step:
                return
            _remove_unfinished(folder)
            new, again = f"model.ckpt-{step}", f"model.ckpt-0{step}"
            others = [name for name in known if name not in (new, again)]
            first = again if new in known else new
            _remove(folder, first)  # an index that is left might be read with the new data
            path = os.path.join(folder, first)
            tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=written, destination_prefix=path, delete_old_dirs=False)
            if known and _newest_in(folder) not in (known[-1], first):  # it was stopped meanwhile, and others did not wait
                _remove(folder, first)
                return
            _list(folder, [*others, first])
            if first == again:
                _remove(folder, new)
                for source in _files_of(path):
                    target = os.path.join(folder, new) + source.removeprefix(path)
                    try:
                        os.link(source, target)
                    except OSError:  # this file system has no second names
                        shutil.copyfile(source, target)
                _list(folder, [*others, new])
            for name in (*others[: 1 - KEPT], again):
                _remove(folder, name)


@contextlib.contextmanager
def _turn(folder):
    """Locks a folder for some milliseconds. A process that holds it for `PATIENCE_SECS` is stopped: others go on without it."""
    with _opened(folder) as descriptor:
        pause, patience = threading.Event(), int(PATIENCE_SECS / 0.01)
        while patience and not _lock(descriptor):
            patience -= 1
            pause.wait(0.01)
        yield


@contextlib.contextmanager
def _own_subfolder(folder):
    """Gives a subfolder for an unfinished checkpoint, locked by its writer. Those of processes that have died are removed."""
    for left in Path(folder).glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError), _opened(left) as descriptor:
            if _lock(descriptor):
                shutil.rmtree(left)
    made = tempfile.mkdtemp(prefix=".new-", dir=folder)
    with _opened(made) as descriptor:
        _lock(descriptor)
        path = os.path.join(folder, UNFINISHED + os.path.basename(made).removeprefix(".new-"))
        os.rename(made, path)  # not before it is locked
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _opened(folder):
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # which gives a lock back, as the end of the process does


def _lock(descriptor):
    """Whether nobody else has the lock of an open folder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _newest_in(folder):
    return next((os.path.basename(path) for path in reversed(checkpoints_in(folder))), None)


def _step_of(name):
    return int(name.rpartition("-")[2])


def _remove_unfinished(folder):
    """Removes the data of a checkpoint whose process died before its index was there. To be called with the lock."""
    for file in Path(folder).glob("model.ckpt-*.data-*"):
        if not Path(folder, f"{file.name.partition('.data-')[0]}.index").exists():
            file.unlink(missing_ok=True)


def _write(folder, names, slices, values, parts):
    """Writes a checkpoint in parts and returns their prefixes. All of it has to be finite, as `NotFinite` says otherwise."""
    written: list[str] = []
    for some in itertools.chain([(names, slices, values)], (([name], [spec], [value]) for name, spec, value in parts)):
        if written and not np.isfinite(some[2][0]).all():
            raise NotFinite
        written.append(os.path.join(folder, f"part-{len(written)}"))
        tf.raw_ops.SaveV2(prefix=written[-1], tensor_names=some[0], shape_and_slices=some[1], tensors=some[2])
    return written


def _list(folder, names):
    """Lists the last few of these checkpoints as those of the folder; without the folder's name, so that it can be moved."""
    tf.train.update_checkpoint_state(os.path.abspath(folder), names[-1], names[-KEPT:])


def _remove(folder, name):
    for file in _files_of(os.path.join(folder, name)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)


# When a worker saves, as a share of --checkpoint_secs since the last time: the chief first, another one if that did not.
CHIEF_AFTER, OTHERS_AFTER = 0.75, 0.9
# If the newest checkpoint is older than so many times --checkpoint_secs, and than so many seconds, a line says so.
LATE, LATE_SECS = 3, 5.0
_CLAIMED, _SAVED, _TOLD = range(3)  # keys of what is noted on the ps: times on its clock


class Keeper(tf.train.SessionRunHook):
    """Saves the global parameters by a clock, while any worker is alive. Every worker has one, made when its graph is complete.

    Each has a thread, which waits for none of the worker's calls. The chief saves when `CHIEF_AFTER` of the time has passed
    since the last checkpoint. If it does not, because it is dead, stopped or just starting, another worker that sees the
    chief's folder saves after `OTHERS_AFTER` of the time. A claim on the ps of the global step decides which one.

    A checkpoint is read under the lock of `GlobalParameters`: it holds all of an update that takes this lock, or nothing of
    it. If an update without this lock is in progress, the checkpoint may contain its part on one ps but not on the next. Tables
    are read after that, some rows at a time, while training goes on: an update may be in some of them, and in x̃, or not. The
    name of a checkpoint has the step that it holds. It also holds `samples` and `seconds`: how many samples these parameters
    were trained with, and for how long, in all runs together that it comes from; and `gradients_dropped`, if some may be: how
    many there were, and of how many samples, which are not among `samples`.

    Args:
      center: the `common.scheme.GlobalParameters`.
      folder: of the checkpoints.
      every_secs: seconds that may be lost.
      index: of this worker; 0 is the chief, or a process on its own.
      device: this worker's device, or None.
      samples_per_update: number of samples, an int or a `Fraction`, as an attribute, too. Where updates differ, it is that of a
        local step or a gradient, whichever `GlobalParameters.local_steps` counts.
      copies: operations that copy further values to save from the chief to the ps; the chief runs them before it saves.
      samples_per_gradient: number of samples, an int or a `Fraction`, of one that is dropped.

    Attributes:
      has_lost: a tensor of names, empty if the parameters on the ps are whole: all from one checkpoint, or what came of it.
      clock: a `common.core.TrainingClock`: the seconds of training up to now.
      samples: a tensor, int64: how many samples the present parameters were trained with.
      dropped: a tensor, int64 `[2]`: how many gradients were dropped, and of how many samples.
      samples_before: a tensor, int64: those of them that are not steps (or local steps) × samples_per_update, since other flags
        held then.
      is_of_local_steps: whether samples_per_update is not of an update.
      log: where the chief notes with which parameters a session begins, a `common.training.MetricsLog`, if it is set.
      export: the chief's, if it is set: a function of parameters `[size]` and state that writes them down as a model. It is
        called in the thread that saves, after each checkpoint; no round waits for it.
    """

    def __init__(
        self,
        center,
        folder,
        every_secs,
        index=0,
        device=None,
        samples_per_update=1,
        copies=(),
        samples_per_gradient=1,
    ):
        self.is_of_local_steps = center.local_steps is not None
        self._folder, self._every_secs, self._is_chief, self._copies = str(folder), every_secs, index == 0, list(copies)
        self.samples_per_update = samples_per_update
        self._turn, self._thread, self._ended = threading.Lock(), None, threading.Event()
        self._failure: Exception | None = None
        self.log: Any = None
        self.export: Any = None
        self._is_open = False
        self._claimed = self._known = (-1.0, 0.0)  # the last claim, and the newest checkpoint: its time, and when it was seen
        self._newest = None  # the step of the newest checkpoint that this worker has saved
        self._after = every_secs * (CHIEF_AFTER if self._is_chief else OTHERS_AFTER)
        self._mark = Path(folder, "folder-id")
        every = tf.global_variables()
        self._variables = [v for v in every if not v.op.name.startswith(TABLES) and v is not center.dropped]
        self._parts_of_tables = [part for table in center.tables for part in table.parts(every)]
        options = {"trainable": False, "collections": [], "use_resource": True}
        self.clock = TrainingClock(center.step.device)
        with tf.device(center.step.device), tf.control_dependencies(None):
            self._whole = tf.get_variable("whole", initializer=True, **options)
            before = tf.get_variable("samples_before", initializer=tf.zeros([], tf.int64), **options)
            self.has_lost = tf.report_uninitialized_variables([*every, self._whole, *self.clock.variables, before])
            self._is_lost = tf.raw_ops.DestroyResourceOp(resource=self._whole.handle, ignore_lookup_error=True)
            self.samples_before = before.read_value()
            self._step = step = center.step.read_value()
            of_steps = _samples_of(center, step, samples_per_update)
            self.samples, self._samples = self.samples_before + of_steps, tf.placeholder(tf.int64, [])
            self._go_on = before.assign(self._samples - of_steps, read_value=False)
        self._names, self._slices = map(list, zip(*map(_name_and_slice, self._variables)))
        self._set_dropped, self._dropped = [], tf.placeholder(tf.int64, [2])
        with tf.device(center.step.device), tf.control_dependencies(None):
            self.dropped = _dropped_of(center, samples_per_gradient)
            if center.dropped is not None:  # saved as it counts with these flags, and restored as it does with others
                of_samples = times(self._dropped[0], samples_per_gradient)
                value = tf.stack([self._dropped[0], self._dropped[1] - of_samples])
                self._set_dropped = [center.dropped.assign(value, read_value=False)]
                self._names, self._slices = [*self._names, DROPPED], [*self._slices, ""]
        trainable = set(map(id, tf.trainable_variables()))
        self._parts = [i for piece in center.pieces for i, variable in enumerate(self._variables) if variable is piece]
        self._trainable = [i for i, variable in enumerate(self._variables) if id(variable) in trainable]
        self._snapshot = self._read(center, before, samples_per_update, samples_per_gradient, device)
        self._take_turns(center)

    def _read(self, center, before, samples_per_update, samples_per_gradient, device):
        """Returns tensors on this worker, of one moment: the time on the ps, step, samples, seconds, life, all variables."""
        with tf.control_dependencies(None), center.lock.held([]) as done:
            with tf.device(center.step.device):
                now, step = tf.timestamp(), center.step.read_value()
                of_steps = _samples_of(center, step, samples_per_update)
                scalars = [now, step, before.read_value() + of_steps, *self.clock.told]
            values = []
            for variable in self._variables:
                with tf.device(variable.device):
                    values.append(step if variable is center.step else variable.read_value())
            if center.dropped is not None:
                with tf.device(center.step.device):
                    values.append(_dropped_of(center, samples_per_gradient))
            done += [value.op for value in (*scalars, *values)]
        with tf.device(device):  # where it is fetched, as large values would be slow on the way there otherwise
            return [tf.identity(value) for value in scalars], [tf.identity(value) for value in values], done

    def _take_turns(self, center):
        """Makes the operations by which the workers agree on which of them saves."""

        def find(table, key, none):
            return tf.raw_ops.LookupTableFindV2(table_handle=table, keys=tf.constant(key, tf.int64), default_value=none)

        def insert(table, key, value):
            return tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=tf.constant(key, tf.int64), values=value)

        with tf.device(center.step.device), tf.control_dependencies(None):
            times = tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.float64, shared_name="saving")
            places = tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.string, shared_name="saving_place")
            self._time, self._place = tf.placeholder(tf.float64, []), tf.placeholder(tf.string, [])
            self._note_saved = [insert(times, key, self._time) for key in (_CLAIMED, _SAVED)]
            self._note_nothing_new = [insert(times, key, tf.timestamp()) for key in (_CLAIMED, _SAVED)]
            self._note_told = insert(times, _TOLD, self._time)
            self._chiefs_place, self._note_place = find(places, 0, tf.constant("")), insert(places, 0, self._place)
            zero = tf.zeros([], tf.float64)
        with Lock(center.step.device, "saving").held([]) as done, tf.device(center.step.device):
            now, claimed = tf.timestamp(), find(times, _CLAIMED, zero)
            # The wall clock of the ps may have been set back since the claim. So a worker's own clock counts, too.
            self._seen = tf.placeholder_with_default(zero - 1, [])
            is_due = tf.logical_or(now - claimed >= self._after, now < claimed)
            is_due = tf.logical_or(is_due, tf.equal(claimed, self._seen))
            with tf.control_dependencies([claimed]):
                done.append(insert(times, _CLAIMED, tf.where(is_due, now, claimed)))
        with tf.device(center.step.device), tf.control_dependencies(None):
            saved, told = find(times, _SAVED, zero), find(times, _TOLD, zero)
            self._look = saved, told
            self._claim = is_due, self._after - (now - claimed), center.step.read_value(), tf.where(is_due, now, claimed), done

    def begin_run(self, session, checkpoint):
        """The chief's, when the parameters have their values: from now on they are kept.

        Unless they come from a checkpoint, one is saved before any other worker may begin.

        Args:
          checkpoint: the path of the one that they were restored from; None if they have initial values.
        """
        self._is_open, samples, seconds, dropped = False, 0, 0.0, [0, 0]
        if checkpoint:
            reader = tf.train.load_checkpoint(checkpoint)
            if reader.has_tensor("seconds"):
                samples, seconds = reader.get_tensor("samples"), reader.get_tensor("seconds")
            if reader.has_tensor(DROPPED):
                dropped = reader.get_tensor(DROPPED)
        session.run(self._set_dropped, {self._dropped: dropped})
        step, _ = session.run([self._step, self._go_on], {self._samples: samples})
        self.clock.restart(session, seconds)
        if checkpoint:
            session.run(self._note_nothing_new)
        else:
            self.save(session)
        self._say_place(session)
        session.run(self._whole.initializer)
        self._newest = step
        self._log(step, f"restored from {os.path.basename(checkpoint)}" if checkpoint else "new")

    def adopt(self, session):
        """The chief's: goes on with the parameters that it finds, and saves them at once."""
        self._is_open = False
        self._say_place(session)
        self.save(session)
        self._log(session.run(self._step), "found on the ps")

    def _log(self, step, what):
        if self.log:
            self.log.write(step, parameters=what)

    @property
    def variables(self):
        """What a `tf.train.Saver` is to restore: all but tables, which `restore_tables` does."""
        return self._variables

    def restore_tables(self, session, checkpoint):
        """Gives tables, and what lies beside them, the values that they have in a checkpoint.

        Raises:
          UserError: if it has no such table.
        """
        shapes = tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map() if self._parts_of_tables else {}
        for part in self._parts_of_tables:
            part.restore(session, checkpoint, shapes)

    def lose(self, session):
        """Called by the chief: from now until `begin_run`, the values on the ps are not valid initial parameters."""
        session.run(self._is_lost)

    def _say_place(self, session):
        """Marks the folder, so that other workers know whether theirs is the same: on several machines it may not be.

        Each time with another mark, since the folder may be a copy of the one of another machine.
        """
        mark = uuid.uuid4().hex
        with writing_into(self._folder):
            self._mark.unlink(missing_ok=True)
            descriptor = os.open(self._mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # follows no link
            with open(descriptor, "w") as file:
                file.write(mark)
        session.run(self._note_place, {self._place: mark})

    def _may_save(self, session):
        """Whether the chief's folder is this worker's."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self._is_chief or self._mark.read_text().encode() == session.run(self._chiefs_place)
        return False

    def save(self, session):
        """Saves now, and returns the values of all variables. Parameters that are not finite are not worth it: training fails
        by them.

        Raises:
          TrainingFailed: if the checkpoint cannot be written.
        """
        with self._turn:
            if self._is_open:  # else the chief's own variables have no values yet, and there is nothing to copy
                session.run(self._copies)
            (now, step, samples, seconds, life), values, _ = session.run(self._snapshot)
            seconds = max(seconds, self.clock.saved(life))
            # No sum of float32 is too large for float64: it is finite if all of them are.
            if not all(np.isfinite(np.sum(values[i], dtype=np.float64)) for i in self._trainable):
                print(f"no checkpoint of step {step}: its parameters are not finite", flush=True)
                return None
            names, slices = [*self._names, "samples", "seconds"], [*self._slices, "", ""]
            parts = (found for part in self._parts_of_tables for found in part.read(session))
            with ThreadPoolExecutor(1) as another:  # in this thread a graph may be open, in which nothing is executed
                every = [*values, samples, seconds]
                try:
                    another.submit(write_checkpoint, self._folder, step, names, slices, every, parts).result()
                except NotFinite:
                    print(f"no checkpoint of step {step}: its tables are not finite", flush=True)
                    return None
            self._newest = step
            session.run(self._note_saved, {self._time: now})
        return values

    def _export(self, values):
        """Writes the model of a checkpoint, unless it cannot be written: then a line says so, once."""
        if self.export is None or values is None:
            return
        by_name = dict(zip(self._names, values, strict=True))
        state = [by_name[f"state_{i}"] for i in range(sum(name.startswith("state_") for name in self._names))]
        try:
            self.export(np.concatenate([values[i] for i in self._parts]), state)
        except Exception as error:
            self.export = None
            line = f"no model is written beside the checkpoints: {(str(error).splitlines() or [type(error).__name__])[0]}"
            print(line, flush=True)
            say(line)

    def after_create_session(self, session, coord):
        """Starts the thread; that of a session before ends with its session."""
        self.clock.stop()
        self._is_open = self._is_chief
        self._ended.set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(session, self._ended), daemon=True)
        self._thread.start()

    def _run(self, session, ended):
        pause = 0.0
        try:
            may_save = self._may_save(session)
            while not ended.wait(pause):
                is_due, pause = False, self._after
                if may_save:
                    is_due, pause, step = self._claim_turn(session)
                if is_due:
                    began = time.monotonic()
                    if step == self._newest:
                        session.run(self._note_nothing_new)
                    else:
                        self._export(self.save(session))
                    took = time.monotonic() - began
                    pause = max(self._after - took, took)
                self._look_at_age(session)
        except TrainingFailed as error:
            self._failure = error
        except (tf.errors.OpError, RuntimeError) as error:
            if not ended.is_set():  # else the session was closed; the main loop meets the same error, and handles it
                print(f"this session saves no more checkpoints: {str(error).splitlines()[0]}", flush=True)

    def _claim_turn(self, session):
        """Returns whether this worker is to save now, the seconds after which it is to ask again if not, and the step."""
        claim, seen = self._claimed
        has_waited = time.monotonic() - seen >= self._after
        is_due, pause, step, claim, _ = session.run(self._claim, {self._seen: claim} if has_waited else None)
        if claim != self._claimed[0]:
            self._claimed = claim, time.monotonic()
        return is_due, min(pause, self._after), step

    def _look_at_age(self, session):
        """Says, once, when the newest checkpoint is older than it may be, by this worker's clock since it first saw it."""
        saved, told = session.run(self._look)
        if saved != self._known[0]:
            self._known = saved, time.monotonic()
        age = time.monotonic() - self._known[1]
        if saved and told != saved and age > max(LATE * self._every_secs, LATE_SECS):
            session.run(self._note_told, {self._time: saved})
            line = f"no checkpoint has been saved for {age:.0f} s, with --checkpoint_secs={self._every_secs:g}"
            print(line, flush=True)
            say(line)

    def before_run(self, run_context):
        """The worker trains: the clock runs."""
        self.clock.tick(run_context.session)

    def after_run(self, run_context, run_values):
        """Ends training when checkpoints cannot be written any more."""
        if self._failure:
            raise self._failure

    def end(self, session):
        """Ends the thread; the chief saves what is not saved yet."""
        self._ended.set()
        if self._thread:
            self._thread.join()
        if self._is_chief and session.run(self._step) != self._newest:
            self.save(session)


class Trained(tf.train.CheckpointSaverListener):
    """How long the variables were trained, and with how many samples, in all runs that they come from. It is saved with them.

    A listener of the `tf.train.CheckpointSaverHook` of a training by one worker; to be made when the graph is built.

    Args:
      step: the global step, a variable.
      batch_size: samples per step.

    Attributes:
      samples_before: those that are not step × batch_size, since another batch size held then.
    """

    def __init__(self, step, batch_size):
        self._step, self._batch_size, self._began, self.samples_before = step, batch_size, math.inf, 0
        self._session: Any = None  # the one that has saved
        with tf.device(step.device):
            self._variables = [
                tf.get_variable(name, initializer=tf.zeros([], dtype), trainable=False, use_resource=True)
                for name, dtype in (("seconds", tf.float64), ("samples", tf.int64))
            ]
        self._feeds = [tf.placeholder(variable.dtype, []) for variable in self._variables]
        self._assign = [v.assign(feed, read_value=False) for v, feed in zip(self._variables, self._feeds, strict=True)]

    def begin_run(self, session):
        """Goes on from what is saved. To be called when the variables have their values, before the first step."""
        (seconds, samples), step = session.run([self._variables, self._step])
        self._began, self.samples_before = time.monotonic() - seconds, int(samples - step * self._batch_size)

    @property
    def seconds(self):
        """Of training, up to now."""
        return time.monotonic() - self._began

    def samples(self, step):
        """Returns how many samples the variables were trained with at this global step."""
        return self.samples_before + int(step) * self._batch_size

    def before_save(self, session, global_step_value):
        """Puts both into the variables, which are saved with the others.

        In the first call of a new session they have just been restored: neither the outage nor lost updates count.
        """
        if self._session not in (None, session):
            self.begin_run(session)
        self._session = session
        if self._began < math.inf:  # else the session was just opened, and they are what is saved
            values = self.seconds, self.samples(global_step_value)
            session.run(self._assign, dict(zip(self._feeds, values, strict=True)))


def _samples_of(center, step, samples_per_update):
    """Returns of how many samples the updates up to this one are made, an int64 scalar."""
    return times(step if center.local_steps is None else center.local_steps.read_value(), samples_per_update)


def _dropped_of(center, samples_per_gradient):
    """Returns how many gradients were dropped, and of how many samples, int64 `[2]`."""
    if center.dropped is None:
        return tf.zeros([2], tf.int64)
    count, more = tf.unstack(center.dropped.read_value())
    return tf.stack([count, more + times(count, samples_per_gradient)])


def times(count, samples):
    """Returns a count times a number of samples, a `Fraction` or an int, rounded down; the count is a tensor or a number."""
    return count * samples.numerator // samples.denominator
