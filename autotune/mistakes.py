"""The first mistake that pydantic finds in a damaged file or message."""

from __future__ import annotations

from pydantic import ValidationError


def first_mistake(error: ValidationError) -> tuple[str, str]:
    """Where it is, as keys with dots between (empty for the whole), and what it is."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return ".".join(str(part) for part in first["loc"]), first["msg"]
