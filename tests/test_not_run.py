"""Tests that were not run are no failures that may be tried again: the runner's exit status tells them apart."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FAILS = "def test_fails():\n    raise AssertionError\n"
DIES = "import os\n\ndef test_dies():\n    os.kill(os.getpid(), 9)\n"


@pytest.mark.parametrize(
    ("other", "status"),
    [("", 1), ("raise RuntimeError\n", 3), (DIES, 3)],
    ids=["fails", "is not collected", "kills its worker"],
)
def test_a_failure_is_told_from_tests_that_were_not_run(tmp_path, other, status):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_one.py").write_text(FAILS, encoding="utf-8")
    (tmp_path / "test_other.py").write_text(other, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", "--max-worker-restart", "0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stdout
