"""A configuration: a value for every knob. Values are checked where a configuration is made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotune.data.errors import ConfigurationError
from autotune.data.models import KnobValue
from autotune.space.knobs import AS_WRITTEN, KNOBS, STRATEGY_KNOBS, Device, check_value, knobs_on


class Configuration(Mapping[str, KnobValue]):
    """An immutable, hashable mapping from knob names to values in table order, checked as by `check_value`."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, object], *, where: str = "configuration") -> None:
        checked = {name: check_value(name, value, where=where) for name, value in values.items()}
        self._values: dict[str, KnobValue] = {name: checked[name] for name in KNOBS if name in checked}

    def __getitem__(self, name: str) -> KnobValue:
        """The value of the knob `name`."""
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        """Knob names, in table order."""
        return iter(self._values)

    def __len__(self) -> int:
        """How many knobs have a value."""
        return len(self._values)

    def __hash__(self) -> int:
        """Equal configurations hash alike."""
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        """Whether both set the same knobs to the same values."""
        return isinstance(other, Configuration) and self.key == other.key

    def __repr__(self) -> str:
        """`Configuration(batch_size=32, …)`."""
        return f"Configuration({', '.join(f'{k}={v!r}' for k, v in self._values.items())})"

    @property
    def key(self) -> str:
        """One canonical text per configuration (JSON keeps `true` and `1` apart)."""
        return json.dumps(self._values, separators=(",", ":"))

    @property
    def batch_size(self) -> int:
        """Examples per step."""
        return int(self._values["batch_size"])

    @property
    def update_size(self) -> int:
        """Examples per update of the weights: those of several steps where gradients are accumulated."""
        return int(self._values.get("global_batch", self.batch_size))

    def replace(self, **changes: KnobValue) -> Configuration:
        """The same configuration with `changes` made."""
        return Configuration({**self._values, **changes})

    def differences(self, other: Configuration) -> dict[str, KnobValue]:
        """The knobs whose value here is not the one in `other`, with the value here."""
        return {
            name: value
            for name, value in self._values.items()
            if name not in other or type(other[name]) is not type(value) or other[name] != value
        }

    def describe(self, relative_to: Configuration | None = None) -> str:
        """`batch_size=256 prefetch=2`: all knobs, or those that differ from `relative_to`."""
        shown = dict(self._values) if relative_to is None else self.differences(relative_to)
        if not shown:
            return "baseline"
        return " ".join(f"{name}={format_value(value)}" for name, value in shown.items())


def format_value(value: KnobValue) -> str:
    """A value as TOML and JSON write it: `true`, `256`, `autotune`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def baseline_configuration(
    batch_size: int, named: Mapping[str, object], device: Device, *, where: str
) -> Configuration:
    """What the user would run anyway: `Workload.baseline`, and TensorFlow's defaults for the device's other knobs."""
    for name in STRATEGY_KNOBS:
        if name in named and "strategy" not in named:
            raise ConfigurationError(f"{where}: {name} acts only with strategy", hint="Name strategy, too, or neither.")
    found = Configuration({**_defaults(device), "batch_size": batch_size, **named}, where=where)
    return on_several_devices(found) if "strategy" in named else found


def on_device(configuration: Configuration, device: Device) -> Configuration:
    """The same configuration with just the knobs that exist on `device`, missing ones at their default."""
    exist = {each.name for each in knobs_on(device)}
    kept = {name: value for name, value in configuration.items() if name in exist}
    return Configuration({**_defaults(device), **kept})


def acting(configuration: Configuration, baseline: Configuration) -> Configuration:
    """The same with the baseline's value of each knob that does nothing beside the others, such as a flag of XLA."""
    idle = {name: baseline[name] for name in configuration if name in baseline and not KNOBS[name].acts(configuration)}
    return configuration.replace(**idle)


def on_several_devices(configuration: Configuration) -> Configuration:
    """The same configuration with the knobs of a strategy, missing ones at their default."""
    return Configuration({**{name: KNOBS[name].default for name in STRATEGY_KNOBS}, **configuration})


def _defaults(device: Device) -> dict[str, KnobValue]:
    return {each.name: each.default for each in knobs_on(device) if each.default is not None and not each.of_workload}


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """What a workload's `dataset(config)` may read.

    Args:
        batch_size: Examples per step; for datasets that do their own batching.
        num_parallel_calls: To be handed to `map(…, num_parallel_calls=)`: None is serial, -1 is
            `tf.data.AUTOTUNE`.
        deterministic: Whether the order of the examples must be kept.
    """

    batch_size: int
    num_parallel_calls: int | None = None
    deterministic: bool = True

    @classmethod
    def of(cls, configuration: Configuration) -> DatasetConfig:
        """The part of a configuration that a dataset is told."""
        calls = configuration.get("num_parallel_calls", 0)
        known = {"autotune": -1, AS_WRITTEN: None, 0: None}
        return cls(
            batch_size=configuration.batch_size,
            num_parallel_calls=known[calls] if calls in known else int(calls),
            deterministic=bool(configuration.get("deterministic", True)),
        )
