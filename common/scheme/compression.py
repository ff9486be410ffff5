"""Compression of vectors between a worker and the ps: packed by the sender, unpacked by the receiver."""

from typing import Any

import numpy as np

from common import tf
from common.core import UserError

BLOCK = 256  # maximum number of values with a common scale
BIASED = ("bf16", "sign", "topk")  # biased compressors need error feedback
SHARE = 0.01  # default share of values sent by "topk"; Lin et al. 2017 use 0.001

# BLOCK evenly spaced numbers in [0, 1), shuffled so that neighbours lie apart; see `_uniform`.
_PLACES = ((np.random.default_rng(0).permutation(BLOCK) + 0.5) / BLOCK).astype(np.float32)
_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") * 2.0 - 1.0


class Compression:
    """Compression of a run's messages by `--compress`, `--topk` and `--compress_pull`.

    Args:
      push: compression of pushes, one of `common.core.COMPRESSIONS`.
      pull: compression of pulls, one of `common.core.PULL_COMPRESSIONS`.
      topk: share of the values sent by "topk"; None for `SHARE`.
      seed: seed of the stochastic rounding.
    """

    def __init__(self, push="none", pull="none", topk=None, seed=0):
        self.push, self.pull, self.topk, self.seed = push, pull, SHARE if topk is None else topk, seed

    def __str__(self):
        way = f"topk of {self.topk:g}" if self.push == "topk" else self.push
        return ", ".join([*[f"{way} to the ps"] * (self.push != "none"), *[f"{self.pull} from the ps"] * (self.pull != "none")])


def compression_of(settings):
    """Returns the `Compression` of the flags, or None."""
    if settings.compress == settings.compress_pull == "none":
        return None
    return Compression(settings.compress, settings.compress_pull, settings.topk, settings.seed)


class Packed:
    """A compressed float32 vector.

    Args:
      tensors: the tensors of the message, a list.
      unpack: function of these tensors that returns the vector on the current device.
    """

    def __init__(self, tensors, unpack):
        self.tensors, self._unpack = tensors, unpack

    def unpacked(self):
        """Returns the vector, on the current device."""
        return self._unpack(*self.tensors)


class PackedPieces:
    """A vector with the scheme's own compression, see `GlobalParameters.sparse`.

    Attributes:
      parts: a `Packed` for each piece of x̃.
    """

    def __init__(self, parts):
        self.parts = parts

    def unpacked(self):
        """Returns the vector as received by the ps, on the current device."""
        pieces = [part.unpacked() for part in self.parts]
        return tf.concat(pieces, axis=0) if len(pieces) > 1 else pieces[0]


def pack(kind, vector, seed=None, share=SHARE):
    """Packs a vector v, float32 `[n]`, on the current device; returns it as `Packed`.

    For a block of at most 256 values, where s is the scale of the block and u uniform in [0, 1):

        bf16:        the upper half of each float32, rounded to nearest, ties to even.
        int8, int4:  q = ⌊v/s + u⌋ of b bits, s = max|v|/(2^(b−1) − 1). Stochastic rounding: the mean of q s is v (Alistarh et
                     al. 2017, https://arxiv.org/abs/1610.02132, there with the norm in place of the maximum).
        sign:        sign(v), that of 0 being −1, and s = mean|v| (Seide et al. 2014, Interspeech, "1-bit stochastic gradient
                     descent"; with this scale Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847, algorithm 1, there
                     one scale for all).
        topk:        the k = share × n values of largest |v|, at least one, and their indices, int32 (Lin et al. 2017,
                     https://arxiv.org/abs/1712.01887).

    A value that is not finite makes its whole block not finite when it is unpacked; with bf16 only itself, with topk all sent
    values. So a diverging training is noticed as without compression.

    Args:
      kind: one of these.
      vector: see above; n is static.
      seed: int64 `[2]`, for int8 and int4: equal seeds give equal u.
      share: share of sent values, for topk.
    """
    return {"bf16": _bf16, "int8": _int8, "int4": _int4, "sign": _sign, "topk": _topk}[kind](vector, seed, share)


def _bf16(vector, seed, share):
    return Packed([tf.cast(vector, tf.bfloat16)], lambda sent: tf.cast(sent, tf.float32))


