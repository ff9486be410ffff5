"""Task of this process in the cluster, addresses of the others, and device placement.

Reading it from the environment needs no tensorflow; using it does.
"""

import contextlib
import dataclasses
import ipaddress
import json
import os
import re
import signal
import threading
from dataclasses import dataclass
from typing import Any

from common import tf
from common.cluster import membership, slurm
from common.core import UserError, say_waits_of, signals


@dataclass
class TaskSpecDef:
    """One task of a cluster of ps tasks and workers; without any hosts, a process that trains on its own.

    One of the workers is the master (also called chief), which initializes and saves the parameters: the one at `master`, or
    worker 0 if that is not given. TensorFlow sees the jobs `ps` and `worker`; the master is worker 0 either way.

    Args:
      task_type: "ps", "worker", "master" (or "chief"), or "evaluator", which evaluates checkpoints and does not train.
      index: index among the tasks of its type.
      trial: a platform's name for one of several trainings; it is only stored.
      ps_hosts: host:port of each ps, a list or comma-separated text.
      worker_hosts: host:port of each worker, without a master that has a host of its own.
      master: host:port of the master.

    Attributes:
      type: the task_type, "master" for a chief.
      num_ps, num_workers: number of ps and of workers, including the master.
      shard_index: index of this worker's shard of the samples, from 0 (the master's) to num_workers - 1; 0 for others.

    Raises:
      UserError: if the task is not in the cluster, or the cluster is invalid.
    """

    task_type: str = "master"
    index: int = 0
    trial: str | None = None
    ps_hosts: Any = None
    worker_hosts: Any = None
    master: str | None = None
    _server: Any = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        self.ps_hosts, self.worker_hosts, master = map(_hosts, (self.ps_hosts, self.worker_hosts, self.master))
        self.master = master[0] if master else None
        self.type = self.task_type = "master" if self.task_type == "chief" else self.task_type
        if isinstance(self.index, bool) or not re.fullmatch(r"\s*-?[0-9]{1,9}\s*", str(self.index)):
            raise UserError(f"the index of a task must be a whole number, not {_short(self.index)}")
        self.index = int(self.index)
        if len(master) > 1:
            raise UserError(f"a cluster has at most one master, not {len(master)}: {_short(', '.join(master), quoted=False)}")
        self.hosts = {"ps": self.ps_hosts, "worker": [*master, *self.worker_hosts]}
        self._check()
        self.num_ps = len(self.hosts["ps"])
        self.num_workers = len(self.hosts["worker"]) or 1
        self.job_index = self.index + 1 if self.master and self.type == "worker" else self.index
        self.shard_index = self.job_index if self.is_worker() else 0

    def _check(self):
        members = {"master": [self.master] if self.master else [], "evaluator": [""], **self.hosts}
        if not isinstance(self.type, str) or self.type not in members:
            raise UserError(f"there is no job {_short(self.type)}: a task is a ps, a worker, a master or an evaluator")
        alone = not any(self.hosts.values())
        if alone and self.type in ("master", "worker"):
            members[self.type] = [""]
        elif not alone:
            for job, hosts in self.hosts.items():
                if not hosts:
                    raise UserError(f"there is no {job}: a cluster needs at least one ps and one worker")
        tasks: dict[str, str] = {}  # by address
        for job, hosts in self.hosts.items():
            for i, host in enumerate(hosts):
                # Programs such as ssh would take a name with a leading dash for an option.
                address = re.fullmatch(r"[\w.:%[\]][\w.:%[\]-]*:(\d{1,5})", str(host), re.ASCII)
                if not address or not 0 < int(address[1]) < 2**16 or _is_like_no_ip(str(host).rpartition(":")[0]):
                    raise UserError(f"the {job} {_short(host)} is not an address: expected host:port")
                other = tasks.setdefault(host.lower(), f"{job} {i}")
                if other != f"{job} {i}":
                    raise UserError(f"{host} is the address of {other} and of {job} {i}: each task needs a port of its own")
        members["worker"] = members["worker"][1:] if self.master else members["worker"]
        count = len(members[self.type])
        if not 0 <= self.index < count:
            several = self.type if self.type == "ps" else f"{self.type}s"
            known = {0: f"no {self.type}", 1: f"only {self.type} 0"}
            those = known.get(count, f"only {several} 0 to {count - 1}")
            raise UserError(f"this is {self.type} {self.index}, but the cluster has {those}")

    def is_ps(self):
        """Whether this is a parameter server."""
        return self.type == "ps"

    def is_worker(self):
        """Whether it trains, as worker or master."""
        return self.type in ("worker", "master")

    def is_master(self):
        """Whether it is the chief, which initializes, saves and reports."""
        return self.is_worker() and self.shard_index == 0

    def is_evaluator(self):
        """Whether it is an evaluator, which is not part of the cluster."""
        return self.type == "evaluator"

    @property
    def job(self):
        """Its job in TensorFlow's cluster, ps or worker."""
        return "ps" if self.is_ps() else "worker"

    @property
    def device(self):
        """The device of this task, `/job:worker/task:1`; None outside a cluster."""
        return f"/job:{self.job}/task:{self.job_index}" if self._has_server() else None

    def device_fn(self):
        """Returns a device function for `tf.device`: variables round-robin on the ps, everything else on this task."""
        if not self._has_server():
            return None
        return tf.train.replica_device_setter(ps_tasks=self.num_ps, worker_device=self.device)

    def config(self, config=None, reaches_workers=False):
        """Returns the session's configuration: `config`, or the default one, with this task's device filters.

        Without the filters a worker waits for every other worker, and hangs when one exits. With `reaches_workers` it does.
        """
        merged = tf.ConfigProto(allow_soft_placement=True)
        merged = merged if config is None else type(merged).FromString(config.SerializeToString())
        if self.is_ps():
            merged.device_count["GPU"] = 0  # a ps only adds tensors in host memory
        if self._has_server():
            if not merged.device_filters:
                merged.device_filters.extend(["/job:ps", "/job:worker" if reaches_workers else self.device])
            merged.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
        return merged

    def _has_server(self):
        return bool(self.num_ps) and not self.is_evaluator()

    def start_server(self):
        """Starts and returns this task's `tf.train.Server`. It does not block: `membership.serve` keeps a ps alive.

        Raises:
          UserError: if it cannot listen on its port.
        """
        if self._server is None and self._has_server():
            cluster = tf.train.ClusterSpec(self.hosts)
            try:
                self._server = tf.train.Server(cluster, self.job, self.job_index, config=self.config())
            except tf.errors.UnknownError:
                address = self.hosts[self.job][self.job_index]
                raise UserError(
                    f"{self.job} {self.job_index} cannot listen at {address}: the port is taken on this machine, or not "
                    "allowed; choose another port for it, in the flags of all tasks"
                ) from None
            if self.is_worker():
                say_waits_of(f"{self.job} {self.job_index}", self.hosts)
        return self._server

    def is_serving(self):
        """Whether this task's server has been started."""
        return self._server is not None

    def create_server(self):
        """Starts and returns this task's `tf.train.Server`; on a ps it blocks until training is over and returns None.

        Training is over when each worker has left its `DistributedSession`. A task outside a cluster has no server: None.
        """
        if not self.is_ps():
            return self.start_server()
        if self._server is None:
            with _default_interrupt():  # a ps blocks outside Python, so a Python handler would never run
                membership.serve(self, self.start_server())
        return None

    def target(self):
        """Returns the target for a session of this task, and starts its server if needed."""
        server = self.create_server()
        return server.target if server else ""

    def use_last_worker_as_evaluator(self):
        """Returns the `TaskSpecDef` of this task in a cluster whose last worker becomes the evaluator.

        All tasks must call it, also the ps.

        Raises:
          UserError: if no worker would be left to train.
        """
        if self.is_evaluator():
            return self
        if self.num_workers == 1 or not self.worker_hosts:
            raise UserError("an evaluator takes the place of the last worker, but the only worker has to train")
        is_last = self.type == "worker" and self.index == len(self.worker_hosts) - 1
        job, index = ("evaluator", 0) if is_last else (self.type, self.index)
        return TaskSpecDef(job, index, self.trial, self.ps_hosts, self.worker_hosts[:-1], self.master)


