"""Configurations: checked when made, immutable, comparable, and what the baseline consists of."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.data.errors import ConfigurationError
from autotune.space.configuration import Configuration, baseline_configuration, format_value, move_to_device
from autotune.space.knobs import KNOBS, Device


def values_of(name):
    """A strategy for the values that the knob `name` can take."""
    domain = KNOBS[name].domain
    return st.one_of(
        st.integers(*domain.integers) if domain.integers else st.nothing(),
        st.booleans() if domain.booleans else st.nothing(),
        st.sampled_from(domain.words) if domain.words else st.nothing(),
    )


configurations = st.fixed_dictionaries({}, optional={name: values_of(name) for name in KNOBS}).map(Configuration)


def test_knobs_stand_in_table_order_however_they_were_given():
    configuration = Configuration({"prefetch": 2, "batch_size": 32, "precision": "float32"})
    assert list(configuration) == ["batch_size", "precision", "prefetch"]
    assert len(configuration) == 3


def test_configuration_is_independent_of_its_source_mapping():
    values = {"batch_size": 32}
    configuration = Configuration(values)
    values["batch_size"] = 64
    assert configuration["batch_size"] == 32


def test_a_configuration_cannot_be_changed():
    configuration = Configuration({"batch_size": 32})
    with pytest.raises(TypeError):
        configuration["batch_size"] = 64
    with pytest.raises(AttributeError):
        configuration.note = "fast"


def test_equal_settings_make_equal_configurations():
    one = Configuration({"batch_size": 32, "prefetch": 2})
    other = Configuration({"prefetch": 2, "batch_size": 32})
    assert one == other
    assert len({one, other}) == 1
    assert one.key == other.key


@pytest.mark.parametrize(
    "other",
    [
        Configuration({"batch_size": 64}),
        Configuration({"batch_size": 32, "prefetch": 0}),
        {"batch_size": 32},
        "batch_size=32",
    ],
)
def test_other_settings_and_other_types_are_not_equal(other):
    assert Configuration({"batch_size": 32}) != other


def test_replacing_makes_a_new_configuration():
    old = Configuration({"batch_size": 32, "prefetch": 0})
    new = old.replace(prefetch=8, jit_compile=True)
    assert dict(new) == {"batch_size": 32, "jit_compile": True, "prefetch": 8}
    assert dict(old) == {"batch_size": 32, "prefetch": 0}
    with pytest.raises(ConfigurationError, match="prefetch cannot be -1"):
        old.replace(prefetch=-1)


def test_differences_are_values_that_the_other_lacks():
    here = Configuration({"batch_size": 64, "precision": "float32", "prefetch": "autotune"})
    other = Configuration({"batch_size": 32, "precision": "float32", "data_threads": 4})
    assert here.differences(other) == {"batch_size": 64, "prefetch": "autotune"}


def test_describe_shows_a_configuration_or_its_difference():
    configuration = Configuration({"batch_size": 256, "jit_compile": True, "prefetch": "autotune"})
    assert configuration.describe() == "batch_size=256 jit_compile=true prefetch=autotune"
    baseline = Configuration({"batch_size": 32, "prefetch": 0})
    assert baseline.replace(prefetch=2).describe(relative_to=baseline) == "prefetch=2"
    assert baseline.describe(relative_to=baseline) == "baseline"


def test_repr_shows_how_to_write_it():
    assert repr(Configuration({"jit_compile": False, "batch_size": 1})) == (
        "Configuration(batch_size=1, jit_compile=False)"
    )


@pytest.mark.parametrize(("value", "text"), [(True, "true"), (False, "false"), (1, "1"), ("auto", "auto")])
def test_values_are_written_as_toml_writes_them(value, text):
    assert format_value(value) == text


@settings(max_examples=200, deadline=None)
@given(configuration=configurations)
def test_the_key_holds_the_whole_configuration(configuration):
    again = Configuration(json.loads(configuration.key))
    assert again == configuration
    assert [type(value) for value in again.values()] == [type(value) for value in configuration.values()]


@settings(max_examples=200, deadline=None)
@given(one=configurations, other=configurations)
def test_making_the_differences_in_the_other_gives_this_one(one, other):
    changed = other.replace(**one.differences(other))
    assert {name: changed[name] for name in one} == dict(one)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from([*KNOBS, "batchsize", ""]),
    value=st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2)
    ),
)
def test_any_input_gives_a_configuration_or_configuration_error(name, value):
    if name in KNOBS and value in KNOBS[name].domain:
        assert Configuration({name: value})[name] is value
    else:
        with pytest.raises(ConfigurationError) as caught:
            Configuration({name: value})
        assert caught.value.message.startswith("configuration: ")
        assert caught.value.hint


def test_baseline_has_tensorflow_defaults_and_own_batch_size():
    baseline = baseline_configuration(48, {}, Device.CPU, where="train.py")
    assert dict(baseline) == {
        "batch_size": 48,
        "precision": "float32",
        "jit_compile": "auto",
        "steps_per_execution": 1,
        "prefetch": 0,
        "num_parallel_calls": 0,
        "data_threads": 0,
        "deterministic": True,
        "data_autotune": True,
        "persistent_iterator": False,
        "intra_op_threads": 0,
        "inter_op_threads": 0,
        "onednn": True,
    }


def test_the_baseline_on_a_gpu_has_the_gpus_knobs():
    baseline = baseline_configuration(48, {}, Device.GPU, where="train.py")
    assert baseline["tensor_float_32"] is True
    assert "onednn" not in baseline


@pytest.mark.parametrize("named", [{"prefech": 4}, {"prefetch": 4.5}])
def test_a_wrong_knob_in_the_baseline_names_the_workload(named):
    with pytest.raises(ConfigurationError, match=r"^train\.py: "):
        baseline_configuration(48, named, Device.CPU, where="train.py")


def test_moving_to_another_device_swaps_the_knobs_that_exist():
    on_cpu = baseline_configuration(48, {"prefetch": 4, "onednn": False}, Device.CPU, where="train.py")
    moved = move_to_device(on_cpu, Device.GPU)
    assert "onednn" not in moved
    assert moved["tensor_float_32"] is True
    assert (moved.batch_size, moved["prefetch"]) == (48, 4)


def test_moving_to_the_same_device_changes_nothing():
    on_cpu = baseline_configuration(48, {"onednn": False}, Device.CPU, where="train.py")
    assert move_to_device(on_cpu, Device.CPU) == on_cpu


def test_baseline_with_replicas_but_no_strategy_is_refused():
    with pytest.raises(ConfigurationError, match="replicas acts only with strategy"):
        baseline_configuration(32, {"replicas": 2}, Device.CPU, where="Workload.baseline")
