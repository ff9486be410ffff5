"""DC-ASGD: asynchronous SGD with delay compensation (Zheng et al. 2017, https://arxiv.org/abs/1609.08326)."""

from common import Scheme, flags, main, tf


def dc_asgd(center, local, hp):
    """x ← x̃;  x̃ ← x̃ − η (g + λ g⊙g⊙(x̃ − x)).

    g = g(x) was taken at x, which this worker pulled; by the time it is applied others have moved x̃ away from there. The
    term with λ estimates, to first order, how the gradient changed on the way: g⊙g stands for the diagonal of the Hessian.
    The ps keeps for each worker the x that it pulled, and computes the term with the x̃ that it finds.

    Constant λ: λ = λ₀. Adaptive: λ = λ₀/√(m + ε), where m ← ρ m + (1 − ρ) g⊙g is kept on the ps. η is `hp.learning_rate`,
    λ₀ `hp.lambda0`, by default the paper's 0.04 and 2, ρ `hp.mean_square_decay`. With `hp.window` T > 1, g is the sum of
    the gradients along T local steps of SGD.
    """

    def compensated(g, at_update):
        strength = hp.lambda0 if hp.lambda0 is not None else 2.0 if hp.adaptive else 0.04
        if hp.adaptive:
            m, decay = at_update.slot("mean_square"), hp.mean_square_decay
            strength /= tf.sqrt(m.assign(decay * m + (1 - decay) * g * g) + 1e-7)
        return g + strength * g * g * (at_update.value - at_update.pulled)  # on the ps

    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    exact = center.exact(local, remember="value")
    yield exact.pull()  # x ← x̃
    yield local.train(hp.window, sgd)  # g(x)
    yield exact.push(sgd, local.gradient, compensated)  # x̃ ← x̃ − η (g + λ g⊙g⊙(x̃ − x))


SCHEME = Scheme(
    dc_asgd,
    flags=[
        flags.boolean("adaptive", False, "adapt λ to the size of the gradients, element by element"),
        flags.number("lambda0", None, "strength of the compensation (default: 0.04; 2 with --adaptive)", least=0),
        flags.number("mean_square_decay", 0.95, "with --adaptive: decay of the mean square of the gradients", least=0, below=1),
    ],
    epochs=60,
    batch_size=32,
    learning_rate=0.1,
)

if __name__ == "__main__":
    main(SCHEME)
