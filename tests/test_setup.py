"""common/setup.sh: finds or makes the Python that everything runs with.

Each test sets up a small clone of its own, on a PATH of its own. Stand-ins for venv, pip and uv keep that fast, and do what the
test tells them to; `test_real_pip` uses the real venv and pip.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import packaging
import pytest
import runs

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[1]
PYTHON = Path(sys.executable).resolve()
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
NEW = ["setting up .venv (once; takes a minute or two)"]

# All that setup.sh may call besides Python: part of Debian's base. The last two are for the stand-ins.
TOOLS = "awk bash cat dirname find flock grep ls mkdir realpath sed sleep tail cp ln".split()

# `python3` and `uv` on PATH. Python pretends to be $PRETEND_VERSION ("3, 8"), or to lack $PRETEND_WITHOUT.
STAND_IN = f"""#!/usr/bin/env bash
[[ $0 == */uv ]] && tool="uv " || tool=
case "$tool$*" in
    "uv pip install --python"*) exec "$4" -I -m pip "${{@:5}}" uv ;;
    "uv venv --seed --allow-existing --python >=3.10,<3.14 "* | "-I -m venv"*)
        echo "${{tool}}venv" >>NOTES/calls
        cd "${{@: -1}}" && mkdir -p bin {SITE}/pip && ln -sf {PYTHON} bin/python && cp NOTES/pip.py {SITE}/pip/__main__.py
        printf 'home = {PYTHON.parent}\ninclude-system-site-packages = false\n' >pyvenv.cfg ;;
    "-I -c "*)
        {PYTHON} -I -c "import sys; sys.version_info = (${{PRETEND_VERSION:-3, 12}}); sys.modules['$PRETEND_WITHOUT'] = None
$3" ;;
    *) echo "error: called with $*"; exit 1 ;;
esac
"""

PIP = f"""
import os, pathlib, sys
notes, site = pathlib.Path("NOTES"), pathlib.Path(sys.prefix, "{SITE}")
if "pip>=25" in sys.argv:
    sys.exit()
with open(notes / "calls", "a") as calls:
    calls.write("uv pip\\n" if "uv" in sys.argv else "pip\\n")

def install(name, version):
    info = site / f"{{name}}-{{version}}.dist-info"
    for old in site.glob(f"{{name}}-*.dist-info"):
        old.rename(info)
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {{name}}\\nVersion: {{version}}\\n")

try:
    exec((notes / "before").read_text())
except KeyboardInterrupt:  # as pip does
    sys.exit("ERROR: Operation cancelled by user")
for line in open("requirements.txt").read().split("\\n"):
    name, _, version = line.partition(">=")
    if line == "-e .":
        (site / "common.pth").write_text(os.getcwd())
    elif line:
        install(name, version)
if not (site / "packaging").exists():
    (site / "packaging").symlink_to("{Path(packaging.__file__).parent}")
