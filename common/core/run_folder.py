"""The folder of a run: made, checked, locked, and written into without following links planted by others.

Imports no tensorflow.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import re
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path

from common.core import progress, signals
from common.core.flags import TrainingFailed, UserError

# Entries of a run's folder; the name of an incomplete file begins with the name of the complete one.
FOLDERS = ("checkpoints", "logs", "metrics", "tensorboard", "best", "contributions")
FILES = ("lock", "cluster.json", "result.json", "curve.", "model.", "data.json", "evaluator-says-stop", "training-has-ended")
SOCKET = "control"  # only if workers come and go
WRITTEN_INTO = (".log", ".jsonl", ".position")  # suffixes of files that are written in place; others are replaced

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
# Timeout for a lock held by another machine: NFS keeps the locks of a lost machine for 90 s.
OTHER_HOST_SECONDS = 120
WATCH_SECONDS = 1  # between two checks of the locks

_locks: dict[int, Path] = {}  # {descriptor in this process: locked file}


def _forget_locks():
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)  # a descriptor open in a child would keep the lock


def check_no_url(run_dir):
    """Raises a `UserError` if `--run_dir` is an address in object storage, such as `gs://bucket/run`."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", str(run_dir or ""))
    if found:
        programs = {"gs": "gcsfuse", "s3": "s3fs or rclone mount"}
        program = programs.get(found[1].lower(), "a program such as rclone mount")
        raise UserError(
            f"--run_dir={run_dir}: not a folder: mount the bucket with {program}, and give a folder in the mount"
        )


def prepare_run_dir(settings, task=None):
    """Makes the folder of the run, and locks it.

    Args:
      settings: `run_dir`, `resume` and `scheme`.
      task: a task started by hand; None for a launcher, or a process that trains on its own.

    Returns:
      Its absolute path, and a context whose end releases the lock. So does any end of this process.

    Raises:
      UserError: if the folder is not writable, is in use, holds another run or entries that are unsafe to write into, or if
        `--resume` finds no checkpoint.
    """
    check_no_url(settings.run_dir)
    if settings.run_dir is None and settings.resume:
        raise UserError("--resume needs --run_dir=FOLDER, the folder of the run to continue")
    run_dir = Path(settings.run_dir or f"runs/{settings.run.scheme}/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S.%f}")
    is_chief = task is None or task.is_master()

    def check():
        if settings.resume and not has_checkpoint(run_dir) and is_chief:
            raise UserError(f"--resume: there is no checkpoint in {run_dir / 'checkpoints'}")
        if has_checkpoint(run_dir) and not settings.resume and is_chief:
            raise UserError(f"--run_dir={run_dir} already holds a run: continue it with --resume, or give another folder")

    held = lock_folder(run_dir, "--run_dir", FOLDERS[:3], None if task is None else task_name(task), check)
    if task is None and not settings.resume:
        for path in (run_dir / "metrics").glob("*.position"):  # left by a run without a checkpoint
            path.unlink()
    for path in (run_dir / "metrics").glob("*.left.json") if task is None else ():
        path.unlink()
    return str(run_dir.resolve()), held


def has_checkpoint(run_dir):
    """Whether the folder of a run holds a checkpoint, good or not, for `--resume`."""
    files = Path(run_dir, "checkpoints").glob("*.index")
    return any(re.fullmatch(r"[\w.-]+-\d+", path.stem, re.ASCII) for path in files)


