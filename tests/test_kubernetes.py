"""Multiple-Machines/kubernetes: its manifests fit the published schemas, and what they start trains.

There is no cluster here. In a few lines `pods_of` and `Pod` do what Kubernetes and the training operator make of a manifest:
which pods there are, their names, and their environment.
"""

import contextlib
import copy
import functools
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import by_hand
import jsonschema
import kubernetes_validate
import pytest
import yaml
from conftest import CHECKOUT
from kubeflow.training import ApiClient
from runs import (
    ENDLESS,
    HOGWILD,
    SECONDS,
    finish,
    is_training,
    may_mount,
    needs_mounts,
    read_until,
    result_of,
    updates_of,
    wait_until,
)

from common.launch import launcher, supervisor

pytestmark = pytest.mark.slow

FOLDER = CHECKOUT / "Multiple-Machines" / "kubernetes"
KINDS = ["plain", "statefulset", "jobset", "trainjob", "tfjob"]
IMAGE = "registry.example/me/training:1"

ENVIRON = {**os.environ, **({"VIRTUAL_ENV": sys.prefix} if sys.prefix != sys.base_prefix else {})}  # for common/setup.sh


@functools.cache
def program():
    """The module manifest.py."""
    spec = importlib.util.spec_from_file_location("manifest", FOLDER / "manifest.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def text_of(*arguments):
    """The output of manifest.py for a scheme, without a check of its flags."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        program().main([arguments[0], "--nocheck_flags", f"--image={IMAGE}", *arguments[1:]])
    return output.getvalue()


def objects(*arguments):
    """The objects that it prints."""
    return list(yaml.safe_load_all(text_of(*arguments)))


@functools.cache
def runtime_of(name):
    """The ClusterTrainingRuntime of this name, as manifest.py prints it, for a cluster in which it was installed."""
    ((num_ps, gpus),) = re.findall(r"^parameter-servers-(\d+)(-gpu)?$", name)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        program().main(["--kind=runtime", f"--num_ps={num_ps}", f"--gpus_per_worker={len(gpus[:1])}"])
    runtime = yaml.safe_load(output.getvalue())
    assert runtime["metadata"]["name"] == name
    return runtime


def run(*arguments):
    """Runs manifest.sh to its end."""
    command = ["bash", str(FOLDER / "manifest.sh"), *arguments]
    return subprocess.run(command, env=ENVIRON, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS)


def only(things, kind):
    """The one object of a kind."""
    (found,) = (thing for thing in things if thing["kind"] == kind)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Schemas


# Of the releases that "source" names. Parts of Kubernetes itself are left out: they are only an object or a list there.
SCHEMAS = json.loads(Path(__file__).with_name("kubernetes_schemas.json").read_text())


def validate(thing):
    """Raises an exception unless an object is as Kubernetes, JobSet, or Kubeflow publishes that it has to be."""
    if thing["kind"] in SCHEMAS:
        jsonschema.validate(thing, SCHEMAS[thing["kind"]]["schema"])
        specs = {"JobSet": lambda: thing["spec"], "ClusterTrainingRuntime": lambda: thing["spec"]["template"]["spec"]}
        job_set = specs[thing["kind"]]() if thing["kind"] in specs else job_set_of(thing)["spec"]
        for job in job_set["replicatedJobs"]:
            validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": job["template"]["spec"]})
        targets = [job_set["successPolicy"], *job_set["failurePolicy"]["rules"]]  # by the webhook of JobSet: names that exist
        for role in (role for target in targets for role in target.get("targetReplicatedJobs", [])):
            assert role in [job["name"] for job in job_set["replicatedJobs"]]
        return
    if thing["kind"] != "TFJob":
        kubernetes_validate.validate(thing, "1.31", strict=True)  # the first version in which all that is used is stable
        kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)
        return
    # The operator's own classes take what they know of it, each value as the type that it has to have.
    client = ApiClient()
    read = client.deserialize(types.SimpleNamespace(data=json.dumps(thing)), "KubeflowOrgV1TFJob")
    assert client.sanitize_for_serialization(read) == thing
    for replica in thing["spec"]["tfReplicaSpecs"].values():
        validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": replica["template"]})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "arguments",
    [
        ["HogWild"],
        ["DOWNPOUR", "--num_ps=2", "--num_workers=4", "--name=second-try", "--gpus_per_worker=1", "--storage=500Mi"],
        ["Synchronous-SGD-different-learning-rates", "--num_workers=1"],
        ["AEASGD", "--num_workers=300", "--name=on", "--num_ps=20"],  # a name that YAML takes for a truth value
    ],
    ids=lambda arguments: arguments[0],
)
def test_published_schemas(kind, arguments):
    things = objects(*arguments, f"--kind={kind}")
    for thing in things:
        validate(thing)
    parts = {
        "plain": {"Service", "Job"},
        "statefulset": {"Service", "Job", "StatefulSet"},
        "jobset": {"JobSet"},
        "trainjob": {"TrainJob"},
        "tfjob": {"TFJob"},
    }
    expected = parts[kind]
    assert {thing["kind"] for thing in things} == {*expected, "NetworkPolicy", "PersistentVolumeClaim"}


@pytest.mark.parametrize("name", ["parameter-servers-1", "parameter-servers-20-gpu"])
def test_runtime_of_a_train_job(name):
    runtime = runtime_of(name)
    validate(runtime)
    for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        assert not {"image", "args"} & set(container)  # those of a TrainJob
        has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert has_gpu == (name.endswith("-gpu") and job["name"] != "ps")


def test_train_job_names_the_command_that_installs_its_runtime():
    arguments = ["HogWild", "--kind=trainjob", "--num_ps=3", "--gpus_per_worker=1"]
    line = text_of(*arguments).splitlines()[1]
    assert line.startswith("# once for each cluster: bash Multiple-Machines/kubernetes/manifest.sh ")
    command, _, install = line.partition("manifest.sh ")[2].partition(" | ")
    assert install == "kubectl apply -f -"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        program().main(shlex.split(command))
    name = only(objects(*arguments), "TrainJob")["spec"]["runtimeRef"]["name"]
    assert yaml.safe_load(output.getvalue())["metadata"]["name"] == name


@pytest.mark.parametrize("file", ["plain.yaml", "tfjob.yaml"])
def test_the_templates_are_manifests_themselves(file):
    documents = list(yaml.safe_load_all((FOLDER / file).read_text()))
    items = [thing for document in documents for thing in document.get("items", [document])]
    for thing in items:
        validate(json.loads(json.dumps(thing)))
    filled_in = objects("HogWild", f"--kind={file.removesuffix('.yaml')}")
    assert json.loads(json.dumps(items).replace("REGISTRY/IMAGE", IMAGE)) == filled_in


POD = "spec.template.spec"
REPLICA = "spec.tfReplicaSpecs.PS"


@pytest.mark.parametrize(
    "kind, which, path, value",
    [
        ("plain", "Job", "spec.completionmode", "Indexed"),
        ("plain", "Job", "spec.parallelism", "1"),
        ("plain", "Job", "spec.template", None),
        ("plain", "Job", f"{POD}.container", []),
        ("plain", "Job", f"{POD}.containers", None),
        ("plain", "Job", f"{POD}.containers.0.name", None),
        ("plain", "Job", f"{POD}.containers.0.args", "HogWild"),
        ("plain", "Job", f"{POD}.containers.0.env.1.valueFrom.fieldRef.fieldPath", None),
        ("plain", "Job", f"{POD}.securityContext.runAsNonroot", True),
        ("plain", "Job", f"{POD}.terminationGracePeriodSeconds", "60"),
        ("plain", "Job", "spec.podFailurePolicy.rules.0.action", None),
        ("plain", "Service", "spec.ports.0.port", "2222"),
        ("plain", "NetworkPolicy", "spec.egres", []),
        ("plain", "NetworkPolicy", "spec.ingress.0.from.0.podSelector.matchLabel", {}),
        ("plain", "PersistentVolumeClaim", "spec.accessModes", "ReadWriteOnce"),
        ("statefulset", "StatefulSet", "spec.selector", None),
        ("statefulset", "StatefulSet", "spec.completions", 1),
        ("jobset", "JobSet", "spec.successPolicy.operator", "Some"),
        ("jobset", "JobSet", "spec.successPolicy.targetReplicatedJobs.0", "master"),
        ("jobset", "JobSet", "spec.failurePolicy.maxRestarts", "3"),
        ("jobset", "JobSet", "spec.failurePolicy.rules.0.action", "FailJob"),
        ("jobset", "JobSet", "spec.replicatedJobs.0.name", None),
        ("jobset", "JobSet", "spec.replicatedJobs.0.replicas", "1"),
        ("jobset", "JobSet", "spec.replicatedJobs.0.template.spec.parallelism", "1"),
        ("jobset", "JobSet", f"spec.replicatedJobs.0.template.{POD}.containers", None),
        ("trainjob", "TrainJob", "spec.runtimeRef", None),
        ("trainjob", "TrainJob", "spec.trainer.numNodes", "1"),
        ("trainjob", "TrainJob", "spec.trainer.numWorkers", 1),
        ("trainjob", "TrainJob", "spec.runtimePatches.0.manager", None),
        ("trainjob", "TrainJob", "spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.0.replicas", 2),
        ("trainjob", "TrainJob", "spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.0.name", "master"),
        ("tfjob", "TFJob", "spec.tfReplicaSpecs", None),
        ("tfjob", "TFJob", "spec.tfReplicaSpec", {}),
        ("tfjob", "TFJob", "spec.runPolicy.cleanPodpolicy", "All"),
        ("tfjob", "TFJob", "spec.runPolicy.cleanPodPolicy", 1),
        ("tfjob", "TFJob", f"{REPLICA}.replicas", "1"),
        ("tfjob", "TFJob", f"{REPLICA}.completions", 1),
        ("tfjob", "TFJob", f"{REPLICA}.template.spec.containers", None),
        ("tfjob", "TFJob", f"{REPLICA}.template.spec.containers.0.limits", {}),
        ("tfjob", "TFJob", f"{REPLICA}.template.spec.containers.0.ports.0.containerPort", "2222"),
    ],
)
def test_a_mistake_in_a_manifest_is_found(kind, which, path, value):
    """Each is one key that there is not, a value of another type, or a missing one (None)."""
    things = objects("HogWild", f"--kind={kind}")
    thing = copy.deepcopy(next(thing for thing in things if thing["kind"] == which))
    validate(thing)
    *way, last = path.split(".")
    inside: Any = thing
    for key in way:
        inside = inside[int(key) if key.isdigit() else key]
    if value is None:
        del inside[last]
    else:
        last = int(last) if isinstance(inside, list) else last
        assert (inside[last] if isinstance(inside, list) else inside.get(last)) != value
        inside[last] = value
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError, AssertionError, ValueError)):
        validate(thing)


# ---------------------------------------------------------------------------------------------------------------------
# What Kubernetes makes of a manifest


class Pod(NamedTuple):
    """A pod."""

    name: str
    host: str  # what the others call it
    labels: dict
    annotations: dict
    spec: dict

    @property
    def container(self):
        (container,) = self.spec["containers"]
        return container

    def environ(self):
        """The environment, as the kubelet fills it in."""
        variables: dict[str, str] = {}
        for variable in self.container["env"]:
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                ((field, key),) = re.findall(r"^metadata\.(labels|annotations)\['(.*)'\]$", source["fieldRef"]["fieldPath"])
                variables[variable["name"]] = getattr(self, field)[key]
            elif "resourceFieldRef" in source:
                group, key = source["resourceFieldRef"]["resource"].split(".")
                variables[variable["name"]] = self.container["resources"][group][key]
            else:
                variables[variable["name"]] = expanded(variable["value"], variables)
        return variables

    def command(self):
        """The command line, as the kubelet fills it in."""
        return [expanded(word, self.environ()) for word in (*self.container["command"], *self.container["args"])]


def expanded(text, variables):
    """Kubernetes replaces $(X) if there is an X, and $$ by a $."""
    return re.sub(r"\$\$|\$\((.*?)\)", lambda match: "$" if match[1] is None else variables.get(match[1], match[0]), text)


def pods_of(things):
    """The pods that these objects make."""
    return [pod for thing in things for pod in MAKERS.get(thing["kind"], lambda thing: [])(thing)]


def _pods_of_job(job):
    name, template = job["metadata"]["name"], job["spec"]["template"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["parallelism"] == job["spec"]["completions"]
    key = "batch.kubernetes.io/job-completion-index"
    for index in range(job["spec"]["completions"]):
        labels, annotations = {**template["metadata"]["labels"], key: str(index)}, {key: str(index)}
        host = f"{name}-{index}.{template['spec']['subdomain']}"
        yield Pod(f"{name}-{index}", host, labels, annotations, template["spec"])


def _pods_of_stateful_set(stateful_set):
    name, template = stateful_set["metadata"]["name"], stateful_set["spec"]["template"]
    assert stateful_set["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert "restartPolicy" not in template["spec"]  # Kubernetes takes nothing but Always
    for index in range(stateful_set["spec"]["replicas"]):
        labels = {**template["metadata"]["labels"], "apps.kubernetes.io/pod-index": str(index)}
        yield Pod(f"{name}-{index}", f"{name}-{index}.{stateful_set['spec']['serviceName']}", labels, {}, template["spec"])


def _pods_of_tfjob(tfjob):
    """As the training operator does it: genClusterSpec and genTFConfigJSONStr, createNewPod, in its repository."""
    name, specs = tfjob["metadata"]["name"], tfjob["spec"]["tfReplicaSpecs"]
    cluster = {}
    for role, replica in specs.items():
        (container,) = (each for each in replica["template"]["spec"]["containers"] if each["name"] == "tensorflow")
        (port,) = (each["containerPort"] for each in container["ports"] if each["name"] == "tfjob-port")
        cluster[role.lower()] = [f"{name}-{role.lower()}-{i}.default.svc:{port}" for i in range(replica["replicas"])]
    for role, replica in specs.items():
        for index in range(replica["replicas"]):
            config = {"cluster": cluster, "task": {"type": role.lower(), "index": index}, "environment": "cloud"}
            spec = copy.deepcopy(replica["template"]["spec"])
            spec["containers"][0]["env"].append({"name": "TF_CONFIG", "value": json.dumps(config)})
            labels = {
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/operator-name": "tfjob-controller",
                "training.kubeflow.org/replica-type": role.lower(),
                "training.kubeflow.org/replica-index": str(index),
            }
            pod = f"{name}-{role.lower()}-{index}"
            yield Pod(pod, f"{pod}.default.svc", labels, replica["template"]["metadata"]["annotations"], spec)


def _pods_of_job_set(job_set):
    """As JobSet does it: constructJob, labelAndAnnotateObject and GetSubdomain, in its repository."""
    name = job_set["metadata"]["name"]
    for replicated in job_set["spec"]["replicatedJobs"]:
        assert replicated["replicas"] == 1
        job = copy.deepcopy(replicated["template"])
        job["metadata"] = {"name": f"{name}-{replicated['name']}-0"}
        template = job["spec"]["template"]
        template["metadata"]["labels"] |= {
            "jobset.sigs.k8s.io/jobset-name": name,
            "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
        }
        template["spec"]["subdomain"] = name
        yield from _pods_of_job(job)


def job_set_of(train_job):
    """As Kubeflow Trainer does it: mergeRuntimePatches, newRuntimeInfo, PlainML and Builder.Trainer, in its repository."""
    spec, runtime = train_job["spec"], runtime_of(train_job["spec"]["runtimeRef"]["name"])
    job_set = copy.deepcopy(runtime["spec"]["template"]["spec"])
    jobs = {job["name"]: job["template"] for job in job_set["replicatedJobs"]}
    for patch in (patch["trainingRuntimeSpec"]["template"]["spec"] for patch in spec["runtimePatches"]):
        for part in patch["replicatedJobs"]:
            ((key, volumes),) = part["template"]["spec"]["template"]["spec"].items()
            assert part["name"] in jobs
            pod = jobs[part["name"]]["spec"]["template"]["spec"]
            assert key == "volumes" and not {each["name"] for each in volumes} & {each["name"] for each in pod["volumes"]}
            pod["volumes"] = [*volumes, *pod["volumes"]]
    assert "mlPolicy" not in runtime["spec"] and set(spec["trainer"]) == {"image", "args", "env", "numNodes"}
    is_first = True
    for job in jobs.values():
        assert job["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
        if is_first:
            job["spec"].update(completions=spec["trainer"]["numNodes"], parallelism=spec["trainer"]["numNodes"])
        is_first = False
        (container,) = (each for each in job["spec"]["template"]["spec"]["containers"] if each["name"] == "node")
        container.update(image=spec["trainer"]["image"], args=spec["trainer"]["args"])
        container["env"] += spec["trainer"]["env"]
    return {"kind": "JobSet", "metadata": train_job["metadata"], "spec": job_set}


MAKERS = {
    "Job": _pods_of_job,
    "StatefulSet": _pods_of_stateful_set,
    "JobSet": _pods_of_job_set,
    "TrainJob": lambda train_job: _pods_of_job_set(job_set_of(train_job)),
    "TFJob": _pods_of_tfjob,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ps, num_workers", [(1, 1), (2, 4), (3, 12)])
def test_every_task_knows_the_cluster_and_its_place_in_it(kind, num_ps, num_workers):
    things = objects("DOWNPOUR", f"--kind={kind}", f"--num_ps={num_ps}", f"--num_workers={num_workers}", "--name=try")
    pods = pods_of(things)
    configs = [json.loads(pod.environ()["TF_CONFIG"]) for pod in pods]
    expected = {"chief": 1, "ps": num_ps} | ({"worker": num_workers - 1} if num_workers > 1 else {})
    for pod, config in zip(pods, configs):
        assert config["cluster"] == configs[0]["cluster"]
        role, index = config["task"]["type"], config["task"]["index"]
        assert config["cluster"][role][index] == f"{pod.host}:2222"
        assert len(pod.host.split(".")[0]) <= 63
        assert pod.container["image"] == IMAGE
    assert {role: len(hosts) for role, hosts in configs[0]["cluster"].items()} == expected
    assert len(pods) == len({pod.host for pod in pods}) == num_ps + num_workers


PLACES = ["--num_workers=3", "--max_workers=6"]


@pytest.mark.parametrize("kind", ["plain", "statefulset", "jobset"])
def test_places_are_names_of_pods_that_there_are_not_yet(kind):
    things = objects("HogWild", f"--kind={kind}", *PLACES)
    for thing in things:
        validate(thing)
    pods = pods_of(things)
    job = "-0" if kind == "jobset" else ""
    names = [f"hogwild-worker{job}-{i}.hogwild" for i in range(5)]
    assert [pod.host for pod in pods if pod.labels["role"] == "worker"] == names[:2]
    for pod in pods:
        cluster = json.loads(pod.environ()["TF_CONFIG"])["cluster"]
        assert cluster["worker"] == [f"{name}:2222" for name in names]
        assert pod.container["args"] == ["HogWild", "--run_dir=/runs/hogwild", *PLACES]


def patched(things, arguments):
    """The objects after the command in the second line of the manifest with these arguments, as the API server merges them."""
    line = text_of(*arguments).splitlines()[1]
    command, patch, kind, name, merge, how = shlex.split(line.removeprefix("# "))
    assert (command, patch, kind, merge) == ("kubectl", "patch", "job", "--type=merge")
    things = copy.deepcopy(things)
    (job,) = (thing for thing in things if (thing["kind"].lower(), thing["metadata"]["name"]) == (kind, name))
    for key, value in json.loads(how.removeprefix("--patch="))["spec"].items():
        assert key in job["spec"]
        job["spec"][key] = value
    return things


def test_the_command_that_scales_a_job_set():
    """With JobSet's feature gate ElasticJobSet: both numbers of an Indexed Job change together, and nothing else may."""
    arguments = ["HogWild", "--kind=jobset", *PLACES]
    line = text_of(*arguments).splitlines()[1]
    *command, patch = shlex.split(line.removeprefix("# "))
    assert command == ["kubectl", "patch", "jobset", "hogwild", "--type=json"]
    before, after = objects(*arguments), copy.deepcopy(objects(*arguments))
    for change in json.loads(patch.removeprefix("--patch=")):
        inside: Any = only(after, "JobSet")
        *way, last = change["path"].removeprefix("/").split("/")
        for key in way:
            inside = inside[int(key) if key.isdigit() else key]
        assert change["op"] == "replace" and inside[last] == 2
        inside[last] = change["value"]
    validate(only(after, "JobSet"))
    assert [pod for pod in pods_of(after) if pod in pods_of(before)] == pods_of(before)
    assert [pod.host for pod in pods_of(after) if pod not in pods_of(before)] == [
        f"hogwild-worker-0-{i}.hogwild" for i in (2, 3, 4)
    ]


def test_the_command_that_scales():
    """It changes nothing but the number: of an Indexed Job, both numbers may change, if they stay equal."""
    arguments = ["HogWild", *PLACES]
    before, after = objects(*arguments), patched(objects(*arguments), arguments)
    for thing in after:
        validate(thing)
    assert [pod for pod in pods_of(after) if pod in pods_of(before)] == pods_of(before)
    assert [pod.host for pod in pods_of(after) if pod not in pods_of(before)] == [
        f"hogwild-worker-{i}.hogwild" for i in (2, 3, 4)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_pods_of_a_training_reach_each_other(kind):
    things = objects("HogWild", f"--kind={kind}", "--name=try")
    policy = only(things, "NetworkPolicy")["spec"]
    same = policy["podSelector"]["matchLabels"]
    page = (CHECKOUT / "SECURITY.md").read_text()
    (shown,) = (yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S))
    assert json.loads(json.dumps(shown["spec"]).replace('{"training": "hogwild"}', json.dumps(same))) == policy
    for pod in pods_of(things):
        assert same.items() <= pod.labels.items()
        assert [port["containerPort"] for port in pod.container["ports"]] == [2222]
        assert "hostNetwork" not in pod.spec  # to which no policy applies
    for other in pods_of(objects("HogWild", f"--kind={kind}", "--name=another")):
        assert not same.items() <= other.labels.items()
    if kind in ("plain", "statefulset"):
        service = only(things, "Service")
        assert (service["spec"]["selector"], service["spec"]["clusterIP"]) == (same, "None")
        assert all(pod.host.endswith(f".{service['metadata']['name']}") for pod in pods_of(things))


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_no_rights_that_they_do_not_need(kind):
    for pod in pods_of(objects("HogWild", f"--kind={kind}")):
        assert pod.spec["securityContext"]["runAsNonRoot"] and pod.spec["securityContext"]["runAsUser"] > 0
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert pod.spec["terminationGracePeriodSeconds"] >= supervisor.STOP_SECONDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_chief_alone_has_the_volume_and_workers_have_gpus(kind):
    things = objects("HogWild", f"--kind={kind}", "--gpus_per_worker=1", "--storage=5Ti", "--num_workers=3")
    claim = only(things, "PersistentVolumeClaim")
    assert claim["spec"]["resources"]["requests"] == {"storage": "5Ti"}
    for pod in pods_of(things):
        role = json.loads(pod.environ()["TF_CONFIG"])["task"]["type"]
        volume, temporary = pod.spec["volumes"]
        assert temporary == {"name": "tmp", "emptyDir": {}}
        assert [mount["mountPath"] for mount in pod.container["volumeMounts"]] == ["/runs", "/tmp"]
        expected = {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}} if role == "chief" else {"emptyDir": {}}
        assert volume == {"name": "runs", **expected}
        assert pod.container["resources"]["limits"].get("nvidia.com/gpu") == (None if role == "ps" else "1")


