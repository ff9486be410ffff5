"""The training loop of a worker, from the first call to the report.

Begin with `loop`, whose `train` is that loop.
"""

from typing import TYPE_CHECKING

from common.core import front_door

if TYPE_CHECKING:  # the front door: what others may import
    from common.training import loop
    from common.training.loop import (
        ENDED,
        STOP,
        Interruption,
        Plan,
        build_calls,
        build_model,
        evaluation_of,
        fed_test_set,
        last_step,
        run_worker,
        samples_of,
        samples_per_gradient,
        samples_per_update,
        split,
        updates_before,
        write_result,
    )
    from common.training.metrics import EvaluationHook, MetricsHook, MetricsLog, measured

__getattr__, __dir__ = front_door(__name__)
