"""The pictures of this comparison, from `comparison.json`: functions that draw into a figure of Matplotlib, and `draw_all`."""

import math
import statistics

import figures
import numpy as np

SHOWN_STEPS = 20  # of the timelines
STEP, SLOWNESS, LATENCY = 0.01, (1.0, 1.3, 2.0), 0.006  # of the timelines, in seconds, and how much longer workers take


def draw_all(report, folder):
    """Draws all pictures into a folder; returns their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = []
    for draw, size in SIZES.items():
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, report)
        paths.append(folder / f"{draw.__name__}.png")
        FigureCanvasAgg(figure).print_png(paths[-1])
    return paths


def spans_of(of_row, num_workers, until):
    """Returns the `common.simulation.Activity`s of three unlike workers, for a row measured with `num_workers`.

    Args:
      of_row: of the report.
      num_workers: for how many its waiting is; as many as there did need not be waited for.
      until: when to end, in seconds.
    """
    from common.simulation import Action, Costs, VirtualTime, Waiting

    quorum = of_row["waiting"]["quorum"]
    waiting = Waiting(**{**of_row["waiting"], "quorum": quorum and quorum - num_workers + len(SLOWNESS)})
    actions = [Action(**{**action, "up": 0, "down": 0}) for action in of_row["actions"]]
    costs = Costs(step=STEP * np.array(SLOWNESS), latency=LATENCY)
    clock = VirtualTime(actions, len(SLOWNESS), costs, waiting, spans_until=until)
    clock.run(until=5 * until)  # so that what begins before has an end, too
    return clock.spans


def timelines(figure, report):
    """Draws what three workers of each scheme do for as long as the fastest could make twenty steps."""
    from common.simulation import COLORS

    until, rows = SHOWN_STEPS * STEP, report["rows"]
    lanes = {
        "train": (-0.4, 0.45, "train"),
        "push": (0.07, 0.15, "push"),
        "pull": (0.24, 0.15, "pull"),
        "wait": (-0.4, 0.45, "wait"),
    }
    figure.get_layout_engine().set(w_pad=0.12)  # a phone shows the panels below each other: the book cuts them apart
    grid = list(figure.subplots(-(-len(rows) // 3), 3, sharex=True, sharey=True, squeeze=False).flat)
    for axes, (name, of_row) in zip(grid, rows.items(), strict=False):
        spans = spans_of(of_row, report["workers"], until)
        for part, (low, height, key) in lanes.items():
            for worker in range(len(SLOWNESS)):
                bars = [(s.start, s.end - s.start) for s in spans if (s.worker, s.part) == (worker, part)]
                axes.broken_barh(bars, (worker + low, height), color=COLORS[key], ec="white", lw=0.3)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set(xlim=(0, until), ylim=(len(SLOWNESS) - 0.5, -0.6), yticks=[], xticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
    for axes in grid[len(rows) :]:
        axes.set_visible(False)
    names = {"train": "local steps", "push": "to the ps", "pull": "from the ps", "wait": "waits for others"}
    handles = [figure_patch(COLORS[part]) for part in names]
    figure.legend(handles, names.values(), loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel(f"time of {SHOWN_STEPS} local steps of the fastest of three workers; the slowest takes twice as long")


def figure_patch(color):
    """Returns a handle of a legend."""
    from matplotlib.patches import Patch

    return Patch(color=color)


def label(axis):
    """Gives a logarithmic axis numbers that do not collide: 1, 2, 3, 5, 10 and so on."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def dots(figure, report):
    """Draws what each row needed until the target, with equal workers and fast links: median and range."""
    names = list(report["rows"])
    for axes, what in zip(figure.subplots(1, 3, sharey=True), figures.UNITS, strict=True):
        all_seconds = [figures.values(report, name, "all equal", what) for name in names]
        finite = [figures.SCALE[what] * v for row in all_seconds for v in row if math.isfinite(v)] or [1.0]
        edge = 1.6 * max(finite)
        for place, numbers in enumerate(all_seconds):
            scaled = [figures.SCALE[what] * v for v in numbers]
            middle, low, high = statistics.median(scaled), min(scaled), max(scaled)
            if math.isfinite(low):
                axes.plot([low, min(high, edge)], [place, place], color="tab:blue", lw=2, alpha=0.5)
            if math.isinf(high):
                axes.plot(edge, place, marker=">", color="tab:red", clip_on=False)
            if math.isfinite(middle):
                axes.plot(middle, place, "o", color="tab:blue")
        axes.set(xscale="log", xlim=(0.7 * min(finite), edge), xlabel=figures.UNITS[what])
        axes.set(yticks=range(len(names)), ylim=(len(names) - 0.5, -0.5))
        label(axes.xaxis)
        axes.grid(alpha=0.3, axis="x")
    figure.axes[0].set_yticklabels(names)
    figure.suptitle("dot: median of the seeds, line: their range; red arrow: some seeds never reached the target", fontsize=10)