"""

SCRIPT = "import common, os, sys; print(sys.prefix, os.path.dirname(common.__file__), *sys.argv[1:], sep='\\n')"


class Clone:
    """A clone that holds nothing but what setting up needs, and a machine with one Python to set it up on."""

    def __init__(self, folder, name="a clone"):
        self.root, self.notes, self.bin = folder / name, folder / f"notes-{name[0]}", folder / f"bin-{name[0]}"
        self.venv, self.requirements = self.root / ".venv", self.root / "requirements.txt"
        self.env = {"PATH": str(self.bin), "HOME": str(folder), "PRETEND_WITHOUT": "nothing"}
        for each in self.root / "common", self.notes, self.bin:
            each.mkdir(parents=True)
        for name in "setup.sh", "setup_check.py", "setup_progress.sh":
            shutil.copy(CHECKOUT / "common" / name, self.root / "common")
        (self.root / "common" / "__init__.py").touch()
        (self.root / "pyproject.toml").write_text("[project]\n")
        self.requirements.write_text("tiny>=1\n-e .\n")
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or pytest.fail(tool))
        (self.notes / "pip.py").write_text(PIP.replace("NOTES", str(self.notes)))
        (self.notes / "calls").touch()
        self.before_pip("")
        self.program("python3")

    def program(self, name, text=STAND_IN):
        (self.bin / name).write_text(text.replace("NOTES", str(self.notes)))
        (self.bin / name).chmod(0o755)

    def before_pip(self, code):
        (self.notes / "before").write_text(code)

    def pip_waits(self):
        """Makes pip, once it has begun to install, wait until something is written to the pipe that is returned."""
        pipe = self.notes / "pipe"
        os.mkfifo(pipe)
        self.before_pip(f"install('tiny', '1'); open({str(pipe)!r}).read()")
        return pipe

    def kill(self, how=signal.SIGKILL):
        """Begins to set up, and ends that in the middle of pip; returns the status and the lines on stderr."""
        pipe = self.pip_waits()
        process = self.start()
        with open(pipe, "w"):
            os.killpg(process.pid, how)
            _, err = process.communicate(timeout=300)
        self.before_pip("")
        self.calls()
        return process.returncode, err.splitlines()

    def calls(self):
        """The programs that were called since the last time: "venv", "pip", "uv venv", "uv pip"."""
        calls = (self.notes / "calls").read_text().splitlines()
        (self.notes / "calls").write_text("")
        return calls

    def start(self, *args, **env):
        command = ["bash", "-c", f'cd /; source "{self.root}/common/setup.sh"; exec "$PYTHON" -c "$0" "$@"', SCRIPT, *args]
        env, pipe, none = {**self.env, **env}, subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command, env=env, text=True, stdin=none, stdout=pipe, stderr=pipe, start_new_session=True)

    def runs(self, *args, prefix=None, **env):
        """Runs a script, which must succeed with .venv or `prefix`; returns the lines on stderr."""
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=300)
        expected = [str(prefix or self.venv), str(self.root / "common"), *args]
        assert (process.returncode, out.splitlines()) == (0, expected), err
        return err.splitlines()

    def fails(self, **env):
        """Runs it, which must fail; returns the line that says why."""
        process = self.start(**env)
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == (1, "")
        *doing, error = err.splitlines()
        assert error.startswith("cannot set up: ") and len(doing) <= 1, err
        return error


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def contents(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("tool", ["", "uv "])
def test_first_run_and_changes(clone, tool):
    """The first run sets up; later ones compare, and complete what has changed."""
    if tool:
        clone.program("uv")
        (clone.bin / "python3").unlink()  # uv brings its own
    assert clone.runs("--steps=3", "two words") == NEW
    assert clone.calls() == [f"{tool}venv", f"{tool}pip"]
    (clone.venv / "mine").touch()
    (clone.root / "pyproject.toml").write_text("[project]\n[tool.ruff]\n")
    assert clone.runs() == [] == clone.calls()
    clone.requirements.write_text("tiny>=2\nother>=1\n\n-e .\n")
    assert clone.runs() == ["updating .venv, which has tiny 1, not >=2"]
    assert clone.calls() == [f"{tool}pip"]
    assert clone.runs() == [] == clone.calls()
    assert (clone.venv / "mine").exists()
    (clone.venv / "bin" / "python").unlink()
    (clone.venv / "bin" / "python").write_text(f'#!{clone.bin}/bash\necho "$*" >>{clone.notes}/calls; exec {PYTHON} "$@"\n')
    (clone.venv / "bin" / "python").chmod(0o755)
    subprocess.run(["bash", "-c", f"source '{clone.root}/common/setup.sh'"], env=clone.env, check=True)
    assert clone.calls() == ["-V"]  # of Python, the second time, no more is started


def test_another_system_is_refused(clone):
    """Also by a script that is started by hand."""
    words = ", but the tasks need Linux (prctl, /proc, namespaces); run it under WSL2 or in a container, see "
    words += "book/guide/install.md"
    for system in ("darwin23", "msys"):
        assert clone.fails(OSTYPE=system) == f"cannot set up: this is {system}{words}"
    program = "import sys; sys.platform, sys.argv = 'darwin', ['hogwild.py']; import common"
    ended = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"hogwild.py: this is darwin{words}\n")


def test_two_first_runs_at_once(clone):
    pipe = clone.pip_waits()
    first = clone.start()
    with open(pipe, "w"):  # opens when pip of the first run does
        second = clone.start()
        assert second.stderr.readline() == "another run is setting up .venv; waiting for it\n"
    for process in first, second:
        out, _ = process.communicate(timeout=300)
        assert (process.returncode, out.splitlines()[0]) == (0, str(clone.venv))
    assert clone.calls() == ["venv", "pip"]


def test_python_on_path(clone):
    """One that is too old, too new or without venv won't do; nor do pyenv's shims, but they don't hide a good one."""
    advice = "install uv, or Python 3.10 to 3.13 with venv (on Debian: sudo apt-get install python3-venv)"
    for env in {"PRETEND_VERSION": "3, 9"}, {"PRETEND_VERSION": "3, 14"}, {"PRETEND_WITHOUT": "ensurepip"}:
        assert advice in clone.fails(**env)
    clone.program("python3", "#!/usr/bin/env bash\necho 'pyenv: python3: command not found' >&2\nexit 127\n")
    assert advice in clone.fails()
    assert not clone.venv.exists()
    clone.program("python3.12")
    assert clone.runs() == NEW


