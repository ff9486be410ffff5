"""Discrete-event simulation of workers: the times of pulls, local steps and pushes, the waits, and the version of x̃ at each.

This is the simulator's clock. It needs no gradients and no parameters, only the steps of a round (`Action`) and their costs
(`Costs`). So it works for ten thousand workers, and for a model too large for any machine here. `common.simulation` runs the
scheme's own operations in the resulting order.
"""

import heapq
import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

RESTART = -1  # instead of a step number: the worker restarts


class Action(NamedTuple):
    """One step of a round, as the clock sees it.

    Attributes:
      local_steps: number of local steps of a `train`; 0 for any other step.
      reads, writes: whether it reads x̃, changes x̃.
      up, down: bytes from the worker to the ps, and from the ps to the worker.
      waits, ticks: whether it waits for other workers; whether it advances this worker's clock (`center.pace`).
      fragment: of a `send`, the number of its fragment of x̃.
      is_early: of a read, whether the ps starts it as soon as possible, without a request from the worker (`receive`).
      ahead: prefetch: consumes the previous read, starts the next. The ps reads once the worker's preceding push is applied,
        independently of the worker.
    """

    local_steps: int = 0
    reads: bool = False
    writes: bool = False
    up: int = 0
    down: int = 0
    waits: bool = False
    ticks: bool = False
    fragment: int | None = None
    is_early: bool = False
    ahead: bool = False

    @property
    def is_at_ps(self):
        """Whether the step involves the ps."""
        return self.reads or self.needs_worker or self.waits or self.ticks

    @property
    def needs_worker(self):
        """Whether it sends data of the worker; if not, the ps may run it right after the previous step."""
        return self.writes or self.up > 0


class Waiting(NamedTuple):
    """The waiting and the dropping of gradients in a scheme; by default, neither.

    Attributes:
      staleness: of `center.pace`, the maximum lead over the slowest worker, in ticks; None without it.
      quorum: of `center.together`, the number of gradients per update; None without it.
      threshold: of `center.exact`, the staleness from which a gradient is dropped; None without it.
      fragments: number of fragments of x̃; each update is of one fragment, in turn.
    """

    staleness: float | None = None
    quorum: int | None = None
    threshold: float | None = None
    fragments: int = 1


@dataclass
class Costs:
    """The costs of a run. Times are in seconds, speeds in bytes per second; values per worker are a number, or an array `[n]`.

    The time of a local step is gamma-distributed, after Ali et al. (2000, "Task execution time modeling for heterogeneous
    computing systems", the CVB method): `machine_cv` is the coefficient of variation (standard deviation / mean) of the mean
    step times of machines, `step_cv` that of the steps on one machine; 0 for no variation.

    Attributes:
      step: per worker, time of a local step; the mean over machines, if they differ by `machine_cv`.
      delay: per worker, extra time of each local training.
      round: per worker, time of a round besides local steps and messages.
      call: time of a session call besides its rounds.
      rounds_per_call: rounds of a session call, which ends once the ps confirm that the worker's pushes are applied.
      latency: per worker, one-way latency of a message, without the transfer time of its bytes.
      bandwidth_up, bandwidth_down: of each worker's link.
      ps_bandwidth: of a ps, each way; it receives, and sends, one message at a time. The transfers on its link and on the
        worker's overlap, so a message over two equal links takes the time of one.
      read, apply: time of a read, and of an update, on the ps, one at a time.
      start: per worker, start time.
      away: (worker, from, until) of workers that die, and restart if `until` is finite.
      warm_start: number of updates that worker 0 makes before the others start.
      num_ps: number of ps, which share the bytes of each message.
    """

    step: Any = 0.01
    machine_cv: float = 0.0
    step_cv: float = 0.0
    delay: Any = 0.0
    round: Any = 0.0
    call: float = 0.0
    rounds_per_call: int = 1_000_000_000
    latency: Any = 0.0
    bandwidth_up: Any = math.inf
    bandwidth_down: Any = math.inf
    ps_bandwidth: float = math.inf
    read: float = 0.0
    apply: float = 0.0
    start: Any = 0.0
    away: list = field(default_factory=list)
    warm_start: int = 0
    num_ps: int = 1


