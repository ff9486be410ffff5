"""TensorFlow 2's own way: MultiWorkerMirroredStrategy on the same problem.

    python benchmarks/multi_worker_mirrored.py --launch --num_workers=2 --run_dir=runs/mirrored

Synchronous SGD without a ps: every step adds up the gradients of all workers (RING over gRPC), and all of them hold the same
weights. It is the fastest form that was found: a Keras model and optimizer, `strategy.run` in a loop of the graph inside one
`tf.function`, so that a call trains `--steps_per_call` steps, and samples that are constants of the graph. The same in plain
`tf.Variable`s is as fast; a loop that Python unrolls is slower, and takes longer to trace.

A step is one of all workers together; it trains `--batch_size` samples of each.
"""

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

import alternatives
import numpy as np

from common.launch import launcher, sandbox
from common.models import keras_model

HERE = Path(__file__).resolve().parent
STEPS_PER_VOTE = 50  # how often, at most, the workers ask worker 0 whether the time is over


def main():
    """Runs the workers; worker 0 writes `result.json`."""
    options, digits = alternatives.parse(steps_per_call=(50, "steps per call of the tf.function"))
    os.environ.update(alternatives.environment(options.num_workers))
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in range(options.num_workers)]
        hosts, context = [f"127.0.0.1:{port}" for port in ports], multiprocessing.get_context("spawn")
        arguments = options, digits, hosts, os.getpid()
        running = [context.Process(target=train, args=(i, *arguments), daemon=True) for i in range(options.num_workers)]
        for process in running:
            process.start()
        while running:
            multiprocessing.connection.wait([process.sentinel for process in running])
            if any(process.exitcode for process in running):
                sys.exit("a worker failed")  # which ends the others, that wait for it
            running = [process for process in running if process.exitcode is None]


def train(rank, options, digits, hosts, launcher):
    """Trains as worker `rank`."""
    sandbox.die_with_parent(launcher)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}})
    import keras
    import tensorflow as tf

    communication = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)
    with strategy.scope():
        large = f"{HERE}/wide_mlp.py:millions_{options.millions}"
        model = keras_model.build(large if options.millions else options.model, digits, options.seed)
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

    steps_per_vote = 5 if options.millions else STEPS_PER_VOTE  # of a large model each takes longer
    stream, step, next_vote = batches(len(digits.x_train), rank, options), 0, steps_per_vote
    train_steps(np.empty([0, options.batch_size], int))  # traces it
    total(0.0)  # a barrier
    start = time.monotonic()
    while step < last:
        indices = list(itertools.islice(stream, min(options.steps_per_call, last - step)))
        train_steps(np.stack(indices))
        step += len(indices)
        if options.seconds and step >= next_vote:
            next_vote = step + steps_per_vote
            if total(float(rank == 0 and time.monotonic() - start > options.seconds)) > 0:  # all stop at the same step
                break
    total(0.0)
    seconds = time.monotonic() - start

    if rank == 0:
        logits = model.keras_model(digits.x_test)
        test_loss = float(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(digits.y_test, logits)))
        accuracy = np.mean(np.argmax(logits, axis=1) == digits.y_test)
        samples = step * samples_per_step
        alternatives.write_result(
            options, "MultiWorkerMirroredStrategy", model.size, step, samples, seconds, accuracy, test_loss
        )


def batches(num_samples, rank, options):
    """Yields the indices of worker `rank`'s batches for ever. All permute alike; each takes its part of every epoch."""
    rng, size = np.random.default_rng(options.seed), options.batch_size
    share = num_samples // (size * options.num_workers) * size  # samples an epoch, whole batches
    while True:
        yield from rng.permutation(num_samples)[rank :: options.num_workers][:share].reshape(-1, size)


if __name__ == "__main__":
    main()