def is_in_use(run_dir):
    """Whether a run, or a task of one, holds the lock of this folder."""
    with contextlib.suppress(FileNotFoundError, PermissionError), open(Path(run_dir, "lock"), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
    return False


def task_name(task):
    """The file name of a task started by hand; worker-0 for a process that trains on its own."""
    job = "evaluator" if task and task.is_evaluator() else task.job if task else "worker"
    return f"{job}-{task.job_index if task else 0}"


def lock_folder(folder, flag, parts, name=None, check=lambda: None):
    """Makes a folder with its `parts`, unless it exists, and locks it.

    Two processes can share the lock only if both are tasks, of different names. Nothing is written before all checks pass.

    Args:
      folder: its path.
      flag: name of the flag that gives the path.
      parts: names of subfolders.
      name: of the task that locks it; None for an exclusive lock.
      check: function that raises a `UserError` if the folder's contents are unsuitable.

    Returns:
      A context whose end releases the lock.

    Raises:
      UserError: for any failure, in one line.
    """
    flag = f"{flag}={folder}"
    with contextlib.ExitStack() as stack, _unwritable(flag):
        if folder.exists():
            check_contents(folder, flag)
        is_locked = os.path.lexists(folder / "lock")
        if is_locked:
            _take_locks(stack, folder, flag, name)
        check()
        make_private_folder(folder)
        tempfile.TemporaryFile(dir=folder).close()  # a unique name, as other tasks may do the same
        if not is_locked:
            _take_locks(stack, folder, flag, name)
            check()  # again, as another run may have come and gone before the lock
        for part in parts:
            (folder / part).mkdir(exist_ok=True)
        return stack.pop_all()


@contextlib.contextmanager
def _unwritable(flag):
    try:
        yield
    except OSError as error:  # no access to a parent folder, a name too long, a full disk
        raise UserError(f"{flag} cannot be written: {error.strerror}") from None


def make_private_folder(path):
    """Makes a folder that other users of the machine cannot read, unless it exists."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _take_locks(stack, folder, flag, name):
    """Locks the file `lock` exclusively; for a named task, `lock` shared with other tasks, then `lock-NAME` exclusively."""
    files = [("lock", fcntl.LOCK_EX)] if name is None else [("lock", fcntl.LOCK_SH), (f"lock-{name}", fcntl.LOCK_EX)]
    for file, how in files:
        descriptor = open_own(folder / file, os.O_RDWR)
        _locks[descriptor] = folder.resolve() / file
        stack.callback(_release, descriptor)  # not on garbage collection: else the process holds it to its end
        _lock(descriptor, how, folder, file, flag)
        if not _is_there(descriptor, folder / file):
            raise UserError(f"{flag}: {file} was removed while this run waited for it: start it again")


def _is_there(descriptor, path):
    """Whether an open file still has this path; if not, another process that opens the path locks another file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError as error:  # other errors, of a network file system, prove nothing
        return error.errno not in (errno.ENOENT, errno.ESTALE)


def check_locks(folder):
    """Raises `TrainingFailed` if a lock file of this process is gone from the folder, as others may lock it now."""
    folder = Path(folder).resolve()
    for descriptor, path in list(_locks.items()):
        if path.parent == folder and not _is_there(descriptor, path) and descriptor in _locks:  # not released meanwhile
            raise TrainingFailed(f"{path} was removed, so another run may write into the folder too: this one has ended")


def watch_locks(folder):
    """Ends this process with a line and exit status 1 when `check_locks` raises, as long as it holds a lock of the folder."""
    folder = Path(folder).resolve()

    def watch():
        while any(path.parent == folder for path in list(_locks.values())):
            time.sleep(WATCH_SECONDS)
            try:
                check_locks(folder)
            except TrainingFailed as error:
                with contextlib.suppress(OSError):
                    print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr, flush=True)
                signals.exit_at_once(1)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals.INTERRUPTING_SIGNALS)  # other threads handle them
    threading.Thread(target=watch, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _release(descriptor):
    if descriptor in _locks:  # not in a forked child
        del _locks[descriptor]
        os.close(descriptor)


def _lock(descriptor, how, folder, file, flag):
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, host = _holder(folder, file)
        where = f"process {pid}{'' if host == socket.gethostname() else f' on {host}'}" if pid else "another process"
        is_elsewhere = host not in (None, socket.gethostname())
        if is_elsewhere:
            progress.say(f"{flag} is in use by {where}: waits up to {OTHER_HOST_SECONDS} s, in case that machine was lost")
        if not (is_elsewhere and _is_given(descriptor, how)):
            raise UserError(f"{flag} is in use by {where}: wait until that run has ended, or give another folder") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if file == "lock":
            progress.say(f"nothing keeps other runs out of {folder}: the file system has no locks")
    os.ftruncate(descriptor, 0)
    if how == fcntl.LOCK_EX:  # a shared lock has several holders, named in their own files
        os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())


def _is_given(descriptor, how):
    """Whether another machine releases a lock in time. A thread waits for it, as `flock` has no timeout."""
    given, same = threading.Event(), os.dup(descriptor)  # the caller may close its own before the thread ends

    def wait():
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(same, how)
            finally:
                os.close(same)  # before the caller continues, as this copy would keep the lock
            given.set()

    threading.Thread(target=wait, daemon=True).start()
    return given.wait(OTHER_HOST_SECONDS)


def _holder(folder, file):
    """Returns (pid, host) of the process that holds a lock of the folder, or (None, None).

    They come from the lock file, or else from the lock files of tasks whose processes are alive or on another host.
    """
    for path in (folder / file, *sorted(folder.glob("lock-*"))):
        with contextlib.suppress(OSError):
            found = re.fullmatch(r"(\d{1,9}) ([\w.-]+)\n", path.read_text("ascii", "replace"), re.ASCII)
            if found and (found[2] != socket.gethostname() or os.path.exists(f"/proc/{found[1]}")):
                return int(found[1]), found[2]
    return None, None


