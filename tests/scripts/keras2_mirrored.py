"""fit inside MirroredStrategy.scope(), on two virtual CPU devices where there are no GPUs."""

import argparse

import numpy as np
import tensorflow as tf
import tf_keras as keras


def get_strategy():
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


def make_data(n, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 10, size=n)
    prototypes = np.random.default_rng(99).random((10, 14, 14, 1))
    return (prototypes[y] + rng.normal(scale=0.7, size=(n, 14, 14, 1))).astype("float32"), y


parser = argparse.ArgumentParser()
parser.add_argument("--batch_size_per_replica", type=int, default=32)
parser.add_argument("--epochs", type=int, default=6)
args = parser.parse_args()

strategy = get_strategy()
print("Number of devices: {}".format(strategy.num_replicas_in_sync))
keras.utils.set_random_seed(11)
batch_size = args.batch_size_per_replica * strategy.num_replicas_in_sync
train = tf.data.Dataset.from_tensor_slices(make_data(4000)).cache().shuffle(4000).batch(batch_size)
test = tf.data.Dataset.from_tensor_slices(make_data(800, seed=1)).batch(batch_size)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Conv2D(16, 3, activation="relu", input_shape=(14, 14, 1)),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        metrics=["accuracy"],
    )

model.fit(train, epochs=args.epochs, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.9)])
print("Eval:", model.evaluate(test, verbose=0))
