"""Tables on the ps: each scheme makes of rows what it makes of a whole table on every worker; what cannot be is refused."""

import contextlib
import functools
import json
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from runs import ROOT, SECONDS, processes, read_until, result_of, run, start, wait_until_gone

from common import Embedding, tf, train
from common.core.checkpoints import write_checkpoint
from common.core.flags import UserError
from common.data import datasets
from common.data.batches import Batches
from common.models import keras_model
from common.scheme import tables
from common.scheme.center import GlobalParameters
from common.scheme.local import LocalParameters
from common.scheme.local_rows import LocalRows
from common.scheme.rounds import build_steps
from common.scheme.sharded_tables import Table, factor_of, find_on_ps, first_rows, id_of, place_of
from common.scheme.unbounded import Vocabulary
from common.simulation.replay import Replay

ROWS, WIDTH, N = 23, 4, 60
MODEL = """
import keras
from common import Embedding

def build(layer=Embedding, rows=23, **options):
    ids, numbers = keras.Input([3], dtype="int32", name="ids"), keras.Input([2], name="numbers")
    start = keras.initializers.RandomUniform(-0.5, 0.5, seed=3)
    items = layer(rows, 4, **{"embeddings_initializer": start, "name": "items", **options})
    found = keras.layers.Concatenate()([keras.layers.Flatten()(items(ids)), numbers])
    hidden = keras.layers.Dense(5, activation="tanh")(found)
    return keras.Model({"ids": ids, "numbers": numbers}, keras.layers.Dense(1)(hidden))

def whole():
    return build(keras.layers.Embedding)

def endless():
    return build(rows=None)

def seedless():
    return build(rows=None, embeddings_initializer="normal")

def frozen():
    return build(trainable=False)

def both():
    ids, numbers = keras.Input([3], dtype="int32", name="ids"), keras.Input([2], name="numbers")
    start = keras.initializers.RandomUniform(-0.5, 0.5, seed=3)
    items = Embedding(23, 4, embeddings_initializer=start, name="items")(ids)
    others = Embedding(None, 2, name="others")(10**12 * keras.ops.cast(ids, "int64"))
    found = [keras.layers.Flatten()(items), keras.layers.Flatten()(others), numbers]
    hidden = keras.layers.Dense(5, activation="tanh")(keras.layers.Concatenate()(found))
    return keras.Model({"ids": ids, "numbers": numbers}, keras.layers.Dense(1)(hidden))

def regularized():
    return build(embeddings_regularizer="l2")

def glorot():
    return build(embeddings_initializer="glorot_uniform")

def int64_ids(wide="int64"):
    ids, numbers = keras.Input([3], dtype=wide, name="ids"), keras.Input([2], name="numbers")
    found = Embedding(None, 4, name="items")(ids)
    return keras.Model({"ids": ids, "numbers": numbers}, keras.layers.Dense(1)(keras.layers.Concatenate()(
        [keras.layers.Flatten()(found), numbers])))

def float_ids():
    return int64_ids("float32")

def large_float_ids():
    ids = keras.Input([3], name="ids")
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(Embedding(2**24 + 1, 4, name="items")(ids))))

def half():
    return build(dtype="bfloat16")

def tied():
    model = build()
    model.get_layer("items").embeddings
    return model

def lora():
    model = build()
    model.get_layer("items").enable_lora(2)
    return model

def never_asked():
    model = build()
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.other = model, Embedding(9, 2, name="other")
        def call(self, x):
            return self.inner(x)
    return Own()

def ids_by_chance():
    class Masked(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)
        def call(self, x):
            return keras.ops.where(keras.random.uniform([3], seed=self.seeds) < 0.5, x, 0)
    ids, numbers = keras.Input([3], dtype="int32", name="ids"), keras.Input([2], name="numbers")
    found = keras.layers.Flatten()(Embedding(23, 4, name="items")(Masked()(ids)))
    return keras.Model({"ids": ids, "numbers": numbers}, keras.layers.Dense(1)(keras.layers.Concatenate()([found, numbers])))

def shared(layer=Embedding):
    ids, numbers = keras.Input([3], dtype="int32", name="ids"), keras.Input([2], name="numbers")
    start = keras.initializers.RandomUniform(-0.5, 0.5, seed=3)
    items = layer(23, 4, embeddings_initializer=start, name="items", mask_zero=True)
    mean = keras.layers.GlobalAveragePooling1D()
    some = keras.ops.concatenate([ids, 7 + 0 * ids], axis=1)  # not all of them are 0, which is left out
    found = keras.layers.Concatenate()([mean(items(some)), mean(items(some // 2)), numbers])
    return keras.Model({"ids": ids, "numbers": numbers}, keras.layers.Dense(1)(found))

def shared_whole():
    return shared(keras.layers.Embedding)

def ids_from_rows():
    ids, numbers = keras.Input([3], dtype="int32", name="ids"), keras.Input([2], name="numbers")
    first = Embedding(23, 1, name="first")(ids)
    second = Embedding(9, 2, name="second")(keras.ops.cast(9 * keras.ops.abs(first[..., 0]), "int32"))
    found = keras.layers.Concatenate()([keras.layers.Flatten()(second), numbers])
    return keras.Model({"ids": ids, "numbers": numbers}, keras.layers.Dense(1)(found))
"""
# A scheme, its hyperparameters, a model with tables on the ps, the number of ps.
SCHEMES: list[tuple[str, dict, str, int]] = [
    ("HogWild", {"window": 1, "clip_norm": 0.5}, "build", 3),
    ("HogWild", {"window": 3}, "endless", 3),
    ("DOWNPOUR-Easy", {"window": 3}, "build", 1),
    ("DOWNPOUR", {"window": 3, "n_fetch": None}, "build", 3),
    ("DOWNPOUR", {"window": 2, "n_fetch": 4}, "shared", 2),
    ("AGN", {"window": 3, "local_optimizer": "sgd"}, "endless", 2),
    ("Dynamic-SGD", {"window": 2, "local_optimizer": "sgd"}, "build", 3),
    ("Synchronous-SGD", {"window": 1, "backup_workers": 0}, "endless", 2),
    ("Synchronous-SGD", {"window": 2, "backup_workers": 1}, "build", 1),
    ("Semi-Synchronous-SGD", {"window": 1, "staleness": 2, "issync": False}, "build", 3),
    ("Ringmaster-ASGD", {"window": 1, "staleness_threshold": 2}, "build", 1),
]


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """A path of the models, and data whose ids come more than once in a batch, and three rows never."""
    path = tmp_path_factory.mktemp("models") / "m.py"
    path.write_text(MODEL)
    rng = np.random.default_rng(0)
    ids = rng.zipf(1.5, [N, 3]).clip(max=ROWS - 3).astype(np.int32) - 1
    x = {"ids": ids, "numbers": rng.normal(size=[N, 2]).astype(np.float32)}
    y = rng.normal(size=[N, 1]).astype(np.float32)
    return path, datasets.checked(((x, y), (x, y)), "mine")


