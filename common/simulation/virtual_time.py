"""Discrete-event simulation of workers: the times of pulls, local steps and pushes, the waits, and the version of x̃ at each.

This is the simulator's clock. It needs no gradients and no parameters, only the steps of a round (`Action`) and their costs
(`Costs`). So it works for ten thousand workers, and for a model too large for any machine here. `common.simulation` runs the
scheme's own operations in the resulting order.
"""

import heapq
import math
from array import array
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from common.simulation.actions import Waiting
from common.simulation.versions import Versions

RESTART = -1  # instead of a step number: the worker restarts


class Activity(NamedTuple):
    """An activity of a worker, or of its link, over an interval."""

    worker: int
    part: str  # train, pull, push, wait
    start: float
    end: float
    step: int = -1  # number of its step in the round


class Timetable(NamedTuple):
    """The events in order: arrays of equal length, one element per step of a worker.

    Attributes:
      steps: number of the step in its round, or `RESTART`.
      workers: worker of the step.
      times: end of the step, in virtual seconds; non-decreasing.
      seconds: duration of a `train`; 0 for other steps.
      pulled, updated: of an update, the last global step known to its worker (see `common.scheme.Step.step_before`) and the
        new one; equal if the gradient was dropped. -1 for other steps, but a read has the global step in `updated`.
    """

    steps: Any
    workers: Any
    times: Any
    seconds: Any
    pulled: Any
    updated: Any

    def staleness(self):
        """Returns the staleness of each update, the number of others' updates since its worker's pull, an array."""
        made = (self.pulled >= 0) & (self.updated > self.pulled)
        return self.updated[made] - 1 - self.pulled[made]