def _is_like_no_ip(name):
    """Whether a name consists of digits and dots but is no IP address, as `127.0.0.1.`."""
    if "." not in name or name.strip("0123456789."):
        return False
    try:
        ipaddress.IPv4Address(name)
    except ValueError:
        return True
    return False


def _short(value, quoted=True):
    """The user's value, shortened for a one-line message."""
    text = repr(value) if quoted else value
    return text if len(text) <= 100 else f"{text[:60]}... ({len(text):,} characters)"


def _hosts(given):
    if given is None or isinstance(given, str):
        given = [host.strip() for host in given.split(",")] if given else []
    return list(given)


@contextlib.contextmanager
def _default_interrupt():
    """Restores the default action of Ctrl-C, ending the process, unless SIGINT is ignored."""
    is_main = threading.current_thread() is threading.main_thread()  # signal handlers can be set only there
    is_changed = is_main and signals.heeded([signal.SIGINT])
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if is_changed else None
    try:
        yield
    finally:
        if is_changed:
            signal.signal(signal.SIGINT, before)


def TaskSpec():
    """Returns the `TaskSpecDef` of this process from the environment, or None if no variables are set.

    Sources: `TF_CONFIG` (a single task is no cluster); else the variables `JOB_NAME TASK_INDEX PS_HOSTS WORKER_HOSTS
    MASTER_HOST` (the last is optional; master and evaluator need no index); else those of a Slurm job step of several tasks,
    with `NUM_PS`, the number of ps (see `common.cluster.slurm`).

    Raises:
      UserError: if only some of them are set, or the task is not in its cluster.
    """
    if os.environ.get("TF_CONFIG", "").strip():
        return _from_tf_config()
    names = ("JOB_NAME", "TASK_INDEX", "PS_HOSTS", "WORKER_HOSTS")
    given = {name: os.environ.get(name) or None for name in names}
    master = os.environ.get("MASTER_HOST") or None
    if not any(given.values()) and not master:
        of_slurm = slurm.task()
        return _task("Slurm", *of_slurm[:2], None, *of_slurm[2:]) if of_slurm else None
    if given["JOB_NAME"] in ("master", "chief", "evaluator"):
        given["TASK_INDEX"] = given["TASK_INDEX"] or "0"
    may_be_missing = ["WORKER_HOSTS"] if master else []
    job, index, ps_hosts, worker_hosts = _complete(given, may_be_missing).values()
    return _task("the environment", job, index, None, ps_hosts, worker_hosts, master)


