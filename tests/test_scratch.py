"""Temporary directories of processes that were killed are removed by the next one; those in use stay."""

import os
import subprocess
import sys
import tempfile

import pytest

from autotune.data.files import make_scratch

HOLD = """
import sys
from autotune.data.files import make_scratch
print(make_scratch("autotune-test-"), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, monkeypatch, killed):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (target := tmp_path / "target").mkdir()
    (foreign := tmp_path / "autotune-test-of-mine").mkdir()
    (tmp_path / "autotune-test-link").symlink_to(target)
    (tmp_path / "autotune-test-file").write_text("")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        held = process.stdout.readline().strip()
        if killed:
            process.terminate()
            process.wait()
        own = make_scratch("autotune-test-")
        process.kill()
    assert os.path.exists(held) is not killed
    assert own.stat().st_mode & 0o077 == 0
    assert target.exists()
    assert foreign.exists(), "it is nobody's scratch"
    assert (tmp_path / "autotune-test-file").exists()
