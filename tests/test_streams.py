"""Data that are read while training goes on: whose samples are whose, in which order, and what is refused."""

import csv
import functools
import itertools
import os
import signal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow
from runs import HOGWILD, ROOT, finish, is_training, processes, read_until, result_of, run, start

from common import tf, train
from common.cli import serialization
from common.core import plots
from common.core.flags import Settings, TrainingFailed
from common.data import files as in_files
from common.data import sources, streams
from common.data.files import FilePart
from common.models import keras_model
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.training.model_and_data import what_is_trained
from common.training.sample_counts import last_step

FLAGS = {name: None for name in ("test_data", "label", "parse", "steps", "seconds", "run_dir")}
PARSE = """
import tensorflow as tf

def parse(record):
    numbers = tf.io.decode_raw(record, tf.int32)
    return tf.cast(numbers[:2], tf.float32), numbers[2]
"""

TAKES_TWO = """
def takes_two(record, other):
    return record, other
"""


def settings(spec, **others):
    return Settings(**{**FLAGS, "data": str(spec), "num_workers": 1, "seed": 0, "check": False, **others})


def write_table(path, numbers, columns=None):
    """A file of samples (n, n + 0.5) with the class n mod 3, for each of these numbers."""
    columns = columns or {"a": [float(n) for n in numbers], "label": [n % 3 for n in numbers], "b": [n + 0.5 for n in numbers]}
    if path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    else:
        pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_records(path, numbers):
    with tensorflow.io.TFRecordWriter(str(path)) as file:
        for n in numbers:
            file.write(np.array([n, 10 * n, n % 3], np.int32).tobytes())


@pytest.fixture(params=["csv", "parquet", "tfrecord"])
def files(request, tmp_path, monkeypatch):
    """A function that writes files with so many records, numbered throughout; returns the flags that name them."""
    monkeypatch.setattr(streams, "BLOCK_SAMPLES", 7)
    (tmp_path / "parse.py").write_text(PARSE)

    def write(*lengths, name="train", first=0):
        number = itertools.count(first)
        for i, length in enumerate(lengths):
            path = tmp_path / f"{name}-{i}.{request.param}"
            (write_records if request.param == "tfrecord" else write_table)(path, list(itertools.islice(number, length)))
        parse = {"parse": f"{tmp_path}/parse.py:parse"} if request.param == "tfrecord" else {}
        return {"spec": f"{tmp_path}/{name}-*.{request.param}", **parse}

    return write


def numbers_in(batches):
    """The numbers of the samples, which the labels have to fit."""
    found = [np.concatenate(arrays) for arrays in zip(*batches, strict=True)]
    assert np.array_equal(found[0][:, 0] % 3, found[1])
    return found[0][:, 0].astype(int).tolist()


def epoch_of(stream, worker, start=0, batches=None, batch_size=1):
    """The numbers of the samples that a worker draws, of one epoch if `batches` says nothing else."""
    count = stream.shares[worker].count if batches is None else batches
    return numbers_in(itertools.islice(stream.training_batches(worker, batch_size, 5 + worker, start), count))


@pytest.mark.parametrize(
    "lengths, num_workers, by_files", [((30,), 3, False), ((25, 24, 25), 3, True), ((50, 9, 3), 2, False), ((12, 11), 1, True)]
)
def test_every_sample_once_an_epoch_over_all_workers(files, lengths, num_workers, by_files):
    stream = sources.load(settings(**files(*lengths), num_workers=num_workers))
    total = sum(lengths)
    held = [n for n in range(total) if (n - start_of(n, lengths)) % 10 == 9]
    shares = [epoch_of(stream, worker) for worker in range(num_workers)]
    assert sorted(itertools.chain(*shares)) == sorted(set(range(total)) - set(held))
    assert [len(share) for share in shares] == [share.count for share in stream.shares]
    assert numbers_in(stream.test_batches(4)) == held and stream.test.count == len(held)
    files_of = [{start_of(n, lengths) for n in share} for share in shares]
    assert (sum(map(len, files_of)) == len(lengths)) == by_files
    assert max(map(len, shares)) <= 1.1 * min(map(len, shares)) + 1
    assert stream.num_samples == total - len(held)


def start_of(number, lengths):
    """The number of the first record of the file that has this one."""
    return max(start for start in itertools.accumulate(lengths, initial=0) if start <= number)


