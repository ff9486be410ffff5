"""Closed doors between hosts: relays in and out of the network of a task, and what ssh has to forward."""

import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys

import pytest
from runs import ROOT, SECONDS, wait_until_gone

FILE = ROOT / "Multiple-Machines" / "doors.py"
spec = importlib.util.spec_from_file_location("doors", FILE)
assert spec and spec.loader
doors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(doors)


@pytest.fixture
def task(tmp_path):
    """A function that starts a Python program in a network of its own, with the doors to others that it is told."""
    started = []

    def task(program, *others, port=10001, name="in"):
        description = {"port": port, "socket": str(tmp_path / name), "others": list(others)}
        command = [sys.executable, str(FILE), "task", json.dumps(description), sys.executable, "-c", program]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield task
    for process in started:
        process.kill()
        process.communicate()


SERVE = """
import socket
with socket.create_server(("", 10001)) as server:
    print("up", flush=True)
    connection, _ = server.accept()
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    connection.sendall(received[::-1])
"""
ASK = """
import socket
connection = socket.create_connection(("127.0.0.2", 10001))
connection.sendall(bytes(range(256)) * 40_000)
connection.shutdown(socket.SHUT_WR)
answer = b""
while part := connection.recv(1 << 16):
    answer += part
print(answer == (bytes(range(256)) * 40_000)[::-1])
"""


@pytest.mark.slow
def test_a_message_of_ten_megabytes_passes_and_its_end_and_the_answer(task, tmp_path):
    """From one task's network into another's, by Unix sockets; the server answers when it has seen the end of the message."""
    server = task(SERVE)
    assert server.stdout.readline() == "up\n"
    client = task(ASK, ["127.0.0.2", 10001, str(tmp_path / "in")], port=10002, name="client")
    assert client.communicate(timeout=SECONDS)[0] == "True\n"
    assert server.wait(SECONDS) == 0


@pytest.mark.slow
def test_who_is_not_there_closes_the_connection(task, tmp_path):
    """Neither a socket that does not exist, nor one behind which nobody listens, leaves a task waiting."""
    nobody = tmp_path / "nobody"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(nobody))
    ask = """
import socket
for host in "127.0.0.2", "127.0.0.3":
    try:
        print(socket.create_connection((host, 10001)).recv(1))
    except ConnectionError:
        print(b"")
"""
    others = [["127.0.0.2", 10001, str(tmp_path / "none")], ["127.0.0.3", 10001, str(nobody)]]
    assert task(ask, *others).communicate(timeout=SECONDS)[0] == "b''\nb''\n"


@pytest.mark.slow
def test_a_server_that_is_killed_ends_the_connection_of_its_client(task, tmp_path):
    server = task(SERVE)
    assert server.stdout.readline() == "up\n"
    ask = """
import socket
connection = socket.create_connection(("127.0.0.2", 10001))
connection.sendall(b"x")
print("sent", flush=True)
try:
    print(connection.recv(1))
except ConnectionError:
    print(b"")
"""
    client = task(ask, ["127.0.0.2", 10001, str(tmp_path / "in")], port=10002, name="client")
    assert client.stdout.readline() == "sent\n"
    server.kill()
    assert client.communicate(timeout=SECONDS)[0] == "b''\n"


LOOK = """
import os, socket, sys
print(os.readlink("/proc/self/ns/net"), os.getpid(), [name for _, name in socket.if_nameindex()].count("eth0"))
with open("/proc/self/status") as status:
    print(*[line.split()[1] for line in status if line.startswith(("CapEff:", "CapPrm:", "CapBnd:", "NoNewPrivs:"))])
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_task_has_a_network_of_its_own_and_no_power(task):
    process = task(LOOK)
    network, _, count = process.stdout.readline().split()
    assert network != os.readlink("/proc/self/ns/net") and count == "0"
    assert process.stdout.readline().split() == ["0" * 16, "0" * 16, "0" * 16, "1"]
    assert process.communicate(timeout=SECONDS) and process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_task_ends_with_its_relays(task, number, status):
    """SIGTERM is the task's own to heed; when the relays are killed, it is, too."""
    process = task(LOOK)
    pid = int(process.stdout.readline().split()[1])
    process.stdout.readline()
    assert pid != process.pid
    process.send_signal(number)
    assert wait_until_gone([pid]) == []
    assert process.wait(SECONDS) == status


