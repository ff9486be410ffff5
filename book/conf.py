"""Sphinx's settings for the book: how pages are read, terms of the glossary linked, and formulas written.

book/build.sh uses them. The sources are what book/collect.py has written.
"""

import json
import re
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx import addnodes

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import collect  # noqa: E402
import narrow  # noqa: E402

project = "Distributed TensorFlow"
author = "The maintainers of the Distributed TensorFlow tutorials"
html_title = "Distributed training with TensorFlow"
html_show_copyright = html_show_sphinx = False
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

nb_execution_mode = "off"  # the outputs are those that are committed
nb_render_text_lexer = nb_render_error_lexer = "none"
nb_merge_streams = True
nb_code_prompt_show = "Show the code of this cell"
nb_code_prompt_hide = "Hide the code of this cell"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 6  # as on the web pages of a repository: a link to #reading-order works in both
myst_dmath_double_inline = True
highlight_language = "none"
# A language that Pygments does not know; an attribute whose name others have, too
suppress_warnings = ["misc.highlighting_failure", "ref.python"]

autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autodoc_typehints = "none"
napoleon_use_param = False  # "x, y: ..." is about two arguments, not about a type
napoleon_custom_sections = [("Attributes", "params_style")]
autodoc_mock_imports = ["absl", "cloudpickle", "keras", "matplotlib", "pyarrow", "sklearn", "tensorflow"]

html_theme = "sphinx_book_theme"
html_static_path = [str(Path(__file__).parent / "static"), str(Path(__file__).parent / "_build" / "static")]
html_use_index = False  # the search finds members of the API
html_favicon = "static/icon.svg"
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
html_context = {"default_mode": "light"}
html_theme_options = {
    "navbar_persistent": [],
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_fullscreen_button": False,
    "navigation_with_keys": False,
}

# On the first page a picture of the player stands where the player itself is shown if scripts run
PICTURE = re.compile(r"^\[!\[.*\]\(.*player\.png\)\]\(.*player\.md\)$", re.MULTILINE)
PLAYER = r"""
```{raw} html
<div id="player" class="player compact" tabindex="0">
```

\g<0>

```{raw} html
</div>
<script src="_static/d3.min.js"></script>
<script src="_static/player.js"></script>
<script src="_static/traces/index.js"></script>
```
"""
OF_A_SCHEME = "Commands, flags, results"  # in the table of contents, the README of a scheme
IN_BACKTICKS = re.compile(r"(`[^`]*`)")
CODE = re.compile(r"(\S)(:?)\n\n((?: {4,}\S.*\n(?:\n(?= {4}))?)+)")
GLOSSARY = "Basics-Tutorial/GLOSSARY"
# Terms that in prose mostly mean something else
ORDINARY = ("address", "collection", "exchange", "feed", "job", "stage", "summary", "target")
GUIDE = (
    *("install", "running", "data-and-models", "python", "flags", "schemes", "learning-rates", "callbacks", "survival"),
    *("elasticity", "compression", "tables", "machines", "arithmetic", "cost", "results", "keras3"),
)
REFERENCE = [GLOSSARY, "book/common", "benchmarks/README", "SECURITY", "CONTRIBUTING", "tests/README", "CHANGELOG"]


def read(app, docname, content):
    """Adapts the source of a page: links to folders and scripts, and the pages that are under it."""
    root = Path(app.srcdir)
    path = root / f"{docname}.md"
    text = collect.adapted(content[0], path.parent.relative_to(root), root)
    if docname == "index":
        text = PICTURE.sub(PLAYER, text) + "".join(toctree(pages, caption) for caption, pages in contents(root).items())
    elif docname == "book/common":
        text += toctree(sorted(f"/api/{each.stem}" for each in (root / "api").glob("*.md")))
    elif path.name == "README.md" and docname != "README":
        pages = collect.children(path)
        if collect.notebook_of(path.parent.name, root) is None:
            text += toctree(pages)
        text += files_of(path.parent)
    content[0] = prepared(text, path, root) if app.env.doc2path(docname).suffix == ".ipynb" else text


def prepared(text, path, root):
    """Returns a notebook as MyST-NB needs it.

    The cells that Jupyter shows folded get the tag by which MyST-NB folds them. The README of a scheme and its other notebooks
    are under the scheme's notebook.
    """
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            cell["metadata"].setdefault("tags", []).append("hide-input")
    narrow.mark_sources(notebook["cells"])
    first = collect.notebook_of(path.parent.name, root)
    if first and Path(first).with_suffix("") == path.relative_to(root).with_suffix(""):
        others = [page for page in collect.children(path.with_name("README.md")) if page != Path(first).name]
        pages = toctree([f"{OF_A_SCHEME} <README>", *others])
        notebook["cells"].append({"cell_type": "markdown", "id": "contents", "metadata": {}, "source": pages})
    return json.dumps(notebook)


def contents(root):
    """Returns what is in the book, {caption: pages}, in README.md's order."""
    first, others = collect.reading_order((root / "README.md").read_text())
    return {
        "Start": ["README", "book/which", "book/player"],
        "Guide": [f"book/guide/{page}" for page in GUIDE],
        "In reading order": [opening(folder, root) for folder in first],
        "With any scheme": [f"{folder}/README" for folder in others],
        "To look up": REFERENCE,
    }


def opening(folder, root):
    """Returns the entry of a folder in a table of contents: its notebook if it is a scheme, with the title of its README."""
    notebook = collect.notebook_of(folder, root)
    title = (root / folder / "README.md").read_text().partition("\n")[0].removeprefix("# ")
    return f"{title} </{Path(notebook).with_suffix('')}>" if notebook else f"{folder}/README"


