"""What limits a training: the words, and what is kept of a profile. Pure."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, FiniteFloat

T = TypeVar("T")
Many = Annotated[tuple[T, ...], Field(fail_fast=True)]
Amount = Annotated[FiniteFloat, Field(ge=0)]
Name = Literal[
    "input",
    "launch",
    "compute",
    "memory_bandwidth",
    "compute_or_memory",
    "communication",
    "balanced",
    "unknown",
]


class Bottleneck(BaseModel, frozen=True, extra="forbid"):
    """What limits a trial, in XProf's words."""

    name: Name
    share: Amount | None = None  # of a step: the figure that it rests on
    why: str  # one sentence with the figure; of `unknown` what is missing


class Ceilings(BaseModel, frozen=True, extra="forbid"):
    """The most that a training could reach, in samples per second; None where it was not measured."""

    by_input: Amount | None = None  # the input pipeline alone
    by_compute: Amount | None = None  # the step on a batch that is kept


class Operation(BaseModel, frozen=True, extra="forbid"):
    """An operation of a profiled trial."""

    name: str
    kind: str  # as TensorFlow calls it: `MatMul`
    on: str  # `host` or `device`
    count: int
    self_seconds: Amount  # in all profiled steps
    share: Amount  # of all operations' self time


class Profile(BaseModel, frozen=True, extra="forbid"):
    """What a full profile of a trial has shown."""

    steps: int = 0  # that were profiled
    step_seconds: Amount | None = None  # of a profiled step, which is slower than others
    breakdown: dict[str, Amount] = Field(
        {}
    )  # of a step, in seconds: input, compute, launch, communication, other
    operations: Many[Operation] = ()  # those with most self time, ten at most
    peak_bytes: int | None = None  # of the memory that TensorFlow's allocators held
    held_by: Many[str] = ()  # what held it at its peak
    reason: str = ""  # why there is no profile
