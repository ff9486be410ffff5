"""Session calls of a worker: the rounds in each, their number, and the schedule of timed calls."""

import contextlib
import time
from typing import Any, NamedTuple

from common import tf
from common.core import UserError
from common.scheme import (
    LocalParameters,
    Ring,
    Together,
    build_rounds,
    check_rates,
    hyperparameters,
    repeat_rounds,
    size_of,
    timed_rounds,
)
from common.training.sample_counts import last_step

# After LONG_RUN calls, each call takes about LONG_CALL_SECS: see `repeat_rounds`.
LONG_RUN = 2000
LONG_CALL_SECS = 0.25
LEAST_TIMED = 50  # a run shorter than this many timed calls times none


def run_rounds(session, plan, log, step):
    """Runs the rounds of the next call and returns their `Rounds`.

    Args:
      session: the worker's session.
      plan: a `Plan`.
      log: the worker's `MetricsLog`.
      step: the present global step, for `Plan.next_call`.

    Raises:
      TrainingFailed: if they are not finite.
    """
    fetches, *feeds = plan.next_call(step)
    counted = plan.keeper.clock.call(id(fetches)) if plan.keeper else contextlib.nullcontext()
    with log.failing(lambda: session.run(plan.step)), counted:
        return session.run(fetches, *feeds)


class Calls(NamedTuple):
    """The session calls of a worker.

    Attributes:
      last: the global step to stop at.
      next_call: the function that chooses the rounds, see `plan.Plan.next_call`.
      rounds_per_call: the number of rounds in a normal call.
      local_steps: the approximate number of local steps of this worker.
      size: the `common.scheme.RoundSize`.
    """

    last: int
    next_call: Any
    rounds_per_call: int
    local_steps: float
    size: Any


