"""common/cluster/task_spec.py: how a process learns which task it is."""

import contextlib
import json
import os
import threading
import types
from unittest import mock

import pytest
from runs import SECONDS

from common import TaskSpec, TaskSpecDef, tf
from common.cluster.membership import say_done, serve
from common.cluster.task_spec import task_from
from common.launch import launcher

NO_FLAGS = dict(job_name=None, task_index=None, ps_hosts=None, worker_hosts=None)
FLAGS = dict(job_name="worker", task_index=1, ps_hosts=["a:1"], worker_hosts=["b:2", "c:3"])
ENVIRONMENT = {"JOB_NAME": "worker", "TASK_INDEX": "1", "PS_HOSTS": "d:4,e:5", "WORKER_HOSTS": "f:6,g:7,h:8"}


def task(environ=None, **flags):
    with mock.patch.dict(os.environ, environ or {}, clear=True):
        return task_from(types.SimpleNamespace(**NO_FLAGS | flags))


def tf_config(cluster, job, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


CONFIG = tf_config({"ps": ["i:1"], "worker": ["j:2", "k:3"]}, "worker", 1)


def test_nothing_said():
    assert task() is None
    assert task({"PATH": "/bin", "TF_CONFIG": "", "JOB_NAME": "", "PS_HOSTS": ""}) is None


def test_flags():
    assert task(**FLAGS) == TaskSpecDef("worker", 1, ps_hosts="a:1", worker_hosts="b:2,c:3")
    assert task(**FLAGS | dict(job_name="ps", task_index=0)) == TaskSpecDef("ps", 0, ps_hosts="a:1", worker_hosts="b:2,c:3")


def test_tf_config():
    assert task(CONFIG) == TaskSpecDef("worker", 1, ps_hosts="i:1", worker_hosts="j:2,k:3")
    cluster = {"ps": ["i:1", "l:2"], "worker": ["j:2"]}
    assert task(tf_config(cluster, "ps", 1)) == TaskSpecDef("ps", 1, ps_hosts="i:1,l:2", worker_hosts="j:2")
    assert task(tf_config(cluster, "ps", "1")).index == 1  # some platforms write numbers as text


@pytest.mark.parametrize("chief", ["chief", "master"])
def test_chief_of_tf_config_is_the_first_worker(chief):
    cluster = {"ps": ["p:1"], chief: ["c:2"], "worker": ["v:3", "w:4"]}
    hosts: dict = {"ps_hosts": "p:1", "worker_hosts": "v:3,w:4", "master": "c:2"}
    assert task(tf_config(cluster, chief, 0)) == TaskSpecDef(**hosts)
    assert task(tf_config(cluster, "worker", 0)) == TaskSpecDef("worker", 0, **hosts)
    assert task(tf_config(cluster, "ps", 0)) == TaskSpecDef("ps", 0, **hosts)
    members = [(chief, 0), ("worker", 0), ("worker", 1)]
    found = [task(tf_config(cluster, job, index)) for job, index in members]
    assert [t.shard_index for t in found] == [0, 1, 2]
    assert [t.device for t in found] == [f"/job:worker/task:{i}" for i in range(3)]
    assert all(t.hosts == {"ps": ["p:1"], "worker": ["c:2", "v:3", "w:4"]} for t in found)
    del cluster["worker"]
    assert task(tf_config(cluster, chief, 0)) == TaskSpecDef(ps_hosts="p:1", master="c:2")


def test_environment():
    assert task(ENVIRONMENT) == TaskSpecDef("worker", 1, ps_hosts="d:4,e:5", worker_hosts="f:6,g:7,h:8")
    assert task(ENVIRONMENT | {"JOB_NAME": "ps", "TASK_INDEX": "0"}).device == "/job:ps/task:0"


@pytest.mark.parametrize(
    "job, index, expected",
    [("master", "0", 0), ("master", None, 0), ("worker", "0", 1), ("worker", "1", 2), ("ps", "1", 1)],
)
def test_master_host_is_the_first_worker(job, index, expected):
    environ = {"JOB_NAME": job, "PS_HOSTS": "p:1,q:1", "WORKER_HOSTS": "v:3,w:4", "MASTER_HOST": "m:2"}
    if index is not None:
        environ["TASK_INDEX"] = index
    found = task(environ)
    assert (found.hosts["worker"], found.num_workers) == (["m:2", "v:3", "w:4"], 3)
    assert (found.type, found.job_index) == (job, expected)
    assert found.is_master() == (job == "master") and found.is_ps() == (job == "ps") and found.is_worker() == (job != "ps")


def test_master_on_its_own():
    found = task({"JOB_NAME": "master", "PS_HOSTS": "p:1", "MASTER_HOST": "m:2"})
    assert found == TaskSpecDef("master", 0, ps_hosts="p:1", master="m:2")
    assert (found.num_workers, found.device) == (1, "/job:worker/task:0")


def test_flags_before_tf_config_before_environment():
    assert task(ENVIRONMENT | CONFIG, **FLAGS).worker_hosts == ["b:2", "c:3"]
    assert task(ENVIRONMENT | CONFIG).worker_hosts == ["j:2", "k:3"]


def test_half_of_the_flags_is_an_error_whatever_the_environment_says(user_error):
    with user_error("--job_name=worker", "--task_index, --ps_hosts, --worker_hosts is missing"):
        task(ENVIRONMENT | CONFIG, job_name="worker")


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_missing(user_error, name):
    with user_error(f"but --{name} is missing"):
        task(**FLAGS | {name: None})


@pytest.mark.parametrize("name", ["ps_hosts", "worker_hosts"])
def test_an_empty_list_of_hosts(user_error, name):
    with user_error(f"--{name}= names no host", f"host:port of each {name[:-6]}"):
        task(**FLAGS | {name: []})
    with user_error(f"--{name}= names no host"):  # also alone
        task(**{name: []})


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_variable_is_missing(user_error, name):
    for value in None, "":
        environ = {n: v for n, v in ENVIRONMENT.items() if n != name} | ({} if value is None else {name: value})
        with user_error(f"but {name} is missing"):
            task(environ)


def test_master_host_alone_is_half_of_it(user_error):
    with user_error("JOB_NAME, TASK_INDEX, PS_HOSTS is missing"):
        task({"MASTER_HOST": "m:2"})


@pytest.mark.parametrize("text", ["{", "cluster", "{'cluster': {}}", '{"cluster": {"ps": []}}}'])
def test_tf_config_that_is_not_json(user_error, text):
    with user_error("TF_CONFIG is not JSON", "expected {"):
        task({"TF_CONFIG": text})


WORKER_0 = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    "config",
    [
        {},
        [],
        None,
        7,
        "cluster",
        {"task": WORKER_0},
        {"cluster": {"ps": ["a:1"], "worker": ["b:2"]}},
        {"cluster": {"ps": ["a:1"], "worker": ["b:2"]}, "task": {"type": "worker"}},
        {"cluster": {"ps": ["a:1"], "worker": ["b:2"]}, "task": {"index": 0}},
        {"cluster": [["a:1"], ["b:2"]], "task": WORKER_0},
        {"cluster": {"ps": ["a:1"], "worker": ["b:2"]}, "task": [WORKER_0]},
        {"cluster": "ps", "task": WORKER_0},
    ],
)
def test_tf_config_that_lacks_something(user_error, config):
    with user_error("TF_CONFIG lacks the cluster or the task", "expected {"):
        task({"TF_CONFIG": json.dumps(config)})


