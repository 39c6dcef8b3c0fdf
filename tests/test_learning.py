"""Runs with two answers, of the same training and of another batch size, on simulated trials whose truth is known."""

import pytest
from simulated_runs import BASELINE, Watcher, faster_by, quick_tune, simulated_trials
from test_loop import space

from autotune.data.record import GradientNoise, Phase
from autotune.recipe.advice import verdict_in_words
from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import BranchRuns
from autotune.stats.deciding import Verdict
from autotune.tuning.events import Notice

BOTH = space(jit_compile=[False, True], batch_size=[32, 128])
LEARNS_AS_FAST, HARDLY_LEARNS = 1e6, 8.0  # critical batch sizes


def run(tmp_path, speed, **options):
    """The recipe, the records, the trials and the events of a run to the same loss."""
    names = ("critical_batch", "failure", "gradient_noise")
    settings = {name: options.pop(name) for name in names if name in options}
    trials, watcher = simulated_trials(speed, noise=0.02, **settings), Watcher()
    options = {"space": BOTH, "budget": 400.0, "objective": "time_to_loss", **options}
    recipe, directory = quick_tune(trials, tmp_path, observe=watcher, **options)
    return recipe, list(directory.trials.values()), trials, watcher


def test_a_larger_batch_that_reaches_the_same_losses_sooner_is_recommended(tmp_path):
    recipe, _, _, _ = run(tmp_path, faster_by(batch_size=2.0, jit_compile=1.2), critical_batch=LEARNS_AS_FAST)
    rule = recipe.learning_rate_rule
    assert recipe.evidence.verdict is Verdict.FASTER
    assert recipe.configuration["batch_size"] == 128
    assert (rule.rule, rule.factor, recipe.learning_rate(0.001)) == ("linear", 4.0, 0.004)
    assert rule.same_loss.speedup.low < 2.4 < rule.same_loss.speedup.high
    assert rule.same_loss.examples_factor.value == pytest.approx(1.0, abs=0.02)
    assert recipe.larger_batch.configuration == recipe.configuration
    assert recipe.same_training.configuration["batch_size"] == 32
    assert "sooner to the same losses" in verdict_in_words(recipe)
    assert dict(recipe.answers)["Recommended"] == "larger batch"


def test_a_larger_batch_that_needs_too_many_examples_is_shown_and_not_recommended(tmp_path):
    recipe, _, _, _ = run(tmp_path, faster_by(batch_size=2.0, jit_compile=1.3), critical_batch=HARDLY_LEARNS)
    assert recipe.changes == {"jit_compile": True}
    assert recipe.learning_rate_rule is None
    assert recipe.evidence.speedup.low < 1.3 < recipe.evidence.speedup.high
    assert recipe.larger_batch.learning_rate_rule.same_loss.speedup.high < 1.0
    answers = recipe.answers
    assert [heading for heading, _ in answers] == ["Same training", "Larger batch", "", "Recommended"]
    assert "nothing about learning changes" in answers[0][1]
    assert answers[-1] == ("Recommended", "same training")


def test_where_only_a_larger_batch_is_faster_and_learns_too_slowly_nothing_is(tmp_path):
    speed = faster_by(batch_size=2.0)
    recipe, _, _, _ = run(tmp_path, speed, critical_batch=HARDLY_LEARNS)
    assert (recipe.evidence.verdict, recipe.changes) == (Verdict.NO_SIGNIFICANT_GAIN, {})
    assert recipe.same_training is None
    assert recipe.larger_batch.speedup.low < 2.0 < recipe.larger_batch.speedup.high
    assert recipe.answers[0][1] == "nothing faster was shown than the baseline"


def test_without_losses_of_the_branches_a_larger_batch_is_not_recommended(tmp_path):
    trials = simulated_trials(faster_by(batch_size=2.0, jit_compile=1.2), noise=0.02, critical_batch=LEARNS_AS_FAST)
    launch = trials.launch

    def without_branches(configuration, *, losses=None, **how):
        if isinstance(losses, BranchRuns):
            raise TrialFailed("error", "the model reports no loss on held-out examples")
        return launch(configuration, losses=losses, **how)

    trials.launch = without_branches
    watcher = Watcher()
    options = {"space": BOTH, "budget": 400.0, "objective": "time_to_loss"}
    recipe, _ = quick_tune(trials, tmp_path, observe=watcher, **options)
    assert recipe.changes == {"jit_compile": True}
    why = recipe.larger_batch.learning_rate_rule.not_measured
    assert why == "the model reports no loss on held-out examples"
    assert why in recipe.answers[2][1]
    assert [why in event.text for event in watcher.of(Notice) if "learns" in event.text] == [True]


def test_samples_per_second_may_be_asked_for(tmp_path):
    recipe, records, trials, _ = run(
        tmp_path, faster_by(batch_size=2.0), critical_batch=HARDLY_LEARNS, objective="throughput"
    )
    assert recipe.configuration["batch_size"] == 128
    assert recipe.learning_rate_rule.same_loss is None
    assert not any(isinstance(trial._losses, BranchRuns) for trial in trials.launched)
    assert not any(record.branch for record in records)


def test_every_second_candidate_trains_as_the_script_does(tmp_path):
    wide = space(jit_compile=[False, True], prefetch=[0, 2, 8], batch_size=[32, 64, 128])
    _, records, _, _ = run(tmp_path, faster_by(), space=wide, trials=6)
    sizes = [record.configuration["batch_size"] for record in records if record.phase is Phase.SEARCH]
    assert sizes[0] == BASELINE.batch_size
    assert sizes.count(BASELINE.batch_size) >= len(sizes) // 2


def test_comparing_how_leaders_learn_takes_a_quarter_of_the_budget_at_most(tmp_path):
    slow = faster_by(batch_size=2.0)
    _, records, _, watcher = run(
        tmp_path, lambda configuration: slow(configuration) / 40, critical_batch=LEARNS_AS_FAST, budget=600.0
    )
    spent = sum(record.branch.seconds for record in records if record.branch is not None)
    assert spent <= 150.0 + 1.0
    assert any("learns was not measured" in event.text for event in watcher.of(Notice)) or spent > 0


def a_noise(batch_size, *, parts=32, examples=4):
    """Gradients of parts of a batch whose noise scale is surely this batch size."""
    product = 1.0 + batch_size / examples / parts
    square = product + batch_size / examples * (parts - 1) / parts
    return GradientNoise(examples=examples, squares=(square,) * parts, products=(product,) * parts)


def test_the_noise_of_the_baselines_gradient_says_which_batch_sizes_are_worth_a_trial(tmp_path):
    def speed(configuration):  # a step takes 1 ms, and 5 µs per example
        return configuration.batch_size / (0.001 + 5e-6 * configuration.batch_size)

    def tried(batch_size):
        sizes = space(batch_size=[16, 32, 64, 128, 256, 512, 1024, 2048], jit_compile=[False, True])
        noise = a_noise(batch_size)
        _, records, _, _ = run(tmp_path / f"{batch_size}", speed, space=sizes, gradient_noise=noise)
        assert records[0].processes[0].gradient_noise == noise
        return [record.configuration["batch_size"] for record in records if record.phase is Phase.SEARCH]

    assert max(tried(40)[:5]) <= 256
    assert max(tried(12_000)[:5]) >= 1024
