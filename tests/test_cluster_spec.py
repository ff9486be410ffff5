"""common/cluster.py: how a process learns which task it is."""

import json
import types

import pytest

from common import tf
from common.cluster import TaskSpecDef, task_from

NO_FLAGS = dict(job_name=None, task_index=None, ps_hosts=None, worker_hosts=None)
FLAGS = dict(job_name="worker", task_index=1, ps_hosts=["a:1"], worker_hosts=["b:2", "c:3"])
ENVIRONMENT = {"JOB_NAME": "worker", "TASK_INDEX": "1", "PS_HOSTS": "d:4,e:5", "WORKER_HOSTS": "f:6,g:7,h:8"}


def task(environ=None, **flags):
    return task_from(types.SimpleNamespace(**NO_FLAGS | flags), environ or {})


def tf_config(cluster, job, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


CONFIG = tf_config({"ps": ["i:1"], "worker": ["j:2", "k:3"]}, "worker", 1)


def test_nothing_said():
    assert task() is None
    assert task({"PATH": "/bin", "TF_CONFIG": "", "JOB_NAME": "", "PS_HOSTS": ""}) is None


def test_flags():
    assert task(**FLAGS) == TaskSpecDef("worker", 1, ("a:1",), ("b:2", "c:3"))
    assert task(**FLAGS | dict(job_name="ps", task_index=0)) == TaskSpecDef("ps", 0, ("a:1",), ("b:2", "c:3"))


def test_tf_config():
    assert task(CONFIG) == TaskSpecDef("worker", 1, ("i:1",), ("j:2", "k:3"))
    cluster = {"ps": ["i:1", "l:2"], "worker": ["j:2"]}
    assert task(tf_config(cluster, "ps", 1)) == TaskSpecDef("ps", 1, ("i:1", "l:2"), ("j:2",))
    assert task(tf_config(cluster, "ps", "1")).index == 1  # some platforms write numbers as text


@pytest.mark.parametrize("chief", ["chief", "master"])
def test_chief_of_tf_config_is_the_first_worker(chief):
    cluster = {"ps": ["p:1"], chief: ["c:2"], "worker": ["v:3", "w:4"]}
    workers = ("c:2", "v:3", "w:4")
    assert task(tf_config(cluster, chief, 0)) == TaskSpecDef("worker", 0, ("p:1",), workers)
    assert task(tf_config(cluster, "worker", 0)) == TaskSpecDef("worker", 1, ("p:1",), workers)
    assert task(tf_config(cluster, "worker", 1)) == TaskSpecDef("worker", 2, ("p:1",), workers)
    assert task(tf_config(cluster, "ps", 0)) == TaskSpecDef("ps", 0, ("p:1",), workers)
    del cluster["worker"]
    assert task(tf_config(cluster, chief, 0)) == TaskSpecDef("worker", 0, ("p:1",), ("c:2",))


def test_environment():
    assert task(ENVIRONMENT) == TaskSpecDef("worker", 1, ("d:4", "e:5"), ("f:6", "g:7", "h:8"))
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
    assert found.worker_hosts == ("m:2", "v:3", "w:4")
    assert (found.index, found.is_ps()) == (expected, job == "ps")
    assert found.is_master() == (job == "master")


def test_master_on_its_own():
    found = task({"JOB_NAME": "master", "PS_HOSTS": "p:1", "MASTER_HOST": "m:2"})
    assert found == TaskSpecDef("worker", 0, ("p:1",), ("m:2",))


def test_flags_before_tf_config_before_environment():
    assert task(ENVIRONMENT | CONFIG, **FLAGS).worker_hosts == ("b:2", "c:3")
    assert task(ENVIRONMENT | CONFIG).worker_hosts == ("j:2", "k:3")


def test_half_of_the_flags_is_an_error_whatever_the_environment_says(user_error):
    with user_error("--job_name=worker", "--task_index, --ps_hosts, --worker_hosts is missing"):
        task(ENVIRONMENT | CONFIG, job_name="worker")


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_missing(user_error, name):
    with user_error(f"but --{name} is missing"):
        task(**FLAGS | {name: None})


@pytest.mark.parametrize("name", ["ps_hosts", "worker_hosts"])
def test_an_empty_list_of_hosts_is_missing(user_error, name):
    with user_error(f"but --{name} is missing"):
        task(**FLAGS | {name: []})


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
        {"cluster": {"ps": ["a:1"], "worker": ["b:2"]}, "task": {"type": "worker", "index": "first"}},
        {"cluster": {"ps": ["a:1"], "worker": ["b:2"]}, "task": {"type": "worker", "index": None}},
        {"cluster": [["a:1"], ["b:2"]], "task": WORKER_0},
        {"cluster": {"ps": None, "worker": ["b:2"]}, "task": WORKER_0},
        {"cluster": {"ps": [1], "worker": ["b:2"]}, "task": WORKER_0},
    ],
)
def test_tf_config_that_lacks_something(user_error, config):
    with user_error("TF_CONFIG lacks the cluster or the task", "expected {"):
        task({"TF_CONFIG": json.dumps(config)})


