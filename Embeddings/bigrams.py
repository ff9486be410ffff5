"""Which character follows in a text, from one character and, in a hashed table, the pair with the one before it.

`bash HogWild/run.sh --data=text --model=Embeddings/bigrams.py:build --learning_rate=5 --table_optimizer=rowwise_adagrad`
"""

import keras

from common import Embedding
from common.data import ALPHABET

TOKENS = len(ALPHABET)


def hashed(pairs, buckets):
    """Returns the row of each pair of characters, one number 0 to TOKENS² − 1, int32: pairs may share a row.

    The multiplier is a prime, below 2³¹ / TOKENS², so that neighbours lie apart and nothing overflows.
    """
    return pairs * 199_999 % 1_000_003 % buckets


def build(buckets=4096):
    """Returns the model, not compiled: from places in the alphabet `[n, 64]` to logits of what follows each, `[n, 64, TOKENS]`.

    Args:
      buckets: rows of the table of pairs; 0 leaves it out: then it is `--model=linear`.
    """
    x = keras.Input([64], dtype="int32")
    logits = keras.layers.Embedding(TOKENS, TOKENS, embeddings_initializer="zeros", name="characters")(x)
    if buckets:
        before = keras.ops.concatenate([keras.ops.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
        ids = hashed(before * TOKENS + x, buckets)
        logits += Embedding(buckets, TOKENS, embeddings_initializer="zeros", name="pairs")(ids)
    return keras.Model(x, logits)


def without_pairs():
    """The same model without the table of pairs."""
    return build(0)
