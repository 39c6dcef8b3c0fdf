"""Ordinary training code that applies a recipe: two lines more than without one.

    python examples/train_with_recipe.py                 # the baseline's way
    python examples/train_with_recipe.py recipe.json     # the recipe's way

Prints held-out accuracy, and samples per second from the second epoch on (the first one traces and compiles).
"""

import argparse
import time

import autotune


def main() -> None:
    """Train `digits_mlp.py`'s network for real epochs, with or without a recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", help="a recipe.json; the baseline's way without")
    parser.add_argument("--epochs", type=int, default=150)
    arguments = parser.parse_args()

    recipe = autotune.Recipe.load(arguments.recipe) if arguments.recipe else None
    if recipe:
        recipe.apply()  # before TensorFlow starts: threads, precision, environment variables

    import digits_mlp  # imports TensorFlow, hence below
    import keras

    class EpochTimes(keras.callbacks.Callback):
        """Notes when each epoch ends."""

        def __init__(self) -> None:
            super().__init__()
            self.ends = []

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            self.ends.append(time.perf_counter())

    model = digits_mlp.network()
    if recipe:
        model.compile(**digits_mlp.compile_arguments(), **recipe.compile_args())
        data = recipe.fit_args(digits_mlp.training_examples())
    else:
        model.compile(**digits_mlp.compile_arguments())
        data = {"x": digits_mlp.training_examples().batch(digits_mlp.workload.batch_size)}

    times = EpochTimes()
    model.fit(**data, epochs=arguments.epochs, verbose=0, callbacks=[times])
    _, accuracy = model.evaluate(*digits_mlp.held_out(), verbose=0)

    timed = digits_mlp.TRAINING_EXAMPLES * (len(times.ends) - 1)
    print(f"held-out accuracy {accuracy:.4f}")
    print(f"samples/s {timed / (times.ends[-1] - times.ends[0]):.0f}")


if __name__ == "__main__":
    main()
