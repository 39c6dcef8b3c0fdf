"""What the data of all files and messages share: their base, their types, and the first mistake in damaged ones."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

T = TypeVar("T")
# A list of any length. Reading stops at the first mistake: a damaged file may hold millions.
Many = Annotated[tuple[T, ...], Field(fail_fast=True)]
Amount = Annotated[FiniteFloat, Field(ge=0)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
Count = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]  # larger ones fit into no table
Number = Annotated[int, Field(ge=1)]


class Frozen(BaseModel, frozen=True, extra="forbid"):
    """Data of a file or a message: immutable, without unknown fields."""


def first_mistake(error: ValidationError) -> tuple[str, str]:
    """Where pydantic finds it, as keys with dots between (empty for the whole), and what it is."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return ".".join(str(part) for part in first["loc"]), first["msg"]
