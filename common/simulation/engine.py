"""A thousand workers in one process: the scheme's own operations, run in the order of virtual time.

A scheme touches only its worker's local variables and the center. So the graph of one worker serves any number of workers:
the variables that a step reads are loaded from storage `[num_workers, ...]` before it, those that it writes are stored after
it. A schedule of steps runs as one session call, a loop in the graph.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from common import tf
from common.core import ROOM, UserError
from common.data import arrays_in, mapped
from common.scheme import (
    LocalParameters,
    Step,
    build_steps,
    found_by,
    fragments_of,
    groups_of,
    hyperparameters,
    size_of,
    steps_apart,
)
from common.simulation.facts import actions_of, waiting_of
from common.simulation.shards import ScheduledBatches
from common.simulation.virtual_cluster import SHARED, VirtualCenter, per_worker, write_row
from common.simulation.virtual_time import RESTART

VISIBLE = {"VarHandleOp", "While", "If", "Case", "Assert"}  # operations without state, or whose state is that of variables
MOST_SAMPLES = 1_000_000  # sample indices fed to one session call


class Engine:
    """The steps of a scheme's workers, run in any order.

    Args:
      scheme: generator function, see `common.scheme.steps`.
      hp: the scheme's hyperparameters, a namespace.
      model: a `common.models.Model`.
      shards: the `Shards` of the workers.
      num_ps: pieces of the global parameters.
      schedule: a `common.scheme.Schedule` of the learning rate; None for none.
      last_of: function of the samples per update that returns the global step at which the schedule ends; None if the schedule
        knows.
      clip_norm: see `common.scheme.LocalParameters`.
      compression: see `common.scheme.GlobalParameters`.
      messages: bytes (up, down) of each step, see `messages_of`; None for none.
      optimize: whether TensorFlow may also rewrite the arithmetic of the graph first: takes up to a second.

    Attributes:
      actions: the `common.simulation.Action`s of a round.
      waiting: the `common.simulation.Waiting` of the scheme.
      steps: the `common.scheme.Step`s of a round.
      size: the `common.scheme.RoundSize`.
      graph, session: of TensorFlow.

    Raises:
      UserError: if the scheme cannot be simulated.
    """

    def __init__(
        self,
        scheme,
        hp,
        model,
        shards,
        num_ps=1,
        schedule=None,
        last_of=None,
        clip_norm=None,
        compression=None,
        messages=None,
        optimize=True,
    ):
        self._model, self._shards, self.graph = model, shards, tf.Graph()
        n = shards.num_workers
        with self.graph.as_default():
            options = {"schedule": schedule, "compression": compression, "fragments": fragments_of(hp)}
            options |= {"tables": model.tables, "max_rows": getattr(hp, "max_rows", ROOM), "groups": groups_of(hp, model)}
            options["ema"] = getattr(hp, "ema", None)
            self._center = center = VirtualCenter(model.initial_parameters, num_ps, **options)
            kinds, workers, starts = (tf.placeholder(tf.int32, [None], name) for name in ("kinds", "workers", "starts"))
            order = tf.placeholder(tf.int32, [None], "order")
            self._schedule = kinds, workers, starts, order
            feeds = dict(center.init_feed_dict)
            batches = ScheduledBatches(shards, order, feeds)
            before = set(tf.local_variables())
            batches.at = tf.constant(0)
            local = LocalParameters(
                *(center, model, batches, "worker", tf.constant(0), n),
                clip_norm=clip_norm,
                samples_of_each=shards.counts.tolist(),
            )
            self._local = local
            own = per_worker(hyperparameters(hp, center, local), local)
            self.steps = build_steps(scheme, center, local, own)
            self.size = size_of(center, local, shards.batch_size)
            if schedule and last_of:
                schedule.ask = lambda: last_of(self.size.samples_per_update)
            mine = [v for v in tf.local_variables() if v not in before]
            self._rows = {v.ref(): _rows(v, n, i) for i, v in enumerate(mine)}
            uses = [_uses(step.operations, mine) for step in self.steps]
            self._loop = self._build_loop(scheme, own, uses, batches, messages)
            self._value, self._step = center.read()[0], center.step.read_value()
            self._evaluated = center.read_average()[0]
            self._state = local.state_at(self._evaluated)
            self._values = {reference: rows.read_value() for reference, rows in self._rows.items()}
            self._feeds = {**feeds, **local.init_feed_dict}
            self._begin_of_center = next(iter(center.init_feed_dict))
            self._initializers = [
                tf.global_variables_initializer(),
                tf.variables_initializer(tf.get_collection(SHARED)),
                tf.local_variables_initializer(),
                [rows.initializer for rows in self._rows.values()],
                _apart(self._rows, model.seeds(local.state), n),
            ]
        self._evaluations: dict[Any, Any] = {}  # by the shapes of x and y
        self._config = _config(optimize)
        self.session: Any = None
        self.restart()

    @functools.cached_property
    def _has_hidden_state(self):
        """Whether operations hold state that the initializers of variables leave as it is, as random generators do."""
        from tensorflow.python.framework import op_def_registry  # importing it imports tensorflow

        definition = self.graph.as_graph_def()
        parts = [definition.node, *(function.node_def for function in definition.library.function)]
        used = {each.op for part in parts for each in part}
        return any(_is_hidden(op_def_registry.get(op)) for op in used - VISIBLE)

    def restart(self, shards=None, parameters=None):
        """Restarts training: all variables return to their initial values.

        The session stays, prepared for this graph, unless operations hold state beside that of variables.

        Args:
          shards: new `Shards` of the same samples, with the same share per worker; None for the present ones, at their present
            position.
          parameters: initial x̃, an array `[size]`; None for the previous one.

        Raises:
          ValueError: if the shards differ in workers, shares or batch size.
        """
        if shards is not None:
            shares, before = (each.counts / each.counts.sum() for each in (shards, self._shards))
            if not np.array_equal(shares, before) or shards.batch_size != self._shards.batch_size:
                raise ValueError("expected shards with as many workers, the same share of each, and as many samples in a batch")
            self._shards = shards
        if parameters is not None:
            self._feeds[self._begin_of_center] = parameters
        if self.session and self._has_hidden_state:
            self.session.close()
            self.session = None
        if not self.session:
            self.session = tf.Session(graph=self.graph, config=self._config)
        for initializer in self._initializers:
            self.session.run(initializer, self._feeds)

    def run(self, steps, workers):
        """Runs steps of workers in this order, regardless of barriers and staleness bounds.

        Args:
          steps: numbers of steps in a round, or `RESTART`, `[events]`.
          workers: worker of each step, `[events]`.

        Returns:
          An `Outcomes`.
        """
        steps, workers = np.asarray(steps, np.int64), np.asarray(workers, np.int64)
        sizes = self._samples_of[np.where(steps == RESTART, 0, steps)]
        sizes = np.where(steps == RESTART, 0, sizes)
        ends, found, start = np.cumsum(sizes), [], 0
        while start < len(steps):
            base = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, base + MOST_SAMPLES, "right")))
            found.append(self._run(steps[start:stop], workers[start:stop], sizes[start:stop]))
            start = stop
        return Outcomes(*map(np.concatenate, zip(*found, strict=True))) if found else Outcomes(*np.zeros([4, 0]))

    def _run(self, steps, workers, sizes):
        order, starts = self._shards.take(workers, sizes)
        kinds = np.where(steps == RESTART, len(self.steps), steps)
        return self.session.run(self._loop, dict(zip(self._schedule, (kinds, workers, starts, order), strict=True)))

    def _build_loop(self, scheme, hp, uses, batches, messages):
        """Returns the tensors of `Outcomes`: a loop over the events, with a branch for each step."""
        kinds, workers, starts, _ = self._schedule
        center, local, rows = self._center, self._local, self._rows
        windows: list[int] = []
        trained: list[int] = []
        count = tf.size(kinds)

        def body(t, done, outcomes):
            worker = workers[t]
            batches.at, local.index = starts[t], worker
            generate = steps_apart(scheme, center, local, hp)

            def branch(used):
                def run():
                    read, written = used
                    loads = [v.assign(tf.gather(rows[v.ref()], worker), read_value=False) for v in read]
                    batches.drawn, begun = 0, local.local_steps
                    with tf.control_dependencies(loads):
                        step = generate(loads)
                    windows.append(batches.drawn)
                    trained.append(local.local_steps - begun)
                    stores = []
                    with tf.control_dependencies(step.operations):
                        for v in written:
                            stores.append(write_row(rows[v.ref()], worker, v.read_value()))
                    with tf.control_dependencies([*step.operations, *stores]):
                        return _outcome(step)

                return run

            def restart():
                done, (x, step) = [], center.read()
                for v, kept in ((v, rows[v.ref()]) for v in self._variables()):
                    first = local.begins_as(v, x, step)
                    first = tf.gather(kept, local.num_workers) if first is None else first
                    done.append(write_row(kept, worker, first))
                with tf.control_dependencies(done):
                    return _outcome(Step())

            with tf.control_dependencies([done]):
                found = _switch(scheme, kinds[t], [*map(branch, uses), restart])
            with tf.control_dependencies(found):
                return t + 1, tf.constant(0), [array.write(t, value) for array, value in zip(outcomes, found, strict=True)]

        arrays = [tf.TensorArray(dtype, count) for dtype in (tf.int64, tf.int64, tf.int64, tf.float32)]
        *_, arrays = tf.while_loop(
            lambda t, *_: t < count, body, (tf.constant(0), tf.constant(0), arrays), parallel_iterations=1
        )
        local.index = None
        self._samples_of = np.array(windows)
        self.waiting = waiting_of(center, local)
        self.actions = actions_of(self.steps, trained, messages or [(0, 0)] * len(self.steps))
        return [array.stack() for array in arrays]

    def _variables(self):
        return [reference.deref() for reference in self._rows]

    @property
    def center(self):
        """x̃, an array `[size]`."""
        return self.session.run(self._value)

    @property
    def average(self):
        """The moving average of x̃, an array `[size]`; x̃ itself without `hp.ema`."""
        return self.session.run(self._evaluated)

    @property
    def final(self):
        """x̃ or its average, and the state of the model there: the arguments of `common.models.Model.save`."""
        return self.session.run((self._evaluated, self._state))

    @property
    def optimizers(self):
        """The scheme's optimizers on the ps, and on the workers: two sets of names."""
        return self._center.optimizers.names, self._local.optimizers.names

    @property
    def global_step(self):
        """The number of updates."""
        return int(self.session.run(self._step))

    @property
    def replicas(self):
        """x of all workers, an array `[num_workers, size]`."""
        return self.rows(self._local.value)

    def rows(self, variable):
        """The values of a local variable on all workers, an array `[num_workers, ...]`."""
        return self.session.run(self._values[variable.ref()])[: self._shards.num_workers]

    def evaluate(self, *samples):
        """Returns loss and metrics of x̃, or of its average, on samples (x, y), or (x, y, weights): {name: number}."""
        key = str([(a.dtype, a.shape) for part in samples for a in arrays_in(part)])
        if key not in self._evaluations:
            with self.graph.as_default():
                feeds = [mapped(lambda array: tf.placeholder(array.dtype, array.shape), part) for part in samples]
                with found_by(self._center.find):
                    self._evaluations[key] = feeds, self._model.evaluate(self._evaluated, self._state, *feeds)
        feeds, results = self._evaluations[key]
        arrays = [a for part in samples for a in arrays_in(part)]
        places = [p for part in feeds for p in arrays_in(part)]
        return {name: float(v) for name, v in self.session.run(results, dict(zip(places, arrays, strict=True))).items()}

    def table(self, layer):
        """Returns the table of the layer of this name, an array `[rows, width]` in the order of its ids."""
        table = {each.spec.layer: each for each in self._center.tables}[layer]
        with self.graph.as_default():
            whole = tf.concat([piece.read_value() for piece in table.pieces], axis=0)
            return self.session.run(tf.gather(whole, table.places(np.arange(table.rows))))

    def close(self):
        """Closes the session."""
        self.session.close()


