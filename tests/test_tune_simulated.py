"""Whole runs of the tuner, on simulated trials."""

import contextlib
import itertools
import json
import os
import signal

import optuna
import pytest
from simulated_runs import (
    BASELINE,
    GROWING_SPACE,
    MACHINE,
    SMALL_SPACE,
    DirectoryWithoutStudy,
    Watcher,
    faster_by,
    flat,
    on_disk,
    quick_tune,
    simulated_trials,
    tune_simulated,
)

from autotune.errors import (
    ArgumentError,
    BudgetError,
    NoStableConfigurationError,
    TuningInterruptedError,
    WorkloadError,
)
from autotune.history.frame import load_history
from autotune.machine import Gpu
from autotune.measure.deciding import Shortfall, Verdict
from autotune.recipe.recipe import Recipe
from autotune.run_directory import RunDirectory
from autotune.space.configuration import Configuration
from autotune.study.parity import Parity
from autotune.study.plan import CONFIRMATION_SHARE, MANY_INSTANCES
from autotune.study.progress import Notice, TrialBegan, TrialEnded
from autotune.trial.live import TrialFailed
from autotune.trial.record import Outcome, Pairing, Phase

SPEED = faster_by(jit_compile=1.5, batch_size=1.1)
NOISY = {"noise": 0.1, "instance_noise": 0.02}
WIDE_SPACE = (
    SMALL_SPACE
    + """
[knobs.prefetch]
kind = "categorical"
choices = [0, 2, 8, "autotune"]
[knobs.num_parallel_calls]
kind = "power_of_two"
low = 2
high = 16
[knobs.data_threads]
kind = "categorical"
choices = [0, 4, 16]
"""
)


@pytest.fixture
def directory(tmp_path):
    """A run directory on disk, as `tune` makes it, but for the study: committing each answer takes seconds."""
    with on_disk(tmp_path / "run", DirectoryWithoutStudy) as made:
        yield made


def records_of(directory):
    """Every record on disk."""
    return list(RunDirectory(directory.path).read_trials())


def gains(recipe):
    """The true speed-up of what is recommended."""
    return SPEED(Configuration(recipe.configuration)) / SPEED(BASELINE)


# ------------------------------------------------------------------------------------------------ the answer


def test_a_planted_faster_configuration_is_found(directory):
    """XLA and another batch size are faster here: both are recommended, with the speed-up they have."""
    recipe = tune_simulated(simulated_trials(SPEED, **NOISY), directory, budget=400.0)
    assert recipe.evidence.verdict is Verdict.FASTER
    assert recipe.configuration["jit_compile"] is True
    assert recipe.configuration["batch_size"] != 32
    assert recipe.evidence.speedup.ci95[0] < 1.65 < recipe.evidence.speedup.ci95[1]
    assert recipe.evidence.confirmation.instances >= 3
    assert Recipe.load(directory.recipe_file) == recipe


def test_where_nothing_is_faster_the_baseline_is_recommended(directory):
    """No gain anywhere: that is what the recipe says, and it changes nothing."""
    recipe = tune_simulated(simulated_trials(flat, **NOISY), directory)
    assert recipe.evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN
    assert recipe.configuration == recipe.baseline
    assert recipe.changes == {}
    assert recipe.learning_rate is None
    assert recipe.evidence.best_candidate is not None


def test_where_everything_is_slower_nothing_is_confirmed(directory):
    """Without a finalist the run ends early, and well."""
    slower = faster_by(jit_compile=0.5, batch_size=0.5, steps_per_execution=0.5)
    trials = simulated_trials(slower, noise=0.05)
    recipe = tune_simulated(trials, directory)
    assert recipe.configuration == recipe.baseline
    assert recipe.evidence.confirmation.instances == 0
    assert recipe.evidence.best_candidate is None
    assert recipe.evidence.shortfall is Shortfall.NOTHING_FASTER
    assert not [each for each in records_of(directory) if each.phase is Phase.CONFIRM]


def test_a_gain_too_small_is_not_recommended(directory):
    """One percent, however sure, is below what counts; with a smaller limit it is recommended."""
    speed = faster_by(jit_compile=1.01, batch_size=0.7, steps_per_execution=0.7)
    recipe = tune_simulated(simulated_trials(speed), directory)
    assert recipe.evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN
    assert recipe.evidence.best_candidate.speedup.value == pytest.approx(1.01)
    assert recipe.evidence.shortfall is Shortfall.BELOW_MIN_GAIN


