"""Messages with fewer bits: what is packed is nearly what is unpacked, nothing is lost, and fewer bytes travel."""

import contextlib
import functools
import itertools
import math
import time
import types

import numpy as np
import pytest
import runs
from oracle import RATE, Problem, sparse_again
from skips import skip_for

from common import tf
from common.cli import notebook
from common.cluster.task_spec import TaskSpecDef
from common.core.flags import COMPRESSIONS
from common.core.plots import read_metrics
from common.launch import sandbox
from common.scheme.center import GlobalParameters
from common.scheme.compression import BIASED, Compression, _uniform, pack, pack_sparse
from common.scheme.learning_rates import hyperparameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import build_rounds, repeat_rounds
from common.simulation.facts import messages_of
from common.simulation.replay import Replay
from common.simulation.shards import shards_of

KINDS = COMPRESSIONS[1:]
NOT_FINITE = np.nan, np.inf, -np.inf
SIZES = [1, 5, 256, 257, 1000, 8217]


def blocks_of(vector):
    """The blocks of a vector: equal parts of at most 256 values, a multiple of 8, the last one shorter."""
    count = math.ceil(len(vector) / 256)
    size = math.ceil(len(vector) / count / 8) * 8
    return np.split(vector, range(size, len(vector), size))


def packed_again(kind, vector, u=None, share=0.01):
    """What a vector is when it has been packed and unpacked, by NumPy; `u` are random numbers of its blocks."""
    vector = np.asarray(vector, np.float32)
    if kind == "bf16":
        bits = vector.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    if kind == "topk":
        sent, most = np.zeros_like(vector), np.argsort(-np.abs(vector), kind="stable")[: max(1, round(share * len(vector)))]
        sent[most] = vector[most]
        return sent
    made = []
    for i, block in enumerate(blocks_of(vector)):
        if kind == "sign":
            made.append(np.where(block > 0, 1, -1) * np.mean(np.abs(block)))
            continue
        levels = np.float32({"int8": 127, "int4": 7}[kind])
        largest = np.max(np.abs(block))
        inverse = levels / largest if largest else np.float32(0)
        made.append(np.floor(block * inverse + u[i, : len(block)]) * (largest / levels))
    return np.concatenate(made)


def function_of(build, *places):
    """A function of arrays: `build` in a graph, of placeholders with these types and shapes."""
    with tf.Graph().as_default():
        feeds = [tf.placeholder(dtype, shape) for dtype, shape in places]
        return tf.Session().make_callable(build(*feeds), feeds)


SEED = tf.int64, [2]


@functools.cache
def packing(kind, size, share):
    return function_of(lambda vector, seed: pack(kind, vector, seed, share).unpacked(), (tf.float32, [size]), SEED)


@functools.cache
def drawing(*shape):
    return function_of(lambda seed: _uniform(shape, seed), SEED)


def unpacked(kind, vector, seed=(1, 2), share=0.01):
    """The same by `pack`."""
    return packing(kind, len(vector), share)(vector, seed)


def random_numbers(size, seed):
    """The numbers u of the blocks of a vector."""
    blocks = blocks_of(np.zeros(size))
    return drawing(len(blocks), math.ceil(len(blocks[0]) / 8) * 8)(seed)


@pytest.mark.parametrize("kind", KINDS)
def test_as_by_numpy(kind):
    """Sizes that are no multiple of a block, or less than one; and a block of zeros."""
    for size in SIZES:
        vector = np.random.default_rng(size).normal(size=size).astype(np.float32)
        if size > 256:
            vector[: len(blocks_of(vector)[0])] = 0
        u = random_numbers(size, (1, 2)) if kind in ("int8", "int4") else None
        np.testing.assert_allclose(unpacked(kind, vector), packed_again(kind, vector, u), rtol=1e-6, err_msg=f"of {size}")
    assert not unpacked(kind, np.zeros(300)).any()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "levels"), [("int8", 127), ("int4", 7)])
def test_stochastic_rounding_is_unbiased(kind, levels):
    """The mean of 4,000 is within five standard errors of each value: a step s has a variance of s²/4 at most."""
    vector = np.random.default_rng(0).normal(size=40).astype(np.float32)
    vector[:3] = 0, np.abs(vector).max(), -np.abs(vector).max()
    step, times = np.abs(vector).max() / levels, 4_000
    found = np.array([unpacked(kind, vector, (3, i)) for i in range(times)])
    assert np.abs(found - vector).max() < 1.0001 * step
    assert np.abs(found.mean(axis=0) - vector).max() < 5 * step / 2 / math.sqrt(times)
    np.testing.assert_allclose(found[:, :3], np.tile(vector[:3], [times, 1]), rtol=1e-6)  # on a level: nothing to round


