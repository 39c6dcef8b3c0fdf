"""Reads profiles by the package xprof, in a process of its own: folders come in, a line of JSON goes out for each.

python -m autotune.report.xprof_reader < FOLDERS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from autotune.stats.bottleneck import MATRIX_WORK, Operation, Profile

MOST_OPERATIONS = 10
INPUT = "Dataset"
"""What XProf calls the operations of `tf.data`."""
_BREAKDOWN = {
    "infeedTimeMs": "input",
    "deviceComputeTimeMs": "compute",
    "hostComputeTimeMs": "compute",
    "kernelLaunchTimeMs": "launch",
    "deviceToDeviceTimeMs": "communication",
    "deviceCollectivesTimeMs": "communication",
}
"""XProf's columns of a step, and the words for them here; all others are `other`."""


def read(folder: Path) -> Profile:
    """The profile in a folder; one with a reason where it cannot be read."""
    planes = [str(each) for each in folder.rglob("*.xplane.pb")]
    if not planes:
        return Profile(reason="the profiler has written nothing")
    steps = _rows(planes, "input_pipeline_analyzer", table=1)
    operations = _rows(planes, "framework_op_stats", table=0)
    if steps is None or operations is None:
        return Profile(reason="xprof could not read the profile")
    window = json.loads((folder / "window.json").read_text(encoding="utf-8"))
    whole = [each for each in steps if each.get("stepTimeMs")]  # none where one call is several steps
    breakdown: dict[str, float] = {}
    for row in whole:
        for column, value in row.items():
            if column.endswith("TimeMs") and column != "stepTimeMs":
                name = _BREAKDOWN.get(column, "other")
                breakdown[name] = breakdown.get(name, 0.0) + (value or 0.0) / 1e3 / len(whole)
    own = [each for each in operations if each["type"] not in ("IDLE", INPUT) and each["total_self_time"]]
    total = sum(each["total_self_time"] for each in own) / 1e6
    count = sum(each["occurrences"] for each in own)
    matrix = sum(each["total_self_time"] for each in own if any(word in each["type"] for word in MATRIX_WORK)) / 1e6
    top = sorted(operations, key=lambda each: -each["total_self_time"])
    peak, holders = _memory(planes)
    return Profile(
        steps=window["steps"],
        step_seconds=window["seconds"] / window["steps"],
        breakdown=breakdown,
        operations=tuple(_operation(each, total) for each in top if each["type"] != "IDLE")[:MOST_OPERATIONS],
        operation_seconds=total / window["steps"],
        usual_operation_seconds=total / count if count else None,
        matrix_share=matrix / total if total else None,
        peak_bytes=peak,
        held_by=holders,
    )


def _operation(row: dict[str, Any], total: float) -> Operation:
    seconds = row["total_self_time"] / 1e6
    return Operation(
        name=str(row["operation"])[:200],
        kind=str(row["type"]),
        on=str(row["host_or_device"]).lower(),
        count=int(row["occurrences"]),
        self_seconds=seconds,
        share=seconds / total if total else 0.0,
    )


def _rows(planes: list[str], tool: str, *, table: int) -> list[dict[str, Any]] | None:
    """The rows of one of a tool's tables, by column; None where the tool fails, which it does without a word."""
    found = _asked(planes, tool)
    if found is None:
        return None
    chosen = found[table] if isinstance(found, list) else found
    names = [each["id"] for each in chosen["cols"]]
    return [dict(zip(names, [cell.get("v") for cell in row["c"]], strict=True)) for row in chosen["rows"]]


def _memory(planes: list[str]) -> tuple[int | None, tuple[str, ...]]:
    """The peak of all allocators, and what held most of it."""
    found = _asked(planes, "memory_profile") or {}
    peaks = found.get("memoryProfilePerAllocator", {}).values()
    most = max((int(each["profileSummary"]["peakStats"]["peakBytesInUse"]) for each in peaks), default=None)
    held = [
        str(each.get("metadata", {}).get("tfOpName", ""))
        for peak in peaks
        for each in peak.get("activeAllocations", ())
    ]
    return most, tuple(name for name in held if name)[:5]


def _asked(planes: list[str], tool: str) -> Any:
    from xprof.convert import raw_to_tool_data

    told, _ = raw_to_tool_data.xspace_to_tool_data(planes, tool, {"use_saved_result": False})
    return None if told is None else json.loads(told)


def main() -> None:
    """Read each folder."""
    for folder in json.load(sys.stdin):
        try:
            profile = read(Path(folder))
        except Exception as error:  # a file that is damaged, or another version's
            profile = Profile(reason=f"xprof could not read it: {type(error).__name__}: {error}"[:300])
        sys.stdout.write(profile.model_dump_json() + "\n")


if __name__ == "__main__":
    main()
