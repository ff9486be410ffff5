"""Keras models of many kinds under five schemes: `python tests/keras_models.py` writes the table of README.md, in this folder.

Each function that is decorated with `model` is a row: it gives a model, or one that no scheme can train, with the line that
says so. A row is trained in one process for some steps by each scheme, as `--model=FILE.py:FUNCTION` is, and `model.keras` is
loaded and evaluated by Keras itself. tests/test_keras_models.py does the same, and compares.
"""

import concurrent.futures
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from common.cli import schemes
from common.core import flags, plots
from common.data import datasets
from common.training import loop, model_and_data, run_check

ROOT = Path(__file__).resolve().parents[1]
README = Path(__file__).with_name("README.md")
SCHEMES = {  # folder/script: flags beside the defaults of the script
    "HogWild/hogwild": ["--learning_rate=0.05"],
    "DOWNPOUR/downpour": ["--learning_rate=0.05", "--window=3"],
    "AEASGD/aeasgd": ["--learning_rate=0.05", "--window=3"],
    "Synchronous-SGD/synchronous_sgd": ["--learning_rate=0.1"],
    "DiLoCo/diloco": ["--local_learning_rate=0.01", "--window=3"],
}
ALL = len(SCHEMES)
LOCAL_STEPS = 18


class Row(NamedTuple):
    """A model: the function that makes it, the one that makes its samples, and a part of the line that refuses it, or None."""

    build: Any
    data: Any
    refused: str | None
    schemes: Any
    custom_objects: Any

    @property
    def text(self):
        """A description: the docstring of the function that makes it."""
        return self.build.__doc__.strip().rstrip(".")


MODELS: dict[str, Row] = {}


def model(samples, refused=None, schemes=tuple(SCHEMES), custom_objects=dict):
    """Makes a row of a function that returns a Keras model.

    Args:
      samples: function of (number, generator of random numbers) that returns (x, y) or (x, y, weights).
      refused: a part of the line that says that no scheme trains it.
      schemes: which of the schemes train it.
      custom_objects: function that returns what `keras.models.load_model` is to know.
    """

    def decorate(build):
        def data():
            rng = np.random.default_rng(0)
            return samples(48, rng), samples(24, np.random.default_rng(1))

        MODELS[build.__name__] = Row(build, data, refused, schemes, custom_objects)
        globals()[f"data_of_{build.__name__}"] = data
        return build

    return decorate


import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras import layers, ops  # noqa: E402

CROSS_ENTROPY = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)


def classes(*shape, count=3):
    """Returns a function that makes samples of a class each: a pattern of the class, and noise."""

    def samples(n, rng):
        y = np.arange(n) % count
        patterns = np.random.default_rng(9).normal(size=[count, *shape])
        return (patterns[y] + rng.normal(0, 0.3, [n, *shape])).astype(np.float32), y

    return samples


def numbers(n, rng):
    """Samples of four numbers, and a sum of them."""
    x = rng.normal(size=[n, 4]).astype(np.float32)
    return x, x @ np.array([[1], [-1], [0.5], [2]], np.float32)


def words(n, rng):
    """Sentences of eight words, numbers below 10, and which of two kinds they are."""
    y = np.arange(n) % 2
    return rng.integers(1, 5, [n, 8]) + 5 * y[:, None], y


def next_words(n, rng):
    """Sentences of eight words, and the next word of each."""
    text = (rng.integers(0, 10, [n, 1]) + np.arange(9)) % 10
    return text[:, :-1], text[:, 1:]


def compiled(model, loss=None, **settings):
    model.compile("sgd", CROSS_ENTROPY() if loss is None else loss, **{"metrics": ["accuracy"], **settings})
    return model


def stack(shape, *others):
    return keras.Sequential([keras.Input(shape), *others])


# --- Images ------------------------------------------------------------------------------------------------------------

images = classes(8, 8, 3)


@model(classes(6))
def without_input():
    """`Sequential` without an `Input`, not compiled: built when it is first called"""
    return keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(3)])


