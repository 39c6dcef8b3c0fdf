"""GPUs of a host as seats, and the machine of one seat."""

import pytest
from simulated_runs import MACHINE

from autotune.data.errors import ArgumentError
from autotune.data.facts import Gpu
from autotune.machine.gpu import VisibleGpu
from autotune.runtime import local
from autotune.runtime.local import group_gpus, restrict_to_seat

H100 = [VisibleGpu(f"GPU-{number}-aaaa", "NVIDIA H100") for number in range(4)]


@pytest.mark.parametrize(
    ("wanted", "each", "devices"),
    [
        ("all", 1, [("GPU-0-aaaa",), ("GPU-1-aaaa",), ("GPU-2-aaaa",), ("GPU-3-aaaa",)]),
        ("all", 2, [("GPU-0-aaaa", "GPU-1-aaaa"), ("GPU-2-aaaa", "GPU-3-aaaa")]),
        ("3, 1", 1, [("GPU-3-aaaa",), ("GPU-1-aaaa",)]),
        ("GPU-2", 1, [("GPU-2-aaaa",)]),
    ],
)
def test_gpus_make_seats(wanted, each, devices):
    assert [seat.devices for seat in group_gpus(wanted, each, H100)] == devices


@pytest.mark.parametrize(
    ("wanted", "each", "visible", "message"),
    [
        ("all", 1, [], "no GPU can be used here"),
        ("0,0", 1, H100, "names a GPU twice"),
        ("0,7", 1, H100, "'7' names no GPU"),
        ("GPU-", 1, H100, "'GPU-' names no GPU"),
        ("all", 3, H100, "4 GPUs do not make seats of 3"),
        ("all", 1, [*H100, VisibleGpu("GPU-9", "NVIDIA L4")], "unlike GPUs: NVIDIA H100, NVIDIA L4"),
    ],
)
def test_devices_that_make_no_seats_are_refused(wanted, each, visible, message):
    with pytest.raises(ArgumentError, match=message):
        group_gpus(wanted, each, visible)


def test_a_recipe_names_the_gpus_of_one_seat(monkeypatch):
    mixed = [VisibleGpu("GPU-0", "NVIDIA L4"), *H100]
    monkeypatch.setattr(local, "visible_gpus", lambda: mixed)
    machine = MACHINE.model_copy(update={"gpus": tuple(Gpu(name=each.name, memory_bytes=1) for each in mixed)})
    seats = group_gpus("1,2", 1, mixed)
    own = restrict_to_seat(machine, seats)
    assert [each.name for each in own.gpus] == ["NVIDIA H100"]
    assert own.differences(restrict_to_seat(machine, seats)) == ()
    assert restrict_to_seat(machine, ()) == machine
