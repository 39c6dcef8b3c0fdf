"""The kind of a machine: what belongs to it, and which of several machines is the nearest."""

import pytest
from simulated_runs import MACHINE

from autotune.data.facts import Gpu
from autotune.machine.fingerprint import find_nearest, kind_differences, kind_of

H200 = Gpu(name="NVIDIA H200", memory_bytes=141 << 30)
L4 = Gpu(name="NVIDIA L4", memory_bytes=24 << 30)


def a_machine(*gpus, tensorflow="2.21.0", **fields):
    """The test's machine with these cards and this TensorFlow."""
    packages = {"tensorflow": tensorflow, "keras": "3.14.0"}
    return MACHINE.model_copy(update={"gpus": gpus, "packages": packages, **fields})


def test_a_kind_is_devices_and_versions():
    assert str(kind_of(MACHINE)) == "simulated × 2 cores, TensorFlow 2.21, Keras 3"
    assert str(kind_of(a_machine(H200, H200, tensorflow="2.18.1"))) == "2 × NVIDIA H200, TensorFlow 2.18, Keras 3"
    assert (
        str(kind_of(MACHINE.model_copy(update={"packages": {}}))) == "simulated × 2 cores, TensorFlow none, Keras none"
    )


@pytest.mark.parametrize(
    ("measured", "here"),
    [
        (MACHINE, a_machine(tensorflow="2.21.3", memory_bytes=1 << 30, python="3.13.1")),
        (MACHINE, MACHINE.model_copy(update={"packages": {"tensorflow": "2.21.0", "keras": "3.9.2"}})),
        (a_machine(H200, driver="570.1"), a_machine(H200, driver="580.2", cores=64, cpu="other")),
        (a_machine(H200), a_machine(H200, H200)),
    ],
    ids=["patch version", "minor version of Keras", "driver", "a part of the cards"],
)
def test_what_else_changes_leaves_the_kind_alone(measured, here):
    assert kind_differences(measured, here) == ()


@pytest.mark.parametrize(
    ("measured", "here", "difference"),
    [
        (MACHINE, a_machine(cores=8), "device: measured on simulated × 2 cores, here simulated × 8 cores"),
        (MACHINE, a_machine(H200), "device: measured on simulated × 2 cores, here NVIDIA H200"),
        (a_machine(H200, H200), a_machine(H200), "device: measured on 2 × NVIDIA H200, here NVIDIA H200"),
        (a_machine(H200), a_machine(L4), "device: measured on NVIDIA H200, here NVIDIA L4"),
        (MACHINE, a_machine(tensorflow="2.18.0"), "TensorFlow: measured on 2.21, here 2.18"),
        (MACHINE, a_machine(packages={"tensorflow": "2.21.0", "keras": "2.15.0"}), "Keras: measured on 3, here 2"),
    ],
)
def test_each_part_of_a_kind_is_named_where_it_differs(measured, here, difference):
    assert kind_differences(measured, here) == (difference,)


@pytest.mark.parametrize(
    ("machines", "here"),
    [
        ([a_machine(L4), a_machine(cores=2)], a_machine(H200)),
        ([a_machine(H200, H200, tensorflow="2.18.0"), a_machine(L4)], a_machine(H200)),
        ([a_machine(*[H200] * 4), a_machine(*[H200] * 8)], a_machine(*[H200] * 3)),
        ([a_machine(cores=4), a_machine(cores=16)], a_machine(cores=2)),
        ([a_machine(python="3.11.1"), a_machine(python="3.12.1", memory_bytes=1 << 30)], a_machine(python="3.11.2")),
        ([a_machine(H200), a_machine(*[H200] * 4, tensorflow="2.18.0")], a_machine(*[H200] * 8)),
        ([MACHINE, MACHINE], MACHINE),
    ],
    ids=["a card", "the model", "the count", "cores", "all else", "a part of the cards", "the first of equals"],
)
def test_what_the_nearest_has_in_common(machines, here):
    assert find_nearest(machines, here) == [0, 1]
    assert find_nearest(machines[::-1], here)[0] == (0 if machines[0] == machines[1] else 1)
