"""Multiple-GPUs-Single-Machine and core/devices.py: which devices there are, what runs on which, and what comes of it."""

import contextlib
import json
import signal
import subprocess
import sys
import types

import by_hand
import numpy as np
import pytest
from runs import ROOT, SECONDS, accuracy_of_saved_model, finish, is_training, processes, read_until, result_of

from common import tf
from common.core import devices
from common.data import datasets
from common.models import keras_model
from common.scheme.center import GlobalParameters
from common.scheme.rounds import build_rounds, build_steps

pytestmark = pytest.mark.slow

FOLDER = ROOT / "Multiple-GPUs-Single-Machine"
TOWERS, MIRRORED = FOLDER / "multiple_gpus.py", FOLDER / "mirrored_strategy.py"


class FakeConfig:
    """Stands in for `tf.config` on a machine with so many GPUs; it refuses what TensorFlow refuses."""

    def __init__(self, num_gpus):
        self.physical = {"CPU": ["cpu"], "GPU": [f"gpu {i}" for i in range(num_gpus)]}
        self.visible, self.parts, self.growing = dict(self.physical), {}, []
        self.experimental = types.SimpleNamespace(set_memory_growth=self._set_memory_growth)

    def list_physical_devices(self, kind):
        return self.physical[kind]

    def set_soft_device_placement(self, enabled):
        self.soft = enabled

    def set_visible_devices(self, which, kind):
        self.visible[kind] = which

    def _set_memory_growth(self, gpu, enable):
        assert gpu not in self.parts
        self.growing.append(gpu)

    def LogicalDeviceConfiguration(self, memory_limit=None):
        return memory_limit

    def set_logical_device_configuration(self, device, parts):
        assert device not in self.growing
        assert all(part is None for part in parts) if device == "cpu" else all(parts)  # GPUs need a limit, the CPU has none
        self.parts[device] = parts

    def list_logical_devices(self, kind):
        count = sum(len(self.parts.get(device, [None])) for device in self.visible[kind])
        return [types.SimpleNamespace(name=f"/device:{kind}:{i}") for i in range(count)]


@pytest.fixture
def machine(monkeypatch):
    """A function that makes a machine with so many GPUs."""

    def machine(num_gpus):
        config = FakeConfig(num_gpus)
        monkeypatch.setattr(devices, "tf", types.SimpleNamespace(config=config))
        return config

    return machine


@pytest.mark.parametrize(
    "num_gpus, count, kind, line",
    [
        (0, 2, "CPU", "no GPU: 2 logical CPU devices"),
        (0, 1, "CPU", "no GPU: 1 logical CPU device"),
        (1, 1, "GPU", "1 GPU"),
        (1, 2, "GPU", "1 GPU, split into 2 logical GPUs of at most 2,048 MB"),
        (2, 2, "GPU", "2 GPUs"),
        (2, 3, "GPU", "2 GPUs, split into 3 logical GPUs of at most 2,048 MB"),
        (4, 2, "GPU", "2 of 4 GPUs"),
        (4, 4, "GPU", "4 GPUs"),
    ],
)
def test_as_many_devices_as_asked_for_on_any_number_of_gpus(machine, num_gpus, count, kind, line):
    config = machine(num_gpus)
    assert devices.logical_devices(count) == ([f"/device:{kind}:{i}" for i in range(count)], line)
    assert config.soft


def test_whole_gpus_grow_and_what_is_not_needed_is_not_touched(machine):
    config = machine(4)
    devices.logical_devices(2)
    assert config.growing == config.visible["GPU"] == ["gpu 0", "gpu 1"]


def test_gpus_are_split_evenly(machine):
    config = machine(2)
    devices.logical_devices(5)
    assert [len(config.parts[gpu]) for gpu in ("gpu 0", "gpu 1")] == [3, 2]


