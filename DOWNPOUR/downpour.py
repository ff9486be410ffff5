"""DOWNPOUR SGD: Adagrad on both sides, pull and push each at its own interval (Dean et al. 2012, NIPS, appendix 7.1)."""

import math

from common import Scheme, UserError, flags, main, tf


def downpour(center, local, hp):
    """Each step: if step mod n_fetch = 0: x ← x̃;  a ← a + g(x);  x ← Adagrad(x, g);  step ← step + 1;
    if step mod n_push = 0: x̃ ← Adagrad(x̃, a), a ← 0.

    Adagrad is  s ← s + g²;  x ← x − η g/√s,  element by element: the worker has slots s of its own for its g, the ps has
    slots for the a of all workers. In the paper's pseudocode the worker's steps are plain SGD; Adagrad there is this
    collection's reading. n_push is `hp.window`, n_fetch `hp.n_fetch` or else the same, η `hp.learning_rate`.

    With `hp.overlap` each pull is made while the steps before it run: x ← x̃ as it was at the pull before.

    A round is the least number of steps after which both intervals begin anew.
    """
    n_push, n_fetch = hp.window, hp.n_fetch or hp.window
    steps = math.lcm(n_push, n_fetch)
    if steps // n_push + steps // n_fetch > 100:
        raise UserError(
            f"--n_push={n_push} and --n_fetch={n_fetch} make rounds of {steps} steps; choose one that divides the other"
        )
    adagrad = tf.train.AdagradOptimizer(hp.learning_rate)
    step = 0
    while step < steps:
        if step % n_fetch == 0:
            yield local.pull(center, n_fetch)  # x ← x̃
        few = min(n_fetch - step % n_fetch, n_push - step % n_push)  # steps until there is something to pull or to push
        yield local.train(few, adagrad, accumulate=step % n_push > 0)  # x ← Adagrad(x, g);  a ← a + g
        step += few
        if step % n_push == 0:
            yield center.push(adagrad, local.gradient)  # x̃ ← Adagrad(x̃, a)


SCHEME = Scheme(
    downpour,
    flags=[
        flags.alias("n_push", "window"),
        flags.integer("n_fetch", None, "local steps between pulls of the global parameters (default: --n_push)", least=1),
        flags.overlap(),
    ],
    epochs=60,
    batch_size=32,
    learning_rate=0.1,
    window=5,
)

if __name__ == "__main__":
    main(SCHEME)
