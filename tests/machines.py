"""Several hosts on this machine for the tests: see Multiple-Machines/hosts.py."""

import importlib.util
import shutil

from runs import ROOT
from skips import skip_for

spec = importlib.util.spec_from_file_location("hosts", ROOT / "Multiple-Machines" / "hosts.py")
assert spec and spec.loader
hosts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hosts)


def need(*programs):
    """Skips the test, with a line that says why, where hosts or programs cannot be had; where they must be, it fails."""
    missing = [program for program in programs if shutil.which(program) is None]
    skip_for(f"{', '.join(missing)} missing" if missing else hosts.why_not())
