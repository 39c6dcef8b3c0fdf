"""DCGAN for 64x64 images, trained with fit() by overriding train_step."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

IMAGES = 3000
BATCH_SIZE = 32
LATENT_DIM = 128
EPOCHS = 30


def draw_faces(count, seed=3):
    """Round faces with two eyes at random places, as uint8 images."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:64, :64].astype("float32")
    images = np.empty((count, 64, 64, 3), "uint8")
    for image in images:
        cx, cy, radius = rng.uniform(24, 40), rng.uniform(24, 40), rng.uniform(14, 22)
        image[:] = rng.integers(0, 255, 3)
        image[(columns - cx) ** 2 + (rows - cy) ** 2 < radius**2] = rng.integers(100, 255, 3)
        for side in (-0.4, 0.4):
            image[(columns - cx - side * radius) ** 2 + (rows - cy + 0.3 * radius) ** 2 < 5] = 0
    return images


dataset = tf.data.Dataset.from_tensor_slices(draw_faces(IMAGES)).shuffle(IMAGES).batch(BATCH_SIZE, drop_remainder=True)
dataset = dataset.map(lambda x: tf.cast(x, tf.float32) / 255.0)

discriminator = keras.Sequential(
    [
        keras.Input(shape=(64, 64, 3)),
        layers.Conv2D(64, kernel_size=4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2D(128, kernel_size=4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2D(128, kernel_size=4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(1, activation="sigmoid", dtype="float32"),
    ],
    name="discriminator",
)
generator = keras.Sequential(
    [
        keras.Input(shape=(LATENT_DIM,)),
        layers.Dense(8 * 8 * 128),
        layers.Reshape((8, 8, 128)),
        layers.Conv2DTranspose(128, kernel_size=4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2DTranspose(128, kernel_size=4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2DTranspose(64, kernel_size=4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2D(3, kernel_size=5, padding="same", activation="sigmoid", dtype="float32"),
    ],
    name="generator",
)


class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator, self.generator, self.latent_dim = discriminator, generator, latent_dim
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn, **kwargs):
        super().compile(**kwargs)
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images):
        batch_size = tf.shape(real_images)[0]
        generated = self.generator(tf.random.normal((batch_size, self.latent_dim)))
        images = tf.concat([generated, tf.cast(real_images, generated.dtype)], axis=0)
        labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images, training=True))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))

        latent = tf.random.normal((batch_size, self.latent_dim))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(latent, training=True))
            g_loss = self.loss_fn(tf.zeros((batch_size, 1)), predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


gan = GAN(discriminator, generator, LATENT_DIM)
gan.compile(
    d_optimizer=keras.optimizers.Adam(learning_rate=0.0001),
    g_optimizer=keras.optimizers.Adam(learning_rate=0.0001),
    loss_fn=keras.losses.BinaryCrossentropy(),
)
gan.fit(dataset, epochs=EPOCHS)
