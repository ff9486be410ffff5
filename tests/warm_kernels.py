"""A plugin of pytest: the kernels of notebooks are forks of one process, which has imported tensorflow, keras and matplotlib.

    python -m pytest -p tests.warm_kernels --nbval-lax ...

The import takes five seconds of processor time, and each notebook begins with it. As a program, this is that process: pytest
starts it for the first notebook, and it ends with pytest, as do its forks.
"""

import functools
import gc
import os
import select
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any


class Kernel:
    """A kernel that is another process's child, with the methods of `subprocess.Popen` that jupyter_client calls."""

    stdin = stdout = stderr = None

    def __init__(self, pid):
        self.pid, self._descriptor = pid, os.pidfd_open(pid)

    def poll(self):
        """Returns None while it runs."""
        return 0 if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self):
        """Returns when it has ended."""
        select.select([self._descriptor], [], [])
        return 0

    def send_signal(self, number):
        """Sends it a signal."""
        signal.pidfd_send_signal(self._descriptor, number)


@functools.cache
def _started():
    """Returns the process of which the kernels are forks, and the connection to it."""
    ours, theirs = Pipe()
    how: dict[str, Any] = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL), "start_new_session": True}
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        return subprocess.Popen(command, pass_fds=[theirs.fileno()], **how), ours


def _launch_kernel(command, env, cwd=None, **_):
    _, connection = _started()
    connection.send((command[command.index("ipykernel_launcher") + 1 :], env, cwd))
    return Kernel(connection.recv())


def pytest_configure(config):
    from jupyter_client.provisioning import local_provisioner

    module: Any = local_provisioner
    module.launch_kernel = _launch_kernel


def _serve(connection):
    """Forks a kernel for each request; returns in the fork, with the kernel's arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork stays as a zombie
    server = os.getpid()
    while True:
        arguments, environ, folder = connection.recv()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sandbox.die_with_parent(server)
            os.setsid()
            os.environ.clear()
            os.environ.update(environ)
            os.chdir(folder or os.getcwd())
            connection.send(os.getpid())
            connection.close()
            return arguments


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # read at import
    import keras  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import numpy as np
    import tensorflow  # noqa: F401
    from ipykernel import kernelapp

    from common.launch import sandbox

    gc.collect()
    gc.freeze()  # a garbage collection in a kernel need not look through these
    try:
        rest = _serve(Connection(int(sys.argv[1])))
    except EOFError:  # pytest has ended
        os._exit(0)
    del sys.path[0]
    np.random.seed()
    sys.argv = ["ipykernel_launcher", *rest]
    kernelapp.launch_new_instance()
