"""Runs `python SCHEME.py`: reads the flags, then starts a cluster on this machine or runs one task of a cluster.

A script is its update rule, its `Scheme`, and one call:

    SCHEME = Scheme(hogwild, epochs=60, batch_size=32, learning_rate=0.1)

    if __name__ == "__main__":
        main(SCHEME)
"""

import contextlib
import functools
import json
import os
import signal
import sys
import threading
from pathlib import Path

from absl import flags as absl

from common.cluster import membership, slurm, task_spec
from common.core import (
    TrainingFailed,
    UserError,
    checkpoints,
    devices,
    flags,
    limits,
    progress,
    run_folder,
    signals,
    task_status,
    why_unwritable,
)
from common.launch import control, launcher, sandbox, supervisor
from common.scheme import Scheme


def main(scheme):
    """Runs the script of a `common.Scheme` and exits: 0 trained, 1 failed, 2 bad flags or input, 130 stopped by Ctrl-C."""
    if not isinstance(scheme, Scheme):
        raise UserError("main(...) takes a Scheme: SCHEME = Scheme(function, epochs=60, ...), and then main(SCHEME)")
    if not os.environ.get("LAUNCHER_PID"):
        signals.prepare_for_a_closed_terminal()
    script = Path(sys.argv[0]).resolve()
    if stale := _stale_launcher():
        print(f"{script.name}: {stale}", file=sys.stderr)
        sys.exit(2)
    failed = supervisor.FAILED_FOR_GOOD if os.environ.get("LAUNCHER_KEY") else 1
    try:
        status = _run(scheme, script, sys.argv[1:])
        task_status.work_is_done()  # marks a regular exit: a user's function may call sys.exit, too
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, (UserError, TrainingFailed)):
            line = f"{script.name}: {error}"
        elif why := why_unwritable(error):
            where = getattr(error, "filename", None) or "the folder of the run"
            what = "fix that, and continue with --resume if there is a checkpoint"
            line = f"{script.name}: {where} cannot be written: {why}; {what}"
        else:
            raise
        task_status.say_last(line)
        with contextlib.suppress(OSError):  # on a full disk, writing to the log fails, too
            print(line, file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else failed)


def _stale_launcher():
    """Returns an error line if the environment has a launcher's variables, but no launcher started this process; else None."""
    given = [name for name in (*task_status.VARIABLES, *task_status.MORE_VARIABLES) if os.environ.get(name)]
    is_of_parent = os.environ.get("LAUNCHER_PID") == str(os.getppid())
    # A launcher sets all of them; a user's program may set only its process id, so that a task ends with it.
    if not given or is_of_parent and (given == ["LAUNCHER_PID"] or set(task_status.VARIABLES) <= set(given)):
        return None
    values = ", ".join(f"{name}={os.environ[name]}" for name in given)
    return f"{values} in the environment, but no launcher has started this process: unset it"


def _log_to(path):
    """Redirects the standard error of C++ code to a file, to keep tensorflow's start-up messages off the terminal."""
    sys.stderr.flush()
    terminal = os.dup(2)
    log = run_folder.open_own(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 2)
    os.close(log)
    sys.stderr = signals.lasting(sys.stderr, terminal)  # Python's own errors stay visible


def _have_environment(task):
    """Restarts the process, if needed, with a launcher's environment variables: some are only read at process start."""
    addresses = task.hosts[task.job]
    here = addresses[task.job_index].rpartition(":")[0] if addresses else None
    neighbours = sum(address.rpartition(":")[0] == here for address in task.hosts["worker"])
    environ = launcher.environment(max(1, neighbours))
    if not environ.items() <= os.environ.items():
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def _serve(task):
    """Runs a ps that no launcher has started, until its workers are done.

    SIGTERM comes from a scheduler, which sends it to all tasks; SIGHUP from a closed terminal, maybe the workers', too. After
    either, the ps waits until the workers have left (`membership.ask_to_end`), at most `supervisor.STOP_SECONDS`, and
    exits with 130 like Ctrl-C. A second SIGTERM ends it at once.
    """
    is_asked = threading.Event()

    def hear(number):
        if number == signal.SIGHUP and is_asked.is_set():
            return  # the shell and the kernel may both send it
        if is_asked.is_set() or not task.is_serving():
            os._exit(130)
        timer = threading.Timer(supervisor.STOP_SECONDS, os._exit, [130])
        timer.daemon = True
        timer.start()
        is_asked.set()
        print(f"asked to end: waits until the workers have left, {supervisor.STOP_SECONDS} s at most", flush=True)
        threading.Thread(target=membership.ask_to_end, args=(task, task.start_server()), daemon=True).start()

    signals.hear_signals((signal.SIGTERM, signal.SIGHUP), hear)
    task.create_server()
    sys.stdout.flush()
    os._exit(130 if is_asked.is_set() else 0)  # a thread in tensorflow's code would not survive interpreter shutdown