# ---------------------------------------------------------------------------------------------------------------------
# Flags

ONLY = "--kind=runtime takes only --num_ps and --gpus_per_worker"
STRANGE = ["--a=it's", '--b="two words"', "--c=$HOME $(ROLE) $$(INDEX) $$ $(", "--d=x: {y}", "--e=# no", "--f=", "--g=ä\n!"]


@pytest.mark.parametrize("kind", KINDS)
def test_flags_arrive_unchanged(kind, tmp_path):
    """Through manifest.sh, YAML, Kubernetes, entry.sh and run.sh."""
    ended = run("HogWild", f"--image={IMAGE}", f"--kind={kind}", "--nocheck_flags", "--", *STRANGE)  # there are no such flags
    assert (ended.returncode, ended.stderr) == (0, "")
    things = list(yaml.safe_load_all(ended.stdout))
    (tmp_path / "Multiple-Machines" / "kubernetes").mkdir(parents=True)
    (tmp_path / "HogWild").mkdir()
    entry = tmp_path / "Multiple-Machines" / "kubernetes" / "entry.sh"
    entry.write_text((FOLDER / "entry.sh").read_text())
    (tmp_path / "HogWild" / "run.sh").write_text("printf '%s\\0' \"$@\"")
    for pod in pods_of(things):
        command = [word.replace("/app/", f"{tmp_path}/").replace("/runs/", f"{tmp_path}/runs/") for word in pod.command()]
        arrived = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
        assert arrived == [f"--run_dir={tmp_path}/runs/hogwild", *STRANGE]


