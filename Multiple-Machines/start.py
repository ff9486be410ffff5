"""Starts the tasks of a cluster on several machines by ssh, shows what all of them say, and ends them together.

    bash Multiple-Machines/start.sh [--insecure] HOSTS_FILE SCHEME [flags of the scheme]
    bash Multiple-Machines/start.sh --join=HOSTS_FILE RUN

No port of a task can be reached on any host: each task runs in a network of its own, out of which leads only what ssh forwards,
see `doors.py`. With `--insecure` tasks run in the networks of their hosts. The variable SSH is how to get there, `ssh` by
default: SSH="ssh -i KEY". Each host needs this checkout; `.venv` is made on it when it is first used.

With `--max_workers` among the flags, workers join (`--join`) and leave (`bash common/leave.sh RUN`) while the others train.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from doors import NOBODY, REFUSED, ROOM, Doors, host_of

from common.cluster import TaskSpecDef
from common.core import FITTING, MOST_PLACES, STANDS_IN, UserError, lock_folder, signals
from common.launch import PS_SECONDS, STOP_SECONDS, control

ROOT = Path(__file__).resolve().parents[1]
ROOM_SECONDS = 5  # for a host to remove its sockets
INSECURE = "--insecure: anyone who reaches a port of a task can read and change all, and run programs as you (SECURITY.md)"
OR_INSECURE = "start.sh --insecure runs without one"
USAGE = "expected: bash Multiple-Machines/start.sh [--insecure] HOSTS_FILE SCHEME [flags of the scheme]"
USAGE_OF_JOIN = "expected: bash Multiple-Machines/start.sh --join=HOSTS_FILE RUN, the --run_dir of a run in progress"
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
    """Runs it and exits: 0 trained or joined, 1 a task has failed, 2 bad flags or input, 130 stopped by Ctrl-C."""
    signals.prepare_for_a_closed_terminal()
    try:
        sys.exit(_ask_to_join(arguments) if arguments and arguments[0].startswith("--join") else _run(arguments))
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
        raise UserError('SSH is empty: expected a command such as SSH="ssh -i KEY"; unset it for plain ssh')
    if shutil.which(words[0]) is None:
        how = f"SSH={text}: there is" if "SSH" in os.environ else "there is"
        raise UserError(f"{how} no program {words[0]}; install OpenSSH's client, or set SSH to another command")
    return words


@dataclass(eq=False)
class _Task:
    """A task of the cluster, or a place that a worker may take."""

    job: str
    index: int
    address: str | None  # HOST:PORT, as the user calls it; of a place, of the worker that had it last
    folder: str = ""  # of the checkout on its host
    line: Any = None  # the `_Line` to it while it runs
    room: Any = None  # the line to its room, if it has joined
    is_coming: bool = False  # whether a room is made for it
    is_leaving: bool = False  # whether it is asked to leave
    has_joined: bool = False  # whether it came while the others trained
    stands_in: bool = False  # whether it only says for a worker that was lost that nobody has to wait for it

    @property
    def name(self):
        return f"{self.job} {self.index}"

    @property
    def is_there(self):
        return self.is_coming or self.line is not None


def read_hosts(path):
    """Returns the `_Task`s of a hosts file, in its order.

    Raises:
      UserError: if it cannot be read, a line is none, or two have one address.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the hosts file {path} cannot be read: {getattr(error, 'strerror', 'it is not text')}") from None
    tasks: list[_Task] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            if len(words) > 3 or words[0] not in ("ps", "worker"):
                raise UserError(
                    f"{path}, line {number}: expected ps or worker, HOST:PORT and maybe a folder, not {line.strip()!r}"
                )
            if not line.isprintable() and not line.replace("\t", " ").isprintable():
                raise UserError(f"{path}, line {number}: {line.strip()!r} contains a character that is not text")
            if len(words) == 1:
                raise UserError(f"{path}, line {number}: {words[0]} lacks its address, HOST:PORT")
            index = sum(task.job == words[0] for task in tasks)
            tasks.append(_Task(words[0], index, words[1], words[2] if len(words) == 3 else str(ROOT)))
    return tasks


def _addresses(tasks):
    """Returns {job: addresses} of tasks."""
    return {job: [task.address for task in tasks if task.job == job] for job in ("ps", "worker")}


