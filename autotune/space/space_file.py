"""A search space: which knobs vary, and over what. Read from TOML, then resolved for one machine.

    schema_version = 1
    [knobs.batch_size]
    kind = "power_of_two"
    low = 16
    high = "min(1024, examples/4)"
    [knobs.precision]
    kind = "categorical"
    choices = ["float32", "mixed_bfloat16"]

Kinds: `categorical` (choices), `power_of_two` (low, high). Bounds are integers or expressions over `cores` and
`examples` (see `bound`); the upper bound of the batch size may be "memory": it is doubled until a trial runs out.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotune.data.errors import ArgumentError, SearchSpaceError
from autotune.data.files import read_whole, shipped_directory
from autotune.data.models import KnobValue
from autotune.data.printable import short
from autotune.space.configuration import Configuration, format_value, normalize, reset_idle
from autotune.space.knobs import KNOBS, STRATEGY_KNOBS, Device, did_you_mean
from autotune.space.variables import REFUSED

SCHEMA_VERSION = 1
UNTIL_OUT_OF_MEMORY = "memory"
LARGEST_DOUBLED_BATCH = 1 << 16  # where doubling the batch size ends when memory does not end it first
LARGEST_FILE_BYTES = 1 << 14  # `tomllib` takes a second for a key of so many parts; its time is quadratic
LARGEST_NUMBER_OF_CHOICES = 256

_KEYS_OF_KIND = {"categorical": ("kind", "choices"), "power_of_two": ("kind", "low", "high")}
_TERM = re.compile(
    r"\s*(?:(?:(?P<factor>[0-9]{1,9})\s*\*\s*)?(?P<name>cores|examples)(?:\s*/\s*(?P<divisor>[0-9]{1,9}))?"
    r"|(?P<number>[0-9]{1,9}))\s*"
)
_COMBINATION = re.compile(r"\s*(?P<function>min|max)\s*\((?P<terms>[^()]*)\)\s*")


def bound(text: object, *, cores: int, examples: int | None, where: str) -> int | None:
    """Compute the number that a bound stands for; None where it rests on an unknown number of examples.

    Grammar: a term, `min(term, …)` or `max(term, …)`. Terms: `12`, `cores`, `4*cores`, `2*examples/3` (floor division).
    """
    written = text if isinstance(text, str) else short(text)
    combination = _COMBINATION.fullmatch(written)
    values: list[float] = []
    for term in combination["terms"].split(",") if combination else [written]:
        match = _TERM.fullmatch(term)
        if match is None or int(match["divisor"] or 1) == 0:
            raise SearchSpaceError(
                f"{where} is {_short(text)}, which is no bound",
                hint='Bounds look like 512, "cores", "4*cores", "examples/4" or "min(1024, examples/4)".',
            )
        unit = {"cores": cores, "examples": examples, None: int(match["number"] or 0)}[match["name"]]
        factor, divisor = int(match["factor"] or 1), int(match["divisor"] or 1)
        values.append(math.inf if unit is None else factor * unit // divisor)
    value = max(values) if combination and combination["function"] == "max" else min(values)
    return None if math.isinf(value) else int(value)


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values of one knob, as written: `choices`, or powers of two from `low` to `high`; see `bound`."""

    choices: tuple[KnobValue, ...] = ()
    low: int | str = 0
    high: int | str = 0

    @classmethod
    def read(cls, name: str, table: Any, source: str) -> Range:
        """Check a table of the file. Raises SearchSpaceError where the knob cannot vary over it."""
        plain, where = name.removeprefix("--"), f"{source}: [knobs.{name}]"
        _require(plain not in REFUSED, f"{source}: {plain} is refused: {REFUSED.get(plain)}", "Leave it out.")
        hint = f"{did_you_mean(name, KNOBS)}`autotune knobs` lists them all."
        _require(name in KNOBS, f"{source}: there is no knob called {short(name)}", hint)
        domain = KNOBS[name].domain
        takes = f"{name} takes {domain.describe()}."
        kind = table.get("kind") if isinstance(table, dict) else None
        hint = f"{did_you_mean(kind if isinstance(kind, str) else '', _KEYS_OF_KIND)}Kinds: {', '.join(_KEYS_OF_KIND)}."
        _require(isinstance(kind, str) and kind in _KEYS_OF_KIND, f"{where}: kind is {_short(kind)}", hint)
        _refuse_unknown(table, _KEYS_OF_KIND[str(kind)], where=where)
        choices, low, high = table.get("choices"), table.get("low"), table.get("high")
        if kind == "categorical":
            fits = isinstance(choices, list) and 1 <= len(choices) <= LARGEST_NUMBER_OF_CHOICES
            hint = f"Write a list of one to {LARGEST_NUMBER_OF_CHOICES} values."
            _require(fits, f"{where}: choices is {_short(choices)}", hint)
            for index, value in enumerate(choices):
                _require(value in domain, f"{where}: choices[{index}] is {_short(value)}", takes)
            return cls(choices=tuple(choices))
        _require(domain.integers is not None, f"{where}: kind {kind!r} needs a knob with numbers", takes)
        bound(low, cores=1, examples=1, where=f"{where}: low")  # refuses what it cannot read
        if high != UNTIL_OUT_OF_MEMORY or name != "batch_size":
            bound(high, cores=1, examples=1, where=f"{where}: high")
        return cls(low=low, high=high)

    def values(self, name: str, *, cores: int, examples: int | None, source: str) -> Sequence[Any]:
        """Return the values on this machine. Raises SearchSpaceError where there are none, or too large ones."""
        if self.choices:
            return self.choices
        where, domain = f"{source}: [knobs.{name}]", KNOBS[name].domain
        until_memory = f"min({LARGEST_DOUBLED_BATCH}, examples/4)"
        ends = (self.low, until_memory if self.high == UNTIL_OUT_OF_MEMORY else self.high)
        low, high = (bound(end, cores=cores, examples=examples, where=where) for end in ends)
        if low is None or high is None:
            raise SearchSpaceError(
                f"{where} has a bound on the number of examples, which is not known here",
                hint="Write a number as the bound.",
            )
        if name == "batch_size" and examples:
            high = min(high, examples)
        powers = [1 << exponent for exponent in range(high.bit_length()) if 1 << exponent >= low]
        problem = f"{where} is empty here: from {low} to {high}"
        _require(bool(powers) or name == "batch_size", problem, "Lower `low` or raise `high`.")
        for power in powers:
            _require(power in domain, f"{where} reaches {power} here", f"{name} takes {domain.describe()}.")
        return powers


