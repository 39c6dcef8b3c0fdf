"""The hardware units that compute in low precision: of a processor by its flags, of a GPU by its compute capability."""

from __future__ import annotations

from collections.abc import Collection

PROCESSOR_UNITS = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16")
"""Flags of the kernel, the fastest units first."""
GPU_UNITS = {"tensor_fp16": 7.0, "tensor_bf16": 8.0, "tensor_fp8": 8.9}
"""Units of NVIDIA's tensor cores, and the lowest compute capability that has them: Volta, Ampere, Ada and Hopper."""


def units_of_processor(flags: Collection[str]) -> tuple[str, ...]:
    """Return the units of a processor with these flags."""
    return tuple(unit for unit in PROCESSOR_UNITS if unit in flags)


def units_of_gpu(capability: str | None) -> tuple[str, ...]:
    """Return the units of a GPU of this compute capability, such as `8.0`; none where it is not known."""
    return tuple(unit for unit, least in GPU_UNITS.items() if float(capability or 0) >= least)


def units_for(units: Collection[str], *, on_gpu: bool) -> frozenset[str]:
    """Return those of a machine's units that a training on its processor, or on its GPUs, computes on."""
    return frozenset(unit for unit in units if (unit in GPU_UNITS) is on_gpu)
