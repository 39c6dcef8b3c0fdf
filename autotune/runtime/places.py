"""How a host is cut into seats: its cores in parts, or its GPUs one by one."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from autotune.data.errors import ArgumentError
from autotune.data.hardware import Machine
from autotune.data.record import Place
from autotune.machine.gpu import VisibleGpu, visible_gpus

WHOLE = "whole"  # the seat that has what all others share
CORES_VARIABLE = "AUTOTUNE_CORES"  # tells a template which cores its trials may use


def whole_host() -> Place:
    """The one seat of a host that is not cut."""
    return Place(seat="local", host=platform.node())


def cut_cores(count: int, cores: Sequence[int] | None = None) -> tuple[Place, ...]:
    """Seats with disjoint, equally many cores each.

    Args:
        count: How many seats.
        cores: The cores to share; those of this process when None. What is left over stays unused.

    Raises:
        ArgumentError: There are fewer cores than seats.
    """
    able = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
    each = len(able) // count
    if each == 0:
        raise ArgumentError(
            f"{count} seats were asked for, and {len(able)} cores may be used here", hint="Ask for fewer."
        )
    parts = [able[number * each : (number + 1) * each] for number in range(count)]
    return tuple(
        Place(
            seat=f"cpu{number}",
            host=platform.node(),
            device=in_words(part),
            cores=tuple(part) if count > 1 else (),
            of_cores=len(able) if count > 1 else 0,
        )
        for number, part in enumerate(parts)
    )


def in_words(cores: Sequence[int]) -> str:
    """`core 3`, `cores 0-3`, or `cores 0,2,5`."""
    if len(cores) == 1:
        return f"core {cores[0]}"
    together = list(cores) == list(range(cores[0], cores[-1] + 1))
    return f"cores {cores[0]}-{cores[-1]}" if together else f"cores {','.join(map(str, cores))}"


def of_devices(wanted: str, each: int, visible: Sequence[VisibleGpu] | None = None) -> tuple[Place, ...]:
    """Seats with so many GPUs each.

    Args:
        wanted: `all`, or indices and UUIDs among the GPUs that this process may use, separated by commas.
        each: GPUs of a seat.
        visible: What this process may use; asked of NVML when None.

    Raises:
        ArgumentError: A GPU does not exist or was named twice, they are unlike, or they do not make whole seats.
    """
    gpus = list(visible_gpus() if visible is None else visible)
    if not gpus:
        raise ArgumentError("--devices was given, and no GPU can be used here", hint="See what autotune doctor says.")
    chosen = gpus if wanted == "all" else [_named(entry.strip(), gpus) for entry in wanted.split(",")]
    if len({gpu.uuid for gpu in chosen}) < len(chosen):
        raise ArgumentError(f"--devices {wanted} names a GPU twice", hint="Name each once.")
    names = sorted({gpu.name for gpu in chosen})
    if len(names) > 1:
        raise ArgumentError(
            f"--devices {wanted} names unlike GPUs: {', '.join(names)}", hint="Tune for one kind of GPU at a time."
        )
    if len(chosen) % each:
        raise ArgumentError(
            f"{len(chosen)} GPUs do not make seats of {each} GPUs", hint="Name more or fewer in --devices."
        )
    return tuple(
        Place(
            seat=f"gpu{number}",
            host=platform.node(),
            device=" + ".join(f"{gpu.name} {gpu.uuid}" for gpu in part),
            devices=tuple(gpu.uuid for gpu in part),
        )
        for number, part in enumerate(chosen[start : start + each] for start in range(0, len(chosen), each))
    )


def machine_of(places: Sequence[Place] | None, machine: Machine) -> Machine:
    """The machine with the GPUs of one seat alone, where its GPUs make seats: a recipe speaks of a seat's."""
    devices = places[0].devices if places else ()
    if not devices:
        return machine
    gpus = zip(machine.gpus, visible_gpus(), strict=False)
    return machine.model_copy(update={"gpus": tuple(gpu for gpu, seen in gpus if seen.uuid in devices)})


def _named(entry: str, gpus: Sequence[VisibleGpu]) -> VisibleGpu:
    if entry.isdecimal() and int(entry) < len(gpus):
        return gpus[int(entry)]
    found = [gpu for gpu in gpus if gpu.uuid.startswith(entry) and entry.startswith(("GPU-", "MIG-"))]
    if len(found) != 1:
        there = ", ".join(f"{number} ({gpu.uuid})" for number, gpu in enumerate(gpus))
        raise ArgumentError(f"--devices: {entry!r} names no GPU that can be used here", hint=f"There are {there}.")
    return found[0]
