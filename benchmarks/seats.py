"""What several seats give, on simulated trials: throughput, regret, and the driver's own time.

    python benchmarks/seats.py [--quick] [--json FILE]

Simulated trials sleep: a second of theirs takes 1/2 s here, so the driver's own work counts twice.
Regret is the log-speed of the best configuration over that of the fastest measured, on the drawn machines of
`samplers.py`.
"""

import itertools
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import deque
from functools import partial
from pathlib import Path

import optuna
from figures import Figure, mean, one, parser, report
from samplers import ERROR, Machine, Speeds, machines, record_of

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulated import SimulatedClock, SimulatedTrials
from simulated_runs import FACTS, MemoryDirectory, on_disk, tune_simulated, with_run

from autotune.data.record import Phase, TrialRecord
from autotune.data.run_directory import RunDirectory
from autotune.space.changes import Context
from autotune.space.configuration import Configuration
from autotune.tuning.beliefs import Observations
from autotune.tuning.candidates import Proposals
from autotune.tuning.sampler import Sampler

SCALE = 2.0
"""Seconds of a trial for each second here."""
SEATS = (1, 2, 4, 8)
TRIALS_A_SEAT, TRIALS_A_SEAT_QUICK = 16, 4
STUDIES, STUDIES_QUICK = 30, 2
"""Of each kind of machine."""
COMPARED_AFTER = 32
"""Trials."""
MANY_TRIALS, MANY_TRIALS_QUICK = 1000, 50
EQUALLY_LONG = """
schema_version = 1
[knobs.jit_compile]
kind = "categorical"
choices = [false, true]
[knobs.precision]
kind = "categorical"
choices = ["float32", "mixed_bfloat16"]
[knobs.prefetch]
kind = "categorical"
choices = [0, 1, 2, 4, 8, "autotune"]
[knobs.data_threads]
kind = "categorical"
choices = [0, 2, 4, 8]
[knobs.intra_op_threads]
kind = "categorical"
choices = [0, 1, 2, 4]
"""
SPACE = (
    EQUALLY_LONG
    + """
[knobs.batch_size]
kind = "power_of_two"
low = 16
high = 16384
[knobs.steps_per_execution]
kind = "categorical"
choices = [1, 2, 4, 8, 16, 32]
"""
)


class SleepingClock(SimulatedClock):
    """Seconds that pass by themselves, `SCALE` times as fast as real ones."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()

    def __call__(self) -> float:
        """See `SimulatedClock`."""
        return (time.monotonic() - self._began) * SCALE

    def advance(self, seconds: float) -> None:
        """Sleep as long."""
        time.sleep(seconds / SCALE)


def uneven(configuration: Configuration) -> float:
    """Samples per second: no configuration is faster than the baseline's, so nothing is confirmed."""
    return 4000.0 * (1.0 - 0.3 * random.Random(repr(sorted(configuration.items()))).random())


