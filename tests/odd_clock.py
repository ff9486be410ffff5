"""A ps whose wall clock is set, an hour forward or back, every few seconds: for `python tests/chaos.py --clocks`."""

import counting_model

from common import tf

EVERY_SECS = 4
_timestamp = tf.timestamp


def timestamp():
    """`tf.timestamp` by that clock."""
    now = _timestamp()
    return now + 3600 * (tf.math.floormod(tf.floor(now / EVERY_SECS), 3.0) - 1)


def build():
    """`counting_model.build`. The graph of a worker that builds it asks this clock on the ps."""
    tf.timestamp = timestamp
    return counting_model.build()
