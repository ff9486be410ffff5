"""common/launch/launcher.py without a cluster: ports, a task's process and log."""

import contextlib
import math
import queue
import signal
import socket
import sys
import types

import pytest
from runs import SECONDS

from common import tf
from common.cluster.task_spec import TaskSpecDef
from common.core import devices, exit_reasons
from common.core.flags import Settings, TrainingFailed
from common.core.run_facts import RunFacts
from common.core.task_status import PROGRESS
from common.launch import launcher, supervisor
from common.launch.fork_server import EARLY, ForkServer
from common.launch.task import Task

SERVING = PROGRESS + '[1, "serving", true, null]'


def test_reserved_ports_are_distinct():
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in range(200)]
    assert len(set(ports)) == 200 and min(ports) > 1023


def test_reserved_port_is_for_a_server_that_reuses_it(monkeypatch):
    """TensorFlow's server does, asked by the environment; other programs don't get it."""
    monkeypatch.setenv("TF_GRPC_REUSE_PORT", "true")
    with launcher.reserved_port() as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as another, pytest.raises(OSError, match="already in use"):
            another.bind(("", port))
        server = tf.train.Server({"worker": [f"127.0.0.1:{port}"]}, "worker", 0)
        with tf.Graph().as_default(), tf.Session(server.target) as session:
            assert session.run(tf.constant(3)) == 3
    assert server.target == f"grpc://127.0.0.1:{port}"


def test_reservation_ends_with_its_context():
    with launcher.reserved_port() as reserved:
        port = reserved.getsockname()[1]
    with socket.socket() as another:
        another.bind(("", port))


@pytest.fixture
def start(tmp_path):
    """A function that runs Python code as ps 3 to its end, with variables of its own, and returns the task."""
    (tmp_path / "logs").mkdir()
    ends: queue.SimpleQueue = queue.SimpleQueue()
    with ForkServer({"MINE": "no", "OTHER": "kept"}, tmp_path / "logs" / "fork-server.log", False, preloads=False) as server:
        server.listen(lambda *end: ends.put(end), lambda *word: None)

        def start(code, environ=None):
            script = tmp_path / "scheme.py"
            script.write_text(code)
            task = Task("ps", 3, [sys.executable, str(script)], str(tmp_path), environ or {})
            task.start(server)
            assert task.is_running
            name, task.status = ends.get(timeout=SECONDS)
            assert name == task.name == "ps 3"
            return task

        yield start
        server.signal("ps 3", signal.SIGTERM)  # has ended: nothing happens, least of all to another process of that number
    assert ends.get(timeout=SECONDS) == (None, None)  # no other end was told


@pytest.mark.cluster
def test_task_has_an_environment_and_logs(start, tmp_path):
    """Its own variables go before those of all tasks."""
    program = "import os, sys; print(os.environ['MINE'], os.environ['OTHER']); print('oops', file=sys.stderr)"
    task = start(program, {"MINE": "yes"})
    assert task.status == 0
    assert task.log == tmp_path / "logs" / "ps-3.log"
    assert sorted(task.log.read_text().splitlines()) == ["oops", "yes kept"]


@pytest.mark.cluster
def test_log_of_a_restarted_task_goes_on(start):
    assert start("print('one')").log == start("print('two')").log
    assert start("print('three')").log.read_text() == "one\ntwo\nthree\n"


def test_start_forgets_how_the_task_has_ended_before(tmp_path):
    task = Task("ps", 3, ["python", "scheme.py"], str(tmp_path), status=-9, why_killed="was silent", heard=-1e9)
    task.hear(SERVING)
    asked: list = []
    task.start(types.SimpleNamespace(start=lambda *arguments: asked.append(arguments)))
    assert asked == [("ps 3", ["python", "scheme.py"], str(tmp_path / "logs" / "ps-3.log"), {})]
    assert (task.status, task.why_killed, task.progress) == (None, "", None)
    assert task.heard == task.progressed == math.inf  # not yet


