"""common/advise.py: its figures against known laws, the simulator and the measured predictions; its pick; its flags."""

import json
import re
import sys

import numpy as np
import pytest
from runs import ROOT

from common.cli import advise, recommend
from common.core.flags import Settings
from common.simulation.actions import Action, Costs, Waiting

EXAMPLE = {"parameters": 25e6, "workers": 8, "mbit": 1000, "latency_ms": 5, "step_ms": 80}
PULL, TRAIN, PUSH = Action(reads=True, down=1000), Action(local_steps=5), Action(writes=True, up=2000)


def settings(**flags):
    return advise.parse([f"--{name}={value}" for name, value in {**EXAMPLE, **flags}.items()])


def with_computing(share, name="SAGN", window=5, ps_load=0.0):
    """An `Estimate` of a scheme whose workers compute for such a share of their time."""
    return advise.Estimate(name, window, window, 1.0, share, 0.0, 1.0, 1.0, ps_load)


# --- The figures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2, 1000])
def test_a_round_without_a_queue(num_workers):
    """Nothing is shared: five steps, a push and a pull, which begins on the ps when the push is there."""
    costs = Costs(step=0.1, latency=0.02, bandwidth_up=4000, bandwidth_down=1000)
    found = advise.estimate("A", 5, [PULL, TRAIN, PUSH], Waiting(), num_workers, costs)
    seconds = 5 * 0.1 + (0.02 + 2000 / 4000) + (0.02 + 1000 / 1000)
    assert found.round_seconds == pytest.approx(seconds)
    assert found.computing == pytest.approx(0.5 / seconds) and found.barrier == 0
    assert found.bytes_per_hour == pytest.approx(3600 * num_workers * 3000 / seconds)
    assert found.steps_per_second == pytest.approx(5 * num_workers / seconds)


def test_the_link_of_the_ps_is_shared():
    """Four workers whose messages take longer than their steps: the link is always in use, and says how long a round takes."""
    costs = Costs(step=0.001, ps_bandwidth=1000, num_ps=2)
    found = advise.estimate("A", 5, [PULL, TRAIN, PUSH], Waiting(), 4, costs)
    assert found.round_seconds == pytest.approx(4 * 2000 / 2000) and found.ps_load == pytest.approx(1)
    assert found.computing == pytest.approx(0.005 / 4)


def test_one_of_four_is_slow():
    """At a barrier all wait for it; without one it makes a tenth of the rounds of another."""
    costs = advise.costs_of(settings(workers=4, slow=10, step_ms=100, latency_ms=0, mbit=1e9))
    np.testing.assert_allclose(costs.step, [0.1, 0.1, 0.1, 1])
    step, push = Action(local_steps=1), Action(writes=True)
    together = advise.estimate("A", 1, [PULL, step, push, Action(waits=True)], Waiting(quorum=4), 4, costs)
    assert together.round_seconds == pytest.approx(1, rel=1e-3)
    assert together.computing == pytest.approx((3 * 0.1 + 1) / 4, rel=1e-3)
    assert together.barrier == pytest.approx(3 * 0.9 / 4, rel=1e-3)
    alone = advise.estimate("A", 1, [PULL, step, push], Waiting(), 4, costs)
    assert alone.steps_per_second == pytest.approx(31, rel=0.02) and alone.computing == pytest.approx(1, rel=0.02)


@pytest.fixture(scope="module")
def simulate():
    sys.path.insert(0, str(ROOT / "Simulation"))
    import simulate

    return simulate


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["Semi-Synchronous-SGD", "Streaming-DiLoCo"])
def test_it_is_the_simulation(simulate, scheme, monkeypatch):
    """The same rounds on the same clock, and so the same figures."""
    seen: list[tuple] = []
    monkeypatch.setattr(advise, "estimate", lambda *found: seen.append(found))
    asked = settings(window=7, num_ps=2, step_cv=0.5)
    advise.of_scheme(asked, scheme)
    _, window, actions, waiting, num_workers, costs = seen[0]
    flags = {"parameters": 25e6, "num_workers": 8, "num_ps": 2, "mbit": [1000], "ps_mbit": 1000, "latency_ms": [5]}
    flags |= {"step_ms": 80, "step_cv": 0.5, "steps": 400} | ({"window": 7} if window > 1 else {})
    run = simulate.simulate(scheme, clock_only=True, **flags)
    assert (actions, waiting, num_workers) == (run.actions, run.waiting, 8)
    theirs = {**vars(run.costs), "step": np.full(8, run.costs.step)}
    assert all(np.all(value == theirs[name]) for name, value in vars(costs).items())
    monkeypatch.undo()
    ours = advise.of_scheme(asked, scheme)
    assert 32 * ours.steps_per_second == pytest.approx(run.result["samples_per_second"], rel=0.05)


