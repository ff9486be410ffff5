"""Checkpoints: listed, checked and written; and the `Keeper`, which saves the global parameters at regular intervals."""

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
UNFINISHED = ".unfinished-"  # prefix of a subfolder in which a checkpoint is written


class NotFinite(Exception):
    """Rows of a table are NaN or infinite."""


@contextlib.contextmanager
def writing_into(folder):
    """A context that turns a failure to write a checkpoint into a `TrainingFailed` of one line.

    Raises:
      TrainingFailed: if the disk is full, read-only or gone.
    """
    try:
        yield
    except (tf.errors.OpError, OSError, ValueError) as error:  # ValueError: the folder is gone
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

    Only regular files in this folder count, as its list, the file `checkpoint`, may come from another user.
    """
    listed = []
    with contextlib.suppress(ValueError, tf.errors.OpError):  # the file is empty or damaged
        state = tf.train.get_checkpoint_state(str(folder)) if folder else None
        listed = [path for path in state.all_model_checkpoint_paths if _is_ours(path, folder)] if state else []
    if listed:
        return listed
    # The list is damaged or missing, or names checkpoints of another folder.
    files = [str(file.with_suffix("")) for file in Path(folder).glob("*-*.index")] if folder else []
    found = [path for path in files if path.rpartition("-")[2].isdigit() and _is_ours(path, folder)]
    return [path for _, path in sorted({_step_of(path): path for path in found}.items())]


def _is_ours(path, folder):
    """Whether this is a checkpoint of this folder, in regular files (no links), with a name free of glob characters."""
    place, name = os.path.split(os.path.abspath(path))
    if place != os.path.abspath(folder) or not re.fullmatch(r"[\w.-]+", name):
        return False
    for file in _files_of(path):
        with contextlib.suppress(FileNotFoundError):  # a damaged checkpoint, which `newest_good_checkpoint` reports
            if not stat.S_ISREG(os.lstat(file).st_mode):
                return False
    return True


def _files_of(path):
    """The files of a checkpoint: the index, and one data file or one for each part of the tables."""
    return *(sorted(glob.glob(f"{glob.escape(path)}.data-?????-of-?????")) or [f"{path}.data-00000-of-00001"]), f"{path}.index"


def newest_good_checkpoint(folder):
    """Returns the path of the newest undamaged checkpoint in a folder; None if there are no checkpoints.

    Prints a line about each newer, damaged one: truncated, corrupted, or with a trainable variable that is not finite.

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
    """Rewrites a folder's list of checkpoints, up to the newest good one, and returns the path of that one, or None.

    For a program that lets TensorFlow read the list: it would restore, and later remove, the files that a foreign list names.

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
    """The fault of a checkpoint, or None. Reads every value, as each has a checksum."""
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
    """The name of a variable in a checkpoint, and its slice of the whole variable, as `SaveV2` takes them."""
    part = variable._get_save_slice_info()
    return (part.full_name, part.spec) if part else (variable.op.name, "")


def write_checkpoint(folder, step, names, slices, values, parts=()):
    """Writes `model.ckpt-STEP` into a folder, lists it as the newest, and removes all but the newest `KEPT` checkpoints.

    An existing checkpoint of the same step stays until the new one is complete and listed as `model.ckpt-0STEP`, which is
    then renamed; so a process that dies meanwhile leaves one of the two. Several processes may write concurrently; a process
    lists nothing if a later checkpoint was listed meanwhile. A process stopped (SIGSTOP) while it writes blocks no other; if it
    is stopped in the milliseconds of the listing, others wait for `PATIENCE_SECS`. Must be called with eager execution on.

    Args:
      names, slices: of the values, as `tf.raw_ops.SaveV2` takes them.
      values: arrays.
      parts: iterable of further (name, slice, value): the tables, which no worker holds whole.

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
            _remove(folder, first)  # a leftover index might be read with the new data
            path = os.path.join(folder, first)
            tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=written, destination_prefix=path, delete_old_dirs=False)
            if known and _newest_in(folder) not in (known[-1], first):  # stopped meanwhile, and overtaken
                _remove(folder, first)
                return
            _list(folder, [*others, first])
            if first == again:
                _remove(folder, new)
                for source in _files_of(path):
                    target = os.path.join(folder, new) + source.removeprefix(path)
                    try:
                        os.link(source, target)
                    except OSError:  # this file system has no hard links
                        shutil.copyfile(source, target)
                _list(folder, [*others, new])
            for name in (*others[: 1 - KEPT], again):
                _remove(folder, name)


