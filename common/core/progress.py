"""The progress of a run, and the summary at its end. Reads the files of the workers; imports no tensorflow."""

import collections
import contextlib
import json
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from common.core.task_status import print_at_once

SHARES, LEAST_SECS = 15, 1.0  # the time left is estimated from the last SHARES polls, if they span at least LEAST_SECS
QUIET_SECS = 5.0  # without a line, after which the first worker's activity is shown


class _Tail:
    """The lines appended to a worker's metrics since the last read."""

    def __init__(self, path):
        self._path, self._file, self._position = path, None, 0
        self.read()  # skip the lines from before a resume

    def read(self):
        try:
            with open(self._path, "rb") as opened:
                status = os.fstat(opened.fileno())
                if self._file != (status.st_dev, status.st_ino):  # a new file: the old one was deleted
                    self._file, self._position = (status.st_dev, status.st_ino), 0
                opened.seek(min(self._position, status.st_size))
                written = opened.read()
        except OSError:
            return []  # the file does not exist yet, or no longer
        *lines, rest = written.split(b"\n")
        self._position += len(written) - len(rest)
        return parsed(lines)


def parsed(lines, needed=()):
    """Returns the JSON objects among these lines of metrics, without damaged ones.

    A damaged line was truncated by a full disk, lost or changed a byte, or lacks a key or a number.

    Args:
      lines: bytes each.
      needed: keys that each line must have.
    """
    found = []
    for each in lines:
        with contextlib.suppress(ValueError, RecursionError):  # RecursionError: deeply nested brackets
            line = json.loads(each.decode("ascii"))
            if isinstance(line, dict) and all(line.get(key) is not None for key in needed) and _fits(line):
                found.append(line)
    return found


def _fits(line):
    """Whether each value has the type and range of its key, so that it can be compared, shown and drawn."""
    for key, value in line.items():
        kind = _KINDS.get(key, _NUMBER if key.startswith(_MEASURED) else object)
        if value is not None and not isinstance(value, kind):
            return False
        if isinstance(value, _NUMBER) and not abs(value) < 1e300:  # "not" also catches NaN
            return False
    return all(isinstance(share, _NUMBER) and 0 <= share <= 1 for share in (line.get("parts") or {}).values())


_MEASURED = "test_", "validation_"  # prefixes of metric names


def measures(lines):
    """Returns (name, key, format) of each metric on the test set and on held-out samples; each set's loss comes last."""
    keys = {key for line in lines for key, value in line.items() if key.startswith(_MEASURED) and value is not None}
    ordered = sorted(keys, key=lambda key: (key.partition("_")[0], key.endswith("_loss"), key))
    return [(key.replace("_", " "), key, ".4f" if key.endswith("_loss") else ".3f") for key in ordered]


def read_metrics(run_dir):
    """Returns the lines of all workers' and the evaluator's metrics, oldest first; and the number of damaged lines."""
    found, count = [], 0
    for path in Path(run_dir, "metrics").glob("*.jsonl"):
        with contextlib.suppress(OSError):  # it was deleted just now
            lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
            lines = [] if lines == [b""] else lines
            count += len(lines)
            found += parsed(lines, ("time", "worker", "global_step"))
    return sorted(found, key=lambda line: line["time"]), count - len(found)


