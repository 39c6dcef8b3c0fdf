"""Whole runs replayed on recorded slices: the loop itself, in milliseconds a run.

A recording holds, for each instance of real confirmations of two equal sides, its pairs of slices in the order of time.
What the two slices of a pair have in common is the machine's; by what they differ is the processes' own. A replayed
process plays the machine of the baseline beside it, and the differences of an instance that is drawn for it alone. Both
sides vary alike, and pairs vary as they did. The true ratio of two configurations is the one that is planted.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from autotune.data.facts import Machine
from autotune.recipe.recipe import Recipe
from autotune.runtime.protocol import BranchRuns, LossCurves, Trainings, TrialTiming
from autotune.space.configuration import Configuration
from autotune.stats.deciding import Verdict
from autotune.stats.intervals import Measured
from autotune.tuning import run_setup

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from simulated import SimulatedTrial, SimulatedTrials
from simulated_runs import A100, BASELINE, FACTS, MACHINE, DirectoryWithoutStudy, go_on, on_disk, tune_simulated

DEFAULT = Path(__file__).resolve().parent / "data" / "recorded_slices.json"
CRITICAL_BATCH = 64.0
"""Of the machine on which no batch size is sooner."""
LOSS_NOISE = 0.001
"""Of a loss: about a tenth of its fall in a branch."""
RESUMED = 2
"""Every so many-th run that is undecided goes on with as much time again."""

Timed = Sequence[float]
"""Examples of a slice, and its seconds."""
Instance = Sequence[Sequence[Timed]]
"""The pairs of one instance, in the order of time."""
Pool = Sequence[Instance]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What was recorded.

    Args:
        import_seconds: What a template took to import everything.
        first_step_seconds: Of a process, from the request.
        warmup_seconds: Of a process, from the first step on.
        call_seconds: Of the train function.
        pools: The instances of each condition, by its name.
    """

    import_seconds: float
    first_step_seconds: float
    warmup_seconds: float
    call_seconds: float
    pools: Mapping[str, Pool]

    @classmethod
    def load(cls, file: Path) -> Recording:
        """Read one."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A machine to replay on.

    Args:
        pool: Whose recorded instances are played.
        shock: Scale of a Student t with three degrees of freedom, as a logarithm, by which each process differs.
        spread: Deviation of the logarithm by which a pair of processes differs, on a disturbed machine.
        restless: By how much more than the baseline's the candidate's slices vary.
        kernels: Deviation of the logarithm by which the baseline is faster with the kernels of one compilation. It
            trains on a GPU then, where processes load what others have compiled.
    """

    pool: str
    shock: float = 0.0
    spread: float = 0.0
    restless: float = 1.0
    kernels: float = 0.0

    def drawn_shock(self, rng: random.Random) -> float:
        """Draw by how much a process is faster, for all its life."""
        spread = self.spread / math.sqrt(2) * rng.gauss(0.0, 1.0) if self.spread else 0.0
        if not self.shock:
            return spread
        return spread + self.shock * rng.gauss(0.0, 1.0) / math.sqrt(rng.gammavariate(1.5, 2.0) / 3.0)

    def lost(self, recording: Recording) -> float:
        """Return the logarithm of the throughput that a restless candidate loses: a training pays for slow slices."""
        if self.restless == 1.0:
            return 0.0
        pairs = [pair for instance in recording.pools[self.pool] for pair in instance]
        rates = [[math.log(timed[0] / timed[1]) for timed in pair] for pair in pairs]
        own = [sign * (one - other) / math.sqrt(2) for one, other in rates for sign in (1.0, -1.0)]
        usual, more = (statistics.fmean(math.exp(scale * value) for value in own) for scale in (1.0, self.restless))
        return math.log(more / usual)


CONDITIONS = {
    "quiet": Condition(pool="quiet"),
    "disturbed": Condition(pool="disturbed"),
    "heavy-tailed": Condition(pool="quiet", shock=0.03),
    "restless candidate": Condition(pool="quiet", restless=2.0),
}


