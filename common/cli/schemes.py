"""The definition of a scheme in its folder: its function, and the defaults and checks of its script's flags."""

import contextlib
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags as absl_flags

from common.cli import api, program
from common.core import UserError, flags


class Folder(NamedTuple):
    """The arguments of a scheme's script to `common.cli.main`."""

    name: str
    scheme: Any
    check: Any
    without: tuple
    optimizer_on: str
    defaults: dict


def folder_of(name):
    """Returns the `Folder` of a scheme, named by folder or by script path, and defines the scheme's own flags.

    Raises:
      UserError: if there is no such folder or script, or it is no scheme's.
    """
    script = Path(name) if name.endswith(".py") else api.script_of(name)
    if not script.is_file():
        raise UserError(f"there is no script {name}")
    found: list[Folder] = []

    def capture(scheme=None, train=None, pace="own", without=(), check=None, evaluate=None, optimizer_on="ps", **defaults):
        if scheme is None:
            raise UserError(f"{script.name} has a main loop of its own, so virtual workers cannot run it")
        if pace != "own":  # as in `common.cli.program`: workers that wait for each other start together
            without = (*without, "warm_start_steps")
        found.append(Folder(script.resolve().parent.name, scheme, check, without, optimizer_on, defaults))

    original, program.main = program.main, capture
    try:
        with _importable_from(script.parent):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        program.main = original
    if not found:
        raise UserError(f"{script} does not call common.cli.main(scheme, ...), as a scheme's script does")
    return found[0]


@contextlib.contextmanager
def _importable_from(folder):
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))


@contextlib.contextmanager
def flags_of_one_run():
    """Removes the flags defined in its block at the end: flags are global, and the next run in this process defines its own."""
    before = set(absl_flags.FLAGS)
    try:
        yield
    finally:
        for name in flags.own_names(absl_flags.FLAGS) - before:
            delattr(absl_flags.FLAGS, name)
