"""A run's own network: which users can reach its ports, what happens where the system forbids it, and what a run leaves behind.

Where Linux forbids such a network, as in some containers, these tests fail: nothing else tells that it was not tried.
"""

import errno
import io
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from runs import HOGWILD, SECONDS, finish, is_training, listening_ports, processes, read_until, start

from common.launch import sandbox
from common.launch.fork_server import ForkServer

pytestmark = pytest.mark.slow

LOOK = """
import os, socket, sys
print(os.readlink("/proc/self/ns/net"))
print(*[name for _, name in socket.if_nameindex()])
print(os.geteuid(), os.getegid())
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    print("the loopback works")
try:
    socket.create_connection(("192.0.2.1", 80), timeout=60)
except OSError as error:
    print(error.strerror)
"""


def looked(tmp_path, is_isolated):
    """The output of a task that looks at its network, and the problem that its `ForkServer` tells."""
    (tmp_path / "look.py").write_text(LOOK)
    with ForkServer({}, tmp_path / "server.log", is_isolated, preloads=False) as server:
        ended = threading.Event()
        server.listen(lambda *end: ended.set(), lambda *word: None)
        server.start("a", [sys.executable, str(tmp_path / "look.py")], str(tmp_path / "log"), {})
        assert ended.wait(SECONDS)
    return server.problem, (tmp_path / "log").read_text().splitlines()


def test_this_system_allows_it():
    assert sandbox.why_no_own_network() is None