@pytest.fixture(scope="module")
def built(problem):
    """A function that builds a model of the problem, each once."""
    path, dataset = problem
    return functools.cache(lambda function, on_ps: keras_model.build(f"{path}:{function}", dataset, 1, tables_on_ps=on_ps))


def hyperparameters(given):
    hp = {"learning_rate": 0.1, "local_learning_rate": None, "num_workers": 2, "overlap": False, **given}
    hp = {"table_optimizer": "scheme", "table_learning_rate": None, **hp}
    return types.SimpleNamespace(**hp)


def table_of(replay):
    """The table of a `Replay`, in the order of the layer, an array `[ROWS, WIDTH]`."""
    center = replay._engine._center
    with replay.graph.as_default():
        return replay.session.run(center.find(types.SimpleNamespace(number=0), tf.range(ROWS)))


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "given", "function", "num_ps"), SCHEMES)
def test_rows_are_trained_as_a_whole_table_is(problem, built, load_scheme, folder, given, function, num_ps):
    """Two workers, stale pushes, one of them slower: x̃, the table and what is logged are equal; rows without ids stay."""
    _, dataset = problem
    scheme, hp = load_scheme(folder, folder.lower().replace("-", "_")), hyperparameters(given)
    sparse, dense = built(function, True), built("shared_whole" if function == "shared" else "build", False)

    def make_batches(i):
        x, y = ({name: array[i::2] for name, array in dataset.x_train.items()}, dataset.y_train[i::2])
        weights = np.linspace(0.5, 1.5, len(y), dtype=np.float32) if function == "shared" else None
        return Batches(x, y, 4, seed=i, name=f"batches_{i}", weights=weights)

    one = Replay(scheme, hp, sparse, make_batches, 2, num_ps)
    first, at = table_of(one), sum(dense.sizes[: dense.shapes.index((ROWS, WIDTH))])
    own = slice(at, at + ROWS * WIDTH)
    others = np.delete(np.arange(dense.size), own)
    np.testing.assert_array_equal(dense.initial_parameters[others], sparse.initial_parameters)
    dense.initial_parameters[own] = first.ravel()
    two = Replay(scheme, hp, dense, make_batches, 2, num_ps)
    for replay in one, two:
        replay.run(20, duration=lambda worker: 1.0 + 0.7 * worker)
        replay.take(np.random.default_rng(5).integers(0, 2, 60).tolist())
    last = table_of(one)
    np.testing.assert_allclose(last.ravel(), two.center[own], atol=1e-5)
    np.testing.assert_allclose(one.center, two.center[others], atol=1e-5)
    assert one.updates == two.updates and any(update.staleness for update in one.updates) or "Synchronous" in folder
    np.testing.assert_array_equal(last[-3:], first[-3:])
    assert np.abs(last[:3] - first[:3]).max() > 0.05
    evaluated = [replay._engine.evaluate(*dataset.test)["loss"] for replay in (one, two)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    one.close()
    two.close()


@pytest.mark.slow
def test_an_optimizer_of_tables_in_place_of_the_schemes(problem, load_scheme):
    """Row-wise Adagrad, one worker: G_r ← G_r + mean g²; x_r ← x_r − η g_r / √G_r, for rows with a gradient; x̃ as ever."""
    path, dataset = problem
    scheme, found = load_scheme("HogWild", "hogwild"), {}
    for how in "sgd", "rowwise_adagrad":
        model = keras_model.build(f"{path}:endless", dataset, 1, tables_on_ps=True)
        hp = hyperparameters({"window": 2, "num_workers": 1, "table_optimizer": how, "table_learning_rate": 0.25})
        replay = Replay(scheme, hp, model, lambda i: Batches(dataset.x_train, dataset.y_train, 4, seed=0), 1, 2)
        before = table_of(replay)
        while not replay.updates:
            replay.step(0)
        found[how] = before, table_of(replay), replay.center
        replay.close()
    (first, sgd, center), (again, rowwise, also) = found["sgd"], found["rowwise_adagrad"]
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(center, also)
    gradients = (first - sgd) / 0.25
    touched = np.abs(gradients).max(axis=1) > 0
    assert 3 < touched.sum() < ROWS - 3
    roots = np.sqrt((gradients[touched] ** 2).mean(axis=1, keepdims=True))
    np.testing.assert_allclose(rowwise[touched], first[touched] - 0.25 * gradients[touched] / roots, atol=1e-4)
    np.testing.assert_array_equal(rowwise[~touched], first[~touched])


@pytest.mark.slow
def test_the_learning_rate_of_tables_follows_the_schedule(problem, built, load_scheme):
    """Half of it at each step is half of the change of the rows."""
    _, dataset = problem
    scheme, found, model = load_scheme("HogWild", "hogwild"), [], built("build", True)
    for schedule in None, lambda step: tf.constant(0.5):
        hp = hyperparameters({"window": 1, "num_workers": 1, "table_optimizer": "sgd", "table_learning_rate": 0.25})
        make = lambda i: Batches(dataset.x_train, dataset.y_train, 4, seed=0)  # noqa: E731
        replay = Replay(scheme, hp, model, make, 1, 2, schedule=schedule)
        before = table_of(replay)
        while not replay.updates:
            replay.step(0)
        found.append(table_of(replay) - before)
        replay.close()
    assert np.abs(found[0]).max() > 1e-3
    np.testing.assert_allclose(found[1], found[0] / 2, atol=1e-7)


@pytest.fixture
def vocabulary(built):
    """A function of ids that gives their rows, pushes 1 for each by Adagrad, and says how many there are, and were dropped."""
    spec = built("endless", True).tables[0]
    with tf.Graph().as_default(), tf.Session() as session:
        table = Vocabulary(spec, 1, None, 6)
        adagrad = tf.train.AdagradOptimizer(0.1)
        ids = tf.placeholder(tf.int64, [None])
        places = tf.sort(table.places(ids))
        (rows,) = table.read(table.ask(places), lambda device: [])
        pushed = table.apply(adagrad, tf.IndexedSlices(tf.ones([tf.size(ids), WIDTH]), places), table.pieces[0])
        (looked,) = table.look(table.ask(places))
        session.run(tf.global_variables_initializer())

        def use(these, push=False):
            found = session.run(rows, {ids: these})
            if push:
                session.run(pushed, {ids: these})
            return found, session.run(looked, {ids: these}), tuple(session.run(table.told())[0])

        yield use


@pytest.mark.slow
def test_rows_that_are_unused_for_long_make_room(vocabulary):
    """For rows whose push comes later, too. A row that comes again begins anew, and so does what the optimizer keeps of it."""
    first, _, told = vocabulary([7], push=True)
    _, once, _ = vocabulary([7])
    np.testing.assert_allclose(once, first - 0.1 / np.sqrt(1.1), atol=1e-6)
    assert told == (1, 0)
    assert vocabulary([1, 2, 3, 10**15])[2] == (5, 0)
    np.testing.assert_array_equal(vocabulary([7])[0], once)  # it is used now, and 1 is the oldest
    assert vocabulary([4, 5])[2] == (6, 1)
    np.testing.assert_array_equal(vocabulary([7])[0], once)
    assert vocabulary([8, 9, 10, 11, 12])[2] == (6, 6)
    np.testing.assert_array_equal(vocabulary([7])[0], once)
    assert vocabulary(list(range(20, 26)))[2] == (6, 12)
    again, looked, told = vocabulary([7], push=True)
    np.testing.assert_array_equal(again, first)
    np.testing.assert_allclose(looked, first - 0.1 / np.sqrt(1.1), atol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="items: --max_rows is too small for the rows of one window"):
        vocabulary(list(range(7)))


@pytest.mark.slow
def test_of_a_checkpoint_with_more_rows_than_there_is_room_the_newest_come_back(built, tmp_path, capsys):
    """On another number of ps, too; a row without a push yet begins anew with its first one."""
    spec = built("endless", True).tables[0]
    ids = np.arange(12)

    @contextlib.contextmanager
    def opened(num_ps, max_rows):
        with tf.Graph().as_default(), tf.Session() as session:
            table = Vocabulary(spec, num_ps, None, max_rows)
            some = tf.placeholder(tf.int64, [None])
            places = tf.sort(table.places(some))
            read = table.read(table.ask(places), lambda device: [])
            gradients = [tf.IndexedSlices(tf.ones([tf.size(each), WIDTH]), each) for each in table.cut(places)]
            adagrad = tf.train.AdagradOptimizer(0.1)
            pushes = [table.apply(adagrad, *pair) for pair in zip(gradients, table.pieces, strict=True)]
            looked = find_on_ps([table])(types.SimpleNamespace(number=0), tf.constant(ids, tf.int64))
            (part,) = table.parts(tf.global_variables())
            session.run(tf.global_variables_initializer())
            kinds = {"pull": read, "push": pushes}
            yield session, table, lambda these, what: session.run(kinds[what], {some: these}), looked, part

    with opened(2, 24) as (session, table, use, looked, part):
        first = session.run(looked)
        for i in range(12):
            use([i], "pull")
        use([2, 3, 8], "push")
        use([2, 3], "push")
        before = session.run(looked)
        with ThreadPoolExecutor(1) as another:  # as in this one a graph is open
            another.submit(write_checkpoint, str(tmp_path), 7, ["step"], [""], [np.int64(7)], part.read(session)).result()
    checkpoint = str(tmp_path / "model.ckpt-7")
    with opened(1, 5) as (session, table, use, looked, part):
        part.restore(session, checkpoint, tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map())
        assert "items: 7 least recently used rows of" in capsys.readouterr().out
        ((count, dropped),) = session.run(table.told())
        assert (count, dropped) == (5, 0)
        after = session.run(looked)
        kept = [i for i in range(12) if (after[i] == before[i]).all() and (before[i] != first[i]).any()]
        assert kept == [2, 3, 8]  # pushed; those of the others that were used last are 10 and 11, or 9, on their ps
        use([2, 8, 11], "push")
        changes = [0.1 * np.sum([1 / np.sqrt(0.1 + k) for k in range(1, pushes + 1)]) for pushes in (3, 2, 1)]
        changed = (first - session.run(looked))[[2, 8, 11]]
        np.testing.assert_allclose(changed, np.repeat(np.array(changes)[:, None], WIDTH, axis=1), atol=1e-5)


@pytest.mark.slow
def test_first_rows_are_those_of_the_run_in_each_task(problem):
    """Without a seed of their own they follow that of the run, not that of a task; and they are those that a file has."""
    path, dataset = problem
    found, ids = [], np.array([3, 2**52])
    for seed, of_run in ((1, 7), (2, 7), (1, 8)):
        model = keras_model.build(f"{path}:seedless", dataset, seed, tables_on_ps=True, tables_seed=of_run)
        with tf.Graph().as_default(), tf.Session() as session:
            table = Vocabulary(model.tables[0], 2, None, 10)
            looked = find_on_ps([table])(types.SimpleNamespace(number=0), tf.constant(ids))
            session.run(tf.global_variables_initializer())
            found.append(session.run(looked))
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).min() > 1e-6
    layer = model.keras_model.get_layer("items")
    layer.fill((ids[:1], np.ones([1, WIDTH], np.float32)))
    again = Embedding.from_config(layer.get_config())
    again.build()
    again.set_weights(layer.get_weights())
    np.testing.assert_array_equal(np.array(again(ids)), [np.ones(WIDTH), found[2][1]])


