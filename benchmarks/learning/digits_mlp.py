"""A multilayer perceptron with dropout on scikit-learn's handwritten digits.

python digits_mlp.py --epochs 160
"""

import argparse

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=160)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

keras.utils.set_random_seed(args.seed)

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
x = digits.data[order].astype("float32") / 16.0
y = keras.utils.to_categorical(digits.target[order], 10)
x_train, y_train = x[:1437], y[:1437]
x_val, y_val = x[1437:], y[1437:]

model = keras.Sequential(
    [
        keras.Input(shape=(64,)),
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.3),
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.3),
        layers.Dense(10, activation="softmax", dtype="float32"),
    ]
)
model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.SGD(args.lr), metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, validation_data=(x_val, y_val), verbose=2)