def test_the_scheme_s_own_flags_and_the_command_are_in_the_manifest():
    flags = ["--window=20", "--epochs=100"]
    ended = run("DOWNPOUR", "--num_ps=2", "--image=a/b", "--", *flags)
    assert (ended.returncode, ended.stderr) == (0, "")
    first, rest = ended.stdout.split("\n", 1)
    expected = "# bash Multiple-Machines/kubernetes/manifest.sh DOWNPOUR --num_ps=2 --image=a/b -- --window=20 --epochs=100"
    assert first == expected
    for pod in pods_of(yaml.safe_load_all(rest)):
        assert pod.container["args"] == ["DOWNPOUR", "--run_dir=/runs/downpour", *flags]


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "a scheme is missing: manifest.sh SCHEME --image=REGISTRY/IMAGE; the schemes are AEAMSGD, AEASGD,"),
        (["--image=a/b"], "a scheme is missing: "),
        (["Hogwild", "--image=a/b"], "there is no scheme 'Hogwild'; expected one of AEAMSGD, AEASGD,"),
        (["tests", "--image=a/b"], "there is no scheme 'tests'; "),
        (["benchmarks", "--image=a/b"], "there is no scheme 'benchmarks'; "),
        (["Non-Distributed-Setup", "--image=a/b"], "there is no scheme 'Non-Distributed-Setup'; "),
        (["HogWild"], "--image is missing: give its name as in `docker push REGISTRY/IMAGE`, see README.md"),
        (["HogWild", "--image="], "--image must be one word, not ''"),
        (["HogWild", "--image=a b"], "--image must be one word, not 'a b'"),
        (["HogWild", "--image=a/b", "--num_ps=0"], "--num_ps must be at least 1, not 0"),
        (["HogWild", "--image=a/b", "--num_workers=0"], "--num_workers must be at least 1, not 0"),
        (["HogWild", "--image=a/b", "--max_workers=1"], "--max_workers must be at least 2, not 1"),
        (["HogWild", "--image=a/b", "--max_workers=300"], "--max_workers must be at most 256, not 300"),
        (
            ["HogWild", "--image=a/b", "--max_workers=4", "--num_workers=1"],
            "--num_workers must be from 2 to --max_workers=4, not 1",
        ),
        (
            ["HogWild", "--image=a/b", "--max_workers=4", "--num_workers=5"],
            "--num_workers must be from 2 to --max_workers=4, not 5",
        ),
        (
            ["HogWild", "--image=a/b", "--max_workers=4", "--kind=tfjob"],
            "--max_workers: the operator tells a pod only the workers ",
        ),
        (["HogWild", "--image=a/b", "--max_workers=4", "--kind=trainjob"], "--max_workers: the number of pods of a TrainJob "),
        (["HogWild", "--kind=runtime"], f"{ONLY}: leave out a scheme"),
        (["--kind=runtime", "--image=a/b"], f"{ONLY}: leave out --image"),
        (["--kind=runtime", "--", "--window=5"], f"{ONLY}: leave out the scheme's flags"),
        (["--kind=runtime", "--num_workers=4"], f"{ONLY}: leave out --num_workers"),
        (
            ["HogWild", "--image=a/b", f"--name={44 * 'a'}", "--kind=jobset"],
            "--name must have at most 43 lowercase letters, digits and dashes",
        ),
        (["HogWild", "--image=a/b", "--", "--max_workers=4"], "--max_workers=4 after --: the manifest sets the host and "),
        (["Asynchronous-DiLoCo", "--image=a/b", "--max_workers=4"], "--max_workers: the rule of this scheme uses the number "),
        (["HogWild", "--image=a/b", "--num_workers=two"], "--num_workers must be a whole number, not 'two'"),
        (["HogWild", "--image=a/b", "--gpus_per_worker=2"], "--gpus_per_worker must be at most 1, not 2"),
        (["HogWild", "--image=a/b", "--kind=helm"], "flag --kind=helm: value should be one of <plain|statefulset|jobset|"),
        (["HogWild", "--image=a/b", "--name=My_Run"], "--name must have at most 45 lowercase letters, digits and dashes"),
        (["HogWild", "--image=a/b", "--name=1st"], "--name must have at most 45 lowercase letters, digits and dashes"),
        (["HogWild", "--image=a/b", "--name="], "--name must have at most 45 lowercase letters, digits and dashes"),
        (["HogWild", "--image=a/b", f"--name={46 * 'a'}"], "--name must have at most 45 lowercase letters, digits and dashes"),
        (["HogWild", "--image=a/b", "--storage=much"], "--storage must be a size such as 10Gi, not 'much'"),
        (
            ["HogWild", "--image=a/b", "--epochs=5"],
            "unknown flag --epochs (--help lists all); the scheme's own flags come ",
        ),
        (["HogWild", "--image=a/b", "window"], "unexpected argument 'window': flags are written --name=value"),
        (["HogWild", "--image=a/b", "--", "--run_dir=x"], "--run_dir=x after --: the manifest sets the host and "),
        (["HogWild", "--image=a/b", "--", "--num_ps", "2"], "--num_ps after --: the manifest sets the host and "),
        (["HogWild", "--image=a/b", "--", "--nolaunch"], "--nolaunch after --: the manifest sets the host and "),
        (["HogWild", "--image=a/b", "--", "--resume"], "--resume after --: the manifest sets the host and "),
        (["HogWild", "--image=a/b", "--", "--flagfile=f"], "unknown flag --flagfile=f after -- (HogWild/run.sh --help lists "),
        (["HogWild", "--image=a/b", "--nocheck_flags", "--", "-flagfile", "f"], "unknown flag -flagfile after -- "),
        (["HogWild", "--image=a/b", "--nocheck_flags", "--", "--undefok=x"], "unknown flag --undefok=x after -- "),
        (["HogWild", "--image=a/b", "--flagfile=f"], "unknown flag --flagfile (--help lists all)"),
        (["HogWild", "--image=a/b", "--num_ps=10001"], "--num_ps must be at most 10000, not 10001"),
        (["HogWild", "--image=a/b", "--", "--windw=5"], "unknown flag --windw; did you mean --window? (--help lists all)"),
        (["DOWNPOUR", "--image=a/b", "--", "--window=0"], "--window must be at least 1, not 0"),
        (["AEASGD", "--image=a/b", "--num_workers=4", "--", "--beta=5"], "--beta must be at most the number of workers, 4, "),
        (["Synchronous-SGD", "--image=a/b", "--", "--by=magic"], "--by must be synchronous_sgd, all_reduce or "),
        (["HogWild", "--image=a/b", "--", "--data=missing.py:load"], "--data=missing.py:load: there is no file missing.py"),
    ],
)
def test_bad_input(user_error, capsys, arguments, line):
    with user_error(line):
        program().main(arguments)
    assert capsys.readouterr() == ("", "")


