"""Which task am I, where are the others, which device gets what, when may a ps exit.

What a process reads about itself here needs no tensorflow; what it does with it does.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from common import tf
from common.flags import UserError


@dataclass(frozen=True)
class TaskSpecDef:
    """One task of a cluster of ps tasks and workers. Worker 0 is the chief (also called master)."""

    type: str
    index: int
    ps_hosts: tuple[str, ...]
    worker_hosts: tuple[str, ...]

    @property
    def num_ps(self):
        return len(self.ps_hosts)

    @property
    def num_workers(self):
        return len(self.worker_hosts)

    def is_ps(self):
        return self.type == "ps"

    def is_master(self):
        return self.type == "worker" and self.index == 0

    @property
    def device(self):
        """The device of this task, `/job:worker/task:1`."""
        return f"/job:{self.type}/task:{self.index}"

    def device_fn(self):
        """Puts variables on the ps tasks in turn, everything else on this task."""
        return tf.train.replica_device_setter(ps_tasks=self.num_ps, worker_device=self.device)

    def config(self):
        """Session configuration. Without the filter a worker waits for every other worker, and hangs when one ends."""
        config = tf.ConfigProto(device_filters=["/job:ps", self.device], allow_soft_placement=True)
        config.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
        return config

    def create_server(self):
        """Starts and returns this task's `tf.train.Server`."""
        cluster = tf.train.ClusterSpec({"ps": self.ps_hosts, "worker": self.worker_hosts})
        return tf.train.Server(cluster, self.type, self.index, config=self.config())


def task_from(settings, environ: Mapping[str, str] = os.environ):
    """Returns the `TaskSpecDef` of this process, or None if nothing says that it is one of a cluster.

    The first of these that is set counts: the flags `--job_name --task_index --ps_hosts --worker_hosts`; `TF_CONFIG`; the
    variables `JOB_NAME TASK_INDEX PS_HOSTS WORKER_HOSTS` (and `MASTER_HOST`, which is a worker before the others).

    Raises:
      UserError: if only some of them are set, or the task is not in its cluster.
    """
    flag_names = ("job_name", "task_index", "ps_hosts", "worker_hosts")
    given = {f"--{name}": getattr(settings, name) for name in flag_names}
    if any(value is not None for value in given.values()):
        return _task("the flags", *_complete(given).values())
    if environ.get("TF_CONFIG", "").strip():
        return _from_tf_config(environ["TF_CONFIG"])
    names = ("JOB_NAME", "TASK_INDEX", "PS_HOSTS", "WORKER_HOSTS")
    given = {name: environ.get(name) or None for name in names}
    master = environ.get("MASTER_HOST")
    if master:
        given["WORKER_HOSTS"] = ",".join(filter(None, [master, given["WORKER_HOSTS"]]))
    if not any(given.values()):
        return None
    if master and given["JOB_NAME"] == "master":
        given["TASK_INDEX"] = given["TASK_INDEX"] or "0"
    job, index, ps_hosts, worker_hosts = _complete(given).values()
    try:
        index = int(index)
    except ValueError:
        raise UserError(f"TASK_INDEX must be a whole number, not {index!r}") from None
    if job in ("master", "chief"):
        job = "worker"
    elif master and job == "worker" and index >= 0:
        index += 1
    return _task("the environment", job, index, ps_hosts.split(","), worker_hosts.split(","))


def _complete(given):
    missing = [name for name, value in given.items() if value in (None, [])]
    if missing:
        present = next(f"{name}={value}" for name, value in given.items() if value not in (None, []))
        raise UserError(f"{present} names a task of a cluster, but {', '.join(missing)} is missing")
    return given


def _from_tf_config(text):
    example = '{"cluster": {"ps": ["host:port"], "worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UserError(f"TF_CONFIG is not JSON ({error}); expected {example}") from None
    try:
        cluster, job, index = config["cluster"], config["task"]["type"], int(config["task"]["index"])
        if not all(isinstance(h, str) for hosts in cluster.values() for h in hosts):
            raise TypeError
        chiefs = [*cluster.get("chief", []), *cluster.get("master", [])]
        workers = [*chiefs, *cluster.get("worker", [])]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"TF_CONFIG lacks the cluster or the task; expected {example}") from None
    members = chiefs if job in ("chief", "master") else cluster.get(job, [])
    if job in ("chief", "master", "worker") and not 0 <= index < len(members):
        raise UserError(f"TF_CONFIG names {job} {index}, but the cluster has {len(members)}: 0 to {len(members) - 1}")
    if job in ("chief", "master"):
        job = "worker"
    elif job == "worker":
        index += len(chiefs)
    return _task("TF_CONFIG", job, index, cluster.get("ps", []), workers)


