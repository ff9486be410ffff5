"""common/data/ledger.py: workers that come, leave and die, and which samples they train."""

import random

import numpy as np
import pytest

from common import tf
from common.data import ledger

N, BATCH = 50, 4


def call_of(batches, window, draws):
    """Returns the numbers that a call of so many draws, one after the other, draws."""
    batches.begin_call()
    numbers: list = []
    for _ in range(draws):
        with tf.control_dependencies(numbers):
            numbers.append(batches.next_numbers(window))
    return tf.concat(numbers, axis=0)


class Workers:
    """Some workers in one session; `drawn` has the numbers of the samples that they have drawn, in that order."""

    def __init__(self, count, window=1, num_workers=4, draws=1):
        x = np.arange(N, dtype=np.float32)[:, None]
        numbers = ledger.Ledger("")
        self.batches = [
            ledger.LeasedBatches(x, x, BATCH, 7, numbers, i, num_workers, name=f"batches_{i}") for i in range(count)
        ]
        self._next = [call_of(each, window, draws) for each in self.batches]
        self._short = [call_of(each, window, 1) for each in self.batches]
        self._empty = [each._pool.initializer for each in self.batches]
        self._leased, self._given_back = numbers._next.read_value(), numbers._count.read_value()
        self._initializers = tf.global_variables_initializer(), tf.local_variables_initializer()
        self.session = tf.Session()
        self.restart()

    def restart(self):
        """Nobody has drawn anything yet."""
        feeds = {feed: value for each in self.batches for feed, value in each.init_feed_dict.items()}
        for initializer in self._initializers:
            self.session.run(initializer, feeds)
        self.drawn: list[int] = []

    def begin(self, worker):
        """A process of this worker begins, which knows nothing of one before."""
        self.session.run(self._empty[worker])
        self.session.run(self.batches[worker].begin)

    def draw(self, worker, is_short=False):
        """Returns the numbers that it draws, in a short call or a usual one."""
        numbers = self.session.run((self._short if is_short else self._next)[worker]).tolist()
        self.drawn += numbers
        return numbers

    def leave(self, worker):
        self.session.run(self.batches[worker].leave)
        self.session.run(self._empty[worker])

    def drawn_to_the_end(self):
        """Worker 0 alone goes on until nothing is left of what was leased; returns how many numbers were leased before."""
        leased = self.session.run(self._leased)
        drawn: set[int] = set()
        numbers = {-1}
        while min(numbers) < leased or self.session.run(self._given_back):
            numbers = set(self.draw(0))
            assert numbers - drawn
            drawn |= numbers
        return leased


def test_one_worker_draws_all_in_their_order(graph):
    workers = Workers(1)
    for _ in range(40):
        workers.draw(0)
    assert workers.drawn == list(range(160))


@pytest.mark.slow
def test_the_numbers_of_an_epoch_are_all_samples(graph):
    """For every worker the same ones, in another order in the next epoch."""
    workers = Workers(2)
    one, other = workers.batches
    epochs = [np.arange(e * N, (e + 1) * N) for e in range(3)]
    for numbers in epochs:
        assert sorted(one.numbers(numbers)) == list(range(N))
        assert one.numbers(numbers).tolist() == other.numbers(numbers).tolist()
    assert len({tuple(one.numbers(numbers)) for numbers in epochs}) == 3
    drawn = workers.session.run(other.next(1)).ravel()
    assert drawn.tolist() == other.numbers(np.arange(BATCH)).tolist()


def test_a_piece_is_drawn_to_its_end_before_the_next_is_leased(graph):
    workers = Workers(1, num_workers=1)  # pieces of 12 numbers, three batches
    leased = [workers.draw(0) and int(workers.session.run(workers._leased)) for _ in range(7)]
    assert leased == [12, 12, 12, 24, 24, 24, 36]


@pytest.mark.slow
@pytest.mark.parametrize(("window", "num_workers", "draws"), [(1, 4, 1), (5, 4, 1), (1, 1, 1), (1, 1, 2), (1, 1, 5)])
def test_who_comes_and_leaves_in_peace_trains_each_number_once(graph, window, num_workers, draws):
    """Pieces of a batch, of a window, of several batches, of a call; a worker that leaves gives back what is left of them."""
    workers = Workers(4, window, num_workers, draws)
    for seed in range(2):
        workers.restart()
        drawn = random.Random(seed)
        present = {0}
        workers.begin(0)
        for _ in range(100):
            worker = drawn.randrange(4)
            if worker not in present:
                workers.begin(worker)
                present.add(worker)
            elif worker and drawn.random() < 0.3:
                workers.leave(worker)
                present.remove(worker)
            else:
                workers.draw(worker, drawn.random() < 0.5)
        for worker in present - {0}:
            workers.leave(worker)
        leased = workers.drawn_to_the_end()
        assert leased > 2 * N and set(range(leased)) <= set(workers.drawn)
        assert len(workers.drawn) == len(set(workers.drawn))


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "draws"), [(4, 1), (1, 1), (1, 2), (4, 10)])
def test_what_a_worker_had_leased_that_is_killed_is_trained_again(graph, num_workers, draws):
    """Each number at least once, though nobody knows whether those of its last call were pushed."""
    workers = Workers(4, num_workers=num_workers, draws=draws)
    for seed in range(2):
        workers.restart()
        drawn = random.Random(seed)
        pushed: list[list[int]] = [[] for _ in range(4)]
        is_sure = [True] * 4
        for worker in range(4):
            workers.begin(worker)
        for _ in range(120):
            worker = drawn.randrange(4)
            if drawn.random() < 0.1:
                workers.begin(worker)
                if not is_sure[worker]:
                    del pushed[worker][-draws * BATCH :]  # those were lost with it
                is_sure[worker] = True
            else:
                pushed[worker] += workers.draw(worker)
                is_sure[worker] = False
        for worker in range(1, 4):
            workers.leave(worker)
        before = len(workers.drawn)
        leased = workers.drawn_to_the_end()
        trained = {number for numbers in (*pushed, workers.drawn[before:]) for number in numbers}
        assert set(range(leased)) <= trained
        assert len(set(workers.drawn)) < len(workers.drawn) and min(workers.drawn) >= 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_calls_of_several_lengths_draw_of_the_same_numbers(graph):
    """A piece is of the longest call; a shorter one leases more as soon as a longer one might draw too many."""
    workers = Workers(2, draws=5)
    draws = [workers.draw(0), workers.draw(0, is_short=True), workers.draw(1), workers.draw(0)]
    assert draws == [[*range(20)], [*range(20, 24)], [*range(40, 60)], [*range(24, 40), *range(60, 64)]]
    assert workers.session.run(workers._leased) == 80


@pytest.mark.slow
def test_who_leaves_after_short_calls_gives_back_all(graph):
    """Also what is left of the lease before the last one."""
    workers = Workers(2, draws=5)
    for is_short in False, True, True:
        workers.draw(1, is_short)
    workers.leave(1)
    leased = workers.drawn_to_the_end()
    assert leased == 60 and set(range(leased)) <= set(workers.drawn)
    assert len(workers.drawn) == len(set(workers.drawn))


def test_a_lease_is_as_large_as_what_is_needed(graph):
    workers = Workers(2, window=20)  # of more samples than there are
    assert [workers.draw(i) for i in (0, 1, 0)] == [list(range(80 * i, 80 * i + 80)) for i in range(3)]
