"""Estimates the cost of each scheme on your machines and links, and recommends one to begin with:

    python -m common.advise --parameters=25e6 --workers=8 --mbit=1000 --latency_ms=5 --step_ms=80

`common.cli.recommend` picks the scheme, by rules derived from measured runs. The cost model is the simulator's: the steps of a
round come from the scheme's own graph (`common.simulation`), their times from `common.simulation.virtual_time`. Nothing is
trained.
"""

import math
import re
from typing import NamedTuple

import numpy as np

from common.cli import arithmetic, notebook
from common.cli.api import as_arguments
from common.cli.recommend import recommend, rules
from common.cli.schemes import ROOT, scheme_in, script_of
from common.core import UserError, flags
from common.simulation import Costs, VirtualTime

MBIT = 1e6 / 8  # bytes per second
YES = {  # boolean facts of `common.cli.recommend`
    "tables": "whether the model has tables that are larger than a worker's memory",
    "exact": "whether each update must equal that of one machine with a larger batch, reproducibly",
    "come_and_go": "whether workers come and go, or die",
    "non_iid": "whether the data is non-IID across workers",
}
# In the order of README.md
SCHEMES = (
    *("HogWild", "Dynamic-SGD", "Ringmaster-ASGD", "DC-ASGD", "Semi-Synchronous-SGD", "Synchronous-SGD"),
    *("Synchronous-SGD-different-learning-rates", "DOWNPOUR-Easy", "DOWNPOUR", "AGN", "AEASGD", "AEAMSGD", "SAGN", "Local-SGD"),
    *("DiLoCo", "Streaming-DiLoCo", "SparseLoCo", "Asynchronous-DiLoCo", "Write-Your-Own-Scheme"),
)
# Variants of a scheme with their own script; the simulator cannot run them, and its error states the reason
SCRIPTS = {
    "Synchronous-SGD --by=all_reduce": "Synchronous-SGD/all_reduce.py",
    "Synchronous-SGD --by=sync_replicas_optimizer": "Synchronous-SGD/sync_replicas_optimizer.py",
}
# Flags of this program that a scheme's script has, too, with their defaults
SHARED = {"batch_size": 32, "compress": "none", "compress_pull": "none", "topk": None}
# Tried where messages are slow; 500 is H in DiLoCo's paper
WINDOWS = (20, 50, 100, 200, 500)
ENOUGH = 0.8  # share of worker time spent computing; below it, a scheme should send less


class Estimate(NamedTuple):
    """The steady-state cost of a scheme."""

    name: str  # folder of the scheme
    window: int  # its `--window`; 1 if it has none
    local_steps: int  # per worker and round
    round_seconds: float  # from the start of a worker's round to the start of its next, the mean over workers
    computing: float  # share of worker time spent in local steps; the rest is waiting, for messages or other workers
    barrier: float  # share of worker time spent waiting for other workers
    bytes_per_hour: float  # traffic of all workers, to and from the ps
    steps_per_second: float  # local steps of all workers
    ps_load: float  # utilization of the ps's links in the busier direction; 0 if their bandwidth is unlimited


