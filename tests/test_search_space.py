"""Search spaces: reading the TOML, what each mistake is answered with, and what is left on one machine."""

import json
from pathlib import Path

import pytest

from autotune.data.errors import ConfigurationError, SearchSpaceError
from autotune.data.files import shipped_directory
from autotune.space.configuration import baseline_configuration
from autotune.space.knobs import KNOBS, Device
from autotune.space.space_file import LARGEST_DOUBLED_BATCH, SearchSpace, bound, find_search_space, shipped_names

VERSION = "schema_version = 1\n"


def parse(text):
    """The search space in `text`, which comes from a file called space.toml."""
    return SearchSpace.parse(text, source="space.toml")


def find_conflict(text):
    """The error with which `text` is refused."""
    with pytest.raises(SearchSpaceError) as caught:
        parse(text)
    return caught.value


def knob_table(name, body):
    """A whole search space that varies one knob."""
    return f"{VERSION}[knobs.{name}]\n{body}\n"


def numbers(name="prefetch", *, low=1, high=4, rest=""):
    """A whole search space that varies one knob over numbers."""
    return knob_table(name, f'kind = "power_of_two"\nlow = {json.dumps(low)}\nhigh = {json.dumps(high)}\n{rest}')


def choices(name, values):
    """A whole search space that varies one knob over choices, given as TOML."""
    return knob_table(name, f'kind = "categorical"\nchoices = {values}')


def resolve(text, *, cores=4, examples=None, device=Device.CPU, takes_config=True, batch_size=32, **named):
    """The space in `text`, resolved for a machine and a workload."""
    baseline = baseline_configuration(batch_size, {"jit_compile": False, **named}, device, where="train.py")
    return parse(text).resolve(
        baseline=baseline, device=device, cores=cores, examples=examples, dataset_takes_config=takes_config
    )


# ------------------------------------------------------------------------------------------------- reading


def test_every_kind_of_range_is_read():
    space = parse(
        VERSION
        + """
        [knobs.jit_compile]
        kind = "categorical"
        choices = [true, "auto", false]
        [knobs.prefetch]
        kind = "power_of_two"
        low = 1
        high = "2*cores"
        [knobs.batch_size]
        kind = "power_of_two"
        low = 16
        high = "min(1024, examples/4)"
        """
    )
    assert list(space.ranges) == ["jit_compile", "prefetch", "batch_size"]
    assert space.ranges["jit_compile"].choices == (True, "auto", False)
    assert (space.ranges["prefetch"].low, space.ranges["prefetch"].high) == (1, "2*cores")
    assert space.source == "space.toml"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("knobs = [", "not valid TOML", ""),
        ("", "schema_version is missing, this autotune reads 1", "Write: schema_version = 1"),
        ("schema_version = 2", "schema_version is 2, this autotune reads 1", "Upgrade autotune."),
        ("schema_version = 2\nnew = 1", "schema_version is 2", "Upgrade autotune."),
        ("schema_version = true", "schema_version is True", "Write: schema_version = 1"),
        ("schema_version = 1.0", "schema_version is 1.0", "Write: schema_version = 1"),
        (
            "schema_verson = 1",
            "unknown key 'schema_verson'",
            "Did you mean 'schema_version'? Known here: schema_version, ",
        ),
        (VERSION + "[knob.batch_size]", "unknown key 'knob'", "Did you mean 'knobs'?"),
        (VERSION, "no knobs to vary", "[knobs.batch_size]"),
        (VERSION + "knobs = 3", "no knobs to vary", "[knobs.batch_size]"),
        (VERSION + "[knobs.bach_size]", "there is no knob called 'bach_size'", "Did you mean 'batch_size'?"),
        (VERSION + "[knobs.zzz]", "there is no knob called 'zzz'", "`autotune knobs` lists them all."),
        (knob_table("prefetch", ""), "[knobs.prefetch]: kind is missing", "Kinds: categorical, power_of_two."),
        (
            knob_table("prefetch", 'kind = "power_of_to"'),
            "kind is 'power_of_to'",
            "Did you mean 'power_of_two'? Kinds: ",
        ),
        (numbers(rest="hgh = 2"), "[knobs.prefetch]: unknown key 'hgh'", "Did you mean 'high'?"),
        (knob_table("prefetch", 'kind = "categorical"\nlow = 1'), "unknown key 'low'", "Known here: kind, choices."),
        (choices("prefetch", "[]"), "choices is []", "Write a list of one to 256 values."),
        (choices("prefetch", "8"), "choices is 8", "Write a list"),
        (choices("prefetch", str(list(range(257)))), "choices is [0, 1, 2, ", "Write a list of one to 256 values."),
        (choices("prefetch", "[2, true]"), "choices[1] is True", "prefetch takes an integer from 0 to 4096"),
        (choices("jit_compile", "[false, 1]"), "choices[1] is 1", "jit_compile takes true or false"),
        (choices("prefetch", "[2.0]"), "choices[0] is 2.0", "prefetch takes an integer"),
        (choices("precision", '["float8"]'), "choices[0] is 'float8'", '"mixed_float16"'),
        (numbers("precision"), "kind 'power_of_two' needs a knob with numbers", 'precision takes "float64"'),
        (knob_table("prefetch", 'kind = "power_of_two"\nhigh = 4'), "low is missing", "Bounds look like"),
        (knob_table("prefetch", 'kind = "power_of_two"\nlow = 4'), "high is missing", "Bounds look like"),
        (numbers(low="cores*4"), "[knobs.prefetch]: low is 'cores*4', which is no bound", "Bounds look like"),
        (VERSION + "knobs.prefetch = 3", "[knobs.prefetch]: kind is missing", "Kinds: "),
        (numbers(high="memory"), "high is 'memory', which is no bound", "Bounds look like"),
    ],
)
def test_mistake_in_a_space_names_the_problem_and_the_fix(text, message, hint):
    error = find_conflict(text)
    assert error.message.startswith("space.toml: ")
    assert message in error.message
    assert hint in error.hint


