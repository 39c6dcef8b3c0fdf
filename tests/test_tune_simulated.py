"""Whole runs of the tuner, on simulated trials: answers, files, failures, memory, time and interruptions."""

import dataclasses
import io
import itertools
import json
import math
import random
import signal
from pathlib import Path

import optuna
import pytest
from rich.console import Console as RichConsole
from simulated_runs import (
    BASELINE,
    BATCH_SIZE,
    FACTS,
    GROWING_SPACE,
    MACHINE,
    SMALL_SPACE,
    DirectoryWithoutStudy,
    Watcher,
    an_invocation,
    faster_by,
    flat,
    on_disk,
    quick_tune,
    records_of,
    simulated_trials,
    space,
    tune_simulated,
)

from autotune.data.errors import ArgumentError, BudgetError
from autotune.data.facts import Gpu, ScriptFacts, Trains
from autotune.data.figures import Interval
from autotune.data.record import Outcome, Phase
from autotune.data.run_directory import RunDirectory
from autotune.front.results import show_answer, show_history
from autotune.recipe.apply import largest_divisor
from autotune.recipe.recipe import Recipe
from autotune.report.history import load_history
from autotune.report.page import page_data, write_page
from autotune.runtime.executor import TrialFailed
from autotune.space.configuration import Configuration
from autotune.space.space_file import SearchSpace
from autotune.stats.deciding import EndedBy, Verdict
from autotune.tuning.events import Notice, TrialBegan, TrialEnded
from autotune.tuning.run_setup import open_run
from autotune.tuning.tune import tune_with

SPEED = faster_by(jit_compile=1.5, batch_size=1.1)
NOISY = {"noise": 0.1, "instance_noise": 0.02}
QUIET = {"noise": 0.02, "instance_noise": 0.005}
LONG = [pytest.param(seconds, marks=pytest.mark.slow) for seconds in (300.0, 900.0)]
"""Budgets of runs whose simulation takes long."""
TINY_SPACE = space(jit_compile=[False, True], steps_per_execution=[1, 8])
PERSISTENT = '[knobs.persistent_iterator]\nkind = "categorical"\nchoices = [false, true]\n'
ONEDNN = '[knobs.onednn]\nkind = "categorical"\nchoices = [true, false]\n'


@pytest.fixture
def directory(tmp_path):
    """A run directory on disk, as `tune` makes it, but for the study: committing each answer takes seconds."""
    with on_disk(tmp_path / "run", DirectoryWithoutStudy) as made:
        yield made


def searched(records):
    """Those of the search."""
    return [record for record in records if record.phase is Phase.SEARCH]


def answered(tmp_path, trials, /, **options):
    """The recipe of a run that keeps its records in memory, and those."""
    recipe, directory = quick_tune(trials, tmp_path, **options)
    return recipe, list(directory.trials.values())


# ------------------------------------------------------------------------------------------------ the answer


def test_a_planted_faster_configuration_is_found(directory):
    recipe = tune_simulated(simulated_trials(SPEED, **NOISY), directory, budget=400.0)
    assert recipe.evidence.verdict is Verdict.FASTER
    assert recipe.configuration["jit_compile"] is True
    assert recipe.configuration["batch_size"] != BATCH_SIZE
    assert recipe.evidence.speedup.low < 1.65 < recipe.evidence.speedup.high
    assert recipe.evidence.confirmation.processes >= 2
    assert Recipe.load(directory.recipe_file) == recipe


def test_timed_out_calls_are_not_retried_with_other_pipelines(tmp_path):
    def too_slow(configuration):
        return TrialFailed(Outcome.TIMEOUT, "too slow") if configuration.batch_size >= 256 else None

    trials = simulated_trials(lambda each: 64.0 * (each.batch_size / 32) ** 0.7, noise=0.02, failure=too_slow)
    space = (
        SMALL_SPACE.replace("low = 16", "low = 32")
        + """
[knobs.prefetch]
kind = "categorical"
choices = [0, 2, 8]
"""
    )
    _, records = answered(tmp_path, trials, budget=1200.0, space=space)
    late = [record for record in records if record.outcome is Outcome.TIMEOUT]
    assert late
    assert len(late) <= 4, "once with and once without XLA, for each number of steps per call"


