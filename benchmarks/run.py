"""Every scheme, and what a user would pick instead, on the same problem in one run: `bash benchmarks/run.sh`.

They train in turn, three rounds; the figures are medians. It prints the table of all and that of the targets, and writes
`results.json` and `results.png` beside this file, from which `benchmarks/report.py` makes the tables of the READMEs.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import compare

HERE = Path(__file__).resolve().parent
FLAGS = ["--data=digits", "--model=mlp", "--batch_size=32", "--epochs=1000000"]
SGD = "GradientDescent"

# name: script with its flags, and the optimizers that it is to have used; SGD unless the scheme is about another one.
CONTESTANTS = {
    "the limit: nothing shared": ("benchmarks/limit.py --window=100", SGD),
    "the limit, steps of Adagrad": ("benchmarks/limit.py --script=DOWNPOUR/downpour.py --window=100", "Adagrad"),
    "one process": ("benchmarks/limit.py --num_workers=1", SGD),
    "plain TensorFlow, asynchronous": ("benchmarks/plain_tensorflow.py", SGD),
    "plain TensorFlow, SyncReplicasOptimizer": ("Synchronous-SGD/sync_replicas_optimizer.py", SGD),
    "ParameterServerStrategy": ("benchmarks/parameter_server_strategy.py", SGD),
    "ParameterServerStrategy, 10 steps per call": ("benchmarks/parameter_server_strategy.py --steps_per_call=10", SGD),
    "MultiWorkerMirroredStrategy": ("benchmarks/multi_worker_mirrored.py --steps_per_call=1", SGD),
    "MultiWorkerMirroredStrategy, 50 steps per call": ("benchmarks/multi_worker_mirrored.py", SGD),
    "PyTorch DDP": ("benchmarks/pytorch_ddp.py", SGD),
    "HogWild": ("HogWild/hogwild.py", SGD),
    "DC-ASGD": ("DC-ASGD/dc_asgd.py", SGD),
    "Dynamic-SGD, window 10": ("Dynamic-SGD/dynamic_sgd.py --window=10", SGD),
    "Ringmaster-ASGD": ("Ringmaster-ASGD/ringmaster_asgd.py", SGD),
    "Semi-Synchronous-SGD": ("Semi-Synchronous-SGD/semi_synchronous_sgd.py", SGD),
    "DOWNPOUR-Easy, window 10": ("DOWNPOUR-Easy/downpour_easy.py --window=10", f"Adagrad, {SGD}"),
    "DOWNPOUR, window 10": ("DOWNPOUR/downpour.py --window=10", "Adagrad"),
    "DOWNPOUR, window 100": ("DOWNPOUR/downpour.py --window=100", "Adagrad"),
    "AGN, window 10": ("AGN/agn.py --window=10", SGD),
    "AGN, window 100": ("AGN/agn.py --window=100", SGD),
    "AEASGD, window 10": ("AEASGD/aeasgd.py --window=10", SGD),
    "AEAMSGD, window 10": ("AEAMSGD/aeamsgd.py --window=10", ""),  # its own, in the scheme itself
    "SAGN, window 10": ("SAGN/sagn.py --window=10", "Adam, GradientDescent"),
    "Synchronous-SGD, by all-reduce": ("Synchronous-SGD/all_reduce.py", SGD),
    "Synchronous-SGD, through the ps": ("Synchronous-SGD/synchronous_sgd.py", SGD),
    "Synchronous-SGD, different learning rates": (
        "Synchronous-SGD-different-learning-rates/synchronous_sgd_different_learning_rates.py",
        SGD,
    ),
    "Local-SGD, window 10": ("Local-SGD/local_sgd.py --window=10", SGD),
    "DiLoCo, window 10": ("DiLoCo/diloco.py --window=10", "Adam, Momentum"),
    "Streaming-DiLoCo, 2 fragments, window 5": ("Streaming-DiLoCo/streaming_diloco.py --window=5", "Adam, Momentum"),
    "Asynchronous-DiLoCo, window 10": ("Asynchronous-DiLoCo/asynchronous_diloco.py --window=10", f"Adam, {SGD}"),
    "SparseLoCo, window 10": ("SparseLoCo/sparseloco.py --window=10", f"Adam, {SGD}"),
}
LIMIT, PLAIN, DDP = "the limit: nothing shared", "plain TensorFlow, asynchronous", compare.DDP
# Of the table in README.md
SHORT = ("DOWNPOUR, window 100", "one process", "HogWild", DDP, "Synchronous-SGD, through the ps", PLAIN)
TARGETS = [  # what, at least so many times, of what
    ("HogWild", 2.5, PLAIN),
    ("HogWild", 4, "ParameterServerStrategy"),
    ("HogWild", 4, "ParameterServerStrategy, 10 steps per call"),
    ("DOWNPOUR, window 10", 12, PLAIN),
    ("AGN, window 10", 12, PLAIN),
    ("DOWNPOUR, window 100", 0.8, LIMIT),
    ("DOWNPOUR, window 100", 0.8, "the limit, steps of Adagrad"),
    ("AGN, window 100", 0.8, LIMIT),
    ("AEASGD, window 10", 8, PLAIN),
    ("Dynamic-SGD, window 10", 8, PLAIN),
    ("Synchronous-SGD, by all-reduce", 1.5, DDP),
    ("SAGN, window 10", 4, DDP),
]


def main():
    """Runs all, and writes what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--seconds", type=float, default=3, help="of training in each (default: 3)")
    parser.add_argument("--only", help="beginnings of the names to run, separated by commas; writes no file")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds must be at least 1, and --seconds greater than 0")
    began, chosen = time.monotonic(), compare.chosen(CONTESTANTS, options.only, parser)
    os.chdir(HERE.parent)
    first: dict[str, dict] = {}

    def say(name, result):
        check_same_work({**first, name: result})
        first.setdefault(name, result)
        print(f"{name}: {result['samples_per_second']:,.0f} samples/s", flush=True)

    scripts = {name: script for name, (script, _) in chosen.items()}
    results = compare.in_turn(scripts, [*FLAGS, f"--seconds={options.seconds:g}"], options.rounds, say)
    report = {
        "command": "bash benchmarks/run.sh",
        "date": f"{datetime.date.today()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("tensorflow", "keras", "torch") if importlib.util.find_spec(name)},
        "rounds": options.rounds,
        "seconds": options.seconds,
        "parameters": results[next(iter(results))][0]["parameters"],
        "runs": {
            name: {
                "script": chosen[name][0],
                "optimizer": of_one[0]["optimizer"],
                "samples_per_second": [round(result["samples_per_second"]) for result in of_one],
                "median": round(statistics.median(result["samples_per_second"] for result in of_one)),
                "test_accuracy": round(statistics.median(result["test_accuracy"] for result in of_one), 4),
            }
            for name, of_one in results.items()
        },
    }
    report["targets"] = [
        {"what": what, "at_least": least, "of": of, "reached": report["runs"][what]["median"] / report["runs"][of]["median"]}
        for what, least, of in TARGETS
        if what in results and of in results
    ]
    for target in report["targets"]:
        target["reached"] = round(target["reached"], 2)
    compared = f"\n\n{targets(report)}" if report["targets"] else ""
    print(f"\n{table(report)}{compared}\n\nin {(time.monotonic() - began) / 60:.1f} minutes")
    if not options.only:
        (HERE / "results.json").write_text(json.dumps(report, indent=2) + "\n")
        chart(report, HERE / "results.png")


