"""Tables on the ps (`common.Embedding`) beside `ParameterServerStrategy`, and by their size: `bash benchmarks/tables.sh`.

Model and samples are those of `clicks.py`: 26 ids of a sample, rows of 16, batches of 512, 2 ps. First ours and theirs
train in turn with a table of a million rows, and the figures are medians. Then ours trains for a minute with a small table,
and with a table of ten million rows. It prints three tables, and writes `tables.json` beside this file.
"""

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import compare
import memory

from common.core import counted

HERE = Path(__file__).resolve().parent
ROWS, SMALL, LARGE = 1_000_000, 10_000, 10_000_000
BATCH_SIZE, NUM_PS = 512, 2
OURS = (
    f"--num_ps={NUM_PS} --batch_size={BATCH_SIZE} --epochs=1000000 --save_tables=no "
    "--model=benchmarks/clicks.py:model --data=benchmarks/clicks.py:data"
)
THEIRS = "ParameterServerStrategy"
CONTESTANTS = {
    THEIRS: "benchmarks/sharded_variable.py --distinct",
    f"{THEIRS}, 10 steps per call": "benchmarks/sharded_variable.py --distinct --steps_per_call=10",
    "HogWild": "HogWild/hogwild.py",
    "HogWild, window 10": "HogWild/hogwild.py --window=10",
    "DOWNPOUR, window 10": "DOWNPOUR/downpour.py --window=10",
}
TARGETS = [  # what, at least so many times, of what
    ("HogWild", 3, THEIRS),
    ("HogWild, window 10", 10, THEIRS),
    ("DOWNPOUR, window 10", 10, THEIRS),
    ("HogWild, window 10", 10, f"{THEIRS}, 10 steps per call"),
]
SIZES = {  # rows; by what each id is multiplied; further flags
    "10,000 rows": (SMALL, 1, ""),
    "10 M rows, as many in use": (LARGE, LARGE // SMALL, ""),
    "10 M rows, Zipf over all": (LARGE, 1, ""),
    "10 M rows, as many in use, no checkpoints": (LARGE, LARGE // SMALL, "--checkpoint_secs=3600"),
}
OF_SIZES = "HogWild/hogwild.py --window=10 --num_workers=2"


def main():
    """Runs all, and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant (default: 3)")
    parser.add_argument("--seconds", type=float, default=4, help="seconds of training in each (default: 4)")
    parser.add_argument("--long", type=float, default=60, help="seconds of training with each size of table (default: 60)")
    parser.add_argument("--workers", default="1,2", help="numbers of workers in the comparison (default: 1,2)")
    parser.add_argument("--only", choices=["compared", "sizes"], help="one part; writes no file")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0 or options.long <= 0:
        parser.error("--rounds must be at least 1, --seconds and --long greater than 0")
    began = time.monotonic()
    os.chdir(HERE.parent)
    report = {
        "command": "bash benchmarks/tables.sh",
        "date": f"{datetime.date.today()}",
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("tensorflow", "keras")},
        "rounds": options.rounds,
        "seconds": options.seconds,
        "long": options.long,
        "rows": ROWS,
        "runs": {},
        "sizes": {},
    }
    if options.only != "sizes":
        for workers in map(int, options.workers.split(",")):
            report["runs"][f"{workers}"] = compared(workers, options)
        print(f"\n{table(report)}\n\n{targets(report)}\n", flush=True)
    if options.only != "compared":
        for name, (rows, stride, flags) in SIZES.items():
            report["sizes"][name] = run(f"{OF_SIZES} {flags}", options.long, rows, stride)
            print(f"{name}: {report['sizes'][name]}", flush=True)
        print(f"\n{sizes(report)}")
    print(f"\nin {(time.monotonic() - began) / 60:.1f} minutes")
    if not options.only:
        (HERE / "tables.json").write_text(json.dumps(report, indent=2) + "\n")


def compared(workers, options):
    """Returns {name: figures} of `CONTESTANTS` with so many workers, which run in turn."""
    results: dict[str, list[dict]] = {name: [] for name in CONTESTANTS}
    for name, script in counted(list(CONTESTANTS.items()) * options.rounds, f"runs of {workers} workers"):
        result = run(f"{script} --num_workers={workers}", options.seconds, ROWS)
        results[name].append(result)
        rate, used = result["samples_per_second"], result["processor_ms_per_1000_samples"]
        print(f"{workers} workers, {name}: {rate:,.0f} samples/s, {used:.1f} ms of a core for 1,000", flush=True)
    return {
        name: {
            "script": CONTESTANTS[name],
            "samples_per_second": [round(one["samples_per_second"]) for one in of_one],
            "median": round(statistics.median(one["samples_per_second"] for one in of_one)),
            "processor_ms_per_1000_samples": round(
                statistics.median(one["processor_ms_per_1000_samples"] for one in of_one), 2
            ),
            "test_loss": round(statistics.median(one["test_loss"] for one in of_one), 4),
        }
        for name, of_one in results.items()
    }


def run(script, seconds, rows, stride=1):
    """Runs a script to its end; returns figures of `result.json`, and what could be seen from outside.

    Seen of ours: `first_step`, seconds until a worker had ended its first call; `megabytes`, the most memory that each task
    had; processor time of all tasks, between the second in which both workers trained and the last one.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder, "run"), Path(folder, "log")
        is_ours = not script.startswith("benchmarks/")
        words = [*script.split(), *(["--launch", *OURS.split()] if is_ours else [])]
        command = [sys.executable, *words, f"--seconds={seconds:g}", f"--run_dir={run_dir}"]
        environment = {**os.environ, "TABLE_ROWS": str(rows), "TABLE_STRIDE": str(stride)}
        began, seen = time.monotonic(), {}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            try:
                if is_ours:
                    seen = watch(process, str(run_dir), began)
                process.wait()
            finally:
                process.terminate()
                process.wait()
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with exit status {process.returncode}:\n{log.read_text()[-5000:]}")
        result = json.loads((run_dir / "result.json").read_text())
        if result["batch_size"] != BATCH_SIZE or result["num_ps"] != NUM_PS or result["restarts"]:
            sys.exit(f"not the same work: {script} had {result}")
        keys = "samples_per_second", "processor_ms_per_1000_samples", "train_seconds", "samples", "test_loss", "parameters"
        found = {key: result[key] for key in keys if key in result} | seen
        for of_table in result.get("tables", ()):
            found["rows_per_round"] = round(of_table["rows_per_round"])
        checkpoints = list(run_dir.glob("checkpoints/*"))
        if checkpoints:
            found["megabytes_of_checkpoints"] = round(sum(path.stat().st_size for path in checkpoints) / 2**20)
        return found


def watch(process, run_dir, began):
    """Returns what can be seen of our tasks from outside until the process ends, see `run`."""
    megabytes: dict[str, float] = {}
    points: list[tuple[list[int], float]] = []
    first = None
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration):  # of a task that has ended
            tasks = memory.tasks_of(run_dir)
            for name, pid in tasks.items():
                megabytes[name] = max(megabytes.get(name, 0), memory.most_megabytes(pid))
            drawn = [drawn_by(path) for path in sorted(Path(run_dir).glob("metrics/*.position"))]
            if first is None and any(drawn):
                first = time.monotonic() - began
            if all(drawn) and drawn and (not points or drawn != points[-1][0]):
                points.append((drawn, sum(map(memory.processor_seconds, tasks.values()))))
        time.sleep(0.1)  # between two measurements; nothing waits for it
    if len(points) < 2:
        sys.exit("too few samples to measure their processor time: give more --seconds")
    (start, before), (end, after) = points[min(1, len(points) - 2)], points[-1]  # graphs are prepared before the first
    return {
        "first_step": round(first or 0, 1),
        "processor_ms_per_1000_samples": 1e6 * (after - before) / (sum(end) - sum(start)),
        "megabytes": {name: round(most) for name, most in sorted(megabytes.items())},
    }


