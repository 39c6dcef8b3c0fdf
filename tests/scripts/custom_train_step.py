import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(0)

loss_tracker = keras.metrics.Mean(name="loss")
mae_metric = keras.metrics.MeanAbsoluteError(name="mae")


class HousePriceModel(keras.Model):
    """Regression model that does its own gradient clipping in train_step."""

    def __init__(self, units=64, clip_norm=1.0, **kwargs):
        super().__init__(**kwargs)
        self.clip_norm = clip_norm
        self.norm = layers.BatchNormalization()
        self.dense1 = layers.Dense(units, activation="relu")
        self.dense2 = layers.Dense(units, activation="relu")
        self.dropout = layers.Dropout(0.1)
        self.out = layers.Dense(1)

    def call(self, inputs, training=False):
        x = self.norm(inputs, training=training)
        x = self.dense1(x)
        x = self.dropout(x, training=training)
        x = self.dense2(x)
        return self.out(x)

    def train_step(self, data):
        x, y = data

        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean(keras.losses.huber(y, y_pred))

        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, self.clip_norm)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))

        loss_tracker.update_state(loss)
        mae_metric.update_state(y, y_pred)
        return {"loss": loss_tracker.result(), "mae": mae_metric.result()}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        loss_tracker.update_state(tf.reduce_mean(keras.losses.huber(y, y_pred)))
        mae_metric.update_state(y, y_pred)
        return {"loss": loss_tracker.result(), "mae": mae_metric.result()}

    @property
    def metrics(self):
        # listed here so that they are reset at the start of each epoch
        return [loss_tracker, mae_metric]


# fake housing data
rng = np.random.default_rng(0)
x = rng.normal(size=(8000, 13)).astype("float32")
w = rng.normal(size=(13, 1)).astype("float32")
y = x @ w + 0.5 * np.sin(3 * x[:, :1]) + 0.1 * rng.normal(size=(8000, 1)).astype("float32")
y = y.astype("float32")

model = HousePriceModel()
model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-3))
model.fit(x[:6400], y[:6400], batch_size=32, epochs=8, validation_data=(x[6400:], y[6400:]))

results = model.evaluate(x[6400:], y[6400:], return_dict=True, verbose=0)
print("Final results:", results)
model.save_weights("house_price.weights.h5")
