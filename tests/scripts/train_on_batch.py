import argparse

import numpy as np
from sklearn.datasets import load_digits
from tensorflow.keras.layers import LSTM, Dense, Input
from tensorflow.keras.models import Sequential
from tensorflow.keras.optimizers import RMSprop
from tensorflow.keras.utils import to_categorical
from tqdm import tqdm

np.random.seed(1337)

ap = argparse.ArgumentParser()
ap.add_argument("--epochs", type=int, default=6)
ap.add_argument("--batch", type=int, default=32)
ap.add_argument("--save", default="rnn_digits.keras")
opt = ap.parse_args()

# read every image as a sequence of 8 rows
X, y = load_digits(return_X_y=True)
X = X.reshape(-1, 8, 8).astype("float32") / 16
Y = to_categorical(y, 10)

idx = np.random.permutation(len(X))
X, Y = X[idx], Y[idx]
X_train, X_test = X[:1400], X[1400:]
y_train, y_test = Y[:1400], Y[1400:]

model = Sequential()
model.add(Input(shape=(8, 8)))
model.add(LSTM(48))
model.add(Dense(10, activation="softmax"))
model.compile(loss="categorical_crossentropy", optimizer=RMSprop(2e-3), metrics=["accuracy"])

n_batches = len(X_train) // opt.batch
best = 0

for epoch in range(opt.epochs):
    perm = np.random.permutation(len(X_train))
    pbar = tqdm(range(n_batches), desc="epoch %d/%d" % (epoch + 1, opt.epochs))
    model.reset_metrics()
    for i in pbar:
        batch_idx = perm[i * opt.batch : (i + 1) * opt.batch]
        loss, acc = model.train_on_batch(X_train[batch_idx], y_train[batch_idx])
        pbar.set_postfix(loss="%.3f" % loss, acc="%.3f" % acc)

    val_loss, val_acc = model.evaluate(X_test, y_test, batch_size=opt.batch, verbose=0)
    print("loss %.4f - acc %.4f - val_loss %.4f - val_acc %.4f" % (loss, acc, val_loss, val_acc))
    if val_acc > best:
        best = val_acc
        model.save(opt.save)

print("best validation accuracy: %.4f" % best)
