"""Starts ps and workers as processes on this machine, shows their progress, restarts what dies, stops them all.

Imports no tensorflow: only the tasks do.
"""

import contextlib
import ctypes
import datetime
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import progress
from common.flags import UserError

INTERRUPTING_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and what the launcher sends to its workers
STOP_SECONDS = 60  # to save a checkpoint and leave, before a task is killed
PS_SECONDS = 10  # for a ps to see that all workers are done


class RunFailed(Exception):
    """Training cannot go on. The text is one line: which task, how it ended, what it said last."""


def launch(script, arguments, settings):
    """Runs `script` as `--num_ps` ps tasks and `--num_workers` workers to the end, and returns the exit status.

    Args:
      script: path of the scheme's script.
      arguments: its command line, handed on to each task.
      settings: the flags, as a namespace.

    Raises:
      UserError: if the run cannot begin.
      RunFailed: if a task ended too often.
    """
    _check_input(script, arguments, settings)
    prepare_run_dir(settings)
    with contextlib.ExitStack() as stack:
        hosts = reserved_hosts(stack, settings.num_ps, settings.num_workers + settings.num_evaluators)
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
                devices_of(job, i, settings.gpus),
            )
            for job in hosts
            for i in range(len(hosts[job]))
        ]
        shown = [*range(settings.num_workers), *(["evaluator"] if settings.num_evaluators else [])]
        display = stack.enter_context(progress.Display(settings, shown))
        display.say(
            f"{settings.scheme}: --num_ps={settings.num_ps} --num_workers={settings.num_workers} --run_dir={settings.run_dir}"
        )
        if settings.gpus is not None:
            display.say(say_gpus(settings))
        status = Run(tasks, settings, display.say).run()
    if status == 0:
        _complete_result(settings, tasks)
    progress.summary(settings, status)
    return status


def assign_gpus(settings, num_workers_given):
    """Turns `settings.gpus` from the flag's text into a list: what `CUDA_VISIBLE_DEVICES` calls them, empty if there is none.

    Unless the number of workers is given, there will be one for each.

    Raises:
      UserError: if the text names none, or one that is not there.
    """
    text = settings.gpus
    if text != "all" and not re.fullmatch(r"\d+(,\d+)*", text):
        raise UserError(f"--gpus must be all, or numbers of GPUs as 0,2, not {text!r}")
    named = [] if text == "all" else [int(number) for number in text.split(",")]
    if len(set(named)) < len(named):
        raise UserError(f"--gpus={text} names a GPU twice; to have workers share GPUs, give more --num_workers")
    count = _count_gpus()
    numbers = named or list(range(count))
    if max(numbers, default=-1) >= count:
        those = f"{count}: 0 to {count - 1}" if count else "none"
        raise UserError(f"--gpus={text} names GPU {max(numbers)}, but of those TensorFlow sees {those}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # if it is set, numbers count what it lists
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    settings.gpus = [names[number] for number in numbers]
    if numbers and not num_workers_given:
        settings.num_workers = len(numbers)


def _count_gpus():
    """Asks another process, as this one imports no tensorflow. Only that knows what its build and the drivers make of them."""
    program = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, stdin=subprocess.DEVNULL, text=True)
    if asked.returncode:
        raise UserError(f"--gpus: TensorFlow cannot be asked for GPUs: {_last_error(asked.stderr, '')}")
    return int(asked.stdout.split()[-1])


def devices_of(job, index, gpus):
    """Returns the variables that give a task its GPU: the workers one each, in turn; a ps computes next to nothing."""
    if job == "ps":
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}


def say_gpus(settings):
    """Returns which worker has which GPU, in one line."""
    if not settings.gpus:
        return "TensorFlow sees no GPU here: each worker computes on its CPU device"
    each = [f"worker {i}: GPU {settings.gpus[i % len(settings.gpus)]}" for i in range(settings.num_workers)]
    return ", ".join(each)


def _complete_result(settings, tasks):
    """Adds to the chief's result what the launcher knows."""
    path = Path(settings.run_dir, "result.json")
    result = json.loads(path.read_text())
    result.update(restarts=sum(task.restarts for task in tasks), wall_seconds=time.time() - settings.began)
    write_json(path, result)


