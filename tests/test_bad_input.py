"""Bad input, from the command line to the exit: one clear line on standard error, exit status 2, nothing started.

Which line, say the tables in the README of this folder. Each of their rows is a test. Most call the program's main function
in this process; `END_TO_END` are the commands that a shell runs.
"""

import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import common.cli.program  # noqa: F401, for `in_process`
from common.core import flags, limits, signals
from common.launch import warm

CHECKOUT = Path(__file__).resolve().parents[1]
SECTION = (CHECKOUT / "tests" / "README.md").read_text().split("\n## Bad input\n")[1].split("\n## ")[0]

# What says that a process is a task of a cluster
CLUSTER_VARIABLES = {"TF_CONFIG", "JOB_NAME", "TASK_INDEX", "PS_HOSTS", "WORKER_HOSTS", "MASTER_HOST"}
HIDDEN = CLUSTER_VARIABLES | {"TF_CPP_MIN_LOG_LEVEL"}  # a user has not set it; conftest.py has

# Rows of each kind of script, and one of a process that checks data and model and dies
END_TO_END = {
    "bash HogWild/run.sh --windw=3",
    "bash Synchronous-SGD/run.sh --by=magic",
    ".venv/bin/python -m common.run",
    "bash common/join.sh runs/none 3",
    "bash Distributed-Session/run.sh --num_workers=0",
    "SSH=true bash Multiple-Machines/start.sh hosts HogWild",
    "bash Multiple-Machines/kubernetes/manifest.sh HogWild --image=a/b --num_workers=1000000000",
    "CUDA_VISIBLE_DEVICES=-1 bash HogWild/run.sh --gpus=0",
    "TF_CONFIG=$(printf '[%.0s' {1..100000}) bash HogWild/run.sh",
    "ulimit -Sn 1024; bash HogWild/run.sh --num_ps=500000",
    "ulimit -Sn 1024; .venv/bin/python -m common.run --num_ps=500000 m.py",
    "bash HogWild/run.sh --data=d.py:segfaults",
}

# Rows whose check of data and model needs a process: they would end or stop this one.
IN_A_TASK = {
    "bash HogWild/run.sh --model=m.py:softmax",
    *(f"bash HogWild/run.sh --data=d.py:{how}" for how in ("aborts", "interrupts", "exits", "takes_all_memory")),
    "bash HogWild/run.sh --hang_secs=8 --data=d.py:sleeps",
}


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


class Program(NamedTuple):
    """A Python program that a command runs."""

    path: str
    arguments: list
    environ: dict


# All that a run.sh does which only starts a Python program
ONLY_STARTS = re.compile(
    r"""here=\$\(cd "\$\(dirname "\$\{BASH_SOURCE\[0\]\}"\)" && pwd\)
source "\$here/(?:\.\./)*(?:common/)?setup\.sh"
exec "\$PYTHON" (.*) "\$@"(.*)
"""
)


def program_of(command):
    """The `Program` that a command of the README starts, or None if a shell has more to do than that."""
    if re.search(r"[$;]", command):
        return None
    words = shlex.split(command)
    environ = {}
    while found := re.match(r"(\w+)=", words[0]):
        environ[found[1]] = words.pop(0)[found.end() :]
    if words[0] == "bash":
        script = CHECKOUT / words[1]
        only = ONLY_STARTS.fullmatch(re.sub(r"^#.*\n", "", script.read_text(), flags=re.M))
        if only is None:
            return None
        before, after = (shlex.split(text.replace("$here", str(script.parent))) for text in only.groups())
        words = ["", *before, *words[2:], *after]
    _, path, *arguments = words
    if path == "-m":
        path = arguments.pop(0).replace(".", "/") + ".py"
    return Program(str(CHECKOUT / path), arguments, environ)


PROGRAMS = {command: program for command, _ in ROWS if command not in END_TO_END and (program := program_of(command))}


def write_files(folder):
    """Writes the README's files."""
    for text in fenced("python"):
        (folder / file_name(text)).write_text(text)
    for text in fenced("bash"):
        subprocess.run(["bash", "-c", text], cwd=folder, check=True)


