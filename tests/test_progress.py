"""core/progress.py, and what training/training.py says in result.json: figures of each worker, of all, and at the end."""

import contextlib
import io
import json
import math
import os
import sys
import types
from fractions import Fraction
from pathlib import Path

import pytest
import runs
from matplotlib.figure import Figure
from rich.console import Console

from common.core import plots, progress, task_status
from common.core.progress import Progress
from common.core.run_facts import RunFacts
from common.scheme import PARTS, RoundSize
from common.training.result import REPORT, summarize, write_result
from common.training.sample_counts import last_step


@pytest.fixture
def write(tmp_path):
    """A function that adds text to what a worker has written; a character is a byte."""
    (tmp_path / "metrics").mkdir()

    def write(worker, *lines):
        with open(tmp_path / "metrics" / f"worker-{worker}.jsonl", "a", encoding="latin-1") as file:
            for line in lines:
                file.write(line if isinstance(line, str) else json.dumps(line) + "\n")

    return write


def test_nothing_yet(write, tmp_path):
    figures = Progress(tmp_path, [0, 1])
    assert not figures.poll()
    assert figures.together() == {}


def test_newest_figures_of_each_worker(write, tmp_path):
    figures = Progress(tmp_path, [0, 1])
    write(0, dict(global_step=1, loss=3.0), dict(global_step=2, loss=2.0))
    write(1, dict(global_step=5, loss=4.0))
    assert figures.poll()
    assert figures.newest == {0: dict(global_step=2, loss=2.0), 1: dict(global_step=5, loss=4.0)}
    assert not figures.poll()
    write(0, dict(global_step=6, test_accuracy=0.5))
    assert figures.poll()
    assert figures.newest[0] == dict(global_step=2, loss=2.0, test_accuracy=0.5, evaluated=6)


def test_line_that_is_written_in_parts(write, tmp_path):
    """Also the first part of a file's first line, and a part that ends with the line."""
    figures = Progress(tmp_path, [0])
    for part in '{"global', '_step": 3', "}":
        write(0, part)
        assert not figures.poll()
    write(0, '\n{"global_step": 4}\n{"global_')
    assert figures.poll() and figures.newest[0] == {"global_step": 4}
    write(0, 'step": 5}\n')
    assert figures.poll() and figures.newest[0] == {"global_step": 5}


BROKEN = [
    *('{"global_step": 3, "lo', "", "{", "3", "null", '["global_step"]', '{"global_step": 3}{"global_step": 4}', "\0\0\0"),
    *('{"global_step": 3, "los\xe9": 2}', "[" * 100_000, '{"global_step": ' + "[" * 100_000, '{"loss": ' + "9" * 5000 + "}"),
    *(
        '{"global_step": 1.3}',
        '{"loss": "2"}',
        '{"loss": NaN}',
        '{"loss": 1e999}',
        '{"loss": {}}',
        '{"loss": ' + "9" * 400 + "}",
    ),
    *('{"time": []}', '{"worker": [0]}', '{"worker": {}}', '{"staleness": 3}', '{"last_step": "x"}'),
]


def test_lines_that_are_broken_are_left_out():
    lines = ['{"global_step": 1}', *BROKEN, '{"global_step": 2, "loss": null, "staleness": {"0": 3}, "worker": "evaluator"}\r']
    good = [{"global_step": 1}, {"global_step": 2, "loss": None, "staleness": {"0": 3}, "worker": "evaluator"}]
    assert progress.parsed([line.encode("latin-1") for line in lines]) == good
    assert progress.parsed([]) == []


def test_lines_that_lack_a_key_are_left_out():
    lines = [b'{"time": 1.5, "worker": 0}', b'{"time": 1.5, "wprker": 0}', b'{"time": null, "worker": 0}']
    assert progress.parsed(lines, ["time", "worker"]) == [{"time": 1.5, "worker": 0}]


