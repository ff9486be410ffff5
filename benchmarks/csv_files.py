"""Converts a large CSV file like Criteo's to arrays, and shows the time, the peak memory and the disk space that this takes.

    python benchmarks/csv_files.py --rows=1000000      # 0.26 GB
    python benchmarks/csv_files.py                     # 10 million rows, 2.6 GB

A row has a label, 13 whole numbers and 26 categories, strings of 8 hexadecimal digits, hashed into 1,000,000 buckets. Memory is
the largest resident set of the process that converts, with pyarrow and TensorFlow; the time is without the imports of these.
"""

import argparse
import json
import resource
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


def convert(path, folder):
    """Converts the file, and prints the seconds and the peak memory in bytes."""
    import tensorflow  # noqa: F401

    from common.data import convert

    begin = time.monotonic()
    convert("csv", [path], [], Path(folder), lambda done, of_all: None, hash_strings=BUCKETS)
    seconds = time.monotonic() - begin
    print(json.dumps({"seconds": seconds, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def main():
    """Writes the file, converts it in another process, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--convert", nargs=2, metavar=("FILE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert:
        return convert(*options.convert)
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as name:  # on a disk, which /tmp may not be
        path, folder = Path(name, "criteo.csv"), Path(name, "arrays")
        write_file(path, options.rows)
        folder.mkdir()
        command = [sys.executable, __file__, f"--rows={options.rows}", "--convert", str(path), str(folder)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        size, on_disk = path.stat().st_size, sum(each.stat().st_size for each in folder.iterdir())
    print("| rows | file, GB | seconds | MB/s | peak memory, MB | arrays, GB |\n|--:|--:|--:|--:|--:|--:|")
    seconds, memory = found["seconds"], found["memory"] / 1e6
    speed = size / 1e6 / seconds
    print(f"| {options.rows:,} | {size / 1e9:.2f} | {seconds:.1f} | {speed:.0f} | {memory:.0f} | {on_disk / 1e9:.2f} |")


if __name__ == "__main__":
    compare.interruptible(main)
