"""The sections of a run's page, from finished figures. Only charts need a script, report.js, which draws them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from autotune.data.figures import Interval, Operation, Profile
from autotune.recipe.waterfall import EXPLANATION, Step
from autotune.report.markup import Child, element, with_code

MOST_EFFECTS = 24  # in the chart of knobs
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
Page = Mapping[str, Any]
Figures = Mapping[str, Any]


def sections(page: Page) -> Iterator[Element]:
    """Yield the page's elements in order; `page` is what `page_data` returns."""
    yield element("h1", page["title"])
    yield element("p", f"{page['run']} · {page['started']}", class_="quiet")
    yield _answer(page["answer"], page["answer"]["figure"])
    yield from _to_do(page)
    yield from _before_and_after(page["sides"], page["unit"])
    yield from _waterfall(page["waterfall"])
    yield from _learning(page["learning"])
    yield from _search(page)
    yield from _effects(page["effects"])
    if page["sides"]:
        yield _profiles(page["profiles"], page["tuned"])
    if page["trials"]:
        yield _trials(page["trials"], page["ratio"], page["unit"])
    machine = table(("", ""), [(name, value) for name, value in page["machine"]])
    yield section("Machine and versions", "machine", machine)
    method = [element("li", sentence) for sentence in METHOD]
    yield section("How it was measured", "method", element("ol", *method))


def section(heading: str, name: str, *content: Child) -> Element:
    """Return a section below its heading."""
    return element("section", element("h2", heading, id=name), *content, aria_labelledby=name)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> Element:
    """Return a table that becomes cards on a narrow screen.

    Args:
        headings: Of its columns; without any text, the table has no head.
        rows: The cells; the first one is the heading of its row.
        numbers: The places of the columns that are aligned to the right.
    """
    kinds = ["number" if place in numbers else None for place in range(len(headings))]
    body = []
    for first, *rest in rows:
        cells = [
            element("td", cell, class_=kind, data_label=heading or None)
            for heading, cell, kind in zip(headings[1:], rest, kinds[1:], strict=True)
        ]
        body.append(element("tr", element("th", first, scope="row"), *cells))
    head = [element("th", text, scope="col", class_=kind) for text, kind in zip(headings, kinds, strict=True)]
    thead = element("thead", element("tr", *head)) if any(headings) else None
    return element("div", element("table", thead, element("tbody", *body), class_="cards"), class_="wide")


def chart(name: str) -> Element:
    """Return the place of a chart that report.js draws."""
    return element("div", "", id=name, class_="chart")


def legend(entries: Sequence[tuple[str, str]]) -> Element:
    """Return a legend: classes of marks, and what they stand for."""
    keys = [element("span", element("i", "", class_=kind), text) for kind, text in entries]
    return element("div", *keys, class_="keys")


# ----------------------------------------------------------------------------------------------- the answer


def _answer(answer: Figures, figure: tuple[str, str, str] | None) -> Element:
    """Return the speed-up on its own, and both answers and the learning caveats beside it."""
    if figure is None:
        left: list[Child] = [element("p", answer["word"], class_="big words")]
    else:
        value, bounds, meaning = figure
        left = [element("p", value, class_="big"), element("p", meaning), element("p", bounds, class_="quiet")]
    answers: list[Child] = []
    for heading, text in answer["answers"]:
        first, *rest = text.split("   ")  # what the terminal sets in columns
        answers += [element("dt", heading)] if heading else []
        answers.append(
            element("dd", element("strong", first) if heading else first, "".join(f" · {part}" for part in rest))
        )
    beside: list[Child] = [element("p", answer["headline"], class_="headline")]
    if answer["candidate"]:
        beside.append(element("p", element("strong", "Best candidate: "), f"{answer['candidate']}.", id="candidate"))
    beside += [element("dl", *answers, class_="answers")] if answers else []
    beside += [element("p", caveat, class_="caveat") for caveat in answer["caveats"]]
    return element("section", element("div", *left), element("div", *beside), class_=f"answer {answer['verdict']}")


def _to_do(page: Page) -> Iterator[Element]:
    """Yield what to change, the commands to copy, advice, and what is missing or was not checked."""
    answer = page["answer"]
    if answer["changes"]:
        yield table(("what to change", "now", "recommended"), answer["changes"])
    for heading, lines in answer["steps"]:
        yield element("p", heading)
        if lines:
            yield element("pre", "\n".join(lines))
    for advice in page["advice"]:
        yield element("p", *with_code(advice))
    if answer["not_checked"]:
        gaps = [element("li", *with_code(gap)) for gap in answer["not_checked"]]
        yield element("details", element("summary", f"Not checked ({len(gaps)})"), element("ul", *gaps))
    if page["missing"]:
        gaps = [element("li", gap) for gap in page["missing"]]
        yield element("div", element("p", "Missing here:"), element("ul", *gaps), class_="missing")


