"""Task and server of this process in a cluster, and the monitored session with its hooks.

Begin with `task_spec`, which reads the task from flags or the environment, and `session`, which opens a monitored session.
"""

from typing import TYPE_CHECKING

from common.core import front_door

if TYPE_CHECKING:  # the front door: what others may import
    from common.cluster import membership, slurm, task_spec
    from common.cluster.giving_up import GiveUpHook
    from common.cluster.hooks import EarlyStoppingHook, EnterHook, Gate, MeetingHook, StartHook, WarmStartHook
    from common.cluster.membership import serve
    from common.cluster.session import Saver, monitored_session
    from common.cluster.task_spec import TaskSpecDef

__getattr__, __dir__ = front_door(__name__)
