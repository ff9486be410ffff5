"""Metrics of a worker: loss, speed, staleness, and evaluation of the global parameters."""

import collections
import contextlib
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from common import tf
from common.core import TrainingFailed, loss_of_failed, open_own
from common.scheme import PARTS, Rounds


class MetricsLog:
    """Metrics log of a worker: `metrics/worker-N.jsonl`, one JSON object per line, and TensorBoard events.

    Lines can be written from any thread, and a reader always finds whole lines. A deleted file or folder is recreated.

    Args:
      run_dir: folder of the run.
      worker: index of this worker, or "evaluator", which is then the file name.
      last_step: global step at which training ends; None if unknown to this task.
      tags: {value: tag} of values that share a TensorBoard chart with others; by default a value's tag is its name.
      unit: unit of the loss, as "nats per character", for readers of the log; or None.

    Raises:
      UserError: if the file is not the run's own, see `common.core.open_own`.
      TrainingFailed: if the folder of the run is gone.
    """

    def __init__(self, run_dir, worker, last_step, tags=None, unit=None):
        self.last_step, self._worker, self._tags, self._unit = last_step, worker, tags or {}, unit
        name = worker if worker == "evaluator" else f"worker-{worker}"
        self._path = Path(run_dir, "metrics", f"{name}.jsonl")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()
        # Flushed every second, not every two minutes: visible while training, and not lost when a task is killed.
        self._events = tf.summary.FileWriter(str(Path(run_dir, "tensorboard", name)), flush_secs=1)
        self._lock = threading.Lock()
        self._began = time.time() - time.monotonic()  # so that a clock set back later does not reorder lines
        self.listeners: list[Any] = []
        self.trained: Any = None  # function that returns the training time of the parameters, in seconds

    def now(self):
        """Returns the time, in seconds since 1970: wall clock at the start plus monotonic seconds since."""
        return self._began + time.monotonic()

    def write(self, global_step, **values):
        """Writes one line with the time and these values; the numbers among them become TensorBoard scalars.

        Then each of `listeners` is called, a function of the global step and {name: value}.
        """
        finite = {name: None if isinstance(v, float) and not np.isfinite(v) else v for name, v in values.items()}
        constant = {"worker": self._worker, **({} if self.last_step is None else {"last_step": int(self.last_step)})}
        if self.trained:
            constant["train_seconds"] = round(self.trained(), 3)
        if self._unit and "test_loss" in values:
            constant["unit"] = self._unit
        line = json.dumps({"time": self.now(), "global_step": int(global_step), **constant, **finite})
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
        for listener in self.listeners:
            listener(int(global_step), values)

    def _open(self):
        """Opens the file, and truncates a partial last line, left by a killed process."""
        try:
            descriptor = open_own(self._path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            raise TrainingFailed(f"no metrics can be written: the folder {self._path.parent.parent} is gone") from None
        with open(descriptor, "rb", closefd=False) as file:
            os.ftruncate(descriptor, file.read().rfind(b"\n") + 1)
        return open(descriptor, "a", buffering=1)

    def _is_in_place(self):
        """Whether the file is still in place: the user may have deleted it, or its folder."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(os.lstat(self._path), os.fstat(self._file.fileno()))
        return False

    def failure(self, global_step, loss, advice="go on from the newest good checkpoint with --resume and"):
        """Returns the `TrainingFailed` of a worker whose loss, or its gradient, is not finite."""
        what = f"the gradient of the loss, which is {loss:g}, is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        where = f"worker {self._worker}: {what} at step {global_step}"
        return TrainingFailed(f"{where}; {advice} a smaller --learning_rate, or look at the data")

    @contextlib.contextmanager
    def failing(self, global_step):
        """A context for calls of a session in which an operation of `must_be_finite` may fail.

        Args:
          global_step: function that returns the present global step.

        Raises:
          TrainingFailed: if such an operation fails; see `failure`.
        """
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if (loss := loss_of_failed(error)) is None:
                raise
            raise self.failure(global_step(), loss) from None

    def close(self):
        """Closes both files."""
        with self._lock:
            self._file.close()
            self._events.close()


def seconds_between(every_secs, age):
    """Seconds between two lines, `age` seconds after the first: the interval grows with the run.

    With `every_secs` 0.5: 1,000 lines in the first 500 s, 5,000 in eight hours, 10,000 in a month and a half.
    """
    return max(every_secs, age / 1000)


class MetricsHook(tf.train.SessionRunHook):
    """Writes loss, samples per second and staleness of one worker every `every_secs` seconds, and keeps the totals.

    It writes more often at first, and less often in a long run, see `seconds_between`. Training ends when the loss is not
    finite.

    It counts only calls that fetch a `common.scheme.Rounds`, so no evaluations. Staleness of an update: number of updates by
    others between this worker's pull and its push.

    Args:
      log: a `MetricsLog`.
      samples_per_update: number of samples that this worker draws per update, a `Fraction` if a round has several.
      drawn: function called after each call with its number of samples, or None.
      batch_size: for rounds with a varying number of local steps, see `common.scheme.local_steps`.

    Raises:
      TrainingFailed: after a call whose loss was not finite.
    """

    def __init__(self, log, samples_per_update, every_secs=0.5, drawn=None, batch_size=0):
        self._log, self._samples_per_update, self._every_secs, self._drawn = log, samples_per_update, every_secs, drawn
        self._batch_size, self._made = batch_size, 0  # local steps so far in this session, if their number varies
        self._samples = self._new_samples = 0  # of all calls, and of those since the last line
        self.staleness: collections.Counter[int] = collections.Counter()  # number of updates by their staleness
        self._new: collections.Counter[int] = collections.Counter()  # the same since the last line
        self.dropped = self._new_dropped = 0  # gradients that entered no update
        self._loss_sum, self._num_calls = 0.0, 0  # since the last line
        # The time of the first call, of the last line, of the end of the last call, and of the beginning of this one
        self._first = self._began = self._called = self._call_began = 0.0
        # Means over the timed rounds: all, and those since the last line.
        self._parts, self._new_parts = _Parts(), _Parts()
        self._timed_rounds: list[dict[str, float]] = []  # since the last line
        self._is_timed = False  # whether this session has timed a round; the first one also prepares the graph
        self._step = 0

    def totals(self):
        """Returns this worker's numbers of samples and updates, sum and maximum of staleness, and number of dropped gradients.

        Dropped gradients count among the samples, but not among the updates.
        """
        counts, dropped = self.staleness + self._new, self.dropped + self._new_dropped
        updates, staleness = counts.total(), sum(k * n for k, n in counts.items())
        return self._samples, updates, staleness, max(counts, default=0), dropped

    def seconds_of_parts(self):
        """Returns the mean seconds of each of `PARTS` of a round; NaN if no round was timed."""
        mean = self._parts.mean()
        return [mean.get(part, 0.0) if mean else math.nan for part in PARTS]

    def after_create_session(self, session, coord):
        """Resets the state of a session: a new one prepares its graphs and counts local steps anew."""
        self._is_timed, self._made = False, 0

    def before_run(self, run_context):
        """Fetches loss and steps of a training call, and its parts if it is timed."""
        rounds = run_context.original_args.fetches
        if not isinstance(rounds, Rounds):
            return None
        self._call_began = time.perf_counter()
        self._began = self._began or self._call_began
        self._first = self._first or self._began
        return tf.train.SessionRunArgs([rounds.loss, rounds.steps, rounds.parts, rounds.local_steps])

    def after_run(self, run_context, run_values):
        """Counts a call, and writes a line once the interval has passed."""
        if run_values.results is None:
            return
        loss, steps, parts, local_steps = run_values.results
        samples = int(len(steps) * self._samples_per_update)
        if local_steps and local_steps[0] >= 0:
            samples, self._made = (int(local_steps[0]) - self._made) * self._batch_size, int(local_steps[0])
        self._samples, self._new_samples = self._samples + samples, self._new_samples + samples
        if self._drawn:
            self._drawn(samples)
        # Rounds are timed by the wall clock: if one takes longer than its call, the clock was set.
        if parts and self._is_timed and sum(parts.values()) <= time.perf_counter() - self._call_began:
            self._parts.add(parts)
            self._new_parts.add(parts)
            self._timed_rounds.append({part: round(float(seconds), 6) for part, seconds in parts.items()})
        self._is_timed = self._is_timed or bool(parts)
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
        now = self._called = time.perf_counter()
        if now - self._began >= self._interval(now):
            self.flush()

    def _interval(self, now):
        """Seconds until the next line: fewer in the first two seconds, to give the curve of a short run some points."""
        age = now - self._first
        return seconds_between(min(self._every_secs, self._every_secs / 10 + age / 4), age)

    def end(self, session):
        """Writes the last line."""
        self.flush()

    def flush(self):
        """Writes a line for the time from the last line to the last call, if there was a call.

        It has no speed if that time is much shorter than usual: at the end of training it mostly goes into preparing the graph
        of a shorter call.
        """
        updates = self._new.total()
        gradients = updates + self._new_dropped
        if not gradients:
            return
        seconds = self._called - self._began
        is_rest = self.staleness and seconds < self._interval(self._called) / 2
        speed = {} if is_rest else {"samples_per_second": self._new_samples / seconds}
        self.staleness.update(self._new)
        self.dropped += self._new_dropped
        dropped = {"gradients_dropped": self._new_dropped} if self._new_dropped else {}
        staleness, self._new, self._new_dropped, self._new_samples = self._new, collections.Counter(), 0, 0
        parts, self._new_parts = shares_of_parts([self._new_parts.mean()]), _Parts()
        timed, self._timed_rounds = self._timed_rounds, []
        self._log.write(
            self._step,
            loss=self._loss_sum / self._num_calls,
            samples=self.totals()[0],
            **speed,
            staleness_mean=sum(k * n for k, n in staleness.items()) / updates if updates else None,
            staleness={str(k): n for k, n in sorted(staleness.items())},
            **({**parts, "timed_rounds": timed} if parts["parts"] else {}),
            **dropped,
        )
        self._loss_sum, self._num_calls, self._began = 0.0, 0, time.perf_counter()


def measured(results):
    """Returns loss and metrics, {name: value}, under their names in the log."""
    return {name if name.startswith("validation_") else f"test_{name}": value for name, value in results.items()}


class _Parts:
    """The mean of several {part: seconds}."""

    def __init__(self):
        self._sums, self._count = dict.fromkeys(PARTS, 0.0), 0

    def add(self, seconds):
        """Adds the parts of a round; a missing part takes no time in any round."""
        self._count += 1
        for part, value in seconds.items():
            self._sums[part] += float(value)

    def mean(self):
        """Returns {part: seconds}, without parts that take no time; empty without rounds."""
        return {part: total / self._count for part, total in self._sums.items() if total}


def shares_of_parts(workers):
    """Returns the log entries for the parts of a round: its seconds, and the share of each part.

    Args:
      workers: {part: seconds} of each worker; shares are averaged over workers, since all train for the same time in all.
    """
    known = [seconds for seconds in workers if sum(seconds.values()) > 0]
    if not known:
        return {"round_seconds": None, "parts": None}
    wholes = [sum(seconds.values()) for seconds in known]
    parts = {}
    for part in PARTS:
        shares = [seconds.get(part, 0.0) / whole for seconds, whole in zip(known, wholes, strict=True)]
        if any(shares):
            parts[part] = round(sum(shares) / len(shares), 4)
    return {"round_seconds": sum(wholes) / len(wholes), "parts": parts}


class EvaluationHook(tf.train.SessionRunHook):
    """Evaluates the global parameters during training: at the start, then about every `every_secs` seconds.

    In a long run it evaluates less often, see `seconds_between`. It runs in a thread of its own, so the worker's rounds don't
    wait; the pause is at least ten times the fastest evaluation, so that a large test set takes at most a tenth of one core.

    Args:
      log: a `MetricsLog`.
      step: the global step, a scalar tensor.
      results: loss and metrics on the test set, {name: scalar tensor}; on a validation set, as "validation_NAME".
      told: further numbers to write: pairs of tensors, and a function of their values that returns {name: number}.
    """

    def __init__(self, log, step, results, every_secs=1.0, told=()):
        self._log, self._every_secs, self._told = log, every_secs, [numbers_of for _, numbers_of in told]
        self._fetches = step, dict(results), [tensors for tensors, _ in told]
        self._thread, self._ended = None, threading.Event()

    def after_create_session(self, session, coord):
        """Starts evaluating in this session; a previous session has failed, and its thread with it."""
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
            # The first evaluation includes graph preparation, so its time does not predict the next.
            every_secs = seconds_between(self._every_secs, began - first)
            # Nor does the time of an evaluation that had to wait for the rounds.
            fastest = fastest if is_first else min(fastest, took)
            pause = every_secs if is_first else max(every_secs - took, 10 * fastest)
            is_first = False

    def evaluate(self, session):
        """Evaluates once, writes and returns (global step, {name: number})."""
        step, results, told = session.run(self._fetches)
        results = {name: float(value) for name, value in results.items()}
        more: dict[str, Any] = {}
        for numbers_of, values in zip(self._told, told, strict=True):
            more |= numbers_of(values)
        self._log.write(step, **measured(results), **more)
        return int(step), results

    def _stop(self):
        self._ended.set()
        if self._thread:
            self._thread.join()

    def end(self, session):
        """Stops the thread."""
        self._stop()
