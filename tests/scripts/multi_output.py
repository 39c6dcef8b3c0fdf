import numpy as np
from tensorflow import keras
from tensorflow.keras import layers

num_tags = 12  # Number of unique issue tags
num_words = 1000  # Size of vocabulary
num_departments = 4
max_len = 30

keras.utils.set_random_seed(5)
rng = np.random.default_rng(5)

# Dummy support tickets
n = 4000
department = rng.integers(0, num_departments, size=n)
title = rng.integers(1, num_words, size=(n, 10))
body = rng.integers(1, num_words, size=(n, max_len))
title[:, 0] = 1 + department  # the first word of a title gives the department away
tags = rng.integers(0, 2, size=(n, num_tags)).astype("float32")
priority = (0.6 * tags[:, 0] + 0.3 * tags[:, 3] + 0.1 * rng.random(n)).astype("float32")

title_input = keras.Input(shape=(10,), name="title", dtype="int32")
body_input = keras.Input(shape=(max_len,), name="body", dtype="int32")
tags_input = keras.Input(shape=(num_tags,), name="tags")

title_features = layers.Embedding(num_words, 16)(title_input)
title_features = layers.Flatten()(title_features)
body_features = layers.Embedding(num_words, 16)(body_input)
body_features = layers.Conv1D(16, 3, activation="relu")(body_features)
body_features = layers.GlobalMaxPooling1D()(body_features)

x = layers.concatenate([title_features, body_features, tags_input])
x = layers.Dense(64, activation="relu")(x)

priority_pred = layers.Dense(1, activation="sigmoid", name="priority")(x)
department_pred = layers.Dense(num_departments, activation="softmax", name="department")(x)

model = keras.Model(
    inputs={"title": title_input, "body": body_input, "tags": tags_input},
    outputs={"priority": priority_pred, "department": department_pred},
)

model.compile(
    optimizer=keras.optimizers.RMSprop(1e-3),
    loss={"priority": keras.losses.MeanSquaredError(), "department": keras.losses.SparseCategoricalCrossentropy()},
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"priority": ["mae"], "department": ["accuracy"]},
)

train = slice(0, 3200)
test = slice(3200, n)
model.fit(
    {"title": title[train], "body": body[train], "tags": tags[train]},
    {"priority": priority[train], "department": department[train]},
    epochs=8,
    batch_size=32,
    validation_split=0.1,
)

results = model.evaluate(
    {"title": title[test], "body": body[test], "tags": tags[test]},
    {"priority": priority[test], "department": department[test]},
    return_dict=True,
)
for name, value in results.items():
    print(f"{name}: {value:.4f}")
model.save("tickets.keras")
