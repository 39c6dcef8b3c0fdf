"""Runs with two answers, of the same training and of another batch size, on simulated trials whose truth is known."""

import contextlib
import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from simulated_runs import (
    BASELINE,
    FACTS,
    DirectoryWithoutStudy,
    Watcher,
    faster_by,
    go_on,
    on_disk,
    quick_tune,
    simulated_trials,
    space,
    tune_simulated,
)

from autotune.data.errors import NoStableConfigurationError
from autotune.data.facts import ScriptFacts, Trains
from autotune.data.figures import Interval
from autotune.data.record import ContinuedTraining, Outcome, Phase
from autotune.data.run_directory import STATE, EarlierLeader
from autotune.recipe.advice import answer_at
from autotune.recipe.evidence import BestCandidate, Watch
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import BranchRuns
from autotune.stats.deciding import Verdict
from autotune.tuning import standings, tune
from autotune.tuning.events import Notice, TrialEnded
from autotune.tuning.recommend import recommend
from autotune.tuning.trial import Trial

LEADER = EarlierLeader(run="one", changes={})
BOTH = space(jit_compile=[False, True], batch_size=[32, 128])
LEARNS_AS_FAST, HARDLY_LEARNS = 1e6, 8.0  # critical batch sizes


def run(tmp_path, speed, **options):
    """The recipe, the records, the trials and the events of a run to the same loss."""
    names = ("critical_batch", "branch_slowness", "failure", "on_launch")
    settings = {name: options.pop(name) for name in names if name in options}
    trials, watcher = simulated_trials(speed, noise=0.02, **settings), Watcher()
    options = {"space": BOTH, "budget": 400.0, "objective": "time_to_loss", **options}
    recipe, directory = quick_tune(trials, tmp_path, observe=watcher, **options)
    return recipe, list(directory.trials.values()), trials, watcher


def test_larger_batch_that_reaches_the_same_losses_sooner_wins(tmp_path):
    recipe, _, _, _ = run(tmp_path, faster_by(batch_size=2.0, jit_compile=1.2), critical_batch=LEARNS_AS_FAST)
    rule = recipe.learning_rate_rule
    assert recipe.evidence.verdict is Verdict.FASTER
    assert recipe.configuration["batch_size"] == 128
    assert (rule.rule, rule.factor) == ("linear", 4.0)
    assert rule.same_loss.speedup.low < 2.4 < rule.same_loss.speedup.high
    assert rule.same_loss.examples_factor.value == pytest.approx(1.0, abs=0.02)
    assert recipe.larger_batch.configuration == recipe.configuration
    assert recipe.same_training.configuration["batch_size"] == 32
    assert "sooner to the same losses" in recipe.answer.headline
    assert recipe.answer.recommended == "larger batch"
    offer = "To take the same training instead:"
    for made, is_offered in (recipe, True), (recipe.model_copy(update={"same_training": None}), False):
        commands = answer_at(made, tmp_path / "recipe.json", "train.py").commands
        assert (offer in [command.heading for command in commands]) is is_offered


def test_larger_batch_that_learns_too_slowly_is_only_shown(tmp_path):
    recipe, _, _, _ = run(tmp_path, faster_by(batch_size=2.0, jit_compile=1.3), critical_batch=HARDLY_LEARNS)
    assert recipe.changes == {"jit_compile": True}
    assert recipe.learning_rate_rule is None
    assert recipe.evidence.speedup.low < 1.3 < recipe.evidence.speedup.high
    assert recipe.larger_batch.learning_rate_rule.same_loss.speedup.high < 1.0
    assert [choice.kind for choice in recipe.answer.choices] == ["same training", "larger batch"]
    assert "nothing about learning changes" in recipe.answer.choices[0].said
    assert recipe.answer.recommended == "same training"


def test_nothing_wins_if_only_a_slow_learning_batch_is_faster(tmp_path):
    speed = faster_by(batch_size=2.0)
    recipe, _, _, _ = run(tmp_path, speed, critical_batch=HARDLY_LEARNS)
    assert (recipe.evidence.verdict, recipe.changes) == (Verdict.NO_SIGNIFICANT_GAIN, {})
    assert recipe.same_training is None
    assert recipe.larger_batch.speedup.low < 2.0 < recipe.larger_batch.speedup.high
    assert "; ".join(recipe.answer.choices[0].said) == "the baseline: nothing faster was shown"
    assert recipe.answer.recommended == "baseline"
    best = {"speedup": Interval(value=1.71, low=1.71, high=1.71), "reason": "the run ended before it was confirmed"}
    for changes, words in (
        ({"jit_compile": True}, "nothing faster is confirmed"),
        ({"batch_size": 64}, "nothing faster was shown"),
    ):
        closest = BestCandidate(configuration=recipe.baseline | changes, **best)
        assert words in "; ".join(recipe.model_copy(update={"candidate": closest}).answer.choices[0].said)


