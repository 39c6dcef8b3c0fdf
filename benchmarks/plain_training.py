"""Ordinary training code with a recipe, for `benchmarks/claims.py`: no trial, no slices, nothing that is ever frozen.

    python benchmarks/plain_training.py WORKLOAD.py RECIPE.json SECONDS

Warms up, then times whole epochs of one `model.fit`, validation and epoch boundaries included, until at least
SECONDS are over. Prints one line of JSON: samples, seconds, epochs.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import autotune
from autotune.workload import takes_config

if TYPE_CHECKING:
    import keras

WARMUP_SECONDS = 2.0
"""Training after the first step, and before anything is timed."""
ENDLESS = 1 << 30
"""Epochs that `fit` is asked for: a callback ends it."""


def trained(model: "keras.Model", batches: Any, validation: Any, seconds: float) -> list[float]:
    """Warm up and train; the times at which the first timed epoch began and each one ended."""
    import keras

    class WarmUp(keras.callbacks.Callback):
        """Ends training some time after the first step, wherever in an epoch that is."""

        def __init__(self) -> None:
            super().__init__()
            self.ends: float | None = None

        def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
            now = time.perf_counter()
            self.ends = self.ends or now + WARMUP_SECONDS
            self.model.stop_training = now >= self.ends

    class EpochTimes(keras.callbacks.Callback):
        """Notes when each epoch ends, and ends training after the first that ends late enough."""

        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            self.times = self.times or [time.perf_counter()]

        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            self.times.append(time.perf_counter())
            self.model.stop_training = self.times[-1] - self.times[0] >= seconds

    times = EpochTimes()
    for callback in (WarmUp(), times):
        model.fit(batches, validation_data=validation, epochs=ENDLESS, verbose=0, callbacks=[callback])
    return times.times


def main(file: str, recipe_file: str, seconds: str) -> None:
    """Train as the README shows."""
    recipe = autotune.Recipe.load(recipe_file)
    recipe.apply(on_mismatch="error")  # before TensorFlow starts: threads, precision, environment variables

    sys.path.insert(0, str(Path(file).parent))
    workload: autotune.Workload = importlib.import_module(Path(file).stem).workload  # imports TensorFlow

    def examples(function: Any) -> Any:
        return function(recipe.dataset_config) if takes_config(function) else function()

    model = workload.model()
    model.compile(**workload.compile(), **recipe.compile_args())
    batches = recipe.batch(examples(workload.dataset))
    validation = workload.validation and recipe.batch(examples(workload.validation), drop_remainder=False)
    times = trained(model, batches, validation, float(seconds))
    assert recipe.workload.examples is not None
    epochs = len(times) - 1
    print(
        json.dumps(
            {"samples": epochs * recipe.workload.examples, "seconds": times[-1] - times[0], "epochs": epochs}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
