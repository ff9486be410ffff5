"""From one worker to eight and back to one while HogWild trains the digits: `bash benchmarks/come_and_go.sh`.

A local step takes 20 ms longer than it would (`--delays`), as eight workers share few cores here. Each time that a worker has
trained, or has left, worker 0 trains for some seconds more; then the next one joins or leaves. It prints a table of what the
metrics of the workers say, and writes `come_and_go.json` and the run's curve, `come_and_go.png`, beside this file.
"""

import argparse
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compare

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from common.core import read_metrics  # noqa: E402
from common.launch import control  # noqa: E402

MOST, DELAY_MS = 8, 20
FLAGS = [
    *("HogWild/hogwild.py", "--launch", "--data=digits", "--num_workers=1", f"--max_workers={MOST}"),
    *(f"--delays={','.join([str(DELAY_MS)] * MOST)}", "--epochs=1000000", "--evaluation_secs=5", "--learning_rate=0.05"),
]
STOP = """
from pathlib import Path


def stop(step, metrics):
    return Path(__file__).with_name("stop").exists()
"""


def main():
    """Runs it, prints the table, and writes down what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=6, help="with each number of workers (default: 6)")
    options = parser.parse_args()
    if not options.seconds > 0:
        parser.error("--seconds must be more than 0")
    os.chdir(HERE.parent)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, moments = Path(folder, "run"), []
        Path(folder, "callback.py").write_text(STOP)
        command = [sys.executable, *FLAGS, f"--callback={folder}/callback.py:stop", f"--run_dir={run_dir}"]
        with compare.started(command) as process:
            for what, number in [("join", i) for i in range(1, MOST)] + [("leave", i) for i in range(MOST - 1, 0, -1)]:
                train(process, run_dir, options.seconds)
                moments.append((what, number, time.time()))
                control.ask(run_dir, what, 1)
                wait(process, functools.partial(is_there, run_dir, moments[-1]))
            train(process, run_dir, options.seconds)
            Path(folder, "stop").touch()
            if process.wait():
                sys.exit(f"the run ended with {process.returncode}")
        report = report_of(read_metrics(run_dir), moments, json.loads((run_dir / "result.json").read_text()))
        shutil.copy(run_dir / "curve.png", HERE / "come_and_go.png")
    (HERE / "come_and_go.json").write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))


def wait(process, is_so):
    """Returns when it is so; exits if the run has ended before."""
    while not is_so():
        with contextlib.suppress(subprocess.TimeoutExpired):
            sys.exit(f"the run has ended with {process.wait(0.05)}")


def train(process, run_dir, seconds):
    """Returns when worker 0 has reported so many seconds more."""
    path = run_dir / "metrics" / "worker-0.jsonl"
    wait(process, path.exists)
    begin, lines = time.time(), lambda: [line for line in read_metrics(run_dir) if line["worker"] == 0 and "samples" in line]
    wait(process, lambda: any(line["time"] > begin + seconds for line in lines()))


def is_there(run_dir, asked):
    """Whether a worker has trained since it was asked to join, or has said that it leaves."""
    what, worker, moment = asked
    mine = [line for line in read_metrics(run_dir) if line["worker"] == worker and line["time"] > moment]
    return any("samples" in line if what == "join" else "left" in line for line in mine)


def report_of(lines, moments, result):
    """Returns what was measured.

    Args:
      lines: of metrics, of all workers.
      moments: (what, worker, time) of those who were asked to join or leave.
      result: of the run.
    """
    came = {line["worker"]: line["time"] for line in lines if "came" in line}
    left = {line["worker"]: line["time"] for line in lines if "left" in line}
    trained = [line for line in lines if "samples" in line]
    changes = [(came if what == "join" else left)[worker] for what, worker, _ in moments]
    changes = [trained[0]["time"], *changes, trained[-1]["time"]]
    steps = []
    for i, (begin, end) in enumerate(zip(changes, changes[1:])):
        count = i + 1 if i < MOST else 2 * MOST - 1 - i
        samples = sum(count_samples(trained, worker, begin, end) for worker in range(MOST))
        steps.append(
            {
                "workers": count,
                "samples_per_second": round(samples / (end - begin)),
                "longest_gap": round(max(longest_gap(trained, worker, begin, end) for worker in range(count)), 2),
                "waited": round(changes[i] - moments[i - 1][2], 2) if i else 0,
            }
        )
    kept = {key: result[key] for key in ("test_accuracy", "global_steps", "worker_seconds", "wall_seconds", "restarts")}
    return {"command": "bash benchmarks/come_and_go.sh", "cores": os.cpu_count(), "steps": steps, **kept}


def count_samples(lines, worker, begin, end):
    """Returns how many samples a worker trained between these times."""
    counts = [(line["time"], line["samples"]) for line in lines if line["worker"] == worker and line["time"] <= end]
    before = [count for time, count in counts if time <= begin]
    return max((count for _, count in counts), default=0) - max(before, default=0)


def longest_gap(lines, worker, begin, end):
    """Returns the longest time in seconds between two lines of a worker, from which one is within these times."""
    times = [line["time"] for line in lines if line["worker"] == worker]
    pairs = zip(times, times[1:])
    return max((later - sooner for sooner, later in pairs if later > begin and sooner < end), default=0.0)


def table(report):
    """Returns a Markdown table of the report, and the whole run in two sentences."""
    head = "workers", "samples/s", "of each", "seconds until the last one had come, or left", "longest time between two lines"
    rows = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for step in report["steps"]:
        n, speed = step["workers"], step["samples_per_second"]
        waited = f"{step['waited']:.1f}" if step["waited"] else ""
        rows.append(f"| {n} | {speed:,} | {speed / n:,.0f} | {waited} | {step['longest_gap']:.2f} s |")
    longest = max(step["longest_gap"] for step in report["steps"])
    said = (
        "A worker writes a line of metrics every half second. The longest time between two lines of any worker that trained "
        f"was {longest:.2f} s.\nThe test accuracy at the end was {report['test_accuracy']:.3f}, after "
        f"{report['global_steps']:,} updates and {report['worker_seconds']:.0f} s of all workers together."
    )
    return "\n".join([*rows, "", said])


if __name__ == "__main__":
    compare.interruptible(main)
