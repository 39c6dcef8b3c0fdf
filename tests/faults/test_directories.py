"""A disk that fills up, a run directory that goes away: one clear error, and what was finished stays readable."""

import contextlib
import os
import subprocess

import pytest
from fault_table import WORKLOAD
from simulated_runs import simulated_trials
from studies import Study

from autotune.data.errors import RunDirectoryError
from autotune.data.facts import WorkloadReference
from autotune.data.run_directory import RunDirectory
from autotune.runtime.local import LocalExecutor
from autotune.space.configuration import read_trials

REFERENCE = WorkloadReference(file=str(WORKLOAD), search_path=(str(WORKLOAD.parent),))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def fresh_processes(small_disk, tmp_path):
    """Trials of a template that has begun after the disk was mounted: earlier ones cannot see it."""
    (tmp_path / "templates").mkdir()
    with LocalExecutor(REFERENCE, logs=tmp_path / "templates") as trials:
        trials.open()
        yield trials


@contextlib.contextmanager
def unwritable(directory):
    """No entry can be made in a directory, not even by root."""
    if os.geteuid():
        directory.chmod(0o500)
        yield
        directory.chmod(0o700)
        return
    if subprocess.run(["chattr", "+i", str(directory)], capture_output=True, check=False).returncode:
        pytest.skip("root cannot make a directory unwritable here")
    yield
    subprocess.run(["chattr", "-i", str(directory)], check=True)


def fill(disk):
    """Write until there is no room."""
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        write_for_ever(file)


def write_for_ever(file):
    """Until the disk is full."""
    while True:
        file.write(b"x" * 4096)


def test_a_disk_that_fills_up(fresh_processes, small_disk):
    study = Study(fresh_processes, small_disk / "run", trial_seconds=8.0)
    assert study.try_fault("").outcome == "ok"
    fill(small_disk)
    with pytest.raises(RunDirectoryError, match=r"cannot write .*trials/000[2-9].*: No space left on device") as caught:
        study.try_fault("")
    assert "Finished trials stay readable" in caught.value.hint
    assert [record.trial for record in read_trials(RunDirectory(small_disk / "run"))] == [0, 1]
    with contextlib.suppress(RunDirectoryError):
        study.end()


@pytest.mark.fast
def test_a_run_directory_that_becomes_unwritable(tmp_path):
    study = Study(simulated_trials(), tmp_path / "run", trial_seconds=8.0)
    with (
        unwritable(tmp_path / "run" / "trials"),
        pytest.raises(RunDirectoryError, match=r"cannot write to .*trials/0001: (Operation not permitted|Perm)"),
    ):
        study.try_fault("")
    assert [record.outcome for record in read_trials(RunDirectory(tmp_path / "run"))] == ["ok"]
    study.end()


@pytest.mark.fast
def test_a_run_directory_that_is_deleted(tmp_path):
    study = Study(simulated_trials(), tmp_path / "run", trial_seconds=8.0)
    (tmp_path / "run").rename(tmp_path / "gone")
    with pytest.raises(RunDirectoryError, match=r"cannot write to .*run/trials/0001: No such file or directory"):
        study.try_fault("")
    assert not (tmp_path / "run").exists()
    (tmp_path / "gone").rename(tmp_path / "run")
    study.end()
