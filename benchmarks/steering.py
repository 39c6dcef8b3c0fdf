"""Does it help that the search asks what limits the training? The examples, tuned with and without.

    python benchmarks/steering.py [--quick] [--json FILE] [--trials 12] [--only EXAMPLE]

Every way of ordering what is tried first gets the same seed and as many trials, one run after the other, and no run
confirms anything. Prints the speed of the fastest after 4, 8 and 12 candidates, over the best that any way found.
"""

import tempfile
from pathlib import Path
from typing import Any, get_args

import pytest
from figures import Figure, mean, one, parser, report

import autotune
from autotune.data.record import Outcome, Phase
from autotune.data.run_directory import RunDirectory
from autotune.space.configuration import read_trials
from autotune.space.probes import Limit
from autotune.tuning.candidates import Proposals

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = ("digits_mlp", "digits_cnn", "photos_jpeg", "source_transformer", "tabular_wide_deep")
WAYS: dict[str, tuple[Limit, ...]] = {
    "by input and compute": get_args(Limit),
    "by input only": ("input",),
    "not steered": (),
}
AFTER = (4, 8, 12)
BUDGET_SECONDS = 240.0
NO_GAIN_IS_ENOUGH = 1000.0
"""The smallest gain that is worth a claim: so all trials are the search's."""


def speeds(name: str, trials: int, steered: tuple[Limit, ...]) -> list[float]:
    """The speed-up of each candidate, in the order of the search; 0 for one that failed."""
    usual = Proposals.next

    def next_(self: Proposals, *given: Any, limit: Limit | None, **named: Any) -> Any:
        return usual(self, *given, limit=limit if limit in steered else None, **named)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Proposals, "next", next_)
        out = Path(folder) / "run"
        autotune.tune(
            EXAMPLES / f"{name}.py",
            budget=BUDGET_SECONDS,
            trials=trials,
            seed=1,
            out=out,
            profile="none",
            min_gain=NO_GAIN_IS_ENOUGH,
        )
        records = sorted(read_trials(RunDirectory(out)), key=lambda each: each.trial)
    return [
        each.speedup.value if each.outcome.measured and each.speedup else 0.0
        for each in records
        if each.phase is Phase.SEARCH and each.outcome is not Outcome.INTERRUPTED
    ]


def main() -> None:
    """Tune, print, and write."""
    made = parser(__doc__)
    made.add_argument("--trials", type=int, default=AFTER[-1])
    made.add_argument("--only", action="append", choices=NAMES)
    given = made.parse_args()
    found: dict[str, Figure] = {}
    shares: dict[tuple[str, int], list[float]] = {}
    for name in given.only or NAMES[: 1 if given.quick else None]:
        of = {way: speeds(name, given.trials, steered) for way, steered in WAYS.items()}
        best = max(1.0, *(speed for each in of.values() for speed in each))
        for way, each in of.items():
            for after in AFTER:
                if after <= given.trials:
                    share = max([1.0, *each[:after]]) / best
                    shares.setdefault((way, after), []).append(share)
                    found[f"{name}, {way}, after {after}"] = one(share, len(each))
                    print(f"{name}, {way}, after {after} of {len(each)}: {share:.2f} of ×{best:.2f}", flush=True)
    for (way, after), values in shares.items():
        found[f"{way}, after {after}, mean"] = mean(values)
    report("steering", found, given.json)


if __name__ == "__main__":
    main()