def _ask_to_join(arguments):
    """Asks the `start.sh` of a run to start the workers of a file that do not run yet; returns the exit status."""
    option, _, hosts_file = arguments[0].partition("=")
    if option != "--join" or not hosts_file or len(arguments) != 2 or arguments[1].startswith("-"):
        raise UserError(USAGE_OF_JOIN)
    tasks = read_hosts(hosts_file)
    workers = [task for task in tasks if task.job == "worker"]
    if not workers:
        raise UserError(f"{hosts_file} names no worker: expected lines such as `worker HOST:PORT` for those that join")
    cluster = _addresses(tasks)
    TaskSpecDef("worker", 0, None, cluster["ps"] or ["ps:1"], cluster["worker"])  # raises a UserError if that is no cluster
    hosts = [(worker.address, worker.folder) for worker in workers]
    print(control.ask(arguments[1], "join", len(hosts), hosts))
    return 0


def _run(arguments):
    is_open = "--insecure" in arguments
    arguments = [argument for argument in arguments if argument != "--insecure"]
    if len(arguments) < 2 or arguments[0].startswith("-") or arguments[1].startswith("-"):
        raise UserError(USAGE)
    ssh = ssh_command()
    hosts_file, scheme, *flags = arguments
    tasks = read_hosts(hosts_file)
    if not (ROOT / scheme / "run.sh").is_file():
        raise UserError(f"there is no {ROOT / scheme / 'run.sh'}")
    cluster = _addresses(tasks)
    for job, of_job in cluster.items():
        if not of_job:
            raise UserError(f"{hosts_file} names no {job}: a cluster needs at least one ps and one worker")
    TaskSpecDef("ps", 0, None, cluster["ps"], cluster["worker"])  # raises a UserError if that is no cluster
    run_dir = _flag(flags, "run_dir")
    if run_dir is None:
        run_dir = f"runs/{scheme}/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
        flags.append(f"--run_dir={run_dir}")
    has_places = _flag(flags, "max_workers") is not None
    begin = len(cluster["worker"])
    if has_places:
        tasks, begin = _reserve(tasks, hosts_file, flags, is_open)
    if is_open:
        print(INSECURE, flush=True)
    with contextlib.ExitStack() as stack:
        run = _Run(ssh, scheme, flags, tasks, begin, has_places, stack)
        if has_places:
            stack.enter_context(lock_folder(ROOT / run_dir, "--run_dir", (), "start"))
            stack.enter_context(control.heard(ROOT / run_dir, run.hear))
        return run.run(is_open)


def _reserve(tasks, hosts_file, flags, is_open):
    """Returns the tasks with as many workers, or places for them, as `--max_workers` says, and how many workers begin.

    Adds `--num_workers` to the flags, unless it is there: without it all workers of the file begin.

    Raises:
      UserError: if the hosts file does not fit.
    """
    named, most = sum(task.job == "worker" for task in tasks), _number(flags, "max_workers", 1, MOST_PLACES)
    begin = named if _flag(flags, "num_workers") is None else _number(flags, "num_workers", 1, named)
    flags.append(f"--num_workers={begin}")
    if most < begin:
        raise UserError(
            f"--max_workers={most} is less than the {begin} workers of {hosts_file}: start with fewer by --num_workers"
        )
    if is_open and most > named:
        raise UserError(
            f"--max_workers={most} with --insecure: {hosts_file} names {named} workers, but each place needs an address when "
            "the run begins: name one worker for each place, and start with fewer by --num_workers"
        )
    kept = [task for task in tasks if task.job == "ps" or task.index < (most if is_open else begin)]
    return kept + [_Task("worker", i, None) for i in range(named if is_open else begin, most)], begin


def _flag(flags, name):
    """Returns the last value that these words of a command line give to a flag, or None."""
    value = None
    for word, following in zip(flags, [*flags, ""][1:], strict=True):
        given, equals, text = word.partition("=")
        if given in (f"--{name}", f"-{name}"):
            value = text if equals else following
    return value


def _number(flags, name, least, most):
    text = _flag(flags, name)
    if not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= most):
        raise UserError(f"--{name} must be a whole number from {least} to {most}, not {text!r:.40}")
    return int(text)


def _may_be_downloaded(flags):
    """Whether the data may have to be got by the network, which the tasks do not have."""
    return (_flag(flags, "data") or next(iter(FITTING))) not in FITTING


@dataclass(eq=False)
class _Joining:
    """Workers that wait for their rooms, and the request that is answered when all rooms are made."""

    request: Any  # a `common.launch.Request`; None for a worker that stands in for another
    tasks: dict  # the `_Task` of each line to a room
    made: dict = field(default_factory=dict)  # what the rooms have told