def test_bad_input_is_one_line_on_standard_error():
    ended = run("HogWild", "--image=a/b", "--num_ps=0")
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "manifest.py: --num_ps must be at least 1, not 0\n")


def test_a_task_of_a_cluster_may_write_manifests():
    """The flag that says so is not for the scheme, which checks its flags."""
    config = {"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}
    command = ["bash", str(FOLDER / "manifest.sh"), "HogWild", f"--image={IMAGE}", "--", "--epochs=1"]
    environ = {**ENVIRON, "TF_CONFIG": json.dumps(config)}
    assert subprocess.run(command, env=environ, capture_output=True, timeout=SECONDS).returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# Pods on this machine


# Runs a command with a root file system that is read-only, but for its volumes: the first argument, and /tmp.
READ_ONLY_ROOT = """
mount --make-rprivate /
for volume in "$1" /tmp; do mount --rbind "$volume" "$volume"; done
mount -o remount,bind,ro /
mount --rbind "$2" "$2"
mount -o remount,bind,ro "$2"
shift 2
exec "$@"
"""


def with_read_only_root(runs):
    """What comes before a command that may write only to this folder and /tmp, as the container of a pod."""
    return ["unshare", "-Urm", "bash", "-ec", READ_ONLY_ROOT, "bash", str(runs), str(CHECKOUT)]


@needs_mounts
@pytest.mark.cluster
def test_pods_as_processes_have_a_read_only_root(tmp_path):
    for folder, status in (CHECKOUT, 1), (tmp_path, 0):
        command = [*with_read_only_root(tmp_path), "touch", str(folder / "written")]
        assert subprocess.run(command, capture_output=True).returncode == status
    assert not (CHECKOUT / "written").exists()


class Cluster:
    """The pods of a manifest, as processes: each has its folder for /runs, and a port of this machine for its own.

    Args:
      things: the manifest.
      folder: where those folders are.
      stack: a `contextlib.ExitStack` for as long as the ports are needed.
      are_some_absent: whether the cluster has names of pods that there never are, and which mean nothing.
    """

    def __init__(self, things, folder, stack, are_some_absent=False):
        self._are_some_absent = are_some_absent
        self.pods = {pod.name: pod for pod in pods_of(things)}
        self._folder = folder
        self._ports = {pod.host: stack.enter_context(launcher.reserved_port()).getsockname()[1] for pod in self.pods.values()}

    def runs(self, name):
        """The folder that the pod sees as /runs."""
        return self._folder / name

    def start(self, name, is_program=False):
        """Starts the pod, maybe once more.

        It is a fork of a process that has imported tensorflow, and never resumes, or it `is_program`, by entry.sh, with a
        `READ_ONLY_ROOT`.
        """
        pod = self.pods[name]
        environ = pod.environ()
        for host, port in self._ports.items():
            environ["TF_CONFIG"] = environ["TF_CONFIG"].replace(f'"{host}:2222"', f'"127.0.0.1:{port}"')
        assert (":2222" in environ["TF_CONFIG"]) == self._are_some_absent
        places = {"/app/": f"{CHECKOUT}/", "/runs/": f"{self.runs(name)}/"}
        environ = {**ENVIRON, **environ, "TF_GRPC_REUSE_PORT": "true"}  # lets the test hold the ports
        command = [functools.reduce(lambda word, place: word.replace(*place), places.items(), word) for word in pod.command()]
        if is_program:
            self.runs(name).mkdir(parents=True, exist_ok=True)
            return subprocess.Popen(
                [*(with_read_only_root(self.runs(name)) if may_mount() else []), *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                env=environ,
            )
        assert command[:3] == ["bash", str(FOLDER / "entry.sh"), "HogWild"]
        return by_hand.start(HOGWILD, "--launch", *command[3:], environ=environ)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["trainjob", "tfjob"])
def test_the_pods_train(run_dir, kind):
    """As programs. Those of the other kinds are below."""
    things = objects("DOWNPOUR", f"--kind={kind}", "--num_ps=2", "--", "--window=10", "--learning_rate=0.05")
    with contextlib.ExitStack() as stack:
        cluster = Cluster(things, run_dir, stack)
        started = {name: cluster.start(name, is_program=True) for name in cluster.pods}
        outputs = {name: finish(process) for name, process in started.items()}  # with status 0
    chief, ps = (next(name for name in cluster.pods if role in name) for role in ("chief", "ps"))
    result = result_of(cluster.runs(chief) / "downpour")
    roles = [json.loads(pod.environ()["TF_CONFIG"])["task"]["type"] for pod in cluster.pods.values()]
    assert result["scheme"] == "DOWNPOUR"
    assert result["num_ps"] == roles.count("ps") and result["num_workers"] == len(roles) - roles.count("ps")
    assert result["test_accuracy"] >= 0.95
    assert "test accuracy" in outputs[chief]
    assert "until all workers are done" in outputs[ps]
    assert [path.parts[-3] for path in run_dir.rglob("result.json")] == [chief]


@pytest.mark.cluster
def test_a_pod_in_place_of_the_chief_goes_on_from_its_checkpoint(run_dir):
    """Also if the ps was replaced, too; the first one is told to end, as when its node is drained."""
    things = objects("HogWild", "--kind=jobset", "--num_workers=1", "--", "--steps=3000", "--checkpoint_secs=1000")
    with contextlib.ExitStack() as stack:
        cluster = Cluster(things, run_dir, stack)
        ps, chief = cluster.start("hogwild-ps-0-0"), cluster.start("hogwild-chief-0-0")
        read_until(chief, is_training)
        chief.send_signal(signal.SIGTERM)
        finish(chief, status=130)
        ps.send_signal(signal.SIGTERM)
        finish(ps, status=130)  # there is no worker left that it would wait for
        ps, chief = cluster.start("hogwild-ps-0-0"), cluster.start("hogwild-chief-0-0", is_program=True)
        finish(chief)
        finish(ps)
    result = result_of(cluster.runs("hogwild-chief-0-0") / "hogwild")
    assert result["global_steps"] >= 3000
    assert result["samples"] == 32 * result["global_steps"]  # those of both
    metrics = cluster.runs("hogwild-chief-0-0") / "hogwild" / "metrics" / "worker-0.jsonl"
    assert '"restored from model.ckpt-' in metrics.read_text()  # the second one made the rest only
    assert result["test_accuracy"] >= 0.95


STOP = """
from pathlib import Path


def stop(step, metrics):
    return Path(__file__).with_name("stop").exists()
"""


@pytest.mark.cluster
def test_pods_of_workers_come_and_go(run_dir, tmp_path):
    """As a Job is patched. Pods that are not there have names that no name server knows. One that gets SIGTERM exits with 0."""
    (tmp_path / "callback.py").write_text(STOP)
    callback = f"--callback={tmp_path}/callback.py:stop"
    things = objects("HogWild", "--num_workers=2", "--max_workers=6", "--", *ENDLESS, "--delays=10,10,10", callback)
    (job,) = (thing for thing in things if thing["metadata"]["name"] == "hogwild-worker")
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    job["spec"].update(completions=2, parallelism=2)  # one more than it began with, of five
    runs = {name: run_dir / name / "hogwild" for name in ("hogwild-chief-0", "hogwild-worker-0", "hogwild-worker-1")}
    with contextlib.ExitStack() as stack:
        cluster = Cluster(things, run_dir, stack, are_some_absent=True)
        ps, chief, first = (cluster.start(f"hogwild-{name}-0") for name in ("ps", "chief", "worker"))
        wait_until(chief, lambda: updates_of(runs["hogwild-worker-0"], 1))
        for name, worker in ("hogwild-worker-1", 2), ("hogwild-worker-0", 1):
            before = updates_of(runs[name], worker)
            pod = cluster.start(name) if worker == 2 else first
            wait_until(chief, lambda: updates_of(runs[name], worker) > before)  # noqa: B023
            pod.send_signal(signal.SIGTERM)
            assert f"worker {worker} has left after" in finish(pod)
        (tmp_path / "stop").touch()
        finish(chief)
        finish(ps)
    result = result_of(runs["hogwild-chief-0"])
    assert [left["worker"] for left in result["left"]] == [1, 2]
    assert sum(updates_of(folder, worker) for worker, folder in enumerate(runs.values())) == result["global_steps"]


# ---------------------------------------------------------------------------------------------------------------------
# The image, and the README


def test_the_image():
    """Its parts, as far as they can be looked at without building it."""
    text = re.sub(r"\\\n", " ", (FOLDER / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    steps = {word: [rest for first, rest in lines if first == word] for word, _ in lines}
    for source in (source for rest in steps["COPY"] for source in shlex.split(rest)[:-1]):
        assert (CHECKOUT / source).exists(), source
    assert steps["WORKDIR"] == ["/app"]
    for kind in KINDS:
        for pod in pods_of(objects("HogWild", f"--kind={kind}")):
            security = pod.spec["securityContext"]
            assert steps["USER"] == [f"{security['runAsUser']}:{security['runAsGroup']}"]
            program = Path(pod.container["command"][1])
            assert (CHECKOUT / program.relative_to("/app")).is_file()
    (command,) = steps["CMD"]
    assert (CHECKOUT / json.loads(command)[1]).is_file()
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert {".git", ".venv*", "runs"} <= set(ignored)


README = (FOLDER / "README.md").read_text()
COMMANDS = re.findall(r"^bash Multiple-Machines/kubernetes/manifest\.sh (.*?)(?: (?:> job\.yaml|\|).*)?$", README, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_readme(command):
    """The scheme looks at its flags, which takes seconds, where the command has some."""
    words = shlex.split(command, comments=True)
    ended = run(*words) if "--" in words else run(*words, "--nocheck_flags")
    assert (ended.returncode, ended.stderr) == (0, "")
    for thing in yaml.safe_load_all(ended.stdout):
        validate(thing)


def test_the_pod_of_the_readme():
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.M | re.S)
    pod = yaml.safe_load(text)
    validate(pod)
    things = objects("DOWNPOUR")
    (chief,) = (pod for pod in pods_of(things) if pod.name == "downpour-chief-0")
    assert pod["spec"]["volumes"] == chief.spec["volumes"][:1]
    assert pod["spec"]["securityContext"]["runAsUser"] == chief.spec["securityContext"]["runAsUser"]
    assert "training" not in pod["metadata"].get("labels", {})