@contextlib.contextmanager
def _turn(folder):
    """Locks a folder for some milliseconds. After `PATIENCE_SECS` the holder counts as stopped, and the lock is ignored."""
    with _opened(folder) as descriptor:
        pause, patience = threading.Event(), int(PATIENCE_SECS / 0.01)
        while patience and not _lock(descriptor):
            patience -= 1
            pause.wait(0.01)
        yield


@contextlib.contextmanager
def _own_subfolder(folder):
    """Yields a subfolder for an unfinished checkpoint, locked by its writer; removes the subfolders of dead processes."""
    for left in Path(folder).glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError), _opened(left) as descriptor:
            if _lock(descriptor):
                shutil.rmtree(left)
    made = tempfile.mkdtemp(prefix=".new-", dir=folder)
    with _opened(made) as descriptor:
        _lock(descriptor)
        path = os.path.join(folder, UNFINISHED + os.path.basename(made).removeprefix(".new-"))
        os.rename(made, path)  # only now, as others remove unlocked subfolders of this name
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
        os.close(descriptor)  # releases the lock, as the end of the process does


def _lock(descriptor):
    """Tries to lock an open folder; returns whether that succeeded."""
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
    """Removes data files without an index, left by a process that died. To be called with the lock."""
    for file in Path(folder).glob("model.ckpt-*.data-*"):
        if not Path(folder, f"{file.name.partition('.data-')[0]}.index").exists():
            file.unlink(missing_ok=True)


def _write(folder, names, slices, values, parts):
    """Writes a checkpoint in parts and returns their prefixes; raises `NotFinite` for table rows that are not finite."""
    written: list[str] = []
    for some in itertools.chain([(names, slices, values)], (([name], [spec], [value]) for name, spec, value in parts)):
        if written and not np.isfinite(some[2][0]).all():
            raise NotFinite
        written.append(os.path.join(folder, f"part-{len(written)}"))
        tf.raw_ops.SaveV2(prefix=written[-1], tensor_names=some[0], shape_and_slices=some[1], tensors=some[2])
    return written


def _list(folder, names):
    """Lists the last `KEPT` of these checkpoints, by relative paths, so that the folder can be moved."""
    tf.train.update_checkpoint_state(os.path.abspath(folder), names[-1], names[-KEPT:])


def _remove(folder, name):
    for file in _files_of(os.path.join(folder, name)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)


# A worker saves after this share of --checkpoint_secs since the last checkpoint: the chief first, another one if it did not.
CHIEF_AFTER, OTHERS_AFTER = 0.75, 0.9
# Warn if the newest checkpoint is older than LATE × --checkpoint_secs and than LATE_SECS.
LATE, LATE_SECS = 3, 5.0
_CLAIMED, _SAVED, _TOLD = range(3)  # keys of times on the ps, by its clock


