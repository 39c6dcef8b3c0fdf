"""A run as one page, `report.html`: it loads nothing, and shows other people's text as text.

The page is a fixed document with the run's data in it as JSON; what it shows is drawn from that by the page itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, RunDirectoryError
from autotune.files import write_atomically
from autotune.printable import one_line
from autotune.recipe.recipe import Recipe
from autotune.record import Outcome, Phase, TrialRecord
from autotune.report.advice import advice
from autotune.report.compare import describe_machine
from autotune.report.runs import baseline_of
from autotune.run_directory import RunDirectory, RunRecord
from autotune.space.configuration import Configuration, format_value
from autotune.stats.deciding import Verdict
from autotune.stats.intervals import Interval

NAME = "report.html"
TEMPLATE = Path(__file__).with_name("report.html")
LONGEST_LOG = 2000
METHOD = (
    "Each trial is a short real training in a process of its own; it and the baseline take turns in short slices.",
    "Speed is samples per second of real epochs, with what lies between them.",
    "The search only proposes: the claim comes from fresh processes of both sides, started once the leader was chosen.",
    "Its interval is Student's t over processes; looks and changes of the leader share one error of 5%.",
    "Faster needs the interval above 1 and the gain above the smallest one that was asked for.",
)


def write_page(path: str | Path) -> Path:
    """Write a run's `report.html`, whatever is there of the run.

    Args:
        path: The run directory.

    Returns:
        The page's file, in the run directory.

    Raises:
        RunDirectoryError: There is no run, or the page cannot be written.
    """
    directory = RunDirectory(path)
    data = json.dumps(page_data(directory), allow_nan=False).replace("<", "\\u003c")
    text = TEMPLATE.read_text(encoding="utf-8").replace("/*DATA*/null", data)
    write_atomically(directory.path / NAME, text)
    return directory.path / NAME


def page_data(directory: RunDirectory) -> dict[str, Any]:
    """What the page shows, as JSON can hold it. Raises RunDirectoryError where there is no run.json to read."""
    from autotune.report.effects import knob_effects  # which imports pandas

    missing: list[str] = []

    def read(what: str, how: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return how()
        except (AutotuneError, OSError) as error:
            missing.append(f"{what}: {one_line(error)}")
            return otherwise

    run = directory.read_run()
    records: list[TrialRecord] = sorted(
        read("trials", lambda: list(directory.read_trials()), []), key=lambda record: record.trial
    )
    recipe: Recipe | None = None
    if directory.recipe_file.exists():
        recipe = read("recipe", lambda: Recipe.load(directory.recipe_file), None)
    else:
        missing.append("recipe: the run has not ended, or was cut off")
    baseline = read("baseline", lambda: baseline_of(directory, run, records), None)
    effects = read("effects of knobs", lambda: knob_effects(directory.path), None)
    chosen = _chosen(recipe, records)
    sides = [each for each in (records[0] if records else None, chosen) if each is not None]
    return {
        "title": one_line(run.workload.name if run.workload else run.run),
        "run": one_line(run.run),
        "started": run.started_at,
        "missing": missing,
        "answer": _answer(recipe, records, chosen, run, directory),
        "sides": [_side(each) for each in sides],
        "trials": [_trial(each, baseline) for each in records],
        "effects": [] if effects is None else json.loads(effects.drop(columns="run").to_json(orient="records")),
        "profiles": [_profile(each) for each in sides if each.profile is not None],
        "machine": _machine(run),
        "method": METHOD,
    }


def _chosen(recipe: Recipe | None, records: list[TrialRecord]) -> TrialRecord | None:
    """The trial that the recipe's claim is from."""
    if recipe is None or not recipe.changes:
        return None
    wanted = Configuration(recipe.configuration)
    found = [each for each in records if each.phase is Phase.CONFIRM and each.pairs]
    same = [each for each in found if dict(each.configuration) == dict(wanted)]
    claimed = [each for each in same if each.speedup == recipe.evidence.speedup]
    return (claimed or same)[-1] if same else None


