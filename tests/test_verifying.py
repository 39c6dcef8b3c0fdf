"""A recipe's claim, measured again on simulated trials: it holds, is weaker, is gone, or cannot be told."""

import math

import pytest
from simulated_runs import (
    LIMITS,
    MACHINE,
    REFERENCE,
    Watcher,
    faster_by,
    on_disk,
    quick_tune,
    simulated_trials,
)

from autotune.errors import ArgumentError, RecipeError
from autotune.measure.deciding import Finding, finding
from autotune.measure.intervals import LogInterval
from autotune.measure.stability import MEMORY_MARGIN
from autotune.study import verifying
from autotune.study.progress import Notice
from autotune.study.verifying import verify, verify_with
from autotune.trial.live import TrialFailed
from autotune.trial.record import Outcome

SPACE = """
schema_version = 1
[knobs.batch_size]
kind = "categorical"
choices = [32, 128]
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe that claims ×1.5 for a batch of 128."""
    made, _ = quick_tune(
        simulated_trials(faster_by(batch_size=1.5), noise=0.03), tmp_path_factory.mktemp("run"), space=SPACE
    )
    assert made.configuration["batch_size"] == 128
    return made


def found(recipe, path, *, speed=1.5, budget=100.0, observe=None, **settings):
    """The verification on a machine where the batch gives this."""
    trials = simulated_trials(faster_by(batch_size=speed), **{"noise": 0.03, "seed": 8, **settings})
    with on_disk(path / "run") as directory:
        verification = verify_with(
            trials,
            recipe,
            directory=directory,
            machine=MACHINE,
            limits=LIMITS,
            reference=REFERENCE,
            budget=budget,
            seed=0,
            clock=trials.clock,
            observe=observe or Watcher(),
        )
    assert trials.alive == []
    assert trials.clock() <= 1.1 * budget
    return verification


@pytest.mark.parametrize(
    ("speed", "expected"),
    [
        (1.5, Finding.HOLDS),
        (1.8, Finding.HOLDS),
        (1.2, Finding.WEAKER),
        (1.0, Finding.GONE),
        (0.8, Finding.GONE),
    ],
)
def test_what_the_batch_gives_now_decides(recipe, tmp_path, speed, expected):
    """As much or more holds; less, but something, is weaker; nothing is gone."""
    verification = found(recipe, tmp_path, speed=speed)
    assert verification.finding is expected
    assert verification.claimed.value == recipe.evidence.speedup.value
    assert verification.measured.low <= speed * 1.05
    assert verification.instances >= 4


def test_where_noise_hides_all_nothing_is_claimed(recipe, tmp_path):
    """No gain and the claim both fit what was measured: undecided, and more time is the advice."""
    verification = found(recipe, tmp_path, noise=2.0)
    assert verification.finding is Finding.UNDECIDED
    assert "larger budget" in verification.reason


def test_a_budget_without_two_instances_decides_nothing(recipe, tmp_path):
    """It says so, rather than gone."""
    verification = found(recipe, tmp_path, budget=14.0)
    assert verification.finding is Finding.UNDECIDED
    assert verification.measured is None


def test_a_configuration_that_fails_is_unstable(recipe, tmp_path):
    """Whatever it gave when it was tuned."""

    def failure(configuration):
        return TrialFailed(Outcome.OOM, "out of memory") if configuration["batch_size"] == 128 else None

    verification = found(recipe, tmp_path, failure=failure)
    assert verification.finding is Finding.UNSTABLE
    assert "out of memory" in verification.reason


def test_a_baseline_that_fails_beside_it_is_not_want_of_time(recipe, tmp_path):
    """Nothing is found of the claim, and a larger budget is not the advice."""
    launched = []

    def failure(configuration):
        if configuration["batch_size"] == 32:
            launched.append(configuration)
        return TrialFailed(Outcome.CRASHED, "gone") if len(launched) > 1 else None

    verification = found(recipe, tmp_path, failure=failure)
    assert verification.finding is Finding.UNDECIDED
    assert verification.reason == "the baseline kept failing beside it in fresh processes"


@pytest.mark.parametrize(
    "options", [{"budget": -1}, {"budget": math.nan}, {"seed": -1}, {"memory_margin": 2}]
)
def test_options_are_checked(recipe, tmp_path, options):
    """As those of a run are."""
    with pytest.raises(ArgumentError, match=f"{next(iter(options))} is "):
        verify(recipe, str(tmp_path / "train.py"), **options)


