"""What a workload may be, and what its functions are handed."""

import copy
import dataclasses
import functools
import pickle

import pytest

from autotune.data.errors import WorkloadError
from autotune.script.workload import Workload, call_with_config, takes_config
from autotune.space.configuration import Configuration, DatasetConfig


def nothing():
    """Stands for the functions of a workload that nobody calls here."""


def a_workload(**changes):
    """A workload, with some arguments changed."""
    arguments = {"model": nothing, "dataset": nothing, "compile": nothing, "batch_size": 32}
    return Workload(**{**arguments, **changes})


def find_conflict(function, *arguments):
    """The error with which `function` refuses."""
    with pytest.raises(WorkloadError) as caught:
        function(*arguments)
    return caught.value


# ------------------------------------------------------------------------------------------------ Workload


@pytest.mark.parametrize(
    ("positional", "named", "message", "hint"),
    [
        ((nothing, nothing), {}, "Workload(…) was given 2 arguments without a name, expected none", "Write Workload("),
        ((), {"batchsize": 32}, "Workload(batchsize=…): there is no such argument", "Did you mean 'batch_size'? "),
        ((), {"model": nothing}, "Workload(dataset=…) is missing", "Write Workload(model=…, dataset=…, compile=…"),
    ],
)
def test_arguments_that_do_not_exist_or_are_missing(positional, named, message, hint):
    error = find_conflict(lambda: Workload(*positional, **named))
    assert error.message == message
    assert error.hint.startswith(hint)


def test_a_workload_can_be_copied():
    workload = a_workload()
    assert copy.deepcopy(workload) == pickle.loads(pickle.dumps(workload)) == workload
    assert dataclasses.replace(workload, batch_size=64).batch_size == 64


@pytest.mark.parametrize("part", ["model", "dataset", "compile", "validation"])
def test_the_parts_of_a_workload_are_functions(part):
    error = find_conflict(lambda: a_workload(**{part: {"loss": "mse"}}))
    assert error.message == f"Workload({part}=…) is a dict, expected a function"
    assert error.hint == f"Pass the function itself, without calling it: {part}=make_{part}."


@pytest.mark.parametrize("part", ["model", "dataset"])
def test_only_validation_and_compile_may_be_missing(part):
    assert "is a NoneType, expected a function" in find_conflict(lambda: a_workload(**{part: None})).message


@pytest.mark.parametrize("size", [0, -1, 32.0, True, "32", None, (1 << 20) + 1])
def test_a_batch_size_is_a_whole_number_from_one(size):
    error = find_conflict(lambda: a_workload(batch_size=size))
    assert error.message == f"Workload(batch_size=…): batch_size cannot be {size!r}"
    assert error.hint == "It takes an integer from 1 to 1048576."


def test_the_batch_size_is_not_a_baseline_knob():
    error = find_conflict(lambda: a_workload(baseline={"batch_size": 64}))
    assert error.message == "Workload(baseline=…) names batch_size"
    assert error.hint == "Give it as Workload(batch_size=…)."


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("baseline", {"prefech": 2}, "Workload(baseline=…): there is no knob called 'prefech'"),
        ("baseline", {"prefetch": -1}, "Workload(baseline=…): prefetch cannot be -1"),
        ("baseline", ["prefetch"], "Workload(baseline=…) is a list, expected a dict of knobs"),
        ("baseline", None, "Workload(baseline=…) is a NoneType, expected a dict of knobs"),
        ("batched", 1, "Workload(batched=…) is an int, expected True or False"),
        ("drop_remainder", "yes", "Workload(drop_remainder=…) is a str, expected True or False"),
        ("name", 7, "Workload(name=…) is an int, expected a string"),
    ],
)
def test_arguments_of_another_type_or_value_are_refused(part, value, message):
    assert find_conflict(lambda: a_workload(**{part: value})).message == message


def test_a_dataset_that_batches_by_itself_must_be_told_the_size():
    error = find_conflict(lambda: a_workload(batched=True))
    assert "batched=True" in error.message
    assert "def dataset(config)" in error.hint
    assert a_workload(batched=True, dataset=lambda config: None).batched


def test_a_workload_cannot_be_changed():
    with pytest.raises(AttributeError):
        a_workload().batch_size = 64


# -------------------------------------------------------------------------------------------- dataset(config)


class Callables:
    """Callables of every kind, with and without room for a config."""

    def method(self):
        """Take none."""

    def method_with_config(self, config):
        """Take one."""

    def __call__(self, config):
        """Take one."""


def keyword_only(*, config=None):
    """Take one by name."""


def with_own_options(shuffle=True, config=None):
    """Take one by name, after an option of the user's own."""


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (nothing, False),
        (lambda **options: None, False),
        (lambda *files: None, False),
        (lambda shuffle=True: None, False),
        (lambda split="train", /, shuffle=True: None, False),
        (lambda *, size: None, False),
        (Callables().method, False),
        (functools.partial(lambda config: None, 1), False),
        (functools.partial(lambda config: None, config=1), False),
        (type("Opaque", (), {"__signature__": 3, "__call__": lambda self: None})(), False),
        (lambda config: None, True),
        (lambda config=None: None, True),
        (lambda config, /: None, True),
        (lambda c: None, True),
        (keyword_only, True),
        (with_own_options, True),
        (Callables().method_with_config, True),
        (Callables(), True),
        (functools.partial(lambda split, config: None, "train"), True),
    ],
)
def test_config_goes_to_its_name_or_the_first_required_parameter(function, takes):
    assert takes_config(function) is takes


def test_the_config_arrives_where_it_is_meant_and_nowhere_else():
    configuration = Configuration({"batch_size": 64})
    told = DatasetConfig(batch_size=64)
    for function, received in (
        (lambda shuffle=True: shuffle, True),
        (lambda *files: files, ()),
        (lambda shuffle=True, config=None: (shuffle, config), (True, told)),
        (lambda *, config=None: config, told),
        (lambda config, /: config, told),
        (lambda c: c, told),
        (functools.partial(lambda split, config: (split, config), split="train"), ("train", told)),
    ):
        assert call_with_config(function, configuration) == received


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, DatasetConfig(batch_size=8, num_parallel_calls=None, deterministic=True)),
        ({"num_parallel_calls": 0}, DatasetConfig(batch_size=8, num_parallel_calls=None)),
        ({"num_parallel_calls": 16}, DatasetConfig(batch_size=8, num_parallel_calls=16)),
        ({"num_parallel_calls": "autotune"}, DatasetConfig(batch_size=8, num_parallel_calls=-1)),
        ({"deterministic": False}, DatasetConfig(batch_size=8, deterministic=False)),
    ],
)
def test_a_dataset_is_told_its_part_in_tf_datas_own_values(knobs, expected):
    assert DatasetConfig.of(Configuration({"batch_size": 8, **knobs})) == expected