def test_a_value_that_did_nothing_is_not_asked_for_again(tmp_path):
    trials = simulated_trials(SPEED, **QUIET, in_force=lambda configuration: {"persistent_iterator": False})
    _, records = answered(tmp_path, trials, budget=400.0, space=SMALL_SPACE + PERSISTENT)
    assert sum(bool(record.asked and record.asked["persistent_iterator"]) for record in records) == 1


@pytest.mark.parametrize("speed", [flat, faster_by(jit_compile=0.5, batch_size=0.5, steps_per_execution=0.5)])
def test_where_nothing_is_faster_that_is_the_answer(tmp_path, speed):
    trials = simulated_trials(speed, **QUIET)
    recipe, records = answered(tmp_path, trials, budget=400.0)
    assert recipe.evidence.verdict is Verdict.NO_SIGNIFICANT_GAIN
    assert (recipe.evidence.ended_by, trials.clock() < 300.0) == (EndedBy.SETTLED, True), "the rest is returned"
    assert recipe.evidence.advice[-1].startswith("Most that a knob can still gain: ")
    assert all(
        f"{name} " in recipe.evidence.advice[-1] for name in ("batch_size", "jit_compile", "steps_per_execution")
    )
    assert (recipe.changes, recipe.learning_rate_rule) == ({}, None)
    assert 0.0 <= recipe.evidence.excluded_gain <= 0.10
    assert recipe.evidence.speedup == Interval(value=1.0, low=1.0, high=1.0)
    assert recipe.evidence.throughput == recipe.evidence.baseline_throughput
    assert recipe.evidence.candidates == len(searched(records)) > 3
    assert recipe.evidence.go_on_seconds is None


@pytest.mark.parametrize(("most", "speed"), [(1, flat), (3, SPEED)])
def test_the_limit_on_trials_holds(tmp_path, most, speed):
    recipe, records = answered(tmp_path, simulated_trials(speed, **QUIET), budget=1000.0, trials=most)
    assert len(searched(records)) == recipe.evidence.candidates == most
    assert recipe.evidence.verdict is not Verdict.UNDECIDED
    assert recipe.evidence.ended_by is EndedBy.EXHAUSTED


def test_what_keras_decides_by_itself_is_a_choice_like_any_other(tmp_path):
    space = TINY_SPACE.replace("[false, true]", '[false, true, "auto"]')
    _, records = answered(tmp_path, simulated_trials(SPEED, **QUIET), space=space)
    autos = [record for record in records if record.asked and record.asked["jit_compile"] == "auto"]
    assert autos
    assert {each.outcome for each in autos} <= {Outcome.OK, Outcome.PRUNED}


def test_what_comes_to_the_same_is_measured_once(tmp_path):
    space = TINY_SPACE.replace("[1, 8]", "[1, 2, 8, 16]")
    trials = simulated_trials(
        SPEED, in_force=lambda each: {"steps_per_execution": 2} if each["steps_per_execution"] > 2 else {}, **QUIET
    )
    recipe, records = answered(tmp_path, trials, space=space, budget=600.0)
    measured = [Configuration(record.configuration) for record in searched(records) if record.pairs]
    assert len(measured) == len(set(measured))
    assert recipe.evidence.ended_by is EndedBy.EXHAUSTED
    assert all(each["steps_per_execution"] <= 2 for each in measured)


def whole_calls(configuration):
    """One iterator for 45 steps of 32 examples lowers the steps per call to a divisor of them."""
    steps = math.ceil(1437 / configuration.batch_size)
    return {"steps_per_execution": largest_divisor(steps, configuration["steps_per_execution"])}


def test_what_would_be_in_force_already_is_not_started(tmp_path):
    space = TINY_SPACE.replace("[1, 8]", "[1, 9, 10, 12]") + PERSISTENT
    trials = simulated_trials(
        SPEED, in_force=lambda each: whole_calls(each) if each["persistent_iterator"] else {}, examples=1437, **QUIET
    )
    _, records = answered(tmp_path, trials, space=space, budget=900.0)
    assert not any(record.is_repeat for record in records)
    started = {(record.asked or record.configuration)["steps_per_execution"] for record in searched(records)}
    assert started >= {1, 9, 10, 12}, "without one iterator, each is another training"


