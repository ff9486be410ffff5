"""Starts the tasks of a cluster on several machines by ssh, shows what all of them say, and ends them together.

    bash Multiple-Machines/start.sh [--insecure] HOSTS_FILE SCHEME [flags of the scheme]

No port of a task can be reached on any host: each task runs in a network of its own, out of which leads only what ssh forwards,
see `doors.py`. With `--insecure` tasks run in the networks of their hosts. The variable SSH is how to get there, `ssh` by
default: SSH="ssh -i KEY". Each host needs this checkout; `.venv` is made on it when it is first used.
"""

import contextlib
import datetime
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from doors import NOBODY, REFUSED, ROOM, Doors, host_of

from common import signals
from common.cluster import TaskSpecDef
from common.flags import FITTING, UserError
from common.launch import STOP_SECONDS

ROOT = Path(__file__).resolve().parents[1]
HERE = ("this machine", "")
ROOM_SECONDS = 5  # for a host to remove its sockets
INSECURE = "--insecure: whoever reaches a port of these tasks can read and change all, and run programs as you (SECURITY.md)"
OR_INSECURE = "start.sh --insecure goes without"
# On the host, the task lives as long as the line to it: "stop" lets it save and leave, the end of the line kills it.
REMOTE = """
cd -- {folder} && exec 3<&0 </dev/null
TF_CONFIG={config} {command} & task=$!
{{ if read -r word <&3; then kill -TERM $task; read -r word <&3; fi; kill -KILL $task; }} >/dev/null 2>&1 & watch=$!
disown $watch; exec 3<&-
wait $task; status=$?
kill -KILL $watch
exit $status
"""


def main(arguments):
    """Runs it and exits: 0 trained, 1 a task has failed, 2 bad flags or input, 130 stopped by Ctrl-C."""
    signals.prepare_for_a_closed_terminal()
    try:
        sys.exit(_run(arguments))
    except UserError as error:
        print(f"start.sh: {error}", file=sys.stderr)
        sys.exit(2)


def ssh_command():
    """Returns the words of SSH.

    Raises:
      UserError: if they are none, or there is no such program.
    """
    text = os.environ.get("SSH", "ssh -o BatchMode=yes")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"SSH={text} cannot be split into words: {str(error).lower()}") from None
    if not words:
        raise UserError('SSH is empty: expected a command as SSH="ssh -i KEY"; unset it for plain ssh')
    if shutil.which(words[0]) is None:
        how = f"SSH={text}: there is" if "SSH" in os.environ else "there is"
        raise UserError(f"{how} no program {words[0]}; install OpenSSH's client, or say in SSH how to reach the hosts")
    return words