def test_tf_config_that_is_nested_too_deep(user_error):
    for bracket in "[", '{"cluster":':
        with user_error("TF_CONFIG is nested too deep", "expected {"):
            task({"TF_CONFIG": bracket * 100_000})


@pytest.mark.parametrize("hosts", [None, [1], "a:1", [["a:1"]], [None], {"1": "a:1"}, {"0": 1}, {"x": "a:1"}, 7, True])
def test_tf_config_whose_hosts_are_no_list(user_error, hosts):
    for cluster in {"ps": hosts, "worker": ["b:2"]}, {"worker": hosts}, {"boss": hosts}:
        with user_error("TF_CONFIG: the hosts of the job", "are not a list of host:port", "expected {"):
            task(tf_config(cluster, "worker", 0))


@pytest.mark.parametrize("nothing", [[], {}])
def test_tf_config_with_empty_lists(user_error, nothing):
    """It would train alone, and so would each of the other tasks."""
    for cluster, job in (
        ({"ps": nothing, "worker": nothing}, "ps"),
        ({"ps": nothing, "worker": ["b:2"]}, "ps"),
        ({"ps": ["a:1"], "worker": nothing}, "worker"),
        ({"worker": nothing}, "worker"),
        ({"ps": ["a:1"], "chief": nothing, "worker": ["b:2"]}, "chief"),
    ):
        with user_error(f"TF_CONFIG names no host of the job {job!r}", "expected {"):
            task(tf_config(cluster, "worker", 0))
    assert task(tf_config({"ps": ["a:1"], "chief": ["c:3"], "worker": nothing}, "chief", 0)).num_workers == 1


