"""Group a host's GPUs into seats, and restrict a machine's description to one seat."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from autotune.data.errors import ArgumentError
from autotune.data.facts import Machine
from autotune.data.record import Place
from autotune.machine.gpu import VisibleGpu, visible_gpus


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


def restrict_to_seat(machine: Machine, places: Sequence[Place]) -> Machine:
    """Return the machine with the GPUs of one seat only, where its GPUs make seats: a recipe describes one seat."""
    devices = places[0].devices if places else ()
    if not devices:
        return machine
    gpus = zip(machine.gpus, visible_gpus(), strict=False)
    return machine.model_copy(update={"gpus": tuple(gpu for gpu, seen in gpus if seen.uuid in devices)})
