"""Data that are read while training goes on: whose samples are whose, in which order, and what is refused."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow

from common import tf, train
from common.cli import serialization
from common.core.flags import Settings, TrainingFailed
from common.data import sources, streamed_datasets, streams
from common.models import keras_model
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.training.model_and_data import what_is_trained
from common.training.sample_counts import last_step

NONE = "test_data", "label", "parse", "missing", "hash_strings", "max_workers", "validation", "learning_rate_schedule"
FLAGS = dict.fromkeys((*NONE, "steps", "seconds", "run_dir", "data_cache"))


def settings(spec, **others):
    return Settings(**{**FLAGS, "data": str(spec), "num_workers": 1, "seed": 0, "check": False, "stream": True, **others})


def numbers_in(batches):
    """The numbers of the samples, which the labels have to fit."""
    found = [np.concatenate(arrays) for arrays in zip(*batches, strict=True)]
    assert np.array_equal(found[0][:, 0] % 3, found[1])
    return found[0][:, 0].astype(int).tolist()


def epoch_of(stream, worker, start=0, batches=None, batch_size=1):
    """The numbers of the samples that a worker draws, of one epoch if `batches` says nothing else."""
    count = stream.shares[worker].count if batches is None else batches
    return numbers_in(itertools.islice(stream.training_batches(worker, batch_size, 5 + worker, start), count))


def dataset(n=20, first=0):
    x = np.arange(first, first + n)
    return tensorflow.data.Dataset.from_tensor_slices((np.stack([x, 10 * x], 1).astype(np.float32), x % 3))


def of(function, **others):
    return sources.of_function(settings("d.py:f", **others), function)


def line_of(stream):
    model = keras_model.build("linear", stream.first)
    return what_is_trained(model, stream, len(stream.shares), "SGD on the ps")


def test_a_worker_goes_on_where_it_was(monkeypatch):
    """In any block or epoch, with any number of samples in a batch."""
    monkeypatch.setattr(streams, "BLOCK_SAMPLES", 7)
    stream = of(lambda: (dataset(34), dataset()), num_workers=2)
    whole = epoch_of(stream, 1, batches=50)
    for begin in (6, 7, 17, 40):
        assert epoch_of(stream, 1, begin, 3, batch_size=3) == whole[begin : begin + 9], begin


def test_another_order_in_each_epoch_and_of_each_seed(monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_SAMPLES", 7)
    stream = of(lambda: (dataset(36), dataset()))
    first, second = np.split(np.array(epoch_of(stream, 0, batches=72)), 2)
    assert sorted(first) == sorted(second) and list(first) != list(second) and list(first) != sorted(first)
    other = numbers_in(itertools.islice(stream.training_batches(0, 1, 6), 36))
    assert other != list(first) and sorted(other) == sorted(first)


def test_augmentation_is_drawn_anew_in_each_epoch():
    def augmented(x, y):
        # Random numbers of TensorFlow would be the same in each epoch after set_seed, as of another test.
        noise = tensorflow.numpy_function(lambda: np.float32(np.random.random()), [], tensorflow.float32)
        return tensorflow.stack([x[0], tensorflow.ensure_shape(noise, [])]), y

    stream = of(lambda: (dataset(6).map(augmented), dataset()))
    batches = itertools.islice(stream.training_batches(0, 6, 0), 3)
    drawn = [dict(zip(x[:, 0], x[:, 1])) for x, _ in batches]
    assert drawn[0].keys() == drawn[1].keys() and all(drawn[0][n] != drawn[1][n] for n in drawn[0])


def test_what_the_check_has_counted_is_not_counted_again(tmp_path, monkeypatch):
    (tmp_path / "d.py").write_text("""
import tensorflow as tf

def data():
    x = tf.data.Dataset.range(20).map(lambda n: (tf.cast([n, n], tf.float32), n % 3))
    return x.filter(lambda x, y: y < 2), x
