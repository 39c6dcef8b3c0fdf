"""What a trial reads of its machine: the kernel's texts, and what happens between two readings."""

import mmap
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.devices import telemetry
from autotune.devices.machine import available_cores
from autotune.devices.telemetry import (
    Counters,
    between,
    host_bytes,
    mean_megahertz,
    peak_host_bytes,
    process_seconds,
    processor_seconds,
    read_counters,
    throttled_seconds,
)
from autotune.record import Slice

TICKS = os.sysconf("SC_CLK_TCK")
STAT = f"""cpu  900 0 900 900 0 0 0 900 0 0
cpu0 {3 * TICKS} {1 * TICKS} {2 * TICKS} 5000 70 {TICKS} {TICKS} {TICKS // 2} {2 * TICKS} 0
cpu1 {4 * TICKS} 0 0 5000 70 0 0 {TICKS} 0 0
intr 12345
ctxt 6
"""


def test_busy_and_steal_are_those_of_the_cores_that_may_be_used():
    """User, nice, system and interrupts are busy; idling, waiting and what guests took are not counted to it."""
    assert processor_seconds(STAT, {0}) == (8.0, 0.5)
    assert processor_seconds(STAT, {0, 1}) == (12.0, 1.5)
    assert processor_seconds(STAT, {7}) == (None, None)
    assert processor_seconds("", {0}) == (None, None)


def test_a_kernel_without_steal_tells_of_busy_alone():
    """The columns that old kernels lack are not taken for 0."""
    assert processor_seconds(f"cpu0 {TICKS} 0 0 9 0 0 0", {0}) == (1.0, None)


def test_both_versions_of_control_groups_tell_of_throttling():
    """Microseconds in the one, nanoseconds in the other; without a quota there may be no such line."""
    assert throttled_seconds("nr_periods 5\nnr_throttled 2\nthrottled_usec 2500000\n") == 2.5
    assert throttled_seconds("nr_periods 5\nnr_throttled 2\nthrottled_time 2500000000\n") == 2.5
    assert throttled_seconds("usage_usec 12\nuser_usec 1\n") is None


def test_clock_rates_are_averaged():
    """Of all cores that are named; None where none is."""
    assert (
        mean_megahertz("processor\t: 0\ncpu MHz\t\t: 2000.5\nprocessor\t: 1\ncpu MHz\t\t: 3000.5\n") == 2500.5
    )
    assert mean_megahertz("processor : 0\nBogoMIPS : 50\n") is None


def test_a_programs_name_cannot_forge_its_processor_time():
    """The name stands in parentheses, and may hold parentheses and numbers itself."""
    figures = f"S 1 1 1 0 -1 4 0 0 0 0 {TICKS} {TICKS} {2 * TICKS} 0 20 0"
    assert process_seconds(f"42 (python) {figures}") == 4.0
    assert process_seconds(f"42 (a) 1 2 3 4 5 6 7 8 9 9 9 9 9) {figures}") == 4.0
    assert process_seconds("") == 0.0


lines = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.from_regex(r"cpu[0-9]{0,3}( -?[0-9]{0,25}){0,12}", fullmatch=True),
        st.from_regex(r"throttled_(usec|time) ?.{0,30}", fullmatch=True),
        st.from_regex(r"cpu MHz\s*: ?([0-9.e+-]{0,12}|nan|inf)", fullmatch=True),
    ),
    max_size=8,
).map("\n".join)


@settings(deadline=None)
@given(lines)
def test_whatever_the_kernel_says_gives_counts_or_nothing(text):
    """Garbage is None or a finite number of seconds, never negative, never an exception."""
    busy, steal = processor_seconds(text, range(1000))
    for figure in (busy, steal, throttled_seconds(text), mean_megahertz(text), process_seconds(text)):
        assert figure is None or 0 <= figure < 1e30


counts = st.none() | st.floats(0, 1e9)


def readings():
    """Two readings of any content."""
    return st.builds(
        Counters,
        at=st.floats(0, 1e9),
        own=st.floats(0, 1e9),
        cores=st.integers(1, 512),
        busy=counts,
        steal=counts,
        throttled=counts,
        megahertz=counts,
    )


