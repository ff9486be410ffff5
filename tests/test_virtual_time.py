"""common/simulation/virtual_time.py: laws that are known, and what a run can do to its workers."""

import dataclasses
import math

import numpy as np
import pytest

from common.simulation.actions import Action, Costs, Waiting
from common.simulation.virtual_time import RESTART, VirtualTime

SIZE = 100_000  # bytes of a model
PULL, TRAIN, PUSH = Action(reads=True, down=SIZE), Action(local_steps=1), Action(writes=True, up=SIZE)
ALONE = [PULL, TRAIN, PUSH]
OVERLAP = [PULL._replace(ahead=True), TRAIN, PUSH]
ELASTIC = [Action(local_steps=10), PULL, PUSH]
TOGETHER = [PULL, TRAIN, PUSH, Action(waits=True)]
PACED = [Action(waits=True), PULL, TRAIN, PUSH, Action(ticks=True)]
STEP = 0.01


@pytest.mark.parametrize("latency", [0, 0.003])
def test_equal_workers_have_a_staleness_of_n_minus_1(latency):
    schedule = VirtualTime(ALONE, 7, Costs(step=STEP, latency=latency)).run(updates=100)
    assert schedule.staleness()[10:].tolist() == [6] * 90


def test_one_worker_alone_takes_its_steps_and_round_trips():
    time = VirtualTime(ALONE, 1, Costs(step=STEP, latency=0.002, bandwidth_up=1e7, bandwidth_down=2e7))
    schedule = time.run(updates=10)
    # A request, and then for each update the parameters, a step, the gradient; a pull follows on the ps on the push before.
    of_round = 0.002 + SIZE / 2e7 + STEP + SIZE / 1e7 + 0.002
    assert time.now == pytest.approx(0.002 + 10 * of_round)
    assert schedule.staleness().tolist() == [0] * 10


@pytest.mark.parametrize("latency, of_round", [(0.002, STEP), (0.005, STEP), (0.02, (2 * 0.02 + STEP) / 2)])
def test_overlap_waits_for_half_of_what_is_left(latency, of_round):
    """A worker needs what a pull asks for one round later: two round trips and steps share the time of one."""
    time = VirtualTime(OVERLAP, 1, Costs(step=STEP, latency=latency))
    time.run(updates=10)
    begun = time.now
    schedule = time.run(updates=110)
    assert time.now - begun == pytest.approx(100 * of_round)
    assert schedule.staleness().tolist() == [0] * 100


def test_with_overlap_a_call_ends_when_all_is_there():
    time = VirtualTime(OVERLAP, 1, Costs(step=STEP, latency=0.002, rounds_per_call=1, call=0.001))
    time.run(updates=10)
    assert time.now == pytest.approx(10 * (STEP + 0.002) + 9 * (0.002 + 0.001))  # a step, a push; an answer, the call
    # Ten rounds are so many ways one after the other, see HogWild/README.md.
    for actions, ways in (ALONE, 22), (OVERLAP, 12):
        ten = VirtualTime(actions, 1, Costs(step=1e-9, latency=1.0, rounds_per_call=10))
        ten.run(updates=20)
        assert ten.now == pytest.approx(2 * ways - 1)  # without the last answer
    # What is read at the beginning of a call takes longer than its step and its push.
    slow = VirtualTime(OVERLAP, 1, Costs(step=STEP, latency=0.002, bandwidth_down=SIZE / 0.05, rounds_per_call=1, call=0.001))
    slow.run(updates=10)
    assert slow.now == pytest.approx(9 * (0.002 + 0.05 + 0.002 + 0.001) + STEP + 0.002)


@pytest.mark.parametrize("latency", [0, 0.003, 0.03])
def test_overlap_doubles_the_staleness_of_equal_workers(latency):
    schedule = VirtualTime(OVERLAP, 7, Costs(step=STEP, latency=latency)).run(updates=100)
    assert schedule.staleness()[20:].tolist() == [12] * 80


