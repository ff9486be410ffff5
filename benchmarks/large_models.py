"""Large models, whose messages cost more than their latency, beside the alternatives: `bash benchmarks/large_models.sh`.

MLPs of 1, 5, 25 and, with `--largest=100`, 100 million parameters train the digits in turn; the figures are medians. It prints
a table, and writes `large_models.json` and `large_models.png` beside this file.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from pathlib import Path

import compare
import wide_mlp

HERE = Path(__file__).resolve().parent
# A small rate, so that no scheme diverges: only speed is measured.
FLAGS = ["--data=digits", "--batch_size=32", "--epochs=1000000", "--learning_rate=0.01"]
LIMIT, DDP = "the limit: nothing shared", compare.DDP
CONTESTANTS = {  # name: script with its flags
    LIMIT: "benchmarks/limit.py",
    "one process": "benchmarks/limit.py --num_workers=1",
    "DOWNPOUR, window 10": "DOWNPOUR/downpour.py --window=10",
    "HogWild": "HogWild/hogwild.py",
    "Synchronous-SGD, by all-reduce": "Synchronous-SGD/all_reduce.py",
    "Synchronous-SGD, through the ps": "Synchronous-SGD/synchronous_sgd.py",
    DDP: "benchmarks/pytorch_ddp.py",
    "MultiWorkerMirroredStrategy": "benchmarks/multi_worker_mirrored.py --steps_per_call=1",
}
ALTERNATIVES = (DDP, "MultiWorkerMirroredStrategy")


def main():
    """Runs all, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each (default: 2)")
    parser.add_argument("--seconds", type=float, default=12, help="of training in each (default: 12)")
    parser.add_argument("--largest", type=float, default=25, help="millions of parameters of the largest model (default: 25)")
    parser.add_argument("--only", help="beginnings of the names to run, separated by commas; writes no file")
    options = parser.parse_args()
    sizes = [millions for millions in wide_mlp.WIDTHS if millions <= options.largest]
    if options.rounds < 1 or options.seconds <= 0 or not sizes:
        parser.error("--rounds and --largest must be at least 1, and --seconds greater than 0")
    chosen = compare.chosen(CONTESTANTS, options.only, parser)
    os.chdir(HERE.parent)
    began, models = time.monotonic(), []
    for millions in sizes:
        scripts = {name: f"{script} {flags_of(name, millions)}" for name, script in chosen.items()}
        say = lambda name, result: print(f"{name}: {result['samples_per_second']:,.0f} samples/s", flush=True)  # noqa: E731
        print(f"{millions} million parameters", flush=True)
        results = compare.in_turn(scripts, [*FLAGS, f"--seconds={options.seconds:g}"], options.rounds, say)
        if len(counts := {result["parameters"] for of_one in results.values() for result in of_one}) > 1:
            sys.exit(f"not the same work: the models have {sorted(counts)} parameters")
        rates = {name: [round(result["samples_per_second"], 1) for result in of_one] for name, of_one in results.items()}
        models.append({"parameters": counts.pop(), "samples_per_second": rates})
    report = {
        "command": "bash benchmarks/large_models.sh",
        "date": f"{datetime.date.today()}",
        "cores": os.cpu_count(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "models": models,
    }
    print(f"\n{table(report)}\n\nin {(time.monotonic() - began) / 60:.1f} minutes")
    if not options.only:
        (HERE / "large_models.json").write_text(json.dumps(report, indent=2) + "\n")
        chart(report, HERE / "large_models.png")


def flags_of(name, millions):
    """Returns the flags that choose the model."""
    if name in ALTERNATIVES:
        return f"--millions={millions}"
    return f"--model=benchmarks/wide_mlp.py:millions_{millions}"


def medians(model):
    """Returns {name: samples per second} of a model."""
    return {name: statistics.median(rates) for name, rates in model["samples_per_second"].items()}


def table(report):
    """Returns the samples per second as a Markdown table, with those of DDP as the unit in brackets."""
    heads = [f"{model['parameters'] / 1e6:.1f} million" for model in report["models"]]
    lines = [f"| samples/s (× DDP) | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    found = [medians(model) for model in report["models"]]
    for name in sorted(found[-1], key=lambda name: -found[-1][name]):
        cells = []
        for rates in found:
            ratio = f" ({rates[name] / rates[DDP]:.2f})" if DDP in rates else ""
            cells.append(f"{rates[name]:,.0f}{ratio}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def chart(report, path):
    """Draws the samples per second by the number of parameters, on logarithmic axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    sizes, found = [model["parameters"] for model in report["models"]], [medians(model) for model in report["models"]]
    for name in sorted(found[-1], key=lambda name: -found[-1][name]):
        style = "--" if name in (*ALTERNATIVES, LIMIT, "one process") else "-"
        axes.plot(sizes, [rates[name] for rates in found], f"o{style}", label=name, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="samples per second, median")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    compare.interruptible(main)