class Progress:
    """The newest figures of each worker, and of all together.

    Args:
      run_dir: folder of the run.
      workers: indices of the workers to show, and "evaluator" if there is one.
      places: indices of the workers that are shown only after they have joined.
      seconds: of training, after which the run ends; None if only steps end it.
    """

    def __init__(self, run_dir, workers, places=(), seconds=None):
        self._places, self._seconds = places, seconds
        self._shares: Any = collections.deque(maxlen=SHARES)  # (time, share of the training done)
        self._tails = {i: _Tail(Path(run_dir, "metrics", f"{_name(i)}.jsonl")) for i in workers}
        self.newest: dict[int | str, dict] = {i: {} for i in workers}

    def poll(self):
        """Reads the new lines; returns whether there were any."""
        news = False
        for i, tail in self._tails.items():
            for line in tail.read():
                if i != "evaluator" and any(key.startswith(_MEASURED) for key in line):  # an evaluation of an earlier step
                    step = line.pop("global_step", None)
                    line |= {"evaluated": step, "global_step": self.newest[i].get("global_step", step)}
                self.newest[i].update(line)
                if line.get("left"):  # drop its speed, keep its step
                    self.newest[i] = {key: line[key] for key in ("global_step", "last_step") if key in line}
                news = True
        if news:
            self._shares.append((time.monotonic(), self.share()))
        return news

    def share(self):
        """Returns the share of the training that is done, from 0 to 1: of its steps or its seconds, whichever is larger."""
        n = self.together()
        steps = n["global_step"] / n["last_step"] if n.get("last_step") else 0
        return min(1.0, max(steps, n.get("train_seconds", 0) / self._seconds if self._seconds else 0))

    def whole(self):
        """Returns the length of the training, as " of 2,697 steps"; empty if unknown yet."""
        last = self.together().get("last_step")
        steps = [] if last in (None, ENDLESS) else [f"{last:,d} steps"]
        seconds = [f"{self._seconds:g} s"] if self._seconds else []
        return f" of {' or '.join([*steps, *seconds])}" if steps or seconds else ""

    def left(self):
        """Returns the seconds left at the recent speed; None if unknown."""
        if not self._shares:
            return None
        (before, some), (now, share) = self._shares[0], self._shares[-1]
        return (1 - share) * (now - before) / (share - some) if share > some and now - before >= LEAST_SECS else None

    def together(self):
        """Figures of all workers together, under the same keys; unknown ones are missing."""
        newest = [n for n in self.newest.values() if n]
        measured = [key for _, key, _ in measures(newest)]  # only one task reports them
        combine: dict[str, Any] = dict.fromkeys(("global_step", "last_step", "train_seconds", "evaluated", *measured), max)
        combine |= {"samples_per_second": sum, "loss": _mean, "staleness_mean": _mean}
        known = {key: [n[key] for n in newest if n.get(key) is not None] for key in combine}
        return {key: combine[key](values) for key, values in known.items() if values}

    def parts(self):
        """The parts' shares of a round's time, averaged over the workers, as text; empty if unknown."""
        known = [n["parts"] for n in self.newest.values() if n.get("parts")]
        names = dict.fromkeys(part for each in known for part in each)
        return parts_as_text({part: _mean([each.get(part, 0) for each in known]) for part in names})

    def unit(self):
        """The unit of the loss, as "nats per character"; empty if unknown."""
        return next((n["unit"] for n in self.newest.values() if n.get("unit")), "")

    def _columns(self):
        """(name, key, format) of each figure; the step of the evaluation comes after its metrics."""
        speed, loss, staleness = _COLUMNS
        found = measures(self.newest.values()) or [("test loss", "test_loss", ".4f")]
        return [speed, loss, *found, ("at step", "evaluated", ",d"), staleness]

    def line(self):
        """The figures of all workers together, in one line."""
        n = self.together()
        parts, left = [f"step {_steps(n)}"], self.left()
        if left is not None and self.share() < 1:
            parts.append(f"{as_time(left)} left")
        has_metric = any(key.startswith(_MEASURED) for key in n)
        for name, key, form in self._columns():
            if key == "evaluated" and has_metric and n.get(key) not in (None, n.get("global_step")):
                parts[-1] += f" {name} {n[key]:{form}}"
            elif key != "evaluated" and key in n:
                text = _number(n, key, form)
                parts.append(f"{name} {with_unit(text, {'unit': self.unit()}) if key == 'test_loss' else text}")
        return ", ".join([*parts, *filter(None, [self.parts()])])

    def table(self, doing=lambda worker: "starting"):
        """A table for `rich`: a row for each worker, and one for all together. `doing`: see `Display`."""
        from rich.table import Table

        table = Table(box=None, pad_edge=False, caption=self.parts() or None, caption_justify="left")
        columns = self._columns()
        unit = f", {self.unit()}" if self.unit() else ""
        for name in ("", "step", *(f"{name}{unit if key == 'test_loss' else ''}" for name, key, _ in columns)):
            table.add_column(name, justify="right")
        rows = {i: n for i, n in self.newest.items() if n or i not in self._places}
        if len(rows) > 1:
            rows["together"] = self.together()  # its cells are empty until something is known
        for i, n in rows.items():
            cells = [_number(n, key, form) for _, key, form in columns]
            step = _number(n, "global_step", ",d") if n or i == "together" else doing(i)
            table.add_row(_name(i).replace("-", " "), step, *cells)
        return table


_COLUMNS = (
    ("samples/s", "samples_per_second", ",.0f"),
    ("loss", "loss", ".4f"),
    ("staleness", "staleness_mean", ".2f"),
)
_NUMBER = (int, float)
_KINDS: dict[str, Any] = {
    **{key: _NUMBER for key in ("time", "train_seconds", *(key for _, key, _ in _COLUMNS))},
    **{key: int for key in ("global_step", "last_step", "samples")},
    "worker": (int, str),
    "unit": str,
    "staleness": dict,
    "parts": dict,
    "timed_rounds": list,
}


ENDLESS = 2**53  # the last step of a run that only --seconds ends