def test_figures_after_a_broken_line(write, tmp_path):
    figures = Progress(tmp_path, [0])
    for line in BROKEN:
        write(0, line + "\n")
    assert not figures.poll()
    write(0, dict(global_step=4))
    assert figures.poll() and figures.newest[0] == {"global_step": 4}


def test_curve_of_metrics_with_broken_lines(write, tmp_path):
    for step, line in enumerate(BROKEN):
        write(0, line + "\n", dict(time=100.0 + step, worker=0, global_step=step, loss=2.0, samples_per_second=9.0))
    write(1, '{"time": 103.5, "wor')
    assert [line["global_step"] for line in plots.read_metrics(tmp_path)] == list(range(len(BROKEN)))
    plots.curve(tmp_path)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("curve.unfinished*"))


def a_line(step, **more):
    return dict(time=100.0 + step, worker=0, global_step=step, last_step=9, loss=2.0, samples_per_second=9.0) | more


def test_any_byte_may_be_another(write, tmp_path):
    """Whatever comes of it, it can be shown, drawn and counted."""
    line = json.dumps(a_line(1, samples=32, staleness_mean=0.5, staleness={"0": 1, "1": 1}))
    for place in range(len(line)):
        for bit in range(8):
            write(0, line[:place] + chr(ord(line[place]) ^ 1 << bit) + line[place + 1 :] + "\n")
    figures = Progress(tmp_path, [0])
    figures._tails[0]._position = 0  # as if it was written now
    assert figures.poll()
    figures.line(), rendered(figures.table())
    lines, damaged = progress.read_metrics(tmp_path)
    assert len(lines) > 100 and damaged > 100
    assert damaged + len(lines) >= 8 * len(line)  # a newline in the middle makes two of one
    plots.curve(tmp_path)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_figures_of_a_file_that_was_deleted_and_cut(write, tmp_path):
    """A worker makes it again; one that starts again cuts off what it had not finished."""
    write(0, a_line(1), '{"time": 1')
    figures, path = Progress(tmp_path, [0]), tmp_path / "metrics" / "worker-0.jsonl"
    path.write_text(json.dumps(a_line(1)) + "\n" + json.dumps(a_line(2)) + "\n")
    assert figures.poll() and figures.newest[0] == a_line(2)
    path.rename(path.with_suffix(".deleted"))  # so that its number is not given to the next
    assert not figures.poll()
    write(0, a_line(3))
    assert figures.poll() and figures.newest[0] == a_line(3)


def test_damaged_lines_are_counted(write, tmp_path):
    (tmp_path / "metrics" / "evaluator.jsonl").touch()
    write(0, a_line(1), *(line + "\n" for line in BROKEN), a_line(2), '{"unfinished')
    write(1, *(a_line(1), a_line(2) | {"time": None}))
    lines, damaged = progress.read_metrics(tmp_path)
    assert [line["global_step"] for line in lines] == [1, 1, 2]
    assert damaged == len(BROKEN) + 2


@pytest.mark.parametrize("status", [0, 130])
def test_summary_says_how_many_lines_were_skipped(write, tmp_path, capsys, status):
    write(0, a_line(1), "{", '"}\n', "3\n")
    assert summary(tmp_path, capsys, status)[0] == "2 damaged lines of metrics skipped"
    (tmp_path / "metrics" / "worker-0.jsonl").write_text("3\n")
    assert summary(tmp_path, capsys, status)[0] == "1 damaged line of metrics skipped"
    (tmp_path / "metrics" / "worker-0.jsonl").write_text(json.dumps(a_line(1)) + "\n")
    assert "damaged" not in "".join(summary(tmp_path, capsys, status))


