"""The modules of common/: their imports go down the table in CONTRIBUTING.md, and each says its one job."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "common").glob("*.py") if path.stem != "__init__"}


def layers():
    """The rows of the table, the highest first: lists of modules."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are")[2]
    rows = re.findall(r"^\|.*\| (`.*`) \|$", section, re.M)
    return [re.findall(r"`(\w+)`", row) for row in rows]


def imports(tree):
    """The modules of common/ that a module imports, wherever it does."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "common":
            found |= {alias.name for alias in node.names} & set(MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("common."):
            found.add(node.module.split(".")[1])
    return found


def test_table_has_every_module_once():
    assert sorted(module for row in layers() for module in row) == sorted(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    height = {name: -i for i, row in enumerate(layers()) for name in row}
    assert {other for other in imports(MODULES[module]) if height[other] >= height[module]} == set()


@pytest.mark.parametrize("module", MODULES)
def test_first_line_says_the_job(module):
    first = (ast.get_docstring(MODULES[module]) or "").partition("\n")[0]
    assert 20 < len(first) and first[-1] in ".:"
