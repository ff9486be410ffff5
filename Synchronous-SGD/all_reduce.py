"""Synchronous SGD by all-reduce: the workers average their gradients among themselves, without a ps between them."""

from common import tf
from common.main import main


def all_reduce(center, local, hp):
    """x ← x − η (1/n) Σ g_i(x), on every worker.

    All begin with the same x and add the same mean to it, so x stays the same on all of them. The ps takes no part: it gets
    what the first worker has, once in a while, for others to read and to be saved.

    η is `hp.learning_rate`; a call of the session makes `hp.window` steps.
    """
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield local.train(hp.window, lambda g: local.apply(sgd, local.all_reduce(g)))  # x ← x − η (1/n) Σ g_i(x)
    yield center.follow(local, hp.window)  # x̃ ← x


if __name__ == "__main__":
    main(all_reduce, without=("window", "warm_start_steps"), lockstep=True, epochs=60, batch_size=32, learning_rate=0.2)