@model(images)
def batch_normalization():
    """Convolutions, batch normalization, pooling"""
    block = [layers.Conv2D(8, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D()]
    return compiled(stack([8, 8, 3], *block, layers.Flatten(), layers.Dense(3)))


@model(images)
def residual():
    """A residual network"""
    inputs = keras.Input([8, 8, 3])
    x = layers.Conv2D(8, 3, padding="same")(layers.Rescaling(1.0)(inputs))
    for _ in range(2):
        y = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", use_bias=False)(x)))
        x = layers.Add()([x, y])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


@model(images)
def depthwise():
    """Depthwise and separable convolutions"""
    return stack(
        [8, 8, 3], layers.DepthwiseConv2D(3), layers.SeparableConv2D(8, 3, activation="relu"), layers.Flatten(), layers.Dense(3)
    )


@model(classes(4, 4, 4, 1))
def three_dimensions():
    """Convolutions in three dimensions"""
    return stack([4, 4, 4, 1], layers.Conv3D(4, 2, activation="relu"), layers.Flatten(), layers.Dense(3))


@model(classes(4, 6, 6, 1))
def convolutional_lstm():
    """`ConvLSTM2D`, and a convolution that is distributed over time"""
    convolution = layers.TimeDistributed(layers.Conv2D(2, 3))
    return stack([4, 6, 6, 1], convolution, layers.ConvLSTM2D(2, 2), layers.Flatten(), layers.Dense(3))


@model(images)
def augmentation():
    """Augmentation with seeds: crops, flips, rotations, contrast"""
    first = [layers.RandomCrop(7, 7, seed=1), layers.RandomFlip("horizontal", seed=2), layers.RandomRotation(0.05, seed=3)]
    last = [layers.RandomContrast(0.1, (-5, 5), seed=4), layers.Conv2D(8, 3), layers.GlobalMaxPooling2D(), layers.Dense(3)]
    return compiled(stack([8, 8, 3], *first, *last))


def masks(n, rng):
    x, _ = images(n, rng)
    return x, (x.sum(axis=-1) > 0).astype(np.int32)


@model(masks)
def segmentation():
    """Segmentation: a class for each pixel, `UNet`-like"""
    inputs = keras.Input([8, 8, 3])
    fine = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    coarse = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(fine)
    x = layers.Concatenate()([fine, layers.Conv2DTranspose(8, 2, strides=2)(coarse)])
    return keras.Model(inputs, layers.Conv2D(2, 1)(x))


@model(images)
def autoencoder():
    """A variational autoencoder: `add_loss` in a layer, sampling with a seed, no labels in the loss"""
    inputs = keras.Input([8, 8, 3])
    mean, deviation = layers.Dense(2)(layers.Flatten()(inputs)), layers.Dense(2)(layers.Flatten()(inputs))
    code = Sampling()([mean, deviation])
    picture = layers.Reshape([8, 8, 3])(layers.Dense(192)(code))
    return keras.Model(inputs, Reconstruction()([inputs, picture]))


@keras.saving.register_keras_serializable("keras_models")
class Sampling(layers.Layer):
    """Draws a code, and adds its divergence to the loss."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, inputs, training=False):
        mean, deviation = inputs
        self.add_loss(-0.01 * ops.mean(1 + deviation - ops.square(mean) - ops.exp(deviation)))
        if not training:
            return mean
        return mean + ops.exp(deviation / 2) * keras.random.normal(ops.shape(mean), seed=self.seeds)


@keras.saving.register_keras_serializable("keras_models")
class Reconstruction(layers.Layer):
    """Adds to the loss how far the picture is from the one before; gives three logits."""

    def call(self, inputs):
        before, after = inputs
        self.add_loss(ops.mean(ops.square(before - after)))
        return ops.mean(after, axis=[1, 2])


def application(name, **settings):
    """Returns a network of keras.applications for small images."""
    network = getattr(keras.applications, name)
    return compiled(network(weights=None, input_shape=(32, 32, 3), classes=3, classifier_activation=None, **settings))


large_images = classes(32, 32, 3)


@model(large_images, schemes=("HogWild/hogwild",))
def resnet50():
    """`ResNet50` of keras.applications, without weights"""
    return application("ResNet50")


@model(large_images, schemes=("AEASGD/aeasgd",))
def mobilenet():
    """`MobileNetV2` of keras.applications, without weights"""
    return application("MobileNetV2", alpha=0.35)


@model(large_images, schemes=("DiLoCo/diloco",))
def efficientnet():
    """`EfficientNetB0` of keras.applications, without weights: squeeze and excitation, swish, scaling of its inputs"""
    return application("EfficientNetB0")


# --- Sequences ---------------------------------------------------------------------------------------------------------


@model(classes(6, 3))
def lstm():
    """LSTM, with dropout of the recurrence"""
    return stack([6, 3], layers.LSTM(6, recurrent_dropout=0.1, seed=1), layers.Dense(3))


@model(classes(6, 3))
def gru():
    """GRU, two of them"""
    return compiled(stack([6, 3], layers.GRU(6, return_sequences=True), layers.GRU(6), layers.Dense(3)))


@model(words)
def bidirectional():
    """Embeddings with a mask, a bidirectional LSTM"""
    return compiled(
        keras.Sequential([layers.Embedding(10, 4, mask_zero=True), layers.Bidirectional(layers.LSTM(4)), layers.Dense(2)])
    )


@model(classes(6, 3))
def one_dimension():
    """Convolutions in one dimension, causal and dilated"""
    wave = layers.Conv1D(6, 2, padding="causal", dilation_rate=2, activation="gelu")
    return stack([6, 3], wave, layers.GlobalMaxPooling1D(), layers.Dense(3))


@model(words)
def attention():
    """Multi-head attention"""
    inputs = keras.Input([8], dtype="int32")
    x = layers.Embedding(10, 8)(inputs)
    x = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=1)(x, x)
    return compiled(keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x))))


@model(next_words)
def transformer():
    """A causal transformer block, a word for each place; labels `[batch, time]`"""
    inputs = keras.Input([8], dtype="int32")
    x = layers.Embedding(10, 8)(inputs) + Positions()(inputs)
    x = x + layers.MultiHeadAttention(2, 4)(*[layers.LayerNormalization()(x)] * 2, use_causal_mask=True)
    x = x + layers.Dense(8)(layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x)))
    return compiled(keras.Model(inputs, layers.Dense(10)(x)))


@keras.saving.register_keras_serializable("keras_models")
class Positions(layers.Layer):
    """A vector for each place, a custom layer that is registered."""

    def build(self, shape):
        self.table = self.add_weight(shape=(shape[1], 8), initializer="random_normal")

    def call(self, inputs):
        return self.table


@model(next_words)
def tied_embeddings():
    """An embedding that also gives the logits (`ReversibleEmbedding`)"""
    inputs, embedding = keras.Input([8], dtype="int32"), layers.ReversibleEmbedding(10, 8)
    return keras.Model(inputs, embedding(layers.GRU(8, return_sequences=True)(embedding(inputs)), reverse=True))


def spoken(n, rng):
    x = rng.normal(size=[n, 12, 4]).astype(np.float32)
    return x, np.tile([1, 2, 3], [n, 1]).astype(np.int32)


@model(spoken)
def connectionist():
    """Sequences without alignment: the CTC loss"""
    return compiled(stack([12, 4], layers.GRU(6, return_sequences=True), layers.Dense(5)), keras.losses.CTC(), metrics=[])


# --- Layers and variables ----------------------------------------------------------------------------------------------


@model(classes(6))
def dropouts():
    """`Dropout`, `AlphaDropout`, `SpatialDropout1D`"""
    first = [layers.Reshape([3, 2]), layers.SpatialDropout1D(0.1, seed=1), layers.Flatten(), layers.Dropout(0.1, seed=2)]
    return stack([6], *first, layers.Dense(8, activation="selu"), layers.AlphaDropout(0.1, seed=3), layers.Dense(3))


@model(classes(6))
def noise():
    """`GaussianNoise`, `GaussianDropout`, without seeds of their own"""
    first = layers.GaussianNoise(0.1), layers.Dense(8, activation="relu")
    return stack([6], *first, layers.GaussianDropout(0.1), layers.Dense(3))


@model(classes(6))
def normalizations():
    """Layer, group, unit and root-mean-square normalization"""
    of_all = [layers.LayerNormalization(), layers.GroupNormalization(2), layers.RMSNormalization(), layers.UnitNormalization()]
    return stack([6], *[each for norm in of_all for each in (layers.Dense(8), norm)], layers.Dense(3))


@model(classes(6))
def spectral_normalization():
    """`SpectralNormalization`, which keeps a vector as state"""
    return stack([6], layers.SpectralNormalization(layers.Dense(8, activation="relu")), layers.Dense(3))


def adapted():
    layer = layers.Normalization()
    layer.adapt(classes(6)(48, np.random.default_rng(0))[0])
    return layer


@model(classes(6))
def normalization():
    """`Normalization`, adapted to the samples"""
    return stack([6], adapted(), layers.Dense(3))


@model(classes(6))
def regularizers():
    """Regularizers of weights, biases and activity"""
    one = layers.Dense(8, kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer=keras.regularizers.L2(1e-3))
    return stack([6], one, layers.Dense(3, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(1e-3)))


@model(images)
def frozen():
    """Transfer learning: frozen convolutions with batch normalization, a new head"""
    body = stack([8, 8, 3], layers.Conv2D(8, 3), layers.BatchNormalization(), layers.GlobalAveragePooling2D())
    body.trainable = False
    return compiled(stack([8, 8, 3], body, layers.Dense(3)))


@model(classes(6))
def low_rank():
    """LoRA: a dense layer that is frozen, and a product of two small matrices"""
    net = stack([6], layers.Dense(8, activation="relu"), layers.Dense(3))
    net.layers[0].enable_lora(2)
    return net


@model(classes(6))
def mixed_bfloat16():
    """Mixed precision, `mixed_bfloat16`"""
    policy = "mixed_bfloat16"
    return compiled(stack([6], layers.Dense(8, activation="relu", dtype=policy), layers.Dense(3, dtype=policy)))


@model(classes(6))
def counter():
    """State of int64, which counts batches"""
    return stack([6], Counter(), layers.Dense(3))


@keras.saving.register_keras_serializable("keras_models")
class Counter(layers.Layer):
    """Counts, in 64 bits."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1)
        return inputs


class Scale(layers.Layer):
    """A custom layer that nobody has registered."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, inputs):
        return inputs * self.scale


@model(classes(6), custom_objects=lambda: {"Scale": Scale})
def custom_layer():
    """A custom layer that is not registered; `load_model` takes it by `custom_objects`"""
    return stack([6], Scale(), layers.Dense(3))


@model(classes(6))
def lambda_layer():
    """`Lambda` layers; `load_model` takes them by `safe_mode=False`"""
    return stack([6], layers.Lambda(lambda x: x * abs(x)), layers.Dense(3))


@model(classes(6))
def einsum():
    """`EinsumDense`, and a gate: a product of two branches"""
    inputs = keras.Input([6])
    x = layers.EinsumDense("ab,bcd->acd", [4, 2])(inputs)
    gate = layers.Dense(2, activation="sigmoid")(inputs)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(layers.Multiply()([x, layers.RepeatVector(4)(gate)]))))


@keras.saving.register_keras_serializable("keras_models")
class Rounded(layers.Layer):
    """Rounds to quarters, and hands the gradient on as if it did not."""

    def call(self, inputs):
        return straight_through(inputs)


@ops.custom_gradient
def straight_through(x):
    """Returns x, rounded to quarters, and its gradient, that of x."""

    def gradient(*args, upstream=None):
        return args[0] if upstream is None else upstream

    return ops.round(4 * x) / 4, gradient


@model(classes(6))
def own_gradient():
    """A gradient of one's own, `keras.ops.custom_gradient`: what is rounded has the gradient of what is not"""
    return stack([6], layers.Dense(8), Rounded(), layers.Dense(3))


@model(classes(6))
def unused():
    """A layer whose variables the outputs do not depend on"""
    return Unused()


@keras.saving.register_keras_serializable("keras_models")
class Unused(keras.Model):
    """Builds two layers, and takes one."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.used, self.other = layers.Dense(3), layers.Dense(5)

    def call(self, inputs):
        self.other(inputs)
        return self.used(inputs)


# --- Structure ---------------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("keras_models")
class Plain(keras.Model):
    """As Keras's first example of subclassing."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.first, self.second = layers.Dense(8, activation="relu"), layers.Dense(3)

    def call(self, inputs):
        return self.second(self.first(inputs))


@model(classes(6))
def subclassed():
    """A subclass whose `call` takes no `training`"""
    return Plain()


@keras.saving.register_keras_serializable("keras_models")
class WithTraining(Plain):
    """With Dropout when it is trained."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.dropout = layers.Dropout(0.1)

    def call(self, inputs, training=False):
        return self.second(self.dropout(self.first(inputs), training=training))


@model(classes(6))
def subclassed_with_training():
    """A subclass whose `call` takes `training`, compiled, with metrics"""
    return compiled(WithTraining())


@model(classes(6))
def nested():
    """A model in a model in a model"""
    inner = keras.Sequential([layers.Dense(8), layers.BatchNormalization()])
    inputs = keras.Input([6])
    return compiled(keras.Sequential([keras.Model(inputs, inner(inputs)), Plain()]))


def pairs(n, rng):
    x, y = classes(6, count=2)(n, rng)
    others, _ = classes(6, count=2)(n, rng)
    return (x, np.where(rng.integers(0, 2, [n, 1]), others, np.roll(others, 1, axis=0))), y


@model(pairs)
def shared():
    """Two inputs in a list, layers that both share (siamese)"""
    left, right = keras.Input([6]), keras.Input([6])
    body = layers.Dense(4, activation="tanh")
    return compiled(keras.Model([left, right], layers.Dense(2)(layers.Subtract()([body(left), body(right)]))))


def of_two_kinds(n, rng):
    x, y = classes(6)(n, rng)
    return {"left": x[:, :4], "right": x[:, 4:]}, {"kind": y, "size": x.sum(axis=1, keepdims=True)}


@model(of_two_kinds)
def dicts():
    """Inputs in a dict, outputs in a dict, each with a loss of its weight (`loss_weights`)"""
    inputs = {name: keras.Input([size], name=name) for name, size in (("left", 4), ("right", 2))}
    x = layers.Concatenate()(list(inputs.values()))
    outputs = {"kind": layers.Dense(3, name="kind")(x), "size": layers.Dense(1, name="size")(x)}
    return compiled(
        keras.Model(inputs, outputs),
        {"kind": CROSS_ENTROPY(), "size": "huber"},
        loss_weights={"kind": 1.0, "size": 0.2},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )


def of_a_list(n, rng):
    x, y = classes(6)(n, rng)
    return x, (y, x[:, :2])


@model(of_a_list)
def lists():
    """Outputs in a list, with a loss each"""
    inputs = keras.Input([6])
    outputs = [layers.Dense(3, name="kind")(inputs), layers.Dense(2, name="place")(inputs)]
    return compiled(keras.Model(inputs, outputs), [CROSS_ENTROPY(), "mae"], metrics=[["accuracy"], ["mse"]])


def in_depth(n, rng):
    x, y = classes(6)(n, rng)
    return {"both": (x[:, :3], x[:, 3:]), "again": x}, y


@model(in_depth)
def nested_inputs():
    """Inputs in a tuple in a dict"""
    return compiled(InDepth())


@keras.saving.register_keras_serializable("keras_models")
class InDepth(Plain):
    """Takes arrays in a tuple in a dict."""

    def call(self, inputs):
        return super().call(ops.concatenate([*inputs["both"], inputs["again"]], axis=-1))


# --- Losses, labels, metrics -------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("keras_models")
class OwnLoss(Plain):
    """Computes its loss, and a number of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)) + sum(self.losses)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "largest: of all": ops.max(y_pred)}


