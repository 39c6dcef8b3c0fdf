"""What is measured in each slice beside its length.

A gauge is called when a slice begins. It returns a function that is called with the slice's seconds when it ends, and
gives fields of `record.Slice`. Something new to measure per slice is one more gauge (see `worker/retracing.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from autotune.data.printable import plural
from autotune.data.record import Outcome
from autotune.machine.gpu import GpuMeter
from autotune.machine.telemetry import Counters, between, host_bytes, part_of, read_counters
from autotune.recipe.lazy import keras, tf
from autotune.runtime.failures import TrainingFailed
from autotune.training.gpus import device_bytes
from autotune.training.session import Progress

Gauge = Callable[[], Callable[[float], dict[str, Any]]]


def machine(read: Callable[[], Counters] = read_counters) -> Callable[[float], dict[str, Any]]:
    """Processor time of the trial and of others, memory, clock rate: the slice's part of what lies between readings."""
    before = read()

    def measured(slice_seconds: float) -> dict[str, Any]:
        after = read()
        part = part_of(before, after, seconds=slice_seconds)
        counted = between(before, after, seconds=slice_seconds)
        return {**counted, "cpu_seconds": part * max(0.0, after.own - before.own), "host_bytes": host_bytes()}

    return measured


def gpus(cards: Sequence[GpuMeter]) -> list[Gauge]:
    """A gauge of what NVML tells of the cards that are trained on; none without a card."""

    def gauge() -> Callable[[float], dict[str, Any]]:
        before = [card.read_counters() for card in cards]
        return lambda seconds: {
            "gpus": tuple(card.read_use(counted, seconds=seconds) for card, counted in zip(cards, before, strict=True))
        }

    return [gauge] if cards else []


def device_memory() -> Callable[[float], dict[str, Any]]:
    """What TensorFlow holds on a device at the end."""
    return lambda _: {"device_bytes": device_bytes()}


def skipped_steps(progress: Progress, finite_steps: Callable[[], int]) -> Gauge:
    """A gauge of steps whose gradients a loss scale found to be infinite; `finite_steps` counts the others so far."""

    def gauge() -> Callable[[float], dict[str, Any]]:
        before = progress.steps - finite_steps()
        return lambda _: {"skipped_steps": max(0, progress.steps - finite_steps() - before)}

    return gauge


def ruined_weights(model: keras.Model, progress: Progress) -> Gauge:
    """A gauge that measures nothing: it looks at the weights once, at the end of the first slice."""
    look = functools.cache(lambda: refuse_weights_that_are_not_finite(model, step=progress.steps))

    def measured(_: float) -> dict[str, Any]:
        look()
        return {}

    return lambda: measured


def refuse_weights_that_are_not_finite(model: keras.Model, *, step: int) -> None:
    """Raise TrainingFailed where training has ruined a weight: no number that a step returns need show it."""
    trained = {id(each) for each in model.trainable_weights}  # others may hold infinities, as masks do
    weights = [each for each in model.weights if tf.as_dtype(each.dtype).is_floating]
    ruined = [tf.reduce_any(tf.math.is_nan(w.value) | (tf.math.is_inf(w.value) & (id(w) in trained))) for w in weights]
    for weight in itertools.compress(weights, ruined):
        raise TrainingFailed(Outcome.NONFINITE, f"the weight {weight.path} is not finite after {plural(step, 'step')}")
