"""common/launch/fork_server.py and common/launch/supervisor.py, with small programs as tasks, which import no tensorflow."""

import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
from conftest import CHECKOUT
from runs import SECONDS, processes, wait_until_gone

from common.core import exit_reasons, task_status
from common.core.flags import TrainingFailed, UserError
from common.core.run_facts import RunFacts
from common.launch import supervisor
from common.launch.fork_server import ForkServer
from common.launch.task import Task

pytestmark = pytest.mark.cluster

# What the programs begin with. They take seconds less than `from common.core.task_status import say` would.
PROGRAM = """
import os, pathlib, signal, sys

def say(text=""):
    os.write(int(os.environ["LAUNCHER_WORDS"]), f"{os.environ['LAUNCHER_KEY']}\\t{text}\\n".encode())

here = pathlib.Path(sys.argv[1])
life = len(list(here.glob(f"life of {os.environ['LAUNCHER_KEY']}, *")))  # 0 in the first
(here / f"life of {os.environ['LAUNCHER_KEY']}, {life}").touch()

def tell(name, text=""):
    "Hands a line to whoever reads it with `hear`, and waits for that."
    with open(here / name, "w") as pipe:
        print(text, file=pipe)

def hear(name):
    with open(here / name) as pipe:
        return pipe.readline().strip()

def wait_until_told(pid):
    "Until the fork server has seen the end of that task. It tells what it sees next after that."
    while os.path.exists(f"/proc/{pid}"):
        pass

def show_pid():
    say(f"pid {os.getpid()}")
"""