@pytest.mark.parametrize(
    "index",
    ["1e999", "-1e999", "NaN", "0.5", "1.0", "true", "null", "[]", "{}", '"first"', '""', '"1_0"', '"٣"', '"\\n"', "9" * 4000],
)
def test_tf_config_whose_index_is_none(user_error, index):
    config = '{"cluster": {"ps": ["a:1"], "worker": ["b:2"]}, "task": {"type": "worker", "index": %s}}'
    with user_error("TF_CONFIG: the index of a task must be a whole number, not "):
        task({"TF_CONFIG": config % index})
    with user_error("TF_CONFIG: the index of a task must be a whole number, not "):
        task({"TF_CONFIG": config.replace('"ps": ["a:1"], ', "") % index})  # of the one task of a cluster


@pytest.mark.parametrize("job, index", [("worker", 1), ("worker", -1), ("boss", 0), ("ps", 0), (["worker"], 0)])
def test_task_that_is_not_the_one_of_its_tf_config(user_error, job, index):
    with user_error("TF_CONFIG: "):
        task(tf_config({"worker": ["b:2"]}, job, index))


def test_an_address_of_two_tasks(user_error):
    """Seen by each task at once, not only by the one that cannot listen there."""
    for ps, workers, master in (
        ("a:1", "b:2,b:2", None),
        ("a:1", "b:2,a:1", None),
        ("a:1,A:1", "b:2", None),
        ("a:1", "b:2", "b:2"),
        (",".join(f"a:{i}" for i in range(1, 1000)), "b:2,a:999", None),
    ):
        with user_error("is the address of", "each task needs a port of its own"):
            TaskSpecDef("ps", 0, None, ps, workers, master)
    with user_error("the flags: b:2 is the address of worker 0 and of worker 1: each task needs a port of its own"):
        task(**FLAGS | dict(worker_hosts=["b:2", "b:2"]))
    with user_error("TF_CONFIG: j:2 is the address of ps 0 and of worker 0"):
        task(tf_config({"ps": ["j:2"], "worker": ["j:2"]}, "worker", 0))


@pytest.mark.parametrize(
    "host",
    ["-oProxyCommand=x:1", "a b:1", "a\n:1", "a\x00b:1", "http://a:1", "`id`:1", "a;b:1", "a@b:1", "a:1e3", "a:٣", "a:000080"]
    + ["127.0.0.1.:1", "10.0.0:1", "10.0.0.256:1", ".:1"],
)
def test_host_that_is_no_name(user_error, host):
    with user_error(repr(host), "expected host:port"):
        task(**FLAGS | dict(worker_hosts=["b:2", host]))


