"""Semi-synchronous SGD: stale synchronous parallel (Ho et al. 2013, NIPS, "SSP")."""

from common import Scheme, flags, main, tf


def semi_synchronous_sgd(center, local, hp):
    """Wait until c − min_j c_j ≤ s;  x ← x̃;  x̃ ← x̃ − η g(x);  c ← c + 1.

    Every worker has a clock c that ticks once a step. It goes at its own pace as long as it is at most s steps ahead of the
    slowest; so x misses no update that is more than s steps old. s = 0 keeps all in step, s = ∞ is HogWild.

    s is `hp.staleness`, η `hp.learning_rate`. With `hp.issync` the gradients of a step are averaged and applied at once, all
    taken at the same x̃: synchronous SGD.
    """
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    if hp.issync:
        others = center.together(local)
        yield local.pull(center)  # x ← x̃
        yield local.train(hp.window, sgd)  # g(x)
        yield others.push(sgd, local.gradient)  # x̃ ← x̃ − η (1/n) Σ g, when all have arrived
        yield others.wait()  # until then
    else:
        pace = center.pace(local, hp.staleness)
        yield pace.wait()  # until c − min c ≤ s
        yield local.pull(center)  # x ← x̃
        yield local.train(hp.window, sgd)  # g(x)
        yield center.push(sgd, local.gradient)  # x̃ ← x̃ − η g(x)
        yield pace.tick()  # c ← c + 1


SCHEME = Scheme(
    semi_synchronous_sgd,
    pace="together",
    flags=[
        flags.number(
            "staleness", 10, "s: most steps that a worker may be ahead of the slowest; inf: no limit", least=0, finite=False
        ),
        flags.boolean("issync", False, "average the gradients of all workers in every step: synchronous SGD"),
    ],
    epochs=60,
    batch_size=32,
    learning_rate=0.1,
)

if __name__ == "__main__":
    main(SCHEME)
