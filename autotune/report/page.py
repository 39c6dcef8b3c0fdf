"""A run as one self-contained page, `report.html`. It shows other people's text as text.

Text and tables are written into the page. Its charts are drawn by the page itself, from figures in it as JSON.
"""

from __future__ import annotations

import html
import json
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from xml.etree.ElementTree import Element

from autotune.data.errors import AutotuneError, RunDirectoryError
from autotune.data.figures import Operation, Profile
from autotune.data.files import write_atomically
from autotune.data.printable import duration, memory_size, one_line, printable
from autotune.data.record import Phase, TrialRecord, baseline_with_ceilings
from autotune.data.run_directory import RunDirectory, RunRecord, left_out
from autotune.recipe.advice import answer_at, resume_command
from autotune.recipe.answer import NOT_PROMISED, WORTH_A_LINE_SECONDS, Answer, Command, Side, answer_of
from autotune.recipe.recipe import Recipe
from autotune.report.charts import (
    EXPLANATION,
    Child,
    Spot,
    Step,
    draw_losses,
    element,
    map_space,
    to_html,
    waterfall,
    with_code,
)
from autotune.space.configuration import Configuration, baseline_of, read_trials
from autotune.stats.deciding import Verdict
from autotune.stats.disturbance import gpu_figures

T = TypeVar("T")
NAME = "report.html"
PARTS = Path(__file__).parent  # of the page: report.html, its style and its script
LONGEST_LOG = 2000  # characters of a failed trial's log
UNKNOWN = "–"
_PLUMBING = re.compile(r"^(while/[^/]*/[^/]*/)+(cond/[^/]*/[^/]*/|while/cond/)*")  # before an operation's own name


