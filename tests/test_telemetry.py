"""What a trial reads of itself and of its machine, and what happens between two readings."""

import mmap
import os
import signal
import subprocess
import sys
from collections import namedtuple

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.data.record import Slice
from autotune.machine import fingerprint, telemetry
from autotune.machine.telemetry import Counters, between, host_bytes, peak_host_bytes, read_counters

CpuTimes = namedtuple("CpuTimes", "user nice system idle iowait irq softirq steal guest guest_nice")


@pytest.fixture
def two_cores(tmp_path, monkeypatch):
    """A machine with three cores of which this process may use two, without control groups."""
    times = [
        CpuTimes(4.0, 0.0, 0.0, 5000.0, 70.0, 0.0, 0.0, 1.0, 0.0, 0.0),
        CpuTimes(900.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 900.0, 0.0, 0.0),
        CpuTimes(3.0, 1.0, 2.0, 5000.0, 70.0, 1.0, 1.0, 0.5, 2.0, 0.0),
    ]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr(fingerprint, "CGROUP_ROOT", tmp_path)
    return times


def test_busy_and_steal_are_those_of_the_cores_that_may_be_used(two_cores):
    counters = read_counters()
    assert (counters.cores, counters.busy, counters.steal) == (2, 12.0, 1.5)


def test_cores_that_are_not_listed_leave_busy_unknown(two_cores):
    del two_cores[2]
    counters = read_counters()
    assert (counters.busy, counters.steal) == (None, None)


def test_unreadable_machine_counters_leave_only_own_time(two_cores, monkeypatch):
    def missing(percpu):
        raise FileNotFoundError(2, "No such file", "/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", missing)
    counters = read_counters()
    assert (counters.busy, counters.steal) == (None, None)
    assert counters.own > 0


@pytest.mark.parametrize(("quota", "cores"), [("100000", 1), ("150000", 2), ("50000", 1)])
def test_under_a_quota_nobody_knows_what_others_take(two_cores, tmp_path, quota, cores):
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert (read_counters().cores, read_counters().busy) == (2, 12.0)
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    counters = read_counters()
    assert (counters.cores, counters.busy, counters.steal) == (cores, None, None)


counts = st.none() | st.floats(0, 1e9)


def readings():
    """Two readings of any content."""
    return st.builds(
        Counters, at=st.floats(0, 1e9), own=st.floats(0, 1e9), cores=st.integers(1, 512), busy=counts, steal=counts
    )


@given(readings(), readings())
def test_what_lies_between_two_readings_is_never_negative(before, after):
    found = between(before, after, seconds=1.0)
    slice_ = Slice(
        seconds=1.0,
        steps=1,
        examples=1,
        epochs=0,
        cpu_seconds=0.0,
        step_seconds={"p50": 0.1, "p90": 0.1, "p99": 0.1, "max": 0.1},
        **found,
    )
    assert slice_.foreign_cpu_seconds is None or slice_.foreign_cpu_seconds >= 0
    assert (found["foreign_cpu_seconds"] is None) == (before.busy is None or after.busy is None)
    assert (found["steal_seconds"] is None) == (before.steal is None or after.steal is None)


def test_ones_own_processor_time_is_not_foreign():
    before = Counters(at=50.0, own=10.0, cores=2, busy=100.0, steal=1.0)
    after = Counters(at=52.0, own=12.0, cores=2, busy=103.0, steal=1.5)
    found = between(before, after, seconds=2.0)
    assert found["foreign_cpu_seconds"] == 1.0
    assert found["steal_seconds"] == 0.5


def test_a_slice_has_its_part_of_what_lies_between_the_readings():
    before, after = (Counters(at=at, own=0.0, cores=2, busy=at, steal=at) for at in (50.0, 54.0))
    assert between(before, after, seconds=2.0)["foreign_cpu_seconds"] == 2.0
    assert between(before, after, seconds=2.0)["steal_seconds"] == 2.0
    assert between(before, after, seconds=9.0)["foreign_cpu_seconds"] == 4.0


def test_a_living_child_is_ones_own():
    busy = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\nsys.stdin.read()"
    before = read_counters().own
    own_before = sum(os.times()[:4])
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        grown = read_counters().own - before - (sum(os.times()[:4]) - own_before)
        child.stdin.close()
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
        pytest.skip("this kernel does not list children")
    assert grown >= 0.25
    assert read_counters().own - before >= 0.25


def test_the_children_of_children_are_ones_own():
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
        pytest.skip("this kernel does not list children")
    command = "sleep 60 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        grandchild = int(child.stdout.readline())
        found = set(telemetry._descendants(os.getpid()))
        os.killpg(child.pid, signal.SIGKILL)
    assert {child.pid, grandchild} <= found


SIZE = 64 << 20


def test_written_memory_counts_until_it_is_released():
    before = host_bytes()
    block = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"x" * SIZE)
    grown = host_bytes()
    block.close()
    assert grown - before > 0.9 * SIZE
    assert host_bytes() - before < 0.1 * SIZE
    assert peak_host_bytes() >= grown


def test_pages_that_are_touched_anew_are_counted():
    before = read_counters()
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.madvise(mmap.MADV_NOHUGEPAGE)
        block.write(b"x" * SIZE)
    after = read_counters()
    found, half = (between(before, after, seconds=part * (after.at - before.at)) for part in (1.0, 0.5))
    assert found["page_faults"] >= SIZE // mmap.PAGESIZE
    assert half["page_faults"] == pytest.approx(found["page_faults"] / 2, abs=1)


def test_files_that_are_mapped_do_not_count(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(b"x" * SIZE)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = host_bytes()
        assert sum(mapped[at] for at in range(0, SIZE, mmap.PAGESIZE)) > 0
        assert host_bytes() - before < 0.1 * SIZE
