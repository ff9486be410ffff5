"""Closed doors between the hosts of `start.sh`: tasks in networks of their own, which Unix sockets and ssh join.

    bash Multiple-Machines/doors.sh room TASK...           # folders for the sockets of these tasks, until the input ends
    bash Multiple-Machines/doors.sh task DOORS COMMAND...  # a command in a network of its own

In the network of a task, each other task has an address, 127.0.0.2:10003 for example, at which this program listens. What comes
there it carries to a Unix socket, which either belongs to a task of the same host, or is forwarded by ssh. The task itself is
reached by a Unix socket, too. Unix sockets are files: they lead out of a network that has no other way out.
"""

import contextlib
import fcntl
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common.launch import sandbox

BUFFER_BYTES = 2**20
# aes128-gcm, as processors have instructions for it; and no line about a task that is not there yet, for which the others wait
OPTIONS = ["-oExitOnForwardFailure=yes", "-oLogLevel=ERROR", "-oCiphers=^aes128-gcm@openssh.com"]
FIRST_PORT = 10001  # below those that Linux gives to who asks for any
LAST_SECONDS = 5  # for the last words of a task to leave
NOBODY = re.compile(r"connect to /tmp/doors-\S+ port -2 failed: .*")  # what ssh says if a task is not there: the others wait
ROOM, REFUSED = "room: ", "refused: "  # how the lines begin that `start.py` reads


