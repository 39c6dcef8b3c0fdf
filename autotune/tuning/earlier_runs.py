"""Read what earlier runs left: the leaders that a new run tries first, and the run that is resumed.

A new run takes over configurations, of runs and given recipes, and no measurements. The files may come from other
people: reading them executes nothing, and a damaged run is skipped.

A run can be stopped at any moment. Records are the truth: a trial with a `result.json` is known, the study's file
follows (see `Sampler.catch_up`), and an interrupted trial is started again under another number.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from autotune.data.errors import RecipeError, RunDirectoryError
from autotune.data.facts import Machine
from autotune.data.models import KnobValue
from autotune.data.options import Objective, Options
from autotune.data.printable import masked_names, one_line, plural
from autotune.data.record import Outcome, Phase, Standing, TrialRecord, reference_of
from autotune.data.run_directory import (
    START_ANEW,
    EarlierLeader,
    Resumption,
    RunDirectory,
    RunRecord,
    left_out,
    newest_runs,
    options_of,
)
from autotune.machine.fingerprint import find_nearest, kind_of
from autotune.recipe.recipe import Recipe, first_difference
from autotune.space.configuration import Configuration, baseline_of, format_value, read_trials
from autotune.space.space_file import ResolvedSpace
from autotune.stats.deciding import Verdict
from autotune.tuning.trial import Trial, now_utc

MOST_RUNS = 50  # the newest, whose run.json is read
MOST_READ = 6  # runs of the same workload whose trials are read
MOST_LEADERS = 2  # of earlier runs
MOST_OF_RECIPES = 4
_OF_RECIPE = "the recipe of "  # before a kind of machine: the name of a leader that is from a recipe
NOT_FASTER = (Verdict.NO_SIGNIFICANT_GAIN, Verdict.UNSTABLE)  # of runs that have no leaders of the same training
JUDGED = (Standing.CONFIRMED, Standing.NOT_SHOWN, Standing.UNSTABLE)  # whose estimates in the search count no more


def find_leaders(
    results: Path | None, run: RunRecord, space: ResolvedSpace, recipes: Sequence[Recipe] = ()
) -> tuple[EarlierLeader, ...]:
    """Return the leaders that a new run tries first, the most promising first.

    Leaders found on this kind of machine come before those of the same device, and these before others. Confirmed ones
    come before estimates, those of newer runs before those of older ones, and those of runs before
    those of recipes.

    Args:
        results: The directory below which runs are looked for; None for none.
        run: The new run, whose baseline has started.
        space: The new run's search space.
        recipes: Recipes of the same training, each of another kind of machine.
    """
    found = []
    for kinship, directory, earlier in [] if results is None else _same_runs(results, run)[:MOST_READ]:
        before = {} if earlier.search_space is None else earlier.search_space.choices
        had_all = all({*now} - {space.baseline[name]} <= {*before.get(name, ())} for name, now in space.choices.items())
        leaders = _leaders_of(directory, earlier, kinship, name=str(directory.path.relative_to(results or ".")))
        found += leaders if had_all else [replace(leader, led_over=0) for leader in leaders]
    found += _leaders_in(recipes, run)
    chosen: dict[Configuration, EarlierLeader] = {}
    room = {False: MOST_LEADERS, True: MOST_OF_RECIPES}
    for leader in sorted(found, key=lambda leader: (leader.kinship, -leader.estimate)):
        configuration = _move(leader.changes, space)
        changes = configuration.differences(space.baseline)
        is_known = leader.kinship == 0 and changes == leader.changes
        led_over = leader.led_over if is_known else 0
        confirmed = leader.estimate == math.inf and changes.keys() == leader.changes.keys()  # the space has them all
        if known := chosen.get(configuration):
            update = {"led_over": max(known.led_over, led_over), "confirmed": known.confirmed or confirmed}
            chosen[configuration] = known.model_copy(update=update)
        elif changes and room[leader.of_recipe]:
            room[leader.of_recipe] -= 1
            chosen[configuration] = EarlierLeader(
                run=leader.run, changes=changes, confirmed=confirmed, led_over=led_over
            )
    return tuple(chosen.values())


def starting_points(leaders: Sequence[EarlierLeader], space: ResolvedSpace) -> dict[Configuration, EarlierLeader]:
    """Return the configurations that a run tries first, each with the leader that it is from."""
    return {_move(leader.changes, space): leader for leader in leaders}


def describe_leaders(leaders: Sequence[EarlierLeader], space: ResolvedSpace) -> str:
    """Say which leaders of which runs and recipes are tried first."""
    runs = " and ".join(dict.fromkeys(leader.run for leader in leaders))
    shown = "; ".join(configuration.describe(space.baseline) for configuration in starting_points(leaders, space))
    which = "leaders" if len(leaders) > 1 else "leader"
    ignoring = "" if all(leader.run.startswith(_OF_RECIPE) for leader in leaders) else ". --fresh ignores earlier runs"
    return one_line(f"starting from the {which} of {runs}: {shown}{ignoring}")


def _move(changes: Mapping[str, KnobValue], space: ResolvedSpace) -> Configuration:
    """Return the baseline with those changes that the space allows."""
    moved = {name: _choice_for(name, value, space.choices.get(name, ())) for name, value in changes.items()}
    return space.configuration({name: choice for name, choice in moved.items() if choice is not None})


def _choice_for(name: str, value: KnobValue, choices: Sequence[KnobValue]) -> KnobValue | None:
    """Return the choice that a value stands for; None where the space has none."""
    same = [choice for choice in choices if format_value(choice) == format_value(value)]
    if name == "steps_per_execution" and not same:  # a recipe has what was in force: a divisor of an epoch's steps
        same = sorted(choice for choice in choices if int(choice) >= int(value))[:1]
    return next(iter(same), None)


# ------------------------------------------------------------------------------------------ runs on disk


def _same_runs(results: Path, run: RunRecord) -> list[tuple[int, RunDirectory, RunRecord]]:
    """Return the runs of the same workload, the newest first, each with its machine's kinship; see `_PastLeader`."""
    same = []
    for directory in newest_runs(results, most=MOST_RUNS):
        try:
            earlier = directory.read_run()
        except RunDirectoryError:
            continue
        if run.workload is None or earlier.workload is None or first_difference(run.workload, earlier.workload):
            continue
        known, own = earlier.workload, run.workload
        may_differ = known.script is not None and own.script is not None and known.fingerprint != own.fingerprint
        if may_differ and os.path.normpath(known.reference) != os.path.normpath(own.reference):
            continue  # another script of the same shapes may compute something else
        if _objective_of(earlier) != _objective_of(run):
            continue
        kinship = _kinship(earlier.machine, run.machine, same_device=earlier.workload.device == run.workload.device)
        same.append((kinship, directory, earlier))
    return sorted(same, key=lambda found: found[0])


