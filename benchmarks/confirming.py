"""Confirmations by the tuner's own code, outside of a tuning run: on real trials, or on recorded ones."""

import contextlib
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.machine import memory_limit_bytes
from autotune.measure.deciding import MIN_GAIN
from autotune.run_directory import RunDirectory
from autotune.space.configuration import Configuration, baseline_configuration
from autotune.space.knobs import Device
from autotune.study.confirmation import GROUPS, Confirmer
from autotune.study.confirmed import Limits, Result
from autotune.study.plan import LEAST_MEASURED, Plan
from autotune.study.progress import silent
from autotune.study.run import Run
from autotune.study.running import now_utc
from autotune.study.side_by_side import SideBySide
from autotune.trial.live import Clock, Trials
from autotune.trial.process import TrialProcesses
from autotune.trial.record import Outcome, Pairing, Phase, TrialRecord
from autotune.workload import parse_reference

WORKLOADS = Path(__file__).with_name("equal_steps.py")
TRIAL_SECONDS = 60.0
"""What a trial may take to warm up."""
LIMITS = Limits(host_bytes=memory_limit_bytes(), device_bytes=None)


class Confirmations:
    """A baseline that has run once, and confirmations of finalists against it.

    Args:
        trials: Real or recorded ones.
        directory: Where records and logs go.
        clock: Seconds that go forward.
        seed: Of the order in which slices are taken.
    """

    def __init__(self, trials: Trials, directory: RunDirectory, clock: Clock, *, seed: int) -> None:
        self._trials = trials
        began = clock()
        facts = trials.open()
        self.import_seconds = clock() - began
        self._run = Run(
            directory=directory,
            trials=trials,
            clock=clock,
            observe=silent,
            interruptions=lambda: 0,
            rng=random.Random(seed),
            baseline=baseline_configuration(facts.batch_size, facts.baseline, Device.CPU, where="benchmark"),
        )
        beside = SideBySide(self._run)
        self.warm = beside.start_baseline(TRIAL_SECONDS)
        beside.end_baseline()
        trials.retire(0)

    @property
    def baseline(self) -> Configuration:
        """As it ran."""
        return self._run.baseline

    def confirm(self, finalists: Sequence[Configuration], seconds: float) -> Result:
        """Confirm them in freshly started templates, in so many seconds, the imports among them."""
        ends = self._run.clock() + seconds
        plan = Plan(
            budget=seconds,
            search_ends=0.0,
            sampling_ends=0.0,
            probes_end=0.0,
            ends=ends,
            trial_timeout=TRIAL_SECONDS,
            measured=LEAST_MEASURED,
            finalists=len(finalists),
            import_seconds=self.import_seconds,
        )
        confirmer = Confirmer(self._run, plan, LIMITS, min_gain=MIN_GAIN)
        try:
            return confirmer.confirm([self._as_if_searched(each) for each in finalists])
        finally:
            for group in GROUPS:
                self._trials.retire(group)

    def _as_if_searched(self, configuration: Configuration) -> TrialRecord:
        """What the confirmation asks of a finalist beforehand: how long its processes take to start, and waits."""
        return TrialRecord(
            trial=1,
            phase=Phase.SEARCH,
            configuration=dict(configuration),
            outcome=Outcome.OK,
            started_at=now_utc(),
            seconds=0.0,
            first_step_seconds=self.warm.first_step_seconds,
            warmup_seconds=self.warm.ready.warmup_seconds,
            pairing=Pairing.ALTERNATING,
            input_wait_fraction=self._run.records[0].input_wait_fraction,
        )


@contextlib.contextmanager
def real_confirmations(workload: str, *, seed: int = 0) -> Iterator[Confirmations]:
    """Confirmations of a workload of `equal_steps.py`, in real processes."""
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder) / "run")
        directory.create()
        reference = parse_reference(f"{WORKLOADS}:{workload}")
        try:
            with TrialProcesses(reference, logs=directory.log_directory) as trials:
                yield Confirmations(trials, directory, time.monotonic, seed=seed)
        finally:
            directory.release()


def without_extra_work(baseline: Configuration) -> Configuration:
    """The finalist of `equal_steps.py`."""
    return baseline.replace(deterministic=False)
