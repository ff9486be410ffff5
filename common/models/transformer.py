"""A causal transformer in plain Keras, the model of `--model=transformer`."""

import keras


def block(x, heads):
    """Returns a pre-norm block, `[n, time, width]` to the same: causal self-attention, then a feed-forward network."""
    layers, width = keras.layers, x.shape[-1]
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    y = layers.Dense(4 * width, activation="relu")(y)
    return x + layers.Dense(width)(y)


def build(length, tokens, classes, layers, width, heads):
    """Returns a `keras.Model` that is not compiled: sequences of whole numbers `[n, length]` to logits `[n, length, classes]`.

    The logits of a position depend on the tokens up to and including it. All layers are Keras's own, so
    `keras.models.load_model` opens saved models without this module.

    Args:
      length: length of a sequence.
      tokens: vocabulary size; tokens are 0 to tokens - 1.
      classes: number of classes.
      layers: number of blocks.
      width: width of a position's vector, a multiple of `heads`.
      heads: number of attention heads, each of width / heads.
    """
    inputs = keras.Input([length], dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(inputs[0])) - 1  # 0, 1, ..., length - 1
    x = keras.layers.Embedding(tokens, width)(inputs) + keras.layers.Embedding(length, width)(places)
    for _ in range(layers):
        x = block(x, heads)
    return keras.Model(inputs, keras.layers.Dense(classes)(keras.layers.LayerNormalization()(x)))


def size(length, tokens, classes, layers, width):
    """Returns the number of parameters of such a model."""
    attention, dense, norm = 4 * (width + 1) * width, (width + 1) * 4 * width + (4 * width + 1) * width, 2 * width
    return (tokens + length) * width + layers * (attention + dense + 2 * norm) + norm + (width + 1) * classes