@pytest.mark.slow
def test_a_layer_that_is_not_trainable_keeps_its_rows(problem, load_scheme):
    path, dataset = problem
    model = keras_model.build(f"{path}:frozen", dataset, 1, tables_on_ps=True)
    replay = Replay(
        *(load_scheme("HogWild", "hogwild"), hyperparameters({"window": 2}), model),
        *(lambda i: Batches(dataset.x_train, dataset.y_train, 4, seed=0), 1, 2),
    )
    before, center = table_of(replay), replay.center.copy()
    while not replay.updates:
        replay.step(0)
    np.testing.assert_array_equal(table_of(replay), before)
    assert np.abs(replay.center - center).max() > 0
    replay.close()


@pytest.mark.parametrize(("function", "pushed"), [("build", 3), ("frozen", 0)])
def test_only_rows_that_are_trained_are_pushed(problem, function, pushed):
    path, dataset = problem
    model = keras_model.build(f"{path}:{function}", dataset, 1, tables_on_ps=True)
    with tf.Graph().as_default(), tf.Session() as session:
        table = Table(model.tables[0], 2, None)
        own = LocalRows(table, 4, lambda: 0)
        places = own.ask([tf.constant([[5, 1, 5], [1, 2, 2]])])
        took = own.take(places, table.read(table.ask(places), lambda device: []))
        parts = own.parts(own.sums())
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(took)
        sent = session.run(parts)
        assert sum(len(part.indices) for part in sent) == sum(len(part.values) for part in sent) == pushed
        assert session.run(own.pushed) == pushed


