"""Logs of templates and trials: cap their size while they grow, read their ends, recognise errors in them.

A process appends to its log, and the driver cuts it. A limit of the kernel's would apply to the user's files as well.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from autotune.data.printable import printable
from autotune.machine.gpu import visible_gpus

LARGEST_LOG_BYTES = 16 << 20
HEAD_BYTES, END_BYTES = 1 << 20, 1 << 16
TAIL_LENGTH = 4000

_FATAL = re.compile(r"Check failed|^(?:F\d{4} |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: F )|^terminate called|^  what\(\)")
# Lines that the runtime writes into every log. They do not say why a trial ended.
_RUNTIME_LINE = re.compile(
    r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<old>[IWE]) "  # 2026-11-20 10:00:00.123456: I
    r"|(?P<new>[IWE])\d{4} \d\d:\d\d:\d+\.\d+ +\d+ )"  # I0000 00:00:1795211797.449557   30689
    r"\S+\.(?:cc|cpp|h):\d+\] "  # C++ sources only: what Python code logs by absl looks the same but for .py
)
# Errors that also appear in the logs of healthy trainings.
_HARMLESS = re.compile(
    r"failed call to cuInit|Could not find cuda drivers|kernel driver does not appear to be running"
    r"|Unable to register cu\w+ (?:factory|plugin)|Delay kernel timed out"
)
# Second lines of such messages, which have no prefix; what Python loaded, below the stack of a signal.
_BARE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags\.$"
    r"|Skipping registering GPU devices\.\.\.$"
    r"|Extension modules: \w[\w.]*, .* \(total: \d+\)$"
)
# A state of a progress bar: Keras's ` 3/20 ━━━…` or ` 3/20 [==>…]`, and tqdm's ` 15%|█▌ …`.
_BAR = re.compile(r"\s*(?:\d+/(?:\d+|Unknown) +(?:[━╸]|\[[=>.]|\d+s )|(?:.*: )? *\d+%\|)")


def open_log(path: str | Path) -> int:
    """Open a log to append to, and return its descriptor. Only its owner may read what a script prints."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def cap_log(log: Path) -> None:
    """Cut the middle out of a log that has grown too large. Lines written meanwhile may be lost."""
    with contextlib.suppress(OSError):
        size = os.stat(log).st_size
        if size > LARGEST_LOG_BYTES:
            end = _read_end(log)
            os.truncate(log, HEAD_BYTES)
            with log.open("ab") as stream:
                stream.write(f"\n[autotune: cut out here; the log had grown to {size} bytes]\n".encode() + end)


def read_tail(log: Path) -> str:
    """Return the last lines of a log without the runtime's noise and unprintable bytes; empty where nothing is left."""
    return _end_text(log)[-TAIL_LENGTH:]


def find_fatal_line(log: Path) -> str:
    """Return the last line in which the runtime says why it aborts; empty where there is none."""
    return next((line for line in reversed(_end_text(log).splitlines()) if _FATAL.search(line)), "")


def _read_end(log: Path) -> bytes:
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - END_BYTES))
        return stream.read(END_BYTES)
    return b""


def _end_text(log: Path) -> str:
    end = _read_end(log)
    text = end.decode("utf-8", "replace")
    if len(end) == END_BYTES:  # the first line is cut, so it cannot be recognised as noise
        text = text.partition("\n")[2] or text
    return remove_runtime_noise(printable(text)).strip()


def remove_runtime_noise(text: str) -> str:
    """Drop the runtime's information lines, warnings and harmless errors, and all but the last state of progress bars.

    Lines that mention memory are kept.
    """
    remaining: list[str] = []
    dropped = False
    for line in text.splitlines():
        dropped = _is_noise(line) or (dropped and line.lstrip().startswith("[[{{node "))
        if not dropped:
            while _BAR.match(line) and remaining and (not remaining[-1].strip() or _BAR.match(remaining[-1])):
                remaining.pop()
            remaining.append(line)
    return "\n".join(remaining)


def _is_noise(line: str) -> bool:
    found = _RUNTIME_LINE.match(line)
    if found is None or "Check failed" in line or "memory" in line:
        return _BARE.match(line) is not None
    return "E" not in (found["old"], found["new"]) or _HARMLESS.search(line) is not None


# --------------------------------------------------------------------------------- what the text of an error says

# Phrases of CUDA's libraries when a GPU is full, and of Python, C++ and the kernel inside an error of TensorFlow's.
_MEMORY_PHRASES = (
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "failed to create cublas handle",
    "could not create cudnn handle",
    "dst tensor is not initialized",  # a copy to the GPU found no room
    "blas operation using streamexecutor without blas support",  # the handle's failure is in the log only
    "dnn library initialization failed",
    "device_allocation_failed",
    "host_allocation_failed",
    "memoryerror",
    "std::bad_alloc",
    "cannot allocate memory",
    "failed to map segment from shared object",  # a library under `ulimit -v`
)
_TLS_PHRASE = "cannot allocate memory in static tls block"  # the loader's: a matter of import order, not of memory
# CUDA's, where the GPU's compute mode admits one process: it has no room for a second.
_BUSY_PHRASES = (
    "cuda-capable device(s) is/are busy or unavailable",
    "all cuda-capable devices are busy or unavailable",
    "cuda_error_device_unavailable",
)

_GPU_FAULTS = {  # the CUDA driver's names of errors (`cuda.h`) and its words for them, and the next step
    ("cuda_error_ecc_uncorrectable", "uncorrectable ecc error"): (
        "The memory of {} has failed. Reset the GPU (nvidia-smi --gpu-reset), and replace it if the error returns."
    ),
    (
        *("cuda_error_illegal_address", "illegal memory access", "cuda_error_misaligned_address"),
        *("cuda_error_illegal_instruction", "cuda_error_launch_failed", "unspecified launch failure"),
        *("cuda_error_hardware_stack_error", "cuda_error_assert", "nvrm: xid"),
    ): (
        "A kernel of this configuration failed on {}. dmesg names the Xid. If other configurations fail in the same "
        "way, the GPU or its driver is at fault."
    ),
}


def is_memory_error(text: str) -> bool:
    """Return whether a text says that host or GPU memory ran out, or that another process has the GPU."""
    lowered = text.lower().replace(_TLS_PHRASE, "")
    return is_busy_gpu_error(text) or any(phrase in lowered for phrase in _MEMORY_PHRASES)


def is_busy_gpu_error(text: str) -> bool:
    """Return whether a text says that another process has the GPU to itself."""
    return any(phrase in text.lower() for phrase in _BUSY_PHRASES)


def gpu_fault_hint(text: str) -> str:
    """Return the next step, with the GPU's name, where a text says that a GPU or a kernel on it failed; else empty."""
    lowered = text.lower()
    for phrases, hint in _GPU_FAULTS.items():
        if any(phrase in lowered for phrase in phrases):
            gpus = [f"{gpu.name} ({gpu.uuid})" for gpu in visible_gpus()]
            return hint.format(" or ".join(gpus) or "the GPU")
    return ""


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since it started; 0 if it does not tell."""
    with contextlib.suppress(OSError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
