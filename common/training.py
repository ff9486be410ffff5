"""The one main loop of a worker: join the cluster, build the scheme, open the session, run rounds, write the result."""

import math
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from common import cluster, data, models, plots, tf
from common.hooks import EvaluationHook, MetricsHook, MetricsLog
from common.launch import write_json
from common.parameters import GlobalParameters, LocalParameters, build_rounds
from common.session import monitored_session


def train(scheme, task, settings):
    """Trains as this worker, or in this one process when `task` is None, and returns the exit status.

    Args:
      scheme: generator function, see `common.parameters`.
      task: a `common.cluster.TaskSpecDef` of a worker, or None.
      settings: all flags as a namespace; also the scheme's hyperparameters.

    Raises:
      UserError: if data and model cannot be trained.
    """
    interruption = Interruption()
    server = task.create_server() if task else None  # before all else: the others try to reach it
    index, num_workers = (task.index, task.num_workers) if task else (0, 1)
    is_chief = index == 0
    dataset = data.load(settings.data, settings.seed)
    x, y = data.shard(dataset, index, num_workers)
    # Of the initial values only the chief's count; the seed of Dropout is to differ.
    model = models.build(settings.model, dataset, settings.seed + index)
    last = last_step(settings, len(dataset.x_train))

    with tf.Graph().as_default():
        center = GlobalParameters(model.initial_parameters, task.num_ps if task else 1, task and task.device_fn())
        with tf.device(task and task.device):
            local = LocalParameters(model, data.Batches(x, y, settings.batch_size, settings.seed + index))
            rounds_per_call = min(settings.rounds_per_call, max(1, last // num_workers))
            one = many = build_rounds(scheme, center, local, settings)
            if rounds_per_call > 1:
                many = build_rounds(scheme, center, local, settings, rounds_per_call)
            init_feed_dict, local_init_feed_dict = center.init_feed_dict, local.init_feed_dict

            log = MetricsLog(settings.run_dir, index, last)
            metrics = MetricsHook(log, settings.batch_size * settings.window)
            hooks: list = [metrics]
            if is_chief:
                parameters, step = center.read()
                final = parameters, [v.read_value() for v in local.state]
                x_test, x_feed = fed_once(dataset.x_test, "x_test")
                y_test, y_feed = fed_once(dataset.y_test, "y_test")
                local_init_feed_dict.update({x_feed: dataset.x_test, y_feed: dataset.y_test})
                evaluation = EvaluationHook(log, step, *model.evaluate(*final, x_test, y_test))
                hooks.append(evaluation)
            if task:
                own_report = tf.placeholder(tf.float64, [len(REPORT)])
                rendezvous = cluster.Rendezvous(task, own_report)
            with tf.device(center.step.device):
                clock = tf.timestamp()  # one clock for all workers
            scaffold = tf.train.Scaffold(
                init_feed_dict=init_feed_dict,
                local_init_op=tf.local_variables_initializer(),
                local_init_feed_dict=local_init_feed_dict,
            )
        checkpoints = str(Path(settings.run_dir, "checkpoints"))
        target = server.target if server else ""
        with monitored_session(task, target, scaffold, checkpoints, settings.checkpoint_secs, hooks) as session:
            interruption.training_begins()
            first_time, first_step = session.run([clock, center.step])
            deadline = time.monotonic() + (settings.seconds or math.inf)
            present = first_step
            while present < last and time.monotonic() < deadline and not interruption.requested:
                # Towards the end one round a call, so that the last step is overshot as little as can be without a lock.
                rounds = many if present + num_workers * rounds_per_call <= last else one
                present = session.run(rounds).steps[-1, 1]
            if interruption.requested:
                return 130  # leaving the session saves a checkpoint
            stop_time = session.run(clock)
            interruption.training_ends()
            metrics.flush()
            report = [index, first_time, first_step, stop_time, metrics.samples, *_staleness(metrics.staleness)]
            if is_chief:
                # Waiting for the others may take long, if one of them is not even started: save before.
                path = os.path.join(checkpoints, "model.ckpt")
                session.run_step_fn(lambda step_context: scaffold.saver.save(step_context.session, path, center.step))
                reports = rendezvous.gather(session, report) if task else [report]
                evaluated = evaluation.evaluate(session)
                values, state = session.run(final)
                if task:
                    rendezvous.dismiss(session)
            else:
                try:
                    session.run(rendezvous.report_and_wait, {own_report: report})
                except tf.errors.OutOfRangeError:
                    pass  # the chief has closed the queue: all is done
    log.close()
    if task:
        cluster.say_done(task, server)
    if is_chief:
        model.save(values, state, Path(settings.run_dir, "model.keras"))
        write_result(settings, task, reports, *evaluated)
    return 0


def last_step(settings, num_samples):
    """Returns the global step to stop at, from `--steps` or else `--epochs`."""
    return settings.steps or math.ceil(settings.epochs * num_samples / (settings.batch_size * settings.window))


# What a worker tells the chief at its end, as float64. Times are in seconds on the clock of ps 0.
REPORT = ("index", "first_time", "first_step", "stop_time", "samples", "updates", "staleness_sum", "staleness_max")


def _staleness(counts):
    return counts.total(), sum(k * n for k, n in counts.items()), max(counts, default=0)


def write_result(settings, task, reports, global_step, test_loss, test_accuracy):
    """Writes `result.json` and `curve.png` from the reports of all workers and the last evaluation."""
    plots.curve(settings.run_dir)
    result = summarize(settings, task, reports, global_step)
    result.update(test_accuracy=test_accuracy, test_loss=test_loss, restarts=0)
    write_json(Path(settings.run_dir, "result.json"), result)


def summarize(settings, task, reports, global_step):
    """Returns what `result.json` says of speed and staleness."""
    columns = dict(zip(REPORT, np.array(reports, float).T, strict=True))
    trained = columns["updates"] > 0
    train_seconds = samples_per_second = staleness = None
    if trained.any():
        # From the first round of the last worker to start; from there on all of them share the work.
        latest = np.argmax(np.where(trained, columns["first_time"], -np.inf))
        updates = global_step - columns["first_step"][latest]
        train_seconds = float(columns["stop_time"].max() - columns["first_time"][latest])
        samples_per_second = updates * settings.batch_size * settings.window / train_seconds
        staleness = columns["staleness_sum"].sum() / columns["updates"].sum()
    return {
        "scheme": settings.scheme,
        "num_ps": task.num_ps if task else 0,
        "num_workers": len(reports),
        "batch_size": settings.batch_size,
        "window": settings.window,
        "global_steps": int(global_step),
        "samples": int(columns["samples"].sum()),
        "train_seconds": train_seconds,
        "wall_seconds": time.time() - settings.began,
        "samples_per_second": samples_per_second,
        "staleness_mean": staleness,
        "staleness_max": int(columns["staleness_max"].max()),
    }


def fed_once(value, name):
    """Returns a local variable for an array too large to be part of the graph, and the placeholder to feed it with."""
    feed = tf.placeholder(value.dtype, value.shape)
    collections = [tf.GraphKeys.LOCAL_VARIABLES]
    return tf.get_variable(name, initializer=feed, trainable=False, collections=collections, use_resource=True), feed


class Interruption:
    """Ctrl-C or SIGTERM as a request to stop after the present call; a second one ends the process at once."""

    def __init__(self):
        self.requested = False
        self._training = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number, frame):
        signal.signal(number, signal.SIG_DFL)
        self.requested = True
        if not self._training:
            sys.exit(130)

    def training_begins(self):
        """From now on there is something to save."""
        self._training = True

    def training_ends(self):
        """From now on all is saved, and there may be a long wait for others, which a signal is to end at once."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)


def check(settings):
    """Raises a `UserError` if data and model cannot be trained by this many workers; trains nothing."""
    dataset = data.load(settings.data, settings.seed)
    data.shard(dataset, 0, settings.num_workers if settings.launch else 1)
    models.build(settings.model, dataset, settings.seed)
