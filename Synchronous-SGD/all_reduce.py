"""Synchronous SGD by all-reduce: the workers average their gradients among themselves, without a ps between them."""

from common import Scheme, main, tf


def all_reduce(center, local, hp):
    """x ← x − η (1/n) Σ g_i(x), on every worker.

    All begin with the same x and add the same mean to it, so x stays the same on all of them. The ps takes no part: it gets
    what the first worker has, once in a while, for others to read and to be saved.

    η is `hp.learning_rate`; a call of the session makes `hp.steps_per_call` steps.
    """
    sgd, ring = tf.train.GradientDescentOptimizer(hp.learning_rate), center.ring(local)
    yield local.train(hp.steps_per_call, lambda g: local.apply(sgd, ring.mean(g)))  # x ← x − η (1/n) Σ g_i(x)
    yield ring.publish(hp.steps_per_call)  # x̃ ← x


SCHEME = Scheme(
    all_reduce, pace="ring", optimizer_on="worker", without=("window",), epochs=60, batch_size=32, learning_rate=0.2
)

if __name__ == "__main__":
    main(SCHEME)