def test_what_is_seen_to_be_in_force_already_is_no_trial(directory):
    """It shows in no line, table or count; a note says why it is not measured."""
    watcher = Watcher()
    recipe = tune_simulated(
        simulated_trials(SPEED, **QUIET, xla_falls_back=True), directory, space=TINY_SPACE, observe=watcher
    )
    records = records_of(directory)
    repeats = [record.trial for record in records if record.is_repeat]
    assert repeats
    assert not {event.record.trial for event in watcher.of(TrialEnded)} & {*repeats}
    assert sum("is equivalent to" in event.text for event in watcher.of(Notice)) == len(repeats)
    assert recipe.evidence.candidates == len(searched(records)) - len(repeats)
    assert recipe.created_by.trials == len(records) - len(repeats)
    assert not {record.trial for record in page_data(RunDirectory(directory.path)).records} & {*repeats}
    shown = io.StringIO()
    show_history(load_history(directory.path), RichConsole(file=shown, width=200))
    assert f"{len(records) - len(repeats)} trials" in shown.getvalue()


def test_what_the_dataset_sets_itself_is_the_baselines_and_stays(directory):
    space = SMALL_SPACE + '[knobs.data_autotune]\nkind = "categorical"\nchoices = [true, false]\n'
    watcher = Watcher()
    trials = simulated_trials(SPEED, set_by_dataset={"data_autotune": False}, **QUIET)
    recipe = tune_simulated(trials, directory, space=space, observe=watcher, budget=60.0)
    assert recipe.baseline["data_autotune"] is False
    assert {record.configuration["data_autotune"] for record in records_of(directory)} == {False}
    assert any("dataset() sets data_autotune=false itself" in notice.text for notice in watcher.of(Notice))
    assert "data_autotune" in directory.read_run().search_space.left_out


@pytest.mark.parametrize(("bound", "largest"), [({"max_batch": 100}, 64), ({"fixed_batch": True}, 32)])
def test_the_batch_size_can_be_bounded(tmp_path, bound, largest):
    _, records = answered(tmp_path, simulated_trials(SPEED, **QUIET), space=GROWING_SPACE, **bound)
    assert max(record.configuration["batch_size"] for record in records) == largest


def test_a_bound_below_the_workloads_own_batch_is_refused(directory):
    with pytest.raises(ArgumentError, match=r"--max-batch 16 is below the workload's own batch size, which is 32"):
        tune_simulated(simulated_trials(SPEED), directory, max_batch=16)


# -------------------------------------------------------------------------------------------------- the files


def test_everything_is_written_and_told(tmp_path):
    watcher, trials = Watcher(), simulated_trials(SPEED, **NOISY)
    with on_disk(tmp_path / "run") as directory:
        recipe = tune_simulated(trials, directory, trials=4, seed=3, observe=watcher)
    records, record = records_of(directory), directory.read_run()
    numbers = [record.trial for record in records]
    assert numbers == list(range(recipe.created_by.trials))
    frame = load_history(directory.path)
    assert list(frame["trial"]) == numbers
    assert list(frame["outcome"]) == [str(record.outcome) for record in records]
    assert set(frame["phase"]) == {"baseline", "search", "confirm", "ablation"}
    assert {event.trial for event in watcher.of(TrialBegan)} == set(numbers)
    assert {event.record.trial for event in watcher.of(TrialEnded)} <= set(numbers)
    study = optuna.load_study(study_name="simulated", storage=f"sqlite:///{directory.study_file}")
    told = {trial.user_attrs["trial"] for trial in study.trials}
    assert told == {record.trial for record in records if record.phase in (Phase.BASELINE, Phase.SEARCH)}
    assert {trial.state.name for trial in study.trials} <= {"COMPLETE", "PRUNED"}
    assert sum(record.instances for record in records) == sum(trial.timed for trial in trials.launched)
    assert trials.alive == []
    assert (record.workload.examples, record.workload.device) == (1437, "cpu")
    assert (record.baseline, record.machine) == (recipe.baseline, recipe.machine) == (dict(BASELINE), MACHINE)
    assert record.search_space.choices["batch_size"] == (16, 32, 64, 128, 256, 512)
    assert (recipe.created_by.seed, recipe.created_by.run) == (3, directory.name)
    assert recipe.created_by.spent_seconds == pytest.approx(trials.clock())


