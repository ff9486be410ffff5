"""What compressed messages cost in accuracy and time, and save in bytes: `python benchmarks/compression.py` prints the table.

Every scheme trains the digits with two virtual workers (`Simulation/`) as its folder says, once for each seed and compression.
Accuracies are medians. The bytes are those of a round, up to the ps and down from it, of tensors as the simulator counts them.
With `--cost` it prints the processor time of a round of DOWNPOUR, window 10, in one process with one thread, which packs and
unpacks as worker and ps do together: a figure that other work on the machine changes little.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
import types
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import compare

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "Simulation"))

SCHEMES = (
    *("HogWild", "Dynamic-SGD", "DC-ASGD", "Semi-Synchronous-SGD", "Synchronous-SGD"),
    *("Synchronous-SGD-different-learning-rates", "DOWNPOUR-Easy", "DOWNPOUR", "AGN", "AEASGD", "AEAMSGD", "SAGN", "DiLoCo"),
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
    """Prints a row for each scheme as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each scheme and compression (default: 3)")
    parser.add_argument("--epochs", type=float, default=60, help="of each run (default: 60)")
    parser.add_argument("--cost", action="store_true", help="print the processor time of a round, and nothing else")
    parser.add_argument("schemes", nargs="*", help="folders (default: all thirteen)")
    options = parser.parse_args()
    if options.seeds < 1 or options.epochs <= 0:
        parser.error("--seeds must be at least 1, and --epochs greater than 0")
    if options.cost:
        return print_costs()
    names = options.schemes or list(SCHEMES)
    if unknown := [name for name in names if name not in SCHEMES]:
        parser.error(f"there is no scheme {unknown[0]}: choose from {', '.join(SCHEMES)}")
    print(f"| test accuracy | {' | '.join(WAYS)} |\n|---{'|---:' * len(WAYS)}|", flush=True)
    # A process for each scheme: TensorFlow keeps what it has compiled.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in names:
            found, sizes = pool.apply(of_scheme, [name, options.seeds, options.epochs])
            print(f"| {name} | {' | '.join(f'{accuracy:.3f}' for accuracy in found)} |", flush=True)
    of_first = [f"{size:.3g}" for up, down in sizes for size in [(up + down) / sum(sizes[0])]]
    print(f"| bytes of a round of {name} | {' | '.join(of_first)} |")


def of_scheme(name, seeds, epochs):
    """Returns for each of `WAYS` the median accuracy, and the bytes (up, down) of a round."""
    import simulate

    found, sizes = [], []
    for flags in WAYS.values():
        runs = [simulate.simulate(name, num_workers=2, seed=seed, epochs=epochs, **flags) for seed in range(seeds)]
        found.append(statistics.median(run.lines[-1]["test_accuracy"] for run in runs))
        sizes.append([sum(getattr(action, way) for action in runs[0].actions) for way in ("up", "down")])
    return found, sizes


def print_costs():
    """Prints the shortest of 15 calls of 30 rounds each, in turn, and their median, in microseconds of a round."""
    os.environ |= {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    from common import data, models

    dataset = data.load("digits")
    model = models.build("mlp", dataset)
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
    from common.batches import Batches
    from common.center import GlobalParameters
    from common.compression import Compression
    from common.local import LocalParameters
    from common.steps import build_rounds

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