def test_picture_that_cannot_be_drawn_is_a_warning(write, tmp_path, capsys, monkeypatch):
    """The result is there before, the picture of an earlier part goes, and the launcher is told, too."""
    said: list[str] = []
    monkeypatch.setenv("LAUNCHER_LOG", "log")
    monkeypatch.setattr(task_status, "tell", said.append)
    write(0, a_line(1))
    (tmp_path / "curve.png").touch()

    def fail(self, path):
        assert json.loads((tmp_path / "result.json").read_text())["global_steps"] == 350
        Path(path).write_bytes(b"half")
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg.print_png", fail)
    write_result(settings(run_dir=tmp_path), types.SimpleNamespace(num_ps=1), [report(**FIRST)], 350, {})
    line = f"no picture: {tmp_path / 'curve.png'} could not be drawn: RuntimeError: two lines"
    assert said == [line] and capsys.readouterr().out == line + "\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics", "result.json"]


def test_no_curve_of_nothing_but_a_broken_line(write, tmp_path):
    write(0, BROKEN[0])
    plots.curve(tmp_path)
    assert not list(tmp_path.glob("curve*"))


def test_numbers_of_a_logarithmic_axis_are_plain(write, tmp_path):
    """Those between the powers of ten, too, where there are few: 4, not 4 × 10⁰."""
    write(0, a_line(1, loss=4.5), a_line(2, loss=1.8))
    figure = Figure()
    assert plots.draw(figure, tmp_path)
    figure.draw_without_rendering()
    assert {"2", "3", "4"} <= {label.get_text() for label in figure.axes[0].yaxis.get_ticklabels(which="both")}


def test_loss_has_its_unit(write, tmp_path):
    """That on the test set, which the chief has evaluated, in the lines and in the table."""
    figures = Progress(tmp_path, [0, 1])
    write(0, a_line(1, test_loss=1.65, test_accuracy=0.5, unit="nats per character"))
    write(1, a_line(1))
    figures.poll()
    assert "loss 2.0000, test accuracy 0.500, test loss 1.6500 nats per character" in figures.line()
    assert "test loss, nats per character" in " ".join(rendered(figures.table())[0])


def test_run_that_goes_on_does_not_show_what_is_past(write, tmp_path):
    write(0, dict(global_step=900, loss=0.1))
    figures = Progress(tmp_path, [0])
    assert not figures.poll()
    write(0, dict(global_step=901))
    assert figures.poll() and figures.newest[0] == {"global_step": 901}


WORKERS = (
    dict(
        global_step=10, last_step=100, samples_per_second=1000.0, loss=2.0, staleness_mean=1.0, test_accuracy=0.5, test_loss=3.0
    ),
    dict(global_step=12, last_step=100, samples_per_second=500.0, loss=1.0, staleness_mean=0.0),
)


def test_all_together(write, tmp_path):
    """Samples add up, steps are counted once, the rest is a mean; only the chief evaluates."""
    figures = Progress(tmp_path, [0, 1, 2])  # worker 2 is still starting
    write(0, WORKERS[0])
    write(1, WORKERS[1])
    figures.poll()
    assert figures.together() == dict(
        global_step=12,
        last_step=100,
        samples_per_second=1500.0,
        loss=1.5,
        staleness_mean=0.5,
        test_accuracy=0.5,
        test_loss=3.0,
        evaluated=10,
    )


def test_who_has_left_has_no_speed_any_more(write, tmp_path):
    shown = progress.Progress(tmp_path, [0, 1])
    for i in range(2):
        write(i, {"global_step": 4 + i, "last_step": 9, "samples_per_second": 100.0, "loss": 1.0 + i})
    write(1, {"global_step": 8, "last_step": 9, "left": True})
    assert shown.poll()
    assert shown.together() == {"global_step": 8, "last_step": 9, "samples_per_second": 100.0, "loss": 1.0}


def test_one_line(write, tmp_path):
    figures = Progress(tmp_path, [0, 1])
    write(0, WORKERS[0] | dict(global_step=1234))
    write(1, WORKERS[1])
    figures.poll()
    assert figures.line() == (
        "step 1,234 of 100, samples/s 1,500, loss 1.5000, test accuracy 0.500, test loss 3.0000, staleness 0.50"
    )


