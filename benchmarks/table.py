"""Runs commands in turn on this machine and prints a table of what they reached: the tables in the folders' READMEs.

    python benchmarks/table.py "bash HogWild/run.sh" "bash HogWild/run.sh --window=10" --rounds=3

Every figure is the median over the rounds. The commands run in turn, so that whatever else the machine does meets all.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COLUMNS = {
    "test accuracy": ("test_accuracy", ".3f"),
    "test loss": ("test_loss", ".4f"),
    "staleness, mean": ("staleness_mean", ".2f"),
    "staleness, max": ("staleness_max", ".0f"),
    "samples/s": ("samples_per_second", ",.0f"),
    "seconds in all": ("wall_seconds", ".1f"),
}


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(usage='%(prog)s "COMMAND" ["COMMAND" ...] [--rounds=N]')
    parser.add_argument("commands", nargs="+", help="each takes --run_dir, as every run.sh and script does")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default: 3)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    results: dict[str, list[dict]] = {command: [] for command in options.commands}
    for _ in range(options.rounds):
        for command in options.commands:
            results[command].append(run(command))
    print(f"| command | {' | '.join(COLUMNS)} |")
    print("|---" + "|---:" * len(COLUMNS) + "|")
    for command, of_command in results.items():
        print(f"| `{command}` | {' | '.join(median(of_command, *column) for column in COLUMNS.values())} |")


def median(results, key, form):
    """Returns the median of a figure as text; nothing where there is none, as there is no accuracy of a regression."""
    values = [result[key] for result in results if result[key] is not None]
    return format(statistics.median(values), form) if values else ""


def run(command):
    """Runs one command to its end and returns its `result.json`."""
    with tempfile.TemporaryDirectory() as run_dir:
        words = [*shlex.split(command), f"--run_dir={run_dir}"]
        process = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if process.returncode:
            sys.exit(f"{command} ended with exit status {process.returncode}:\n{process.stdout}")
        return json.loads(Path(run_dir, "result.json").read_text())


if __name__ == "__main__":
    main()
