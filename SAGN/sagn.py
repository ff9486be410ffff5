"""SAGN: synchronous accumulated gradient normalization, after the Distributed TensorFlow Guide."""

from common import Scheme, main, tf


def sagn(center, local, hp):
    """x ← x̃;  T local steps x ← x − η' g(x);  x̃ ← Adam(x̃, (1/n) Σ_i (1/T) Σ_t g_i(x_t)).

    Every worker makes T local steps from the same x̃. Their gradients are averaged over time, each taken where the local walk
    x_t then stood, and over the n workers; the ps makes one step of Adam with the result, and all begin anew from there.

    T is `hp.window`; Adam's step size is `hp.learning_rate`, η' `hp.local_learning_rate`; the local steps are of SGD or of
    another optimizer (`hp.local_optimizer`).
    """
    adam, others = tf.train.AdamOptimizer(hp.learning_rate), center.together(local)
    yield local.pull(center)  # x ← x̃
    yield local.train(hp.window, local.optimizer(hp))  # x ← x − η' g(x), T times
    yield others.push(adam, local.gradient / hp.window)  # x̃ ← Adam(x̃, (1/n) Σ (1/T) Σ g)
    yield others.wait()  # until then


SCHEME = Scheme(
    sagn,
    pace="together",
    epochs=60,
    batch_size=32,
    learning_rate=0.005,
    window=5,
    local_optimizer="sgd",
    local_learning_rate=0.1,
)

if __name__ == "__main__":
    main(SCHEME)