def test_the_smallest_gain_that_counts_is_the_users(directory):
    """One percent is recommended to who asks for half a percent."""
    speed = faster_by(jit_compile=1.01, batch_size=0.7, steps_per_execution=0.7)
    recipe = tune_simulated(simulated_trials(speed), directory, min_gain=0.005)
    assert recipe.changes == {"jit_compile": True}
    assert recipe.evidence.min_gain == 0.005


def test_the_baseline_is_what_tensorflow_makes_of_it(directory):
    """Where "auto" means XLA, the baseline has XLA, and XLA is no gain."""
    trials = simulated_trials(faster_by(jit_compile=1.5), jit_resolves_to=True, noise=0.05)
    recipe = tune_simulated(trials, directory)
    assert recipe.baseline["jit_compile"] is True
    assert recipe.evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN


def test_what_the_dataset_sets_itself_is_the_baselines_and_stays(directory):
    """The tuning of tf.data was turned off by the user: that is said, kept in the recipe, and never varied."""
    space = SMALL_SPACE + '[knobs.data_autotune]\nkind = "categorical"\nchoices = [true, false]\n'
    watcher = Watcher()
    recipe = tune_simulated(
        simulated_trials(SPEED, noise=0.02, set_by_dataset={"data_autotune": False}),
        directory,
        space=space,
        observe=watcher,
    )
    assert recipe.baseline["data_autotune"] is False
    assert {each.configuration["data_autotune"] for each in records_of(directory)} == {False}
    assert any("dataset() sets data_autotune=false itself" in each.text for each in watcher.of(Notice))
    assert "data_autotune" in directory.read_run().search_space.left_out


def test_what_tensorflow_gives_by_itself_is_held_against_plain(directory):
    """XLA, unasked, gives 1.5 and batches of 512 give 1.6 more: the one over plain, the other over both."""
    speed = faster_by(jit_compile=1.5, batch_size=1.6)
    recipe = tune_simulated(
        simulated_trials(speed, jit_resolves_to=True, noise=0.02, seed=3), directory, budget=600.0
    )
    evidence, plain = recipe.evidence, recipe.evidence.plain
    assert recipe.configuration["jit_compile"] is True
    assert (plain.found, plain.configuration) == ("measured", dict(BASELINE))
    assert plain.baseline_over_plain.ci95[0] < 1.5 < plain.baseline_over_plain.ci95[1]
    assert plain.speedup_over_plain.ci95[0] < 2.4 < plain.speedup_over_plain.ci95[1]
    assert evidence.speedup.ci95[0] < 1.6 < evidence.speedup.ci95[1]
    assert Recipe.load(directory.recipe_file).evidence.plain == plain


def test_on_a_gpu_its_own_knobs_and_versions_are_kept(directory):
    """Baseline and recipe have the knobs of a GPU, and trials report its memory."""
    recipe = tune_simulated(simulated_trials(flat, gpus=("NVIDIA H200",), noise=0.02), directory)
    assert "tensor_float_32" in recipe.baseline
    assert "onednn" not in recipe.baseline
    assert recipe.evidence.peak_memory_bytes.device > 0


# -------------------------------------------------------------------------------------------------- the files


def test_every_trial_is_in_the_history(directory):
    """Baseline, probes, samples and confirmation: one row each, with its phase and outcome."""
    trials = simulated_trials(SPEED, **NOISY)
    recipe = tune_simulated(trials, directory)
    frame = load_history(directory.path)
    records = records_of(directory)
    assert list(frame["trial"]) == list(range(recipe.created_by.trials)) == [each.trial for each in records]
    assert set(frame["phase"]) == {"baseline", "probe", "search", "confirm"}
    assert list(frame["outcome"]) == [str(each.outcome) for each in records]
    assert frame["throughput"].notna().sum() >= len(frame) - 1
    assert sum(each.instances for each in records) == sum(each.timed for each in trials.launched)


