"""What is slow as a script is written, on stand-ins for datasets, layers and optimizers."""

from types import SimpleNamespace

import pytest
from test_dataset_trace import SITE, batched, dataset, mapped

from autotune.script.dataset_trace import DatasetCall, tag
from autotune.script.slow_parts import slow_parts_of_input, slow_parts_of_step


def of_input(made, **given):
    """What is said of a pipeline."""
    return [part.what for part in slow_parts_of_input(made, {"num_parallel_calls": (SITE,)}, given, ".")]


def test_finds_python_serial_maps_and_shuffled_batches():
    python = batched(mapped(dataset("TensorSlice"), 12, "Cast", "EagerPyFunc"))
    assert of_input(python) == ["Python code in a generator or py_function makes the examples, on one core at a time"]
    assert of_input(batched(mapped(dataset("Range"), 12, "Cast")), num_parallel_calls=0) == [f"{SITE} runs serially"]
    assert of_input(dataset("Shuffle", batched(dataset("Range"))))[0].startswith("shuffle() comes after batch()")
    assert of_input(batched(dataset("Shuffle", mapped(dataset("Range"), 12, "Cast"))), num_parallel_calls=4) == []
    moved = [*slow_parts_of_input(None, {"batched_map": (SITE,)}, {"batched_map": False}, ".")]
    assert [(part.what, part.knob) for part in moved] == [(f"{SITE} is called once per example", "batched_map")]
    assert [part.knob for part in slow_parts_of_input(None, {}, {"workers": 1}, ".")] == ["workers"]
    windows = dataset("FlatMap", dataset("Window", dataset("TensorSlice")))
    tag(windows, DatasetCall("cache", SITE.model_copy(update={"call": "flat_map"}), False, False))
    (part,) = slow_parts_of_input(batched(windows), {}, {"cache": False}, ".")
    assert part.what == "flat_map() in train.py, line 7 makes its elements anew in each epoch"


class Embedding(SimpleNamespace):
    """A stand-in for Keras's."""


class SGD(SimpleNamespace):
    """The same."""


@pytest.mark.parametrize(
    ("rows", "optimizer", "found"),
    [
        (200_000, SGD(momentum=0.9), True),
        (200_000, SimpleNamespace(), True),
        (200_000, SGD(momentum=0.0), False),
        (100, SimpleNamespace(), False),
    ],
)
def test_an_optimizer_with_moments_updates_all_rows_of_a_table(rows, optimizer, found):
    table = Embedding(name="users", input_dim=rows, output_dim=64)
    said = [part.what for part in slow_parts_of_step("", [table], [optimizer], None)]
    assert said == (["the optimizer updates all 200,000 rows of users, 49 MiB, in each step"] if found else [])


def test_a_function_that_stays_eager_is_named_with_its_reason():
    held = "train.py, line 9: value() calls print(): tf.function would run it only once, at trace time"
    compiled, other = slow_parts_of_step("train.py, line 3", [], [], None, [held])
    assert (compiled.knob, other.knob) == ("graph_step", "")
    assert other.what == f"a part of the step stays eager ({held})"


def test_lines_that_slow_each_step_down_are_named():
    lines = [(kind, f"train.py, line {line}") for line, kind in enumerate(("reads", "predicts", "iterates"))]
    reads, predicts, iterates = slow_parts_of_step("", [], [], None, (), lines)
    assert "(train.py, line 0)" in reads.what
    assert (predicts.what.partition(" makes")[0], predicts.limit) == ("predict() in train.py, line 1", "launch")
    assert iterates.what.startswith("iter() in train.py, line 2 starts the pipeline anew in each step")
