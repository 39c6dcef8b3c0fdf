"""A run's end, in this order: verdict, changes, costs, what to watch, what was not checked, how to use it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.text import Text

from autotune.data.printable import one_line
from autotune.front.text import duration, note, ratio, say, size, table, terminal
from autotune.recipe.advice import usage, verdict_in_words
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS
from autotune.stats.deciding import ClaimResult, Verdict
from autotune.stats.stability import THROTTLING

if TYPE_CHECKING:
    from autotune.recipe.evidence import BestCandidate, Watch
    from autotune.recipe.recipe import LearningRate, Recipe
    from autotune.tuning.verify import Verification


def show_recipe(recipe: Recipe, path: Path, console: RichConsole | None = None) -> None:
    """All of a run's end but how to use the recipe."""
    console = console or terminal()
    evidence = recipe.evidence
    faster = evidence.verdict is Verdict.FASTER
    console.print()
    say(verdict_in_words(recipe), console, style="bold green" if faster else "bold")
    if recipe.candidate is not None and not faster:
        say(_best_in_words(recipe.candidate, Configuration(recipe.baseline)), console)
    say(f"Baseline: {_baseline_in_words(recipe)}.", console)
    headings = ("", "baseline", "recommended") if recipe.changes else ("", "baseline")
    rows = [row[: len(headings)] for row in _rows(recipe)]
    console.print("", table(headings, rows, show_edge=False), "", sep="\n")
    if recipe.learning_rate is not None:
        _show_learning_rate(recipe.learning_rate, recipe, console)
    if evidence.break_even_samples:
        say(f"The longer compile time is earned back after {evidence.break_even_samples:,} samples.", console)
    if evidence.watch is not None:
        say(_watched(evidence.watch, _unit(recipe)), console)
    for check in evidence.stability.checks:
        if not check.passed:
            say(f"Failed: {check.name}: {check.detail}", console, style="red")
        elif check.name == THROTTLING and check.value:
            say(f"Note: {check.name}: {check.detail}", console)
    unchecked = evidence.stability.not_checked
    for each in ["Not checked:", *(f"  - {each}" for each in unchecked)] if unchecked else []:
        say(each, console)
    for each in evidence.advice:
        say(each, console)
    if worth := _worth(recipe):
        say(worth, console)
    say(f"Recipe: {path}", console)


def _best_in_words(best: BestCandidate, baseline: Configuration) -> str:
    told = ""
    if best.speedup is not None:
        told = f"{ratio(best.speedup)}; "
    elif best.search_speedup is not None:
        told = f"×{best.search_speedup:.2f} (search only); "
    return f"Best candidate: {Configuration(best.configuration).describe(baseline)}: {told}{best.reason}."


def _baseline_in_words(recipe: Recipe) -> str:
    """How the baseline trains: what the claim is against, and what a recipe without changes stands for."""
    workload, size = recipe.workload, recipe.baseline["batch_size"]
    dropping = ", drop_remainder=True" if workload.drop_remainder else ""
    if workload.script is not None:
        whole = f", {recipe.baseline['global_batch']} per update" if "global_batch" in recipe.baseline else ""
        batches = "" if workload.script.work_varies else f", in batches of {size}{whole}"
        return f"{workload.name} as it is{batches}"
    data = f"dataset(config), batches of {size}," if workload.batched else f"dataset().batch({size}{dropping})"
    named = [
        f"{name}={format_value(value)}"
        for name, value in recipe.baseline.items()
        if value not in (None, KNOBS[name].default) and name != "batch_size"
    ]
    replicas = recipe.baseline.get("replicas", 1)
    on = "on one device" if replicas == 1 else f"on {replicas} devices"
    return f"model.fit on {data} {on}, {', '.join(named) or 'all else by default'}"


def _rows(recipe: Recipe) -> list[tuple[str, ...]]:
    """What changes, then the speed, then what it costs; of the baseline and of the recommendation."""
    evidence, now = recipe.evidence, recipe.baseline
    used = evidence.baseline_joules_per_sample, evidence.joules_per_sample
    before, after = evidence.baseline_peak_memory_bytes, evidence.peak_memory_bytes
    rates = (each.shown("", ",.0f") for each in (evidence.baseline_throughput, evidence.throughput))
    compiling = (
        "–" if each is None else f"{each:.1f} s"
        for each in (evidence.baseline_compile_seconds, evidence.compile_seconds)
    )
    return [
        *((name, format_value(now[name]), format_value(value)) for name, value in recipe.changes.items()),
        (f"{_unit(recipe)}/s", *rates),
        *([("energy/sample", *map(_energy, used))] if any(used) else []),
        ("peak host memory", size(before.host), size(after.host)),
        *([("peak device memory", size(before.device), size(after.device))] if after.device is not None else []),
        ("compile time", *compiling),
    ]


def _unit(recipe: Recipe) -> str:
    return "samples" if recipe.workload.script is None else recipe.workload.script.unit


def _energy(joules: float | None) -> str:
    return "–" if joules is None else f"{joules:.3g} J" if joules >= 1 else f"{1e3 * joules:.3g} mJ"


