"""The same schemes with virtual workers: a thousand in one process, or a few that a notebook steps by hand.

Begin with `replay`, for notebooks, and `virtual_time`, the discrete-event simulation of the workers' times. Both count
turns and global steps in `versions`.
"""

from typing import TYPE_CHECKING

from common.core import front_door

if TYPE_CHECKING:  # the public names
    from common.simulation import timeline
    from common.simulation.actions import Action, Costs, Waiting
    from common.simulation.engine import Engine
    from common.simulation.facts import facts_of, facts_of_size, messages_of
    from common.simulation.replay import Replay
    from common.simulation.shards import Shards, shards_of
    from common.simulation.timeline import COLORS
    from common.simulation.virtual_time import VirtualTime

__getattr__, __dir__ = front_door(__name__)
