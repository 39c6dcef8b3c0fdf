"""What reaches a script's training, once it is about to train: its baseline, its call sites, and what is left out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from autotune.errors import WorkloadError
from autotune.recipe import apply
from autotune.recipe.apply import kind_of
from autotune.scripts import tuned
from autotune.scripts.call_sites import enclosing_ranges
from autotune.scripts.chain import BATCHES, back_from, batch_calls, cacheable, calls_for
from autotune.scripts.facts import ScriptFacts, Site, Trains
from autotune.scripts.fit_call import FitCall, honours_batch_size
from autotune.scripts.loop_watch import LoopWatch
from autotune.scripts.wrapping import Wrappers
from autotune.space.knobs import AS_WRITTEN, KNOBS, Device, KnobValue, Stage
from autotune.worker.datasets import batch_length
from autotune.worker.private_api import inputs_of
from autotune.workloads.workload import WorkloadFacts

ON_CHAIN = ("num_parallel_calls", "prefetch")
"""Knobs that are arguments of `tf.data` calls of the script's."""
UNLOCK = "autotune.tuned(batch_size=N) in the script gives it to code that computes with it"


@dataclass(frozen=True, kw_only=True)
class Around:
    """What is known of a script beside its training."""

    name: str
    shown: str  # the script as the user names it
    file: str
    directory: str
    fingerprint: str
    variables: dict[str, str]
    before_seconds: float
    left_out: tuple[str, ...]
    allow_cache: bool
    wrappers: Wrappers


def facts_of_fit(call: FitCall, number: int, site: Site, around: Around) -> WorkloadFacts:
    """What is known of the script's fit of that number. Raises `WorkloadError` where it cannot be tuned."""
    model, arguments = call.model, call.arguments
    if call.kind == "generator" and not arguments["steps_per_epoch"]:
        raise WorkloadError(
            "fit() is given a generator without steps_per_epoch, so its data cannot be read twice",
            hint="Give fit() steps_per_epoch, or a keras.utils.PyDataset or tf.data.Dataset in place of it.",
        )
    dataset, _ = call.training_dataset()
    given = _baseline(call, dataset, around.wrappers)
    chain = dataset if call.kind == "dataset" else None
    sites = _sites(chain)
    uncached = _cache(chain, given, sites, around)
    schedule = getattr(getattr(model, "optimizer", None), "_learning_rate", None)
    is_schedule = callable(schedule) and hasattr(schedule, "get_config")
    batch_size = int(given.pop("batch_size"))
    facts = ScriptFacts(
        trains=Trains.FIT,
        fit=number,
        fit_site=site,
        compile_site=around.wrappers.compiled_at,
        baseline={**given, "batch_size": batch_size},
        sites=sites,
        not_reached=_unless_asked_for(_not_reached(call, dataset, sites) | uncached),
        left_out=around.left_out,
        before_seconds=around.before_seconds,
        epochs=int(arguments["epochs"]) - int(arguments["initial_epoch"]),
        schedule=type(schedule).__name__ if is_schedule else None,
        variables=around.variables,
        batch_given_as=str(sites["batch_size"][0]) if "batch_size" in sites else "",
    )
    return WorkloadFacts(
        name=around.name,
        batch_size=batch_size,
        baseline=given,
        batched=True,
        drop_remainder=call.drops_remainder(dataset),
        dataset_takes_config="num_parallel_calls" in sites,
        validates=arguments["validation_data"] is not None or bool(arguments["validation_split"]),
        fingerprint=around.fingerprint,
        script=facts,
    )


