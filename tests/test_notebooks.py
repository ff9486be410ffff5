"""The notebooks as files: their form, and how their outputs are compared. Their cells run under nbval, see run.sh."""

import json
import re
import sys
from pathlib import Path

import pytest
from nbval_numbers import agree

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "book"))

import collect  # noqa: E402

NOTEBOOKS = sorted([*ROOT.glob("[!.]*/*.ipynb"), *ROOT.glob("Basics-Tutorial/*/*.ipynb")])


@pytest.mark.parametrize(
    ("text", "reference", "same"),
    [
        ("accuracy 0.981", "accuracy 0.981", True),
        ("accuracy 0.983", "accuracy 0.981", True),
        ("accuracy 0.987", "accuracy 0.981", False),
        ("loss 1,234.5", "loss 1,236.5", True),
        ("loss 1,234.5", "loss 1,264.5", False),
        ("loss -0.5", "loss 0.5", False),
        ("loss 2.5e-03", "loss 2.6e-03", True),
        ("loss 2.5e-03", "loss 2.5e-02", False),
        ("step 12", "step 13", False),
        ("accuracy 0.981", "loss 0.981", False),
        ("0.981 0.5", "0.981", False),
        ("version 1.2.3", "version 1.2.4", False),
    ],
)
def test_numbers_are_compared_as_numbers(text, reference, same):
    assert agree(text, reference) == same


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_form(path):
    notebook = json.loads(path.read_text())
    assert path.read_text() == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"  # a diff shows what changed alone
    for cell in notebook["cells"]:
        assert "execution" not in cell["metadata"], "times of the last run: a change with every run"
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            assert "NBVAL" not in source, "a cell whose outputs are compared has the tag nbval-check-output"
            assert not [line for line in source.splitlines() if len(line) > 88], "a page of 1,280 pixels cuts longer lines"
            hidden = cell["metadata"].get("jupyter", {}).get("source_hidden", False)
            assert hidden or "plt.subplots" not in source, "code that draws is folded"


def in_order():
    """The notebooks in reading order: that of the tables of README.md, and in a folder that of its README's links."""
    folders = [folder for part in collect.reading_order((ROOT / "README.md").read_text()) for folder in part]
    names = [f"{folder}/{name}" for folder in folders for name in collect.children(ROOT / folder / "README.md")]
    return [ROOT / name for name in names if name.endswith(".ipynb")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_its_prerequisites_which_come_before_it(path):
    title, empty, *lines = "".join(json.loads(path.read_text())["cells"][0]["source"]).split("\n")
    assert title.startswith("# ") and empty == ""
    items = " ".join(lines[: lines.index("")]).split("- **")
    assert [item.partition("**: ")[0] for item in items] == ["", "You need", "Afterwards you can", "Time"]
    needed = [(path.parent / link).resolve() for link in re.findall(r"\]\(([^)]+\.ipynb)\)", items[1])]
    order = in_order()
    assert [each for each in needed if order.index(each) >= order.index(path)] == []


def test_six_notebooks_are_the_core():
    """Those of README.md say so themselves."""
    named = (ROOT / "README.md").read_text().split("**The core**")[1].split("\n\n")[0]
    core = {path for path in NOTEBOOKS if "One of the [six core notebooks]" in path.read_text()}
    assert {ROOT / link for link in re.findall(r"\]\(([^)]+)\)", named)} == core and len(core) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_exercises_name_lines_that_are_there(path):
    """Where an exercise says "set `WINDOW = 4` to", a cell has this line, so that the reader finds it."""
    lines, texts = set(), []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            lines |= {line.strip().partition("  #")[0] for line in cell["source"]}
        else:
            texts.append(" ".join("".join(cell["source"]).split()))
    exercises = " ".join(texts).partition("## Exercises")[2].partition("<details>")[0]
    assert exercises
    assert set(re.findall(r"[Ss]et `(\w+ = [^`]+)` to", exercises)) <= lines


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_exercise_has_a_folded_solution(path):
    cells = json.loads(path.read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    exercises, _, solutions = text.partition("## Exercises")[2].partition("<details><summary>Solutions</summary>")
    numbers = re.findall(r"^(\d+)\. ", exercises, re.MULTILINE)
    assert numbers and numbers == re.findall(r"^(\d+)\. ", solutions, re.MULTILINE)
