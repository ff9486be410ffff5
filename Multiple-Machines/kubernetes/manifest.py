"""Writes the manifest of one training for Kubernetes to standard output:

    bash manifest.sh DOWNPOUR --num_ps=2 --num_workers=4 --image=REGISTRY/IMAGE -- --window=20 --epochs=100 > job.yaml

tfjob.yaml and plain.yaml hold what all trainings have in common; this script reads and fills them in. JobSet and TrainJob
are made of the Jobs in plain.yaml.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from common.core import UserError, flags

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAM = "manifest.sh SCHEME"

# Folders with a run.sh that starts a cluster, which are no scheme: one needs a folder that its evaluator shares with the chief,
# the other has one worker.
NO_SCHEMES = {"Continuous-Evaluation", "Distributed-Setup"}

# Flags of every scheme that say what is said here by the manifest, or are for tasks on this machine.
NOT_THEIRS = (
    *("num_ps", "num_workers", "max_workers", "gpus", "run_dir", "resume", "launch", "check", "help"),
    *("job_name", "task_index", "ps_hosts", "worker_hosts"),
    *("max_restarts", "hang_secs", "isolation", "require_isolation"),
)

# The objects that start the pods. A runtime is installed once, for many TrainJobs.
KINDS = ["plain", "statefulset", "jobset", "trainjob", "runtime", "tfjob"]
OF_JOBSET = ("jobset", "trainjob", "runtime")

MOST_TASKS = 10_000  # of a kind: --name leaves room for the digits of 9999

# What says that a process is a task of a cluster, see common/cluster/task_spec.py
CLUSTER_VARIABLES = {"TF_CONFIG", "JOB_NAME", "TASK_INDEX", "PS_HOSTS", "WORKER_HOSTS", "MASTER_HOST"}


def main(arguments):
    """Checks the command line and prints the manifest.

    Raises:
      UserError: if anything is wrong with it.
    """
    places = "places for workers; --num_workers of them are taken at the start, see README.md"
    check_flags = "check the scheme's flags here; off if its data or model is only in the image"
    values = flags.table(
        flags.integer("num_ps", 1, "ps tasks", least=1, most=MOST_TASKS),
        flags.integer("num_workers", 2, "workers, the chief among them", least=1, most=MOST_TASKS),
        flags.integer("max_workers", None, places, least=2, most=flags.MOST_PLACES),
        flags.integer("gpus_per_worker", 0, "1 for a GPU each", least=0, most=1),
        flags.string("image", None, "name of the image, as in `docker push REGISTRY/IMAGE`"),
        flags.choice("kind", "plain", KINDS, "see README.md"),
        flags.string("name", None, "name of the training (default: the scheme's, in lowercase)"),
        flags.string("storage", "10Gi", "size of the volume for checkpoints and result"),
        flags.boolean("check_flags", True, check_flags),
    )
    own, scheme_flags = arguments, []
    if "--" in arguments:
        own, scheme_flags = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    scheme = own[0].rstrip("/") if own and not own[0].startswith("-") else ""
    try:
        options = flags.parse(values, own[1:] if scheme else own, PROGRAM)
    except UserError as error:
        hint = "; the scheme's own flags come after --" if "unknown flag" in str(error) else ""
        raise UserError(f"{error}{hint}") from None
    options = options.but(scheme=scheme, flags=scheme_flags)
    if options.kind == "runtime":
        check_runtime(options)
        options = options.but(name=runtime_name(options))
    else:
        options = options.but(name=scheme.lower() if options.name is None else options.name)
        check(options)
    command = shlex.join(["bash", "Multiple-Machines/kubernetes/manifest.sh", *arguments])
    comment = command.encode("unicode_escape").decode()  # one line, whatever is in it
    comment += f"\n# {scaling(options)}" if options.max_workers else ""
    comment += f"\n# once for each cluster: {installing(options)}" if options.kind == "trainjob" else ""
    print(f"# {comment}\n{yaml.safe_dump_all(manifest(options), sort_keys=False, width=128)}", end="")


def scaling(options):
    """Returns the command that makes as many workers as may be, without the chief: any other number does it, too."""
    count = options.max_workers - 1
    if options.kind == "jobset":  # the workers are the last of its Jobs
        path = "/spec/replicatedJobs/2/template/spec"
        patches = [{"op": "replace", "path": f"{path}/{key}", "value": count} for key in ("completions", "parallelism")]
        return f"kubectl patch jobset {options.name} --type=json --patch='{json.dumps(patches)}'"
    patch = json.dumps({"spec": {"completions": count, "parallelism": count}})
    return f"kubectl patch job {options.name}-worker --type=merge --patch='{patch}'"


def installing(options):
    """Returns the command that installs the runtime of a TrainJob."""
    gpus = f" --gpus_per_worker={options.gpus_per_worker}" if options.gpus_per_worker else ""
    script = "bash Multiple-Machines/kubernetes/manifest.sh"
    return f"{script} --kind=runtime --num_ps={options.num_ps}{gpus} | kubectl apply -f -"


def runtime_name(options):
    """Returns the name of the runtime for these numbers of ps tasks and GPUs: a TrainJob can change neither."""
    return f"parameter-servers-{options.num_ps}{'-gpu' if options.gpus_per_worker else ''}"


def check_runtime(options):
    """Raises a `UserError` if a runtime is to have parts that belong to a TrainJob."""
    given = {"a scheme": options.scheme, "the scheme's flags": options.flags, "--max_workers": options.max_workers}
    given |= {"--image": options.image is not None, "--name": options.name is not None}
    given |= {"--num_workers": options.num_workers != 2, "--storage": options.storage != "10Gi"}
    for part in (part for part, is_given in given.items() if is_given):
        raise UserError(f"--kind=runtime takes only --num_ps and --gpus_per_worker: leave out {part}")


def schemes():
    """Returns the names of the schemes' folders: those whose run.sh starts a cluster of any size, or is one task of it."""
    started = {path.parent.name for path in ROOT.glob("*/run.sh") if "--launch" in path.read_text()}
    return sorted(started - NO_SCHEMES, key=str.lower)