@pytest.mark.slow
@pytest.mark.parametrize("end, status", [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 128 + 9)])
def test_status_of_a_task(task, end, status):
    assert task(f"import os, sys; {end}").wait(SECONDS) == status


def room(*words, **options):
    """The process of a room."""
    command = [*options.pop("before", []), sys.executable, str(FILE), "room", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
def test_room():
    """Its folder is the user's alone, and gone when the input ends."""
    with room("3", "5") as process:
        assert process.stdin and process.stdout
        line = process.stdout.readline()
        assert line.startswith(doors.ROOM)
        made = json.loads(line.removeprefix(doors.ROOM))
        assert made["place"] == doors.place()
        assert os.stat(made["folder"]).st_mode & 0o777 == 0o700
        assert sorted(os.listdir(made["folder"])) == ["3", "5"]
        process.stdin.close()
        assert process.wait(SECONDS) == 0
        assert not os.path.exists(made["folder"])


@pytest.mark.slow
def test_room_whose_input_is_bad(tmp_path):
    """What looks at the input decides; it has the network of the machine, to download what is missing."""
    look = f"import os, sys; print(os.readlink('/proc/self/ns/net') == {os.readlink('/proc/self/ns/net')!r}); sys.exit(2)"
    with room("0", "--", sys.executable, "-c", look) as process:
        assert process.communicate(timeout=SECONDS)[0] == "True\n"
        assert process.returncode == 2


FORBID = ["unshare", "--user", "--map-root-user", "sh", "-c", 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"', "sh"]
WHY = "the system forbids it; `sudo sysctl user.max_net_namespaces=10000` allows it"


@pytest.mark.slow
def test_room_where_tasks_can_have_no_network(tmp_path):
    with room("0", before=FORBID) as process:
        assert process.communicate(timeout=SECONDS)[0] == f"{doors.REFUSED}{WHY}\n"
        assert process.returncode == 2


def start(tmp_path, *flags, instead_of_host_a='sh -c "$2"'):
    """Runs start.py with a ps on `a` and a worker on `b`; a program takes the place of ssh, and runs the commands here."""
    ssh = tmp_path / "ssh"
    on_host = f'shift\n[ "$1" = a ] || exec sh -c "$2"\n{instead_of_host_a}\n'
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n' + on_host)
    ssh.chmod(0o700)
    (tmp_path / "hosts").write_text("ps a:1\nworker b:2\n")
    command = [sys.executable, str(FILE.with_name("start.py")), str(tmp_path / "hosts"), "HogWild", f"--run_dir={tmp_path}/run"]
    environ = {**os.environ, "SSH": str(ssh)}
    return subprocess.run([*command, *flags], env=environ, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.slow
def test_a_host_that_allows_no_network_starts_nothing(tmp_path):
    """One line says so, and what to do."""
    done = start(tmp_path, instead_of_host_a=f'{shlex.join(FORBID)} sh -c "$2"')
    line = f"start.sh: a allows its tasks no network of their own: {WHY}; start.sh --insecure runs without one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_data_that_a_host_cannot_use_starts_nothing(tmp_path):
    (tmp_path / "d.py").write_text("def load():\n    return 1")
    done = start(tmp_path, f"--data={tmp_path}/d.py:load")
    assert (done.returncode, done.stderr) == (2, "")
    first, *_, last = done.stdout.splitlines()
    assert re.fullmatch(rf"[ab] \| hogwild.py: --data={tmp_path}/d.py:load .+", first)
    assert re.fullmatch("[ab] ended with exit status 2; nothing was started", last)
    assert not (tmp_path / "run").exists()


def two_places():
    """Doors of a ps and a worker here, and two workers on each of two other hosts."""
    here, b, c = ({"folder": f"/{name}", "place": name} for name in ("here", "b", "c"))
    addresses = ["a:1", "a:2", "b:1", "b:2", "c:1", "c:2"]
    return doors.Doors(here | {"folder": "/hub"}, list(zip(addresses, [here, here, b, b, c, c], strict=True)))


def test_addresses():
    """Tasks of one host share an address; each task has a port of its own; what is said of them is what the user calls them."""
    made = two_places()
    inside = list(map(made.inside, range(6)))
    hosts = ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2 + ["127.0.0.3"] * 2
    assert inside == [f"{host}:{10001 + i}" for i, host in enumerate(hosts)]
    assert (
        made.outside("ps 0 at 127.0.0.1:10001, not 127.0.0.1:10003, 127.0.0.3:10006") == "ps 0 at a:1, not 127.0.0.1:10003, c:2"
    )


def leads_to(made, i, k, tasks=range(6)):
    """Follows the sockets from task i to task k as relays and ssh would; returns the folders of those on the way."""
    address, port = made.inside(k).split(":")
    (path,) = [path for at, of, path in made.of_task(i)["others"] if (at, str(of)) == (address, port)]
    forwards = {}
    for task in tasks:
        words = [word for word in made.options(task) if not word.startswith("-o")]
        for option, word in zip(words[::2], words[1::2], strict=True):
            assert option in ("-L", "-R")
            bound, target = word.split(":")
            assert bound not in forwards
            forwards[bound] = target
    passed = [path]
    while path in forwards:
        path = forwards[path]
        passed.append(path)
    assert path == made.of_task(k)["socket"]
    return [path.split("/")[1] for path in passed]


def test_every_task_reaches_every_other_by_the_shortest_way():
    made = two_places()
    assert made.options(0) == made.options(1) == []
    place = ["here", "here", "b", "b", "c", "c"]
    for i in range(6):
        assert len(made.of_task(i)["others"]) == 5
        for k in set(range(6)) - {i}:
            here, there = place[i], place[k]
            if here == there:
                expected = [there]
            elif here == "here":
                expected = ["hub", there]  # bound here by ssh -L
            elif there == "here":
                expected = [here, there]  # bound there by ssh -R
            else:
                expected = [here, "hub", there]
            assert leads_to(made, i, k) == expected


def test_no_task_of_a_cluster_in_one_place_needs_ssh():
    room = {"folder": "/b", "place": "b"}
    made = doors.Doors({"folder": "/hub", "place": "here"}, [("b:1", room), ("b:2", room)])
    assert [made.options(i) for i in range(2)] == [[], []]


def test_workers_join_wherever_they_are(tmp_path):
    """A ps and a worker in one place, start.sh in another, and two workers that come one after the other into the third task's
    stead: from elsewhere, from where the ps is, from where start.sh runs. The ps reaches each by the same first socket."""
    here, b, c = ({"folder": f"/{name}", "place": name} for name in ("here", "b", "c"))
    hub = {"folder": str(tmp_path), "place": "here"}
    made = doors.Doors(hub, [("b:1", b), ("b:2", b), None], may_change=[2])
    inside = made.inside(2)
    assert [at for at, *_ in made.of_task(0)["others"]] == ["127.0.0.1", inside.split(":")[0]]
    assert made.outside(inside) == inside
    before = made.of_task(0), made.options(0)
    assert f"/b/0/2:{tmp_path}/2" in made.options(0)
    ways = {"c": (c, ["c"]), "b": (b, ["b"]), "here": (here, [])}
    for name, (room, there) in ways.items():
        (tmp_path / "2").touch()  # left by the one before
        made.take(2, f"{name}:9", room)
        assert not (tmp_path / "2").exists()
        assert made.outside(inside) == f"{name}:9" and made.inside(2) == inside
        assert leads_to(made, 0, 2, range(3)) == ["b", tmp_path.parts[1], *there]
        assert leads_to(made, 2, 0, range(3))[-1] == "b"
        assert before == (made.of_task(0), made.options(0))


@pytest.mark.parametrize("words", [[], ["other"], ["task"], ["task", "no JSON", "true"], ["task", "{}"]], ids=str)
def test_words_that_start_does_not_give_are_one_line(words, capsys):
    with pytest.raises(SystemExit, match="expected room TASK..., or task DOORS COMMAND..., as start.sh gives it"):
        doors.main(*words)
