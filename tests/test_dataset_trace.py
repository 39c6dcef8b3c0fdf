"""Which calls of `batch` feed a training, on stand-ins for datasets: what lies after them, and a shuffle of batches."""

import inspect

import pytest

from autotune.data.facts import Site
from autotune.script.dataset_trace import DatasetCall, batch_calls, calls_for, tag
from autotune.script.interpose import shuffle_examples

SITE = Site(file="train.py", function="<module>", call="batch", order=0, line=7)


def dataset(kind, *inputs):
    """A dataset of this kind, as TensorFlow names its classes."""
    made = type(f"_{kind}Dataset", (), {})()
    made._inputs = lambda: list(inputs)
    return made


def batched(*inputs, given=16, used=None):
    """The script's own `batch`, or another knob's call."""
    made = dataset("Batch", *inputs)
    tag(made, DatasetCall("batch_size", SITE, given, used or given))
    return made


@pytest.mark.parametrize("kind", ["Take", "Skip", "Shard", "Window", "Batch", "PaddedBatch", "Unbatch"])
def test_what_counts_batches_stops_the_batch_size(kind):
    """After `batch` it would yield other examples with another size; before it, it counts examples."""
    calls, why = batch_calls(dataset("Prefetch", dataset(kind, dataset("Map", batched(dataset("Range"))))))
    assert calls == []
    assert why == f"a `{kind.lower()}` after batch() in train.py, line 7 counts batches"
    calls, why = batch_calls(batched(dataset(kind, dataset("TensorSlice"))))
    assert (len(calls), why) == (1, "")


def test_batches_that_are_numbered_stop_the_batch_size():
    """`enumerate` is a `zip` with a range; a `zip` of two batched datasets counts nothing."""
    numbered = dataset("Zip", dataset("Variant"), batched(dataset("TensorSlice")))
    calls, why = batch_calls(dataset("Map", numbered))
    assert calls == []
    assert "an `enumerate` or `zip` after batch() in train.py, line 7 counts batches" in why
    calls, why = batch_calls(dataset("Zip", batched(dataset("TensorSlice")), batched(dataset("TensorSlice"))))
    assert (len(calls), why) == (2, "")


def test_parts_with_batches_of_other_sizes_keep_them():
    """No single size stands for both."""
    both = dataset("Concatenate", batched(dataset("Range"), given=8), batched(dataset("Range"), given=16))
    assert batch_calls(both) == ([], "its parts are batched by different sizes")
    assert batch_calls(dataset("Range")) == ([], "no `batch()` of the script's feeds the training")


def test_the_nearest_call_comes_first_and_shared_parts_once():
    """A pipeline may read one dataset twice."""
    shared = dataset("Range")
    tag(shared, DatasetCall("num_parallel_calls", SITE, 1, 1))
    last = dataset("Zip", shared, shared)
    tag(last, DatasetCall("num_parallel_calls", SITE, 2, 2))
    assert [call.given for call in calls_for(last, "num_parallel_calls")] == [2, 1]


@pytest.mark.parametrize(("used", "buffer"), [(48, 2), (8, 12), (16, 6), (1024, 1)])
def test_a_shuffle_of_batches_holds_as_many_examples_as_before(used, buffer):
    """Three times larger batches need a third of them; a shuffle of examples stays as it is."""

    def shuffle(self, buffer_size, seed=None):
        return buffer_size

    def called(data):
        bound = inspect.signature(shuffle).bind(data, 6, seed=1)
        return shuffle_examples(shuffle, SITE, bound)

    assert called(dataset("Map", batched(dataset("Range"), used=used))) == buffer
    assert called(dataset("Range")) == 6
