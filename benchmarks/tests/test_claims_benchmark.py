"""The rule of `benchmarks/claims.py`: which claims agree with long trainings, and what is put to the test."""

import math
from pathlib import Path

import claims
import pytest
from simulated_runs import faster_by, quick_tune, simulated_trials

from autotune.data.figures import Interval
from autotune.recipe.evidence import BestCandidate


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe that claims ×1.5 or so, out of a simulated run."""
    trials = simulated_trials(faster_by(batch_size=1.5), noise=0.02)
    return quick_tune(trials, tmp_path_factory.mktemp("run"))[0]


def interval(value, low, high):
    """A ratio and its bounds, as a logarithm's interval."""
    return Interval(value=value, low=low, high=high).log


@pytest.mark.parametrize(
    ("claimed", "measured", "agrees"),
    [
        ((2.0, 1.94, 2.06), (2.0, 1.94, 2.06), True),
        ((2.0, 1.94, 2.06), (2.07, 2.01, 2.13), True),  # 3.5%, and chance allows for 4.2%
        ((2.0, 1.94, 2.06), (2.12, 2.06, 2.18), False),  # 6%: outside both intervals
        ((2.12, 2.06, 2.18), (2.0, 1.94, 2.06), False),  # too much is as wrong as too little
        ((2.0, 1.99, 2.01), (2.06, 2.05, 2.07), False),  # 3% with intervals of half a percent
        ((2.0, 1.6, 2.5), (2.4, 2.39, 2.41), True),  # a wide claim says little, and is not wrong
        ((2.0, 0.0, 9.0), (2.0, 1.94, 2.06), False),  # a claim without a bound says nothing
    ],
)
def test_a_claim_agrees_where_chance_explains_the_difference(claimed, measured, agrees):
    compared = claims.Comparison(claim=interval(*claimed), long=interval(*measured))
    assert compared.agrees is agrees


def test_the_miss_is_the_same_both_ways():
    low, high = interval(2.0, 1.9, 2.1), interval(2.2, 2.1, 2.3)
    assert claims.Comparison(claim=low, long=high).miss == pytest.approx(0.1)
    assert claims.Comparison(claim=high, long=low).miss == pytest.approx(0.1)


def test_a_failed_workload_is_a_disagreement():
    same = interval(2.0, 1.9, 2.1)
    found = claims.figures(
        {
            "good": claims.Comparison(claim=same, long=same),
            "failed": claims.Comparison(claim=same, remark="failed: exit code 1"),
            "silent": claims.Comparison(counts=False),
        }
    )
    assert (found["share of claims that agree"]["value"], found["share of claims that agree"]["count"]) == (0.5, 2)
    assert (found["median miss"]["value"], found["median miss"]["count"]) == (0.0, 1)
    assert found["failed: agrees"]["value"] == 0.0
    assert found["silent: agrees"]["value"] is None


def test_the_closest_is_tested_where_nothing_is_recommended(recipe):
    tested, comparison = claims.claim_of(recipe)
    assert tested.configuration == recipe.configuration
    assert math.exp(comparison.claim.value) == pytest.approx(recipe.evidence.speedup.value)

    best = BestCandidate(
        configuration=recipe.configuration, speedup=Interval(value=1.01, low=0.98, high=1.04), reason="too little"
    )
    kept = recipe.model_copy(update={"configuration": recipe.baseline})
    for evidence, counts in ((best, True), (best.model_copy(update={"speedup": None}), False), (None, False)):
        nothing = kept.model_copy(update={"candidate": evidence})
        tested, comparison = claims.claim_of(nothing)
        assert comparison.counts is counts
        assert (tested.configuration == recipe.configuration) is counts
        assert (comparison.claim is not None) is counts


TRAINING = """
import json, sys
from pathlib import Path

print("noise of a library")
configuration = json.loads(Path(sys.argv[2]).read_text())["configuration"]
order = Path("order")
which = "A" if Path(sys.argv[2]).name.endswith("baseline.json") else "B"
print("ready to train", flush=True)
for line in sys.stdin:
    order.write_text(order.read_text() + which)
    print("{more noise", flush=True)
    samples = 100 * (configuration["batch_size"] // 8)
    print(json.dumps({"samples": samples, "seconds": float(line), "epochs": 2}), flush=True)
"""


@pytest.fixture
def train_with(tmp_path, monkeypatch):
    """Runs rounds with a program in the place of `plain_training.py`."""
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "TRAINING", tmp_path / "training.py")
    (tmp_path / "order").write_text("")

    def run(program, recipe, **settings):
        claims.TRAINING.write_text(program)
        settings = {"rounds": 2, "turns": 3, "seconds": 2.0} | settings
        return list(claims.trained_rounds(Path("digits_mlp.py"), recipe, tmp_path, **settings))

    return run


def test_trainings_take_turns_in_abba_order(recipe, train_with, tmp_path):
    changed = recipe.model_copy(update={"configuration": {**recipe.baseline, "batch_size": 24}})
    changed = changed.model_copy(update={"baseline": {**recipe.baseline, "batch_size": 8}})
    rounds = train_with(TRAINING, changed)
    assert (tmp_path / "order").read_text() == "ABBAAB" + "BAABBA"
    assert rounds == [claims.Round(baseline=50.0, recipe=150.0, baseline_epochs=6, recipe_epochs=6)] * 2


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit('no workload here')", "exit code 1: no workload here"),
        ("print('ready to train', flush=True); raise SystemExit('too late')", "exit code 1: too late"),
        ("print('ready to train', flush=True); input(); import os; os.kill(os.getpid(), 9)", "exit code -9"),
    ],
)
def test_a_training_that_ends_early_says_its_last_words(recipe, train_with, program, reason):
    with pytest.raises(claims.Failed, match=reason):
        train_with(program, recipe)


def test_a_training_that_says_nothing_any_more_is_given_up(recipe, train_with, monkeypatch):
    monkeypatch.setattr(claims, "PATIENCE_SECONDS", 0.2)
    with pytest.raises(claims.Failed, match=r"said nothing for 0\.2 s"):
        train_with("import signal; signal.pause()", recipe)


def test_a_tuning_that_fails_says_its_last_words():
    with pytest.raises(claims.Failed, match=r"exit code 1: .*no workload here"):
        claims.run(["-c", "raise SystemExit('no workload here')"])
