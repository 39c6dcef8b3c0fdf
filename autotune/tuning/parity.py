"""A leader's loss curve against float32 without XLA, before it is confirmed.

A speed-up that no longer learns is none. What is compared, and how far apart two curves may end, is in
`stats/numerics.py`; here is who is compared, when, and what follows.
"""

from __future__ import annotations

from autotune.executors.executor import DeviceUnavailable, TrialFailed
from autotune.record import Outcome
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS
from autotune.stats.numerics import NAME, parity, tells
from autotune.stats.stability import Check
from autotune.tuning.progress import Notice
from autotune.tuning.trainings import LEAST_SECONDS, MOST_STEPS, SEEDS, Curves, Trainings

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


def plain(configuration: Configuration, baseline: Configuration) -> Configuration:
    """Float32 without XLA at a configuration's batch size, everything else the baseline's."""
    return baseline.replace(batch_size=configuration.batch_size, precision="float32", jit_compile=False)


class Parity:
    """Checks each numerics class once for each batch size, until it is refused at one.

    Args:
        trainings: Where the losses come from.
    """

    def __init__(self, trainings: Trainings) -> None:
        self._trainings = trainings
        self._run = trainings.run
        self._checks: dict[tuple[int, tuple[object, ...]], Check] = {}
        self._references: dict[int, Curves | str] = {}

    def check(self, configuration: Configuration) -> Check:
        """The check of one configuration, from what is known or from trainings of its own."""
        known = self._known(configuration)
        if known is not None:
            return known
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

    def _compare(self, configuration: Configuration) -> Check:
        reference = self._reference(configuration)
        if isinstance(reference, str):
            return _untold(reference)
        try:
            own = self._trainings.curves(
                configuration,
                recorded=configuration.batch_size,
                seeds=SEEDS[:1],
                steps=len(reference[0]),
                seconds=self._trainings.left(),
            )
        except DeviceUnavailable as failure:
            return _untold(failure.reason)
        except TrialFailed as failure:
            if failure.outcome is Outcome.TIMEOUT:
                return _untold("its losses did not come within the time there was")
            return Check(name=NAME, passed=False, value=None, limit=None, detail=failure.reason)
        return parity(reference, own[0])

    def _reference(self, configuration: Configuration) -> Curves | str:
        """Float32's curves at this batch size; or why there are none."""
        size = configuration.batch_size
        if size not in self._references:
            self._references[size] = self._train_reference(plain(configuration, self._run.baseline))
        return self._references[size]

    def _train_reference(self, configuration: Configuration) -> Curves | str:
        seconds = self._trainings.seconds_each(len(SEEDS), share=0.5)
        if seconds < LEAST_SECONDS:
            return "no time was left for it; a larger --budget has some"
        size = configuration.batch_size
        try:
            curves = self._trainings.curves(
                configuration, recorded=size, seeds=SEEDS, steps=MOST_STEPS, seconds=seconds
            )
        except TrialFailed as failure:
            return f"float32 without XLA gave no losses at batch_size={size}: {failure.reason}"
        return curves if curves and curves[0] else "the model reports no loss"


def _untold(why: str) -> Check:
    return Check(name=NAME, passed=True, value=None, limit=None, detail=f"cannot tell: {why}")
