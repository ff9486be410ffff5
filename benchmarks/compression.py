"""What compressed messages cost in accuracy and time, and save in bytes: `python benchmarks/compression.py`.

Every scheme that takes `--compress` trains the digits with two virtual workers (`Simulation/`) as its folder says, once for
each seed and compression. The bytes are those of tensors, of a round, up to the ps and down from it, as the simulator counts
them. Writes `compression.json` beside this file. If schemes are named, only these run anew; the figures of the others stay.
With `--cost` it prints the processor time of a round of DOWNPOUR, window 10, in one process with one thread, which packs and
unpacks as worker and ps do together: a figure that other work on the machine changes little. Then it writes no file.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import compare

from common.core import counted, median_and_range

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.append(str(ROOT / "Simulation"))

SCHEMES = (  # all but SparseLoCo, which refuses --compress, as it packs what it sends itself
    *("HogWild", "Dynamic-SGD", "Ringmaster-ASGD", "DC-ASGD", "Semi-Synchronous-SGD", "Synchronous-SGD"),
    *("Synchronous-SGD-different-learning-rates", "DOWNPOUR-Easy", "DOWNPOUR", "AGN", "AEASGD", "AEAMSGD", "SAGN"),
    *("Local-SGD", "DiLoCo", "Streaming-DiLoCo", "Asynchronous-DiLoCo"),
)
WAYS = {
    "none": {},
    "bf16": {"compress": "bf16"},
    "int8": {"compress": "int8"},
    "int4": {"compress": "int4"},
    "sign": {"compress": "sign"},
    "topk": {"compress": "topk"},
    "bf16, pull bf16": {"compress": "bf16", "compress_pull": "bf16"},
    "int8, pull int8": {"compress": "int8", "compress_pull": "int8"},
}


def main():
    """Runs all, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each scheme and compression (default: 5)")
    parser.add_argument("--epochs", type=float, default=60, help="of each run (default: 60)")
    parser.add_argument("--cost", action="store_true", help="print only the processor time of a round")
    parser.add_argument("schemes", nargs="*", help="folders (default: all)")
    options = parser.parse_args()
    if options.seeds < 1 or options.epochs <= 0:
        parser.error("--seeds must be at least 1, and --epochs greater than 0")
    if options.cost:
        return print_costs()
    names = options.schemes or list(SCHEMES)
    if unknown := [name for name in names if name not in SCHEMES]:
        parser.error(f"there is no scheme {unknown[0]}: choose from {', '.join(SCHEMES)}")
    file = HERE / "compression.json"
    report: dict[str, Any] = {
        "command": "python benchmarks/compression.py",
        "seeds": options.seeds,
        "epochs": options.epochs,
        "schemes": {},
    }
    if options.schemes and file.exists():
        before = json.loads(file.read_text())
        if any(before[name] != report[name] for name in ("seeds", "epochs")):
            parser.error("compression.json has other --seeds or --epochs: run all schemes, without naming any")
        report["schemes"] = before["schemes"]
    # A process for each scheme: TensorFlow keeps what it has compiled.
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=1) as pool:
        todo = [(name, options.seeds, options.epochs) for name in names]
        for name, found in counted(pool.imap_unordered(of_scheme, todo, chunksize=1), "schemes", len(todo)):
            known = {**report["schemes"], name: found}
            report["schemes"] = {name: known[name] for name in SCHEMES if name in known}
            file.write_text(json.dumps(report) + "\n")
            print(table({**report, "schemes": {name: found}}).splitlines()[2], flush=True)
    print(f"\n{table(report)}\n\n{ranges(report)}")