""")
    given = settings(f"{tmp_path}/d.py:data", run_dir=str(tmp_path))
    (tmp_path / "data.json").write_text(sources.json.dumps(sources.to_keep(given, sources.load(given))))
    monkeypatch.setattr(streamed_datasets, "_count", None)
    monkeypatch.setenv("LAUNCHER_KEY", "key")
    assert len(epoch_of(sources.load(given), 0)) == 14
    with pytest.raises(TypeError):  # other data
        sources.load(given.but(num_workers=3))


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
        (lambda: _generator(([0.0], 1), (["a"], 1)), "of a set cannot be read: InvalidArgumentError: TypeError: "),
        (lambda: 3, "must give (training set, test set), two tf.data.Datasets"),
    ],
)
def test_datasets_that_are_refused(user_error, train, texts):
    with user_error(f"--data=d.py:f{' ' if texts.startswith('must') else ': '}", texts):
        of(lambda: (train(), dataset()), num_workers=2)


def test_batches_are_taken_apart_and_one_worker_may_shuffle():
    stream = of(lambda: (dataset().batch(6).map(lambda x, y: (x, y)).prefetch(2), dataset(3).batch(2)), num_workers=2)
    assert sorted(epoch_of(stream, 0)) == list(range(0, 20, 2)) and numbers_in(stream.test_batches(2)) == [0, 1, 2]
    assert of(lambda: (dataset().batch(4).unbatch().shuffle(5), dataset())).num_samples == 20


def test_datasets_of_a_program_have_to_be_sent_as_a_function(user_error, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with user_error("the data: a tf.data.Dataset cannot be sent to the workers: give a function that returns the pair"):
        train("HogWild", "mlp", (dataset(), dataset()))
    with user_error("parse must be 'FILE.py:FUNCTION', not a function of this program"):
        train("HogWild", "mlp", "*.tfrecord", parse=len)
    assert serialization.loaded(lambda: (dataset(), dataset(4))).x_test.shape == (4, 2)


# --- In the graph of a scheme ---------------------------------------------------------------------------------------------


@pytest.fixture
def stream():
    return of(lambda: (dataset(90), dataset(10, 90)))


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


def test_state_is_estimated_with_the_same_batches_each_time(stream, graph):
    batches = streams.StreamedBatches(stream, 0, 8, 3)
    first, second = (batches.samples(batches.batch(tf.constant(k))) for k in (0, 1))
    trained = batches.samples(batches.next(1)[0])
    with tf.Session() as session:
        one, two = session.run(first), session.run(second)
        session.run(trained)
        assert np.array_equal(session.run(first)[0], one[0]) and not np.array_equal(one[0], two[0])


def test_batches_that_memory_cannot_hold(stream, graph, user_error):
    """Nobody begins to gather the first one, and a window is looked at, too."""
    with user_error("--batch_size=9223372036854775807 takes at least", "of memory"):
        streams.StreamedBatches(stream, 0, 2**63 - 1, 3)
    with user_error("--batch_size=8 with a window of 1,000,000,000,000,000 steps takes at least", "of memory"):
        streams.StreamedBatches(stream, 0, 8, 3).next(10**15)


def test_what_goes_wrong_in_a_session_is_one_line(stream, graph):
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
def test_datasets_of_a_cell_for_workers_that_wait_for_each_other(run_dir, tmp_path):
    """The model has moving means, the training set no known length; they are arrays from the cache."""

    def build():
        import keras

        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input([2]), *layers])

    def load():
        import tensorflow as tf

        x = tf.data.Dataset.range(101).map(lambda n: (tf.cast([n, n % 3], tf.float32), n % 3))
        return x.filter(lambda x, y: x[0] >= 0), x.take(30)

    flags = {"num_workers": 2, "epochs": 30, "batch_size": 5, "learning_rate": 0.1, "data_cache": str(tmp_path)}
    found = train("Synchronous-SGD", build, load, run_dir=run_dir, **flags)
    assert found.result["samples"] == 30 * 101 and found.result["test_accuracy"] > 0.6
    x, y = (np.stack([np.arange(30), np.arange(30) % 3], 1).astype(np.float32), np.arange(30) % 3)
    measured = found.model.evaluate(x, y, verbose=0, return_dict=True)
    assert measured["loss"] == pytest.approx(found.result["test_loss"], rel=1e-4)
