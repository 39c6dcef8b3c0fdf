import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow import keras
from tensorflow.keras import layers

BATCH_SIZE = 32
EPOCHS = 10
AUTOTUNE = tf.data.AUTOTUNE

tf.random.set_seed(1)

# Load the digits and split them
digits = load_digits()
images = digits.images[..., np.newaxis].astype("float32")
labels = digits.target
x_train, x_val, y_train, y_val = train_test_split(images, labels, test_size=0.2, random_state=1, stratify=labels)


def preprocess(image, label):
    image = tf.image.resize(image / 16.0, (16, 16))
    return image, label


train_ds = (
    tf.data.Dataset.from_tensor_slices((x_train, y_train))
    .map(preprocess, num_parallel_calls=AUTOTUNE)
    .cache()
    .shuffle(1000)
    .batch(BATCH_SIZE)
    .prefetch(AUTOTUNE)
)
val_ds = (
    tf.data.Dataset.from_tensor_slices((x_val, y_val))
    .map(preprocess, num_parallel_calls=AUTOTUNE)
    .batch(BATCH_SIZE)
    .cache()
    .prefetch(AUTOTUNE)
)

# Small residual network
inputs = keras.Input(shape=(16, 16, 1), name="image")
x = layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
for filters in [16, 32]:
    shortcut = layers.Conv2D(filters, 1, strides=2, padding="same")(x)
    x = layers.Conv2D(filters, 3, strides=2, padding="same")(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.ReLU()(x)
    x = layers.Conv2D(filters, 3, padding="same")(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.add([x, shortcut])
    x = layers.ReLU()(x)
x = layers.GlobalAveragePooling2D()(x)
x = layers.Dropout(0.3)(x)
outputs = layers.Dense(10)(x)
model = keras.Model(inputs, outputs, name="small_resnet")
model.summary()

model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

history = model.fit(train_ds, validation_data=val_ds, epochs=EPOCHS)

score = model.evaluate(val_ds, verbose=0)
print("Validation loss:", score[0])
print("Validation accuracy:", score[1])

model.save("digits_resnet.keras")
