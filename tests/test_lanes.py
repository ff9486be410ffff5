"""What tests/run.sh runs in which lane, in which order, and what is noted of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import timings

CHECKOUT = Path(__file__).resolve().parents[1]


# Collects tests twice, and imports once what they import.
COLLECT = """
import sys, pytest
for more in [], ["--soak"]:
    print("collected with", more, flush=True)
    assert pytest.main(["--collect-only", "-q", "-p", "no:nbval", *sys.argv[1:], *more]) == 0
"""


@pytest.mark.slow
def test_nothing_is_in_soak_alone():
    """The names of the tests that pytest finds, without their parameters, are those without `--soak`."""
    files = [path for path in CHECKOUT.glob("tests/test_*.py") if "soak" in path.read_text() and path != Path(__file__)]
    assert files
    run = subprocess.run([sys.executable, "-c", COLLECT, *files], cwd=CHECKOUT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    _, without, soak = run.stdout.split("collected with ")
    names = [{line.partition("[")[0] for line in part.splitlines() if "::" in line} for part in (without, soak)]
    assert names[0] == names[1] != set()


def test_long_file_is_cut_and_notebook_is_not(monkeypatch):
    monkeypatch.setattr(timings, "WHOLE", ("whole.py",))
    assert len(timings.units([f"whole.py::{i}" for i in range(4)], {"whole.py": 4 * timings.LONG})) == 1
    names = [f"{file}::{i}" for file in ("test_a.py", "test_b.py", "c.ipynb", "test_new.py") for i in range(4)]
    known = {"test_a.py": 4 * timings.LONG, "test_b.py": timings.LONG, "c.ipynb": 4 * timings.LONG}
    units = timings.units(names, known)
    assert [tests for tests, _ in units.values()] == [*([name] for name in names[:4]), names[4:8], names[8:12], names[12:]]
    assert [seconds for _, seconds in units.values()] == [timings.LONG] * 5 + [4 * timings.LONG, timings.UNKNOWN]


def test_next_run_knows_the_seconds_of_the_tables(tmp_path, monkeypatch):
    times = [
        ["tests/test_a.py::x[a|b]", "unit", 2.2, 1.0],
        ["tests/test_a.py::y", "cluster", 2000.0, 1.0],
        ["b.ipynb::1", "notebook", 3.0, 1.0],
    ]
    monkeypatch.setattr(timings, "README", tmp_path / "README.md")
    timings.README.write_text(timings.tables(times))
    assert timings.known_seconds() == {"tests/test_a.py": 2002, "b.ipynb": 3}


def test_tables_sum_and_sort():
    times = [["a.py::x", "unit", 1.0, 5.0], ["a.py::y", "unit", 2.0, 6.0], ["b.py::z", "cluster", 9.0, 20.0]]
    lines = timings.tables(times, slowest=1).splitlines()
    assert [line for line in lines if line.startswith("| `")] == [
        "| `b.py` | cluster | 1 | 9 | 20 |",
        "| `a.py` | unit | 2 | 3 | 11 |",
        "| `b.py::z` | cluster | 9.0 | 20.0 |",
    ]
    assert "| together | all | 3 | 12 | 31 |" in lines


@pytest.mark.slow
@pytest.mark.parametrize("failing, line", [("", "x = 1"), ("ruff", "import os"), ("mypy", "x: int = 'one'")])
def test_ruff_and_mypy_fail_the_run(tmp_path, failing, line):
    """They run beside pytest, whose verdict is the last line."""
    (tmp_path / "pyproject.toml").write_text('[tool.mypy]\nfiles = ["*.py"]\n')
    (tmp_path / "test_it.py").write_text(f"{line}\n\n\ndef test():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.checks", "-p", "no:nbval", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(CHECKOUT)}, capture_output=True, text=True)
    assert run.returncode == bool(failing), run.stdout + run.stderr
    assert [name for name in ("ruff", "mypy") if f"{name}: failed" in run.stdout] == [failing] * bool(failing)
    assert "1 passed" in run.stdout.splitlines()[-1]
