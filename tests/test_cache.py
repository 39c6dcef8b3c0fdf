"""Where a cache that a trial or a long run adds is kept."""

import tempfile
from types import SimpleNamespace

import pytest
from test_dataset_trace import SITE

from autotune.data import files
from autotune.data.errors import ApplyError
from autotune.data.files import free_on_local_disk
from autotune.script import interpose
from autotune.script.interpose import Hooks, Wrappers
from autotune.script.settings import Settings

MAP = SITE.model_copy(update={"call": "map"})


class Mapped:
    """A dataset that says where it is cached."""

    def cache(self, file):
        """The file."""
        return file


def cached_in(file_bytes, folder, *, site=MAP):
    """The file of a cache behind the script's `map`; the dataset itself where there is none."""
    settings = Settings(
        changes={"cache": True}, own={"cache": False}, sites={"cache": {MAP.key}}, cache_file_bytes=file_bytes
    )
    bound = SimpleNamespace(arguments={}, args=(), kwargs={})
    return Wrappers(settings, Hooks(), "", folder)._call_dataset("num_parallel_calls", Mapped, site, bound)


def test_it_stays_in_memory_where_there_is_room(tmp_path):
    assert cached_in(0, tmp_path / "scratch") == ""
    assert isinstance(cached_in(0, tmp_path, site=MAP.model_copy(update={"line": 8, "order": 5})), Mapped)
    assert list(tmp_path.iterdir()) == []


def test_a_flat_map_is_cached_at_its_line(tmp_path):
    settings = Settings(changes={"cache": True}, own={"cache": False}, sites={"cache": {MAP.key}})
    bound = SimpleNamespace(arguments={}, args=(), kwargs={})
    wrappers = Wrappers(settings, Hooks(), "", tmp_path)
    assert wrappers._flat_map(Mapped, MAP, bound) == ""
    assert isinstance(wrappers._flat_map(Mapped, MAP.model_copy(update={"order": 5}), bound), Mapped)


def test_each_file_is_new_and_lies_in_the_trials_folder(tmp_path):
    first, second = (cached_in(1 << 40, tmp_path / "scratch") for _ in range(2))
    assert first != second
    assert {tmp_path / "scratch"} == {files.Path(file).parents[1] for file in (first, second)}


@pytest.mark.parametrize("free", [100, 300])
def test_a_run_needs_twice_the_room_on_a_local_disk(tmp_path, monkeypatch, free):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(interpose, "free_on_local_disk", lambda folder: free)
    if free > 200:
        assert cached_in(100, None).startswith(str(tmp_path))
        return
    with pytest.raises(ApplyError, match=r"needs a file of .*, and twice that is not free") as caught:
        cached_in(100, None)
    assert "TMPDIR" in caught.value.hint


@pytest.mark.parametrize(("kind", "counts"), [("ext4", True), ("overlay", True), ("tmpfs", False), ("nfs4", False)])
def test_only_a_local_disk_has_room(tmp_path, monkeypatch, kind, counts):
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(tmp_path), fstype=kind)]
    monkeypatch.setattr(files.psutil, "disk_partitions", lambda all: mounts)
    (folder := tmp_path / "run").mkdir()
    assert (free_on_local_disk(folder) > 0) is counts
