"""What the data of all files and messages share: their base, their types, and the first mistake in damaged ones."""

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
    """Where pydantic finds it, as keys with dots between (empty for the whole), and what it is."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    *place, last = first["loc"] or ("",)
    found = short(first["input"])
    if not isinstance(last, str) or not _MEMBER.fullmatch(last):
        shown = isinstance(first["input"], str | int | float | None)  # a whole document says nothing
        what = first["msg"] + (f", found {found}" if shown and first["msg"].startswith("Input should") else "")
        return ".".join(str(part) for part in first["loc"]), what
    # A union has an error for each of its members.
    members = [each for each in errors if list(each["loc"][:-1]) == place and _MEMBER.fullmatch(str(each["loc"][-1]))]
    expected = [each["msg"].removeprefix("Input should be ") for each in members]
    *others, last_one = dict.fromkeys(expected)
    wanted = f"{', '.join(others)} or {last_one}" if others else last_one
    return ".".join(map(str, place)), f"expected {wanted}, found {found}"


KnobValue = bool | int | str
"""What a knob can be set to. `bool`, `int` and `str` are kept apart: `True` is never `1`."""


Value = StrictBool | StrictInt | StrictStr
"""The same in the models of files and messages, where pydantic would otherwise turn one into another."""