# -------------------------------------------------------------------------------------------------- figures


def _before_and_after(sides: Sequence[Figures], unit: str) -> Iterator[Element]:
    """Yield the figures of baseline and recommendation; a row for each figure that one of them has."""
    shown: list[tuple[str, Callable[[Figures], str | None]]] = [
        (f"{unit}/s", lambda side: rate(side["throughput"])),
        ("joules/sample", lambda side: number(side["joules_per_sample"], 4)),
        ("power", lambda side: number(side["gpu_power_watts"], 0, " W")),
        ("a kernel runs on the GPU", lambda side: percent(side["gpu_utilisation"])),
        ("GPU clock, of the highest", lambda side: percent(side["gpu_sm_clock_share"])),
        ("highest GPU temperature", lambda side: number(side["gpu_temperature"], 0, " °C")),
        ("slices with lowered GPU clocks", lambda side: percent(side["gpu_slowed_share"] or None)),
        ("peak host memory", lambda side: size(side["peak_host_bytes"])),
        ("peak device memory", lambda side: size(side["peak_device_bytes"])),
        ("compile time", lambda side: seconds(side["compile_seconds"])),
        ("to the first step", lambda side: seconds(side["first_step_seconds"])),
        ("waits for input", lambda side: percent(side["input_wait_fraction"])),
        ("outside of TensorFlow", lambda side: percent(side["outside_fraction"])),
        (
            "limited by",
            lambda side: None if side["bottleneck"] is None else side["bottleneck"]["name"].replace("_", " "),
        ),
        ("the input alone, samples/s", lambda side: number((side["ceilings"] or {}).get("by_input"), 0)),
        ("the step alone, samples/s", lambda side: number((side["ceilings"] or {}).get("by_compute"), 0)),
    ]
    rows = [(name, *(figure(side) for side in sides)) for name, figure in shown]
    cells = [[cell or "–" for cell in row] for row in rows if any(row[1:])]
    if sides:
        headings = ("", "baseline", "recommended")[: len(sides) + 1]
        yield section("Before and after", "sides", table(headings, cells))


def _waterfall(steps: Sequence[Step]) -> Iterator[Element]:
    """Yield what each change of the recommendation gives, where some were left out."""
    if steps:
        rows = [(step.name, step.gain.shown()) for step in steps]
        about = element("p", EXPLANATION, class_="quiet")
        yield section(
            "What each change gives", "changes", about, chart("waterfall-chart"), table(("change", "gives"), rows)
        )


def _learning(learning: Figures) -> Iterator[Element]:
    """Yield how other batch sizes learn: a finding, a chart and its legend for each leader."""
    content: list[Child] = []
    for place, drawn in enumerate(learning["charts"]):
        content += [element("h3", drawn["heading"]), element("p", drawn["found"])]
        if drawn["curves"]:
            content.append(chart(f"learning-chart-{place}"))
            content.append(legend([(curve["kind"], curve["name"]) for curve in drawn["curves"]]))
    if content:
        said = (
            f"Lines are means over seeds; bands reach from the lowest seed to the highest. {learning['not_promised']}"
        )
        yield section("How another batch size learns", "learning", element("p", said, class_="quiet"), *content)


def _search(page: Page) -> Iterator[Element]:
    kinds = {point["kind"] for point in page["search"]}
    if not kinds:
        return
    named = (
        ("candidate", "candidate"),
        ("confirmation", "confirmation"),
        ("pruned", "given up early"),
        ("failed", "failed"),
    )
    entries = [entry for entry in named if entry[0] in kinds]
    said = f"Each trial over the baseline ({page['ratio']}), with 95% intervals, over the run's time."
    drawn = [chart("search-chart"), legend([*entries, ("best", "best candidate so far")])]
    yield section("The search", "search", element("p", said, class_="quiet"), *drawn)


def _effects(effects: Sequence[Figures]) -> Iterator[Element]:
    if not effects:
        return
    rows = []
    for effect in effects:
        factor = Interval(value=effect["effect"], low=effect["low"], high=effect["high"])
        rows.append((f"{effect['knob']}: {effect['before']} → {effect['after']}", factor.shown(), str(effect["pairs"])))
    listed = table(("knob", "effect", "pairs of trials"), rows, {2})
    said = element("p", "From trials that differ in this knob alone; 95% intervals.", class_="quiet")
    details = element("details", element("summary", "As a table"), listed)
    yield section("What each knob did", "effects", said, chart("effects-chart"), details)


