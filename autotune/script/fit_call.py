"""One call of `model.fit` by a script: its data, and how it trains with other knobs."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.data.facts import KerasVersion, ScriptFacts
from autotune.data.models import KnobValue
from autotune.recipe import apply
from autotune.recipe.apply import keras_batches
from autotune.recipe.keras_api import keras_api
from autotune.recipe.tf_private import keras
from autotune.script.dataset_trace import batch_calls, calls_for, examples_of, is_endless, mean_batch
from autotune.script.settings import Settings
from autotune.space.configuration import Configuration
from autotune.space.knobs import KNOBS, Stage

if TYPE_CHECKING:
    import tensorflow as tf

DEFAULT_BATCH = 32  # Keras's, for arrays
VALIDATION_HINT = "Give fit() validation_steps, or validation data that ends, such as dataset.take(N)."
LOADING = ("workers", "use_multiprocessing", "max_queue_size")
MANY_EPOCHS = 1 << 30  # that one iterator reads arrays for
SETTLE_SECONDS, SETTLE_INTERVAL_SECONDS = 30.0, 0.2  # for `compile(steps_per_execution="auto")`
_OF_DATASET = ("persistent_iterator", "per_replica_buffer_size")  # knobs that act on the data of `fit`
FEW_STEPS = 3  # of each `fit` that is not tuned


def few_steps(model: keras.Model, usual: Callable[..., Any], arguments: dict[str, Any], callbacks: list[Any]) -> Any:
    """Run the last epoch of a `fit` for a few steps; its history has the keys that the script may read.

    Callbacks see the first epoch too, in which many initialise their state.
    """
    first, last = int(arguments["initial_epoch"]), last_epochs(arguments, 1)

    def tell(event: str) -> Callable[..., object]:
        return lambda _, logs: [getattr(callback, event)(first, logs) for callback in callbacks if first < last]

    begins = {event: tell(event) for event in ("on_epoch_begin", "on_epoch_end")}
    few = {
        "steps_per_epoch": FEW_STEPS,
        "initial_epoch": last,
        "epochs": last + 1,
        "callbacks": [keras.callbacks.LambdaCallback(**begins), *callbacks],
        "verbose": 0,
        "validation_freq": 1,
    }
    if arguments["validation_data"] is not None or arguments["validation_split"]:
        few["validation_steps"] = 1
    return usual(model, **(arguments | few))


def last_epochs(arguments: Mapping[str, Any], count: int) -> int:
    """Return the first of the last epochs of a `fit`: a script may load a file that is named after its last epoch."""
    return max(int(arguments["initial_epoch"]), int(arguments["epochs"]) - count)


def settle_steps(call: FitCall, usual: Callable[..., Any], callbacks: list[Any]) -> None:
    """Train until Keras has settled on its steps per execution, or for `SETTLE_SECONDS`, and leave it there.

    Keras measures ten times before each change. Here it measures more often than in a long training.
    """
    model, api = call.model, keras_api()
    tuner, began, seen = model._steps_per_execution_tuner, time.perf_counter(), [0]
    tuner.interval = SETTLE_INTERVAL_SECONDS

    def look(*_: Any) -> None:
        changes = tuner.spe_measurement_count // tuner.change_spe_interval
        seen.extend([api.steps_per_execution(model)] * (changes + 1 - len(seen)))
        has_settled = len(seen) > 2 and seen[-1] == seen[-2]
        model.stop_training = has_settled or time.perf_counter() - began > SETTLE_SECONDS

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    usual(model, **{**call.arguments, "epochs": MANY_EPOCHS, "callbacks": [*callbacks, watch], "verbose": 0})
    api.set_steps(model, api.steps_per_execution(model))


@dataclass(frozen=True, kw_only=True)
class FitCall:
    """A call of `fit`, with its arguments by name."""

    model: keras.Model
    arguments: Mapping[str, Any]
    settings: Settings

    @property
    def kind(self) -> str:
        """The kind of its data: `arrays`, `dataset`, `distributed`, `py_dataset`, or `generator`."""
        import tensorflow as tf

        x = self.arguments["x"]
        if isinstance(x, tf.data.Dataset):
            return "dataset"
        if isinstance(x, tf.distribute.DistributedDataset):
            return "distributed"
        if isinstance(x, keras_api().sequence_class()):  # in Keras 2 a `Sequence`
            return "py_dataset"
        return "generator" if hasattr(x, "__next__") else "arrays"

    @property
    def has_workers(self) -> bool:
        """True if workers make the batches of a `PyDataset`."""
        loading = self.loading
        return bool(loading) and (int(loading["workers"]) > 1 or bool(loading["use_multiprocessing"]))

    @property
    def loading(self) -> dict[str, KnobValue]:
        """The script's own `workers`, `use_multiprocessing` and `max_queue_size`; empty without a `PyDataset`."""
        return keras_api().loading(self.arguments["x"], self.arguments) if self.kind == "py_dataset" else {}

    @property
    def changed_loading(self) -> dict[str, KnobValue]:
        """Those of them that the settings change."""
        return {name: self.settings.changes[name] for name in self.loading if name in self.settings.changes}

    @property
    def loading_arguments(self) -> dict[str, KnobValue]:
        """The same as arguments of `fit`, which Keras 2 takes; empty in Keras 3."""
        own = {name: self.arguments[name] for name in LOADING if name in self.arguments}
        return own | self.changed_loading if own else {}

    @property
    def batch_size(self) -> int | None:
        """The script's own; None where it does not show."""
        x, kind = self.arguments["x"], self.kind
        if kind == "arrays":
            steps, rereads = self.arguments["steps_per_epoch"], keras_api().rereads_arrays
            of_steps = math.ceil(self._length_of_arrays / int(steps)) if steps and not rereads else None
            return int(self.arguments["batch_size"] or of_steps or DEFAULT_BATCH)
        if kind == "py_dataset":
            size = _py_dataset_batch_size(x)
            set_here = "batch_size" in self.settings.first and size == self.settings.changes.get("batch_size")
            return int(self.settings.first["batch_size"]) if set_here else size
        calls = batch_calls(x)[0] if kind == "dataset" else []
        return calls[0].given if calls else None

    @property
    def batch_used(self) -> int | None:
        """The batch size with the settings."""
        given = self.batch_size
        if given is None:
            return None
        if self.kind == "dataset":
            return int(batch_calls(self.arguments["x"])[0][0].used)
        return int(self.settings.value_once("batch_size", given))

    @property
    def steps_per_execution(self) -> int:
        """The script's own; where Keras changes them as it trains, those on which it settled in the survey."""
        own = self.settings.own.get("steps_per_execution")
        if own is not None and keras_api().tunes_steps(self.model):
            return int(own)
        return keras_api().steps_per_execution(self.model)

    @property
    def epochs(self) -> int:
        """Epochs that the script asks for."""
        return int(self.arguments["epochs"]) - int(self.arguments["initial_epoch"])

    def with_arrays(self) -> tuple[Any, Any]:
        """Return `(x, y, sample_weight)` and the validation data, with `validation_split` split off."""
        arguments = self.arguments
        whole = (arguments["x"], arguments["y"], arguments["sample_weight"])
        share, held_out = arguments["validation_split"], arguments["validation_data"]
        if share and held_out is None:
            return keras_api().split_off(whole, share)
        return whole, held_out

    @functools.cached_property
    def training_dataset(self) -> tuple[tf.data.Dataset, Any]:
        """The batches of the training as a dataset, and the data that `fit` is given: that, or a `PyDataset`.

        A generator's first batch, which tells its element, is read once.
        """
        (x, y, weights), _ = self.with_arrays()
        kind = self.kind
        if kind == "dataset":
            return x, x
        if kind == "py_dataset":
            if "batch_size" in self.settings.changes and self.batch_used is not None:
                x.batch_size = self.batch_used
            keras_api().set_loading(x, self.changed_loading)
        dataset = keras_batches(
            (x, y, weights),
            counted=kind != "arrays" or keras_api().rereads_arrays,
            batch_size=self.batch_used,
            shuffle=self.arguments["shuffle"],
            class_weight=self.arguments["class_weight"],
            epochs=MANY_EPOCHS if kind == "arrays" else 1,
        )
        return dataset, dataset if kind == "arrays" else x

    def with_class_weight(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Return the batches of the training as `fit` weights them: its `class_weight` is not part of a dataset."""
        weights = self.arguments["class_weight"]
        if self.kind != "dataset" or weights is None:
            return batches
        return keras_batches((batches, None, None), counted=False, shuffle=False, class_weight=weights)

    def validation(self) -> tf.data.Dataset | None:
        """Return the batches of a validation as a dataset; None without a validation."""
        import tensorflow as tf

        _, held_out = self.with_arrays()
        if held_out is None:
            return None
        if not isinstance(held_out, tf.data.Dataset):
            parts = held_out if isinstance(held_out, tuple | list) else (held_out,)
            size = self.arguments["validation_batch_size"] or self.batch_used or DEFAULT_BATCH
            held_out = keras_batches((*parts, None, None)[:3], batch_size=size, shuffle=False, class_weight=None)
        steps = self.arguments["validation_steps"]
        return held_out.take(int(steps)) if steps else held_out

    @property
    def validates_for_ever(self) -> bool:
        """True if its validation data is infinite and its training reaches the end of an epoch."""
        given = self.arguments
        never_validated = is_endless(given["x"]) and not given["steps_per_epoch"]
        return is_endless(given["validation_data"]) and not given["validation_steps"] and not never_validated

    @property
    def steps_per_epoch(self) -> int | None:
        """The script's `steps_per_epoch`, for batches of the size in use; None where the data ends an epoch."""
        given, size, used = self.arguments["steps_per_epoch"], self.batch_size, self.batch_used
        if given:
            return int(given) if not size or not used else max(1, round(int(given) * size / used))
        if self.kind != "arrays" or keras_api().rereads_arrays:
            return None
        return math.ceil(self._length_of_arrays / int(used or DEFAULT_BATCH))  # one iterator reads them in all epochs

    @property
    def _length_of_arrays(self) -> int:
        import tensorflow as tf

        rows = self.with_arrays()[0][0]
        first = tf.nest.flatten(rows)[0]
        return int(first.shape[0]) if hasattr(first, "shape") else len(rows)  # Keras 2 takes lists of numbers

    def examples(self, dataset: tf.data.Dataset) -> int | None:
        """Return the examples of an epoch of these batches; None where they must be counted."""
        used, steps = self.batch_used, self.steps_per_epoch
        if used is None and steps is not None:  # a generator's batches are taken to be as long as its first
            used = int(self.settings.own.get("batch_size", 0)) or None
        if used is None or self.kind == "distributed":
            return None
        if self.kind == "arrays" and not self.arguments["steps_per_epoch"]:
            return self._length_of_arrays
        if steps is not None:
            return round(steps * mean_batch(dataset, used))
        return examples_of(dataset, used)

    def pipeline(self, dataset: tf.data.Dataset, source: Any, configuration: Configuration) -> apply.TrainingPipeline:
        """Return how the training reads its batches with the knobs of a configuration.

        `source` is what `fit` is given: `dataset`, or data that is no dataset.
        """
        steps = self.steps_per_epoch
        own = source is not dataset or self.kind == "distributed"
        acting = configuration
        if own or self.kind == "arrays" or calls_for(dataset, "prefetch"):  # it prefetches by itself
            acting = acting.replace(prefetch=0)
        if own:
            plain = {name: KNOBS[name].default for name in acting if KNOBS[name].stage is Stage.OPTIONS}
            acting = acting.replace(
                persistent_iterator=False, **{name: value for name, value in plain.items() if value is not None}
            )
        if steps is None:
            train = apply.training_pipeline(dataset, acting, batched=True)
        else:
            is_whole = keras_api().version is KerasVersion.KERAS_3  # Keras 2 ends an epoch by a shorter call
            train = apply.pipeline_in_steps(dataset, acting, steps, whole_calls=is_whole)
        in_force = train.in_force.replace(prefetch=configuration["prefetch"])
        return dataclasses.replace(train, in_force=in_force, source=source if own else None)

    def changed_arguments(self, configuration: Configuration, facts: ScriptFacts) -> dict[str, Any]:
        """Return the arguments of `fit` that a configuration changes; none where it is the script's own."""
        changes = self.settings.changes
        acting = {name for name in changes if KNOBS[name].stage is Stage.OPTIONS or name in _OF_DATASET}
        if self.kind != "dataset" or "prefetch" not in facts.sites:
            acting |= changes.keys() & {"prefetch"}
        of_data = {*acting, "batch_size", *LOADING}
        if (self.kind == "arrays" and not acting) or not changes.keys() & of_data:
            keras_api().set_steps(self.model, int(self.settings.value("steps_per_execution", self.steps_per_execution)))
            return {"batch_size": self.batch_used} if "batch_size" in changes else {}
        dataset, source = self.training_dataset
        train = self.pipeline(dataset, source, configuration)
        apply.set_compiled(self.model, train.in_force)
        changed: dict[str, Any] = {**train.fit_args, **self.loading_arguments}
        if self.kind == "arrays":
            changed |= {"y": None, "sample_weight": None, "class_weight": None, "batch_size": None, "shuffle": False}
            changed |= {"validation_split": 0.0, "validation_data": self.with_arrays()[1]}
            changed["validation_batch_size"] = self.arguments["validation_batch_size"] or self.batch_used
        return changed


def _py_dataset_batch_size(x: Any) -> int | None:
    """Return the attribute `batch_size` of a `PyDataset`; None where it has no such number."""
    size = getattr(x, "batch_size", None)
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def honours_batch_size(x: Any) -> bool:
    """Return whether a `PyDataset` yields batches of another size once its attribute `batch_size` is changed."""
    import tensorflow as tf

    size = _py_dataset_batch_size(x)
    if size is None or len(x) < 3:
        return False
    batches = len(x)
    try:
        x.batch_size = 2 * size
        first = tf.nest.flatten(x[0])[0]
        return len(first) == 2 * size and len(x) in (batches // 2, math.ceil(batches / 2))
    except Exception:  # the user's class may raise anything for another size
        return False
    finally:
        x.batch_size = size
