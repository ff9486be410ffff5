"""Measures what closed doors cost: `bash Multiple-Machines/doors_cost.sh`, as root; `apt-get install openssh-server socat`.

Two hosts on this machine (`hosts.py`); the first one starts everything, as a host with the ps would. A client on the second
sends to a server on the first, and gets one byte back: by the open link; by ssh alone (`-R`, a port); by ssh and socat; and as
`start.sh` does it, by ssh and the relays of `doors.py`. With `--train` instead, DOWNPOUR trains on three hosts, with
`--insecure` and without. Figures are medians of --rounds rounds, in each of which all take their turn.
"""

import argparse
import contextlib
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hosts
from doors import OPTIONS, Doors

HERE = Path(__file__).resolve().parent
MESSAGES = {"1 B": (1, 200), "104 kB": (104_488, 100), "40 MB": (40_000_000, 5)}  # bytes, and how many are sent
BIG = """
def build():
    import keras

    layers = [keras.layers.Dense(3100, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers, keras.layers.Dense(10)])
"""
OF_BIG = ["--model={folder}/big.py:build", "--learning_rate=0.001"]
RUNS = {
    "the digits, `--window=20`": ["--window=20"],
    "10 M parameters, `--window=20`": ["--window=20", *OF_BIG],
    "10 M parameters, `--window=1`": ["--window=1", *OF_BIG],
}


