"""Synchronous SGD through the ps, with backup workers (Chen et al. 2016, https://arxiv.org/abs/1604.00981)."""

from common import Scheme, UserError, flags, main, tf


def synchronous_sgd(center, local, hp):
    """x ← x̃;  x̃ ← x̃ − η (1/N) Σ g(x), over the first N gradients of this x̃; the rest are dropped.

    All workers take the same x̃, and x̃ changes once, when N of them have given their gradients. With b backup workers N is
    n − b of n workers: the update does not wait for the b slowest, and their late gradients are dropped. With b = 0 each
    worker contributes exactly once to every update.

    η is `hp.learning_rate`, b `hp.backup_workers`.
    """
    sgd, others = tf.train.GradientDescentOptimizer(hp.learning_rate), center.together(local, hp.backup_workers)
    yield local.pull(center)  # x ← x̃
    yield local.train(hp.window, sgd)  # g(x)
    yield others.push(sgd, local.gradient)  # x̃ ← x̃ − η (1/N) Σ g, when N have arrived
    yield others.wait()  # until then


def check(hp):
    """Raises a `UserError` if no worker would be left."""
    if hp.backup_workers >= hp.num_workers:
        raise UserError(f"--backup_workers must be less than the number of workers, {hp.num_workers}, not {hp.backup_workers}")


SCHEME = Scheme(
    synchronous_sgd,
    pace="together",
    flags=[flags.integer("backup_workers", 0, "number of stragglers that an update does not wait for", least=0)],
    check=check,
    without=("window",),
    epochs=60,
    batch_size=32,
    learning_rate=0.2,
)

if __name__ == "__main__":
    main(SCHEME)
