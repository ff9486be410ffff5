"""`tf`, an alias of `tensorflow.compat.v1`: imported silently on first use, with the settings that tasks need."""

import contextlib
import gc
import importlib
import itertools
import linecache
import os
import sys
import types
from typing import Any


@contextlib.contextmanager
def silent():
    """Discards standard error of C++ code in this context, as tensorflow logs its import at any log level."""
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
    """A context for an import, without garbage collection; later collections skip the objects of the import, too.

    They are hundreds of thousands, and permanent. Scanning them takes a third of the processor time of `import tensorflow`, and
    0.2 s for each later collection. Other garbage that exists at the end is never freed either.
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
    """`tensorflow.compat.v1`, imported on first use.

    The import takes seconds of processor time. The launcher only reads the flags of a scheme's script, so it never pays for
    the import; its tasks do.
    """

    _module = None

    def __reduce__(self):
        return "tf"  # pickled as this module's global

    def __getattr__(self, name):
        if self._module is None:
            self._module = _import_tensorflow()
        return getattr(self._module, name)


def _import_tensorflow():
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # else the first process on a GPU takes all its memory
    # A third of that time goes into optional packages of Keras, for wrappers and galleries that no task needs. They stay
    # importable afterwards.
    is_quiet = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") != "0"
    hidden: dict[str, Any] = {package: None for package in ("sklearn", "matplotlib") if package not in sys.modules}
    sys.modules.update(hidden)
    try:
        with silent() if is_quiet else contextlib.nullcontext(), without_garbage_collection():
            module = importlib.import_module("tensorflow.compat.v1")
            _keep_generated_code_in_memory()
        default = module.logging.INFO if hasattr(sys, "ps1") else module.logging.WARN  # ps1: in a notebook
        if module.logging.get_verbosity() == default:  # else a script has set its own
            module.logging.set_verbosity(module.logging.ERROR)  # no deprecation warnings of compat.v1
        return module
    finally:
        for package in hidden:
            del sys.modules[package]


def _keep_generated_code_in_memory():
    """From now on tf.autograph loads its generated code from memory.

    By default it writes a temporary file, and removes it when the interpreter ends. Tasks end by `os._exit`, so their files
    would stay.
    """
    with contextlib.suppress(ImportError, AttributeError):  # another version of TensorFlow: the files stay
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
