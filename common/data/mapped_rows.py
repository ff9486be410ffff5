"""Samples in a file that is mapped: rows that are read when they are drawn, never all at once."""

import mmap
import os

import numpy as np

LARGE = 2**26  # bytes from which on a mapped array stays in its file: less than that costs a worker little
CHUNK = 2**22  # numbers that are looked at, at a time: of all at once each intermediate array would be one more copy
ALIGNED = 64  # a tensor begins at a multiple of so many bytes; TensorFlow copies an array that does not


def is_mapped(array):
    """Returns whether an array, or what it is a view of, is a file, or a part of one, that is mapped into memory."""
    while isinstance(array, (np.ndarray, memoryview)):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return isinstance(array, mmap.mmap)


def chunks(array):
    """Yields an array `[n, ...]`, or `Rows`, piece by piece, as arrays."""
    size = max(1, CHUNK // max(1, int(np.prod(array.shape[1:], dtype=int))))
    for start in range(0, len(array), size):
        yield array[start : start + size]


class Rows:
    """Samples `[n, ...]` that stay in their file: an array that knows its shape and type, and reads only what is asked for.

    Args:
      array: a view of a mapped file.
      dtype: of what is read, which the file may hold as another.
      chosen: numbers of the rows that these are, an array `[n]`; None for all, in their order.
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
        """Returns the `Rows` of a slice, or of an array of numbers. Reads nothing."""
        if self.chosen is not None:
            return Rows(self._array, self.dtype, self.chosen[which])
        return Rows(self._array[which], self.dtype) if isinstance(which, slice) else Rows(self._array, self.dtype, which)

    def min(self):
        return min(chunk.min() for chunk in chunks(self))

    def max(self):
        return max(chunk.max() for chunk in chunks(self))

    @property
    def has_file(self):
        """Whether another process finds the same by the name of the file."""
        root = self._root()
        return root is not None and root.mode != "c" and bool(root.filename) and os.path.isfile(root.filename)

    def in_place(self):
        """Returns where the rows are in memory, if the file can be a tensor as it is, else None.

        Returns:
          An array `[N, ...]` of which these are some rows, the number of the first, and the distance from one to the next.
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
        """The `np.memmap` that the array is a view of, None if there is none."""
        array = self._array
        while isinstance(array, np.ndarray):
            if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):
                return array
            array = array.base
        return None

    def __reduce__(self):
        """Another process gets the place of the rows, not the rows."""
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
