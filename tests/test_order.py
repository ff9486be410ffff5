"""In a call of several rounds, no two operations race for a variable: one of them always comes after the other."""

from typing import Any

import pytest
from order import races
from test_schedules import inverse
from test_schemes import INTERVALS, SCHEMES
from test_synchronous_schemes import TOGETHER

from common import cluster, tf
from common.center import GlobalParameters
from common.coordination import Lock
from common.local import LocalParameters
from common.schedules import hyperparameters
from common.steps import build_rounds

CASES: dict[str, tuple[int, Any]] = {
    **{name: (3, scheme) for name, scheme in SCHEMES.items()},
    **INTERVALS,
    **{name: (scheme.hp.get("window", 3), scheme) for name, scheme in TOGETHER.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_no_race(graph, model, batches, known_batches, load_scheme, name):
    """With two ps: to the second, the learning rate of a push is sent by the worker, which must not pull before."""
    window, scheme = CASES[name]
    task = cluster.TaskSpecDef("worker", 0, ps_hosts=["a:1", "b:1"], worker_hosts=["c:1"])
    fragments = scheme.hp.get("fragments", 1)
    center = GlobalParameters(model.initial_parameters, 2, task.device_fn(), inverse, fragments=fragments)
    if "weight_decay" not in scheme.hp:
        scheme = scheme._replace(hp={**scheme.hp, "decay": 0.5})
    with tf.device(task.device):
        local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)), num_workers=2)
        hp, rule = hyperparameters(scheme.hyperparameters(window), center, local), load_scheme(scheme.folder, scheme.name)
        rounds = build_rounds(rule, center, local, hp, 2)
    fetched = [each.name.partition(":")[0] for each in tf.nest.flatten(list(rounds))]
    runs = tf.graph_util.extract_sub_graph(graph.as_graph_def(), fetched)
    assert races(runs) == []


@pytest.mark.parametrize(("after", "others"), [([], 1), (["first"], 0)])
def test_a_lock_is_an_order_if_it_is_taken_again_later(graph, after, others):
    """What holds it first is not known where neither taking comes after the other."""
    lock, variable = Lock("", "lock"), tf.get_variable("variable", [], use_resource=True)
    with lock.held([]) as one:
        first = tf.no_op("first")
        one += [first, variable.assign(1.0, read_value=False)]
    with lock.held([graph.get_operation_by_name(name) for name in after]) as two:
        two.append(variable.assign(2.0, read_value=False))
    runs = tf.graph_util.extract_sub_graph(graph.as_graph_def(), [op.name for op in one + two])
    assert len(races(runs)) == others
