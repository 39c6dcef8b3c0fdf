"""How soon `autotune tune` gives an answer: eight workloads, two budgets, and the loop that people write themselves.

    python benchmarks/answers.py [--only NAME]... [--budgets 2m 5m] [--runs DIR] [--quick] [--json FILE]

Runs `autotune tune` once for each workload and budget, one after the other. A run is *settled* if its verdict is
`faster` or `no_significant_gain`. For three workloads `plain_optuna.py` searches the same space for the same time.
A side's *belief* is the configuration that looks best to it so far. A referee (`plain_rounds.py`) measures the beliefs
of both sides by long plain trainings beside the baseline. What counts is when a side's belief is within 5% of the best
for the first time.

Prints one table. The file of `--json` is written after each step, and a benchmark that was killed goes on from there.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import plain_optuna
from figures import Figure, one, parser, report, write
from plain_rounds import Failed, plain_rounds

from autotune.data.options import seconds_of
from autotune.space.configuration import Configuration

ROOT = Path(__file__).resolve().parent.parent
SEEDS: dict[str, dict[str, int]] = {
    "digits_mlp": {"2m": 11, "5m": 12},
    "digits_cnn": {"2m": 21, "5m": 22},
    "photos_jpeg": {"2m": 31, "5m": 32},
    "source_transformer": {"2m": 41, "5m": 42},
    "tabular_wide_deep": {"2m": 51, "5m": 52},
    "mnist_convnet": {"2m": 61, "5m": 62},
    "weather_lstm": {"2m": 71, "5m": 72},
    "two_inputs": {"2m": 81, "5m": 82},
}
"""By workload and budget; other budgets have seed 0."""
BUDGET_QUICK = "20s"
SETTLED = ("faster", "no_significant_gain")
SETTLED_BARS = {"2m": {"min": 6.0}, "5m": {"min": 8.0}}
TIMED_CANDIDATES, CANDIDATE_BAR = "mnist_convnet", {"max": 6.0}
MOST_LEFT, EARLY_BAR = 0.05, {"max": 0.0}
"""An unsettled run may leave this share of its budget."""
COMPARED = ("digits_mlp", "mnist_convnet", "digits_cnn")
PLAIN_SEED = 0
NEAR_BEST, SOONER_BAR = 0.95, {"min": 3.0}
REFEREE_SECONDS, REFEREE_SECONDS_QUICK = 6.0, 0.5
"""Shortest timed stretch of a turn. Each side has two turns."""

NO_EVIDENCE: dict[str, Any] = {"verdict": "none", "speedup": {"value": None}}

Belief = Sequence[Any]
"""The seconds since the start, and the configuration that looks best from then on."""
Record = Mapping[str, Any]
"""A `result.json` or a `recipe.json`."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of `autotune tune`.

    Args:
        name: The workload's name.
        budget: As given on the command line.
        exit_code: None if the run was killed because it took far too long.
        wall_seconds: Of the whole command.
        spent_seconds: By the run's own clock; the wall time if there is no recipe.
        verdict: `none` if there is no recipe.
        speedup: The claim; None if there is no recipe.
        ci95: Its interval.
        candidates: Distinct configurations that were tried, the baseline not counted.
        candidate_seconds: Of each trial of the search.
        timed_seconds: Of all timed slices together.
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
    candidates: int
    candidate_seconds: Sequence[float]
    timed_seconds: float
    beliefs: Sequence[Belief]
    remark: str

    @property
    def settled(self) -> bool:
        """Whether the run says what to do."""
        return self.verdict in SETTLED

    @property
    def left_time(self) -> bool:
        """Whether the run ended unsettled with time left."""
        return not self.settled and self.spent_seconds < (1 - MOST_LEFT) * seconds_of("budget", self.budget)


# --------------------------------------------------------------------------------------- reading and deciding


def running_best(found: Iterable[tuple[float, float, dict[str, Any]]], above: float = 0.0) -> list[Belief]:
    """The configurations that looked best when they were found.

    Args:
        found: Time, speed and configuration, in any order.
        above: A speed that is no gain.
    """
    beliefs, best = list[Belief](), above
    for seconds, speed, configuration in sorted(found, key=lambda each: each[0]):
        if speed > best:
            best = speed
            beliefs.append((seconds, configuration))
    return beliefs


def first_near_best(beliefs: Iterable[Belief], speeds: Mapping[str, float]) -> float | None:
    """When a belief is within 5% of the best for the first time, in seconds; None if never.

    Args:
        beliefs: Of one side, in order of time.
        speeds: The referee's speeds of the beliefs of both sides, by `Configuration.key`.
    """
    wanted = NEAR_BEST * max(speeds.values())
    return next((at for at, each in beliefs if speeds[Configuration(each).key] >= wanted), None)


def timed_seconds(trials: Iterable[Record]) -> float:
    """All timed slices of all trials. A slice that stands in several records counts once."""
    slices = dict[tuple[float | None, float], float]()
    for trial in trials:
        paired = [pair[side] for pair in trial["pairs"] for side in ("baseline", "candidate")]
        slices |= {(each.get("at"), each["seconds"]): each["seconds"] for each in [*trial["slices"], *paired]}
    return sum(slices.values())


