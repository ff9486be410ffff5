"""tests/order.py: that locks are an order. Each scheme's calls are examined by it in test_schemes.py."""

import pytest
from order import races

from common import tf
from common.core.locks import Lock


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
