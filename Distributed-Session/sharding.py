"""The samples of one worker as a `tf.data.Dataset`: of arrays, and of the lines of text files. And a count of what is seen."""

from pathlib import Path

import numpy as np

from common import tf
from common.core import UserError


def array_dataset(arrays, batch_size, num_workers=1, shard_index=0, epochs=None, seed=0):
    """Returns the batches of one worker as a `tf.data.Dataset`: of every num_workers-th sample, in a new order each epoch.

    Sharded first, so that all workers together see every sample once an epoch; then shuffled, batched and repeated, so that no
    batch has samples of two epochs. Shards differ by one sample at most, and the last batch of an epoch may be smaller.

    Only indices are shuffled, all of the shard's, at about 250 bytes each. The samples of a batch are taken by NumPy: they are
    no part of the graph, which has a limit of 2 GB, and may come from a file (`np.load(..., mmap_mode="r")`). The price is
    some 0.1 ms a batch, and that the dataset must be used in the process that made it. `Batches` is faster, where the samples
    fit into memory once more.

    Args:
      arrays: an array `[n, ...]`, or a tuple of arrays with the same n. All workers give the same; they are not copied.
      batch_size: samples per batch of this worker.
      num_workers, shard_index: this is worker `shard_index` of 0 to `num_workers` - 1.
      epochs: passes over the shard; None goes on for ever. (An iterator that is initialized again begins with the order of
        the first epoch again.)
      seed: of the order; `tf.set_random_seed` enters, too. The same for all workers, each of which makes its own order of it.

    Returns:
      A dataset of batches `[batch_size, ...]`, or of tuples of them, with or without eager execution.

    Raises:
      UserError: if the arrays differ in length, a worker would get no sample, or a number is out of its range.
    """
    several = isinstance(arrays, (tuple, list))
    parts = [np.asarray(part) for part in (arrays if several else [arrays])]
    if not parts or any(part.ndim == 0 for part in parts):
        raise UserError("arrays must be an array of samples [n, ...], or a tuple of such arrays")
    num_samples = len(parts[0])
    if any(len(part) != num_samples for part in parts):
        lengths = ", ".join(str(len(part)) for part in parts)
        raise UserError(f"arrays must all have the same number of samples, not {lengths}")
    check_shard(num_workers, shard_index, batch_size=batch_size, epochs=1 if epochs is None else epochs)
    if num_samples < num_workers:
        raise UserError(f"{num_samples} samples are too few for {num_workers} workers: each needs at least one")

    def take(indices):
        dtypes = [tf.as_dtype(part.dtype) for part in parts]
        batch = tf.numpy_function(lambda chosen: [part[chosen] for part in parts], [indices], dtypes)
        for tensor, part in zip(batch, parts):
            tensor.set_shape([None, *part.shape[1:]])
        return tuple(batch) if several else batch[0]

    indices = tf.data.Dataset.range(num_samples).shard(num_workers, shard_index)
    return indices.shuffle(num_samples, seed + shard_index).batch(batch_size).map(take).repeat(epochs)


def line_dataset(
    files, parse, batch_size, num_workers=1, shard_index=0, epochs=None, seed=0, shuffle_buffer=10_000, header_lines=0
):
    """Returns the batches of one worker as a `tf.data.Dataset`: of its part of the lines of text files.

    With at least as many files as workers, a worker gets every num_workers-th file, and reads no others; the shards are then
    as uneven as the files. With fewer files, it reads all of them and gets every num_workers-th line; the shards differ by
    one line at most. (`tf.data.experimental.AutoShardPolicy.AUTO` chooses in the same way.) In both cases the files are sorted
    first: the order of a glob differs from machine to machine, and would give a file to two workers, or to none.

    Only then come the random parts, in a new order each epoch: the order of the worker's files, if it has files of its own,
    and that of lines within a buffer. Lines of several files alternate before they come to the buffer, so that files of one
    class each are mixed even if it is small.

    Args:
      files: paths, in any order; all workers give the same, and the files do not change. One line is one sample.
      parse: a function of a line, a scalar string tensor, that returns a tensor or a tuple of tensors.
      batch_size: samples per batch of this worker.
      num_workers, shard_index: this is worker `shard_index` of 0 to `num_workers` - 1.
      epochs: passes over the shard; None goes on for ever.
      seed: of the order, as in `array_dataset`.
      shuffle_buffer: lines to choose the next one from. The order is only as random as the shard if it holds all of that.
      header_lines: lines to leave out at the beginning of each file.

    Returns:
      A dataset of batches of what `parse` returns, with or without eager execution. It is empty if the worker's files are, or
      if there are fewer lines than workers.

    Raises:
      UserError: if there is no file, one is missing, or a number is out of its range.
    """
    files = sorted(str(file) for file in ([files] if isinstance(files, (str, Path)) else files))
    if not files:
        raise UserError("files must name at least one file, not none")
    for file in files:
        if not tf.gfile.Exists(file) or tf.gfile.IsDirectory(file):
            raise UserError(f"files must be text files that exist; there is no file {file}")
    epochs_given = 1 if epochs is None else epochs
    check_shard(num_workers, shard_index, batch_size=batch_size, epochs=epochs_given, shuffle_buffer=shuffle_buffer)
    seed += shard_index

    def lines_of(dataset):  # cycle_length: files that are open at a time, their lines taken in turn
        return dataset.interleave(lambda file: tf.data.TextLineDataset(file).skip(header_lines), cycle_length=8)

    dataset = tf.data.Dataset.from_tensor_slices(files)
    if len(files) >= num_workers:
        lines = lines_of(dataset.shard(num_workers, shard_index).shuffle(len(files), seed))
    else:
        lines = lines_of(dataset).shard(num_workers, shard_index)
    return lines.shuffle(shuffle_buffer, seed).map(parse, tf.data.AUTOTUNE).batch(batch_size).repeat(epochs)


def drawn(dataset):
    """Returns the samples of all batches of a dataset, or its elements, as one array. For use with eager execution."""
    return np.concatenate([np.atleast_1d(element.numpy()) for element in dataset])


def times_seen(datasets, num_samples):
    """Returns how often each worker sees each sample, an array `[workers, num_samples]`.

    Args:
      datasets: one for each worker, of batches of the numbers of samples, 0 to `num_samples` - 1. They must end.
    """
    return np.array([np.bincount(drawn(dataset), minlength=num_samples) for dataset in datasets])


def check_shard(num_workers, shard_index, **counts):
    """Raises `UserError` unless there is such a shard, and each of `counts`, by name, is a whole number of at least 1."""
    for name, value in {"num_workers": num_workers, **counts}.items():
        if not isinstance(value, (int, np.integer)) or value < 1:
            raise UserError(f"{name} must be a whole number of at least 1, not {value}")
    if shard_index not in range(num_workers):
        raise UserError(f"shard_index must be 0 to {num_workers - 1} with num_workers={num_workers}, not {shard_index}")