def test_one_line_leaves_out_what_is_not_known(write, tmp_path):
    figures = Progress(tmp_path, [0])
    write(0, dict(global_step=0, last_step=100, test_loss=2.5, test_accuracy=None))
    figures.poll()
    assert figures.line() == "step 0 of 100, test loss 2.5000"


def rendered(table):
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return [line.split() for line in console.export_text().splitlines() if line.strip()]


def test_table(write, tmp_path):
    figures = Progress(tmp_path, [0, 1, 2])
    write(0, WORKERS[0])
    write(1, WORKERS[1])
    figures.poll()
    head, *rows = rendered(figures.table())
    assert " ".join(head) == "step samples/s loss test accuracy test loss at step staleness"
    assert [" ".join(row) for row in rows] == [
        "worker 0 10 1,000 2.0000 0.500 3.0000 10 1.00",
        "worker 1 12 500 1.0000 0.00",
        "worker 2 starting",
        "together 12 1,500 1.5000 0.500 3.0000 10 0.50",
    ]


def test_table_of_one_worker_has_no_total(write, tmp_path):
    write(0)
    assert "together" not in str(rendered(Progress(tmp_path, [0]).table()))


@pytest.fixture
def now(monkeypatch):
    """A clock for the progress that the test sets."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    return now


@pytest.mark.parametrize("seconds, left", [(None, "60 s"), (100, "27 s")])
def test_time_left(write, tmp_path, now, seconds, left):
    """By steps or by seconds of training, whichever is nearer its end; and an evaluation is shown with its step."""
    figures = Progress(tmp_path, [0], seconds=seconds)
    for moment in 0, 10, 40:
        now.seconds = moment
        write(0, dict(global_step=10 * moment, last_step=1000, train_seconds=1.5 * moment))
        write(0, dict(global_step=5, last_step=1000, test_accuracy=0.1))
        figures.poll()
    assert figures.line() == f"step 400 of 1,000, {left} left, test accuracy 0.100 at step 5"


def test_long_work_says_now_and_then_how_much_is_left(now, capsys):
    done = []
    for item in progress.counted(range(5), "runs"):
        done.append(item)
        now.seconds += 20
    assert done == [0, 1, 2, 3, 4]
    assert capsys.readouterr().out == "runs: 2 of 5 done, 60 s left\nruns: 4 of 5 done, 20 s left\n"


def test_what_a_worker_does_that_starts(tmp_path, now, capsys, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECS", 0.0)
    display = progress.Display(types.SimpleNamespace(run_dir=tmp_path), [0, 1])
    for what in "loading the data", "loading the data", "building the graph":
        display.doing = {0: what, 1: "starting"}.get
        display._show()
    assert capsys.readouterr().out == "worker 0 is loading the data\nworker 0 is building the graph\n"
    rows = [" ".join(row) for row in rendered(display.progress.table(display.doing))]
    assert rows[1:] == ["worker 0 building the graph", "worker 1 starting", "together"]


@pytest.mark.slow
def test_bars_on_a_terminal():
    """They show the time left and the present work, and end with it."""
    code = """
from common.core import progress
for item in progress.counted([1, 2], "runs"):
    print("ran", item)
with progress.busy("checking") as shown:
    shown("checking: loading the data")