@pytest.mark.parametrize(
    "job, index, texts",
    [
        ("worker", 2, ["TF_CONFIG", "worker 2", "the cluster has 2: 0 to 1"]),
        ("worker", -1, ["TF_CONFIG", "worker -1"]),
        ("ps", 1, ["TF_CONFIG", "ps 1", "the cluster has 1"]),
        ("chief", 0, ["TF_CONFIG", "chief 0"]),
        ("evaluator", 0, ["TF_CONFIG", "'evaluator'", "ps or worker"]),
        (None, 0, ["TF_CONFIG", "ps or worker"]),
    ],
)
def test_task_that_is_not_in_tf_config(user_error, job, index, texts):
    with user_error(*texts):
        task(tf_config({"ps": ["i:1"], "worker": ["j:2", "k:3"]}, job, index))


@pytest.mark.parametrize("job, index", [("worker", -1), ("worker", 2), ("chief", 1), ("chief", -1)])
def test_task_that_is_not_in_a_tf_config_with_a_chief(user_error, job, index):
    with user_error("TF_CONFIG", f"{job} {index}"):
        task(tf_config({"ps": ["i:1"], "chief": ["c:1"], "worker": ["j:2", "k:3"]}, job, index))


@pytest.mark.parametrize("lacking", ["ps", "worker"])
def test_cluster_without_ps_or_without_worker(user_error, lacking):
    cluster = {"ps": ["i:1"], "worker": ["j:2"]}
    del cluster[lacking]
    with user_error("TF_CONFIG", f"no {lacking}", "at least one ps and one worker"):
        task(tf_config(cluster, "worker" if lacking == "ps" else "ps", 0))


@pytest.mark.parametrize("index", [2, 7])
def test_index_outside_the_flags_cluster(user_error, index):
    with user_error(f"worker {index}", "the cluster has 2: 0 to 1"):
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
    with user_error("'boss'", "ps or worker"):
        task(ENVIRONMENT | {"JOB_NAME": "boss"})


@pytest.mark.parametrize("host", ["localhost", "localhost:", "localhost:http", "", "::", ":2222", "localhost:0", "a:65536"])
def test_host_without_a_port_that_can_be(user_error, host):
    for flags in dict(ps_hosts=[host]), dict(worker_hosts=["b:2", host]):
        with user_error(repr(host), "expected host:port"):
            task(**FLAGS | flags)
    with user_error(repr(host), "expected host:port"):
        task(tf_config({"ps": [host], "worker": ["b:2"]}, "worker", 0))


def test_ipv6_host():
    assert task(**FLAGS | dict(ps_hosts=["[::1]:2222"])).ps_hosts == ("[::1]:2222",)


def test_what_a_task_knows():
    chief = TaskSpecDef("worker", 0, ("a:1", "b:1"), ("c:1", "d:1", "e:1"))
    other = TaskSpecDef("worker", 2, ("a:1", "b:1"), ("c:1", "d:1", "e:1"))
    ps = TaskSpecDef("ps", 0, ("a:1", "b:1"), ("c:1", "d:1", "e:1"))
    assert (chief.num_ps, chief.num_workers) == (2, 3)
    assert [t.is_master() for t in (chief, other, ps)] == [True, False, False]
    assert [t.is_ps() for t in (chief, other, ps)] == [False, False, True]
    assert other.device == "/job:worker/task:2"
    assert list(other.config().device_filters) == ["/job:ps", "/job:worker/task:2"]


def test_variables_go_to_the_ps_tasks_in_turn(graph):
    with tf.device(TaskSpecDef("worker", 1, ("a:1", "b:1"), ("c:1", "d:1")).device_fn()):
        variables = [tf.get_variable(f"v{i}", [], use_resource=True) for i in range(3)]
        product = 2 * variables[0]
    assert [v.device for v in variables] == ["/job:ps/task:0", "/job:ps/task:1", "/job:ps/task:0"]
    assert product.device == "/job:worker/task:1"
