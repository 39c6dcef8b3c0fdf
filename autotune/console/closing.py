"""A run's end, in this order: verdict, changes, costs, what to watch, what was not checked, how to use it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from autotune.console.text import clean, duration, note, ratio, say, size, terminal
from autotune.recipe.apply import environment
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS
from autotune.stats.deciding import EndedBy, Finding, Verdict

if TYPE_CHECKING:
    from autotune.recipe.evidence import Evidence, Watch
    from autotune.recipe.recipe import LearningRate, Recipe
    from autotune.stats.intervals import Interval
    from autotune.tuning.verifying import Verification


def show_recipe(recipe: Recipe, path: Path, console: RichConsole | None = None) -> None:
    """All of a run's end but how to use the recipe."""
    console = console or terminal()
    evidence = recipe.evidence
    console.print()
    if evidence.verdict is Verdict.FASTER:
        claim = f"Faster: {ratio(evidence.speedup)} with 95% confidence"
        processes = f"{evidence.confirmation.processes} fresh processes a side"
        say(f"{claim}, from {processes}.", console, style="bold green")
    else:
        _show_why_not(recipe, console)
    say(f"Baseline: {_baseline_in_words(recipe)}.", console)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    headings = ("", "baseline", "recommended") if recipe.changes else ("", "baseline")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for name, values in _rows(recipe).items():
        table.add_row(name, *values[: len(headings) - 1])
    console.print(table)
    console.print()
    _show_what_to_watch(recipe, console)
    if evidence.stability.not_checked:
        say("Not checked:", console)
        for each in evidence.stability.not_checked:
            say(f"  - {each}", console)
    for each in evidence.advice:
        say(each, console)
    if worth := _worth(recipe):
        say(worth, console)
    say(f"Recipe: {path}", console)


def _baseline_in_words(recipe: Recipe) -> str:
    """How the baseline trains: what the claim is against, and what a recipe without changes stands for."""
    workload, size = recipe.workload, recipe.baseline["batch_size"]
    dropping = ", drop_remainder=True" if workload.drop_remainder else ""
    if workload.script is not None:
        return f"{workload.name} as it is, in batches of {size}"
    data = f"dataset(config), batches of {size}," if workload.batched else f"dataset().batch({size}{dropping})"
    named = [
        f"{name}={format_value(value)}"
        for name, value in recipe.baseline.items()
        if value not in (None, KNOBS[name].default) and name != "batch_size"
    ]
    return f"model.fit on {data} on one device, {', '.join(named) or 'all else by default'}"


def _rows(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """What changes, then the speed, then what it costs; baseline and recommendation."""
    evidence = recipe.evidence
    rows = {
        name: (
            "–" if recipe.baseline.get(name) is None else format_value(recipe.baseline[name]),
            format_value(recipe.configuration[name]),
        )
        for name in recipe.changes
    }
    before, after = evidence.baseline_peak_memory_bytes, evidence.peak_memory_bytes
    rows["samples/s"] = _rate(evidence.baseline_throughput), _rate(evidence.throughput)
    rows["peak host memory"] = size(before.host), size(after.host)
    if after.device is not None:
        rows["peak device memory"] = size(before.device), size(after.device)
    rows["compile time"] = _seconds(evidence.baseline_compile_seconds), _seconds(evidence.compile_seconds)
    return rows


def _rate(rate: Interval) -> str:
    bounds = f" ({rate.low:,.0f} to {rate.high:,.0f})" if rate.low < rate.high else ""
    return f"{rate.value:,.0f}{bounds}"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f} s"


def _show_why_not(recipe: Recipe, console: RichConsole) -> None:
    best = recipe.evidence.best_candidate
    say(_verdict_in_words(recipe.evidence), console, style="bold")
    if best is None:
        return
    changes = Configuration(best.configuration).describe(relative_to=Configuration(recipe.baseline))
    told = ""
    if best.speedup is not None:
        told = f"{ratio(best.speedup)}; "
    elif best.search_speedup is not None:
        told = f"×{best.search_speedup:.2f} (search only); "
    say(f"Best candidate: {changes}: {told}{best.reason}.", console)


def _verdict_in_words(evidence: Evidence) -> str:
    tried = f"{evidence.candidates or 'no'} candidate{'' if evidence.candidates == 1 else 's'} tried"
    if evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN:
        if evidence.ended_by is EndedBy.EXHAUSTED:
            tried += ", none is left"
        if evidence.excluded_gain is None:
            return f"No significant gain: no candidate could be measured ({tried}). Keep what you have."
        # Rounded up: a smaller bound would claim too much.
        excluded = math.ceil(round(100 * evidence.excluded_gain, 6))
        return f"No significant gain: gains above {excluded}% are excluded ({tried}). Keep what you have."
    if evidence.verdict is Verdict.UNSTABLE:
        return f"Unstable: every faster candidate failed or broke a stability rule ({tried}). Keep what you have."
    why = "the run was stopped" if evidence.ended_by is EndedBy.INTERRUPTED else "the budget ended"
    return f"Undecided: {why} before the answer was settled ({tried})."


def _show_what_to_watch(recipe: Recipe, console: RichConsole) -> None:
    evidence = recipe.evidence
    if recipe.learning_rate is not None:
        _show_learning_rate(recipe.learning_rate, recipe, console)
    if evidence.break_even_samples:
        say(f"The longer compile time is earned back after {evidence.break_even_samples:,} samples.", console)
    if evidence.watch is not None:
        say(_watched(evidence.watch), console)
    for check in evidence.stability.checks:
        if not check.passed:
            say(f"Failed: {check.name}: {check.detail}", console, style="red")


