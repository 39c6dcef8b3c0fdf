"""Reads profiles by the package xprof, in a process of its own: folders come in, a line of JSON goes out for each.

python -m autotune.report.xprof_reader < FOLDERS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from autotune.data.figures import Operation, Profile
from autotune.stats.bottleneck import MATRIX_KERNELS, MATRIX_WORK, TENSOR_CORE_KERNELS

MOST_OPERATIONS = 10
TENSOR_CORES = "tensor cores"
"""What a kernel that runs on them is said to be."""
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
    steps, told = _table(planes, "input_pipeline_analyzer", 1)
    operations, _ = _table(planes, "framework_op_stats", 0)
    if steps is None or operations is None:
        return Profile(reason="xprof could not read the profile")
    kernels, bound = _of_gpu(planes) if told.get("hardware_type") == "GPU" else ([], None)
    window = json.loads((folder / "window.json").read_text(encoding="utf-8"))
    whole = [each for each in steps if each.get("stepTimeMs")]  # none where one call is several steps
    breakdown: dict[str, float] = {}
    for row in whole:
        for column, value in row.items():
            if column.endswith("TimeMs") and column != "stepTimeMs":
                name = _BREAKDOWN.get(column, "other")
                breakdown[name] = breakdown.get(name, 0.0) + (value or 0.0) / 1e3 / len(whole)
    own = [each for each in operations if each["type"] not in ("IDLE", INPUT) and each["total_self_time"]]
    shown = sum(each["total_self_time"] for each in own) / 1e6
    matrix = sum(each["total_self_time"] for each in own if any(word in each["type"] for word in MATRIX_WORK)) / 1e6
    total, count = shown, sum(each["occurrences"] for each in own)
    if kernels:  # the host's operations only launch them
        total, count = sum(each.self_seconds for each in kernels), sum(each.count for each in kernels)
        matrix = sum(each.self_seconds for each in kernels if _names(each.name, MATRIX_KERNELS))
    top = sorted(operations, key=lambda each: -each["total_self_time"])
    peak, holders = _memory(planes)
    return Profile(
        steps=window["steps"],
        step_seconds=window["seconds"] / window["steps"],
        breakdown=breakdown,
        operations=tuple(_operation(each, shown) for each in top if each["type"] != "IDLE")[:MOST_OPERATIONS],
        operation_seconds=total / window["steps"],
        usual_operation_seconds=total / count if count else None,
        matrix_share=matrix / total if total else None,
        kernels=tuple(sorted(kernels, key=lambda each: -each.self_seconds)[:MOST_OPERATIONS]),
        tensor_core_share=sum(each.share for each in kernels if each.kind == TENSOR_CORES) if kernels else None,
        memory_bound_share=bound,
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


def _of_gpu(planes: list[str]) -> tuple[list[Operation], float | None]:
    """A GPU's kernels, and the share of the operations' time that memory bandwidth limits, where that is known."""
    rows, _ = _table(planes, "kernel_stats", 0)
    total = sum(each["total_duration_us"] for each in rows or ()) / 1e6
    kernels = [
        Operation(
            name=str(each["kernel_name"])[:200],
            kind=TENSOR_CORES if _names(each["kernel_name"], TENSOR_CORE_KERNELS) else "kernel",
            on="device",
            count=int(each["occurrences"]),
            self_seconds=each["total_duration_us"] / 1e6,
            share=each["total_duration_us"] / 1e6 / total if total else 0.0,
        )
        for each in rows or ()
    ]
    lines, _ = _table(planes, "roofline_model", 0)
    seconds: dict[str, float] = {}
    for each in lines or ():
        if each["step"] == "Total" and each["category"] != "Program" and not each["include_infeed_outfeed"]:
            seconds[each["bound_by"]] = seconds.get(each["bound_by"], 0.0) + each["total_self_time"]
    unknown, compute = seconds.pop("Unknown", 0.0), seconds.get("Compute", 0.0)
    known = sum(seconds.values())
    return kernels, 1 - compute / known if known > unknown else None


def _names(kernel: str, words: tuple[str, ...]) -> bool:
    return any(word in kernel.lower() for word in words)


def _table(planes: list[str], tool: str, number: int) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """The rows of one of a tool's tables, by column, and what else it tells; None where the tool fails, silently."""
    found = _asked(planes, tool)
    if found is None:
        return None, {}
    chosen = found[number] if isinstance(found, list) else found
    names = [each["id"] for each in chosen["cols"]]
    rows = [dict(zip(names, [cell.get("v") for cell in row["c"]], strict=True)) for row in chosen["rows"]]
    return rows, chosen.get("p") or {}


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
    return json.loads(told) if told else None


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