@pytest.mark.slow
def test_predictions():
    """With the costs that were calibrated by real runs it says what benchmarks/predictions.py has predicted, and measured."""
    report = json.loads((ROOT / "benchmarks" / "predictions.json").read_text())["schemes"]
    delays = {"Synchronous-SGD, a straggler": [40, 40, 40, 100]}
    asked = settings(parameters=26_122, workers=4, window=10)
    for name, rounds in report.items():
        scheme = name.partition(",")[0]
        with pytest.MonkeyPatch.context() as patch:
            seen: list[tuple] = []
            patch.setattr(advise, "estimate", lambda *found, to=seen: to.append(found))
            advise.of_scheme(asked, scheme)
        _, window, actions, waiting, *_ = seen[0]
        for one in rounds:
            fit = one["fit"]
            costs = Costs(
                step=fit["step"],
                step_cv=fit["step_cv"],
                delay=np.array(delays.get(name, [40, 50, 60, 80])) / 1000,
                latency=0.02,
                bandwidth_up=fit["bandwidth"],
                bandwidth_down=fit["bandwidth"],
                rounds_per_call=fit["rounds_per_call"],
            )
            speed = 32 * advise.estimate(name, window, actions, waiting, 4, costs).steps_per_second
            assert speed == pytest.approx(one["predicted"]["samples_per_second"], rel=0.05), name
            assert speed == pytest.approx(one["measured"]["samples_per_second"], rel=0.15), name


def test_all_schemes_of_the_collection():
    """Those of the table in README.md, from the first with several workers on."""
    table = (ROOT / "README.md").read_text().partition("## Reading order")[2]
    folders = re.findall(r"^\| \[([\w-]+)\]", table.partition("These folders are not schemes")[0], re.M)
    assert tuple(folders[3:]) + ("Write-Your-Own-Scheme",) == advise.SCHEMES
    assert {rule["folder"] for rule in recommend.rules()["rules"]} <= {*advise.SCHEMES, "Embeddings"}


# --- The advice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange, window", [(1, 10), (3, 20), (25, 100), (1000, 500)])
def test_the_shortest_window_that_keeps_workers_busy(monkeypatch, exchange, window):
    """An exchange takes as long as some steps: a thousand of them are too much for all windows."""

    def at_window(settings, name, window):
        return with_computing(window / (window + exchange), name, window)

    monkeypatch.setattr(advise, "of_scheme", at_window)
    text = advise.advice([at_window(None, "DiLoCo", 10)], {}, settings())
    assert f" of their time, with a window of {window}." in "\n".join(text)


def test_what_it_says():
    """The scheme and the reason, its measurement, conditions without a measurement, its window, the ps, and a command."""
    calm = {"parameters": 5000, "latency_ms": 1, "step_ms": 10}
    text = advise.advice([with_computing(0.9, ps_load=0.6)], {}, settings(**calm))
    assert text[0] == "Begin with SAGN (--learning_rate=0.04): no question is answered yes."
    assert text[1].startswith("Measured: all equal: ") and text[1].endswith(recommend.rules()["target"] + ".")
    assert text[2] == "Its workers compute for 90% of their time, with a window of 5."
    assert text[3].startswith("The links of the ps are in use for 60% of the time: ") and "--num_ps=2" in text[3]
    assert text[4] == "    bash SAGN/run.sh --num_ps=1 --num_workers=8 --window=5 --learning_rate=0.04"
    assert text[5].startswith("The learning rate is a starting point.") and len(text) == 6
    asked = settings(**calm, window=10, batch_size=8, compress="topk", topk=0.1, compress_pull="int8")
    command = next(line for line in advise.advice([with_computing(0.7, window=10)], {}, asked) if "bash" in line)
    more = "--window=10 --batch_size=8 --compress=topk --compress_pull=int8 --topk=0.1 --learning_rate=0.04"
    assert command.endswith(f"--num_workers=8 {more}")
    assert advise.advice([with_computing(0.7)], {}, settings(**calm))[3].startswith("That is less than 80%: send fewer bytes")


