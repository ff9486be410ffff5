"""Starts ps and workers as processes on this machine, and supervises them to the end of the run.

Imports no tensorflow: only the tasks do.
"""

import contextlib
import functools
import json
import os
import sys
import time
from pathlib import Path

from common.core import TrainingFailed, UserError, check_locks, devices, prepare_run_dir, progress, write_json
from common.launch import control, sandbox, warm
from common.launch.fork_server import ForkServer
from common.launch.fork_server import reserved_port as reserved_port  # for callers that start tasks themselves
from common.launch.input_check import check_input
from common.launch.supervisor import STARTER, StarterEnded, Supervisor
from common.launch.task import Task


def launch(script, arguments, settings):
    """Runs `script` as `--num_ps` ps tasks and `--num_workers` workers to the end, and returns the exit status.

    Args:
      script: path of the scheme's script.
      arguments: its command line, passed on to each task.
      settings: the flags, as a namespace.

    Raises:
      UserError: if the run cannot start.
      TrainingFailed: if a task ended too often.
    """
    # The data lives in an anonymous file, freed with the last process that has it open.
    with open(os.memfd_create("data"), "rb") as shared, warm.WarmProcess() as process:
        check_secs, known = check_input(script, arguments, settings, process, shared.fileno())
        check_isolation(settings)
        run_dir, held = prepare_run_dir(settings)
        settings = settings.but(run_dir=run_dir)
        with held:
            write_json(Path(run_dir, "data.json"), known)
            return _launch(script, arguments, settings, process, shared.fileno(), check_secs)


def _launch(script, arguments, settings, process=None, shared=None, check_secs=None):
    result = Path(settings.run_dir, "result.json")
    before = _version(result)
    with contextlib.ExitStack() as stack:
        most = settings.max_workers or settings.num_workers
        shown = [*range(most), *(["evaluator"] if settings.run.num_evaluators else [])]
        display = stack.enter_context(progress.Display(settings, shown, range(settings.num_workers, most)))
        where = progress.as_typed(Path(settings.run_dir))
        display.say(f"{settings.run.scheme}: --num_ps={settings.num_ps} --num_workers={settings.num_workers} --run_dir={where}")
        server = stack.enter_context(fork_server(settings, settings.run_dir, True, shared, process))
        hosts = reserved_hosts(server, settings.num_ps, most + settings.run.num_evaluators)
        command = [
            *(sys.executable, str(script)),
            *(argument for argument in arguments if argument != "--launch"),
            f"--run_dir={settings.run_dir}",
            f"--ps_hosts={','.join(hosts['ps'])}",
            f"--worker_hosts={','.join(hosts['worker'])}",
        ]
        tasks = [
            Task(
                job,
                i,
                [*command, f"--job_name={job}", f"--task_index={i}"],
                settings.run_dir,
                devices.devices_of(job, i, settings.gpus),
            )
            for job in hosts
            for i in range(len(hosts[job]))
        ]
        for task in tasks:
            if settings.max_workers and task.job == "worker" and task.index >= settings.num_workers:
                task.status, task.has_left = 0, True  # a free place
        if server.problem:
            display.say(f"the ports of this run can be reached from outside: {server.problem}")
        if settings.gpus is not None:
            display.say(devices.say_gpus(settings))
        display.doing = functools.partial(_doing, {task.index: task for task in tasks if task.job == "worker"})
        run = Supervisor(tasks, server, settings, display.say, check_secs)
        if settings.max_workers:
            run.code = control.code_of(Path(script).parent)
            stack.enter_context(control.heard(settings.run_dir, run.hear_request))
        try:
            status = run.run()
        except StarterEnded:
            evaluators = [task for task in tasks if task.job == "worker" and task.index >= most]
            if _version(result) in (None, before) or any(task.status != 0 for task in evaluators):
                raise
            display.say(f"{STARTER} has ended, but after worker 0 had written the result")
            status = 0
    if status == 0:
        check_locks(settings.run_dir)
        if _version(result) in (None, before):  # an existing file is from the resumed run
            raise TrainingFailed(f"worker 0 ended without writing {result}")
        _complete_result(settings, tasks)
    progress.summary(settings, status)
    return status


def _doing(workers, index):
    """Returns the activity of a worker; before its first report, it or its warm process is importing TensorFlow."""
    progress = workers[index].progress if index in workers else None
    return progress.what if progress and progress.what else "importing TensorFlow"


def _version(path):
    """Returns inode and modification time, which change when the file is replaced; None without a file."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_mtime_ns
    return None


def _complete_result(settings, tasks):
    """Adds restarts and times, known to the launcher, to the chief's result."""
    path = Path(settings.run_dir, "result.json")
    result = json.loads(path.read_text())
    most = settings.max_workers or settings.num_workers
    workers = [task for task in tasks if task.job == "worker" and task.index < most]
    result.update(
        restarts=sum(task.restarts for task in tasks),
        restarts_of_workers=[worker.restarts for worker in workers],
        wall_seconds=time.monotonic() - settings.run.began,
        worker_seconds=sum(worker.lived() for worker in workers),
    )
    write_json(path, result)


def check_isolation(settings):
    """Raises a `UserError` if network isolation is required but impossible."""
    if settings.require_isolation and not settings.isolation:
        raise UserError("--require_isolation and --noisolation contradict each other: leave one out")
    problem = sandbox.why_no_own_network() if settings.require_isolation else None
    if problem:
        raise UserError(f"--require_isolation: this run cannot have a network of its own: {problem}")


def environment(num_workers):
    """Returns the environment variables of tasks: this process's own, plus defaults.

    Args:
      num_workers: number of workers that share this machine.
    """
    threads = str(max(1, (os.cpu_count() or 1) // num_workers))  # to avoid oversubscribing the cores
    return {
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": threads,
        **warm.environment(os.environ),
    }


def fork_server(settings, run_dir, preloads, shared=None, process=None):
    """Returns the `ForkServer` that starts the tasks of a run; arguments as in that class."""
    log = Path(run_dir, "logs", "fork-server.log")
    environ = environment(settings.num_workers) | {"TF_GRPC_REUSE_PORT": "true"}  # ports are bound: see `reserved_port`
    return ForkServer(environ, log, settings.isolation, preloads, shared, process)


def reserved_hosts(server, num_ps, num_workers):
    """Returns {job: addresses} for these tasks on this machine, reserved while the `ForkServer` lives."""
    hosts = [f"127.0.0.1:{port}" for port in server.reserve_ports(num_ps + num_workers)]
    return {"ps": hosts[:num_ps], "worker": hosts[num_ps:]}
