"""DOWNPOUR SGD, plain SGD on the worker and Adagrad on the ps (Dean et al. 2012, NIPS, appendix 7.1)."""

from common import Scheme, main, tf


def downpour_easy(center, local, hp):
    """x ← x̃;  T times a ← a + g(x), x ← x − η g(x);  x̃ ← Adagrad(x̃, a).

    A worker makes T local steps of SGD and pushes the sum a of their gradients: T times fewer messages a sample. The ps
    applies it with Adagrad, element by element:  s ← s + a²;  x̃ ← x̃ − η a/√s.  An element to which large sums are pushed,
    or many, gets a large s, and so short steps. The slots s are on the ps beside x̃, shared by all workers.

    T is `hp.window`, the paper's n_push = n_fetch; η is `hp.learning_rate`.
    """
    sgd, adagrad = tf.train.GradientDescentOptimizer(hp.learning_rate), tf.train.AdagradOptimizer(hp.learning_rate)
    yield local.pull(center)  # x ← x̃
    yield local.train(hp.window, sgd)  # x ← x − η g(x), T times;  a = Σ g
    yield center.push(adagrad, local.gradient)  # x̃ ← Adagrad(x̃, a)


SCHEME = Scheme(downpour_easy, epochs=60, batch_size=32, learning_rate=0.1, window=5)

if __name__ == "__main__":
    main(SCHEME)
