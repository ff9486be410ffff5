"""Main loop of a worker: join the cluster, build the scheme, open the session, run rounds, write the result."""

import contextlib
import functools
import itertools
import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import tf
from common.cluster import (
    EarlyStoppingHook,
    Gate,
    GiveUpHook,
    MeetingHook,
    Saver,
    StartHook,
    WarmStartHook,
    membership,
    monitored_session,
)
from common.core import (
    BUILDING,
    FITTING,
    LOADING,
    STANDS_IN,
    Keeper,
    UserError,
    checkpoints_in,
    doing,
    limits,
    nobody,
    plots,
    run_folder,
    say_asked,
    say_leaving,
    signals,
    sizes,
    status_of_leaving,
    tell,
    times,
)
from common.data import (
    Batches,
    LeasedBatches,
    LeaseHook,
    Ledger,
    Position,
    Rows,
    Stream,
    StreamedBatches,
    TestSet,
    datasets,
    fed,
    streams,
)
from common.models import keras_model
from common.scheme import (
    BIASED,
    PARTS,
    GlobalParameters,
    LocalParameters,
    Pace,
    Ring,
    Rounds,
    Together,
    build_rounds,
    build_steps,
    check_rates,
    compression_of,
    fragments_of,
    hyperparameters,
    repeat_rounds,
    schedule_of,
    tables,
    timed_rounds,
)
from common.training.callbacks import Callback, Patience
from common.training.metrics import EvaluationHook, MetricsHook, MetricsLog, measured, shares_of_parts


def train(scheme, task, settings):
    """Trains as this worker, or in this one process when `task` is None, and returns the exit status.

    Args:
      scheme: generator function, see `common.scheme.steps`.
      task: a `common.cluster.TaskSpecDef` of a worker, or None.
      settings: all flags as a namespace; also the scheme's hyperparameters.

    Raises:
      UserError: if data and model cannot be trained.
    """
    index, num_workers = (task.shard_index, task.num_workers) if task else (0, 1)
    begin_workers = settings.begin_workers if settings.max_workers else num_workers
    waits_for_others = settings.pace != "own"
    leaver = Leaver(task, settings) if index > 0 and (settings.max_workers or not waits_for_others) else None
    had_left = run_folder.forget_left(settings.run_dir, index)
    interruption = Interruption(leaver, waits_for_others)
    if leaver and os.environ.get(STANDS_IN):
        interruption.requested = interruption.leaves = True
    server = task.create_server() if task else None  # first, as the other tasks try to connect
    if leaver:
        leaver.server.set()
    if settings.max_workers and settings.code and not interruption.leaves:
        doing("comparing its code with that of worker 0", whom=nobody)
        if not membership.has_code_of_chief(task, server, settings.code):
            raise UserError(
                "the code in common/ or of the scheme differs from that of worker 0: join with the code of the run"
            )
    doing(LOADING)
    dataset, held_out = split(streams.load(settings), settings)
    _check_leases(settings, dataset)
    doing(BUILDING)
    model = build_model(settings, samples_of(dataset, settings), index, tables_on_ps=True)
    tables.check_flags(settings, model.tables)
    unit = unit_of(settings, model)
    doing("building the graph")
    with tf.Graph().as_default():
        schedule, compression = schedule_of(settings), compression_of(settings)
        about = task.num_ps if task else 1, task and task.device_fn(), schedule, compression
        of_tables = model.tables, settings.max_rows
        center = GlobalParameters(model.initial_parameters, *about, fragments_of(settings), *of_tables)
        with tf.device(task and task.device):
            if settings.max_workers:
                center.present = membership.Present(center.step.device)
                position, ledger = None, Ledger(center.step.device)
                x, y, *weights = dataset.train
                leased = LeasedBatches(
                    *(x, y, settings.batch_size, settings.seed, ledger, index, begin_workers),
                    weights=weights[0] if weights else None,
                )
                batches: Any = leased
            else:
                leased, position = None, position_of(settings, index, num_workers, dataset.num_samples)
                batches = batches_of(dataset, settings, index, num_workers, position)
            kept = center.keep(model.initial_state)
            local = LocalParameters(
                *(center, model, batches, f"worker_{index}", index, num_workers, delay_of(settings.delays, index)),
                clip_norm=settings.clip_norm,
                kept=kept if index == 0 else (),
                samples_of_each=samples_of_each(dataset, num_workers),
                begin_workers=begin_workers if settings.max_workers else None,
                must_be_finite=True,
            )
            last, next_call, rounds, local_steps = build_calls(scheme, center, local, settings, dataset.num_samples)
            if index == 0:
                optimizers = ", ".join([optimizers_of(center, local), *(str(each) for each in (schedule, compression) if each)])
                tell(what_is_trained(model, dataset, begin_workers, optimizers, ":" in settings.data, unit, bool(leased)))
            waits = center.waits(local)
            gradients = waits.gradients_per_update if waits else 1
            copies, final, evaluation = [], None, None
            local_init_feed_dict = local.init_feed_dict
            if index == 0:
                parameters, step = center.read()
                # The state of the chief's own x is not the state of x̃.
                final = parameters, local.state_at(parameters)
                copies = [there.assign(here, read_value=False) for there, here in zip(kept, final[1], strict=True)]
                results = evaluation_of(model, final, dataset, local_init_feed_dict, center.find)
                if held_out and not settings.num_evaluators:
                    with tf.variable_scope("validation"):
                        found = evaluation_of(model, final, held_out, local_init_feed_dict, center.find)
                    results |= {f"validation_{name}": value for name, value in found.items()}
                evaluation = step, results
            keeper = Keeper(
                center,
                Path(settings.run_dir, "checkpoints"),
                settings.checkpoint_secs,
                index,
                task and task.device,
                unit_of_samples(settings, center, local),
                copies,
                samples_per_gradient(settings, local),
            )
            if index == 0 and not model.tables:
                keeper.export = functools.partial(model.save, path=Path(settings.run_dir, "model.keras"))
            gate = ready = None
            if num_workers > 1:
                gate = Gate(center.step.device)
                ready = tf.concat([keeper.has_lost, gate.closed(index)], axis=0) if index > 0 else None
            scaffold = tf.train.Scaffold(
                # Restores the keeper's checkpoints. Not sharded, so the ps tasks need no folder shared with the chief.
                saver=Saver(keeper.variables, sharded=False, save_relative_paths=True),
                init_feed_dict=center.init_feed_dict,
                ready_for_local_init_op=ready,
                local_init_op=tf.local_variables_initializer(),
                local_init_feed_dict=local_init_feed_dict,
            )
        goal = None  # with --steps the goal is a number of updates
        if center.local_steps is not None and not settings.steps and dataset.num_samples is not None:
            goal = settings.epochs * dataset.num_samples
        rows = local.told_of_tables(), functools.partial(tables.numbers_of, model.tables)
        farewell = [local.dynamic.leave()] if local.dynamic else []
        farewell += [leased.leave, center.present.leave(index)] if leased else []
        how = next_call, evaluation, final, scaffold, gate, waits, gradients, keeper, position, unit, rows, goal, farewell
        begins = [leased.begin, center.present.enter(index)] if leased else None
        of_gradient = samples_per_gradient(settings, local)
        plan = Plan(last, center.step, *how, lease=begins, had_left=had_left, samples_per_gradient=of_gradient)
        with streams.reading(dataset):
            is_short = local_steps < OPTIMIZED and is_small(model)
            open_session = functools.partial(monitored_session, keeper=keeper, is_short=is_short)
            outcome = run_worker(plan, task, settings, server, interruption, open_session)
    doing("writing the result")
    if outcome.final:
        save_model(model, outcome.final, settings)
    if outcome.evaluated:
        optimizers = ", ".join(sorted(center.optimizers.names | local.optimizers.names))
        more = {"samples": outcome.samples, "dropped": outcome.dropped}
        more |= {"parameters": model.size, "optimizer": optimizers, "minimizes": model.minimizes}
        more |= {"unit": unit} if unit else {}
        own = {name: _as_json(value) for name, value in settings.of_scheme.items()}
        more |= {name: getattr(settings, name) for name in ("compress", "compress_pull", "topk")}
        if model.tables:
            more["tables"] = tables.what_travelled(model.tables, *outcome.rows)
            flags = "table_optimizer", "table_learning_rate", "max_rows", "save_tables"
            more |= {name: getattr(settings, name) for name in flags} | {"tables_seed": settings.seed}
            for line in tables.dropped(more["tables"], settings.max_rows):
                tell(line)
        more |= {"given_up": outcome.given_up} if outcome.given_up else {}
        more |= {"delays": settings.delays or [], "rounds_per_call": rounds, "flags_of_scheme": own}
        is_dynamic, what = center.local_steps is not None, (settings, task, outcome.reports, *outcome.evaluated)
        more |= {"samples_per_gradient": of_gradient, "gradients_per_update": 1 if is_dynamic else gradients}
        write_result(*what, is_dynamic=is_dynamic, **more)
    return outcome.status