def check_contents(folder, flag):
    """Raises a `UserError` if the folder, or an entry that a run writes, belongs to another user or is a link or the like."""
    with tempfile.TemporaryFile(dir=folder) as file:  # a network file system may report another owner for our files
        owners = {os.geteuid(), os.fstat(file.fileno()).st_uid}
    advice = "give another folder: a run writes only into files and folders of its own"
    if os.stat(folder).st_uid not in owners:
        raise UserError(f"{flag} cannot be used: it belongs to another user; {advice}")
    with os.scandir(folder) as entries:
        pending = [Path(entry) for entry in entries if entry.name in (*FOLDERS, SOCKET) or entry.name.startswith(FILES)]
    while pending:
        path = pending.pop()
        with contextlib.suppress(FileNotFoundError):  # other tasks may be writing
            found = os.lstat(path)
            problem = _problem(path.relative_to(folder), found, owners)
            if problem:
                raise UserError(f"{flag} cannot be used: {path.relative_to(folder)} {problem}; remove it, or {advice}")
            if stat.S_ISDIR(found.st_mode):
                pending += path.iterdir()


def _problem(path, found, owners):
    """The fault of a file or folder, or None; `path` is relative to the run's folder, `found` its `lstat`."""
    kind = stat.S_IFMT(found.st_mode)
    if found.st_uid not in owners:
        return "belongs to another user"
    if str(path) == SOCKET:
        return None if kind == stat.S_IFSOCK else "is not the socket that a run makes"
    if kind == stat.S_IFDIR:
        is_file = path.name.startswith((*FILES, "checkpoint")) or path.suffix in (*WRITTEN_INTO, ".json", ".index")
        return "is a folder, where a file belongs" if is_file and path.name not in FOLDERS else None
    if kind != stat.S_IFREG:
        return {stat.S_IFLNK: "is a link", stat.S_IFIFO: "is a pipe", stat.S_IFSOCK: "is a socket"}.get(kind, "is a device")
    if path.name in FOLDERS:
        return "is a file, where a folder belongs"
    if found.st_nlink > 1 and (path.suffix in WRITTEN_INTO or path.name.startswith("lock")):
        return "is a file that has another name, too"
    return None


def open_own(path, flags):
    """Opens a file of the run for writing, and creates it if missing; returns the descriptor.

    Args:
      path: of the file. Its folder is created if missing, but not the folder's parent.
      flags: of `os.open`, such as O_APPEND. Not O_TRUNC, which would truncate before the check.

    Raises:
      UserError: if it is a link, no regular file, another user's, or has a second name.
    """
    path = Path(path)
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: a pipe may have no reader
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, flags, 0o666)
            stack.callback(os.close, descriptor)
            found = os.fstat(descriptor)
        except OSError:
            found = os.lstat(path)
            if not _problem(path, found, {found.st_uid}):
                raise
        problem = _problem(path, found, {os.geteuid(), os.stat(path.parent).st_uid})
        if problem:
            raise UserError(f"{path} {problem}; a run writes only into files of its own")
        stack.pop_all()
        return descriptor


def _file_of_left(run_dir, worker):
    return Path(run_dir, "metrics", f"worker-{worker}.left.json")


def write_left(run_dir, worker, report):
    """Saves the report, numbers, of a worker that leaves for good, as a restarted ps has lost it."""
    write_json(_file_of_left(run_dir, worker), [float(number) for number in report])


def forget_left(run_dir, worker):
    """Removes the report of an earlier worker of this index; returns whether there was one."""
    path = _file_of_left(run_dir, worker)
    has_left = path.exists()
    path.unlink(missing_ok=True)
    return has_left


def read_left(run_dir, num_workers, size):
    """Returns the reports in this folder of workers that have left, {worker: `size` numbers}."""
    found: dict[int, list[float]] = {}
    for worker in range(num_workers):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # no report, or a damaged one
            report = [float(number) for number in json.loads(_file_of_left(run_dir, worker).read_text())]
            found |= {worker: report} if len(report) == size else {}
    return found


def write_json(path, value):
    """Writes a JSON file atomically."""
    text, unfinished = json.dumps(value, indent=2) + "\n", path.with_name(path.name + ".unfinished")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as file:  # follows no link
        file.write(text)
    os.replace(unfinished, path)
