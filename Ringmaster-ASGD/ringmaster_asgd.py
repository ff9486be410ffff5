"""Ringmaster ASGD: stale gradients are thrown away (Maranjyan, Tyurin, Richtárik 2025, https://arxiv.org/abs/2501.16168)."""

from common import Scheme, flags, main, tf


def ringmaster_asgd(center, local, hp):
    """x ← x̃;  x̃ ← x̃ − η g(x) if τ < R, else nothing.

    τ, the staleness of a gradient, is the number of updates by others since this worker's pull. The ps counts it, and decides:
    counting and applying are one indivisible action, over all ps tasks, and so is the pull. In both cases the worker begins
    anew from the present x̃. A gradient that the ps throws away is no update, and makes no other gradient stale.
    R = 1 applies only fresh gradients, R = ∞ is HogWild.

    R is `hp.staleness_threshold`, η `hp.learning_rate`. With `hp.window` T > 1, g is the sum of the gradients along T local
    steps of SGD.
    """
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    exact = center.exact(local, remember="step", threshold=hp.staleness_threshold)
    yield exact.pull()  # x ← x̃
    yield local.train(hp.window, sgd)  # g(x)
    yield exact.push(sgd, local.gradient)  # x̃ ← x̃ − η g(x), if τ < R


SCHEME = Scheme(
    ringmaster_asgd,
    flags=[
        flags.number(
            "staleness_threshold", 10, "R: gradients of this staleness or more are discarded; inf: none", least=1, finite=False
        )
    ],
    epochs=60,
    batch_size=32,
    learning_rate=0.1,
)

if __name__ == "__main__":
    main(SCHEME)