def test_an_unknown_key_far_from_all_known_ones_gets_no_guess():
    assert find_conflict(VERSION + "zzzzzz = 1").hint == "Known here: schema_version, knobs."


# -------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("text", "known", "unknown"),
    [
        (12, 12, 12),
        (" 12 ", 12, 12),
        ("cores", 6, 6),
        ("4 * cores", 24, 24),
        ("3*cores/4", 4, 4),
        ("examples", 1437, None),
        ("2*examples/3", 958, None),
        ("min(1024, examples/4)", 359, 1024),
        ("min(100, examples/4)", 100, 100),
        ("max(64, 4*cores)", 64, 64),
        ("max( 16 ,cores, examples )", 1437, None),
        ("min(7)", 7, 7),
    ],
)
def test_a_bound_is_reckoned_for_the_machine(text, known, unknown):
    assert bound(text, cores=6, examples=1437, where="here") == known
    assert bound(text, cores=6, examples=None, where="here") == unknown


NO_BOUNDS = "|-1|1.5|core|cores*4|4*4|4/2|cores/0|cores+1|cores/-2|1234567890|1234567890*cores|min()|min(1,)|memory"


@pytest.mark.parametrize(
    "text",
    [
        *(-1, 4.5, True, 10**9, " " * 50),
        *NO_BOUNDS.split("|"),
        *("min(1, max(2, 3))", "avg(1, 2)", "min(1, 2", "min 1", "MIN(1, 2)", "²", "٣", "__import__('os')"),
    ],
)
def test_a_bound_outside_the_grammar_is_refused(text):
    with pytest.raises(SearchSpaceError) as caught:
        bound(text, cores=6, examples=1437, where="space.toml: [knobs.prefetch]: low")
    assert caught.value.message == f"space.toml: [knobs.prefetch]: low is {text!r}, which is no bound"
    assert "min(1024, examples/4)" in caught.value.hint


# ----------------------------------------------------------------------------------------------- resolving


BATCHES = numbers("batch_size", low=16, high=4096)
UNTIL_MEMORY = numbers("batch_size", low=64, high="memory")


