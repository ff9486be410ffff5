"""Fragments of x̃ that are exchanged in turn, `send` and `receive` of `center.together`: what they cost, and who waits for what.

That Streaming-DiLoCo computes what its formula says is tested in `test_schemes.py`.
"""

import types

import numpy as np
import pytest
from test_steps import Ones, sgd

from common import tf
from common.data import datasets
from common.models import keras_model
from common.scheme.center import GlobalParameters
from common.scheme.compression import Compression
from common.scheme.rounds import build_rounds, build_steps
from common.simulation.actions import Action, Costs, Waiting
from common.simulation.facts import messages_of
from common.simulation.shards import shards_of
from common.simulation.virtual_time import VirtualTime

SIZE, PS = 12, 2


@pytest.fixture
def place(graph):
    """A function that makes x̃ = 0 in so many fragments, and so many workers."""

    def place(fragments=2, num_workers=1, on_ps=False, **more):
        device_fn = tf.train.replica_device_setter(ps_tasks=PS, worker_device="/job:worker/task:0") if on_ps else None
        center = GlobalParameters(np.zeros(SIZE, np.float32), PS, device_fn, fragments=fragments, **more)
        with tf.device("/job:worker/task:0" if on_ps else None):
            return center, *(Ones(center, i, num_workers) for i in range(num_workers))

    return place


def plain(optimizer=None):
    """A scheme that exchanges fragments, and whose messages are ones."""

    def plain(center, local, hp):
        others, known, rule = center.together(local), local.copy("known"), optimizer or sgd()
        for p in range(center.fragments):
            yield local.train(1, None)
            yield others.send(p, rule, local.gradient[center.fragment(p)])
            yield others.receive(p, known)

    return plain


