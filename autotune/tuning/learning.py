"""Short trainings for their losses alone, while nothing is timed: numerics parity, and what a larger batch costs."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autotune.data.figures import Check
from autotune.data.record import Outcome
from autotune.runtime.executor import DeviceUnavailable, SeatLost, TrialFailed
from autotune.runtime.protocol import LossRuns
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, Numerics
from autotune.stats.numerics import FEWEST_STEPS, NAME, BatchLosses, batch_losses, cannot_tell, check_parity
from autotune.tuning.events import Began, Notice
from autotune.tuning.run import Interrupted, Run, reclassify_busy_gpu

Curves = Sequence[Sequence[float | None]]

PARITY_SEEDS, PARITY_STEPS = (0, 1, 2, 3, 4), 200
BATCH_SEEDS, BATCH_STEPS = (0, 1, 2), 400  # seeds of the weights, and steps of the baseline's training
LEAST_SECONDS = 0.2  # of one training, its compilation not counted


def numerics_of(configuration: Configuration) -> tuple[object, ...]:
    """Return the class of numerics that a configuration computes in."""
    return tuple(configuration.get(name) for name, knob in KNOBS.items() if knob.numerics is Numerics.ARITHMETIC)


def plain_numerics(baseline: Configuration, *, batch_size: int) -> Configuration:
    """Return the baseline at a batch size, in float32 without XLA: what numerics are compared with."""
    plain = {name: KNOBS[name].plain for name in baseline}
    changes = {name: value for name, value in plain.items() if value is not None}
    return baseline.replace(**changes, batch_size=batch_size)


class Trainings:
    """Short trainings within a time, on batches recorded below the run directory; leaving it removes those."""

    def __init__(self, run: Run, *, seat: str, ends: float, heading: str) -> None:
        self.run = run
        self._heading = heading  # shown when the first one begins
        self._seat, self._ends = seat, ends
        self._scratch: Path | None = None
        self._count = 0

    def __enter__(self) -> Trainings:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the recorded batches."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def left(self) -> float:
        """Return the seconds until it must be over."""
        return max(0.0, self._ends - self.run.clock())

    def seconds_each(self, count: int, *, share: float) -> float:
        """Return seconds for each of so many trainings of the baseline's kind, out of a share of what is left."""
        # They read a few batches, so they do not fill what the dataset caches.
        baseline = self.run.records[0]
        start = (baseline.first_step_seconds or 1.0) - (baseline.filling_seconds or 0.0)
        return (share * self.left() - start) / (count + 1)

    def curves(
        self,
        configuration: Configuration,
        *,
        recorded: int,
        seeds: tuple[int, ...],
        steps: int,
        seconds: float,
        scales: tuple[float, ...] = (1.0,),
    ) -> Curves:
        """Return losses by step, for each scale of the learning rate and each seed; empty where there are none."""
        # Raises TrialFailed, DeviceUnavailable, Interrupted. Batches of the size `recorded` are recorded where they
        # are not yet; no step of the first training begins after `seconds`.
        if self.run.interrupted():
            raise Interrupted
        self._count += 1
        if self._count == 1:
            self.run.observe(Began(text=self._heading))
        if self._scratch is None:  # a name that nothing of others can have
            self._scratch = Path(tempfile.mkdtemp(prefix="scratch-", dir=self.run.directory.path))
        log = self.run.directory.log_directory / f"losses-{self._count}.log"
        losses = LossRuns(
            folder=str((self._scratch / f"batch-{recorded}").resolve()),
            recorded_batch_size=recorded,
            seeds=seeds,
            scales=scales,
            most_steps=steps,
            seconds=seconds,
        )
        with reclassify_busy_gpu(), self.run.turn.released():
            live = self.run.executor.launch(
                configuration, seat=self._seat, log=str(log.resolve()), data=self.run.data, losses=losses
            )
            try:
                found = live.loss_curves(max(1.0, self.left()))
            finally:
                live.kill()
        self.run.refuse_other_devices(found.gpus)
        return found.curves