def test_in_memory_are_all_samples_of_all_workers(files, regression):
    stream = sources.load(settings(**files(25, 24), num_workers=2))
    found = streams.in_memory(stream)
    held = [n for n in range(49) if (n - start_of(n, (25, 24))) % 10 == 9]
    assert sorted(numbers_in([found.train])) == sorted(set(range(49)) - set(held)) and numbers_in([found.test]) == held
    assert found.x_train.dtype == stream.first.x_train.dtype and streams.in_memory(regression) is regression


@pytest.mark.parametrize("count, line", [(None, "never ends"), (10**12, "take 12.0 TB, but half of this machine's memory is ")])
def test_what_memory_cannot_hold_is_not_read(tmp_path, user_error, count, line):
    (tmp_path / "d.py").write_text(f"""
import numpy as np
import tensorflow as tf

def data():
    one = tf.data.Dataset.from_tensors((np.zeros(2, "f4"), np.zeros(1, "f4")))
    return one.repeat({count}), one
""")
    with user_error(f"--data={tmp_path}/d.py:data: the", line):
        streams.in_memory(sources.load(settings(f"{tmp_path}/d.py:data", steps=1)))


def test_a_worker_goes_on_where_it_was(files):
    """In any block or epoch, with any number of samples in a batch."""
    stream = sources.load(settings(**files(25, 13), num_workers=2))
    whole = epoch_of(stream, 1, batches=50)
    for begin in (6, 7, 17, 40):
        assert epoch_of(stream, 1, begin, 3, batch_size=3) == whole[begin : begin + 9], begin


def test_another_order_in_each_epoch_and_of_each_seed(files):
    stream = sources.load(settings(**files(20, 20)))
    first, second = np.split(np.array(epoch_of(stream, 0, batches=72)), 2)
    assert sorted(first) == sorted(second) and list(first) != list(second) and list(first) != sorted(first)
    other = numbers_in(itertools.islice(stream.training_batches(0, 1, 6), 36))
    assert other != list(first) and sorted(other) == sorted(first)


def test_a_test_set_of_its_own(files):
    given, test = files(12), files(5, name="test", first=100)
    stream = sources.load(settings(**given, test_data=test["spec"]))
    assert sorted(epoch_of(stream, 0)) == list(range(12)) and numbers_in(stream.test_batches(2)) == list(range(100, 105))
    assert "12 samples" not in stream.text() and f"test: {test['spec']}, 5 samples" in stream.text()


def test_what_the_check_has_found_is_not_looked_for_again(files, tmp_path, monkeypatch):
    given = settings(**files(20, 20), num_workers=2, run_dir=str(tmp_path))
    found = sources.load(given)
    (tmp_path / "data.json").write_text(sources.json.dumps(sources.to_keep(given, found)))
    monkeypatch.setattr(sources, "_look_at", None)
    assert epoch_of(sources.load(given), 1) == epoch_of(found, 1)
    with pytest.raises(TypeError):  # other data
        sources.load(given.but(num_workers=3))


@pytest.mark.parametrize("held, first, step", [(None, 0, 1), (None, 1, 3), (False, 0, 1), (False, 2, 3), (True, 0, 1)])
def test_count_of_a_part(held, first, step):
    for total in range(32):
        part = FilePart("", total, held, first, step)
        assert part.count == np.count_nonzero(part.chosen(np.arange(total)))