def write_json(path, value):
    """Writes a JSON file, all or nothing."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(unfinished, path)


def prepare_run_dir(settings, task=None):
    """Makes the folder of the run and sets `settings.run_dir`.

    Raises:
      UserError: if it cannot be written, holds another run, or `--resume` finds nothing to resume.
    """
    if settings.run_dir is None:
        if settings.resume:
            raise UserError("--resume needs --run_dir=FOLDER, the folder of the run to go on with")
        settings.run_dir = f"runs/{settings.scheme}/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
    run_dir = Path(settings.run_dir)
    try:
        has_checkpoint = (run_dir / "checkpoints" / "checkpoint").exists()
    except OSError as error:  # a folder on the way may not be entered, a name is too long
        raise UserError(f"--run_dir={run_dir} cannot be written: {error.strerror}") from None
    is_chief = task is None or task.is_master()
    if settings.resume and not has_checkpoint and is_chief:
        raise UserError(f"--resume: there is no checkpoint in {run_dir / 'checkpoints'}")
    if has_checkpoint and not settings.resume and is_chief:
        raise UserError(f"--run_dir={run_dir} holds a run already: --resume goes on with it, another folder starts anew")
    try:
        for folder in ("checkpoints", "logs", "metrics"):
            (run_dir / folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_dir).close()  # of a name of its own: other tasks may be trying the same
    except OSError as error:
        raise UserError(f"--run_dir={run_dir} cannot be written: {error.strerror}") from None
    settings.run_dir = str(run_dir.resolve())


def _check_input(script, arguments, settings):
    """Lets one process look at data and model before any task starts. For the built-in ones nothing can be wrong."""
    if settings.data in ("digits", "linear") and settings.model in ("mlp", "linear") and settings.num_workers <= 100:
        return
    checking = subprocess.run(
        [sys.executable, str(script), *arguments, "--check"],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    if checking.returncode:
        raise UserError(_last_error(checking.stderr, script.name))


def _last_error(text, script_name):
    """The last line of `text` that a script printed about a `UserError`, else that looks like an error, else at all."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for looks_right in (lambda line: line.startswith(f"{script_name}: "), lambda line: "Error" in line, bool):
        found = [line for line in lines if looks_right(line)]
        if found:
            return found[-1].removeprefix(f"{script_name}: ")
    return "it printed nothing"


def reserved_hosts(stack, num_ps, num_workers):
    """Returns {job: addresses} for so many tasks on this machine, reserved until the `contextlib.ExitStack` is closed."""

    def hosts(count):
        return [f"127.0.0.1:{stack.enter_context(reserved_port()).getsockname()[1]}" for _ in range(count)]

    return {"ps": hosts(num_ps), "worker": hosts(num_workers)}


@contextlib.contextmanager
def reserved_port(port=0):
    """A port of this machine that nobody else gets as long as the context lasts: `port`, or any that is free.

    The socket is bound but does not listen; the task's server can bind to the port as well, since both allow reuse, also
    again after a restart. Closing the socket first would let another program take the port in between.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", port))
        yield reserved


def die_with_parent(launcher):
    """Makes this process end when its launcher, process `launcher`, ends in whatever way (Linux)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        pr_set_pdeathsig = 1
        libc.prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


