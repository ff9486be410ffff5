"""x, a worker's local parameters: pull, local training of a window, and further local vectors."""

import contextlib
import functools
import math
import time
from typing import Any

from common import tf
from common.core import UserError, must_be_finite
from common.data import assign_part, local_variable, make_local
from common.scheme.groups import changed_by, decaying, scaled_by
from common.scheme.learning_rates import factor_is
from common.scheme.local_rows import Window
from common.scheme.local_steps import loop_of
from common.scheme.optimizers import Optimizers
from common.scheme.round_size import RoundSize
from common.scheme.steps import (
    ReadAhead,
    Step,
    before_early_read,
    before_local,
    goes_with_step,
    is_call,
    made_with,
    outside_of_rounds,
    read_ahead,
    spent,
)
from common.scheme.tables import ROW_BY_ROW, SCHEMES, found_by

STATE_SAMPLES = 2000  # sample size for re-estimating the moving means at evaluation


class LocalParameters:
    """x: a worker's copy of the parameters, and its model's state for computing gradients.

    Its initial value is a copy of x̃, so the global variables must be initialized before the local ones.

    Args:
      center: the `common.scheme.GlobalParameters`.
      model: a `common.models.Model`.
      batches: source of the next samples, see `common.data.Batches`.
      name: variable scope, unique per worker, since the ps name their records of a worker by it.
      index, num_workers: number of this worker, and number of workers.
      delay: extra seconds per call of `train`, to simulate a straggler.
      clip_norm: the largest norm of a step's gradient; a longer one is scaled down to it. None for no clipping.
      kept: variables with the initial state of this worker's model, see `GlobalParameters.keep`; empty for the model's own.
      samples_of_each: number of samples of each worker, a list; None in it for an endless stream. None: the same for all.
      begin_workers: initial number of workers of an elastic run, also an attribute; None in other runs.
      must_be_finite: whether `train` fails on a loss or gradient that is not finite, before others get its results, see
        `common.core.must_be_finite`; otherwise it goes on.

    Attributes:
      value: x, a variable `[size]`.
      state: untrained variables of the model.
      optimizers: the `common.scheme.Optimizers` that change x.
      windows: number of calls of `train`.
      decay: η λ of weight decay in each local step, see `train`; None for none.
      overlap: whether `pull` is `pull_ahead`, from `--overlap`.
      copies: the names of the vectors with the initial value of x, see `copy`.
      dynamic: the `common.scheme.Dynamic` of this worker, if it has one.
      window: local steps between two pulls, if there are tables; `common.scheme.hyperparameters` sets it.
      local_steps: total local steps of all calls of `train`; with `dynamic`, the maximum.
      round: the `common.scheme.RoundSize` of the first round that was built, for `size_of`; None before.
      present: in an elastic run, the number of workers at the last read of `compare`, a float32 variable; None elsewhere.
    """

    def __init__(
        self,
        center,
        model,
        batches,
        name="local",
        index=0,
        num_workers=1,
        delay=0.0,
        clip_norm=None,
        kept=(),
        samples_of_each=None,
        begin_workers=None,
        must_be_finite=False,
    ):
        self.model, self.batches, self.name, self._clip_norm = model, batches, name, clip_norm
        self.index, self.num_workers, self.delay = index, num_workers, delay
        self._samples_of_each, self.begin_workers = samples_of_each, begin_workers
        self._must_be_finite = must_be_finite
        self.init_feed_dict = dict(batches.init_feed_dict)
        with tf.variable_scope(name):
            self.value = local_variable("x", center.read()[0])
            self.state = []
            for i, value in enumerate(model.initial_state):
                if not kept:
                    feed = tf.placeholder(value.dtype, value.shape)
                    self.init_feed_dict[feed] = value
                self.state.append(local_variable(f"state_{i}", kept[i].read_value() if kept else feed))
            self._schedule, self._counts_updates = center.schedule, False
            self._known_step: Any = None
            if self._schedule is not None:
                with tf.device(center.step.device):
                    step = center.step.read_value()
                self._known_step = local_variable("known_step", step)
        self._vectors: dict[str, Any] = {}
        self.copies: set[str] = set()
        self._counters: dict[str, Any] = {}
        self.dynamic: Any = None
        self.present: Any = None
        self.overlap = False
        self._read_ahead: tuple[Any, ...] = ()
        self.decay = None
        self.optimizers = Optimizers()
        self.windows, self.local_steps = 0, 0
        self.round: RoundSize | None = None
        self.tables, self.find, self.window = center.tables, center.find, 1
        self._groups = center.groups
        self._window: Any = None
        self._left = 0  # remaining local steps with pulled rows

    def begin_call(self):
        """Called in each session call before its rounds; adds what its batches need first."""
        self.batches.begin_call()

    def window_of_tables(self, steps=None):
        """Returns the `common.scheme.Window` for the next pull; None if there are no tables. `steps` as of `pull`."""
        if not self.tables:
            return None
        steps = self.window if steps is None else steps
        if self._window is None:
            with outside_of_rounds(), tf.variable_scope(self.name):
                self._window = Window(self.tables, self.model, self.batches, steps, lambda: self.index)
        if self._left or self._window.steps != steps:
            raise UserError(
                f"with tables (common.Embedding) each pull is for {self._window.steps} local steps, all of them before the "
                "next pull: say local.pull(center, steps)"
            )
        self._left = steps
        return self._window

    def told_of_tables(self):
        """Returns the tensors for `common.scheme.what_travelled`."""
        return self._window.told() if self._window else ()

    def _only_vector(self, word):
        """Raises a `UserError` if there are tables, for features that need all parameters on the worker."""
        if self.tables:
            raise UserError(
                f"{word} needs all parameters on the worker, but tables (common.Embedding) are on the ps: use another scheme, "
                f"such as {SCHEMES}; or keras.layers.Embedding"
            )

    def state_at(self, parameters):
        """Returns the model state, tensors, at parameters `[size]` other than x, such as x̃; see `Model.state_at`."""
        count = math.ceil(min(self.batches.num_samples, STATE_SAMPLES) / self.batches.batch_size)
        state = [v.read_value() for v in self.state]
        with found_by(self.find):
            return self.model.state_at(parameters, state, lambda k: self.batches.samples(self.batches.batch(k)), count)

    def note(self, step):
        """Stores the pulled global step for the learning rate schedule; returns operations, none without a schedule."""
        if self._schedule is None or self._counts_updates:
            return []
        return [self._known_step.assign(step, read_value=False)]

    def counts_updates_in(self, variable):
        """Makes the schedule follow this variable, not the pulled step; each local step then counts as one more update."""
        self._known_step, self._counts_updates = variable, True

    def factor(self):
        """Returns the schedule's learning rate factor, a scalar tensor, at the last pulled global step."""
        with tf.control_dependencies(None), tf.control_dependencies(before_local()), tf.device(self.value.device):
            step = self._known_step.read_value()
            goes_with_step(step.op)  # or the next pull might note its own step before it is read
            return self._schedule(step)

    def _scheduled(self, t=None):
        """Returns a context with the learning rates of a window, or of its local step t if local steps count as updates."""
        if self._schedule is None or (t is not None) != self._counts_updates:
            return contextlib.nullcontext()
        return factor_is(self.factor() if t is None else self._schedule(self._known_step.read_value() + tf.cast(t, tf.int64)))

    def vector(self, name, size=None):
        """Returns a worker-local vector `[size]`, a variable, initially zero; the same one for the same name.

        Its size is that of x, unless one is given.
        """
        self._only_vector("local.vector")
        return self._own_vector(name, lambda: tf.zeros([size or self.model.size]))

    def copy(self, name):
        """Returns a worker-local vector `[size]` as `vector`, but initially a copy of x̃, like x."""
        self._only_vector("local.copy")
        self.copies.add(name)
        return self._own_vector(name, lambda: self.value.initial_value)

    def begins_as(self, variable, value, step):
        """Returns the initial value of a worker variable, if it is x̃, `value`, or the global step, `step`; else None."""
        ahead, ahead_step, _ = self._read_ahead or (None, None, None)
        if any(variable is each for each in (self.value, ahead, *(self._vectors[name] for name in self.copies))):
            return value
        return step if any(variable is each for each in (self._known_step, ahead_step)) else None

    def _own_vector(self, name, initial_value):
        if name not in self._vectors:
            with tf.control_dependencies(None), tf.variable_scope(self.name):
                self._vectors[name] = local_variable(name, initial_value())
        return self._vectors[name]

    def counter(self, name):
        """Returns a worker-local counter, an int64 variable, initially 0; the same one for the same name."""
        if name not in self._counters:
            with tf.control_dependencies(None), tf.variable_scope(self.name):
                self._counters[name] = local_variable(name, tf.zeros([], tf.int64))
        return self._counters[name]

    @property
    def gradient(self):
        """The sum of the gradients of the last local training, a variable `[size]`; with tables a `common.scheme.WithRows`."""
        return self._window.gradient(self._gradient) if self._window else self._gradient

    @property
    def _gradient(self):
        return self._own_vector("gradient", lambda: tf.zeros([self.model.size]))

    @property
    def share(self):
        """This worker's share of the samples of all workers, a number, or a scalar tensor in a simulation.

        Raises:
          UserError: if the samples never end, or workers come and go.
        """
        if self.begin_workers is not None:
            raise UserError("--max_workers: workers lease samples piece by piece, so none has a known share: leave it out")
        counts = self._samples_of_each or [1] * self.num_workers
        if None in counts:
            raise UserError("the training set never ends, so workers cannot be weighed by their shares of it (local.share)")
        shares = [count / sum(counts) for count in counts]
        return tf.gather(tf.constant(shares), self.index) if isinstance(self.index, tf.Tensor) else shares[self.index]

    @property
    def difference(self):
        """x − x̃ as `compare` found it, a variable `[size]`."""
        if "difference" not in self._vectors:
            raise UserError("local.difference is the result of `local.compare(center)`: yield that first")
        return self.vector("difference")

    def pull(self, center, steps=None):
        """x ← x̃. One message from each ps. With `--overlap` it is `pull_ahead`.

        With tables it draws the samples of the local steps until the next pull, and gets the rows that they need.

        Args:
          center: the `common.scheme.GlobalParameters`.
          steps: local steps until the next pull; `--window` by default.
        """
        if self.overlap:
            return self.pull_ahead(center)
        value, step = center.read(packed=True)
        window = self.window_of_tables(steps)
        rows = window.pull(step) if window else []
        return Step((self.value.assign(value, read_value=False), *self.note(step), *rows), pulled=step)

    def pull_ahead(self, center):
        """x ← x̃ as prefetched by the previous pull; this pull prefetches x̃ for the next one.

        So the transfer of x̃ overlaps with the worker's steps, and x lacks the worker's own pushes since the previous pull. The
        first pull gets the initial x̃ of the session. One message from each ps.
        """
        if self.tables:
            raise UserError("--overlap: rows of tables (common.Embedding) are not pulled ahead: leave it out")
        if not self._read_ahead:
            with outside_of_rounds(), tf.variable_scope(self.name):
                value, step = center.read()
                own = tf.zeros([], tf.int64)
                firsts = {"ahead": value, "ahead_step": step, "own_since_ahead": own}
                self._read_ahead = tuple(local_variable(name, first) for name, first in firsts.items())
        value, step, own = self._read_ahead
        if (before := read_ahead()) is not None:  # in this call
            x = before.value
            at = pulled = before.step
            changed = [self.value.assign(x, read_value=False)]
        else:
            x, at = value.read_value(), step.read_value()
            pulled = at + own.read_value()
            with tf.control_dependencies([pulled]):
                changed = [self.value.assign(x, read_value=False)]
        changed += self.note(at)
        x, at, on_ps = center.read(packed=True, before=before_early_read, tell=True)

        def keep(own_updates):
            variables = (value, x), (step, at), (own, own_updates)
            return [variable.assign(new, read_value=False) for variable, new in variables]

        with tf.control_dependencies(changed):
            kept = [] if is_call() else keep(0)
        return Step((*changed, *on_ps, *kept), pulled=pulled, ahead=ReadAhead(x, at, keep))

    def compare(self, center):
        """`difference` ← x − x̃. One message from each ps.

        In an elastic run it also counts the present workers, for `hp.num_workers`.
        """
        self._only_vector("local.compare")
        value, step = center.read(packed=True)
        noted = [*self.note(step), *self._count_workers(center)]
        return Step((self.vector("difference").assign(self.value - value, read_value=False), *noted), pulled=step)

    def _count_workers(self, center):
        if center.members is None:
            return []
        if self.present is None:
            with tf.control_dependencies(None), tf.variable_scope(self.name):
                self.present = local_variable("present", tf.ones([]))
        return [self.present.assign(center.count_workers(), read_value=False)]

    def add(self, difference):
        """x ← x + difference, a tensor `[size]`."""
        self._only_vector("local.add")
        with tf.control_dependencies(made_with(self, "give")):  # a fixed order of additions, for reproducible rounding
            changed = self.value.assign_add(difference, read_value=False)
        return Step((changed,), done=((self, "take"),))

    def check_round(self, name, words):
        """Raises a `UserError` if x keeps the compression error of `center.add` without a matching `local.add`."""
        if "give" in words and "take" not in words:
            raise UserError(
                f"{name}: with --compress, x keeps what center.add(e) does not send: yield center.add(e) + local.add(-e), or "
                "send by center.push"
            )

    def assign(self, vector, value, part=None):
        """vector ← value, a tensor `[size]`, for a worker-local vector, or for a slice of it, `part`.

        Raises:
          UserError: if `vector` is not a worker-local vector.
        """
        if not hasattr(vector, "assign"):
            raise UserError(f"local.assign changes a vector that local.vector(name) has returned, not {vector!r:.60}")
        if part is not None and (part.start, part.stop) != (0, int(vector.shape[0])):
            return Step((assign_part(vector, value, part),))
        return Step((vector.assign(value, read_value=False),))

    def train(self, window, optimizer, at=None, accumulate=False):
        """`window` local steps in one call: g ← gradient of the next batch's mean loss; x ← optimizer(x, g).

        `gradient` is then the sum of the g, each computed at the x of its step and clipped to `clip_norm`. With weight decay λ
        on the worker x ← x − η λ x precedes each step. With `--groups` both have the factors of a variable.

        Args:
          window: number of steps; `dynamic.steps` with `center.dynamic`, for a number by the worker's speed.
          optimizer: a `tf.train.Optimizer`, whose slots stay on this worker; or a function of g `[size]` that returns the
            operation for changing x.
          at: function of x that returns the point of the gradient; x itself by default.
          accumulate: whether the g are added to the present `gradient`, instead of to zero.
        """
        self.windows += 1
        if self.tables:
            self._check_tables(window, optimizer, at, accumulate)
        if isinstance(window, tf.Tensor) != (self.dynamic is not None):
            raise UserError("the window of local.train is a number; in a scheme with center.dynamic it is `dynamic.steps`")
        dynamic, first = self.dynamic, self._window.steps - self._left if self._window else 0
        self.local_steps += dynamic.most if dynamic else window
        self._left -= 0 if dynamic else window
        if dynamic:
            slept = [dynamic.begin(window, self.delay)]
        else:
            slept = [tf.py_func(lambda: time.sleep(self.delay), [], [])] if self.delay else []
        with tf.control_dependencies(slept):
            indices = self._draw(window, first, slept)
            begun = self._window.begin(optimizer, accumulate, self.optimizers) if self.tables else []
        x, before = self.value, self._gradient.read_value() if accumulate else tf.zeros([self.model.size])

        change = functools.partial(self._change, optimizer)

        def step(t):
            present = x.read_value()
            own = indices[t]
            samples = spent("input", lambda: self.batches.samples(own), own)
            loss, g, of_rows = self._loss_and_gradient(scaled_by(self._groups, at)(present) if at else present, *samples)
            first = [g, *begun] if window == 1 else [g]  # x is read before it is written
            if self._counts_updates or of_rows:  # other workers get g in this step, or rows are not in the sum of the g
                first += self._checked(loss, g, *(values for values, _ in of_rows))
            with tf.control_dependencies(first), self._scheduled(t):
                return loss, g, change(g, of_rows)

        with self._scheduled():
            if window == 1:
                loss, total, changed = step(0)
                total = before + total if accumulate else total
            else:
                # An unrolled window would cost tens of seconds of graph optimization. An optimizer's slots cannot be
                # created inside the loop, hence the call beforehand, whose operation is never run.
                change(before)
                loss, total, changed = loop_of(step, window, before, begun)
                loss /= tf.cast(window, tf.float32) if dynamic else window
        loss = tf.identity(loss)
        checked = self._checked(loss, total)
        if self._window:
            with tf.control_dependencies([changed]):
                changed = tf.group(changed, *self._window.keep())
        timed = dynamic.end(window, slept[0], [changed, loss]) if dynamic else []
        return Step((self._gradient.assign(total, read_value=False), loss.op, changed, *checked, *timed), (loss,))

    def _draw(self, window, first, after):
        """Returns the indices of the next batches, after these operations; with tables those of local step `first` on."""
        if self.tables:
            return self._window.batches_of(first, window)
        return spent("input", lambda: self.batches.next(window, *([self.dynamic.most] if self.dynamic else [])), after)

    def _change(self, optimizer, g, of_rows=()):
        """Returns the operation x ← optimizer(x, g), with weight decay before it; likewise for rows."""
        if of_rows:
            return self._change_rows(optimizer, g, of_rows)
        with changed_by(self._groups, self.value) as changes:
            with tf.control_dependencies([] if self.decay is None else [self._shrink(self.decay)]):
                changes.append(self.apply(optimizer, g) if isinstance(optimizer, tf.train.Optimizer) else optimizer(g))
        return changes[-1]

    def _checked(self, loss, *gradients):
        """Returns the finiteness checks that must end before others get the results of a local training."""
        return [must_be_finite(loss, gradients)] if self._must_be_finite else []

    def _check_tables(self, window, optimizer, at, accumulate):
        """Raises a `UserError` for arguments of `train` that tables do not support."""
        if at is not None or not isinstance(optimizer, tf.train.Optimizer):
            self._only_vector("local.train with `at`, or with a function in place of an optimizer,")
        if self._window is None:
            self._only_vector("local.train without a pull before it")
        if type(optimizer).__name__ not in ROW_BY_ROW:
            raise UserError(
                f"{type(optimizer).__qualname__} changes rows of a table (common.Embedding) without a gradient, too: on the "
                "workers choose GradientDescentOptimizer or AdagradOptimizer"
            )
        if self.decay is not None:
            raise UserError("--weight_decay changes every row of a table (common.Embedding) at each step: leave it out")
        if isinstance(window, tf.Tensor) or window > self._left:
            raise UserError(
                "with tables (common.Embedding) a worker trains at most the local steps for which its last pull got rows: say "
                "local.pull(center, steps)"
            )
        if accumulate and self._left == self._window.steps:
            raise UserError(
                "with tables (common.Embedding) the gradients of a push are those of the rows of one pull: --n_push must be "
                "--n_fetch or a divisor of it"
            )

    def _change_rows(self, optimizer, g, of_rows):
        """x ← optimizer(x, g), likewise for rows; sums the row gradients. Returns the operation."""
        pairs, added = [(g, self.value)], []
        for own, (values, at) in zip(self._window.own, of_rows, strict=True):
            pairs.append((tf.IndexedSlices(values, at), own.rows))
            added.append(own.add(values, at))
        optimizer = self.optimizers.use(optimizer)
        with tf.control_dependencies(added), tf.variable_creator_scope(make_local):
            return optimizer.apply_gradients(pairs)

    def apply(self, optimizer, g):
        """x ← optimizer(x, g), for use in a function passed to `train`. The optimizer's slots stay on this worker."""
        optimizer = self.optimizers.use(optimizer)
        with tf.variable_creator_scope(make_local):  # its slots
            return optimizer.apply_gradients([(g, self.value)])

    def adamw(self, learning_rate, weight_decay):
        """Returns AdamW as a function for `train`: x ← x − η λ x, then a step of Adam (https://arxiv.org/abs/1711.05101)."""
        adam, factor = tf.train.AdamOptimizer(learning_rate), learning_rate * weight_decay

        def change(g):
            with tf.control_dependencies([self._shrink(factor)]):
                return self.apply(adam, g)

        return change

    def _shrink(self, factor):
        """Returns the operation x ← x − factor x."""
        return self.value.assign_sub(factor * decaying(self._groups, self.value.read_value()), read_value=False)

    def optimizer(self, hp):
        """Returns the optimizer of `--local_optimizer`, for `train`."""
        rate = hp.local_learning_rate or hp.learning_rate
        if hp.local_optimizer == "momentum":
            return tf.train.MomentumOptimizer(rate, hp.local_momentum)
        kinds = {"sgd": tf.train.GradientDescentOptimizer, "adagrad": tf.train.AdagradOptimizer, "adam": tf.train.AdamOptimizer}
        return kinds[hp.local_optimizer](rate)

    def _loss_and_gradient(self, parameters, *samples):
        values, of_rows = (parameters, [v.read_value() for v in self.state], *samples), []
        if self.tables:
            weights = () if len(samples) > 2 else (None,)
            loss, gradient, state, of_rows = self.model.gradients(*values, *weights, self._window.own)
        else:
            loss, gradient, state = self.model.loss_and_gradient(*values)
        if self._clip_norm is not None and of_rows:
            gradient, of_rows = self._window.clipped(gradient, of_rows, self._clip_norm)
        elif self._clip_norm is not None:
            gradient = tf.clip_by_norm(gradient, self._clip_norm)
        with tf.control_dependencies([v.assign(s, read_value=False) for v, s in zip(self.state, state, strict=True)]):
            return tf.identity(loss), tf.identity(gradient), of_rows
