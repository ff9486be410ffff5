"""Fork server of a run: starts the tasks as forks in a network of their own, so tensorflow is imported once.

The server is itself a fork of a warm process (common/launch/warm.py), requested by a launcher with `ForkServer`. A launcher
imports no tensorflow, so that a wrong flag is reported at once.

A restarted task is another fork, up again within a moment. Tasks are children of the server and end with it; the server ends
with the launcher. Processes started by a task end with the task.

A task reports its progress (`common.core.doing`), so the launcher notices a live task that makes none.
"""

import contextlib
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection, Pipe, wait

from common.core import TrainingFailed, UserError, open_own, task_status
from common.launch import sandbox, warm

BEAT_SECONDS = 0.5  # heartbeat interval of tasks and fork server
START_SECONDS = 120  # timeout for an answer of the fork server
DATA = 100  # file descriptor of the shared data in all tasks
EARLY = 256  # exited 0 without `work_is_done`; outside the range of exit statuses
_DONE = 100  # exit status after `work_is_done`
LEFT = 257  # a worker that left for good on request


class ForkServer:
    """The launcher's client of the fork server: starts tasks and receives their exit statuses. To be used as a context.

    Args:
      environment: variables of the server and of all tasks.
      log: path of a file for the output of the server itself; None for `errors`.
      is_isolated: whether the tasks get a network of their own.
      preloads: whether tasks are scripts that use tensorflow; otherwise each starts as a new program.
      shared: descriptor of a file with the tasks' data, see `common.data.datasets.share`; None without one.
      process: the `warm.WarmProcess` to fork the server from; by default one for it alone.
      errors: descriptor of the file for the errors of tasks without a log.

    Attributes:
      problem: reason why the tasks have no network of their own, one line; None if they have one or need none.
      heard: time of the server's last heartbeat, as time.monotonic().
      log: path of the server's log.
    """

    def __init__(self, environment, log, is_isolated, preloads=True, shared=None, process=None, errors=2):
        self.log = log
        self._hearing: list[threading.Thread] = []
        self._connection, theirs = Pipe()
        mask = os.umask(0o77)
        os.umask(mask)
        self._words, said = os.pipe()
        os.set_blocking(said, False)  # so that no task blocks while the launcher is stopped
        request = {
            "environment": {**os.environ, **environment},
            "log": log and os.path.abspath(log),
            "is_isolated": bool(is_isolated),
            "preloads": preloads,
            "folder": os.getcwd(),
            "mask": mask,
        }
        descriptors = [theirs.fileno(), said, 1, errors, *([] if shared is None else [shared])]
        with contextlib.ExitStack() as stack:
            stack.callback(self._connection.close)
            self._warm = process or stack.enter_context(warm.WarmProcess(preloads))
            try:
                self._pid = self._warm.serve(request, descriptors)
            finally:
                theirs.close()
                os.close(said)
            self.heard = time.monotonic()
            self.problem = self._ask("problem")
            self._stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        """Kills the remaining tasks, after which all their messages have been read."""
        with self._stack:
            with contextlib.suppress(OSError):
                self._connection.send(("stop",))
            if self._warm.status(self._pid) is None:  # it may have been stopped by a signal
                self.kill()
                self._warm.status(self._pid)
            for thread in self._hearing:
                thread.join(warm.STOP_SECONDS)

    def _ask(self, *request):
        try:
            self._connection.send(request)
            if self._connection.poll(START_SECONDS):
                return self._connection.recv()
        except (EOFError, OSError):
            where = f" (log: {self.log})" if self.log else ""
            raise TrainingFailed(f"the process that starts the tasks has ended{where}") from None
        self.kill()
        raise TrainingFailed(f"the process that starts the tasks gave no answer for {START_SECONDS} s and was killed")

    def kill(self):
        """Kills the server at once, and the tasks with it."""
        self._warm.kill(self._pid)

    def status(self):
        """Waits for the server to exit; returns its exit status, negative for a signal, None if unknown."""
        return self._warm.status(self._pid)

    def reserve_ports(self, count):
        """Returns ports reserved in the tasks' network, see `reserved_port`. Call it before any start."""
        return self._ask("ports", count)

    def listen(self, ended, said):
        """From now on calls `ended(key, status)` when a task has ended, and `said(key, text)` at each heartbeat or message.

        Both are called from threads. The key is None when the server itself has ended.
        """

        def hear_ends():
            try:
                while True:
                    ended(*self._connection.recv())
            except (EOFError, OSError):
                ended(None, None)

        def hear_words():
            with open(self._words, encoding="utf-8", errors="replace", newline="\n") as lines:
                for line in lines:
                    key, _, text = line.rstrip("\n").partition("\t")
                    if key:
                        said(key, text)
                    else:  # heartbeat of the server itself
                        self.heard = time.monotonic()

        self._hearing = [threading.Thread(target=hear, daemon=True) for hear in (hear_ends, hear_words)]
        for thread in self._hearing:
            thread.start()

    def start(self, key, command, log, environ):
        """Starts a task: `command` is interpreter, script and arguments; with `log` None it writes to this terminal."""
        with contextlib.suppress(OSError):  # if the server has ended, the listener notices
            self._connection.send(("start", key, command, log, environ))

    def signal(self, key, number):
        """Sends a signal to a running task."""
        with contextlib.suppress(OSError):
            self._connection.send(("signal", key, number))


