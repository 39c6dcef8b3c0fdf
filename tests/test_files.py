"""Files that are never seen half-written, and files that are read with care."""

import errno
import os
import stat
from pathlib import Path

import pytest

from autotune.data.errors import RunDirectoryError
from autotune.data.files import is_utf8, read_at_most, write_atomically


def test_text_is_in_a_file_as_utf_8_and_bytes_as_they_are(tmp_path):
    for content in ("größer\r\n→ 2×\n", b"PAR1\xff\r\n\x00"):
        write_atomically(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == (content.encode() if isinstance(content, str) else content)


def test_a_bare_name_is_written_in_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_atomically(Path("recipe.json"), "text")
    assert (tmp_path / "recipe.json").read_text() == "text"


def test_the_text_is_on_the_disk_before_the_file_takes_its_name(tmp_path, monkeypatch):
    target = tmp_path / "recipe.json"
    target.write_text("old")
    events = []
    usual_fsync, usual_replace = os.fsync, os.replace

    def fsync(descriptor):
        events.append(("fsync", os.fstat(descriptor).st_size, target.read_text()))
        usual_fsync(descriptor)

    def replace(source, destination):
        events.append(("replace", os.stat(source).st_size, target.read_text()))
        usual_replace(source, destination)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_atomically(target, "renewed")
    assert events == [("fsync", 7, "old"), ("replace", 7, "old")]
    assert target.read_text() == "renewed"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_file_has_the_permissions_of_any_new_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "recipe.json", "text")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "recipe.json").stat().st_mode) == 0o666 & ~mask


def test_a_missing_directory_is_named_with_the_callers_next_step(tmp_path):
    target = tmp_path / "gone" / "recipe.json"
    with pytest.raises(RunDirectoryError) as caught:
        write_atomically(target, "text", hint="Give another file.")
    assert caught.value.message == f"cannot write {target}: No such file or directory"
    assert caught.value.hint == "Give another file."


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("call", "failure", "error"),
    [
        ("fsync", FULL, RunDirectoryError),
        ("replace", FULL, RunDirectoryError),
        ("fsync", KeyboardInterrupt(), KeyboardInterrupt),
        ("fsync", SystemExit(), SystemExit),
    ],
)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call, failure, error):
    target = tmp_path / "recipe.json"
    target.write_text("old")

    def fail(*arguments):
        raise failure

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(error) as caught:
        write_atomically(target, "new")
    assert str(failure).partition("] ")[2] in str(caught.value)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["recipe.json"]


def test_write_refuses_a_directory_in_place_of_the_file(tmp_path):
    (tmp_path / "recipe.json").mkdir()
    with pytest.raises(RunDirectoryError, match="Is a directory"):
        write_atomically(tmp_path / "recipe.json", "text")
    assert os.listdir(tmp_path) == ["recipe.json"]


def test_text_that_cannot_be_encoded_leaves_nothing_behind(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "recipe.json", "\ud800")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed_and_stays(tmp_path, there):
    (tmp_path / "real").mkdir()
    if there:
        (tmp_path / "real" / "recipe.json").write_text("a much longer text than the new one")
    (tmp_path / "link").symlink_to("real/recipe.json")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").readlink() == Path("real/recipe.json")
    assert (tmp_path / "real" / "recipe.json").read_text() == "new"
    assert os.listdir(tmp_path / "real") == ["recipe.json"]


def test_a_pipe_is_written_to_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "link", "größer\n")
    assert os.read(reader, 100) == "größer\n".encode()
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
    os.close(reader)


def test_a_device_is_written_to_and_stays(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    write_atomically(tmp_path / "null", "text")
    assert (tmp_path / "null").is_char_device()
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        write_atomically(tmp_path / "full", "text")
    assert (tmp_path / "full").is_char_device()


# ------------------------------------------------------------------------------------------------- reading


def test_no_more_is_read_than_one_byte_over_the_limit(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(b"12345")
    assert read_at_most(file, 5) == b"12345"
    assert read_at_most(file, 3) == b"1234"


def test_a_byte_order_mark_is_read_over(tmp_path):
    (tmp_path / "data").write_text("12345", encoding="utf-8-sig")
    assert read_at_most(tmp_path / "data", 50) == b"12345"


def test_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for file in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null")):
        with pytest.raises(OSError, match="a pipe or a device"):
            read_at_most(file, 10)


def test_names_that_are_not_utf_8_are_known(tmp_path, monkeypatch):
    assert is_utf8(Path("größe/x"))
    assert not is_utf8(Path("a/\udcff"))
    (tmp_path / "\udcff").mkdir()
    monkeypatch.chdir(tmp_path / "\udcff")
    assert not is_utf8(Path("x"))
