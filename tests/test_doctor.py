"""Broken machines, each named rightly with its next step; what is read below a faked root; and the command."""

import json
import os
from pathlib import Path

import pytest

from autotune.front import cli, doctor_report
from autotune.front.doctor_report import look
from autotune.front.documents import DOCUMENTS
from autotune.machine import fingerprint
from autotune.machine.doctor import GpuState, Level, MachineState, diagnose, first_fix
from autotune.space.variables import NOT_READ

H100 = GpuState(name="NVIDIA H100", memory_bytes=80 << 30, capability=(9, 0), power_limit=700.0, power_default=700.0)
LIBRARIES = ("libcublas.so.12", "libcudart.so.12", "libcudnn.so.9")
HEALTHY = MachineState(
    tensorflow="2.21.0",
    built_with={"cuda_version": "12.5.1", "cudnn_version": "9"},
    libraries=LIBRARIES,
    pci_nvidia=True,
    driver="580.65",
    cards=(H100,),
    cpu_flags=frozenset({"avx2", "avx512f", "amx_bf16"}),
    cores=16,
    usable_cores=16,
    memory_bytes=64 << 30,
    usable_memory_bytes=64 << 30,
    shm_bytes=8 << 30,
    disk_bytes_per_second=2e9,
    jitter=0.01,
)


def with_card(**changes):
    """The healthy machine with another card."""
    return HEALTHY.model_copy(update={"cards": (H100.model_copy(update=changes),)})


def without(*libraries):
    """The healthy machine without these libraries."""
    return HEALTHY.model_copy(update={"libraries": tuple(set(LIBRARIES) - set(libraries))})


def machine_with(**changes):
    """The healthy machine with these changes."""
    return HEALTHY.model_copy(update=changes)


