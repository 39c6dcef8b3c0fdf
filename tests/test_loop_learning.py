"""How a larger batch of a script's own loop is compared: which trainings there are, and what is not measured."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from simulated_runs import BASELINE

from autotune.data.record import Outcome
from autotune.runtime.executor import TrialFailed
from autotune.script.loop_branch import NO_LOSS
from autotune.stats.same_loss import examples_needed
from autotune.tuning.learning import PROBES, NotMeasured
from autotune.tuning.loop_learning import NO_OPTIMIZER, SAME_TRAININGS, SUMMED, branch_loop, loop_branch_seconds

RATE, START = 4000.0, 2.0  # samples per second of either batch size, and seconds to a first step


def record(batch_size, **more):
    configuration = dict(BASELINE.replace(batch_size=batch_size))
    return SimpleNamespace(
        configuration=configuration, throughput=SimpleNamespace(value=RATE), first_step_seconds=START, **more
    )


LEADER = record(256)


class LoopTrainings:
    """Trainings of a loop whose larger batch needs 1.5 times the examples; `losses` makes other ones of them."""

    def __init__(self, folder, seconds=1000.0, *, optimizer="Adam", first_loss=1.0, losses=lambda loss, *_: loss):
        state = folder / "state.npz"
        state.touch()
        log = SimpleNamespace(state_steps=64)
        baseline = record(32, processes=[log], first_loss=first_loss)
        self.run = SimpleNamespace(
            records={0: baseline}, baseline=BASELINE, state_file=state, loop_optimizer=optimizer, several=False
        )
        self._seconds, self._losses = seconds, losses
        self.asked = []

    def left(self):
        return self._seconds

    planned = left

    def train(self, configuration, training):
        size = configuration.batch_size
        self.asked.append((training.seed, size, training.scale))
        self.examples, self.first_examples = training.examples, training.first_examples
        needs, luck = 1.0 if size == 32 else 1.5, 1 + 0.01 * training.seed
        moves = 0.0 if training.scale == 0 else 1 / needs / 20_000
        width = training.examples / PROBES
        hard = np.random.default_rng(training.seed).normal(0.0, 0.2, PROBES)  # the examples of each window
        at = [width * (place + 0.5) - size / 2 for place in range(PROBES)]
        loss = [
            self._losses(luck * math.exp(-moves * done) + more, size, training.seed)
            for done, more in zip(at, hard, strict=True)
        ]
        return tuple(loss), (self._losses(luck, size, training.seed),)


def test_all_rules_train_with_each_seed_and_the_examples_needed_are_found(tmp_path):
    trainings = LoopTrainings(tmp_path)
    found = branch_loop(trainings, LEADER)
    sides = [(32, 1.0), (256, 0.0), (256, 1.0), (256, math.sqrt(8)), (256, 8.0)]
    assert trainings.asked == [(seed, *side) for seed in range(8) for side in sides]
    assert trainings.first_examples == 256
    assert (found.after_steps, found.examples, found.batch_sizes) == (64, trainings.examples, (32, 256))
    assert found.examples % (PROBES * 256) == 0
    assert examples_needed(found).log_ratio.value == pytest.approx(math.log(1.5), abs=0.02)


@pytest.mark.parametrize(
    ("optimizer", "seconds", "seeds", "scales"),
    [
        ("Adam", 110.0, 5, {0.0, 1.0, math.sqrt(8), 8.0}),
        ("Adam", 85.0, 5, {0.0, 1.0, math.sqrt(8)}),
        ("SGD", 85.0, 5, {0.0, 1.0, 8.0}),
    ],
)
def test_a_short_time_holds_fewer_seeds_and_then_fewer_rules(tmp_path, optimizer, seconds, seeds, scales):
    trainings = LoopTrainings(tmp_path, seconds, optimizer=optimizer)
    branch_loop(trainings, LEADER)
    assert {seed for seed, _, _ in trainings.asked} == set(range(seeds))
    tried = {scale for _, size, scale in trainings.asked if size == 256}
    assert sorted(tried) == pytest.approx(sorted(scales))


def test_starts_count_for_each_training():
    assert loop_branch_seconds(record(32), LEADER) > 8 * (1 + 1 + 3) * START


def over_from(seed):
    """Losses that do not come in time from this seed on."""

    def losses(loss, size, own):
        if own >= seed:
            raise TrialFailed(Outcome.TIMEOUT, "took too long")
        return loss

    return losses


def test_seeds_that_ended_count_when_the_time_is_over(tmp_path):
    found = branch_loop(LoopTrainings(tmp_path, losses=over_from(6)), LEADER)
    assert {len(curves) for curves in (found.baseline, *found.leader.values())} == {6}


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"first_loss": None}, NO_LOSS),
        ({"seconds": 20.0}, r"it takes about \d+ s, and 20 s were kept for it"),
        ({"losses": over_from(3)}, "it takes longer than the 1000 s that were kept for it"),
        ({"losses": lambda loss, size, seed: loss * size}, SUMMED),
        ({"losses": lambda loss, size, seed: 1.0}, SAME_TRAININGS),
        ({"optimizer": ""}, NO_OPTIMIZER),
    ],
    ids=["no loss", "no time", "too slow", "sums", "alike", "no optimizer"],
)
def test_what_cannot_be_compared_is_not_measured_and_says_why(tmp_path, how, reason):
    with pytest.raises(NotMeasured, match=reason) as caught:
        branch_loop(LoopTrainings(tmp_path, **how), LEADER)
    kept = {"20 s": 20.0, "1000 s": 1000.0}
    had = next((seconds for words, seconds in kept.items() if words in reason), None)
    assert (caught.value.needs_seconds or 0.0) > had if had else caught.value.needs_seconds is None


def test_without_the_baselines_state_nothing_is_trained(tmp_path):
    trainings = LoopTrainings(tmp_path)
    trainings.run.state_file.unlink()
    with pytest.raises(NotMeasured, match="could not be saved"):
        branch_loop(trainings, LEADER)
    assert trainings.asked == []