class Outcomes(NamedTuple):
    """The results of steps: arrays `[events]`; -1, or NaN, where a step has none.

    Attributes:
      pulled, updated, step_before, losses: see `common.scheme.Step`.
    """

    pulled: Any
    updated: Any
    step_before: Any
    losses: Any


def _switch(scheme, kind, branches):
    try:
        return tf.switch_case(kind, branches)
    except ValueError as error:
        if "is accessed from branch" not in str(error):
            raise
        raise UserError(
            f"{scheme.__name__} uses a tensor of another step: keep it in a vector, "
            '`yield local.assign(local.vector("start"), value)`'
        ) from error


def _outcome(step):
    """Returns the tensors of `Outcomes` of a step."""
    numbers = [tf.constant(-1, tf.int64) if n is None else n for n in (step.pulled, step.updated, step.step_before)]
    loss = tf.add_n(step.losses) / len(step.losses) if step.losses else tf.constant(np.nan, tf.float32)
    return [tf.identity(value) for value in (*numbers, loss)]


def _rows(variable, num_workers, i):
    """Returns a variable with a row for each worker, and one more for the initial value."""
    first = variable.read_value()
    rows = tf.tile(first[None], [num_workers + 1, *[1] * first.shape.rank])
    return tf.get_variable(f"rows_{i}", initializer=rows, trainable=False, collections=[], use_resource=True)


