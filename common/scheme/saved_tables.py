"""Tables in a checkpoint: rows by their ids, whole tables, the number of parameters."""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import tf
from common.core import TABLES, UserError, checkpoints_in, rows_in
from common.scheme.sharded_tables import factor_of, id_of
from common.scheme.tables import IDS, variable_name


def rows_of(where, layer, ids=None):
    """Returns rows of a table from a checkpoint, an array `[n, width]`.

    Args:
      where: path of a checkpoint, or folder of a run, for its newest checkpoint.
      layer: the name of the `common.Embedding`.
      ids: the row ids, an array `[n]`; None for all rows, in the order of their ids.

    Raises:
      UserError: if the checkpoint, table or row does not exist.
    """
    found = checkpoints_in(Path(where, "checkpoints")) if Path(where).is_dir() else [str(where)]
    if not found or not tf.train.checkpoint_exists(found[-1]):
        raise UserError(f"{where}: expected a checkpoint, as R/checkpoints/model.ckpt-100, or the folder of a run that has one")
    names = tf.train.load_checkpoint(found[-1]).get_variable_to_shape_map()
    names = sorted(each[1] for name in names if (each := re.fullmatch(rf"{TABLES}(\d+_\w+)", name)))
    these = [name for name in names if layer == name or variable_name(layer) == name.partition("_")[2]]
    if len(these) != 1:
        every = ", ".join(names) or "none"
        raise UserError(f"{found[-1]} has {len(these) or 'no'} tables of a layer {layer}: expected one of {every}")
    has, rows = rows_in_order(found[-1], these[0])
    ids = has if ids is None else np.asarray(ids)
    at = np.searchsorted(has, ids).clip(max=len(has) - 1)
    if (none := ids[has[at] != ids]).size:
        raise UserError(f"{found[-1]} has no row {none[0]} of {layer}")
    return rows(at)


class SavedTable(NamedTuple):
    """A table in a checkpoint or a file."""

    name: str  # as of a `common.scheme.Spec`
    rows: Any  # number of rows; None for an unbounded table
    width: int  # numbers in a row
    parts: Callable  # function that yields ids, int64 `[n]`, and their rows, float32 `[n, width]`, a part after another


def tables_in(checkpoint):
    """Returns the `SavedTable`s of a checkpoint."""
    shapes, found = tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map(), []
    for full, shape in sorted(shapes.items()):
        if each := re.fullmatch(rf"{TABLES}(\d+_\w+)", full):
            has_places = f"{full}-places" in shapes
            parts = functools.partial(_parts, checkpoint, full, shape, has_places)
            found.append(SavedTable(each[1], None if has_places else shape[0], shape[1], parts))
    return found


def _parts(checkpoint, name, shape, has_places):
    inverse = 0 if has_places else pow(factor_of(shape[0]), -1, shape[0])
    for start, values in rows_in(checkpoint, name, shape):
        if has_places:
            n, here = len(values), {"shape": [shape[0]], "first": start, "dtype": tf.int64}
            places = np.concatenate([part for _, part in rows_in(checkpoint, f"{name}-places", count=n, **here)])
            yield id_of(places[places >= 0]), values[places >= 0]
        else:
            yield (start + np.arange(len(values))) * inverse % shape[0], values


def starts_of(num_pieces):
    """Returns the first place of each piece of an unbounded table."""
    return [i * IDS // num_pieces for i in range(num_pieces)]


def rows_in_order(checkpoint, name):
    """Returns the sorted ids of a table in a checkpoint, int64 `[n]`, and a function that reads rows.

    The function maps indices into these ids, `[k]`, to their rows `[k, width]`, and reads in chunks.
    """
    name, shapes = TABLES + name, tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map()
    length = shapes[name][0]
    if f"{name}-places" in shapes:
        there = np.concatenate([part for _, part in rows_in(checkpoint, f"{name}-places", [length], dtype=tf.int64)])
        places = np.flatnonzero(there >= 0)
        ids = id_of(there[places])
        order = np.argsort(ids)
        ids, places = ids[order], places[order]
    else:
        ids = np.arange(length)
        places = ids * factor_of(length) % length

    def rows(numbers):
        wanted, found = places[numbers], np.empty([len(numbers), shapes[name][1]], np.float32)
        for start, values in rows_in(checkpoint, name, shapes[name]):
            here = (start <= wanted) & (wanted < start + len(values))
            found[here] = values[wanted[here] - start]
        return found

    return ids, rows


def whole(checkpoint, spec):
    """Returns the argument of `Embedding.fill`: all rows of a table; for an unbounded table its sorted ids and the rows."""
    ids, rows = rows_in_order(checkpoint, spec.name)
    every = rows(np.arange(len(ids)))
    return every if spec.rows else (ids, every)


def numbers_in(checkpoint, specs):
    """Returns the number of parameters of tables in a checkpoint."""
    shapes = tf.train.load_checkpoint(checkpoint).get_variable_to_shape_map()
    return sum(math.prod(shapes[TABLES + spec.name]) for spec in specs)