@settings(deadline=None)
@given(readings(), readings())
def test_what_lies_between_two_readings_is_never_negative(before, after):
    """Counters that go back, as some do, are no time at all; what is known on one side only is unknown."""
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
    """Of three seconds of busy cores, two were this process's."""
    before = Counters(at=50.0, own=10.0, cores=2, busy=100.0, steal=1.0)
    after = Counters(at=52.0, own=12.0, cores=2, busy=103.0, steal=1.5)
    found = between(before, after, seconds=2.0)
    assert found["foreign_cpu_seconds"] == 1.0
    assert found["steal_seconds"] == 0.5


def test_a_slice_has_its_part_of_what_lies_between_the_readings():
    """Where half of the time was not timed, half of what others took is the slice's; never more than all."""
    before, after = (Counters(at=at, own=0.0, cores=2, busy=at, throttled=at) for at in (50.0, 54.0))
    assert between(before, after, seconds=2.0)["foreign_cpu_seconds"] == 2.0
    assert between(before, after, seconds=2.0)["throttled_seconds"] == 2.0
    assert between(before, after, seconds=9.0)["foreign_cpu_seconds"] == 4.0


def test_a_living_child_is_ones_own():
    """What a child that still lives has taken is counted as this process's, before and after its end."""
    busy = (
        "import sys, time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\nsys.stdin.read()"
    )
    before = read_counters().own
    own_before = sum(os.times()[:4])
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        grown = read_counters().own - before - (sum(os.times()[:4]) - own_before)
        child.stdin.close()
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
        pytest.skip("this kernel does not list children")
    assert grown >= 0.25
    assert read_counters().own - before >= 0.25


def test_this_machine_can_be_read():
    """The real files make sense: the cores are this process's, and time does not go back."""
    first, second = read_counters(), read_counters()
    assert first.cores == available_cores()
    assert first.own <= second.own
    if first.busy is not None:
        assert first.busy <= second.busy


@pytest.mark.parametrize(("quota", "cores"), [("100000", 1), ("150000", 2), ("50000", 1)])
def test_under_a_quota_nobody_knows_what_others_take(tmp_path, monkeypatch, quota, cores):
    """A container with some cores' time of many, whole ones or not: the neighbours' load on all is none of its."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(telemetry, "CGROUP_ROOT", tmp_path)
    stat = telemetry._text(telemetry.PROC_ROOT / "stat")
    assert processor_seconds(stat, {0})[0] is not None
    assert (read_counters().cores, read_counters().busy is None) == (2, False)
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert (read_counters().cores, read_counters().busy is None) == (2, False)
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    counters = read_counters()
    assert (counters.cores, counters.busy, counters.steal) == (cores, None, None)


def test_a_machine_that_shows_nothing_leaves_nothing_but_ones_own(tmp_path, monkeypatch):
    """Without /proc and control groups all else is None, and nothing fails."""
    for name in ("PROC_ROOT", "CGROUP_ROOT", "CPU_ROOT"):
        monkeypatch.setattr(telemetry, name, tmp_path)
    telemetry._throttling_files.cache_clear()
    try:
        counters = read_counters()
    finally:
        telemetry._throttling_files.cache_clear()
    assert (counters.busy, counters.steal, counters.throttled, counters.megahertz) == (None,) * 4


def test_scaled_clock_rates_are_read_core_by_core(tmp_path, monkeypatch):
    """Kilohertz of each core that may be used; /proc/cpuinfo is not asked."""
    monkeypatch.setattr(telemetry, "CPU_ROOT", tmp_path)
    for core, kilohertz in ((0, 1_000_000), (1, 3_000_000), (2, 9_000_000)):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{kilohertz}\n")
    assert telemetry._megahertz({0, 1}) == 2000.0


SIZE = 64 << 20


def test_memory_that_is_written_to_counts_and_counts_no_more_when_given_back():
    """64 MiB of anonymous memory show up, and are gone when it is unmapped."""
    before = host_bytes()
    block = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"x" * SIZE)
    grown = host_bytes()
    block.close()
    assert grown - before > 0.9 * SIZE
    assert host_bytes() - before < 0.1 * SIZE
    assert peak_host_bytes() >= grown


def test_files_that_are_mapped_do_not_count(tmp_path):
    """Pages of a file can be had back: reading a data set by mmap is no leak."""
    file = tmp_path / "data"
    file.write_bytes(b"x" * SIZE)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = host_bytes()
        assert sum(mapped[at] for at in range(0, SIZE, mmap.PAGESIZE)) > 0
        assert host_bytes() - before < 0.1 * SIZE
