"""Private names of TensorFlow, which another version may lack, and both packages as this process uses them.

A missing name is logged once, in the trial's log, and the trial continues without it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from autotune.machine.gpu import has_gpu_files
from autotune.space.keras_in_use import keras_module

if TYPE_CHECKING:
    import keras
    import tensorflow as tf
else:

    class _Lazy:
        def __init__(self, find: Callable[[], Any]) -> None:
            self._find = find

        def __getattr__(self, name: str) -> Any:
            return getattr(self._find(), name)

    keras, tf = _Lazy(keras_module), _Lazy(lambda: importlib.import_module("tensorflow"))
__all__ = ["keras", "tf"]
_READS = re.compile(
    "Placeholder|Read.*|LookupTable(Find|Size).*|ResourceGather.*|.*PartitionedCall|If|While|Case|Assert"
)
"""Operations that TensorFlow calls stateful, though they only read, call or check."""


_STATELESS = {
    "random_standard_normal": "StatelessRandomNormal",
    "random_uniform": "StatelessRandomUniform",
    "random_uniform_int": "StatelessRandomUniformInt",
    "truncated_normal": "StatelessTruncatedNormal",
    "multinomial": "StatelessMultinomial",
}
"""TensorFlow's functions that draw, and operations that draw the same from a seed alone."""


@functools.cache
def say_missing(name: str, consequence: str) -> None:
    """Log that these versions have no such name."""
    versions = f"TensorFlow {tf.__version__} and Keras {keras.__version__}"
    logging.getLogger("autotune").warning("autotune: %s have no %s: %s", versions, name, consequence)


def tracing_seconds() -> Callable[[], float] | None:
    """Return a reader of the seconds that TensorFlow has spent on tracing functions; None where it does not tell."""
    try:
        from tensorflow.python.eager.polymorphic_function import tracing_compilation

        cell = tracing_compilation._graph_building_time_counter.get_cell()
        cell.value()
    except (ImportError, AttributeError):
        say_missing("_graph_building_time_counter", "retracing is not watched")
        return None
    return lambda: float(cell.value())


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Return the datasets that a dataset reads from; empty where they cannot be seen."""
    try:
        return list(dataset._inputs())
    except AttributeError:
        say_missing("Dataset._inputs", "caches are not filled, shuffle buffers are not found")
        return []


def attribute_of(dataset: tf.data.Dataset, name: str) -> Any:
    """Return an argument of a dataset (`_buffer_size`, `_count`, `_filename`) as a Python value; None if unknown."""
    value = getattr(dataset, name, None)
    if value is None:
        say_missing(f"{type(dataset).__name__}.{name}", "the pipeline is trained on as it is")
        return None
    value = value.numpy() if hasattr(value, "numpy") else value
    value = value.item() if hasattr(value, "item") else value
    return value.decode() if isinstance(value, bytes) else value


def computing_layers(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Yield the layers that compute something: not inputs, and not Keras's own models, which only call their layers."""
    only_calls = isinstance(layer, keras.Model) and type(layer).call.__module__.startswith(("keras.", "tf_keras."))
    if not only_calls and not isinstance(layer, keras.layers.InputLayer):
        yield layer
    for inner in getattr(layer, "layers", ()):
        yield from computing_layers(inner)


def functions_of(dataset: tf.data.Dataset) -> list[Any]:
    """Return the functions of a dataset, as `tf.data` wraps them; empty where they cannot be seen."""
    try:
        return list(dataset._functions())
    except AttributeError:
        say_missing("Dataset._functions", "no map is known to be deterministic, or to read what changes")
        return []


def operations_in(graph: Any) -> set[str]:
    """Return the kinds of operations in a graph and the functions that it calls."""
    definition = graph.as_graph_def()
    inner = [node for function in definition.library.function for node in function.node_def]
    return {node.op for node in [*inner, *definition.node]}


def draws_constants(graph: Any) -> bool:
    """Return whether a graph may draw the same random numbers in each call: from a seed that no variable holds."""
    definition = graph.as_graph_def()
    for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
        known = {node.name: node for node in nodes}
        for drawing in (node for node in nodes if "Stateless" in node.op and "Random" in node.op):
            if len(drawing.input) < 2:  # it prepares a seed
                continue
            waiting, seen, reads = list(drawing.input[1:]), set[str](), False  # its first input is a shape
            while waiting:
                name = waiting.pop().lstrip("^").partition(":")[0]
                if name not in seen and (node := known.get(name)) is not None:
                    seen.add(name)
                    reads |= node.op == "ReadVariableOp"
                    waiting += node.input
            if not reads:
                return True
    return False


def operations_of(dataset: tf.data.Dataset) -> set[str]:
    """Return the kinds of operations in the functions of a dataset; empty where they cannot be seen."""
    return set[str]().union(*(operations_in(function.function.graph) for function in functions_of(dataset)))


def effects_of(dataset: tf.data.Dataset) -> list[str]:
    """Return the operations in a dataset's functions that draw, write or run Python; `?` where none can be seen."""
    try:
        from tensorflow.python.framework import op_def_registry
    except ImportError:
        say_missing("op_def_registry", "no map is cached, or moved behind batch()")
        return ["?"]

    def acts(name: str) -> bool:
        known = op_def_registry.get(name)
        return "Random" in name or ((known is None or known.is_stateful) and not _READS.fullmatch(name))

    return sorted(filter(acts, operations_of(dataset) or {"?"}))


