"""Read what the files of a run of `autotune tune` say, for `answers.py`. Pure: records in, figures out."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.data.options import seconds_of
from autotune.space.configuration import Configuration

SETTLED = ("faster", "no_significant_gain")
MOST_LEFT = 0.05
"""An unsettled run may leave this share of its budget."""
NEAR_BEST = 0.95
NO_EVIDENCE: dict[str, Any] = {"verdict": "none", "speedup": {"value": None}}

Belief = Sequence[Any]
"""The seconds since the start, and the configuration that looks best from then on."""
Record = Mapping[str, Any]
"""A `result.json` or a `recipe.json`."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of `autotune tune`. Seconds count from the start of the command.

    Args:
        name: The workload's name.
        budget: As given on the command line, or the default.
        exit_code: None if the run was killed because it took far too long.
        wall_seconds: Of the whole command.
        spent_seconds: By the run's own clock; the wall time if there is no recipe.
        verdict: `none` if there is no recipe.
        speedup: The claim; None if there is no recipe.
        ci95: Its interval.
        settled_seconds: When a gain was first claimed, or the end of a run that excludes gains; None if unsettled.
        candidates: Distinct configurations that were tried, the baseline not counted.
        candidate_seconds: Of each trial of the search.
        candidate_steps: See `candidate_steps`.
        first_candidate_steps: See `first_candidate_steps`.
        timed_seconds: Of all timed slices together.
        searched: When each trial of the search ended, its configuration, and its speed-up if it has one.
        speedups: By `Configuration.key`, from the latest confirmation of a configuration, else from the search.
        beliefs: In order of time.
        remark: The last words of a command that failed.
    """

    name: str
    budget: str
    exit_code: int | None
    wall_seconds: float
    spent_seconds: float
    verdict: str
    speedup: float | None
    ci95: Sequence[float] | None
    settled_seconds: float | None
    candidates: int
    candidate_seconds: Sequence[float]
    candidate_steps: Sequence[float]
    first_candidate_steps: float | None
    timed_seconds: float
    searched: Sequence[Sequence[Any]]
    speedups: Mapping[str, float]
    beliefs: Sequence[Belief]
    remark: str

    @property
    def settled(self) -> bool:
        """Return whether the run says what to do."""
        return self.verdict in SETTLED

    @property
    def left_time(self) -> bool:
        """Return whether the run ended unsettled with time left."""
        return not self.settled and self.spent_seconds < (1 - MOST_LEFT) * seconds_of("budget", self.budget)


def read_run(trials: Sequence[Record], recipe: Record | None, *, wall_seconds: float, **command: Any) -> Run:
    """Return what the files of a run say.

    Args:
        trials: Of all its trials.
        recipe: None if there is none.
        wall_seconds: Of the command.
        command: The other fields that tell of the command.
    """
    search = sorted((trial for trial in trials if trial["phase"] == "search"), key=_end_of)
    evidence: Record = recipe["evidence"] if recipe else NO_EVIDENCE
    spent = recipe["created_by"]["spent_seconds"] if recipe else wall_seconds
    late = max(0.0, wall_seconds - spent)
    searched = [(late + _end_of(trial), trial["configuration"], _speedup_of(trial)) for trial in search]
    beliefs = running_best(((at, speedup, knobs) for at, knobs, speedup in searched if speedup is not None), above=1.0)
    if recipe and evidence["verdict"] == "faster":
        beliefs.append((wall_seconds, recipe["configuration"]))
    settled = settled_at(trials, evidence["verdict"], spent)
    return Run(
        **command,
        wall_seconds=wall_seconds,
        spent_seconds=spent,
        verdict=evidence["verdict"],
        speedup=evidence["speedup"]["value"],
        ci95=[evidence["speedup"][bound] for bound in ("low", "high")] if recipe else None,
        settled_seconds=None if settled is None else late + settled,
        candidates=len({Configuration(trial["configuration"]) for trial in search}),
        candidate_seconds=[trial["seconds"] for trial in search],
        candidate_steps=candidate_steps(trials),
        first_candidate_steps=first_candidate_steps(trials),
        timed_seconds=timed_seconds(trials),
        searched=searched,
        speedups=speedups_of(trials),
        beliefs=beliefs,
    )


def settled_at(trials: Iterable[Record], verdict: str, spent_seconds: float) -> float | None:
    """Return when a run was settled, in seconds of the run; None if it was not."""
    if verdict == "faster":
        claims = [looks["confirmed_at_seconds"] for trial in trials for looks in trial["looks"]]
        return min((seconds for seconds in claims if seconds is not None), default=spent_seconds)
    return spent_seconds if verdict in SETTLED else None


# ---------------------------------------------------------------------------------------------------- beliefs


def running_best(found: Iterable[tuple[float, float, dict[str, Any]]], above: float = 0.0) -> list[Belief]:
    """Return the configurations that looked best when they were found.

    Args:
        found: Time, speed and configuration, in any order.
        above: A speed that is no gain.
    """
    beliefs, best = list[Belief](), above
    for seconds, speed, configuration in sorted(found, key=lambda entry: entry[0]):
        if speed > best:
            best = speed
            beliefs.append((seconds, configuration))
    return beliefs


def first_near_best(beliefs: Iterable[Belief], speeds: Mapping[str, float]) -> float | None:
    """Return when a belief is within 5% of the best for the first time, in seconds; None if never.

    Args:
        beliefs: Of one side, in order of time.
        speeds: The referee's speeds of the beliefs of both sides, by `Configuration.key`.
    """
    wanted = NEAR_BEST * max(speeds.values())
    return next((at for at, knobs in beliefs if speeds[Configuration(knobs).key] >= wanted), None)


def speedups_of(trials: Iterable[Record]) -> dict[str, float]:
    """Return the last known speed-up of every configuration, by `Configuration.key`; confirmations come last."""
    measured = [(trial, speedup) for trial in trials if (speedup := _speedup_of(trial)) is not None]
    measured.sort(key=lambda entry: (entry[0]["phase"] == "confirm", entry[0]["trial"]))
    return {Configuration(trial["configuration"]).key: speedup for trial, speedup in measured}


def pool_speedups(runs: Iterable[Run]) -> dict[str, float]:
    """Return the geometric mean of what several runs of a workload say of each configuration's speed-up."""
    pooled = dict[str, list[float]]()
    for run in runs:
        for key, speedup in run.speedups.items():
            pooled.setdefault(key, []).append(speedup)
    return {key: statistics.geometric_mean(speedups) for key, speedups in pooled.items()}


