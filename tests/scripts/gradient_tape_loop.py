import argparse
import time

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--checkpoint-dir", default="./tf_ckpts")
args = parser.parse_args()

tf.random.set_seed(7)

# Prepare the dataset.
x, y = load_digits(return_X_y=True)
x = (x / 16.0).astype("float32").reshape(-1, 8, 8, 1)
order = np.random.RandomState(7).permutation(len(x))
x, y = x[order], y[order]
x_train, y_train, x_test, y_test = x[:1500], y[:1500], x[1500:], y[1500:]

train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(1500).batch(args.batch_size)
test_ds = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(args.batch_size)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Conv2D(32, 3, activation="relu"),
        tf.keras.layers.Conv2D(64, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Dense(10),
    ]
)

loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(args.learning_rate)

train_loss = tf.keras.metrics.Mean(name="train_loss")
train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
test_loss = tf.keras.metrics.Mean(name="test_loss")
test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

ckpt = tf.train.Checkpoint(step=tf.Variable(0), optimizer=optimizer, model=model)
manager = tf.train.CheckpointManager(ckpt, args.checkpoint_dir, max_to_keep=3)


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = loss_object(labels, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_loss(loss)
    train_accuracy(labels, predictions)


@tf.function
def test_step(images, labels):
    predictions = model(images, training=False)
    test_loss(loss_object(labels, predictions))
    test_accuracy(labels, predictions)


for epoch in range(args.epochs):
    start = time.time()
    for metric in (train_loss, train_accuracy, test_loss, test_accuracy):
        metric.reset_state()

    for images, labels in train_ds:
        train_step(images, labels)
        ckpt.step.assign_add(1)
    for test_images, test_labels in test_ds:
        test_step(test_images, test_labels)

    print(
        f"Epoch {epoch + 1}, Loss: {train_loss.result():.4f}, Accuracy: {train_accuracy.result() * 100:.2f}, "
        f"Test Loss: {test_loss.result():.4f}, Test Accuracy: {test_accuracy.result() * 100:.2f}, "
        f"time {time.time() - start:.2f}s"
    )
    save_path = manager.save()
print("Saved checkpoint:", save_path)
