"""When a confirmation may stop: rules for looking at a claim, compared on recorded pairs of processes.

    python benchmarks/looks.py [--quick] [--json FILE] [--fit]

Prints one table. Each replay draws fresh pairs of processes until a rule claims a planted gain, or twelve were drawn.
The rules differ in how the interval is made and how often it is looked at: Student's t over processes after 4, 8 and 12
of them; the moderated interval of `stats/intervals.py` with planned looks (Bonferroni), and with spending after every
pair (Pocock's constant boundary: ours). Beside the recorded machines there are some whose processes differ much.
`--fit` prints how well slices predict processes on the recorded machines.
"""

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Sequence

from figures import Figure, mean, one, parser, report, share
from recorded import CONDITIONS, DEFAULT, Condition, Recording, Stretch
from scipy.special import digamma, polygamma

from autotune.data.figures import LogInterval
from autotune.data.record import LOOK_SHARE
from autotune.stats.intervals import ProcessPrior, claim_interval, mean_interval, process_prior
from autotune.tuning.policy import FEWEST_PROCESSES, MOST_PROCESSES, error_of

GAINS = (0.0, 0.10, 0.30, 1.0, 3.0)
ROUNDS, OTHER_TRIALS = 6, 6  # slice pairs of a pair of processes, and search trials that the prior is from
ERROR = error_of(1)
MACHINES = CONDITIONS | {f"processes differ by {of:.0%}": Condition(pool="quiet", spread=of) for of in (0.1, 0.2, 0.4)}
REPLAYS, REPLAYS_QUICK = 1000, 60

Processes = Sequence[Sequence[float]]
Rule = Callable[[Processes, ProcessPrior], LogInterval | None]
"""The interval at a look; None where the rule does not look after so many processes."""


def drawn(recording: Recording, condition: Condition, rng: random.Random, gain: float = 0.0) -> list[float]:
    """Draw the log-ratios of one fresh pair of processes, the candidate's and the baseline's."""
    stretches = [Stretch(recording.pools[condition.pool], rng) for _ in range(2)]
    shock = condition.drawn_shock(rng) - condition.drawn_shock(rng)
    own, other = (
        [scale * stretch.own(place) for place in range(ROUNDS)]
        for stretch, scale in zip(stretches, (condition.restless, 1.0), strict=True)
    )
    return [math.log1p(gain) + shock + one - another for one, another in zip(own, other, strict=True)]


def student(processes: Processes, prior: ProcessPrior) -> LogInterval | None:
    """Student's t over processes, after 4, 8 and 12 of them."""
    if len(processes) not in (4, 8, 12):
        return None
    return mean_interval([statistics.fmean(values) for values in processes], confidence=1 - ERROR / 3)


def planned(processes: Processes, prior: ProcessPrior) -> LogInterval | None:
    """The moderated interval at four looks that are planned beforehand."""
    if len(processes) not in (2, 4, 8, 12):
        return None
    return claim_interval(processes, prior=prior, confidence=1 - ERROR / 4)


def spending(processes: Processes, prior: ProcessPrior) -> LogInterval | None:
    """The moderated interval after every pair, as the tool has it."""
    return claim_interval(processes, prior=prior, confidence=1 - LOOK_SHARE * ERROR)


RULES: dict[str, Rule] = {
    "t of processes, 4, 8, 12": student,
    "moderated, 2, 4, 8, 12": planned,
    "moderated, every pair (ours)": spending,
}


def confirmed(recording: Recording, condition: Condition, rule: Rule, gain: float, seed: int) -> tuple[int, bool]:
    """Replay one confirmation: after how many processes a side it claimed (0: not), and whether the interval holds."""
    rng = random.Random(seed)
    calm = dataclasses.replace(condition, restless=1.0)  # the other trials are no restless ones
    prior = process_prior([[drawn(recording, calm, rng)] for _ in range(OTHER_TRIALS)], rounds=ROUNDS)
    processes: list[list[float]] = []
    while len(processes) < MOST_PROCESSES:
        processes.append(drawn(recording, condition, rng, gain))
        found = rule(processes, prior) if len(processes) >= FEWEST_PROCESSES else None
        if found is not None and found.low > 0 and found.value >= math.log1p(0.02):
            return len(processes), found.low <= math.log1p(gain) <= found.high
    return 0, True


def figures(recording: Recording, replays: int) -> dict[str, Figure]:
    """All figures of the table, by name."""
    found: dict[str, Figure] = {}
    for condition, machine in MACHINES.items():
        for name, rule in RULES.items():
            claims = held = 0
            for gain in GAINS:
                ends = [confirmed(recording, machine, rule, gain, seed) for seed in range(replays)]
                counts = [count for count, _ in ends if count]
                bar = {"max": 0.05} if not gain else None
                found[f"{condition}, {gain:.0%}, {name}: claims"] = share(len(counts), replays, bar)
                if gain:
                    claims, held = claims + len(counts), held + sum(holds for count, holds in ends if count)
                    middle = statistics.median(count or math.inf for count, _ in ends)
                    value = middle if math.isfinite(middle) else None
                    found[f"{condition}, {gain:.0%}, {name}: processes a side, median"] = one(value, replays)
            found[f"{condition}, {name}: intervals that hold"] = share(held, claims, {"min": 0.93})
    return found


def ratio_of(pair: Sequence[Sequence[float]]) -> float:
    """Return the second side's rate over the first's."""
    (examples, seconds), (others, other_seconds) = pair
    return (others / other_seconds) / (examples / seconds)


def fitted(recording: Recording) -> dict[str, Figure]:
    """Fit what is shipped: the spread of slices, and how well it predicts that of processes (Smyth 2004, section 6)."""
    found: dict[str, Figure] = {}
    for condition, pool in recording.pools.items():
        ratios = [[math.log(ratio_of(pair)) for pair in instance] for instance in pool]
        within = [statistics.variance(values) for values in ratios]
        deviation = math.sqrt(statistics.fmean(within))
        means = [statistics.fmean(values) for values in ratios]
        predicted = [deviation**2 / len(values) for values in ratios]
        excess = math.sqrt(statistics.fmean(value**2 for value in means) / statistics.fmean(predicted))
        groups = [range(start, start + 4) for start in range(0, len(pool) - 3, 4)]
        spreads = [
            math.log(statistics.variance([means[at] for at in group]) / statistics.fmean(predicted[at] for at in group))
            for group in groups
        ]
        surplus = max(1e-3, statistics.variance(spreads) - float(polygamma(1, 1.5)))
        degrees = next((count for count in range(1, 200) if float(polygamma(1, count / 2)) <= surplus), 200)
        centred = [value - float(digamma(1.5)) + math.log(1.5) for value in spreads]
        found[f"{condition}: deviation of slice pairs"] = one(deviation, len(pool))
        found[f"{condition}: excess of processes"] = one(excess, len(pool))
        found[f"{condition}: degrees of freedom"] = one(degrees, len(groups))
        found[f"{condition}: log-variance of four processes over its prediction"] = mean(centred)
    return found


def main() -> None:
    """Replay, print, and write."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--fit", action="store_true", help="print how well slices predict processes on the recorded machines"
    )
    given = arguments.parse_args()
    recording = Recording.load(DEFAULT)
    found = fitted(recording) if given.fit else figures(recording, REPLAYS_QUICK if given.quick else REPLAYS)
    report("looks", found, given.json)


if __name__ == "__main__":
    main()
