"""The graph of a worker: global and local parameters, calls, evaluation, checkpoints; and the entries of its result."""

import functools
import json
from pathlib import Path
from typing import Any

from common import tf
from common.cluster import Gate, Saver, membership
from common.core import Keeper, tell
from common.data import LeasedBatches, Ledger
from common.scheme import GlobalParameters, LocalParameters, compression_of, fragments_of, groups_of, local_rows, schedule_of
from common.training.calls import build_calls, delay_of
from common.training.initial_values import fill, puts_of
from common.training.model_and_data import (
    batches_of,
    evaluation_of,
    optimizers_of,
    position_of,
    samples_of_each,
    unit_of,
    what_is_trained,
)
from common.training.plan import Plan
from common.training.result import REPORT_SIZE, save_model, write_result


class WorkerGraph:
    """Builds the graph of a worker in the present `tf.Graph`.

    Args:
      scheme: generator function, see `common.scheme.steps`.
      task: a `common.cluster.TaskSpecDef` of a worker, or None.
      settings: all flags.
      model: a `common.models.Model`.
      dataset, held_out: the training and test samples, and those of --validation or None.

    Attributes:
      plan: the `Plan` for the main loop.
      calls: the `common.training.Calls`.
    """

    def __init__(self, scheme, task, settings, model, dataset, held_out):
        self._task, self._settings, self._model, self._dataset, self._held_out = task, settings, model, dataset, held_out
        self._index: int = task.shard_index if task else 0
        self._num_workers: int = task.num_workers if task else 1
        self._begin_workers = settings.run.begin_workers if settings.max_workers else self._num_workers
        self._schedule, self._compression = schedule_of(settings), compression_of(settings)
        self._center = center = GlobalParameters(
            model.initial_parameters,
            num_ps=task.num_ps if task else 1,
            device_fn=task and task.device_fn(),
            schedule=self._schedule,
            compression=self._compression,
            fragments=fragments_of(settings),
            tables=model.tables,
            max_rows=settings.max_rows,
            groups=groups_of(settings, model),
            ema=settings.ema,
        )
        self._unit = unit_of(settings, model)
        with tf.device(task and task.device):
            self._leased: Any = None
            self._members = membership.Members(membership.PS_0, REPORT_SIZE, self._begin_workers) if task else None
            self._position: Any = None
            batches = self._batches()
            self._kept = center.keep(model.initial_state)
            self._local = LocalParameters(
                center,
                model,
                batches,
                name=f"worker_{self._index}",
                index=self._index,
                num_workers=self._num_workers,
                delay=delay_of(settings.delays, self._index),
                clip_norm=settings.clip_norm,
                kept=self._kept if self._index == 0 else (),
                samples_of_each=samples_of_each(dataset, self._num_workers),
                begin_workers=self._begin_workers if settings.max_workers else None,
                must_be_finite=True,
            )
            self.calls = build_calls(scheme, center, self._local, settings, dataset.num_samples)
            self._waits = center.waits(self._local)
            if self._index == 0:
                self._say_what()
        self.plan = self._plan()

    def _batches(self):
        settings, dataset, index = self._settings, self._dataset, self._index
        if not settings.max_workers:
            self._position = position_of(settings, index, self._num_workers, dataset.num_samples)
            return batches_of(dataset, settings, index, self._num_workers, self._position)
        center = self._center
        center.members, ledger = self._members, Ledger(center.step.device)
        x, y, *weights = dataset.train
        self._leased = LeasedBatches(
            x,
            y,
            settings.batch_size,
            settings.seed,
            ledger,
            worker=index,
            num_workers=self._begin_workers,
            weights=weights[0] if weights else None,
        )
        return self._leased

    def _say_what(self):
        more = [str(each) for each in (self._schedule, self._compression) if each]
        more += [f"evaluated at the average of β = {self._settings.ema:g}"] if self._settings.ema else []
        optimizers = ", ".join([optimizers_of(self._center, self._local), *more])
        is_own, are_leased = ":" in self._settings.data, self._leased is not None
        tell(what_is_trained(self._model, self._dataset, self._begin_workers, optimizers, is_own, self._unit, are_leased))

    def _plan(self):
        """Builds evaluation, checkpoints and the start of a session, and returns the `Plan`."""
        settings, center, local, leased = self._settings, self._center, self._local, self._leased
        with tf.device(self._task and self._task.device):
            evaluation, final, copies = self._evaluation() if self._index == 0 else (None, None, [])
            keeper = self._keeper(copies)
            gate = ready = None
            if self._num_workers > 1:
                gate = Gate(self._members)
                if self._index > 0:
                    ready = tf.concat([keeper.has_lost, gate.closed(self._index)], axis=0)
            puts = puts_of(self._model, center)
            scaffold = tf.train.Scaffold(
                # Restores the keeper's checkpoints. Not sharded, so the ps tasks need no folder shared with the chief.
                saver=Saver(keeper.variables, sharded=False, save_relative_paths=True),
                init_feed_dict=center.init_feed_dict,
                init_fn=(lambda scaffold, session: fill(session, puts)) if puts else None,
                ready_for_local_init_op=ready,
                local_init_op=tf.local_variables_initializer(),
                local_init_feed_dict=local.init_feed_dict,
            )
        goal = None  # with --steps the goal is a number of updates
        if center.local_steps is not None and not settings.steps and self._dataset.num_samples is not None:
            goal = settings.epochs * self._dataset.num_samples
        farewell = [local.dynamic.leave()] if local.dynamic else []
        farewell += [leased.leave] if leased else []
        return Plan(
            last=self.calls.last,
            step=center.step,
            next_call=self.calls.next_call,
            evaluation=evaluation,
            final=final,
            scaffold=scaffold,
            gate=gate,
            waits=self._waits,
            size=self.calls.size,
            keeper=keeper,
            position=self._position,
            unit=self._unit,
            told=[(local.told_of_tables(), functools.partial(local_rows.numbers_of, self._model.tables))],
            rows=local.told_of_tables(),
            goal=goal,
            members=self._members,
            begin=leased.begin if leased else (),
            farewell=farewell,
        )

    def _evaluation(self):
        """Returns the chief's evaluation, the tensors to fetch at the end, and operations that copy its state to the ps."""
        center, local, model, dataset = self._center, self._local, self._model, self._dataset
        parameters, step = center.read_average()
        # The state of the chief's own x is not the state of x̃.
        final = parameters, local.state_at(parameters)
        copies = [there.assign(here, read_value=False) for there, here in zip(self._kept, final[1], strict=True)]
        results = evaluation_of(model, final, dataset, local.init_feed_dict, center.find)
        if self._held_out and not self._settings.run.num_evaluators:
            with tf.variable_scope("validation"):
                found = evaluation_of(model, final, self._held_out, local.init_feed_dict, center.find)
            results |= {f"validation_{name}": value for name, value in found.items()}
        return (step, results), final, copies

    def _keeper(self, copies):
        settings, model, task = self._settings, self._model, self._task
        keeper = Keeper(
            self._center,
            Path(settings.run_dir, "checkpoints"),
            settings.checkpoint_secs,
            index=self._index,
            device=task and task.device,
            samples_per_update=self.calls.size.samples_per_count,
            copies=copies,
            samples_per_gradient=self.calls.size.samples_per_gradient,
        )
        if self._index == 0 and not model.tables:
            keeper.export = functools.partial(model.save, path=Path(settings.run_dir, "model.keras"))
        return keeper

    def write_result(self, outcome):
        """Writes `model.keras` and `result.json` of a run's `Outcome`, if this is the chief."""
        settings, model = self._settings, self._model
        if outcome.final:
            save_model(model, outcome.final, settings)
        if not outcome.evaluated:
            return
        more = {"samples": outcome.samples, "dropped": outcome.dropped, "parameters": model.size}
        more["optimizer"] = ", ".join(sorted(self._center.optimizers.names | self._local.optimizers.names))
        more["minimizes"] = model.minimizes
        more |= {"unit": self._unit} if self._unit else {}
        more |= {"ema": settings.ema} if settings.ema else {}
        more |= {name: getattr(settings, name) for name in ("compress", "compress_pull", "topk")}
        if model.tables:
            more |= self._of_tables(outcome.rows)
        more |= {"given_up": outcome.given_up} if outcome.given_up else {}
        more |= {"delays": settings.delays or [], "rounds_per_call": self.calls.rounds_per_call}
        more["flags_of_scheme"] = {name: _as_json(getattr(settings, name)) for name in settings.run.own_flags}
        write_result(settings, self._task, outcome.reports, *outcome.evaluated, size=self.calls.size, **more)

    def _of_tables(self, rows):
        settings, found = self._settings, local_rows.what_travelled(self._model.tables, rows)
        for line in local_rows.dropped(found, settings.max_rows):
            tell(line)
        flags = "table_optimizer", "table_learning_rate", "max_rows", "save_tables"
        return {"tables": found, **{name: getattr(settings, name) for name in flags}, "tables_seed": settings.seed}


def _as_json(value):
    """Returns a flag's value, as text if JSON cannot represent it, such as infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value
