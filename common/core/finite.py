"""Whether a loss and its gradients are finite, checked in the graph."""

import re

from common import tf

_NOT_FINITE = "not finite"  # prefix of the error message of `must_be_finite`


def must_be_finite(loss, gradients):
    """Returns an operation that fails unless a loss, a scalar, and its gradients, a list of tensors, are finite."""
    are_finite = [tf.reduce_all(tf.math.is_finite(value)) for value in (loss, *gradients)]  # their sum might overflow
    return tf.raw_ops.Assert(condition=tf.reduce_all(are_finite), data=[tf.constant(_NOT_FINITE), loss])


def loss_of_failed(error):
    """Returns the loss in an error of `must_be_finite`, or None for any other error."""
    found = re.search(rf"{_NOT_FINITE}\W? \[(\S+)\]", str(error))
    return found and float(found[1])
