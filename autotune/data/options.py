"""How a run is to be done, checked where it is made."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Literal, get_args, get_origin, get_type_hints

from autotune.data.credentials import MASK, mask_arguments, mask_text, masked_names
from autotune.data.errors import ArgumentError
from autotune.data.printable import with_article

Objective = Literal["throughput", "energy"]  # what is compared: samples per second, or per joule of the GPUs
MIN_GAIN = 0.02  # smallest gain worth a recommendation, as a share
MEMORY_MARGIN = 0.10  # share of the memory limit that must stay free at the peak
LONGEST_ARGS = 25_000  # characters of them all: Linux takes 128 KiB for one argument of a process
MAY_CHANGE = ("trials", "soak", "train_samples", "executor", "seats", "devices", "all_seats", "ray_address")
"""Options that a resumed run may be given anew."""
BOUNDS = {
    "budget": (1.0, 1e7),
    "trials": (1, 10**9),
    "trial_timeout": (1.0, 1e7),
    "min_gain": (0.0, 1e3),
    "seed": (0, 2**32 - 1),
    "max_batch": (1, 1 << 20),
    "global_batch": (1, 1 << 24),
    "memory_margin": (0.0, 0.9),
    "soak": (0.0, 1e6),
    "fit": (1, 1000),
    "train_samples": (1, 10**15),
    "seats": (1, 4096),
    "seat_devices": (1, 64),
}
"""The least and the largest value of each number."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is to be done; see `tune`."""

    budget: float
    keeps_budget: bool = True  # it was asked for; else the run ends as soon as the answer is settled
    space: str | None = None
    trials: int | None = None
    seed: int = 0
    min_gain: float = MIN_GAIN
    trial_timeout: float | None = None
    isolation: Literal["template", "spawn"] = "template"
    pairing: Literal["auto", "bracketed"] = "auto"
    max_batch: int | None = None
    fixed_batch: bool = False
    global_batch: int | None = None
    thorough: bool = False
    memory_margin: float = MEMORY_MARGIN
    soak: float | None = None
    objective: Objective = "throughput"
    args: tuple[str, ...] = ()
    profile: Literal["all", "finalists", "none"] = "finalists"
    fit: int | None = None
    allow_writes: bool = False
    allow_cache: bool = False
    loss: str | None = None
    train_samples: int | None = None
    executor: Literal["local", "ray"] = "local"
    seats: int | None = None
    devices: str | None = None
    seat_devices: int = 1
    all_seats: bool = False
    ray_address: str | None = None
    ray_upload: bool = False

    @property
    def searching(self) -> float:
        """Seconds of the budget before the watch at the end."""
        return max(1.0, self.budget - (self.soak or 0.0))

    def __post_init__(self) -> None:
        """Check every one. Raises ArgumentError."""
        for name, hint in get_type_hints(Options).items():
            value, kinds = getattr(self, name), get_args(hint) or (hint,)
            if value is None and NoneType in kinds:
                continue
            fits, wanted = True, ""
            if get_origin(hint) is Literal:
                fits, wanted = value in kinds, f"is {' or '.join(kinds)}"
            elif bool in kinds:
                fits, wanted = isinstance(value, bool), "is True or False"
            elif str in kinds and name != "args":
                fits, wanted = isinstance(value, str), "must be text"
            elif name in BOUNDS:
                least, most = BOUNDS[name]
                numbers = (int, float) if float in kinds else (int,)
                fits = type(value) in numbers and least <= value <= most
                wanted = f"must be {'a' if float in kinds else 'a whole'} number from {least:g} to {most:g}"
            if not fits:
                raise ArgumentError(f"{name} is {value!r}", hint=f"It {wanted}.")
        if self.seats is not None and self.devices is not None:
            raise ArgumentError("seats and devices were both given", hint="seats cuts cores, devices names GPUs.")
        if self.executor == "local" and self.seat_devices > 1 and self.devices is None:
            raise ArgumentError("seat_devices was given without devices", hint="Name them, too, such as --devices all.")
        if self.executor == "ray" and self.devices is not None:
            raise ArgumentError("devices is for the local executor", hint="Ray gives GPUs out: use seat_devices.")
        if self.executor == "local" and (self.ray_address is not None or self.ray_upload):
            raise ArgumentError("ray_address and ray_upload are for executor='ray'", hint="Give --executor ray too.")
        checked_args(self.args)
        if self.thorough and self.space is not None:
            raise ArgumentError("thorough and space were both given", hint="--space gpu_thorough is the same.")

    @property
    def recorded(self) -> Options:
        """These options without credentials, as files hold them."""
        address = None if self.ray_address is None else mask_text(self.ray_address)
        return replace(self, args=mask_arguments(self.args), ray_address=address)

    @property
    def to_repeat(self) -> list[str]:
        """The words of a command line that `--resume` needs again: credentials, and what no file may decide."""
        words = ["--allow-writes"] if self.allow_writes else []
        if self.ray_address is not None:
            words += ["--ray-address", self.ray_address]
        recorded = mask_arguments(self.args)
        return [*words, "--", *recorded] if masked_names(recorded) else words

    def resumed_with(self, given: Mapping[str, object]) -> Options:
        """How a run goes on that had these options. Raises ArgumentError."""
        # A run directory may be somebody else's: it neither allows writes nor names a host to connect to.
        lacks_args = masked_names(self.args) and not given.get("args")
        if lacks_args or any(getattr(self, name) and not given.get(name) for name in ("allow_writes", "ray_address")):
            raise ArgumentError(
                "a resumed run takes no credentials, no leave to write and no address from its directory",
                hint=f"Where you trust it, give what it was begun with again: {shlex.join(self.to_repeat)}",
            )
        options, usual = self, Options(budget=self.budget)
        if masked_names(self.args):
            args = checked_args(given["args"])  # type: ignore[arg-type]  # checked there
            if mask_arguments(args) != self.args:
                raise ArgumentError(
                    "the script's arguments are not those of the run to be resumed",
                    hint=f"They were {shlex.join(self.args)}, with credentials in place of {MASK}.",
                )
            options, given = replace(options, args=args), {**given, "args": None}
        for name, value in given.items():
            if name in MAY_CHANGE and value not in (None, getattr(usual, name)):
                options = replace(options, **{name: value})  # type: ignore[arg-type]  # checked there
            elif value not in (None, getattr(usual, name), getattr(self, name)):
                shown = mask_arguments(value) if isinstance(value, tuple) else value
                raise ArgumentError(
                    f"{name} is {shown!r}, and the run to be resumed has {getattr(self, name)!r}",
                    hint=f"Leave {name} out: a resumed run is done as it was begun.",
                )
        return options