def test_the_study_holds_the_search(tmp_path):
    """study.db opens with Optuna, and its trials are those of the search."""
    with on_disk(tmp_path / "run") as directory:
        tune_simulated(simulated_trials(SPEED, **NOISY), directory, trials=4)
    study = optuna.load_study(study_name="simulated", storage=f"sqlite:///{directory.study_file}")
    searched = {each.trial for each in records_of(directory) if each.phase is not Phase.CONFIRM}
    assert {trial.user_attrs["trial"] for trial in study.trials} == searched
    assert study.trials[0].user_attrs["phase"] == "baseline"


def test_the_run_is_described(directory):
    """run.json has workload, machine, resolved space, baseline and versions."""
    recipe = tune_simulated(simulated_trials(SPEED, **NOISY), directory, seed=3)
    record = directory.read_run()
    assert record.workload.examples == 1437
    assert record.workload.device == "cpu"
    assert record.baseline == recipe.baseline
    assert record.search_space.choices["batch_size"] == (16, 32, 64, 128, 256, 512)
    assert recipe.machine == record.machine == MACHINE
    assert recipe.created_by.seed == 3
    assert recipe.created_by.run == directory.name
    assert recipe.workload.fingerprint == "sha256:00"


def test_a_configuration_drawn_again_gets_no_second_trial(directory):
    """The sampler repeats itself in a small space: more slices for the leaders, one directory for each."""
    tune_simulated(simulated_trials(faster_by(jit_compile=1.3), noise=0.15), directory)
    records = [each for each in records_of(directory) if each.phase is not Phase.CONFIRM]
    configurations = [json.dumps(each.configuration, sort_keys=True) for each in records]
    assert len(set(configurations)) == len(configurations)
    assert max(each.instances for each in records[1:]) > 1
    assert len(list((directory.path / "trials").iterdir())) == len(records_of(directory))


def test_everyone_is_told_of_everything(directory):
    """Each trial that began has ended, once; second looks begin again."""
    watcher = Watcher()
    tune_simulated(simulated_trials(SPEED, **NOISY), directory, observe=watcher)
    began = {event.trial for event in watcher.of(TrialBegan)}
    ended = {event.record.trial for event in watcher.of(TrialEnded)}
    assert began == ended == {each.trial for each in records_of(directory)}


def test_no_process_is_left(directory):
    """When the recipe is there, nothing runs any more."""
    trials = simulated_trials(SPEED, **NOISY)
    tune_simulated(trials, directory)
    assert trials.alive == []


# ---------------------------------------------------------------------------------------------------- failures


def test_a_failing_baseline_ends_the_run(directory):
    """Exit code 3, with trial 0's record on disk and no recipe."""
    trials = simulated_trials(failure=lambda each: TrialFailed(Outcome.NONFINITE, "the loss became nan"))
    with pytest.raises(NoStableConfigurationError, match="the loss became nan") as caught:
        tune_simulated(trials, directory)
    assert caught.value.exit_code == 3
    (record,) = records_of(directory)
    assert (record.trial, record.outcome) == (0, Outcome.NONFINITE)
    assert not directory.recipe_file.exists()


def test_a_baseline_that_hangs_does_not_take_the_whole_budget(directory):
    """It is given up after its share of the budget."""
    trials = simulated_trials(failure=lambda each: TrialFailed(Outcome.TIMEOUT, "hangs"))
    with pytest.raises(BudgetError, match="was not warm and timed"):
        tune_simulated(trials, directory, budget=600.0)
    assert trials.clock() < 600.0 * 0.5
    assert records_of(directory)[0].outcome is Outcome.TIMEOUT


def test_a_workload_at_fault_is_wrong_input(directory):
    """What the user must mend in the workload leaves with exit code 2."""
    fault = TrialFailed(Outcome.ERROR, "dataset() yields nothing", hint="check it", input_error=True)
    with pytest.raises(WorkloadError) as caught:
        tune_simulated(simulated_trials(failure=lambda each: fault), directory)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "outcome", [Outcome.TIMEOUT, Outcome.CRASHED, Outcome.ERROR, Outcome.NONFINITE], ids=str
)
def test_failing_configurations_do_not_end_the_run(directory, outcome):
    """XLA fails here, in all its trials; what is faster without it is found, and the failures are kept."""
    trials = simulated_trials(
        faster_by(batch_size=1.5, jit_compile=3.0),
        **NOISY,
        failure=lambda each: TrialFailed(outcome, "as planned") if each["jit_compile"] else None,
    )
    recipe = tune_simulated(trials, directory, budget=600.0)
    records = records_of(directory)
    failed = [each for each in records if each.configuration["jit_compile"]]
    assert {each.outcome for each in failed} == {outcome}
    assert recipe.configuration["jit_compile"] is False
    assert recipe.evidence.speedup.value == pytest.approx(1.5, rel=0.1)
    assert trials.clock() <= 600.0