def test_random_numbers_are_uniform():
    """Each for itself, with mean 1/2 and variance 1/12; those of two blocks have nothing to do with each other."""
    found = np.array([random_numbers(512, (5, i))[:, :3] for i in range(500)])
    assert 0 <= found.min() and found.max() < 1
    assert np.abs(found.mean(axis=0) - 0.5).max() < 5 / math.sqrt(12 * 500)
    assert np.abs(found.var(axis=0) - 1 / 12).max() < 0.02
    assert abs(np.corrcoef(found[:, 0, 0], found[:, 1, 0])[0, 1]) < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(kind):
    """A training that diverges is noticed, wherever in a block it begins."""
    for size, bad in itertools.product((1, 300, 1000), NOT_FINITE):
        for at in (0, size // 2, size - 1):
            vector = np.random.default_rng(size).normal(size=size)
            vector[at] = bad
            found = unpacked(kind, vector)
            assert not np.isfinite(found).all() and (kind == "topk" or not np.isfinite(found[at]))


@pytest.mark.parametrize(
    ("kind", "bits"), [("bf16", 16), ("int8", 8 + 1 / 8), ("int4", 4 + 1 / 8), ("sign", 1 + 1 / 8), ("topk", 0.64)]
)
def test_bits_of_a_value(kind, bits):
    """A scale of 32 bits for 256 values; an index and a value for each hundredth."""
    with tf.Graph().as_default():
        tensors = pack(kind, tf.zeros([25_600]), tf.constant([1, 2], tf.int64)).tensors
    assert 8 * sum(t.shape.num_elements() * t.dtype.size for t in tensors) == bits * 25_600


# Chunk size, how many are sent of a chunk, their bits: chunks that are cut evenly, one, all values, and one of two.
SPARSE = [(4096, 64, 2), (4096, 64, 32), (100, 7, 3), (1000, 20, 8), (64, 64, 4), (300, 300, 32), (2, 1, 2)]


@functools.cache
def packing_sparse(size, *how):
    def build(vector):
        packed = pack_sparse(vector, *how)
        [sent] = packed.tensors
        return packed.unpacked(), tf.constant(sent.shape.num_elements())

    return function_of(build, (tf.float32, [size]))


def sparse(vector, *how):
    """The same by `pack_sparse`, and the bytes that travel."""
    return packing_sparse(len(vector), *how)(vector)


@pytest.mark.parametrize("how", SPARSE)
def test_sparse_as_by_numpy(how):
    for size in (1, 257, 8217):
        vector = np.random.default_rng(size).normal(1, 1, size=size).astype(np.float32)
        np.testing.assert_allclose(sparse(vector, *how)[0], sparse_again(vector, *how), rtol=1e-5, err_msg=f"of {size}")
    assert not sparse(np.zeros(300), *how)[0].any()


@pytest.mark.parametrize(
    ("size", "how", "bits"),
    [
        (40_960, (4096, 64, 2), 10 * 64 * (12 + 2) + 4 * 32),  # ten chunks, and the means
        (40_960, (4096, 64, 32), 10 * 64 * (12 + 32)),
        (1000, (4096, 64, 2), 16 * (10 + 2) + 4 * 32),  # less than a chunk: as large a share, and shorter places
        (1000, (100, 10, 8), 100 * (7 + 8) + 4 + 256 * 32),  # half a byte is left over
        (10_000, (4096, 4096, 2), 10_002 * 2 + 4 + 4 * 32),  # all: no places; three chunks of 3,334
    ],
)
def test_bits_of_a_sparse_vector(size, how, bits):
    assert 8 * sparse(np.ones(size), *how)[1] == bits


@pytest.mark.parametrize("how", SPARSE)
def test_what_is_not_finite_stays_so_in_a_sparse_vector(how):
    for at, bad in itertools.product((0, 150, 299), NOT_FINITE):
        vector = np.random.default_rng(0).normal(size=300)
        vector[at] = bad
        assert np.isnan(sparse(vector, *how)[0]).any()


@pytest.mark.parametrize("how", [(4096, 64, 9), (4096, 64, 1), (64, 65, 2), (64, 0, 2), (2**23, 64, 2)])
def test_a_sparse_vector_that_cannot_be(user_error, how):
    said = "a sparse message needs chunk_size <= 4,194,304, 1 <= top <= chunk_size, and value_bits of 2 to 8, or 32; "
    with user_error(said + "not chunk_size={}, top={}, value_bits={}".format(*how)):
        sparse(np.ones(100), *how)


class Compressed(Problem):
    """A `Problem` whose messages are compressed, each by `packed_again`."""

    def __init__(self, start, batches, hp, compression, num_ps):
        super().__init__(start, batches, hp)
        self._compression, self._num_ps = compression, num_ps
        self._unsent, self._turns = np.zeros([2, 4]), [0, 0]

    def sent(self, worker, message, feedback=True):
        """C(v) of v = message + E."""
        kind = self._compression.push
        v = np.float32(message) + np.float32(self._unsent[worker] if feedback and kind in BIASED else 0)
        self._turns[worker] += 1
        pieces = []
        for i, piece in enumerate(np.array_split(v, self._num_ps)):
            seed = self._compression.seed + worker, self._turns[worker] + i * 2**40
            u = random_numbers(len(piece), seed) if kind in ("int8", "int4") else None
            pieces.append(packed_again(kind, piece, u, self._compression.topk))
        sent = np.concatenate(pieces)
        if feedback:
            self._unsent[worker] = v - sent
        return sent


def hogwild(p, i):
    while True:
        x, pulled = p.pull(i)
        yield
        g = sum(p.descend(i, x))
        yield
        p.update(i, pulled, -RATE * p.sent(i, g))
        yield


def aeasgd(p, i):
    x, alpha = p.start, p.hp.beta / 2
    while True:
        for _ in range(p.hp.window):
            x = x - RATE * p.gradient(i, x)
        yield
        center, read = p.pull(i)
        e = alpha * (x - center)
        yield
        sent = p.sent(i, e, feedback=False)
        x = x - sent
        p.update(i, read, sent)
        yield


LIVES = {"HogWild": hogwild, "AEASGD": aeasgd}
STALE = [0, 1] * 30  # both pull, both train, then both push


@pytest.fixture
def replay(model, batches, known_batches, load_scheme):
    """A function that returns a `Replay` of a scheme with a compression, and its hyperparameters."""
    made = []

    def replay(folder, compression, num_ps=1, **hp):
        others = {"window": 2, "learning_rate": RATE, "num_workers": 2, "beta": 0.9, "local_optimizer": "sgd"}
        values = types.SimpleNamespace(**{**others, "local_learning_rate": None, **hp})
        rule = load_scheme(folder, folder.lower().replace("-", "_")) if isinstance(folder, str) else folder
        make_batches = lambda i: known_batches(*(b[i] for b in batches), f"batches_{i}")  # noqa: E731
        made.append(Replay(rule, values, model, make_batches, num_ps=num_ps, compression=compression))
        return made[-1], values

    yield replay
    for each in made:
        each.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("folder", "num_ps"), [("HogWild", 3), ("AEASGD", 1)])
