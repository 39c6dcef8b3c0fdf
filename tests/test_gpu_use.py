"""What NVML tells of a trial's cards for each slice, by answers written by hand after its documentation."""

import json
import sys

import psutil
import pynvml
import pytest
from recorded_nvml import DATA, RecordedNvml
from simulated_runs import a_slice

from autotune.data.facts import GpuUse
from autotune.data.record import Slice
from autotune.machine import gpu
from autotune.machine.gpu import LIMITED_BY, open_meters
from autotune.training import gauges
from autotune.training.gauges import visible_gpus_of

CARDS = ("nvml_a100.json", "nvml_h100.json", "nvml_h200.json", "nvml_laptop.json", "nvml_mig.json")
LARGER = "MIG-d1000000-0000-5000-8000-000000000004"


@pytest.fixture
def card(monkeypatch):
    """A function that opens the first visible card of a file; time stands still. Returns it with its answers."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: 100.0)

    def open_first(name, **options):
        recorded = RecordedNvml(name, **options)
        monkeypatch.setitem(sys.modules, "pynvml", recorded)
        if name == "nvml_mig.json":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", LARGER)
        (opened,) = open_meters([0])
        return opened, recorded.gpus[1 if name == "nvml_mig.json" else 0]["answers"]

    return open_first


def use_of(opened, answers, monkeypatch, *, millijoules=0, seconds=2.0, lasted=2.0):
    """What it tells of a slice of so many seconds in which it counted so much, of a stretch that lasted longer."""
    before = opened.read_counters()
    if "TotalEnergyConsumption" in answers:
        answers["TotalEnergyConsumption"] += millijoules
    monkeypatch.setattr(gpu.time, "monotonic", lambda: 100.0 + lasted)
    return opened.read_use(before, seconds=seconds)


def test_a_data_centre_card_tells_everything(card, monkeypatch):
    opened, answers = card("nvml_a100.json")
    assert use_of(opened, answers, monkeypatch, millijoules=780_000) == GpuUse(
        sm_mhz=1290,
        most_sm_mhz=1410,
        watts=390.0,
        joules=780.0,
        celsius=61,
        limited_by=("power_cap",),
        utilisation=0.99,
        memory_utilisation=0.57,
        used_bytes=41000000000,
        free_bytes=44899345920,
        others=0,
        foreign_utilisation=0.0,
    )


def test_a_slice_has_its_part_of_the_energy(card, monkeypatch):
    opened, answers = card("nvml_h200.json")
    assert use_of(opened, answers, monkeypatch, millijoules=1_200_000, seconds=1.0).joules == 600.0


def test_a_laptop_card_counts_no_energy(card, monkeypatch):
    opened, answers = card("nvml_laptop.json")
    use = use_of(opened, answers, monkeypatch)
    assert (use.joules, use.watts) == (None, 78.4)
    assert use.limited_by == ("power_cap", "thermal")


def test_a_mig_instance_has_its_own_memory_and_its_cards_clocks(card, monkeypatch):
    opened, answers = card("nvml_mig.json")
    use = use_of(opened, answers, monkeypatch, millijoules=900_000)
    assert (use.sm_mhz, use.celsius, use.limited_by) == (1965, 49, ())
    assert (use.used_bytes, use.free_bytes, use.others) == (9000000000, 33144366592, 0)
    assert (use.joules, use.watts, use.utilisation) == (None, None, None)


def test_what_another_process_takes_of_the_card_is_told(card, monkeypatch):
    use = use_of(*card("nvml_h100.json"), monkeypatch)
    assert (use.others, use.foreign_utilisation) == (1, 0.3)


@pytest.mark.parametrize(("lasted", "since"), [(0.5, 49.0), (4.0, 46.0)])
def test_others_are_sampled_over_the_slice_or_a_second_at_least(card, monkeypatch, lasted, since):
    opened, answers = card("nvml_h100.json")
    nvml, asked = sys.modules["pynvml"], []
    usual = nvml.nvmlDeviceGetProcessUtilization
    monkeypatch.setattr(gpu.time, "time", lambda: 50.0)
    monkeypatch.setattr(
        nvml, "nvmlDeviceGetProcessUtilization", lambda *given: asked.append(given[1]) or usual(*given), raising=False
    )
    use_of(opened, answers, monkeypatch, lasted=lasted)
    assert asked == [since * 1e6]


def test_a_frozen_process_is_no_other(card, monkeypatch):
    class Frozen:
        def __init__(self, pid):
            assert pid == 41

        def status(self):
            return psutil.STATUS_STOPPED

    monkeypatch.setattr(psutil, "Process", Frozen)
    use = use_of(*card("nvml_h100.json"), monkeypatch)
    assert (use.others, use.foreign_utilisation) == (0, 0.0)


def test_with_numbers_of_another_namespace_nobody_is_told_apart(card, monkeypatch):
    opened, answers = card("nvml_h100.json")
    answers["ComputeRunningProcesses"] = [{"pid": 70001}, {"pid": 70002}]
    use = use_of(opened, answers, monkeypatch)
    assert (use.others, use.foreign_utilisation) == (None, None)


def test_a_driver_with_the_older_name_tells_the_reasons_too(card, monkeypatch):
    opened, answers = card("nvml_a100.json")
    answers["CurrentClocksThrottleReasons"] = answers.pop("CurrentClocksEventReasons") | 0x40
    assert use_of(opened, answers, monkeypatch).limited_by == ("power_cap", "hardware_thermal")


def test_a_card_that_answers_nothing_any_more_fails_no_slice(card, monkeypatch):
    opened, answers = card("nvml_a100.json", failing=0)
    before = opened.read_counters()
    answers.clear()
    assert opened.read_use(before, seconds=1.0) == GpuUse()


def test_only_the_cards_that_are_trained_on_are_asked(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml("nvml_mixed.json"))
    assert len(open_meters([1])) == 1
    monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml("nvml_mixed.json", starts=False))
    assert open_meters([0]) == []


def test_the_gauge_gives_a_slice_one_entry_a_card(card):
    opened, _ = card("nvml_h200.json")
    (gauge,) = gauges.gpu_gauges([opened])
    assert [each.sm_mhz for each in gauge()(0.5)["gpus"]] == [1755]
    assert gauges.gpu_gauges([]) == []


def test_a_slice_without_gpus_is_written_without_them():
    assert "gpus" not in json.loads(a_slice().model_dump_json())
    measured = a_slice().model_copy(update={"gpus": (GpuUse(joules=3.0, limited_by=("thermal",)),)})
    assert Slice.model_validate_json(measured.model_dump_json()) == measured


@pytest.mark.parametrize("name", CARDS)
def test_each_answer_stands_for_a_function_of_nvml(name):
    recorded = json.loads((DATA / name).read_text())
    assert "by hand" in recorded["source"]
    found = [
        each.get("answers", {}) for gpu in recorded["gpus"] for each in (gpu, *gpu.get("mig_instances", [])) if each
    ]
    assert any(found)
    for answers in found:
        assert [name for name in answers if not hasattr(pynvml, f"nvmlDeviceGet{name}")] == []


def test_the_reasons_have_nvmls_bits():
    names = {each: getattr(pynvml, each) for each in dir(pynvml) if each.startswith("nvmlClocksEventReason")}
    known = {bit for name, bit in names.items() if not name.endswith(("All", "None"))}
    assert set(LIMITED_BY) == known


@pytest.mark.parametrize(
    ("devices", "numbers"),
    [
        ((), [2]),
        (("/job:localhost/replica:0/task:0/device:CPU:0",), [2]),
        (("/job:localhost/replica:0/task:0/device:GPU:1", "/gpu:0"), [3, 2]),
    ],
)
def test_the_cards_that_are_read_are_those_that_train(devices, numbers):
    assert visible_gpus_of(devices, [2, 3, 5]) == numbers