def test_a_finalist_that_fails_in_its_confirmation_is_not_recommended(directory):
    """What is fast but does not start again is worth nothing: the next one is confirmed."""
    trials = simulated_trials(SPEED, noise=0.05)
    searching = 250.0 * (1 - CONFIRMATION_SHARE)
    trials.failure = lambda each: (
        TrialFailed(Outcome.CRASHED, "late") if each["jit_compile"] and trials.clock() > searching else None
    )
    recipe = tune_simulated(trials, directory, budget=250.0)
    assert recipe.configuration["jit_compile"] is False
    crashed = [each for each in records_of(directory) if each.outcome is Outcome.CRASHED]
    assert {each.phase for each in crashed} == {Phase.CONFIRM}


def test_everything_but_the_baseline_may_fail(directory):
    """Then the baseline is what there is."""
    trials = simulated_trials(
        failure=lambda each: TrialFailed(Outcome.CRASHED, "killed") if each != BASELINE else None
    )
    recipe = tune_simulated(trials, directory)
    assert recipe.configuration == dict(BASELINE)
    assert recipe.evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN
    assert recipe.evidence.shortfall is Shortfall.NOTHING_MEASURED


# ------------------------------------------------------------------------------------------------------ memory


def room_for(examples):
    """Memory for batches of so many examples, all live trials together."""
    return lambda alive: sum(each.batch_size for each in alive) <= examples


def test_what_fits_alone_only_is_bracketed_and_larger_ones_are_not_run(directory):
    """Up to 64 beside the baseline, 128 alone, 256 not at all; beyond that it is inferred."""
    trials = simulated_trials(
        lambda each: 20 * each.batch_size + 3400.0,
        noise=0.02,
        examples=1 << 16,
        fits_together=room_for(140),
    )
    recipe = tune_simulated(trials, directory, space=GROWING_SPACE, budget=600.0)
    searched = [each for each in records_of(directory) if each.phase is not Phase.CONFIRM]
    plain = {
        each.configuration["batch_size"]: each for each in searched if not each.configuration["jit_compile"]
    }
    assert plain[64].pairing is Pairing.ALTERNATING
    assert plain[128].pairing is Pairing.BRACKETED
    assert plain[256].outcome is Outcome.OOM
    larger = [each for each in searched if each.configuration["batch_size"] > 256]
    assert {each.outcome for each in larger} <= {Outcome.INFERRED_OOM, Outcome.OOM}
    assert Outcome.INFERRED_OOM in {each.outcome for each in larger}
    assert recipe.configuration["batch_size"] == 128
    assert recipe.evidence.confirmation.pairing == "bracketed"


def test_bracketing_throughout_never_has_two_alive(directory):
    """`--pairing bracketed`, from the first candidate to the last instance."""
    trials = simulated_trials(SPEED, noise=0.02, fits_together=lambda alive: len(alive) == 1)
    recipe = tune_simulated(trials, directory, pairing="bracketed", budget=600.0)
    assert recipe.configuration["jit_compile"] is True
    assert Outcome.OOM not in {each.outcome for each in records_of(directory)}
    assert {each.pairing for each in records_of(directory) if each.pairs} == {Pairing.BRACKETED}


# -------------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("budget", [60.0, 180.0, 600.0, 3600.0])
@pytest.mark.parametrize(
    ("import_seconds", "start_seconds"), [(4.0, 1.5), (12.0, 2.5)], ids=["quick-start", "slow-start"]
)
def test_the_budget_is_kept(tmp_path, budget, import_seconds, start_seconds):
    """Imports, trials and confirmation together end within the budget, give or take a tenth."""
    trials = simulated_trials(
        SPEED, **NOISY, import_seconds=import_seconds, start_seconds=start_seconds, examples=50_000
    )
    recipe, _ = quick_tune(trials, tmp_path, budget=budget, space=WIDE_SPACE)
    assert trials.clock() <= 1.1 * budget
    assert recipe.created_by.spent_seconds == pytest.approx(trials.clock())


