"""A duel: `autotune tune` and a plain Optuna loop on a convnet, two minutes each, refereed by plain trainings.

    python benchmarks/duel.py [--quick] [--json FILE] [--seeds 1 2 3 4 5] [--budget 2m]

Prints one table. Both sides take turns seed by seed. Plain trainings of whole epochs, in ABBA order, say how much
faster than the baseline each side's answer is: autotune's recipe, and the best configuration of the plain loop.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import plain_optuna
from answers import progress, refereed, tune, workload_file
from figures import Figure, one, parser, report

from autotune.data.options import seconds_of
from autotune.space.configuration import Configuration

WORKLOAD = "mnist_convnet"
SEEDS, BUDGET, BUDGET_QUICK = (1, 2, 3, 4, 5), "2m", "30s"
ROUNDS = 2  # that the referee takes of each answer
REFEREE_SECONDS, REFEREE_SECONDS_QUICK = 6.0, 0.5


def claimed_at(run: Path) -> float | None:
    """Return when a run first claimed a gain, in seconds of the run; None if it claimed none."""
    records = [json.loads(file.read_text()) for file in run.glob("trials/*/result.json")]
    times = [looks["confirmed_at_seconds"] for record in records for looks in record["looks"]]
    return min(filter(None, times), default=None)


def duel(seed: int, budget: str, referee_seconds: float) -> dict[str, Any]:
    """Run both sides with one seed, and let the referee judge their answers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        tune(workload_file(WORKLOAD), budget, seed, out)
        recipe = json.loads((out / "recipe.json").read_text())
        claim = claimed_at(out)
    trials = list(plain_optuna.search(workload_file(WORKLOAD), seconds_of("budget", budget), seed))
    best = max(trials, key=lambda trial: trial.samples_per_second or 0.0).configuration
    answers = [recipe["configuration"], best]
    rounds = [refereed(WORKLOAD, [(0.0, answer) for answer in answers], referee_seconds) for _ in range(ROUNDS)]
    own, plain = (
        statistics.geometric_mean(speeds[Configuration(answer).key] for speeds in rounds) for answer in answers
    )
    found = {
        "verdict": recipe["evidence"]["verdict"],
        "claim": recipe["evidence"]["speedup"],
        "claimed_at_seconds": claim,
        "real": own,
        "plain": plain,
        "plain_trials": len(trials),
    }
    progress(f"seed {seed}: {found}")
    return found


def figures(duels: dict[int, dict[str, Any]]) -> dict[str, Figure]:
    """All figures of the table, by name."""
    found = dict[str, Figure]()
    for seed, each in duels.items():
        bounds = [each["claim"]["low"], each["claim"]["high"]]
        found[f"seed {seed}: claim, {each['verdict']}"] = one(each["claim"]["value"], 1, ci95=bounds)
        found[f"seed {seed}: recipe in plain trainings"] = one(each["real"], ROUNDS)
        found[f"seed {seed}: plain Optuna's best in plain trainings"] = one(each["plain"], ROUNDS)
    faster = [each for each in duels.values() if each["verdict"] == "faster"]
    found["runs that end faster"] = one(len(faster), len(duels), {"min": float(len(duels))})
    times = [each["claimed_at_seconds"] for each in duels.values() if each["claimed_at_seconds"] is not None]
    middle = statistics.median(times) if times else None
    found["seconds to the first claim, median"] = one(middle, len(times), {"max": 60.0})
    ratios = [each["real"] / each["plain"] for each in duels.values()]
    found["recipe over plain Optuna's best, median"] = one(statistics.median(ratios), len(ratios), {"min": 1.0})
    return found


def main() -> None:
    """Run, print, and write."""
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, nargs="+", help="1 to 5 by default")
    made.add_argument("--budget", help=f"{BUDGET} by default")
    given = made.parse_args()
    budget = given.budget or (BUDGET_QUICK if given.quick else BUDGET)
    seconds = REFEREE_SECONDS_QUICK if given.quick else REFEREE_SECONDS
    duels = {seed: duel(seed, budget, seconds) for seed in given.seeds or (SEEDS[:1] if given.quick else SEEDS)}
    report("duel", figures(duels), given.json, {"duels": {str(seed): each for seed, each in duels.items()}})


if __name__ == "__main__":
    main()
