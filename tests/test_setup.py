"""common/setup.sh: finds or makes the Python that everything runs with.

Each test sets up a small clone of its own. A stand-in for pip keeps that fast, and does what the test tells it to;
`test_real_pip` uses the real one.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import packaging
import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[1]

# All that setup.sh may call besides Python: part of Debian's base
TOOLS = ["bash", "cat", "dirname", "find", "grep", "head", "ls", "mv", "rmdir", "sed", "tail", "tee"]

# As `python3` on PATH: pretends to be $PRETEND_VERSION ("3, 8"), or to lack what $PRETEND_WITHOUT names, and makes
# environments whose pip is the stand-in below.
PYTHON_STUB = """#!{bash}
set -u
if [[ $1 == -I && $2 == -c && -n ${{PRETEND_VERSION:-}} ]]; then
    exec {python} -I -c "import sys; sys.version_info = ($PRETEND_VERSION, 0, 'final', 0)
$3"
elif [[ $1 == -I && $2 == -c && -n ${{PRETEND_WITHOUT:-}} ]]; then
    exec {python} -I -c "import sys; sys.modules['$PRETEND_WITHOUT'] = None
$3"
elif [[ $* == *"-m venv"* ]]; then
    echo venv >>{notes}/calls
    {python} -I -m venv --without-pip "${{@: -1}}" || exit 1
    cd "${{@: -1}}"/lib/python3.*/site-packages && mkdir pip || exit 1
    cp {notes}/pip.py pip/__main__.py
    exit
fi
exec {python} "$@"
"""

PIP_STUB = """
import os, pathlib, sys, sysconfig
notes = pathlib.Path({notes!r})
if "install" in sys.argv:
    with open(notes / "calls", "a") as calls:
        calls.write("pip\\n")
    site = pathlib.Path(sysconfig.get_path("purelib"))

    def install(name, version):
        info = site / f"{{name}}-{{version}}.dist-info"
        for old in site.glob(f"{{name}}-*.dist-info"):
            old.rename(info)
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {{name}}\\nVersion: {{version}}\\n")

    try:
        exec((notes / "before").read_text())
    except KeyboardInterrupt:  # as pip does
        print("ERROR: Operation cancelled by user")
        sys.exit(1)
    for line in open("requirements.txt").read().split("\\n"):
        name, _, version = line.partition(">=")
        if line == "-e .":
            (site / "common.pth").write_text(os.getcwd())
        elif line:
            install(name, version)
    if not (site / "packaging").exists():
        (site / "packaging").symlink_to({packaging!r})
