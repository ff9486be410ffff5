"""Messages with fewer bits: what is packed is nearly what is unpacked, nothing is lost, and fewer bytes travel."""

import collections
import math
import types

import numpy as np
import pytest
from oracle import RATE, Problem

from common import tf
from common.center import GlobalParameters
from common.compression import BIASED, Compression, _uniform, pack
from common.flags import COMPRESSIONS
from common.local import LocalParameters
from common.replay import Replay
from common.steps import build_rounds, build_steps, repeat_rounds

KINDS = COMPRESSIONS[1:]
SIZES = [1, 5, 8, 100, 255, 256, 257, 1000, 8217]


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


def run(tensors):
    with tf.Session() as session:
        return session.run(tensors)


def unpacked(kind, vector, seed=(1, 2), share=0.01):
    """The same by `pack`."""
    with tf.Graph().as_default():
        vector = tf.placeholder_with_default(np.asarray(vector, np.float32), [len(vector)])
        return run(pack(kind, vector, tf.constant(seed, tf.int64), share).unpacked())


def random_numbers(size, seed):
    """The numbers u of the blocks of a vector."""
    shape = [len(blocks_of(np.zeros(size))), math.ceil(len(blocks_of(np.zeros(size))[0]) / 8) * 8]
    with tf.Graph().as_default():
        return run(_uniform(shape, tf.constant(seed, tf.int64)))


@pytest.mark.parametrize("kind", KINDS)
def test_as_by_numpy(kind):
    """Sizes that are no multiple of a block, or less than one; and a block of zeros."""
    for size in SIZES:
        vector = np.random.default_rng(size).normal(size=size).astype(np.float32)
        if size > 256:
            vector[: len(blocks_of(vector)[0])] = 0
        u = random_numbers(size, (1, 2)) if kind in ("int8", "int4") else None
        np.testing.assert_allclose(unpacked(kind, vector), packed_again(kind, vector, u), rtol=1e-6, err_msg=f"of {size}")


@pytest.mark.parametrize("kind", KINDS)
def test_zeros(kind):
    assert not unpacked(kind, np.zeros(300)).any()


@pytest.mark.parametrize(("kind", "levels"), [("int8", 127), ("int4", 7)])
def test_stochastic_rounding_is_unbiased(kind, levels):
    """The mean of 10,000 is within five standard errors of each value: a step s has a variance of s²/4 at most."""
    vector = np.random.default_rng(0).normal(size=40).astype(np.float32)
    vector[:3] = 0, np.abs(vector).max(), -np.abs(vector).max()
    step, times = np.abs(vector).max() / levels, 10_000
    with tf.Graph().as_default():
        turn = tf.placeholder(tf.int64, [])
        packed = pack(kind, tf.constant(vector), tf.stack([tf.constant(3, tf.int64), turn])).unpacked()
        with tf.Session() as session:
            once = session.make_callable(packed, [turn])
            found = np.array([once(i) for i in range(times)])
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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(kind, bad):
    """A training that diverges is noticed, wherever in a block it begins."""
    for size in (1, 300, 1000):
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
        for i, piece in enumerate(np.split(v, self._num_ps)):
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
        hp = types.SimpleNamespace(**{**others, "local_learning_rate": None, **hp})
        rule = load_scheme(folder, folder.lower().replace("-", "_")) if isinstance(folder, str) else folder
        make_batches = lambda i: known_batches(*(b[i] for b in batches), f"batches_{i}")  # noqa: E731
        made.append(Replay(rule, hp, model, make_batches, num_ps=num_ps, compression=compression))
        return made[-1], hp

    yield replay
    for each in made:
        each.close()


@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("folder", LIVES)
def test_exact(model, batches, replay, folder, kind, num_ps):
    """x̃ after twenty rounds with stale pushes, each of two workers with an E, or an x that keeps the rest, of its own."""
    compression = Compression(kind, topk=0.25, seed=7)
    ours, hp = replay(folder, compression, num_ps)
    problem = Compressed(model.initial_parameters, batches, hp, compression, num_ps)
    workers = [LIVES[folder](problem, i) for i in range(2)]
    for worker in STALE:
        ours.step(worker)
        next(workers[worker])
    assert np.abs(problem.center - model.initial_parameters).max() > 0.1
    assert np.abs(ours.center - problem.center).max() < 1e-5 * np.abs(problem.center).max()
    assert [(u.worker, u.staleness, u.updated) for u in ours.updates] == problem.log


@pytest.mark.parametrize("kind", BIASED)
@pytest.mark.parametrize("num_ps", [1, 2])
def test_error_feedback_loses_nothing(replay, model, kind, num_ps):
    """What was sent and what is kept is the sum of the gradients: with a rate of 1, x̃ − x̃₀ is what was sent."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_elastic_exchange_moves_both_sides_by_as_much(replay, kind):
    ours, _ = replay("AEASGD", Compression(kind, topk=0.25))
    for worker in [*[0, 1] * 9, 0, 1]:
        ours.step(worker)
    before, x = ours.replicas.sum(axis=0) + ours.center, ours.replicas
    for worker in [0, 1, 1, 0]:
        ours.step(worker)  # the exchange
    assert np.abs(ours.replicas - x).max() > 1e-3
    np.testing.assert_allclose(ours.replicas.sum(axis=0) + ours.center, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("folder", ["HogWild", "DC-ASGD"])
@pytest.mark.parametrize(("kind", "step"), [("bf16", 2**-8), ("int8", 1 / 127)])
def test_pull_is_near_the_parameters(replay, folder, kind, step):
    """Within a step of rounding; two workers that pull the same get the same, and x̃ is not changed by that."""
    ours, _ = replay(folder, Compression(pull=kind), 2, adaptive=False, lambda0=0.1)
    for worker in [0, 1] * 9:
        ours.step(worker)
    before = ours.center
    for worker in [0, 1]:
        ours.step(worker)
    np.testing.assert_array_equal(ours.center, before)
    np.testing.assert_array_equal(*ours.replicas)
    off = np.abs(ours.replicas[0] - before)
    assert 0 < off.max() < 1.0001 * step * np.abs(before).max()


def test_what_the_ps_remember_of_a_pull_is_what_the_worker_got(replay):
    """DC-ASGD compensates for what changed since the x at which the gradient was taken."""
    ours, _ = replay("DC-ASGD", Compression(pull="int8"), adaptive=False, lambda0=0.1)
    for worker in [0, 0, 0, 0]:
        ours.step(worker)
    [pulled] = [v for v in ours._engine._variables() if "pulled_value" in v.name]
    np.testing.assert_array_equal(ours._engine.rows(pulled)[0], ours.replicas[0])


@pytest.mark.parametrize("kind", KINDS)
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


class Large:
    """Stands for a model of so many parameters, whose gradient is its parameters."""

    initial_state: tuple = ()

    def __init__(self, size):
        self.size, self.initial_parameters = size, np.linspace(-1, 1, size, dtype=np.float32)

    def loss_and_gradient(self, parameters, state, x, y):
        return tf.reduce_sum(parameters) + tf.reduce_sum(x), parameters + tf.reduce_sum(x), state


def traffic(session, fetches):
    """The bytes of the tensors that travel in one call, {(from, to): bytes}, of those of a kilobyte or more."""
    options, metadata = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), tf.RunMetadata()
    session.run(fetches, options=options, run_metadata=metadata)
    found: collections.Counter = collections.Counter()
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            if node.node_name == "RecvTensor":
                size = node.output[0].tensor_description.allocation_description.requested_bytes if node.output else 0
                found[device.device] += size
    return found


