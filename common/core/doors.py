"""The front door of a package: its public names, each imported from its module at first use.

So importing a package does not import tensorflow or keras, which takes seconds.
"""

import ast
import importlib
import sys
from pathlib import Path
from typing import Any


def front_door(package):
    """Returns the functions `__getattr__` and `__dir__` of a package, as Python looks them up in its `__init__.py`.

    Args:
      package: its name. Its `__init__.py` imports the names under `if TYPE_CHECKING`, for type checkers and readers; the
        functions read them from there.
    """
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name) -> Any:
        if name not in homes:
            raise AttributeError(f"{package} does not offer {name!r}: see its __init__.py")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    return get, lambda: sorted(homes)
