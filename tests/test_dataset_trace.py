"""Which calls of `batch` feed a training, on stand-ins for datasets: what lies after them, and a shuffle of batches."""

import inspect
from types import SimpleNamespace

import pytest

from autotune.data.facts import Site
from autotune.script.dataset_trace import (
    DatasetCall,
    batch_calls,
    cacheable_map,
    calls_for,
    drops_remainder,
    examples_of,
    mean_batch,
    tag,
)
from autotune.script.interpose import shuffle_examples

SITE = Site(file="train.py", function="<module>", call="batch", order=0, line=7)


def dataset(kind, *inputs, elements=-2):
    """A dataset of this kind, as TensorFlow names its classes."""
    made = type(f"_{kind}Dataset", (), {})()
    made._inputs, made._functions, made.cardinality = lambda: list(inputs), list, lambda: elements
    return made


def batched(*inputs, given=16, used=None, drop_remainder=False):
    """The script's own `batch`."""
    made = dataset("Batch", *inputs)
    tag(made, DatasetCall("batch_size", SITE, given, used or given, drop_remainder=drop_remainder))
    return made


def mapped(source, line, *operations):
    """The script's own `map` at a line, of a function with these operations."""
    made = dataset("ParallelMap", source)
    tag(made, DatasetCall("num_parallel_calls", SITE.model_copy(update={"call": "map", "line": line}), 1, 1))
    nodes = [SimpleNamespace(op=name) for name in operations]
    graph = SimpleNamespace(node=nodes[:1], library=SimpleNamespace(function=[SimpleNamespace(node_def=nodes[1:])]))
    traced = SimpleNamespace(graph=SimpleNamespace(as_graph_def=lambda: graph))
    function = SimpleNamespace(function=traced, _func=None)
    made._functions = lambda: [function]
    return made


@pytest.mark.parametrize("kind", ["Take", "Skip", "Shard", "Window", "Batch", "PaddedBatch", "Unbatch"])
def test_what_counts_batches_stops_the_batch_size(kind):
    calls, why = batch_calls(dataset("Prefetch", dataset(kind, dataset("Map", batched(dataset("Range"))))))
    assert calls == []
    assert why == f"a `{kind.lower()}` after batch() in train.py, line 7 counts batches"
    calls, why = batch_calls(batched(dataset(kind, dataset("TensorSlice"))))
    assert (len(calls), why) == (1, "")


def test_batches_that_are_numbered_stop_the_batch_size():
    numbered = dataset("Zip", dataset("Variant"), batched(dataset("TensorSlice")))
    calls, why = batch_calls(dataset("Map", numbered))
    assert calls == []
    assert "an `enumerate` or `zip` after batch() in train.py, line 7 counts batches" in why
    calls, why = batch_calls(dataset("Zip", batched(dataset("TensorSlice")), batched(dataset("TensorSlice"))))
    assert (len(calls), why) == (2, "")


def test_parts_with_batches_of_other_sizes_keep_them():
    both = dataset("Concatenate", batched(dataset("Range"), given=8), batched(dataset("Range"), given=16))
    assert batch_calls(both) == ([], "its parts are batched by different sizes")
    assert batch_calls(dataset("Range")) == ([], "no `batch()` of the script's feeds the training")


def test_the_nearest_call_comes_first_and_shared_parts_once():
    shared = dataset("Range")
    tag(shared, DatasetCall("num_parallel_calls", SITE, 1, 1))
    last = dataset("Zip", shared, shared)
    tag(last, DatasetCall("num_parallel_calls", SITE, 2, 2))
    assert [call.given for call in calls_for(last, "num_parallel_calls")] == [2, 1]


@pytest.mark.parametrize(("used", "buffer"), [(48, 2), (8, 12), (16, 6), (1024, 1)])
def test_a_shuffle_of_batches_holds_as_many_examples_as_before(used, buffer):
    def shuffle(self, buffer_size, seed=None):
        return buffer_size

    def called(data):
        bound = inspect.signature(shuffle).bind(data, 6, seed=1)
        return shuffle_examples(shuffle, SITE, bound)

    assert called(dataset("Map", batched(dataset("Range"), used=used))) == buffer
    assert called(dataset("Range")) == 6


def test_examples_are_counted_before_they_are_batched():
    examples = dataset("TensorSlice", elements=100)
    assert examples_of(dataset("Prefetch", dataset("Map", batched(examples))), 16) == 100
    assert examples_of(dataset("Repeat", batched(examples)), 16) is None
    assert examples_of(batched(dataset("Generator")), 16) is None
    whole = dataset("LegacyBatch", dataset("Generator"), elements=6)  # as an older script's own class
    assert examples_of(whole, 16) is None
    tag(whole, DatasetCall("batch_size", SITE, 16, 16, drop_remainder=True))
    assert examples_of(whole, 16) == 96


def test_the_last_batch_of_an_epoch_may_be_smaller():
    examples = dataset("TensorSlice", elements=100)
    assert mean_batch(dataset("Repeat", batched(examples)), 16) == pytest.approx(100 / 7)
    assert mean_batch(batched(examples, drop_remainder=True), 16) == 16.0
    assert mean_batch(batched(dataset("Generator")), 16) == 16.0
    assert drops_remainder(dataset("Map", batched(examples, drop_remainder=True)))
    assert not drops_remainder(batched(examples))


def test_the_last_map_whose_results_stay_may_be_cached():
    plain = mapped(mapped(dataset("TensorSlice"), 3, "Cast"), 4, "Mul", "Add")
    assert cacheable_map(batched(dataset("Shuffle", plain)))[0].line == 4
    for operations in (
        ("RandomUniform",),
        ("Mul", "StatelessRandomUniformV2"),
        ("EagerPyFunc",),
        ("AssignAddVariableOp",),
    ):
        assert cacheable_map(batched(mapped(plain, 5, *operations)))[0].line == 4
    assert cacheable_map(mapped(dataset("Shuffle", plain), 5, "Mul"))[0].line == 4
    none, why = cacheable_map(mapped(dataset("Shuffle", dataset("TensorSlice")), 5, "Mul"))
    assert none is None
    assert "comes before a shuffle" in why
    assert cacheable_map(dataset("Cache", plain)) == (None, "the script's pipeline has a cache already")