def test_time_that_the_search_leaves_is_used_by_the_confirmation(tmp_path):
    """A small space is explored early: the instances that fit into the rest of the budget are measured."""
    speed = faster_by(jit_compile=1.3, batch_size=0.7, steps_per_execution=0.7)
    trials = simulated_trials(speed, **NOISY)
    recipe, directory = quick_tune(trials, tmp_path, budget=300.0)
    searched = [each for each in directory.trials.values() if each.phase is not Phase.CONFIRM]
    assert sum(each.seconds for each in searched[1:]) < 0.6 * 300.0, "the search ends before its time"
    assert recipe.evidence.confirmation.instances >= MANY_INSTANCES - 1, "what the soak leaves room for"
    assert trials.clock() > 0.9 * 300.0


def test_hanging_trials_do_not_break_the_budget(tmp_path):
    """Half of the space runs into its time limit, and the end is kept all the same."""
    trials = simulated_trials(
        SPEED,
        **NOISY,
        failure=lambda each: TrialFailed(Outcome.TIMEOUT, "hangs") if each["jit_compile"] else None,
    )
    quick_tune(trials, tmp_path, budget=180.0)
    assert trials.clock() <= 1.1 * 180.0


def test_a_budget_that_is_too_small_is_refused(directory):
    """Before anything is searched, with a budget that would do."""
    trials = simulated_trials(import_seconds=10.0, start_seconds=5.0)
    with pytest.raises(BudgetError, match="too small") as caught:
        tune_simulated(trials, directory, budget=25.0)
    assert caught.value.exit_code == 2
    assert "--budget" in caught.value.hint
    assert len(trials.launched) == 1


@pytest.mark.parametrize(
    ("budget", "harmless", "too_much"),
    [
        (60.0, {"import_seconds": 5.0}, {"import_seconds": 20.0}),
        (80.0, {"start_seconds": 2.0}, {"start_seconds": 15.0}),
        (80.0, {"start_seconds": 8.0}, {"start_seconds": 8.0, "pairing": "bracketed"}),
        (60.0, {"samples_per_second": lambda each: 400.0}, {"samples_per_second": lambda each: 12.0}),
    ],
    ids=["imports", "starts", "bracketing", "long-epochs"],
)
def test_a_budget_in_which_nothing_could_be_confirmed_is_refused(tmp_path, budget, harmless, too_much):
    """Two imports side by side, the starts of two instances and their shortest slices are counted beforehand."""
    for number, settings in enumerate((harmless, too_much)):
        options = {name: settings[name] for name in settings if name == "pairing"}
        machine = {"import_seconds": 1.0, "examples": 96, **settings}
        machine.pop("pairing", None)
        trials = simulated_trials(**machine)
        refused = pytest.raises(BudgetError) if number else contextlib.nullcontext()
        with refused:
            quick_tune(trials, tmp_path / str(number), budget=budget, **options)


def test_the_limit_on_trials_holds(tmp_path):
    """Three trials in the search; the confirmation comes on top."""
    recipe, directory = quick_tune(simulated_trials(SPEED, **NOISY), tmp_path, trials=3)
    phases = [each.phase for each in directory.trials.values()]
    assert len([each for each in phases if each in (Phase.PROBE, Phase.SEARCH)]) == 3
    assert recipe.evidence.verdict is Verdict.FASTER


# ----------------------------------------------------------------------------------------------- interruptions


def interrupt_at(number):
    """Press Ctrl-C when this trial begins."""

    def react(event):
        if isinstance(event, TrialBegan) and event.trial == number:
            signal.raise_signal(signal.SIGINT)

    return Watcher(react)


def test_an_interrupted_search_is_confirmed(directory):
    """The first Ctrl-C ends the search, not the run: what was found so far is confirmed and recommended."""
    watcher = interrupt_at(6)
    trials = simulated_trials(SPEED, **NOISY)
    recipe = tune_simulated(trials, directory, observe=watcher, budget=3600.0)
    assert recipe.evidence.verdict is Verdict.FASTER
    assert directory.recipe_file.exists()
    assert "winding up" in watcher.of(Notice)[0].text
    outcomes = [each.outcome for each in records_of(directory) if each.phase is not Phase.CONFIRM]
    assert outcomes == [Outcome.OK] * 6 + [Outcome.INTERRUPTED]
    assert trials.clock() < 1800.0


