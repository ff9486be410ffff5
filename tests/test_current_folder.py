"""Python is started so that it executes no file of the folder in which a command is typed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
SECONDS = 120
# A module that is planted in the current folder, under names that every program imports
PLANTED = 'import os; open(os.environ["EXECUTED"], "a").write(f"{__file__}\\n"); raise SystemExit("planted")\n'
NAMES = ("json.py", "subprocess.py", "pickle.py", "common/__init__.py", "absl/__init__.py", "tensorflow/__init__.py")
SLURM = f"echo '   Command={CHECKOUT}/Multiple-Machines/slurm.sbatch'"  # in place of `scontrol show job`
COMMANDS = {
    f"bash {CHECKOUT}/common/join.sh nothing": "there is no folder nothing",
    f"bash {CHECKOUT}/common/leave.sh nothing": "there is no folder nothing",
    f"bash {CHECKOUT}/Distributed-Session/run.sh --num_workers=0": "--num_workers must be at least 1",
    f"SLURM_JOB_ID=17 JOIN=nothing bash {CHECKOUT}/Multiple-Machines/slurm.sbatch": "JOIN=",
    f"CUDA_VISIBLE_DEVICES=-1 bash {CHECKOUT}/HogWild/run.sh --gpus=0": "but TensorFlow sees none",
    f"PYTHONPATH=::/nowhere: bash {CHECKOUT}/HogWild/run.sh --steps=x": "--steps",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.replace(f"{CHECKOUT}/", "").replace("/", "-"))
def test_files_of_the_current_folder_are_not_executed(command, tmp_path):
    here, programs, executed = tmp_path / "here", tmp_path / "programs", tmp_path / "executed"
    for path in (here / name for name in NAMES):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PLANTED)
    programs.mkdir()
    (programs / "scontrol").write_text(f"#!/bin/sh\n{SLURM}\n")
    (programs / "scontrol").chmod(0o755)
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "EXECUTED": str(executed)}
    if sys.prefix != sys.base_prefix:
        environ["VIRTUAL_ENV"] = sys.prefix  # the environment of this test, for setup.sh
    shell = ["bash", "-c", f"{{ {command}; }} </dev/null"]
    ended = subprocess.run(shell, cwd=here, env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert not executed.exists(), executed.read_text()
    assert ended.returncode == 2 and COMMANDS[command] in ended.stderr, ended.stderr


def shell_scripts():
    """The paths of all shell scripts of this checkout."""
    found = [path for kind in ("sh", "sbatch") for depth in ("*", "*/*") for path in CHECKOUT.glob(f"{depth}/*.{kind}")]
    return [CHECKOUT / ".ci" / "run", *(path for path in found if ".venv" not in path.parts)]


# Python with -m, -c or the program on standard input, all of which put the current folder on its path
IN_FOLDER = re.compile(r"""(?:\$PYTHON"|\$\{?python\}?"|python3?"?)(?P<options>(?: -[A-Za-z]+)*?) (?:-m|-c|-)(?= )""")
OWN_FOLDER = re.compile(r"""^cd (?:-- )?"(?:\$here|\$\(dirname)""", re.M)  # the checkout, or a folder of it


def test_no_shell_script_starts_python_with_the_current_folder_on_its_path():
    scripts = shell_scripts()
    assert len(scripts) > 40
    for path in scripts:
        text = path.read_text()
        for found in IN_FOLDER.finditer(text):
            is_own = any(cd.start() < found.start() for cd in OWN_FOLDER.finditer(text))
            assert is_own or " -I" in found["options"], f"{path}: {found[0]}: give the path of a script, or the option -I"


def test_no_module_starts_python_with_the_current_folder_on_its_path():
    folders = [CHECKOUT / name for name in ("common", "Multiple-Machines", "Simulation")]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        found = re.search(r"""sys\.executable, "-(m|c)", (?!f"\{safe\};)""", path.read_text())
        assert not found, f"{path}: {found[0]}: give the path of a script, or take the current folder from its path"


def test_no_module_of_common_has_a_name_of_the_standard_library():
    """Its folder is first on the path of those that are run as scripts."""
    assert not {path.stem for path in (CHECKOUT / "common").rglob("*.py")} & sys.stdlib_module_names
