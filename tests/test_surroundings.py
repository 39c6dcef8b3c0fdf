"""What the shell and the user's file set by themselves becomes the baseline's, or is refused."""

import re
from dataclasses import replace

import pytest
from simulated_runs import (
    BASELINE,
    FACTS,
    Watcher,
    a_slice,
    a_warm_up,
    faster_by,
    go_on,
    on_disk,
    quick_tune,
    simulated_trials,
    tune_simulated,
)

from autotune.data.errors import BudgetError, WorkloadError
from autotune.data.facts import GpuUse, ScriptFacts, Trains
from autotune.data.record import TrialRecord
from autotune.recipe.apply import environment
from autotune.space.knobs import Device
from autotune.tuning.events import Notice, TrialBegan, TrialEnded
from autotune.tuning.notices import (
    adopt_imported_settings,
    baseline_warnings,
    budget_note,
    instabilities,
    other_load,
    refuse_knobs_that_cannot_act,
    samples_of,
    script_notes,
    worth_notes,
)

DEFAULTS = {
    "onednn": True,
    "intra_op_threads": 0,
    "inter_op_threads": 0,
    "tensor_float_32": True,
    "precision": "float32",
}


def facts(baseline=None, *, takes_config=True, validates=False, **in_force):
    """What a template found: TensorFlow's defaults, but for these."""
    return FACTS.model_copy(
        update={
            "baseline": baseline or {},
            "takes_config": takes_config,
            "validates": validates,
            "in_force": DEFAULTS | in_force,
        }
    )


def taken(found, baseline=BASELINE):
    """The baseline, and the notices."""
    return adopt_imported_settings(baseline, found, where="train.py:workload")


def space_of(**knobs):
    """A search space of these knobs, with their choices in TOML."""
    tables = [f'[knobs.{name}]\nkind = "categorical"\nchoices = {choices}' for name, choices in knobs.items()]
    return "\n".join(["schema_version = 1", *tables])


@pytest.fixture
def shell(monkeypatch):
    """The variables that the shell hands over."""
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value"), [("precision", "mixed_bfloat16"), ("intra_op_threads", 1), ("inter_op_threads", 3)]
)
def test_what_the_file_sets_is_the_baselines(shell, name, value):
    baseline, notices = taken(facts(**{name: value}))
    assert baseline == BASELINE.replace(**{name: value})
    assert len(notices) == 1
    assert f"importing train.py:workload sets {name}={value}" in notices[0]
    assert "recipe.apply() after that import" in notices[0]


@pytest.mark.parametrize(
    ("found", "baseline"),
    [
        (facts(), {}),
        (facts({"precision": "mixed_bfloat16"}, precision="mixed_bfloat16"), {"precision": "mixed_bfloat16"}),
        (facts({"precision": "mixed_bfloat16"}), {"precision": "mixed_bfloat16"}),
        (facts({"intra_op_threads": 1}), {"intra_op_threads": 1}),
        (facts({"inter_op_threads": 3}), {"inter_op_threads": 3}),
    ],
    ids=["defaults", "the workload and the file", "precision", "intra_op_threads", "inter_op_threads"],
)
def test_what_the_workload_names_stands_without_a_word(shell, found, baseline):
    own = BASELINE.replace(**baseline)
    assert taken(found, own) == (own, ())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            facts({"precision": "float32"}, precision="mixed_float16"),
            "sets precision='mixed_float16', but the baseline has 'float32'",
        ),
        (facts(precision="mixed_float64"), "sets precision='mixed_float64'"),
        (facts(onednn=False), "sets onednn=False, but the baseline has True"),
    ],
)
def test_a_file_that_denies_the_baseline_is_refused(shell, found, message):
    with pytest.raises(WorkloadError, match=message) as caught:
        taken(found)
    assert "mixed_float64" not in message or "mixed_bfloat16" in caught.value.hint


def test_the_shells_variable_is_the_baselines(shell):
    shell.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    baseline, notices = taken(facts(onednn=False))
    assert baseline == BASELINE.replace(onednn=False)
    assert "the environment sets onednn=false" in notices[0]
    assert taken(facts({"onednn": True}, onednn=False)) == (BASELINE, ()), "the workload names another"


