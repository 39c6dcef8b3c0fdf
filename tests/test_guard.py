"""The watch over a long training: one warning where it is slow, its log and its last line."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.data.figures import Interval
from autotune.recipe import guard
from autotune.recipe.guard import Guard
from autotune.recipe.recipe import Recipe

RECIPE = Path(__file__).parents[1] / "results" / "recorded" / "digits_mlp_command_one" / "recipe.json"
EXAMPLES = 256


class Training:
    """Calls of a train function on a clock of its own."""

    def __init__(self, recipe: Recipe, log: Path | None = None, *, fills_cache: bool = False) -> None:
        self.now = 0.0
        self.said: list[str] = []
        given = {"log": log, "fills_cache": fills_cache, "say": self.said.append, "clock": self.clock}
        self.guard = Guard(recipe.evidence, recipe.machine, **given)
        self.train = self.guard.wrap(self._step, examples_per_call=EXAMPLES)
        self.seconds = 0.0

    def clock(self) -> float:
        """Now."""
        return self.now

    def _step(self, iterator: object) -> object:
        self.now += self.seconds
        return iterator

    def run(self, for_seconds: float, share: float) -> int:
        """Train for so long at a share of the claimed throughput; how many calls that took."""
        self.seconds = EXAMPLES / (share * recipe().evidence.throughput.value)
        calls, ends = 0, self.now + for_seconds
        while self.now < ends:
            assert self.train(calls) == calls
            calls += 1
        return calls


def recipe(**evidence: object) -> Recipe:
    """A recorded one, with changes to its evidence."""
    recorded = Recipe.load(RECIPE)
    return recorded.model_copy(update={"evidence": recorded.evidence.model_copy(update=evidence)})


@pytest.mark.parametrize(("share", "warnings"), [(1.0, 0), (0.9, 0), (0.8, 1), (0.3, 1)])
def test_training_much_slower_than_claimed_warns_once(share, warnings):
    training = Training(recipe())
    training.run(120.0, share)
    assert len(training.said) == warnings
    if warnings:
        assert f"{share:.0%} of what the recipe claims" in training.said[0]


def test_a_training_whose_batches_are_not_seen_is_not_judged():
    training = Training(recipe())
    for _ in range(10_000):
        training.now += 0.01
        training.guard.called(0)
    training.guard.ended()
    assert training.said == ["the speed is not compared: how many examples a step has is not known"]


def test_its_last_line_has_both_epochs_their_ratio_and_the_claim():
    made = recipe(examples_per_epoch=400 * EXAMPLES)
    evidence, training = made.evidence, Training(made)
    training.run(60.0, 0.9)
    training.now += 300.0  # of other work, after the training
    training.guard.ended()
    rates = 0.9 * evidence.throughput.value, evidence.baseline_throughput.value
    now, before = (400 * EXAMPLES / rate for rate in rates)
    assert training.said == [
        f"{now:.3g} s per epoch, was {before:.3g} s: ×{before / now:.2f}; claimed {evidence.speedup.shown()}"
    ]


@pytest.mark.parametrize(("fills_cache", "ratio"), [(False, 1.0), (True, 0.6)])
def test_the_first_epoch_counts_where_it_fills_a_cache(fills_cache, ratio):
    training = Training(recipe(), fills_cache=fills_cache)
    training.run(20.0, 0.2)
    training.guard.epoch_ended()
    training.run(20.0, 1.0)
    training.guard.ended()
    assert training.guard.throughput / training.guard.claimed == pytest.approx(ratio, rel=0.02)
    assert len(training.said) == 1, "nothing is judged before the cache is full"


def test_a_slow_training_has_its_rate_in_its_last_line():
    training = Training(recipe(throughput=Interval(value=0.8, low=0.8, high=0.8), examples_per_epoch=None))
    training.run(6000.0, 0.5 / recipe().evidence.throughput.value)
    training.guard.ended()
    assert training.said[0].startswith("0.5 samples/s, 62% of what the recipe claims")
    assert training.said[-1].startswith("0.5 samples/s, was ")


def test_what_the_first_epoch_compiles_at_its_end_is_left_out():
    training = Training(recipe())
    training.run(40.0, 0.9)
    training.now += 500.0
    training.guard.epoch_ended()
    training.now += 100.0
    training.guard.epoch_ended()  # as a loop begins its next epoch
    training.run(40.0, 0.9)
    training.guard.epoch_ended()
    training.guard.ended()
    assert training.guard.throughput == pytest.approx(0.9 * training.guard.claimed, rel=0.01)
    assert len(training.said) == 1


def test_a_training_of_one_epoch_has_a_last_line_as_well():
    training = Training(recipe())
    training.run(40.0, 0.9)
    training.guard.epoch_ended()
    training.guard.ended()
    assert training.guard.throughput == pytest.approx(0.9 * training.guard.claimed, rel=0.01)


@pytest.mark.parametrize("is_new", [True, False])
def test_what_lies_before_another_models_first_step_is_left_out(is_new):
    training = Training(recipe())
    training.run(40.0, 0.9)
    training.guard.ended()
    step = training._step if not is_new else lambda iterator: training._step(iterator)
    training.train = training.guard.wrap(step, examples_per_call=EXAMPLES)
    training.now += 200.0
    training.run(40.0, 0.9)
    training.guard.ended()
    share = training.guard.throughput / training.guard.claimed
    assert share == pytest.approx(0.9, rel=0.01) if is_new else share < 0.5, "one model's pauses are its training's"


def test_training_of_other_epoch_length_is_not_compared():
    training = Training(recipe(examples_per_epoch=3 * EXAMPLES))
    training.run(20.0, 0.2)
    training.guard.epoch_ended()
    training.run(60.0, 0.2)
    training.guard.ended()
    warning, last = training.said
    assert "instead of the recipe's" in warning
    assert "not comparable" in last
    assert "×" not in last


def test_a_training_that_becomes_slow_later_is_warned_of_as_well():
    training = Training(recipe())
    training.run(600.0, 1.0)
    training.run(120.0, 0.5)
    assert len(training.said) == 1


def test_a_log_has_a_line_every_ten_seconds(tmp_path):
    log = tmp_path / "long_run.jsonl"
    training = Training(recipe(), log)
    training.run(65.0, 0.9)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert 4 <= len(lines) <= 7
    assert all(line["of_claim"] == pytest.approx(0.9, abs=0.01) for line in lines)


def test_a_short_training_is_not_compared():
    training = Training(recipe())
    training.run(7.6, 0.1)
    training.guard.ended()
    assert training.said == ["too short to compare (8 s)"]
    untrained = Training(recipe())
    untrained.guard.ended()
    assert untrained.said == ["the speed is not compared: the tuned training did not run"]


def test_ten_seconds_of_short_epochs_are_compared():
    training = Training(recipe())
    for _ in range(5):
        training.run(2.0, 0.5)
        training.guard.epoch_ended()
    training.guard.ended()
    assert training.guard.throughput == pytest.approx(0.5 * training.guard.claimed, rel=0.01)


def epochs(expected, calls):
    """What is said of epochs of so many calls, where the recipe's had so many examples."""
    training = Training(recipe(examples_per_epoch=expected))
    for of_epoch in calls:
        for _ in range(of_epoch):
            training.guard.called(EXAMPLES)
        training.guard.epoch_ended()
    return training.said