@pytest.mark.parametrize("number", [0, 1])
def test_interrupted_before_anything_was_faster(directory, number):
    """There is nothing to recommend: exit code 130, and what was measured stays."""
    trials = simulated_trials(SPEED, **NOISY)
    with pytest.raises(TuningInterruptedError) as caught:
        tune_simulated(trials, directory, observe=interrupt_at(number))
    assert caught.value.exit_code == 130
    assert records_of(directory)[0].outcome is Outcome.OK
    assert str(directory.path) in caught.value.hint
    assert not directory.recipe_file.exists()
    assert trials.alive == []


def test_who_asked_to_stop_is_not_told_that_the_budget_is_too_small(directory):
    """Ctrl-C while the baseline starts, in a budget for nothing more: that it was interrupted comes first."""
    trials = simulated_trials(import_seconds=10.0, start_seconds=5.0)
    with pytest.raises(TuningInterruptedError, match="before the search began") as caught:
        tune_simulated(trials, directory, budget=25.0, observe=interrupt_at(0))
    assert caught.value.exit_code == 130
    assert all(part in caught.value.hint for part in ("--resume", str(directory.path), "--budget"))


def test_the_second_interruption_stops_at_once(directory):
    """Ctrl-C again is the usual KeyboardInterrupt; records that were written stay readable."""

    def react(event):
        if isinstance(event, TrialBegan) and event.trial == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tune_simulated(simulated_trials(SPEED), directory, observe=Watcher(react))
    assert [each.trial for each in records_of(directory)] == [0, 1, 2]


def test_ctrl_c_means_what_it_meant_before_after_the_run(directory):
    """The handler that the run put in place is taken away again, also when the run fails."""
    before = signal.getsignal(signal.SIGINT)
    trials = simulated_trials(failure=lambda each: TrialFailed(Outcome.CRASHED, "killed"))
    with pytest.raises(NoStableConfigurationError):
        tune_simulated(trials, directory)
    assert signal.getsignal(signal.SIGINT) is before


# -------------------------------------------------------------------------------------------------- statistics


def test_the_same_seed_gives_the_same_recipe(tmp_path):
    """On the same machine and noise, two runs of one seed differ in their time stamps and names alone."""
    made = []
    for name in ("first", "second"):
        recipe, _ = quick_tune(simulated_trials(SPEED, **NOISY), tmp_path / name, seed=5)
        document = json.loads(recipe.to_json())
        del document["created_by"]["created_at"], document["created_by"]["run"]
        made.append(document)
    assert made[0] == made[1]


def test_another_seed_gives_another_run(tmp_path):
    """The tuner's seed, not the machine's alone, decides what is sampled and in which order it is measured."""
    runs = [
        quick_tune(simulated_trials(SPEED, **NOISY), tmp_path / str(seed), seed=seed)[1] for seed in (1, 2)
    ]
    first, second = ([each.configuration for each in run.trials.values()] for run in runs)
    assert first != second


def test_the_claimed_interval_covers_the_truth(tmp_path):
    """On a noisy machine with unequal processes, at least 90% of 40 recipes hold the true speed-up."""
    covered = []
    for seed in range(40):
        trials = simulated_trials(SPEED, **NOISY, seed=seed)
        recipe, _ = quick_tune(trials, tmp_path / str(seed), seed=seed, budget=240.0, trials=5)
        low, high = recipe.evidence.speedup.ci95
        assert recipe.evidence.verdict is Verdict.FASTER
        covered.append(low <= gains(recipe) <= high)
    assert sum(covered) >= 0.9 * len(covered)


def test_where_nothing_is_faster_nearly_nothing_is_claimed(tmp_path):
    """Of 100 runs on a machine where all configurations are alike, at most 5 recommend one of them."""
    claims = []
    for seed, budget in zip(range(100), itertools.cycle((90.0, 300.0)), strict=False):
        trials = simulated_trials(flat, **NOISY, seed=seed)
        recipe, _ = quick_tune(trials, tmp_path / str(seed), seed=seed, budget=budget, trials=4)
        claims.append(recipe.evidence.verdict is Verdict.FASTER)
    assert sum(claims) <= 5


