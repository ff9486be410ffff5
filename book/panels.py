"""Finds the panels of a figure, so that a phone can show them one below the other (narrow.py)."""

import itertools
from typing import NamedTuple

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 90, 60  # pixels, of the smallest panel
TICK = 7  # pixels: a tick outside a panel, and the panel's line itself
WORDS = 12  # pixels, more than between two words
GAP = 5  # pixels of empty space, from which on a figure may be cut there


class Box(NamedTuple):
    """A rectangle of a picture, in pixels; `right` and `bottom` are the first that do not belong to it."""

    left: int
    top: int
    right: int
    bottom: int


def find(path):
    """Finds the panels of a figure, and the titles and legends that several panels have in common.

    Args:
      path: of a PNG file as matplotlib writes it; the lower spine of each panel is black.

    Returns:
      A list of grids in reading order, one for each panel and each common title. A grid is a list of rows of boxes; it has
      more than one box if the panel shares its labels with a neighbour. Empty if no two panels stand side by side, or if
      something lies across the space between them.
    """
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(np.int16)
    ink = (np.abs(pixels - pixels[0, 0]) > 24).any(2)
    rows = _rows(_frames((pixels < 70).all(2)))
    if max(map(len, rows), default=0) < 2:
        return []
    cells: dict[Box, Box] = {}  # of each panel's frame: the box with its labels
    found: list = []
    for row, band in zip(rows, _bands(ink, rows), strict=False):
        cut = _cut(ink, row, *band)
        if not cut:
            return []
        cells |= dict(zip(row, cut, strict=True))
        found += [Box(0, band[0], ink.shape[1], cut[0].top), *row, Box(0, cut[0].bottom, ink.shape[1], band[1])]
    if len(cells) < sum(map(len, rows)):
        return []
    grids = [_with_labels(ink, box, rows, cells) if box in cells else [[_trimmed(ink, box)]] for box in found]
    return [grid for grid in grids if grid[0][0]]


def _runs(mask):
    """Returns (begin, end) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0])))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _frames(dark):
    """Returns the frames of the panels: from the lower spine up to the end of the left one, if there is one."""
    frames = []
    for y in range(len(dark)):
        for left, right in _runs(dark[y]):
            if right - left >= WIDTH:
                # A tick may lengthen the lower spine, and a curve may hide a part of the left one.
                spine = dark[:y, left : left + TICK].any(1)
                top = max((end for begin, end in _runs(~spine) if end - begin > TICK or not begin), default=0)
                frames.append(Box(left, top if y - top >= HEIGHT else y, right, y + 1))
    return [frame for frame in frames if not any(_holds(other, frame) for other in frames)]


def _holds(outer, inner, slack=TICK):
    """Whether a box lies in another, larger one."""
    across = outer.left - slack <= inner.left and inner.right <= outer.right + slack
    return across and outer.top - slack <= inner.top and inner.bottom <= outer.bottom + slack and outer != inner


def _rows(frames):
    """Returns the panels of each row, from left to right."""
    frames.sort(key=lambda frame: frame.bottom)
    rows: list[list[Box]] = []
    for frame in frames:
        if not rows or frame.bottom - rows[-1][0].bottom > 3:
            rows.append([])
        rows[-1].append(frame)
    return [sorted(row) for row in rows]


def _bands(ink, rows):
    """Yields where each row of panels begins and ends, up to the first that nothing separates from the next."""
    begin = 0
    for above, below in itertools.pairwise(rows):
        first = above[0].bottom
        gap = _gap(ink[first : min(frame.top for frame in below)].any(1), first=not _has_sides(below))
        if gap is None:
            return
        yield begin, first + gap
        begin = first + gap
    yield begin, len(ink)


def _has_sides(row):
    """Whether panels have spines at the sides: if not, bars and curves cannot be told from text."""
    return row[0].bottom - row[0].top > 1


def _gap(line, first=False):
    """Returns the middle of the widest, or of the first, empty part; None if there is none that is wide enough."""
    empty = [run for run in _runs(~line) if run[1] - run[0] >= GAP]
    chosen = empty[:1] if first else sorted(empty, key=lambda run: run[0] - run[1])[:1]
    return sum(chosen[0]) // 2 if chosen else None


def _cut(ink, row, begin, end):
    """Returns the box of each panel of a row with its labels; none if nothing separates them.

    It leaves out titles and legends above and below that lie across the space between two panels.
    """

    def cuts(top, bottom):
        gaps = [(a.right, _gap(ink[top:bottom, a.right : b.left].any(0))) for a, b in itertools.pairwise(row)]
        return None if any(gap is None for _, gap in gaps) else [left + gap for left, gap in gaps]

    def is_common(top, bottom, space=WORDS):  # some line of text lies across: between two words there is less space
        spaces = [_runs(~ink[top:bottom, a.right - WORDS : b.left + WORDS].any(0)) for a, b in itertools.pairwise(row)]
        return any(all(last - first < space for first, last in of_one) for of_one in spaces)

    has_sides = _has_sides(row)
    top, bottom = min(frame.top for frame in row), row[0].bottom + (TICK if has_sides else 0)
    lines = [(begin + first, begin + last) for first, last in _runs(ink[begin:end].any(1))]
    for first, last in reversed(lines):
        if first < top and cuts(first, bottom) and not is_common(first, min(last, top), WORDS if has_sides else GAP):
            top = first
        elif first < top:
            break
    for first, last in lines:
        if last > bottom and cuts(top, last) and not is_common(max(first, bottom), last):
            bottom = last
        elif last > bottom:
            break
    edges = cuts(top, bottom)
    if edges is None:
        return []
    top, bottom = max(top - 2, begin), min(bottom + 2, end)
    return [Box(left, top, right, bottom) for left, right in itertools.pairwise([0, *edges, ink.shape[1]])]


def _with_labels(ink, frame, rows, cells):
    """Returns the grid of a panel: its own box, and beside and below it the labels that it shares with others."""
    cell = cells[frame]
    row = next(row for row in rows if frame in row)
    column = [other for other in cells if abs(other.left - frame.left) <= 3 and abs(other.right - frame.right) <= 3]
    left, right = _trimmed(ink, cell).left, _trimmed(ink, cell).right
    grid = [[Box(left, cell.top, right, cell.bottom)]]
    labels = _trimmed(ink, Box(0, cell.top, max(row[0].left - TICK, 0), cell.bottom))
    if frame.left - left <= TICK and labels:
        grid[0].insert(0, Box(labels.left, cell.top, row[0].left, cell.bottom))
    below = Box(left, frame.bottom + TICK, right, cell.bottom)
    last = cells[column[-1]]
    names = _trimmed(ink, Box(last.left, column[-1].bottom + TICK, last.right, last.bottom))
    if column[-1] != frame and names and not _trimmed(ink, below):
        right = max(right, names.right)
        grid[0][-1] = grid[0][-1]._replace(right=right)
        grid.append([Box(left, column[-1].bottom + TICK, right, last.bottom)])
    return grid


def _trimmed(ink, box):
    """Returns a box without its empty sides; an empty one if nothing is in it."""
    part = ink[box.top : box.bottom, box.left : box.right]
    across, down = np.flatnonzero(part.any(0)), np.flatnonzero(part.any(1))
    if not len(across):
        return ()
    return Box(box.left + int(across[0]), box.top + int(down[0]), box.left + int(across[-1]) + 1, box.top + int(down[-1]) + 1)
