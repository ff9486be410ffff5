"""The steps of a scheme, and the conditions under which operations of a step are built.

A scheme is a generator function `scheme(center, local, hp)`. It gets the global parameters x̃ (center.py), this worker's local
ones x (local.py) and the hyperparameters, and yields the `Step`s of one round in their order: a step begins when the one
before has ended. Values that a later step needs stay in local variables, so the steps can run as one call (`build_rounds`) or,
in a notebook or a test, one at a time and in any interleaving (`build_steps`); both are in rounds.py.
"""

import contextlib
import contextvars
import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from common import tf
from common.core import UserError


@dataclass(frozen=True)
class Step:
    """One step of a round: operations and their results. `one + other` is a step that runs both concurrently.

    Attributes:
      operations: a tuple.
      losses: scalar tensors, the mean loss of each local training.
      pulled: the global step at which x̃ was read, an int64 scalar like the next two; None for a step without a read.
      updated: the global step after this worker's update of x̃; equal to `step_before` if its gradient was dropped.
      step_before: the newest update known to the worker before its own. None: the pulled step plus its own updates since.
      training_ended: whether another worker has ended the training; None if the step does not ask.
      may_go_on: whether this step would end at once; None if it never waits.
      ahead: the prefetch for the next step of its kind, a `ReadAhead`; None without prefetch.
      kept: the worker's operations that run after the ps have accepted or dropped its message; the worker does not wait for
        them before its next read of x̃.
      done: pairs (object, word), as (pace, "tick"). The object's `check_round` gets the words of a round.
    """

    operations: tuple = ()
    losses: tuple = ()
    pulled: Any = None
    updated: Any = None
    step_before: Any = None
    training_ended: Any = None
    may_go_on: Any = None
    ahead: Any = None
    kept: tuple = ()
    done: tuple = ()

    @property
    def part(self):
        """The part of a round in the timing of this step, one of `PARTS`."""
        if self.losses:
            return "train"
        if self.may_go_on is not None:
            return "wait"
        if self.updated is None and self.pulled is not None:
            return "pull"
        # A `tick` is one, too.
        return "push" if self.updated is not None or any(is_on_ps(op) for op in self.operations) else "train"

    def __post_init__(self):
        if (round := current_round.get()) is not None:
            round.made.append(self)

    def __add__(self, other):
        if not isinstance(other, Step):
            return NotImplemented
        if self.may_go_on is not None or other.may_go_on is not None:
            raise UserError("a step that waits cannot be added to another: yield it before or after that one")
        both = {}
        for field in dataclasses.fields(self):
            one, another = getattr(self, field.name), getattr(other, field.name)
            if isinstance(one, tuple):
                both[field.name] = one + another
            elif one is not None and another is not None:
                raise UserError(f"two steps that both have `{field.name}` cannot be one: yield them one after the other")
            else:
                both[field.name] = another if one is None else one
        return Step(**both)

    def fetches(self):
        """Returns the session fetches of the fields that are not None, {name: fetch}; `loss` is the mean of the losses."""
        found = {name: getattr(self, name) for name in ("operations", "pulled", "updated", "step_before")}
        if self.losses:
            found["loss"] = tf.add_n(self.losses) / len(self.losses) if len(self.losses) > 1 else self.losses[0]
        return {name: value for name, value in found.items() if value is not None}


class ReadAhead(NamedTuple):
    """A prefetch of x̃ by a step for a later step; only the later step waits for its arrival."""

    value: Any  # a tensor `[size]` on the worker
    step: Any  # the global step at which it was read, an int64 scalar on the ps
    keep: Any  # function of the number of this worker's updates since; returns operations that keep it for the next call


# Parts of a round: drawing the batches; reading x̃; gradients and local steps; sending, until the ps have applied the message;
# waiting at a barrier; the all-reduce among the workers.
PARTS = ("input", "pull", "train", "push", "wait", "all-reduce")


