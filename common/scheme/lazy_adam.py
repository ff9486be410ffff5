"""Adam for rows of a table: `LazyAdam`, and `SparseAdam`, whose moments decay by the updates without the row, too."""

from common import tf
from common.core import UserError

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # as in Kingma & Ba 2015, https://arxiv.org/abs/1412.6980


class LazyAdam(tf.train.Optimizer):
    """m_r ← β₁ m_r + (1 − β₁) g_r;  v_r ← β₂ v_r + (1 − β₂) g_r²;  x_r ← x_r − η √(1 − β₂ᵗ) / (1 − β₁ᵗ) m_r / (√v_r + ε).

    Only rows r with a gradient change; t is the number of updates of the table, as in the authors' code
    (`optimizers/lazy_adam.py` of tensorflow/addons) and in `torch.optim.SparseAdam`. If each row has a gradient in each update,
    this is Adam.

    Slots of a row: m and v, each as wide as the row. The operations are not atomic together: of two concurrent pushes of a row,
    the step of one may use moments with the gradients of both.

    Args:
      learning_rate: η, a number or tensor.
    """

    initial_value = 0  # of all slots, read by unbounded.py

    def __init__(self, learning_rate, name="LazyAdam"):
        super().__init__(use_locking=False, name=name)
        self._learning_rate, self._clocks = learning_rate, {}

    def _create_slots(self, var_list):
        for v in var_list:
            self._zeros_slot(v, "m", self._name)
            self._zeros_slot(v, "v", self._name)
            if v.ref() not in self._clocks:
                zero = tf.zeros([], tf.int64)
                with tf.device(v.device):
                    self._clocks[v.ref()] = tf.get_variable(clock_name(v), initializer=zero, trainable=False, use_resource=True)

    def _prepare(self):
        self._rate = tf.convert_to_tensor(self._learning_rate)

    def _resource_apply_dense(self, grad, handle):
        raise UserError(f"{self._name} is for rows of tables (common.Embedding): expected tf.IndexedSlices, not a vector")

    def _resource_apply_sparse(self, grad, handle, indices):
        m, v = self.get_slot(handle, "m"), self.get_slot(handle, "v")
        # An atomic fetch-and-add, so that two pushes have two numbers.
        t = tf.raw_ops.ResourceCountUpTo(resource=self._clocks[handle.ref()].handle, limit=tf.int64.max, T=tf.int64) + 1
        k, before = self._updates_since(handle, indices, t)
        with tf.control_dependencies(before):
            decayed = [_scatter("Mul", each, indices, beta**k) for each, beta in ((m, BETA1), (v, BETA2))]
        with tf.control_dependencies(decayed):
            added = [_scatter("Add", m, indices, (1 - BETA1) * grad), _scatter("Add", v, indices, (1 - BETA2) * grad * grad)]
        with tf.control_dependencies(added):
            step = m.sparse_read(indices) / (tf.sqrt(v.sparse_read(indices)) + EPSILON)
        # In float64: 1 − β₂ᵗ of float32 would be off by 1e-4 at t = 1.
        powers = [tf.pow(tf.constant(beta, tf.float64), tf.cast(t, tf.float64)) for beta in (BETA1, BETA2)]
        correction = tf.cast(tf.sqrt(1 - powers[1]) / (1 - powers[0]), grad.dtype)
        return _scatter("Sub", handle, indices, tf.cast(self._rate, grad.dtype) * correction * step)

    def _updates_since(self, handle, indices, t):
        """Returns k, by whose power of β the moments of rows decay, `[n, width]` or a scalar, and operations to run first."""
        return tf.ones([]), []


class SparseAdam(LazyAdam):
    """As `LazyAdam`, with β₁ᵏ m_r and β₂ᵏ v_r in place of β₁ m_r and β₂ v_r: k is the number of updates since the row's last.

    So m_r and v_r are those of Adam with a gradient of zero in the k − 1 updates between. The row differs from Adam's by
    the steps that Adam makes meanwhile, Σ_j η_(t−k+j) √(1 − β₂^(t−k+j)) / (1 − β₁^(t−k+j)) β₁ʲ m_r / (√(β₂ʲ v_r) + ε) for
    0 < j < k. They are about as many as 1 / (1 − β₁) = 10.

    A third slot has the number of a row's last update, int64 `[rows]`.
    """

    def __init__(self, learning_rate, name="SparseAdam"):
        super().__init__(learning_rate, name)

    def _create_slots(self, var_list):
        super()._create_slots(var_list)
        for v in var_list:
            zeros = tf.zeros_initializer()
            self._get_or_make_slot_with_initializer(v, zeros, v.shape[:1], tf.int64, "last", self._name)

    def _updates_since(self, handle, indices, t):
        last = self.get_slot(handle, "last")
        k = tf.maximum(t - last.sparse_read(indices), 0)  # 0: a push with a later number was faster
        with tf.control_dependencies([k]):
            noted = _scatter("Max", last, indices, t + tf.zeros_like(indices))
        return tf.tile(tf.cast(k, tf.float32)[:, None], [1, int(handle.shape[1])]), [noted]


def clock_name(piece):
    """Returns the name of the variable that counts the updates of a piece of a table; see `Table.parts`."""
    return piece.op.name.replace("/part_", "-updates/part_")


def _scatter(kind, variable, indices, values):
    """Returns the operation that adds, multiplies, ... values `[n, ...]`, or a scalar, to rows of a variable."""
    operation = getattr(tf.raw_ops, f"ResourceScatter{kind}")
    return operation(resource=variable.handle, indices=indices, updates=values)