@pytest.mark.cluster
@pytest.mark.cluster
@pytest.mark.parametrize(
    "code, words",
    [
        ("print('scheme.py: --window must be 1'); print('bye'); raise SystemExit(2)", "--window must be 1"),
        ("print('one'); raise ValueError('too large')", "ValueError: too large"),
        ("print('one'); print('two'); print()", "two"),
        ("print('F0000 00:00:17 12 env.cc:84] Check failed'); print('@ a()')", "F0000 00:00:17 12 env.cc:84] Check failed"),
        ("", "it printed nothing"),
        ("print('I0000 00:00:1795 120 grpc_server_lib.cc:467] Started server')", "it printed nothing"),
        ("print('E0000 00:00:17 5 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error')", "it printed nothing"),
    ],
)
def test_last_words(start, code, words):
    assert start(code).last_words() == words


def test_last_words_of_a_task_that_writes_to_the_terminal(tmp_path):
    assert Task("worker", 0, ["python", "scheme.py"], str(tmp_path), is_shown=True).last_words() == "its output is above"


def test_last_words_of_a_task_that_was_killed_within_a_character(start):
    assert start("import os; os.write(1, b'no caf\\xc3')").last_words() == "no caf\ufffd"


@pytest.mark.parametrize(
    "state, words",
    [
        ({"status": 7}, "failed (7)"),
        ({"status": 137}, "failed (137)"),
        ({"status": 137, "ran_out": True}, "ran out of memory and was killed by the kernel"),
        ({"status": -9, "ran_out": True}, "ran out of memory and was killed by the kernel"),
        ({"status": -9}, "was killed by SIGKILL"),
        ({"status": -11}, "was killed by SIGSEGV"),
        ({"status": -40}, "was killed by signal 40"),
        ({"status": EARLY}, "ended with exit status 0 before its work was done"),
        ({"status": -9, "why_killed": "gave no sign of life for 60 s"}, "gave no sign of life for 60 s and was killed"),
    ],
)
def test_how_a_task_ended(state, words):
    assert Task("ps", 3, [], "", **state).how() == words


@pytest.mark.cluster
@pytest.mark.parametrize(
    "code, words",
    [
        ("raise MemoryError", "ran out of memory (MemoryError)"),
        ("import os; os.write(2, b'  what():  std::bad_alloc'); os.abort()", "ran out of memory (std::bad_alloc)"),
        (
            "import os; os.write(2, b'F0000 00:00:17 12 env.cc:84] Thread creation via pthread_create() failed.'); os.abort()",
            "could not start a thread (pthread_create() failed): out of memory or of processes (ulimit -v, ulimit -u)",
        ),
    ],
)
def test_task_that_says_that_memory_ran_out(start, code, words):
    assert start(code).how() == words
    assert start("raise ValueError").how() == "failed (1)"  # what it said before it was started again does not count


