"""Why an environment is unusable for this checkout, for common/setup.sh: exits with that in words, or with 0 if it is usable.

    PYTHON -I common/setup_check.py    # in the root of the checkout; -I: without the user's own packages
"""

import importlib.util
import os
import sys

try:
    from importlib.metadata import version

    from packaging.requirements import Requirement

    lines = [line.split("#")[0].strip() for line in open("requirements.txt", encoding="utf-8")]
    for need in (Requirement(line) for line in lines if line and not line.startswith("-")):
        if (not need.marker or need.marker.evaluate()) and not need.specifier.contains(version(need.name), prereleases=True):
            sys.exit(f"has {need.name} {version(need.name)}, not {need.specifier}")
except ImportError as error:  # version() raises one, too
    sys.exit(f"lacks {error.name}")
spec = importlib.util.find_spec("common")
if not spec or os.path.realpath(spec.origin or "") != os.path.realpath("common/__init__.py"):
    sys.exit(f"imports `common` from {spec.origin if spec else 'nowhere'}")
