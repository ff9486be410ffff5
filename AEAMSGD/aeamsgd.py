"""AEAMSGD: elastic averaging with Nesterov's momentum (Zhang, Choromanska, LeCun 2015, https://arxiv.org/abs/1412.6651)."""

from common import Scheme, UserError, flags, main


def aeamsgd(center, local, hp):
    """T local steps v ← δ v − η g(x + δ v), x ← x + v;  then e = α (x − x̃), x ← x − e, x̃ ← x̃ + e.

    The gradient is taken ahead, where the velocity v alone would lead. The elastic force moves x, not v: v goes on through
    the exchange.

    T is `hp.window`; α = β/n with β = `hp.beta` and n = `hp.num_workers`; where workers come and go, those who are there when x̃
    is read. δ is `hp.momentum`, in the paper 0.99; η is `hp.learning_rate`.
    """
    v = local.vector("velocity")  # zero at first

    def nesterov(g):
        return local.value.assign_add(v.assign(hp.momentum * v - hp.learning_rate * g))

    yield local.train(hp.window, nesterov, at=lambda x: x + hp.momentum * v)  # v ← δ v − η g(x + δ v);  x ← x + v
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
    aeamsgd,
    optimizer_on="worker",
    flags=[
        flags.number("beta", 0.9, "elastic force of all workers together; each exerts beta / n", least=0),
        flags.number("momentum", 0.99, "δ of the local steps", least=0, below=1),
    ],
    check=check,
    epochs=60,
    batch_size=32,
    learning_rate=0.001,
    window=10,
)

if __name__ == "__main__":
    main(SCHEME)
