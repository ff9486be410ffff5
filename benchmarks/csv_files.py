"""Converts a large CSV file like Criteo's to arrays, and shows the time, the peak memory and the disk space that this takes.

    python benchmarks/csv_files.py --rows=1000000      # 0.26 GB
    python benchmarks/csv_files.py                     # 10 million rows, 2.6 GB
    python benchmarks/csv_files.py --train=3           # and trains from them and from the same in memory, 3 times each

A row has a label, 13 whole numbers and 26 categories, strings of 8 hexadecimal digits, hashed into 1,000,000 buckets. Memory is
the largest resident set of the process that converts, with pyarrow and TensorFlow; the time is without the imports of these.
"Again" is the time to find the arrays in the cache. With --train, DOWNPOUR trains a model of the 13 numbers by two workers; the
arrays are in the page cache.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compare
import numpy as np
import pyarrow
import pyarrow.csv
from memory import ROOT

NUMBERS, CATEGORIES, BUCKETS = 13, 26, 1_000_000
SIZES = np.geomspace(3, 1_000_000, CATEGORIES).astype(int)  # different strings of each category
EXPONENT = 1.1  # of Zipf's law
AT_ONCE = 100_000  # rows


def write_file(path, rows):
    """Writes the file: log-normal numbers, and categories by Zipf's law."""
    random = np.random.default_rng(0)
    hexadecimal = [pyarrow.array([f"{value:08x}" for value in random.integers(2**32, size=size)]) for size in SIZES]
    names = ["label", *(f"I{i + 1}" for i in range(NUMBERS)), *(f"C{i + 1}" for i in range(CATEGORIES))]
    schema = pyarrow.schema([(name, pyarrow.string() if name[0] == "C" else pyarrow.int64()) for name in names])
    options = pyarrow.csv.WriteOptions(quoting_style="none")
    with pyarrow.csv.CSVWriter(path, schema, write_options=options) as writer:
        for start in range(0, rows, AT_ONCE):
            count = min(AT_ONCE, rows - start)
            columns = [random.integers(0, 2, count), *random.lognormal(1, 2, [NUMBERS, count]).astype(np.int64)]
            for words in hexadecimal:
                # Zipf's law, continuous and cut off at the last string, by its inverse
                share = 1 - random.random(count) * (1 - (len(words) + 1.0) ** (1 - EXPONENT))
                places = (share ** (1 / (1 - EXPONENT))).astype(np.int64) - 1
                columns.append(words.take(pyarrow.array(np.minimum(places, len(words) - 1))))
            writer.write_table(pyarrow.table(columns, schema=schema))


LOAD = """
from pathlib import Path

import numpy as np

def load():
    [folder] = [path.parent for path in Path(__file__).parent.glob("arrays/*/about.json")]
    halves = []
    for half in ("train", "test"):
        x = np.fromfile(folder / f"{half}-numbers.float32", np.float32).reshape(-1, 39)
        halves.append((x, np.fromfile(folder / f"{half}-labels.int32", np.int32)))
    return tuple(halves)

def build():
    import keras

    x = keras.Input([39])
    y = keras.layers.Dense(64, "relu")(x[:, :13])
    return keras.Model(x, keras.layers.Dense(2)(y))

def of_columns():
    import keras

    return keras.Sequential([keras.Input([13]), keras.layers.Dense(64, "relu"), keras.layers.Dense(2)])
"""


def convert(path, folder):
    """Converts the file into a cache, and prints the seconds, also of a second time, and the peak memory in bytes."""
    import tensorflow  # noqa: F401

    from common.core import Settings
    from common.data import sources

    none = dict.fromkeys(("test_data", "label", "parse", "missing", "max_workers", "run_dir"))
    settings = Settings(**none, data=path, data_cache=folder, hash_strings=BUCKETS, stream=False, num_workers=2, check=False)
    seconds = []
    for _ in range(2):
        begin = time.monotonic()
        sources.load(settings)
        seconds.append(time.monotonic() - begin)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds[0], "again": seconds[1], "memory": memory}))


def speeds_of(folder, turns):
    """Returns the samples/s of so many runs from the cache, and as many with the same arrays in memory, alternately."""
    (folder / "large.py").write_text(LOAD)
    cached = f"--data_cache={folder}/arrays", f"--hash_strings={BUCKETS}", f"--model={folder}/large.py:of_columns"
    kinds = [f"--data={folder}/criteo.csv", *cached], [f"--data={folder}/large.py:load", f"--model={folder}/large.py:build"]
    found: list = [[], []]
    for _ in range(turns):
        for speeds, flags in zip(found, kinds):
            run_dir = folder / "run"
            command = [sys.executable, str(ROOT / "DOWNPOUR" / "downpour.py"), "--launch", *flags, f"--run_dir={run_dir}"]
            command += ["--learning_rate=1e-6", "--seconds=6", "--epochs=1000", "--batch_size=256", "--evaluation_secs=100"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            speeds.append(json.loads((run_dir / "result.json").read_text())["samples_per_second"])
            shutil.rmtree(run_dir)
    return found


def main():
    """Writes the file, converts it in another process, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--train", type=int, default=0, metavar="TURNS")
    parser.add_argument("--convert", nargs=2, metavar=("FILE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert:
        return convert(*options.convert)
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as name:  # on a disk; /tmp may be in memory
        path, folder = Path(name, "criteo.csv"), Path(name, "arrays")
        write_file(path, options.rows)
        command = [sys.executable, __file__, f"--rows={options.rows}", "--convert", str(path), str(folder)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        size, on_disk = path.stat().st_size, sum(each.stat().st_size for each in folder.glob("*/*"))
        mapped, held = speeds_of(Path(name), options.train)
    print("| rows | file, GB | seconds | MB/s | again, s | peak memory, MB | arrays, GB |\n|--:|--:|--:|--:|--:|--:|--:|")
    seconds, again, memory = found["seconds"], found["again"], found["memory"] / 1e6
    speed = f"{seconds:.1f} | {size / 1e6 / seconds:.0f} | {again:.2f}"
    print(f"| {options.rows:,} | {size / 1e9:.2f} | {speed} | {memory:.0f} | {on_disk / 1e9:.2f} |")
    if options.train:
        print("\n| arrays | samples/s, median | least to most |\n|---|--:|--:|")
        for kind, speeds in ("from the cache", mapped), ("in memory", held):
            print(f"| {kind} | {np.median(speeds):,.0f} | {min(speeds):,.0f} to {max(speeds):,.0f} |")


if __name__ == "__main__":
    compare.interruptible(main)
