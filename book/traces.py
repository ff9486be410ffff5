"""Makes the traces that the book's player shows: every scheme's own function, on a problem of two parameters, in virtual time.

    python book/traces.py book/_build/static/traces

For each choice that the player offers, `common.simulation.virtual_time` says who does what when, and `common.simulation` runs
the scheme's operations in that order. A trace has the spans of all workers, and where x̃ and the worker's own x are after each
push. The files are scripts, which a page that was opened from a disk may load, with JSON between their first line and their
last.
"""

import functools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "Simulation"))

import numpy as np  # noqa: E402
import simulate  # noqa: E402

from common.cli import notebook  # noqa: E402
from common.core import counted  # noqa: E402
from common.simulation import Costs, VirtualTime  # noqa: E402

WORKERS = [2, 4, 8]
SLOWNESS = [1, 2, 4]  # of the last worker: so many times the others' time for a local step
LATENCY = [0.1, 1]  # of a message one way; a local step takes 1, on average
END = 30.0  # of each trace
STEP_CV = 0.15  # deviation by mean of the time of a step
UNIT = 0.01  # numbers in the traces are multiples of it

RATES = [0.03, 0.1, 0.3]
# Of each scheme: windows, learning rates, the flag that sets these, and further flags. Adagrad's rates are larger.
SCHEMES = {
    "HogWild": ([1, 4], RATES, "learning_rate", []),
    "Dynamic-SGD": ([1], RATES, "learning_rate", []),
    "Semi-Synchronous-SGD": ([1], RATES, "learning_rate", ["--staleness=2"]),
    "Synchronous-SGD": ([1], RATES, "learning_rate", []),
    "DOWNPOUR": ([2, 6], [0.1, 0.3, 1], "learning_rate", []),
    "AEASGD": ([2, 6], RATES, "learning_rate", []),
    "Local-SGD": ([2, 6], RATES, "learning_rate", []),
    "DiLoCo": ([2, 6], RATES, "local_learning_rate", ["--weight_decay=0"]),
}
START = (-2.5, 1.8)  # a and b of a worker that begins


@functools.cache
def points(seed=0):
    """800 points of two kinds, -1 around x = 0 and 1 around x = 1, of deviation 0.3, and 200 to test."""
    rng = np.random.default_rng(seed)
    kind = rng.choice([-1, 1], [1000, 1])
    x, y = ((1 + kind) / 2 + rng.normal(0, 0.3, kind.shape)).astype(np.float32), kind.astype(np.float32)
    return (x[200:], y[200:]), (x[:200], y[:200])


def two_parameters():
    """The model y = ax + b, which begins at `START`; the sign of y is the kind, the loss is the squared error."""
    import keras

    start = [keras.initializers.Constant(value) for value in START]
    return keras.Sequential([keras.Input([1]), keras.layers.Dense(1, kernel_initializer=start[0], bias_initializer=start[1])])


def correct(a, b):
    """Returns how many of the points to test have the right sign."""
    _, (x, y) = points()
    return int(np.sum(np.sign(a * x + b) == y))


def valley():
    """Returns the loss over all samples: its matrix `[2, 2]` of second derivatives, where it is least, and its value there."""
    (x, y), _ = points()
    columns = np.concatenate([x, np.ones_like(x)], axis=1).astype(float)
    least, *_ = np.linalg.lstsq(columns, y[:, 0], rcond=None)
    return 2 * columns.T @ columns / len(x), least, float(np.mean((columns @ least - y[:, 0]) ** 2))


def engines(name, workers):
    """Yields of each window and learning rate their numbers, the window, and the `common.simulation.Engine`."""
    from common.data import datasets
    from common.models import keras_model
    from common.simulation import Engine, shards_of

    windows, rates, rate_flag, flags = SCHEMES[name]
    dataset, model = datasets.checked(points(), "points"), None
    for i, window in enumerate(windows):
        for k, rate in enumerate(rates):
            given = [f"--num_workers={workers}", f"--{rate_flag}={rate}", "--batch_size=8", *flags]
            given += [f"--window={window}"] if len(windows) > 1 else []
            scheme, settings = simulate.parse([name, *given])
            model = model or keras_model.build(f"{__file__}:two_parameters", dataset, 0, None)
            shards = shards_of(dataset, workers, settings.batch_size, 0)
            virtual = Engine(scheme.function, settings, model, shards, optimize=False)
            yield i, k, window, virtual
            virtual.close()


