"""What is measured in each slice beside its length.

A gauge is called when a slice begins. It returns a function that is called with the slice's seconds when it ends, and
gives fields of `record.Slice`. Something new to measure per slice is one more gauge (see `worker/retracing.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.devices.telemetry import Counters, between, host_bytes, part_of, read_counters
from autotune.worker.gpus import device_bytes
from autotune.worker.training import Progress

Gauge = Callable[[], Callable[[float], dict[str, Any]]]


def machine(read: Callable[[], Counters] = read_counters) -> Callable[[float], dict[str, Any]]:
    """Processor time of the trial and of others, memory, clock rate.

    More than the slice may lie between two readings: it has its part of what was counted.
    """
    before = read()

    def measured(slice_seconds: float) -> dict[str, Any]:
        after = read()
        part = part_of(before, after, seconds=slice_seconds)
        return {
            **between(before, after, seconds=slice_seconds),
            "cpu_seconds": part * max(0.0, after.own - before.own),
            "host_bytes": host_bytes(),
        }

    return measured


def device_memory() -> Callable[[float], dict[str, Any]]:
    """What TensorFlow holds on a device at the end."""
    return lambda _: {"device_bytes": device_bytes()}


def skipped_steps(progress: Progress, finite_steps: Callable[[], int]) -> Gauge:
    """A gauge of steps whose gradients a loss scale found to be infinite.

    Args:
        progress: The training's.
        finite_steps: Reads how many steps had finite gradients so far.
    """

    def skipped() -> int:
        return progress.steps - finite_steps()

    def gauge() -> Callable[[float], dict[str, Any]]:
        before = skipped()
        return lambda _: {"skipped_steps": max(0, skipped() - before)}

    return gauge
