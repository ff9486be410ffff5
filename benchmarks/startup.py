"""Measures the time between `bash HogWild/run.sh --steps=1` and its first step: `bash benchmarks/startup.sh`. With `--second`
it measures the time between `train(...)` and the first update, the first and the second time in a program.

It watches the folder of the run, in which each part of the start leaves a file behind, and touches nothing. The parts are
medians over the rounds, beside a bare `import tensorflow` in turn. Writes `startup.json` beside this file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compare

HERE = Path(__file__).resolve().parent
# What is there, under the folder of the run, when a part of the start has ended.
PARTS = {
    "bash, Python, flags, the folder of the run": ".",
    "fork server: `import tensorflow`, `import keras`": "logs/worker-0.log",
    "data, model, graph of worker 0": "metrics/worker-0.jsonl",
    "its session: parameters on the ps, first checkpoint": "checkpoints/checkpoint",
}
LAST = "first step, evaluation, `model.keras`, `curve.png`, the end of all"


def main():
    """Measures, prints the table, and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs (default: 5)")
    parser.add_argument("--second", action="store_true", help="measure the first and the second train() of a program")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.second:
        measure_second(options.rounds)
        return
    imports, runs = [], []
    for _ in range(options.rounds):
        imports.append(seconds_of([sys.executable, "-I", "-c", "import tensorflow"]))
        runs.append(one_run())
    medians = {part: statistics.median(run[part] for run in runs) for part in runs[0]}
    whole, alone = statistics.median(sum(run.values()) for run in runs), statistics.median(imports)
    report = read() | {
        "command": "bash benchmarks/startup.sh",
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "import_tensorflow": round(alone, 2),
        "parts": {part: round(seconds, 2) for part, seconds in medians.items()},
        "whole": round(whole, 2),
        "ratio": round(whole / alone, 2),
    }
    (HERE / "startup.json").write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))


def table(report):
    """Returns a Markdown table of the report."""
    lines = ["| part of `bash HogWild/run.sh --steps=1` | seconds |", "|---|---:|"]
    lines += [f"| {part} | {seconds:.2f} |" for part, seconds in report["parts"].items()]
    lines.append(f"| in all | {report['whole']:.2f} |")
    lines.append(f'| `python -c "import tensorflow"` | {report["import_tensorflow"]:.2f} |')
    lines.append(f"| the ratio of these two | {report['ratio']:.2f} |")
    if "train" in report:
        lines += ["", "| `train` with a model and arrays, until the first update | seconds |", "|---|---:|"]
        lines += [f"| the {which} time in a program | {seconds:.2f} |" for which, seconds in report["train"].items()]
    return "\n".join(lines)


def read():
    """Returns the report of the last time, without a part that is there no more."""
    path = HERE / "startup.json"
    return json.loads(path.read_text()) if path.exists() else {}


# Trains its own model three times; prints how long each run took until worker 0 noted its first update.
TRAINS = """
import json, sys, tempfile, time
import keras
from common import train
from common.data import datasets

x, y, x_test, y_test, *_ = datasets.load("digits", 0)
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])

def seconds():
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        train("HogWild", model, ((x, y), (x_test, y_test)), steps=1, run_dir=f"{folder}/run", verbose=False)
        lines = map(json.loads, open(f"{folder}/run/metrics/worker-0.jsonl"))
        return next(line["time"] for line in lines if line["global_step"] > 0) - began

print(json.dumps([seconds() for _ in range(2)]))
"""


def measure_second(rounds):
    """Measures the first and the second `train` of a program, prints the table, and adds the medians to the report."""
    environ = {name: value for name, value in os.environ.items() if name != "WARM_PROCESS"} | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", TRAINS]
    runs = [json.loads(subprocess.check_output(command, cwd=HERE.parent, env=environ)) for _ in range(rounds)]
    medians = {which: round(statistics.median(run[i] for run in runs), 2) for i, which in enumerate(["first", "second"])}
    report = read() | {"train": medians}
    (HERE / "startup.json").write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))


def seconds_of(command):
    """Runs a command and returns how long it took."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def one_run():
    """Returns {part: seconds} of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        command = ["bash", str(HERE.parent / "HogWild" / "run.sh"), "--steps=1", f"--run_dir={run_dir}"]
        parts, latest = {}, time.perf_counter()
        with compare.started(command) as process:
            for part, path in PARTS.items():
                while not Path(run_dir, path).exists():
                    if process.poll():
                        sys.exit(f"{' '.join(command)} ended with exit status {process.returncode}")
                    time.sleep(0.002)  # how exact this is
                parts[part], latest = time.perf_counter() - latest, time.perf_counter()
            if process.wait():
                sys.exit(f"{' '.join(command)} ended with exit status {process.returncode}")
        return {**parts, LAST: time.perf_counter() - latest}


if __name__ == "__main__":
    compare.interruptible(main)