BROKEN = {
    "no TensorFlow": (machine_with(tensorflow=None), "STOPS", "not installed", "pip install"),
    "import fails": (machine_with(import_error="ImportError: x.so"), "STOPS", "ImportError: x.so", "Reinstall"),
    "CPU build on a GPU": (machine_with(built_with=None), "STOPS", "built without CUDA", "and-cuda"),
    "no driver": (machine_with(driver=None, cards=()), "STOPS", "driver does not respond", "--gpus all"),
    "old driver": (machine_with(driver="470.57"), "STOPS", "470.57 is too old for CUDA 12", "525"),
    "no cudart": (without("libcudart.so.12"), "STOPS", "libcudart.so.12", "and-cuda"),
    "no cuDNN": (without("libcudnn.so.9"), "STOPS", "libcudnn.so.9", "and-cuda"),
    "old cuDNN": (
        machine_with(libraries=("libcublas.so.12", "libcudart.so.12", "libcudnn.so.8")),
        "STOPS",
        "libcudnn.so.9; there is libcudnn.so.8",
        "and-cuda",
    ),
    "hidden card": (machine_with(cards=(), visible="-1"), "STOPS", "CUDA_VISIBLE_DEVICES='-1' hides", "Unset"),
    "lost card": (machine_with(cards=()), "STOPS", "shows no GPU", "nvidia-smi"),
    "MIG without an instance": (with_card(mig=True), "STOPS", "MIG mode without an instance", "-mig 0"),
    "exclusive": (with_card(mode="exclusive", others=1), "STOPS", "exclusive mode", "-c DEFAULT"),
    "prohibited": (with_card(mode="prohibited"), "STOPS", "prohibited mode", "-c DEFAULT"),
    "shared card": (with_card(others=2), "SLOWS", "2 other processes on NVIDIA H100", "nobody else"),
    "memory errors": (with_card(ecc_errors=3), "SLOWS", "3 memory errors", "Reset"),
    "power cap": (with_card(power_limit=300.0), "SLOWS", "300 of its usual 700 W", "-pl 700"),
    "mild power cap": (with_card(power_limit=420.0), "SLOWS", "420 of its usual 700 W", "-pl 700"),
    "few cores": (machine_with(usable_cores=2.5), "SLOWS", "2.5 of the machine's 16 cores", "--cpus"),
    "small shm": (machine_with(shm_bytes=64 << 20), "SLOWS", "/dev/shm has 64 MiB", "--shm-size"),
    "old processor": (machine_with(cpu_flags=frozenset({"sse4_2", "avx"})), "SLOWS", "no AVX2", "newer"),
    "slow disk": (machine_with(disk_bytes_per_second=2e7), "SLOWS", "20 MB/s", "local disk"),
    "restless": (machine_with(jitter=0.2), "SLOWS", "noisy", "--budget 12m"),
    "no tf_keras": (
        machine_with(keras="3.15.1", environment={"TF_USE_LEGACY_KERAS": "1"}),
        "STOPS",
        "tf.keras Keras 2, and tf_keras is not installed",
        "tf_keras==2.21.*",
    ),
    "old tf_keras": (
        machine_with(keras="3.15.1", tf_keras="2.18.0"),
        "SLOWS",
        "tf_keras 2.18.0 is made for another TensorFlow than 2.21.0",
        "tf_keras==2.21.*",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_with_its_next_step(name):
    seen, level, what, fix = BROKEN[name]
    (found,) = [each for each in diagnose(seen) if each.level is not Level.FACT]
    assert found.level is Level[level]
    assert what in found.text
    assert fix in found.fix
    assert first_fix(diagnose(seen)) == found.fix


@pytest.mark.parametrize(
    ("slow", "fine"),
    [
        (with_card(power_limit=629.0), with_card(power_limit=631.0)),
        (machine_with(usable_cores=11.9), machine_with(usable_cores=12.0)),
        (machine_with(shm_bytes=255 << 20), machine_with(shm_bytes=256 << 20)),
        (machine_with(disk_bytes_per_second=99e6), machine_with(disk_bytes_per_second=101e6)),
        (machine_with(jitter=0.05), machine_with(jitter=0.049)),
    ],
    ids=("power limit", "cores", "shared memory", "disk", "jitter"),
)
def test_each_limit_has_its_place(slow, fine):
    assert [found.level for found in diagnose(slow) if found.level is not Level.FACT] == [Level.SLOWS]
    assert {found.level for found in diagnose(fine)} == {Level.FACT}


def test_a_healthy_machine_has_facts_only():
    findings = diagnose(HEALTHY)
    assert {each.level for each in findings} == {Level.FACT}
    assert first_fix(findings) == ""
    told = " | ".join(each.text for each in findings)
    assert "compute capability 9.0; has tensor cores, bfloat16 and TF32, fp8" in told
    assert "AMX-BF16, computes in bfloat16" in told
    assert "wants CUDA 12.5.1 and cuDNN 9" in told


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, "tf.keras and `import keras` give Keras 3 (3.15.1); `import tf_keras` gives Keras 2 (2.21.0)"),
        (
            {"TF_USE_LEGACY_KERAS": "True"},
            "tf.keras is Keras 2 (2.21.0), because TF_USE_LEGACY_KERAS is set; `import keras` gives Keras 3 (3.15.1)",
        ),
    ],
)
def test_it_is_said_which_keras_a_script_gets(environment, text):
    seen = machine_with(keras="3.15.1", tf_keras="2.21.0", environment=environment)
    (found,) = [found for found in diagnose(seen) if "tf_keras" in found.text or "LEGACY" in found.text]
    assert found.text == text
    assert found.level is Level.FACT


def test_it_is_said_whether_trials_are_contained():
    (contained,) = [found for found in diagnose(machine_with(uncontained="")) if "isolated" in found.text]
    assert contained.level is Level.FACT
    refused = machine_with(uncontained="unshare: Operation not permitted")
    (uncontained,) = [found for found in diagnose(refused) if "isolated" in found.text]
    assert "cannot be isolated (unshare: Operation not permitted)" in uncontained.text
    assert "seccomp" in uncontained.fix


def test_a_machine_without_a_card_is_none_that_is_broken():
    for built in (None, HEALTHY.built_with):
        seen = machine_with(pci_nvidia=False, driver=None, cards=(), libraries=(), built_with=built)
        assert {each.level for each in diagnose(seen)} == {Level.FACT}


@pytest.mark.parametrize("name", NOT_READ)
def test_a_variable_that_is_not_read_any_more_is_named(name):
    (found,) = [each for each in diagnose(machine_with(environment={name: "1"})) if name in each.text]
    assert "no longer reads it" in found.text