def write_page(path: str | Path) -> Path:
    """Write a run's `report.html`, whatever is there of the run, and return the file.

    Raises RunDirectoryError where there is no run, or the page cannot be written.
    """
    directory = RunDirectory(path)
    data = page_data(directory)
    drawn = {"losses": data.losses, "waterfall": [step.model_dump() for step in data.waterfall]}
    parts = {
        "TITLE": html.escape(f"{data.title} · autotune"),
        "STYLE": (PARTS / "report.css").read_text(encoding="utf-8"),
        "BODY": to_html(sections(data)),
        "DATA": json.dumps(drawn, allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": (PARTS / "report.js").read_text(encoding="utf-8"),
    }
    skeleton = (PARTS / NAME).read_text(encoding="utf-8")
    # In one pass: what others have written may hold such a mark, too.
    write_atomically(directory.path / NAME, re.sub(r"<!--([A-Z]+)-->", lambda mark: parts[mark[1]], skeleton))
    return directory.path / NAME


def page_data(directory: RunDirectory) -> PageData:
    """Read what the page shows. Raises RunDirectoryError where there is no run.json to read."""
    missing: list[str] = []

    def read(name: str, how: Callable[[], T], otherwise: T) -> T:
        try:
            return how()
        except (AutotuneError, OSError) as error:
            missing.append(f"{name}: {one_line(error)}")
            return otherwise

    run = directory.read_run()
    damaged: list[RunDirectoryError] = []
    every: list[TrialRecord] = read("trials", lambda: [*map(_keep_one_pair, read_trials(directory, damaged))], [])
    records = [record for record in every if not record.is_repeat]
    if damaged:
        missing.append(f"trials: {left_out(damaged)}")
    recipe: Recipe | None = None
    if directory.recipe_file.exists():
        recipe = read("recipe", lambda: Recipe.load(directory.recipe_file), None)
    else:
        missing.append("recipe: the run has not ended, or was cut off")
    baseline = read("baseline", lambda: baseline_of(directory, run, records), None)
    sides = [side for side in [baseline_with_ceilings(records)] if side is not None]
    if recipe is not None and recipe.changes:  # the trial that its claim is from
        confirmed = [record for record in records if record.phase is Phase.CONFIRM and record.pairs]
        same = [record for record in confirmed if record.configuration == recipe.configuration]
        same.sort(key=lambda record: record.speedup == recipe.evidence.speedup)
        sides += same[-1:]
    return PageData(
        path=directory.path,
        run=run,
        records=records,
        recipe=recipe,
        baseline=baseline,
        sides=sides,
        losses=None if recipe is None else draw_losses(records, recipe, answer_of(recipe)),
        waterfall=() if recipe is None else waterfall(recipe),
        space=map_space(run, every, recipe.configuration if recipe is not None and recipe.changes else None),
        missing=missing,
    )


def _keep_one_pair(record: TrialRecord) -> TrialRecord:
    """Keep one pair of a search's slices: those of a thousand trials take hundreds of megabytes."""
    return record.model_copy(update={"pairs": record.pairs[:1]}) if record.phase is Phase.SEARCH else record


def try_write_page(path: Path) -> str:
    """Write the page; return why that failed, or an empty string: it fails no run."""
    try:
        write_page(path)
    except (RunDirectoryError, OSError, ValueError) as error:
        return f"report.html was not written: {one_line(error)}"
    return ""


# -------------------------------------------------------------------------------------------------------- its sections


@dataclass(frozen=True, kw_only=True)
class PageData:
    """All that the page shows of a run."""

    path: Path  # the run directory
    run: RunRecord
    records: Sequence[TrialRecord]
    recipe: Recipe | None
    baseline: Configuration | None
    sides: Sequence[TrialRecord]  # the baseline's, then the recommendation's if it is another configuration
    losses: dict[str, Any] | None  # over seconds
    waterfall: Sequence[Step]
    space: Mapping[str, Sequence[Spot]]  # the map of the search space
    missing: Sequence[str]  # what could not be read

    @cached_property
    def answer(self) -> Answer | None:
        """The run's answer; None without a recipe."""
        return None if self.recipe is None else answer_at(self.recipe, self.path / "recipe.json", self.reference)

    @property
    def title(self) -> str:
        """The page's title."""
        return one_line(self.run.workload.name if self.run.workload else self.run.run)

    @property
    def unit(self) -> str:
        """The unit of a speed."""
        script = None if self.run.workload is None else self.run.workload.script
        return "samples" if script is None else script.unit

    @property
    def reference(self) -> str:
        """The workload as commands name it."""
        return "SCRIPT" if self.run.workload is None else self.run.workload.reference


def sections(data: PageData) -> Iterator[Element]:
    """Yield the page's elements in order."""
    started = f"{one_line(data.run.started_at)[:16].replace('T', ' ')} UTC"
    yield element("h1", data.title)
    yield element("p", f"{one_line(data.run.run)} · {started}", class_="quiet")
    yield _answer(data.answer)
    yield from _pictures(data)
    yield from _space(data.space)
    if data.records:
        yield _trials(data)
    yield from _to_do(data)
    yield from _before_and_after(data)
    if data.sides:
        yield _profiles(data)
    yield section("Machine and versions", "machine", table(("", ""), _machine(data.run)))


def section(heading: str, name: str, *content: Child) -> Element:
    """Return a section below its heading."""
    return element("section", element("h2", heading, id=name), *content, aria_labelledby=name)


def table(
    headings: Sequence[str], rows: Sequence[Sequence[Child]], numbers: Collection[int] = (), *, is_sorted: bool = False
) -> Element:
    """Return a table that becomes cards on a narrow screen; without any text in its headings it has no head.

    Columns at the places `numbers` are aligned to the right. report.js sorts and filters the one that `is_sorted`.
    """
    kinds = ["number" if place in numbers else None for place in range(len(headings))]
    body = []
    for first, *rest in rows:
        cells = [
            element("td", cell, class_=kind, data_label=heading or None)
            for heading, cell, kind in zip(headings[1:], rest, kinds[1:], strict=True)
        ]
        body.append(element("tr", element("th", first, scope="row"), *cells))
    names = [element("button", text, type="button") if is_sorted else text for text in headings]
    head = [element("th", name, scope="col", class_=kind) for name, kind in zip(names, kinds, strict=True)]
    thead = element("thead", element("tr", *head), class_="sorts" if is_sorted else None) if any(headings) else None
    tbody = element("tbody", *body, id="trial-rows" if is_sorted else None)
    whole = element("table", thead, tbody, class_="cards", id="trial-table" if is_sorted else None)
    return element("div", whole, class_="wide")


def chart(name: str) -> Element:
    """Return the place of a chart that report.js draws."""
    return element("div", "", id=name, class_="chart")


def legend(entries: Sequence[tuple[str, str]]) -> Element:
    """Return a legend: classes of marks, and what they stand for."""
    keys = [element("span", element("i", "", class_=kind), text) for kind, text in entries]
    return element("div", *keys, class_="keys")


# ----------------------------------------------------------------------------------------------- the answer


def _answer(answer: Answer | None) -> Element:
    """Return the speed-up on its own, and both answers and the learning caveats beside it."""
    if answer is None:
        said = element("p", "This run has no recipe.", class_="headline")
        unfinished = element("p", "Unfinished", class_="big words")
        return element("section", element("div", unfinished), element("div", said), class_="answer none")
    answers: list[Child] = []
    for choice in answer.choices:
        first, *rest = map(one_line, choice.said)
        mark = element("small", "recommended") if choice.recommended else None
        answers.append(element("dt", choice.kind.capitalize(), mark))
        answers.append(element("dd", element("strong", first), "".join(f" · {part}" for part in rest)))
    summary: list[Child] = [element("p", one_line(answer.headline), class_="headline")]
    summary += [element("p", *with_code(one_line(answer.diagnosis)), id="diagnosis")] if answer.diagnosis else []
    if answer.candidate:
        candidate = f"{one_line(answer.candidate)}."
        summary.append(element("p", element("strong", "Best candidate: "), candidate, id="candidate"))
    summary += [element("dl", *answers, class_="answers")] if answers else []
    caveats = answer.caveats or ([NOT_PROMISED] if answer.choices else [])
    summary += [element("p", *with_code(one_line(caveat)), class_="caveat") for caveat in caveats]
    figure = [element("p", answer.verdict.value.replace("_", " ").capitalize(), class_="big words")]
    if answer.verdict is Verdict.FASTER:
        figure = [
            element("p", f"×{answer.speedup.value:.2f}", class_="big"),
            element("p", answer.unit),
            element("p", f"{answer.speedup.low:.2f} to {answer.speedup.high:.2f}", class_="quiet"),
            element("p", answer.rests_on, class_="quiet"),
        ]
    if (training := answer.training) is not None and training.before_seconds >= WORTH_A_LINE_SECONDS:
        times = f"{duration(training.before_seconds)} → {duration(training.after_seconds)}"
        summary.append(element("p", f"{training.of}: ", element("strong", times)))
    for command in answer.commands[:1]:
        summary += [element("p", command.heading, class_="quiet"), *_lines(command)]
    return element(
        "section", element("div", *figure), element("div", *summary), class_=f"answer {answer.verdict.value}"
    )


def _lines(command: Command) -> list[Element]:
    return [element("pre", "\n".join(map(one_line, command.lines)))] if command.lines else []


def _to_do(data: PageData) -> Iterator[Element]:
    """Yield the changes, the commands to copy, the advice, and the parts that are missing or were not checked."""
    answer = data.answer
    commands: Sequence[Command] = () if answer is None else answer.commands[1:]
    if answer is None:
        go_on = resume_command(data.reference, data.path)
        commands = [Command(name="go on", heading="To continue it with everything measured so far:", lines=(go_on,))]
    for command in commands:
        yield element("p", command.heading)
        yield from _lines(command)
    for said in () if answer is None else answer.advice:
        yield element("p", *with_code(one_line(said)))
    if answer is not None and answer.unchecked:
        gaps = [element("li", *with_code(one_line(gap))) for gap in answer.unchecked]
        yield element("details", element("summary", f"Not checked ({len(gaps)})"), element("ul", *gaps))
    if data.missing:
        gaps = [element("li", gap) for gap in data.missing]
        yield element("div", element("p", "Missing here:"), element("ul", *gaps), class_="missing")


# ---------------------------------------------------------------------------------------- the first pictures


def _pictures(data: PageData) -> Iterator[Element]:
    """Yield the losses over seconds, beside the way from the baseline to the answer."""
    drawn = []
    if data.losses is not None:
        keys = legend([(curve["kind"], curve["name"]) for curve in data.losses["curves"]])
        drawn.append(section("Losses over the time of the training", "losses", chart("loss-chart"), keys))
    if data.waterfall:
        left_out = data.recipe is not None and data.recipe.evidence.contributions
        about = element("p", EXPLANATION, class_="quiet") if left_out else None
        drawn.append(section("From ×1 to the answer", "changes", chart("waterfall-chart"), about))
    if drawn:
        yield element("div", *drawn, class_="pictures")


def _space(knobs: Mapping[str, Sequence[Spot]]) -> Iterator[Element]:
    """Yield the map of the search space; a value's colour is by the logarithm of its ratio, over the largest one."""
    if not knobs:
        return
    farthest = max((abs(math.log(spot.ratio)) for spots in knobs.values() for spot in spots if spot.ratio), default=0.0)
    rows = []
    for name, spots in knobs.items():
        cells = []
        for spot in spots:
            power = math.log(spot.ratio or 1.0) / (farthest or 1.0)
            kind = ("gain" if power > 0 else "loss") if spot.ratio else "out" if spot.why else "open"
            text = f" ×{spot.ratio:.2f}" if spot.ratio else spot.why and f": {spot.why}"
            share, title = f"--share: {50 * abs(power):.0f}%", None if spot.trial is None else f"trial {spot.trial}"
            classes = " ".join(["spot", kind, *spot.kinds])
            cells.append(element("span", element("b", spot.value), text, class_=classes, style=share, title=title))
        rows.append((name, element("div", *cells)))
    kinds = (("now", "now"), ("recommended", "chosen"), ("ruled out: why", "out"), ("not reached", "open"))
    keys = [element("span", text, class_=f"spot {kind}") for text, kind in kinds]
    said = element("p", "Values with the best speed-up of a trial that has them: ", *keys, class_="quiet")
    yield section("The search space", "space", said, table(("knob", ""), rows))


# -------------------------------------------------------------------------------------------------- figures


def _before_and_after(data: PageData) -> Iterator[Element]:
    """Yield the figures of baseline and recommendation; a row for each figure that one of them has."""
    answer = data.answer
    claimed = [None] * len(data.sides) if answer is None else [answer.baseline, answer.after]  # the claim's figures
    sides = [_figures_of(record, known, data.unit) for record, known in zip(data.sides, claimed, strict=False)]
    if sides:
        rows = [(name, *(side[name] for side in sides)) for name in sides[0]]
        headings = ("", "baseline", "recommended")[: len(sides) + 1]
        known = [row for row in rows if any(cell != UNKNOWN for cell in row[1:])]
        yield section("Before and after", "sides", table(headings, known))


def _figures_of(side: TrialRecord, claimed: Side | None, unit: str) -> dict[str, str]:
    """Return the figures of a trial; those that the answer has are its own."""
    throughput, compiling = side.throughput, side.compile_seconds
    host, device = side.peak_host_bytes, side.peak_device_bytes
    if claimed is not None:
        throughput, compiling = claimed.throughput, claimed.compile_seconds
        host, device = claimed.peak_memory.host, claimed.peak_memory.device
    gpu, ceilings, slowed = gpu_figures(side), side.ceilings, gpu_figures(side)["gpu_slowed_share"]
    return {
        f"{unit}/s": UNKNOWN if throughput is None else throughput.shown("", ",.0f"),
        "joules/sample": _number(gpu["joules_per_sample"], ",.4f"),
        "power": _number(gpu["gpu_power_watts"], ",.0f", " W"),
        "a kernel runs on the GPU": _number(gpu["gpu_utilisation"], ".0%"),
        "GPU clock, of the highest": _number(gpu["gpu_sm_clock_share"], ".0%"),
        "highest GPU temperature": _number(gpu["gpu_temperature"], ",.0f", " °C"),
        "slices with lowered GPU clocks": _number(slowed or None, ".0%"),
        "peak host memory": memory_size(host),
        "peak device memory": memory_size(device),
        "compile time": _seconds(compiling or None),
        "to the first step": _seconds(side.first_step_seconds),
        "waits for input": _number(side.input_wait_fraction, ".0%"),
        "outside of TensorFlow": _number(side.outside_fraction, ".0%"),
        "limited by": _limit(side) or UNKNOWN,
        "the input alone, samples/s": _number(None if ceilings is None else ceilings.by_input, ",.0f"),
        "the step alone, samples/s": _number(None if ceilings is None else ceilings.by_compute, ",.0f"),
    }


def _profiles(data: PageData) -> Element:
    """Return where the time of a step goes; where nothing was profiled, how to profile."""
    profiles = [(side.trial, side.profile) for side in data.sides if side.profile is not None]
    content: list[Child] = []
    reasons = {profile.reason for _, profile in profiles if profile.reason}
    for trial, profile in profiles:
        if profile.reason:
            continue
        content.append(element("h3", "Baseline" if trial == 0 else f"Recommended (trial {trial})"))
        content += _profile(profile)
    if reasons:
        content.append(element("p", *with_code(f"Not every profile could be read: {'; '.join(sorted(reasons))}.")))
    if not profiles:
        how = element("code", one_line(shlex.join(["autotune", "tune", data.reference, "--profile", "finalists"])))
        content = [
            element("p", "No profile was taken. ", how, " takes one of the baseline and of the leaders (needs xprof).")
        ]
    return section("Where time goes", "profile", *content)


def _profile(profile: Profile) -> Iterator[Element]:
    """Yield the parts of a profiled step, and its longest operations and kernels."""
    yield element("p", f"{profile.steps} steps were profiled after the slices, {_seconds(profile.step_seconds)} each.")
    parts = [(name if name != "other" else "remainder", part) for name, part in profile.breakdown.items() if part > 0]
    whole = sum(part for _, part in parts)
    if whole:
        spans = [element("span", "", class_=name, style=f"width:{100 * part / whole:.2f}%") for name, part in parts]
        yield element("div", *spans, class_="bar")
        yield legend([(name, f"{name} {part / whole:.0%}") for name, part in parts])
    for kind, operations in (("operation", profile.operations), ("kernel of the GPU", profile.kernels)):
        if operations:
            headings = (kind, "share", "self time", "count", "kind", "on")
            yield table(headings, [_operation(operation) for operation in operations], {1, 2, 3})


def _operation(operation: Operation) -> tuple[str, ...]:
    name = _PLUMBING.sub("", operation.name).removeprefix("StatefulPartitionedCall/")
    share, own = f"{operation.share:.0%}", _seconds(operation.self_seconds)
    return name, share, own, f"{operation.count:,}", operation.kind, operation.on


# --------------------------------------------------------------------------------------------------- trials


def _trials(data: PageData) -> Element:
    """Return all trials as a table that report.js sorts and filters."""
    ratio = "samples per joule" if data.run.arguments.get("objective") == "energy" else "speed-up"
    headings = ("trial", "phase", "outcome", ratio, f"{data.unit}/s", "limited by", "changes")
    rows: list[tuple[Child, ...]] = []
    for record in data.records:
        changes = Configuration(record.configuration).describe(relative_to=data.baseline)
        if record.ablation is not None:
            gives = "" if record.ablation.gain is None else f", which gives {record.ablation.gain.shown()}"
            changes = f"{changes} (without {record.ablation.knob}{gives})"
        said: list[Child] = [one_line(changes)]
        if record.reason:
            said.append(element("div", one_line(record.reason), class_="quiet"))
        if record.log_tail and not record.outcome.measured:
            log = element("pre", printable(record.log_tail[-LONGEST_LOG:]))
            said.append(element("details", element("summary", "end of its log"), log))
        figures = [
            UNKNOWN if record.speedup is None else f"×{record.speedup.value:.2f}",
            UNKNOWN if record.throughput is None else f"{record.throughput.value:,.0f}",
        ]
        rows.append((str(record.trial), record.phase, record.outcome, *figures, _limit(record), element("div", *said)))
    outcomes = [element("option", name, value=name) for name in sorted({record.outcome for record in data.records})]
    every = element("option", "all outcomes", value="")
    tools = element(
        "div",
        element("input", type="search", placeholder="filter by text", aria_label="Filter trials by text", id="filter"),
        element("select", every, *outcomes, aria_label="Filter trials by outcome", id="outcome"),
        element("span", "", id="count", role="status", class_="quiet"),
        class_="tools",
        hidden="",
    )
    return section("All trials", "trials", tools, table(headings, rows, {0, 3, 4}, is_sorted=True))


def _machine(run: RunRecord) -> list[tuple[str, str]]:
    machine = run.machine
    rows = {
        "machine": machine.describe(),
        "memory": memory_size(machine.memory_bytes),
        "system": machine.platform,
        "Python": machine.python,
        **machine.packages,
        "driver": machine.driver,
        "CUDA": machine.cuda,
        "workload": run.workload.reference if run.workload is not None else None,
    }
    return [(one_line(name), one_line(value)) for name, value in rows.items() if value]


def _limit(record: TrialRecord) -> str:
    return "" if record.bottleneck is None else record.bottleneck.name.replace("_", " ")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:{form}}{unit}"


def _seconds(length: float | None) -> str:
    if length is None:
        return UNKNOWN
    return f"{1e3 * length:.2f} ms" if length < 0.1 else f"{length:,.1f} s"
