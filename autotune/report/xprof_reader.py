"""Read profiles by the package xprof, in a separate process: folders come in, a line of JSON for each goes out.

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
TENSOR_CORES = "tensor cores"  # the kind of a kernel that runs on them
INPUT = "Dataset"  # XProf's type of the operations of `tf.data`
_BREAKDOWN = {  # XProf's columns of a step, and the words for them here; all others are `other`
    "infeedTimeMs": "input",
    "deviceComputeTimeMs": "compute",
    "hostComputeTimeMs": "compute",
    "kernelLaunchTimeMs": "launch",
    "deviceToDeviceTimeMs": "communication",
    "deviceCollectivesTimeMs": "communication",
}


def read(folder: Path) -> Profile:
    """Read the profile in a folder; return one with a reason if that fails."""
    planes = [str(path) for path in folder.rglob("*.xplane.pb")]
    if not planes:
        return Profile(reason="the profiler has written nothing")
    steps, properties = _table(planes, "input_pipeline_analyzer", 1)
    operations, _ = _table(planes, "framework_op_stats", 0)
    if steps is None or operations is None:
        return Profile(reason="xprof could not read the profile")
    kernels, bound = _of_gpu(planes) if properties.get("hardware_type") == "GPU" else ([], None)
    window = json.loads((folder / "window.json").read_text(encoding="utf-8"))
    whole = [row for row in steps if row.get("stepTimeMs")]  # none where one call is several steps
    breakdown: dict[str, float] = {}
    for row in whole:
        for column, value in row.items():
            if column.endswith("TimeMs") and column != "stepTimeMs":
                name = _BREAKDOWN.get(column, "other")
                breakdown[name] = breakdown.get(name, 0.0) + (value or 0.0) / 1e3 / len(whole)
    own = [row for row in operations if row["type"] not in ("IDLE", INPUT) and row["total_self_time"]]
    shown = sum(row["total_self_time"] for row in own) / 1e6
    matrix = sum(row["total_self_time"] for row in own if any(word in row["type"] for word in MATRIX_WORK)) / 1e6
    total, count = shown, sum(row["occurrences"] for row in own)
    if kernels:  # the host's operations only launch them
        total, count = sum(kernel.self_seconds for kernel in kernels), sum(kernel.count for kernel in kernels)
        matrix = sum(kernel.self_seconds for kernel in kernels if _names(kernel.name, MATRIX_KERNELS))
    top = sorted(operations, key=lambda row: -row["total_self_time"])
    return Profile(
        steps=window["steps"],
        step_seconds=window["seconds"] / window["steps"],
        breakdown=breakdown,
        operations=tuple(_operation(row, shown) for row in top if row["type"] != "IDLE")[:MOST_OPERATIONS],
        operation_seconds=total / window["steps"],
        usual_operation_seconds=total / count if count else None,
        matrix_share=matrix / total if total else None,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.self_seconds)[:MOST_OPERATIONS]),
        tensor_core_share=sum(kernel.share for kernel in kernels if kernel.kind == TENSOR_CORES) if kernels else None,
        memory_bound_share=bound,
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
    """Return a GPU's kernels, and the share of the operations' time that memory bandwidth limits, if known."""
    rows, _ = _table(planes, "kernel_stats", 0)
    total = sum(row["total_duration_us"] for row in rows or ()) / 1e6
    kernels = [
        Operation(
            name=str(row["kernel_name"])[:200],
            kind=TENSOR_CORES if _names(row["kernel_name"], TENSOR_CORE_KERNELS) else "kernel",
            on="device",
            count=int(row["occurrences"]),
            self_seconds=row["total_duration_us"] / 1e6,
            share=row["total_duration_us"] / 1e6 / total if total else 0.0,
        )
        for row in rows or ()
    ]
    lines, _ = _table(planes, "roofline_model", 0)
    seconds: dict[str, float] = {}
    for row in lines or ():
        if row["step"] == "Total" and row["category"] != "Program" and not row["include_infeed_outfeed"]:
            seconds[row["bound_by"]] = seconds.get(row["bound_by"], 0.0) + row["total_self_time"]
    unknown, compute = seconds.pop("Unknown", 0.0), seconds.get("Compute", 0.0)
    known = sum(seconds.values())
    return kernels, 1 - compute / known if known > unknown else None


def _names(kernel: str, words: tuple[str, ...]) -> bool:
    return any(word in kernel.lower() for word in words)


def _table(planes: list[str], tool: str, number: int) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """Return the rows of one of a tool's tables, by column, and its properties; no rows if the tool fails."""
    found = _asked(planes, tool)
    if found is None:
        return None, {}
    chosen = found[number] if isinstance(found, list) else found
    names = [column["id"] for column in chosen["cols"]]
    rows = [dict(zip(names, [cell.get("v") for cell in row["c"]], strict=True)) for row in chosen["rows"]]
    return rows, chosen.get("p") or {}


def _asked(planes: list[str], tool: str) -> Any:
    from xprof.convert import raw_to_tool_data

    text, _ = raw_to_tool_data.xspace_to_tool_data(planes, tool, {"use_saved_result": False})
    return json.loads(text) if text else None


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
