"""How a run is to be done: every number and word is checked before anything starts."""

import math
import re
from pathlib import Path

import pytest

from autotune import tune
from autotune.data.errors import ArgumentError, WorkloadError
from autotune.data.options import Options, seconds_of


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget", 0.0),
        ("budget", math.nan),
        ("budget", math.inf),
        ("budget", True),
        ("trials", 0),
        ("trials", 1.5),
        ("trials", True),
        ("trial_timeout", 0.5),
        ("trial_timeout", math.nan),
        ("min_gain", -0.1),
        ("min_gain", "2%"),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 1.0),
        ("max_batch", 0),
        ("max_batch", 64.0),
        ("fixed_batch", 1),
        ("memory_margin", 0.95),
        ("memory_margin", -0.1),
        ("objective", "fork"),
        ("space", 5),
        ("begin_with", 5),
    ],
)
def test_what_cannot_be_used_is_named(name, value):
    with pytest.raises(ArgumentError, match=f"^{name}: ") as caught:
        Options(**{"budget": 60.0, name: value})
    assert str(value) in str(caught.value)


def test_usual_options_are_taken():
    assert Options(budget=60.0).budget == 60.0
    given = {"budget": 60, "trials": 3, "trial_timeout": 10, "seed": 2**32 - 1, "min_gain": 0, "objective": "energy"}
    taken = Options(**given)
    assert {name: getattr(taken, name) for name in given} == given
    assert Options(budget="10m", soak="0", space=Path("a.toml")) == Options(budget=600.0, soak=0.0, space="a.toml")


@pytest.mark.parametrize(("given", "seconds"), [(90, 90.0), (1.5, 1.5), ("10m", 600.0), ("90s", 90.0)])
def test_durations_are_seconds_or_text(given, seconds):
    assert seconds_of("budget", given) == seconds


@pytest.mark.parametrize("given", [0, "0", "0s", "0m"])
def test_a_soak_may_be_left_out_and_a_budget_may_not(given):
    assert seconds_of("soak", given) == Options(budget=60.0, soak=given).soak == 0.0
    with pytest.raises(ArgumentError, match=r"^budget: .*greater than or equal to 1, found 0"):
        Options(budget=given)


def test_a_duration_without_a_unit_is_asked_for_one():
    with pytest.raises(ArgumentError, match=r"^budget: '10' has no unit") as caught:
        seconds_of("budget", "10")
    assert caught.value.hint == "Say 10s or 10m."


@pytest.mark.parametrize("given", ["", "h", "soon", [1], {}, None, True, b"10m"])
def test_what_is_no_duration_is_refused_by_name(given):
    with pytest.raises(ArgumentError, match=f"^trial_timeout: {re.escape(repr(given))} is not a duration"):
        seconds_of("trial_timeout", given)


@pytest.mark.parametrize("workload", [42, None, ["train.py"], b"train.py"])
def test_what_is_no_workload(workload):
    with pytest.raises(ArgumentError, match=rf"the workload is an? {type(workload).__name__}"):
        tune(workload, budget=60)


def test_a_path_is_as_good_as_text(tmp_path):
    with pytest.raises(WorkloadError, match="no such file"):
        tune(tmp_path / "train.py", budget=60)


def test_an_empty_directory_name_is_refused():
    with pytest.raises(ArgumentError, match="out is empty"):
        tune("train.py", budget=60, out="")
    assert not Path("run.json").exists()


def test_a_resumed_run_keeps_its_files_arguments():
    begun = Options(budget=60.0, args=("--width", "512"))
    assert begun.resumed_with({"args": ()}).args == ("--width", "512")
    assert begun.resumed_with({"args": ("--width", "512")}) == begun
    with pytest.raises(ArgumentError, match=r"args is .*'9'.* and the run to be resumed has"):
        begun.resumed_with({"args": ("--width", "9")})


@pytest.mark.parametrize("args", ["--width 512", None, (1,)])
def test_damaged_arguments_of_a_run_are_refused(args):
    with pytest.raises((ArgumentError, TypeError)):
        Options(budget=60.0, args=args)


def test_devices_of_a_seat_need_devices():
    with pytest.raises(ArgumentError, match="seat_devices was given without devices"):
        Options(budget=60.0, seat_devices=2)
    assert Options(budget=60.0, seat_devices=2, executor="ray").seat_devices == 2


def test_a_run_on_a_cluster_goes_on_where_the_command_line_says():
    begun = Options(budget=60.0, executor="ray", ray_address="head:6379", seats=4)
    left_out = {"executor": "local", "seats": None, "ray_address": None, "seat_devices": 1}
    with pytest.raises(ArgumentError) as caught:
        begun.resumed_with(left_out)
    assert "--ray-address head:6379" in caught.value.hint
    assert begun.resumed_with({**left_out, "ray_address": "head:6379"}) == begun
    assert begun.resumed_with({**left_out, "ray_address": "other:6379"}).ray_address == "other:6379"


def test_a_run_directory_does_not_allow_writes():
    begun = Options(budget=60.0, allow_writes=True)
    with pytest.raises(ArgumentError) as caught:
        begun.resumed_with({"allow_writes": False})
    assert caught.value.hint.endswith("again: --allow-writes")
    assert begun.resumed_with({"allow_writes": True}) == begun


def test_the_command_that_resumes_has_the_scripts_arguments():
    begun = Options(budget=60.0, args=("--epochs", "3"))
    assert begun.to_repeat == ["--", "--epochs", "3"]
    assert begun.resumed_with({"args": begun.args}) == begun.resumed_with({"args": None}) == begun


SECRET = ("--token=hunter22", "--epochs", "3")


def test_credentials_are_recorded_as_a_mask_and_asked_for_again():
    recorded = Options(budget=60.0, args=SECRET).recorded
    assert recorded.args == ("--token=***", "--epochs", "3")
    with pytest.raises(ArgumentError) as caught:
        recorded.resumed_with({"args": ()})
    assert caught.value.hint.endswith("again: -- '--token=***' --epochs 3")
    assert recorded.resumed_with({"args": SECRET}).args == SECRET
    with pytest.raises(ArgumentError, match="differ from those of the run") as caught:
        recorded.resumed_with({"args": ("--token=hunter22", "--epochs", "4")})
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "may_change"),
    [
        ("trials", 5, True),
        ("soak", 30.0, True),
        ("seed", 3, False),
        ("fixed_batch", True, False),
        ("fit", 2, False),
        ("fresh", True, False),
    ],
)
def test_resumed_run_keeps_options_that_must_not_change(name, value, may_change):
    begun = Options(budget=60.0)
    if may_change:
        assert getattr(begun.resumed_with({name: value}), name) == value
    else:
        with pytest.raises(ArgumentError, match=f"{name} is .*, and the run to be resumed has"):
            begun.resumed_with({name: value})
