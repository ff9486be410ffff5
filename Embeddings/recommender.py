"""A recommender: a row of numbers for each user and each item, and whether they fit. `build` is what `--model` names."""

import keras
from ratings import FACTORS, MADE_OF

from common import Embedding


def build(users=MADE_OF["users"], items=MADE_OF["items"], width=FACTORS):
    """Returns the model, compiled: from {"user": ids `[n]`, "item": ids `[n]`} to logits `[n, 1]`, of u·v + b at first.

    Args:
      users, items: rows of the two tables.
      width: numbers in the row of a user, u; the row of an item has one more, b.
    """
    starts = [keras.initializers.RandomNormal(stddev=0.3) for _ in range(2)]  # each has a seed of its own
    user, item = (keras.Input([], dtype="int32", name=name) for name in ("user", "item"))
    u = Embedding(users, width, embeddings_initializer=starts[0], name="users")(user)
    v = Embedding(items, width + 1, embeddings_initializer=starts[1], name="items")(item)
    products = keras.layers.Concatenate()([u * v[:, :width], v[:, width:]])
    outputs = keras.layers.Dense(1, kernel_initializer="ones", name="sum")(products)
    model = keras.Model({"user": user, "item": item}, outputs)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile("adagrad", loss, metrics=[keras.metrics.AUC(from_logits=True, name="auc")])
    return model
