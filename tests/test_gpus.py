"""The GPUs that CUDA would show, by a recorded NVML."""

import sys

import pytest
from recorded_nvml import NVMLError, RecordedNvml

from autotune.data.facts import Gpu
from autotune.machine.gpu import GpuReading, read_gpus

H200 = Gpu(
    name="NVIDIA H200", memory_bytes=150754820096, compute_capability="9.0", ecc=True, persistence=True, mig=False
)


@pytest.fixture(autouse=True)
def all_gpus_visible(monkeypatch):
    """Tests see every recorded GPU, whatever the shell that runs them says."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def nvml(monkeypatch):
    """A function that puts a recorded NVML in place of the installed one, and returns it."""

    def install(name, **options):
        recorded = RecordedNvml(name, **options)
        monkeypatch.setitem(sys.modules, "pynvml", recorded)
        return recorded

    return install


def names():
    """The visible GPUs' names."""
    return [gpu.name for gpu in read_gpus().gpus]


def test_gpus_driver_and_cuda_come_from_nvml(nvml):
    recorded = nvml("nvml_h200.json")
    assert read_gpus() == GpuReading(gpus=(H200,), driver="580.95.05", cuda="13.0")
    assert (recorded.started, recorded.shut_down) == (1, 1)


def test_the_cuda_version_keeps_its_minor_number(nvml):
    nvml("nvml_mixed.json")
    assert read_gpus().cuda == "12.8"


def test_nvml_failure_reports_no_gpus_and_shuts_nvml_down(nvml):
    recorded = nvml("nvml_mixed.json", failing=1)
    assert read_gpus() == GpuReading()
    assert (recorded.started, recorded.shut_down) == (1, 1)


def test_a_shutdown_that_fails_keeps_the_reading(nvml):
    nvml("nvml_h200.json").nvmlInit = lambda: None  # so that its shutdown raises
    assert read_gpus().gpus == (H200,)


def test_without_a_driver_there_are_no_gpus(nvml):
    recorded = nvml("nvml_h200.json", starts=False)
    assert read_gpus() == GpuReading()
    assert recorded.shut_down == 0


def test_the_installed_nvml_answers_as_the_recorded_one():
    import pynvml

    asked = [name for name in vars(RecordedNvml) if name.startswith("nvml")]
    assert [name for name in asked if not hasattr(pynvml, name)] == []


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["NVIDIA A100-SXM4-80GB"]),
        ("1,0", ["NVIDIA L4", "NVIDIA A100-SXM4-80GB"]),
        (" 1 , 2 ", ["NVIDIA L4", "NVIDIA L4"]),
        ("0,-1,1", ["NVIDIA A100-SXM4-80GB"]),
        ("0,9,1", ["NVIDIA A100-SXM4-80GB"]),
        ("1,1", ["NVIDIA L4"]),
        ("GPU-a1000000-0000-4000-8000-000000000001", ["NVIDIA A100-SXM4-80GB"]),
        ("GPU-a1", ["NVIDIA A100-SXM4-80GB"]),
        ("GPU-b4", []),
        ("GPU-ffff", []),
    ],
)
def test_only_the_gpus_that_cuda_shows_count(monkeypatch, nvml, visible, shown):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml("nvml_mixed.json")
    assert names() == shown


LARGER, SMALLER, SECOND = (f"NVIDIA H100 80GB HBM3 MIG {each}" for each in ("3g.40gb", "1g.10gb", "1c.3g.40gb"))


@pytest.mark.parametrize(
    ("visible", "older", "newer"),
    [
        (None, [LARGER], ["NVIDIA L4", LARGER, SMALLER]),
        ("MIG-d2000000-0000-5000-8000-000000000005", [SMALLER], [SMALLER]),
        ("MIG-d", [], []),
        ("MIG-d2,MIG-d1", [SMALLER], [SMALLER, LARGER]),
        ("MIG-d3,MIG-d1", [SECOND], [SECOND]),
        ("1", [LARGER], [LARGER, SMALLER]),
        ("GPU-c1", [LARGER], [LARGER, SMALLER]),
        ("0,MIG-d2", [SMALLER], ["NVIDIA L4", SMALLER]),
        ("0", ["NVIDIA L4"], ["NVIDIA L4"]),
        ("0,2,1", ["NVIDIA L4"], ["NVIDIA L4"]),
        ("2,MIG-d1", [], []),
        ("-1,MIG-d1", [], []),
    ],
)
def test_of_a_divided_gpu_the_instances_count(monkeypatch, nvml, visible, older, newer):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    recorded = nvml("nvml_mig.json")
    assert names() == older
    recorded.recorded["driver"] = "570.86.10"
    assert names() == newer


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetUUID", "nvmlDeviceGetMigMode", "nvmlDeviceGetMemoryInfo"]
)
def test_a_hidden_gpu_that_fails_hides_no_other(monkeypatch, nvml, name):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    recorded = nvml("nvml_mixed.json")
    asked = getattr(recorded, name)

    def failing(handle):
        if handle:
            raise NVMLError("GPU is lost")
        return asked(handle)

    recorded.gpus[1]["mig_mode"] = 1
    monkeypatch.setattr(recorded, name, failing)
    assert names() == ["NVIDIA A100-SXM4-80GB"]


def test_an_instance_has_its_own_memory_and_its_gpus_capability(monkeypatch, nvml):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-d2")
    nvml("nvml_mig.json")
    (instance,) = read_gpus().gpus
    assert (instance.name, instance.memory_bytes, instance.compute_capability) == (SMALLER, 10468982784, "9.0")
    assert instance.mig
