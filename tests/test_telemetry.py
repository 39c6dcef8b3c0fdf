"""What a process reads of itself."""

import mmap

from autotune.trial.telemetry import host_bytes, peak_host_bytes

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
