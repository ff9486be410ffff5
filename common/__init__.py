"""What the schemes, their scripts and their notebooks share."""

import importlib
import sys
from typing import Any


class _TensorFlow:
    """`tensorflow.compat.v1`, imported when it is first used.

    The import takes seconds of processor time. The launcher reads a scheme's script for its flags, trains nothing, and so
    never pays for it; the tasks that it starts do.
    """

    _module = None

    def __getattr__(self, name):
        if self._module is None:
            self._module = _import_tensorflow()
        return getattr(self._module, name)


def _import_tensorflow():
    # A third of that time goes into packages that Keras takes along if it finds them, for wrappers and galleries that no
    # task needs. They stay importable afterwards.
    hidden: dict[str, Any] = {package: None for package in ("sklearn", "matplotlib") if package not in sys.modules}
    sys.modules.update(hidden)
    try:
        module = importlib.import_module("tensorflow.compat.v1")
        module.logging.set_verbosity(module.logging.ERROR)  # it warns that it is deprecated, in most of its parts
        return module
    finally:
        for package in hidden:
            del sys.modules[package]


tf: Any = _TensorFlow()