def test_rows_of_another_type_are_refused(problem):
    path, dataset = problem
    with pytest.raises(UserError, match="items has rows of bfloat16, but tables on the ps hold float32"):
        keras_model.build(f"{path}:half", dataset, 1, tables_on_ps=True)


@pytest.mark.slow
def test_what_is_only_looked_at_does_not_appear(problem):
    path, dataset = problem
    spec = keras_model.build(f"{path}:endless", dataset, 1, tables_on_ps=True).tables[0]
    with tf.Graph().as_default(), tf.Session() as session:
        table = Vocabulary(spec, 3, None, 30)
        places = tf.sort(table.places(tf.constant([5, 2**53 - 1, 0, 77], tf.int64)))
        looked, read = (
            tf.concat(way(table.ask(places)), axis=0) for way in (table.look, lambda a: table.read(a, lambda device: []))
        )
        session.run(tf.global_variables_initializer())
        first = session.run(looked)
        assert sum(count for count, _ in session.run(table.told())) == 0
        np.testing.assert_array_equal(session.run(read), first)
        assert sum(count for count, _ in session.run(table.told())) == 4
        assert len(np.unique(first)) == 16 and np.abs(first).max() < 0.5


FLAGS = {"table_optimizer": "scheme", "save_tables": "yes", "max_rows": 1_000_000, "table_learning_rate": None, "launch": True}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"table_optimizer": "adagrad"}, "--table_optimizer is for tables on the ps, but the model has none"),
        ({"max_rows": 7}, "--max_rows is for tables on the ps, but the model has none"),
        ({"table_learning_rate": 0.1}, "--table_learning_rate is for tables"),
    ],
)
def test_flags_without_an_effect_are_refused(flags, line):
    tables.check_flags(types.SimpleNamespace(**FLAGS), [])
    with pytest.raises(UserError, match=line):
        tables.check_flags(types.SimpleNamespace(**FLAGS | flags), [])
    spec = tables.Spec("0_items", "items", 5, 4, None)
    if "table_optimizer" not in flags:
        with pytest.raises(UserError, match="max_rows is for tables without a fixed size|choose a --table_optimizer"):
            tables.check_flags(types.SimpleNamespace(**FLAGS | flags), [spec])


