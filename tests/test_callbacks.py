"""common/training/callbacks.py: early stopping, and functions of the user's own that hear what is measured."""

import threading

import pytest

from common.training import callbacks
from common.training.callbacks import Callback, Patience


@pytest.fixture
def told(monkeypatch):
    """The lines for the user, a list."""
    lines: list = []
    monkeypatch.setattr(callbacks, "tell", lines.append)
    return lines


def test_patience(told):
    """Two evaluations in turn that are no better. The same step again does not count, nor a line without a validation loss."""
    stopped: list = []
    patience = Patience(2, lambda: stopped.append(True))
    for step, loss in [(0, 3.0), (0, 3.0), (0, 3.0), (1, 2.0), (2, 2.5), (3, 1.5), (4, float("nan"))]:
        patience(step, {"validation_loss": loss})
    patience(5, {"loss": 9.0})
    assert not stopped and not told
    patience(6, {"validation_loss": 1.5})
    assert stopped == [True]
    assert told == ["no smaller validation loss than 1.5000 in 2 evaluations: training ends"]
    patience(7, {"validation_loss": 1.6})
    assert len(stopped) == len(told) == 1


def test_calls_in_order_in_another_thread(told):
    calls: list = []
    callback = Callback("--callback=f", lambda step, metrics: calls.append((step, metrics, threading.get_ident())), None)
    for step in range(20):
        callback(step, {"loss": step / 2})
    callback.close()
    assert [(step, metrics) for step, metrics, _ in calls] == [(step, {"loss": step / 2}) for step in range(20)]
    assert threading.get_ident() not in {thread for _, _, thread in calls}
    assert told == []


def test_one_that_raises_is_told_once(told):
    def fails(step, metrics):
        print("step", step)
        raise SystemExit("no network")

    callback = Callback("--callback=f", fails, None)
    for step in range(2):
        callback(step, {})
    callback.close()
    error = "--callback=f raised SystemExit: no network; training goes on, and its later errors are not shown"
    assert told == [error, "step 0", "step 1"]


def test_true_ends_training(told):
    stopped: list = []
    callback = Callback("--callback=f", lambda step, metrics: step == 3 or None, lambda: stopped.append(True))
    for step in range(5):
        callback(step, {})
    callback.close()
    assert stopped == [True]


def test_one_that_does_not_return(told, monkeypatch):
    monkeypatch.setattr(callbacks, "BEHIND", 2)
    entered, forever = threading.Event(), threading.Event()

    def hangs(step, metrics):
        entered.set()
        forever.wait()

    callback = Callback("--callback=f", hangs, None, most_secs=0.1)
    callback(0, {})
    entered.wait()
    for step in range(4):
        callback(step, {})
    callback.close()
    forever.set()
    assert told == [
        "--callback=f is slow: 2 calls wait for it, and the end of the run will, too",
        "--callback=f has not returned within 0.1 s: the run ends without it",
    ]