def _task(source, job, index, ps_hosts, worker_hosts):
    hosts = {"ps": ps_hosts, "worker": worker_hosts}
    if job not in hosts:
        raise UserError(f"{source} name the job {job!r}: a task is of job ps or worker")
    for name, members in hosts.items():
        if not members:
            raise UserError(f"{source} name no {name}: a cluster needs at least one ps and one worker")
        for host in members:
            name_or_address, _, port = host.rpartition(":")
            if not name_or_address or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
                raise UserError(f"{source} name the {name} {host!r}: expected host:port")
    if not 0 <= index < len(hosts[job]):
        raise UserError(f"{source} name {job} {index}, but the cluster has {len(hosts[job])}: 0 to {len(hosts[job]) - 1}")
    return TaskSpecDef(job, index, tuple(ps_hosts), tuple(worker_hosts))


class Rendezvous:
    """How the workers of a cluster end together, as operations in the present graph.

    Each worker hands in a report when it stops, and waits; the chief gathers the reports of all, does what is to be done
    with parameters that no one changes any more, and dismisses the others. Nobody polls: all wait on queues on ps 0. The
    reports stay in a table there, so that whoever is restarted meanwhile, the chief too, can take up where it was.

    Args:
      task: this worker.
      size: numbers in a report.
    """

    def __init__(self, task, size):
        self._num_workers = task.num_workers
        self._report = report = tf.placeholder(tf.float64, [size])
        with tf.device("/job:ps/task:0"):
            table = tf.raw_ops.MutableHashTableOfTensorsV2(
                key_dtype=tf.int64, value_dtype=tf.float64, value_shape=[size], shared_name="reports"
            )
            arrivals = tf.queue.FIFOQueue(1000, tf.int64, shared_name="arrivals")
            dismissal = tf.queue.FIFOQueue(1, tf.bool, shared_name="dismissal")
            index = tf.constant(task.index, tf.int64)
            self._hand_in = tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=[index], values=[report])
            with tf.control_dependencies([self._hand_in]):
                arrive = arrivals.enqueue(index)
            with tf.control_dependencies([arrive]):
                self._hand_in_and_wait = dismissal.dequeue()
            self._reports = tf.raw_ops.LookupTableExportV2(table_handle=table, Tkeys=tf.int64, Tvalues=tf.float64)
            self._next_arrival = arrivals.dequeue()
            self._dismiss = dismissal.close()

    def wait(self, session, report):
        """Hands in the report of a worker that is not the chief, and waits until it is dismissed."""
        try:
            session.run(self._hand_in_and_wait, {self._report: report})
        except tf.errors.OutOfRangeError:
            pass  # the chief has closed the queue, in which there never was anything

    def gather(self, session, report):
        """Adds the chief's own report, waits for those of all workers, and returns them `[num_workers, size]` in order."""
        session.run(self._hand_in, {self._report: report})
        while True:
            workers, reports = session.run(self._reports)
            if len(workers) == self._num_workers:
                return reports[workers.argsort()]
            session.run(self._next_arrival)

    def dismiss(self, session):
        """The chief's: lets the other workers go."""
        session.run(self._dismiss)


def _done_queue(ps_index):
    with tf.device(f"/job:ps/task:{ps_index}"):
        return tf.queue.FIFOQueue(1000, tf.int64, shared_name="done")


def say_done(task, server):
    """Tells every ps that this worker needs it no more."""
    with tf.Graph().as_default():
        says = [_done_queue(i).enqueue(task.index) for i in range(task.num_ps)]
        with tf.Session(server.target, config=task.config()) as session:
            try:
                session.run(says)
            except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError):
                pass  # a ps that this was the last word for exits at once, maybe before it could answer


def serve(task, server):
    """The whole life of a ps: returns when every worker has said that it is done."""
    done: set[int] = set()
    with tf.Graph().as_default():
        next_done = _done_queue(task.index).dequeue()
        with tf.Session(server.target, config=task.config()) as session:
            while len(done) < task.num_workers:
                done.add(int(session.run(next_done)))
