"""Learning rate schedules by the global step for all schemes, and the side of weight decay, ps or worker.

With a schedule, `hp.learning_rate` of a scheme is a `Rate`: a number times a factor computed at the place of use.
"""

import contextlib
import contextvars
import math
from typing import Any

from common import tf
from common.core import SCHEDULES, Settings, UserError
from common.data import one_line, user_function


class Schedule:
    """The factor of the learning rate, as a function of the global step s, the number of previous updates.

    It is f(s) min(1, (s + 1)/w) for w steps of warm-up, where in a run of n updates, with p = (s − w)/(n − w) from 0 to 1,

        cosine:    f(s) = (1 + cos π p)/2         (Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts)
        linear:    f(s) = 1 − p
        FUNCTION:  f(s) = FUNCTION(s, n)
        None:      f(s) = 1

    Args:
      spec: "cosine", "linear", FILE.py:FUNCTION, or None.
      warmup_steps: w.

    Attributes:
      ask: function that returns n, to be set. It is called for the first factor, since n may be unknown before. Until it is
        set, all factors are 1, for rounds that are built only for counting.

    Raises:
      UserError: if the function does not exist.
    """

    def __init__(self, spec, warmup_steps):
        self._spec, self._warmup_steps, self._n = spec, warmup_steps, None
        self.ask: Any = None
        self._function: Any = None
        if spec is not None and spec not in SCHEDULES:
            if ":" not in spec:
                raise UserError(
                    f"--learning_rate_schedule must be one of {', '.join(SCHEDULES)} or FILE.py:FUNCTION, not {spec!r}"
                )
            self._function = user_function("--learning_rate_schedule", spec)

    @property
    def total(self):
        """n, the number of updates of the run."""
        if self._n is None:
            self._n = self.ask()
            if self._warmup_steps >= self._n:
                raise UserError(f"--warmup_steps={self._warmup_steps} must be less than the updates of the run, {self._n}")
        return self._n

    def __call__(self, step):
        """Returns the factor, a float32 scalar tensor, at a global step, a scalar tensor, or a number.

        Raises:
          UserError: if FUNCTION raises, or returns no number.
        """
        step = tf.cast(step, tf.float32)
        if self.ask is None:
            return 1.0 + 0.0 * step
        n, w = self.total, self._warmup_steps
        p = tf.clip_by_value((step - w) / float(n - w), 0.0, 1.0)
        if self._function:
            factor = self._call(step, n)
        else:
            factor = {"cosine": lambda: (1 + tf.cos(math.pi * p)) / 2, "linear": lambda: 1 - p}.get(self._spec, lambda: 1.0)()
        return factor * tf.minimum((step + 1) / float(w), 1.0) if w else factor

    def _call(self, step, n):
        try:
            factor = tf.cast(self._function(step, n), tf.float32)
        except Exception as error:
            raise self._error(f"raised {one_line(error)}") from error
        if factor.shape.rank != 0:
            raise self._error(f"returned a tensor of shape {factor.shape}")
        return factor

    def _error(self, what):
        call = f"--learning_rate_schedule={self._spec}: called with a step, a float32 scalar tensor, and {self._n}"
        return UserError(f"{call}, it {what}; expected a number or a scalar tensor, made by TensorFlow")

    def __str__(self):
        kind = (
            self._spec
            if self._spec in SCHEDULES
            else "constant"
            if self._spec is None
            else f"by {getattr(self._function, '__name__', 'a function')}"
        )
        warmup = f", after {self._warmup_steps:,} of warm-up" if self._warmup_steps else ""
        return f"learning rate {kind} over {self.total:,} updates{warmup}"


def schedule_of(settings):
    """Returns the `Schedule` of the flags, or None."""
    if settings.learning_rate_schedule is None and not settings.warmup_steps:
        return None
    return Schedule(settings.learning_rate_schedule, settings.warmup_steps)


_factor: contextvars.ContextVar[Any] = contextvars.ContextVar("_factor", default=None)


@contextlib.contextmanager
def factor_is(factor):
    """Sets the factor, a scalar tensor, of `Rate`s converted to tensors in this context."""
    token = _factor.set(factor)
    try:
        yield
    finally:
        _factor.reset(token)


