"""A search space: which knobs vary, and over what. Read from TOML, then resolved for one machine.

    schema_version = 1
    [knobs.batch_size]
    kind = "power_of_two"
    low = 16
    high = "min(1024, examples/4)"
    [knobs.precision]
    kind = "categorical"
    choices = ["float32", "mixed_bfloat16"]

Kinds: `categorical` (choices), `integer` (low, high, step), `power_of_two` (low, high). Bounds are
integers or expressions over `cores` and `examples` (see `Bound`); the upper bound of the batch size may
be "memory": it is doubled until a trial runs out.

Reading a file executes nothing. This module may not import TensorFlow or Optuna.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from autotune.errors import ArgumentError, SearchSpaceError
from autotune.files import read_at_most
from autotune.printable import short
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import KNOBS, Device, KnobValue, nearest

SCHEMA_VERSION = 1
UNTIL_OUT_OF_MEMORY = "memory"
LARGEST_DOUBLED_BATCH = 1 << 16
"""Where doubling the batch size ends when memory does not end it first."""
LARGEST_FILE_BYTES = 1 << 16
MOST_DOTS_IN_A_LINE = 100
"""`tomllib` needs quadratic time for a key of many parts: minutes for a file of some kilobytes."""
LARGEST_NUMBER_OF_CHOICES = 256

_TERM = re.compile(
    r"\s*(?:(?:(?P<factor>[0-9]{1,9})\s*\*\s*)?(?P<name>cores|examples)(?:\s*/\s*(?P<divisor>[0-9]{1,9}))?"
    r"|(?P<number>[0-9]{1,9}))\s*"
)
_COMBINATION = re.compile(r"\s*(?P<function>min|max)\s*\((?P<terms>[^()]*)\)\s*")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A bound that may name the machine or the workload.

    Grammar: `term`, `min(term, …)` or `max(term, …)`; a term is `12`, `cores`, `4*cores`,
    `examples/4` or `2*examples/3` (whole-number division).
    """

    text: str
    function: str
    terms: tuple[tuple[int, str, int], ...]

    @classmethod
    def parse(cls, text: int | str, *, where: str) -> Bound:
        """The bound written as `text`.

        Raises:
            SearchSpaceError: `text` does not follow the grammar.
        """
        written = str(text)
        combination = _COMBINATION.fullmatch(written)
        parts = combination["terms"].split(",") if combination else [written]
        terms = []
        for part in parts:
            match = _TERM.fullmatch(part)
            if match is None or int(match["divisor"] or 1) == 0:
                raise SearchSpaceError(
                    f"{where}: cannot read the bound {written!r}",
                    hint='Bounds look like 512, "cores", "4*cores", "examples/4" or "min(1024, examples/4)".',
                )
            if match["number"] is not None:
                terms.append((int(match["number"]), "", 1))
            else:
                terms.append((int(match["factor"] or 1), match["name"], int(match["divisor"] or 1)))
        return cls(
            text=written,
            function=combination["function"] if combination else "min",
            terms=tuple(terms),
        )

    def resolve(self, *, cores: int, examples: int | None) -> int | None:
        """The bound as a number; None (no bound) where it rests on an unknown example count."""
        names = {"": 1, "cores": cores, "examples": examples}
        values = [
            math.inf if names[name] is None else factor * (names[name] or 0) // divisor
            for factor, name, divisor in self.terms
        ]
        value = min(values) if self.function == "min" else max(values)
        return None if math.isinf(value) else int(value)


