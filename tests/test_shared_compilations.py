"""What the search compiles is loaded by its later processes; where that fails, a trial compiles for itself."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_runs import (
    A100,
    BASELINE,
    MACHINE,
    a_record,
    a_warm_up,
    an_invocation,
    on_disk,
    run_on,
    simulated_trials,
)

from autotune.data.facts import GpuUse
from autotune.data.record import Outcome, Phase, Place, ProcessLog
from autotune.recipe import compiled
from autotune.recipe.compiled import SharedCompilations
from autotune.runtime.executor import TrialFailed
from autotune.space.space_file import SearchSpace
from autotune.space.variables import caches_in
from autotune.tuning import costs
from autotune.tuning.comparison import MeasuredProcess
from autotune.tuning.events import Notice
from autotune.tuning.trial import Trial
from autotune.tuning.tune import tune_with

XLA = BASELINE.replace(jit_compile=True)
HERE = Place(seat="local", host="here")
SPACE = """
schema_version = 1
[knobs.prefetch]
kind = "categorical"
choices = [0, 2]
"""


class Machine:
    """Simulated trials, whose processes compile what no earlier one has, or fail as the test says."""

    def __init__(self, path, *, machine=MACHINE, **settings):
        self.trials = simulated_trials(lambda configuration: 4000.0, **settings)
        self.trials.open()
        self.said, self.launched = [], []
        self.run = run_on(self.trials, path)
        self.run.baseline = XLA
        self.run.shared = SharedCompilations(path, machine, self.said.append)
        self.fail = lambda timing: None
        self.trials.on_launch = self.compile

    def compile(self, trial):
        folder, size = trial.timing.compiled, trial.configuration.batch_size
        self.launched.append(folder)
        self.trials.start_seconds = 2.0
        if folder and not (program := Path(folder, f"{size}.pb")).exists():
            program.write_bytes(b"machine code")
            self.trials.start_seconds = 20.0
        self.fail(trial.timing)

    def start(self, number=5, **changes):
        """Start a process of a search trial; return it with its trial."""
        trial = Trial(number, Phase.SEARCH, XLA.replace(**changes))
        process = MeasuredProcess(
            run=self.run, trial=trial, seat="simulated", start_timeout=90.0, shares_compilations=True
        )
        process.start()
        return process, trial


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({"prefetch": 2, "data_threads": 4, "batch_size": 64}, True),  # the program itself shows another batch size
        ({"onednn": False}, False),
        ({"intra_op_threads": 1}, False),
    ],
)
def test_what_decides_how_xla_compiles_has_a_folder_of_its_own(machine, changes, shares):
    shared = machine.run.shared
    first, second = shared.folder_for(XLA, HERE), shared.folder_for(XLA.replace(**changes), HERE)
    assert (first == second) is shares


def test_flags_and_devices_have_folders_of_their_own(machine, monkeypatch):
    shared = machine.run.shared
    folders = {shared.folder_for(XLA, place) for place in (HERE, HERE.model_copy(update={"devices": ("GPU-1",)}))}
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    folders.add(shared.folder_for(XLA, HERE))
    assert len(folders) == 3


@pytest.mark.parametrize(
    ("configuration", "gpus", "shares"),
    [
        (XLA, (), True),
        (BASELINE, (), False),  # it compiles nothing
        (XLA, (A100,), True),
        (BASELINE.replace(jit_compile="auto"), (A100,), True),
        (BASELINE.replace(jit_compile="auto"), (), False),
    ],
)
def test_only_processes_that_compile_share(tmp_path, configuration, gpus, shares):
    shared = SharedCompilations(tmp_path, MACHINE.model_copy(update={"gpus": gpus}), print)
    assert bool(shared.folder_for(configuration, HERE)) is shares


def test_a_process_loads_what_another_has_compiled(machine):
    starts = [
        machine.start(number, **changes)[1] for number, changes in enumerate(({}, {"prefetch": 2}, {"batch_size": 64}))
    ]
    assert [trial.processes[0].saved_seconds for trial in starts] == [None, pytest.approx(18.0, abs=0.1), None]
    assert len(set(machine.launched)) == 1


def test_a_damaged_file_is_compiled_again_and_that_is_said(machine):
    machine.start()
    (file,) = Path(machine.launched[0]).iterdir()
    file.write_bytes(b"machine cod?")
    _, trial = machine.start()
    assert trial.processes[0].saved_seconds is None
    assert file.read_bytes() == b"machine code"
    assert "damaged" in machine.said[-1]


def test_a_crash_with_what_was_loaded_costs_no_candidate(machine):
    def crash(timing):
        if timing.compiled:
            raise TrialFailed(Outcome.CRASHED, "SIGILL")

    machine.start()
    machine.fail = crash
    _, trial = machine.start()
    machine.start()
    assert machine.launched[1] == machine.launched[0] != ""
    assert machine.launched[2:] == ["", ""]
    assert trial.instances == 1
    assert "SIGILL" in machine.said[-1]
    assert sum("compile for themselves" in text for text in machine.said) == 1


def test_a_failure_of_the_candidate_itself_stands(machine):
    def crash(timing):
        raise TrialFailed(Outcome.CRASHED, "SIGSEGV")

    machine.start()
    machine.fail = crash
    with pytest.raises(TrialFailed, match="SIGSEGV"):
        machine.start()
    machine.fail = lambda timing: None
    assert machine.start()[1].processes[0].saved_seconds > 0


@pytest.mark.parametrize("names_file", [True, False])
def test_a_full_disk_is_no_want_of_memory(machine, names_file):
    def fill(timing):
        if timing.compiled:
            where = "/somewhere/xla_compile_cache__1__2.pb.tmp" if names_file else "the tensor"
            raise TrialFailed(Outcome.OOM, f"ResourceExhaustedError: {where}; No space left on device")

    machine.fail = fill
    if names_file:
        assert machine.start()[1].instances == 1
    else:
        with pytest.raises(TrialFailed):
            machine.start()


def test_what_somebody_else_has_put_there_is_not_loaded(machine, tmp_path):
    (tmp_path / "scratch-compiled").mkdir()
    machine.start()
    assert machine.launched == [""]


def test_no_more_is_kept_than_fits(machine, monkeypatch):
    machine.start()
    monkeypatch.setattr(compiled, "MOST_SHARED_BYTES", 8)
    assert machine.start()[1].processes[0].saved_seconds is None


def test_what_was_compiled_beside_foreign_work_is_forgotten(tmp_path):
    here = MACHINE.model_copy(update={"gpus": (A100,)})
    machine = Machine(tmp_path, machine=here, gpus=("NVIDIA A100",), cards=lambda *_: (GpuUse(others=0),))
    process, _ = machine.start()
    kept = Path(machine.launched[0])
    process.slice(0.5)
    assert len(os.listdir(kept)) == 1
    process, _ = machine.start(batch_size=64)
    measured = process.live.measure(0.5, 9.0).model_copy(update={"gpus": (GpuUse(others=1),)})
    process.live.measure = lambda *_: measured
    process.slice(0.5)
    assert os.listdir(kept) == [f"{XLA.batch_size}.pb"]


def test_the_plan_counts_what_a_confirmation_compiles_itself():
    log = ProcessLog(
        **{name: getattr(a_warm_up(), name) for name in ("launch_seconds", "first_step_seconds", "ready_seconds")},
        timed_by="steps",
        warmup_seconds=1.0,
        compile_seconds=1.0,
        saved_seconds=30.0,
    )
    records = [
        a_record(first_step_seconds=1.5, processes=(kept,))
        for kept in (log, log.model_copy(update={"saved_seconds": None}))
    ]
    assert costs.start_seconds(records[0]) == pytest.approx(costs.start_seconds(records[1]) + 30.0)


def test_xlas_own_results_are_kept_by_one_process_alone():
    assert set(caches_in("/kept", {})) == {"XLA_FLAGS", "TF_XLA_FLAGS"}
    assert caches_in("/kept", {}, "shared") == {"TF_XLA_FLAGS": "--tf_xla_persistent_cache_directory=/kept"}


def test_a_run_removes_what_it_shared_and_confirms_without(tmp_path):
    notices = []
    with on_disk(tmp_path / "run") as directory:
        trials = simulated_trials(lambda configuration: 6000.0 if configuration.get("prefetch") else 4000.0, noise=0.02)
        trials.keeps_files, trials.jit_resolves_to = True, True
        phases = {}
        trials.on_launch = lambda trial: phases.setdefault(Path(trial.log).parent.name, []).append(
            trial.timing.compiled
        )
        invocation = an_invocation(trials, directory, observe=notices.append, budget=120.0)
        tune_with(replace(invocation, shares_compilations=True), SearchSpace.parse(SPACE, source="test.toml"))
        records = {f"{record.trial:04d}": record for record in directory.read_trials(check=lambda record, file: None)}
    shared = {name for name, folders in phases.items() if any(folders)}
    assert {records[name].phase for name in shared} == {Phase.SEARCH}
    assert Phase.CONFIRM in {record.phase for record in records.values()}
    assert not (tmp_path / "run" / "scratch-compiled").exists()
    assert not any("compile for themselves" in event.text for event in notices if isinstance(event, Notice))
