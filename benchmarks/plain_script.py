"""One plain training of a script with a configuration, for `plain_optuna.py` and `slow_answers.py`: prints its speed.

    python benchmarks/plain_script.py SCRIPT RECIPE CONFIGURATION SECONDS

Trains as `autotune run RECIPE SCRIPT` does, with CONFIGURATION, a JSON object, in the place of the recipe's. After a
few calls of the train function it times calls for so many seconds, prints samples per second as a line of JSON, and
ends the script. The median call counts: epochs are longer than that, so whether one ends meanwhile is chance.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from autotune.data.options import LongRunOptions
from autotune.recipe.guard import Guard
from autotune.recipe.recipe import Recipe
from autotune.runtime.sources import directory_of
from autotune.runtime.supervisor import exit_now
from autotune.script.execute import run_as_main
from autotune.script.loading import parse_reference
from autotune.script.long_run import LongRun

WARMUP_CALLS, FEWEST_CALLS = 3, 5


class Timer(Guard):
    """Times calls of the train function, and ends the process.

    Args:
        recipe: See `Guard`.
        seconds: Shortest timed stretch.
        clock: Returns seconds.
    """

    def __init__(self, recipe: Recipe, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(recipe.evidence, recipe.machine, clock=clock)
        self._seconds, self._ends = seconds, list[float]()

    def called(self, examples: int) -> None:
        """See `Guard`."""
        self._examples_per_call = examples or self._examples_per_call
        self._ends.append(self._clock())
        timed = self._ends[WARMUP_CALLS - 1 :]
        if len(timed) > FEWEST_CALLS and timed[-1] - timed[0] >= self._seconds:
            call_seconds = statistics.median(after - before for before, after in itertools.pairwise(timed))
            print("\n" + json.dumps({"samples_per_second": self._examples_per_call / call_seconds}))
            exit_now(0)


class TimedRun(LongRun):
    """A long run that ends once it is timed."""

    def __init__(self, recipe: Recipe, path: Path, directory: str, seconds: float) -> None:
        super().__init__(recipe, path, directory, LongRunOptions())
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