def compare_numerics(trainings: Trainings, configuration: Configuration) -> Check:
    """Return whether a configuration learns as float32 without XLA does, at its batch size."""
    # A comparison that could not be made passes, with no value and the reason in its detail.
    run = trainings.run
    plain = plain_numerics(run.baseline, batch_size=configuration.batch_size)
    if numerics_of(configuration) == numerics_of(plain):
        return Check(name=NAME, passed=True, value=0.0, limit=0.0, detail="computes in float32 without XLA")
    check = _compared(trainings, configuration, plain)
    if not check.tells:
        run.observe(Notice(text=f"numerics parity of {run.changes(configuration)}: {check.detail}"))
    return check


def _compared(trainings: Trainings, configuration: Configuration, plain: Configuration) -> Check:
    run, size = trainings.run, configuration.batch_size
    seconds = trainings.seconds_each(len(PARITY_SEEDS), share=0.5)
    if seconds < LEAST_SECONDS:
        return cannot_tell("no time was left for it; a larger --budget has some")
    try:
        float32 = trainings.curves(plain, recorded=size, seeds=PARITY_SEEDS, steps=PARITY_STEPS, seconds=seconds)
    except TrialFailed as failure:
        _refuse_lost(failure, run)
        return cannot_tell(f"float32 without XLA gave no losses at batch_size={size}: {failure.reason}")
    if not float32 or not float32[0]:
        return cannot_tell("the model reports no loss")
    try:
        own = trainings.curves(
            configuration, recorded=size, seeds=PARITY_SEEDS[:1], steps=len(float32[0]), seconds=trainings.left()
        )
    except DeviceUnavailable as failure:
        return cannot_tell(failure.reason)
    except TrialFailed as failure:
        _refuse_lost(failure, run)
        if failure.outcome is Outcome.TIMEOUT:
            return cannot_tell("its losses did not come within the time there was")
        return Check(name=NAME, passed=False, detail=failure.reason)
    return check_parity(float32, own[0])


def _refuse_lost(failure: TrialFailed, run: Run) -> None:
    """Raise what says nothing of a configuration: one of several seats was lost, and another compares again."""
    if isinstance(failure, SeatLost) and run.several:
        raise failure


def compare_batch_sizes(trainings: Trainings, configuration: Configuration) -> BatchLosses | None:
    """Return losses of a configuration beside the baseline's, after equal numbers of examples."""
    # They are reported and never refuse anything: the learning rate is the user's to choose. None where too
    # little could be trained; a notice says so.
    run, size = trainings.run, configuration.batch_size
    why = "too few steps were trained"
    try:
        losses = _batch_losses(trainings, configuration)
    except Interrupted:
        losses, why = None, "the run was stopped"
    except TrialFailed as failure:
        losses, why = None, failure.reason
    if losses is None:
        run.observe(Notice(text=f"the loss at batch_size={size} was not compared: {why}"))
    return losses


def _batch_losses(trainings: Trainings, configuration: Configuration) -> BatchLosses | None:
    baseline = trainings.run.baseline
    recorded, ratio = baseline.batch_size, configuration.batch_size / baseline.batch_size
    seconds = trainings.seconds_each(len(BATCH_SEEDS), share=0.4)
    if seconds < LEAST_SECONDS:
        return None
    before = trainings.curves(baseline, recorded=recorded, seeds=BATCH_SEEDS, steps=BATCH_STEPS, seconds=seconds)
    examples = len(before[0]) * recorded if before else 0
    steps = examples // configuration.batch_size
    if steps < FEWEST_STEPS:
        return None
    after = trainings.curves(
        configuration,
        recorded=recorded,
        seeds=BATCH_SEEDS,
        steps=steps,
        seconds=trainings.left(),
        scales=(1.0, math.sqrt(ratio), ratio),
    )
    return batch_losses(before, after, examples=examples)
