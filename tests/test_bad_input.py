"""Bad input, from the command line to the exit: one clear line on standard error, exit status 2, nothing started.

Which line, say the tables in the README of this folder. Each of their rows is a test.
"""

import concurrent.futures
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from common import limits

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[1]
SECTION = (CHECKOUT / "tests" / "README.md").read_text().split("\n## Bad input\n")[1].split("\n## ")[0]

# What says that a process is a task of a cluster
CLUSTER_VARIABLES = {"TF_CONFIG", "JOB_NAME", "TASK_INDEX", "PS_HOSTS", "WORKER_HOSTS", "MASTER_HOST"}


def rows():
    """The command and the line that it prints, of each row of the tables."""
    for row in re.findall(r"^\|(.*)\|$", SECTION, re.M):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
        if cells[0] != "what is wrong" and set(cells[0]) != {"-"}:
            yield tuple(code(cell) for cell in cells[1:])


def code(cell):
    """The text of a cell that is a code span, of which Markdown takes off the backticks, and the backslash before a bar."""
    return re.sub(r"^(`+) ?(.*?) ?\1$", r"\2", cell).replace(r"\|", "|")


ROWS = list(rows())


def fenced(language):
    """The blocks of code in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTION, re.M | re.S)


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str
    files: set  # what it left in its folder


def run(command, folder):
    """Runs a command of the README in `folder`, where it finds the README's files, and asserts that no process is left.

    The command is written for the root of the checkout. Here its scripts are looked up there, but all else in `folder`.
    """
    for text in fenced("python"):
        name = text.splitlines()[0].removeprefix("# ")
        (folder / name).write_text(text)
    for text in fenced("bash"):
        subprocess.run(["bash", "-c", text], cwd=folder, check=True)
    before = files_in(folder)
    script = r"(?<= )([A-Z][\w-]*|common)/(\w+/)?\w+\.(sh|py)\b"
    command = re.sub(script, lambda found: shlex.quote(f"{CHECKOUT / found[0]}"), command)
    command = command.replace(".venv/bin/python", shlex.quote(sys.executable))
    hidden = CLUSTER_VARIABLES | {"TF_CPP_MIN_LOG_LEVEL"}  # a user has not set it; conftest.py has
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    if sys.prefix != sys.base_prefix:
        environ["VIRTUAL_ENV"] = sys.prefix  # the environment of this test, for run.sh
    ended = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    left = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if works_in(pid, folder)]
    assert left == []
    return Ended(ended.returncode, ended.stdout, ended.stderr, files_in(folder) - before)


def files_in(folder):
    """Paths of all files and folders in it, without what Python compiled."""
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {path for path in paths if "__pycache__" not in path}


def works_in(pid, folder):
    """Whether process `pid` was started in `folder`; as its tasks are, too."""
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")) == folder
    except OSError:  # it has ended, or is not ours
        return False


@pytest.fixture(scope="module")
def endings(request, tmp_path_factory):
    """How each command of the chosen tests ends. Two run at a time: those that import tensorflow take seconds of one core."""
    tests = [item for item in request.session.items if item.path == request.path and "ended" in item.fixturenames]
    commands = dict.fromkeys(test.callspec.params["command"] for test in tests)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {command: pool.submit(run, command, tmp_path_factory.mktemp("bad_input")) for command in commands}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def ended(endings, command):
    """How the command of this test ended."""
    return endings[command].result()


def refuses(ended, line):
    """Asserts that a command ended as bad input should. It may say that looking at data and model takes longer than 5 s."""
    assert ended.err == line + "\n", f"it printed\n{ended.err}"
    out = [line for line in ended.out.splitlines() if not line.startswith("checking the data and the model before ")]
    assert (ended.status, out, ended.files) == (2, [], set())


def test_the_tables_are_found():
    """Otherwise there would be no tests of them, and none that fails."""
    assert len(ROWS) >= 60
    assert len(dict(ROWS)) == len(ROWS)  # each command is there once


def test_cells_of_a_table():
    assert code("`a b`") == "a b"
    assert code("`` a `b` ``") == "a `b`"
    assert code(r"`<a\|b>`") == "<a|b>"


@pytest.mark.parametrize("command, line", ROWS, ids=[command for command, _ in ROWS])
def test_row_of_the_tables(ended, line):
    refuses(ended, line)


# These lines say how much memory there is.
HAS = limits.as_bytes(limits.memory())
TOO_LARGE = {
    "bash HogWild/run.sh --batch_size=9223372036854775807": "--batch_size=9223372036854775807 in 2 workers takes at least "
    f"5,091,301.4 PB of memory, but there are {HAS}: choose less",
    "bash AGN/run.sh --batch_size=10000000000 --window=2147483647": "--batch_size=10000000000 with a window of 2,147,483,647 "
    f"steps in 2 workers takes at least 687,194.8 PB of memory, but there are {HAS}: choose less",
    "bash HogWild/run.sh --data=d.py:far_label": "the labels are classes 0 to 1000000000, and --model=mlp would have "
    f"129,000,017,025 parameters, which take at least 2.1 TB of memory, but there are {HAS}; number them without gaps, as "
    "np.unique(y, return_inverse=True) does",
}


@pytest.mark.parametrize("command, line", TOO_LARGE.items(), ids=TOO_LARGE)
def test_what_memory_cannot_hold(ended, line, command):
    program = "agn.py" if "AGN" in command else "hogwild.py"
    refuses(ended, f"{program}: {line}")


@pytest.mark.parametrize("more", [{"LAUNCHER_KEY": "ps 0"}, {"LAUNCHER_WORDS": "1"}])
def test_a_parent_that_is_no_launcher(tmp_path, more):
    """It may give its number, as a notebook does whose task is to end with it; but only a launcher gives the rest."""
    environ = {name: value for name, value in os.environ.items() if name not in CLUSTER_VARIABLES}
    environ |= {"LAUNCHER_PID": str(os.getpid()), **more}
    command = [sys.executable, str(CHECKOUT / "HogWild" / "hogwild.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    given = ", ".join(f"{name}={environ[name]}" for name in ("LAUNCHER_PID", *more))
    assert done.stderr == (f"hogwild.py: {given} in the environment, but no launcher has started this process: unset it\n")


LONG = "x" * 300


@pytest.mark.parametrize("command", [f"bash HogWild/run.sh --run_dir={LONG}"], ids=["name"])
def test_name_that_is_too_long(ended):
    refuses(ended, f"hogwild.py: --run_dir={LONG} cannot be written: File name too long")


@pytest.mark.parametrize("command", [".venv/bin/python HogWild/hogwild.py --run_dir=run --data=d.py:with_nan"])
def test_process_on_its_own_looks_at_its_data(ended):
    """When the folder of the run is there already: its log needs a place."""
    files = {path for path in ended.files if not path.startswith("run")}
    refuses(ended._replace(files=files), "hogwild.py: --data=d.py:with_nan: x_train holds 40 values that are NaN or infinite")


CONFIG = '{"cluster": {"ps": ["localhost:2220"], "worker": ["localhost:2221"]}, "task": {"type": "worker", "index": 0}}'
FLAGS = "--check --model=m.py:build --data=d.py:two_samples --delays=50 --run_dir=runs/new"


@pytest.mark.parametrize("command", [f"TF_CONFIG='{CONFIG}' bash HogWild/run.sh {FLAGS}"], ids=["run.sh"])
def test_no_mistake(ended):
    """The tests above then see only the mistake. (TensorFlow may complain that there is no GPU.)"""
    assert (ended.status, ended.out, ended.files) == (0, "", set())
    assert ".py: " not in ended.err