def heat(figure, report):
    """Draws a map of rows and conditions: how many times as long as the fastest of each condition; the numbers are seconds."""
    names, conditions = list(report["rows"]), list(report["conditions"])
    table = np.array([[statistics.median(figures.values(report, name, c)) for c in conditions] for name in names])
    fastest = table.min(axis=0)
    ratio = np.where(np.isfinite(table), table / np.where(np.isfinite(fastest), fastest, 1.0), np.nan)
    axes = figure.subplots()
    axes.set_facecolor("0.85")
    shown = axes.imshow(np.log2(ratio), cmap="Oranges", vmin=0, vmax=4, aspect="auto")
    for (row, column), value in np.ndenumerate(table):
        colour = "white" if ratio[row, column] > 7 else "black"
        axes.text(column, row, figures.three(value), ha="center", va="center", fontsize=9, color=colour)
    axes.set(xticks=range(len(conditions)), yticks=range(len(names)))
    axes.set_xticklabels([name.replace(" ", "\n") for name in conditions])
    axes.set_yticklabels(names)
    axes.xaxis.tick_top()
    bar = figure.colorbar(shown, ax=axes, ticks=range(5), shrink=0.6, label="time relative to the fastest of the column")
    bar.ax.set_yticklabels(["1", "2", "4", "8", "16 or more"])
    axes.set_title("virtual seconds until the target, medians", pad=40, fontsize=11)


def pareto(figure, report):
    """Draws bytes against samples until the target; a line joins the rows that no other row beats in both."""
    axes = figure.subplots()
    points = {}
    for name in report["rows"]:
        x, y = (
            figures.SCALE[what] * statistics.median(figures.values(report, name, "all equal", what))
            for what in ("samples", "megabytes")
        )
        if math.isfinite(x):
            points[name] = x, y
    front = sorted(points[name] for name in front_of(points))
    axes.plot(*zip(*front, strict=True), color="tab:orange", lw=1.5, zorder=1)
    for x, y in points.values():
        axes.plot(x, y, "o", color="tab:orange" if (x, y) in front else "tab:blue")
    for names in close_ones(points):
        is_crowd = len(names) > 2  # there is room on its left
        at = sorted(points[name] for name in names)[0 if is_crowd else -1]
        side = {"xytext": (-6, 0), "ha": "right"} if is_crowd else {"xytext": (6, 0)}
        axes.annotate("\n".join(names), at, textcoords="offset points", fontsize=8, va="center", **side)
    axes.set(xscale="log", yscale="log", xlabel=figures.UNITS["samples"], ylabel=figures.UNITS["megabytes"])
    for axis in axes.xaxis, axes.yaxis:
        label(axis)
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)
    missing = [name for name in report["rows"] if name not in points]
    text = f"; target not reached: {', '.join(missing)}" if missing else ""
    axes.set_title(f"all equal, medians; orange: Pareto front{text}", fontsize=10)


def front_of(points):
    """Returns the names of those of {name: (x, y)} that no other one beats in one of both without being worse in the other."""

    def beats(one, other):
        return one != other and one[0] <= other[0] and one[1] <= other[1]

    return [name for name, point in points.items() if not any(beats(other, point) for other in points.values())]


def close_ones(points, share=1.16):
    """Returns lists of names of {name: (x, y)}: those that lie so close to the first of the list that one label is for all."""
    groups: list[list[str]] = []
    for name, point in points.items():
        near = lambda other, point=point: all(1 / share < a / b < share for a, b in zip(point, points[other], strict=True))  # noqa: E731
        group = next((group for group in groups if near(group[0])), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return groups


SIZES = {timelines: (12, 11), dots: (12, 7), heat: (9, 8.5), pareto: (10, 7)}
