"""How the cost grows with workers, ps tasks, window and model: `bash benchmarks/scaling.sh`.

Samples per second are those of whole runs, in turn, medians of the rounds. Pull, push and rounds for models of 10^4 to 10^8
parameters are timed one by one, with one ps and one worker and nothing else running; in turn with them, as many bytes through
a plain TCP connection on the loopback interface.

A cost model is fitted to the rounds:

    time of a round = latency + bytes / bandwidth + window × compute

with one latency and one bandwidth for all models, and a compute for each; a third of the points is left out, and predicted.
Writes `scaling.json` and `scaling.png` beside this file.
"""

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import time
import types
from pathlib import Path

import compare
import numpy as np

from common.cluster import TaskSpecDef, serve
from common.data import Batches, datasets
from common.launch import launcher, sandbox
from common.models import keras_model

HERE = Path(__file__).resolve().parent
FLAGS = ["--data=digits", "--model=mlp", "--batch_size=32", "--epochs=1000000", "--seconds=4"]
AXES = {
    # The more workers, the longer it takes until the last one has started, from which on samples are counted.
    "workers": {n: f"HogWild/hogwild.py --num_workers={n} --seconds={2 + 2 * n}" for n in (1, 2, 4, 8)},
    "workers, window 10": {n: f"AGN/agn.py --window=10 --num_workers={n} --seconds={2 + 2 * n}" for n in (1, 2, 4, 8)},
    "ps tasks": {n: f"HogWild/hogwild.py --num_ps={n}" for n in (1, 2, 4)},
    "window": {n: f"AGN/agn.py --window={n}" for n in (1, 4, 16, 64, 256)},
}
SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 50_000_000, 100_000_000)
WINDOWS = (1, 2, 4, 8, 16)
LEFT_OUT = (2, 8)  # windows that the model is not fitted to


