"""The decision tree: which scheme for whom, each leaf with the row of the results that supports it."""

import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import figures

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from workers import chosen  # noqa: E402

from common.cli import steps_per_message  # noqa: E402

MANY = (1000, 100)  # workers, at which the benchmark of many workers decides
# From how many on: the geometric mean of a number of workers that was measured and the next smaller one
FROM = {1000: 300, 100: 30}
# Of models that the other problems do not have
OF_TABLES = {
    "question": "Does the model have tables that are larger than a worker's memory?",
    "says": "tables are larger than a worker's memory",
    "fact": "tables",
    "least": 1,
    "scheme": "Embeddings",
    "folder": "Embeddings",
    "flags": "",
    "support": "[measured]({prefix}benchmarks/README.md#tables-on-the-ps)",
    "note": "HogWild, or DOWNPOUR with a window",
    "why": "workers fetch only the rows that a batch needs",
    "measured": {},
}
# What the form of the book and the flags of `common.advise` ask; a fact with a least value is a number, another one yes or no
FACTS = [
    {"name": "parameters", "label": "Parameters of the model", "default": 4842, "least": 1},
    {"name": "workers", "label": "Workers", "default": 8, "least": 2},
    {"name": "step_ms", "label": "Time of a local step, ms", "default": 10, "least": 0.001},
    {"name": "latency_ms", "label": "One-way latency of an empty message, ms", "default": 1, "least": 0},
    {"name": "mbit", "label": "Link of a worker, Mbit/s (0: no limit)", "default": 0, "least": 0},
    {"name": "slow", "label": "Step time of the slowest worker, relative to the others", "default": 1, "least": 1},
    {"name": "step_cv", "label": "Coefficient of variation of step times", "default": 0.1, "least": 0},
    {"name": "tables", "label": "Tables larger than a worker's memory", "default": 0},
    {"name": "exact", "label": "Each update must equal one machine's, reproducibly", "default": 0},
    {"name": "come_and_go", "label": "Workers come and go, or die", "default": 0},
    {"name": "non_iid", "label": "Non-IID data across workers", "default": 0},
]
UNITS = {
    "parameters": "{} parameters",
    "workers": "{} workers",
    "messages": "messages that take {} local steps",
    "slow": "a slowest worker that takes {} times as long",
    "step_cv": "step times with a coefficient of variation of {}",
}
PARAMETERS_OF_MANY = 26_122  # of the model that the benchmark of many workers trains


class Leaf(NamedTuple):
    """An answer.

    Attributes:
      question: yes leads to this leaf, after no to those of the leaves before it.
      says: the same as a statement, in a few words.
      fact: of `common.cli.recommend`, and the least value of it that is a yes; None for the last leaf.
      least: see `fact`.
      row: of the table, whose scheme is the answer.
      folder: of the scheme.
      flags: to begin with, as text.
      support: the figures of the row, and of the best one if that is another, as text.
      why: what the figures say about this choice.
      measured: {fact: value} of the runs.
    """

    question: str
    says: str
    fact: str | None
    least: float
    row: str
    folder: str
    flags: str
    support: str
    why: str
    measured: dict


def answer(report, workers):
    """Returns the `Leaf`s, in the order in which their questions are to be asked; the last one is for all others.

    Those of conditions that were not measured are left out. So is each row that another one beats everywhere.

    Args:
      report: what `comparison.json` has.
      workers: what `benchmarks/workers.json` has.
    """
    beaten = beaten_everywhere(report, workers)
    rows = {name: of_row for name, of_row in report["rows"].items() if name not in beaten}
    exact = [name for name in rows if is_exact(rows[name])]
    free = [name for name in rows if figures.waits_for_nobody(rows[name])]
    every = list(rows)
    # Of each: the question, the same as a statement, the fact and the least value that is a yes, the condition, the rows
    asked: list[tuple] = [
        (
            "Must each update equal that of one machine with a larger batch, reproducibly?",
            "updates must equal one machine's",
            *("exact", 1, "all equal", exact),
        ),
        (
            "Does a message take longer than a local step: slow links, or a large model?",
            "messages take longer than a step",
            *("messages", 1, "slow links", every),
        ),
        *(
            (f"Are there {FROM[n]} workers or more?", f"there are {FROM[n]} workers or more", "workers", FROM[n], n, every)
            for n in MANY
        ),
        ("Do workers come and go, or die?", "workers come and go", "come_and_go", 1, "all equal", free),
        (
            "Is a machine at least three times slower than the others?",
            "a machine is much slower than the others",
            *("slow", 3, "one slow", every),
        ),
        (
            "Does the time of a step vary by half of its mean or more, as on shared machines?",
            "step times vary",
            *("step_cv", 0.5, "random", every),
        ),
        ("Is the data non-IID across workers?", "the data is non-IID", "non_iid", 1, "non-IID shards", every),
        ("None of these", "no question is answered yes", None, 0, "all equal", every),
    ]
    leaves = []
    for question, says, fact, least, condition, names in asked:
        head: dict[str, Any] = {"question": question, "says": says, "fact": fact, "least": least}
        if condition in MANY:
            if condition in workers["workers"]:
                measured = facts_in(report, "all equal") | {"workers": condition, "parameters": PARAMETERS_OF_MANY}
                leaves.append(of_many(head, workers, condition, measured, beaten))
        elif known := [name for name in names if condition in rows[name]["found"]]:
            leaves.append(of_condition(head, report, known, condition, facts_in(report, condition)))
    return leaves


