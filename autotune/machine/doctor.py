"""Read a machine, and diagnose what keeps TensorFlow from its devices, or makes it slow there."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from pydantic import Field

from autotune.data.models import Frozen, Many
from autotune.data.options import USUAL_BUDGET
from autotune.machine.fingerprint import core_quota, installed_version, memory_limit_bytes, text_of
from autotune.machine.gpu import ASK_SECONDS, ask_nvml, query_nvml, split_gpu
from autotune.space.keras_in_use import LEGACY_VARIABLE, uses_legacy_keras

OLDEST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""Major version of the CUDA toolkit, and of the oldest driver on Linux that runs it (NVIDIA's compatibility guide)."""
OLDEST_TENSORFLOW, NEWEST_TENSORFLOW = (2, 18), (2, 21)
SMALL_SHM, SMALL_MEMORY, SMALL_DISK = 256 << 20, 2 << 30, 2 << 30
"""Bytes of /dev/shm, and free bytes of memory and of the disk."""
ALLOW_NAMESPACES = (
    "Allow user namespaces (docker run --security-opt seccomp=unconfined, on a host with AppArmor also --security-opt "
    "apparmor=unconfined), or keep copies of your files."
)
BUSY_JITTER = 0.05
"""The relative spread of equal stretches of work on a busy machine."""
JITTER_SECONDS, STRETCH_SECONDS = 5.0, 0.1


class Level(enum.StrEnum):
    """The severity of a finding."""

    STOPS = "stops"  # TensorFlow cannot use the device
    SLOWS = "slows"  # it is clearly slower than it could be, or figures will be uncertain
    FACT = "fact"


class GpuState(Frozen):
    """The properties of a GPU that may keep TensorFlow from it, as NVML describes them."""

    name: str
    mig: bool = False  # divided
    instances: int = 0  # MIG instances that there are
    mode: str = "default"  # `default`, `exclusive` or `prohibited`: how many processes may use it
    others: int = 0  # processes on it that are not ours


class MachineState(Frozen):
    """The state of a machine as it was read."""

    tensorflow: str | None = None  # the installed version
    built_with: dict[str, str] | None = None  # CUDA and cuDNN that it wants; None: built without CUDA
    import_error: str = ""  # why it cannot be imported
    keras: str | None = None  # the installed version of Keras 3
    tf_keras: str | None = None  # ... and of Keras 2
    xprof: str | None = None
    tensorflow_gpus: int = 0  # that TensorFlow lists
    unloaded: Many[str] = ()  # libraries that it says it cannot load
    pci_nvidia: bool = False  # an NVIDIA device is on the bus
    driver: str | None = None
    cards: Many[GpuState] = ()
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    cores: int = 1  # that the machine has
    usable_cores: float = 1.0  # by affinity and quota
    free_memory_bytes: int | None = None
    free_disk_bytes: int | None = None  # where runs are written
    shm_bytes: int | None = None
    jitter: float | None = None  # relative spread of equal stretches of work
    uncontained: str | None = None  # why the kernel cannot contain trials; empty where it can
    environment: dict[str, str] = Field({})


class Finding(NamedTuple):
    """One thing about the machine, and what to do about it."""

    level: Level
    text: str
    fix: str = ""


_stops, _slows, _fact = (partial(Finding, level) for level in Level)


def diagnose(state: MachineState) -> list[Finding]:
    """Return all findings, what stops TensorFlow first."""
    order = list(Level)
    rules = (_check_software, _check_keras, _check_driver, _check_cards, _check_loading, _check_host)
    return sorted((finding for rule in rules for finding in rule(state)), key=lambda found: order.index(found.level))


def first_fix(findings: Iterable[Finding]) -> str:
    """Return the one thing to do first; empty where nothing is in the way."""
    return next((found.fix for found in findings if found.level is not Level.FACT and found.fix), "")


