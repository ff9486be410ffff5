"""Rounds of a scheme as session calls: one step at a time, several rounds, a loop, timed rounds; checks of a round."""

from fractions import Fraction
from typing import Any, NamedTuple

from common import tf
from common.core import UserError
from common.scheme.round_size import RoundSize
from common.scheme.steps import ReadAhead, RoundState, Step, building, is_on_ps, own_operations


class Rounds(NamedTuple):
    """The fetches of one session call for some rounds of a scheme."""

    operations: Any
    loss: Any  # mean over the local trainings
    steps: Any  # int64 [updates, 2]: the newest update that the worker knew, and its own one, as global steps
    training_ended: Any = ()  # whether another worker has ended the training, if the scheme's steps ask
    parts: Any = ()  # {part: seconds} of the last round, if the rounds are timed
    # With `center.dynamic`: this worker's local steps in its session, and the local steps of all updates so far. If only the
    # number of gradients per update varies, the first is -1.
    local_steps: Any = ()


def build_steps(scheme, center, local, hp):
    """Returns the `Step`s of one round, to be run separately.

    Raises:
      UserError: if the round breaks a rule, see `build_rounds`.
    """
    steps, generator, begun = [], scheme(center, local, hp), (local.windows, local.local_steps)
    with building(RoundState([], [], [], local)) as round:
        while (step := _next_step(scheme, generator, round)) is not None:
            steps.append(step)
    _check_round(scheme, steps)
    _count_round(scheme, steps, local, begun)
    return steps


def steps_apart(scheme, center, local, hp):
    """Returns a function that builds the next `Step` of a round after the given operations on the worker.

    So each step can be in a separate graph, as a branch of a condition: it uses no tensor of the previous step.
    """
    generator, round = scheme(center, local, hp), RoundState([], [], [], local)

    def next_step(after):
        round.here, round.operations = list(after), list(after)
        with building(round):
            return _next_step(scheme, generator, round)

    return next_step


def build_rounds(scheme, center, local, hp, rounds=1):
    """Returns `Rounds` that run the scheme's steps in sequence, `rounds` times, in one call.

    The steps are sequential on the worker and on each ps; but after sending a push the worker does not wait for its application
    on the ps until it reads from there.

    A call costs as much as a message or two, so the fewer the better; its graph grows with the rounds.

    Raises:
      UserError: if a round does not train, read and change x̃, or fails the `check_round` of a used object.
    """
    chain = _Chain([], [], local)
    chain.add(scheme, center, local, hp, rounds)
    chain.end()
    ended = _or_nothing(chain.training_ended)
    counted = _counted(center, local, chain.here, chain.ended_on(center.step.device))
    return Rounds(chain.here + chain.there, chain.loss(), chain.steps(), ended, local_steps=counted)


def timed_rounds(scheme, center, local, hp, rounds):
    """Returns `Rounds` as `build_rounds` does, with the durations of the parts of the last round.

    If the worker reads after a push, the push lasts until the ps have applied it, and the read takes the remaining time.
    Otherwise the push overlaps with the worker's next steps. Only the last round is timed, since the first has no earlier push
    in flight.
    """
    chain = _Chain([], [], local)
    if rounds > 1:
        chain.add(scheme, center, local, hp, rounds - 1)
    chain.timer = _Timer(chain.here, chain.there)
    chain.here = [chain.timer.begin]
    chain.add(scheme, center, local, hp, 1)
    chain.end()
    ended, seconds = _or_nothing(chain.training_ended), chain.timer.seconds()
    counted = _counted(center, local, chain.here, chain.ended_on(center.step.device))
    return Rounds(chain.here + chain.there, chain.loss(), chain.steps(), ended, seconds, counted)


