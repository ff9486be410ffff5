"""Numbers and tables out of `comparison.json`: what each row needed, under which condition, with which learning rate."""

import math
import statistics

UNITS = {"seconds": "virtual seconds", "samples": "thousand samples", "megabytes": "megabytes sent"}
SCALE = {"seconds": 1, "samples": 1e-3, "megabytes": 1}
NEVER = "not reached"
# Rule in one line; extra hyperparameters, besides learning rate and batch size
ABOUT = {
    "HogWild": ("x̃ ← x̃ − η g(x)", "none"),
    "Dynamic-SGD": ("x̃ ← x̃ − η g(x)/(τ + 1)", "none"),
    "Ringmaster-ASGD": ("x̃ ← x̃ − η g(x) if τ < R", "R = 10"),
    "DC-ASGD": ("x̃ ← x̃ − η (g + λ g⊙g⊙(x̃ − x))", "λ = 0.04"),
    "Semi-Synchronous-SGD": ("HogWild, at most s steps ahead of the slowest", "s = 10"),
    "Synchronous-SGD": ("x̃ ← x̃ − η (1/n) Σ g(x)", "none"),
    "Synchronous-SGD, 1 backup worker": ("the same, of the first n − 1 gradients", "b = 1"),
    "Synchronous-SGD-different-learning-rates": ("x̃ ← x̃ − Σ η_i g_i(x)", "η_i, one a worker"),
    "DOWNPOUR-Easy": ("T local steps; x̃ ← Adagrad(x̃, Σ g)", "T = 5"),
    "DOWNPOUR": ("the same, Adagrad on the worker, too", "T = 5"),
    "AGN": ("T local steps; x̃ ← x̃ − (η/T) Σ g", "T = 5"),
    "AEASGD": ("T local steps; e = α (x − x̃), x ← x − e, x̃ ← x̃ + e", "T = 10, β = 0.9"),
    "AEAMSGD": ("the same, with Nesterov momentum in the local steps", "T = 10, β = 0.9, δ = 0.99"),
    "SAGN": ("T local steps; x̃ ← Adam(x̃, mean g)", "T = 5, η' = 0.1"),
    "Local-SGD": ("T local steps; x̃ ← mean x", "T = 10"),
    "DiLoCo": ("H local steps of AdamW; x̃ ← Nesterov(x̃, mean (x̃ − x))", "H = 10, η = 0.7, μ = 0.9, λ = 0.1"),
    "DiLoCo, H = 50": ("the same", "H = 50, η = 0.7, μ = 0.9, λ = 0.1"),
    "Streaming-DiLoCo": (
        "DiLoCo, a fragment at a time, beside the local steps",
        "P = 2, T = 5, τ = 2, α = 0.5, η = 0.7, μ = 0.9, λ = 0.1",
    ),
    "SparseLoCo": (
        "H local steps of AdamW; only the largest values of x̃ − x",
        "H = 10, k = 64 of 4,096, 2 bits, β = 0.95, λ = 0.1",
    ),
    "Asynchronous-DiLoCo": ("DiLoCo; what one worker sends counts at once", "H = 10, η = 0.7, β = 0.5, λ = 0.1"),
}


def values(report, name, condition, what="seconds"):
    """Returns what each seed of a row needed until the target, infinity where it never had it.

    Args:
      report: what `comparison.json` has.
      name: of the row.
      condition: name of a condition.
      what: seconds, samples or megabytes.
    """
    return needed(report["rows"][name]["found"][condition], what)


def needed(found, what):
    """Returns the same of what was found under one condition, or on one problem."""
    return [math.inf if run[what] is None else run[what] for run in found["runs"]]


def median_and_range(numbers):
    """Returns numbers as text: the median, and the range if there are several; infinity is `NEVER`."""
    median = three(statistics.median(numbers))
    if len(set(numbers)) == 1:
        return median
    return f"{median} ({three(min(numbers))} to {three(max(numbers))})"


