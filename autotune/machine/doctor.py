"""What keeps TensorFlow from a machine's devices, or makes it slow there: rules over what was seen. Pure."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pydantic import Field

from autotune.data.models import Frozen, Many
from autotune.space.variables import NOT_READ

OLDEST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""Major version of the CUDA toolkit, and of the oldest driver on Linux that runs it (NVIDIA's compatibility guide)."""
SMALL_SHM, SLOW_DISK, RESTLESS = 256 << 20, 100e6, 0.05
"""Bytes of /dev/shm, bytes per second, and the relative spread of equal stretches of work."""


class Level(enum.StrEnum):
    """How much a finding matters."""

    STOPS = "stops"  # TensorFlow cannot use the device
    SLOWS = "slows"  # it is clearly slower than it could be, or figures will be uncertain
    FACT = "fact"


class Card(Frozen):
    """A GPU, as NVML tells of it; None where it does not."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    mig: bool = False  # divided
    instances: int = 0  # MIG instances that there are
    mode: str = "default"  # `default`, `exclusive` or `prohibited`: how many processes may use it
    others: int = 0  # processes on it that are not ours
    ecc_errors: int | None = None  # that could not be corrected
    power_limit: float | None = None  # watts
    power_default: float | None = None


class Seen(Frozen):
    """What was read of a machine."""

    tensorflow: str | None = None  # the installed version
    built_with: dict[str, str] | None = None  # CUDA and cuDNN that it wants; None: built without CUDA
    import_error: str = ""  # why it cannot be imported
    libraries: Many[str] = ()  # that the loader finds, by file name
    pci_nvidia: bool = False  # an NVIDIA device is on the bus
    driver: str | None = None
    cards: Many[Card] = ()
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    cpu_flags: frozenset[str] = frozenset()
    machine: str = "x86_64"
    cores: int = 1  # that the machine has
    usable_cores: float = 1.0  # by affinity and quota
    numa_nodes: int = 1
    memory_bytes: int = 0
    usable_memory_bytes: int = 0
    shm_bytes: int | None = None
    disk_bytes_per_second: float | None = None
    jitter: float | None = None  # relative spread of equal stretches of work
    uncontained: str | None = None  # why the kernel cannot contain trials; empty where it can
    environment: dict[str, str] = Field({})


class Finding(NamedTuple):
    """One thing, and what to do about it."""

    level: Level
    what: str
    fix: str = ""


def examined(seen: Seen) -> list[Finding]:
    """All that is to be said, what stops TensorFlow first."""
    order = list(Level)
    return sorted(
        [*_software(seen), *_driver(seen), *_cards(seen), *_host(seen), *_surroundings(seen)],
        key=lambda each: order.index(each.level),
    )


def first_thing(findings: Iterable[Finding]) -> str:
    """The one thing to do first; empty where nothing is in the way."""
    return next((each.fix for each in findings if each.level is not Level.FACT and each.fix), "")


def _software(seen: Seen) -> Iterator[Finding]:
    if seen.tensorflow is None:
        yield Finding(Level.STOPS, "TensorFlow is not installed", "pip install 'tensorflow[and-cuda]', or your build")
        return
    if seen.import_error:
        yield Finding(
            Level.STOPS,
            f"TensorFlow {seen.tensorflow} cannot be imported: {seen.import_error}",
            "Install it anew in a fresh virtual environment.",
        )
        return
    if seen.built_with is None:
        level = Level.STOPS if seen.pci_nvidia or seen.cards else Level.FACT
        fix = "pip uninstall tensorflow-cpu && pip install 'tensorflow[and-cuda]'" if level is Level.STOPS else ""
        yield Finding(level, f"TensorFlow {seen.tensorflow} is built without CUDA", fix)
        return
    cuda, cudnn = seen.built_with.get("cuda_version", ""), seen.built_with.get("cudnn_version", "")
    yield Finding(Level.FACT, f"TensorFlow {seen.tensorflow} wants CUDA {cuda} and cuDNN {cudnn}")
    if not (seen.pci_nvidia or seen.cards):
        return
    for library, version in (("libcudart", cuda), ("libcudnn", cudnn), ("libcublas", cuda)):
        name = f"{library}.so.{version.partition('.')[0]}"
        if name in seen.libraries or not version:
            continue
        others = sorted(each for each in seen.libraries if each.startswith(f"{library}.so."))
        found = f"; there is {others[0]}, of another version" if others else ""
        yield Finding(
            Level.STOPS,
            f"the loader does not find {name}{found}",
            "pip install 'tensorflow[and-cuda]' brings the libraries that fit.",
        )


def _driver(seen: Seen) -> Iterator[Finding]:
    if seen.driver is None:
        if seen.pci_nvidia:
            yield Finding(
                Level.STOPS,
                "an NVIDIA device is on the bus, and its driver does not answer",
                "Install NVIDIA's driver, or start the container with GPUs (docker run --gpus all).",
            )
        elif seen.built_with is not None:
            yield Finding(Level.FACT, "no NVIDIA device: TensorFlow runs on the processor")
        return
    cuda = (seen.built_with or {}).get("cuda_version", "").partition(".")[0]
    oldest, major = OLDEST_DRIVERS.get(cuda), int(seen.driver.partition(".")[0] or 0)
    if oldest is not None and major < oldest:
        yield Finding(
            Level.STOPS,
            f"driver {seen.driver} is too old for CUDA {cuda}, which needs {oldest} or later",
            f"Install a driver of version {oldest} or later.",
        )
    if not seen.cards:
        hidden = seen.visible is not None
        yield Finding(
            Level.STOPS,
            f"CUDA_VISIBLE_DEVICES={seen.visible!r} hides every GPU" if hidden else "the driver shows no GPU",
            "Unset CUDA_VISIBLE_DEVICES, or name a GPU of `nvidia-smi -L` in it."
            if hidden
            else "See what nvidia-smi says; a card that has fallen off the bus needs a restart.",
        )


def _cards(seen: Seen) -> Iterator[Finding]:
    for card in seen.cards:
        can = _can(card.capability)
        version = "" if card.capability is None else f", compute capability {card.capability[0]}.{card.capability[1]}"
        yield Finding(Level.FACT, f"{card.name}: {card.memory_bytes / 2**30:.0f} GiB{version}{can}")
        if card.mig and not card.instances:
            yield Finding(
                Level.STOPS,
                f"{card.name} is in MIG mode without an instance",
                "Make one: nvidia-smi mig -cgi 0 -C; or leave MIG mode: nvidia-smi -mig 0.",
            )
        if card.mode == "prohibited" or (card.mode == "exclusive" and card.others):
            yield Finding(
                Level.STOPS,
                f"{card.name} is in {card.mode} mode"
                + (f", and {card.others} other process has it" if card.others else ""),
                "Wait for the other process, or allow several: nvidia-smi -c DEFAULT.",
            )
        elif card.others:
            yield Finding(
                Level.SLOWS,
                f"{card.others} other process{'' if card.others == 1 else 'es'} on {card.name}",
                "Tune while nobody else uses the card.",
            )
        if card.ecc_errors:
            yield Finding(
                Level.SLOWS,
                f"{card.name} has {card.ecc_errors} memory errors that could not be corrected",
                "Reset the card, and replace it where they come back.",
            )
        if card.power_limit and card.power_default and card.power_limit < 0.9 * card.power_default:
            yield Finding(
                Level.SLOWS,
                f"{card.name} is limited to {card.power_limit:.0f} of its usual {card.power_default:.0f} W",
                f"nvidia-smi -pl {card.power_default:.0f}, where that is allowed.",
            )


def _can(capability: tuple[int, int] | None) -> str:
    if capability is None:
        return ""
    units = {"tensor cores": (7, 0), "bfloat16 and TF32": (8, 0), "fp8": (8, 9)}
    return f"; has {', '.join(name for name, least in units.items() if capability >= least) or 'no tensor cores'}"


def _host(seen: Seen) -> Iterator[Finding]:
    best = next(
        (name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "avx") if name in seen.cpu_flags), None
    )
    if seen.machine == "x86_64" and best in (None, "avx"):
        yield Finding(
            Level.SLOWS,
            "the processor has no AVX2: oneDNN's fast kernels are not used",
            "Use a newer processor, or a virtual machine that shows its instructions.",
        )
    elif best is not None:
        half = "computes in bfloat16" if "bf16" in best else "has no units for bfloat16"
        yield Finding(Level.FACT, f"processor: {best.replace('_', '-').upper()}, {half}; {seen.numa_nodes} NUMA")
    if seen.usable_cores < seen.cores:
        yield Finding(
            Level.SLOWS if seen.usable_cores < 0.75 * seen.cores else Level.FACT,
            f"{seen.usable_cores:g} of the machine's {seen.cores} cores may be used here",
            "Give the container more (docker run --cpus), or this process (taskset).",
        )
    if 0 < seen.usable_memory_bytes < seen.memory_bytes:
        yield Finding(
            Level.FACT,
            f"{seen.usable_memory_bytes / 2**30:.1f} of {seen.memory_bytes / 2**30:.1f} GiB of memory are usable",
        )
    if seen.shm_bytes is not None and seen.shm_bytes < SMALL_SHM:
        yield Finding(
            Level.SLOWS,
            f"/dev/shm has {seen.shm_bytes / 2**20:.0f} MiB: NCCL and PyDataset's processes need more",
            "Start the container with --shm-size=2g.",
        )
    if seen.disk_bytes_per_second is not None and seen.disk_bytes_per_second < SLOW_DISK:
        yield Finding(
            Level.SLOWS,
            f"this directory is read at {seen.disk_bytes_per_second / 1e6:.0f} MB/s",
            "Keep training data on a local disk.",
        )


def _surroundings(seen: Seen) -> Iterator[Finding]:
    for name in NOT_READ:
        if name in seen.environment:
            yield Finding(Level.FACT, f"{name} is set, but TensorFlow does not read it any more")
    if seen.uncontained == "":
        yield Finding(Level.FACT, "trials are contained: the kernel keeps what they write away from your files")
    elif seen.uncontained is not None:
        yield Finding(
            Level.FACT,
            f"trials cannot be contained ({seen.uncontained}): only what Python itself writes is watched",
            "Allow user namespaces, as by docker run --security-opt seccomp=unconfined, or keep copies of your files.",
        )
    if seen.jitter is None:
        return
    spread = f"equal stretches of work differ by {seen.jitter:.0%}"
    if seen.jitter >= RESTLESS:
        budget = min(30, math.ceil(3 * (seen.jitter / RESTLESS)))
        yield Finding(
            Level.SLOWS,
            f"this machine is restless: {spread}; expect wide intervals",
            f"Tune with --budget {budget}m, and while little else runs.",
        )
    else:
        yield Finding(Level.FACT, f"this machine is calm: {spread}; a budget of 3 minutes will do")
