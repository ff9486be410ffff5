"""Distributed-Session/sharding.py: the datasets of workers. Together they see every sample once an epoch."""

import itertools
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from common import tf

sys.path.append(str(Path(__file__).resolve().parents[1] / "Distributed-Session"))
import sharding  # noqa: E402


def drawn(dataset, batches=None):
    """Returns the samples of some batches, or of all, as one list; of a dataset whose samples are numbers."""
    return [int(sample) for batch in itertools.islice(dataset, batches) for sample in batch.numpy()]


def epochs_of(make, sizes, batch_size, epochs):
    """Returns what is drawn `[epochs][worker]`, lists of samples, when the workers' shards are as large as `sizes`.

    Args:
      make: a function of (worker, epochs) that returns a dataset of batches of numbers.
    """
    seen: list = [[] for _ in range(epochs)]
    for worker, size in enumerate(sizes):
        samples = drawn(make(worker, epochs))
        assert len(samples) == epochs * size
        for epoch in range(epochs):
            seen[epoch].append(samples[epoch * size : (epoch + 1) * size])
    return seen


def each_once(workers, samples):
    """Whether the workers' samples, lists, are all together `samples`, each of them once."""
    return sorted(itertools.chain(*workers)) == sorted(samples)


def even(num_samples, num_workers):
    """The sizes of shards that differ by one at most."""
    return [len(range(worker, num_samples, num_workers)) for worker in range(num_workers)]


SIZES = [(1, 1), (61, 1), (12, 2), (61, 2), (4, 3), (61, 4), (5, 5), (12, 5)]  # of the samples, number of workers


@pytest.mark.parametrize("num_samples,num_workers", SIZES)
def test_all_workers_together_see_every_sample_once_an_epoch(num_samples, num_workers):
    samples = np.arange(num_samples) + 100

    def make(worker, epochs):
        return sharding.array_dataset(samples, 4, num_workers, worker, epochs)

    for workers in epochs_of(make, even(num_samples, num_workers), 4, epochs=3):
        assert each_once(workers, samples)


def test_shuffled_first_with_different_seeds_they_do_not():
    """So the test of the property can fail; with one seed for all workers it would hold."""
    samples = tf.data.Dataset.range(60)

    def seen(*seeds):
        shuffled_first = [samples.shuffle(60, seed).shard(3, worker).batch(4) for worker, seed in enumerate(seeds)]
        return [drawn(dataset) for dataset in shuffled_first]

    assert not each_once(seen(1, 2, 3), range(60))
    assert each_once(seen(1, 1, 1), range(60))


def test_a_new_order_each_epoch():
    first, second, third = (
        epoch[0] for epoch in epochs_of(lambda _, n: sharding.array_dataset(np.arange(50), 8, epochs=n), [50], 8, 3)
    )
    assert sorted(first) == sorted(second) == sorted(third)
    assert len({tuple(first), tuple(second), tuple(third), tuple(range(50))}) == 4


def test_the_whole_shard_is_shuffled():
    """No buffer: the first samples of sorted data come from all over it."""
    samples = drawn(sharding.array_dataset(np.arange(1000), 50), batches=1)
    assert min(samples) < 200 and max(samples) > 800