def test_exact(model, batches, replay, folder, kind, num_ps):
    """x̃ after twenty rounds with stale pushes, each of two workers with an E, or an x that keeps the rest, of its own. Then an
    elastic exchange moves both sides by as much."""
    compression = Compression(kind, topk=0.25, seed=7)
    ours, hp = replay(folder, compression, num_ps)
    problem = Compressed(model.initial_parameters, batches, hp, compression, num_ps)
    workers = [LIVES[folder](problem, i) for i in range(2)]
    for worker in ours.take(STALE):
        next(workers[worker])
    assert np.abs(problem.center - model.initial_parameters).max() > 0.1
    assert np.abs(ours.center - problem.center).max() < 1e-5 * np.abs(problem.center).max()
    assert [(u.worker, u.staleness, u.updated) for u in ours.updates] == problem.log
    if folder == "AEASGD":
        ours.take([0, 1])  # the local steps
        before, x = ours.replicas.sum(axis=0) + ours.center, ours.replicas
        ours.take([0, 1, 1, 0])  # the exchange
        assert np.abs(ours.replicas - x).max() > 1e-3
        np.testing.assert_allclose(ours.replicas.sum(axis=0) + ours.center, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "num_ps"), list(zip(BIASED, [1, 3, 2], strict=True)))