class Keeper(tf.train.SessionRunHook):
    """Saves the global parameters at regular intervals. Every worker has one, created when its graph is complete.

    Each has a thread of its own, independent of the worker's calls. The chief saves when `CHIEF_AFTER` of the interval has
    passed since the last checkpoint. If the chief is dead, stopped or just starting, another worker that sees its folder saves
    after `OTHERS_AFTER` of the interval. A claim on the ps of the global step decides which worker saves.

    A checkpoint is read under the lock of `GlobalParameters`, so it contains an update that takes this lock either whole or
    not at all. Of an update without this lock, it may contain the part on one ps but not on the next. Tables are read
    afterwards, some rows at a time, while training goes on: an update may be in some of the rows, and in x̃, or not. The name
    of a checkpoint has its step. It also holds `samples` and `seconds`, the samples and the time of training over all runs of
    these parameters; and, if gradients may be dropped, `gradients_dropped`: their number and the number of their samples,
    which are not among `samples`.

    Args:
      center: the `common.scheme.GlobalParameters`.
      folder: of the checkpoints.
      every_secs: seconds of training that may be lost.
      index: of this worker; 0 is the chief, or a process on its own.
      device: this worker's device, or None.
      samples_per_update: number of samples, an int or a `Fraction`; also an attribute. If updates differ, the number of samples
        of a local step or a gradient, the unit of `GlobalParameters.local_steps`.
      copies: operations that copy further values to save from the chief to the ps; the chief runs them before it saves.
      samples_per_gradient: number of samples of a dropped gradient, an int or a `Fraction`.

    Attributes:
      has_lost: a tensor of names, empty if the parameters on the ps are complete and descend from one checkpoint.
      clock: a `common.core.training_clock.TrainingClock`: the seconds of training up to now.
      samples: a tensor, int64: number of samples with which the present parameters were trained.
      dropped: a tensor, int64 `[2]`: numbers of dropped gradients and of their samples.
      samples_before: a tensor, int64: samples trained under an earlier batch size or window, not counted by the steps (or local
        steps) × samples_per_update.
      is_of_local_steps: whether samples_per_update counts the samples of a local step, not of an update.
      log: a `common.training.MetricsLog`, if set: there the chief notes the source of a session's parameters.
      export: the chief's, if set: a function of parameters `[size]` and state that writes them as a model. It is called in the
        saving thread after each checkpoint; no round waits for it.
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
            if center.dropped is not None:  # saved in samples, as batch size and window may differ after a restart
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
        """Returns a consistent snapshot as tensors on this worker: time on the ps, step, samples, seconds, life, variables."""
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
        with tf.device(device):  # the device that fetches them: otherwise large values would travel slowly
            return [tf.identity(value) for value in scalars], [tf.identity(value) for value in values], done

    def _take_turns(self, center):
        """Makes the operations by which the workers agree on the one that saves."""

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
            # The wall clock of the ps may have been set back since the claim, so a worker's own clock counts, too.
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
        """Called by the chief when the parameters have their values: starts the checkpoints of a run.

        If the values are initial ones, a checkpoint is saved before any other worker may begin.

        Args:
          checkpoint: path of the restored checkpoint; None for initial values.
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
        """Called by the chief: continues with the parameters found on the ps, and saves them at once."""
        self._is_open = False
        self._say_place(session)
        self.save(session)
        self._log(session.run(self._step), "found on the ps")

    def _log(self, step, what):
        if self.log:
            self.log.write(step, parameters=what)

    @property
    def variables(self):
        """The variables for a `tf.train.Saver` to restore: all but tables, see `restore_tables`."""
        return self._variables

    def restore_tables(self, session, checkpoint):
        """Restores tables and their optimizer slots from a checkpoint.

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
        """Marks the folder, so that workers on other machines can tell whether theirs is the same.

        The mark is new each time, since a folder may have been copied from another machine.
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
        """Saves now, and returns the values of all variables; saves nothing and returns None if some are not finite.

        Raises:
          TrainingFailed: if the checkpoint cannot be written.
        """
        with self._turn:
            if self._is_open:  # else the chief's own variables are not initialized yet
                session.run(self._copies)
            (now, step, samples, seconds, life), values, _ = session.run(self._snapshot)
            seconds = max(seconds, self.clock.saved(life))
            # A sum of float32 cannot overflow float64, so it is finite if all values are.
            if not all(np.isfinite(np.sum(values[i], dtype=np.float64)) for i in self._trainable):
                print(f"no checkpoint of step {step}: its parameters are not finite", flush=True)
                return None
            names, slices = [*self._names, "samples", "seconds"], [*self._slices, "", ""]
            parts = (found for part in self._parts_of_tables for found in part.read(session))
            with ThreadPoolExecutor(1) as another:  # a graph may be open in this thread, so eager execution needs another one
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
        """Writes the model of a checkpoint; the first failure is reported in a line and ends the exports."""
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
        """Starts the thread, and ends the one of an earlier session."""
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
            if not ended.is_set():  # else the session was closed; the main loop handles the same error
                print(f"this session saves no more checkpoints: {str(error).splitlines()[0]}", flush=True)

    def _claim_turn(self, session):
        """Returns whether this worker is to save now, the seconds until its next claim if not, and the step."""
        claim, seen = self._claimed
        has_waited = time.monotonic() - seen >= self._after
        is_due, pause, step, claim, _ = session.run(self._claim, {self._seen: claim} if has_waited else None)
        if claim != self._claimed[0]:
            self._claimed = claim, time.monotonic()
        return is_due, min(pause, self._after), step

    def _look_at_age(self, session):
        """Warns, once, that the newest checkpoint is too old; its age is that since this worker first saw it."""
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
        """Ends training if checkpoints can no longer be written."""
        if self._failure:
            raise self._failure

    def end(self, session):
        """Ends the thread; the chief saves the parameters if they are newer than the last checkpoint."""
        self._ended.set()
        if self._thread:
            self._thread.join()
        if self._is_chief and session.run(self._step) != self._newest:
            self.save(session)


