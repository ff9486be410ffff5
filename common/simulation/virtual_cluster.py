"""The cluster of virtual workers, row indices instead of processes: the center, its clocks, flags per worker."""

from common import tf
from common.core import UserError
from common.scheme import GlobalParameters, Rate

SHARED = "variables_of_virtual_time"  # collection of the variables of the clocks


class VirtualCenter(GlobalParameters):
    """x̃ for virtual workers, row indices instead of processes."""

    def clocks(self, local, staleness=0, quorum=None):
        return _Clocks(local.num_workers, staleness, quorum)

    def ring(self, local):
        raise UserError(
            "the workers of this scheme average among themselves within a step (center.ring), so one worker's graph cannot "
            "stand for all; Synchronous-SGD makes the same updates through the ps, and can be simulated"
        )

    def dynamic(self, local, most):
        raise UserError(
            "the workers of this scheme adapt their local steps to their speed on a real clock (center.dynamic), but a "
            "simulation has no real clock: use a fixed number of local steps"
        )


def per_worker(hp, local):
    """Returns hyperparameters whose lists, with a number for each worker, may be indexed by a tensor."""
    values = {name: _PerWorker(v, local) if isinstance(v, list) else v for name, v in vars(hp).items()}
    return type(hp)(**values)


def write_row(rows, index, value):
    """An operation that writes one row, in place."""
    return tf.raw_ops.ResourceScatterUpdate(resource=rows.handle, indices=index, updates=value)


class _Clocks:
    """The counterpart of `common.core.Clocks` for `Together`, without bells: virtual time runs no step that must wait."""

    is_virtual = True

    def __init__(self, num_workers, staleness, quorum):
        self._quorum, self._num_workers, self.staleness = quorum or num_workers, num_workers, staleness
        shared = {"trainable": False, "collections": [SHARED], "use_resource": True, "dtype": tf.int64}
        zeros = tf.zeros_initializer()
        self._clocks, self._pulled = (
            tf.get_variable(f"virtual_{name}", [num_workers], initializer=zeros, **shared) for name in ("clocks", "pulled")
        )

    def read(self):
        return self._clocks.read_value()

    def low(self, clocks):
        if self._quorum == self._num_workers:
            return tf.reduce_min(clocks)
        return tf.math.top_k(clocks, self._quorum).values[-1]

    def pulled(self, worker):
        return self._pulled.sparse_read(worker)

    def with_clock(self, clocks, worker, value):
        return tf.tensor_scatter_nd_update(clocks, [[worker]], [value])

    def change(self, before, after, worker):
        return [self._clocks.assign(after, read_value=False)]

    def may_go_on(self, worker):
        return tf.constant(True)  # virtual time decides

    def wait(self, worker):
        return [write_row(self._pulled, worker, self.low(self.read()))]

    def tick(self, worker, after=()):
        return []

    def enter(self, worker):
        return ()

    leave = release = enter

    def behind(self, worker):
        return None


class _PerWorker(list):
    """Numbers, one for each worker, indexed also by a tensor: the worker is unknown while the graph is built."""

    def __init__(self, values, local):
        super().__init__(values)
        self._local = local

    def __getitem__(self, index):
        return _Chosen(self, self._local) if isinstance(index, tf.Tensor) else super().__getitem__(index)


class _Chosen(Rate):
    """The number of the worker whose step runs, looked up at each use."""

    def __init__(self, numbers, local):
        super().__init__(1.0, None)
        self._numbers, self._local = list(numbers), local

    def __tf_tensor__(self, dtype=None, name=None):
        numbers = [tf.convert_to_tensor(number, dtype or tf.float32) for number in self._numbers]
        return tf.gather(tf.stack(numbers), self._local.index, name=name)

    def __mul__(self, other):
        return tf.convert_to_tensor(self) * other

    __rmul__ = __mul__

    def __truediv__(self, other):
        return tf.convert_to_tensor(self) / other
