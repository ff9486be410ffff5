"""Sources of samples: the arrays, files or datasets of tf.data of `--data`, as a `Data` or a `Stream`."""

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np

from common.core import UserError
from common.data import datasets
from common.data.files import (
    HELD,
    FilePart,
    Tables,
    TFRecords,
    check_elements,
    files_of,
    held_before,
    is_held,
    kind_of,
    share_of,
    split,
    why,
)
from common.data.streams import Share, Stream
from common.data.user_functions import call, user_function

KNOWN = "data.json"  # in a run's folder: findings of the input check about the data


def load(settings):
    """Returns the `Data`, or the `Stream`, of `--data`, or raises `UserError` if there is none or no training could use it."""
    spec, kind = settings.data, kind_of(settings.data)
    files = {"label": "'DIR/*.csv' or '*.parquet'", "parse": "'DIR/*.tfrecord'", "test_data": "files, as 'DIR/*.csv'"}
    used = {None: (), "tfrecord": ("parse", "test_data")}.get(kind, ("label", "test_data"))
    if unused := [flag for flag in files if getattr(settings, flag) is not None and flag not in used]:
        raise UserError(f"--{unused[0]} is for --data={files[unused[0]]}, not {spec}")
    if kind:
        return _of_files(settings, kind, _known(settings))
    if ":" not in spec:
        return datasets.load(spec, settings.seed)
    if (arrays := datasets.shared()) is not None:
        return arrays
    return of_function(settings, user_function("--data", spec))


def of_function(settings, function):
    """Returns the `common.data.datasets.Data`, or the `Stream`, from a function of the user's."""
    spec, shards_itself = settings.data, _takes_two(function)
    arguments = [(settings.num_workers, i) for i in range(settings.num_workers)] if shards_itself else [()]
    pairs = [call("--data", spec, function, *each) for each in arguments]
    if not shards_itself and not is_of_datasets(pairs[0]):
        return datasets.checked(pairs[0], spec)
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(hasattr(part, "element_spec") for part in pair)):
            raise UserError(f"--data={spec} must give (training set, test set), two tf.data.Datasets")
    return _of_datasets(settings, pairs, shards_itself, _known(settings))


def _takes_two(function):
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 2


def is_of_datasets(given):
    """Whether the result of a function of the user's is a `tf.data.Dataset`, or contains one."""
    return any(hasattr(each, "element_spec") for each in [given, *(given if isinstance(given, (tuple, list)) else ())])


def _asked(settings):
    return [getattr(settings, name) for name in ("data", "test_data", "label", "parse", "num_workers")]


def _known(settings):
    """Returns the findings of the input check from the run's folder, if they are about the same data, else None."""
    if not settings.run_dir or settings.check:
        return None
    try:
        found = json.loads(Path(settings.run_dir, KNOWN).read_text())
        return found["known"] if found["asked"] == _asked(settings) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def to_keep(settings, dataset):
    """Returns the findings for `load` to keep in the run's folder, for JSON; None for arrays."""
    return {"asked": _asked(settings), "known": dataset.known} if isinstance(dataset, Stream) else None


def _of_files(settings, kind, known):
    name, parse = f"--data={settings.data}", None
    if settings.test_data is not None and kind_of(settings.test_data) != kind:
        raise UserError(f"--test_data={settings.test_data}: expected files of the same kind as {name}, as 'DIR/*.{kind}'")
    if kind == "tfrecord":
        if settings.parse is None:
            raise UserError(f"{name} needs --parse=FILE.py:FUNCTION, from a record, a scalar string tensor, to (x, y)")
        parse = user_function("--parse", settings.parse)
    reader: Any = TFRecords(parse) if parse else Tables(kind, settings.label, known and known["about"])
    if known is None:
        known = _look_at(settings, reader)
    held = None if known["test"] else False
    parts = [FilePart(path, n, held) for path, n in known["train"].items()]
    of_test = [FilePart(path, n) for path, n in known["test"].items()] or [part._replace(held=True) for part in parts]
    held_out, validation = None, _validation(settings)
    if validation:
        total = sum(part.count for part in parts)
        parts = [part._replace(share=validation) for part in parts]
        held_out = _share_of(reader, [part._replace(validates=True) for part in parts], HELD_OUT)
        datasets.check_held_out(settings.validation, held_out.count, total)
    shares, by_files = [], False
    for i in range(settings.num_workers):
        own, by_files = split(parts, i, settings.num_workers)
        shares.append(_share_of(reader, own))
    test = _share_of(reader, of_test)
    if not test.count:
        raise UserError(f"{name}: every {HELD}th record of a file is for the test, but no file has that many: give --test_data")
    count = f"{len(parts):,} file{'s' * (len(parts) > 1)} {settings.data}"
    if settings.num_workers > 1:
        of_each = "whole files" if by_files else f"every {_ordinal(settings.num_workers)} record"
        count += f", {of_each} for each worker"
    tested = f"test: {settings.test_data}" if settings.test_data else f"test: every {HELD}th record"
    about = f"from {count}; {tested}, {{test}}{reader.label_line()}"
    return Stream(name, shares, test, held_out, known, about, getattr(reader, "classes", None))


HELD_OUT = "the held-out samples"  # their name in a line


def _ordinal(n):
    """Returns n as an ordinal number, as "2nd" or "12th"."""
    return f"{n}{'th' if n // 10 % 10 == 1 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def _validation(settings):
    """Returns the share of `--validation`, as (p, q), or None."""
    share = getattr(settings, "validation", None)
    return share_of(share) if share else None