@dataclass
class Task:
    """A process of the cluster, and its log; one that `is_shown` writes to the terminal instead."""

    job: str
    index: int
    command: list
    run_dir: str
    environ: dict = field(default_factory=dict)  # of its own
    is_shown: bool = False
    restarts: int = 0
    process: subprocess.Popen | None = None
    status: int | None = None

    @property
    def name(self):
        return f"{self.job} {self.index}"

    @property
    def log(self):
        return Path(self.run_dir, "logs", f"{self.job}-{self.index}.log")

    def start(self, events, environment):
        """Starts the process; when it ends, the task is put into the queue `events`."""
        self.status = None
        with contextlib.nullcontext() if self.is_shown else open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if self.is_shown else subprocess.STDOUT,
                env={**environment, **self.environ},
                start_new_session=True,  # so that a terminal's Ctrl-C reaches the launcher alone
            )
        threading.Thread(target=self._wait, args=(self.process, events), daemon=True).start()

    def _wait(self, process, events):
        process.wait()
        events.put((self, process))

    def signal(self, number):
        """Sends a signal if the process is alive."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)

    def last_words(self):
        """The last error in the log, one line."""
        if self.is_shown:
            return "what it said is above"
        return _last_error(self.log.read_text(errors="replace"), Path(self.command[1]).name)


class Run:
    """The tasks of a run from start to end.

    Args:
      tasks: every `Task`.
      settings: `num_workers`, `max_restarts`, and `lockstep`: whether all are started again with one.
      say: function that shows a line to the user.
    """

    def __init__(self, tasks, settings, say):
        self._tasks, self._settings, self._say = tasks, settings, say
        self._events: queue.SimpleQueue = queue.SimpleQueue()  # its put may be called by a signal handler
        threads = str(max(1, (os.cpu_count() or 1) // settings.num_workers))  # or the tasks fight over the cores
        self._environment = {
            "TF_NUM_INTRAOP_THREADS": threads,
            "TF_NUM_INTEROP_THREADS": threads,
            **os.environ,
            "TF_GRPC_REUSE_PORT": "true",
            "PYTHONUNBUFFERED": "1",
            "LAUNCHER_PID": str(os.getpid()),
        }

    def run(self):
        """Returns the exit status of the run; no task is left when it returns."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            for task in self._tasks:
                task.start(self._events, self._environment)
            return self._watch()
        except KeyboardInterrupt:
            self._stop_workers()
            return 130
        finally:
            for task in self._tasks:
                task.signal(signal.SIGKILL)
            for task in self._tasks:
                if task.process:
                    task.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number, frame):
        self._events.put(None)  # not an exception, which could strike between the start of a task and the note of it

    def _next_end(self, timeout=None):
        """Waits for a task to end; returns it, or None after `timeout` seconds. Raises KeyboardInterrupt on Ctrl-C."""
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        if event is None:
            raise KeyboardInterrupt
        task, process = event
        if process is not task.process:  # one that was started again since
            return self._next_end(timeout)
        task.status = process.returncode
        return task

    def _workers(self):
        return [task for task in self._tasks if task.job == "worker"]

    def _watch(self):
        while any(worker.status != 0 for worker in self._workers()):
            task = self._next_end()
            if task.status == 0:
                continue
            if task.status == 2:  # the user's mistake: no restart will mend it
                raise UserError(task.last_words())
            ended = f"was killed by {signal.Signals(-task.status).name}" if task.status < 0 else f"failed ({task.status})"
            if task.restarts == self._settings.max_restarts:
                log = "" if task.is_shown else f" (log: {task.log})"
                raise RunFailed(f"{task.name} {ended} after {task.restarts} restarts: {task.last_words()}{log}")
            task.restarts += 1
            self._say(f"{task.name} {ended}; restart {task.restarts} of {self._settings.max_restarts}")
            self._start_again(self._tasks if self._settings.lockstep else [task])
        deadline = time.monotonic() + PS_SECONDS
        while any(task.status is None for task in self._tasks):
            if self._next_end(max(0, deadline - time.monotonic())) is None:
                break  # a ps that was restarted at the very end may have missed a worker's word
        return 0

    def _start_again(self, tasks):
        """Workers that reduce among themselves wait for ever for one that is gone, so all of them begin anew."""
        for task in tasks:
            task.signal(signal.SIGKILL)
        for task in tasks:
            task.process.wait()
            task.start(self._events, self._environment)

    def _stop_workers(self):
        """Lets the workers end, the chief with a checkpoint, for which it needs the ps. A second Ctrl-C ends the patience."""
        self._say("stopping; Ctrl-C again stops at once")
        for worker in self._workers():
            worker.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        try:
            while any(worker.process and worker.process.poll() is None for worker in self._workers()):
                if self._next_end(max(0, deadline - time.monotonic())) is None:
                    break
        except KeyboardInterrupt:
            pass