def test_a_scheme_that_its_flags_exclude():
    text = advise.advice([], {"SAGN": "--compress is not for it"}, settings(parameters=5000, latency_ms=1, step_ms=10))
    assert text[-1] == "It does not work with these flags: --compress is not for it."
    tables = advise.advice([], {}, advise.parse(["--tables", *(f"--{k}={v}" for k, v in EXAMPLE.items())]))
    assert tables[0].startswith("Begin with Embeddings (HogWild, or DOWNPOUR with a window): ")
    assert tables[1].startswith("Measured: benchmarks/README.md#tables-on-the-ps; ") and tables[-1].startswith("Also true")


@pytest.mark.slow
def test_slow_links_take_a_longer_window():
    asked = settings(parameters=26_122, workers=4, mbit=2, latency_ms=20, step_ms=20)
    text = advise.advice([advise.of_scheme(asked, "DiLoCo")], {}, asked)
    assert text[0].startswith("Begin with DiLoCo (--local_learning_rate=")
    [command] = [line for line in text if "bash" in line]
    window = int(command.partition("--window=")[2].split()[0])
    shares = [advise.of_scheme(asked, "DiLoCo", each).computing for each in (10, *advise.WINDOWS) if each <= window]
    assert shares[-1] >= advise.ENOUGH > shares[-2]


# --- The program -------------------------------------------------------------------------------------------------------


def test_compression_leaves_one_out():
    """SparseLoCo packs its own messages. Elsewhere a quarter of the bytes go up."""
    asked = settings(compress="int8")
    with pytest.raises(advise.UserError, match="--compress=int8 is for dense messages"):
        advise.of_scheme(asked, "SparseLoCo")
    whole, packed = (advise.of_scheme(each, "HogWild") for each in (settings(), asked))
    share = packed.bytes_per_hour * packed.round_seconds / whole.bytes_per_hour / whole.round_seconds
    assert share == pytest.approx((1 + 0.254) / 2, rel=0.01)


def test_a_rate_for_each_worker():
    name = "Synchronous-SGD-different-learning-rates"
    assert advise.of_scheme(settings(), name)[1:] == advise.of_scheme(settings(), "Synchronous-SGD")[1:]


def test_table():
    one = advise.Estimate("HogWild", 1, 1, 6.4012, 0.0125, 0.25, 9e11, 1.25, 1.0)
    lines = advise.table([one], Settings(batch_size=32))
    assert lines[0].split("  ")[0] == "scheme" and len(lines[0]) == len(lines[1])
    assert lines[1].split() == ["HogWild", "1", "6.4", "99%", "25%", "900", "40"]


def test_what_is_assumed():
    text = "25,000,000 parameters on 1 ps with a link of 1,000 Mbit/s, which all workers share; 8 workers with links of 1,000 "
    assert advise.assumed(settings()) == f"{text}Mbit/s, 5 ms a message, 80 ms a step"
    alone = advise.assumed(settings(slow=10, ps_mbit=1e4))
    assert "with a link of 10,000 Mbit/s" in alone and alone.endswith("80 ms a step, 10 times as long on one of them")


@pytest.mark.parametrize("value, text", [(1234.5, "1,234"), (0.0123456, "0.0123"), (0.00001, "1.0e-05"), (99.96, "100")])
def test_three_digits(value, text):
    assert advise.three(value) == text


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([], "--parameters is missing: give it, as --parameters=25e6"),
        (["--parameters=1e6", "--step_ms=1"], "--workers is missing: give it, as --workers=8"),
        (["--parameters=1e6", "--workers=1001"], "--workers must be at most 1000, not 1001"),
        (["--parameters=-1"], "--parameters must be at least 1, not -1"),
        (["--mbit=fast"], "--mbit must be a number, not 'fast'"),
        (["--step_ms=0"], "--step_ms must be greater than 0, not 0"),
        (["--slow=0.5"], "--slow must be at least 1, not 0.5"),
        (["--worker=8"], "unknown flag --worker; did you mean --workers?"),
        (["--topk=0.1"], "--topk=0.1 needs --compress=topk: add that, or leave --topk out"),
        (["HogWild"], "unexpected argument 'HogWild': flags are written --name=value"),
        (["--parameters=2", "--workers=2", "--step_ms=1", "--num_ps=3"], "--num_ps=3 is more than the 2 parameters: give"),
    ],
)
def test_what_is_refused(user_error, arguments, text):
    with user_error(text):
        advise.parse(arguments)
