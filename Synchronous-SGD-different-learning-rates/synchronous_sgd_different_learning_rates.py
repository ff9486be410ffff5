"""Synchronous SGD with a learning rate for each worker, after the Distributed TensorFlow Guide."""

from common import Scheme, UserError, flags, main, tf


def synchronous_sgd_different_learning_rates(center, local, hp):
    """x ← x̃;  x̃ ← x̃ − Σ_i η_i g_i(x), over the gradients of all workers at this x̃.

    Each worker scales its own gradient. With η_i = η/n for all n workers this is synchronous SGD; otherwise the update leans
    towards the samples of those whose rate is larger.

    η_i are `hp.learning_rates`, one for each worker.
    """
    rate = hp.learning_rates[local.index]
    sgd, others = tf.train.GradientDescentOptimizer(1.0), center.together(local, mean=False)
    yield local.pull(center)  # x ← x̃
    yield local.train(hp.window, sgd)  # g_i(x)
    yield others.push(sgd, rate * local.gradient)  # x̃ ← x̃ − Σ η_i g_i
    yield others.wait()  # until then


def check(hp):
    """Raises a `UserError` if there is not one rate for each worker, and each place of one that may come."""
    n, what = hp.max_workers or hp.num_workers, "places of workers" if hp.max_workers else "workers"
    if len(hp.learning_rates) != n:
        raise UserError(f"--learning_rates has {len(hp.learning_rates)} values for {n} {what}: give one for each")
    if hp.max_workers and hp.weight_decay:
        raise UserError("--weight_decay depends on the sum of all rates, which changes with --max_workers: leave one out")


SCHEME = Scheme(
    synchronous_sgd_different_learning_rates,
    pace="together",
    flags=[flags.numbers("learning_rates", "0.1,0.01", "step size of each worker", above=0)],
    check=check,
    without=("learning_rate", "window"),
    epochs=60,
    batch_size=32,
)

if __name__ == "__main__":
    main(SCHEME)
