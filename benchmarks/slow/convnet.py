"""Simple convnet on 28x28 images of ten classes."""

import keras
import numpy as np
from keras import layers

num_classes = 10
input_shape = (28, 28, 1)
batch_size = 128
epochs = 15

# Ten blurred patterns, each image is one of them under noise
rng = np.random.default_rng(1)
patterns = rng.random((num_classes, 7, 7)).repeat(4, axis=1).repeat(4, axis=2)
y = rng.integers(0, num_classes, 24000)
x = 0.2 * patterns[y] + 0.8 * rng.random((len(y), 28, 28))

x = np.expand_dims(x, -1).astype("float32")
x_train, x_test = x[:20000], x[20000:]
y_train, y_test = keras.utils.to_categorical(y[:20000], num_classes), keras.utils.to_categorical(y[20000:], num_classes)
print("x_train shape:", x_train.shape)
print(x_train.shape[0], "train samples")
print(x_test.shape[0], "test samples")

model = keras.Sequential(
    [
        keras.Input(shape=input_shape),
        layers.Conv2D(32, kernel_size=(3, 3), padding="same", activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Conv2D(64, kernel_size=(3, 3), padding="same", activation="relu"),
        layers.Conv2D(64, kernel_size=(3, 3), padding="same", activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(num_classes, activation="softmax"),
    ]
)
model.summary()

model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=batch_size, epochs=epochs, validation_split=0.1)

score = model.evaluate(x_test, y_test, verbose=0)
print("Test loss:", score[0])
print("Test accuracy:", score[1])
