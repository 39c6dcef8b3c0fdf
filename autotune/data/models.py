"""The base and the types of all files and messages, and the first mistake in a damaged one."""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, StrictBool, StrictInt, StrictStr, ValidationError

from autotune.data.printable import short

T = TypeVar("T")
# A list of any length. Reading stops at the first mistake: a damaged file may hold millions.
Many = Annotated[tuple[T, ...], Field(fail_fast=True)]
Amount = Annotated[FiniteFloat, Field(ge=0)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
Count = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]  # larger ones fit into no table
Number = Annotated[int, Field(ge=1)]


class Frozen(BaseModel, frozen=True, extra="forbid"):
    """Data of a file or a message: immutable, without unknown fields."""


_MEMBER = re.compile(r"bool|int|float|str|none|constrained-\w+|.*\[.*\]")  # how pydantic names a member of a union


def first_mistake(error: ValidationError) -> str:
    """Return the first mistake with its place, as keys with dots between: `evidence.speedup: Field required`."""
    errors = error.errors(include_url=False, include_context=False)
    first, place = errors[0], errors[0]["loc"]
    found = short(first["input"])
    shown = isinstance(first["input"], str | int | float | None)  # a whole document says nothing
    problem = first["msg"].removeprefix("Value error, ")
    problem += f", found {found}" if shown and problem.startswith("Input should") else ""
    if place and _MEMBER.fullmatch(str(place[-1])):  # a union has an error for each of its members
        place = place[:-1]
        members = [other for other in errors if other["loc"][:-1] == place and _MEMBER.fullmatch(str(other["loc"][-1]))]
        *others, final = dict.fromkeys(member["msg"].removeprefix("Input should be ") for member in members)
        wanted = f"{', '.join(others)} or {final}" if others else final
        problem = f"expected {wanted}, found {found}"
    return f"{'.'.join(map(str, place)) or 'the file'}: {problem}"


KnobValue = bool | int | str
"""The value of a knob. `True` is never `1`."""
Value = StrictBool | StrictInt | StrictStr
"""The value of a knob in files and messages, where pydantic would otherwise turn one type into another."""
