"""A timeline of a scheme's workers: a picture for the top of a notebook, drawn from the scheme itself.

The workers are those of `common.simulation.Replay`, on a problem of two parameters. The caller sets
the time of a local step and of a message. So the picture shows the order of events, not the speed of a machine.

A worker's bar shows one activity at a time. Only `send` and `receive` are drawn as overlapping with its steps (`BESIDE`), in a
lane of their own under the bar.
"""

import heapq
from typing import NamedTuple

from common.data import Batches, datasets
from common.models import keras_model
from common.simulation.replay import Replay

COLORS = {
    "pull": "tab:green",
    "train": "tab:blue",
    "push": "tab:orange",
    "dropped": "tab:red",
    "pull and push": "tab:purple",
    "send": "tab:orange",
    "receive": "tab:green",
    "wait": "lightgray",
}
BESIDE = "send", "receive"  # messages that overlap with the worker's steps


class Span(NamedTuple):
    """An activity of one worker over an interval."""

    worker: int
    part: str  # a key of COLORS
    start: float
    end: float
    steps: int  # number of local steps of a train


def part_of(action):
    """Returns the key of COLORS for a `common.simulation.Action`; None for an action without message and gradient."""
    if action.local_steps:
        return "train"
    if action.waits:
        return "receive" if action.reads else "wait"
    if action.fragment is not None:
        return "send"
    if action.writes:
        return "pull and push" if action.reads else "push"
    return "pull" if action.reads else None


def spans(scheme, hp, seconds=(1.0, 1.2, 1.7), message=0.6, until=20.0):
    """Returns the `Span`s of a scheme's workers, all of which start at 0.

    Args:
      scheme: generator function, see `common.scheme.steps`.
      hp: the scheme's hyperparameters, a namespace.
      seconds: time of a local step, per worker.
      message: time of a pull or a push; also of a `send` or a `receive`, during which the worker continues.
      until: time from which no step starts.
    """
    line, n = datasets.load("linear"), len(seconds)

    def make_batches(i):
        x, y = datasets.shard(line, i, n)
        return Batches(x, y, 32, seed=i, name=f"batches_{i}")

    replay = Replay(scheme, hp, keras_model.build("linear", line), make_batches, n)
    found: list[Span] = []
    waiting: dict[int, float] = {}
    latest = [0] * n  # index of each worker's last span
    there = [0.0] * n  # arrival time of each worker's prefetch
    sent = [0] * n  # number of `send`s of each worker
    made: list[float] = []  # time of each update from `send`s: arrival of the last worker's message
    received = [0] * n  # number of `receive`s of each worker
    heap: list[tuple] = []  # (end of a step, its start, worker)

    def begin(worker, now):
        action = replay.actions[replay.next_step(worker)]
        part, steps = part_of(action), action.local_steps
        if now >= until:
            return
        if replay.has_to_wait(worker):
            waiting[worker] = now
            return
        takes = steps * seconds[worker] if part == "train" else message if part and part != "wait" else 0.0
        if part == "send":
            found.append(Span(worker, part, now, now + message, 0))
            takes, sent[worker] = 0.0, sent[worker] + 1
            if min(sent) > len(made):  # the last message of this update; the ps reply without a request
                made.append(now + message)
                found.extend(Span(each, "receive", now + message, now + 2 * message, 0) for each in range(n))
        elif part == "receive":
            part, takes = "wait", max(0.0, made[received[worker]] + message - now)
            received[worker] += 1
        if action.ahead:
            takes, there[worker] = max(0.0, there[worker] - now), now + message
        if takes:
            latest[worker] = len(found)
            found.append(Span(worker, part, now, now + takes, steps))
        heapq.heappush(heap, (now + takes, now, worker))

    for worker in range(n):
        begin(worker, 0.0)
    while heap:
        now, _, worker = heapq.heappop(heap)
        dropped = len(replay.dropped)
        replay.step(worker)
        if len(replay.dropped) > dropped:  # known only once the push has arrived
            found[latest[worker]] = found[latest[worker]]._replace(part="dropped")
        begin(worker, now)
        for each in [w for w in waiting if not replay.has_to_wait(w)]:
            if now > waiting[each]:
                found.append(Span(each, "wait", waiting[each], now, 0))
            del waiting[each]
            begin(each, now)
    found += [Span(worker, "wait", start, until, 0) for worker, start in waiting.items() if start < until]
    replay.close()
    return found


def draw(scheme, hp, seconds=(1.0, 1.2, 1.7), message=0.6, until=20.0):
    """Shows the timeline of a scheme's workers; the arguments are those of `spans`."""
    import matplotlib.pyplot as plt

    found = spans(scheme, hp, seconds, message, until)
    figure, axes = plt.subplots(figsize=(11, 0.55 * len(seconds) + 0.9), layout="constrained")
    shown = [part for part in COLORS if any(span.part == part for span in found)]
    has_lanes = any(part in BESIDE for part in shown)
    bottom = 0.14 if has_lanes else 0.36
    for worker, part, start, end, steps in found:
        low, high = (0.18, 0.36) if part in BESIDE else (-0.36, bottom)
        axes.broken_barh([(start, end - start)], (worker + low, high - low), color=COLORS[part], lw=0)
        for k in range(1, steps):
            axes.plot([start + k * (end - start) / steps] * 2, [worker + low, worker + high], color="white", lw=1)
    one = all(span.steps == 1 for span in found if span.part == "train")
    names = {"train": "local step" if one else "local steps", "dropped": "push, thrown away"}
    names |= {"wait": "waits" if has_lanes else "waits for others"}
    names |= {"send": "send, beside the steps", "receive": "receive, beside the steps"}
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[part]) for part in shown]
    axes.legend(
        handles,
        [names.get(part, part) for part in shown],
        ncol=len(shown),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
    )
    axes.set(xlim=(0, until), ylim=(len(seconds) - 0.5, -0.5), xlabel="time")
    axes.set(yticks=range(len(seconds)), yticklabels=[f"worker {i}" for i in range(len(seconds))], xticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    plt.show()
