"""Cut a host into seats: its cores in parts, or its GPUs one by one; and fit configurations and machine to a seat."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from autotune.data.errors import ArgumentError
from autotune.data.facts import Machine
from autotune.data.record import Place
from autotune.machine.gpu import VisibleGpu, visible_gpus
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS

WHOLE = "whole"  # the seat that has what all others share
CORES_VARIABLE = "AUTOTUNE_CORES"  # tells a template which cores its trials may use


def whole_host() -> Place:
    """Return the one seat of a host that is not cut."""
    return Place(seat="local", host=platform.node())


def whole_of(part: Place) -> Place:
    """Return the seat that has all cores of the host of which `part` has some."""
    return Place(seat=WHOLE, host=part.host, device=f"all {part.of_cores} cores")


def cut_cores(count: int, cores: Sequence[int] | None = None) -> tuple[Place, ...]:
    """Return so many seats, with disjoint and equally many cores of this process. What is left over stays unused.

    Raises `ArgumentError` where there are fewer cores than seats.
    """
    usable = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
    size = len(usable) // count
    if size == 0:
        raise ArgumentError(
            f"{count} seats were asked for, and {len(usable)} cores may be used here", hint="Ask for fewer."
        )
    parts = [usable[number * size : (number + 1) * size] for number in range(count)]
    return tuple(
        Place(
            seat=f"cpu{number}",
            host=platform.node(),
            device=_describe_cores(part),
            cores=tuple(part) if count > 1 else (),
            of_cores=len(usable) if count > 1 else 0,
        )
        for number, part in enumerate(parts)
    )


def _describe_cores(cores: Sequence[int]) -> str:
    """Return `core 3`, `cores 0-3`, or `cores 0,2,5`."""
    if len(cores) == 1:
        return f"core {cores[0]}"
    contiguous = list(cores) == list(range(cores[0], cores[-1] + 1))
    return f"cores {cores[0]}-{cores[-1]}" if contiguous else f"cores {','.join(map(str, cores))}"


def group_gpus(wanted: str, size: int, visible: Sequence[VisibleGpu] | None = None) -> tuple[Place, ...]:
    """Return seats with `size` GPUs each: of `all` that are visible, or of indices and UUIDs between commas.

    Raises `ArgumentError` for a GPU that does not exist or was named twice, and for unlike or too few GPUs.
    """
    gpus = list(visible_gpus() if visible is None else visible)
    if not gpus:
        raise ArgumentError("--devices was given, and no GPU can be used here", hint="See what autotune doctor says.")
    chosen = gpus if wanted == "all" else [_find_gpu(entry.strip(), gpus) for entry in wanted.split(",")]
    if len({gpu.uuid for gpu in chosen}) < len(chosen):
        raise ArgumentError(f"--devices {wanted} names a GPU twice", hint="Name each once.")
    names = sorted({gpu.name for gpu in chosen})
    if len(names) > 1:
        raise ArgumentError(
            f"--devices {wanted} names unlike GPUs: {', '.join(names)}", hint="Tune for one kind of GPU at a time."
        )
    if len(chosen) % size:
        raise ArgumentError(
            f"{len(chosen)} GPUs do not make seats of {size} GPUs", hint="Name more or fewer in --devices."
        )
    return tuple(
        Place(
            seat=f"gpu{number}",
            host=platform.node(),
            device=" + ".join(f"{gpu.name} {gpu.uuid}" for gpu in part),
            devices=tuple(gpu.uuid for gpu in part),
        )
        for number, part in enumerate(chosen[start : start + size] for start in range(0, len(chosen), size))
    )


def _find_gpu(entry: str, gpus: Sequence[VisibleGpu]) -> VisibleGpu:
    if entry.isdecimal() and int(entry) < len(gpus):
        return gpus[int(entry)]
    found = [gpu for gpu in gpus if gpu.uuid.startswith(entry) and entry.startswith(("GPU-", "MIG-"))]
    if len(found) != 1:
        choices = ", ".join(f"{number} ({gpu.uuid})" for number, gpu in enumerate(gpus))
        raise ArgumentError(f"--devices: {entry!r} names no GPU that can be used here", hint=f"There are {choices}.")
    return found[0]


def restrict_to_seat(machine: Machine, places: Sequence[Place] | None) -> Machine:
    """Return the machine with the GPUs of one seat only, where its GPUs make seats: a recipe describes one seat."""
    devices = places[0].devices if places else ()
    if not devices:
        return machine
    gpus = zip(machine.gpus, visible_gpus(), strict=False)
    return machine.model_copy(update={"gpus": tuple(gpu for gpu, seen in gpus if seen.uuid in devices)})


def scale_threads(configuration: Configuration, place: Place) -> Configuration:
    """Scale the thread counts of a configuration for the whole host to a seat with a part of its cores."""
    if not place.of_cores:
        return configuration
    share = len(place.cores) / place.of_cores
    threads = {
        name: max(1, round(value * share))
        for name, value in configuration.items()
        if KNOBS[name].per_core and type(value) is int and value > 0
    }
    return configuration.replace(**threads)


def place_variables(place: Place) -> dict[str, str]:
    """Return the variables that bind a template to the devices of a seat."""
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(place.devices)} if place.devices else {}
    if place.cores:
        variables[CORES_VARIABLE] = ",".join(map(str, place.cores))
    return variables