def _apart(rows, seeds, num_workers):
    """Returns operations that give the random number generators of each worker a state of its own."""
    own = tf.range(num_workers + 1)
    return [rows[v.ref()].assign_add(tf.cast(own, v.dtype)[:, None] * tf.constant([1, 0], v.dtype)) for v in seeds]


def _uses(operations, variables):
    """Returns the variables that operations and their dependencies read, and those that they write: two lists."""
    handles = {id(v.handle.op): v for v in variables}
    read, written, seen = set(), set(), set()
    todo = [getattr(each, "op", each) for each in operations]
    while todo:
        op = todo.pop()
        if id(op) in seen:
            continue
        seen.add(id(op))
        for tensor in op.inputs:
            todo.append(tensor.op)
            variable = handles.get(id(tensor.op))
            if variable is None:
                continue
            if op.type not in ("AssignVariableOp",):
                read.add(variable.ref())
            if op.type not in ("ReadVariableOp", "ResourceGather"):
                written.add(variable.ref())
        todo += op.control_inputs
    return [[v for v in variables if v.ref() in found] for found in (read, written)]


def _is_hidden(op):
    return op is None or op.is_stateful and all(each.type != tf.resource.as_datatype_enum for each in op.input_arg)


def _config(optimize):
    """One thread: the steps run one after the other, and results are bit-identical."""
    threads = {"intra_op_parallelism_threads": 1, "inter_op_parallelism_threads": 1, "use_per_session_threads": True}
    config = tf.ConfigProto(**threads)
    if not optimize:
        config.graph_options.rewrite_options.optimizers.extend(["function", "pruning", "dependency"])
    return config
