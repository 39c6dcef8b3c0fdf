"""A workload whose import finds no memory: the error names memory."""

import pytest
from fault_table import CGROUP_VARIABLE

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