# ---------------------------------------------------------------------------------------------------- failures


def test_no_file_holds_what_the_script_was_given_in_confidence(tmp_path):
    said = "no access with hunter22 and swordfish to https://me:secret99@host/"
    trials = simulated_trials(
        failure=lambda each: TrialFailed(Outcome.CRASHED, said, log_tail=said) if each["jit_compile"] else None
    )
    variables = {"DB_PASSWORD": "swordfish", "HOST_NAME": "trinity", "TF_CPP_MIN_LOG_LEVEL": "1"}
    script = ScriptFacts(trains=Trains.FIT, baseline={}, variables=variables)
    trials.facts = FACTS.model_copy(update={"script": script})
    args = ("--token", "hunter22", "--epochs", "3")
    with on_disk(tmp_path / "run") as directory:
        invocation = an_invocation(trials, directory, budget=60.0, trials=3, args=args)
        reference = invocation.reference.model_copy(update={"args": args})
        invocation = dataclasses.replace(invocation, reference=reference)
        tune_with(invocation, SearchSpace.parse(TINY_SPACE, source="test.toml"))
    write_page(directory.path)
    for file in filter(Path.is_file, directory.path.rglob("*")):
        for secret in (b"hunter22", b"swordfish", b"secret99", b"trinity"):
            assert secret not in file.read_bytes(), file
    assert trials.alive == []
    recipe = Recipe.load(directory.recipe_file)
    assert recipe.workload.args == ("--token", "***", "--epochs", "3")
    assert recipe.workload.script.variables == {**dict.fromkeys(variables, "***"), "TF_CPP_MIN_LOG_LEVEL": "1"}


def test_a_trial_that_hangs_costs_a_tenth_of_the_budget_at_most(tmp_path):
    hangs = TrialFailed(Outcome.TIMEOUT, "hangs")
    trials = simulated_trials(SPEED, **NOISY, failure=lambda each: hangs if each["jit_compile"] else None)
    _, records = answered(tmp_path, trials, budget=300.0)
    assert 0.0 < max(record.seconds for record in records if record.outcome is Outcome.TIMEOUT) <= 31.0


# -------------------------------------------------------------------------------------------------------- time

EPOCHS = ((0.05, 40), (1.0, 100), (4.0, 2000), (16.0, 3), (50.0, 8), (50.0, 8000))
"""Seconds of an epoch of the baseline, and calls in it: few calls are timed as whole epochs, however long."""
WRONG = ("nothing", "crashes", "hangs", "hangs late", "stalls late", "all hang", "machine slows down")
MACHINES = list(itertools.product((1.0, 5.0, 20.0), (0.5, 2.0, 20.0, 60.0), EPOCHS, WRONG, (2, 1)))


def machine(budget, import_seconds, start_seconds, epoch, wrong, fit):
    """Simulated trials in which XLA is half as fast again, and goes wrong in some way."""
    seconds, calls = epoch
    late = lambda: trials.clock() > 0.6 * budget  # noqa: E731  # a word for a moment

    def speed(configuration):
        factor = 1.3 if configuration.batch_size > BATCH_SIZE else 1.0
        if configuration["jit_compile"] is True:
            factor *= 1e-4 if wrong == "stalls late" and late() else 1.5
        if wrong == "machine slows down" and late():
            factor *= 0.5
        return factor * calls * BATCH_SIZE / seconds

    def failure(configuration):
        xla = configuration["jit_compile"] is True
        hanging = {"hangs": xla, "hangs late": xla and late(), "all hang": configuration != BASELINE}
        if hanging.get(wrong):
            return TrialFailed(Outcome.TIMEOUT, "hangs")
        return TrialFailed(Outcome.CRASHED, "killed") if wrong == "crashes" and xla else None

    trials = simulated_trials(
        speed,
        noise=0.08,
        instance_noise=0.01,
        failure=failure,
        import_seconds=import_seconds,
        start_seconds=start_seconds,
        examples=calls * BATCH_SIZE,
        fits_together=lambda alive: len(alive) <= fit,
    )
    return trials


