"""Runs the tasks of one node that SkyPilot has rented: a worker, and on each of the first NUM_PS nodes also a ps.

    bash Multiple-Machines/skypilot.sh SCHEME --run_dir=FOLDER [flags of the scheme]

SkyPilot sets SKYPILOT_NODE_IPS, an address per line, and SKYPILOT_NODE_RANK, the line of this node, from 0:
https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html
"""

import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from common.core import UserError

ROOT = Path(__file__).resolve().parents[1]
PORTS = {"ps": 2222, "worker": 2223}
USAGE = "expected: bash Multiple-Machines/skypilot.sh SCHEME --run_dir=FOLDER [flags of the scheme]"


def configs(environ):
    """Returns the `TF_CONFIG` of each task of this node, as dictionaries: that of its ps, if it has one, and of its worker.

    The first node has worker 0, the chief.

    Args:
      environ: SKYPILOT_NODE_IPS and SKYPILOT_NODE_RANK; SKYPILOT_NUM_NODES, if set, is the number of addresses; NUM_PS (default
        1) is the number of ps tasks.

    Raises:
      UserError: if a variable is missing or wrong, or they contradict each other.
    """
    missing = [name for name in ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK") if not environ.get(name, "").strip()]
    if missing:
        raise UserError(f"{' and '.join(missing)} must be set, as SkyPilot does: see Multiple-Machines/skypilot.yaml")
    addresses = environ["SKYPILOT_NODE_IPS"].split()
    for address in addresses:
        try:
            ipaddress.IPv4Address(address)
        except ValueError:
            raise UserError(f"SKYPILOT_NODE_IPS must be IPv4 addresses, one per line, not {address[:100]!r}") from None
    if len(set(addresses)) < len(addresses):
        twice = next(address for address in addresses if addresses.count(address) > 1)
        raise UserError(f"SKYPILOT_NODE_IPS must name each node once, but has {twice} twice")
    nodes = _number(environ, "SKYPILOT_NUM_NODES", 1, None) if environ.get("SKYPILOT_NUM_NODES") else len(addresses)
    if nodes != len(addresses):
        raise UserError(f"SKYPILOT_NODE_IPS has {len(addresses)} addresses, but SKYPILOT_NUM_NODES={nodes}")
    rank = _number(environ, "SKYPILOT_NODE_RANK", 0, nodes - 1)
    num_ps = _number(environ, "NUM_PS", 1, nodes) if environ.get("NUM_PS") else 1
    counts = {"ps": num_ps, "worker": nodes}
    cluster = {job: [f"{address}:{PORTS[job]}" for address in addresses[:count]] for job, count in counts.items()}
    return [{"cluster": cluster, "task": {"type": job, "index": rank}} for job, count in counts.items() if rank < count]


def _number(environ, name, least, most):
    text = environ[name].strip()
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < least or (most is not None and int(text) > most):
        bound = f"from {least} to {most}, for {most + (name != 'NUM_PS')} nodes" if most is not None else f"at least {least}"
        raise UserError(f"{name} must be a whole number {bound}, not {text[:100]!r}")
    return int(text)


def command_of(arguments, rank):
    """Returns the command line of a task.

    The node of the chief resumes where `--run_dir`, on a mounted bucket, has a checkpoint. Other nodes write their logs and
    metrics into a folder of their own: a bucket has one writer.

    Raises:
      UserError: if the arguments do not begin with a scheme and `--run_dir=FOLDER`.
    """
    scheme, *rest = arguments or [""]
    if not re.fullmatch(r"\w[\w-]*", scheme) or not (ROOT / scheme / "run.sh").is_file():
        raise UserError(f"there is no scheme {scheme!r}; {USAGE}" if scheme else f"the scheme is missing; {USAGE}")
    if not rest or not re.fullmatch(r"--run_dir=.+", rest[0], re.DOTALL):
        raise UserError(f"--run_dir=FOLDER must follow the scheme; {USAGE}")
    run_dir, flags = rest[0].partition("=")[2], rest[1:]
    own = [flag for flag in flags if re.match(r"--?(run_dir|num_ps|num_workers|max_workers|(no)?launch)(=|$)", flag)]
    if own:
        raise UserError(f"{own[0][:100]} after --run_dir: the nodes, NUM_PS and the first --run_dir set it: leave it out")
    if rank:
        folder = ROOT / "runs" / scheme / "skypilot" / Path(run_dir).name
        return ["bash", str(ROOT / scheme / "run.sh"), f"--run_dir={folder}", *flags]
    has_checkpoint = any(Path(run_dir, "checkpoints").glob("*.index"))
    return ["bash", str(ROOT / scheme / "run.sh"), rest[0], *flags, *(["--resume"] if has_checkpoint else [])]


def run(arguments):
    """Runs the tasks of this node to their end and returns the first exit status that is not 0, or 0.

    If one fails, the others are ended. SkyPilot sends SIGTERM to all processes of a job, so this one only waits for them.
    """
    tasks = configs(os.environ)
    command = command_of(arguments, tasks[0]["task"]["index"])
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN: the tasks would inherit it
    processes = {}
    for task in tasks:
        no_gpu = {"CUDA_VISIBLE_DEVICES": "-1"} if task["task"]["type"] == "ps" else {}
        process = subprocess.Popen(command, env={**os.environ, **no_gpu, "TF_CONFIG": json.dumps(task)})
        processes[process.pid] = process
    first = 0
    while processes:
        pid, status = os.wait()
        processes.pop(pid).returncode = os.waitstatus_to_exitcode(status)
        if status and not first:
            code = os.waitstatus_to_exitcode(status)
            first = code if code > 0 else 128 - code
            for process in processes.values():
                os.kill(process.pid, signal.SIGTERM)
    return first


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