def _show_learning_rate(note: LearningRate, recipe: Recipe, console: RichConsole) -> None:
    before, after = recipe.baseline["batch_size"], recipe.configuration["batch_size"]
    say(
        f"The batch size is {note.batch_ratio:g} times the baseline's. Usual rules multiply the learning rate by "
        f"{note.sqrt_scale:.2f} (Adam) or {note.linear_scale:g} (SGD). Compare the held-out loss before a long "
        "training.",
        console,
    )
    script = recipe.workload.script
    if script is not None and script.schedule is not None:
        say(
            f"The learning rate follows a {script.schedule} by steps, and an epoch has other steps now: scale them.",
            console,
        )
    losses = note.losses
    if losses is None:
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("batch", "learning rate", f"training loss after {losses.examples:,} examples"):
        table.add_column(heading)
    table.add_row(str(before), "as it is", f"{losses.baseline:.4g} ± {losses.baseline_spread:.2g}")
    for scale, loss in (
        ("as it is", losses.unscaled),
        (f"× {note.sqrt_scale:.2f}", losses.sqrt_scaled),
        (f"× {note.linear_scale:g}", losses.linear_scaled),
    ):
        table.add_row(str(after), scale, "–" if loss is None else f"{loss:.4g}")
    console.print()
    console.print(table)
    console.print()


def _watched(watch: Watch) -> str:
    if watch.failure:
        return f"It failed while it trained without a pause (`--soak`): {watch.failure}."
    rate = "" if watch.throughput is None else f" at {watch.throughput.value:,.0f} samples/s"
    failed = [each.detail for each in watch.checks if not each.passed]
    told = all(each.tells for each in watch.checks)
    sound = "no memory leak and no hang" if told else "no hang; too little was seen to tell whether memory grows"
    found = "; ".join(failed) if failed else sound
    return f"It trained for {watch.seconds:.0f} s without a pause{rate} (`--soak`): {found}."


def show_usage(recipe: Recipe, path: Path, *, tuned: str, console: RichConsole | None = None) -> None:
    """The lines that training code needs, or the command that goes on. `tuned` is the workload as the user named it."""
    console = console or terminal()
    seconds = recipe.evidence.go_on_seconds
    if seconds is not None:
        say("To go on with what was measured:", console)
        say(f"    {resume_command(tuned, path.parent, seconds=seconds)}", console)
        return
    if not recipe.changes:
        if recipe.workload.script is not None:
            say("The recipe is the baseline: run the script as it is.", console)
            return
        say("The recipe is the baseline. Training code that trains like it needs no change.", console)
        say("NumPy arrays given to fit, or a tf.distribute strategy, train otherwise: they were not measured.", console)
        return
    if recipe.workload.script is not None:
        console.print()
        say("To train with it:", console)
        given = " ".join(map(shlex.quote, recipe.workload.args))
        command = f"autotune run {shlex.quote(str(path))} {shlex.quote(tuned)} {given}".rstrip()
        console.print(Text(clean(f"    {command}")), soft_wrap=True)
        return
    at_import = environment(recipe.configuration)
    before = "import tensorflow" if at_import else "the first tensor, dataset or model"
    lines = [
        f"recipe = autotune.Recipe.load({_in_python(path)})",
        f"recipe.apply()                                   # before {before}",
        "model.compile(optimizer, loss, **recipe.compile_args())",
        "model.fit(**recipe.fit_args(dataset), epochs=…)",
    ]
    if recipe.workload.takes_config:
        lines.insert(3, "dataset = make_dataset(recipe.dataset_config)    # what dataset(config) was given")
    console.print()
    say("In your training code:", console)
    for line in lines:
        console.print(Text(f"    {line}"), soft_wrap=True)


def show_diff(diff: str, rest: Sequence[str], console: RichConsole | None = None) -> None:
    """An edit of a script, as `patch` reads it; and what only `autotune run` does."""
    console = console or terminal()
    for line in diff.splitlines():
        console.print(Text(line), soft_wrap=True)
    if not diff:
        say("Nothing in the script itself is to be changed.", console)
    if rest:
        note(f"not in this edit, as it takes more than a constant: {', '.join(rest)}; autotune run sets it")


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


def resume_command(tuned: str, directory: Path, *, seconds: float | None = None) -> str:
    """The shell command that goes on with a run: for so many seconds, or for what is left of its own budget."""
    command = f"autotune tune {shlex.quote(tuned)} --resume {shlex.quote(str(directory))}"
    return clean(command if seconds is None else f"{command} --budget {seconds:.0f}s")


def _in_python(path: Path) -> str:
    """The path as a literal: code to be copied must stay that line, whatever the file is called."""
    text = str(path)
    return f'"{text}"' if text.isprintable() and not set(text) & {'"', "\\"} else repr(text)


def show_verification(verification: Verification, console: RichConsole | None = None) -> None:
    """The finding, the claim, and what was measured."""
    console = console or terminal()
    found = verification.finding
    console.print()
    if verification.claimed is not None:
        say(f"claimed   {ratio(verification.claimed)}", console)
        processes = f" from {verification.instances} fresh processes a side" if verification.instances else ""
        say(f"measured  {ratio(verification.measured)}{processes}", console)
    style = "bold green" if found is Finding.HOLDS else "bold red"
    say(f"{found}: {verification.reason}.", console, style=style)
