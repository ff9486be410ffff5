"""The parts of a worker's graph that its main loop needs, and the result of that loop."""

import time
from typing import Any, NamedTuple


class Plan(NamedTuple):
    """The parts of a worker's graph that the main loop needs."""

    last: int  # global step to end at
    step: Any  # the global step, a variable
    next_call: Any  # function of the present global step: arguments of `session.run`, `Rounds` first
    evaluation: Any  # the chief's: the global step, and loss and metrics on the test set, {name: scalar tensor}
    final: Any  # the chief's: tensors to fetch at the very end
    scaffold: Any  # a `tf.train.Scaffold`
    size: Any  # the `common.scheme.RoundSize` of the rounds
    gate: Any = None  # a `common.cluster.Gate`, the start barrier
    waits: Any = None  # a `common.scheme.Pace`, `Together` or `Ring`, for workers that wait for each other
    keeper: Any = None  # a `common.core.Keeper`; None if the session saves checkpoints
    position: Any = None  # a `common.data.Position`, if the position is kept
    unit: Any = None  # unit of the loss, see `model_and_data.unit_of`
    told: Any = ()  # further numbers of an evaluation, see `metrics.EvaluationHook`
    rows: Any = ()  # numbers about this worker's pulls of tables, tensors
    goal: Any = None  # number of samples to end at, if updates vary in samples
    members: Any = None  # a `common.cluster.membership.Members`; None: only the main loop needs one
    begin: Any = ()  # operations for the start of a session
    farewell: Any = ()  # operations of a worker that leaves for good
    had_left: bool = False  # whether a worker of this number had left, as far as this machine knows

    def seconds(self):
        """Returns the seconds of training so far; without a keeper those of this process's clock."""
        return self.keeper.clock.seconds() if self.keeper else time.monotonic()


class Outcome(NamedTuple):
    """The result of a worker's main loop; all but the status only for the chief."""

    status: int  # exit status
    final: Any = None  # values of `Plan.final`, also of an interrupted training
    reports: Any = None  # reports of all workers, see `result.REPORT`
    evaluated: Any = None  # global step, and loss and metrics on the test set, {name: number}
    rows: Any = None  # numbers about this worker's pulls of tables, values of `Plan.rows`
    samples: Any = None  # number of samples behind the parameters, including resumed runs; None: see the reports
    dropped: Any = None  # numbers of dropped gradients and of their samples, including resumed runs; None: see the reports
    given_up: Any = ()  # numbers of the workers whose reports are missing, see `common.cluster.giving_up`
