"""common/cluster/slurm.py: how a process that `srun` has started learns which task it is."""

import contextlib
import fcntl
import json
import os
import subprocess
import types
from unittest import mock

import pytest
from runs import ROOT, SECONDS

from common.cluster import slurm
from common.cluster.task_spec import TaskSpec, task_from


def step(rank, nodelist="node[1-3]", tasks_per_node="2(x3)", node=None, **more):
    """The variables that `srun` sets for a task, two on each of three nodes unless something else is given."""
    return {
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank // 2 if node is None else node),
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        **more,
    }


def task(environ):
    with mock.patch.dict(os.environ, environ, clear=True):
        return TaskSpec()


def test_tasks_find_each_other():
    found = [task(step(rank)) for rank in range(6)]
    assert [(one.type, one.index) for one in found] == [
        ("ps", 0),
        *(("worker", i) for i in range(5)),
    ]
    workers = ["node1:11701", "node2:11700", "node2:11701", "node3:11700", "node3:11701"]
    assert all(one.hosts == {"ps": ["node1:11700"], "worker": workers} for one in found)
    own = [one.hosts[one.job][one.job_index] for one in found]
    assert own == [f"node{1 + rank // 2}:{11700 + rank % 2}" for rank in range(6)]


def test_ps_tasks_are_spread_over_the_nodes():
    found = [task(step(rank, NUM_PS="4")) for rank in range(6)]
    assert found[0].hosts == {
        "ps": ["node1:11700", "node1:11701", "node2:11700", "node3:11700"],
        "worker": ["node2:11701", "node3:11701"],
    }
    assert [(one.type, one.index) for one in found] == [
        ("ps", 0),
        ("ps", 1),
        ("ps", 2),
        ("worker", 0),
        ("ps", 3),
        ("worker", 1),
    ]


def test_nodes_keep_slurms_order():
    """Sorted as text, node10 would come before node9."""
    found = task(step(1, "node[9-10]", "1(x2)", 1, SLURM_STEP_NUM_TASKS="2"))
    assert (found.type, found.hosts) == ("worker", {"ps": ["node9:11700"], "worker": ["node10:11700"]})


def test_unequal_nodes_and_names():
    found = task(step(3, "a,b[07-08]", "2,1(x2)", 2, SLURM_STEP_NUM_TASKS="4"))
    assert found.hosts == {"ps": ["a:11700"], "worker": ["a:11701", "b07:11700", "b08:11700"]}
    assert found.shard_index == 2


def test_reserved_ports():
    assert task(step(0, SLURM_STEP_RESV_PORTS="12345-12346")).hosts["worker"][0] == "node1:12346"
    assert task(step(0, SLURM_STEP_RESV_PORTS="12345,12400")).hosts["worker"][0] == "node1:12400"


def test_ports_of_neighbouring_steps_differ():
    steps = [(job, step) for job in range(1000, 1037) for step in range(4)]
    assert len({slurm.ports_of(*one) for one in steps}) == len(steps)
    assert all(10000 <= int(slurm.ports_of(*one)[:5]) < int(slurm.ports_of(*one)[-5:]) < 32768 for one in steps)


def test_lists_of_hosts():
    lists = {"a": ["a"], "n[1,3,5-6],m": ["n1", "n3", "n5", "n6", "m"], "n[098-102]": ["n098", "n099", "n100", "n101", "n102"]}
    assert {text: slurm.hosts_in("X", text) for text in lists} == lists
    assert len(slurm.hosts_in("X", "n[1-65536]")) == 65_536


def test_no_step_of_several_tasks():
    assert task({}) is None
    assert task(step(0, SLURM_STEP_NUM_TASKS="1")) is None
    assert task({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "6", "SLURM_PROCID": "0"}) is None  # as a batch script has it


