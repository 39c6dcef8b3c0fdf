"""Find what makes a script slow as it is written: how its batches are made, and what its steps do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.data.facts import Site, SlowPart
from autotune.data.models import KnobValue
from autotune.data.printable import memory_size
from autotune.recipe.apply import kind_of
from autotune.recipe.tf_private import functions_of, operations_of
from autotune.script.call_sites import line_of_code
from autotune.script.changing_state import code_of
from autotune.script.dataset_trace import call_of, upstream
from autotune.training.pipeline import BATCHES

if TYPE_CHECKING:
    import tensorflow as tf

_FLOAT = 4  # bytes
RESTARTS = "iter() in {} starts the pipeline anew in each step: make one iterator before the loop"
LARGE_TABLE = 1 << 24  # bytes of an embedding above which a pass over all its rows takes a millisecond and more


def slow_parts_of_input(
    dataset: tf.data.Dataset | None, sites: Mapping[str, Sequence[Site]], given: Mapping[str, KnobValue], directory: str
) -> Iterator[SlowPart]:
    """Yield the slow parts of making batches, the worst first."""
    parts = [] if dataset is None else list(upstream(dataset))
    for part in parts:
        if any("PyFunc" in name for name in operations_of(part)):
            code = [found for function in functions_of(part) for found in code_of(function._func)]
            where = f"{line_of_code(code[0], directory)}, makes" if code else "a generator or py_function makes"
            yield SlowPart(what=f"Python code in {where} the examples, on one core at a time", limit="input")
    if "batched_map" in given:
        what = f"{sites['batched_map'][0]} is called once per example"
        yield SlowPart(what=what, limit="input", knob="batched_map")
    for call in (found for part in parts if kind_of(part) == "FlatMap" and (found := call_of(part))):
        if "cache" in given:
            yield SlowPart(what=f"{call.site} makes its elements anew in each epoch", limit="input", knob="cache")
    if given.get("num_parallel_calls") == 0 and sites.get("num_parallel_calls"):
        for site in sites["num_parallel_calls"]:
            yield SlowPart(what=f"{site} runs serially", limit="input", knob="num_parallel_calls")
    if given.get("workers") == 1:
        yield SlowPart(what="one worker makes the batches of the PyDataset", limit="input", knob="workers")
    for place, part in enumerate(parts):
        if kind_of(part) == "Shuffle" and any(kind_of(source) in BATCHES for source in parts[place + 1 :]):
            what = "shuffle() comes after batch(): it moves whole batches, and the same examples stay together"
            yield SlowPart(what=what, limit="input")


def slow_parts_of_step(
    eager: str,
    layers: Iterable[Any],
    optimizers: Iterable[Any],
    compiled_at: Site | None,
    held: Iterable[str] = (),
    slow_lines: Iterable[tuple[str, str]] = (),
) -> Iterator[SlowPart]:
    """Yield the slow parts of the step, the worst first.

    `eager`: how its operations run by themselves, if they do; `held`: why other functions of the step stay eager;
    `slow_lines`: see `LoopWatch.slow_lines`.
    """
    if eager:
        yield SlowPart(what=f"the step runs eagerly ({eager})", limit="launch", knob="graph_step")
    for why in held:
        yield SlowPart(what=f"a part of the step stays eager ({why})", limit="launch")
    for kind, line in slow_lines:
        what = {
            "reads": f"the loop reads a tensor in each step ({line}): no step is launched before the last has ended",
            "predicts": f"predict() in {line} makes a pipeline and a loop for each step: call the model itself",
            "iterates": RESTARTS.format(line),
        }[kind]
        yield SlowPart(what=what, limit="launch")
    plain_sgd = all(type(rule).__name__ == "SGD" and not getattr(rule, "momentum", 0) for rule in optimizers)
    where = "" if compiled_at is None else f" ({compiled_at})"
    for layer in () if plain_sgd else layers:  # which alone updates the rows of a batch only
        rows, size = getattr(layer, "input_dim", 0), _FLOAT * getattr(layer, "output_dim", 0)
        if type(layer).__name__ == "Embedding" and rows * size >= LARGE_TABLE:
            what = f"the optimizer updates all {rows:,} rows of {layer.name}, {memory_size(rows * size)}, in each step"
            yield SlowPart(what=what + where, limit="memory_bandwidth")
