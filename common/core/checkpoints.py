"""Checkpoint files: found, checked, listed and written."""

import contextlib
import fcntl
import glob
import itertools
import os
import re
import shutil
import stat
import tempfile
import threading
from pathlib import Path

import numpy as np

from common import tf
from common.core.checkpoint_parts import TABLES, rows_in
from common.core.flags import TrainingFailed, UserError, why_unwritable
from common.core.task_status import tell_and_log

KEPT = 5  # checkpoints in a folder; older ones are removed
PATIENCE_SECS = 2.0
UNFINISHED = ".unfinished-"  # prefix of a subfolder in which a checkpoint is written


class NotFinite(Exception):
    """Rows of a table are NaN or infinite."""


@contextlib.contextmanager
def writing_into(folder):
    """A context that turns a failure to write a checkpoint into a `TrainingFailed` of one line.

    Raises:
      TrainingFailed: if the disk is full, read-only or gone.
    """
    try:
        yield
    except (tf.errors.OpError, OSError, ValueError) as error:  # ValueError: the folder is gone
        why = why_unwritable(error)
        if not os.path.isdir(folder):
            raise TrainingFailed(f"no checkpoint can be written: the folder {folder} is gone") from None
        if why is None:
            raise
        what = "start again"
        if any(Path(folder).glob("*.index")):
            what = "its checkpoints are intact, and --resume continues from the newest"
        raise TrainingFailed(f"no checkpoint can be written into {folder}: {why}; {what} once that is fixed") from None


def checkpoints_in(folder):
    """Returns the paths of all checkpoints in a folder, the oldest first.

    Only regular files in this folder count, as its list, the file `checkpoint`, may come from another user.
    """
    listed = []
    with contextlib.suppress(ValueError, tf.errors.OpError):  # the file is empty or damaged
        state = tf.train.get_checkpoint_state(str(folder)) if folder else None
        listed = [path for path in state.all_model_checkpoint_paths if _is_ours(path, folder)] if state else []
    if listed:
        return listed
    # The list is damaged or missing, or names checkpoints of another folder.
    files = [str(file.with_suffix("")) for file in Path(folder).glob("*-*.index")] if folder else []
    found = [path for path in files if path.rpartition("-")[2].isdigit() and _is_ours(path, folder)]
    return [path for _, path in sorted({_step_of(path): path for path in found}.items())]


def _is_ours(path, folder):
    """Whether this is a checkpoint of this folder, in regular files (no links), with a name free of glob characters."""
    place, name = os.path.split(os.path.abspath(path))
    if place != os.path.abspath(folder) or not re.fullmatch(r"[\w.-]+", name):
        return False
    for file in _files_of(path):
        with contextlib.suppress(FileNotFoundError):  # a damaged checkpoint, which `newest_good_checkpoint` reports
            if not stat.S_ISREG(os.lstat(file).st_mode):
                return False
    return True


def _files_of(path):
    """The files of a checkpoint: the index, and one data file or one for each part of the tables."""
    return *(sorted(glob.glob(f"{glob.escape(path)}.data-?????-of-?????")) or [f"{path}.data-00000-of-00001"]), f"{path}.index"


def newest_good_checkpoint(folder):
    """Returns the path of the newest undamaged checkpoint in a folder; None if there are no checkpoints.

    Prints a line about each newer, damaged one: truncated, corrupted, or with a trainable variable that is not finite.

    Raises:
      UserError: if all are damaged.
    """
    paths, problem = checkpoints_in(folder), None
    for path in reversed(paths):
        problem = _damage(path)
        if problem is None:
            return path
        tell_and_log(f"the checkpoint {path} is damaged: {problem}; looking for an older one")
    if problem:
        raise UserError(f"all checkpoints in {folder} are damaged, {Path(paths[0]).name}: {problem}; give another folder")
    return None


def list_anew(folder):
    """Rewrites a folder's list of checkpoints, up to the newest good one, and returns the path of that one, or None.

    For a program that lets TensorFlow read the list: it would restore, and later remove, the files that a foreign list names.

    Raises:
      UserError: if all are damaged.
    """
    newest, paths = newest_good_checkpoint(folder), checkpoints_in(folder)
    if newest:
        _list(folder, [os.path.basename(path) for path in paths[: paths.index(newest) + 1]])
    else:
        Path(folder, "checkpoint").unlink(missing_ok=True)
    return newest


def _damage(path):
    """The fault of a checkpoint, or None. Reads every value, as each has a checksum."""
    trainable = {name_and_slice(v)[0] for v in tf.trainable_variables()}
    try:
        checkpoint = tf.train.load_checkpoint(path)
        dtypes = checkpoint.get_variable_to_dtype_map()
        for name, shape in checkpoint.get_variable_to_shape_map().items():
            is_table = name.startswith(TABLES)
            parts = rows_in(path, name, shape, dtype=dtypes[name]) if is_table else [(0, checkpoint.get_tensor(name))]
            for _, value in parts:
                if (name in trainable or is_table) and not np.isfinite(value).all():
                    return f"{name} has values that are not finite"
    except (tf.errors.OpError, IndexError, ValueError, RuntimeError) as error:
        return str(error).splitlines()[0].removeprefix(f"TensorBundle at {path} ")
    return None


