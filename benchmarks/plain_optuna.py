"""The loop that people write themselves: Optuna's default sampler, and a fresh Python process for each trial.

    python benchmarks/plain_optuna.py [WORKLOAD.py] [--budget 5m] [--seed 0] [--quick] [--json FILE]

Searches the space that `autotune tune` uses by default; a trial is `plain_trial.py`. Prints one table. `answers.py`
compares the time that both need.
"""

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import optuna
from figures import Figure, one, parser, report
from plain_rounds import plain_rounds

from autotune.data.models import KnobValue
from autotune.data.options import seconds_of

WORKLOAD = Path(__file__).resolve().parent.parent / "examples" / "digits_mlp.py"
TRIAL = Path(__file__).with_name("plain_trial.py")
BUDGET, BUDGET_QUICK = "5m", "40s"


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
    """Trial by trial, until the budget is spent. A trial that the end of the budget cuts off is left out."""
    with plain_rounds(file) as rounds:
        space, examples = rounds.space(), rounds.examples
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    began = time.monotonic()
    while (left := began + budget_seconds - time.monotonic()) > 0:
        trial = study.ask()
        for name, choices in space.choices.items():
            trial.suggest_categorical(name, choices)
        values = dict(space.configuration(trial.params))
        command = [sys.executable, str(TRIAL), str(file), str(examples), json.dumps(values)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
        except subprocess.TimeoutExpired:
            return
        speed = None
        if ended.returncode:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            speed = float(json.loads(ended.stdout.splitlines()[-1])["samples_per_second"])
            study.tell(trial, speed)
        ended_at = time.monotonic() - began
        yield PlainTrial(ended_at_seconds=ended_at, configuration=values, samples_per_second=speed)


def figures(trials: list[PlainTrial]) -> dict[str, Figure]:
    """All figures of the table, by name."""
    speeds = [each.samples_per_second for each in trials if each.samples_per_second is not None]
    ends = itertools.pairwise([0.0, *(each.ended_at_seconds for each in trials)])
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
    made.add_argument("--budget", help=f"{BUDGET} by default")
    made.add_argument("--seed", type=int, default=0, help="of the sampler")
    given = made.parse_args()
    budget = seconds_of("--budget", given.budget or (BUDGET_QUICK if given.quick else BUDGET))
    trials = list(search(given.workload.resolve(), budget, given.seed))
    report("plain_optuna", figures(trials), given.json, {"trials": [asdict(each) for each in trials]})


if __name__ == "__main__":
    main()