@model(classes(6))
def own_compute_loss():
    """`compute_loss` and `compute_metrics` of its own"""
    return OwnLoss()


@model(classes(6))
def softmax():
    """Softmax at the end, compiled with the loss of probabilities, and several metrics"""
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")]
    return compiled(stack([6], layers.Dense(3, activation="softmax")), "sparse_categorical_crossentropy", metrics=metrics)


@model(lambda n, rng: (classes(6)(n, rng)[0], np.eye(3, dtype=np.float32)[np.arange(n) % 3]))
def one_hot():
    """One-hot labels, smoothed"""
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return compiled(stack([6], layers.Dense(3)), loss, metrics=["categorical_accuracy"])


@model(lambda n, rng: classes(6, count=2)(n, rng))
def binary():
    """Two classes, one sigmoid, area under the curve"""
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    return compiled(stack([6], layers.Dense(1, activation="sigmoid")), "binary_crossentropy", metrics=metrics)


@model(lambda n, rng: ((x := rng.normal(size=[n, 4]).astype(np.float32)), (x[:, :3] > 0).astype(np.float32)))
def several_labels():
    """Several labels of a sample, zeros and ones; precision and recall"""
    loss, metrics = keras.losses.BinaryCrossentropy(from_logits=True), [keras.metrics.Precision(0.0), keras.metrics.Recall(0.0)]
    return compiled(stack([4], layers.Dense(3)), loss, metrics=metrics)