def toctree(pages, caption=""):
    """Returns the Markdown of a table of contents that is seen at the side only."""
    lines = ["", "", "```{toctree}", ":hidden:", f":caption: {caption}" if caption else "", *pages, "```", ""]
    return "\n".join(line for i, line in enumerate(lines) if line or i < 2 or i == len(lines) - 1)


def files_of(folder):
    """Returns the Markdown of a line that names the scripts of a folder."""
    names = sorted(path.name[:-3] for path in folder.glob("*.md") if (folder / path.name[:-3]).is_file())
    return f"\n\nIn this folder: {', '.join(f'[{name}]({name}.md)' for name in names)}\n" if names else ""


def plain_docstring(app, what, name, obj, options, lines):
    """Adapts a docstring: it has names in backticks, indented code, and no other markup."""
    text, code = "\n".join(lines), []

    def keep(match):
        code.append(match[3])
        colons = "::" if match[2] else "\n\n::"
        return f"{match[1]}{colons}\n\n\0"

    pieces = IN_BACKTICKS.split(CODE.sub(keep, text))
    for i, piece in enumerate(pieces):
        if i % 2 == 0:
            piece = re.sub(r"([*|\\])", r"\\\1", piece)
            pieces[i] = "\\ " + piece if i and re.match(r"\w", piece) else piece
        else:
            pieces[i] = f"`{piece}`"
    text = re.sub("\0", lambda match: code.pop(0), "".join(pieces))
    lines[:] = text.split("\n")


def terms_of(glossary):
    """Returns the terms of the glossary, {form: (id, definition)}, forms in lower case."""
    found = {}
    for row in glossary.splitlines():
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        if len(cells) == 4 and cells[0] not in ("term", *ORDINARY) and not cells[0].startswith("---"):
            term, meaning = cells[0], cells[1].replace("`", "")
            name, _, short = term.partition(" (")
            for form in filter(None, (name, short.rstrip(")"))):
                found[form.lower()] = f"term-{nodes.make_id(name)}", f"{term}: {meaning}"
    return found


def link_terms(app, doctree, docname):
    """Links the first place on a page where a term of the glossary appears to the glossary; there, marks the rows."""
    terms = terms_of((Path(app.srcdir) / f"{GLOSSARY}.md").read_text())
    if docname == GLOSSARY:
        for row in doctree.findall(nodes.row):
            cell = row.children[0].astext().partition(" (")[0].lower()
            if cell in terms:
                row["ids"].append(terms[cell][0])
        return
    words = [re.sub(r"\\[- ]", "[- ]", re.escape(word)) for word in sorted(terms, key=len, reverse=True)]
    pattern = re.compile(rf"(?<![\w-])({'|'.join(words)})(s?)(?![\w-])", re.IGNORECASE)
    known = {_joined(form): found for form, found in terms.items()}
    target, seen = app.builder.get_relative_uri(docname, GLOSSARY), set()
    for text in list(doctree.findall(nodes.Text)):
        if not isinstance(text.parent, (nodes.paragraph, nodes.emphasis)):
            continue
        if any(isinstance(above, UNLINKED) for above in _above(text)):
            continue
        pieces, end = [], 0
        for match in pattern.finditer(text):
            anchor, meaning = known[_joined(match[1])]
            if anchor not in seen:
                seen.add(anchor)
                link = {"refuri": f"{target}#{anchor}", "reftitle": meaning, "internal": True, "classes": ["term"]}
                pieces += [nodes.Text(text[end : match.start()]), nodes.reference("", match[0], **link)]
                end = match.end()
        if pieces:
            text.parent.replace(text, [piece for piece in [*pieces, nodes.Text(text[end:])] if piece.astext()])


def _joined(term):
    """The same for "round robin" and "Round-robin"."""
    return re.sub("[- ]", "-", term.lower())


UNLINKED = (nodes.reference, nodes.title, nodes.literal, nodes.literal_block, nodes.thead, addnodes.desc_signature)


def _above(node):
    while node.parent is not None:
        node = node.parent
        yield node


def fit(app, doctree, docname):
    """Makes tables, figures and code fit a phone."""
    narrow.shape_tables(doctree)
    narrow.join_docstrings(doctree)
    narrow.frame_figures(doctree, app.srcdir)


def finish(app, pagename, templatename, context, doctree):
    """Writes a link to a notebook's file under its title, and breaks long lines of Python."""
    context["body"] = narrow.hang_lines(context.get("body", ""))
    if context.get("sourcename", "").endswith(".ipynb"):
        link = context["pathto"](f"_sources/{context['sourcename']}", 1)
        name = Path(pagename).name
        line = f'<p class="download"><a href="{link}" download="{name}.ipynb">Download this notebook</a></p>'
        context["body"] = context["body"].replace("</h1>", f"</h1>\n{line}", 1)


def math(self, node):
    """Writes a formula as MathML."""
    self.body.append(convert(node.astext(), display="inline"))
    raise nodes.SkipNode


def display_math(self, node):
    """Writes a formula that stands by itself."""
    self.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app):
    """Registers all this with Sphinx."""
    app.connect("source-read", read)
    app.connect("doctree-resolved", link_terms)
    app.connect("doctree-resolved", fit)
    app.connect("autodoc-process-docstring", plain_docstring, priority=400)  # before napoleon
    app.connect("html-page-context", finish)
    app.add_node(nodes.entry, override=True, html=(narrow.visit_entry, narrow.depart_entry))
    app.add_html_math_renderer("mathml", (math, None), (display_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


html_math_renderer = "mathml"