@pytest.mark.parametrize(("slower", "sizes"), [(1, {32, 128}), (60, {32})])
def test_batches_whose_learning_takes_too_long_come_late(tmp_path, slower, sizes):
    knobs = space(jit_compile=[False, True], batch_size=[32, 128], intra_op_threads=[0, 1, 2])
    _, records, _, _ = run(tmp_path, lambda known: 4000.0 / slower, space=knobs, trials=3)
    assert {record.configuration["batch_size"] for record in records if record.phase is Phase.SEARCH} == sizes


def test_larger_batch_without_branch_losses_is_not_recommended(tmp_path):
    def refuse_branches(trial):
        if isinstance(trial.losses, BranchRuns):
            raise TrialFailed("error", "the model reports no loss on held-out examples")

    speed, settings = faster_by(batch_size=2.0, jit_compile=1.2), {"critical_batch": LEARNS_AS_FAST}
    recipe, _, _, watcher = run(tmp_path, speed, on_launch=refuse_branches, **settings)
    assert recipe.changes == {"jit_compile": True}
    why = recipe.larger_batch.learning_rate_rule.not_measured
    assert why == "the model reports no loss on held-out examples"
    assert why in recipe.answer.choices[1].said[-1]
    assert [why in event.text for event in watcher.of(Notice) if "learns" in event.text] == [True]


@pytest.mark.parametrize(
    ("growth", "comparable"), [(lambda size: 1.0, False), (lambda size: float(size), True)], ids=["steps", "examples"]
)
def test_training_that_counts_steps_rules_out_a_larger_batch(tmp_path, growth, comparable):
    def count(trial):
        if isinstance(trial.losses, BranchRuns):
            counted = {"vae/kl/calls (vae.py, line 31)": (growth(trial.configuration.batch_size),) * 3}
            usual = trial.loss_curves
            trial.loss_curves = lambda *given: usual(*given).model_copy(update={"counted": counted})

    speed, settings = faster_by(batch_size=2.0, jit_compile=1.2), {"critical_batch": LEARNS_AS_FAST}
    recipe, *_ = run(tmp_path, speed, on_launch=count, **settings)
    assert (recipe.configuration["batch_size"] == 128) is comparable
    if not comparable:
        assert recipe.changes == {"jit_compile": True}
        said = "not comparable: vae/kl/calls (vae.py, line 31) counts steps"
        assert recipe.answer.choices[1].said[-1].startswith(said)


def test_learning_of_a_custom_loop_is_reported_as_not_measured(tmp_path):
    trials = simulated_trials(faster_by(batch_size=2.0, jit_compile=1.2), noise=0.02)
    trials.facts = FACTS.model_copy(update={"script": ScriptFacts(trains=Trains.LOOP, baseline={})})
    recipe, _ = quick_tune(trials, tmp_path, space=BOTH, budget=400.0, objective="time_to_loss")
    why = "losses are compared only of trainings by Keras fit"
    assert recipe.changes == {"jit_compile": True}
    assert recipe.larger_batch.configuration["batch_size"] == 128
    assert recipe.larger_batch.learning_rate_rule.not_measured == why
    assert recipe.answer.recommended == "same training"
    assert recipe.answer.choices[1].said[-1] == f"how it learns was not measured: {why}"
    assert not any(isinstance(trial.losses, BranchRuns) for trial in trials.launched)


def test_samples_per_second_may_be_asked_for(tmp_path):
    recipe, records, trials, _ = run(
        tmp_path, faster_by(batch_size=2.0), critical_batch=HARDLY_LEARNS, objective="throughput"
    )
    assert recipe.configuration["batch_size"] == 128
    assert recipe.learning_rate_rule.same_loss is None
    assert not any(isinstance(trial.losses, BranchRuns) for trial in trials.launched)
    assert not any(record.branch for record in records)


