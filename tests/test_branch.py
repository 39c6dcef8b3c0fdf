"""Which batches of a recording are for the probe, and which state a training cannot begin with."""

from types import SimpleNamespace

import numpy as np
import pytest

from autotune.runtime.executor import TrialFailed
from autotune.training import losses
from autotune.training.losses import probe_distance


@pytest.mark.parametrize(
    ("batches", "probes", "kept"), [(19, 16, 3), (100, 16, 14), (100, 40, 20), (800, 16, 16), (5, 16, 1), (2, 16, 1)]
)
def test_probe_count_is_capped_by_request_and_a_fifth_of_batches(batches, probes, kept):
    distance = probe_distance(batches, probes)
    assert len(range(distance - 1, batches, distance)) == kept


class Optimizer:
    """Has made no variables yet in the training that was saved."""

    variables = (np.zeros(3),)


@pytest.mark.parametrize(
    ("optimizers", "why"),
    [
        ({"critic": Optimizer(), "others": {"maker": Optimizer()}}, "gan.critic, gan.others: the model has optimizers"),
        (
            {"others": {"decay": 0.5}, "_self_names": {"optimizer": Optimizer()}},
            "^error: the baseline's weights and optimizer state do not fit the model of this configuration",
        ),
    ],
)
def test_optimizers_whose_state_is_not_saved_are_named(tmp_path, monkeypatch, optimizers, why):
    api = SimpleNamespace(
        optimizer_bases=lambda: (Optimizer,), optimizer_variables=lambda optimizer: optimizer.variables
    )
    monkeypatch.setattr(losses, "keras_api", lambda: api)
    np.savez(tmp_path / "state.npz", **{"weight 0": np.zeros(2)})
    model = SimpleNamespace(name="gan", optimizer=Optimizer(), weights=[np.zeros(2)], **optimizers)
    with pytest.raises(TrialFailed, match=why):
        losses._read_state(model, str(tmp_path / "state.npz"))
