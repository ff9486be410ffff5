"""The process that starts the tasks of a run: in a network of their own, as forks of itself, so tensorflow is imported once.

The launcher makes one with `ForkServer`, which runs this file as a program. A launcher imports no tensorflow, so that a wrong
flag is told at once; while this imports it, the launcher goes on.

A task that is started again, after it was killed, is another fork: it is back in a moment. The tasks are this process's
children, and end with it; it ends with the launcher. What a task has started ends with the task.

A task tells the launcher what it is doing (`doing`), so that one which lives, but gets nothing done, can be told from others.
"""

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple

BEAT_SECONDS = 0.5  # from one sign of life, of a task or of the process that starts them, to the next
START_SECONDS = 120  # for that process to begin, before it imports anything
EARLY = 256  # how a task of a scheme ended that exited with 0, but did not say `work_is_done`: no program has this exit status
_DONE = 100  # exit status of one that did


class ForkServer:
    """The launcher's side: starts the process, asks it for tasks, and hears of their ends. To be used as a context.

    Args:
      environment: variables of the process, and of all tasks.
      log: path of a file for what the process itself has to say.
      is_isolated: whether the tasks are to be in a network of their own.
      preloads: whether tasks are scripts that want tensorflow; otherwise each begins as a new program.

    Attributes:
      problem: why the tasks are in no network of their own, one line; None if they are, or need not be.
      heard: when the process itself gave the last sign of life, as time.monotonic().
      is_importing: whether it is busy importing, and gives none.
      log: path of the file.
    """

    def __init__(self, environment, log, is_isolated, preloads=True):
        self._connection, theirs = Pipe()
        self.log, self.heard, self.is_importing = log, time.monotonic(), False
        self._words, their_words = os.pipe()
        os.set_blocking(their_words, False)  # no task is to wait for a launcher that was stopped
        numbers = theirs.fileno(), their_words
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, (*numbers, int(is_isolated), int(preloads))), str(log)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment, "LAUNCHER_PID": str(os.getpid())},
            pass_fds=numbers,
            start_new_session=True,  # so that a terminal's Ctrl-C reaches the launcher alone
        )
        theirs.close()
        os.close(their_words)
        self.problem = self._ask("problem")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        """Kills all that is left."""
        with contextlib.suppress(OSError):
            self._connection.send(("stop",))
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # it may have been stopped by a signal
            self._process.kill()
            self._process.wait()

    def _ask(self, *request):
        from common.flags import TrainingFailed  # not above: the process itself needs none of it

        try:
            self._connection.send(request)
            if self._connection.poll(START_SECONDS):
                return self._connection.recv()
        except (EOFError, OSError):
            raise TrainingFailed(f"the process that starts the tasks has ended (log: {self.log})") from None
        self.kill()
        raise TrainingFailed(f"the process that starts the tasks gave no answer for {START_SECONDS} s and was killed")

    def kill(self):
        """Kills the process at once, and with it the tasks."""
        self._process.kill()

    def status(self):
        """Waits for the end of the process, and returns its exit status, negative for a signal."""
        return self._process.wait()

    def reserve_ports(self, count):
        """Returns so many ports, in the network of the tasks, that nobody else gets; see `reserved_port`. Before any start."""
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
                        self.heard, self.is_importing = time.monotonic(), bool(text)

        for hear in (hear_ends, hear_words):
            threading.Thread(target=hear, daemon=True).start()

    def start(self, key, command, log, environ):
        """Starts a task: `command` is an interpreter, a script and its arguments. None for `log` is this terminal."""
        with contextlib.suppress(OSError):  # if the process has ended, the listener hears it
            self._connection.send(("start", key, command, log, environ))

    def signal(self, key, number):
        """Sends a signal to a task that has not ended."""
        with contextlib.suppress(OSError):
            self._connection.send(("signal", key, number))


# A task's environment has these: the process that has started it, its own name, and the pipe to the launcher.
VARIABLES = ("LAUNCHER_PID", "LAUNCHER_KEY", "LAUNCHER_WORDS")

LAST = "\f"  # begins what a task says with `say_last`
PROGRESS = "\v"  # begins what it says of its progress
# What tasks do that runs functions of the user's, which the launcher may have called before; see `Progress.what`.
LOADING, BUILDING = "loading the data", "building the model"
CHECKED = "ending the check"


class Progress(NamedTuple):
    """What a task tells of its progress."""

    number: int  # of what it is doing, each time anew
    what: str  # that is, as in "while loading the data"
    waits: bool  # whether it may be waiting for other tasks
    longest: float | None  # seconds that this took at most, if it has done the same again and again; None for the first time


_progress: tuple = (0, "", False, None, 0.0)  # as `Progress`, and when that began; replaced as a whole: another thread reads it
_is_done = False


def doing(what, waits=False):
    """Notes what this task does from now on; the launcher kills one that does the same for too long, see `common.launch.Run`.

    Costs less than a microsecond if it is the same as before, once more: a call of the main loop, say.

    Args:
      what: as in "while loading the data".
      waits: whether it may take as long as other tasks take.
    """
    global _progress
    number, before, _, longest, began = _progress
    now = time.monotonic()
    longest = max(now - began, longest or 0) if what == before else None
    _progress = number + 1, what, waits, longest, now
    if what != before:
        _say_progress()


