"""Tells the lines that TensorFlow's runtime writes into every log from those that say why a trial ended."""

from __future__ import annotations

import re

_RUNTIMES_OWN = re.compile(
    r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<old>[IWE]) "  # 2026-11-20 10:00:00.123456: I
    r"|(?P<new>[IWE])\d{4} \d\d:\d\d:\d+\.\d+ +\d+ )"  # I0000 00:00:1795211797.449557   30689
    r"\S+\.(?:cc|cpp|h):\d+\] "  # C++ sources only: what Python code logs by absl looks the same but for .py
)
# Errors that also stand in the logs of trainings that are well.
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


def without_runtime_noise(text: str) -> str:
    """`text` without the runtime's information lines, warnings and harmless errors; what speaks of memory stays."""
    kept: list[str] = []
    dropped = False
    for line in text.splitlines():
        dropped = _is_noise(line) or (dropped and line.lstrip().startswith("[[{{node "))
        if not dropped:
            kept.append(line)
    return "\n".join(kept)


def _is_noise(line: str) -> bool:
    found = _RUNTIMES_OWN.match(line)
    if found is None or "Check failed" in line or "memory" in line:
        return _BARE.match(line) is not None
    return "E" not in (found["old"], found["new"]) or _HARMLESS.search(line) is not None
