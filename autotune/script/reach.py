"""Find out what reaches a script's training: its baseline, its call sites, and the knobs that have no effect."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.data.facts import NO_XLA, ScriptFacts, Site, Trains, WorkloadFacts, WorkloadReference
from autotune.data.models import KnobValue
from autotune.recipe import apply
from autotune.recipe.keras_api import keras_api
from autotune.recipe.tf_private import inputs_of, is_seeded, name_of_strategy, sums_by_collectives
from autotune.runtime.sources import directory_of, file_of, fingerprint_of_script, own_files
from autotune.script.batch_dependence import (
    count_of_loop,
    early_ends,
    find_batch_constant,
    find_counted_calls,
    held_steps,
    notes_on_batches,
)
from autotune.script.batched_map import find_batched_map
from autotune.script.call_sites import enclosing_ranges, is_called_in_loop, running_frames
from autotune.script.changing_state import READS_AHEAD, OwnSource
from autotune.script.dataset_trace import (
    batch_calls,
    calls_for,
    drops_remainder,
    find_cache,
    is_batched,
    is_endless,
    upstream,
)
from autotune.script.eager_steps import find_obstacle_of_fit
from autotune.script.fit_call import LOADING, VALIDATION_HINT, FitCall, honours_batch_size
from autotune.script.interpose import Wrappers
from autotune.script.loop_ends import StepLoop, find_step_loop
from autotune.script.loop_watch import LoopWatch
from autotune.script.sandbox import SideEffects
from autotune.script.settings import as_knob, given_values
from autotune.script.slow_parts import slow_parts_of_input, slow_parts_of_step
from autotune.space.configuration import ONE_STEP
from autotune.space.keras_in_use import keras_in_use
from autotune.space.knobs import ALLOW_PRECISION, AS_WRITTEN, KNOBS, PRECISION_KNOBS, STRATEGY_KNOBS, Device, Stage
from autotune.training.pipeline import BATCHES, batch_length

_XLA = [name for name in KNOBS if name == "jit_compile" or name.startswith("xla_")]
_OPTIONS = [name for name, knob in KNOBS.items() if knob.stage is Stage.OPTIONS]
_UNLOCK = "to tune it, use autotune.tuned(batch_size=N) wherever the script computes with the batch size"
_OWN_STRATEGY = "the script sets its own {}"
_OWN_SCOPE = (
    "a custom training loop needs these lines for several devices: `with strategy.scope():` around model and "
    "optimizer, strategy.experimental_distribute_dataset(dataset), and strategy.run(step, args=(batch,))"
)
_GIVE_DATASET = "pass a tf.data.Dataset to fit to tune this"
_UNCOUNTED = (
    "Keras 2 takes several steps per execution only with data of known cardinality; apply "
    "tf.data.experimental.assert_cardinality(N) to the dataset to tune this"
)
_ARRAYS = f"Keras batches arrays itself, and prefetches them; {_GIVE_DATASET}"
_NO_MAP = "no map() or interleave() of the script's feeds the training"
_NO_DATASET = "the training reads no tf.data.Dataset"
_NO_FUNCTION = (
    "no tf.function that updates weights is free of datasets and strategies; decorate the one-batch step with "
    "@tf.function"
)
_DATA = {
    "arrays": "the training data are arrays",
    "distributed": "the training data is a distributed dataset",
    "py_dataset": "the training data is a PyDataset",
    "generator": "the training data is a generator",
}


@dataclass(kw_only=True)
class ScriptContext:
    """The facts of a script apart from its training."""

    reference: WorkloadReference
    variables: dict[str, str]
    wrappers: Wrappers
    effects: SideEffects
    environment: dict[str, str]  # before the script runs
    before_seconds: float | None = None
    workers: int = 0  # that `TF_CONFIG` names for its strategy

    @property
    def directory(self) -> str:
        """The script's directory."""
        return directory_of(self.reference)

    @property
    def own_files(self) -> list[Path]:
        """The script's own source files."""
        return own_files(file_of(self.reference), Path(self.directory))


