"""A thousand workers in one process: the scheme's own operations, run in the order of virtual time.

A scheme touches only its worker's local variables and the center. So the graph of one worker serves any number of workers:
the variables that a step reads are loaded from storage `[num_workers, ...]` before it, those that it writes are stored after
it. A schedule of steps runs as one session call, a loop in the graph.
"""

from typing import Any, NamedTuple

import numpy as np

from common import tf
from common.core import ROOM, UserError
from common.data import arrays_in, fed, mapped, order_of
from common.scheme import (
    GlobalParameters,
    LocalParameters,
    Pace,
    Rate,
    Step,
    Together,
    build_steps,
    found_by,
    fragments_of,
    hyperparameters,
    is_on_ps,
    steps_apart,
)
from common.simulation.virtual_time import RESTART, Action, Waiting

MOST_SAMPLES = 1_000_000  # sample indices fed to one session call
MOST_PARAMETERS = 2**30  # of a model in a graph


class Engine:
    """The steps of a scheme's workers, run in any order.

    Args:
      scheme: generator function, see `common.scheme.steps`.
      hp: the scheme's hyperparameters, a namespace.
      model: a `common.models.Model`.
      shards: the `Shards` of the workers.
      num_ps: pieces of the global parameters.
      schedule: a `common.scheme.Schedule` of the learning rate; None for none.
      last_of: function of `samples_per_update` that returns the global step at which the schedule ends; None if the schedule
        knows.
      clip_norm: see `common.scheme.LocalParameters`.
      compression: see `common.scheme.GlobalParameters`.
      messages: bytes (up, down) of each step, see `messages_of`; None for none.
      optimize: whether TensorFlow optimizes the graph first: takes a second, saved again within a thousand steps.

    Attributes:
      actions: the `common.simulation.Action`s of a round.
      waiting: the `common.simulation.Waiting` of the scheme.
      steps: the `common.scheme.Step`s of a round.
      samples_per_update: of all workers, a `Fraction`.
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
            options |= {"tables": model.tables, "max_rows": getattr(hp, "max_rows", ROOM)}
            self._center = center = _Center(model.initial_parameters, num_ps, **options)
            kinds, workers, starts = (tf.placeholder(tf.int32, [None], name) for name in ("kinds", "workers", "starts"))
            order = tf.placeholder(tf.int32, [None], "order")
            self._schedule = kinds, workers, starts, order
            feeds = dict(center.init_feed_dict)
            batches = _Batches(shards, order, feeds)
            before = set(tf.local_variables())
            batches.at = tf.constant(0)
            local = LocalParameters(
                *(center, model, batches, "worker", tf.constant(0), n),
                clip_norm=clip_norm,
                samples_of_each=shards.counts.tolist(),
            )
            self._local = local
            own = _per_worker(hyperparameters(hp, center, local), local)
            self.steps = build_steps(scheme, center, local, own)
            self.samples_per_update = _samples_per_update(_waiting_of(center, local), shards, local)
            if schedule and last_of:
                schedule.ask = lambda: last_of(self.samples_per_update)
            mine = [v for v in tf.local_variables() if v not in before]
            self._rows = {v.ref(): _rows(v, n, i) for i, v in enumerate(mine)}
            uses = [_uses(step.operations, mine) for step in self.steps]
            self._loop = self._build_loop(scheme, own, uses, batches, messages)
            self._value, self._step = center.read()[0], center.step.read_value()
            self._state = local.state_at(self._value)
            self._values = {reference: rows.read_value() for reference, rows in self._rows.items()}
            self._feeds = {**feeds, **local.init_feed_dict}
            self._begin_of_center = next(iter(center.init_feed_dict))
            self._initializers = [
                tf.global_variables_initializer(),
                tf.variables_initializer(tf.get_collection(_SHARED)),
                tf.local_variables_initializer(),
                [rows.initializer for rows in self._rows.values()],
                _apart(self._rows, model.seeds(local.state), n),
            ]
        self._evaluations: dict[Any, Any] = {}  # by the shapes of x and y
        self._config = _config(optimize)
        self.session: Any = None
        self.restart()

    def restart(self, shards=None, parameters=None):
        """Restarts training in a new session.

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
        if self.session:
            self.session.close()
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
                            stores.append(_store(rows[v.ref()], worker, v.read_value()))
                    with tf.control_dependencies([*step.operations, *stores]):
                        return _outcome(step)

                return run

            def restart():
                done, (x, step) = [], center.read()
                for v, kept in ((v, rows[v.ref()]) for v in self._variables()):
                    first = local.begins_as(v, x, step)
                    first = tf.gather(kept, local.num_workers) if first is None else first
                    done.append(_store(kept, worker, first))
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
        self.waiting = _waiting_of(center, local)
        self.actions = _actions(self.steps, trained, messages or [(0, 0)] * len(self.steps))
        return [array.stack() for array in arrays]

    def _variables(self):
        return [reference.deref() for reference in self._rows]

    @property
    def center(self):
        """x̃, an array `[size]`."""
        return self.session.run(self._value)

    @property
    def final(self):
        """x̃, and the state of the model there: the arguments of `common.models.Model.save`."""
        return self.session.run((self._value, self._state))

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
        """Returns loss and metrics of x̃ on samples (x, y), or (x, y, weights): {name: number}."""
        key = str([(a.dtype, a.shape) for part in samples for a in arrays_in(part)])
        if key not in self._evaluations:
            with self.graph.as_default():
                feeds = [mapped(lambda array: tf.placeholder(array.dtype, array.shape), part) for part in samples]
                with found_by(self._center.find):
                    self._evaluations[key] = feeds, self._model.evaluate(self._value, self._state, *feeds)
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


