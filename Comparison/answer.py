"""The decision tree: which scheme for whom, each leaf with the row of the results that supports it."""

import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import figures

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from workers import chosen  # noqa: E402

MANY = 100  # workers, from which on the number of workers decides
# Of models that the other problems do not have
OF_TABLES = (
    "Does the model have tables that are larger than a worker's memory?",
    "[Embeddings]({prefix}Embeddings/): HogWild, or DOWNPOUR with a window",
    "[measured]({prefix}benchmarks/README.md#tables-on-the-ps)",
)


class Leaf(NamedTuple):
    """An answer.

    Attributes:
      question: yes leads to this leaf, after no to those of the leaves before it.
      row: of the table, whose scheme is the answer.
      folder: of the scheme.
      flags: to begin with, as text.
      support: the figures of the row, and of the best one if that is another, as text.
    """

    question: str
    row: str
    folder: str
    flags: str
    support: str


def answer(report, workers):
    """Returns the `Leaf`s, in the order in which their questions are to be asked; the last one is for all others.

    Those of conditions that were not measured are left out.

    Args:
      report: what `comparison.json` has.
      workers: what `benchmarks/workers.json` has.
    """
    rows = report["rows"]
    exact = [name for name in rows if is_exact(rows[name])]
    free = [name for name in rows if figures.waits_for_nobody(rows[name])]
    every = list(rows)
    asked = [
        ("Must each update equal that of one machine with a larger batch, reproducibly?", "all equal", exact),
        ("Does a message take longer than a local step: slow links, or a large model?", "slow links", every),
        ("Do workers come and go, or die?", "all equal", free),
        ("Is a machine much slower than the others?", "one slow", every),
        ("Does the time of a step vary at random, as on shared machines?", "random", every),
        (f"Are there {MANY} workers or more?", MANY, every),
        ("Is the data non-IID across workers?", "unlike shards", every),
        ("None of these", "all equal", every),
    ]
    leaves = []
    for question, condition, names in asked:
        if condition == MANY:
            leaves.append(of_many(question, workers))
        elif known := [name for name in names if condition in rows[name]["found"]]:
            leaves.append(of_condition(question, report, known, condition))
    return leaves


def is_exact(of_row):
    """Whether the updates of a row are those of one machine: all wait for all, and each update is of one step of each."""
    actions = of_row["actions"]
    return of_row["folder"] == "Synchronous-SGD" and sum(a["local_steps"] for a in actions) == 1 and not of_row["flags"]


def of_condition(question, report, names, condition):
    """Returns the `Leaf` of a condition: by the seconds until the target of the rows of these names."""
    seconds = {name: figures.values(report, name, condition) for name in names}
    row, best = pick(seconds)
    of_row, support = report["rows"][row], f"{condition}: {figures.median_and_range(seconds[row])} s"
    if best != row:
        support += f"; {best} {figures.median_and_range(seconds[best])} s"
    given = dict(of_row["flags"])
    if figures.flag_of(of_row) == of_row["rate_flag"]:
        given[of_row["rate_flag"]] = of_row["found"][condition]["rate"]
    return Leaf(question, row, of_row["folder"], " ".join(f"--{flag}={value:g}" for flag, value in given.items()), support)


def of_many(question, workers):
    """Returns the `Leaf` of `MANY` workers: by the accuracy on the digits after the same time, with the best rate of each."""
    place = workers["workers"].index(MANY)
    found = {name: chosen(name, of_row[place])[1] for name, of_row in workers["schemes"].items()}
    row, best = pick({name: [1 - value for value in values] for name, (_, values) in found.items()})
    shown = {name: f"{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for name, (_, v) in found.items()}
    support = f"{MANY} workers, accuracy after {workers['seconds']:g} s: {shown[row]}"
    support += f"; {best} {shown[best]}" if best != row else ""
    return Leaf(question, row, row, f"--learning_rate={found[row][0]}", support)


def pick(measured):
    """Returns the row to take, and the best one, of {name: [what was measured with each seed]}, of which less is better.

    The best has the lowest median. The one to take is the first in reading order, as it changes plain SGD least, of those that
    are not clearly worse: whose median lies in the range of the best, and which had the target with each seed if the best did.
    """
    best = min(measured, key=lambda name: (statistics.median(measured[name]), max(measured[name])))
    most = max(measured[best])
    for name, values in measured.items():
        is_sure = math.isinf(most) or math.isfinite(max(values))
        if statistics.median(values) <= most and is_sure:
            return name, best
    raise AssertionError("the best is one of them")


def as_table(report, workers, prefix="", is_short=False):
    """Returns the tree as a Markdown table: the first question answered with yes decides.

    Args:
      report, workers: see `answer`.
      prefix: of the links to the folders.
      is_short: without the figures.
    """
    rows = [["question", "take", "virtual seconds until the target"], ["---"] * 3]
    rows.append([cell.format(prefix=prefix) for cell in OF_TABLES])
    for leaf in answer(report, workers):
        rows.append([leaf.question, f"[{leaf.row}]({prefix}{leaf.folder}/) `{leaf.flags}`", leaf.support])
    return "\n".join(f"| {' | '.join(row[:2] if is_short else row)} |" for row in rows)
