"""book/guide/arithmetic.md: its numbers are those of common/cli/arithmetic.py, and its lines those of `common.advise`."""

import re

import pytest
from runs import ROOT

from common.cli import advise, arithmetic

PAGE = (ROOT / "book" / "guide" / "arithmetic.md").read_text()
ANSWERS = re.findall(r"`([^`\n]+)` = ([\d,.]+\d|\d)", PAGE)
COMMANDS = re.findall(r"^\$ python -m common\.advise (.*)\n((?:.+\n)+?)```", PAGE, re.MULTILINE)


@pytest.mark.parametrize("expression, answer", ANSWERS)
def test_answers(expression, answer):
    value = eval(expression, {**vars(arithmetic)})
    assert float(answer.replace(",", "")) == float(advise.three(value).replace(",", ""))


@pytest.mark.parametrize("flags, lines", COMMANDS)
def test_commands(flags, lines):
    assert advise.needed(advise.parse(flags.split())) == lines.splitlines()


def test_all_are_found():
    assert len(ANSWERS) == PAGE.count("` = ") == 20 and len(COMMANDS) == PAGE.count("$ python") == 2


def test_bytes_and_seconds():
    """Ten parameters by hand: a message of 40 bytes."""
    assert arithmetic.ps_bytes(10, slots=2, num_ps=3) == 40
    assert arithmetic.worker_bytes(10, slots=2, activations=5) == 245
    assert arithmetic.step_seconds(10, 7, 42) == 10
    assert arithmetic.message_seconds(40, 20, latency=1) == 3
    assert arithmetic.workers_fed(2, 5, 40, 20, num_ps=3) == 15
    assert [arithmetic.window_for(workers, 2, 40, 20) for workers in (1, 4, 5)] == [1, 4, 5]


@pytest.mark.parametrize(
    "given, text",
    [
        (["--gflops=1", "--step_ms=1"], "--gflops and --step_ms both give the time of a step"),
        (["--step_ms=1", "--uses=2"], "--uses=2 needs --gflops"),
        (["--gflops=0"], "--gflops must be greater than 0"),
    ],
)
def test_what_is_refused(user_error, given, text):
    with user_error(text):
        advise.parse(["--parameters=1e6", "--workers=2", *given])


def test_without_links():
    """Memory alone; nothing is said of messages."""
    [line] = advise.needed(advise.parse(["--parameters=1e9", "--workers=2", "--step_ms=1", "--memory_gb=16"]))
    assert line == "Memory, at least: 4 GB on each ps, 16 GB in a worker."
