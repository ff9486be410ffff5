"""Tasks that no launcher has started, and scripts that train alone, as forks of a process that has imported tensorflow.

The import takes seconds of processor time. In `test_tasks_that_are_started_by_hand` each task begins as a program of its own,
and so do the pods in `test_the_pods_train`.
"""

import contextlib
import functools
import gc
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class Task:
    """A task, the child of another process, with the attributes and methods of `subprocess.Popen` that tests use."""

    def __init__(self, said, told):
        self.stdout, self._told = open(said, errors="replace"), open(told)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(self.pid)

    def poll(self):
        """Returns its exit status, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.returncode = int(self._told.readline())
        return self.returncode

    def wait(self, timeout=None):
        """Waits for its end; returns as `poll`."""
        if self.returncode is None and not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.poll()

    def send_signal(self, number):
        """Sends it a signal, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self):
        """Kills it."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """Waits for its end; returns what it printed since the last read line, and None."""
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        self.wait(timeout)
        return said[0], None


@functools.cache
def _started():
    """Returns the process of which tasks are forks, and the socket that leads to it. It ends with this process."""
    ours, theirs = socket.socketpair()
    how: dict[str, Any] = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL), "start_new_session": True}
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=warm.environment(os.environ), **how)
    return process, ours, Connection(os.dup(ours.fileno()))


def start(script, *arguments, environ=os.environ):
    """Starts a task, as `python SCRIPT ARGUMENTS` would with these variables; returns a `Task`."""
    _, sock, connection = _started()
    # With one of these missing, a task begins again, see `common.cli.program`: as a new program.
    environ = warm.environment({"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", **environ})
    (said, saying), (told, telling) = os.pipe(), os.pipe()
    connection.send(([str(script), *arguments], environ, os.getcwd()))
    socket.send_fds(sock, [b"\0"], [saying, telling])
    os.close(saying)
    os.close(telling)
    return Task(said, told)


def _serve(sock):
    """Forks a task for each request; returns in the fork, with its command."""
    connection = Connection(os.dup(sock.fileno()))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none of its own children stays as a zombie
    server = os.getpid()
    while True:
        command, environ, folder = connection.recv()
        _, (saying, telling), _, _ = socket.recv_fds(sock, 1, 2)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sandbox.die_with_parent(server)
            connection.close()
            sock.close()
            _mind(telling)
            os.close(telling)
            for standard in (1, 2):
                os.dup2(saying, standard)
            os.close(saying)
            os.environ.clear()
            os.environ.update(environ)
            os.chdir(folder)
            return command
        os.close(saying)
        os.close(telling)


def _mind(telling):
    """Forks the task itself, and returns there; tells its process id, and its exit status when it has ended."""
    minder = os.getpid()
    pid = os.fork()
    if pid == 0:
        sandbox.die_with_parent(minder)
        return
    os.write(telling, f"{pid}\n".encode())
    os.closerange(3, telling)
    for standard in (1, 2):
        os.close(standard)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(telling, f"{status}\n".encode())
    os._exit(0)


def _run(command):
    """Runs a script, and ends this process with its exit status."""
    setproctitle.setproctitle(" ".join([sys.executable, *command]))
    sys.argv, sys.path[0] = command, os.path.dirname(os.path.abspath(command[0]))
    status = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    import setproctitle

    setproctitle.setproctitle(f"tasks by hand of {os.getppid()}")  # it finds its place before variables change
    import numpy as np

    from common.cli import program  # noqa: F401
    from common.launch import sandbox  # noqa: F401
    from common.training import loop  # noqa: F401

    os.register_at_fork(after_in_child=np.random.seed)  # or all tasks would draw the same
    gc.collect()
    gc.freeze()
    try:
        task = _serve(socket.socket(fileno=int(sys.argv[1])))
    except EOFError:  # the tests have ended
        os._exit(0)
    _run(task)
else:
    from common.launch import warm
