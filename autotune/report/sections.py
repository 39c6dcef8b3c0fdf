"""The sections of a run's page. Only charts need a script, report.js, which draws them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from autotune.data.facts import ScriptFacts
from autotune.data.figures import Operation, Profile
from autotune.data.printable import memory_size, one_line, printable
from autotune.data.record import Outcome, Phase, TrialRecord
from autotune.data.run_directory import RunRecord, to_repeat
from autotune.recipe.answers import NOT_PROMISED, Answer, Command, Side
from autotune.recipe.next_steps import answer_at, resume_command
from autotune.recipe.recipe import Recipe
from autotune.recipe.waterfall import EXPLANATION, Step
from autotune.report.markup import Child, element, with_code
from autotune.space.configuration import Configuration
from autotune.stats.deciding import Verdict
from autotune.stats.disturbance import gpu_figures

LONGEST_LOG = 2000  # characters of a failed trial's log
UNKNOWN = "–"
METHOD = (
    "Each trial is a short real training in its own process. It and the baseline alternate in slices, or in blocks if "
    "one cannot be frozen.",
    "Speed is samples per second of real epochs, including the time between them.",
    "The search only proposes. The claim comes from fresh processes of both sides, started after the leader was "
    "chosen.",
    "Its interval is Student's t over processes; looks and changes of the leader share one error of 5%.",
    "The verdict is faster if the interval is above 1 and the gain is above --min-gain.",
    "With --objective time_to_loss, the default, another batch size is recommended only if it reaches the same losses "
    "sooner than the baseline and than the same training, with 95% confidence.",
)
_PLUMBING = re.compile(r"^(while/[^/]*/[^/]*/)+(cond/[^/]*/[^/]*/|while/cond/)*")  # before an operation's own name
_POINTS = {"candidate": "candidate", "confirmation": "confirmation", "pruned": "given up early", "failed": "failed"}


@dataclass(frozen=True, kw_only=True)
class PageData:
    """All that the page shows of a run."""

    path: Path  # the run directory
    run: RunRecord
    records: Sequence[TrialRecord]
    recipe: Recipe | None
    baseline: Configuration | None
    sides: Sequence[TrialRecord]  # the baseline's, then the recommendation's if it is another configuration
    waterfall: Sequence[Step]
    learning: Sequence[dict[str, Any]]  # charts of losses
    missing: Sequence[str]  # what could not be read

    @cached_property
    def answer(self) -> Answer | None:
        """What the run found; None without a recipe."""
        file = self.path / "recipe.json"
        return None if self.recipe is None else answer_at(self.recipe, file, self.reference, to_repeat(self.path))

    @property
    def points(self) -> list[TrialRecord]:
        """The trials in the chart of the search."""
        return [record for record in self.records if record.speedup and record.ended_at_seconds]

    @property
    def unit(self) -> str:
        """The unit of a speed."""
        return "samples" if self.script is None else self.script.unit

    @property
    def script(self) -> ScriptFacts | None:
        """The facts of a script as it is."""
        return None if self.run.workload is None else self.run.workload.script

    @property
    def reference(self) -> str:
        """The workload as commands name it."""
        return "SCRIPT" if self.run.workload is None else self.run.workload.reference


def title_of(run: RunRecord) -> str:
    """Return the page's title."""
    return one_line(run.workload.name if run.workload else run.run)


def kind_of_point(record: TrialRecord) -> str:
    """Return the kind of a trial in the chart of the search, of `_POINTS`."""
    if record.outcome is not Outcome.OK:
        return "pruned" if record.outcome is Outcome.PRUNED else "failed"
    return "confirmation" if record.phase is Phase.CONFIRM else "candidate"


def describe_changes(record: TrialRecord, baseline: Configuration | None) -> str:
    """Return what a trial changes."""
    return Configuration(record.configuration).describe(relative_to=baseline)


