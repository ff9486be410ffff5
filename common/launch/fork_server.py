"""The process that starts the tasks of a run: in a network of their own, as forks of itself, so tensorflow is imported once.

It is itself a fork of a warm process (common/launch/warm.py): a launcher asks for it with `ForkServer`. A launcher imports no
tensorflow, so that a wrong flag is told at once.

A task that is started again, after it was killed, is another fork: it is back in a moment. The tasks are this process's
children, and end with it; it ends with the launcher. Processes that a task has started end with it.

A task tells the launcher what it is doing (`common.core.doing`), so the launcher notices a task that lives, but makes no
progress.
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

BEAT_SECONDS = 0.5  # from one sign of life, of a task or of the process that starts them, to the next
START_SECONDS = 120  # for an answer of that process
DATA = 100  # the number under which all tasks have the file with their data
EARLY = 256  # how a task of a scheme ended that exited with 0, but did not say `work_is_done`: no program has this exit status
_DONE = 100  # exit status of one that did
LEFT = 257  # how a worker ended that has left for good, as it was asked to


class ForkServer:
    """The launcher's side: asks for the process, asks it for tasks, and hears of their ends. To be used as a context.

    Args:
      environment: variables of the process, and of all tasks.
      log: path of a file for the output of the process itself; None for `errors`.
      is_isolated: whether the tasks get a network of their own.
      preloads: whether tasks are scripts that want tensorflow; otherwise each begins as a new program.
      shared: descriptor of a file with their data, see `common.data.share`; None if there is none.
      process: the `warm.WarmProcess` that it is a fork of; one for it alone by default.
      errors: descriptor of the file for the errors of tasks that have no log.

    Attributes:
      problem: why the tasks are in no network of their own, one line; None if they are, or need not be.
      heard: when the process itself gave the last sign of life, as time.monotonic().
      log: path of the file.
    """

    def __init__(self, environment, log, is_isolated, preloads=True, shared=None, process=None, errors=2):
        self.log = log
        self._hearing: list[threading.Thread] = []
        self._connection, theirs = Pipe()
        self._words, said = os.pipe()
        os.set_blocking(said, False)  # no task waits for a launcher that was stopped
        request = {
            "environment": {**os.environ, **environment},
            "log": log and os.path.abspath(log),
            "is_isolated": bool(is_isolated),
            "preloads": preloads,
            "folder": os.getcwd(),
            "mask": _mask(),
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
        """Kills all that is left. Afterwards all is heard that tasks have said."""
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
        """Kills the process at once, and with it the tasks."""
        self._warm.kill(self._pid)

    def status(self):
        """Waits for the end of the process, and returns its exit status, negative for a signal, None if that is unknown."""
        return self._warm.status(self._pid)

    def reserve_ports(self, count):
        """Returns ports in the tasks' network that no other process gets; see `reserved_port`. Before any start."""
        return self._ask("ports", count)

    def listen(self, ended, said):
        """From now on calls `ended(key, status)` when a task has ended, and `said(key, text)` when one gives a sign of life.

        Both are called from threads. The key is None when this process itself has ended.
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
                    else:  # of this process itself
                        self.heard = time.monotonic()

        self._hearing = [threading.Thread(target=hear, daemon=True) for hear in (hear_ends, hear_words)]
        for thread in self._hearing:
            thread.start()

    def start(self, key, command, log, environ):
        """Starts a task: `command` is an interpreter, a script and its arguments. None for `log` is this terminal."""
        with contextlib.suppress(OSError):  # if the process has ended, the listener hears it
            self._connection.send(("start", key, command, log, environ))

    def signal(self, key, number):
        """Sends a signal to a task that has not ended."""
        with contextlib.suppress(OSError):
            self._connection.send(("signal", key, number))


@contextlib.contextmanager
def reserved_port(port=0):
    """A port of this machine that no other process gets as long as the context lasts: `port`, or any that is free.

    The socket is bound but does not listen; the task's server can bind to the port as well, since both allow reuse, also
    again after a restart. Closing the socket first would let another program take the port in between.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", port))
        yield reserved


def _mask():
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def serve(parent, descriptors, environment, log, is_isolated, preloads, folder, mask):
    """The life of this process, a fork of process `parent`, and of each of its tasks. Never returns.

    Args:
      descriptors: of the launcher's connection, the pipe for words, standard output and error, and data if there are some.
      environment: all its variables.
      log, is_isolated, preloads: as `ForkServer` gets them.
      folder, mask: where it works, and its umask.
    """
    status = 1
    try:
        connection, pipe, output, terminal, *shared = descriptors
        sandbox.die_with_parent(parent, signal.SIGCONT)  # then it hears of the launcher's end, also if it was stopped
        os.setsid()
        _set_environment(environment | {"LAUNCHER_DATA": str(DATA) if shared else ""})
        os.chdir(folder)
        os.umask(mask)
        os.dup2(output, 1)
        os.dup2(terminal, 2)
        os.close(output)
        os.set_inheritable(pipe, True)  # a task may begin as a new program
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
        os._exit(status)  # to take the interpreter apart would take seconds


