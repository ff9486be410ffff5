"""AGN: accumulated gradient normalization (Hermans, Spanakis, Möckel 2017, https://arxiv.org/abs/1710.02368)."""

from common import Scheme, main, tf


def agn(center, local, hp):
    """x ← x̃;  T local steps x ← x − η g(x);  x̃ ← x̃ − (η/T) Σ g(x_t).

    Each gradient g is taken where the local walk x_t then is. The push has the direction of T local steps and the size of
    one. Only the division by T sets it apart from pushing the sum, which is T times as large. In the notebook's replay, with a
    staleness of about n − 1, the sum fails with n = 4 or 8 workers and T = 16. The README's real runs on two cores, with n = 4,
    T = 16 and less staleness, do not show this: they end at a test accuracy of 0.969 with the sum, 0.961 with AGN.

    T is `hp.window`, η `hp.learning_rate`; the local steps are of SGD or of another optimizer (`hp.local_optimizer`).
    """
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield local.pull(center)  # x ← x̃
    yield local.train(hp.window, local.optimizer(hp))  # x ← x − η g(x), T times
    yield center.push(sgd, local.gradient / hp.window)  # x̃ ← x̃ − η (1/T) Σ g


SCHEME = Scheme(agn, epochs=60, batch_size=32, learning_rate=0.1, window=5, local_optimizer="sgd")

if __name__ == "__main__":
    main(SCHEME)
