"""What XLA compiled for a winner: it is kept beside the recipe, and loaded only where this user's run has made it."""

import dataclasses
import json
import os
import shutil

import pytest
from simulated_runs import (
    A100,
    BASELINE,
    MACHINE,
    Watcher,
    a_record,
    an_invocation,
    on_disk,
    run_on,
    simulated_trials,
    space,
    tune_simulated,
)
from test_folders import a_recipe
from test_kind import H200, a_machine

from autotune.data import files
from autotune.data.record import Outcome, Phase
from autotune.data.run_directory import RunDirectory
from autotune.machine.gpu import can_keep_compilations
from autotune.recipe import compiled
from autotune.recipe import recipe as recipe_module
from autotune.recipe.compiled import ConfirmedCompilations, keep_compiled, load_compiled, open_folder
from autotune.recipe.evidence import Confirmation
from autotune.recipe.recipe import Recipe, read_recipes
from autotune.runtime.executor import TrialFailed
from autotune.stats.deciding import ClaimResult
from autotune.tuning import run_setup
from autotune.tuning.comparison import MeasuredProcess, own_compilations
from autotune.tuning.events import Notice
from autotune.tuning.trial import Trial
from autotune.tuning.verify import verify_with

HERE = a_machine(H200, driver="580.1")
FILES = {"autotuned.txt": b"results { }", "xla__1.pb": b"\x0a\x01machine code"}


def recipe_of_trial(number=5, machine=HERE, **changes):
    """A recipe whose claim is from this trial."""
    confirmed = Confirmation(
        processes=2, pairs=9, leaders=1, confidence=0.97, pairing="alternating", trials=(4, number)
    )
    return a_recipe(machine, evidence={"confirmation": confirmed}, **changes)


RECIPE = recipe_of_trial()


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    """A home directory of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def compile_in(run, trial, process, files=FILES):
    """Do as a process of a trial that compiles."""
    (folder := run / "trials" / f"{trial:04d}").mkdir(parents=True, exist_ok=True)
    opened = open_folder(folder, process)
    for name, content in files.items():
        with open(os.path.join(opened, name), "wb") as stream:
            stream.write(content)


@pytest.fixture
def run(tmp_path):
    """A run that keeps what trial 5, the winner, compiled in its second process."""
    compile_in(tmp_path / "run", 5, 0, {"old.pb": b"old"})
    compile_in(tmp_path / "run", 5, 1)
    compile_in(tmp_path / "run", 3, 0, {"other.pb": b"other"})
    assert keep_compiled(RECIPE, tmp_path / "run") == ""
    return tmp_path / "run"


def load(recipe, folder, here=HERE):
    """The private copy of what was compiled, and what was said about it."""
    said = []
    return load_compiled(recipe, folder, here, said.append), "".join(said)


def test_the_winners_last_process_is_kept_and_nothing_else(run):
    assert sorted(path.name for path in (run / "compiled").iterdir()) == ["autotuned.txt", "seal.json", "xla__1.pb"]
    assert list(run.glob("trials/*/*")) == []


def test_it_is_loaded_as_a_private_copy(run):
    folder, said = load(RECIPE, run)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert folder.stat().st_mode & 0o077 == 0
    assert f"({run}/compiled)" in said
    assert (folder.parent / files.LOCK).exists(), "one of a killed training is removed by the next (test_scratch.py)"
    files._remove(folder, os.getpid() + 1)
    assert folder.exists(), "a fork that ends removes nothing"
    files._remove(folder, os.getpid())
    assert not folder.exists()


def test_the_key_can_be_read_by_its_owner_alone(run, tmp_path):
    assert (tmp_path / "state" / "autotune" / "key").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "state" / "autotune") == ["key"]


def change_seal(kept, old, new):
    """Edit the seal's text."""
    text = (kept / "seal.json").read_text()
    assert old in text
    (kept / "seal.json").write_text(text.replace(old, new))


def change_mac(kept):
    """Put another code into the seal."""
    seal = json.loads((kept / "seal.json").read_text())
    (kept / "seal.json").write_text(json.dumps({**seal, "mac": "0" * 64}))


