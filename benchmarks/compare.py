"""Runs scripts in turn on this machine and compares their samples per second.

    python benchmarks/compare.py HogWild/hogwild.py benchmarks/plain_tensorflow.py --rounds=3 -- --num_ps=2
    python benchmarks/compare.py "AGN/agn.py --window=10" benchmarks/plain_tensorflow.py -- --seconds=8 --epochs=1000000

A script may be given with flags of its own, in quotes; those after `--` go to every script. The rates of two runs of the very
same command differ by up to 2 on a busy machine: only medians of runs in turn are comparable.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import h5py

from common.core import counted

SAME_WORK = ["--data=digits", "--model=mlp", "--batch_size=32", "--learning_rate=0.1", "--epochs=120"]
DDP = "PyTorch DDP"  # among the contestants; PyTorch is not in the requirements
MUST_BE_EQUAL = ("num_ps", "num_workers", "data", "batch_size", "parameters")


def main():
    """Prints the samples per second of each run, their medians and the ratio to the last script's."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(usage='%(prog)s "SCRIPT [flags]" ["SCRIPT [flags]" ...] [--rounds=N] [-- flags of all]')
    parser.add_argument("scripts", nargs="+", help="scripts to compare; the last one is the baseline")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each script (default: 3)")
    options = parser.parse_args(arguments[:split])
    flags = [*SAME_WORK, *arguments[split + 1 :]]  # of two equal flags the later one counts
    for script in options.scripts:
        if not Path(script.split(" ")[0]).is_file():
            parser.error(f"there is no script {script.split(' ')[0]}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")

    results = in_turn({script: script for script in options.scripts}, flags, options.rounds)
    everything = [result for of_script in results.values() for result in of_script]
    for key in MUST_BE_EQUAL:
        if len({result[key] for result in everything}) > 1:
            sys.exit(f"the runs did not do the same work: {key} = {sorted({result[key] for result in everything})}")

    one = everything[0]
    print(f"{one['num_ps']} ps, {one['num_workers']} workers, {one['parameters']:,} parameters; {' '.join(flags)}\n")
    rounds = [f"run {i + 1}" for i in range(options.rounds)]
    print(f"| {' | '.join(['samples/s', *rounds, 'median', 'ratio', 'test accuracy'])} |")
    print("|---" + "|---:" * (options.rounds + 3) + "|")
    medians = {s: statistics.median(r["samples_per_second"] for r in results[s]) for s in results}
    for script, of_script in results.items():
        rates = [f"{result['samples_per_second']:,.0f}" for result in of_script]
        accuracies = [f"{result['test_accuracy']:.3f}" for result in of_script if result["test_accuracy"] is not None]
        accuracy = f"{min(accuracies)} to {max(accuracies)}" if accuracies else ""
        ratio = medians[script] / medians[options.scripts[-1]]
        print(f"| `{script}` | {' | '.join(rates)} | {medians[script]:,.0f} | {ratio:.2f} | {accuracy} |")


def chosen(contestants, only, parser):
    """Returns those of `contestants`, a dict, whose names begin as `--only` says; without DDP if there is no PyTorch."""
    found = {name: value for name, value in contestants.items() if name.startswith(tuple((only or "").split(",")))}
    if not found:
        parser.error(f"--only={only} matches none of: {'; '.join(contestants)}")
    if DDP in found and not importlib.util.find_spec("torch"):
        print("PyTorch is not installed, so its DDP is left out: pip install torch", flush=True)
        del found[DDP]
    return found


def interruptible(main):
    """Calls `main`; Ctrl-C and SIGTERM end the program without a stack trace, and what it runs."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)


@contextlib.contextmanager
def started(command):
    """The process of a command, whose output is discarded. It ends with the context, at the latest."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def in_turn(scripts, flags, rounds, say=lambda name, result: None):
    """Returns {name: results} of `scripts`, {name: script with flags of its own}, which run in turn, so many rounds."""
    results: dict[str, list[dict]] = {name: [] for name in scripts}
    for name, script in counted(list(scripts.items()) * rounds, "runs"):
        results[name].append(run(script, flags))
        say(name, results[name][-1])
    return results


def run(script, flags):
    """Runs one script to its end and returns its `result.json`, and the number of parameters it trained."""
    with tempfile.TemporaryDirectory() as run_dir:
        words = shlex.split(script)
        command = [sys.executable, words[0], "--launch", f"--run_dir={run_dir}", *flags, *words[1:]]
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if process.returncode:
            sys.exit(f"{script} ended with exit status {process.returncode}:\n{process.stdout}")
        result = json.loads(Path(run_dir, "result.json").read_text())
        if "parameters" not in result:  # of a script with a main loop of its own
            result["parameters"] = count_parameters(Path(run_dir, "model.keras"))
    together = result["samples_per_second"] * result["train_seconds"]  # samples from the last worker's start on
    if together < 0.5 * result["samples"]:
        sys.exit(f"{script}: more than half of the samples came before all workers had started; give more --epochs")
    return result


def count_parameters(path):
    """Returns how many numbers the weights in a `.keras` file are, without importing tensorflow."""
    sizes = []
    with zipfile.ZipFile(path) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as weights:
        weights.visititems(lambda _, item: sizes.append(item.size) if isinstance(item, h5py.Dataset) else None)
    return int(sum(sizes))


if __name__ == "__main__":
    interruptible(main)