def main():
    """Runs all, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--train", action="store_true", help="only: how fast DOWNPOUR trains")
    options = parser.parse_args()
    problem = hosts.why_not()
    if options.rounds < 1 or problem:
        parser.error(problem or "--rounds must be at least 1")
    os.chdir(HERE.parent)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, hosts.Hosts(3) as three, hosts.ssh_to(three, folder) as ssh:
        measured = (of_training if options.train else of_links)(three, ssh, folder, options.rounds)
    print("\n" + measured)


def of_links(three, ssh, folder, rounds):
    """Returns a table: seconds that messages take on each way."""
    ways = {"open link": by_open_link, "ssh": by_ssh, "ssh and socat": by_socat, "`start.sh`: ssh and doors.py": by_doors}
    found: dict[str, list] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, by in ways.items():
            with tempfile.TemporaryDirectory(dir="/tmp") as new, contextlib.ExitStack() as stack:
                found[way].append(json.loads(by(three, ssh, new, stack)))
                print(way, found[way][-1], flush=True)
    lines = ["| | GB/s, messages of 40 MB | 104 kB and an answer | 1 byte and an answer |", "|---|---:|---:|---:|"]
    for way, of_one in found.items():
        secs = {name: statistics.median(one[name] for one in of_one) for name in MESSAGES}
        lines.append(f"| {way} | {0.04 / secs['40 MB']:.2f} | {1e3 * secs['104 kB']:.2f} ms | {1e3 * secs['1 B']:.2f} ms |")
    return "\n".join(lines)


def started(command, stack, sign="up"):
    """Starts a command, waits until it says that it is `up`, and lets `stack` end it."""
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    assert process.stdout
    assert any(sign in line for line in process.stdout), f"{shlex.join(command)} does not start"


def serve(port):
    """Answers each message with a byte."""
    with socket.create_server(("", port)) as server:
        print("up", flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                buffer = memoryview(bytearray(2**20))
                while head := connection.recv(8):
                    left = int.from_bytes(head, "big")
                    while left:
                        left -= connection.recv_into(buffer[: min(left, len(buffer))])
                    connection.sendall(b"k")


def send(address, port):
    """Prints the seconds, median, that a message of each size and its answer take."""
    secs = {}
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, (size, count) in MESSAGES.items():
            message, taken = size.to_bytes(8, "big") + bytes(size), []
            for _ in range(count + 1):
                began = time.perf_counter()
                connection.sendall(message)
                assert connection.recv(1) == b"k"
                taken.append(time.perf_counter() - began)
            secs[name] = statistics.median(taken[1:])
    print(json.dumps(secs))


SERVE = [sys.executable, str(HERE / "doors_cost.py"), "serve", "10001"]
SEND = [sys.executable, str(HERE / "doors_cost.py"), "send"]


def by_open_link(three, ssh, folder, stack):
    started(three[0].command(*SERVE), stack)
    return three[1].run(*SEND, "host1", "10001")


def by_ssh(three, ssh, folder, stack):
    started(three[0].command(*SERVE), stack)
    forward = [*shlex.split(ssh), *OPTIONS, "-R", "127.0.0.1:10002:127.0.0.1:10001", "host2"]
    started(three[0].command(*forward, "echo up; read -r x"), stack)
    return three[1].run(*SEND, "127.0.0.1", "10002")


def by_socat(three, ssh, folder, stack):
    started(three[0].command(*SERVE), stack)
    socat = ["socat", "-b", "1048576"]
    relays = {
        0: [f"UNIX-LISTEN:{folder}/in,fork", "TCP:127.0.0.1:10001,nodelay"],
        1: ["TCP-LISTEN:10002,bind=127.0.0.1,reuseaddr,fork,nodelay", f"UNIX-CONNECT:{folder}/out"],
    }
    forward = [*shlex.split(ssh), *OPTIONS, "-R", f"{folder}/out:{folder}/in", "host2", "echo up; read -r x"]
    started(three[0].command(*forward), stack)
    for i, ends in relays.items():
        started(three[i].command(*socat, "-d", "-d", *ends), stack, "listening on")  # which -d -d makes it say
    return three[1].run(*SEND, "127.0.0.1", "10002")


def by_doors(three, ssh, folder, stack):
    rooms = [{"folder": f"{folder}/host{i}", "place": f"host{i}"} for i in (1, 2)]
    for i, room in enumerate(rooms):
        Path(room["folder"], str(i)).mkdir(parents=True)
    doors = Doors(rooms[0], rooms, ["a:1", "b:1"])
    run = [sys.executable, str(HERE / "doors.py"), "task"]
    started(three[0].command(*run, json.dumps(doors.of_task(0)), *SERVE), stack)
    address, port = doors.inside("a:1").split(":")
    client = shlex.join([*run, json.dumps(doors.of_task(1)), *SEND, address, port])
    return three[0].run(*shlex.split(ssh), *doors.options(1), "host2", client)


def of_training(three, ssh, folder, rounds):
    """Returns a table: samples per second of DOWNPOUR."""
    Path(folder, "hosts").write_text("ps host1:2222\nworker host2:2222\nworker host3:2222\n")
    Path(folder, "big.py").write_text(BIG)
    found: dict[tuple[str, bool], list] = {(name, is_open): [] for name in RUNS for is_open in (True, False)}
    for number in range(rounds):
        for i, ((name, is_open), of_one) in enumerate(found.items()):
            flags = [flag.format(folder=folder) for flag in RUNS[name]]
            run_dir = f"{folder}/{number}-{i}"
            start = [str(HERE / "start.py"), *(["--insecure"] if is_open else []), f"{folder}/hosts", "DOWNPOUR", *flags]
            more = [f"--run_dir={run_dir}", "--epochs=1e9", "--seconds=10", "--evaluation_secs=60"]
            command = three[0].command(sys.executable, *start, *more)
            ended = subprocess.run(command, env={**os.environ, "SSH": ssh}, capture_output=True, text=True)
            if ended.returncode:
                sys.exit(ended.stdout + ended.stderr)
            of_one.append(json.loads(Path(run_dir, "result.json").read_text())["samples_per_second"])
            print(name, "--insecure" if is_open else "", f"{of_one[-1]:,.0f} samples/s", flush=True)
    lines = ["| DOWNPOUR | samples/s with `--insecure` | samples/s | times |", "|---|---:|---:|---:|"]
    for name in RUNS:
        opened, closed = (statistics.median(found[name, is_open]) for is_open in (True, False))
        lines.append(f"| {name} | {opened:,.0f} | {closed:,.0f} | {closed / opened:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["serve"]:
            serve(int(sys.argv[2]))
        elif sys.argv[1:2] == ["send"]:
            send(sys.argv[2], int(sys.argv[3]))
        else:
            main()
    except KeyboardInterrupt:
        sys.exit(130)
