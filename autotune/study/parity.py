"""Finalists' loss curves against float32 without XLA, before they are confirmed.

A speed-up that no longer learns is none. What is compared, and how far apart two curves may end, is in
`measure/numerics.py`; here is who is compared, when, and what follows.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from autotune.measure.numerics import NAME, parity, tells
from autotune.measure.stability import Check
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS
from autotune.space.search_space import ResolvedSpace
from autotune.study.progress import Notice, PhaseBegan
from autotune.study.run import Run
from autotune.trial.live import TrialFailed
from autotune.trial.messages import LossRuns
from autotune.trial.record import Outcome, Phase, TrialRecord

SEEDS = tuple(range(5))
MOST_STEPS = 200
LEAST_SECONDS = 0.2
"""Of one training, its compilation not counted."""
_NOT_COMPUTED_WITH = ("batch_size", "deterministic")
"""Knobs that change numerics through the order or the number of examples: the comparison holds both still."""

SAME = Check(name=NAME, passed=True, value=0.0, limit=0.0, detail="the same numerics as the baseline's")


def numerics_of(configuration: Configuration) -> tuple[object, ...]:
    """What a configuration computes in: its numerics class."""
    return tuple(
        configuration.get(name)
        for name, knob in KNOBS.items()
        if knob.changes_numerics and name not in _NOT_COMPUTED_WITH
    )


def varies_numerics(space: ResolvedSpace) -> bool:
    """Whether the space has configurations that compute otherwise than the baseline does."""
    return any(
        KNOBS[name].changes_numerics and name not in _NOT_COMPUTED_WITH and len(choices) > 1
        for name, choices in space.choices.items()
    )


def plain(configuration: Configuration, baseline: Configuration) -> Configuration:
    """Float32 without XLA at a configuration's batch size, everything else the baseline's."""
    return baseline.replace(batch_size=configuration.batch_size, precision="float32", jit_compile=False)


class Parity:
    """Checks each numerics class once for each batch size, until it is refused at one.

    Args:
        run: What all phases share.
        ends: Seconds since the run began at which it must be over.
    """

    def __init__(self, run: Run, *, ends: float) -> None:
        self._run = run
        self._ends = ends
        self._checks: dict[tuple[int, tuple[object, ...]], Check] = {}
        self._references: dict[int, Sequence[Sequence[float | None]] | str] = {}
        self._scratch = run.directory.path / "scratch"
        self._count = 0

    def sift(
        self, finalists: Sequence[TrialRecord], *, wanted: int
    ) -> tuple[list[TrialRecord], Mapping[Configuration, Check]]:
        """The finalists that may be confirmed, and what was found of each.

        Args:
            finalists: The most promising first. One whose loss does not fall as it should becomes `unstable`.
            wanted: How many are enough; after these, only such that need no further check.
        """
        found: dict[Configuration, Check] = {}
        kept: list[TrialRecord] = []
        try:
            for record in finalists:
                configuration = Configuration(record.configuration)
                if len(kept) >= wanted and not self._is_known(configuration):
                    continue
                check = self.check(configuration)
                if not check.passed:
                    self._refuse(record, check)
                    continue
                kept.append(record)
                found[configuration] = check
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        return kept, found

    def check(self, configuration: Configuration) -> Check:
        """The check of one configuration, from what is known or from trainings of its own."""
        known = self._known(configuration)
        if known is not None:
            return known
        if not self._checks:
            self._run.observe(
                PhaseBegan(
                    phase=Phase.CONFIRM, ends=self._ends, detail="the loss against float32 without XLA"
                )
            )
        key = (configuration.batch_size, numerics_of(configuration))
        self._checks[key] = check = self._compare(configuration)
        if check.passed and not tells(check):
            changes = self._run.changes(configuration)
            self._run.observe(Notice(text=f"numerics parity of {changes}: {check.detail}"))
        return check

    # ----------------------------------------------------------------------------------------------------

    def _known(self, configuration: Configuration) -> Check | None:
        numerics = numerics_of(configuration)
        if numerics == numerics_of(self._run.baseline):
            return SAME
        if numerics == numerics_of(plain(configuration, self._run.baseline)):
            return Check(
                name=NAME, passed=True, value=0.0, limit=0.0, detail="computes in float32 without XLA"
            )
        for (size, numerics_tried), check in self._checks.items():
            if numerics_tried == numerics and (size == configuration.batch_size or not check.passed):
                return check  # what does not learn at one batch size is not tried at others
        return None

    def _is_known(self, configuration: Configuration) -> bool:
        return self._known(configuration) is not None

    def _refuse(self, record: TrialRecord, check: Check) -> None:
        changes = self._run.changes(Configuration(record.configuration))
        self._run.observe(Notice(text=f"{changes} is not stable: {check.detail}"))
        refused = {"outcome": Outcome.UNSTABLE, "reason": f"{check.name}: {check.detail}"}
        self._run.keep(record.model_copy(update=refused), announce=False)

    def _compare(self, configuration: Configuration) -> Check:
        reference = self._reference(configuration)
        if isinstance(reference, str):
            return _untold(reference)
        try:
            own = self._train(configuration, SEEDS[:1], steps=len(reference[0]), seconds=self._left())
        except TrialFailed as failure:
            if failure.outcome is Outcome.TIMEOUT:
                return _untold("its losses did not come within the time there was")
            return Check(name=NAME, passed=False, value=None, limit=None, detail=failure.reason)
        return parity(reference, own[0])

    def _reference(self, configuration: Configuration) -> Sequence[Sequence[float | None]] | str:
        """Float32's curves at this batch size; or why there are none."""
        size = configuration.batch_size
        if size not in self._references:
            self._references[size] = self._train_reference(plain(configuration, self._run.baseline))
        return self._references[size]

    def _train_reference(self, configuration: Configuration) -> Sequence[Sequence[float | None]] | str:
        start = self._run.records[0].first_step_seconds or 1.0
        seconds = (self._left() / 2 - start) / (len(SEEDS) + 1)
        if seconds < LEAST_SECONDS:
            return "no time was left for it; a larger --budget has some"
        try:
            curves = self._train(configuration, SEEDS, steps=MOST_STEPS, seconds=seconds)
        except TrialFailed as failure:
            return f"float32 without XLA gave no losses at batch_size={configuration.batch_size}: {failure.reason}"
        return curves if curves and curves[0] else "the model reports no loss"

    def _train(
        self, configuration: Configuration, seeds: tuple[int, ...], *, steps: int, seconds: float
    ) -> Sequence[Sequence[float | None]]:
        run = self._run
        self._count += 1
        log = run.directory.log_directory / f"numerics-{self._count}.log"
        self._scratch.mkdir(exist_ok=True)
        losses = LossRuns(
            folder=str((self._scratch / f"batch-{configuration.batch_size}").resolve()),
            seeds=seeds,
            most_steps=steps,
            seconds=seconds,
        )
        live = run.trials.launch(configuration, log=str(log.resolve()), data=run.data, losses=losses)
        try:
            return live.loss_curves(max(1.0, self._left())).curves
        finally:
            live.kill()

    def _left(self) -> float:
        return max(0.0, self._ends - self._run.clock())


def _untold(why: str) -> Check:
    return Check(name=NAME, passed=True, value=None, limit=None, detail=f"cannot tell: {why}")
