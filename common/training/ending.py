"""The ways in which a worker's training ends: stopped, left for good, dismissed by the chief, or finished as the chief."""

import time
from pathlib import Path

from common.cluster import membership
from common.core import doing, nobody, run_folder, status_of_leaving
from common.training.calls import run_rounds
from common.training.interruption import say_left
from common.training.plan import Outcome
from common.training.worker_hooks import ENDED

STOPPED = 130  # exit status after Ctrl-C


class Ending:
    """The end of a worker's training.

    Args:
      plan: a `Plan`.
      task: a `common.cluster.TaskSpecDef` of a worker, or None.
      settings: all flags.
      server: this task's `tf.train.Server`, or None.
      hooks: the `WorkerHooks`.
    """

    def __init__(self, plan, task, settings, server, hooks):
        self._plan, self._task, self._settings, self._server, self._hooks = plan, task, settings, server, hooks
        self._index, self._leaves = hooks.index, False

    def end(self, session, progress, stopwatch):
        """Ends the training of this worker after its last call.

        Returns:
          An `Outcome`; None if the chief has to train again: a ps has died meanwhile, and updates are lost.
        """
        interruption = self._hooks.interruption
        self._leaves = interruption.leaves
        if interruption.requested and not self._leaves:
            return self._stop(session)
        report = self._stop_training(session, progress, stopwatch)
        if self._leaves:
            return self._leave(session, report)
        interruption.report = report
        return self._finish(session, report, progress) if self._index == 0 else self._wait(session, report)

    def after_session(self, outcome):
        """Closes the files of this worker and tells the ps that it is done; after a stop, the chief has told them."""
        if outcome.status == STOPPED:
            return
        self._hooks.close()
        if self._settings.run.num_evaluators and self._index == 0:
            Path(self._settings.run_dir, ENDED).touch()  # now that the last checkpoint is saved
        if self._task and self._leaves:
            membership.say_left(self._task, self._server)
        elif self._task:
            self._say_done(outcome)

    def _stop(self, session):
        """After Ctrl-C: leaving the session saves a checkpoint."""
        hooks, is_chief = self._hooks, self._index == 0
        hooks.close_callback()
        if is_chief and self._task:
            membership.say_done_for(self._task, self._server, hooks.rendezvous.absent(session))
        return Outcome(STOPPED, session.run(self._plan.final) if is_chief else None)

    def _stop_training(self, session, progress, stopwatch):
        """Ends the part of this worker, so that the others no longer wait for it; returns its report, see `result.REPORT`."""
        hooks, leaves = self._hooks, self._leaves
        doing("ending", whom=nobody)
        seconds, stop_step = stopwatch.end(session, progress)
        if not leaves:
            hooks.interruption.training_ends()
        if hooks.meeting and leaves:
            self._leave_others(session)
        elif hooks.meeting:
            session.run_step_fn(lambda step_context: hooks.meeting.leave(step_context.session))
        hooks.metrics.flush()
        if leaves:
            hooks.log.write(stop_step, left=True)
        report = [self._index, *seconds, *hooks.metrics.totals(), *hooks.metrics.seconds_of_parts()]
        return [*report, time.monotonic() - self._settings.run.began, hooks.log.now() if leaves else 0.0]

    def _leave(self, session, report):
        """Leaves for good."""
        plan, hooks = self._plan, self._hooks
        session.run(plan.farewell)
        run_folder.write_left(self._settings.run_dir, self._index, report)
        hooks.rendezvous.leave(session, report)
        hooks.entered.has_left = True
        if hooks.meeting:
            self._leave_others(session)
        say_left(self._index, self._settings, report)
        return Outcome(status_of_leaving())

    def _leave_others(self, session):
        """Lets this worker leave the synchronization; if it owes a gradient, after one more round."""
        while session.run_step_fn(lambda step_context: self._hooks.meeting.goes(step_context.session)):
            run_rounds(session, self._plan, self._hooks.log, self._plan.last)  # at the last step a call has one round

    def _wait(self, session, report):
        """Waits for the chief to dismiss this worker."""
        doing("waiting until all workers have ended", waits=True, whom=lambda: ["worker 0"])
        self._hooks.rendezvous.wait(session, report)
        return Outcome(0)

    def _finish(self, session, report, progress):
        """The chief's: gathers all reports and evaluates. Returns None if a ps has died meanwhile, and updates are lost."""
        plan, hooks = self._plan, self._hooks
        if plan.gate:  # otherwise workers at the gate would wait for ever
            for_all = bool(self._settings.max_workers)
            session.run_step_fn(lambda step_context: plan.gate.close(step_context.session, for_all))
        whom = hooks.rendezvous and hooks.rendezvous.missing
        doing("waiting until the other workers have ended", waits=True, whom=whom)
        reports = hooks.rendezvous.gather(session, report) if self._task else [report]
        hooks.stop_listening()
        doing("evaluating the final parameters", whom=nobody)
        if progress.must_repeat(session) and not hooks.meeting:
            return None
        session.run_step_fn(lambda step_context: self._save(step_context.session))
        counts = session.run([plan.keeper.samples, plan.keeper.dropped]) if plan.keeper else (None, None)
        rows = session.run(plan.rows)
        outcome = Outcome(0, session.run(plan.final), reports, hooks.evaluation.evaluate(session), rows, *counts)
        if self._task:
            outcome = outcome._replace(given_up=sorted(hooks.rendezvous.given_up))
            hooks.rendezvous.dismiss(session)
        return outcome

    def _save(self, opened):
        plan = self._plan
        if plan.keeper:
            plan.keeper.save(opened)
        else:
            plan.scaffold.saver.save(opened, str(Path(self._settings.run_dir, "checkpoints", "model.ckpt")), plan.step)

    def _say_done(self, outcome):
        """Tells the ps that this worker is done; the chief also on behalf of workers that have left, and of free places."""
        doing("telling the ps that it is done")
        there = [] if outcome.reports is None else [int(report[0]) for report in outcome.reports if not report[-1]]
        absent = [i for i in range(self._task.num_workers) if self._index == 0 and i not in there]
        membership.say_done(self._task, self._server, absent)
