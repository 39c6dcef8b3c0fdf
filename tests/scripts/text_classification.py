import re
import string

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, losses

batch_size = 32
max_features = 2000
sequence_length = 60
epochs = 10

rng = np.random.default_rng(10)

GOOD = "great wonderful moving brilliant charming funny excellent superb touching lovely".split()
BAD = "boring awful terrible dull weak stupid annoying predictable horrible flat".split()
NEUTRAL = [a + b for a in ["film", "plot", "actor", "scene", "story"] for b in ["", "s", "ing", "maker"]]


def make_review(label):
    n = rng.integers(15, 70)
    p_right = 0.08
    words = []
    for _ in range(n):
        r = rng.random()
        if r < p_right:
            words.append(rng.choice(GOOD if label else BAD))
        elif r < p_right + 0.03:
            words.append(rng.choice(BAD if label else GOOD))
        else:
            words.append(rng.choice(NEUTRAL))
    return " ".join(words).capitalize() + rng.choice([".", "!", "<br />", "..."])


targets = rng.integers(0, 2, size=3000)
texts = [make_review(t) for t in targets]

raw_train_ds = tf.data.Dataset.from_tensor_slices((texts[:2400], targets[:2400])).shuffle(2400).batch(batch_size)
raw_val_ds = tf.data.Dataset.from_tensor_slices((texts[2400:], targets[2400:])).batch(batch_size)


def custom_standardization(input_data):
    lowercase = tf.strings.lower(input_data)
    stripped_html = tf.strings.regex_replace(lowercase, "<br />", " ")
    return tf.strings.regex_replace(stripped_html, "[%s]" % re.escape(string.punctuation), "")


vectorize_layer = layers.TextVectorization(
    standardize=custom_standardization,
    max_tokens=max_features,
    output_mode="int",
    output_sequence_length=sequence_length,
)

# Make a text-only dataset (without labels), then call adapt
train_text = raw_train_ds.map(lambda x, y: x)
vectorize_layer.adapt(train_text)
print("Vocabulary size:", len(vectorize_layer.get_vocabulary()))


def vectorize_text(text, label):
    text = tf.expand_dims(text, -1)
    return vectorize_layer(text), label


train_ds = raw_train_ds.map(vectorize_text).cache().prefetch(tf.data.AUTOTUNE)
val_ds = raw_val_ds.map(vectorize_text).cache().prefetch(tf.data.AUTOTUNE)

model = tf.keras.Sequential(
    [
        layers.Embedding(max_features, 16),
        layers.Dropout(0.2),
        layers.GlobalAveragePooling1D(),
        layers.Dropout(0.2),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(
    loss=losses.BinaryCrossentropy(),
    optimizer=tf.keras.optimizers.Adam(1e-2),
    metrics=[tf.keras.metrics.BinaryAccuracy(threshold=0.5)],
)
model.fit(train_ds, validation_data=val_ds, epochs=epochs)

loss, accuracy = model.evaluate(val_ds)
print("Loss: ", loss)
print("Accuracy: ", accuracy)
model.save("sentiment.keras")