def test_what_is_too_long_is_shown_in_part(user_error):
    for config in {"type": "x" * 10**5, "index": 0}, {"type": "worker", "index": "x" * 10**5}:
        with user_error("100,002 characters"):
            task({"TF_CONFIG": json.dumps({"cluster": {"ps": ["a:1"], "worker": ["b:2"]}, "task": config})})


@pytest.mark.parametrize(
    "job, index, texts",
    [
        ("worker", 2, ["TF_CONFIG", "worker 2", "the cluster has only workers 0 to 1"]),
        ("worker", -1, ["TF_CONFIG", "worker -1"]),
        ("ps", 1, ["TF_CONFIG", "ps 1", "the cluster has only ps 0"]),
        ("chief", 0, ["TF_CONFIG", "master 0", "the cluster has no master"]),
        ("boss", 0, ["TF_CONFIG", "'boss'", "a ps, a worker, a master or an evaluator"]),
        (None, 0, ["TF_CONFIG", "a ps, a worker, a master or an evaluator"]),
    ],
)
def test_task_that_is_not_in_tf_config(user_error, job, index, texts):
    with user_error(*texts):
        task(tf_config({"ps": ["i:1"], "worker": ["j:2", "k:3"]}, job, index))


@pytest.mark.parametrize("job, index", [("worker", -1), ("worker", 2), ("chief", 1), ("chief", -1)])
def test_task_that_is_not_in_a_tf_config_with_a_chief(user_error, job, index):
    with user_error("TF_CONFIG", f"{job} {index}".replace("chief", "master")):
        task(tf_config({"ps": ["i:1"], "chief": ["c:1"], "worker": ["j:2", "k:3"]}, job, index))


@pytest.mark.parametrize("lacking", ["ps", "worker"])
def test_cluster_without_ps_or_without_worker(user_error, lacking):
    cluster = {"ps": ["i:1"], "worker": ["j:2", "k:3"]}
    del cluster[lacking]
    with user_error("TF_CONFIG", f"there is no {lacking}", "at least one ps and one worker"):
        task(tf_config(cluster, "worker" if lacking == "ps" else "ps", 0))


@pytest.mark.parametrize("index", [2, 7])
def test_index_outside_the_flags_cluster(user_error, index):
    with user_error(f"worker {index}", "the cluster has only workers 0 to 1"):
        task(**FLAGS | dict(task_index=index))


@pytest.mark.parametrize("index", ["one", "1.0", "-1", "3"])
def test_bad_index_in_the_environment(user_error, index):
    with user_error(index):
        task(ENVIRONMENT | {"TASK_INDEX": index})


def test_negative_index_beside_a_master_host(user_error):
    """Not the master: it counts the workers that come after it."""
    with user_error("-1"):
        task(ENVIRONMENT | {"TASK_INDEX": "-1", "MASTER_HOST": "m:2"})


def test_bad_job_in_the_environment(user_error):
    with user_error("'boss'", "a ps, a worker, a master or an evaluator"):
        task(ENVIRONMENT | {"JOB_NAME": "boss"})


@pytest.mark.parametrize("host", ["localhost", "localhost:", "localhost:http", "", "::", ":2222", "localhost:0", "a:65536"])
def test_host_without_a_port_that_can_be(user_error, host):
    for flags in dict(ps_hosts=[host]), dict(worker_hosts=["b:2", host]):
        with user_error(repr(host), "expected host:port"):
            task(**FLAGS | flags)
    with user_error(repr(host), "expected host:port"):
        task(tf_config({"ps": [host], "worker": ["b:2"]}, "worker", 0))


def test_ipv6_host():
    assert task(**FLAGS | dict(ps_hosts=["[::1]:2222"])).ps_hosts == ["[::1]:2222"]


