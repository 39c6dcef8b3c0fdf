"""Train a simple MLP classifier on tabular data.

Usage: python mlp_numpy.py --epochs 20 --batch_size 64
"""

import argparse

import numpy as np
from tensorflow import keras
from tensorflow.keras import layers
from tensorflow.keras.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint


def parse_args():
    parser = argparse.ArgumentParser(description="MLP training")
    parser.add_argument("--epochs", type=int, default=12, help="number of epochs")
    parser.add_argument("--batch_size", type=int, default=64, help="batch size")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layers")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_data(seed, n_samples=12000, n_features=40, n_classes=5):
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(n_classes, n_features)) * 0.6
    y = rng.integers(0, n_classes, size=n_samples)
    X = centers[y] + rng.normal(size=(n_samples, n_features))
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    return X.astype("float32"), y


def build_model(input_dim, n_classes, hidden, dropout):
    model = keras.Sequential()
    model.add(layers.Input(shape=(input_dim,)))
    model.add(layers.Dense(hidden, activation="relu"))
    model.add(layers.Dropout(dropout))
    model.add(layers.Dense(hidden, activation="relu"))
    model.add(layers.Dropout(dropout))
    model.add(layers.Dense(n_classes, activation="softmax"))
    return model


def main():
    args = parse_args()
    keras.utils.set_random_seed(args.seed)

    X, y = load_data(args.seed)
    n_train, n_val = int(0.7 * len(X)), int(0.15 * len(X))
    X_train, y_train = X[:n_train], y[:n_train]
    X_val, y_val = X[n_train : n_train + n_val], y[n_train : n_train + n_val]
    X_test, y_test = X[n_train + n_val :], y[n_train + n_val :]
    print("Train:", X_train.shape, "Val:", X_val.shape, "Test:", X_test.shape)

    model = build_model(X.shape[1], 5, args.hidden, args.dropout)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=args.lr),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.summary()

    callbacks = [
        ModelCheckpoint("best_model.keras", monitor="val_accuracy", save_best_only=True, verbose=1),
        EarlyStopping(monitor="val_loss", patience=6, restore_best_weights=True),
        CSVLogger("training_log.csv"),
    ]
    history = model.fit(
        X_train,
        y_train,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=(X_val, y_val),
        callbacks=callbacks,
    )

    loss, acc = model.evaluate(X_test, y_test, verbose=0)
    print("Best val accuracy: %.4f" % max(history.history["val_accuracy"]))
    print("Test loss: %.4f - test accuracy: %.4f" % (loss, acc))


if __name__ == "__main__":
    main()