def room(tasks, check):
    """Makes a folder for the Unix sockets of these tasks, tells of it in one line, and removes it when the input ends.

    The folder has mode 700. It is in /tmp, as the path of a socket has 107 bytes at most. If tasks cannot have a network of
    their own here, a line says why.

    Args:
      tasks: names of the folders within; none if this host has no tasks.
      check: a command that looks at the input first, while there is a network to download it; or [].

    Returns:
      The exit status.
    """
    problem = sandbox.why_no_own_network() if tasks else None
    if problem:
        print(f"{REFUSED}{problem}", flush=True)
        return 2
    status = subprocess.run(check, stdin=subprocess.DEVNULL).returncode if check else 0
    if status:
        return status
    folder = tempfile.mkdtemp(prefix="doors-", dir="/tmp")
    try:
        for task in tasks:
            os.mkdir(os.path.join(folder, task))
        print(ROOM + json.dumps({"folder": folder, "place": place()}), flush=True)
        sys.stdin.read()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def place():
    """Returns what two processes have in common if each can use the other's Unix sockets: the machine, its files, the user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/mnt')} {os.geteuid()}"


def run(doors, command):
    """Runs a command in a network of its own, from which and into which relays lead; ends with it, and it ends with this one.

    Args:
      doors: {"port": at which the task listens, "socket": path of the Unix socket that leads there, "others": [[address, port,
        path]], the Unix socket to which each of the other tasks' addresses leads}.
      command: a list of words. SIGTERM is passed on to it.

    Returns:
      The exit status, as a shell gives it.

    Raises:
      OSError: if there can be no such network; if a path cannot be listened at.
    """
    sandbox.enter_own_network()
    relays = Relays(doors)
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    task = os.fork()
    if task == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        sandbox.give_up_power()
        sandbox.give_up_new_privileges()
        sandbox.die_with_parent(parent)
        os.execvp(command[0], command)
    threading.Thread(target=relays.accept, daemon=True).start()  # in it, and its threads, the signal stays blocked
    signal.signal(signal.SIGTERM, lambda *_: os.kill(task, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    status = os.waitstatus_to_exitcode(os.waitpid(task, 0)[1])
    relays.finish(LAST_SECONDS)
    return status if status >= 0 else 128 - status


class Relays:
    """Joins each connection that a task makes, or that is made to it, with a socket outside or inside of its network.

    It listens at once, so no task finds nobody there; see `run`.
    """

    def __init__(self, doors):
        self._selector = selectors.DefaultSelector()
        self._outwards: set[threading.Thread] = set()  # those that carry what the task says
        inside = socket.socket(socket.AF_UNIX)
        inside.bind(doors["socket"])
        inside.listen(128)
        self._listen(inside, socket.AF_INET, ("127.0.0.1", doors["port"]))
        for address, port, path in doors["others"]:
            self._listen(socket.create_server((address, port), backlog=128), socket.AF_UNIX, path)

    def _listen(self, listening, *to):
        self._selector.register(listening, selectors.EVENT_READ, (listening, *to))

    def accept(self):
        """Takes care of each connection that comes, for ever."""
        while True:
            for key, _ in self._selector.select():
                listening, *to = key.data
                connection, _ = listening.accept()
                threading.Thread(target=self._join, args=(connection, *to), daemon=True).start()

    def finish(self, seconds):
        """Waits until what the task has said is on its way, but not longer than so many seconds. The task has ended."""
        deadline = time.monotonic() + seconds
        for thread in list(self._outwards):
            thread.join(max(0, deadline - time.monotonic()))

    def _join(self, connection, family, address):
        """Carries what comes from a connection to an address, and back; closes it if nobody is there."""
        with connection, socket.socket(family) as other:
            with contextlib.suppress(OSError):
                other.connect(address)
                for end in connection, other:
                    if end.family == socket.AF_INET:
                        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    else:  # that of TCP grows by itself
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                task, far = (other, connection) if family == socket.AF_INET else (connection, other)
                outwards = threading.Thread(target=carry, args=(task, far), daemon=True)
                self._outwards.add(outwards)
                outwards.start()
                carry(far, task)
                outwards.join()
                self._outwards.discard(outwards)


def carry(source, target):
    """Sends on what comes, until one of the two ends ends; then the other one learns of it.

    It passes through a pipe, within the kernel, which takes less processor time than to read it and to write it.
    """
    from_pipe, to_pipe = os.pipe()
    with open(from_pipe, "rb"), open(to_pipe, "wb"):
        with contextlib.suppress(OSError):  # a user may have so many large pipes only; a smaller one does it, too
            fcntl.fcntl(to_pipe, fcntl.F_SETPIPE_SZ, BUFFER_BYTES)
        try:
            while count := os.splice(source.fileno(), to_pipe, BUFFER_BYTES):
                while count:
                    count -= os.splice(from_pipe, target.fileno(), count)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            for end in source, target:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def host_of(address):
    """Returns the HOST of HOST:PORT."""
    return address.rpartition(":")[0]


class Doors:
    """How the tasks of a cluster reach each other while none of them can be reached: as addresses, sockets and options of ssh.

    In the networks of all tasks, a task has the same address. There it leads to a Unix socket (see `run`): to the task's own,
    if that is in the same place. Otherwise ssh forwards it, by way of this machine: `ssh -R` of the task that asks leads to a
    socket here, and `ssh -L` of the task that is asked leads on from there. Tasks on this machine need no ssh for it.

    A worker that joins takes an address that was reserved. What leads there always passes through a socket on this machine, as
    the other tasks cannot know where it will be.

    Args:
      here: the room of this machine, {"folder": path, "place": text}; see `place`.
      tasks: of each task HOST:PORT, as the user calls it, and its room; None where a worker may join.
      may_change: which of them, by number, may be followed by another one, somewhere else.
    """

    def __init__(self, here, tasks, may_change=()):
        self._here, self._may_change = here, frozenset(may_change)
        self._rooms: list[dict] = [{}] * len(tasks)
        hosts = [host_of(task[0]) if task else i for i, task in enumerate(tasks)]
        # Tasks of one host have one address: by it they know how many share its cores. Each has a port of its own, as the
        # server of a task listens at its own on every address.
        numbers = {host: f"127.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n, host in enumerate(dict.fromkeys(hosts), 1)}
        self._inside = [(numbers[host], FIRST_PORT + i) for i, host in enumerate(hosts)]
        self._outside: dict[str, str] = {}
        for i, task in enumerate(tasks):
            if task:
                self.take(i, *task)

    def take(self, i, address, room):
        """Notes that task i is at this address, as the user calls it, in this room."""
        self._rooms[i], self._outside[self.inside(i)] = room, address
        if i in self._may_change:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._at_hub(i))  # of the one before: neither ssh nor a relay listens where there is a file

    def inside(self, i):
        """Returns the address of task i in the networks of the tasks."""
        host, port = self._inside[i]
        return f"{host}:{port}"

    def outside(self, text):
        """Returns a text in which tasks are called as the user calls them."""
        return re.sub(r"127(\.\d{1,3}){3}:\d+", lambda found: self._outside.get(found[0], found[0]), text)

    def of_task(self, i):
        """Returns the doors of a task, as `run` takes them."""
        others = [[*self._inside[k], self._path(i, k)] for k in self._others(i)]
        return {"port": self._inside[i][1], "socket": self._own(i), "others": others}

    def options(self, i):
        """Returns the options with which ssh starts a task: what it forwards."""
        far = [k for k in self._others(i) if not self._is_beside(i, k)]
        if self._is_here(i) or not (far or i in self._may_change):
            return []
        towards_others = [word for k in far for word in ("-R", f"{self._path(i, k)}:{self._at_hub(k)}")]
        return [*OPTIONS, "-L", f"{self._at_hub(i)}:{self._own(i)}", *towards_others]

    def _others(self, i):
        return [k for k in range(len(self._rooms)) if k != i]

    def _is_here(self, i):
        return self._rooms[i]["place"] == self._here["place"]

    def _is_beside(self, i, k):
        """Whether task k can be reached, as long as it runs, by a socket of its own where task i is."""
        return k not in self._may_change and self._rooms[i]["place"] == self._rooms[k]["place"]

    def _own(self, i):
        if i in self._may_change and self._is_here(i):
            return self._at_hub(i)
        return f"{self._rooms[i]['folder']}/{i}/in"

    def _at_hub(self, i):
        """The socket on this machine that leads to a task."""
        if i in self._may_change or not self._is_here(i):
            return f"{self._here['folder']}/{i}"
        return self._own(i)

    def _path(self, i, k):
        """The socket that leads to task k where task i is."""
        if self._is_beside(i, k):
            return self._own(k)
        return self._at_hub(k) if self._is_here(i) else f"{self._rooms[i]['folder']}/{i}/{k}"


def main(what="", *words):
    """Runs it, and exits."""
    if what == "room":
        count = words.index("--") if "--" in words else len(words)
        sys.exit(room(words[:count], list(words[count + 1 :])))
    try:
        doors, command = json.loads(words[0]), list(words[1:])
    except (IndexError, ValueError):
        doors, command = None, []
    if what != "task" or not command:
        sys.exit(f"doors.py: expected room TASK..., or task DOORS COMMAND..., as start.sh gives it, not {what or 'nothing'!r}")
    sys.exit(run(doors, command))


if __name__ == "__main__":
    main(*sys.argv[1:])