def facts_of_fit(
    call: FitCall, number: int, site: Site, context: ScriptContext, *, tunes_steps: bool = False
) -> WorkloadFacts:
    """Return the facts of the script's fit of that number. Raises `WorkloadError` where it cannot be tuned.

    `tunes_steps`: Keras has changed its steps per execution itself, and has settled.
    """
    import tensorflow as tf

    arguments = call.arguments
    if call.kind == "generator" and not arguments["steps_per_epoch"]:
        raise WorkloadError(
            f"{site}: is given a generator without steps_per_epoch, so its data cannot be read twice",
            hint="Give fit() steps_per_epoch, or a keras.utils.PyDataset or tf.data.Dataset instead.",
        )
    if call.validates_for_ever:
        raise WorkloadError(f"{site}: validation_data is infinite, so validation never ends", hint=VALIDATION_HINT)
    dataset, _ = call.training_dataset
    given = runtime_knobs()
    given["jit_compile"] = keras_api().jit_compile(context.wrappers.jit_compile)
    given["steps_per_execution"] = call.steps_per_execution
    given |= call.loading
    batch_size, optimizer = call.batch_size or batch_length(dataset), getattr(call.model, "optimizer", None)
    reasons = _not_reached_by_fit(call, dataset)
    eager, draws = _why_eager(context.wrappers.set_at, call.model), list[str]()
    if eager:
        source, layers = OwnSource(context.own_files, context.directory), call.model._flatten_layers()
        parts = tf.nest.flatten([getattr(call.model, name, None) for name in ("loss", "metrics", "optimizer")])
        parts = [part for part in (*layers, *parts) if hasattr(part, "__dict__")]
        held = find_obstacle_of_fit(parts, source, context.directory, _reseeds(context), draws)
        if held or tf.config.functions_run_eagerly():
            reasons |= dict.fromkeys((*_XLA, "steps_per_execution"), eager) | {"graph_step": held or eager}
        else:
            given["graph_step"] = False
        if counted := find_counted_calls(context.own_files, call.model, context.directory):
            reasons.setdefault("batch_size", f"{counted} counts the calls of train_step, and reads that number")
    if why := held_steps(arguments["callbacks"], context.directory):
        reasons.setdefault("steps_per_execution", why)
    own = dataset if call.kind == "dataset" else None
    if call.kind == "py_dataset":  # Keras calls `on_epoch_end` while no batch is made
        kind = type(arguments["x"])
        why = OwnSource(context.own_files, context.directory).describe([kind.__getitem__, kind.on_epoch_end])
        reasons |= dict.fromkeys(LOADING if why else (), why)
    if "batch_size" not in reasons:
        given_at = [found.site for found in batch_calls(own)[0]] if own is not None else [site]
        losses = tf.nest.flatten(getattr(call.model, "loss", None))
        names = {loss.__name__ for loss in losses if hasattr(loss, "__code__")}
        if why := find_batch_constant(context.own_files, given_at, batch_size, context.directory, names):
            reasons["batch_size"] = f"{why}; {_UNLOCK}"
    return _facts(
        context,
        own,
        given,
        reasons,
        batch_size,
        validates=arguments["validation_data"] is not None or bool(arguments["validation_split"]),
        trains=Trains.FIT,
        fit=number,
        fit_site=site,
        compile_site=context.wrappers.compiled_at,
        epochs=call.epochs,
        ends_early=early_ends(arguments["callbacks"], call.model, context.own_files, context.directory),
        optimizers=() if optimizer is None else (optimizer,),
        layers=list(call.model._flatten_layers()),
        weights=call.model.variables if call.model.built else (),  # Keras 2 raises an exception before
        callbacks=arguments["callbacks"],
        eager=eager.partition(":")[0],
        tunes_steps=tunes_steps,
        redraws=draws[0] if draws and "graph_step" in given and is_seeded() else "",
    )


