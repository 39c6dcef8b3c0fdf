"""Find earlier runs of the same workload, and the leaders that a new run tries first.

Only configurations are taken over, no measurements. The files may come from other people: reading them executes
nothing, and a damaged run is skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from autotune.data.errors import RecipeError, RunDirectoryError
from autotune.data.facts import ScriptFacts, Site
from autotune.data.models import KnobValue
from autotune.data.printable import one_line
from autotune.data.record import Outcome, Phase, Standing, TrialRecord
from autotune.data.run_directory import EarlierLeader, RunDirectory, RunRecord, WorkloadRecord
from autotune.data.runs_on_disk import newest_runs
from autotune.recipe.recipe import Recipe
from autotune.space.configuration import Configuration, baseline_of, format_value, read_trials
from autotune.space.space_file import ResolvedSpace
from autotune.stats.deciding import Verdict

MOST_RUNS = 50  # the newest, whose run.json is read
MOST_READ = 6  # runs of the same workload whose trials are read
MOST_LEADERS = 2
NOT_FASTER = (Verdict.NO_SIGNIFICANT_GAIN, Verdict.UNSTABLE)  # of runs that have no leaders of the same training
JUDGED = (Standing.CONFIRMED, Standing.NOT_SHOWN, Standing.UNSTABLE)  # whose estimates in the search count no more
_FIRST_AXIS = re.compile(r"shape=\((None|\d+)")  # of a tensor of the batch: the batch size, where it is fixed


def is_same_workload(workload: WorkloadRecord, other: WorkloadRecord) -> bool:
    """Return whether both train a model of the same size on data of the same shape, from the same call sites.

    Moved lines, another learning rate or batch size, or a renamed script make no other workload.
    """
    mine = _identity(workload)
    return mine is not None and mine == _identity(other)


def _identity(workload: WorkloadRecord) -> tuple[object, ...] | None:
    """Return what stays the same while a workload is edited elsewhere; None if its baseline has not started."""
    if workload.element is None or workload.parameters is None:
        return None
    element = _FIRST_AXIS.sub("shape=(batch", workload.element)
    shape = (workload.parameters, element, workload.batch_ranks, workload.drop_remainder)
    if workload.script is None:
        return (workload.name, workload.batched, workload.takes_config, *shape)
    return (*_call_sites(workload.script, f"{workload.name}.py"), *shape)


def _call_sites(script: ScriptFacts, own_file: str) -> tuple[object, ...]:
    """Return how a script trains, and the calls that lead to the training; its own file under no name."""

    def key(site: Site | None) -> tuple[str, str, str, int] | None:
        return None if site is None else ("" if site.file == own_file else site.file, *site.key[1:])

    pipeline = sorted((knob, *(key(site) for site in sites)) for knob, sites in script.sites.items() if knob != "cache")
    return (script.trains, key(script.fit_site), key(script.compile_site), key(script.step_function), tuple(pipeline))


def find_leaders(results: Path, run: RunRecord, space: ResolvedSpace) -> tuple[EarlierLeader, ...]:
    """Return the leaders that a new run tries first, the most promising first.

    Leaders found on this kind of machine come before those of the same device, and these before others. Confirmed ones
    come before estimates, those of newer runs before those of older ones.

    Args:
        results: The directory below which runs are looked for.
        run: The new run, whose baseline has started.
        space: The new run's search space.
    """
    found = [
        leader if _covers(earlier, space) else replace(leader, led_over=0)
        for kinship, directory, earlier in _same_runs(results, run)[:MOST_READ]
        for leader in _leaders_of(directory, earlier, kinship)
    ]
    chosen: dict[Configuration, EarlierLeader] = {}
    for leader in sorted(found, key=lambda leader: (leader.kinship, -leader.estimate)):
        configuration = _move(leader.changes, space)
        changes = configuration.differences(space.baseline)
        is_known = leader.kinship == 0 and changes == leader.changes
        led_over = leader.led_over if is_known else 0
        if known := chosen.get(configuration):
            chosen[configuration] = known.model_copy(update={"led_over": max(known.led_over, led_over)})
        elif changes:
            name = str(leader.run.relative_to(results))
            chosen[configuration] = EarlierLeader(run=name, changes=changes, led_over=led_over)
    return tuple(chosen.values())[:MOST_LEADERS]


def starting_points(leaders: Sequence[EarlierLeader], space: ResolvedSpace) -> dict[Configuration, int]:
    """Return the configurations that a run tries first, and how many candidates each was confirmed ahead of."""
    return {_move(leader.changes, space): leader.led_over for leader in leaders}


def describe_leaders(leaders: Sequence[EarlierLeader], space: ResolvedSpace) -> str:
    """Say which leaders of which runs are tried first."""
    runs = " and ".join(dict.fromkeys(leader.run for leader in leaders))
    shown = "; ".join(configuration.describe(space.baseline) for configuration in starting_points(leaders, space))
    which = "leaders" if len(leaders) > 1 else "leader"
    return one_line(f"starting from the {which} of {runs}: {shown}. --fresh ignores earlier runs")


def _move(changes: Mapping[str, KnobValue], space: ResolvedSpace) -> Configuration:
    """Return the baseline with those changes that the space allows."""
    allowed = {
        name: choice
        for name, value in changes.items()
        for choice in space.choices.get(name, ())
        if format_value(choice) == format_value(value)
    }
    return space.configuration(allowed)


def _covers(earlier: RunRecord, space: ResolvedSpace) -> bool:
    """Return whether an earlier run could try every value that may be tried now."""
    before = {} if earlier.search_space is None else earlier.search_space.choices
    return all(
        set(values) - {space.baseline[name]} <= {*before.get(name, ())} for name, values in space.choices.items()
    )


# ------------------------------------------------------------------------------------------ runs on disk


def _same_runs(results: Path, run: RunRecord) -> list[tuple[int, RunDirectory, RunRecord]]:
    """Return the runs of the same workload, the newest first, each with the kinship of its machine; see `_Leader`."""
    same = []
    for directory in newest_runs(results, most=MOST_RUNS):
        try:
            earlier = directory.read_run()
        except RunDirectoryError:
            continue
        if run.workload is None or earlier.workload is None or not is_same_workload(run.workload, earlier.workload):
            continue
        if earlier.arguments.get("objective") != run.arguments.get("objective"):
            continue
        is_same_device = earlier.workload.device == run.workload.device
        kinship = 0 if not earlier.machine.differences(run.machine) else 1 if is_same_device else 2
        same.append((kinship, directory, earlier))
    return sorted(same, key=lambda found: found[0])


# ------------------------------------------------------------------------------------------ their leaders


@dataclass(frozen=True, kw_only=True)
class _Leader:
    """A configuration that was faster than the baseline of an earlier run."""

    run: Path
    kinship: int  # of that run's machine: 0 for this one's kind, 1 for another with the same device, 2 for others
    changes: dict[str, KnobValue]  # from that run's baseline
    estimate: float = math.inf  # the lower bound of its speed-up in the search; infinite where it was confirmed
    led_over: int = 0  # see `EarlierLeader`


def _leaders_of(directory: RunDirectory, run: RunRecord, kinship: int) -> list[_Leader]:
    """Return the leaders of a run: those that were confirmed, the recommended one first, and those that look faster."""
    try:
        records = list(read_trials(directory, []))
        baseline = baseline_of(directory, run, records)
    except RunDirectoryError:
        return []
    if baseline is None:
        return []
    if _verdict_of(directory) in NOT_FASTER:  # which is about the script's own batch size
        if run.arguments.get("objective") != "time_to_loss":
            return []
        records = [
            record for record in records if Configuration(record.configuration).update_size != baseline.update_size
        ]
    by_number = {record.trial: record for record in records}
    searched = [record for record in records if record.phase is Phase.SEARCH]
    standings = {record.looks[-1].candidate: record.looks[-1].standing for record in records if record.looks}
    confirmed = [record for record in records if record.looks and record.looks[-1].standing is Standing.CONFIRMED]
    confirmed.sort(key=lambda record: record.ended_at_seconds or 0.0, reverse=True)  # the last has beaten the others

    leader = partial(_Leader, run=directory.path, kinship=kinship)
    leaders = [
        leader(changes=_changes(by_number.get(record.looks[-1].candidate, record), baseline)) for record in confirmed
    ]
    if leaders:
        before = [known.led_over for known in run.leaders if known.changes == leaders[0].changes]
        others = sum(record.outcome.measured for record in searched) - 1
        leaders[0] = replace(leaders[0], led_over=max(0, others, *before))
    return leaders + [
        leader(changes=_changes(record, baseline), estimate=record.speedup.low)
        for record in searched
        if record.outcome is Outcome.OK and standings.get(record.trial) not in JUDGED
        if record.speedup is not None and record.speedup.low > 1
    ]


def _changes(record: TrialRecord, baseline: Configuration) -> dict[str, KnobValue]:
    return Configuration(record.asked or record.configuration).differences(baseline)


def _verdict_of(directory: RunDirectory) -> Verdict | None:
    """Return a run's verdict; None where it has no recipe that can be read."""
    try:
        return Recipe.load(directory.recipe_file).evidence.verdict
    except RecipeError:
        return None