def test_slurm_is_the_last_to_be_asked():
    environ = step(3) | {"JOB_NAME": "ps", "TASK_INDEX": "0", "PS_HOSTS": "p:1", "WORKER_HOSTS": "w:2"}
    assert task(environ).hosts["ps"] == ["p:1"]
    flags = types.SimpleNamespace(job_name="ps", task_index=0, ps_hosts=["q:1"], worker_hosts=["w:2"])
    with mock.patch.dict(os.environ, environ, clear=True):
        assert task_from(flags).hosts["ps"] == ["q:1"]


@pytest.mark.parametrize(
    "change, texts",
    [
        ({"SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST is missing"]),
        ({"SLURM_NODEID": "1"}, ["node by node", "srun --distribution=block"]),  # as --distribution=cyclic does
        ({"NUM_PS": "6"}, ["NUM_PS must be from 1 to 5", "'6'"]),
        ({"NUM_PS": "0"}, ["NUM_PS must be from 1 to 5"]),
        ({"NUM_PS": "two"}, ["NUM_PS must be from 1 to 5", "'two'"]),
        ({"SLURM_STEP_RESV_PORTS": "12345"}, ["2 tasks on a node, but only 1 ports", "--resv-ports=2"]),
        *(
            ({name: wrong}, ["Slurm: ", name, "a whole number of at least 0", repr(wrong)])
            for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")
            for wrong in ("one", "-1", "1.5", " ", "1 2", "٣", "9" * 30)
        ),
        ({"SLURM_PROCID": "6"}, ["SLURM_STEP_NUM_TASKS=6 and SLURM_PROCID=6 do not fit the 6 tasks of"]),
        ({"SLURM_STEP_NUM_TASKS": "7"}, ["SLURM_STEP_NUM_TASKS=7", "6 tasks of SLURM_STEP_TASKS_PER_NODE=2(x3)"]),
        ({"SLURM_NODEID": "7"}, ["node by node"]),
        *(
            ({"SLURM_STEP_NODELIST": wrong}, [f"Slurm: SLURM_STEP_NODELIST={wrong} is not a list", "as n[1-3,7]"])
            for wrong in ("n[1-", "n]1[", "n[3-1]", "n[]", "n[a-c]", "n[1-2-3]", "a,,b", ",", "n[1,]", "a b", "n[1-999999999]")
        ),
        ({"SLURM_STEP_NODELIST": "node[1-3]," * 30_000 + "a"}, ["is not a list of at most 65,536"]),
        ({"SLURM_STEP_NODELIST": "-o[1-3]"}, ["Slurm: the ps '-o1:11700' is not an address"]),
        ({"SLURM_STEP_NODELIST": "a,a,a"}, ["Slurm: a:11700 is the address of ps 0 and of worker 1"]),
        *(
            ({"SLURM_STEP_TASKS_PER_NODE": wrong}, [f"SLURM_STEP_TASKS_PER_NODE={wrong}", "of 3 nodes"])
            for wrong in ("2(x", "two", "2(x999999999)", "1(x99999)", "2(x3),1", "", "-2(x3)", "2(x-3)", "999999,1,1")
            if wrong
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["lists 2 nodes, but there are 3"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "60000(x3)", "SLURM_STEP_NUM_TASKS": "180000"}, ["do not fit the 180000 tasks"]),
        *(
            ({"SLURM_STEP_RESV_PORTS": wrong}, ["Slurm: ", f"SLURM_STEP_RESV_PORTS=[{wrong}] is not a list"])
            for wrong in ("1-999999999", "x", "12,", "12-11")
        ),
        ({"SLURM_STEP_RESV_PORTS": "65536-65540"}, ["Slurm: ", "is not an address"]),
    ],
)
def test_bad_step(change, texts, user_error):
    with user_error(*texts):
        task(step(1) | change)


@pytest.mark.parametrize(
    "rank, given, expected",
    [
        (0, "0,1", "-1"),  # the ps
        (1, "0,1", "0"),
        (2, "0,1", "0"),
        (3, "0,1", "1"),
        (3, "4,7", "7"),
        (3, "1", "1"),  # bound to the task, of two on the node
        (3, "GPU-a,GPU-b", "GPU-b"),
        (3, None, None),
    ],
)
def test_gpus(rank, given, expected):
    environ = step(rank, SLURM_GPUS_ON_NODE="2") | ({"CUDA_VISIBLE_DEVICES": given} if given else {})
    with mock.patch.dict(os.environ, environ, clear=True):
        TaskSpec()
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected


def test_several_gpus_bound_to_a_task():
    with mock.patch.dict(os.environ, step(3, SLURM_GPUS_ON_NODE="4", CUDA_VISIBLE_DEVICES="2,3"), clear=True):
        TaskSpec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_places_come_behind_the_tasks():
    """On nodes of the step, and on others; a node that is named twice has two."""
    found = [task(step(rank, PLACES="node[3-4],node4")) for rank in range(6)]
    workers = ["node1:11701", "node2:11700", "node2:11701", "node3:11700", "node3:11701"]
    places = ["node3:11702", "node4:11700", "node4:11701"]
    assert all(one.hosts == {"ps": ["node1:11700"], "worker": workers + places} for one in found)


def test_more_places_than_ports(user_error):
    with user_error("PLACES has more places on node4 than there are ports, 100"):
        task(step(0, PLACES=",".join(["node4"] * 101)))


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run whose worker 0 is there, with places on node4, node5, node4; of these the first is taken."""
    cluster = {"scheme": "HogWild", "ps": ["node1:1"], "worker": ["node1:2", "node4:1", "node5:1", "node4:2"]}
    arguments = ["--launch", "--run_dir=here", "--window=2"]
    (tmp_path / "cluster.json").write_text(json.dumps(cluster | {"arguments": arguments}))
    with contextlib.ExitStack() as stack:
        for worker in (0, 1):
            file = stack.enter_context(open(tmp_path / f"lock-worker-{worker}", "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        (tmp_path / "lock-worker-3").touch()  # of one that has left
        yield tmp_path


def test_what_a_job_that_joins_has_to_know(run_dir, capsys):
    assert slurm.main(run_dir) == 0
    assert capsys.readouterr() == ("HogWild\0" + "2 3\0" + "--launch\0--window=2\0", "")


@pytest.mark.parametrize(
    "file, line", [("cluster.json", "no run with PLACES began there"), ("lock-worker-0", "the run is over")]
)
def test_no_run_to_join(run_dir, capsys, file, line):
    (run_dir / file).unlink()
    assert slurm.main(run_dir) == 2
    out, err = capsys.readouterr()
    assert out == "" and line in err and err.count("\n") == 1


@pytest.mark.parametrize("form", ["--run_dir=here", "-run_dir=here", "--run_dir here", "-run_dir here"])
def test_a_job_that_joins_leaves_out_the_folder_that_the_run_was_told(run_dir, capsys, form):
    cluster = json.loads((run_dir / "cluster.json").read_text())
    cluster["arguments"] = ["--launch", *form.split(), "--window=2"]
    (run_dir / "cluster.json").write_text(json.dumps(cluster))
    assert slurm.main(run_dir) == 0
    assert capsys.readouterr().out == "HogWild\0" + "2 3\0" + "--launch\0--window=2\0"


@pytest.mark.parametrize(
    "change, line",
    [
        ({"scheme": "../evil"}, "names the scheme '../evil'; expected a folder of "),
        ({"scheme": "/tmp/evil"}, "names the scheme '/tmp/evil'; expected a folder of "),
        ({"scheme": ".."}, "names the scheme '..'; expected a folder of "),
        ({"scheme": "common"}, "names the scheme 'common'; expected a folder of "),
        ({"scheme": ["HogWild"]}, "names the scheme ['HogWild']; expected a folder of "),
        ({"arguments": "--model=m.py:f"}, "cluster.json is damaged"),
        ({"arguments": ["a\0--model=m.py:f"]}, "cluster.json is damaged"),
        ({"worker": None}, "cluster.json is damaged"),
    ],
)
def test_a_cluster_that_no_run_has_written(run_dir, capsys, user_error, change, line):
    cluster = json.loads((run_dir / "cluster.json").read_text())
    (run_dir / "cluster.json").write_text(json.dumps(cluster | change))
    assert slurm.main(run_dir) == 2
    out, err = capsys.readouterr()
    assert out == "" and line in err and err.count("\n") == 1
    with user_error(line):
        task({"FREE_PLACES": "2 3", "JOIN": str(run_dir), "SLURMD_NODENAME": "node4", "SLURM_LOCALID": "0"})


@pytest.mark.parametrize("name", ["cluster.json", "lock-worker-0", "lock-worker-2"])
@pytest.mark.parametrize("kind, problem", [("link", "is a link"), ("pipe", "is a pipe")])
def test_a_run_with_planted_files_is_not_joined(run_dir, tmp_path_factory, capsys, name, kind, problem):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    if (run_dir / name).exists():
        (run_dir / name).rename(elsewhere)
    else:
        elsewhere.touch()
    (run_dir / name).symlink_to(elsewhere) if kind == "link" else os.mkfifo(run_dir / name)
    assert slurm.main(run_dir) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"JOIN={run_dir} cannot be used: {name} {problem}" in err and err.count("\n") == 1


def test_a_run_of_another_user_is_not_joined(run_dir, capsys, monkeypatch):
    lstat = os.lstat
    theirs = lambda path: os.stat_result((*lstat(path)[:4], 12345, *lstat(path)[5:]))  # noqa: E731
    monkeypatch.setattr(os, "lstat", lambda path, **_: theirs(path) if str(path).endswith("cluster.json") else lstat(path))
    assert slurm.main(run_dir) == 2
    assert f"JOIN={run_dir} cannot be used: cluster.json belongs to another user" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["JOIN", "SLURMD_NODENAME", "SLURM_LOCALID"])
def test_free_places_without_a_run(run_dir, user_error, missing):
    environ = {"FREE_PLACES": "2 3", "JOIN": str(run_dir), "SLURMD_NODENAME": "node4", "SLURM_LOCALID": "0"}
    with user_error(f"FREE_PLACES names places of a run to join, but {missing} is missing"):
        task({name: value for name, value in environ.items() if name != missing})


# In place of srun: worker 0 saves a checkpoint and is killed; what is started next is written down.
SRUN = """#!/bin/bash
if [[ -e run/checkpoints/model.ckpt-1.index ]]; then printf '%s ' "$@" >>started; exit 0; fi
mkdir -p run/checkpoints; touch run/checkpoints/model.ckpt-1.index; exit 137
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["--run_dir=run", "-run_dir=run", "--run_dir run", "-run_dir run"])
def test_a_job_goes_on_after_a_death_however_its_folder_is_given(form, tmp_path):
    sbatch = ROOT / "Multiple-Machines" / "slurm.sbatch"
    programs = {"scontrol": f"#!/bin/sh\necho '   Command={sbatch}'\n", "srun": SRUN}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "SLURM_NTASKS": "3"}
    subprocess.run(["bash", sbatch, "HogWild", *form.split()], cwd=tmp_path, env=environ, check=True, timeout=SECONDS)
    assert (tmp_path / "started").read_text().endswith(" --resume ")


@pytest.mark.parametrize("node, local, index", [("node4", 0, 3), ("node5", 0, 2)])
def test_place_of_a_task_that_joins(run_dir, node, local, index):
    """One that is free, on its node."""
    found = task({"FREE_PLACES": "2 3", "JOIN": str(run_dir), "SLURMD_NODENAME": node, "SLURM_LOCALID": str(local)})
    assert (found.type, found.index, found.num_workers, found.ps_hosts) == ("worker", index, 4, ["node1:1"])


@pytest.mark.parametrize("free, node, local", [("2 3", "node4", 1), ("2 3", "node1", 0), ("", "node4", 0)])
def test_no_place_for_a_task_that_joins(run_dir, user_error, free, node, local):
    with user_error(f"places are free on {node}, too few for {local + 1} workers"):
        task({"FREE_PLACES": free, "JOIN": str(run_dir), "SLURMD_NODENAME": node, "SLURM_LOCALID": str(local)})