def test_a_knob_that_its_dataset_never_hears_of_is_refused():
    with pytest.raises(WorkloadError, match="names num_parallel_calls") as caught:
        refuse_knobs_that_cannot_act(facts({"num_parallel_calls": 4}, takes_config=False), where="train.py")
    assert "def dataset(config)" in caught.value.hint
    refuse_knobs_that_cannot_act(facts({"num_parallel_calls": 4}), where="train.py")
    refuse_knobs_that_cannot_act(facts({"num_parallel_calls": 0}, takes_config=False), where="train.py")


@pytest.mark.parametrize(
    ("name", "variable"),
    [("intra_op_threads", "TF_NUM_INTRAOP_THREADS"), ("inter_op_threads", "TF_NUM_INTEROP_THREADS")],
)
def test_threads_of_the_shell_become_the_baselines(shell, name, variable):
    shell.setenv(variable, "3")
    baseline, (notice,) = taken(facts(**{name: 3}))
    assert baseline[name] == 3
    assert notice == f"the environment sets {name}=3, so the baseline has it too"
    named = BASELINE.replace(**{name: 2})
    assert taken(facts({name: 2}, **{name: 3}), named) == (named, ())


def test_xla_that_keras_turns_off_is_said():
    (said,) = baseline_warnings(facts({"jit_compile": True}), a_warm_up(), Device.CPU)
    assert "names jit_compile=true, but Keras turns XLA off" in said


def test_settings_that_are_no_knobs_are_said_and_in_the_recipe(tmp_path):
    trials, watcher = simulated_trials(faster_by(batch_size=1.5), noise=0.02), Watcher()
    trials.not_knobs = ("TF_XLA_FLAGS=--x",)
    recipe, _ = quick_tune(trials, tmp_path, observe=watcher, budget=60.0)
    assert recipe.workload.settings == trials.not_knobs
    assert any(notice.text.startswith("TF_XLA_FLAGS=--x is in force in all trials") for notice in watcher.of(Notice))


def test_what_does_nothing_on_the_device_is_said():
    found = list(baseline_warnings(facts({"tensor_float_32": False, "prefetch": 2}), a_warm_up(), Device.CPU))
    assert found == ["Workload(baseline=…) names tensor_float_32, which does nothing on the cpu: omitted"]


def test_validation_without_epochs_is_said():
    endless = a_warm_up(examples=None, epoch_seconds=None)
    assert any(
        "validation is not measured" in each for each in baseline_warnings(facts(validates=True), endless, Device.CPU)
    )
    assert list(baseline_warnings(facts(), endless, Device.CPU)) == []
    assert list(baseline_warnings(facts(validates=True), a_warm_up(), Device.CPU)) == []


@pytest.mark.parametrize(
    ("examples", "uncounted", "timed_by", "said"),
    [
        (None, False, "steps", "the training dataset has unknown cardinality"),
        (None, True, "steps", "the training dataset has unknown cardinality"),
        (1000, True, "steps", "the validation dataset has unknown cardinality"),
        (1000, False, "steps", None),
        (1000, True, "epochs", None),  # a slice holds whole validations
    ],
)
def test_data_of_unknown_length_is_said(examples, uncounted, timed_by, said):
    warm = a_warm_up(epoch_seconds=0.36 if timed_by == "epochs" else None)
    found = {"examples": examples, "validation_uncounted": uncounted, "endless": False}
    warm = replace(warm, started=warm.started.model_copy(update=found))
    notices = list(baseline_warnings(facts(validates=True), warm, Device.CPU))
    assert len(notices) == (said is not None)
    assert all(said in notice and "assert_cardinality" in notice for notice in notices)


def test_batches_are_not_read_ahead_of_what_changes(shell, tmp_path):
    trials, watcher = simulated_trials(faster_by(prefetch=3.0, jit_compile=1.5), noise=0.02), Watcher()
    space = space_of(prefetch="[0, 2]", jit_compile="[false, true]")
    trials.reads_changing = "the function in train.py, line 3, reads a variable"
    recipe, _ = quick_tune(trials, tmp_path, observe=watcher, space=space)
    assert recipe.changes == {"jit_compile": True}
    knobs = "persistent_iterator, prefetch, num_parallel_calls"
    assert f"not varied: {knobs}: {trials.reads_changing}" in [notice.text for notice in watcher.of(Notice)]


