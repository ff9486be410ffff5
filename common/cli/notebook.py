"""Clusters for notebooks: tasks as processes on this machine that end, at the latest, with the notebook's kernel.

Run as a program, it is one of these tasks: `python common/cli/notebook.py '{"ps": ["localhost:2222"], ...}' ps 0`.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from common import tf
from common.cluster import task_spec
from common.launch import launcher, sandbox

_open: set[object] = set()  # keeps unreferenced clusters alive


def quiet():
    """Imports tensorflow, and silences the log of its C++ code on standard error from now on.

    Call it before any other import of tensorflow, such as `from common import DistributedSession`.
    """
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    tf.train  # noqa: B018, any attribute: its first use imports tensorflow, which reads the variable


class Message(NamedTuple):
    """A message from one task to another in a session call."""

    sender: str  # /job:ps/task:0
    receiver: str
    name: str  # of the source operation
    shape: tuple | None  # None: only a completion signal, or the tensor's shape is unknown
    size: int | None  # bytes; None if unknown before sending


def messages(session, fetches):
    """Runs `fetches`, and returns the `Message`s between tasks, in no particular order.

    TensorFlow partitions a graph by task: each cut edge becomes a send in one part and a receive in the other.
    """
    metadata = tf.RunMetadata()
    session.run(fetches, options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    found = []
    for node in (node for part in metadata.partition_graphs for node in part.node if node.op == "_Send"):
        send = node.attr
        sender, receiver = (
            send[end].s.decode().split("/device:")[0].replace("/replica:0", "") for end in ("send_device", "recv_device")
        )
        if sender == receiver:
            continue
        name = send["tensor_name"].s.decode().split("_", 2)[2]  # edge_12_NAME
        shape: Any = None
        size: Any = 0  # an empty tensor signals the completion of this operation
        if node.input[0].partition(":")[0] == name:
            size = None
            with contextlib.suppress(KeyError):  # for an operation added by graph optimization
                output = session.graph.get_operation_by_name(name).outputs[0]
                shape, count = tuple(output.shape), output.shape.num_elements()
                size = None if count is None else output.dtype.size * count
        found.append(Message(sender, receiver, name, shape, size))
    return found


class LocalCluster:
    """A cluster on this machine: addresses for its tasks, and processes for the tasks other than the notebook.

        local = LocalCluster(ps=1, worker=2)
        local.start("ps", 0)
        server = local.task("worker", 0).create_server()

    The ports stay reserved until `close`, which kills the remaining processes; so does any end of the kernel (Linux).

    Attributes:
      hosts: {job: addresses}, as for `tf.train.ClusterSpec`. They have free ports, unless they are given in place of the
        number of tasks of each job.
    """

    def __init__(self, hosts=None, **jobs):
        os.environ["TF_GRPC_REUSE_PORT"] = "true"  # lets servers listen on reserved ports
        self._stack = contextlib.ExitStack()
        _open.add(self)
        self._stack.callback(_open.discard, self)
        hosts = hosts or {job: ["127.0.0.1:0"] * count for job, count in jobs.items()}
        self.hosts = {job: [self._reserve(address) for address in addresses] for job, addresses in hosts.items()}

    def _reserve(self, address):
        port = launcher.reserved_port(int(address.rpartition(":")[2]))
        return f"127.0.0.1:{self._stack.enter_context(port).getsockname()[1]}"

    def task(self, job, index):
        """Returns the `TaskSpecDef` of a ps or a worker, in a cluster that has both."""
        return task_spec.TaskSpecDef(job, index, ps_hosts=self.hosts["ps"], worker_hosts=self.hosts["worker"])

    def target(self, job, index):
        """Returns the session target for the server of a task, `grpc://host:port`."""
        return f"grpc://{self.hosts[job][index]}"

    def start(self, job, index):
        """Starts the server of a task as a process, and returns its `subprocess.Popen`; an error appears under the cell.

        A ps of a cluster with workers exits once each worker has reported that it is done (`membership.say_done`).
        """
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(self.hosts), job, str(index)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "LAUNCHER_PID": str(os.getpid())},
            start_new_session=True,  # so that interrupting a cell does not end it
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)  # before the wait: callbacks run in reverse order
        return process

    def close(self):
        """Ends all processes and gives the ports back."""
        self._stack.close()


def shared_cluster(path, **jobs):
    """Returns the `LocalCluster` shared by several notebooks that run at the same time, each in its own kernel.

    The first kernel writes the addresses to the file `path`; they stay valid while one of the kernels lives. Each kernel
    reserves all the ports, so that no other process can take them after the end of one kernel. `jobs` are those of
    `LocalCluster`.
    """
    path = Path(path)
    with open(path.with_suffix(".lock"), "a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # one kernel at a time
        file = open(path, "a+")
        with contextlib.suppress(BlockingIOError):  # other kernels hold the shared lock below
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
        file.seek(0)
        known = file.read()
        local = LocalCluster(json.loads(known or "{}"), **jobs)
        if not known:
            json.dump(local.hosts, file)
            file.flush()
        fcntl.flock(file, fcntl.LOCK_SH)
        local._stack.enter_context(file)
    return local


def _main(hosts, job, index):
    sandbox.die_with_parent(int(os.environ["LAUNCHER_PID"]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a server blocks in C++, so Python would never handle the signal
    quiet()
    local, index = json.loads(hosts), int(index)
    if job == "ps" and "worker" in local:
        task_spec.TaskSpecDef(job, index, ps_hosts=local["ps"], worker_hosts=local["worker"]).create_server()
    else:
        tf.train.Server(tf.train.ClusterSpec(local), job, index).join()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, to keep its module names out of other imports
    _main(*sys.argv[1:])
