"""Measures asynchronous training with batch normalization: `python benchmarks/batch_normalization.py`.

Trains a residual network with batch normalization on the digits by `fit`, with plain SGD, and by four schemes with two workers,
with as many samples and the learning rates that are the schemes' defaults. The moving means of a worker are those of its own
parameters; the chief estimates them anew at the global ones. Prints a table.
"""

import argparse
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

from common import train
from common.data import datasets

SCHEMES = ("HogWild", "DOWNPOUR", "AEASGD", "DiLoCo")
EPOCHS = 20


def main():
    """Trains, and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1, help="runs of each (default: 1)")
    count = parser.parse_args().seeds
    dataset = datasets.load("digits")
    arrays = (dataset.train, dataset.test)
    print("| | test accuracy | test loss | samples |\n|---|--:|--:|--:|")
    for seed in range(count):
        keras.utils.set_random_seed(seed)
        model = residual_network()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        model.fit(*dataset.train, batch_size=32, epochs=EPOCHS, verbose=0)
        found = model.evaluate(*dataset.test, verbose=0, return_dict=True)
        show("`fit`", found["accuracy"], found["loss"], EPOCHS * dataset.num_samples)
        for scheme in SCHEMES:
            with tempfile.TemporaryDirectory() as run_dir:
                flags = {"epochs": EPOCHS, "num_workers": 2, "seed": seed, "run_dir": run_dir, "verbose": False}
                result = train(scheme, residual_network, arrays, **flags).result
            show(scheme, result["test_accuracy"], result["test_loss"], result["samples"])


def show(name, accuracy, loss, samples):
    """Prints a row."""
    print(f"| {name} | {accuracy:.3f} | {loss:.3f} | {samples:,} |", flush=True)


def residual_network():
    """Returns a network of two residual blocks, four batch normalizations."""
    layers = keras.layers
    inputs = keras.Input([8, 8, 1])
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for i in range(2):
        y = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.Conv2D(16, 3, padding="same", use_bias=False)(y)
        x = layers.ReLU()(layers.Add()([x, layers.BatchNormalization()(y)]))
        x = layers.MaxPooling2D()(x) if i == 0 else layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


if __name__ == "__main__":
    main()