@pytest.fixture
def folder(tmp_path):
    """A folder that all programs have on their command lines."""
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "other pipe")
    yield tmp_path
    left = processes(tmp_path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture
def server(folder):
    """A `ForkServer` in the machine's network."""
    with ForkServer({"ALL": "have this"}, folder / "logs" / "fork-server.log", False, preloads=False) as server:
        limit = threading.Timer(60, server.kill)  # a run that hangs is to fail
        limit.start()
        yield server
        limit.cancel()


def _texts_into(words):
    """A listener that puts the tasks' messages into a queue, without mere signs of life."""

    def said(key, text):
        if text:
            words.put((key, text))

    return said


@pytest.fixture
def listening(server):
    """The server, and two queues: what it says about ends, and what its tasks say, without mere signs of life."""
    ends: queue.Queue = queue.Queue()
    words: queue.Queue = queue.Queue()
    server.listen(lambda *end: ends.put(end), _texts_into(words))
    return server, ends, words


@pytest.fixture
def command(folder):
    """A function that writes a program and returns its command line."""
    numbers = itertools.count()

    def command(code):
        script = folder / f"program-{next(numbers)}.py"
        script.write_text(PROGRAM + code)
        return [sys.executable, str(script), str(folder)]

    return command


SAY_ALL = """
for name in "ALL", "MINE", "LAUNCHER_KEY":
    say(os.environ[name])
say(os.environ["LAUNCHER_PID"] == str(os.getppid()))
say(os.getsid(0) == os.getpid())
say(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
say([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD)])
say(repr(sys.stdin.read()))
say(os.getcwd())
"""


def test_what_a_task_finds(listening, command, folder):
    server, ends, words = listening
    server.start("any key", command(SAY_ALL), str(folder / "log"), {"MINE": "too"})
    assert ends.get(timeout=SECONDS) == ("any key", 0)
    said = [words.get(timeout=SECONDS) for _ in range(9)]
    assert {key for key, _ in said} == {"any key"}
    own = ["have this", "too", "any key", "True", "True", "True"]
    assert [text for _, text in said] == [*own, str([signal.SIG_DFL, signal.SIG_DFL]), "''", os.getcwd()]
    assert (folder / "log").read_text() == ""


def test_variables_are_of_one_task_alone(listening, command, folder):
    server, ends, words = listening
    for environ in {"MINE": "too"}, {}:
        server.start("a", command("say(os.environ.get('MINE', 'nothing'))"), None, environ)
        assert ends.get(timeout=SECONDS) == ("a", 0)
    assert [words.get(timeout=SECONDS) for _ in range(2)] == [("a", "too"), ("a", "nothing")]
    assert "MINE" not in os.environ and "ALL" not in os.environ


def test_task_without_a_log_writes_to_the_terminal(folder, command, capfd):
    with ForkServer({}, folder / "server.log", False, preloads=False) as server:
        ended = threading.Event()
        server.listen(lambda *end: ended.set(), lambda *word: None)
        server.start("a", command("print('shown'); print('oops', file=sys.stderr)"), None, {})
        assert ended.wait(SECONDS)
    assert capfd.readouterr() == ("shown\n", "oops\n")
    assert (folder / "server.log").read_text() == ""


@pytest.mark.parametrize(
    "code, status",
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("raise ValueError", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.abort()", -6),
        ("os._exit(255)", 255),
    ],
)
def test_exit_status(listening, command, folder, code, status):
    server, ends, _ = listening
    server.start("a", command(code), str(folder / "log"), {})
    assert ends.get(timeout=SECONDS) == ("a", status)


def test_ends_of_many_tasks_at_once(listening, command, folder):
    server, ends, _ = listening
    line = command("sys.exit(int(os.environ['STATUS']))")
    for status in range(20):
        server.start(str(status), line, str(folder / "log"), {"STATUS": str(status)})
    assert {ends.get(timeout=SECONDS) for _ in range(20)} == {(str(status), status) for status in range(20)}


def test_launcher_that_does_not_listen_holds_up_no_task(server, command, folder):
    ends: queue.Queue = queue.Queue()
    ended = threading.Event()
    server.listen(lambda *end: ends.put(end), lambda *word: ended.wait())
    talking = """
try:
    for _ in range(1000):
        say("x" * 1000)
except BlockingIOError:  # which words.say suppresses
    sys.exit(7)
"""
    server.start("a", command(talking), str(folder / "log"), {})
    assert ends.get(timeout=SECONDS) == ("a", 7)
    ended.set()


def test_program_that_is_not_there(listening, folder):
    server, ends, _ = listening
    server.start("a", [str(folder / "missing")], str(folder / "log"), {})
    assert ends.get(timeout=SECONDS) == ("a", 1)
    assert "FileNotFoundError" in (folder / "log").read_text()


def test_signals_reach_the_task_of_that_key_alone(listening, command, folder):
    server, ends, words = listening
    for key in "ab":
        server.start(key, command("say('ready'); signal.pause()"), str(folder / "log"), {})
    assert {words.get(timeout=SECONDS) for _ in "ab"} == {("a", "ready"), ("b", "ready")}
    server.signal("b", signal.SIGTERM)
    assert ends.get(timeout=SECONDS) == ("b", -signal.SIGTERM)
    server.signal("b", signal.SIGKILL)  # has ended
    server.signal("c", signal.SIGKILL)  # never was
    server.signal("a", signal.SIGKILL)
    assert ends.get(timeout=SECONDS) == ("a", -signal.SIGKILL)


def test_nothing_is_left_after_the_context(folder, command):
    with ForkServer({}, folder / "server.log", False, preloads=False) as server:
        words: queue.Queue = queue.Queue()
        server.listen(lambda *end: None, _texts_into(words))
        ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN); show_pid(); signal.pause()"
        server.start("a", command(ignoring), None, {})
        pid = int(words.get(timeout=SECONDS)[1].removeprefix("pid "))
        assert os.path.exists(f"/proc/{pid}")
    assert not os.path.exists(f"/proc/{pid}")


def test_server_that_was_stopped_is_killed_at_the_end(folder, monkeypatch):
    with ForkServer({}, folder / "server.log", False, preloads=False) as server:
        status = server._warm.status
        monkeypatch.setattr(server._warm, "status", lambda pid: status(pid, 0.2))
        os.kill(server._pid, signal.SIGSTOP)
    assert wait_until_gone([server._pid]) == []


def test_server_that_was_killed(listening, command, folder):
    """Its tasks end with it, the listener hears of it, and nothing that is asked then is an error."""
    server, ends, words = listening
    for key in "ab":
        server.start(key, command("show_pid(); signal.pause()"), str(folder / "log"), {})
    pids = [int(words.get(timeout=SECONDS)[1].removeprefix("pid ")) for _ in "ab"]
    server.kill()
    assert ends.get(timeout=SECONDS) == (None, None)
    assert wait_until_gone(pids) == []
    server.start("c", command(""), str(folder / "log"), {})
    server.signal("a", signal.SIGTERM)


def test_asking_a_server_that_was_killed(server):
    server.kill()
    assert server.status() == -signal.SIGKILL
    with pytest.raises(TrainingFailed, match=r"^the process that starts the tasks has ended \(log: .*\)$"):
        server.reserve_ports(1)