@model(numbers)
def regression():
    """Regression with the Huber loss; root of the mean squared error, R²"""
    metrics = [keras.metrics.RootMeanSquaredError(name="rms"), keras.metrics.R2Score()]
    return compiled(stack([4], layers.Dense(1)), keras.losses.Huber(), metrics=metrics)


@model(numbers)
def quantiles():
    """A loss that is a function of one's own: quantiles"""
    return compiled(stack([4], layers.Dense(3)), pinball, metrics=["mae"])


@keras.saving.register_keras_serializable("keras_models")
def masked(y, predicted):
    """The cross-entropy of the labels that are not 0."""
    counts = ops.cast(y != 0, "float32")
    return ops.sum(counts * keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True)) / ops.sum(counts)


@model(next_words)
def masked_loss():
    """A loss that compares tensors, `y != 0`: labels of 0 do not count"""
    return compiled(keras.Sequential([layers.Embedding(10, 8), layers.Dense(10)]), masked, metrics=[])


@keras.saving.register_keras_serializable("keras_models")
def pinball(y, predicted):
    """The loss of the quantiles 0.1, 0.5 and 0.9."""
    share, error = ops.convert_to_tensor([0.1, 0.5, 0.9]), y - predicted
    return ops.mean(ops.maximum(share * error, (share - 1) * error), axis=-1)