def _show_learning_rate(note: LearningRate, recipe: Recipe, console: RichConsole) -> None:
    say(
        f"The batch size is {note.batch_ratio:g} times the baseline's. Usual rules multiply the learning rate by "
        f"{note.sqrt_scale:.2f} (Adam) or {note.linear_scale:g} (SGD). Compare the held-out loss before a long "
        "training.",
        console,
    )
    script, losses = recipe.workload.script, note.losses
    if script is not None and script.schedule is not None:
        followed = f"The learning rate follows a {script.schedule} by steps"
        say(f"{followed}, and an epoch has other steps now: scale them.", console)
    if losses is None:
        return
    before, after = str(recipe.baseline["batch_size"]), str(recipe.configuration["batch_size"])
    scaled = {
        "as it is": losses.unscaled,
        f"× {note.sqrt_scale:.2f}": losses.sqrt_scaled,
        f"× {note.linear_scale:g}": losses.linear_scaled,
    }
    headings = ("batch", "learning rate", f"training loss after {losses.examples:,} examples")
    rows = [
        (before, "as it is", f"{losses.baseline:.4g} ± {losses.baseline_spread:.2g}"),
        *((after, scale, "–" if loss is None else f"{loss:.4g}") for scale, loss in scaled.items()),
    ]
    console.print("", table(headings, rows, show_edge=False), "", sep="\n")


def _watched(watch: Watch, unit: str) -> str:
    if watch.failure:
        return f"It failed while it trained without a pause (`--soak`): {watch.failure}."
    rate = "" if watch.throughput is None else f" at {watch.throughput.value:,.0f} {unit}/s"
    failed = [each.detail for each in watch.checks if not each.passed]
    told = all(each.tells for each in watch.checks)
    sound = "no memory leak and no hang" if told else "no hang; too little was seen to tell whether memory grows"
    found = "; ".join(failed) if failed else sound
    return f"It trained for {watch.seconds:.0f} s without a pause{rate} (`--soak`): {found}."


def _worth(recipe: Recipe) -> str:
    """What the recipe saves in the long training; empty where that is not known."""
    evidence, samples = recipe.evidence, recipe.workload.train_samples
    if samples is None or not recipe.changes:
        return ""
    before, after = samples / evidence.baseline_throughput.value, samples / evidence.throughput.value
    spent = recipe.created_by.spent_seconds
    saved = before - after
    paid = f"tuning took {duration(spent)}"
    if saved > spent:
        paid += f", which is paid back after {duration(spent * after / saved)} of training"
    return f"Your training of {samples:,} samples: {duration(after)} in place of {duration(before)}; {paid}."


def show_usage(
    recipe: Recipe, path: Path, *, tuned: str, to_repeat: Sequence[str] = (), console: RichConsole | None = None
) -> None:
    """The lines that training code needs, or the command that goes on. `tuned` is the workload as the user named it."""
    console = console or terminal()
    script, seconds = recipe.workload.script, recipe.evidence.go_on_seconds
    as_it_is = not recipe.changes and "global_batch" not in recipe.baseline
    if seconds is not None:
        command = resume_command(tuned, path.parent, to_repeat, seconds=seconds)
        lines = [f"To settle it, go on for about {duration(seconds)} with all that was measured:", f"    {command}"]
        if recipe.candidate is not None and recipe.candidate.may_be_faster:
            command = usage(recipe, path, tuned)[0]
            if script is not None:
                command = command.replace("autotune run", "autotune run --candidate", 1)
            else:
                command = f"{command}.with_candidate()"
            lines += ["To train with the best candidate, unconfirmed as it is:", f"    {command}"]
    elif as_it_is and script is not None:
        lines = ["The recipe is the baseline: run the script as it is."]
    elif as_it_is:
        lines = [
            "The recipe is the baseline. Training code that trains like it needs no change.",
            "NumPy arrays given to fit, or a tf.distribute strategy, train otherwise: they were not measured.",
        ]
    else:
        heading = "To train with it:" if script is not None else "In your training code:"
        lines = ["", heading, *(f"    {each}" for each in usage(recipe, path, tuned))]
    for line in lines:
        say(line, console)


def resume_command(tuned: str, directory: Path, to_repeat: Sequence[str] = (), *, seconds: float | None = None) -> str:
    """The shell command that goes on with a run: for so many seconds, or for what is left of its own budget."""
    words = ["autotune", "tune", tuned, "--resume", str(directory)]
    words += [] if seconds is None else ["--budget", f"{seconds:.0f}s"]
    return one_line(shlex.join([*words, *to_repeat]))


def show_diff(diff: str, rest: Sequence[str]) -> None:
    """An edit of a script, as `patch` reads it; and what only `autotune run` does."""
    for line in diff.splitlines():
        terminal().print(Text(line), soft_wrap=True)
    if not diff:
        say("Nothing in the script itself is to be changed.")
    if rest:
        note(f"not in this edit, as it takes more than a constant: {', '.join(rest)}; autotune run sets it")


def show_verification(verification: Verification) -> None:
    """The finding, the claim, and what was measured."""
    console = terminal()
    found = verification.finding
    console.print()
    if verification.claimed is not None:
        say(f"claimed   {ratio(verification.claimed)}", console)
        processes = f" from {verification.instances} fresh processes a side" if verification.instances else ""
        say(f"measured  {ratio(verification.measured)}{processes}", console)
    style = "bold green" if found is ClaimResult.HOLDS else "bold red"
    say(f"{found}: {verification.reason}.", console, style=style)
