"""Diagnose what keeps TensorFlow from a machine's devices, or makes it slow there. Pure rules over what was read."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pydantic import Field

from autotune.data.models import Frozen, Many
from autotune.data.printable import plural
from autotune.machine.units import units_of_gpu, units_of_processor
from autotune.space.keras_in_use import LEGACY_VARIABLE, uses_legacy_keras
from autotune.space.variables import NOT_READ

OLDEST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""Major version of the CUDA toolkit, and of the oldest driver on Linux that runs it (NVIDIA's compatibility guide)."""
SMALL_SHM, SLOW_DISK, RESTLESS = 256 << 20, 100e6, 0.05
"""Bytes of /dev/shm, bytes per second, and the relative spread of equal stretches of work."""


class Level(enum.StrEnum):
    """The severity of a finding."""

    STOPS = "stops"  # TensorFlow cannot use the device
    SLOWS = "slows"  # it is clearly slower than it could be, or figures will be uncertain
    FACT = "fact"


class GpuState(Frozen):
    """A GPU, as NVML describes it; None where it does not."""

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


class MachineState(Frozen):
    """The state of a machine as it was read."""

    tensorflow: str | None = None  # the installed version
    built_with: dict[str, str] | None = None  # CUDA and cuDNN that it wants; None: built without CUDA
    import_error: str = ""  # why it cannot be imported
    keras: str | None = None  # the installed version of Keras 3
    tf_keras: str | None = None  # ... and of Keras 2
    libraries: Many[str] = ()  # that the loader finds, by file name
    pci_nvidia: bool = False  # an NVIDIA device is on the bus
    driver: str | None = None
    cards: Many[GpuState] = ()
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
    """One thing about the machine, and what to do about it."""

    level: Level
    text: str
    fix: str = ""


def _stops(problem: str, fix: str) -> Finding:
    return Finding(Level.STOPS, problem, fix)


def _slows(problem: str, fix: str) -> Finding:
    return Finding(Level.SLOWS, problem, fix)


def _fact(text: str, fix: str = "") -> Finding:
    return Finding(Level.FACT, text, fix)


def diagnose(state: MachineState) -> list[Finding]:
    """Return all findings, what stops TensorFlow first."""
    order = list(Level)
    rules = (_check_software, _check_keras, _check_driver, _check_cards, _check_host, _check_surroundings)
    return sorted((finding for rule in rules for finding in rule(state)), key=lambda found: order.index(found.level))


def first_fix(findings: Iterable[Finding]) -> str:
    """Return the one thing to do first; empty where nothing is in the way."""
    return next((found.fix for found in findings if found.level is not Level.FACT and found.fix), "")


def _check_software(state: MachineState) -> Iterator[Finding]:
    has_gpu = state.pci_nvidia or bool(state.cards)
    if state.tensorflow is None:
        yield _stops("TensorFlow is not installed", "pip install 'tensorflow[and-cuda]', or your build")
        return
    if state.import_error:
        problem = f"TensorFlow {state.tensorflow} cannot be imported: {state.import_error}"
        yield _stops(problem, "Reinstall it in a fresh virtual environment.")
        return
    if state.built_with is None:
        problem = f"TensorFlow {state.tensorflow} is built without CUDA"
        fix = "pip uninstall tensorflow-cpu && pip install 'tensorflow[and-cuda]'"
        yield _stops(problem, fix) if has_gpu else _fact(problem)
        return
    cuda, cudnn = state.built_with.get("cuda_version", ""), state.built_with.get("cudnn_version", "")
    yield _fact(f"TensorFlow {state.tensorflow} wants CUDA {cuda} and cuDNN {cudnn}")
    if not has_gpu:
        return
    for library, version in (("libcudart", cuda), ("libcudnn", cudnn), ("libcublas", cuda)):
        name = f"{library}.so.{version.partition('.')[0]}"
        if name in state.libraries or not version:
            continue
        others = sorted(other for other in state.libraries if other.startswith(f"{library}.so."))
        found = f"; there is {others[0]}, of another version" if others else ""
        fix = "pip install 'tensorflow[and-cuda]' installs matching libraries."
        yield _stops(f"the loader does not find {name}{found}", fix)


