"""Data sets converted once: arrays in plain files of a cache folder, each found by a key of everything that it depends on."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import time
import uuid
from pathlib import Path

import numpy as np

from common.core import UserError, limits, progress, task_status
from common.data.columns import Columns
from common.data.datasets import Data
from common.data.files import check_unchanged
from common.data.mapped_rows import LARGE, Rows
from common.data.nested_arrays import mapped

ABOUT = "about.json"  # in an entry: its arrays, as "FILE SHAPE" in their structure, and a description of them
UNFINISHED = ".unfinished"
LINE_SECS = 30  # between two lines on a long conversion


def folder_of(given):
    """Returns the cache folder, `--data_cache` or one of the user's; it is made if missing, and private.

    Raises:
      UserError: if it cannot be written, or is another user's.
    """
    if given == "":
        raise UserError("--data_cache is empty: name a folder, or leave the flag out")
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "distributed-tensorflow-tutorials")
    folder = Path(given or home).expanduser().absolute()
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise _no_folder(folder, f"it cannot be made: {error.strerror}") from None
    if owner != os.geteuid():
        raise _no_folder(folder, "it belongs to another user")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _no_folder(folder, "it cannot be written")
    return folder


def _no_folder(folder, why):
    return UserError(f"--data_cache={folder}, for converted data: {why}; name another folder with --data_cache")


@functools.cache
def _versions():
    code = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]  # a conversion may differ with any of it
    return [*code, *(importlib.metadata.version(name) for name in ("tensorflow", "pyarrow", "numpy"))]


def key_of(*parts):
    """Returns the key of an entry, a hash of the values, in JSON, of the code that reads data, and of library versions."""
    return hashlib.sha256(json.dumps([_versions(), *parts], sort_keys=True).encode()).hexdigest()[:32]


def opened(folder):
    """Returns the `Data` of an entry, or None if it is missing or damaged. Large arrays are mapped."""
    try:
        about = json.loads((folder / ABOUT).read_text())
        arrays = {name: mapped(functools.partial(_opened, folder), _as_tuples(part)) for name, part in about["arrays"].items()}
        columns = Columns(about["columns"]) if about["columns"] else None
        return Data(**arrays, columns=columns, text=about["text"], entry=str(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _opened(folder, text):
    name, shape = text.split(" ")
    dtype, shape = np.dtype(name.rpartition(".")[2]), tuple(map(int, shape.split("x")))
    if (folder / name).stat().st_size != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} is incomplete")
    array = np.memmap(folder / name, dtype, "r", shape=shape)
    return Rows(array, dtype) if array.nbytes > LARGE else np.array(array)


def _as_tuples(part):
    """Returns a structure read from JSON with tuples in place of lists."""
    if isinstance(part, dict):
        return {key: _as_tuples(value) for key, value in part.items()}
    return tuple(map(_as_tuples, part)) if isinstance(part, list) else part


def converted(root, key, files, convert):
    """Returns the `Data` of an entry, made if it is missing; no other process sees an unfinished one.

    Args:
      root: the cache folder.
      key: of the entry; None for data that are converted anew each time: there is no entry, and their files have no name.
      files: the files that are read, as {path: state}, see `files.state_of`.
      convert: function of an empty folder and of a function for progress, told(done, total), that writes the arrays and returns
        the contents of `ABOUT`.

    Raises:
      UserError: if the data cannot be read, a file changes meanwhile, or the disk is full.
    """
    folder = root / (key or f"anew-{uuid.uuid4().hex}")
    if (found := opened(folder)) is not None:
        return found
    with _locked(folder):
        if (found := opened(folder)) is not None:  # another run has made it meanwhile
            return found
        if folder.exists():
            task_status.tell(f"{folder} is damaged: the data are converted again")
            shutil.rmtree(folder)
        _remove_unfinished(root, folder)
        return _converted(folder, files, convert, is_kept=key is not None)


def _converted(folder, files, convert, is_kept):
    unfinished, told = folder.with_name(folder.name + UNFINISHED), _Told()
    try:
        unfinished.mkdir(0o700)
        with task_status.meanwhile(task_status.CONVERTING):
            about = convert(unfinished, told)
        check_unchanged(files)
        (unfinished / ABOUT).write_text(json.dumps(about))
        if is_kept:
            os.rename(unfinished, folder)
        found = opened(folder if is_kept else unfinished)
        assert found is not None
        return found if is_kept else found._replace(entry=None)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            written = sum(path.stat().st_size for path in unfinished.glob("*"))
            need = f"about {limits.as_bytes(written / told.share)}" if told.share else f"more than {limits.as_bytes(written)}"
            raise _no_folder(folder.parent, f"its disk is full; the arrays need {need}") from None
        if str(error.filename or folder).startswith(str(folder)):
            raise _no_folder(folder.parent, f"it cannot be written: {error.strerror}") from None
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # maps of its files stay
        if not is_kept:
            _lock_of(folder).unlink(missing_ok=True)


def _lock_of(folder):
    return folder.with_name(f"{folder.name}.lock")


@contextlib.contextmanager
def _locked(folder):
    """A context with the lock of an entry. It waits for another holder, whose lock ends with its process at the latest."""
    with open(_lock_of(folder), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with task_status.meanwhile("waiting for another run to convert the data", waits=True):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_unfinished(root, own):
    """Removes the unfinished entries of killed runs: those that no process has locked."""
    for path in root.glob(f"*{UNFINISHED}"):
        folder = root / path.name.removesuffix(UNFINISHED)
        with open(_lock_of(folder), "w") as lock, contextlib.suppress(BlockingIOError):
            if folder != own:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _lock_of(folder).unlink()
            shutil.rmtree(path, ignore_errors=True)


class _Told:
    """Tells the launcher and the user the progress of a conversion.

    Attributes:
      share: the share of the work that is done; 0 if unknown.
    """

    def __init__(self):
        self.share, self._began, self._next, self._line = 0.0, time.monotonic(), 0.0, time.monotonic() + LINE_SECS

    def __call__(self, done, total=None):
        """Notes that `done` is done, of `total`; None if the total is unknown."""
        now = time.monotonic()
        self.share = done / total if total else 0.0
        if now < self._next:
            return
        self._next, text = now + 1, f"{done:,} samples"
        if self.share:
            left = (now - self._began) * (1 / self.share - 1)
            text = f"{self.share:.0%}, {progress.as_time(left)} left"
        task_status.doing(f"{task_status.CONVERTING}: {text}")
        if now >= self._line:
            self._line = now + LINE_SECS
            task_status.tell(f"{task_status.CONVERTING}: {text}")


def arrays_of_tables(about):
    """Returns the `arrays` of `ABOUT` for files that `table_files.convert` has written, from its description of them."""
    found, labels = {}, about["labels"]
    for half, n in about["rows"].items():
        numbers = f"{half}-numbers.float32 {n}x{about['numbers']}" if about["numbers"] else None
        ids = f"{half}-ids.int64 {n}x{about['ids']}" if about["ids"] else None
        found[f"x_{half}"] = numbers if not ids else {"ids": ids} | ({"numbers": numbers} if numbers else {})
        width = f"x{labels['width']}" if labels["width"] else ""
        found[f"y_{half}"] = f"{half}-labels.{labels['dtype']} {n}{width}"
    return found