def name_and_slice(variable):
    """The name of a variable in a checkpoint, and its slice of the whole variable, as `SaveV2` takes them."""
    part = variable._get_save_slice_info()
    return (part.full_name, part.spec) if part else (variable.op.name, "")


def write_checkpoint(folder, step, names, slices, values, parts=()):
    """Writes `model.ckpt-STEP` into a folder, lists it as the newest, and removes all but the newest `KEPT` checkpoints.

    An existing checkpoint of the same step stays until the new one is complete and listed as `model.ckpt-0STEP`, which is
    then renamed; so a process that dies meanwhile leaves one of the two. Several processes may write concurrently; a process
    lists nothing if a later checkpoint was listed meanwhile. A process stopped (SIGSTOP) while it writes blocks no other; if it
    is stopped in the milliseconds of the listing, others wait for `PATIENCE_SECS`. Must be called with eager execution on.

    Args:
      names, slices: of the values, as `tf.raw_ops.SaveV2` takes them.
      values: arrays.
      parts: iterable of further (name, slice, value): the tables, which no worker holds whole.

    Raises:
      TrainingFailed: if it cannot be written.
    """
    with writing_into(folder), _own_subfolder(folder) as subfolder:
        newest = _newest_in(folder)
        written = _write(subfolder, names, slices, values, parts)
        with _turn(folder):
            known = [os.path.basename(path) for path in checkpoints_in(folder)]
            if known and known[-1] != newest and _step_of(known[-1]) > step:
                return
            _remove_unfinished(folder)
            new, again = f"model.ckpt-{step}", f"model.ckpt-0{step}"
            others = [name for name in known if name not in (new, again)]
            first = again if new in known else new
            _remove(folder, first)  # a leftover index might be read with the new data
            path = os.path.join(folder, first)
            tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=written, destination_prefix=path, delete_old_dirs=False)
            if known and _newest_in(folder) not in (known[-1], first):  # stopped meanwhile, and overtaken
                _remove(folder, first)
                return
            _list(folder, [*others, first])
            if first == again:
                _remove(folder, new)
                for source in _files_of(path):
                    target = os.path.join(folder, new) + source.removeprefix(path)
                    try:
                        os.link(source, target)
                    except OSError:  # this file system has no hard links
                        shutil.copyfile(source, target)
                _list(folder, [*others, new])
            for name in (*others[: 1 - KEPT], again):
                _remove(folder, name)


@contextlib.contextmanager
def _turn(folder):
    """Locks a folder for some milliseconds. After `PATIENCE_SECS` the holder counts as stopped, and the lock is ignored."""
    with _opened(folder) as descriptor:
        pause, patience = threading.Event(), int(PATIENCE_SECS / 0.01)
        while patience and not _lock(descriptor):
            patience -= 1
            pause.wait(0.01)
        yield


@contextlib.contextmanager
def _own_subfolder(folder):
    """Yields a subfolder for an unfinished checkpoint, locked by its writer; removes the subfolders of dead processes."""
    for left in Path(folder).glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError), _opened(left) as descriptor:
            if _lock(descriptor):
                shutil.rmtree(left)
    made = tempfile.mkdtemp(prefix=".new-", dir=folder)
    with _opened(made) as descriptor:
        _lock(descriptor)
        path = os.path.join(folder, UNFINISHED + os.path.basename(made).removeprefix(".new-"))
        os.rename(made, path)  # only now, as others remove unlocked subfolders of this name
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _opened(folder):
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # releases the lock, as the end of the process does


def _lock(descriptor):
    """Tries to lock an open folder; returns whether that succeeded."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _newest_in(folder):
    return next((os.path.basename(path) for path in reversed(checkpoints_in(folder))), None)


def _step_of(name):
    return int(name.rpartition("-")[2])


def _remove_unfinished(folder):
    """Removes data files without an index, left by a process that died. To be called with the lock."""
    for file in Path(folder).glob("model.ckpt-*.data-*"):
        if not Path(folder, f"{file.name.partition('.data-')[0]}.index").exists():
            file.unlink(missing_ok=True)


def _write(folder, names, slices, values, parts):
    """Writes a checkpoint in parts and returns their prefixes; raises `NotFinite` for table rows that are not finite."""
    written: list[str] = []
    for some in itertools.chain([(names, slices, values)], (([name], [spec], [value]) for name, spec, value in parts)):
        if written and not np.isfinite(some[2][0]).all():
            raise NotFinite
        written.append(os.path.join(folder, f"part-{len(written)}"))
        tf.raw_ops.SaveV2(prefix=written[-1], tensor_names=some[0], shape_and_slices=some[1], tensors=some[2])
    return written


def _list(folder, names):
    """Lists the last `KEPT` of these checkpoints, by relative paths, so that the folder can be moved."""
    tf.train.update_checkpoint_state(os.path.abspath(folder), names[-1], names[-KEPT:])


def _remove(folder, name):
    for file in _files_of(os.path.join(folder, name)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)