def facts_of_loop(watch: LoopWatch, examples: int, around: Around) -> WorkloadFacts:
    """What is known of a loop of the script's own. Raises `WorkloadError` where it cannot be tuned."""
    import tensorflow as tf

    dataset = watch.dataset if isinstance(watch.dataset, tf.data.Dataset) else None
    calls, why = batch_calls(dataset) if dataset is not None else ([], "the script makes its batches itself")
    given = runtime_knobs() | {"jit_compile": watch.jit_compile}
    sites = _sites(dataset)
    given |= {knob: _common([_as_knob(each) for each in _given(dataset, knob)]) for knob in ON_CHAIN}
    reasons = {"steps_per_execution": "a loop of its own calls each step by itself"}
    reasons["persistent_iterator"] = "a loop of its own makes its iterators itself"
    if watch.step_function is None:
        reasons["jit_compile"] = "no tf.function without a dataset or a strategy updates the weights"
    if why:
        reasons["batch_size"] = f"{why}; {UNLOCK}"
    if dataset is None:
        options = [name for name, knob in KNOBS.items() if knob.stage is Stage.OPTIONS]
        reasons |= dict.fromkeys(("prefetch", *options), "the training reads no tf.data.Dataset")
    if not sites.get("num_parallel_calls"):
        reasons["num_parallel_calls"] = "no map() or interleave() of the script's feeds the training"
    reasons |= _cache(dataset, given, sites, around)
    batch_size = calls[0].given if calls else examples
    if not batch_size:
        raise WorkloadError(
            f"{around.shown}: how many examples a step takes could not be seen",
            hint="Hand the batch to the step as its first argument.",
        )
    facts = ScriptFacts(
        trains=Trains.LOOP,
        baseline={**given, "batch_size": batch_size},
        sites=sites,
        not_reached=_unless_asked_for(reasons),
        left_out=around.left_out,
        before_seconds=around.before_seconds,
        variables=around.variables,
        batch_given_as=str(calls[0].site) if calls else "",
        step_function=watch.step_function,
        epochs_range=_epochs_range(watch, around),
    )
    return WorkloadFacts(
        name=around.name,
        batch_size=batch_size,
        baseline=given,
        batched=True,
        drop_remainder=bool(calls and calls[0].drop_remainder),
        dataset_takes_config=bool(sites.get("num_parallel_calls")),
        validates=False,
        fingerprint=around.fingerprint,
        script=facts,
    )


def _cache(
    dataset: Any, given: dict[str, KnobValue], sites: dict[str, tuple[Site, ...]], around: Around
) -> dict[str, str]:
    """Make `cache` a knob where that is allowed and a map can be cached; why it is none otherwise."""
    if not around.allow_cache:
        return {}
    site, why = (None, "the training reads no tf.data.Dataset") if dataset is None else cacheable(dataset)
    if site is None:
        return {"cache": why}
    given["cache"], sites["cache"] = False, (site,)
    return {}


def _epochs_range(watch: LoopWatch, around: Around) -> Site | None:
    """The `range()` that the loop over epochs runs by, where the script's own file has one."""
    place, lines = watch.place, []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == around.file:
            lines.append(frame.f_lineno)
        frame = frame.f_back
    if place is not None and place[0] == around.file and lines:
        lines[0] = place[1]  # where the data is read from its beginning
    found = [site for line in lines for site in enclosing_ranges(around.file, line, around.directory)]
    if not found:
        return None
    return found[0] if place is not None else found[-1]


def _baseline(call: FitCall, dataset: Any, wrappers: Wrappers) -> dict[str, KnobValue]:
    """The knobs as the script leaves them."""
    found = runtime_knobs()
    found["batch_size"] = call.batch_size or batch_length(dataset)
    found["jit_compile"] = wrappers.given.get("jit_compile", "auto")
    found["steps_per_execution"] = int(call.model.steps_per_execution)
    chain = dataset if call.kind == "dataset" else None
    found |= {knob: _common([_as_knob(each) for each in _given(chain, knob)]) for knob in ON_CHAIN}
    if call.kind == "py_dataset":
        x = call.arguments["x"]
        found |= {"workers": int(x.workers), "max_queue_size": int(x.max_queue_size)}
        found["use_multiprocessing"] = bool(x.use_multiprocessing)
    return found