def _int8(vector, seed, share):
    blocks, n = _blocks(vector)
    inverse, scale = _scales(blocks, 127)
    rounded = tf.floor(blocks * inverse + _uniform(blocks.shape, seed))
    # Rounding errors and u near 1 could yield 128.
    sent = tf.cast(tf.minimum(rounded, 127.0), tf.int8)
    return Packed([sent, scale], lambda sent, scale: _joined(tf.cast(sent, tf.float32) * scale, n))


def _int4(vector, seed, share):
    blocks, n = _blocks(vector)
    inverse, scale = _scales(blocks, 7)
    # From 0 to 15; the cast truncates.
    shifted = tf.cast(tf.minimum(blocks * inverse + (_uniform(blocks.shape, seed) + 8.0), 15.5), tf.uint8)
    pairs = tf.bitcast(tf.reshape(shifted, [-1, 2]), tf.uint16)
    sent = tf.cast((pairs | tf.bitwise.right_shift(pairs, _uint16(4))) & _uint16(0xFF), tf.uint8)

    def unpack(sent, scale):
        pairs = tf.cast(sent, tf.uint16)
        pairs = (pairs | tf.bitwise.left_shift(pairs, _uint16(4))) & _uint16(0x0F0F)
        values = tf.cast(tf.reshape(tf.bitcast(pairs, tf.uint8), blocks.shape), tf.float32)
        return _joined((values - 8.0) * scale, n)

    return Packed([sent, scale], unpack)


def _sign(vector, seed, share):
    blocks, n = _blocks(vector)
    counts = np.full([blocks.shape[0], 1], int(blocks.shape[1]), np.float32)
    counts[-1] -= blocks.shape.num_elements() - n
    scale = tf.reduce_sum(tf.abs(blocks), axis=1, keepdims=True) / counts
    # Eight bytes, 0 or 1, as one number: the multiplication gathers them as the bits of the highest byte.
    eights = tf.bitcast(tf.reshape(tf.cast(blocks > 0, tf.uint8), [-1, 8]), tf.uint64)
    sent = tf.cast(tf.bitwise.right_shift(eights * _uint64(0x0102040810204080), _uint64(56)), tf.uint8)

    def unpack(sent, scale):
        signs = tf.gather(tf.constant(_SIGNS, tf.float32), tf.cast(sent, tf.int32))
        return _joined(tf.reshape(signs, blocks.shape) * scale, n)

    return Packed([sent, scale], unpack)


def _topk(vector, seed, share):
    n = int(vector.shape[0])
    places = tf.math.top_k(tf.abs(vector), max(1, round(share * n)), sorted=False).indices
    # A value that is no number is not among the largest. TensorFlow would replace 0 × sum by 0.
    values = tf.where(tf.math.is_finite(tf.reduce_sum(vector)), tf.gather(vector, places), tf.fill(places.shape, np.nan))
    return Packed([places, values], lambda places, values: tf.scatter_nd(places[:, None], values, [n]))


