"""Runs commands in turn on this machine and prints a table of what they reached: the tables in the folders' READMEs.

    python benchmarks/table.py "bash HogWild/run.sh" "bash HogWild/run.sh --window=10" --rounds=3
    python benchmarks/table.py --write */README.md  # runs the commands that stand above the tables, and writes these anew

Every figure is the median over the rounds. The commands run in turn, so that whatever else the machine does meets all. A column
of samples/s needs `--speed`: speeds of different days differ by a factor of up to 2, so they stand in benchmarks/ alone.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import compare

SPEED = "samples/s"
COLUMNS = {
    "test accuracy": ("test_accuracy", ".3f"),
    "test AUC": ("test_auc", ".4f"),
    "test loss": ("test_loss", ".4f"),
    "staleness, mean": ("staleness_mean", ".2f"),
    "staleness, max": ("staleness_max", ".0f"),
    SPEED: ("samples_per_second", ",.0f"),
    "seconds in all": ("wall_seconds", ".1f"),
}
# What a README has of a table: the command that printed it, which may go over several lines, and what it printed.
IN_README = re.compile(
    r"(?m)^    \.venv/bin/python benchmarks/table\.py (?P<arguments>(?:.*\\\n)*.*)\n\n(?P<table>\| command \|.*(?:\n\|.*)*)"
)


def main():
    """Prints the table, or writes those of READMEs anew."""
    options = parse(sys.argv[1:])
    if not options.write:
        print(table(options.commands, options.rounds, options.speed))
    for path in options.commands if options.write else []:
        Path(path).write_text(with_tables(Path(path).read_text()))
        print(path, flush=True)


def parse(arguments):
    """Returns the options of a command line."""
    parser = argparse.ArgumentParser(usage='%(prog)s "COMMAND" ["COMMAND" ...] [--rounds=N] [--speed] or --write README.md ...')
    parser.add_argument("commands", nargs="+", help="commands that take --run_dir, as every run.sh and script does")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default: 3)")
    parser.add_argument("--speed", action="store_true", help=f"add a column for {SPEED}")
    parser.add_argument("--write", action="store_true", help="take READMEs instead, and run the commands above their tables")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    if options.write and (missing := [path for path in options.commands if not Path(path).is_file()]):
        parser.error(f"there is no file {missing[0]}")
    return options


def with_tables(text):
    """Returns the text of a README with its tables made anew."""

    def made(match):
        options = parse(shlex.split(match["arguments"].replace("\\\n", " ")))
        return match[0].replace(match["table"], table(options.commands, options.rounds, options.speed))

    return IN_README.sub(made, text)


def table(commands, rounds, has_speed=False):
    """Runs commands in turn, so many rounds; returns what they reached as a Markdown table, with or without their speed."""
    results: dict[str, list[dict]] = {command: [] for command in commands}
    for _ in range(rounds):
        for command in commands:
            results[command].append(run(command))
    every = [result for of_command in results.values() for result in of_command]
    wanted = {name: column for name, column in COLUMNS.items() if has_speed or name != SPEED}
    columns = {name: column for name, column in wanted.items() if median(every, *column)}  # none that would be empty
    lines = [f"| command | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    for command, of_command in results.items():
        lines.append(f"| `{command}` | {' | '.join(median(of_command, *column) for column in columns.values())} |")
    return "\n".join(lines)


def median(results, key, form):
    """Returns the median of a figure as text; nothing where there is none, as there is no accuracy of a regression."""
    values = [result[key] for result in results if result.get(key) is not None]
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
    compare.interruptible(main)