@pytest.mark.parametrize("budget", [30.0, 60.0, 120.0, *LONG])
def test_budget_holds_for_any_machine_and_candidates(tmp_path, budget):
    over = {}
    for setting in random.Random(int(budget)).sample(MACHINES, 24 if budget < 300.0 else 12):
        trials = machine(budget, *setting)
        try:
            quick_tune(trials, tmp_path, budget=budget, space=SMALL_SPACE + ONEDNN)
        except BudgetError:
            assert len(trials.launched) == 1, "only a baseline that does not fit is refused"
        if trials.clock() > 1.1 * budget:
            over[setting] = trials.clock() / budget
    assert over == {}


@pytest.mark.parametrize("budget", [60.0, 120.0, *LONG])
@pytest.mark.parametrize("speed", [SPEED, flat])
def test_time_is_used_where_the_answer_is_open(tmp_path, budget, speed):
    for seed in range(3):
        trials = simulated_trials(speed, **NOISY, seed=seed)
        recipe, _ = quick_tune(trials, tmp_path, budget=budget, seed=seed)
        if recipe.evidence.verdict is Verdict.UNDECIDED:
            assert trials.clock() > budget - 10.0


SLOW = {
    "20 s to the first step": {"start_seconds": 20.0, "examples": 200_000},
    "epochs of 50 s": {"start_seconds": 5.0, "examples": 200_000},
    "a minute to compile": {"start_seconds": 60.0, "examples": 1_000_000, "import_seconds": 15.0},
}


@pytest.mark.parametrize("shape", SLOW)
def test_slow_starters_get_an_answer(tmp_path, shape):
    settings = SLOW[shape]
    budget = 40.0 * settings["start_seconds"] + 400.0
    trials = simulated_trials(faster_by(jit_compile=1.5), **QUIET, **settings)
    recipe, records = answered(tmp_path, trials, budget=budget)
    assert recipe.evidence.verdict is Verdict.FASTER
    assert recipe.configuration["jit_compile"] is True
    assert trials.clock() <= 1.1 * budget
    assert Outcome.TIMEOUT not in {record.outcome for record in records}


def test_slow_steps_are_counted_and_get_an_answer(tmp_path):
    def samples_per_second(configuration):  # 1.6 s a step
        return SPEED(configuration) / 200

    trials = simulated_trials(samples_per_second, start_seconds=8.0, examples=100_000, **QUIET)
    recipe, records = answered(tmp_path, trials, budget=300.0)
    assert recipe.evidence.verdict is Verdict.FASTER
    for record in searched(records):
        assert record.outcome is not Outcome.TIMEOUT, "what the time does not hold is not begun"
        assert record.configuration["batch_size"] > BATCH_SIZE or sum(one.steps for one in record.own_slices) <= 8
    assert len(searched(records)) >= 3


@pytest.mark.parametrize("stuck", [False, True])
def test_templates_import_unless_trials_do(directory, stuck):
    failure = TrialFailed(Outcome.CRASHED, "stuck")
    trials = simulated_trials(failure=lambda each: failure if stuck and trials.isolation == "template" else None)
    seat = open_run(an_invocation(trials, directory, budget=300.0), lambda: 0)
    assert (seat.run.import_seconds > 0) is not stuck


def test_import_longer_than_the_time_left_is_not_tried(tmp_path):
    for import_seconds in (120.0, 4.0):
        trials = simulated_trials(**QUIET, import_seconds=import_seconds)
        _, records = answered(tmp_path / str(import_seconds), trials, space=TINY_SPACE + ONEDNN, budget=240.0)
        tried = [record for record in searched(records) if record.configuration["onednn"] is False]
        assert bool(tried) is (import_seconds < 100.0)
        assert len(searched(records)) >= 3


# ----------------------------------------------------------------------------------------------- interruptions


def stopping(when, *, times=1, number=signal.SIGINT):
    """Send a signal when a trial begins."""
    sent = []

    def react(event):
        if isinstance(event, TrialBegan) and when(event) and not sent:
            sent.append(True)
            for _ in range(times):
                signal.raise_signal(number)

    return Watcher(react)


