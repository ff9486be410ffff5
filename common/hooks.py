"""Session hooks, usable in any monitored session: metrics and evaluation while training, a warm start."""

import collections
import json
import threading
import time
from pathlib import Path

import numpy as np

from common import tf
from common.parameters import Rounds


class MetricsLog:
    """Where a worker writes what it measures: `metrics/worker-N.jsonl`, one JSON object a line, and TensorBoard events.

    Lines can be written from any thread and are whole whenever somebody reads the file.

    Args:
      run_dir: folder of the run.
      worker: index of this worker.
      last_step: global step at which training is to end.
    """

    def __init__(self, run_dir, worker, last_step):
        self._constant = {"worker": worker, "last_step": last_step}
        path = Path(run_dir, "metrics", f"worker-{worker}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1)
        # Written out every second, not every two minutes: to be seen while training, and not lost when a task is killed.
        self._events = tf.summary.FileWriter(str(Path(run_dir, "tensorboard", f"worker-{worker}")), flush_secs=1)
        self._lock = threading.Lock()

    def write(self, global_step, **values):
        """Writes one line with the time and these values; the numbers among them become TensorBoard scalars."""
        finite = {name: None if isinstance(v, float) and not np.isfinite(v) else v for name, v in values.items()}
        line = json.dumps({"time": time.time(), "global_step": int(global_step), **self._constant, **finite})
        scalars = [
            tf.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if isinstance(value, float) and np.isfinite(value)
        ]
        with self._lock:
            self._file.write(line + "\n")
            self._events.add_summary(tf.Summary(value=scalars), global_step)

    def close(self):
        """Closes both files."""
        with self._lock:
            self._file.close()
            self._events.close()


class MetricsHook(tf.train.SessionRunHook):
    """Writes loss, samples per second and staleness of one worker every `every_secs` seconds, and keeps the totals.

    It counts the calls that fetch a `common.parameters.Rounds`; others (an evaluation, say) pass it by. Staleness of an
    update: how many updates of others came between this worker's pull and its push.

    Args:
      log: a `MetricsLog`.
      samples_per_update: batch size × window.
    """

    def __init__(self, log, samples_per_update, every_secs=0.5):
        self._log, self._samples_per_update, self._every_secs = log, samples_per_update, every_secs
        self.staleness: collections.Counter[int] = collections.Counter()  # number of updates by their staleness
        self._new: collections.Counter[int] = collections.Counter()  # the same since the last line
        self._losses: list[float] = []
        self._began, self._step = 0.0, 0

    def totals(self):
        """Returns how many samples and updates this worker has made, and the sum and the maximum of their staleness."""
        counts = self.staleness + self._new
        updates = counts.total()
        return updates * self._samples_per_update, updates, sum(k * n for k, n in counts.items()), max(counts, default=0)

    def before_run(self, run_context):
        """Asks for the loss and the steps of a call that trains."""
        rounds = run_context.original_args.fetches
        if not isinstance(rounds, Rounds):
            return None
        self._began = self._began or time.perf_counter()
        return tf.train.SessionRunArgs([rounds.loss, rounds.steps])

    def after_run(self, run_context, run_values):
        """Counts a call, and writes when it is time."""
        if run_values.results is None:
            return
        loss, steps = run_values.results
        for pulled, updated in steps.tolist():
            self._new[updated - pulled - 1] += 1
        self._step = int(steps[-1, 1])
        self._losses.append(float(loss))
        if time.perf_counter() - self._began >= self._every_secs:
            self.flush()

    def end(self, session):
        """Writes what is left."""
        self.flush()

    def flush(self):
        """Writes a line for the time since the last one, if there was a call."""
        updates = self._new.total()
        if not updates:
            return
        now = time.perf_counter()
        self.staleness.update(self._new)
        staleness, self._new = self._new, collections.Counter()
        self._log.write(
            self._step,
            loss=float(np.mean(self._losses)),
            samples=self.totals()[0],
            samples_per_second=updates * self._samples_per_update / (now - self._began),
            staleness_mean=sum(k * n for k, n in staleness.items()) / updates,
            staleness={str(k): n for k, n in sorted(staleness.items())},
        )
        self._losses, self._began = [], now


class EvaluationHook(tf.train.SessionRunHook):
    """Evaluates the global parameters while training goes on: at the start, then about every `every_secs` seconds.

    A thread of its own does it, so the worker's rounds don't wait; and it pauses ten times as long as an evaluation took, so
    that on a large test set evaluation takes no more than a tenth of one core.

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
        pause, is_first = 0.0, True
        while not ended.wait(pause):
            began = time.perf_counter()
            try:
                self.evaluate(session)
            except (tf.errors.OpError, RuntimeError):
                return  # the session has failed or was closed; the training loop meets the same error and handles it
            took = time.perf_counter() - began
            # The first takes long, because the session prepares the graph for it: that says nothing about the next.
            pause = self._every_secs if is_first else max(self._every_secs - took, 10 * took)
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
