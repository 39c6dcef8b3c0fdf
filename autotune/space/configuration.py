"""A configuration: a value for every knob. Values are checked where a configuration is made, or read from a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.data.errors import ConfigurationError, RunDirectoryError
from autotune.data.models import KnobValue
from autotune.data.record import baseline_trial
from autotune.data.run_directory import RunRecord
from autotune.space.knobs import AS_WRITTEN, KNOBS, STRATEGY_KNOBS, Device, check_value, knobs_on

if TYPE_CHECKING:
    from autotune.data.record import TrialRecord
    from autotune.data.run_directory import RunDirectory

MIRRORED = "mirrored"
ONE_STEP = (
    "model.fit with steps_per_execution above 1 fails inside TensorFlow on more than one replica, unless "
    "cross_device is hierarchical_copy or reduce_to_one"
)
NOT_ACCUMULATED = "gradients are not accumulated under MirroredStrategy: fit fails inside TensorFlow"
_XLA = ("jit_compile", "xla_auto_clustering")
_NO_XLA = "XLA is not combined with MirroredStrategy (keras#18145, keras#17187, keras#21366)"


class Configuration(Mapping[str, KnobValue]):
    """An immutable, hashable mapping from knob names to values in table order, checked as by `check_value`."""

    __slots__ = ("_values", "key")

    def __init__(self, values: Mapping[str, object], *, where: str = "configuration") -> None:
        checked = {name: check_value(name, value, where=where) for name, value in values.items()}
        self._values: dict[str, KnobValue] = {name: checked[name] for name in KNOBS if name in checked}
        # One canonical text per configuration: JSON keeps `true` and `1` apart.
        self.key = json.dumps(self._values, separators=(",", ":"))

    def __getitem__(self, name: str) -> KnobValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and self.key == other.key

    def __repr__(self) -> str:
        return f"Configuration({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    @property
    def id(self) -> str:
        """Eight characters, the same for equal configurations; the `c` keeps spreadsheets from reading a number."""
        return f"c{hashlib.sha256(self.key.encode()).hexdigest()[:7]}"

    @property
    def batch_size(self) -> int:
        """Examples per step."""
        return int(self._values["batch_size"])

    @property
    def update_size(self) -> int:
        """Examples per update of the weights: those of several steps where gradients are accumulated."""
        return int(self._values.get("global_batch", self.batch_size))

    def replace(self, **changes: KnobValue) -> Configuration:
        """Return the configuration with `changes` made."""
        return Configuration({**self._values, **changes})

    def differences(self, other: Configuration) -> dict[str, KnobValue]:
        """Return the knobs whose value here is not the one in `other`, with the value here."""
        return {
            name: value
            for name, value in self._values.items()
            if name not in other or type(other[name]) is not type(value) or other[name] != value
        }

    def describe(self, relative_to: Configuration | None = None) -> str:
        """Return `batch_size=256 prefetch=2`: all knobs, or those that differ from `relative_to`."""
        shown = dict(self._values) if relative_to is None else self.differences(relative_to)
        return " ".join(f"{name}={format_value(value)}" for name, value in shown.items()) or "baseline"


def format_value(value: KnobValue) -> str:
    """Return a value as TOML and JSON write it: `true`, `256`, `autotune`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def baseline_configuration(
    batch_size: int, named: Mapping[str, object], device: Device, *, where: str
) -> Configuration:
    """Return the baseline: `named` knobs, and TensorFlow's defaults for the device's other knobs."""
    for name in STRATEGY_KNOBS:
        if name in named and "strategy" not in named:
            raise ConfigurationError(f"{where}: {name} acts only with strategy")
    baseline = Configuration({**_defaults(device), "batch_size": batch_size, **named}, where=where)
    return add_strategy_knobs(baseline) if "strategy" in named else baseline


def move_to_device(configuration: Configuration, device: Device) -> Configuration:
    """Return the configuration with exactly the knobs that exist on `device`, missing ones at their default."""
    names = {knob.name for knob in knobs_on(device)}
    return Configuration(
        {**_defaults(device), **{name: value for name, value in configuration.items() if name in names}}
    )


def add_strategy_knobs(configuration: Configuration) -> Configuration:
    """Return the configuration with the knobs of a strategy, missing ones at their default."""
    return Configuration({**{name: KNOBS[name].default for name in STRATEGY_KNOBS}, **configuration})


def _defaults(device: Device) -> dict[str, KnobValue]:
    return {knob.name: knob.default for knob in knobs_on(device) if knob.default is not None and not knob.of_workload}


def reset_idle(configuration: Configuration, baseline: Configuration) -> Configuration:
    """Give the knobs that do nothing beside the others, such as a flag of XLA, the baseline's value."""
    idle = {name: baseline[name] for name in configuration if name in baseline and not KNOBS[name].acts(configuration)}
    return configuration.replace(**idle)


def find_conflict(values: Mapping[str, KnobValue]) -> str:
    """Return why these values cannot be in force together, as half a sentence; empty where they can."""
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
    return _NO_XLA if any(values.get(name) is True for name in _XLA) else ""


def normalize(configuration: Configuration, choices: Mapping[str, Sequence[KnobValue]]) -> Configuration:
    """Set the knobs that the configuration's strategy decides, so that no training is tried under two names.

    A knob that varies gets one of its choices.
    """
    wanted: dict[str, KnobValue] = {}
    if configuration.get("strategy", "none") != MIRRORED:
        for name in STRATEGY_KNOBS:
            default = KNOBS[name].default
            if name in configuration and name != "strategy" and default is not None:
                wanted[name] = default
        return configuration.replace(**wanted)
    if configuration.get("cross_device", "auto") == "auto":
        wanted["steps_per_execution"] = 1
    wanted |= {name: False for name in _XLA if configuration.get(name) is True}
    if configuration.get("replicas") == 1:
        wanted["replicas"] = max(choices.get("replicas", (1,)))
    return configuration.replace(
        **{name: value for name, value in wanted.items() if value in choices.get(name, (value,))}
    )


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """The values that a workload's `dataset(config)` may read.

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
        """Return the part of a configuration that a dataset is given."""
        calls = configuration.get("num_parallel_calls", 0)
        special = {"autotune": -1, AS_WRITTEN: None, 0: None}
        return cls(
            batch_size=configuration.batch_size,
            num_parallel_calls=special[calls] if calls in special else int(calls),
            deterministic=bool(configuration.get("deterministic", True)),
        )


def read_trials(directory: RunDirectory, problems: list[RunDirectoryError] | None = None) -> Iterator[TrialRecord]:
    """Yield a run's trials that have a result, by number, with checked configurations; see `RunDirectory`."""
    return directory.read_trials(problems, check=_check_record)


def _check_record(record: TrialRecord, file: Path) -> None:
    _checked(record.configuration, file, "configuration")
    _checked(record.asked or {}, file, "asked")


def _checked(values: Mapping[str, object], file: Path, key: str) -> Configuration:
    """Return the configuration under `key` of `file`. Raises RunDirectoryError where a knob or value is unknown."""
    try:
        return Configuration(values, where=f"{file}: {key}")
    except ConfigurationError as error:
        raise RunDirectoryError(error.message, hint=error.hint) from error


def baseline_of(directory: RunDirectory, run: RunRecord, trials: Sequence[TrialRecord]) -> Configuration | None:
    """Return a run's baseline, checked; that of its first baseline trial where run.json has none."""
    if run.baseline is not None:
        return _checked(run.baseline, directory.path / "run.json", "baseline")
    tried = baseline_trial(trials)
    return None if tried is None else Configuration(tried.configuration)
