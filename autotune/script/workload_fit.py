"""Turns a `Workload` into a `fit`: makes its model and its datasets, and refuses what cannot be trained."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.data.errors import WorkloadError
from autotune.data.printable import with_article
from autotune.recipe import apply
from autotune.recipe.apply import strategy_of
from autotune.recipe.keras_api import keras_api
from autotune.recipe.tf_private import inputs_of, keras, tf
from autotune.runtime.failures import call_user, is_out_of_memory, make_strategy_error
from autotune.runtime.protocol import Channel, TrialRequest
from autotune.runtime.sources import own_files
from autotune.script.changing_state import OwnSource, code_of
from autotune.script.workload import Workload, call_with_config
from autotune.space.configuration import Configuration
from autotune.space.keras_in_use import keras_in_use, keras_of
from autotune.space.knobs import KNOBS
from autotune.training.fit import Parts, refuse_idle_precision, time_fit
from autotune.training.losses import train_losses
from autotune.training.pipeline import BATCHES, ENDLESS, Batches, batches_in, elements_in, refuse_uneven

LOOK_BATCHES, LOOK_SECONDS = 32, 1.0  # of a dataset that batches by itself: no further one so long after the first


def run(request: TrialRequest, channel: Channel, workload: Workload, configuration: Configuration) -> None:
    """Run one trial of a workload to its end."""
    if request.losses is not None:
        single = configuration.replace(steps_per_execution=1, persistent_iterator=False)
        recorded = single.replace(batch_size=request.losses.recorded_batch_size)
        losses = train_losses(
            request.losses,
            lambda: compiled_model(workload, single),
            lambda: _pipeline(training_data(workload, recorded, examine=False), workload, recorded).dataset,
            batch_size=configuration.batch_size,
            held_out=lambda: validation_data(workload, recorded, training_data(workload, recorded, examine=False)),
            examples=None if request.data is None else request.data.examples,
            fresh_model=workload.model,
        )
        channel.send(losses)
        return
    dataset = training_data(workload, configuration, examine=request.data is None)
    validation = validation_data(workload, configuration, dataset)
    train = _pipeline(dataset, workload, configuration)
    model = compiled_model(workload, train.in_force)
    if request.data is None and not workload.batched and not getattr(model, "inputs", None):
        refuse_batches(workload, train.in_force, dataset)

    def explain(error: Exception) -> WorkloadError | None:
        if workload.batched or is_out_of_memory(error):
            return None
        spec = train.dataset.element_spec
        got = [leaf.shape for leaf in tf.nest.flatten(spec[0] if isinstance(spec, tuple) else spec)]
        for shape, wanted in zip(got, getattr(model, "inputs", None) or [], strict=False):
            takes = tuple(wanted.shape)
            if shape.rank == len(takes) + 1 and tuple(shape[2:]) == takes[1:]:  # two axes are batches
                added = f"with a batch size added, an input has shape {tuple(shape)}"
                return _batched_already(f"{added}, and the model takes {takes}")
        return None

    files = [Path(code.co_filename) for code in code_of(workload.dataset)[:1]]
    source = OwnSource([own for file in files for own in own_files(file, file.parent)], str(files and files[0].parent))
    parts = Parts(
        model=model,
        dataset=dataset,
        validation=validation,
        train=train,
        batched=workload.batched,
        drop_remainder=workload.drop_remainder,
        reads_changing=source.describe_dataset(dataset, model.variables if model.built else ()),
        explain=explain,
    )
    time_fit(request, channel, configuration, parts)


# --------------------------------------------------------------------------------------------- its datasets


def _pipeline(dataset: tf.data.Dataset, workload: Workload, configuration: Configuration) -> apply.TrainingPipeline:
    """Batch and prefetch the training data as the configuration says."""
    return apply.training_pipeline(
        dataset, configuration, batched=workload.batched, drop_remainder=workload.drop_remainder
    )


def training_data(workload: Workload, configuration: Configuration, *, examine: bool) -> tf.data.Dataset:
    """Call the workload's `dataset()`, and refuse a dataset that cannot be timed.

    Without `examine`, only a dataset that batches by itself is read.
    """
    dataset = _call_for_dataset(workload.dataset, "dataset", configuration)
    if not examine and not workload.batched:
        return dataset
    wanted, few = configuration.batch_size, dataset.take(LOOK_BATCHES if workload.batched else 1)
    seen: Batches = call_user("dataset", lambda: batches_in(few, LOOK_SECONDS, wanted))
    if not seen.sizes:
        raise WorkloadError("dataset() yields nothing: it is empty", hint="Check the path or the filter that feeds it.")
    if not workload.batched:
        return dataset
    first = seen.sizes[0]  # looked at with each batch size: one that dataset() ignores would look faster
    if first != wanted and first and not (first < wanted and len(seen.sizes) == 1):  # one batch of it all
        raise WorkloadError(
            f"dataset(config) with batched=True yields batches of {first}, expected "
            f"config.batch_size, which is {wanted}",
            hint="Batch by config.batch_size, or yield single examples without batched=True.",
        )
    refuse_uneven(seen.sizes[:-1], wanted)
    return dataset


def validation_data(workload: Workload, configuration: Configuration, train: tf.data.Dataset) -> tf.data.Dataset | None:
    """Call the workload's `validation()`, and batch it; None without one, or if the training is infinite."""
    if workload.validation is None:
        return None
    held_out = _call_for_dataset(workload.validation, "validation", configuration)
    if elements_in(train) == ENDLESS:
        return None
    if elements_in(held_out) == ENDLESS:
        raise WorkloadError(
            "validation() is infinite, so validation never ends",
            hint="Take as much of it as is validated: dataset.take(N).",
        )
    # Like `fit`, take either: batches have an axis more than single examples.
    ranks = zip(apply.batch_ranks(held_out), apply.batch_ranks(train), strict=False)
    excess = {None if own is None or beside is None else own - beside for own, beside in ranks}
    batched = excess != {-1} if workload.batched else excess == {1}
    return apply.pipeline(held_out, configuration, batched=batched)