def _profiles(profiles: Sequence[tuple[int, Profile]], tuned: str) -> Element:
    """Return where the time of a step goes; where nothing was profiled, how to profile."""
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
        how = element("code", f"autotune tune {tuned} --profile finalists")
        content = [
            element("p", "No profile was taken. ", how, " takes one of the baseline and of the leaders (needs xprof).")
        ]
    return section("Where time goes", "profile", *content)


def _profile(profile: Profile) -> Iterator[Element]:
    """Yield the parts of a profiled step, and its longest operations and kernels."""
    length = seconds(profile.step_seconds) or "–"
    yield element("p", f"{profile.steps} steps were profiled after the slices, {length} each.")
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
    share, own = f"{operation.share:.0%}", seconds(operation.self_seconds) or "–"
    return name, share, own, f"{operation.count:,}", operation.kind, operation.on


# --------------------------------------------------------------------------------------------------- trials


def _trials(trials: Sequence[Figures], ratio: str, unit: str) -> Element:
    """Return all trials as a table that report.js sorts and filters."""
    headings = [("trial", True), ("phase", False), ("outcome", False), (ratio, True), (f"{unit}/s", True)]
    headings += [("limited by", False), ("changes", False)]
    buttons = [
        element("th", element("button", text, type="button"), scope="col", class_="number" if is_number else None)
        for text, is_number in headings
    ]
    rows = []
    for trial in trials:
        figures = times(trial["speedup"]), rate(trial["throughput"], bounds=False)
        texts = [str(trial["trial"]), trial["phase"], trial["outcome"], *(text or "–" for text in figures)]
        values = (
            trial["trial"],
            None,
            None,
            *(known and known.value for known in (trial["speedup"], trial["throughput"])),
        )
        cells = [
            element(
                "td",
                text,
                class_="number" if is_number else None,
                data_label=heading,
                data_value=None if value is None else repr(value),
            )
            for text, value, (heading, is_number) in zip(texts, values, headings, strict=False)
        ]
        cells.append(element("td", trial["bottleneck"].replace("_", " "), data_label=headings[5][0]))
        said: list[Child] = [trial["changes"]]
        said += [element("div", trial["reason"], class_="quiet")] if trial["reason"] else []
        if trial["log"]:
            said.append(element("details", element("summary", "end of its log"), element("pre", trial["log"])))
        cells.append(element("td", *said, data_label=headings[6][0]))
        rows.append(element("tr", *cells, data_outcome=trial["outcome"]))
    outcomes = [element("option", name, value=name) for name in sorted({trial["outcome"] for trial in trials})]
    tools = element(
        "div",
        element("input", type="search", placeholder="filter by text", aria_label="Filter trials by text", id="filter"),
        element(
            "select",
            element("option", "all outcomes", value=""),
            *outcomes,
            aria_label="Filter trials by outcome",
            id="outcome",
        ),
        element("span", "", id="count", role="status", class_="quiet"),
        class_="tools",
        hidden="",
    )
    head, body = element("thead", element("tr", *buttons), class_="sorts"), element("tbody", *rows, id="trial-rows")
    whole = element("div", element("table", head, body, class_="cards", id="trial-table"), class_="wide")
    return section("All trials", "trials", tools, whole)


# ------------------------------------------------------------------------------------------- figures as text


def number(value: float | None, digits: int, unit: str = "") -> str | None:
    """Return a number with separators; None where it is not known."""
    return None if value is None else f"{value:,.{digits}f}{unit}"


def percent(share: float | None) -> str | None:
    """Return a share in percent."""
    return None if share is None else f"{share:.0%}"


def size(count: int | None) -> str | None:
    """Return bytes for people."""
    if count is None:
        return None
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def seconds(length: float | None) -> str | None:
    """Return a length of time, short ones in milliseconds."""
    if length is None:
        return None
    return f"{1e3 * length:.2f} ms" if length < 0.1 else f"{length:,.1f} s"


def rate(figure: Interval | None, *, bounds: bool = True) -> str | None:
    """Return a rate, with its interval."""
    if figure is None:
        return None
    return figure.shown("", ",.0f") if bounds else f"{figure.value:,.0f}"


def times(figure: Interval | None) -> str | None:
    """Return a factor without its interval."""
    return None if figure is None else f"×{figure.value:.2f}"
