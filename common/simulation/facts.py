"""The facts of a scheme's round, read from its graph: local steps and messages of each step, waiting, samples per update."""

from typing import Any, NamedTuple

import numpy as np

from common import tf
from common.scheme import (
    LocalParameters,
    Pace,
    RoundSize,
    Together,
    build_steps,
    fragments_of,
    hyperparameters,
    is_on_ps,
    size_of,
    steps_apart,
)
from common.simulation.actions import Action, Waiting
from common.simulation.shards import ScheduledBatches, Shards
from common.simulation.virtual_cluster import VirtualCenter, per_worker

MOST_PARAMETERS = 2**30  # of a model in a graph
_WORKER = "/job:worker/task:0"


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
    size: RoundSize
    optimizers: Any


def facts_of(scheme, hp, model, shards, num_ps, compression=None):
    """Returns the `Facts` of a scheme without running it. Arguments and bytes are those of `messages_of`."""
    with tf.Graph().as_default() as graph:
        device_fn = tf.train.replica_device_setter(ps_tasks=num_ps, worker_device=_WORKER)
        options = {"compression": compression, "fragments": fragments_of(hp)}
        center = VirtualCenter(model.initial_parameters, num_ps, device_fn, **options)
        with tf.device(_WORKER):
            batches = ScheduledBatches(shards, tf.placeholder(tf.int32, [None]), {})
            batches.at = tf.constant(0)
            local = LocalParameters(center, model, batches, "worker", tf.constant(0), shards.num_workers)
            own = per_worker(hyperparameters(hp, center, local), local)
            build_steps(scheme, center, local, own)  # first, so that operations made once count towards no step
            steps, trained, messages, next_step = [], [], [], steps_apart(scheme, center, local, own)
            earlier, begun = set(graph.get_operations()), local.local_steps
            while (step := next_step([tf.no_op()])) is not None:
                steps.append(step)
                trained.append(local.local_steps - begun)
                messages.append(_bytes_of(step, earlier))
                earlier, begun = set(graph.get_operations()), local.local_steps
    waiting = waiting_of(center, local)
    size = size_of(center, local, shards.batch_size)
    return Facts(actions_of(steps, trained, messages), waiting, size, (center.optimizers.names, local.optimizers.names))


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


def waiting_of(center, local):
    """Returns the `Waiting` of the scheme whose round was built with these."""
    waits = center.waits(local)
    if isinstance(waits, Pace):
        return Waiting(staleness=waits.staleness)
    if isinstance(waits, Together):
        return Waiting(quorum=waits.gradients_per_update, fragments=center.fragments)
    return Waiting(threshold=center.threshold(local))


def actions_of(steps, trained, messages):
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


class _Sized:
    """A stand-in for a `common.models.Model` of a given size, for `facts_of`. It cannot be trained."""

    def __init__(self, size):
        self.size, self.initial_parameters, self.initial_state = size, np.broadcast_to(np.float32(0), [size]), []

    def loss_and_gradient(self, parameters, state, *samples):
        return parameters[0], tf.identity(parameters), state


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
