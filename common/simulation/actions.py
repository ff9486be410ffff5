"""The input of virtual time: the steps of a round, their costs, and the waiting of workers."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Action(NamedTuple):
    """One step of a round, as the clock sees it.

    Attributes:
      local_steps: number of local steps of a `train`; 0 for any other step.
      reads, writes: whether it reads x̃, changes x̃.
      up, down: bytes from the worker to the ps, and from the ps to the worker.
      waits, ticks: whether it waits for other workers; whether it advances this worker's clock (`center.pace`).
      fragment: of a `send`, the number of its fragment of x̃.
      is_early: of a read, whether the ps starts it as soon as possible, without a request from the worker (`receive`).
      ahead: prefetch: consumes the previous read, starts the next. After a push the ps reads as soon as that is applied,
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
