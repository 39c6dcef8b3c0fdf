"""The machine's fingerprint, and the cores and memory of fake control groups."""

import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autotune.data.errors import InputError
from autotune.data.facts import Gpu, Machine
from autotune.machine import fingerprint
from autotune.machine.fingerprint import units_for, units_of_gpu
from autotune.machine.gpu import GpuReading
from autotune.version import __version__

GIB = 1 << 30
H200 = Gpu(name="NVIDIA H200", memory_bytes=150754820096, compute_capability="9.0")
L4 = Gpu(name="NVIDIA L4", memory_bytes=24152899584, compute_capability="8.9")

MEASURED_ON = Machine(
    cpu="AMD EPYC 9654",
    cores=16,
    memory_bytes=128 * GIB,
    platform="Linux x86_64",
    python="3.12.3",
    packages={"autotune": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6"},
    gpus=(H200,),
    driver="580.95.05",
    cuda="13.0",
    cudnn=None,
)


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """An empty control-group tree and an empty procfs, on a host with 16 cores and 64 GiB of memory."""
    cgroup, proc = tmp_path / "cgroup", tmp_path / "proc"
    monkeypatch.setattr(fingerprint, "CGROUP_ROOT", cgroup)
    monkeypatch.setattr(fingerprint, "PROC_ROOT", proc)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    return cgroup, proc


def write(file, text):
    """Put `text` into `file`, its directories included."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


# --------------------------------------------------------------------------------------------------- cores


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("max 100000\n", 16),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("10000 100000\n", 1),
        ("6400000 100000\n", 16),
        ("", 16),
        ("200000\n", 16),
        ("200000 0\n", 16),
        ("0 100000\n", 16),
        ("-1 100000\n", 16),
    ],
)
def test_cores_follow_a_version_2_quota_rounded_up(roots, cpu_max, cores):
    cgroup, _ = roots
    write(cgroup / "cpu.max", cpu_max)
    assert fingerprint.available_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 16), ("0", 16), ("250000", 3)])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_cores_follow_a_version_1_quota_rounded_up(roots, mount, quota, cores):
    cgroup, proc = roots
    write(proc / "self" / "cgroup", "5:cpu,cpuacct:/job\n4:memory:/\n")
    write(cgroup / mount / "job" / "cpu.cfs_quota_us", f"{quota}\n")
    write(cgroup / mount / "job" / "cpu.cfs_period_us", "100000\n")
    assert fingerprint.available_cores() == cores


def test_the_tightest_limit_of_the_groups_above_counts(roots):
    cgroup, proc = roots
    write(proc / "self" / "cgroup", "0::/pod/container\n")
    write(cgroup / "pod" / "container" / "cpu.max", "800000 100000\n")
    write(cgroup / "pod" / "cpu.max", "300000 100000\n")
    write(cgroup / "elsewhere" / "cpu.max", "100000 100000\n")
    write(cgroup / "pod" / "container" / "memory.max", f"{16 * GIB}\n")
    write(cgroup / "pod" / "memory.max", f"{6 * GIB}\n")
    assert fingerprint.available_cores() == 3
    assert fingerprint.memory_limit_bytes() == 6 * GIB


def test_cgroup_path_of_the_host_falls_back_to_the_mount(roots):
    cgroup, proc = roots
    write(proc / "self" / "cgroup", "5:cpu:/docker/0123\n4:memory:/docker/0123\n")
    write(cgroup / "cpu" / "cpu.cfs_quota_us", "400000\n")
    write(cgroup / "cpu" / "cpu.cfs_period_us", "100000\n")
    write(cgroup / "memory" / "memory.limit_in_bytes", f"{4 * GIB}\n")
    assert fingerprint.available_cores() == 4
    assert fingerprint.memory_limit_bytes() == 4 * GIB


def test_group_paths_do_not_lead_out_of_the_mount(roots):
    cgroup, proc = roots
    write(proc / "self" / "cgroup", "0::/../outside\n")
    write(cgroup.parent / "outside" / "cpu.max", "100000 100000\n")
    assert fingerprint.available_cores() == 16


def test_a_group_name_that_is_no_text_hides_no_other(roots):
    cgroup, proc = roots
    write(proc / "self" / "cgroup", "")
    (proc / "self" / "cgroup").write_bytes(b"9:pids:/\xff\n0::/job\n")
    write(cgroup / "job" / "cpu.max", "200000 100000\n")
    assert fingerprint.available_cores() == 2


@given(groups=st.text(), limit=st.text())
@example(groups="0::/\0", limit="9" * 5000 + " 1")
@example(groups="0::/" + "x" * 5000, limit="² ٣")
@example(groups=":::\n3:cpu,memory", limit="1 99999999999999999999")
@example(groups="", limit="inf inf")
def test_any_cgroup_content_leaves_a_core_and_some_memory(groups, limit):
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as monkeypatch:
        cgroup, proc = Path(directory, "cgroup"), Path(directory, "proc")
        monkeypatch.setattr(fingerprint, "CGROUP_ROOT", cgroup)
        monkeypatch.setattr(fingerprint, "PROC_ROOT", proc)
        (proc / "self").mkdir(parents=True)
        cgroup.mkdir()
        encoded = limit.encode("utf-8", "surrogatepass")
        (proc / "self" / "cgroup").write_bytes(groups.encode("utf-8", "surrogatepass"))
        for name in ("cpu.max", "memory.max", "memory.limit_in_bytes"):
            (cgroup / name).write_bytes(encoded)
        assert fingerprint.available_cores() >= 1
        assert fingerprint.memory_limit_bytes() >= 1


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [
        ("memory.max", "max\n", 64 * GIB),
        ("memory.max", f"{8 * GIB}\n", 8 * GIB),
        ("memory.max", f"{512 * GIB}\n", 64 * GIB),
        ("memory/memory.limit_in_bytes", f"{8 * GIB}\n", 8 * GIB),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", 64 * GIB),
    ],
)
def test_memory_is_the_containers_limit_when_that_is_lower(roots, file, text, limit):
    cgroup, _ = roots
    write(cgroup / file, text)
    assert fingerprint.memory_limit_bytes() == limit


# --------------------------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_describes_this_process(monkeypatch):
    reading = GpuReading(gpus=(H200,), driver="580.95.05", cuda="13.0")
    monkeypatch.setattr(fingerprint, "read_gpus", lambda: reading)
    found = fingerprint.fingerprint()
    assert found.cpu
    assert found.cores == fingerprint.available_cores()
    assert found.memory_bytes == fingerprint.memory_limit_bytes()
    assert found.platform == f"Linux {os.uname().machine}"
    assert found.python.split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    assert (found.gpus, found.driver, found.cuda) == reading
    assert (found.cudnn, found.tensorflow_cuda) == (None, None)


def test_versions_of_missing_and_damaged_packages_are_left_out(monkeypatch):
    def version(package):
        if package == "optuna":
            raise metadata.PackageNotFoundError(package)
        return {"keras": None}.get(package, f"1.0+{package}")

    monkeypatch.setattr(metadata, "version", version)
    assert fingerprint.fingerprint().packages == {
        "autotune": __version__,
        "tensorflow": "1.0+tensorflow",
        "tf_keras": "1.0+tf_keras",
        "numpy": "1.0+numpy",
    }


def test_another_build_of_tensorflow_has_its_version(monkeypatch):
    def version(package):
        if package == "tensorflow":
            raise metadata.PackageNotFoundError(package)
        return f"1.0+{package}"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"tensorflow": ["tensorflow-cpu"]})
    assert fingerprint.fingerprint().packages["tensorflow"] == "1.0+tensorflow-cpu"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor : 0\nmodel name\t: Intel(R)  Xeon(R)\nflags: x\nmodel name\t: other\n", "Intel(R) Xeon(R)"),
        ("processor : 0\nmodel name\t:\n", os.uname().machine),
        ("processor : 0\nCPU implementer : 0x41\n", os.uname().machine),
    ],
)
def test_the_cpu_is_the_model_name_or_the_architecture(roots, cpuinfo, name):
    _, proc = roots
    write(proc / "cpuinfo", cpuinfo)
    assert fingerprint.fingerprint().cpu == name


def test_low_precision_units_are_of_the_cpu_and_weakest_gpu(roots, monkeypatch):
    _, proc = roots
    write(proc / "cpuinfo", "model name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx512_bf16 amx_tile amx_bf16\n")
    assert fingerprint.fingerprint().units == ("amx_bf16", "avx512_bf16")
    a100 = Gpu(name="NVIDIA A100", memory_bytes=40 * GIB, compute_capability="8.0")
    monkeypatch.setattr(fingerprint, "read_gpus", lambda: GpuReading(gpus=(H200, a100)))
    units = fingerprint.fingerprint().units
    assert units == ("amx_bf16", "avx512_bf16", "tensor_fp16", "tensor_bf16")
    assert units_for(units, on_gpu=True) == {"tensor_fp16", "tensor_bf16"}
    assert units_of_gpu("9.0") == ("tensor_fp16", "tensor_bf16", "tensor_fp8")
    assert units_of_gpu("6.1") == units_of_gpu(None) == ()


def test_fingerprint_imports_neither_tensorflow_nor_early_pynvml():
    code = (
        "import sys, autotune.machine.fingerprint as m; assert 'pynvml' not in sys.modules; m.fingerprint(); "
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------ id


def test_the_id_is_the_same_in_every_process():
    assert MEASURED_ON.id == "06a019dbbc9e"


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": "other"},
        {"cores": 8},
        {"memory_bytes": 64 * GIB},
        {"platform": "Linux aarch64"},
        {"python": "3.12.4"},
        {"packages": {"tensorflow": "2.21.1"}},
        {"gpus": ()},
        {"driver": "590.1"},
        {"cuda": "13.1"},
    ],
)
def test_the_id_changes_with_hardware_driver_and_versions(change):
    assert MEASURED_ON.model_copy(update=change).id != MEASURED_ON.id


@pytest.mark.parametrize(
    "change",
    [
        {"cudnn": "9.10", "tensorflow_cuda": "12.9"},
        {"units": ("amx_bf16",)},
        {"memory_bytes": 128 * GIB - (40 << 20)},
        {"packages": dict(reversed(MEASURED_ON.packages.items()))},
    ],
)
def test_the_id_stays_when_only_the_telling_changes(change):
    assert MEASURED_ON.model_copy(update=change).id == MEASURED_ON.id


# --------------------------------------------------------------------------------------------- differences


def test_more_cards_of_the_kind_make_no_difference_and_fewer_do():
    several = MEASURED_ON.model_copy(update={"gpus": (H200, H200)})
    assert MEASURED_ON.differences(several) == ()
    assert several.differences(MEASURED_ON) == ("GPU: measured on 2 × NVIDIA H200, here NVIDIA H200",)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"cpu": "Intel Xeon"}, "CPU: measured on AMD EPYC 9654, here Intel Xeon"),
        ({"cores": 2}, "cores: measured on 16, here 2"),
        ({"memory_bytes": 7 * GIB}, "memory: measured on 128.00 GiB, here 7.00 GiB"),
        ({"memory_bytes": 115 * GIB}, "memory: measured on 128.00 GiB, here 115.00 GiB"),
        ({"memory_bytes": 142 * GIB}, "memory: measured on 128.00 GiB, here 142.00 GiB"),
        ({"packages": {"keras": "3.15.1"}}, "TensorFlow: measured on 2.21.0, here none"),
        ({"gpus": (), "driver": None, "cuda": None}, "GPU: measured on NVIDIA H200, here none"),
        ({"gpus": (L4, L4, H200), "driver": "1"}, "GPU: measured on NVIDIA H200, here 2 × NVIDIA L4, NVIDIA H200"),
        (
            {"gpus": (H200.model_copy(update={"memory_bytes": 70 * GIB}),)},
            "GPU memory: measured on 140.40 GiB, here 70.00 GiB",
        ),
        (
            {"gpus": (H200, H200.model_copy(update={"memory_bytes": 70 * GIB}))},
            "GPU memory: measured on 140.40 GiB, here 70.00 GiB",
        ),
        ({"driver": "570.86.10"}, "NVIDIA driver: measured on 580.95.05, here 570.86.10"),
        ({"packages": MEASURED_ON.packages | {"tensorflow": "2.21.1"}}, "TensorFlow: measured on 2.21.0, here 2.21.1"),
        ({"packages": MEASURED_ON.packages | {"keras": "3.16.0"}}, "Keras: measured on 3.15.1, here 3.16.0"),
        ({"python": "3.13.1"}, "Python: measured on 3.12, here 3.13"),
    ],
)
def test_each_difference_that_changes_speed_is_one_line(change, line):
    assert MEASURED_ON.differences(MEASURED_ON.model_copy(update=change)) == (line,)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"memory_bytes": 120 * GIB},
        {"memory_bytes": 136 * GIB},
        {"python": "3.12.9"},
        {"packages": MEASURED_ON.packages | {"autotune": "0.2.0", "numpy": "2.5.0", "optuna": "5.1.0"}},
        {"cudnn": "9.10", "tensorflow_cuda": "12.9"},
        {"gpus": (H200.model_copy(update={"memory_bytes": H200.memory_bytes - GIB}),)},
    ],
)
def test_what_cannot_change_the_speed_is_no_difference(change):
    assert MEASURED_ON.differences(MEASURED_ON.model_copy(update=change)) == ()


def test_a_driver_without_a_gpu_on_both_sides_is_no_difference():
    cpu_only = MEASURED_ON.model_copy(update={"gpus": ()})
    assert cpu_only.differences(cpu_only.model_copy(update={"driver": None, "cuda": None})) == ()


# --------------------------------------------------------------------------------------------------- Linux


def test_other_systems_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match=r"Linux only.*darwin") as caught:
        fingerprint.require_linux()
    assert "\n" not in str(caught.value)
