"""The only module that prints: progress while a run goes on, tables and errors afterwards.

On a terminal a status block stands below the lines of the finished trials; elsewhere there are the lines
alone. Nothing is redrawn while a slice is measured: drawing would take processor time from it.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console as RichConsole
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotune.errors import AutotuneError
from autotune.printable import first_line, one_line
from autotune.recipe.apply import environment
from autotune.record import Interval, Outcome, Phase, Standing, TrialRecord
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS
from autotune.stats.deciding import EndedBy, Finding, Verdict
from autotune.tuning.progress import (
    Began,
    Event,
    Notice,
    RunBegan,
    TrialBegan,
    TrialEnded,
    TrialMeasured,
)

if TYPE_CHECKING:
    import pandas

    from autotune.recipe.recipe import Estimate, Evidence, LearningRate, Recipe, Watch
    from autotune.report.compare import RunSummary
    from autotune.run_directory import SearchSpaceRecord
    from autotune.tuning.verifying import Verification

WIDTH_WITHOUT_TERMINAL = 120
VAGUE = 2.0
"""An interval that spans this factor says next to nothing."""


def clean(text: object) -> str:
    """`text` on one line and without control characters: users' strings reach the terminal as text only."""
    return one_line(text)


def clean_lines(text: str) -> str:
    """`text` without control characters, its line breaks kept."""
    return "\n".join(clean(line) for line in text.splitlines())


def ratio(interval: Interval | None) -> str:
    """`×2.57 (2.28 to 2.90)`, or a dash."""
    if interval is None:
        return "–"
    return f"×{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def speed(interval: Interval | None) -> str:
    """`×2.57`, marked where the interval spans a factor of two or more; a dash where nothing is known."""
    if interval is None:
        return "–"
    vague = interval.low <= 0 or interval.high >= VAGUE * interval.low
    return f"×{interval.value:.2f}" + (" (uncertain)" if vague else "")


def estimated_ratio(estimate: Estimate) -> str:
    """`×2.57 (2.28 to 2.90)` of a recipe's estimate; bounds that are the figure itself are no interval."""
    low, high = estimate.ci95
    return f"×{estimate.value:.2f}" + (f" ({low:.2f} to {high:.2f})" if low < high else "")


def size(count: int | None) -> str:
    """Bytes for people: `607 MiB`."""
    if count is None:
        return "–"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Seconds for people: `1:05`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def terminal() -> RichConsole:
    """Standard output."""
    if sys.stdout.isatty():
        return RichConsole(highlight=False)
    return RichConsole(highlight=False, width=WIDTH_WITHOUT_TERMINAL, force_terminal=False, color_system=None)


# ---------------------------------------------------------------------------------------------- progress