class Shards:
    """The training set, and the samples of each worker in it in their order, as `common.data.Batches` draws them.

    Args:
      samples: (x, y) or (x, y, weights) of all workers, see `common.data.Batches`.
      numbers: for each worker, an array of its sample indices; workers may have the same array.
      batch_size: samples per batch.
      seeds: for each worker, the seed of its sample order.

    Attributes:
      counts: number of samples of each worker, an array.
    """

    def __init__(self, samples, numbers, batch_size, seeds):
        self.samples, self.num_workers, self.batch_size = samples, len(numbers), batch_size
        self.counts = np.array([len(own) for own in numbers])
        self._offsets = np.concatenate([[0], np.cumsum(self.counts)[:-1]])
        orders = [order_of(len(own), seed) for own, seed in zip(numbers, seeds, strict=True)]
        self._first = np.concatenate([first for first, _ in orders])
        self._second = np.concatenate([own[second] for own, (_, second) in zip(numbers, orders, strict=True)])
        self._positions = np.zeros(self.num_workers, np.int64)

    def take(self, workers, sizes):
        """Returns the indices of the samples that workers draw next, concatenated, int32; and the start of each draw in them.

        Args:
          workers: `[draws]`.
          sizes: number of samples of each draw, `[draws]`.
        """
        starts = np.cumsum(sizes) - sizes
        # Position of each draw among its worker's samples: the sum of that worker's earlier draws.
        by_worker = np.argsort(workers, kind="stable")
        sums = np.cumsum(sizes[by_worker]) - sizes[by_worker]
        first_of = np.searchsorted(workers[by_worker], np.arange(self.num_workers))
        begun = np.append(sums, sums[-1] + sizes[by_worker][-1])[first_of] if len(workers) else sums
        position = np.empty(len(workers), np.int64)
        position[by_worker] = sums - begun[workers[by_worker]]
        position += self._positions[workers]
        np.add.at(self._positions, workers, sizes)
        owner = np.repeat(workers, sizes)
        k = np.repeat(position - starts, sizes) + np.arange(sizes.sum())
        n, offset = self.counts[owner], self._offsets[owner]
        place = self._first[offset + k % n] + k // n
        return self._second[offset + place % n].astype(np.int32), starts


