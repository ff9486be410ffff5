"""Starts the tasks of a run as processes on this machine, watches them, and starts again those that died.

Begin with `launch`, and `supervisor`, which decides what a death means.
"""

from typing import TYPE_CHECKING

from common.front_door import front_door

if TYPE_CHECKING:  # the front door: what others may import
    from common.launch import control, launcher, sandbox, supervisor, warm
    from common.launch.control import join, leave
    from common.launch.sandbox import die_with_parent
    from common.launch.supervisor import PS_SECONDS, STOP_SECONDS

__getattr__, __dir__ = front_door(__name__)
