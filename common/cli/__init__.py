"""The programs: a scheme's script, `python -m common.run`, `python -m common.advise`, and `train` for notebooks.

Begin with `program`, whose `main` each scheme's script calls.
"""

from typing import TYPE_CHECKING

from common.core import front_door

if TYPE_CHECKING:  # the public names
    from common.cli import api, notebook
    from common.cli.recommend import steps_per_message
    from common.cli.schemes import scheme_in, script_of

__getattr__, __dir__ = front_door(__name__)