def _call_for_dataset(function: Callable[..., Any], part: str, configuration: Configuration) -> tf.data.Dataset:
    dataset = call_user(part, lambda: call_with_config(function, configuration))
    if isinstance(dataset, tf.distribute.DistributedDataset):
        raise make_strategy_error(f"{part}() returned a dataset that a tf.distribute strategy has distributed")
    dataset = apply.as_dataset(dataset) if part == "validation" else dataset
    if not isinstance(dataset, tf.data.Dataset):
        hint = "Wrap arrays as tf.data.Dataset.from_tensor_slices((x, y))."
        if not isinstance(dataset, tuple | list | dict):
            hint = "Wrap it by tf.data.Dataset.from_generator(lambda: …, output_signature=…); one that yields batches, "
            hint += "such as a PyDataset, of config.batch_size and with Workload(batched=True)."
        found = with_article(type(dataset).__name__)
        raise WorkloadError(f"{part}() returned {found}, expected a tf.data.Dataset", hint=hint)
    spec = dataset.element_spec
    if isinstance(spec, tuple) and not 1 <= len(spec) <= 3:
        raise WorkloadError(
            f"{part}() yields tuples of {len(spec)}, expected (x, y) or (x, y, sample_weight)",
            hint="Several inputs go into x, as a tuple or a dict.",
        )
    return dataset


# --------------------------------------------------------------------------------------------- its model


def compiled_model(workload: Workload, configuration: Configuration) -> keras.Model:
    """Build the workload's model, compiled with the configuration's values that act on its dataset."""
    has_strategy = configuration.get("strategy", "none") != "none"  # else in no scope at all: it may misuse one
    with strategy_of(configuration).scope() if has_strategy else contextlib.nullcontext():
        return _compiled(workload, configuration)


