"""By what one knows that memory ran out or a card failed: words in errors and logs, and the kernel's count of kills."""

from __future__ import annotations

import contextlib

from autotune.machine.gpu import visible_gpus

# Of CUDA's libraries, when a card is full, and of Python, C++ and the kernel, within an error of TensorFlow's.
_FULL = (
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "failed to create cublas handle",
    "could not create cudnn handle",
    "dst tensor is not initialized",  # a copy to the card found no room
    "blas operation using streamexecutor without blas support",  # the handle's failure is in the log only
    "dnn library initialization failed",
    "device_allocation_failed",
    "host_allocation_failed",
    "memoryerror",
    "std::bad_alloc",
    "cannot allocate memory",
    "failed to map segment from shared object",  # of a library, below `ulimit -v`
)
_NO_ROOM_FOR_THREADS = "cannot allocate memory in static tls block"  # of the loader: a matter of import order
# Of CUDA, where a card's compute mode lets one process have it: then it has no room for a second.
_TAKEN = (
    "cuda-capable device(s) is/are busy or unavailable",
    "all cuda-capable devices are busy or unavailable",
    "cuda_error_device_unavailable",
)

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


def says_no_memory(text: str) -> bool:
    """Whether a text says that memory ran out, on the host or on a card, or that another process has the card."""
    told = text.lower().replace(_NO_ROOM_FOR_THREADS, "")
    return says_taken(text) or any(sign in told for sign in _FULL)


def says_taken(text: str) -> bool:
    """Whether a text says that another process has the card for itself."""
    return any(sign in text.lower() for sign in _TAKEN)


def kernel_oom_kills() -> int:
    """How often the kernel has killed for want of memory since it started; 0 where it does not say."""
    with contextlib.suppress(OSError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def card_fault(text: str) -> str:
    """The next step where a text says that a card or a kernel on it failed, with the card's name; else empty."""
    told = text.lower()
    for signs, step in _FAULTS.items():
        if any(sign in told for sign in signs):
            cards = [f"{each.name} ({each.uuid})" for each in visible_gpus()]
            return step.format(" or ".join(cards) or "the card")
    return ""
