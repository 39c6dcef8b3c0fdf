"""Profiles of real trials: five planted limits are rightly named, and what cannot be read ends nothing."""

import json
import sys
from pathlib import Path

import pytest
from real_trials import PATIENCE_SECONDS, QUICK, WORKLOADS, configuration

from autotune.data.facts import WorkloadReference
from autotune.runtime.local import LocalExecutor
from autotune.stats.bottleneck import StepFigures, find_bottleneck
from autotune.tuning.tune import read_profiles


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """A template whose trials are all profiled."""
    reference = WorkloadReference(file=str(WORKLOADS / "limited.py"), search_path=(str(WORKLOADS),))
    with LocalExecutor(reference, logs=tmp_path_factory.mktemp("templates"), profile="all") as made:
        made.open()
        yield made


@pytest.mark.parametrize("case", ["input", "launch", "compute", "memory_bandwidth"])
def test_what_limits_a_training_is_named(processes, tmp_path, case):
    log = str(tmp_path / f"{case}-.txt")
    trial = processes.launch(configuration(64), log=log, data=None, timing=QUICK)
    trial.warm_up(PATIENCE_SECONDS)
    trial.measure(0.5, PATIENCE_SECONDS)
    finished = trial.finish(0.3, PATIENCE_SECONDS, thorough=True)
    (profile,) = read_profiles([tmp_path / "profile"])
    assert profile.steps > 0
    assert len(profile.operations) > 0
    assert profile.reason == ""
    figures = StepFigures(waits=finished.input_wait_fraction, outside=finished.outside_fraction, profile=profile)
    found = find_bottleneck(figures)
    assert found.name == case, found.why


def test_a_profile_that_cannot_be_read_has_a_reason(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "a.xplane.pb").write_bytes(b"no profile")
    empty, damaged = read_profiles([tmp_path / "empty", tmp_path / "damaged"])
    assert empty.reason == "the profiler has written nothing"
    assert damaged.reason
    assert empty.steps == damaged.steps == 0
    assert read_profiles([]) == []


KERNELS = {  # of a step of a millisecond: the operation, and the kernel's microseconds
    "volta_h884gemm_64x64_nn": ("dense/MatMul:MatMul", 600),
    "ampere_sgemm_128x64_nn": ("dense_1/MatMul:MatMul", 200),
    "void tensorflow::BiasNHWCKernel<float>": ("dense/BiasAdd:BiasAdd", 100),
}


def of_a_gpu(steps):
    """A profile as TensorFlow writes it, of a card on which each step runs `KERNELS`."""
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    space = XSpace()
    card = space.planes.add(id=1, name="/device:GPU:0")
    card.stat_metadata[1].MergeFrom(type(card.stat_metadata[1])(id=1, name="kernel_details"))
    card.stat_metadata[2].MergeFrom(type(card.stat_metadata[1])(id=2, name="tf_op"))
    stream = card.lines.add(id=13, name="Stream #13(Compute)")
    for number, (kernel, (operation, microseconds)) in enumerate(KERNELS.items(), start=1):
        card.event_metadata[number].MergeFrom(type(card.event_metadata[number])(id=number, name=kernel))
        for step in range(steps):
            at = step * 10**9 + number * 10**8
            event = stream.events.add(metadata_id=number, offset_ps=at, duration_ps=microseconds * 10**6)
            event.stats.add(metadata_id=1, str_value="regs:32 static_shared:0 grid:16,1,1 block:256,1,1 occ_pct:50")
            event.stats.add(metadata_id=2, str_value=operation)
    return space.SerializeToString()


def test_the_kernels_of_a_gpu_are_read(tmp_path):
    (tmp_path / "card.xplane.pb").write_bytes(of_a_gpu(20))
    (tmp_path / "window.json").write_text(json.dumps({"steps": 20, "seconds": 0.02}), encoding="utf-8")
    (profile,) = read_profiles([tmp_path])
    assert [kernel.name for kernel in profile.kernels] == list(KERNELS)
    assert [kernel.kind for kernel in profile.kernels] == ["tensor cores", "kernel", "kernel"]
    assert profile.operation_seconds == pytest.approx(9e-4)
    assert profile.tensor_core_share == pytest.approx(6 / 9)
    found = find_bottleneck(StepFigures(waits=0.0, profile=profile))
    assert (found.name, found.share) == ("compute", pytest.approx(8 / 9))
    assert "at least 67% of it on tensor cores" in found.why


def test_without_the_reader_the_files_stay(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xprof", None)
    folder = tmp_path / "profile"
    folder.mkdir()
    (profile,) = read_profiles([Path(folder)])
    assert "pip install xprof" in profile.reason