def read_hosts(path):
    """Returns [(job, address, folder)] of a hosts file.

    Raises:
      UserError: if it cannot be read, or a line is none.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the hosts file {path} cannot be read: {getattr(error, 'strerror', 'it is no text')}") from None
    tasks = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            if len(words) > 3 or words[0] not in ("ps", "worker"):
                raise UserError(
                    f"{path}, line {number}: expected ps or worker, HOST:PORT and maybe a folder, not {line.strip()!r}"
                )
            if not line.isprintable() and not line.replace("\t", " ").isprintable():
                raise UserError(f"{path}, line {number}: {line.strip()!r} holds a character that is no text")
            tasks.append((words[0], *words[1:2], *(words[2:] or [str(ROOT)])))
            if len(words) == 1:
                raise UserError(f"{path}, line {number}: {words[0]} lacks its address, HOST:PORT")
    return tasks


def _run(arguments):
    is_open = "--insecure" in arguments
    arguments = [argument for argument in arguments if argument != "--insecure"]
    if len(arguments) < 2 or arguments[0].startswith("-") or arguments[1].startswith("-"):
        raise UserError("expected: bash Multiple-Machines/start.sh [--insecure] HOSTS_FILE SCHEME [flags of the scheme]")
    ssh = ssh_command()
    hosts_file, scheme, *flags = arguments
    tasks = read_hosts(hosts_file)
    if not (ROOT / scheme / "run.sh").is_file():
        raise UserError(f"there is no {ROOT / scheme / 'run.sh'}")
    cluster = {job: [address for of, address, _ in tasks if of == job] for job in ("ps", "worker")}
    for job, of_job in cluster.items():
        if not of_job:
            raise UserError(f"{hosts_file} names no {job}: a cluster needs at least one ps and one worker")
    TaskSpecDef("ps", 0, None, cluster["ps"], cluster["worker"])  # raises a UserError if that is no cluster
    if not any(flag.startswith("--run_dir=") for flag in flags):
        flags.append(f"--run_dir=runs/{scheme}/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S.%f}")
    if is_open:
        print(INSECURE, flush=True)
    lines: list[_Line] = []
    events: queue.SimpleQueue = queue.SimpleQueue()
    asked: list[int] = []

    def ask(number, _):
        if number != signal.SIGHUP or not asked:  # the shell and the system may both send that: no second request
            asked.append(number)
            events.put(None)

    before = {number: signal.signal(number, ask) for number in signals.heeded()}
    with contextlib.ExitStack() as stack:
        for number, handler in before.items():
            stack.callback(signal.signal, number, handler)
        doors = None if is_open else _make_doors(ssh, tasks, scheme, flags, events, stack)
        if isinstance(doors, int):
            return doors
        stack.callback(lambda: [line.close() for line in lines])
        counts = {"ps": 0, "worker": 0}
        for i, (job, address, folder) in enumerate(tasks):
            task = {"type": job, "index": counts[job]}
            name = f"{job} {counts[job]}"
            counts[job] += 1
            if doors:
                config = {"cluster": {job: list(map(doors.inside, of_job)) for job, of_job in cluster.items()}, "task": task}
                runs = ["bash", "Multiple-Machines/doors.sh", "task", json.dumps(doors.of_task(i)), "bash", f"{scheme}/run.sh"]
            else:
                config, runs = {"cluster": cluster, "task": task}, ["bash", f"{scheme}/run.sh"]
            quoted = {"folder": shlex.quote(folder), "config": shlex.quote(json.dumps(config))}
            program = REMOTE.format(**quoted, command=shlex.join([*runs, *flags]))
            # --: a host cannot be taken for an option
            command = [*ssh, *(doors.options(i) if doors else []), "--", host_of(address), shlex.join(["bash", "-c", program])]
            lines.append(_Line(name, command, events))
        return _watch(lines, events, doors)


def _make_doors(ssh, tasks, scheme, flags, events, stack):
    """Makes a room on this machine and on each host; returns the `Doors` of all tasks, or an exit status.

    The rooms last as long as the lines to them, which `stack` closes.

    Raises:
      UserError: if a host allows its tasks no network of their own.
    """
    check = ["--", "bash", f"{scheme}/run.sh", *flags, "--check"] if _may_be_downloaded(flags) else []
    there: dict[tuple[str, str], list[int]] = {}
    for i, (_, address, folder) in enumerate(tasks):
        there.setdefault((host_of(address), folder), []).append(i)
    commands = {HERE: [sys.executable, str(ROOT / "Multiple-Machines" / "doors.py"), "room"]}
    for (host, folder), of_host in there.items():
        words = ["bash", "Multiple-Machines/doors.sh", "room", *map(str, of_host), *check]
        program = f"cd -- {shlex.quote(folder)} && exec {shlex.join(words)}"
        commands[host, folder] = [*ssh, "--", host, shlex.join(["bash", "-c", program])]
    lines: list[_Line] = []
    stack.callback(lambda: [line.wait(ROOM_SECONDS) for line in lines])
    stack.callback(lambda: [line.close() for line in lines])
    names = {where: where[0] if sum(host == where[0] for host, _ in commands) == 1 else ":".join(where) for where in commands}
    lines += [_Line(names[where], command, events) for where, command in commands.items()]
    rooms: dict[str, dict] = {}
    while len(rooms) < len(commands):
        event = events.get()
        if event is None:
            return 130
        name, text, *ended = event
        if ended:
            print(f"{name} ended with exit status {text}; nothing was started", flush=True)
            return 2 if text == 2 else 1
        if text.startswith(REFUSED):
            raise UserError(f"{name} allows its tasks no network of their own: {text.removeprefix(REFUSED)}; {OR_INSECURE}")
        if text.startswith(ROOM):
            rooms[name] = json.loads(text.removeprefix(ROOM))
        else:
            print(f"{name} | {text}", flush=True)
    of_task = {i: rooms[names[where]] for where, of_host in there.items() for i in of_host}
    addresses = [address for _, address, _ in tasks]
    return Doors(rooms[names[HERE]], [of_task[i] for i in range(len(tasks))], addresses)


def _may_be_downloaded(flags):
    """Whether the data may have to be got by the network, which the tasks do not have."""
    data = next(iter(FITTING))
    for flag, following in zip(flags, [*flags[1:], ""], strict=True):
        name, equals, value = flag.partition("=")
        if name in ("--data", "-data"):
            data = value if equals else following
    return data not in FITTING


def _watch(lines, events, doors):
    """Shows what the tasks say until all have ended; returns the exit status."""
    running, status = {line.name for line in lines}, 0
    timer = None
    while running:
        event = events.get()
        if event is None and status == 130:
            return 130  # a second Ctrl-C: closing the lines kills the remaining tasks
        if event is None:
            print("stopping; Ctrl-C again stops at once", flush=True)
            status = 130
        elif len(event) == 2 and doors and NOBODY.fullmatch(event[1]):
            continue
        elif len(event) == 2:
            text = doors.outside(event[1]) if doors else event[1]
            print(f"{event[0]:>{max(map(len, (line.name for line in lines)))}} | {text}", flush=True)
            continue
        else:
            name, ended, _ = event
            is_room = name not in running
            running.discard(name)
            if (ended or is_room) and not status:
                print(f"{name} ended with exit status {ended}; the others are stopped", flush=True)
                status = 2 if ended == 2 else 1
        if status and not any(name.startswith("worker") for name in running):
            for line in lines:
                line.close()  # a ps that waits for a worker which has failed
        elif status and timer is None:
            for line in lines:
                line.stop()
            timer = threading.Timer(STOP_SECONDS, lambda: [line.close() for line in lines])
            timer.daemon = True
            timer.start()
    return status


class _Line:
    """A task, or a room, on a host, by the line of ssh to it.

    Raises:
      UserError: if it cannot be started.
    """

    def __init__(self, name, command, events):
        self.name = name
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # the terminal's Ctrl-C is ours alone
            )
        except OSError as error:  # of very many tasks, say, of which each has to be told
            raise UserError(f"{name} cannot be reached by {command[0]}: {error.strerror}") from None

        assert self._process.stdin and self._process.stdout
        self._input, output = self._process.stdin, self._process.stdout

        def listen():
            for text in output:
                events.put((name, text.rstrip("\n")))
            events.put((name, self._process.wait(), None))

        threading.Thread(target=listen, daemon=True).start()

    def stop(self):
        """Lets the task save what there is to save, and leave."""
        self._write("stop\n")

    def close(self):
        """Kills the task, if it is still there."""
        self._write("", close=True)

    def wait(self, seconds):
        """Waits for the end of the line."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _write(self, text, close=False):
        try:
            self._input.write(text)
            self._input.close() if close else self._input.flush()
        except (OSError, ValueError):
            pass  # the line has ended


if __name__ == "__main__":
    main(sys.argv[1:])