def sections(data: PageData) -> Iterator[Element]:
    """Yield the page's elements in order."""
    started = f"{one_line(data.run.started_at)[:16].replace('T', ' ')} UTC"
    yield element("h1", title_of(data.run))
    yield element("p", f"{one_line(data.run.run)} · {started}", class_="quiet")
    yield _answer(data.answer)
    yield from _to_do(data)
    yield from _before_and_after(data)
    yield from _waterfall(data.waterfall)
    yield from _learning(data.learning)
    yield from _search(data)
    if data.sides:
        yield _profiles(data)
    if data.records:
        yield _trials(data)
    yield section("Machine and versions", "machine", table(("", ""), _machine(data.run)))
    method = [element("li", sentence) for sentence in METHOD]
    yield section("How it was measured", "method", element("ol", *method))


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
        answers.append(element("dt", choice.kind.capitalize()))
        answers.append(element("dd", element("strong", first), "".join(f" · {part}" for part in rest)))
    recommended = "your current settings" if answer.recommended == "baseline" else answer.recommended
    answers += [element("dt", "Recommended"), element("dd", recommended)] if answers else []
    beside: list[Child] = [element("p", one_line(answer.headline), class_="headline")]
    beside += [element("p", *with_code(one_line(answer.diagnosis)), id="diagnosis")] if answer.diagnosis else []
    if answer.candidate:
        candidate = f"{one_line(answer.candidate)}."
        beside.append(element("p", element("strong", "Best candidate: "), candidate, id="candidate"))
    beside += [element("dl", *answers, class_="answers")] if answers else []
    caveats = answer.caveats or ([NOT_PROMISED] if answer.choices else [])
    beside += [element("p", *with_code(one_line(caveat)), class_="caveat") for caveat in caveats]
    figure = [element("p", answer.verdict.value.replace("_", " ").capitalize(), class_="big words")]
    if answer.verdict is Verdict.FASTER:
        figure = [
            element("p", f"×{answer.speedup.value:.2f}", class_="big"),
            element("p", answer.unit),
            element("p", f"{answer.speedup.low:.2f} to {answer.speedup.high:.2f}", class_="quiet"),
            element("p", answer.rests_on, class_="quiet"),
        ]
    return element("section", element("div", *figure), element("div", *beside), class_=f"answer {answer.verdict.value}")


def _to_do(data: PageData) -> Iterator[Element]:
    """Yield what to change, the commands to copy, advice, and what is missing or was not checked."""
    answer = data.answer
    commands: Sequence[Command] = () if answer is None else answer.commands
    if answer is None:
        go_on = resume_command(data.reference, data.path, to_repeat(data.path))
        commands = [Command(name="go on", heading="To continue it with everything measured so far:", lines=(go_on,))]
    elif answer.changes:
        rows = [(change.knob, change.baseline, change.recommended) for change in answer.changes]
        yield table(("what to change", "now", "recommended"), rows)
    for command in commands:
        yield element("p", command.heading)
        if command.lines:
            yield element("pre", "\n".join(map(one_line, command.lines)))
    for said in () if answer is None else answer.advice:
        yield element("p", *with_code(one_line(said)))
    if answer is not None and answer.unchecked:
        gaps = [element("li", *with_code(one_line(gap))) for gap in answer.unchecked]
        yield element("details", element("summary", f"Not checked ({len(gaps)})"), element("ul", *gaps))
    if data.missing:
        gaps = [element("li", gap) for gap in data.missing]
        yield element("div", element("p", "Missing here:"), element("ul", *gaps), class_="missing")


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


def _waterfall(steps: Sequence[Step]) -> Iterator[Element]:
    if steps:
        gains = table(("change", "gives"), [(step.name, step.gain.shown()) for step in steps])
        about = element("p", EXPLANATION, class_="quiet")
        yield section("What each change gives", "changes", about, chart("waterfall-chart"), gains)


def _learning(charts: Sequence[dict[str, Any]]) -> Iterator[Element]:
    """Yield how other batch sizes learn: a finding, a chart and its legend for each leader."""
    content: list[Child] = []
    for place, drawn in enumerate(charts):
        content += [element("h3", drawn["heading"]), element("p", drawn["found"])]
        if drawn["curves"]:
            content.append(chart(f"learning-chart-{place}"))
            content.append(legend([(curve["kind"], curve["name"]) for curve in drawn["curves"]]))
    if content:
        said = f"Lines are means over seeds; bands reach from the lowest seed to the highest. {NOT_PROMISED}"
        yield section("How another batch size learns", "learning", element("p", said, class_="quiet"), *content)


def _search(data: PageData) -> Iterator[Element]:
    kinds = {kind_of_point(record) for record in data.points}
    if not kinds:
        return
    entries = [entry for entry in _POINTS.items() if entry[0] in kinds]
    said = f"Each trial over the baseline ({_ratio(data)}), with 95% intervals, over the run's time."
    drawn = [chart("search-chart"), legend([*entries, ("best", "best candidate so far")])]
    yield section("The search", "search", element("p", said, class_="quiet"), *drawn)


def _ratio(data: PageData) -> str:
    return "samples per joule" if data.run.arguments.get("objective") == "energy" else "speed-up"


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
    headings = ("trial", "phase", "outcome", _ratio(data), f"{data.unit}/s", "limited by", "changes")
    rows: list[tuple[Child, ...]] = []
    for record in data.records:
        changes = describe_changes(record, data.baseline)
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