@dataclass(frozen=True, kw_only=True)
class ResolvedSpace:
    """A search space for one workload on one machine."""

    baseline: Configuration
    choices: Mapping[str, tuple[KnobValue, ...]]  # two or more a knob: numbers ascend, others are as written
    left_out: Mapping[str, str]  # knobs of the file that do not vary here, with the reason

    @property
    def size(self) -> int:
        """The number of configurations."""
        return math.prod(len(values) for values in self.choices.values())

    def configuration(self, varied: Mapping[str, KnobValue]) -> Configuration:
        """Return the baseline with the varied knobs set, and those that its strategy decides."""
        return self.canonical(self.baseline.replace(**varied))

    def canonical(self, configuration: Configuration) -> Configuration:
        """Return the one configuration among those that train equally: see `normalize` and `reset_idle`."""
        return reset_idle(normalize(configuration, self.choices), self.baseline)

    def __contains__(self, configuration: object) -> bool:
        """Return whether every knob of `configuration` has a value that this space allows."""
        return isinstance(configuration, Configuration) and all(
            format_value(value) in map(format_value, self.choices.get(name, (self.baseline[name],)))
            for name, value in configuration.items()
            if name in self.baseline
        )


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A search space as written, not yet resolved for a machine."""

    source: str  # the file, for messages
    ranges: Mapping[str, Range]

    @classmethod
    def parse(cls, text: str, *, source: str) -> SearchSpace:
        """Read TOML text. Raises SearchSpaceError where it is not a search space."""
        try:
            document = tomllib.loads(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a plain ValueError
            raise SearchSpaceError(
                f"{source}: not valid TOML: {error}",
                hint="`autotune knobs --space quick` shows what a search space holds; search_spaces/ has whole ones.",
            ) from error
        version = document.get("schema_version")
        newer = type(version) is int and version > SCHEMA_VERSION
        if not newer:  # a newer one may hold keys that are not known yet
            _refuse_unknown(document, ("schema_version", "knobs"), where=source)
        _require(
            type(version) is int and version == SCHEMA_VERSION,
            f"{source}: schema_version is {_short(version)}, this autotune reads {SCHEMA_VERSION}",
            "Upgrade autotune." if newer else f"Write: schema_version = {SCHEMA_VERSION}",
        )
        knobs = document.get("knobs")
        fits = isinstance(knobs, dict) and bool(knobs)
        _require(fits, f"{source}: no knobs to vary", "Add a table such as [knobs.batch_size].")
        ranges = {name: Range.read(name, table, source) for name, table in document["knobs"].items()}
        return cls(source=source, ranges=ranges)

    def resolve(
        self,
        *,
        baseline: Configuration,
        device: Device,
        cores: int,
        examples: int | None,  # of one epoch; None where unknown
        dataset_takes_config: bool,
        largest_batch: int | None = None,
        devices: int = 1,  # of a seat
        fixed: Mapping[str, str] = MappingProxyType({}),  # knobs that do not vary, with the reason
        capability: str | None = None,  # the lowest of the GPUs, such as `8.0`; None where it is not known
    ) -> ResolvedSpace:
        """Return the choices of every knob, the baseline's value among them.

        Raises SearchSpaceError where a range is empty or nothing varies, ArgumentError for a `largest_batch` too small.
        """
        if largest_batch is not None and largest_batch < baseline.batch_size:
            raise ArgumentError(
                f"--max-batch {largest_batch} is below the workload's own batch size, which is {baseline.batch_size}",
                hint=f"Give --max-batch {baseline.batch_size} or more, or the workload another batch_size.",
            )
        replicas = {"replicas": Range(choices=(devices,))} if devices > 1 and "strategy" in self.ranges else {}
        choices: dict[str, tuple[KnobValue, ...]] = {}
        left_out: dict[str, str] = {}
        for name, written in {**replicas, **self.ranges}.items():
            if why := _why_left_out(name, device, fixed, baseline, dataset_takes_config):
                left_out[name] = why
                continue
            values = written.values(name, cores=cores, examples=examples, source=self.source)
            if name == "batch_size":
                whole = baseline.update_size if "global_batch" in baseline else 0  # accumulated: a batch divides it
                values = [value for value in values if whole % value == 0 and value <= (largest_batch or value)]
            elif name == "replicas":
                values = [*(value for value in values if value < devices), devices]
            needs = {} if device is not Device.GPU or capability is None else KNOBS[name].capability
            slow = {value: need for value, need in needs.items() if float(capability or 0) < need}  # no fast path
            why = "needs compute capability {}, not {}"
            left_out |= {f"{name}={format_value(value)}": why.format(need, capability) for value, need in slow.items()}
            allowed = _with_baseline([value for value in values if value not in slow], baseline[name])
            if len(allowed) > 1:
                choices[name] = allowed
            else:
                left_out[name] = f"only the baseline's value, {format_value(baseline[name])}, is left"
        if not choices:
            raise SearchSpaceError(
                f"{self.source}: nothing is left to vary here",
                hint="; ".join(f"{name}: {why}" for name, why in left_out.items()) + ".",
            )
        return ResolvedSpace(
            baseline=baseline, choices={name: choices[name] for name in KNOBS if name in choices}, left_out=left_out
        )


def _why_left_out(
    name: str, device: Device, fixed: Mapping[str, str], baseline: Configuration, dataset_takes_config: bool
) -> str:
    """Return why a knob does not vary here; empty where it does."""
    if device not in KNOBS[name].devices:
        return f"does not exist on a {device}"
    if name in fixed:
        return fixed[name]
    if name not in baseline:
        return "the seat has one device" if name in STRATEGY_KNOBS else "only some scripts have it"
    if KNOBS[name].needs_dataset_config and not dataset_takes_config:
        return "the workload's dataset() takes no config"
    return ""


def _with_baseline(values: Sequence[KnobValue], baseline: KnobValue) -> tuple[KnobValue, ...]:
    distinct = {format_value(value): value for value in (*values, baseline)}
    numbers = [value for value in distinct.values() if type(value) is int]
    others = [value for value in distinct.values() if type(value) is not int]
    return (*sorted(numbers), *others)


def _require(fits: bool, problem: str, hint: str) -> None:
    if not fits:
        raise SearchSpaceError(problem, hint=hint)


def _refuse_unknown(table: Mapping[str, object], known: tuple[str, ...], *, where: str) -> None:
    for key in table:
        hint = f"{did_you_mean(key, known)}Known here: {', '.join(known)}."
        _require(key in known, f"{where}: unknown key {short(key)}", hint)


def _short(value: object) -> str:
    return "missing" if value is None else short(value)


def shipped_names() -> tuple[str, ...]:
    """Return the names that `--space` takes instead of a path."""
    return tuple(sorted(path.stem for path in shipped_directory("search_spaces").glob("*.toml")))


def find_search_space(name_or_path: str | Path) -> SearchSpace:
    """Read the shipped search space of that name, or the one in that file. Raises SearchSpaceError without either."""
    file, source = Path(name_or_path), str(name_or_path)
    if source in shipped_names():
        file, source = shipped_directory("search_spaces") / f"{source}.toml", f"{source}.toml"
    shipped = ", ".join(shipped_names())
    try:
        content = read_whole(file, LARGEST_FILE_BYTES, SearchSpaceError, f"Give a TOML file, or one of {shipped}.")
        return SearchSpace.parse(content.decode(), source=source)
    except SearchSpaceError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise SearchSpaceError(
            f"no search space {source!r}: no such file, and none of that name is shipped",
            hint=f"{did_you_mean(source, shipped_names())}Shipped: {shipped}.",
        ) from error
    except UnicodeDecodeError as error:
        raise SearchSpaceError(f"{source} is not UTF-8 text") from error
