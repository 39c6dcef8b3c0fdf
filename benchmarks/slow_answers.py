"""How soon `autotune tune` gives an answer where steps or starts are slow: eight unmodified scripts.

    python benchmarks/slow_answers.py [--only NAME]... [--parts PART]... [--runs DIR] [--quick] [--json FILE]

The scripts are those of `slow/`. Each is tuned twice without `--budget`: such a run has ten minutes, and ends once it
is settled. Parts, in this order:

    first  in a folder without earlier runs
    again  the same in the same folder, so that it finds the first run
    best   thirty minutes in a folder of its own; what it finds counts in "the best known". Left out by default
    plain  four scripts: `plain_optuna.py` searches the space of the first run for ten minutes. Then a referee measures
           the beliefs of both sides in fresh plain trainings (`plain_script.py`)

Figures in steps are in steps of the script as it is. `runs.py` says how they follow from the records. `convnet` costs
more steps: under 0.2 s a step, autotune measures for some seconds instead. Prints one table.
The file of `--json` is written after each step, and a benchmark that was killed goes on from there.
"""

import argparse
import functools
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import plain_optuna
from answers import (
    PLAIN_SEED,
    Results,
    compare,
    comparison_figures,
    note_run,
    progress,
    read_directory,
    run_figures,
    run_tune,
)
from figures import Figure, median, one, parser
from runs import Belief, Run, pool_speedups, share_of_best

from autotune.data.options import seconds_of
from autotune.space.configuration import Configuration

SCRIPTS = Path(__file__).resolve().parent / "slow"
FIRST, AGAIN, BEST, PLAIN = "first", "again", "best", "plain"
SEEDS: dict[str, dict[str, int]] = {
    "convnet": {FIRST: 111, AGAIN: 112, BEST: 113},
    "resnet20": {FIRST: 121, AGAIN: 122, BEST: 123},
    "dcgan": {FIRST: 131, AGAIN: 132, BEST: 133},
    "vit": {FIRST: 141, AGAIN: 142, BEST: 143},
    "bert_mini": {FIRST: 151, AGAIN: 152, BEST: 153},
    "char_lstm": {FIRST: 161, AGAIN: 162, BEST: 163},
    "unet": {FIRST: 171, AGAIN: 172, BEST: 173},
    "reviews": {FIRST: 181, AGAIN: 182, BEST: 183},
}
BUDGET = "10m"
"""The default of `autotune tune`. It is not asked for: a run uses up a budget that is."""
BEST_BUDGET, BUDGET_QUICK = "30m", "45s"
COMPARED = ("convnet", "resnet20", "dcgan", "bert_mini")
FIRST_CANDIDATE_BAR, CANDIDATE_BAR = {"max": 14.0}, {"max": 10.0}
SETTLED_BARS = {"5m": {"min": 5.0}, BUDGET: {"min": 8.0}}
FIRST_CANDIDATES, CANDIDATES_BAR = 3, {"min": 0.8}
EARLY, EARLY_BAR = "5m", {"min": 0.95}
AGAIN_BAR = {"max": 0.4}
REFEREE_SECONDS, REFEREE_PATIENCE_SECONDS = 20.0, 300.0
"""Shortest timed stretch of each of a configuration's two processes, and the longest that a process may take."""


# --------------------------------------------------------------------------------------------------- figures


def figures(results: Results) -> dict[str, Figure]:
    """Return all figures of the table, by name, with their bars."""
    first, again = runs_of(results, FIRST), runs_of(results, AGAIN)
    found = run_figures(results)
    for name, run in first.items():
        found[f"steps until the first candidate's figure, {name}"] = one(run.first_candidate_steps, 1)
    steps = [run.first_candidate_steps for run in first.values() if run.first_candidate_steps is not None]
    found["steps until the first candidate's figure, median"] = median(steps, FIRST_CANDIDATE_BAR)
    costs = {name: run.candidate_steps for name, run in first.items() if run.candidate_steps}
    for name, taken in costs.items():
        found[f"steps a candidate costs, {name}, median"] = median(taken)
    medians = [statistics.median(taken) for taken in costs.values()]
    found["steps a candidate costs, median of the scripts"] = median(medians, CANDIDATE_BAR)
    for limit, bar in SETTLED_BARS.items():
        settled = sum(is_settled_by(run, limit) for run in first.values())
        found[f"settled after {limit}"] = one(settled, len(first), bar if len(first) == len(SEEDS) else None)
    known = {name: pool_speedups(run for run in results.runs.values() if run.name == name) for name in first}
    shares = [share_of_best(run, known[name], candidates=FIRST_CANDIDATES) for name, run in first.items()]
    found[f"share of the best known speed after {FIRST_CANDIDATES} candidates, median"] = median(shares, CANDIDATES_BAR)
    shares = [share_of_best(run, known[name], seconds=seconds_of("limit", EARLY)) for name, run in first.items()]
    found[f"share of the best known speed after {EARLY}, median"] = median(shares, EARLY_BAR)
    found["time until settled, second run over first, median"] = median(
        [
            run.settled_seconds / before
            for name, run in again.items()
            if name in first and run.settled_seconds and (before := first[name].settled_seconds)
        ],
        AGAIN_BAR,
    )
    return found | comparison_figures(results)


