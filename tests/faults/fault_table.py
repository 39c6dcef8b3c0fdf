"""The faults: what each is called, what must come of it. Imports no TensorFlow: tests and the benchmark read it too.

Which fault a trial of `faulty.py` has is its batch size. How it is injected stands there, by the same name.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.data.record import Outcome

WORKLOAD = Path(__file__).with_name("faulty.py")
BASELINE_BATCH_SIZE = 16
CGROUP_VARIABLE = "AUTOTUNE_FAULTS_CGROUP"
CGROUP_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way for a trial to go wrong.

    Args:
        name: What the workload calls it.
        outcome: How its trial must end.
        words: What the reason must contain.
        seconds: The time limit under which a trial that hangs is run; None for one that ends by itself.
        cgroup: Whether it needs a memory limit that only root may set.
        compiled: Whether it needs XLA.
    """

    name: str
    outcome: Outcome
    words: str = ""
    seconds: float | None = None
    cgroup: bool = False
    compiled: bool = False

    @property
    def late(self) -> bool:
        """Whether it comes in a slice."""
        return self.name.endswith("_late")


FAULTS = (
    Fault(name="raises_in_model", outcome=Outcome.ERROR, words="KeyError: 'missing column'"),
    Fault(name="raises_in_dataset", outcome=Outcome.ERROR, words="KeyError: 'missing column'"),
    Fault(name="raises_in_train_step", outcome=Outcome.ERROR, words="KeyError: 'missing column'"),
    Fault(name="raises_in_pipeline_late", outcome=Outcome.ERROR, words="missing column"),
    Fault(name="segfaults", outcome=Outcome.CRASHED, words="killed by SIGSEGV"),
    Fault(name="segfaults_late", outcome=Outcome.CRASHED, words="killed by SIGSEGV"),
    Fault(name="aborts", outcome=Outcome.CRASHED, words="killed by SIGABRT"),
    Fault(name="exits", outcome=Outcome.CRASHED, words="ended with exit status 7"),
    Fault(name="is_killed_late", outcome=Outcome.CRASHED, words="killed by SIGKILL"),
    Fault(
        name="fails_a_check", outcome=Outcome.CRASHED, words="Unknown flag in XLA_FLAGS: --no_such_flag", compiled=True
    ),
    Fault(name="exceeds_cgroup", outcome=Outcome.OOM, words="killed by the kernel: out of memory", cgroup=True),
    Fault(name="exceeds_rlimit", outcome=Outcome.OOM, words="out of host memory"),
    Fault(name="exceeds_rlimit_in_pipeline", outcome=Outcome.OOM, words="MemoryError"),
    Fault(name="exceeds_rlimit_in_cpp", outcome=Outcome.OOM, words="killed by SIGABRT: what():  std::bad_alloc"),
    Fault(name="exhausts_tensors", outcome=Outcome.OOM, words="OOM when allocating tensor"),
    Fault(name="hangs_in_python", outcome=Outcome.TIMEOUT, words="while building the model", seconds=3.0),
    Fault(name="hangs_holding_the_gil", outcome=Outcome.TIMEOUT, words="while building", seconds=3.0),
    Fault(
        name="hangs_in_compile", outcome=Outcome.TIMEOUT, words="which traces and compiles", seconds=5.0, compiled=True
    ),
    Fault(name="hangs_in_pipeline", outcome=Outcome.TIMEOUT, words="in the first step", seconds=5.0),
    Fault(name="hangs_in_pipeline_late", outcome=Outcome.TIMEOUT, words="in a slice", seconds=2.0),
    Fault(name="hangs_with_a_family", outcome=Outcome.TIMEOUT, words="while building", seconds=3.0),
    Fault(name="is_nan", outcome=Outcome.NONFINITE, words="the training loss became nan by step 1"),
    Fault(name="becomes_inf_late", outcome=Outcome.NONFINITE, words="the training loss became"),
    Fault(name="sends_garbage", outcome=Outcome.CRASHED, words="sent something that is no report: not a message"),
    Fault(name="sends_half_a_message", outcome=Outcome.CRASHED, words="got end of file during message"),
    Fault(name="sends_too_much", outcome=Outcome.CRASHED, words="bad message length"),
    Fault(name="kills_its_template", outcome=Outcome.CRASHED, words="its template process died (killed by SIGKILL)"),
    Fault(name="kills_its_supervisor", outcome=Outcome.CRASHED, words="its template process died (killed by SIGKILL)"),
    Fault(name="prints_gigabytes", outcome=Outcome.OK),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
BATCH_SIZES = {fault.name: BASELINE_BATCH_SIZE + 1 + index for index, fault in enumerate(FAULTS)}
BY_BATCH_SIZE = {size: name for name, size in BATCH_SIZES.items()}


def witness(log: Path) -> dict[str, object]:
    """What a trial said about its fault just before it was injected, beside its log; empty when it never was."""
    with contextlib.suppress(OSError, json.JSONDecodeError):
        said: dict[str, object] = json.loads((log.parent / "witness.json").read_text())
        return said
    return {}


@contextlib.contextmanager
def memory_cgroup() -> Iterator[Path | None]:
    """A control group with a memory limit, named in the environment for trials to join; None where none can be made."""
    place, limit = _own_cgroup()
    group = place / f"autotune-faults-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        (group / limit).write_text(str(CGROUP_BYTES))
        os.environ[CGROUP_VARIABLE] = str(group)
        yield group
    except OSError:
        yield None
    finally:
        os.environ.pop(CGROUP_VARIABLE, None)
        with contextlib.suppress(OSError):
            group.rmdir()


def _own_cgroup() -> tuple[Path, str]:
    """This process's memory control group, and the name of the file that limits one below it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
    return Path("/sys/fs/cgroup"), "memory.max"
