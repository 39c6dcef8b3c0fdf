"""Short trainings for their losses alone, one process each, while nothing is timed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from autotune.space.configuration import Configuration
from autotune.tuning.run import Run, never_two_alive
from autotune.worker.messages import LossRuns

Curves = Sequence[Sequence[float | None]]

SEEDS = tuple(range(5))
MOST_STEPS = 200
LEAST_SECONDS = 0.2
"""Of one training, its compilation not counted."""


class Trainings:
    """Runs them within a time, on batches recorded below the run directory; a context manager that takes those away.

    Args:
        run: What all phases share.
        ends: Seconds since the run began at which it must be over.
    """

    def __init__(self, run: Run, *, ends: float) -> None:
        self.run = run
        self.ends = ends
        self._scratch = run.directory.path / "scratch"
        self._count = 0

    def __enter__(self) -> Trainings:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the recorded batches away."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def left(self) -> float:
        """Seconds until it must be over."""
        return max(0.0, self.ends - self.run.clock())

    def seconds_each(self, count: int, *, share: float) -> float:
        """Seconds for each of so many trainings of the baseline's kind, out of a share of what is left.

        They read a few batches, so nothing that the dataset keeps is filled for them.
        """
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
        """The losses by step, for each scale of the learning rate and each seed; empty where the model reports none.

        Args:
            configuration: What is trained.
            recorded: The batch size of the recorded batches: recorded now, where they are not yet.
            seeds: Of the weights.
            steps: At most so many of each training.
            seconds: No step of the first training is begun after so long.
            scales: Factors of the learning rate.

        Raises:
            TrialFailed: The process failed, or did not end in time.
            DeviceUnavailable: It had other devices than the baseline, or none.
        """
        self._count += 1
        log = self.run.directory.log_directory / f"losses-{self._count}.log"
        self._scratch.mkdir(exist_ok=True)
        losses = LossRuns(
            folder=str(self._folder(recorded)),
            recorded_batch_size=recorded,
            seeds=seeds,
            scales=scales,
            most_steps=steps,
            seconds=seconds,
        )
        live = self.run.trials.launch(
            configuration, log=str(log.resolve()), data=self.run.data, losses=losses
        )
        try:
            with never_two_alive():
                found = live.loss_curves(max(1.0, self.left()))
            self.run.refuse_other_devices(found.gpus)
            return found.curves
        finally:
            live.kill()

    def _folder(self, recorded: int) -> Path:
        return (self._scratch / f"batch-{recorded}").resolve()
