"""Session hooks, usable in any monitored session: metrics and evaluation while training, when to begin, wait and stop."""

import collections
import contextlib
import json
import math
import os
import threading
import time
from pathlib import Path

import numpy as np

from common import tf
from common.coordination import Clocks, Lock
from common.flags import TrainingFailed, UserError
from common.parameters import Rounds
from common.run_dir import open_own
from common.session import restoring


class MetricsLog:
    """Where a worker writes what it measures: `metrics/worker-N.jsonl`, one JSON object a line, and TensorBoard events.

    Lines can be written from any thread and are whole whenever somebody reads the file. If somebody deletes it, or its folder,
    both are made again.

    Args:
      run_dir: folder of the run.
      worker: index of this worker, or "evaluator", whose files are called that.
      last_step: global step at which training is to end.
      tags: {value: tag} of those that TensorBoard is to show in one chart with another's; otherwise a value's tag is its name.

    Raises:
      UserError: if the file is not one of the run's own, see `common.run_dir.open_own`.
      TrainingFailed: if the folder of the run is gone.
    """

    def __init__(self, run_dir, worker, last_step, tags=None):
        self.last_step, self._worker, self._tags = last_step, worker, tags or {}
        name = worker if worker == "evaluator" else f"worker-{worker}"
        self._path = Path(run_dir, "metrics", f"{name}.jsonl")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()
        # Written out every second, not every two minutes: to be seen while training, and not lost when a task is killed.
        self._events = tf.summary.FileWriter(str(Path(run_dir, "tensorboard", name)), flush_secs=1)
        self._lock = threading.Lock()

    def write(self, global_step, **values):
        """Writes one line with the time and these values; the numbers among them become TensorBoard scalars."""
        finite = {name: None if isinstance(v, float) and not np.isfinite(v) else v for name, v in values.items()}
        constant = {"worker": self._worker, "last_step": int(self.last_step)}
        line = json.dumps({"time": time.time(), "global_step": int(global_step), **constant, **finite})
        scalars = [
            tf.Summary.Value(tag=self._tags.get(name, name), simple_value=value)
            for name, value in values.items()
            if isinstance(value, float) and np.isfinite(value)
        ]
        with self._lock:
            if not self._is_in_place():
                self._file.close()
                self._file = self._open()
            self._file.write(line + "\n")
            self._events.add_summary(tf.Summary(value=scalars), global_step)

    def _open(self):
        """Opens the file, and cuts off what a process wrote last that was killed amid a line."""
        try:
            descriptor = open_own(self._path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            raise TrainingFailed(f"no metrics can be written: the folder {self._path.parent.parent} is gone") from None
        with open(descriptor, "rb", closefd=False) as file:
            os.ftruncate(descriptor, file.read().rfind(b"\n") + 1)
        return open(descriptor, "a", buffering=1)

    def _is_in_place(self):
        """Whether the file is still where it was: somebody may have deleted it, or its folder."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(os.lstat(self._path), os.fstat(self._file.fileno()))
        return False

    def failure(self, global_step, loss, advice="go on from the newest good checkpoint with --resume and"):
        """Returns the `TrainingFailed` of a worker whose loss is not finite."""
        where = f"worker {self._worker}: the loss is {loss} at step {global_step}"
        return TrainingFailed(f"{where}; {advice} a smaller --learning_rate, or look at the data")

    def close(self):
        """Closes both files."""
        with self._lock:
            self._file.close()
            self._events.close()


def seconds_between(every_secs, age):
    """How long to wait from one line to the next, `age` seconds after the first: so the number of lines grows ever slower.

    With 0.5 it is a thousand lines in the first 500 s, five thousand in eight hours, ten thousand in a month and a half.
    """
    return max(every_secs, age / 1000)


class MetricsHook(tf.train.SessionRunHook):
    """Writes loss, samples per second and staleness of one worker every `every_secs` seconds, and keeps the totals.

    In a long run it writes more seldom, see `seconds_between`. Training ends when the loss is not finite.

    It counts the calls that fetch a `common.parameters.Rounds`; others (an evaluation, say) pass it by. Staleness of an
    update: how many updates of others came between this worker's pull and its push.

    Args:
      log: a `MetricsLog`.
      samples_per_update: batch size × window.

    Raises:
      TrainingFailed: after a call whose loss was not finite.
    """

    def __init__(self, log, samples_per_update, every_secs=0.5):
        self._log, self._samples_per_update, self._every_secs = log, samples_per_update, every_secs
        self.staleness: collections.Counter[int] = collections.Counter()  # number of updates by their staleness
        self._new: collections.Counter[int] = collections.Counter()  # the same since the last line
        self.dropped = self._new_dropped = 0  # gradients that no update was made of
        self._loss_sum, self._num_calls = 0.0, 0  # since the last line
        self._first = self._began = 0.0  # the time of the first call, and of the last line
        self._step = 0

    def totals(self):
        """Returns how many samples and updates this worker has made, the sum and the maximum of their staleness, and how many
        gradients were dropped, which are no updates, but of samples."""
        counts, dropped = self.staleness + self._new, self.dropped + self._new_dropped
        updates, staleness = counts.total(), sum(k * n for k, n in counts.items())
        return (updates + dropped) * self._samples_per_update, updates, staleness, max(counts, default=0), dropped

    def before_run(self, run_context):
        """Asks for the loss and the steps of a call that trains."""
        rounds = run_context.original_args.fetches
        if not isinstance(rounds, Rounds):
            return None
        self._began = self._began or time.perf_counter()
        self._first = self._first or self._began
        return tf.train.SessionRunArgs([rounds.loss, rounds.steps])

    def after_run(self, run_context, run_values):
        """Counts a call, and writes when it is time."""
        if run_values.results is None:
            return
        loss, steps = run_values.results
        for pulled, updated in steps.tolist():
            if updated > pulled:
                self._new[updated - pulled - 1] += 1
            else:
                self._new_dropped += 1
        self._step = int(steps[-1, 1])
        if not math.isfinite(loss):
            raise self._log.failure(self._step, loss)
        self._loss_sum += float(loss)
        self._num_calls += 1
        now = time.perf_counter()
        if now - self._began >= seconds_between(self._every_secs, now - self._first):
            self.flush()

    def end(self, session):
        """Writes what is left."""
        self.flush()

    def flush(self):
        """Writes a line for the time since the last one, if there was a call."""
        updates = self._new.total()
        gradients = updates + self._new_dropped
        if not gradients:
            return
        now = time.perf_counter()
        self.staleness.update(self._new)
        self.dropped += self._new_dropped
        dropped = {"gradients_dropped": self._new_dropped} if self._new_dropped else {}
        staleness, self._new, self._new_dropped = self._new, collections.Counter(), 0
        self._log.write(
            self._step,
            loss=self._loss_sum / self._num_calls,
            samples=self.totals()[0],
            samples_per_second=gradients * self._samples_per_update / (now - self._began),
            staleness_mean=sum(k * n for k, n in staleness.items()) / updates if updates else None,
            staleness={str(k): n for k, n in sorted(staleness.items())},
            **dropped,
        )
        self._loss_sum, self._num_calls, self._began = 0.0, 0, now


class EvaluationHook(tf.train.SessionRunHook):
    """Evaluates the global parameters while training goes on: at the start, then about every `every_secs` seconds, and more
    seldom in a long run, see `seconds_between`.

    A thread of its own does it, so the worker's rounds don't wait; and it pauses ten times as long as the fastest evaluation
    took, so that on a large test set evaluation takes no more than a tenth of one core.

    Args:
      log: a `MetricsLog`.
      step, loss, accuracy: scalar tensors; accuracy may be NaN (regression).
    """

    def __init__(self, log, step, loss, accuracy, every_secs=1.0):
        self._log, self._fetches, self._every_secs = log, [step, loss, accuracy], every_secs
        self._thread, self._ended = None, threading.Event()

    def after_create_session(self, session, coord):
        """Starts evaluating in this session; one that it replaces has failed, and its thread with it."""
        self._stop()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(session, self._ended), daemon=True)
        self._thread.start()

    def _run(self, session, ended):
        pause, is_first, first, fastest = 0.0, True, time.perf_counter(), math.inf
        while not ended.wait(pause):
            began = time.perf_counter()
            try:
                self.evaluate(session)
            except (tf.errors.OpError, RuntimeError, TrainingFailed):
                return  # the session has failed or was closed; the training loop meets the same error and handles it
            took = time.perf_counter() - began
            # The first takes long, because the session prepares the graph for it: that says nothing about the next.
            every_secs = seconds_between(self._every_secs, began - first)
            # Nor does one that had to wait for the rounds.
            fastest = fastest if is_first else min(fastest, took)
            pause = every_secs if is_first else max(every_secs - took, 10 * fastest)
            is_first = False

    def evaluate(self, session):
        """Evaluates once, writes and returns (global step, loss, accuracy or None)."""
        step, loss, accuracy = session.run(self._fetches)
        accuracy = None if np.isnan(accuracy) else float(accuracy)
        self._log.write(step, test_loss=float(loss), test_accuracy=accuracy)
        return int(step), float(loss), accuracy

    def _stop(self):
        self._ended.set()
        if self._thread:
            self._thread.join()

    def end(self, session):
        """Stops the thread."""
        self._stop()


class WarmStartHook(tf.train.SessionRunHook):
    """The chief's: lets the other workers begin when there have been `steps` global updates.

    They wait until the variable `gate` is initialized, as they wait for the parameters: it belongs into their
    `ready_for_local_init_op`. A ps that was restarted has forgotten it, hence the look at the step in every new session.

    Args:
      gate: a boolean variable on a ps, with the initial value True: whether there is something to do.
      step: the global step.
      steps: how many updates.
    """

    def __init__(self, gate, step, steps):
        self._gate, self._step, self._steps, self._is_open = gate, step, steps, False
        self._end = gate.assign(False, read_value=False)

    def after_create_session(self, session, coord):
        """Opens the gate if it was open before, or this run goes on from a later step."""
        if self._is_open or session.run(self._step) >= self._steps:
            self.open(session)

    def before_run(self, run_context):
        """Asks for the step until the gate is open."""
        return None if self._is_open else tf.train.SessionRunArgs(self._step)

    def after_run(self, run_context, run_values):
        """Opens the gate when it is time."""
        if not self._is_open and run_values.results >= self._steps:
            self.open(run_context.session)

    def open(self, session):
        """Lets the others begin."""
        session.run(self._gate.initializer)
        self._is_open = True

    def close(self, session):
        """Lets those who still wait know that training has ended."""
        if not self._is_open:
            session.run(self._end)
            self._is_open = True


class MeetingHook(tf.train.SessionRunHook):
    """Takes part in what workers wait for each other for; see `common.parameters.Meeting`, which it gets as `meeting`.

    Args:
      gate: the chief's: a variable that the others wait for, to be initialized when they may begin.
    """

    def __init__(self, meeting, gate=None):
        self._meeting, self._gate = meeting, gate
        self._session, self._has_left, self._is_released = None, False, False

    def after_create_session(self, session, coord):
        """Enters, or if it was said before that this worker has left, says so again: a ps that was restarted forgets."""
        if self._meeting.vote is not None and self._session:
            raise RuntimeError("the connection to a ps was lost; all workers have to be started again")
        self._session = session
        session.run(self._meeting.leave if self._has_left else self._meeting.enter)
        if self._is_released:
            session.run(self._meeting.release)
        if self._gate is not None:
            session.run(self._gate.initializer)

    def leave(self, session):
        """The others need not wait for this worker any more."""
        self._has_left = True
        session.run(self._meeting.leave)

    def vote(self, session):
        """Says that this worker is to stop together with the others, and returns whether that is how they stop."""
        if self._meeting.vote is None:
            return False
        session.run(self._meeting.vote)
        return True

    def release(self):
        """Lets this worker stop waiting for others. Called from any thread."""
        self._is_released = True
        try:
            if self._session:
                self._session.run(self._meeting.release)
        except (tf.errors.OpError, RuntimeError):
            pass  # there is no session any more in which it could wait


class SemiSyncRunHook(tf.train.SessionRunHook):
    """Holds a worker back that is too far ahead of the slowest: stale synchronous parallel (Ho et al. 2013, NIPS).

    For any monitored session of a cluster with parameter servers; every worker has one:

        hooks = [SemiSyncRunHook(index, worker_count, staleness=10), tf.train.StopAtStepHook(last_step=10000)]
        with tf.train.MonitoredTrainingSession(server.target, is_chief, hooks=hooks) as session:
            while not session.should_stop():
                session.run(train_op)

    A worker's clock ticks with every `run` of the session. One that is more than `staleness` ticks ahead of the slowest waits
    before its next `run`, on a queue, not looking again and again. The slowest never waits. A worker whose session has ended
    is not waited for; one that died is, until it comes back, and then it goes on with the clock that it had.

    The clocks lie beside the global step, and are lost when that ps dies: then all begin anew, at the same time.

    Args:
      index: of this worker.
      worker_count: how many workers there are.
      staleness: how many steps a worker may be ahead; 0 keeps all in step, `math.inf` lets each go at its own pace.
    """

    def __init__(self, index, worker_count, staleness=10):
        if not 0 <= index < worker_count:
            raise ValueError(f"index must be from 0 to worker_count - 1 = {worker_count - 1}, not {index}")
        if not staleness >= 0:
            raise ValueError(f"staleness must be at least 0, not {staleness}")
        self._index, self._worker_count, self._staleness = index, worker_count, staleness

    def begin(self):
        """Makes the clocks in the present graph."""
        lock = Lock(tf.train.get_or_create_global_step().device, "semi_sync")
        clocks = Clocks(self._worker_count, lock, self._staleness, name="semi_sync")
        self._enter, self._leave, self._tick = clocks.enter(self._index), clocks.leave(self._index), clocks.tick(self._index)
        self._wait = clocks.wait(self._index)

    def after_create_session(self, session, coord):
        """Takes part from now on."""
        session.run(self._enter)

    def before_run(self, run_context):
        """Waits until this worker may begin its next step."""
        run_context.session.run(self._wait)

    def after_run(self, run_context, run_values):
        """The step is done."""
        run_context.session.run(self._tick)

    def end(self, session):
        """The others need not wait for this worker any more."""
        session.run(self._leave)


class StopAtTimeHook(tf.train.SessionRunHook):
    """Ends training when `time_running` seconds have passed since this worker's session was first created."""

    def __init__(self, time_running):
        if not time_running > 0:
            raise UserError(f"time_running must be greater than 0 seconds, not {time_running}")
        self._time_running, self._deadline = time_running, math.inf

    def after_create_session(self, session, coord):
        """The time begins to run; it runs on when the session is created anew."""
        if self._deadline == math.inf:
            self._deadline = time.monotonic() + self._time_running

    def after_run(self, run_context, run_values):
        """Asks the session to stop when it is time."""
        if time.monotonic() >= self._deadline:
            run_context.request_stop()


class Trained(tf.train.CheckpointSaverListener):
    """How long the variables were trained, and with how many samples, in all runs that they come from. It is saved with them.

    A listener of the `tf.train.CheckpointSaverHook` of a training by one worker; to be made when the graph is built.

    Args:
      step: the global step, a variable.
      batch_size: samples a step.

    Attributes:
      samples_before: those that are not step × batch_size, since another batch size held then.
    """

    def __init__(self, step, batch_size):
        self._step, self._batch_size, self._began, self.samples_before = step, batch_size, math.inf, 0
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
        """Puts both into the variables, which are saved with the others."""
        if self._began < math.inf:  # else the session was just opened, and they are what is saved
            values = self.seconds, self.samples(global_step_value)
            session.run(self._assign, dict(zip(self._feeds, values, strict=True)))


class LoadCheckpoint(tf.train.SessionRunHook):
    """Begins training with the values of a checkpoint, say of a model that was trained before. One of the chief's hooks.

    It restores once, after the session is created. A session that is created later, because a ps died, has either restored a
    checkpoint of this training, and then that counts if its global step is not 0; or has lost all, and this restores again.

    Args:
      saver: a `tf.train.Saver` of the variables to restore.
      checkpoint: path of the checkpoint, as `tf.train.latest_checkpoint` returns it.

    Raises:
      UserError: at the beginning, if there is no such checkpoint, or it lacks variables or has them in other shapes.
    """

    def __init__(self, saver, checkpoint):
        self._saver, self._checkpoint, self._step = saver, checkpoint, None

    def begin(self):
        """Looks whether the checkpoint exists, before anything is started."""
        if not self._checkpoint or not tf.train.checkpoint_exists(self._checkpoint):
            raise UserError(
                f"there is no checkpoint {str(self._checkpoint)!r}: expected the path that the saver gave it, "
                "like runs/model.ckpt-1000"
            )
        self._step = tf.train.get_global_step()

    def after_create_session(self, session, coord):
        """Restores, unless training has gone on from there."""
        # The step alone would not do: another worker may have made one already. Sessions of other creators don't say.
        if getattr(session, "is_new", False) or self._step is None or session.run(self._step) == 0:
            with restoring(f"the checkpoint {self._checkpoint}", "another checkpoint", self._saver, self._checkpoint):
                self._saver.restore(session, self._checkpoint)


class EarlyStoppingHook(tf.train.SessionRunHook):
    """Ends the training of all workers when somebody, say an evaluator, has written a certain file.

    The chief looks for it, and then closes a queue beside the global step; every worker looks whether that is closed. For any
    monitored session of a cluster with parameter servers; every worker has one.

    Args:
      path: the chief's: of the file. None for the other workers.
      stop_session: whether the session is asked to stop; otherwise `requested` says that it should.
      every_secs: how often they look, after a `run`.

    Attributes:
      requested: whether training is to end.
    """

    def __init__(self, path=None, stop_session=True, every_secs=1.0):
        self._path, self._stop_session, self._every_secs = path, stop_session, every_secs
        self._next_look, self.requested = 0.0, False

    def begin(self):
        """Makes the queue in the present graph."""
        with tf.device(tf.train.get_or_create_global_step().device):
            said = tf.queue.FIFOQueue(1, tf.bool, shared_name="early_stopping")
            self._is_said, self._say = said.is_closed(), said.close()

    def after_run(self, run_context, run_values):
        """The chief says so if there is the file; whoever hears it stops.

        In a call of its own: in one call with an all-reduce among the workers, a look at the ps makes that fail.
        """
        if not self.requested and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._every_secs
            self.requested = bool(run_context.session.run(self._is_said))
            if not self.requested and self._path and Path(self._path).exists():
                run_context.session.run(self._say)
                self.requested = True
        if self.requested and self._stop_session:
            run_context.request_stop()
