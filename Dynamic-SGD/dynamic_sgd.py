"""Dynamic SGD: the staler a push, the less it counts (Zhang, Gupta, Lian, Liu 2015, https://arxiv.org/abs/1511.05950; the
divisor τ + 1 is that of dist-keras's "DynSGD")."""

from common import Scheme, main, tf


def dynamic_sgd(center, local, hp):
    """x ← x̃;  T local steps x ← x − η g(x), u = η Σ g;  x̃ ← x̃ − u/(τ + 1).

    τ, the staleness of a push, is the number of updates by others since this worker's pull. The ps counts it: it remembers
    at which update each worker pulled. Counting, scaling and applying are one indivisible action, over all ps tasks, and so
    is the pull; τ is exactly what came in between.

    T is `hp.window`, η `hp.learning_rate`; the local steps are of SGD or of another optimizer (`hp.local_optimizer`).
    """

    def scaled(gradient, at_update):
        return gradient / (at_update.staleness + 1)  # on the ps

    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    exact = center.exact(local, remember="step")
    yield exact.pull()  # x ← x̃
    yield local.train(hp.window, local.optimizer(hp))  # x ← x − η g(x), T times
    yield exact.push(sgd, local.gradient, scaled)  # x̃ ← x̃ − η (Σ g)/(τ + 1)


SCHEME = Scheme(dynamic_sgd, epochs=60, batch_size=32, learning_rate=0.1, local_optimizer="sgd")

if __name__ == "__main__":
    main(SCHEME)
