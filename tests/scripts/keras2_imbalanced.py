"""Fraud detection on imbalanced data: class weights, and callbacks that save HDF5 files and lower the learning rate."""

import numpy as np
from sklearn.metrics import classification_report
from sklearn.model_selection import train_test_split
from tf_keras.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from tf_keras.layers import Dense, Dropout
from tf_keras.metrics import AUC, Precision, Recall
from tf_keras.models import Sequential
from tf_keras.utils import set_random_seed

set_random_seed(2024)
rng = np.random.default_rng(2024)

n = 20000
y = (rng.random(n) < 0.02).astype(int)
X = rng.normal(size=(n, 29)).astype("float32")
X[y == 1, :6] += 1.2
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=2024, stratify=y)
neg, pos = np.bincount(y_train)

model = Sequential(
    [
        Dense(64, activation="relu", input_shape=(29,)),
        Dropout(0.4),
        Dense(32, activation="relu"),
        Dropout(0.4),
        Dense(1, activation="sigmoid"),
    ]
)
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=[Precision(), Recall(), AUC(name="auc")])
model.fit(
    X_train,
    y_train,
    batch_size=128,
    epochs=10,
    validation_split=0.2,
    class_weight={0: (neg + pos) / neg / 2, 1: (neg + pos) / pos / 2},
    callbacks=[
        EarlyStopping(monitor="val_auc", patience=5, mode="max", restore_best_weights=True),
        ReduceLROnPlateau(monitor="val_loss", patience=2),
        ModelCheckpoint("fraud_best.h5", monitor="val_auc", mode="max", save_best_only=True),
        CSVLogger("fraud.csv"),
    ],
    verbose=2,
)
print(classification_report(y_test, (model.predict(X_test, verbose=0) > 0.5).astype(int).ravel()))
model.save("fraud.h5")