def _check_software(state: MachineState) -> Iterator[Finding]:
    if state.tensorflow is None:
        yield _stops("TensorFlow is not installed", "pip install 'tensorflow[and-cuda]', or your build")
        return
    if state.import_error:
        problem = f"TensorFlow {state.tensorflow} cannot be imported: {state.import_error}"
        yield _stops(problem, "Reinstall it in a fresh virtual environment.")
        return
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST_TENSORFLOW, NEWEST_TENSORFLOW))
    if not OLDEST_TENSORFLOW <= tuple(map(int, state.tensorflow.split(".")[:2])) <= NEWEST_TENSORFLOW:
        problem = f"TensorFlow {state.tensorflow} is not supported: autotune is tested with {oldest} to {newest}"
        yield _slows(problem, f"pip install 'tensorflow=={newest}.*', or another version of these.")
    if state.built_with is None:
        problem = f"TensorFlow {state.tensorflow} is built without CUDA"
        fix = "pip uninstall tensorflow-cpu && pip install 'tensorflow[and-cuda]'"
        if state.pci_nvidia or state.cards:
            yield _stops(problem, fix)


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


def _check_loading(state: MachineState) -> Iterator[Finding]:
    """Say why TensorFlow lists none of the GPUs that the driver shows; what stops the driver or a GPU comes first."""
    if not state.cards or state.tensorflow_gpus or state.built_with is None or state.import_error:
        return
    cuda, cudnn = (state.built_with.get(f"{library}_version", "") for library in ("cuda", "cudnn"))
    problem = f"TensorFlow lists no GPU; it needs CUDA {cuda} and cuDNN {cudnn}"
    if state.unloaded:
        fix = "pip install 'tensorflow[and-cuda]' installs matching libraries."
        yield _stops(f"{problem}, and cannot load {', '.join(state.unloaded)}", fix)
    elif state.visible is not None:
        problem = f"TensorFlow lists no GPU with CUDA_VISIBLE_DEVICES={state.visible!r}"
        yield _stops(problem, "Unset CUDA_VISIBLE_DEVICES, or name a GPU of `nvidia-smi -L` in it.")
    else:
        yield _stops(problem, "pip install 'tensorflow[and-cuda]' installs them.")


def _check_host(state: MachineState) -> Iterator[Finding]:
    if state.usable_cores < 0.75 * state.cores:
        problem = f"{state.usable_cores:g} of the machine's {state.cores} cores may be used here"
        yield _slows(problem, "Give the container more (docker run --cpus), or this process (taskset).")
    if state.free_memory_bytes is not None and state.free_memory_bytes < SMALL_MEMORY:
        problem = f"{state.free_memory_bytes / 2**30:.1f} GiB of memory are free: a trial and its baseline may not fit"
        yield _slows(problem, "End other programs, or give the container more memory (docker run --memory).")
    if state.free_disk_bytes is not None and state.free_disk_bytes < SMALL_DISK:
        problem = f"{state.free_disk_bytes / 2**30:.1f} GiB of this disk are free: logs and profiles may not fit"
        yield _slows(problem, "Free some, or write runs to another disk with --out.")
    if state.shm_bytes is not None and state.shm_bytes < SMALL_SHM:
        problem = f"/dev/shm has {state.shm_bytes / 2**20:.0f} MiB: NCCL and PyDataset's processes need more"
        yield _slows(problem, "Start the container with --shm-size=2g.")
    if state.jitter is not None and state.jitter >= BUSY_JITTER:
        problem = f"this machine is busy: equal work varies by {state.jitter:.0%} in time"
        fix = f"Tune while little else runs, with --budget {USUAL_BUDGET} or more. The run says what that can show."
        yield _slows(problem, fix)
    if state.uncontained:
        problem = f"trials cannot be isolated ({state.uncontained}): only Python's own writes are redirected"
        yield _fact(problem, ALLOW_NAMESPACES)
    if state.xprof is None:
        yield _fact("xprof is needed to tell compute from memory bandwidth", "pip install xprof")


# ------------------------------------------------------------------------------------------------- reading the machine


