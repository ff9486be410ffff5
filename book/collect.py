"""Collects the sources of the book: the files that git tracks, and a page for each script that a reader may want to see.

    python book/collect.py book/_build/source

The folders of the book are those of the repository, so a link from one page to another is the same in both. Its first page
moves to the root. book/conf.py adapts links to folders and to scripts.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = "book/index.md"  # the first page
PAGES = (".md", ".ipynb")
PICTURES = (".png", ".svg")
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".json": "json", ".js": "javascript"}
LINK = re.compile(r"\]\(([^()\s#]*)(#[^()\s]*)?\)")
SCRIPT = """---
orphan: true
---
# {name}

`{path}`

```{{literalinclude}} {name}
:language: {language}
```
"""
MODULE = """# common.{name}

```{{eval-rst}}
.. automodule:: common.{name}
   :members:
```
"""


def tracked():
    """Returns the files of the repository, paths relative to its root; those that git would add are among them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    paths = map(Path, sorted(os.fsdecode(listed.stdout).split("\0")))
    return [path for path in paths if path.parts and path.parts[0] != "shared" and (ROOT / path).is_file()]


def collect(target):
    """Writes all sources of the book to a folder that does not exist yet."""
    files = tracked()
    for path in files:
        if path.suffix in PAGES + PICTURES:
            _copy(ROOT / path, target / path)
    shown = {path for path in files if path.suffix in (".py", ".sh") and path.parts[0] not in ("tests", "common", ".ci")}
    for path in shown | linked(files):
        _copy(ROOT / path, target / path)
        language = LANGUAGES.get(path.suffix, "text")
        (target / f"{path}.md").write_text(SCRIPT.format(path=path, name=path.name, language=language))
    first = target / FIRST
    (target / "index.md").write_text(LINK.sub(_from_root, first.read_text()))
    first.unlink()
    (target / "api").mkdir()
    for path in files:
        if path.parts[0] == "common" and len(path.parts) == 3 and path.suffix == ".py" and path.stem != "__init__":
            name = ".".join(path.with_suffix("").parts[1:])
            (target / "api" / f"{name}.md").write_text(MODULE.format(name=name))


def linked(files):
    """Returns the files that a page links to and that are no pages themselves."""
    found = set()
    for path in files:
        if path.suffix in PAGES:
            for link, _ in LINK.findall((ROOT / path).read_text()):
                place = Path(os.path.normpath(path.parent / link))
                if place in files and place.suffix not in PAGES + PICTURES:
                    found.add(place)
    return found


def adapted(text, folder, root):
    """Returns the text of a page, or of a notebook as JSON, with links to folders and scripts turned into links to pages.

    Args:
      text: the text.
      folder: of the page, relative to the root.
      root: what `collect` has written.
    """

    def change(match):
        link, part = match[1], match[2] or ""
        place = root / folder / link
        if not link or "://" in link:
            return match[0]
        if os.path.normpath(folder / link) == FIRST:
            link = os.path.relpath("index.md", folder)
        elif named := opened_by(text[: match.start()], os.path.normpath(folder / link), part, root):
            link = os.path.relpath(named, folder)
        elif (place / "README.md").is_file():
            link = os.path.join(link, "README.md")
        elif place.is_dir() and (notebooks := sorted(place.glob("*.ipynb"))):
            link = os.path.join(link, notebooks[0].name)
        elif Path(f"{place}.md").is_file():
            link = f"{link}.md"
        return f"]({link}{part})"

    return LINK.sub(change, text)


def opened_by(before, target, part, root):
    """Returns the notebook that a link named after a scheme opens, in place of the folder or its README; else None.

    Args:
      before: the text before the end of the link's name.
      target: where the link leads, a path relative to the root.
      part: of the page to which it leads; empty if to the whole page.
      root: what `collect` has written.
    """
    name, scheme = before[before.rfind("[") + 1 :], target.removesuffix("/README.md")
    return notebook_of(scheme, root) if name == scheme and not part else None


def notebook_of(folder, root):
    """Returns the notebook that explains the scheme of a folder, a path relative to the root; None if it is no scheme."""
    path = f"{folder}/{folder}.ipynb"
    return path if folder in _schemes(root) and (root / path).is_file() else None


@functools.cache
def _schemes(root):
    return reading_order((root / "README.md").read_text())[0]


def reading_order(readme):
    """Returns the folders in the order of README.md's tables: those of the first table, and all others."""
    text = readme.split("\n## Reading order\n")[1].split("\n## ")[0]
    first = text.split("\n\n| folder |")[1].split("\n\n")[0]
    folders = list(dict.fromkeys(re.findall(r"\[[^\]]+\]\(([\w-]+)/\)", text)))
    return [f for f in folders if f"]({f}/)" in first], [f for f in folders if f"]({f}/)" not in first]


def children(readme):
    """Returns the pages that belong under a README: notebooks, and READMEs of folders within, in the order of its links."""
    folder, text = readme.parent, readme.read_text()
    inner = [path for path in folder.rglob("README.md") if path != readme]
    pages = [path for path in folder.rglob("*.ipynb") if not any(path.is_relative_to(other.parent) for other in inner)]
    pages += folder.glob("GLOSSARY.md")

    def place(path):
        at = text.find(f"({path.relative_to(folder)}")
        return at if at >= 0 else len(text), path

    return [str(path.relative_to(folder)) for path in sorted({*inner, *pages}, key=place)]


def _from_root(match):
    link, part = match[1], match[2] or ""
    return match[0] if not link or "://" in link else f"]({os.path.normpath(Path('book', link))}{part})"


def _copy(source, to):
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to)


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
