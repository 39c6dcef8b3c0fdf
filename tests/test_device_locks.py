"""A second run on the same devices is reported, or waits: real processes, real locks."""

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from autotune.machine.device_locks import HOST_CPU, lock_devices, runtime_directory

HOLD = """
import sys
from pathlib import Path
from autotune.machine.device_locks import lock_devices
with lock_devices(Path("results/first"), sys.argv[1:], say=print):
    print("holds", flush=True)
    sys.stdin.read()
"""
MIG = "MIG-GPU-1/7/0"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The directory of the locks."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "autotune"


@pytest.fixture
def holder(folder):
    """A process that holds GPU-1 and a MIG instance."""
    command = [sys.executable, "-c", HOLD, "GPU-1", MIG]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def said_beside(path, *devices, **options):
    """What a second run in this process is told."""
    said = []
    with lock_devices(path, devices, say=said.append, **options) as waited:
        assert waited == 0.0
    return said


def test_the_second_run_is_told_of_the_first_once(holder, tmp_path):
    (text,) = said_beside(tmp_path, "GPU-1", MIG, "GPU-2", advice="; wait for it")
    assert text.startswith("another autotune run is using GPU-1 ")
    assert f"process {holder.pid}, " in text
    assert "results/first" in text
    assert text.endswith("intervals will be wide; wait for it")
    assert len(said_beside(tmp_path, MIG)) == 1


def test_runs_on_other_devices_do_not_disturb(holder, tmp_path):
    assert said_beside(tmp_path, "GPU-2", HOST_CPU) == said_beside(tmp_path, "GPU-2") == []


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_a_run_that_waits_begins_when_the_first_has_ended(holder, tmp_path, ends):
    said, told = [], threading.Event()

    def say(text):
        said.append(text)
        told.set()

    def end():
        assert told.wait(timeout=30)
        if ends == "killed":
            holder.send_signal(signal.SIGKILL)
        else:
            holder.stdin.close()

    ending = threading.Thread(target=end)
    ending.start()
    with lock_devices(tmp_path / "second", ["GPU-1"], say=say, wait=True) as waited:
        assert waited > 0
        assert holder.wait(timeout=30) is not None
    ending.join()
    assert "this one starts once that has ended" in said[0]


@pytest.mark.parametrize("trick", ["link", "open to others", "file"])
def test_runtime_directory_writable_by_others_is_not_used(tmp_path, monkeypatch, folder, trick):
    monkeypatch.setattr("autotune.machine.device_locks.SHARED_TEMPORARY", tmp_path / "missing")
    if trick == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif trick == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert runtime_directory() is None
    assert said_beside(tmp_path, "GPU-1") == []


def test_a_run_goes_on_where_no_lock_can_be_had(tmp_path, folder):
    (folder / "GPU-1.lock").mkdir(parents=True)
    folder.chmod(0o700)
    assert said_beside(tmp_path, "GPU-1") == []


def test_the_runtime_directory_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("autotune.machine.device_locks.SHARED_TEMPORARY", tmp_path)
    found = runtime_directory()
    assert found == tmp_path / f"autotune-{os.getuid()}"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
