"""The same training on several machines: what carries over, in tables, in pandas, and as the page of a book."""

import pytest
from test_book import GPU_MACHINE, a_recipe, a_workload
from test_kind import L4, a_machine

from autotune.data.errors import ArgumentError
from autotune.front import cli
from autotune.recipe.book import save_book
from autotune.recipe.recipe import Book
from autotune.report.book_page import write_book_page
from autotune.report.compare import compare
from autotune.report.machines import describe_transfer, row_of, shared_changes
from autotune.stats.deciding import Verdict

LIMITS = {"baseline_limited_by": "launch", "limited_by": "memory_bandwidth"}
ON_CPU = a_recipe(jit_compile=True, steps_per_execution=8, evidence=LIMITS)
ON_GPU = a_recipe(GPU_MACHINE, jit_compile=True, batch_size=256)
ON_L4 = a_recipe(a_machine(L4), jit_compile=True, batch_size=256, steps_per_execution=8)
NOTHING = a_recipe(a_machine(cores=64), evidence={"verdict": Verdict.NO_SIGNIFICANT_GAIN}).with_baseline()


@pytest.fixture
def book(tmp_path):
    """The file of a book of four machines."""
    save_book(Book(recipes=(ON_CPU, ON_GPU, ON_L4, NOTHING)), tmp_path / "train.book.json")
    return tmp_path / "train.book.json"


def test_what_all_machines_with_a_recommendation_have_carries_over():
    assert describe_transfer([ON_CPU, ON_GPU, ON_L4, NOTHING]) == [
        "Carries over to each of the 3 machines with a recommendation: jit_compile=true",
        "Does not carry over: steps_per_execution=8 (only simulated × 2 cores, and NVIDIA L4); batch_size=256 (only "
        "NVIDIA H200, and NVIDIA L4)",
    ]
    assert describe_transfer([ON_GPU, a_recipe(steps_per_execution=8)])[0].endswith(
        "the 2 machines with a recommendation: nothing"
    )


def test_machines_with_the_same_device_are_told_apart_by_their_versions():
    older = a_recipe(a_machine(tensorflow="2.18.0"), jit_compile=True)
    (_, line) = describe_transfer([ON_CPU, older])
    assert line == "Does not carry over: steps_per_execution=8 (only simulated × 2 cores, TensorFlow 2.21, Keras 3)"


@pytest.mark.parametrize("recipes", [[ON_CPU], [ON_CPU, ON_CPU], [ON_CPU, NOTHING], [NOTHING]])
def test_one_recommendation_has_nothing_to_carry_over_to(recipes):
    assert shared_changes(recipes) is None
    assert describe_transfer(recipes) == []


def test_a_row_shows_how_the_bottleneck_moves():
    assert row_of(ON_CPU).limited_by == "launch → memory bandwidth"
    assert row_of(ON_GPU).limited_by == ""


def test_recipes_of_a_book_are_compared_in_pandas(book):
    frame = compare(book)
    assert list(frame["recommended"]) == [
        "jit_compile=true steps_per_execution=8",
        "batch_size=256 jit_compile=true",
        "batch_size=256 jit_compile=true steps_per_execution=8",
        "baseline",
    ]
    assert frame["limited_by"][0] == "launch"
    assert "another machine" in frame["differs"][1]


def test_the_command_names_a_limit_in_words(tmp_path, capsys):
    recipe = a_recipe()
    limited = recipe.evidence.model_copy(update={"baseline_limited_by": "compute_or_memory"})
    recipe.model_copy(update={"evidence": limited}).save(tmp_path / "one.json")
    a_recipe().save(tmp_path / "two.json")
    assert cli.main(["compare", str(tmp_path / "one.json"), str(tmp_path / "two.json")]) == 0
    assert "compute or memory" in capsys.readouterr().out


def test_the_page_of_a_book_has_every_machine(book, capsys):
    assert cli.main(["report", str(book)]) == 0
    page = book.with_suffix(".html")
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text(encoding="utf-8")
    assert "<title>train on 4 kinds of machine · autotune</title>" in text
    for cell in ("NVIDIA H200, TensorFlow 2.21, Keras 3", "no significant gain", "launch → memory bandwidth"):
        assert f">{cell}</t" in text
    assert "<p>Carries over to each of the 3 machines with a recommendation: jit_compile=true</p>" in text
    assert write_book_page(book) == page, "it is written anew"


def test_the_page_of_a_book_runs_nothing(tmp_path):
    hostile = a_machine(cpu='<script>alert("x")</script>')
    save_book(Book(recipes=(a_recipe(hostile, workload=a_workload(name="<b>{mark}")),)), tmp_path / "b.json")
    text = write_book_page(tmp_path / "b.json").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "&lt;b&gt;{mark} on 1 kind of machine" in text


@pytest.mark.parametrize("other", ["<p>mine</p>", '<meta name="generator" content="autotune"> the page of a run'])
def test_another_file_of_that_name_is_left_alone(book, other):
    book.with_suffix(".html").write_text(other)
    with pytest.raises(ArgumentError, match="is no page of a book"):
        write_book_page(book)
    assert book.with_suffix(".html").read_text() == other