class VirtualTime:
    """The event queue of the simulation. Equal arguments give equal schedules.

    Args:
      actions: the `Action`s of a round.
      num_workers: number of workers.
      costs: `Costs`.
      waiting: `Waiting`; None for no waiting.
      seed: of all random numbers.
      spans_until: time until which `spans` are recorded.

    Attributes:
      now: the time of the last event.
      spans: list of `Activity`.
      step_means: array `[n]`, the mean time of a local step of each worker.
      busy: seconds of receiving on the ps's link.
    """

    def __init__(self, actions, num_workers, costs, waiting=None, seed=0, spans_until=0.0):
        self.actions, self.num_workers, self.costs = list(actions), num_workers, costs
        self.waiting = waiting or Waiting()
        self._rng = np.random.default_rng(seed)
        self._noise: dict[int, tuple[list[float], int]] = {}
        self.now, self.busy = 0.0, 0.0
        self.spans: list[Activity] = []
        self._spans_until = spans_until
        self._is_at_ps = [action.is_at_ps for action in self.actions]
        self._follows = [each.is_at_ps and not each.needs_worker and not each.ahead for each in self.actions]
        self._reads_ahead = any(action.ahead for action in self.actions)
        self._needs_request = [not self.actions[k - 1].writes for k in range(len(self.actions))]  # of a prefetch
        self._versions = Versions(num_workers, self.waiting)
        self._turns = self._versions.turns
        self._out = _Out()
        self._set_costs()
        self._begin_all()

    def _set_costs(self):
        """Prepares the costs of each worker, and of each action on the ps, as lists."""
        n, costs, cv = self.num_workers, self.costs, self.costs.machine_cv
        self.step_means = self._rng.gamma(1 / cv**2, cv**2, n) * costs.step if cv else np.full(n, costs.step, float)
        self._means = self.step_means.tolist()
        self._delay, self._round, self._latency, self._start = (
            _of_each(cost, n) for cost in (costs.delay, costs.round, costs.latency, costs.start)
        )
        self._up, self._down = ([1 / b for b in _of_each(link, n)] for link in (costs.bandwidth_up, costs.bandwidth_down))
        self._nic = 1 / costs.ps_bandwidth / costs.num_ps
        self._at_work = [costs.read if each.reads else costs.apply if each.writes else 0.0 for each in self.actions]

    def _begin_all(self):
        """Starts all workers, and notes when some die and come back."""
        n, costs = self.num_workers, self.costs
        self._heap: list[tuple] = []
        self._count = 0  # events pushed so far, to break ties in time
        self._lives = [0] * n  # number of deaths of each worker
        self._rounds = [0] * n  # of each worker, in its current session call
        self._up_free, self._down_free = [0.0] * n, [0.0] * n
        self._nic_in = self._nic_out = self._ps_free = 0.0
        self._arrival = [0.0] * n  # of each worker's latest push
        self._made = 0.0  # time of the latest update by a quorum
        self._applied = [0.0] * n  # time at which each worker's latest push is applied
        # Per asynchronous push in flight, the worker's own steps since, as (step, end, seconds). The push was computed before
        # these steps, so it precedes them in the schedule.
        self._since: list[list[list[tuple[int, float, float]]]] = [[] for _ in range(n)]
        # Prefetch (`ahead`), per worker: arrival times of reads, the oldest first; the step that waits for one (-1: none);
        # whether the next read is the first of a session call. It needs a request, as one without a push right before it.
        self._coming, self._lacks, self._asks = [deque([0.0]) for _ in range(n)], [-1] * n, [True] * n
        self._parked: dict[int, tuple[int, float]] = {}  # worker: (waiting step, start of the wait)
        self._held: list[int] = []  # workers held back by a warm start
        for worker, at in enumerate(self._start):
            if worker and costs.warm_start:
                self._held.append(worker)
            else:
                self._begin(worker, at)
        for worker, since, until in costs.away:
            self._push(since, worker, "die", 0)
            if math.isfinite(until):
                self._push(until, worker, "back", 0)

    @property
    def updates(self):
        """The number of updates."""
        return self._versions.updates

    @property
    def dropped(self):
        """The number of dropped gradients."""
        return self._versions.dropped

    def run(self, updates=None, until=math.inf):
        """Runs until a total number of updates, or until a time; returns the `Timetable` of the new events.

        It ends earlier if no worker can continue.
        """
        last = math.inf if updates is None else updates
        heap, pop, versions = self._heap, heapq.heappop, self._versions
        while heap and versions.updates < last and heap[0][0] <= until:
            time, _, worker, what, step, life = pop(heap)
            if what == "die":
                self._die(worker, time)
            elif what == "back":
                self._come_back(worker, time)
            elif life == self._lives[worker]:
                self.now = time
                if what == "here":
                    self._here(worker, time, step)
                elif what == "arrive" or what == "arrive alone":
                    self._arrive(worker, time, step, what == "arrive alone")
                else:
                    self._at_ps(worker, time, step, what == "served")
        return self._out.take(self.now)

    def has_ended(self):
        """Whether no events are left: all workers have died, or wait for a dead one."""
        return not self._heap

    def stuck(self):
        """Returns the workers that wait for others, if no events are left."""
        return [] if self._heap else sorted(self._parked)

    def _begin(self, worker, now):
        """Starts the worker's first round. A late joiner has no prefetched x̃."""
        is_late = self._reads_ahead and self._start[worker] > 0
        self._push(now, worker, "back" if is_late else "here", 0)

    def _push(self, time, worker, what, step):
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, worker, what, step, self._lives[worker]))

    def _here(self, worker, now, k):
        """Runs the worker from step k of its round until it depends on the arrival of a message."""
        actions = self.actions
        while True:
            if k == len(actions):
                return self._end_round(worker, now)
            action = actions[k]
            if not self._is_at_ps[k]:
                took = 0.0
                if action.local_steps:
                    of_step = self._means[worker] * self._factor(action.local_steps)
                    end = now + self._delay[worker] + action.local_steps * of_step
                    self._note(worker, "train", now, end, k)
                    now, took = end, end - now
                if self._since[worker]:
                    self._since[worker][-1].append((k, now, took))
                else:
                    self._out.add(k, worker, now, -1, -1, took)
                k += 1
                continue
            if action.ahead:
                if not self._takes_prefetched(worker, now, k):
                    return
                k += 1
                continue
            # A message to the ps: the gradient, or only the request.
            sent = max(now, self._up_free[worker]) + action.up * self._up[worker]
            self._up_free[worker] = sent
            arrives = max(now, self._arrival[worker]) if action.is_early else sent + self._latency[worker]
            if not action.writes:
                return self._push(arrives, worker, "arrive", k)
            self._note(worker, "push", now, arrives, k)
            self._arrival[worker] = arrives
            is_last = k + 1 == len(actions)
            ends_call = is_last and self._rounds[worker] + 1 >= self.costs.rounds_per_call
            if action.reads or ends_call or self._follows[0 if is_last else k + 1]:
                return self._push(arrives, worker, "arrive", k)
            # The push is asynchronous: the worker continues at once.
            self._push(arrives, worker, "arrive alone", k)
            self._since[worker].append([])
            k += 1

    def _takes_prefetched(self, worker, now, k):
        """Lets the worker take the x̃ of its previous prefetch; returns whether that has arrived, else step k comes again."""
        coming = self._coming[worker]
        if now > self.now:  # the end of local steps, to which virtual time has not come yet
            self._push(now, worker, "here", k)
            return False
        if not coming:  # not read by the ps yet
            self._lacks[worker] = k
            return False
        if coming[0] > now:
            self._push(coming[0], worker, "here", k)
            return False
        coming.popleft()
        if self._asks[worker] or self._needs_request[k]:
            self._asks[worker] = False
            self._push(max(now, self._up_free[worker]) + self._latency[worker], worker, "arrive alone", k)
            self._since[worker].append([])
        return True

    def _end_round(self, worker, now):
        """Starts the worker's next round; the end of a session call waits for the push in flight."""
        now += self._round[worker]
        self._rounds[worker] += 1
        if self._rounds[worker] >= self.costs.rounds_per_call:
            now = self._end_call(worker, max(now, self._applied[worker] + self._latency[worker]))
        self._push(now, worker, "here", 0)

    def _end_call(self, worker, now):
        """Returns the start time of the worker's next session call, which waits for the prefetched x̃."""
        self._rounds[worker], self._asks[worker] = 0, True
        return max(now, *self._coming[worker], 0.0) + self.costs.call

    def _arrive(self, worker, came, k, alone):
        """Handles the arrival of a message at the ps; a ps receives one message at a time.

        Args:
          worker, came, k: the worker, the time, and the step.
          alone: whether the worker does not wait for it.
        """
        action = self.actions[k]
        now = at = max(came, self._applied[worker])
        if action.up and self._nic:
            # The transfers on both links overlap. The ps's link is busy only for its own transfer time.
            began = max(now - action.up * self._up[worker], self._nic_in)
            self._nic_in = began + action.up * self._nic
            at = max(now, self._nic_in)
            self.busy += action.up * self._nic
        if self._at_work[k]:
            at = self._served(k, at)
        if action.writes or action.ahead:
            self._applied[worker] = at
        if at > came:
            self._push(at, worker, "served alone" if alone else "served", k)
        else:
            self._at_ps(worker, at, k, not alone)

    def _served(self, k, now):
        """Returns the time at which the ps finishes step k. It starts at `now`, or once it is free."""
        self._ps_free = max(now, self._ps_free) + self._at_work[k]
        return self._ps_free

    def _at_ps(self, worker, now, k, goes_on):
        """Runs step k on the ps, and the following steps that need nothing of the worker."""
        actions, out, versions = self.actions, self._out, self._versions
        while True:
            action = actions[k]
            if action.waits and not self._turns.may_go_on(worker):
                self._parked[worker] = k, now
                return
            if action.waits:
                self._turns.pass_by(worker)
            if action.writes:
                self._update(worker, now, k)
            elif action.reads:
                out.add(k, worker, now, -1, versions.updates)
                if action.ahead:
                    self._has_read_ahead(worker, now, k)
            else:
                out.add(k, worker, now, -1, -1)
            if action.ticks and self._turns.tick(worker):
                self._release(now)
            if not goes_on:
                following = (k + 1) % len(actions)
                if action.writes and actions[following].ahead:
                    k = following
                    if self._at_work[k] and (at := self._served(k, now)) > now:
                        self._applied[worker] = at
                        return self._push(at, worker, "served alone", k)
                    continue
                for done, end, took in self._since[worker].pop(0):
                    out.add(done, worker, max(end, now), -1, -1, took)
                return
            if action.reads:
                versions.read(worker)
                return self._push(self._comes_down(worker, now, k), worker, "here", k + 1)
            k += 1
            if k == len(actions):
                self._rounds[worker] += 1
                ends = self._rounds[worker] >= self.costs.rounds_per_call
                after = now + self._round[worker]
                if ends:
                    return self._push(self._end_call(worker, after + self._latency[worker]), worker, "here", 0)
                k, now = 0, after
            if not self._follows[k]:  # the worker continues after the reply
                return self._push(now + self._latency[worker], worker, "here", k)
            if self._at_work[k] and (at := self._served(k, now)) > now:
                return self._push(at, worker, "served", k)

    def _has_read_ahead(self, worker, now, k):
        """Records the prefetch of x̃ for a worker's next pull. From now on it computes with the previous x̃."""
        self._versions.read_ahead(worker)
        self._coming[worker].append(self._on_its_way_down(worker, now, k))
        if (waiting := self._lacks[worker]) >= 0:
            self._lacks[worker] = -1
            self._push(self._coming[worker][0], worker, "here", waiting)

    def _comes_down(self, worker, now, k):
        """Returns the arrival time of x̃ at a worker that has read it."""
        if self.actions[k].is_early:  # sent once the update with this worker's `send` is made
            return max(now, self._on_its_way_down(worker, max(self._made, self._applied[worker]), k))
        return self._on_its_way_down(worker, now, k)

    def _on_its_way_down(self, worker, now, k):
        began, left, down = now, now, self.actions[k].down
        if self._nic:
            began = max(now, self._nic_out)
            left = self._nic_out = began + down * self._nic
        received = max(left, max(began, self._down_free[worker]) + down * self._down[worker])
        self._down_free[worker] = received
        end = received + self._latency[worker]
        self._note(worker, "pull", now, end, k)
        return end

    def _update(self, worker, now, k):
        """Applies a gradient or a difference, or counts it towards the update of a quorum."""
        versions = self._versions
        before = versions.updates
        pulled, updated = versions.update(worker, self.actions[k].fragment)
        self._out.add(k, worker, now, pulled, updated)
        if versions.updates == before:
            return
        if self.waiting.quorum is not None:
            self._made = now
            self._release(now)
        elif self._held and versions.updates >= self.costs.warm_start:
            for other in self._held:
                self._begin(other, max(now, self._start[other]))
            self._held = []

    def _release(self, now):
        free = [worker for worker in self._parked if self._turns.may_go_on(worker)]
        for worker in free:
            k, since = self._parked.pop(worker)
            self._note(worker, "wait", since, now, k)
            self._push(now, worker, "served", k)

    def _die(self, worker, now):
        self._out.forget(worker, now)
        for done, end, took in (each for since in self._since[worker] for each in since):
            if end <= now:
                self._out.add(done, worker, now, -1, -1, took)
        self._since[worker], self._lacks[worker] = [], -1
        self.spans = [span for span in self.spans if span.worker != worker or span.start < now]
        self.spans = [span._replace(end=min(span.end, now)) if span.worker == worker else span for span in self.spans]
        self._lives[worker] += 1
        self._parked.pop(worker, None)
        if worker in self._held:
            self._held.remove(worker)

    def _come_back(self, worker, now):
        self._out.add(RESTART, worker, now, -1, -1)
        self._turns.pass_by(worker)
        self._rounds[worker] = 0
        self._up_free[worker] = self._down_free[worker] = self._applied[worker] = now
        self._coming[worker], self._lacks[worker], self._asks[worker] = deque([now]), -1, True
        self._versions.restart(worker)
        if worker and self._versions.updates < self.costs.warm_start:
            self._held.append(worker)
        else:
            self._push(now, worker, "here", 0)

    def _factor(self, steps):
        """Returns the mean of `steps` gamma-distributed numbers of mean 1, itself gamma-distributed."""
        cv = self.costs.step_cv
        if not cv:
            return 1.0
        drawn, at = self._noise.get(steps, ([], 0))
        if at == len(drawn):
            shape = steps / cv**2
            drawn, at = self._rng.gamma(shape, 1 / shape, 10_000).tolist(), 0
        self._noise[steps] = drawn, at + 1
        return drawn[at]

    def _note(self, worker, part, start, end, step):
        if start < self._spans_until and end > start:
            self.spans.append(Activity(worker, part, start, end, step))


