"""HogWild: lock-free asynchronous SGD (Niu, Recht, Ré, Wright 2011, https://arxiv.org/abs/1106.5730)."""

from common import tf
from common.main import main


def hogwild(center, local, hp):
    """x ← x̃;  x̃ ← x̃ − η g(x).

    Every worker repeats this at its own pace. Nothing is locked: between a worker's read of the global parameters x̃ and its
    write others may write, so the gradient g may be taken at parameters x that are stale; and a read may see some pieces of
    x̃ before, others after another worker's write.

    The learning rate η is `hp.learning_rate`. With `hp.window` T > 1, g is the sum of the gradients along T local steps.
    """
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield local.pull(center)  # x ← x̃
    yield local.train(hp.window, sgd)  # g(x)
    yield center.push(sgd, local.gradient)  # x̃ ← x̃ − η g(x)


if __name__ == "__main__":
    main(hogwild, epochs=60, batch_size=32, learning_rate=0.1)