def check(options):
    """Raises a `UserError` if these flags make no manifest, or the scheme refuses its own."""
    known = schemes()
    if not options.scheme:
        raise UserError(f"a scheme is missing: manifest.sh SCHEME --image=REGISTRY/IMAGE; the schemes are {', '.join(known)}")
    if options.scheme not in known:
        raise UserError(f"there is no scheme {options.scheme!r}; expected one of {', '.join(known)}")
    if not options.image or re.search(r"\s", options.image):
        given = "is missing" if options.image is None else f"must be one word, not {options.image!r}"
        raise UserError(f"--image {given}: give its name as in `docker push REGISTRY/IMAGE`, see README.md")
    longest = 43 if options.kind in OF_JOBSET else 45  # of DNS's 63: -worker-9999, or -worker-0-9999-abcde
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", options.name) or len(options.name) > longest:
        raise UserError(
            f"--name must have at most {longest} lowercase letters, digits and dashes, begin with a letter and not end with a "
            f"dash: {options.name!r} does not"
        )
    if not re.fullmatch(r"[1-9]\d*([KMGTPE]i|[kMGTPE])?", options.storage):
        raise UserError(f"--storage must be a size such as 10Gi, not {options.storage!r}")
    if options.max_workers and options.kind == "tfjob":
        raise UserError("--max_workers: the operator tells a pod only the workers that exist: leave out --kind=tfjob")
    if options.max_workers and options.kind == "trainjob":
        raise UserError("--max_workers: the number of pods of a TrainJob is fixed: use --kind=jobset or --kind=plain")
    if options.max_workers and not 2 <= options.num_workers <= options.max_workers:
        raise UserError(
            f"--num_workers must be from 2 to --max_workers={options.max_workers}, not {options.num_workers}: a Job without "
            "pods counts as complete and starts no more"
        )
    for flag in options.flags:
        name = re.match(r"--?(?:no)?(\w+)", flag)
        if name and name[1] in flags.ABSL_READS:
            raise UserError(f"unknown flag {flag} after -- ({options.scheme}/run.sh --help lists all)")
        if name and name[1] in NOT_THEIRS:
            raise UserError(f"{flag} after --: the manifest sets the host and the role of each task; leave it out")
    if options.check_flags:
        check_scheme_flags(options)


