"""Runs any script that uses `TaskSpec()` as a cluster on this machine:

    python -m common.run --num_ps=1 --num_workers=2 my_script.py --its=flags

Each task reads its role from `TF_CONFIG`. Worker 0 writes to the terminal, the others to logs. The run ends with its workers.
"""

import datetime
import json
import os
import sys
from pathlib import Path

from common.core import RunFacts, TrainingFailed, UserError, devices, flags, limits, progress, run_folder, signals
from common.launch import Task, launcher, supervisor

PROGRAM = "common.run"


def main(arguments):
    """Runs the script and exits: 0 all workers succeeded, 1 one failed, 2 bad flags or input, 130 stopped by Ctrl-C."""
    signals.prepare_for_a_closed_terminal()
    try:
        sys.exit(_run(arguments))
    except (UserError, TrainingFailed) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _run(arguments):
    values = flags.table(
        flags.integer("num_ps", 1, "ps tasks to start", least=1),
        flags.integer("num_workers", 2, "workers to start, the master among them", least=1),
        flags.integer("max_restarts", 0, "maximum number of restarts of each task", least=0),
        flags.gpus(),
        *flags.isolation(),
        flags.string("log_dir", None, "folder for the tasks' logs (default: runs/SCRIPT/TIME)"),
    )
    own = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    settings = flags.parse(values, arguments[:own], PROGRAM)
    if own == len(arguments):
        raise UserError("a script is missing: python -m common.run [--num_ps=1 --num_workers=2] SCRIPT.py [its arguments]")
    script = Path(arguments[own])
    if not script.is_file():
        raise UserError(f"there is no script {script}")
    if settings.gpus is not None:
        settings = devices.with_gpus(settings, flags.present(values, "num_workers"))
    limits.check_tasks(settings.num_ps, settings.num_workers)
    settings = settings.but(hang_secs=None, run=RunFacts(script.stem))  # without heartbeats
    launcher.check_isolation(settings)
    log_dir = Path(settings.log_dir or f"runs/{script.stem}/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S.%f}")
    with (
        run_folder.lock_folder(log_dir, "--log_dir", ["logs"]),
        launcher.fork_server(settings, log_dir, preloads=False) as server,
    ):
        hosts = launcher.reserved_hosts(server, settings.num_ps, settings.num_workers)

        def task(job, index):
            config = {"cluster": hosts, "task": {"type": job, "index": index}}
            environ = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"), "TF_CONFIG": json.dumps(config)}
            is_shown = (job, index) == ("worker", 0)
            command = [sys.executable, str(script), *arguments[own + 1 :]]
            return Task(job, index, command, str(log_dir), environ | devices.devices_of(job, index, settings.gpus), is_shown)

        progress.say(f"{script}: --num_ps={settings.num_ps} --num_workers={settings.num_workers}, logs in {log_dir / 'logs'}")
        if settings.gpus is not None:
            progress.say(devices.say_gpus(settings))
        if server.problem:
            progress.say(f"the ports of this run can be reached from outside: {server.problem}")
        tasks = [task(job, index) for job in hosts for index in range(len(hosts[job]))]
        return supervisor.Supervisor(tasks, server, settings, progress.say, ends_with_chief=False).run()
