"""The tables and pictures of the benchmarks; the measurements themselves are no test."""

import json
import os
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from runs import SECONDS

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """The folder of the benchmarks, whose modules can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return ROOT / "benchmarks"


def results(**changes):
    one = {
        "data": "digits",
        "parameters": 26122,
        "batch_size": 32,
        "num_ps": 1,
        "num_workers": 2,
        "optimizer": "GradientDescent",
    }
    return {"HogWild": one, "PyTorch DDP": one, "one process": one | {"num_workers": 1}, "DC-ASGD": one | changes}


def test_equal_work_is_accepted():
    import run

    run.check_same_work(results())


@pytest.mark.parametrize(
    "changes", [{"parameters": 26123}, {"batch_size": 64}, {"optimizer": "Adam"}, {"data": "mnist"}, {"num_workers": 3}]
)
def test_unequal_work_is_refused(changes):
    import run

    with pytest.raises(SystemExit) as error:
        run.check_same_work(results(**changes))
    assert "not the same work" in str(error.value) and "DC-ASGD" in str(error.value)


NO_CONTESTANTS = "common", "tests", "benchmarks", "Write-Your-Own-Scheme"  # the last is a page on how to begin


def test_every_scheme_takes_part():
    """A scheme is a folder with a script that calls `main` with a function of the center, the local parameters and hp."""
    import run
    import time_to_accuracy

    schemes = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("*/*.py")
        if "(center, local, hp):" in path.read_text() and path.parent.name not in NO_CONTESTANTS
    }
    assert len(schemes) > 10
    assert schemes <= {script.split(" ")[0] for script, _ in run.CONTESTANTS.values()}
    assert schemes <= {script.split(" ")[0] for script in time_to_accuracy.SCHEMES.values()}


def test_scripts_of_the_benchmarks_exist():
    import large_models
    import run
    import scaling

    scripts = [script for script, _ in run.CONTESTANTS.values()] + list(large_models.CONTESTANTS.values())
    scripts += [script for points in scaling.AXES.values() for script in points.values()]
    assert [script for script in scripts if not (ROOT / script.split(" ")[0]).is_file()] == []


def test_what_is_compared_is_measured():
    import run

    assert {name for what, _, of in run.TARGETS for name in (what, of)} <= set(run.CONTESTANTS)


def test_target_that_is_missed_is_said_to_be():
    import run

    report = {
        "targets": [
            {"what": "AGN", "at_least": 0.8, "of": "the limit", "reached": 0.79},
            {"what": "HogWild", "at_least": 4, "of": "plain", "reached": 4.0},
        ]
    }
    missed, reached = run.targets(report).splitlines()[2:]
    assert "0.79 ×, missed" in missed and "missed" not in reached


def test_large_models_are_multiples_of_ddp():
    """The median of each, the fastest with the largest model first; without DDP there are no multiples."""
    import large_models

    rates = {"HogWild": [30, 10, 20], large_models.DDP: [40]}, {"HogWild": [9], large_models.DDP: [10]}
    models = [{"parameters": 10**6 * (1 + 4 * i), "samples_per_second": of_model} for i, of_model in enumerate(rates)]
    head, _, *lines = large_models.table({"models": models}).splitlines()
    assert "1.0 million | 5.0 million" in head
    assert lines == ["| PyTorch DDP | 40 (1.00) | 10 (1.00) |", "| HogWild | 20 (0.50) | 9 (0.90) |"]
    del rates[0][large_models.DDP], rates[1][large_models.DDP]
    assert large_models.table({"models": models}).splitlines()[2:] == ["| HogWild | 20 | 9 |"]


def test_accuracy_is_reached_between_two_evaluations():
    import time_to_accuracy

    curve = np.array([[0, 0, 0, 0.1], [1, 100, 10, 0.9], [2, 300, 30, 1.0], [3, 400, 40, 0.8]])
    assert time_to_accuracy.reached_at(curve, 0.95).tolist() == pytest.approx([1.5, 200, 20])
    assert time_to_accuracy.reached_at(curve[:2], 0.95) is None


def test_median_of_runs_of_which_most_never_get_there_is_none():
    import time_to_accuracy

    never, soon = np.array([[0, 0, 0, 0.1], [9, 9, 9, 0.2]]), np.array([[0, 0, 0, 0.1], [2, 300, 30, 1.0]])
    assert time_to_accuracy.summary([never, never, soon], 0.95)["seconds"] is None
    assert time_to_accuracy.summary([never, soon, soon], 0.95)["reached"] == 2
    assert time_to_accuracy.summary([never, soon, soon], 1.0)["samples"] == 300


SLEEPS = """
import signal
import sys
import compare

