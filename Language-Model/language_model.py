"""A language model: a small transformer that learns which character follows, its measure, and how a trained one writes.

Copy it for a problem of your own: `build` is what `--model` names. The transformer and the data, `--data=text`, come with this
project; a model of your own is what `build` returns, and data of your own are a second function, as
`--data=language_model.py:load`.
"""

import keras
import numpy as np

from common.data import ALPHABET, decoded, encoded
from common.models import transformer

LENGTH = 64  # characters in a window


@keras.saving.register_keras_serializable("language_model")
class Perplexity(keras.metrics.SparseCategoricalCrossentropy):
    """exp of the mean cross-entropy: of how many characters, all as likely, the model would be as unsure."""

    def result(self):
        return keras.ops.exp(super().result())


def build(layers=2, width=128, heads=4):
    """Returns the model, compiled: from places in the alphabet `[n, LENGTH]` to logits of the
    next character `[n, LENGTH, 96]`.
    """
    size = len(ALPHABET)
    model = transformer.build(LENGTH, size, size, layers, width, heads)
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
    rng, codes = np.random.default_rng(seed), list(encoded(prompt))
    for _ in range(count):
        seen = codes[-LENGTH:]
        x = np.zeros([1, LENGTH], np.float32)  # what stands after `seen` is not looked at
        x[0, : len(seen)] = seen
        logits = model.predict_on_batch(x)[0, len(seen) - 1] / temperature
        p = np.exp(logits - logits.max(), dtype=np.float64)
        codes.append(rng.choice(len(p), p=p / p.sum()))
    return decoded(codes)