def test_log_whose_folder_was_deleted(listening, command, folder):
    """It is made again, or a line says that it cannot be; the task runs."""
    server, ends, words = listening
    (folder / "logs" / "fork-server.log").unlink()
    (folder / "logs").rmdir()
    for key, log in ("ps 1", folder / "logs" / "ps-1.log"), ("ps 2", folder / "gone" / "logs" / "ps-2.log"):
        server.start(key, command("print('printed')"), str(log), {})
        assert ends.get(timeout=SECONDS) == (key, 0)
    assert (folder / "logs" / "ps-1.log").read_text() == "printed\n"
    key, text = words.get(timeout=SECONDS)
    assert key == "ps 2" and text.startswith("ps 2 goes on without its log: ") and str(folder / "gone") in text
    assert not (folder / "gone").exists()


DELETED = """
import os, shutil, sys
from common.launch import fork_server

log = sys.argv[1]
os.environ.update(LAUNCHER_KEY="ps 3", LAUNCHER_WORDS=sys.argv[2])
fork_server._write_to(log, "ps 3", int(sys.argv[2]))
print("one", flush=True)
assert fork_server._made_again(log) == log
shutil.rmtree(os.path.dirname(log))
assert fork_server._made_again(log) == log
print("two", flush=True)
os.system("echo three >&2")
shutil.copy(log, os.path.join(sys.argv[3], "kept"))
shutil.rmtree(os.path.dirname(os.path.dirname(log)))
assert fork_server._made_again(log) == ""
assert fork_server._made_again("") == ""
print("nobody reads this", flush=True)
"""


def test_log_that_is_deleted_while_its_task_runs(tmp_path):
    """The later output of the task is in a new one. If there can be none, one line says so, and the task goes on."""
    end, theirs = os.pipe()
    (tmp_path / "run" / "logs").mkdir(parents=True)
    log = tmp_path / "run" / "logs" / "ps-3.log"
    command = [sys.executable, "-c", DELETED, str(log), str(theirs), str(tmp_path)]
    subprocess.run(command, check=True, pass_fds=[theirs], timeout=SECONDS)
    os.close(theirs)
    with open(end) as pipe:
        (said,) = pipe
    assert said.startswith("ps 3\tps 3 goes on without its log: ")
    assert (tmp_path / "kept").read_text() == "two\nthree\n"


def test_ports_are_reserved_as_long_as_the_server_lives(folder):
    with ForkServer({}, folder / "server.log", False, preloads=False) as server:
        assert server.problem is None
        ports = server.reserve_ports(50)
        assert len(set(ports)) == 50 and min(ports) > 1023
        for port in ports:
            with socket.socket() as another, pytest.raises(OSError, match="already in use"):
                another.bind(("", port))
    for port in ports:
        with socket.socket() as another:
            another.bind(("", port))


PRELOADED = """
import random, sys
is_there = "tensorflow" in sys.modules
import numpy as np
from common.core.task_status import say
import other
with open("/proc/self/cmdline") as title:
    say(f"{__name__} {sys.argv[1:]} {is_there} {other.VALUE} {__file__ in title.read()}")
import tensorflow as tf
with tf.compat.v1.Session() as session:  # TensorFlow itself draws numbers for devices, and for the steps of a session
    say(f"drawn {np.random.random()} {random.random()} {session.list_devices()[0].incarnation}")
while True:
    pass  # never again a word: what is heard is of a thread
"""


def test_preloaded_tasks_begin_as_programs_do(folder):
    """A script's arguments, modules and name; random numbers of its own; signs of life while it computes."""
    (folder / "program.py").write_text(PRELOADED)
    (folder / "other.py").write_text("VALUE = 'imported'")
    with ForkServer({"TF_CPP_MIN_LOG_LEVEL": "3"}, folder / "server.log", False) as server:
        words: queue.Queue = queue.Queue()
        ends: queue.Queue = queue.Queue()
        server.listen(lambda *end: ends.put(end), lambda *word: words.put(word))
        for key in "abc":
            server.start(key, [sys.executable, str(folder / "program.py"), "--its", str(folder)], str(folder / "log"), {})
        said: dict = {key: [] for key in "abc"}
        while not all(len(texts) >= 2 and beats >= 3 for texts, beats in map(_with_beats, said.values())):
            key, text = words.get(timeout=SECONDS)
            said[key].append(text)
        assert ends.empty(), (folder / "log").read_text()
    first, drawn = zip(*(_with_beats(texts)[0] for texts in said.values()), strict=True)
    assert set(first) == {f"__main__ ['--its', '{folder}'] True imported True"}
    numbers = [number for line in drawn for number in line.split()[1:]]
    assert len(set(numbers)) == 9