def file_name(text):
    """The name in the first line of a file."""
    return text.splitlines()[0].removeprefix("# ")


class Ended(NamedTuple):
    """How a command ended."""

    status: int | str | None
    out: str
    err: str
    files: set  # what it left in its folder


def run(command, folder):
    """Runs a command of the README in `folder`, where it finds the README's files, and asserts that no process is left.

    The command is written for the root of the checkout. Here its scripts are looked up there, but all else in `folder`.
    """
    write_files(folder)
    before = files_in(folder)
    script = r"(?<= )([A-Z][\w-]*|common)/(\w+/)?\w+\.(sh|py)\b"
    command = re.sub(script, lambda found: shlex.quote(f"{CHECKOUT / found[0]}"), command)
    command = command.replace(".venv/bin/python", shlex.quote(sys.executable))
    environ = {name: value for name, value in os.environ.items() if name not in HIDDEN}
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
def folder(tmp_path_factory):
    """A folder with the README's files, for all commands that run in this process: each has to leave it as it was."""
    folder = tmp_path_factory.mktemp("bad_input")
    write_files(folder)
    return folder


class LooksAtInput(Exception):
    """The launcher would start the process that looks at data and model."""


def serve_nobody(self, request, descriptors):
    """In place of `warm.WarmProcess.serve`. The process of the check has no log."""
    if request["log"]:
        pytest.fail(f"it starts tasks, with the log {request['log']}")
    raise LooksAtInput


@pytest.fixture
def in_process(folder, monkeypatch, capfd):
    """A function that runs a `Program` in this process and returns how it ended. It starts no process: it does the check of
    data and model itself, with `--check`. If `in_a_task`, the warm process forks that check, as for users."""

    def run(program):
        monkeypatch.setattr(sys, "argv", [program.path, *program.arguments])
        monkeypatch.setattr(sys, "path", [*sys.path, str(Path(program.path).parent)])
        try:
            runpy.run_path(program.path, run_name="__main__")
        except flags.UserError:
            sys.excepthook(*sys.exc_info())  # as Python does

    def in_process(program, in_a_task=False):
        if not in_a_task:
            monkeypatch.setattr(warm.WarmProcess, "serve", serve_nobody)
        for name in CLUSTER_VARIABLES if in_a_task else HIDDEN:  # the warm process serves those with its environment
            monkeypatch.delenv(name, raising=False)
        for name, value in program.environ.items():
            monkeypatch.setenv(name, value)
        before = files_in(folder)
        with pytest.raises(SystemExit) as ended:
            try:
                run(program)
            except LooksAtInput:
                run(program._replace(arguments=[*program.arguments, "--check"]))
        printed = capfd.readouterr()
        return Ended(ended.value.code, printed.out, printed.err, files_in(folder) - before)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: pytest.fail(f"it starts {command}"))
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it forks"))
    monkeypatch.setattr(sys.modules["common.cli.program"], "_log_to", lambda path: pytest.fail("it trains"))
    handlers = {number: signal.getsignal(number) for number in signals.INTERRUPTING_SIGNALS}
    capfd.readouterr()
    yield in_process
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for text in fenced("python"):
        sys.modules.pop(Path(file_name(text)).stem, None)


@pytest.fixture
def ended(command, tmp_path):
    """How the command of this test ended."""
    return run(command, tmp_path)


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


def test_rows_of_each_kind_are_run_by_a_shell():
    assert END_TO_END | PROGRAMS.keys() == dict(ROWS).keys() and IN_A_TASK <= PROGRAMS.keys()


def of_rows(commands):
    """Parametrizes a test by the rows of these commands."""
    chosen = [row for row in ROWS if row[0] in commands]
    return pytest.mark.parametrize("command, line", chosen, ids=[command for command, _ in chosen])


@of_rows(PROGRAMS.keys() - IN_A_TASK)
def test_row_of_the_tables(in_process, command, line):
    refuses(in_process(PROGRAMS[command]), line)


@pytest.mark.cluster
@of_rows(IN_A_TASK)
def test_row_whose_check_is_a_task(in_process, command, line):
    refuses(in_process(PROGRAMS[command], in_a_task=True), line)


