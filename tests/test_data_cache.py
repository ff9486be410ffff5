"""Files and pipelines that become arrays in a cache, once: their samples, when they are converted again, what is refused."""

import contextlib
import csv
import errno
import fcntl
import itertools
import json
import os
import signal
import threading

import numpy as np
import pyarrow.feather
import pyarrow.parquet
import pytest
import tensorflow
from runs import ENDLESS, finish, is_training, read_until, result_of, run, send, start, updates_of, wait_until

from common.core import task_status
from common.core.flags import Settings
from common.core.run_facts import RunFacts
from common.data import cache, datasets, pipelines, sources
from common.data.columns import check_columns, copy_columns
from common.data.mapped_rows import Rows
from common.data.streams import Stream
from common.models import keras_model
from common.training.model_and_data import split, what_is_trained

NONE = "test_data", "label", "parse", "missing", "hash_strings", "max_workers", "validation", "learning_rate_schedule"
FLAGS = dict.fromkeys((*NONE, "patience", "steps", "seconds", "run_dir", "data_cache"))
PARSE = """
import tensorflow as tf

FACTOR = 1.0

def parse(record):
    numbers = tf.io.decode_raw(record, tf.int32)
    return FACTOR * tf.cast(numbers[:2], tf.float32), numbers[2]
"""


MORE = """
def wrong(record):
    return record, 1

def fails(record):
    1 / 0

def two(record, other):
    return record, other

def noisy(record):
    return tf.random.normal([2]), 1
"""


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "distributed-tensorflow-tutorials"


def settings(spec, **others):
    return Settings(**{**FLAGS, "data": str(spec), "num_workers": 1, "seed": 0, "check": False, "stream": False, **others})


def write_table(path, numbers, columns=None):
    """A file of samples (n, n + 0.5) with the class n mod 3, for each of these numbers."""
    columns = columns or {"a": [float(n) for n in numbers], "label": [n % 3 for n in numbers], "b": [n + 0.5 for n in numbers]}
    if path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    elif path.suffix == ".arrow":
        pyarrow.feather.write_feather(pyarrow.table(columns), str(path))
    else:
        pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_records(path, numbers):
    with tensorflow.io.TFRecordWriter(str(path)) as file:
        for n in numbers:
            file.write(np.array([n, 10 * n, n % 3], np.int32).tobytes())


@pytest.fixture(params=["csv", "parquet", "arrow", "tfrecord"])
def files(request, tmp_path):
    """A function that writes files with so many records, numbered throughout; returns the flags that name them."""
    (tmp_path / "parse.py").write_text(PARSE)

    def write(*lengths, name="train", first=0):
        number = itertools.count(first)
        for i, length in enumerate(lengths):
            path = tmp_path / f"{name}-{i}.{request.param}"
            (write_records if request.param == "tfrecord" else write_table)(path, list(itertools.islice(number, length)))
        parse = {"parse": f"{tmp_path}/parse.py:parse"} if request.param == "tfrecord" else {}
        return {"spec": f"{tmp_path}/{name}-*.{request.param}", **parse}

    return write


def numbers_in(samples):
    """The numbers of the samples, which the labels have to fit."""
    x, y = (part[:] for part in samples)
    assert np.array_equal(x[:, 0] % 3, y)
    return x[:, 0].astype(int).tolist()


def dataset(n=20, first=0):
    x = np.arange(first, first + n)
    return tensorflow.data.Dataset.from_tensor_slices((np.stack([x, 10 * x], 1).astype(np.float32), x % 3))


def of(function, **others):
    return sources.of_function(settings("d.py:f", **others), function)


@pytest.fixture
def told(monkeypatch):
    """The lines that the user is told."""
    lines: list = []
    monkeypatch.setattr(task_status, "tell", lines.append)
    return lines


@pytest.fixture
def conversions(monkeypatch):
    """A list that gets an item with each conversion."""
    found: list = []
    before = cache._converted

    def noted(*args, **more):
        found.append(args)
        return before(*args, **more)

    monkeypatch.setattr(cache, "_converted", noted)
    return found