def test_the_memory_that_must_stay_free_is_the_users(recipe, tmp_path, monkeypatch):
    """A recipe that was tuned with another margin can be verified with it."""
    (tmp_path / "train.py").write_text("workload = None\n")
    limits = []
    monkeypatch.setattr(verifying, "verify_with", lambda *_, **settings: limits.append(settings["limits"]))
    for options in ({"memory_margin": 0.02}, {}):
        verify(recipe, f"{tmp_path / 'train.py'}:workload", **options)
    assert [each.margin for each in limits] == [0.02, MEMORY_MARGIN]


def test_another_baseline_is_refused(recipe, tmp_path):
    """The claim is against what it was measured against."""
    other = recipe.model_copy(update={"baseline": {**recipe.baseline, "prefetch": 2}})
    with pytest.raises(RecipeError, match="against another baseline: prefetch=2 there, prefetch=0 here"):
        found(other, tmp_path)


def test_another_file_and_another_machine_are_said(recipe, tmp_path):
    """They may be why a claim does not hold."""
    machine = recipe.machine.model_copy(update={"cores": 64})
    workload = recipe.workload.model_copy(update={"fingerprint": "sha256:11"})
    watcher = Watcher()
    found(recipe.model_copy(update={"machine": machine, "workload": workload}), tmp_path, observe=watcher)
    notices = [each.text for each in watcher.of(Notice)]
    assert any("another machine: cores: measured on 64, here 2" in each for each in notices)
    assert any("not as it was when the recipe was made" in each for each in notices)


def test_what_is_odd_about_the_baseline_is_said(recipe, tmp_path):
    """As `tune` does: whoever verifies may not have seen that run."""
    watcher = Watcher()
    found(recipe, tmp_path, observe=watcher, retraces=lambda configuration: 3)
    assert any("the workload retraces" in each.text for each in watcher.of(Notice))


def test_a_recipe_that_claims_nothing_holds(recipe, tmp_path):
    """The baseline is the baseline: nothing is measured."""
    (tmp_path / "train.py").write_text("workload = 1\n")
    nothing = recipe.model_copy(update={"configuration": recipe.baseline})
    verification = verify(nothing, str(tmp_path / "train.py"))
    assert verification.finding is Finding.HOLDS
    assert verification.claimed is None


def around(value, half_width):
    """An interval of a ratio, as a logarithm."""
    middle = math.log(value)
    return LogInterval(value=middle, low=middle - half_width, high=middle + half_width, count=5)


@pytest.mark.parametrize(
    ("claim", "now", "expected"),
    [
        (around(1.5, 0.05), around(1.45, 0.05), Finding.HOLDS),
        (around(1.5, 0.05), around(2.0, 0.01), Finding.HOLDS),
        (around(1.5, 0.05), around(1.3, 0.05), Finding.WEAKER),
        (around(1.5, 0.005), around(1.48, 0.005), Finding.HOLDS),
        (around(1.5, 0.30), around(1.3, 0.05), Finding.HOLDS),
        (around(1.5, 0.05), around(1.02, 0.05), Finding.GONE),
        (around(1.05, 0.04), around(1.02, 0.05), Finding.UNDECIDED),
        (around(1.5, 0.05), around(0.7, 0.05), Finding.GONE),
    ],
)
def test_two_intervals_are_held_against_each_other(claim, now, expected):
    """Both errors count; only less than was claimed is against it."""
    assert finding(claim, now) is expected


def test_a_claim_from_a_continuous_run_is_not_held_against_slices(tmp_path):
    """Where the time did not hold such a run, nothing is decided: pauses might make slices say what is claimed."""

    def gain(configuration):
        return 1.3 if configuration["batch_size"] == 128 else 1.0

    made, _ = quick_tune(
        simulated_trials(faster_by(batch_size=1.5), noise=0.02, freeze_gain=gain),
        tmp_path / "made",
        space=SPACE,
    )
    assert made.evidence.continuous.replaces_slices
    short = found(made, tmp_path / "short", budget=33.0, noise=0.02, freeze_gain=gain)
    assert short.finding is Finding.UNDECIDED
    assert "continuous run" in short.reason
    assert found(made, tmp_path / "long", budget=150.0, noise=0.02, freeze_gain=gain).finding is Finding.HOLDS
