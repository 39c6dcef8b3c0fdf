"""By what one knows that a card, or a kernel on it, failed under a trial; and what to do then."""

from __future__ import annotations

from autotune.devices.gpus import visible_gpus

_FAULTS = {  # the CUDA driver's names of errors (`cuda.h`), and its words for them
    ("cuda_error_ecc_uncorrectable", "uncorrectable ecc error"): (
        "The memory of {} has failed. Reset the card (nvidia-smi --gpu-reset), and replace it where that comes back."
    ),
    (
        *("cuda_error_illegal_address", "illegal memory access", "cuda_error_misaligned_address"),
        *("cuda_error_illegal_instruction", "cuda_error_launch_failed", "unspecified launch failure"),
        *("cuda_error_hardware_stack_error", "cuda_error_assert", "nvrm: xid"),
    ): (
        "A kernel of this configuration has failed on {}. dmesg names the Xid. Where other configurations fail alike, "
        "the card or its driver is at fault."
    ),
}


def card_fault(text: str) -> str:
    """The next step where a text says that a card or a kernel on it failed, with the card's name; else empty."""
    told = text.lower()
    for signs, step in _FAULTS.items():
        if any(sign in told for sign in signs):
            cards = [f"{each.name} ({each.uuid})" for each in visible_gpus()]
            return step.format(" or ".join(cards) or "the card")
    return ""
