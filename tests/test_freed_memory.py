"""Memory that glibc keeps for the next step: what the knob sets, where it cannot, and where it is tried."""

import subprocess
import sys
from unittest import mock

import pytest
from simulated_runs import a_record, a_slice, on_disk, simulated_trials, space_of, tune_simulated
from test_expectations import context_of

from autotune.data.errors import ApplyError, SearchSpaceError
from autotune.recipe import apply
from autotune.space import freed_memory
from autotune.tuning.candidates import neighbours

STEPS = """
import ctypes, resource, sys
from autotune.space import freed_memory

freed_memory.keep(None, sys.argv[1])
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.memset.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
libc.free.argtypes = (ctypes.c_void_p,)
for _ in range(4):
    block = libc.malloc(40 << 20)
    libc.memset(block, 1, 40 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
SPACE = '[knobs.keep_freed_memory]\nkind = "categorical"\nchoices = ["none", "thresholds", "one_arena"]\n'


@pytest.fixture
def libc(monkeypatch):
    """A C library that takes every call, and a process without a value."""
    library = mock.Mock(mallopt=mock.Mock(return_value=1))
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(freed_memory, "WHY_NOT", "")
    monkeypatch.setattr(freed_memory, "in_force", "none")
    return library


@pytest.mark.skipif(bool(freed_memory.WHY_NOT), reason=freed_memory.WHY_NOT)
def test_kept_memory_is_not_faulted_in_again():
    run = [sys.executable, "-c", STEPS]
    faults = [int(subprocess.check_output([*run, value])) for value in ("none", "thresholds", "one_arena")]
    assert faults[0] - max(faults[1:]) > 2 * (40 << 20) // 4096, "of four blocks, three come back"


def test_each_value_makes_its_calls_for_good(libc):
    freed_memory.keep(None, "one_arena")
    assert [call.args for call in libc.mallopt.call_args_list] == [(-3, 1 << 30), (-1, (1 << 31) - 1), (-8, 1)]
    with pytest.raises(ApplyError, match="this process has one_arena for good"):
        freed_memory.keep(None, "none")


def test_what_cannot_act_is_an_error(libc, monkeypatch):
    libc.mallopt.return_value = 0
    with pytest.raises(ApplyError, match=r"keep_freed_memory=thresholds cannot act: mallopt\(-3, 1073741824\) fails"):
        freed_memory.keep(None, "thresholds")
    assert freed_memory.in_force == "none"
    monkeypatch.setattr(apply, "runtime_has_started", lambda: True)
    monkeypatch.setattr(apply, "_too_late", ApplyError)
    with pytest.raises(ApplyError, match="keep_freed_memory=one_arena"):
        apply.apply_before_build({"keep_freed_memory": "one_arena"})
    assert libc.mallopt.call_count == 2


@pytest.mark.parametrize(("faults", "tried"), [(50_000, {"thresholds", "one_arena"}), (200, set()), (None, set())])
def test_it_is_tried_where_page_faults_take_much_of_a_step(faults, tried):
    space = space_of(f"schema_version = 1\n{SPACE}")
    slices = (a_slice().model_copy(update={"page_faults": faults and 20 * faults, "steps": 20}),)
    found = neighbours(space.baseline, space, context_of(a_record(slices=slices)))
    assert {each["keep_freed_memory"] for each in found} == tried


def test_another_c_library_leaves_it_out_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(freed_memory, "WHY_NOT", "the C library is not glibc")
    trials = simulated_trials(lambda configuration: 4000.0)
    with on_disk(tmp_path / "run") as directory, pytest.raises(SearchSpaceError) as caught:
        tune_simulated(trials, directory, space=f"schema_version = 1\n{SPACE}", budget=60.0)
    assert "keep_freed_memory: the C library is not glibc" in caught.value.hint
