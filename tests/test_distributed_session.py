"""The names that a user's script imports from `common`: DistributedSession, its hooks, and the boilerplate that uses them."""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import types
from unittest import mock

import numpy as np
import pytest
import runs

import common.cluster.session
from common import DistributedSession, LoadCheckpoint, StopAtTimeHook, TaskSpecDef, tf
from common.cli.notebook import LocalCluster
from common.cluster import hooks

SCRIPT = runs.ROOT / "Distributed-Session" / "distributed_session.py"
WHO_AM_I = ("TF_CONFIG", "JOB_NAME", "TASK_INDEX", "PS_HOSTS", "WORKER_HOSTS", "MASTER_HOST")


class Counting:
    """A training in the present graph: each run adds 1 to the global step and to `value`, which begins at `start`."""

    def __init__(self, start=0.0, shape=(), name="value"):
        self.step = tf.train.get_or_create_global_step()
        self.value = tf.get_variable(name, shape, initializer=tf.constant_initializer(start))
        tf.summary.scalar("total", tf.reduce_sum(self.value))
        with tf.control_dependencies([self.value.assign_add(tf.ones(shape))]):
            self.train = self.step.assign_add(1)

    def run(self, *arguments, last_step=3, **options):
        """Trains in a `DistributedSession`; returns [(step, value)] after each run."""
        stop = tf.train.StopAtStepHook(last_step=last_step)
        options["hooks"] = [*options.get("hooks", []), stop]
        return run_to_the_end(DistributedSession(*arguments, **options), self)


def run_to_the_end(session, counting):
    seen = []
    with session:
        while not session.should_stop():
            step = int(session.run(counting.train))
            seen.append((step, float(np.mean(plain(session, counting.value)))))
    return seen


def plain(session, fetches):
    """Runs in the session itself, past its hooks."""
    return session.run_step_fn(lambda step_context: step_context.session.run(fetches))


class FailHook(tf.train.SessionRunHook):
    """Fails once, before run number `run`, as if a ps had died."""

    def __init__(self, run):
        self._run, self.sessions = run, 0

    def after_create_session(self, session, coord):
        self.sessions += 1

    def before_run(self, run_context):
        self._run -= 1
        if self._run == 0:
            raise tf.errors.AbortedError(None, None, "a ps has died")


class CallsHook(tf.train.SessionRunHook):
    """Counts the runs that it sees."""

    calls = 0

    def after_run(self, run_context, run_values):
        self.calls += 1


def steps_in(folder):
    """The global steps of which there are checkpoints."""
    return sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("model.ckpt-*.index"))


def tags_in(folder):
    """The tags in its event files, and the steps of each."""
    tags: dict[str, list[int]] = {}
    for path in folder.glob("events.out.tfevents.*"):
        for event in tf.train.summary_iterator(str(path)):
            for value in event.summary.value:
                tags.setdefault(value.tag, []).append(event.step)
    return tags


@pytest.fixture
def opened(monkeypatch):
    """A function that returns the arguments with which a `DistributedSession` opens its monitored session, without doing it.

    Its arguments are those of `DistributedSession`. No server is started.
    """

    def opened(task_spec=None, *arguments, **options):
        if task_spec is not None:
            task_spec._server = types.SimpleNamespace(target="")
        with monkeypatch.context() as patch, tf.Graph().as_default():
            tf.train.get_or_create_global_step()
            patch.setattr(common.cluster.session, "_LeavingSession", lambda *given: given)
            _, creator, all_hooks, stop_grace_period_secs = DistributedSession(task_spec, *arguments, **options)
        return types.SimpleNamespace(creator=creator, hooks=all_hooks, stop_grace_period_secs=stop_grace_period_secs)

    return opened


def worker(index):
    return TaskSpecDef("worker", index, ps_hosts="a:1", worker_hosts="b:2,c:3")


# One process


def test_one_process_trains_saves_and_resumes(tmp_path):
    for last_step, expected in (3, [1, 2, 3]), (5, [4, 5]):
        with tf.Graph().as_default():
            seen = Counting(start=10).run(checkpoint_dir=str(tmp_path), last_step=last_step)
        assert seen == [(step, 10 + step) for step in expected]
        assert steps_in(tmp_path)[-1] == last_step  # also at the end
    assert steps_in(tmp_path) == [0, 3, 5]


