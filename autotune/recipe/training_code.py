"""Compile and train a Keras model in code as the trials of a recipe did: `Recipe.compile` and `Recipe.fit`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, ClassVar

from autotune.data.errors import ApplyError
from autotune.data.facts import KnownWorkload
from autotune.recipe import apply
from autotune.recipe.answer import describe_factor
from autotune.recipe.evidence import RecipeContent
from autotune.recipe.guard import Guard, guard_callback, say
from autotune.recipe.keras_api import keras_api, refuse_other_keras
from autotune.recipe.learning_rate import ScaledTrainings, factor_of
from autotune.recipe.tf_private import inputs_of, keras, naming_callback, tf
from autotune.space.configuration import Configuration, format_value
from autotune.space.knobs import AS_WRITTEN, KNOBS, Stage

_LOADING = ("workers", "use_multiprocessing", "max_queue_size")
_OF_DATASET = ("prefetch", "persistent_iterator", "per_replica_buffer_size")
_SAME_BATCHES = ("Map", "ParallelMap", "Prefetch", "Options", "Repeat", "Cache", "Shuffle", "Take", "Skip")
_WHY = {
    "batch_size": "the data is batched already; batch it by recipe.batch_size",
    "steps_per_execution": "it must divide the steps of an epoch, and their number must be known",
}
_trainings = functools.cache(ScaledTrainings)  # one in a process
_say_once = functools.cache(say)


class TrainingCode(RecipeContent):
    """The part of a recipe that code calls to train."""

    _loads_compiled: ClassVar[bool] = False  # this process loads what the recipe carries; no part of the recipe

    def compile(self, model: keras.Model, *arguments: Any, **named: Any) -> None:
        """Call `model.compile` with these arguments; the recipe decides `jit_compile` and `steps_per_execution`.

        Raises:
            ApplyError: `apply()` was not called, or something has changed what it set. Or the model or optimizer is of
                another Keras or strategy than the recipe, or cannot accumulate gradients as it does.
        """
        self._refuse(model, *arguments, *named.values())
        wanted: dict[str, Any] = apply.compile_arguments(self.configuration)
        if self.configuration.get("graph_step") is True:
            wanted["run_eagerly"] = False
        taken = inspect.signature(model.compile).parameters  # a model may have its own `compile`
        model.compile(*arguments, **named | {name: value for name, value in wanted.items() if name in taken})
        apply.set_compiled(model, Configuration(self.configuration))

    def fit(self, model: keras.Model, *arguments: Any, **named: Any) -> keras.callbacks.History:
        """Call `model.fit` with these arguments, on batches and with the learning rate of the trials.

        Data is what Keras takes: arrays, a `tf.data.Dataset` of single examples or of batches, a `PyDataset`, a
        generator. Arrays and single examples get the recipe's batch size. A knob that the data does not allow is named
        once, and so is a training that is slower than the recipe claims.

        Raises:
            ApplyError: The model is not compiled; or as `compile`.
        """
        self._refuse(model)
        if not keras_api().is_compiled(model):
            hint = "Call recipe.compile(model, optimizer=…, loss=…) first."
            raise ApplyError("recipe.fit() was given a model that is not compiled", hint=hint)
        _, *bound = inspect.signature(keras.Model.fit).bind(model, *arguments, **named).arguments.items()
        given, inputs = {"x": None, **dict(bound)}, getattr(model, "inputs", None) or ()
        if isinstance(given["x"], tuple) and given.get("y") is None and len(inputs) < 2:
            given |= zip(("x", "y", "sample_weight"), given["x"], strict=False)
        wanted = Configuration(self.configuration)
        changed, in_force = self._read_data(given, inputs, wanted)
        apply.set_compiled(model, in_force)
        for name, value in in_force.differences(wanted).items():
            why = _WHY.get(name, "this data does not take it")
            _say_once(f"{name}={format_value(value)}, not the recipe's {format_value(wanted[name])}: {why}")
        guard = guard_callback(Guard(self.evidence, self.machine), in_force.batch_size)
        naming = [naming_callback(model)] if self._loads_compiled else []
        changed["callbacks"] = [*tf.nest.flatten(given.get("callbacks") or []), *naming, guard]
        before, after = Configuration(self.baseline).update_size, wanted.update_size
        after = after // wanted.batch_size * in_force.batch_size  # examples of an update, where gradients accumulate
        rule = self.learning_rate_rule
        scaled: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if rule is not None and (factor := factor_of(rule.rule, after / before)) != 1.0:
            how = f"learning rate {describe_factor(rule.rule, factor)}, as tested"
            _say_once(f"{how}, for batches of {after} instead of {before}")
            scaled = _trainings().scaled(model, factor)
        with scaled:
            return model.fit(**(given | changed))

    def _refuse(self, model: Any, *others: Any) -> None:
        """Raise ApplyError where the recipe is not in force, or something is not of its Keras or its strategy."""
        apply.refuse_overridden(self.configuration)
        for value in (model, *others):
            refuse_other_keras(value, self.workload.keras)
        apply.refuse_another_scope(model, self.configuration)

    def _read_data(
        self, given: dict[str, Any], inputs: Any, wanted: Configuration
    ) -> tuple[dict[str, Any], Configuration]:
        """Return the arguments of `fit` that change, and the configuration that is in force on this data."""
        x, held_out, steps = given["x"], given.get("validation_data"), given.get("steps_per_epoch")
        api, size, batched = keras_api(), wanted.batch_size, True
        changed: dict[str, Any] = {"validation_batch_size": given.get("validation_batch_size") or size}
        if isinstance(held_out, tf.data.Dataset) and not _is_batched(held_out, inputs, self.workload):
            changed["validation_data"] = apply.pipeline(held_out, wanted.replace(persistent_iterator=False))
        if steps:
            per_call = int(wanted["steps_per_execution"])
            if not api.counts_steps:  # Keras 3 would run past the end of the epoch
                per_call = apply.largest_divisor(int(steps), per_call)
            wanted = wanted.replace(persistent_iterator=False, steps_per_execution=per_call)
        idle: dict[str, Any] = {
            name: KNOBS[name].default for name in wanted if KNOBS[name].stage is Stage.OPTIONS or name in _OF_DATASET
        }
        loading = {name: wanted[name] for name in _LOADING if name in wanted}
        if isinstance(x, api.sequence_class()):
            api.set_loading(x, loading)
            taken = inspect.signature(keras.Model.fit).parameters
            changed |= {name: value for name, value in loading.items() if name in taken}
        else:
            wanted = wanted.replace(**{name: self.baseline[name] for name in loading})
        if isinstance(x, tf.data.Dataset):
            batched = _is_batched(x, inputs, self.workload)
            shown = f"single examples, of which {size} make a batch"
            if batched:
                own = _batch_size_of(x)
                shown = f"batches of {own}" if own else "batches, whose size does not show"
                wanted = wanted.replace(batch_size=own or size)
            _say_once(f"the dataset is taken to hold {shown}")
        elif not all(hasattr(leaf, "shape") or isinstance(leaf, int | float | str) for leaf in tf.nest.flatten(x)):
            own = getattr(x, "batch_size", None)  # of a `PyDataset`; a generator does not show it
            idle |= {"batch_size": own} if isinstance(own, int) else {}
            if api.counts_steps and not steps and not hasattr(x, "__len__"):
                idle["steps_per_execution"] = 1
            return changed, wanted.replace(**idle)
        elif all(wanted[name] in (value, AS_WRITTEN) for name, value in idle.items()):
            return {**changed, "batch_size": size}, wanted  # Keras makes the batches
        else:
            parts, share = (x, given.get("y"), given.get("sample_weight")), given.get("validation_split")
            if share and held_out is None:
                parts, changed["validation_data"] = api.split_off(parts, share)
            shuffle, weights = given.get("shuffle", True), given.get("class_weight")
            x = apply.keras_batches(parts, batch_size=size, shuffle=shuffle, class_weight=weights)
            changed |= dict.fromkeys(("y", "sample_weight", "class_weight")) | {
                "shuffle": False,
                "validation_split": 0.0,
            }
            if steps:
                x = x.repeat()
            elif not api.rereads_arrays:
                wanted = wanted.replace(persistent_iterator=True)
        train = apply.training_pipeline(x, wanted, batched=batched, drop_remainder=self.workload.drop_remainder)
        in_force = train.in_force.replace(prefetch=wanted["prefetch"])
        if api.counts_steps and not steps and train.dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY:
            in_force = in_force.replace(steps_per_execution=1)
        return changed | train.fit_args | {"batch_size": None}, in_force


def _is_batched(dataset: tf.data.Dataset, inputs: Any, workload: KnownWorkload) -> bool:
    """Return whether a dataset yields batches: by the model's inputs, the recipe's batches, or its elements."""
    spec = dataset.element_spec
    parts = tf.nest.flatten(spec[0] if isinstance(spec, tuple) else spec)
    shapes = [getattr(part, "shape", tf.TensorShape(None)) for part in parts]
    ranks = [shape.rank for shape in shapes]
    known: list[Any] = [len(tensor.shape) for tensor in inputs]
    if ranks == [1] and known == [2] and inputs[0].shape[-1] == 1 and shapes[0][0] != 1:
        known = [1]  # Keras adds the second axis
    for expected in (known, list(workload.batch_ranks or ())[: len(ranks)]):
        if len(expected) == len(ranks) and None not in (*ranks, *expected):
            missing = int(sum(expected) - sum(ranks))
            if missing in (0, len(ranks)):
                return missing == 0
    return apply.looks_batched(dataset)


def _batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """Return the size of a dataset's batches; None where it does not show."""
    size = getattr(dataset, "_batch_size", None)
    if size is None and apply.kind_of(dataset) in _SAME_BATCHES:
        return _batch_size_of(inputs_of(dataset)[0])
    return None if size is None else int(size)