def test_workers_have_orders_of_their_own():
    orders = [[k // 3 for k in drawn(sharding.array_dataset(np.arange(60), 20, 3, worker, epochs=1))] for worker in range(3)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2]) == list(range(20))
    assert len(set(map(tuple, orders))) == 3


def test_equal_seeds_give_equal_orders():
    def order(seed):
        return drawn(sharding.array_dataset(np.arange(60), 20, 2, 1, epochs=2, seed=seed))

    assert order(seed=7) == order(seed=7) != order(seed=8)
    assert sorted(order(seed=2**31)) == sorted(order(seed=7))


def test_batches_have_samples_of_one_epoch():
    sizes = [len(batch) for batch in sharding.array_dataset(np.arange(19), 4, 2, 0, epochs=2)]
    assert sizes == [4, 4, 2, 4, 4, 2]
    assert len(list(sharding.array_dataset(np.arange(3), 100, epochs=1))) == 1


@pytest.mark.parametrize("epochs,batches", [(1, 5), (2, 10), (None, 500)])
def test_it_ends_after_its_epochs_or_never(epochs, batches):
    dataset = sharding.array_dataset(np.arange(10), 2, epochs=epochs)
    assert len(list(itertools.islice(dataset, 500))) == batches


def test_arrays_of_a_tuple_stay_together():
    x = np.random.default_rng(0).normal(size=[23, 2, 3]).astype(np.float32)
    y = x.sum(axis=(1, 2)).astype(np.float64)
    dataset = sharding.array_dataset((x, y), 4, 2, 1, epochs=1)
    assert [tuple(spec.shape) for spec in dataset.element_spec] == [(None, 2, 3), (None,)]
    assert [spec.dtype for spec in dataset.element_spec] == [tf.float32, tf.float64]
    batches = [(x.numpy(), y.numpy()) for x, y in dataset]
    assert np.concatenate([y for _, y in batches]).shape == (11,)
    for x_batch, y_batch in batches:
        np.testing.assert_allclose(x_batch.sum(axis=(1, 2)), y_batch, rtol=1e-5)


def test_of_text():
    assert [batch.numpy().tolist() for batch in sharding.array_dataset(np.array(["a", "bc"]), 1, 2, 1, epochs=1)] == [[b"bc"]]


def test_of_a_file_that_is_not_in_memory(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(30).reshape(10, 3))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    rows = [row.tolist() for batch in sharding.array_dataset(x, 4, epochs=1) for row in batch.numpy()]
    assert sorted(rows) == np.arange(30).reshape(10, 3).tolist()


@pytest.mark.parametrize("make_iterator", ["make_one_shot_iterator", "make_initializable_iterator"])
def test_in_a_graph(graph, make_iterator):
    seen = []
    iterators = [
        getattr(tf.data, make_iterator)(sharding.array_dataset(np.arange(13), 4, 2, worker, epochs=2)) for worker in range(2)
    ]
    batches = [iterator.get_next() for iterator in iterators]
    with tf.Session() as session:
        if make_iterator == "make_initializable_iterator":
            session.run([iterator.initializer for iterator in iterators])
        seen = [[session.run(batch).tolist() for _ in range(4)] for batch in batches]  # 4, 3, 4, 3; 4, 2, 4, 2
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(batches[0])
    for epoch in range(2):
        assert each_once([sum(of_worker[2 * epoch : 2 * epoch + 2], []) for of_worker in seen], range(13))
    assert seen[0][:2] != seen[0][2:]


def test_samples_are_no_part_of_the_graph(graph):
    tf.data.make_one_shot_iterator(sharding.array_dataset(np.zeros([1000, 1000]), 4)).get_next()
    assert graph.as_graph_def().ByteSize() < 100_000


def test_in_a_session_on_the_server_of_a_worker(graph, servers):
    task, server = servers(1)
    with tf.device(task.device):
        batch = tf.data.make_one_shot_iterator(sharding.array_dataset(np.arange(8), 8)).get_next()
    with tf.Session(server.target, config=task.config()) as session:
        assert sorted(session.run(batch)) == list(range(8))


@pytest.fixture
def write(tmp_path):
    """A function that writes files of so many lines, numbered through from 0, below a header; it returns their paths."""

    def write(*lengths):
        numbers, files = itertools.count(), [tmp_path / f"part-{i:02}.txt" for i in range(len(lengths))]
        for file, length in zip(files, lengths):
            file.write_text("a header\n" + "".join(f"{next(numbers)}\n" for _ in range(length)))
        return files

    return write


def numbers(files, batch_size, num_workers=1, shard_index=0, **more):
    """`sharding.line_dataset` of what `write` has written."""

    def parse(line):
        return tf.strings.to_number(line, tf.int64)

    return sharding.line_dataset(files, parse, batch_size, num_workers, shard_index, header_lines=1, **more)


LENGTHS = [
    ((30,), 1),
    ((30,), 3),
    ((10, 10, 10), 2),
    ((1, 50, 3), 3),
    ((0, 7), 4),
    ((6, 0, 25, 1, 2, 40), 1),
    ((6, 0, 25, 1, 2, 40), 5),
    ((5,) * 7, 4),
]  # of the files in lines, number of workers


@pytest.mark.parametrize("lengths,num_workers", LENGTHS)
def test_all_workers_together_see_every_line_once_an_epoch(write, lengths, num_workers):
    files = write(*lengths)
    seen = [drawn(numbers(files, 4, num_workers, worker, epochs=1, shuffle_buffer=8)) for worker in range(num_workers)]
    assert each_once(seen, range(sum(lengths)))
    if len(files) < num_workers:
        assert [len(lines) for lines in seen] == even(sum(lengths), num_workers)
    else:  # a worker reads files of its own
        ends = np.cumsum(lengths)
        for worker, lines in enumerate(seen):
            assert {int(np.searchsorted(ends, k, "right")) % num_workers for k in lines} <= {worker}


@pytest.mark.parametrize("lengths,num_workers,sizes", [((20, 30, 12), 2, [32, 30]), ((20, 11), 3, [11, 10, 10])])
def test_lines_of_several_epochs(write, lengths, num_workers, sizes):
    files = write(*lengths)
    seen = epochs_of(lambda worker, n: numbers(files, 4, num_workers, worker, epochs=n), sizes, 4, epochs=3)
    for workers in seen:
        assert each_once(workers, range(sum(lengths)))
    for worker in range(num_workers):
        assert len({tuple(epoch[worker]) for epoch in seen}) == 3


@pytest.mark.slow
def test_the_order_in_which_files_are_listed_does_not_matter(write):
    files = write(3, 20, 9)
    for num_workers in 2, 4:
        expected = [drawn(numbers(files, 4, num_workers, worker, epochs=1)) for worker in range(num_workers)]
        for worker in range(num_workers):
            listed = random.Random(worker).sample([str(file) for file in files], len(files))
            assert drawn(numbers(listed, 4, num_workers, worker, epochs=1)) == expected[worker]


def test_equal_seeds_give_equal_orders_of_lines(write):
    files = write(20, 20)
    orders = [drawn(numbers(files, 4, epochs=2, seed=seed)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_workers_have_orders_of_lines_of_their_own(write):
    files = write(20, 20)
    orders = [[k % 20 for k in drawn(numbers(files, 20, 2, worker, epochs=1))] for worker in range(2)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_files_alternate_before_the_buffer(write):
    """So a small buffer does not give one file after the other."""
    first = drawn(numbers(write(50, 50), 20, shuffle_buffer=5), batches=1)
    assert min(first) < 50 <= max(first)


def test_lines_go_on_for_ever(write):
    assert len(drawn(numbers(write(3, 4), 2), batches=300)) > 500


def test_one_file_and_a_parser_of_several_columns(tmp_path):
    (tmp_path / "a.csv").write_text("1.5,2\n2.5,4\n")
    dataset = sharding.line_dataset(tmp_path / "a.csv", lambda line: tf.decode_csv(line, [[0.0], [0]]), 2, epochs=1)
    (batch,) = list(dataset)
    assert sorted(zip(*(column.numpy().tolist() for column in batch))) == [(1.5, 2), (2.5, 4)]


def test_lines_in_a_graph(graph, write):
    batch = tf.data.make_one_shot_iterator(numbers(write(3, 6), 4, 2, 1)).get_next()
    with tf.Session() as session:
        seen = [session.run(batch).tolist() for _ in range(4)]
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == [3, 4, 5, 6, 7, 8]


BAD = [
    (dict(batch_size=0), "batch_size must be a whole number of at least 1, not 0"),
    (dict(batch_size=2.5), "batch_size must be a whole number of at least 1, not 2.5"),
    (dict(num_workers=0), "num_workers must be a whole number of at least 1, not 0"),
    (dict(epochs=0), "epochs must be a whole number of at least 1, not 0"),
    (dict(num_workers=3, shard_index=3), "shard_index must be 0 to 2 with num_workers=3, not 3"),
    (dict(num_workers=3, shard_index=-1), "shard_index must be 0 to 2 with num_workers=3, not -1"),
    (dict(num_workers=3, shard_index=None), "shard_index must be 0 to 2 with num_workers=3, not None"),
]


@pytest.mark.parametrize("arguments,message", BAD)
def test_numbers_out_of_range(arguments, message, user_error, write):
    arguments = {"batch_size": 4, **arguments}
    with user_error(message):
        sharding.array_dataset(np.arange(10), **arguments)
    with user_error(message):
        numbers(write(4, 4), **arguments)


def test_arrays_that_cannot_be_sharded(user_error):
    with user_error("same number of samples, not 10, 9"):
        sharding.array_dataset((np.arange(10), np.arange(9)), 4)
    with user_error("2 samples are too few for 3 workers"):
        sharding.array_dataset(np.arange(2), 4, 3, 0)
    for arrays in (), 5, (np.arange(3), 5):
        with user_error("arrays must be an array of samples"):
            sharding.array_dataset(arrays, 4)


def test_files_that_are_not_there(user_error, write, tmp_path):
    with user_error("at least one file"):
        numbers([], 4)
    with user_error("there is no file", "part-99.txt"):
        numbers([*write(3), tmp_path / "part-99.txt"], 4)
    with user_error("there is no file"):
        numbers([tmp_path], 4)
    with user_error("shuffle_buffer must be a whole number of at least 1"):
        numbers(write(3), 4, shuffle_buffer=0)


def test_times_seen():
    datasets = [tf.data.Dataset.from_tensor_slices(samples).batch(2) for samples in ([0, 2, 2], [1])]
    assert sharding.times_seen(datasets, 4).tolist() == [[1, 0, 2, 0], [0, 1, 0, 0]]
    assert sharding.drawn(datasets[0]).tolist() == [0, 2, 2] and sharding.drawn(tf.data.Dataset.range(3)).tolist() == [0, 1, 2]
