"""Files of samples: their kind, their names, and their sizes and times."""

import errno
import glob
import os

from common.core import UserError

HELD = 10  # without --test_data, every tenth record of each file is for the test


def kind_of(spec):
    """Returns the kind of files of a pattern, "tfrecord", "parquet", "csv" or "arrow"; None for anything else."""
    name = os.path.basename(spec)
    if ".tfrecord" in name:
        return "tfrecord"
    kinds = {"parquet": "parquet", "csv": "csv", "arrow": "arrow", "feather": "arrow"}
    return kinds.get(name.removesuffix(".gz").rpartition(".")[2])


def files_of(flag, pattern):
    """Returns the files that match a pattern, in alphabetical order, or raises `UserError` if there are none."""
    paths = sorted(path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path))
    if not paths:
        raise UserError(f"{flag}={pattern}: there is no such file")
    return [os.path.abspath(path) for path in paths]


def state_of(paths):
    """Returns {path: [size in bytes, time of the last change in ns]} of files; a `UserError` for one that cannot be read."""
    found = {}
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read: {os.strerror(errno.EACCES)}")
        found[path] = [status.st_size, status.st_mtime_ns]
    return found


def check_unchanged(state):
    """Raises a `UserError` if a file differs from its state, see `state_of`."""
    for path, now in state_of(state).items():
        if state[path] != now:
            raise UserError(f"{path} has changed while it was read: start again when it is complete")
