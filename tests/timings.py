"""Notes how long each test takes, in a file under runs/ from which `tables` makes the tables of the README of this folder.

Loaded by tests/run.sh (`-p tests.timings`). A line of the file is of one test: its name, its kind, and its seconds, of the clock
and of processor time: of its own process and of those that it started and waited for.
"""

import json
import os
import resource
import time

import pytest

VARIABLE = "TESTS_TIMES"  # the path of the file


def _processor_seconds():
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Appends a line to the file when a test has ended, with what its fixtures took."""
    clock, processor = time.monotonic(), _processor_seconds()
    yield
    if path := os.environ.get(VARIABLE):
        kind = "notebook" if item.path.suffix == ".ipynb" else "cluster" if item.get_closest_marker("cluster") else "unit"
        seconds = [round(time.monotonic() - clock, 3), round(_processor_seconds() - processor, 3)]
        with open(path, "a") as file:
            file.write(json.dumps([item.nodeid, kind, *seconds]) + "\n")