def _steps(values):
    last = values.get("last_step")
    return _number(values, "global_step", ",d") + ("" if last in (None, ENDLESS) else f" of {last:,d}")


def _number(values, key, form):
    return format(values[key], form) if values.get(key) is not None else ""


def _name(worker):
    """The name of a worker's metrics file, without the suffix."""
    return f"worker-{worker}" if isinstance(worker, int) else worker


def with_unit(text, result):
    """Returns a loss with its unit, as "1.6512 nats per character", if both are known."""
    return f"{text} {result['unit']}" if text and result.get("unit") else text


def parts_as_text(parts):
    """Returns {part: share} as "pull 31 %, train 69 %"."""
    return ", ".join(f"{part} {100 * share:.0f} %" for part, share in parts.items())


def _mean(values):
    return sum(values) / len(values)


LINE_SECS = 30.0  # between two progress lines of `counted` without a terminal


def counted(items, what, total=None):
    """Yields the items, and shows the number done and the time left: a bar, or without a terminal an occasional line.

    Args:
      items: an iterable; the work on an item happens before the next one is requested, or inside the iterable.
      what: description of the work, in a few words.
      total: number of items; by default the length of `items`.
    """
    total = len(items) if total is None else total
    if sys.stdout.isatty():
        from rich import progress

        columns = progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
        with progress.Progress(progress.TextColumn("{task.description}"), *columns, transient=True) as bar:
            yield from bar.track(items, total, description=what)
        return
    began = said = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - said >= LINE_SECS:
            said = now
            say(f"{what}: {done} of {total} done, {as_time((now - began) / done * (total - done))} left")
        yield item