@model(lambda n, rng: (*classes(6)(n, rng), (np.arange(n) % 3 == 0) + 0.5))
def sample_weights():
    """Weights of samples"""
    return compiled(stack([6], layers.Dense(3)), metrics=[], weighted_metrics=["accuracy"])


@model(lambda n, rng: (classes(6)(n, rng)[0], np.arange(n) % 3 == 0))
def imbalanced():
    """Classes of unequal size: a focal loss with weights of the classes"""
    loss = keras.losses.BinaryFocalCrossentropy(apply_class_balancing=True, from_logits=True)
    return compiled(stack([6], layers.Dense(1)), loss, metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)])


# --- What no scheme trains ---------------------------------------------------------------------------------------------


@model(classes(6), refused="dense/kernel has the constraint MaxNorm, which no update on the ps would keep")
def constraint():
    """A constraint of weights"""
    return stack([6], layers.Dense(3, kernel_constraint="max_norm", name="dense"))


@model(classes(6), refused="dense computes in float16, where small gradients become 0")
def mixed_float16():
    """Mixed precision, `mixed_float16`"""
    return stack([6], layers.Dense(3, dtype="mixed_float16", name="dense"))


@model(classes(6), refused="has trainable variables of type float64, expected float32")
def float64():
    """Variables of float64"""
    return stack([6], layers.Dense(3, dtype="float64"))


