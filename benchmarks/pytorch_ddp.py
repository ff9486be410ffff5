"""PyTorch's DistributedDataParallel on the same problem: the alternative without TensorFlow.

    python benchmarks/pytorch_ddp.py --launch --num_workers=2 --run_dir=runs/ddp

Synchronous SGD: every step averages the gradients of all workers over gloo, and all of them hold the same weights. It is
the fastest simple form: the samples are tensors in memory, each epoch is permuted once and cut into batches. A DataLoader
would fetch and stack the samples of every batch one by one, which takes half as long as computing the step. The options of
DDP and of the optimizer (`static_graph`, `gradient_as_bucket_view`, `fused`, `foreach`) and `torch.compile` make no
difference that could be measured.

Needs PyTorch; nothing else here does. A step is one of all workers together; it trains `--batch_size` samples of each.
"""

import math
import os
import sys
import time
from pathlib import Path

import alternatives
from wide_mlp import WIDTHS

from common.launch import die_with_parent

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
    options, digits = alternatives.parse()
    Path(options.run_dir, "rendezvous").unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, (options, digits, os.getpid()), options.num_workers)


def train(rank, options, digits, launcher):
    """Trains as worker `rank`."""
    die_with_parent(launcher)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rendezvous = Path(options.run_dir, "rendezvous").resolve().as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.num_workers)
    x, x_test = (torch.from_numpy(images.reshape(-1, 64)) for images in (digits.x_train, digits.x_test))
    y, y_test = (torch.from_numpy(labels).long() for labels in (digits.y_train, digits.y_test))
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    width = WIDTHS.get(options.millions, 128)
    model = torch.nn.Sequential(linear(64, width), relu(), linear(width, width), relu(), linear(width, 10))
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
        if options.seconds and step % (STEPS_PER_VOTE if width < 500 else 5) == 0:  # of a large model each takes longer
            over.fill_(time.monotonic() - start > options.seconds)
            dist.broadcast(over, 0)  # the answer of worker 0, so that all of them stop at the same step
        if step == last or over:
            break
    dist.barrier()
    seconds = time.monotonic() - start

    if rank == 0:
        with torch.no_grad():
            logits = model(x_test)
        loss, accuracy = functional.cross_entropy(logits, y_test), (logits.argmax(1) == y_test).float().mean()
        parameters = sum(p.numel() for p in model.parameters())
        samples = step * samples_per_step
        alternatives.write_result(options, "PyTorch DDP", parameters, step, samples, seconds, accuracy, loss)
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