def build_calls(scheme, center, local, settings, num_samples):
    """Builds the rounds of a normal call, and one round; for a long run also a loop whose length adapts to 0.25 s per call.

    Returns:
      `Calls`.
    """
    hp = hyperparameters(settings, center, local)
    one = build_rounds(scheme, center, local, hp)
    size, waits = size_of(center, local, settings.batch_size), center.waits(local)
    _check_pace(scheme, waits, settings.run.pace)
    last = last_step(settings, num_samples, size.samples_per_update)
    if center.schedule is not None:  # rebuilt, as the learning rates depend on the last step, known only from the round
        center.schedule.ask = lambda: last
        one = build_rounds(scheme, center, local, hp)
    check_rates(center, last)
    # Number of workers with updates of their own; 1 if an update takes all of them.
    are_together = isinstance(waits, Together) and local.begin_workers is not None
    at_once = 1 if size.gradients_per_update > 1 or are_together else local.num_workers
    in_ring = isinstance(waits, Ring)

    def build(rounds):
        if in_ring:  # a round with `steps_per_call` is itself a loop of that many steps
            built = build_rounds(scheme, center, local, hp.but(steps_per_call=rounds))
            if int(built.steps.shape[0]) == rounds * size.updates:
                return built
        return build_rounds(scheme, center, local, hp, rounds)

    most = rounds_of_call(settings, local.model, size, at_once, last, in_ring)
    is_long = last > 10 * LONG_RUN * at_once * most * size.updates and not (settings.seconds and settings.seconds <= 60)
    if is_long and in_ring and local.model.size < 20_000 and not settings.rounds_per_call and not settings.delays:
        most *= 10  # fixed, not adapted by a clock, as all workers must make the same calls
    many, step = build(most) if most > 1 else one, at_once * most * size.updates  # `step`: of the global step, in a call
    loop_call = None
    if is_long and not in_ring and "/job:ps" in center.step.device:
        times = tf.placeholder(tf.int32, [], "times")
        loop_call = repeat_rounds(scheme, center, local, hp, most, times)
    few = 2 if most > 1 else 1  # rounds of a timed call
    timed_step, timed = at_once * few * size.updates, None
    if last >= LEAST_TIMED * timed_step and isinstance(local, LocalParameters):  # not several workers in one
        timed = timed_rounds(scheme, center, local, hp, few)
    calls, factor, began, turn = 0, 1, time.monotonic(), _Turn(in_ring)

    def next_call(present):
        nonlocal calls, factor, began
        now = time.monotonic()
        calls, began, taken = calls + 1, now, now - began
        if timed and turn.is_it(calls, now, taken) and present + timed_step <= last:
            return (timed,)
        if loop_call and calls > LONG_RUN:
            if not settings.rounds_per_call:
                factor = 2 * factor if taken < LONG_CALL_SECS / 2 else max(1, factor // 2) if taken > LONG_CALL_SECS else factor
            if present + factor * step <= last:
                return loop_call, {times: factor}
        # Towards the end one round per call: the smallest overshoot of the last step without a lock.
        return (many if present + step <= last else one,)

    return Calls(last, next_call, most, float(last * size.steps_per_update / at_once), size)


# A worker of fewer calls has fewer rounds per call, as building one round takes as long as a hundred calls.
SHORT_RUN = 100


def rounds_of_call(settings, model, size, at_once, last, in_ring=False):
    """Returns the number of rounds in a worker's call.

    Args:
      settings: all flags.
      model: a `common.models.Model`.
      size: the `common.scheme.RoundSize`.
      at_once: number of workers with updates of their own.
      last: global step to end at.
      in_ring: whether the workers average among themselves (all-reduce).
    """
    own = last // (size.updates * at_once)  # rounds of this worker in the whole run
    most = settings.rounds_per_call or rounds_worth_a_call(model, size, in_ring)
    if not settings.rounds_per_call and not in_ring:
        own //= SHORT_RUN
    return min(most, max(1, own))


def rounds_worth_a_call(model, size, in_ring=False):
    """Returns the default number of rounds per call, for rounds of this `common.scheme.RoundSize`.

    The overhead of a call is about a round of a small model. It is small beside a larger model, a model applied at each place
    of a sequence, or many local steps, while each further window enlarges the graph and its preparation time, most of all a
    loop of several steps.
    """
    if in_ring:
        return 50 if model.size < 1_000_000 else 10
    most = 10 if size.local_steps == size.windows else 5
    return max(1, min(most // size.windows, int(400 // size.local_steps))) if is_small(model) else 1


def is_small(model):
    """Returns whether a local step takes about as long as TensorFlow's overhead."""
    return model.size * model.places < 1_000_000


def delay_of(delays, index):
    """Returns this worker's delay in seconds, from `--delays`, milliseconds of some workers."""
    return delays[index] / 1000 if delays and index < len(delays) else 0.0


class _Turn:
    """Schedule of timed calls: the second call, to prepare the graph, the third, then a few.

    Timed calls train, too, but a call of two rounds takes longer than two rounds of a longer call: this schedule slows HogWild,
    DOWNPOUR and all-reduce by about 1 % on the digits, measured on busy cores.

    Args:
      in_ring: whether all workers must time the same calls; the schedule then cannot depend on the clock.
    """

    def __init__(self, in_ring):
        self._in_ring, self._is_now, self._first, self._next = in_ring, False, 0.0, 0.0

    def is_it(self, calls, now, taken):
        """Returns whether to time the call with this number, from 1; `taken` is the duration of the previous one in seconds."""
        if self._in_ring or calls <= 3:
            self._first = now
            return calls in (2, 3, 10) or calls % 40 == 0  # a call has 50 rounds
        if self._is_now or calls == 4:
            self._next = now + max(1.0, 20 * taken, (now - self._first) / 100)
        self._is_now = now >= self._next
        return self._is_now


def _check_pace(scheme, waits, pace):
    """Raises a `UserError` if `pace` in the scheme's script contradicts the synchronization of the scheme."""
    right = waits.pace if waits else "own"
    if pace != right:
        raise UserError(f'{scheme.__name__}: its script must say Scheme(..., pace="{right}"), not "{pace}"')