@pytest.mark.parametrize("more", [[], [PUSH, TRAIN]], ids=["pushes seldom", "neither divides the other"])
@pytest.mark.parametrize("rounds_per_call", [1, 100])
def test_a_pull_ahead_without_a_push_right_before_it_asks(more, rounds_per_call):
    """It asks as the first one of a call does; no worker waits forever for what nobody reads."""
    actions = [OVERLAP[0], TRAIN, *more, OVERLAP[0], TRAIN, PUSH]
    time = VirtualTime(actions, 3, Costs(step=STEP, latency=0.001, rounds_per_call=rounds_per_call), spans_until=9)
    schedule = time.run(updates=60)
    assert time.updates == 60
    for worker in range(3):
        trains = sorted((span.start, span.end) for span in time.spans if (span.worker, span.part) == (worker, "train"))
        assert len(trains) >= 20 and all(one[1] <= other[0] for one, other in zip(trains, trains[1:]))
        steps = schedule.steps[schedule.workers == worker]
        assert np.array_equal(steps, np.arange(len(steps)) % len(actions))


def test_workers_that_begin_late_or_anew_have_not_read_ahead():
    """They begin with what there is then."""
    late = VirtualTime(OVERLAP, 2, Costs(step=STEP, start=[0.0, 0.5])).run(updates=200)
    anew = VirtualTime(OVERLAP, 2, Costs(step=STEP, latency=0.001, away=[(1, 0.2, 0.5)])).run(updates=200)
    for schedule in late, anew:
        assert schedule.staleness().max() <= 3
        (begun,) = np.flatnonzero(schedule.steps == RESTART)
        assert schedule.times[begun] == 0.5 and schedule.workers[begun] == 1


def test_two_equal_links_take_the_time_of_one():
    """The first part of a message goes on while the rest is on the link before."""
    costs = Costs(step=STEP, bandwidth_up=1e7, bandwidth_down=1e7)
    of_one, of_two = VirtualTime(ALONE, 1, costs), VirtualTime(ALONE, 1, dataclasses.replace(costs, ps_bandwidth=1e7))
    for time in of_one, of_two:
        time.run(updates=10)
    assert of_two.now == pytest.approx(of_one.now)
    # Of ten messages at once, on links a tenth as fast as the card, the last one is there hardly later than the first.
    ten = VirtualTime(ALONE, 10, dataclasses.replace(costs, bandwidth_down=math.inf, ps_bandwidth=1e8))
    schedule = ten.run(updates=10)
    pushed = schedule.times[schedule.pulled >= 0]
    assert len(pushed) == 10 and pushed.max() - pushed.min() == pytest.approx(9 * SIZE / 1e8)
    slower = VirtualTime(ALONE, 1, dataclasses.replace(costs, ps_bandwidth=5e6))
    slower.run(updates=10)
    assert slower.now - of_one.now == pytest.approx(10 * 2 * (SIZE / 5e6 - SIZE / 1e7))


def test_the_end_of_a_call_waits_for_its_pushes():
    many, one = (VirtualTime(ALONE, 1, Costs(step=STEP, latency=0.002, rounds_per_call=k, call=0.001)) for k in (100, 1))
    many.run(updates=10)
    one.run(updates=10)
    assert one.now - many.now == pytest.approx(9 * (0.002 + 0.002 + 0.001))  # an answer, a request, the call


@pytest.mark.slow
def test_a_barrier_costs_the_mean_of_the_largest_of_n_gamma_times():
    n, cv = 50, 0.5
    time = VirtualTime(TOGETHER, n, Costs(step=STEP, step_cv=cv, latency=0.001), Waiting(quorum=n), seed=3)
    schedule = time.run(updates=2000)
    largest = np.random.default_rng(1).gamma(1 / cv**2, cv**2, [20_000, n]).max(axis=1).mean() * STEP
    assert time.now / 2000 == pytest.approx(largest + 2 * 0.001, rel=0.01)
    assert time.dropped == 0 and not np.any(schedule.staleness())


@pytest.mark.parametrize(("threshold", "made", "dropped"), [(1, 20, 120), (7, 140, 0), (math.inf, 140, 0)])
def test_gradients_that_are_too_stale_are_thrown_away(threshold, made, dropped):
    """Seven equal workers push at the same moment, twenty times; the last of them is stale by 6."""
    time = VirtualTime(ALONE, 7, Costs(step=STEP), Waiting(threshold=threshold))
    schedule = time.run(until=20.5 * STEP)
    assert (time.updates, time.dropped) == (made, dropped)
    assert schedule.staleness().max() < threshold
    pushes = schedule.pulled >= 0
    assert np.count_nonzero(schedule.updated[pushes] == schedule.pulled[pushes]) == dropped