def facts_of_loop(watch: LoopWatch, examples: int, context: ScriptContext) -> WorkloadFacts:
    """Return the facts of a custom training loop. Raises `WorkloadError` where it cannot be tuned."""
    import tensorflow as tf

    dataset = watch.dataset if isinstance(watch.dataset, tf.data.Dataset) else None
    makes_batches = watch.why_unseen or "the script makes its batches itself"
    calls, why = batch_calls(dataset) if dataset is not None else ([], makes_batches)
    batch_size = calls[0].given if calls else 1 if watch.work_varies else examples
    if not batch_size:
        raise WorkloadError(
            f"{context.reference.shown}: cannot determine the number of examples per step",
            hint="Pass the batch as the step's first argument.",
        )
    directory = context.directory
    loop = watch.loop or find_step_loop(running_frames(), directory, is_batched)
    source = OwnSource(context.own_files, directory)
    parts = [*watch.layers.values(), *watch.optimizers.values()]
    steps, held = watch.eager.find_sites(source, parts, reseeds=_reseeds(context)) if watch.eager else ((), [])
    draws = watch.eager.draws if watch.eager and is_seeded() else []
    reasons = _not_reached_by_loop(watch, dataset)
    if how := _why_eager(context.wrappers.set_at):
        steps, reasons = (), reasons | dict.fromkeys((*_XLA, "graph_step"), how)
    elif steps:
        reasons = {name: why for name, why in reasons.items() if why != _NO_FUNCTION}
    elif held:
        reasons["graph_step"] = held[0]
    if watch.reads_several:
        why = why or "each step reads several iterators, whose batches may belong together"
    why = why or count_of_loop(loop, dataset)
    why = why or find_batch_constant(context.own_files, [call.site for call in calls], batch_size, directory)
    return _facts(
        context,
        dataset,
        runtime_knobs() | {"jit_compile": watch.jit_compile} | ({"graph_step": False} if steps else {}),
        reasons | ({"batch_size": f"{why}; {_UNLOCK}"} if why else {}),
        batch_size,
        steps=steps,
        eager=" and ".join(f"{site.file}, line {site.line}" for site in steps)
        or how.partition(":")[0]
        or next(iter(held), ""),
        held=held if steps else (),
        slow_lines=watch.slow_lines(),
        optimizers=tuple(watch.optimizers.values()),
        layers=list(watch.layers.values()),
        weights=watch.trained_weights(),
        loop=loop,
        trains=Trains.LOOP,
        step_function=watch.step_function,
        work_varies=watch.work_varies,
        updaters=watch.updaters,
        redraws=next(iter(draws), ""),
        epochs_range=_epochs_range(watch, context.reference),
    )


def _reseeds(context: ScriptContext) -> bool:
    """Return whether the script sets TensorFlow's seed in a loop: eager operations then draw the same numbers again."""
    return any(is_called_in_loop(context.own_files, name) for name in ("set_seed", "set_random_seed"))


