"""The samples of virtual workers: a shard for each, and the batches drawn from it."""

from typing import Any

import numpy as np

from common import tf
from common.core import UserError
from common.data import Rows, arrays_in, fed, gathered, order_of


class Shards:
    """The training set, and the samples of each worker in it in their order, as `common.data.Batches` draws them.

    Args:
      samples: (x, y) or (x, y, weights) of all workers, see `common.data.Batches`.
      numbers: for each worker, an array of its sample indices; workers may have the same array.
      batch_size: samples per batch.
      seeds: for each worker, the seed of its sample order.

    Attributes:
      counts: number of samples of each worker, an array.
    """

    def __init__(self, samples, numbers, batch_size, seeds):
        self.samples, self.num_workers, self.batch_size = samples, len(numbers), batch_size
        self.counts = np.array([len(own) for own in numbers])
        self._offsets = np.concatenate([[0], np.cumsum(self.counts)[:-1]])
        orders = [order_of(len(own), seed) for own, seed in zip(numbers, seeds, strict=True)]
        self._first = np.concatenate([first for first, _ in orders])
        self._second = np.concatenate([own[second] for own, (_, second) in zip(numbers, orders, strict=True)])
        self._positions = np.zeros(self.num_workers, np.int64)

    def take(self, workers, sizes):
        """Returns the indices of the samples that workers draw next, concatenated, int32; and the start of each draw in them.

        Args:
          workers: `[draws]`.
          sizes: number of samples of each draw, `[draws]`.
        """
        starts = np.cumsum(sizes) - sizes
        # Position of each draw among its worker's samples: the sum of that worker's earlier draws.
        by_worker = np.argsort(workers, kind="stable")
        sums = np.cumsum(sizes[by_worker]) - sizes[by_worker]
        first_of = np.searchsorted(workers[by_worker], np.arange(self.num_workers))
        begun = np.append(sums, sums[-1] + sizes[by_worker][-1])[first_of] if len(workers) else sums
        position = np.empty(len(workers), np.int64)
        position[by_worker] = sums - begun[workers[by_worker]]
        position += self._positions[workers]
        np.add.at(self._positions, workers, sizes)
        owner = np.repeat(workers, sizes)
        k = np.repeat(position - starts, sizes) + np.arange(sizes.sum())
        n, offset = self.counts[owner], self._offsets[owner]
        place = self._first[offset + k % n] + k // n
        return self._second[offset + place % n].astype(np.int32), starts


def shards_of(dataset, num_workers, batch_size, seed, non_iid=None):
    """Returns the `Shards` of a data set for a number of workers.

    Args:
      dataset: a `common.data.Data`.
      num_workers, batch_size, seed: as the flags.
      non_iid: None for every n-th sample; else the concentration α of a Dirichlet distribution. The class shares q of a
        worker are drawn from Dir(α p), with p the shares in the whole data set; then its samples are drawn by q from the
        remaining ones, equally many for each worker (Hsu, Qi, Brown 2019, https://arxiv.org/abs/1909.06335).

    Raises:
      UserError: if there are too few samples, or no classes to divide them by.
    """
    n = dataset.num_samples
    if n < num_workers:
        raise UserError(
            f"{n:,} training samples are too few for {num_workers:,} workers: choose fewer --num_workers or other --data"
        )
    samples, seeds = dataset.train, range(seed, seed + num_workers)
    if non_iid is None:
        return Shards(samples, [np.arange(i, n, num_workers) for i in range(num_workers)], batch_size, seeds)
    y = samples[1][:] if isinstance(samples[1], Rows) else samples[1]
    if not isinstance(y, np.ndarray) or y.ndim != 1 or y.dtype.kind not in "iu":
        raise UserError("--non_iid divides samples by their classes: expected labels that are whole numbers, one per sample")
    rng = np.random.default_rng(seed)
    _, classes, counts = np.unique(y, return_inverse=True, return_counts=True)
    left = [rng.permutation(np.flatnonzero(classes == c)).tolist() for c in range(len(counts))]
    numbers = []
    for _ in range(num_workers):
        # Gamma variates in log space, then normalized: with a small α, all shares of a Dirichlet sample may be 0.
        q = np.log(rng.gamma(non_iid * counts / n + 1)) + np.log(rng.random(len(counts))) / (non_iid * counts / n)
        q = np.exp(q - q.max())
        own = []
        for _ in range(n // num_workers):
            shares = q * [bool(some) for some in left]
            shares = shares if shares.sum() > 0 else np.array([float(len(some)) for some in left])
            own.append(left[rng.choice(len(left), p=shares / shares.sum())].pop())
        numbers.append(np.array(own))
    return Shards(samples, numbers, batch_size, seeds)


class ScheduledBatches:
    """Batches of the samples in the schedule: those of the current step start at `at` in `order`."""

    def __init__(self, shards, order, feeds):
        self.num_samples, self.batch_size, self._order = len(arrays_in(shards.samples[0])[0]), shards.batch_size, order
        self.init_feed_dict: dict = {}
        self.index_type = tf.int32
        self.at: Any = None
        self.drawn = 0  # samples drawn since the last reset
        with tf.variable_scope("samples"):
            self._samples = tuple(fed(name, part, feeds) for name, part in zip(("x", "y", "weights"), shards.samples))

    def begin_call(self):
        pass

    def next(self, window):
        size = window * self.batch_size
        indices = tf.slice(self._order, [self.at + self.drawn], [size])
        self.drawn += size
        return tf.reshape(indices, [window, self.batch_size])

    def batch(self, k):
        places = tf.range(k * self.batch_size, (k + 1) * self.batch_size) % self.num_samples
        return tf.gather(order_of(self.num_samples, 0)[0], places)

    def samples(self, indices):
        return gathered(self._samples, indices)