def share_of_best(
    run: Run, speedups: Mapping[str, float], *, candidates: int | None = None, seconds: float = math.inf
) -> float:
    """Return the speed of what looks best early in a run over that of the best known; the baseline's is 1.

    Args:
        run: The run.
        speedups: By `Configuration.key`.
        candidates: Look at the first so many trials of the search; None for all.
        seconds: Look at trials that ended by then.
    """
    seen = [entry for entry in run.searched[:candidates] if entry[0] <= seconds and entry[2] is not None]
    beliefs = running_best(((at, speedup, knobs) for at, knobs, speedup in seen), above=1.0)
    reached = speedups[Configuration(beliefs[-1][1]).key] if beliefs else 1.0
    return reached / max(1.0, *speedups.values()) if speedups else 1.0


# ------------------------------------------------------------------------------------------------------ costs


def timed_seconds(trials: Iterable[Record]) -> float:
    """Return the seconds of all timed slices. A slice that stands in several records counts once."""
    slices = dict[tuple[float | None, float], float]()
    for trial in trials:
        paired = [pair[side] for pair in trial["pairs"] for side in ("baseline", "candidate")]
        slices |= {(taken.get("at"), taken["seconds"]): taken["seconds"] for taken in [*trial["slices"], *paired]}
    return sum(slices.values())


def first_candidate_steps(trials: Sequence[Record]) -> float | None:
    """Return the steps of the baseline between its first step and the first candidate's figure.

    The candidate's own start and first step do not count: neither process can be measured before it has trained.
    None where no candidate was measured.
    """
    baseline, ends = _baseline(trials), _search_ends(trials)
    if baseline is None or not ends:
        return None
    log, first = baseline["processes"][0], baseline["slices"][0]
    warm_up = log["ready_seconds"] - log["first_step_seconds"]
    first_step_at = first["at"] - first["seconds"] - warm_up
    figure_at, start = ends[0]
    return float((figure_at - start - first_step_at) / _step_seconds(baseline))


def candidate_steps(trials: Sequence[Record]) -> list[float]:
    """Return the steps of the baseline that each process of the search costs beside its start and first step.

    It costs the time since the figure before, so what the driver does in between counts. Processes that follow a
    confirmation are left out: the seat's baseline starts anew for them.
    """
    baseline = _baseline(trials)
    if baseline is None:
        return []
    marks: list[tuple[float, float | None, bool]] = [(end, start, False) for end, start in _search_ends(trials)]
    for trial in trials:
        if trial["phase"] != "search":
            marks += [(end, None, trial["phase"] == "confirm") for end in _slice_ends(trial)]
        elif not trial["pairs"]:  # it failed
            marks.append((_end_of(trial), None, False))
    marks.sort(key=lambda mark: mark[0])
    return [
        (end - start - before) / _step_seconds(baseline)
        for (before, _, after_confirmation), (end, start, _) in itertools.pairwise(marks)
        if start is not None and not after_confirmation
    ]


def _baseline(trials: Iterable[Record]) -> Record | None:
    """Return the baseline's own record if it was timed."""
    timed = (trial for trial in trials if trial["phase"] == "baseline" and trial["slices"] and trial["processes"])
    return next(timed, None)


def _step_seconds(baseline: Record) -> float:
    return float(statistics.median(taken["seconds"] / taken["steps"] for taken in baseline["slices"]))


def _search_ends(trials: Iterable[Record]) -> list[tuple[float, float]]:
    """Return when each process of the search was measured, and the seconds of its start and first step, in order."""
    ends = list[tuple[float, float]]()
    for trial in trials:
        logs = trial["processes"]
        if trial["phase"] != "search" or trial["instances"] != len(logs):  # a process that died before it was warm
            continue
        for number, log in enumerate(logs):
            own = {**trial, "pairs": [pair for pair in trial["pairs"] if pair["instance"] == number]}
            if stamps := _slice_ends(own):
                ends.append((max(stamps), log["first_step_seconds"]))
    return sorted(ends)


def _slice_ends(trial: Record) -> list[float]:
    paired = [pair[side] for pair in trial["pairs"] for side in ("baseline", "candidate")]
    return [taken["at"] for taken in [*trial["slices"], *paired] if taken.get("at") is not None]


def _end_of(trial: Record) -> float:
    return float(trial["ended_at_seconds"])


def _speedup_of(trial: Record) -> float | None:
    """Return a trial's speed-up; None where it has none, or has failed."""
    good = trial["outcome"] in ("ok", "pruned") and trial["speedup"]
    return float(trial["speedup"]["value"]) if good else None