def test_error_feedback_loses_nothing(replay, model, kind, num_ps):
    """All messages and E together are the sum of the gradients: with a rate of 1, x̃ − x̃₀ is the sum of the messages."""
    gradients = []

    def scheme(center, local, hp):
        yield local.pull(center)
        yield local.train(1, lambda g: tf.no_op())
        yield center.push(tf.train.GradientDescentOptimizer(1.0), 0.01 * local.gradient)

    ours, _ = replay(scheme, Compression(kind, topk=0.25), num_ps)
    local = ours._engine._local
    for worker in [0, 0, 0, 1, 1, 1] * 30:
        ours.step(worker)
        if ours.next_step(worker) == 2:
            gradients.append(0.01 * ours._engine.rows(local.gradient)[worker].astype(float))
    sent = model.initial_parameters - ours.center.astype(float)
    kept = ours._engine.rows(local.vector("unsent_0")).astype(float)
    assert np.abs(kept).max() > 1e-6 and len(gradients) == 60
    np.testing.assert_allclose(sent + kept.sum(axis=0), sum(gradients), rtol=1e-5, atol=1e-5)


def stale_is_dropped(center, local, hp):
    exact, g = center.exact(local, "step", 1), tf.train.GradientDescentOptimizer(1.0)
    yield exact.pull()
    yield local.train(1, lambda g: tf.no_op())
    yield exact.push(g, 0.01 * local.gradient)


def late_is_dropped(center, local, hp):
    others, g = center.together(local, backup_workers=1), tf.train.GradientDescentOptimizer(1.0)
    yield local.pull(center)
    yield local.train(1, lambda g: tf.no_op())
    yield others.push(g, 0.01 * local.gradient)
    yield others.wait()


@pytest.mark.parametrize(("kind", "num_ps"), list(zip(BIASED, [1, 3, 2], strict=True)))
@pytest.mark.parametrize("scheme", [stale_is_dropped, late_is_dropped])
def test_a_message_that_is_dropped_changes_nothing(replay, model, scheme, kind, num_ps):
    """Neither what it had of earlier ones is lost, nor does what it did not send come with a later one: all messages that were
    taken, and E, are the sum of the gradients that were."""
    gradients, length = [], 3 if scheme is stale_is_dropped else 4
    ours, _ = replay(scheme, Compression(kind, topk=0.25), num_ps)
    local = ours._engine._local
    # Both pull and train, and the first to push is taken; the second every third time.
    for i in range(30):
        first = int(i % 3 == 0)
        for worker in (0, 1, 0, 1, *([first] * (length - 2)), *([1 - first] * (length - 2))):
            before, unsent = len(ours.updates), ours._engine.rows(local.vector("unsent_0"))[worker]
            is_push = ours.next_step(worker) == 2
            ours.step(worker)
            if is_push and len(ours.updates) > before:
                gradients.append(0.01 * ours._engine.rows(local.gradient)[worker].astype(float))
            elif is_push:
                np.testing.assert_array_equal(ours._engine.rows(local.vector("unsent_0"))[worker], unsent)
    sent = model.initial_parameters - ours.center.astype(float)
    kept = ours._engine.rows(local.vector("unsent_0")).astype(float)
    assert np.abs(kept).max(axis=1).min() > 1e-6 and len(gradients) == len(ours.dropped) == 30
    np.testing.assert_allclose(sent + kept.sum(axis=0), sum(gradients), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("value_bits", "num_ps"), [(2, 1), (32, 3)])
def test_sparseloco_loses_nothing(replay, model, value_bits, num_ps):
    """With β = 1 what was sent and what is kept is the sum of what the workers have walked, Σ (x̃ − x)."""
    of_adamw, walked = {"weight_decay": 0.1, "local_learning_rate": 0.05}, np.zeros(4)
    sparse = {"chunk_size": 4, "top": 2, "value_bits": value_bits, "error_decay": 1.0}
    ours, _ = replay("SparseLoCo", None, num_ps, learning_rate=1.0, **of_adamw, **sparse)
    local = ours._engine._local
    for worker in [0, 1] * 6 * 20:
        ours.step(worker)
        if ours.next_step(worker) == 3:  # it has trained
            walked += ours._engine.rows(local.vector("start"))[worker].astype(float) - ours.replicas[worker]
    sent = 2 * (model.initial_parameters - ours.center.astype(float))  # x̃ changes by the mean
    kept = ours._engine.rows(local.vector("unsent")).astype(float)
    assert np.abs(kept).max() > 1e-3 and ours.updates[-1].updated == 20
    np.testing.assert_allclose(sent + kept.sum(axis=0), walked, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("folder", "kind", "step"), [("HogWild", "bf16", 2**-8), ("DC-ASGD", "int8", 1 / 127)])
