"""The task that this process is, the servers of a cluster, and a session in it with its hooks.

Begin with `cluster`, where a process learns which task it is, and `session`, which opens a monitored session.
"""

from typing import TYPE_CHECKING

from common.front_door import front_door

if TYPE_CHECKING:  # the front door: what others may import
    from common.cluster import cluster, ending, slurm
    from common.cluster.cluster import TaskSpecDef
    from common.cluster.ending import serve
    from common.cluster.giving_up import GiveUpHook
    from common.cluster.hooks import EarlyStoppingHook, Gate, MeetingHook, StartHook, WarmStartHook
    from common.cluster.session import Saver, monitored_session

__getattr__, __dir__ = front_door(__name__)