def ancestors(operations):
    found, todo = set(), list(operations)
    while todo:
        op = todo.pop()
        if op not in found:
            found.add(op)
            todo += [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pull", ["none", "int8"])
def test_the_ps_wait_and_read_while_the_worker_trains(place, pull):
    """No operation on a ps comes after the training between send and receive; so the fragment is on its way meanwhile."""
    center, local = place(on_ps=True, compression=Compression("none", pull))
    steps = []

    def scheme(center, local, hp):
        others, known = center.together(local), local.copy("known")
        for p in range(center.fragments):
            yield local.train(1, None)
            yield others.send(p, sgd(), local.gradient[center.fragment(p)])
            steps.append(local.assign(local.vector("overlapped"), tf.ones([SIZE])))
            yield steps[-1]
            steps.append(others.receive(p, known))
            yield steps[-1]

    with tf.device("/job:worker/task:0"):
        build_rounds(scheme, center, local, None, rounds=2)
    for overlapped, received in zip(steps[::2], steps[1::2], strict=True):
        before = ancestors(received.operations)
        (trained,) = overlapped.operations
        assert trained in before  # the worker writes `known` after that
        reads = [op for op in before if op.type == "ReadVariableOp" and "parameters/" in op.inputs[0].op.name]
        assert len(reads) >= PS and not any(trained in ancestors([op]) for op in reads)
        assert any("Dequeue" in op.type for op in ancestors(reads))  # not before the update is made


@pytest.mark.slow
@pytest.mark.parametrize("fragments", [1, 5])
def test_an_exchange_moves_one_fragment(load_scheme, fragments):
    """Bytes of each send and each receive; there are a few more, of steps and of numbers."""
    digits, names = datasets.load("digits"), {"momentum": 0.9, "weight_decay": 0.1, "local_learning_rate": 0.1}
    hp = types.SimpleNamespace(**names, learning_rate=0.7, window=2, overlap_steps=1, mixing=0.5, num_workers=2)
    hp.fragments = fragments
    model = keras_model.build("linear", digits)
    script = load_scheme("Streaming-DiLoCo", "streaming_diloco")
    found = messages_of(script, hp, model, shards_of(digits, 2, 32, seed=0), 1)
    size = 4 * model.size // fragments
    assert size == 2600 // fragments
    up, down = ([moved - size for moved in column if moved > 60] for column in zip(*found, strict=True))
    assert len(up) == len(down) == fragments and set(down) == {8}
    assert 0 <= min(up) and max(up) < 40


@pytest.mark.slow
def test_a_worker_that_begins_anew_comes_into_step(place, initialized):
    """It sends a fragment whose turn it is not: that is thrown away, it waits for nobody, and the next one counts."""
    center, *workers = place(num_workers=2)
    steps = [build_steps(plain(), center, local, None) for local in workers]
    session = initialized(center, *workers)
    waits = [center.waits(local) for local in workers]
    for each in waits:
        session.run(each.enter)

    def do(worker, *numbers):
        for number in numbers:
            found = session.run(steps[worker][number].fetches())
        return found

    do(0, 0, 1)
    do(1, 0, 1, 2)
    do(0, 2, 3, 4)  # fragment 0 is updated; worker 0 has sent its fragment 1
    session.run(waits[1].enter)  # a new process, whose round begins with fragment 0
    sent = do(1, 0, 1)
    assert sent["updated"] == sent["step_before"] == 1
    assert session.run(steps[1][2].may_go_on) and not session.run(steps[0][5].may_go_on)
    do(1, 2)
    assert do(1, 3, 4)["updated"] == 2
    assert do(0, 5)["pulled"] == do(1, 5)["pulled"] == 2
    np.testing.assert_array_equal(session.run(center.read()[0]), -np.ones(SIZE))


@pytest.mark.slow
def test_a_chief_that_comes_back_does_not_disturb_the_turns(place, initialized):
    """A message on its way does not count any more; it is the turn of the fragment that the others send next, or have begun."""
    center, *workers = place(fragments=3, num_workers=2)
    steps = [build_steps(plain(), center, local, None) for local in workers]
    session = initialized(center, *workers)
    waits = [center.waits(local) for local in workers]
    for each in waits:
        session.run(each.enter)
    clocks = waits[0]._clocks.read()
    at, updates = [0, 0], 0
    for turn in range(60):
        if turn in (7, 22):
            newest = max(session.run(clocks))
            session.run(waits[0].enter)
            assert session.run(clocks).tolist() == [newest + 3] * 2
            at[0] = 0
        for worker in 0, 1:
            step = steps[worker][at[worker]]
            if step.may_go_on is None or session.run(step.may_go_on):
                session.run(step.operations)
                at[worker] = (at[worker] + 1) % len(steps[worker])
        assert session.run(center.step) >= updates
        updates = session.run(center.step)
    assert updates >= 10


def test_a_round_that_is_wrong(place, user_error):
    center, local = place()

    def only_one(center, local, hp):
        others, known = center.together(local), local.copy("known")
        yield local.train(1, None)
        yield others.send(1, sgd(), local.gradient[center.fragment(1)])
        yield others.receive(1, known)

    with user_error("with 2 fragments", "it needs send 0, receive 0, send 1, receive 1; it has send 1, receive 1"):
        build_steps(only_one, center, local, None)

    def all_at_once(center, local, hp):
        yield local.train(1, None)
        yield center.together(local).send(0, sgd(), local.gradient)

    with user_error("a message is a vector [6]", "not (12,)"):
        build_steps(all_at_once, center, local, None)
    with user_error("--fragments=13 is more than the 12 parameters"):
        place(fragments=13)


def test_adam_counts_the_steps_of_all_fragments_together(place, user_error):
    center, local = place()
    with user_error("AdamOptimizer keeps numbers for all parameters together", "--fragments=1"):
        build_steps(plain(tf.train.AdamOptimizer()), center, local, None)


def test_adam_makes_steps_of_one_fragment(place):
    center, local = place(fragments=1)
    assert len(build_steps(plain(tf.train.AdamOptimizer()), center, local, None)) == 3


def test_an_exchange_ends_before_the_next_one(load_scheme, user_error):
    script = load_scheme("Streaming-DiLoCo", "streaming_diloco")
    check = script.__globals__["check"]
    check(types.SimpleNamespace(window=5, overlap_steps=5))
    with user_error("--overlap_steps must be at most --window=5"):
        check(types.SimpleNamespace(window=5, overlap_steps=6))


def test_pieces_of_a_fragment_lie_on_all_ps(place):
    center, _ = place(fragments=3, on_ps=True)
    assert center.sizes == [2] * 6
    assert [piece.device for piece in center.pieces] == [f"/job:ps/task:{i % PS}" for i in range(6)]
    assert [center.fragment(p) for p in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]


@pytest.mark.parametrize(
    "overlap, latency, waits", [(0, 0.25, 1.5), (1, 0.25, 0.5), (2, 0.25, 0), (4, 0.25, 0), (1, 1.25, 2.5), (4, 1.25, 0)]
)
def test_in_virtual_time_an_exchange_hides_behind_training(overlap, latency, waits):
    """A message takes half a second on its link, and the latency to arrive; a local step takes one second."""
    sends = [Action(local_steps=5 - overlap), Action(writes=True, up=100, fragment=0)]
    receives = [Action(reads=True, down=100, waits=True, is_early=True), Action()]
    actions = [*sends, *([Action(local_steps=overlap)] if overlap else []), *receives]
    costs = Costs(step=1, latency=latency, bandwidth_up=200, bandwidth_down=200)
    time = VirtualTime(actions, 3, costs, Waiting(quorum=3), spans_until=100)
    schedule = time.run(until=100)
    mixed = schedule.times[(schedule.steps == len(actions) - 1) & (schedule.workers == 1)]
    np.testing.assert_allclose(mixed, (5 + waits) * np.arange(1, len(mixed) + 1))
    assert len(mixed) == 100 // (5 + waits) and time.dropped == 0
    reads = schedule.updated[(schedule.steps == len(actions) - 2) & (schedule.workers == 1)]
    assert reads.tolist() == list(range(1, len(reads) + 1))  # never the x̃ of before
