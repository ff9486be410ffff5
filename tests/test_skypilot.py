"""Multiple-Machines/skypilot.py and skypilot.yaml: how a node that SkyPilot has rented learns its tasks, and runs them."""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from conftest import CHECKOUT
from runs import finish, result_of

from common.cluster import task_spec
from common.launch import launcher

FOLDER = CHECKOUT / "Multiple-Machines"
SCHEMAS = json.loads(Path(__file__).with_name("skypilot_schemas.json").read_text())
IPS = "10.0.0.4\n10.0.0.2\n10.0.0.9\n"


@pytest.fixture(scope="module")
def skypilot():
    """The module skypilot.py."""
    spec = importlib.util.spec_from_file_location("skypilot", FOLDER / "skypilot.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def node(rank, ips=IPS, **more):
    """The variables that SkyPilot sets on a node."""
    return {"SKYPILOT_NODE_IPS": ips, "SKYPILOT_NODE_RANK": str(rank), **more}


def test_nodes_find_each_other(skypilot, monkeypatch):
    """In the order of the list; what `TF_CONFIG` says is what a task takes from it."""
    found = [(rank, config) for rank in range(3) for config in skypilot.configs(node(rank, NUM_PS="2"))]
    assert [(rank, config["task"]) for rank, config in found] == [
        (0, {"type": "ps", "index": 0}),
        (0, {"type": "worker", "index": 0}),
        (1, {"type": "ps", "index": 1}),
        (1, {"type": "worker", "index": 1}),
        (2, {"type": "worker", "index": 2}),
    ]
    for rank, config in found:
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        task = task_spec.TaskSpec()
        assert task.hosts == {
            "ps": ["10.0.0.4:2222", "10.0.0.2:2222"],
            "worker": ["10.0.0.4:2223", "10.0.0.2:2223", "10.0.0.9:2223"],
        }
        assert task.hosts[task.job][task.job_index].startswith(IPS.split()[rank])


def test_one_ps_unless_another_number_is_given(skypilot):
    for more in {}, {"NUM_PS": ""}, {"NUM_PS": "1", "SKYPILOT_NUM_NODES": "3"}:
        assert [len(skypilot.configs(node(rank, **more))) for rank in range(3)] == [2, 1, 1]
    assert len(skypilot.configs(node(0, ips="10.0.0.4"))) == 2


@pytest.mark.parametrize(
    "environ, line",
    [
        ({}, "SKYPILOT_NODE_IPS and SKYPILOT_NODE_RANK must be set, as SkyPilot does: see "),
        ({"SKYPILOT_NODE_RANK": "0"}, "SKYPILOT_NODE_IPS must be set, as SkyPilot does: see "),
        (node(0, ips=" \n"), "SKYPILOT_NODE_IPS must be set, as SkyPilot does: see "),
        (node(""), "SKYPILOT_NODE_RANK must be set, as SkyPilot does: see "),
        (node(3), "SKYPILOT_NODE_RANK must be a whole number from 0 to 2, for 3 nodes, not '3'"),
        (node(-1), "SKYPILOT_NODE_RANK must be a whole number from 0 to 2, for 3 nodes, not '-1'"),
        (node("one"), "SKYPILOT_NODE_RANK must be a whole number from 0 to 2, for 3 nodes, not 'one'"),
        (node(0, SKYPILOT_NUM_NODES="4"), "SKYPILOT_NODE_IPS has 3 addresses, but SKYPILOT_NUM_NODES=4"),
        (node(0, SKYPILOT_NUM_NODES="x"), "SKYPILOT_NUM_NODES must be a whole number at least 1, not 'x'"),
        (node(0, ips="10.0.0.4\nnode2"), "SKYPILOT_NODE_IPS must be IPv4 addresses, one per line, not 'node2'"),
        (node(0, ips="10.0.0.4\n10.0.0.4"), "SKYPILOT_NODE_IPS must name each node once, but has 10.0.0.4 twice"),
        (node(0, NUM_PS="0"), "NUM_PS must be a whole number from 1 to 3, for 3 nodes, not '0'"),
        (node(0, NUM_PS="4"), "NUM_PS must be a whole number from 1 to 3, for 3 nodes, not '4'"),
    ],
)
def test_wrong_variables(skypilot, user_error, environ, line):
    with user_error(line):
        skypilot.configs(environ)


def test_the_chief_resumes_from_the_bucket_and_the_others_do_not_write_there(skypilot, tmp_path):
    run = ["bash", str(CHECKOUT / "HogWild" / "run.sh")]
    arguments = ["HogWild", f"--run_dir={tmp_path}", "--epochs=5"]
    assert skypilot.command_of(arguments, 0) == [*run, f"--run_dir={tmp_path}", "--epochs=5"]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "model.ckpt-7.index").touch()
    assert skypilot.command_of(arguments, 0) == [*run, f"--run_dir={tmp_path}", "--epochs=5", "--resume"]
    own = CHECKOUT / "runs" / "HogWild" / "skypilot" / tmp_path.name
    assert skypilot.command_of(arguments, 1) == [*run, f"--run_dir={own}", "--epochs=5"]


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "the scheme is missing; expected: bash Multiple-Machines/skypilot.sh SCHEME --run_dir=FOLDER "),
        (["Hogwild", "--run_dir=/runs/a"], "there is no scheme 'Hogwild'; expected: "),
        (["../HogWild", "--run_dir=/runs/a"], "there is no scheme '../HogWild'; expected: "),
        (["HogWild"], "--run_dir=FOLDER must follow the scheme; expected: "),
        (["HogWild", "--run_dir="], "--run_dir=FOLDER must follow the scheme; expected: "),
        (["HogWild", "--run_dir=/runs/a", "--num_ps=2"], "--num_ps=2 after --run_dir: the nodes, NUM_PS and "),
        (["HogWild", "--run_dir=/runs/a", "--run_dir=b"], "--run_dir=b after --run_dir: the nodes, NUM_PS and "),
        (["HogWild", "--run_dir=/runs/a", "--nolaunch"], "--nolaunch after --run_dir: the nodes, NUM_PS and "),
    ],
)
def test_wrong_arguments(skypilot, user_error, arguments, line):
    with user_error(line):
        skypilot.command_of(arguments, 0)