def check_scheme_flags(options):
    """Raises a `UserError` if the scheme refuses its flags, its data or its model."""
    cluster = [f"--num_ps={options.num_ps}", f"--num_workers={options.num_workers}"]
    cluster += [f"--max_workers={options.max_workers}"] if options.max_workers else []
    checked = subprocess.run(
        ["bash", str(ROOT / options.scheme / "run.sh"), *options.flags, *cluster, "--check"],
        env={name: value for name, value in os.environ.items() if name not in CLUSTER_VARIABLES},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if checked.returncode:
        last = (checked.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise UserError(re.sub(r"^\w+\.(py|sh): ", "", last))


def manifest(options):
    """Returns the objects of Kubernetes that make up the training, as nested dictionaries.

    Args:
      options: the flags as a namespace; also `scheme`, and `flags`, the scheme's own.
    """
    counts = {"chief": 1, "ps": options.num_ps, "worker": options.num_workers - 1}
    named = counts | ({"worker": options.max_workers - 1} if options.max_workers else {})
    job = "-0" if options.kind in OF_JOBSET else ""  # JobSet numbers the Jobs of a role, too
    hosts = {
        role: [f"{options.name}-{role}{job}-{index}.{options.name}:2222" for index in range(count)]
        for role, count in named.items()
        if count
    }
    filled = []
    for thing in templates("tfjob.yaml" if options.kind == "tfjob" else "plain.yaml", options.name):
        for role, tasks in roles(thing):
            tasks.update({key: counts[role] for key in ("replicas", "completions", "parallelism") if key in tasks})
            fill_in(tasks["template"]["spec"]["containers"][0], role, hosts, options)
        if thing["kind"] == "TFJob" and not counts["worker"]:
            del thing["spec"]["tfReplicaSpecs"]["Worker"]
        if thing["kind"] == "PersistentVolumeClaim":
            thing["spec"]["resources"]["requests"]["storage"] = options.storage
        if thing["kind"] == "Job" and options.kind == "statefulset" and thing["metadata"]["name"] == f"{options.name}-ps":
            thing = stateful_set(thing)
        if thing["kind"] != "Job" or thing["spec"]["completions"]:
            filled.append(thing)
    return of_job_set(filled, options) if options.kind in OF_JOBSET else filled


def templates(file, name):
    """Yields the objects in a file beside this one, with another name than `hogwild`."""
    for document in yaml.safe_load_all((HERE / file).read_text()):
        things = document["items"] if document["kind"] == "List" else [document]
        for thing in things:
            yield json.loads(json.dumps(thing).replace("hogwild", name))  # a copy also of what several objects share


def roles(thing):
    """Yields, for each kind of task that an object starts, its role and what has the number and the pod's template."""
    spec = thing.get("spec", {})
    for role, tasks in spec.get("tfReplicaSpecs", {}).items():
        yield role.lower(), tasks
    if "template" in spec:
        yield spec["template"]["metadata"]["labels"]["role"], spec


def fill_in(container, role, hosts, options):
    """Writes into a container what is particular to this training."""
    container["image"] = options.image
    # Kubernetes replaces $(X), and takes $$ for a $.
    given = [flag.replace("$", "$$") for flag in options.flags]
    of_places = [f"--num_workers={options.num_workers}", f"--max_workers={options.max_workers}"] if options.max_workers else []
    container["args"] = [options.scheme, f"--run_dir=/runs/{options.name}", *of_places, *given]
    if options.gpus_per_worker and role != "ps":
        container["resources"]["limits"]["nvidia.com/gpu"] = str(options.gpus_per_worker)
    for variable in container["env"]:
        if variable["name"] == "TF_CONFIG":
            config = {"cluster": hosts, "task": {"type": "$(ROLE)", "index": "$(INDEX)"}}
            variable["value"] = json.dumps(config).replace('"$(INDEX)"', "$(INDEX)")  # a number


def stateful_set(job):
    """Returns the StatefulSet with the same pods as a Job."""
    template = job["spec"]["template"]
    del template["spec"]["restartPolicy"]  # these pods are always started again
    (index,) = (each for each in template["spec"]["containers"][0]["env"] if each["name"] == "INDEX")
    index["valueFrom"]["fieldRef"]["fieldPath"] = "metadata.labels['apps.kubernetes.io/pod-index']"
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": job["metadata"],
        "spec": {
            "serviceName": template["spec"]["subdomain"],
            "replicas": job["spec"]["completions"],
            "podManagementPolicy": "Parallel",  # not one after the other
            "selector": {"matchLabels": dict(template["metadata"]["labels"])},
            "template": template,
        },
    }


def of_job_set(things, options):
    """Returns the objects of a JobSet, a TrainJob or its runtime, made of those of `plain`; JobSet makes the Service itself."""
    jobs = [thing["spec"] for thing in things if thing["kind"] == "Job"]
    for job in jobs:
        del job["template"]["spec"]["subdomain"]  # JobSet sets it
    others = [thing for thing in things if thing["kind"] not in ("Job", "Service")]
    if options.kind == "runtime":
        return [runtime(jobs, options)]
    if options.kind == "trainjob":
        of_pods = {"jobset.sigs.k8s.io/jobset-name": options.name}  # a label that JobSet gives its pods
        (policy,) = (thing for thing in others if thing["kind"] == "NetworkPolicy")
        text = json.dumps(policy["spec"]).replace(json.dumps({"training": options.name}), json.dumps(of_pods))
        policy["spec"] = json.loads(text)
        return [train_job(jobs, options), *others]
    head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return [{**head, "metadata": named(options), "spec": job_set(jobs)}, *others]


def named(options):
    return {"name": options.name, "labels": {"training": options.name}}


def role_of(job):
    return job["template"]["metadata"]["labels"]["role"]


def job_set(jobs):
    """Returns the spec of a JobSet with these Jobs. It has succeeded with the chief, and fails at once with status 2."""
    wrong_input = {"name": "wrong_input", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["chief"]},
        "failurePolicy": {"maxRestarts": 3, "rules": [wrong_input]},  # all Jobs start again, from the newest checkpoint
        "replicatedJobs": [{"name": role_of(job), "replicas": 1, "template": {"spec": job}} for job in jobs],
    }


