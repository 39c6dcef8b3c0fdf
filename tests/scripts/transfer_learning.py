import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

IMG_SIZE = (32, 32)
BATCH_SIZE = 16
NUM_CLASSES = 3
INITIAL_EPOCHS = 4
FINE_TUNE_EPOCHS = 4
FINE_TUNE_AT = 100

keras.utils.set_random_seed(42)


def make_images(n, seed):
    """Images with a bright horizontal, vertical or diagonal stripe."""
    rng = np.random.default_rng(seed)
    images = rng.uniform(0, 120, size=(n, 32, 32, 3))
    labels = rng.integers(0, NUM_CLASSES, size=n)
    for img, label in zip(images, labels):
        pos = rng.integers(6, 26)
        if label == 0:
            img[pos - 2 : pos + 2, :, :] = 230
        elif label == 1:
            img[:, pos - 2 : pos + 2, :] = 230
        else:
            for i in range(31):
                img[i : i + 2, i : i + 2, :] = 230
    return images.astype("float32"), labels


train_ds = tf.data.Dataset.from_tensor_slices(make_images(320, seed=0)).shuffle(320).batch(BATCH_SIZE)
val_ds = tf.data.Dataset.from_tensor_slices(make_images(96, seed=1)).batch(BATCH_SIZE)
train_ds = train_ds.prefetch(tf.data.AUTOTUNE)
val_ds = val_ds.prefetch(tf.data.AUTOTUNE)

data_augmentation = keras.Sequential(
    [layers.RandomFlip("horizontal"), layers.RandomTranslation(0.1, 0.1), layers.RandomContrast(0.1)],
    name="data_augmentation",
)

base_model = keras.applications.MobileNetV2(input_shape=IMG_SIZE + (3,), alpha=0.35, include_top=False, weights=None)
base_model.trainable = False  # freeze the backbone

inputs = keras.Input(shape=IMG_SIZE + (3,))
x = data_augmentation(inputs)
x = keras.applications.mobilenet_v2.preprocess_input(x)
x = base_model(x)
x = layers.GlobalAveragePooling2D()(x)
x = layers.Dropout(0.2)(x)
outputs = layers.Dense(NUM_CLASSES, activation="softmax")(x)
model = keras.Model(inputs, outputs)

model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
print("Trainable variables (frozen):", len(model.trainable_variables))
history = model.fit(train_ds, epochs=INITIAL_EPOCHS, validation_data=val_ds)

# Fine tuning: unfreeze the top of the backbone and continue with a lower learning rate
base_model.trainable = True
for layer in base_model.layers[:FINE_TUNE_AT]:
    layer.trainable = False
model.compile(optimizer=keras.optimizers.Adam(5e-4), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
print("Trainable variables (unfrozen):", len(model.trainable_variables))
history_fine = model.fit(
    train_ds, epochs=INITIAL_EPOCHS + FINE_TUNE_EPOCHS, initial_epoch=history.epoch[-1] + 1, validation_data=val_ds
)

loss, accuracy = model.evaluate(val_ds)
print("Val accuracy after fine tuning:", accuracy)
model.save("mobilenet_finetuned.keras")
