"""A model that counts the updates of its parameters: for `python tests/chaos.py`."""

import keras


@keras.saving.register_keras_serializable("tests")
class Updates(keras.layers.Layer):
    """Passes its input on. The gradient of its weight is 1: after n updates with SGD that is −n times the learning rate."""

    def build(self, shape):
        self.total = self.add_weight(name="total", shape=(), initializer="zeros", regularizer=lambda total: total)

    def call(self, x):
        return x


def build():
    """`--model=mlp` for the digits, and `Updates`."""
    layers = [keras.layers.Dense(units, activation="relu") for units in (128, 128)]
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers, keras.layers.Dense(10), Updates()])
