"""Train `digits_mlp.py`'s network in ordinary code, with or without a recipe.

    python examples/train_with_recipe.py                 # the baseline
    python examples/train_with_recipe.py recipe.json     # the recipe

Prints the held-out accuracy, and samples per second. The first epoch traces and compiles, so it is not timed.
"""

import argparse
import time

import autotune


def main() -> None:
    """Train, evaluate, and print accuracy and speed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", help="a recipe.json; the baseline if omitted")
    parser.add_argument("--epochs", type=int, default=150)
    arguments = parser.parse_args()

    # Before TensorFlow starts: threads, precision, environment variables.
    recipe = autotune.Recipe.load(arguments.recipe).apply() if arguments.recipe else None

    import digits_mlp  # imports TensorFlow, so it must follow apply()
    import keras

    class EpochTimes(keras.callbacks.Callback):
        """Record the time at which each epoch ends."""

        def __init__(self) -> None:
            super().__init__()
            self.ends = []

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            self.ends.append(time.perf_counter())

    model, examples, times = digits_mlp.network(), digits_mlp.training_examples(), EpochTimes()
    settings = {"epochs": arguments.epochs, "verbose": 0, "callbacks": [times]}
    if recipe:
        recipe.compile(model, **digits_mlp.compile_arguments())
        recipe.fit(model, examples, **settings)
    else:
        model.compile(**digits_mlp.compile_arguments())
        model.fit(examples.batch(digits_mlp.workload.batch_size), **settings)
    _, accuracy = model.evaluate(*digits_mlp.held_out(), verbose=0)

    timed = digits_mlp.TRAINING_EXAMPLES * (len(times.ends) - 1)
    print(f"held-out accuracy {accuracy:.4f}")
    print(f"samples/s {timed / (times.ends[-1] - times.ends[0]):.0f}")


if __name__ == "__main__":
    main()
