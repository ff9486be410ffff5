"""What `python SCHEME.py` does: reads the flags, then starts a cluster on this machine, or is a task of one.

A script is its update rule and one call:

    if __name__ == "__main__":
        main(hogwild, epochs=60, batch_size=32, learning_rate=0.1)
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path

from common import cluster, flags, launch, progress
from common.flags import UserError


def main(scheme=None, train=None, **defaults):
    """Runs a scheme's script and exits: 0 trained, 1 failed, 2 bad flags or input, 130 stopped by Ctrl-C.

    Args:
      scheme: generator function, see `common.parameters`.
      train: instead, for a script with a main loop of its own: a function `train(task, settings)` as in `common.training`.
      **defaults: the scheme's own defaults, by the name of the flag.
    """
    script = Path(sys.argv[0]).resolve()
    try:
        sys.exit(_run(scheme, train, script, sys.argv[1:], defaults))
    except UserError as error:
        sys.exit(_say(2, f"{script.name}: {error}"))
    except KeyboardInterrupt:
        sys.exit(130)


def _say(status, line):
    print(line, file=sys.stderr)
    return status


def _run(scheme, train, script, arguments, defaults):
    launcher = os.environ.get("LAUNCHER_PID")
    if launcher:
        launch.die_with_parent(int(launcher))
    values = flags.define(defaults)
    settings = flags.parse(values, arguments, script.name)
    settings.scheme, settings.began = script.parent.name, time.time()
    task = cluster.task_from(settings)
    if task is None and not settings.launch:
        for name in flags.present(values, "num_ps", "num_workers"):
            raise UserError(
                f"--{name} is for --launch, which `bash {settings.scheme}/run.sh` gives; without it, one process trains"
            )
    # Of tensorflow's C++ part only errors are worth a reader's terminal; a log file can take warnings.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1" if launcher else "3")
    if settings.check:
        from common import training

        training.check(settings)
        return 0
    if task is None and settings.launch:
        return launch.launch(script, arguments, settings)
    if task and task.is_ps():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a ps waits outside Python, which would never see the signal
        cluster.serve(task, task.create_server())
        return 0

    from common import training

    train = train or functools.partial(training.train, scheme)
    if launcher:
        return train(task, settings)
    launch.prepare_run_dir(settings, task)
    index, num_workers = (task.index, task.num_workers) if task else (0, 1)
    with progress.Display(settings, [index]):
        status = train(task, settings)
    if index == 0:
        progress.summary(settings, status)
    return status