def test_pull_is_near_the_parameters(replay, folder, kind, step):
    """Within a step of rounding; two workers that pull the same get the same, and x̃ is not changed by that. DC-ASGD compensates
    for what changed since the x at which the gradient was taken: what the ps remember of a pull is what the worker got."""
    ours, _ = replay(folder, Compression(pull=kind), adaptive=False, lambda0=0.1)
    ours.take([0, 1] * 9)
    before = ours.center
    ours.take([0, 1])
    np.testing.assert_array_equal(ours.center, before)
    np.testing.assert_array_equal(*ours.replicas)
    off = np.abs(ours.replicas[0] - before)
    assert 0 < off.max() < 1.0001 * step * np.abs(before).max()
    remembered = [v for v in ours._engine._variables() if "pulled_value" in v.name]
    assert len(remembered) == (folder == "DC-ASGD")
    for pulled in remembered:
        np.testing.assert_array_equal(ours._engine.rows(pulled), ours.replicas)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "topk"])
def test_rounds_unrolled_or_in_a_loop(model, graph, initialized, known_batches, batches, load_scheme, servers, kind):
    """All rounds of a worker share its E and its random numbers, on a ps of another server; packed tensors travel."""
    hp = types.SimpleNamespace(window=1, learning_rate=RATE)
    compression, rule = Compression(kind, topk=0.25, seed=7), load_scheme("HogWild", "hogwild")
    task, server = servers(2)
    center = GlobalParameters(model.initial_parameters, 2, task.device_fn(), compression=compression)
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        calls = [build_rounds(rule, center, local, hp, 2), repeat_rounds(rule, center, local, hp, 2, 3)]
    session = initialized(center, local, target=server.target)
    for rounds in calls:
        session.run(rounds)
    problem = Compressed(model.initial_parameters, batches, hp, compression, 2)
    worker = hogwild(problem, 0)
    for _ in range(3 * 8):
        next(worker)
    assert np.abs(session.run(center.read()[0]) - problem.center).max() < 1e-5 * np.abs(problem.center).max()


@pytest.mark.slow
def test_rounds_in_a_call_keep_what_step_by_step_is_kept(graph, model, initialized, known_batches, batches, servers, replay):
    """Where the ps say afterwards whether they take a message: the next one comes after that."""
    compression = Compression("topk", topk=0.25)
    ours, hp = replay(stale_is_dropped, compression, num_ps=2)
    task, server = servers(2)
    center = GlobalParameters(model.initial_parameters, 2, task.device_fn(), compression=compression)
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        calls = [build_rounds(stale_is_dropped, center, local, hp, 3), repeat_rounds(stale_is_dropped, center, local, hp, 2, 3)]
    session = initialized(center, local, target=server.target)
    for rounds in calls:
        session.run(rounds)
    ours.take([0] * 3 * 9)
    value, kept = session.run([center.read()[0], local.vector("unsent_0")])
    np.testing.assert_allclose(value, ours.center, rtol=1e-6)
    np.testing.assert_allclose(kept, ours._engine.rows(ours._engine._local.vector("unsent_0"))[0], rtol=1e-5)


