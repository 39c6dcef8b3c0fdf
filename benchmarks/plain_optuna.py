"""The loop that people write themselves: Optuna's default sampler, and a fresh Python process for each trial.

    python benchmarks/plain_optuna.py [WORKLOAD.py] [--budget 5m] [--seed 0] [--quick] [--json FILE]
    python benchmarks/plain_optuna.py SCRIPT.py --run RUN [--budget 5m] [--seed 0] [--json FILE]

Searches the space that `autotune tune` uses by default; a trial is `plain_trial.py`. Of a script, RUN is a directory of
`autotune tune`: the loop searches the space of that run, and a trial is `plain_script.py`. Prints one table.
`answers.py` compares the time that both need.
"""

import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import optuna
from figures import Figure, one, parser, report
from plain_rounds import plain_rounds

from autotune.data.models import KnobValue
from autotune.data.options import seconds_of
from autotune.data.run_directory import RunDirectory
from autotune.space.configuration import Configuration
from autotune.space.space_file import ResolvedSpace

WORKLOAD = Path(__file__).resolve().parent.parent / "examples" / "digits_mlp.py"
TRIAL, SCRIPT_TRIAL = Path(__file__).with_name("plain_trial.py"), Path(__file__).with_name("plain_script.py")
BUDGET, BUDGET_QUICK = "5m", "40s"
SCRIPT_SECONDS = 5.0
"""Shortest timed stretch of a script's trial."""

Measure = Callable[[Configuration, float], float | None]
"""Returns the speed of a configuration, None if it fails; raises TimeoutExpired after so many seconds."""


@dataclass(frozen=True, kw_only=True)
class PlainTrial:
    """One trial of the loop.

    Args:
        ended_at_seconds: When it ended, since the loop began.
        configuration: A value for every knob.
        samples_per_second: None if it failed.
    """

    ended_at_seconds: float
    configuration: dict[str, KnobValue]
    samples_per_second: float | None


def search(file: Path, budget_seconds: float, seed: int) -> Iterator[PlainTrial]:
    """Search for a workload, trial by trial, until the budget is spent."""
    with plain_rounds(file) as rounds:
        space, examples = rounds.space(), rounds.examples

    def measure(configuration: Configuration, timeout: float) -> float | None:
        return speed_in([str(TRIAL), str(file), str(examples), json.dumps(dict(configuration))], timeout)

    return _search(space, measure, budget_seconds, seed)


def search_script(file: Path, run: Path, budget_seconds: float, seed: int) -> Iterator[PlainTrial]:
    """Search for a script, trial by trial, in the space of a run of `autotune tune`, until the budget is spent."""
    known = RunDirectory(run).read_run()
    assert known.search_space is not None
    assert known.baseline is not None
    space = ResolvedSpace(
        baseline=Configuration(known.baseline), choices=known.search_space.choices, left_out=known.search_space.left_out
    )
    measure = functools.partial(script_speed, file, run / "recipe.json", seconds=SCRIPT_SECONDS)
    return _search(space, measure, budget_seconds, seed)


def script_speed(
    file: Path, recipe: Path, configuration: Configuration, timeout: float, *, seconds: float
) -> float | None:
    """Return samples per second of a script in a fresh process; None if it fails. Raises TimeoutExpired."""
    return speed_in([str(SCRIPT_TRIAL), str(file), str(recipe), json.dumps(dict(configuration)), str(seconds)], timeout)


def speed_in(command: Sequence[str], timeout: float) -> float | None:
    """Return the speed that a program of Python prints last; None if it fails. Raises TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:  # scripts write checkpoints
        ended = subprocess.run(
            [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False, timeout=timeout
        )
    return None if ended.returncode else float(json.loads(ended.stdout.splitlines()[-1])["samples_per_second"])


def _search(space: ResolvedSpace, measure: Measure, budget_seconds: float, seed: int) -> Iterator[PlainTrial]:
    """Yield the trials of the loop. A trial that the end of the budget cuts off is left out."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    began = time.monotonic()
    while (left := began + budget_seconds - time.monotonic()) > 0:
        trial = study.ask()
        for name, choices in space.choices.items():
            trial.suggest_categorical(name, choices)
        configuration = space.configuration(trial.params)
        try:
            speed = measure(configuration, left)
        except subprocess.TimeoutExpired:
            return
        if speed is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, speed)
        ended_at = time.monotonic() - began
        yield PlainTrial(ended_at_seconds=ended_at, configuration=dict(configuration), samples_per_second=speed)


def figures(trials: list[PlainTrial]) -> dict[str, Figure]:
    """All figures of the table, by name."""
    speeds = [trial.samples_per_second for trial in trials if trial.samples_per_second is not None]
    ends = itertools.pairwise([0.0, *(trial.ended_at_seconds for trial in trials)])
    return {
        "seconds a trial takes, median": one(
            statistics.median(after - before for before, after in ends) if trials else None, len(trials)
        ),
        "trials that failed": one(len(trials) - len(speeds), len(trials)),
        "samples/s, best as measured": one(max(speeds, default=None), len(speeds)),
    }


def main() -> None:
    """Search, print, and write."""
    made = parser(__doc__)
    made.add_argument("workload", nargs="?", type=Path, default=WORKLOAD)
    made.add_argument("--run", type=Path, help="the workload is a script, tuned in this run directory")
    made.add_argument("--budget", help=f"{BUDGET} by default")
    made.add_argument("--seed", type=int, default=0, help="of the sampler")
    given = made.parse_args()
    budget = seconds_of("--budget", given.budget or (BUDGET_QUICK if given.quick else BUDGET))
    file: Path = given.workload.resolve()
    if given.run is None:
        found = search(file, budget, given.seed)
    else:
        found = search_script(file, given.run.resolve(), budget, given.seed)
    trials = list(found)
    report("plain_optuna", figures(trials), given.json, {"trials": [asdict(trial) for trial in trials]})


if __name__ == "__main__":
    main()
