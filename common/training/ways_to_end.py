"""The ways in which a worker's training ends: stopped, left for good, dismissed by the chief, or finished as the chief."""

import contextlib
import os
import time

from common.cluster import membership
from common.core import doing, nobody, run_folder, status_of_leaving
from common.training.interruption import say_left
from common.training.plan import Outcome


class Ending:
    """The end of a worker's training.

    Args:
      plan: a `Plan`.
      task: a `common.cluster.TaskSpecDef` of a worker, or None.
      settings: all flags.
      server: this task's `tf.train.Server`, or None.
      parts: the worker's `Parts`.
      checkpoints: folder of the checkpoints.
    """

    def __init__(self, plan, task, settings, server, parts, checkpoints):
        self._plan, self._task, self._settings, self._server = plan, task, settings, server
        self._parts, self._checkpoints, self._index = parts, checkpoints, task.shard_index if task else 0

    def stop(self, session):
        """After Ctrl-C: leaving the session saves a checkpoint."""
        parts, is_chief = self._parts, self._index == 0
        parts.close_callback()
        if is_chief and self._task:
            membership.say_done_for(self._task, self._server, parts.rendezvous.absent(session))
        return Outcome(130, session.run(self._plan.final) if is_chief else None)

    def report(self, session, length, stopwatch, leaves):
        """Ends the training of this worker, which no other one waits for any more; returns its report, see `result.REPORT`."""
        parts = self._parts
        doing("ending", whom=nobody)
        seconds, stop_step = stopwatch.end(session, length)
        if not leaves:
            parts.interruption.training_ends()
        if parts.meeting and leaves:
            self._leave_others(session)
        elif parts.meeting:
            session.run_step_fn(lambda step_context: parts.meeting.leave(step_context.session))
        parts.metrics.flush()
        if leaves:
            parts.log.write(stop_step, left=True)
        report = [self._index, *seconds, *parts.metrics.totals(), *parts.metrics.seconds_of_parts()]
        return [*report, time.monotonic() - self._settings.began, parts.log.now() if leaves else 0.0]

    def leave(self, session, report):
        """Leaves for good."""
        plan, parts = self._plan, self._parts
        session.run(plan.farewell)
        run_folder.write_left(self._settings.run_dir, self._index, report)
        parts.rendezvous.leave(session, report)
        session.run(plan.farewell)  # repeated, as a ps restarted meanwhile has registered this worker again
        if parts.meeting:
            self._leave_others(session)
        say_left(self._index, self._settings, report)
        return Outcome(status_of_leaving())

    def _leave_others(self, session):
        """Lets this worker leave the synchronization; if it owes a gradient, after one more round."""
        while session.run_step_fn(lambda step_context: self._parts.meeting.goes(step_context.session)):
            run_rounds(session, self._plan, self._parts.log, self._plan.last)  # at the last step a call has one round

    def wait(self, session, report):
        """Waits for the chief to dismiss this worker."""
        doing("waiting until all workers have ended", waits=True, whom=lambda: ["worker 0"])
        self._parts.rendezvous.wait(session, report)
        return Outcome(0)

    def finish(self, session, report, length):
        """The chief's: gathers all reports and evaluates. Returns None if a ps has died meanwhile, and updates are lost."""
        plan, parts = self._plan, self._parts
        if plan.gate:  # otherwise workers at the gate would wait for ever
            for_all = bool(self._settings.max_workers)
            session.run_step_fn(lambda step_context: plan.gate.close(step_context.session, for_all))
        whom = parts.rendezvous and parts.rendezvous.missing
        doing("waiting until the other workers have ended", waits=True, whom=whom)
        reports = parts.rendezvous.gather(session, report) if self._task else [report]
        parts.stop_listening()
        doing("evaluating the final parameters", whom=nobody)
        if not (length.is_still_over(session) or parts.meeting):
            return None
        session.run_step_fn(lambda step_context: self._save(step_context.session))
        counts = session.run([plan.keeper.samples, plan.keeper.dropped]) if plan.keeper else (None, None)
        rows = session.run(plan.rows[:1])
        outcome = Outcome(0, session.run(plan.final), reports, parts.evaluation.evaluate(session), rows, *counts)
        if self._task:
            outcome = outcome._replace(given_up=sorted(parts.rendezvous.given_up))
            parts.rendezvous.dismiss(session)
        return outcome

    def _save(self, opened):
        plan = self._plan
        if plan.keeper:
            plan.keeper.save(opened)
        else:
            plan.scaffold.saver.save(opened, os.path.join(self._checkpoints, "model.ckpt"), plan.step)

    def tell_ps(self, outcome, leaves):
        """Tells the ps that this worker is done; the chief also on behalf of workers that have left, and of free places."""
        task = self._task
        if not task:
            return
        if leaves:
            membership.say_left(task, self._server)
            return
        doing("telling the ps that it is done")
        there = [] if outcome.reports is None else [int(report[0]) for report in outcome.reports if not report[-1]]
        membership.say_done(task, self._server, [i for i in range(task.num_workers) if self._index == 0 and i not in there])


def run_rounds(session, plan, log, present):
    """Runs the rounds of the next call and returns their `Rounds`. Raises a `TrainingFailed` if they are not finite."""
    fetches, *feeds = plan.next_call(present)
    counted = plan.keeper.clock.call(id(fetches)) if plan.keeper else contextlib.nullcontext()
    with log.failing(lambda: session.run(plan.step)), counted:
        return session.run(fetches, *feeds)
