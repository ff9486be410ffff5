"""The choice of a scheme to begin with: the first rule of `Comparison/rules.json` that holds.

`python benchmarks/report.py` derives the rules from measured runs. README.md, Comparison/README.md, `common.advise` and the
form of the book (book/static/which.js) read the same file.
"""

import json
from pathlib import Path

RULES = Path(__file__).resolve().parents[2] / "Comparison" / "rules.json"
FAR = 3  # ratio to the measured value beyond which a note says so


def rules():
    """Returns the contents of `RULES`."""
    return json.loads(RULES.read_text())


def steps_per_message(facts):
    """Returns the time of a pull and a push, in local steps, for a worker that has its link to itself.

    Its facts are `parameters`, `step_ms`, `latency_ms`, and `mbit`, 0 for no limit.
    """
    link = 32 * facts["parameters"] / (1000 * facts["mbit"]) if facts["mbit"] else 0.0
    return 2 * (facts["latency_ms"] + link) / facts["step_ms"]


def recommend(facts):
    """Returns the rule that applies, a dict of `RULES`, and a list of sentences on facts that no run has measured.

    `facts` are {name: number} as in `rules()`, yes as 1 and no as 0; missing ones take their defaults.
    """
    known = rules()
    facts = {fact["name"]: fact["default"] for fact in known["facts"]} | facts
    facts["messages"] = steps_per_message(facts)
    rule, *others = (r for r in known["rules"] if r["fact"] is None or facts[r["fact"]] >= r["least"])
    notes, said = [], {None, rule["fact"]}
    for other in others:
        if other["fact"] not in said:
            said.add(other["fact"])
            notes.append(f"Also true here: {other['says']}. No run has measured both together.")
    for name, measured in rule["measured"].items():
        is_far = facts[name] > FAR * measured
        if is_far or (facts[name] * FAR < measured and name in ("parameters", "workers", rule["fact"])):
            what = known["units"][name]
            notes.append(f"Measured with {what.format(number(measured))}, not with {number(facts[name])}.")
    return rule, notes


def number(value):
    """Returns a number as text, whole or with three significant digits, as JavaScript does: 4842, 25000000, 7.1."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
