"""Runs schemes again and again, kills and stops their tasks at random times, and looks whether every run comes through.

    python tests/chaos.py --rounds=200 --seed=1            # prints a table
    python tests/chaos.py --rounds=1 --seed=1 --first=137  # that round again: the same scheme, faults and times
    python tests/chaos.py --rounds=100 --seed=1 --places   # workers join and leave as well
    python tests/chaos.py --rounds=100 --outages --clocks  # --seconds ends the runs; the clocks of the ps are set

A round is one run of a scheme through its launcher. At times drawn from the seed a task, drawn too, gets SIGKILL or SIGSTOP, or
the launcher gets SIGKILL and is started again with --resume. With --places a run has more places than workers; workers join,
are asked to leave, or get SIGTERM, as a machine that is taken away sends it. With --outages a run has to train for some
seconds, and its ps are killed so often that they are away for longer. With --clocks the wall clock of the ps is set an hour
forward or back every four seconds, for the code that asks for the time. With any of these three, updates are counted inside the
model, too, where a scheme's updates can be: `COUNTED`. `Round.problems` has what must hold in the end,
`Round._losses` how much training is lost with a ps. The folder of a round that failed is kept.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from runs import processes, wait_until_gone

from common.core.flags import UserError
from common.launch import control

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = Path(__file__).resolve().parents[1]

# Script, updates and flags of each scheme: some seconds of training on two cores, so that also a worker that was stopped at its
# first step, and comes back late, has its share: each knows a part of the samples alone.
SCHEMES = {
    "HogWild": ("hogwild.py", 12_000, ""),
    "DOWNPOUR": ("downpour.py", 3000, ""),
    "AEASGD": ("aeasgd.py", 2000, ""),
    "Synchronous-SGD": ("synchronous_sgd.py", 1000, ""),
    "Semi-Synchronous-SGD": ("semi_synchronous_sgd.py", 3000, ""),
    "DiLoCo": ("diloco.py", 800, ""),
}
# The same of schemes whose workers come and go.
COME_AND_GO = {
    "HogWild": SCHEMES["HogWild"],
    "DOWNPOUR": SCHEMES["DOWNPOUR"],
    "AGN": ("agn.py", 3000, ""),
    "Ringmaster-ASGD": ("ringmaster_asgd.py", 12_000, ""),
    "DC-ASGD": ("dc_asgd.py", 12_000, ""),
    "DOWNPOUR-Easy": ("downpour_easy.py", 3000, ""),
    "Dynamic-SGD": ("dynamic_sgd.py", 12_000, ""),
    "Asynchronous-DiLoCo": ("asynchronous_diloco.py", 1500, "--buffer_size=2"),
    "AEASGD": SCHEMES["AEASGD"],
    "Synchronous-SGD": SCHEMES["Synchronous-SGD"],
    "Semi-Synchronous-SGD": SCHEMES["Semi-Synchronous-SGD"],
    "DiLoCo": SCHEMES["DiLoCo"],
}
# Schemes whose every update subtracts the learning rate, this one, times a mean of gradients.
COUNTED, COUNTED_RATE = ("HogWild", "Synchronous-SGD", "Semi-Synchronous-SGD", "Ringmaster-ASGD"), 0.125
TRAIN_SECS = 6  # of a run with outages
MORE_PLACES = 2  # than workers at the beginning
TOGETHER = "Synchronous-SGD", "DiLoCo"  # schemes whose updates are of all workers
# Schemes whose workers have an optimizer of their own that begins with large steps, and so again when a worker comes back. If
# that is at the very end, they are in the final parameters. So the best of the last three evaluations counts here.
BEGINS_AGAIN = ("DOWNPOUR",)
# Schemes whose workers wait for each other: if a ps dies when all have ended, the chief cannot repeat lost updates alone.
WAITING = "Synchronous-SGD", "Semi-Synchronous-SGD", "DiLoCo"
HANG_SECS = 4
SECONDS = 300  # within which a run has to end, whatever happened to it; a large one may take `LARGE_SLOWER` times as long
SILENT_SECONDS = 150  # within which some worker has to report something
ACCURACY = 0.95
ACCURACY_OF_OUTAGES = 0.5  # after `TRAIN_SECS`, however few updates the machine makes in them
FAULTS_UNTIL = 10  # seconds after the tasks were started
CHECKPOINT_SECS = 1
# What may be lost beyond that, in seconds: a call that is under way, and metrics tell the step every half second.
MORE_SECS = 1.0
OUTAGE_SECS = 2.0  # without a line of metrics are an outage
BEGIN_SECS = 5.0  # from the moment at which the parameters have their values until the chief says so, on a busy machine
METRICS_SECS = 0.5  # from one line of metrics to the next
# Every eleventh round has 4 ps and 16 workers, so that each scheme has its turn. They take longer to start, and again. The
# gradients of sixteen workers that do not wait, or not for long, are too stale for the usual learning rate.
LARGE_EVERY, LARGE_TASKS, LARGE_SLOWER = 11, (4, 16), 4
# Twenty tasks on few cores take half a second to save; three times as long may be lost in addition: book/guide/survival.md.
LARGE_MORE_SECS = 2.0
LARGE_RATES = {"HogWild": 1 / 64, "Semi-Synchronous-SGD": 1 / 64}


@dataclass
class Round:
    """One run, what is done to it, and what came of it.

    Args:
      seed, number: all that is random is drawn from these two.
      folder: where the run writes.
      scheme: one of `SCHEMES`; by default the round's turn.
      has_places: workers come and go, too; the scheme is one of `COME_AND_GO`.
      has_outages: the run trains for `TRAIN_SECS`, and each ps is killed several times.
      has_odd_clocks: the clocks of the ps are set, see odd_clock.py.
      share: of the updates, and of the time in which there are faults: less than 1 for a short round.
    """

    seed: int
    number: int
    folder: Path
    scheme: str = ""
    has_places: bool = False
    has_outages: bool = False
    has_odd_clocks: bool = False
    share: float = 1.0
    injected: list = field(default_factory=list)  # (seconds, what, whom)
    seconds: float = 0.0
    gap: float = 0.0  # longest time without a line of metrics, from the first to the last
    losses: list = field(default_factory=list)  # seconds of training that were lost, each time that parameters were restored
    problem: str = ""
    _ends_of_parameters: list = field(default_factory=list)  # times at which a ps, or all tasks, got a signal
    _stops_of_chief: list = field(default_factory=list)  # times

    def __post_init__(self):
        drawn = random.Random(f"{self.seed}-{self.number}")
        self._schemes = COME_AND_GO if self.has_places else SCHEMES
        self.scheme = self.scheme or list(self._schemes)[self.number % len(self._schemes)]
        self.num_ps, self.num_workers = drawn.choice([1, 1, 2]), drawn.choice([2, 2, 3])
        self._is_large = is_large = self.number % LARGE_EVERY == LARGE_EVERY - 1 and not self.has_places
        if is_large:
            self.num_ps, self.num_workers = LARGE_TASKS
        self._slower = LARGE_SLOWER if is_large else 1
        self._counts = self.scheme in COUNTED and (self.has_places or self.has_outages or self.has_odd_clocks)
        self._rate = LARGE_RATES.get(self.scheme, 0.0) if is_large else 0.0  # 0: that of the scheme
        if self._counts:
            self._rate = self._rate or COUNTED_RATE
        tasks = [("ps", i) for i in range(self.num_ps)] + [("worker", i) for i in range(self.num_workers)]
        self.plan: list[tuple] = []
        until = FAULTS_UNTIL * self._slower * self.share
        for _ in range(drawn.randint(1, 3)):
            kind = drawn.choices(["SIGKILL", "SIGSTOP", "launcher"], [6, 3, 1])[0]
            whom = drawn.choice(tasks)
            self.plan.append((drawn.uniform(0, until), kind, None if kind == "launcher" else whom))
        for _ in range(drawn.randint(3, 5) if self.has_outages else 0):
            self.plan.append((drawn.uniform(0, 2 * until), "SIGKILL", ("ps", drawn.randrange(self.num_ps))))
        self.places = self.num_workers + (MORE_PLACES if self.has_places else 0)
        for _ in range(drawn.randint(2, 5) if self.has_places else 0):
            kind = drawn.choices(["join", "leave", "SIGTERM"], [3, 1, 1])[0]
            number = drawn.randrange(1, self.places)
            self.plan.append((drawn.uniform(0, until), kind, ("worker", number) if kind == "SIGTERM" else None))
        self.plan.sort(key=lambda fault: fault[0])

    def run(self):
        """Runs it to the end; `problem` is empty if all is well."""
        first = time.monotonic()
        process = self._start()
        status = None
        try:
            began = self._wait_for_tasks(process)
            for at, kind, whom in self.plan:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(max(0.0, began + at - time.monotonic()))
                    break  # it has ended before
                if kind == "launcher":
                    process = self._kill_launcher(process, at)
                elif kind in ("join", "leave"):
                    self._ask(at, kind)
                else:
                    self._signal(at, kind, whom)
            status = self._wait_for_end(process)
        except subprocess.TimeoutExpired:
            status = "hung"
            process.kill()
            process.wait()
        self.seconds = time.monotonic() - first
        try:
            self.problem = next(self.problems(status), "")
        except (OSError, LookupError, ValueError) as error:  # of a file that is not there, or not what it should be
            self.problem = f"{type(error).__name__}: {error}"
        for pid in processes(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self

    def _start(self):
        script, all_steps, more = self._schemes[self.scheme]
        steps = round(all_steps * self.share)
        if self.scheme not in TOGETHER:
            steps *= self._slower  # of sixteen workers, the last begins when the first have trained for long
        resume = ["--resume"] if any(self.folder.glob("checkpoints/*.index")) else []
        flags = [f"--num_ps={self.num_ps}", f"--num_workers={self.num_workers}", *resume]
        flags += [f"--seconds={TRAIN_SECS * self._slower}", "--epochs=1e9"] if self.has_outages else [f"--steps={steps}"]
        if self.has_odd_clocks or self._counts:
            flags.append(f"--model=tests/{'odd_clock' if self.has_odd_clocks else 'counting_model'}.py:build")
        flags += [f"--learning_rate={self._rate}"] if self._rate else []
        flags += [*more.split(), *([f"--max_workers={self.places}"] if self.has_places else [])]
        patient = self._slower * (3 if self.has_odd_clocks else 1)  # the check of a model is a call, too
        flags += [f"--hang_secs={HANG_SECS * patient}", f"--checkpoint_secs={CHECKPOINT_SECS}", "--max_restarts=10"]
        flags.append(f"--run_dir={self.folder}")
        with open(f"{self.folder}.out", "a") as out:
            return subprocess.Popen(
                [sys.executable, str(ROOT / self.scheme / script), "--launch", *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
            )

    def _wait_for_tasks(self, process):
        """Waits until there are tasks, and with outages until they train, or until the run has ended; returns the time."""

        def are_there():
            return self._reported() if self.has_outages else processes(self.folder, "--job_name=worker")

        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and not are_there():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
                break
        return time.monotonic()

    def _wait_for_end(self, process):
        """Returns the exit status, or raises `TimeoutExpired` if the run hangs."""
        end, reported = time.monotonic() + SECONDS * self._slower, 0
        while True:
            silent_until = min(end, time.monotonic() + SILENT_SECONDS)
            while time.monotonic() < silent_until and reported == (newest := self._reported()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(1)
            if reported == newest:
                raise subprocess.TimeoutExpired(process.args, SECONDS)
            reported = newest

    def _reported(self):
        """How many bytes of metrics the workers have written."""
        return sum(path.stat().st_size for path in self.folder.glob("metrics/*.jsonl"))

    def _signal(self, at, kind, whom):
        for pid in processes(self.folder, f"--job_name={whom[0]}", f"--task_index={whom[1]}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[kind])
                self._note(at, kind, f"{whom[0]} {whom[1]}")

    def _ask(self, at, kind):
        with contextlib.suppress(UserError):  # all places are taken, or only worker 0 is there, or the launcher starts
            self._note(at, kind, control.ask(self.folder, kind, 1))

    def _note(self, at, kind, whom):
        self.injected.append((round(at, 2), kind, whom))
        if not whom.startswith("worker"):
            self._ends_of_parameters.append(time.time())
        elif (kind, whom) == ("SIGSTOP", "worker 0"):
            self._stops_of_chief.append(time.time())

    def _kill_launcher(self, process, at):
        process.kill()
        process.wait()
        self._note(at, "SIGKILL", "launcher")
        left = wait_until_gone(processes(self.folder))  # they end with it, but it cannot wait for them any more
        if left:
            self.injected.append((round(at, 2), "left", f"processes {left}"))
        return self._start()

    def problems(self, status):
        """Yields what is wrong with the run, the first is the worst: each a line."""
        if status == "hung":
            yield f"hung: no report of any worker for {SILENT_SECONDS} s, or no end within {SECONDS * self._slower} s"
        if status != 0:
            last = Path(f"{self.folder}.out").read_text(errors="replace").splitlines()[-1:]
            yield f"exit status {status}: {' '.join(last)}"
        if processes(self.folder) or any(what == "left" for _, what, _ in self.injected):
            yield f"processes left: {processes(self.folder) or self.injected}"
        lines: list[dict] = []
        for path in self.folder.glob("metrics/*.jsonl"):
            lines += map(json.loads, path.read_text().splitlines())
        accuracy = json.loads((self.folder / "result.json").read_text())["test_accuracy"]
        if self.scheme in BEGINS_AGAIN:
            evaluated = sorted((line["time"], line["test_accuracy"]) for line in lines if "test_accuracy" in line)
            accuracy = max(accuracy for _, accuracy in evaluated[-3:])
        if accuracy < (ACCURACY_OF_OUTAGES if self.has_outages else ACCURACY):
            yield f"test accuracy {accuracy:.3f}"
        training = sorted((line["time"], line["global_step"], line["train_seconds"]) for line in lines if "samples" in line)
        yield from self._losses(training, sorted((line["time"], line) for line in lines if "parameters" in line))
        self.gap = max((after[0] - before[0] for before, after in zip(training, training[1:])), default=0.0)
        restored = [line["time"] for line in lines if line.get("parameters", "").startswith("restored")]
        for worker in range(self.places):
            reports = [line for line in lines if "samples" in line and line["worker"] == worker]
            own = sorted((line["time"], line["global_step"]) for line in reports)
            since = [0.0, *(time for time, _ in own)]  # a line may be of a call that ended just before, and be written late
            for before, (_, reached), (after, step) in zip(since, own, own[1:]):
                if step < reached and not any(before < time < after + MORE_SECS for time in restored):
                    yield f"worker {worker} was at step {step} after step {reached}, though no parameters were restored"
        yield from self._unreadable()
        yield from self._seconds(training)
        if self._counts:
            yield from self._miscounted(len(restored))

    def _miscounted(self, restored):
        """Yields what is wrong with the updates that `result.json` tells, whose samples it derives from them.

        A ps that is saved, or a worker that dies, may be between an update and its count, once for each worker.
        """
        import keras

        model = keras.models.load_model(self.folder / "model.keras")
        counted, told = -float(model.layers[-1].total) / self._rate, json.loads((self.folder / "result.json").read_text())
        if abs(counted - told["global_steps"]) > 0.5 + self.places * (restored + len(self.injected)):
            yield f"{told['global_steps']} updates are told, {counted:.0f} were made"
        gradients = self.num_workers if self.scheme in TOGETHER else 1
        samples = (told["global_steps"] * gradients + told["gradients_dropped"]) * told["batch_size"]
        if samples != told["samples"] and not (self.has_places and self.scheme in TOGETHER):  # of so many as are there
            yield f"{told['samples']:,} samples are told, {told['global_steps']} updates take {samples:,}"

    def _seconds(self, training):
        """Yields what is wrong with the seconds of training: neither an outage counts, nor updates that were lost with a ps."""
        from common import tf
        from common.core.checkpoints import newest_good_checkpoint

        result = json.loads((self.folder / "result.json").read_text())
        seconds = tf.train.load_variable(newest_good_checkpoint(self.folder / "checkpoints"), "seconds")
        says_what_is_lost = "were lost with a ps and not all repeated" in Path(f"{self.folder}.out").read_text(errors="replace")
        is_lost = says_what_is_lost and self.scheme in WAITING
        if self.has_outages and seconds < TRAIN_SECS * self._slower and not is_lost:
            yield f"it has trained for {seconds:.1f} s"
        pauses = [after[0] - before[0] for before, after in zip(training, training[1:])]
        most = sum(min(pause, OUTAGE_SECS) for pause in pauses) + 2 * OUTAGE_SECS  # before the first line and after the last
        if self.has_outages and seconds > most:
            yield f"it says {seconds:.1f} s of training, of which {most:.1f} s at most can be true"
        took, speed = result["train_seconds"], result["samples_per_second"]
        if took is not None and not (0 < took <= seconds + 1 and speed > 0):
            yield f"{took} s of training, {speed} samples/s, though the parameters were trained for {seconds:.1f} s"

    def _losses(self, training, begins):
        """Yields what is wrong with where training went on, each time that the chief gave the parameters their values.

        Args:
          training: (time, global step, seconds of training) of all lines of metrics, sorted.
          begins: (time, line) of those of the chief that say with which parameters it begins, sorted.
        """
        for (before, known), (now, line) in zip(begins, begins[1:]):
            step = line["global_step"]
            faults = [time for time in self._ends_of_parameters if before - BEGIN_SECS < time < now]
            # The chief says that it begins when it has saved the parameters, so a ps may die a moment before that line.
            fault = min((time for time in faults if time > before), default=max(faults, default=None))
            begin = before, known["global_step"], 0.0
            points = [begin, *(point for point in training if before < point[0] < (fault or now) + METRICS_SECS)]
            # The clock is that of all workers, of which one knows a late number while it prepares a graph.
            known_seconds = itertools.accumulate((seconds for _, _, seconds in points), max)
            points = [(*point[:2], seconds) for point, seconds in zip(points, known_seconds)]
            if not line["parameters"].startswith("restored"):
                if step + 1 < max(step for time, step, _ in points if time < now - MORE_SECS):
                    yield f"the parameters {line['parameters']} are of step {step}, after one of {points[-1][1]}"
            elif fault is None and step >= max(line["last_step"] * (not self.has_outages), *(step for _, step, _ in points)):
                continue  # a chief that is killed while it writes the result finds no ps: they have ended with the training
            elif fault is None:
                yield f"parameters were {line['parameters']}, though no ps was killed or stopped"
            else:
                # The run was at that step between the last line of metrics with an earlier one, and the first with a later one.
                told, _, seconds = max(points)
                last = seconds + min(max(0.0, fault - told), METRICS_SECS)  # for so long it may have trained
                earlier = max((p[1:] for p in points if p[1] <= step), default=begin[1:])
                later = min((p[1:] for p in points if p[1] > step), default=(step + 1, last))
                if earlier == begin[1:]:  # whose seconds no line tells
                    earlier = step, max(0.0, later[1] - METRICS_SECS)
                share = (step - earlier[0]) / (later[0] - earlier[0])
                self.losses.append(last - (earlier[1] + share * (later[1] - earlier[1])))
                most = CHECKPOINT_SECS + (LARGE_MORE_SECS if self._slower > 1 else MORE_SECS)
                # A chief that is stopped while it saves keeps the others from saving, until it is killed.
                most += max((fault - time for time in self._stops_of_chief if before < time < fault), default=0.0)
                if self.losses[-1] > most:
                    yield f"{self.losses[-1]:.1f} s were lost when parameters were {line['parameters']}"

    def _unreadable(self):
        from common import tf
        from common.core.checkpoints import checkpoints_in, newest_good_checkpoint

        paths = checkpoints_in(self.folder / "checkpoints")
        with tf.Graph().as_default():
            if not paths or newest_good_checkpoint(self.folder / "checkpoints") != paths[-1]:
                yield "a checkpoint that cannot be read"
        if (self.folder / "curve.png").read_bytes()[-8:-4] != b"IEND":
            yield "curve.png is cut short"
        import counting_model  # noqa: F401, registers a layer of the model
        import keras

        keras.models.load_model(self.folder / "model.keras")


def table(rounds):
    """Returns a row for each scheme, as Markdown."""
    come_and_go = {"join": "joined", "leave": "asked to leave", "SIGTERM": "preempted"} if rounds[0].has_places else {}
    more = "".join(f" {said} |" for said in come_and_go.values())
    rows = [
        "| scheme | rounds | killed | stopped | launcher killed |"
        f"{more} came through | restored | largest loss | longest gap |",
        f"|---|--:|--:|--:|--:|{'--:|' * len(come_and_go)}--:|--:|--:|--:|",
    ]
    groups = collections.defaultdict(list)
    for one in rounds:
        groups[one.scheme].append(one)
    for name, group in [*groups.items(), ("together", rounds)]:
        faults = [fault for one in group for fault in one.injected]
        launcher = sum(whom == "launcher" for _, _, whom in faults)
        killed = sum(kind == "SIGKILL" for _, kind, _ in faults) - launcher
        stopped = sum(kind == "SIGSTOP" for _, kind, _ in faults)
        good = sum(not one.problem for one in group)
        gap, losses = max(one.gap for one in group), [loss for one in group for loss in one.losses]
        moved = "".join(f" {sum(kind == what for _, what, _ in faults)} |" for kind in come_and_go)
        counts = f"{len(group)} | {killed} | {stopped} | {launcher} |{moved} {good} | {len(losses)}"
        rows.append(f"| {name} | {counts} | {max(losses, default=0.0):.1f} s | {gap:.1f} s |")
    return "\n".join(rows)


def main():
    """Runs the rounds, says what came of each, and prints the table; the exit status is 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--at_once", type=int, default=1, help="rounds that run at the same time")
    parser.add_argument("--outages", action="store_true", help="--seconds ends the runs, and each ps is killed several times")
    parser.add_argument("--clocks", action="store_true", help="the wall clocks of the ps are set, forward and back")
    parser.add_argument("--places", action="store_true", help="workers join and leave, and get SIGTERM")
    options = parser.parse_args()
    base, done = Path(tempfile.mkdtemp(prefix="chaos-")), []
    numbers = range(options.first, options.first + options.rounds)
    what = {"has_places": options.places, "has_outages": options.outages, "has_odd_clocks": options.clocks}
    rounds = [Round(options.seed, i, base / str(i), **what) for i in numbers]
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        for future in concurrent.futures.as_completed([pool.submit(one.run) for one in rounds]):
            one = future.result()
            done.append(one)
            faults = ", ".join(f"{kind} {whom} at {at:.1f} s" for at, kind, whom in one.injected) or "none: it had ended before"
            tasks = f"{one.num_ps} ps, {one.num_workers} workers"
            lost = "".join(f", {loss:.2f} s lost" for loss in one.losses)
            print(
                f"round {one.number}: {one.scheme}, {tasks}: {faults}{lost}; {one.problem or 'well'} after {one.seconds:.0f} s",
                flush=True,
            )
            if not one.problem:
                shutil.rmtree(one.folder)
                Path(f"{one.folder}.out").unlink()
    print("\n" + table(sorted(done, key=lambda one: one.number)))
    failed = [one for one in done if one.problem]
    print(f"\n{len(done)} rounds, {len(failed)} failed" + (f": see {base}" if failed else ""))
    if not failed:
        shutil.rmtree(base)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
