"""Which task of a cluster a process is that Slurm has started: what `srun` says to each task of a job step.

TensorFlow's `SlurmClusterResolver` serves for reading Slurm's lists, not for the rest: it sorts the nodes by name, so `node10`
comes before `node2` and a task takes another one's address; it fails without GPUs; and all ps would be on the first nodes.
"""

import os

from common import silent
from common.flags import UserError

STEP = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def task():
    """Returns job, index, ps_hosts and worker_hosts of this process, or None if it is in no job step of several tasks.

    Of the step's tasks, `NUM_PS` of the environment (1 if it is not set) are ps tasks, on each node in turn, and the others
    workers. On every node the tasks have ports one after the other: those that `srun --resv-ports` reserves, or else a hundred
    that depend on the job and the step.

    Where Slurm shows all of a node's GPUs to all of its tasks, each worker takes one of them in turn
    (`CUDA_VISIBLE_DEVICES`); those that it shows to one task alone are left to that.

    Raises:
      UserError: if the tasks are none of a cluster, or are not numbered node by node.
    """
    environ = os.environ
    if int(environ.get("SLURM_STEP_NUM_TASKS") or 1) == 1:
        return None
    missing = [name for name in STEP if not environ.get(name)]
    if missing:
        raise UserError(f"SLURM_STEP_NUM_TASKS names a job step of several tasks, but {', '.join(missing)} is missing")
    nodelist, tasks_per_node, rank, node, job_id, step_id = (environ[name] for name in STEP)
    with silent():
        from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import expand_hostlist, expand_tasks_per_node
    nodes, counts = expand_hostlist(nodelist), expand_tasks_per_node(tasks_per_node)
    ports = [int(port) for port in expand_hostlist(f"[{environ.get('SLURM_STEP_RESV_PORTS') or ports_of(job_id, step_id)}]")]
    places = [(i, local) for i, count in enumerate(counts) for local in range(count)]  # of the tasks, by rank
    if places[int(rank)][0] != int(node):
        raise UserError("Slurm: the tasks are not numbered node by node; start them with srun --distribution=block")
    if max(counts) > len(ports):
        raise UserError(f"Slurm: {max(counts)} tasks on a node, but only {len(ports)} ports: srun --resv-ports={max(counts)}")
    num_ps = environ.get("NUM_PS") or "1"
    if not (num_ps.isascii() and num_ps.isdigit() and 1 <= int(num_ps) < len(places)):
        raise UserError(f"NUM_PS must be from 1 to {len(places) - 1} for a step of {len(places)} tasks, not {num_ps!r}")
    by_turn = sorted(places, key=lambda place: (place[1], place[0]))  # first the first task of each node
    ps = sorted(by_turn[: int(num_ps)])
    workers = [place for place in places if place not in ps]
    own = places[int(rank)]
    _choose_gpu(own in ps, [place for place in workers if place[0] == own[0]], own)
    ps_hosts, worker_hosts = ([f"{nodes[i]}:{ports[local]}" for i, local in some] for some in (ps, workers))
    job, those = ("ps", ps) if own in ps else ("worker", workers)
    return job, those.index(own), ps_hosts, worker_hosts


def ports_of(job_id, step_id):
    """Returns the first and the last port of a job step, as `10000-10099`.

    Below those that systems give to outgoing connections. Other steps that could be on the same node at the same time
    have others: the next 200 jobs, and the steps of this one.
    """
    first = 10000 + 100 * ((int(job_id) + 37 * int(step_id)) % 200)
    return f"{first}-{first + 99}"


def _choose_gpu(is_ps, neighbours, own):
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if is_ps:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    elif "," in gpus and len(gpus.split(",")) == int(os.environ.get("SLURM_GPUS_ON_NODE") or 0):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[neighbours.index(own) % len(gpus.split(","))]
