"""A cluster on three hosts with a network between them, not on one machine; and how ssh starts and ends one."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import machines
import pytest
from runs import (
    ENDLESS,
    HOGWILD,
    ROOT,
    SECONDS,
    finish,
    metrics_of,
    processes,
    read_until,
    result_of,
    updates_of,
    wait_until,
    wait_until_gone,
)

from common.core.flags import UserError
from common.launch import control

pytestmark = pytest.mark.cluster
START = ROOT / "Multiple-Machines" / "start.py"


@pytest.fixture(scope="module")
def hosts():
    """Three hosts, joined by a bridge."""
    machines.need()
    with machines.hosts.Hosts(3) as three:
        yield three


def test_hosts_are_apart(hosts):
    """Each has its own name and address, and its own ports: what listens on one is not on another."""
    assert [host.run("hostname").strip() for host in hosts] == ["host1", "host2", "host3"]
    serve = "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); s.accept()"
    server = subprocess.Popen(hosts[1].command(sys.executable, "-c", serve), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout and server.stdout.readline() == "up\n"
        connect = "import socket, sys; socket.create_connection((sys.argv[1], 5000), 5)"
        with pytest.raises(subprocess.CalledProcessError):
            hosts[0].run(sys.executable, "-c", connect, "host3")
        hosts[0].run(sys.executable, "-c", connect, "host2")
    finally:
        server.kill()
        server.communicate()


def cluster(hosts, run_dir, *flags):
    """The processes of a run of HogWild with its tasks on three hosts."""
    return machines.hosts.cluster(hosts, HOGWILD, f"--run_dir={run_dir}", *flags)


def ended(started):
    """Waits for the ends of tasks; returns what they printed."""
    outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outputs)
    return outputs


@pytest.mark.parametrize("properties, least", [({"bytes_per_second": 10e6}, 0.5), ({"delay": 0.02}, 0.08)])
def test_slow_links(properties, least):
    """They are as slow as they are said to be: 5 MB, and an answer, take at least so many seconds (on a fast link, 0.01)."""
    machines.need()
    serve = """
