"""A workload whose import finds no memory: the error names memory, and the exit code is the baseline's."""

import os
import subprocess
import sys

import pytest
from fault_table import CGROUP_VARIABLE
from real_trials import REPOSITORY

from autotune.data.errors import NoStableConfigurationError
from autotune.data.facts import WorkloadReference
from autotune.runtime.local import LocalExecutor

RAISES = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
TABLE = bytearray(16 << 30)
"""
REFUSES = "raise OSError(12, 'Cannot allocate memory')"
ABORTS = """
import os, sys
sys.stderr.write("terminate called after throwing an instance of 'std::bad_alloc'\\n  what():  std::bad_alloc\\n")
sys.stderr.flush()
os.abort()
"""
IS_KILLED = f"""
import os
from pathlib import Path
(Path(os.environ["{CGROUP_VARIABLE}"]) / "cgroup.procs").write_text(str(os.getpid()))
TABLE = bytearray(1 << 30)
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [(RAISES, "MemoryError"), (REFUSES, "Cannot allocate memory"), (ABORTS, "SIGABRT"), (IS_KILLED, "SIGKILL")],
)
def test_an_import_without_memory_is_told_as_such(tmp_path, cgroup, source, said):
    if source is IS_KILLED and cgroup is None:
        pytest.skip("no control group can be made here")
    (tmp_path / "train.py").write_text(source)
    reference = WorkloadReference(file=str(tmp_path / "train.py"), search_path=(str(tmp_path),))
    with (
        LocalExecutor(reference, logs=tmp_path) as processes,
        pytest.raises(NoStableConfigurationError, match="memory ran out while the workload was imported") as caught,
    ):
        processes.open()
    assert said in caught.value.message
    assert "GiB here" in caught.value.hint
    assert "ulimit -v" in caught.value.hint
    assert len(list(tmp_path.glob("template-*.log"))) == 1, "what finds no memory is not tried twice"


def test_a_limit_below_what_tensorflow_needs_leaves_with_3(tmp_path):
    (tmp_path / "train.py").write_text("import autotune, tensorflow")
    tune = f"ulimit -v 600000; exec {sys.executable} -m autotune tune train.py --out run"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        ["bash", "-c", tune], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 3
    assert "autotune: memory ran out while the workload was imported: " in ended.stderr
    assert "It may use 0.6 GiB here" in ended.stderr
