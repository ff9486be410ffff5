"""What `start.sh` runs on a host: a task in a network of its own, with relays from there to the tasks of other hosts.

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
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from common import isolation

BUFFER_BYTES = 2**20
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
    problem = isolation.why_no_own_network() if tasks else None
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
    isolation.enter_own_network()
    relays = selectors.DefaultSelector()
    inside = socket.socket(socket.AF_UNIX)
    inside.bind(doors["socket"])
    inside.listen(128)
    relays.register(inside, selectors.EVENT_READ, (socket.AF_INET, ("127.0.0.1", doors["port"])))
    for address, port, path in doors["others"]:
        outside = socket.create_server((address, port), backlog=128)
        relays.register(outside, selectors.EVENT_READ, (socket.AF_UNIX, path))
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    task = os.fork()
    if task == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        isolation.give_up_power()
        isolation.give_up_new_privileges()
        isolation.die_with_parent(parent)
        os.execvp(command[0], command)
    threading.Thread(target=accept, args=(relays,), daemon=True).start()  # in it, and its threads, the signal stays blocked
    signal.signal(signal.SIGTERM, lambda *_: os.kill(task, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    status = os.waitstatus_to_exitcode(os.waitpid(task, 0)[1])
    return status if status >= 0 else 128 - status


def accept(relays):
    """Lets a thread take care of each connection that comes."""
    while True:
        for key, _ in relays.select():
            connection, _ = key.fileobj.accept()
            threading.Thread(target=join, args=(connection, *key.data), daemon=True).start()


def join(connection, family, address):
    """Carries what comes from a connection to an address, and back; closes it if nobody is there."""
    with connection, socket.socket(family) as other:
        with contextlib.suppress(OSError):
            other.connect(address)
            for end in connection, other:
                if end.family == socket.AF_INET:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                else:  # that of TCP grows by itself
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            back = threading.Thread(target=carry, args=(other, connection), daemon=True)
            back.start()
            carry(connection, other)
            back.join()


def carry(source, target):
    """Sends on what comes, until one of the two ends ends; then the other one learns of it.

    It passes through a pipe, within the kernel, which takes half of the processor time that it takes to read and to write it.
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


def main(what, *words):
    """Runs it, and exits."""
    if what == "room":
        count = words.index("--") if "--" in words else len(words)
        sys.exit(room(words[:count], list(words[count + 1 :])))
    doors, *command = words
    sys.exit(run(json.loads(doors), command))


if __name__ == "__main__":
    main(*sys.argv[1:])
