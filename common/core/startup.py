"""What must hold before anything is imported or opened: Linux, open standard streams, caches that belong to this user."""

import os
import sys

from common.core.flags import UserError


def check_system():
    """Raises a `UserError` on a system that is not Linux, before anything starts to work and then fails there."""
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
    """Gives Keras and Matplotlib a folder that belongs to this process and ends with it, if the home is not writable. Keras
    would take /tmp/.keras, which another user may have made before, with any contents.

    To be called before Keras is imported. What this process starts finds the same folder in its environment.
    """
    is_writable = is_home_writable() if is_writable is None else is_writable
    home = os.path.expanduser("~")
    if "KERAS_HOME" not in os.environ and is_writable and not os.access(home, os.W_OK):
        os.environ["KERAS_HOME"] = os.path.join(home, ".keras")  # Keras looks at the home alone
    if "KERAS_HOME" not in os.environ and not is_writable:
        import tempfile

        os.environ["KERAS_HOME"] = tempfile.mkdtemp(prefix="keras-")
        os.environ.setdefault("MPLCONFIGDIR", os.environ["KERAS_HOME"])
        os.environ["KERAS_HOME_IS_OF"] = str(os.getpid())
    if os.environ.get("KERAS_HOME_IS_OF") == str(os.getpid()):  # also one that has begun again, see `common.cli.program`
        import atexit

        atexit.register(remove_private_caches)


def remove_private_caches():
    """Removes the folder that `private_caches` has made, if this process did it, not one that forked this one."""
    import shutil

    if os.environ.get("KERAS_HOME_IS_OF") == str(os.getpid()):
        shutil.rmtree(os.environ["KERAS_HOME"], ignore_errors=True)


def open_standard_streams():
    """Opens standard input, output and error on /dev/null where they are closed, as after `>&-`. Otherwise Python has None for
    them, and the next file that is opened gets their number, and with it what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it has this number, the lowest that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))