Cards = tuple[str | None, tuple[GpuState, ...]]
_ASK = """
import json, tensorflow as tf
info = tf.sysconfig.get_build_info()
names = "is_cuda_build", "cuda_version", "cudnn_version"
build = {name: str(info.get(name, "")) for name in names}
print("BUILD" + json.dumps([build, len(tf.config.list_physical_devices("GPU"))]))
"""


def look(why_uncontained: Callable[[Path], str], root: Path = Path("/")) -> MachineState:
    """Read the machine; `root` stands for `/` in paths of `/sys` and `/dev`.

    `why_uncontained` returns why trials that write to layers in a folder could not be contained; empty where they can.
    """
    version = installed_version("tensorflow")
    asked = _ask_tensorflow() if version else {}
    none: Cards = (None, ())
    driver, cards = query_nvml(_read_cards, none)
    vendors = (text_of(file).strip() for file in (root / "sys/bus/pci/devices").glob("*/vendor"))
    shm, uncontained = root / "dev/shm", None
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=".", prefix=".autotune-") as folder:
        uncontained = why_uncontained(Path(folder).resolve() / "layers")
    return MachineState(
        tensorflow=version,
        keras=installed_version("keras"),
        tf_keras=installed_version("tf_keras"),
        xprof=installed_version("xprof"),
        pci_nvidia="0x10de" in vendors,
        driver=driver,
        cards=cards,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cores=os.cpu_count() or 1,
        usable_cores=min(len(os.sched_getaffinity(0)), core_quota()),
        free_memory_bytes=min(psutil.virtual_memory().available, memory_limit_bytes()),
        free_disk_bytes=shutil.disk_usage(".").free,
        shm_bytes=psutil.disk_usage(str(shm)).total if shm.is_dir() else None,
        jitter=_jitter(),
        uncontained=uncontained,
        environment=dict(os.environ),
        **asked,
    )


def _ask_tensorflow() -> dict[str, Any]:
    """Return TensorFlow's report of its build and GPUs, as fields of the state; this process never imports it."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return {"import_error": f"{type(error).__name__}: {error}"}
    for line in ended.stdout.splitlines():
        if line.startswith("BUILD"):
            build, gpus = json.loads(line.removeprefix("BUILD"))
            unloaded = dict.fromkeys(re.findall(r"lib(?:cu|nccl|nvJit)[\w.-]*\.so[\d.]*", ended.stderr))
            has_cuda = build.pop("is_cuda_build") == "True"
            return {"built_with": build if has_cuda else None, "tensorflow_gpus": gpus, "unloaded": tuple(unloaded)}
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return {"import_error": lines[-1] if lines else f"exit status {ended.returncode}"}


def _read_cards(nvml: Any) -> Cards:
    """Return the driver's version, and the GPUs that are not hidden."""
    ask = partial(ask_nvml, nvml)
    modes = {nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited", nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive"}
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    cards = []
    for handle in map(nvml.nvmlDeviceGetHandleByIndex, range(0 if hidden else nvml.nvmlDeviceGetCount())):
        mig = ask("nvmlDeviceGetMigMode", handle)
        card = GpuState(
            name=str(ask("nvmlDeviceGetName", handle) or "a GPU"),
            mig=bool(mig and mig[0]),
            instances=sum(part.instance is not None for part in split_gpu(nvml, 0, handle)),
            mode=modes.get(ask("nvmlDeviceGetComputeMode", handle), "default"),
            others=len(ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()),
        )
        cards.append(card)
    return str(nvml.nvmlSystemGetDriverVersion()), tuple(cards)


def _jitter() -> float:
    """Return the relative spread of equal stretches of work."""

    def stretch(count: int) -> float:
        began, total = time.perf_counter(), 0
        for number in range(count):
            total += number * number
        return time.perf_counter() - began

    count = 100_000
    count = max(1000, int(count * STRETCH_SECONDS / max(stretch(count), 1e-6)))
    taken = [stretch(count) for _ in range(int(JITTER_SECONDS / STRETCH_SECONDS))]
    return statistics.pstdev(taken) / statistics.fmean(taken)
