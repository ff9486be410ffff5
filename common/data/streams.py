"""Streams of samples, datasets of tf.data that never end or are asked for by --stream: their shards, shuffling and batches."""

import concurrent.futures
import contextlib
import copy
import itertools
import re
from typing import Any

import numpy as np

from common import tf
from common.core import TrainingFailed, UserError, limits, progress
from common.data import datasets
from common.data.nested_arrays import arrays_in, mapped
from common.data.pipelines import in_types

BLOCK_BYTES, BLOCK_SAMPLES = 2**24, 8192  # largest block that a worker shuffles
SAMPLES = 200  # read first, for shapes and types
KEPT_BYTES = 2**26  # a test set up to this size is read once
ENDLESS = progress.ENDLESS  # global steps of a run that only --seconds ends


class Share:
    """The samples of one worker, or of the test set.

    Args:
      count: number of samples; None if they never end.
      dataset: a `tf.data.Dataset` of single samples.
      name: of these samples in a line, if they are not for training.
    """

    def __init__(self, count, dataset, name="the test set"):
        self.count, self.name, self._dataset = count, name, dataset

    def read(self, skip, size):
        """Yields batches of `size` samples after the first `skip`; builds its pipeline in the thread that reads."""
        yield from self._dataset.skip(skip).batch(size).prefetch(1).as_numpy_iterator()


class Stream:
    """A training and a test set that are never in memory as a whole.

    Args:
      name: `--data=...`, to begin an error line.
      shares: list of the `Share` of each worker.
      test: `Share` of the test set.
      held_out: `Share` of the samples that were held out for validation, or None.
      counts: numbers of samples, for another process, which need not count them, for JSON.
      about: its description in the first line of a run.

    Attributes:
      first: a `common.data.datasets.Data` of a few samples, for shapes and types.
    """

    def __init__(self, name, shares, test, held_out, counts, about):
        self.name, self.shares, self.test, self.held_out, self.counts, self._about = name, shares, test, held_out, counts, about
        self._failures: list[UserError] = []
        train, of_test = (self._first(share, half) for share, half in ((shares[0], "training"), (test, "test")))
        self.first = datasets.checked((train, of_test), name.removeprefix("--data="))
        for i, share in enumerate(shares):
            if share.count == 0:
                raise UserError(f"{name}: there are too few samples for {len(shares)} workers: worker {i} has none")

    @property
    def failed(self):
        """The first failure to read, a `UserError`, or None."""
        return self._failures[0] if self._failures else None

    @property
    def validation(self):
        """The same stream, with the held-out samples as its test set; None if there are none."""
        if self.held_out is None:
            return None
        found = copy.copy(self)
        found.test = self.held_out
        return found

    def _first(self, share, half):
        found = next(in_types(share.read(0, SAMPLES), self.name, f"of the {half} set"), None)
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

    @property
    def text(self):
        """The source of the samples, for the first line of a run."""
        three, size = limits.as_bytes(3 * self.block * self.bytes_of_one), f"{self.test.count:,} samples"
        blocks = f"shuffled in blocks of {self.block:,} samples, of which three take {three} of memory"
        held_out = f"; validation: {self.held_out.count:,} samples" if self.held_out else ""
        return f"{self._about.format(test=size)}{held_out}; read while it trains, {blocks}"

    def training_batches(self, index, batch_size, seed, start=0):
        """Yields batches of worker `index`, epoch after epoch, each in another order; a batch may cross the end of an epoch.

        The order depends on the seed only, so a worker can resume at its position, `start` samples.
        """
        share, size, rest = self.shares[index], self.block, None
        first, begin = divmod(start, share.count) if share.count else (0, start)
        for epoch in itertools.count(first):
            at, begin = begin, 0
            skip, whose, count = at - at % size, f"of worker {index}", 0
            blocks = in_types(share.read(skip, size), self.name, whose, self.first.train, skip)
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
        yield from in_types(self.test.read(0, batch_size), self.name, f"of {self.test.name}", self.first.train)

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
    return tuple(mapped(lambda array: array[which], part) for part in samples)


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
    pyarrow can be used, and a position is a number of samples. Raises `UserError` if memory cannot hold a batch.

    Args:
      stream: a `Stream`.
      index: of the worker.
      batch_size: samples per batch.
      seed: of the order.
      start: number of samples that the worker has already drawn.
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

    def begin_call(self):
        """As of `common.data.Batches`: nothing."""

    def next(self, window, most=None):
        """Returns the arguments of `samples` for the next batches, `[window]`; see `common.data.Batches.next`."""
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
    """The test set of a `Stream`, in batches that are read during evaluation; a small one stays in memory."""

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


@contextlib.contextmanager
def reading(dataset):
    """A context that turns an error of a stream, read in a session, into a `TrainingFailed` of one line."""
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
