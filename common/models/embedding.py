"""`Embedding`: a `keras.layers.Embedding` with a table sharded over the ps in a cluster, never whole on a worker."""

import keras

from common import tf
from common.core import UserError
from common.scheme import first_rows, place_of, tables

# The number up to which each floating-point type represents all integers.
EXACT = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53}

NEEDS_TABLE = (
    "needs the whole table, but that is on the ps: leave it out, or use keras.layers.Embedding, whose whole table is on every "
    "worker"
)


class Embedding(keras.layers.Embedding):
    """A `keras.layers.Embedding`, with the same behavior in `fit`, `predict` and files; in a cluster its table is sharded.

    Before a window a worker pulls the rows that its batches need, each once; it pushes the gradients of these rows. See
    `common.scheme.local_rows`.

    Args:
      input_dim: rows of the table; ids are 0 to input_dim − 1. None for an unbounded table: ids are 0 to 2⁵³ − 1; in a cluster
        a row is created at its first use; a file holds the used rows, and all others have their initial values.
      output_dim: numbers in a row.
      known: number of rows of an unbounded table from a file.
      seed_of_rows: seed of the initial rows, if the initializer has none; by default one for each layer.
      **others: as of `keras.layers.Embedding`.

    Raises `UserError` in a cluster, for features that need the whole table: a regularizer, a constraint, weights, LoRA; and
    without a cluster, when an unbounded table is built that is not from a file.
    """

    def __init__(self, input_dim, output_dim, known=None, seed_of_rows=None, **others):
        seed = tables.seed_on_ps()
        for name in ("embeddings_regularizer", "embeddings_constraint", "weights", "lora_rank", "quantization_config"):
            if seed is not None and others.get(name) is not None:
                raise UserError(f"the layer {others.get('name', 'Embedding')} has {name}, which {NEEDS_TABLE}")
        super().__init__(1 if input_dim is None else input_dim, output_dim, **others)
        self.is_on_ps, self.input_dim, self._known = seed is not None, input_dim, known
        self.seed, self.seed_of_rows = seed, seed_of_rows
        if self.is_on_ps and self.variable_dtype != "float32":
            hint = "leave its dtype out, or choose one whose variables are float32, such as mixed_bfloat16"
            raise UserError(f"{self.name} has rows of {self.variable_dtype}, but tables on the ps hold float32: {hint}")

    def build(self, input_shape=None):
        """Creates the table, unless it is on the ps."""
        if self.is_on_ps:
            self.built = True
        elif self.input_dim is not None:
            super().build(input_shape)
        elif self._known is None:
            hint = "train it in a cluster (rows appear on the ps), or fix the number"
            raise UserError(f"{self.name} has no fixed number of rows: {hint}")
        else:
            numbers = {"initializer": "zeros", "trainable": False}
            self._ids = self.add_weight(shape=[self._known], dtype="int64", name="ids", **numbers)
            self._embeddings = self.add_weight(shape=[self._known, self.output_dim], name="embeddings", **numbers)
            self.built = True

    def get_config(self):
        """Returns the arguments of `from_config`."""
        known = {} if self._known is None else {"known": self._known, "seed_of_rows": self.seed_of_rows}
        return super().get_config() | known

    def save_own_variables(self, store):
        """As `keras.layers.Embedding`."""
        if self.input_dim is None:
            store["0"], store["1"] = self._ids, self._embeddings
        else:
            super().save_own_variables(store)

    def load_own_variables(self, store):
        """As `keras.layers.Embedding`; a `UserError` if the table is on the ps."""
        if self.is_on_ps:
            hint = "give a function that makes the model, or use keras.layers.Embedding"
            raise UserError(f"{self.name} comes with a table, and in a cluster tables begin on the ps: {hint}")
        if self.input_dim is None:
            self._ids.assign(store["0"])
            self._embeddings.assign(store["1"])
        else:
            super().load_own_variables(store)

    def call(self, inputs):
        """Returns the rows `[..., output_dim]` of these ids."""
        if not self.is_on_ps and self.input_dim is not None:
            return super().call(inputs)
        if inputs.dtype.is_floating:  # such as converted bytes; a fraction becomes the invalid id −1
            self._check_exact(inputs.dtype)
            inputs = tf.where(tf.equal(inputs, tf.floor(inputs)), inputs, -tf.ones_like(inputs))
        if inputs.dtype not in (tf.int32, tf.int64):
            inputs = tf.cast(inputs, tf.int64)
        if not self.is_on_ps:
            return tf.cast(self._known_rows(inputs), self.compute_dtype)
        find = tables.finder()
        if find is None:  # a trial call of the model: any rows of the right shape
            shape = tf.concat([tf.shape(inputs), [self.output_dim]], axis=0)
            rows = tf.random.stateless_uniform(shape, [0, 0], -0.05, 0.05)
        else:
            rows = find(self, inputs)
        return tf.cast(rows, self.compute_dtype)

    def _check_exact(self, dtype):
        """Raises a `UserError` if this floating-point type cannot represent all ids, since ids would be mixed up."""
        exact = EXACT.get(dtype.name, 1)
        if (tables.IDS if self.input_dim is None else self.input_dim) > exact:
            hint = 'give the model an input of whole numbers, keras.Input(..., dtype="int64")'
            raise UserError(f"the ids of {self.name} come as {dtype.name}, which skips whole numbers above {exact:,}: {hint}")

    @property
    def embeddings(self):
        """The whole table, a variable `[input_dim, output_dim]`; a `UserError` if it is on the ps."""
        self._needs_table("its `embeddings`")
        return super().embeddings

    def enable_lora(self, *arguments, **others):
        """As `keras.layers.Embedding`; a `UserError` if the table is on the ps."""
        self._needs_table("LoRA")
        super().enable_lora(*arguments, **others)

    def quantize(self, *arguments, **others):
        """As `keras.layers.Embedding`; a `UserError` if the table is on the ps."""
        self._needs_table("quantization")
        super().quantize(*arguments, **others)

    def _needs_table(self, what):
        if self.is_on_ps:
            raise UserError(f"{self.name}: {what} {NEEDS_TABLE}")

    def _known_rows(self, ids):
        """Returns rows of an unbounded table from a file; missing rows have their initial values."""
        ids = tf.cast(ids, tf.int64)
        at = tf.minimum(tf.searchsorted(self._ids, tf.reshape(ids, [-1])), self._known - 1)
        at = tf.reshape(at, tf.shape(ids))
        missing = tf.where(tf.not_equal(tf.gather(self._ids.value, at), ids))
        (spec,) = tables.specs_of([self])
        first = first_rows(spec, place_of(tf.gather_nd(ids, missing)))
        return tf.tensor_scatter_nd_update(tf.gather(self._embeddings.value, at), missing, first)

    def fill(self, table):
        """Loads the whole table; the layer then becomes an ordinary layer with its own table.

        Args:
          table: an array `[input_dim, output_dim]`, which makes this a `keras.layers.Embedding`; for an unbounded table the
            sorted ids of the rows, int64 `[n]`, and the rows `[n, output_dim]`.
        """
        self.is_on_ps, self.built = False, False
        self._tracker.unlock()
        if self.input_dim is None:
            self._known = len(table[0])
        self.build()
        self._tracker.lock()
        if self.input_dim is None:
            self._ids.assign(table[0])
            self._embeddings.assign(table[1])
        else:
            self._embeddings.assign(table)
            self.__class__ = keras.layers.Embedding


# Not as a decorator: the API pages of the book are made with a stand-in for Keras.
keras.saving.register_keras_serializable(package="distributed_tensorflow")(Embedding)
