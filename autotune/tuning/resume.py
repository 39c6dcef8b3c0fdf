"""Read what an earlier invocation left in a run directory, to continue from it without measuring anything twice.

A run can be stopped at any moment. Records are the truth: a trial with a `result.json` is known, the study's file
follows (see `Sampler.catch_up`), and an interrupted trial is started again under another number.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.data.errors import RunDirectoryError
from autotune.data.facts import Machine
from autotune.data.models import KnobValue
from autotune.data.options import Objective, Options
from autotune.data.printable import masked_names, plural
from autotune.data.record import Outcome, TrialRecord, reference_of
from autotune.data.run_directory import START_ANEW, Resumption, RunDirectory, RunRecord, left_out, options_of
from autotune.space.configuration import Configuration, read_trials
from autotune.tuning.trial import Trial, now_utc


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
        trials = {record.trial: Trial.of_record(record, objective) for record in records}
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
    """Say what is taken from the run directory."""
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
