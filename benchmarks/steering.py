"""Does it help that the search asks what limits the training? The examples, tuned with and without.

    python benchmarks/steering.py [--quick] [--json FILE] [--trials 12] [--only EXAMPLE]

With it, knobs of the input pipeline are tried first where the fastest configuration waits for input, and more steps per
call where steps are short. Without it, the order is always the one for short steps that do not wait. Both get the same
seed and as many trials, one run after the other. Prints the speed of the fastest after 4, 8 and 12 candidates, over the
best that either found.
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from figures import Figure, mean, one, parser, report

import autotune
from autotune.record import Outcome, Phase
from autotune.run_directory import RunDirectory
from autotune.tuning.proposals import Proposals

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = ("digits_mlp", "digits_cnn", "photos_jpeg", "source_transformer", "tabular_wide_deep")
AFTER = (4, 8, 12)
BUDGET_SECONDS = 150.0


def speeds(name: str, trials: int, *, steered: bool) -> list[float]:
    """The speed-up of each candidate, in the order of the search; 0 for one that failed."""
    usual = Proposals.next

    def unsteered(self: Proposals, *given: Any, **named: Any) -> Any:
        return usual(self, *given, **{**named, "waits": False, "step_seconds": 0.0})

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not steered:
            patch.setattr(Proposals, "next", unsteered)
        out = Path(folder) / "run"
        autotune.tune(EXAMPLES / f"{name}.py", budget=BUDGET_SECONDS, trials=trials, seed=1, out=out, profile="none")
        records = sorted(RunDirectory(out).read_trials(), key=lambda each: each.trial)
    return [
        each.speedup.value if each.outcome is Outcome.OK and each.speedup else 0.0
        for each in records
        if each.phase is Phase.SEARCH
    ]


def main() -> None:
    """Tune, print, and write."""
    made = parser(__doc__)
    made.add_argument("--trials", type=int, default=AFTER[-1])
    made.add_argument("--only", action="append", choices=NAMES)
    given = made.parse_args()
    found: dict[str, Figure] = {}
    shares: dict[tuple[bool, int], list[float]] = {}
    for name in given.only or NAMES[: 1 if given.quick else None]:
        of = {steered: speeds(name, given.trials, steered=steered) for steered in (True, False)}
        best = max(1.0, *of[True], *of[False])
        for steered, each in of.items():
            for after in AFTER:
                if after <= given.trials:
                    share = max([1.0, *each[:after]]) / best
                    shares.setdefault((steered, after), []).append(share)
                    how = "with" if steered else "without"
                    found[f"{name}, {how}, after {after}"] = one(share, len(each))
                    print(f"{name}, {how}, after {after}: {share:.2f} of ×{best:.2f}", flush=True)
    for (steered, after), values in shares.items():
        found[f"{'with' if steered else 'without'}, after {after}, mean"] = mean(values)
    report("steering", found, given.json)


if __name__ == "__main__":
    main()