def _check_keras(state: MachineState) -> Iterator[Finding]:
    """Say which Keras a script gets, and why."""
    minor, legacy = ".".join((state.tensorflow or "").split(".")[:2]), uses_legacy_keras(state.environment)
    fix = f"pip install 'tf_keras=={minor}.*'"
    if not state.tensorflow or (state.keras is None and state.tf_keras is None and not legacy):
        return
    if state.tf_keras is not None and not state.tf_keras.startswith(f"{minor}."):
        yield _slows(f"tf_keras {state.tf_keras} is made for another TensorFlow than {state.tensorflow}", fix)
    keras_3, keras_2 = f"Keras 3 ({state.keras})", f"Keras 2 ({state.tf_keras})"
    if legacy and state.tf_keras is None:
        problem = f"{LEGACY_VARIABLE} makes tf.keras Keras 2, and tf_keras is not installed"
        yield _stops(problem, f"{fix}, or unset the variable to use Keras 3.")
    elif legacy:
        yield _fact(f"tf.keras is {keras_2}, because {LEGACY_VARIABLE} is set; `import keras` gives {keras_3}")
    else:
        other = "" if state.tf_keras is None else f"; `import tf_keras` gives {keras_2}"
        yield _fact(f"tf.keras and `import keras` give {keras_3}{other}")


def _check_driver(state: MachineState) -> Iterator[Finding]:
    if state.driver is None:
        if state.pci_nvidia:
            fix = "Install NVIDIA's driver, or start the container with GPUs (docker run --gpus all)."
            yield _stops("an NVIDIA device is present, but its driver does not respond", fix)
        elif state.built_with is not None:
            yield _fact("no NVIDIA device: TensorFlow runs on the processor")
        return
    cuda = (state.built_with or {}).get("cuda_version", "").partition(".")[0]
    oldest, major = OLDEST_DRIVERS.get(cuda), int(state.driver.partition(".")[0] or 0)
    if oldest is not None and major < oldest:
        problem = f"driver {state.driver} is too old for CUDA {cuda}, which needs {oldest} or later"
        yield _stops(problem, f"Install a driver of version {oldest} or later.")
    if not state.cards and state.visible is not None:
        fix = "Unset CUDA_VISIBLE_DEVICES, or name a GPU of `nvidia-smi -L` in it."
        yield _stops(f"CUDA_VISIBLE_DEVICES={state.visible!r} hides every GPU", fix)
    elif not state.cards:
        fix = "See what nvidia-smi says; a GPU that has fallen off the bus needs a restart."
        yield _stops("the driver shows no GPU", fix)


def _check_cards(state: MachineState) -> Iterator[Finding]:
    for card in state.cards:
        yield _fact(f"{card.name}: {card.memory_bytes / 2**30:.0f} GiB{_describe_capability(card.capability)}")
        if card.mig and not card.instances:
            fix = "Make one: nvidia-smi mig -cgi 0 -C; or leave MIG mode: nvidia-smi -mig 0."
            yield _stops(f"{card.name} is in MIG mode without an instance", fix)
        if card.mode == "prohibited" or (card.mode == "exclusive" and card.others):
            holder = f", and {card.others} other process has it" if card.others else ""
            fix = "Wait for the other process, or allow several: nvidia-smi -c DEFAULT."
            yield _stops(f"{card.name} is in {card.mode} mode{holder}", fix)
        elif card.others:
            processes = f"{card.others} other process{'' if card.others == 1 else 'es'}"
            yield _slows(f"{processes} on {card.name}", "Tune while nobody else uses the GPU.")
        if card.ecc_errors:
            problem = f"{card.name} has {plural(card.ecc_errors, 'memory error')} that could not be corrected"
            yield _slows(problem, "Reset the GPU, and replace it if they return.")
        if card.power_limit and card.power_default and card.power_limit < 0.9 * card.power_default:
            problem = f"{card.name} is limited to {card.power_limit:.0f} of its usual {card.power_default:.0f} W"
            yield _slows(problem, f"nvidia-smi -pl {card.power_default:.0f}, if that is allowed.")


