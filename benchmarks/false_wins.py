"""How often a run claims a gain where there is none: all configurations are as fast as the baseline.

    python benchmarks/false_wins.py [--quick] [--json FILE] [--replays N]

Prints one table. Whole runs of the loop are replayed on recorded slices of equal sides: of a quiet machine, of one on
which another process burned a core on and off, of one with heavy tails, and with candidates that are more restless than
the baseline. Leaders change, claims are looked at after every pair, and some runs go on.
"""

from figures import Figure, parser, report, share
from recorded import CONDITIONS, DEFAULT, Recording, replay

from autotune.stats.deciding import Verdict

MOST_FALSE = 0.05
"""Share of runs that may claim a gain."""
BUDGETS = (60.0, 120.0, 300.0)
REPLAYS, REPLAYS_QUICK = 200, 10


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
    return found


def main() -> None:
    """Replay, print, and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--replays", type=int, help=f"of each kind; {REPLAYS} by default")
    given = arguments.parse_args()
    replays = given.replays or (REPLAYS_QUICK if given.quick else REPLAYS)
    report("false_wins", figures(Recording.load(DEFAULT), replays), given.json)


if __name__ == "__main__":
    main()
