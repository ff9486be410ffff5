"""Keras models of many kinds, each under one of five schemes: what came of each, and the table in README.md."""

import math

import keras_models
import pytest

from common.data import datasets

LARGE = ["resnet50", "efficientnet"]  # each takes a minute; all kinds of their layers are in other rows
TESTED = [name for name in keras_models.MODELS if name not in LARGE]


def rows():
    """Returns the rows of the table, {name: cells}."""
    text = keras_models.README.read_text().split(keras_models.MARK)[1]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| `")]
    return {first.split("`")[1]: others for first, *others in cells}


def test_table_has_the_models():
    """Each by its name, and the line that refuses it where no scheme trains it."""
    table = rows()
    assert list(table) == list(keras_models.MODELS) and len(table) >= 35
    for name, row in keras_models.MODELS.items():
        assert f"`{name}`: {row.text} |" in keras_models.README.read_text()
        assert (row.refused or "") in table[name][-1]
        assert ("--model=" in table[name][-1]) == (row.refused is not None), name


@pytest.mark.parametrize("name", keras_models.MODELS)
def test_samples_are_taken(name):
    """Both sets, as a run would check them."""
    datasets.checked(keras_models.MODELS[name].data(), name)


@pytest.fixture(scope="module")
def outcomes():
    """The results of these models, in two processes."""
    return keras_models.outcomes(TESTED, most=1)


@pytest.mark.cluster
@pytest.mark.parametrize("name", TESTED)
def test_model(name, outcomes):
    """A scheme trains it, and `model.keras` gives the metrics that were reported; or it is refused as the table says."""
    row, outcome = keras_models.MODELS[name], outcomes[name]
    if row.refused:
        assert outcome == {"refused": rows()[name][-1].strip("`")}
        return
    ((scheme, loss),) = outcome["schemes"].items()
    assert math.isfinite(loss["after"]) and loss["has_changed"], scheme
    assert outcome["loaded"] == pytest.approx(outcome["reported"], rel=1e-3, abs=1e-5)
