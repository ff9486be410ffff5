"""Samples in a memory-mapped file: rows are read when they are drawn, never all at once."""

import mmap
import os

import numpy as np

LARGE = 2**26  # bytes above which a mapped array stays in its file; a smaller one is cheap to copy
CHUNK = 2**22  # numbers checked at a time, as intermediate arrays of all of them would each be another copy
ALIGNED = 64  # alignment of tensors in bytes; TensorFlow copies an unaligned array


def is_mapped(array):
    """Returns whether an array is a memory-mapped file, or a view of one."""
    while isinstance(array, (np.ndarray, memoryview)):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return isinstance(array, mmap.mmap)


def chunks(array):
    """Yields an array `[n, ...]`, or `Rows`, in chunks, as arrays."""
    size = max(1, CHUNK // max(1, int(np.prod(array.shape[1:], dtype=int))))
    for start in range(0, len(array), size):
        yield array[start : start + size]


class Rows:
    """Samples `[n, ...]` that stay in their file: an array with shape and type that reads only the requested rows.

    Args:
      array: a view of a mapped file.
      dtype: type of the rows as read; the file's may differ.
      chosen: indices of the selected rows, an array `[n]`; None for all, in their order.
    """

    def __init__(self, array, dtype, chosen=None):
        self._array, self.dtype, self.chosen = array, np.dtype(dtype), chosen
        self.shape = (len(array) if chosen is None else len(chosen), *array.shape[1:])
        self.ndim, self.size = array.ndim, int(np.prod(self.shape, dtype=int))
        self.nbytes = self.size * array.dtype.itemsize  # in the file

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, which):
        """Reads the rows of a slice, a list of numbers or a number, into an array."""
        return np.array(self._array[which if self.chosen is None else self.chosen[which]], self.dtype, order="C")

    def take(self, which):
        """Returns the `Rows` of a slice, or of an array of indices. Reads nothing."""
        if self.chosen is not None:
            return Rows(self._array, self.dtype, self.chosen[which])
        return Rows(self._array[which], self.dtype) if isinstance(which, slice) else Rows(self._array, self.dtype, which)

    def as_type(self, dtype):
        """Returns the same `Rows` with another type, as read."""
        return Rows(self._array, dtype, self.chosen)

    def min(self):
        return min(chunk.min() for chunk in chunks(self))

    def max(self):
        return max(chunk.max() for chunk in chunks(self))

    @property
    def has_file(self):
        """Whether another process can open the same file by its name."""
        root = self._root()
        return root is not None and root.mode != "c" and bool(root.filename) and os.path.isfile(root.filename)

    def in_place(self):
        """Returns the place of the rows in memory, if the file can serve as a tensor, else None.

        It is an array `[N, ...]` that contains these rows, the index of the first, and the step between them.
        """
        root, array, of_one = self._root(), self._array, self._array[:1].nbytes
        if root is None or not array.dtype.isnative or array.dtype.itemsize > 8 or not array[:1].flags.c_contiguous:
            return None
        begin, step = _address(array) - _address(root), array.strides[0]
        if begin % of_one or step % of_one or _address(root) % ALIGNED:
            return None
        every = np.ndarray((root.nbytes // of_one, *array.shape[1:]), array.dtype, root)
        return every, begin // of_one, step // of_one

    def _root(self):
        """The `np.memmap` behind the array, or None."""
        array = self._array
        while isinstance(array, np.ndarray):
            if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):
                return array
            array = array.base
        return None

    def __reduce__(self):
        """Pickles the place of the rows in the file, not the rows."""
        root, array = self._root(), self._array
        if not self.has_file:
            raise ValueError("the file of a mapped array has no name")
        begin = _address(array) - _address(root)
        place = os.fspath(root.filename), root.offset, root.nbytes, array.dtype, array.shape, begin, array.strides
        return _found_again, (place, self.dtype, self.chosen)


def _address(array):
    return array.__array_interface__["data"][0]


def _found_again(place, dtype, chosen):
    path, offset, size, of_array, shape, begin, strides = place
    root = np.memmap(path, np.uint8, "r", offset, (size,))
    return Rows(np.ndarray(shape, of_array, root, begin, strides), dtype, chosen)