# --- Samples of files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths, num_workers", [((30,), 3), ((25, 24, 25), 3), ((50, 9, 3), 2), ((12, 11), 1)])
def test_every_sample_of_files_is_in_one_set(files, lengths, num_workers):
    """In the test set every tenth record of a file, else in the equal shard of a worker."""
    found = sources.load(settings(**files(*lengths), num_workers=num_workers))
    starts = [0, *itertools.accumulate(lengths)]
    held = [n for start, end in itertools.pairwise(starts) for n in range(start + 9, end, 10)]
    assert numbers_in(found.test) == held and found.num_samples == sum(lengths) - len(held)
    shards = [numbers_in(datasets.shard(found, i, num_workers)) for i in range(num_workers)]
    assert sorted(itertools.chain(*shards)) == sorted(set(range(sum(lengths))) - set(held))
    assert max(map(len, shards)) <= min(map(len, shards)) + 1
    training, validation = datasets.hold_out(found, 0.25)
    assert sorted([*numbers_in(training.train), *numbers_in(validation.test)]) == numbers_in(found.train)


def test_a_test_set_of_its_own(files):
    given, test = files(12), files(5, name="test", first=100)
    found = sources.load(settings(**given, test_data=test["spec"]))
    assert numbers_in(found.train) == list(range(12)) and numbers_in(found.test) == list(range(100, 105))
    assert f"test: {test['spec']}, 5 samples" in found.text


def test_large_arrays_of_files_are_mapped(files, monkeypatch):
    """They are sent to another process as the name of a file."""
    monkeypatch.setattr(cache, "LARGE", 100)
    found = sources.load(settings(**files(30)))
    assert isinstance(found.x_train, Rows) and found.x_train.has_file and found.x_train.in_place()
    assert numbers_in(found.train) == [n for n in range(30) if n % 10 != 9]


def test_first_line_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(4):
        write_table(tmp_path / f"{i}.csv", range(10))
    found = sources.load(settings("*.csv", num_workers=2))
    line = what_is_trained(keras_model.build("mlp", found), found, 2, "SGD on the ps")
    assert ", by SGD on the ps; 36 samples, 18 for each of 2 workers, from 4 files *.csv; test: every 10th record" in line
    assert "record, 4 samples; label: the column 'label'" in line
    assert line.endswith("; the input is the columns 'a', 'b' in order")


def test_what_the_check_has_found_is_not_looked_for_again(files, tmp_path, monkeypatch):
    """By a task of its launcher, which opens the entry even if the files have changed; without the entry it looks itself."""
    given = settings(**files(20, 20), run_dir=str(tmp_path))
    found = sources.load(given)
    (tmp_path / "data.json").write_text(json.dumps(sources.to_keep(given, found)))
    files(40)
    monkeypatch.setenv("LAUNCHER_KEY", "key")
    assert sources.load(given).num_samples == 36
    os.rename(found.entry, f"{found.entry}-gone")
    assert sources.load(given).num_samples == 36 + 18
    monkeypatch.delenv("LAUNCHER_KEY")
    assert sources.load(given).num_samples == 36 + 18


@pytest.mark.slow
def test_files_that_are_refused(user_error, tmp_path):
    (tmp_path / "parse.py").write_text(PARSE + MORE)
    parse = f"{tmp_path}/parse.py:parse"
    write_records(tmp_path / "0.tfrecord", range(20))
    whole = (tmp_path / "0.tfrecord").read_bytes()
    spec = f"{tmp_path}/*.tfrecord"
    with user_error(f"--data={spec} needs --parse=FILE.py:FUNCTION"):
        sources.load(settings(spec))
    with user_error(f"--data={spec}: of the samples its elements hold strings"):
        sources.load(settings(spec, parse=f"{tmp_path}/parse.py:wrong"))
    for damaged, text in (
        (whole[:-3], "1.tfrecord is damaged or not a TFRecord file: record 20 cannot be read"),
        (b"\x1f\x8b" + whole, "1.tfrecord is compressed"),
        (whole[:14] + b"\xff" + whole[15:], "1.tfrecord is damaged or not a TFRecord file: record 1 cannot be read: Data"),
    ):
        (tmp_path / "1.tfrecord").write_bytes(damaged)
        with user_error(f"--data={tmp_path}/[01].tfrecord: {tmp_path}/{text}"):
            sources.load(settings(f"{tmp_path}/[01].tfrecord", parse=parse))
    (tmp_path / "1.tfrecord").write_bytes(whole)
    with user_error(f"--data={spec}: the samples of the training set cannot be read: ZeroDivisionError: "):
        sources.load(settings(spec, parse=f"{tmp_path}/parse.py:fails"))
    with user_error("draws random numbers", "give --data=FILE.py:FUNCTION, of a tf.data.Dataset; --stream reads it anew"):
        sources.load(settings(spec, parse=f"{tmp_path}/parse.py:noisy"))
    with user_error("cannot be read: TypeError: two() missing 1 required positional argument: 'other'"):
        sources.load(settings(spec, parse=f"{tmp_path}/parse.py:two"))
    write_records(tmp_path / "few.tfrecord", range(9))
    with user_error("every 10th record of a file is for the test, but no file has that many: give --test_data"):
        sources.load(settings(tmp_path / "few.tfrecord", parse=parse))