"""
    with runs.on_a_terminal([sys.executable, "-c", code]) as (process, screen, _):
        shown = b""
        with contextlib.suppress(OSError):  # at its end
            while part := os.read(screen, 1000):
                shown += part
        assert process.wait() == 0
    text = shown.decode()
    assert "runs" in text and "0/2" in text and "checking: loading the data" in text
    assert text.index("ran 1") < text.index("ran 2")


def test_display_without_a_terminal_prints_the_last_figures(write, tmp_path, capsys):
    settings = types.SimpleNamespace(run_dir=tmp_path)
    with progress.Display(settings, [0]) as display:
        display.say("worker 1 was killed")
        write(0, WORKERS[0])
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "worker 1 was killed"
    assert out[-1].startswith("step 10 of 100, samples/s 1,000")


RESULT = dict(
    scheme="HogWild",
    num_ps=1,
    num_workers=2,
    global_steps=2697,
    samples=86336,
    samples_per_worker=[43008, 43328],
    train_seconds=5.04,
    wall_seconds=29.56,
    samples_per_second=16980.02,
    test_accuracy=0.9749,
    test_loss=0.08842,
    staleness_mean=0.3176,
    staleness_max=3,
    restarts=0,
)


def summary(tmp_path, capsys, status=0, delays=None, **changes):
    (tmp_path / "result.json").write_text(json.dumps(RESULT | changes))
    for name in ("curve.png", "model.keras"):
        (tmp_path / name).touch()
    progress.summary(types.SimpleNamespace(run_dir=str(tmp_path), delays=delays), status)
    return capsys.readouterr().out.splitlines()


def test_summary(tmp_path, capsys):
    assert summary(tmp_path, capsys) == [
        "HogWild, 1 ps, 2 workers: 2,697 updates, 86,336 samples (43,008 to 43,328 of each worker)",
        "5.0 s of training, 16,980 samples/s; 29.6 s in all",
        "test accuracy 0.975, test loss 0.0884; staleness 0.32 on average, 3 at most, 0 restarts",
        str(tmp_path / "curve.png"),
        str(tmp_path / "model.keras"),
    ]


@pytest.mark.parametrize(
    "shares, more, is_said",
    [
        ([100, 301], {}, True),
        ([100, 300], {}, False),
        ([0, 5], {}, True),
        ([1, 9], {"delays": [0, 5]}, False),
        ([1, 9], {"restarts": 1}, True),  # of the ps
        ([1, 9], {"restarts": 1, "restarts_of_workers": [0, 1]}, True),
        ([1, 9], {"restarts": 1, "restarts_of_workers": [1, 0]}, False),
        ([1, 9], {"restarts": 2, "restarts_of_workers": [1, 1]}, False),
        ([1, 4, 20], {"restarts": 1, "restarts_of_workers": [1, 0, 0]}, True),
    ],
)
def test_summary_of_unequal_shares(tmp_path, capsys, shares, more, is_said):
    """Of a worker that was started again only the last part is counted."""
    lines = summary(tmp_path, capsys, samples_per_worker=shares, **more)
    assert ("some workers trained on far fewer samples" in lines[1]) is is_said


def test_summary_of_a_run_that_was_stopped_says_what_is_saved(tmp_path, capsys):
    """The newest in their list: one of a later step may be damaged, and file times follow a clock that may be set back."""
    (tmp_path / "checkpoints").mkdir()
    for step, written in (900, 3), (1234, 1), (2000, 2):
        path = tmp_path / "checkpoints" / f"model.ckpt-{step}.index"
        path.touch()
        os.utime(path, (written, written))
    (tmp_path / "checkpoints" / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-01234"\n')
    assert summary(tmp_path, capsys, 130) == [
        f"stopped; a checkpoint is saved, of step 1,234, and so is the model: --resume --run_dir={tmp_path} goes on from there"
    ]


def test_summary_says_who_has_left(tmp_path, capsys):
    """No advice about workers that have trained less than others."""
    lines = summary(tmp_path, capsys, samples_per_worker=[1, 9], left=[{"worker": 1, "updates": 1234}])
    assert lines[1] == "worker 1 has left after 1,234 updates" and "differ much" not in lines[2]


@pytest.mark.parametrize("say", [progress.say, task_status.tell])
def test_a_line_is_written_at_once(monkeypatch, say):
    """Several threads say lines: the end of one is never behind the begin of another's."""
    written: list[str] = []
    monkeypatch.delenv("LAUNCHER_WORDS", raising=False)
    monkeypatch.setattr("sys.stdout", types.SimpleNamespace(write=written.append, flush=lambda: None))
    say("worker 1 has left")
    assert [text for text in written if text] == ["worker 1 has left\n"]


