"""Session hooks for any monitored session: start, wait and stop of workers, early stopping, warm start from a checkpoint."""

import contextlib
import math
import time
from pathlib import Path

from common import tf
from common.cluster.session import restoring
from common.core import Clocks, Lock, UserError, meanwhile, tell, workers_away


class Gate:
    """Start barrier on a ps: the other workers wait until the chief opens it. It is not saved in checkpoints.

    Args:
      members: the `membership.Members` of the cluster.

    Attributes:
      variable: a boolean, initialized when the gate opens; false if training has already ended.
    """

    def __init__(self, members):
        self._members = members
        with tf.device(members.device), tf.control_dependencies(None):
            self.variable = tf.get_variable("gate", initializer=True, trainable=False, collections=[])
            self._end = self.variable.assign(False, read_value=False)
            self._is_open = self.variable.is_initialized()

    def closed(self, index):
        """Returns a tensor of names, empty when the gate is open, for the `ready_for_local_init_op` of worker `index`.

        Reading it registers the worker as arrived.
        """
        with tf.device(self.variable.device):
            with tf.control_dependencies([self._members.come(index)]):
                return tf.report_uninitialized_variables([self.variable])

    def is_open(self, session):
        """Whether the workers may begin; a restarted ps has lost this."""
        return bool(session.run(self._is_open))

    def who_came(self, session):
        """Returns the indices of the workers that have arrived, a set."""
        return self._members.who_came(session)

    def open(self, session):
        session.run(self.variable.initializer)

    def close(self, session, for_all=False):
        """Tells workers still waiting that training has ended; with `for_all` also those that arrive later."""
        if for_all or not self.is_open(session):
            session.run(self._end)


class StartHook(tf.train.SessionRunHook):
    """The chief's start barrier: lets all workers begin together, after at most `secs` seconds.

    Otherwise the first worker could finish its shard before the others have started.

    Args:
      gate: a `Gate`.
      num_workers: number of workers.
      secs: timeout of the barrier.
      is_over: function that returns whether to stop waiting.
      who_left: function that returns the workers that have left for good: a restarted ps has lost their arrival.
    """

    def __init__(self, gate, num_workers, secs, is_over=lambda: False, who_left=tuple):
        self._gate, self._num_workers, self._secs = gate, num_workers, secs
        self._is_over, self._who_left, self._left = is_over, who_left, set()
        self._deadline, self._has_waited = math.inf, False

    def after_create_session(self, session, coord):
        """Waits, if training has not begun yet."""
        if self._gate.is_open(session):
            return
        if not self._has_waited:
            # If a ps dies meanwhile, this is called again: the deadline stays.
            self._deadline = min(self._deadline, time.monotonic() + self._secs)
            self._left = set(self._who_left())  # later departures are recorded on the ps of this session
            with meanwhile("waiting for all workers to come", waits=True, whom=lambda: self._missing(session)):
                self._wait(session)
            self._has_waited = True
        self._gate.open(session)

    def _missing(self, session):
        known = self._gate.who_came(session) | self._left
        return [f"worker {i}" for i in range(1, self._num_workers) if i not in known]

    def _wait(self, session):
        while (missing := self._missing(session)) and not self._is_over():
            if time.monotonic() >= self._deadline:
                count = f"{len(missing)} of {self._num_workers} workers"
                tell(f"{count} have not started within --start_secs={self._secs:g}: the others begin")
                break
            time.sleep(0.02)


class EnterHook(tf.train.SessionRunHook):
    """Enters this worker in the table of members at the start of each session.

    Args:
      enter: tensor of `membership.Members.enter`.
      begin: further operations for the start of a session.

    Attributes:
      is_back: whether this worker revoked an earlier departure.
      has_left: to be set when this worker has left for good: it does not enter again.
    """

    def __init__(self, enter, begin=()):
        self._enter, self._begin, self.is_back, self.has_left = enter, begin, False, False

    def after_create_session(self, session, coord):
        """Enters; a restarted ps has lost it."""
        if not self.has_left:
            had_left, _ = session.run([self._enter, self._begin])
            self.is_back |= bool(had_left)


class WarmStartHook(tf.train.SessionRunHook):
    """The chief's warm start: lets the other workers begin after `steps` global updates.

    A restarted ps has lost the gate, hence the look at the step in every new session.

    Args:
      gate: a `Gate`.
      step: the global step.
      steps: number of updates.
    """

    def __init__(self, gate, step, steps):
        self._gate, self._step, self._steps, self._is_open = gate, step, steps, False

    def after_create_session(self, session, coord):
        """Opens the gate if it was open before, or if this run resumes from a later step."""
        if self._is_open or session.run(self._step) >= self._steps:
            self._open(session)

    def before_run(self, run_context):
        return None if self._is_open else tf.train.SessionRunArgs(self._step)

    def after_run(self, run_context, run_values):
        if not self._is_open and run_values.results >= self._steps:
            self._open(run_context.session)

    def _open(self, session):
        self._gate.open(session)
        self._is_open = True