def facts_in(report, condition):
    """Returns the facts of `common.cli.recommend` that the runs under a condition had, {name: number}."""
    of_condition = report["conditions"][condition]
    cluster = {"mbit": 0, **report["cluster"], **of_condition["flags"]}
    facts = {"parameters": next(iter(report["rows"].values()))["parameters"], "workers": report["workers"]}
    messages = round(steps_per_message({**cluster, **facts}), 1)
    return {**facts, "messages": messages, "slow": of_condition["slow"], "step_cv": cluster["step_cv"]}


def beaten_everywhere(report, workers):
    """Returns the names of rows that another row beats under every condition, and with many workers if both were run there.

    A row beats another if its median is smaller and lies outside the range of the other's seeds.
    """
    found = {}
    for name, of_row in report["rows"].items():
        found[name] = {condition: figures.values(report, name, condition) for condition in of_row["found"]}
        for many in set(MANY) & set(workers["workers"]) if name in workers["schemes"] else ():
            _, (_, values) = chosen(name, workers["schemes"][name][workers["workers"].index(many)])
            found[name][many] = [1 - value for value in values]

    def beats(one, other):
        both = one.keys() & other.keys()
        return bool(both) and all(statistics.median(one[key]) < min(other[key]) for key in both)

    return {name for name in found if any(beats(found[other], found[name]) for other in found if other != name)}


def is_exact(of_row):
    """Whether the updates of a row are those of one machine: all wait for all, and each update is of one step of each."""
    actions = of_row["actions"]
    return of_row["folder"] == "Synchronous-SGD" and sum(a["local_steps"] for a in actions) == 1 and not of_row["flags"]


def of_condition(head, report, names, condition, measured):
    """Returns the `Leaf` of a condition: by the seconds until the target of the rows of these names."""
    seconds = {name: figures.values(report, name, condition) for name in names}
    row, best = pick(seconds)
    of_row, support = report["rows"][row], f"{condition}: {figures.median_and_range(seconds[row])} s"
    if best != row:
        support += f"; {best} {figures.median_and_range(seconds[best])} s"
    given = dict(of_row["flags"])
    if figures.flag_of(of_row) == of_row["rate_flag"]:
        given[of_row["rate_flag"]] = of_row["found"][condition]["rate"]
    flags = " ".join(f"--{flag}={value:g}" for flag, value in given.items())
    found = {"row": row, "folder": of_row["folder"], "flags": flags, "support": support}
    return Leaf(**head, **found, why=why(row, best, len(names)), measured=measured)


def of_many(head, workers, many, measured, beaten):
    """Returns the `Leaf` of many workers: by the accuracy on the digits after the same time, with the best rate of each."""
    place = workers["workers"].index(many)
    found = {name: chosen(name, of_row[place])[1] for name, of_row in workers["schemes"].items() if name not in beaten}
    row, best = pick({name: [1 - value for value in values] for name, (_, values) in found.items()})
    shown = {name: f"{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for name, (_, v) in found.items()}
    support = f"{many} workers, accuracy after {workers['seconds']:g} s: {shown[row]}"
    support += f"; {best} {shown[best]}" if best != row else ""
    flags, reason = f"--learning_rate={found[row][0]}", why(row, best, len(found))
    return Leaf(**head, row=row, folder=row, flags=flags, support=support, why=reason, measured=measured)


def why(row, best, count):
    """Returns the reason for a choice, in a few words."""
    if count == 1:
        return "no other scheme does that"
    if row == best:
        return "the best median"
    return f"within the range of {best}'s seeds, and nearer to plain SGD"


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


def as_rules(report, workers):
    """Returns the answers as `common.cli.recommend` reads them, for JSON."""
    leaves = [leaf._asdict() for leaf in answer(report, workers)]
    rules = [OF_TABLES, *({"scheme": leaf.pop("row"), **leaf} for leaf in leaves)]
    problem, facts = report["problem"], facts_in(report, "all equal")
    target = (
        f"virtual seconds until {problem['text']}, on {problem['flags']['data']} with a model of {facts['parameters']:,} "
        f"parameters and {facts['workers']} workers"
    )
    return {"command": "python benchmarks/report.py", "target": target, "facts": FACTS, "units": UNITS, "rules": rules}


def as_table(rules, prefix="", is_short=False):
    """Returns the rules as a Markdown table: the first question answered with yes decides.

    Args:
      rules: what `as_rules` has returned.
      prefix: of the links to the folders.
      is_short: without the figures.
    """
    rows = [["question", "take", "virtual seconds until the target", "why"], ["---"] * 4]
    for rule in rules["rules"]:
        take = f"[{rule['scheme']}]({prefix}{rule['folder']}/)"
        take += f" `{rule['flags']}`" if rule["flags"] else f": {rule['note']}"
        rows.append([rule["question"], take, rule["support"].format(prefix=prefix), rule["why"]])
    return "\n".join(f"| {' | '.join(row[:2] if is_short else row)} |" for row in rows)
