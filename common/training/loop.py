"""Main loop of a worker: join the cluster, build the scheme, open the session, run rounds, write the result."""

import functools
import os
from pathlib import Path

from common import tf
from common.cluster import membership, monitored_session
from common.core import BUILDING, LOADING, STANDS_IN, UserError, doing, nobody, run_folder
from common.data import sources, streams
from common.scheme import tables
from common.training.calls import is_small, run_rounds
from common.training.ending import Ending
from common.training.interruption import Interruption, Leaver
from common.training.model_and_data import build_model, samples_of, split
from common.training.run_check import check_leases
from common.training.worker_graph import WorkerGraph
from common.training.worker_hooks import WorkerHooks
from common.training.worker_progress import Stopwatch, WorkerProgress

# Graph optimization makes calls of a small model up to 5 % faster, but takes a worker about a second.
OPTIMIZED = 5000  # local steps from which on it pays off


def train(scheme, task, settings):
    """Trains as this worker, or in this one process when `task` is None, and returns the exit status.

    Args:
      scheme: generator function, see `common.scheme.steps`.
      task: a `common.cluster.TaskSpecDef` of a worker, or None.
      settings: all flags as a namespace; also the scheme's hyperparameters.

    Raises:
      UserError: if data and model cannot be trained.
    """
    index = task.shard_index if task else 0
    had_left = run_folder.forget_left(settings.run_dir, index)
    server, interruption = _join(task, settings)
    doing(LOADING)
    dataset, held_out = split(sources.load(settings), settings)
    check_leases(settings, dataset)
    doing(BUILDING)
    model = build_model(settings, samples_of(dataset, settings), index, tables_on_ps=True)
    tables.check_flags(settings, model.tables)
    doing("building the graph")
    with tf.Graph().as_default():
        graph = WorkerGraph(scheme, task, settings, model, dataset, held_out)
        plan = graph.plan._replace(had_left=had_left)
        is_short = graph.calls.local_steps < OPTIMIZED and is_small(model)
        exchanges = bool(plan.waits and plan.waits.exchanges)
        open_session = functools.partial(monitored_session, keeper=plan.keeper, is_short=is_short, reaches_workers=exchanges)
        with streams.reading(dataset):
            outcome = run_worker(plan, task, settings, server, interruption, open_session)
    doing("writing the result")
    graph.write_result(outcome)
    return outcome.status


def _join(task, settings):
    """Starts this task's server, and listens for signals; returns the server, or None without a cluster, and an `Interruption`.

    Raises:
      UserError: if the code of this worker differs from that of worker 0, in an elastic run.
    """
    waits_for_others = settings.run.pace != "own"
    can_leave = task and task.shard_index > 0 and (settings.max_workers or not waits_for_others)
    leaver = Leaver(task, settings) if can_leave else None
    interruption = Interruption(leaver, waits_for_others)
    if leaver and os.environ.get(STANDS_IN):
        interruption.requested = interruption.leaves = True
    server = task.create_server() if task else None  # first, as the other tasks try to connect
    if leaver:
        leaver.server.set()
    if settings.max_workers and settings.run.code and not interruption.leaves:
        doing("comparing its code with that of worker 0", whom=nobody)
        if not membership.has_code_of_chief(task, server, settings.run.code):
            raise UserError(
                "the code in common/ or of the scheme differs from that of worker 0: join with the code of the run"
            )
    return server, interruption


def run_worker(plan, task, settings, server, interruption, open_session):
    """The main loop: runs this worker's rounds until training ends, then passes the final barrier with the others.

    Args:
      plan: a `Plan` in the present graph.
      task: a `common.cluster.TaskSpecDef` of a worker, or None.
      settings: all flags as a namespace.
      server: this task's `tf.train.Server`, or None.
      interruption: an `Interruption`.
      open_session: as `common.cluster.monitored_session`.

    Returns:
      An `Outcome`.
    """
    hooks = WorkerHooks(plan, task, settings, server, interruption)  # one for each feature
    progress, stopwatch = WorkerProgress(plan, settings, hooks), Stopwatch(plan)
    ending = Ending(plan, task, settings, server, hooks)
    target, folder = server.target if server else "", str(Path(settings.run_dir, "checkpoints"))
    waits = bool(plan.waits)
    doing("opening the session", waits=waits, whom=nobody)
    with open_session(task, target, plan.scaffold, folder, settings.checkpoint_secs, hooks.all) as session:
        stopwatch.begin(session)
        hooks.register(session)
        progress.begin(session)
        outcome = None
        while outcome is None:  # again if a ps dies after all other workers have ended: updates are lost
            stopwatch.start_clock()
            while not progress.should_stop(session):
                stopwatch.before_call(session, progress)
                doing("running a call" if progress.calls else "running its first call", waits=waits, whom=hooks.missing)
                progress.count(run_rounds(session, plan, hooks.log, progress.step_of_plan))
            outcome = ending.end(session, progress, stopwatch)
    ending.after_session(outcome)
    return outcome
