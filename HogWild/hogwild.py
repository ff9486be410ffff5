"""HogWild (Niu, Recht, Ré, Wright 2011, https://arxiv.org/abs/1106.5730) with ps tasks: asynchronous SGD.

A ps locks each piece of x̃ for the time of one update. The lock-free setting of the paper, threads that share memory, is in
hogwild_threads.py.
"""

from common import Scheme, flags, main, tf


def hogwild(center, local, hp):
    """x ← x̃;  x̃ ← x̃ − η g(x).

    Every worker repeats this at its own pace. No lock is held between a worker's pull and its push. Others may push in between;
    then the gradient g was taken at parameters x that are stale. With several ps, a pull may find some pieces of x̃ from before
    another worker's push, and others from after it.

    η is `hp.learning_rate`. With `hp.window` T > 1, g is the sum of the gradients along T local steps of SGD.

    With `hp.overlap` the pull of the next round is made while this one trains: x is x̃ of one round ago, without what this
    worker has pushed since, and the worker doesn't wait for the wire.
    """
    sgd = tf.train.GradientDescentOptimizer(hp.learning_rate)
    yield local.pull(center)  # x ← x̃
    yield local.train(hp.window, sgd)  # g(x)
    yield center.push(sgd, local.gradient)  # x̃ ← x̃ − η g(x)


SCHEME = Scheme(hogwild, flags=[flags.overlap()], epochs=60, batch_size=32, learning_rate=0.1)

if __name__ == "__main__":
    main(SCHEME)