@pytest.mark.slow
@of_rows(END_TO_END)
def test_row_that_a_shell_runs(ended, line):
    refuses(ended, line)


# These lines say how much memory there is.
HAS = limits.as_bytes(limits.memory())
TOO_LARGE = {
    "bash HogWild/run.sh --batch_size=9223372036854775807": "--batch_size=9223372036854775807 in 2 workers takes at least "
    f"5,091,301.4 PB of memory, but the machine has {HAS}: choose a smaller one",
    "bash AGN/run.sh --batch_size=10000000000 --window=2147483647": "--batch_size=10000000000 with a window of 2,147,483,647 "
    f"steps in 2 workers takes at least 687,194.8 PB of memory, but the machine has {HAS}: choose a smaller one",
    "bash HogWild/run.sh --data=d.py:far_label": "the labels are classes 0 to 1000000000, and --model=mlp would have "
    f"129,000,017,025 parameters, which take at least 2.1 TB of memory, but the machine has {HAS}; number them without gaps, "
    "as np.unique(y, return_inverse=True) does",
}


@pytest.mark.parametrize("command, line", TOO_LARGE.items(), ids=TOO_LARGE)
def test_what_memory_cannot_hold(in_process, line, command):
    program = program_of(command)
    refuses(in_process(program), f"{Path(program.path).name}: {line}")


@pytest.mark.parametrize("name", ["LAUNCHER_DATA", "LAUNCHER_FOUND", "LAUNCHER_LOG"])
def test_a_variable_that_only_a_launcher_gives(in_process, name):
    """With LAUNCHER_DATA=0 a program would unpickle its standard input."""
    line = f"hogwild.py: {name}=0 in the environment, but no launcher has started this process: unset it"
    refuses(in_process(Program(str(CHECKOUT / "HogWild" / "hogwild.py"), [], {name: "0"})), line)


@pytest.mark.parametrize("more", [{"LAUNCHER_KEY": "ps 0"}, {"LAUNCHER_WORDS": "1"}, {"LAUNCHER_DATA": "0"}])
def test_a_parent_that_is_no_launcher(in_process, more):
    """It may give its number, as a notebook does whose task is to end with it; but only a launcher gives the rest."""
    environ = {"LAUNCHER_PID": str(os.getppid()), **more}
    given = ", ".join(f"{name}={value}" for name, value in environ.items())
    line = f"hogwild.py: {given} in the environment, but no launcher has started this process: unset it"
    refuses(in_process(Program(str(CHECKOUT / "HogWild" / "hogwild.py"), [], environ)), line)


def test_name_that_is_too_long(in_process):
    name = "x" * 300
    program = program_of(f"bash HogWild/run.sh --run_dir={name}")
    refuses(in_process(program), f"hogwild.py: --run_dir={name} cannot be written: File name too long")


@pytest.mark.slow
@pytest.mark.parametrize("command", [".venv/bin/python HogWild/hogwild.py --run_dir=run --data=d.py:with_nan"])
def test_process_on_its_own_looks_at_its_data(ended):
    """When the folder of the run is there already: its log needs a place."""
    files = {path for path in ended.files if not path.startswith("run")}
    refuses(ended._replace(files=files), "hogwild.py: --data=d.py:with_nan: x_train holds 40 values that are NaN or infinite")


CONFIG = '{"cluster": {"ps": ["localhost:2220"], "worker": ["localhost:2221"]}, "task": {"type": "worker", "index": 0}}'
FLAGS = "--check --model=m.py:build --data=d.py:two_samples --delays=50 --run_dir=runs/new"


@pytest.mark.slow
@pytest.mark.parametrize("command", [f"TF_CONFIG='{CONFIG}' bash HogWild/run.sh {FLAGS}"], ids=["run.sh"])
def test_no_mistake(ended):
    """The tests above then see only the mistake. (TensorFlow may complain that there is no GPU.)"""
    assert (ended.status, ended.out, ended.files) == (0, "", set())
    assert ".py: " not in ended.err