@contextlib.contextmanager
def busy(what):
    """A context that shows an activity and its duration on a terminal; yields a function that changes the description."""
    if not sys.stdout.isatty():
        yield lambda what: None
        return
    from rich import progress

    columns = progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.TimeElapsedColumn()
    with progress.Progress(*columns, transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda what: shown.update(task, description=what)


class Display:
    """A context that shows the progress of a run: a live table and a bar on a terminal, otherwise a line every two seconds.

    Attributes:
      doing: function from the index of a worker without figures to a description of its activity.
    """

    def __init__(self, settings, workers, places=()):
        self.progress = Progress(settings.run_dir, workers, places, getattr(settings, "seconds", None))
        self.doing: Any = lambda worker: "starting"
        self._ended, self._said, self._next = threading.Event(), "", time.monotonic() + QUIET_SECS
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._live = None
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(self._shown(), auto_refresh=False)

    def _shown(self):
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        share, left = self.progress.share(), self.progress.left()
        bar = Table.grid(padding=(0, 1))
        rest = "" if left is None or share == 1 else f", {as_time(left)} left"
        bar.add_row(ProgressBar(total=1, completed=share, width=30), f"{share:.0%}{self.progress.whole()}{rest}")
        return Group(self.progress.table(self.doing), bar)

    def say(self, line):
        """Prints a line above the table."""
        if self._live:
            self._live.console.print(line, highlight=False, markup=False)
        else:
            say(line)

    def __enter__(self):
        if self._live:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._ended.set()
        self._thread.join()
        self._show()
        if self._live:
            self._live.stop()

    def _run(self):
        while not self._ended.wait(0.25 if self._live else 2):
            self._show()

    def _show(self):
        news = self.progress.poll()
        if self._live:
            self._live.update(self._shown(), refresh=True)
        elif news:
            say(self.progress.line())
        elif not any(self.progress.newest.values()) and time.monotonic() >= self._next:
            self._say_start()

    def _say_start(self):
        """Prints the first worker's activity, unless it is the one printed last."""
        worker = next(iter(self.progress.newest))
        text = f"{_name(worker).replace('-', ' ')} is {self.doing(worker)}"
        if text != self._said:
            say(text)
            self._said, self._next = text, time.monotonic() + QUIET_SECS


def say(line):
    """Prints a line, from any thread; ignores a closed pipe, so that a run piped into `head` continues."""
    try:
        print_at_once(line)
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


UNEQUAL = 3  # ratio of samples between two workers above which the summary warns, unless --delays explain it


def as_time(seconds):
    """Returns seconds as "40 s", "3 min" or "2.5 h"."""
    for limit, unit, form in (100, "s", ".0f"), (100 * 60, "min", ".0f"), (math.inf, "h", ".1f"):
        if seconds < limit:
            return f"{seconds / {'s': 1, 'min': 60, 'h': 3600}[unit]:{form}} {unit}"


def as_typed(path):
    """Returns the path of a folder as a user would type it: relative to the working directory, if inside it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _step_saved(run_dir):
    """Returns the global step of the newest checkpoint, from their list, as file times need not be in order; else None."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = re.match(r'model_checkpoint_path: "[^"]*-(\d+)"', (run_dir / "checkpoints" / "checkpoint").read_text())
        return int(found[1]) if found else None
    return None


def summary(settings, status):
    """Prints the summary of a run, from its `result.json`."""
    run_dir = Path(settings.run_dir)
    lines, damaged = read_metrics(run_dir) if status in (0, 130) else ([], 0)
    if damaged:
        say(f"{damaged} damaged line{'s' if damaged > 1 else ''} of metrics skipped")
    run_dir = as_typed(run_dir)
    if status == 130 and any(run_dir.glob("checkpoints/*.index")):
        step = _step_saved(run_dir)
        of_step = f", of step {step:,}" if step is not None else ""
        saved = ", and so is the model" if (run_dir / "model.keras").exists() else ""
        say(f"stopped; a checkpoint is saved{of_step}{saved}: --resume --run_dir={run_dir} goes on from there")
    if status == 0:
        result = json.loads((run_dir / "result.json").read_text())
        for line in (*_of_work(result, settings, lines), *_of_speed(result), *_of_best(run_dir)):
            say(line)


def _of_work(result, settings, lines):
    """Yields lines of the summary about the work of each task."""
    count, what = (result["num_towers"], "tower") if "num_towers" in result else (result["num_workers"], "worker")
    workers = f"{count} {what}{'s' if count > 1 else ''}"
    tasks = f"{result['num_ps']} ps, {workers}" if result["num_ps"] else f"one process, {workers}"
    shares = result["samples_per_worker"]
    since = " since it began" if sum(shares) < result["samples"] else ""  # processes started later than the run
    each = f" ({min(shares):,} to {max(shares):,} of each worker{since})" if len(shares) > 1 else ""
    yield f"{result['scheme']}, {tasks}: {result['global_steps']:,} updates, {result['samples']:,} samples{each}"
    left = result.get("left") or []
    for gone in left:
        yield f"worker {gone['worker']} has left after {gone['updates']:,} updates"
    # A restarted worker may have trained on more samples before.
    restarts = result.get("restarts_of_workers", [])
    least = min((n for i, n in enumerate(shares) if not any(restarts[i : i + 1])), default=math.inf)
    if max(shares) > UNEQUAL * least and not settings.delays and not left:
        yield "some workers trained on far fewer samples, so the parameters mostly reflect the others' data: train for longer"
    reached = max((line["global_step"] for line in lines), default=0)
    if lost := max(0, reached - result["global_steps"]):
        yield f"step {reached:,} had been reached, but {lost:,} updates were lost with a ps and not all repeated"


def _of_speed(result):
    """Yields lines of the summary about the speed, the parts of a round, and the result."""
    staleness = ""
    if result["staleness_mean"] is not None:  # some worker has trained
        staleness = f"staleness {result['staleness_mean']:.2f} on average, {result['staleness_max']} at most, "
    if result["train_seconds"]:
        speed = f"{result['train_seconds']:.1f} s of training, {result['samples_per_second']:,.0f} samples/s"
    elif staleness:
        speed = "no samples/s: too little training after the start of the last worker"
    else:
        speed = "nothing was left to do: --steps, --epochs or --seconds had been reached before"
    yield f"{speed}; {result['wall_seconds']:.1f} s in all"
    if result.get("parts"):
        yield f"a round takes {1000 * result['round_seconds']:.3g} ms: {parts_as_text(result['parts'])}"
    elif "parts" in result and result["train_seconds"] and "num_towers" not in result:
        yield "the parts of a round were not measured: too few rounds"
    measured = "".join(f"{name} {result[key]:{form}}, " for name, key, form in measures([result]) if key != "test_loss")
    loss = with_unit(_number(result, "test_loss", ".4f"), result) or "not finite"
    yield f"{measured}test loss {loss}; {staleness}{result['restarts']} restarts"


def _of_best(run_dir):
    """Yields a line about the best checkpoint, if there is one, and the paths of the files for the user."""
    names, best = ["curve.png", "model.keras"], run_dir / "best" / "evaluation.json"
    if best.exists():
        names.append("best/model.keras")
        result = json.loads(best.read_text())
        of_test = [n for n in measures([result]) if n[1].startswith("test_") and n[1] != "test_loss"]
        accuracy = "".join(f"{name.removeprefix('test ')} {result[key]:{form}}, " for name, key, form in of_test)
        yield (
            f"best checkpoint, of step {result['global_step']:,} and validation loss {result['validation_loss']:.4f}: "
            f"test {accuracy}test loss {_number(result, 'test_loss', '.4f')}"
        )
    yield from (run_dir / name for name in names if (run_dir / name).exists())  # a picture may be missing, as reported earlier
