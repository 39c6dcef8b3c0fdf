"""What need not be run, because something that needs less memory has run out of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, KnobValue

_MEMORY_NEUTRAL = ("deterministic", "intra_op_threads", "inter_op_threads", "tensor_float_32")
_TENSORFLOWS_OWN = {"data_threads": 0}
"""Values that leave a number to TensorFlow: neither more nor less than any other."""
_PRECISION_HUNGER = {"mixed_bfloat16": 0, "mixed_float16": 0, "float32": 1}


def needs_at_least(candidate: Configuration, failed: Configuration) -> bool:
    """Whether `candidate` surely needs as much memory as `failed`, which ran out.

    A larger batch, a deeper prefetch, more parallel calls and float32 need more. Threads and the order of
    examples do not touch memory. Of any other knob nothing is known, so it must be the same.
    """
    return all(_as_hungry(name, candidate[name], failed[name]) for name in failed if name in candidate)


def _as_hungry(name: str, candidate: KnobValue, failed: KnobValue) -> bool:
    if name == "precision":
        return _PRECISION_HUNGER[str(candidate)] >= _PRECISION_HUNGER[str(failed)]
    if name in _MEMORY_NEUTRAL:
        return True
    if _TENSORFLOWS_OWN.get(name) in (candidate, failed):
        return candidate == failed
    if KNOBS[name].hungrier_upwards and type(candidate) is int and type(failed) is int:
        return candidate >= failed
    return type(candidate) is type(failed) and candidate == failed


def known_to_fail(candidate: Configuration, out_of_memory: Iterable[Configuration]) -> bool:
    """Whether any of the configurations that ran out of memory says that `candidate` would, too."""
    return any(needs_at_least(candidate, failed) for failed in out_of_memory)
