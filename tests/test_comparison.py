"""Comparison/: its tables and its decision tree, from a report made by hand; the measurements themselves are no test."""

import json
import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.simulation.actions import Action
from common.simulation.virtual_time import Timetable

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def comparison(monkeypatch):
    """The folder, whose modules can be imported."""
    for folder in ("benchmarks", "Comparison"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return ROOT / "Comparison"


def runs(*seconds):
    """What `Trial.run` gives, for runs that needed so many seconds; None for one that never had the target."""
    found = [(s, None, None) if s is None else (s, 1000 * s, 10 * s) for s in seconds]
    keys = "seconds", "samples", "megabytes"
    return [{**dict(zip(keys, each, strict=True)), "best": 0.7, "staleness": 1.5} for each in found]


def row(folder, waiting, seconds, flags=None, rate_flag="learning_rate", steps=1):
    """A row of a report: `seconds` are those of the seeds, by condition."""
    nothing = {"reads": False, "writes": False, "waits": False, "ticks": False, "fragment": None, "is_early": False}
    train = {"local_steps": steps, "up": 0, "down": 0, **nothing, "ahead": False}
    push = {**train, "local_steps": 0, "up": 400, "down": 800, "writes": True}
    no = {"staleness": None, "quorum": None, "threshold": None, "fragments": 1}
    return {
        "folder": folder,
        "flags": flags or {},
        "rate_flag": rate_flag,
        "parameters": 4842,
        "actions": [train, push],
        "waiting": {**no, **waiting},
        "state": {"worker": 2.0, "ps": 1.0},
        "found": {name: {"rate": 0.05, "tried": {}, "runs": runs(*of_seeds)} for name, of_seeds in seconds.items()},
        "others": {
            "text": {"rate": 3.2, "tried": {}, "runs": runs(5, 7, 6)},
            "quadratic": {"rate": 0.4, "tried": {}, "runs": runs(None)},
        },
    }


@pytest.fixture
def report():
    """Three rows, of which each is best somewhere."""
    return {
        "workers": 8,
        "problem": {"text": "75% test accuracy", "flags": {"data": "mnist1d"}},
        "others": {"text": {"text": "loss 2.42"}, "quadratic": {"text": "loss 0.013"}},
        "cluster": {"step_ms": 10, "step_cv": 0.1, "latency_ms": 1},
        "conditions": {name: {"flags": {}, "slow": 1} for name in ("all equal", "one slow", "slow links")},
        "rows": {
            "HogWild": row(
                "HogWild",
                {},
                {"all equal": (3, 2, 4), "one slow": (3, 3, 3), "slow links": (40, None, None)},
            ),
            "Synchronous-SGD": row(
                "Synchronous-SGD",
                {"quorum": 8},
                {"all equal": (3, 1, 5), "one slow": (30, 10, 50), "slow links": (30, 10, 50)},
            ),
            "DiLoCo, H = 50": row(
                "DiLoCo",
                {"quorum": 8},
                {"all equal": (2.5, 2.4, 2.6), "one slow": (25, 24, 26), "slow links": (4, 3, 5)},
                flags={"window": 50},
                rate_flag="local_learning_rate",
                steps=50,
            ),
        },
    }


def test_what_each_row_needs_is_shown_as_median_and_range_also_if_it_was_not_reached(report):
    import figures

    lines = figures.needs(report, "seconds").splitlines()
    assert lines[0] == "| virtual seconds until 75% test accuracy | all equal | one slow | slow links |"
    assert lines[2] == "| HogWild | 3.00 (2.00 to 4.00) | 3.00 | not reached (40.0 to not reached) |"
    assert len(lines) == 2 + len(report["rows"])
    in_thousands = figures.needs(report, "samples").splitlines()
    assert in_thousands[2] == lines[2].replace("virtual seconds", "thousand samples")
    assert figures.needs(report, "megabytes").splitlines()[2].startswith("| HogWild | 30.0 (20.0 to 40.0) |")


def test_what_other_problems_need(report):
    import figures

    head, _, *rows = figures.of_others(report).splitlines()
    assert head.count("thousand samples until loss") == head.count("| rate") == 2
    assert rows[0] == "| HogWild | 6.00 (5.00 to 7.00) | 3.2 | not reached | 0.4 |" and len(rows) == len(report["rows"])


def test_schemes_say_who_waits_and_what_is_sent_a_local_step(report):
    import figures

    rows = figures.schemes(report).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    assert [line[2] for line in cells] == ["nobody", "each for all", "each for all"]
    assert [line[3] for line in cells] == ["400 + 800", "400 + 800", "8 + 16"]
    assert cells[0][6:8] == ["1.50", "the others go on"] and cells[1][7] == "the others wait until it is back"
    slow = {**report["rows"]["HogWild"], "waiting": {"quorum": None, "staleness": 10}}
    assert figures.waiting(slow, 8)[0] == "the fast, if 10 steps ahead"
    assert figures.waiting({"waiting": {"quorum": 7, "staleness": None}}, 8)[0] == "each for all but 1"


def test_every_row_of_the_table_has_its_rule():
    import figures
    import trials

    assert list(figures.ABOUT) == list(trials.ROWS)


def test_rates_name_the_flag(report):
    import figures

    assert figures.rates(report).splitlines()[-1] == "| DiLoCo, H = 50 | `--local_learning_rate` | 0.05 | 0.05 | 0.05 |"


@pytest.fixture
def many():
    """What the benchmark of many workers has, of two schemes: HogWild is good with another rate than its folder's."""
    hogwild = {"0.1": [0.1, 0.1, 0.1], "0.01": [0.9, 0.96, 0.95]}
    dynamic = {"0.1": [0.95, 0.97, 0.96]}
    nothing = {"0.1": [0.1, 0.1, 0.1]}
    schemes = {"HogWild": [nothing, hogwild], "Dynamic-SGD": [nothing, dynamic]}
    return {"workers": [1, 100], "seconds": 1, "schemes": schemes}


def test_the_answer_takes_the_simplest_that_is_not_clearly_worse():
    import answer

    measured = {"simple": [3, 2, 4], "middle": [9, 9, 9], "best": [2.5, 2.4, 2.6]}
    assert answer.pick(measured) == ("best", "best")  # the median of the simple one, 3, is not in the range of 2.4 to 2.6
    assert answer.pick(measured | {"best": [2.5, 2.4, 3.0]}) == ("simple", "best")
    # It must be as sure as the best: one seed of it has never come there.
    assert answer.pick({"simple": [2, 2.8, math.inf], "best": [2.5, 2.4, 3.0]}) == ("best", "best")
    never = [math.inf] * 3
    assert answer.pick({"simple": never, "best": [5, 1, math.inf], "other": never}) == ("simple", "best")


def test_the_answer_asks_one_question_after_the_other(report, many):
    import answer

    leaves = answer.answer(report, many)
    found = {leaf.question.split()[0]: (leaf.row, leaf.flags) for leaf in leaves}
    of_diloco = "--window=50 --local_learning_rate=0.05"
    assert found == {
        "Must": ("Synchronous-SGD", "--learning_rate=0.05"),  # DiLoCo is faster, but its updates are not those of one machine
        "Does": ("DiLoCo, H = 50", of_diloco),
        "Are": ("HogWild", "--learning_rate=0.01"),
        "Do": ("HogWild", "--learning_rate=0.05"),  # the only one that waits for nobody; random slowness was not measured
        "Is": ("HogWild", "--learning_rate=0.05"),
        "None": ("DiLoCo, H = 50", of_diloco),
    }
    assert leaves[2].support == "100 workers, accuracy after 1 s: 0.950 (0.900 to 0.960); Dynamic-SGD 0.960 (0.950 to 0.970)"
    many["schemes"]["Dynamic-SGD"][1]["0.1"] = [0.955, 0.97, 0.96]
    assert answer.answer(report, many)[2].row == "Dynamic-SGD"


def test_each_leaf_of_the_tree_names_what_supports_it(report, many):
    import answer

    lines = answer.as_table(answer.as_rules(report, many), "../").splitlines()[3:]
    assert "[DiLoCo, H = 50](../DiLoCo/) `--window=50" in lines[1]
    assert lines[1].endswith("| slow links: 4.00 (3.00 to 5.00) s | the best median |")
    report["rows"]["DiLoCo, H = 50"]["found"]["all equal"]["runs"] = runs(2.5, 2.4, 3.0)
    of_both = "| all equal: 3.00 (2.00 to 4.00) s; DiLoCo, H = 50 2.50 (2.40 to 3.00) s | within the range of "
    assert of_both in answer.as_table(answer.as_rules(report, many)).splitlines()[-1]


def test_a_row_that_another_beats_everywhere_is_no_answer(report, many):
    """Its median lies outside the range of the other's seeds under each condition, and with many workers."""
    import answer

    assert not answer.beaten_everywhere(report, many)
    ours = report["rows"]["HogWild"]
    worse = {**ours, "found": {name: {"rate": 1, "runs": runs(90, 91, 92)} for name in ("all equal", "one slow")}}
    report["rows"] = {"HogWild": ours, "Dynamic-SGD": worse}
    assert not answer.beaten_everywhere(report, many)
    del many["schemes"]["Dynamic-SGD"]
    assert answer.beaten_everywhere(report, many) == {"Dynamic-SGD"}


def test_a_front_has_those_that_no_other_beats():
    import pictures

    points = {"few bytes": (9, 1), "few samples": (1, 9), "between": (3, 3), "worse": (4, 3), "worst": (9, 9)}
    assert pictures.front_of(points) == ["few bytes", "few samples", "between"]


@pytest.mark.parametrize(("quorum", "rounds_of_the_fastest"), [(8, 3), (7, 4), (None, 5)])
def test_three_workers_wait_as_the_eight_did(quorum, rounds_of_the_fastest):
    import pictures

    pull, train, push = Action(reads=True, down=8), Action(local_steps=1), Action(writes=True, up=8)
    actions = [pull, train, push, *([Action(waits=True)] if quorum else [])]
    waiting = {"staleness": None, "quorum": quorum, "threshold": None, "fragments": 1}
    of_row = {"waiting": waiting, "actions": [action._asdict() for action in actions]}
    spans = pictures.spans_of(of_row, 8, until=0.1 + 1e-6)
    # The first step begins after two messages of 6 ms. A round takes the step of the slowest that is waited for, 20, 13 or 10
    # ms, a push, and a pull that the ps begin by themselves.
    assert sum(span.part == "train" and span.worker == 0 for span in spans) == rounds_of_the_fastest


def test_points_that_are_close_share_a_label():
    import pictures

    points = {"a": (100, 10), "b": (103, 9.8), "c": (103, 20), "d": (95, 10.2)}
    assert pictures.close_ones(points) == [["a", "b", "d"], ["c"]]


def reached(seconds, best=0.0):
    import trials

    return trials.Reached(seconds, None, None, best, None)


def test_the_search_climbs_until_it_becomes_worse():
    import trials

    seconds = {0.1: 9.0, 0.2: 5.0, 0.4: 4.0, 0.8: None, 0.05: 1.0}
    limits = {}

    def attempt(rate, most):
        limits[rate] = most
        return reached(seconds[rate])

    tried = trials.climb(0.1, attempt)
    assert list(tried) == [0.1, 0.2, 0.4, 0.8] and trials.best_of(tried) == 0.4
    assert limits == {0.1: math.inf, 0.2: 9.0, 0.4: 5.0, 0.8: 4.0}  # it gives up what takes longer than the best


def test_where_no_rate_reaches_the_target_the_search_follows_what_was_measured():
    import trials

    accuracy = {0.1: 0.3, 0.2: 0.2, 0.05: 0.5, 0.025: 0.4}
    tried = trials.climb(0.1, lambda rate, most: reached(None, accuracy[rate]))
    assert trials.best_of(tried) == 0.05 and set(tried) == set(accuracy)


def test_the_target_is_reached_between_two_evaluations():
    import trials

    rows = [(0.0, 0, 0.0, 0.1), (2.0, 100, 4.0, 0.7), (4.0, 200, 8.0, 0.8)]
    assert trials.crossing(rows, trials.PROBLEM) == pytest.approx((3.0, 150, 6.0))
    assert trials.crossing(rows[:2], trials.PROBLEM) is None
    assert trials.crossing([(0.0, 0, 0.0, 0.8)], trials.PROBLEM) == (0.0, 0, 0.0)


def test_a_loss_is_reached_when_it_is_small_enough():
    import trials

    text = trials.OTHERS["text"]
    rows = [(0.0, 0, 0.0, -4.5), (2.0, 100, 4.0, -2.52), (4.0, 200, 8.0, -2.32)]
    assert text.target == 2.42 and trials.crossing(rows, text) == pytest.approx((3.0, 150, 6.0))
    assert trials.crossing(rows[:2], text) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["nothing"], "there is no row 'nothing'"), (["--processes=0"], "--processes must be at least 1, not 0")],
)
def test_mistakes_are_one_line(arguments, says, monkeypatch, capsys):
    import comparison

    monkeypatch.setattr("sys.argv", ["comparison.py", *arguments])
    with pytest.raises(SystemExit) as error:
        comparison.main()
    assert error.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("is_quick", [False, True])