@pytest.mark.parametrize("allowed", [False, True])
def test_a_precision_that_the_file_chooses_is_kept(shell, tmp_path, allowed):
    compiled = faster_by(jit_compile=1.5)
    low = {"mixed_bfloat16": 3.0}  # over the file's float64
    trials = simulated_trials(lambda own: compiled(own) * low.get(own["precision"], 1.0), noise=0.02)
    trials.facts = facts(precision="float64")
    watcher = Watcher()
    space = space_of(precision='["float64", "mixed_bfloat16"]', jit_compile="[false, true]")
    recipe, _ = quick_tune(trials, tmp_path, observe=watcher, space=space, allow_precision=allowed)
    assert (recipe.baseline["precision"], recipe.configuration["jit_compile"]) == ("float64", True)
    assert ("precision" in recipe.changes) is allowed
    said = "not varied: precision: the workload chooses precision=float64; --allow-precision varies it"
    notices = [notice.text for notice in watcher.of(Notice)]
    assert (said in notices) is not allowed
    assert any("sets precision=float64" in text for text in notices)


@pytest.mark.parametrize(
    ("text", "on"), [("0", False), ("false", False), ("False", False), ("1", True), ("true", True)]
)
def test_words_of_the_shell_are_read_as_tensorflow_reads_them(shell, text, on):
    shell.setenv("TF_ENABLE_ONEDNN_OPTS", text)
    assert environment({"onednn": on}) == {}
    assert environment({"onednn": not on}) == {"TF_ENABLE_ONEDNN_OPTS": "0" if on else "1"}


def slices_with(**figures):
    """Three slices of half a second that have these figures."""
    return [a_slice().model_copy(update=figures)] * 3


def test_a_baseline_that_is_unstable_itself_is_told_of():
    (retraces,) = instabilities(slices_with(retraces=2))
    assert "the workload retraces: 6 times in 1.5 s of the baseline" in retraces
    assert "pad, bucket" in retraces
    (skips,) = instabilities(slices_with(skipped_steps=10))
    assert "skips 30 of 186 steps" in skips
    assert list(instabilities(slices_with(retraces=0, skipped_steps=1))) == []
    assert list(instabilities(slices_with())) == []


def test_what_the_note_on_the_budget_is_of_is_said():
    (short,) = worth_notes("one call of fit", 10.0, 60.0)
    assert short.startswith("one call of fit takes 10 s with the current settings, less than the budget")
    (long,) = worth_notes("the training", 360000.0, 100_000.0)
    assert long == "the training takes 100.0 hours with the current settings: the budget of 27.8 hours is 28% of that"
    (minutes,) = worth_notes("one call of fit", 360.0, 60.0)
    assert minutes == "one call of fit takes 6 min with the current settings: the budget of 60 s is 17% of that"
    (instant,) = worth_notes("one call of fit", 0.3, 60.0)
    assert instant.startswith("one call of fit takes 0.3 s with the current settings")


@pytest.mark.parametrize(
    ("seconds", "share"), [(0.35, "they add 0.35 s to an epoch"), (None, "no figure contains their time")]
)
def test_what_writers_take_is_said_and_part_of_a_total(seconds, share):
    script = ScriptFacts(
        trains=Trains.FIT, baseline={}, left_out=("ModelCheckpoint (train.py, line 40)",), writing_seconds=seconds
    )
    assert f"trials omit these writers: ModelCheckpoint (train.py, line 40); {share}" in list(script_notes(script, 1.0))
    assert script.total_seconds(3000, 100.0, 1000) == pytest.approx(30.0 + 3 * (seconds or 0.0))
    assert script.total_seconds(3000, 100.0, None) == 30.0


@pytest.mark.parametrize(("ender", "samples"), [("", 5000), ("TimeLimit (train.py, line 9)", None)])
def test_a_training_that_may_end_early_has_no_known_samples(ender, samples):
    script = ScriptFacts(trains=Trains.FIT, baseline={}, epochs=50, ends_early=ender)
    assert samples_of(script, 100) == samples
    said = "TimeLimit (train.py, line 9) may end the training before its 50 epochs: no total time is claimed"
    assert (said in list(script_notes(script, 1.0))) is bool(ender)


