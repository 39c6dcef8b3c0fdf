"""Have glibc keep the memory that a training frees: what goes back to the kernel returns in page faults."""

from __future__ import annotations

import ctypes
from typing import Any

from autotune.data.errors import ApplyError

_THRESHOLDS = ((-3, 1 << 30), (-1, (1 << 31) - 1))  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3)
MALLOPT = {"none": (), "thresholds": _THRESHOLDS, "one_arena": (*_THRESHOLDS, (-8, 1))}  # M_ARENA_MAX
"""The arguments of mallopt for each value of the knob. Only the main arena holds more than 64 MiB in one piece."""
WHY_NOT = "" if hasattr(ctypes.CDLL(None), "gnu_get_libc_version") else "the C library is not glibc"
in_force = "none"  # in this process; mallopt cannot be asked


def keep(tf: Any, value: str) -> None:
    """Set the knob in this process, for good. Raises ApplyError where it cannot act."""
    global in_force
    refused = [call for call in MALLOPT[value] if WHY_NOT or not ctypes.CDLL(None).mallopt(*call)]
    if refused or in_force != "none":
        why = WHY_NOT or (f"mallopt{refused[0]} fails" if refused else f"this process has {in_force} for good")
        raise ApplyError(f"keep_freed_memory={value} cannot act: {why}", hint="Tune again on this machine.")
    in_force = value