def test_default_task_is_one_process_too(tmp_path, graph):
    seen = Counting().run(TaskSpecDef(), str(tmp_path))
    assert [step for step, _ in seen] == [1, 2, 3] and steps_in(tmp_path) == [0, 3]


def test_without_a_checkpoint_dir_nothing_is_written(tmp_path, graph, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Counting().run()
    assert list(tmp_path.iterdir()) == []


def test_recovers_from_a_lost_ps(tmp_path, graph):
    fail = FailHook(run=3)
    seen = Counting().run(checkpoint_dir=str(tmp_path), save_checkpoint_secs=1e-6, hooks=[fail], last_step=4)
    assert [step for step, _ in seen] == [1, 2, 3, 4] and fail.sessions == 2


# As TensorFlow said it when ps 1 was restarted while a worker was at a barrier on ps 0.
CANCELLED = """
=====================
CANCELLED: From /job:worker/replica:0/task:0:
RecvFromRemoteAsync is cancelled.
\t [[{{node Read_7/ReadVariableOp_S177}}]]
ABORTED: From /job:ps/replica:0/task:1:
Session handle is not found: 6b5284b870d70cdc. Possibly this worker ("/job:ps/replica:0/task:1") just restarted.
====================="""


@pytest.mark.parametrize("when", ["in_a_call", "while_restoring"])
@pytest.mark.parametrize("message", [CANCELLED, "Queue 'done' is closed."])
def test_recovers_from_a_call_that_a_lost_ps_cancelled(tmp_path, graph, monkeypatch, when, message):
    counting, creator = Counting(), common.cluster.session._Creator
    owner, name = (tf.Session, "run") if when == "in_a_call" else (creator, "_create_session")
    wanted, original = counting.train if when == "in_a_call" else None, getattr(owner, name)
    cancelled: list[bool] = []

    def cancelled_once(self, fetches=None, *args, **kwargs):
        is_wanted = fetches is wanted or isinstance(fetches, dict) and fetches.get("caller") is wanted
        if is_wanted and not cancelled:
            cancelled.append(True)
            raise tf.errors.CancelledError(None, None, message)
        return original(self, *([] if fetches is None else [fetches]), *args, **kwargs)

    monkeypatch.setattr(owner, name, cancelled_once)
    if message == CANCELLED:
        assert [step for step, _ in counting.run(checkpoint_dir=str(tmp_path))] == [1, 2, 3]
    else:
        with pytest.raises(tf.errors.CancelledError):
            counting.run(checkpoint_dir=str(tmp_path))
    assert cancelled


def test_summaries_and_steps_per_second(tmp_path, graph):
    Counting().run(checkpoint_dir=str(tmp_path), save_summaries_steps=2, log_step_count_steps=3, last_step=7)
    tags = tags_in(tmp_path)
    assert tags["total"] == [1, 3, 5, 7]
    assert tags["global_step/sec"] == [4, 7]


def test_no_summaries_and_no_steps_per_second(tmp_path, graph):
    Counting().run(checkpoint_dir=str(tmp_path), save_summaries_steps=None, save_summaries_secs=None, log_step_count_steps=0)
    assert tags_in(tmp_path) == {} and steps_in(tmp_path) == [0, 3]


def test_no_checkpoints(tmp_path, graph):
    Counting().run(checkpoint_dir=str(tmp_path), save_checkpoint_secs=None)
    assert steps_in(tmp_path) == [] and "total" in tags_in(tmp_path)


def test_configuration_of_ones_own_is_used(graph):
    config = tf.ConfigProto(device_count={"CPU": 3})
    counting = Counting()
    with DistributedSession(config=config) as session:
        devices = session.run_step_fn(lambda step_context: step_context.session.list_devices())
        session.run(counting.train)
    assert sum(device.device_type == "CPU" for device in devices) == 3


# What the session is made of


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"save_summaries_steps": 7},
        {"save_summaries_secs": 9},
        {"save_summaries_steps": 7, "save_summaries_secs": None},
        {"save_summaries_steps": None, "save_summaries_secs": 9},
        {"save_summaries_steps": None, "save_summaries_secs": None},
        {"save_summaries_steps": None},
        {"save_summaries_secs": None},
        {"save_checkpoint_secs": 5, "log_step_count_steps": 3},
        {"log_step_count_steps": None},
    ],
    ids=str,
)
def test_hooks_are_those_of_monitored_training_session(tmp_path, opened, given):
    mine = opened(None, str(tmp_path), hooks=[CallsHook()], chief_only_hooks=[FailHook(0)], **given).hooks
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        theirs = tf.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path),
            hooks=[CallsHook()],
            chief_only_hooks=[FailHook(0)],
            **{"save_checkpoint_secs": 600, **given},
        )
        with theirs:
            their_hooks = theirs._hooks
        assert [what_it_is(hook) for hook in mine] == [what_it_is(hook) for hook in their_hooks]