def test_flags_that_do_not_fit_the_data(user_error, tmp_path):
    write_table(tmp_path / "a.csv", range(12))
    spec = f"{tmp_path}/*.csv"
    for given, text in (
        (settings(f"{tmp_path}/no*.csv"), "no*.csv: there is no such file"),
        (settings(spec, test_data="*.parquet"), "--test_data=*.parquet: expected files of the same kind as --data="),
        (settings(spec, test_data="no*.csv"), "--test_data=no*.csv: there is no such file"),
        (settings(spec, test_data=spec), "a.csv, which is one of --data="),
        (settings(spec, parse="p.py:f"), "--parse is for --data='DIR/*.tfrecord', not "),
        (settings(spec, stream=True), "--stream is for a function that gives tf.data.Datasets, not "),
        (settings("digits", stream=True), "--stream is for a function that gives tf.data.Datasets, not digits: leave it out"),
        (settings("digits", label="y"), "--label is for --data='DIR/*.csv', '*.parquet' or '*.arrow', not digits"),
        (settings("digits", missing="0"), "--missing is for --data='DIR/*.csv', '*.parquet' or '*.arrow', not digits"),
        (settings("d.py:f", hash_strings=9), "--hash_strings is for --data='DIR/*.csv', '*.parquet' or '*.arrow', not d.py:f"),
        (settings("a.tfrecord", parse="parse.py"), "--parse must be FILE.py:FUNCTION, not 'parse.py'"),
        (settings(spec, data_cache=""), "--data_cache is empty: name a folder"),
    ):
        with user_error(text):
            sources.load(given)


# --- Pipelines ----------------------------------------------------------------------------------------------------------


def test_a_pair_of_datasets():
    found = of(lambda: (dataset(), dataset(5, 100)), num_workers=3)
    assert numbers_in(found.train) == list(range(20)) and numbers_in(found.test) == list(range(100, 105))
    assert numbers_in(datasets.shard(found, 1, 3)) == list(range(1, 20, 3))
    assert found.text == "from a tf.data.Dataset; test: 5 samples"


@pytest.mark.parametrize("batched", [lambda d: d.batch(6), lambda d: d.batch(6).map(lambda x, y: (x, y)).prefetch(2)])
def test_batches_are_taken_as_they_are(batched):
    assert numbers_in(of(lambda: (batched(dataset()), dataset().batch(4).unbatch())).train) == list(range(20))


def test_a_function_that_shards_by_itself():
    """The samples of all workers are those of the run."""
    found = of(lambda num_workers, index: (dataset(10 + index, 50 * index), dataset(3)), num_workers=2)
    assert numbers_in(found.train) == [*range(10), *range(50, 61)] and numbers_in(found.test) == [0, 1, 2]
    assert "from a tf.data.Dataset of each worker's own" in found.text


def test_inputs_of_several_arrays_and_weights():
    def named(x, y):
        return {"right": x[1], "left": (x[:1], x)}, y, tensorflow.cast(y, tensorflow.float64) / 2

    x, y, w = of(lambda: (dataset().map(named), dataset().map(named))).train
    assert x["left"][0].shape == (20, 1) and np.array_equal(10 * x["left"][0][:, 0], x["right"])
    assert w.dtype == np.float32 and np.array_equal(w, y / 2)