@pytest.mark.slow
def test_means_of_gamma_times():
    """Machines and steps apart; a window of ten steps varies less than a step, by the root of ten."""
    time = VirtualTime([Action(local_steps=10), PULL, PUSH], 400, Costs(step=STEP, machine_cv=0.5, step_cv=0.3), seed=1)
    schedule = time.run(updates=40_000)
    assert np.std(time.step_means) / np.mean(time.step_means) == pytest.approx(0.5, rel=0.1)
    of_step = schedule.seconds[schedule.steps == 0] / 10 / time.step_means[schedule.workers[schedule.steps == 0]]
    assert of_step.mean() == pytest.approx(1, rel=0.01)
    assert of_step.std() == pytest.approx(0.3 / math.sqrt(10), rel=0.02)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_saturated_ps_serves_what_its_link_can_and_no_more(num_ps):
    time = VirtualTime(ALONE, 100, Costs(step=STEP, ps_bandwidth=1e8, num_ps=num_ps, latency=0.001))
    time.run(updates=5000)
    rate, most = 5000 / time.now, num_ps * 1e8 / SIZE
    assert 0.97 * most < rate < most
    few = VirtualTime(ALONE, 2, Costs(step=STEP, ps_bandwidth=1e8, num_ps=num_ps, latency=0.001))
    few.run(updates=1000)
    assert 1000 / few.now < 200


@pytest.mark.parametrize("staleness_bound", [0, 3])
def test_a_bound_of_staleness_is_never_broken_and_is_reached(staleness_bound):
    costs = Costs(step=STEP, machine_cv=0.5, step_cv=0.3)
    time = VirtualTime(PACED, 20, costs, Waiting(staleness=staleness_bound), seed=2)
    schedule = time.run(updates=4000)
    clocks, leads = np.zeros(20, int), []
    for step, worker in zip(schedule.steps, schedule.workers, strict=True):
        if step == 1:  # it has come through the wait, and reads
            leads.append(clocks[worker] - clocks.min())
        clocks[worker] += step == 4
    assert max(leads) == staleness_bound
    assert time.updates == 4000


def test_backup_workers_are_not_waited_for():
    """The time of an update is that of the (n − b)-th of n."""
    costs = Costs(step=STEP, delay=[0.0] * 9 + [0.5])
    time = VirtualTime(TOGETHER, 10, costs, Waiting(quorum=9))
    time.run(updates=100)
    assert time.now == pytest.approx(100 * STEP)
    assert time.dropped == 1  # of the slow one, by then


def test_an_elastic_exchange_asks_first():
    time = VirtualTime(ELASTIC, 1, Costs(step=STEP, latency=0.05))
    time.run(updates=10)
    # Ten local steps, a request and its answer; the worker does not wait until its push has arrived.
    assert time.now == pytest.approx(10 * (0.1 + 0.1) + 0.05)


def test_equal_seeds_are_equal_runs():
    costs = Costs(step=STEP, machine_cv=0.4, step_cv=0.4, latency=0.001, ps_bandwidth=1e9)

    def run(seed, parts):
        time = VirtualTime(ALONE, 30, costs, seed=seed)
        taken = [time.run(updates=500 * (i + 1) // parts) for i in range(parts)]
        return [np.concatenate(columns) for columns in zip(*taken, strict=True)]

    one, again, in_parts, other = run(1, 1), run(1, 1), run(1, 5), run(2, 1)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one, again, strict=True))
    assert np.array_equal(one[5][one[5] >= 0], in_parts[5][in_parts[5] >= 0])
    assert not np.array_equal(one[2][:100], other[2][:100])


def test_times_never_go_back_and_rounds_are_in_order():
    time = VirtualTime(ELASTIC, 9, Costs(step=STEP, step_cv=0.6, latency=0.02, ps_bandwidth=1e7), seed=4)
    schedule = time.run(updates=300)
    assert np.all(np.diff(schedule.times) >= 0)
    for worker in range(9):
        steps = schedule.steps[schedule.workers == worker]
        assert np.array_equal(steps, np.arange(len(steps)) % 3)


def test_what_a_worker_does_while_its_push_is_under_way_comes_after_it():
    """The push is made of what was there before. Several may be under way, and the worker goes on at its own speed."""
    for actions in ELASTIC, [Action(local_steps=10), PUSH]:
        schedule = VirtualTime(actions, 2, Costs(step=STEP, latency=0.5)).run(updates=20)
        assert np.all(np.diff(schedule.times) >= 0)
        for worker in range(2):
            steps = schedule.steps[schedule.workers == worker]
            assert np.array_equal(steps, np.arange(len(steps)) % len(actions))
    pushes = schedule.times[(schedule.workers == 0) & (schedule.steps == 1)]
    assert np.allclose(pushes, 0.5 + 10 * STEP * np.arange(1, 11))


