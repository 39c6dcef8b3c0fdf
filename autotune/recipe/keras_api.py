"""The interface of Keras that autotune needs: a class for Keras 3 (`keras`), a subclass for Keras 2 (`tf_keras`)."""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from autotune.data.errors import ApplyError
from autotune.data.facts import KerasVersion
from autotune.data.models import KnobValue
from autotune.recipe.tf_private import say_missing, tf
from autotune.space.keras_in_use import keras_in_use, keras_of

Scale = Callable[[Any], Any]
"""Returns the learning rate of an update for the optimizer's own rate."""


class KerasApi:
    """Keras 3. A subclass for another Keras overrides what differs there."""

    version: ClassVar[KerasVersion] = KerasVersion.KERAS_3
    update_method: ClassVar[str] = "apply"  # of an optimizer
    rereads_arrays: ClassVar[bool] = True  # `fit` makes a new iterator over arrays for each epoch
    counts_steps: ClassVar[bool] = False  # several steps per execution need data of known cardinality

    @property
    def module(self) -> Any:
        """The package."""
        return importlib.import_module(self.version.package)

    def optimizer_bases(self) -> tuple[Any, ...]:
        """Return the classes whose `update_method` updates the weights for all optimizers."""
        return (self.module.optimizers.Optimizer,)

    def training_calls(self) -> Iterator[tuple[Any, str]]:
        """Yield the methods by which a script trains, with their classes."""
        yield self.module.Model, "fit"
        yield self.module.Model, "train_on_batch"
        for base in self.optimizer_bases():
            yield base, self.update_method

    def building_calls(self) -> Iterator[tuple[Any, str]]:
        """Yield the methods by which a script begins to build a model, with their classes."""
        yield self.module.layers.Layer, "__new__"
        yield self.module.metrics.Metric, "__init__"
        for base in self.optimizer_bases():
            yield base, "__init__"

    # ------------------------------------------------------------------------------------------ what `compile` sets

    def is_compiled(self, model: Any) -> bool:
        """Return whether a model is compiled."""
        return bool(model.compiled)

    def steps_per_execution(self, model: Any) -> int:
        """Return the steps of a compiled model in a call of its train function."""
        return int(model.steps_per_execution)

    def tunes_steps(self, model: Any) -> bool:
        """Return whether Keras changes the steps per execution while it trains."""
        return False

    def jit_compile(self, given: Any) -> KnobValue:
        """Return an argument of `compile` as the knob's value."""
        return given if isinstance(given, str) else bool(given)

    def set_steps(self, model: Any, steps: int) -> None:
        """Set the steps per execution; functions that an earlier `fit` has made would keep theirs."""
        if self.steps_per_execution(model) == steps and not self.tunes_steps(model):
            return
        model.steps_per_execution = steps
        model.train_function = model.test_function = model.predict_function = None

    def tidy_up(self, model: Any, steps: int) -> None:
        """Remove what a `fit` of so many steps per execution leaves behind when an exception ends it."""

    # ------------------------------------------------------------------------------------------ optimizers

    def build_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Make the variables of an optimizer that updates these."""
        optimizer.build(variables)

    def optimizer_variables(self, optimizer: Any) -> list[Any]:
        """Return the variables of an optimizer, its learning rate and loss scale included."""
        return list(optimizer.variables)

    def watch_trained_variables(self) -> None:
        """Note from now on which variables each optimizer updates, where the optimizer does not know."""

    def trained_by(self, optimizer: Any) -> list[Any]:
        """Return the variables that an optimizer updates."""
        return list(getattr(optimizer, "_trainable_variables", ()))

    def updates_of(self, optimizer: Any) -> int:
        """Return how often an optimizer has updated weights so far, also while a function is traced."""
        counted = getattr(optimizer, "_iterations", None)
        if counted is None:
            say_missing("Optimizer._iterations", "a call that is given an iterator counts as one step")
            return 0
        with tf.init_scope():
            return int(counted.value.numpy())

    def finite_steps(self, optimizer: Any) -> Callable[[], int] | None:
        """Return a reader of the steps of a `LossScaleOptimizer` that had finite gradients; None for others."""
        if not isinstance(optimizer, self.module.optimizers.LossScaleOptimizer):
            return None
        # `iterations` would not do: accumulated gradients count once in several steps.
        counter = getattr(optimizer.inner_optimizer, "_iterations", None)
        if counter is None:
            say_missing("Optimizer._iterations", "steps that a loss scale skips are not counted")
            return None
        return lambda: int(counter)

    def scale_rates(self, scale: Scale) -> None:
        """Have every optimizer of this process read its learning rate through `scale`."""
        owner = self.module.optimizers.Optimizer
        usual = next(vars(kind)["learning_rate"] for kind in owner.__mro__ if "learning_rate" in vars(kind))
        owner.learning_rate = property(lambda optimizer: scale(usual.fget(optimizer)), usual.fset)

    # ------------------------------------------------------------------------------------------ data of `fit`

    def sequence_class(self) -> Any:
        """Return the class of data sets that make their batches by index."""
        return self.module.utils.PyDataset

    def loading(self, sequence: Any, arguments: Any) -> dict[str, KnobValue]:
        """Return `workers`, `use_multiprocessing` and `max_queue_size` of a `fit` on such data."""
        return {
            "workers": int(sequence.workers),
            "use_multiprocessing": bool(sequence.use_multiprocessing),
            "max_queue_size": int(sequence.max_queue_size),
        }

    def set_loading(self, sequence: Any, changes: dict[str, KnobValue]) -> None:
        """Change those of them that are no arguments of `fit`."""
        for name, value in changes.items():
            setattr(sequence, name, value)

    def batches(
        self, parts: tuple[Any, Any, Any], *, batch_size: int | None, shuffle: Any, class_weight: Any, epochs: int
    ) -> tuple[Any, int | None]:
        """Return the batches that `fit` makes of `(x, y, sample_weight)`, and their number where it is known.

        With `rereads_arrays` they are those of one epoch, whatever `epochs` is.
        """
        from keras.src.trainers.epoch_iterator import EpochIterator

        x, y, weights = parts
        arguments = {"batch_size": batch_size, "shuffle": shuffle, "class_weight": class_weight}
        adapter = EpochIterator(x=x, y=y, sample_weight=weights, steps_per_epoch=None, **arguments).data_adapter
        return adapter.get_tf_dataset(), adapter.num_batches

    def split_off(self, arrays: tuple[Any, Any, Any], share: float) -> tuple[tuple[Any, Any, Any], Any]:
        """Split arrays as `fit` does: into training data, and the share for validation."""
        from keras.src.trainers.data_adapters import array_slicing

        whole, held_out = array_slicing.train_validation_split(arrays, validation_split=share)
        return whole, held_out


class Keras2(KerasApi):
    """Keras 2, with its optimizers and those of `tf_keras.optimizers.legacy`."""

    version = KerasVersion.KERAS_2
    update_method = "apply_gradients"
    rereads_arrays = False
    counts_steps = True

    def __init__(self) -> None:
        self._trained: weakref.WeakKeyDictionary[Any, dict[int, Any]] | None = None  # by optimizer

    def optimizer_bases(self) -> tuple[Any, ...]:
        optimizers = self.module.optimizers
        return optimizers.Optimizer, optimizers.legacy.Optimizer

    def is_compiled(self, model: Any) -> bool:
        return bool(model._is_compiled)

    def steps_per_execution(self, model: Any) -> int:
        return 1 if model.steps_per_execution is None else int(model.steps_per_execution.numpy())

    def tunes_steps(self, model: Any) -> bool:
        return bool(model.autotune_steps_per_execution)

    def jit_compile(self, given: Any) -> KnobValue:
        return given != "auto" and bool(given)  # there is no rule by which Keras 2 turns XLA on

    def set_steps(self, model: Any, steps: int) -> None:
        super().set_steps(model, steps)
        model.autotune_steps_per_execution = False

    def tidy_up(self, model: Any, steps: int) -> None:
        model.steps_per_execution = steps  # an epoch's last call may have fewer
        model._eval_data_handler = None  # validation data is kept for the next epoch

    def build_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        build = inner._create_all_weights if self._is_legacy(inner) else inner.build
        build(variables)

    def _is_legacy(self, optimizer: Any) -> bool:
        return isinstance(optimizer, self.module.optimizers.legacy.Optimizer)

    def optimizer_variables(self, optimizer: Any) -> list[Any]:
        inner, scale = getattr(optimizer, "inner_optimizer", optimizer), getattr(optimizer, "_loss_scale", None)
        others = list(inner._hyper.values()) if self._is_legacy(inner) else [getattr(inner, "_learning_rate", None)]
        others += [getattr(scale, name, None) for name in ("current_loss_scale", "counter")]
        return [*inner.variables(), *(other for other in others if isinstance(other, tf.Variable))]

    def watch_trained_variables(self) -> None:
        if self._trained is not None:
            return
        trained = self._trained = weakref.WeakKeyDictionary[Any, dict[int, Any]]()
        modern, legacy = self.optimizer_bases()
        # Each update passes all of them to one of these methods first.
        for base, name in ((modern, "build"), (legacy, "_create_all_weights")):
            usual = getattr(base, name)

            def note(optimizer: Any, variables: Any, usual: Callable[..., Any] = usual) -> Any:
                variables = list(variables)
                trained.setdefault(optimizer, {}).update((id(variable), variable) for variable in variables)
                return usual(optimizer, variables)

            setattr(base, name, note)

    def trained_by(self, optimizer: Any) -> list[Any]:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        return list((self._trained or {}).get(inner, {}).values())

    def updates_of(self, optimizer: Any) -> int:
        counted = getattr(optimizer, "_iterations", None)
        if counted is None:  # a legacy optimizer that has updated nothing
            return 0
        with tf.init_scope():
            return int(counted.numpy())

    def finite_steps(self, optimizer: Any) -> Callable[[], int] | None:
        if not isinstance(optimizer, self.module.mixed_precision.LossScaleOptimizer):
            return None
        # Skipped steps count as well, and each halves the loss scale.
        return lambda: int(optimizer.iterations.numpy()) + round(math.log2(float(optimizer.loss_scale)))

    def scale_rates(self, scale: Scale) -> None:
        super().scale_rates(scale)
        # A legacy optimizer reads its rate as a number, or its schedule and its decay.
        legacy, schedule = (
            self.module.optimizers.legacy.Optimizer,
            self.module.optimizers.schedules.LearningRateSchedule,
        )
        usual_hyper, usual_decayed = legacy._get_hyper, legacy._decayed_lr

        def get_hyper(optimizer: Any, name: str, dtype: Any = None) -> Any:
            value = usual_hyper(optimizer, name, dtype)
            return value if name != "learning_rate" or isinstance(value, schedule) else scale(value)

        def decayed_rate(optimizer: Any, dtype: Any) -> Any:
            rate = usual_decayed(optimizer, dtype)
            return scale(rate) if isinstance(optimizer._hyper["learning_rate"], schedule) else rate

        legacy._get_hyper, legacy._decayed_lr = get_hyper, decayed_rate

    def sequence_class(self) -> Any:
        return self.module.utils.Sequence

    def loading(self, sequence: Any, arguments: Any) -> dict[str, KnobValue]:
        kinds = {"workers": int, "use_multiprocessing": bool, "max_queue_size": int}
        return {name: kind(arguments[name]) for name, kind in kinds.items()}

    def set_loading(self, sequence: Any, changes: dict[str, KnobValue]) -> None:
        pass  # all are arguments of `fit`

    def batches(
        self, parts: tuple[Any, Any, Any], *, batch_size: int | None, shuffle: Any, class_weight: Any, epochs: int
    ) -> tuple[Any, int | None]:
        data_adapter = importlib.import_module("tf_keras.src.engine.data_adapter")
        x, y, weights = parts
        dataset, number = x, None
        if not isinstance(x, tf.data.Dataset):
            kind = data_adapter.select_data_adapter(x, y)
            arguments = {"batch_size": batch_size, "shuffle": shuffle, "epochs": epochs}
            adapter = kind(x, y, sample_weights=weights, steps=None, **arguments)
            dataset, number = adapter.get_dataset(), adapter.get_size()
        if class_weight:
            dataset = dataset.map(data_adapter._make_class_weight_map_fn(class_weight))
        return dataset, number

    def split_off(self, arrays: tuple[Any, Any, Any], share: float) -> tuple[tuple[Any, Any, Any], Any]:
        data_adapter = importlib.import_module("tf_keras.src.engine.data_adapter")
        whole, held_out = data_adapter.train_validation_split(arrays, validation_split=share)
        return whole, held_out


_APIS: dict[KerasVersion, KerasApi] = {api.version: api for api in (KerasApi(), Keras2())}
KERAS_PACKAGES = tuple(version.package for version in KerasVersion)


def keras_api(version: KerasVersion | None = None) -> KerasApi:
    """Return the interface of a Keras; by default of the one that this process trains with."""
    return _APIS[version or keras_in_use()]


def api_of(module: Any) -> KerasApi:
    """Return the interface of a Keras that is given as a module."""
    return next(api for api in _APIS.values() if api.version.package == module.__name__)


def refuse_other_keras(value: Any, tuned: KerasVersion) -> None:
    """Raise ApplyError where a model or optimizer is not of the Keras that a recipe was tuned with."""
    used = keras_of(value)
    if used is None or used is tuned:
        return
    hint = "Tune again with the Keras that the training uses now."
    if tuned is KerasVersion.KERAS_2:
        hint = f"Import tf_keras, or set TF_USE_LEGACY_KERAS=1 if the training uses tf.keras. {hint}"
    raise ApplyError(f"the recipe was tuned with {tuned.label}, and the training uses {used.label}", hint=hint)
