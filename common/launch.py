"""Starts ps and workers as processes on this machine, shows their progress, restarts what dies, stops them all.

Imports no tensorflow: only the tasks do.
"""

import contextlib
import datetime
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import forkserver, progress, signals
from common.flags import TrainingFailed, UserError
from common.forkserver import ForkServer, die_with_parent, reserved_port  # noqa: F401

STOP_SECONDS = 60  # to save a checkpoint and leave, before a task is killed
PS_SECONDS = 10  # for a ps to see that all workers are done
FAILED_FOR_GOOD = 3  # exit status of a task that a new start will not mend


def launch(script, arguments, settings):
    """Runs `script` as `--num_ps` ps tasks and `--num_workers` workers to the end, and returns the exit status.

    Args:
      script: path of the scheme's script.
      arguments: its command line, handed on to each task.
      settings: the flags, as a namespace.

    Raises:
      UserError: if the run cannot begin.
      TrainingFailed: if a task ended too often.
    """
    _check_input(script, arguments, settings)
    check_isolation(settings)
    prepare_run_dir(settings)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(fork_server(settings, settings.run_dir, preloads=True))
        hosts = reserved_hosts(server, settings.num_ps, settings.num_workers + settings.num_evaluators)
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
        if server.problem:
            display.say(f"the ports of this run can be reached from outside: {server.problem}")
        if settings.gpus is not None:
            display.say(say_gpus(settings))
        settings.ends_with_chief = True
        status = Run(tasks, server, settings, display.say).run()
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
        folder = run_dir / "checkpoints"
        has_checkpoint = folder.exists() and any(folder.glob("*.index"))
    except OSError as error:  # a folder on the way may not be entered, a name is too long
        raise UserError(f"--run_dir={run_dir} cannot be written: {error.strerror}") from None
    is_chief = task is None or task.is_master()
    if settings.resume and not has_checkpoint and is_chief:
        raise UserError(f"--resume: there is no checkpoint in {run_dir / 'checkpoints'}")
    if has_checkpoint and not settings.resume and is_chief:
        raise UserError(f"--run_dir={run_dir} holds a run already: --resume goes on with it, another folder starts anew")
    try:
        make_private_folder(run_dir)
        for name in ("checkpoints", "logs", "metrics"):
            (run_dir / name).mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=run_dir).close()  # of a name of its own: other tasks may be trying the same
    except OSError as error:
        raise UserError(f"--run_dir={run_dir} cannot be written: {error.strerror}") from None
    settings.run_dir = str(run_dir.resolve())


