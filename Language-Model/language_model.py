"""A language model: a small transformer that learns which character follows, and how a trained one writes.

Copy it for a problem of your own: `build` is what `--model` names. The data, `--data=text`, come with this project; those of
your own are a second function, as `--data=language_model.py:load`.
"""

import keras
import numpy as np

from common import data

LENGTH = 64  # characters in a window


@keras.saving.register_keras_serializable("language_model")
class Places(keras.layers.Layer):
    """Adds a vector for each place in the window, which is learned: attention alone does not know what comes first."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x):
        return x + self.vectors


@keras.saving.register_keras_serializable("language_model")
class Perplexity(keras.metrics.SparseCategoricalCrossentropy):
    """exp of the mean cross-entropy: of how many characters, all as likely, the model would be as unsure."""

    def result(self):
        return keras.ops.exp(super().result())


def block(x, heads):
    """`[n, time, width]` to the same: each character looks back, and then thinks for itself."""
    layers, width = keras.layers, x.shape[-1]
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    y = layers.Dense(4 * width, activation="relu")(y)
    return x + layers.Dense(width)(y)


def build(width=128, blocks=2, heads=4):
    """Returns the model, compiled: from places in the alphabet `[n, LENGTH]` to logits of the
    next character `[n, LENGTH, 96]`.
    """
    layers, size = keras.layers, len(data.ALPHABET)
    inputs = keras.Input([LENGTH])
    x = Places()(layers.Embedding(size, width)(inputs))
    for _ in range(blocks):
        x = block(x, heads)
    model = keras.Model(inputs, layers.Dense(size)(layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=[Perplexity("perplexity", from_logits=True)])
    return model


def write(model, prompt, count=300, temperature=0.5, seed=0):
    """Returns the prompt and `count` more characters, each drawn from what the model expects after those before it.

    Args:
      model: a trained one.
      prompt: a string of one character at least.
      temperature: at 1 as the model expects them; the lower, the more often only the likeliest.
      seed: of the choice.
    """
    rng, codes = np.random.default_rng(seed), list(data.encoded(prompt))
    for _ in range(count):
        seen = codes[-LENGTH:]
        x = np.zeros([1, LENGTH], np.float32)  # what stands after `seen` is not looked at
        x[0, : len(seen)] = seen
        logits = model.predict_on_batch(x)[0, len(seen) - 1] / temperature
        p = np.exp(logits - logits.max(), dtype=np.float64)
        codes.append(rng.choice(len(p), p=p / p.sum()))
    return data.decoded(codes)