class Progress:
    """Draws a run's events; an observer for `tune`, and a context manager.

    Args:
        console: Where to draw.
        budget: Seconds for everything; that of the run, once it has begun.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        console: RichConsole | None = None,
        *,
        budget: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or terminal()
        self._clock = clock
        self._began = clock()
        self.directory: Path | None = None
        self._budget = budget
        self._workload = ""
        self._current = ""
        self._estimate = ""
        self._measured: dict[int, tuple[float, str]] = {}
        self._failures: Counter[str] = Counter()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Progress:
        """Begin drawing."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the status block away."""
        self._live.stop()

    def __call__(self, event: Event) -> None:
        """Draw one event."""
        if isinstance(event, RunBegan):
            self.directory = event.directory
            self._budget, self._workload = event.budget, clean(event.workload)
            self._began = self._clock() - event.spent
            self._line(
                Text(
                    f"{self._workload}: budget {duration(event.budget)}, run directory {clean(event.directory)}"
                )
            )
        elif isinstance(event, Began):
            self._current, self._estimate = clean(event.text), ""
            self._line(Text(f"{self._stamp()}  {clean(event.text)}"))
        elif isinstance(event, TrialBegan):
            self._current, self._estimate = f"trial {event.trial}: {clean(event.changes)}", "starting"
        elif isinstance(event, TrialMeasured):
            self._estimate = f"{ratio(event.speedup)} after {event.pairs} pairs"
        elif isinstance(event, TrialEnded):
            self._trial_ended(event)
        elif isinstance(event, Notice):
            self._line(Text(f"{self._stamp()}  note: {clean(event.text)}", style="yellow"))
        if self._live.is_started:
            self._live.update(self._status(), refresh=True)

    def _trial_ended(self, event: TrialEnded) -> None:
        record = event.record
        if not record.outcome.measured:
            self._failures[str(record.outcome)] += 1
        if record.phase is Phase.SEARCH:
            self._measured.pop(record.trial, None)  # another look at it says more than the first
            if record.outcome is Outcome.OK and record.speedup is not None:
                self._measured[record.trial] = record.speedup.value, clean(event.changes)
        self._line(trial_line(record, event.changes, stamp=self._stamp()))
        self._current = self._estimate = ""

    def _stamp(self) -> str:
        return f"{duration(self._clock() - self._began):>5}"

    def _line(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _status(self) -> Table:
        spent = self._clock() - self._began
        best = "none yet"
        if self._measured:
            best = "×{:.2f}  {}".format(*max(self._measured.values()))
        failures = ", ".join(f"{count} {name}" for name, count in sorted(self._failures.items()))
        grid = Table.grid(padding=(0, 2))
        grid.add_row("now", Text(self._current or "–", overflow="ellipsis", no_wrap=True))
        grid.add_row("speed", Text(self._estimate or "–"))
        grid.add_row("best", Text(best, overflow="ellipsis", no_wrap=True))
        grid.add_row("failed", Text(failures or "none"))
        left = self._budget - spent
        grid.add_row("left", Text(f"{duration(left)} of {duration(self._budget)}"))
        bar = ProgressBar(total=max(self._budget, 1.0), completed=min(spent, self._budget), width=40)
        grid.add_row("", bar)
        return grid


def trial_line(record: TrialRecord, changes: str, *, stamp: str) -> Text:
    """One finished trial on one line: when, which, how fast, what."""
    text = Text(f"{stamp}  {record.phase:<8} {record.trial:>3}  ")
    if record.outcome is Outcome.OK:
        rate = "" if record.throughput is None else f"{record.throughput.value:,.0f} samples/s"
        shown = speed(record.speedup) if record.speedup is not None else rate
        text.append(f"{shown:<18}", style="green" if record.speedup and record.speedup.low > 1 else "")
    elif record.outcome is Outcome.PRUNED:
        text.append(f"{speed(record.speedup):<18}", style="dim")
    else:
        text.append(f"{record.outcome:<18}", style="red")
    text.append(f"  {clean(changes)}")
    for looks in record.looks[-1:] if record.outcome.measured else ():
        processes = len({pair.instance for pair in record.pairs})
        text.append(f"  ({_STANDS[looks.standing]} after {processes} fresh processes a side)")
    if record.reason and not record.outcome.measured:
        text.append(f"  ({one_line(first_line(record.reason), longest=160)})", style="dim")
    if record.outcome.measured and record.settled is False:
        text.append("  (was still getting faster when it was measured)", style="dim")
    return text


_STANDS = {
    Standing.OPEN: "not decided",
    Standing.OUT_OF_TIME: "not decided",
    Standing.CONFIRMED: "confirmed",
    Standing.NOT_SHOWN: "no gain shown",
    Standing.UNSTABLE: "unstable",
}


# ------------------------------------------------------------------------------------------------ results


def show_recipe(recipe: Recipe, path: Path | None, console: RichConsole | None = None) -> None:
    """Baseline against recommendation, the verdict, and what to do next."""
    console = console or terminal()
    evidence = recipe.evidence
    faster = evidence.verdict == "faster"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    headings = ("", "baseline", "recommendation") if recipe.changes else ("", "baseline")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for name, values in _recipe_rows(recipe).items():
        table.add_row(name, *values[: len(headings) - 1])
    console.print()
    console.print(table)
    console.print()
    if faster:
        processes = f"{evidence.confirmation.processes} fresh processes a side"
        console.print(
            Text(
                f"Faster: {estimated_ratio(evidence.speedup)} with 95% confidence, from {processes}.",
                style="bold green",
            ),
            soft_wrap=True,
        )
    else:
        _show_why_not(recipe, console)
    _show_notes(recipe, console)
    if path is not None:
        console.print(Text(f"Recipe: {clean(path)}"), soft_wrap=True)


def _recipe_rows(recipe: Recipe) -> Mapping[str, tuple[str, str]]:
    evidence = recipe.evidence
    rows = {
        "samples/s": (_rate(evidence.baseline_throughput), _rate(evidence.throughput)),
        "speed-up": ("×1", estimated_ratio(evidence.speedup)),
        "peak host memory": (
            size(evidence.baseline_peak_memory_bytes.host),
            size(evidence.peak_memory_bytes.host),
        ),
        "peak device memory": (
            size(evidence.baseline_peak_memory_bytes.device),
            size(evidence.peak_memory_bytes.device),
        ),
        "compile time": (_seconds(evidence.baseline_compile_seconds), _seconds(evidence.compile_seconds)),
    }
    if evidence.peak_memory_bytes.device is None:
        del rows["peak device memory"]
    if not recipe.changes:
        del rows["speed-up"]
    for name in recipe.changes:
        before = recipe.baseline.get(name)
        rows[name] = (
            "–" if before is None else format_value(before),
            format_value(recipe.configuration[name]),
        )
    return rows


def _rate(estimate: Estimate) -> str:
    low, high = estimate.ci95
    return f"{estimate.value:,.0f}" + (f" ({low:,.0f} to {high:,.0f})" if low < high else "")


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f} s"


