"""Models of the benchmark of large models: an MLP of two equal hidden layers for the digits, and its number of parameters."""

WIDTHS = {1: 963, 5: 2199, 25: 5000, 100: 9963}  # {millions of parameters: units of each hidden layer}


def _mlp(millions):
    import keras

    dense, width = keras.layers.Dense, WIDTHS[millions]
    hidden = [dense(width, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *hidden, dense(10)])


def millions_1():
    """Returns the model of a million parameters."""
    return _mlp(1)


def millions_5():
    """Returns the model of five million parameters."""
    return _mlp(5)


def millions_25():
    """Returns the model of 25 million parameters."""
    return _mlp(25)


def millions_100():
    """Returns the model of 100 million parameters."""
    return _mlp(100)