def _run(scheme, script, arguments):
    parent = os.environ.get("LAUNCHER_PID")
    if parent:
        sandbox.die_with_parent(int(parent))
    absl.FLAGS.mark_as_parsed()  # a user's model may read flags of its own: they have their defaults
    settings, task = _settings_of(scheme, script, arguments)
    launches = task is None and settings.launch
    if settings.check:
        return _check_input(scheme, settings, launches)
    if launches:
        return launcher.launch(script, arguments, settings)
    if not parent:
        if task:
            _have_environment(task)
        settings = _hold_run_folder(settings, task, script, arguments)
    if task and task.is_ps():
        print(f"ps {task.index} serves at {task.ps_hosts[task.index]} until all workers are done", flush=True)
        if not parent:
            return _serve(task)
        task_status.doing("serving", waits=True)
        task.create_server()
        return 0
    if task and task.is_evaluator():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # unlike the other workers, an evaluator cannot leave
        return scheme.evaluate(task, settings)
    return _train(scheme, settings, task)


def _settings_of(scheme, script, arguments):
    """Returns the `Settings` of a command line, with values derived from them, and the `TaskSpec` of this process or None."""
    values = scheme.flag_values()
    settings = flags.parse(values, arguments, script.name, scheme.without)
    settings = settings.but(run=scheme.facts(script.parent.name, settings.num_workers))
    task = _task_of(scheme, settings, script)
    flags.check_keras()
    if settings.run_dir == "":
        raise UserError("--run_dir is empty: name a folder, or leave the flag out")
    run_folder.check_no_url(settings.run_dir)
    launches = task is None and settings.launch
    if settings.max_workers:
        _check_places(scheme, settings, values, task, launches or os.environ.get("LAUNCHER_KEY"))
    settings = settings.but(run=settings.run._replace(num_evaluators=1 if scheme.evaluate and (task or launches) else 0))
    if scheme.evaluate and not settings.run.num_evaluators:  # a process that trains alone uses all samples
        settings = settings.but(validation=None, patience=None)
    _check_present(settings, values, task, launches)
    if not launches:  # the task counts that a scheme may read
        settings = settings.but(num_ps=task.num_ps if task else 0, num_workers=task.num_workers if task else 1)
    elif settings.gpus is not None and not settings.check:
        settings = devices.with_gpus(settings, flags.present(values, "num_workers"))
    _check_counts(settings, launches)
    if scheme.check:
        scheme.check(settings)
    if launches and settings.validation and settings.data in flags.FITTING:  # the check process reads other data
        from common.data import datasets

        datasets.hold_out(datasets.load(settings.data, settings.seed), settings.validation, settings.seed)
    return settings, task


def _task_of(scheme, settings, script):
    """Returns the `TaskSpec` of this process, or None without one."""
    task = task_spec.task_from(settings) if "job_name" not in scheme.without else None
    if task and scheme.evaluate:
        # In TF_CONFIG an evaluator has its own task type, outside the cluster, so no worker has to take its place.
        is_by_tf_config = settings.job_name is None and os.environ.get("TF_CONFIG", "").strip()
        return task if is_by_tf_config else task.use_last_worker_as_evaluator()
    if task and task.is_evaluator():
        raise UserError(f"this task is an evaluator, but {script.name} has none; use Continuous-Evaluation")
    return task


def _check_places(scheme, settings, values, task, has_launcher):
    """Raises a `UserError` if workers cannot join and leave this run."""
    flag, name = f"--max_workers={settings.max_workers}", settings.run.scheme
    if scheme.pace == "ring":
        raise UserError(f"{flag}: the workers of {name} average among themselves, so none can join: leave it out")
    if scheme.evaluate:
        raise UserError(f"{flag}: {name} has an evaluator in the last place: leave it out")
    if not has_launcher and not task:
        raise UserError(f"{flag} needs --launch, which `bash {name}/run.sh` adds: workers join through the launcher")
    if not has_launcher and task.num_workers != settings.max_workers:
        raise UserError(f"{flag}, but the cluster names {task.num_workers} of them: each place needs an address of its own")
    if (settings.gpus is not None or not has_launcher) and not flags.present(values, "num_workers"):
        why = "with --gpus" if has_launcher else "in a cluster that no launcher has started"
        raise UserError(f"{flag}: {why} give --num_workers, too, the number at the start")
    if settings.max_workers < settings.run.begin_workers:
        raise UserError(f"{flag} is less than --num_workers={settings.run.begin_workers}, the number at the start")


