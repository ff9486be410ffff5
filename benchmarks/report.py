"""Writes the tables of the READMEs, and Comparison/rules.json, from the measurements: `python benchmarks/report.py`.

A table stands between `<!-- NAME: ... -->` and `<!-- end of NAME -->`. With `--check` nothing is written, and the exit status
is 1 if a table differs from its file.
"""

import argparse
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import come_and_go
import compression
import large_models
import predictions
import run
import scaling
import startup
import tables
import time_to_accuracy
import workers

HERE = Path(__file__).resolve().parent
MACHINES, LINKS, COMPARISON = (HERE.parent / name for name in ("Multiple-Machines", "Slow-Links", "Comparison"))
sys.path += [str(MACHINES), str(LINKS), str(COMPARISON)]
import answer  # noqa: E402
import figures  # noqa: E402
import slow_links  # noqa: E402
import until_loss  # noqa: E402

READMES = [HERE.parent / "README.md", HERE / "README.md", MACHINES / "README.md", LINKS / "README.md"]
READMES += [COMPARISON / "README.md", HERE.parent / "book" / "guide" / "results.md"]


RULES = COMPARISON / "rules.json"


def rules():
    """Returns the rules of `common.cli.recommend`, made from Comparison/ and the benchmark of many workers."""
    of_files = (json.loads(path.read_text()) for path in (COMPARISON / "comparison.json", HERE / "workers.json"))
    return json.dumps(answer.as_rules(*of_files), indent=1, ensure_ascii=False) + "\n"


TABLES: dict[str, tuple[Any, Any]] = {  # name: file, and what makes a table of it
    "results": ("results.json", run.table),
    "short results": ("results.json", functools.partial(run.table, names=run.SHORT)),
    "targets": ("results.json", run.targets),
    "bandwidth": ("scaling.json", scaling.table),
    "cost": ("scaling.json", scaling.cost_table),
    "time to accuracy": ("time_to_accuracy.json", time_to_accuracy.table),
    "startup": ("startup.json", startup.table),
    "large models": ("large_models.json", large_models.table),
    "come and go": ("come_and_go.json", come_and_go.table),
    "predictions": ("predictions.json", predictions.table),
    "workers": ("workers.json", workers.table),
    "compression": ("compression.json", compression.table),
    "ranges of compression": ("compression.json", compression.ranges),
    "tables": ("tables.json", tables.table),
    "targets of tables": ("tables.json", tables.targets),
    "sizes of tables": ("tables.json", tables.sizes),
    "slow links": (MACHINES / "slow_links.json", slow_links.table),
    "until loss": (LINKS / "until_loss.json", until_loss.table),
    "until loss simulated": (LINKS / "simulated.json", until_loss.simulated_table),
    "short answer": (RULES, functools.partial(answer.as_table, is_short=True)),
    "which scheme of all": (RULES, functools.partial(answer.as_table, prefix="../")),
    "schemes": (COMPARISON / "comparison.json", figures.schemes),
    "rates": (COMPARISON / "comparison.json", figures.rates),
    "other problems": (COMPARISON / "comparison.json", figures.of_others),
    **{what: (COMPARISON / "comparison.json", functools.partial(figures.needs, what=what)) for what in figures.UNITS},
}


def main():
    """Writes the tables, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only check that all tables agree with the files")
    options = parser.parse_args()
    for path in [RULES, *READMES]:
        before = path.read_text() if path.exists() else ""
        after = rules() if path == RULES else with_tables(before)
        if after != before and options.check:
            sys.exit(f"{path} disagrees with its files: run python benchmarks/report.py")
        if after != before:
            path.write_text(after)


def with_tables(text):
    """Returns the text of a README with its tables made anew."""

    def made(match):
        file, table = TABLES[match["name"]]
        return f"{match['head']}\n\n{table(json.loads((HERE / file).read_text()))}\n\n{match['end']}"

    return re.sub(r"(?s)(?P<head><!-- (?P<name>[a-z ]+): [^\n]* -->)\n.*?(?P<end><!-- end of (?P=name) -->)", made, text)


if __name__ == "__main__":
    main()
