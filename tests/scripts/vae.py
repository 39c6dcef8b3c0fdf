import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow import keras
from tensorflow.keras import layers


class Sampling(layers.Layer):
    """Uses (z_mean, z_log_var) to sample z, the vector encoding a digit."""

    def call(self, inputs):
        z_mean, z_log_var = inputs
        epsilon = tf.random.normal(shape=tf.shape(z_mean))
        return z_mean + tf.exp(0.5 * z_log_var) * epsilon


class Encoder(layers.Layer):
    def __init__(self, latent_dim, hidden_dim, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(hidden_dim, activation="relu")
        self.dense_mean = layers.Dense(latent_dim)
        self.dense_log_var = layers.Dense(latent_dim)
        self.sampling = Sampling()

    def call(self, inputs):
        x = self.hidden(inputs)
        z_mean = self.dense_mean(x)
        z_log_var = self.dense_log_var(x)
        return z_mean, z_log_var, self.sampling((z_mean, z_log_var))


class Decoder(layers.Layer):
    def __init__(self, original_dim, hidden_dim, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(hidden_dim, activation="relu")
        self.out = layers.Dense(original_dim, activation="sigmoid")

    def call(self, inputs):
        return self.out(self.hidden(inputs))


class VariationalAutoEncoder(keras.Model):
    def __init__(self, original_dim, hidden_dim=128, latent_dim=4, beta=1.0, **kwargs):
        super().__init__(**kwargs)
        self.beta = beta
        self.encoder = Encoder(latent_dim, hidden_dim)
        self.decoder = Decoder(original_dim, hidden_dim)
        self.kl_tracker = keras.metrics.Mean(name="kl_loss")

    def call(self, inputs):
        z_mean, z_log_var, z = self.encoder(inputs)
        kl_loss = -0.5 * tf.reduce_sum(1 + z_log_var - tf.square(z_mean) - tf.exp(z_log_var), axis=1)
        kl_loss = tf.reduce_mean(kl_loss)
        self.add_loss(self.beta * kl_loss)
        self.kl_tracker.update_state(kl_loss)
        return self.decoder(z)


def reconstruction_loss(y_true, y_pred):
    bce = keras.losses.binary_crossentropy(y_true, y_pred)
    return tf.cast(tf.shape(y_true)[-1], tf.float32) * bce


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--latent_dim", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--beta", type=float, default=1.0)
    args = parser.parse_args()

    keras.utils.set_random_seed(3)
    x = (load_digits().data / 16.0).astype("float32")
    x_train, x_test = x[:1500], x[1500:]

    vae = VariationalAutoEncoder(64, latent_dim=args.latent_dim, beta=args.beta)
    vae.compile(optimizer=keras.optimizers.Adam(1e-3), loss=reconstruction_loss)
    vae.fit(x_train, x_train, epochs=args.epochs, batch_size=args.batch_size, validation_data=(x_test, x_test))

    print("Test ELBO loss:", vae.evaluate(x_test, x_test, verbose=0))
    z_mean, _, _ = vae.encoder(x_test)
    print("Latent std per dimension:", np.std(z_mean, axis=0))
    vae.save_weights("vae.weights.h5")