class RoundState:
    """State of the round under construction: dependencies of its next step, used optimizers, created steps."""

    def __init__(self, here, there, blocking, local=None):
        self.local = local  # the worker of the round
        self.num_packed = 0  # number of compressed vectors so far, see `common.scheme.compression`
        self.reads: list[Any] = []  # reads of the worker's variables, see `goes_with_step`
        self.operations = here + there
        self.here = here
        self.blocking = blocking
        self.timer: Any = None  # only in a timed round
        self.optimizers: dict[int, list[Any]] = {}
        self.made: list[Step] = []
        self.is_call = False  # whether all its steps run in one call
        self.ahead: ReadAhead | None = None  # prefetch by an earlier step of the call


current_round: contextvars.ContextVar[RoundState | None] = contextvars.ContextVar("current_round", default=None)


@contextlib.contextmanager
def building(round):
    token = current_round.set(round)
    try:
        yield round
    finally:
        current_round.reset(token)


def before_read(device):
    """Returns the dependencies of a read on this device: earlier operations there or on a worker, and all blocking ones.

    Operations on other ps are excluded: they would cost a message between ps tasks for an order that no scheme needs. A step
    that waits for other workers is blocking: reads on every ps run after it, though it waits on one ps.
    """
    round = current_round.get()
    if round is None:
        return []
    return [op for op in round.operations if op.device == device or not is_on_ps(op) or op in round.blocking]


def before_early_read(device):
    """As `before_read`, but without dependencies on the worker's operations.

    So the value is in transit while the worker trains. It is for a read after the worker's own push, since that push already
    depends on the worker's earlier operations.
    """
    round = current_round.get()
    return [op for op in round.operations if op.device == device or op in round.blocking] if round else []


def before_write(device):
    """Returns the dependencies of a write on a device: earlier operations there. The message itself carries the others."""
    round = current_round.get()
    return [op for op in round.operations if op.device == device] if round else []


def before_local():
    """Returns the dependencies of this step on the worker."""
    round = current_round.get()
    return list(round.here) if round else []


def before_all():
    """Returns all dependencies of this step, on any device."""
    round = current_round.get()
    return list(round.operations) if round else []


def goes_with_step(read):
    """Makes the current step end after this read of a worker variable, too, though only a ps uses the value."""
    if (round := current_round.get()) is not None:
        round.reads.append(read)


def made_with(thing, word):
    """Returns the worker's operations of all steps created for the current `yield` with this pair in `Step.done`."""
    round = current_round.get()
    made = [step for step in round.made if (thing, word) in step.done] if round else []
    return [op for step in made for op in step.operations if not is_on_ps(op)]


def is_call():
    """Returns whether the step under construction is part of a call of several steps."""
    round = current_round.get()
    return bool(round and round.is_call)


def read_ahead():
    """Returns the `ReadAhead` of an earlier step of this call, or None."""
    round = current_round.get()
    return round.ahead if round else None


@contextlib.contextmanager
def outside_of_rounds():
    """Builds operations without dependencies on steps, such as the initial value of a variable."""
    with building(None), tf.control_dependencies(None):
        yield


def worker():
    """Returns the `common.scheme.LocalParameters` of the current round's worker; None outside of rounds."""
    round = current_round.get()
    return round.local if round else None


def number_of_packed():
    """Returns the number of this vector among the compressed vectors of the round, from 0 on."""
    round: Any = current_round.get()
    round.num_packed += 1
    return round.num_packed - 1


def spent(part, make, after=()):
    """Returns the result of `make()`, tensors on the worker; a timed round records the duration of this part of a step.

    Args:
      part: name of the part, such as "input".
      make: function without arguments.
      after: operations and tensors that must end before it begins.
    """
    round = current_round.get()
    return round.timer.spent(part, make, after) if round and round.timer else make()


def own_operations(step):
    """Returns the worker's operations of a step that its next step depends on."""
    return [op for op in step.operations if not is_on_ps(op) and op not in step.kept]


def is_on_ps(operation):
    """Returns whether an operation is placed on a ps."""
    return "/job:ps" in operation.device
