"""What the schemes, their scripts and their notebooks share."""

from typing import Any


class _TensorFlow:
    """`tensorflow.compat.v1`, imported when it is first used.

    The import takes seconds of processor time. The launcher reads a scheme's script for its flags, trains nothing, and so
    never pays for it; the tasks that it starts do.
    """

    def __getattr__(self, name):
        import tensorflow.compat.v1 as module

        return getattr(module, name)


tf: Any = _TensorFlow()