def drawn_by(path):
    """Returns how many samples a worker has drawn, by its file, see `common.data.Position`."""
    return int.from_bytes(path.read_bytes()[-8:], sys.byteorder)


def heads(report):
    """Returns the numbers of workers as heads of columns."""
    return " | ".join("1 worker" if n == "1" else f"{n} workers" for n in report["runs"])


def table(report):
    """Returns what was compared as a Markdown table."""
    lines = [
        f"| samples/s, the median (range) | {heads(report)} | of a core, ms for 1,000 samples | test loss |",
        "|---|" + "---:|" * (len(report["runs"]) + 2),
    ]
    last = list(report["runs"].values())[-1]
    for name in last:
        rates = []
        for runs in report["runs"].values():
            all_of_it = runs[name]["samples_per_second"]
            rates.append(f"{runs[name]['median']:,} ({min(all_of_it):,} to {max(all_of_it):,})")
        used, loss = last[name]["processor_ms_per_1000_samples"], last[name]["test_loss"]
        lines.append(f"| {name} | {' | '.join(rates)} | {used:.1f} | {loss:.4f} |")
    return "\n".join(lines)


def targets(report):
    """Returns what was to be reached, and what was, as a Markdown table."""
    numbers = list(report["runs"])
    lines = [f"| | at least | of | {heads(report)} |", "|---|---:|---|" + "---:|" * len(numbers)]
    for what, least, of in TARGETS:
        reached = [report["runs"][n][what]["median"] / report["runs"][n][of]["median"] for n in numbers]
        marked = [f"{ratio:.2f} ×{'' if ratio >= least else ', missed'}" for ratio in reached]
        lines.append(f"| {what} | {least} × | {of} | {' | '.join(marked)} |")
    return "\n".join(lines)


def sizes(report):
    """Returns runs with tables of several sizes as a Markdown table."""
    names = list(report["sizes"])
    of_each = list(report["sizes"].values())
    small = of_each[0]

    def line(what, cells):
        return f"| {what} | {' | '.join(cells)} |"

    lines = [line("HogWild, window 10, 2 workers", names), "|---|" + "---:|" * len(names)]
    lines.append(line("samples/s", [f"{one['samples_per_second']:,.0f}" for one in of_each]))
    ratios = [one["samples_per_second"] / small["samples_per_second"] for one in of_each]
    lines.append(line("of that with 10,000 rows", [f"{ratio:.2f} ×" for ratio in ratios]))
    lines.append(line("of a core, ms for 1,000 samples", [f"{one['processor_ms_per_1000_samples']:.1f}" for one in of_each]))
    lines.append(line("rows in use in a round of ten batches", [f"{one['rows_per_round']:,}" for one in of_each]))
    lines.append(line("seconds until the first step", [f"{one['first_step']:.1f}" for one in of_each]))
    for task, name in {"worker 1": "worker 1", "worker 0": "worker 0, which saves", "ps 0": "ps 0", "ps 1": "ps 1"}.items():
        cells = []
        for one in of_each:
            more = one["megabytes"][task] - small["megabytes"][task]
            cells.append(f"{one['megabytes'][task]:,}" + (f" ({more:+,})" if one is not small else ""))
        lines.append(line(f"most memory of {name}, MB", cells))
    lines.append(line("checkpoints on disk, MB", [f"{one['megabytes_of_checkpoints']:,}" for one in of_each]))
    return "\n".join(lines)


if __name__ == "__main__":
    compare.interruptible(main)