"""

RUN = """#!/usr/bin/env bash
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/../common/setup.sh"
exec "$PYTHON" "$here/hogwild.py" "$@"
"""
SCRIPT = "import common, os, sys; print(sys.prefix, os.path.dirname(common.__file__), *sys.argv[1:], sep='\\n')\n"


class Clone:
    """A clone that holds nothing but what setting up needs, and a machine with one Python to set it up on."""

    def __init__(self, folder: Path, name: str = "a clone"):
        self.root = folder / name
        self.venv = self.root / ".venv"
        self.notes = folder / f"notes-{name.replace(' ', '-')}"
        self.bin = folder / f"bin-{name.replace(' ', '-')}"
        for each in self.root / "common", self.root / "HogWild", self.notes, self.bin:
            each.mkdir(parents=True)
        shutil.copy(CHECKOUT / "common" / "setup.sh", self.root / "common")
        (self.root / "common" / "__init__.py").touch()
        (self.root / "HogWild" / "run.sh").write_text(RUN)
        (self.root / "HogWild" / "hogwild.py").write_text(SCRIPT)
        self.requirements = self.root / "requirements.txt"
        self.requirements.write_text("tiny>=1\n-e .\n")
        (self.root / "pyproject.toml").write_text("[project]\n")
        for tool in [*TOOLS, "mkdir", "cp"]:  # the last two are the stub's
            path = shutil.which(tool)
            assert path, tool
            (self.bin / tool).symlink_to(path)
        self.before_pip("")
        (self.notes / "calls").touch()
        (self.notes / "pip.py").write_text(
            PIP_STUB.format(notes=str(self.notes), packaging=str(Path(packaging.__file__).parent))
        )
        self.python("python3")
        self.env = {"PATH": str(self.bin), "HOME": str(folder)}

    def python(self, name: str, stub: str = PYTHON_STUB) -> None:
        (self.bin / name).write_text(stub.format(bash=self.bin / "bash", python=sys.executable, notes=self.notes))
        (self.bin / name).chmod(0o755)

    def before_pip(self, code: str) -> None:
        (self.notes / "before").write_text(code)

    def pip_waits(self) -> Path:
        """Makes pip, once it has begun to install, wait until something is written to the pipe that is returned."""
        pipe = self.notes / "pipe"
        os.mkfifo(pipe)
        self.before_pip(
            f"print('Installing collected packages: tiny', flush=True); install('tiny', '1')\nopen({str(pipe)!r}).read()"
        )
        return pipe

    def calls(self) -> list[str]:
        """The programs that were called since the last time: "venv", "pip"."""
        calls = (self.notes / "calls").read_text().split()
        (self.notes / "calls").write_text("")
        return calls

    def start(self, *args: str, **env: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", str(self.root / "HogWild" / "run.sh"), *args],
            env={**self.env, **env},
            cwd="/",
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *args: str, **env: str) -> tuple[int, list[str], list[str]]:
        """The exit status of HogWild/run.sh and its lines on stdout and stderr."""
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=300)
        return process.returncode, out.splitlines(), err.splitlines()

    def runs(self, *args: str, **env: str) -> list[str]:
        """Runs it, which must succeed with this clone's .venv and `common`; returns its lines on stderr."""
        status, out, err = self.run(*args, **env)
        assert (status, out) == (0, [str(self.venv), str(self.root / "common"), *args]), err
        return err

    def fails(self, **env: str) -> str:
        """Runs it, which must fail; returns the line that says why."""
        status, out, err = self.run(**env)
        assert (status, out) == (1, [])
        errors = [line for line in err if line.startswith("cannot set up: ")]
        assert len(errors) == 1 and errors == err[-1:], err
        assert len(err) <= 2, err  # before it, at most what was being done
        return errors[0]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_first_run_sets_up_and_goes_on_to_train(clone: Clone) -> None:
    assert clone.runs("--steps=3", "two words") == ["setting up .venv (once; takes a minute or two)"]
    assert clone.calls() == ["venv", "pip"]


def test_another_system_is_refused(clone: Clone) -> None:
    for system in ("darwin23", "msys"):
        assert f"this is {system}, which lacks what the tasks take from Linux" in clone.fails(OSTYPE=system)
    assert clone.calls() == []


def test_another_system_is_refused_without_setup_sh() -> None:
    """By a script that is started by hand, in the same words."""
    program = "import sys; sys.platform, sys.argv = 'darwin', ['hogwild.py']; import common"
    ended = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "hogwild.py: this is darwin, which lacks what the tasks take from Linux (prctl, /proc, namespaces); run it under WSL2 "
        'or in a container, see README.md, "Where it runs"\n'
    )