def _show_why_not(recipe: Recipe, console: RichConsole) -> None:
    """Why the baseline is recommended, and what came closest to a recommendation."""
    evidence, best = recipe.evidence, recipe.evidence.best_candidate
    console.print(Text(_verdict_in_words(evidence), style="bold"), soft_wrap=True)
    if best is None:
        return
    changes = Configuration(best.configuration).describe(relative_to=Configuration(recipe.baseline))
    told = ""
    if best.speedup is not None:
        told = f"{estimated_ratio(best.speedup)}; "
    elif best.search_speedup is not None:
        told = f"×{best.search_speedup:.2f} (search only); "
    console.print(Text(f"Best candidate: {changes}: {told}{clean(best.reason)}."), soft_wrap=True)


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


def _show_learning_rate(note: LearningRate, recipe: Recipe, console: RichConsole) -> None:
    """What another batch size asks of the learning rate, with the losses of short trainings where there are some."""
    before, after = recipe.baseline["batch_size"], recipe.configuration["batch_size"]
    console.print(
        Text(
            f"The batch size is {note.batch_ratio:g} times the baseline's. Usual rules multiply the learning rate by "
            f"{note.sqrt_scale:.2f} (Adam) or {note.linear_scale:g} (SGD). Compare the held-out loss before a long "
            "training."
        ),
        soft_wrap=True,
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
    """What a watch over the winner showed, in a sentence."""
    if watch.failure:
        return f"It failed while it trained without a pause (`--soak`): {clean(watch.failure)}."
    rate = "" if watch.throughput is None else f" at {watch.throughput.value:,.0f} samples/s"
    failed = [clean(each.detail) for each in watch.checks if not each.passed]
    found = "; ".join(failed) if failed else "no memory leak and no hang"
    return f"It trained for {watch.seconds:.0f} s without a pause{rate} (`--soak`): {found}."


def _show_notes(recipe: Recipe, console: RichConsole) -> None:
    evidence = recipe.evidence
    note = recipe.learning_rate
    if note is not None:
        _show_learning_rate(note, recipe, console)
    if evidence.break_even_samples:
        console.print(
            Text(f"The longer compile time is earned back after {evidence.break_even_samples:,} samples.")
        )
    if evidence.watch is not None:
        console.print(Text(_watched(evidence.watch)), soft_wrap=True)
    failed = [check for check in evidence.stability.checks if not check.passed]
    for check in failed:
        console.print(
            Text(f"Failed: {clean(check.name)}: {clean(check.detail)}", style="red"), soft_wrap=True
        )
    if evidence.stability.not_checked:
        console.print(
            Text(f"Not checked: {clean('; '.join(evidence.stability.not_checked))}."), soft_wrap=True
        )


def show_usage(recipe: Recipe, path: Path, *, tuned: str, console: RichConsole | None = None) -> None:
    """The lines that training code needs; where the recipe is the baseline, the command that goes on, if any.

    Args:
        recipe: What was found.
        path: Its file.
        tuned: The workload, as it was named on the command line.
        console: Where to print.
    """
    console = console or terminal()
    seconds = recipe.evidence.go_on_seconds
    if seconds is not None:
        console.print(Text("To go on with what was measured:"))
        console.print(Text(f"    {resume_command(tuned, path.parent, seconds=seconds)}"), soft_wrap=True)
        return
    if not recipe.changes:
        console.print(Text("The recipe is the baseline: nothing needs to change in your training code."))
        return
    before = (
        "import tensorflow" if environment(recipe.configuration) else "the first tensor, dataset or model"
    )
    lines = [
        f"recipe = autotune.Recipe.load({_in_python(path)})",
        f"recipe.apply()                                   # before {before}",
        "model.compile(optimizer, loss, **recipe.compile_args())",
        "model.fit(**recipe.fit_args(dataset), epochs=…)",
    ]
    if recipe.workload.takes_config:
        lines.insert(3, "dataset = make_dataset(recipe.dataset_config)    # what dataset(config) was given")
    console.print()
    console.print(Text("In your training code:"))
    for line in lines:
        console.print(Text(f"    {line}"), soft_wrap=True)


def resume_command(tuned: str, directory: Path, *, seconds: float | None = None) -> str:
    """The command that goes on with a run, to be pasted into a shell.

    Args:
        tuned: The workload, as it was named on the command line.
        directory: The run's.
        seconds: The budget to go on with; what is left of the run's own when None.
    """
    command = f"autotune tune {shlex.quote(tuned)} --resume {shlex.quote(str(directory))}"
    return clean(command if seconds is None else f"{command} --budget {seconds:.0f}s")


def show_verification(verification: Verification, console: RichConsole | None = None) -> None:
    """The finding, the claim, and what was measured."""
    console = console or terminal()
    found = verification.finding
    console.print()
    if verification.claimed is not None:
        console.print(Text(f"claimed   {ratio(verification.claimed)}"))
        processes = f" from {verification.instances} fresh processes a side" if verification.instances else ""
        console.print(Text(f"measured  {ratio(verification.measured)}{processes}"), soft_wrap=True)
    style = "bold green" if found is Finding.HOLDS else "bold red"
    console.print(Text(f"{found}: {clean(verification.reason)}.", style=style), soft_wrap=True)


def _in_python(path: Path) -> str:
    """The path as a literal: code to be copied must stay that line, whatever the file is called."""
    text = str(path)
    return f'"{text}"' if text.isprintable() and not set(text) & {'"', "\\"} else repr(text)


def show_trials(
    records: Sequence[TrialRecord], baseline: Configuration, console: RichConsole | None = None
) -> None:
    """A run's trials, one line each; the time is what the trial took, not when it ended as in `Progress`."""
    console = console or terminal()
    heading = f"{'took':>5}  {'phase':<8} {'no.':>3}  {'speed-up':<18}  changes"
    console.print(Text(heading, style="bold"), soft_wrap=True)
    for record in records:
        changes = Configuration(record.configuration).describe(relative_to=baseline)
        console.print(trial_line(record, changes, stamp=f"{duration(record.seconds):>5}"), soft_wrap=True)


_HISTORY_COLUMNS = ("run", "trial", "phase", "outcome", "speedup", "throughput", "peak_host_bytes", "reason")


def show_history(frame: pandas.DataFrame, console: RichConsole | None = None) -> None:
    """The main columns of a history, one trial a row; all columns are in the files that `history` writes.

    `settled` is among them where a trial was measured before it had settled.
    """
    console = console or terminal()
    varied = [name for name in KNOBS if name in frame.columns and frame[name].nunique(dropna=False) > 1]
    unsettled = ["settled"] if "settled" in frame.columns and not frame["settled"].fillna(True).all() else []
    columns = [*_HISTORY_COLUMNS[:4], *varied, *_HISTORY_COLUMNS[4:-1], *unsettled, *_HISTORY_COLUMNS[-1:]]
    console.print(Text("  ".join(columns), style="bold"), soft_wrap=True)
    for _, row in frame.iterrows():
        console.print(Text("  ".join(_cell(name, row[name]) for name in columns)), soft_wrap=True)
    console.print(Text(f"{len(frame)} trials"))


def _cell(name: str, value: object) -> str:
    if str(value) in ("<NA>", "nan", "NaT", "None"):
        return "–"
    if name.endswith("_bytes"):
        return size(int(str(value)))
    if isinstance(value, float):
        return f"{value:,.0f}" if name == "throughput" else f"{value:.3f}"
    return clean(str(value))[:80]


def show_knobs(console: RichConsole | None = None) -> None:
    """All knobs, from the table."""
    table = Table("knob", "what", "values", "default", "stage", "numerics", "where", box=box.SIMPLE_HEAD)
    for knob in KNOBS.values():
        table.add_row(
            knob.name,
            knob.summary,
            knob.domain.describe(),
            "the workload's" if knob.default is None else format_value(knob.default),
            knob.stage,
            "may change" if knob.changes_numerics else "same",
            ", ".join(sorted(knob.devices)),
        )
    (console or terminal()).print(table)


def show_space(space: SearchSpaceRecord, size_: int, console: RichConsole | None = None) -> None:
    """A search space as it resolves here."""
    console = console or terminal()
    table = Table("knob", "choices here", box=box.SIMPLE_HEAD)
    for name, choices in space.choices.items():
        table.add_row(name, " ".join(format_value(each) for each in choices))
    for name, why in space.left_out.items():
        table.add_row(name, Text(f"left out: {clean(why)}", style="dim"))
    console.print(table)
    console.print(Text(f"{clean(space.source)}: {size_:,} configurations"), soft_wrap=True)


def show_comparison(summaries: Iterable[RunSummary], console: RichConsole | None = None) -> None:
    """Runs side by side, one row each."""
    console = console or terminal()
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("run", "workload", "machine", "trials", "failed", "claim", "recommended"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "run")
    notes = []
    for each in summaries:
        claim = "no recipe" if each.verdict is None else str(each.verdict)
        if each.verdict is Verdict.FASTER:
            claim += f" {ratio(each.claimed)}"
        table.add_row(
            Text(clean(each.run)),  # text: a string's square brackets would be taken for colours
            Text(clean(each.workload or "–")),
            Text(clean(each.machine_description)),
            str(each.trials),
            str(each.failed),
            claim,
            Text(clean(_recommended(each))),
        )
        if not each.comparable_with_first:
            notes.append(f"{each.run} cannot be held against the first run: {each.why_not}")
    _print_whole(table, console)
    for note in notes:
        console.print(Text(clean(note), style="yellow"), soft_wrap=True)


def _recommended(summary: RunSummary) -> str:
    """What a run recommends; without a recipe nothing, whatever looked best in its search."""
    if summary.recommended_changes is not None:
        return summary.recommended_changes
    return "–" if summary.best_changes is None else f"– (best in the search: {summary.best_changes})"


def _print_whole(table: Table, console: RichConsole) -> None:
    """On a terminal as wide as that is; elsewhere as wide as the table: nothing is cut or folded in a pipe."""
    if not console.is_terminal:
        unbounded = console.options.update(max_width=1 << 16)
        console.width = max(console.width, Measurement.get(console, unbounded, table).maximum)
    console.print(table)


def say(text: str, console: RichConsole | None = None) -> None:
    """One plain line."""
    (console or terminal()).print(Text(clean(text)), soft_wrap=True)


def show_error(error: AutotuneError) -> None:
    """What is wrong, the next step, and the user's own traceback where there is one; on standard error."""
    console = RichConsole(stderr=True, highlight=False)
    console.print(Text(f"autotune: {clean_lines(error.message)}", style="bold red"), soft_wrap=True)
    if error.hint:
        console.print(Text(clean_lines(error.hint)), soft_wrap=True)
    if error.detail:
        console.print(Text(clean_lines(error.detail), style="dim"), soft_wrap=True)


def show_wrong_usage(message: str) -> None:
    """A wrong command line; on standard error."""
    console = RichConsole(stderr=True, highlight=False)
    console.print(Text(f"autotune: {clean(message)}", style="bold red"), soft_wrap=True)
    console.print(Text("`autotune --help` and `autotune COMMAND --help` say what there is."))