def test_summary_of_a_run_that_goes_on(tmp_path, capsys):
    """All samples are those of all runs, but what each worker had is known of this one alone."""
    (line, *_) = summary(tmp_path, capsys, samples_per_worker=[100, 120])
    assert line.endswith(": 2,697 updates, 86,336 samples (100 to 120 of each worker since it began)")


def test_summary_promises_no_picture_that_is_not_there(tmp_path, capsys):
    summary(tmp_path, capsys)
    (tmp_path / "curve.png").unlink()
    progress.summary(types.SimpleNamespace(run_dir=str(tmp_path), delays=None), 0)
    assert capsys.readouterr().out.splitlines()[3:] == [str(tmp_path / "model.keras")]


def test_summary_of_a_regression_in_one_process(tmp_path, capsys):
    lines = summary(tmp_path, capsys, test_accuracy=None, num_ps=0, num_workers=1, samples_per_worker=[86336])
    assert lines[0] == "HogWild, one process, 1 worker: 2,697 updates, 86,336 samples"
    assert lines[2].startswith("test loss 0.0884; ")


def test_summary_of_a_run_that_had_nothing_left_to_do(tmp_path, capsys):
    lines = summary(tmp_path, capsys, train_seconds=None, samples_per_second=None, staleness_mean=None)
    assert lines[1] == "nothing was left to do: --steps, --epochs or --seconds had been reached before; 29.6 s in all"
    assert lines[2] == "test accuracy 0.975, test loss 0.0884; 0 restarts"


def test_summary_of_a_run_in_which_the_last_worker_came_too_late(tmp_path, capsys):
    lines = summary(tmp_path, capsys, train_seconds=None, samples_per_second=None)
    assert lines[1] == "no samples/s: too little training after the start of the last worker; 29.6 s in all"


def test_summary_of_a_run_that_was_stopped(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "model.ckpt-7.index").touch()
    (line,) = summary(tmp_path, capsys, status=130)
    assert f"--resume --run_dir={tmp_path}" in line


def test_no_checkpoint_is_promised_that_is_not_there(tmp_path, capsys):
    assert "--resume" not in "".join(summary(tmp_path, capsys, status=130))


def test_no_summary_of_a_run_that_failed(tmp_path, capsys):
    assert summary(tmp_path, capsys, status=1) == []


# --- result.json -------------------------------------------------------------------------------------------------------


def settings(**changes):
    defaults = dict(run=RunFacts("HogWild"), data="digits", batch_size=32, window=1, steps=None, epochs=60.0)
    return types.SimpleNamespace(**defaults | changes)


def test_last_step():
    assert last_step(settings(), 1438) == math.ceil(60 * 1438 / 32)
    assert last_step(settings(), 1438, 320) == math.ceil(60 * 1438 / 320)
    assert last_step(settings(), 1438, Fraction(32 * 3, 2)) == math.ceil(60 * 1438 / 48)
    assert last_step(settings(epochs=1e-6), 1438) == 1
    assert last_step(settings(steps=7), 1438) == 7


def report(**figures):
    """The report of a worker at its end."""
    return [{"dropped": 0, **figures}[name] for name in REPORT]


def whole_report(seconds, left=0.0, **figures):
    """The report of a scheme's worker, which also says how long it was there."""
    return [*report(**figures), *[math.nan] * len(PARTS), seconds, left]


FIRST = dict(
    index=0, first_time=100.0, first_step=0, stop_time=110.0, samples=6400, updates=200, staleness_sum=100, staleness_max=1
)
SECOND = dict(
    index=1, first_time=102.0, first_step=50, stop_time=111.0, samples=4800, updates=150, staleness_sum=75, staleness_max=4
)