def test_weights_of_some_samples(user_error):
    """Of the training set alone, or not of all of it."""

    def weighted(x, y):
        return x, y, 1.0

    found = of(lambda: (dataset().map(weighted), dataset()))
    assert found.w_train.tolist() == [1] * 20 and found.w_test is None
    sets = [dataset().map(weighted), dataset()]
    with user_error("the samples of the training set have weights, but not all of them"):
        of(lambda num_workers, index: (sets[index], dataset()), num_workers=2)


def test_a_pydataset(told):
    """Its batches, converted anew each time."""
    import keras

    class Own(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            x = np.arange(4 * i, 4 * i + 4)
            return np.stack([x, x], 1).astype(float), x % 3

    found = of(lambda: (Own(), Own()))
    assert numbers_in(found.train) == list(range(12)) and found.entry is None
    assert "converted anew in each run" in told[0]


def test_a_validation_set_of_its_own(user_error):
    """Of three datasets, or pairs of arrays, the second."""

    def function():
        return dataset(), dataset(4, 50).batch(3), dataset(5, 100)

    arrays = tuple(tuple(np.concatenate(part) for part in zip(*each.batch(9).as_numpy_iterator())) for each in function()[::2])
    for found in (of(function), of(function), of(lambda: (arrays[0], (arrays[1][0][:4] - 50, arrays[1][1][:4]), arrays[1]))):
        given = settings("d.py:f", patience=3, run=RunFacts("HogWild"))
        training, validation = split(found, given)
        assert numbers_in(training.train) == list(range(20)) and validation.test[0].shape == (4, 2)
        assert numbers_in(training.test) == list(range(100, 105))
        with user_error("--validation=0.5: --data=d.py:f gives a validation set of its own"):
            split(found, given.but(validation=0.5))
    assert numbers_in(split(of(function), given)[1].test) == list(range(50, 54))
    stream = of(function, stream=True)
    assert [len(x) for x, _ in split(stream, given)[1].test_batches(3)] == [3, 1]
    with user_error("--patience needs held-out samples: give their share, too, with --validation, or let --data give three"):
        split(of(lambda: (dataset(), dataset())), given)


def _generator(*elements):
    kinds = tensorflow.TensorSpec(None, tensorflow.float32), tensorflow.TensorSpec([], tensorflow.int32)
    return tensorflow.data.Dataset.from_generator(lambda: iter(elements), output_signature=kinds)


@pytest.mark.parametrize(
    "train, text",
    [
        (lambda: dataset().map(lambda x, y: x), "of the training set its elements are TensorSpec(shape=(2,)"),
        (lambda: dataset().map(lambda x, y: (x, tensorflow.as_string(y))), "its elements hold strings, expected numbers"),
        (lambda: dataset().map(lambda x, y: (tensorflow.sparse.from_dense(x), y)), "hold SparseTensorSpec, expected dense"),
        (lambda: dataset().map(lambda x, y: (x / 0, y)), "samples 0 and later of the training set: x holds "),
        (lambda: dataset().take(0), "the training set has no samples"),
        (lambda: dataset().repeat(), "the training set never ends: give --steps or --seconds"),
        (lambda: _generator(*2 * [([0.0], 1)], ([0.0, 1.0], 1)), "InvalidArgumentError: Cannot batch tensors with different"),
        (lambda: _generator(([0.0], 1), (["a"], 1)), "the samples of the training set cannot be read: InvalidArgumentError: T"),
        (lambda: dataset().map(lambda x, y: (x + tensorflow.random.uniform([2]), y)), "draws random numbers (RandomUniform)"),
        (lambda: 3, "must give (training set, test set), two tf.data.Datasets"),
    ],
)
def test_datasets_that_are_refused(user_error, train, text):
    with user_error("--data=d.py:f", text):
        of(lambda: (train(), dataset()))


def test_a_test_set_that_is_unlike_or_endless(user_error):
    with user_error("--data=d.py:f: samples 0 and later of the test set has float32 of shape [1], after samples with float32"):
        of(lambda: (dataset(), dataset().map(lambda x, y: (x[:1], y))))
    with user_error("--data=d.py:f: the test set never ends: limit it with take()"):
        of(lambda: (dataset(), dataset().repeat()))


def test_what_stays_a_stream(user_error):
    assert isinstance(of(lambda: (dataset().repeat(), dataset()), steps=5), Stream)
    assert isinstance(of(lambda: (dataset(), dataset()), stream=True), Stream)
    with user_error("--stream is for tf.data.Datasets, but --data=d.py:f gives others: leave it out"):
        of(lambda: 2 * ((np.ones([9, 2]), np.arange(9)),), stream=True)


def test_a_shuffled_set_of_processes_that_convert_it_apart(user_error, monkeypatch):
    def function():
        return dataset().shuffle(9), dataset()

    with user_error("a set is shuffled, and each process would have another order: leave shuffle() out"):
        of(function, num_workers=2)
    monkeypatch.setenv("LAUNCHER_KEY", "key")
    assert sorted(numbers_in(of(function, num_workers=2).train)) == list(range(20))


# --- The cache ----------------------------------------------------------------------------------------------------------


def entries(root):
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_files_are_converted_once(files, root, conversions):
    given = settings(**files(20))
    one, two = sources.load(given), sources.load(given)
    assert len(conversions) == 1 and one.entry == two.entry and numbers_in(one.train) == numbers_in(two.train)
    assert entries(root) == [os.path.basename(one.entry)] and root.stat().st_mode & 0o777 == 0o700


def test_what_an_entry_depends_on(files, tmp_path, conversions):
    """The files, and with them their sizes and times; the flags; the function that parses, and the values that it uses."""
    given = settings(**files(20))
    sources.load(given)
    files(21)
    sources.load(given)
    os.utime(next(tmp_path.glob("train-0*")), ns=(0, 12345))
    sources.load(given)
    assert len(conversions) == 3
    if given.parse:
        (tmp_path / "other.py").write_text(PARSE.replace("1.0", "3.0"))
        assert sources.load(given.but(parse=f"{tmp_path}/other.py:parse")).x_train[1, 0] == 3
    else:
        assert sources.load(given.but(label="a")).x_train[1].tolist() == [1, 1.5]
    assert len(conversions) == 4
    sources.load(given.but(data_cache=str(tmp_path / "elsewhere")))
    assert len(conversions) == 5 and len(entries(tmp_path / "elsewhere")) == 1


def test_what_the_entry_of_a_pipeline_depends_on(conversions, tmp_path):
    """Constants, captured values, and the files that its constants name; not the numbers of its functions."""

    def function(factor=2.0, first=0):
        return lambda: (dataset(6, first).map(lambda x, y: (factor * x, y)).shuffle(3, seed=1).cache().batch(2), dataset(3))

    first = of(function()).entry
    assert of(function()).entry == first and len(conversions) == 1
    assert of(function(3.0)).entry != first and of(function(first=1)).entry != first
    (tmp_path / "lines.txt").write_text("1\n2\n")

    def read():
        lines = tensorflow.data.TextLineDataset(str(tmp_path / "lines.txt"))
        return lines.map(lambda line: (tensorflow.strings.to_number(line), 1)), dataset(2).map(lambda x, y: (x[0], 1))

    found = of(read)
    assert found.x_train.tolist() == [1, 2]
    (tmp_path / "lines.txt").write_text("1\n2\n3\n")
    assert of(read).x_train.tolist() == [1, 2, 3] and of(read).entry != found.entry


def _names(path):
    return tensorflow.data.Dataset.from_tensor_slices([str(path)])


def _looked_up():
    keys = tensorflow.lookup.KeyValueTensorInitializer([0, 1, 2], [0, 1, 2], tensorflow.int64, tensorflow.int64)
    table = tensorflow.lookup.StaticHashTable(keys, 0)
    return dataset().map(lambda x, y: (x, table.lookup(y)))


def _times_a_variable():
    variable = tensorflow.Variable(2.0)
    return dataset().map(lambda x, y: (x * variable, y))


def _line_of(name):
    return tensorflow.strings.to_number(tensorflow.strings.substr(tensorflow.io.read_file(name), 0, 1)), 1


@pytest.mark.parametrize(
    "make, is_seen",
    [
        (lambda path: dataset().map(lambda x, y: (tensorflow.numpy_function(lambda x: x, [x], x.dtype), 1)), False),
        (lambda path: _generator(([1.0], 1), ([2.0], 0)), False),
        (lambda path: _looked_up(), False),
        (lambda path: _times_a_variable(), False),
        (lambda path: dataset().cache(f"{path}.cache"), False),
        (lambda path: _names(path).map(_line_of), True),
        (lambda path: _names(path).flat_map(tensorflow.data.TextLineDataset).map(lambda line: (1.0, 1)), True),
        (lambda path: _names(path).map(lambda name: name + "").map(_line_of), False),
        (lambda path: _names(path.with_suffix(".list")).flat_map(tensorflow.data.TextLineDataset).map(_line_of), False),
    ],
)
def test_pipelines_that_depend_on_more_than_their_graph(told, root, tmp_path, make, is_seen):
    """They are converted anew each time, and nothing of them stays."""
    path = tmp_path / "number.txt"
    path.write_text("7")
    path.with_suffix(".list").write_text(str(path))
    given = make(path)
    found = of(lambda: (given, given))
    assert bool(found.entry) == is_seen == (not told) and len(entries(root)) == is_seen
    assert found.num_samples >= 1 and bool(found.text)


def test_arrays_of_a_pipeline_that_is_converted_anew_are_shared(told, monkeypatch):
    """All of them, also the small ones, as another task would have others."""
    monkeypatch.setattr(cache, "LARGE", 100)
    found = of(lambda: (_generator(*(([float(n), n], n % 3) for n in range(40))), dataset(3)))
    assert isinstance(found.x_train, Rows) and not found.x_train.has_file
    with open(os.memfd_create("data"), "rb") as shared:
        datasets.share(found, shared.fileno(), whole=True)
        monkeypatch.setenv("LAUNCHER_DATA", str(shared.fileno()))
        monkeypatch.setattr(task_status, "is_fork", True)
        again = sources.load(settings("no_such_file.py:f"))
    assert numbers_in(again.train) == numbers_in(found.train) == list(range(40)) and again.text == found.text


def _arrays(folder, told, n=30):
    (folder / "x.float32").write_bytes(np.arange(n, dtype=np.float32).tobytes())
    (folder / "y.int32").write_bytes(np.arange(n, dtype=np.int32).tobytes())
    told(1, 2)
    half = {"x": f"x.float32 {n}", "y": f"y.int32 {n}"}
    arrays = {f"{axis}_{name}": text for name in ("train", "test") for axis, text in half.items()}
    return {"arrays": arrays, "columns": None, "text": "from somewhere"}


@pytest.fixture
def folder(tmp_path):
    return cache.folder_of(str(tmp_path / "own"))


def test_two_runs_that_convert_at_once(folder):
    """The second waits for the first, and finds its entry."""
    begun, go_on, found, made = threading.Event(), threading.Event(), [], []

    def slow(into, told):
        made.append(into)
        begun.set()
        assert go_on.wait(60)
        return _arrays(into, told)

    threads = [threading.Thread(target=lambda: found.append(cache.converted(folder, "key", {}, slow))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and [len(data.x_train) for data in found] == [30, 30] and entries(folder) == ["key"]


def test_leftovers_of_a_killed_run_are_removed(folder):
    """An unfinished folder whose lock is free; not that of a run that still converts."""
    for name in ("key", "other", "busy"):
        (folder / f"{name}.unfinished").mkdir()
        (folder / f"{name}.unfinished" / "x.float32").write_bytes(b"half")
    with open(folder / "busy.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert len(cache.converted(folder, "key", {}, _arrays).x_train) == 30
    assert entries(folder) == ["busy.unfinished", "key"]


def test_a_full_disk(folder, user_error):
    """Nothing is left behind."""

    def full(into, told):
        _arrays(into, told)
        raise OSError(errno.ENOSPC, "No space left on device")

    with user_error(f"--data_cache={folder}, for converted data: its disk is full; the arrays need about 0.5 kB; name another"):
        cache.converted(folder, "key", {}, full)
    assert entries(folder) == []


def test_a_file_that_changes_meanwhile(folder, tmp_path, user_error):
    path = tmp_path / "a.csv"
    path.write_text("1")

    def grows(into, told):
        path.write_text("12")
        return _arrays(into, told)

    with user_error(f"{path} has changed while it was read: start again when it is complete"):
        cache.converted(folder, "key", sources.state_of([str(path)]), grows)
    assert entries(folder) == []


@pytest.mark.parametrize("file, contents", [("x.float32", b"short"), ("about.json", b"{}"), ("about.json", b"[")])
def test_a_damaged_entry_is_made_again(folder, told, file, contents):
    cache.converted(folder, "key", {}, _arrays)
    (folder / "key" / file).write_bytes(contents)
    assert len(cache.converted(folder, "key", {}, _arrays).x_train) == 30
    assert told == [f"{folder}/key is damaged: the data are converted again"]


def test_a_folder_that_cannot_be_used(tmp_path, user_error, monkeypatch):
    (tmp_path / "file").touch()
    with user_error(f"--data_cache={tmp_path}/file/own, for converted data: it cannot be made: "):
        cache.folder_of(f"{tmp_path}/file/own")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with user_error(f"--data_cache={tmp_path}, for converted data: it cannot be written; name another folder"):
        cache.folder_of(str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with user_error(f"--data_cache={tmp_path}, for converted data: it belongs to another user"):
        cache.folder_of(str(tmp_path))


def test_progress_of_a_conversion(monkeypatch, told):
    """It is an activity of the task, so that the launcher sees that it goes on; a long one is told to the user."""
    said: list = []
    monkeypatch.setattr(task_status, "doing", lambda what, *_: said.append(what))
    times = itertools.count(100, 10)
    monkeypatch.setattr(cache.time, "monotonic", lambda: next(times))
    tells = cache._Told()
    for done in (1, 2, 4):
        tells(done, 4)
    tells(9)
    texts = "25%, 60 s left", "50%, 30 s left", "100%, 0 s left", "9 samples"
    assert said == [f"converting the data: {text}" for text in texts]
    assert told == ["converting the data: 100%, 0 s left"]


def test_the_error_of_a_function_is_one_line(user_error):
    with user_error("--data=d.py:f: the samples of the training set cannot be read: FileNotFoundError: [Errno 2] no"):
        list(pipelines.in_types(_raises(), "--data=d.py:f", "of the training set"))


def test_a_file_that_a_generator_does_not_find(user_error):
    """The error is that of the samples, not of the cache."""

    def numbers():
        yield [1.0], 1
        open("/no/such/file")

    kinds = tensorflow.TensorSpec([1]), tensorflow.TensorSpec([], tensorflow.int32)
    missing = tensorflow.data.Dataset.from_generator(numbers, output_signature=kinds)
    with user_error("--data=d.py:f: the samples of the training set cannot be read: ", "FileNotFoundError"):
        of(lambda: (missing, dataset()))


def _raises():
    raise FileNotFoundError(errno.ENOENT, "no")
    yield


# --- Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_a_run_on_files_in_which_a_worker_is_killed(run_dir, tmp_path):
    """It goes on, is stopped, and is resumed with the entry of the cache."""
    for i in range(4):
        write_table(tmp_path / f"{i}.csv", range(i, 400, 4))
    flags = f"--data={tmp_path}/*.csv", f"--data_cache={tmp_path}/own", "--learning_rate=0.0001", "--batch_size=10"
    process = start(run_dir, "--launch", *flags, *ENDLESS)
    read_until(process, lambda line: "360 samples, 180 for each of 2 workers, from 4 files" in line)
    wait_until(process, lambda: updates_of(run_dir, 1) > 0)
    send(run_dir, "worker", 1, signal.SIGKILL)
    read_until(process, lambda line: line.startswith("worker 1 was killed"))
    read_until(process, is_training)
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    [entry] = entries(tmp_path / "own")
    assert json.loads((run_dir / "data.json").read_text())["entry"] == f"{tmp_path}/own/{entry}"
    run(run_dir, *flags, *ENDLESS, "--resume", "--seconds=1")
    assert result_of(run_dir)["test_accuracy"] is not None and entries(tmp_path / "own") == [entry]
    described = json.loads((run_dir / "columns" / "columns.json").read_text())
    assert [column["name"] for column in described["columns"]] == ["a", "b"] and described["label"] == "label"


def test_what_makes_inputs_of_a_row_is_copied(tmp_path):
    """The columns, the vocabulary of each with strings, the classes; a second time, too."""
    columns = {"a": ["x", "z", "y", "x"] * 10, "b": list(range(40)), "kind": ["no", "yes"] * 20}
    write_table(tmp_path / "a.csv", (), columns)
    entry = sources.load(settings(tmp_path / "a.csv")).entry
    for _ in range(2):
        copy_columns(entry, tmp_path / "columns")
    described = json.loads((tmp_path / "columns" / "columns.json").read_text())
    assert described["classes"] == ["no", "yes"] and described["label"] == "kind"
    vocabulary = described["columns"][0]["vocabulary"]
    assert json.loads((tmp_path / "columns" / vocabulary).read_text()) == ["x", "z", "y"]


CHANGED = [
    (lambda own: own["s"].insert(0, own["s"].pop()), "the number 0 in 's' was 'x', and is 'w' in the present files"),
    (lambda own: own.update(label=["a", "no"] * 20), "the number 0 in 'label' was 'no', and is 'a' in the present files"),
    (lambda own: own.update(b=own.pop("a"), a=own.pop("b")), "of the data have changed: 'a' was there, and is 's' now"),
    (lambda own: own.update(c=own.pop("b")), "the columns of the data have changed: 'b' was there, and is 'c' now"),
]


@pytest.mark.parametrize("change, text", [*CHANGED, (lambda own: [own[name].append(own[name][0]) for name in own], None)])
def test_a_resumed_run_has_the_same_numbers_for_strings_and_classes(tmp_path, user_error, change, text):
    """Else the parameters would belong to others. More rows, with strings that are known, change nothing."""
    columns = {"a": list(range(40)), "s": ["x", "y", "z", "w"] * 10, "b": list(range(40)), "label": ["no", "yes"] * 20}
    write_table(tmp_path / "a.csv", (), columns)
    copy_columns(sources.load(settings(tmp_path / "a.csv", label="label")).entry, tmp_path / "columns")
    change(columns)
    write_table(tmp_path / "a.csv", (), columns)
    entry = sources.load(settings(tmp_path / "a.csv", label="label")).entry
    with user_error(text) if text else contextlib.nullcontext():
        check_columns(entry, tmp_path / "columns")


TABLE = """
def build():
    import keras
    from common import Embedding

    a, b = keras.Input([], name="a", dtype="int64"), keras.Input([1], name="b")
    return keras.Model([b, a], keras.layers.Dense(3)(keras.layers.Concatenate()([Embedding(None, 2)(a), b])))
"""


@pytest.mark.cluster
def test_workers_with_a_table_lease_samples_of_files_by_name(run_dir, tmp_path):
    """One of them leaves. The ids are beyond those of float32."""
    n = np.arange(300)
    write_table(tmp_path / "a.parquet", (), {"a": 2**31 + n, "b": n / 300, "label": n % 3})
    (tmp_path / "m.py").write_text(TABLE)
    flags = f"--data={tmp_path}/a.parquet", f"--data_cache={tmp_path}/own", f"--model={tmp_path}/m.py:build", "--batch_size=10"
    process = start(run_dir, "--launch", *flags, "--num_workers=2", "--max_workers=3", *ENDLESS)
    line = read_until(process, lambda line: "270 samples, which workers lease piece by piece, from 1 file" in line)
    assert "the inputs are columns: 'b', 'a'" in line
    wait_until(process, lambda: updates_of(run_dir, 1) > 0)
    send(run_dir, "worker", 1, signal.SIGTERM)
    read_until(process, lambda line: line.startswith("the place of worker 1 is free"))
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
