"""An NVML that answers from a file of `tests/data`."""

# The recorded NVML answers under NVML's own names, and NVML documents them.
# ruff: noqa: N802

import json
import os
from pathlib import Path
from types import SimpleNamespace

DATA = Path(__file__).parent / "data"


class NVMLError(Exception):
    """Stands for `pynvml.NVMLError`."""


class RecordedNvml:
    """Answers like `pynvml`, from a JSON file; counts how often it was started and shut down."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, name, *, failing=None, starts=True):
        recorded = json.loads((DATA / name).read_text())
        self.gpus = recorded["gpus"]
        self.recorded = recorded
        self.failing = failing
        self.starts = starts
        self.started = 0
        self.shut_down = 0

    def nvmlInit(self):
        if not self.starts:
            raise NVMLError("Driver Not Loaded")
        self.started += 1

    def nvmlShutdown(self):
        self.shut_down += 1
        if not self.started:
            raise NVMLError("Uninitialized")

    def nvmlSystemGetDriverVersion(self):
        return self.recorded["driver"]

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self.recorded["cuda"]

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMigMode(self, handle):
        if "mig_mode" not in self.gpus[handle]:
            raise NVMLError("Not Supported")
        return [self.gpus[handle]["mig_mode"], 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7 if self.gpus[handle]["mig_mode"] else 0

    def nvmlDeviceGetGpuInstanceId(self, handle):
        return self._device(handle)["instance"]

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        instances = self.gpus[handle].get("mig_instances", [])
        if index >= len(instances) or instances[index] is None:
            raise NVMLError("Not Found")
        return (handle, index)

    def _device(self, handle):
        if isinstance(handle, tuple):
            gpu, index = handle
            return self.gpus[gpu]["mig_instances"][index]
        return self.gpus[handle]

    def nvmlDeviceGetName(self, handle):
        return self._device(handle)["name"]

    def nvmlDeviceGetUUID(self, handle):
        return self._device(handle)["uuid"]

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle == self.failing:
            raise NVMLError("GPU is lost")
        device = self._device(handle)
        return SimpleNamespace(**{"total": device["memory"], **device.get("answers", {}).get("MemoryInfo", {})})

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return tuple(self.gpus[handle]["capability"])

    def __getattr__(self, name):
        """A function whose answers the file holds; `own` stands for this process."""
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def answer(handle, *more):
            answers = self._device(handle).get("answers", {})
            if (found := answers.get(name.removeprefix("nvmlDeviceGet"))) is None:
                raise NVMLError("Not Supported")
            if "ClockInfo" in name:
                return found[str(more[0])]
            if isinstance(found, list):
                return [_plain(each) for each in found]
            return _plain(found)

        return answer


def _plain(found):
    if not isinstance(found, dict):
        return found
    return SimpleNamespace(**{name: os.getpid() if value == "own" else value for name, value in found.items()})
