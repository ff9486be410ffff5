"""Length of a worker's training: when it ends, and the times for the worker's report."""

import math
import time

from common import tf
from common.core import UserError, times
from common.scheme import Rounds
from common.training.sample_counts import updates_before


class Length:
    """The end of training for this worker: a global step, a number of samples, seconds, or a request to stop.

    Args:
      plan: a `Plan`.
      settings: all flags.
      parts: the worker's `Parts`.

    Attributes:
      present: the newest global step that this worker knows.
      last: the global step to end at; a lower bound while updates have an unknown number of samples.
      has_ended: whether training ended otherwise than by `last`.
      calls, rounds: number of calls so far, and the `Rounds` of the last one.
    """

    def __init__(self, plan, settings, parts):
        self._plan, self._settings, self._parts = plan, settings, parts
        self._of_gradient = plan.samples_per_gradient or settings.batch_size
        self._seconds = plan.keeper.clock.seconds if plan.keeper else time.monotonic
        self.present, self.last, self.has_ended, self._has_ended_by_time = 0, plan.last, False, False
        self.calls, self.rounds = 0, Rounds(None, None, None)

    def begin(self, session):
        """Reads the global step and the samples so far.

        Raises:
          UserError: if a resumed run had another batch size or window, and a schedule would not end with the run.
        """
        plan, settings = self._plan, self._settings
        self.present = session.run(plan.step)
        self._most_seconds = (settings.seconds or math.inf) + (0 if plan.keeper else self._seconds())
        if plan.keeper:
            self._begin_counting(session)
        if self._parts.index > 0 and plan.gate and not session.run(plan.gate.variable):
            self.present = self.last  # training ended before this worker started

    def _begin_counting(self, session):
        plan, settings = self._plan, self._settings
        self._samples_before = session.run(plan.keeper.samples_before)
        fewer = updates_before(self._samples_before, settings, self._of_gradient * plan.gradients_per_update)
        if fewer and (settings.learning_rate_schedule or settings.warmup_steps):
            raise UserError(
                "--resume: this run trained with another --batch_size or --window, so the learning-rate schedule would not "
                f"end with the run: give the same ones, or --steps={self.last - fewer}"
            )
        self.last -= fewer
        if plan.goal is not None:
            self._counted = session.run(plan.keeper.samples)
            self.last = self._last_of(self._counted, plan.gradients_per_update)
        self._parts.log.last_step = self.last

    @property
    def scheduled(self):
        """The present global step as `Plan.next_call` counts it, up to `Plan.last`."""
        return self.present + self._plan.last - self.last

    @property
    def is_reached(self):
        """Whether training has ended, by its length or otherwise."""
        return bool(self.present >= self.last or self.has_ended)

    def is_over(self, session):
        """Looks at clock and requests; returns `is_reached`. Workers that stop by vote train on until all have voted."""
        if self.is_reached:
            return True
        parts = self._parts
        must_stop = parts.interruption.requested or parts.early_stopping and parts.early_stopping.requested
        if self._is_late(session) or must_stop:
            self.has_ended = parts.meeting is None or not parts.meeting.vote(session)
            self._has_ended_by_time = self.has_ended and not must_stop
        return self.has_ended

    def is_still_over(self, session):
        """Whether the parameters have not gone back before the end: not if updates or seconds were lost with a ps."""
        self.present = session.run(self._plan.step)
        if self._has_ended_by_time and self._plan.keeper:
            self.has_ended = session.run(self._plan.keeper.clock.told)[0] >= self._most_seconds
        return self.is_reached

    def _is_late(self, session):
        if self._seconds() >= self._most_seconds and self._plan.keeper:
            session.run(self._plan.step)  # the last call may not have counted
        return self._seconds() >= self._most_seconds

    def add(self, rounds):
        """Counts a call that has ended."""
        before, self.rounds, self.calls = self.present, rounds, self.calls + 1
        self.present, self.has_ended = rounds.steps[-1, 1], rounds.training_ended
        plan = self._plan
        if plan.goal is not None:
            now, gradients = self._samples_before + times(rounds.local_steps[1], plan.keeper.samples_per_update), 1
            if plan.waits and self.present > before:  # as in the last call
                gradients = max(1, round((now - self._counted) / (self.present - before) / self._of_gradient))
            self._counted, self.last = now, self._last_of(now, gradients)
            self._parts.log.last_step = self.last

    def _last_of(self, samples, gradients):
        """Returns the present step + remaining samples / samples per update, rounded up."""
        left = math.ceil(max(0, self._plan.goal - int(samples)) / (self._plan.samples_per_gradient * gradients))
        return int(self.present) + left


class Stopwatch:
    """Times and steps of a worker's training, for its report. Calls that prepare a graph do not count.

    Args:
      plan: a `Plan`.
      settings: all flags.
    """

    def __init__(self, plan, settings):
        of_gradient = plan.samples_per_gradient or settings.batch_size
        is_dynamic = plan.keeper is not None and plan.keeper.is_of_local_steps
        # In updates, to measure the speed.
        self._progress = tf.cast(plan.keeper.samples, tf.float64) / float(of_gradient) if is_dynamic else plan.step
        self._clock, self._step = plan.keeper and plan.keeper.clock, plan.step
        self._seconds = self._clock.seconds if self._clock else time.monotonic

    def begin(self, session):
        """Notes the beginning, or a later one."""
        self.first_step, self.first_time = session.run(self._progress), self._seconds()

    def runs(self):
        """Starts the clock of the parameters' training, or starts it again."""
        if self._clock:
            self._clock.is_training = True

    def before_call(self, session, length):
        """Notes a later beginning after a call that has prepared its graph: the first, and the first timed one."""
        if length.calls == 1 or length.calls == 2 and length.rounds.parts:
            self.begin(session)

    def end(self, session, length):
        """Returns the entries of `result.REPORT` on time, and the global step."""
        stop_time = self._seconds()
        if self._clock:
            self._clock.is_training = False
        stop_step = session.run(self._step)
        if length.calls > 1:  # the first call does not count
            stop_time = self._seconds()
        return [self.first_time, self.first_step, stop_time], stop_step