def test_a_message_that_another_one_of_its_worker_holds_up_is_served_in_its_turn():
    """Not before the one that the ps are still busy with: its worker has no third hand."""
    actions = [Action(local_steps=1), Action(writes=True, up=8)]
    time = VirtualTime(actions, 1, Costs(step=0.01, apply=0.05))
    schedule = time.run(updates=4)
    pushes = schedule.times[schedule.steps == 1]
    assert np.allclose(pushes, 0.01 + 0.05 * np.arange(1, 5)) and np.all(np.diff(schedule.times) >= 0)


@pytest.mark.parametrize("away", [[(1, 0.1, 0.2)], [(1, 0.1, math.inf)], [(1, 0.1, 0.9)]], ids=str)
def test_a_worker_that_dies_during_the_warm_start_lives_once(away):
    time = VirtualTime(ALONE, 3, Costs(step=STEP, away=away, warm_start=50))
    schedule = time.run(until=2.0)
    own = schedule.times[(schedule.workers == 1) & (schedule.steps == 0)]
    warm = schedule.times[np.flatnonzero(schedule.updated == 50)[0]]
    since = max(warm, away[0][2])
    assert len(own) == pytest.approx(max(0.0, 2.0 - since) / STEP, abs=1.5)
    assert np.all(own >= since)


def test_a_late_worker_is_not_called_by_the_warm_start():
    time = VirtualTime(ALONE, 2, Costs(step=STEP, start=np.array([0, 1.0]), warm_start=5))
    schedule = time.run(until=2.0)
    assert schedule.times[schedule.workers == 1][0] >= 1.0


def test_a_worker_that_dies_and_comes_back():
    """The others go on; what it was doing is lost; it begins a round anew."""
    costs = Costs(step=STEP, away=[(1, 0.055, 0.2)])
    schedule = VirtualTime(ALONE, 3, costs).run(until=0.505)
    mine = schedule.workers == 1
    assert not np.any(mine & (schedule.times > 0.055) & (schedule.times < 0.2))
    back = np.flatnonzero(mine & (schedule.steps == RESTART))
    assert len(back) == 1 and schedule.times[back[0]] == 0.2
    assert schedule.steps[mine & (schedule.times >= 0.2)][:4].tolist() == [RESTART, 0, 1, 2]
    assert np.sum(mine & (schedule.steps == 2)) == 5 + 30


def test_those_that_wait_for_a_dead_worker_are_named():
    time = VirtualTime(TOGETHER, 4, Costs(step=STEP, away=[(2, 0.055, math.inf)]), Waiting(quorum=4))
    time.run(updates=100)
    assert (time.updates, time.stuck()) == (5, [0, 1, 3])
    back = VirtualTime(TOGETHER, 4, Costs(step=STEP, away=[(2, 0.055, 0.5)]), Waiting(quorum=4))
    back.run(updates=100)
    assert (back.updates, back.stuck()) == (100, [])
    assert back.now == pytest.approx(0.05 + (0.5 - 0.05) + 0.01 + 94 * STEP)


def test_a_warm_start_and_a_worker_that_joins_late():
    costs = Costs(step=STEP, warm_start=5)
    schedule = VirtualTime(ALONE, 3, costs).run(until=0.3)
    updates = schedule.workers[schedule.steps == 2].tolist()
    assert updates[:5] == [0] * 5 and set(updates) == {0, 1, 2}
    late = VirtualTime(ALONE, 3, Costs(step=STEP, start=[0, 0, 1.0])).run(until=1.5)
    assert late.times[late.workers == 2].min() == 1.0
    assert late.staleness()[-10:].tolist() == [2] * 10


def test_spans_are_what_workers_do():
    time = VirtualTime(TOGETHER, 2, Costs(step=STEP, delay=[0, STEP], latency=0.001), Waiting(quorum=2), spans_until=0.05)
    time.run(updates=10)
    fast = [span for span in time.spans if span.worker == 0]
    assert {span.part for span in fast} == {"pull", "train", "push", "wait"}
    waits = [span.end - span.start for span in fast if span.part == "wait"]
    np.testing.assert_allclose(waits, STEP)  # for the one that takes twice as long
    assert all(span.start < 0.05 for span in time.spans)
