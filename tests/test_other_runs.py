"""Runs of autotune on one machine know of each other: real processes, real locks."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from autotune.machine import other_runs
from autotune.machine.other_runs import announce_run, local_devices, runtime_directory

HOLD = """
import sys
from pathlib import Path
from autotune.machine.other_runs import announce_run
with announce_run(Path(sys.argv[2]), sys.argv[3:], say=print, within=Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that announces a run on GPU-1 in `tmp_path`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path), "results/first", "GPU-1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def said_beside(place, devices, **options):
    """What a second run in this process is told."""
    said = []
    with announce_run(place / "second", devices, say=said.append, within=place, **options):
        pass
    return said


def test_the_second_run_is_told_of_the_first(holder, tmp_path):
    (text,) = said_beside(tmp_path, ["GPU-1", "GPU-2"], advice="wait for it")
    assert f"process {holder.pid}" in text
    assert "results/first" in text
    assert "intervals will be wide; wait for it" in text


def test_runs_on_other_devices_do_not_disturb(holder, tmp_path):
    assert said_beside(tmp_path, ["GPU-2"]) == []
    assert said_beside(tmp_path, local_devices([])) == []
    assert local_devices([]) == tuple(f"core {number}" for number in sorted(os.sched_getaffinity(0)))


def test_the_run_that_was_announced_first_waits_for_nobody(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(other_runs.time, "time", lambda: 0.0)
    with announce_run(tmp_path / "second", ["GPU-1"], say=pytest.fail, wait=True, within=tmp_path) as waited:
        assert waited >= 0.0


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
    with announce_run(tmp_path / "second", ["GPU-1"], say=say, wait=True, within=tmp_path) as waited:
        assert waited > 0
        assert holder.wait(timeout=30) is not None
    ending.join()
    assert "this one starts once that has ended" in said[0]
    assert [path.suffix for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\x00", json.dumps({"devices": 3}).encode()])
def test_what_no_run_has_written_is_no_run(tmp_path, content):
    (tmp_path / "1-abc.json").write_bytes(content)
    (tmp_path / "outside").mkdir()
    kept = tmp_path / "outside" / "kept.txt"
    kept.write_text("mine")
    (tmp_path / "2-abc.json").symlink_to(kept)
    assert said_beside(tmp_path, ["GPU-1"]) == []
    assert kept.read_text() == "mine"


@pytest.mark.parametrize("trick", ["link", "open to others", "file"])
def test_a_runtime_directory_that_others_can_write_to_is_not_used(tmp_path, monkeypatch, trick):
    place, elsewhere = tmp_path / "autotune", tmp_path / "elsewhere"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("autotune.machine.other_runs.SHARED_TEMPORARY", tmp_path / "missing")
    if trick == "link":
        elsewhere.mkdir(mode=0o700)
        place.symlink_to(elsewhere)
    elif trick == "file":
        place.write_text("")
    else:
        place.mkdir()
        place.chmod(0o777)
    assert runtime_directory() is None
    with announce_run(tmp_path / "run", ["GPU-1"], say=pytest.fail) as waited:
        assert waited == 0.0


def test_the_runtime_directory_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("autotune.machine.other_runs.SHARED_TEMPORARY", tmp_path)
    found = runtime_directory()
    assert found == tmp_path / f"autotune-{os.getuid()}"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
