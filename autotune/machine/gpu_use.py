"""What NVML tells of a trial's GPUs for each slice: clocks, power, energy, heat, and who else works on them.

NVML wakes no CUDA. A reading takes a few milliseconds: not to be taken in a timed stretch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import psutil

from autotune.data.hardware import GpuUse
from autotune.machine.gpus import Device, asked, shown_devices

LIMITED_BY = {
    0x1: "idle",
    0x2: "applications_clocks",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
"""NVML's bits for what holds the clocks down (`nvmlClocksEventReason…`), and their names here."""
SAMPLE_SECONDS = 1.0  # longest period over which NVML samples who uses a card


class Counted(NamedTuple):
    """What was counted up to a moment."""

    at: float  # seconds, by a clock that only goes forward
    joules: float | None
    processes: frozenset[int] | None  # that have the card open for computing


class Card:
    """A GPU or MIG instance that this process trains on."""

    def __init__(self, nvml: Any, device: Device, gpu: Any) -> None:
        self._nvml, self._device, self._card = nvml, device.handle, gpu
        self._whole = gpu if device.instance is None else None  # a card's power and use are all its instances'

    def _ask(self, name: str, handle: Any, *more: Any) -> Any:
        return None if handle is None else asked(self._nvml, f"nvmlDeviceGet{name}", handle, *more)

    def counted(self) -> Counted:
        """What was counted up to now."""
        millijoules = self._ask("TotalEnergyConsumption", self._whole)
        processes = self._ask("ComputeRunningProcesses", self._device)
        return Counted(
            at=time.monotonic(),
            joules=None if millijoules is None else millijoules / 1e3,
            processes=None if processes is None else frozenset(each.pid for each in processes),
        )

    def use(self, before: Counted, *, seconds: float) -> GpuUse:
        """What it did in a slice of so many seconds since `before`, the slice's part of what was counted."""
        nvml, card = self._nvml, self._card
        clocks = {  # first: they fall soon after the last kernel
            name: self._ask(what, card, clock)
            for name, what, clock in (
                ("sm_mhz", "ClockInfo", nvml.NVML_CLOCK_SM),
                ("memory_mhz", "ClockInfo", nvml.NVML_CLOCK_MEM),
                ("most_sm_mhz", "MaxClockInfo", nvml.NVML_CLOCK_SM),
                ("most_memory_mhz", "MaxClockInfo", nvml.NVML_CLOCK_MEM),
            )
        }
        bits = self._ask("CurrentClocksEventReasons", card)
        if bits is None:  # drivers before 535 have the older name only
            bits = self._ask("CurrentClocksThrottleReasons", card)
        rates, memory = self._ask("UtilizationRates", self._whole), self._ask("MemoryInfo", self._device)
        power, limit = self._ask("PowerUsage", self._whole), self._ask("EnforcedPowerLimit", self._whole)
        after = self.counted()
        between = max(after.at - before.at, 1e-9)
        watts, joules = None if power is None else power / 1e3, None
        if before.joules is not None and after.joules is not None:
            watts = max(0.0, after.joules - before.joules) / between
            joules = watts * min(seconds, between)
        others = _others(before.processes, after.processes)
        return GpuUse(
            **clocks,
            watts=watts,
            limit_watts=None if limit is None else limit / 1e3,
            joules=joules,
            celsius=self._ask("Temperature", card, nvml.NVML_TEMPERATURE_GPU),
            limited_by=None if bits is None else tuple(name for bit, name in LIMITED_BY.items() if bits & bit),
            utilisation=None if rates is None else rates.gpu / 100,
            memory_utilisation=None if rates is None else rates.memory / 100,
            used_bytes=None if memory is None else memory.used,
            free_bytes=None if memory is None else memory.free,
            others=None if others is None else len(others),
            foreign_utilisation=None if others is None else self._taken_by(others, between),
            pcie_generation=self._ask("CurrPcieLinkGeneration", card),
            pcie_width=self._ask("CurrPcieLinkWidth", card),
        )

    def _taken_by(self, others: frozenset[int], seconds: float) -> float | None:
        """Share of the card's time that these processes took in the last seconds; None where it is not told."""
        if not others:
            return 0.0
        since = time.time() - max(seconds, SAMPLE_SECONDS)
        samples = self._ask("ProcessUtilization", self._whole, int(since * 1e6))
        if samples is None:
            return None
        of_each = [[each.smUtil for each in samples if each.pid == pid] or [0] for pid in others]
        return min(1.0, sum(map(statistics.fmean, of_each)) / 100)


def _others(before: frozenset[int] | None, after: frozenset[int] | None) -> frozenset[int] | None:
    """The processes on a card but this one and frozen ones, such as the other side of a pair.

    None where this process is not among them: in a container the numbers may be the host's.
    """
    if before is None or after is None or os.getpid() not in before | after:
        return None
    return frozenset(pid for pid in (before | after) - {os.getpid()} if not _is_frozen(pid))


def _is_frozen(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # it has ended, or is somebody else's
        return False


def open_cards(indices: Collection[int]) -> list[Card]:
    """Those of these places among what CUDA shows to this process; none where NVML does not answer."""
    # NVML stays open until this process ends: to start it takes up to a second on hosts with several cards.
    import pynvml as nvml  # a large module, which trials on a CPU do not need

    try:
        nvml.nvmlInit()
        gpus, devices = shown_devices(nvml)
    except nvml.NVMLError:
        return []
    return [Card(nvml, each, gpus[each.gpu]) for index, each in enumerate(devices) if index in indices]