import socket
with socket.create_server(("", 5000)) as server:
    print("up", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
    connection.send(b"thanks")
"""
    send = """
import socket
connection = socket.create_connection(("host2", 5000))
connection.sendall(bytes(5_000_000))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(10) == b"thanks"
"""
    with machines.hosts.Hosts(2, **properties) as two:
        server = subprocess.Popen(two[1].command(sys.executable, "-c", serve), stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout and server.stdout.readline() == "up\n"
            began = time.monotonic()
            two[0].run(sys.executable, "-c", send)
            assert time.monotonic() - began >= 0.9 * least
        finally:
            server.kill()
            server.communicate()


def newest_step(run_dir, worker):
    """Returns the last global step in a worker's metrics so far."""
    return max((line["global_step"] for line in metrics_of(run_dir, worker)), default=0)


def wait_for_step(run_dir, worker, step, process):
    """Waits until a worker has reported a step after this one; returns the newest."""
    wait_until(process, lambda: newest_step(run_dir, worker) > step)
    return newest_step(run_dir, worker)


def test_three_hosts_train_though_a_link_is_cut_for_ten_seconds(hosts, tmp_path):
    """The worker behind it stands still, the other one goes on; afterwards both do, and the run ends well."""
    run_dir = tmp_path / "run"
    with cluster(hosts, run_dir, *ENDLESS, "--seconds=18", "--delays=5,5") as started:
        for worker in (0, 1):
            wait_for_step(run_dir, worker, 0, started[1])
        hosts.cut(2)
        try:
            began = time.monotonic()
            # The call of the second line began after the cut: it knows of all updates that worker 1 can have heard of.
            known = newest_step(run_dir, 0)
            for _ in range(2):
                known = wait_for_step(run_dir, 0, known, started[1])
            time.sleep(max(0.0, began + 10 - time.monotonic()))  # the link is cut for so long at least
            there = newest_step(run_dir, 1)
            assert there <= known
            wait_for_step(run_dir, 0, known, started[1])
        finally:
            hosts.mend(2)
        wait_for_step(run_dir, 1, there, started[2])
        ended(started)
    result = result_of(run_dir)
    assert (result["num_ps"], result["num_workers"]) == (1, 2)
    assert result["test_accuracy"] >= 0.95


def start(host, ssh, *arguments):
    """Starts start.py on a host, with what it prints in a pipe."""
    return subprocess.Popen(
        host.command(sys.executable, str(START), *map(str, arguments)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "SSH": ssh},
    )


@pytest.fixture
def by_ssh(hosts, tmp_path):
    """A function that starts a run by ssh on all three hosts: a ps on the first, a worker on each other."""
    machines.need("ssh", "ssh-keygen", "/usr/sbin/sshd")
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("# a comment\nps host1:2300\n\nworker host2:2300  # the chief\n" + f"worker host3:2300 {ROOT}\n")
    started = []
    with machines.hosts.ssh_to(hosts, tmp_path) as ssh:

        def by_ssh(*flags, scheme="HogWild"):
            started.append(start(hosts[0], ssh, hosts_file, scheme, f"--run_dir={tmp_path / 'run'}", *flags))
            return started[-1]

        yield by_ssh
        for process in started:
            process.kill()
        for pid in processes(tmp_path / "run"):  # of a test that failed: what is left would keep the pipe to us open
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.communicate(timeout=SECONDS)


MODEL = """
import numpy as np

def build():
    import keras

    # Its units never fire, so nothing changes what marks its parameters.
    marked = keras.layers.Dense(64, "relu", kernel_initializer="zeros", bias_initializer=keras.initializers.Constant({mark}))
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), marked, keras.layers.Dense(10)])
"""
MARK = -12345.678  # a parameter, of which 64 are sent one after the other
LISTEN = """
import socket, struct, sys

wanted = struct.pack("<f", float(sys.argv[1])) * 8  # of 64, which begin and end in any packet
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as wire:  # 3: every protocol
    wire.setsockopt(socket.SOL_SOCKET, 33, 2**26)  # SO_RCVBUFFORCE
    print("listening", flush=True)
    heard = 0
    while heard < int(sys.argv[2]):
        packet = wire.recv(2**17)
        heard += len(packet)
        if wanted in packet:
            print("found", flush=True)
            break
    else:
        print("not found", flush=True)
"""


def marked_is_heard(hosts, count=20_000_000):
    """Whether somebody on the bridge sees marked parameters among the next so many bytes."""
    command = hosts.bridge.command(sys.executable, "-c", LISTEN, str(MARK), str(count))
    heard = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert heard.stdout in ("listening\nfound\n", "listening\nnot found\n"), heard.stderr
    return heard.stdout.endswith("\nfound\n")


def listening_at(host):
    """The TCP ports at which anybody listens on a host, as `ss -ltn` tells them."""
    return {int(line.split()[3].rpartition(":")[2]) for line in host.run("ss", "-ltnH").splitlines()}


def sockets_of(pids):
    """The folders of sockets that are named on the command lines of these processes."""
    return {Path(found) for pid in pids for found in re.findall(r"/tmp/doors-\w+", said_of(pid, "cmdline"))}


def marked(tmp_path):
    """The flag of the marked model."""
    (tmp_path / "model.py").write_text(MODEL.format(mark=MARK))
    return [f"--model={tmp_path}/model.py:build"]


def start_to_train(by_ssh, tmp_path, scheme="HogWild"):
    """Starts a run of the marked model, and waits until both workers train; returns its process and those of its tasks."""
    process = by_ssh(*ENDLESS, "--delays=10,10", "--checkpoint_secs=600", *marked(tmp_path), scheme=scheme)
    for worker in (0, 1):
        wait_for_step(tmp_path / "run", worker, 0, process)
    return process, processes(tmp_path / "run")


def test_nobody_hears_or_reaches_the_tasks_and_ctrl_c_ends_all(by_ssh, hosts, tmp_path):
    process, pids = start_to_train(by_ssh, tmp_path, "DOWNPOUR")
    folders = sockets_of(pids)
    assert len(pids) >= 4 and len(folders) == 4  # on each host, and where it all began
    assert [listening_at(host) for host in hosts] == [{22}] * 3
    assert not marked_is_heard(hosts)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, output
    assert "stopping; Ctrl-C again stops at once" in output
    assert "asked to end: waits until the workers have left" in output  # the ps; it is told first
    for line in "    ps 0 | ps 0 serves at host1:2300", "worker 0 | step", "worker 1 | step":
        assert line in output
    assert "Killed" not in output  # as bash says of what it started and we ended
    assert wait_until_gone(pids) == [] and not any(folder.exists() for folder in folders)
    assert saved_at(tmp_path) > 0


def said_of(pid, file):
    """What /proc says of a process in this file: its words, or its variables."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").replace("\0", " ")
    return ""


def saved_at(tmp_path):
    """The step of the newest checkpoint."""
    return max(int(path.name.partition("-")[2].partition(".")[0]) for path in tmp_path.glob("run/checkpoints/*.index"))


def test_a_worker_that_is_killed_ends_all_by_ssh(by_ssh, tmp_path):
    """The others are stopped, and the chief saves."""
    process, pids = start_to_train(by_ssh, tmp_path)
    folders = sockets_of(pids)
    os.kill(task_of(tmp_path / "run", 1), signal.SIGKILL)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, output
    assert "worker 1 ended with exit status 137; the others are stopped" in output
    assert " port -2 failed" not in output  # as ssh says where nobody is there
    assert wait_until_gone(pids) == [] and not any(folder.exists() for folder in folders)
    assert saved_at(tmp_path) > 0


LIGHT = """
import json, os, signal, sys

is_worker = json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker"
signal.signal(signal.SIGTERM, lambda *_: is_worker and sys.exit(print("is asked to end", flush=True)))
print("begins", flush=True)
while True:
    signal.pause()
"""


def start_light_tasks(by_ssh, tmp_path):
    """Starts tasks that train nothing, of which a ps waits for ever; returns the process of the run and those of its tasks."""
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "light.py").write_text(LIGHT)
    (tmp_path / "light" / "run.sh").write_text(f'exec {sys.executable} {tmp_path}/light/light.py "$@"\n')
    process = by_ssh(scheme=str(tmp_path / "light"))
    for _ in range(3):
        read_until(process, lambda line: line.endswith(" | begins\n"))
    return process, processes(tmp_path / "run")


def test_no_task_outlives_what_started_it_by_ssh(by_ssh, tmp_path):
    process, pids = start_light_tasks(by_ssh, tmp_path)
    process.kill()
    pids.remove(process.pid)
    assert len(pids) >= 3
    assert wait_until_gone(pids) == []


def test_a_connection_that_is_killed_ends_all_by_ssh(by_ssh, tmp_path):
    """The task behind it is killed, and the chief is asked to end, as when a worker is killed."""
    process, pids = start_light_tasks(by_ssh, tmp_path)
    folders = sockets_of(pids)
    os.kill(connection_of(tmp_path / "run", 1), signal.SIGKILL)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, output
    assert "worker 1 ended with exit status -9; the others are stopped\n" in output
    assert "worker 0 | is asked to end\n" in output and "worker 1 | is asked to end" not in output
    assert wait_until_gone(pids) == [] and not any(folder.exists() for folder in folders)


STOP = """
from pathlib import Path


def stop(step, metrics):
    return Path(__file__).with_name("stop").exists()
"""


@contextlib.contextmanager
def with_places(by_ssh, tmp_path, *flags):
    """A run of HogWild of two workers at first that trains until the context ends, and then has to end well."""
    (tmp_path / "callback.py").write_text(STOP)
    flags = (*flags, *ENDLESS, "--delays=20,20", "--evaluation_secs=0.2", f"--callback={tmp_path}/callback.py:stop")
    process = by_ssh(*flags)
    wait_for_step(tmp_path / "run", 0, 0, process)
    yield process
    (tmp_path / "stop").touch()
    finish(process)


def join(tmp_path, *lines):
    """Asks that the workers in these lines of a hosts file join; returns status and output."""
    path = tmp_path / "more-hosts"
    path.write_text("".join(f"{line}\n" for line in lines))
    command = [sys.executable, str(START), f"--join={path}", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout + done.stderr


def wait_until_it_comes(process, run_dir, worker, times=1):
    """Waits until a worker has joined so often, and then trained."""

    def trains():
        lines = metrics_of(run_dir, worker)
        came = [i for i, line in enumerate(lines) if "came" in line]
        return len(came) >= times and any("samples" in line for line in lines[came[-1] :])

    wait_until(process, trains)


def wait_for_lines(process, run_dir, count):
    """Waits until worker 0 has written so many further lines of metrics about updates; returns all of them."""

    def lines():
        return [line for line in metrics_of(run_dir, 0) if "staleness" in line]

    before = len(lines())
    wait_until(process, lambda: len(lines()) >= before + count)
    return lines()


def task_of(run_dir, worker):
    """The process of a worker itself, behind its doors."""
    said = f'"type": "worker", "index": {worker}'
    found = [pid for pid in processes(run_dir, str(HOGWILD)) if said in said_of(pid, "environ")]
    (task,) = (pid for pid in found if "doors.py" not in said_of(pid, "cmdline"))
    return task


def connection_of(run_dir, worker):
    """The process of ssh that leads to a worker."""
    lines = {pid: said_of(pid, "cmdline") for pid in processes(run_dir)}
    said = f'"type": "worker", "index": {worker}'
    (connection,) = (pid for pid, line in lines.items() if line.startswith("ssh ") and said in line)
    return connection


def test_workers_join_leave_and_are_lost_by_ssh(by_ssh, tmp_path):
    """On a host that had none, and on that of the ps, where start.sh runs. One leaves as it is asked to here, one by SIGTERM
    there: no update is lost. Another one takes its place on another host, and its connection is killed; the next one there is
    killed itself. With places the others go on without it, and the place is free."""
    run_dir = tmp_path / "run"
    with with_places(by_ssh, tmp_path, "--num_workers=1", "--max_workers=3") as process:
        refused = [
            ("worker host2:2300", "all workers of the hosts file are already running: add a line, `worker HOST:PORT`"),
            ("worker host1:2300", "host1:2300 is the address of ps 0: give a worker another port"),
            (f"worker host3:2300 {tmp_path}/none", "workers on host3 cannot join: it ended with exit status 1"),
        ]
        for line, why in refused:
            assert join(tmp_path, line) == (2, f"start.sh: {why}\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control, "version", lambda *_: "another")
            with pytest.raises(UserError, match="the code has changed since the run began, or is another checkout's"):
                control.ask(run_dir, "join", 1, [("host3:2300", str(ROOT))])
        more_hosts = ["ps host1:2300", "worker host2:2300", "worker host3:2300", "worker host1:2301"]
        assert join(tmp_path, *more_hosts) == (0, "worker 1, worker 2 join\n")
        for worker in 1, 2:
            wait_until_it_comes(process, run_dir, worker)
        full = "start.sh: 0 of the 3 places of the run are free, too few for 1: "
        assert join(tmp_path, "worker host3:2301")[1].startswith(full)
        pids = [task_of(run_dir, worker) for worker in (1, 2)]
        assert control.leave(run_dir) == "worker 2 is asked to leave"
        assert "worker 2 | worker 2 has left after" in read_until(process, lambda line: "has left after" in line)
        read_until(process, lambda line: line == "the place of worker 2 is free\n")
        os.kill(pids[0], signal.SIGTERM)
        assert "worker 1 | worker 1 has left after" in read_until(process, lambda line: "has left after" in line)
        assert wait_until_gone(pids) == []
        trained = wait_for_lines(process, run_dir, 2)  # the call of the second line began when worker 0 was alone
        counted = sum(sum(line["staleness"].values()) for line in trained)
        assert counted + updates_of(run_dir, 1) + updates_of(run_dir, 2) == trained[-1]["global_step"]
        wait_until(process, lambda: join(tmp_path, "worker host2:2301") == (0, "worker 1 joins\n"))  # when ssh has ended, too
        for times, of, status in (2, connection_of, -9), (3, task_of, 137):
            wait_until_it_comes(process, run_dir, 1, times)
            wait_for_step(run_dir, 0, newest_step(run_dir, 0), process)
            killed = [of(run_dir, 1), task_of(run_dir, 1)]
            os.kill(killed[0], signal.SIGKILL)
            said = read_until(process, lambda line: line.startswith("worker 1 ended with exit status"))
            assert said == f"worker 1 ended with exit status {status}; the others go on without it\n"
            said = read_until(process, lambda line: " was lost" in line)
            assert "worker 1 | worker 1 was lost: it is neither restarted nor waited for" in said
            read_until(process, lambda line: line == "the place of worker 1 is free\n")
            assert wait_until_gone(killed) == []
            wait_for_step(run_dir, 0, newest_step(run_dir, 0), process)
            if of is connection_of:
                assert join(tmp_path, "worker host3:2300") == (0, "worker 1 joins\n")
        wait_for_step(run_dir, 0, 1000, process)  # by which the accuracy is reached
        pids, folders = processes(run_dir), sockets_of(processes(run_dir))
    assert wait_until_gone(pids) == [] and not any(folder.exists() for folder in folders) and not (run_dir / "control").exists()
    result = result_of(run_dir)
    assert result["samples"] == 32 * result["global_steps"]
    assert result["num_workers"] == 3 and [left["worker"] for left in result["left"]] == [1, 2]
    assert result["test_accuracy"] >= 0.95


def test_insecure_workers_join_where_all_on_the_wire_hear_and_reach_them(by_ssh, hosts, tmp_path):
    """At the addresses that were reserved, and at no other."""
    run_dir = tmp_path / "run"
    flags = "--insecure", "--num_workers=1", "--max_workers=2", *marked(tmp_path)
    with with_places(by_ssh, tmp_path, *flags) as process:
        assert process.stdout.readline().startswith(
            "--insecure: anyone who reaches a port of a task can read and change all, and run programs as"
        )
        assert join(tmp_path, "worker host3:2301")[1].startswith(
            "start.sh: host3:2301 is not a free place of this run: with --insecure the hosts file at its start fixes the"
        )
        assert join(tmp_path, "worker host3:2300") == (0, "worker 1 joins\n")
        wait_until_it_comes(process, run_dir, 1)
        assert [listening_at(host) for host in hosts] == [{22, 2300}] * 3
        assert marked_is_heard(hosts)
        assert sockets_of(processes(run_dir)) == set()
        assert control.leave(run_dir) == "worker 1 is asked to leave"
        read_until(process, lambda line: line == "the place of worker 1 is free\n")
    result = result_of(run_dir)
    assert sum(updates_of(run_dir, worker) for worker in range(2)) == result["global_steps"]
    assert [left["worker"] for left in result["left"]] == [1]


def test_a_task_that_fails_by_ssh_ends_the_others(by_ssh, tmp_path):
    process = by_ssh("--window=0")
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, output
    assert "hogwild.py: --window must be at least 1, not 0" in output and "Traceback" not in output


@pytest.mark.parametrize(
    "hosts_file, arguments, texts",
    [
        ("ps a:1\nworker b:2", ["NoSuch"], ["there is no", "NoSuch/run.sh"]),
        ("ps a:1\nworker b:2", [], ["expected: bash Multiple-Machines/start.sh [--insecure] HOSTS_FILE SCHEME"]),
        ("ps a:1\nworker b:2", ["--insecure"], ["expected: bash Multiple-Machines/start.sh [--insecure] HOSTS_FILE SCHEME"]),
        ("ps a:1\nworker b:2", ["--steps=1"], ["expected: bash Multiple-Machines/start.sh [--insecure] HOSTS_FILE SCHEME"]),
        (None, ["HogWild"], ["cannot be read", "No such file"]),
        ("ps a:1\nchief b:2", ["HogWild"], ["line 2", "expected ps or worker, HOST:PORT", "'chief b:2'"]),
        ("ps\nworker b:2", ["HogWild"], ["line 1", "ps lacks its address"]),
        ("ps a\nworker b:2", ["HogWild"], ["'a' is not an address", "expected host:port"]),
        ("ps a:1", ["HogWild"], ["names no worker"]),
        ("", ["HogWild"], ["names no ps"]),
        ("ps a:1\nworker b\0:2", ["HogWild"], ["line 2", "a character that is not text"]),
        ("ps a:1 /fol\0der\nworker b:2", ["HogWild"], ["line 1", "a character that is not text"]),
        ("ps a:1\nworker b\x1b:2", ["HogWild"], ["line 2", "a character that is not text"]),
        ("ps -oProxyCommand=reboot:1\nworker b:2", ["HogWild"], ["the ps '-oProxyCommand=reboot:1' is not an address"]),
        ("ps a:1\nworker b:2\nworker b:2", ["HogWild"], ["b:2 is the address of worker 0 and of worker 1"]),
        ("ps a:1\nworker a:1", ["HogWild"], ["a:1 is the address of ps 0 and of worker 0"]),
        ("ps a:1\nworker b:2", ["HogWild", "--max_workers=0"], ["--max_workers must be a whole number from 1 to 256, not '0'"]),
        (
            "ps a:1\nworker b:2",
            ["HogWild", "--max_workers=4", "--num_workers=2"],
            ["--num_workers must be", "from 1 to 1, not '2'"],
        ),
        ("ps a:1\nworker b:2\nworker b:3", ["HogWild", "--max_workers", "1"], ["--max_workers=1 is less than the 2 workers"]),
        (
            "ps a:1\nworker b:2",
            ["--insecure", "HogWild", "--max_workers=2"],
            ["each place needs an address", "names 1", "name one worker for each place"],
        ),
    ],
)
def test_bad_input_to_start(tmp_path, hosts_file, arguments, texts):
    path = tmp_path / "hosts"
    if hosts_file is not None:
        path.write_text(hosts_file)
    refuses_to_start([path, *arguments], texts)


@pytest.mark.parametrize(
    "ssh, texts",
    [
        ("", ['SSH is empty: expected a command such as SSH="ssh -i KEY"']),
        ("  ", ["SSH is empty"]),
        ("ssh -i 'key", ["SSH=ssh -i 'key cannot be split into words: no closing quotation"]),
        ("no-such-ssh -v", ["SSH=no-such-ssh -v: there is no program no-such-ssh"]),
        ("/dev/null", ["there is no program /dev/null"]),
        (None, ["there is no program ssh; install OpenSSH's client"]),  # on an empty PATH
    ],
)
def test_no_way_to_reach_the_hosts(tmp_path, ssh, texts):
    path = tmp_path / "hosts"
    path.write_text("ps a:1\nworker b:2")
    environ = {name: value for name, value in os.environ.items() if name != "SSH"}
    environ |= {"PATH": str(tmp_path)} if ssh is None else {"SSH": ssh}
    refuses_to_start([path, "HogWild"], texts, environ)


def refuses_to_start(arguments, texts, environ=None):
    """Asserts that start.py ends with one line that holds these texts, and starts nothing."""
    command = [sys.executable, str(START), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("start.sh: ") and done.stderr.count("\n") == 1
    for text in texts:
        assert text in done.stderr


def test_a_host_is_never_an_option(tmp_path):
    """A `--` before it tells ssh so; here a program shows its arguments."""
    show = tmp_path / "show"
    show.write_text('#!/bin/sh\nfor word in "$1" "$2" "$3"; do echo "($word)"; done\n')
    show.chmod(0o700)
    (tmp_path / "hosts").write_text("ps a:1\nworker b:2\n")
    command = [sys.executable, str(START), str(tmp_path / "hosts"), "HogWild", "--insecure"]
    environ = {**os.environ, "SSH": f"{show} -x"}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environ)
    said = shown.stdout.splitlines()
    for name, host in ("    ps 0", "a"), ("worker 0", "b"):
        assert [line for line in said if line.startswith(f"{name} |")] == [f"{name} | ({word})" for word in ("-x", "--", host)]
    with_rooms = subprocess.run(command[:-1], capture_output=True, text=True, timeout=SECONDS, env=environ)
    assert (with_rooms.returncode, with_rooms.stderr) == (1, "")
    for host in "ab":
        said = [line for line in with_rooms.stdout.splitlines() if line.startswith(f"{host} |")]
        assert said in ([], [f"{host} | ({word})" for word in ("-x", "--", host)])  # nothing, if the other one ended first
