"""Ordinary training code with a recipe, for `benchmarks/claims.py`: no trial, no slices, nothing that is ever frozen.

    python benchmarks/plain_training.py WORKLOAD.py RECIPE.json

Imports, prints a line, and waits for its turns, so that several can import at once and then train one by one. A turn
is a line of standard input: SECONDS. It is one `model.fit`, whose whole epochs, validation and epoch boundaries
included, are timed until at least SECONDS are over; what comes before is warm-up. Each turn prints one line of JSON:
samples, seconds, epochs. No more lines end it.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import autotune
from autotune.script.workload import takes_config

READY = "ready to train"
"""The line that is printed when everything is imported and nothing of a model or a dataset exists yet."""
WARMUP_SECONDS, WARMUP_SECONDS_LATER = 4.0, 1.0
"""Warm-up ends with the epoch in which these are over: in the first turn tracing, compiling, and some steps more. XLA
compiles for an epoch's smaller last batch as well, so a whole epoch is the least. Later turns have nothing to compile,
only an epoch's boundary to begin from."""
ENDLESS = 1 << 30
"""Epochs that `fit` is asked for: the callback ends it."""


def trained(fit: Callable[..., Any], validation: Any, *, warmup: float, seconds: float) -> list[float]:
    """Train by this call of `fit`; the times at which warm-up ended and each timed epoch did."""
    import keras

    class EpochTimes(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        """Notes when each epoch ends, and ends training after the first that ends late enough."""

        def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
            self.warm_at = time.perf_counter() + warmup
            self.ends: list[float] = []

        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            now = time.perf_counter()
            if now >= self.warm_at:
                self.ends.append(now)
                self.model.stop_training = len(self.ends) > 1 and now - self.ends[0] >= seconds

    times = EpochTimes()
    fit(validation_data=validation, epochs=ENDLESS, verbose=0, callbacks=[times])
    return times.ends


def main(file: str, recipe_file: str) -> None:
    """Train as the README shows, turn by turn."""
    recipe = autotune.Recipe.load(
        recipe_file
    ).apply()  # before TensorFlow starts: threads, precision, environment variables

    sys.path.insert(0, str(Path(file).parent))
    workload: autotune.Workload = importlib.import_module(Path(file).stem).workload  # imports TensorFlow

    def examples(function: Any) -> Any:
        return function(recipe.dataset_config) if takes_config(function) else function()

    print(READY, flush=True)
    model = None
    for line in sys.stdin:
        warmup = WARMUP_SECONDS_LATER
        if model is None:
            warmup = WARMUP_SECONDS
            assert workload.compile is not None
            model = workload.model()
            recipe.compile(model, **workload.compile())
            data = examples(workload.dataset)
            validation = workload.validation and examples(workload.validation)
        ends = trained(partial(recipe.fit, model, data), validation, warmup=warmup, seconds=float(line))
        assert recipe.workload.examples is not None  # these workloads have epochs
        samples = (len(ends) - 1) * recipe.workload.examples
        turn = {"samples": samples, "seconds": ends[-1] - ends[0], "epochs": len(ends) - 1}
        print(json.dumps(turn), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
