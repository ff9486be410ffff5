"""Reads which task of a cluster this process is, from the variables that Slurm's `srun` gives to each task of a job step.

TensorFlow's `SlurmClusterResolver` is of no use here: it sorts the nodes by name, so `node10` comes before `node2` and a task
takes another one's address; it fails without GPUs; all ps would be on the first nodes; a list of a billion takes it minutes.
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
    """Returns job, index, ps_hosts and worker_hosts of this process, or None if it is in no job step of several tasks.

    Of the step's tasks, `NUM_PS` of the environment (1 if it is not set) are ps tasks, on each node in turn, and the others
    workers. On every node the tasks have ports one after the other: those that `srun --resv-ports` reserves, or else a hundred
    that depend on the job and the step.

    Where Slurm shows all of a node's GPUs to all of its tasks, each worker takes one of them in turn
    (`CUDA_VISIBLE_DEVICES`); those that it shows to one task alone are left to that.

    `PLACES`, a list of nodes, reserves an address on each of them, behind those of the step's own tasks, for workers of other
    jobs. These have `JOIN`, the folder of the run, and `FREE_PLACES`, see `main`.

    Raises:
      UserError: if the tasks are none of a cluster, or are not numbered node by node; if there is no place to join at.
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
    places = [(i, local) for i, count in enumerate(counts) for local in range(count)]  # of the tasks, by rank
    if places[rank][0] != node:
        raise UserError("Slurm: the tasks are not numbered node by node; start them with srun --distribution=block")
    if max(counts) > len(ports):
        raise UserError(f"Slurm: {max(counts)} tasks on a node, but only {len(ports)} ports: srun --resv-ports={max(counts)}")
    num_ps = environ.get("NUM_PS") or "1"
    if not (num_ps.isascii() and num_ps.isdigit() and 1 <= int(num_ps) < len(places)):
        raise UserError(f"NUM_PS must be from 1 to {len(places) - 1} for a step of {len(places)} tasks, not {num_ps!r}")
    by_turn = sorted(places, key=lambda place: (place[1], place[0]))  # first the first task of each node
    ps = sorted(by_turn[: int(num_ps)])
    workers = [place for place in places if place not in ps]
    own = places[rank]
    _choose_gpu(own in ps, [place for place in workers if place[0] == own[0]], own)
    ps_hosts, worker_hosts = ([f"{nodes[i]}:{ports[local]}" for i, local in some] for some in (ps, workers))
    job, those = ("ps", ps) if own in ps else ("worker", workers)
    worker_hosts += _places(dict(zip(nodes, counts, strict=True)), ports)
    return job, those.index(own), ps_hosts, worker_hosts


def _places(counts, ports):
    """Returns an address for each of `PLACES`; `counts` are the tasks of each node of the step."""
    counts, addresses = dict(counts), []
    for node in hosts_in("PLACES", os.environ["PLACES"]) if os.environ.get("PLACES") else []:
        local = counts[node] = counts.get(node, 0) + 1
        if local > len(ports):
            raise UserError(f"Slurm: PLACES has more places on {node} than there are ports, {len(ports)}: name it less often")
        addresses.append(f"{node}:{ports[local - 1]}")
    return addresses


ROOT = Path(__file__).resolve().parents[2]
CLUSTER = "cluster.json"  # in the folder of a run: where its tasks are, and its command line


def _cluster_of(run_dir):
    """Returns the contents of `CLUSTER` in the folder of a run.

    Raises:
      UserError: if there is none, if somebody else may have written it, or if it is not as a run writes it: a job that joins
        starts the scheme that it names, with its flags.
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
    """Returns a command line of a run without --run_dir, given as one word or as two."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [word for before, word in pairs if not (re.match("--?run_dir(=|$)", word) or re.fullmatch("--?run_dir", before))]


def _joining():
    """As `task`, for one of a job that joins a run."""
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
    """Prints, with a zero byte behind each, what a job that joins the run in this folder has to know: the name of its scheme,
    the numbers of its free places, and its flags. Returns the exit status, 2 after a line if nobody can join."""
    try:
        cluster = _cluster_of(run_dir)
        if not _is_locked(run_dir, 0):
            raise UserError(f"JOIN={run_dir}: the run is over, or has not begun yet")
    except UserError as error:
        print(f"slurm.sbatch: {error}", file=sys.stderr)
        return 2
    words = cluster["scheme"], _free(run_dir, len(cluster["worker"])), *_without_run_dir(cluster["arguments"])
    print(*words, sep="\0", end="\0")
    return 0


def _free(run_dir, num_workers):
    return " ".join(str(k) for k in range(1, num_workers) if not _is_locked(run_dir, k))


def _is_locked(run_dir, worker):
    """Whether this worker holds the lock of its part of the folder, see `common.core.run_folder`."""
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

    Below those that systems give to outgoing connections. Other steps that could be on the same node at the same time
    have others: the next 200 jobs, and the steps of this one.
    """
    first = 10000 + 100 * ((int(job_id) + 37 * int(step_id)) % 200)
    return f"{first}-{first + 99}"


MOST = 2**16  # hosts in a list, ports, tasks: Slurm has no more hosts in one, a machine no more ports


def hosts_in(name, text):
    """Returns the hosts in a list as Slurm writes it, `a,n[1-2,07]`, in its order: a, n1, n2, n07.

    Raises:
      UserError: if the text of this variable is no such list, or one of more than 65,536 hosts.
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
            if not numbers or count < 1 or len(hosts) + count > MOST:  # counted before they are made
                raise _no_list(name, text)
            hosts += [f"{prefix}{int(numbers[1]) + i:0{len(numbers[1])}}" for i in range(count)]
        hosts += [] if ranges else [prefix]
    if len(hosts) > MOST:
        raise _no_list(name, text)
    return hosts


def _tasks_per_node(text, num_nodes):
    """Returns how many tasks each node has, of `2(x3),1`: 2, 2, 2, 1."""
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
