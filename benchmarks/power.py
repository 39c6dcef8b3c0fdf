"""How often a run finds a gain that is there, and how often the claimed interval holds it.

    python benchmarks/power.py [--quick] [--json FILE] [--replays N]

Prints one table. One knob has a planted gain; whole runs of the loop are replayed on recorded slices (see
`false_wins.py`).
"""

from figures import Figure, parser, report, share
from recorded import CONDITIONS, DEFAULT, Recording, replay, true_speedup

from autotune.stats.deciding import Verdict

SETTINGS = ((1.0, 120.0), (0.30, 120.0), (0.10, 90.0), (0.10, 300.0), (0.05, 90.0), (0.05, 300.0))
"""Gains as shares, and budgets in seconds."""
LEAST_COVERAGE = 0.93
REPLAYS, REPLAYS_QUICK = 100, 6


def figures(recording: Recording, replays: int) -> dict[str, Figure]:
    """All figures of the table, by name."""
    found: dict[str, Figure] = {}
    for condition, machine in CONDITIONS.items():
        claims = held = 0
        for gain, budget in SETTINGS:
            runs = [replay(recording, machine, gain=gain, budget=budget, seed=seed) for seed in range(replays)]
            faster = [recipe for recipe in runs if recipe.evidence.verdict is Verdict.FASTER]
            found[f"{condition}, a gain of {gain:.0%}, {budget:.0f} s: found"] = share(len(faster), replays)
            for recipe in faster:
                low, high = recipe.evidence.speedup.low, recipe.evidence.speedup.high
                claims += 1
                held += low <= true_speedup(recipe, recording, machine, gain) <= high
        if claims:
            found[f"{condition}: claimed intervals that hold"] = share(held, claims, {"min": LEAST_COVERAGE})
    return found


def main() -> None:
    """Replay, print, and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--replays", type=int, help=f"of each kind; {REPLAYS} by default")
    given = arguments.parse_args()
    replays = given.replays or (REPLAYS_QUICK if given.quick else REPLAYS)
    report("power", figures(Recording.load(DEFAULT), replays), given.json)


if __name__ == "__main__":
    main()
