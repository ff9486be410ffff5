"""Data that are read during training: files of records, or datasets of tf.data; their shards and their shuffling."""

import concurrent.futures
import contextlib
import copy
import inspect
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from common import tf
from common.core import TrainingFailed, UserError, limits, progress
from common.data import datasets
from common.data.datasets import arrays_in
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

BLOCK_BYTES, BLOCK_SAMPLES = 2**24, 8192  # largest block that a worker shuffles
SAMPLES = 200  # read first, for shapes and types
KEPT_BYTES = 2**26  # a test set up to this size is read once
ENDLESS = progress.ENDLESS  # global steps of a run that only --seconds ends


class Share:
    """The samples of one worker, or of the test set, in an order of their own.

    Args:
      count: number of samples; None if they never end.
      read: function of (number of samples to skip, size, random generator or None) that yields arrays of `size` samples, the
        last one possibly shorter. The generator gives the order of files.
      name: of these samples in a line, if they are not for training.
    """

    def __init__(self, count, read, name="the test set"):
        self.count, self.read, self.name = count, read, name


class Stream:
    """A training and a test set that are never in memory as a whole.

    Args:
      name: `--data=...`, to begin an error line.
      shares: list of the `Share` of each worker.
      test: `Share` of the test set.
      held_out: `Share` of the samples that were held out for validation, or None.
      known: findings that make the next `load` faster, for JSON.
      about: its description in the first line of a run.
      classes: the smallest and the largest label, if labels are whole numbers and the range is known.

    Attributes:
      first: a `common.data.datasets.Data` of a few samples, for shapes and types.
    """

    def __init__(self, name, shares, test, held_out, known, about, classes=None):
        self.name, self.shares, self.test, self.held_out, self.known, self._about = name, shares, test, held_out, known, about
        self.classes, self._failures = classes, []
        train, of_test = (self._first(share, half) for share, half in ((shares[0], "training"), (test, "test")))
        self.first = datasets.checked((train, of_test), name.removeprefix("--data="))
        if classes and self.first.is_classification:  # so that num_classes is right
            self.first.y_train.flat[0], self.first.y_train.flat[-1] = classes
        for i, share in enumerate(shares):
            if share.count == 0:
                raise UserError(f"{name}: there are too few samples for {len(shares)} workers: worker {i} has none")

    @property
    def failed(self):
        """The first failure to read, a `UserError`, or None."""
        return self._failures[0] if self._failures else None

    @property
    def validation(self):
        """The same stream, with the held-out samples as its test set."""
        found = copy.copy(self)
        found.test = self.held_out
        return found

    def _first(self, share, half):
        found = next(iter(self._read(share, 0, SAMPLES, None, f"of the {half} set")), None)
        if found is None:
            raise UserError(f"{self.name}: the {half} set has no samples")
        return found

    @property
    def num_samples(self):
        """The number of training samples, or None if they never end."""
        counts = [share.count for share in self.shares]
        return None if None in counts else sum(counts)

    @property
    def bytes_of_one(self):
        """Bytes of a sample with its label."""
        return sum(array[:1].nbytes for array in arrays_in(self.first.train))

    @property
    def block(self):
        """The number of samples that a worker shuffles at once."""
        most = max(share.count or BLOCK_SAMPLES for share in self.shares)
        return max(1, min(BLOCK_SAMPLES, BLOCK_BYTES // self.bytes_of_one, most))

    def text(self):
        """The source of the samples, for the first line of a run."""
        three, size = limits.as_bytes(3 * self.block * self.bytes_of_one), f"{self.test.count:,} samples"
        blocks = f"shuffled in blocks of {self.block:,} samples, of which three take {three} of memory"
        held_out = f"; validation: {self.held_out.count:,} samples" if self.held_out else ""
        return f"{self._about.format(test=size)}{held_out}; read while it trains, {blocks}"

    def _read(self, share, skip, size, order, whose):
        """Yields the samples of a share, in the types of training.

        Raises:
          UserError: if it cannot be read, or used.
        """
        try:
            for samples in share.read(skip, size, order):
                at = f"{self.name}: samples {skip:,} and later {whose}"
                found = datasets.typed(samples, at)
                skip += len(arrays_in(found[0])[0])
                if hasattr(self, "first"):
                    self._compare(found, at)
                yield found
        except UserError as error:
            said = str(error)
            raise UserError(said if said.startswith("--") else f"{self.name}: {said}") from error
        except Exception as error:  # a function of the user's, or tf.data, may raise anything
            raise UserError(f"{self.name}: the samples {whose} cannot be read: {why(error)}") from error

    def _compare(self, found, at):
        for old, new in zip(arrays_in(self.first.train), arrays_in(found), strict=True):
            if old.shape[1:] != new.shape[1:] or old.dtype != new.dtype:
                was, now = (f"{array.dtype} of shape {list(array.shape[1:])}" for array in (old, new))
                raise UserError(f"{at} has {now}, after samples with {was}: expected the same in all")

    def training_batches(self, index, batch_size, seed, start=0):
        """Yields batches of worker `index`, epoch after epoch, each in another order; a batch may cross the end of an epoch.

        The order depends on the seed only, so a worker can resume at its position.

        Args:
          batch_size: samples.
          start: number of samples already drawn.
        """
        share, size, rest = self.shares[index], self.block, None
        first, begin = divmod(start, share.count) if share.count else (0, start)
        for epoch in itertools.count(first):
            at, begin = begin, 0
            order, whose = np.random.default_rng([seed, epoch]), f"of worker {index}"
            blocks = self._read(share, at - at % size, size, order, whose)
            count = 0
            for number, block in enumerate(_ahead(blocks), at // size):
                n = len(arrays_in(block[0])[0])
                shuffled = np.random.default_rng([seed, epoch, number]).permutation(n)[at % size :]
                at, count = 0, count + n
                block = _taken(block, shuffled)
                rest = block if rest is None else tf.nest.map_structure(lambda *two: np.concatenate(two), rest, block)
                n = len(arrays_in(rest[0])[0])
                for i in range(0, n - n % batch_size, batch_size):
                    yield _taken(rest, slice(i, i + batch_size))
                rest = _taken(rest, slice(n - n % batch_size, n))
            if not count:
                raise UserError(f"{self.name}: there are no samples {whose}")

    def test_batches(self, batch_size):
        """Yields the test set once, in batches."""
        yield from self._read(self.test, 0, batch_size, None, f"of {self.test.name}")

    def as_tensors(self, draw, argument, batch_size):
        """Returns the (x, y), or (x, y, weights), of a Python function of `argument`, a tensor, as tensors.

        `failed` then holds its first `UserError`.
        """

        def draw_or_note(number):
            try:
                return tf.nest.flatten(draw(number))
            except UserError as error:
                self._failures.append(error)
                raise

        like = self.first.train
        arrays = tf.nest.flatten(like)
        flat = tf.numpy_function(draw_or_note, [argument], [array.dtype for array in arrays])
        for tensor, array in zip(flat, arrays, strict=True):
            tensor.set_shape([batch_size, *array.shape[1:]])
        return tf.nest.pack_sequence_as(like, flat)


def _taken(samples, which):
    return tuple(datasets.mapped(lambda array: array[which], part) for part in samples)


def _ahead(blocks):
    """Yields the same blocks, with a prefetch of one."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, blocks, None)
        while (block := following.result()) is not None:
            following = pool.submit(next, blocks, None)
            yield block


class StreamedBatches:
    """Batches of one worker's samples that are read during training: the counterpart of `common.data.Batches` for streams.

    A batch comes through a call of Python (measured: 35 µs more than from memory), so that any tf.data pipeline and any file of
    pyarrow can be used, and a position is a number of samples.

    Args:
      stream: a `Stream`.
      index: of the worker.
      batch_size: samples per batch.
      seed: of the order.
      start: number of samples that the worker has already drawn.

    Raises:
      UserError: if memory cannot hold a batch.
    """

    def __init__(self, stream, index, batch_size, seed, start=0):
        self.batch_size, self.init_feed_dict = batch_size, {}
        self.num_samples = stream.shares[index].count or ENDLESS
        self._stream = stream
        self._check_batch(1)
        batches = stream.training_batches(index, batch_size, seed, start)
        # Draw the slow first batch now, as otherwise the other workers would begin alone.
        self._batches = itertools.chain([next(batches)], batches)
        self._of_state = stream.training_batches(index, batch_size, seed)
        self._kept: list[Any] = []

    def _check_batch(self, window):
        datasets.check_batch(self._stream.first.x_train, self._stream.first.y_train, self.batch_size, window)

    def next(self, window, most=None):
        """Returns the arguments of `samples` for the next batches, `[window]`; see `common.data.Batches.next`.

        Raises:
          UserError: if they are too many for memory.
        """
        self._check_batch(window if most is None else most)
        return tf.fill([window], tf.constant(-1, tf.int64))

    def batch(self, k):
        """Returns the argument of `samples` for batch number k, from 0 on, the same at every call."""
        return tf.cast(k, tf.int64)

    def samples(self, which):
        """Returns the samples x `[batch_size, ...]`, their labels y, and their weights, if they have some."""
        return self._stream.as_tensors(self._draw, which, self.batch_size)

    def _draw(self, number):
        if number < 0:
            return next(self._batches)
        while len(self._kept) <= number:
            self._kept.append(next(self._of_state))
        return self._kept[number]


class TestSet:
    """The test set of a stream, in batches that are read during evaluation; a small one stays in memory.

    Args:
      stream: a `Stream`.
      batch_size: samples.
    """

    __test__ = False  # for pytest

    def __init__(self, stream, batch_size=500):
        self.num_samples, self.batch_size, self._stream = stream.test.count, batch_size, stream
        self._keeps = self.num_samples * stream.bytes_of_one <= KEPT_BYTES
        self._kept: list[Any] = []
        self._batches = iter(())

    def part(self, start):
        """Returns the batch that begins with sample `start`, a tensor: (x, y), or (x, y, weights)."""
        return self._stream.as_tensors(self._draw, start, None)

    def _draw(self, start):
        number = int(start) // self.batch_size
        if number < len(self._kept):
            return self._kept[number]
        if number == 0:
            self._batches = self._stream.test_batches(self.batch_size)
        batch = next(self._batches, None)
        if batch is None:
            name = self._stream.test.name
            raise UserError(f"{self._stream.name}: {name} ends after {start:,} samples; there were {self.num_samples:,}")
        if self._keeps:
            self._kept.append(batch)
        return batch


KNOWN = "data.json"  # in a run's folder: findings of the input check about the data


def load(settings):
    """Returns the `common.data.datasets.Data`, or the `Stream`, of `--data`.

    Raises:
      UserError: if there is no such data or no training could use it.
    """
    spec, kind = settings.data, kind_of(settings.data)
    unused = {"label": kind in ("csv", "parquet"), "parse": kind == "tfrecord", "test_data": kind is not None}
    for flag, is_used in unused.items():
        if getattr(settings, flag) is not None and not is_used:
            files = {"label": "'DIR/*.csv' or '*.parquet'", "parse": "'DIR/*.tfrecord'", "test_data": "files, as 'DIR/*.csv'"}
            raise UserError(f"--{flag} is for --data={files[flag]}, not {spec}")
    if kind:
        return _of_files(settings, kind, _known(settings))
    if ":" not in spec:
        return datasets.load(spec, settings.seed)
    if (arrays := datasets.shared()) is not None:
        return arrays
    return of_function(settings, datasets.user_function("--data", spec))


def of_function(settings, function):
    """Returns the `common.data.datasets.Data`, or the `Stream`, from a function of the user's."""
    spec, shards_itself = settings.data, _takes_two(function)
    arguments = [(settings.num_workers, i) for i in range(settings.num_workers)] if shards_itself else [()]
    pairs = [datasets.call("--data", spec, function, *each) for each in arguments]
    if not shards_itself and not is_of_datasets(pairs[0]):
        return datasets.checked(pairs[0], spec)
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(_is_dataset, pair))):
            raise UserError(f"--data={spec} must give (training set, test set), two tf.data.Datasets")
    return _of_datasets(settings, pairs, shards_itself, _known(settings))


def _takes_two(function):
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) == 2