@contextlib.contextmanager
def meanwhile(what, waits=False):
    """A context in which this task does something else than what it does before and after."""
    _, before, waited, *_ = _progress
    doing(what, waits)
    try:
        yield
    finally:
        doing(before, waited)


def read_progress(text):
    """Returns the `Progress` that a task has told in `text`, which begins with `PROGRESS`."""
    return Progress(*json.loads(text.removeprefix(PROGRESS)))


def _say_progress():
    say(PROGRESS + json.dumps(_progress[:4]))


def work_is_done():
    """Notes that this task, of a scheme, now ends with its exit status. One that exits with 0 and has not said so, because a
    function of the user's has ended it, counts as failed."""
    global _is_done
    _is_done = True


def say_last(text):
    """Tells the launcher that has started this task, if one has, what the task ends with."""
    say(LAST + text)


def say(text=""):
    """Shows a line to the user of the launcher that has started this task, if one has. Without text, a sign of life."""
    words, key = os.environ.get("LAUNCHER_WORDS"), os.environ.get("LAUNCHER_KEY")
    if words and key:
        _write(int(words), key, text)


def _write(words, key, text):
    line = f"{key}\t{text}".replace("\n", " ").encode(errors="replace")[:2000]  # short, to be written as a whole
    with contextlib.suppress(OSError):  # a launcher that was stopped reads nothing, and the pipe is full
        os.write(words, line + b"\n")


def die_with_parent(parent, number=signal.SIGKILL):
    """Makes this process end when its parent, process `parent`, ends in whatever way (Linux): it gets that signal."""
    pr_set_pdeathsig = 1
    _prctl(pr_set_pdeathsig, number)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(what, value=0, *more):
    """Sets a property of this process, where the system, and its version, has it; returns whether it has."""
    libc = ctypes.CDLL(None)
    return hasattr(libc, "prctl") and libc.prctl(what, value, *more, *[0] * (3 - len(more))) == 0


def _adopt_orphans():
    """What descendants of this process leave behind when they end becomes this process's children (Linux)."""
    pr_set_child_subreaper = 36
    _prctl(pr_set_child_subreaper, 1)


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


def why_no_own_network():
    """Tries `enter_own_network` in another process; returns None, or what stands in the way and how to change that."""
    pid = os.fork()
    if pid == 0:
        try:
            enter_own_network()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or errno.EPERM)
    number = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return _how_to_allow(number) if number else None


def enter_own_network():
    """Puts this process, which must have one thread only, and its children into a network that nobody else is in.

    It is a Linux network namespace with a loopback interface, inside a user namespace, which needs no rights. Some systems
    refuse a later step, when there is no way back: to be tried before, see `why_no_own_network`.

    Raises:
      OSError: if the system forbids it.
    """
    clone_newuser, clone_newnet = 0x10000000, 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(clone_newuser | clone_newnet):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for file, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
        with open(f"/proc/self/{file}", "w") as opened:
            opened.write(text)
    siocgifflags, siocsifflags, iff_up = 0x8913, 0x8914, 1
    with socket.socket() as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, siocgifflags, request))[1]
        fcntl.ioctl(any_socket, siocsifflags, struct.pack("16sH14x", b"lo", flags | iff_up))


def _give_up_power():
    """Takes from this process, and all that it will start, what a namespace of its own lets it do beyond an ordinary user."""
    pr_capbset_drop, pr_cap_ambient, clear_all = 24, 47, 4
    capability = 0
    while _prctl(pr_capbset_drop, capability):  # or a program that root starts would get them again
        capability += 1
    _prctl(pr_cap_ambient, clear_all)
    version_3, this_process = 0x20080522, 0
    header, none = struct.pack("Ii", version_3, this_process), bytes(24)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _give_up_new_privileges():
    """No program that this process will start gains rights by its file, as sudo does."""
    pr_set_no_new_privs = 38
    _prctl(pr_set_no_new_privs, 1)


def _how_to_allow(number):
    """What stands in the way of `enter_own_network`, which ended with this error number, and how to change that."""

    def says(path, value):
        with contextlib.suppress(OSError), open(f"/proc/sys/{path}") as file:
            return file.read().strip() == value
        return False

    for path, bad, good in (
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
        ("kernel/unprivileged_userns_clone", "0", "1"),
        ("user/max_user_namespaces", "0", "10000"),
        ("user/max_net_namespaces", "0", "10000"),
    ):
        if says(path, bad):
            return f"the system forbids it; `sudo sysctl {path.replace('/', '.')}={good}` allows it"
    if number == errno.ENOSYS:
        return "this system has no network namespaces"
    return f"the system forbids it ({os.strerror(number)}), as containers do; SECURITY.md says how to allow it"


