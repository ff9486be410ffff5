"""The time of each test: a plugin of pytest writes it to a file, and starts the longest first; and the tables of README.md.

    bash tests/run.sh          # writes runs/tests/times.jsonl
    python tests/timings.py    # writes the tables of README.md, in this folder, from that file

A line of the file is of one test: its name, its kind, its seconds of the clock and of the processor. Processor time is that of
pytest's process, and of all processes that were started by the test and that somebody has waited for.
"""

import json
import os
import re
import resource
import time
from collections import Counter
from pathlib import Path

import pytest

README = Path(__file__).with_name("README.md")
TIMES = Path(__file__).parents[1] / "runs" / "tests" / "times.jsonl"
VARIABLE = "TESTS_TIMES"  # the path of the file to write
MARK = "<!-- written by `python tests/timings.py` -->"

LONG = 60.0  # seconds of the clock after which a file is cut: the tests that follow may run in another process
WHOLE = ("tests/test_keras_models.py",)  # files that are not cut: a fixture of all tests is most of their time
UNKNOWN = 30.0  # seconds of a file that is not in the table


def _processor_seconds():
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Appends a line to the file at the end of a test. Fixtures count for the first test that uses them."""
    clock, processor = time.monotonic(), _processor_seconds()
    yield
    if path := os.environ.get(VARIABLE):
        kind = "notebook" if item.path.suffix == ".ipynb" else "cluster" if item.get_closest_marker("cluster") else "unit"
        seconds = [round(time.monotonic() - clock, 3), round(_processor_seconds() - processor, 3)]
        with open(path, "a") as file:
            file.write(json.dumps([item.nodeid, kind, *seconds]) + "\n")


def _file(name):
    return name.partition("::")[0]


def known_seconds():
    """Returns {file: seconds of the clock}, from the table of README.md."""
    known: Counter = Counter()
    for file, seconds in re.findall(r"^\| `([^`]+)` \| \w+ \| [\d,]+ \| ([\d,]+) \|", README.read_text(), re.M):
        known[file] += int(seconds.replace(",", ""))
    return known


def units(names, known):
    """Returns {unit: (its tests, seconds)}. A unit is run by one process, in order.

    It is a file, or a part of a file of more than `LONG` seconds. A notebook stays whole, as each cell needs the ones before;
    so do the files of `WHOLE`.

    Args:
      names: of tests, in order.
      known: {file: seconds}.
    """
    counts = Counter(map(_file, names))
    units: dict[str, tuple[list, float]] = {}
    part: Counter = Counter()  # of each file, the number of its present unit
    for name in names:
        file = _file(name)
        seconds = known.get(file, UNKNOWN) / counts[file]
        if file not in WHOLE and not file.endswith(".ipynb") and units.get(f"{file} {part[file]}", ([], 0.0))[1] >= LONG:
            part[file] += 1
        tests, before = units.get(f"{file} {part[file]}", ([], 0.0))
        units[f"{file} {part[file]}"] = [*tests, name], before + seconds
    return units


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`, gives a free process the longest unit that is left, so that all end at about the same time."""
    from xdist.scheduler import LoadScopeScheduling

    class LongestFirst(LoadScopeScheduling):
        def schedule(self):
            if self.collection is None:
                names = next(iter(self.registered_collections.values()))
                of_units = units(names, known_seconds())
                self._units = {name: unit for unit, (tests, _) in of_units.items() for name in tests}
                self._seconds = {unit: seconds for unit, (_, seconds) in of_units.items()}
            super().schedule()

        def _split_scope(self, nodeid):
            return self._units[nodeid]

        def _assign_work_unit(self, node):
            self.workqueue.move_to_end(max(self.workqueue, key=self._seconds.__getitem__), last=False)
            super()._assign_work_unit(node)

    return LongestFirst(config, log)


def tables(times, slowest=20):
    """Returns two tables: the seconds per file and kind, and the slowest tests.

    Args:
      times: lists `[name, kind, seconds of the clock, seconds of the processor]`.
    """
    sums: dict[tuple, list] = {}
    for name, kind, *seconds in times:
        for key in ((_file(name), kind), ("", kind), ("", "all")):
            sums[key] = [a + b for a, b in zip(sums.get(key, (0, 0, 0)), (1, *seconds))]
    by_processor = sorted(sums.items(), key=lambda item: (item[0][0] != "", -item[1][2]))
    lines = ["| file | kind | tests | seconds | of the processor |", "|---|---|--:|--:|--:|"]
    for (file, kind), numbers in by_processor:
        lines.append("| " + " | ".join([f"`{file}`" if file else "together", kind, *(f"{n:,.0f}" for n in numbers)]) + " |")
    lines += ["", "| test | kind | seconds | of the processor |", "|---|---|--:|--:|"]
    for name, kind, clock, processor in sorted(times, key=lambda test: -test[2])[:slowest]:
        lines.append(f"| `{name.replace('|', ' ')}` | {kind} | {clock:,.1f} | {processor:,.1f} |")
    return "\n".join(lines)


def main():
    """Writes the tables between the marks of README.md."""
    if not TIMES.exists():
        raise SystemExit(f"there is no {TIMES}: bash tests/run.sh writes it")
    before, _, rest = README.read_text().partition(MARK)
    _, _, after = rest.partition(MARK)
    times = [json.loads(line) for line in TIMES.read_text().splitlines()]
    README.write_text(f"{before}{MARK}\n\n{tables(times)}\n\n{MARK}{after}")


if __name__ == "__main__":
    main()
