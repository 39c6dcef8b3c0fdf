"""Print to a terminal or a pipe: lines, figures, tables, errors, and a run's progress.

On a terminal a status block stands below the lines of the finished trials; elsewhere there are the lines alone. Events
draw between slices, so that drawing takes no processor time from them. After 15 s of silence one more line is drawn.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from autotune.data.errors import AutotuneError
from autotune.data.figures import Interval
from autotune.data.printable import duration, first_line, one_line, plural, rate_text
from autotune.data.record import Outcome, Phase, Standing, TrialRecord
from autotune.stats.disturbance import CAUSES
from autotune.tuning.events import (
    Began,
    Event,
    Notice,
    PairMeasured,
    RunBegan,
    StepsBegan,
    TrialBegan,
    TrialEnded,
    TrialMeasured,
)

LONGEST_SILENCE_SECONDS = 15.0
TICK_SECONDS = 1.0  # how often the silence is measured
_GAP = 3  # columns of a terminal between those of a table
_LEAST_LAST = 20  # columns in which the last column of a table can be read
_STANDS = {
    Standing.OPEN: "not decided after",
    Standing.OUT_OF_TIME: "not decided after",
    Standing.CONFIRMED: "confirmed in",
    Standing.NOT_SHOWN: "no gain shown after",
    Standing.UNSTABLE: "unstable after",
}


def terminal() -> RichConsole:
    """Return standard output; 120 columns wide and plain if it is no terminal, as in a notebook."""
    if sys.stdout.isatty():
        return RichConsole(highlight=False)
    return RichConsole(highlight=False, width=120, force_terminal=False, force_jupyter=False, color_system=None)


def messages() -> RichConsole:
    """Return standard error, which takes everything but results."""
    return RichConsole(stderr=True, highlight=False)


def say(text: object, console: RichConsole | None = None, *, style: str = "") -> None:
    """Print one plain line, as long as it is: users' strings reach the terminal as text only."""
    (console or terminal()).print(Text(one_line(text), style=style), soft_wrap=True)


def note(text: object) -> None:
    """Print one plain line on standard error: standard output may be the file that it is about."""
    say(text, messages())


def show_error(error: AutotuneError) -> None:
    """Print the problem, the next step, and the user's own traceback if there is one, on standard error."""
    console = messages()
    say(f"autotune: {error.message}", console, style="bold red")
    if error.hint:
        say(error.hint, console)
    for line in error.detail.splitlines():
        if line and not line.startswith(" ") and line in error.message:
            continue  # a traceback ends with the exception, which the message holds; lines of code in it are indented
        say(line, console, style="dim")


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    console: RichConsole,
    *,
    ruled: bool = True,
    numbers: Collection[str] = (),
) -> None:
    """Print a table; a block for each row where a terminal is too narrow for all but the last column.

    Away from a terminal it is as wide as it is, so that nothing is cut or folded in a pipe. A line stands below the
    headings if it is `ruled`. The columns `numbers` are aligned to the right.
    """
    texts = [[cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in row] for row in rows]
    widths = [max(cell.cell_len for cell in column) + _GAP for column in zip(map(Text, headings), *texts, strict=True)]
    if console.is_terminal and sum(widths[:-1]) + _LEAST_LAST > console.width:
        for first, *rest in texts:
            say(f"{headings[0]} {first.plain}".strip(), console, style="bold")
            block = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
            for name, cell in zip(headings[1:], rest, strict=True):
                block.add_row(f"  {name}", cell)
            console.print(block)
        return
    columns = [Column(name, justify="right" if name in numbers else "left", overflow="fold") for name in headings]
    made = Table(*columns, box=box.SIMPLE_HEAD if ruled else None, show_edge=False, pad_edge=ruled, padding=(0, 1))
    for row in texts:
        made.add_row(*row)
    if console.is_terminal:
        console.print(made)
    else:
        console.width = max(console.width, sum(widths))
        with console.capture() as captured:
            console.print(made)
        for line in captured.get().splitlines():
            console.print(Text(line.rstrip()), soft_wrap=True)