def test_tables_that_this_machine_cannot_have_are_refused():
    spec = tables.Spec("0_items", "items", 2**31 - 1, 4096, None)
    tables.check_flags(types.SimpleNamespace(**FLAGS | {"launch": False}), [spec])
    with pytest.raises(UserError, match=r"the tables of the model take 35.2 TB on the ps, but this machine, where all ps run,"):
        tables.check_flags(types.SimpleNamespace(**FLAGS), [spec])


@pytest.mark.slow
def test_rows_begin_alike_on_any_number_of_ps(problem):
    """And are uniform in the interval of the initializer, all different, and spread evenly over the ps; each is found there."""
    path, dataset = problem
    spec = keras_model.build(f"{path}:build", dataset, 1, tables_on_ps=True).tables[0]
    found = []
    for num_ps in 1, 2, 3, 5:  # of three, one has a row more
        with tf.Graph().as_default(), tf.Session() as session:
            table = Table(spec._replace(rows=1000), num_ps, None)
            session.run(tf.global_variables_initializer())
            found.append(session.run(tf.concat(table.pieces, axis=0)))
            asked = table.ask(tf.range(1000, dtype=tf.int64))
            np.testing.assert_array_equal(session.run(tf.concat(table.look(asked), axis=0)), found[-1])
            places = session.run(table.places(np.arange(20)))  # those that are used most, often
        pieces = np.searchsorted(table.starts, places, side="right")
        assert max(np.bincount(pieces, minlength=num_ps + 1)[1:]) <= 20 / num_ps + 2
    assert all(other.tobytes() == found[0].tobytes() for other in found[1:])
    assert len(np.unique(found[0])) > 3990 and np.abs(found[0]).max() < 0.5 and abs(found[0].mean()) < 0.02


