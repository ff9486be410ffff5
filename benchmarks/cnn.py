"""A convolutional network of a million parameters: HogWild against `fit`: `python benchmarks/cnn.py`.

Two processes that share nothing train by Keras's `fit`, with one thread each; then HogWild trains with a ps and two workers,
at a window of ten. Both have the same two cores, and take turns, so that they find the same machine. Prints samples per second
of each turn, and medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from common.core import UserError
from common.launch import launcher

WORKERS, WINDOW, BATCH_SIZE = 2, 10, 32


def main():
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--seconds", type=float, default=10, help="of training in a turn (default: 10)")
    parser.add_argument("--fit", action="store_true", help="run as one of the processes that train with fit")
    options = parser.parse_args()
    if options.fit:
        return fit(options.seconds)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:WORKERS])  # a core for each, also where there are more
    os.environ.update(TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1")  # of the workers, too
    print(f"| turn | {WORKERS} × `fit` | HogWild | ratio |\n|---|--:|--:|--:|")
    turns = []
    for i in range(options.rounds):
        turns.append((alone(options.seconds), together(options.seconds)))
        show(str(i + 1), *turns[-1])
    show("median", *(statistics.median(each) for each in zip(*turns)))


def show(name, of_fit, of_hogwild):
    """Prints a row."""
    print(f"| {name} | {of_fit:,.0f} | {of_hogwild:,.0f} | {of_hogwild / of_fit:.2f} |", flush=True)


def alone(seconds):
    """Returns the samples per second of all processes by `fit`, which begin when all are ready."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--fit", f"--seconds={seconds}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=launcher.environment(WORKERS),
            text=True,
            start_new_session=True,  # as tasks: Linux shares processor time among sessions (autogroup)
        )
        for _ in range(WORKERS)
    ]
    for process in processes:
        assert process.stdout
        process.stdout.readline()  # it is ready
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in processes)


def fit(seconds):
    """Trains for so many seconds, once there is a line on standard input; prints samples per second."""
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    model, (samples, _) = build(), load()
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), cross_entropy, jit_compile=False)  # XLA, the default, is slower here
    model.fit(*samples, batch_size=BATCH_SIZE, verbose=0)
    print("ready", flush=True)
    sys.stdin.readline()
    steps, began = 0, time.monotonic()

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            nonlocal steps
            steps += 1
            self.model.stop_training = time.monotonic() - began > seconds

    model.fit(*samples, batch_size=BATCH_SIZE, epochs=10**6, verbose=0, callbacks=[Stop()])
    print(steps * BATCH_SIZE / (time.monotonic() - began))


def together(seconds):
    """Returns the samples per second of HogWild."""
    from common import train

    flags = {"window": WINDOW, "batch_size": BATCH_SIZE, "learning_rate": 0.001, "seconds": seconds, "evaluation_secs": 3600}
    with tempfile.TemporaryDirectory() as run_dir:
        run = train("HogWild", build, load, epochs=10**6, num_workers=WORKERS, run_dir=run_dir, verbose=False, **flags)
        if run.result["samples_per_second"] is None:  # the machine is so busy that the first call took longer
            raise UserError(f"no worker reached its second call within --seconds={seconds:g}: give more")
        return run.result["samples_per_second"]


def build():
    """Returns the network, of 999,218 parameters."""
    import keras

    layers, blocks = keras.layers, []
    for filters in 32, 64, 128:
        blocks += [layers.Conv2D(filters, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
    return keras.Sequential(
        [keras.Input([32, 32, 3]), *blocks, layers.Flatten(), layers.Dense(440, activation="relu"), layers.Dense(10)]
    )


def load():
    """Returns 2,048 random images of ten classes, and 64 for the test."""
    import numpy as np

    rng = np.random.default_rng(0)
    return tuple((rng.random([n, 32, 32, 3], np.float32), np.arange(n) % 10) for n in (2048, 64))


if __name__ == "__main__":
    main()
