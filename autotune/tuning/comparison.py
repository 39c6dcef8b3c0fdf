"""How sides are set against one another: in turns, each frozen while it waits, or in blocks, one alive at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.data.record import Slice
from autotune.runtime.executor import WarmUp
from autotune.tuning.run import Run
from autotune.tuning.side import Interrupted, Sliced
from autotune.tuning.trial import Trial


def take_turns(
    run: Run, baseline: Sliced, others: Sequence[Sliced], length: float, goes_on: Callable[[int], bool]
) -> None:
    """Rounds of one slice each, in a drawn order and then in its reverse, so that a drift cancels."""
    # Raises TrialFailed with the number of the side's trial, Interrupted, TimeIsUp. Whole rounds are kept.
    sides = [baseline, *others]
    order, done = sides, 0
    while goes_on(done):
        if run.interrupted():
            raise Interrupted
        order = order[::-1] if done % 2 else run.rng.sample(sides, len(sides))
        slices = {each.trial.number: each.slice(length) for each in order}
        first = slices[baseline.trial.number]
        for each in others:
            each.trial.add_pair(
                baseline_first=order.index(baseline) < order.index(each),
                baseline=first,
                candidate=slices[each.trial.number],
                reference=_warm(baseline.trial),
            )
        done += 1


def set_in_blocks(
    trial: Trial, own: Sequence[Slice], *, before: Sequence[Slice], after: Sequence[Slice], reference: Trial
) -> None:
    """Pair a candidate's block with the blocks of the baseline before and after it, in turn: a steady drift cancels."""
    for index, candidate in enumerate(own):
        trial.add_pair(
            baseline_first=index % 2 == 0,
            baseline=(before, after)[index % 2][index // 2],
            candidate=candidate,
            reference=_warm(reference),
        )


def _warm(trial: Trial) -> WarmUp:
    assert trial.warm is not None
    return trial.warm