# -------------------------------------------------------------------------------------------------- figures


def ratio(interval: Interval | None) -> str:
    """Return `×2.57 (2.28 to 2.90)`, or a dash."""
    return "–" if interval is None else interval.shown()


def speed(interval: Interval | None) -> str:
    """Return `×2.57`, or `×2.57 (noisy)` if the interval spans a factor of two or more; a dash if nothing is known."""
    if interval is None:
        return "–"
    vague = interval.low <= 0 or interval.high >= 2.0 * interval.low
    return f"×{interval.value:.2f}" + (" (noisy)" if vague else "")


# ------------------------------------------------------------------------------------------------- progress


class Progress:
    """Draw a run's events: an observer for `tune`, and a context manager. `budget`: seconds, until the run says."""

    def __init__(
        self, console: RichConsole | None = None, *, budget: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or terminal()
        self._clock = clock
        self._began = clock()
        self.directory: Path | None = None
        self._budget = budget
        self._current = ""
        self._estimate = ""
        self._measured: dict[int, tuple[float, str]] = {}  # speed-ups and changes by trial
        self._failures: Counter[str] = Counter()
        self._widths: dict[int, float] = {}  # of the intervals of confirmations, as ratios of their bounds
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._drawing = threading.RLock()
        self._ended = threading.Event()
        self._drawn_at = self._current_since = self._began

    def __enter__(self) -> Progress:
        """Begin drawing."""
        if self._console.is_terminal:
            self._live.start()
        threading.Thread(target=self._watch_silence, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the status block away."""
        self._ended.set()
        with self._drawing:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Draw one event."""
        with self._drawing:
            before = self._current
            self._draw(event)
            if isinstance(event, StepsBegan) or self._current != before:
                self._current_since = self._clock()
            if self._live.is_started:
                self._live.update(self._status(), refresh=True)

    def _watch_silence(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self.break_silence()

    def break_silence(self) -> None:
        """Print the current activity if nothing was printed for 15 s."""
        with self._drawing:
            now = self._clock()
            if self._ended.is_set() or now - self._drawn_at < LONGEST_SILENCE_SECONDS:
                return
            doing = self._current or "deciding what comes next"
            since = f"for {now - self._current_since:.0f} s"
            said = ", ".join(filter(None, (doing, self._estimate, since)))
            self._line(Text(f"{self._stamp()}  … {said}", style="dim"))
            if self._live.is_started:
                self._live.update(self._status(), refresh=True)

    def _draw(self, event: Event) -> None:
        if isinstance(event, RunBegan):
            self.directory = event.directory
            self._budget = event.budget
            self._began = self._clock() - event.spent
            about = f"budget {duration(event.budget)}, run directory {one_line(event.directory)}"
            self._line(Text(f"{one_line(event.workload)}: {about}"))
        elif isinstance(event, Began):
            self._current, self._estimate = one_line(event.text), ""
            if event.shown:
                self._line(Text(f"{self._stamp()}  {one_line(event.text)}"))
        elif isinstance(event, TrialBegan):
            self._current, self._estimate = f"trial {event.trial}: {one_line(event.changes)}", "starting"
        elif isinstance(event, StepsBegan):
            self._estimate = "in its first steps"
        elif isinstance(event, TrialMeasured):
            self._estimate = f"{ratio(event.speedup)} after {event.pairs} pairs"
        elif isinstance(event, PairMeasured):
            sides = f"{plural(event.processes, 'process')} a side"
            self._estimate = sides if event.speedup is None else f"{sides}: {ratio(event.speedup)}"
            if event.speedup is not None and event.speedup.low > 0:
                width = event.speedup.high / event.speedup.low
                if width > self._widths.setdefault(event.trial, width):  # its bounds would only confuse
                    self._estimate = f"{sides}: ×{event.speedup.value:.2f}, still noisy"
                self._widths[event.trial] = width
            self._line(Text(f"{self._stamp()}  confirm  {event.trial:>3}  {self._estimate}"))
        elif isinstance(event, TrialEnded):
            self._trial_ended(event)
        elif isinstance(event, Notice):
            self._line(Text(f"{self._stamp()}  note: {one_line(event.text)}", style="yellow"))

    def _trial_ended(self, event: TrialEnded) -> None:
        record = event.record
        if not record.outcome.measured:
            self._failures[str(record.outcome)] += 1
        if record.phase is Phase.SEARCH:
            self._measured.pop(record.trial, None)  # another look at it says more than the first
            if record.outcome is Outcome.OK and record.speedup is not None:
                self._measured[record.trial] = record.speedup.value, one_line(event.changes)
        if record.looks and record.speedup is not None:  # fresh processes say more than the search
            self._measured[record.looks[-1].candidate] = record.speedup.value, one_line(event.changes)
        if record.phase is Phase.BASELINE and not record.outcome.measured:  # the error that follows says why
            record = record.model_copy(update={"reason": ""})
        self._line(trial_line(record, event.changes, stamp=self._stamp(), unit=event.unit))
        self._current = self._estimate = ""

    def _stamp(self) -> str:
        return f"{duration(self._clock() - self._began):>5}"

    def _line(self, text: Text) -> None:
        self._drawn_at = self._clock()
        self._console.print(text, soft_wrap=True)

    def _status(self) -> Table:
        spent = self._clock() - self._began
        best = "none yet"
        if self._measured and max(self._measured.values())[0] > 1:
            best = "×{:.2f}  {}".format(*max(self._measured.values()))
        failures = ", ".join(f"{count} {name}" for name, count in sorted(self._failures.items()))
        grid = Table.grid(padding=(0, 2))
        grid.add_row("now", Text(self._current or "–", overflow="ellipsis", no_wrap=True))
        grid.add_row("speed", Text(self._estimate or "–"))
        grid.add_row("best so far", Text(best, overflow="ellipsis", no_wrap=True))
        grid.add_row("failed", Text(failures or "none"))
        grid.add_row("left", Text(f"{duration(self._budget - spent)} of {duration(self._budget)}"))
        done = min(spent, self._budget)
        grid.add_row("", ProgressBar(total=max(self._budget, 1.0), completed=done, width=40))
        return grid


def trial_line(record: TrialRecord, changes: str, *, stamp: str, unit: str = "samples") -> Text:
    """Return a finished trial as one line: when, which, how fast, what."""
    text = Text(f"{stamp}  {record.phase:<8} {record.trial:>3}  ")
    if record.outcome is Outcome.OK:
        shown = speed(record.speedup)
        if record.looks and record.looks[-1].standing is Standing.CONFIRMED:
            shown = shown.removesuffix(" (noisy)")  # its interval is what the confirmation rests on
        if record.speedup is None and not record.pairs and record.throughput is not None:
            shown = f"{rate_text(record.throughput.value)} {unit}/s"
        if record.ablation is not None:
            shown = f"gives {speed(record.ablation.gain)}"
        text.append(f"{shown:<18}", style="green" if record.speedup and record.speedup.low > 1 else "")
    elif record.outcome is Outcome.PRUNED:
        text.append(f"{speed(record.speedup):<18}", style="dim")
    else:
        text.append(f"{record.outcome:<18}", style="red")
    text.append(f"  {one_line(changes if record.ablation is None else record.ablation.knob)}")
    for looks in record.looks[-1:] if record.outcome.measured else ():
        processes = plural(len({pair.instance for pair in record.pairs}), "fresh process")
        text.append(f"  ({_STANDS[looks.standing]} {processes} a side)")
    if record.reason and not record.outcome.measured:
        text.append(f"  ({one_line(first_line(record.reason), longest=160)})", style="dim")
    discarded = Counter(pair.disturbed_by for pair in record.pairs if pair.disturbed)
    for cause, count in discarded.items():
        why = "" if cause is None else f": {CAUSES[cause]}"
        text.append(f"  ({count} of {len(record.pairs)} pairs discarded{why})", style="dim")
    if record.outcome.measured and record.settled is False:
        text.append("  (had not reached a steady speed)", style="dim")
    return text
