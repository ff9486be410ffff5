"""DiLoCo: many local steps of AdamW, then one of Nesterov for all (Douillard et al. 2023, https://arxiv.org/abs/2311.08105)."""

from common import Scheme, flags, main, tf


def diloco(center, local, hp):
    """x ← x̃;  H local steps x ← AdamW(x, g(x));  Δ = (1/n) Σ_i (x̃ − x^i);  x̃ ← Nesterov(x̃, Δ).

    The outer step takes how far the n workers have come on average for a gradient: v ← μ v + Δ;  x̃ ← x̃ − η (Δ + μ v).
    AdamW is Adam whose weight decay is no part of the gradient, x ← x − η' λ x beside it. Its moments stay with the worker.

    H is `hp.window`, η' `hp.local_learning_rate`, λ `hp.weight_decay`, η `hp.learning_rate`, μ `hp.momentum`.
    """
    adamw = local.adamw(hp.local_learning_rate, hp.weight_decay)
    nesterov = tf.train.MomentumOptimizer(hp.learning_rate, hp.momentum, use_nesterov=True)

    others, start = center.together(local), local.vector("start")
    yield local.pull(center)  # x ← x̃
    yield local.assign(start, local.value)  # which no one changes until all have come back
    yield local.train(hp.window, adamw)  # x ← AdamW(x, g(x)), H times
    yield others.push(nesterov, start - local.value)  # x̃ ← Nesterov(x̃, (1/n) Σ (x̃ − x))
    yield others.wait()  # until then


SCHEME = Scheme(
    diloco,
    pace="together",
    optimizer_on="worker",
    flags=[
        flags.number("momentum", 0.9, "μ of the outer step", least=0, below=1),
        *flags.adamw(),
    ],
    epochs=60,
    batch_size=32,
    learning_rate=0.7,
    window=10,
)

if __name__ == "__main__":
    main(SCHEME)
