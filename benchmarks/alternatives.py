"""Shared by the programs here that are not schemes: their flags, and the `result.json` that they write."""

import argparse
import math
import time
from pathlib import Path

from wide_mlp import WIDTHS

from common.core import run_folder
from common.data import datasets
from common.launch import launcher


def parse(**more):
    """Returns the flags and the digits to train with.

    Args:
      more: {name: (default, help)} of flags of the program's own, which are whole numbers.
    """
    parser = argparse.ArgumentParser(usage="%(prog)s --run_dir=DIR [flags]", allow_abbrev=False)
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--num_workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--num_ps", type=int, default=1, help="ps tasks, if the program has any (default: 1)")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per step and worker (default: 32)")
    parser.add_argument("--learning_rate", type=float, default=0.1, help="(default: 0.1)")
    parser.add_argument("--epochs", type=float, default=60, help="passes over the data, all workers together (default: 60)")
    parser.add_argument("--steps", type=int, help="stop after this many steps (default: from --epochs)")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds of training")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order of the samples (default: 0)")
    parser.add_argument("--data", choices=["digits"], default="digits", help="the only choice")
    parser.add_argument("--model", choices=["mlp"], default="mlp", help="the only choice")
    parser.add_argument("--millions", type=int, choices=list(WIDTHS), help="parameters of a larger mlp, in place of 26,122")
    parser.add_argument("--launch", action="store_true", help="ignored: the processes are always started")
    for name, (default, text) in more.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    options = parser.parse_args()
    for flag in ("num_workers", "num_ps", "batch_size", "learning_rate", "epochs", "steps", "seconds", *more):
        value = getattr(options, flag)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{flag} must be greater than 0 and finite, not {value}")
    digits = datasets.load(options.data)
    if options.batch_size * options.num_workers > len(digits.x_train):
        parser.error(f"--batch_size times --num_workers must be at most the {len(digits.x_train)} samples")
    options.run_dir.mkdir(parents=True, exist_ok=True)
    options.began = time.time()
    return options, digits


def environment(num_workers):
    """Returns TensorFlow's variables that tasks begin with: threads for a share of the cores, as the schemes have them.

    And servers may listen on ports that are reserved.
    """
    found = {name: value for name, value in launcher.environment(num_workers).items() if name.startswith("TF_")}
    return found | {"TF_GRPC_REUSE_PORT": "true"}


def write_result(options, scheme, parameters, steps, samples, seconds, accuracy, loss):
    """Writes `result.json`, with the same entries as that of the schemes, as far as they are known.

    Args:
      scheme: its name.
      parameters: how many numbers were trained.
      steps, samples, seconds: how many, while all workers trained.
      accuracy, loss: on the test set.
    """
    result = {
        "scheme": scheme,
        "num_ps": options.num_ps,
        "num_workers": options.num_workers,
        "data": options.data,
        "parameters": parameters,
        "optimizer": "GradientDescent",
        "batch_size": options.batch_size,
        "window": 1,
        "global_steps": steps,
        "samples": samples,
        "train_seconds": seconds,
        "wall_seconds": time.time() - options.began,
        "samples_per_second": samples / seconds,
        "test_accuracy": float(accuracy),
        "test_loss": float(loss) if math.isfinite(loss) else None,
        "restarts": 0,
    }
    run_folder.write_json(Path(options.run_dir, "result.json"), result)