def main():
    with compare.started(["sleep", "1000"]) as process:
        print(process.pid, flush=True)
        signal.pause()

compare.interruptible(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_benchmark_ends_what_it_runs(benchmarks, number):
    with subprocess.Popen([sys.executable, "-c", SLEEPS], cwd=benchmarks, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        process = int(program.stdout.readline())
        program.send_signal(number)
        assert program.wait(SECONDS) == 130
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_commands_of_a_readme_write_its_table(monkeypatch):
    """As often as they say, in turn; all else stays."""
    import table

    ran = []

    def run(command):
        ran.append(command)
        return {key: float(len(ran)) for key, _ in table.COLUMNS.values() if key != "test_auc"}

    monkeypatch.setattr(table, "run", run)
    command = '    .venv/bin/python benchmarks/table.py "bash A/run.sh" \\\n        "bash A/run.sh --b=1" --rounds=2'
    old = "| command | test accuracy |\n|---|---:|\n| `bash A/run.sh` | 0.9 |"
    text = f"Printed by\n\n{command}\n\n{old}\n\nAfter it.\n\n| another | table |\n"
    new = table.with_tables(text)
    assert ran == ["bash A/run.sh", "bash A/run.sh --b=1"] * 2
    rows = "| `bash A/run.sh` | 2.000 |", "| `bash A/run.sh --b=1` | 3.000 |"
    assert all(row in new for row in rows) and "0.9" not in new
    assert "| test accuracy | test loss |" in new  # no empty column
    assert new.startswith(f"Printed by\n\n{command}\n\n| command |") and new.endswith("\n\nAfter it.\n\n| another | table |\n")


def test_tables_of_the_readmes_have_the_commands_above_them(benchmarks):
    import table

    found = [(path, match) for path in sorted(ROOT.glob("*/README.md")) for match in table.IN_README.finditer(path.read_text())]
    assert len(found) >= 17
    for path, match in found:
        commands = table.parse(table.shlex.split(match["arguments"].replace("\\\n", " "))).commands
        assert [line.split("`")[1] for line in match["table"].splitlines()[2:]] == commands, path


def test_rates_that_help_are_named():
    """A rate counts as better if the median of its seeds is so by a point; a run whose loss was not finite reached nothing, and
    a rate that one seed alone has tried says nothing."""
    import workers

    alike = {"0.1": [0.95, 0.94, 0.96], "0.32": [0.999, 0.955, 0.9], "1": [1.0]}
    found = [alike, {"0.1": [None, None, 0.3], "0.01": [0.9, 0.88, 0.91]}]
    report = {"workers": [1, 10], "schemes": {"HogWild": found}, "seconds": 1.0}
    cells = "0.950 (0.940 to 0.960) | 0.000 (0.000 to 0.300); 0.900 (0.880 to 0.910) with 0.01"
    assert workers.table(report).splitlines()[-1] == f"| HogWild | 0.1 | {cells} |"
    from matplotlib.figure import Figure

    figure = Figure()
    workers.panels(figure, report)
    best, usual = figure.axes[0].lines
    drawn = [np.asarray(line.get_ydata()).tolist() for line in (best, usual)]
    assert drawn == [[0.95, 0.9], [0.95, 0.0]]


def test_predictions_that_miss_are_marked():
    import predictions

    def one(measured, predicted, distance=0.05):
        figures = [dict(zip(("samples_per_second", "staleness_mean", "seconds"), each)) for each in (measured, predicted)]
        return {"measured": figures[0], "predicted": {**figures[1], "distance": distance}}

    rounds = {"right": [one((100, 3.0, 6.0), (110, 3.1, 7.0))], "wrong": [one((100, 3.0, None), (80, 2.0, 7.0), 0.2)]}
    right, wrong = predictions.table({"schemes": rounds}).splitlines()[2:]
    assert right == "| right | 110 / 100 | 3.10 / 3.00 | 0.05 | 7.00 / 6.00 |"
    assert wrong == "| wrong | 80.00 / 100 (!) | 2.00 / 3.00 (!) | 0.20 (!) | 7.00 / – (!) |"


def test_targets_of_tables_that_are_missed_are_marked():
    import tables

    rates = dict.fromkeys(tables.CONTESTANTS, 100) | {"HogWild": 300, "HogWild, window 10": 999}
    runs = {name: {"median": rate} for name, rate in rates.items()}
    first, second = tables.targets({"runs": {"1": runs, "2": runs}}).splitlines()[2:4]
    assert first == "| HogWild | 3 × | ParameterServerStrategy | 3.00 × | 3.00 × |"
    assert second.endswith("| 9.99 ×, missed | 9.99 ×, missed |")


def test_samples_of_clicks_are_rows_of_the_table(monkeypatch):
    import clicks

    def ids_of(rows, stride):
        monkeypatch.setattr(clicks, "ROWS", rows)
        monkeypatch.setattr(clicks, "STRIDE", stride)
        (ids, labels), _ = clicks.data()
        assert ids.min() == 0 and ids.max() < rows and set(labels) == {0, 1}
        return ids, labels

    (few, labels), (apart, same_labels) = ids_of(100, 1), ids_of(5_000, 50)
    np.testing.assert_array_equal(few * 50, apart)
    np.testing.assert_array_equal(labels, same_labels)


def test_accuracy_of_a_prediction_is_reached_between_two_evaluations():
    import predictions

    lines = [{"time": t, "test_accuracy": a, "global_step": 10 * t} for t, a in ((2, 0.9), (1, 0.5), (3, 1.0))]
    assert predictions.reached_at([*lines, {"time": 2.5}]) == pytest.approx(25)
    assert predictions.reached_at(lines[:2]) is None
    assert predictions.at(lines, 1.5) == 15 and predictions.when(lines, 15) == 1.5


def test_a_prediction_begins_and_is_evaluated_as_what_was_measured():
    """Its workers begin when those did; and it has the accuracies of the steps at which the real run evaluated."""
    import predictions

    real = types.SimpleNamespace(samples_per_second=[200.0, 100.0])
    trained = [{"worker": w, "time": t, "samples": n} for w, t, n in ((1, 13.0, 300), (0, 12.0, 400), (0, 11.0, 200))]
    assert predictions.begun(real, trained) == [0.0, 0.0]
    trained[0]["time"] = 13.5
    assert predictions.begun(real, trained) == [0.0, 0.5]
    measured = [{"time": 5.0, "global_step": 15, "test_accuracy": 0.1}, {"time": 6.0, "global_step": 16}]
    measured.append({"time": 9.0, "global_step": 31, "test_accuracy": 0.1})
    predicted = [{"time": t, "global_step": 10 * t, "test_accuracy": a} for t, a in ((0, 0.2), (1, 0.4), (2, 0.8), (3, 0.9))]
    (seen,) = predictions.evaluated_as(measured, predicted)
    assert seen == {"time": 5.0, "global_step": 15, "test_accuracy": pytest.approx(0.6)}


def test_loss_is_reached_between_two_evaluations(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "Slow-Links")
    import until_loss

    curve = [[0.0, 1, 0.0, 4.0], [2.0, 11, 1.0, 3.0], [4.0, 21, 3.0, 1.0]]
    assert until_loss.reached(curve, 2.0) == pytest.approx((3.0, 16, 2.0))
    assert until_loss.reached(curve, 0.5) is None and until_loss.reached(curve, 5.0) == [0.0, 1, 0.0]
    slow = [[10 * a, b, 100 * c, d] for a, b, c, d in curve]
    never = [[0.0, 1, 0.0, 4.0]]
    of = {until_loss.BASELINE: [slow] * 3, "few": [curve, curve, never], "none": [curve, never, never]}
    schemes = {name: until_loss.summary([{"curve": each} for each in some], 2.0) for name, some in of.items()}
    rows = until_loss.table({"loss": 2.0, "rounds": 3, "schemes": schemes}).splitlines()[2:]
    assert rows[1:] == ["| few | 16 | 3.0 | 10.0 | 2.00 | 100.0 | 2 of 3 |", "| none | never |  |  |  |  | 1 of 3 |"]


def test_median_and_range_of_seeds_that_never_reach_the_loss(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "Slow-Links")
    import until_loss

    of_one = [None, 7, None]
    schemes = {"all": {"updates": [3, 1, 2], "steps": [1500, 500, 1000]}, "one": {"updates": of_one, "steps": of_one}}
    rows = until_loss.simulated_table({"loss": 2.0, "rounds": 3, "schemes": schemes}).splitlines()[2:]
    assert rows[0] == "| all | 2 (1 to 3) | 1,000 (500 to 1,500) | 3 of 3 |"
    assert rows[1] == "| one | never (7 to never) | never (7 to never) | 1 of 3 |"


def test_a_host_that_ends_ends_its_count(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "Slow-Links")
    import until_loss

    failed: list = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with until_loss.Carried(types.SimpleNamespace(pid=0)) as carried:  # no process has this number
        carried._thread.join()
    assert failed == []


@pytest.fixture
def slow_links(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "Multiple-Machines")
    import slow_links

    return slow_links


def lines_of_a_run(timed=False):
    """Worker 1 ends its first call of ten rounds at 3.0 s, worker 0 at 3.1 s; later they time rounds of 0.02 and 0.1 s."""
    of_1 = {"timed_rounds": [{"pull": 0.005, "push": 0.015}] * 2 + [{"pull": 9.0}]} if timed else {}
    of_0 = {"timed_rounds": [{"pull": 0.1}]} if timed else {}
    return [
        {"time": 1.0, "worker": 0, "global_step": 0, "test_accuracy": 0.1},
        {"time": 1.5, "worker": 0, "global_step": 0, "test_accuracy": 0.12},
        {"time": 2.5, "worker": 0, "global_step": 8, "test_accuracy": 0.9},
        {"time": 3.0, "worker": 1, "global_step": 10, "staleness": {"0": 7, "2": 3}},
        {"time": 3.1, "worker": 0, "global_step": 15, "staleness": {"1": 10}},
        {"time": 3.5, "worker": 0, "global_step": 99, "test_accuracy": 0.95},
        {"time": 4.0, "worker": 1, "global_step": 110, "staleness": {"0": 90}, **of_1},
        {"time": 4.1, "worker": 0, "global_step": 115, "staleness": {"0": 90}, **of_0},
    ]


def test_time_counts_from_the_first_update(slow_links):
    """It is made in the first call of the first worker that trains, so many rounds before that ends."""
    lines = lines_of_a_run(timed=True)
    assert slow_links.first_update(lines) == pytest.approx(3.1 - 10 * 0.1)  # worker 0 trains from 2.1 s on, worker 1 from 2.8 s
    assert slow_links.first_update([line for line in lines if line["worker"] == 1]) == pytest.approx(3.0 - 10 * 0.02)
    assert slow_links.first_update(lines_of_a_run()) == 3.0
    curve = slow_links.curve_of(lines)
    assert curve == [pytest.approx(point) for point in ((0, 0.12), (0.4, 0.9), (1.4, 0.95))]
    assert slow_links.reached(curve) == pytest.approx(1.4) and slow_links.reached(curve[:2]) is None


def test_picture_of_slow_links_has_a_panel_for_each_scheme(slow_links):
    """A line for each network, and a dot where the accuracy is reached; the panels have the same axes."""
    from matplotlib.figure import Figure

    soon, never = [[0.0, 0.1], [0.5, 0.96], [4.0, 0.94]], [[0.0, 0.1], [4.0, 0.9]]
    curves = {"fast": [soon, soon, soon, soon], "far": [soon, never, soon, never]}
    runs = {
        network: {
            f"scheme {i}": {"curve": each, "samples_per_second": 1000 * i, "seconds": slow_links.reached(each)}
            for i, each in enumerate(some)
        }
        for network, some in curves.items()
    }
    report, figure = {"networks": runs, "seconds": 5}, Figure()
    slow_links.panels(figure, report)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == list(runs["fast"])
    assert {(axes.get_xlim(), axes.get_ylim()) for axes in shown} == {((0, 5), (0, 1))}
    dots = [[np.ravel(line.get_xydata()).tolist() for line in axes.lines if line.get_marker() == "o"] for axes in shown]
    assert dots == [[[0.5, 0.96]] * 2, [[0.5, 0.96]]] * 2
    assert [[axes.lines[i].get_color() for i in (0, 2)] for axes in shown[::2]] == [["tab:blue", "tab:orange"]] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fast", "far"]
    assert slow_links.table(report).splitlines()[3] == "| scheme 1 | 1,000 | 0.5 | 1,000 | not in 5 |"


def test_median_run_over_slow_links(slow_links):
    """Of three runs, the curve of the middle one; of runs of which most never have the accuracy, none."""
    runs = [{"samples_per_second": 10 * n, "seconds": n, "curve": [(0.0, 0.1), (float(n), 0.96)]} for n in (3, 1, 2)]
    assert slow_links.median(runs) == {"samples_per_second": 20, "seconds": 2, "curve": [(0.0, 0.1), (2.0, 0.96)]}
    never = {"samples_per_second": 9, "seconds": None, "curve": [(0.0, 0.1)]}
    assert slow_links.median([never, runs[0], never])["seconds"] is None


def test_compression_says_medians_and_the_share_of_the_bytes():
    import compression

    found = {way: {"accuracies": [0.9, 0.97, 0.98], "bytes": [100, 100]} for way in compression.WAYS}
    found["int8, pull int8"] = {"accuracies": [0.95, 0.96, 0.99], "bytes": [26, 25]}
    report = {"seeds": 3, "schemes": {"HogWild": found}}
    fewer = {**found, "int8": {**found["int8"], "bytes": [20, 20]}}  # of which the table says the most
    assert compression.table({**report, "schemes": {"HogWild": found, "AGN": fewer}}).splitlines()[2::2] == [
        "| HogWild | " + "0.970 | " * 7 + "0.960 |",
        "| bytes of a round, at most | " + "1 | " * 7 + "0.255 |",
    ]
    row = "| HogWild | 0.970 (0.900 to 0.980) | 0.970 (0.900 to 0.980) | 0.960 (0.950 to 0.990) | +0.000, -0.010 |"
    assert compression.ranges(report).splitlines()[2:] == [row]


def test_every_scheme_of_the_simulator_is_compressed():
    """All but SparseLoCo, which refuses it."""
    import compression
    import workers

    assert set(workers.SCHEMES) - set(compression.SCHEMES) == {"SparseLoCo"}


def test_cost_model_finds_what_made_the_times():
    import scaling

    latency, bandwidth, compute = 2e-3, 1.5e9, {10_000: 1e-4, 1_000_000: 5e-3, 50_000_000: 0.2}
    sizes = [
        {
            "parameters": n,
            "seconds_of_a_round": {str(t): latency + 8 * n / bandwidth + t * seconds for t in scaling.WINDOWS},
        }
        for n, seconds in compute.items()
    ]
    cost = scaling.fit(sizes)
    assert cost["latency_seconds"] == pytest.approx(latency)
    assert cost["bytes_per_second"] == pytest.approx(bandwidth)
    assert cost["compute_seconds"] == pytest.approx({str(n): seconds for n, seconds in compute.items()})
    assert max(abs(point["error"]) for point in cost["points"]) < 1e-3


def test_points_that_are_left_out_do_not_change_the_fit():
    import scaling

    def sizes(of_left_out):
        seconds = {str(t): (of_left_out if t in scaling.LEFT_OUT else 1e-3) * t + 1e-3 for t in scaling.WINDOWS}
        return [{"parameters": n, "seconds_of_a_round": seconds} for n in (1000, 2000)]

    one, other = scaling.fit(sizes(1e-3)), scaling.fit(sizes(2e-3))
    assert one["compute_seconds"] == pytest.approx(other["compute_seconds"])
    assert {point["left_out"] for point in other["points"] if abs(point["error"]) > 0.1} == {True}


@pytest.mark.slow
def test_tables_of_the_readmes_are_those_of_the_files(benchmarks):
    command = [sys.executable, str(benchmarks / "report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_table_with_another_figure_is_noticed(benchmarks):
    import report
    import run

    made = run.targets(json.loads((benchmarks / "results.json").read_text()))
    text = f"a\n<!-- targets: bash x -->\n\n{made}\n\n<!-- end of targets -->\nb\n"
    assert report.with_tables(text) == text
    assert report.with_tables(text.replace(" × |", " x |", 1)) == text
