"""Streaming DiLoCo: a fragment at a time, while training goes on (Douillard et al. 2025, https://arxiv.org/abs/2501.18512)."""

from common import Scheme, UserError, flags, main, tf


def streaming_diloco(center, local, hp):
    """x is cut into P fragments. In turn, for fragment p:

        T − τ local steps  x ← AdamW(x, g(x))
        send               Δ_p^i = x̃_p − x_p^i, with the x̃_p that came back last
        τ local steps      while it is on its way;  x̃_p ← Nesterov(x̃_p, (1/n) Σ_i Δ_p^i)
        receive, and mix   x_p ← α x_p + (1 − α) x̃_p

    So there is an exchange every T steps, and one of the same fragment every H = P T steps. α = 0 takes x̃_p and forgets the τ
    steps, α = 1 keeps x_p and takes nothing of the others. P = 1, τ = 0, α = 0 is DiLoCo.

    T is `hp.window`, P `hp.fragments`, τ `hp.overlap_steps`, α `hp.mixing`; the others are those of DiLoCo.
    """
    adamw = local.adamw(hp.local_learning_rate, hp.weight_decay)
    nesterov = tf.train.MomentumOptimizer(hp.learning_rate, hp.momentum, use_nesterov=True)

    others, x, known = center.together(local), local.value, local.copy("known")  # both begin as x̃
    for p in range(hp.fragments):
        own = center.fragment(p)
        if hp.window > hp.overlap_steps:
            yield local.train(hp.window - hp.overlap_steps, adamw)  # x ← AdamW(x, g(x)), T − τ times
        yield others.send(p, nesterov, known[own] - x[own])  # Δ_p; x̃_p ← Nesterov(x̃_p, (1/n) Σ Δ_p), when all have arrived
        if hp.overlap_steps:
            yield local.train(hp.overlap_steps, adamw)  # τ times; nobody waits for the wire meanwhile
        yield others.receive(p, known)  # x̃_p is in `known`, when all have sent theirs
        yield local.assign(x, hp.mixing * x[own] + (1 - hp.mixing) * known[own], own)  # x_p ← α x_p + (1 − α) x̃_p


def check(hp):
    """Raises a `UserError` if an exchange would take longer than until the next one."""
    if hp.overlap_steps > hp.window:
        raise UserError(
            f"--overlap_steps must be at most --window={hp.window}, the local steps between two exchanges, not "
            f"{hp.overlap_steps}: only one exchange may be in flight"
        )


SCHEME = Scheme(
    streaming_diloco,
    pace="together",
    optimizer_on="worker",
    flags=[
        flags.integer("fragments", 2, "P: number of fragments of the parameters, exchanged in turn", least=1, most=64),
        flags.integer("overlap_steps", 2, "τ: local steps during which an exchange is in flight, at most the window", least=0),
        flags.number("mixing", 0.5, "α of x ← α x + (1 − α) x̃ at the end of an exchange; 0 takes x̃", least=0, most=1),
        flags.number("momentum", 0.9, "μ of the outer step", least=0, below=1),
        *flags.adamw(),
    ],
    check=check,
    epochs=60,
    batch_size=32,
    learning_rate=0.7,
    window=5,
)

if __name__ == "__main__":
    main(SCHEME)