def _serve(connection, words, terminal, is_isolated, preloads, launcher):
    """The life of the process. Returns in each task, with its command; in the process itself when it is to stop."""
    problem = why_no_own_network() if is_isolated else None
    if is_isolated and not problem:
        enter_own_network()
        _give_up_power()
    _give_up_new_privileges()
    _adopt_orphans()
    reserved = contextlib.ExitStack()
    running: dict[str, int] = {}
    keys: dict[int, str] = {}
    wakeup, woken = os.pipe()
    for end in (wakeup, woken):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    is_first = True
    while True:
        _write(words, "", "")  # a sign of life of this process
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
            if is_first and preloads:
                _write(words, "", "importing")
                _load()
            if is_first:
                # From now on it does not die with the launcher, but hears of its end, and first ends what tasks have started.
                die_with_parent(launcher, signal.SIGCONT)
                is_first = False
            key, command, log, environ = arguments
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (wakeup, woken):
                    os.close(descriptor)
                connection.close()
                _become_task(server, key, words, log, terminal, environ)
                return command
            running[key], keys[pid] = pid, key
            _write(words, key, "")  # the first sign of life, also of one that is stopped before it can give any
        elif request == "signal":
            key, number = arguments
            if key in running:
                _signal(running[key], number)
        else:
            _end_all(keys)
            return None


def _signal(pid, number):
    """Sends a signal to a task; what kills it kills what it has started, too."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    if number == signal.SIGKILL:
        _kill_group(pid)


def _kill_group(pid):
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the second is of macOS, for a group of zombies
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
            connection.send((key, {0: EARLY, _DONE: 0}.get(code, code) if preloads else code))
    _kill_orphans(keys)


def _kill_orphans(keys):
    """Kills what tasks that have ended have left behind. Tasks adopt the orphans of what they start, see `_become_task`."""
    for path in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if path.isdigit() and int(path) not in keys:
            with contextlib.suppress(OSError), open(f"/proc/{path}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    os.kill(int(path), signal.SIGKILL)  # it is this process's child: nobody else gets its number meanwhile


def _end_all(keys):
    for pid in keys:
        _signal(pid, signal.SIGKILL)
    while True:
        _kill_orphans(keys)
        try:
            pid, _ = os.waitpid(-1, 0)
        except ChildProcessError:
            return
        _kill_group(pid)
        keys.pop(pid, None)


def _load():
    """Imports what all tasks need, and does nothing with it.

    Threads would not be in a fork; and each fork would go on with the same random numbers, by which a ps tells apart the steps
    of the workers.
    """
    from common import training  # and with it tensorflow and keras

    os.register_at_fork(after_in_child=training.np.random.seed)  # or all tasks would draw the same
    gc.collect()
    gc.freeze()  # what all tasks share is not looked through in each of them, which would copy it


def _become_task(server, key, words, log, terminal, environ):
    os.setsid()
    die_with_parent(server)
    _adopt_orphans()  # so they are its children, and those of the process that starts the tasks when it has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher may ignore it, and asks its tasks by it to end
    if log is not None:
        _write_to(log, key, words)
    else:
        os.dup2(terminal, 2)
    os.close(terminal)
    os.environ.update(environ, LAUNCHER_PID=str(server), LAUNCHER_KEY=key, LAUNCHER_WORDS=str(words), LAUNCHER_LOG=log or "")


def _write_to(log, key, words):
    """Sends what a task prints to its log; if that cannot be, to the one it goes to now."""
    from common.flags import UserError  # not above: the process itself needs none of it
    from common.run_dir import open_own

    try:
        descriptor = open_own(log, os.O_WRONLY | os.O_APPEND)
    except (OSError, UserError) as error:
        _write(words, key, f"{key} goes on without its log: {error}")
        descriptor = os.dup(2)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _run(command, preloads):
    """Runs what a task is to run, as `python SCRIPT ARGUMENTS` would."""
    if not preloads:
        os.execv(command[0], command)
    import setproctitle

    from common import forkserver  # what the script imports, while this here is the program itself

    setproctitle.setproctitle(" ".join(command))  # what `ps` shows
    forkserver.doing("starting")
    threading.Thread(target=forkserver._beat, daemon=True).start()
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
        os._exit(_DONE if status == 0 and forkserver._is_done else status)


def _beat():
    log = os.environ["LAUNCHER_LOG"]
    while True:
        _say_progress()
        log = _made_again(log)
        time.sleep(BEAT_SECONDS)


def _made_again(log):
    """Makes the log of this task again if somebody has deleted it. Returns its path, or "" if that cannot be."""
    if log and os.fstat(1).st_nlink == 0:
        _write_to(log, os.environ["LAUNCHER_KEY"], int(os.environ["LAUNCHER_WORDS"]))
        log = log if os.fstat(1).st_nlink else ""
    return log


def _main(connection, words, is_isolated, preloads, log):
    sys.path.pop(0)  # this folder, whose names are not for all to import
    launcher = int(os.environ["LAUNCHER_PID"])
    die_with_parent(launcher)
    terminal = os.dup(2)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    is_isolated, preloads = is_isolated == "1", preloads == "1"
    command = _serve(Connection(int(connection)), int(words), terminal, is_isolated, preloads, launcher)
    if command:
        _run(command, preloads)


if __name__ == "__main__":
    _main(*sys.argv[1:])