def _is_dataset(value):
    return hasattr(value, "element_spec")


def is_of_datasets(given):
    """Whether the result of a function of the user's contains a `tf.data.Dataset`."""
    return _is_dataset(given) or isinstance(given, (tuple, list)) and any(map(_is_dataset, given))


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
        parse = datasets.user_function("--parse", settings.parse)
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
        _check_held_out(settings, held_out.count, total)
    shares, by_files = [], False
    for i in range(settings.num_workers):
        own, by_files = split(parts, i, settings.num_workers)
        shares.append(_share_of(reader, own))
    test = _share_of(reader, of_test)
    if not test.count:
        raise UserError(f"{name}: every {HELD}th record of a file is for the test, but no file has that many: give --test_data")
    count = f"{len(parts):,} file{'s' * (len(parts) > 1)} {settings.data}"
    if settings.num_workers > 1:
        count += ", whole files for each worker" if by_files else f", every {settings.num_workers}th record for each worker"
        count = count.replace("2th", "2nd").replace("3th", "3rd")
    tested = f"test: {settings.test_data}" if settings.test_data else f"test: every {HELD}th record"
    about = f"from {count}; {tested}, {{test}}{reader.label_line()}"
    return Stream(name, shares, test, held_out, known, about, getattr(reader, "classes", None))


