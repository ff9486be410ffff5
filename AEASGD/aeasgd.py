"""AEASGD: asynchronous elastic averaging SGD (Zhang, Choromanska, LeCun 2015, https://arxiv.org/abs/1412.6651)."""

from common import Scheme, UserError, flags, main


def aeasgd(center, local, hp):
    """T local steps x ← x − η g(x);  then e = α (x − x̃), x ← x − e, x̃ ← x̃ + e.

    Nothing is pulled: x goes on from where it is. An elastic force draws it and the center x̃ to each other; e is computed
    once, from the old values of both. The replicas stay apart, each explores on its own, and the center, which is what is
    evaluated, follows their mean.

    T is `hp.window`; α = β/n with β = `hp.beta`, as in the paper, and n = `hp.num_workers`; where workers come and go, those
    who are there when x̃ is read. η is `hp.learning_rate`, and the local steps are of SGD or of another optimizer
    (`hp.local_optimizer`).
    """
    yield local.train(hp.window, local.optimizer(hp))  # x ← x − η g(x), T times
    yield local.compare(center)  # reads x̃, for x − x̃, and where workers come and go n
    e = hp.beta / hp.num_workers * local.difference
    yield center.add(e) + local.add(-e)  # x̃ ← x̃ + e;  x ← x − e


def check(settings):
    """Raises a `UserError` if the force would throw a worker past the center."""
    n = 1 if settings.max_workers else settings.num_workers
    if settings.beta > n:
        least = "as few as 1 with --max_workers" if settings.max_workers else n
        raise UserError(
            f"--beta must be at most the number of workers, {least}, not {settings.beta:g}: a worker would overshoot the center"
        )


SCHEME = Scheme(
    aeasgd,
    optimizer_on="worker",
    flags=[flags.number("beta", 0.9, "elastic force of all workers together; each exerts beta / n", least=0)],
    check=check,
    epochs=60,
    batch_size=32,
    learning_rate=0.1,
    window=10,
    local_optimizer="sgd",
)

if __name__ == "__main__":
    main(SCHEME)