def _describe_capability(capability: tuple[int, int] | None) -> str:
    if capability is None:
        return ""
    version = ".".join(map(str, capability))
    words = {"tensor_fp16": "tensor cores", "tensor_bf16": "bfloat16 and TF32", "tensor_fp8": "fp8"}
    has = ", ".join(words[unit] for unit in units_of_gpu(version)) or "no tensor cores"
    return f", compute capability {version}; has {has}"


def _check_host(state: MachineState) -> Iterator[Finding]:
    instructions = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "avx")
    best = next((name for name in instructions if name in state.cpu_flags), None)
    if state.machine == "x86_64" and best in (None, "avx"):
        fix = "Use a newer processor, or a virtual machine that shows its instructions."
        yield _slows("the processor has no AVX2: oneDNN's fast kernels are not used", fix)
    elif best is not None:
        has_bfloat16 = any("bf16" in unit for unit in units_of_processor(state.cpu_flags))
        half = "computes in bfloat16" if has_bfloat16 else "has no units for bfloat16"
        yield _fact(f"processor: {best.replace('_', '-').upper()}, {half}; {state.numa_nodes} NUMA")
    if state.usable_cores < state.cores:
        problem = f"{state.usable_cores:g} of the machine's {state.cores} cores may be used here"
        fix = "Give the container more (docker run --cpus), or this process (taskset)."
        yield _slows(problem, fix) if state.usable_cores < 0.75 * state.cores else _fact(problem, fix)
    if 0 < state.usable_memory_bytes < state.memory_bytes:
        usable, memory = state.usable_memory_bytes / 2**30, state.memory_bytes / 2**30
        yield _fact(f"{usable:.1f} of {memory:.1f} GiB of memory are usable")
    if state.shm_bytes is not None and state.shm_bytes < SMALL_SHM:
        problem = f"/dev/shm has {state.shm_bytes / 2**20:.0f} MiB: NCCL and PyDataset's processes need more"
        yield _slows(problem, "Start the container with --shm-size=2g.")
    if state.disk_bytes_per_second is not None and state.disk_bytes_per_second < SLOW_DISK:
        speed = f"{state.disk_bytes_per_second / 1e6:.0f} MB/s"
        yield _slows(f"this directory is read at {speed}", "Keep training data on a local disk.")


def _check_surroundings(state: MachineState) -> Iterator[Finding]:
    for name in NOT_READ:
        if name in state.environment:
            yield _fact(f"{name} is set, but TensorFlow no longer reads it")
    if state.uncontained == "":
        yield _fact("trials are isolated: the kernel redirects their writes")
    elif state.uncontained is not None:
        problem = f"trials cannot be isolated ({state.uncontained}): only Python's own writes are intercepted"
        yield _fact(
            problem,
            "Allow user namespaces, as by docker run --security-opt seccomp=unconfined, or keep copies of your files.",
        )
    if state.jitter is None:
        return
    spread = f"equal work varies by {state.jitter:.0%}"
    if state.jitter >= RESTLESS:
        minutes = min(30, math.ceil(3 * (state.jitter / RESTLESS)))
        problem = f"this machine is noisy: {spread} in time; expect wide intervals"
        yield _slows(problem, f"Tune with --budget {minutes}m, and while little else runs.")
    else:
        yield _fact(f"this machine is quiet: {spread}; a budget of 3 minutes is enough")