def _facts(
    context: ScriptContext,
    dataset: Any,
    given: dict[str, KnobValue],
    reasons: dict[str, str],
    batch_size: int,
    *,
    optimizers: Sequence[Any],
    layers: Sequence[Any],
    weights: Sequence[Any],
    callbacks: Any = (),
    eager: str = "",
    held: Sequence[str] = (),
    slow_lines: Iterable[tuple[str, str]] = (),
    loop: StepLoop | None = None,
    steps: tuple[Site, ...] = (),
    validates: bool = False,
    **more: Any,
) -> WorkloadFacts:
    """Return the facts of a training.

    `given`: the knobs as the script leaves them, except those of the dataset; `reasons`: why knobs do not reach the
    training; `weights`: those that are trained, and more variables of the model; `steps`: eager functions that can be
    compiled; `held`: why others cannot be; `slow_lines`: see `LoopWatch`; `more`: what only one way of training has.
    """
    file, settings = file_of(context.reference), context.reference.script
    calls = {knob: [] if dataset is None else calls_for(dataset, knob) for knob in ("num_parallel_calls", "prefetch")}
    given |= {knob: _common(as_knob(call.given) for call in found) for knob, found in calls.items()}
    calls["batch_size"] = [] if dataset is None else batch_calls(dataset)[0]
    sites = {knob: tuple({c.site.key: c.site for c in found}.values()) for knob, found in calls.items() if found}
    sites |= {"graph_step": steps} if steps else {}
    if "num_parallel_calls" not in sites:
        reasons.setdefault("num_parallel_calls", _NO_MAP)
    reasons |= _set_by_script(context)
    if settings is None or not settings.allow_precision:
        reasons |= _chosen_precision(context.wrappers.set_at, [*layers, *weights])
    trained = itertools.chain(weights, *map(keras_api().optimizer_variables, optimizers))
    edits = _edits_of_pipeline(context, dataset, given, sites, reasons, trained, batch_size, counts="epochs" in more)
    slow = [
        *slow_parts_of_input(dataset, sites, given, context.directory),
        *slow_parts_of_step(eager, layers, optimizers, context.wrappers.compiled_at, held, slow_lines),
    ]
    notes = notes_on_batches(dataset, loop, callbacks, optimizers, context.own_files, context.directory)
    script = ScriptFacts(
        baseline={**given, "batch_size": batch_size},
        sites=sites,
        not_reached={name: why for name, why in reasons.items() if name not in given_values},
        slow_parts=tuple(slow),
        left_out=tuple(context.effects.left_out),
        before_seconds=context.before_seconds or 0.0,
        variables=context.variables,
        workers=context.workers,
        skip_cells=None if settings is None else settings.skip_cells,
        batch_given_as=str(sites["batch_size"][0]) if "batch_size" in sites else "",
        schedule=next(filter(None, map(_schedule_of, optimizers)), None),
        batch_notes=() if "batch_size" in reasons else tuple(notes),
        **edits,
        **more,
    )
    return WorkloadFacts(
        name=file.stem if file.stem != "__main__" else file.parent.name,
        batch_size=batch_size,
        baseline=given,
        batched=True,
        drop_remainder=dataset is not None and drops_remainder(dataset),
        takes_config="num_parallel_calls" in sites,
        validates=validates,
        fingerprint=fingerprint_of_script(context.reference),
        keras=keras_in_use(),
        script=script,
    )


def _edits_of_pipeline(
    context: ScriptContext,
    dataset: Any,
    given: dict[str, KnobValue],
    sites: dict[str, tuple[Site, ...]],
    reasons: dict[str, str],
    trained: Iterable[Any],
    batch_size: int,
    *,
    counts: bool,
) -> dict[str, Any]:
    """Find where `cache` and `batched_map` reach the pipeline, and parts that are not read ahead; return facts of both.

    `trained`: variables that the training writes; `counts`: the epochs are known. Adds to `given`, `sites`, `reasons`.
    """
    if dataset is None:
        reasons.setdefault("batched_map", _NO_DATASET)
        return {}
    settings, source = context.reference.script, OwnSource(context.own_files, context.directory)
    changing = source.describe_dataset(dataset, trained)
    reasons |= dict.fromkeys(READS_AHEAD if changing else (), changing)
    why = changing or ("" if counts else "a custom training loop does not say how often it reads its data")
    room = 0 if settings is None else settings.disk_bytes
    has_map = "num_parallel_calls" in sites or calls_for(dataset, "cache")
    found = {"cache": ((), 0, why) if why else find_cache(dataset, room)} if has_map else {}
    found["batched_map"] = find_batched_map(dataset, batch_size, source.describe) if not changing else ((), 0, changing)
    for name, (reached, _, why_not) in found.items():
        if reached:
            given[name], sites[name] = False, reached
        else:
            reasons[name] = why_not
    return {
        "vectorized": bool(found["batched_map"][1]),
        "cache_file_bytes": found["cache"][1] if "cache" in found else 0,
    }


def _schedule_of(optimizer: Any) -> str | None:
    """Return the name of an optimizer's learning-rate schedule; None without one."""
    schedule = getattr(optimizer, "_learning_rate", None)
    if schedule is None:  # a legacy optimizer of Keras 2
        schedule = getattr(optimizer, "_hyper", {}).get("learning_rate")
    return type(schedule).__name__ if callable(schedule) and hasattr(schedule, "get_config") else None


def _common(values: Iterable[KnobValue]) -> KnobValue:
    """Return the value that all calls were given; 0 without any."""
    found = list({repr(value): value for value in values}.values())
    return AS_WRITTEN if len(found) > 1 else found[0] if found else 0


