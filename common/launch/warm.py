"""Warm process: has imported tensorflow, and forks the fork servers of runs (fork_server.py).

The import takes seconds of processor time. A launcher starts a warm process for its run, unless the variable `VARIABLE` names
the socket of an existing one: a program that calls `train` keeps one for all its runs (`kept`), and so do the tests.

A warm process keeps no state of a run. It serves only launchers of its own user and namespaces, and only those that would start
an identical process themselves (`signature`). A change of the code, of packages or of a variable read at import makes the next
launcher start a new one.
"""

import atexit
import contextlib
import hashlib
import os
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common.core import TrainingFailed, exit_reasons, progress

VARIABLE = "WARM_PROCESS"  # in the environment of a launcher: the path of the socket of a warm process
IMPORT_SECONDS = 600  # timeout of the import, for a busy machine with a slow disk
STOP_SECONDS = 10  # grace period of a process told to end

PROGRAM = Path(__file__).with_name("preload.py")
ROOT = PROGRAM.parents[2]

# glibc reads these at the start of a process.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",  # with a heap for each thread, glibc's default, memory grows twice as fast
    # Keeps the memory of a large message for the next one: getting it from the kernel takes as long as the network transfer.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
# Prefixes of the variables that Python, C libraries, numpy, tensorflow and keras read when loaded,
_READ_AT_IMPORT = (
    *("PYTHON", "LD_", "LC_", "LANG", "GLIBC_", "MALLOC_", "HOME", "TF", "KERAS_", "XLA_", "GRPC_", "CUDA_", "NVIDIA_"),
    *("MATPLOTLIBRC", "MPLCONFIGDIR"),
    *("NCCL_", "OMP_", "OPENBLAS_", "MKL_", "BLIS_", "GOTO_", "NVPL_", "NPY_", "NUMPY_", "ONEDNN_", "DNNL_", "ROCM_", "HIP_"),
)
# but for these: tasks read them later, or tensorflow sets them itself.
_READ_LATER = {
    *("CUDA_VISIBLE_DEVICES", "TF_CONFIG", "TF_FORCE_GPU_ALLOW_GROWTH", "TF_GRPC_REUSE_PORT", "TF2_BEHAVIOR"),
    *("TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS", "KERAS_HOME_IS_OF"),
}


def environment(environ):
    """Returns the environment variables of a warm process, given those of its launcher."""
    others = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", str(ROOT))]
    # `train` adds the folder of `common`, which is in the process anyway.
    return {**_MALLOC, **environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *others])}