def test_a_drifting_machine_does_not_fool_the_tuner(tmp_path):
    """The machine loses half of its speed during the run, and nothing is faster: nothing is claimed."""
    trials = simulated_trials(flat, noise=0.05, drift=lambda seconds: 0.5 ** (seconds / 300.0))
    recipe, _ = quick_tune(trials, tmp_path)
    assert recipe.evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN


@pytest.mark.parametrize(
    ("started", "starts", "move"),
    [
        ("runtime", "TensorFlow's runtime", "tensors, datasets and device queries"),
        ("cuda", "CUDA", "tensors, datasets and device queries"),
        ("threads", "threads", "whatever starts them"),
    ],
)
def test_what_no_fork_survives_is_told_of(started, starts, move, directory):
    """Importing the file woke it, so trials cost an import each: the user hears what it was and what to move."""
    watcher = Watcher()
    tune_simulated(simulated_trials(flat, started_by_import=started), directory, observe=watcher)
    said = watcher.of(Notice)[0].text
    assert f"file starts {starts}, so every trial" in said
    assert f"move {move} into functions" in said


def test_a_file_that_wakes_nothing_is_not_spoken_of(directory):
    """Where trials can be forked nothing is said of interpreters."""
    watcher = Watcher()
    tune_simulated(simulated_trials(flat), directory, observe=watcher)
    assert not any("fresh interpreter" in each.text for each in watcher.of(Notice))


def test_a_gpu_that_tensorflow_does_not_see_is_told_of(directory):
    """The CPU is tuned then, and the user hears why."""
    watcher = Watcher()
    record = directory.read_run()
    gpu = Gpu(name="NVIDIA H200", memory_bytes=1 << 37)
    machine = MACHINE.model_copy(update={"gpus": (gpu,)})
    recipe = tune_simulated(simulated_trials(flat), directory, observe=watcher, machine=machine)
    assert "TensorFlow does not see it" in watcher.of(Notice)[0].text
    assert "onednn" in recipe.baseline
    assert record.machine == MACHINE


PRECISE_SPACE = (
    SMALL_SPACE
    + """
[knobs.precision]
kind = "categorical"
choices = ["float32", "mixed_bfloat16"]
"""
)


def learning(**changes):
    """Trials that are faster in bfloat16 and with a larger batch; those with `changes` do not learn."""
    speed = faster_by(precision=1.6, batch_size=1.2)
    return simulated_trials(
        speed, noise=0.02, learns=lambda each: not changes or any(each[k] != v for k, v in changes.items())
    )


def test_a_winner_that_learns_says_so(directory):
    """The check stands in the recipe with its figure and limit, and is not among what was not checked."""
    recipe = tune_simulated(learning(), directory, space=PRECISE_SPACE)
    assert recipe.configuration["precision"] == "mixed_bfloat16"
    (parity,) = [each for each in recipe.evidence.stability.checks if each.name == "numerics_parity"]
    assert parity.passed
    assert parity.value <= parity.limit
    assert not any("numerics" in each for each in recipe.evidence.stability.not_checked)


def test_what_does_not_learn_is_not_recommended(directory):
    """The next finalist is; the refused trials are unstable in the history, with the figures."""
    recipe = tune_simulated(learning(precision="mixed_bfloat16"), directory, space=PRECISE_SPACE)
    assert recipe.evidence.verdict is Verdict.FASTER
    assert recipe.configuration["precision"] == "float32"
    assert recipe.configuration["batch_size"] > 32
    refused = [each for each in records_of(directory) if each.outcome is Outcome.UNSTABLE]
    assert refused
    assert {each.configuration["precision"] for each in refused} == {"mixed_bfloat16"}
    assert all("numerics_parity: after" in each.reason for each in refused)


def test_where_nothing_that_is_faster_learns_the_recipe_is_the_baseline(directory):
    """And says which rule was broken, by what looked fastest."""
    trials = simulated_trials(
        faster_by(precision=1.6), noise=0.02, learns=lambda each: each["precision"] == "float32"
    )
    space = """
schema_version = 1
[knobs.precision]
kind = "categorical"
choices = ["float32", "mixed_bfloat16"]
"""
    recipe = tune_simulated(trials, directory, space=space)
    assert recipe.configuration == recipe.baseline
    assert recipe.evidence.shortfall == "unstable"
    assert recipe.evidence.best_candidate.configuration["precision"] == "mixed_bfloat16"
    assert "numerics_parity" in recipe.evidence.best_candidate.reason
    assert recipe.evidence.best_candidate.search_speedup > 1.4


