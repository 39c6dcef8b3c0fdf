"""Print how a run ends, in this order: verdict, changes, costs, what to watch, what was not checked, how to use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.text import Text

from autotune.data.facts import ScriptFacts, Trains
from autotune.data.printable import duration, memory_size, rate_text, time_in_words
from autotune.front.console import note, print_table, ratio, say, terminal
from autotune.recipe.advice import describe_candidate, learning_caveats, verdict_in_words
from autotune.recipe.next_steps import next_steps
from autotune.recipe.waterfall import EXPLANATION, waterfall
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS
from autotune.stats.deciding import ClaimResult, Verdict
from autotune.stats.stability import THROTTLING

if TYPE_CHECKING:
    from autotune.recipe.evidence import Watch
    from autotune.recipe.recipe import Recipe
    from autotune.tuning.verify import Verification


def show_recipe(recipe: Recipe, path: Path, console: RichConsole | None = None) -> None:
    """Print all of a run's end except how to use the recipe."""
    console = console or terminal()
    evidence = recipe.evidence
    faster = evidence.verdict is Verdict.FASTER
    console.print()
    say(verdict_in_words(recipe), console, style="bold green" if faster else "bold")
    for sentence in evidence.advice[:1]:  # why it is slow
        say(sentence, console)
    if recipe.candidate is not None and not faster:
        say(f"Best candidate: {describe_candidate(recipe.candidate, Configuration(recipe.baseline))}.", console)
    width = max((len(heading) for heading, _ in recipe.answers), default=0) + 3
    for heading, text in recipe.answers:
        say(f"{f'{heading}:' if heading else '':<{width}}{text}", console)
    say(f"Baseline: {_baseline_in_words(recipe)}.", console)
    headings = ("", "baseline", "recommended") if recipe.changes else ("", "baseline")
    rows = [row[: len(headings)] for row in _rows(recipe)]
    console.print()
    print_table(headings, rows, console)
    console.print()
    for sentence in learning_caveats(recipe):
        say(sentence, console)
    if steps := waterfall(recipe):
        print_table(("change", "gives"), [(step.name, step.gain.shown()) for step in steps], console)
        say(EXPLANATION, console)
    if evidence.break_even_samples:
        say(f"The longer compile time is earned back after {evidence.break_even_samples:,} samples.", console)
    if evidence.watch is not None:
        say(_watch_in_words(evidence.watch, recipe.unit), console)
    for check in evidence.stability.checks:
        if not check.passed:
            say(f"Failed: {check.name}: {check.detail}", console, style="red")
        elif check.name == THROTTLING and check.value:
            say(f"Note: {check.name}: {check.detail}", console)
    if unchecked := evidence.stability.not_checked:
        say("Not checked:", console)
        for gap in unchecked:
            say(f"  - {gap}", console)
    for sentence in evidence.advice[1:]:
        say(sentence, console)
    if saving := _saving_in_words(recipe):
        say(saving, console)
    say(f"Recipe: {path}", console)


def _baseline_in_words(recipe: Recipe) -> str:
    """Return how the baseline trains: what the claim is against, and what a recipe without changes stands for."""
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
    """Return what changes, then the speed, then what it costs; of the baseline and of the recommendation."""
    evidence, now = recipe.evidence, recipe.baseline
    energies = evidence.baseline_joules_per_sample, evidence.joules_per_sample
    before, after = evidence.baseline_peak_memory_bytes, evidence.peak_memory_bytes
    throughputs = (
        rate.shown("", ",.0f" if rate.value >= 10 else ".2g")
        for rate in (evidence.baseline_throughput, evidence.throughput)
    )
    compiling = [
        "–" if seconds is None else f"{seconds:.1f} s"
        for seconds in (evidence.baseline_compile_seconds, evidence.compile_seconds)
    ]
    return [
        *((name, format_value(now[name]), format_value(value)) for name, value in recipe.changes.items()),
        (f"{recipe.unit}/s", *throughputs),
        *([("energy/sample", *map(_energy, energies))] if any(energies) else []),
        ("peak host memory", memory_size(before.host), memory_size(after.host)),
        *(
            [("peak device memory", memory_size(before.device), memory_size(after.device))]
            if after.device is not None
            else []
        ),
        *([("compile time", *compiling)] if {*compiling} - {"–", "0.0 s"} else []),
    ]


