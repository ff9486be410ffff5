"""Program of the warm process (warm.py): imports tensorflow, then forks a fork server for each run.

    python common/launch/preload.py OWNER DESCRIPTOR [--preload] [--listen]

It ends with OWNER, the process that started it. DESCRIPTOR is a Unix socket: connected to a launcher, or listening.
"""

import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection, wait

from common.core import startup
from common.launch import fork_server, sandbox, warm


def _main(owner, descriptor, *options):
    sys.path.pop(0)  # this folder: its modules must not shadow others
    owner, sock = int(owner), socket.socket(fileno=int(descriptor))
    folder = os.path.dirname(sock.getsockname()) if "--listen" in options else None
    signal.signal(signal.SIGTERM, lambda *_: _exit(folder))
    sandbox.die_with_parent(owner, signal.SIGTERM)
    sandbox.adopt_orphans()
    if not _has_writable_home():
        startup.private_caches(is_writable=False)
    signature = warm.signature(os.environ)  # before the import, so a later change of the code is noticed
    if "--preload" in options:
        _load()
    sandbox.die_with_parent(owner, signal.SIGCONT)  # from now on `run` polls for the owner's end, and ends its forks first
    os.chdir("/")  # a waiting process should not keep a folder busy
    if folder:
        Forking(owner, signature, sock).run()
    else:
        Forking(owner, signature, None, Connection(sock.detach())).run()
    _exit(folder)


def _has_writable_home():
    """Whether tasks can write into the home folder: even root's tasks have no capabilities over other users' files."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            sandbox.give_up_power()
        os._exit(not startup.is_home_writable())
    return os.waitpid(pid, 0)[1] == 0


def _load():
    """Imports the modules that all tasks need, without running anything in them.

    Threads don't survive a fork; and forks would share a random state, although a ps tells the workers' steps apart by random
    numbers.
    """
    import setproctitle

    setproctitle.setproctitle(f"warm process of {os.getppid()}")
    import numpy as np

    from common.training import loop  # noqa: F401 - and with it tensorflow and keras

    os.register_at_fork(after_in_child=np.random.seed)  # otherwise all tasks would draw the same numbers
    _freeze()


def _freeze():
    """Freezes the garbage collector: collection in a task would copy the pages that all tasks share."""
    gc.collect()
    gc.freeze()


def _load_for_pictures():
    """Imports matplotlib, for curve.png, while the first run starts, so that no run waits for the import."""
    with contextlib.suppress(Exception):  # a run reports the error itself
        importlib.import_module("matplotlib.backends.backend_agg")
        importlib.import_module("matplotlib.figure")
    _freeze()


def _exit(folder):
    """Removes the folders of socket and caches, and exits at once: interpreter shutdown would take seconds."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    startup.remove_private_caches()
    os._exit(0)


class Forking:
    """Forks processes for launchers until its owner ends or sends SIGTERM, or no launcher can connect any more."""

    def __init__(self, owner, signature, listening, *connections):
        self._owner, self._signature, self._listening = owner, signature, listening
        self._connections = list(connections)
        self._forked: dict[int, Connection] = {}  # {process id: connection of its launcher}
        self._is_ending, self._deadline = False, float("inf")
        self._can_draw = not listening  # one launcher means one run, whose chief imports matplotlib itself

    def _hear(self, number, frame):
        self._is_ending = self._is_ending or number == signal.SIGTERM

    def run(self):
        """Serves launchers until one of these events."""
        self._children = fork_server.Children(self._hear, signal.SIGTERM)
        while True:
            if os.getppid() != self._owner and self._deadline == float("inf"):
                self._is_ending, self._deadline = True, time.monotonic() + warm.STOP_SECONDS
                for pid in self._forked:
                    os.kill(pid, signal.SIGCONT)  # wakes stopped ones; they notice the end of their launchers themselves
            if self._is_ending and self._listening:
                self._listening.close()
                self._listening = None
            if not self._forked and (self._is_ending or not self._listening and not self._connections):
                return
            if time.monotonic() > self._deadline:
                for pid in self._forked:
                    os.kill(pid, signal.SIGKILL)
            listening = [self._listening] if self._listening else []
            for ready in wait([self._children.woken, *listening, *self._connections], fork_server.BEAT_SECONDS):
                if ready is self._children.woken:
                    self._reap()
                elif ready is self._listening:
                    self._accept()
                elif ready in self._connections:
                    self._answer(ready)

    def _accept(self):
        accepted, _ = self._listening.accept()
        if warm.is_of_the_same(accepted):
            self._connections.append(Connection(accepted.detach()))
        else:
            accepted.close()

    def _answer(self, connection):
        try:
            what, value = connection.recv()
            if what == "hello":
                connection.send(value == self._signature)
            elif what == "serve":
                with socket.socket(fileno=os.dup(connection.fileno())) as same:
                    _, descriptors, _, _ = socket.recv_fds(same, 1, 8)
                self._fork(connection, value, descriptors)
            elif value in self._forked:  # kill
                os.kill(value, signal.SIGKILL)
        except (EOFError, OSError):  # this launcher has ended
            self._connections.remove(connection)
            connection.close()
            for pid, launcher in self._forked.items():
                if launcher is connection:
                    os.kill(pid, signal.SIGCONT)  # wakes a stopped fork, so that it notices the end as well

    def _fork(self, connection, request, descriptors):
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._children.forget()
            for other in [*([self._listening] if self._listening else []), *self._connections]:
                other.close()
            fork_server.serve(parent, descriptors, **request)
        self._forked[pid] = connection
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(("forked", pid))
        if not self._can_draw:
            self._can_draw = True
            _load_for_pictures()

    def _reap(self):
        for pid, status in self._children.ended():
            if pid in self._forked:
                with contextlib.suppress(OSError):  # its launcher has ended
                    self._forked.pop(pid).send(("ended", pid, status))
        fork_server.kill_orphans(self._forked)


if __name__ == "__main__":
    _main(*sys.argv[1:])
