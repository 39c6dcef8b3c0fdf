"""Trainings that branch from a state of the baseline's, in real trials: how they begin, and how their losses fall."""

import pytest
from real_trials import PATIENCE_SECONDS

from autotune.runtime.executor import TrialFailed
from autotune.runtime.protocol import BranchRuns, Data

pytestmark = pytest.mark.slow

KNOWN = Data(examples=512, endless=False)
PROBES, EXAMPLES = 4, 256


@pytest.fixture
def branches(launch, tmp_path):
    """The losses of trainings from the state that the case's baseline saved, by scale and seed."""

    states = {}

    def train(case, batch_size=32, *, of=None, seeds=(0, 1), scales=(1.0,), **knobs):
        if (name := of or case) not in states:
            baseline = launch(name, 32, save_state="state.npz")
            assert baseline.warm_up().ready.state_steps > 0
            states[name] = baseline.log.with_name("state.npz")
        runs = BranchRuns(
            state=str(states[name]),
            folder=str(tmp_path / f"{case}-batches"),
            recorded_batch_size=32,
            seeds=seeds,
            scales=scales,
            examples=EXAMPLES,
            probes=PROBES,
            probe_examples=64,
            seconds=PATIENCE_SECONDS,
        )
        trial = launch(case, batch_size, data=KNOWN, losses=runs, **knobs).trial
        return trial.loss_curves(PATIENCE_SECONDS).curves

    return train


def test_the_same_seed_is_the_same_training_and_another_seed_another_order(branches):
    first, second = branches("learns")
    again, _ = branches("learns", prefetch=2)
    assert len(first) == PROBES
    assert again == pytest.approx(first, rel=1e-4)
    assert second != pytest.approx(first, rel=1e-6)


def test_losses_fall_on_from_the_baselines_state_also_with_another_batch_size(branches):
    for curve in (*branches("learns"), *branches("learns", 128, scales=(2.0,))):
        assert curve[-1] < curve[0] < 0.69, "a fresh network would have a loss of ln 2"


@pytest.mark.parametrize("case", ["learns", "scheduled"])
def test_the_learning_rate_is_scaled_also_that_of_a_schedule(branches, case):
    as_it_is, hardly = branches(case, seeds=(0,), scales=(1.0, 1e-6))
    assert as_it_is[-1] < 0.95 * as_it_is[0]
    assert hardly[-1] == pytest.approx(hardly[0], rel=0.02)


def test_the_state_of_another_model_is_refused(branches):
    with pytest.raises(TrialFailed, match="do not fit the model"):
        branches("standing", of="learns")