def test_every_second_candidate_trains_as_the_script_does(tmp_path):
    wide = space(jit_compile=[False, True], steps_per_execution=[1, 4, 8], batch_size=[32, 64, 128])
    _, records, _, _ = run(tmp_path, faster_by(), space=wide, trials=6)
    sizes = [record.configuration["batch_size"] for record in records if record.phase is Phase.SEARCH]
    assert sizes[0] == BASELINE.batch_size
    assert sizes.count(BASELINE.batch_size) >= len(sizes) // 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"budget": 600.0}, "and 150 s were kept for it"),
        (
            {"budget": 2100.0, "branch_slowness": 2.5, "space": space(batch_size=[32, 128])},
            "it takes longer than the 525 s that were kept for it",
        ),
    ],
    ids=["as planned", "slower than planned"],
)
def test_learning_takes_a_quarter_of_the_budget_then_spare_time(tmp_path, settings, said):
    speed = faster_by(batch_size=2.0)
    settings = {"critical_batch": LEARNS_AS_FAST, **settings}
    recipe, records, _, watcher = run(tmp_path, lambda configuration: speed(configuration) / 40, **settings)
    kept, learnt = (event.text for event in watcher.of(Notice) if "batch size 128" in event.text)
    assert kept.endswith(said)
    assert "reaches the same losses" in learnt
    assert recipe.changes == {"batch_size": 128}
    assert max(record.ended_at_seconds for record in records) < settings["budget"]


def test_same_training_wins_with_reason_if_state_is_not_saved(tmp_path):
    def save_nothing(trial):
        trial.timing = dataclasses.replace(trial.timing, save_state="")

    settings = {"critical_batch": LEARNS_AS_FAST, "on_launch": save_nothing, "budget": 60.0}
    recipe, *_ = run(tmp_path, faster_by(batch_size=2.0, jit_compile=1.4), **settings)
    assert recipe.changes == {"jit_compile": True}
    assert (
        recipe.larger_batch.learning_rate_rule.not_measured == "the state of the baseline's training could not be saved"
    )


def test_learning_skipped_for_time_is_measured_after_resuming(tmp_path):
    slow = faster_by(batch_size=2.0)
    trials = lambda: simulated_trials(  # noqa: E731
        lambda configuration: slow(configuration) / 40, noise=0.02, critical_batch=LEARNS_AS_FAST
    )
    options = {"space": space(batch_size=[32, 128]), "objective": "time_to_loss"}
    with on_disk(tmp_path / "run", DirectoryWithoutStudy) as directory:
        first = tune_simulated(trials(), directory, budget=100.0, **options)
    assert first.larger_batch.learning_rate_rule.same_loss is None
    commands = answer_at(first, tmp_path / "run" / "recipe.json", "train.py").commands
    assert any("--resume" in line for command in commands for line in command.lines)
    assert all(command.name != "candidate" for command in commands), "only undecided runs have one"
    watcher = Watcher()
    later = go_on(trials(), tmp_path / "run", budget=first.evidence.go_on_seconds, observe=watcher, **options)
    assert not any("kept for it" in event.text for event in watcher.of(Notice))
    assert later.larger_batch.learning_rate_rule.same_loss.speedup.low > 1.0
    assert later.configuration["batch_size"] == 128


def test_a_later_leader_must_be_surer_of_its_same_loss_speed_up(tmp_path, monkeypatch):
    levels, usual = [], standings.same_loss_speedup

    def noting(*arguments, level, **named):
        levels.append(level)
        return usual(*arguments, level=level, **named)

    monkeypatch.setattr(standings, "same_loss_speedup", noting)
    _, records, _, _ = run(tmp_path, faster_by(batch_size=2.0, jit_compile=1.2), critical_batch=LEARNS_AS_FAST)
    (larger,) = [record.looks[-1] for record in records if record.branch is not None]
    assert set(levels) == {1 - larger.error}
    assert levels[0] >= 0.975


