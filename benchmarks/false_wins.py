"""How often the confirmation claims a gain where there is none: the baseline against itself under another name.

    python benchmarks/false_wins.py [--quick] [--json FILE] [--replay-only] [--recording FILE] [--record FILE]

Prints one table. Real confirmations of 45 s run on a quiet machine, and while another process burns one core on and
off. Recorded slices of such ones are replayed thousands of times through the same code: one finalist in the time that
a short run's confirmation has and in that of a long one, three finalists in the time that a run of ten minutes has.
`--replay-only` replays what `--recording` holds, `--record` measures longer, keeps the slices, and replays those.
"""

import contextlib
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import recorded
from confirming import Confirmations, real_confirmations, without_extra_work
from figures import Figure, mean, parser, report, share
from recorded import Pool, Recording, instances_of, replays

from autotune.measure.deciding import Verdict
from autotune.study.confirmed import Result
from autotune.study.plan import CONFIRMATION_SHARE, FEWEST_INSTANCES, FINALISTS

MOST_FALSE = 0.05
"""Share of confirmations that may claim a gain."""
CONFIRMATIONS, CONFIRMATIONS_QUICK = 12, 1
"""Real ones, in each condition."""
POOL_CONFIRMATIONS, POOL_SECONDS = 2, 120.0
"""Longer real ones, in each condition, of some twelve instances each: for the recording alone."""
REAL_SECONDS, REAL_SECONDS_QUICK = 45.0, 20.0
"""With two imports in it, 45 s hold some five processes of each side: of two, hardly any interval excludes 1."""
REPLAYS, REPLAYS_QUICK = 2000, 50
SHORT_SECONDS, LONG_SECONDS = 25.0, 90.0
SEVERAL_SECONDS = CONFIRMATION_SHARE * 600.0
"""What a run of ten minutes has for them and a continuous run, which replays leave out."""
BURNING_SECONDS = (0.3, 3.0)
"""Bounds of the time for which the disturbing process works, and of that for which it sleeps."""


def burn_on_and_off(seed: int) -> None:
    """Keep one core busy for a random time, let it be for another, for ever."""
    rng = random.Random(seed)
    while True:
        until = time.monotonic() + rng.uniform(*BURNING_SECONDS)
        while time.monotonic() < until:
            pass
        time.sleep(rng.uniform(*BURNING_SECONDS))


@contextlib.contextmanager
def disturbed(seed: int) -> Iterator[None]:
    """A machine on which another process burns one core on and off."""
    process = multiprocessing.get_context("spawn").Process(target=burn_on_and_off, args=(seed,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def claims(name: str, results: Sequence[Result]) -> dict[str, Figure]:
    """In what share a finalist was found faster, whatever the stability rules say; and instances of a confirmation.

    Confirmations whose time did not hold enough instances to decide anything are no evidence, and are left out.
    """
    decided = [each for each in results if each.instances >= FEWEST_INSTANCES]
    found = {f"{name}: instances": mean([each.instances for each in results])}
    if decided:
        claimed = sum(any(each.verdict is Verdict.FASTER for each in result.confirmed) for result in decided)
        found[f"{name}: claimed faster"] = share(claimed, len(decided), {"max": MOST_FALSE})
    return found


def confirmed(bench: Confirmations, count: int, seconds: float, burning: bool) -> list[Result]:
    """Real confirmations of the baseline against itself."""
    results = []
    for seed in range(count):
        with disturbed(seed) if burning else contextlib.nullcontext():
            results.append(bench.confirm([without_extra_work(bench.baseline)], seconds))
    return results


def measured(quick: bool, *, record: bool) -> tuple[Recording, dict[str, Figure]]:
    """Real confirmations in both conditions, and longer ones for a recording: that, and the figures."""
    count = CONFIRMATIONS_QUICK if quick else CONFIRMATIONS
    seconds = REAL_SECONDS_QUICK if quick else REAL_SECONDS
    found: dict[str, Figure] = {}
    pools: dict[str, Pool] = {}
    with real_confirmations("equal") as bench:
        for condition in ("quiet", "disturbed"):
            burning = condition == "disturbed"
            results = confirmed(bench, count, seconds, burning=burning)
            found |= claims(f"real, {seconds:.0f} s, {condition}", results)
            if record and not quick:
                results += confirmed(bench, POOL_CONFIRMATIONS, POOL_SECONDS, burning=burning)
            pools[condition] = [
                instance for each in results for instance in instances_of(each.confirmed[0].record)
            ]
        warm = bench.warm
        recording = Recording(
            import_seconds=bench.import_seconds,
            first_step_seconds=warm.first_step_seconds,
            warmup_seconds=warm.ready.warmup_seconds,
            call_seconds=warm.ready.call_seconds,
            pools=pools,
        )
    return recording, found


def replayed(recording: Recording, count: int) -> dict[str, Figure]:
    """The figures of replays."""
    found: dict[str, Figure] = {}
    for condition, pool in recording.pools.items():
        if not pool:
            raise SystemExit(
                f"{condition}: no confirmation held enough slices to replay; the machine is too busy"
            )
        for seconds, finalists in ((SHORT_SECONDS, 1), (LONG_SECONDS, 1), (SEVERAL_SECONDS, FINALISTS)):
            results = replays(recording, condition, count, seconds=seconds, finalists=finalists)
            beside = f"{finalists} finalist" + ("s" if finalists > 1 else "")
            found |= claims(f"replayed, {seconds:.0f} s, {condition}, {beside}", results)
    return found


def main() -> None:
    """Measure, replay, print, and write."""
    arguments = parser(__doc__)
    arguments.add_argument("--replay-only", action="store_true", help="measure nothing")
    arguments.add_argument("--replays", type=int, help=f"of each kind; {REPLAYS:,} by default")
    arguments.add_argument("--recording", type=Path, default=recorded.DEFAULT, help="what is replayed")
    arguments.add_argument("--record", type=Path, help="keep slices in this file, and replay those")
    given = arguments.parse_args()
    found: dict[str, Figure] = {}
    if not given.replay_only:
        recording, found = measured(given.quick, record=given.record is not None)
        if given.record:
            recording.save(given.record)
    recording = Recording.load(given.record or given.recording)
    found |= replayed(recording, given.replays or (REPLAYS_QUICK if given.quick else REPLAYS))
    report("false_wins", found, given.json)


if __name__ == "__main__":
    main()