def _epochs_range(watch: LoopWatch, reference: WorkloadReference) -> Site | None:
    """Return the `range()` that drives the loop over epochs, where the script's own file has one."""
    file = str(reference.file if reference.is_notebook else sys.modules["__main__"].__file__)
    place, stack = watch.place, traceback.walk_stack(sys._getframe())
    lines = [line for frame, line in stack if frame.f_code.co_filename == file]
    if place is not None and place[0] == file and lines:
        lines[0] = place[1]  # where the data is read from its beginning
    found = [site for line in lines for site in enclosing_ranges(file, line, directory_of(reference))]
    if not found:
        return None
    return found[0] if place is not None else found[-1]


def runtime_knobs() -> dict[str, KnobValue]:
    """Return the knobs that act before a model is built, as they are in force."""
    import tensorflow as tf

    device = Device.GPU if tf.config.list_physical_devices("GPU") else Device.CPU
    found = {name: value for name, value in apply.in_force().items() if device in KNOBS[name].devices}
    return {name: value for name, value in found.items() if value in KNOBS[name].domain}


# ------------------------------------------------------------------------------------------ what does not reach it


def _set_by_script(context: ScriptContext) -> dict[str, str]:
    """Return why knobs have no effect whose environment variables the script sets."""
    variables = {name: knob.variable or "" for name, knob in KNOBS.items() if knob.stage is Stage.START}
    return {
        name: f"the script sets {variable} itself; remove that line to tune it"
        for name, variable in variables.items()
        if variable in context.variables or os.environ.get(variable) != context.environment.get(variable)
    }


def _chosen_precision(set_at: Mapping[str, Site], typed: Iterable[Any]) -> dict[str, str]:
    """Return why knobs of precision do not vary: the script sets them, or some layers and weights have own dtypes."""
    import tensorflow as tf

    sites = {"precision": set_at["floatx"], **set_at} if "floatx" in set_at else set_at
    reasons = {name: f"{sites[name]} chooses it; {ALLOW_PRECISION}" for name in PRECISION_KNOBS if name in sites}
    policy = str(apply.in_force()["precision"])
    usual = {policy.removeprefix("mixed_"), "float32" if policy.startswith("mixed_") else policy}
    for part in typed:
        dtype = getattr(part, "compute_dtype", None) or part.dtype  # a policy of its own, or a variable's type
        if dtype and tf.as_dtype(dtype).is_floating and (name := tf.as_dtype(dtype).name) not in usual:
            reasons.setdefault("precision", f"{part.name} has the dtype {name}; {ALLOW_PRECISION}")
    return reasons


def _why_eager(set_at: Mapping[str, Site], model: Any = None) -> str:
    """Return how the script has its steps run without a compiled function; empty where it does not."""
    import tensorflow as tf

    everywhere = tf.config.functions_run_eagerly()
    if not everywhere and not getattr(model, "run_eagerly", False):
        return ""
    name = "run_functions_eagerly" if everywhere else "run_eagerly"
    shown = "tf.config.run_functions_eagerly(True)" if everywhere else "compile(run_eagerly=True)"
    site = set_at.get(name)
    where = f"the model's {name} is set" if site is None else f"{shown}, {site.file}, line {site.line}"
    return f"{where}: each operation runs by itself; remove it to tune this"


def _not_reached_by_loop(watch: LoopWatch, dataset: Any) -> dict[str, str]:
    reasons = {"steps_per_execution": "a custom training loop calls each step itself"}
    reasons |= dict.fromkeys(
        ("persistent_iterator", "prefetch_to_device"), "a custom training loop makes its own iterators"
    )
    own_strategy = _OWN_STRATEGY.format(watch.strategy) if watch.strategy else _OWN_SCOPE
    reasons |= dict.fromkeys(STRATEGY_KNOBS, own_strategy)
    if watch.step_function is None:
        reasons |= dict.fromkeys(_XLA, _NO_FUNCTION)
    if dataset is None:
        why = watch.why_unseen or f"{_NO_DATASET}; read batches from one to tune this"
        reasons |= dict.fromkeys(("prefetch", "num_parallel_calls", "batched_map", "cache", *_OPTIONS), why)
    elif watch.by_call or watch.distributed:
        inside = "the step reads its batches itself, from the iterator that it is given"
        distributed = "the script hands its dataset to its tf.distribute strategy"
        names = _OPTIONS if calls_for(dataset, "prefetch") else ("prefetch", *_OPTIONS)
        reasons |= dict.fromkeys(names, inside if watch.by_call else distributed)
    return reasons