def task_from(settings):
    """Returns the `TaskSpecDef` of this process, or None outside a cluster.

    Sources: the flags `--job_name --task_index --ps_hosts --worker_hosts`; without them `TaskSpec`.

    Raises:
      UserError: if only some of them are set, or the task is not in its cluster.
    """
    flag_names = ("job_name", "task_index", "ps_hosts", "worker_hosts")
    given = {f"--{name}": getattr(settings, name) for name in flag_names}
    if all(value is None for value in given.values()):
        return TaskSpec()
    for name, hosts in given.items():
        if hosts == []:
            raise UserError(f"{name}= names no host: expected host:port of each {name[2:-6]}, separated by commas")
    job, index, ps_hosts, worker_hosts = _complete(given).values()
    return _task("the flags", job, index, None, ps_hosts, worker_hosts)


def _complete(given, may_be_missing=()):
    missing = [name for name, value in given.items() if value is None and name not in may_be_missing]
    if missing:
        present = next((f"{name}={_shown(value)}" for name, value in given.items() if value is not None), "MASTER_HOST")
        raise UserError(f"{present} names a task of a cluster, but {', '.join(missing)} is missing")
    return given


def _shown(value):
    return _short(",".join(value) if isinstance(value, list) else str(value), quoted=False)


def _from_tf_config():
    """As `TaskSpec`. TensorFlow's resolver takes seconds to import, and accepts an index of 1.5 as 1."""
    example = '{"cluster": {"ps": ["host:port"], "worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'
    try:
        config = json.loads(os.environ["TF_CONFIG"])
    except ValueError as error:
        raise UserError(f"TF_CONFIG is not JSON ({error}); expected {example}") from None
    except RecursionError:
        raise UserError(f"TF_CONFIG is nested too deeply; expected {example}") from None
    config = config if isinstance(config, dict) else {}
    cluster, task = config.get("cluster"), config.get("task", {})
    if not isinstance(cluster, dict) or not isinstance(task, dict) or (cluster and not {"type", "index"} <= set(task)):
        raise UserError(f"TF_CONFIG lacks the cluster or the task; expected {example}")
    hosts = {name: _hosts_of_job(name, tasks, example) for name, tasks in cluster.items()}
    ps, workers = hosts.get("ps", []), hosts.get("worker", [])
    masters = [*hosts.get("chief", []), *hosts.get("master", [])]
    job, index, trial = task.get("type"), task.get("index"), task.get("trial")
    for name, tasks in hosts.items():
        if not tasks and not (name == "worker" and masters):  # a chief may be the only worker
            raise UserError(f"TF_CONFIG names no host of the job {_short(name)}; expected {example}")
    if not ps and len(masters) + len(workers) <= 1 and job != "ps":
        if hosts and job != "evaluator":
            _task("TF_CONFIG", job, index)  # raises a UserError unless it is the only task
        return TaskSpecDef("evaluator", trial=trial) if job == "evaluator" else None
    return _task("TF_CONFIG", job, index, trial, ps, workers, masters)


def _hosts_of_job(name, tasks, example):
    """Returns the list of a job's hosts; some platforms write a dictionary by index instead."""
    if isinstance(tasks, dict) and set(tasks) == set(map(str, range(len(tasks)))):
        tasks = [tasks[str(i)] for i in range(len(tasks))]
    if not isinstance(tasks, list) or not all(isinstance(host, str) for host in tasks):
        raise UserError(f"TF_CONFIG: the hosts of the job {_short(name)} are not a list of host:port; expected {example}")
    return tasks


def _task(source, *arguments):
    try:
        return TaskSpecDef(*arguments)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
