"""Every scheme until the same accuracy, under five conditions: `bash Comparison/run.sh`.

All runs are simulated (`Simulation/`), so the seconds are virtual, and equal commands give equal figures. A row of the table
is a scheme with the learning rate that is best for it under each condition (`trials.py`). Two more problems are learned with
equal machines. Figures are the median and range of five seeds. Writes `comparison.json` beside this file, and the pictures of
`pictures.py`.

`--quick` takes less than three minutes: one seed, the first learning rate of the search, two conditions, one problem. It
writes into `runs/Comparison`. If rows are named, only these are measured anew; the figures of the others stay.
"""

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import answer
import figures
import pictures
import trials

from common.core import counted

HERE = Path(__file__).resolve().parent
SEEDS = 5
QUICK = ["all equal", "one slow"]


def main():
    """Runs all, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small part of the measurement, in less than three minutes")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="number of processes (default: one per core)")
    parser.add_argument("rows", nargs="*", help=f"rows of the table (default: all): {'; '.join(trials.ROWS)}")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in trials.ROWS]:
        parser.error(f"there is no row {unknown[0]!r}; there are {'; '.join(trials.ROWS)}")
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, not {options.processes}")
    folder = HERE.parent / "runs" / "Comparison" if options.quick else HERE
    folder.mkdir(parents=True, exist_ok=True)
    report = empty(options.quick)
    path = folder / "comparison.json"
    if options.rows and path.exists():
        before = json.loads(path.read_text())
        if any(before[name] != report[name] for name in report if name != "rows"):
            parser.error(f"{path} has results for another problem or other conditions: measure all rows, without naming any")
        report["rows"] = before["rows"]
    jobs = [(name, report) for name in options.rows or trials.ROWS]
    os.chdir(HERE)  # a process that is spawned imports from the current folder first
    # A process for each row: TensorFlow keeps what it has compiled. The rows of --quick are so small that it doesn't matter.
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=None if options.quick else 1) as pool:
        for name, found in counted(pool.imap_unordered(measure, jobs, chunksize=1), "schemes", len(jobs)):
            known = {**report["rows"], name: found}
            report["rows"] = {name: known[name] for name in trials.ROWS if name in known}
            path.write_text(json.dumps(report) + "\n")
            print(f"{name} measured", flush=True)
    show(report, path)


def show(report, path):
    """Prints the tables of a report, and draws its pictures beside the file `path`."""
    workers = json.loads((HERE.parent / "benchmarks" / "workers.json").read_text())
    print(f"\n{figures.needs(report, 'seconds')}\n\n{answer.as_table(answer.as_rules(report, workers))}\n\n{path}")
    for picture in pictures.draw_all(report, path.parent):
        print(picture)


def empty(quick):
    """Returns the report of no rows: what is measured."""
    conditions = {name: trials.CONDITIONS[name] for name in (QUICK if quick else trials.CONDITIONS)}
    return {
        "command": "bash Comparison/run.sh" + " --quick" * quick,
        "seeds": 1 if quick else SEEDS,
        "search": not quick,
        "workers": trials.WORKERS,
        "batch_size": trials.BATCH,
        "cluster": trials.CLUSTER,
        "problem": trials.PROBLEM._asdict(),
        "others": {} if quick else {name: problem._asdict() for name, problem in trials.OTHERS.items()},
        "conditions": {name: condition._asdict() for name, condition in conditions.items()},
        "rows": {},
    }


def measure(job) -> tuple[str, dict[str, Any]]:
    """Returns the name of a row, and what was measured of it."""
    name, report = job
    from common.cli import notebook

    notebook.quiet()
    return name, trials.of_row(name, report["conditions"], report["seeds"], report["others"], report["search"])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