HALF = keras.initializers.Constant(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("initializer", ["uniform", "random_normal", "truncated_normal", "zeros", HALF])
def test_rows_begin_as_the_initializer_has_them(initializer):
    """The same mean, deviation, and ends as Keras's own, of a table with an end and of one without."""
    with tables.on_ps(3):
        layers = [Embedding(rows, 20, embeddings_initializer=initializer, name=f"t{rows}") for rows in (2000, None)]
    ended, endless = tables.specs_of(layers)
    theirs = np.array(keras.initializers.get(initializer)([2000, 20], "float32"))
    with tf.Graph().as_default(), tf.Session() as session:
        whole = tf.concat(Table(ended, 2, None).pieces, axis=0)
        session.run(tf.global_variables_initializer())
        found = session.run([whole, first_rows(endless, place_of(tf.range(2000, dtype=tf.int64)))])
    for ours in found:
        assert abs(ours.mean() - theirs.mean()) < 0.03 * np.std(theirs) + 1e-7
        np.testing.assert_allclose(np.std(ours), np.std(theirs), rtol=0.02)
        np.testing.assert_allclose([ours.min(), ours.max()], [theirs.min(), theirs.max()], rtol=0.25)
        if np.std(theirs) > 1e-7:  # columns have nothing in common
            assert abs(np.corrcoef(ours.T) - np.eye(20)).max() < 0.1


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 1000, 999_983, 10_000_000, 2**31 - 1])
def test_no_two_rows_have_the_same_place(rows):
    """(r a) mod rows is one to one if a and rows have no divisor in common."""
    assert np.gcd(factor_of(rows), rows) == 1
    if rows <= 10_000:
        assert sorted(np.arange(rows) * factor_of(rows) % rows) == list(range(rows))


@pytest.mark.parametrize("step", [1, 2**26, 10**12])
def test_places_of_a_table_without_an_end_are_mixed(step):
    """Each id has another, also where they are multiples of something: about as many in each eighth."""
    ids = np.arange(8000, dtype=np.int64) * step % 2**53
    places = place_of(ids)
    with tf.Graph().as_default(), tf.Session() as session:
        np.testing.assert_array_equal(session.run(place_of(tf.constant(ids))), places)
    np.testing.assert_array_equal(id_of(places), ids)
    counts = np.bincount(places // 2**50, minlength=8)
    assert 850 < counts.min() and counts.max() < 1150


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("tied", "items: its `embeddings` needs the whole table"),
        ("lora", "items: LoRA needs the whole table"),
        ("regularized", "items has embeddings_regularizer, which needs the whole table"),
        ("glorot", "items: the initializer GlorotUniform is for the whole table"),
    ],
)
def test_what_needs_the_whole_table_is_refused(problem, function, line):
    path, dataset = problem
    with pytest.raises(UserError, match=line):
        keras_model.build(f"{path}:{function}", dataset, 1, tables_on_ps=True)
    assert keras_model.build(f"{path}:{function}", dataset, 1).size > 0  # nothing is wrong with it elsewhere


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("ids_from_rows", "ids of the layer second depend on rows of a table"),
        ("ids_by_chance", "ids of the layer items depend on variables of the model"),
        ("never_asked", "the layer other looks nothing up when the model is called"),
    ],
)
def test_ids_that_nobody_can_know_before_are_refused(problem, function, line):
    path, dataset = problem
    model = keras_model.build(f"{path}:{function}", dataset, 1, tables_on_ps=True)
    with pytest.raises(UserError, match=line):
        tables.check_ids(model, dataset.x_train)


def test_ids_that_a_type_does_not_hold_are_refused(problem):
    """float32 has no 2²⁴ + 1, and int32 no 2³¹: a row would be taken for another."""
    path, dataset = problem
    for function in "float_ids", "large_float_ids":
        large = datasets.checked(((dataset.x_train["ids"], dataset.y_train),) * 2, "mine")
        data_of = dataset if function == "float_ids" else large
        with pytest.raises(UserError, match=r"the ids of items come as float32, which skips whole numbers above 16,777,216"):
            keras_model.build(f"{path}:{function}", data_of, 1, tables_on_ps=True)
    x = {"ids": np.array([[0, 1, 2**31]]), "numbers": np.zeros([1, 2], np.float32)}
    with pytest.raises(UserError, match="the input ids takes int32, but the samples have numbers from 0 to 2,147,483,648"):
        tables.check_ids(keras_model.build(f"{path}:endless", dataset, 1, tables_on_ps=True), x)
    model = keras_model.build(f"{path}:int64_ids", dataset, 1, tables_on_ps=True)
    tables.check_ids(model, x)
    with pytest.raises(UserError, match=r"items has rows 0 to 9,007,199,254,740,991, but the samples have ids from 0 to"):
        tables.check_ids(model, {**x, "ids": np.array([[0, 1, 2**53]])})
    tables.check_data(model, [x], is_stream=False)
    with pytest.raises(UserError, match="give a dataset that ends, without --stream"):
        tables.check_data(model, [x], is_stream=True)


@pytest.mark.parametrize(
    ("ids", "line"),
    [
        ([[0, 1, 23]], "items has rows 0 to 22, but the samples have ids from 0 to 23"),
        ([[-2, 1, 3]], "items has rows 0 to 22, but the samples have ids from -2 to 3"),
        ([[0.0, 1.5, 3.0]], "the input ids takes whole numbers, but the samples have 1.5 there"),
    ],
)
def test_ids_that_are_no_rows_are_refused(problem, ids, line):
    path, dataset = problem
    model = keras_model.build(f"{path}:build", dataset, 1, tables_on_ps=True)
    samples = np.array(ids)
    dtype = np.float32 if samples.dtype.kind == "f" else np.int32
    x = {"ids": samples.astype(dtype), "numbers": np.zeros([1, 2], np.float32)}
    with pytest.raises(UserError, match=line):
        tables.check_ids(model, x)
    tables.check_ids(model, dataset.x_train)


def test_a_row_that_was_not_pulled_fails_the_step(problem):
    """It is not taken from its neighbour."""
    path, dataset = problem
    model = keras_model.build(f"{path}:build", dataset, 1, tables_on_ps=True)
    with tf.Graph().as_default(), tf.Session() as session:
        table = Table(model.tables[0], 2, None)
        own = LocalRows(table, 4, lambda: 0)
        places = own.ask([tf.constant([[5, 1, 5], [1, 2, 2]])])
        took = own.take(places, table.read(table.ask(places), lambda device: []))
        found, other = own.find(tf.constant([[2, 5]]))[0], own.find(tf.constant([7]))[0]
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(took)
        whole = session.run(tf.gather(tf.concat(table.pieces, axis=0), table.places([2, 5])))
        assert session.run(own.count) == 3  # each once
        assert session.run(own.pulled).sum() == 3 and session.run(own.asked) == 6
        np.testing.assert_array_equal(session.run(found)[0], whole)
        with pytest.raises(tf.errors.InvalidArgumentError, match="not in"):
            session.run(other)


@pytest.mark.parametrize(
    "folder", ["AEASGD", "AEAMSGD", "DiLoCo", "Local-SGD", "Streaming-DiLoCo", "SparseLoCo", "SAGN", "DC-ASGD"]
)
def test_schemes_that_need_whole_replicas_say_so(problem, load_scheme, folder):
    path, dataset = problem
    scheme = load_scheme(folder, folder.lower().replace("-", "_"))
    model = keras_model.build(f"{path}:build", dataset, 1, tables_on_ps=True)
    hp: dict = dict.fromkeys(
        ("alpha", "beta", "momentum", "mixing", "error_decay", "delta", "local_momentum", "lambda0", "weight_decay"), 0.5
    )
    hp |= {"fragments": 1, "overlap_steps": 0, "chunk_size": 8, "top": 4, "value_bits": 8, "local_optimizer": "sgd"}
    hp |= {"adaptive": False, "slow_momentum": 0.0, "warm_start": 0, "mean_square_decay": 0.9}
    hp |= {"slow_learning_rate": 1.0, "weigh_by_samples": False}
    hp = hyperparameters({"window": 2, **hp, "local_learning_rate": 0.1})
    with tf.Graph().as_default():
        center = GlobalParameters(model.initial_parameters, tables=model.tables)
        batches = Batches(dataset.x_train, dataset.y_train, 4, 0)
        local = LocalParameters(center, model, batches)
        with pytest.raises(UserError, match=r"common\.Embedding"):
            build_steps(scheme, center, local, hp)


@pytest.mark.slow
def test_elsewhere_it_is_kerass_own_layer(problem, tmp_path):
    """In fit, in files, and in a program that does not say where tables are."""
    path, dataset = problem
    ours, theirs = (keras_model.build(f"{path}:{name}", dataset, 1).keras_model for name in ("build", "whole"))
    theirs.set_weights(ours.get_weights())
    for model in ours, theirs:
        model.compile("sgd", "mse")
        model.fit(dataset.x_train, dataset.y_train, batch_size=10, shuffle=False, verbose=0)
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    ours.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    assert type(again.get_layer("items")) is Embedding
    np.testing.assert_array_equal(again.predict(dataset.x_test, verbose=0), ours.predict(dataset.x_test, verbose=0))
    on_ps = keras_model.build(f"{path}:build", dataset, 1, tables_on_ps=True)
    with tf.Graph().as_default(), pytest.raises(UserError, match="tables on the ps"):
        on_ps.loss_and_gradient(tf.zeros([on_ps.size]), [], *dataset.train)
    with tables.on_ps(0), pytest.raises(Exception, match="give a function that makes the model"):
        keras.models.load_model(tmp_path / "m.keras")
    with pytest.raises(UserError, match="items has no fixed number of rows"):
        keras_model.build(f"{path}:endless", dataset, 1)