def three(number):
    """Returns a number as text, with three digits that count; `NEVER` for infinity."""
    if math.isinf(number):
        return NEVER
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def needs(report, what):
    """Returns a Markdown table: what each row needed until the target, under each condition.

    Args:
      report: what `comparison.json` has.
      what: a key of `UNITS`.
    """
    conditions = list(report["conditions"])
    target = f"{UNITS[what]} until {report['problem']['text']}"
    lines = [f"| {target} | {' | '.join(conditions)} |", "|---" + "|---:" * len(conditions) + "|"]
    for name in report["rows"]:
        scaled = [[SCALE[what] * v for v in values(report, name, condition, what)] for condition in conditions]
        lines.append(f"| {name} | {' | '.join(map(median_and_range, scaled))} |")
    return "\n".join(lines)


def of_others(report):
    """Returns a Markdown table: thousand samples of each row until the targets of the other problems, and the best rates."""
    others = report["others"]
    heads = [f"{name}: thousand samples until {problem['text']} | rate" for name, problem in others.items()]
    lines = [f"| equal machines | {' | '.join(heads)} |", "|---" + "|---:|---:" * len(others) + "|"]
    for name, of_row in report["rows"].items():
        cells = []
        for what in others:
            found = of_row["others"][what]
            cells += [median_and_range([SCALE["samples"] * v for v in needed(found, "samples")]), f"{found['rate']:g}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rates(report):
    """Returns a Markdown table: the flag that was searched for, and its best value under each condition."""
    conditions = list(report["conditions"])
    lines = [f"| scheme | flag | {' | '.join(conditions)} |", "|---|---" + "|---:" * len(conditions) + "|"]
    for name, of_row in report["rows"].items():
        found = [f"{of_row['found'][condition]['rate']:g}" for condition in conditions]
        lines.append(f"| {name} | `--{flag_of(of_row)}` | {' | '.join(found)} |")
    return "\n".join(lines)


def flag_of(of_row):
    """Returns the name of the flag whose value was searched for."""
    many = of_row["folder"] == "Synchronous-SGD-different-learning-rates"
    return "learning_rates" if many else of_row["rate_flag"]


def schemes(report):
    """Returns a Markdown table: what each scheme is, what it sends and keeps, and who waits."""
    head = (
        *("scheme", "rule", "who waits", "bytes up and down, a local step", "state of a worker", "of the ps", "staleness"),
        *("a worker dies", "flags of its own"),
    )
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---:|---:|---:|---:|---|---|"]
    for name, of_row in report["rows"].items():
        rule, own = ABOUT[name]
        steps = sum(action["local_steps"] for action in of_row["actions"])
        up, down = (sum(action[way] for action in of_row["actions"]) / steps for way in ("up", "down"))
        waits, dies = waiting(of_row, report["workers"])
        stale = [run["staleness"] for run in of_row["found"]["all equal"]["runs"] if run["staleness"] is not None]
        state = of_row["state"]
        cells = [name, rule, waits, f"{up:,.0f} + {down:,.0f}", f"{state['worker']:g}", f"{state['ps']:g}"]
        lines.append(f"| {' | '.join([*cells, f'{statistics.median(stale):.2f}', dies, own])} |")
    return "\n".join(lines)


def waits_for_nobody(of_row):
    """Whether no worker of a row ever waits for another one."""
    return of_row["waiting"]["quorum"] is None and of_row["waiting"]["staleness"] is None


def waiting(of_row, num_workers):
    """Returns who waits for whom, and what happens if a worker dies, as two texts."""
    quorum, staleness = of_row["waiting"]["quorum"], of_row["waiting"]["staleness"]
    if waits_for_nobody(of_row):
        return "nobody", "the others go on"
    if staleness is not None:
        return f"the fast, if {staleness:g} steps ahead", "the others wait until it is back"
    if quorum < num_workers:
        late = num_workers - quorum
        return f"each for all but {late}", f"the others go on, without {late} more"
    return "each for all", "the others wait until it is back"
