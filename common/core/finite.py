"""Whether a loss and its gradients are finite, checked in the graph."""

import re

from common import tf

_NOT_FINITE = "not finite"  # begins what the operation of `must_be_finite` prints


def must_be_finite(loss, gradients):
    """Returns an operation that fails unless a loss, a scalar, and its gradients, a list of tensors, are finite."""
    are_finite = [tf.reduce_all(tf.math.is_finite(value)) for value in (loss, *gradients)]  # a sum of finite ones may overflow
    return tf.raw_ops.Assert(condition=tf.reduce_all(are_finite), data=[tf.constant(_NOT_FINITE), loss])


def loss_of_failed(error):
    """Returns the loss by which an operation of `must_be_finite` has failed, with this error; None if it was another one."""
    found = re.search(rf"{_NOT_FINITE}\W? \[(\S+)\]", str(error))
    return found and float(found[1])