@pytest.mark.parametrize("kind", ["none", "topk"])
def test_local_steps_go_on_while_a_fragment_is_on_its_way(model, graph, known_batches, batches, load_scheme, kind):
    """They do not wait until the ps, under the lock, say whether they take it."""
    own = {"fragments": 1, "overlap_steps": 1, "mixing": 0.5, "momentum": 0.9, "weight_decay": 0.0, "local_learning_rate": 0.1}
    hp, rule = types.SimpleNamespace(window=2, learning_rate=RATE, **own), load_scheme("Streaming-DiLoCo", "streaming_diloco")
    task = TaskSpecDef("worker", 0, ps_hosts="localhost:1", worker_hosts="localhost:2")
    center = GlobalParameters(model.initial_parameters, 1, task.device_fn(), compression=Compression(kind, topk=0.25))
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        rounds = build_rounds(rule, center, local, hp)

    def kinds_before(fetch):
        names = [tensor.op.name if isinstance(tensor, tf.Tensor) else tensor.name for tensor in tf.nest.flatten(fetch)]
        return {node.op for node in tf.graph_util.extract_sub_graph(graph.as_graph_def(), names).node}

    assert "MutexLock" in kinds_before(rounds.operations)
    assert "MutexLock" not in kinds_before(rounds.loss)  # of both trainings, of which one is after the message


@pytest.mark.slow
def test_what_is_pulled_ahead_is_packed(graph, model, initialized, known_batches, batches, load_scheme, servers, replay):
    """In calls of several rounds as step by step."""
    compression = Compression(pull="int8")
    ours, hp = replay("HogWild", compression, num_ps=2, overlap=True)
    task, server = servers(2)
    center = GlobalParameters(model.initial_parameters, 2, task.device_fn(), compression=compression)
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
        hp = hyperparameters(hp, center, local)
        rounds = build_rounds(load_scheme("HogWild", "hogwild"), center, local, hp, 3)
    session = initialized(center, local, target=server.target)
    for _ in range(2):
        session.run(rounds)
    ours.take([0] * 3 * 6)
    value, x = session.run([center.read()[0], local.value])
    np.testing.assert_allclose(value, ours.center, rtol=1e-6)
    plain, _ = replay("HogWild", None, num_ps=2, overlap=True)
    plain.take([0] * 3 * 6)
    assert np.abs(plain.center - value).max() > 1e-4 and np.abs(plain.replicas[0] - x).max() > 1e-4


class Large:
    """Stands for a model of so many parameters, whose gradient is one of them after the other."""

    initial_state: tuple = ()

    def __init__(self, size):
        self.size, self.initial_parameters = size, np.linspace(-1, 1, size, dtype=np.float32)

    def loss_and_gradient(self, parameters, state, x, y):
        return tf.reduce_sum(parameters), parameters + tf.reduce_sum(x), state


UP = {"none": 4, "bf16": 2, "int8": 1 + 4 / 256, "int4": 1 / 2 + 4 / 256, "sign": 1 / 8 + 4 / 256, "topk": 0.08}


@pytest.fixture
def bytes_of_round(graph, initialized, known_batches, batches, load_scheme, servers):
    """A function that returns how many bytes a round of a scheme sends to two ps, and gets from them.

    After TensorFlow has optimized the graph and cut it: casts and bits are not moved to the other end.
    """

    def bytes_of_round(folder, size, compression, **hp):
        task, server = servers(2)
        model = Large(size)
        center = GlobalParameters(model.initial_parameters, 2, task.device_fn(), compression=compression)
        values = {"window": 1, "learning_rate": RATE, "num_workers": 1, "local_optimizer": "sgd", "local_learning_rate": None}
        with tf.device(task.device):
            local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
            rule = load_scheme(folder, folder.lower().replace("-", "_"))
            rounds = build_rounds(rule, center, local, types.SimpleNamespace(**{**values, **hp}))
        session = initialized(center, local, target=server.target)
        sent = notebook.messages(session, rounds)
        assert all(message.size is not None for message in sent)
        return [sum(m.size for m in sent if f"/job:{to}" in m.receiver) for to in ("ps", "worker")]

    return bytes_of_round


@pytest.mark.parametrize(
    ("folder", "kind"),
    [*(("HogWild", kind) for kind in COMPRESSIONS), ("Dynamic-SGD", "int8"), ("AEASGD", "int4"), ("Synchronous-SGD", "sign")],
)
def test_bytes_of_tensors_on_the_wire(bytes_of_round, folder, kind):
    size, pull = 51_200, kind if kind in ("bf16", "int8") else "none"
    up, down = bytes_of_round(folder, size, None if kind == "none" else Compression(kind, pull), beta=0.9, backup_workers=0)
    assert UP[kind] * size <= up < UP[kind] * size + 100
    assert UP[pull] * size <= down < UP[pull] * size + 100


OF_SPARSELOCO = {"weight_decay": 0.1, "local_learning_rate": 0.1, "chunk_size": 4096, "top": 64, "error_decay": 0.95}


