"""Starts the tasks of a cluster on several machines by ssh, shows what all of them say, and ends them together.

    bash Multiple-Machines/start.sh HOSTS_FILE SCHEME [flags of the scheme]

The variable SSH is how to get there, `ssh` by default: SSH="ssh -i KEY". Each host needs this checkout; `.venv` is made on it
when it is first used.
"""

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

from common import signals
from common.cluster import TaskSpecDef
from common.flags import UserError
from common.launch import STOP_SECONDS

ROOT = Path(__file__).resolve().parents[1]
# On the host, the task lives as long as the line to it: "stop" lets it save and leave, the end of the line kills it.
REMOTE = """
cd -- {folder} && exec 3<&0 </dev/null
TF_CONFIG={config} bash {scheme}/run.sh {flags} & task=$!
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
    if len(arguments) < 2 or arguments[0].startswith("-") or arguments[1].startswith("-"):
        raise UserError("expected: bash Multiple-Machines/start.sh HOSTS_FILE SCHEME [flags of the scheme]")
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
    counts = {"ps": 0, "worker": 0}
    lines: list[_Line] = []
    events: queue.SimpleQueue = queue.SimpleQueue()
    asked: list[int] = []

    def ask(number, _):
        if number != signal.SIGHUP or not asked:  # the shell and the system may both send that: no second request
            asked.append(number)
            events.put(None)

    before = {number: signal.signal(number, ask) for number in signals.heeded()}
    try:
        for job, address, folder in tasks:
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": counts[job]}})
            words = {"folder": folder, "config": config, "scheme": scheme}
            program = REMOTE.format(**{name: shlex.quote(word) for name, word in words.items()}, flags=shlex.join(flags))
            # --: a host cannot be taken for an option
            command = [*ssh, "--", address.rpartition(":")[0], shlex.join(["bash", "-c", program])]
            try:
                lines.append(_Line(f"{job} {counts[job]}", command, events))
            except OSError as error:  # of very many tasks, say, of which each has to be told
                raise UserError(f"{job} {counts[job]} cannot be reached by {ssh[0]}: {error.strerror}") from None
            counts[job] += 1
        return _watch(lines, events)
    finally:
        for line in lines:
            line.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(lines, events):
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
        elif len(event) == 2:
            print(f"{event[0]:>{max(map(len, (line.name for line in lines)))}} | {event[1]}", flush=True)
            continue
        else:
            name, ended, _ = event
            running.discard(name)
            if ended and not status:
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
    """A task on a host, by the line of ssh to it."""

    def __init__(self, name, command, events):
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # the terminal's Ctrl-C is ours alone
        )

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

    def _write(self, text, close=False):
        try:
            self._input.write(text)
            self._input.close() if close else self._input.flush()
        except (OSError, ValueError):
            pass  # the line has ended


if __name__ == "__main__":
    main(sys.argv[1:])