def test_asking_changes_nothing():
    before = os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/user")
    sandbox.why_no_own_network()
    assert (os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/user")) == before


def test_task_in_a_network_of_its_own(tmp_path):
    """It has a loopback interface and no way out, and is the same user."""
    problem, (namespace, interfaces, *rest) = looked(tmp_path, True)
    assert problem is None
    assert re.fullmatch(r"net:\[\d+\]", namespace) and namespace != os.readlink("/proc/self/ns/net")
    assert interfaces.split()[0] == "lo" and "eth0" not in interfaces.split()  # some kernels add idle ones, as tunl0
    assert rest == [f"{os.geteuid()} {os.getegid()}", "the loopback works", os.strerror(errno.ENETUNREACH)]


def test_task_in_the_network_of_the_machine(tmp_path):
    problem, lines = looked(tmp_path, False)
    assert problem is None
    assert lines[0] == os.readlink("/proc/self/ns/net")
    assert lines[1].split() == [name for _, name in socket.if_nameindex()]


POWER = """
import os, sys
with open("/proc/self/status") as status:
    print(*[line.split()[1] for line in status if line.startswith(("Cap", "NoNewPrivs:"))])
folder = sys.argv[1]
try:
    os.mkdir(os.path.join(folder, "made"))
    print("made")
except OSError as error:
    print(error.strerror)
os.execl("/bin/sh", "sh", "-c", "grep -E '^(Cap|NoNewPrivs)' /proc/self/status | cut -f 2 | paste -s -d ' '")
"""

START_POWER = """
import os, sys, threading
from common.launch.fork_server import ForkServer
folder, is_isolated = sys.argv[1], sys.argv[2] == "True"
with ForkServer({}, folder + "/server.log", is_isolated, preloads=False) as server:
    ended = threading.Event()
    server.listen(lambda *end: ended.set(), lambda *word: None)
    server.start("a", [sys.executable, folder + "/power.py", folder + "/checkpoints"], folder + "/log", {})
    assert ended.wait(240)
assert server.problem is None, server.problem
"""


@pytest.fixture
def of_all():
    """A folder that every user can write into."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def test_tasks_have_no_power_beyond_the_user(of_all):
    """Programs that they start have none either. A folder of mode 500 keeps them from writing, even where the user is root."""
    (of_all / "power.py").write_text(POWER)
    (of_all / "checkpoints").mkdir(mode=0o500)
    subprocess.run([sys.executable, "-c", START_POWER, str(of_all), "True"], check=True, timeout=SECONDS)
    none = " ".join(["0" * 16] * 5 + ["1"])
    assert (of_all / "log").read_text().splitlines() == [none, os.strerror(errno.EACCES), none]


AS_NOBODY = """
import os, sys
from common.launch import sandbox
os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
sandbox.prctl(4, 1)  # PR_SET_DUMPABLE: a program that a user starts has its own files in /proc
sandbox.enter_own_network()
if sys.argv[2] == "without":
    sandbox.give_up_power()
try:
    os.mkdir(sys.argv[1] + "/made")
    print("made")
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become nobody; the test above is of an ordinary user then")
@pytest.mark.parametrize("power, said", [("with", "made"), ("without", os.strerror(errno.EACCES))])
def test_nobody_may_not_write_where_the_mode_forbids_it(of_all, power, said):
    (of_all / "checkpoints").mkdir(mode=0o500)
    os.chown(of_all / "checkpoints", 65534, 65534)
    command = [sys.executable, "-c", AS_NOBODY, str(of_all / "checkpoints"), power]
    assert subprocess.check_output(command, text=True, timeout=SECONDS) == f"{said}\n"


def test_without_isolation_tasks_gain_no_new_power(of_all):
    """They keep the rights of the user, even if that is root."""
    (of_all / "power.py").write_text(POWER)
    subprocess.run([sys.executable, "-c", START_POWER, str(of_all), "False"], check=True, timeout=SECONDS)
    *capabilities, no_new = (of_all / "log").read_text().splitlines()[0].split()
    status = Path("/proc/self/status").read_text()
    assert [*capabilities, no_new] == [*re.findall(r"^Cap\w+:\t(\w+)$", status, re.M), "1"]


CACHES = """
import os, stat
import common
import matplotlib
from keras.src.backend.config import keras_home
for folder in keras_home(), matplotlib.get_cachedir():
    print(folder, oct(stat.S_IMODE(os.stat(folder).st_mode)), os.stat(folder).st_uid == os.geteuid())
"""


def test_caches_are_private_where_the_home_is_not_writable(of_all):
    """They are in a folder whose name is not known before, and that is gone afterwards."""
    (of_all / "tmp").mkdir()
    (of_all / "tmp").chmod(0o777)
    hidden = ("KERAS_HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    environ |= {"HOME": "/nonexistent", "TMPDIR": str(of_all / "tmp")}
    before = os.path.exists("/tmp/.keras")
    command = [sys.executable, "-c", CACHES]
    ended = subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=SECONDS)
    folders = {line.split()[0] for line in ended.stdout.splitlines()}
    assert [line.split()[1:] for line in ended.stdout.splitlines()] == [["0o700", "True"]] * 2
    (folder,) = folders
    assert re.fullmatch(rf"{of_all}/tmp/keras-\w{{8}}", folder)
    assert list((of_all / "tmp").iterdir()) == []
    assert os.path.exists("/tmp/.keras") == before


AS_ORDINARY_USER = """
import os, sys
from common.launch import sandbox
os.environ.pop("KERAS_HOME", None)
sandbox.enter_own_network()
sandbox.give_up_power()  # or root could write anywhere
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""


@pytest.mark.parametrize("is_there", [False, True])
def test_keras_folder_in_a_home_that_is_not_writable(of_all, is_there):
    """It is used if it is there: Keras itself would look at the home alone, and take /tmp/.keras. That Keras takes what the
    variable says is tested above.
    """
    for name in ("tmp", "home", "home/.keras") if is_there else ("tmp", "home"):
        (of_all / name).mkdir()
    (of_all / "home").chmod(0o500)
    environ = {name: value for name, value in os.environ.items() if name not in ("KERAS_HOME", "MPLCONFIGDIR")}
    environ |= {"HOME": str(of_all / "home"), "TMPDIR": str(of_all / "tmp"), "XDG_CACHE_HOME": str(of_all / "tmp")}
    command = [sys.executable, "-c", AS_ORDINARY_USER, "import common, os; print(os.environ['KERAS_HOME'])"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS)
    (of_all / "home").chmod(0o700)
    assert ended.returncode == 0, ended.stderr
    keras = ended.stdout.split()[0]
    assert keras == f"{of_all}/home/.keras" if is_there else keras.startswith(f"{of_all}/tmp/keras-")


START_WITH_HOME = START_POWER.replace("power.py", "caches.py")


def test_tasks_have_private_caches_where_only_power_makes_the_home_writable(of_all):
    """Root may write into another user's home, but not its tasks, which have no such power."""
    for name in "tmp", "home":
        (of_all / name).mkdir()
    (of_all / "home").chmod(0o500)
    (of_all / "caches.py").write_text(
        'import os, stat\nfolder = os.environ["KERAS_HOME"]\nprint(folder, os.stat(folder).st_mode)'
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("KERAS_HOME", "MPLCONFIGDIR")}
    environ |= {"HOME": str(of_all / "home"), "TMPDIR": str(of_all / "tmp")}
    subprocess.run([sys.executable, "-c", START_WITH_HOME, str(of_all), "True"], env=environ, check=True, timeout=SECONDS)
    (of_all / "home").chmod(0o700)
    folder, mode = (of_all / "log").read_text().split()
    assert folder.startswith(f"{of_all}/tmp/keras-") and stat.S_IMODE(int(mode)) == 0o700
    assert list((of_all / "tmp").iterdir()) == []


@pytest.fixture
def system(monkeypatch):
    """A function that sets what the files of /proc/sys say; the others are not there."""

    def system(**files):
        def opened(path, *mode):
            if not path.startswith("/proc/sys/"):
                return open(path, *mode)
            name = path.removeprefix("/proc/sys/").replace("/", "_")
            if name not in files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return io.StringIO(files[name] + "\n")

        monkeypatch.setattr(sandbox, "open", opened, raising=False)

    return system


ALLOWING = {
    "kernel_apparmor_restrict_unprivileged_userns": "0",
    "kernel_unprivileged_userns_clone": "1",
    "user_max_user_namespaces": "96365",
    "user_max_net_namespaces": "96365",
}


@pytest.mark.parametrize("rest", [{}, ALLOWING])
@pytest.mark.parametrize(
    "file, value, command",
    [
        ("kernel_apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("kernel_unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("user_max_user_namespaces", "0", "user.max_user_namespaces=10000"),
        ("user_max_net_namespaces", "0", "user.max_net_namespaces=10000"),
    ],
)
def test_setting_that_forbids_it(system, rest, file, value, command):
    system(**(rest | {file: value}))
    assert sandbox.how_to_allow(errno.EPERM) == f"the system forbids it; `sudo sysctl {command}` allows it"


@pytest.mark.parametrize("files", [{}, ALLOWING])
@pytest.mark.parametrize(
    "number, line",
    [
        (errno.ENOSYS, "this system has no network namespaces"),
        (errno.EPERM, "the system forbids it (Operation not permitted), as containers do; SECURITY.md says how to allow it"),
        (errno.ENOSPC, "the system forbids it (No space left on device), as containers do; SECURITY.md says how to allow it"),
    ],
)
def test_other_reasons(system, files, number, line):
    system(**files)
    assert sandbox.how_to_allow(number) == line


def test_step_that_is_refused(monkeypatch, system):
    """After others were allowed: this process goes on as it was."""
    before = os.readlink("/proc/self/ns/net")
    enter = sandbox.enter_own_network

    def refused():
        enter()
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/proc/self/gid_map")

    system(**ALLOWING)
    monkeypatch.setattr(sandbox, "enter_own_network", refused)
    assert "(Permission denied)" in sandbox.why_no_own_network()
    assert os.readlink("/proc/self/ns/net") == before


def forbidden(arguments, **options):
    """Runs a Python program in a namespace of users in which no process may have a network of its own."""
    forbid = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
        **options,
    )


WHY = "the system forbids it; `sudo sysctl user.max_net_namespaces=10000` allows it"
CANNOT = f"--require_isolation: this run cannot have a network of its own: {WHY}\n"
REACHED = f"the ports of this run can be reached from outside: {WHY}"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script that trains nothing, in an otherwise empty folder, which is the working one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("print('ran')")
    return "mine.py"


def test_required_and_forbidden(script, tmp_path):
    ended = forbidden(["-m", "common.run", "--require_isolation", script])
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"common.run: {CANNOT}")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_required_and_forbidden_for_a_scheme(tmp_path):
    ended = forbidden([str(HOGWILD), "--launch", "--require_isolation"], cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"hogwild.py: {CANNOT}")
    assert list(tmp_path.iterdir()) == []


