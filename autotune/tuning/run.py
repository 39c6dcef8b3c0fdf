"""What all parts of a run share: where it writes, its time, who watches, the next trial's number."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autotune.executors.executor import Clock, Data, DeviceUnavailable, TrialFailed, Trials
from autotune.executors.no_memory import says_taken
from autotune.record import Boundary, Outcome, Phase, Slice, TrialRecord
from autotune.run_directory import RunDirectory
from autotune.space.configuration import Configuration
from autotune.tuning.progress import Observer, TrialBegan, TrialEnded, TrialMeasured
from autotune.tuning.running import Trial


@dataclass(kw_only=True)
class Run:
    """One invocation of the tuner.

    Args:
        directory: Where everything is written.
        trials: Where trials come from.
        clock: Seconds that count for the budget.
        spent_before: Seconds of earlier invocations that do not count for it.
        observe: Is told what happens.
        interruptions: How often the user has asked to stop.
        rng: Shuffles the order of slices; seeded.
        data: What the baseline learned of the dataset; None until then.
        boundary: What lies between two epochs of the baseline; None until then, and where epochs are timed whole.
        gpus: Names of the GPUs that the baseline saw; None until then.
        device_limit_bytes: What TensorFlow may take of a GPU, as the baseline's process found; None until then.
        baseline: What the user would run anyway, `jit_compile` resolved once the baseline has started.
        records: Every trial's record, by number.
        numbers: Numbers for new trials.
    """

    directory: RunDirectory
    trials: Trials
    clock: Clock
    observe: Observer
    interruptions: Callable[[], int]
    rng: random.Random
    data: Data | None = None
    boundary: Boundary | None = None
    gpus: tuple[str, ...] | None = None
    device_limit_bytes: int | None = None
    baseline: Configuration
    records: dict[int, TrialRecord] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    spent_before: float = 0.0

    def interrupted(self) -> bool:
        """Whether the user has asked to stop."""
        return self.interruptions() > 0

    def new_trial(self, phase: Phase, configuration: Configuration) -> Trial:
        """A trial with the next number, its directory made, announced."""
        trial = Trial(next(self.numbers), phase, configuration)
        self.directory.prepare_trial(trial.number)
        self.announce(trial)
        return trial

    def announce(self, trial: Trial) -> None:
        """Tell the observer that the trial runs now."""
        self.observe(
            TrialBegan(
                trial=trial.number,
                phase=trial.phase,
                configuration=trial.configuration,
                changes=self.changes(trial.configuration),
            )
        )

    def log_of(self, trial: Trial) -> str:
        """Path of the trial's log."""
        return str((self.directory.trial_directory(trial.number) / "log.txt").resolve())

    def stamped(self, each: Slice) -> Slice:
        """A slice that ended just now, with the second of the run at which it did."""
        return each.model_copy(update={"at": self.now()})

    def now(self) -> float:
        """This moment, in seconds of the run: those of earlier invocations included, pauses between them not."""
        return self.spent_before + self.clock()

    def refuse_other_devices(self, seen: Sequence[str]) -> None:
        """TensorFlow trains on the processor, without a word, where a card cannot be reached any more.

        Args:
            seen: Names of the GPUs that a process sees.

        Raises:
            DeviceUnavailable: They are others than the baseline saw.
        """
        if self.gpus is not None and tuple(seen) != self.gpus:
            raise DeviceUnavailable(
                f"TensorFlow sees {_named(seen)}, where the baseline saw {_named(self.gpus)}",
                hint="Has the card or the container lost its driver meanwhile? See what nvidia-smi says.",
            )

    def measured(self, trial: Trial) -> None:
        """Tell the observer of the estimate so far."""
        self.observe(TrialMeasured(trial=trial.number, speedup=trial.speedup, pairs=len(trial.log_ratios)))

    def keep(self, record: TrialRecord, *, announce: bool = True) -> TrialRecord:
        """Write a record, and tell the observer that the trial ended; returns it with the moment at which it did."""
        if record.ended_at_seconds is None:  # else it ended before, and its record stands or is judged anew
            record = record.model_copy(update={"ended_at_seconds": self.now()})
        self.records[record.trial] = record
        self.directory.write_trial(record)
        if announce:
            self.observe(TrialEnded(record=record, changes=self.changes(Configuration(record.configuration))))
        return record

    def changes(self, configuration: Configuration) -> str:
        """How a configuration differs from the baseline, in words."""
        return configuration.describe(relative_to=self.baseline)


@contextlib.contextmanager
def never_two_alive() -> Iterator[None]:
    """A card that is taken while no other process of the run is alive tells nothing of memory.

    Raises:
        TrialFailed: The one inside; `DeviceUnavailable` where another's process has the card.
    """
    try:
        yield
    except TrialFailed as failure:
        if failure.outcome is Outcome.OOM and says_taken(failure.reason):
            raise DeviceUnavailable(
                failure.reason,
                hint="Alone, too: a process that is not of this run has the card, as nvidia-smi shows.",
                detail=failure.detail,
                log_tail=failure.log_tail,
            ) from failure
        raise


def _named(gpus: Sequence[str]) -> str:
    return ", ".join(gpus) or "no GPU"