def repeat_rounds(scheme, center, local, hp, rounds, times):
    """Returns `Rounds` that repeat the rounds of `build_rounds` `times` times, in a graph loop, for calls of any length.

    Build the same rounds without a loop first, since an optimizer cannot create its slots in a loop. Each iteration costs three
    more messages, and with leased samples one from each ps: the worker leases after its pushes are applied. The loop ends early
    when another worker has ended the training.

    At the end the ps waits for a message that the worker is done. Otherwise both end at about the same time, and TensorFlow
    (2.20 and 2.21) leaks a kilobyte whenever a call is cleaned up before the worker's last thread has released it
    (`LocalRendezvous::StartAbort`): in 5 to 10 % of the calls, and with that message in 1 %.

    Args:
      times: number of iterations, an int32 scalar on the worker.
    """
    devices = sorted({piece.device for piece in [*center.targets, center.step]})
    tokens = []  # one per ps: the rounds so far have ended there; ps tasks send each other no messages
    for device in devices:
        with tf.device(device):
            tokens.append(tf.constant(0))
    with tf.device(center.step.device):
        no_steps = tf.zeros([0, 2], tf.int64)
    can_end = []

    def go_on(t, ended, *_):
        return (t < times) & ~ended

    def body(t, ended, here, there, loss, steps):
        chain = _Chain([here.op], [token.op for token in there], local)
        chain.add(scheme, center, local, hp, rounds)
        chain.end()
        mean_loss, more = chain.loss(), chain.steps()
        with tf.control_dependencies(chain.here):
            here = tf.identity(here)
        for i, device in enumerate(devices):
            with tf.device(device), tf.control_dependencies(chain.ended_on(device)):
                there[i] = tf.identity(there[i])
        with tf.device(center.step.device):
            steps = tf.concat([steps, more], axis=0)
        if chain.training_ended is not None:
            can_end.append(True)
            ended = chain.training_ended
        return t + 1, ended, here, there, loss + mean_loss, steps

    first = tf.constant(0), tf.constant(False), tf.constant(0), tokens, tf.constant(0.0), no_steps
    shapes = tf.nest.map_structure(lambda v: v.shape, first[:-1])
    longer = (*shapes, tf.TensorShape([None, 2]))
    t, ended, here, there, loss, steps = tf.while_loop(go_on, body, first, longer, parallel_iterations=1)
    loss, steps = loss / tf.cast(t, tf.float32), tf.identity(steps)
    counted = _counted(center, local, [here.op], [there[devices.index(center.step.device)].op])
    with tf.device(center.step.device), tf.control_dependencies([loss, steps, here, *there]):
        return Rounds(tf.no_op(), loss, steps, ended if can_end else (), local_steps=counted)


def _counted(center, local, here, there):
    """Returns `Rounds.local_steps`, after these operations on the worker and on the ps of the global step."""
    if center.local_steps is None:
        return ()
    with tf.control_dependencies(None), tf.control_dependencies(here):
        made = local.dynamic.made.read_value() if local.dynamic else tf.constant(-1, tf.int64)
    with tf.control_dependencies(None), tf.device(center.step.device), tf.control_dependencies(there):
        return made, center.local_steps.read_value()


class _Chain:
    """A sequence of rounds in one call.

    Args:
      here, there: operations on the worker and on the ps that must end before the first round.
      local: the worker's parameters.

    Attributes:
      here, there: the last operations on the worker and on the ps.
      training_ended: the value of the last step that has one.
      timer: timer of the rounds added from now on; None for no timing.
    """

    def __init__(self, here, there, local):
        with tf.control_dependencies([*here, *there]):
            local.begin_call()
        self.here, self.there = here, there
        self.training_ended: Any = None
        self.timer: _Timer | None = None
        self._losses: list[Any] = []
        self._blocking: list[Any] = []
        self._kept: list[Any] = []
        self._updates: list[Any] = []
        self._pulled: Any = None
        self._last: Any = None
        self._own_updates = 0
        self._ahead: ReadAhead | None = None
        self._own_since_ahead = 0

    def add(self, scheme, center, local, hp, rounds):
        """Adds `rounds` rounds."""
        round = RoundState(self.here, self.there, self._blocking, local)
        round.timer, round.is_call, round.ahead = self.timer, True, self._ahead
        for i in range(rounds):
            made = _variables()
            round.optimizers, round.num_packed, steps, generator = {}, 0, [], scheme(center, local, hp)
            begun = local.windows, local.local_steps
            while True:
                with building(round), tf.control_dependencies(self.here):
                    step = _next_step(scheme, generator, round)
                if step is None:
                    break
                steps.append(step)
                self._add(step, round)
            _check_round(scheme, steps)
            _count_round(scheme, steps, local, begun)
            if i > 0 and (new := _variables() - made):
                raise UserError(
                    f"{_name(scheme)} makes a new variable in every round, {sorted(new)[0]}: use local.vector or "
                    "center.slot, or an optimizer of tf.train, which keep theirs"
                )

    def _add(self, step, round):
        self._losses += step.losses
        if step.pulled is not None:
            lacking = 0 if step.ahead is None else self._own_since_ahead  # a prefetched x lacks this worker's updates since
            self._pulled, self._own_updates, self.there = step.pulled, lacking, []
        if step.ahead is not None:
            self._ahead = round.ahead = step.ahead
            self._own_since_ahead = 0
        if step.updated is not None and (step.step_before is not None or self._pulled is not None):  # others fail the check
            self._last = step.updated
            with tf.device(step.updated.device):
                before = self._pulled + self._own_updates if step.step_before is None else step.step_before
                self._updates.append(tf.reshape(tf.stack([before, step.updated], axis=-1), [-1, 2]))
            self._own_updates += 1
            self._own_since_ahead += 1
        if step.training_ended is not None:
            self.training_ended = step.training_ended
        on_ps = [op for op in step.operations if is_on_ps(op)]
        own = self.timer.end(step) if self.timer else own_operations(step)
        own, round.reads = own + round.reads, []
        self.here = own or self.here  # a step without operations on the worker passes on the earlier ones
        self._kept += step.kept
        if step.pulled is not None:
            self.here, self._kept = self.here + self._kept, []
        round.here = self.here
        self.there = self.there + on_ps  # on the ps since the last read
        # A push on the ps already depends on the worker's earlier operations: no need for another message.
        round.operations = self.there if on_ps else self.here + self.there
        if step.may_go_on is not None:
            round.blocking += step.operations

    def end(self):
        """Ends the call: keeps the prefetch and the error feedback for the next call."""
        if self._ahead is not None:
            with tf.control_dependencies(self.here):
                self.here = [*self.here, *self._ahead.keep(self._own_since_ahead)]
        self.here, self._kept = self.here + self._kept, []

    def ended_on(self, device):
        """Returns the dependencies of the next round on a ps: the operations there, and all blocking ones."""
        return [op for op in self.there if op.device == device or op in self._blocking]

    def loss(self):
        """Returns the mean loss of all rounds."""
        return tf.add_n(self._losses) / float(len(self._losses))

    def steps(self):
        """Returns `Rounds.steps`."""
        with tf.device(self._last.device):
            return tf.concat(self._updates, axis=0)  # on the ps, so that it is one message