def runs_of(results: Results, part: str) -> dict[str, Run]:
    """Return the runs of a part, by script."""
    return {name: run for name in SEEDS if (run := results.runs.get(f"{name} {part}")) is not None}


def is_settled_by(run: Run, limit: str) -> bool:
    """Return whether a run was settled that early; a settled run keeps its own budget within a tenth."""
    if limit == run.budget:
        return run.settled
    return run.settled_seconds is not None and run.settled_seconds <= seconds_of("limit", limit)


# ------------------------------------------------------------------------------------------------- measuring


def tune_script(name: str, part: str, folder: Path, *, quick: bool) -> Run:
    """Tune a script in a folder, below which its run directories are."""
    folder.mkdir(parents=True, exist_ok=True)
    before = run_directories(folder)
    arguments = [str(SCRIPTS / f"{name}.py"), "--seed", str(SEEDS[name][part])]
    asked = BUDGET_QUICK if quick else BEST_BUDGET if part == BEST else None
    budget = asked or BUDGET
    arguments += ["--budget", asked] if asked else []
    command = run_tune(arguments, budget_seconds=seconds_of("budget", budget), folder=folder)
    made = [directory for directory in run_directories(folder) if directory not in before]
    return read_directory(made[0] if made else folder, command, name=name, budget=budget)


def run_directories(folder: Path) -> list[Path]:
    """Return the run directories below a folder, the oldest first."""
    found = (file.parent for file in folder.glob("results/*/*/run.json") if not file.parent.is_symlink())
    return sorted(found, key=lambda directory: directory.name)


def referee_script(name: str, run: Path, beliefs: Sequence[Belief]) -> dict[str, float]:
    """Return samples per second in two fresh plain trainings, by `Configuration.key`; 0 for what fails."""
    configurations = list(dict.fromkeys(Configuration(knobs) for _, knobs in beliefs))
    speeds: dict[str, list[float]] = {configuration.key: [] for configuration in configurations}
    for configuration in [*configurations, *reversed(configurations)]:
        speed = None
        try:
            speed = plain_optuna.script_speed(
                SCRIPTS / f"{name}.py",
                run / "recipe.json",
                configuration,
                REFEREE_PATIENCE_SECONDS,
                seconds=REFEREE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            progress(f"{name}: the referee's training took too long")
        speeds[configuration.key].append(speed or 0.0)
        progress(f"{name}: refereed {speed} samples/s {configuration.describe()}")
    return {key: statistics.geometric_mean(both) if all(both) else 0.0 for key, both in speeds.items()}


def measure(results: Results, given: argparse.Namespace, runs_directory: Path) -> None:
    """Measure all that is not in the results yet."""
    for name in given.only:
        folders = dict.fromkeys((FIRST, AGAIN), runs_directory / name) | {BEST: runs_directory / f"{name}-{BEST}"}
        for part, folder in folders.items():
            key = f"{name} {part}"
            if part not in given.parts or key in results.runs:
                continue
            for directory in run_directories(folder)[1 if part == AGAIN else 0 :]:  # a killed benchmark left it
                shutil.rmtree(directory)
            note_run(results, key, tune_script(name, part, folder, quick=given.quick))
        runs = run_directories(folders[FIRST])
        if PLAIN in given.parts and name in COMPARED and runs and (runs[0] / "recipe.json").exists():
            search = functools.partial(
                plain_optuna.search_script, SCRIPTS / f"{name}.py", runs[0], seconds_of("budget", BUDGET), PLAIN_SEED
            )
            compare(results, f"{name} {FIRST}", search, functools.partial(referee_script, name, runs[0]))


def main() -> None:
    """Measure, print, and write."""
    made = parser(__doc__)
    made.add_argument("--only", action="append", choices=list(SEEDS), help="a script; all by default")
    made.add_argument("--parts", action="append", choices=[FIRST, AGAIN, BEST, PLAIN], help="all but best by default")
    made.add_argument("--runs", type=Path, help="keep the run directories here; beside the JSON file by default")
    given = made.parse_args()
    given.only = given.only or (["convnet"] if given.quick else list(SEEDS))
    given.parts = given.parts or ([FIRST] if given.quick else [FIRST, AGAIN, PLAIN])
    results = Results("slow_answers", figures, given.json)
    with tempfile.TemporaryDirectory() as scratch:
        directory: Path = given.runs or (given.json.with_suffix(".runs") if given.json else Path(scratch))
        measure(results, given, directory.resolve())
    results.report()


if __name__ == "__main__":
    main()
