"""launch/warm.py and launch/preload.py: a process that has imported tensorflow serves many runs, and only its own user."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHECKOUT
from runs import SECONDS, wait_until_gone

from common.launch import preload, warm


def test_what_forks_would_have_otherwise_changes_the_signature(monkeypatch):
    environ = {"PATH": "/bin", "TF_CPP_MIN_LOG_LEVEL": "3"}
    before = warm.signature(environ)
    later = {"PATH": "/usr/bin", "TF_NUM_INTRAOP_THREADS": "7", "TF_CONFIG": "{}", "CUDA_VISIBLE_DEVICES": "1", "MINE": "7"}
    assert warm.signature(environ | later) == warm.signature(warm.environment(environ)) == before
    assert warm.signature(environ | {"PYTHONPATH": str(CHECKOUT)}) == before  # `train` adds this
    for read_at_import in "TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND", "OMP_NUM_THREADS", "PYTHONPATH", "HOME", "MALLOC_ARENA_MAX":
        assert warm.signature(environ | {read_at_import: "9"}) != before
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft + 1, hard))
    assert warm.signature(environ) != before


@pytest.mark.parametrize("changed", ["common/scheme/steps.py", "requirements.txt", "pyproject.toml"])
def test_changed_code_changes_the_signature(tmp_path, monkeypatch, changed):
    shutil.copytree(CHECKOUT / "common", tmp_path / "common")
    for name in "requirements.txt", "pyproject.toml":
        shutil.copy(CHECKOUT / name, tmp_path)
    monkeypatch.setattr(warm, "PROGRAM", tmp_path / "common" / "launch" / "preload.py")
    monkeypatch.setattr(warm, "ROOT", tmp_path)
    before = warm.signature({})
    with open(tmp_path / changed, "a") as file:
        file.write("# changed\n")
    assert warm.signature({}) != before


@pytest.fixture
def folder(tmp_path):
    """A folder that no other user can enter."""
    (tmp_path / "private").mkdir(mode=0o700)
    return tmp_path / "private"


def found(path, monkeypatch):
    monkeypatch.setenv(warm.VARIABLE, str(path))
    return warm.WarmProcess()._found()


def test_a_socket_on_which_nobody_listens_is_ignored_with_a_line(folder, monkeypatch, capsys):
    path = folder / "socket"
    assert found(path, monkeypatch) is None
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    assert found(path, monkeypatch) is None
    ignored = f"WARM_PROCESS={path} in the environment is ignored: "
    assert capsys.readouterr().out == f"{ignored}No such file or directory\n{ignored}Connection refused\n"


def test_a_folder_that_others_can_enter_is_ignored_with_a_line(folder, monkeypatch, capsys):
    path = folder / "socket"
    folder.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        assert found(path, monkeypatch) is None
        listening.settimeout(0)
        with pytest.raises(BlockingIOError):
            listening.accept()  # nobody has connected
    assert capsys.readouterr().out == f"WARM_PROCESS={path} in the environment is ignored: other users can enter its folder\n"


CONNECT = """
import os, socket, sys
if sys.argv[2] == "another user":
    os.setresuid(65534, 65534, 65534)
elif sys.argv[2] == "another namespace":
    import ctypes
    assert ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER
with socket.socket(socket.AF_UNIX) as connected:
    connected.connect(eval(sys.argv[1]))
    connected.recv(1)  # until it is closed
"""
OTHERS = ["another namespace", *(["another user"] if os.geteuid() == 0 else []), "the same"]


@pytest.mark.slow
@pytest.mark.parametrize("who", OTHERS)
def test_only_processes_of_the_same_user_and_namespace_are_served(who):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("")  # a name of the system's choice, which every user can reach
        listening.listen()
        process = subprocess.Popen([sys.executable, "-c", CONNECT, repr(listening.getsockname()), who])
        forking = preload.Forking(os.getppid(), "", listening)
        forking._accept()
        assert len(forking._connections) == (who == "the same")
        for connection in forking._connections:
            connection.close()
        assert process.wait(SECONDS) == 0


# What a program does that trains again and again; it prints the warm process of each run.
PROGRAM = """
import json, os, pathlib, signal, sys, threading
import numpy as np
from common import train
from common.launch import warm