def _energy(joules: float | None) -> str:
    return "–" if joules is None else f"{joules:.3g} J" if joules >= 1 else f"{1e3 * joules:.3g} mJ"


def _watch_in_words(watch: Watch, unit: str) -> str:
    if watch.failure:
        return f"It failed while it trained without a pause (`--soak`): {watch.failure}."
    rate = "" if watch.throughput is None else f" at {rate_text(watch.throughput.value)} {unit}/s"
    failed = [check.detail for check in watch.checks if not check.passed]
    sound = "no memory leak and no hang"
    if not all(check.tells for check in watch.checks):
        sound = "no hang; it was too short to see whether memory grows"
    found = "; ".join(failed) if failed else sound
    return f"It trained for {watch.seconds:.0f} s without a pause{rate} (`--soak`): {found}."


def _saving_in_words(recipe: Recipe) -> str:
    evidence, workload = recipe.evidence, recipe.workload
    ends_early = "" if workload.train_samples is not None or workload.script is None else workload.script.ends_early
    samples = evidence.examples_per_epoch if ends_early else workload.train_samples
    if samples is None or not recipe.changes:
        return ""
    script = workload.script or ScriptFacts(trains=Trains.FIT, baseline={})
    rates = evidence.baseline_throughput.value, evidence.throughput.value
    before, after = (script.total_seconds(samples, rate, evidence.examples_per_epoch) for rate in rates)
    writing = after - samples / rates[1]
    omitted = f"{time_in_words(writing)} of it for" if writing else "without the time of"
    writers = f", {omitted} {', '.join(script.left_out)}" if script.left_out else ""
    part = evidence.part_of_epoch
    if ends_early:
        whole = f"If it trains like {part} throughout, an epoch" if part else "An epoch"
        times = f"{whole} takes {time_in_words(after)} instead of {time_in_words(before)}{writers}"
        return f"{times}. {ends_early} may end your training early, so no total is claimed."
    spent = recipe.created_by.spent_seconds
    saved = before - after
    cost = f"Tuning took {duration(spent)}"
    if saved > spent:
        cost += f", and pays for itself after {duration(spent * after / saved)} of training"
    times = f"takes {duration(after)} instead of {duration(before)}{writers}"
    where = f"If all of an epoch trains like {part}, your" if part else "Your"
    return f"{where} training of {samples:,} samples {times}. {cost}."


def show_usage(
    recipe: Recipe, path: Path, *, tuned: str, to_repeat: Sequence[str] = (), console: RichConsole | None = None
) -> None:
    """Print the lines that training code needs, or the command that continues the run. `tuned`: the workload."""
    console = console or terminal()
    if recipe.changes:
        say("", console)
    for heading, lines in next_steps(recipe, path, tuned, to_repeat):
        say(heading, console)
        for line in lines:
            say(f"    {line}", console)


def show_diff(recipe: Recipe, diff: str, rest: Sequence[str]) -> None:
    """Print an edit of a script, as `patch` reads it; what it omits, and the speed that takes another learning rate."""
    for line in diff.splitlines():
        terminal().print(Text(line), soft_wrap=True)
    if not diff and not rest:
        say("The script itself needs no change.")
    for omitted in rest:
        note(f"this edit omits {omitted}: `autotune run` sets it, and no constant of the script does")
    rule = recipe.learning_rate_rule
    if rule is not None and rule.rule != "as is":
        note(f"{verdict_in_words(recipe)} The speed was measured with that rate.")


def show_verification(verification: Verification) -> None:
    """Print the finding, the claim, and what was measured."""
    console = terminal()
    found = verification.finding
    console.print()
    if verification.claimed is not None:
        say(f"claimed   {ratio(verification.claimed)}", console)
        processes = f" from {verification.instances} fresh processes a side" if verification.instances else ""
        say(f"measured  {ratio(verification.measured)}{processes}", console)
    style = "bold green" if found is ClaimResult.HOLDS else "bold red"
    say(f"{found}: {verification.reason}.", console, style=style)
