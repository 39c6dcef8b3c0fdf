"""Probabilistic regression: a TensorFlow Probability layer, trained by its negative log-likelihood."""

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
import tf_keras

tfd = tfp.distributions
tf_keras.utils.set_random_seed(5)

rng = np.random.default_rng(5)
x = rng.uniform(-3, 3, size=(6000, 4)).astype("float32")
y = np.sin(x[:, :1]) + 0.3 * np.abs(x[:, 1:2]) * rng.normal(size=(6000, 1)).astype("float32")


def negative_log_likelihood(target, distribution):
    return -distribution.log_prob(target)


model = tf_keras.Sequential(
    [
        tf_keras.layers.Dense(64, activation="relu", input_shape=(4,)),
        tf_keras.layers.Dense(64, activation="relu"),
        tf_keras.layers.Dense(2),
        tfp.layers.DistributionLambda(
            lambda t: tfd.Normal(loc=t[..., :1], scale=1e-3 + tf.math.softplus(0.05 * t[..., 1:]))
        ),
    ]
)
model.compile(optimizer=tf_keras.optimizers.Adam(learning_rate=0.005), loss=negative_log_likelihood)
model.fit(x[:5000], y[:5000], batch_size=50, epochs=12, validation_data=(x[5000:], y[5000:]), verbose=2)
print("Mean of the first predictions:", model(x[:3]).mean().numpy().ravel())
