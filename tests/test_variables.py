"""The user's environment: flags in a variable, settings that are refused, variables that nobody reads."""

import os
import threading

import pytest

from autotune.data.errors import SearchSpaceError
from autotune.space.space_file import SearchSpace
from autotune.space.variables import (
    NOT_READ,
    REFUSED,
    caches_in,
    environment_notes,
    flag_value,
    loading_from,
    parse_flags,
    set_flag,
    without_caches,
)


def test_a_flag_is_set_beside_the_users_own():
    variables = {"XLA_FLAGS": '--xla_dump_to="/a b" --xla_gpu_x=1'}
    set_flag(variables, "XLA_FLAGS", "xla_gpu_x", "2")
    set_flag(variables, "XLA_FLAGS", "xla_gpu_y", "true")
    assert variables == {"XLA_FLAGS": '--xla_dump_to="/a b" --xla_gpu_x=2 --xla_gpu_y=true'}


def test_the_flags_may_stand_in_a_file(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_gpu_x=3\n--xla_gpu_y\n")
    assert flag_value({"XLA_FLAGS": str(file)}, "XLA_FLAGS", "xla_gpu_x") == "3"
    assert flag_value({"XLA_FLAGS": str(file)}, "XLA_FLAGS", "xla_gpu_y") == "true"
    assert parse_flags({"XLA_FLAGS": str(tmp_path / "none")}, "XLA_FLAGS") == {}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT": "1"}, "overflow"),
        ({"XLA_FLAGS": "--xla_gpu_enable_fast_min_max"}, "fast-math"),
        ({"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, "fast-math"),
        ({"XLA_FLAGS": "--xla_gpu_autotune_level=2"}, "does not check"),
    ],
)
def test_a_refused_setting_of_the_users_is_warned_of_once(variables, said):
    (line,) = environment_notes(variables, "2.21.0")
    assert said in line
    assert next(iter(variables)) in line


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT": "0"},
        {"XLA_FLAGS": "--xla_gpu_autotune_level=4 --xla_gpu_enable_fast_min_max=false"},
        {"XLA_FLAGS": "--xla_dump_to=/tmp", "TF_XLA_FLAGS": "--tf_xla_auto_jit=2"},
    ],
)
def test_what_is_safe_is_not_warned_of(variables):
    assert list(environment_notes(variables, "2.21.0")) == []


def test_a_variable_that_is_not_read_is_named():
    expected = [f"{name} is set, but TensorFlow 2.21.0 no longer reads it" for name in NOT_READ]
    assert list(environment_notes(dict.fromkeys(NOT_READ, "1"), "2.21.0")) == expected


@pytest.mark.parametrize("name", [*REFUSED, "--xla_gpu_autotune_level"])
def test_a_search_space_with_a_refused_name_says_why(name):
    text = f'schema_version = 1\n[knobs."{name}"]\nkind = "categorical"\nchoices = [true, false]\n'
    with pytest.raises(SearchSpaceError) as caught:
        SearchSpace.parse(text, source="mine.toml")
    plain = name.removeprefix("--")
    assert caught.value.message == f"mine.toml: {plain} is refused: {REFUSED[plain]}"


def test_caches_of_compilations_are_taken_out_and_said():
    variables = {
        "XLA_FLAGS": "--xla_gpu_per_fusion_autotune_cache_dir=/c --xla_dump_to=/d "
        "--xla_gpu_load_autotune_results_from=/f",
        "TF_XLA_FLAGS": "--tf_xla_persistent_cache_directory=/c",
    }
    assert without_caches(variables) == {"XLA_FLAGS": "--xla_dump_to=/d", "TF_XLA_FLAGS": ""}
    assert [line.partition(" ")[0] for line in environment_notes(variables, "2.21.0")] == ["XLA_FLAGS", "TF_XLA_FLAGS"]
    assert without_caches({"XLA_FLAGS": "--xla_dump_to=/d"}) == {}


def test_a_process_keeps_its_compilations_in_a_folder_of_its_own():
    users = {"XLA_FLAGS": "--xla_dump_to=/d --xla_gpu_load_autotune_results_from=/f"}
    assert caches_in("/a run/c", users) == {
        "XLA_FLAGS": '--xla_dump_to=/d --xla_gpu_dump_autotune_results_to="/a run/c/autotuned.txt"',
        "TF_XLA_FLAGS": '--tf_xla_persistent_cache_directory="/a run/c"',
    }
    assert caches_in("", users) == {"XLA_FLAGS": "--xla_dump_to=/d"}


@pytest.mark.parametrize(
    ("folder", "quoted"),
    [("/o'neil/c", '"/o\'neil/c"'), ('/a "b"/c', "'/a \"b\"/c'"), ("/a b\\/c", "'/a b\\/c'"), ("/o'\"/c", None)],
)
def test_a_folder_with_quotes_takes_no_flag_apart(folder, quoted):
    users = {"XLA_FLAGS": "--xla_dump_to=/d"}
    named = {} if quoted is None else {"TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={quoted}"}
    kept = caches_in(folder, users)
    assert loading_from(folder, users) == named
    assert kept.get("TF_XLA_FLAGS") == named.get("TF_XLA_FLAGS")
    assert without_caches(users | kept).get("XLA_FLAGS", "--xla_dump_to=/d") == "--xla_dump_to=/d"


def test_loaded_compilations_respect_user_flags_and_caches(tmp_path):
    programs = {"TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={tmp_path}"}
    assert loading_from(str(tmp_path), {}) == programs
    (tmp_path / "autotuned.txt").touch()
    read = f"--xla_gpu_load_autotune_results_from={tmp_path}/autotuned.txt"
    assert loading_from(str(tmp_path), {"XLA_FLAGS": "--xla_dump_to=/d"}) == {
        "XLA_FLAGS": f"--xla_dump_to=/d {read}",
        **programs,
    }
    users = {"TF_XLA_FLAGS": "--tf_xla_persistent_cache_directory=/own"}
    assert loading_from(str(tmp_path), users) == {"XLA_FLAGS": read}


def test_a_pipe_that_a_variable_names_is_left_to_xla(tmp_path):
    pipe = tmp_path / "flags"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("--xla_dump_to=/there",), daemon=True)
    writer.start()
    try:
        assert parse_flags({"XLA_FLAGS": str(pipe)}, "XLA_FLAGS") == {}
        assert pipe.read_text() == "--xla_dump_to=/there"
    finally:
        writer.join(10.0)
