"""The options of a run, each declared once: type, default, bounds and help.

`autotune.tune` and `autotune tune` take their options from the fields of `Options`.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from autotune.data.errors import ArgumentError
from autotune.data.models import first_mistake
from autotune.data.printable import MASK, mask_arguments, mask_text, masked_names

Objective = Literal["time_to_loss", "throughput", "energy"]
Group = Literal["Everyday", "Search", "Several devices"]
Tracker = Literal["mlflow", "wandb", "tensorboard"]
MIN_GAIN = 0.02  # smallest gain worth a recommendation, as a share
MEMORY_MARGIN = 0.10  # share of the memory limit that must stay free at the peak
USUAL_BUDGET = "3m"  # that `demo`, `doctor` and the documents name for a small training
VERIFY_SECONDS = 100.0  # of `autotune verify`, where no other budget is given
LONGEST_ARGS = 25_000  # characters in total: Linux takes 128 KiB for one argument of a process
_REQUIRED: Any = dataclasses.MISSING


@dataclass(frozen=True)
class Option:
    """The declaration of an option besides its type and default."""

    help: str
    is_duration: bool = False  # users may give text such as `10m`; the field holds seconds
    may_change: bool = False  # a resumed run may be given another value
    group: Group = "Search"  # of the help


def option(default: Any, help: str, **flags: Any) -> Any:
    """Declare a field of `Options` that users give; see `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **flags)})


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class Options:
    """The options of a run, read and checked when they are made. Durations and paths may be given as users have them.

    Raises ArgumentError.
    """

    budget: Annotated[FiniteFloat, Field(ge=1, le=1e7)] = option(
        _REQUIRED,
        "Time for everything, such as 90s, 10m or 1h30m; until the answer is settled, at most ten minutes, when left "
        "out. With resume, the time to continue for.",
        is_duration=True,
        group="Everyday",
    )
    space: str | None = option(
        None,
        "A search-space file, or a shipped one: quick, cpu, gpu, gpu_thorough, several_gpus. Chosen by device when "
        "left out.",
    )
    trials: Annotated[int, Field(ge=1, le=10**9)] | None = option(
        None, "The most trials of the search.", may_change=True
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = option(0, "Seed of the sampler and of the order of slices.")
    min_gain: Annotated[float, Field(ge=0, le=1e3)] = option(
        MIN_GAIN, "Smallest gain worth a recommendation: 0.02 is two percent."
    )
    trial_timeout: Annotated[FiniteFloat, Field(ge=1, le=1e7)] | None = option(
        None, "Time for one trial; planned from the baseline when left out.", is_duration=True
    )
    max_batch: Annotated[int, Field(ge=1, le=1 << 20)] | None = option(
        None, "The largest batch size to try.", group="Everyday"
    )
    begin_with: str | None = option(
        None,
        "A recipe, a run directory or a folder of recipes, such as those of other machines: the configurations are the "
        "first candidates.",
    )
    fresh: bool = option(
        False, "Ignore earlier runs of the same workload; otherwise their leaders are the first candidates."
    )
    fixed_batch: bool = option(False, "Keep the baseline's batch size.", group="Everyday")
    global_batch: Annotated[int, Field(ge=1, le=1 << 24)] | None = option(
        None, "Examples per update of the weights, kept while the batch size is tuned: gradients are accumulated."
    )
    memory_margin: Annotated[float, Field(ge=0, le=0.9)] = option(
        MEMORY_MARGIN, "Share of the memory, host's and device's, that must stay free at the peak: 0.1 is ten percent."
    )
    soak: Annotated[FiniteFloat, Field(ge=0, le=1e6)] | None = option(
        None,
        "Time at the end in which the winner trains without a pause and is watched for leaks and hangs, such as 60s.",
        is_duration=True,
        may_change=True,
    )
    objective: Objective = option(
        "time_to_loss",
        "time_to_loss: a larger batch must reach the same losses sooner; throughput: samples per second at any batch "
        "size; energy: samples per joule of the GPUs.",
        group="Everyday",
    )
    profile: Literal["all", "finalists", "none"] = option(
        "finalists",
        "Which trials are profiled after their slices: all; the baseline and the leaders (finalists); or none. XProf "
        "and TensorBoard open trials/NNNN/profile.",
    )
    fit: Annotated[int, Field(ge=1, le=1000)] | None = option(
        None, "Which model.fit of a script is tuned, from 1, in the order of the calls; the longest when left out."
    )
    loss: str | None = option(
        None, "Which number that a script's own training step returns is the loss: a key, or the position in a tuple."
    )
    skip_cells: str | None = option(None, "Leave out the cells of a notebook that have this tag; several with commas.")
    allow_writes: bool = option(False, "Let the script write to existing files, in each trial.")
    allow_precision: bool = option(False, "Also vary the precision where the script chooses its dtype itself.")
    train_samples: Annotated[int, Field(ge=1, le=10**15)] | None = option(
        None,
        "Samples that the long training will take, to say whether tuning is worth it; a script's epochs when left out.",
        may_change=True,
    )
    executor: Literal["local", "ray"] = option(
        "local",
        "local: trials run on this machine. ray: on a Ray cluster, see docs/clusters.md.",
        may_change=True,
        group="Several devices",
    )
    seats: Annotated[int, Field(ge=1, le=4096)] | None = option(
        None, "The most seats of the Ray cluster to use.", may_change=True, group="Several devices"
    )
    devices: str | None = option(
        None,
        "GPUs of this machine on which trials run at the same time: all, or indices and UUIDs such as 0,1.",
        may_change=True,
        group="Several devices",
    )
    seat_devices: Annotated[int, Field(ge=1, le=64)] = option(1, "GPUs that one trial uses.", group="Several devices")
    ray_address: str | None = option(
        None,
        "The cluster's address; RAY_ADDRESS, or a Ray of this machine's own, when left out.",
        may_change=True,
        group="Several devices",
    )
    ray_upload: bool = option(
        False,
        "Let Ray copy the working directory to the hosts, which share a file system without it.",
        group="Several devices",
    )
    # The rest is no option of its own.
    args: tuple[str, ...] = ()  # of the workload's file
    keeps_budget: bool = True  # it was asked for; else the run ends as soon as the answer is settled

    @property
    def searching(self) -> float:
        """The seconds of the budget before the soak at the end."""
        return max(1.0, self.budget - (self.soak or 0.0))

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, given: ArgsKwargs, make: Callable[[ArgsKwargs], Self]) -> Self:
        """Read each option, then check it. Raises ArgumentError."""
        values = dict(given.kwargs or {})
        for name, value in values.items():
            if name in OPTIONS and OPTIONS[name].is_duration and value is not None:
                values[name] = seconds_of(name, value)
            elif isinstance(value, os.PathLike):
                values[name] = os.fspath(value)
        try:
            return make(ArgsKwargs((), values))
        except ValidationError as error:
            raise ArgumentError(first_mistake(error)) from error

    def __post_init__(self) -> None:
        """Check the options together. Raises ArgumentError."""
        if self.seats is not None and self.executor == "local":
            raise ArgumentError("seats is for the Ray executor")
        if self.executor == "local" and self.seat_devices > 1 and self.devices is None:
            raise ArgumentError("seat_devices was given without devices")
        if self.executor == "ray" and self.devices is not None:
            raise ArgumentError("devices is for the local executor", hint="Ray assigns GPUs: use seat_devices.")
        if self.executor == "local" and (self.ray_address is not None or self.ray_upload):
            raise ArgumentError("ray_address and ray_upload are for executor='ray'")
        check_args(self.args)

    @property
    def recorded(self) -> Options:
        """These options without credentials, as files hold them."""
        address = None if self.ray_address is None else mask_text(self.ray_address)
        return replace(self, args=mask_arguments(self.args), ray_address=address)

    @property
    def to_repeat(self) -> list[str]:
        """The words of the command that resumes: the script's arguments, credentials, choices that no file may make."""
        words = ["--allow-writes"] if self.allow_writes else []
        if self.ray_address is not None:
            words += ["--ray-address", self.ray_address]
        recorded = mask_arguments(self.args)
        return [*words, "--", *recorded] if recorded else words

    def resumed_with(self, given: Mapping[str, Any]) -> Options:
        """Return the options with which a run that had these continues. Raises ArgumentError."""
        # A run directory may be somebody else's: it neither allows writes nor names a host to connect to.
        lacks_args = masked_names(self.args) and not given.get("args")
        if lacks_args or any(getattr(self, name) and not given.get(name) for name in ("allow_writes", "ray_address")):
            raise ArgumentError(
                "--resume does not reuse credentials, --allow-writes or cluster addresses",
                hint=f"If you trust the run directory, pass them again: {shlex.join(self.to_repeat)}",
            )
        options, usual = self, Options(budget=self.budget)
        if masked_names(self.args):
            args = check_args(given["args"])
            if mask_arguments(args) != self.args:
                raise ArgumentError(
                    "the script's arguments differ from those of the run to be resumed",
                    hint=f"They were {shlex.join(self.args)}, with credentials replaced by {MASK}.",
                )
            options, given = replace(options, args=args), {**given, "args": None}
        # What is as usual is as good as left out.
        changes = {name: value for name, value in given.items() if value not in (None, getattr(usual, name, None))}
        changed = replace(options, **changes)
        for name in changes:
            now, before = getattr(changed, name), getattr(self, name)
            if now != before and not (name in OPTIONS and OPTIONS[name].may_change):
                shown = mask_arguments(now) if isinstance(now, tuple) else now
                raise ArgumentError(f"{name} is {shown!r}, and the run to be resumed has {before!r}")
        return changed


@dataclass(frozen=True, kw_only=True)
class LongRunOptions:
    """The options of `autotune run`. Raises ArgumentError for those that exclude one another."""

    candidate: bool = option(
        False, "Train with the best candidate of an undecided run, which is not confirmed to be faster."
    )
    same_training: bool = option(False, "Train with the fastest configuration at the script's own batch size.")
    larger_batch: bool = option(
        False, "Train with the best configuration of another batch size, although it is not recommended."
    )
    skip_missing: bool = option(False, "Continue without a knob whose place in the script is gone.")
    scale_learning_rate: Literal["sqrt", "linear"] | None = option(
        None,
        "Multiply the learning rate by the ratio of the batch sizes (linear), or by its root (sqrt), in place of the "
        "rule that was tested.",
    )
    keep_learning_rate: bool = option(False, "Leave the learning rate as the script has it.")
    strict: bool = option(
        False,
        "Stop if no recipe was measured on this kind of machine. Otherwise autotune warns, and trains with a single "
        "recipe all the same. If a folder has none, it trains as the script has it.",
    )

    def __post_init__(self) -> None:
        """Check the options together."""
        if self.candidate + self.same_training + self.larger_batch > 1:
            raise ArgumentError("--candidate, --same-training and --larger-batch exclude one another")
        if self.scale_learning_rate is not None and self.keep_learning_rate:
            raise ArgumentError("--scale-learning-rate and --keep-learning-rate exclude one another")

    @property
    def words(self) -> list[str]:
        """The words of a command line that stand for them."""
        given = {f"--{name.replace('_', '-')}": value for name, value in vars(self).items() if value}
        return [word for flag, value in given.items() for word in ((flag,) if value is True else (flag, value))]


def declared_in(options: type) -> dict[str, Option]:
    """Return the options that users give, in the order of the help."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(options) if field.metadata}


OPTIONS = declared_in(Options)


Function = TypeVar("Function", bound=Callable[..., Any])


def take_options(function: Function, *, of: type = Options, mark: Callable[[Option], object] | None = None) -> Function:
    """Give a function that takes `**options` their signature and documentation, before its own keywords.

    The line for `options` of its docstring is replaced by a description of each option. A command line gives durations
    and paths as text; its `mark` annotates each parameter.
    """
    as_text, options, hints = mark is not None, declared_in(of), get_type_hints(of)
    defaults = {field.name: field.default for field in dataclasses.fields(of)}
    offered = []
    for name, declared in options.items():
        hint, default = hints[name], defaults[name]
        if declared.is_duration:
            hint, default = str | None if as_text else float | str | None, None
        elif name in ("space", "begin_with") and not as_text:
            hint = str | Path | None
        if mark is not None:
            hint = Annotated[hint, mark(declared)]
        offered.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    first = [parameter for parameter in own if parameter.kind is not parameter.KEYWORD_ONLY]
    function.__signature__ = signature.replace(parameters=[*first, *offered, *own[len(first) :]])  # type: ignore[attr-defined]
    kinds = {True: " In seconds, or as text.", False: ""}
    documented = "".join(
        textwrap.fill(
            f"{name}: {declared.help}{kinds[declared.is_duration and not as_text]}",
            120,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
        )
        + "\n"
        for name, declared in options.items()
    )
    function.__doc__ = re.sub(r" {8}options: .*\n", lambda _: documented, function.__doc__ or "")
    return function


def seconds_of(name: str, value: object) -> float:
    """Return seconds, given as a number or as text: `90s`, `10m`, `1.5h` or `1h30m`. Raises ArgumentError."""
    if type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]
    text = value.strip().lower() if isinstance(value, str) else ""
    if re.fullmatch(r"0*[1-9][\d.]*", text):
        raise ArgumentError(f"{name}: {value!r} has no unit", hint=f"Say {text}s or {text}m.")
    match = re.fullmatch(
        r"(?:(?P<h>\d{1,6}(?:\.\d{1,6})?)h)?(?:(?P<m>\d{1,6}(?:\.\d{1,6})?)m)?(?:(?P<s>\d{1,8}(?:\.\d{1,6})?)s?)?", text
    )
    if not match or not match[0]:
        raise ArgumentError(f"{name}: {value!r} is not a duration", hint="Durations look like 90s, 10m, 1.5h or 1h30m.")
    return sum(float(match[unit] or 0) * scale for unit, scale in (("h", 3600), ("m", 60), ("s", 1)))


def check_args(args: Sequence[str]) -> tuple[str, ...]:
    """Return arguments of the user's file as another process can be given them. Raises ArgumentError."""
    if isinstance(args, str) or not all(isinstance(argument, str) for argument in args):
        raise ArgumentError(f"args is {args!r}, expected a list of strings")
    if damaged := [argument for argument in args if argument.encode(errors="ignore").decode() != argument]:
        raise ArgumentError(f"the argument {damaged[0]!r} of the workload's file is not UTF-8")
    if sum(map(len, args)) > LONGEST_ARGS:
        raise ArgumentError(
            f"the arguments of the workload's file are longer than {LONGEST_ARGS} characters",
            hint="Name a directory or a list of files instead of each file.",
        )
    return tuple(args)
