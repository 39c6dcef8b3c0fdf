"""What each change of the recommended configuration gives, by leaving it out; whole runs on simulated trials."""

import dataclasses
import math
from pathlib import Path

import pytest
from simulated_runs import (
    BASELINE,
    DirectoryWithoutStudy,
    Watcher,
    a_candidate,
    a_leader,
    a_record,
    a_state,
    a_warm_up,
    faster_by,
    go_on,
    on_disk,
    quick_tune,
    simulated_trials,
    space,
    tune_simulated,
)

from autotune.data.figures import Interval, LogInterval
from autotune.data.record import Ablation, Outcome, Phase, Standing, reference_of
from autotune.recipe.evidence import Contribution
from autotune.recipe.recipe import Recipe
from autotune.report.charts import waterfall
from autotune.report.history import load_history
from autotune.runtime.executor import DeviceUnavailable, TrialFailed
from autotune.space.configuration import baseline_configuration, read_trials
from autotune.space.knobs import Device
from autotune.stats.deciding import EndedBy, Verdict
from autotune.tuning.confirmation import unmeasured_changes, without_change
from autotune.tuning.events import TrialBegan
from autotune.tuning.policy import End, FreshPair, LeaveOut, TryAnother, next_action
from autotune.tuning.seat import find_in_force

RECORDED = Path(__file__).parents[1] / "results" / "recorded" / "cpu" / "two_cores" / "train_digits_command_one"

SPEED = faster_by(jit_compile=1.5, steps_per_execution=1.3)
SPACE = space(jit_compile=[False, True], steps_per_execution=[1, 8])
BOTH = BASELINE.replace(jit_compile=True, steps_per_execution=8)


def machine(**settings):
    """Trials on a machine that starts them soon and has little noise."""
    return simulated_trials(SPEED, noise=0.01, start_seconds=0.3, **settings)


def ablations(records):
    """The trials that left a change out, by knob."""
    return {record.ablation.knob: record for record in records if record.ablation is not None}


def run(tmp_path, trials, **options):
    """The recipe of a run that ends by itself, and its trials that left a change out."""
    recipe, directory = quick_tune(trials, tmp_path, **{"space": SPACE, "budget": 600.0, **options})
    assert trials.alive == []
    return recipe, ablations(directory.trials.values()), list(directory.trials.values())


# ------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("keeps_budget", [False, True])
def test_each_change_gives_what_leaving_it_out_costs(tmp_path, keeps_budget):
    recipe, left_out, _ = run(tmp_path, machine(), keeps_budget=keeps_budget)
    assert recipe.changes == {"jit_compile": True, "steps_per_execution": 8}
    gains = {known.knob: known.gain for known in recipe.evidence.contributions}
    assert gains["jit_compile"].low < 1.5 < gains["jit_compile"].high < 1.8
    assert gains["steps_per_execution"].low < 1.3 < gains["steps_per_execution"].high < 1.6
    assert left_out["jit_compile"].configuration == dict(BASELINE.replace(steps_per_execution=8))
    assert {record.speedup for record in left_out.values()} == {None}, "it is beside the leader, not the baseline"


def test_it_comes_after_the_answer_and_changes_nothing_of_it(tmp_path):
    watcher = Watcher()
    recipe, left_out, records = run(tmp_path, machine(), keeps_budget=False, observe=watcher)
    phases = [event.phase for event in watcher.of(TrialBegan)]
    first = phases.index(Phase.ABLATION)
    assert set(phases[first:]) == {Phase.ABLATION}
    assert Phase.CONFIRM in phases[:first]
    (leader,) = {record.ablation.leader for record in left_out.values()}
    assert recipe.evidence.confirmation.trials[-1] == leader
    assert recipe.evidence.ended_by in (EndedBy.SETTLED, EndedBy.EXHAUSTED)
    taken = [record for record in records if record.phase is Phase.ABLATION]
    before = max(record.ended_at_seconds for record in records if record.phase is not Phase.ABLATION)
    assert max(record.ended_at_seconds for record in taken) < 1.6 * before


def run_failing(tmp_path, failure, fails, **options):
    """Run, where trials that leave a change out fail so with each configuration for which `fails` holds."""
    watcher = Watcher()

    def fail(configuration):
        began = watcher.of(TrialBegan)
        return failure if began and began[-1].phase is Phase.ABLATION and fails(configuration) else None

    trials = machine(failure=fail)
    return run(tmp_path, trials, observe=watcher, **options)


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.OOM, Outcome.TIMEOUT], ids=str)
def test_a_failure_without_a_change_is_data(tmp_path, outcome):
    recipe, left_out, _ = run_failing(tmp_path, TrialFailed(outcome, "late"), lambda own: not own["jit_compile"])
    assert recipe.evidence.verdict is Verdict.FASTER
    assert left_out["jit_compile"].outcome is outcome
    assert [known.knob for known in recipe.evidence.contributions] == ["steps_per_execution"]


