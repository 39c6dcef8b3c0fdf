"""What need not be run, because something that needs less memory has run out of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, KnobValue


def known_to_fail(candidate: Configuration, out_of_memory: Iterable[Configuration]) -> bool:
    """Whether `candidate` surely needs as much memory as one of the configurations that ran out of it."""
    # Each knob ranks its values by the memory they need. A knob whose ranks are unknown must have the same
    # value.
    return any(
        all(_needs_as_much(name, candidate[name], failed[name]) for name in failed if name in candidate)
        for failed in out_of_memory
    )


def _needs_as_much(name: str, candidate: KnobValue, failed: KnobValue) -> bool:
    own, known = KNOBS[name].memory(candidate), KNOBS[name].memory(failed)
    if own is None or known is None:
        return type(candidate) is type(failed) and candidate == failed
    return own >= known
