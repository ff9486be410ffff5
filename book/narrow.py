"""Makes tables, figures and code fit narrow screens: marks them for static/book.css. book/conf.py calls it for every page."""

import ast
import html
import re
import struct
import textwrap
from pathlib import Path

import panels
from docutils import nodes

PHONE = 356  # pixels, the width of the text on a phone
WIDE = 700  # pixels; on a phone the panels of a wider figure stand below each other, since its words would be too small
PROSE, NAME = 40, 100  # least characters of a sentence, in any cell and in the first column, whose cells name the rows
SHORT = 28  # characters of a cell and its label, up to which several share a line
SIZES = {"": (10.6, 8.6, 18), "compact": (6.4, 6.2, 5)}  # of a table: pixels of a letter, of a letter of code, around a cell
FIRST = 0.27  # share of a compact table's first column, if only its words are broken
MANY = 40  # rows, from which on a table is folded
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
FULL = 115  # characters of a line that was broken because it was full
PYTHON = re.compile(r'(<div class="[^"]*highlight-python notranslate"><div class="highlight"><pre>)(.*?)\n?(</pre>)', re.DOTALL)


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def shape_tables(doctree):
    """Chooses how a phone shows each table.

    As it is, in small letters ("compact"), the same with a first column whose words may be broken ("compact", "broken"), or
    each row as a paragraph ("stacked", and "pairs" of two columns).
    """
    for table in list(doctree.findall(nodes.table)):
        rows = [list(row.children) for body in table.findall(nodes.tbody) for row in body.children]
        head = [list(row.children) for part in table.findall(nodes.thead) for row in part.children]
        if not rows or len(head) != 1 or len({len(row) for row in head + rows}) != 1:
            continue
        lengths = [max(len(cell.astext()) for cell in column) for column in zip(*rows)]
        small = _widths(head + rows, *SIZES["compact"])
        if sum(length > PROSE for length in lengths) <= 1 and sum(_widths(head + rows, *SIZES[""])) <= PHONE:
            continue
        has_sentences = lengths[0] > NAME or max(lengths[1:], default=0) > PROSE
        if not has_sentences and sum(small) <= PHONE:
            table["classes"].append("compact")
        elif not has_sentences and sum(small[1:]) <= PHONE * (1 - FIRST):
            table["classes"] += ["compact", "broken"]
        else:
            table["classes"] += ["stacked", "pairs"] if len(lengths) == 2 else ["stacked"]
            _label(head[0], rows)
        if len(rows) > MANY:
            titles = ", ".join(filter(None, (cell.astext() for cell in head[0])))
            fold = f"<details><summary>{len(rows)} rows: {html.escape(titles)}</summary>"
            table.parent.replace(table, [nodes.raw("", fold, format="html"), table, nodes.raw("", "</details>", format="html")])


def _label(head, rows):
    """Notes in each cell what a row that is a paragraph needs: the name of its column, and whether it is short or empty."""
    for row in rows:
        for title, cell in list(zip(head, row))[1:]:
            label, text = title.astext() if len(head) > 2 else "", cell.astext()
            if not text.strip():
                cell["classes"].append("empty")
            elif len(head) > 2 and len(label) + len(text) <= SHORT:
                cell["classes"].append("short")
            cell["label"] = label


def _widths(rows, letter, code, around):
    """Returns the least width of each column of a table, in pixels: the width of its longest word."""

    def longest(cell):
        sizes = [0.0]
        bold = 1.03 if isinstance(cell.parent.parent, nodes.thead) else 1
        for text in cell.findall(nodes.Text):
            is_code = isinstance(text.parent, nodes.literal)
            words = re.split(r"\s+" if is_code else r"\s+|(?<=\w[-/])(?=[^\W\d])", text)
            sizes += [len(word) * (code if is_code else letter) * bold for word in words]
        return max(sizes)

    return [max(map(longest, column)) + around for column in zip(*rows)]


def visit_entry(self, node):
    """Writes a cell with the name of its column, from which static/book.css makes a label."""
    at = len(self.body)
    type(self).visit_entry(self, node)
    if node.get("label"):
        self.body[at] = self.body[at].replace("<td", f'<td data-label="{self.attval(node["label"])}"', 1)