@pytest.fixture
def multiple_gpus(monkeypatch):
    """The module multiple_gpus.py."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import multiple_gpus

    return multiple_gpus


@pytest.fixture
def build(multiple_gpus, known_batches):
    """A graph with global parameters and a tower for each of the batches `[tower, count, ...]`, all on one device."""

    @contextlib.contextmanager
    def build(dataset, x, y):
        names = ["/device:CPU:0"] * len(x)
        built = [keras_model.build("mlp", dataset) for _ in names]
        batches = [lambda name, i=i: known_batches(x[i], y[i], name) for i in range(len(names))]
        with tf.Graph().as_default():
            center = GlobalParameters(built[0].initial_parameters, device_fn=names[0])
            yield center, multiple_gpus.Towers(center, built, batches, names)

    return build


def batches_of(dataset, towers, count, batch_size):
    """Random batches `[tower, count, batch_size, ...]` of the training samples."""
    chosen = np.random.default_rng(0).integers(0, len(dataset.x_train), [towers, count, batch_size])
    return dataset.x_train[chosen], dataset.y_train[chosen]


@pytest.mark.parametrize("problem", ["images", "regression"])
def test_towers_equal_one_process_with_their_batches_in_one(request, build, multiple_gpus, initialized, problem):
    dataset = request.getfixturevalue(problem)
    x, y = batches_of(dataset, towers=3, count=4, batch_size=5)
    united = [np.concatenate(list(part), axis=1)[None] for part in (x, y)]  # [1, 4, 15, ...]
    hp = types.SimpleNamespace(learning_rate=0.1)
    results = []
    for their_x, their_y in ((x, y), united):
        with build(dataset, their_x, their_y) as (center, towers):
            rounds = build_rounds(multiple_gpus.multiple_gpus, center, towers, hp, rounds=4)
            session = initialized(center, towers)
            _, loss, steps, *_ = session.run(rounds)
            results.append((session.run(center.pieces[0]), loss))
            assert steps.tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    (several, loss_of_several), (one, loss_of_one) = results
    np.testing.assert_allclose(several, one, rtol=0, atol=1e-5)
    assert loss_of_several == pytest.approx(loss_of_one, abs=1e-5)


def test_a_tower_keeps_its_copy_until_the_next_pull(build, multiple_gpus, initialized, images):
    hp = types.SimpleNamespace(learning_rate=0.1)
    with build(images, *batches_of(images, towers=2, count=4, batch_size=5)) as (center, towers):
        pull, compute, push = build_steps(multiple_gpus.multiple_gpus, center, towers, hp)
        session = initialized(center, towers)

        def copies_are_new():
            present, *copies = session.run([center.pieces[0], *[tower.value for tower in towers.towers]])
            np.testing.assert_array_equal(*copies)
            return np.array_equal(present, copies[0])

        found = []
        for step in (pull, compute, push, pull):
            session.run(step.operations)
            found.append(copies_are_new())
    assert found == [True, True, False, True]


PLACEMENT = """
import json
import sys
import types

sys.path += sys.argv[1:]
import mirrored_strategy
import multiple_gpus

from common.data import datasets
from common.models import keras_model
from common import tf
from common.core import devices
from common.data.batches import Batches
from common.scheme.center import GlobalParameters
from common.scheme.rounds import build_rounds

names, _ = devices.logical_devices(2)
dataset = datasets.load("digits")
built = [keras_model.build("mlp", dataset) for _ in names]
found = {"names": names, "matmuls": [], "soft": None}
with tf.Graph().as_default():
    center = GlobalParameters(built[0].initial_parameters, device_fn=names[0])
    batches = [lambda name: Batches(dataset.x_train, dataset.y_train, 4, 0, name)] * 2
    towers = multiple_gpus.Towers(center, built, batches, names)
    hp = types.SimpleNamespace(learning_rate=0.1)
    rounds = build_rounds(multiple_gpus.multiple_gpus, center, towers, hp)
    with tf.device("/device:GPU:7"):
        elsewhere = tf.identity(tf.Variable(1.0))
    feeds = {**center.init_feed_dict, **towers.init_feed_dict}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer(), feeds)
        session.run(tf.local_variables_initializer(), feeds)
        found["soft"] = float(session.run(elsewhere))
        metadata = tf.RunMetadata()
        session.run(rounds, options=tf.RunOptions(output_partition_graphs=True), run_metadata=metadata)
        for node in (node for part in metadata.partition_graphs for node in part.node):
            if "MatMul" in node.op:
                found["matmuls"].append([node.name.split("/")[0], node.device[-len(names[0]):]])
        found["x"] = center.pieces[0].device