def estimate(name, window, actions, waiting, num_workers, costs):
    """Returns the `Estimate` of a scheme from its rounds; the first few are left out, as all workers start at once.

    `actions` and `waiting` are those of `common.simulation.Facts`.
    """
    few = min(40, max(8, 4000 // num_workers))  # rounds per worker, on average
    first = max(2, few // 8)
    if waiting.staleness is not None and math.isfinite(waiting.staleness):
        first += math.ceil(4 * waiting.staleness)  # until fast workers have reached the staleness bound
    last = first + few
    clock = VirtualTime(actions, num_workers, costs, waiting, spans_until=math.inf)
    local_steps = sum(action.local_steps for action in actions)
    until, parts, made = float(np.mean(clock.step_means)) * local_steps, [], 0
    while made < last * num_workers:
        parts.append(clock.run(until=until))
        made += int(np.sum(parts[-1].steps == len(actions) - 1))
        until = 1.5 * until
    steps, times, seconds = (np.concatenate([getattr(part, key) for part in parts]) for key in ("steps", "times", "seconds"))
    ends = times[steps == len(actions) - 1]
    start, end = float(ends[first * num_workers - 1]), float(ends[last * num_workers - 1])
    worked = num_workers * (end - start)
    rounds = few * num_workers / (end - start)  # per second
    trained = seconds[(times > start) & (times <= end)].sum()
    waited = sum(max(0.0, min(s.end, end) - max(s.start, start)) for s in clock.spans if s.part == "wait")
    up, down = (sum(getattr(action, key) for action in actions) for key in ("up", "down"))
    return Estimate(
        name,
        window,
        local_steps,
        round_seconds=worked / (few * num_workers),
        computing=trained / worked,
        barrier=waited / worked,
        bytes_per_hour=3600 * rounds * (up + down),
        steps_per_second=rounds * local_steps,
        ps_load=rounds * max(up, down) / costs.ps_bandwidth / costs.num_ps,
    )


def costs_of(settings):
    """Returns the `common.simulation.Costs` given by the flags."""
    step = np.full(settings.workers, settings.step_ms / 1000)
    step[-1] *= settings.slow
    link, of_ps = (mbit * MBIT if mbit else math.inf for mbit in (settings.mbit, settings.ps_mbit))
    return Costs(
        step=step,
        step_cv=settings.step_cv,
        latency=settings.latency_ms / 1000,
        bandwidth_up=link,
        bandwidth_down=link,
        ps_bandwidth=of_ps,
        num_ps=settings.num_ps,
    )


def of_scheme(settings, name, window=None):
    """Returns the `Estimate` of one of `SCHEMES` or `SCRIPTS`; other flags of its script have their defaults.

    Raises a `UserError` if the simulator cannot run the scheme, or its script rejects the flags.

    Args:
      window: local steps per round, for schemes with several; None for `--window`, or else the scheme's default.
    """
    from common.scheme import compression_of
    from common.simulation import facts_of_size

    scheme = scheme_in(ROOT / SCRIPTS[name] if name in SCRIPTS else script_of(name))
    given = {key: getattr(settings, key) for key in SHARED} | {"num_workers": settings.workers, "num_ps": settings.num_ps}
    if scheme.defaults.get("window", 1) > 1:
        given["window"] = window or settings.window
    if "learning_rates" in scheme.own_flags:
        given["learning_rates"] = [0.1] * settings.workers
    hp = flags.parse(scheme.flag_values(), as_arguments(given), name)
    if scheme.check:
        scheme.check(hp)
    compression = compression_of(hp)
    facts = facts_of_size(scheme.function, hp, settings.parameters, settings.workers, settings.num_ps, compression)
    return estimate(name, hp.window, facts.actions, facts.waiting, settings.workers, costs_of(settings))


def main(arguments):
    """Runs the command."""
    settings = parse(arguments)
    notebook.quiet()  # after the flags are checked, as importing tensorflow takes seconds
    estimates, without = [], {}
    for name in (*SCHEMES, *SCRIPTS):
        try:
            estimates.append(of_scheme(settings, name))
        except UserError as error:
            without[name] = str(error)
    print("\n".join([assumed(settings), *needed(settings), "", *table(estimates, settings)]))
    for name, why in without.items():
        print(f"not in the table: {name}: {why}")
    print("", *advice(estimates, without, settings), sep="\n")


def own_flags():
    """Yields the flags of this program."""
    yield flags.number("parameters", None, "number of parameters of the model, such as 25e6", least=1)
    yield flags.integer("workers", None, "number of workers, equal except for --slow and --step_cv", least=2, most=1000)
    yield flags.number("step_ms", None, "milliseconds of a local step of a worker", above=0)
    yield flags.number("gflops", None, "in place of --step_ms: 10⁹ operations per second that a worker reaches", above=0)
    yield flags.number("uses", 1, "with --gflops: uses of a parameter per sample, such as its tokens", above=0)
    yield flags.integer("ps_slots", 0, "values that the optimizer of the ps keeps per parameter: Adam 2", least=0, most=8)
    yield flags.integer("worker_slots", 0, "the same of the worker's optimizer", least=0, most=8)
    yield flags.number("activation_mb", 0, "MB of the activations of a sample, kept for the backward pass", least=0)
    yield flags.number("memory_gb", None, "GB of memory of a worker's device (default: unknown)", above=0)
    yield flags.number("mbit", None, "Mbit/s of a worker's link each way (default: no limit)", above=0)
    yield flags.number("ps_mbit", None, "the same of each ps (default: --mbit)", above=0)
    yield flags.number("latency_ms", 0, "one-way latency of an empty message in milliseconds", least=0)
    yield flags.integer("num_ps", 1, "number of ps, which share the bytes of a message", least=1, most=10_000)
    text = "local steps of a round in schemes with several (default: the scheme's own)"
    yield flags.integer("window", None, text, least=1, most=100_000)
    yield flags.integer("batch_size", 32, "samples of a local step", least=1)
    yield flags.number("slow", 1, "step time of the straggler, relative to the other workers", least=1)
    yield flags.number("step_cv", 0, "coefficient of variation of step times (standard deviation / mean)", least=0, most=10.0)
    yield from (flag for flag in flags.of_every_scheme({}) if flag.name in ("compress", "topk", "compress_pull"))
    for name, text in YES.items():
        yield flags.boolean(name, False, text)


def parse(arguments):
    """Returns the settings of a command line, or raises a `UserError`."""
    settings = flags.parse(flags.table(*own_flags()), arguments, "common.advise")
    if settings.gflops and settings.step_ms:
        raise UserError("--gflops and --step_ms both give the time of a step: leave one of them out")
    if settings.uses != 1 and not settings.gflops:
        raise UserError(f"--uses={settings.uses:g} needs --gflops: add that, or leave --uses out")
    if settings.gflops and settings.parameters:
        uses = settings.uses * settings.batch_size
        seconds = arithmetic.step_seconds(settings.parameters, uses, 1e9 * settings.gflops)
        settings = settings.but(step_ms=1000 * seconds)
    for name, example in ("parameters", "25e6"), ("workers", "8"), ("step_ms", "80"):
        if getattr(settings, name) is None:
            raise UserError(f"--{name} is missing: give it, as --{name}={example} (--help lists all)")
    if settings.num_ps > settings.parameters:
        raise UserError(f"--num_ps={settings.num_ps} is more than the {settings.parameters:g} parameters: give fewer")
    return settings.but(ps_mbit=settings.ps_mbit or settings.mbit)


def assumed(settings):
    """Returns a line that describes the assumed machines and links."""
    link, of_ps = (f"{mbit:,g} Mbit/s" if mbit else "any speed" for mbit in (settings.mbit, settings.ps_mbit))
    slow = f", {settings.slow:g} times as long on one of them" if settings.slow > 1 else ""
    return (
        f"{settings.parameters:,.0f} parameters on {settings.num_ps} ps with a link of {of_ps}, which all workers share; "
        f"{settings.workers:,} workers with links of {link}, {settings.latency_ms:g} ms a message, {settings.step_ms:g} ms "
        f"a step{slow}"
    )


def needed(settings):
    """Returns lines on the memory and the messages that these settings need at least, by `common.cli.arithmetic`."""
    activations = 1e6 * settings.activation_mb * settings.batch_size
    on_ps = arithmetic.ps_bytes(settings.parameters, settings.ps_slots, settings.num_ps)
    in_worker = arithmetic.worker_bytes(settings.parameters, settings.worker_slots, activations)
    lines = [f"Memory, at least: {three(on_ps / 1e9)} GB on each ps, {three(in_worker / 1e9)} GB in a worker."]
    if settings.memory_gb and in_worker > 1e9 * settings.memory_gb:
        lines.append(f"More than the {settings.memory_gb:g} GB of a worker: take a smaller --batch_size or model.")
    if settings.ps_mbit:
        message, bandwidth = arithmetic.VALUE * settings.parameters, settings.ps_mbit * MBIT
        window = arithmetic.window_for(settings.workers, settings.step_ms / 1000, message, bandwidth, settings.num_ps)
        lines.append(
            f"Messages, uncompressed: {three(message / 1e9)} GB each way per round; the links of the ps carry those of "
            f"{settings.workers:,} workers with a window of {window:,} or more."
        )
    return lines


def table(estimates, settings):
    """Returns the lines of a table of all schemes."""
    rows = [("scheme", "local steps", "s a round", "waiting", "for others", "GB an hour", "samples/s")]
    for each in estimates:
        shares = (f"{share:.0%}" for share in (1 - each.computing, each.barrier))
        traffic, speed = each.bytes_per_hour / 1e9, each.steps_per_second * settings.batch_size
        rows.append((each.name, str(each.local_steps), three(each.round_seconds), *shares, three(traffic), three(speed)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def three(value):
    """Returns a positive number as text, with about three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1e-4 else f"{value:.1e}"


def advice(estimates, without, settings):
    """Returns the lines of the recommendation: the scheme, the reason, and the facts outside the measured range.

    `without` has the reason for each scheme that has no `Estimate`, {name: text}.
    """
    facts = ("parameters", "workers", "step_ms", "latency_ms", "mbit", "slow", "step_cv", *YES)
    rule, notes = recommend({name: float(getattr(settings, name) or 0) for name in facts})
    name, support = rule["scheme"], re.sub(r"\[.*?\]\((.*?)\)", r"\1", rule["support"].format(prefix=""))
    lines = [f"Begin with {name} ({rule.get('note') or rule['flags']}): {rule['says']}."]
    lines.append(f"Measured: {support}; {rule['why']}." + (f" In {rules()['target']}." if support.endswith(" s") else ""))
    lines += notes
    folder, _, variant = name.partition(", ")
    found = next((each for each in estimates if each.name == folder and not variant), None)
    if found is None:
        return lines + ([f"It does not work with these flags: {without[folder]}."] if folder in without else [])
    if rule["fact"] == "messages" and not settings.window:
        for longer in WINDOWS:  # the shortest that suffices, or else the longest
            if found.computing < ENOUGH and longer > found.window:
                found = of_scheme(settings, name, longer)
    window = f", with a window of {found.window}" if found.window > 1 else ""
    lines.append(f"Its workers compute for {found.computing:.0%} of their time{window}.")
    if found.computing < ENOUGH:
        lines.append(f"That is less than {ENOUGH:.0%}: send fewer bytes, as with --compress=int8 or SparseLoCo, or add ps.")
    if found.ps_load > 0.5:
        more = f"add ps to share the load, as with --num_ps={2 * settings.num_ps}"
        lines.append(f"The links of the ps are in use for {found.ps_load:.0%} of the time: {more}.")
    given = {"num_ps": settings.num_ps, "num_workers": settings.workers, "window": found.window if found.window > 1 else None}
    given |= {key: value for key, default in SHARED.items() if (value := getattr(settings, key)) != default}
    lines.append(" ".join([f"    bash {rule['folder']}/run.sh", *as_arguments(given), rule["flags"]]))
    lines.append("The learning rate is a starting point. Longer windows need more samples (Slow-Links/README.md).")
    return lines