def runtime(jobs, options):
    """Returns the ClusterTrainingRuntime for parameter servers, without image, arguments, cluster and volume of a TrainJob.

    Without `mlPolicy`, each role has its own number of pods; a TrainJob's `numNodes` sets that of the first role, the workers:
    `TrainingRuntime.newRuntimeInfo` and `PlainML.EnforceMLPolicy` in kubeflow/trainer 2.3.
    """
    spec = job_set(sorted(jobs, key=lambda job: role_of(job) != "worker"))
    for job in spec["replicatedJobs"]:
        # Image, arguments and variables of a TrainJob go to containers of this name in Jobs with this label.
        job["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
        template = job["template"]["spec"]["template"]
        del template["metadata"]["labels"]["training"]
        (container,) = template["spec"]["containers"]
        container["name"] = "node"
        del container["image"], container["args"]
        container["env"] = [variable for variable in container["env"] if variable["name"] != "TF_CONFIG"]
        if job["name"] == "chief":
            template["spec"]["volumes"] = [each for each in template["spec"]["volumes"] if each["name"] != "runs"]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": options.name, "labels": {"trainer.kubeflow.org/framework": "tensorflow"}},
        "spec": {"template": {"spec": spec}},
    }


def train_job(jobs, options):
    """Returns the TrainJob: the parts that its runtime lacks."""
    (chief,) = (job["template"]["spec"] for job in jobs if role_of(job) == "chief")
    (container,) = chief["containers"]
    volumes = [volume for volume in chief["volumes"] if volume["name"] == "runs"]
    patch = {"name": "chief", "template": {"spec": {"template": {"spec": {"volumes": volumes}}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": named(options),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": runtime_name(options),
            },
            "trainer": {
                "image": container["image"],
                "args": container["args"],
                "env": [variable for variable in container["env"] if variable["name"] == "TF_CONFIG"],
                "numNodes": options.num_workers - 1,  # the other workers
            },
            "runtimePatches": [
                {
                    "manager": "manifest.sh/volume",  # a domain and a path, as the operator wants it
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
                }
            ],
        },
    }


if __name__ == "__main__":
    main(sys.argv[1:])