@contextlib.contextmanager
def reserved_port(port=0):
    """Reserves a port of this machine while the context lasts: `port`, or any free one.

    The socket is bound but does not listen; the task's server can bind to the port as well, even after a restart, since both
    allow reuse. Closing the socket first would let another program take the port in between.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", port))
        yield reserved


def serve(parent, descriptors, environment, log, is_isolated, preloads, folder, mask):
    """Runs the fork server, a fork of process `parent`, and in turn each of its tasks. Never returns.

    Args:
      descriptors: those of the launcher's connection, the message pipe, standard output and error, and the data if any.
      environment: all variables.
      log, is_isolated, preloads: as in `ForkServer`.
      folder, mask: working directory and umask.
    """
    status = 1
    try:
        connection, pipe, output, terminal, *shared = descriptors
        sandbox.die_with_parent(parent, signal.SIGCONT)  # so that it notices the launcher's end even if it was stopped
        os.setsid()
        _set_environment(environment | {"LAUNCHER_DATA": str(DATA) if shared else ""})
        os.chdir(folder)
        os.umask(mask)
        os.dup2(output, 1)
        os.dup2(terminal, 2)
        os.close(output)
        os.set_inheritable(pipe, True)  # for a task that execs a new program
        if DATA in descriptors:
            raise RuntimeError(f"descriptor {DATA} is in use: too many runs share the warm process")
        if shared:
            os.dup2(shared[0], DATA)
            os.close(shared[0])
        if log:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        _set_title(f"{sys.executable} starts tasks {log or ''}")
        command = _serve(Connection(connection), pipe, terminal, is_isolated, preloads)
        if command:
            _run(command, preloads)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # interpreter shutdown would take seconds


def _set_environment(environment):
    """Replaces the inherited environment variables, except for the private cache folders."""
    caches = {name: os.environ[name] for name in ("KERAS_HOME", "MPLCONFIGDIR") if "KERAS_HOME_IS_OF" in os.environ}
    os.environ.clear()
    os.environ.update(environment | caches)
    for name in (warm.VARIABLE, "KERAS_HOME_IS_OF"):
        os.environ.pop(name, None)
    time.tzset()
    tempfile.tempdir = None  # cached, but depends on a variable


def _set_title(title):
    """Sets the command line that `ps` shows."""
    import setproctitle

    setproctitle.setproctitle(title)


def _serve(connection, pipe, terminal, is_isolated, preloads):
    """Returns in each task with its command, and in the server with None when it should stop."""
    problem = sandbox.why_no_own_network() if is_isolated else None
    if is_isolated and not problem:
        sandbox.enter_own_network()
        sandbox.give_up_power()
    sandbox.give_up_new_privileges()
    sandbox.adopt_orphans()
    reserved = contextlib.ExitStack()
    keys: dict[int, str] = {}  # of the running tasks, by process id
    children = Children(lambda *_: None)
    while True:
        task_status.write(pipe, "", "")  # heartbeat of the server
        try:
            ready = wait([connection, children.woken], BEAT_SECONDS)
            if children.woken in ready:
                for pid, status in children.ended():
                    if pid in keys:
                        _kill_group(pid)
                        known = {0: EARLY, _DONE: 0, task_status.LEFT: LEFT} if preloads else {}
                        connection.send((keys.pop(pid), known.get(status, status)))
                kill_orphans(keys)
            if connection not in ready:
                continue
            request, *arguments = connection.recv()
        except (EOFError, OSError):
            request = "stop"  # the launcher has ended
        if request == "problem":
            connection.send(problem)
        elif request == "ports":
            ports = [reserved.enter_context(reserved_port()).getsockname()[1] for _ in range(arguments[0])]
            connection.send(ports)
        elif request == "start":
            key, command, log, environ = arguments
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                children.forget()
                connection.close()
                if preloads and key.startswith("worker"):
                    # SIGTERM, a request to leave, stays pending until the worker can handle it, see `signals.hear_signals`.
                    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
                _become_task(server, key, pipe, log, terminal, environ)
                return command
            keys[pid] = key
            task_status.write(pipe, key, "")  # first heartbeat, in case the task is stopped before it sends one
        elif request == "signal":
            key, number = arguments
            for pid in [pid for pid, running in keys.items() if running == key]:
                _signal(pid, number)
        else:
            _end_all(keys)
            return None


class Children:
    """The children of this process. Its SIGCHLD makes a descriptor readable; `wait` takes that beside connections.

    Args:
      hear: handler of SIGCHLD, and of the signals `numbers`, which make the descriptor readable, too.

    Attributes:
      woken: that descriptor.
    """

    def __init__(self, hear, *numbers):
        self.woken, self._wakeup = os.pipe()
        self._numbers = signal.SIGCHLD, *numbers
        for end in (self.woken, self._wakeup):
            os.set_blocking(end, False)
        for number in self._numbers:
            signal.signal(number, hear)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def ended(self):
        """Yields (process id, exit status, negative for a signal) of the children that have ended since the last call."""
        os.read(self.woken, 1000)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                yield found[0], os.waitstatus_to_exitcode(found[1])

    def forget(self):
        """Undoes all that; to be called in a child."""
        signal.set_wakeup_fd(-1)
        for number in self._numbers:
            signal.signal(number, signal.SIG_DFL)
        for end in (self.woken, self._wakeup):
            os.close(end)


def _signal(pid, number):
    """Sends a signal to a task; SIGKILL also kills the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    if number == signal.SIGKILL:
        _kill_group(pid)


