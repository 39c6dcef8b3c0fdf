"""DCGAN on the 8x8 digits, in a loop with two optimizers of tf_keras."""

import os
import time

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tf_keras import Sequential, layers, losses, optimizers

BATCH_SIZE = 64
EPOCHS = 20
NOISE_DIM = 50

tf.random.set_seed(123)

images = (load_digits().images.reshape(-1, 8, 8, 1).astype("float32") - 8.0) / 8.0
dataset = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images)).batch(BATCH_SIZE)

generator = Sequential(
    [
        layers.Dense(2 * 2 * 64, use_bias=False, input_shape=(NOISE_DIM,)),
        layers.BatchNormalization(),
        layers.LeakyReLU(),
        layers.Reshape((2, 2, 64)),
        layers.Conv2DTranspose(32, 3, strides=2, padding="same", use_bias=False),
        layers.BatchNormalization(),
        layers.LeakyReLU(),
        layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="tanh"),
    ]
)
discriminator = Sequential(
    [
        layers.Conv2D(32, 3, strides=2, padding="same", input_shape=(8, 8, 1)),
        layers.LeakyReLU(),
        layers.Dropout(0.3),
        layers.Conv2D(64, 3, strides=2, padding="same"),
        layers.LeakyReLU(),
        layers.Flatten(),
        layers.Dense(1),
    ]
)
cross_entropy = losses.BinaryCrossentropy(from_logits=True)
generator_optimizer = optimizers.Adam(1e-3, beta_1=0.5)
discriminator_optimizer = optimizers.legacy.Adam(5e-4, beta_1=0.5)
checkpoint = tf.train.Checkpoint(generator=generator, discriminator=discriminator)


@tf.function
def train_step(images):
    noise = tf.random.normal([tf.shape(images)[0], NOISE_DIM])
    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        fakes = generator(noise, training=True)
        real_output = discriminator(images, training=True)
        fake_output = discriminator(fakes, training=True)
        gen_loss = cross_entropy(tf.ones_like(fake_output), fake_output)
        disc_loss = cross_entropy(tf.ones_like(real_output), real_output)
        disc_loss += cross_entropy(tf.zeros_like(fake_output), fake_output)
    gen_grads = gen_tape.gradient(gen_loss, generator.trainable_variables)
    disc_grads = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
    generator_optimizer.apply_gradients(zip(gen_grads, generator.trainable_variables))
    discriminator_optimizer.apply_gradients(zip(disc_grads, discriminator.trainable_variables))
    return gen_loss, disc_loss


for epoch in range(EPOCHS):
    start = time.time()
    seen = [[float(loss) for loss in train_step(batch)] for batch in dataset]
    g, d = np.mean(seen, axis=0)
    print("Epoch %d: gen loss %.4f, disc loss %.4f (%.2f sec)" % (epoch + 1, g, d, time.time() - start))
checkpoint.save(os.path.join("checkpoints", "ckpt"))