def check_same_work(results):
    """Ends the program unless all trained as many parameters on the same data, in equal batches, with the right optimizer."""
    for key in ("data", "parameters", "batch_size", "num_ps"):
        values = {name: result[key] for name, result in results.items()}
        if len(set(values.values())) > 1:
            sys.exit(f"not the same work: {key} is {values}")
    for name, result in results.items():
        workers, optimizer = 1 if name == "one process" else 2, CONTESTANTS[name][1]
        if result["num_workers"] != workers or result["optimizer"] != optimizer:
            sys.exit(f"not the same work: {name} had {result['num_workers']} workers and the optimizer {result['optimizer']!r}")


def table(report, names=None):
    """Returns the runs as a Markdown table, the fastest first: those of these names, or all."""
    plain = report["runs"].get(PLAIN)
    lines = [
        "| | samples/s (median) | × plain TensorFlow | test accuracy | optimizer |",
        "|---|---:|---:|---:|---|",
    ]
    for name, run in sorted(report["runs"].items(), key=lambda item: -item[1]["median"]):
        if names is not None and name not in names:
            continue
        ratio = f"{run['median'] / plain['median']:.1f} ×" if plain else ""
        own = run["optimizer"].replace(SGD, "SGD") or "its own"
        lines.append(f"| {name} | {run['median']:,} | {ratio} | {run['test_accuracy']:.3f} | {own} |")
    return "\n".join(lines)


def targets(report):
    """Returns what was to be reached, and what was, as a Markdown table."""
    lines = ["| | at least | of | reached |", "|---|---:|---|---:|"]
    for target in report["targets"]:
        mark = "" if target["reached"] >= target["at_least"] else ", missed"
        lines.append(f"| {target['what']} | {target['at_least']:g} × | {target['of']} | {target['reached']:.2f} ×{mark} |")
    return "\n".join(lines)


def chart(report, path):
    """Draws the medians as bars, and the single runs as dots."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = sorted(report["runs"].items(), key=lambda item: item[1]["median"])
    schemes = [not run["script"].startswith("benchmarks/") and "sync_replicas" not in run["script"] for _, run in runs]
    figure = Figure(figsize=(10, 0.32 * len(runs) + 1), layout="constrained")
    axes = figure.subplots()
    axes.barh([name for name, _ in runs], [run["median"] for _, run in runs], color=["C0" if s else "0.7" for s in schemes])
    for i, (_, run) in enumerate(runs):
        axes.plot(run["samples_per_second"], [i] * len(run["samples_per_second"]), "k.", markersize=3)
    axes.set_xscale("log")
    axes.set(xlabel="samples per second, logarithmic: the median of the runs, which are the dots", ylim=(-0.6, len(runs) - 0.4))
    axes.set_title("Blue: schemes of this collection. Grey: what one would pick instead", fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.3)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    compare.interruptible(main)
