"""How much sooner a larger batch reaches the same losses, on made-up trainings whose truth is known."""

import math

import numpy as np
import pytest

from autotune.data.figures import LogInterval
from autotune.data.record import ContinuedTraining
from autotune.stats.same_loss import (
    HARDLY_FALLS,
    NOT_REACHED,
    TOO_FEW_ENDED,
    ExamplesNeeded,
    best_batch_size,
    examples_needed,
    log_examples,
    log_examples_ratio,
    over_critical_of,
    same_loss_speedup,
)

PROBES = np.arange(1, 26) * 1024


def curve(needs=1.0, noise=0.0, seed=0):
    """A training that needs so many times the examples of the baseline."""
    losses = 2.0 * (1 + PROBES / needs / 4000) ** -0.5
    draws = np.random.default_rng(seed).normal(0.0, noise, len(PROBES))
    return losses + draws


@pytest.mark.parametrize("needs", [0.8, 1.0, 1.3, 2.5])
def test_the_examples_needed_are_found(needs):
    assert log_examples_ratio(PROBES, curve(), PROBES, curve(needs)) == pytest.approx(math.log(needs), abs=0.01)


@pytest.mark.parametrize("needs", [1.5, 4.0, 6.0, 8.0])
@pytest.mark.parametrize(
    "loss",
    [lambda n: 2.3 - n / 40_000, lambda n: 0.3 + 2 * np.exp(-n / 6000), lambda n: 0.2 + 2 * (1 + n / 2000) ** -0.5],
    ids=["evenly", "exponential", "power"],
)
def test_many_times_the_examples_are_found_however_losses_fall(loss, needs):
    found = log_examples_ratio(PROBES, loss(PROBES), PROBES, loss(PROBES / needs))
    assert found == pytest.approx(math.log(needs), abs=0.03)


@pytest.mark.parametrize("over_critical", [0.0, 0.01, 0.16, 3.0, math.inf])
def test_critical_batch_size_follows_from_examples_needed(over_critical):
    assert over_critical_of(log_examples(4.0, over_critical), 4.0) == pytest.approx(over_critical)
    assert log_examples(1.0, over_critical) == 0.0
    assert 0.0 <= log_examples(4.0, over_critical) <= math.log(4.0)


def a_branch(needs, *, noise=0.0, seeds=8, seed=0, **rules):
    """A comparison of trainings with so much noise; each rule needs so many times the baseline's examples."""
    random = np.random.default_rng(seed)

    def trainings(needs):
        noises = random.normal(0.0, noise, (seeds, len(PROBES)))
        return tuple(tuple(map(float, curve(needs) + own)) for own in noises)

    leader = {name: trainings(needs) for name, needs in {"as is": needs, **rules}.items()}
    return ContinuedTraining(examples=int(PROBES[-1]), baseline=trainings(1.0), leader=leader)


@pytest.mark.parametrize(("needs", "noise"), [(1.0, 0.02), (2.0, 0.1), (1.0, 0.2), (2.0, 0.2)])
def test_noisy_losses_favour_neither_batch_size(needs, noise):
    """The fall of the losses is 1.1."""
    found = [examples_needed(a_branch(needs, noise=noise, seed=seed)).log_ratio for seed in range(40)]
    error = np.std([ratio.value for ratio in found]) / math.sqrt(len(found))
    assert np.mean([ratio.value for ratio in found]) == pytest.approx(math.log(needs), abs=3 * error + 0.02)
    assert sum(not ratio.low <= math.log(needs) <= ratio.high for ratio in found) <= 6


def test_a_training_that_reaches_none_of_the_losses_has_no_ratio():
    assert log_examples_ratio(PROBES, curve(), PROBES, np.full(len(PROBES), 5.0)) is None
    never = a_branch(1.0)
    flat = {"as is": ((5.0,) * len(PROBES),) * 8}
    assert examples_needed(never.model_copy(update={"leader": flat})) == NOT_REACHED


def test_the_best_rule_is_chosen_and_its_choice_is_not_rewarded():
    """Of three rules that are equally good the one that chance favours is chosen, and other seeds measure it."""
    equal = [examples_needed(a_branch(1.35, noise=0.1, seed=seed, sqrt=1.35, linear=1.35)) for seed in range(20)]
    measured = [found.log_ratio.value for found in equal]
    by_all_seeds = [found.by_rule[found.rule] for found in equal]
    assert np.mean(measured) == pytest.approx(math.log(1.35), abs=3 * np.std(measured) / math.sqrt(20) + 0.03)
    assert np.mean(measured) > np.mean(by_all_seeds) + 0.005
    found = examples_needed(a_branch(1.8, noise=0.02, sqrt=1.2, linear=3.0))
    assert found.rule == "sqrt"
    assert found.by_rule == {
        rule: pytest.approx(math.log(needs), abs=0.05)
        for rule, needs in (("as is", 1.8), ("sqrt", 1.2), ("linear", 3.0))
    }


def test_what_cannot_be_compared_says_why():
    branch = a_branch(1.5)
    ended = branch.model_copy(update={"leader": {"as is": (*branch.leader["as is"][:3], *((),) * 5)}})
    assert examples_needed(ended) == TOO_FEW_ENDED
    flat = tuple(
        tuple(losses[0] + 0.01 * math.sin(7 * seed + at) for at in range(len(losses)))
        for seed, losses in enumerate(branch.baseline)
    )
    assert examples_needed(branch.model_copy(update={"baseline": flat})) == HARDLY_FALLS
    diverged = {"as is": branch.leader["as is"], "linear": ((*branch.baseline[0][:-1], None),) * 8}
    assert examples_needed(branch.model_copy(update={"leader": diverged})).by_rule["linear"] is None


def test_the_same_loss_interval_covers_the_truth():
    random = np.random.default_rng(2)
    held = 0
    for _ in range(400):
        processes, ratios = random.normal(math.log(4.0), 0.05, 4), random.normal(0.4, 0.1, 8)
        intervals = []
        for values, quantile in ((processes, 3.182), (ratios, 2.365)):
            mean, half = float(np.mean(values)), quantile * np.std(values, ddof=1) / math.sqrt(len(values))
            intervals.append(LogInterval(value=mean, low=mean - half, high=mean + half, count=len(values)))
        needed = ExamplesNeeded(rule="as is", log_ratio=intervals[1], by_rule={})
        found = same_loss_speedup(intervals[0], needed, degrees=3)
        held += found.low <= math.log(4.0) - 0.4 <= found.high
        surer = same_loss_speedup(intervals[0], needed, degrees=3, level=0.99)
        assert surer.low < found.low < found.value == surer.value
    assert 0.92 <= held / 400 <= 0.98


def test_best_batch_size_minimizes_the_time_to_a_loss():
    def step_seconds(size):
        return 0.02 + 0.001 * size

    def seconds(size):
        return step_seconds(size) * (1 + 64 / size)

    best = best_batch_size(64, {size: step_seconds(size) for size in (16, 64, 256)})
    assert seconds(best) < min(seconds(best * 1.05), seconds(best / 1.05))


def test_best_batch_size_has_no_bound_if_larger_ones_are_free():
    assert best_batch_size(64, {32: 0.01, 64: 0.01}) > 1e6
    assert best_batch_size(64, {32: 0.01, 64: 0.03}) == 0.0