@pytest.mark.slow
@pytest.mark.parametrize(("value_bits", "pull"), [(2, "none"), (32, "int8")])
def test_bytes_of_sparseloco_on_the_wire(bytes_of_round, value_bits, pull):
    """Of ten chunks: 64 values each, of 12 bits more for their places."""
    size, values = 40_960, 640
    up, down = bytes_of_round("SparseLoCo", size, Compression(pull=pull), value_bits=value_bits, **OF_SPARSELOCO)
    assert values * (12 + value_bits) / 8 <= up < values * (12 + value_bits) / 8 + 100
    assert UP[pull] * size <= down < UP[pull] * size + 100


def test_compress_on_top_of_packed_messages_is_refused(replay, user_error):
    with user_error("--compress is for dense messages, but this scheme compresses its own: leave it out"):
        replay("SparseLoCo", Compression("int8"), value_bits=2, **OF_SPARSELOCO)


@pytest.mark.parametrize("with_more", [False, True])
def test_a_sparse_vector_may_be_pushed_alone(replay, model, with_more):
    """Without waiting for others, by a plain push; also as one of several things that a message has."""

    def scheme(center, local, hp):
        sgd = tf.train.GradientDescentOptimizer(1.0)
        yield local.pull(center)
        yield local.train(1, lambda g: tf.no_op())
        sent = center.sparse(local.gradient, 4, 2, 2)
        if with_more:
            yield center.push(sgd, (sent, tf.constant(2.0)), lambda part, at_update: part[0] * part[1] / 2)
        else:
            yield center.push(sgd, sent)

    ours, _ = replay(scheme, None)
    ours.take([0, 0, 0])
    gradient = ours._engine.rows(ours._engine._local.gradient)[0]
    np.testing.assert_allclose(model.initial_parameters - ours.center, sparse_again(gradient, 4, 2, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_bytes_that_the_simulator_counts(load_scheme, model, regression, num_ps):
    """Of a push in blocks of 8 values and less, each with a scale; of a pull two for each parameter, and the global step."""
    shards, compression = shards_of(regression, 2, 4, 0), Compression("int8", "bf16")
    hp = types.SimpleNamespace(window=1, learning_rate=RATE)
    found = messages_of(load_scheme("HogWild", "hogwild"), hp, model, shards, num_ps, compression)
    assert found == [[0, 2 * model.size + 8], [0, 0], [num_ps * (8 + 4), 0]]


def pushing(message, at_ps=None):
    """A scheme that pushes `message(local)`."""
    sgd = tf.train.GradientDescentOptimizer(1.0)

    def scheme(center, local, hp):
        yield local.pull(center)
        yield local.train(1, lambda g: tf.no_op())
        yield center.push(sgd, message(local), at_ps)

    return scheme


def test_a_message_of_several_vectors(replay, model):
    """Each has an E of its own, and what is no vector of float32 goes as it is."""
    message = lambda local: (local.gradient, tf.constant(2.0), tf.range(4), 0.5 * local.gradient)  # noqa: E731
    at_ps = lambda part, _: part[1] * (part[0] + part[3]) + 0.0 * tf.cast(part[2], tf.float32)  # noqa: E731
    ours, _ = replay(pushing(message, at_ps), Compression("topk", topk=0.25))
    ours.take([0, 0, 0])
    local = ours._engine._local
    gradient, *unsent = (ours._engine.rows(local.vector(name))[0] for name in ("gradient", "unsent_0", "unsent_1"))
    sent = packed_again("topk", gradient, share=0.25)
    np.testing.assert_allclose(model.initial_parameters - ours.center, 3 * sent, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(unsent, [gradient - sent, 0.5 * (gradient - sent)], rtol=1e-6)


@pytest.mark.parametrize(
    "message",
    [
        lambda local: tf.cast(local.gradient, tf.float64),
        lambda local: tf.cast(local.gradient > 0, tf.int8),
        lambda local: tf.IndexedSlices(tf.constant([1.0]), tf.constant([0])),
        lambda local: (tf.constant(1.0), tf.range(4)),
    ],
)
def test_a_message_without_a_vector_is_refused(replay, user_error, message):
    with user_error("--compress=sign is for a vector [4] of float32, and this scheme sends a message without one"):
        replay(pushing(message, lambda part, _: tf.zeros([4])), Compression("sign"))


def test_what_x_keeps_has_to_come_from_it(replay, user_error):
    def scheme(center, local, hp):
        yield local.pull(center)
        yield local.train(1, lambda g: tf.no_op())
        yield center.add(-0.1 * local.gradient)

    with user_error("scheme: with --compress, x keeps what center.add(e) does not send: yield center.add(e) + local.add(-e)"):
        replay(scheme, Compression("int8"))
    replay(scheme, Compression(pull="int8"))  # there is nothing to keep


def test_a_push_of_nobody_is_refused(graph, model, user_error):
    center = GlobalParameters(model.initial_parameters, compression=Compression("int8"))
    with user_error("--compress=int8 needs to know the worker that sends: build the steps with `common.scheme.build_steps`"):
        center.push(tf.train.GradientDescentOptimizer(0.1), tf.zeros([4]))


def test_all_reduce_is_refused(graph, model, known_batches, batches, user_error):
    center = GlobalParameters(model.initial_parameters, compression=Compression(pull="bf16"))
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
    with user_error("--compress and --compress_pull are for messages to and from a ps; center.ring has none"):
        center.ring(local)


def test_a_share_of_another_compression(parse, user_error):
    assert parse("--compress=topk", "--topk=0.1").topk == 0.1
    with user_error("--topk=0.1 needs --compress=topk: add that, or leave --topk out"):
        parse("--compress=sign", "--topk=0.1")


@pytest.mark.cluster
def test_a_scheme_of_ones_own_is_refused_before_any_task_starts(tmp_path):
    """The launcher builds its round first."""
    script = tmp_path / "own" / "own.py"
    script.parent.mkdir()
    script.write_text(OWN_SCHEME)
    run_dir = tmp_path / "run"
    printed = runs.run(run_dir, "--compress=int8", "--steps=10", script=script, status=2)
    assert "own.py: --compress=int8 is for a vector [26122] of float32, and this scheme sends a message without one" in printed
    assert not run_dir.exists()


OWN_SCHEME = """
from common import Scheme, main, tf


def own(center, local, hp):
    sgd = tf.train.GradientDescentOptimizer(0.1)
    yield local.pull(center)
    yield local.train(1, sgd)
    yield center.push(sgd, tf.cast(local.gradient, tf.float16), lambda part, _: tf.cast(part, tf.float32))


if __name__ == "__main__":
    main(Scheme(own, epochs=1, batch_size=32, learning_rate=0.1))
"""

LARGE_MODEL = """
import keras


def build():
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(4000, "relu"), keras.layers.Dense(10)])
"""


@pytest.mark.cluster
def test_a_quarter_of_the_bytes(tmp_path):
    """What the kernel counts for an update of a run, both ways, from one line of metrics to another."""
    skip_for(sandbox.why_no_own_network())  # without one it counts what all the machine sends
    (tmp_path / "large.py").write_text(LARGE_MODEL)

    def bytes_of_an_update(name, *flags):
        run_dir = tmp_path / name
        often = "--evaluation_secs=1000", "--checkpoint_secs=1000", "--rounds_per_call=5"
        process = runs.start(run_dir, "--launch", "--steps=400", f"--model={tmp_path}/large.py:build", *often, *flags)
        counted = []
        while process.poll() is None:
            for pid in runs.processes(run_dir, "--job_name=ps")[:1]:
                with contextlib.suppress(OSError, StopIteration):
                    found = open(f"/proc/{pid}/net/dev").read().splitlines()
                    counted.append((time.time(), int(next(line for line in found if "lo:" in line).split(":")[1].split()[0])))
            time.sleep(0.02)  # how often the counter is read; nothing waits for it
        runs.finish(process)
        lines = [line for line in read_metrics(run_dir) if "samples_per_second" in line]
        times, steps = ([line[name] for line in (lines[0], lines[-1])] for name in ("time", "global_step"))
        begun, ended = np.interp(times, *np.array(counted).T)
        return (ended - begun) / (steps[1] - steps[0])

    plain, packed = bytes_of_an_update("plain"), bytes_of_an_update("int8", "--compress=int8", "--compress_pull=int8")
    size = 64 * 4000 + 4000 + 40_010
    assert plain == pytest.approx(8 * size, rel=0.1)
    assert packed / plain == pytest.approx(0.254, rel=0.1)
