"""common/plots.py: what several notebooks draw. tests/test_cluster_runs.py has the curves of a run."""

import numpy as np
from matplotlib.figure import Figure

from common import plots


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
