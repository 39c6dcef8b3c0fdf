"""Train a ResNet-20 on 32x32 colour images, as on CIFAR-10.

python resnet20.py --epochs 60
"""

import argparse

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, models, optimizers, regularizers
from tensorflow.keras.callbacks import CSVLogger, LearningRateScheduler

NUM_CLASSES = 10
STACKS, BLOCKS = 3, 3  # 6 * 3 + 2 = 20 layers


def load_data(samples=6000, seed=7):
    rng = np.random.default_rng(seed)
    prototypes = rng.normal(size=(NUM_CLASSES, 8, 8, 3)).repeat(4, axis=1).repeat(4, axis=2)
    labels = rng.integers(0, NUM_CLASSES, samples)
    images = prototypes[labels] + rng.normal(scale=2.0, size=(samples, 32, 32, 3))
    images = (images - images.mean(axis=0)) / images.std(axis=0)
    return images.astype("float32"), labels.astype("int32")


def conv_bn(x, filters, kernel_size=3, strides=1, activation="relu"):
    x = layers.Conv2D(
        filters,
        kernel_size,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        kernel_regularizer=regularizers.l2(1e-4),
    )(x)
    x = layers.BatchNormalization()(x)
    return layers.Activation(activation)(x) if activation else x


def build_resnet():
    inputs = layers.Input(shape=(32, 32, 3))
    filters = 16
    x = conv_bn(inputs, filters)
    for stack in range(STACKS):
        for block in range(BLOCKS):
            strides = 2 if stack > 0 and block == 0 else 1
            y = conv_bn(x, filters, strides=strides)
            y = conv_bn(y, filters, activation=None)
            if strides > 1:
                x = conv_bn(x, filters, kernel_size=1, strides=strides, activation=None)
            x = layers.Activation("relu")(layers.add([x, y]))
        filters *= 2
    x = layers.GlobalAveragePooling2D()(x)
    return models.Model(inputs, layers.Dense(NUM_CLASSES, activation="softmax")(x))


def lr_schedule(epoch):
    return 0.1 if epoch < 30 else 0.01 if epoch < 45 else 0.001


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--batch_size", type=int, default=128)
args = parser.parse_args()

images, labels = load_data()
x_train, y_train, x_val, y_val = images[:5000], labels[:5000], images[5000:], labels[5000:]

train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(5000)
train_ds = train_ds.map(lambda image, label: (tf.image.random_flip_left_right(image), label))
train_ds = train_ds.batch(args.batch_size).prefetch(tf.data.AUTOTUNE)
val_ds = tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(args.batch_size)

model = build_resnet()
model.compile(
    optimizer=optimizers.SGD(learning_rate=0.1, momentum=0.9),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
callbacks = [LearningRateScheduler(lr_schedule), CSVLogger("resnet20.csv")]
model.fit(train_ds, validation_data=val_ds, epochs=args.epochs, callbacks=callbacks, verbose=2)
