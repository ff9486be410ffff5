"""What is special where the workers of a scheme wait for each other: a batch of all, ends, and workers that come and go.

That these schemes compute what their formulas say is tested in test_schemes.py.
"""

import random
import types

import numpy as np
import pytest
from oracle import RATE, TOGETHER, Problem

from common import tf
from common.data import datasets
from common.models import keras_model
from common.scheme.center import GlobalParameters
from common.scheme.learning_rates import hyperparameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import build_rounds, build_steps, repeat_rounds
from common.simulation.replay import Replay


@pytest.mark.slow
def test_n_workers_are_one_process_with_a_batch_n_times_as_large(load_scheme, known_batches):
    """On the same samples in the same order: the mean of means of equal batches is the mean."""
    digits, rule = datasets.load("digits"), load_scheme("Synchronous-SGD", "synchronous_sgd")
    mlp, steps, size, n = keras_model.build("mlp", digits), 40, 16, 3
    samples = np.random.default_rng(0).permutation(len(digits.x_train))[: n * size * 25].reshape(25, n, size)
    x, y = digits.x_train[samples], digits.y_train[samples]

    def parameters(num_workers, batches_of):
        hp = types.SimpleNamespace(window=1, learning_rate=0.2, backup_workers=0, num_workers=num_workers)
        make_batches = lambda i: known_batches(*batches_of(i), f"batches_{i}")  # noqa: E731
        replay = Replay(rule, hp, mlp, make_batches, num_workers)
        replay.run(steps)
        center = replay.center
        replay.close()
        return center

    together = parameters(n, lambda i: (x[:, i], y[:, i]))
    alone = parameters(1, lambda i: (x.reshape(25, n * size, *x.shape[3:]), y.reshape(25, n * size)))
    assert np.abs(together - mlp.initial_parameters).max() > 0.1
    assert np.abs(together - alone).max() < 1e-5 * np.abs(alone).max()


@pytest.mark.slow
def test_loop_that_another_worker_ends(model, graph, load_scheme, initialized, known_batches, batches):
    """It goes around once, to hear of it."""
    center = GlobalParameters(model.initial_parameters)
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
    rule, hp = load_scheme("Synchronous-SGD", "synchronous_sgd"), TOGETHER["Synchronous-SGD"].hyperparameters(1)
    build_rounds(rule, center, local, hp)
    session = initialized(center, local)
    built = repeat_rounds(rule, center, local, hp, 2, 1000)
    session.run(center.waits(local).enter)
    session.run(center.waits(local).leave)  # as the other one does
    rounds = session.run(built)
    assert rounds.training_ended and rounds.steps.tolist() == [[0, 0], [0, 0]]


COME = -1  # where a worker is that has come and waits for the next update; else the number of its next step


class Crowd:
    """Synchronous SGD of workers that come, go and die, in NumPy.

    Args:
      start: x̃.
      begin: how many workers there are at first.
      late: how many of them are not waited for.
    """

    def __init__(self, start, begin, late):
        self.center, self.late, self.version, self.resets = start.astype(float), late, 0, 0
        self.present, self.ahead, self.leaving = set(range(begin)), set(), set()  # ahead: from whom nothing is expected
        self.given: list = []
        self.known, self.numbers = {}, []

    def enter(self, i):
        if i == 0:  # what is on its way counts no more
            self.given, self.ahead, self.resets = [], set(), self.resets + 1
        if i not in self.present:
            self.present.add(i)
            self.ahead.add(i)
        self.leaving.discard(i)
        self.wait(i)

    def may_go_on(self, i):
        return i not in self.ahead or i in self.leaving

    def wait(self, i):
        self.known[i] = self.version, self.resets

    def push(self, i, gradient):
        if self.known[i] == (self.version, self.resets) and i in self.present and i not in self.ahead:
            self.given.append(gradient)
            self.ahead.add(i)
        if i in self.leaving:
            self.present.discard(i)
            self.ahead.discard(i)
        if self.given and len(self.ahead) >= max(1, len(self.present) - self.late):
            self.center = self.center - RATE * np.mean(self.given, axis=0)
            self.version += 1
            self.numbers.append(len(self.given))
            self.given, self.ahead = [], set()


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_updates_of_workers_that_come_and_go(graph, model, batches, known_batches, load_scheme, late):
    """Each is the mean of the gradients of those who were there when it began; one that is killed is waited for."""
    places, begin, rng = 5, 2 + late, random.Random(late)
    scheme = TOGETHER["Synchronous-SGD"]
    values = vars(scheme.hyperparameters(1)) | {"backup_workers": late, "max_workers": places, "num_workers": begin}
    hp, center, rule = types.SimpleNamespace(**values), GlobalParameters(model.initial_parameters), load_scheme(*scheme[:2])
    locals_, steps, problems = [], [], []
    for i in range(places):
        own = known_batches(*(b[i % 2] for b in batches), f"b{i}")
        locals_.append(LocalParameters(center, model, own, f"w{i}", i, places, begin_workers=begin))
        steps.append(build_steps(rule, center, locals_[i], hyperparameters(hp, center, locals_[i])))
        problems.append(Problem(model.initial_parameters, batches, hp))
    waits = [center.waits(local) for local in locals_]
    left = {waits[0].left: [False] * places}
    crowd, at, x = Crowd(model.initial_parameters, begin, late), {}, {}
    made = center.read()[0], center.step, center.local_steps
    with tf.Session() as session:
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        session.run(tf.local_variables_initializer(), {k: v for local in locals_ for k, v in local.init_feed_dict.items()})
        for i in range(begin):
            session.run(waits[i].enter, left)
            crowd.enter(i)
            at[i] = COME
        for _ in range(1500):
            i = rng.randrange(places)
            if i not in at or rng.random() < 0.02:  # it comes, or dies and comes again
                if i in at or rng.random() < 0.1:
                    session.run(waits[i].enter, left)
                    crowd.enter(i)
                    at[i] = COME
                continue
            assert (i not in crowd.present) == session.run(waits[i].has_left)
            if at[i] in (COME, 3):
                behind = session.run(waits[i].behind)
                if not crowd.may_go_on(i):
                    assert behind.any() and set(np.flatnonzero(behind)) <= crowd.present - crowd.ahead
                    continue
                assert not behind.any()
                session.run(waits[i].come if at[i] == COME else steps[i][3].fetches())
                crowd.wait(i)
                at[i] = 0
                if i not in crowd.present:
                    del at[i]
                elif i > late and rng.random() < 0.1:  # there is always somebody else
                    session.run(waits[i].go)
                    crowd.leaving.add(i)
                continue
            session.run(steps[i][at[i]].fetches())
            if at[i] == 0:
                x[i] = crowd.center
            elif at[i] == 1:
                x[i] = problems[i].gradient(i % 2, x[i])
            else:
                crowd.push(i, x[i])
                ours, step, local_steps = session.run(made)
                np.testing.assert_allclose(ours, crowd.center, rtol=1e-4, atol=1e-6)
                assert (step, local_steps) == (crowd.version, sum(crowd.numbers))
            at[i] += 1
    assert set(crowd.numbers) >= {2, 3, 4} and len(crowd.numbers) > 30