class _Run:
    """A run from start to end.

    Args:
      ssh: words that reach a host.
      scheme, flags: what each task runs.
      tasks: `_Task`s: those that begin, and places.
      begin: how many workers begin.
      has_places: whether workers may join and leave.
      stack: at whose end all lines are closed.
    """

    def __init__(self, ssh, scheme, flags, tasks, begin, has_places, stack):
        self._ssh, self._scheme, self._flags, self._tasks, self._begin = ssh, scheme, flags, tasks, begin
        self._workers = [task for task in tasks if task.job == "worker"]
        self._has_places = has_places
        self._code = control.code_of(ROOT / scheme)
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._lines: list[_Line] = []  # to tasks
        self._rooms: list[_Line] = []
        self._vital: list[_Line] = []  # those rooms without which the run cannot go on
        self._joining: dict[_Line, _Joining] = {}  # by the line to a room that is not made yet
        self._doors: Any = None
        self._status, self._asked = 0, []
        self._timer: Any = None
        stack.callback(lambda: [line.wait(ROOM_SECONDS) for line in self._rooms])
        stack.callback(lambda: [line.close() for line in [*self._lines, *self._rooms]])
        before = {number: signal.signal(number, self._ask) for number in signals.heeded()}
        for number, handler in before.items():
            stack.callback(signal.signal, number, handler)

    def _ask(self, number, _):
        if number != signal.SIGHUP or not self._asked:  # the shell and the system may both send that: no second request
            self._asked.append(number)
            self._events.put(None)

    def hear(self, request):
        """Lets workers join or leave, as a `common.launch.Request` asks. Called from any thread."""
        self._events.put(request)

    def run(self, is_open):
        """Starts the tasks that begin, and shows what all say until they have ended; returns the exit status."""
        beginning = [task for task in self._tasks if task.job == "ps" or task.index < self._begin]
        if not is_open:
            status = self._make_doors(beginning)
            if status:
                return status
        for task in beginning:
            self._start(task)
        return self._watch()

    def _make_doors(self, beginning):
        """Makes a room on this machine and on each host of these tasks; returns an exit status if the run ends with that.

        The rooms last as long as the lines to them.

        Raises:
          UserError: if a host allows its tasks no network of their own.
        """
        there: dict[tuple[str, str], list[_Task]] = {}
        for task in beginning:
            there.setdefault((host_of(task.address), task.folder), []).append(task)
        here = _Line("this machine", [sys.executable, str(ROOT / "Multiple-Machines" / "doors.py"), "room"], self._events)
        self._rooms.append(here)
        rooms: dict[_Line, list[_Task]] = {here: []}
        for (host, folder), of_host in there.items():
            name = host if sum(host == other for other, _ in there) == 1 else f"{host}:{folder}"
            rooms[self._open_room(name, host, folder, of_host)] = of_host
        made: dict[_Line, dict] = {}
        while len(made) < len(rooms):
            event = self._events.get()
            if event is None:
                return 130
            if isinstance(event, control.Request):
                event.answer("the run is beginning: ask again when its workers train", is_error=True)
                continue
            line, text, *ended = event
            if ended:
                print(f"{line.name} ended with exit status {text}; nothing was started", flush=True)
                return 2 if text == 2 else 1
            if text.startswith(REFUSED):
                raise UserError(f"{_why_refused(line, text)}; {OR_INSECURE}")
            if text.startswith(ROOM):
                made[line] = json.loads(text.removeprefix(ROOM))
            else:
                print(f"{line.name} | {text}", flush=True)
        of_task = {task: made[line] for line, of_host in rooms.items() for task in of_host}
        may_change = [i for i, task in enumerate(self._tasks) if self._may_leave(task)]
        told = [(task.address, of_task[task]) if task in of_task else None for task in self._tasks]
        self._doors = Doors(made[here], told, may_change)
        self._vital = [line for line, of_host in rooms.items() if not (of_host and all(map(self._may_leave, of_host)))]
        return 0

    def _open_room(self, name, host, folder, tasks):
        """Begins to make a room for tasks on a host; returns the line to it."""
        check = ["--", "bash", f"{self._scheme}/run.sh", *self._flags, "--check"] if _may_be_downloaded(self._flags) else []
        numbers = [str(self._tasks.index(task)) for task in tasks]
        program = shlex.join(["bash", "Multiple-Machines/doors.sh", "room", *numbers, *check])
        program = f"cd -- {shlex.quote(folder)} && exec {program}"
        self._rooms.append(_Line(name, [*self._ssh, "--", host, shlex.join(["bash", "-c", program])], self._events))
        return self._rooms[-1]

    def _start(self, task):
        """Starts a task on its host."""
        i, doors, cluster = self._tasks.index(task), self._doors, _addresses(self._tasks)
        runs = ["bash", f"{self._scheme}/run.sh"]
        if doors:
            cluster = {job: [doors.inside(k) for k, each in enumerate(self._tasks) if each.job == job] for job in cluster}
            runs = ["bash", "Multiple-Machines/doors.sh", "task", json.dumps(doors.of_task(i)), *runs]
        runs = ["env", f"{STANDS_IN}=1", *runs] if task.stands_in else runs
        config = {"cluster": cluster, "task": {"type": task.job, "index": task.index}}
        quoted = {"folder": shlex.quote(task.folder), "config": shlex.quote(json.dumps(config))}
        program = REMOTE.format(**quoted, command=shlex.join([*runs, *self._flags]))
        # --: a host cannot be taken for an option
        to_host = [*self._ssh, *(doors.options(i) if doors else []), "--", host_of(task.address)]
        task.is_coming, task.is_leaving = False, task.stands_in
        task.line = _Line(task.name, [*to_host, shlex.join(["bash", "-c", program])], self._events)
        self._lines.append(task.line)

    def _watch(self):
        """Shows what the tasks say until all have ended; returns the exit status."""
        while any(task.line for task in self._tasks):
            event = self._events.get()
            if isinstance(event, control.Request):
                self._answer(event)
                continue
            if event is None and self._status == 130:
                return 130  # a second Ctrl-C: closing the lines kills the remaining tasks
            if event is None:
                print("stopping; Ctrl-C again stops at once", flush=True)
                self._status = 130
            elif len(event) == 2:
                self._hear_line(*event)
                continue
            else:
                self._end(*event[:2])
            if self._status and not any(task.line for task in self._workers):
                self._close()  # a ps that waits for a worker which has failed
            elif self._status and self._timer is None:
                for line in self._lines:
                    line.stop()
                self._close_in(STOP_SECONDS)
            elif self._is_over() and self._timer is None:
                self._close_in(PS_SECONDS)  # a worker that has come too late, and waits for the ps
        return self._status

    def _close(self):
        for line in self._lines:
            line.close()

    def _close_in(self, seconds):
        self._timer = threading.Timer(seconds, self._close)
        self._timer.daemon = True
        self._timer.start()

    def _may_leave(self, task):
        return self._has_places and task.job == "worker" and task.index > 0

    def _can_do_without(self, task):
        """Whether the others go on when this task has failed. (With --insecure nobody can take its address elsewhere.)"""
        return self._doors and self._may_leave(task) and not task.stands_in and not self._is_ending()

    def _is_ending(self):
        return self._status or not self._workers[0].line

    def _is_over(self):
        """Whether only workers are left that may leave: worker 0, which ends the run, and all ps have ended."""
        return not any(task.line for task in self._tasks if not self._may_leave(task))

    def _hear_line(self, line, text):
        """Shows what a task says, or hears that a room is made."""
        joining = self._joining.get(line)
        if self._doors and NOBODY.fullmatch(text):
            return
        if joining and text.startswith(REFUSED):
            self._refuse(joining, _why_refused(line, text))
        elif joining and text.startswith(ROOM):
            joining.made[line] = json.loads(text.removeprefix(ROOM))
            if len(joining.made) == len(joining.tasks):
                self._let_in(joining)
        elif not text.startswith(ROOM):
            shown = self._doors.outside(text) if self._doors else text
            print(f"{line.name:>{max(len(task.name) for task in self._tasks)}} | {shown}", flush=True)

    def _end(self, line, ended):
        """Takes note of the end of a line: that the task, or the room, has ended with this exit status."""
        task = next((task for task in self._tasks if task.line is line), None)
        if line in self._joining:
            self._refuse(self._joining[line], f"workers on {line.name} cannot join: it ended with exit status {ended}")
        if task is None and line not in self._vital:
            return
        if task:
            task.line = None
            if task.room:
                task.room.close()
            # It has never trained, so nobody waits for it.
            has_not_come = (
                task.has_joined and not task.stands_in and (ended == 2 or ended == 128 + signal.SIGTERM and task.is_leaving)
            )
            if has_not_come or not ended and task.is_leaving:
                print(f"the place of {task.name} is free", flush=True)
                ended, task.stands_in = 0, False
            elif self._can_do_without(task) and not 0 <= ended < 128:  # it was killed, or its connection was
                print(f"{task.name} ended with exit status {ended}; the others go on without it", flush=True)
                self._stand_in_for(task)
                ended = 0
        if (ended or task is None) and not self._status and not (self._is_over() and task and self._may_leave(task)):
            print(f"{line.name} ended with exit status {ended}; the others are stopped", flush=True)
            self._status = 2 if ended == 2 else 1

    def _answer(self, request):
        try:
            if self._is_ending():
                raise UserError(control.ENDING[request.what])
            line = self._join(request) if request.what == "join" else self._leave(request)
        except UserError as error:
            request.answer(str(error), is_error=True)
        else:
            if line:
                print(line, flush=True)
                request.answer(line)

    def _leave(self, request):
        """Asks the last workers to leave; returns a line that names them. Raises a `UserError` if that cannot be."""
        going = control.last(request.count, [task for task in self._workers[1:] if task.line and not task.is_leaving])
        for task in going:
            task.is_leaving = True
            task.line.stop()
        return control.leaving(going)

    def _join(self, request):
        """Starts workers on hosts in free places; returns a line that names them, or None if rooms are to be made before.

        Raises:
          UserError: if that cannot be.
        """
        if not request.hosts:
            raise UserError("a run on several machines needs the hosts: bash Multiple-Machines/start.sh --join=HOSTS_FILE RUN")
        control.check_code(request, self._code)
        there = {task.address: task for task in self._tasks if task.is_there}
        for address, _ in request.hosts:
            if address in there and there[address].job == "ps":
                raise UserError(f"{address} is the address of {there[address].name}: give a worker another port")
        new = [(address, folder) for address, folder in request.hosts if address not in there]
        if not new:
            raise UserError("all workers of the hosts file are already running: add a line, `worker HOST:PORT`")
        free = [task for task in self._workers[1:] if not task.is_there]
        if not self._doors:
            reserved = {task.address: task for task in free}
            for address, _ in new:
                if address not in reserved:
                    raise UserError(
                        f"{address} is not a free place of this run: with --insecure the hosts file at its start fixes the "
                        "addresses of all places"
                    )
            free = [reserved[address] for address, _ in new]
        joining = control.first(len(new), free, len(self._workers))
        for task, (address, folder) in zip(joining, new, strict=True):
            task.address, task.folder, task.is_coming, task.has_joined = address, folder, True, True
        if not self._doors:
            for task in joining:
                self._start(task)
            return control.joining(joining)
        rooms = {self._open_room(host_of(task.address), host_of(task.address), task.folder, [task]): task for task in joining}
        self._joining |= dict.fromkeys(rooms, _Joining(request, rooms))
        return None

    def _let_in(self, joining):
        """Starts the workers for whom all rooms are made."""
        if self._is_ending():
            self._refuse(joining, control.ENDING["join"])
            return
        for line, task in joining.tasks.items():
            del self._joining[line]
            task.room = line
            self._doors.take(self._tasks.index(task), task.address, joining.made[line])
            self._start(task)
        if joining.request:
            said = control.joining(list(joining.tasks.values()))
            print(said, flush=True)
            joining.request.answer(said)

    def _refuse(self, joining, why):
        """Gives up the rooms that were begun for workers who wanted to join."""
        for line, task in joining.tasks.items():
            self._joining.pop(line)
            task.is_coming = False
            line.close()
        if joining.request:
            joining.request.answer(why, is_error=True)
        elif not self._is_ending():
            print(f"worker 0 would wait for a lost worker: {why}; the others are stopped", flush=True)
            self._status = 1

    def _stand_in_for(self, task):
        """Starts a worker that takes the place of one that was lost, where worker 0 is, and leaves it at once.

        So it says to the others that nobody has to wait for it, and gives back the samples that it had leased.
        """
        chief = self._workers[0]
        task.address, task.folder, task.is_coming, task.stands_in = chief.address, chief.folder, True, True
        room = self._open_room(task.name, host_of(chief.address), chief.folder, [task])
        self._joining[room] = _Joining(None, {room: task})


def _why_refused(line, text):
    return f"{line.name} allows its tasks no network of their own: {text.removeprefix(REFUSED)}"


class _Line:
    """A task, or a room, on a host, by the line of ssh to it.

    Raises:
      UserError: if it cannot be started.
    """

    def __init__(self, name, command, events):
        self.name, self._is_stopped = name, False
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
                events.put((self, text.rstrip("\n")))
            events.put((self, self._process.wait(), None))

        threading.Thread(target=listen, daemon=True).start()

    def stop(self):
        """Lets the task save what there is to save, and leave."""
        if not self._is_stopped:  # a second word would kill it
            self._is_stopped = True
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