class MeetingHook(tf.train.SessionRunHook):
    """Enters and leaves the synchronization of workers that wait for each other.

    Args:
      meeting: a `common.scheme.Pace`, `Together` or `Ring`.
      who_left: in elastic runs, function that returns the workers that have left for good.
      come: function of a session, called before this worker enters.
    """

    def __init__(self, meeting, who_left=tuple, come=lambda session: None):
        self._meeting, self._who_left, self._come = meeting, who_left, come
        self._session, self._has_left, self._is_released = None, False, False

    def begin(self):
        """Builds an operation that needs every ps."""
        self._reach_all = tf.group(*(variable.is_initialized() for variable in tf.global_variables()))

    def after_create_session(self, session, coord):
        """Enters, or repeats that this worker has left: a restarted ps has lost it."""
        if self._meeting.vote is not None and self._session:
            raise RuntimeError("the connection to a ps was lost; all workers must be restarted")
        self._session = session
        self._come(session)
        if self._has_left:
            session.run(self._meeting.leave)
        else:
            session.run(self._meeting.enter, self._feed())
            if self._meeting.come is not None:
                session.run(self._meeting.come)
        if self._is_released:
            session.run(self._meeting.release)

    def _feed(self):
        if self._meeting.left is None:
            return None
        gone = self._who_left()
        return {self._meeting.left: [i in gone for i in range(self._meeting.left.shape[0])]}

    def missing(self):
        """Returns the workers that this one is waiting for, as ["worker 3"]. Called from any thread.

        Also ends the wait in a session that has lost a ps. A call that waits on one ps does not notice that another ps was
        restarted; the others would wait for a chief to restore it, and the chief for them.
        """
        if self._meeting.behind is None:
            return workers_away()
        session = self._session
        try:
            behind = session.run(self._meeting.behind) if session else []
            if any(behind):
                self._release_if_a_ps_was_restarted(session)
        except (tf.errors.OpError, RuntimeError):
            return []  # the session has failed or was closed
        return [f"worker {i}" for i, is_behind in enumerate(behind) if is_behind]

    def _release_if_a_ps_was_restarted(self, session):
        try:
            session.run(self._reach_all)
        except tf.errors.AbortedError:  # the next call fails, too, and a new session begins
            session.run(self._meeting.release)

    def leave(self, session):
        """From now on no worker waits for this one."""
        self._has_left = True
        session.run(self._meeting.leave)

    def goes(self, session):
        """Lets this worker leave for good; returns whether it must run one more round first."""
        if self._meeting.go is None:
            self.leave(session)
            return False
        if session.run(self._meeting.has_left):
            return False
        session.run(self._meeting.go)
        return True

    def vote(self, session):
        """Votes for a joint stop of all workers; returns whether the scheme stops by vote."""
        if self._meeting.vote is None:
            return False
        session.run(self._meeting.vote)
        return True

    def release(self):
        """Lets this worker stop waiting for others. Called from any thread."""
        self._is_released = True
        with contextlib.suppress(tf.errors.OpError, RuntimeError):  # the session is gone, so nothing waits in it
            if self._session:
                self._session.run(self._meeting.release)


class SemiSyncRunHook(tf.train.SessionRunHook):
    """Stale synchronous parallel: a worker too far ahead of the slowest waits (Ho et al. 2013, NIPS).

    For any monitored session of a cluster with parameter servers; every worker has one:

        hooks = [SemiSyncRunHook(index, worker_count, staleness=10), tf.train.StopAtStepHook(last_step=10000)]
        with tf.train.MonitoredTrainingSession(server.target, is_chief, hooks=hooks) as session:
            while not session.should_stop():
                session.run(train_op)

    A worker's clock ticks with every `run` of the session. A worker more than `staleness` ticks ahead of the slowest blocks on
    a queue, without polling, before its next `run`. The slowest never waits. The others don't wait for a worker whose session
    has ended; they do wait for one that died, until it is restarted and continues with its old clock.

    The clocks are on the ps of the global step, and are lost when that ps dies: then all start again from equal clocks.

    Args:
      index: index of this worker.
      worker_count: number of workers.
      staleness: number of steps that a worker may be ahead; 0 is lockstep, `math.inf` is no bound.
    """

    def __init__(self, index, worker_count, staleness=10):
        if not 0 <= index < worker_count:
            raise ValueError(f"index must be from 0 to worker_count - 1 = {worker_count - 1}, not {index}")
        if not staleness >= 0:
            raise ValueError(f"staleness must be at least 0, not {staleness}")
        self._index, self._worker_count, self._staleness = index, worker_count, staleness

    def begin(self):
        lock = Lock(tf.train.get_or_create_global_step().device, "semi_sync")
        clocks = Clocks(self._worker_count, lock, self._staleness, name="semi_sync")
        self._enter, self._leave, self._tick = clocks.enter(self._index), clocks.leave(self._index), clocks.tick(self._index)
        self._wait = clocks.wait(self._index)

    def after_create_session(self, session, coord):
        session.run(self._enter)

    def before_run(self, run_context):
        run_context.session.run(self._wait)

    def after_run(self, run_context, run_values):
        run_context.session.run(self._tick)

    def end(self, session):
        session.run(self._leave)