class Rate:
    """A learning rate under a schedule: a number times the factor, computed at the place and time of use.

    In an update on a ps the factor is that of the current global step, on a worker that of the last pulled one. It can replace
    a number or a scalar tensor in an optimizer or a product.

    Args:
      number: the rate at factor 1.
      factor: function that returns the factor on this worker.
    """

    def __init__(self, number, factor):
        self._number, self._on_worker = number, factor

    def __tf_tensor__(self, dtype=None, name=None):
        factor = _factor.get()
        return tf.convert_to_tensor(self._number * (self._on_worker() if factor is None else factor), dtype, name)

    def __mul__(self, other):
        if isinstance(other, (int, float)):
            return Rate(self._number * other, self._on_worker)
        return tf.convert_to_tensor(self) * other

    __rmul__ = __mul__

    def __truediv__(self, other):
        if isinstance(other, (int, float)):
            return Rate(self._number / other, self._on_worker)
        return tf.convert_to_tensor(self) / other

    def __rtruediv__(self, other):
        return other / tf.convert_to_tensor(self)

    def __neg__(self):
        return self * -1.0

    def __add__(self, other):
        return tf.convert_to_tensor(self) + other

    __radd__ = __add__

    def __sub__(self, other):
        return tf.convert_to_tensor(self) - other

    def __rsub__(self, other):
        return other - tf.convert_to_tensor(self)


def hyperparameters(hp, center, local):
    """Returns the argument `hp` of a scheme; with a schedule its learning rates are `Rate`s.

    It also sets the weight decay of center or local, the optimizer of tables of center (`--table_optimizer`), and `hp.window`
    and `hp.overlap` (if the scheme has this flag) of local.

    `hp.optimizer_on` is the side of the optimizer in the scheme's paper. With "ps", all learning rates follow the schedule, and
    x̃ decays. With "worker", only the learning rate of the local steps does, and x decays.

    Args:
      hp: all settings; or only the flags that the scheme uses, with `optimizer_on` and `decay`, λ of the weight decay.
      center: the `common.scheme.GlobalParameters`.
      local: this worker's `common.scheme.LocalParameters`.
    """
    values = {"steps_per_call": 1, **vars(hp)}
    if run := values.pop("run", None):
        values |= {"optimizer_on": run.optimizer_on, "decay": 0 if "weight_decay" in run.own_flags else hp.weight_decay}
    local.overlap, local.window = bool(values.get("overlap")), values.get("window", 1)
    of_worker = "learning_rate" if values.get("local_learning_rate") is None else "local_learning_rate"
    is_on_worker = values.get("optimizer_on") == "worker"
    own = values.get("learning_rates") or []  # one per worker, for its own part of a sum
    if not is_on_worker and own:
        values["learning_rate"] = sum(own)
    if center.schedule is not None:
        for name in [of_worker] if is_on_worker else ["learning_rate", "local_learning_rate"]:
            if values.get(name) is not None:
                values[name] = Rate(values[name], local.factor)
        if own:
            values["learning_rates"] = [Rate(number, local.factor) for number in own]
    if center.tables and values.get("table_optimizer", "scheme") != "scheme":
        from common.scheme.lazy_adam import LazyAdam, SparseAdam
        from common.scheme.rowwise_adagrad import RowwiseAdagrad

        rate = values.get("table_learning_rate") or values["learning_rate"]
        if center.schedule is not None and not isinstance(rate, Rate):
            rate = Rate(rate, local.factor)
        kinds = {"sgd": tf.train.GradientDescentOptimizer, "adagrad": tf.train.AdagradOptimizer}
        kinds |= {"rowwise_adagrad": RowwiseAdagrad, "lazy_adam": LazyAdam, "sparse_adam": SparseAdam}
        center.optimizer_of_rows = kinds[values["table_optimizer"]](rate)
    if values.get("decay"):
        if is_on_worker:
            local.decay = values[of_worker] * values["decay"]
        else:
            center.decay = values["learning_rate"] * values["decay"]
    if center.groups is not None:
        center.groups_of_update = center.groups.only_frozen() if is_on_worker else center.groups
    if values.get("max_workers"):
        del values["num_workers"]
        return _Changing(**values, _local=local)
    return type(hp)(**values)


class _Changing(Settings):
    """The argument `hp` of a scheme in an elastic run."""

    @property
    def num_workers(self):
        """n, the number of workers at the last `local.compare(center)`, a float32 scalar on this worker.

        Raises:
          UserError: if the scheme has not called `compare` before.
        """
        if self._local.present is None:
            raise UserError(
                "--max_workers: the rule of this scheme uses the number of workers, which would change: leave it out"
            )
        return self._local.present.read_value()


def check_rates(center, last):
    """Raises a `UserError` if a scheme does not meet the requirements of its schedule and weight decay.

    Args:
      center: the `common.scheme.GlobalParameters`.
      last: the global step to stop at.
    """
    if center.schedule is not None and center.schedule.total != last:  # n was asked for too early
        raise UserError("a scheme must say before its first step how its workers wait, as with center.together(local)")
    is_grouped = center.groups is not None and center.groups_of_update is center.groups
    if (center.decay is not None or is_grouped) and not center.has_decayed:
        flag = "--groups" if center.decay is None else "--weight_decay"
        raise UserError(
            f"{flag}: no optimizer changes the global parameters in this scheme: its script must say "
            'Scheme(..., optimizer_on="worker")'
        )