def test_oom_kills_are_counted(tmp_path, monkeypatch):
    """Of the machine and of the control groups, old and new; what is not there counts nothing."""
    for name, text in {
        "proc/vmstat": "nr_free_pages 7\noom_kill 1\n",
        "proc/self/cgroup": "4:cpu,memory:/a\n0::/b\n1:cpu:/c\n",
        "sys/fs/cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 20\n",
        "sys/fs/cgroup/b/memory.events": "oom 9\noom_kill 300\noom_group_kill 9\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(exit_reasons, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    assert exit_reasons.count_oom_kills() == 321


@pytest.fixture
def launched(parse, tmp_path, monkeypatch):
    """A function that launches a run whose tasks do nothing but call another function, and end with status 0."""
    server = contextlib.nullcontext(types.SimpleNamespace(problem=None, reserve_ports=range))

    def launched(does, num_evaluators=0):
        monkeypatch.setattr(launcher, "fork_server", lambda *_, **__: server)
        monkeypatch.setattr(launcher, "Supervisor", lambda *_: types.SimpleNamespace(run=does))
        monkeypatch.setattr(launcher, "_complete_result", lambda *_: None)
        monkeypatch.setattr(launcher.progress, "summary", lambda *_: None)
        settings = parse(f"--run_dir={tmp_path}").but(run=RunFacts("Scheme", num_evaluators=num_evaluators))
        return launcher._launch("scheme.py", [], settings)

    return launched


@pytest.mark.parametrize("is_there", [False, True])
def test_chief_that_ends_without_a_result_has_failed(launched, tmp_path, is_there):
    """An old one, of a run that is gone on with, is not shown as its own."""
    result = tmp_path / "result.json"
    if is_there:
        launcher.write_json(result, {"steps": 1})
    with pytest.raises(TrainingFailed, match=f"^worker 0 ended without writing {result}$"):
        launched(lambda: 0)
    assert launched(lambda: launcher.write_json(result, {"steps": 1}) or 0) == 0


def test_process_that_starts_the_tasks_ends_after_the_result_is_written(launched, tmp_path):
    """Worker 0 may not have ended yet: the run is finished. A result of an earlier run is none, nor is one that lacks the
    evaluator's."""
    result = tmp_path / "result.json"

    def ends():
        raise supervisor.StarterEnded("the process that starts the tasks was killed by SIGKILL")

    def writes_and_ends():
        launcher.write_json(result, {"steps": 1})
        ends()

    assert launched(writes_and_ends) == 0
    for does, evaluators in (ends, 0), (writes_and_ends, 1):
        with pytest.raises(TrainingFailed, match="^the process that starts the tasks was killed"):
            launched(does, evaluators)


@pytest.fixture
def assign(monkeypatch):
    """A function that assigns GPUs of a machine on which TensorFlow sees so many, and returns the settings."""

    def assign(text, count, num_workers=None, visible=None):
        monkeypatch.setattr(devices, "_count_gpus", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return devices.with_gpus(Settings(gpus=text, num_workers=num_workers or 2), num_workers is not None)

    return assign


@pytest.mark.parametrize(
    "text, count, more, gpus, num_workers",
    [
        ("all", 4, {}, ["0", "1", "2", "3"], 4),
        ("all", 1, {}, ["0"], 1),
        ("0,2", 4, {}, ["0", "2"], 2),
        ("3", 4, {"num_workers": 3}, ["3"], 3),
        ("all", 2, {"visible": "5,7"}, ["5", "7"], 2),
        ("1", 2, {"visible": "GPU-a,GPU-b"}, ["GPU-b"], 1),
        ("all", 0, {}, [], 2),
    ],
)
def test_gpus_and_workers(assign, text, count, more, gpus, num_workers):
    settings = assign(text, count, **more)
    assert (settings.gpus, settings.num_workers) == (gpus, num_workers)


def test_each_worker_has_its_gpu_and_the_ps_has_none(assign):
    settings = assign("all", 2, num_workers=3)
    tasks = [devices.devices_of(job, i, settings.gpus) for job, i in (("ps", 0), *(("worker", i) for i in range(3)))]
    assert [task["CUDA_VISIBLE_DEVICES"] for task in tasks] == ["-1", "0", "1", "0"]
    assert devices.say_gpus(settings) == "worker 0: GPU 0, worker 1: GPU 1, worker 2: GPU 0"


def test_workers_without_a_gpu(assign):
    settings = assign("all", 0)
    assert devices.devices_of("worker", 0, settings.gpus) == {}
    assert "no GPU" in devices.say_gpus(settings) and "CPU" in devices.say_gpus(settings)


@pytest.mark.parametrize(
    "text, texts",
    [
        ("2", ["names GPU 2", "TensorFlow sees only 2: 0 to 1"]),
        ("0,0", ["twice", "--num_workers"]),
        ("some", ["must be all, or GPU numbers such as 0,2", "'some'"]),
        ("-1", ["must be all"]),
        ("0,", ["must be all"]),
    ],
)
def test_gpus_that_cannot_be(assign, user_error, text, texts):
    with user_error(*texts):
        assign(text, 2)


def test_gpu_that_is_not_there_where_there_is_none(assign, user_error):
    with user_error("--gpus=0 names GPU 0, but TensorFlow sees none"):
        assign("0", 0)


def test_ps_computes_on_no_gpu():
    ps, worker = (TaskSpecDef(job, 0, ps_hosts="a:1", worker_hosts="b:1") for job in ("ps", "worker"))
    assert ps.config().device_count["GPU"] == 0 and "GPU" in ps.config().device_count
    assert "GPU" not in worker.config().device_count
