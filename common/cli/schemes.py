"""The schemes of this project's folders: the script of each folder, and the `Scheme` in it."""

import difflib
import runpy
import sys
from pathlib import Path

from common.core import UserError
from common.scheme import Scheme

ROOT = Path(__file__).resolve().parents[2]  # parent of the schemes' folders


def script_of(name):
    """Returns the path of the script of a scheme, named by a folder of this project, as "DC-ASGD", or by that path."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"there is no script {name}")
        return Path(name)
    folders = sorted(path.parent for path in ROOT.glob("*/run.sh"))
    scripts = {folder.name: script for folder in folders if (script := _script_in(folder))}
    if name not in scripts:
        near = difflib.get_close_matches(name, scripts, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(scripts)}"
        raise UserError(f"there is no scheme {name!r}; {hint}")
    return scripts[name]


def _script_in(folder):
    """Returns the script named as the folder, in lower case with underscores, or else the only one; None without one."""
    scripts = {path.stem: path for path in folder.glob("*.py") if "\nSCHEME = " in path.read_text()}
    named = scripts.get(folder.name.lower().replace("-", "_"))
    return named or (next(iter(scripts.values())) if len(scripts) == 1 else None)


def scheme_in(script):
    """Returns the `Scheme` of a script, its SCHEME; raises a `UserError` if there is none, or it has a main loop of its own."""
    folder = str(script.parent.resolve())
    sys.path.insert(0, folder)
    try:
        scheme = runpy.run_path(str(script)).get("SCHEME")
    finally:
        sys.path.remove(folder)
    if not isinstance(scheme, Scheme):
        raise UserError(f"{script} has no SCHEME = Scheme(...), as a scheme's script has")
    if scheme.train:
        raise UserError(f"{script.name} has a main loop of its own, so virtual workers cannot run it")
    return scheme
