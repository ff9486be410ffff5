"""Result of a run: `result.json` and `curve.png`, from the reports of all workers, and `model.keras`."""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from common.core import checkpoints_in, limits, plots, run_folder, tell
from common.scheme import PARTS, RoundSize, saved_tables
from common.training.metrics import measured, shares_of_parts

# Fields of a worker's final report to the chief, as float64. Times are in seconds of training, or by one process's clock.
# A scheme's workers add `PARTS`, in seconds of a round; NaN if none was timed.
REPORT = ("index", "first_time", "first_step", "stop_time", "samples", "updates", "staleness_sum", "staleness_max", "dropped")
# Last fields: seconds since the start of the worker's process; time of its departure for good, by its own clock, or 0.
STAY = ("seconds", "left")
REPORT_SIZE = len(REPORT) + len(PARTS) + len(STAY)


def write_result(
    settings,
    task,
    reports,
    global_step,
    evaluated,
    *,
    samples=None,
    dropped=None,
    size=None,
    **more,
):
    """Writes `result.json`, with the entries of `more`, and `curve.png`, from all workers' reports and the last evaluation.

    Args:
      samples, dropped: as of `plan.Outcome`.
      size: the `common.scheme.RoundSize`; None for one batch in each update.
    """
    result = summarize(settings, task, reports, global_step, samples, dropped, size)
    numbers = {name: value if math.isfinite(value) else None for name, value in measured(evaluated).items()}
    result.update(numbers, restarts=0, restarts_of_workers=[], **more)
    result["of_last_start"] = [name for name in OF_LAST_START if name in result]
    run_folder.write_json(Path(settings.run_dir, "result.json"), result)
    plots.draw_curve(settings.run_dir)  # last, as it may fail


# Values of `result.json` that cover only the time since the last start of a run, or of a worker.
OF_LAST_START = (
    *("samples_per_worker", "worker_seconds", "train_seconds", "wall_seconds", "samples_per_second", "parts", "round_seconds"),
    *("staleness_mean", "staleness_max", "left", "restarts", "restarts_of_workers"),
)


def summarize(settings, task, reports, global_step, samples=None, dropped=None, size=None):
    """Returns the part of `result.json` about speed and staleness; arguments as of `write_result`."""
    size = size or RoundSize(batch_size=settings.batch_size)
    columns = dict(zip((*REPORT, *PARTS, *STAY), np.array(reports, float).T, strict=False))
    if size.counted == "updates":
        progress, of_each = global_step, size.samples_per_update
    else:  # in the same unit as the reports
        progress, of_each = samples / size.samples_per_gradient, size.samples_per_gradient
    trained = columns["updates"] > 0
    train_seconds = samples_per_second = staleness = None
    if trained.any():
        # From the second call of the last worker to start: from there on all of them share the work.
        latest = np.argmax(np.where(trained, columns["first_time"], -np.inf))
        updates = progress - columns["first_step"][latest]
        seconds_of_all = float(columns["stop_time"].max() - columns["first_time"][latest])
        if seconds_of_all > 0 and updates > 0:  # otherwise its updates were rolled back and not repeated
            train_seconds = seconds_of_all
            samples_per_second = updates * float(of_each) / train_seconds
        staleness = columns["staleness_sum"].sum() / columns["updates"].sum()
    told = [part for part in PARTS if part in columns]
    seconds = [{part: float(columns[part][i]) for part in told if columns[part][i] > 0} for i in range(len(reports))]
    left: Any = np.flatnonzero(columns["left"]) if "left" in columns else []
    if dropped is None:
        number = int(columns["dropped"].sum())
        dropped = number, number * size.samples_per_gradient
    samples = columns["samples"].sum() if samples is None else samples + dropped[1]
    return {
        "scheme": settings.run.scheme,
        "num_ps": task.num_ps if task else 0,
        "num_workers": len(reports),
        "data": settings.data,
        "batch_size": settings.batch_size,
        "window": settings.window,
        "global_steps": int(global_step),
        "samples": int(samples),
        "samples_per_worker": [int(n) for _, n in sorted(zip(columns["index"], columns["samples"], strict=True))],
        "left": [
            {"worker": int(columns["index"][i]), "time": columns["left"][i]}
            | {name: int(columns[name][i]) for name in ("updates", "samples")}
            for i in left
        ],
        "worker_seconds": float(columns["seconds"].sum()) if "seconds" in columns else None,
        "train_seconds": train_seconds,
        "wall_seconds": time.monotonic() - settings.run.began,
        "samples_per_second": samples_per_second,
        **(shares_of_parts(seconds) if told else {}),
        "staleness_mean": staleness,
        "staleness_max": int(columns["staleness_max"].max()),
        "gradients_dropped": int(dropped[0]),
    }


def save_model(model, final, settings):
    """Writes `model.keras`, with tables from the newest checkpoint; removes it if they don't fit into memory.

    Args:
      model: a `common.models.Model`.
      final: parameters and state.
    """
    path, found = Path(settings.run_dir, "model.keras"), []
    if model.tables and settings.save_tables == "no":
        path.unlink(missing_ok=True)  # a resumed run's file is stale
        return
    if model.tables:
        checkpoint = checkpoints_in(Path(settings.run_dir, "checkpoints"))[-1]
        need, has = 8 * 4 * saved_tables.numbers_in(checkpoint, model.tables), limits.memory()
        if need > has:
            tell(
                f"no model.keras: with its tables it takes {limits.as_bytes(need)} of memory, but the machine has "
                f"{limits.as_bytes(has)}; `common.rows_of` reads rows from the checkpoint"
            )
            path.unlink(missing_ok=True)
            return
        found = [saved_tables.whole(checkpoint, table) for table in model.tables]
    model.save(*final, path, found)
