"""The training loop of a worker, from the first call to the report.

Begin with `loop`, whose `train` is that loop.
"""

from typing import TYPE_CHECKING

from common.core import front_door

if TYPE_CHECKING:  # the front door: what others may import
    from common.training import loop, run_check
    from common.training.calls import build_calls, delay_of, rounds_of_call
    from common.training.interruption import Interruption
    from common.training.loop import run_worker
    from common.training.metrics import EvaluationHook, MetricsHook, MetricsLog, measured
    from common.training.model_and_data import build_model, evaluation_of, fed_test_set, samples_of, split
    from common.training.plan import Plan
    from common.training.result import write_result
    from common.training.sample_counts import last_step, updates_before
    from common.training.worker_hooks import ENDED, STOP

__getattr__, __dir__ = front_door(__name__)
