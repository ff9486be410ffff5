"""Main loop of a worker: join the cluster, build the scheme, open the session, run rounds, write the result."""

import contextlib
import functools
import json
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

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
    LOADING,
    STANDS_IN,
    Keeper,
    UserError,
    doing,
    nobody,
    run_folder,
    status_of_leaving,
    tell,
    times,
)
from common.data import LeasedBatches, LeaseHook, Ledger, sources, streams, user_function
from common.scheme import (
    PARTS,
    GlobalParameters,
    LocalParameters,
    Rounds,
    compression_of,
    fragments_of,
    local_rows,
    schedule_of,
    tables,
)
from common.training.callbacks import Callback, Patience
from common.training.calls import build_calls, delay_of, is_small
from common.training.interruption import Interruption, Leaver, say_left
from common.training.metrics import EvaluationHook, MetricsHook, MetricsLog
from common.training.model_and_data import (
    batches_of,
    build_model,
    evaluation_of,
    optimizers_of,
    position_of,
    samples_of,
    samples_of_each,
    split,
    unit_of,
    what_is_trained,
)
from common.training.result import REPORT, STAY, save_model, write_result
from common.training.run_check import check_leases
from common.training.sample_counts import samples_per_gradient, unit_of_samples, updates_before


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
    dataset, held_out = split(sources.load(settings), settings)
    check_leases(settings, dataset)
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
        rows = local.told_of_tables(), functools.partial(local_rows.numbers_of, model.tables)
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
            more["tables"] = local_rows.what_travelled(model.tables, *outcome.rows)
            flags = "table_optimizer", "table_learning_rate", "max_rows", "save_tables"
            more |= {name: getattr(settings, name) for name in flags} | {"tables_seed": settings.seed}
            for line in local_rows.dropped(more["tables"], settings.max_rows):
                tell(line)
        more |= {"given_up": outcome.given_up} if outcome.given_up else {}
        more |= {"delays": settings.delays or [], "rounds_per_call": rounds, "flags_of_scheme": own}
        is_dynamic, what = center.local_steps is not None, (settings, task, outcome.reports, *outcome.evaluated)
        more |= {"samples_per_gradient": of_gradient, "gradients_per_update": 1 if is_dynamic else gradients}
        write_result(*what, is_dynamic=is_dynamic, **more)
    return outcome.status


# Graph optimization makes calls of a small model up to 5 % faster, but takes a worker about a second.
OPTIMIZED = 5000  # local steps from which on it pays off


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


# Files in the run's folder. STOP, written by an evaluator or the chief, ends training; the chief then writes ENDED.
STOP, ENDED = "evaluator-says-stop", "training-has-ended"


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
                function = user_function("--callback", settings.callback)
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
        is_over = is_over_by_time = False
        calls, rounds = 0, Rounds(None, None, None)
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
                        is_over, is_over_by_time = True, not (interruption.requested or is_told)
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
            if is_over_by_time and plan.keeper and session.run(plan.keeper.clock.told)[0] < most_seconds:
                is_over = False  # seconds of training were lost with a ps
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


def _as_json(value):
    """Returns a flag's value, as text if JSON cannot represent it, such as infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value