def what_it_is(hook):
    timer = getattr(hook, "_timer", None)
    return type(hook), timer and (timer._every_secs, timer._every_steps)


def test_hooks_of_the_master_alone(tmp_path, opened):
    everyones, masters = CallsHook(), CallsHook()
    for index in 0, 1:
        found = opened(worker(index), str(tmp_path), hooks=[everyones], chief_only_hooks=[masters]).hooks
        assert everyones in found
        assert (masters in found) == (index == 0)
        assert any(isinstance(hook, tf.train.CheckpointSaverHook) for hook in found) == (index == 0)
    own_master = TaskSpecDef("worker", 0, ps_hosts="a:1", worker_hosts="b:2", master="m:1")
    assert opened(own_master, str(tmp_path), chief_only_hooks=[masters]).hooks == []


def test_hooks_of_the_master_are_called(graph):
    everyones, masters = CallsHook(), CallsHook()
    Counting().run(hooks=[everyones], chief_only_hooks=[masters])
    assert everyones.calls == masters.calls == 3


def test_configuration_gets_the_device_filters(opened):
    config = tf.ConfigProto(log_device_placement=True)
    used = opened(worker(1), config=config).creator._config
    assert used.log_device_placement and list(used.device_filters) == ["/job:ps", "/job:worker/task:1"]
    assert not config.device_filters  # the caller's stays as it is
    own_filters = tf.ConfigProto(device_filters=["/job:ps/task:0"])
    assert list(opened(worker(1), config=own_filters).creator._config.device_filters) == ["/job:ps/task:0"]


def test_the_master_writes_all_of_a_checkpoint(graph):
    """Not each ps its part, which may have another disk."""
    with tf.device(TaskSpecDef("worker", 0, ps_hosts="a:1,a:2", worker_hosts="b:2").device_fn()):
        variables = [tf.train.get_or_create_global_step(), tf.get_variable("weights", [])]
    assert len({variable.device for variable in variables}) == 2
    assert not common.cluster.session._scaffold().finalize().saver.saver_def.sharded


def test_grace_period_is_handed_on(opened):
    assert opened(stop_grace_period_secs=7).stop_grace_period_secs == 7


def test_eager_mode(user_error):
    with user_error("with tf.Graph().as_default()"):
        DistributedSession()


def test_evaluator(user_error, graph):
    with user_error("an evaluator does not train", "is_evaluator()"):
        DistributedSession(TaskSpecDef("evaluator"))


OTHER_MODELS = [({"name": "other"}, "it has no 'other'"), ({"shape": [2]}, "it has 'value' of shape [], not [2]")]


@pytest.mark.parametrize("model, text", OTHER_MODELS)
def test_checkpoint_of_another_model(tmp_path, user_error, model, text):
    with tf.Graph().as_default():
        Counting().run(checkpoint_dir=str(tmp_path))
    with tf.Graph().as_default(), user_error(str(tmp_path), text, "checkpoint_dir"):
        Counting(**model).run(checkpoint_dir=str(tmp_path))


# StopAtTimeHook


