"""Character-level text generation with three LSTM layers and a training loop of its own."""

import os
import time

import numpy as np
import tensorflow as tf

SEQ_LENGTH = 100
BATCH_SIZE = 64
BUFFER_SIZE = 10000
EMBEDDING_DIM = 128
RNN_UNITS = 256
EPOCHS = 20

# A text in a made-up language: 2,000 words, some far more frequent than others
rng = np.random.default_rng(5)
letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
words = ["".join(rng.choice(letters, size)) for size in rng.integers(2, 10, 2000)]
frequency = 1.0 / np.arange(1, len(words) + 1)
text = " ".join(rng.choice(words, 120_000, p=frequency / frequency.sum()))
vocab = sorted(set(text))
char_to_id = {char: index for index, char in enumerate(vocab)}
all_ids = np.array([char_to_id[char] for char in text], "int64")
print(f"Length of text: {len(text)} characters, {len(vocab)} unique")


def split_input_target(sequence):
    return sequence[:-1], sequence[1:]


count = len(all_ids) // (SEQ_LENGTH + 1)
sequences = tf.data.Dataset.from_tensor_slices(all_ids[: count * (SEQ_LENGTH + 1)].reshape(count, SEQ_LENGTH + 1))
dataset = (
    sequences.map(split_input_target)
    .shuffle(BUFFER_SIZE)
    .batch(BATCH_SIZE, drop_remainder=True)
    .prefetch(tf.data.experimental.AUTOTUNE)
)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Embedding(len(vocab), EMBEDDING_DIM),
        tf.keras.layers.LSTM(RNN_UNITS, return_sequences=True),
        tf.keras.layers.LSTM(RNN_UNITS, return_sequences=True),
        tf.keras.layers.LSTM(RNN_UNITS, return_sequences=True),
        tf.keras.layers.Dense(len(vocab), dtype="float32"),
    ]
)
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam()
mean_loss = tf.keras.metrics.Mean()


@tf.function
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        predictions = model(inputs, training=True)
        loss = loss_fn(targets, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


for epoch in range(EPOCHS):
    start = time.time()
    mean_loss.reset_state()
    for batch, (inputs, targets) in enumerate(dataset):
        loss = train_step(inputs, targets)
        mean_loss.update_state(loss)
        if batch % 50 == 0:
            print(f"Epoch {epoch + 1} Batch {batch} Loss {loss:.4f}")
    if (epoch + 1) % 5 == 0:
        model.save_weights(os.path.join(".", f"ckpt_{epoch}.weights.h5"))
    print(f"Epoch {epoch + 1} Loss: {mean_loss.result().numpy():.4f}")
    print(f"Time taken for 1 epoch {time.time() - start:.2f} sec")
