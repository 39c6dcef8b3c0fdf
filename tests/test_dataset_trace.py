"""Which calls of `batch` feed a training, on stand-ins for datasets: what lies after them, and a shuffle of batches."""

import inspect
from types import SimpleNamespace

import pytest

from autotune.data.facts import Site
from autotune.script import dataset_trace
from autotune.script.dataset_trace import (
    DatasetCall,
    batch_calls,
    cacheable_map,
    calls_for,
    drops_remainder,
    examples_of,
    find_cache,
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
    tag(
        made,
        DatasetCall("num_parallel_calls", SITE.model_copy(update={"call": "map", "line": line, "order": line}), 1, 1),
    )
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


def cached_line(made):
    """The line of the map that may be cached; why there is none."""
    _, call, why = cacheable_map(made)
    return why if call is None else call.site.line


def test_the_last_map_whose_results_stay_may_be_cached():
    plain = mapped(mapped(dataset("TensorSlice"), 3, "Cast"), 4, "Mul", "ReadVariableOp", "StatefulPartitionedCall")
    assert cached_line(batched(dataset("Shuffle", plain))) == 4
    for operation in ("RandomUniform", "StatelessRandomUniformV2", "EagerPyFunc", "AssignAddVariableOp"):
        assert cached_line(batched(mapped(plain, 5, "Mul", operation))) == 4
    for stateful in ("TruncatedNormal", "RngReadAndSkip", "SampleDistortedBoundingBoxV2", "NoSuchOperation"):
        assert cached_line(batched(mapped(plain, 5, "Mul", stateful))) == 4
    assert cached_line(mapped(dataset("Shuffle", plain), 5, "Mul")) == 4
    assert cached_line(dataset("Cache", plain)) == "the script's pipeline has a cache already"


def test_a_flat_map_of_windows_may_be_cached():
    windows = mapped(dataset("Window", dataset("TensorSlice")), 4, "BatchDatasetV2")
    windows.__class__.__name__ = "_FlatMapDataset"
    assert cached_line(batched(mapped(dataset("Shuffle", windows), 5, "StridedSlice"))) == 4
    random = mapped(dataset("Window", dataset("TensorSlice")), 4, "ShuffleDatasetV3")
    random.__class__.__name__ = "_FlatMapDataset"
    assert "comes before a shuffle" in cached_line(batched(random))
    (captures,) = windows._functions()
    captures.function.captured_inputs = [SimpleNamespace(dtype=SimpleNamespace(name="variant"))]
    assert "comes before a shuffle" in cached_line(batched(windows)), "another dataset, which may be random"


@pytest.mark.parametrize("source", ["Shuffle", "Random", "Generator", "Interleave", "Repeat"])
def test_what_differs_above_a_map_stops_a_cache(source):
    beside = dataset("Zip", dataset("TensorSlice"), dataset("Take", dataset(source)))
    assert "comes before a shuffle" in cached_line(mapped(beside, 5, "Mul"))
    reads = mapped(dataset("TensorSlice"), 4, "TFRecordDatasetV2")
    assert cached_line(dataset("Zip", reads, dataset(source))) == 4


def test_a_call_that_makes_a_random_map_too_is_not_cached():
    same = mapped(dataset("TensorSlice"), 4, "Mul")
    assert "comes before a shuffle" in cached_line(mapped(same, 4, "RandomUniform"))


@pytest.mark.parametrize(
    ("again", "count", "room", "found"),
    [
        ([b"12"], 500, 0, (4, 0, "")),
        ([b"13"], 500, 0, "differ when they are read twice"),
        ([b"12"], None, 0, "elements is not known"),
        ([b"12"], 1 << 60, 0, "neither memory nor a local disk has room"),
        ([b"12"], 1 << 60, 1 << 62, (4, 2 << 60, "")),
    ],
)
def test_a_cache_needs_equal_elements_and_room(monkeypatch, again, count, room, found):
    readings = iter([[[b"12"]], [again]])
    monkeypatch.setattr(dataset_trace, "_contents", lambda part, seconds: next(readings))
    monkeypatch.setattr(dataset_trace, "count_data", lambda source, **_: SimpleNamespace(examples=count))
    made = mapped(dataset("TensorSlice"), 4, "Mul")
    made.take = lambda number: made
    sites, size, why = find_cache(batched(made), room)
    if isinstance(found, tuple):
        assert (sites[0].line, size, why) == found
    else:
        assert (sites, found in why) == ((), True)
    assert "raises StopIteration" in find_cache(batched(made), room)[2], "as an element that is left out later"
