"""PyTorch's DistributedDataParallel on the same problem: what one would write without TensorFlow.

    python benchmarks/pytorch_ddp.py --launch --num_workers=2 --run_dir=runs/ddp

Synchronous SGD: every step averages the gradients of all workers over gloo, and all of them hold the same weights. It is
the fastest simple form: the samples are tensors in memory, each epoch is permuted once and cut into batches. A DataLoader
would fetch and stack the samples of every batch one by one, which takes half as long as computing the step. The options of
DDP and of the optimizer (`static_graph`, `gradient_as_bucket_view`, `fused`, `foreach`) and `torch.compile` make no
difference that could be measured.

Needs PyTorch, which nothing else here does. A step is one of all workers together; it trains `--batch_size` samples of each.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

from common import data
from common.launch import die_with_parent, write_json

try:
    import torch
    import torch.distributed as dist
    from torch.nn import functional
except ImportError:
    sys.stderr.write("pytorch_ddp.py: needs PyTorch: pip install torch\n")
    sys.exit(2)

STEPS_PER_VOTE = 50  # how often the workers ask worker 0 whether the time is over


def main():
    """Runs the workers; worker 0 writes `result.json`."""
    began = time.time()
    parser = argparse.ArgumentParser(usage="%(prog)s --run_dir=DIR [flags]", allow_abbrev=False)
    parser.add_argument("--run_dir", type=Path, required=True)
    parser.add_argument("--num_workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--batch_size", type=int, default=32, help="samples of each worker a step (default: 32)")
    parser.add_argument("--learning_rate", type=float, default=0.1, help="(default: 0.1)")
    parser.add_argument("--epochs", type=float, default=60, help="passes over the data, all workers together (default: 60)")
    parser.add_argument("--steps", type=int, help="stop after this many steps (default: from --epochs)")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds of training")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the samples (default: 0)")
    parser.add_argument("--data", choices=["digits"], default="digits", help="there is no other")
    parser.add_argument("--model", choices=["mlp"], default="mlp", help="there is no other")
    parser.add_argument("--num_ps", type=int, default=1, help="means nothing; there is none")
    parser.add_argument("--launch", action="store_true", help="means nothing; they are always started")
    options = parser.parse_args()
    for flag in ("num_workers", "batch_size", "learning_rate", "epochs", "steps", "seconds"):
        value = getattr(options, flag)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{flag} must be greater than 0 and finite, not {value}")
    digits = data.load(options.data)
    if options.batch_size * options.num_workers > len(digits.x_train):
        parser.error(f"--batch_size times --num_workers must be at most the {len(digits.x_train)} samples")
    options.run_dir.mkdir(parents=True, exist_ok=True)
    Path(options.run_dir, "rendezvous").unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, (options, digits, began, os.getpid()), options.num_workers)


def train(rank, options, digits, began, launcher):
    """Trains as worker `rank`."""
    die_with_parent(launcher)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rendezvous = Path(options.run_dir, "rendezvous").resolve().as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.num_workers)
    x, x_test = (torch.from_numpy(images.reshape(-1, 64)) for images in (digits.x_train, digits.x_test))
    y, y_test = (torch.from_numpy(labels).long() for labels in (digits.y_train, digits.y_test))
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    model = torch.nn.Sequential(linear(64, 128), relu(), linear(128, 128), relu(), linear(128, 10))
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=options.learning_rate)
    samples_per_step = options.batch_size * options.num_workers
    last = options.steps or math.ceil(options.epochs * len(x) / samples_per_step)

    step, over = 0, torch.zeros([])
    dist.barrier()
    start = time.monotonic()
    for images, labels in batches(x, y, rank, options):
        optimizer.zero_grad()
        functional.cross_entropy(replica(images), labels).backward()
        optimizer.step()
        step += 1
        if options.seconds and step % STEPS_PER_VOTE == 0:
            over.fill_(time.monotonic() - start > options.seconds)
            dist.broadcast(over, 0)  # the answer of worker 0, so that all of them stop at the same step
        if step == last or over:
            break
    dist.barrier()
    seconds = time.monotonic() - start

    if rank == 0:
        with torch.no_grad():
            logits = model(x_test)
        test_loss = float(functional.cross_entropy(logits, y_test))
        result = {
            "scheme": "PyTorch DDP",
            "num_ps": options.num_ps,
            "num_workers": options.num_workers,
            "batch_size": options.batch_size,
            "window": 1,
            "parameters": sum(p.numel() for p in model.parameters()),
            "global_steps": step,
            "samples": step * samples_per_step,
            "train_seconds": seconds,
            "wall_seconds": time.time() - began,
            "samples_per_second": step * samples_per_step / seconds,
            "staleness_mean": 0.0,
            "staleness_max": 0,
            "test_accuracy": float((logits.argmax(1) == y_test).float().mean()),
            "test_loss": test_loss if math.isfinite(test_loss) else None,
            "restarts": 0,
        }
        write_json(Path(options.run_dir, "result.json"), result)
    dist.destroy_process_group()


def batches(x, y, rank, options):
    """Yields the batches of worker `rank` for ever. All workers permute alike, and each takes its part of every epoch."""
    generator = torch.Generator().manual_seed(options.seed)
    size = options.batch_size
    share = len(x) // (size * options.num_workers) * size  # samples an epoch, whole batches
    while True:
        order = torch.randperm(len(x), generator=generator)[rank :: options.num_workers][:share]
        yield from zip(x[order].split(size), y[order].split(size))


if __name__ == "__main__":
    main()