def _with_beats(texts):
    beats = [text for text in texts if text.startswith(task_status.PROGRESS)]
    return [text for text in texts if text and text not in beats], len(beats)


@pytest.fixture
def run(server, folder, command, monkeypatch):
    """A function that runs programs, {name of a task: code}, as a `supervisor.Supervisor`.

    It returns the exit status or the error, the lines shown, and the tasks. `hear` is called with each line, and with
    the settings, which it may change.
    """
    monkeypatch.setattr(supervisor, "PS_SECONDS", 0)  # a ps does not end by itself here

    def run(programs, hear=lambda line, settings: None, pace="own", num_evaluators=0, ends_with_chief=False, **changes):
        lines: list[str] = []

        def say(line):
            lines.append(line)
            hear(line, settings)

        tasks = {}
        for name, code in programs.items():
            job, index = name.split()
            tasks[name] = Task(job, int(index), command(code), str(folder))
        facts = RunFacts("HogWild", pace, num_evaluators=num_evaluators)
        settings = types.SimpleNamespace(**{"max_restarts": 3, "hang_secs": None, "run": facts} | changes)
        result = types.SimpleNamespace(tasks=tasks, lines=lines, status=None, error=None)
        try:
            run = supervisor.Supervisor(list(tasks.values()), server, settings, say, ends_with_chief=ends_with_chief)
            result.status = run.run()
        except (UserError, TrainingFailed) as error:
            result.error = error
        return result

    return run


def lives(folder, name):
    return len(list(folder.glob(f"life of {name}, *")))


def failure(result, kind=TrainingFailed):
    """The one line with which a run failed."""
    assert result.status is None and type(result.error) is kind and "\n" not in str(result.error)
    return str(result.error)


def test_run_ends_with_its_workers(run):
    result = run({"ps 0": "signal.pause()", "worker 0": "", "worker 1": "say()"})
    assert (result.status, result.lines) == (0, [])
    assert [result.tasks[name].status for name in ("worker 0", "worker 1")] == [0, 0]


def test_lines_that_tasks_say_are_shown(run, folder):
    def hear(line, settings):
        if line == "  two":
            (folder / "pipe").write_text("heard\n")

    result = run({"worker 0": "say('one'); say(); say('  two'); hear('pipe')"}, hear)
    assert (result.status, result.lines) == (0, ["one", "  two"])


def test_killed_task_is_restarted(run, folder):
    result = run({"worker 0": "hear('pipe')", "worker 1": "life or os.kill(os.getpid(), signal.SIGKILL); tell('pipe')"})
    assert (result.status, result.lines) == (0, ["worker 1 was killed by SIGKILL; restart 1 of 3"])
    assert [task.restarts for task in result.tasks.values()] == [0, 1]
    assert lives(folder, "worker 0") == 1


@pytest.mark.parametrize(
    "dies, how", [("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"), ("os._exit(137)", "failed (137)")]
)
def test_kill_for_want_of_memory_is_said(run, monkeypatch, dies, how):
    """It is one if the system's count of such kills has grown: of the task, or of what it has started and waited for."""
    counts = iter([7, 8, 8])
    monkeypatch.setattr(supervisor, "count_oom_kills", lambda: next(counts))
    dies = f"life > 1 or {dies}; tell('pipe')"
    result = run({"worker 0": "hear('pipe')", "worker 1": dies})
    assert (result.status, result.lines) == (
        0,
        [
            "worker 1 ran out of memory and was killed by the kernel; restart 1 of 3",
            f"worker 1 {how}; restart 2 of 3 in 1 s",
        ],
    )


def test_ps_that_failed_is_restarted(run):
    result = run({"ps 0": "life or sys.exit(5); tell('pipe'); signal.pause()", "worker 0": "hear('pipe')"})
    assert (result.status, result.lines) == (0, ["ps 0 failed (5); restart 1 of 3"])