def _not_reached_by_fit(call: FitCall, dataset: Any) -> dict[str, str]:
    import tensorflow as tf

    why_not = _batch_size_not_reached(call, dataset)
    reasons = {"batch_size": f"{why_not}; {_UNLOCK}"} if why_not else {}
    if call.kind == "arrays":
        reasons |= dict.fromkeys(("prefetch", "num_parallel_calls"), _ARRAYS)
    elif call.kind != "dataset":
        why = f"{_DATA[call.kind]}, and no tf.data.Dataset; {_GIVE_DATASET}"
        reasons |= dict.fromkeys(("prefetch", "persistent_iterator", "prefetch_to_device", *_OPTIONS), why)
    elif call.arguments["class_weight"]:
        reasons["prefetch_to_device"] = (
            "Keras maps the batches once more for class_weight, on the CPU; have map() add each example's weight"
        )
    if call.arguments["steps_per_epoch"]:
        reasons["persistent_iterator"] = "fit is given steps_per_epoch, and keeps its iterator already"
    elif call.kind == "arrays" and not keras_api().rereads_arrays:
        reasons["persistent_iterator"] = "Keras 2 reads arrays by one iterator already"
    for name, count in (("x", "steps_per_epoch"), ("validation_data", "validation_steps")):
        data, is_counted = call.arguments[name], not keras_api().counts_steps or call.arguments[count]
        if not is_counted and isinstance(data, tf.data.Dataset) and int(data.cardinality()) < 0:
            reasons["steps_per_execution"] = _UNCOUNTED
    strategy = call.model.distribute_strategy
    if strategy is not tf.distribute.get_strategy() or tf.distribute.has_strategy():
        reasons |= dict.fromkeys(_XLA, NO_XLA)
        reasons["prefetch_to_device"] = "a tf.distribute strategy copies the batches itself"
        reasons |= dict.fromkeys(STRATEGY_KNOBS, _OWN_STRATEGY.format(name_of_strategy(strategy)))
        if strategy.num_replicas_in_sync > 1 and sums_by_collectives(strategy):
            reasons["steps_per_execution"] = ONE_STEP
    elif call.kind != "dataset":
        reasons["per_replica_buffer_size"] = f"{_DATA[call.kind]}, and no tf.data.Dataset; {_GIVE_DATASET}"
    if "persistent_iterator" in reasons:
        reasons.setdefault("prefetch_to_device", "it needs persistent_iterator")
    return reasons


def _batch_size_not_reached(call: FitCall, dataset: Any) -> str:
    """Return why the batch size cannot be changed; empty where it can."""
    if call.kind == "dataset":
        (_, why), steps = batch_calls(dataset), call.arguments["steps_per_epoch"]
        if not why and not steps and is_endless(dataset):
            return "the data is endless and fit has no steps_per_epoch, so something else ends the training"
        if why or not steps:
            return why
        batched = next((found for found in upstream(dataset) if apply.kind_of(found) in BATCHES), None)
        parts: Iterable[Any] = () if batched is None else upstream(inputs_of(batched)[0])
        counts = (int(found.cardinality()) for found in parts)
        examples, size = next((count for count in counts if count >= 0), -1), call.batch_size or 0
        is_epoch = examples >= 0 and size and int(steps) in (examples // size, -(-examples // size))
        return "" if is_epoch else "steps_per_epoch is not the number of batches in the data"
    if call.kind == "py_dataset" and not honours_batch_size(call.arguments["x"]):
        return "the PyDataset or Sequence ignores its batch_size attribute"
    return _DATA[call.kind] if call.kind in ("generator", "distributed") else ""