@dataclass(frozen=True, kw_only=True)
class Range:
    """What one knob varies over, as written: either `choices`, or `low` to `high` by `kind`."""

    kind: str
    choices: tuple[KnobValue, ...] = ()
    low: Bound | None = None
    high: Bound | None = None
    step: int = 1
    until_out_of_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class ResolvedSpace:
    """A search space for one workload on one machine: the finite choices of every varied knob.

    Args:
        baseline: Where every knob that does not vary stays.
        choices: Ascending numbers, or values in the order written; at least two for each knob.
        grows_batch: Whether the batch size is doubled until out of memory.
        left_out: Knobs of the file that do not vary here, with the reason.
    """

    baseline: Configuration
    choices: Mapping[str, tuple[KnobValue, ...]]
    grows_batch: bool = False
    left_out: Mapping[str, str]

    @property
    def size(self) -> int:
        """How many configurations there are."""
        return math.prod(len(values) for values in self.choices.values())

    def configuration(self, varied: Mapping[str, KnobValue]) -> Configuration:
        """The baseline with the varied knobs set."""
        return self.baseline.replace(**varied)

    def __contains__(self, configuration: object) -> bool:
        """Whether every knob of `configuration` has a value that this space allows."""
        return isinstance(configuration, Configuration) and all(
            format_value(value)
            in {format_value(each) for each in self.choices.get(name, (self.baseline[name],))}
            for name, value in configuration.items()
            if name in self.baseline
        )


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A search space as written, not yet resolved for a machine.

    Args:
        source: The file it was read from, for messages.
        ranges: What each knob varies over, by knob name.
    """

    source: str
    ranges: Mapping[str, Range]

    @classmethod
    def load(cls, path: str | Path) -> SearchSpace:
        """Read a search space from a TOML file.

        Raises:
            SearchSpaceError: The file is missing, not TOML, or not a search space.
        """
        file = Path(path)
        try:
            content = read_at_most(file, LARGEST_FILE_BYTES)
            if len(content) > LARGEST_FILE_BYTES:
                raise SearchSpaceError(
                    f"{file}: larger than {LARGEST_FILE_BYTES} bytes",
                    hint="A search space is a few lines of TOML; is this the right file?",
                )
            text = content.decode("utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            if isinstance(error, UnicodeDecodeError):
                reason = "not UTF-8 text"
            raise SearchSpaceError(
                f"cannot read the search space {file}: {reason}",
                hint=f"Give the path of a TOML file, or one of {', '.join(shipped_names())}.",
            ) from error
        return cls.parse(text, source=str(file))

    @classmethod
    def parse(cls, text: str, *, source: str) -> SearchSpace:
        """Read a search space from TOML text.

        Args:
            text: The TOML.
            source: Where it comes from, for messages.

        Raises:
            SearchSpaceError: The text is not TOML or not a search space.
        """
        if any(line.count(".") > MOST_DOTS_IN_A_LINE for line in text.split("\n")):
            raise SearchSpaceError(
                f"{source}: a line with more than {MOST_DOTS_IN_A_LINE} dots",
                hint="A search space is a few short lines of TOML; is this the right file?",
            )
        try:
            document = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a plain ValueError
            raise SearchSpaceError(
                f"{source}: not valid TOML: {error}",
                hint="`autotune space quick` shows what a search space holds; search_spaces/ has whole ones.",
            ) from error
        version = document.get("schema_version")
        newer = type(version) is int and version > SCHEMA_VERSION
        if not newer:  # a newer file may hold keys that are not known yet
            _refuse_unknown(document, ("schema_version", "knobs"), where=source)
        if type(version) is not int or version != SCHEMA_VERSION:
            raise SearchSpaceError(
                f"{source}: schema_version is {_short(version)}, this autotune reads {SCHEMA_VERSION}",
                hint="Upgrade autotune." if newer else f"Write: schema_version = {SCHEMA_VERSION}",
            )
        knobs = document.get("knobs")
        if not isinstance(knobs, dict) or not knobs:
            raise SearchSpaceError(
                f"{source}: no knobs to vary", hint="Add a table such as [knobs.batch_size]."
            )
        return cls(
            source=source,
            ranges={name: _read_range(name, table, source) for name, table in knobs.items()},
        )

    def resolve(
        self,
        *,
        baseline: Configuration,
        device: Device,
        cores: int,
        examples: int | None,
        dataset_takes_config: bool,
        largest_batch: int | None = None,
        fixed_batch: bool = False,
        set_by_dataset: Container[str] = (),
    ) -> ResolvedSpace:
        """The choices of every knob, for one workload on one machine.

        The baseline's value is always among a varied knob's choices. Knobs that do not exist here are
        left out.

        Args:
            baseline: What the user would run anyway.
            device: What the training runs on.
            cores: Processor cores that this process may use.
            examples: Examples per epoch, None when unknown or endless.
            dataset_takes_config: Whether the workload's `dataset` accepts a config.
            largest_batch: No batch size above this one is tried; None for no bound but the file's.
            fixed_batch: The batch size does not vary.
            set_by_dataset: Knobs that the workload's dataset has set itself; the baseline has its values.

        Raises:
            SearchSpaceError: A range is empty on this machine, or nothing is left to vary.
            ArgumentError: The largest batch is below the baseline's.
        """
        if largest_batch is not None and largest_batch < baseline.batch_size:
            raise ArgumentError(
                f"--max-batch {largest_batch} is below the workload's own batch size, which is {baseline.batch_size}",
                hint=f"Give --max-batch {baseline.batch_size} or more, or the workload another batch_size.",
            )
        choices: dict[str, tuple[KnobValue, ...]] = {}
        left_out: dict[str, str] = {}
        for name, each in self.ranges.items():
            definition = KNOBS[name]
            if device not in definition.devices:
                left_out[name] = f"does not exist on a {device}"
            elif definition.needs_dataset_config and not dataset_takes_config:
                left_out[name] = "the workload's dataset() takes no config"
            elif name in set_by_dataset:
                left_out[name] = "the workload's dataset() sets it itself"
            elif name == "batch_size" and fixed_batch:
                left_out[name] = "kept by --fixed-batch"
            else:
                values = self._values(name, each, cores=cores, examples=examples)
                if name == "batch_size" and largest_batch is not None:
                    values = tuple(value for value in values if int(value) <= largest_batch)
                values = _with_baseline(values, baseline[name])
                if len(values) < 2:
                    left_out[name] = f"only the baseline's value, {format_value(values[0])}, is left"
                else:
                    choices[name] = values
        if not choices:
            raise SearchSpaceError(
                f"{self.source}: nothing is left to vary here",
                hint="; ".join(f"{name}: {why}" for name, why in left_out.items()) + ".",
            )
        return ResolvedSpace(
            baseline=baseline,
            choices={name: choices[name] for name in KNOBS if name in choices},
            grows_batch="batch_size" in choices and self.ranges["batch_size"].until_out_of_memory,
            left_out=left_out,
        )

    def _values(
        self, name: str, written: Range, *, cores: int, examples: int | None
    ) -> tuple[KnobValue, ...]:
        if written.kind == "categorical":
            return written.choices
        assert written.low is not None
        low = written.low.resolve(cores=cores, examples=examples)
        high = None if written.high is None else written.high.resolve(cores=cores, examples=examples)
        if written.until_out_of_memory:
            high = min(LARGEST_DOUBLED_BATCH, examples // 4 if examples else LARGEST_DOUBLED_BATCH)
        if low is None or high is None:
            raise SearchSpaceError(
                f"{self.source}: [knobs.{name}] has a bound on the number of examples, "
                "which is not known here",
                hint="Write a number as the bound.",
            )
        if name == "batch_size" and examples:
            high = min(high, examples)
        if written.kind == "integer" and (high - low) // written.step >= LARGEST_NUMBER_OF_CHOICES:
            raise SearchSpaceError(
                f"{self.source}: [knobs.{name}] has more than {LARGEST_NUMBER_OF_CHOICES} values here",
                hint='Raise step, or use kind = "power_of_two".',
            )
        values = tuple(_numbers(written.kind, low, high, written.step))
        outside = [value for value in values if value not in KNOBS[name].domain]
        if outside:
            raise SearchSpaceError(
                f"{self.source}: [knobs.{name}] reaches {outside[0]} here",
                hint=f"{name} takes {KNOBS[name].domain.describe()}.",
            )
        if not values and name != "batch_size":
            raise SearchSpaceError(
                f"{self.source}: [knobs.{name}] is empty here: from {low} to {high}",
                hint="Lower `low` or raise `high`.",
            )
        return values


def _numbers(kind: str, low: int, high: int, step: int) -> Iterator[int]:
    if kind == "integer":
        yield from range(low, high + 1, step)
    else:
        value = 1
        while value <= high:
            if value >= low:
                yield value
            value *= 2


def _with_baseline(values: tuple[KnobValue, ...], baseline: KnobValue) -> tuple[KnobValue, ...]:
    distinct = {format_value(value): value for value in (*values, baseline)}
    numbers = [value for value in distinct.values() if type(value) is int]
    others = [value for value in distinct.values() if type(value) is not int]
    return (*sorted(numbers), *others)


def _refuse_unknown(table: Mapping[str, object], known: tuple[str, ...], *, where: str) -> None:
    for key in table:
        if key not in known:
            raise SearchSpaceError(
                f"{where}: unknown key {_short(key)}",
                hint=f"{nearest(key, known)}Known here: {', '.join(known)}.",
            )


_KEYS_OF_KIND = {
    "categorical": ("kind", "choices"),
    "integer": ("kind", "low", "high", "step"),
    "power_of_two": ("kind", "low", "high"),
}


def _read_range(name: str, table: object, source: str) -> Range:
    where = f"{source}: [knobs.{name}]"
    if name not in KNOBS:
        raise SearchSpaceError(
            f"{source}: there is no knob called {_short(name)}",
            hint=f"{nearest(name, KNOBS)}`autotune knobs` lists them all.",
        )
    if not isinstance(table, dict):
        raise SearchSpaceError(
            f"{where} is {_short(table)}, not a table", hint='Write: kind = "categorical" and choices = […].'
        )
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in _KEYS_OF_KIND:
        close = nearest(kind, tuple(_KEYS_OF_KIND)) if isinstance(kind, str) else ""
        raise SearchSpaceError(
            f"{where}: kind is {_short(kind)}", hint=f"{close}Kinds: {', '.join(_KEYS_OF_KIND)}."
        )
    _refuse_unknown(table, _KEYS_OF_KIND[kind], where=where)
    if kind == "categorical":
        return Range(kind=kind, choices=_read_choices(name, table.get("choices"), where))
    return _read_numbers(name, kind, table, where)


def _read_choices(name: str, choices: object, where: str) -> tuple[KnobValue, ...]:
    if not isinstance(choices, list) or not 1 <= len(choices) <= LARGEST_NUMBER_OF_CHOICES:
        raise SearchSpaceError(
            f"{where}: choices is {_short(choices)}",
            hint=f"Write a list of one to {LARGEST_NUMBER_OF_CHOICES} values.",
        )
    for index, value in enumerate(choices):
        if value not in KNOBS[name].domain:
            raise SearchSpaceError(
                f"{where}: choices[{index}] is {_short(value)}",
                hint=f"{name} takes {KNOBS[name].domain.describe()}.",
            )
    if len({format_value(value) for value in choices}) < len(choices):
        raise SearchSpaceError(f"{where}: choices repeats a value", hint="Write each value once.")
    return tuple(choices)


def _read_numbers(name: str, kind: str, table: Mapping[str, object], where: str) -> Range:
    if KNOBS[name].domain.integers is None:
        raise SearchSpaceError(
            f"{where}: kind {kind!r} needs a knob with numbers",
            hint=f'{name} takes {KNOBS[name].domain.describe()}: use kind = "categorical".',
        )
    bounds = {}
    for end in ("low", "high"):
        value = table.get(end)
        if not _may_be_bound(value):
            raise SearchSpaceError(
                f"{where}: {end} is {_short(value)}",
                hint='Bounds look like 512, "4*cores" or "min(1024, examples/4)".',
            )
        bounds[end] = value
    step = table.get("step", 1)
    if type(step) is not int or step < 1:
        raise SearchSpaceError(f"{where}: step is {_short(step)}", hint="Write an integer from 1.")
    endless = bounds["high"] == UNTIL_OUT_OF_MEMORY
    if endless and (name != "batch_size" or kind != "power_of_two"):
        raise SearchSpaceError(
            f'{where}: only batch_size, with kind = "power_of_two", may have high = "memory"',
            hint="Write a number.",
        )
    low = Bound.parse(bounds["low"], where=where)
    high = None if endless else Bound.parse(bounds["high"], where=where)
    if high is not None and low.text.isdigit() and high.text.isdigit() and int(low.text) > int(high.text):
        raise SearchSpaceError(
            f"{where}: low ({low.text}) is above high ({high.text}), so the range is empty",
            hint="Swap them.",
        )
    return Range(kind=kind, low=low, high=high, step=step, until_out_of_memory=endless)


def _may_be_bound(value: object) -> TypeGuard[int | str]:
    if isinstance(value, str):
        return len(value) <= 80
    return type(value) is int and abs(value) < 10**9


def _short(value: object) -> str:
    return "missing" if value is None else short(value)


def shipped_directory() -> Path:
    """Where the search spaces that come with autotune are: inside the package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "search_spaces"
    return inside if inside.is_dir() else package.parent / "search_spaces"


def shipped_names() -> tuple[str, ...]:
    """The names that `--space` takes in place of a path."""
    return tuple(sorted(path.stem for path in shipped_directory().glob("*.toml")))


def find_search_space(name_or_path: str) -> SearchSpace:
    """The shipped search space of that name, or the one in that file.

    Raises:
        SearchSpaceError: There is neither, or the file is not a search space.
    """
    if name_or_path in shipped_names():
        text = (shipped_directory() / f"{name_or_path}.toml").read_text(encoding="utf-8")
        return SearchSpace.parse(text, source=f"{name_or_path}.toml")
    try:
        return SearchSpace.load(name_or_path)
    except SearchSpaceError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
    raise SearchSpaceError(
        f"no search space {name_or_path!r}: no such file, and none of that name is shipped",
        hint=f"{nearest(name_or_path, shipped_names())}Shipped: {', '.join(shipped_names())}.",
    )
