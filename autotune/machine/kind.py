"""The kind of a machine decides which recipe of a folder fits it; of the others, one is the nearest. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autotune.data.facts import Machine, gpu_names, has_cards_of
from autotune.data.printable import LONGEST_MESSAGE, one_line


class Kind(NamedTuple):
    """The device model and count, TensorFlow's minor version, and Keras's major version."""

    device: str  # `2 × NVIDIA H200`; of a machine without a GPU `Intel Xeon × 8 cores`
    tensorflow: str  # `2.21`
    keras: str  # `3`

    def __str__(self) -> str:
        """Return `2 × NVIDIA H200, TensorFlow 2.21, Keras 3`."""
        return f"{self.device}, TensorFlow {self.tensorflow}, Keras {self.keras}"


def kind_of(machine: Machine) -> Kind:
    """Return the kind of a machine."""
    device = gpu_names(machine.gpus) or machine.describe()
    return Kind(device, _version(machine, "tensorflow", parts=2), _version(machine, "keras", parts=1))


def kind_differences(measured: Machine, here: Machine) -> tuple[str, ...]:
    """Return what makes two machines unlike kinds, such as `TensorFlow: measured on 2.18, here 2.21`.

    A recipe that was measured on a part of the cards here is of this kind.
    """
    there, now = kind_of(measured), kind_of(here)
    if measured.gpus and has_cards_of(measured, here):
        there = there._replace(device=now.device)
    labels = ("device", "TensorFlow", "Keras")
    return tuple(
        f"{label}: measured on {before}, here {after}"
        for label, before, after in zip(labels, there, now, strict=True)
        if before != after
    )


def describe_changes(changes: Iterable[str], command: str) -> str:
    """Say what has changed since a recipe was measured, and the command that measures its claim again."""
    text = f"changed since the recipe was measured: {'; '.join(changes)}. To measure its claim again: {command}"
    return one_line(text, longest=LONGEST_MESSAGE)


def find_nearest(measured: Sequence[Machine], here: Machine) -> list[int]:
    """Return the positions of the machines, the nearest first.

    One of this kind comes first. Of others the kind of device counts most, then its model, its count, and all else.
    """
    return sorted(range(len(measured)), key=lambda index: _distance(measured[index], here))


def _distance(measured: Machine, here: Machine) -> tuple[float, ...]:
    models = [{gpu.name for gpu in machine.gpus} or {machine.cpu} for machine in (measured, here)]
    counts = [len(machine.gpus) or machine.cores for machine in (measured, here)]
    return (
        bool(kind_differences(measured, here)),
        bool(measured.gpus) != bool(here.gpus),
        models[0] != models[1],
        abs(math.log(counts[0] / counts[1])),
        len(measured.differences(here)),
    )


def _version(machine: Machine, package: str, *, parts: int) -> str:
    return ".".join(machine.packages.get(package, "none").split(".")[:parts])
