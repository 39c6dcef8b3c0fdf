"""The answer of a run with its next steps: the commands or lines that train with its recipe, or continue the run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from autotune.data.printable import duration, one_line
from autotune.recipe.advice import usage
from autotune.recipe.answers import Answer, Command, CommandName
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import Configuration
from autotune.stats.deciding import Verdict


def answer_at(recipe: Recipe, path: Path, tuned: str, to_repeat: Sequence[str] = ()) -> Answer:
    """Return the answer with its commands: how to train with the recipe in a file, or to continue its run.

    Commands name the workload as `tuned`. One that continues the run needs the words `to_repeat` again.
    """
    script, seconds, run = recipe.workload.script, recipe.evidence.go_on_seconds, path.parent
    is_baseline = not recipe.changes and "global_batch" not in recipe.baseline
    go_on = [] if seconds is None else [resume_command(tuned, run, to_repeat, seconds=seconds)]
    steps: list[tuple[CommandName, str, Sequence[str]]]
    if seconds is not None and recipe.evidence.verdict is Verdict.UNDECIDED:
        steps = [("go on", f"To continue for about {duration(seconds)} with everything measured so far:", go_on)]
        candidate, least = recipe.candidate, 1 + recipe.evidence.min_gain
        if candidate is not None and candidate.may_be_faster and candidate.speedup.value >= least:
            command = _variant(recipe, run, tuned, "candidate")
            steps.append(("candidate", "To train with the best candidate, which is not confirmed:", [command]))
    elif is_baseline and script is not None:
        steps = [("", "The recipe is the baseline: run the script as it is.", [])]
    elif is_baseline:
        uncovered = "NumPy arrays passed to fit, or a tf.distribute strategy: they were not measured."
        steps = [("", "The recipe is the baseline. Training code that trains like it needs no change.", [])]
        steps += [("", f"This does not cover {uncovered}", [])]
    elif script is None:
        steps = [("", "In your training code:", usage(recipe, path, tuned))]
    else:
        steps = [("train", "To train with it:", usage(recipe, run, tuned))]
        steps += [("edit", "To make it permanent:", [shlex.join(["autotune", "show", str(run), "--diff", tuned])])]
    if seconds is not None and recipe.evidence.verdict is not Verdict.UNDECIDED:
        steps.append(("go on", f"To measure what there was no time for, in about {duration(seconds)} more:", go_on))
    larger = recipe.larger_batch
    sizes = [Configuration(of).update_size for of in (recipe.configuration, recipe.baseline)]
    if larger is not None and (larger.confirmed if sizes[0] == sizes[1] else recipe.same_training is not None):
        other = "larger-batch" if sizes[0] == sizes[1] else "same-training"
        command = _variant(recipe, run, tuned, other)
        steps.append(("other", f"To take the {other.replace('-', ' ')} instead:", [command]))
    commands = [Command(name=name, heading=heading, lines=tuple(lines)) for name, heading, lines in steps]
    return recipe.answer.model_copy(update={"commands": tuple(commands)})


def _variant(recipe: Recipe, path: Path, tuned: str, option: str) -> str:
    """Return the line that trains with another answer of a recipe: `candidate`, `larger-batch` or `same-training`."""
    first = usage(recipe, path, tuned)[0]
    if recipe.workload.script is not None:
        return first.replace("autotune run", f"autotune run --{option}", 1)
    return first.replace(".apply()", f".with_{option.replace('-', '_')}().apply()", 1)


def resume_command(tuned: str, directory: Path, to_repeat: Sequence[str] = (), *, seconds: float | None = None) -> str:
    """Return the shell command that continues a run: for so many seconds, or for the rest of its own budget."""
    words = ["autotune", "tune", tuned, "--resume", str(directory)]
    words += [] if seconds is None else ["--budget", f"{seconds:.0f}s"]
    return one_line(shlex.join([*words, *to_repeat]))