@pytest.mark.parametrize("tool", ["", "uv "])
def test_pip_fails(clone, tool):
    """A line names its log. An update that failed before it changed anything leaves .venv as it was; else it is made anew."""
    if tool:
        clone.program("uv")
    failing = "print('ERROR: no network'); print('hint'); sys.exit(1)"
    for before, after in ("install('tiny', '1')", NEW), ("", []), ("install('tiny', '3')", NEW):
        clone.before_pip(f"{before}\n{failing}")
        error = clone.fails()
        assert " -r requirements.txt` failed: ERROR: no network (it needs the network and 4 GB of disk; log: " in error
        assert error.endswith(f"{clone.root}/.venv-setup.log)")
        assert (clone.root / ".venv-setup.log").read_text().endswith("ERROR: no network\nhint\n")
        clone.before_pip("")
        clone.requirements.write_text("tiny>=1\n-e .\n")
        assert clone.runs() == after
        clone.requirements.write_text("tiny>=2\n-e .\n")


def test_pip_that_installs_nothing(clone):
    clone.before_pip("sys.exit(0)")
    assert f"{clone.venv} lacks packaging after the installation (log: " in clone.fails()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted(clone, how):
    status, err = clone.kill(how)
    assert status in (130, -how)
    assert err[1:] == (["stopped; the next run sets up again"] if how == signal.SIGINT else [])
    assert clone.runs() == NEW
    assert clone.calls() == ["venv", "pip"]
    assert clone.runs() == []


PROGRESS = {  # what each prints, and what is shown then
    "": {
        "Collecting large": "Collecting large",
        "  Downloading large-1.0-py3-none-any.whl (200.0 MB)": "  Downloading large-1.0-py3-none-any.whl (200.0 MB)",
        "Progress 50000000 of 200000000": "50 of 200 MB of large, about ",
        "Installing collected packages: tiny, small, other": "1 of 3 packages, about ",
    },
    "uv ": {
        "Resolved 3 packages in 275ms": "Resolved 3 packages in 275ms",
        "Downloading large (150.5MiB)": "0 of 150 MiB",
        "Downloading small (49.5MiB)": "0 of 200 MiB",
        " Downloaded small": "49 of 200 MiB, about ",
    },
}


