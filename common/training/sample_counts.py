"""The last global step of a run, from its flags and the number of samples in an update."""

import math

from common.data import streams


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
