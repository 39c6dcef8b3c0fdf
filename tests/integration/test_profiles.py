"""Profiles of real trials: five planted limits are rightly named, and what cannot be read ends nothing."""

import sys
from pathlib import Path

import pytest
from bottlenecks import CASES, WORKLOAD, judged

from autotune.executors.local import TrialProcesses
from autotune.tuning.profiles import read_profiles
from autotune.workloads.workload import WorkloadReference

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """A template whose trials are all profiled."""
    reference = WorkloadReference(file=str(WORKLOAD), search_path=(str(WORKLOAD.parent),))
    with TrialProcesses(reference, logs=tmp_path_factory.mktemp("templates"), profile="all") as made:
        made.open()
        yield made


@pytest.mark.parametrize("case", CASES)
def test_what_limits_a_training_is_named(processes, tmp_path, case):
    """A training that is built to be limited by one thing is said to be."""
    found = judged(processes, case, tmp_path / case)
    assert found.name == case, found.why
    (profile,) = read_profiles([tmp_path / case / "profile"])
    assert profile.steps > 0
    assert len(profile.operations) > 0
    assert profile.reason == ""


def test_a_profile_that_cannot_be_read_has_a_reason(tmp_path):
    """An empty folder, and one with a damaged file: neither fails, and one does not keep the other from being read."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "a.xplane.pb").write_bytes(b"no profile")
    empty, damaged = read_profiles([tmp_path / "empty", tmp_path / "damaged"])
    assert empty.reason == "the profiler has written nothing"
    assert damaged.reason
    assert empty.steps == damaged.steps == 0
    assert read_profiles([]) == []


def test_without_the_reader_the_files_stay(tmp_path, monkeypatch):
    """Where xprof is not installed a profile says so, and how to get it."""
    monkeypatch.setitem(sys.modules, "xprof", None)
    folder = tmp_path / "profile"
    folder.mkdir()
    (profile,) = read_profiles([Path(folder)])
    assert "pip install 'autotune[profile]'" in profile.reason