@pytest.mark.parametrize("tool", PROGRESS)
def test_progress_on_a_terminal(clone, tool):
    pipe = clone.pip_waits()
    if tool:
        clone.program("uv")
    clone.before_pip(f"""
install('tiny', '1')
for line in {list(PROGRESS[tool])}:
    print(line, flush=True)
    open({str(pipe)!r}).read()
""")
    environ = [f"{name}={value}" for name, value in clone.env.items()]
    with runs.on_a_terminal(["env", "-i", *environ, "bash", str(clone.root / "common" / "setup.sh")]) as (process, screen, _):
        shown = ""
        for wanted in PROGRESS[tool].values():
            while f" s: {wanted}" not in shown:
                shown += os.read(screen, 1000).decode()
            open(pipe, "w").close()
        assert process.wait(300) == 0
        with contextlib.suppress(OSError):  # at its end
            while part := os.read(screen, 1000):
                shown += part.decode()
    assert shown.splitlines()[-1].split("\x1b[K")[-1] == f"{clone.venv}/bin/python"


def test_active_environment(clone, tmp_path):
    """It is used if it has everything; otherwise a line says why not, but for Conda's `base`."""
    clone.runs()
    active = shutil.copytree(clone.venv, tmp_path / "active", symlinks=True)
    before = contents(clone.venv)
    for name in "VIRTUAL_ENV", "CONDA_PREFIX":
        assert clone.runs(prefix=active, **{name: str(active)}) == []
    assert contents(clone.venv) == before
    clone.requirements.write_text("tiny>=1\nother>=1\n-e .\n")
    clone.runs()
    said = [f"the active environment {active} lacks other; using .venv"]
    assert clone.runs(VIRTUAL_ENV=str(active)) == said
    assert clone.runs(CONDA_PREFIX=str(active), CONDA_DEFAULT_ENV="mine") == said
    assert clone.runs(CONDA_PREFIX=str(active), CONDA_DEFAULT_ENV="base") == []
    assert clone.runs(VIRTUAL_ENV=str(active / "bin")) == [f"the active environment {active}/bin has no Python; using .venv"]
    assert clone.runs(VIRTUAL_ENV=str(clone.venv)) == []


def test_another_clone(clone, tmp_path):
    """Neither its environment nor its `common` on PYTHONPATH is used. A link to its environment is refused, finished or not."""
    other = Clone(tmp_path, "other")
    other.runs()
    there = f"imports `common` from {other.root}/common/__init__.py"
    clone.runs(PYTHONPATH=str(other.root), PYTHONHOME="/nowhere")
    assert clone.runs(PYTHONPATH=str(other.root), PYTHONHOME="/nowhere") == []
    assert clone.runs(VIRTUAL_ENV=str(other.venv)) == [f"the active environment {other.venv} {there}; using .venv"]
    shutil.rmtree(clone.venv)
    clone.venv.symlink_to(other.venv)
    for stamp in "making\n" + str(other.root), None:
        before = contents(other.root)
        assert f"{clone.venv} was not made by this script for this folder, and {there}: remove it, or" in clone.fails()
        assert contents(other.root) == before
        (other.venv / "setup-stamp").write_text(stamp) if stamp else None
    clone.venv.unlink()
    assert clone.runs() == NEW


def test_environment_that_the_user_made(clone):
    """It is used if it has everything, and is never changed."""
    clone.venv.mkdir()
    assert clone.runs() == NEW  # an empty folder is as good as none
    (clone.venv / "setup-stamp").unlink()
    assert clone.runs() == []
    clone.requirements.write_text("tiny>=2\n-e .\n")
    before = contents(clone.venv)
    assert "has tiny 1, not >=2: remove it, or install requirements.txt into it" in clone.fails()
    assert contents(clone.venv) == before
    (clone.venv / "setup-stamp").write_text(f"found\n{clone.root}\n")  # as a former version of setup.sh has left it
    assert "remove it, or install" in clone.fails()


