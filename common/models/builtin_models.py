"""Built-in models of `--model`: their layers, their numbers of parameters, and the data that fit them."""

import math

from common.core import UserError, limits
from common.data import arrays_in, chunks

BUILT_IN = ("linear", "mlp", "cnn", "cnn1d", "dense", "transformer")


def _layers(spec, outputs):
    """Returns the layers of a built-in model of samples that have one class, or one row of numbers, each."""
    from keras import layers

    found: list = []
    if spec in ("cnn", "cnn1d"):
        kinds = (layers.Conv2D, layers.MaxPooling2D) if spec == "cnn" else (layers.Conv1D, layers.MaxPooling1D)
        for filters in (16, 32):
            found += [kinds[0](filters, 3, padding="same", activation="relu"), kinds[1]()]
    found.append(layers.Flatten())
    if spec == "mlp":
        found += [layers.Dense(128, activation="relu") for _ in range(2)]
    return [*found, layers.Dense(outputs, use_bias=spec != "dense")]


def _count(spec, shape, outputs):
    """Returns the number of parameters of these layers, for samples of this shape."""
    inputs, hidden = math.prod(shape), []  # of the last layer; pairs (inputs, outputs) of those before it
    if spec == "mlp":
        inputs, hidden = 128, [(inputs, 128), (128, 128)]
    elif spec in ("cnn", "cnn1d"):
        *sizes, channels = shape
        kernel = 3 ** len(sizes)
        inputs, hidden = math.prod(size // 4 for size in sizes) * 32, [(kernel * channels, 16), (kernel * 16, 32)]
    return sum((n + 1) * m for n, m in hidden) + (inputs + (spec != "dense")) * outputs


def built_in(spec, data, sizes):
    """Returns the Keras model `spec`, one of `BUILT_IN`, for this data."""
    import keras

    if data.columns is not None:
        data = data._replace(x_train=data.columns.matrix(data.x_train), x_test=data.columns.matrix(data.x_test))
    _check_arrays(spec, data)
    shape = data.x_train.shape[1:]
    if _is_sequence(data) and spec in ("linear", "transformer"):
        return _of_sequences(spec, data, sizes)
    if spec == "transformer":
        if data.is_classification and data.x_train.shape == data.y_train.shape and data.num_classes == 2:
            raise UserError("--model=transformer: one-hot labels become class numbers by .argmax(axis=-1), one for each place")
        x, y = (f"{part.dtype} of shape {list(part.shape[1:])}" for part in (data.x_train, data.y_train))
        needs = "needs sequences of whole numbers, and a class for each of them, as --data=text has"
        raise UserError(f"--model=transformer {needs}: here a sample is {x}, its label {y}")
    outputs = data.num_classes if data.is_classification else math.prod(data.y_train.shape[1:])
    given, is_series = f"not samples of shape {list(shape)}", len(shape) == 2 and shape[0] >= 4
    if spec == "cnn" and (len(shape) != 3 or min(shape[:2]) < 4):
        series = "; --model=cnn1d takes series of shape [length, channels]" if is_series else ""
        raise UserError(f"--model=cnn needs images of shape [height, width, channels], {given}{series}")
    if spec == "cnn1d" and not is_series:
        raise UserError(f"--model=cnn1d needs series of shape [length, channels], of 4 places or more, {given}")
    classes = f"the labels are classes 0 to {data.num_classes - 1}, and " if data.is_classification else ""
    renumber = "; number them without gaps, as np.unique(y, return_inverse=True) does" if data.is_classification else ""
    _check_size(f"{classes}--model={spec}", _count(spec, shape, outputs), renumber)
    layers = _layers(spec, outputs)
    if not data.is_classification:
        layers.append(keras.layers.Reshape(data.y_train.shape[1:]))
    return keras.Sequential([keras.Input(shape), *layers])


def _is_sequence(data):
    """Whether samples are integer sequences with a class for each position: x and y `[n, length]`."""
    x, y = data.x_train, data.y_train
    if not data.is_classification or x.dtype.kind not in "iu" or x.shape != y.shape or len(x.shape) != 2 or x.shape[1] == 1:
        return False
    # One-hot labels may have that shape, too.
    return data.num_classes > 2 or any((chunk.sum(axis=1) != 1).any() for chunk in chunks(y))


def _of_sequences(spec, data, sizes):
    """Returns the Keras model `spec` with logits at each position; the linear model is a table of logits, one row per token."""
    import keras

    from common.models import transformer

    parts = data.x_train, data.x_test
    least, most = min(int(x.min()) for x in parts), max(int(x.max()) for x in parts)
    if least < 0:
        raise UserError(f"--model={spec}: the samples hold the number {least}, expected 0 or more")
    length, tokens, classes = data.x_train.shape[1], most + 1, data.num_classes
    is_linear = spec == "linear"
    count = tokens * classes if is_linear else transformer.size(length, tokens, classes, sizes["layers"], sizes["width"])
    of = "" if is_linear else "".join(f" --{name}={sizes[name]}" for name in ("layers", "width"))
    what = f"the samples are numbers 0 to {most}, the labels classes 0 to {classes - 1}, and --model={spec}{of}"
    hint = "; choose a smaller model, and number both without gaps, as np.unique(..., return_inverse=True) does"
    _check_size(what, count, hint)
    if is_linear:
        return keras.Sequential([keras.Input([length], dtype="int32"), keras.layers.Embedding(tokens, classes)])
    return transformer.build(length, tokens, classes, **sizes)


def _check_size(what, count, hint):
    """Raises a `UserError` if memory cannot hold a model of `count` parameters, before it is built.

    A worker holds at least four copies: the Keras variables, the initial values, x and the gradient.
    """
    need, has = 4 * 4 * count, limits.memory()
    if need > has:
        take = f"take at least {limits.as_bytes(need)} of memory, but the machine has {limits.as_bytes(has)}"
        raise UserError(f"{what} would have {count:,} parameters, which {take}{hint}")


def _check_arrays(spec, data):
    """Raises a `UserError` if samples or labels are several arrays, or labels have a shape that the built-in model rejects."""
    for name, part in (("x_train", data.x_train), ("y_train", data.y_train)):
        if isinstance(part, (dict, tuple)):
            raise UserError(f"--model={spec} takes one array of samples and one of labels; {name} is {len(arrays_in(part))}")
    if not data.is_classification or data.y_train.shape[1:] in ((), (1,)) or spec == "transformer":
        return
    if not _is_sequence(data):
        hint = ": one-hot labels become class numbers by .argmax(axis=-1); for others"
    elif spec != "linear":
        hint = ", one for each place of a sequence: choose --model=transformer or --model=linear, or"
    else:
        return
    gives = f"gives one class for a sample, but the labels have shape {list(data.y_train.shape[1:])}"
    raise UserError(f"--model={spec} {gives}{hint} bring a model of your own, --model=FILE.py:FUNCTION")
