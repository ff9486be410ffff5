"""What a scheme sends, cut into parts for the ps: a vector of any dtype, `tf.IndexedSlices`, a scalar, or a tuple of these."""

from common import tf
from common.flags import UserError


def parts_of(message, sizes):
    """Returns what of a message is for each piece of x̃, a list: parts of the same form.

    Args:
      message: a tensor `[size]`, of which each piece gets its part; `tf.IndexedSlices` of such a vector, of which each piece
        gets those that lie in it, with indices into it; a scalar, which all get; or a tuple of messages.
      sizes: of the pieces.

    Raises:
      UserError: if it is something else.
    """
    if isinstance(message, tuple):
        return list(zip(*(parts_of(each, sizes) for each in message), strict=True))
    if isinstance(message, tf.IndexedSlices):
        return _slices(message, sizes)
    message = tf.convert_to_tensor(message)
    if message.shape.rank == 0:
        return [tf.identity(message) for _ in sizes]
    if not message.shape.is_compatible_with([sum(sizes)]):
        raise UserError(
            f"a message is a vector [{sum(sizes)}], as the parameters are, tf.IndexedSlices of one, a scalar, or a tuple of "
            f"these, not {message.shape}"
        )
    return tf.split(message, sizes) if len(sizes) > 1 else [tf.identity(message)]


def _slices(message, sizes):
    if len(sizes) == 1:
        return [tf.IndexedSlices(tf.identity(message.values), tf.identity(message.indices))]
    parts, start = [], 0
    for size in sizes:
        own = (message.indices >= start) & (message.indices < start + size)
        values, indices = tf.boolean_mask(message.values, own), tf.boolean_mask(message.indices, own) - start
        parts.append(tf.IndexedSlices(values, indices))
        start += size
    return parts


def tensors_of(part):
    """Returns the tensors that a part of a message is made of, a list."""
    return tf.nest.flatten(part, expand_composites=True)


def arrived(part):
    """Returns a part of a message as it is on the present device."""
    return tf.nest.map_structure(tf.identity, part, expand_composites=True)


def gradient_of(part, at_ps, *more):
    """Returns the gradient that a ps makes of the part that has arrived: `at_ps(part, *more)`, or the part itself.

    Raises:
      UserError: if that is none.
    """
    gradient = at_ps(part, *more) if at_ps else part
    if not isinstance(gradient, (tf.Tensor, tf.IndexedSlices)) or gradient.dtype != tf.float32:
        what = f"of {gradient.dtype.name}" if isinstance(gradient, (tf.Tensor, tf.IndexedSlices)) else type(gradient).__name__
        by = "what `at_ps` returns is" if at_ps else "without `at_ps`, a message is"
        raise UserError(f"{by} the gradient that the optimizer gets: expected float32 values, not {what}")
    return gradient
