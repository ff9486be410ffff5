"""`--init_from`: rows and variables of another run or a file, each exactly, on another number of ps; others are refused."""

import fcntl
import types
from typing import Any

import keras
import numpy as np
import pytest
from runs import ROOT, run

from common import rows_of, tf
from common.core import checkpoints_in
from common.data import datasets
from common.models import keras_model
from common.scheme import GlobalParameters
from common.training import initial_values

MODEL = """
import keras
from common import Embedding

def build(rows=23, width=4, layer=Embedding, other=None, hidden="hidden", others_name="others"):
    ids, numbers = keras.Input([3], dtype="int32", name="ids"), keras.Input([2], name="numbers")
    items = keras.layers.Flatten()(layer(rows, width, name="items")(ids))
    others = Embedding(other, 2, name=others_name)(10**12 * keras.ops.cast(ids, "int64"))
    found = keras.layers.Concatenate()([items, keras.layers.Flatten()(others), numbers])
    found = keras.layers.Dropout(0.1)(keras.layers.BatchNormalization(name="norm")(found))
    found = keras.layers.Dense(5, activation="tanh", name=hidden)(found)
    return keras.Model({"ids": ids, "numbers": numbers}, keras.layers.Dense(1, name="out")(found))

def wider():
    return build(width=5)

def larger():
    return build(rows=24)

def fixed():
    return build(other=10**14)

def whole():
    return build(layer=keras.layers.Embedding)

def renamed():
    return build(hidden="new", others_name="rest")

def taken_name():
    return build(others_name="hidden", hidden="others")

def foreign():
    ids, numbers = keras.Input([3], dtype="int32", name="ids"), keras.Input([2], name="numbers")
    return keras.Model({"ids": ids, "numbers": numbers}, keras.layers.Dense(1, name="foreign")(numbers))
"""
DATA = """
import numpy as np

def load():
    rng = np.random.default_rng(0)
    x = {"ids": rng.integers(0, 20, [400, 3]).astype(np.int32), "numbers": rng.normal(size=[400, 2]).astype(np.float32)}
    y = np.sin(x["ids"]).sum(axis=1, keepdims=True).astype(np.float32)
    return (x, y), (x, y)
"""
HOGWILD = ROOT / "HogWild" / "hogwild.py"
IDS = np.arange(20) * 10**12


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder with the model, the data, and a run on two ps, `run`."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "m.py").write_text(MODEL)
    (folder / "d.py").write_text(DATA)
    arguments = f"--data={folder}/d.py:load", f"--model={folder}/m.py:build", "--num_ps=2", "--num_workers=1"
    run(folder / "run", *arguments, "--steps=60", "--max_rows=60", "--table_optimizer=sparse_adam", script=HOGWILD)
    return folder


@pytest.mark.cluster
def test_each_row_is_taken_on_another_number_of_ps(trained, tmp_path):
    """From the run on two ps, three ps begin with the same rows and variables; one line says so, and training goes on."""
    arguments = f"--data={trained}/d.py:load", f"--model={trained}/m.py:renamed", "--num_ps=3", "--num_workers=1"
    said = run(tmp_path / "run", *arguments, "--steps=5", f"--init_from={trained}/run", script=HOGWILD)
    (line,) = [line for line in said.splitlines() if "took" in line]
    assert "out/kernel" in line and "the table items with 23 rows; initial as usual: " in line
    assert "new/kernel" in line.partition("usual")[2] and "the table rest" in line.partition("usual")[2]
    first = checkpoints_in(tmp_path / "run" / "checkpoints")[0]
    assert first.endswith("-0")
    np.testing.assert_array_equal(rows_of(first, "items"), rows_of(trained / "run", "items"))
    assert np.abs(rows_of(tmp_path / "run", "items") - rows_of(first, "items")).max() > 0


@pytest.fixture
def take(trained):
    """A function that takes values from a source into a new model, and returns the model and the line."""
    module = datasets.load(f"{trained}/d.py:load", 0)

    def take(function, source, max_rows=60, resume=False):
        lines: list[str] = []
        model = keras_model.build(f"{trained}/m.py:{function}", module, 5, tables_on_ps=True)
        settings = types.SimpleNamespace(init_from=str(source), resume=resume, num_ps=3, max_rows=max_rows)
        initial_values.take(settings, model, module, lines.append)
        return model, lines

    return take


@pytest.mark.cluster
@pytest.mark.parametrize("source", ["run", "run/model.keras"])
def test_all_of_it_is_taken_from_a_run_and_from_its_file(trained, take, source):
    model, (line,) = take("build", trained / source)
    assert line.endswith("with 43 rows; initial as usual: none")
    saved = keras.models.load_model(trained / "run" / "model.keras")
    of_file = {v.path: v.numpy() for v in saved.variables}
    for name, value in model.named_variables():
        if "moving" not in name or source != "run":  # those of a file are estimated anew
            np.testing.assert_array_equal(value, of_file[name])
    assert np.abs(of_file["norm/moving_mean"]).max() > 0
    ids, rows = map(np.concatenate, zip(*model.rows_from[1].parts(), strict=True))
    order = np.argsort(ids)
    np.testing.assert_array_equal(ids[order], IDS)
    np.testing.assert_array_equal(rows[order], rows_of(trained / "run", "others", IDS))
    with tf.Graph().as_default(), tf.Session() as session:
        center = GlobalParameters(model.initial_parameters, num_ps=3, tables=model.tables, max_rows=60)
        puts = initial_values.puts_of(model, center)
        ids = tf.placeholder(tf.int64, [None])
        find: Any = center.find
        found = [find(types.SimpleNamespace(number=i), ids) for i in range(2)]
        session.run(tf.global_variables_initializer(), center.init_feed_dict)
        initial_values.fill(session, puts)
        np.testing.assert_array_equal(session.run(found[0], {ids: np.arange(23)}), rows_of(trained / "run", "items"))
        np.testing.assert_array_equal(session.run(found[1], {ids: IDS}), rows_of(trained / "run", "others", IDS))


@pytest.mark.cluster
def test_other_tables_and_sources_are_refused(trained, take, user_error, tmp_path):
    source = trained / "run"
    with user_error("items has rows of 4 numbers there, and of 5 here"):
        take("wider", source)
    with user_error("items has 23 rows there, and 24 here"):
        take("larger", source)
    with user_error("others has no fixed number of rows there, and 100,000,000,000,000 here"):
        take("fixed", source)
    with user_error("items is a table there"):
        take("whole", source)
    with user_error("hidden is no table there"):
        take("taken_name", source)
    with user_error("has nothing of this model", "foreign/kernel"):
        take("foreign", source)
    with user_error("others has", "give a larger --max_rows"):
        take("build", source, max_rows=9)
    with user_error("--resume"):
        take("build", source, resume=True)
    with user_error("there is no such folder"):
        take("build", tmp_path / "none")
    with user_error("there is no checkpoint"):
        take("build", tmp_path)
    (tmp_path / "m.keras").write_text("no model")
    with user_error("m.keras cannot be loaded"):
        take("build", tmp_path / "m.keras")
    with open(source / "lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with user_error("that run still trains"):
            take("build", source)
    take("build", source)
