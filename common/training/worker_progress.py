"""Progress of a worker: its present step, the end of its training, and the times for its report."""

import math

from common import tf
from common.core import UserError, times
from common.scheme import Rounds
from common.training.sample_counts import updates_before


class WorkerProgress:
    """The present step of a worker, and the end of its training: a global step, samples, seconds, or a request to stop.

    Args:
      plan: a `Plan`.
      settings: all flags.
      hooks: the `WorkerHooks`.

    Attributes:
      step: the newest global step that this worker knows.
      last: the global step to end at; a lower bound while updates have an unknown number of samples.
      calls: number of calls so far.
      rounds: the `Rounds` of the last call.
    """

    def __init__(self, plan, settings, hooks):
        self._plan, self._settings, self._hooks = plan, settings, hooks
        self.step, self.last, self.calls, self.rounds = 0, plan.last, 0, Rounds(None, None, None)
        self._is_stopped = self._is_late = False  # whether training ends before the last step, and whether by --seconds

    def begin(self, session):
        """Reads the global step and the samples so far.

        Raises:
          UserError: if a resumed run had another batch size or window, and a schedule would not end with the run.
        """
        plan = self._plan
        self.step = session.run(plan.step)
        self._most_seconds = (self._settings.seconds or math.inf) + (0 if plan.keeper else self._plan.seconds())
        if plan.keeper:
            self._begin_counting(session)
        if self._hooks.index > 0 and plan.gate and not session.run(plan.gate.variable):
            self.step = self.last  # training ended before this worker started

    def _begin_counting(self, session):
        plan, settings = self._plan, self._settings
        self._samples_before = session.run(plan.keeper.samples_before)
        fewer = updates_before(self._samples_before, settings, plan.size.samples_per_update)
        if fewer and (settings.learning_rate_schedule or settings.warmup_steps):
            raise UserError(
                "--resume: this run trained with another --batch_size or --window, so the learning-rate schedule would not "
                f"end with the run: give the same ones, or --steps={self.last - fewer}"
            )
        self.last -= fewer
        if plan.goal is not None:
            self._counted = session.run(plan.keeper.samples)
            self.last = self._last_of(self._counted, plan.size.gradients_per_update)
        self._hooks.log.last_step = self.last

    @property
    def step_of_plan(self):
        """The present step as `Plan.next_call` counts it, up to `Plan.last`."""
        return self.step + self._plan.last - self.last

    @property
    def _has_ended(self):
        return bool(self.step >= self.last or self._is_stopped)

    def should_stop(self, session):
        """Whether this worker makes no further call. Workers that stop by vote train on until all have voted."""
        if self._has_ended:
            return True
        hooks = self._hooks
        is_late = self._is_over_time(session)
        is_asked = hooks.interruption.requested or hooks.early_stopping and hooks.early_stopping.requested
        if is_late or is_asked:
            self._is_stopped = hooks.meeting is None or not hooks.meeting.vote(session)
            self._is_late = self._is_stopped and not is_asked
        return self._is_stopped

    def _is_over_time(self, session):
        if self._plan.seconds() < self._most_seconds:
            return False
        if self._plan.keeper:
            session.run(self._plan.step)  # the last call may not have counted
        return self._plan.seconds() >= self._most_seconds

    def must_repeat(self, session):
        """Whether updates, or seconds of training, were lost with a ps after the end."""
        plan = self._plan
        self.step = session.run(plan.step)
        if self._is_late and plan.keeper:
            self._is_stopped = session.run(plan.keeper.clock.told)[0] >= self._most_seconds
        return not self._has_ended

    def count(self, rounds):
        """Counts a call that has ended, from its `Rounds`."""
        plan, before = self._plan, self.step
        self.rounds, self.calls = rounds, self.calls + 1
        self.step, self._is_stopped = rounds.steps[-1, 1], rounds.training_ended
        if plan.goal is None:
            return
        now, gradients = self._samples_before + times(rounds.local_steps[1], plan.keeper.samples_per_update), 1
        if plan.waits and self.step > before:  # as in the last call
            gradients = max(1, round((now - self._counted) / (self.step - before) / plan.size.samples_per_gradient))
        self._counted, self.last = now, self._last_of(now, gradients)
        self._hooks.log.last_step = self.last

    def _last_of(self, samples, gradients):
        """Returns the present step + remaining samples / samples per update, rounded up."""
        left = math.ceil(max(0, self._plan.goal - int(samples)) / (self._plan.size.samples_per_gradient * gradients))
        return int(self.step) + left


class Stopwatch:
    """Times and steps of a worker's training, for its report. Calls that prepare a graph do not count.

    Args:
      plan: a `Plan`.
    """

    def __init__(self, plan):
        self._updates = plan.step  # or the same unit, to measure the speed
        if plan.size.counted != "updates":
            self._updates = tf.cast(plan.keeper.samples, tf.float64) / float(plan.size.samples_per_gradient)
        self._clock, self._step = plan.keeper and plan.keeper.clock, plan.step
        self._seconds = plan.seconds

    def begin(self, session):
        """Starts the measurement, or starts it again."""
        self._first_step, self._first_time = session.run(self._updates), self._seconds()

    def start_clock(self):
        """Starts the clock of the parameters' training."""
        if self._clock:
            self._clock.is_training = True

    def before_call(self, session, progress):
        """Starts the measurement again after a call that prepared its graph: the first, and the first timed one."""
        if progress.calls == 1 or progress.calls == 2 and progress.rounds.parts:
            self.begin(session)

    def end(self, session, progress):
        """Returns first time, first step and last time for `result.REPORT`, and the global step."""
        stop_time = self._seconds()
        if self._clock:
            self._clock.is_training = False
        stop_step = session.run(self._step)
        if progress.calls > 1:  # the first call does not count
            stop_time = self._seconds()
        return [self._first_time, self._first_step, stop_time], stop_step