def test_what_stops_comes_before_what_slows():
    seen = machine_with(jitter=0.2, shm_bytes=1 << 20, driver="470.57")
    findings = diagnose(seen)
    assert findings[0].level is Level.STOPS
    assert first_fix(findings) == "Install a driver of version 525 or later."


def faked(root: Path, **files: str) -> Path:
    """A root with these files; `__` in a name stands for a slash."""
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def seen_below(monkeypatch):
    """What is read below a root, without a build, cards or measuring."""
    loaded = "\tlibcudart.so.12 (libc6,x86-64) => /usr/lib/libcudart.so.12\n\tlibm.so.6 => /x\n"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(doctor_report, "_build", lambda: ({"cuda_version": "12.5", "cudnn_version": "9"}, ""))
    monkeypatch.setattr(doctor_report, "_cards", lambda nvml: ("580.65", (H100,)))
    monkeypatch.setattr(doctor_report, "query_nvml", lambda use, otherwise: use(None))
    monkeypatch.setattr(doctor_report, "_ldconfig", lambda: loaded)
    monkeypatch.setattr(doctor_report, "_disk", lambda: None)
    monkeypatch.setattr(doctor_report, "_jitter", lambda: None)
    return look


def test_what_is_read_below_a_root(tmp_path, seen_below):
    root = faked(
        tmp_path,
        proc__cpuinfo="model name : x\nflags\t\t: fpu avx2 avx512_bf16\n",
        sys__bus__pci__devices__a__vendor="0x10de\n",
        sys__devices__system__node__node0__x="",
        sys__devices__system__node__node1__x="",
    )
    seen = seen_below(root)
    assert seen.cpu_flags == {"fpu", "avx2", "avx512_bf16"}
    assert seen.pci_nvidia
    assert seen.numa_nodes == 2
    assert "libcudart.so.12" in seen.libraries
    assert "libm.so.6" not in seen.libraries
    assert seen.cards == (H100,)
    assert seen.shm_bytes is None


def test_libraries_on_the_search_path_are_found(tmp_path, seen_below, monkeypatch):
    (tmp_path / "libcublas.so.12").write_bytes(b"")
    (tmp_path / "libcudnn.so.9").symlink_to("gone")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}:{tmp_path / 'nowhere'}")
    libraries = seen_below(tmp_path).libraries
    assert "libcublas.so.12" in libraries
    assert "libcudnn.so.9" not in libraries


@pytest.mark.parametrize(
    "files",
    [{"cpu.max": "150000 100000"}, {"cpu__cpu.cfs_quota_us": "150000", "cpu__cpu.cfs_period_us": "100000"}],
    ids=["version 2", "version 1"],
)
def test_a_containers_quota_is_seen_in_both_versions_of_control_groups(tmp_path, monkeypatch, seen_below, files):
    monkeypatch.setattr(fingerprint, "CGROUP_ROOT", faked(tmp_path / "groups", **files))
    monkeypatch.setattr(fingerprint, "PROC_ROOT", faked(tmp_path / "proc", self__cgroup="0::/\n"))
    assert seen_below(tmp_path).usable_cores == pytest.approx(1.5)


def test_the_command_prints_a_line_each_and_leaves_by_what_it_found(monkeypatch, capsys):
    monkeypatch.setattr(doctor_report, "look", lambda: BROKEN["old driver"][0])
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "driver 470.57 is too old for CUDA 12" in out
    assert out.rstrip().endswith("First: Install a driver of version 525 or later.")
    assert cli.main(["doctor", "--json"]) == 1
    printed = capsys.readouterr().out
    DOCUMENTS.validate_json(printed)
    told = json.loads(printed)
    assert told["first"] == "Install a driver of version 525 or later."
    assert told["findings"][0]["level"] == "stops"
    for machine in (BROKEN["shared card"][0], HEALTHY):  # what only slows is no failure
        monkeypatch.setattr(doctor_report, "look", lambda machine=machine: machine)
        assert cli.main(["doctor"]) == 0


def test_a_power_limit_near_the_usual_one_is_no_finding():
    assert {found.level for found in diagnose(with_card(power_limit=650.0))} == {Level.FACT}