def test_forbidden(script):
    ended = forbidden(["-m", "common.run", "--num_workers=1", script])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[1:] == [REACHED, "ran"]


def test_forbidden_and_not_wanted(script):
    ended = forbidden(["-m", "common.run", "--noisolation", "--num_workers=1", script])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[1:] == ["ran"]


def test_allowed(script, capfd):
    from common.cli import run

    with pytest.raises(SystemExit) as info:
        run.main(["--require_isolation", "--num_workers=1", script])
    out, err = capfd.readouterr()
    assert (info.value.code, err, out.splitlines()[1:]) == (0, "", ["ran"])


def ports_of(pid):
    """The ports of the cluster, as they stand on the command line of a task."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    hosts = re.findall(r"--(?:ps|worker)_hosts=(\S+)", line)
    return {int(port) for port in re.findall(r":(\d+)", ",".join(hosts))}


def all_train(run_dir):
    """Whether each of two workers has trained, and so has a server."""
    return all((run_dir / "metrics" / f"worker-{i}.jsonl").exists() for i in range(2))


def network_of(pid):
    return os.readlink(f"/proc/{pid}/ns/net")


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """Empty folders for all that a program may write into: {what it is: folder}. The working folder is one of them."""
    folders = {name: tmp_path / name for name in ("home", "tmp", "cache", "here")}
    for folder in folders.values():
        folder.mkdir()
    for name, folder in ("HOME", "home"), ("TMPDIR", "tmp"), ("XDG_CACHE_HOME", "cache"):
        monkeypatch.setenv(name, str(folders[folder]))
    for name in ("KERAS_HOME", "MPLCONFIGDIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folders["here"])
    return folders


@pytest.mark.cluster
def test_ports_of_a_run_are_reached_from_inside_alone(run_dir, empty):
    """All that it writes is in its folder, apart from the settings and caches of Keras and Matplotlib."""
    process = start(run_dir, "--launch", "--num_ps=2", "--seconds=10", "--epochs=1000000")
    read_until(process, lambda line: is_training(line) and all_train(run_dir))
    tasks = [pid for job in ("ps", "worker") for pid in processes(run_dir, f"--job_name={job}")]
    assert len(tasks) == 4
    ports = ports_of(tasks[0])
    assert len(ports) == 4
    assert ports.isdisjoint(listening_ports())
    for pid in tasks:
        assert ports <= listening_ports(pid)
    (network,) = {network_of(pid) for pid in tasks}
    assert network != network_of(os.getpid()) == network_of(process.pid)
    for pid in tasks:
        status = Path(f"/proc/{pid}/status").read_text()
        assert set(re.findall(r"^Cap\w+:\t(\w+)$", status, re.M)) == {"0" * 16} and "\nNoNewPrivs:\t1\n" in status
    output = finish(process)
    assert "reached from outside" not in output
    written = {path.name for path in run_dir.iterdir()}
    assert written >= {"checkpoints", "logs", "metrics", "result.json", "curve.png", "model.keras"}
    found = {name: sorted(path.name for path in folder.iterdir()) for name, folder in empty.items()}
    assert found == {"home": [".config", ".keras"], "tmp": [], "cache": ["matplotlib"], "here": []}
    files = {str(path.relative_to(empty["home"])) for path in empty["home"].rglob("*") if not path.is_dir()}
    assert files == {".keras/keras.json"}  # in .config Matplotlib has made a folder, and looks there for the user's settings
    (fonts,) = empty["cache"].rglob("*.*")
    assert re.fullmatch(r"fontlist-v[\d.]+\.json", fonts.name)


@pytest.mark.cluster
def test_without_isolation_everybody_reaches_them(run_dir):
    process = start(run_dir, "--launch", "--noisolation", "--seconds=60", "--epochs=1000000")
    read_until(process, lambda line: is_training(line) and all_train(run_dir))
    tasks = processes(run_dir, "--job_name=ps") + processes(run_dir, "--job_name=worker")
    assert ports_of(tasks[0]) <= listening_ports()
    assert {network_of(pid) for pid in tasks} == {network_of(os.getpid())}
    process.send_signal(signal.SIGINT)
    finish(process, 130)