@pytest.mark.parametrize(
    ("foreign", "steal", "told"),
    [(0.1, 0.0, None), (0.4, 0.0, "40% of the processor"), (0.1, 0.5, "60% of the processor"), (None, None, None)],
)
def test_a_steady_foreign_load_is_said_at_the_start(foreign, steal, told):
    slices = [a_slice().model_copy(update={"cores": 2, "foreign_cpu_seconds": foreign, "steal_seconds": steal})] * 3
    found = list(other_load(slices))
    assert bool(found) == bool(told)
    assert not told or told in found[0]


def test_one_busy_moment_is_no_steady_load():
    quiet, busy = (a_slice().model_copy(update={"cores": 1, "foreign_cpu_seconds": seconds}) for seconds in (0.01, 0.5))
    assert list(other_load([quiet, busy, quiet])) == []
    assert len(list(other_load([busy, busy, quiet]))) == 1


def a_baseline(*rates, foreign=0.0, start_seconds=2.0):
    """A baseline's record, whose slices alone had these rates."""
    slices = [a_slice(rate).model_copy(update={"cores": 2, "foreign_cpu_seconds": foreign}) for rate in rates]
    figures = {"first_step_seconds": start_seconds, "warmup_seconds": 1.0, "timed_by": "steps", "slices": slices}
    facts = {"trial": 0, "phase": "baseline", "configuration": dict(BASELINE), "outcome": "ok", "started_at": "now"}
    return TrialRecord(**facts, **figures, seconds=5.0)


def numbers_in(text):
    """The gains, and the budget in minutes, that a note on a budget names."""
    return [int(number) for number in re.findall(r"(\d+)[%m]", text)]


def test_what_a_budget_can_show_follows_the_baselines_slices():
    steady, noisy = a_baseline(4000, 4010, 3990), a_baseline(4000, 5500, 3000)
    text = budget_note(300.0, steady, spent=10.0)
    assert text.startswith("on this machine as it is now, 5:00 can show gains above")
    (quiet,) = numbers_in(text)  # no longer budget is named
    least, longer, later = numbers_in(budget_note(120.0, noisy, spent=10.0))
    assert quiet < later <= least / 2
    assert numbers_in(budget_note(60.0 * longer, noisy, spent=10.0))[0] == later
    busy = budget_note(300.0, a_baseline(4000, 4010, 3990, foreign=0.5), spent=10.0)
    assert busy.startswith("this machine is busy: 5:00 can show gains above")
    assert numbers_in(busy)[0] > quiet


def test_a_budget_that_holds_no_trial_is_refused():
    slow = a_baseline(4000, 4010, start_seconds=20.0)
    assert "1:30 can show no gain; --budget" in budget_note(90.0, slow, spent=30.0), "it holds a trial"
    with pytest.raises(BudgetError, match="is too short for one trial: the baseline takes 30 s and") as refused:
        budget_note(50.0, slow, spent=30.0)
    (least,) = numbers_in(refused.value.hint)
    assert "can show gains" in budget_note(60.0 * least, slow, spent=30.0)
    assert "can show no gain" in budget_note(60.0 * least - 60.0, slow, spent=30.0)


def test_a_new_run_says_once_what_its_budget_can_show(tmp_path):
    told = Watcher()
    with on_disk(tmp_path / "run") as directory:
        tune_simulated(simulated_trials(noise=0.1), directory, budget=60.0, observe=told)
    go_on(simulated_trials(noise=0.1), tmp_path / "run", budget=30.0, observe=told)
    ended, noted = (told.events.index(told.of(kind)[0]) for kind in (TrialEnded, Notice))
    assert ended < noted < told.events.index(told.of(TrialBegan)[1]), "after the baseline, before the first trial"
    assert [("can show" in notice.text) for notice in told.of(Notice)].count(True) == 1
    with pytest.raises(BudgetError, match="is too short for one trial"):
        quick_tune(simulated_trials(), tmp_path / "short", budget=12.0)


def test_a_card_that_others_work_on_is_said():
    quiet, busy = ({"limited_by": (), "others": 1, "foreign_utilisation": share} for share in (0.0, 0.5))
    for use, told in ((quiet, 0), (busy, 1)):
        on_card = a_slice().model_copy(update={"gpus": (GpuUse.model_validate(use),)})
        assert len([text for text in other_load([on_card]) if "50% of the GPU" in text]) == told
