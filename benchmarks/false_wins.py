"""How often a run claims a gain where there is none.

    python benchmarks/false_wins.py [--quick] [--json FILE] [--replays N]

Prints one table. Whole runs of the loop are replayed on recorded slices of equal sides: of a quiet machine, of one on
which another process burned a core on and off, of one with heavy tails, and with candidates that are more restless than
the baseline. Leaders change, claims are looked at after every pair, and some runs go on.

First all configurations are as fast as the baseline, and the runs are by samples per second. Then larger batches are
faster by just as much as they need more examples, and the runs are by the time to the same losses, which are noisy.
"""

import math
from dataclasses import replace

from figures import Figure, parser, report, share
from recorded import CONDITIONS, DEFAULT, Condition, Recording, replay, replay_batches

from autotune.data.figures import Interval
from autotune.recipe.recipe import Recipe
from autotune.stats.deciding import Verdict

MOST_FALSE = 0.05
"""Share of runs that may claim a gain."""
LEAST_COVERAGE = 0.93
BUDGETS, BATCHES_BUDGET = (60.0, 120.0, 300.0), 300.0
REPLAYS, REPLAYS_QUICK = 200, 10
KERNELS, KERNELS_GAIN, KERNELS_BUDGET = Condition(pool="quiet", kernels=0.03), 0.25, 150.0
KERNELS_STARTS = {"two compilations": 2.0, "one compilation": 16.0}
"""The luck of a compilation; where a start takes a tenth of the budget, the baseline's processes share one."""


def figures(recording: Recording, replays: int) -> dict[str, Figure]:
    """All figures of the table, by name."""
    found: dict[str, Figure] = {}
    for condition, machine in CONDITIONS.items():
        for budget in BUDGETS:
            runs = [replay(recording, machine, gain=0.0, budget=budget, seed=seed) for seed in range(replays)]
            verdicts = [recipe.evidence.verdict for recipe in runs]
            name = f"{condition}, {budget:.0f} s"
            found[f"{name}: claims a gain"] = share(verdicts.count(Verdict.FASTER), replays, {"max": MOST_FALSE})
            found[f"{name}: excludes gains"] = share(verdicts.count(Verdict.NO_SIGNIFICANT_GAIN), replays)
        recipes = [replay_batches(recording, machine, budget=BATCHES_BUDGET, seed=seed) for seed in range(replays)]
        name = f"{condition}, larger batches are no sooner, {BATCHES_BUDGET:.0f} s"
        larger = sum(recipe.learning_rate_rule is not None for recipe in recipes)
        found[f"{name}: recommends one"] = share(larger, replays, {"max": MOST_FALSE})
        sooner = [speedup for recipe in recipes if (speedup := same_loss_speedup(recipe)) is not None]
        held = sum(speedup.low <= math.exp(-machine.lost(recording)) <= speedup.high for speedup in sooner)
        if sooner:
            found[f"{name}: measured intervals that hold"] = share(held, len(sooner), {"min": LEAST_COVERAGE})
    found |= kernel_figures(recording, replays)
    return found


def kernel_figures(recording: Recording, replays: int) -> dict[str, Figure]:
    """The figures where each compilation of the baseline has its own luck."""
    found: dict[str, Figure] = {}
    for compilations, seconds in KERNELS_STARTS.items():
        recording, budget = replace(recording, first_step_seconds=seconds), KERNELS_BUDGET
        name = f"kernels by chance, {compilations} of the baseline, {budget:.0f} s"
        runs = [replay(recording, KERNELS, gain=0.0, budget=budget, seed=seed) for seed in range(replays)]
        false = sum(recipe.evidence.verdict is Verdict.FASTER for recipe in runs)
        found[f"{name}: claims a gain"] = share(false, replays, {"max": MOST_FALSE})
        runs = [replay(recording, KERNELS, gain=KERNELS_GAIN, budget=budget, seed=seed) for seed in range(replays)]
        claims = [recipe.evidence.speedup for recipe in runs if recipe.changes]
        held = sum(claim.low <= 1 + KERNELS_GAIN <= claim.high for claim in claims)
        if claims:
            found[f"{name}: claims of a gain that hold"] = share(held, len(claims), {"min": LEAST_COVERAGE})
    return found


def same_loss_speedup(recipe: Recipe) -> Interval | None:
    """How much sooner another batch size reaches the same losses, where that was measured."""
    rule = None if recipe.larger_batch is None else recipe.larger_batch.learning_rate_rule
    return None if rule is None or rule.same_loss is None else rule.same_loss.speedup


def main() -> None:
    """Replay, print, and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--replays", type=int, help=f"of each kind; {REPLAYS} by default")
    given = arguments.parse_args()
    replays = given.replays or (REPLAYS_QUICK if given.quick else REPLAYS)
    report("false_wins", figures(Recording.load(DEFAULT), replays), given.json)


if __name__ == "__main__":
    main()
