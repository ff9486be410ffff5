"""A GAN for the digits: a Keras model whose `train_step` has two losses and two optimizers."""

import keras
import tensorflow as tf
from keras import layers


class GAN(keras.Model):
    """A generator makes images [8, 8, 1] of noise; a discriminator tells them from real ones."""

    NOISE = 16

    def __init__(self):
        super().__init__()
        hidden = [layer for _ in range(2) for layer in (layers.Dense(64), layers.LeakyReLU())]
        self.discriminator = keras.Sequential([keras.Input([8, 8, 1]), layers.Flatten(), *hidden, layers.Dense(1)])
        hidden = [layer for _ in range(2) for layer in (layers.Dense(64), layers.LeakyReLU())]
        image = [layers.Dense(64, "sigmoid"), layers.Reshape([8, 8, 1])]
        self.generator = keras.Sequential([keras.Input([self.NOISE]), *hidden, *image])
        self.d_optimizer, self.g_optimizer = keras.optimizers.Adam(), keras.optimizers.Adam()
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
        self.seeds, self.built = keras.random.SeedGenerator(1), True

    def make(self, n):
        """Returns n images of the generator."""
        return self.generator(keras.random.normal([n, self.NOISE], seed=self.seeds))

    def train_step(self, data):
        real, _ = data
        n = tf.shape(real)[0]
        with tf.GradientTape() as tape:
            of_real = self.loss_of(0.9 * tf.ones([n, 1]), self.discriminator(real))
            of_made = self.loss_of(tf.zeros([n, 1]), self.discriminator(self.make(n)))
            d_loss = (of_real + of_made) / 2
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_of(tf.ones([n, 1]), self.discriminator(self.make(n)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}