def test_task_that_fails_again_and_again(run, folder):
    result = run({"worker 0": "signal.pause()", "worker 1": "raise ValueError(f'life {life}')"}, max_restarts=2)
    words = f"worker 1 failed (1) after 2 restarts: ValueError: life 2 (log: {folder / 'logs' / 'worker-1.log'})"
    assert failure(result) == words
    assert result.lines == ["worker 1 failed (1); restart 1 of 2", "worker 1 failed (1); restart 2 of 2 in 1 s"]


def test_restarts_are_counted_for_each_task(run, folder):
    """Each fails twice, of two that are allowed."""
    result = run({f"worker {i}": "sys.exit(life < 2)" for i in range(3)}, max_restarts=2)
    assert result.status == 0 and [task.restarts for task in result.tasks.values()] == [2, 2, 2]


def test_no_restarts(run):
    assert failure(run({"worker 0": "sys.exit(9)"}, max_restarts=0)).startswith(
        "worker 0 failed (9) after 0 restarts: it printed"
    )


def test_users_mistake_ends_the_run_at_once(run, folder):
    program = "print(f'{os.path.basename(__file__)}: --window must be 1'); sys.exit(2)"
    result = run({"worker 0": "signal.pause()", "worker 1": program})
    assert failure(result, UserError) == "--window must be 1"
    assert result.lines == [] and lives(folder, "worker 1") == 1


def test_what_a_new_start_will_not_mend_ends_the_run_at_once(run, folder):
    program = f"print(f'{{os.path.basename(__file__)}}: the disk is full'); sys.exit({supervisor.FAILED_FOR_GOOD})"
    result = run({"worker 0": "signal.pause()", "worker 1": program})
    assert failure(result) == f"the disk is full (log: {folder / 'logs' / 'worker-1.log'})"
    assert result.lines == [] and lives(folder, "worker 1") == 1


def test_silent_task_is_killed_and_another_is_not(run):
    """Worker 1 is stopped; worker 0 gives signs of life until worker 1 lives again. Both are given time to start."""
    talking = """
import select
say("here")
pipe = os.open(here / "pipe", os.O_RDWR)
while not select.select([pipe], [], [], 0.05)[0]:
    say()
"""
    stopping = "say('soon silent'); life or os.kill(os.getpid(), signal.SIGSTOP); tell('pipe')"
    missing = {"here", "soon silent"}

    def hear(line, settings):
        missing.discard(line)
        if not missing:
            settings.hang_secs = 2

    result = run({"worker 0": talking, "worker 1": stopping}, hear, hang_secs=60, max_restarts=10)
    assert result.status == 0 and result.tasks["worker 0"].restarts == 0
    assert set(result.lines[:2]) == {"here", "soon silent"}
    assert result.lines[2] == "worker 1 gave no sign of life for 2 s and was killed; restart 1 of 10"


def test_task_that_is_silent_again_and_again(run):
    result = run({"worker 0": "say(); os.kill(os.getpid(), signal.SIGSTOP)"}, hang_secs=0.1, max_restarts=1)
    words = "worker 0 gave no sign of life for 0.1 s and was killed after 1 restarts: it printed nothing"
    assert failure(result).startswith(words)


LEAVE_CHILDREN = """
def child(leaves):
    "Starts a process that goes on for ever, in the same group, or in a session of its own and with another parent."
    end, theirs = os.pipe()
    if os.fork() == 0:
        if leaves:
            os.setsid()
            os.fork() and os._exit(0)
        os.write(theirs, str(os.getpid()).encode())
        while True: signal.pause()
    return os.read(end, 100).decode()

say(f"children {os.getppid()} {child(False)} {child(True)} {os.getpid()}")
"""


@pytest.mark.parametrize("end", ["sys.exit(7)", "os._exit(0)", "os.abort()", "signal.pause()", "stop", "kill"])
def test_children_end_with_their_task(folder, command, end):
    """Whether it ends by itself, or is killed, or the run ends; those of another task live on until then."""
    words: queue.Queue = queue.Queue()
    ends: queue.Queue = queue.Queue()

    def children():
        return [int(pid) for pid in words.get(timeout=SECONDS)[1].split()[2:]]

    with ForkServer({}, folder / "server.log", False, preloads=False) as server:
        server.listen(lambda *end: ends.put(end), _texts_into(words))
        server.start("other", command(LEAVE_CHILDREN + "signal.pause()"), None, {})
        others = children()
        code = end if "(" in end else "signal.pause()"
        server.start("a", command(LEAVE_CHILDREN + code), None, {})
        pids = children()
        if end == "kill":
            server.signal("a", signal.SIGKILL)
        if end != "stop":
            if end == "signal.pause()":
                server.signal("a", signal.SIGTERM)
            assert ends.get(timeout=SECONDS)[0] == "a"
            assert wait_until_gone(pids) == []
        assert all(os.path.exists(f"/proc/{pid}") for pid in others)
    assert wait_until_gone(pids + others) == []


