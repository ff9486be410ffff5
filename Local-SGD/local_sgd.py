"""Local SGD: many local steps, then the mean of the parameters (Stich 2018, https://arxiv.org/abs/1805.09767).

Weighed by samples it is federated averaging (McMahan et al. 2016, https://arxiv.org/abs/1602.05629); with a slow momentum it is
SlowMo (Wang et al. 2019, https://arxiv.org/abs/1910.00643).
"""

from common import Scheme, flags, main, tf


def local_sgd(center, local, hp):
    """x ← x̃;  T local steps x ← x − γ g(x);  x̃ ← Σ_i w_i x^i.

    The n workers walk T steps of SGD from the same x̃, and x̃ becomes their mean: w_i = 1/n, or with `hp.weigh_by_samples` the
    worker's share of all samples. They push x̃ − x^i, whose mean is Δ, or w_i (x̃ − x^i), whose sum is Δ:  x̃ ← x̃ − α Δ. So n is
    that of those who take part in this update. T = 1 is synchronous SGD.

    With a slow momentum β this step has a memory, u:  u ← β u + Δ/γ;  x̃ ← x̃ − α γ u.

    T is `hp.window`, γ `hp.learning_rate`, β `hp.slow_momentum`, α `hp.slow_learning_rate`, 1 for the mean.
    """
    sgd, slow = tf.train.GradientDescentOptimizer(hp.learning_rate), tf.train.GradientDescentOptimizer(hp.slow_learning_rate)
    momentum = tf.train.MomentumOptimizer(hp.slow_learning_rate * hp.learning_rate, hp.slow_momentum)
    others, start = center.together(local, mean=not hp.weigh_by_samples), local.vector("start")
    yield local.pull(center)  # x ← x̃
    yield local.assign(start, local.value)  # which no one changes until all have come back
    yield local.train(hp.window, sgd)  # x ← x − γ g(x), T times
    w = local.share if hp.weigh_by_samples else 1
    if hp.slow_momentum == 0:
        yield others.push(slow, w * (start - local.value))  # x̃ ← x̃ − α Δ, when all have arrived
    else:
        yield others.push(momentum, w * (start - local.value) / hp.learning_rate)  # u ← β u + Δ/γ;  x̃ ← x̃ − α γ u
    yield others.wait()  # until then


SCHEME = Scheme(
    local_sgd,
    pace="together",
    optimizer_on="worker",
    flags=[
        flags.number("slow_momentum", 0, "β of the slow momentum; 0 is local SGD, more is SlowMo", least=0, below=1),
        flags.number("slow_learning_rate", 1, "α, the slow learning rate; 1 takes the mean of the workers", above=0),
        flags.boolean("weigh_by_samples", False, "weight each worker by its share of the samples (FedAvg), not all equally"),
    ],
    epochs=60,
    batch_size=32,
    learning_rate=0.2,
    window=10,
)

if __name__ == "__main__":
    main(SCHEME)