class Stretch:
    """A recorded instance, played from a random pair on and round again, its sides as they were or swapped.

    Its pairs stay neighbours, so what correlates within an instance does so in a replay; and each instance is drawn as
    a whole, so instances differ as they did. (Drawing pairs of an instance one by one would add their noise to the
    difference between instances, which holds it already.)

    Args:
        pool: Where the instance is drawn from.
        rng: Draws.
    """

    def __init__(self, pool: Pool, rng: random.Random) -> None:
        self._pairs = rng.choice(pool)
        self._start = rng.randrange(len(self._pairs))
        self._side = rng.randrange(2)

    def machine(self, index: int) -> float:
        """What a pair's slices have in common: the mean logarithm of their rates."""
        (own, _), (other, _) = self.sides(index)
        return math.log(own * other) / 2

    def own(self, index: int) -> float:
        """By how much the first side is faster than that, scaled.

        Two of these differ as much as the sides of a pair do: each has half the variance of their difference.
        """
        (own, _), (other, _) = self.sides(index)
        return math.log(own / other) / math.sqrt(2)

    def ratio(self, index: int) -> float:
        """The other side's rate over that of the first."""
        (own, _), (other, _) = self.sides(index)
        return other / own

    def sides(self, index: int) -> tuple[Measured, Measured]:
        """Rate and examples of the first side's slice, and of the other's."""
        (examples, seconds), (others, other_seconds) = (
            self._pair(index)[side] for side in (self._side, 1 - self._side)
        )
        return (examples / seconds, int(examples)), (others / other_seconds, int(others))

    def _pair(self, index: int) -> Sequence[Timed]:
        return self._pairs[(self._start + index) % len(self._pairs)]


class RecordedTrial(SimulatedTrial):
    """A process whose slices are as fast, relative to its pace, as those of a recorded one.

    Attributes:
        machine: The stretch of the baseline beside it, or its own.
        first: The place in that at which it begins.
        own: Its own stretch.
        shock: By how much this process is faster for all its life, as a logarithm.
        restless: By how much more its slices vary than recorded ones.
        usual: The mean logarithm of recorded rates.
        played: How many slices it has had.
    """

    machine: Stretch
    first: int
    own: Stretch
    shock: float
    restless: float
    usual: float
    played = 0

    def _branch(self, runs: BranchRuns, deadline: float) -> LossCurves:
        curves, draw = super()._branch(runs, deadline), self._trials.random
        noisy = tuple(
            tuple(loss and loss * math.exp(draw.gauss(0.0, LOSS_NOISE)) for loss in curve) for curve in curves.curves
        )
        return curves.model_copy(update={"curves": noisy})

    def _noise(self) -> float:
        place, self.played = self.played, self.played + 1
        own = self.shock + self.restless * self.own.own(place)
        return self.machine.machine(self.first + place) - self.usual + own


