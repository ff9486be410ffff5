"""common/leases.py: workers that come, leave and die, and which samples they train."""

import random

import numpy as np
import pytest

from common import leases, tf

N, BATCH = 50, 4


class Workers:
    """Some workers in one session; `drawn` has the numbers of the samples that they have drawn, in that order."""

    def __init__(self, count, window=1, num_workers=4):
        x = np.arange(N, dtype=np.float32)[:, None]
        ledger = leases.Ledger("")
        self.batches = [leases.LeasedBatches(x, x, BATCH, 7, ledger, i, num_workers, name=f"batches_{i}") for i in range(count)]
        self._next = [each.next_numbers(window) for each in self.batches]
        self._empty = [each._pool.initializer for each in self.batches]
        self._leased = ledger._next.read_value()
        self.session = tf.Session()
        self.session.run(tf.global_variables_initializer())
        feeds = {feed: value for each in self.batches for feed, value in each.init_feed_dict.items()}
        self.session.run(tf.local_variables_initializer(), feeds)
        self.drawn: list[int] = []

    def begin(self, worker):
        """A process of this worker begins, which knows nothing of one before."""
        self.session.run(self._empty[worker])
        self.session.run(self.batches[worker].begin)

    def draw(self, worker):
        """Returns the numbers that it draws."""
        numbers = self.session.run(self._next[worker]).tolist()
        self.drawn += numbers
        return numbers

    def leave(self, worker):
        self.session.run(self.batches[worker].leave)
        self.session.run(self._empty[worker])

    def drawn_to_the_end(self):
        """Worker 0 alone goes on until nothing is left of what was leased; returns how many numbers were leased before."""
        leased = self.session.run(self._leased)
        while not set(range(leased)) <= set(self.drawn):
            self.draw(0)
        return leased


def test_one_worker_draws_all_in_their_order(graph):
    workers = Workers(1)
    for _ in range(40):
        workers.draw(0)
    assert workers.drawn == list(range(160))


def test_an_epoch_has_every_sample_once(graph):
    workers = Workers(2)
    (next_batches,) = ([each.next(1) for each in workers.batches],)
    found = [i for k in range(2 * N) for i in workers.session.run(next_batches[k % 2]).ravel().tolist()]
    by_number: list[list[int]] = [[] for _ in range(4)]
    workers_pool = [workers.session.run(each._pool).size for each in workers.batches]
    assert len(found) == 2 * N * BATCH and sum(workers_pool) < 2 * N
    counts = np.bincount(found, minlength=N)
    assert counts.min() >= 2 * BATCH - 2 and counts.max() <= 2 * BATCH + 2
    del by_number


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_who_comes_and_leaves_in_peace_trains_each_number_once(graph, seed, window):
    workers, drawn = Workers(4, window), random.Random(seed)
    present = {0}
    workers.begin(0)
    for _ in range(150):
        worker = drawn.randrange(4)
        if worker not in present:
            workers.begin(worker)
            present.add(worker)
        elif worker and drawn.random() < 0.3:
            workers.leave(worker)
            present.remove(worker)
        else:
            workers.draw(worker)
    for worker in present - {0}:
        workers.leave(worker)
    leased = workers.drawn_to_the_end()
    assert leased > 2 * N and len(workers.drawn) == len(set(workers.drawn))


@pytest.mark.parametrize("seed", range(4))
def test_who_is_killed_trains_again_what_it_had_leased(graph, seed):
    """Each number at least once, and again only what was in the pieces of those that were killed."""
    workers, drawn, kills = Workers(4), random.Random(seed), 0
    for worker in range(4):
        workers.begin(worker)
    for _ in range(150):
        worker = drawn.randrange(4)
        if drawn.random() < 0.1:
            last = workers.drawn[-BATCH:] if workers.drawn else []
            del workers.drawn[len(workers.drawn) - len(last) :]  # it is not sure that they were pushed
            workers.drawn += last
            workers.begin(worker)
            kills += 1
        else:
            workers.draw(worker)
    for worker in range(1, 4):
        workers.leave(worker)
    workers.drawn_to_the_end()
    again = len(workers.drawn) - len(set(workers.drawn))
    assert kills and 0 < again <= kills * 2 * (N // 16 + BATCH) * 2


def test_chief_gives_back_what_a_ps_knows_of_all(graph):
    """As after a ps was restored: all pieces that the checkpoint says somebody has are trained by those who are there."""
    workers = Workers(3)
    for worker in range(3):
        workers.begin(worker)
        workers.draw(worker)
    workers.begin(0)
    drawn, workers.drawn = workers.drawn, []
    workers.drawn_to_the_end()
    assert set(drawn) <= set(workers.drawn) and len(workers.drawn) == len(set(workers.drawn))


def test_a_lease_is_as_large_as_what_is_needed(graph):
    workers = Workers(2, window=20)  # of more samples than there are
    assert [workers.draw(i) for i in (0, 1, 0)] == [list(range(80 * i, 80 * i + 80)) for i in range(3)]