def of_scheme(what):
    """Returns the name, and for each of `WAYS` the accuracy of each seed and the bytes (up, down) of a round.

    Args:
      what: (name of the scheme, how many seeds, epochs).
    """
    import simulate

    name, seeds, epochs = what
    found = {}
    for way, flags in WAYS.items():
        runs = [simulate.simulate(name, num_workers=2, seed=seed, epochs=epochs, **flags) for seed in range(seeds)]
        found[way] = {
            "accuracies": [round(run.lines[-1]["test_accuracy"], 4) for run in runs],
            "bytes": [int(sum(getattr(action, way) for action in runs[0].actions)) for way in ("up", "down")],
        }
    return name, found


def table(report):
    """Returns a Markdown table: the median accuracy of each scheme with each compression, and the bytes of a round.

    The bytes are a share of those without compression, the largest that any of the schemes has.
    """
    lines = [f"| test accuracy | {' | '.join(WAYS)} |\n|---{'|---:' * len(WAYS)}|"]
    for name, found in report["schemes"].items():
        medians = [statistics.median(found[way]["accuracies"]) for way in WAYS]
        lines.append(f"| {name} | {' | '.join(f'{accuracy:.3f}' for accuracy in medians)} |")
    sizes = [[sum(found[way]["bytes"]) for way in WAYS] for found in report["schemes"].values()]
    shares = [max(way) for way in zip(*([size / each[0] for size in each] for each in sizes), strict=True)]
    lines.append(f"| bytes of a round, at most | {' | '.join(f'{share:.3g}' for share in shares)} |")
    return "\n".join(lines)


def ranges(report):
    """Returns a Markdown table: the accuracies of each scheme without compression and with int8, as median and range."""
    ways = "none", "int8", "int8, pull int8"
    lines = [f"| median (range) of {report['seeds']} seeds | {' | '.join(ways)} | differences |\n|---{'|---:' * 4}|"]
    for name, found in report["schemes"].items():
        each = [found[way]["accuracies"] for way in ways]
        differences = [f"{statistics.median(some) - statistics.median(each[0]):+.3f}" for some in each[1:]]
        lines.append(f"| {name} | {' | '.join(map(median_and_range, each))} | {', '.join(differences)} |")
    return "\n".join(lines)


def print_costs():
    """Prints the shortest of 15 calls of 30 rounds each, in turn, and their median, in microseconds of a round."""
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    from common.data import datasets
    from common.models import keras_model

    dataset = datasets.load("digits")
    model = keras_model.build("mlp", dataset)
    calls = {name: _call_of(dataset, model, flags) for name, flags in WAYS.items()}
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(15):
        for name, call in calls.items():
            began = time.process_time()
            for _ in range(6):
                call()
            took[name].append(1e6 * (time.process_time() - began) / 30)
    print("| microseconds of a round | shortest | ratio | median |\n|---|---:|---:|---:|")
    for name, each in took.items():
        ratio = min(each) / min(took["none"])
        print(f"| {name} | {min(each):,.0f} | {ratio:.2f} | {statistics.median(each):,.0f} |")


def _call_of(dataset, model, flags):
    """Returns a function that makes five rounds."""
    from common import tf
    from common.data import Batches
    from common.scheme import Compression, GlobalParameters, LocalParameters, build_rounds

    sys.path.append(str(ROOT / "DOWNPOUR"))
    from downpour import downpour

    hp = types.SimpleNamespace(window=10, learning_rate=0.1, n_fetch=None)
    compression = Compression(flags.get("compress", "none"), flags.get("compress_pull", "none")) if flags else None
    with tf.Graph().as_default():
        center = GlobalParameters(model.initial_parameters, compression=compression)
        local = LocalParameters(center, model, Batches(dataset.x_train, dataset.y_train, 32, 0))
        rounds, session = build_rounds(downpour, center, local, hp, 5), tf.Session()
        feeds = {**center.init_feed_dict, **local.init_feed_dict}
        session.run(tf.global_variables_initializer(), feeds)
        session.run(tf.local_variables_initializer(), feeds)
        call = session.make_callable([rounds.operations, rounds.loss])
    call()
    return call


if __name__ == "__main__":
    compare.interruptible(main)
