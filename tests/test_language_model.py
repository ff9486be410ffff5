"""Language-Model: the model, its measure, how it writes; and its run.sh, with a model as small as can be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from runs import SECONDS

from common import tf
from common.data import datasets
from common.data.builtin_data import ALPHABET
from common.models import keras_model

FOLDER = Path(__file__).parent.parent / "Language-Model"
sys.path.append(str(FOLDER))
import language_model  # noqa: E402


@pytest.fixture
def small():
    """The model, as small as can be."""
    keras.utils.set_random_seed(0)
    return language_model.build(layers=1, width=8, heads=2)


def test_a_character_changes_nothing_before_it(small):
    """The character of a place does not enter its logits: they are those of the next character."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 96, [3, language_model.LENGTH]).astype(np.float32)
    changed = x.copy()
    changed[:, 20] = (x[:, 20] + 1) % 96
    before, after = small.predict_on_batch(x), small.predict_on_batch(changed)
    assert before.shape == (3, language_model.LENGTH, 96)
    np.testing.assert_allclose(before[:, :20], after[:, :20], rtol=1e-5, atol=1e-6)
    assert (np.abs(before[:, 20:] - after[:, 20:]).max(axis=-1) > 1e-4).all()


def test_perplexity_is_exp_of_the_loss(small):
    """As a run measures it, over batches of unequal sizes."""
    text = datasets.load("text")
    few = text._replace(x_test=text.x_test[:7], y_test=text.y_test[:7])
    model = keras_model.checked(small, few)
    with tf.Graph().as_default(), tf.Session() as session:
        found = model.evaluate(tf.constant(model.initial_parameters), [], *map(tf.constant, few.test), batch_size=3)
        found = session.run(found)
    np.testing.assert_allclose(found["perplexity"], np.exp(found["loss"]), rtol=1e-5)
    assert 80 < found["perplexity"] < 250  # it has not learned anything: about as many as there are characters


class Alphabetical:
    """Knows the letter that follows, if it sees any."""

    def predict_on_batch(self, x):
        follows = (x.astype(int) + 1) % len(ALPHABET)
        return 100.0 * np.eye(len(ALPHABET))[follows]


@pytest.mark.parametrize("prompt", ["a", "x" * 100 + "a"])
def test_writing_goes_on_from_the_last_character(prompt):
    """However long the text is."""
    assert language_model.write(Alphabetical(), prompt, count=25) == prompt + "bcdefghijklmnopqrstuvwxyz"


def test_writing_is_a_choice(small):
    first, again, other = (language_model.write(small, "The ", count=20, temperature=1.0, seed=seed) for seed in (0, 0, 1))
    assert first == again != other and len(first) == 24 and first.startswith("The ")


def run(*arguments, **environ):
    command = ["bash", FOLDER / "run.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **environ})


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["DOWNPUR", "tests", ""])
def test_no_such_scheme(scheme):
    done = run(f"--scheme={scheme}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"run.sh: there is no scheme '{scheme}'; ") and done.stderr.count("\n") == 1


@pytest.mark.cluster
def test_it_trains_and_writes(tmp_path):
    """With a scheme that is not the default, and a model that is given: flags count in place of those of run.sh."""
    file = tmp_path / "tiny.py"
    file.write_text(
        f"import sys\n\nsys.path.append({str(FOLDER)!r})\nimport language_model\n\n\n"
        "def build():\n    return language_model.build(layers=1, width=8, heads=2)\n"
    )
    done = run(
        "--scheme=DOWNPOUR", f"--model={file}:build", "--steps=4", "--warmup_steps=1", "--run_dir", str(tmp_path / "run")
    )
    assert done.returncode == 0, done.stderr
    summary, _, written = done.stdout.partition("model.keras\n")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["scheme"] == "DOWNPOUR" and result["data"] == "text" and 4 <= result["global_steps"] < 8
    assert "test perplexity" in summary
    np.testing.assert_allclose(result["test_perplexity"], np.exp(result["test_loss"]), rtol=1e-4)
    assert written.startswith("The ") and len(written.rstrip("\n")) > 250