def test_who_is_killed_after_its_push_gives_once(model, graph, load_scheme, initialized, known_batches, batches):
    """Its next process pushes before it waits, and the update is not made yet."""
    scheme, center = TOGETHER["Synchronous-SGD"], GlobalParameters(model.initial_parameters)
    hp, rule, locals_, steps = scheme.hyperparameters(1), load_scheme(*scheme[:2]), [], []
    for i in range(2):
        local = LocalParameters(center, model, known_batches(*(b[i] for b in batches), f"b{i}"), f"w{i}", i, 2)
        locals_.append(local)
        steps.append(build_steps(rule, center, local, hyperparameters(hp, center, local)))
    session = initialized(center, *locals_)
    session.run(center.waits(locals_[0]).enter)
    for i in 1, 1, 0:
        if i == 1:
            session.run(center.waits(locals_[1]).enter)
        for step in steps[i][:3]:
            session.run(step.fetches())
    problem = Problem(model.initial_parameters, batches, hp)
    mean = sum(problem.gradient(i, problem.center) for i in range(2)) / 2
    np.testing.assert_allclose(session.run(center.read()[0]), problem.center - RATE * mean, rtol=1e-5)
    for i in range(2):
        session.run(steps[i][3].fetches())
    assert session.run(center.step) == 1


def test_who_comes_after_the_end_is_told(graph, model, batches, known_batches, load_scheme):
    scheme, center = TOGETHER["Synchronous-SGD"], GlobalParameters(model.initial_parameters)
    values = vars(scheme.hyperparameters(1)) | {"max_workers": 2, "num_workers": 1}
    hp, rule, waits, push = types.SimpleNamespace(**values), load_scheme(*scheme[:2]), [], []
    for i in range(2):
        local = LocalParameters(center, model, known_batches(*(b[i] for b in batches), f"b{i}"), f"w{i}", i, 2, begin_workers=1)
        push.append(build_steps(rule, center, local, hyperparameters(hp, center, local))[2])
        waits.append(center.waits(local))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        session.run(tf.local_variables_initializer(), {k: v for w in waits for k, v in w._local.init_feed_dict.items()})
        session.run(waits[0].enter, {waits[0].left: [False, False]})
        session.run(waits[0].leave)
        session.run(waits[1].enter)
        session.run(waits[1].come)
        assert session.run(push[1].training_ended) and session.run(waits[1].has_left)


@pytest.mark.slow
def test_updates_in_a_loop_of_the_graph(graph, model, batches, known_batches, load_scheme):
    """As in a long run, of one worker where more may come."""
    scheme, times = TOGETHER["Synchronous-SGD"], tf.placeholder(tf.int32, [])
    center = GlobalParameters(model.initial_parameters)
    values = vars(scheme.hyperparameters(1)) | {"max_workers": 3, "num_workers": 1}
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)), num_workers=3, begin_workers=1)
    hp, rule = hyperparameters(types.SimpleNamespace(**values), center, local), load_scheme(*scheme[:2])
    build_rounds(rule, center, local, hp)
    loop, waits = repeat_rounds(rule, center, local, hp, 2, times), center.waits(local)
    problem = Problem(model.initial_parameters, batches, scheme.hyperparameters(1))
    for _ in range(6):
        problem.center = problem.center - RATE * problem.gradient(0, problem.center)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        session.run(tf.local_variables_initializer(), local.init_feed_dict)
        session.run(waits.enter, {waits.left: [False] * 3})
        made = session.run(loop, {times: 3})
        assert made.steps[-1].tolist() == [5, 6] and tuple(made.local_steps) == (-1, 6)
        np.testing.assert_allclose(session.run(center.read()[0]), problem.center, rtol=1e-5)
