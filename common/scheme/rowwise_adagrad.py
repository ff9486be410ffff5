"""Adagrad with one accumulator per row of a table, instead of one per parameter."""

from common import tf
from common.core import UserError


class RowwiseAdagrad(tf.train.Optimizer):
    """G_r ← G_r + mean_j g_rj²;  x_r ← x_r − η g_r / (√G_r + ε), for the rows r of a table that have a gradient.

    G is initially 0, and ε is 1e-10, as in the authors' code (`optim/rwsadagrad.py` of facebookresearch/dlrm). So the slots of
    a table of width w take 1/w of its memory. The three operations are not atomic together: two concurrent pushes of a row may
    both read a G with the squares of both.

    Args:
      learning_rate: η, a number or tensor.
    """

    initial_value = 0.0  # initial G, read by unbounded.py

    def __init__(self, learning_rate, name="RowwiseAdagrad"):
        super().__init__(use_locking=False, name=name)
        self._learning_rate, self._epsilon = learning_rate, 1e-10

    def _create_slots(self, var_list):
        for v in var_list:
            zeros = tf.zeros_initializer()
            self._get_or_make_slot_with_initializer(v, zeros, v.shape[:1], v.dtype.base_dtype, "accumulator", self._name)

    def _prepare(self):
        self._rate = tf.convert_to_tensor(self._learning_rate)

    def _resource_apply_dense(self, grad, handle):
        raise UserError("RowwiseAdagrad is for rows of tables (common.Embedding): expected tf.IndexedSlices, not a vector")

    def _resource_apply_sparse(self, grad, handle, indices):
        kept = self.get_slot(handle, "accumulator")
        squares = tf.reduce_mean(grad * grad, axis=1)
        added = tf.raw_ops.ResourceScatterAdd(resource=kept.handle, indices=indices, updates=squares)
        with tf.control_dependencies([added]):
            root = tf.sqrt(kept.sparse_read(indices)) + self._epsilon
        change = tf.cast(self._rate, grad.dtype) * grad / root[:, None]
        return tf.raw_ops.ResourceScatterSub(resource=handle.handle, indices=indices, updates=change)
