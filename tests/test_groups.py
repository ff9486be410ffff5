"""Groups of parameters (--groups): factors of the learning rate and of weight decay, against NumPy."""

import types

import keras
import numpy as np
import pytest
import runs
from oracle import ALL, SCHEMES, close, inverse, written_again

from common import tf
from common.scheme import groups, groups_of
from common.scheme.center import GlobalParameters
from common.scheme.compression import Compression
from common.scheme.learning_rates import check_rates, hyperparameters
from common.scheme.local import LocalParameters
from common.scheme.rounds import build_rounds
from common.simulation.replay import Replay

RATES = {"kernel": 0.5, "bias": 2.0}
FROZEN = {"kernel": 1.0, "bias": 0.0}


def a_file(folder, text, name="groups"):
    path = folder / f"{name}.py"
    path.write_text(f"def of(path, shape):\n    return {text}\n")
    return f"{path}:of"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, factors",
    [
        ("HogWild", RATES),
        ("HogWild", FROZEN),
        ("DOWNPOUR", RATES),  # Adagrad on both sides
        ("R = 2", FROZEN),  # an update under a condition
        ("SAGN", RATES),  # Adam on the ps
        ("AEAMSGD", RATES),  # a gradient ahead of x
        ("slow momentum", RATES),
        ("DiLoCo", FROZEN),
        ("Streaming-DiLoCo", RATES),
    ],
)
def test_exact(model, replays, batches, tmp_path, name, factors):
    """x̃ with a schedule and with weight decay of the kernel alone; a frozen bias is the same to the bit."""
    scheme = ALL[name].decaying()
    text = f"{{'learning_rate': {factors}[path.split('/')[-1]], 'weight_decay': len(shape) > 1}}"
    scheme = scheme._replace(hp={**scheme.hp, "groups": a_file(tmp_path, text)})
    kernel = np.array([1.0, 1.0, 1.0, 0.0])
    rates = np.array([factors["kernel"]] * 3 + [factors["bias"]])
    own = [[part[0][:3], part[1]] for part in batches] if scheme.hp.get("weigh_by_samples") else batches
    decays = {key: scheme.hp[key] * kernel for key in ("decay", "weight_decay") if scheme.hp.get(key)}
    expected_of = scheme._replace(hp={**scheme.hp, **decays})
    order = next(iter(scheme.orders().values()))
    replay = replays(scheme, scheme.hyperparameters(3, 3), 3, inverse, own)
    replay.take(order)
    expected = written_again(expected_of, order, model.initial_parameters, own, 3, 3, schedule=lambda s: rates * inverse(s))
    close(replay.center, expected.center, model.initial_parameters, 0.05)
    if factors is FROZEN:
        assert replay.center[3] == model.initial_parameters[3]


def test_compression_moves_no_frozen_value(model, load_scheme, known_batches, tmp_path, batches):
    """A sign of zero is not zero. In AEASGD x̃ keeps its frozen values, although x may not."""
    scheme = SCHEMES["AEASGD"]
    hp = scheme._replace(hp={**scheme.hp, "groups": a_file(tmp_path, "{'learning_rate': len(shape) - 1}")}).hyperparameters(1)
    rule, of_worker = load_scheme("AEASGD", "aeasgd"), lambda i: known_batches(*(b[i] for b in batches), f"batches_{i}")
    replay = Replay(rule, hp, model, of_worker, compression=Compression("sign"))
    replay.take([0, 1] * 9)
    moved = replay.center != model.initial_parameters
    replay.close()
    assert moved.tolist() == [True, True, True, False]


def test_parts_of_the_vector():
    """Ranges of 2, 3 and 1 values, cut anywhere."""
    of = groups.Groups([2, 3, 1], [1.0, 0.5, 0.0], [1, 0, 1])
    with tf.Session() as session:
        found = session.run([of.rates(), of.rates(slice(1, 4)), of.rates(slice(5, 6)), of.decays(), of.only_frozen().rates()])
    wanted = [1, 1, 0.5, 0.5, 0.5, 0], [1, 0.5, 0.5], [0], [1, 1, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0]
    assert [each.tolist() for each in found] == [*wanted]


@pytest.mark.parametrize(
    "text, said",
    [
        ("[1]", "gives [1] for "),
        ("{'rate': 1}", "gives 'rate': 1 for "),
        ("{'learning_rate': '1'}", "gives 'learning_rate': '1' for "),
        ("{'weight_decay': 0.1}", "gives 'weight_decay': 0.1 for "),
        ("{'learning_rate': -1}", "gives the learning_rate -1 for "),
        ("{'learning_rate': float('nan')}", "gives the learning_rate nan for "),
        ("{'learning_rate': 0}", "freezes all variables of the model"),
        ("1 / 0", "of() raised ZeroDivisionError: division by zero"),
    ],
)
def test_groups_that_are_refused(model, tmp_path, user_error, text, said):
    spec = a_file(tmp_path, text)
    with user_error(f"--groups={spec}", said):
        groups_of(types.SimpleNamespace(groups=spec), model)


def test_no_optimizer_on_the_ps(model, graph, load_scheme, known_batches, batches, user_error):
    """No optimizer changes x̃ in AEASGD; its script says so."""
    center = GlobalParameters(model.initial_parameters, groups=groups.Groups([3, 1], [1, 2], [1, 1]))
    local = LocalParameters(center, model, known_batches(*(b[0] for b in batches)))
    hp = hyperparameters(SCHEMES["AEASGD"]._replace(hp={"beta": 0.9}).hyperparameters(1), center, local)
    build_rounds(load_scheme("AEASGD", "aeasgd"), center, local, hp)
    with user_error("--groups: no optimizer changes the global parameters", 'say Scheme(..., optimizer_on="worker")'):
        check_rates(center, 100)


def test_a_step_that_depends_on_the_value(user_error):
    piece = tf.get_variable("piece", initializer=[1.0], use_resource=True)
    with user_error("--groups: no factors for the steps of FtrlOptimizer"):
        groups.apply_scaled(tf.train.FtrlOptimizer(0.1), [(tf.constant([1.0]), piece)], [tf.constant([0.5])])


@pytest.mark.cluster
def test_a_frozen_layer(tmp_path):
    """Two ps, two workers, and a resumed run: the first layer stays as it began. 8 s."""
    spec = a_file(tmp_path, "{'learning_rate': 0} if path.endswith('dense/kernel') else None")
    flags = [f"--groups={spec}", "--num_ps=2", "--batch_size=16", "--weight_decay=0.01"]
    runs.run(tmp_path / "run", *flags, "--steps=60")
    kernels = [first_kernel(tmp_path / "run")]
    runs.run(tmp_path / "run", *flags, "--steps=120", "--resume")
    kernels.append(first_kernel(tmp_path / "run"))
    assert runs.result_of(tmp_path / "run")["global_steps"] >= 120 and runs.result_of(tmp_path / "run")["test_accuracy"] > 0.5
    np.testing.assert_array_equal(*kernels)


def first_kernel(run_dir):
    return keras.models.load_model(run_dir / "model.keras").trainable_variables[0].numpy()