def test_children_end_with_the_launcher(command, folder):
    _, *program = command(LEAVE_CHILDREN + "signal.pause()")
    program = [sys.executable, "-m", "common.run", "--num_workers=1", f"--log_dir={folder / 'run'}", *program]
    launcher = subprocess.Popen(program, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    with launcher:
        assert launcher.stdout
        lines = [line for line in (launcher.stdout.readline() for _ in range(3)) if line.startswith("children")]
        pids = [int(pid) for line in lines for pid in line.split()[1:]]
        assert len(set(pids)) == 7
        launcher.kill()
    assert wait_until_gone(pids) == []


TELL_PID = "tell('pipe', os.getpid())"
WAIT_AND_FAIL = """
if life == 0:
    wait_until_told(hear('pipe'))
    sys.exit(1)
"""


def test_chief_that_fails_asks_all_again_for_their_report(run, folder):
    """Worker 1 has done its part when the chief fails, and is started again."""
    chief = "wait_until_told(hear('pipe')); sys.exit(life == 0)"
    result = run({"worker 0": chief, "worker 1": TELL_PID}, ends_with_chief=True)
    assert (result.status, result.lines) == (0, ["worker 0 failed (1); restart 1 of 3"])
    assert (lives(folder, "worker 0"), lives(folder, "worker 1")) == (2, 2)
    assert result.tasks["worker 1"].restarts == 0  # it was no fault of its own


def test_worker_that_was_dismissed_before_the_chief_failed_is_asked_again(run, folder, monkeypatch):
    """It ends only when the chief is there again, which waits for its report."""
    monkeypatch.setattr(supervisor, "CHIEF_SECONDS", 0.1)
    programs = {
        "worker 0": "signal.alarm(60)\nif life:\n  tell('other pipe')\nhear('pipe'); sys.exit(life == 0)",
        "worker 1": "tell('pipe')\nif life == 0:\n  hear('other pipe')",
    }
    result = run(programs, ends_with_chief=True)
    assert (result.status, result.lines) == (0, ["worker 0 failed (1); restart 1 of 3"])
    assert [lives(folder, name) for name in programs] == [2, 2]


def test_worker_that_the_chief_does_not_ask_again_is_not_started(run, folder):
    """The chief that was started again ends within the seconds that it has for that."""
    programs = {
        "worker 0": "signal.alarm(60)\nif life:\n  tell('other pipe')\nelse:\n  hear('pipe'); sys.exit(1)",
        "worker 1": "tell('pipe'); hear('other pipe')",
    }
    result = run(programs, ends_with_chief=True)
    assert (result.status, result.lines) == (0, ["worker 0 failed (1); restart 1 of 3"])
    assert [lives(folder, name) for name in programs] == [2, 1]


@pytest.mark.parametrize("failing, ended", [(0, 1), (1, 0)])
def test_without_a_chief_each_worker_ends_for_itself(run, folder, failing, ended):
    result = run({f"worker {failing}": WAIT_AND_FAIL, f"worker {ended}": TELL_PID})
    assert (result.status, result.lines) == (0, [f"worker {failing} failed (1); restart 1 of 3"])
    assert (lives(folder, f"worker {failing}"), lives(folder, f"worker {ended}")) == (2, 1)


def test_worker_that_fails_after_the_chief_has_ended(run, folder):
    """No task needs it; the evaluator, the last worker, goes on to its end."""
    worker = "wait_until_told(hear('pipe')); tell('other pipe', os.getpid()); sys.exit(1)"
    programs = {"worker 0": TELL_PID, "worker 1": worker, "worker 2": "wait_until_told(hear('other pipe'))"}
    result = run(programs, ends_with_chief=True, num_evaluators=1)
    assert (result.status, result.lines) == (0, [])
    assert [lives(folder, name) for name in programs] == [1, 1, 1]
    assert result.tasks["worker 1"].status == 1


def test_evaluator_that_fails_after_the_chief_has_ended(run, folder):
    """It has work to do still, alone."""
    worker = "tell('other pipe', os.getpid())"
    evaluator = f"life or wait_until_told(hear('other pipe'))\n{WAIT_AND_FAIL}"
    programs = {"worker 0": TELL_PID, "worker 1": worker, "worker 2": evaluator}
    result = run(programs, ends_with_chief=True, num_evaluators=1)
    assert (result.status, result.lines) == (0, ["worker 2 failed (1); restart 1 of 3"])
    assert [lives(folder, name) for name in programs] == [1, 1, 2]


def test_lockstep(run, folder):
    """All of them begin anew with one, the ps too."""
    programs = {
        "ps 0": "tell('other pipe'); signal.pause()",
        "worker 0": "tell('pipe'); life or signal.pause()",
        "worker 1": "hear('other pipe'); hear('pipe'); sys.exit(life == 0)",  # when the others have begun
    }
    result = run(programs, pace="ring", ends_with_chief=True)
    assert (result.status, result.lines) == (0, ["worker 1 failed (1); restart 1 of 3"])
    assert [lives(folder, name) for name in programs] == [2, 2, 2]
    assert [task.restarts for task in result.tasks.values()] == [0, 0, 1]


def test_without_lockstep_the_others_live_on(run, folder):
    programs = {"worker 0": "hear('pipe')", "worker 1": "life or sys.exit(1); tell('pipe')"}
    assert run(programs).status == 0
    assert [lives(folder, name) for name in programs] == [1, 2]


def test_fork_server_that_is_killed_for_want_of_memory(run, folder, monkeypatch):
    monkeypatch.setattr(supervisor, "count_oom_kills", lambda: 7)
    monkeypatch.setattr(exit_reasons, "count_oom_kills", lambda: 8)
    result = run({"worker 0": "os.kill(os.getppid(), signal.SIGKILL); signal.pause()"})
    words = "the process that starts the tasks ran out of memory and was killed by the kernel (log: "
    assert failure(result, supervisor.StarterEnded).startswith(words)
    assert wait_until_gone(processes(folder)) == []


@pytest.mark.parametrize("is_saved", [True, False])
def test_fork_server_that_is_killed_ends_the_run(run, folder, is_saved):
    """There is something to go on with, or not."""
    if is_saved:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "model.ckpt-7.index").touch()
    killing = "hear('pipe'); os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
    result = run({"worker 0": "tell('pipe'); signal.pause()", "worker 1": killing})
    log = folder / "logs" / "fork-server.log"
    words = f"the process that starts the tasks was killed by SIGKILL{'; --resume goes on' if is_saved else ''} (log: {log})"
    assert failure(result, supervisor.StarterEnded) == words
    assert wait_until_gone(processes(folder)) == []


