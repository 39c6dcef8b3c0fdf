"""How often the confirmation finds a gain that is there: 3%, 5% and 10%, planted as extra work in the baseline.

    python benchmarks/power.py [--quick] [--json FILE] [--replay-only] [--recording FILE]

Prints one table. Real confirmations find real gains. The extra work is so much more of the same (`equal_steps.py`); how
much faster the step without it really is, all these confirmations together say.
Replays take the recorded slices of a quiet and of a disturbed machine (see `false_wins.py`), with the finalist's rates
multiplied by the gain, at the instances and slices that 90 s hold.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import recorded
from confirming import real_confirmations, without_extra_work
from figures import Figure, mean, parser, report, share
from recorded import Recording, replays

from autotune.study.confirmed import Result

GAINS = (0.03, 0.05, 0.10)
REAL_GAINS, REAL_GAINS_QUICK = (0.05, 0.10), (0.10,)
BARS = {0.05: {"min": 0.80}, 0.10: {"min": 0.95}}
"""Share of the confirmations on a quiet machine that must find a gain."""
REAL_SECONDS, REAL_SECONDS_QUICK = 90.0, 25.0
REAL_REPEATS, REAL_REPEATS_QUICK = 5, 1
REPLAYS, REPLAYS_QUICK = 1000, 60
REPLAYED_SECONDS = 90.0


def measured(gain: float, quick: bool) -> dict[str, Figure]:
    """The figures of real confirmations of one gain."""
    seconds = REAL_SECONDS_QUICK if quick else REAL_SECONDS
    repeats = REAL_REPEATS_QUICK if quick else REAL_REPEATS
    found: dict[str, Figure] = {}
    name = f"real, {gain:.0%} extra work in the baseline"
    with real_confirmations(f"gain_{100 * gain:.0f}") as bench:
        finalists = [without_extra_work(bench.baseline)]
        results = [bench.confirm(finalists, seconds) for _ in range(repeats)]
        found |= _true_gain(name, results)
    found[f"{name}, {seconds:.0f} s: found"] = share(sum(map(_found, results)), repeats, BARS.get(gain))
    found[f"{name}, {seconds:.0f} s: instances"] = mean([each.instances for each in results])
    return found


def _found(result: Result) -> bool:
    return result.winner is not None


def _true_gain(name: str, results: Sequence[Result]) -> dict[str, Figure]:
    """What all of them measured, as a share, and each; nothing where their time did not hold two instances."""
    measured = [each.ratio.value for one in results for each in one.confirmed if each.ratio and each.speedup]
    if not measured:
        return {}
    figure = mean([math.expm1(each) for each in measured])
    each_alone = {
        f"{name}: gain measured, {index + 1}": mean([math.expm1(value)])
        for index, value in enumerate(measured)
    }
    return {f"{name}: gain measured, all together": figure, **each_alone}


def replayed(recording: Recording, count: int) -> dict[str, Figure]:
    """The figures of replays; bars are for the quiet machine."""
    found: dict[str, Figure] = {}
    for condition in recording.pools:
        for gain in GAINS:
            results = replays(recording, condition, count, seconds=REPLAYED_SECONDS, gain=1 + gain)
            name = f"replayed, {gain:.0%} gain, {condition}, {REPLAYED_SECONDS:.0f} s"
            bar = BARS.get(gain) if condition == "quiet" else None
            found[f"{name}: found"] = share(sum(map(_found, results)), count, bar)
        found[f"replayed, {condition}: instances"] = mean([each.instances for each in results])
        widths = [each.confirmed[0].ratio.half_width for each in results if each.confirmed[0].ratio]
        found[f"replayed, {condition}: half-width"] = mean(widths)
    return found


def main() -> None:
    """Measure, replay, print, and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--replay-only", action="store_true", help="measure nothing")
    arguments.add_argument("--replays", type=int, help=f"of each kind; {REPLAYS:,} by default")
    arguments.add_argument("--recording", type=Path, default=recorded.DEFAULT, help="what is replayed")
    given = arguments.parse_args()
    found: dict[str, Figure] = {}
    if not given.replay_only:
        for gain in REAL_GAINS_QUICK if given.quick else REAL_GAINS:
            found |= measured(gain, given.quick)
    replays = given.replays or (REPLAYS_QUICK if given.quick else REPLAYS)
    found |= replayed(Recording.load(given.recording), replays)
    report("power", found, given.json)


if __name__ == "__main__":
    main()