@pytest.fixture
def not_below_nohup():
    """The end of the terminal is not ignored, however these tests were started."""
    usual = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, usual)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_stopped_gives_the_verdict_it_has(directory, number, not_below_nohup):
    watcher = stopping(lambda event: event.trial == 4, number=number)
    trials = simulated_trials(SPEED, **NOISY)
    recipe = tune_simulated(trials, directory, observe=watcher, budget=3600.0)
    assert recipe.evidence.verdict is Verdict.UNDECIDED
    assert recipe.evidence.ended_by is EndedBy.INTERRUPTED
    assert Recipe.load(directory.recipe_file) == recipe
    (said,) = [notice.text for notice in watcher.of(Notice) if "--resume" in notice.text]
    assert str(directory.path) in said
    outcomes = [record.outcome for record in records_of(directory)]
    assert outcomes == [Outcome.OK] * 4 + [Outcome.INTERRUPTED]
    assert trials.clock() < 100.0
    assert trials.alive == []


def test_below_nohup_a_closed_terminal_stops_nothing(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        watcher = stopping(lambda event: event.trial == 1, number=signal.SIGHUP)
        recipe, _ = answered(tmp_path, simulated_trials(SPEED, **QUIET), observe=watcher, budget=60.0)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert recipe.evidence.ended_by is not EndedBy.INTERRUPTED


def test_run_stopped_before_its_baseline_ends_at_once(directory):
    with pytest.raises(KeyboardInterrupt):
        tune_simulated(simulated_trials(SPEED), directory, observe=stopping(lambda event: event.trial == 0))
    assert not directory.recipe_file.exists()


def test_the_second_interruption_stops_at_once(directory):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        tune_simulated(simulated_trials(SPEED), directory, observe=stopping(lambda event: event.trial == 3, times=2))
    assert [record.trial for record in records_of(directory)] == [0, 1, 2]
    assert signal.getsignal(signal.SIGINT) is before


# -------------------------------------------------------------------------------------------------- statistics


def test_equal_seeds_give_equal_recipes_and_others_differ(tmp_path):
    made = []
    for name, seed in (("first", 5), ("second", 5), ("third", 6)):
        recipe, records = answered(tmp_path / name, simulated_trials(SPEED, **NOISY), seed=seed, budget=100.0)
        document = json.loads(recipe.to_json())
        for field in ("created_at", "run", "seed"):
            del document["created_by"][field]
        made.append((document, [(record.configuration, record.pairs[:1]) for record in records]))
    assert made[0] == made[1]
    assert made[2][1] != made[0][1]


@pytest.mark.slow
def test_the_claimed_interval_covers_the_truth(tmp_path):
    covered = []
    for seed in range(40):
        trials = simulated_trials(SPEED, **NOISY, seed=seed)
        recipe, _ = quick_tune(trials, tmp_path, seed=seed, budget=240.0, trials=5)
        if recipe.evidence.verdict is Verdict.FASTER:
            low, high = recipe.evidence.speedup.low, recipe.evidence.speedup.high
            truth = SPEED(Configuration(recipe.configuration)) / SPEED(BASELINE)
            covered.append(low <= truth <= high)
    assert len(covered) >= 30
    assert sum(covered) >= 0.9 * len(covered)


@pytest.mark.slow
def test_where_nothing_is_faster_nearly_nothing_is_claimed(tmp_path):
    claims = []
    for seed, budget in zip(range(60), itertools.cycle((90.0, 300.0)), strict=False):
        trials = simulated_trials(flat, **NOISY, seed=seed)
        recipe, _ = quick_tune(trials, tmp_path, seed=seed, budget=budget, trials=4)
        claims.append(recipe.evidence.verdict is Verdict.FASTER)
    assert sum(claims) <= 3


# ------------------------------------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    ("started", "starts", "move"),
    [
        ("runtime", "TensorFlow's runtime", "tensors, datasets and device queries"),
        ("cuda", "CUDA", "tensors, datasets and device queries"),
        ("threads", "threads", "the code that starts them"),
        (None, None, None),
    ],
)
def test_what_no_fork_survives_is_told_of(started, starts, move, tmp_path):
    watcher = Watcher()
    quick_tune(simulated_trials(flat, started_by_import=started), tmp_path, observe=watcher, trials=1)
    said = [notice.text for notice in watcher.of(Notice) if "fresh interpreter" in notice.text]
    assert len(said) == (started is not None)
    for text in said:
        assert f"file starts {starts}, so each trial" in text
        assert f"move {move} into functions" in text


