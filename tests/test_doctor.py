"""Broken machines, each named rightly with its next step; what is read below a faked root; and the command."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from autotune.data.options import USUAL_BUDGET
from autotune.front import cli
from autotune.front.documents import DOCUMENTS
from autotune.machine import doctor
from autotune.machine.doctor import GpuState, Level, MachineState, diagnose, first_fix, look

H100 = GpuState(name="NVIDIA H100")
HEALTHY = MachineState(
    tensorflow="2.21.0",
    built_with={"cuda_version": "12.5.1", "cudnn_version": "9"},
    tensorflow_gpus=1,
    pci_nvidia=True,
    driver="580.65",
    cards=(H100,),
    xprof="2.20.0",
    cores=16,
    usable_cores=16,
    free_memory_bytes=64 << 30,
    free_disk_bytes=64 << 30,
    shm_bytes=8 << 30,
    jitter=0.01,
)


def with_card(**changes):
    """The healthy machine with another card."""
    return HEALTHY.model_copy(update={"cards": (H100.model_copy(update=changes),)})


def machine_with(**changes):
    """The healthy machine with these changes."""
    return HEALTHY.model_copy(update=changes)


BROKEN = {
    "no TensorFlow": (machine_with(tensorflow=None), "STOPS", "not installed", "pip install"),
    "import fails": (machine_with(import_error="ImportError: x.so"), "STOPS", "ImportError: x.so", "Reinstall"),
    "CPU build on a GPU": (machine_with(built_with=None), "STOPS", "built without CUDA", "and-cuda"),
    "no driver": (machine_with(driver=None, cards=()), "STOPS", "driver does not respond", "--gpus all"),
    "old driver": (machine_with(driver="470.57"), "STOPS", "470.57 is too old for CUDA 12", "525"),
    "no cuDNN": (
        machine_with(tensorflow_gpus=0, unloaded=("libcudnn.so.9", "libcublas.so.12")),
        "STOPS",
        "needs CUDA 12.5.1 and cuDNN 9, and cannot load libcudnn.so.9, libcublas.so.12",
        "and-cuda",
    ),
    "no GPU listed": (machine_with(tensorflow_gpus=0), "STOPS", "lists no GPU; it needs CUDA 12.5.1", "and-cuda"),
    "another GPU named": (machine_with(tensorflow_gpus=0, visible="GPU-x"), "STOPS", "='GPU-x'", "Unset"),
    "hidden card": (machine_with(cards=(), visible="-1"), "STOPS", "CUDA_VISIBLE_DEVICES='-1' hides", "Unset"),
    "lost card": (machine_with(cards=()), "STOPS", "shows no GPU", "nvidia-smi"),
    "MIG without an instance": (with_card(mig=True), "STOPS", "MIG mode without an instance", "-mig 0"),
    "exclusive": (with_card(mode="exclusive", others=1), "STOPS", "exclusive mode", "-c DEFAULT"),
    "prohibited": (with_card(mode="prohibited"), "STOPS", "prohibited mode", "-c DEFAULT"),
    "shared card": (with_card(others=2), "SLOWS", "2 other processes on NVIDIA H100", "nobody else"),
    "old TensorFlow": (machine_with(tensorflow="2.17.1"), "SLOWS", "2.17.1 is not supported", "tensorflow==2.21"),
    "new TensorFlow": (machine_with(tensorflow="2.22.0rc1"), "SLOWS", "tested with 2.18 to 2.21", "tensorflow==2.21"),
    "little memory": (machine_with(free_memory_bytes=1 << 30), "SLOWS", "1.0 GiB of memory are free", "--memory"),
    "full disk": (machine_with(free_disk_bytes=1 << 29), "SLOWS", "0.5 GiB of this disk are free", "--out"),
    "few cores": (machine_with(usable_cores=2.5), "SLOWS", "2.5 of the machine's 16 cores", "--cpus"),
    "small shm": (machine_with(shm_bytes=64 << 20), "SLOWS", "/dev/shm has 64 MiB", "--shm-size"),
    "restless": (machine_with(jitter=0.2), "SLOWS", "machine is busy", f"--budget {USUAL_BUDGET}"),
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
        (machine_with(usable_cores=11.9), machine_with(usable_cores=12.0)),
        (machine_with(shm_bytes=255 << 20), machine_with(shm_bytes=256 << 20)),
        (machine_with(jitter=0.05), machine_with(jitter=0.049)),
        (machine_with(tensorflow="2.17.9"), machine_with(tensorflow="2.18.0")),
    ],
    ids=("cores", "shared memory", "jitter", "TensorFlow"),
)
def test_each_limit_has_its_place(slow, fine):
    assert [found.level for found in diagnose(slow)] == [Level.SLOWS]
    assert (diagnose(fine), first_fix([])) == ([], "")


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


@pytest.mark.parametrize(
    ("changes", "text", "fix"),
    [
        (
            {"uncontained": "unshare: Operation not permitted"},
            "cannot be isolated (unshare: Operation not permitted)",
            "seccomp",
        ),
        ({"xprof": None}, "xprof is needed", "pip install xprof"),
    ],
)
def test_what_is_measured_less_well_is_a_fact_with_a_fix(changes, text, fix):
    (found,) = diagnose(machine_with(**changes))
    assert found.level is Level.FACT
    assert text in found.text
    assert fix in found.fix
    assert first_fix([found]) == ""
    assert diagnose(machine_with(uncontained="")) == []


def test_a_machine_without_a_card_is_none_that_is_broken():
    for built in (None, HEALTHY.built_with):
        seen = machine_with(pci_nvidia=False, driver=None, cards=(), built_with=built)
        assert {found.level for found in diagnose(seen)} <= {Level.FACT}


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
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    silent = subprocess.CompletedProcess((), 1, stdout="", stderr="")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *arguments, **options: silent)
    monkeypatch.setattr(doctor, "_read_cards", lambda nvml: ("580.65", (H100,)))
    monkeypatch.setattr(doctor, "query_nvml", lambda use, otherwise: use(None))
    monkeypatch.setattr(doctor, "_jitter", lambda: None)
    return lambda root: look(lambda layers: "", root)


def test_what_is_read_below_a_root(tmp_path, seen_below):
    seen = seen_below(faked(tmp_path, sys__bus__pci__devices__a__vendor="0x10de\n"))
    assert seen.pci_nvidia
    assert seen.cards == (H100,)
    assert seen.shm_bytes is None


BUILD = '[{"is_cuda_build": "True", "cuda_version": "12.5", "cudnn_version": "9"}, 0]'


@pytest.mark.parametrize(
    ("out", "err", "expected"),
    [
        (
            f"noise\nBUILD{BUILD}\n",
            "W0000 Could not load dynamic library 'libcudnn.so.9'; dlerror\nW0000 libcudnn.so.9, libm.so.6\n",
            {"built_with": {"cuda_version": "12.5", "cudnn_version": "9"}, "unloaded": ("libcudnn.so.9",)},
        ),
        (f"BUILD{BUILD.replace('True', 'False')}", "", {"built_with": None, "import_error": ""}),
        ("", "Traceback\nImportError: x.so\n\n", {"import_error": "ImportError: x.so"}),
        ("", "", {"import_error": "exit status 1"}),
    ],
    ids=["CUDA", "CPU", "broken", "killed"],
)
def test_tensorflow_is_asked_in_a_process_of_its_own(tmp_path, seen_below, monkeypatch, out, err, expected):
    monkeypatch.setattr(doctor, "installed_version", lambda name: "2.21.0")
    ended = subprocess.CompletedProcess((), 1, stdout=out, stderr=err)
    monkeypatch.setattr(doctor.subprocess, "run", lambda *arguments, **options: ended)
    seen = seen_below(tmp_path)
    assert {name: getattr(seen, name) for name in expected} == expected


def test_doctor_prints_its_findings_and_exits_accordingly(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "look", lambda _: BROKEN["old driver"][0])
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
        monkeypatch.setattr(doctor, "look", lambda _, machine=machine: machine)
        assert cli.main(["doctor"]) == 0
    assert "Nothing found" in capsys.readouterr().out