def beliefs_of(trials: Iterable[Record], late_seconds: float) -> list[Belief]:
    """What looked best to the search, and faster than the baseline.

    Args:
        trials: All of a run.
        late_seconds: What the command takes before the run's clock starts.
    """
    return running_best(
        (
            (late_seconds + each["ended_at_seconds"], each["speedup"]["value"], each["configuration"])
            for each in trials
            if each["phase"] == "search" and each["outcome"] in ("ok", "pruned") and each["speedup"]
        ),
        above=1.0,
    )


def read_run(trials: Sequence[Record], recipe: Record | None, *, wall_seconds: float, **command: Any) -> Run:
    """What the files of a run say.

    Args:
        trials: Of all its trials.
        recipe: None if there is none.
        wall_seconds: Of the command.
        command: The other fields that tell of the command.
    """
    search = [each for each in trials if each["phase"] == "search"]
    evidence: Record = recipe["evidence"] if recipe else NO_EVIDENCE
    spent = recipe["created_by"]["spent_seconds"] if recipe else wall_seconds
    beliefs = beliefs_of(trials, max(0.0, wall_seconds - spent))
    if recipe and evidence["verdict"] == "faster":
        beliefs.append((wall_seconds, recipe["configuration"]))
    return Run(
        **command,
        wall_seconds=wall_seconds,
        spent_seconds=spent,
        verdict=evidence["verdict"],
        speedup=evidence["speedup"]["value"],
        ci95=[evidence["speedup"][bound] for bound in ("low", "high")] if recipe else None,
        candidates=len({Configuration(each["configuration"]) for each in search}),
        candidate_seconds=[each["seconds"] for each in search],
        timed_seconds=timed_seconds(trials),
        beliefs=beliefs,
    )


def longest(runs: Iterable[Run], name: str) -> Run | None:
    """The run of a workload with the largest budget."""
    of_name = [each for each in runs if each.name == name]
    return max(of_name, key=lambda each: seconds_of("budget", each.budget), default=None)


# --------------------------------------------------------------------------------------------------- figures


@dataclass
class Results:
    """All that was measured so far.

    Args:
        file: Where it is kept; nowhere if None.
        runs: By workload and budget.
        plain: The beliefs of the plain loop, by workload and budget.
        referee: Speed-ups by workload and budget, and by `Configuration.key`.
    """

    file: Path | None
    runs: dict[str, Run] = field(default_factory=dict)
    plain: dict[str, list[Belief]] = field(default_factory=dict)
    referee: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path | None) -> "Results":
        """What the file holds; nothing if there is none."""
        if file is None or not file.exists():
            return cls(file)
        found = json.loads(file.read_text(encoding="utf-8"))
        runs = {key: Run(**each) for key, each in found["runs"].items()}
        return cls(file, runs, found["plain"], found["referee"])

    @property
    def parts(self) -> dict[str, Any]:
        """What `load` reads."""
        runs = {key: asdict(each) for key, each in self.runs.items()}
        return {"runs": runs, "plain": self.plain, "referee": self.referee}

    def save(self) -> None:
        """Write the file."""
        write("answers", figures(self), self.file, self.parts)


def figures(results: Results) -> dict[str, Figure]:
    """All figures of the table, by name, with their bars."""
    runs = list(results.runs.values())
    found = dict[str, Figure]()
    for key, each in results.runs.items():
        how = f"{each.candidates} candidates, {each.spent_seconds:.0f} s, exit code {each.exit_code}"
        found[f"{key}: {each.verdict}, {how}"] = one(each.speedup, 1, ci95=each.ci95)
    taken = [seconds for each in runs if each.name == TIMED_CANDIDATES for seconds in each.candidate_seconds]
    shares = [each.timed_seconds / each.wall_seconds for each in runs]
    for name, values, bar in (
        (f"seconds a candidate takes, {TIMED_CANDIDATES}, median", taken, CANDIDATE_BAR),
        ("share of wall time in timed slices, median", shares, None),
    ):
        found[name] = one(statistics.median(values) if values else None, len(values), bar)
    found["runs that end unsettled with time left"] = one(sum(each.left_time for each in runs), len(runs), EARLY_BAR)
    for budget in dict.fromkeys(each.budget for each in runs):
        settled = [each.settled for each in runs if each.budget == budget]
        bar = SETTLED_BARS.get(budget) if len(settled) == len(SEEDS) else None
        found[f"settled after {budget}"] = one(sum(settled), len(settled), bar)
    for key, speeds in results.referee.items():
        found |= compared(results.runs[key], results.plain[key], speeds)
    return found


def compared(run: Run, plain: Sequence[Belief], speeds: Mapping[str, float]) -> dict[str, Figure]:
    """How many times sooner the tuner is near the best. A loop that never is there counts with its whole budget."""
    own, other = first_near_best(run.beliefs, speeds), first_near_best(plain, speeds)
    counted = seconds_of("budget", run.budget) if other is None else other
    at_least = " (at least)" if other is None else ""
    return {
        f"seconds to within 5% of the best, {run.name}, autotune": one(own, len(run.beliefs)),
        f"seconds to within 5% of the best, {run.name}, plain Optuna": one(other, len(plain)),
        f"times sooner than plain Optuna, {run.name}{at_least}": one(
            None if own is None else counted / own, len(speeds), SOONER_BAR
        ),
    }