def make_private_folder(path):
    """Makes a folder that other users of the machine cannot look into, unless it is there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


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


def check_isolation(settings):
    """Raises a `UserError` if there has to be a network for the run alone, and there cannot be."""
    if settings.require_isolation and not settings.isolation:
        raise UserError("--require_isolation and --noisolation contradict each other: leave one away")
    problem = forkserver.why_no_own_network() if settings.require_isolation else None
    if problem:
        raise UserError(f"--require_isolation: this run cannot have a network of its own: {problem}")


def environment(num_workers):
    """Returns the variables that tasks begin with: this process's own, and what it does not set.

    Args:
      num_workers: how many share this machine.
    """
    threads = str(max(1, (os.cpu_count() or 1) // num_workers))  # or the tasks fight over the cores
    return {
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": threads,
        "MALLOC_ARENA_MAX": "1",  # with a heap for each thread, glibc's default, memory grows twice as fast
        # What a large message took is kept for the next one: the kernel takes as long to give it as the network to fill it.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
    }


def fork_server(settings, run_dir, preloads):
    """Returns the `ForkServer` that starts the tasks of a run."""
    log = Path(run_dir, "logs", "fork-server.log")
    environ = environment(settings.num_workers) | {"TF_GRPC_REUSE_PORT": "true"}  # of the ports that are reserved
    return ForkServer(environ, log, settings.isolation, preloads)


def reserved_hosts(server, num_ps, num_workers):
    """Returns {job: addresses} for so many tasks on this machine, reserved as long as the `ForkServer` lives."""
    hosts = [f"127.0.0.1:{port}" for port in server.reserve_ports(num_ps + num_workers)]
    return {"ps": hosts[:num_ps], "worker": hosts[num_ps:]}


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
    status: int | None = None  # how it ended, None until it has
    heard: float = math.inf  # when it gave the last sign of life, as time.monotonic(); it begins with one
    last_line: str = ""  # what it said that it ended with
    is_silent: bool = False  # whether it was killed because it gave none

    @property
    def name(self):
        return f"{self.job} {self.index}"

    @property
    def is_running(self):
        return self.status is None

    @property
    def log(self):
        return Path(self.run_dir, "logs", f"{self.job}-{self.index}.log")

    def start(self, server):
        """Starts the process."""
        self.status, self.heard, self.is_silent, self.last_line = None, math.inf, False, ""
        server.start(self.name, self.command, None if self.is_shown else str(self.log), self.environ)

    def last_words(self):
        """What it ended with, one line, else the last error in its log."""
        if self.last_line:
            return self.last_line.partition(": ")[2]
        if self.is_shown:
            return "what it said is above"
        return _last_error(self.log.read_text(errors="replace"), Path(self.command[1]).name)


class Run:
    """The tasks of a run from start to end.

    Args:
      tasks: every `Task`.
      server: the `ForkServer` that starts them.
      settings: `max_restarts`; `hang_secs`, seconds without a sign of life after which a task is killed, or None; `lockstep`:
        whether all are started again with one; `ends_with_chief`: whether worker 0 ends the training of all others, and
        `num_evaluators`: how many of the last workers then still have something to do.
      say: function that shows a line to the user.
    """

    def __init__(self, tasks, server, settings, say):
        self._tasks, self._server, self._settings, self._say = {task.name: task for task in tasks}, server, settings, say
        self._events: queue.SimpleQueue = queue.SimpleQueue()  # its put may be called by a signal handler
        self._workers = [task for task in tasks if task.job == "worker"]
        self._chief = self._workers[0]
        self._evaluators = self._workers[len(self._workers) - settings.num_evaluators :]
        self._is_interrupted = False

    def run(self):
        """Returns the exit status of the run; whatever task is left then ends with the server."""
        before = {number: signal.signal(number, self._interrupt) for number in signals.heeded()}
        self._server.listen(lambda *end: self._events.put(end), self._hear)
        try:
            for task in self._tasks.values():
                task.start(self._server)
            return self._watch()
        except KeyboardInterrupt:
            self._stop_workers()
            return 130
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number, frame):
        if number == signal.SIGHUP and self._is_interrupted:
            return  # the shell and the system may both send it: nobody is impatient
        self._is_interrupted = True
        self._events.put(None)  # not an exception, which could strike between the start of a task and the note of it

    def _hear(self, name, text):
        self._tasks[name].heard = time.monotonic()
        if text.startswith(forkserver.LAST):
            self._tasks[name].last_line = text.removeprefix(forkserver.LAST)
        elif text:
            self._events.put(text)  # to be shown by the main thread: a terminal may keep whoever writes to it waiting

    def _next_end(self, deadline=math.inf):
        """Waits for a task to end; returns it, or None when it is past `deadline`. Raises KeyboardInterrupt on Ctrl-C."""
        looked = time.monotonic()
        while True:
            try:
                event = self._events.get(timeout=max(0, min(1, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return None
                self._look_for_silent_tasks(looked)
                looked = time.monotonic()
                continue
            if event is None:
                raise KeyboardInterrupt
            if isinstance(event, str):
                self._say(event)
                continue
            name, status = event
            if name is None:
                raise TrainingFailed("the process that starts the tasks was killed; --resume goes on")
            task = self._tasks[name]
            task.status = status
            return task

    def _look_for_silent_tasks(self, last_look):
        now = time.monotonic()
        for task in self._tasks.values():
            if now - last_look > 2:  # this process itself was stopped, and could not hear
                task.heard = max(now, task.heard)
            elif self._settings.hang_secs and task.is_running and now - task.heard > self._settings.hang_secs:
                task.is_silent, task.heard = True, now
                self._server.signal(task.name, signal.SIGKILL)

    def _watch(self):
        needed = [self._chief, *self._evaluators] if self._settings.ends_with_chief else self._workers
        while any(task.status != 0 for task in needed):
            task = self._next_end()
            if task.status == 0 or (self._has_ended() and task not in needed):
                continue
            self._must_be_mendable(task)
            task.restarts += 1
            self._say(f"{task.name} {_how(task)}; restart {task.restarts} of {self._settings.max_restarts}")
            self._start_again(task)
        deadline = time.monotonic() + PS_SECONDS
        while any(task.is_running for task in self._tasks.values()):
            if self._next_end(deadline) is None:
                break  # a ps that was restarted at the very end may have missed a worker's word
        return 0

    def _has_ended(self):
        return self._settings.ends_with_chief and self._chief.status == 0

    def _must_be_mendable(self, task):
        """Raises what ends the run, unless a new start may mend what this task ended with."""
        if task.status == 2:  # the user's mistake
            raise UserError(task.last_words())
        log = "" if task.is_shown else f" (log: {task.log})"
        if task.status == FAILED_FOR_GOOD:
            raise TrainingFailed(f"{task.last_words()}{log}")
        if task.restarts == self._settings.max_restarts:
            raise TrainingFailed(f"{task.name} {_how(task)} after {task.restarts} restarts: {task.last_words()}{log}")

    def _start_again(self, task):
        """Starts a task again, and with it those without whom it cannot go on."""
        others = [other for other in self._tasks.values() if other is not task]
        if self._settings.lockstep and not self._has_ended():
            # Workers that reduce among themselves wait for ever for one that is gone, so all of them begin anew.
            for other in others:
                self._server.signal(other.name, signal.SIGKILL)
            while any(other.is_running for other in others):
                self._next_end()
        task.start(self._server)
        if (self._settings.lockstep or self._settings.ends_with_chief) and not self._has_ended():
            for other in others:
                if not other.is_running and (self._settings.lockstep or other not in self._evaluators):
                    other.start(self._server)  # it had done its part, but the chief asks all for their report

    def _stop_workers(self):
        """Lets the workers end, the chief with a checkpoint, for which it needs the ps. A second Ctrl-C ends the patience."""
        self._say("stopping; Ctrl-C again stops at once")
        for worker in self._workers:
            self._server.signal(worker.name, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        try:
            while any(worker.is_running for worker in self._workers):
                if self._next_end(deadline) is None:
                    break
        except (KeyboardInterrupt, TrainingFailed):
            pass


def _how(task):
    """How a task ended that did not end well."""
    if task.is_silent:
        return "gave no sign of life and was killed"
    return f"was killed by {signal.Signals(-task.status).name}" if task.status < 0 else f"failed ({task.status})"