@pytest.mark.parametrize("expected", [10 * EXAMPLES, 9 * EXAMPLES + 1, None])
def test_epochs_of_the_recipes_size_say_nothing(expected):
    assert epochs(expected, [10, 10]) == []


def test_a_first_epoch_of_other_work_is_warned_of_once():
    (said,) = epochs(10 * EXAMPLES, [30, 30])
    assert f"the first epoch trained on about {30 * EXAMPLES:,} examples" in said
    assert f"the recipe's {10 * EXAMPLES:,}" in said
    assert epochs(10 * EXAMPLES, [10, 30]) == [], "later epochs are the script's own affair"
    assert epochs(10 * EXAMPLES, [0, 10]) == []


def test_a_log_that_cannot_be_written_ends_no_training(tmp_path):
    training = Training(recipe(), tmp_path / "gone" / "long_run.jsonl")
    training.run(40.0, 1.0)
    assert training.said == []


def test_guard_callback_counts_calls_and_restores_the_model(tmp_path, monkeypatch):
    now = 0.0

    def train(iterator):
        nonlocal now
        now += 1.0
        return iterator

    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(callbacks=SimpleNamespace(Callback=object)))
    told = Guard(recipe().evidence, recipe().machine, log=tmp_path / "long_run.jsonl", clock=lambda: now)
    callback = guard.guard_callback(told, recipe().batch_size)
    callback.model = model = SimpleNamespace(train_function=train, steps_per_execution=2)
    callback.on_train_begin()
    assert [model.train_function(number) for number in range(60)] == list(range(60))
    callback.on_train_end()
    assert model.train_function is train
    lines = [json.loads(line) for line in (tmp_path / "long_run.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[-1]["calls"] == 60
    assert {line["samples_per_second"] for line in lines} == {2 * recipe().batch_size}
