"""Types of training: conversion of the arrays of samples, labels and weights, and refusal of values that would be lost."""

import functools

import numpy as np

from common.core import UserError
from common.data.mapped_rows import LARGE, Rows, chunks, is_mapped
from common.data.nested_arrays import arrays_in, mapped_by_name, named

# The advice for data with strings.
OF_STRINGS = (
    "apply StringLookup or TextVectorization in the data, not in the model: dataset.map(lambda x, y: (lookup(x), y)); "
    "keras.layers.Hashing(2**53) makes ids for common.Embedding"
)


def typed(samples, name, half=""):
    """Returns (x, y), or (x, y, weights), in the types of training, or raises `UserError` if no training could use them.

    The error line begins with `name`, and has `half`, such as "_train", in the names of the arrays.
    """
    found = tuple(
        mapped_by_name(functools.partial(_in_types_of_training, axis), part, f"{name}: {axis}{half}")
        for axis, part in zip("xyw", samples)
    )
    for axis, part in zip("xy", found):
        if not arrays_in(part):
            raise UserError(f"{name}: {axis}{half} holds no arrays")
    arrays = {its: array for axis, part in zip("xyw", found) for its, array in named(part, f"{axis}{half}").items()}
    (first, samples), *others = arrays.items()
    for its, array in others:
        if len(array) != len(samples):
            what = {"x": "samples", "y": "labels", "w": "weights"}[its[0]]
            hint = "; np.stack makes one array of a list of samples" if "[0]" in first + its else ""
            raise UserError(f"{name}: {first} has {len(samples)} samples, {its} has {len(array)} {what}{hint}")
    if len(found) > 2 and any((chunk < 0).any() for w in arrays_in(found[2]) for chunk in chunks(w)):
        raise UserError(f"{name}: w{half} holds negative weights")
    return found


def as_arrays(part, name):
    """Returns a part of the data as an array, or as arrays in tuples and dicts; a list of arrays is a tuple, as for `fit`."""
    if isinstance(part, Rows):
        return part
    if np.ma.is_masked(part) or isinstance(part, (list, tuple)) and any(map(np.ma.is_masked, part)):
        # NumPy would drop the mask, and use the masked values
        raise UserError(f"{name} has masked values; fill them (.filled), or leave their samples out")
    if isinstance(part, dict):
        if other := [key for key in part if not isinstance(key, str)]:
            raise UserError(f"{name} has the key {other[0]!r}: expected the name of an input or output of the model")
        return {key: as_arrays(part[key], f"{name}[{key!r}]") for key in sorted(part)}
    if isinstance(part, tuple) or (isinstance(part, list) and part and all(hasattr(value, "shape") for value in part)):
        if all(hasattr(value, "shape") and len(value.shape) > 0 for value in part) or any(isinstance(v, dict) for v in part):
            return tuple(as_arrays(value, f"{name}[{i}]") for i, value in enumerate(part))
    return np.asarray(part)


def _in_types_of_training(axis, array, name):
    """Returns an array in the type of training, or raises `UserError`; copies only if the type changes.

    Labels become int32 or float32; integer samples keep their type. A large memory-mapped array is not copied: it becomes
    `common.data.Rows`. `axis` is "x", "y" or "w", for samples, labels, weights.
    """
    if isinstance(array, Rows):
        return array
    kind = array.dtype.kind
    if kind not in "fiub":
        hint = f"; {OF_STRINGS}" if axis == "x" and kind in "US" else ""
        raise UserError(f"{name} holds {array.dtype}, expected numbers{hint}")
    if array.ndim == 0 or len(array) == 0:
        raise UserError(f"{name} has no samples")
    if array.size == 0:
        raise UserError(f"{name} has shape {array.shape}: its samples hold no numbers, expected some")
    dtype = array.dtype.newbyteorder("=")
    if kind == "f":
        dtype = np.dtype(np.float32)
        if count := sum(chunk.size - np.count_nonzero(np.isfinite(chunk)) for chunk in chunks(array)):
            raise UserError(f"{name} holds {count} values that are NaN or infinite")
        most = max(float(np.abs(chunk).max()) for chunk in chunks(array)) if array.dtype != dtype else 0
        if most > np.finfo(dtype).max:
            raise UserError(f"{name} holds {most:.3g}, too large for float32; scale it")
        if axis == "x" and most > EXACT[0] and (found := rounded(array)):
            raise UserError(f"{name} holds {found}: give whole numbers as int64, or scale them")
    elif axis == "w" or (axis == "x" and kind == "b"):
        dtype = np.dtype(np.float32)
    elif axis == "y":
        dtype = np.dtype(np.int32)
        if array.max() >= 2**31 or array.min() < -(2**31):
            raise UserError(f"{name} holds the class {array.max()}, expected less than 2,147,483,648")
    if is_mapped(array) and array.size * dtype.itemsize > LARGE:
        return Rows(array, dtype)
    return array.astype(dtype, copy=False)


EXACT = 2**24, 2**53  # below these, float32 and float64 hold each whole number


def rounded(array):
    """Returns a text on the first whole number of an array that float32 would change; None if there is none.

    None also if the array has fractions: then its values are measurements, not ids.
    """
    if all(chunk.max() <= EXACT[0] and chunk.min() >= -EXACT[0] for chunk in chunks(array)):
        return None
    found: list = []
    for chunk in chunks(array):
        if chunk.dtype.kind == "f" and (chunk != np.floor(chunk)).any():
            return None
        with np.errstate(over="ignore"):  # a number too large becomes infinity
            near = chunk.astype(np.float32)
        changes = (near != chunk) | (chunk >= EXACT[1]) | (chunk <= -EXACT[1])
        found += zip(chunk[changes][:1], near[changes][:1])
    if not found:
        return None
    number, near = found[0]
    if not np.isfinite(near):
        return f"{number:.3g}, too large for float32"
    return f"the whole number {int(number):,}, which float32 rounds to {int(near):,}"