def main():
    """Measures all, and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each cluster (default: 3)")
    parser.add_argument("--largest", type=float, default=1e8, help="parameters of the largest model (default: 1e8)")
    options = parser.parse_args()
    if options.rounds < 0 or options.largest < SIZES[0]:
        parser.error(f"--rounds must be at least 0, and --largest at least {SIZES[0]}")
    os.chdir(HERE.parent)
    names = {f"{axis}={n}": script for axis, points in AXES.items() for n, script in points.items()}
    say = lambda name, result: print(f"{name}: {result['samples_per_second']:,.0f} samples/s", flush=True)  # noqa: E731
    results = compare.in_turn(names, FLAGS, options.rounds, say)
    axes = {
        axis: {n: round(statistics.median(r["samples_per_second"] for r in results[f"{axis}={n}"])) for n in points}
        for axis, points in AXES.items()
        if options.rounds
    }
    sizes = []
    for size in SIZES:
        if size <= options.largest:
            os.environ.update(launcher.environment(1))  # of the processes to come
            context = multiprocessing.get_context("spawn")  # each in processes of its own, with all memory to itself
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=measure, args=(size, sender, os.getpid()))
            process.start()
            sender.close()
            try:
                sizes.append(receiver.recv())
            except EOFError:
                sys.exit(f"the measurement with {size:,} parameters failed")
            process.join()
            print(json.dumps(sizes[-1]), flush=True)
    report = {"command": "bash benchmarks/scaling.sh", "cores": os.cpu_count(), "rounds": options.rounds}
    report |= {"samples_per_second": axes, "models": sizes, "cost": fit(sizes)}
    (HERE / "scaling.json").write_text(json.dumps(report, indent=2) + "\n")
    chart(report, HERE / "scaling.png")
    print(f"\n{table(report)}\n\n{cost_table(report)}")


def measure(size, sender, launcher):
    """Sends what it measures of a model of about so many parameters: seconds and bytes per second."""
    sandbox.die_with_parent(launcher)
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3")  # read when tensorflow is imported
    with launcher.reserved_port() as one, launcher.reserved_port() as other:
        hosts = [[f"127.0.0.1:{port.getsockname()[1]}"] for port in (one, other)]
        ps = multiprocessing.get_context("spawn").Process(target=run_ps, args=(*hosts, os.getpid()), daemon=True)
        ps.start()
        sender.send(measure_as_worker(size, *hosts))
        ps.kill()


def run_ps(ps_hosts, worker_hosts, launcher):
    """The ps, until it is killed."""
    sandbox.die_with_parent(launcher)
    task = TaskSpecDef("ps", 0, None, ps_hosts, worker_hosts)
    serve(task, task.start_server())


def measure_as_worker(size, ps_hosts, worker_hosts):
    """Returns what `measure` sends."""
    import keras

    sys.path.insert(0, str(HERE.parent / "AGN"))
    from agn import agn

    from common import tf
    from common.scheme import GlobalParameters, LocalParameters, build_rounds

    task = TaskSpecDef("worker", 0, None, ps_hosts, worker_hosts)
    server, digits = task.create_server(), datasets.load("digits")
    width = round((math.sqrt(76**2 + 4 * size) - 76) / 2)  # width² + 76 width parameters, and 10
    layers = [keras.layers.Flatten(), *(keras.layers.Dense(width, activation="relu") for _ in range(2)), keras.layers.Dense(10)]
    model = keras_model.by_labels(keras.Sequential([keras.Input((8, 8, 1)), *layers]), True)
    with tf.Graph().as_default():
        center = GlobalParameters(model.initial_parameters, 1, task.device_fn())
        with tf.device(task.device):
            local = LocalParameters(center, model, Batches(digits.x_train, digits.y_train, 32, 0))
            pull = local.pull(center).operations
            push = center.push(tf.train.GradientDescentOptimizer(1e-6), local.gradient).operations
            steps: dict[str, list] = {"pull": pull, "push": push}
            for window in WINDOWS:
                hp = types.SimpleNamespace(window=window, learning_rate=1e-6, local_learning_rate=None, local_optimizer="sgd")
                steps[str(window)] = build_rounds(agn, center, local, hp).operations
        session = tf.Session(server.target, config=task.config())
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        session.run(tf.local_variables_initializer(), local.init_feed_dict)
        measured: dict[str, list[float]] = {}
        with tcp_connection() as exchange:
            for repetition in range(4):  # in turn; the first one prepares the graphs
                for name, operations in steps.items():
                    seconds = seconds_a_call(lambda operations=operations: session.run(operations))
                    measured.setdefault(name, []).extend([seconds] * (repetition > 0))
                seconds = seconds_a_call(lambda: exchange(4 * model.size))
                measured.setdefault("tcp", []).extend([seconds] * (repetition > 0))
    medians = {name: statistics.median(seconds) for name, seconds in measured.items()}
    bandwidths = {name: 4 * model.size / medians[name] for name in ("pull", "push", "tcp")}
    both = 8 * model.size / (medians["pull"] + medians["push"])
    return {
        "parameters": model.size,
        "bytes_per_second": {name: round(value) for name, value in bandwidths.items()} | {"pull and push": round(both)},
        "seconds_of_a_round": {str(window): medians[str(window)] for window in WINDOWS},
    }


def seconds_a_call(call, at_least=0.4):
    """Returns the mean time of a call, over as many as take that many seconds, one at least."""
    calls, began = 0, time.perf_counter()
    while calls == 0 or time.perf_counter() - began < at_least:
        call()
        calls += 1
    return (time.perf_counter() - began) / calls


class tcp_connection:
    """A context: a function that sends so many bytes to another process through a TCP connection and waits for its answer."""

    def __enter__(self):
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=receive, args=(port, os.getpid()), daemon=True)
        self._process.start()
        self._socket, _ = listener.accept()
        listener.close()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(0))
        return self._exchange

    def _exchange(self, size):
        if len(self._buffer) != size:
            self._buffer = memoryview(bytearray(os.urandom(1) * size))
        self._socket.sendall(size.to_bytes(8, "big"))
        self._socket.sendall(self._buffer)
        if self._socket.recv(1) != b"k":
            raise ConnectionError("the receiver has ended")

    def __exit__(self, *_):
        self._socket.close()
        self._process.join()


def receive(port, launcher):
    """The other side: receives into memory that it has, and answers."""
    sandbox.die_with_parent(launcher)
    buffer = memoryview(bytearray(0))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while True:
            head = connection.recv(8, socket.MSG_WAITALL)
            if len(head) < 8:
                return
            size, got = int.from_bytes(head, "big"), 0
            if len(buffer) != size:
                buffer = memoryview(bytearray(size))
            while got < size:
                got += connection.recv_into(buffer[got:])
            connection.sendall(b"k")


def fit(sizes):
    """Returns the cost model, fitted by least squares of the relative errors, and its errors on all points."""
    points = [(i, of_one, window) for i, of_one in enumerate(sizes) for window in WINDOWS]
    rows = np.zeros([len(points), 2 + len(sizes)])
    for row, (i, of_one, window) in zip(rows, points, strict=True):
        row[0], row[1], row[2 + i] = 1, 8 * of_one["parameters"], window
    times = np.array([of_one["seconds_of_a_round"][str(window)] for _, of_one, window in points])
    is_fitted = np.array([window not in LEFT_OUT for _, _, window in points])
    scaled = rows / times[:, None]
    solution = np.linalg.lstsq(scaled[is_fitted], np.ones(is_fitted.sum()), rcond=None)[0]
    errors = scaled @ solution - 1
    return {
        "latency_seconds": solution[0],
        "bytes_per_second": 1 / solution[1],
        "compute_seconds": {str(of_one["parameters"]): seconds for of_one, seconds in zip(sizes, solution[2:], strict=True)},
        "points": [
            {
                "parameters": of_one["parameters"],
                "window": window,
                "seconds": seconds,
                "error": round(float(error), 4),
                "left_out": window in LEFT_OUT,
            }
            for (_, of_one, window), seconds, error in zip(points, times, errors, strict=True)
        ],
    }


def table(report):
    """Returns pull and push beside plain TCP as a Markdown table."""
    lines = ["| parameters | pull, GB/s | push, GB/s | plain TCP, GB/s | pull and push, of TCP |", "|---:|---:|---:|---:|---:|"]
    for of_one in report["models"]:
        speeds = of_one["bytes_per_second"]
        figures = [f"{speeds[name] / 1e9:.2f}" for name in ("pull", "push", "tcp")]
        share = speeds["pull and push"] / speeds["tcp"]
        lines.append(f"| {of_one['parameters']:,} | {' | '.join(figures)} | {share:.0%} |")
    return "\n".join(lines)


def cost_table(report):
    """Returns the errors of the cost model as a Markdown table."""
    cost = report["cost"]
    lines = [
        f"latency {1e3 * cost['latency_seconds']:.2f} ms, bandwidth {cost['bytes_per_second'] / 1e9:.2f} GB/s",
        "",
        "| parameters | compute of a step, ms | largest error of the fit | largest error of the points left out |",
        "|---:|---:|---:|---:|",
    ]
    for size, seconds in cost["compute_seconds"].items():
        errors = {
            left_out: max(abs(p["error"]) for p in cost["points"] if p["parameters"] == int(size) and p["left_out"] == left_out)
            for left_out in (False, True)
        }
        lines.append(f"| {int(size):,} | {1e3 * seconds:.3g} | {errors[False]:.0%} | {errors[True]:.0%} |")
    return "\n".join(lines)


def chart(report, path):
    """Draws samples per second along each axis, the bandwidths, and the cost model beside what was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5), layout="constrained")
    panels = figure.subplots(2, 3).ravel()
    shown = {"workers": ["workers", "workers, window 10"], "ps tasks": ["ps tasks"], "window": ["window"]}
    for axes, (title, names) in zip(panels, shown.items(), strict=False):
        for name in names:
            points = report["samples_per_second"].get(name, {})
            label = name.partition(", ")[2] or "window 1"
            axes.plot([int(n) for n in points], list(points.values()), marker="o", label=label if len(names) > 1 else None)
        axes.set(xlabel=title, ylabel="samples per second", ylim=(0, None))
        if report["samples_per_second"]:
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if len(names) > 1:
            axes.legend()
    sizes = [of_one["parameters"] for of_one in report["models"]]
    for name in ("tcp", "pull", "push"):
        speeds = [of_one["bytes_per_second"][name] / 1e9 for of_one in report["models"]]
        panels[3].plot(sizes, speeds, marker="o", label={"tcp": "plain TCP"}.get(name, name))
    panels[3].set(xlabel="parameters", ylabel="GB/s", xscale="log", ylim=(0, None))
    panels[3].legend()
    for window in WINDOWS:
        points = [point for point in report["cost"]["points"] if point["window"] == window]
        style = {"marker": "x" if window in LEFT_OUT else "o", "label": f"window {window}{', left out' * (window in LEFT_OUT)}"}
        measured = panels[4].plot(sizes, [point["seconds"] for point in points], linestyle="", **style)[0]
        predicted = [point["seconds"] * (1 + point["error"]) for point in points]
        panels[4].plot(sizes, predicted, color=measured.get_color(), linewidth=0.8)
    panels[4].set(xlabel="parameters", ylabel="seconds of a round; lines: the cost model", xscale="log", yscale="log")
    panels[4].legend(fontsize=8)
    for left_out in (False, True):
        points = [point for point in report["cost"]["points"] if point["left_out"] == left_out]
        xy = [point["parameters"] for point in points], [100 * point["error"] for point in points]
        panels[5].plot(*xy, "x" if left_out else "o", label="left out" if left_out else "fitted")
    panels[5].set(xlabel="parameters", ylabel="error of the cost model, %", xscale="log")
    panels[5].axhspan(-20, 20, color="0.93", zorder=0)
    panels[5].legend()
    for axes in panels:
        axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    compare.interruptible(main)