SPOILED = {
    "another program": lambda kept: (kept / "xla__1.pb").write_bytes(b"\x0a\x01malicious co"),
    "a program more": lambda kept: (kept / "xla__2.pb").write_bytes(b"malicious"),
    "a program less": lambda kept: (kept / "xla__1.pb").unlink(),
    "a renamed program": lambda kept: (kept / "xla__1.pb").rename(kept / "xla__2.pb"),
    "another seal": lambda kept: change_mac(kept),
    "a seal without meaning": lambda kept: (kept / "seal.json").write_text("{}"),
    "no seal": lambda kept: (kept / "seal.json").unlink(),
    "a link": lambda kept: (kept / "more").symlink_to("/etc/passwd"),
    "a pipe": lambda kept: os.mkfifo(kept / "more"),
    "a file": lambda kept: (shutil.rmtree(kept), kept.write_text("")),
    "another user's key": lambda kept: (kept.parents[1] / "state" / "autotune" / "key").write_bytes(b"k" * 32),
    "no key": lambda kept: (kept.parents[1] / "state" / "autotune" / "key").unlink(),
    "a key that others read": lambda kept: (kept.parents[1] / "state" / "autotune" / "key").chmod(0o644),
}


@pytest.mark.parametrize("how", SPOILED)
def test_foreign_or_altered_compilations_are_refused_with_reason(run, how):
    SPOILED[how](run / "compiled")
    folder, said = load(RECIPE, run)
    assert folder is None
    assert said.startswith(f"{run}/compiled is not used: ")
    assert said.isprintable()


