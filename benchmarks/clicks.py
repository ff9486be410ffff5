"""Samples of 26 ids each, as a recommender has them, and a model with a table: what `tables.py` measures with.

    TABLE_ROWS=10000000 bash DOWNPOUR/run.sh --num_ps=2 --batch_size=512 \\
        --model=benchmarks/clicks.py:model --data=benchmarks/clicks.py:data

Environment variables say what cannot be a flag: TABLE_ROWS, the rows of the table; TABLE_STRIDE, by which every id is
multiplied, so that a large table has as many rows in use as a small one.
"""

import os

import numpy as np

IDS, WIDTH, HIDDEN = 26, 16, 64  # of a sample; of a row; units
SAMPLES, TESTED = 100_000, 2_000
EXPONENT = 1.1  # of Zipf's law
ROWS, STRIDE = int(os.environ.get("TABLE_ROWS", "10000")), int(os.environ.get("TABLE_STRIDE", "1"))


def data():
    """Returns `((ids, labels), (ids, labels))` to train and to test with: int32 `[n, 26]`, int32 `[n]`, 0 or 1."""
    random = np.random.default_rng(0)
    most = ROWS // STRIDE
    # Zipf's law, continuous and cut off at the last row, by its inverse.
    share = 1 - random.random([SAMPLES, IDS]) * (1 - (most + 1.0) ** (1 - EXPONENT))
    ids = np.minimum((share ** (1 / (1 - EXPONENT))).astype(np.int64) - 1, most - 1)
    labels = random.random(SAMPLES) < 1 / (1 + np.exp(-np.sin(1.7 * ids).sum(axis=1)))  # each row has something to learn
    ids, labels = (ids * STRIDE).astype(np.int32), labels.astype(np.int32)
    return (ids[TESTED:], labels[TESTED:]), (ids[:TESTED], labels[:TESTED])


def model():
    """Returns the model: ids → their rows beside each other → 64 units → a logit."""
    import keras

    from common import Embedding

    first = keras.initializers.RandomUniform(-0.05, 0.05, seed=1)
    ids = keras.Input([IDS], dtype="int32")
    rows = keras.layers.Flatten()(Embedding(ROWS, WIDTH, embeddings_initializer=first, name="table")(ids))
    logit = keras.layers.Dense(1)(keras.layers.Dense(HIDDEN, activation="relu")(rows))
    made = keras.Model(ids, logit)
    made.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return made