HELD_OUT = "the held-out samples"  # their name in a line


def _validation(settings):
    """Returns the share of `--validation`, as (p, q), or None."""
    share = getattr(settings, "validation", None)
    return share_of(share) if share else None


def _check_held_out(settings, count, total):
    if not 0 < count < total:
        raise UserError(f"--validation={settings.validation} holds out {count} of {total} samples: expected some, not all")


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
    name, num_workers = f"--data={settings.data}", settings.num_workers
    for train, test in pairs:
        for half, dataset in (("training", train), ("test", test)):
            try:
                check_elements(dataset.element_spec)
            except UserError as error:
                raise UserError(f"{name}: of the {half} set {error}") from None
            if _has(dataset, "Batch"):
                raise UserError(
                    f"{name}: the {half} set gives batches, expected single samples: leave batch() out, or end with unbatch()"
                )
    validation = _validation(settings)
    if validation and any(_has(train, "Shuffle") for train, _ in pairs):
        raise UserError(
            f"{name}: the training set is shuffled, so --validation would hold out other samples each time: leave shuffle() "
            "out, as samples are shuffled here (and list_files takes shuffle=False)"
        )
    if not shards_itself and num_workers > 1 and _has(pairs[0][0], "Shuffle"):
        raise UserError(
            f"{name}: the training set is shuffled, so no worker could tell which samples are its own: leave shuffle() out, as "
            "samples are shuffled here (and list_files takes shuffle=False)"
        )
    if known is None:
        known = {"train": [_count(train, name) for train, _ in pairs], "test": _count(pairs[0][1], name)}
    if known["test"] is None:
        raise UserError(f"{name}: the test set never ends: limit it with take()")
    if None in known["train"] and not (settings.steps or settings.seconds):
        raise UserError(f"{name}: the training set never ends: give --steps or --seconds")
    if None in known["train"] and not settings.steps and getattr(settings, "learning_rate_schedule", None):
        raise UserError(f"{name}: the training set never ends: --learning_rate_schedule needs --steps")
    if None in known["train"] and getattr(settings, "weigh_by_samples", False):
        raise UserError(f"{name}: the training set never ends, so --weigh_by_samples cannot know a worker's share of it")
    sets, counts, held_out = [train for train, _ in pairs], known["train"], None
    if validation:
        if None in counts:
            raise UserError(f"{name}: the training set never ends, so --validation cannot hold out a share of it")
        held = [held_before(count, validation) for count in counts]
        _check_held_out(settings, sum(held), sum(counts))
        others, *rest = (_cut(train, validation, True) for train in sets)
        for other in rest:
            others = others.concatenate(other)
        held_out = Share(sum(held), _reader_of(others), HELD_OUT)
        sets = [_cut(train, validation, False) for train in sets]
        counts = [count - each for count, each in zip(counts, held, strict=True)]
    shares = []
    for i in range(num_workers):
        if shards_itself:
            shares.append(Share(counts[i], _reader_of(sets[i])))
        else:
            count = None if counts[0] is None else len(range(i, counts[0], num_workers))
            shares.append(Share(count, _reader_of(sets[0].shard(num_workers, i) if num_workers > 1 else sets[0])))
    about = "from a tf.data.Dataset" + (" of each worker's own" if shards_itself else "") + "; test: {test}"
    return Stream(name, shares, Share(known["test"], _reader_of(pairs[0][1])), held_out, known, about)


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


