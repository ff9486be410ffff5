"""The schemes of this project's folders: the script of each folder, and the `Scheme` in it."""

import contextlib
import difflib
import runpy
import sys
from pathlib import Path

from common.core import UserError
from common.scheme import Scheme

ROOT = Path(__file__).resolve().parents[2]  # parent of the schemes' folders


def script_of(name):
    """Returns the path of a scheme's script: the one named as its folder, in lower case with underscores, or else the only one.

    Args:
      name: a folder of this project, as "DC-ASGD"; or the path of a script.

    Raises:
      UserError: if there is no such folder or script.
    """
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"there is no script {name}")
        return Path(name)
    scripts = {path.parent.name: _script_in(path.parent) for path in ROOT.glob("*/run.sh")}
    known = sorted(folder for folder, script in scripts.items() if script)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise UserError(f"there is no scheme {name!r}; {hint}")
    return scripts[name]


def _script_in(folder):
    scripts = {path.stem: path for path in folder.glob("*.py") if "\nSCHEME = " in path.read_text()}
    named = scripts.get(folder.name.lower().replace("-", "_"))
    return named or (next(iter(scripts.values())) if len(scripts) == 1 else None)


def scheme_in(script):
    """Returns the `Scheme` of a script, its SCHEME.

    Raises:
      UserError: if there is none, or it has a main loop of its own.
    """
    with _importable_from(script.parent):
        scheme = runpy.run_path(str(script)).get("SCHEME")
    if not isinstance(scheme, Scheme):
        raise UserError(f"{script} has no SCHEME = Scheme(...), as a scheme's script has")
    if scheme.train:
        raise UserError(f"{script.name} has a main loop of its own, so virtual workers cannot run it")
    return scheme


@contextlib.contextmanager
def _importable_from(folder):
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))