def test_a_copied_run_is_loaded_by_the_same_user(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    assert load(RECIPE, tmp_path / "copy")[0] is not None


@pytest.mark.parametrize(
    "here",
    [
        a_machine(H200, driver="570.9"),
        a_machine(H200, driver="580.1", tensorflow="2.21.1"),
        a_machine(H200, driver="580.1", cpu="other"),
        a_machine(driver="580.1"),
    ],
    ids=["driver", "TensorFlow", "processor", "no GPU"],
)
def test_another_machine_compiles_anew(run, here):
    assert load(RECIPE, run, here) == (None, "")


def test_another_cudnn_compiles_anew(run, tmp_path, monkeypatch):
    (package := tmp_path / "site" / "nvidia_cudnn_cu12-9.9.0.dist-info").mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cudnn-cu12\nVersion: 9.9.0\n")
    for number, text in enumerate((b"", b"Name: \xff\n")):
        (broken := tmp_path / "site" / f"broken{number}-1.dist-info").mkdir()
        (broken / "METADATA").write_bytes(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert load(RECIPE, run) == (None, "")


def test_another_configuration_compiles_anew(run):
    assert load(recipe_of_trial(steps_per_execution=8), run) == (None, "")
    assert load(RECIPE.with_baseline(), run) == (None, "")


def test_a_recipe_without_compilations_says_nothing(tmp_path):
    assert load(RECIPE, tmp_path) == (None, "")


def test_a_seal_for_another_machine_cannot_be_forged(run):
    change_seal(run / "compiled", '"580.1"', '"570.9"')
    assert "is not used" in load(RECIPE, run, a_machine(H200, driver="570.9"))[1]


@pytest.mark.parametrize(("name", "limit"), [("MOST_BYTES", 20), ("MOST_FILES", 1)])
def test_too_much_is_not_kept_and_that_is_said(tmp_path, monkeypatch, name, limit):
    monkeypatch.setattr(compiled, name, limit)
    compile_in(tmp_path, 5, 0)
    assert keep_compiled(RECIPE, tmp_path).startswith("compilations are not kept: ")
    assert list(tmp_path.glob("**/compiled*")) == []


@pytest.mark.parametrize(
    ("content", "mode"), [(b"", 0o600), (b"k" * 31, 0o600), (b"k" * 33, 0o600), (b"k" * 32, 0o644)]
)
def test_a_key_that_cannot_be_used_is_replaced(tmp_path, content, mode):
    (key := tmp_path / "state" / "autotune" / "key").parent.mkdir(parents=True)
    key.write_bytes(content)
    key.chmod(mode)
    compile_in(tmp_path, 5, 0)
    assert keep_compiled(RECIPE, tmp_path) == ""
    assert load(RECIPE, tmp_path)[0] is not None
    assert (key.stat().st_mode & 0o777, os.listdir(key.parent)) == (0o600, ["key"])


def test_nothing_is_kept_without_a_private_key(tmp_path):
    (tmp_path / "state").write_text("")
    compile_in(tmp_path, 5, 0)
    assert f"no private file can be written in {tmp_path}/state/autotune" in keep_compiled(RECIPE, tmp_path)
    assert list(tmp_path.glob("**/compiled*")) == []


@pytest.mark.parametrize("home", [".", None])
def test_a_key_in_the_working_directory_is_nobodys(tmp_path, monkeypatch, home):
    monkeypatch.delenv("XDG_STATE_HOME")
    if home is None:  # a container whose user has no entry and no home
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    else:
        monkeypatch.setenv("HOME", home)
    (there := tmp_path / "there").mkdir()
    monkeypatch.chdir(there)
    compile_in(tmp_path, 5, 0)
    assert "the home directory, which is not known" in keep_compiled(RECIPE, tmp_path)
    assert os.listdir(there) == []


def test_resume_without_a_new_process_keeps_compilations(run):
    assert keep_compiled(RECIPE, run) == ""
    assert load(RECIPE, run)[0] is not None


def test_resume_does_not_seal_files_found_in_the_run_directory(run):
    compile_in(run, 5, 99, {"malicious.pb": b"malicious"})
    with RunDirectory(run).reopen():
        assert keep_compiled(RECIPE, run) == ""
    assert {path.name for path in load(RECIPE, run)[0].iterdir()} == FILES.keys()


@pytest.mark.parametrize("recipe", [recipe_of_trial(7, steps_per_execution=8), RECIPE.with_baseline()])
def test_what_is_of_another_recipe_is_removed(run, recipe):
    assert keep_compiled(recipe, run) == ""
    assert not (run / "compiled").exists()


def test_no_two_processes_share_a_folder(tmp_path):
    compile_in(tmp_path, 5, 0)
    compile_in(tmp_path, 5, 11)
    again = open_folder(tmp_path / "trials" / "0005", 11)
    assert os.listdir(again) == []


# ---------------------------------------------------------------------------------------------- in a run

SPACE = space(cublaslt=[False, True])


GPU_MACHINE = MACHINE.model_copy(update={"gpus": (A100,)})


def trials_on_gpu():
    """Simulated trials on a GPU whose processes compile, and what was launched: log, folder and its use."""
    trials = simulated_trials(
        lambda configuration: 6400.0 if configuration.get("cublaslt") else 4000.0, noise=0.02, gpus=("NVIDIA A100",)
    )
    trials.keeps_files = True
    launched = []

    def compile_program(trial):
        timing = trial.timing
        if timing.compiled_use == "written" and timing.compiled:
            assert os.listdir(timing.compiled) == []
            with open(os.path.join(timing.compiled, "xla.pb"), "w") as stream:
                stream.write(f"{len(launched)}")
        launched.append((trial.log, timing.compiled, timing.compiled_use))

    trials.on_launch = compile_program
    return trials, launched


def run_on_gpu(directory, *, keeps_files=True, has_flags=True, monkeypatch):
    """Tune so; return the recipe, and what was launched."""
    trials, launched = trials_on_gpu()
    trials.keeps_files = keeps_files
    monkeypatch.setattr(run_setup, "can_keep_compilations", lambda names=(): has_flags)
    return tune_simulated(trials, directory, space=SPACE, machine=GPU_MACHINE), launched


@pytest.fixture(scope="module")
def gpu_run(tmp_path_factory):
    """The folder of a run and of its user's key; the recipe, the trials' records, and what was launched."""
    folder = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as monkeypatch, on_disk(folder / "run") as directory:
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        recipe, launched = run_on_gpu(directory, monkeypatch=monkeypatch)
        recipe.save(folder / "run" / "recipe.json")
        records = {record.trial: record for record in directory.read_trials(check=lambda record, file: None)}
    return folder, recipe, records, launched


@pytest.mark.parametrize("carries", [True, False])
def test_verify_measures_the_program_that_the_recipe_carries(tmp_path, monkeypatch, gpu_run, carries):
    shutil.copytree(gpu_run[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(run_setup, "can_keep_compilations", lambda names=(): True)
    if not carries:
        shutil.rmtree(tmp_path / "run" / "compiled")
    recipe, watcher = read_recipes(tmp_path / "run").files[0].recipe, Watcher()
    trials, launched = trials_on_gpu()
    with on_disk(tmp_path / "verified") as directory:
        verification = verify_with(
            an_invocation(trials, directory, machine=GPU_MACHINE, observe=watcher, budget=100.0), recipe
        )
        (leader,) = {
            str(record.trial).rjust(4, "0")
            for record in directory.read_trials(check=lambda record, file: None)
            if record.configuration == dict(recipe.configuration)
        }
    assert verification.finding is ClaimResult.HOLDS
    uses = {(use, os.path.basename(folder)) for log, folder, use in launched if os.path.dirname(log).endswith(leader)}
    assert uses == ({("loaded", "compiled")} if carries else {("written", "")})
    said = [notice.text for notice in watcher.of(Notice) if "loading what XLA compiled" in notice.text]
    assert len(said) == carries


def test_the_long_training_gets_the_program_that_was_measured(gpu_run):
    folder, recipe, records, launched = gpu_run
    run, sides = folder / "run", [f"{trial:04d}" for trial in recipe.evidence.confirmation.trials]
    used = {
        side: [(place, *how) for place, (log, *how) in enumerate(launched) if os.path.dirname(log).endswith(side)]
        for side in sides
    }
    assert {records[int(side)].phase for side in sides} == {Phase.CONFIRM}
    (first, kept, _), *others = used[sides[1]]
    assert [use for *_, use in used[sides[1]]] == ["written", *["loaded"] * len(others)]
    assert {place for _, place, _ in others} == {kept}
    assert (run / "compiled" / "xla.pb").read_text() == f"{first}"
    assert [use for *_, use in used[sides[0]]][:2] == ["written", "written"]  # the user's own run would compile
    assert list(run.glob("trials/*/compiled-*")) == []
    assert any("another compilation" in gap for gap in recipe.evidence.stability.not_checked)
    assert recipe.configuration != dict(BASELINE)


class Confirming:
    """The processes of a leader's trial, and what the user was told."""

    def __init__(self, run):
        self.trial, self.said = run / "trials" / "0005", []
        self.trial.mkdir(parents=True)
        self.compilations = ConfirmedCompilations(self.said.append)

    def start(self, process, most=1, files=FILES):
        """Start one to its first step; return its folder and the seconds that it saved."""
        folder, use = self.compilations.folder_for("leader", most, self.trial, process)
        for name, content in files.items() if use == "written" else ():
            (self.trial / folder / name).write_bytes(content)
        return os.path.basename(folder), self.compilations.note_start(folder, 45.0 if use == "written" else 14.0)


@pytest.fixture
def confirming(tmp_path):
    return Confirming(tmp_path)


@pytest.mark.parametrize("most", [1, 2])
def test_processes_load_what_the_first_ones_have_compiled(confirming, most):
    found = [confirming.start(process, most) for process in range(most + 4)]
    own = [(f"compiled-{process}", None) for process in range(most)]
    assert found == own + [(name, 31.0) for _ in range(4 // most) for name, _ in own]
    assert confirming.compilations.folder_for("baseline", most, confirming.trial, 9)[1] == "written"  # another side


def test_of_two_that_compile_at_once_one_is_kept(confirming, tmp_path):
    meanwhile, _ = confirming.compilations.folder_for("leader", 1, confirming.trial, 0)  # on another seat
    confirming.start(1)
    compile_in(tmp_path, 5, 0)
    assert confirming.compilations.note_start(meanwhile, 45.0) is None
    assert os.listdir(confirming.trial) == ["compiled-1"]
    assert confirming.start(2) == ("compiled-1", 31.0)


def test_a_damaged_program_of_a_leader_is_compiled_again(confirming):
    confirming.start(0)
    (confirming.trial / "compiled-0" / "xla__1.pb").write_bytes(b"machine cod?")
    assert confirming.start(1) == ("compiled-1", None)
    assert "damaged" in confirming.said[-1]
    assert os.listdir(confirming.trial) == ["compiled-1"]


def test_kernels_that_foreign_work_disturbed_are_not_carried(confirming):
    confirming.start(0)
    confirming.compilations.forget_latest(str(confirming.trial / "compiled-0"))
    assert [confirming.start(1)[1], confirming.start(2)[1]] == [None, 31.0]
    confirming.compilations.forget_latest(str(confirming.trial / "compiled-1"))  # of a process that loaded it
    assert confirming.start(3)[1] == 31.0


def test_processes_load_nothing_if_nothing_was_compiled(confirming):
    assert [confirming.start(process, files={})[1] for process in range(3)] == [None] * 3


@pytest.mark.parametrize(("budget", "most"), [(300.0, 2), (10.0, 1)])
def test_a_long_start_compiles_the_baseline_once(tmp_path, budget, most):
    run = run_on(simulated_trials(), tmp_path)
    run.options, run.records[0] = dataclasses.replace(run.options, budget=budget), a_record(first_step_seconds=1.5)
    assert own_compilations(run, Trial(4, Phase.CONFIRM, run.baseline)) == (4, most)
    assert own_compilations(run, Trial(5, Phase.CONFIRM, BASELINE)) == (BASELINE, 1)


def a_process(run, trials, trial):
    """A process of a leader's trial, before it starts."""
    return MeasuredProcess(run=run, trial=trial, seat="simulated", start_timeout=9.0, keeps_compilations=True)


def test_a_program_that_cannot_be_loaded_is_not_carried(tmp_path):
    trials = simulated_trials(lambda configuration: 4000.0, gpus=("NVIDIA A100",))
    trials.open()
    run, said, uses = run_on(trials, tmp_path), [], []
    run.records[0], run.confirmed = a_record(), ConfirmedCompilations(said.append)
    trial = Trial(5, Phase.CONFIRM, BASELINE.replace(jit_compile=True))
    (tmp_path / "trials" / "0005").mkdir(parents=True)

    def crash_on_loading(live):
        timing = live.timing
        uses.append(timing.compiled_use if timing.compiled else "")
        if timing.compiled_use == "loaded":
            raise TrialFailed(Outcome.CRASHED, "SIGILL")
        if timing.compiled:
            with open(os.path.join(timing.compiled, "xla.pb"), "w") as stream:
                stream.write("program")

    trials.on_launch = crash_on_loading
    process = a_process(run, trials, trial)
    for _ in range(3):
        process.start()
        process.kill()
    assert uses == ["written", "loaded", "", ""]
    assert [log.saved_seconds for log in trial.processes] == [None] * 3
    assert "SIGILL" in said[-1]
    assert list(tmp_path.glob("trials/*/compiled-*")) == []


def test_compilations_of_a_failed_warm_up_are_discarded(tmp_path):
    trials = simulated_trials(lambda configuration: 4000.0, gpus=("NVIDIA A100",))
    trials.open()
    run = run_on(trials, tmp_path)
    run.records[0], run.confirmed = a_record(), ConfirmedCompilations(print)
    trial = Trial(5, Phase.CONFIRM, BASELINE)
    trial.instances = 1
    compile_in(tmp_path, 5, 0)

    def compile_half(live):
        with open(os.path.join(live.timing.compiled, "xla.pb"), "w") as stream:
            stream.write("half a progr")
        raise TrialFailed(Outcome.CRASHED, "killed")

    trials.on_launch = compile_half
    process = a_process(run, trials, trial)
    with pytest.raises(TrialFailed):
        process.start()
    assert os.listdir(tmp_path / "trials" / "0005") == ["compiled-0"]


@pytest.mark.parametrize("lacks", [{"keeps_files": False}, {"has_flags": False}])
def test_nothing_is_kept_on_other_hosts_or_without_the_flags(tmp_path, monkeypatch, lacks):
    monkeypatch.setattr(run_setup, "missing_xla_flags", lambda names: {})
    with on_disk(tmp_path / "run") as directory:
        _, launched = run_on_gpu(directory, monkeypatch=monkeypatch, **lacks)
    assert {folder for _, folder, _ in launched} == {""}


def test_one_process_is_asked_for_all_flags():
    asked = []
    names = ["batch_size", "xla_gpu_enable_cublaslt"]
    assert can_keep_compilations(names, lambda xla, tf_xla: asked.append((xla, tf_xla)) or (0, ""))
    ((xla, tf_xla),) = asked
    assert "--xla_gpu_enable_cublaslt=false --xla_gpu_dump_autotune_results_to=" in xla
    assert tf_xla == "--tf_xla_persistent_cache_directory= --tf_xla_persistent_cache_read_only=false"
    assert not can_keep_compilations(names, lambda xla, tf_xla: (-6, "Unknown flag"))


def test_training_code_that_applies_the_recipe_loads_the_kernels(run, monkeypatch):
    RECIPE.save(run / "recipe.json")
    monkeypatch.setattr(recipe_module, "fingerprint", lambda: HERE)
    monkeypatch.setattr(recipe_module.apply, "apply_in_training", lambda configuration: None)
    for variable in ("XLA_FLAGS", "TF_XLA_FLAGS"):
        monkeypatch.setenv(variable, "")
    Recipe.load(run / "recipe.json").apply()
    assert "autotuned.txt" in os.environ["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", "")
    RECIPE.apply()  # from nowhere
    Recipe.load(run / "recipe.json").with_baseline().apply()
    assert os.environ["XLA_FLAGS"] == ""
