"""The `Keeper` of a worker: checkpoints of the global parameters at regular intervals; `Trained` for training by one worker."""

import contextlib
import math
import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from common import tf
from common.core.checkpoint_parts import TABLES
from common.core.checkpoints import NotFinite, name_and_slice, write_checkpoint, writing_into
from common.core.flags import TrainingFailed
from common.core.locks import Lock
from common.core.task_status import tell_and_log
from common.core.training_clock import TrainingClock

DROPPED = "gradients_dropped"
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
      variables: the variables for a `tf.train.Saver` to restore: all but tables, see `restore_tables`.
      has_lost: a tensor of names, empty if the parameters on the ps are complete and descend from one checkpoint.
      clock: a `common.core.training_clock.TrainingClock`: the seconds of training up to now.
      samples: a tensor, int64: number of samples with which the present parameters were trained.
      dropped: a tensor, int64 `[2]`: numbers of dropped gradients and of their samples.
      samples_before: a tensor, int64: samples trained under an earlier batch size or window, not counted by the steps (or local
        steps) × samples_per_update.
      log: a `common.training.MetricsLog`, if set: there the chief notes the source of a session's parameters.
      export: the chief's, if set: a function of parameters `[size]` and state that writes them as a model. It is called in the
        saving thread after each checkpoint; no round waits for it.
    """

    def __init__(
        self, center, folder, every_secs, index=0, device=None, samples_per_update=1, copies=(), samples_per_gradient=1
    ):
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
        self.variables = [v for v in every if not v.op.name.startswith(TABLES) and v is not center.dropped]
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
        self._names, self._slices = map(list, zip(*map(name_and_slice, self.variables)))
        self._set_dropped, self._dropped = [], tf.placeholder(tf.int64, [2])
        with tf.device(center.step.device), tf.control_dependencies(None):
            self.dropped = _dropped_of(center, samples_per_gradient)
            if center.dropped is not None:  # saved in samples, as batch size and window may differ after a restart
                of_samples = times(self._dropped[0], samples_per_gradient)
                value = tf.stack([self._dropped[0], self._dropped[1] - of_samples])
                self._set_dropped = [center.dropped.assign(value, read_value=False)]
                self._names, self._slices = [*self._names, DROPPED], [*self._slices, ""]
        trainable = set(map(id, tf.trainable_variables()))
        exported = center.average or center.pieces
        self._parts = [i for piece in exported for i, variable in enumerate(self.variables) if variable is piece]
        self._trainable = [i for i, variable in enumerate(self.variables) if id(variable) in trainable]
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
            for variable in self.variables:
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
        """Called by the chief when the parameters have their values, also after the death of a ps: starts the checkpoints.

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
            why = (str(error).splitlines() or [type(error).__name__])[0]
            tell_and_log(f"no model is written beside the checkpoints: {why}")

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
            tell_and_log(f"no checkpoint has been saved for {age:.0f} s, with --checkpoint_secs={self._every_secs:g}")

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
        """Assigns both to variables of the checkpoint.

        In the first call of a new session they were just restored, so neither the outage nor lost updates count.
        """
        if self._session not in (None, session):
            self.begin_run(session)
        self._session = session
        if self._began < math.inf:  # else the session was just opened, and the variables hold the restored values
            values = self.seconds, self.samples(global_step_value)
            session.run(self._assign, dict(zip(self._feeds, values, strict=True)))


def times(count, samples):
    """Returns count × samples, rounded down: a tensor or a number, and a `Fraction` or an int."""
    return count * samples.numerator // samples.denominator


def _samples_of(center, step, samples_per_update):
    """Returns the number of samples in the updates up to this one, an int64 scalar."""
    return times(step if center.local_steps is None else center.local_steps.read_value(), samples_per_update)


def _dropped_of(center, samples_per_gradient):
    """Returns the numbers of dropped gradients and of their samples, int64 `[2]`."""
    if center.dropped is None:
        return tf.zeros([2], tf.int64)
    count, more = tf.unstack(center.dropped.read_value())
    return tf.stack([count, more + times(count, samples_per_gradient)])
