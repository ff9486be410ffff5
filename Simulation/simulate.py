"""Trains by any scheme of this collection with virtual workers, in virtual time.

    bash Simulation/run.sh DOWNPOUR --num_workers=1000 --window=20 --latency_ms=20 --mbit=100

The scheme's own function runs, with the flags that its folder's script has. First `common.simulation.virtual_time` says when
each worker does what, then `common.simulation` does it in that order.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import calibrate
import numpy as np

from common.cli import api, notebook, scheme_in, script_of
from common.core import TrainingFailed, UserError, flags, plots, progress, run_folder
from common.simulation import Costs, VirtualTime

# Flags for processes, checkpoints and files, which a simulation does not have.
WITHOUT = (
    *("launch", "gpus", "isolation", "require_isolation", "job_name", "task_index", "ps_hosts", "worker_hosts", "check"),
    *("resume", "checkpoint_secs", "max_restarts", "hang_secs", "start_secs", "give_up_secs", "callback"),
    *("validation", "patience"),
)
POINTS = 30  # evaluations of a run
MBIT = 1e6 / 8


def own_flags():
    """Yields the flags of the virtual cluster."""
    yield flags.number("step_ms", 10, "milliseconds of a local step, on average over all workers", above=0)
    yield flags.number("machine_cv", 0, "coefficient of variation of step times between machines", least=0, most=10.0)
    yield flags.number("step_cv", 0, "coefficient of variation of step times on one machine", least=0, most=10.0)
    yield flags.numbers("latency_ms", "0", "one-way latency of a message in ms, one for all workers or one for each", least=0)
    text = "Mbit/s of a worker's link each way, one for all or one for each (default: no limit)"
    yield flags.numbers("mbit", None, text, above=0)
    yield flags.numbers("mbit_up", None, "the same, towards the ps alone (default: --mbit)", above=0)
    yield flags.number("ps_mbit", None, "Mbit/s of each ps's network card each way (default: no limit)", above=0)
    yield flags.number("call_ms", 0, "milliseconds of a session call besides its --rounds_per_call rounds", least=0)
    yield flags.number("read_ms", 0, "milliseconds that the ps take to read x̃ for a worker, one after the other", least=0)
    yield flags.number("apply_ms", 0, "milliseconds that the ps take for an update, one after the other", least=0)
    text = "start times of the workers in seconds, such as 0,0,30: the third joins late"
    yield flags.numbers("start_at", None, text, least=0)
    text = "WORKER:FROM:UNTIL in seconds, such as 3:10:25: it dies, then starts anew; 3:10: it never comes back"
    yield flags.strings("away", [], text)
    text = "α of a Dirichlet distribution: the smaller, the more the workers' classes differ"
    yield flags.number("non_iid", None, text, above=0)
    yield flags.boolean("clock_only", False, "train no model: only compute the schedule (speed, staleness, waiting)")
    text = "with --clock_only: size of the model, such as 25e6 (default: that of --model)"
    yield flags.number("parameters", None, text, least=1)
    text = "folders of real runs of the scheme, to fit --step_ms, --step_cv and --latency_ms or --mbit"
    yield flags.strings("calibrate", [], text)
    yield flags.number("trace_secs", None, "virtual seconds in timeline.png and trace.json (default: some rounds)", least=0)


def parse(arguments):
    """Returns the `Scheme` and the settings that a command line asks for.

    Raises:
      UserError: if it is not understood.
    """
    if not arguments or arguments[0].startswith("-"):
        raise UserError("name a scheme first: `bash Simulation/run.sh HogWild --num_workers=1000`")
    script = script_of(arguments[0])
    scheme, name = scheme_in(script), script.resolve().parent.name
    values = scheme.flag_values(*own_flags(), num_workers=100)
    settings = flags.parse(values, arguments[1:], "simulate.py", (*WITHOUT, *set(scheme.without) - {"window"}))
    if "window" in scheme.without and flags.present(values, "window"):
        raise UserError(f"{name} takes no --window")
    settings = settings.but(
        run=scheme.facts(name, settings.num_workers),
        latency_given=bool(flags.present(values, "latency_ms")),
        evaluation_secs_given=bool(flags.present(values, "evaluation_secs")),
    )
    for name in ("latency_ms", "mbit", "mbit_up", "start_at", "delays"):
        count, of_first = len(getattr(settings, name) or []), name in ("start_at", "delays")
        if count > settings.num_workers or (not of_first and count not in (0, 1, settings.num_workers)):
            how = "at most one for each" if of_first else "one for all, or one for each"
            raise UserError(f"--{name} has {count} values for {settings.num_workers} workers: give {how}")
    if settings.clock_only and settings.non_iid:
        raise UserError("--non_iid divides samples, but --clock_only uses none: leave one out")
    if settings.parameters and flags.present(values, "model"):
        raise UserError("--parameters takes the place of a model: leave out --model")
    if "calibrate" in flags.present(values, "calibrate") and not settings.calibrate:
        raise UserError("--calibrate is empty: expected the folder of a real run")
    if settings.calibrate and (given := flags.present(values, "step_ms", "step_cv", "call_ms")):
        raise UserError(f"--calibrate measures the time of steps and messages: leave out --{given[0]}")
    if settings.calibrate and settings.latency_given and (given := flags.present(values, "mbit", "mbit_up")):
        raise UserError(
            f"--calibrate finds the speed of links if --latency_ms is given: leave out --{given[0]}, or --latency_ms"
        )
    if settings.calibrate and settings.parameters:
        raise UserError("--calibrate needs the model of the real runs: leave out --parameters")
    if settings.parameters and not settings.clock_only:
        raise UserError("--parameters works only with --clock_only: a model that is trained has its own size")
    if scheme.check:
        scheme.check(settings)
    return scheme, settings


def costs_of(settings):
    """Returns the `common.simulation.Costs` that the flags name."""
    n = settings.num_workers

    def per_worker(numbers, scale, rest=0.0):
        if not numbers:
            return rest
        return numbers[0] * scale if len(numbers) == 1 else np.array([*numbers, *[0.0] * (n - len(numbers))]) * scale

    down = per_worker(settings.mbit, MBIT, math.inf)
    delays, starts = ([*(given or []), *[0.0] * (n - len(given or []))] for given in (settings.delays, settings.start_at))
    return Costs(
        step=settings.step_ms / 1000,
        machine_cv=settings.machine_cv,
        step_cv=settings.step_cv,
        delay=np.array(delays) / 1000,
        call=settings.call_ms / 1000,
        rounds_per_call=settings.rounds_per_call or Costs.rounds_per_call,
        latency=per_worker(settings.latency_ms, 1e-3),
        bandwidth_up=per_worker(settings.mbit_up, MBIT, down),
        bandwidth_down=down,
        ps_bandwidth=settings.ps_mbit * MBIT if settings.ps_mbit else math.inf,
        read=settings.read_ms / 1000,
        apply=settings.apply_ms / 1000,
        start=np.array(starts),
        away=_all_away(settings, starts),
        warm_start=getattr(settings, "warm_start_steps", 0),
        num_ps=settings.num_ps,
    )


def _all_away(settings, starts):
    """Returns the absences of --away, as `common.simulation.Costs` has it."""
    found = sorted(_away(text, settings.num_workers) for text in settings.away)
    for worker, since, _ in found:
        if since < starts[worker]:
            raise UserError(f"--away: worker {worker} is away from {since:g} s on, but begins only at {starts[worker]:g} s")
    for (worker, _, until), (other, since, _) in itertools.pairwise(found):
        if worker == other and since <= until:
            raise UserError(f"--away: two absences of worker {worker} overlap at {since:g} s")
    return found


def _away(text, num_workers):
    parts = text.split(":")
    with contextlib.suppress(ValueError):
        worker, since = int(parts[0]), float(parts[1])
        until = float(parts[2]) if len(parts) == 3 and parts[2] else math.inf
        if 0 <= worker < num_workers and 0 <= since < until and len(parts) in (2, 3):
            return worker, since, until
    raise UserError(f"--away={text}: expected WORKER:FROM:UNTIL, a worker of 0 to {num_workers - 1} and seconds, as 0:10:25")


class Run:
    """A simulation: what was asked for, and what came of it.

    Attributes:
      settings: all flags.
      actions, costs, waiting: see `common.simulation.virtual_time`.
      clock: the `common.simulation.VirtualTime`, at its end.
      schedule: the `common.simulation.Timetable` of all that happened.
      last: the global step to stop at.
      calibration: with --calibrate, what was found, as `calibrate.Fit` has it (None for a bandwidth without a limit), and how
        well it fits; else None.
      engine: the `common.simulation.Engine`; None with --clock_only.
      lines: what was measured, a list of dicts, as in metrics/*.jsonl; "time" is virtual.
      result: what result.json says.
      final: what `Engine.final` gives at the end.
    """

    def __init__(self, scheme, settings):
        from common.data import Stream, datasets, sources
        from common.models import keras_model
        from common.scheme import tables

        self.settings, self.lines, self.final, self._scheme = settings, [], None, scheme.function
        self._dataset = dataset = sources.load(settings.but(num_workers=1, run_dir=None))
        if isinstance(dataset, Stream):
            raise UserError(f"{dataset.name}: virtual workers draw samples by number: give a set that ends, without --stream")
        small = settings.clock_only and settings.parameters  # only the steps count here, so any model will do
        self._shown = datasets.load("linear") if small else dataset
        spec, options = "linear" if small else settings.model, flags.model_options(settings)
        self.model = keras_model.build(spec, self._shown, settings.seed, settings.loss, tables_on_ps=True, **options)
        tables.check_flags(settings, self.model.tables)
        if self.model.tables:
            raise UserError(
                "the model has tables on the ps (common.Embedding), and the simulator does not know how many of their rows a "
                "message has: use keras.layers.Embedding, whose whole table is on every worker"
            )
        measured = [calibrate.read(path) for path in settings.calibrate]
        for run in measured:
            calibrate.check(run, settings, self.model.description)
        self.engine: Any = None if settings.clock_only else self._engine(settings)
        known = self.engine or self._facts(settings)
        self.actions, self.waiting, self.costs, self._size = known.actions, known.waiting, costs_of(settings), known.size
        self.optimizers, self.calibration = known.optimizers, None
        self.last = self._last_of(known.size.samples_per_update)
        if measured:
            self._calibrate(measured)

    def _engine(self, settings):
        """Returns the `common.simulation.Engine` of so many workers."""
        from common.scheme import compression_of, schedule_of
        from common.simulation import Engine, facts_of, shards_of

        n, scheme, compression = settings.num_workers, self._scheme, compression_of(settings)
        shards = shards_of(self._shown, n, settings.batch_size, settings.seed, settings.non_iid)
        facts = facts_of(scheme, settings, self.model, shards, settings.num_ps, compression)
        self._check_overlap(facts.actions)
        return Engine(
            *(scheme, settings, self.model, shards, settings.num_ps),
            schedule=schedule_of(settings),
            last_of=self._last_of,
            clip_norm=settings.clip_norm,
            compression=compression,
            messages=[(action.up, action.down) for action in facts.actions],
        )

    def _facts(self, settings):
        """Returns the `common.simulation.Facts` of so many workers: all that the clock has to know of an engine."""
        from common import tf
        from common.scheme import compression_of, groups_of, schedule_of
        from common.simulation import Shards, facts_of, facts_of_size

        n, dataset, scheme, compression = settings.num_workers, self._shown, self._scheme, compression_of(settings)
        if settings.parameters:
            facts = facts_of_size(scheme, settings, settings.parameters, n, settings.num_ps, compression)
        else:  # there may be more workers than samples
            numbers = [np.arange(dataset.num_samples)] * n
            shards = Shards(dataset.train, numbers, settings.batch_size, range(n))
            groups_of(settings, self.model)  # is refused as in a run
            facts = facts_of(scheme, settings, self.model, shards, settings.num_ps, compression)
        self._check_overlap(facts.actions)
        if schedule := schedule_of(settings):  # likewise
            schedule.ask = lambda: self._last_of(facts.size.samples_per_update)
            with tf.Graph().as_default():
                schedule(tf.constant(0))
        return facts

    def _check_overlap(self, actions):
        if any(action.ahead and not actions[k - 1].writes for k, action in enumerate(actions)):
            raise UserError(
                f"{self.settings.run.scheme} prefetches elsewhere than right after a push, which the simulator does not know: "
                "leave out --overlap, or let each pull come right after a push"
            )

    def _last_of(self, samples_per_update):
        from common.training import last_step

        return last_step(self.settings, self._dataset.num_samples, samples_per_update)

    def _calibrate(self, runs):
        """Finds the costs of steps and messages in what real runs have `Measured`, and how well they fit."""
        from common.training import rounds_of_call

        clocks = [self._clock_of(run) for run in runs]
        found = calibrate.fit(clocks, self.settings.latency_given)
        at_once = self.settings.num_workers if self.waiting.quorum is None else 1
        rounds = rounds_of_call(self.settings, self.model, self._size, at_once, self.last)
        self.costs = found.costs(dataclasses.replace(self.costs, rounds_per_call=rounds))
        fits = [calibrate.report(clock, found) for clock in clocks]
        known = {name: None if value == math.inf else value for name, value in found._asdict().items()}
        self.calibration = {**known, "rounds_per_call": rounds, "runs": fits}

    def _clock_of(self, run):
        """Returns the `calibrate.Clock` of a real run: of its workers, its delays, and the flags that its scheme had."""
        n, made = run.result["num_workers"], {name: run.result[name] for name in ("delays", "rounds_per_call")}
        own = {name: math.inf if value == "inf" else value for name, value in run.result["flags_of_scheme"].items()}
        nothing: dict[str, Any] = {
            "start_at": None,
            "away": [],
            "warm_start_steps": 0,
            "machine_cv": 0.0,
        }  # of what is only to be simulated
        settings = self.settings.but(num_workers=n, **nothing, **made, **own)
        actions, waiting = self.actions, self.waiting
        if n != self.settings.num_workers or any(getattr(self.settings, name) != value for name, value in own.items()):
            actions, waiting, *_ = self._facts(settings)
        costs = costs_of(settings)
        begin = lambda found: VirtualTime(actions, n, found.costs(costs), waiting, self.settings.seed)  # noqa: E731
        return calibrate.Clock(run, actions, begin)

    def _gradients(self):
        return self.waiting.quorum or 1

    def tell_time(self):
        """Runs the clock to the end of the run.

        Raises:
          TrainingFailed: if no worker can go on before.
        """
        settings = self.settings
        self.clock = VirtualTime(
            self.actions, settings.num_workers, self.costs, self.waiting, settings.seed, self._trace_until()
        )
        self.schedule = self.clock.run(self.last, settings.seconds or math.inf)
        if self.clock.has_ended() and self.clock.updates < self.last:
            stuck, when = self.clock.stuck(), f"after {self.clock.now:.3f} virtual seconds and {self.clock.updates:,} updates"
            away = ", ".join(map(str, sorted({worker for worker, _, until in self.costs.away if until == math.inf})))
            if stuck:
                raise TrainingFailed(
                    f"{when} all workers that are left, {len(stuck):,}, wait for worker {away}, which does not come back"
                )
            raise TrainingFailed(f"{when} no worker is left: --away removes worker {away} for good")
        if not self.clock.updates:
            raise TrainingFailed(f"there was no update within --seconds={settings.seconds:g}: a round takes longer")

    def _trace_until(self):
        if self.settings.trace_secs is not None:
            return self.settings.trace_secs
        costs, most = self.costs, lambda value: float(np.max(value))
        steps = sum(action.local_steps for action in self.actions)
        wire = sum(a.up / np.min(costs.bandwidth_up) + a.down / np.min(costs.bandwidth_down) for a in self.actions)
        return 6 * (steps * costs.step + most(costs.delay) + float(wire) + 2 * most(costs.latency))

    def evaluations(self):
        """Returns where in the schedule to evaluate: numbers of events, the last one that of the end."""
        times, settings = self.schedule.times, self.settings
        if settings.evaluation_secs_given:
            at = np.arange(settings.evaluation_secs, times[-1], settings.evaluation_secs)
        else:
            at = np.linspace(0, times[-1], POINTS + 1)[1:-1]
        return [*np.unique(np.searchsorted(times, at)).tolist(), len(times)]

    def train(self, tell=lambda line: None):
        """Runs the scheme's operations in the order of the schedule; calls `tell(line)` for each line of metrics.

        Raises:
          TrainingFailed: if the loss is no longer finite.
        """
        from common.training import measured

        steps, workers, *_ = self.schedule
        if self.engine:
            self._write(tell, 0, 0, measured(self.engine.evaluate(*self._dataset.test)))
        start = 0
        for stop in self.evaluations():
            if stop == start:
                continue
            values: dict[str, Any] = {}
            if self.engine:
                outcomes = self.engine.run(steps[start:stop], workers[start:stop])
                self._check(outcomes, start, stop)
                losses = outcomes.losses[np.isin(steps[start:stop], self._trains())]
                values = measured(self.engine.evaluate(*self._dataset.test))
                if len(losses):
                    values["loss"] = float(np.mean(losses))
            self._write(tell, start, stop, values)
            start = stop

    def _trains(self):
        return [k for k, action in enumerate(self.actions) if action.local_steps]

    def _check(self, outcomes, start, stop):
        """Raises a `RuntimeError` if clock and arithmetic do not agree, and `TrainingFailed` if a loss is not finite."""
        part = [column[start:stop] for column in self.schedule]
        is_update = np.isin(part[0], [k for k, action in enumerate(self.actions) if action.writes])
        wrong = np.flatnonzero(is_update & (outcomes.updated != part[5]))
        if len(wrong):
            i = wrong[0]
            raise RuntimeError(
                "a fault of the simulator: its clock and the scheme's operations disagree on the global step in "
                f"{len(wrong):,} of {is_update.sum():,} updates, first in step {part[0][i]} of a round of worker {part[1][i]}, "
                f"at {part[2][i]:.6g} virtual seconds (event {start + i + 1:,} of {len(self.schedule.steps):,}): expected "
                f"{part[5][i]}, found {int(outcomes.updated[i])}"
            )
        trains = np.isin(part[0], self._trains())
        bad = np.flatnonzero(trains & ~np.isfinite(outcomes.losses))
        if len(bad):
            i = bad[0]
            raise TrainingFailed(
                f"worker {part[1][i]}: the loss is {outcomes.losses[i]} after {part[2][i]:.3f} virtual seconds; choose "
                "a smaller --learning_rate, or look at the data"
            )

    def staleness(self, start=0, stop=None):
        """Returns the staleness of each update among some events, an array."""
        return type(self.schedule)(*(column[start:stop] for column in self.schedule)).staleness()

    def _write(self, tell, start, stop, values):
        now = float(self.schedule.times[stop - 1]) if stop else 0.0
        line = {"time": now, "worker": "all workers", "last_step": int(self.last)}
        # A gradient for an update of several workers is noted with that update before it is made.
        line["global_step"] = len(self.staleness(0, stop)) // self._gradients()
        if stop:
            drawn, began = self._samples(start, stop), self.lines[-1]["time"] if self.lines else 0.0
            line["samples"] = self._samples(0, stop)
            if now > began:
                line["samples_per_second"] = drawn / (now - began)
            stale = self.staleness(start, stop)
            if len(stale):
                line["staleness_mean"] = float(np.mean(stale))
        line |= values
        self.lines.append(line)
        tell(line)

    def _samples(self, start, stop, workers=None):
        local = np.array([action.local_steps for action in self.actions] + [0])  # RESTART is -1
        steps = local[self.schedule.steps[start:stop]] * self.settings.batch_size
        if workers is None:
            return int(steps.sum())
        return np.bincount(self.schedule.workers[start:stop], steps, workers).astype(int).tolist()

    def summarize(self):
        """Makes `result`."""
        settings, stale = self.settings, self.staleness()
        samples, seconds = self._samples(0, None), self.clock.now
        shares = self.shares()
        self.result = {
            "scheme": settings.run.scheme,
            "simulated": True,
            "num_ps": settings.num_ps,
            "num_workers": settings.num_workers,
            "data": settings.data,
            "batch_size": settings.batch_size,
            "window": settings.window,
            **{name: getattr(settings, name) for name in calibrate.COMPRESSION},
            "global_steps": int(self.clock.updates),
            "samples": samples,
            "samples_per_worker": self._samples(0, None, settings.num_workers),
            "virtual_seconds": seconds,
            "train_seconds": seconds,
            "wall_seconds": time.monotonic() - settings.run.began,
            "samples_per_second": samples / seconds if seconds else None,
            "parts": shares,
            "staleness_mean": float(np.mean(stale)) if len(stale) else None,
            "staleness_max": int(np.max(stale, initial=0)),
            "staleness": {str(k): int(n) for k, n in zip(*np.unique(stale, return_counts=True), strict=True)},
            "gradients_dropped": int(self.clock.dropped),
            "gradients_per_update": self._gradients(),
            "bytes_up": sum(a.up for a in self.actions),
            "bytes_down": sum(a.down for a in self.actions),
            "parameters": int(settings.parameters or self.model.size),
            "minimizes": self.model.minimizes,
            "restarts": sum(until <= self.clock.now for _, _, until in self.costs.away),
        }
        if self.calibration:
            self.result["calibration"] = self.calibration
        if self.engine:
            last = self.lines[-1]
            self.result |= {k: v if math.isfinite(v) else None for k, v in last.items() if k.startswith("test_")}

    def shares(self):
        """Returns the shares of the workers' time that go into local steps, and into messages and waiting: {part: share}."""
        now, starts = self.clock.now, np.broadcast_to(self.costs.start, [self.settings.num_workers])
        there = np.sum(np.maximum(now - starts, 0.0)) - sum(min(b, now) - min(a, now) for _, a, b in self.costs.away)
        train = float(self.schedule.seconds.sum()) / float(there)
        return {"train": train, "wire and waiting": 1 - train}


def simulate(scheme, **values):
    """Trains by a scheme with virtual workers, and returns the `Run`: for notebooks. Writes no file.

    Args:
      scheme: the name of a folder, as "HogWild".
      **values: the flags of `bash Simulation/run.sh SCHEME`, as num_workers=1000.

    Raises:
      UserError, TrainingFailed: as the command does.
    """
    found, settings = parse([scheme, *api.as_arguments(values)])
    run = Run(found, settings)
    try:
        run.tell_time()
        run.train()
        run.summarize()
        run.final = run.engine and run.engine.final
    finally:
        if run.engine:
            run.engine.close()
    return run


def program(arguments):
    """What the command does; returns its exit status."""
    if arguments[:1] == ["--help"]:
        print(
            "usage: bash Simulation/run.sh SCHEME [--flag=value ...]; `bash Simulation/run.sh HogWild --help` lists the flags"
        )
        return 0
    scheme, settings = parse(arguments)
    run = Run(scheme, settings)
    path, held = run_folder.prepare_run_dir(settings.but(run=settings.run._replace(scheme=f"Simulation-{settings.run.scheme}")))
    run_folder.watch_locks(path)
    with held:
        return write(run, Path(path))


def write(run, where):
    """Simulates, and writes all that the command writes into a folder; returns its exit status."""
    settings = run.settings
    say = lambda line: print(line, flush=True)  # noqa: E731
    on = [f"{' and '.join(sorted(names))} on the {side}" for side, names in zip(("ps", "workers"), run.optimizers) if names]
    say(f"{settings.run.scheme}: {settings.num_workers:,} virtual workers, {settings.num_ps} ps")
    say(f"minimizes {run.model.minimizes}, by {', '.join(on).replace('GradientDescent', 'SGD') or 'the steps of the scheme'}")
    up, down = (sum(getattr(action, name) for action in run.actions) for name in ("up", "down"))
    say(f"a round sends {up:,} bytes to the ps and receives {down:,}")
    for line in calibrated(run.calibration):
        say(line)
    run.tell_time()
    took = time.monotonic() - settings.run.began
    say(f"{run.clock.updates:,} updates in {run.clock.now:.4g} virtual seconds, scheduled in {took:.1f} s")
    if line := too_few(run):
        say(line)
    (where / "metrics").mkdir(exist_ok=True)
    with open(run_folder.open_own(where / "metrics" / "virtual.jsonl", os.O_WRONLY | os.O_TRUNC), "w") as file:

        def tell(line):
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
            file.write(json.dumps(finite) + "\n")
            if sys.stdout.isatty() or line["global_step"] in (0, run.last):
                say(_as_text(line))

        run.train(tell)
    run.summarize()
    run_folder.write_json(where / "result.json", run.result)
    write_trace(run.clock.spans, where / "trace.json")
    if run.engine:
        run.model.save(*run.engine.final, where / "model.keras")
        run.engine.close()
    plots.draw_curve(where)
    draw_timeline(run, where / "timeline.png")
    _summary(run, where)
    return 0


def too_few(run):
    """Returns a line if there are so few updates that some workers have not pushed once; None if there are enough."""
    n, updates = run.settings.num_workers, run.clock.updates
    pushes = [k for k, action in enumerate(run.actions) if action.writes]
    idle = n - len(np.unique(run.schedule.workers[np.isin(run.schedule.steps, pushes)]))
    if updates >= n or not idle:
        return None
    made = f"{updates:,} update{'s' * (updates > 1)} for {n:,} workers"
    return f"{made}: {idle:,} of them never push; train for longer, or with fewer workers"


def calibrated(calibration):
    """Returns lines that say what was found, and how well it fits; none if there was no calibration."""
    if not calibration:
        return []
    latency, bandwidth = calibration["latency"], calibration["bandwidth"]
    found = [f"--step_ms={1000 * calibration['step']:.4g}", f"--step_cv={calibration['step_cv']:.3g}"]
    found += [f"--latency_ms={1000 * latency:.4g}"] if latency is not None else []
    found += [f"--mbit={bandwidth / MBIT:.4g}"] if bandwidth is not None else []
    lines = [f"calibrated: {' '.join(found)} --rounds_per_call={calibration['rounds_per_call']}"]
    if not latency and bandwidth is None:
        lines.append(
            "even with no extra time per message the simulation is slower than the real runs: check --mbit, --ps_mbit, "
            "--read_ms and --apply_ms"
        )
    for run in calibration["runs"]:
        stale = ""
        if run["staleness_distance"] is not None:
            stale = (
                f"; staleness {run['staleness_mean']:.2f} measured, {run['simulated_staleness_mean']:.2f} simulated "
                f"(total variation {run['staleness_distance']:.2f})"
            )
        lines.append(
            f"{run['path']}, {run['num_workers']} worker{'s' * (run['num_workers'] > 1)}: {run['rounds_per_second']:.1f} "
            f"rounds/s measured, {run['simulated_rounds_per_second']:.1f} simulated{stale}"
        )
    return lines


def _as_text(line):
    measured = "".join(f", {name} {line[key]:{form}}" for name, key, form in progress.measures([line]))
    stale = f", staleness {line['staleness_mean']:.2f}" if "staleness_mean" in line else ""
    speed = f", samples/s {line['samples_per_second']:,.0f}" if "samples_per_second" in line else ""
    return f"{line['time']:.4g} virtual s: step {line['global_step']:,} of {line['last_step']:,}{speed}{measured}{stale}"


def _summary(run, where):
    result = run.result
    where = progress.as_typed(where)
    least, most = min(result["samples_per_worker"]), max(result["samples_per_worker"])
    print(f"{result['global_steps']:,} updates, {result['samples']:,} samples ({least:,} to {most:,} of each worker)")
    print(
        f"{result['virtual_seconds']:.4g} virtual seconds, {result['samples_per_second']:,.0f} samples/s; "
        f"{result['wall_seconds']:.1f} s in all"
    )
    measured = "".join(f"{name} {result[key]:{form}}, " for name, key, form in progress.measures([result]))
    late = result["gradients_dropped"]
    dropped = f", {late:,} gradients were dropped because they came too late" if late else ""
    print(f"{measured}staleness {result['staleness_mean']:.2f} on average, {result['staleness_max']:,} at most{dropped}")
    share = f"{result['parts']['train']:.0%}"
    print(f"workers spend {share} of their time on local steps; the rest is messages and waiting for other workers")
    for name in ("curve.png", "timeline.png", "trace.json", "model.keras"):
        if (where / name).exists():
            print(where / name)


LANES = {"train": "train", "wait": "train", "push": "push", "pull": "pull"}  # where each part of a round is drawn


def in_rows(spans):
    """Returns pairs of a `Activity` and the row of its lane in which it is drawn: 0, or the next one that is free.

    Several pushes of a worker may be under way at the same time. In one row they would hide each other, and Chrome's format
    wants spans of a row to nest.
    """
    ends: dict[tuple, list] = {}  # by worker and lane, when the last span of each row ends
    found = []
    for span in sorted(spans, key=lambda span: span.start):
        rows = ends.setdefault((span.worker, LANES[span.part]), [])
        row = next((k for k, end in enumerate(rows) if end <= span.start), len(rows))
        rows[row : row + 1] = [span.end]
        found.append((span, row))
    return found


def write_trace(spans, path):
    """Writes what the workers do first as a trace that opens in Perfetto (https://ui.perfetto.dev), in Chrome's format."""
    drawn = in_rows(spans)
    lanes = list(dict.fromkeys(LANES.values()))
    used = sorted({(span.worker, lanes.index(LANES[span.part]), row) for span, row in drawn})
    threads = {each: k for k, each in enumerate(used)}
    names = [
        {"name": "process_name", "ph": "M", "pid": worker, "args": {"name": f"worker {worker}"}}
        for worker in sorted({span.worker for span in spans})
    ]
    for (worker, lane, row), k in threads.items():
        name = lanes[lane] + f" {row + 1}" * (row > 0)
        names.append({"name": "thread_name", "ph": "M", "pid": worker, "tid": k, "args": {"name": name}})
    events = [
        {
            "name": span.part,
            "ph": "X",
            "ts": 1e6 * span.start,
            "dur": 1e6 * (span.end - span.start),
            "pid": span.worker,
            "tid": threads[span.worker, lanes.index(LANES[span.part]), row],
        }
        for span, row in drawn
    ]
    run_folder.write_json(path, {"traceEvents": names + events})


def draw_timeline(run, path, most=12):
    """Draws what the first workers do in the first rounds to a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.5 * min(most, run.settings.num_workers) + 1), layout="constrained")
    timeline(figure.subplots(), run, most)
    FigureCanvasAgg(figure).print_png(path)


def timeline(axes, run, most=12):
    """Draws the same into axes of Matplotlib."""
    from common.simulation import COLORS

    count = min(most, run.settings.num_workers)
    heights = {"train": (-0.35, 0.4), "wait": (-0.35, 0.4), "push": (0.07, 0.14), "pull": (0.22, 0.14)}
    drawn = in_rows(span for span in run.clock.spans if span.worker < count)
    until = max((span.end for span, _ in drawn), default=1.0)
    for part, (low, height) in heights.items():
        for worker in range(count):
            own = [(span, row) for span, row in drawn if (span.worker, span.part) == (worker, part)]
            rows = 1 + max((row for _, row in own), default=0)  # which share the height
            for k in range(rows):
                bars = [(span.start, span.end - span.start) for span, row in own if row == k]
                name = part if (worker, k) == (0, 0) else None
                place = worker + low + k * height / rows, height / rows
                axes.broken_barh(bars, place, color=COLORS[part], ec="white", lw=0.3, label=name)
    axes.set(xlim=(0, until), ylim=(count - 0.4, -0.6), yticks=range(count), xlabel="virtual seconds")
    axes.set_yticklabels([f"worker {i}" for i in range(count)])
    axes.legend(ncol=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


if __name__ == "__main__":
    notebook.quiet()
    try:
        sys.exit(program(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
