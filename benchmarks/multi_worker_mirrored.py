"""TensorFlow 2's own way: MultiWorkerMirroredStrategy on the same problem.

    python benchmarks/multi_worker_mirrored.py --launch --num_workers=2 --run_dir=runs/mirrored

Synchronous SGD without a ps: every step adds up the gradients of all workers (RING over gRPC), and all of them hold the same
weights. It is the fastest form that was found: a Keras model and optimizer, `strategy.run` in a loop of the graph inside one
`tf.function`, so that a call trains `--steps_per_call` steps, and samples that are constants of the graph. The same in plain
`tf.Variable`s is as fast; a loop that Python unrolls is slower, and takes longer to trace.

A step is one of all workers together; it trains `--batch_size` samples of each.
"""

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from pathlib import Path

import numpy as np

from common import data, launch, models

STEPS_PER_VOTE = 50  # how often, at most, the workers ask worker 0 whether the time is over


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
    parser.add_argument("--steps_per_call", type=int, default=50, help="steps a call of the tf.function (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the samples (default: 0)")
    parser.add_argument("--data", choices=["digits"], default="digits", help="there is no other")
    parser.add_argument("--model", choices=["mlp"], default="mlp", help="there is no other")
    parser.add_argument("--num_ps", type=int, default=1, help="means nothing; there is none")
    parser.add_argument("--launch", action="store_true", help="means nothing; they are always started")
    options = parser.parse_args()
    for flag in ("num_workers", "batch_size", "learning_rate", "epochs", "steps", "seconds", "steps_per_call"):
        value = getattr(options, flag)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{flag} must be greater than 0 and finite, not {value}")
    digits = data.load(options.data)
    if options.batch_size * options.num_workers > len(digits.x_train):
        parser.error(f"--batch_size times --num_workers must be at most the {len(digits.x_train)} samples")
    options.run_dir.mkdir(parents=True, exist_ok=True)

    threads = str(max(1, (os.cpu_count() or 1) // options.num_workers))
    given = {"TF_NUM_INTRAOP_THREADS": threads, "TF_NUM_INTEROP_THREADS": threads, **os.environ}
    os.environ.update(given, TF_GRPC_REUSE_PORT="true")
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launch.reserved_port()).getsockname()[1] for _ in range(options.num_workers)]
        hosts, context = [f"127.0.0.1:{port}" for port in ports], multiprocessing.get_context("spawn")
        arguments = options, digits, began, hosts, os.getpid()
        running = [context.Process(target=train, args=(i, *arguments), daemon=True) for i in range(options.num_workers)]
        for process in running:
            process.start()
        while running:
            multiprocessing.connection.wait([process.sentinel for process in running])
            if any(process.exitcode for process in running):
                sys.exit("a worker failed")  # which ends the others, that wait for it
            running = [process for process in running if process.exitcode is None]


def train(rank, options, digits, began, hosts, launcher):
    """Trains as worker `rank`."""
    launch.die_with_parent(launcher)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}})
    import keras
    import tensorflow as tf

    communication = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)
    with strategy.scope():
        model = models.build(options.model, digits, options.seed)
        optimizer = keras.optimizers.SGD(options.learning_rate)
        optimizer.build(model.keras_model.trainable_variables)
    x, y = tf.constant(digits.x_train), tf.constant(digits.y_train)
    samples_per_step = options.batch_size * options.num_workers
    last = options.steps or math.ceil(options.epochs * len(digits.x_train) / samples_per_step)

    def train_step(indices):
        with tf.GradientTape() as tape:
            logits = model.keras_model(tf.gather(x, indices), training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.gather(y, indices), logits=logits)
            loss = tf.reduce_sum(losses) / samples_per_step  # the optimizer adds up the workers' gradients
        variables = model.keras_model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    @tf.function(input_signature=[tf.TensorSpec([None, options.batch_size], tf.int64)])
    def train_steps(indices):
        for i in tf.range(tf.shape(indices)[0]):
            strategy.run(train_step, (indices[i],))

    @tf.function(input_signature=[tf.TensorSpec([])])
    def total(value):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)

    stream, step, next_vote = batches(len(digits.x_train), rank, options), 0, STEPS_PER_VOTE
    train_steps(np.empty([0, options.batch_size], int))  # traces it
    total(0.0)  # a barrier
    start = time.monotonic()
    while step < last:
        indices = list(itertools.islice(stream, min(options.steps_per_call, last - step)))
        train_steps(np.stack(indices))
        step += len(indices)
        if options.seconds and step >= next_vote:
            next_vote = step + STEPS_PER_VOTE
            if total(float(rank == 0 and time.monotonic() - start > options.seconds)) > 0:  # all stop at the same step
                break
    total(0.0)
    seconds = time.monotonic() - start

    if rank == 0:
        logits = model.keras_model(digits.x_test)
        test_loss = float(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(digits.y_test, logits)))
        result = {
            "scheme": "MultiWorkerMirroredStrategy",
            "num_ps": options.num_ps,
            "num_workers": options.num_workers,
            "batch_size": options.batch_size,
            "window": 1,
            "parameters": model.size,
            "global_steps": step,
            "samples": step * samples_per_step,
            "train_seconds": seconds,
            "wall_seconds": time.time() - began,
            "samples_per_second": step * samples_per_step / seconds,
            "staleness_mean": 0.0,
            "staleness_max": 0,
            "test_accuracy": float(np.mean(np.argmax(logits, axis=1) == digits.y_test)),
            "test_loss": test_loss if math.isfinite(test_loss) else None,
            "restarts": 0,
        }
        launch.write_json(Path(options.run_dir, "result.json"), result)


def batches(num_samples, rank, options):
    """Yields the indices of worker `rank`'s batches for ever. All permute alike; each takes its part of every epoch."""
    rng, size = np.random.default_rng(options.seed), options.batch_size
    share = num_samples // (size * options.num_workers) * size  # samples an epoch, whole batches
    while True:
        yield from rng.permutation(num_samples)[rank :: options.num_workers][:share].reshape(-1, size)


if __name__ == "__main__":
    main()
