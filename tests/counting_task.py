"""A scheme that counts: for tests of workers that come and go. x̃ is the number of workers that the last update found."""

from common import Scheme, main, tf


def counting(center, local, hp):
    """x̃ ← n, the number of workers, in every entry."""
    yield local.train(1, tf.train.GradientDescentOptimizer(0.0))
    yield local.compare(center)  # x − x̃, and n
    yield center.add(hp.num_workers - (local.value - local.difference))  # x̃ ← x̃ + (n − x̃)


SCHEME = Scheme(counting, epochs=60, batch_size=32, learning_rate=0.1)

if __name__ == "__main__":
    main(SCHEME)
