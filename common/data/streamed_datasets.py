"""Streams of the datasets that a user's function gives: their counts, the shares of workers, and held-out samples."""

import fractions
import functools

import numpy as np

from common.core import UserError
from common.data.datasets import SETS, check_held_out
from common.data.pipeline_graphs import has
from common.data.pipelines import as_user_error, is_batched
from common.data.streams import Share, Stream


def of_datasets(settings, pairs, shards_itself, counts):
    """Returns the `Stream` of a pair of datasets, or of the pairs of all workers; a validation set may be between the two.

    Args:
      counts: those of the same `Stream` in another process, or None.
    """
    name, num_workers, validation = f"--data={settings.data}", settings.num_workers, _share_of(settings.validation)
    pairs = [tuple(dataset.unbatch() if is_batched(dataset) else dataset for dataset in pair) for pair in pairs]
    _check_order(name, pairs, validation, not shards_itself and num_workers > 1)
    (_, *own, test), trains = pairs[0], [pair[0] for pair in pairs]
    counts = counts or {
        "train": [_count(train, name) for train in trains],
        "test": _count(test, name),
        "validation": _count(own[0], name) if own else None,
    }
    _check_ends(settings, name, counts, SETS[len(pairs[0])][1:])
    sets, of_each = trains, counts["train"]
    held_out = Share(counts["validation"], own[0], "the validation set") if own else None
    if validation and not own:
        held = [_held_before(count, validation) for count in of_each]
        check_held_out(settings.validation, sum(held), sum(of_each))
        others = functools.reduce(lambda one, other: one.concatenate(other), (_cut(train, validation, True) for train in sets))
        held_out = Share(sum(held), others, "the held-out samples")
        sets = [_cut(train, validation, False) for train in sets]
        of_each = [count - each for count, each in zip(of_each, held, strict=True)]
    if not shards_itself:
        (count,), (whole,) = of_each, sets
        of_each = [None if count is None else len(range(i, count, num_workers)) for i in range(num_workers)]
        sets = [whole.shard(num_workers, i) for i in range(num_workers)] if num_workers > 1 else [whole]
    about = "from a tf.data.Dataset" + (" of each worker's own" if shards_itself else "") + "; test: {test}"
    return Stream(name, [*map(Share, of_each, sets)], Share(counts["test"], test), held_out, counts, about)


def never_ends(dataset):
    """Whether a dataset, or PyDataset, is known to have no end."""
    return hasattr(dataset, "element_spec") and int(dataset.cardinality()) == -1


def _check_order(name, pairs, validation, is_shared):
    """Raises a `UserError` if samples are chosen by their places in a dataset whose order changes."""
    if (validation or is_shared) and any(has(pair[0], "Shuffle") for pair in pairs):
        apart = "--validation would hold out other samples each time"
        why_not = apart if validation else "no worker could tell which samples are its own"
        hint = "leave shuffle() out, as samples are shuffled here (and list_files takes shuffle=False)"
        raise UserError(f"{name}: the training set is shuffled, so {why_not}: {hint}")


def _check_ends(settings, name, counts, halves):
    """Raises a `UserError` for sets that never end, where that is impossible; `halves` are those that are evaluated."""
    for half in halves:
        if counts[half] is None:
            raise UserError(f"{name}: the {half} set never ends: limit it with take()")
    problems = {
        ": give --steps or --seconds": not (settings.steps or settings.seconds),
        ": --learning_rate_schedule needs --steps": not settings.steps and settings.learning_rate_schedule,
        ", so --validation cannot hold out a share of it": settings.validation and "validation" not in halves,
    }
    if None in counts["train"] and (found := [problem for problem, is_there in problems.items() if is_there]):
        raise UserError(f"{name}: the training set never ends{found[0]}")


def _share_of(number):
    """Returns (p, q) with the ratio of --validation: of every q samples p, q of at most a million. None for None."""
    return number and fractions.Fraction(number).limit_denominator(10**6).as_integer_ratio()


def _held_before(number, share):
    """Returns the number of held-out samples among the first `number`."""
    return number * share[0] // share[1]


def _cut(dataset, share, validates):
    """Returns the samples of a dataset that are held out for validation, or those that are not."""

    def is_held(number):
        return _held_before(number + 1, share) > _held_before(number, share)

    chosen = dataset.enumerate().filter(lambda number, element: is_held(number) == validates)
    return chosen.map(lambda number, element: element)


def _count(dataset, name):
    """Returns the number of samples of a dataset, None if it never ends; counts them if the cardinality is unknown."""
    count = int(dataset.cardinality())
    if count == -2:  # unknown
        with as_user_error(name, "of a set"):
            count = int(dataset.reduce(np.int64(0), lambda n, *_: n + 1))
    return None if count == -1 else count