@pytest.mark.parametrize("ends", ["by itself", "stopped", "before it has opened"])
def test_the_state_of_the_baseline_is_not_left_behind(tmp_path, ends, monkeypatch):
    def react(event):
        if ends == "stopped" and isinstance(event, TrialEnded) and event.record.phase is Phase.SEARCH:
            raise KeyboardInterrupt

    saved = []

    def note(trial):
        if trial.timing.save_state:
            saved.append(trial.timing.save_state)
            if ends == "before it has opened":
                monkeypatch.setattr(trial, "warm_up", partial(fail_after, trial.warm_up))

    def fail_after(warm_up, *given):
        warm_up(*given)
        assert Path(saved[-1]).exists()
        raise TrialFailed(Outcome.CRASHED, "crashed")

    trials = simulated_trials(faster_by(batch_size=2.0), noise=0.02, on_launch=note)
    with contextlib.suppress(KeyboardInterrupt, NoStableConfigurationError):
        quick_tune(trials, tmp_path, observe=Watcher(react), space=BOTH, budget=60.0, objective="time_to_loss")
    assert saved
    assert not any(Path(file).exists() for file in saved)


def test_what_fails_while_it_is_watched_is_no_answer(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(tune, "recommend", lambda **all_: given.update(all_) or recommend(**all_))
    run(tmp_path, faster_by(batch_size=2.0, jit_compile=1.2), critical_batch=LEARNS_AS_FAST)
    watched = Watch(seconds=60.0, throughput=None, checks=(), failure="it crashed")
    recipe = recommend(**{**given, "watched": watched})
    assert (recipe.evidence.verdict, recipe.changes) == (Verdict.UNSTABLE, {})
    assert recipe.same_training.confirmed
    assert recipe.larger_batch is None


def test_half_written_state_of_a_killed_run_is_saved_again(tmp_path):
    trials = simulated_trials(faster_by(batch_size=2.0), noise=0.02, critical_batch=LEARNS_AS_FAST)
    stale = tmp_path / "trials" / "0000" / STATE
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"half")
    recipe, directory = quick_tune(trials, tmp_path, space=BOTH, budget=400.0, objective="time_to_loss")
    assert directory.trial_directory(0).resolve() == stale.parent.resolve()
    assert recipe.learning_rate_rule.same_loss is not None


def test_earlier_leaders_come_first_whatever_their_batch_size(tmp_path):
    wide = BASELINE.replace(batch_size=128)
    leaders = dict.fromkeys((wide.replace(jit_compile=True), wide), LEADER)
    trials = simulated_trials(faster_by(batch_size=2.0), noise=0.02)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "starting_points", lambda found, space: leaders)
        _, directory = quick_tune(trials, tmp_path, space=BOTH, budget=90.0, objective="time_to_loss")
    tried = [record for record in directory.trials.values() if record.phase is Phase.SEARCH]
    assert [record.configuration for record in tried[:2]] == [dict(leader) for leader in leaders]


def test_faster_larger_batch_does_not_prune_the_same_training(tmp_path):
    trials = simulated_trials(faster_by(batch_size=4.0, jit_compile=1.3), noise=0.02, examples=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "starting_points", lambda found, space: {BASELINE.replace(batch_size=128): LEADER})
        _, directory = quick_tune(trials, tmp_path, space=BOTH, budget=100.0, objective="time_to_loss")
    outcomes = {
        (record.configuration["batch_size"], record.configuration["jit_compile"]): record.outcome
        for record in directory.trials.values()
        if record.phase is Phase.SEARCH
    }
    assert outcomes[32, True] is Outcome.OK


def test_trainings_that_hang_at_first_are_compared_again(tmp_path):
    hung = []

    def hang_once(trial):
        if isinstance(trial.losses, BranchRuns) and not hung:
            hung.append(trial)
            raise TrialFailed(Outcome.TIMEOUT, "no answer in time")

    settings = {"critical_batch": LEARNS_AS_FAST, "on_launch": hang_once, "space": space(batch_size=[32, 128])}
    recipe, *_ = run(tmp_path, faster_by(batch_size=2.0), **settings)
    assert hung
    assert recipe.changes == {"batch_size": 128}


def test_latest_comparison_of_a_batch_size_counts():
    wide = BASELINE.replace(batch_size=128)
    trials = {number: Trial(number, Phase.CONFIRM, wide) for number in (5, 9)}
    known = object.__new__(standings.Standings)
    known._run = SimpleNamespace(trials=trials)
    known.keep_branch(trials[9], ContinuedTraining(not_measured="it takes long", needs_seconds=60.0))
    known.keep_branch(trials[5], ContinuedTraining(not_measured="no loss"))
    assert known.branch_of(wide).not_measured == "no loss"
    known.keep_branch(trials[9], ContinuedTraining(not_measured="it takes longer", needs_seconds=90.0))
    assert known.branch_of(wide).not_measured == "it takes longer"