class _Timer:
    """Timestamps of a round, on the worker.

    The worker's next operations depend on the timestamp of the previous ones. Otherwise a worker with few threads, all busy
    with training, would take the timestamp late and count training time as pull time. Nothing else waits for a timestamp.

    Attributes:
      begin: the operation that starts the round on the worker.

    Args:
      here, there: operations on the worker and on the ps that end before the round or are in flight when it begins.
    """

    def __init__(self, here, there):
        self._begin = self._stamp(here), self._stamp(there)
        self.begin = self._begin[0].op
        self._looks_at_ps = True  # until a step has trained, or ended on the worker
        self._steps: list[tuple[Any, Any, Any]] = []  # a step, and the end times of its operations on worker and ps
        self._within: list[tuple[str, str, Any]] = []  # a part, the enclosing part, and its seconds, a variable
        self._new: list[tuple[str, Any]] = []  # the same, for the current step

    def end(self, step):
        """Adds the next step of the round; returns the worker's operations that the step after it depends on."""
        there = [op for op in step.operations if is_on_ps(op)]
        here = own_operations(step)
        # A round with a read as first step begins when the ps is ready, so that timestamp is needed before the worker goes on.
        self._looks_at_ps = self._looks_at_ps and step.ahead is None
        looks, self._looks_at_ps = self._looks_at_ps, self._looks_at_ps and not here and step.part != "train"
        ended = self._stamp(here, [self._begin[1].op] if looks and step.part != "train" else []) if here else None
        self._steps.append((step, ended, self._stamp(there) if there else None))
        self._within += [(part, step.part, total) for part, total in self._new]
        self._new = []
        return [] if ended is None else [ended.op]

    def _stamp(self, operations, after=()):
        here = list(after)
        with tf.control_dependencies(None):
            for device in sorted({op.device for op in operations}):  # one message from each ps
                with tf.device(device), tf.control_dependencies([op for op in operations if op.device == device]):
                    here.append(tf.no_op())
            with tf.control_dependencies(here):
                return tf.timestamp()

    def spent(self, part, make, after):
        """See `common.scheme.steps.spent`. A variable accumulates the time, since this may be in a loop."""
        zero, place = tf.zeros_initializer(), [tf.GraphKeys.LOCAL_VARIABLES]
        # A separate scope each, since workers in threads of one process share a graph.
        with tf.control_dependencies(None), tf.variable_scope(None, "seconds"):
            total = tf.get_variable("total", [], tf.float64, zero, trainable=False, collections=place, use_resource=True)
        self._new.append((part, total))
        with tf.control_dependencies(tf.nest.flatten(after)):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            made = make()
        with tf.control_dependencies(tf.nest.flatten(made)):
            took = tf.maximum(tf.timestamp() - began, 0.0)  # the clock may be adjusted meanwhile
        with tf.control_dependencies([total.assign_add(took, read_value=False)]):
            return tf.nest.map_structure(tf.identity, made)

    def seconds(self):
        """Returns {part: seconds}, float64 scalars.

        The worker waits for its sent messages only at its next read from the ps; until then the ps's work costs it no time.
        A prefetching step waits only for the previous prefetch.
        """
        found: dict[str, Any] = {step.part: tf.constant(0.0, tf.float64) for step, _, _ in self._steps}
        now, then = self._begin
        begins_with_read = self._steps[0][0].part != "train" and self._steps[0][0].ahead is None
        now = tf.maximum(now, then) if begins_with_read else now
        on_their_way = [] if begins_with_read else [("push", then)]

        def until(part, end):
            nonlocal now
            found[part] = found.get(part, 0.0) + tf.maximum(end - now, 0.0)
            now = tf.maximum(end, now)

        for step, here, there in self._steps:
            if step.pulled is not None and step.ahead is None:
                for part, end in on_their_way:
                    until(part, tf.minimum(end, here))
                on_their_way = []
            elif there is not None and step.pulled is None:
                on_their_way.append(("push" if step.part == "train" else step.part, there))
            if here is not None:
                until(step.part, here)
        if begins_with_read:  # the next round begins with a read, too, and waits for the messages in flight
            for part, end in on_their_way:
                until(part, end)
        for part, whole, total in self._within:
            with tf.control_dependencies([now]):
                seconds = total.read_value()
            with tf.control_dependencies([seconds]), tf.control_dependencies([total.assign(0.0, read_value=False)]):
                seconds = tf.identity(seconds)  # after the reset, so that the next call begins at zero
            found[part], found[whole] = found.get(part, 0.0) + seconds, tf.maximum(found[whole] - seconds, 0.0)
        return found