@pytest.fixture
def clock(monkeypatch):
    """The time that the hooks see: `clock.now`, seconds."""
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(hooks, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class TickHook(tf.train.SessionRunHook):
    """Lets a second pass in every run."""

    def __init__(self, clock):
        self._clock = clock

    def before_run(self, run_context):
        self._clock.now += 1


def test_stops_when_the_time_is_over(graph, clock):
    stop, counting = StopAtTimeHook(4), Counting()
    clock.now += 100  # to build a graph takes time, which does not count
    seen = counting.run(hooks=[TickHook(clock), stop], last_step=100)
    assert [step for step, _ in seen] == [1, 2, 3, 4]


def test_time_runs_on_when_a_ps_was_lost(tmp_path, graph, clock):
    fail, all_hooks = FailHook(run=3), [TickHook(clock), StopAtTimeHook(4)]
    seen = Counting().run(None, str(tmp_path), hooks=[*all_hooks, fail], save_checkpoint_secs=1e-6, last_step=100)
    assert fail.sessions == 2
    assert [step for step, _ in seen] == [1, 2, 3]  # the failed run took one of the four seconds


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_time_that_makes_no_sense(user_error, seconds):
    with user_error("time_running must be greater than 0 seconds", str(seconds)):
        StopAtTimeHook(seconds)


# LoadCheckpoint


@pytest.fixture
def checkpoint(tmp_path):
    """The path of a checkpoint in which `value` is 100."""
    with tf.Graph().as_default(), tf.Session() as session:
        value = tf.get_variable("value", initializer=100.0)
        session.run(value.initializer)
        return tf.train.Saver([value]).save(session, str(tmp_path / "before" / "model.ckpt"))


@pytest.fixture
def load(graph, checkpoint):
    """The `Counting` in the present graph, and a hook that loads its value."""
    counting = Counting()
    saver = tf.train.Saver([counting.value])
    saver.restore = mock.Mock(wraps=saver.restore)
    return types.SimpleNamespace(counting=counting, saver=saver, hook=LoadCheckpoint(saver, checkpoint))


def test_begins_with_the_values_of_a_checkpoint(load, tmp_path):
    folder = tmp_path / "run"
    assert load.counting.run(None, str(folder), chief_only_hooks=[load.hook]) == [(1, 101), (2, 102), (3, 103)]
    assert load.saver.restore.call_count == 1
    reader = tf.train.load_checkpoint(str(folder / "model.ckpt-0"))
    assert reader.get_tensor("value") == 100  # loaded before the first checkpoint is saved


def test_a_run_that_resumes_does_not_load_again(checkpoint, tmp_path):
    folder = str(tmp_path / "run")
    for last_step, expected in (2, [(1, 101), (2, 102)]), (4, [(3, 103), (4, 104)]):
        with tf.Graph().as_default():
            counting = Counting()
            hook = LoadCheckpoint(tf.train.Saver([counting.value]), checkpoint)
            assert counting.run(None, folder, chief_only_hooks=[hook], last_step=last_step) == expected


def test_does_not_load_again_when_the_training_was_restored(load, tmp_path):
    fail = FailHook(run=3)
    options = {"save_checkpoint_secs": 1e-6, "hooks": [fail], "chief_only_hooks": [load.hook]}
    assert load.counting.run(None, str(tmp_path / "run"), **options) == [(1, 101), (2, 102), (3, 103)]
    assert fail.sessions == 2 and load.saver.restore.call_count == 1


def test_loads_again_when_all_was_lost(load):
    fail = FailHook(run=3)
    seen = load.counting.run(hooks=[fail], chief_only_hooks=[load.hook])
    assert seen == [(1, 101), (2, 102), (1, 101), (2, 102), (3, 103)]
    assert fail.sessions == 2 and load.saver.restore.call_count == 2


class FastWorkerHook(tf.train.SessionRunHook):
    """Another worker that has made a step before the chief comes to load."""

    def __init__(self, step):
        self._one_more = step.assign_add(1)

    def after_create_session(self, session, coord):
        session.run(self._one_more)


def test_loads_although_another_worker_has_begun(load):
    fast = FastWorkerHook(load.counting.step)
    assert load.counting.run(chief_only_hooks=[fast, load.hook]) == [(2, 101), (3, 102)]


@pytest.mark.parametrize("path", ["nowhere/model.ckpt", "", None])
def test_no_such_checkpoint(graph, user_error, path):
    counting = Counting()
    with user_error("there is no checkpoint", repr(str(path)), "model.ckpt"):
        counting.run(chief_only_hooks=[LoadCheckpoint(tf.train.Saver([counting.value]), path)])


@pytest.mark.parametrize("model, text", OTHER_MODELS)
def test_checkpoint_to_load_does_not_fit(graph, checkpoint, user_error, model, text):
    counting = Counting(**model)
    with user_error(str(checkpoint), text):
        counting.run(chief_only_hooks=[LoadCheckpoint(tf.train.Saver([counting.value]), checkpoint)])


# Scripts


def environment(**values):
    """That of a process which learns its place from `values` alone."""
    return {**{name: value for name, value in os.environ.items() if name not in WHO_AM_I}, **values}


def who_am_i(hosts, job, index, how):
    """The environment variables that say so.

    Args:
      hosts: {job: addresses}.
      how: "TF_CONFIG"; or "JOB_NAME", by which worker 0 is a master with a host of its own.
    """
    if how == "TF_CONFIG":
        return {"TF_CONFIG": json.dumps({"cluster": hosts, "task": {"type": job, "index": index}})}
    master, *workers = hosts["worker"]
    if job == "worker":
        job, index = ("worker", index - 1) if index else ("master", 0)
    names = {"JOB_NAME": job, "TASK_INDEX": str(index), "MASTER_HOST": master}
    return names | {"PS_HOSTS": ",".join(hosts["ps"]), "WORKER_HOSTS": ",".join(workers)}


@pytest.mark.slow
def test_who_am_i_needs_no_tensorflow():
    code = "import sys, common; common.TaskSpecDef(); assert common.TaskSpec() is None; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=runs.SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["TF_CONFIG", "JOB_NAME"])
def test_a_mistake_is_one_line_and_status_2(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text("from common import TaskSpec\nTaskSpec()\n")
    names = who_am_i({"ps": ["a:1"], "worker": ["b:2", "c:3"]}, "worker", 5, how)
    done = subprocess.run(
        [sys.executable, script], env=environment(**names), capture_output=True, text=True, timeout=runs.SECONDS
    )
    source, number, those = ("TF_CONFIG", 5, "workers 0 to 1") if how == "TF_CONFIG" else ("the environment", 4, "worker 0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"script.py: {source}: this is worker {number}, but the cluster has only {those}\n"


class Tasks:
    """Processes of one cluster on this machine."""

    def __init__(self, local, folder):
        self.local, self._folder = local, folder
        self.processes = []

    def start(self, script, job, index, *arguments, how="TF_CONFIG"):
        """Starts a task; how, see `who_am_i`."""
        errors = open(self._folder / f"{job}-{index}-{len(self.processes)}.log", "w")
        with errors:
            process = subprocess.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(**who_am_i(self.local.hosts, job, index, how), TF_NUM_INTRAOP_THREADS="1"),
            )
        self.processes.append((process, self._folder / errors.name))
        return process

    def finish(self, process, status=0):
        """Waits for its end, and returns what it has printed."""
        output, _ = process.communicate(timeout=runs.SECONDS)
        errors = next(path for known, path in self.processes if known is process).read_text()
        assert process.returncode == status, output + errors
        return output

    def close(self):
        """Ends what still runs."""
        for process, _ in self.processes:
            process.kill()
            process.communicate()
        self.local.close()


@pytest.fixture(scope="module")
def cluster_of(tmp_path_factory):
    """A function that makes the `Tasks` of a cluster with so many workers and one ps."""
    made = []

    def cluster_of(num_workers):
        made.append(Tasks(LocalCluster(ps=1, worker=num_workers), tmp_path_factory.mktemp("cluster")))
        return made[-1]

    yield cluster_of
    for tasks in made:
        tasks.close()


@pytest.mark.cluster
def test_boilerplate_as_one_ps_and_two_workers(cluster_of, tmp_path):
    """Which are told in either way who they are."""
    tasks = cluster_of(2)
    started = {
        (job, index): tasks.start(SCRIPT, job, index, tmp_path / f"{job}-{index}", how=how)
        for job, index, how in [("ps", 0, "JOB_NAME"), ("worker", 0, "TF_CONFIG"), ("worker", 1, "JOB_NAME")]
    }
    printed = {task: tasks.finish(process) for task, process in started.items()}  # each of them ends with 0, the ps too
    reported = assert_trained(printed.pop(("worker", 0)))
    # The other worker may count step 1000 while the chief is in its own last step, which then reports 1000 or 1001.
    assert all(after - before >= 200 for before, after in itertools.pairwise(reported))
    assert reported and reported[-1] <= 1001
    assert set(printed.values()) == {""}
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0"]
    assert steps_in(tmp_path / "worker-0")[-1] >= 1000


@pytest.mark.cluster
def test_boilerplate_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT], env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=runs.SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert assert_trained(done.stdout) == [0, 200, 400, 600, 800]
    assert steps_in(tmp_path / "runs" / "Distributed-Session")[-1] == 1000


def assert_trained(printed):
    """Returns the steps at which the chief has reported a loss."""
    *reports, last = printed.splitlines()
    assert all(re.fullmatch(r"step \d+, loss \d+\.\d{3}", line) for line in reports)
    assert re.fullmatch(r"test accuracy \d\.\d{3}", last) and float(last.split()[-1]) >= 0.9
    return [int(line.partition(",")[0].removeprefix("step ")) for line in reports]


UNCONDITIONAL = """
import sys
from common import DistributedSession, TaskSpec, tf

task_spec = TaskSpec()
server = task_spec.create_server()
with tf.Graph().as_default(), tf.device(task_spec.device_fn()):
    step = tf.train.get_or_create_global_step()
    train = step.assign_add(1)
    with DistributedSession(task_spec, hooks=[tf.train.StopAtStepHook(last_step=200)]) as session:
        while not session.should_stop():
            now = session.run(train)
            if "fail" in sys.argv:
                raise OSError("the disk is full")
print("trained", server.target.startswith("grpc://"), now >= 200)
"""


@pytest.fixture(scope="module")
def story(cluster_of, tmp_path_factory):
    """A script that never asks what it is; one of two workers fails, and is started again.

    Attributes:
      failed: what the failed one wrote to standard error.
      ps_lived: whether the ps still ran then.
      printed: by the ps, worker 0 and worker 1, after all have ended with 0.
    """
    script = tmp_path_factory.mktemp("scripts") / "unconditional.py"
    script.write_text(UNCONDITIONAL)
    tasks = cluster_of(2)
    ps, master = [tasks.start(script, job, 0) for job in ("ps", "worker")]
    failing = tasks.start(script, "worker", 1, "fail")
    tasks.finish(failing, status=1)
    failed = tasks.processes[-1][1].read_text()
    ps_lived = ps.poll() is None
    again = tasks.start(script, "worker", 1)
    return types.SimpleNamespace(
        failed=failed, ps_lived=ps_lived, printed=[tasks.finish(process) for process in (ps, master, again)]
    )


@pytest.mark.cluster
def test_a_worker_that_failed_may_come_back(story):
    assert story.failed.rstrip().endswith("OSError: the disk is full")
    assert story.ps_lived
    assert story.printed[2] == "trained True True\n"


@pytest.mark.cluster
def test_a_script_that_never_asks_whether_it_is_a_ps(story):
    assert story.printed == ["", "trained True True\n", "trained True True\n"]


@pytest.mark.cluster
def test_a_master_that_comes_back_goes_on_with_parameters_that_live(tmp_path):
    """The checkpoint, which is of step 0, is not restored over them."""
    local = LocalCluster(ps=1, worker=1)
    try:
        ps, task_spec = local.start("ps", 0), local.task("worker", 0)
        for begins_at in 0, 5:
            with tf.Graph().as_default(), tf.device(task_spec.device_fn()):
                counting = Counting()
                with contextlib.suppress(InterruptedError), DistributedSession(task_spec, str(tmp_path)) as session:
                    assert plain(session, [counting.step, counting.value]) == [begins_at, begins_at]
                    for _ in range(5):
                        session.run(counting.train)
                    if begins_at == 0:
                        assert steps_in(tmp_path) == [0]
                        raise InterruptedError  # so that it saves nothing at its end
        assert steps_in(tmp_path)[-1] == 10 and ps.wait(timeout=runs.SECONDS) == 0
    finally:
        local.close()


@pytest.mark.cluster
def test_training_goes_on_when_a_ps_was_killed(tmp_path):
    local = LocalCluster(ps=1, worker=1)
    try:
        ps, task_spec = local.start("ps", 0), local.task("worker", 0)
        with tf.Graph().as_default(), tf.device(task_spec.device_fn()):
            counting, again, saved = Counting(), None, 0
            seen: list[int] = []
            with DistributedSession(task_spec, str(tmp_path), save_checkpoint_secs=0.1) as session:
                while again is None or len(seen) < 20:
                    if again is None and steps_in(tmp_path)[-1] > 0:
                        saved = steps_in(tmp_path)[-1]
                        ps.kill()
                        ps.wait()
                        again = local.start("ps", 0)
                        seen = []
                    seen.append(int(session.run(counting.train)))
                step, value = plain(session, [counting.step, counting.value])
        assert seen[0] > saved and seen == list(range(seen[0], seen[0] + 20))
        assert value == step == seen[-1]
        assert again is not None and again.wait(timeout=runs.SECONDS) == 0
    finally:
        local.close()


@pytest.mark.cluster
def test_each_worker_has_an_optimizer_of_its_own(tmp_path):
    """Of a copy of the parameters that is its own: no other task can initialize the slots."""
    classes = {tf.train.AdagradOptimizer: [0.1], tf.train.AdamOptimizer: [], tf.train.MomentumOptimizer: [0.1, 0.9]}
    optimizers = [functools.partial(kind, *numbers) for kind, numbers in classes.items()]
    local = LocalCluster(ps=1, worker=3)

    def train(index):
        task_spec, calls = local.task("worker", index), 0
        with tf.Graph().as_default():
            with tf.device(task_spec.device_fn()):
                step, center = tf.train.get_or_create_global_step(), tf.get_variable("center", initializer=tf.ones([4]))
            with tf.device(task_spec.device):
                mine = tf.get_variable("mine", initializer=tf.ones([4]), collections=[tf.GraphKeys.LOCAL_VARIABLES])
                trained = optimizers[index]().minimize(tf.reduce_sum(tf.square(mine)), var_list=[mine])
            with tf.control_dependencies([trained]), tf.control_dependencies([center.assign(mine.read_value())]):
                train = step.assign_add(1)
            folder = str(tmp_path) if index == 0 else None
            with DistributedSession(task_spec, folder) as session:
                while calls < 5:  # none waits for another
                    session.run(train)
                    calls += 1
                return plain(session, mine)

    try:
        ps = local.start("ps", 0)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            values = list(pool.map(train, range(3)))
        assert all((value < 1).all() for value in values) and ps.wait(timeout=runs.SECONDS) == 0
        assert "mine/Adagrad" in dict(tf.train.list_variables(str(tmp_path)))
    finally:
        local.close()


def test_two_optimizers_that_would_share_their_tokens(user_error, graph):
    variables = [tf.get_variable(name, initializer=tf.ones([4])) for name in ("a", "b")]
    for variable in variables:
        optimizer = tf.train.SyncReplicasOptimizer(tf.train.GradientDescentOptimizer(0.1), 2, total_num_replicas=2)
        step = tf.train.get_or_create_global_step()
        optimizer.minimize(tf.reduce_sum(tf.square(variable)), step, var_list=[variable])
    with user_error("the graph has 2 SyncReplicasOptimizers, and sync_token_q, sync_token_q_1 would be one queue"):
        DistributedSession()
