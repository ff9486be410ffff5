"""Functions of the user's, FILE.py:FUNCTION: their import, their call, and their errors in one line."""

import importlib.util
import re
import sys
from pathlib import Path

from common.core import UserError


def call_user_function(flag, spec, *arguments):
    """Returns the result of FUNCTION of `spec`, FILE.py:FUNCTION; see `user_function` and `call`."""
    return call(flag, spec, user_function(flag, spec), *arguments)


def call(flag, spec, function, *arguments):
    """Returns the result of a function of the user's, `spec`; its error is a `UserError`."""
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        name = spec.rpartition(":")[2]
        raise UserError(f"{flag}={spec}: {name}() raised {one_line(error)}") from error


def user_function(flag, spec):
    """Returns FUNCTION of `spec`, FILE.py:FUNCTION, or raises `UserError`. It can import from the file's folder."""
    path, colon, name = spec.rpartition(":")
    if not colon:
        raise UserError(f"{flag} must be FILE.py:FUNCTION, not {spec!r}")
    module = user_module(flag, path, spec)
    try:
        function = getattr(module, name, None)
    except Exception as error:  # of a module's own __getattr__
        raise UserError(f"{flag}={spec}: {one_line(error)}") from error
    is_model = hasattr(function, "get_config") and not isinstance(function, type)
    if not callable(function) or is_model:
        what = f", but a {type(function).__name__}: give a function that returns it" if function is not None else ""
        raise UserError(f"{flag}={spec}: {path} has no function {name!r}{what}")
    return function


def user_module(flag, path, spec=None):
    """Returns the module in a Python file of the user's, or raises `UserError` on `flag=spec`, by default the path."""
    spec = spec or path
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{flag}={spec}: there is no file {path}")
    module = before = sys.modules.get(file.stem)
    if getattr(before, "__file__", None) != str(file):
        sys.path.insert(0, str(file.parent))
        module_spec = importlib.util.spec_from_file_location(file.stem, file)
        if module_spec is None or module_spec.loader is None:
            raise UserError(f"{flag}={spec}: {path} is not a Python file")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[file.stem] = module  # dataclasses and pickle look their module up there
        try:
            module_spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise UserError(f"{flag}={spec}: {path} cannot be imported: {one_line(error)}") from error
        if before is not None:  # another module of the same name, still importable
            sys.modules[file.stem] = before
    return module


def one_line(error):
    """The type and first line of an exception; for one in a function traced by TensorFlow, the line after its frames."""
    lines = str(error).strip().splitlines()
    if lines and lines[0] == "in user code:":
        told = [line.strip() for line in lines if re.match(r" {4}\w+(Error|Exception|Iteration)\b", line)]
        return re.sub(r"(\w+\.<locals>\.)*tf__", "", told[-1] if told else f"{type(error).__name__}: {lines[-1].strip()}")
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