@model(classes(6), refused="has no trainable variables")
def nothing_to_train():
    """All layers frozen"""
    net = stack([6], layers.Dense(3))
    net.trainable = False
    return net


@model(classes(6, 3), refused="gru is stateful: it would continue from the previous batch")
def stateful():
    """A stateful recurrent layer"""
    return keras.Sequential([layers.GRU(4, stateful=True, name="gru"), layers.Dense(3)])


@model(classes(6), refused="ends with softmax, but the loss takes logits")
def softmax_uncompiled():
    """Softmax at the end, not compiled"""
    return stack([6], layers.Dense(3, activation="softmax"))


class Unseeded(layers.Layer):
    """Draws from Keras's own generator."""

    def call(self, inputs):
        return inputs + keras.random.normal(ops.shape(inputs))


@model(classes(6), refused="cannot be a part of a graph: it needs a variable or table other than its layers'")
def unseeded():
    """`keras.random` without a `SeedGenerator`"""
    return stack([6], Unseeded(), layers.Dense(3))


@keras.saving.register_keras_serializable("keras_models")
class OwnStep(keras.Sequential):
    """Has a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class OwnTest(keras.Sequential):
    """Has an evaluation of its own."""

    def test_step(self, data):
        return {}


@model(classes(6), refused="a custom gradient of a function with variables or keyword arguments")
def rematerialized():
    """Layers that are computed again for the gradient, `RematScope`"""
    with keras.RematScope(mode="full"):
        return stack([6], layers.Dense(8, "relu"), layers.Dense(3))


@model(classes(6))
def own_train_step():
    """A `train_step` of its own, as a GAN has"""
    return compiled(OwnStep([keras.Input([6]), layers.Dense(3)]), metrics=[])


@model(classes(6), refused="has a test_step of its own, which no worker calls")
def own_test_step():
    """A `test_step` of its own"""
    return OwnTest([layers.Dense(3)])


@model(classes(6), refused="cannot be a part of a graph")
def needs_python():
    """A layer that needs the values in Python"""
    return keras.Sequential([layers.Lambda(lambda x: x * float(ops.sum(x))), layers.Dense(3)])


# --- Training, and the table -------------------------------------------------------------------------------------------


def train(name, path, folder):
    """Trains a row by a scheme, in this process, as `python SCHEME.py --model=FILE.py:FUNCTION` does.

    Returns:
      Loss at the first evaluation, the metrics of the test set, as the run's files say, {name: number}, and whether the
      parameters have changed.
    """
    row = MODELS[name]
    scheme = schemes.scheme_in(ROOT / f"{path}.py")
    window = next((int(flag.partition("=")[2]) for flag in SCHEMES[path] if "--window" in flag), 1)
    steps = (LOCAL_STEPS if len(row.schemes) > 1 else LOCAL_STEPS // 3) // window
    given = [*SCHEMES[path], "--batch_size=12", f"--steps={steps}", "--rounds_per_call=1"]
    spec = f"--model={__file__}:{name}", f"--data={__file__}:data_of_{name}"
    settings = flags.parse(scheme.flag_values(), [*given, *spec, f"--run_dir={folder}"], f"{Path(path).name}.py")
    settings = settings.but(run=scheme.facts(path.partition("/")[0], 1), num_ps=0, num_workers=1)
    for part in ("checkpoints", "metrics", "logs"):
        Path(folder, part).mkdir(parents=True)
    if path == row.schemes[0]:
        run_check.check(settings, datasets.load(settings.data, settings.seed))
    built = []

    def build_model(*arguments, **options):
        built.append(model_and_data.build_model(*arguments, **options))
        return built[-1]

    with mock.patch.object(loop, "build_model", build_model):
        assert loop.train(scheme.function, None, settings) == 0
    after = np.concatenate([v.numpy().ravel() for v in built[0].keras_model.trainable_variables])  # as saved
    lines = [json.loads(line) for line in Path(folder, "metrics", "worker-0.jsonl").read_text().splitlines()]
    before = next(line["test_loss"] for line in lines if "test_loss" in line)
    result = json.loads(Path(folder, "result.json").read_text())
    reported = {key.removeprefix("test_"): value for key, value in result.items() if key.startswith("test_")}
    return before, reported, bool((after != built[0].initial_parameters).any())


def some_schemes(name, most):
    """Returns so many of the schemes of a row at most. Over the rows all take turns; what is refused, the first one refuses."""
    schemes, first = MODELS[name].schemes, 0 if MODELS[name].refused else list(MODELS).index(name)
    return [schemes[(first + 2 * k) % len(schemes)] for k in range(min(most, len(schemes)))]


def outcome(name, most=ALL):
    """Trains a row by its schemes, or so many of them; returns what came of it, for `--json`."""
    row, schemes = MODELS[name], some_schemes(name, most) if most < ALL else MODELS[name].schemes
    found: dict[str, Any] = {"schemes": {}}
    for path in schemes:
        keras.backend.clear_session()
        with tempfile.TemporaryDirectory() as folder:
            try:
                before, reported, has_changed = train(name, path, folder)
            except flags.UserError as error:
                return {"refused": str(error).replace(f"{__file__}:{name}", "FILE.py:FUNCTION")}
            found["schemes"][path.partition("/")[0]] = {"before": before, "after": reported["loss"], "has_changed": has_changed}
            if path == schemes[-1]:
                model = keras.models.load_model(
                    Path(folder, "model.keras"), custom_objects=row.custom_objects(), safe_mode=name != "lambda_layer"
                )
                parameters = sum(math.prod(v.shape) for v in model.trainable_variables)
                found.update(parameters=parameters, reported=reported, loaded=evaluated(model, row))
    return found


def evaluated(model, row):
    """Returns what Keras says of a model on the test set, {name: number}."""
    x, y, *weights = row.data()[1]
    model.run_eagerly = True  # to trace it takes longer than to compute it once
    found = model.evaluate(x, y, sample_weight=weights[0] if weights else None, batch_size=500, verbose=0, return_dict=True)
    return {name: float(value) for name, value in found.items()}


def outcomes(names=tuple(MODELS), processes=2, most=ALL):
    """Returns {name: outcome} of these rows, which so many processes train, each by so many of its schemes at most."""
    names = sorted(names, key=lambda name: len(MODELS[name].schemes))  # the large ones first
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def in_process(some):
        command = [sys.executable, __file__, "--json", str(most), *some]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, check=True, text=True)
        return json.loads(ended.stdout.splitlines()[-1])

    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        parts = pool.map(in_process, [names[i::processes] for i in range(processes)])
    return {name: found for part in parts for name, found in part.items()}


HEAD = "| model | parameters | loss before | " + " | ".join(path.partition("/")[0] for path in SCHEMES) + " | `model.keras` |"
MARK = "<!-- written by `python tests/keras_models.py` -->"


def table(found):
    """Returns the table as text."""
    lines = [HEAD, "|---|" + "--:|" * (HEAD.count("|") - 3) + "---|"]
    for name, row in MODELS.items():
        outcome, cells = found[name], [f"`{name}`: {row.text}"]
        if "refused" in outcome:
            cells += [""] * (2 + len(SCHEMES)) + [f"`{outcome['refused']}`"]
        else:
            losses = {name: f"{each['after']:.3f}" for name, each in outcome["schemes"].items()}
            before = next(iter(outcome["schemes"].values()))["before"]
            loaded = ", ".join(f"{key} {value:.3f}" for key, value in outcome["loaded"].items())
            after = [losses.get(path.partition("/")[0], "") for path in SCHEMES]
            cells += [f"{outcome['parameters']:,}", f"{before:.3f}", *after, loaded]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_table():
    """Trains all, and writes the table between the marks in README.md."""
    before, _, rest = README.read_text().partition(MARK)
    _, _, after = rest.partition(MARK)
    README.write_text(f"{before}{MARK}\n\n{table(outcomes())}\n\n{MARK}{after}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--json"]:
        plots.draw_curve = lambda run_dir: None  # pictures take longer than training here
        sys.modules["keras_models"] = sys.modules["__main__"]  # which `--model=FILE.py:FUNCTION` would else run again
        print(json.dumps({name: outcome(name, int(sys.argv[2])) for name in sys.argv[3:]}))
    else:
        write_table()