def _check_present(settings, values, task, launches):
    """Raises a `UserError` for a flag without meaning in this process."""
    if settings.patience and not settings.validation and ":" not in settings.data:
        raise UserError("--patience needs held-out samples: give their share, too, with --validation")
    if task is None and flags.present(values, "give_up_secs"):
        raise UserError("--give_up_secs is for tasks started by hand: a launcher restarts its tasks (--max_restarts)")
    if task is None and not launches and (given := flags.present(values, "num_ps", "num_workers", "gpus")):
        needs = f"--{given[0]} needs --launch, which `bash {settings.run.scheme}/run.sh` adds"
        raise UserError(f"{needs}; without it, one process trains")


def _check_counts(settings, launches):
    """Raises a `UserError` for too many delays, samples or tasks."""
    if len(settings.delays or []) > (count := settings.max_workers or settings.num_workers):
        raise UserError(f"--delays names {len(settings.delays)} workers, but there are {count}")
    if (settings.steps or 0) * settings.window * settings.batch_size > flags.INT64:
        raise UserError(
            f"--steps={settings.steps} of {settings.window:,} × {settings.batch_size:,} samples each are more samples than 64 "
            "bits can count: choose fewer steps or smaller batches"
        )
    if launches:
        limits.check_tasks(settings.num_ps, (settings.max_workers or settings.num_workers) + settings.run.num_evaluators)


def _check_input(scheme, settings, launches):
    """Checks the data and the model, as a launcher asks for with --check; returns the exit status."""
    from common.data import Stream, datasets, sources

    if os.environ.get("LAUNCHER_PID"):
        task_status.tell_warnings()
    task_status.doing(task_status.LOADING)
    dataset = datasets.load(settings.data, settings.seed) if scheme.train else sources.load(settings)
    workers = settings.num_workers if launches else 1
    some = dataset.first if isinstance(dataset, Stream) else dataset
    datasets.check_batch(some.x_train, some.y_train, settings.batch_size, settings.window, workers)
    from common.training import run_check

    task_status.doing(task_status.BUILDING)
    run_check.check(settings, dataset, scheme.function)
    if isinstance(dataset, datasets.Data) and (shared := os.environ.get("LAUNCHER_DATA")):
        datasets.share(dataset, int(shared), whole=bool(dataset.text) and dataset.entry is None)
    if found := os.environ.get("LAUNCHER_FOUND"):
        Path(found).write_text(json.dumps(sources.to_keep(settings, dataset)))
    task_status.doing(task_status.CHECKED)
    return 0


def _hold_run_folder(settings, task, script, arguments):
    """Prepares and locks the run's folder for a process without a launcher, until it ends; returns the settings with it."""
    code = control.code_of(script.parent)[1] if settings.max_workers else None
    path, _ = run_folder.prepare_run_dir(settings, task)
    run_folder.watch_locks(path)
    if os.environ.get("PLACES") and task and task.is_master():
        about = {"scheme": settings.run.scheme, "ps": task.ps_hosts, "worker": task.worker_hosts, "arguments": arguments}
        run_folder.write_json(Path(path, slurm.CLUSTER), about)
    _log_to(Path(path, "logs", f"{run_folder.task_name(task)}.log"))
    return settings.but(run_dir=path, run=settings.run._replace(code=code))


def _train(scheme, settings, task):
    """Trains as a worker, or alone; returns the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.heeded())  # see training.Interruption
    from common.training import loop  # imports tensorflow

    index = task.shard_index if task else 0
    if scheme.train and index == 0:
        checkpoints.list_anew(Path(settings.run_dir, "checkpoints"))
    train = scheme.train or functools.partial(loop.train, scheme.function)
    if os.environ.get("LAUNCHER_PID"):
        return train(task, settings)
    with progress.Display(settings, [index] if task else range(getattr(settings, "num_threads", 1))) as display:
        display.doing = lambda worker: task_status.present() or "starting"
        status = train(task, settings)
        if task and status == 130:
            membership.say_left(task, task.create_server())
    if index == 0:
        progress.summary(settings, status)
    return status
