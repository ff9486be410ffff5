"""SlowMo: local SGD with slow momentum (Wang, Tantia, Ballas, Rabbat 2020, https://arxiv.org/abs/1910.00643)."""

from common import Scheme, flags, main, tf


def slowmo(center, local, hp):
    """x ← x̃;  T local steps x ← x − γ g(x);  u ← β u + (x̃ − (1/n) Σ_i x^i) / γ;  x̃ ← x̃ − α γ u.

    The n workers walk T steps of SGD from the same x̃. The way back from where they are on average, in units of γ, is the
    gradient of one step of momentum. u lies on the ps and is zero at first.

    T is `hp.window`, γ `hp.learning_rate`, α `hp.slow_learning_rate`, β `hp.slow_momentum`. β = 0 and α = 1 is local SGD:
    x̃ becomes the mean of the workers.
    """
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    momentum = tf.train.MomentumOptimizer(hp.slow_learning_rate * hp.learning_rate, hp.slow_momentum)
    others, start = center.together(local), local.vector("start")
    yield local.pull(center)  # x ← x̃
    yield local.assign(start, local.value)  # which no one changes until all have come back
    yield local.train(hp.window, sgd)  # x ← x − γ g(x), T times
    yield others.push(momentum, (start - local.value) / hp.learning_rate)  # u ← β u + mean;  x̃ ← x̃ − α γ u
    yield others.wait()  # until then


SCHEME = Scheme(
    slowmo,
    pace="together",
    optimizer_on="worker",
    flags=[
        flags.number("slow_momentum", 0.5, "β of the slow momentum", least=0, below=1),
        flags.number("slow_learning_rate", 1, "α, the slow learning rate", above=0),
    ],
    epochs=60,
    batch_size=32,
    learning_rate=0.1,
    window=10,
)

if __name__ == "__main__":
    main(SCHEME)
