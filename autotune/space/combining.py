"""Which knobs act together with a `tf.distribute` strategy. Pure.

The batch size is global: each replica takes its part of every batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.data.models import KnobValue
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, STRATEGY_KNOBS

MIRRORED = "mirrored"
ONE_STEP = (
    "model.fit with steps_per_execution above 1 fails inside TensorFlow on more than one replica, unless "
    "cross_device is hierarchical_copy or reduce_to_one"
)
NOT_ACCUMULATED = "gradients are not accumulated under MirroredStrategy: fit fails inside TensorFlow"
_XLA = ("jit_compile", "xla_auto_clustering")
_NO_XLA = "XLA is not combined with MirroredStrategy (keras#18145, keras#17187, keras#21366)"


def refusal(values: Mapping[str, KnobValue]) -> str:
    """Why these values cannot be in force together, in one sentence without its full stop; empty where they can."""
    if values.get("strategy") != MIRRORED:
        return ""
    if "global_batch" in values:
        return NOT_ACCUMULATED
    replicas, batch_size = int(values.get("replicas", 1)), int(values["batch_size"])
    if replicas < 2:
        return "strategy=mirrored needs replicas of 2 or more"
    if batch_size % replicas:
        return f"batch_size={batch_size} is global, and {replicas} replicas do not divide it"
    if int(values.get("steps_per_execution", 1)) > 1 and values.get("cross_device", "auto") == "auto":
        return ONE_STEP
    return _NO_XLA if any(values.get(each) is True for each in _XLA) else ""


def coherent(configuration: Configuration, choices: Mapping[str, Sequence[KnobValue]]) -> Configuration:
    """The configuration with the knobs that its strategy decides: so none is tried under two names.

    Args:
        configuration: Any.
        choices: Of each knob that varies; one of them is taken where there is a choice.
    """
    strategy = configuration.get("strategy", "none")
    if strategy != MIRRORED:
        rest = {name: KNOBS[name].default for name in STRATEGY_KNOBS if name in configuration and name != "strategy"}
        return configuration.replace(**{name: value for name, value in rest.items() if value is not None})
    wanted: dict[str, KnobValue] = {}
    if configuration.get("cross_device", "auto") == "auto":
        wanted["steps_per_execution"] = 1
    wanted |= {each: False for each in _XLA if configuration.get(each) is True}
    if configuration.get("replicas") == 1:
        wanted["replicas"] = max(choices.get("replicas", (1,)))
    return configuration.replace(
        **{name: value for name, value in wanted.items() if value in choices.get(name, (value,))}
    )