# ------------------------------------------------------------------------------------------------ measuring


class Command(NamedTuple):
    """How a command ended: `exit_code` is None if it had to be killed."""

    exit_code: int | None
    wall_seconds: float
    remark: str


def tune(file: Path, budget: str, seed: int, out: Path, *more: str) -> Command:
    """Run `autotune tune`."""
    command = [sys.executable, "-m", "autotune", "tune", str(file), "--fresh", *more]
    command += ["--budget", budget, "--seed", str(seed), "--out", str(out)]
    patience, began = 2 * seconds_of("budget", budget) + 120, time.monotonic()
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=patience)
    except subprocess.TimeoutExpired:
        return Command(None, time.monotonic() - began, f"killed after {patience:.0f} s")
    words = (ended.stderr or ended.stdout).strip().splitlines()[-2:] if ended.returncode else []
    return Command(ended.returncode, time.monotonic() - began, " ".join(words))


def tuned(name: str, budget: str, runs_directory: Path) -> Run:
    """One run of the tuner."""
    out = Path(tempfile.mkdtemp(prefix=f"{name}-{budget}-", dir=runs_directory))
    command = tune(workload_file(name), budget, SEEDS[name].get(budget, 0), out)
    recipe = out / "recipe.json"
    return read_run(
        [json.loads(each.read_text()) for each in sorted(out.glob("trials/*/result.json"))],
        json.loads(recipe.read_text()) if recipe.exists() else None,
        name=name,
        budget=budget,
        **command._asdict(),
    )


def workload_file(name: str) -> Path:
    """Where a workload is."""
    own = ROOT / "benchmarks" / "workloads" / f"{name}.py"
    return own if own.exists() else ROOT / "examples" / f"{name}.py"


def refereed(name: str, beliefs: Iterable[Belief], seconds: float) -> dict[str, float]:
    """Speed-ups over the baseline in long plain trainings, by `Configuration.key`; 0 for what fails."""
    speeds: dict[str, float] = {}
    with plain_rounds(workload_file(name)) as rounds:
        for configuration in dict.fromkeys(Configuration(each) for _, each in beliefs):
            baseline, candidate = 1.0, 1.0
            if configuration.differences(rounds.baseline):
                try:
                    baseline, candidate = rounds.speeds(configuration, seconds)
                except Failed as error:
                    progress(f"{name}: {error}")
                    candidate = 0.0
            speeds[configuration.key] = candidate / baseline
            shown = configuration.describe(rounds.baseline)
            progress(f"{name}: refereed ×{candidate / baseline:.3f} {shown}")
    return speeds


def measure(results: Results, given: argparse.Namespace, runs_directory: Path) -> None:
    """All that is not in the results yet."""
    for budget in given.budgets:
        for name in given.only:
            key = f"{name} {budget}"
            if key not in results.runs:
                run = results.runs[key] = tuned(name, budget, runs_directory)
                results.save()
                progress(f"{key}: {run.verdict} ×{run.speedup}, {run.spent_seconds:.0f} s {run.remark}")
    for name in COMPARED:
        longest_run = longest(results.runs.values(), name)
        if longest_run is None or name not in given.only:
            continue
        key = f"{name} {longest_run.budget}"
        if key not in results.plain:
            progress(f"{key}: plain Optuna")
            trials = plain_optuna.search(workload_file(name), seconds_of("budget", longest_run.budget), PLAIN_SEED)
            results.plain[key] = running_best(
                (each.ended_at_seconds, each.samples_per_second or 0.0, each.configuration) for each in trials
            )
            results.save()
        beliefs = [*longest_run.beliefs, *results.plain[key]]
        if key not in results.referee and beliefs:
            seconds = REFEREE_SECONDS_QUICK if given.quick else REFEREE_SECONDS
            results.referee[key] = refereed(name, beliefs, seconds)
            results.save()


def progress(line: str) -> None:
    """To stderr, so that stdout holds the table alone."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print, and write."""
    made = parser(__doc__)
    made.add_argument("--only", action="append", choices=list(SEEDS), help="a workload; all by default")
    made.add_argument("--budgets", nargs="+", help=f"{' and '.join(SETTLED_BARS)} by default")
    made.add_argument("--runs", type=Path, help="keep the run directories here")
    given = made.parse_args()
    given.only = given.only or (["digits_mlp"] if given.quick else list(SEEDS))
    given.budgets = given.budgets or ([BUDGET_QUICK] if given.quick else list(SETTLED_BARS))
    results = Results.load(given.json)
    with tempfile.TemporaryDirectory() as scratch:
        directory: Path = given.runs or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        measure(results, given, directory.resolve())
    report("answers", figures(results), given.json, results.parts)


if __name__ == "__main__":
    main()
