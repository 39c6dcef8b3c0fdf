"""Classify product reviews with a 1D convnet, after parsing, cleaning and tokenizing their CSV export."""

import csv
import html
import re
import unicodedata
import zlib
from collections import Counter

import numpy as np
import pandas as pd
from tensorflow import keras
from tensorflow.keras import layers

MAX_WORDS = 20000
MAX_LEN = 200
BATCH_SIZE = 128
STOP_WORDS = {"the", "a", "an", "and", "or", "of", "to", "in", "is", "it"}
OPINIONS = ("awful", "poor", "fair", "great", "superb")
TAGS, NOT_LETTERS, SPACES = re.compile(r"<[^>]+>"), re.compile(r"[^a-z ]"), re.compile(r" +")
REPEATED, SUFFIX = re.compile(r"(.)\1{2,}"), re.compile(r"(?<=...)(?:ving|ous|est|ing|s)$")


def export_reviews(count=60000, seed=17):
    """Lines of CSV, as the shop's export has them: identifier, date, stars and text with markup."""
    rng = np.random.default_rng(seed)
    syllables = ["ka", "lo", "mi", "ter", "son", "ral", "ving", "est", "un", "per", "ti", "ous", "the", "and", "of"]
    vocabulary = np.array(["".join(rng.choice(syllables, size)) for size in rng.integers(1, 5, 30000)])
    lengths, stars = rng.integers(40, 160, count), rng.integers(1, 6, count)
    picked = vocabulary[(rng.random(lengths.sum()) ** 3 * len(vocabulary)).astype(int)]
    yield "id,date,stars,text"
    for number, words in enumerate(np.split(picked, np.cumsum(lengths)[:-1])):
        words[::9] = OPINIONS[stars[number] - 1]
        day = f"2024-{number % 12 + 1:02d}-{number % 28 + 1:02d}"
        yield f'{number},{day},{stars[number]},"<p>{" ".join(words).capitalize()}!<br/> Would buy again; 10/10.</p>"'


def clean(text):
    text = unicodedata.normalize("NFKD", html.unescape(text)).lower()
    text = NOT_LETTERS.sub(" ", TAGS.sub(" ", text))
    return SPACES.sub(" ", REPEATED.sub(r"\1\1", text)).strip()


def tokenize(text):
    words = [SUFFIX.sub("", word) for word in text.split() if word not in STOP_WORDS]
    return words + ["_".join(words[i : i + 2]) for i in range(len(words) - 1)]


def sketch(tokens):
    """The same for reviews that were posted twice with small edits."""
    return tuple(sorted({zlib.crc32(token.encode()) for token in tokens})[:8])


frame = pd.DataFrame(csv.DictReader(export_reviews()))
frame["date"] = pd.to_datetime(frame["date"])
frame["label"] = (frame["stars"].astype(int) > 3).astype("float32")
frame["tokens"] = frame["text"].map(clean).map(tokenize)
frame = frame[~frame["tokens"].map(sketch).duplicated()]
counts = Counter()
for tokens in frame["tokens"]:
    counts.update(tokens)
word_index = {word: index + 2 for index, (word, _) in enumerate(counts.most_common(MAX_WORDS - 2))}

x = np.zeros((len(frame), MAX_LEN), dtype="int32")
for row, tokens in enumerate(frame["tokens"]):
    ids = [word_index.get(token, 1) for token in tokens[:MAX_LEN]]
    x[row, : len(ids)] = ids
y = frame["label"].to_numpy()
newest = np.argsort(frame["date"].to_numpy(), kind="stable")
train, test = newest[:-6000], newest[-6000:]
print(f"{len(train)} reviews, {len(counts)} distinct tokens, {y.mean():.0%} positive")

model = keras.Sequential(
    [
        keras.Input(shape=(MAX_LEN,)),
        layers.Embedding(MAX_WORDS, 128),
        layers.Dropout(0.3),
        layers.Conv1D(256, 7, padding="same", activation="relu"),
        layers.Conv1D(256, 7, padding="same", activation="relu"),
        layers.GlobalMaxPooling1D(),
        layers.Dense(128, activation="relu"),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
early = keras.callbacks.EarlyStopping(monitor="val_loss", patience=2)
model.fit(x[train], y[train], validation_split=0.1, epochs=10, batch_size=BATCH_SIZE, callbacks=[early])
print(model.evaluate(x[test], y[test], batch_size=BATCH_SIZE, verbose=0))
