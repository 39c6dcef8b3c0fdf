"""Confirmations replayed from recorded slices: thousands of them through the tuner's own code, in milliseconds each.

A recording holds, for each instance of real confirmations of a finalist that *is* the baseline, its pairs of slices in
the order of time. Both sides ran the same configuration, so which is which is drawn anew for every replayed instance:
the true ratio of a replay is exactly 1, or the gain that is planted by multiplying the finalist's rates.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from confirming import Confirmations

from autotune.measure.throughput import Measured
from autotune.run_directory import RunDirectory
from autotune.space.configuration import Configuration
from autotune.study.confirmed import Result
from autotune.study.plan import FEWEST_ROUNDS
from autotune.trial.live import Data, WarmUp
from autotune.trial.messages import (
    EPOCH_SECONDS,
    Finished,
    LossCurves,
    LossRuns,
    Ready,
    Started,
    StartedByImport,
)
from autotune.trial.record import Slice, StepSeconds, TrialRecord
from autotune.trial.simulated import SimulatedClock
from autotune.workload import WorkloadFacts

DEFAULT = Path(__file__).resolve().parent.parent / "results" / "confirmations_two_cores.json"
CLOSING_SECONDS = 0.05
"""What a replayed process takes for its closing figures, without its input wait: nothing waits there."""
FEW_REPLAYS = 100
"""Not worth the start of other processes."""
INPUT_WAIT_FACTOR = 1.3
"""What measuring the input wait takes, over what it may take once both its sides have begun."""
BATCH_SIZE = 32

Timed = tuple[int, float]
"""Examples of a slice, and its seconds."""
Instance = Sequence[tuple[Timed, Timed]]
"""The pairs of one instance, in the order of time."""
Pool = Sequence[Instance]


def instances_of(record: TrialRecord) -> list[Instance]:
    """The pairs of a confirmed finalist's record, by instance; those that the end of the time cut short left out."""
    found: dict[int, list[tuple[Timed, Timed]]] = {}
    for pair in record.pairs:
        sides = [(each.examples, round(each.seconds, 5)) for each in (pair.baseline, pair.candidate)]
        found.setdefault(pair.instance, []).append((sides[0], sides[1]))
    return [each for each in found.values() if len(each) >= FEWEST_ROUNDS]


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
        """Read one that `save` has written; ends the program where there is none."""
        if not file.exists():
            raise SystemExit(
                f"no recording at {file}: `python benchmarks/false_wins.py --record {file}` makes one"
            )
        return cls(**json.loads(file.read_text(encoding="utf-8")))

    def save(self, file: Path) -> None:
        """Write it, an instance to a line."""
        fields = asdict(self)
        pools = {
            name: "[\n" + ",\n".join(json.dumps(each, separators=(",", ":")) for each in pool) + "\n]"
            for name, pool in fields.pop("pools").items()
        }
        head = json.dumps(fields)[:-1]
        body = ",\n".join(f'"{name}": {text}' for name, text in pools.items())
        file.write_text(f'{head}, "pools": {{\n{body}\n}}}}\n', encoding="utf-8")


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

    def slice(self, index: int) -> Timed:
        """The first side's slice of a pair, by its place in the replay."""
        return self._pair(index)[self._side]

    def ratio(self, index: int) -> float:
        """The other side's rate over that of the first."""
        (own, _), (other, _) = self.sides(index)
        return other / own

    def sides(self, index: int) -> tuple[Measured, Measured]:
        """Rate and examples of the first side's slice, and of the other's."""
        (examples, seconds), (others, other_seconds) = (
            self._pair(index)[side] for side in (self._side, 1 - self._side)
        )
        return (examples / seconds, examples), (others / other_seconds, others)

    def _pair(self, index: int) -> tuple[Timed, Timed]:
        return self._pairs[(self._start + index) % len(self._pairs)]