def is_seeded() -> bool:
    """Return whether a seed is set, so that TensorFlow draws the same numbers in each run; True if unknown."""
    try:
        from tensorflow.python.eager.context import global_seed
    except ImportError:
        say_missing("global_seed", "a script is taken to set it")
        return True
    return global_seed() is not None


@contextlib.contextmanager
def patched_random_ops() -> Iterator[list[None]]:
    """Replace TensorFlow's random ops with fixed-seed ones; yield a list that grows by one per draw."""
    from tensorflow.python.ops import gen_random_ops

    draws = list[None]()

    def draw(function: Callable[..., Any], stateless: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        given = inspect.signature(function).bind(*arguments, **named).arguments
        draws.append(None)
        for name in ("seed", "seed2", "name"):
            given.pop(name, None)
        return stateless(**given, seed=[1, len(draws)])

    usual = {name: getattr(gen_random_ops, name) for name in _STATELESS if hasattr(gen_random_ops, name)}
    for name, function in usual.items():
        setattr(gen_random_ops, name, functools.partial(draw, function, getattr(tf.raw_ops, _STATELESS[name])))
    try:
        yield draws
    finally:
        for name, function in usual.items():
            setattr(gen_random_ops, name, function)


def sums_by_collectives(strategy: tf.distribute.Strategy) -> bool:
    """Return whether a strategy reduces by TensorFlow's collectives, its default; True where that cannot be seen."""
    operations = getattr(strategy.extended, "_cross_device_ops", None)
    return operations is None or type(operations).__name__ == "CollectiveAllReduce"


def workers_of(strategy: tf.distribute.Strategy) -> int:
    """Return the number of processes that a strategy spans; 1 where that cannot be seen."""
    return int(getattr(strategy.extended, "_num_workers", 1))


def keep_collectives() -> None:
    """Have the next strategy of several workers use the running server: starting another aborts the others' calls."""
    try:
        from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceStrategy
        from tensorflow.python.eager.context import context

        CollectiveAllReduceStrategy._collective_key_base += 1_000  # no keys of the last one
        context().enable_collective_ops = lambda _: None
    except (ImportError, AttributeError):
        say_missing("CollectiveAllReduceStrategy._collective_key_base", "a training that starts again may fail")


def name_of_strategy(strategy: tf.distribute.Strategy) -> str:
    """Return the name by which users create a strategy."""
    own = type(strategy).__name__
    return "MultiWorkerMirroredStrategy" if own.startswith(("CollectiveAllReduce", "_CollectiveAllReduce")) else own


def patch_mirrored_variables() -> None:
    """Have `float()` and `int()` read a strategy's variable, such as a learning rate, as they read any other."""
    try:
        from tensorflow.python.distribute.values import DistributedVariable
    except ImportError:
        say_missing("DistributedVariable", "a script that reads a weight as a number fails under a strategy")
        return
    for kind in (float, int):
        setattr(DistributedVariable, f"__{kind.__name__}__", lambda variable, kind=kind: kind(variable.numpy()))


def loop_classes(tf: Any) -> SimpleNamespace:
    """Return the classes that a training loop calls: of datasets, iterators, functions, strategies and tensors."""
    from tensorflow.python.data.ops import iterator_ops
    from tensorflow.python.distribute import distribute_lib, input_lib
    from tensorflow.python.framework import ops

    return SimpleNamespace(
        datasets=(tf.data.Dataset, input_lib.DistributedDataset, input_lib.DistributedDatasetsFromFunction),
        iterators=(iterator_ops.OwnedIterator, input_lib.DistributedIteratorBase),
        function=type(tf.function(lambda: None)),
        strategy=distribute_lib.StrategyBase,
        tensor=ops._EagerTensorBase,
    )


def runtime_starts() -> list[tuple[type, str]]:
    """Return the methods that start TensorFlow's runtime or CUDA; empty where another version has others."""
    try:
        from tensorflow.python.eager.context import Context

        starts = [(Context, Context.ensure_initialized.__name__)]
        if has_gpu_files():  # listing devices starts CUDA
            starts.append((Context, Context._initialize_physical_devices.__name__))
    except (ImportError, AttributeError):
        say_missing("Context.ensure_initialized", "each trial runs the script from its first line")
        return []
    return starts


FIRST_NUMBER = 1 << 20  # of those that TensorFlow counts: more than a script makes before it trains


def align_function_numbering() -> None:
    """Have the functions that are traced next get the same names in every process.

    TensorFlow numbers functions and tensors alike, and looks compiled programs up by a function's name.
    """
    try:
        from tensorflow.python.framework.ops import uid
    except ImportError:
        say_missing("ops.uid", "compiled programs are not found again")
        return
    while uid() < FIRST_NUMBER:
        pass


def with_stable_function_names(train_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a train function whose first call traces functions of the same names in every process."""
    is_first = True

    def call(iterator: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            align_function_numbering()
        return train_function(iterator)

    call.has_stable_names = True  # type: ignore[attr-defined]
    return call


def naming_callback(model: Any) -> Any:
    """Return a callback by which a `fit` finds what another process has compiled, see `with_stable_function_names`."""

    def begin(logs: Any) -> None:
        if not hasattr(model.train_function, "has_stable_names"):  # as an earlier `fit` has left it
            model.train_function = with_stable_function_names(model.train_function)

    return keras.callbacks.LambdaCallback(on_train_begin=begin)
