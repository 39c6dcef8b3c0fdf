"""Small studies on real trials: what tests and the benchmark need of a run. Imports no TensorFlow."""

from __future__ import annotations

import time
from pathlib import Path

from fault_table import BASELINE_BATCH_SIZE, BATCH_SIZES, BY_NAME
from simulated_runs import FACTS, LIMITS, MACHINE

from autotune.data.facts import WorkloadReference
from autotune.data.options import Options
from autotune.data.record import Phase, TrialRecord
from autotune.data.run_directory import RunDirectory
from autotune.runtime.executor import Executor
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import Device
from autotune.tuning.events import silent
from autotune.tuning.run import Deadline, Run
from autotune.tuning.seat import Seat, TrialLimits

BASELINE_SECONDS = 120.0
ENDING_SECONDS = 60.0
MEASURED_SECONDS = 0.5


class Study:
    """A live baseline and candidates beside it, without a sampler.

    Args:
        trials: Where they come from.
        path: The run's directory.
        trial_seconds: Time limit of a candidate that hangs; the others have `ENDING_SECONDS`.
    """

    def __init__(self, trials: Executor, path: Path, *, trial_seconds: float) -> None:
        directory = RunDirectory(path)
        directory.create()
        began = time.monotonic()
        self.run = Run(
            directory=directory,
            executor=trials,
            machine=MACHINE,
            limits=LIMITS,
            options=Options(budget=1e6, objective="throughput"),
            clock=lambda: time.monotonic() - began,
            observe=silent,
            interruptions=lambda: 0,
            facts=FACTS,
            deadline=Deadline(clock=lambda: 0.0),
            reference=WorkloadReference(file="/studies.py"),
            baseline=baseline_configuration(BASELINE_BATCH_SIZE, {}, Device.CPU, where="faults"),
        )
        self._trial_seconds = trial_seconds
        self.seat = Seat(self.run, name=trials.seats[0])
        self.seat.start_baseline(BASELINE_SECONDS)

    def try_fault(self, name: str) -> TrialRecord:
        """Run a candidate with a fault, or one without (empty), and return its record."""
        size = BATCH_SIZES[name] if name else BASELINE_BATCH_SIZE
        compiled = bool(name) and BY_NAME[name].compiled
        configuration = self.run.baseline.replace(batch_size=size, jit_compile=compiled)
        hangs = bool(name) and BY_NAME[name].seconds is not None
        timeout = self._trial_seconds if hangs else ENDING_SECONDS
        trial = self.run.new_trial(Phase.SEARCH, configuration)
        return self.seat.measure(trial, TrialLimits(timeout=timeout, measured=MEASURED_SECONDS), leader=None)

    def log_of(self, record: TrialRecord) -> Path:
        """Where the trial wrote its log."""
        return self.run.directory.trial_directory(record.trial) / "log.txt"

    def end(self) -> None:
        """End the baseline, and give the directory's lock back."""
        self.seat.end_baseline()
        self.run.directory.release()
