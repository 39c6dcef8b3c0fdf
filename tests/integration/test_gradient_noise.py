"""The gradient's noise beside real trainings: what is found is true, and the training goes on as it would have."""

import json
import subprocess
import sys

import pytest
from real_trials import WORKLOADS

from autotune.stats.same_loss import noise_scale

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(environment):
    """What the trainings of `workloads/gradient_noise.py` came to."""
    command = [sys.executable, str(WORKLOADS / "gradient_noise.py")]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("case", "measured"),
    [
        ("early", True),
        ("late", False),
        ("three steps a call", True),
        ("three steps a call, late", False),
        ("at the last batch", False),
    ],
)
def test_a_training_goes_on_as_if_nothing_had_been_measured(found, case, measured):
    why = "" if measured else "too few examples were left of the epoch"
    assert found[case] == {"not_measured": why, "same": True}


def test_the_noise_scale_of_a_regression_is_the_one_that_can_be_computed(found):
    gradients = found["regression"]
    scale = noise_scale(gradients["squares"], gradients["products"], gradients["examples"])
    assert gradients["examples"] == 64
    # d = 20 normal inputs, an error of length 1 in the weights, label noise of variance 4: it is d + 1 + 4 d.
    assert abs(scale.batch_size / (20 + 1 + 4 * 20) - 1) < 3 * scale.error < 1.0


def test_the_gradient_is_that_of_the_whole_loss_without_its_scale(found):
    expected, plain, scaled = found["squares"]
    assert len(expected) == 32
    assert plain == pytest.approx(expected, rel=1e-4)
    assert scaled == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("own step", "the model has a train_step of its own"),
        ("eager", "the model runs eagerly"),
        ("slow", "it takes some 60.0 s, and may take 12.0 s"),
        ("over", "TimeoutError: its time was over"),
        ("of a fixed size", "4 and 32"),
    ],
)
def test_a_training_that_cannot_be_measured_says_why_and_goes_on(found, case, why):
    reason, calls = found[case]
    assert why in reason
    assert calls == 10


def test_a_trial_that_saves_its_state_tells_of_its_gradients(launch):
    ready = launch("learns", 32, save_state="state.npz", steps_per_execution=4).warm_up().ready
    assert ready.gradient_noise.not_measured == ""
    assert len(ready.gradient_noise.squares) == 32
    assert launch("learns", 32).warm_up().ready.gradient_noise is None
