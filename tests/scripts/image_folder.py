import pathlib

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

data_dir = pathlib.Path("data/shapes")
batch_size = 32
img_height = 48
img_width = 48
epochs = 6


def draw(kind, rng):
    img = rng.integers(0, 90, size=(56, 56, 3), dtype=np.uint8)
    color = rng.integers(150, 255, size=3)
    cy, cx, r = rng.integers(18, 38), rng.integers(18, 38), rng.integers(8, 15)
    yy, xx = np.mgrid[:56, :56]
    if kind == "circle":
        mask = (yy - cy) ** 2 + (xx - cx) ** 2 < r**2
    elif kind == "square":
        mask = (abs(yy - cy) < r) & (abs(xx - cx) < r)
    else:
        mask = (yy - cy < r) & (yy - cy > 2 * abs(xx - cx) - r)
    img[mask] = color
    return img


# Create the images on the first run
if not data_dir.exists():
    rng = np.random.default_rng(0)
    for kind in ["circle", "square", "triangle"]:
        (data_dir / kind).mkdir(parents=True)
        for i in range(250):
            png = tf.io.encode_png(draw(kind, rng))
            tf.io.write_file(str(data_dir / kind / f"{i:04d}.png"), png)

train_ds = keras.utils.image_dataset_from_directory(
    data_dir,
    validation_split=0.2,
    subset="training",
    seed=123,
    image_size=(img_height, img_width),
    batch_size=batch_size,
)
val_ds = keras.utils.image_dataset_from_directory(
    data_dir,
    validation_split=0.2,
    subset="validation",
    seed=123,
    image_size=(img_height, img_width),
    batch_size=batch_size,
)
class_names = train_ds.class_names
print(class_names)

train_ds = train_ds.cache().shuffle(1000).prefetch(buffer_size=tf.data.AUTOTUNE)
val_ds = val_ds.cache().prefetch(buffer_size=tf.data.AUTOTUNE)

model = keras.Sequential(
    [
        layers.Input(shape=(img_height, img_width, 3)),
        layers.Rescaling(1.0 / 255),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(len(class_names)),
    ]
)
model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
history = model.fit(train_ds, validation_data=val_ds, epochs=epochs)

print("val_accuracy per epoch:", [round(a, 3) for a in history.history["val_accuracy"]])
model.save("shapes_model.keras")