# ------------------------------------------------------------------------------------------ their leaders


@dataclass(frozen=True, kw_only=True)
class _PastLeader:
    """A configuration that was faster than the baseline of an earlier run, or of a recipe."""

    run: str  # where it was found, for messages
    kinship: int  # of that machine: 0 for this one's kind, 1 for another with the same device, 2 for others
    changes: dict[str, KnobValue]  # from that run's baseline
    estimate: float = math.inf  # the lower bound of its speed-up in the search; infinite where it was confirmed
    led_over: int = 0  # see `EarlierLeader`
    of_recipe: bool = False


def _leaders_of(directory: RunDirectory, run: RunRecord, kinship: int, *, name: str) -> list[_PastLeader]:
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

    leader = partial(_PastLeader, run=name, kinship=kinship)
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


def _objective_of(run: RunRecord) -> object:
    return run.arguments.get("objective", "throughput")


def _kinship(measured: Machine, here: Machine, *, same_device: bool) -> int:
    """Return how near a machine is to this one; see `_PastLeader`."""
    return 0 if not measured.differences(here) else 1 if same_device else 2


# ------------------------------------------------------------------------------------------ given recipes


def why_unused(recipes: Sequence[Recipe], run: RunRecord) -> str:
    """Return why a run can take nothing over from recipes, in half a sentence; empty where it can."""
    assert run.workload is not None
    if difference := first_difference(recipes[0].workload, run.workload):
        return f"it is of another training: {difference}"
    if not any(recipe.evidence.objective == _objective_of(run) for recipe in recipes):
        return f"its objective is {recipes[0].evidence.objective}"
    return ""


def _leaders_in(recipes: Sequence[Recipe], run: RunRecord) -> list[_PastLeader]:
    """Return the confirmed configurations of recipes, the nearest kind of machine first."""
    assert run.workload is not None
    found = []
    for recipe in (recipes[index] for index in find_nearest([recipe.machine for recipe in recipes], run.machine)):
        if recipe.evidence.objective != _objective_of(run):
            continue
        is_same_device = bool(recipe.machine.gpus) == (run.workload.device == "gpu")
        kinship = _kinship(recipe.machine, run.machine, same_device=is_same_device)
        answers = [answer for answer in (recipe.same_training, recipe.larger_batch) if answer is not None]
        for knobs in (recipe.configuration, *(answer.configuration for answer in answers if answer.confirmed)):
            changes = Configuration(knobs).differences(Configuration(recipe.baseline))
            name = f"{_OF_RECIPE}{kind_of(recipe.machine)}"
            found.append(_PastLeader(run=name, kinship=kinship, changes=changes, of_recipe=True))
    return found


