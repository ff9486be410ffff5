"""Asynchronous DiLoCo: each worker's steps count when they arrive, their momentum later (Liu et al. 2024,
https://arxiv.org/abs/2401.09135)."""

from common import Scheme, UserError, flags, main, tf


def asynchronous_diloco(center, local, hp):
    """x ← x̃;  H local steps x ← AdamW(x, g(x));  Δ = x̃ as pulled − x;  x̃ ← delayed Nesterov(x̃, Δ).

    Nobody waits: how far one worker has come is a gradient by itself. Its N-th part counts at once, and the momentum m learns
    of N of them together:  S ← S + Δ;  at each N-th arrival m ← β m + S/N, S ← 0;  x̃ ← x̃ − ε (Δ/N + a β m) with a = 1 − c N + c
    at the N-th arrival and a = c at the others. With c = 0, N arrivals move x̃ by one step of Nesterov with their mean.

    With `hp.dynamic_steps`, H_i = max(1, ⌊H v_i / max_j v_j⌋) is for worker i, whose local steps have the speed v_i.

    H is `hp.window`, AdamW as in DiLoCo, ε `hp.learning_rate`, β `hp.momentum`, N `hp.buffer_size`, by default the number of
    workers, c `hp.momentum_activation`.
    """
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    adamw = local.adamw(hp.local_learning_rate, hp.weight_decay)
    N, c, beta = hp.buffer_size or hp.num_workers, hp.momentum_activation, hp.momentum

    def delayed_nesterov(delta, at_update):
        m, S = at_update.slot("momentum"), at_update.slot("sum")
        is_nth, total = tf.equal(at_update.number % N, 0), S + delta
        new_m = m.assign(tf.where_v2(is_nth, beta * m + total / N, m))
        with tf.control_dependencies([S.assign(tf.where_v2(is_nth, tf.zeros_like(total), total))]):
            return delta / N + tf.where_v2(is_nth, 1 - c * N + c, c) * beta * new_m  # on the ps

    exact, start = center.exact(local, remember="step"), local.vector("start")
    dynamic = center.dynamic(local, hp.window) if hp.dynamic_steps else None
    yield exact.pull()  # x ← x̃
    if dynamic:
        yield dynamic.choose()  # H_i ← max(1, ⌊H v_i / max_j v_j⌋)
    yield local.assign(start, local.value)  # x̃ as pulled: others change it meanwhile
    yield local.train(dynamic.steps if dynamic else hp.window, adamw)  # x ← AdamW(x, g(x)), H times
    yield exact.push(sgd, start - local.value, delayed_nesterov)  # x̃ ← x̃ − ε (Δ/N + a β m)


def check(settings):
    """Raises a `UserError` if c is more than 1/N, or a schedule would not know its end."""
    n = settings.buffer_size or settings.num_workers
    if settings.dynamic_steps and (settings.learning_rate_schedule or settings.warmup_steps):
        raise UserError(
            "--dynamic_steps: the number of updates is not known in advance, so the learning rate cannot follow a schedule"
        )
    if settings.momentum_activation * n > 1:
        raise UserError(f"--momentum_activation must be at most 1/N = {1 / n:g}, not {settings.momentum_activation:g}")


SCHEME = Scheme(
    asynchronous_diloco,
    optimizer_on="worker",
    flags=[
        flags.integer("buffer_size", None, "N: momentum at every N-th arrival (default: the number of workers)", least=1),
        flags.number("momentum_activation", 0, "c: share of the momentum applied at each arrival, at most 1/N", least=0),
        flags.boolean("dynamic_steps", False, "fewer local steps than H on a straggler, so that all rounds take about as long"),
        flags.number("momentum", 0.5, "β of the outer step", least=0, below=1),
        *flags.adamw(),
    ],
    check=check,
    epochs=60,
    batch_size=32,
    learning_rate=0.7,
    window=10,
)

if __name__ == "__main__":
    main(SCHEME)
