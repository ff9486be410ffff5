"""Runs the tasks of a run as processes on this machine: start, supervision, restart.

Begin with `launcher`, and `supervisor`, which decides between restart and failure of the run.
"""

from typing import TYPE_CHECKING

from common.core import front_door

if TYPE_CHECKING:  # the front door: what others may import
    from common.launch import control, launcher, sandbox, supervisor, warm
    from common.launch.control import join, leave
    from common.launch.sandbox import die_with_parent
    from common.launch.supervisor import PS_SECONDS, STOP_SECONDS
    from common.launch.task import Task

__getattr__, __dir__ = front_door(__name__)