def _or_nothing(value):
    return () if value is None else value


def _variables():
    return {variable.op.name for variable in [*tf.global_variables(), *tf.local_variables()]}


def _name(scheme):
    return getattr(scheme, "__name__", "the scheme")


def _next_step(scheme, generator, round):
    """Returns the next step of a round, None at its end; checks that it contains all steps created since the previous one.

    Otherwise an operation would be skipped, run twice, or run before the end of the previous step.
    """
    round.made = []
    step = next(generator, None) if hasattr(generator, "__next__") else generator
    if step is not None and not isinstance(step, Step):
        raise UserError(f"a scheme yields steps, such as `local.pull(center)`, not {type(step).__name__}")
    yielded = {id(operation) for operation in step.operations} if step else set()
    for other in round.made:
        if not {id(operation) for operation in other.operations} <= yielded:
            kinds = {"trains": other.losses, "waits": other.may_go_on, "reads x̃": other.pulled, "changes x̃": other.updated}
            kind = next((kind for kind, value in kinds.items() if value is not None and value != ()), "changes a vector")
            raise UserError(f"{_name(scheme)} makes a step that {kind} and does not yield it: write `yield` before it")
    if not yielded <= {id(operation) for other in round.made for operation in other.operations}:
        raise UserError(f"{_name(scheme)} yields a step made before an earlier `yield`: make each in its own `yield`")
    return step


def _check_round(scheme, steps):
    """Raises a `UserError` unless these steps form a valid round."""
    name = _name(scheme)
    if not any(step.losses for step in steps):
        raise UserError(f"{name} does not train: a round needs a `yield local.train(...)`")
    if not any(step.updated is not None for step in steps):
        raise UserError(f"{name} never changes the global parameters: a round needs a `yield center.push(...)`, or the like")
    things = {id(thing): thing for step in steps for thing, _ in step.done}
    for thing in things.values():
        words = []
        for step in steps:
            words += [word for other, word in step.done if other is thing]
            words += ["read"] * (step.pulled is not None) + ["change"] * (step.updated is not None)
        thing.check_round(name, words)
    knows = False
    for step in steps:
        knows = knows or step.pulled is not None
        if any(word.startswith("send") for _, word in step.done):
            continue  # the previous round, or the start, has read its reference value
        if step.updated is not None and not knows and (step.done or step.step_before is None):  # except for `Ring.publish`
            raise UserError(
                f"{name} changes the global parameters before it has read them: a round needs a `yield local.pull(center)`, or "
                "`local.compare(center)`, before that"
            )
    if any(step.ahead for step in steps) and any(step.step_before is not None for step in steps):
        raise UserError(
            f"{name} pulls ahead in updates of several workers: `local.pull_ahead(center)` is for workers that push alone"
        )
    if len({step.step_before is None for step in steps if step.updated is not None}) > 1:
        raise UserError(f"{name} both pushes alone and takes part in updates of several workers: a round does one of these")


def _count_round(scheme, steps, local, begun):
    """Records the size of a round, see `common.scheme.RoundSize`.

    Args:
      begun: the worker's windows and local steps before this round was built.

    Raises:
      UserError: if an earlier round had another number.
    """
    updates = sum(step.updated.shape.num_elements() for step in steps if step.updated is not None)
    windows, local_steps = begun
    found = RoundSize(updates, local.windows - windows, Fraction(local.local_steps - local_steps, updates))
    if local.round and local.round.steps_per_update != found.steps_per_update:
        raise UserError(
            f"{_name(scheme)} makes {found.steps_per_update} local steps for an update in one round, and "
            f"{local.round.steps_per_update} in another: all rounds must be alike, as samples are counted by the rounds that "
            "were built"
        )
    local.round = local.round or found
