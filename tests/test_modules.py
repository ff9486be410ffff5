"""The packages of common/: imports go down the table in CONTRIBUTING.md, through front doors; each module says its job.

Also the version in three files.
"""

import ast
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# {("core", "flags"): its syntax tree}; the package of common/run.py is ""
MODULES = {
    (path.parent.name if path.parent.name != "common" else "", path.stem): ast.parse(path.read_text())
    for path in sorted((ROOT / "common").rglob("*.py"))
    if path.stem != "__init__"
}


MAP = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are")[2].partition("## Set up")[0]


def table():
    """Returns {package: its modules} as CONTRIBUTING.md has them, the highest package first."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| (`.*`) \|$", MAP, re.M)
    return {package: re.findall(r"`(\w+)`", modules) for package, modules in rows}


def offered(package):
    """Returns the names that a package offers."""
    tree = ast.parse((ROOT / "common" / package / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    return {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def imports(tree):
    """Yields (package, module, name) of what is imported from packages of common/; the module is "" at a front door."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common."):
            _, package, *module = str(node.module).split(".")
            for alias in node.names:
                yield package, ".".join(module), alias.name


def code_outside():
    """Yields (path, syntax tree) of each script and notebook outside common/ and tests/."""
    for path in sorted({*ROOT.glob("*/*.py"), *ROOT.glob("*/*.ipynb"), *ROOT.glob("*/kubernetes/*.py")}):
        if path.parts[len(ROOT.parts)] in ("tests", "common", "runs", "shared"):
            continue
        if path.suffix == ".py":
            yield path, ast.parse(path.read_text())
            continue
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and "common." in source and not source.startswith("%%"):
                yield path, ast.parse("\n".join(line for line in source.splitlines() if line.lstrip()[:1] not in ("%", "!")))


def test_picture_has_the_imports_of_the_packages():
    """It leaves out arrows that other arrows imply."""
    imported: dict = {package: set() for package in table()}
    for (package, _), tree in MODULES.items():
        if package:
            imported[package] |= {other for other, *_ in imports(tree)} - {package}
    direct = {
        package: {other for other in others if not any(other in imported[by] for by in others - {other})}
        for package, others in imported.items()
    }
    drawn = re.findall(r"^(\w+) +→  (.*)$", MAP, re.M)
    assert {package: set(others.split(", ")) for package, others in drawn} == {p: direct[p] for p in direct if direct[p]}


def test_walks_name_what_is_there():
    named = re.findall(r"`(\w+)/(\w+)\.py` `([\w.]+)`", MAP)
    assert len(named) > 40
    for package, module, name in named:
        body = MODULES[package, module].body
        for part in name.split("."):
            [found] = [node for node in body if getattr(node, "name", None) == part]
            body = getattr(found, "body", [])


def test_table_has_every_module_once():
    assert sorted((package, module) for package, of_one in table().items() for module in of_one) == sorted(
        (package, module) for package, module in MODULES if package
    )


@pytest.mark.parametrize("package, module", [key for key in MODULES if key[0]], ids=" ".join)
def test_imports_go_down_through_front_doors(package, module):
    below = list(table())[list(table()).index(package) :]
    for other, of_other, name in imports(MODULES[package, module]):
        assert other in below, f"{other} is above {package}"
        assert other == package or (not of_other and name in offered(other)), f"common.{other} does not offer {name}"


@pytest.mark.parametrize("package", table())
def test_modules_of_a_package_import_in_one_direction(package):
    graph = {
        module: {of_other or name for other, of_other, name in imports(tree) if other == package} & set(table()[package])
        for (of_one, module), tree in MODULES.items()
        if of_one == package
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises an error if there is a cycle


def test_scripts_and_notebooks_import_from_front_doors():
    for path, tree in code_outside():
        for package, module, name in imports(tree):
            assert not module and name in offered(package), f"{path}: common.{package} does not offer {name}"


@pytest.mark.parametrize("package, module", MODULES, ids=" ".join)
def test_first_line_says_the_job(package, module):
    first = (ast.get_docstring(MODULES[package, module]) or "").partition("\n")[0]
    assert 20 < len(first) and first[-1] in ".:"


@pytest.mark.parametrize("package", table())
def test_a_package_offers_what_it_names_and_nothing_else(package):
    door = __import__(f"common.{package}", fromlist=["_"])
    for name in offered(package):
        getattr(door, name)
    assert dir(door) == sorted(offered(package))
    with pytest.raises(ImportError, match="no_such_name"):
        exec(f"from common.{package} import no_such_name")


@pytest.mark.slow
def test_to_import_the_packages_brings_in_no_large_library():
    packages = ", ".join(f"common.{package}" for package in table())
    code = f"import sys, common, {packages}; print(*{{'tensorflow', 'keras', 'matplotlib'}} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


@pytest.mark.parametrize("package", table())
def test_no_function_has_the_name_of_a_module_beside_it(package):
    """Python sets the attribute of a package to the module when that is imported, whatever the front door says."""
    tree = ast.parse((ROOT / "common" / package / "__init__.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).count(".") == 2:
            assert not {alias.name for alias in node.names} & set(table()[package])


def test_the_version_is_that_of_the_newest_release():
    version, date = re.findall(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\ndate-released: {date}\n" in (ROOT / "CITATION.cff").read_text()