class Timed(MemoryDirectory):  # type: ignore[misc]  # tests are not typed
    """Remembers when each candidate was kept, in seconds here."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.kept_at: list[float] = []

    def write_trial(self, record: TrialRecord) -> None:
        """Keep it."""
        super().write_trial(record)
        if record.phase is Phase.SEARCH:
            self.kept_at.append(time.monotonic())


class TimedOnDisk(RunDirectory):
    """The same, with files."""

    kept_at: list[float]

    def write_trial(self, record: TrialRecord) -> None:
        """Write it."""
        super().write_trial(record)
        self.kept_at.append(time.monotonic())


def trials_per_second(seats: int, trials_a_seat: int) -> float:
    """Candidates a second of the simulated clock, once the first on each seat has ended."""
    names = tuple(f"seat {number}" for number in range(seats))
    machine = SimulatedTrials(facts=FACTS, samples_per_second=uneven, noise=0.01, seats=names)
    machine.clock = SleepingClock()
    with tempfile.TemporaryDirectory() as folder:
        directory = with_run(Timed(Path(folder)))
        tune_simulated(machine, directory, space=EQUALLY_LONG, budget=36000.0, trials=trials_a_seat * seats)
    kept: list[float] = directory.kept_at
    return (len(kept) - seats) / ((kept[-1] - kept[seats - 1]) * SCALE)


def regret(machine: Machine, in_flight: int, seed: int) -> float:
    """The regret after `COMPARED_AFTER` trials, of which so many always run at once."""
    rng, space = random.Random(seed), machine.space
    sampler = Sampler(space, file=None, name="benchmark", seed=seed, several=in_flight > 1)
    proposals = Proposals(space, sampler)
    sampler.catch_up([record_of(space.baseline, 0, 0.0)])
    measured: Speeds = {space.baseline: 0.0}
    running: deque[tuple[optuna.Trial, Configuration]] = deque()
    known = {space.baseline}
    for number in range(1, COMPARED_AFTER + in_flight):
        if len(running) == in_flight or number > COMPARED_AFTER:
            optuna_trial, configuration = running.popleft()
            measured[configuration] = machine.speed(configuration) + rng.gauss(0.0, ERROR)
            sampler.tell(optuna_trial, record_of(configuration, len(measured), measured[configuration]))
        if number <= COMPARED_AFTER:
            best = max(measured, key=lambda configuration: measured[configuration])
            observations = Observations(running=[each for _, each in running], ratios=measured)
            now = Context(waits_for_input=machine.waits(best))
            propose = partial(proposals.next, known, best, context=now, observations=observations)
            proposed = propose() or propose(last=True)
            if proposed is not None:
                running.append(proposed)
                known.add(proposed[1])
    favoured = max(measured, key=lambda configuration: measured[configuration])
    return machine.best - machine.speed(favoured)


def driver_seconds(trials: int) -> tuple[float, float]:
    """What the driver itself takes for a trial, of all and of the last tenth, in seconds; files and study on disk."""
    machine = SimulatedTrials(facts=FACTS, samples_per_second=uneven, noise=0.01)
    with tempfile.TemporaryDirectory() as folder, on_disk(Path(folder) / "run", TimedOnDisk) as directory:
        directory.kept_at = []
        tune_simulated(machine, directory, space=SPACE, budget=1e7, trials=trials)
        steps = [after - before for before, after in itertools.pairwise(directory.kept_at)]
    return statistics.fmean(steps), statistics.fmean(steps[-max(1, len(steps) // 10) :])


def main() -> None:
    """Simulate, print, and write."""
    given = parser(__doc__).parse_args()
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    found: dict[str, Figure] = {}
    alone = 0.0
    for seats in SEATS:
        rate = trials_per_second(seats, TRIALS_A_SEAT_QUICK if given.quick else TRIALS_A_SEAT)
        alone = alone or rate
        bar = {"at least": 0.9 * seats} if seats == SEATS[-1] else None
        found[f"trial throughput with {seats} seats over 1"] = one(rate / alone, seats, bar)
    regrets = {
        in_flight: [
            regret(machine, in_flight, seed)
            for _, drawn in machines(STUDIES_QUICK if given.quick else STUDIES)
            for seed, machine in enumerate(drawn)
        ]
        for in_flight in (1, SEATS[-1])
    }
    for in_flight, each in regrets.items():
        found[f"regret after {COMPARED_AFTER} trials, {in_flight} in flight"] = mean(each)
    ratio = statistics.fmean(regrets[SEATS[-1]]) / statistics.fmean(regrets[1])
    found["regret with 8 in flight over 1"] = one(ratio, len(regrets[1]), {"at most": 1.2})
    trials = MANY_TRIALS_QUICK if given.quick else MANY_TRIALS
    everyone, last = driver_seconds(trials)
    found[f"driver's seconds a trial, mean of {trials}"] = one(everyone, trials)
    found["driver's seconds a trial, last tenth"] = one(last, trials // 10)
    report("seats", found, given.json)


if __name__ == "__main__":
    main()
