"""The limit: as many processes as a run has workers, each training alone, none of them sharing anything with the others.

    python benchmarks/limit.py --launch --window=100 --num_workers=2 --seconds=8 --epochs=1000000 --run_dir=runs/limit

Each is a scheme without a cluster, on as many threads as a worker of a cluster has: `HogWild/hogwild.py`, where a window only
makes a call of the session longer, or the script that `--script` names, whose local steps may cost more. The difference between
their speed and a scheme's is the price of training one model together.
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from common.launch import launcher, sandbox

ROOT = Path(__file__).resolve().parents[1]


def main():
    """Runs the processes and writes `result.json`, with the sum of their samples per second."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--script", type=Path, default=Path("HogWild/hogwild.py"), help="(default: HogWild/hogwild.py)")
    parser.add_argument("--num_workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--num_ps", type=int, default=1, help="ignored: there is no ps")
    parser.add_argument("--launch", action="store_true", help="ignored: the processes are always started")
    options, flags = parser.parse_known_args()
    script = str(ROOT / options.script)
    environ = launcher.environment(options.num_workers)
    end_with_this = functools.partial(sandbox.die_with_parent, os.getpid())
    folders = [options.run_dir / f"process-{i}" for i in range(options.num_workers)]
    processes = [
        subprocess.Popen(
            [sys.executable, script, f"--run_dir={folder}", f"--seed={i}", *flags], env=environ, preexec_fn=end_with_this
        )
        for i, folder in enumerate(folders)
    ]
    if any([process.wait() for process in processes]):
        sys.exit("a process failed")
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    together = {
        **results[0],
        "scheme": "nothing shared",
        "num_ps": options.num_ps,
        "num_workers": options.num_workers,
        "samples": sum(result["samples"] for result in results),
        "samples_per_second": sum(result["samples_per_second"] for result in results),
    }
    shutil.copy(folders[0] / "model.keras", options.run_dir / "model.keras")
    (options.run_dir / "result.json").write_text(json.dumps(together, indent=2) + "\n")


if __name__ == "__main__":
    main()