# ---------------------------------------------------------------------------------- an invocation to continue


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """A run to continue."""

    run: RunRecord
    records: Mapping[int, TrialRecord]  # its trials by number, without those that were interrupted
    next_number: int  # the first trial number that was never used
    damage: str = ""  # the trials that cannot be read, in a sentence

    @property
    def options(self) -> Options:
        """The options of the run. Raises RunDirectoryError."""
        return options_of(self.run)

    @property
    def spent_seconds(self) -> float:
        """The seconds that the run took up to the end of its last finished trial, without pauses."""
        # They are what the run's own clock said when trials ended: the wall clock may have been set since.
        return max((record.ended_at_seconds or 0.0 for record in self.records.values()), default=0.0)

    def trials(self) -> list[Trial]:
        """Return the finished trials, as the search knows them; the baseline first."""
        objective: Objective = "energy" if self.run.arguments.get("objective") == "energy" else "time_to_loss"
        records = [record for _, record in sorted(self.records.items())]
        trials = {record.trial: Trial.from_record(record, objective) for record in records}
        for record in records:
            trials[record.trial].reference = trials[reference_of(record, records).trial]
        return list(trials.values())


def read_earlier(directory: RunDirectory) -> Earlier:
    """Read the run to continue. Raises RunDirectoryError."""
    run, problems = directory.read_run(), list[RunDirectoryError]()
    records = {record.trial: record for record in read_trials(directory, problems)}
    damaged = directory.trial_numbers("result.json") - records.keys()
    if 0 in damaged:
        raise RunDirectoryError(f"the baseline's record cannot be read: {problems[0].message}", hint=START_ANEW)
    usable = {
        number: record
        for number, record in records.items()
        if record.outcome is not Outcome.INTERRUPTED
        and not any(damaged & {looks.candidate, looks.reference, looks.champion} for looks in record.looks[-1:])
    }
    if 0 in usable and usable[0].outcome is not Outcome.OK:
        del usable[0]  # a baseline that failed is tried again
    if 0 not in usable:
        return Earlier(run=run, records={}, next_number=0)  # from the very beginning
    if any(record.own_slices and not record.processes for record in usable.values()):
        raise RunDirectoryError(
            f"{directory.path} was begun by another version of autotune, whose records have another format",
            hint="Start a new run. show and compare still read this one.",
        )
    return Earlier(
        run=run,
        records=usable,
        next_number=max(directory.trial_numbers()) + 1,
        damage=left_out(problems) if problems else "",
    )


def resumption_notes(earlier: Earlier) -> Iterator[str]:
    """Describe what the run takes from its directory."""
    yield f"resumed: {plural(len(earlier.records), 'trial')} finished before"
    args = earlier.options.args
    if args and not masked_names(args):  # else they were just given
        yield f"the script gets the arguments of the run: {shlex.join(args)}"
    if earlier.damage:
        yield earlier.damage


def note_resumption(directory: RunDirectory, earlier: Earlier) -> None:
    """Record that the run continues now, so that the pause before does not count as its time."""
    now = Resumption(at=now_utc(), spent_seconds=earlier.spent_seconds)
    directory.write_run(earlier.run.model_copy(update={"resumed": (*earlier.run.resumed, now)}))


def refuse_another_machine(earlier: Earlier, machine: Machine) -> None:
    """Refuse to mix figures of two machines. Raises RunDirectoryError."""
    differences = earlier.run.machine.differences(machine)
    if differences:
        raise RunDirectoryError(
            f"{earlier.run.run} was begun on another machine: {'; '.join(differences)}", hint=START_ANEW
        )


def refuse_another_workload(earlier: Earlier, *, fingerprint: str) -> None:
    """Refuse to mix figures of two workloads. Raises RunDirectoryError."""
    run = earlier.run
    if run.workload is not None and run.workload.fingerprint != fingerprint:
        raise RunDirectoryError(
            f"{run.run} cannot be resumed: the workload's file changed since it began", hint=START_ANEW
        )


def refuse_another_question(
    earlier: Earlier, *, baseline: Configuration, choices: Mapping[str, Sequence[KnobValue]], parameters: int
) -> None:
    """Refuse to mix figures of two baselines, models or search spaces. Raises RunDirectoryError."""
    run = earlier.run
    changed = []
    if run.baseline is not None and Configuration(run.baseline) != baseline:
        changed.append("the baseline")
    if run.workload is not None and run.workload.parameters not in (None, parameters):
        changed.append(f"the model ({run.workload.parameters:,} weights before, {parameters:,} now)")
    before = {} if run.search_space is None else run.search_space.choices
    if before and {k: tuple(v) for k, v in before.items()} != {k: tuple(v) for k, v in choices.items()}:
        changed.append("the search space")
    if changed:
        raise RunDirectoryError(
            f"{run.run} cannot be resumed: {' and '.join(changed)} changed since it began", hint=START_ANEW
        )