here = pathlib.Path(sys.argv[1])
x, y = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8) % 2
seen = []

def run(name, **more):
    result = train("HogWild", "mlp", f"{here}/data.py:load", steps=4, verbose=False, run_dir=here / name, **more).result
    seen.append([name, result["global_steps"] >= 4, warm._kept.process.pid])

def write(samples, state):
    (here / "data.py").write_text(DATA.format(samples=samples, state=state))

DATA = '''
import os, numpy as np
import common.core.task_status
assert not hasattr(common.core.task_status, "left_by_a_run"), "state of another run"
common.core.task_status.left_by_a_run = {state}
assert os.environ.get("OWN") == {state!r}

def load():
    open(os.path.join(os.path.dirname(__file__), "loaded {samples}"), "w").close()
    x, y = np.ones([{samples}, 3], np.float32), np.arange({samples}) % 2
    return (x, y), (x, y)
'''
os.environ["OWN"] = "1"
write(8, "1")
run("first")
os.environ["OWN"] = "2"
write(16, "2")  # the code of a user changes between two runs
run("second")
threads = [threading.Thread(target=run, args=(f"thread {i}",)) for i in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
os.kill(warm._kept.process.pid, signal.SIGKILL)
warm._kept.process.wait()
run("after a kill")
os.environ["OMP_NUM_THREADS"] = "1"  # read at import
run("after a change")
print(json.dumps(seen), flush=True)
sys.stdin.read()
"""


@pytest.mark.cluster
def test_a_program_that_trains_again_and_again(tmp_path):
    """Its runs share a warm process, which keeps nothing of them; there is another after a kill, or a change. None is left when
    the program is killed, nor the folder of its socket."""
    (tmp_path / "tmp").mkdir()
    environ = {name: value for name, value in os.environ.items() if name != warm.VARIABLE}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=CHECKOUT,
        env={**environ, "TMPDIR": str(tmp_path / "tmp")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout
        seen = json.loads(process.stdout.readline())
        names, trained, pids = zip(*sorted(seen))
        of = dict(zip(names, pids))
        assert all(trained) and len(seen) == 6
        assert of["first"] == of["second"] == of["thread 0"] == of["thread 1"]
        assert len({of["first"], of["after a kill"], of["after a change"]}) == 3
        last = of["after a change"]
        assert "_backend_agg" in Path(f"/proc/{last}/maps").read_text()  # of matplotlib, for the curve of its next run
        process.kill()
    assert wait_until_gone(set(pids)) == []
    assert {path.name for path in tmp_path.glob("loaded *")} == {"loaded 8", "loaded 16"}
    assert list((tmp_path / "tmp").glob("warm-*")) == []


@pytest.mark.cluster
def test_a_warm_process_that_is_killed_ends_no_run(tmp_path):
    """The run goes on that it has begun, to its end; nothing is left of it."""
    program = """
import os, signal, sys, threading
from common import train
from common.launch import warm

def kill():
    with open(sys.argv[1] + "/pipe") as pipe:
        pipe.read()
    os.kill(warm._kept.process.pid, signal.SIGKILL)

threading.Thread(target=kill).start()
called = f"{sys.argv[1]}/callback.py:tell"
run = train("HogWild", "mlp", "digits", steps=400, run_dir=f"{sys.argv[1]}/run", callback=called, verbose=False)
print(run.result["restarts"])
"""
    pipe = str(tmp_path / "pipe")
    callback = f"told = []\ndef tell(*_, **__):\n    if not told:\n        told.append(open({pipe!r}, 'w').close())\n"
    (tmp_path / "callback.py").write_text(callback)
    os.mkfifo(tmp_path / "pipe")
    environ = {name: value for name, value in os.environ.items() if name != warm.VARIABLE}
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, cwd=CHECKOUT, env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr
