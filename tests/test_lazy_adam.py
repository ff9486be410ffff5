"""Adam for rows: the moments and rows of NumPy, the difference from dense Adam, checkpoints, schemes that push rows."""

import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from common import tf
from common.core import UserError
from common.core.checkpoints import newest_good_checkpoint, write_checkpoint
from common.data import datasets
from common.data.batches import Batches
from common.models import keras_model
from common.scheme import tables
from common.scheme.lazy_adam import LazyAdam, SparseAdam
from common.scheme.sharded_tables import Table, find_on_ps
from common.scheme.unbounded import Vocabulary
from common.simulation.replay import Replay

ROWS, WIDTH, UPDATES, RATE = 11, 3, 30, 0.1
KINDS = {"lazy_adam": LazyAdam, "sparse_adam": SparseAdam}
EVERY = np.arange(ROWS)
MODEL = """
import keras
from common import Embedding

def build(rows=11):
    ids, start = keras.Input([3], dtype="int64"), keras.initializers.RandomUniform(seed=3)
    found = Embedding(rows, 3, name="items", embeddings_initializer=start)(ids)
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(found)))

def endless():
    return build(None)
"""


class Tables:
    """A table with an optimizer of rows, in a graph and a session of its own."""

    def __init__(self, kind, rows, num_ps):
        self.graph = tf.Graph()
        spec = tables.Spec("0_items", "items", rows, WIDTH, lambda u: u - 0.5)
        with self.graph.as_default():
            self.table = Table(spec, num_ps, None) if rows else Vocabulary(spec, num_ps, None, 20 * num_ps)
            self._ids, self._values = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, WIDTH])
            places, optimizer = self.table.places(self._ids), KINDS[kind](RATE)
            order = tf.argsort(places)
            places, values = tf.gather(places, order), tf.gather(self._values, order)
            parts = zip(self.table.split(values, places), self.table.cut(places), self.table.pieces, strict=True)
            self._push = [self.table.apply(optimizer, tf.IndexedSlices(each, at), piece) for each, at, piece in parts]
            self._rows = find_on_ps([self.table])(types.SimpleNamespace(number=0), tf.constant(EVERY))
            self.parts = self.table.parts(tf.global_variables())
            self.session = tf.Session()
            self.session.run(tf.global_variables_initializer())

    def push(self, ids, values):
        """Applies the gradients of some rows."""
        self.session.run(self._push, {self._ids: ids, self._values: values})

    def rows(self):
        """Returns all rows."""
        return self.session.run(self._rows)


def gradients():
    """Gradients of some rows, in each of `UPDATES` updates: row 0 in each, row 9 in the last, row 10 in none."""
    rng = np.random.default_rng(0)
    for update in range(UPDATES):
        ids = np.flatnonzero(np.append(rng.random(ROWS - 2) < np.linspace(1.0, 0.2, ROWS - 2), [update == UPDATES - 1, False]))
        yield ids, rng.normal(size=[len(ids), WIDTH])


def adam(x, is_sparse=True, is_dense=False):
    """The rule in NumPy, float64: rows after each update."""
    x, m, v, last = x.astype(np.float64), np.zeros([ROWS, WIDTH]), np.zeros([ROWS, WIDTH]), np.zeros([ROWS, 1])
    for t, (ids, values) in enumerate(gradients(), 1):
        if is_dense:
            g = np.zeros([ROWS, WIDTH])
            g[ids] = values
            ids, values = EVERY, g
        k = t - last[ids] if is_sparse and not is_dense else 1
        m[ids] = 0.9**k * m[ids] + 0.1 * values
        v[ids] = 0.999**k * v[ids] + 0.001 * values**2
        x[ids] -= RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m[ids] / (np.sqrt(v[ids]) + 1e-8)
        last[ids] = t
        yield x.copy(), m.copy(), v.copy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [ROWS, None])
def test_rows_are_those_of_numpy_and_a_checkpoint_has_their_moments(kind, rows, tmp_path):
    """After half of the updates, two ps save, and three go on."""
    one, other = Tables(kind, rows, 2), Tables(kind, rows, 3)
    first = one.rows()
    for update, ((ids, values), (expected, *_)) in enumerate(zip(gradients(), adam(first, kind == "sparse_adam"), strict=True)):
        if update == UPDATES // 2:
            with ThreadPoolExecutor(1) as another, one.graph.as_default():
                found = (part for each in one.parts for part in each.read(one.session))
                another.submit(write_checkpoint, str(tmp_path), 7, ["step"], [""], [np.int64(7)], found).result()
            checkpoint = newest_good_checkpoint(tmp_path)
            assert checkpoint == str(tmp_path / "model.ckpt-7")
            with other.graph.as_default():
                for part in other.parts:
                    part.restore(other.session, checkpoint, tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map())
            one = other
        one.push(ids, values)
        np.testing.assert_allclose(one.rows(), expected, atol=1e-5)
    np.testing.assert_array_equal(one.rows()[ROWS - 1], first[ROWS - 1])


def test_the_difference_from_dense_adam_is_the_steps_of_momentum():
    """Moments of sparse Adam are Adam's at each update of a row; a row lacks the steps that Adam makes between two updates."""
    zeros, last, lacks = np.zeros([ROWS, WIDTH]), np.zeros(ROWS, int), np.zeros([ROWS, WIDTH])
    states = zip(gradients(), adam(zeros), adam(zeros, is_dense=True), strict=True)
    before = zeros, zeros
    for t, ((ids, _), (x, m, v), (dense, *moments)) in enumerate(states, 1):
        np.testing.assert_allclose([m[ids], v[ids]], [each[ids] for each in moments], atol=1e-12)
        for row in ids:
            for j in range(1, t - last[row]):
                s, (m_then, v_then) = last[row] + j, before
                correction = np.sqrt(1 - 0.999**s) / (1 - 0.9**s)
                lacks[row] += RATE * correction * 0.9**j * m_then[row] / (np.sqrt(0.999**j * v_then[row]) + 1e-8)
        last[ids], before = t, (m, v)
        np.testing.assert_allclose((x - dense)[ids], lacks[ids], atol=1e-9)
    assert np.abs(lacks[0]).max() == 0 and np.abs(lacks[1:9]).max() > RATE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "given", "rows"),
    [
        ("DOWNPOUR", {"n_fetch": None}, ROWS),
        ("Synchronous-SGD", {"backup_workers": 0}, None),  # within a conditional
    ],
)
def test_schemes_push_to_it(load_scheme, tmp_path, folder, given, rows):
    """The first update of a row is η g / (|g| + ε / √(1 − β₂)), with the gradient that SGD shows."""
    (tmp_path / "m.py").write_text(MODEL)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, ROWS - 2, [40, 3]), rng.normal(size=[40, 1]).astype(np.float32)
    dataset = datasets.checked(((x, y), (x, y)), "mine")
    scheme, changes = load_scheme(folder, folder.lower().replace("-", "_")), {}
    hp = {"learning_rate": 0.1, "local_learning_rate": None, "num_workers": 1, "overlap": False, "window": 1, **given}
    function = "endless" if rows is None else "build"
    for kind in "sgd", "sparse_adam":
        model = keras_model.build(f"{tmp_path / 'm.py'}:{function}", dataset, 1, tables_on_ps=True)
        own = types.SimpleNamespace(**hp, table_optimizer=kind, table_learning_rate=1.0 if kind == "sgd" else RATE)
        replay = Replay(scheme, own, model, lambda i: Batches(x, y, 4, seed=0), 1, 2)
        with replay.graph.as_default():
            find: Any = replay._engine._center.find
            rows_now = find(types.SimpleNamespace(number=0), tf.constant(EVERY))
        before = replay.session.run(rows_now)
        while not replay.updates:
            replay.step(0)
        changes[kind] = before - replay.session.run(rows_now)
        replay.close()
    g = changes["sgd"]
    assert 2 < (np.abs(g).max(axis=1) > 0).sum() < ROWS - 1
    np.testing.assert_allclose(changes["sparse_adam"], RATE * g / (np.abs(g) + 1e-8 / np.sqrt(0.001)), atol=1e-4)


def test_a_vector_is_refused():
    with tf.Graph().as_default():
        x = tf.get_variable("x/part_0", initializer=tf.zeros([2, 3]), use_resource=True)
        with pytest.raises(UserError, match=r"SparseAdam is for rows of tables"):
            SparseAdam(0.1).apply_gradients([(tf.ones([2, 3]), x)])