def _set_environment(environment):
    """Gives this process other variables than those that it was forked with, but for a folder of caches that came with them."""
    caches = {name: os.environ[name] for name in ("KERAS_HOME", "MPLCONFIGDIR") if "KERAS_HOME_IS_OF" in os.environ}
    os.environ.clear()
    os.environ.update(environment | caches)
    for name in (warm.VARIABLE, "KERAS_HOME_IS_OF"):
        os.environ.pop(name, None)
    time.tzset()
    tempfile.tempdir = None  # it depends on a variable


def _set_title(title):
    """Sets the command line that `ps` shows."""
    import setproctitle

    setproctitle.setproctitle(title)


def _serve(connection, pipe, terminal, is_isolated, preloads):
    """Returns in each task, with its command; in the process itself when it is to stop."""
    problem = sandbox.why_no_own_network() if is_isolated else None
    if is_isolated and not problem:
        sandbox.enter_own_network()
        sandbox.give_up_power()
    sandbox.give_up_new_privileges()
    sandbox.adopt_orphans()
    reserved = contextlib.ExitStack()
    running: dict[str, int] = {}
    keys: dict[int, str] = {}
    wakeup, woken = os.pipe()
    for end in (wakeup, woken):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    while True:
        task_status.write(pipe, "", "")  # a sign of life of this process
        try:
            ready = wait([connection, wakeup], BEAT_SECONDS)
            if wakeup in ready:
                os.read(wakeup, 1000)
                _reap(connection, running, keys, preloads)
            if connection not in ready:
                continue
            request, *arguments = connection.recv()
        except (EOFError, OSError):
            _end_all(keys)
            return None  # the launcher has ended
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
                signal.set_wakeup_fd(-1)
                for descriptor in (wakeup, woken):
                    os.close(descriptor)
                connection.close()
                if preloads and key.startswith("worker"):
                    # One that is asked to leave hears it when it can, see `signals.hear_signals`.
                    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
                _become_task(server, key, pipe, log, terminal, environ)
                return command
            running[key], keys[pid] = pid, key
            task_status.write(pipe, key, "")  # the first sign of life, also of one that is stopped before it can give any
        elif request == "signal":
            key, number = arguments
            if key in running:
                _signal(running[key], number)
        else:
            _end_all(keys)
            return None


def _signal(pid, number):
    """Sends a signal to a task; one that kills it kills the processes that it has started, too."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    if number == signal.SIGKILL:
        _kill_group(pid)


def _kill_group(pid):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _reap(connection, running, keys, preloads):
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        if pid in keys:
            _kill_group(pid)
            key, code = keys.pop(pid), os.waitstatus_to_exitcode(status)
            del running[key]
            connection.send((key, {0: EARLY, _DONE: 0, task_status.LEFT: LEFT}.get(code, code) if preloads else code))
    kill_orphans(keys)


def kill_orphans(keys):
    """Kills processes that ended tasks have left behind. Tasks adopt the orphans of what they start, see `_become_task`."""
    for path in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if path.isdigit() and int(path) not in keys:
            with contextlib.suppress(OSError), open(f"/proc/{path}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    os.kill(int(path), signal.SIGKILL)  # a child of this process: no other gets its number meanwhile


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
    sandbox.adopt_orphans()  # so they are its children, and those of the process that starts the tasks when it has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher may ignore it, and asks its tasks by it to end
    if log is not None:
        _write_to(log, key, pipe)
    else:
        os.dup2(terminal, 2)
    os.close(terminal)
    os.environ.update(environ, LAUNCHER_PID=str(server), LAUNCHER_KEY=key, LAUNCHER_WORDS=str(pipe), LAUNCHER_LOG=log or "")


def _write_to(log, key, pipe):
    """Sends a task's output to its log; if that is impossible, it goes on where it goes now."""
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
        # As multiprocessing does it: to take the interpreter apart would take seconds, in which there is no sign of life.
        os._exit(_DONE if status == 0 and task_status.is_done else status)


def _beat():
    log = os.environ["LAUNCHER_LOG"]
    while True:
        task_status.say_progress()
        task_status.look_for_waits()
        log = _made_again(log)
        time.sleep(BEAT_SECONDS)


def _made_again(log):
    """Makes the log of this task again if somebody has deleted it. Returns its path, or "" if that cannot be."""
    if log and os.fstat(1).st_nlink == 0:
        _write_to(log, os.environ["LAUNCHER_KEY"], int(os.environ["LAUNCHER_WORDS"]))
        log = log if os.fstat(1).st_nlink else ""
    return log