def _answer(
    recipe: Recipe | None,
    records: list[TrialRecord],
    chosen: TrialRecord | None,
    run: RunRecord,
    directory: RunDirectory,
) -> dict[str, Any]:
    """The verdict, what to change, how to use it, and what limits the training."""
    script = run.workload.script if run.workload is not None else None
    told = advice(records[0], chosen, script) if records else []
    if recipe is None:
        return {"verdict": "none", "headline": "This run has no recipe.", "advice": told}
    evidence, changes = recipe.evidence, recipe.changes
    headline = {
        Verdict.FASTER: "Faster",
        Verdict.NO_SIGNIFICANT_GAIN: "No significant gain: keep what you have.",
        Verdict.UNDECIDED: "Undecided: the time ended before the answer was settled.",
        Verdict.UNSTABLE: "Unstable: the only faster configurations broke a rule. Keep what you have.",
    }[evidence.verdict]
    file = directory.recipe_file
    if script is not None:
        name = run.workload.reference if run.workload is not None else ""
        use = [f"autotune run {shlex.quote(str(file))} {shlex.quote(name)}"]
        use += [f"autotune show {shlex.quote(str(file))} --diff {shlex.quote(name)}"]
    else:
        use = [f"recipe = autotune.Recipe.load({str(file)!r})", "recipe.apply()"]
    return {
        "verdict": evidence.verdict.value,
        "headline": headline,
        "speedup": _interval(evidence.speedup) if changes else None,
        "changes": [[name, _value(recipe.baseline.get(name)), _value(value)] for name, value in changes.items()],
        "use": [one_line(each) for each in use] if changes else [],
        "not_checked": [one_line(each) for each in evidence.stability.not_checked],
        "advice": told,
    }


def _side(record: TrialRecord) -> dict[str, Any]:
    """Baseline or recommendation, in figures."""
    limit, top = record.bottleneck, record.ceilings
    return {
        "trial": record.trial,
        "throughput": _interval(record.throughput),
        "host_bytes": record.peak_host_bytes,
        "device_bytes": record.peak_device_bytes,
        "compile_seconds": record.compile_seconds,
        "first_step_seconds": record.first_step_seconds,
        "waits": record.input_wait_fraction,
        "outside": record.outside_fraction,
        "bottleneck": None if limit is None else [limit.name, limit.why],
        "by_input": None if top is None else top.by_input,
        "by_compute": None if top is None else top.by_compute,
    }


def _trial(record: TrialRecord, baseline: Configuration | None) -> dict[str, Any]:
    changes = Configuration(record.configuration).describe(relative_to=baseline)
    failed = record.outcome not in (Outcome.OK, Outcome.PRUNED)
    return {
        "trial": record.trial,
        "phase": str(record.phase),
        "outcome": str(record.outcome),
        "at": record.ended_at_seconds,
        "speedup": _interval(record.speedup),
        "throughput": None if record.throughput is None else record.throughput.value,
        "bottleneck": "" if record.bottleneck is None else record.bottleneck.name,
        "changes": changes,
        "reason": one_line(record.reason),
        "log": record.log_tail[-LONGEST_LOG:] if failed else "",
    }


def _profile(record: TrialRecord) -> dict[str, Any]:
    assert record.profile is not None
    profile = record.profile
    return {
        "trial": record.trial,
        "reason": profile.reason,
        "steps": profile.steps,
        "step_seconds": profile.step_seconds,
        "breakdown": {name: seconds for name, seconds in profile.breakdown.items() if seconds > 0},
        "operations": [each.model_dump() for each in profile.operations],
        "peak_bytes": profile.peak_bytes,
        "held_by": list(profile.held_by),
    }


def _machine(run: RunRecord) -> list[list[str]]:
    machine = run.machine
    rows: Mapping[str, str | None] = {
        "machine": describe_machine(machine),
        "memory": f"{machine.memory_bytes / 2**30:.0f} GiB",
        "system": machine.platform,
        "Python": machine.python,
        **machine.packages,
        "driver": machine.driver,
        "CUDA": machine.cuda,
        "workload": run.workload.reference if run.workload is not None else None,
    }
    return [[one_line(name), one_line(value)] for name, value in rows.items() if value]


def _interval(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.value, interval.low, interval.high]


def _value(value: Any) -> str:
    return "–" if value is None else format_value(value)


def write_page_or_say(path: Path) -> str:
    """Write the page at a run's end; why that failed, or an empty string: it fails no run."""
    try:
        write_page(path)
    except (RunDirectoryError, OSError, ValueError) as error:
        return f"report.html was not written: {one_line(error)}"
    return ""
