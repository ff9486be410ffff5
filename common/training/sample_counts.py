"""Numbers of samples in a gradient and in an update, and the last global step, computed from them."""

import math

from common.data import streams


def samples_per_gradient(settings, local):
    """Returns the number of samples that a worker draws per update, a `Fraction`.

    It is taken from the rounds already built, and is the basis of all sample counts. With `center.dynamic` it is the maximum.
    """
    return settings.batch_size * local.steps_per_update


def samples_per_update(settings, center, local):
    """Returns the number of samples, of all workers, in an update of the global parameters, a `Fraction`."""
    waits = center.waits(local)
    return samples_per_gradient(settings, local) * (waits.gradients_per_update if waits else 1)


def unit_of_samples(settings, center, local):
    """Returns the number of samples in the unit that `Keeper` counts: an update, a local step or a gradient."""
    if center.local_steps is None:
        return samples_per_update(settings, center, local)
    return settings.batch_size if local.dynamic else samples_per_gradient(settings, local)


def last_step(settings, num_samples, of_update=None):
    """Returns the global step to stop at, from `--steps` or else `--epochs`, for `of_update` samples (a batch) per update."""
    if settings.steps or num_samples is None:
        return settings.steps or streams.ENDLESS
    return math.ceil(settings.epochs * num_samples / (of_update or settings.batch_size))


def updates_before(samples, settings, of_update=None):
    """Returns the reduction of updates in `--epochs` if more samples were trained than the global step implies.

    This happens when the resumed run had another batch size or window. `of_update` as in `last_step`.
    """
    return 0 if settings.steps else int(samples) // (of_update or settings.batch_size)
