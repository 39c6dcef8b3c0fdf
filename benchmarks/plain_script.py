"""One plain training of a script with a configuration, for `plain_optuna.py` and `answers.py`: prints its speed.

    python benchmarks/plain_script.py SCRIPT RECIPE CONFIGURATION SECONDS

Trains as `autotune run RECIPE SCRIPT` does, with another configuration in the recipe's place. After a few calls of
the train function it times calls for so many seconds, prints samples per second as a line of JSON, and ends the script.
"""

import json
import sys
import time
from pathlib import Path

from autotune.recipe.guard import Guard
from autotune.recipe.recipe import Recipe
from autotune.runtime.sources import directory_of
from autotune.script.execute import leave, run_as_main
from autotune.script.loading import parse_reference
from autotune.script.long_run import LongRun

WARMUP_CALLS, FEWEST_CALLS = 3, 5


class Timer(Guard):
    """Times calls of the train function, and ends the process.

    Args:
        recipe: See `Guard`.
        seconds: Shortest timed stretch.
    """

    def __init__(self, recipe: Recipe, seconds: float) -> None:
        super().__init__(recipe.evidence, recipe.machine)
        self._seconds, self._samples, self._began = seconds, 0, 0.0

    def called(self, examples: int) -> None:
        """See `Guard`."""
        now = time.perf_counter()
        self._examples_per_call = examples or self._examples_per_call
        self._calls += 1
        if self._calls <= WARMUP_CALLS:
            self._began = now
            return
        self._samples += self._examples_per_call
        if self._calls >= WARMUP_CALLS + FEWEST_CALLS and now - self._began >= self._seconds:
            print("\n" + json.dumps({"samples_per_second": self._samples / (now - self._began)}))
            leave(0)


class TimedRun(LongRun):
    """A long run that ends once it is timed."""

    def __init__(self, recipe: Recipe, path: Path, directory: str, seconds: float) -> None:
        super().__init__(recipe, path, directory)
        self._guard = Timer(recipe, seconds)


def main(script: str, recipe_file: str, configuration: str, seconds: str) -> None:
    """Train, and print the speed."""
    recipe = Recipe.load(recipe_file).model_copy(update={"configuration": json.loads(configuration)})
    reference = parse_reference(script)
    run = TimedRun(recipe, Path(recipe_file), directory_of(reference), float(seconds))
    run.install()
    run_as_main(reference)
    raise SystemExit(f"{script} ended before it was timed")


if __name__ == "__main__":
    main(*sys.argv[1:])