def trace(engine, workers, window, slowness, latency):
    """Returns what happens until `END`, numbers as multiples of `UNIT`.

    Returns:
      {"spans": [[worker, number of the part in `PARTS`, start, end], ...] in the order of their start, "pushes": [[time,
      worker, staleness, global step, correct, x̃, x̃, x, x], ...]}; staleness is -1 of what was thrown away.
    """
    engine.restart()
    delay = np.zeros(workers)
    delay[-1] = (slowness - 1) * window
    costs = Costs(step=1.0, step_cv=STEP_CV, delay=delay, latency=latency)
    clock = VirtualTime(engine.actions, workers, costs, engine.waiting, seed=0, spans_until=END)
    schedule = clock.run(until=END)
    pushes, start, counted = [], 0, 0
    for i in np.flatnonzero([engine.actions[k].writes for k in schedule.steps]):
        engine.run(schedule.steps[start : i + 1], schedule.workers[start : i + 1])
        start, worker = i + 1, int(schedule.workers[i])
        made = int(schedule.updated[i] - schedule.pulled[i])
        counted += made > 0
        step = counted // (engine.waiting.quorum or 1)
        center = engine.center
        where = _units(*center, *engine.replicas[worker])
        pushes.append([*_units(schedule.times[i]), worker, made - 1, step, correct(*center), *where])
    spans = [(s.start, s.worker, s.part, min(s.end, END)) for s in clock.spans]
    for worker in range(workers):  # who waits still
        last = max((end for _, of, _, end in spans if of == worker), default=0.0)
        spans += [(last, worker, "wait", END)] if last < END else []
    spans.sort()
    return {
        "spans": [[worker, PARTS.index(part), *_units(begin, end)] for begin, worker, part, end in spans],
        "pushes": pushes,
    }


PARTS = ["train", "push", "pull", "wait"]


def _units(*values):
    """Whole numbers of `UNIT`, at most a hundred: what diverges is far from any picture."""
    near = np.clip(np.nan_to_num(np.asarray(values, float), nan=100.0), -100, 100)
    return np.rint(near / UNIT).astype(int).tolist()


def make(target, name, workers):
    """Writes the traces of one scheme and number of workers, {"window rate slowness latency": trace}, keys of indices."""
    made = {}
    for i, k, window, engine in engines(name, workers):
        for m, slowness in enumerate(SLOWNESS):
            for n, latency in enumerate(LATENCY):
                made[f"{i} {k} {m} {n}"] = trace(engine, workers, window, slowness, latency)
    _write(target / f"{name}-{workers}.js", {"name": f"{name}-{workers}", "traces": made}, "player.receive")


def index():
    """Returns what the player has to know about all traces."""
    matrix, least, floor = valley()
    schemes = []
    for name, (windows, rates, *_) in SCHEMES.items():
        rule = " ".join(simulate.parse([name])[0].function.__doc__.split("\n\n")[0].split())
        schemes.append({"name": name, "rule": rule, "windows": windows, "rates": rates})
    problem = {"matrix": matrix.tolist(), "least": least.tolist(), "floor": floor, "start": START}
    problem |= {"tests": len(points()[1][0]), "correct": correct(*START)}
    choices = {"workers": WORKERS, "slowness": SLOWNESS, "latency": LATENCY}
    return {"schemes": schemes, "choices": choices, "problem": problem, "end": END, "unit": UNIT}


def _write(path, value, call):
    path.write_text(f"{call}(\n{json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n)\n")


def main():
    notebook.quiet()
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    _write(target / "index.js", index(), "player.begin")
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), notebook.quiet) as pool:
        jobs = [pool.submit(make, target, name, workers) for name in SCHEMES for workers in reversed(WORKERS)]
        for job in counted(jobs, "traces for the book"):
            job.result()


if __name__ == "__main__":
    main()
