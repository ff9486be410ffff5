"""A scheme's messages, sharded for the ps: a vector of any dtype, `tf.IndexedSlices`, a scalar, or a tuple of these."""

from common import tf
from common.core import UserError
from common.scheme.compression import Packed, PackedPieces


def parts_of(message, sizes, pack=None):
    """Shards a message: returns a list with one part of the same form per piece of x̃.

    Args:
      message: a tensor `[size]`, split by piece; `tf.IndexedSlices` of such a vector, split by piece with indices into the
        piece; a scalar, sent to all; or a tuple of messages.
      sizes: sizes of the pieces.
      pack: function that returns the parts of a float32 vector, in place of slices of it.

    Raises:
      UserError: for any other message.
    """
    if isinstance(message, tuple):
        return list(zip(*(parts_of(each, sizes, pack) for each in message), strict=True))
    if isinstance(message, PackedPieces):
        if pack is not None:
            raise UserError("--compress is for dense messages, but this scheme compresses its own: leave it out")
        return message.parts
    if isinstance(message, tf.IndexedSlices):
        return _slices(message, sizes)
    try:
        message, what = tf.convert_to_tensor(message), None
    except (TypeError, ValueError):
        what = type(message).__name__
    if what is None and message.shape.rank == 0:
        return [tf.identity(message) for _ in sizes]
    if what or not message.shape.is_compatible_with([sum(sizes)]):
        raise UserError(
            f"a message is a vector [{sum(sizes)}], as the parameters are, tf.IndexedSlices of one, a scalar, or a tuple of "
            f"these, not {what or message.shape}"
        )
    if pack is not None and message.dtype == tf.float32:
        return pack(message)
    return tf.split(message, sizes) if len(sizes) > 1 else [tf.identity(message)]


def _slices(message, sizes):
    if len(sizes) == 1:
        return [tf.IndexedSlices(tf.identity(message.values), tf.identity(message.indices))]
    parts, start = [], 0
    for i, size in enumerate(sizes):
        # An index out of range goes to the first or the last piece, where TensorFlow raises an error for it.
        own = (message.indices >= start) | (i == 0)
        own &= (message.indices < start + size) | (i == len(sizes) - 1)
        values, indices = tf.boolean_mask(message.values, own), tf.boolean_mask(message.indices, own) - start
        parts.append(tf.IndexedSlices(values, indices))
        start += size
    return parts


def tensors_of(part):
    """Returns the tensors of a message part, a list."""
    found = tf.nest.flatten(part, expand_composites=True)
    return [tensor for each in found for tensor in (each.tensors if isinstance(each, Packed) else [each])]


def arrived(part):
    """Returns a message part, unpacked, on the current device."""

    def here(each):
        return each.unpacked() if isinstance(each, Packed) else tf.identity(each)

    return tf.nest.map_structure(here, part, expand_composites=True)


class AtUpdate:
    """Values on a ps at the time of the update, for one piece of x̃: the argument of functions that run there.

    Args:
      center: the `common.scheme.GlobalParameters`.
      i: number of the piece.
      pulled, staleness, step: see below; the global step before the update.

    Attributes:
      size: of the piece.
      value: this piece of x̃, a tensor `[size of the piece]`.
      pulled: the same at this worker's last pull; with `center.exact(local, "value")`.
      staleness: float32 scalar, updates by others since this worker's pull; with `center.exact(local, "step")`.
      number: int64 scalar, the number of this update, from 1 on, the same on all ps; with `center.exact(local, "step")`.

    Raises:
      UserError: on access to an unavailable attribute.
    """

    def __init__(self, center, i, pulled=None, staleness=None, step=None):
        self._center, self._i, self._pulled, self._staleness, self._step = center, i, pulled, staleness, step

    @property
    def is_of_table(self):
        """Whether this is a piece of a table, not of the vector x̃, so that rows arrive."""
        return self._i >= len(self._center.sizes)

    def _piece(self, name):
        if self.is_of_table:
            raise UserError(f"rows of a table (common.Embedding) have no at_update.{name}: a scheme with it cannot have tables")
        return self._i

    @property
    def size(self):
        return self._center.sizes[self._piece("size")]

    def slot(self, name):
        """Returns this piece of a global slot vector, a variable, see `GlobalParameters.slot`."""
        return self._center.slot(name)[self._piece("slot")]

    @property
    def value(self):
        return self._center.pieces[self._piece("value")].read_value()

    @property
    def pulled(self):
        return self._only(self._pulled, "pulled", "value")

    @property
    def staleness(self):
        return self._only(self._staleness, "staleness", "step")

    @property
    def number(self):
        return self._only(self._step, "number", "step") + 1

    def _only(self, value, name, remember):
        if value is None:
            raise UserError(f'only the push of `center.exact(local, "{remember}")` knows at_update.{name}')
        return value


def gradient_of(part, at_ps, at_update, name="at_ps"):
    """Returns the gradient on a ps from an arrived message part: `at_ps(part, at_update)`, or the part itself.

    Raises:
      UserError: if the result is not a gradient of the piece.
    """
    if at_update.is_of_table:
        values = at_ps(part.values, at_update) if at_ps else part.values
        return tf.IndexedSlices(values, part.indices)
    gradient = at_ps(part, at_update) if at_ps else part
    if hasattr(gradient, "read_value"):  # such as the result of `slot.assign(...)`
        gradient = gradient.read_value()
    by = f"`{name}` must return" if at_ps else "without `at_ps`, a message is"
    if not isinstance(gradient, (tf.Tensor, tf.IndexedSlices)) or gradient.dtype != tf.float32:
        what = f"of {gradient.dtype.name}" if isinstance(gradient, (tf.Tensor, tf.IndexedSlices)) else type(gradient).__name__
        raise UserError(f"{by} the gradient that the optimizer gets: expected float32 values, not {what}")
    if isinstance(gradient, tf.Tensor) and not gradient.shape.is_compatible_with([at_update.size]):
        raise UserError(f"{by} the gradient of a piece of x̃: expected shape [{at_update.size}], not {gradient.shape}")
    return gradient
