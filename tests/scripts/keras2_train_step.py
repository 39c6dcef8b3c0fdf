"""Regression on arrays; the model clips its gradients in a train_step of its own."""

import numpy as np
import tensorflow as tf
import tf_keras as keras

keras.utils.set_random_seed(0)


class HousePriceModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.Sequential([keras.layers.Dense(64, activation="relu") for _ in range(2)])
        self.head = keras.layers.Dense(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    def call(self, inputs, training=False):
        return self.head(self.hidden(inputs, training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = tf.reduce_mean(keras.losses.huber(y, prediction))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        self.mae.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, y = data
        prediction = self(x, training=False)
        self.loss_tracker.update_state(tf.reduce_mean(keras.losses.huber(y, prediction)))
        self.mae.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae]


rng = np.random.default_rng(0)
x = rng.normal(size=(8000, 13)).astype("float32")
y = x @ rng.normal(size=(13, 1)).astype("float32") + 0.5 * np.sin(3 * x[:, :1])

model = HousePriceModel()
model.compile(optimizer=keras.optimizers.legacy.Adam(learning_rate=1e-3))
model.fit(x[:6400], y[:6400], batch_size=32, epochs=8, validation_data=(x[6400:], y[6400:]))
print(model.evaluate(x[6400:], y[6400:], return_dict=True, verbose=0))
model.save_weights("house_price.h5")
