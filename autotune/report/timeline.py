"""How fast was the machine over a run's time: the reference's own speed, and each pair's ratio to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.errors import RunDirectoryError
from autotune.record import Pair, Phase, Slice, TrialRecord
from autotune.report.runs import find_runs, reference_of, trial_configuration
from autotune.run_directory import RunDirectory
from autotune.space.configuration import Configuration
from autotune.stats.disturbance import load_of
from autotune.tuning.ratios import recorded_rate


@dataclass(frozen=True, kw_only=True)
class Point:
    """One slice of the reference, or one pair."""

    at: float  # seconds of the run at which it ended
    value: float  # samples per second of the reference, or a pair's ratio to it
    trial: int
    phase: Phase
    configuration: str  # what the trial sets otherwise than the baseline
    load: float | None  # share of the machine that others took, the larger of a pair's two
    disturbed: bool  # of a pair that other work on the machine disturbed


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of one phase, from its first second to its last, in seconds of the run."""

    phase: Phase
    begins: float
    ends: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One run over its time; points and phases in the order of time."""

    run: str
    workload: str | None
    reference: tuple[Point, ...]  # the baseline's slices
    ratios: tuple[Point, ...]
    phases: tuple[Span, ...]  # one may come again


def timelines(*runs: str | Path) -> tuple[Timeline, ...]:
    """One timeline per run. Raises RunDirectoryError as `find_runs` does, and where no slice tells its time."""
    return tuple(_timeline(directory) for directory in find_runs(*runs))


def _timeline(directory: RunDirectory) -> Timeline:
    run = directory.read_run()
    records = sorted(directory.read_trials(), key=lambda record: record.trial)
    ratios = [point for record in records for point in _ratios(directory, record, records)]
    reference: dict[float, Point] = {}
    for record in records:  # a slice of the confirmation's baseline stands in its own record and in pairs
        for point in _reference(directory, record, records):
            known = reference.get(point.at)
            if known is None or not known.disturbed:  # one leader's pair may be marked, and another's not
                reference[point.at] = point
    if not reference:
        raise RunDirectoryError(
            f"{directory.path}: nothing can be plotted: no slice tells when it was measured",
            hint="A run whose baseline failed has no slices; name the runs that are to be plotted.",
        )
    in_order = sorted(reference.values(), key=lambda point: point.at)
    return Timeline(
        run=run.run,
        workload=run.workload.name if run.workload else None,
        reference=tuple(in_order),
        ratios=tuple(sorted(ratios, key=lambda point: point.at)),
        phases=_phases(records),
    )


def _ratios(directory: RunDirectory, record: TrialRecord, records: Sequence[TrialRecord]) -> Iterator[Point]:
    baseline = reference_of(record, records)
    for pair in record.pairs:
        at = _end_of(pair)
        if at is not None:
            loads = (load_of(pair.baseline), load_of(pair.candidate))
            yield Point(
                at=at,
                value=recorded_rate(pair.candidate, record) / recorded_rate(pair.baseline, baseline),
                trial=record.trial,
                phase=record.phase,
                configuration=_changes(directory, record, baseline),
                load=max((each for each in loads if each is not None), default=None),
                disturbed=pair.disturbed,
            )


def _reference(
    directory: RunDirectory, record: TrialRecord, records: Sequence[TrialRecord]
) -> Iterator[Point]:
    """The baseline's slices that a record holds; those of pairs, which have marks, come last and replace others."""
    baseline = reference_of(record, records)
    alone: tuple[Slice, ...] = ()
    if record is baseline or record.phase is Phase.BASELINE:
        alone = record.slices
    slices = [(each, False) for each in alone] + [(pair.baseline, pair.disturbed) for pair in record.pairs]
    for each, disturbed in slices:
        if each.at is not None:
            yield Point(
                at=each.at,
                value=recorded_rate(each, baseline),
                trial=record.trial,
                phase=record.phase,
                configuration=_changes(directory, record, baseline),
                load=load_of(each),
                disturbed=disturbed,
            )


def _phases(records: Sequence[TrialRecord]) -> tuple[Span, ...]:
    """Each stretch of one phase, up to where the next begins: the search goes on after a confirmation."""
    measured = [
        (each.at, each.seconds, record.phase)
        for record in records
        for each in (
            *record.slices,
            *(side for pair in record.pairs for side in (pair.baseline, pair.candidate)),
        )
        if each.at is not None
    ]
    spans: list[Span] = []
    for at, seconds, phase in sorted(measured):
        if spans and spans[-1].phase is phase:
            spans[-1] = replace(spans[-1], ends=at)
            continue
        begins = at - seconds
        if spans:
            spans[-1] = replace(spans[-1], ends=begins)
        spans.append(Span(phase=phase, begins=begins, ends=at))
    return tuple(spans)


def _changes(directory: RunDirectory, record: TrialRecord, baseline: TrialRecord) -> str:
    return trial_configuration(directory, record).describe(Configuration(baseline.configuration))


def _end_of(pair: Pair) -> float | None:
    known = [each.at for each in (pair.baseline, pair.candidate) if each.at is not None]
    return max(known, default=None)