def pack_sparse(vector, chunk_size, top, value_bits):
    """Packs the values of largest |v| in each chunk of a vector, float32 `[n]`, and their indices; returns it as `Packed`.

    The vector is cut into equal chunks of c ≤ chunk_size values, padded with zeros. Of each k = top × c / chunk_size
    values are sent, rounded, at least one. An index in a chunk takes ⌈log₂ c⌉ bits, none if k = c. A value takes
    b = value_bits: with 32 it is a float32; with 2 to 8 it is rounded as by the authors of SparseLoCo (Sarfi et al. 2025,
    https://arxiv.org/abs/2508.15706; `TopKCompressor` in https://github.com/tplr-ai/templar). With the mean m and the standard
    deviation σ of all values that are sent

        q = round((v − m)/s) + 2^(b−1), from 0 to 2^b − 1;  s = 6 σ/2^b;

    v arrives as the mean of the values with the same q. These means, 2^b of float32, are sent, too, all in one tensor of bytes.

    A value that is not finite makes all sent values not finite when they are unpacked.

    Raises:
      UserError: for numbers out of range.
    """
    if value_bits not in (*range(2, 9), 32) or not 1 <= top <= chunk_size <= 2**22:
        raise UserError(
            "a sparse message needs chunk_size <= 4,194,304, 1 <= top <= chunk_size, and value_bits of 2 to 8, or 32; not "
            f"chunk_size={chunk_size}, top={top}, value_bits={value_bits}"
        )
    n = int(vector.shape[0])
    count = -(-n // chunk_size)
    size = -(-n // count)
    kept = max(1, round(top * size / chunk_size))
    chunks = tf.reshape(tf.pad(vector, [[0, count * size - n]]), [count, size])
    if kept < size:
        place_bits = (size - 1).bit_length()
        places = tf.math.top_k(tf.abs(chunks), kept, sorted=False).indices
        values = tf.gather(chunks, places, batch_dims=1)
    else:
        place_bits, places, values = 0, tf.zeros([count, size], tf.int32), chunks
    q_bits = 0 if value_bits == 32 else value_bits
    q, floats = _to_levels(values, q_bits) if q_bits else (0, tf.reshape(values, [-1]))
    # A value that is no number is not among the largest. TensorFlow would replace 0 × sum by 0.
    floats = tf.where(tf.math.is_finite(tf.reduce_sum(vector)), floats, tf.fill(floats.shape, np.nan))
    numbers = _to_bytes(places * 2**q_bits + q, place_bits + q_bits)

    def unpack(sent):
        numbers_again = _from_bytes(sent[: numbers.shape[0]], place_bits + q_bits, [count, kept])
        floats = tf.bitcast(tf.reshape(sent[numbers.shape[0] :], [-1, 4]), tf.float32)
        values = tf.gather(floats, numbers_again % 2**q_bits) if q_bits else tf.reshape(floats, [count, kept])
        if place_bits:
            at = numbers_again // 2**q_bits + size * tf.range(count)[:, None]
            values = tf.scatter_nd(at[..., None], values, [count * size])
        return _joined(values, n)

    return Packed([tf.concat([numbers, tf.reshape(tf.bitcast(floats, tf.uint8), [-1])], axis=0)], unpack)


def _to_levels(values, bits):
    """Returns the q of values as int32 of the same shape, and the mean value of each q, float32 `[2^bits]`."""
    levels = 2**bits
    centered = values - tf.reduce_mean(values)
    deviation = tf.sqrt(tf.reduce_sum(centered**2) / max(1, values.shape.num_elements() - 1))
    scaled = tf.math.divide_no_nan(centered, deviation * (6 / levels))
    q = tf.cast(tf.clip_by_value(tf.round(scaled) + levels // 2, 0, levels - 1), tf.int32)
    return q, tf.math.unsorted_segment_mean(values, q, levels)


def _to_bytes(numbers, bits):
    """Packs whole numbers below 2^bits, int32, into consecutive bits, uint8 `[bytes]`."""
    found = tf.reshape(tf.bitwise.right_shift(numbers[..., None], np.arange(bits, dtype=np.int32)) & 1, [-1])
    eights = tf.reshape(tf.pad(found, [[0, -found.shape[0] % 8]]), [-1, 8])
    return tf.cast(tf.reduce_sum(eights * 2 ** np.arange(8, dtype=np.int32), axis=1), tf.uint8)


def _from_bytes(sent, bits, shape):
    """Inverts `_to_bytes`; returns the numbers, int32."""
    found = tf.reshape(tf.bitwise.right_shift(tf.cast(sent, tf.int32)[:, None], np.arange(8, dtype=np.int32)) & 1, [-1])
    numbers = tf.reshape(found[: bits * int(np.prod(shape))], [*shape, bits])
    return tf.reduce_sum(numbers * 2 ** np.arange(bits, dtype=np.int32), axis=-1)


def _blocks(vector):
    """Returns a vector as zero-padded blocks of equal size `[blocks, size]`, a multiple of 8; and n."""
    n = int(vector.shape[0])
    count = -(-n // BLOCK)
    size = -(-n // (8 * count)) * 8
    padding = count * size - n
    return tf.reshape(tf.pad(vector, [[0, padding]]) if padding else vector, [count, size]), n


def _joined(blocks, n):
    vector = tf.reshape(blocks, [-1])
    return vector[:n] if vector.shape[0] > n else vector


def _scales(blocks, most):
    """Returns 1/s, 0 for blocks of zeros, and s, for `most` levels on each side of 0: `[blocks, 1]` each."""
    largest = tf.reduce_max(tf.abs(blocks), axis=1, keepdims=True)  # not finite if one of them is not
    return tf.math.divide_no_nan(float(most), largest), largest / float(most)


def _uniform(shape, seed):
    """Returns numbers u in [0, 1), float32 `[blocks, size]`.

    Each u is uniform, and independent of those of other blocks or seeds, but a block has fixed numbers with a random shift
    modulo 1 (Cranley & Patterson 1976, SIAM J. Numer. Anal. 13). Rounding is unbiased if each u alone is uniform. A random
    number for each value takes four times as long, longer than all other operations: 8.1 ms instead of 1.8 for int8 and 1.4
    million values on one core.
    """
    turned = _PLACES[: int(shape[1])] + tf.random.stateless_uniform([int(shape[0]), 1], seed)
    return turned - tf.floor(turned)


def _uint16(number):
    return tf.constant(number, tf.uint16)


def _uint64(number):
    return tf.constant(number, tf.uint64)


class Packing:
    """Compresses the vectors of one message of a worker, called by `parts_of` for each; `keep` then updates the error feedback.

    Error feedback (Seide et al. 2014; Karimireddy et al. 2019): v = g + E, C(v) is sent, E ← v − C(v). E, a worker-local
    vector, is initially zero. Unbiased rounding needs no E. If the ps drop the message, E is unchanged.

    If x gives C(e) to x̃, x keeps the rest: x ← x + (e − C(e)) beside x ← x − e. So both change by the same C(e). The rest
    stays in x − x̃, the basis of the next e.

    Args:
      compression: a `Compression`.
      sizes: sizes of the pieces of x̃.
      worker: the `common.scheme.LocalParameters`.
      next_number: function that counts the sent vectors of a round.
      gives: whether x changes by −C(e) when x̃ changes by C(e).

    Attributes:
      packed: number of compressed vectors.
    """

    def __init__(self, compression, sizes, worker, next_number, gives=False):
        self._compression, self._sizes, self._worker, self._next_number = compression, sizes, worker, next_number
        self._gives, self.packed = gives, 0
        self._operations: list[Any] = []
        self._unsent: list[tuple[Any, Any, Any]] = []  # E, its value before, and after the message

    def __call__(self, vector):
        """Returns the parts of a vector, float32 `[size]`: a `Packed` for each piece."""
        compression, worker, number = self._compression, self._worker, self._next_number()
        self.packed += 1
        has_rest = compression.push in BIASED and not self._gives
        unsent = worker.vector(f"unsent_{number}", sum(self._sizes)) if has_rest else None
        before = unsent.read_value() if unsent is not None else None
        vector = vector if before is None else vector + before
        pieces = tf.split(vector, self._sizes) if len(self._sizes) > 1 else [tf.identity(vector)]
        seeds: list[Any] = [None] * len(pieces)
        if compression.push in ("int8", "int4"):
            count = worker.counter(f"packed_{number}")
            turn = count.assign_add(1)
            self._operations.append(turn.op)
            first = tf.cast(compression.seed + worker.index, tf.int64)
            seeds = [tf.stack([first, turn + (number * len(pieces) + i) * 2**40]) for i in range(len(pieces))]
        parts = [pack(compression.push, *each, compression.topk) for each in zip(pieces, seeds, strict=True)]
        if unsent is not None or self._gives:
            rest = [piece - part.unpacked() for piece, part in zip(pieces, parts, strict=True)]
            whole = tf.concat(rest, axis=0) if len(rest) > 1 else rest[0]
            if unsent is None:
                self._operations.append(worker.value.assign_add(whole, read_value=False))
            else:
                self._unsent.append((unsent, before, whole))
        return parts

    def keep(self, counts=None):
        """Returns the worker's operations that update the error feedback, a list.

        Args:
          counts: whether the ps accept the message, a boolean scalar; None if they never drop one.
        """
        kept = []
        for unsent, before, rest in self._unsent:
            value = rest if counts is None else tf.where_v2(counts, rest, before)
            kept.append(unsent.assign(value, read_value=False))
        return [*self._operations, *kept]


def read_packed(kind, value, i):
    """Packs piece i for a pull, on its ps. Equal values give equal messages to all workers."""
    seed = tf.stack([tf.cast(tf.bitcast(tf.reduce_sum(value), tf.int32), tf.int64), tf.constant(i, tf.int64)])
    return pack(kind, value, seed)