def runtime_knobs() -> dict[str, KnobValue]:
    """The knobs that act before a model is built, as they are in force."""
    import tensorflow as tf

    device = Device.GPU if tf.config.list_physical_devices("GPU") else Device.CPU
    found = {name: value for name, value in apply.in_force().items() if device in KNOBS[name].devices}
    return {name: value for name, value in found.items() if value in KNOBS[name].domain}


def _given(dataset: Any, knob: str) -> list[Any]:
    return [] if dataset is None else [each.given for each in calls_for(dataset, knob)]


def _sites(dataset: Any) -> dict[str, tuple[Site, ...]]:
    """Where knobs reach the script's own calls that make a dataset."""
    if dataset is None:
        return {}
    calls = {knob: calls_for(dataset, knob) for knob in ON_CHAIN} | {"batch_size": batch_calls(dataset)[0]}
    found = {knob: {each.site.key: each.site for each in made} for knob, made in calls.items()}
    return {knob: tuple(each.values()) for knob, each in found.items() if each}


def _as_knob(given: Any) -> KnobValue:
    number = 0 if given is None else int(given)
    return "autotune" if number == -1 else number


def _common(values: list[KnobValue]) -> KnobValue:
    """What all calls were given; 0 without any."""
    if not values:
        return 0
    return values[0] if len(set(map(repr, values))) == 1 else AS_WRITTEN


def _not_reached(call: FitCall, dataset: Any, sites: dict[str, Any]) -> dict[str, str]:
    """The knobs that do not reach this training, and why."""
    import tensorflow as tf

    reasons: dict[str, str] = {}
    if call.kind == "dataset":
        _, why = batch_calls(dataset)
        if why:
            reasons["batch_size"] = f"{why}; {UNLOCK}"
        elif call.arguments["steps_per_epoch"] and not _per_batch(call, dataset):
            reasons["batch_size"] = f"steps_per_epoch is not the number of batches in the data; {UNLOCK}"
    elif call.kind == "py_dataset" and not honours_batch_size(call.arguments["x"]):
        reasons["batch_size"] = f"the PyDataset yields no other batches when its batch_size is set; {UNLOCK}"
    elif call.kind in ("generator", "distributed"):
        reasons["batch_size"] = f"the training data is a {call.kind}; {UNLOCK}"
    if "num_parallel_calls" not in sites:
        reasons["num_parallel_calls"] = "no map() or interleave() of the script's feeds the training"
    if call.kind == "arrays":
        reasons["prefetch"] = "Keras makes the batches of arrays, and prefetches them"
    if call.kind not in ("arrays", "dataset"):
        options = [name for name, knob in KNOBS.items() if knob.stage is Stage.OPTIONS]
        for name in ("prefetch", "persistent_iterator", *options):
            reasons[name] = f"the training data is a {call.kind}, and no tf.data.Dataset"
    if call.arguments["steps_per_epoch"]:
        reasons["persistent_iterator"] = "fit is given steps_per_epoch, and keeps its iterator already"
    if call.model.distribute_strategy is not tf.distribute.get_strategy() or tf.distribute.has_strategy():
        reasons["jit_compile"] = "XLA is not used under a tf.distribute strategy"
    return reasons


def _unless_asked_for(reasons: dict[str, str]) -> dict[str, str]:
    """What does not reach the training, but for what the script takes from `autotune.tuned`."""
    return {name: why for name, why in reasons.items() if name not in tuned.given}


def _per_batch(call: FitCall, dataset: Any) -> bool:
    """Whether `steps_per_epoch` is the number of batches that the data has."""
    size, steps = call.batch_size, int(call.arguments["steps_per_epoch"])
    batched = next((each for each in back_from(dataset) if kind_of(each) in BATCHES), None)
    if batched is None or not size:
        return False
    counts = (int(each.cardinality()) for each in back_from(inputs_of(batched)[0]))
    examples = next((each for each in counts if each >= 0), -1)
    return examples >= 0 and steps in (examples // size, -(-examples // size))