def test_who_stops_a_run_all_of_whose_finalists_were_refused_has_a_recipe(directory, monkeypatch):
    """Something was faster and does not learn: the recipe says so, and not that nothing was measured to be faster."""
    trials = simulated_trials(
        faster_by(precision=1.5),
        noise=0.02,
        jit_resolves_to=True,
        learns=lambda each: each["precision"] == "float32",
    )
    space = """
schema_version = 1
[knobs.precision]
kind = "categorical"
choices = ["float32", "mixed_bfloat16"]
"""
    sift = Parity.sift

    def sift_and_stop(*arguments, **named):
        found = sift(*arguments, **named)
        os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(Parity, "sift", sift_and_stop)
    recipe = tune_simulated(trials, directory, space=space)
    assert (recipe.changes, recipe.evidence.shortfall) == ({}, "unstable")
    assert (
        recipe.evidence.plain.reason == "what was faster broke a stability rule, so there was no confirmation"
    )


def test_a_space_of_pipeline_knobs_spends_no_time_on_numerics(directory):
    """Nothing is trained for its losses, and the search has their time."""
    trials = simulated_trials(faster_by(prefetch=1.5), noise=0.02)
    space = 'schema_version = 1\n[knobs.prefetch]\nkind = "categorical"\nchoices = [0, 2]\n'
    recipe = tune_simulated(trials, directory, space=space)
    assert all(each.timed for each in trials.launched)
    (parity,) = [each for each in recipe.evidence.stability.checks if each.name == "numerics_parity"]
    assert parity.detail == "the same numerics as the baseline's"
    assert recipe.evidence.stability.not_checked == ()


def test_a_larger_batch_is_judged_apart(directory):
    """The losses after equal numbers of examples stand in the recipe; they refuse nothing."""
    trials = simulated_trials(faster_by(batch_size=1.5), noise=0.02)
    space = 'schema_version = 1\n[knobs.batch_size]\nkind = "categorical"\nchoices = [32, 64]\n'
    recipe = tune_simulated(trials, directory, space=space)
    assert recipe.configuration["batch_size"] == 64
    losses = recipe.learning_rate.losses
    assert losses.examples % 64 == 0
    assert losses.unscaled > losses.baseline, "half as many steps"
    assert any(each.startswith("held-out loss") for each in recipe.evidence.stability.not_checked)
    assert recipe.evidence.verdict is Verdict.FASTER


def test_a_bound_below_the_workloads_own_batch_is_refused(directory):
    """The baseline has it whatever was asked for, so "no larger one" could not be kept."""
    with pytest.raises(
        ArgumentError, match=r"--max-batch 16 is below the workload's own batch size, which is 32"
    ):
        tune_simulated(simulated_trials(SPEED), directory, max_batch=16)


@pytest.mark.parametrize(("bound", "largest"), [({"max_batch": 100}, 64), ({"fixed_batch": True}, 32)])
def test_the_batch_size_can_be_bounded(directory, bound, largest):
    """No trial has a larger one, whatever the search space says."""
    space = """
schema_version = 1
[knobs.batch_size]
kind = "power_of_two"
low = 32
high = 512
[knobs.jit_compile]
kind = "categorical"
choices = [false, true]
"""
    trials = simulated_trials(SPEED, **NOISY)
    tune_simulated(trials, directory, space=space, **bound)
    assert max(each.configuration["batch_size"] for each in records_of(directory)) == largest


@pytest.mark.parametrize("pairing", ["auto", "bracketed"])
def test_an_epoch_may_end_in_any_slice(directory, pairing):
    """A minute to empty and fill a shuffle buffer is no hang: every slice has the time that its trial has announced."""
    trials = simulated_trials(SPEED, examples=1_000_000, uncounted_seconds=70.0)
    recipe = tune_simulated(trials, directory, budget=3000.0, trials=3, pairing=pairing, soak=400.0)
    records = records_of(directory)
    assert {each.outcome for each in records} == {Outcome.OK}
    assert any(each.legs for each in records)
    assert recipe.evidence.confirmation.pairing == ("bracketed" if pairing == "bracketed" else "alternating")