@pytest.mark.cluster
def test_a_run_with_tables_survives_and_goes_on_with_another_number_of_ps(problem, tmp_path):
    """The file gives the loss that was reported; a ps that is killed costs a checkpoint. One of two tables has no end."""
    path, _ = problem
    source = path.parent / "d.py"
    source.write_text(
        "import numpy as np\n"
        "def load():\n"
        "    rng = np.random.default_rng(0)\n"
        "    ids = rng.integers(0, 23, [4000, 3]).astype(np.int32)\n"
        "    x = {'ids': ids, 'numbers': rng.normal(size=[4000, 2]).astype(np.float32)}\n"
        "    y = np.sin(ids).sum(axis=1, keepdims=True).astype(np.float32)\n"
        "    return ({k: v[:3600] for k, v in x.items()}, y[:3600]), ({k: v[3600:] for k, v in x.items()}, y[3600:])\n"
    )
    script = ROOT / "HogWild" / "hogwild.py"
    flags = [f"--model={path}:both", f"--data={source}:load", "--window=5", "--checkpoint_secs=1"]
    flags += ["--table_optimizer=rowwise_adagrad", "--max_rows=69", "--learning_rate=0.02", "--rounds_per_call=2"]
    launched = start(tmp_path, "--launch", *flags, "--num_ps=2", "--steps=1000", script=script)
    read_until(launched, lambda line: "step" in line and "samples/s" in line)
    (victim, *_) = processes(tmp_path, "--job_name=ps", "--task_index=1")
    subprocess.run(["kill", "-9", str(victim)], check=True)
    output, _ = launched.communicate(timeout=SECONDS)
    assert launched.returncode == 0, output
    before = result_of(tmp_path)
    assert "ps 1" in output and before["restarts"] >= 1
    more = run(tmp_path, *flags, "--num_ps=3", "--steps=1100", "--resume", script=script)
    after = result_of(tmp_path)
    assert after["global_steps"] >= 1100 and after["test_loss"] < before["test_loss"] + 0.05, more
    for table in after["tables"]:
        assert table["ids_per_round"] == 5 * 32 * 3 and 20 < table["rows_per_round"] <= 23 == table["rows"]
        assert len(table["rows_per_round_and_ps"]) == 3 and min(table["rows_per_round_and_ps"]) > 4
    assert after["tables"][1]["dropped_rows"] == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics" / "worker-0.jsonl").read_text().splitlines()]
    (last,) = (line for line in lines[-1:] if "others_rows" in line)
    assert last["others_rows"] == 23 and last["items_repeated"] == pytest.approx(after["tables"][0]["repeated"], rel=0.01)
    code = (
        "import sys, keras\n"
        f"sys.path[:0] = {str(path.parent)!r}, {str(ROOT)!r}\n"
        "import d\n"
        "from common import Embedding, rows_of\n"
        f"model = keras.models.load_model({str(tmp_path / 'model.keras')!r})\n"
        "(_, (x, y)) = d.load()\n"
        "print(model.evaluate(x, y, batch_size=500, verbose=0))\n"
        f"items, others = (rows_of({str(tmp_path)!r}, name, ids) for name, ids in (('items', [3, 20]), ('others', None)))\n"
        "assert (items == model.get_layer('items').get_weights()[0][[3, 20]]).all()\n"
        "assert (others == model.get_layer('others').get_weights()[1]).all() and len(others) == 23"
    )
    ran = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert float(ran.stdout) == pytest.approx(after["test_loss"], rel=1e-4), ran.stderr
    assert wait_until_gone(processes(tmp_path)) == []


@pytest.mark.cluster
def test_train_gives_back_the_model_with_its_tables(problem, tmp_path):
    """Also one without an end; without model.keras it says so. A model, in place of a function, is refused before anything."""
    path, dataset = problem
    namespace: dict = {}
    exec(compile(MODEL, "a notebook", "exec"), namespace)
    flags: dict = {"num_ps": 2, "num_workers": 2, "steps": 60, "batch_size": 4, "verbose": False, "max_rows": 100}
    samples = (dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)
    with pytest.raises(UserError, match="the model has a table .* give a function that makes it"):
        train("HogWild", namespace["build"](), samples)
    result = train("HogWild", namespace["both"], samples, run_dir=tmp_path / "R", seed=5, **flags)
    found = result.model.evaluate(dataset.x_test, dataset.y_test, verbose=0, batch_size=N)
    assert found == pytest.approx(result.result["test_loss"], rel=1e-4)
    assert result.result["max_rows"] == 100 and result.result["tables"][1]["rows"] <= 23
    further = {**dataset.x_test, "ids": np.full([N, 3], 22, np.int32)}  # a row that nobody used
    of_file = keras.models.load_model(tmp_path / "R" / "model.keras")
    np.testing.assert_allclose(result.model.predict(further, verbose=0), of_file.predict(further, verbose=0))
    flags |= {"run_dir": tmp_path / "R", "resume": True, "steps": 80, "save_tables": "no"}
    again = train("HogWild", namespace["both"], samples, **flags)
    assert again.result["save_tables"] == "no" and not (tmp_path / "R" / "model.keras").exists()
    with pytest.raises(UserError, match="has no model.keras, as its tables were not saved"):
        print(again.model)
