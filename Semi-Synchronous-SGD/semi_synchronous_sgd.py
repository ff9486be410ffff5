"""Semi-synchronous SGD: stale synchronous parallel (Ho et al. 2013, NIPS, "SSP")."""

from absl import flags

from common import tf
from common.flags import define_number
from common.main import main


def semi_synchronous_sgd(center, local, hp):
    """Wait until c − min_j c_j ≤ s;  x ← x̃;  x̃ ← x̃ − η g(x);  c ← c + 1.

    Every worker has a clock c that ticks once a step. It goes at its own pace as long as it is at most s steps ahead of the
    slowest; so x misses no update that is more than s steps old. s = 0 keeps all in step, s = ∞ is HogWild.

    s is `hp.staleness`, η `hp.learning_rate`. With `hp.issync` the gradients of a step are averaged and applied at once, all
    taken at the same x̃: synchronous SGD.
    """
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield center.wait(local, 0 if hp.issync else hp.staleness)  # until c − min c ≤ s
    yield local.pull(center)  # x ← x̃
    yield local.train(hp.window, sgd)  # g(x)
    if hp.issync:
        yield center.push_together(sgd, local.gradient, local)  # x̃ ← x̃ − η (1/n) Σ g;  c ← c + 1
        yield center.wait(local)
    else:
        yield center.push(sgd, local.gradient)  # x̃ ← x̃ − η g(x)
        yield center.tick(local)  # c ← c + 1


if __name__ == "__main__":
    define_number(
        "staleness", 10, "s, how many steps a worker may be ahead of the slowest; inf is no limit", least=0, finite=False
    )
    flags.DEFINE_bool("issync", False, "average the gradients of all workers in every step: synchronous SGD")
    main(semi_synchronous_sgd, without=("warm_start_steps",), epochs=60, batch_size=32, learning_rate=0.1)