def _kill_group(pid):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def kill_orphans(keys):
    """Kills processes left behind by ended tasks. Running tasks adopt their own orphans, see `_become_task`."""
    for path in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if path.isdigit() and int(path) not in keys:
            with contextlib.suppress(OSError), open(f"/proc/{path}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    os.kill(int(path), signal.SIGKILL)  # our unreaped child, so its pid cannot be reused


def _end_all(keys):
    for pid in keys:
        _signal(pid, signal.SIGKILL)
    while True:
        kill_orphans(keys)
        try:
            pid, _ = os.waitpid(-1, 0)
        except ChildProcessError:
            return
        _kill_group(pid)
        keys.pop(pid, None)


def _become_task(server, key, pipe, log, terminal, environ):
    os.setsid()
    sandbox.die_with_parent(server)
    sandbox.adopt_orphans()  # orphans become children of the task, and of the fork server once the task has ended
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a launcher that ignores SIGTERM still stops its tasks with it
    if log is not None:
        _write_to(log, key, pipe)
    else:
        os.dup2(terminal, 2)
    os.close(terminal)
    os.environ.update(environ, LAUNCHER_PID=str(server), LAUNCHER_KEY=key, LAUNCHER_WORDS=str(pipe), LAUNCHER_LOG=log or "")


def _write_to(log, key, pipe):
    """Redirects a task's output to its log; if that fails, the output stays where it is."""
    try:
        descriptor = open_own(log, os.O_WRONLY | os.O_APPEND)
    except (OSError, UserError) as error:
        task_status.write(pipe, key, f"{key} goes on without its log: {error}")
        descriptor = os.dup(2)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _run(command, preloads):
    """Runs a task's program, as `python SCRIPT ARGUMENTS` would."""
    if not preloads:
        os.execv(command[0], command)
    task_status.is_fork = True
    _set_title(" ".join(command))
    task_status.doing("starting")
    threading.Thread(target=_beat, daemon=True).start()
    sys.argv = command[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[1])))
    status = 0
    try:
        try:
            runpy.run_path(command[1], run_name="__main__")
        except SystemExit:
            raise
        except BaseException:
            status = 1
            sys.excepthook(*sys.exc_info())
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    finally:
        with contextlib.suppress(OSError):  # of a full disk
            sys.stdout.flush()
            sys.stderr.flush()
        # As in multiprocessing: interpreter shutdown would take seconds without a heartbeat.
        os._exit(_DONE if status == 0 and task_status.is_done else status)


def _beat():
    log = os.environ["LAUNCHER_LOG"]
    while True:
        task_status.say_progress()
        task_status.look_for_waits()
        log = _made_again(log)
        time.sleep(BEAT_SECONDS)


def _made_again(log):
    """Recreates the log of this task if it was deleted. Returns its path, or "" if that fails."""
    if log and os.fstat(1).st_nlink == 0:
        _write_to(log, os.environ["LAUNCHER_KEY"], int(os.environ["LAUNCHER_WORDS"]))
        log = log if os.fstat(1).st_nlink else ""
    return log