def test_the_program_shows_its_results(is_quick, tmp_path, capsys):
    """Those of this folder; --quick has two of the conditions, and one problem."""
    import comparison

    report = json.loads((ROOT / "Comparison" / "comparison.json").read_text())
    if is_quick:
        few = comparison.empty(True)
        of_few = lambda row: {"found": {k: row["found"][k] for k in few["conditions"] if k in row["found"]}, "others": {}}  # noqa: E731
        report = {**few, "rows": {name: row | of_few(row) for name, row in report["rows"].items()}}
    comparison.show(report, tmp_path / "comparison.json")
    printed = capsys.readouterr().out
    assert "| HogWild |" in printed and "| Does the model have tables" in printed
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["dots.png", "heat.png", "pareto.png", "timelines.png"]


class Clock:
    """A clock of which each update takes so many seconds, and has two local steps of 16 samples."""

    def __init__(self, seconds):
        self.now, self.updates, self._seconds = 0.0, 0, seconds

    def run(self, updates):
        made, self.updates = updates - self.updates, updates
        self.now += made * self._seconds
        steps = np.array([0, 1, 0, 1] * made)
        no = np.full(len(steps), -1)
        return Timetable(steps, 0 * steps, 0.0 * steps, 0.0 * steps, no, no)


@pytest.fixture
def trial(monkeypatch):
    """A trial whose accuracy is 0.1, 0.2, ... after each update, if all wait for all; `trained` counts the updates."""
    import trials

    made: Any = trials.Trial.__new__(trials.Trial)
    made.engine = types.SimpleNamespace(restart=lambda shards, parameters: None)
    made._problem = trials.PROBLEM._replace(target=0.45)
    made._all_wait, made._measured, made._updates = True, {}, 1
    made._samples, made._bytes, made.trained = np.array([16, 0]), np.array([0, 500_000]), 0

    def train(part):
        made.trained += 1
        return 0.1 * (made.trained + 1)

    monkeypatch.setattr(made, "_train", train, raising=False)
    for name, value in {"_shards": None, "_beginning": None, "_measure": 0.1}.items():
        monkeypatch.setattr(made, name, lambda *_, value=value: value, raising=False)
    monkeypatch.setattr(made, "clock", lambda condition, seed: Clock(condition.slow), raising=False)
    return made


def test_where_all_wait_a_scheme_is_trained_once_and_the_clock_tells_the_rest(trial):
    import trials

    usual, slow = trials.CONDITIONS["all equal"], trials.CONDITIONS["one slow"]
    found = trial.run(usual, 0)
    assert (found.seconds, found.samples, found.megabytes) == pytest.approx((3.5, 3.5 * 32, 3.5))
    assert trial.run(slow, 0, most=12.0).seconds is None  # given up: it would take 35 s
    assert trial.run(slow, 0).seconds == pytest.approx(35.0)
    assert trial.trained == 4
    trial.run(trials.CONDITIONS["non-IID shards"], 0)
    assert trial.trained > 4  # other samples, so it is trained again


def test_a_run_ends_when_the_loss_is_not_finite_or_the_samples_are_used_up(trial, monkeypatch):
    import trials

    condition = trials.CONDITIONS["all equal"]
    monkeypatch.setattr(trial, "_train", lambda part: math.nan)
    assert trial.run(condition, 0)[:4] == (None, None, None, 0.1)
    trial._problem = trial._problem._replace(samples=64)
    monkeypatch.setattr(trial, "_train", lambda part: 0.3)
    assert trial.run(condition, 1)[:4] == (None, None, None, 0.3)
