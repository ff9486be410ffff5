"""Reads this process's task in a cluster from the variables that Slurm's `srun` sets for each task of a job step.

TensorFlow's `SlurmClusterResolver` does not work here: it sorts nodes by name, so `node10` comes before `node2` and a task
takes another's address; it fails without GPUs; it puts all ps on the first nodes; a list of a billion hosts takes minutes.
"""

import fcntl
import json
import os
import re
import sys
from pathlib import Path

from common.core import UserError, check_contents

STEP = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def task():
    """Returns job, index, ps_hosts and worker_hosts of this process, or None outside a job step of several tasks.

    `NUM_PS` (default 1) of the step's tasks are ps, distributed round-robin over the nodes; the others are workers. On every
    node the tasks have consecutive ports: those reserved by `srun --resv-ports`, or a hundred computed from job and step.

    Where Slurm shows all of a node's GPUs to all of its tasks, workers take one each, round-robin (`CUDA_VISIBLE_DEVICES`);
    GPUs bound to a single task stay with that task.

    `PLACES`, a list of nodes, reserves an address on each of them, after those of the step's own tasks, for workers of other
    jobs. These jobs set `JOIN`, the folder of the run, and `FREE_PLACES`, see `main`.

    Raises:
      UserError: if the tasks form no cluster, or are not numbered node by node; if there is no free place to join.
    """
    environ = os.environ
    if environ.get("FREE_PLACES") is not None:
        return _joining()
    num_tasks = _number("SLURM_STEP_NUM_TASKS") if environ.get("SLURM_STEP_NUM_TASKS") else 1
    if num_tasks <= 1:
        return None
    missing = [name for name in STEP if not environ.get(name)]
    if missing:
        raise UserError(f"SLURM_STEP_NUM_TASKS names a job step of several tasks, but {', '.join(missing)} is missing")
    rank, node, job_id, step_id = (_number(name) for name in STEP[2:])
    nodes = hosts_in("SLURM_STEP_NODELIST", environ["SLURM_STEP_NODELIST"])
    counts = _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"], len(nodes))
    reserved = environ.get("SLURM_STEP_RESV_PORTS")
    ports = hosts_in("SLURM_STEP_RESV_PORTS", f"[{reserved or ports_of(job_id, step_id)}]")
    if not MOST >= sum(counts) == num_tasks > rank:
        raise UserError(
            f"Slurm: SLURM_STEP_NUM_TASKS={num_tasks} and SLURM_PROCID={rank} do not fit the {sum(counts)} tasks of "
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE'][:100]}"
        )
    places = [(i, local) for i, count in enumerate(counts) for local in range(count)]  # (node, local index) by rank
    if places[rank][0] != node:
        raise UserError("Slurm: the tasks are not numbered node by node; start them with srun --distribution=block")
    if max(counts) > len(ports):
        raise UserError(f"Slurm: {max(counts)} tasks on a node, but only {len(ports)} ports: srun --resv-ports={max(counts)}")
    num_ps = environ.get("NUM_PS") or "1"
    if not (num_ps.isascii() and num_ps.isdigit() and 1 <= int(num_ps) < len(places)):
        raise UserError(f"NUM_PS must be from 1 to {len(places) - 1} for a step of {len(places)} tasks, not {num_ps!r}")
    by_turn = sorted(places, key=lambda place: (place[1], place[0]))  # the first task of each node comes first
    ps = sorted(by_turn[: int(num_ps)])
    workers = [place for place in places if place not in ps]
    own = places[rank]
    _choose_gpu(own in ps, [place for place in workers if place[0] == own[0]], own)
    ps_hosts, worker_hosts = ([f"{nodes[i]}:{ports[local]}" for i, local in some] for some in (ps, workers))
    job, those = ("ps", ps) if own in ps else ("worker", workers)
    worker_hosts += _places(dict(zip(nodes, counts, strict=True)), ports)
    return job, those.index(own), ps_hosts, worker_hosts


def _places(counts, ports):
    """Returns an address for each of `PLACES`; `counts` is {node: tasks of the step}."""
    counts, addresses = dict(counts), []
    for node in hosts_in("PLACES", os.environ["PLACES"]) if os.environ.get("PLACES") else []:
        local = counts[node] = counts.get(node, 0) + 1
        if local > len(ports):
            raise UserError(f"Slurm: PLACES has more places on {node} than there are ports, {len(ports)}: name it less often")
        addresses.append(f"{node}:{ports[local - 1]}")
    return addresses


ROOT = Path(__file__).resolve().parents[2]
CLUSTER = "cluster.json"  # in the folder of a run: addresses of its tasks, and its command line


def _cluster_of(run_dir):
    """Returns the contents of `CLUSTER` in the folder of a run.

    Raises:
      UserError: if there is none, if another user may have written it, or if its format is invalid: a joining job runs the
        scheme and flags named in it.
    """
    flag = f"JOIN={run_dir}"
    try:
        check_contents(Path(run_dir), flag)
        cluster = json.loads(Path(run_dir, CLUSTER).read_text())
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{flag}: no run with PLACES began there") from None
    lists = [cluster.get(name) for name in ("ps", "worker", "arguments")] if isinstance(cluster, dict) else [None]
    words = [word for words in lists for word in (words if isinstance(words, list) else [None])]
    if not all(isinstance(word, str) and "\0" not in word for word in words):
        raise UserError(f"{flag}: {CLUSTER} is damaged: expected ps, worker and arguments, lists of strings")
    scheme = cluster.get("scheme")
    if not (isinstance(scheme, str) and re.fullmatch(r"\w[\w-]*", scheme) and (ROOT / scheme / "run.sh").is_file()):
        raise UserError(f"{flag}: {CLUSTER} names the scheme {scheme!r:.100}; expected a folder of {ROOT} with a run.sh")
    return cluster


