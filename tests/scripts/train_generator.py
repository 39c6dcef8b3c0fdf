import argparse

import keras
import numpy as np
from data_generator import DataGenerator
from keras.layers import Conv2D, Dense, Dropout, Flatten, Input, MaxPooling2D
from keras.models import Sequential


def get_model(dim, n_channels, n_classes):
    model = Sequential(
        [
            Input(shape=(*dim, n_channels)),
            Conv2D(16, (3, 3), activation="relu"),
            MaxPooling2D((2, 2)),
            Conv2D(32, (3, 3), activation="relu"),
            Flatten(),
            Dense(64, activation="relu"),
            Dropout(0.3),
            Dense(n_classes, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    keras.utils.set_random_seed(0)

    # Parameters
    params = {"dim": (16, 16), "n_channels": 1, "batch_size": args.batch_size}
    n_classes = 4

    # Datasets
    ids = np.arange(3000)
    labels = np.random.RandomState(0).randint(0, n_classes, size=len(ids))
    partition = {"train": ids[:2400], "validation": ids[2400:]}

    # Generators
    training_generator = DataGenerator(partition["train"], labels[:2400], shuffle=True, workers=args.workers, **params)
    validation_generator = DataGenerator(partition["validation"], labels[2400:], shuffle=False, **params)

    model = get_model(params["dim"], params["n_channels"], n_classes)
    model.fit(
        training_generator,
        validation_data=validation_generator,
        epochs=args.epochs,
        callbacks=[keras.callbacks.ModelCheckpoint("checkpoint_{epoch:02d}.keras")],
    )

    loss, acc = model.evaluate(validation_generator)
    print(f"loss: {loss:.4f}  accuracy: {acc:.4f}")


if __name__ == "__main__":
    main()
