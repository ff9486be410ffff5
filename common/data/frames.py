"""Data frames, as of pandas, as samples: a matrix of numbers with columns, as of files."""

import numpy as np

from common.core import UserError
from common.data.array_types import EXACT, rounded
from common.data.columns import Columns


def is_frame(x):
    """Whether samples are a data frame of pandas, or of a library that follows it."""
    return any(kind.__name__ == "DataFrame" for kind in type(x).__mro__)


def of_frames(frames, flag):
    """Returns the arrays of data frames with the same columns, as `table_files.convert` makes them of files, and the `Columns`.

    Args:
      frames: {name: frame}, of the training set first.
      flag: begins an error line.
    """
    first, *others = ([*map(str, frame.columns)] for frame in frames.values())
    if any(other != first for other in others):
        raise UserError(f"{flag}: the frames have different columns: expected {', '.join(first)} in all, in this order")
    if len(set(first)) < len(first):
        raise UserError(f"{flag}: the frames have two columns of one name: {', '.join(first)}")
    places, described = {"numbers": 0, "ids": 0}, []
    arrays: dict = {half: {"numbers": [], "ids": []} for half in frames}
    for place, name in enumerate(first):
        parts = {half: _checked(np.asarray(frame[frame.columns[place]]), flag, half, name) for half, frame in frames.items()}
        kinds = {part.dtype.kind for part in parts.values()}
        kind = "float" if "f" in kinds else "bool" if kinds == {"b"} else "int"
        most = max(max(abs(int(part.min())), abs(int(part.max()))) for part in parts.values()) if kind == "int" else None
        array = "ids" if most is not None and most > EXACT[0] else "numbers"
        is_at = {"array": array, "at": places[array], "width": 1}
        described.append({"name": name, "kind": kind, **is_at, "is_list": False, "most": most})
        places[array] += 1
        for half, part in parts.items():
            arrays[half][array].append(part.astype(np.int64 if array == "ids" else np.float32))
    found = {half: {name: np.stack(parts, 1) for name, parts in own.items() if parts} for half, own in arrays.items()}
    return {half: own if "ids" in own else own["numbers"] for half, own in found.items()}, Columns(described)


def _checked(values, flag, half, name):
    """Returns the values of a column, or raises a `UserError` if they are no numbers, or float32 would change them."""
    of = f"{flag}: the column {name!r} of x_{half} holds"
    if values.dtype.kind not in "fiub":
        hint = "of categories that are the same in all sets, .cat.codes makes some"
        raise UserError(f"{of} {values.dtype}, expected numbers without gaps; {hint}")
    if values.dtype.kind == "f":
        if count := np.count_nonzero(~np.isfinite(values)):
            raise UserError(f"{of} {count:,} values that are empty or infinite: fill them, or leave their rows out")
        if problem := rounded(values):
            raise UserError(f"{of} {problem}: give whole numbers as int64, or scale them")
    elif values.dtype.kind == "u" and values.max() > np.iinfo(np.int64).max:
        raise UserError(f"{of} {values.max():,}, too large for int64")
    return values