def test_fork_server_that_is_killed_when_the_workers_are_done(run, server, folder, monkeypatch):
    """A ps is left, for which the run would have waited."""
    monkeypatch.setattr(supervisor, "PS_SECONDS", SECONDS)
    listen = server.listen

    def kills(ended, said):
        def ended_and_kills(key, status):
            ended(key, status)
            if key == "worker 0":
                os.kill(server._pid, signal.SIGKILL)

        listen(ended_and_kills, said)

    monkeypatch.setattr(server, "listen", kills)
    result = run({"ps 0": "signal.pause()", "worker 0": ""})
    assert (result.status, result.lines) == (0, [])
    assert wait_until_gone(processes(folder)) == []


class Interrupting:
    """A callable that sends this process a signal when it has heard a line so often."""

    def __init__(self, number, line, count):
        self._number, self._line, self._left = number, line, count

    def __call__(self, line, settings=None):
        if line == self._line:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), self._number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_run_lets_the_workers_end(run, number):
    """Each has time to save; the ps is there until they have."""
    program = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); say('ready'); signal.pause()"
    before = signal.getsignal(number)
    programs = {"ps 0": "say('ready'); signal.pause()", "worker 0": program, "worker 1": program}
    result = run(programs, Interrupting(number, "ready", 3))
    assert (result.status, result.lines[3:]) == (130, ["stopping; Ctrl-C again stops at once"])
    assert [task.status for task in result.tasks.values()] == [None, 0, 0]
    assert signal.getsignal(number) == before