def _of_each(cost, num_workers):
    """Returns the cost of each worker, a list, of one number for all or an array."""
    return np.broadcast_to(np.asarray(cost, float), [num_workers]).tolist()


class _Out:
    """The schedule under construction. A worker's own steps are added before virtual time reaches them."""

    def __init__(self):
        self._columns = [array(kind) for kind in "iiddqq"]  # the columns of `Timetable`
        self._add = [column.append for column in self._columns]

    def add(self, step, worker, time, pulled, updated, seconds=0.0):
        """Adds an event."""
        a, b, c, d, e, f = self._add
        a(step)
        b(worker)
        c(time)
        d(seconds)
        e(pulled)
        f(updated)

    def forget(self, worker, now):
        """Removes the events of a dead worker after its death at `now`."""
        steps, workers, times, *_ = map(np.array, self._columns)
        self._keep((workers != worker) | (times <= now) | (steps == RESTART))

    def _keep(self, which):
        self._columns = [array(old.typecode, np.array(old)[which].tobytes()) for old in self._columns]
        self._add = [column.append for column in self._columns]

    def take(self, now):
        """Returns the `Timetable` until this time, and removes its events."""
        times = np.array(self._columns[2])
        order = np.argsort(times, kind="stable")
        order = order[times[order] <= now]
        taken = Timetable(*(np.array(column)[order] for column in self._columns))
        self._keep(times > now)
        return taken