def test_cluster_of_one_task_is_one_process():
    for cluster in {}, {"chief": ["c:1"]}, {"worker": ["c:1"]}:
        (job,) = cluster or ["master"]
        assert task(tf_config(cluster, job, 0)) is None
    assert task({"TF_CONFIG": '{"cluster": {}}'}) is None


def test_evaluator_of_tf_config():
    for cluster in {"ps": ["p:1"], "chief": ["c:2"], "worker": ["w:3"]}, {"chief": ["c:2"]}:
        found = task(tf_config(cluster, "evaluator", 0))
        assert found.is_evaluator() and not (found.is_worker() or found.is_master() or found.is_ps())
        assert (found.device_fn(), found.create_server(), found.target()) == (None, None, "")


def test_hosts_as_text_and_as_lists():
    of_text = TaskSpecDef("ps", 1, None, "a:1, b:1", "c:1,d:1")
    assert of_text == TaskSpecDef("ps", 1, ps_hosts=["a:1", "b:1"], worker_hosts=("c:1", "d:1"), trial=None)
    assert of_text.hosts == {"ps": ["a:1", "b:1"], "worker": ["c:1", "d:1"]}


def test_dictionary_of_hosts_in_tf_config():
    """A platform may name only some tasks, by their index; TensorFlow's resolver knows that."""
    assert task(tf_config({"ps": {"0": "p:1"}, "worker": {"0": "v:1", "1": "w:1"}}, "worker", 1)).worker_hosts == ["v:1", "w:1"]


def test_trial():
    config = {"cluster": {"ps": ["i:1"], "worker": ["j:2"]}, "task": {"type": "ps", "index": 0, "trial": "7"}}
    assert task({"TF_CONFIG": json.dumps(config)}).trial == "7"


def test_one_process():
    for alone in TaskSpecDef(), TaskSpecDef("worker"):
        assert (alone.num_ps, alone.num_workers, alone.shard_index) == (0, 1, 0)
        assert alone.is_master() and alone.is_worker() and not alone.is_ps()
        assert (alone.device_fn(), alone.create_server(), alone.target()) == (None, None, "")


def test_what_a_task_knows():
    hosts = {"ps_hosts": "a:1,b:1", "worker_hosts": "c:1,d:1,e:1"}
    chief, other, ps = TaskSpecDef("worker", 0, **hosts), TaskSpecDef("worker", 2, **hosts), TaskSpecDef("ps", 0, **hosts)
    assert (chief.num_ps, chief.num_workers, chief.type) == (2, 3, "worker")
    assert [t.is_master() for t in (chief, other, ps)] == [True, False, False]
    assert [t.is_worker() for t in (chief, other, ps)] == [True, True, False]
    assert [t.is_ps() for t in (chief, other, ps)] == [False, False, True]
    assert TaskSpecDef("ps", 1, **hosts).device == "/job:ps/task:1"
    assert (
        TaskSpecDef("ps", 1, **hosts).shard_index == 0
    )  # a script may ask on a ps as well, where there may be more ps than shards
    assert other.device == "/job:worker/task:2"
    assert list(other.config().device_filters) == ["/job:ps", "/job:worker/task:2"]


def test_configuration_of_ones_own_gets_the_filters():
    task = TaskSpecDef("worker", 1, ps_hosts="a:1", worker_hosts="b:1,c:1")
    own = tf.ConfigProto(log_device_placement=True)
    assert task.config(own).log_device_placement
    assert list(task.config(own).device_filters) == ["/job:ps", "/job:worker/task:1"]
    assert not own.device_filters  # it may be another task's, too
    own.device_filters.append("/job:ps")
    assert list(task.config(own).device_filters) == ["/job:ps"]