def seconds_of(name: str, value: object, *, may_be_none: bool = False) -> float:
    """Seconds, given as a number or as text: `90`, `90s`, `10m`, `1.5h` or `1h30m`. Raises ArgumentError."""
    if type(value) in (int, float):
        return float(value)  # type: ignore[arg-type]
    if not isinstance(value, str):
        raise ArgumentError(
            f"{name} is {with_article(type(value).__name__)}: {value!r}", hint="Give seconds, or text such as '10m'."
        )
    match = re.fullmatch(
        r"(?:(?P<h>\d{1,6}(?:\.\d{1,6})?)h)?(?:(?P<m>\d{1,6}(?:\.\d{1,6})?)m)?(?:(?P<s>\d{1,8}(?:\.\d{1,6})?)s?)?",
        value.strip().lower(),
    )
    seconds = -1.0
    if match and match[0]:
        seconds = sum(float(match[unit] or 0) * scale for unit, scale in (("h", 3600), ("m", 60), ("s", 1)))
    if seconds < 0 or (seconds == 0 and not may_be_none):
        raise ArgumentError(f"{name}: {value!r} is not a duration", hint="Durations look like 90s, 10m, 1.5h or 1h30m.")
    return seconds


def checked_args(args: Sequence[str]) -> tuple[str, ...]:
    """Arguments of the user's file, as another process can be given them. Raises ArgumentError."""
    if isinstance(args, str) or not all(isinstance(each, str) for each in args):
        raise ArgumentError(
            f"args is {args!r}, expected a list of strings",
            hint='Write each as the shell would hand it over: args=["--epochs", "90"].',
        )
    if odd := [each for each in args if each.encode(errors="ignore").decode() != each]:
        hint = "Give the file that it names another name."
        raise ArgumentError(f"the argument {odd[0]!r} of the workload's file is not UTF-8", hint=hint)
    if sum(map(len, args)) > LONGEST_ARGS:
        raise ArgumentError(
            f"the arguments of the workload's file are longer than {LONGEST_ARGS} characters",
            hint="Name a directory or a list of files instead of each file.",
        )
    return tuple(args)