def _look_at(settings, reader):
    """Returns the numbers of records in the training and test files, and the reader's findings about them."""
    found: dict[str, Any] = {"train": {}, "test": {}}
    about: Any = None
    for half, flag, pattern in (("train", "--data", settings.data), ("test", "--test_data", settings.test_data)):
        if pattern is None:
            continue
        try:
            found[half], about = reader.about(files_of(flag, pattern))
        except UserError as error:
            said = str(error)
            raise UserError(said if said.startswith("--") else f"{flag}={pattern}: {said}") from None
    both = sorted(found["train"].keys() & found["test"].keys())
    if both:
        raise UserError(f"--test_data={settings.test_data} names {both[0]}, which is one of --data={settings.data}, too")
    return {**found, "about": about}


def _share_of(reader, parts, *name):
    parts = [part for part in parts if part.count]

    def read(skip, size, order):
        left = [parts[i] for i in order.permutation(len(parts))] if order else list(parts)
        while left and left[0].count <= skip:
            skip -= left.pop(0).count
        return reader.read(left, skip, size) if left else iter(())

    return Share(sum(part.count for part in parts), read, *name)


def _of_datasets(settings, pairs, shards_itself, known):
    name, num_workers, validation = f"--data={settings.data}", settings.num_workers, _validation(settings)
    for half, dataset in ((half, dataset) for pair in pairs for half, dataset in zip(("training", "test"), pair)):
        try:
            check_elements(dataset.element_spec)
        except UserError as error:
            raise UserError(f"{name}: of the {half} set {error}") from None
        if _has(dataset, "Batch"):
            hint = "leave batch() out, or end with unbatch()"
            raise UserError(f"{name}: the {half} set gives batches, expected single samples: {hint}")
    if (validation or not shards_itself and num_workers > 1) and any(_has(train, "Shuffle") for train, _ in pairs):
        apart = "--validation would hold out other samples each time"
        why_not = apart if validation else "no worker could tell which samples are its own"
        hint = "leave shuffle() out, as samples are shuffled here (and list_files takes shuffle=False)"
        raise UserError(f"{name}: the training set is shuffled, so {why_not}: {hint}")
    if known is None:
        known = {"train": [_count(train, name) for train, _ in pairs], "test": _count(pairs[0][1], name)}
    _check_ends(settings, name, known)
    sets, counts, held_out = [train for train, _ in pairs], known["train"], None
    if validation:
        held = [held_before(count, validation) for count in counts]
        datasets.check_held_out(settings.validation, sum(held), sum(counts))
        others = functools.reduce(lambda one, other: one.concatenate(other), (_cut(train, validation, True) for train in sets))
        held_out = Share(sum(held), _reader_of(others), HELD_OUT)
        sets = [_cut(train, validation, False) for train in sets]
        counts = [count - each for count, each in zip(counts, held, strict=True)]
    if not shards_itself:
        (count,), (whole,) = counts, sets
        counts = [None if count is None else len(range(i, count, num_workers)) for i in range(num_workers)]
        sets = [whole.shard(num_workers, i) for i in range(num_workers)] if num_workers > 1 else [whole]
    shares = [Share(count, _reader_of(each)) for count, each in zip(counts, sets, strict=True)]
    about = "from a tf.data.Dataset" + (" of each worker's own" if shards_itself else "") + "; test: {test}"
    return Stream(name, shares, Share(known["test"], _reader_of(pairs[0][1])), held_out, known, about)


def _check_ends(settings, name, known):
    """Raises a `UserError` for sets that never end, where that is impossible."""
    if known["test"] is None:
        raise UserError(f"{name}: the test set never ends: limit it with take()")
    problems = {
        ": give --steps or --seconds": not (settings.steps or settings.seconds),
        ": --learning_rate_schedule needs --steps": not settings.steps and getattr(settings, "learning_rate_schedule", None),
        ", so --validation cannot hold out a share of it": _validation(settings),
    }
    if None in known["train"] and (found := [problem for problem, is_there in problems.items() if is_there]):
        raise UserError(f"{name}: the training set never ends{found[0]}")


def _cut(dataset, share, validates):
    """Returns the elements of a dataset that are held out for validation, or those that are not."""
    chosen = dataset.enumerate().filter(lambda number, element: is_held(number, share) == validates)
    return chosen.map(lambda number, element: element)


def _reader_of(dataset):
    def read(skip, size, order):
        return dataset.skip(skip).batch(size).prefetch(1).as_numpy_iterator()

    return read


def _has(dataset, what):
    """Whether a dataset is made by a method of this name; batches before an unbatching method do not count."""
    kind = type(dataset).__name__
    if "Unbatch" in kind or "FlatMap" in kind or "Interleave" in kind:
        return what != "Batch" and any(_has(each, what) for each in dataset._inputs())
    return what in kind or any(_has(each, what) for each in dataset._inputs())


def _count(dataset, name):
    """Returns the number of elements of a dataset, None if it never ends; counts them if the cardinality is unknown."""
    import tensorflow

    count = int(dataset.cardinality())
    if count == tensorflow.data.INFINITE_CARDINALITY:
        return None
    if count == tensorflow.data.UNKNOWN_CARDINALITY:
        try:
            count = int(dataset.reduce(np.int64(0), lambda n, *_: n + 1))
        except Exception as error:
            raise UserError(f"{name}: the samples cannot be counted: {why(error)}") from error
    return count
