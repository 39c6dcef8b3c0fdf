"""Small residual network on the digits, with tf_keras and tf.data."""

import numpy as np
import tensorflow as tf
import tf_keras as keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tf_keras import layers

BATCH_SIZE = 32
EPOCHS = 10
AUTOTUNE = tf.data.AUTOTUNE

keras.utils.set_random_seed(1)

digits = load_digits()
images = digits.images[..., np.newaxis].astype("float32")
x_train, x_val, y_train, y_val = train_test_split(images, digits.target, test_size=0.2, random_state=1)


def preprocess(image, label):
    return tf.image.resize(image / 16.0, (16, 16)), label


train_ds = (
    tf.data.Dataset.from_tensor_slices((x_train, y_train))
    .map(preprocess, num_parallel_calls=AUTOTUNE)
    .cache()
    .shuffle(1000, seed=1)
    .batch(BATCH_SIZE)
    .prefetch(AUTOTUNE)
)
val_ds = tf.data.Dataset.from_tensor_slices((x_val, y_val)).map(preprocess).batch(BATCH_SIZE).cache()

inputs = keras.Input(shape=(16, 16, 1))
x = layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
for filters in [16, 32]:
    shortcut = layers.Conv2D(filters, 1, strides=2, padding="same")(x)
    x = layers.Conv2D(filters, 3, strides=2, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU()(x)
    x = layers.add([x, shortcut])
x = layers.GlobalAveragePooling2D()(x)
outputs = layers.Dense(10)(x)
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(train_ds, validation_data=val_ds, epochs=EPOCHS)
model.save("digits_resnet")