class RecordedTrials(SimulatedTrials):
    """A machine whose restlessness was recorded.

    Args:
        recording: What was recorded.
        condition: How the machine is.
        samples_per_second: The true speed of each configuration.
        seed: Of what is drawn.
        critical_batch: The batch size that needs twice the examples of a very small one.
    """

    def __init__(
        self,
        recording: Recording,
        condition: Condition,
        samples_per_second: Callable[[Configuration], float],
        *,
        seed: int,
        critical_batch: float = math.inf,
    ) -> None:
        super().__init__(
            facts=FACTS,
            samples_per_second=samples_per_second,
            start_seconds=recording.first_step_seconds,
            import_seconds=recording.import_seconds,
            seed=seed,
            examples=None,
            critical_batch=critical_batch,
            gpus=(A100.name,) if condition.kernels else (),
        )
        self.keeps_files = bool(condition.kernels)
        self._baseline_configuration: Configuration | None = None  # of the first process
        self._pool, self._condition = recording.pools[condition.pool], condition
        self._usual = statistics.fmean(
            math.log(timed[0] / timed[1]) for each in self._pool for pair in each for timed in pair
        )

    def process(
        self, configuration: Configuration, *, luck: float, timing: TrialTiming, losses: Trainings | None
    ) -> SimulatedTrial:
        """See `SimulatedTrials`."""
        trial = RecordedTrial(self, configuration, luck=luck, timing=timing, losses=losses)
        trial.own, trial.usual = Stretch(self._pool, self.random), self._usual
        self._baseline_configuration = self._baseline_configuration or configuration
        is_baseline = configuration == self._baseline_configuration
        trial.shock = self._condition.drawn_shock(self.random)
        if is_baseline and self._condition.kernels:
            trial.shock += self._compile(timing)
        trial.restless = 1.0 if is_baseline else self._condition.restless
        beside = None if is_baseline else self._baseline()
        trial.machine = trial.own if beside is None else beside.machine
        trial.first = 0 if beside is None else beside.first + beside.played
        return trial

    def _compile(self, timing: TrialTiming) -> float:
        """By how much a process of the baseline is faster with its kernels; those of its folder are loaded."""
        program = Path(timing.compiled, "program.pb")
        if timing.compiled and program.exists():
            return float(program.read_text(encoding="utf-8"))
        luck = self.random.gauss(0.0, self._condition.kernels)
        if timing.compiled:
            program.write_text(str(luck), encoding="utf-8")
        return luck

    def _baseline(self) -> RecordedTrial | None:
        """The baseline's latest process that is alive."""
        for trial in reversed(self.alive):
            if isinstance(trial, RecordedTrial) and trial.configuration == self._baseline_configuration:
                return trial
        return None


def planted(gain: float) -> Callable[[Configuration], float]:
    """XLA is faster by this share, and nothing else changes anything."""

    def samples_per_second(configuration: Configuration) -> float:
        changed = configuration["jit_compile"] != BASELINE["jit_compile"]
        return 4000.0 * (1 + gain if changed else 1.0)

    return samples_per_second


def no_sooner(configuration: Configuration) -> float:
    """Larger batches are faster by just as much as they need more examples; nothing else changes anything."""
    needed, usual = (1 + side.batch_size / CRITICAL_BATCH for side in (configuration, BASELINE))
    return float(4000.0 * needed / usual)


def replay(recording: Recording, condition: Condition, *, gain: float, budget: float, seed: int) -> Recipe:
    """One whole run by samples per second; some of those that are undecided go on with as much time again."""
    return _replay(
        lambda which: RecordedTrials(recording, condition, planted(gain), seed=2 * seed + which),
        objective="throughput",
        budget=budget,
        seed=seed,
        machine=MACHINE.model_copy(update={"gpus": (A100,)}) if condition.kernels else MACHINE,
    )


def replay_batches(recording: Recording, condition: Condition, *, budget: float, seed: int) -> Recipe:
    """One whole run by the time to the same losses, which no batch size reaches sooner."""

    def trials(which: int) -> RecordedTrials:
        return RecordedTrials(recording, condition, no_sooner, seed=2 * seed + which, critical_batch=CRITICAL_BATCH)

    return _replay(trials, objective="time_to_loss", budget=budget, seed=seed)


def _replay(
    trials: Callable[[int], RecordedTrials], *, objective: str, budget: float, seed: int, machine: Machine = MACHINE
) -> Recipe:
    has_flags = patch.object(run_setup, "can_keep_compilations", return_value=True)  # asks no TensorFlow
    with has_flags, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with on_disk(path, DirectoryWithoutStudy) as directory:
            recipe: Recipe = tune_simulated(
                trials(0), directory, budget=budget, seed=seed, objective=objective, machine=machine
            )
        if recipe.evidence.verdict is Verdict.UNDECIDED and seed % RESUMED == 0:
            recipe = go_on(trials(1), path, budget=budget, objective=objective, machine=machine)
        return recipe


def true_speedup(recipe: Recipe, recording: Recording, condition: Condition, gain: float) -> float:
    """Return the true speed-up of what is recommended."""
    speed = planted(gain)
    ratio = speed(Configuration(recipe.configuration)) / speed(Configuration(recipe.baseline))
    return ratio * math.exp(-condition.lost(recording) if recipe.changes else 0.0)