def signature(environ):
    """Returns a hash that is equal for two processes if their forks would be equivalent.

    It covers the interpreter, the installed packages, the code of `common`, the variables read at import, and all inherited
    state that a fork does not change: limits, processors, namespaces, ignored signals.
    """
    found = hashlib.blake2b()
    for path in sorted([*(ROOT / "common").rglob("*.py"), ROOT / "requirements.txt", ROOT / "pyproject.toml"]):
        found.update(bytes(path.relative_to(ROOT)) + b"\0" + path.read_bytes())
    environ = environment(environ)
    inherited: list[Any] = [
        (sys.executable, sys.flags, os.getresuid(), os.getresgid(), sorted(os.getgroups())),
        [os.stat(sysconfig.get_path(scheme)).st_mtime_ns for scheme in ("purelib", "platlib")],  # installing changes it
        sorted(item for item in environ.items() if item[0].startswith(_READ_AT_IMPORT) and item[0] not in _READ_LATER),
        [resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")],
        (sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)),
        [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        [_namespace("self", name) for name in sorted(os.listdir("/proc/self/ns"))],
    ]
    for name in "cgroup", "oom_score_adj":
        with contextlib.suppress(OSError):
            inherited.append(Path("/proc/self", name).read_text())
    found.update(repr(inherited).encode())
    return found.hexdigest()


def _namespace(pid, name):
    return os.readlink(f"/proc/{pid}/ns/{name}")


def _peer(connected):
    """Returns pid and uid of the process at the other end of a Unix socket."""
    return struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[:2]


def is_of_the_same(connected):
    """Whether the peer of a Unix socket has this user and user namespace.

    A task, in a user namespace of its own, may have dropped capabilities that this process has.
    """
    pid, user = _peer(connected)
    try:
        return user == os.geteuid() and _namespace(pid, "user") == _namespace("self", "user")
    except OSError:  # the peer has ended
        return False


class WarmProcess:
    """A launcher's client of a warm process: finds or starts it at first use. To be used as a context.

    Args:
      preloads: whether the process should import tensorflow; if not, it is always a new one.
    """

    def __init__(self, preloads=True):
        self._preloads = preloads
        self._process: Any = None
        self._connection: Any = None
        self._errors: Any = None
        self._ended: dict[int, int] = {}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._connection:
            self._connection.close()
        if self._process:
            end(self._process)
            self._errors.close()

    def serve(self, request, descriptors):
        """Forks a fork server, see `fork_server.serve`; returns its process id.

        Args:
          request: arguments of that function.
          descriptors: those of the server's connection, the message pipe, its standard output and error, and the data if any.

        Raises:
          TrainingFailed: if the warm process ends, for example while it imports.
        """
        if self._connection is None:
            self._connection = self._found() if self._preloads else None
            self._connection = self._connection or self._started()
        with contextlib.suppress(OSError):  # the process has ended: `_wait_for` reports how
            self._connection.send(("serve", request))
            with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
                socket.send_fds(same, [b"\0"], descriptors)
        return self._wait_for("forked", IMPORT_SECONDS)

    def kill(self, pid):
        """Kills a process that `serve` has forked."""
        with contextlib.suppress(OSError):
            self._connection.send(("kill", pid))

    def status(self, pid, seconds=STOP_SECONDS):
        """Waits for such a process to exit; returns its exit status, negative for a signal, None if unknown."""
        with contextlib.suppress(TrainingFailed):
            while pid not in self._ended:
                self._wait_for("ended", seconds)
        return self._ended.get(pid)

    def _wait_for(self, what, seconds):
        try:
            while self._connection.poll(seconds):
                said, *values = self._connection.recv()
                if said == "ended":
                    self._ended[values[0]] = values[1]
                if said == what:
                    return values[0]
        except (EOFError, OSError):
            raise TrainingFailed(f"the process that imports tensorflow {self._how_it_ended()}") from None
        raise TrainingFailed(f"the process that imports tensorflow gave no answer for {seconds} s")

    def _how_it_ended(self):
        if self._process is None:
            return "has ended"
        status = self._process.wait()
        self._errors.seek(0)
        printed = self._errors.read().decode(errors="replace")
        if status < 0:
            return exit_reasons.killed_by(-status)
        return exit_reasons.of_memory(printed) or f"failed ({status}): {exit_reasons.last_error(printed, '')}"

    def _found(self):
        """Returns a connection to the process named in the environment, if it is trusted and equivalent; else None."""
        path = os.environ.get(VARIABLE)
        if not path:
            return None
        ignored = f"{VARIABLE}={path} in the environment is ignored: "
        try:
            folder = os.stat(os.path.dirname(path))
            if folder.st_uid != os.geteuid() or stat.S_IMODE(folder.st_mode) != 0o700:
                progress.say(f"{ignored}other users can enter its folder")
                return None
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as connected:
                connected.connect(path)
                if not is_of_the_same(connected):
                    if _peer(connected)[1] != os.geteuid():
                        progress.say(f"{ignored}it belongs to another user")
                    return None
                connection = Connection(connected.detach())
            connection.send(("hello", signature(os.environ)))
            if connection.poll(IMPORT_SECONDS) and connection.recv():
                return connection
        except (OSError, EOFError) as error:
            progress.say(f"{ignored}{getattr(error, 'strerror', None) or 'it has ended'}")
        return None

    def _started(self):
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()
        with theirs:
            self._process = start(["--preload"] * self._preloads, theirs, self._errors, os.environ)
        return Connection(ours.detach())


def start(arguments, sock, errors, environ):
    """Starts a warm process on a socket, and returns its `subprocess.Popen`. It ends with this process."""
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(os.getpid()), str(sock.fileno()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # a reader of this process's output would wait until every holder closes it
        stderr=errors,
        env=environment(environ),
        pass_fds=[sock.fileno()],
        start_new_session=True,  # so that a terminal's Ctrl-C reaches the launcher alone
    )


def end(process):
    """Ends a warm process that serves no launcher any more."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:  # it may have been stopped by a signal
        process.kill()
        process.wait()


class _Kept:
    """A warm process kept for the launchers of this process, with its socket in a folder private to the user."""

    def __init__(self, environ):
        self.owner, self.signature = os.getpid(), signature(environ)
        self._folder = tempfile.mkdtemp(prefix="warm-")  # of mode 700
        self.path = os.path.join(self._folder, "socket")
        with socket.socket(socket.AF_UNIX) as listening, open(os.devnull, "wb") as nowhere:
            listening.bind(self.path)
            listening.listen()
            self.process = start(["--preload", "--listen"], listening, nowhere, environ)

    def serves(self, environ):
        """Whether it is alive, and equivalent to a new one for a launcher with these variables."""
        return self.owner == os.getpid() and self.process.poll() is None and self.signature == signature(environ)

    def end(self):
        """Ends the process once its present runs have ended; it accepts no others."""
        if self.owner == os.getpid():
            self.process.terminate()
            shutil.rmtree(self._folder, ignore_errors=True)


_kept: _Kept | None = None
_lock = threading.Lock()


def kept(environ):
    """Returns these variables plus `VARIABLE`, the socket of a warm process kept for the launchers of this process.

    It ends with this process, even if that is killed. It is replaced if it was killed itself, or is no longer equivalent.

    Args:
      environ: variables of a launcher.
    """
    global _kept
    if VARIABLE in environ:
        return environ
    with _lock:
        now = _kept
        if now is None or not now.serves(environ):
            if now:
                now.end()
            _kept = now = _Kept(environ)
        return {**environ, VARIABLE: now.path}


@atexit.register
def _end_kept():
    if _kept:
        _kept.end()
