"""The base of all other packages: flags and errors, the run folder, output for the user, checkpoint files.

Begin with `flags`, which defines every flag and its check, and `run_folder`, the folder of all files of a run.
"""

from typing import TYPE_CHECKING

from common.core.doors import front_door

if TYPE_CHECKING:  # the front door: what others may import
    from common.core import (
        checkpoints,
        devices,
        exit_reasons,
        flags,
        limits,
        plots,
        progress,
        run_folder,
        signals,
        startup,
        task_status,
    )
    from common.core.checkpoint_parts import TABLES, TableCount, TablePart, check_shape, pieces_of, rows_in, spec_of
    from common.core.checkpoints import checkpoints_in, newest_good_checkpoint, writing_into
    from common.core.doors import front_door
    from common.core.exit_reasons import NOTHING, RAN_OUT, count_oom_kills, killed_by, last_error, of_memory
    from common.core.finite import loss_of_failed, must_be_finite
    from common.core.flags import (
        FITTING,
        KNOWN,
        MOST_PLACES,
        ROOM,
        SCHEDULES,
        TRANSFORMER,
        Settings,
        TrainingFailed,
        UserError,
        check_backend,
        model_options,
        why_unwritable,
    )
    from common.core.keeper import Keeper, Trained, times
    from common.core.locks import AWAY, FINISHED, Clocks, Lock
    from common.core.plots import median_and_range, read_metrics
    from common.core.progress import counted
    from common.core.run_facts import RunFacts
    from common.core.run_folder import (
        SOCKET,
        check_contents,
        check_locks,
        has_checkpoint,
        is_in_use,
        lock_folder,
        open_own,
        prepare_run_dir,
        write_json,
    )
    from common.core.task_status import (
        BUILDING,
        LOADING,
        STANDS_IN,
        doing,
        meanwhile,
        nobody,
        say_asked,
        say_leaving,
        say_waits_of,
        status_of_leaving,
        tell,
        workers_away,
    )

__getattr__, __dir__ = front_door(__name__)
