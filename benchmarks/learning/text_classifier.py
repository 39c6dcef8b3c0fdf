"""Classify messages by topic: a bag of embeddings over vectorized text, from strings to classes."""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers

TOPICS = 5
VOCABULARY = 8000
MAX_TOKENS = 6000
SEQUENCE_LENGTH = 60


def make_messages(count, seed):
    """Words of a Zipf law; of each topic some words are more frequent than in the others."""
    language, rng = np.random.default_rng(0), np.random.default_rng(seed)
    words = np.array([f"w{number}" for number in range(VOCABULARY)])
    usual = 1.0 / np.arange(10, VOCABULARY + 10)
    odds = usual * np.exp(0.45 * language.normal(size=(TOPICS, VOCABULARY)))
    cumulative = np.cumsum(odds / odds.sum(axis=1, keepdims=True), axis=1)
    labels = rng.integers(0, TOPICS, count)
    lengths = rng.integers(20, SEQUENCE_LENGTH, count)
    texts = [
        " ".join(words[np.minimum(np.searchsorted(cumulative[label], rng.random(length)), VOCABULARY - 1)])
        for label, length in zip(labels, lengths)
    ]
    return texts, labels.astype("int32")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1337)
    args = parser.parse_args()
    keras.utils.set_random_seed(args.seed)

    texts, labels = make_messages(20000, seed=1)
    val_texts, val_labels = make_messages(3000, seed=2)
    vectorize = layers.TextVectorization(max_tokens=MAX_TOKENS, output_sequence_length=SEQUENCE_LENGTH)
    vectorize.adapt(texts)

    train_ds = tf.data.Dataset.from_tensor_slices((np.array(vectorize(texts)), labels))
    train_ds = train_ds.shuffle(20000).batch(args.batch_size).prefetch(tf.data.AUTOTUNE)
    val_ds = tf.data.Dataset.from_tensor_slices((np.array(vectorize(val_texts)), val_labels)).batch(args.batch_size)

    model = keras.Sequential(
        [
            keras.Input(shape=(SEQUENCE_LENGTH,), dtype="int64"),
            layers.Embedding(MAX_TOKENS, 32),
            layers.Dropout(0.2),
            layers.GlobalAveragePooling1D(),
            layers.Dropout(0.2),
            layers.Dense(TOPICS, activation="softmax", dtype="float32"),
        ]
    )
    model.compile(loss="sparse_categorical_crossentropy", optimizer=keras.optimizers.Adam(1e-3), metrics=["accuracy"])
    model.fit(train_ds, validation_data=val_ds, epochs=args.epochs, verbose=2)


if __name__ == "__main__":
    main()
