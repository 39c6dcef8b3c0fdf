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


def first_mistake(error: ValidationError) -> tuple[str, str]:
    """Return the place of the first mistake, as keys with dots between (empty for the whole), and what it is."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    *place, last = first["loc"] or ("",)
    found = short(first["input"])
    if not isinstance(last, str) or not _MEMBER.fullmatch(last):
        shown = isinstance(first["input"], str | int | float | None)  # a whole document says nothing
        problem = first["msg"] + (f", found {found}" if shown and first["msg"].startswith("Input should") else "")
        return ".".join(map(str, first["loc"])), problem
    # A union has an error for each of its members.
    members = [
        other["msg"].removeprefix("Input should be ")
        for other in errors
        if list(other["loc"][:-1]) == place and _MEMBER.fullmatch(str(other["loc"][-1]))
    ]
    *others, final = dict.fromkeys(members)
    wanted = f"{', '.join(others)} or {final}" if others else final
    return ".".join(map(str, place)), f"expected {wanted}, found {found}"


KnobValue = bool | int | str
"""The value of a knob. `True` is never `1`."""
Value = StrictBool | StrictInt | StrictStr
"""The value of a knob in files and messages, where pydantic would otherwise turn one type into another."""
