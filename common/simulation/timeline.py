"""A timeline of a scheme's workers: a picture for the top of a notebook, drawn from the scheme itself.

The workers are those of `common.simulation.VirtualTime`. The caller sets the time of a local step and of a message; each round
is a session call. So the picture shows the order of events, not the speed of a machine.

A worker's bar shows one activity at a time. Messages that overlap with its steps (`BESIDE`) have a lane of their own under the
bar.
"""

from typing import NamedTuple

from common.data import datasets
from common.models import keras_model
from common.simulation.actions import Costs
from common.simulation.facts import facts_of
from common.simulation.shards import shards_of
from common.simulation.virtual_time import VirtualTime

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


def spans(scheme, hp, seconds=(1.0, 1.2, 1.7), message=0.6, until=20.0):
    """Returns the `Span`s of a scheme's workers, all of which start at 0.

    Args:
      scheme: generator function, see `common.scheme.steps`.
      hp: the scheme's hyperparameters, a namespace.
      seconds: time of a local step, per worker.
      message: time of a pull or a push; also of a `send` or a `receive`, during which the worker continues.
      until: time from which no step starts.
    """
    n, line = len(seconds), datasets.load("linear")
    facts = facts_of(scheme, hp, keras_model.build("linear", line), shards_of(line, n, 32, 0), 1)
    # Only the transfer of a message takes time: as many seconds as it has bytes.
    actions = [each._replace(up=message * each.writes, down=message * each.reads) for each in facts.actions]
    costs = Costs(step=seconds, bandwidth_up=1.0, bandwidth_down=1.0, rounds_per_call=1)
    clock = VirtualTime(actions, n, costs, facts.waiting, spans_until=until)
    schedule = clock.run(until=5 * until)  # so that what begins before has an end, too
    is_dropped = (schedule.pulled >= 0) & (schedule.updated == schedule.pulled)
    found: list[Span] = []
    for worker in range(n):
        found += _spans_of_worker(worker, clock, schedule.times[is_dropped & (schedule.workers == worker)], until)
    return sorted(found, key=lambda span: span.start)


def _spans_of_worker(worker, clock, dropped, until):
    """Returns the `Span`s of a worker, given the `VirtualTime` at its end, and the times of the worker's dropped pushes."""
    bar: list[Span] = []
    beside: list[Span] = []
    for kind in "train", "push", "pull":
        for *_, start, end, step in (each for each in clock.spans if (each.worker, each.part) == (worker, kind)):
            action, part = clock.actions[step], kind
            meanwhile = [span.end for span in bar if span.start < end and start < span.end]
            if kind == "push" and (meanwhile or action.fragment is not None):
                part = "send"  # the worker has gone on before its arrival
            elif kind == "push" and end in dropped:
                part = "dropped"
            elif kind == "pull" and action.is_early:
                part = "receive"
            elif kind == "pull":
                start = max([start, *meanwhile])  # of a prefetch, the time for which the worker waits
            if start < end:
                part = "pull and push" if action.reads and action.writes else part
                (beside if part in BESIDE else bar).append(Span(worker, part, start, end, action.local_steps))
    bar.sort(key=lambda span: span.start)
    ends, starts = [0.0, *(span.end for span in bar)], [*(span.start for span in bar), until]
    waits = [Span(worker, "wait", end, start, 0) for end, start in zip(ends, starts, strict=True) if end < start]
    return [*bar, *beside, *waits]


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
