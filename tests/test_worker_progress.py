"""The end of a worker's training: by steps, samples, seconds, a request or a vote, and again after a ps was lost."""

import types
from typing import Any
from unittest import mock

import pytest

from common.core import UserError
from common.scheme import RoundSize
from common.training.plan import Plan
from common.training.worker_progress import WorkerProgress


class Told:
    """What the ps has: a session that returns these values by name."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def run(self, fetch):
        return getattr(self, fetch)


class Clock:
    told, now = "told", 0.0

    def seconds(self):
        return self.now


def settings(**changes):
    values = dict.fromkeys(("seconds", "learning_rate_schedule", "warmup_steps", "steps"))
    values |= {"batch_size": 8, "window": 1}
    return types.SimpleNamespace(**values | changes)


def hooks(index=0, meeting=None):
    return types.SimpleNamespace(
        index=index,
        meeting=meeting,
        early_stopping=types.SimpleNamespace(requested=False),
        interruption=types.SimpleNamespace(requested=False),
        log=types.SimpleNamespace(last_step=None),
    )


def plan(**changes):
    keeper = types.SimpleNamespace(clock=Clock(), samples_before="before", samples="samples", samples_per_update=8)
    values: dict[str, Any] = {"last": 100, "step": "step", "keeper": keeper, "size": RoundSize(batch_size=8)} | changes
    return Plan(next_call=None, evaluation=None, final=None, scaffold=None, **values)


def call_until(step, local_steps=0, ended=False):
    """The `Rounds` of a call that ended at this step."""
    return types.SimpleNamespace(steps={(-1, 1): step}, training_ended=ended, local_steps=[0, local_steps], parts=None)


def begun(found, ps):
    progress = WorkerProgress(plan(), found, hooks())
    progress.begin(ps)
    return progress


@pytest.fixture
def ps():
    return Told(step=0, before=0, samples=0, told=(0.0, 7))


def test_ends_at_the_last_step(ps):
    progress = begun(settings(), ps)
    assert not progress.should_stop(ps) and progress.step_of_plan == 0
    progress.count(call_until(99))
    assert not progress.should_stop(ps)
    progress.count(call_until(100))
    assert progress.should_stop(ps) and progress.calls == 2


def test_ends_by_seconds_once_the_last_call_counts(ps):
    found = plan()
    progress = WorkerProgress(found, settings(seconds=3), hooks())
    progress.begin(ps)
    found.keeper.clock.now = 3.0

    def counts_the_last_call(fetch):
        found.keeper.clock.now = 2.9  # less than its time
        return 5

    ps.run = counts_the_last_call
    assert not progress.should_stop(ps)
    found.keeper.clock.now = 3.0
    ps.run = lambda fetch: 5
    assert progress.should_stop(ps)


@pytest.mark.parametrize(("seconds_on_ps", "again"), [(2.5, True), (3.0, False)])
def test_seconds_that_a_ps_lost_are_repeated(ps, seconds_on_ps, again):
    found = plan()
    progress = WorkerProgress(found, settings(seconds=3), hooks())
    progress.begin(ps)
    found.keeper.clock.now = 3.0
    assert progress.should_stop(ps)
    ps.told = seconds_on_ps, 8
    assert progress.must_repeat(ps) == again
    found.keeper.clock.now = seconds_on_ps
    assert progress.should_stop(ps) != again


@pytest.mark.parametrize(("step", "again"), [(99, True), (100, False)])
def test_updates_that_a_ps_lost_are_repeated(ps, step, again):
    progress = begun(settings(), ps)
    progress.count(call_until(100))
    ps.step = step
    assert progress.must_repeat(ps) == again


@pytest.mark.parametrize("asks", ["interruption", "early_stopping"])
def test_a_request_ends_it_for_good(ps, asks):
    found, own = plan(), hooks()
    progress = WorkerProgress(found, settings(seconds=3), own)
    progress.begin(ps)
    getattr(own, asks).requested = True
    found.keeper.clock.now = 3.0
    assert progress.should_stop(ps)
    assert not progress.must_repeat(ps)  # the user wants no more


def test_with_a_vote_it_ends_when_all_have_voted(ps):
    meeting = mock.Mock()
    meeting.vote.return_value = True
    own = hooks(meeting=meeting)
    progress = WorkerProgress(plan(), settings(), own)
    progress.begin(ps)
    own.interruption.requested = True
    assert not progress.should_stop(ps)
    meeting.vote.assert_called_once_with(ps)
    progress.count(call_until(10, ended=True))
    assert progress.should_stop(ps)


def test_a_worker_that_comes_after_the_end_makes_no_call(ps):
    ps.open = False
    progress = WorkerProgress(plan(gate=types.SimpleNamespace(variable="open")), settings(), hooks(index=1))
    progress.begin(ps)
    assert progress.should_stop(ps)


def test_the_last_step_follows_the_samples_of_updates(ps):
    """Updates of fewer gradients than at first: more of them are needed until the goal."""
    own, waits = hooks(), object()
    found = plan(goal=800, waits=waits, size=RoundSize(batch_size=8, gradients_per_update=2))
    progress = WorkerProgress(found, settings(), own)
    progress.begin(ps)
    assert progress.last == 50 == own.log.last_step
    progress.count(call_until(10, local_steps=20))
    assert progress.last == 50  # ten updates of two gradients
    progress.count(call_until(20, local_steps=30))
    assert progress.last == 20 + (800 - 30 * 8) // 8 == own.log.last_step  # of one gradient


def test_samples_of_another_batch_size_count(ps):
    ps.before, ps.step = 160, 10
    found = plan()
    progress = WorkerProgress(found, settings(), hooks())
    progress.begin(ps)
    assert progress.last == 80 and progress.step_of_plan == 30
    with pytest.raises(UserError, match="--steps=80"):
        WorkerProgress(found, settings(warmup_steps=5), hooks()).begin(ps)