def test_a_gpu_that_tensorflow_does_not_see_is_told_of(tmp_path):
    watcher = Watcher()
    machine = MACHINE.model_copy(update={"gpus": (Gpu(name="NVIDIA H200", memory_bytes=1 << 37),)})
    recipe, _ = quick_tune(simulated_trials(flat), tmp_path, observe=watcher, machine=machine, trials=1)
    assert any("TensorFlow does not see it" in notice.text for notice in watcher.of(Notice))
    assert "onednn" in recipe.baseline


@pytest.mark.parametrize("later", [0.3, 0.8, 1.6])
def test_work_that_changes_with_progress_claims_nothing(tmp_path, later):
    """A live baseline has trained for longer than its candidates: their sides do not do the same work."""
    trials = simulated_trials(progress=lambda examples: later if examples > 60_000 else 1.0, **QUIET)
    recipe, _ = quick_tune(trials, tmp_path / "run")
    (check,) = recipe.evidence.stability.checks
    assert (recipe.evidence.verdict, check.name) == (Verdict.UNDECIDED, "steady_work")
    assert math.isclose(check.value, later, rel_tol=0.1)
    assert (recipe.changes, recipe.candidate, recipe.larger_batch) == ({}, None, None)


@pytest.mark.parametrize(("gain", "expected"), [(1.4, Verdict.FASTER), (1.0, Verdict.NO_SIGNIFICANT_GAIN)])
def test_a_machine_that_slows_down_is_no_changing_work(tmp_path, gain, expected):
    """Others take half of the machine for a while, again and again; no slice tells of it."""
    trials = simulated_trials(
        faster_by(jit_compile=gain), drift=lambda second: 0.5 if second % 80 > 40 else 1.0, **QUIET
    )
    recipe, _ = quick_tune(trials, tmp_path / "run")
    assert recipe.evidence.verdict is expected  # without a word of changing work
    assert all(check.passed for check in recipe.evidence.stability.checks)
    assert sum(trial.configuration == trials.launched[0].configuration for trial in trials.launched) > 2


@pytest.mark.parametrize(("gain", "verdict"), [(1.5, Verdict.FASTER), (1.0, Verdict.NO_SIGNIFICANT_GAIN)])
def test_a_claim_names_the_part_of_an_epoch_it_covers(tmp_path, gain, verdict):
    """Of an epoch of four minutes, trials see the beginning: it may be its shortest batches, or its first files."""
    trials = simulated_trials(faster_by(jit_compile=gain), examples=1_000_000, **QUIET)
    recipe, _ = quick_tune(trials, tmp_path / "run", train_samples=50_000_000, keeps_budget=False)
    evidence, terminal = recipe.evidence, RichConsole(width=250, file=io.StringIO())
    show_answer(recipe.answer, tmp_path / "recipe.json", terminal)
    shown, part = (
        " ".join(terminal.file.getvalue().split()),
        f"the first {math.ceil(100 * evidence.epoch_seen)}% of an epoch",
    )
    assert evidence.verdict is verdict
    assert 0.005 < evidence.epoch_seen < 0.3
    assert f"within {part}" in recipe.answer.headline
    assert (f"if all of an epoch trains like {part}" in shown) == (gain > 1)
    assert any("% of an epoch (no trial came so far)" in gap for gap in recipe.answer.unchecked) == (gain > 1)


@pytest.mark.parametrize(("examples", "gain"), [(1437, 1.5), (None, 1.5)])
def test_a_claim_on_whole_epochs_needs_no_part(tmp_path, examples, gain):
    trials = simulated_trials(faster_by(jit_compile=gain), examples=examples, **QUIET)
    recipe, _ = quick_tune(trials, tmp_path / "run", budget=90.0)
    assert recipe.evidence.epoch_seen is None
    assert "of an epoch" not in recipe.answer.headline