class Trained(tf.train.CheckpointSaverListener):
    """The time and the number of samples of training, over all runs of these variables; saved with them.

    A listener of the `tf.train.CheckpointSaverHook` in training by one worker; created while the graph is built.

    Args:
      step: the global step, a variable.
      batch_size: samples per step.

    Attributes:
      samples_before: samples trained under an earlier batch size, not counted by step × batch_size.
    """

    def __init__(self, step, batch_size):
        self._step, self._batch_size, self._began, self.samples_before = step, batch_size, math.inf, 0
        self._session: Any = None  # the session of the last save
        with tf.device(step.device):
            self._variables = [
                tf.get_variable(name, initializer=tf.zeros([], dtype), trainable=False, use_resource=True)
                for name, dtype in (("seconds", tf.float64), ("samples", tf.int64))
            ]
        self._feeds = [tf.placeholder(variable.dtype, []) for variable in self._variables]
        self._assign = [v.assign(feed, read_value=False) for v, feed in zip(self._variables, self._feeds, strict=True)]

    def begin_run(self, session):
        """Continues from the saved values. To be called after the variables were restored, before the first step."""
        (seconds, samples), step = session.run([self._variables, self._step])
        self._began, self.samples_before = time.monotonic() - seconds, int(samples - step * self._batch_size)

    @property
    def seconds(self):
        """Seconds of training up to now."""
        return time.monotonic() - self._began

    def samples(self, step):
        """Returns the number of samples trained up to this global step."""
        return self.samples_before + int(step) * self._batch_size

    def before_save(self, session, global_step_value):
        """Assigns both to the variables, which are saved with the others.

        In the first call of a new session they were just restored, so neither the outage nor lost updates count.
        """
        if self._session not in (None, session):
            self.begin_run(session)
        self._session = session
        if self._began < math.inf:  # else the session was just opened, and the variables hold the restored values
            values = self.seconds, self.samples(global_step_value)
            session.run(self._assign, dict(zip(self._feeds, values, strict=True)))


def _samples_of(center, step, samples_per_update):
    """Returns the number of samples in the updates up to this one, an int64 scalar."""
    return times(step if center.local_steps is None else center.local_steps.read_value(), samples_per_update)


def _dropped_of(center, samples_per_gradient):
    """Returns the numbers of dropped gradients and of their samples, int64 `[2]`."""
    if center.dropped is None:
        return tf.zeros([2], tf.int64)
    count, more = tf.unstack(center.dropped.read_value())
    return tf.stack([count, more + times(count, samples_per_gradient)])


def times(count, samples):
    """Returns count × samples, rounded down: a tensor or a number, and a `Fraction` or an int."""
    return count * samples.numerator // samples.denominator