def test_failure_of_the_winner_in_ablation_keeps_the_verdict(tmp_path):
    gone = TrialFailed(Outcome.CRASHED, "gone")
    recipe, left_out, _ = run_failing(tmp_path, gone, lambda own: own == BOTH, keeps_budget=False)
    assert recipe.evidence.verdict is Verdict.FASTER
    assert recipe.evidence.contributions == ()
    assert {record.outcome for record in left_out.values()} == {Outcome.INTERRUPTED}
    assert "the recommended configuration failed beside it: gone" in left_out["jit_compile"].reason


def test_a_device_that_is_lost_says_nothing_of_a_change(tmp_path):
    gone = DeviceUnavailable(Outcome.OOM, "gone")
    recipe, left_out, _ = run_failing(tmp_path, gone, lambda own: not own["jit_compile"], keeps_budget=False)
    assert recipe.evidence.verdict is Verdict.FASTER
    assert left_out["jit_compile"].outcome is Outcome.INTERRUPTED, "a resumed run measures it"


def test_a_resumed_run_leaves_out_what_it_had_not(tmp_path):
    path = tmp_path / "run"
    stopped = []
    watcher = Watcher(lambda event: stopped.append(event) if is_second(event, watcher) else None)
    trials = machine()
    with on_disk(path, DirectoryWithoutStudy) as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.tuning.run.Run.interrupted", lambda self: bool(stopped))
        tune_simulated(trials, directory, space=SPACE, budget=600.0, keeps_budget=False, observe=watcher)
    known = [record for record in ablations(read_trials(directory)).values() if record.outcome.measured]
    assert len(known) == 1
    recipe = go_on(machine(), path, space=SPACE, budget=600.0, keeps_budget=False)
    assert {each.knob for each in recipe.evidence.contributions} == {"jit_compile", "steps_per_execution"}
    (first,) = (contribution for contribution in recipe.evidence.contributions if contribution.trial == known[0].trial)
    assert first.gain == known[0].ablation.gain


def is_second(event, watcher):
    """Whether the second ablation begins: each has two trials."""
    is_ablation = isinstance(event, TrialBegan) and event.phase is Phase.ABLATION
    return is_ablation and sum(event.phase is Phase.ABLATION for event in watcher.of(TrialBegan)) > 2


def test_the_history_has_the_knob_and_its_gain(tmp_path):
    with on_disk(tmp_path / "run", DirectoryWithoutStudy) as directory:
        tune_simulated(machine(), directory, space=SPACE, budget=600.0, keeps_budget=False)
    frame = load_history(tmp_path)
    rows = frame[frame.left_out.notna()].set_index("left_out")
    assert set(rows.index) == {"jit_compile", "steps_per_execution"}
    assert rows.gain["jit_compile"] == pytest.approx(1.5, rel=0.1)
    assert (rows.gain_low < rows.gain).all()
    assert rows.speedup.isna().all()
    assert not rows.confirmed.any()


# -------------------------------------------------------------------------------------------------- decisions


LEADER = a_leader(
    9,
    standing=Standing.CONFIRMED,
    low=0.4,
    high=0.55,
    processes=12,
    unmeasured_changes=("jit_compile",),
    ablation_seconds=10.0,
)
TIRED = (a_candidate(9, 0.5, processes=2), *(a_candidate(number, -0.5) for number in range(10, 19)))


def test_run_without_budget_ablates_changes_before_it_ends():
    state = {"leaders": (LEADER,), "keeps_budget": False}
    assert next_action(a_state(*TIRED, **state, ablation_seconds=10.0)) == LeaveOut(90, "jit_compile")
    assert next_action(a_state(*TIRED, **state, ablation_seconds=9.0)) == End(EndedBy.SETTLED)
    assert next_action(a_state(*TIRED, **state, ablation_seconds=10.0, left=9.0)) == End(EndedBy.SETTLED)


def test_a_budget_is_searched_with_until_nothing_gets_faster():
    state = {"leaders": (LEADER,), "ablation_seconds": 10.0}
    assert next_action(a_state(*TIRED, **state)) == LeaveOut(90, "jit_compile")
    assert next_action(a_state(*TIRED[:3], **state)) == TryAnother()
    assert next_action(a_state(*TIRED, leaders=(LEADER,), ablation_seconds=9.0)) == TryAnother()


def test_a_wide_claim_is_narrowed_before_the_run_ends():
    wide = dataclasses.replace(LEADER, ratio=LogInterval(value=0.4, low=0.2, high=0.6, count=4), processes=4)
    state = a_state(*TIRED[:3], leaders=(wide,), ablation_seconds=10.0, candidate_seconds=5.0, left=15.0)
    assert next_action(state) == FreshPair(90)


def test_time_that_nothing_else_can_use_is_not_limited():
    unused = a_state(*TIRED[:3], leaders=(LEADER,), more_candidates=False)
    assert next_action(unused) == LeaveOut(90, "jit_compile")