def _without_run_dir(arguments):
    """Returns a run's command line without --run_dir, in one word or two."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [word for before, word in pairs if not (re.match("--?run_dir(=|$)", word) or re.fullmatch("--?run_dir", before))]


def _joining():
    """As `task`, for a task of a job that joins a run."""
    missing = [name for name in ("JOIN", "SLURMD_NODENAME", "SLURM_LOCALID") if not os.environ.get(name)]
    if missing:
        raise UserError(f"FREE_PLACES names places of a run to join, but {', '.join(missing)} is missing")
    run_dir, node, local = os.environ["JOIN"], os.environ["SLURMD_NODENAME"], _number("SLURM_LOCALID")
    cluster = _cluster_of(run_dir)
    here = [k for k in map(int, os.environ["FREE_PLACES"].split()) if cluster["worker"][k].rpartition(":")[0] == node]
    if local >= len(here):
        reserved = ", ".join(cluster["worker"][1:])
        raise UserError(
            f"Slurm: JOIN={run_dir}: {len(here)} places are free on {node}, too few for {local + 1} workers: its workers and "
            f"PLACES are at {reserved[:200]}"
        )
    return "worker", here[local], cluster["ps"], cluster["worker"]


def main(run_dir):
    """Prints scheme name, numbers of free places, and flags of the run in this folder, each followed by a zero byte.

    A joining job reads them. Returns the exit status, 2 after an error line if no job can join.
    """
    try:
        cluster = _cluster_of(run_dir)
        if not _is_locked(run_dir, 0):
            raise UserError(f"JOIN={run_dir}: the run is over, or has not begun yet")
    except UserError as error:
        print(f"slurm.sbatch: {error}", file=sys.stderr)
        return 2
    free = " ".join(str(k) for k in range(1, len(cluster["worker"])) if not _is_locked(run_dir, k))
    words = cluster["scheme"], free, *_without_run_dir(cluster["arguments"])
    print(*words, sep="\0", end="\0")
    return 0


def _is_locked(run_dir, worker):
    """Whether this worker holds its lock in the folder of the run, see `common.core.run_folder`."""
    try:
        with open(Path(run_dir, f"lock-worker-{worker}")) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def ports_of(job_id, step_id):
    """Returns the first and the last port of a job step, as `10000-10099`.

    They lie below the ephemeral ports. Steps that may share the node at the same time have other ports: those of the next 200
    jobs, and the other steps of this job.
    """
    first = 10000 + 100 * ((int(job_id) + 37 * int(step_id)) % 200)
    return f"{first}-{first + 99}"


MOST = 2**16  # limit of hosts in a list, ports, tasks: Slurm has no longer lists, a machine no more ports


def hosts_in(name, text):
    """Returns the hosts of a Slurm host list, `a,n[1-2,07]`, in its order: a, n1, n2, n07.

    Raises:
      UserError: if the text of this variable is no such list, or has more than 65,536 hosts.
    """
    hosts: list[str] = []
    end, comma = 0, ","
    while comma:
        part = re.compile(r"([^][,\s]*)(?:\[([\d,-]+)\])?(,|\Z)", re.ASCII).match(text, end)
        if not part or (part[1], part[2]) == ("", None):
            raise _no_list(name, text)
        prefix, ranges, comma = part.groups()
        end = part.end()
        for piece in ranges.split(",") if ranges else []:
            numbers = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", piece, re.ASCII)
            count = int(numbers[2] or numbers[1]) - int(numbers[1]) + 1 if numbers else 0
            if not numbers or count < 1 or len(hosts) + count > MOST:  # before the list is built
                raise _no_list(name, text)
            hosts += [f"{prefix}{int(numbers[1]) + i:0{len(numbers[1])}}" for i in range(count)]
        hosts += [] if ranges else [prefix]
    if len(hosts) > MOST:
        raise _no_list(name, text)
    return hosts


def _tasks_per_node(text, num_nodes):
    """Returns the number of tasks on each node, from `2(x3),1`: 2, 2, 2, 1."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,5})(?:\(x(\d{1,5})\))?", part, re.ASCII)
        if not found or int(found[1]) > MOST or len(counts) + int(found[2] or 1) > num_nodes:
            raise UserError(f"Slurm: {name}={text[:100]} is not a list of the tasks per node of {num_nodes} nodes, as 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    if len(counts) < num_nodes:
        raise UserError(f"Slurm: {name}={text[:100]} lists {len(counts)} nodes, but there are {num_nodes}")
    return counts


def _no_list(name, text):
    return UserError(f"Slurm: {name}={text[:100]} is not a list of at most {MOST:,}, such as n[1-3,7]")


def _number(name):
    text = os.environ[name]
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise UserError(f"Slurm: {name} must be a whole number of at least 0, not {text[:100]!r}")
    return int(text)


def _choose_gpu(is_ps, neighbours, own):
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if is_ps:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    elif "," in gpus and str(len(gpus.split(","))) == os.environ.get("SLURM_GPUS_ON_NODE"):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[neighbours.index(own) % len(gpus.split(","))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