def in_memory(dataset):
    """Returns all samples of a `Stream` as a `common.data.datasets.Data`, for a program that draws them by index.

    A `common.data.datasets.Data` is returned unchanged.

    Raises:
      UserError: if they never end, take more than half of this machine's memory, or cannot be read.
    """
    if not isinstance(dataset, Stream):
        return dataset
    if dataset.num_samples is None:
        raise UserError(f"{dataset.name}: the training set never ends, so it does not fit into memory: limit it with take()")
    need, has = (dataset.num_samples + dataset.test.count) * dataset.bytes_of_one, limits.memory() // 2
    if need > has:
        need, has = limits.as_bytes(need), limits.as_bytes(has)
        raise UserError(f"{dataset.name}: the samples take {need}, but half of this machine's memory is {has}: give fewer")

    def every(shares, half):
        blocks = [block for each in shares for block in dataset._read(each, 0, dataset.block, None, f"of the {half} set")]
        return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *blocks)

    halves = every(dataset.shares, "training"), every([dataset.test], "test")
    return datasets.checked(halves, dataset.name.removeprefix("--data="))


@contextlib.contextmanager
def reading(dataset):
    """A context that turns an error of a stream, read in a session, into one line.

    Raises:
      TrainingFailed: in place of TensorFlow's errors.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if not isinstance(dataset, Stream):
            raise
        if dataset.failed:
            raise TrainingFailed(str(dataset.failed)) from error
        if label := re.search(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)", str(error)):
            why = f"there is the class {label[1]}, but the model gives {label[2]} outputs"
            raise TrainingFailed(f"{dataset.name}: {why}") from error
        raise
