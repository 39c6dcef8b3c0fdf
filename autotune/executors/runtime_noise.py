"""TensorFlow's runtime writes lines into every log that say nothing about why a trial ended.

This module tells those lines from the rest. It is about what is shown: the log files stay whole.
"""

from __future__ import annotations

import re

_RUNTIMES_OWN = re.compile(
    r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<old>[IWE]) "  # 2026-11-20 10:00:00.123456: I
    r"|(?P<new>[IWE])\d{4} \d\d:\d\d:\d+\.\d+ +\d+ )"  # I0000 00:00:1795211797.449557   30689
    r"\S+\.(?:cc|cpp|h):\d+\] "  # C++ sources only: what Python code logs by absl looks the same but for .py
)
_HARMLESS = re.compile(
    r"All log messages before absl::InitializeLog"
    r"|failed call to cuInit"
    r"|Could not find cuda drivers"
    r"|kernel driver does not appear to be running"
    r"|Unable to register cu\w+ (?:factory|plugin)"
    r"|computation placer already registered"
    r"|Cannot dlopen some GPU libraries"
    r"|TF-TRT Warning"
    r"|successful NUMA node read"
    r"|oneDNN custom operations are on"
    r"|Local rendezvous is aborting with status: OUT_OF_RANGE: End of sequence"
    r"|The calling iterator did not fully read the dataset being cached"
    r"|Delay kernel timed out"
)
"""Warnings and errors that also stand in the logs of trainings that are well."""
_BARE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags\.$"
    r"|Skipping registering GPU devices\.\.\.$"
    r"|Extension modules: \w[\w.]*, .* \(total: \d+\)$"
)
"""Second lines of such messages, which have no prefix; what Python loaded, below the stack of a signal."""
_NODE = re.compile(r"\s*\[\[\{\{node ")


def without_runtime_noise(text: str) -> str:
    """`text` without the runtime's information lines and its harmless warnings.

    Kept are fatal lines, failed checks, warnings and errors not known to be harmless (`ran out of memory`), and
    whatever the user's code and Python wrote.
    """
    kept: list[str] = []
    dropped = False
    for line in text.splitlines():
        dropped = _is_noise(line) or (dropped and _NODE.match(line) is not None)
        if not dropped:
            kept.append(line)
    return "\n".join(kept)


def _is_noise(line: str) -> bool:
    if _BARE.match(line):
        return True
    found = _RUNTIMES_OWN.match(line)
    if found is None or "Check failed" in line:
        return False
    return "I" in (found["old"], found["new"]) or _HARMLESS.search(line) is not None