with tf.distribute.MirroredStrategy(names).scope():
    model = mirrored_strategy.compiled(keras_model.build("mlp", dataset), 0.1)
    found["copies"] = [[copy.device[-len(names[0]):] for copy in v.value.values] for v in model.trainable_variables]
    replica = mirrored_strategy.FirstReplica(keras_model.by_labels(model, True))
    found["evaluated"] = replica.evaluate(dataset.x_test, dataset.y_test)
print(json.dumps(found))
"""


def test_every_tower_and_every_replica_has_a_device_of_its_own():
    program = [sys.executable, "-c", PLACEMENT, str(FOLDER)]
    found = json.loads(subprocess.run(program, capture_output=True, text=True, check=True, timeout=SECONDS).stdout)
    assert found["names"] == ["/device:CPU:0", "/device:CPU:1"]
    # three layers forward; backward for each its weights, and for two of them what came in
    assert sorted(found["matmuls"]) == [["tower_0", "/device:CPU:0"]] * 8 + [["tower_1", "/device:CPU:1"]] * 8
    assert found["x"] == "/device:CPU:0"
    assert found["copies"] == [["/device:CPU:0", "/device:CPU:1"]] * 6
    assert found["soft"] == 1.0  # what asks for a device that is not there, or has no kernel, runs elsewhere
    assert found["evaluated"]["loss"] == pytest.approx(np.log(10), abs=0.3)  # untrained


def begin(run_dir, script, *flags):
    """Starts a script, as a fork of a process that has imported tensorflow."""
    return by_hand.start(script, *flags, f"--run_dir={run_dir}")


@pytest.mark.cluster
@pytest.mark.parametrize("script", [TOWERS, MIRRORED], ids=["towers", "mirrored"])
def test_two_devices_learn_the_digits(run_dir, script, multiple_gpus, user_error):
    output = finish(begin(run_dir, script, *(["--epochs=30"] if script == MIRRORED else [])))
    result = result_of(run_dir)
    assert output.count("no GPU: 2 logical CPU devices\n") == 1 and output.startswith("no GPU")
    assert result["test_accuracy"] >= 0.95
    assert (result["num_towers"], result["devices"]) == (2, ["/device:CPU:0", "/device:CPU:1"])
    # an update is made of the samples of all towers
    assert result["global_steps"] == (675 if script == MIRRORED else 1349)
    assert result["samples"] == result["global_steps"] * 64 and result["batch_size"] == 32
    # Only the first call, which prepares the graph, does not count.
    assert 0.9 * result["samples"] < round(result["samples_per_second"] * result["train_seconds"]) <= result["samples"]
    assert accuracy_of_saved_model(run_dir, datasets.load("digits")) == pytest.approx(result["test_accuracy"])
    assert (run_dir / "curve.png").stat().st_size > 0
    settings = types.SimpleNamespace(resume=True, run_dir=str(run_dir))
    with user_error("by the other script", "run_mirrored_strategy.sh" if script == MIRRORED else "run.sh"):
        multiple_gpus.begin(settings, is_keras=script == TOWERS)


@pytest.mark.cluster
def test_ctrl_c_saves_and_resume_goes_on_with_more_towers(run_dir):
    process = begin(run_dir, TOWERS, "--epochs=1000000", "--checkpoint_secs=1000")
    read_until(process, is_training)
    process.send_signal(signal.SIGINT)
    assert f"--resume --run_dir={run_dir}" in finish(process, status=130)
    assert processes(run_dir) == []
    saved = int(tf.train.load_variable(tf.train.latest_checkpoint(run_dir / "checkpoints"), "global_step"))
    assert saved > 0
    finish(begin(run_dir, TOWERS, "--resume", f"--steps={saved + 10}", "--num_towers=3"))
    result = result_of(run_dir)
    assert (result["global_steps"], result["samples"], result["num_towers"]) == (saved + 10, (saved * 2 + 10 * 3) * 32, 3)


def test_bad_input_is_one_line(multiple_gpus, user_error, parse):
    def settings(*arguments):
        return parse(*arguments, own=multiple_gpus.OWN_FLAGS, epochs=1, batch_size=32, learning_rate=0.1)

    with user_error("--num_towers must be at least 1, not 0"):
        settings("--num_towers=0")
    with user_error("1438 training samples are too few for 1439 towers", "--num_towers"):
        multiple_gpus.begin(settings("--num_towers=1439"))
