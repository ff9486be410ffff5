"""Trains from a file of a given size, and shows the private memory of each task: a mapped file is never copied whole.

    python benchmarks/large_data.py                              # 1 GB, a minute or two
    python benchmarks/large_data.py --gigabytes=6
    python benchmarks/large_data.py --in_memory                  # arrays that a function returns, in place of a mapped file

Images of bytes [32, 32, 3] in a .npy file, and their classes, 10,000 of them for the test; DOWNPOUR, 2 workers. Memory is
the largest private memory of a process (RssAnon of Linux, read 20 times a second), and the largest memory that it had mapped
(VmHWM), with the pages of the file, which all tasks share and Linux takes away when memory is short.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import compare
import numpy as np
from memory import ROOT, megabytes, tasks_of

SHAPE = (32, 32, 3)
LOAD = """
import numpy as np

def load():
    x, y = (np.load(FOLDER + name, mmap_mode=MODE) for name in ("/x.npy", "/y.npy"))
    return (x[10000:], y[10000:]), (x[:10000], y[:10000])

def build():
    import keras

    layers = keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)
    return keras.Sequential([keras.Input([32, 32, 3]), *layers])
"""


def write_data(folder, gigabytes):
    """Writes noise with a bright band, whose place is the class, and the classes."""
    rng = np.random.default_rng(0)
    count = int(gigabytes * 1e9 / np.prod(SHAPE))
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (count, *SHAPE))
    y = rng.integers(0, 10, count).astype(np.int32)
    noise, band = rng.integers(0, 50, (1000, *SHAPE), np.uint8), np.zeros((10, *SHAPE), np.uint8)
    for k in range(10):
        band[k, 3 * k : 3 * k + 3] = 200
    for start in range(0, count, len(noise)):
        classes = y[start : start + len(noise)]
        x[start : start + len(noise)] = noise[: len(classes)] + band[classes]
    x.flush()
    np.save(folder / "y.npy", y)


def most_memory(process, run_dir):
    """Returns {task: [megabytes of its own, of all in sight]}, the most until the process ends; the check is a task, too."""
    most: dict[str, list[float]] = {}
    while process.poll() is None:
        for name, pid in tasks_of(run_dir).items():
            with contextlib.suppress(OSError, StopIteration):  # it may have ended
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                in_sight = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
                own, before = megabytes(pid), most.get(name, [0.0, 0.0])
                most[name] = [max(own, before[0]), max(in_sight, before[1])]
        time.sleep(0.05)
    return most


def main():
    """Writes the file, trains, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--in_memory", action="store_true")
    options = parser.parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as name:  # on a disk, which /tmp may not be
        folder = Path(name)
        write_data(folder, options.gigabytes)
        mode = None if options.in_memory else "r"
        (folder / "large.py").write_text(f"FOLDER, MODE = {name!r}, {mode!r}\n{LOAD}")
        run_dir = str(folder / "run")
        command = [sys.executable, str(ROOT / "DOWNPOUR" / "downpour.py"), "--launch", f"--data={folder}/large.py:load"]
        command += [f"--model={folder}/large.py:build", f"--steps={options.steps}", f"--run_dir={run_dir}"]
        with compare.started(command) as process:
            most = most_memory(process, run_dir)
        if process.returncode:
            sys.exit(process.returncode)
        result = json.loads(Path(run_dir, "result.json").read_text())
    print("| task | its own, MB | in sight, MB |\n|---|--:|--:|")
    for task, (own, in_sight) in sorted(most.items()):
        print(f"| {task} | {own:.0f} | {in_sight:.0f} |")
    speed, seconds = result["samples_per_second"], result["wall_seconds"]
    print(f"\n{speed:,.0f} samples/s, test accuracy {result['test_accuracy']:.3f}, {seconds:.0f} s")


if __name__ == "__main__":
    compare.interruptible(main)
