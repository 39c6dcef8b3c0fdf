"""What a larger batch costs in learning: training loss after equal numbers of examples.

Reported, never a reason to refuse: the learning rate is the user's to choose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.executors.executor import TrialFailed
from autotune.space.configuration import Configuration
from autotune.stats.numerics import FEWEST_STEPS, BatchLosses, batch_losses
from autotune.tuning.progress import Notice
from autotune.tuning.trainings import LEAST_SECONDS, Trainings

SEEDS = (0, 1, 2)
MOST_STEPS = 400
"""Of the baseline's training."""


def measure_batch_losses(
    trainings: Trainings, configurations: Sequence[Configuration]
) -> dict[int, BatchLosses]:
    """The losses at the batch sizes of some configurations beside the baseline's, where time allows.

    Args:
        trainings: Where they are run.
        configurations: Of the batch sizes that are asked for.

    Returns:
        By batch size; those that could not be measured are left out.
    """
    found: dict[int, BatchLosses] = {}
    baseline = trainings.run.baseline
    for configuration in configurations:
        size = configuration.batch_size
        if size == baseline.batch_size or size in found:
            continue
        try:
            losses = _measure(trainings, configuration)
        except TrialFailed as failure:
            trainings.run.observe(
                Notice(text=f"the loss at batch_size={size} was not compared: {failure.reason}")
            )
            continue
        if losses is None:
            trainings.run.observe(
                Notice(text=f"the loss at batch_size={size} was not compared: too few steps were trained")
            )
            continue
        found[size] = losses
    return found


def _measure(trainings: Trainings, configuration: Configuration) -> BatchLosses | None:
    baseline = trainings.run.baseline
    ratio = configuration.batch_size / baseline.batch_size
    seconds = trainings.seconds_each(len(SEEDS), share=0.4)
    if seconds < LEAST_SECONDS:
        return None
    before = trainings.curves(
        baseline, recorded=baseline.batch_size, seeds=SEEDS, steps=MOST_STEPS, seconds=seconds
    )
    if not before or not before[0]:
        return None
    examples = len(before[0]) * baseline.batch_size
    steps = examples // configuration.batch_size
    if steps < FEWEST_STEPS:
        return None
    after = trainings.curves(
        configuration,
        recorded=baseline.batch_size,
        seeds=SEEDS,
        steps=steps,
        seconds=trainings.left(),
        scales=(1.0, math.sqrt(ratio), ratio),
    )
    return batch_losses(before, after, examples=examples, seeds=len(SEEDS))