@pytest.mark.parametrize("held", [None, False])
@pytest.mark.parametrize("number", [0.25, 0.3, 0.9, 1e-6])
def test_validation_and_the_shares_of_workers_are_all_of_a_part(held, number):
    """Each record is in one of them, and the share is that of the flag, to a record."""
    share = in_files.share_of(number)
    for total in range(50):
        whole = FilePart("", total, held)
        of_workers = [whole._replace(share=share, first=i, step=3) for i in range(3)]
        validation = whole._replace(share=share, validates=True)
        chosen = [part.chosen(np.arange(total)) for part in (*of_workers, validation)]
        assert [np.count_nonzero(each) for each in chosen] == [part.count for part in (*of_workers, validation)]
        np.testing.assert_array_equal(sum(each.astype(int) for each in chosen), whole.chosen(np.arange(total)))
        assert validation.count == int(number * whole.count + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("lengths, num_workers", [((30,), 3), ((25, 24, 25), 3), ((50, 9, 3), 2)])
def test_held_out_samples_are_nobodys(files, lengths, num_workers):
    """Neither a worker's nor of the test set, which stays as it was; and the same ones each time."""
    given = settings(**files(*lengths), num_workers=num_workers)
    before, stream = sources.load(given), sources.load(given.but(validation=0.25))
    of_test, held = numbers_in(stream.test_batches(4)), numbers_in(stream.validation.test_batches(4))
    assert of_test == numbers_in(before.test_batches(4)) and held == numbers_in(stream.validation.test_batches(5))
    shares = [epoch_of(stream, worker) for worker in range(num_workers)]
    assert sorted(itertools.chain(*shares, held, of_test)) == list(range(sum(lengths)))
    assert stream.held_out.count == len(held) == sum((n - n // 10) // 4 for n in lengths)
    assert stream.num_samples == before.num_samples - len(held)
    assert f"; validation: {len(held)} samples; read while it trains" in stream.text()


def line_of(stream):
    model = keras_model.build("mlp", stream.first)
    return what_is_trained(model, stream, len(stream.shares), "SGD on the ps")


def test_first_line_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(4):
        write_table(tmp_path / f"{i}.csv", range(10))
    assert line_of(sources.load(settings("*.csv", num_workers=2))) == (
        "minimizes sparse categorical crossentropy of logits, by SGD on the ps; 36 samples, 18 for each of 2 workers, from 4 "
        "files *.csv, whole files for each worker; test: every 10th record, 4 samples; label: the column 'label', the sample: "
        "the other 2; read while it trains, shuffled in blocks of 18 samples, of which three take 0.6 kB of memory"
    )
    assert "every 5th record for each worker" in line_of(sources.load(settings("*.csv", num_workers=5)))


def test_tables_of_other_types(tmp_path):
    """Columns of lists are parts of the sample, too; bytes stay bytes, whole numbers stay so."""
    images = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.arange(48, dtype=np.uint8)), 4)
    write_table(tmp_path / "a.parquet", (), {"image": images, "target": np.arange(12) / 2, "z": np.arange(12, dtype=np.uint8)})
    stream = sources.load(settings(tmp_path / "*.parquet"))
    x, y = next(stream.test_batches(5))
    assert x.dtype == np.uint8 and x.tolist() == [[36, 37, 38, 39, 9]] and y.dtype == np.float32 and y.tolist() == [4.5]
    stream = sources.load(settings(tmp_path / "*.parquet", label="z"))
    assert next(stream.test_batches(5))[0].tolist() == [[36, 37, 38, 39, 4.5]] and stream.classes == [0, 11]


# --- Datasets of tf.data --------------------------------------------------------------------------------------------------


def dataset(n=20, first=0):
    x = np.arange(first, first + n)
    return tensorflow.data.Dataset.from_tensor_slices((np.stack([x, 10 * x], 1).astype(np.float32), x % 3))


def of(function, **others):
    return sources.of_function(settings("d.py:f", **others), function)


def test_datasets_are_shared_by_their_samples(monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_SAMPLES", 7)
    stream = of(lambda: (dataset(), dataset(5, 100)), num_workers=3)
    assert [sorted(epoch_of(stream, i)) for i in range(3)] == [list(range(i, 20, 3)) for i in range(3)]
    assert numbers_in(stream.test_batches(3)) == list(range(100, 105))
    assert epoch_of(stream, 1, start=9, batches=3) == epoch_of(stream, 1, batches=12)[9:]
    assert "20 samples, 6 or 7 for each of 3 workers, from a tf.data.Dataset; test: 5 samples" in line_of(stream)


def test_a_function_that_shards_by_itself(monkeypatch):
    stream = of(lambda num_workers, index: (dataset(10 + index, 50 * index), dataset(3)), num_workers=2)
    assert [sorted(epoch_of(stream, i)) for i in range(2)] == [list(range(10)), list(range(50, 61))]
    assert "21 samples, 10 or 11 for each of 2 workers, from a tf.data.Dataset of each worker's own" in line_of(stream)


@pytest.mark.parametrize("by_itself", [False, True])
def test_samples_held_out_of_datasets(by_itself):
    """Every fourth, of each worker's own, too."""
    pairs = [(dataset(10 + i, 50 * i), dataset(3)) for i in range(2)]
    function = (lambda num_workers, index: pairs[index]) if by_itself else lambda: pairs[0]
    stream = of(function, num_workers=2, validation=0.25)
    held = [3, 7, 53, 57] if by_itself else [3, 7]
    assert numbers_in(stream.validation.test_batches(3)) == held
    whole = [*range(10), *range(50, 61)] if by_itself else range(10)
    assert sorted(epoch_of(stream, 0) + epoch_of(stream, 1)) == [n for n in whole if n not in held]
    assert [share.count for share in stream.shares] == ([8, 9] if by_itself else [4, 4])
    assert numbers_in(stream.test_batches(2)) == [0, 1, 2]


@pytest.mark.parametrize(
    "train, text",
    [
        (lambda: dataset().shuffle(9), "the training set is shuffled, so --validation would hold out other samples each time"),
        (lambda: dataset().repeat(), "the training set never ends, so --validation cannot hold out a share of it"),
        (lambda: dataset(3), "--validation=0.25 holds out 0 of 3 samples: expected some, not all"),
    ],
)
def test_where_nothing_can_be_held_out(user_error, train, text):
    with user_error(text):
        of(lambda: (train(), dataset()), steps=5, validation=0.25)


def test_files_of_which_nothing_can_be_held_out(user_error, tmp_path):
    write_table(tmp_path / "a.csv", range(12))
    with user_error("--validation=0.01 holds out 0 of 11 samples: expected some, not all"):
        sources.load(settings(tmp_path / "*.csv", validation=0.01))


@pytest.mark.slow
def test_a_dataset_of_unknown_length_is_counted():
    stream = of(lambda: (dataset().filter(lambda x, y: y < 2), dataset()))
    assert stream.num_samples == 14 and len(epoch_of(stream, 0)) == 14


def test_a_dataset_without_end():
    stream = of(lambda: (dataset().repeat(), dataset()), steps=5, num_workers=2)
    assert stream.num_samples is None and "an unknown or endless number of samples, from" in line_of(stream)
    numbers = epoch_of(stream, 1, batches=40)
    assert len(numbers) == 40 and set(numbers) == set(range(1, 20, 2))
    assert last_step(settings("", steps=5), None) == 5 and last_step(settings(""), None) == streams.ENDLESS


def test_inputs_of_several_arrays_and_weights():
    def named(x, y):
        return {"left": x[:1], "right": x[1]}, y, tensorflow.cast(y, tensorflow.float64) / 2

    stream = of(lambda: (dataset().map(named), dataset().map(named)))
    x, y, w = next(stream.training_batches(0, 4, 0))
    assert x["left"].shape == (4, 1) and np.array_equal(10 * x["left"][:, 0], x["right"])
    assert w.dtype == np.float32 and np.array_equal(w, y / 2)


def test_keys_that_are_not_in_the_order_of_the_alphabet():
    """Each array of a batch in the graph is that of its key in the dataset's own elements: of samples, labels and weights."""

    def named(x, y):
        values = {"price": x[:1], "area": x[1:], "floor": (x[:1] + 1, {"up": x[1:] + 2, "down": x[:1] + 3})}
        return values, {"sold": x[:1] / 2, "days": x[1:] / 2}, {"sold": x[0] + 5, "days": x[1] + 5}

    own = dataset().map(named)
    stream = of(lambda: (own, own))
    with tf.Graph().as_default(), tf.Session() as session:
        batch = session.run(stream.as_tensors(streams.TestSet(stream, 4)._draw, tf.constant(0, tf.int64), None))
    expected = next(own.batch(4).as_numpy_iterator())
    tf.nest.map_structure(np.testing.assert_array_equal, batch, expected)
    assert batch[0]["price"][1, 0] == 1 and batch[0]["area"][1, 0] == 10


def _generator(*elements):
    kinds = tensorflow.TensorSpec(None, tensorflow.float32), tensorflow.TensorSpec([], tensorflow.int32)
    return tensorflow.data.Dataset.from_generator(lambda: iter(elements), output_signature=kinds)


@pytest.mark.parametrize(
    "train, texts",
    [
        (lambda: dataset().batch(4), "the training set gives batches, expected single samples"),
        (
            lambda: dataset().batch(4, drop_remainder=True).map(lambda x, y: (x, y)).prefetch(2),
            "the training set gives batches",
        ),
        (lambda: dataset().shuffle(9), "the training set is shuffled, so no worker could tell which samples are its own"),
        (lambda: dataset().repeat(), "the training set never ends: give --steps or --seconds"),
        (lambda: dataset().map(lambda x, y: x), "of the training set its elements are TensorSpec(shape=(2,)"),
        (lambda: dataset().map(lambda x, y: (x, tensorflow.as_string(y))), "its elements hold strings, expected numbers"),
        (lambda: dataset().map(lambda x, y: (tensorflow.sparse.from_dense(x), y)), "hold SparseTensorSpec, expected dense"),
        (lambda: dataset().map(lambda x, y: (x / 0, y)), "of the training set: x holds "),
        (lambda: dataset().map(lambda x, y: (x[:1], y)), "x_train holds float32 of shape (1,), x_test float32 of shape (2,)"),
        (lambda: dataset().map(lambda x, y: (x, tensorflow.cast(y, tensorflow.float32))), "y_train holds float32 of shape ()"),
        (lambda: dataset().take(0), "the training set has no samples"),
        (lambda: dataset().take(1), "there are too few samples for 2 workers: worker 1 has none"),
        (
            lambda: _generator(*2 * [([0.0], 1)], ([0.0, 1.0], 1)),
            "InvalidArgumentError: Cannot batch tensors with different sha",
        ),
        (lambda: _generator(([0.0], 1), (["a"], 1)), "cannot be counted: InvalidArgumentError: TypeError: "),
        (lambda: 3, "must give (training set, test set), two tf.data.Datasets"),
    ],
)
def test_datasets_that_are_refused(user_error, train, texts):
    with user_error(f"--data=d.py:f{' ' if texts.startswith('must') else ': '}", texts):
        of(lambda: (train(), dataset()), num_workers=2)


def test_batches_that_are_taken_apart_and_one_worker_that_shuffles():
    assert of(lambda: (dataset().batch(4).unbatch().shuffle(5), dataset())).num_samples == 20


def test_a_test_set_without_end(user_error):
    with user_error("--data=d.py:f: the test set never ends: limit it with take()"):
        of(lambda: (dataset(), dataset().repeat()))


def test_datasets_of_a_program_have_to_be_sent_as_a_function(user_error):
    with user_error("the data: a tf.data.Dataset cannot be sent to the workers: give a function that returns the pair"):
        train("HogWild", "mlp", (dataset(), dataset()))
    with user_error("parse must be 'FILE.py:FUNCTION', not a function of this program"):
        train("HogWild", "mlp", "*.tfrecord", parse=len)
    assert serialization.loaded(lambda: (dataset(), dataset(4))).x_test.shape == (4, 2)


def test_a_csv_file_that_is_not_in_utf_8(user_error, tmp_path):
    (tmp_path / "a.csv").write_bytes("größe,label\n1,0\n2,1\n".encode("latin1"))
    with user_error("a.csv cannot be read: it is not UTF-8; convert it, as with `iconv -f latin1 -t utf8`"):
        sources.load(settings(tmp_path / "*.csv"))


def test_whole_numbers_keep_their_bits(tmp_path):
    """Of Parquet, where all columns are whole numbers; beside fractions up to 2 to the power of 24, and numbers that fit."""
    write_table(tmp_path / "a.parquet", [], good(a=[2**24 + n for n in range(12)]))
    x = sources.load(settings(tmp_path / "*.parquet")).first.x_train
    assert x.dtype == np.int64 and x[:3, 0].tolist() == [2**24, 2**24 + 1, 2**24 + 2]
    write_table(tmp_path / "b.csv", [], good(a=[2**24 - n for n in range(11)] + [2**30], b=[0.5] * 12))
    x = sources.load(settings(tmp_path / "*.csv")).first.x_train
    assert x.dtype == np.float32 and x[:3, 0].tolist() == [2**24, 2**24 - 1, 2**24 - 2]


# --- Files that are refused -----------------------------------------------------------------------------------------------


def good(**columns):
    return {"a": list(range(12)), "label": [n % 3 for n in range(12)], **columns}


@pytest.mark.parametrize(
    "name, columns, flags, text",
    [
        ("b.csv", good(name=["x"] * 12), {}, "a.csv has other columns than the first file: 'name'"),
        (
            "a.csv",
            good(name=["x"] * 12),
            {},
            "a.csv cannot be read: ArrowInvalid: In CSV column #2: Row #2: CSV conversion error to double",
        ),
        (
            "a.parquet",
            good(name=["x"] * 12),
            {},
            "a.parquet: the column 'name' holds string, expected numbers: leave it out of",
        ),
        (
            "a.csv",
            good(label=[*range(11), ""]),
            {},
            "a.csv: the column 'label' holds 1 empty values: fill them, or leave their",
        ),
        ("a.parquet", good(a=[*range(11), None]), {}, "a.parquet: the column 'a' holds 1 empty values"),
        ("a.parquet", good(a=[[1], [1, 2]] * 6), {}, "a.parquet: the column 'a' holds lists of different lengths, such as 1"),
        ("a.parquet", good(a=[np.nan] * 12), {}, "a.parquet: the column 'a' holds 12 values that are NaN or infinite"),
        ("a.csv", good(a=[2**24 + 1] * 12), {}, "a.csv: the column 'a' holds the whole number 16,777,217, which float32"),
        (
            "a.parquet",
            good(a=[2**24 + 1] * 12, b=[0.5] * 12),
            {},
            "a.parquet: the column 'a' holds the whole number 16,777,217, which float32 rounds to 16,777,216: scale",
        ),
        ("a.csv", good(a=[-(2**53) - 1] * 12), {}, "a.csv: the column 'a' holds the whole number -9,007,199,254,740,992"),
        ("a.csv", good(a=[1e300] * 12), {}, "a.csv: the column 'a' holds 1e+300, too large for float32: scale them"),
        ("a.csv", {"": range(12), **good()}, {}, "a.csv has a column without a name, number 1; if pandas wrote its index"),
        ("a.csv", {**good(), "": range(12)}, {}, "a.csv has a column without a name, number 3"),
        ("a.csv", good(), {"label": "b"}, "--label=b: "),
        ("a.csv", {"label": [1] * 12}, {}, "a.csv has only one column, 'label': expected samples and labels"),
        ("a.csv", {"1": [1] * 12, "2": [1] * 12}, {}, "a.csv has no header line: it begins with '1', '2'"),
        ("a.csv", good(), {"parse": "p.py:f"}, "--parse is for --data='DIR/*.tfrecord', not "),
        (
            "a.csv",
            {"a": [1], "label": [1]},
            {},
            "every 10th record of a file is for the test, but no file has that many: give --test_data",
        ),
    ],
)
def test_tables_that_are_refused(user_error, tmp_path, name, columns, flags, text):
    if name == "b.csv":
        write_table(tmp_path / "0.csv", (), good())
        name = "a.csv"
    write_table(tmp_path / name, (), columns)
    with user_error(text):
        sources.load(settings(f"{tmp_path}/*{name[1:]}", **flags))


@pytest.mark.slow
def test_files_that_are_refused(user_error, tmp_path):
    (tmp_path / "parse.py").write_text(
        PARSE + "\ndef wrong(record):\n    return record, 1\n\ndef fails(record):\n    1 / 0\n" + TAKES_TWO
    )
    parse = f"{tmp_path}/parse.py:parse"
    write_records(tmp_path / "0.tfrecord", range(20))
    whole = (tmp_path / "0.tfrecord").read_bytes()
    spec = f"{tmp_path}/*.tfrecord"
    with user_error(f"--data={spec} needs --parse=FILE.py:FUNCTION"):
        sources.load(settings(spec))
    with user_error(f"--data={spec}: its elements hold strings"):
        sources.load(settings(spec, parse=f"{tmp_path}/parse.py:wrong"))
    for damaged, text in (
        (whole[:-3], "1.tfrecord is damaged or not a TFRecord file: record 19 extends beyond its end"),
        (b"\x1f\x8b" + whole, "1.tfrecord is compressed"),
        (whole[:14] + b"\xff" + whole[15:], "1.tfrecord is damaged: DataLossError: corrupted record at 12"),
    ):
        (tmp_path / "1.tfrecord").write_bytes(damaged)
        with user_error(text):
            sources.load(settings(f"{tmp_path}/1.tfrecord", parse=parse))
    (tmp_path / "a.parquet").write_text("no table")
    with user_error(f"--data={tmp_path}/*.parquet: {tmp_path}/a.parquet cannot be read: ArrowInvalid"):
        sources.load(settings(f"{tmp_path}/*.parquet"))
    with user_error(f"--data={tmp_path}/*.csv: there is no such file"):
        sources.load(settings(f"{tmp_path}/*.csv"))
    with user_error("--test_data=*.parquet: expected files of the same kind as --data=", "*.csv, as 'DIR/*.csv'"):
        sources.load(settings(tmp_path / "*.csv", test_data="*.parquet"))
    with user_error("--parse must be FILE.py:FUNCTION, not 'parse.py'"):
        sources.load(settings(spec, parse="parse.py"))
    with user_error(f"--data={spec}: the samples of the training set cannot be read: ZeroDivisionError: "):
        (tmp_path / "1.tfrecord").write_bytes(whole)
        sources.load(settings(spec, parse=f"{tmp_path}/parse.py:fails"))
    with user_error("cannot be read: TypeError: takes_two() missing 1 required positional argument: 'other'"):
        sources.load(settings(spec, parse=f"{tmp_path}/parse.py:takes_two"))
    with user_error("--test_data=no*.csv: there is no such file"):
        write_table(tmp_path / "a.csv", range(12))
        sources.load(settings(tmp_path / "a.csv", test_data="no*.csv"))
    with user_error("a.csv, which is one of --data="):
        sources.load(settings(tmp_path / "*.csv", test_data=f"{tmp_path}/*.csv"))
    with user_error("--label is for --data='DIR/*.csv' or '*.parquet', not digits"):
        sources.load(settings("digits", label="y"))


def test_what_is_wrong_later_names_its_file(user_error, tmp_path):
    write_table(tmp_path / "a.parquet", range(300))
    write_table(tmp_path / "b.parquet", (), {"a": [np.nan] * 9, "label": [1] * 9, "b": [1.0] * 9})
    stream = sources.load(settings(tmp_path / "*.parquet"))
    with user_error(f"--data={tmp_path}/*.parquet: {tmp_path}/b.parquet: the column 'a' holds 9 values that are NaN"):
        epoch_of(stream, 0)


# --- In the graph of a scheme ---------------------------------------------------------------------------------------------


@pytest.fixture
def stream(tmp_path):
    write_table(tmp_path / "a.csv", range(100))
    return sources.load(settings(tmp_path / "*.csv"))


def test_a_window_trains_with_the_samples_in_their_order(initialized, stream):
    """Also in the loop of a window."""
    model = keras_model.build("linear", stream.first, 0)
    with tf.Graph().as_default():
        trains_in_order(model, initialized, stream)


def trains_in_order(model, initialized, stream):
    order = [(x, y) for x, y in itertools.islice(stream.training_batches(0, 8, 3), 4)]
    center = GlobalParameters(model.initial_parameters)
    local = LocalParameters(center, model, streams.StreamedBatches(stream, 0, 8, 3))
    steps = [local.train(window, tf.train.GradientDescentOptimizer(1e-4)) for window in (1, 3)]
    other = LocalParameters(center, model, streams.StreamedBatches(stream, 0, 8, 3), "by_hand")
    feeds = [tf.placeholder(array.dtype, array.shape) for array in order[0]]
    _, gradient, _ = model.loss_and_gradient(other.value, [], *feeds)
    change = other.value.assign_sub(1e-4 * gradient)
    session = initialized(center, local)
    for step in steps:
        session.run(step.operations)
    for batch in order:
        session.run(change, dict(zip(feeds, batch, strict=True)))
    found, expected = session.run([local.value, other.value])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("kept_bytes", [0, 2**20])
def test_evaluation_of_a_test_set_that_is_read(stream, monkeypatch, kept_bytes):
    """Gives what keras does, again and again; also when one was left half done."""
    monkeypatch.setattr(streams, "KEPT_BYTES", kept_bytes)
    model = keras_model.build("mlp", stream.first, 0)
    expected = model.keras_model.evaluate(*next(stream.test_batches(100)), verbose=0, return_dict=True)
    test = streams.TestSet(stream, 4)
    with tf.Graph().as_default(), tf.Session() as session:
        parameters = tf.constant(model.initial_parameters)
        results = model.evaluate_parts(parameters, [], test.part, test.num_samples, test.batch_size)
        session.run(test.part(tf.constant(0)))
        for _ in range(2):
            assert session.run(results) == pytest.approx(expected, rel=1e-5)


def test_state_is_estimated_with_the_same_batches_each_time(graph, stream):
    batches = streams.StreamedBatches(stream, 0, 8, 3)
    first, second = (batches.samples(batches.batch(tf.constant(k))) for k in (0, 1))
    trained = batches.samples(batches.next(1)[0])
    with tf.Session() as session:
        one, two = session.run(first), session.run(second)
        session.run(trained)
        assert np.array_equal(session.run(first)[0], one[0]) and not np.array_equal(one[0], two[0])


def test_batches_that_memory_cannot_hold(graph, stream, user_error):
    """Nobody begins to gather the first one, and a window is looked at, too."""
    with user_error("--batch_size=9223372036854775807 takes at least", "of memory"):
        streams.StreamedBatches(stream, 0, 2**63 - 1, 3)
    with user_error("--batch_size=8 with a window of 1,000,000,000,000,000 steps takes at least", "of memory"):
        streams.StreamedBatches(stream, 0, 8, 3).next(10**15)


def test_what_goes_wrong_in_a_session_is_one_line(graph, stream):
    def fails(error):
        monkeypatch = functools.partial(_raise, error)
        stream.training_batches = lambda *_: itertools.chain([stream.first.train], iter(monkeypatch, None))
        batches = streams.StreamedBatches(stream, 0, 90, 3)
        return [batches.samples(batches.next(1)[0]) for _ in range(2)]

    with tf.Session() as session, pytest.raises(TrainingFailed, match="^b.csv is gone$"), streams.reading(stream):
        for samples in fails(streams.UserError("b.csv is gone")):
            session.run(samples)
    stream._failures.clear()
    logits, label = tf.zeros([1, 3]), tf.constant([7])
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(label, logits)
    with tf.Session() as session, pytest.raises(TrainingFailed, match="there is the class 7, but the model gives 3 outputs"):
        with streams.reading(stream):
            session.run(loss)


def _raise(error):
    raise error


# --- Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_a_run_on_files_in_which_a_worker_is_killed(run_dir, tmp_path):
    """It goes on, is resumed, and a process reads what the check has counted."""
    for i in range(4):
        write_table(tmp_path / f"{i}.csv", range(i, 400, 4))
    flags = f"--data={tmp_path}/*.csv", "--window=5", "--learning_rate=0.0001", "--batch_size=10"
    process = start(run_dir, "--launch", *flags, "--steps=1000000")
    read_until(process, lambda line: "360 samples, 180 for each of 2 workers, from 4 files" in line)
    read_until(process, is_training)
    os.kill(processes(run_dir, "--job_name=worker", "--task_index=1")[0], signal.SIGKILL)
    read_until(process, lambda line: line.startswith("worker 1 was killed"))
    read_until(process, is_training)
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    assert (run_dir / "data.json").exists()
    run(run_dir, *flags, "--resume", "--seconds=1", "--steps=1000000")
    assert result_of(run_dir)["test_accuracy"] is not None


@pytest.mark.cluster
@pytest.mark.parametrize("script", [HOGWILD, ROOT / "Continuous-Evaluation" / "continuous_evaluation.py"])
def test_early_stopping_on_samples_that_are_held_out_of_files(run_dir, tmp_path, script):
    """By the chief, or by an evaluator, which reads the same ones."""
    for i in range(4):
        write_table(tmp_path / f"{i}.csv", range(i, 400, 4))
    flags = f"--data={tmp_path}/*.csv", "--learning_rate=0.0001", "--validation=0.2", "--patience=2", "--steps=1000000000"
    said = run(run_dir, *flags, script=script)
    assert "288 samples, 144 for each of 2 workers, from 4 files" in said and "; validation: 72 samples; read while" in said
    assert result_of(run_dir)["global_steps"] < 1000000000
    lines = [line for line in plots.read_metrics(run_dir) if "validation_loss" in line]
    best = min(line["validation_loss"] for line in lines)
    assert len(lines) >= 3 and all(line["validation_loss"] >= best for line in lines[-2:])


@pytest.mark.cluster
def test_datasets_of_a_cell_for_workers_that_wait_for_each_other(run_dir):
    """Their shares differ, and no worker waits for ever; the model has moving means, the training set no known length."""

    def build():
        import keras

        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input([2]), *layers])

    def load():
        import tensorflow as tf

        x = tf.data.Dataset.range(101).map(lambda n: (tf.cast([n, n % 3], tf.float32), n % 3))
        return x.filter(lambda x, y: x[0] >= 0), x.take(30)

    found = train("Synchronous-SGD", build, load, run_dir=run_dir, num_workers=2, epochs=30, batch_size=5, learning_rate=0.1)
    assert found.result["samples"] == 30 * 101 and found.result["test_accuracy"] > 0.6
    x, y = (np.stack([np.arange(30), np.arange(30) % 3], 1).astype(np.float32), np.arange(30) % 3)
    measured = found.model.evaluate(x, y, verbose=0, return_dict=True)
    assert measured["loss"] == pytest.approx(found.result["test_loss"], rel=1e-4)
    in_files.files_of("--data", f"{run_dir}/result.json")


def test_ordinal_numbers():
    found = [sources._ordinal(n) for n in (2, 3, 4, 10, 11, 12, 13, 21, 22, 101, 111, 112)]
    assert found == ["2nd", "3rd", "4th", "10th", "11th", "12th", "13th", "21st", "22nd", "101st", "111th", "112th"]
