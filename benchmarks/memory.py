"""Runs the smallest problem at full speed for a long time, and shows the memory of each task and the disk space of the run.

    python benchmarks/memory.py --minutes=30
    python benchmarks/memory.py --minutes=5 --scheme=DiLoCo/diloco.py

Memory is the private memory of a task (RssAnon of Linux), in MB; the folder of the run is the size of all of its files.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import compare

ROOT = Path(__file__).resolve().parents[1]


def tasks_of(run_dir):
    """Returns {name: process id} of the run's tasks."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").replace("\0", " ").split()
        except OSError:
            continue
        given = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
        if given.get("run_dir") == run_dir and "job_name" in given:
            found[f"{given['job_name']} {given['task_index']}"] = int(path.parent.name)
    return found


def megabytes(pid):
    """Memory of a process that is its own."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def most_megabytes(pid):
    """The most memory that a process has had at a time, with the pages that it shares with others."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def processor_seconds(pid):
    """Time that the processor has worked for a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def main():
    """Runs, and prints a row each minute."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--scheme", default="HogWild/hogwild.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / options.scheme), "--launch", "--data=linear", "--model=linear", "--epochs=1e9"]
        command += [f"--seconds={60 * options.minutes + 15}", f"--run_dir={folder}/run"]
        with compare.started(command) as process:
            while len(list(Path(folder).glob("run/metrics/*.jsonl"))) < 2 and process.poll() is None:
                time.sleep(0.1)  # until both workers train
            began = time.monotonic()
            for minute in range(int(options.minutes) + 1):
                time.sleep(max(0.0, began + 60 * minute - time.monotonic()))
                memory = {name: megabytes(pid) for name, pid in sorted(tasks_of(f"{folder}/run").items())}
                disk = sum(path.stat().st_size for path in Path(folder, "run").rglob("*") if path.is_file()) / 2**20
                if minute == 0:
                    print("| minute | " + " | ".join(memory) + " | folder |\n|--:|" + "--:|" * (len(memory) + 1))
                print(f"| {minute} | " + " | ".join(f"{mb:.1f}" for mb in memory.values()) + f" | {disk:.2f} |", flush=True)
            status = process.wait(60)
    sys.exit(status)


if __name__ == "__main__":
    compare.interruptible(main)
