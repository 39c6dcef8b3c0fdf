"""How soon `autotune tune` gives an answer: eight workloads, two budgets, and the loop that people write themselves.

    python benchmarks/answers.py [--only NAME]... [--budgets 2m 5m] [--load] [--runs DIR] [--quick] [--json FILE]

Runs `autotune tune` once for each workload and budget, one after the other. A run is *settled* if its verdict is
`faster` or `no_significant_gain`. For three workloads `plain_optuna.py` searches the same space for the same time.
A side's *belief* is the configuration that looks best to it so far. A referee (`plain_rounds.py`) measures the beliefs
of both sides by long plain trainings beside the baseline. What counts is when a side's belief is within 5% of the best
for the first time. With `--load` the runs share every core with another process (`load.py`), and nothing is refereed.
`slow_answers.py` asks the same of scripts whose steps or starts are slow.

Prints one table. The file of `--json` is written after each step, and a benchmark that was killed goes on from there.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import plain_optuna
from figures import Figure, median, one, parser, report, write
from load import beside_load
from plain_rounds import Failed, plain_rounds
from runs import Belief, Run, first_near_best, read_run, running_best

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
SETTLED_BARS = {"2m": {"min": 7.0}, "5m": {"min": 8.0}}
SETTLED_BARS_LOADED = {"2m": {"min": 6.0}, "5m": {"min": 8.0}}
TIMED_CANDIDATES, CANDIDATE_BAR = "mnist_convnet", {"max": 6.0}
EARLY_BAR = {"max": 0.0}
COMPARED = ("digits_mlp", "mnist_convnet", "digits_cnn")
PLAIN_SEED = 0
SOONER_BAR = {"min": 3.0}
REFEREE_SECONDS, REFEREE_SECONDS_QUICK = 6.0, 0.5
"""Shortest timed stretch of a turn. Each side has two turns."""


# --------------------------------------------------------------------------------------------------- figures


@dataclass
class Results:
    """All that was measured so far.

    Args:
        benchmark: Its name, which stands in the file.
        figures: Returns the table of the results.
        file: Where they are kept; nowhere if None.
        runs: By workload and budget, or which run of it this is.
        plain: The beliefs of the plain loop, by the key of the run.
        referee: Speeds by the key of the run, and by `Configuration.key`.
        loaded: Whether the runs share the machine with a load.
    """

    benchmark: str
    figures: Callable[["Results"], dict[str, Figure]]
    file: Path | None
    runs: dict[str, Run] = field(default_factory=dict)
    plain: dict[str, list[Belief]] = field(default_factory=dict)
    referee: dict[str, dict[str, float]] = field(default_factory=dict)
    loaded: bool = False

    def __post_init__(self) -> None:
        """Read what the file holds, if there is one."""
        if self.file is not None and self.file.exists():
            found = json.loads(self.file.read_text(encoding="utf-8"))
            self.runs = {key: Run(**run) for key, run in found["runs"].items()}
            self.plain, self.referee = found["plain"], found["referee"]

    @property
    def parts(self) -> dict[str, Any]:
        """The part of the file that is read again."""
        runs = {key: asdict(run) for key, run in self.runs.items()}
        return {"runs": runs, "plain": self.plain, "referee": self.referee}

    def save(self) -> None:
        """Write the file."""
        write(self.benchmark, self.figures(self), self.file, self.parts)

    def report(self) -> None:
        """Print the table, and write the file."""
        report(self.benchmark, self.figures(self), self.file, self.parts)


def figures(results: Results) -> dict[str, Figure]:
    """Return all figures of the table, by name, with their bars."""
    runs, found = list(results.runs.values()), run_figures(results)
    taken = [seconds for run in runs if run.name == TIMED_CANDIDATES for seconds in run.candidate_seconds]
    found[f"seconds a candidate takes, {TIMED_CANDIDATES}, median"] = median(taken, CANDIDATE_BAR)
    found["share of wall time in timed slices, median"] = median([run.timed_seconds / run.wall_seconds for run in runs])
    for budget in dict.fromkeys(run.budget for run in runs):
        settled = [run.settled for run in runs if run.budget == budget]
        bars = SETTLED_BARS_LOADED if results.loaded else SETTLED_BARS
        bar = bars.get(budget) if len(settled) == len(SEEDS) else None
        beside = ", beside a load" if results.loaded else ""
        found[f"settled after {budget}{beside}"] = one(sum(settled), len(settled), bar)
    return found | comparison_figures(results)


def run_figures(results: Results) -> dict[str, Figure]:
    """Return the claim of each run, and how many runs gave up early."""
    found = dict[str, Figure]()
    for key, run in results.runs.items():
        how = f"{run.candidates} candidates, {run.spent_seconds:.0f} s, exit code {run.exit_code}"
        found[f"{key}: {run.verdict}, {how}"] = one(run.speedup, 1, ci95=run.ci95)
    early = [run.left_time for run in results.runs.values()]
    found["runs that end unsettled with time left"] = one(sum(early), len(early), EARLY_BAR)
    return found


def comparison_figures(results: Results) -> dict[str, Figure]:
    """Return the figures of all comparisons with the plain loop."""
    found = dict[str, Figure]()
    for key, speeds in results.referee.items():
        found |= compared(results.runs[key], results.plain[key], speeds)
    return found


def compared(run: Run, plain: Sequence[Belief], speeds: Mapping[str, float]) -> dict[str, Figure]:
    """Return how many times sooner the tuner is near the best. A loop that never is counts with its whole budget."""
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
    """Run `autotune tune` with a budget, into a run directory."""
    arguments = [str(file), "--fresh", *more, "--budget", budget, "--seed", str(seed), "--out", str(out)]
    return run_tune(arguments, budget_seconds=seconds_of("budget", budget), folder=ROOT)


def run_tune(arguments: Sequence[str], *, budget_seconds: float, folder: Path) -> Command:
    """Run `autotune tune` in a folder, and kill it if it takes more than twice its budget and two minutes."""
    command = [sys.executable, "-m", "autotune", "tune", *arguments]
    patience, began = 2 * budget_seconds + 120, time.monotonic()
    try:
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=patience)
    except subprocess.TimeoutExpired:
        return Command(None, time.monotonic() - began, f"killed after {patience:.0f} s")
    words = (ended.stderr or ended.stdout).strip().splitlines()[-2:] if ended.returncode else []
    return Command(ended.returncode, time.monotonic() - began, " ".join(words))


def read_directory(directory: Path, command: Command, *, name: str, budget: str) -> Run:
    """Return what the files of a run directory say."""
    recipe = directory / "recipe.json"
    return read_run(
        [json.loads(file.read_text()) for file in sorted(directory.glob("trials/*/result.json"))],
        json.loads(recipe.read_text()) if recipe.exists() else None,
        name=name,
        budget=budget,
        **command._asdict(),
    )


def tuned(name: str, budget: str, runs_directory: Path) -> Run:
    """Run the tuner once."""
    out = Path(tempfile.mkdtemp(prefix=f"{name}-{budget}-", dir=runs_directory))
    command = tune(workload_file(name), budget, SEEDS[name].get(budget, 0), out)
    return read_directory(out, command, name=name, budget=budget)


def workload_file(name: str) -> Path:
    """Return where a workload is."""
    own = ROOT / "benchmarks" / "workloads" / f"{name}.py"
    return own if own.exists() else ROOT / "examples" / f"{name}.py"


def refereed(name: str, beliefs: Iterable[Belief], seconds: float) -> dict[str, float]:
    """Return speed-ups over the baseline in long plain trainings, by `Configuration.key`; 0 for what fails."""
    speeds: dict[str, float] = {}
    with plain_rounds(workload_file(name)) as rounds:
        for configuration in dict.fromkeys(Configuration(knobs) for _, knobs in beliefs):
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


def compare(
    results: Results,
    key: str,
    search: Callable[[], Iterable[plain_optuna.PlainTrial]],
    referee: Callable[[Sequence[Belief]], dict[str, float]],
) -> None:
    """Search with the plain loop, and let the referee measure the beliefs of both sides, where that is not done yet."""
    if key not in results.plain:
        progress(f"{key}: plain Optuna")
        results.plain[key] = running_best(
            (trial.ended_at_seconds, trial.samples_per_second or 0.0, trial.configuration) for trial in search()
        )
        results.save()
    beliefs = [*results.runs[key].beliefs, *results.plain[key]]
    if key not in results.referee and beliefs:
        results.referee[key] = referee(beliefs)
        results.save()


def note_run(results: Results, key: str, run: Run) -> None:
    """Keep a run, and say how it ended."""
    results.runs[key] = run
    results.save()
    progress(f"{key}: {run.verdict} ×{run.speedup}, {run.spent_seconds:.0f} s {run.remark}")


def measure(results: Results, given: argparse.Namespace, runs_directory: Path) -> None:
    """Measure all that is not in the results yet."""
    for budget in given.budgets:
        for name in given.only:
            if (key := f"{name} {budget}") not in results.runs:
                with beside_load(given.load):
                    note_run(results, key, tuned(name, budget, runs_directory))
    seconds = REFEREE_SECONDS_QUICK if given.quick else REFEREE_SECONDS
    for name in COMPARED:
        runs = [run for run in results.runs.values() if run.name == name]
        if not runs or name not in given.only or given.load:
            continue
        budget = max((run.budget for run in runs), key=functools.partial(seconds_of, "budget"))
        search = functools.partial(plain_optuna.search, workload_file(name), seconds_of("budget", budget), PLAIN_SEED)
        compare(results, f"{name} {budget}", search, functools.partial(refereed, name, seconds=seconds))


def progress(line: str) -> None:
    """Write to stderr, so that stdout holds the table alone."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print, and write."""
    made = parser(__doc__)
    made.add_argument("--only", action="append", choices=list(SEEDS), help="a workload; all by default")
    made.add_argument("--budgets", nargs="+", help=f"{' and '.join(SETTLED_BARS)} by default")
    made.add_argument("--load", action="store_true", help="beside a process on every core that computes in bursts")
    made.add_argument("--runs", type=Path, help="keep the run directories here")
    given = made.parse_args()
    given.only = given.only or (["digits_mlp"] if given.quick else list(SEEDS))
    given.budgets = given.budgets or ([BUDGET_QUICK] if given.quick else list(SETTLED_BARS))
    results = Results("answers", figures, given.json, loaded=given.load)
    with tempfile.TemporaryDirectory() as scratch:
        directory: Path = given.runs or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        measure(results, given, directory.resolve())
    results.report()


if __name__ == "__main__":
    main()
