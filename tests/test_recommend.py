"""common/cli/recommend.py: README.md, Comparison/README.md and `common.advise` answer twenty questions alike.
book/test_book.py asks the form of the book the same."""

import json

import pytest
from runs import ROOT

from common.cli import advise, recommend

QUESTIONS = json.loads((ROOT / "book" / "questions.json").read_text())
ROWS = {file: (ROOT / file).read_text().splitlines() for file in ("README.md", "Comparison/README.md")}
DEFAULTS = {fact["name"]: fact["default"] for fact in recommend.rules()["facts"]}


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: " ".join(asked["facts"]) or "none")
def test_the_answer(asked):
    rule, _ = recommend.recommend(asked["facts"])
    assert rule["scheme"] == asked["scheme"] and rule["flags"] == asked.get("flags", rule["flags"])
    for file, prefix in (("README.md", ""), ("Comparison/README.md", "../")):
        [row] = [line for line in ROWS[file] if line.startswith(f"| {rule['question']} | ")]
        assert f"[{rule['scheme']}]({prefix}{rule['folder']}/)" in row and (rule["flags"] or rule["note"]) in row
    facts = {name: value for name, value in (DEFAULTS | asked["facts"]).items() if value}
    given = [f"--{name}" if name in advise.YES else f"--{name}={value}" for name, value in facts.items()]
    first = advise.advice([], {}, advise.parse(given))[0]
    assert first == f"Begin with {rule['scheme']} ({rule['flags'] or rule['note']}): {rule['says']}."


def test_the_rules_are_those_of_the_tables_in_their_order():
    questions = [f"| {rule['question']}" for rule in recommend.rules()["rules"]]
    for rows in ROWS.values():
        assert [row.split(" | ")[0] for row in rows if row.split(" | ")[0] in questions] == questions


def test_it_says_what_no_run_has_measured():
    assert recommend.recommend({})[1] == []
    assert recommend.recommend({"slow": 30, "step_cv": 1, "parameters": 14_527})[1] == [
        "Also true here: step times vary. No run has measured both together.",
        "Measured with 4842 parameters, not with 14527.",
        "Measured with step times with a coefficient of variation of 0.1, not with 1.",
    ]
    assert recommend.recommend({"slow": 3})[1] == ["Measured with a slowest worker that takes 10 times as long, not with 3."]
    assert recommend.recommend({"workers": 400, "parameters": 26_122})[1] == []
    notes = recommend.recommend({"workers": 300, "come_and_go": 1})[1]
    assert notes[0] == "Also true here: workers come and go. No run has measured both together."


def test_messages_are_a_pull_and_a_push():
    facts = {"parameters": 1e6, "mbit": 100, "latency_ms": 5, "step_ms": 10}
    assert recommend.steps_per_message(facts) == pytest.approx(2 * (5 + 32e6 / 100e6 * 1000) / 10)
    assert recommend.steps_per_message({**facts, "mbit": 0}) == pytest.approx(1)
