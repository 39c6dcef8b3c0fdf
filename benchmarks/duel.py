"""A duel: `autotune tune` and a plain Optuna loop, two minutes each, refereed by plain trainings.

    python benchmarks/duel.py [--quick] [--json FILE] [--seeds 1 2 3 4 5] [--budget 2m]

Prints one table. Both sides take turns seed by seed, on a convnet and on a model with two inputs. Every other one of
the ten duels is beside a process on every core that computes in bursts (`load.py`). Plain trainings of whole epochs, in
ABBA order, say how much faster than the baseline each side's answer is: autotune's recipe, and the best configuration
of the plain loop.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import plain_optuna
from answers import progress, refereed, tune, workload_file
from figures import Figure, one, parser, report, write
from load import beside_load

from autotune.data.options import seconds_of
from autotune.space.configuration import Configuration

WORKLOADS = ("mnist_convnet", "two_inputs")
LEAST_RATIO, MEDIAN_RATIO = 0.95, 1.5
SEEDS, BUDGET, BUDGET_QUICK = (1, 2, 3, 4, 5), "2m", "30s"
ROUNDS = 2  # that the referee takes of each answer
REFEREE_SECONDS, REFEREE_SECONDS_QUICK = 6.0, 0.5


def claimed_at(run: Path) -> float | None:
    """Return when a run first claimed a gain, in seconds of the run; None if it claimed none."""
    records = [json.loads(file.read_text()) for file in run.glob("trials/*/result.json")]
    times = [looks["confirmed_at_seconds"] for record in records for looks in record["looks"]]
    return min(filter(None, times), default=None)


def duel(name: str, seed: int, budget: str, referee_seconds: float, *, loaded: bool) -> dict[str, Any]:
    """Run both sides with one seed, and let the referee judge their answers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with beside_load(loaded):
            tune(workload_file(name), budget, seed, out)
        recipe = json.loads((out / "recipe.json").read_text())
        claim = claimed_at(out)
    with beside_load(loaded):
        trials = list(plain_optuna.search(workload_file(name), seconds_of("budget", budget), seed))
    best = max(trials, key=lambda trial: trial.samples_per_second or 0.0).configuration
    answers = [recipe["configuration"], best]
    rounds = [refereed(name, [(0.0, answer) for answer in answers], referee_seconds) for _ in range(ROUNDS)]
    speeds = [[found[Configuration(answer).key] for found in rounds] for answer in answers]
    own, plain = (statistics.geometric_mean(found) if all(found) else 0.0 for found in speeds)
    found = {
        "loaded": loaded,
        "verdict": recipe["evidence"]["verdict"],
        "claim": recipe["evidence"]["speedup"],
        "claimed_at_seconds": claim,
        "real": own,
        "plain": plain,
        "plain_trials": len(trials),
    }
    progress(f"{name}, seed {seed}: {found}")
    return found


def figures(duels: dict[str, dict[str, Any]]) -> dict[str, Figure]:
    """All figures of the table, by name."""
    found = dict[str, Figure]()
    for name, each in duels.items():
        bounds = [each["claim"]["low"], each["claim"]["high"]]
        found[f"{name}: claim, {each['verdict']}"] = one(each["claim"]["value"], 1, ci95=bounds)
        found[f"{name}: recipe in plain trainings"] = one(each["real"], ROUNDS)
        found[f"{name}: plain Optuna's best in plain trainings"] = one(each["plain"], ROUNDS)
    faster = [duel for duel in duels.values() if duel["verdict"] == "faster"]
    found["runs that end faster"] = one(len(faster), len(duels), {"min": float(len(duels))})
    times = [duel["claimed_at_seconds"] for duel in duels.values() if duel["claimed_at_seconds"] is not None]
    middle = statistics.median(times) if times else None
    found["seconds to the first claim, median"] = one(middle, len(times), {"max": 60.0})
    ratios = [duel["real"] / duel["plain"] for duel in duels.values() if duel["plain"]]
    found["recipe over plain Optuna's best, median"] = one(
        statistics.median(ratios) if ratios else None, len(ratios), {"min": MEDIAN_RATIO}
    )
    enough = sum(ratio >= LEAST_RATIO for ratio in ratios)
    found[f"recipes of at least {LEAST_RATIO} of it"] = one(enough, len(ratios), {"min": float(len(ratios))})
    return found


def main() -> None:
    """Run, print, and write."""
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, nargs="+", help="1 to 5 by default")
    made.add_argument("--budget", help=f"{BUDGET} by default")
    given = made.parse_args()
    budget = given.budget or (BUDGET_QUICK if given.quick else BUDGET)
    seconds = REFEREE_SECONDS_QUICK if given.quick else REFEREE_SECONDS
    duels = dict[str, dict[str, Any]]()
    for seed in given.seeds or (SEEDS[:1] if given.quick else SEEDS):
        for place, name in enumerate(WORKLOADS):
            loaded = (seed + place) % 2 == 0
            key = f"{name}, seed {seed}{', beside a load' if loaded else ''}"
            duels[key] = duel(name, seed, budget, seconds, loaded=loaded)
            write("duel", figures(duels), given.json, {"duels": duels})
    report("duel", figures(duels), given.json, {"duels": duels})


if __name__ == "__main__":
    main()
