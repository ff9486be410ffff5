"""Preconditions of every process: Linux, open standard streams, private caches."""

import os
import sys

from common.core.flags import UserError


def check_system():
    """Raises a `UserError` on any system but Linux, before anything starts and fails halfway."""
    if sys.platform != "linux":
        raise UserError(
            f"this is {sys.platform}, but the tasks need Linux (prctl, /proc, namespaces); run it under WSL2 "
            "or in a container, see book/guide/install.md"
        )


def is_home_writable():
    """Whether Keras can write into the home folder, or into its own folder there."""
    home = os.path.expanduser("~")
    keras = os.path.join(home, ".keras")
    return os.access(keras if os.path.isdir(keras) else home, os.W_OK)


def private_caches(is_writable=None):
    """Gives Keras, Matplotlib and the cache of data a temporary folder of this process, if the home folder is not writable.

    Otherwise Keras would use /tmp/.keras, which another user may have created with any contents. To be called before Keras is
    imported. Child processes find the same folder in their environment.
    """
    is_writable = is_home_writable() if is_writable is None else is_writable
    home = os.path.expanduser("~")
    if "KERAS_HOME" not in os.environ and is_writable and not os.access(home, os.W_OK):
        os.environ["KERAS_HOME"] = os.path.join(home, ".keras")  # Keras checks only the home folder
    if "KERAS_HOME" not in os.environ and not is_writable:
        import tempfile

        os.environ["KERAS_HOME"] = tempfile.mkdtemp(prefix="keras-")
        os.environ.setdefault("MPLCONFIGDIR", os.environ["KERAS_HOME"])
        os.environ.setdefault("XDG_CACHE_HOME", os.environ["KERAS_HOME"])
        os.environ["KERAS_HOME_IS_OF"] = str(os.getpid())
    if os.environ.get("KERAS_HOME_IS_OF") == str(os.getpid()):  # also after a re-exec, see `common.cli.program`
        import atexit

        atexit.register(remove_private_caches)


def remove_private_caches():
    """Removes the folder of `private_caches`, if this process made it, not its parent."""
    import shutil

    if os.environ.get("KERAS_HOME_IS_OF") == str(os.getpid()):
        shutil.rmtree(os.environ["KERAS_HOME"], ignore_errors=True)


def open_standard_streams():
    """Opens closed standard streams, as after `>&-`, on /dev/null.

    Otherwise Python sets them to None, and the next opened file gets their descriptor, and with it all printed output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets this number, the lowest free one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))