def validate(task):
    """Raises an exception unless SkyPilot takes this task, as far as its schemas tell."""
    jsonschema.validate(task, SCHEMAS["task"])
    jsonschema.validate(task["resources"], SCHEMAS["resources"])
    for mount in task["file_mounts"].values():
        jsonschema.validate(mount, SCHEMAS["storage"])


def test_skypilot_yaml():
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    validate(task)
    for part, key, value in [
        (task, "nodes", 2),
        (task, "envs", {"FLAGS": 5, "1": ""}),
        (task["resources"], "spot", True),
        (task["file_mounts"]["/runs"], "mode", "CACHED"),
    ]:
        before = dict(part)
        part[key] = value
        with pytest.raises(jsonschema.ValidationError):
            validate(task)
        part.clear()
        part.update(before)
    used = set(re.findall(r"\$(\w+)", task["run"]))
    assert used == {"SCHEME", "FLAGS"} == set(task["envs"]) - {"NUM_PS"}
    script = re.findall(r"bash (\S+)", task["run"] + "\n" + task["setup"])
    assert all((CHECKOUT / path).is_file() for path in script)


# Takes ports that are free here, and then what skypilot.sh does.
ON_FREE_PORTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import skypilot
skypilot.PORTS = json.loads(sys.argv[2])
sys.exit(skypilot.run(sys.argv[3:]))
"""


@pytest.mark.cluster
def test_a_node_trains(run_dir):
    """Its ps and its worker, both to their end."""
    arguments = ["HogWild", f"--run_dir={run_dir}", "--data=linear", "--model=linear", "--steps=1000"]
    with contextlib.ExitStack() as stack:
        ports = {job: stack.enter_context(launcher.reserved_port()).getsockname()[1] for job in ("ps", "worker")}
        process = subprocess.Popen(
            [sys.executable, "-c", ON_FREE_PORTS, str(FOLDER), json.dumps(ports), *arguments],
            env=os.environ | node(0, ips="127.0.0.1") | {"TF_GRPC_REUSE_PORT": "true", "VIRTUAL_ENV": sys.prefix},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        finish(process)
    result = result_of(run_dir)
    assert result["global_steps"] >= 1000
    assert (result["num_ps"], result["num_workers"]) == (1, 1)
