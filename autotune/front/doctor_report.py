"""Read what `autotune doctor` judges: files below a root, NVML, and TensorFlow's build information."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from autotune.machine.doctor import GpuState, MachineState
from autotune.machine.fingerprint import core_quota, installed_version, memory_limit_bytes, text_of
from autotune.machine.gpu import ask_nvml, query_nvml, split_gpu
from autotune.runtime.containment import why_unavailable

JITTER_SECONDS, STRETCH_SECONDS = 5.0, 0.1
ASK_SECONDS = 120
Cards = tuple[str | None, tuple[GpuState, ...]]
_NO_CARDS: Cards = (None, ())
_ASK = """
import json, tensorflow as tf
info = tf.sysconfig.get_build_info()
names = "is_cuda_build", "cuda_version", "cudnn_version"
build = {name: str(info.get(name, "")) for name in names}
print("BUILD" + json.dumps([build, len(tf.config.list_physical_devices("GPU"))]))
"""


def look(root: Path = Path("/")) -> MachineState:
    """Read the machine; `root` stands for `/` in paths of `/sys` and `/dev`."""
    version = installed_version("tensorflow")
    asked = _ask_tensorflow() if version else {}
    driver, cards = query_nvml(_cards, _NO_CARDS)
    vendors = (text_of(file).strip() for file in (root / "sys/bus/pci/devices").glob("*/vendor"))
    shm = root / "dev/shm"
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
        uncontained=_uncontained(),
        environment=dict(os.environ),
        **asked,
    )


def _ask_tensorflow() -> dict[str, Any]:
    """Return what TensorFlow says of its build and GPUs, as fields of the state; this process never imports it."""
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


def _cards(nvml: Any) -> Cards:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    handles = map(nvml.nvmlDeviceGetHandleByIndex, range(0 if hidden else nvml.nvmlDeviceGetCount()))
    return str(nvml.nvmlSystemGetDriverVersion()), tuple(
        _card(partial(ask_nvml, nvml), nvml, handle) for handle in handles
    )


def _card(ask: Callable[..., Any], nvml: Any, handle: Any) -> GpuState:
    mig = ask("nvmlDeviceGetMigMode", handle)
    modes = {nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited", nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive"}
    return GpuState(
        name=str(ask("nvmlDeviceGetName", handle) or "a GPU"),
        mig=bool(mig and mig[0]),
        instances=sum(part.instance is not None for part in split_gpu(nvml, 0, handle)),
        mode=modes.get(ask("nvmlDeviceGetComputeMode", handle), "default"),
        others=len(ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()),
    )


def _uncontained() -> str | None:
    """Return why trials of a run in this directory could not be contained; empty where they can be."""
    try:
        with tempfile.TemporaryDirectory(dir=".", prefix=".autotune-") as folder:
            return why_unavailable(Path(folder).resolve() / "layers")
    except OSError:
        return None


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
