"""SparseLoCo: DiLoCo that sends the largest of what has piled up, in 2 bits (Sarfi et al. 2025, https://arxiv.org/abs/2508.15706)."""

from common import Scheme, UserError, flags, main, tf


def sparseloco(center, local, hp):
    """x ← x̃;  H local steps x ← AdamW(x, g(x));  E ← β E + (x̃ − x);  Δ̂ = Q(TopK(E));  E ← E − Δ̂;  x̃ ← x̃ − α (1/n) Σ_i Δ̂^i.

    A worker sends only k of each chunk of values, the largest, and rounds them. It keeps the rest in its E, which shrinks by β
    a round. So E takes the place of an outer momentum; the scheme has none.
    AdamW is Adam whose weight decay is no part of the gradient, x ← x − η' λ x beside it. Its moments stay with the worker.

    H is `hp.window`, η' `hp.local_learning_rate`, λ `hp.weight_decay`, β `hp.error_decay`, α `hp.learning_rate`, k `hp.top` of
    `hp.chunk_size`; Q rounds to `hp.value_bits`, see `common.scheme.pack_sparse`.
    """
    adamw = local.adamw(hp.local_learning_rate, hp.weight_decay)
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)

    others, start, unsent = center.together(local), local.vector("start"), local.vector("unsent")
    yield local.pull(center)  # x ← x̃
    yield local.assign(start, local.value)  # which no one changes until all have come back
    yield local.train(hp.window, adamw)  # x ← AdamW(x, g(x)), H times
    yield local.assign(unsent, hp.error_decay * unsent + (start - local.value))  # E ← β E + (x̃ − x)
    e = unsent.read_value()
    sent = center.sparse(e, hp.chunk_size, hp.top, hp.value_bits)  # Δ̂ = Q(TopK(E))
    # x̃ ← x̃ − α (1/n) Σ Δ̂;  E ← E − Δ̂
    yield others.push(sgd, sent) + local.assign(unsent, e - sent.unpacked())
    yield others.wait()  # until then


def check(settings):
    """Raises a `UserError` for flags that contradict each other."""
    if settings.top > settings.chunk_size:
        raise UserError(f"--top must be at most --chunk_size={settings.chunk_size}, not {settings.top}")
    if settings.compress != "none":
        raise UserError(f"--compress={settings.compress} is for dense messages: choose --top and --value_bits instead")
    if 8 < settings.value_bits < 32:
        raise UserError(f"--value_bits must be 2 to 8, or 32 for values as they are, not {settings.value_bits}")


SCHEME = Scheme(
    sparseloco,
    pace="together",
    optimizer_on="worker",
    flags=[
        flags.integer("chunk_size", 4096, "values in a chunk, of which the largest --top are sent", least=1, most=2**22),
        flags.integer("top", 64, "k: number of values of each chunk that a worker sends", least=1, most=2**22),
        flags.integer("value_bits", 2, "bits of a value that is sent: 2 to 8, or 32 for a float32", least=2, most=32),
        flags.number("error_decay", 0.95, "β: decay of the error feedback in each round", least=0, most=1.0),
        *flags.adamw(),
    ],
    check=check,
    epochs=60,
    batch_size=32,
    learning_rate=1,
    window=10,
)

if __name__ == "__main__":
    main(SCHEME)