def _compiled(workload: Workload, configuration: Configuration) -> keras.Model:
    ours = tf.distribute.get_strategy()
    model = call_user("model", workload.model)
    used, made = keras_in_use(), keras_of(model)
    if made is not None and made is not used:
        raise WorkloadError(
            f"model() returned {with_article(type(model).__name__)} of {made.label}, expected a model of {used.label}",
            hint="Import the same Keras in the workload's file; with TF_USE_LEGACY_KERAS=1 tf.keras is Keras 2.",
        )
    if not isinstance(model, keras.Model):
        raise WorkloadError(
            f"model() returned {with_article(type(model).__name__)}, expected a keras.Model",
            hint="Return the model itself, not compiled; a custom training loop cannot be tuned.",
        )
    strategy = model.distribute_strategy  # TensorFlow would refuse to train it outside
    if tf.distribute.get_strategy() is not ours or strategy is not ours:
        raise make_strategy_error(f"model() builds the model under {with_article(type(strategy).__name__)}")
    if workload.compile is not None:
        _compile(model, workload.compile, configuration)
    elif not keras_api().is_compiled(model):
        raise WorkloadError(
            "model() returned a model that is not compiled, and Workload(compile=None) leaves that to it",
            hint="Call model.compile() in model(), or give its arguments as Workload(compile=…).",
        )
    elif (steps := keras_api().steps_per_execution(model)) != 1:
        raise WorkloadError(
            f"model() compiles with steps_per_execution={steps}, which is a knob",
            hint=f'Leave it out there, and name it in Workload(baseline={{"steps_per_execution": {steps}}}).',
        )
    apply.set_compiled(model, configuration)
    for name, now in apply.overridden(configuration).items():  # else it would be timed under a wrong name
        raise WorkloadError(
            f"a function of the workload sets {name} to {now!r}, which is a knob: this trial's is "
            f"{configuration[name]!r}",
            hint="Remove that line from model(), dataset() or compile(), and set it in "
            f"Workload(baseline={{{name!r}: …}}). It takes {KNOBS[name].domain.describe()}.",
        )
    refuse_idle_precision(model, str(configuration["precision"]))
    return model


def _compile(model: keras.Model, function: Callable[[], Any], configuration: Configuration) -> None:
    """Compile a model with what the workload's `compile()` returns, and the knobs."""
    if keras_api().is_compiled(model):
        raise WorkloadError(
            "model() returned a model that is compiled already",
            hint="Say Workload(compile=None) to train it as it is compiled, or leave model.compile() out of model().",
        )
    arguments = call_user("compile", function)
    if not isinstance(arguments, Mapping):
        raise WorkloadError(
            f"compile() returned {with_article(type(arguments).__name__)}, expected a dict of compile arguments",
            hint='Such as {"optimizer": "adam", "loss": "mse"}; model.compile itself is called by the trial.',
        )
    knobs = apply.compile_arguments(configuration)
    for name in knobs:
        if name in arguments:
            raise WorkloadError(
                f"compile() names {name}, which is a knob",
                hint=f"Move it to Workload(baseline={{{name!r}: {arguments[name]!r}}}).",
            )
    takes = inspect.signature(model.compile).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    taken = {name: value for name, value in knobs.items() if takes_all or name in takes}
    call_user("compile", lambda: model.compile(**arguments, **taken))


def refuse_batches(workload: Workload, configuration: Configuration, dataset: tf.data.Dataset) -> None:
    """Refuse data that is batched already, where nothing tells the shape of the model's inputs.

    Its elements are of an unknown length, or were put together by `.batch()` as tuples. A model may train on batches of
    batches silently, so one is asked to train on the user's first element as it is. Where that fails, the element only
    looks like a batch, as a sequence does.
    """
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(dataset.element_spec)]
    lengths = {shape[0] if shape is not None and shape.rank else -1 for shape in shapes}
    if len(lengths) > 1 or lengths == {-1}:
        return
    made = dataset
    while lengths != {None} and (kind := apply.kind_of(made)) not in BATCHES:
        before = inputs_of(made)
        if len(before) != 1 or kind in ("Unbatch", "FlatMap", "Window"):
            return
        (made,) = before
    if lengths != {None} and not isinstance(made.element_spec, tuple):  # a sequence is made of one tensor
        return
    model = compiled_model(workload, configuration)
    model.run_eagerly = True
    try:
        model.fit(dataset.take(1), verbose=0)
    except Exception:  # whatever a model raises that cannot be trained on it
        return
    raise _batched_already("the model trains on an element of it as it is")


def _batched_already(why: str) -> WorkloadError:
    return WorkloadError(
        f"dataset() yields batches already: {why}",
        hint="Leave .batch() out of dataset(); or batch by config.batch_size and say batched=True.",
    )
