"""DCGAN on the 8x8 digits."""

import os
import time

import numpy as np
import tensorflow as tf
from networks import make_discriminator_model, make_generator_model
from sklearn.datasets import load_digits

BUFFER_SIZE = 1797
BATCH_SIZE = 64
EPOCHS = 20
NOISE_DIM = 50

tf.random.set_seed(123)

train_images = load_digits().images.reshape(-1, 8, 8, 1).astype("float32")
train_images = (train_images - 8.0) / 8.0  # Normalize the images to [-1, 1]
train_dataset = tf.data.Dataset.from_tensor_slices(train_images).shuffle(BUFFER_SIZE).batch(BATCH_SIZE)

generator = make_generator_model(NOISE_DIM)
discriminator = make_discriminator_model()

cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)


def discriminator_loss(real_output, fake_output):
    real_loss = cross_entropy(tf.ones_like(real_output), real_output)
    fake_loss = cross_entropy(tf.zeros_like(fake_output), fake_output)
    return real_loss + fake_loss


def generator_loss(fake_output):
    return cross_entropy(tf.ones_like(fake_output), fake_output)


generator_optimizer = tf.keras.optimizers.Adam(1e-3, beta_1=0.5)
discriminator_optimizer = tf.keras.optimizers.Adam(5e-4, beta_1=0.5)

checkpoint_prefix = os.path.join("./training_checkpoints", "ckpt")
checkpoint = tf.train.Checkpoint(
    generator_optimizer=generator_optimizer,
    discriminator_optimizer=discriminator_optimizer,
    generator=generator,
    discriminator=discriminator,
)


@tf.function
def train_step(images):
    noise = tf.random.normal([tf.shape(images)[0], NOISE_DIM])

    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        generated_images = generator(noise, training=True)
        real_output = discriminator(images, training=True)
        fake_output = discriminator(generated_images, training=True)
        gen_loss = generator_loss(fake_output)
        disc_loss = discriminator_loss(real_output, fake_output)

    gen_grads = gen_tape.gradient(gen_loss, generator.trainable_variables)
    disc_grads = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
    generator_optimizer.apply_gradients(zip(gen_grads, generator.trainable_variables))
    discriminator_optimizer.apply_gradients(zip(disc_grads, discriminator.trainable_variables))
    return gen_loss, disc_loss


def train(dataset, epochs):
    for epoch in range(epochs):
        start = time.time()
        losses = []
        for image_batch in dataset:
            gen_loss, disc_loss = train_step(image_batch)
            losses.append((gen_loss.numpy(), disc_loss.numpy()))
        g, d = np.mean(losses, axis=0)
        if (epoch + 1) % 5 == 0:
            checkpoint.save(file_prefix=checkpoint_prefix)
        print("Epoch %d: gen loss %.4f, disc loss %.4f (%.2f sec)" % (epoch + 1, g, d, time.time() - start))


train(train_dataset, EPOCHS)

samples = generator(tf.random.normal([16, NOISE_DIM]), training=False)
np.save("generated_digits.npy", samples.numpy())
print("Generated pixels: mean %.3f, std %.3f" % (np.mean(samples), np.std(samples)))