@pytest.mark.parametrize("master", [None, "m:1"])
def test_last_worker_as_evaluator(master):
    hosts = {"ps_hosts": "a:1", "worker_hosts": "b:1,c:1,d:1", "master": master}
    before = [TaskSpecDef("worker", i, **hosts) for i in range(3)] + [TaskSpecDef("ps", 0, **hosts)]
    after = [task.use_last_worker_as_evaluator() for task in before]
    assert [t.is_evaluator() for t in after] == [False, False, True, False]
    assert {t.num_workers for t in after} == {before[0].num_workers - 1}
    assert [t.shard_index for t in after[:2]] == [t.shard_index for t in before[:2]]
    assert not before[2].is_evaluator() and before[2].num_workers == after[0].num_workers + 1
    assert all(t.use_last_worker_as_evaluator() == t for t in after if t.is_evaluator())


@pytest.mark.parametrize("hosts", [{}, {"ps_hosts": "a:1", "worker_hosts": "b:1"}, {"ps_hosts": "a:1", "master": "b:1"}])
def test_evaluator_with_one_worker_only(user_error, hosts):
    task = TaskSpecDef("ps", **hosts) if hosts else TaskSpecDef()
    with user_error("the only worker", "has to train"):
        task.use_last_worker_as_evaluator()


@pytest.mark.parametrize(
    "arguments, texts",
    [
        (("worker", 2, None, "a:1", "b:1,c:1"), ["worker 2", "has only workers 0 to 1"]),
        (("worker", 1, None, "a:1", "b:1", "m:1"), ["worker 1", "has only worker 0"]),
        (("master", 0, None, "a:1", "b:1"), ["master 0", "has no master"]),
        (("worker", "x", None, "a:1", "b:1"), ["whole number", "'x'"]),
        (("worker", 1), ["worker 1", "has only worker 0"]),
        (("ps", 0), ["ps 0", "has no ps"]),
        (("worker", 0, None, "a:1"), ["no worker"]),
        (("worker", 0, None, None, "a:1"), ["no ps"]),
        (("worker", 0, None, "a:1", "b:1,,c:1"), ["''", "expected host:port"]),
        (("boss", 0), ["'boss'"]),
        (("master", 0, None, "a:1", "b:1", "m:1,n:1"), ["at most one master, not 2"]),
    ],
)
def test_task_that_cannot_be(user_error, arguments, texts):
    with user_error(*texts):
        TaskSpecDef(*arguments)


def test_task_spec_reads_the_environment(monkeypatch):
    for name in ("TF_CONFIG", "MASTER_HOST", *ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    assert TaskSpec() is None
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert TaskSpec() == TaskSpecDef("worker", 1, ps_hosts="d:4,e:5", worker_hosts="f:6,g:7,h:8")


def test_variables_go_to_the_ps_tasks_in_turn(graph):
    with tf.device(TaskSpecDef("worker", 1, ps_hosts="a:1,b:1", worker_hosts="c:1,d:1").device_fn()):
        variables = [tf.get_variable(f"v{i}", [], use_resource=True) for i in range(3)]
        product = 2 * variables[0]
    assert [v.device for v in variables] == ["/job:ps/task:0", "/job:ps/task:1", "/job:ps/task:0"]
    assert product.device == "/job:worker/task:1"


def ends(function, *arguments):
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return not thread.is_alive()


def test_the_end_waits_for_nobody_who_may_have_ended_before(monkeypatch):
    monkeypatch.setenv("TF_GRPC_REUSE_PORT", "true")
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(launcher.reserved_port()).getsockname()[1] for _ in range(3)]
        ps_host, ended_ps_host, worker_host = [f"localhost:{port}" for port in ports]
        ps = TaskSpecDef("ps", 0, ps_hosts=[ps_host, ended_ps_host], worker_hosts=worker_host)
        worker = TaskSpecDef("worker", 0, ps_hosts=ps_host, worker_hosts=worker_host)
        ps_server, worker_server = ps.start_server(), worker.start_server()
        with monkeypatch.context() as patches:  # closing waits until the ps has answered, so it may take for ever
            answered = threading.Event()
            patches.setattr(tf.Session, "close", lambda session: answered.wait())
            assert ends(say_done, worker, worker_server)
            answered.set()
        assert ends(serve, ps, ps_server)
