"""What the models of pydantic say of a damaged file or message: the first mistake, at a cost that is bounded."""

from __future__ import annotations

from pydantic import ValidationError

MOST_MISTAKES = 10_000
"""Above that many none is looked at: pydantic makes all of them ready at once, a million in ten seconds."""


def first_mistake(error: ValidationError) -> tuple[str, str]:
    """Where it is, as keys with dots between (empty for the whole), and what it is."""
    count = error.error_count()
    if count > MOST_MISTAKES:
        return "", f"{count} mistakes are in it"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return ".".join(str(part) for part in first["loc"]), first["msg"]
