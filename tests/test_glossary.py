"""Basics-Tutorial/GLOSSARY.md: its names exist, its links lead to what shows the term, and nothing is missing."""

import functools
import inspect
import json
import re
from pathlib import Path

from common import tf
from common.cluster import hooks
from common.training import metrics

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "Basics-Tutorial"
GROUPS = re.split("^## ", (FOLDER / "GLOSSARY.md").read_text(), flags=re.MULTILINE)[1:]
ROWS = [[cell.strip() for cell in row.split("|")[1:-1]] for group in GROUPS for row in group.splitlines()[4:] if row]
TERMS = [row[0] for row in ROWS]


@functools.cache
def words(path):
    """The text of a file, made `plain`; of a notebook, its printed outputs as well."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        lines = [cell["source"] for cell in cells] + [output.get("text", []) for output in outputs]
        text = "\n".join("".join(some) for some in lines)
    return plain(text)


def plain(text):
    """Lower case, single spaces, no hyphens or underscores."""
    return " ".join(re.sub("[-_]", " ", text).split()).lower()


def test_form():
    assert len(ROWS) >= 100
    for row in ROWS:
        assert len(row) == 4 and all(row), row
        assert len(row[1]) <= 160 and row[1].endswith("."), row


def test_terms_are_sorted_and_unique():
    assert len(set(map(str.lower, TERMS))) == len(TERMS)
    for group in GROUPS:
        terms = [row.split("|")[1].strip().lower() for row in group.splitlines()[4:] if row]
        assert terms and terms == sorted(terms)


def test_names_exist_and_links_lead_to_what_shows_the_term():
    for term, _, name, where in ROWS:
        names = [re.sub(r" \(.*\)", "", term)]
        if name != "—":
            found = re.fullmatch(r"`tf\.([\w.]+)`", name)
            assert found and functools.reduce(getattr, found[1].split("."), tf), term  # it exists
            names.append(found[1].rpartition(".")[2])
        link = re.fullmatch(r"\[(.+)\]\((.+)\)", where)
        assert link, term
        path = (FOLDER / link[2]).resolve()
        assert path.is_relative_to(ROOT) and path.is_file() and Path(link[1].strip("`")).stem == path.stem, term
        assert any(re.search(rf"\b{re.escape(plain(some))}", words(path)) for some in names), term


def test_nothing_is_missing():
    ours = {
        name
        for module in (hooks, metrics)
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, tf.train.SessionRunHook) and value.__module__ == module.__name__
    }
    theirs = {name for name in dir(tf.train) if name.endswith("Hook") and name != "SessionRunHook"}
    folders = {path.parent.name for path in ROOT.glob("*/run.sh") if path.parent.name not in ("tests", "benchmarks")}
    assert ours and theirs and folders
    assert not (ours | theirs | folders) - set(TERMS)
