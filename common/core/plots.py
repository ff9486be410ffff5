"""Curves of a run's metrics, and plots shared by several notebooks."""

import contextlib
import os
from pathlib import Path

import numpy as np

from common.core import progress
from common.core.task_status import tell_and_log

_PANELS = 3.5  # inches of the panels with their titles and ticks; the rows of the legend are above


def read_metrics(run_dir):
    """Returns the undamaged lines of all workers' and the evaluator's metrics, oldest first."""
    return progress.read_metrics(run_dir)[0]


def draw_curve(run_dir):
    """As `curve`, but a failure is only a warning, as a missing picture should not cost the result."""
    try:
        curve(run_dir)
    except Exception as error:  # any error of matplotlib: its settings, fonts, a full disk
        with contextlib.suppress(OSError):
            Path(run_dir, "curve.png").unlink(missing_ok=True)  # an outdated one of the resumed run
        why = " ".join(str(error).split()) or "no reason given"
        what = f"no picture: {Path(run_dir, 'curve.png')} could not be drawn"
        tell_and_log(f"{what}: {type(error).__name__}: {why[:200]}")


def curve(run_dir):
    """Draws training loss, test accuracy and samples per second over time to `curve.png` in the run's folder.

    A vertical line in the worker's color marks the time when it joined the running training (dashed) or left it (dotted).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    figure = Figure()
    if not draw(figure, run_dir):
        return
    _set_margins(figure)
    unfinished = Path(run_dir, f"curve.unfinished-{os.getpid()}.png")  # chief and evaluator may draw at the same time
    try:
        FigureCanvasAgg(figure).print_png(unfinished)
        unfinished.replace(Path(run_dir, "curve.png"))
    finally:
        unfinished.unlink(missing_ok=True)


def _set_margins(figure):
    """Leaves room for ticks, titles and the legend, in inches; a constrained layout takes 0.2 s longer."""
    panels, (width, height) = len(figure.axes), figure.get_size_inches()
    left, right, bottom, top, between = 0.65, 0.15, 0.5, height - _PANELS + 0.35, 0.65
    panel = (width - left - right - between * (panels - 1)) / panels
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height, between / panel)


def draw(figure, run_dir):
    """Draws the same into a figure of Matplotlib; returns whether there is anything to draw.

    The training loss of a line without a speed, see `common.training.MetricsHook.flush`, is left out: it is a mean over few
    batches, unlike the others. It is drawn for a worker that has no other lines.
    """
    lines = read_metrics(run_dir)
    have_speed = {line["worker"] for line in lines if line.get("samples_per_second") is not None}
    for line in lines:
        if line["worker"] in have_speed and line.get("samples_per_second") is None:
            line.pop("loss", None)
    if not lines:
        return False
    began = lines[0]["time"]
    measured = progress.measures(lines) or [("test loss", "test_loss", "")]
    if any(key.startswith("validation_") for _, key, _ in measured):
        measured = [found for found in measured if found[1].startswith("validation_")]
    # A metric such as accuracy is easier to interpret than its loss.
    measured = [found for found in measured if not found[1].endswith("_loss")] or measured
    evaluations = [(name, key) for name, key, _ in measured]
    panels = [("training loss", "loss"), *evaluations, ("samples per second", "samples_per_second")]
    workers = sorted({line["worker"] for line in lines}, key=lambda worker: (isinstance(worker, str), worker))
    steps = {"came": ("comes", "--"), "left": ("leaves", ":")}
    moves = [(workers.index(n["worker"]), n["time"] - began, *steps[step]) for n in lines for step in steps if n.get(step)]
    for axes, (title, key) in zip(figure.subplots(1, len(panels), sharex=True), panels, strict=True):
        for number, worker in enumerate(workers):
            points = [(n["time"] - began, n[key]) for n in lines if n["worker"] == worker and n.get(key) is not None]
            if points:
                name = worker if isinstance(worker, str) else f"worker {worker}"
                axes.plot(*zip(*points, strict=True), marker=".", color=f"C{number}", label=name)
        for number, moment, what, style in moves:
            axes.axvline(moment, ls=style, lw=1, color=f"C{number}", label=f"worker {workers[number]} {what}")
        axes.set(title=title, xlabel="seconds")
        axes.grid(alpha=0.3)
        values = [n[key] for n in lines if n.get(key) is not None]
        if ("loss" in key or "perplexity" in key) and all(value > 0 for value in values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            if max(values, default=1) < 10 * min(values, default=1):  # else there are too many minor ticks to label
                axes.yaxis.set_minor_formatter("{x:g}")
        elif key == "samples_per_second":
            axes.set_ylim(bottom=0)
    # One legend above the panels, so that it covers no curve; a worker has the same color in each panel.
    named = {name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = 2 * len(panels)
    figure.set_size_inches(4 * len(panels), _PANELS + 0.25 * -(-len(named) // columns))
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=columns)
    return True


def squared_error_contours(axes, x, y, slopes, intercepts):
    """Draws lines of equal mean squared error of `slope * x + intercept` over the plane of slope and intercept.

    Args:
      axes: matplotlib's.
      x, y: the samples, arrays [n, 1].
      slopes, intercepts: (low, high), the visible part of the plane.
    """
    slope, intercept = np.meshgrid(np.linspace(slopes[0], slopes[1], 100), np.linspace(intercepts[0], intercepts[1], 100))
    errors = np.mean((slope[..., None] * x[:, 0] + intercept[..., None] - y[:, 0]) ** 2, axis=-1)
    levels = np.geomspace(errors.min() + 0.01, errors.max(), 12)
    axes.contour(slope, intercept, errors, levels=levels, colors="lightgray", zorder=0)
    axes.set(xlabel="slope", ylabel="intercept", xlim=slopes, ylim=intercepts)


def spread(axes, x, runs, **style):
    """Draws runs of the same experiment that differ by their seeds: the median as a line, the range as a band.

    Args:
      axes: matplotlib's.
      x: numbers [points].
      runs: numbers [runs, points].
      style: of the line, such as `color` and `label`.
    """
    (line,) = axes.plot(x, np.median(runs, axis=0), **style)
    axes.fill_between(x, np.min(runs, axis=0), np.max(runs, axis=0), color=line.get_color(), alpha=0.2, lw=0)


def median_and_range(values, form=".3f"):
    """Returns numbers [runs] as a text, `0.978 (0.972 to 0.981)`; `form` is the format of each number."""
    return f"{np.median(values):{form}} ({np.min(values):{form}} to {np.max(values):{form}})"
