"""Session hooks, usable in any monitored session: metrics and evaluation while training, when to begin, wait and stop."""

import math
import time
from pathlib import Path

from common import tf
from common.cluster import membership
from common.cluster.session import restoring
from common.core import Clocks, Lock, UserError, meanwhile, tell, workers_away


class Gate:
    """The place where the other workers wait until the chief lets them begin. It is on a ps and not saved in checkpoints.

    Attributes:
      variable: a boolean, initialized when they may begin: whether there is something to do.
    """

    def __init__(self, device):
        with tf.device(device), tf.control_dependencies(None):
            self.variable = tf.get_variable("gate", initializer=True, trainable=False, collections=[])
            self._end = self.variable.assign(False, read_value=False)
            self._came = membership.gate_table(device)
            self._who_came = tf.raw_ops.LookupTableExportV2(table_handle=self._came, Tkeys=tf.int64, Tvalues=tf.int64).keys
            self._is_open = self.variable.is_initialized()

    def closed(self, index):
        """Returns a tensor of names, empty when the gate is open, for the `ready_for_local_init_op` of worker `index`. To read
        it says that this worker has come."""
        with tf.device(self.variable.device):
            with tf.control_dependencies([membership.came_to_gate(self.variable.device, index)]):
                return tf.report_uninitialized_variables([self.variable])

    def is_open(self, session):
        """Whether they may begin. A ps that was restarted has forgotten it."""
        return bool(session.run(self._is_open))

    def open(self, session):
        """Lets them begin."""
        session.run(self.variable.initializer)

    def who_came(self, session):
        """Returns the indices of the workers that have come to it, a set."""
        return set(session.run(self._who_came).tolist())

    def close(self, session, for_all=False):
        """Lets workers that still wait know that training has ended; and `for_all` those that come later."""
        if for_all or not self.is_open(session):
            session.run(self._end)


class StartHook(tf.train.SessionRunHook):
    """The chief's: lets all workers begin together, when all have come, or after `secs` seconds.

    Else the first one may have trained on its share alone before the others are there.

    Args:
      gate: a `Gate`.
      num_workers: how many there are.
      secs: for how long to wait.
      is_over: function that says whether to wait no longer.
      who_left: function that returns which workers have left for good: a ps that was restarted does not know that they had
        come.
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
            # A ps may die meanwhile, and this be called again.
            self._deadline = min(self._deadline, time.monotonic() + self._secs)
            self._left = set(self._who_left())  # the ps of this session hears of those that leave from now on
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


class WarmStartHook(tf.train.SessionRunHook):
    """The chief's: lets the other workers begin when there have been `steps` global updates.

    A ps that was restarted has forgotten it, hence the look at the step in every new session.

    Args:
      gate: a `Gate`.
      step: the global step.
      steps: how many updates.
    """

    def __init__(self, gate, step, steps):
        self._gate, self._step, self._steps, self._is_open = gate, step, steps, False

    def after_create_session(self, session, coord):
        """Opens the gate if it was open before, or this run goes on from a later step."""
        if self._is_open or session.run(self._step) >= self._steps:
            self._open(session)

    def before_run(self, run_context):
        """Asks for the step until the gate is open."""
        return None if self._is_open else tf.train.SessionRunArgs(self._step)

    def after_run(self, run_context, run_values):
        """Opens the gate when it is time."""
        if not self._is_open and run_values.results >= self._steps:
            self._open(run_context.session)

    def _open(self, session):
        self._gate.open(session)
        self._is_open = True


class MeetingHook(tf.train.SessionRunHook):
    """Takes part in what workers wait for each other for.

    Args:
      meeting: a `common.scheme.Pace`, `Together` or `Ring`.
      who_left: where workers come and go, function that returns which of them have left for good.
      come: function of a session, called before this worker enters in it.
    """

    def __init__(self, meeting, who_left=tuple, come=lambda session: None):
        self._meeting, self._who_left, self._come = meeting, who_left, come
        self._session, self._has_left, self._is_released = None, False, False

    def after_create_session(self, session, coord):
        """Enters, or if it was said before that this worker has left, says so again: a ps that was restarted forgets."""
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
        """Returns which workers this one waits for just now, as ["worker 3"]. Called from any thread."""
        if self._meeting.behind is None:
            return workers_away()
        try:
            behind = self._session.run(self._meeting.behind) if self._session else []
        except (tf.errors.OpError, RuntimeError):
            return []  # the session has failed or was closed
        return [f"worker {i}" for i, is_behind in enumerate(behind) if is_behind]

    def leave(self, session):
        """The others need not wait for this worker any more."""
        self._has_left = True
        session.run(self._meeting.leave)

    def goes(self, session):
        """Lets this worker leave for good; returns whether it has to make one more round for that."""
        if self._meeting.go is None:
            self.leave(session)
            return False
        if session.run(self._meeting.has_left):
            return False
        session.run(self._meeting.go)
        return True

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
        """The chief says so if the file exists; each worker that hears it stops.

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
