"""The decision tree: which scheme for whom, each leaf with the row of `comparison.json` that supports it."""

import math
import statistics
from typing import NamedTuple

import figures

MANY = 100  # workers, from which on the number of workers decides
# Of models that the other problems do not have
OF_TABLES = (
    "| Does the model have tables that are larger than a worker's memory? | [Embeddings]({prefix}Embeddings/): HogWild, or "
    "DOWNPOUR with a window | [measured]({prefix}benchmarks/README.md#tables-on-the-ps) |"
)


class Leaf(NamedTuple):
    """An answer.

    Attributes:
      question: to be answered with yes for this leaf; those of the leaves before it with no.
      row: of the table, whose scheme is the answer.
      condition: under which the row was measured: a name, or a number of workers.
      seconds: of all seeds until the target, as `figures.values` has them.
      fastest: the row with the lowest median there, of those that were asked for.
      flags: to begin with, as text.
    """

    question: str
    row: str
    condition: str | int
    seconds: list[float]
    fastest: str
    flags: str


def answer(report):
    """Returns the `Leaf`s, in the order in which their questions are to be asked; the last one is for all others.

    Those of conditions that were not measured are left out.
    """
    exact = [name for name in report["rows"] if is_exact(report["rows"][name])]
    free = [name for name, of_row in report["rows"].items() if figures.waits_for_nobody(of_row)]
    asked: list[tuple[str, str | int, list[str] | None]] = [
        ("Must each update be that of one machine with a larger batch, the same in each run?", "all equal", exact),
        ("Does a message take longer than a local step?", "slow links", None),
        ("Do workers come and go, or die?", "all equal", free),
        ("Is a machine much slower than the others?", "one slow", None),
        ("Do steps take a random time, as on shared machines?", "random", None),
        (f"Are there {MANY} workers or more?", MANY, None),
        ("Has each worker samples of another kind?", "unlike shards", None),
        ("None of these", "all equal", None),
    ]
    leaves = []
    for question, condition, names in asked:
        known = [name for name in names or report["rows"] if is_measured(report, name, condition)]
        if known:
            row, fastest = pick(report, known, condition)
            seconds = figures.values(report, row, condition)
            leaves.append(Leaf(question, row, condition, seconds, fastest, flags(report, row, condition)))
    return leaves


def is_exact(of_row):
    """Whether the updates of a row are those of one machine: all wait for all, and each update is of one step of each."""
    actions = of_row["actions"]
    return of_row["folder"] == "Synchronous-SGD" and sum(a["local_steps"] for a in actions) == 1 and not of_row["flags"]


def is_measured(report, name, condition):
    """Whether a row was measured under a condition."""
    of_row = report["rows"][name]
    return condition in of_row["found"] if isinstance(condition, str) else str(condition) in of_row.get("scaling", {})


def pick(report, names, condition):
    """Returns the row to take under a condition, and the fastest one.

    The fastest has the lowest median of seconds until the target. The one to take is the first in reading order, as it changes
    plain SGD least, of those that are not clearly slower: whose median lies in the range of the fastest, and which had the
    target with each seed if the fastest did.
    """
    seconds = {name: figures.values(report, name, condition) for name in names}
    fastest = min(names, key=lambda name: (statistics.median(seconds[name]), max(seconds[name])))
    longest = max(seconds[fastest])
    for name in names:
        is_sure = math.isinf(longest) or math.isfinite(max(seconds[name]))
        if statistics.median(seconds[name]) <= longest and is_sure:
            return name, fastest
    raise AssertionError("the fastest is one of them")


def flags(report, name, condition):
    """Returns the flags of a row as text, with the learning rate that was best for it under a condition."""
    of_row = report["rows"][name]
    found = of_row["found"][condition] if isinstance(condition, str) else of_row["scaling"][str(condition)]
    given = dict(of_row["flags"])
    if figures.flag_of(of_row) == of_row["rate_flag"]:
        given[of_row["rate_flag"]] = found["rate"]
    return " ".join(f"--{flag}={value:g}" for flag, value in given.items())


def as_table(report, prefix=""):
    """Returns the tree as a Markdown table: the first question that is answered with yes decides.

    Args:
      report: what `comparison.json` has.
      prefix: of the links to the folders.
    """
    lines = [
        "| the first yes decides | take | seconds until the target, simulated |",
        "|---|---|---|",
        OF_TABLES.format(prefix=prefix),
    ]
    for leaf in answer(report):
        folder = report["rows"][leaf.row]["folder"]
        link = f"[{leaf.row}]({prefix}{folder}/)"
        lines.append(f"| {leaf.question} | {link} `{leaf.flags}` | {support(report, leaf)} |")
    return "\n".join(lines)


def support(report, leaf):
    """Returns the figures behind a leaf as text."""
    where = leaf.condition if isinstance(leaf.condition, str) else f"{leaf.condition} workers"
    text = f"{where}: {figures.median_and_range(leaf.seconds)} s"
    if leaf.fastest != leaf.row:
        least = figures.median_and_range(figures.values(report, leaf.fastest, leaf.condition))
        text += f"; {leaf.fastest} {least} s"
    return text