def test_second_run_only_compares(clone: Clone) -> None:
    clone.runs()
    clone.calls()
    assert clone.runs() == []
    assert clone.calls() == []
    command = ["bash", "-c", f"source '{clone.root}/common/setup.sh'"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=clone.env, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor's time, as the machine may be busy with something else.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.2


def test_two_first_runs_at_once(clone: Clone) -> None:
    pipe = clone.pip_waits()
    first = clone.start()
    with open(pipe, "w"):  # opens when pip of the first run does
        second = clone.start()
        assert second.stderr
        assert second.stderr.readline() == "another run is setting up .venv; waiting for it\n"
    for process in first, second:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        assert out.split("\n")[0] == str(clone.venv)
    assert clone.calls() == ["venv", "pip"]


def test_changed_requirements_are_installed(clone: Clone) -> None:
    clone.runs()
    clone.calls()
    (clone.venv / "mine").touch()
    clone.requirements.write_text("tiny>=2\nother>=1\n-e .\n")
    assert clone.runs() == ["updating .venv, which has tiny 1, not >=2"]
    assert clone.calls() == ["pip"]
    assert (clone.venv / "mine").exists()
    assert clone.runs() == []


def test_changed_settings_install_nothing(clone: Clone) -> None:
    clone.runs()
    clone.calls()
    with open(clone.root / "pyproject.toml", "a") as file:
        file.write("[tool.ruff]\n")
    assert clone.runs() == []
    assert clone.calls() == []


@pytest.mark.parametrize(
    "env, why",
    [
        ({"PRETEND_VERSION": "3, 9"}, "Python 3.9 is too old; install Python 3.10 to 3.13"),
        ({"PRETEND_VERSION": "3, 14"}, "Python 3.14 is too new for TensorFlow; install Python 3.10 to 3.13"),
        ({"PRETEND_WITHOUT": "ensurepip"}, "apt-get install python3-venv"),
        ({"PRETEND_WITHOUT": "venv"}, "apt-get install python3-venv"),
    ],
)
def test_unsuitable_python(clone: Clone, env: dict[str, str], why: str) -> None:
    assert why in clone.fails(**env)
    assert not clone.venv.exists()
    clone.runs()  # as soon as the machine has what was missing


def test_no_python(clone: Clone) -> None:
    (clone.bin / "python3").unlink()
    assert "no Python found; install Python 3.10 to 3.13" in clone.fails()
    assert not clone.venv.exists()


def test_another_python_on_path(clone: Clone) -> None:
    """An old python3, and pyenv's shims for versions that are not selected, don't hide a good one."""
    clone.python("python3", "#!{bash}\necho 'old 3.8'\n")
    clone.python("python3.13", "#!{bash}\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    clone.python("python3.12")
    clone.runs()


@pytest.mark.parametrize(
    "output, why",
    [
        ("OSError: [Errno 28] No space left on device", "no space left"),
        ("PermissionError: [Errno 13] Permission denied: 'x'", "no permission"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...: Temporary failure "
            "in name resolution')': /simple/tiny/\nERROR: No matching distribution found for tiny",
            "no network",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement tiny>=1 (from versions: none)\n"
            "ERROR: No matching distribution found for tiny>=1",
            "found no tiny>=1: connect to the network; if it is up, this package has no build for your machine",
        ),
        ("ERROR: No matching distribution found for tiny>=1", "No matching distribution found for tiny>=1"),
    ],
)
def test_pip_fails(clone: Clone, output: str, why: str) -> None:
    clone.before_pip(f"install('tiny', '1'); print({output!r}); sys.exit(1)")
    error = clone.fails()
    assert why in error
    assert str(clone.root / ".venv-setup.log") in error
    assert output in (clone.root / ".venv-setup.log").read_text()
    assert not clone.venv.exists()
    clone.before_pip("")
    clone.runs()


def test_failed_update_leaves_a_working_environment(clone: Clone) -> None:
    clone.runs()
    before = clone.requirements.read_text()
    clone.requirements.write_text("tiny>=2\n-e .\n")
    clone.before_pip("print('Could not resolve host'); sys.exit(1)")
    assert "no network" in clone.fails()
    clone.requirements.write_text(before)
    assert clone.runs() == []


def test_update_that_fails_halfway_is_made_anew(clone: Clone) -> None:
    clone.runs()
    clone.requirements.write_text("tiny>=2\n-e .\n")
    clone.before_pip("print('Installing collected packages: tiny\\nNo space left'); install('tiny', '2'); sys.exit(1)")
    assert "no space left" in clone.fails()
    clone.before_pip("")
    clone.calls()
    clone.runs()
    assert clone.calls() == ["venv", "pip"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted(clone: Clone, how: signal.Signals) -> None:
    pipe = clone.pip_waits()
    process = clone.start()
    with open(pipe, "w"):
        os.killpg(process.pid, how)
        _, err = process.communicate(timeout=300)
    if how == signal.SIGINT:
        assert process.returncode in (130, -signal.SIGINT)  # which a shell reports as 130
        assert err.splitlines()[1:] == ["stopped; the next run sets up again"]
    else:
        assert process.returncode != 0
    clone.calls()
    clone.before_pip("")
    assert clone.runs() == ["setting up .venv (once; takes a minute or two)"]
    assert clone.calls() == ["venv", "pip"]
    assert clone.runs() == []


def test_active_environment_is_used(clone: Clone, tmp_path: Path) -> None:
    clone.runs()
    active = tmp_path / "active"
    shutil.move(clone.venv, active)
    for env in {"VIRTUAL_ENV": str(active)}, {"CONDA_PREFIX": str(active)}:
        status, out, err = clone.run(**env)
        assert (status, err) == (0, [])
        assert out == [str(active), str(clone.root / "common")]
    assert not clone.venv.exists()


def test_active_environment_that_lacks_something(clone: Clone, tmp_path: Path) -> None:
    clone.runs()
    active = tmp_path / "active"
    shutil.copytree(clone.venv, active, symlinks=True)
    clone.requirements.write_text("tiny>=1\nother>=1\n-e .\n")
    clone.runs()
    said = [f"the active environment {active} lacks other>=1; using .venv"]
    assert clone.runs(VIRTUAL_ENV=str(active)) == said
    assert clone.runs(CONDA_PREFIX=str(active), CONDA_DEFAULT_ENV="mine") == said
    assert clone.runs(CONDA_PREFIX=str(active), CONDA_DEFAULT_ENV="base") == []
    assert clone.runs(VIRTUAL_ENV=str(tmp_path / "gone")) == [
        f"the active environment {tmp_path / 'gone'} has no Python; using .venv"
    ]
    assert clone.runs(VIRTUAL_ENV=str(clone.venv)) == []


def test_active_environment_of_another_clone(clone: Clone, tmp_path: Path) -> None:
    other = Clone(tmp_path, "other")
    other.runs()
    clone.runs()
    assert clone.runs(VIRTUAL_ENV=str(other.venv)) == [
        f"the active environment {other.venv} has the `common` of another folder, {other.root / 'common'}; using .venv"
    ]


def test_pythonpath_to_another_clone(clone: Clone, tmp_path: Path) -> None:
    (tmp_path / "other" / "common").mkdir(parents=True)
    (tmp_path / "other" / "common" / "__init__.py").touch()
    clone.runs(PYTHONPATH=str(tmp_path / "other"))
    assert clone.runs(PYTHONPATH=str(tmp_path / "other")) == []


def test_environment_that_the_user_made(clone: Clone) -> None:
    """It is completed, and never deleted, not even after a crash."""
    subprocess.run([clone.bin / "python3", "-I", "-m", "venv", clone.venv], env=clone.env, check=True)
    (clone.venv / "mine").touch()
    clone.calls()
    pipe = clone.pip_waits()
    process = clone.start()
    with open(pipe, "w"):
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=300)
    clone.before_pip("assert '--force-reinstall' in sys.argv")
    assert clone.runs()[0].startswith("updating .venv, which ")
    assert clone.calls() == ["pip", "pip"]
    assert (clone.venv / "mine").exists()
    assert clone.runs() == []


def test_folder_that_is_no_environment(clone: Clone) -> None:
    clone.venv.mkdir()
    (clone.venv / "mine").touch()
    assert "remove it and try again" in clone.fails()
    assert (clone.venv / "mine").exists()


def contents(folder: Path) -> dict[Path, float]:
    return {path: path.lstat().st_mtime for path in folder.rglob("*")}


@pytest.mark.parametrize("is_finished", [True, False])
def test_link_to_the_environment_of_another_clone(clone: Clone, tmp_path: Path, is_finished: bool) -> None:
    """It is refused and stays as it is, whether or not the other clone has finished it."""
    other = Clone(tmp_path, "other")
    other.runs()
    if not is_finished:
        (other.venv / "setup-stamp").unlink()
    clone.venv.symlink_to(other.venv)
    before = contents(tmp_path)
    for _ in range(2):
        assert clone.fails() == (
            f"cannot set up: {clone.venv} is a link to the environment of {other.root}; remove the link, and the next run "
            "makes one here"
        )
    assert contents(tmp_path) == before
    clone.venv.unlink()
    clone.runs()


def test_link_that_two_clones_share(clone: Clone, tmp_path: Path) -> None:
    """The one that has made the environment elsewhere goes on with it, also after it was moved."""
    elsewhere = tmp_path / "disk" / "environment"
    elsewhere.mkdir(parents=True)
    clone.venv.symlink_to(elsewhere)
    other = Clone(tmp_path, "other")
    other.venv.symlink_to(elsewhere)
    clone.runs()
    before = contents(elsewhere)
    assert f"is a link to the environment of {clone.root}; " in other.fails()
    assert clone.runs() == []
    assert contents(elsewhere) == before
    clone.root = clone.root.rename(tmp_path / "moved")
    clone.venv = clone.root / ".venv"
    assert clone.runs() == ["setting up .venv (once; takes a minute or two)"]


def test_link_to_nothing(clone: Clone, tmp_path: Path) -> None:
    clone.venv.symlink_to(tmp_path / "gone")
    assert "is a link to a folder that is not there" in clone.fails()
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_link_to_an_empty_folder(clone: Clone, tmp_path: Path, how: signal.Signals) -> None:
    """Another disk, say: it is filled, also after a first run that was killed, and the link stays."""
    (tmp_path / "disk").mkdir()
    clone.venv.symlink_to(tmp_path / "disk")
    pipe = clone.pip_waits()
    process = clone.start()
    with open(pipe, "w"):
        os.killpg(process.pid, how)
        process.communicate(timeout=300)
    clone.before_pip("")
    assert clone.runs() == ["setting up .venv (once; takes a minute or two)"]
    assert clone.runs() == []
    assert clone.venv.is_symlink() and (tmp_path / "disk" / "bin" / "python").exists()


@pytest.mark.parametrize("what", ["moved", "lost Python"])
def test_environment_that_no_longer_works(clone: Clone, tmp_path: Path, what: str) -> None:
    clone.runs()
    if what == "moved":
        clone.root = clone.root.rename(tmp_path / "moved")
        clone.venv = clone.root / ".venv"
    else:
        for python in (clone.venv / "bin").glob("python*"):
            python.unlink()
            python.symlink_to(tmp_path / "gone")
    clone.calls()
    assert clone.runs() == ["setting up .venv (once; takes a minute or two)"]
    assert clone.calls() == ["venv", "pip"]


BACKEND = """
import os, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "clone-1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        info = "clone-1.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: clone\\nVersion: 1\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("clone.pth", os.getcwd())
        wheel.writestr(info + "RECORD", "")
    return name
"""


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_real_pip(clone: Clone, tmp_path: Path) -> None:
    """Without a network, then with pip's settings pointing to wheels on this machine."""
    clone.python("python3", '#!{bash}\nexec {python} "$@"\n')
    (clone.root / "backend.py").write_text(BACKEND)
    (clone.root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "clone"\nversion = "1"\n'
    )
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1", "PIP_NO_CACHE_DIR": "1"}
    assert "no network" in clone.fails(PIP_INDEX_URL="http://127.0.0.1:9/simple", **settings)
    assert not clone.venv.exists()

    wheels = tmp_path / "wheels"
    wheels.mkdir()
    modules = Path(packaging.__file__).parent.glob("*.py")
    write_wheel(wheels, "packaging", packaging.__version__, {f"packaging/{f.name}": f.read_text() for f in modules})
    write_wheel(wheels, "tiny", "1", {"tiny.py": ""})
    clone.requirements.write_text("tiny>=1\npackaging>=1 # with a comment\n-e .\n")
    # PIP_USER: a user may have set it for the system's Python, and pip refuses it in an environment
    settings |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_USER": "1"}
    assert clone.runs(**settings) == ["setting up .venv (once; takes a minute or two)"]
    assert clone.runs() == []


@pytest.mark.parametrize("failing", ["", "ruff", "mypy", "pytest"])
def test_run_sh_of_the_tests(clone: Clone, failing: str) -> None:
    """Runs all three, pytest last, and fails if any does."""
    clone.runs()
    (clone.root / "tests").mkdir()
    shutil.copy(CHECKOUT / "tests" / "run.sh", clone.root / "tests")
    for notebook in "HogWild/HogWild.ipynb", "HogWild/.ipynb_checkpoints/HogWild-checkpoint.ipynb":
        (clone.root / notebook).parent.mkdir(exist_ok=True)
        (clone.root / notebook).touch()
    (site,) = clone.venv.glob("lib/python3.*/site-packages")
    for tool in "ruff", "mypy", "pytest":
        (site / f"{tool}.py").write_text(f"import sys; print('{tool}', *sys.argv[1:]); sys.exit({tool == failing:d})")

    def run(*args: str) -> tuple[int, list[str]]:
        result = subprocess.run(
            ["bash", clone.root / "tests" / "run.sh", *args], env=clone.env, cwd="/", text=True, stdout=subprocess.PIPE
        )
        lines = result.stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["ruff", "mypy", "pytest"]
        return result.returncode, lines[-1].split()

    status, pytest_call = run("-k", "setup")
    assert status == bool(failing)
    assert pytest_call[-5:] == ["--ignore=tests/test_slurm.py", "tests", "HogWild/HogWild.ipynb", "-k", "setup"]
    status, pytest_call = run("HogWild/HogWild.ipynb::Cell")
    assert "tests" not in pytest_call and pytest_call[-1] == "HogWild/HogWild.ipynb::Cell"
