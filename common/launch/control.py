"""Control socket of a run, in its folder: adds or removes workers of a running job.

bash common/join.sh runs/first 3      # three more workers
bash common/leave.sh runs/first 1     # one fewer
"""

import contextlib
import hashlib
import json
import os
import queue
import socket
import sys
import threading
from pathlib import Path

from common.core import SOCKET, UserError

ANSWER_SECONDS, HOSTS_SECONDS = 60, 600  # timeouts for an answer; with remote hosts, which may have to build a .venv
MOST_BYTES = 2**20  # size limit of a request


def version(*folders):
    """Returns a hash of the names and contents of the Python files in these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(bytes(path.relative_to(folder)) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


COMMON = Path(__file__).resolve().parents[1]


def code_of(folder):
    """Returns the version of `common/`, the joint version of `common/` and this scheme's folder, and both folders."""
    folders = COMMON, Path(folder)
    return version(COMMON), version(*folders), folders


def check_code(request, code):
    """Raises a `UserError` if the code has changed since `code_of`, or differs from the requester's."""
    known, of_both, folders = code
    if request.version != known or version(*folders) != of_both:
        raise UserError("the code has changed since the run began, or is another checkout's: join with the code of the run")


ENDING = {"join": "the run is ending, so no worker can join", "leave": "the run is ending, and all its workers with it"}


def first(count, free, total):
    """Returns the first `count` free places, out of `total` places. Raises a `UserError` if there are too few."""
    if len(free) < count:
        raise UserError(
            f"{len(free)} of the {total} places of the run are free, too few for {count}: --max_workers sets their number"
        )
    return free[:count]


def last(count, others):
    """Returns the last `count` of the workers other than worker 0, to leave. Raises a `UserError` if there are too few."""
    if count > len(others):
        raise UserError(
            f"the run has {len(others) + 1} worker{'s' if others else ''}, of which worker 0 has to stay, as it saves the "
            f"checkpoints: {count} cannot leave; Ctrl-C ends the run"
        )
    return others[len(others) - count :]


def joining(workers):
    """Returns a line about workers that join; each has a `name`."""
    return f"{', '.join(worker.name for worker in workers)} join{'s' if len(workers) == 1 else ''}"


def leaving(workers):
    """Returns a line about workers asked to leave."""
    return f"{', '.join(worker.name for worker in workers)} {'is' if len(workers) == 1 else 'are'} asked to leave"


@contextlib.contextmanager
def _named(run_dir):
    """Yields a path of the socket within the length limit, for any folder; raises OSError if there is no folder."""
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


class Request:
    """A request to the launcher, from another process.

    Attributes:
      what: "join" or "leave".
      count: number of workers.
      version: version of the requester's `common/`, see `version`.
      hosts: (HOST:PORT, folder of the checkout) of each joining worker, or none.
    """

    def __init__(self, text):
        asked = json.loads(text)
        self.what, self.count, self.version = str(asked["what"]), int(asked["count"]), str(asked["version"])
        self.hosts = [(str(address), str(folder)) for address, folder in asked.get("hosts", [])]
        self._answers: queue.SimpleQueue = queue.SimpleQueue()

    def answer(self, line, is_error=False):
        """Answers with a line; only the first answer counts."""
        self._answers.put({"line": line, "is_error": is_error})

    def wait(self):
        """Returns the answer."""
        return self._answers.get(timeout=HOSTS_SECONDS if self.hosts else ANSWER_SECONDS)


@contextlib.contextmanager
def heard(run_dir, hear):
    """While the context lasts, calls `hear(request)` in a thread for each `Request`; it must be answered.

    Only the user of this process can connect.

    Raises:
      UserError: if the socket cannot be created in the folder.
    """
    with _named(run_dir) as path, socket.socket(socket.AF_UNIX) as listener:
        mask = os.umask(0o177)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # stale: this launcher holds the lock of the folder
            listener.bind(path)
        except OSError as error:
            raise UserError(
                f"{Path(run_dir, SOCKET)} cannot be made: {error.strerror}; workers that come and go need a Unix socket there"
            ) from None
        finally:
            os.umask(mask)
        listener.listen()
        threading.Thread(target=_accept, args=(listener, hear), daemon=True).start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _accept(listener, hear):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the run has ended
        threading.Thread(target=_answer, args=(connection, hear), daemon=True).start()


def _answer(connection, hear):
    with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError, queue.Empty):
        connection.settimeout(ANSWER_SECONDS)
        with connection.makefile("rw") as file:
            request = Request(file.readline(MOST_BYTES))
            hear(request)
            file.write(json.dumps(request.wait()) + "\n")


def ask(run_dir, what, count, hosts=()):
    """Asks the launcher of the run in this folder to let `count` workers "join" or "leave"; returns its answer, a line.

    `hosts` as in `Request`.

    Raises:
      UserError: if there is no such launcher, or it refuses.
    """
    if not Path(run_dir).is_dir():
        raise UserError(f"there is no folder {run_dir}: expected the --run_dir of a run in progress")
    words = {"what": what, "count": count, "version": version(COMMON), "hosts": list(hosts)}
    try:
        with _named(run_dir) as path, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(HOSTS_SECONDS if hosts else ANSWER_SECONDS)
            connection.connect(path)
            with connection.makefile("rw") as file:
                file.write(json.dumps(words) + "\n")
                file.flush()
                answer = json.loads(file.readline())
    except (FileNotFoundError, ConnectionError, ValueError):  # ValueError: the connection closed without an answer
        raise UserError(f"no run with --max_workers is training in {run_dir}: it has ended, or began without it") from None
    except OSError as error:
        raise UserError(f"the launcher of {run_dir} cannot be asked: {error.strerror or error}") from None
    if answer["is_error"]:
        raise UserError(answer["line"])
    return answer["line"]


def join(run_dir, count=1):
    """Starts `count` more workers of the run in this folder, started with `max_workers`; returns a line about them.

    Raises:
      UserError: if there is no such run, or it refuses.
    """
    return ask(run_dir, "join", count)


def leave(run_dir, count=1):
    """Asks the last `count` workers of the run in this folder to leave, each after its current call; returns a line about them.

    Raises:
      UserError: if there is no such run, or it refuses.
    """
    return ask(run_dir, "leave", count)


def main(arguments):
    """Runs `join FOLDER [COUNT]` or `leave FOLDER [COUNT]`, and returns the exit status: 2 after a one-line error."""
    what, *rest = arguments
    try:
        if not 1 <= len(rest) <= 2 or rest[0].startswith("-"):
            raise UserError(f"expected {what}.sh FOLDER [COUNT]: the --run_dir of a run, and how many workers")
        count = rest[1] if len(rest) > 1 else "1"
        if not (count.isascii() and count.isdigit() and 1 <= int(count[:9]) < 10**6):
            raise UserError(f"the number of workers must be a whole number of at least 1, not {count!r:.40}")
        print(ask(rest[0], what, int(count)))
    except UserError as error:
        print(f"{what}.sh: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