def depart_entry(self, node):
    type(self).depart_entry(self, node)


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def frame_figures(doctree, folder):
    """Prepares each wide figure for a phone: its panels, one below the other, or a frame that scrolls if it has only one.

    Args:
      doctree: the page.
      folder: to which the paths of its figures are relative.
    """
    for image in list(doctree.findall(nodes.image)):
        path = Path(folder, image["uri"])
        width = _pixels(path)
        if width <= WIDE:
            continue
        framed = image
        while isinstance(framed.parent, (nodes.inline, nodes.reference, nodes.paragraph)) and len(framed.parent) == 1:
            framed = framed.parent
        if isinstance(framed.parent, nodes.TextElement):  # part of a sentence
            continue
        grids = panels.find(path)
        frame = nodes.container(classes=["wide-figure", "whole"] if grids else ["wide-figure"])
        framed.parent.replace(framed, [frame, *_panels(image, grids, width)] if grids else frame)
        frame += framed


def _panels(image, grids, width):
    """Returns the nodes of a figure's panels: each shows parts of the one picture, and a screen reader reads it once."""
    parts = ['<div class="panels">']
    for grid in grids:
        across = max(sum(box.right - box.left for box in row) for row in grid)
        down = sum(row[0].bottom - row[0].top for row in grid)
        parts[-1] += f'<div class="panel" style="--width: {across}px; aspect-ratio: {across} / {down}">'
        top = 0
        for row in grid:
            left = across - sum(box.right - box.left for box in row)
            high = row[0].bottom - row[0].top
            for box in row:
                wide = box.right - box.left
                place = {"left": left / across, "top": top / down, "width": wide / across, "height": high / down}
                place |= {"--width": width / wide, "--left": -box.left / wide, "--top": -box.top / high}
                style = "; ".join(f"{key}: {value:.3%}" for key, value in place.items())
                parts[-1] += f'<div style="{style}">'
                parts.append("</div>")
                left += wide
            top += high
        parts[-1] += "</div>"
    parts[-1] += "</div>"
    copies = [image.deepcopy() for _ in parts[1:]]
    for copy in copies:
        copy["alt"], copy["ids"], copy["names"] = "", [], []
    copies[0]["alt"] = image.get("alt", "")
    found = [nodes.raw("", parts[0], format="html")]
    for copy, part in zip(copies, parts[1:], strict=True):
        found += [copy, nodes.raw("", part, format="html")]
    return found


def _pixels(path):
    """Returns the width of a picture; 0 if it is no PNG."""
    start = path.read_bytes()[:24] if path.is_file() else b""
    return struct.unpack(">I", start[16:20])[0] if start.startswith(b"\x89PNG") else 0


# ---------------------------------------------------------------------------------------------------------------------
# Code


def mark_sources(cells):
    """Marks cells of a notebook that print the source of a function: their output is Python, to be coloured."""
    for cell in cells:
        texts = ["".join(output["text"]) for output in cell.get("outputs", []) if output["output_type"] == "stream"]
        if "inspect.getsource(" in "".join(cell["source"]) and _is_python("".join(texts)):
            cell["metadata"].setdefault("mystnb", {})["text_lexer"] = "python"


def join_docstrings(doctree):
    """Joins the lines of docstrings, so that the browser breaks them."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "python":
            block.rawsource = DOCSTRING.sub(lambda match: _joined(match[0]), block.astext())
            block[:] = [nodes.Text(block.rawsource)]


def _is_python(text):
    try:
        return bool(ast.parse(textwrap.dedent(text)).body)
    except SyntaxError:
        return False


def _joined(docstring):
    """Joins lines that were broken because they were full."""
    lines: list[str] = []
    full = 0  # characters of the line before as it was
    for line in docstring.split("\n"):
        words = line.split()
        if words and full and full + 1 + len(words[0]) > FULL and _indent(line) == _indent(lines[-1]):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
        full = len(line)
    return "\n".join(lines)


def _indent(line):
    return len(line) - len(line.lstrip(" "))


def hang_lines(body):
    """Returns the HTML of a page in which a long line of Python goes on below its own beginning, not below that of the page."""

    def hang(match):
        lines = []
        for line in match[2].split("\n"):
            indent = _indent(re.sub("<[^>]*>", "", line)) + (0 if 'class="sd"' in line else 4)
            lines.append(f'<span class="code-line" style="--indent: {indent}">{line}\n</span>')
        return f"{match[1]}{''.join(lines)}{match[3]}"

    return PYTHON.sub(hang, body)
