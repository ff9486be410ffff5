"""The hooks of a worker's session and what they need, one for each feature that the settings ask for."""

import functools
import os
from pathlib import Path

from common.cluster import EarlyStoppingHook, EnterHook, GiveUpHook, MeetingHook, StartHook, WarmStartHook, membership
from common.core import nobody, run_folder
from common.data import user_function
from common.training.callbacks import Callback, Patience
from common.training.metrics import EvaluationHook, MetricsHook, MetricsLog
from common.training.result import REPORT_SIZE

# Files in the run's folder. STOP, written by an evaluator or the chief, ends training; the chief then writes ENDED.
STOP, ENDED = "evaluator-says-stop", "training-has-ended"


class WorkerHooks:
    """The hooks of a worker, in the order in which the session calls them.

    Args:
      plan: a `Plan` in the present graph.
      task: a `common.cluster.TaskSpecDef` of a worker, or None.
      settings: all flags.
      server: this task's `tf.train.Server`, or None.
      interruption: an `Interruption`.

    Attributes:
      index: number of the worker.
      all: list of `tf.train.SessionRunHook`.
      log, metrics, interruption: the worker's `MetricsLog`, `MetricsHook` and `Interruption`.
      meeting, early_stopping: a `MeetingHook` and an `EarlyStoppingHook`, or None.
      rendezvous: a `common.cluster.Rendezvous`, or None without a cluster.
      evaluation: the chief's `EvaluationHook`, or None.
      entered: an `EnterHook`, or None without a cluster.
    """

    def __init__(self, plan, task, settings, server, interruption):
        self._plan, self._task, self._settings = plan, task, settings
        self.index = task.shard_index if task else 0
        self.interruption, self._callback = interruption, None
        self.log = MetricsLog(settings.run_dir, self.index, plan.last, unit=plan.unit)
        if plan.keeper:
            plan.keeper.log, self.log.trained = self.log, plan.keeper.clock.seconds
            plan.keeper.clock.waits = bool(plan.waits)
        self._kept = functools.partial(run_folder.read_left, settings.run_dir, task.num_workers if task else 1, REPORT_SIZE)
        elastic = task and settings.max_workers
        self._begin_workers = settings.run.begin_workers if elastic else task and task.num_workers
        self._members = task and (plan.members or membership.Members(membership.PS_0, REPORT_SIZE, task.num_workers))
        self.rendezvous = membership.Rendezvous(task, self._members, self._kept) if task else None
        self.meeting = self._meeting()
        self.metrics, self.evaluation, self.early_stopping = self._metrics(), self._evaluation(), self._early_stopping()
        self.entered = self._enter()  # the chief's before the start of the others
        gives_up = task and not os.environ.get("LAUNCHER_KEY")  # a launcher restarts dead tasks
        giving_up = GiveUpHook(task, server, settings, plan.step, self.rendezvous) if gives_up else None
        evaluation = None if settings.run.num_evaluators else self.evaluation
        every = [interruption, self.meeting, self.metrics, evaluation, self.early_stopping, self.entered]
        self.all = [hook for hook in (*every, self._start(), giving_up) if hook]

    def _metrics(self):
        plan, settings = self._plan, self._settings
        drawn = plan.position.add if plan.position else None
        return MetricsHook(self.log, plan.size.samples_per_gradient, drawn=drawn, batch_size=settings.batch_size)

    def _evaluation(self):
        if self.index > 0:
            return None
        step, results = self._plan.evaluation
        return EvaluationHook(self.log, step, results, self._settings.evaluation_secs, self._plan.told)

    def _meeting(self):
        plan = self._plan
        if not plan.waits:
            return None
        come = [plan.keeper.clock.come] if plan.keeper else []
        meeting = MeetingHook(plan.waits, self._kept, *come)
        self.interruption.release = meeting.release
        return meeting

    def _early_stopping(self):
        """The hook by which training ends early. The chief's listeners may ask for it: one for each flag here."""
        settings, stop = self._settings, Path(self._settings.run_dir, STOP)
        makers = {"patience": self._patience, "callback": self._user_callback}
        wanted = [make for flag, make in makers.items() if getattr(settings, flag)]
        if not (wanted or settings.run.num_evaluators):
            return None
        if self.index == 0:
            for name in STOP, ENDED:  # stale files of a resumed run
                Path(settings.run_dir, name).unlink(missing_ok=True)
            self.log.listeners += [listener for make in wanted if (listener := make(stop.touch))]
        return EarlyStoppingHook(stop if self.index == 0 else None, stop_session=False)

    def _patience(self, stop):
        return None if self._settings.run.num_evaluators else Patience(self._settings.patience, stop)

    def _user_callback(self, stop):
        settings = self._settings
        function = user_function("--callback", settings.callback)
        self._callback = Callback(f"--callback={settings.callback}", function, stop, settings.hang_secs / 2)
        return self._callback

    def _start(self):
        plan, settings = self._plan, self._settings
        if self.index > 0 or not plan.gate:
            return None
        if settings.warm_start_steps:
            return WarmStartHook(plan.gate, plan.step, settings.warm_start_steps)
        return StartHook(plan.gate, self._begin_workers, settings.start_secs, lambda: self.interruption.requested, self._kept)

    def _enter(self):
        return EnterHook(self._members.enter(self.index), self._plan.begin) if self._members else None

    def missing(self):
        """Returns the workers that this one waits for in a call, as ["worker 3"]."""
        return self.meeting.missing() if self.meeting else nobody()

    def register(self, session):
        """Notes the arrival of a worker in an elastic run, if it came after the start or is back."""
        settings, index = self._settings, self.index
        is_back = self._plan.had_left or self.entered and self.entered.is_back
        if settings.max_workers and (is_back or index >= self._begin_workers) and not self.interruption.leaves:
            self.log.write(session.run(self._plan.step), came=True)

    def stop_listening(self):
        """Leaves the callback alone with the log: early stopping has nothing left to stop."""
        self.log.listeners = [self._callback] if self._callback else []

    def close(self):
        """Ends the log and the callback."""
        self.log.close()
        self.close_callback()

    def close_callback(self):
        """Ends the callback's thread, after its last call."""
        if self._callback:
            self._callback.close()