@pytest.mark.parametrize(
    ("text", "name", "machine", "expected"),
    [
        (numbers(low=4, high=4), "prefetch", {}, (0, 4)),
        (numbers("steps_per_execution", low=3, high=33), "steps_per_execution", {}, (1, 4, 8, 16, 32)),
        (numbers("steps_per_execution", low=4, high=32), "steps_per_execution", {}, (1, 4, 8, 16, 32)),
        (numbers("intra_op_threads", low=1, high="2*cores"), "intra_op_threads", {"cores": 2}, (0, 1, 2, 4)),
        (numbers("intra_op_threads", low=1, high="2*cores"), "intra_op_threads", {"cores": 8}, (0, 1, 2, 4, 8, 16)),
        (BATCHES, "batch_size", {"examples": 200}, (16, 32, 64, 128)),
        (BATCHES, "batch_size", {"examples": None}, (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
        (BATCHES, "batch_size", {"examples": 100, "batch_size": 300}, (16, 32, 64, 300)),
        (numbers(low=32, high=64), "prefetch", {"examples": 10}, (0, 32, 64)),  # no batch size
        (choices("batch_size", "[16, 32, 48, 64, 128]"), "batch_size", {"global_batch": 64}, (16, 32, 64)),
        (UNTIL_MEMORY, "batch_size", {"examples": 4096}, (32, 64, 128, 256, 512, 1024)),
        (numbers("num_parallel_calls", low=1, high=2), "num_parallel_calls", {"takes_config": True}, (0, 1, 2)),
    ],
)
def test_the_values_lie_between_the_bounds(text, name, machine, expected):
    assert resolve(text, **machine).choices[name] == expected


def test_as_many_choices_as_allowed_are_allowed():
    assert len(parse(choices("prefetch", str(list(range(256))))).ranges["prefetch"].choices) == 256


@pytest.mark.parametrize(
    ("text", "name", "named", "expected"),
    [
        (numbers(low=1, high=3), "prefetch", {"prefetch": 7}, (1, 2, 7)),
        (numbers(low=2, high=4), "prefetch", {"prefetch": "autotune"}, (2, 4, "autotune")),
        (choices("prefetch", '[8, "autotune", 2]'), "prefetch", {}, (0, 2, 8, "autotune")),
        (choices("jit_compile", "[true]"), "jit_compile", {}, (True, False)),
        (choices("precision", '["mixed_bfloat16"]'), "precision", {}, ("mixed_bfloat16", "float32")),
        (choices("prefetch", "[4, 2]"), "prefetch", {"prefetch": 2}, (2, 4)),
    ],
)
def test_the_baselines_value_is_always_among_the_choices(text, name, named, expected):
    space = resolve(text, **named)
    assert space.choices[name] == expected
    assert space.baseline in space


def test_a_batch_size_without_room_stays_the_baselines():
    text = numbers("batch_size", low=16, high="examples/4") + "[knobs.prefetch]\n"
    space = resolve(text + 'kind = "categorical"\nchoices = [0, 2]', examples=40)
    assert dict(space.choices) == {"prefetch": (0, 2)}
    assert space.left_out == {"batch_size": "only the baseline's value, 32, is left"}


def test_until_memory_is_bounded_without_an_example_count():
    assert resolve(UNTIL_MEMORY, examples=None).choices["batch_size"][-1] == LARGEST_DOUBLED_BATCH


def test_unavailable_knobs_are_left_out_with_the_reason():
    text = (
        choices("tensor_float_32", "[true, false]")
        + '[knobs.num_parallel_calls]\nkind = "power_of_two"\nlow = 1\nhigh = 4\n'
        + '[knobs.prefetch]\nkind = "categorical"\nchoices = [2]\n'
        + '[knobs.data_threads]\nkind = "categorical"\nchoices = [0]\n'
    )
    space = resolve(text, takes_config=False)
    assert dict(space.choices) == {"prefetch": (0, 2)}
    assert space.left_out == {
        "tensor_float_32": "does not exist on a cpu",
        "num_parallel_calls": "the workload's dataset() takes no config",
        "data_threads": "only the baseline's value, 0, is left",
    }


def test_space_with_nothing_to_vary_is_refused_with_reasons():
    with pytest.raises(SearchSpaceError) as caught:
        resolve(choices("prefetch", "[0]") + '[knobs.tensor_float_32]\nkind = "categorical"\nchoices = [true]\n')
    assert caught.value.message == "space.toml: nothing is left to vary here"
    assert caught.value.hint == (
        "prefetch: only the baseline's value, 0, is left; tensor_float_32: does not exist on a cpu."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (numbers(low="4*cores", high=8), "[knobs.prefetch] is empty here: from 16 to 8"),
        (numbers(low=5, high=7), "[knobs.prefetch] is empty here: from 5 to 7"),
        (numbers(low=5, high=4), "[knobs.prefetch] is empty here: from 5 to 4"),
        (numbers(high="999999999*cores"), "[knobs.prefetch] reaches 8192 here"),
        (numbers(low=4095, high=8192), "[knobs.prefetch] reaches 8192 here"),
        (numbers(high="examples/4"), "[knobs.prefetch] has a bound on the number of examples, which is not known"),
        (numbers(low="examples", high=9), "[knobs.prefetch] has a bound on the number of examples"),
    ],
)
def test_a_range_that_does_not_work_on_this_machine_is_refused(text, message):
    with pytest.raises(SearchSpaceError) as caught:
        resolve(text, cores=4, examples=None)
    assert caught.value.message.startswith(f"space.toml: {message}")
    assert caught.value.hint


def test_resolved_space_has_a_size_and_builds_configurations():
    space = resolve(choices("prefetch", "[0, 2, 8]") + '[knobs.batch_size]\nkind = "categorical"\nchoices = [64]\n')
    assert space.size == 6
    assert list(space.choices) == ["batch_size", "prefetch"]  # in table order
    assert space.configuration({"prefetch": 8}) == space.baseline.replace(prefetch=8)
    with pytest.raises(ConfigurationError):
        space.configuration({"prefetch": -8})


def test_space_contains_only_configurations_it_can_build():
    space = resolve(choices("prefetch", "[0, 2, 8]"))
    assert space.baseline.replace(prefetch=8) in space
    assert space.baseline.replace(prefetch=4) not in space
    assert space.baseline.replace(data_threads=4) not in space
    assert dict(space.baseline) not in space


# ------------------------------------------------------------------------------------------- shipped files


def test_the_shipped_spaces_are_found():
    assert shipped_names() == ("cpu", "gpu", "gpu_thorough", "quick", "several_gpus")
    assert (shipped_directory("search_spaces") / "quick.toml").is_file()


SHIPPED = [("quick", Device.CPU), ("cpu", Device.CPU), ("gpu", Device.GPU), ("gpu_thorough", Device.GPU)]


@pytest.mark.parametrize("examples", [None, 1437, 10**7])
@pytest.mark.parametrize("cores", [2, 64])
@pytest.mark.parametrize(("name", "device"), SHIPPED)
def test_a_shipped_space_resolves_on_small_and_large_machines(name, device, cores, examples):
    space = find_search_space(name)
    baseline = baseline_configuration(32, {"jit_compile": False}, device, where="train.py")
    resolved = space.resolve(
        baseline=baseline, device=device, cores=cores, examples=examples, dataset_takes_config=True
    )
    assert set(resolved.left_out.values()) == {"only some scripts have it"}
    assert set(resolved.choices) == {name for name in space.ranges if name in baseline}
    assert baseline in resolved


@pytest.mark.parametrize(("cores", "most"), [(2, 16), (64, 256)])
@pytest.mark.parametrize("name", ["quick", "cpu", "gpu"])
def test_parallel_calls_reach_sixteen_or_four_times_the_cores(name, cores, most):
    high = find_search_space(name).ranges["num_parallel_calls"].high
    assert bound(high, cores=cores, examples=None, where=name) == most


def test_the_quick_space_needs_no_second_import():
    assert {KNOBS[name].stage for name in find_search_space("quick").ranges}.isdisjoint({"import"})


# --------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize(
    "rewrite", [str, "\ufeff{}".format, lambda text: text.replace("\n", "\r\n")], ids=["plain", "mark", "dos"]
)
def test_a_space_is_loaded_from_a_path(tmp_path, kind, rewrite):
    file = tmp_path / "mine.toml"
    file.write_bytes(rewrite(choices("prefetch", "[0, 2]")).encode())
    space = find_search_space(kind(file))
    assert space.ranges["prefetch"].choices == (0, 2)
    assert space.source == str(file)


def test_a_misspelt_shipped_name_is_answered_with_the_nearest():
    with pytest.raises(SearchSpaceError) as caught:
        find_search_space("quik")
    assert caught.value.message == "no search space 'quik': no such file, and none of that name is shipped"
    assert caught.value.hint == "Did you mean 'quick'? Shipped: cpu, gpu, gpu_thorough, quick, several_gpus."


def test_a_name_too_long_for_a_file_is_refused():
    with pytest.raises(SearchSpaceError, match="File name too long"):
        find_search_space("x" * 5000)
