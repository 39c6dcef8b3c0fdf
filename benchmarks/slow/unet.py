"""Segment round shapes on 96x96 images with a U-Net.

python unet.py --batch-size 32 --epochs 40
"""

import argparse

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers
from tensorflow.keras.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

SIZE = 96
AUTOTUNE = tf.data.AUTOTUNE


def draw_samples(count, seed=0):
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE].astype("float32")
    images = rng.normal(0.4, 0.15, (count, SIZE, SIZE, 3)).astype("float32")
    masks = np.zeros((count, SIZE, SIZE, 1), "float32")
    for image, mask in zip(images, masks):
        for _ in range(rng.integers(1, 5)):
            x, y, a, b = rng.uniform(10, SIZE - 10), rng.uniform(10, SIZE - 10), *rng.uniform(6, 20, 2)
            inside = ((columns - x) / a) ** 2 + ((rows - y) / b) ** 2 < 1
            image[inside] += rng.uniform(0.1, 0.4, 3)
            mask[inside] = 1.0
    return images, masks


def augment(image, mask):
    if tf.random.uniform(()) > 0.5:
        image, mask = tf.image.flip_left_right(image), tf.image.flip_left_right(mask)
    return tf.image.random_brightness(image, 0.1), mask


def conv_block(x, filters):
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("relu")(x)
    return x


def build_unet(filters=16, depth=4):
    inputs = layers.Input((SIZE, SIZE, 3))
    skips, x = [], inputs
    for level in range(depth):
        skips.append(conv_block(x, filters * 2**level))
        x = layers.MaxPooling2D()(skips[-1])
    x = layers.Dropout(0.3)(conv_block(x, filters * 2**depth))
    for level in reversed(range(depth)):
        x = layers.Conv2DTranspose(filters * 2**level, 2, strides=2, padding="same")(x)
        x = conv_block(layers.concatenate([x, skips[level]]), filters * 2**level)
    return tf.keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid", dtype="float32")(x))


def dice_loss(y_true, y_pred):
    overlap = tf.reduce_sum(y_true * y_pred, axis=(1, 2, 3))
    total = tf.reduce_sum(y_true, axis=(1, 2, 3)) + tf.reduce_sum(y_pred, axis=(1, 2, 3))
    return 1.0 - (2.0 * overlap + 1.0) / (total + 1.0)


def bce_dice_loss(y_true, y_pred):
    return tf.reduce_mean(tf.keras.losses.binary_crossentropy(y_true, y_pred), axis=(1, 2)) + dice_loss(y_true, y_pred)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--samples", type=int, default=1200)
    args = parser.parse_args()
    tf.keras.utils.set_random_seed(1)

    samples = tf.data.Dataset.from_tensor_slices(draw_samples(args.samples))
    val_size = args.samples // 6
    train_ds = samples.skip(val_size).cache().shuffle(500).map(augment, num_parallel_calls=AUTOTUNE)
    train_ds = train_ds.batch(args.batch_size).prefetch(AUTOTUNE)
    val_ds = samples.take(val_size).batch(args.batch_size)

    model = build_unet()
    model.compile(optimizer=tf.keras.optimizers.Adam(1e-3), loss=bce_dice_loss, metrics=["accuracy"])
    callbacks = [
        ModelCheckpoint("unet.keras", save_best_only=True),
        ReduceLROnPlateau(patience=4, factor=0.5),
        EarlyStopping(patience=10, restore_best_weights=True),
    ]
    model.fit(train_ds, validation_data=val_ds, epochs=args.epochs, callbacks=callbacks)


if __name__ == "__main__":
    main()