class Activity(NamedTuple):
    """An activity of a worker, or of its link, over an interval."""

    worker: int
    part: str  # train, pull, push, wait
    start: float
    end: float


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


class Turns:
    """The order of workers at a barrier or a staleness bound, as `common.core.Clocks` enforces it on a ps.

    Args:
      num_workers: number of workers.
      waiting: `Waiting`.
    """

    def __init__(self, num_workers, waiting):
        self._waiting, self._clocks, self._low = waiting, [0] * num_workers, 0
        self._pulled = [0] * num_workers  # `low` when each worker last passed a wait
        self._at = {0: num_workers}  # number of clocks at each value
        self._ahead = 0  # of `together`: gradients received for the next update

    def may_go_on(self, worker):
        """Whether this worker need not wait."""
        if self._waiting.quorum is not None:
            return self._clocks[worker] <= self._low
        return self._waiting.staleness is None or self._clocks[worker] - self._low <= self._waiting.staleness

    def pass_by(self, worker):
        """Records that this worker passes its wait, or restarts."""
        self._pulled[worker] = self._low

    def tick(self, worker):
        """Advances this worker's clock; returns whether that may release others."""
        clock = self._clocks[worker]
        self._clocks[worker] = clock + 1
        self._at[clock] -= 1
        self._at[clock + 1] = self._at.get(clock + 1, 0) + 1
        if clock > self._low or self._at[clock]:
            return False
        del self._at[clock]
        self._low += 1
        return True

    def give(self, worker, fragment=None):
        """Takes this worker's gradient for `together`; returns whether it counts, and whether it completes an update.

        The gradient of a fragment counts only in the fragment's turn.
        """
        is_its_turn = fragment is None or self._low % self._waiting.fragments == fragment
        counts = self._pulled[worker] == self._low and self._clocks[worker] <= self._low and is_its_turn
        if counts:
            self._clocks[worker] = self._low + 1
            self._ahead += 1
            if self._ahead == self._waiting.quorum:
                self._low, self._ahead = self._low + 1, 0
                return True, True
        return counts, False


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
      updates, dropped: number of updates, and of dropped gradients.
      spans: list of `Activity`.
      step_means: array `[n]`, the mean time of a local step of each worker.
      busy: seconds of receiving on the ps's link.
    """

    def __init__(self, actions, num_workers, costs, waiting=None, seed=0, spans_until=0.0):
        self.actions, self.num_workers, self.costs = list(actions), num_workers, costs
        self.waiting = waiting or Waiting()
        n, rng = num_workers, np.random.default_rng(seed)
        self._rng = rng
        cv = costs.machine_cv
        means = rng.gamma(1 / cv**2, cv**2, n) * costs.step if cv else np.full(n, costs.step, float)
        self.step_means = means
        per = lambda value: np.broadcast_to(np.asarray(value, float), [n]).tolist()  # noqa: E731
        self._means, self._delay, self._round = means.tolist(), per(costs.delay), per(costs.round)
        self._latency = per(costs.latency)
        self._up = [1 / b for b in per(costs.bandwidth_up)]
        self._down = [1 / b for b in per(costs.bandwidth_down)]
        self._nic = 1 / costs.ps_bandwidth / costs.num_ps
        self._is_at_ps = [action.is_at_ps for action in self.actions]
        self._follows = [each.is_at_ps and not each.needs_worker and not each.ahead for each in self.actions]
        self._noise: dict[int, tuple[list[float], int]] = {}
        self.now, self.updates, self.dropped, self.busy = 0.0, 0, 0, 0.0
        self.spans: list[Activity] = []
        self._spans_until = spans_until
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
        self._known, self._own = [0] * n, [0] * n
        # Prefetch (`ahead`), per worker: arrival times of reads, the oldest first; the step that waits for one (-1: none); the
        # global step of the latest read; the worker's own updates since; whether the next read needs a request, as no push of
        # the same session call precedes it.
        self._reads_ahead = any(action.ahead for action in self.actions)
        self._coming, self._lacks = [deque([0.0]) for _ in range(n)], [-1] * n
        self._ahead, self._own_since, self._asks = [0] * n, [0] * n, [True] * n
        self._turns = Turns(n, self.waiting)
        self._parked: dict[int, tuple[int, float]] = {}  # worker: (waiting step, start of the wait)
        self._held: list[int] = []  # workers held back by a warm start
        self._out = _Out()
        self._start = per(costs.start)
        for worker, at in enumerate(self._start):
            if worker and costs.warm_start:
                self._held.append(worker)
            else:
                self._begin(worker, at)
        for worker, since, until in costs.away:
            self._push(since, worker, "die", 0)
            if math.isfinite(until):
                self._push(until, worker, "back", 0)

    def run(self, updates=None, until=math.inf):
        """Runs until a total number of updates, or until a time; returns the `Timetable` of the new events.

        It ends earlier if no worker can continue.
        """
        last = math.inf if updates is None else updates
        heap, pop = self._heap, heapq.heappop
        while heap and self.updates < last and heap[0][0] <= until:
            time, _, worker, what, step, life = pop(heap)
            if what == "die":
                self._die(worker, time)
            elif what == "back":
                self._come_back(worker, time)
            elif life == self._lives[worker]:
                self.now = time
                if what == "here":
                    self._here(worker, time, step)
                elif what == "arrive":
                    self._arrive(worker, time, step)
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
                    self._note(worker, "train", now, end)
                    now, took = end, end - now
                if self._since[worker]:
                    self._since[worker][-1].append((k, now, took))
                else:
                    self._out.add(k, worker, now, -1, -1, took)
                k += 1
                continue
            if action.ahead:
                if not self._coming[worker]:  # not read by the ps yet
                    self._lacks[worker] = k
                    return
                if self._coming[worker][0] > now:
                    return self._push(self._coming[worker][0], worker, "here", k)
                self._coming[worker].popleft()
                if self._asks[worker]:
                    self._asks[worker] = False
                    self._push(max(now, self._up_free[worker]) + self._latency[worker], worker, "arrive", k + len(actions))
                    self._since[worker].append([])
                k += 1
                continue
            # A message to the ps: the gradient, or only the request.
            sent = max(now, self._up_free[worker]) + action.up * self._up[worker]
            self._up_free[worker] = sent
            arrives = max(now, self._arrival[worker]) if action.is_early else sent + self._latency[worker]
            if not action.writes:
                return self._push(arrives, worker, "arrive", k)
            self._note(worker, "push", now, arrives)
            self._arrival[worker] = arrives
            is_last = k + 1 == len(actions)
            ends_call = is_last and self._rounds[worker] + 1 >= self.costs.rounds_per_call
            if action.reads or ends_call or self._follows[0 if is_last else k + 1]:
                return self._push(arrives, worker, "arrive", k)
            # The push is asynchronous: the worker continues at once.
            self._push(arrives, worker, "arrive", k + len(actions))
            self._since[worker].append([])
            k += 1

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

    def _arrive(self, worker, now, k):
        """Handles the arrival of a message at the ps, which receives one message at a time."""
        alone = k >= len(self.actions)  # the worker is not waiting for it
        action = self.actions[k - len(self.actions) if alone else k]
        came = now
        now = at = max(now, self._applied[worker])
        if action.up and self._nic:
            # The transfers on both links overlap. The ps's link is busy only for its own transfer time.
            began = max(now - action.up * self._up[worker], self._nic_in)
            self._nic_in = began + action.up * self._nic
            at = max(now, self._nic_in)
            self.busy += action.up * self._nic
        at = self._served(action, at)
        if action.writes or action.ahead:
            self._applied[worker] = at
        k = k - len(self.actions) if alone else k
        if at > came:
            self._push(at, worker, "served alone" if alone else "served", k)
        else:
            self._at_ps(worker, at, k, not alone)

    def _served(self, action, now):
        """Returns the time at which the ps finishes a step that it starts at `now`, or once it is free."""
        cost = self.costs.read if action.reads else self.costs.apply if action.writes else 0.0
        if not cost:
            return now
        self._ps_free = max(now, self._ps_free) + cost
        return self._ps_free

    def _at_ps(self, worker, now, k, goes_on):
        """Runs step k on the ps, and the following steps that need nothing of the worker."""
        actions, out, costs = self.actions, self._out, self.costs
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
                out.add(k, worker, now, -1, self.updates)
                if action.ahead:
                    self._has_read_ahead(worker, now, action)
            else:
                out.add(k, worker, now, -1, -1)
            if action.ticks and self._turns.tick(worker):
                self._release(now)
            if not goes_on:
                following = (k + 1) % len(actions)
                if action.writes and actions[following].ahead:
                    k = following
                    if (at := self._served(actions[k], now)) > now:
                        self._applied[worker] = at
                        return self._push(at, worker, "served alone", k)
                    continue
                for done, end, took in self._since[worker].pop(0):
                    out.add(done, worker, max(end, now), -1, -1, took)
                return
            if action.reads:
                self._known[worker], self._own[worker] = self.updates, 0
                return self._push(self._comes_down(worker, now, action), worker, "here", k + 1)
            k += 1
            if k == len(actions):
                self._rounds[worker] += 1
                ends = self._rounds[worker] >= costs.rounds_per_call
                after = now + self._round[worker]
                if ends:
                    return self._push(self._end_call(worker, after + self._latency[worker]), worker, "here", 0)
                k, now = 0, after
            if not self._follows[k]:  # the worker continues after the reply
                return self._push(now + self._latency[worker], worker, "here", k)
            if (at := self._served(actions[k], now)) > now:
                return self._push(at, worker, "served", k)

    def _has_read_ahead(self, worker, now, action):
        """Records the prefetch of x̃ for a worker's next pull. From now on it computes with the previous x̃."""
        self._known[worker], self._own[worker] = self._ahead[worker], self._own_since[worker]
        self._ahead[worker], self._own_since[worker] = self.updates, 0
        self._coming[worker].append(self._on_its_way_down(worker, now, action))
        if (k := self._lacks[worker]) >= 0:
            self._lacks[worker] = -1
            self._push(self._coming[worker][0], worker, "here", k)

    def _comes_down(self, worker, now, action):
        """Returns the arrival time of x̃ at a worker that has read it."""
        if action.is_early:  # sent once the update with this worker's `send` is made
            return max(now, self._on_its_way_down(worker, max(self._made, self._applied[worker]), action))
        return self._on_its_way_down(worker, now, action)

    def _on_its_way_down(self, worker, now, action):
        began = left = now
        if self._nic:
            began = max(now, self._nic_out)
            left = self._nic_out = began + action.down * self._nic
        received = max(left, max(began, self._down_free[worker]) + action.down * self._down[worker])
        self._down_free[worker] = received
        end = received + self._latency[worker]
        self._note(worker, "pull", now, end)
        return end

    def _update(self, worker, now, k):
        """Applies a gradient or a difference, or counts it towards the update of a quorum."""
        if self.waiting.quorum is None:
            threshold = self.waiting.threshold
            if threshold is not None and self.updates - self._known[worker] - self._own[worker] >= threshold:
                self.dropped += 1
                self._out.add(k, worker, now, self.updates, self.updates)
                return
            self.updates += 1
            self._out.add(k, worker, now, self._known[worker] + self._own[worker], self.updates)
            self._own[worker] += 1
            self._own_since[worker] += 1
            if self._held and self.updates >= self.costs.warm_start:
                for other in self._held:
                    self._begin(other, max(now, self._start[other]))
                self._held = []
            return
        before = self.updates
        counts, makes_update = self._turns.give(worker, self.actions[k].fragment)
        self._out.add(k, worker, now, before, before + counts)
        self.dropped += not counts
        if makes_update:
            self.updates, self._made = self.updates + 1, now
            self._release(now)

    def _release(self, now):
        free = [worker for worker in self._parked if self._turns.may_go_on(worker)]
        for worker in free:
            k, since = self._parked.pop(worker)
            self._note(worker, "wait", since, now)
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
        self._ahead[worker], self._own_since[worker] = self.updates, 0
        if worker and self.updates < self.costs.warm_start:
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

    def _note(self, worker, part, start, end):
        if start < self._spans_until and end > start:
            self.spans.append(Activity(worker, part, start, end))


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
