"""A transformer in plain Keras, which reads a sequence from left to right: what `--model=transformer` builds."""

import keras


def block(x, heads):
    """`[n, time, width]` to the same: each place looks back, and then thinks for itself."""
    layers, width = keras.layers, x.shape[-1]
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    y = layers.Dense(4 * width, activation="relu")(y)
    return x + layers.Dense(width)(y)


def build(length, tokens, classes, layers, width, heads):
    """Returns a `keras.Model` that is not compiled: sequences of whole numbers `[n, length]` to logits `[n, length, classes]`.

    The logits of a place depend on what stands there and before it. All layers are Keras's own, so `keras.models.load_model`
    opens what was saved without this module.

    Args:
      length: of a sequence.
      tokens: how many different numbers there are, 0 to tokens - 1.
      classes: how many different labels.
      layers: how many blocks.
      width: of the vector of a place, a multiple of `heads`.
      heads: of the attention, each of width / heads.
    """
    inputs = keras.Input([length], dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(inputs[0])) - 1  # 0, 1, ..., length - 1
    x = keras.layers.Embedding(tokens, width)(inputs) + keras.layers.Embedding(length, width)(places)
    for _ in range(layers):
        x = block(x, heads)
    return keras.Model(inputs, keras.layers.Dense(classes)(keras.layers.LayerNormalization()(x)))


def size(length, tokens, classes, layers, width):
    """Returns how many parameters such a model has."""
    attention, dense, norm = 4 * (width + 1) * width, (width + 1) * 4 * width + (4 * width + 1) * width, 2 * width
    return (tokens + length) * width + layers * (attention + dense + 2 * norm) + norm + (width + 1) * classes