class StopAtTimeHook(tf.train.SessionRunHook):
    """Ends training when `time_running` seconds have passed since this worker's session was first created."""

    def __init__(self, time_running):
        if not time_running > 0:
            raise UserError(f"time_running must be greater than 0 seconds, not {time_running}")
        self._time_running, self._deadline = time_running, math.inf

    def after_create_session(self, session, coord):
        if self._deadline == math.inf:
            self._deadline = time.monotonic() + self._time_running

    def after_run(self, run_context, run_values):
        if time.monotonic() >= self._deadline:
            run_context.request_stop()


class LoadCheckpoint(tf.train.SessionRunHook):
    """Starts training from a checkpoint, such as one of a pretrained model. A hook of the chief.

    It restores once, after the session is created. A later session, created because a ps died, has either restored a checkpoint
    of this training, which is kept if its global step is not 0, or has lost everything, and this restores again.

    Args:
      saver: a `tf.train.Saver` of the variables to restore.
      checkpoint: path of the checkpoint, as `tf.train.latest_checkpoint` returns it.

    Raises:
      UserError: at the start, if the checkpoint does not exist, or lacks variables or has them in other shapes.
    """

    def __init__(self, saver, checkpoint):
        self._saver, self._checkpoint, self._step = saver, checkpoint, None

    def begin(self):
        """Checks that the checkpoint exists before anything is started."""
        if not self._checkpoint or not tf.train.checkpoint_exists(self._checkpoint):
            raise UserError(
                f"there is no checkpoint {str(self._checkpoint)!r}: expected the path that the saver gave it, "
                "like runs/model.ckpt-1000"
            )
        self._step = tf.train.get_global_step()

    def after_create_session(self, session, coord):
        """Restores, unless training has already made progress."""
        # The step alone is not enough: another worker may have advanced it. Sessions of other creators lack `is_new`.
        if getattr(session, "is_new", False) or self._step is None or session.run(self._step) == 0:
            with restoring(f"the checkpoint {self._checkpoint}", "another checkpoint", self._saver, self._checkpoint):
                self._saver.restore(session, self._checkpoint)


class EarlyStoppingHook(tf.train.SessionRunHook):
    """Stops all workers when a file appears, written by an evaluator, for example.

    The chief polls for the file, then closes a queue on the ps of the global step; every worker polls that queue. For any
    monitored session of a cluster with parameter servers; every worker has one.

    Args:
      path: path of the file, for the chief; None for the other workers.
      stop_session: whether to request a stop of the session; otherwise only `requested` is set.
      every_secs: seconds between polls, which follow a `run`.

    Attributes:
      requested: whether training should end.
    """

    def __init__(self, path=None, stop_session=True, every_secs=1.0):
        self._path, self._stop_session, self._every_secs = path, stop_session, every_secs
        self._next_look, self.requested = 0.0, False

    def begin(self):
        with tf.device(tf.train.get_or_create_global_step().device):
            said = tf.queue.FIFOQueue(1, tf.bool, shared_name="early_stopping")
            self._is_said, self._say = said.is_closed(), said.close()

    def after_run(self, run_context, run_values):
        """The chief closes the queue if the file exists; each worker stops once the queue is closed.

        This takes a `run` of its own: an all-reduce among the workers fails if the same `run` reads from a ps.
        """
        if not self.requested and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._every_secs
            self.requested = bool(run_context.session.run(self._is_said))
            if not self.requested and self._path and Path(self._path).exists():
                run_context.session.run(self._say)
                self.requested = True
        if self.requested and self._stop_session:
            run_context.request_stop()
