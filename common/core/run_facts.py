"""The facts of a run that are no flags: of its scheme, its start and its cluster."""

from typing import Any, NamedTuple


class RunFacts(NamedTuple):
    """What settings know besides their flags: `settings.run`, immutable as they are.

    Attributes:
      scheme: the name of the scheme's folder.
      pace, optimizer_on: of the scheme, see `common.Scheme`.
      own_flags: names of the scheme's own flags.
      began: time of the process's start, by its monotonic clock, in seconds.
      begin_workers: number of workers at the beginning of the run.
      num_evaluators: number of evaluators, in the last places of the cluster.
      code: of `common` and the scheme, to be the same on all machines of an elastic run; None elsewhere.
    """

    scheme: str
    pace: str = "own"
    optimizer_on: str = "ps"
    own_flags: Any = ()
    began: float = 0.0
    begin_workers: int = 1
    num_evaluators: int = 0
    code: str | None = None
