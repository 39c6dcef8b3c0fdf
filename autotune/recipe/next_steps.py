"""The next steps after a run: the commands or lines that train with its recipe, or continue the run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from autotune.data.printable import duration, one_line
from autotune.recipe.advice import usage
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import Configuration
from autotune.stats.deciding import Verdict

Step = tuple[str, list[str]]
"""A sentence, and the lines to copy that belong to it."""


def next_steps(recipe: Recipe, path: Path, tuned: str, to_repeat: Sequence[str] = ()) -> list[Step]:
    """Return how to train with the recipe in a file or to continue its run, and how to take the other answer.

    Commands name the workload as `tuned`. One that continues the run needs the words `to_repeat` again.
    """
    script, seconds = recipe.workload.script, recipe.evidence.go_on_seconds
    is_baseline = not recipe.changes and "global_batch" not in recipe.baseline
    go_on = [] if seconds is None else [resume_command(tuned, path.parent, to_repeat, seconds=seconds)]
    steps: list[Step]
    if seconds is not None and recipe.evidence.verdict is Verdict.UNDECIDED:
        steps = [(f"To continue for about {duration(seconds)} with everything measured so far:", go_on)]
        candidate, least = recipe.candidate, 1 + recipe.evidence.min_gain
        if candidate is not None and candidate.may_be_faster and candidate.speedup.value >= least:
            command = _variant(recipe, path, tuned, "candidate")
            steps.append(("To train with the best candidate, which is not confirmed:", [command]))
    elif is_baseline and script is not None:
        steps = [("The recipe is the baseline: run the script as it is.", [])]
    elif is_baseline:
        uncovered = "NumPy arrays passed to fit, or a tf.distribute strategy: they were not measured."
        steps = [("The recipe is the baseline. Training code that trains like it needs no change.", [])]
        steps += [(f"This does not cover {uncovered}", [])]
    else:
        heading = "To train with it:" if script is not None else "In your training code:"
        steps = [(heading, usage(recipe, path, tuned))]
    if seconds is not None and recipe.evidence.verdict is not Verdict.UNDECIDED:
        steps.append((f"To measure what there was no time for, in about {duration(seconds)} more:", go_on))
    larger = recipe.larger_batch
    sizes = [Configuration(of).update_size for of in (recipe.configuration, recipe.baseline)]
    if larger is not None and (larger.confirmed if sizes[0] == sizes[1] else recipe.same_training is not None):
        other = "larger-batch" if sizes[0] == sizes[1] else "same-training"
        steps.append((f"To take the {other.replace('-', ' ')} instead:", [_variant(recipe, path, tuned, other)]))
    return steps


def _variant(recipe: Recipe, path: Path, tuned: str, option: str) -> str:
    """Return the line that trains with another answer of a recipe: `candidate`, `larger-batch` or `same-training`."""
    first = usage(recipe, path, tuned)[0]
    if recipe.workload.script is not None:
        return first.replace("autotune run", f"autotune run --{option}", 1)
    return f"{first}.with_{option.replace('-', '_')}()"


def resume_command(tuned: str, directory: Path, to_repeat: Sequence[str] = (), *, seconds: float | None = None) -> str:
    """Return the shell command that continues a run: for so many seconds, or for the rest of its own budget."""
    words = ["autotune", "tune", tuned, "--resume", str(directory)]
    words += [] if seconds is None else ["--budget", f"{seconds:.0f}s"]
    return one_line(shlex.join([*words, *to_repeat]))