def test_link(clone, tmp_path):
    """To a folder on another disk, say: it is filled, also after a first run that was killed, and the link stays."""
    disk = tmp_path / "disk"
    clone.venv.symlink_to(disk)
    assert "has no Python: remove it" in clone.fails()
    disk.mkdir()
    clone.kill()
    assert clone.runs() == NEW
    assert clone.runs() == []
    assert clone.venv.is_symlink() and (disk / "bin" / "python").exists()


@pytest.mark.parametrize("what", ["moved", "lost Python", "another Python"])
def test_environment_that_no_longer_works(clone, tmp_path, what):
    clone.runs()
    python = clone.venv / "bin" / "python"
    if what == "moved":
        clone.root = clone.root.rename(tmp_path / "moved")
        clone.venv = clone.root / ".venv"
    else:
        python.unlink()
        python.symlink_to(tmp_path / "another")
    if what == "another Python":
        clone.program(tmp_path / "another", "#!/usr/bin/env bash\necho Python 3.13.99\n")
    clone.calls()
    assert clone.runs() == NEW
    assert clone.calls() == ["venv", "pip"]


def test_real_pip(clone, tmp_path):
    """The real venv and pip, with a package of this machine; then a failing update, which leaves no trace in .venv."""
    clone.program("python3", f'#!/usr/bin/env bash\nexec {PYTHON} "$@"\n')
    info = "packaging-99.dist-info"
    with zipfile.ZipFile(tmp_path / "packaging-99-py3-none-any.whl", "w") as wheel:
        for path in Path(packaging.__file__).parent.glob("*.py"):
            wheel.write(path, f"packaging/{path.name}")
        wheel.writestr("here.pth", str(clone.root))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: packaging\nVersion: 99\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    clone.requirements.write_text("packaging>=1 # with a comment\nmissing; python_version < '3'\n")
    # PIP_USER: a user may have set it for the system's Python
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_USER": "1"}
    assert clone.runs(**settings) == NEW
    wanted = clone.requirements.read_text()
    clone.requirements.write_text("missing>=1\n" + wanted)
    assert "No matching distribution found for missing>=1" in clone.fails(**settings)
    clone.requirements.write_text(wanted)
    assert clone.runs() == []


@pytest.mark.parametrize("status", [0, 1])
def test_run_sh_of_the_tests(clone, status):
    """Runs pytest over everything, or over what the caller names, and ends as that does."""
    (clone.root / "common" / "setup.sh").write_text(f"PYTHON={clone.bin}/python3\n")
    clone.program("python3", f"#!/usr/bin/env bash\necho ${{*:2}}\nexit {status}\n")
    shutil.copytree(CHECKOUT / "tests", clone.root / "tests", ignore=lambda _, names: {*names} - {"run.sh"})
    for notebook in "HogWild/HogWild.ipynb", "HogWild/.ipynb_checkpoints/HogWild-checkpoint.ipynb":
        (clone.root / notebook).parent.mkdir(exist_ok=True)
        (clone.root / notebook).touch()

    def run(*args):
        command = ["bash", clone.root / "tests" / "run.sh", *args]
        result = subprocess.run(command, env=clone.env, cwd="/", text=True, stdout=subprocess.PIPE)
        (line,) = [line.split() for line in result.stdout.splitlines()]
        assert line[0] == "pytest" and {"tests.checks", "tests.timings"} <= {*line}
        assert result.returncode == status
        return line

    assert run("-k", "setup")[-5:] == ["--ignore=tests/test_slurm.py", "tests", "HogWild/HogWild.ipynb", "-k", "setup"]
    pytest_call = run("HogWild/HogWild.ipynb::Cell")
    assert "tests" not in pytest_call and pytest_call[-1] == "HogWild/HogWild.ipynb::Cell"