# After LONG_RUN calls, each call takes about LONG_CALL_SECS: see `repeat_rounds`.
LONG_RUN = 2000
LONG_CALL_SECS = 0.25


def build_calls(scheme, center, local, settings, num_samples):
    """Builds the rounds of a normal call, and one round; for a long run also a loop whose length adapts to 0.25 s per call.

    Returns:
      The global step to stop at, the function that chooses the rounds, see `Plan.next_call`, the number of rounds in a normal
      call, and the approximate number of local steps of this worker.
    """
    hp = hyperparameters(settings, center, local)
    one = build_rounds(scheme, center, local, hp)
    updates, windows = int(one.steps.shape[0]), local.windows  # of one round
    waits = center.waits(local)
    _check_pace(scheme, waits, settings.pace)
    gradients = waits.gradients_per_update if waits else 1
    last = last_step(settings, num_samples, samples_per_update(settings, center, local))
    if center.schedule is not None:  # rebuilt, as the learning rates depend on the last step, known only from the round
        center.schedule.ask = lambda: last
        one = build_rounds(scheme, center, local, hp)
    check_rates(center, last)
    local_steps = updates * local.steps_per_update  # of one round
    # Number of workers with updates of their own; 1 if an update takes all of them.
    are_together = isinstance(waits, Together) and local.begin_workers is not None
    at_once = 1 if gradients > 1 or are_together else local.num_workers
    in_ring = isinstance(waits, Ring)

    def build(rounds):
        if in_ring:  # a round with `steps_per_call` is itself a loop of that many steps
            built = build_rounds(scheme, center, local, hp.but(steps_per_call=rounds))
            if int(built.steps.shape[0]) == rounds * updates:
                return built
        return build_rounds(scheme, center, local, hp, rounds)

    most = rounds_of_call(settings, local.model, windows, local_steps, updates, at_once, last, in_ring)
    is_long = last > 10 * LONG_RUN * at_once * most * updates and not (settings.seconds and settings.seconds <= 60)
    if is_long and in_ring and local.model.size < 20_000 and not settings.rounds_per_call and not settings.delays:
        most *= 10  # fixed, not adapted by a clock, as all workers must make the same calls
    many, size = build(most) if most > 1 else one, at_once * most * updates
    loop_call = None
    if is_long and not in_ring and "/job:ps" in center.step.device:
        times = tf.placeholder(tf.int32, [], "times")
        loop_call = repeat_rounds(scheme, center, local, hp, most, times)
    few = 2 if most > 1 else 1  # rounds of a timed call
    timed_size, timed = at_once * few * updates, None
    if last >= LEAST_TIMED * timed_size and isinstance(local, LocalParameters):  # not several workers in one
        timed = timed_rounds(scheme, center, local, hp, few)
    calls, factor, began, turn = 0, 1, time.monotonic(), _Turn(in_ring)

    def next_call(present):
        nonlocal calls, factor, began
        now = time.monotonic()
        calls, began, taken = calls + 1, now, now - began
        if timed and turn.is_it(calls, now, taken) and present + timed_size <= last:
            return (timed,)
        if loop_call and calls > LONG_RUN:
            if not settings.rounds_per_call:
                factor = 2 * factor if taken < LONG_CALL_SECS / 2 else max(1, factor // 2) if taken > LONG_CALL_SECS else factor
            if present + factor * size <= last:
                return loop_call, {times: factor}
        # Towards the end one round per call: the smallest overshoot of the last step without a lock.
        return (many if present + size <= last else one,)

    return last, next_call, most, float(last * local.steps_per_update / at_once)


# A run of fewer calls has fewer rounds per call, as building one round takes as long as a hundred calls.
SHORT_RUN = 20
# Graph optimization makes calls of a small model up to 5 % faster, but takes a worker about a second.
OPTIMIZED = 5000  # local steps from which on it pays off
LEAST_TIMED = 50  # a run shorter than this many timed calls times none


class _Turn:
    """Schedule of timed calls: the second call, to prepare the graph, the third, then a few.

    Timed calls train, too, but a call of two rounds takes longer than two rounds of a longer call: this schedule slows HogWild,
    DOWNPOUR and all-reduce by about 1 % on the digits, measured on busy cores.

    Args:
      in_ring: whether all workers must time the same calls; the schedule then cannot depend on the clock.
    """

    def __init__(self, in_ring):
        self._in_ring, self._is_now, self._first, self._next = in_ring, False, 0.0, 0.0

    def is_it(self, calls, now, taken):
        """Returns whether to time the call with this number, from 1; `taken` is the duration of the previous one in seconds."""
        if self._in_ring or calls <= 3:
            self._first = now
            return calls in (2, 3, 10) or calls % 40 == 0  # a call has 50 rounds
        if self._is_now or calls == 4:
            self._next = now + max(1.0, 20 * taken, (now - self._first) / 100)
        self._is_now = now >= self._next
        return self._is_now


def _check_pace(scheme, waits, pace):
    """Raises a `UserError` if `pace` in the scheme's script contradicts the synchronization of the scheme."""
    is_so = {"own": waits is None, "together": isinstance(waits, (Pace, Together)), "ring": isinstance(waits, Ring)}[pace]
    if not is_so:
        right = "own" if waits is None else "ring" if isinstance(waits, Ring) else "together"
        raise UserError(f'{scheme.__name__}: its script must say Scheme(..., pace="{right}"), not "{pace}"')


def rounds_of_call(settings, model, windows, local_steps, updates, at_once, last, in_ring=False):
    """Returns the number of rounds in a worker's call.

    Args:
      settings: all flags.
      model: a `common.models.Model`.
      windows, local_steps, updates: numbers of local trainings, of their steps, and of updates in a round.
      at_once: number of workers with updates of their own.
      last: global step to end at.
      in_ring: whether the workers average among themselves (all-reduce).
    """
    own = last // (updates * at_once)  # rounds of this worker in the whole run
    most = settings.rounds_per_call or rounds_worth_a_call(model, windows, local_steps, in_ring)
    if not settings.rounds_per_call and not in_ring:
        own //= SHORT_RUN
    return min(most, max(1, own))


def rounds_worth_a_call(model, windows, local_steps, in_ring=False):
    """Returns the default number of rounds per call, for rounds of this many windows and local steps in all.

    The overhead of a call is about a round of a small model. It is small beside a larger model, a model applied at each place
    of a sequence, or many local steps, while each further window enlarges the graph and its preparation time, most of all a
    loop of several steps.
    """
    if in_ring:
        return 50 if model.size < 1_000_000 else 10
    most = 10 if local_steps == windows else 5
    return max(1, min(most // windows, int(400 // local_steps))) if is_small(model) else 1


def is_small(model):
    """Returns whether a local step takes about as long as TensorFlow's overhead."""
    return model.size * model.places < 1_000_000


class Plan(NamedTuple):
    """The parts of a worker's graph that the main loop needs."""

    last: int  # global step to end at
    step: Any  # the global step, a variable
    next_call: Any  # function of the present global step: arguments of `session.run`, `Rounds` first
    evaluation: Any  # the chief's: the global step, and loss and metrics on the test set, {name: scalar tensor}
    final: Any  # the chief's: tensors to fetch at the very end
    scaffold: Any  # a `tf.train.Scaffold`
    gate: Any = None  # a `common.cluster.Gate`, the start barrier
    waits: Any = None  # a `common.scheme.Pace`, `Together` or `Ring`, for workers that wait for each other
    gradients_per_update: int = 1  # number of workers that contribute one each
    keeper: Any = None  # a `common.core.Keeper`, or None
    position: Any = None  # a `common.data.Position`, if the position is kept
    unit: Any = None  # unit of the loss, see `unit_of`
    rows: Any = ()  # numbers about tables: tensors, and a function of their values, see `EvaluationHook`
    goal: Any = None  # number of samples to end at, if updates vary in samples
    farewell: Any = ()  # operations of a worker that leaves for good
    lease: Any = None  # operations for the start of a session in an elastic run
    had_left: bool = False  # whether a worker of this number had left, as far as this machine knows
    samples_per_gradient: Any = None  # see the function; None: a batch

    def last_of(self, present, samples, gradients=1):
        """Returns the global step to end at: present step + remaining samples / samples per update, rounded up.

        It is a lower bound if updates have fewer local steps.
        """
        left = math.ceil(max(0, self.goal - int(samples)) / (self.samples_per_gradient * gradients))
        return int(present) + left


class Outcome(NamedTuple):
    """The result of a worker's main loop; all but the status only for the chief."""

    status: int  # exit status
    final: Any = None  # values of `Plan.final`, also of an interrupted training
    reports: Any = None  # reports of all workers, see REPORT
    evaluated: Any = None  # global step, and loss and metrics on the test set, {name: number}
    rows: Any = None  # numbers about this worker's pulls of tables, values of the first of `Plan.rows`
    samples: Any = None  # number of samples behind the parameters, including resumed runs; None: see the reports
    dropped: Any = None  # numbers of dropped gradients and of their samples, including resumed runs; None: see the reports
    given_up: Any = ()  # numbers of the workers whose reports are missing, see `common.cluster.giving_up`


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
    index = task.shard_index if task else 0
    log = MetricsLog(settings.run_dir, index, plan.last, unit=plan.unit)
    drawn = plan.position.add if plan.position else None
    of_gradient = plan.samples_per_gradient or settings.batch_size
    metrics = MetricsHook(log, of_gradient, drawn=drawn, batch_size=settings.batch_size)
    hooks: list = [interruption, metrics]
    if index == 0:
        step, results = plan.evaluation
        evaluation = EvaluationHook(log, step, results, settings.evaluation_secs, *plan.rows)
        if not settings.num_evaluators:
            hooks.append(evaluation)
    early_stopping = callback = None
    if settings.num_evaluators or settings.patience or settings.callback:
        stop, ended = (Path(settings.run_dir, name) for name in (STOP, ENDED))
        if index == 0:  # stale files of a resumed run
            stop.unlink(missing_ok=True)
            ended.unlink(missing_ok=True)
            if settings.patience and not settings.num_evaluators:
                log.listeners.append(Patience(settings.patience, stop.touch))
            if settings.callback:
                function = datasets.user_function("--callback", settings.callback)
                callback = Callback(f"--callback={settings.callback}", function, stop.touch, settings.hang_secs / 2)
                log.listeners.append(callback)
        early_stopping = EarlyStoppingHook(stop if index == 0 else None, stop_session=False)
        hooks.append(early_stopping)
    meeting = None
    size = len(REPORT) + len(PARTS) + len(STAY)
    kept = functools.partial(run_folder.read_left, settings.run_dir, task.num_workers if task else 1, size)
    if plan.waits:
        come = [plan.keeper.clock.come] if plan.keeper else []
        meeting = MeetingHook(plan.waits, kept, *come)
        interruption.release = meeting.release
        hooks.insert(1, meeting)
    if plan.lease is not None:
        hooks.append(LeaseHook(plan.lease))  # the chief's before its `StartHook` lets the others begin
    begin_workers = settings.begin_workers if task and settings.max_workers else task and task.num_workers
    if index == 0 and plan.gate:
        if settings.warm_start_steps:
            hooks.append(WarmStartHook(plan.gate, plan.step, settings.warm_start_steps))
        else:
            how = settings.start_secs, lambda: interruption.requested, kept
            hooks.append(StartHook(plan.gate, begin_workers, *how))
    rendezvous: Any = None
    if task:
        expected = None
        if settings.max_workers and plan.gate:
            expected = lambda opened: {*range(begin_workers), *plan.gate.who_came(opened)}  # noqa: E731
        rendezvous = membership.Rendezvous(task, size, kept, expected)
    if task and not os.environ.get("LAUNCHER_KEY"):  # a launcher restarts dead tasks
        hooks.append(GiveUpHook(task, server, settings, plan.step, rendezvous))
    seconds = plan.keeper.clock.seconds if plan.keeper else time.monotonic
    is_dynamic = plan.keeper is not None and plan.keeper.is_of_local_steps
    # Expressed in updates, to measure the speed.
    progress: Any = tf.cast(plan.keeper.samples, tf.float64) / float(of_gradient) if is_dynamic else plan.step
    target, checkpoints = server.target if server else "", str(Path(settings.run_dir, "checkpoints"))

    if plan.keeper:
        plan.keeper.log, log.trained = log, plan.keeper.clock.seconds
        plan.keeper.clock.waits = meeting is not None

    def save(opened):
        if plan.keeper:
            plan.keeper.save(opened)
        else:
            plan.scaffold.saver.save(opened, os.path.join(checkpoints, "model.ckpt"), plan.step)

    doing("opening the session", waits=bool(meeting), whom=nobody)
    with open_session(task, target, plan.scaffold, checkpoints, settings.checkpoint_secs, hooks) as session:
        first_step, present = session.run([progress, plan.step])
        first_time = seconds()
        is_back = (index > 0 and rendezvous.come_back(session)) or plan.had_left
        if settings.max_workers and (is_back or index >= begin_workers) and not interruption.leaves:
            log.write(present, came=True)
        last = plan.last
        if plan.keeper:
            samples_before = session.run(plan.keeper.samples_before)
            fewer = updates_before(samples_before, settings, of_gradient * plan.gradients_per_update)
            if fewer and (settings.learning_rate_schedule or settings.warmup_steps):
                raise UserError(
                    "--resume: this run trained with another --batch_size or --window, so the learning-rate schedule would not "
                    f"end with the run: give the same ones, or --steps={last - fewer}"
                )
            last -= fewer
            if plan.goal is not None:
                counted = session.run(plan.keeper.samples)
                last = plan.last_of(present, counted, plan.gradients_per_update)
            log.last_step = last
        most_seconds = (settings.seconds or math.inf) + (0 if plan.keeper else first_time)
        if index > 0 and plan.gate and not session.run(plan.gate.variable):
            present = last  # training ended before this worker started
        is_over, calls, rounds = False, 0, Rounds(None, None, None)
        while True:
            if plan.keeper:
                plan.keeper.clock.is_training = True
            while present < last and not is_over:
                is_told = early_stopping and early_stopping.requested
                is_late = seconds() >= most_seconds
                if is_late and plan.keeper:  # the last call may not have counted
                    session.run(plan.step)
                    is_late = seconds() >= most_seconds
                if is_late or interruption.requested or is_told:
                    if meeting is None or not meeting.vote(session):
                        is_over = True
                        break
                if calls == 1 or calls == 2 and rounds.parts:  # leaves out the preparation of a graph
                    first_step, first_time = session.run(progress), seconds()
                call = "running a call" if calls else "running its first call"
                doing(call, waits=bool(meeting), whom=meeting.missing if meeting else nobody)
                before = present
                rounds = _run_rounds(session, plan, log, present + plan.last - last)
                present, is_over, calls = rounds.steps[-1, 1], rounds.training_ended, calls + 1
                if plan.goal is not None:
                    now = samples_before + times(rounds.local_steps[1], plan.keeper.samples_per_update)
                    gradients = 1
                    if plan.waits and present > before:  # as in the last call
                        gradients = max(1, round((now - counted) / (present - before) / of_gradient))
                    counted, last = now, plan.last_of(present, now, gradients)
                    log.last_step = last
            leaves = interruption.leaves
            if interruption.requested and not leaves:
                # Leaving the session saves a checkpoint.
                if callback:
                    callback.close()
                if index == 0 and task:
                    membership.say_done_for(task, server, rendezvous.absent(session))
                return Outcome(130, session.run(plan.final) if index == 0 else None)
            doing("ending", whom=nobody)
            stop_time = seconds()
            if plan.keeper:
                plan.keeper.clock.is_training = False
            stop_step = session.run(plan.step)
            if calls > 1:  # the first call does not count
                stop_time = seconds()
            if not leaves:
                interruption.training_ends()
            if meeting and leaves:
                _leave_others(session, meeting, plan, log)
            elif meeting:
                session.run_step_fn(lambda step_context: meeting.leave(step_context.session))
            metrics.flush()
            if leaves:
                log.write(stop_step, left=True)
            report = [index, first_time, first_step, stop_time, *metrics.totals(), *metrics.seconds_of_parts()]
            report += [time.monotonic() - settings.began, log.now() if leaves else 0.0]
            if leaves:
                session.run(plan.farewell)
                run_folder.write_left(settings.run_dir, index, report)
                rendezvous.leave(session, report)
                session.run(plan.farewell)  # repeated, as a ps restarted meanwhile has registered this worker again
                if meeting:
                    _leave_others(session, meeting, plan, log)
                say_left(index, settings, report)
                outcome = Outcome(status_of_leaving())
                break
            interruption.report = report
            if index > 0:
                doing("waiting until all workers have ended", waits=True, whom=lambda: ["worker 0"])
                rendezvous.wait(session, report)
                outcome = Outcome(0)
                break
            if plan.gate:  # otherwise workers at the gate would wait for ever
                session.run_step_fn(lambda step_context: plan.gate.close(step_context.session, bool(settings.max_workers)))
            doing("waiting until the other workers have ended", waits=True, whom=rendezvous and rendezvous.missing)
            reports = rendezvous.gather(session, report) if task else [report]
            log.listeners = [callback] if callback else []  # early stopping has nothing left to stop
            doing("evaluating the final parameters", whom=nobody)
            present = session.run(plan.step)
            if present >= last or is_over or meeting:
                session.run_step_fn(lambda step_context: save(step_context.session))
                counts = session.run([plan.keeper.samples, plan.keeper.dropped]) if plan.keeper else (None, None)
                rows = session.run(plan.rows[:1])
                outcome = Outcome(0, session.run(plan.final), reports, evaluation.evaluate(session), rows, *counts)
                outcome = outcome._replace(given_up=sorted(rendezvous.given_up) if task else ())
                if task:
                    rendezvous.dismiss(session)
                break
            # A ps died after all other workers had ended: the chief repeats the lost updates.
    log.close()
    if callback:
        callback.close()
    if settings.num_evaluators and index == 0:
        ended.touch()  # now that the last checkpoint is saved
    if task and leaves:
        membership.say_left(task, server)
    elif task:
        doing("telling the ps that it is done")
        # Also on behalf of workers that have left, and of free places; all others report it themselves.
        there = [] if outcome.reports is None else [int(report[0]) for report in outcome.reports if not report[-1]]
        membership.say_done(task, server, [i for i in range(task.num_workers) if index == 0 and i not in there])
    return outcome


def _run_rounds(session, plan, log, present):
    """Runs the rounds of the next call and returns their `Rounds`. Raises a `TrainingFailed` if they are not finite."""
    fetches, *feeds = plan.next_call(present)
    counted = plan.keeper.clock.call(id(fetches)) if plan.keeper else contextlib.nullcontext()
    with log.failing(lambda: session.run(plan.step)), counted:
        return session.run(fetches, *feeds)


def _leave_others(session, meeting, plan, log):
    """Lets this worker leave the synchronization; if it owes a gradient, after one more round."""
    while session.run_step_fn(lambda step_context: meeting.goes(step_context.session)):
        _run_rounds(session, plan, log, plan.last)  # at the last step a call has one round


def save_model(model, final, settings):
    """Writes `model.keras`, with tables from the newest checkpoint; removes it if they don't fit into memory.

    Args:
      model: a `common.models.Model`.
      final: parameters and state.
    """
    path, found = Path(settings.run_dir, "model.keras"), []
    if model.tables and settings.save_tables == "no":
        path.unlink(missing_ok=True)  # a resumed run's file is stale
        return
    if model.tables:
        checkpoint = checkpoints_in(Path(settings.run_dir, "checkpoints"))[-1]
        need, has = 8 * 4 * tables.numbers_in(checkpoint, model.tables), limits.memory()
        if need > has:
            tell(
                f"no model.keras: with its tables it takes {limits.as_bytes(need)} of memory, but the machine has "
                f"{limits.as_bytes(has)}; `common.rows_of` reads rows from the checkpoint"
            )
            path.unlink(missing_ok=True)
            return
        found = [tables.whole(checkpoint, table) for table in model.tables]
    model.save(*final, path, found)


def build_model(settings, dataset, index=0, tables_on_ps=False):
    """Returns the `common.models.Model` of worker `index`.

    The chief records the model's variables in the run's folder, or, with `--resume`, compares them with the record.

    Raises:
      UserError: if there is no such model, it does not fit the data, or its parameters are not those of the checkpoint.
    """
    # Only the chief's initial values count; the seeds of Dropout must differ between workers.
    options = {"tables_on_ps": tables_on_ps, "tables_seed": settings.seed, **sizes(settings)}
    model = keras_model.build(settings.model, dataset, settings.seed + index, settings.loss, **options)
    model.draw_apart(index)
    if index == 0:
        _check_model(settings, model)
    return model


def _check_model(settings, model):
    path = Path(settings.run_dir, "model.json")
    if settings.resume and path.exists():
        try:
            before = json.loads(path.read_text())["variables"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{path} is damaged: if the model is unchanged, remove that file") from None
        if before != model.description:
            pairs = itertools.zip_longest(before, model.description)
            was, now = next((b, n) for b, n in pairs if b != n)
            named = [f"{v[0]} {v[1]}" if v else "none" for v in (was, now)]
            raise UserError(f"--resume: the model has changed: it had {named[0]}, and now has {named[1]}")
    else:
        run_folder.write_json(path, {"variables": model.description})


def optimizers_of(center, local):
    """Returns the optimizers of a scheme and their location, as text."""
    sides = ("on the ps", center.optimizers.names), ("on the workers", local.optimizers.names)
    said = ", ".join(f"{' and '.join(sorted(names))} {where}" for where, names in sides if names)
    return said.replace("GradientDescent", "SGD") or "the scheme's own steps"


def unit_of(settings, model):
    """Returns the unit of a run's loss: "nats per character" for a cross-entropy on `--data=text`; otherwise None."""
    is_entropy = model.minimizes in ("sparse categorical crossentropy of logits", "sparse categorical crossentropy")
    return "nats per character" if settings.data == "text" and is_entropy else None


def what_is_trained(model, dataset, num_workers, optimizers, is_own=False, unit=None, are_leased=False):
    """Returns a line on a run's objective, optimizers and number of samples; for a user's own data also their size.

    Args:
      unit: unit of the loss, or None.
    """
    measure = f" in {unit}" if unit else ""
    own = model.own_optimizer
    ignored = f" (the model's own {own} is not used)" if own else ""
    samples = _samples_text(dataset, num_workers, is_own, are_leased)
    return f"minimizes {model.minimizes}{measure}, by {optimizers}{ignored}; {samples}"


def _samples_text(dataset, num_workers, is_own, are_leased=False):
    is_stream = isinstance(dataset, Stream)
    if dataset.num_samples is None:
        return f"an unknown or endless number of samples, {dataset.text()}"
    share = " or ".join(f"{each:,}" for each in sorted(set(samples_of_each(dataset, num_workers))))
    each = f", {share} for each of {num_workers} workers" if num_workers > 1 else ""
    each = ", which workers lease piece by piece" if are_leased else each
    if is_stream:
        return f"{dataset.num_samples:,} samples{each}, {dataset.text()}"
    arrays = [array for part in dataset.train for array in datasets.arrays_in(part)]
    whole, mapped = (sum(a.nbytes for a in some) for some in (arrays, [a for a in arrays if isinstance(a, Rows)]))
    kept = f"of which {limits.as_bytes(mapped)} are mapped, not copied" if mapped else "in memory"
    where = f", from arrays of {limits.as_bytes(whole)}{',' * bool(mapped)} {kept}" if is_own else ""
    return f"{dataset.num_samples:,} samples{each}{where}"


def samples_of_each(dataset, num_workers):
    """Returns the number of samples of each worker, a list; None in it for an endless stream."""
    if isinstance(dataset, Stream):
        return [share.count for share in dataset.shares]
    return [len(range(i, dataset.num_samples, num_workers)) for i in range(num_workers)]


def samples_of(dataset, settings):
    """Returns a `common.data.Data` for shapes and types: for a stream, some of its samples."""
    if not isinstance(dataset, Stream):
        return dataset
    if settings.model in keras_model.BUILT_IN and dataset.first.is_classification and not dataset.classes:
        why = f"the number of classes in {dataset.name} is not known before it is read"
        raise UserError(f"--model={settings.model}: {why}; bring a model of your own, --model=FILE.py:FUNCTION")
    return dataset.first


def batches_of(dataset, settings, index, num_workers, position):
    """Returns the batches of worker `index`, from a `common.data.Position` on."""
    if isinstance(dataset, Stream):
        return StreamedBatches(dataset, index, settings.batch_size, settings.seed + index, position.value)
    x, y, *weights = datasets.shard(dataset, index, num_workers)
    weights = weights[0] if weights else None
    return Batches(x, y, settings.batch_size, settings.seed + index, weights=weights, position=position)


def evaluation_of(model, at, dataset, feeds, find=None):
    """Returns loss and metrics `at` (parameters, state) on the test set, {name: tensor}; adds the feeds to `feeds`.

    `find` looks up rows of tables, see `common.scheme.found_by`.
    """
    with tables.found_by(find):
        if isinstance(dataset, Stream):
            test = TestSet(dataset)
            return model.evaluate_parts(*at, test.part, test.num_samples, test.batch_size)
        return model.evaluate(*at, *fed_test_set(dataset, feeds))


# Files in the run's folder. STOP, written by an evaluator or the chief, ends training; the chief then writes ENDED.
STOP, ENDED = "evaluator-says-stop", "training-has-ended"


def split(dataset, settings):
    """Returns the training data, and the held-out validation data as a test set, or None.

    For arrays see `data.hold_out`; a `Stream` has already held them out.
    """
    if not settings.validation:
        return dataset, None
    if isinstance(dataset, Stream):
        return dataset, dataset.validation
    return datasets.hold_out(dataset, settings.validation, settings.seed)


def position_of(settings, index, num_workers, num_samples):
    """Returns the `common.data.Position` of a worker in its samples, as left by its previous process."""
    path = Path(settings.run_dir, "metrics", f"worker-{index}.position")
    return Position(path, settings.seed, index, num_workers, -1 if num_samples is None else num_samples)


def delay_of(delays, index):
    """Returns this worker's delay in seconds, from `--delays`, milliseconds of some workers."""
    return delays[index] / 1000 if delays and index < len(delays) else 0.0


def samples_per_gradient(settings, local):
    """Returns the number of samples that a worker draws per update, a `Fraction`.

    It is taken from the rounds already built, and is the basis of all sample counts. With `center.dynamic` it is the maximum.
    """
    return settings.batch_size * local.steps_per_update


def samples_per_update(settings, center, local):
    """Returns the number of samples, of all workers, in an update of the global parameters, a `Fraction`."""
    waits = center.waits(local)
    return samples_per_gradient(settings, local) * (waits.gradients_per_update if waits else 1)


def unit_of_samples(settings, center, local):
    """Returns the number of samples in the unit that `Keeper` counts: an update, a local step or a gradient."""
    if center.local_steps is None:
        return samples_per_update(settings, center, local)
    return settings.batch_size if local.dynamic else samples_per_gradient(settings, local)


def last_step(settings, num_samples, of_update=None):
    """Returns the global step to stop at, from `--steps` or else `--epochs`, for `of_update` samples (a batch) per update."""
    if settings.steps or num_samples is None:
        return settings.steps or streams.ENDLESS
    return math.ceil(settings.epochs * num_samples / (of_update or settings.batch_size))


def updates_before(samples, settings, of_update=None):
    """Returns the reduction of updates in `--epochs` if more samples were trained than the global step implies.

    This happens when the resumed run had another batch size or window. `of_update` as in `last_step`.
    """
    return 0 if settings.steps else int(samples) // (of_update or settings.batch_size)


# Fields of a worker's final report to the chief, as float64. Times are in seconds of training, or by one process's clock.
# A scheme's workers add `PARTS`, in seconds of a round; NaN if none was timed.
REPORT = ("index", "first_time", "first_step", "stop_time", "samples", "updates", "staleness_sum", "staleness_max", "dropped")
# Last fields: seconds since the start of the worker's process; time of its departure for good, by its own clock, or 0.
STAY = ("seconds", "left")


def _as_json(value):
    """Returns a flag's value, as text if JSON cannot represent it, such as infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


def write_result(
    settings,
    task,
    reports,
    global_step,
    evaluated,
    *,
    samples=None,
    dropped=None,
    samples_per_gradient=None,
    gradients_per_update=1,
    is_dynamic=False,
    **more,
):
    """Writes `result.json`, with the entries of `more`, and `curve.png`, from all workers' reports and the last evaluation.

    `samples` and `dropped` are those of `Outcome`, `samples_per_gradient` that of `Plan`.
    """
    how = samples, dropped, samples_per_gradient, gradients_per_update, is_dynamic
    result = summarize(settings, task, reports, global_step, *how)
    numbers = {name: value if math.isfinite(value) else None for name, value in measured(evaluated).items()}
    result.update(numbers, restarts=0, restarts_of_workers=[], **more)
    result["of_last_start"] = [name for name in OF_LAST_START if name in result]
    run_folder.write_json(Path(settings.run_dir, "result.json"), result)
    plots.draw_curve(settings.run_dir)  # last, as it may fail


# Values of `result.json` that cover only the time since the last start of a run, or of a worker.
OF_LAST_START = (
    *("samples_per_worker", "worker_seconds", "train_seconds", "wall_seconds", "samples_per_second", "parts", "round_seconds"),
    *("staleness_mean", "staleness_max", "left", "restarts", "restarts_of_workers"),
)


def summarize(
    settings,
    task,
    reports,
    global_step,
    samples=None,
    dropped=None,
    samples_per_gradient=None,
    gradients_per_update=1,
    is_dynamic=False,
):
    """Returns the part of `result.json` about speed and staleness; `is_dynamic` if `Keeper` counts no updates."""
    of_gradient = samples_per_gradient or settings.batch_size
    columns = dict(zip((*REPORT, *PARTS, *STAY), np.array(reports, float).T, strict=False))
    if is_dynamic:
        progress = samples / of_gradient  # in the same unit as the reports
    else:
        progress = global_step
    trained = columns["updates"] > 0
    train_seconds = samples_per_second = staleness = None
    if trained.any():
        # From the second call of the last worker to start: from there on all of them share the work.
        latest = np.argmax(np.where(trained, columns["first_time"], -np.inf))
        updates = progress - columns["first_step"][latest]
        seconds_of_all = float(columns["stop_time"].max() - columns["first_time"][latest])
        if seconds_of_all > 0 and updates > 0:  # otherwise its updates were rolled back and not repeated
            train_seconds = seconds_of_all
            samples_per_second = updates * float(of_gradient * gradients_per_update) / train_seconds
        staleness = columns["staleness_sum"].sum() / columns["updates"].sum()
    told = [part for part in PARTS if part in columns]
    seconds = [{part: float(columns[part][i]) for part in told if columns[part][i] > 0} for i in range(len(reports))]
    left: Any = np.flatnonzero(columns["left"]) if "left" in columns else []
    if dropped is None:
        number = int(columns["dropped"].sum())
        dropped = number, number * of_gradient
    samples = columns["samples"].sum() if samples is None else samples + dropped[1]
    return {
        "scheme": settings.scheme,
        "num_ps": task.num_ps if task else 0,
        "num_workers": len(reports),
        "data": settings.data,
        "batch_size": settings.batch_size,
        "window": settings.window,
        "global_steps": int(global_step),
        "samples": int(samples),
        "samples_per_worker": [int(n) for _, n in sorted(zip(columns["index"], columns["samples"], strict=True))],
        "left": [
            {"worker": int(columns["index"][i]), "time": columns["left"][i]}
            | {name: int(columns[name][i]) for name in ("updates", "samples")}
            for i in left
        ],
        "worker_seconds": float(columns["seconds"].sum()) if "seconds" in columns else None,
        "train_seconds": train_seconds,
        "wall_seconds": time.monotonic() - settings.began,
        "samples_per_second": samples_per_second,
        **(shares_of_parts(seconds) if told else {}),
        "staleness_mean": staleness,
        "staleness_max": int(columns["staleness_max"].max()),
        "gradients_dropped": int(dropped[0]),
    }


def fed_test_set(dataset, feeds):
    """Returns x, y and weights, if any, of the test set as local variables; adds their feeds to `feeds`."""
    return tuple(fed(name, part, feeds) for name, part in zip(("x_test", "y_test", "w_test"), dataset.test, strict=False))


class Interruption(tf.train.SessionRunHook):
    """Handles Ctrl-C, SIGTERM and SIGHUP: a request to stop after the present call, or exit if there is nothing to save.

    To be created in the main thread; `common.cli` blocks the signals before tensorflow starts threads: `signals.hear_signals`.

    It is the first hook, to notice a new session early: another worker may train long before the chief has called all of its
    hooks, including the one for the first checkpoint.

    Args:
      leaver: a `Leaver`, for a worker that SIGTERM asks to leave. None if SIGTERM is like any other signal.
      waits_for_others: whether workers wait for each other. If true, SIGTERM waits for the session, even before there is one,
        unless training has ended for this worker; until it has left, it waits for the others as before.

    Attributes:
      requested: whether the worker should stop.
      leaves: whether it then leaves for good.
      report: its final report to the chief, once submitted.
    """

    def __init__(self, leaver=None, waits_for_others=False):
        self.requested = self.leaves = False
        self.report: Any = None
        self.release = lambda: None  # called on a request; may wait for a session
        self._is_training = self._has_ended = False
        self._leaver, self._is_left_to_it, self._waits_for_others = leaver, False, waits_for_others
        signals.hear_signals(signals.INTERRUPTING_SIGNALS, self._hear)

    def _hear(self, number):
        if number == signal.SIGHUP and self.requested:
            return  # the shell and the system may both send it: that is no second request
        leaves = number == signal.SIGTERM and self._leaver is not None
        if number == signal.SIGTERM and not leaves:
            say_asked()
        if self.requested or not (self._is_training or leaves):
            signals.exit_at_once(130)
        is_by_session = self._is_training or self._waits_for_others and not self._has_ended
        self.leaves, self._is_left_to_it = leaves, leaves and not is_by_session
        self.requested = True
        if leaves:
            say_leaving()
        if not leaves or self._is_left_to_it:
            react = functools.partial(self._leaver, self.report) if self._is_left_to_it else self.release
            threading.Thread(target=react, daemon=True).start()  # a thread, so that a second signal is handled

    def training_begins(self):
        """Marks the start of training: from now on there is something to save."""
        self._is_training = not self._has_ended

    def after_create_session(self, session, coord):
        """Marks the start of training, before all other hooks."""
        if self._is_left_to_it:
            threading.Event().wait()  # the leaver ends this process
        self.training_begins()

    def training_ends(self):
        """Marks the end of training: all is saved, and a signal should end the wait for others at once."""
        self._is_training, self._has_ended = False, True


class Leaver:
    """Function of a report that ends a worker for good; called in a thread, while the worker does not train.

    Args:
      task: a `common.cluster.TaskSpecDef` of a worker.
      settings: all flags.

    Attributes:
      server: an event, set once the task's server runs.
    """

    def __init__(self, task, settings):
        self._task, self._settings, self.server = task, settings, threading.Event()

    def __call__(self, report=None):
        task, settings = self._task, self._settings
        if report is None:  # the worker has not trained yet
            report = [task.shard_index, *[0.0] * (len(REPORT) - 1), *[math.nan] * len(PARTS), 0.0, 0.0]
        report = [*report[: -len(STAY)], time.monotonic() - settings.began, time.time()]
        run_folder.write_left(settings.run_dir, task.shard_index, report)
        self.server.wait()
        membership.say_gone(task, task.start_server(), report)
        say_left(task.shard_index, settings, report)
        signals.exit_at_once(status_of_leaving())


def say_left(index, settings, report):
    """Tells the user that this worker leaves for good."""
    rest = ""
    if settings.compress in BIASED:
        rest = f"; its error feedback of --compress={settings.compress} is lost"
    updates = int(report[REPORT.index("updates")])
    how = f"has left after {updates:,} updates, as it was asked to (SIGTERM)"
    how = "was lost" if os.environ.get(STANDS_IN) else how
    samples = "the others train its samples" if settings.max_workers else "its share of the samples is no longer used"
    tell(f"worker {index} {how}: it is neither restarted nor waited for, and {samples}{rest}")


def check(settings, dataset, scheme=None):
    """Raises a `UserError` if data and model cannot be trained by this many workers; trains nothing.

    With `--compress` also if the scheme's messages cannot be compressed.
    """
    dataset, held_out = split(dataset, settings)
    if settings.callback is not None:
        datasets.user_function("--callback", settings.callback)
    _check_leases(settings, dataset)
    if not isinstance(dataset, Stream):
        datasets.shard(dataset, 0, settings.num_workers if settings.launch else 1)
    num_samples, is_stream, dataset = dataset.num_samples, isinstance(dataset, Stream), samples_of(dataset, settings)
    options = {"tables_on_ps": scheme is not None, **sizes(settings)}
    model = keras_model.build(settings.model, dataset, settings.seed, settings.loss, **options)
    schedule, of_update = schedule_of(settings), None
    if settings.model not in FITTING.get(settings.data, ()):
        with keras_model.named(settings.model):
            _trace(model, dataset)
    compression = compression_of(settings)
    if scheme:
        tables.check_flags(settings, model.tables)
    if model.tables and settings.num_evaluators:
        raise UserError("--num_evaluators: an evaluator needs the whole model, but its tables (common.Embedding) are on the ps")
    sets = [dataset.train, dataset.test, *([held_out.test] if held_out and not is_stream else [])]
    tables.check_data(model, [x for x, *_ in sets], is_stream)
    if scheme and (compression or model.tables or settings.max_workers or schedule):
        with tf.Graph().as_default():
            pieces = {"num_ps": settings.num_ps or 1, "fragments": fragments_of(settings), "tables": model.tables}
            pieces["max_rows"] = settings.max_rows
            center = GlobalParameters(model.initial_parameters, **pieces, compression=compression)
            center.present = membership.Present("") if settings.max_workers else None
            batches = batches_of(dataset, settings, 0, 1, None)
            own = center, model, batches, "worker_0", 0, settings.max_workers or settings.num_workers
            local = LocalParameters(*own, begin_workers=settings.begin_workers if settings.max_workers else None)
            build_steps(scheme, center, local, hyperparameters(settings, center, local))
            of_update = samples_per_update(settings, center, local)
            if settings.max_workers and schedule and not settings.steps and isinstance(center.waits(local), Together):
                raise UserError(
                    "--max_workers: the number of updates in an epoch depends on the number of workers, so the end of the "
                    "learning-rate schedule is not known: give --steps"
                )
    if schedule:
        schedule.ask = lambda: last_step(settings, num_samples, of_update)
        with tf.Graph().as_default():
            schedule(tf.placeholder(tf.int64, []))


def _check_leases(settings, dataset):
    """Raises a `UserError` if an elastic run is impossible because the samples are sharded among the workers."""
    if settings.max_workers and isinstance(dataset, Stream):
        raise UserError(
            f"--max_workers={settings.max_workers}: files and datasets are divided among the workers when a run begins: give "
            "arrays, or leave it out"
        )


def _trace(model, dataset):
    """Builds a model's training and evaluation in a graph, without training.

    Raises:
      UserError: if that is impossible.
    """

    def placeholders(samples):
        return [datasets.mapped(lambda array: tf.placeholder(array.dtype, [2, *array.shape[1:]]), part) for part in samples]

    with tf.Graph().as_default(), tables.found_by(tables.Asked(model.tables)):
        values = tf.placeholder(tf.float32, [model.size]), [tf.placeholder(v.dtype, v.shape) for v in model.initial_state]
        model.loss_and_gradient(*values, *placeholders(dataset.train))
        model.evaluate(*values, *placeholders(dataset.test))
