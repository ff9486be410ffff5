"""common/core/plots.py: what several notebooks draw. tests/test_clusters.py has the curves of a run."""

import json

import numpy as np
from matplotlib.figure import Figure

from common.core import plots


def test_spread_draws_the_median_and_the_range():
    axes = Figure().subplots()
    plots.spread(axes, [1, 2], [[0, 10], [4, 30], [1, 20]], color="tab:red", label="three runs")
    (line,), (band,) = axes.lines, axes.collections
    assert line.get_label() == "three runs" and np.array_equal(line.get_ydata(), [1, 20])
    corners = np.unique(np.asarray(band.get_paths()[0].vertices), axis=0)
    assert corners.tolist() == [[1, 0], [1, 4], [2, 10], [2, 30]]
    assert np.allclose(np.asarray(band.get_facecolor())[0, :3], np.array([214, 39, 40]) / 255)


def test_median_and_range_as_text():
    assert plots.median_and_range([0.978, 0.972, 0.981]) == "0.978 (0.972 to 0.981)"
    assert plots.median_and_range([9, 1000, 2000], ",.0f") == "1,000 (9 to 2,000)"


def _drawn(run_dir, lines):
    """Returns the figure of a run with these lines of metrics."""
    metrics = run_dir / "metrics"
    metrics.mkdir()
    for worker in {line["worker"] for line in lines}:
        name = worker if worker == "evaluator" else f"worker-{worker}"
        of_worker = [json.dumps({"last_step": 9, **line}) + "\n" for line in lines if line["worker"] == worker]
        (metrics / f"{name}.jsonl").write_text("".join(of_worker))
    figure = Figure(layout="constrained")
    assert plots.draw(figure, run_dir)
    return figure


def test_the_loss_of_the_last_batches_is_not_drawn_beside_means_of_many(tmp_path):
    lines = [
        {"worker": 0, "time": 1, "global_step": 4, "loss": 2.0, "samples_per_second": 100.0},
        {"worker": 1, "time": 1, "global_step": 5, "loss": 1.5},  # all that there is of this worker
        {"worker": 0, "time": 2, "global_step": 8, "loss": 1.0, "samples_per_second": 100.0},
        {"worker": 0, "time": 3, "global_step": 9, "loss": 0.1},
    ]
    loss = _drawn(tmp_path, lines).axes[0]
    assert [line.get_ydata().tolist() for line in loss.lines] == [[2.0, 1.0], [1.5]]


def test_lines_show_when_workers_came_and_left(tmp_path):
    lines = [
        *({"worker": i, "time": 1 + i, "global_step": 4, "loss": 2.0, "samples_per_second": 100.0} for i in range(2)),
        {"worker": 1, "time": 1.5, "global_step": 3, "came": True},
        {"worker": 1, "time": 5, "global_step": 9, "left": True},
    ]
    figure = _drawn(tmp_path, lines)
    for axes in figure.axes:
        upright = [line for line in axes.lines if len(set(line.get_xdata())) == 1 and len(line.get_xdata()) == 2]
        assert [(line.get_xdata(), line.get_linestyle(), line.get_color()) for line in upright] == [
            ([0.5, 0.5], "--", "C1"),
            ([4, 4], ":", "C1"),
        ]
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(named) == ["worker 0", "worker 1", "worker 1 comes", "worker 1 leaves"]


def test_one_legend_covers_no_curve_and_names_each_color(tmp_path):
    lines = [
        *({"worker": i, "time": 1 + i, "global_step": 4, "loss": 2.0, "samples_per_second": 100.0} for i in range(20)),
        {"worker": "evaluator", "time": 3, "global_step": 9, "test_loss": 0.1, "test_accuracy": 0.9},
    ]
    figure = _drawn(tmp_path, lines)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-1] == "evaluator" and len(legend.get_texts()) == 21
    figure.draw_without_rendering()
    below = legend.get_window_extent().ymin
    for axes in figure.axes:
        assert axes.get_legend() is None and axes.get_tightbbox().ymax <= below
        assert axes.get_window_extent().height > 150  # pixels
    colors = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert colors == {line.get_label(): line.get_color() for line in figure.axes[-1].lines}
    assert figure.axes[1].lines[0].get_color() not in (colors["worker 0"], colors["worker 1"])
