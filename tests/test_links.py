"""Links between the pages: each leads to a file that git tracks, and to a heading that is there."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from runs import ROOT

from common.core import flags


def module_of_book(name):
    """A module of the book's, which are no package."""
    spec = importlib.util.spec_from_file_location(f"book_{name}", ROOT / "book" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COLLECT = module_of_book("collect")
IN_FENCES = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


FILES = set(map(str, COLLECT.tracked()))
PAGES = sorted(path for path in FILES if path.endswith(COLLECT.PAGES))


def prose(path):
    """The Markdown of a page, without blocks of code."""
    text = (ROOT / path).read_text()
    if path.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return IN_FENCES.sub("", text)


def headings(path):
    """The names that a link may have for the headings of a page, as the web pages of a repository make them."""
    found = re.findall(r"^#+ +(.*)$", prose(path), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in found)
    return {re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    for link, part in COLLECT.LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        place = ((ROOT / page).parent / link).resolve() if link else ROOT / page
        assert place.exists() and place.is_relative_to(ROOT), f"{page} links to {link}, which is not there"
        name = str(place.relative_to(ROOT))
        if place.is_dir():
            assert any(file.startswith(f"{name}/") for file in FILES) or name == ".", link
            name = str(Path(name, "README.md"))
        else:
            assert name in FILES, f"{page} links to {link}, which git does not track"
        if part and name.endswith(".md"):
            assert part.removeprefix("#") in headings(name), f"{page} links to {link}{part}: no such heading"


def test_the_flags_of_the_guide_are_those_of_the_programs():
    """`python book/flags.py` writes them. Each is in one group."""
    script = module_of_book("flags")
    assert script.written(script.PAGE.read_text()) == script.PAGE.read_text()
    assert "## This program" not in script.PAGE.read_text()
    grouped = [flag.name for group in flags.GROUPS.values() for flag in group]
    assert len(grouped) == len(set(grouped))
