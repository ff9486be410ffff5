"""The package that schemes, scripts and notebooks share. Your own scripts may import from here:

`from common import DistributedSession, EarlyStoppingHook, LoadCheckpoint, SemiSyncRunHook, StopAtTimeHook, TaskSpec, tf`; and
`train`, which trains a Keras model as a folder's run.sh does; `Embedding`, a layer whose table is on the ps, and `rows_of`,
which reads its rows from a checkpoint. CONTRIBUTING.md has a map of its packages.
"""

from typing import TYPE_CHECKING

from common.core.startup import check_system, open_standard_streams, private_caches

check_system()
open_standard_streams()
private_caches()

from common.core.doors import front_door  # noqa: E402
from common.core.tensorflow import tf as tf  # noqa: E402

if TYPE_CHECKING:  # the public names, see common/core/doors.py
    from common.cli.api import train
    from common.cli.program import main
    from common.cluster.hooks import EarlyStoppingHook, LoadCheckpoint, SemiSyncRunHook, StopAtTimeHook
    from common.cluster.session import DistributedSession
    from common.cluster.task_spec import TaskSpec, TaskSpecDef
    from common.core import UserError, flags
    from common.models.embedding import Embedding
    from common.scheme.definition import Scheme
    from common.scheme.saved_tables import rows_of

__getattr__, __dir__ = front_door(__name__)
