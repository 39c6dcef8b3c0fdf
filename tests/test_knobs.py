"""The table of knobs: what each can take, where it exists, and what a wrong name or value is answered with."""

import pytest

from autotune.data.errors import ConfigurationError
from autotune.space.changes import near
from autotune.space.knobs import GPU_KNOBS, KNOBS, Device, Domain, check_value, did_you_mean, knobs_on


@pytest.mark.parametrize(
    "name", [name for name, knob in KNOBS.items() if name != "batch_size" and not knob.of_workload]
)
def test_tensorflow_default_lies_in_the_domain_of_its_knob(name):
    assert KNOBS[name].default in KNOBS[name].domain


def test_only_the_workload_can_say_the_batch_size():
    assert [knob.name for knob in KNOBS.values() if knob.default is None and not knob.of_workload] == ["batch_size"]


def test_a_range_of_integers_holds_both_its_ends():
    domain = Domain(integers=(1, 8))
    assert [value for value in range(11) if value in domain] == list(range(1, 9))


def test_true_is_not_one():
    numbers, switches = Domain(integers=(0, 1)), Domain(booleans=True)
    assert (True in numbers, False in numbers) == (False, False)
    assert (1 in switches, 0 in switches) == (False, False)
    assert (1 in numbers, True in switches, False in switches) == (True, True, True)


@pytest.mark.parametrize("value", [1.0, None, "2", b"autotune", ["autotune"], float("nan"), "Autotune", ""])
def test_domain_rejects_values_of_other_type_or_spelling(value):
    assert value not in Domain(integers=(0, 8), booleans=True, words=("autotune",))


def test_a_domain_describes_each_of_its_parts():
    described = Domain(integers=(0, 64), booleans=True, words=("auto", "never")).describe()
    assert described == 'true or false, or an integer from 0 to 64, or "auto" or "never"'


def test_a_misspelt_knob_is_answered_with_the_nearest_name():
    with pytest.raises(ConfigurationError) as caught:
        check_value("bach_size", 1, where="recipe.json")
    assert caught.value.message == "recipe.json: there is no knob called 'bach_size'"
    assert caught.value.hint == "Did you mean 'batch_size'? `autotune knobs` lists them all."


def test_a_name_that_is_not_text_is_an_unknown_knob():
    with pytest.raises(ConfigurationError, match="here: there is no knob called 3"):
        check_value(3, 1, where="here")


def test_nearest_offers_one_known_name():
    assert did_you_mean("prefech", ("precision", "prefetch")) == "Did you mean 'prefetch'? "
    assert did_you_mean("prefech", ()) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", True),
        ("jit_compile", 1),
        ("steps_per_execution", "autotune"),
        ("onednn", None),
    ],
)
def test_refused_value_names_the_values_that_the_knob_takes(name, value):
    with pytest.raises(ConfigurationError) as caught:
        check_value(name, value, where="train.py")
    assert caught.value.message == f"train.py: {name} cannot be {value!r}"
    assert caught.value.hint == f"It takes {KNOBS[name].domain.describe()}."


def test_each_device_has_its_own_knobs():
    on_cpu = {knob.name for knob in knobs_on(Device.CPU)}
    on_gpu = {knob.name for knob in knobs_on(Device.GPU)}
    assert on_cpu - on_gpu == {"onednn", "keep_freed_memory"}
    assert on_gpu - on_cpu == {"tensor_float_32", *(knob.name for knob in GPU_KNOBS)}
    assert on_cpu | on_gpu == set(KNOBS)


@pytest.mark.parametrize("device", Device)
def test_the_knobs_of_a_device_come_in_table_order(device):
    names = [knob.name for knob in knobs_on(device)]
    assert names == [name for name in KNOBS if name in names]


def test_overlong_names_and_values_are_refused():
    with pytest.raises(ConfigurationError) as caught:
        check_value("batch_size", 10**5000, where="train.py")
    assert caught.value.message == "train.py: batch_size cannot be too large to show"
    with pytest.raises(ConfigurationError) as caught:
        check_value("x" * 5000, 1, where="train.py")
    assert len(caught.value.message) < 150


@pytest.mark.parametrize(("choices", "found"), [((10, 24), 24), ((8, 40), 8), ((0, "autotune", True), None)])
def test_the_nearest_choice_is_found_on_a_logarithmic_scale(choices, found):
    assert near(16)(choices, None) == found