def shards_of(dataset, num_workers, batch_size, seed, non_iid=None):
    """Returns the `Shards` of a data set for a number of workers.

    Args:
      dataset: a `common.data.Data`.
      num_workers, batch_size, seed: as the flags.
      non_iid: None for every n-th sample; else the concentration α of a Dirichlet distribution. The class shares q of a
        worker are drawn from Dir(α p), with p the shares in the whole data set; then its samples are drawn by q from the
        remaining ones, equally many for each worker (Hsu, Qi, Brown 2019, https://arxiv.org/abs/1909.06335).

    Raises:
      UserError: if there are too few samples, or no classes to divide them by.
    """
    n = dataset.num_samples
    if n < num_workers:
        raise UserError(
            f"{n:,} training samples are too few for {num_workers:,} workers: choose fewer --num_workers or other --data"
        )
    samples = tuple(mapped(lambda array: array[:], part) for part in dataset.train)
    seeds = range(seed, seed + num_workers)
    if non_iid is None:
        return Shards(samples, [np.arange(i, n, num_workers) for i in range(num_workers)], batch_size, seeds)
    y = samples[1]
    if not isinstance(y, np.ndarray) or y.ndim != 1 or y.dtype.kind not in "iu":
        raise UserError("--non_iid divides samples by their classes: expected labels that are whole numbers, one per sample")
    rng = np.random.default_rng(seed)
    _, classes, counts = np.unique(y, return_inverse=True, return_counts=True)
    left = [rng.permutation(np.flatnonzero(classes == c)).tolist() for c in range(len(counts))]
    numbers = []
    for _ in range(num_workers):
        # Gamma variates in log space, then normalized: with a small α, all shares of a Dirichlet sample may be 0.
        q = np.log(rng.gamma(non_iid * counts / n + 1)) + np.log(rng.random(len(counts))) / (non_iid * counts / n)
        q = np.exp(q - q.max())
        own = []
        for _ in range(n // num_workers):
            shares = q * [bool(some) for some in left]
            shares = shares if shares.sum() > 0 else np.array([float(len(some)) for some in left])
            own.append(left[rng.choice(len(left), p=shares / shares.sum())].pop())
        numbers.append(np.array(own))
    return Shards(samples, numbers, batch_size, seeds)


class _Batches:
    """Batches of the samples in the schedule: those of the current step start at `at` in `order`."""

    def __init__(self, shards, order, feeds):
        self.num_samples, self.batch_size, self._order = len(arrays_in(shards.samples[0])[0]), shards.batch_size, order
        self.init_feed_dict: dict = {}
        self.index_type = tf.int32
        self.at: Any = None
        self.drawn = 0  # samples drawn since the last reset
        with tf.variable_scope("samples"):
            self._samples = tuple(fed(name, part, feeds) for name, part in zip(("x", "y", "weights"), shards.samples))

    def next(self, window):
        size = window * self.batch_size
        indices = tf.slice(self._order, [self.at + self.drawn], [size])
        self.drawn += size
        return tf.reshape(indices, [window, self.batch_size])

    def batch(self, k):
        places = tf.range(k * self.batch_size, (k + 1) * self.batch_size) % self.num_samples
        return tf.gather(order_of(self.num_samples, 0)[0], places)

    def samples(self, indices):
        return tf.nest.map_structure(lambda kept: tf.gather(kept, indices), self._samples)


_SHARED = "variables_of_virtual_time"


class _Center(GlobalParameters):
    """x̃ for virtual workers, which are row indices instead of processes."""

    def clocks(self, local, staleness=0, quorum=None):
        return _Clocks(local.num_workers, staleness, quorum)

    def ring(self, local):
        raise UserError(
            "the workers of this scheme average among themselves within a step (center.ring), so one worker's graph cannot "
            "stand for all; Synchronous-SGD makes the same updates through the ps, and can be simulated"
        )

    def dynamic(self, local, most):
        raise UserError(
            "the workers of this scheme adapt their local steps to their speed on a real clock (center.dynamic), but a "
            "simulation has no real clock: use a fixed number of local steps"
        )


class _Clocks:
    """The counterpart of `common.core.Clocks` for `Together`, without bells: virtual time runs no step that must wait."""

    is_virtual = True

    def __init__(self, num_workers, staleness, quorum):
        self._quorum, self._num_workers, self.staleness = quorum or num_workers, num_workers, staleness
        shared = {"trainable": False, "collections": [_SHARED], "use_resource": True, "dtype": tf.int64}
        zeros = tf.zeros_initializer()
        self._clocks, self._pulled = (
            tf.get_variable(f"virtual_{name}", [num_workers], initializer=zeros, **shared) for name in ("clocks", "pulled")
        )

    def read(self):
        return self._clocks.read_value()

    def low(self, clocks):
        if self._quorum == self._num_workers:
            return tf.reduce_min(clocks)
        return tf.math.top_k(clocks, self._quorum).values[-1]

    def pulled(self, worker):
        return self._pulled.sparse_read(worker)

    def with_clock(self, clocks, worker, value):
        return tf.tensor_scatter_nd_update(clocks, [[worker]], [value])

    def change(self, before, after, worker):
        return [self._clocks.assign(after, read_value=False)]

    def may_go_on(self, worker):
        return tf.constant(True)  # virtual time decides

    def wait(self, worker):
        return [_store(self._pulled, worker, self.low(self.read()))]

    def tick(self, worker, after=()):
        return []

    def enter(self, worker):
        return ()

    leave = release = enter

    def behind(self, worker):
        return None


class _PerWorker(list):
    """Numbers, one for each worker, indexed also by a tensor: the worker is unknown while the graph is built."""

    def __init__(self, values, local):
        super().__init__(values)
        self._local = local

    def __getitem__(self, index):
        return _Chosen(self, self._local) if isinstance(index, tf.Tensor) else super().__getitem__(index)


class _Chosen(Rate):
    """The number of the worker whose step runs, looked up at each use."""

    def __init__(self, numbers, local):
        super().__init__(1.0, None)
        self._numbers, self._local = list(numbers), local

    def __tf_tensor__(self, dtype=None, name=None):
        numbers = [tf.convert_to_tensor(number, dtype or tf.float32) for number in self._numbers]
        return tf.gather(tf.stack(numbers), self._local.index, name=name)

    def __mul__(self, other):
        return tf.convert_to_tensor(self) * other

    __rmul__ = __mul__

    def __truediv__(self, other):
        return tf.convert_to_tensor(self) / other


def _per_worker(hp, local):
    values = {name: _PerWorker(v, local) if isinstance(v, list) else v for name, v in vars(hp).items()}
    return type(hp)(**values)


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


def _store(rows, index, value):
    """An operation that writes one row, in place."""
    return tf.raw_ops.ResourceScatterUpdate(resource=rows.handle, indices=index, updates=value)


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


def messages_of(scheme, hp, model, shards, num_ps, compression=None):
    """Returns the bytes that each step of a round sends to the ps, and receives from them: pairs (up, down).

    They are the sizes of the tensors on edges between devices in the graph of a worker in a cluster. A tensor of unknown size
    counts as 0 bytes.
    """
    return [[action.up, action.down] for action in facts_of(scheme, hp, model, shards, num_ps, compression).actions]


class Facts(NamedTuple):
    """The input of `VirtualTime`, in a fraction of the time of an `Engine`.

    These are a round's `common.simulation.Action`s, the scheme's `Waiting`, and two more attributes of an `Engine`.
    """

    actions: list
    waiting: Waiting
    samples_per_update: Any
    optimizers: Any


def facts_of(scheme, hp, model, shards, num_ps, compression=None):
    """Returns the `Facts` of a scheme without running it. Arguments and bytes are those of `messages_of`."""
    with tf.Graph().as_default() as graph:
        device_fn = tf.train.replica_device_setter(ps_tasks=num_ps, worker_device=_WORKER)
        options = {"compression": compression, "fragments": fragments_of(hp)}
        center = _Center(model.initial_parameters, num_ps, device_fn, **options)
        with tf.device(_WORKER):
            batches = _Batches(shards, tf.placeholder(tf.int32, [None]), {})
            batches.at = tf.constant(0)
            local = LocalParameters(center, model, batches, "worker", tf.constant(0), shards.num_workers)
            own = _per_worker(hyperparameters(hp, center, local), local)
            build_steps(scheme, center, local, own)  # first, so that operations made once count towards no step
            steps, trained, messages, next_step = [], [], [], steps_apart(scheme, center, local, own)
            earlier, begun = set(graph.get_operations()), local.local_steps
            while (step := next_step([tf.no_op()])) is not None:
                steps.append(step)
                trained.append(local.local_steps - begun)
                messages.append(_bytes_of(step, earlier))
                earlier, begun = set(graph.get_operations()), local.local_steps
    waiting = _waiting_of(center, local)
    samples = _samples_per_update(waiting, shards, local)
    return Facts(_actions(steps, trained, messages), waiting, samples, (center.optimizers.names, local.optimizers.names))


def _samples_per_update(waiting, shards, local):
    return (waiting.quorum or 1) * shards.batch_size * local.steps_per_update


def facts_of_size(scheme, hp, parameters, num_workers, num_ps, compression=None):
    """Returns the same as `facts_of` for any model of this many parameters, without allocating them."""
    size = min(int(parameters), MOST_PARAMETERS)
    samples = np.zeros([1, 1], np.float32), np.zeros([1, 1], np.float32)
    shards = Shards(samples, [np.zeros(1, int)] * num_workers, hp.batch_size, range(num_workers))
    facts = facts_of(scheme, hp, _Sized(size), shards, num_ps, compression)
    if parameters > size:  # the fixed part, such as the global step, is negligible at this size
        scale = parameters / size
        actions = [each._replace(up=round(scale * each.up), down=round(scale * each.down)) for each in facts.actions]
        facts = facts._replace(actions=actions)
    return facts


class _Sized:
    """A stand-in for a `common.models.Model` of a given size, for `facts_of`. It cannot be trained."""

    def __init__(self, size):
        self.size, self.initial_parameters, self.initial_state = size, np.broadcast_to(np.float32(0), [size]), []

    def loss_and_gradient(self, parameters, state, *samples):
        return parameters[0], tf.identity(parameters), state


def _waiting_of(center, local):
    waits = center.waits(local)
    if isinstance(waits, Pace):
        return Waiting(staleness=waits.staleness)
    if isinstance(waits, Together):
        return Waiting(quorum=waits.gradients_per_update, fragments=center.fragments)
    return Waiting(threshold=center.threshold(local))


_WORKER = "/job:worker/task:0"


def _bytes_of(step, earlier):
    """Returns the bytes that a step sends to the ps, and receives from them; `earlier` are the operations of other steps."""
    sizes, seen = {}, set()
    todo = [getattr(each, "op", each) for each in step.operations]
    while todo:
        op = todo.pop()
        if op in seen:
            continue
        seen.add(op)
        todo += [other for other in op.control_inputs if other not in earlier]
        for tensor in op.inputs:
            todo.append(tensor.op)
            sender, receiver = _place(tensor.op), _place(op)
            if tensor.dtype != tf.resource and is_on_ps(sender) != is_on_ps(receiver):
                size = (tensor.shape.num_elements() or 0) * tensor.dtype.size
                sizes[is_on_ps(receiver), tensor.name, receiver.device] = size
    down = 0 if step.pulled is None or step.ahead else step.pulled.dtype.size  # a prefetch includes its global step
    return [sum(size for (up, *_), size in sizes.items() if up), down + sum(size for (up, *_), size in sizes.items() if not up)]


def _place(op):
    """Returns the operation that determines the device of `op`: the handle of the variable it uses, if any, else itself."""
    return next((tensor.op for tensor in op.inputs if tensor.dtype == tf.resource), op)


def _actions(steps, trained, messages):
    """Returns the `Action`s of steps, given their numbers of local steps and their messages."""
    return [
        Action(
            local_steps=local_steps,
            up=up,
            down=down,
            reads=step.pulled is not None,
            writes=step.updated is not None,
            waits=step.may_go_on is not None,
            ticks=any(word == "tick" for _, word in step.done),
            fragment=next((int(word.split()[1]) for _, word in step.done if word.startswith("send")), None),
            is_early=any(word.startswith("receive") for _, word in step.done),
            ahead=step.ahead is not None,
        )
        for step, local_steps, (up, down) in zip(steps, trained, messages, strict=True)
    ]


def _config(optimize):
    """One thread: the steps run one after the other, and results are bit-identical."""
    threads = {"intra_op_parallelism_threads": 1, "inter_op_parallelism_threads": 1, "use_per_session_threads": True}
    config = tf.ConfigProto(**threads)
    config.graph_options.rewrite_options.disable_meta_optimizer = not optimize
    return config
