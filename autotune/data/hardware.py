"""The machine that a run measured on, and what its GPUs did during a slice. `machine` reads them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Annotated

from pydantic import Field

from autotune.data.models import Amount, Count, Frozen, Many


class Gpu(Frozen, strict=True):
    """An NVIDIA GPU, or a MIG instance of it."""

    name: str  # as the driver calls it, such as `NVIDIA H200`
    memory_bytes: Count  # all of it, whoever uses it now
    compute_capability: str | None = None  # such as `9.0`
    # Modes, which may be switched: another one makes no other machine. None where the card has no such mode.
    ecc: bool | None = None
    persistence: bool | None = None
    mig: bool | None = None


GPU_MODES = ("ecc", "persistence", "mig")


class GpuUse(Frozen):
    """A GPU or MIG instance during a slice; None is what it does not report.

    A MIG instance reports no power, energy or utilisation. Clocks, heat and their limits are its card's.
    """

    sm_mhz: Count | None = None
    most_sm_mhz: Count | None = None
    memory_mhz: Count | None = None
    most_memory_mhz: Count | None = None
    watts: Amount | None = None  # the mean where energy is counted, else at the slice's end
    limit_watts: Amount | None = None  # that is enforced
    joules: Amount | None = None
    celsius: int | None = None
    limited_by: Many[str] | None = None  # what held the clocks at the slice's end, of `LIMITED_BY`
    utilisation: Amount | None = None  # share of the last sample (0.2 to 1 s) in which a kernel ran
    memory_utilisation: Amount | None = None  # share of it in which device memory was read or written
    used_bytes: Count | None = None  # by everybody
    free_bytes: Count | None = None
    others: Count | None = None  # processes on it, without the trial's own and frozen ones
    foreign_utilisation: Amount | None = None  # share of its processors' time that those took
    pcie_generation: Count | None = None
    pcie_width: Count | None = None


MEMORY_TOLERANCE = 0.1  # the share by which memory of the same size may differ
_GIB = 1 << 30


class Machine(Frozen, strict=True):
    """A machine as this process may use it, and versions."""

    cpu: str  # the model's name
    cores: Annotated[Count, Field(ge=1)]
    memory_bytes: Count  # of the host
    platform: str  # kernel and architecture, such as `Linux x86_64`
    python: str
    packages: dict[str, str]  # installed versions by name
    gpus: Many[Gpu]  # in the driver's order
    driver: str | None  # NVIDIA's
    cuda: str | None  # the newest version that the driver can run, such as `12.8`
    cudnn: str | None  # as TensorFlow reports it; None until it was asked
    tensorflow_cuda: str | None = None  # that TensorFlow was built with; None until it was asked

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that stay the same as long as hardware, driver and versions do."""
        # TensorFlow's answers are left out: the same machine must not get another id once it was asked.
        modes = {"__all__": set(GPU_MODES)}
        facts = self.model_dump(mode="json", exclude={"cudnn": True, "tensorflow_cuda": True, "gpus": modes})
        # The kernel's own share of the memory changes by some megabytes with each of its updates.
        facts["memory_bytes"] = round(self.memory_bytes / _GIB) * _GIB
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def differences(self, other: Machine) -> tuple[str, ...]:
        """Return what can make `other` faster or slower, such as `GPU: measured on NVIDIA H200, here none`."""
        gpus = gpu_names(self.gpus), gpu_names(other.gpus)
        counts = [Counter(gpu.name for gpu in machine.gpus) for machine in (self, other)]
        if self.gpus and counts[0].keys() == counts[1].keys() and counts[0] <= counts[1]:
            gpus = gpus[0], gpus[0]  # a seat had a part of cards of one kind
        pairs: list[tuple[str, str | None, str | None]] = [
            ("CPU", self.cpu, other.cpu),
            ("cores", str(self.cores), str(other.cores)),
            ("memory", *_sizes(self.memory_bytes, other.memory_bytes)),
            ("GPU", *gpus),
        ]
        if self.gpus and gpus[0] == gpus[1]:
            sizes = [min(gpu.memory_bytes for gpu in machine.gpus) for machine in (self, other)]
            pairs.append(("GPU memory", *_sizes(*sizes)))
            pairs.append(("NVIDIA driver", self.driver, other.driver))
        for label, package in (("TensorFlow", "tensorflow"), ("Keras", "keras")):
            pairs.append((label, self.packages.get(package), other.packages.get(package)))
        there, here = (".".join(machine.python.split(".")[:2]) for machine in (self, other))
        pairs.append(("Python", there, here))
        return tuple(
            f"{label}: measured on {there or 'none'}, here {here or 'none'}"
            for label, there, here in pairs
            if there != here
        )


def gpu_names(gpus: tuple[Gpu, ...]) -> str:
    """Return `2 × NVIDIA H200, NVIDIA L4`; empty for none."""
    counts = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())


def _sizes(measured: int, here: int) -> tuple[str, str]:
    """Return both sizes in GiB; the same text twice when they differ by no more than the tolerance."""
    if abs(here - measured) <= MEMORY_TOLERANCE * measured:
        here = measured
    return f"{measured / _GIB:.2f} GiB", f"{here / _GIB:.2f} GiB"
