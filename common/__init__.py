"""The package that schemes, scripts and notebooks share. Your own scripts may import from here:

`from common import DistributedSession, EarlyStoppingHook, LoadCheckpoint, SemiSyncRunHook, StopAtTimeHook, TaskSpec, tf`; and
`train`, which trains a Keras model as a folder's run.sh does; `Embedding`, a layer whose table is on the ps, and `rows_of`,
which reads its rows from a checkpoint.
"""

import contextlib
import gc
import importlib
import itertools
import linecache
import os
import sys
import types
from typing import Any


def _check_system():
    """Raises a `UserError` on a system that is not Linux, before anything starts to work and then fails there."""
    if sys.platform != "linux":
        from common.core import UserError

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


def _open_standard_streams():
    """Opens standard input, output and error on /dev/null where they are closed, as after `>&-`. Otherwise Python has None for
    them, and the next file that is opened gets their number, and with it what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it has this number, the lowest that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


_check_system()
_open_standard_streams()
private_caches()


@contextlib.contextmanager
def silent():
    """Discards what C++ code writes to standard error meanwhile: tensorflow reports its import, whatever the log level."""
    sys.stderr.flush()
    standard_error = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)


@contextlib.contextmanager
def without_garbage_collection():
    """A context for an import: no garbage is collected in it, and the objects of the import are never looked through later.

    They are hundreds of thousands, and live on. To look through them again and again takes a third of the processor time of
    `import tensorflow`, and 0.2 s each time after it. Other objects that exist at the end stay as well if they are garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class _TensorFlow:
    """`tensorflow.compat.v1`, imported when it is first used.

    The import takes seconds of processor time. The launcher reads a scheme's script for its flags, trains nothing, and so
    never pays for it; the tasks that it starts do.
    """

    _module = None

    def __reduce__(self):
        return "tf"  # this module's, whichever process it comes to

    def __getattr__(self, name):
        if self._module is None:
            self._module = _import_tensorflow()
        return getattr(self._module, name)


def _import_tensorflow():
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # or the first of two processes would take all of a GPU
    # A third of that time goes into packages that Keras takes along if it finds them, for wrappers and galleries that no
    # task needs. They stay importable afterwards.
    is_quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") != "0"
    hidden: dict[str, Any] = {package: None for package in ("sklearn", "matplotlib") if package not in sys.modules}
    sys.modules.update(hidden)
    try:
        with silent() if is_quiet else contextlib.nullcontext(), without_garbage_collection():
            module = importlib.import_module("tensorflow.compat.v1")
            _keep_generated_code_in_memory()
        default = module.logging.INFO if hasattr(sys, "ps1") else module.logging.WARN  # ps1: in a notebook
        if module.logging.get_verbosity() == default:  # otherwise a script has set what it wants to see
            module.logging.set_verbosity(module.logging.ERROR)  # it warns that it is deprecated, in most of its parts
        return module
    finally:
        for package in hidden:
            del sys.modules[package]


def _keep_generated_code_in_memory():
    """From now on tf.autograph loads the code that it generates from memory.

    By itself it writes a file into the folder for temporary files, and removes that when the interpreter ends. Tasks end by
    `os._exit`, so their files would stay.
    """
    with contextlib.suppress(ImportError, AttributeError):  # another version: then the files stay
        loader: Any = importlib.import_module("tensorflow.python.autograph.pyct.loader")
        original = loader.load_source

        def load_source(source, delete_on_exit):
            if not delete_on_exit:
                return original(source, delete_on_exit)
            name = f"__autograph_generated_file{next(_numbers)}"
            module = types.ModuleType(name)
            module.__file__ = file = f"<{name}>"
            linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # for tracebacks and inspect
            exec(compile(source, file, "exec"), module.__dict__)
            sys.modules[name] = module
            return module, file

        loader.load_source = load_source


_numbers = itertools.count()


tf: Any = _TensorFlow()


_MODULES = {
    "train": "cli.fit",
    "TaskSpecDef": "cluster.cluster",
    "TaskSpec": "cluster.cluster",
    "DistributedSession": "cluster.session",
    "StopAtTimeHook": "cluster.hooks",
    "LoadCheckpoint": "cluster.hooks",
    "EarlyStoppingHook": "cluster.hooks",
    "SemiSyncRunHook": "cluster.hooks",
    "Embedding": "models.embedding",
    "rows_of": "scheme.tables",
}


def __getattr__(name):
    """Imports a module when something of it is first asked for, as some of them import tensorflow."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"common.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'common' has no attribute {name!r}")
