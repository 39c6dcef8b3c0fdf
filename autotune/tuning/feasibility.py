"""What need not be run, because something that needs less memory has run out of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, KnobValue

_NEUTRAL = ("deterministic", "intra_op_threads", "inter_op_threads", "tensor_float_32")


def known_to_fail(candidate: Configuration, out_of_memory: Iterable[Configuration]) -> bool:
    """Whether `candidate` surely needs as much memory as one of the configurations that ran out of it.

    A larger batch, a deeper prefetch, more parallel calls and float32 need more. Threads and the order of
    examples do not touch memory. Of any other knob nothing is known, so it must be the same.
    """
    return any(
        all(_needs_as_much(name, candidate[name], failed[name]) for name in failed if name in candidate)
        for failed in out_of_memory
    )


def _needs_as_much(name: str, candidate: KnobValue, failed: KnobValue) -> bool:
    if name in _NEUTRAL or (type(candidate) is type(failed) and candidate == failed):
        return True
    if name == "precision":
        return candidate == "float32" or failed != "float32"
    if name == "data_threads" and 0 in (candidate, failed):
        return False  # 0 leaves the number to TensorFlow: neither more nor less than any other
    if type(candidate) is int and type(failed) is int:
        return KNOBS[name].hungrier_upwards and candidate > failed
    return False