class RecordedTrial:
    """One replayed process; see `live.LiveTrial`.

    Args:
        trials: Where it comes from.
        baseline: The baseline's stretch of this instance.
        own: Whose ratios it has to the baseline; None where it is the baseline itself.
    """

    def __init__(self, trials: RecordedTrials, baseline: Stretch, own: Stretch | None) -> None:
        self._trials = trials
        self._baseline = baseline
        self._own = own
        self._measured = 0

    def warm_up(self, timeout_seconds: float) -> WarmUp:
        """See `live.LiveTrial`: takes what was recorded."""
        recording = self._trials.recording
        self._trials.clock.advance(recording.first_step_seconds + recording.warmup_seconds)
        return WarmUp(
            started=Started(
                jit_compile=False,
                examples=None,
                examples_per_epoch=None,
                endless=True,
                element="recorded",
                parameters=1,
            ),
            ready=Ready(
                timed_by="steps",
                settled=True,
                warmup_seconds=recording.warmup_seconds,
                compile_seconds=0.0,
                epoch_overhead_seconds=None,
                call_seconds=recording.call_seconds,
                epoch_seconds=None,
            ),
            launch_seconds=0.0,
            first_step_seconds=recording.first_step_seconds,
            ready_seconds=recording.first_step_seconds + recording.warmup_seconds,
            first_loss=None,
        )

    def measure(self, seconds: float, timeout_seconds: float) -> Slice:
        """See `live.LiveTrial`: the next slice, of the length that was recorded."""
        examples, spent = self._baseline.slice(self._measured)
        ratio = 1.0 if self._own is None else self._trials.gain * self._own.ratio(self._measured)
        self._measured += 1
        self._trials.clock.advance(spent)  # as it went
        # Half of the ratio each, for that favours neither side: of ratios that vary about 1, overall rates would be
        # above it were all in the examples, and below it were all in the seconds.
        scaled = max(1, round(examples * math.sqrt(ratio)))
        return Slice(
            seconds=scaled * spent / (examples * ratio),
            steps=max(1, scaled // BATCH_SIZE),
            examples=scaled,
            epochs=0,
            cpu_seconds=spent,
            step_seconds=StepSeconds(p50=spent, p90=spent, p99=spent, max=spent),
        )

    def measure_continuously(self, seconds: float, count: int, timeout_seconds: float) -> tuple[Slice, ...]:
        """See `live.LiveTrial`: pauses gave nothing to what was recorded."""
        return tuple(self.measure(seconds, timeout_seconds) for _ in range(count))

    def finish(self, input_wait_seconds: float, timeout_seconds: float) -> Finished:
        """See `live.LiveTrial`."""
        self._trials.clock.advance(CLOSING_SECONDS + INPUT_WAIT_FACTOR * input_wait_seconds)
        waits = 0.0 if input_wait_seconds else None
        return Finished(peak_host_bytes=1 << 20, peak_device_bytes=None, input_wait_fraction=waits)

    def loss_curves(self, timeout_seconds: float) -> LossCurves:
        """See `live.LiveTrial`: no losses were recorded."""
        return LossCurves(curves=(), gpus=())

    def kill(self) -> None:
        """See `live.LiveTrial`."""


class RecordedTrials:
    """Trials whose slices were recorded; see `live.Trials`.

    Args:
        recording: What was recorded.
        condition: Which of its pools.
        rng: Draws the stretches.
        gain: What the rates of everything but the baseline are multiplied by.
    """

    def __init__(
        self, recording: Recording, condition: str, rng: random.Random, *, gain: float = 1.0
    ) -> None:
        self.recording = recording
        self.gain = gain
        self.clock = SimulatedClock()
        self.started_by_import: StartedByImport | None = None
        self._pool = recording.pools[condition]
        self._rng = rng
        self._baseline: Configuration | None = None
        self._stretch = Stretch(self._pool, rng)
        self._imported_at = 0.0

    def open(self) -> WorkloadFacts:
        """See `live.Trials`."""
        self.clock.advance(self.recording.import_seconds)
        return WorkloadFacts(
            name="recorded",
            batch_size=BATCH_SIZE,
            baseline={"jit_compile": False},
            batched=False,
            drop_remainder=False,
            dataset_takes_config=True,
            validates=False,
            fingerprint="sha256:00",
        )

    def launch(
        self,
        configuration: Configuration,
        *,
        log: str,
        data: Data | None,
        group: int = 0,
        epoch_seconds: float = EPOCH_SECONDS,
        losses: LossRuns | None = None,
    ) -> RecordedTrial:
        """See `live.Trials`: the first to be launched is the baseline, which begins an instance each time."""
        self._baseline = self._baseline or configuration
        if configuration == self._baseline:
            self._stretch = Stretch(self._pool, self._rng)
            return RecordedTrial(self, self._stretch, None)
        return RecordedTrial(self, self._stretch, Stretch(self._pool, self._rng))

    def prepare(self, group: int, configurations: Sequence[Configuration]) -> None:
        """See `live.Trials`: templates that are started together import side by side."""
        self._imported_at = self.clock() + self.recording.import_seconds

    def await_ready(self, group: int) -> None:
        """See `live.Trials`."""
        self.clock.advance(max(0.0, self._imported_at - self.clock()))

    def apart(self, one: Configuration, other: Configuration) -> bool:
        """See `live.Trials`."""
        return False

    def retire(self, group: int) -> None:
        """See `live.Trials`."""

    def close(self) -> None:
        """See `live.Trials`."""


class Nowhere(RunDirectory):
    """A run directory that keeps nothing."""

    def prepare_trial(self, trial: int) -> Path:
        """Nothing to make."""
        return self.trial_directory(trial)

    def write_trial(self, record: TrialRecord) -> None:
        """Nothing to keep."""


def replay(
    recording: Recording,
    condition: str,
    seed: int,
    *,
    seconds: float,
    gain: float = 1.0,
    finalists: int = 1,
) -> Result:
    """One confirmation of so many seconds, imports among them, from recorded slices.

    Args:
        recording: What was recorded.
        condition: Which of its pools.
        seed: Of everything that is drawn.
        seconds: What the confirmation has.
        gain: True ratio of every finalist to the baseline.
        finalists: How many are confirmed, side by side where the time holds enough instances of that.
    """
    trials = RecordedTrials(recording, condition, random.Random(seed), gain=gain)
    bench = Confirmations(trials, Nowhere("replay"), trials.clock, seed=seed)
    candidates = [bench.baseline.replace(data_threads=number) for number in range(1, finalists + 1)]
    return bench.confirm(candidates, seconds)


def replays(
    recording: Recording,
    condition: str,
    count: int,
    *,
    seconds: float,
    gain: float = 1.0,
    finalists: int = 1,
) -> list[Result]:
    """So many of these, of the seeds from 0 on, in that order, on all cores where they are not few."""
    one = functools.partial(replay, recording, condition, seconds=seconds, gain=gain, finalists=finalists)
    if count <= FEW_REPLAYS:
        return list(map(one, range(count)))
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(one, range(count), chunksize=FEW_REPLAYS // 2))