def test_result_of_two_workers():
    """Speed is measured from the second call of the last worker to start, until the last one stops."""
    task = types.SimpleNamespace(num_ps=3)
    result = summarize(settings(), task, [report(**FIRST), report(**SECOND)], 350)
    assert result["train_seconds"] == pytest.approx(9)
    assert result["samples_per_second"] == pytest.approx((350 - 50) * 32 / 9)
    assert result["samples"] == 11200
    assert result["staleness_mean"] == pytest.approx(175 / 350)
    assert result["staleness_max"] == 4
    assert (result["num_ps"], result["num_workers"], result["global_steps"]) == (3, 2, 350)
    assert result["wall_seconds"] > 0
    json.dumps(result, allow_nan=False)


def test_result_says_who_has_left_and_how_long_all_were_there():
    reports = [whole_report(12.5, **FIRST), whole_report(7.0, left=105.5, **SECOND | {"index": 3, "stop_time": 105.0})]
    result = summarize(settings(), types.SimpleNamespace(num_ps=1), reports, 350)
    assert result["left"] == [{"worker": 3, "time": 105.5, "updates": 150, "samples": 4800}]
    assert result["worker_seconds"] == 19.5 and result["num_workers"] == 2
    json.dumps(result, allow_nan=False)
    others = summarize(settings(), None, [report(**FIRST)], 200)  # a script with a main loop of its own
    assert (others["left"], others["worker_seconds"]) == ([], None)


@pytest.mark.parametrize("step, stop", [(350, 102.0), (350, 101.0), (50, 110.0), (40, 110.0)])
def test_an_outage_leaves_no_rate_that_is_negative(step, stop):
    """What the last worker to start had seen was rolled back, and not trained again."""
    reports = [report(**FIRST | {"stop_time": stop}), report(**SECOND | {"stop_time": stop})]
    result = summarize(settings(), types.SimpleNamespace(num_ps=1), reports, step)
    assert (result["train_seconds"], result["samples_per_second"]) == (None, None)


def test_local_steps_count_in_the_speed():
    result = summarize(settings(), None, [report(**FIRST)], 200, size=RoundSize(steps_per_update=Fraction(10), batch_size=32))
    assert result["samples_per_second"] == pytest.approx(200 * 320 / 10)
    assert result["num_ps"] == 0


def test_an_update_of_several_gradients_counts_all_of_them_in_the_speed():
    """Not those that were dropped, though these are among the samples that were processed."""
    reports = [report(**FIRST), report(**SECOND, dropped=7)]
    size = RoundSize(batch_size=32, gradients_per_update=2)
    result = summarize(settings(), types.SimpleNamespace(num_ps=1), reports, 200, size=size)
    assert result["samples_per_second"] == pytest.approx((200 - 50) * 64 / 9)
    assert (result["samples"], result["gradients_dropped"]) == (11200, 7)


def test_worker_that_came_too_late_to_train_does_not_count_in_the_speed():
    late = report(
        index=1, first_time=109.0, first_step=200, stop_time=109.5, samples=0, updates=0, staleness_sum=0, staleness_max=0
    )
    result = summarize(settings(), None, [report(**FIRST), late], 200)
    assert result["train_seconds"] == pytest.approx(10)
    assert result["samples_per_second"] == pytest.approx(640)


def test_result_of_a_run_that_had_nothing_left_to_do():
    idle = FIRST | dict(first_step=200, samples=0, updates=0, staleness_sum=0, staleness_max=0)
    result = summarize(settings(), None, [report(**idle)], 200)
    assert (result["train_seconds"], result["samples_per_second"], result["staleness_mean"]) == (None, None, None)
    assert (result["samples"], result["staleness_max"]) == (0, 0)