def test_interruption_between_the_starts_of_tasks(run, server, monkeypatch):
    """Waits until it is known who was started."""
    start = server.start
    started: list[str] = []

    def interrupted(key, *arguments):
        if not started:
            os.kill(os.getpid(), signal.SIGINT)
        started.append(key)
        start(key, *arguments)

    monkeypatch.setattr(server, "start", interrupted)
    result = run({"worker 0": "signal.pause()", "worker 1": "signal.pause()"})
    assert (result.status, started) == (130, ["worker 0", "worker 1"])
    assert [task.status for task in result.tasks.values()] == [-signal.SIGTERM] * 2


def test_second_interruption_ends_the_patience(run):
    program = "signal.signal(signal.SIGTERM, lambda *_: say('not yet'))\nsay('ready')\nwhile True: signal.pause()"
    first, second = Interrupting(signal.SIGINT, "ready", 1), Interrupting(signal.SIGINT, "not yet", 1)
    began = time.monotonic()
    result = run({"worker 0": program}, lambda line, _: (first(line), second(line)))
    assert (result.status, result.lines) == (130, ["ready", "stopping; Ctrl-C again stops at once", "not yet"])
    assert time.monotonic() - began < supervisor.STOP_SECONDS


@pytest.mark.parametrize("is_dead_before", [False, True])
def test_interrupted_run_waits_for_no_ps_that_has_died(run, folder, monkeypatch, is_dead_before):
    """Nobody starts it again, so nothing more can be saved. It may also wait for its restart when the run is interrupted."""
    monkeypatch.setattr(supervisor, "WRITE_SECONDS", 0.1)
    worker = "signal.signal(signal.SIGTERM, lambda *_: say('waits'))\nsay('ready')\nwhile True: signal.pause()"
    ps, last = "say('ready'); hear('pipe'); sys.exit(5)", "ready"
    if is_dead_before:
        ps, last = "say('ready'); sys.exit(5)", "ps 0 failed (5); restart 2 of 3 in 1 s"
    interrupting = Interrupting(signal.SIGINT, last, 1 if is_dead_before else 2)

    def hear(line, settings):
        interrupting(line)
        if line == "waits" and not is_dead_before:
            (folder / "pipe").write_text("end")

    began = time.monotonic()
    result = run({"ps 0": ps, "worker 0": worker}, hear)
    assert result.status == 130 and time.monotonic() - began < supervisor.STOP_SECONDS
    assert "ps 0 failed (5) and is not restarted: the run ends without it" in result.lines


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGINT])
def test_hang_up_is_never_impatience(run, folder, first):
    """When a terminal is closed, the shell and the system both send it; a worker has the time that it needs to save."""
    program = """
def save(*_):
    say("saving")
    hear("pipe")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
say("ready")
signal.pause()
"""
    asking, asking_again = Interrupting(first, "ready", 1), Interrupting(signal.SIGHUP, "saving", 1)

    def hear(line, settings):
        asking(line)
        asking_again(line)
        if line == "saving":
            (folder / "pipe").write_text("saved")

    result = run({"worker 0": program}, hear)
    assert (result.status, result.lines) == (130, ["ready", "stopping; Ctrl-C again stops at once", "saving"])
    assert result.tasks["worker 0"].status == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_that_is_ignored_from_the_start_interrupts_no_run(run, folder, number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        interrupting = Interrupting(number, "ready", 1)
        result = run(
            {"worker 0": "say('ready'); hear('pipe')"}, lambda line, _: [interrupting(line), (folder / "pipe").write_text("")]
        )
        assert (result.status, result.lines) == (0, ["ready"])
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("isolation", ["--isolation", "--noisolation"])
def test_tasks_end_with_their_launcher(command, folder, isolation):
    _, *program = command("say(f'{os.getpid()} {os.getppid()}'); signal.pause()")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "common.run", isolation, f"--log_dir={folder / 'run'}", *program],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with launcher:
        assert launcher.stdout
        lines = [launcher.stdout.readline() for _ in range(4)]
        pids = [int(pid) for line in lines[1:] for pid in line.split()]  # of three tasks, and of the one that starts them
        assert len(set(pids)) == 4 and launcher.pid not in pids
        launcher.kill()
    assert wait_until_gone(pids) == []


def test_first_sign_of_life_is_the_servers(server, command, folder):
    """So a task is watched from its start on, also one that is stopped before it can say anything."""
    words: queue.Queue = queue.Queue()
    server.listen(lambda *end: None, lambda *word: words.put(word))
    server.start("a", command("os.kill(os.getpid(), signal.SIGSTOP)"), str(folder / "log"), {})
    assert words.get(timeout=SECONDS) == ("a", "")
