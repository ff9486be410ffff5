"""Baselines for a loss: models that count, and learn nothing else. Prints a table."""

import numpy as np

from common.data import ALPHABET, datasets


def counted(counts, text):
    """Returns loss and accuracy on the test set of probabilities in proportion to these counts.

    Args:
      counts: `[96, 96]`, a row for the character before, greater than 0.
      text: a `common.data.Data`.

    Returns:
      The mean of −ln p, in nats for a character, and how often the likeliest character was the right one.
    """
    p = counts / counts.sum(axis=1, keepdims=True)
    x, y = text.x_test, text.y_test
    return -np.log(p[x, y]).mean(), (p.argmax(axis=1)[x] == y).mean()


def baselines(text):
    """Returns {name: (loss, accuracy)} of three models that need no training, and at most count in the training set."""
    size = len(ALPHABET)
    pairs = np.full([size, size], 0.1)  # not 0: what was never seen may come
    np.add.at(pairs, (text.x_train, text.y_train), 1)
    single = np.tile(pairs.sum(axis=0), [size, 1])
    models = {
        "uniform": np.ones_like(pairs),
        "unigrams": single,
        "bigrams": pairs,
    }
    return {name: counted(counts, text) for name, counts in models.items()}


if __name__ == "__main__":
    print("| model | test loss, nats per character | perplexity | test accuracy |\n|---|--:|--:|--:|")
    for name, (loss, accuracy) in baselines(datasets.load("text")).items():
        print(f"| {name} | {loss:.4f} | {np.exp(loss):.1f} | {accuracy:.3f} |")