def test_ablation_skips_measured_and_sole_changes():
    done = a_record(
        BASELINE, phase=Phase.ABLATION, ablation=Ablation(knob="jit_compile", leader=5, reference=6), trial=7
    )
    assert unmeasured_changes(5, BOTH, BASELINE, []) == ("jit_compile", "steps_per_execution")
    assert unmeasured_changes(5, BOTH, BASELINE, [done]) == ("steps_per_execution",)
    assert unmeasured_changes(8, BOTH, BASELINE, [done]) == ("jit_compile", "steps_per_execution")
    assert unmeasured_changes(5, BASELINE.replace(jit_compile=True), BASELINE, []) == ()
    assert without_change(BOTH, "jit_compile", BASELINE) == BASELINE.replace(steps_per_execution=8)


ON_GPU = baseline_configuration(32, {}, Device.GPU, where="baseline")
OWN_THREADS = ON_GPU.replace(gpu_thread_mode="gpu_private", gpu_thread_count=8)


def test_what_acts_only_beside_a_change_leaves_with_it():
    assert without_change(OWN_THREADS, "gpu_thread_mode", ON_GPU) == ON_GPU
    assert without_change(OWN_THREADS, "gpu_thread_count", ON_GPU) == OWN_THREADS.replace(gpu_thread_count=2)


def test_what_does_nothing_beside_what_is_in_force_is_reset():
    started = a_warm_up().started.model_copy(update={"in_force": {"gpu_thread_mode": "global"}})
    assert find_in_force(OWN_THREADS, started, ON_GPU) == ON_GPU.replace(jit_compile=False)


def test_its_slices_stand_beside_the_leaders():
    reference = a_record(BOTH, phase=Phase.ABLATION, trial=6)
    left_out = Ablation(knob="jit_compile", leader=5, reference=6)
    record = a_record(BASELINE, phase=Phase.ABLATION, ablation=left_out, trial=7)
    baseline = a_record(trial=0, phase=Phase.BASELINE)
    assert reference_of(record, [baseline, reference, record]) == reference
    assert reference_of(record, [baseline, record]) == baseline


# -------------------------------------------------------------------------------------------------- waterfall


def recipe_with(recipe, total, **gains):
    """A recipe whose whole gain and single gains are these."""
    contributions = tuple(
        Contribution(knob=knob, gain=Interval(value=gain, low=gain * 0.9, high=gain * 1.1), trial=9)
        for knob, gain in gains.items()
    )
    speedup = Interval(value=total, low=total * 0.9, high=total * 1.1)
    evidence = recipe.evidence.model_copy(update={"contributions": contributions, "speedup": speedup})
    return recipe.model_copy(update={"configuration": dict(BOTH), "baseline": dict(BASELINE), "evidence": evidence})


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe of a run."""
    return quick_tune(machine(), tmp_path_factory.mktemp("run"), space=SPACE)[0]


def test_the_steps_of_a_waterfall_lead_from_one_to_the_whole(recipe):
    steps = waterfall(recipe_with(recipe, 3.0, jit_compile=1.25, steps_per_execution=2.0))
    assert [step.name for step in steps] == ["steps_per_execution=8", "jit_compile=true", "acting together"]
    assert [step.begins_at for step in steps] == [1.0, 2.0, 2.5]
    assert steps[-1].gain.value == pytest.approx(1.2)
    assert math.isclose(steps[-1].ends_at, 3.0)


def test_waterfall_omits_the_rest_if_changes_explain_the_gain(recipe):
    steps = waterfall(recipe_with(recipe, 3.0, jit_compile=1.5, steps_per_execution=2.0))
    assert len(steps) == 2


def test_what_was_not_left_out_is_named(recipe):
    steps = waterfall(recipe_with(recipe, 3.0, jit_compile=1.5))
    assert steps[-1].name == "steps_per_execution (not left out), acting together"


def test_where_nothing_was_left_out_all_changes_are_one_step(recipe):
    for gains in ({}, {"batch_size": 1.5}):  # a change that the recipe does not make
        whole = recipe_with(recipe, 3.0, **gains)
        (step,) = waterfall(whole)
        assert step.gain == whole.evidence.speedup
        assert step.name == "jit_compile=true, steps_per_execution=8"
    assert waterfall(recipe.with_baseline()) == ()


def test_the_last_step_is_what_the_same_losses_need():
    found = Recipe.load(RECORDED / "recipe.json")
    step = waterfall(found)[-1]
    assert step.name == "the same losses need ×0.88 the examples"
    assert step.ends_at == pytest.approx(found.answer.speedup.value, rel=0.001)


def test_ablation_skips_a_change_that_another_one_causes(tmp_path):
    def in_force(configuration):
        return {"prefetch": 2 if configuration["steps_per_execution"] == 8 else 0}

    trials = machine(in_force=in_force)
    recipe, left_out, _ = run(tmp_path, trials)
    assert recipe.changes == {"jit_compile": True, "steps_per_execution": 8, "prefetch": 2}
    assert left_out.keys() == {"jit_compile", "steps_per_execution"}
    assert left_out["steps_per_execution"].configuration == dict(BASELINE.replace(jit_compile=True))
    assert waterfall(recipe)[-1].name == "prefetch (not left out), acting together"
