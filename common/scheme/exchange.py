"""All-reduce of large tensors through queues: each worker owns a chunk, averages it, and sends the mean to all others."""

from common import tf

LARGE = 250_000  # numbers from which on the exchange is faster than TensorFlow's collectives, see benchmarks/README.md
_ALIGNED = 16  # float32 in 64 bytes: TensorFlow does not copy a slice that begins and ends at such a place


def exchanged_mean(tensor, index, num_workers, name):
    """Returns the mean of a tensor over all workers, equal to the bit on all of them: a reduce-scatter and an all-gather.

    The owner of a chunk adds its copies in the order of the workers. A worker sends and receives 2 (n − 1)/n of the vector, in
    2 (n − 1) messages; two workers exchange it whole. It blocks until all workers take part.

    Args:
      tensor: this worker's vector or number, float32.
      index: number of this worker.
      num_workers: n.
      name: of the queues, the same on all workers and different for each exchange of a round.
    """
    if num_workers == 2:
        return _mean_of_two(tensor, index, name)
    vector = tf.reshape(tensor, [-1])
    bounds = _bounds(int(vector.shape[0]), num_workers)
    chunks = [vector[a:b] for a, b in bounds]
    others = [i for i in range(num_workers) if i != index]
    sent = [_sent(chunks[i], f"{name}_chunk_{index}", i) for i in others]
    copies = [chunks[index] if i == index else _received(f"{name}_chunk_{i}", index, chunks[index]) for i in range(num_workers)]
    own = tf.add_n(copies) / num_workers
    sent += [_sent(own, f"{name}_mean_{index}", i) for i in others]
    means = [own if i == index else _received(f"{name}_mean_{i}", index, chunks[i]) for i in range(num_workers)]
    with tf.control_dependencies(sent):
        return tf.reshape(tf.concat(means, axis=0), tensor.shape)


def _mean_of_two(tensor, index, name):
    """As `exchanged_mean`: two workers send each other the whole tensor: as many bytes, in one message."""
    other = 1 - index
    sent = _sent(tensor, f"{name}_from_{index}", other)
    received = _received(f"{name}_from_{other}", index, tensor)
    with tf.control_dependencies([sent]):
        return (tensor + received) / 2  # a sum of two is the same to the bit in either order


def _bounds(size, num_workers):
    """Returns the beginning and end of each worker's chunk."""
    rows = -(-size // _ALIGNED)
    cuts = [min(size, _ALIGNED * (i * rows // num_workers)) for i in range(num_workers)] + [size]
    return list(zip(cuts, cuts[1:], strict=False))


def _device(worker):
    return f"/job:worker/task:{worker}/device:CPU:0"


def _queue(name, worker):
    """The queue of a worker for one sender. A sender is never ahead by more than a round."""
    with tf.device(_device(worker)), tf.control_dependencies(None):
        return tf.queue.FIFOQueue(2, tf.float32, shared_name=name)


def _sent(tensor, name, worker):
    queue = _queue(name, worker)
    with tf.device(_device(worker)):
        return queue.enqueue(tensor)


def _received(name, worker, like):
    queue = _queue(name, worker)
    with tf.device(_device(worker)):
        found = queue.dequeue()
    found.set_shape(like.shape)
    return found
