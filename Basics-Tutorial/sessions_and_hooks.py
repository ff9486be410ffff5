"""What the notebooks Sessions-and-Hooks and Sessions-and-Hooks-Reference share: a problem, and ways to watch a session."""

import contextlib
import logging
import sys
from pathlib import Path
from typing import Any, NamedTuple

from common import tf
from common.data import datasets

points = datasets.load("linear")


class Model(NamedTuple):
    """What `build` has put into the graph."""

    x: Any  # [n, 1], all points unless other ones are fed
    y: Any  # [n, 1]
    loss: Any  # a scalar
    step: Any  # the global step
    train: Any  # makes one step, and returns the new global step


def build(learning_rate=0.1):
    """Puts variables, loss and training operation into the present graph: a line through points around y = 2x + 10."""
    x = tf.placeholder_with_default(points.x_train, [None, 1], name="x")  # all points, if nothing is fed
    y = tf.placeholder_with_default(points.y_train, [None, 1], name="y")
    slope = tf.get_variable("slope", initializer=0.0)
    intercept = tf.get_variable("intercept", initializer=0.0)
    loss = tf.reduce_mean((slope * x + intercept - y) ** 2, name="loss")
    tf.summary.scalar("mean_squared_error", loss)
    step = tf.train.get_or_create_global_step()
    update = tf.train.GradientDescentOptimizer(learning_rate).minimize(loss)
    with tf.control_dependencies([update]):
        train = step.assign_add(1)
    return Model(x, y, loss, step, train)


@contextlib.contextmanager
def graph_of(task):
    """The graph of a worker, with the variables on the ps."""
    with tf.Graph().as_default(), tf.device(task.device_fn()):
        yield build()


def files(name):
    """Prints what is in a folder. Event files, whose names hold time and machine, are one line."""
    names = {"events.out.tfevents..." if "tfevents" in path.name else path.name for path in Path(name).iterdir()}
    for file in sorted(names):
        print("   ", file)


class FailOnceHook(tf.train.SessionRunHook):
    """Raises in the run with this number what TensorFlow raises when a ps is lost."""

    def __init__(self, run):
        self._runs_left = run

    def before_run(self, run_context):
        self._runs_left -= 1
        if self._runs_left == 0:
            raise tf.errors.AbortedError(None, None, "the ps was restarted")


def _is_of_use(record):
    return not record.getMessage().startswith(("From ", "Calling checkpoint listeners"))  # From: something is deprecated


@contextlib.contextmanager
def logged():
    """Prints what TensorFlow logs meanwhile, which `common` restricts to errors otherwise."""
    logger, handler = logging.getLogger("tensorflow"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.addFilter(_is_of_use)
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])
